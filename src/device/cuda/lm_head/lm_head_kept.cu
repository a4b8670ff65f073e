/* lm_head_kept.cu - the gradient of the logits from kept logits: memory in, memory out, 4 bytes an entry read and 2 written.
 *
 * Invariant: the bits of cuda_head_fused_dz, which makes the logits again (kept_logits.cuh). */
#include "device/cuda/lm_head/kept_logits.cuh"

enum { KEPT_THREADS = 2 * DEV_KEPT_ROWS /* a warp for each 16 rows of a tile */, KEPT_PIECE = 8 /* accumulators at a time */ };

struct kept_job {
    struct dz_rows rows;
    const float4 *kept;
    int64_t first, tiles, cols; /* first: row there of the block's first one; tiles: of the vocabulary; cols: of dz */
    __nv_bfloat16 *dz;          /* (rows, cols) */
};

/* Lane q of four has pairs v[n] of columns 8 n + 2 q; afterwards all pairs of n = q, in column order. */
static __device__ __forceinline__ void quad_transpose(uint32_t (&v)[4]) {
    const int q = (int)threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const uint32_t other = __shfl_xor_sync(WARP_ALL, q & 1 ? v[i] : v[i + 1], 1);
        if (q & 1) v[i] = other;
        else v[i + 1] = other;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t other = __shfl_xor_sync(WARP_ALL, q & 2 ? v[i] : v[i + 2], 2);
        if (q & 2) v[i] = other;
        else v[i + 2] = other;
    }
}

/* 64 columns from col on of the lane's rows: 64 contiguous bytes of a row by four lanes. */
static __device__ __forceinline__ void store_piece(const struct kept_job &j, const float (&z)[KEPT_PIECE][4], int64_t row,
                                                   int64_t col) {
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int n = 0; n < KEPT_PIECE; n += 4) {
            uint32_t v[4];
#pragma unroll
            for (int k = 0; k < 4; k++) v[k] = pack_bf16(z[n + k][2 * i], z[n + k][2 * i + 1]);
            quad_transpose(v);
            const int64_t r = row + 8 * i, c = col + (n + (int)threadIdx.x % 4) * 8;
            if (r >= 0 && r < j.rows.rows && c < j.cols) *(uint4 *)(j.dz + r * j.cols + c) = make_uint4(v[0], v[1], v[2], v[3]);
        }
}

/* Block (x, y): the x-th tile of dz's columns, the y-th tile of rows. */
template <bool ENTROPY> __global__ static void __launch_bounds__(KEPT_THREADS) kept_dz_kernel(const struct kept_job j) {
    const int64_t kept = (j.first / DEV_KEPT_ROWS + blockIdx.y) * DEV_KEPT_ROWS + threadIdx.x / 32 * 16;
    const int64_t row = kept - j.first + threadIdx.x % 32 / 4, col = (int64_t)blockIdx.x * DEV_KEPT_COLS;
    if (kept + 16 <= j.first || kept - j.first >= j.rows.rows) return; /* the whole warp */
    const struct dz_row r[2] = {read_row(j.rows, row), read_row(j.rows, row + 8)};
    const float4 *const from = j.kept + kept_index(kept, j.rows.lo + col, j.tiles);
#pragma unroll
    for (int n = 0; n < DEV_KEPT_COLS / 8; n += KEPT_PIECE) {
        float z[KEPT_PIECE][4];
        if (col + n * 8 >= j.cols) break;
        kept_load(z, from + n * 32);
        gradients<ENTROPY>(z, r, col + n * 8);
        store_piece(j, z, row, col + n * 8);
    }
}

int cuda_head_kept_dz(struct cuda *c, const struct lmhead_args *a, const struct lmhead_bwd_args *g, const struct head_block &b,
                      void *dz) {
    struct kept_job j = {};
    j.rows = dz_rows_of(a, g, b);
    j.kept = (const float4 *)a->kept.data;
    j.first = a->kept_at + b.row, j.tiles = a->kept.dim[1] / DEV_KEPT_COLS, j.cols = b.cols;
    j.dz = (__nv_bfloat16 *)dz;
    const int64_t end = j.first + b.rows;
    const dim3 grid((unsigned)((b.cols + DEV_KEPT_COLS - 1) / DEV_KEPT_COLS),
                    (unsigned)((end + DEV_KEPT_ROWS - 1) / DEV_KEPT_ROWS - j.first / DEV_KEPT_ROWS));
    const auto kernel = g->dentropy.data ? kept_dz_kernel<true> : kept_dz_kernel<false>;
    CU_TRY(cuda_launch_plain(c, kernel, grid, KEPT_THREADS, 0, j));
    return 0;
}
