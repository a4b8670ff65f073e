/* delta_mma.cuh - what the tensor-core kernels of the gated delta rule's forward share: f32 numbers as parts of bf16, the order of
 * a product's instructions, what scales a product.
 *
 * All products are mma.m16n8k16 on f32 accumulators, and all lie the same way: columns of values (of S, e), or keys j where keys
 * are multiplied with keys, are the instruction's 16 rows (operand A), the chunk's rows i, or elements d of S', its 8 columns
 * (operand B). So S transposed is an accumulator, and with its numbers in place the operand of the next product; a decoding step
 * has its k and q in two columns of B.
 *
 * Invariant: an accumulator takes k16 steps ascending, of each the pairs of parts in mma_parts' order, k in its natural order
 * within an instruction. Which row or column of a tile a number has, and in which kernel, changes no bit. */
#ifndef VERLC_DEV_CUDA_DELTA_MMA_CUH
#define VERLC_DEV_CUDA_DELTA_MMA_CUH

#include "device/cuda/delta_net/delta_rule.cuh"
#include "device/cuda/ptx.cuh"

/* Parts of what the convolution gave (X) and of f32 numbers (F); of a product those pairs are made whose numbers' sum is below
 * MOST. */
template <typename T> struct delta_parts {
    enum { X = 3, F = 3, MOST = X > F ? X : F };
};
template <> struct delta_parts<__nv_bfloat16> {
    enum { X = 1, F = 2, MOST = X > F ? X : F };
};

/* Two numbers as P words of bf16 pairs, the larger parts first: x0 = x rounded, x1 = x - x0 rounded, ... */
template <int P> static __device__ __forceinline__ void split_pair(uint32_t (&w)[P], float lo, float hi) {
#pragma unroll
    for (int p = 0; p < P; p++) {
        w[p] = pack_bf16(lo, hi);
        if (p + 1 == P) break;
        lo = __fsub_rn(lo, __uint_as_float(w[p] << 16)), hi = __fsub_rn(hi, __uint_as_float(w[p] & 0xffff0000u));
    }
}

/* acc[r][n] += tiles a[r] (16, 16) . b[n] (16, 8), one k16 step: A has parts of PA, B of PB, of each pair with part numbers
 * i of B and j of A the largest i + j first, of equal sums the smallest i. Tiles take turns, so that chains do not wait. */
template <int MOST, int R, int PA, int N, int PB>
static __device__ __forceinline__ void mma_parts(float (&acc)[R][N][4], const uint32_t (&a)[R][PA][4],
                                                 const uint32_t (&b)[N][PB][2]) {
#pragma unroll
    for (int sum = MOST - 1; sum >= 0; sum--)
#pragma unroll
        for (int i = 0; i < PB; i++) {
            const int j = sum - i;
            if (j < 0 || j >= PA) continue;
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int n = 0; n < N; n++) mma_bf16(acc[r][n], a[r][j], b[n][i][0], b[n][i][1]);
        }
}

/* Where a lane's numbers of an accumulator are: acc[x] in row acc_row(x), column acc_col(x). */
static __device__ __forceinline__ int acc_row(int x) { return ((int)threadIdx.x & 31) / 4 + (x & 2 ? 8 : 0); }
static __device__ __forceinline__ int acc_col(int x) { return ((int)threadIdx.x & 3) * 2 + (x & 1); }
/* Two accumulators (16, 8), left and right, as operand A (16, 16). */
template <int P>
static __device__ __forceinline__ void acc_split(uint32_t (&a)[P][4], const float (&left)[4], const float (&right)[4]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float(&c)[4] = h ? right : left;
        uint32_t w[2][P];
        split_pair(w[0], c[0], c[1]), split_pair(w[1], c[2], c[3]);
#pragma unroll
        for (int p = 0; p < P; p++) a[p][2 * h] = w[0][p], a[p][2 * h + 1] = w[1][p];
    }
}

/* The element of a tile (16, 16) in shared memory, `ld` elements a row, whose address a lane gives to ldmatrix_x4. by_rows:
 * operand A (m, k); with .trans, of memory (k, n), r[0], r[1] are B of columns 0 .. 7, r[2], r[3] of columns 8 .. 15. by_cols: of
 * memory (n, k) those two B; with .trans, of memory (k, m), operand A. */
static __device__ __forceinline__ int tile_by_rows(int ld) {
    const int lane = (int)threadIdx.x & 31;
    return (lane & 15) * ld + (lane & 16) / 2;
}
static __device__ __forceinline__ int tile_by_cols(int ld) {
    const int lane = (int)threadIdx.x & 31;
    return ((lane & 7) + (lane & 16) / 2) * ld + (lane & 8);
}

/* What makes numbers of products: r = 1 / |x_k|, rq = 1 / |x_q| times delta_q_scale, by = exp(G), left = exp(G_63 - G_j).
 * a_ij, p_ij; u_i from v_i and x_k . S; o_i's beginning from x_q . S; e_i; what S' takes of row j. */
static __device__ __forceinline__ float delta_pair(float dot, float ri, float rj, float gi, float gj) {
    return __fmul_rn(__fmul_rn(dot, __fmul_rn(ri, rj)), decay_exp(__fsub_rn(gi, gj)));
}
static __device__ __forceinline__ float delta_u(float dot, float by, float r, float v) {
    return __fmaf_rn(-__fmul_rn(by, r), dot, v);
}
static __device__ __forceinline__ float delta_o(float dot, float by, float rq) { return __fmul_rn(__fmul_rn(by, rq), dot); }
static __device__ __forceinline__ float delta_e(float beta, float u, float sum) { return __fmul_rn(beta, __fsub_rn(u, sum)); }
static __device__ __forceinline__ float delta_we(float left, float r, float e) { return __fmul_rn(__fmul_rn(left, r), e); }

/* Launches: rows of all sequences but for the open chunk's keys and G; row `row` of each sequence, if it has so many. */
template <typename T> int delta_chunk_mma(struct cuda *c, const struct delta_args *a, const delta_job<T> &j);
template <typename T> int delta_step_mma(struct cuda *c, const struct delta_args *a, const delta_job<T> &j, int row);

#endif
