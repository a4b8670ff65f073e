/* gemm_swiglu_sm90.cu - the gate_up GEMM at large M with a fused SwiGLU epilogue, on Hopper: gate and up
 * never reach memory.
 *
 * A block's 256 columns are 128 of gate and the 128 of up at their side (gemm_epilogue_sm90.cuh), so a
 * lane has both of an element.  They are rounded to bf16 first, as they would be when stored.
 *
 * Invariant: bitwise identical to the GEMM and the SwiGLU kernel of device/cuda/elementwise.cu where the GEMM's sums are, which
 * is checked at run time (gemm_autotune.cu). */
#include "device/cuda/gemm/gemm.cuh"
#include "device/cuda/gemm/gemm_epilogue_sm90.cuh"
#include "device/cuda/swiglu.cuh"

enum { COLS = BN / 2 };      /* of a block */
enum { X_BYTES = 16 << 20 }; /* x of one launch: every column of tiles reads it again, so it has to fit L2 */

struct swiglu_epilogue {
    const struct gemm_tiles &p;
    const CUtensorMap *out;

    __device__ __forceinline__ void begin(int64_t) const {}
    __device__ __forceinline__ void end(float (&z)[32][4], uint32_t smem, int group, int row, int col) const {
#pragma unroll
        for (int n = 0; n < 16; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float gate = __bfloat162float(__float2bfloat16_rn(z[n][e]));
                z[n][e] = swiglu(gate, __bfloat162float(__float2bfloat16_rn(z[n + 16][e])));
            }
        gemm_store_bf16<2>(z, out, smem, group, {row, col}, p.cols);
    }
    __device__ __forceinline__ void done() const {
        if (threadIdx.x % GROUP == 0) tma_store_wait();
    }
};

__global__ void CLUSTER_OF_TWO __launch_bounds__(THREADS, 1)
    gemm_swiglu_kernel(const struct gemm_tiles p, const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w,
                       const __grid_constant__ CUtensorMap out) {
    gemm_block(p, &x, &w, swiglu_epilogue{p, &out});
}

static bool takes(const struct cuda *c, const struct cuda_gemm_args *a) {
    return cuda_hopper(c) && c->smem_max >= SMEM && a->in == DT_BF16 && a->out_dt == DT_BF16 && !a->bias && !a->add &&
           a->n % 16 == 0 && a->k % 8 == 0 && a->ld_out == a->n / 2 && a->n / 2 <= INT32_MAX &&
           (((uintptr_t)a->a | (uintptr_t)a->b | (uintptr_t)a->out) & 15) == 0;
}

int gemm_swiglu_fused(struct cuda *c, const struct cuda_gemm_args *a, bool *ran) {
    const int64_t f = a->n / 2, pairs = X_BYTES / (a->k * 2) / (2 * BM), most = (pairs < 1 ? 1 : pairs) * 2 * BM;
    CUtensorMap x, w, out;
    unsigned blocks = 0;
    *ran = takes(c, a);
    for (int64_t row = 0; *ran && row < a->m; row += most) {
        const int64_t n = gemm_min(most, a->m - row);
        const struct gemm_tiles p = gemm_tiles_of(n, f, a->k, COLS, f);
        TRY(cuda_tensor_map(&x, (const __nv_bfloat16 *)a->a + row * a->k, n, a->k, BM));
        TRY(cuda_tensor_map(&w, a->b, a->n, a->k, COLS));
        TRY(cuda_tensor_map(&out, (__nv_bfloat16 *)a->out + row * f, n, f, 64));
        TRY(gemm_prepare(c, (const void *)gemm_swiglu_kernel, p, &blocks));
        CU_TRY(cuda_launch_pdl(c, gemm_swiglu_kernel, blocks, THREADS, SMEM, p, x, w, out));
    }
    return 0;
}
