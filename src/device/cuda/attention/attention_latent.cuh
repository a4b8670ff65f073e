/* attention_latent.cuh - what the kernels of attention whose values are its keys (latent attention) share: sizes, operands of
 * rows in shared memory, the two halves of a score.
 *
 * Invariant: a row has the same bits in all forward kernels: tiles of keys ascending, a score the sum of two sums over columns
 * ascending, the steps of online_softmax.cuh and the sums of attention_fwd.cu. */
#ifndef VERLC_DEV_CUDA_ATTENTION_LATENT_CUH
#define VERLC_DEV_CUDA_ATTENTION_LATENT_CUH

#include "device/cuda/attention/online_softmax.cuh"
#include "device/cuda/wgmma.cuh"

enum { LATENT_SIZE = 576, /* most elements of a head; the rest is zeros */ LATENT_STEPS = LATENT_SIZE / 16 };
static constexpr int LATENT_STRIDE = tile_stride(LATENT_SIZE);

/* A score is two sums, so that no chain of MMAs is longer than it must be: which of them has columns [16 step, 16 step + 16). The
 * score is the first, plus the second. */
static constexpr __host__ __device__ int latent_half(int step) { return step / 2 % 2; }

/* Operand A of 16 rows of a tile from `rows` on, k in [16 step, 16 step + 16). */
static __device__ __forceinline__ void load_a(uint32_t (&x)[4], uint32_t rows, int stride, int step) {
    const int lane = (int)threadIdx.x % 32;
    ldmatrix_x4(x, rows + (uint32_t)(lane % 16 * stride + lane / 16 * 16 + step * 32));
}

/* ---- tiles of 64 or 32 rows as nine panels of 64 columns (wgmma.cuh), which eight warps copy ---- */

enum { LATENT_WARPS = 8, LATENT_PANELS = LATENT_SIZE / 64 };
static constexpr __host__ __device__ int latent_panel(int rows) { return rows * PANEL_ROW; } /* bytes */
enum { LATENT_PANEL = 64 * PANEL_ROW, LATENT_ROWS = LATENT_PANELS * LATENT_PANEL };

/* Queues the copy of this warp's N of 8 N rows of src, by lane % N rows number `mine`, zeros where that is negative. WHOLE: it is
 * nowhere, and a head has all its elements: a copy is then few instructions, which those that compute wait for. */
template <int N, bool WHOLE>
static __device__ __forceinline__ void latent_copy_rows(const struct cuda_attn &a, const void *src, int mine, uint32_t to) {
    const int lane = (int)threadIdx.x % 32, first = (int)threadIdx.x / 32 * N;
    const auto copy = [&](int row, int of_row, int chunk) {
        const bool take = WHOLE || (of_row >= 0 && chunk * 8 < a.dim);
        const uint16_t *const from = (const uint16_t *)src + (WHOLE  ? (int64_t)of_row * LATENT_SIZE + chunk * 8
                                                              : take ? (int64_t)of_row * a.dim + chunk * 8
                                                                     : 0);
        cp_async16(to + (uint32_t)(chunk / 8 * latent_panel(LATENT_WARPS * N)) + panel_offset(first + row, chunk % 8), from, take);
    };
    static_assert(N == 4 || N == 8, "of each row 72 chunks: 32, 32, and 8 of four rows at a time");
#pragma unroll
    for (int row = 0; row < N; row++) {
        const int of_row = __shfl_sync(WARP_ALL, mine, row);
        copy(row, of_row, lane);
        copy(row, of_row, lane + 32);
    }
#pragma unroll
    for (int four = 0; four < N; four += 4) {
        const int row = four + lane / 8;
        copy(row, __shfl_sync(WARP_ALL, mine, row), 64 + lane % 8);
    }
}
template <int N>
static __device__ __forceinline__ void latent_copy(const struct cuda_attn &a, const void *src, int mine, uint32_t to) {
    if (a.dim < LATENT_SIZE || __any_sync(WARP_ALL, mine < 0)) latent_copy_rows<N, false>(a, src, mine, to);
    else latent_copy_rows<N, true>(a, src, mine, to);
}
/* Where this lane's key of a tile is, for latent_copy; -1: not one of [lo, hi). */
static __device__ __forceinline__ int latent_key(const struct cuda_attn &a, int seq, int tile, int lo, int hi) {
    const int j = tile * DEV_KEY_TILE + (int)threadIdx.x / 32 * 8 + (int)threadIdx.x % 8;
    return j >= lo && j < hi ? key_row(a, seq, 0, j) : -1;
}
static_assert(DEV_KEY_TILE == 64 && LATENT_SIZE == 576, "a tile of keys is 64 rows, of nine panels");

/* End of the packed rows that see the key j keys behind the first row's own, which start at j * group. */
static __device__ __forceinline__ int rows_end(const struct cuda_attn &a, const struct seq_rows &s, int j) {
    return a.window > 0 && j < s.n - a.window ? (j + a.window) * a.group : s.packed;
}

/* ---- host; *ran: false, it does not take this device or batch ---- */

/* attention_latent_decode_sm90.cu: one row of each sequence. */
int cuda_attn_decode_latent_sm90(struct cuda *c, const struct attn_args *a, struct cuda_attn p, bool *ran);
/* attention_latent_fwd_sm90.cu, attention_latent_bwd_sm90.cu; backward reads p.stat. */
int cuda_attn_fwd_latent_sm90(struct cuda *c, const struct attn_args *a, struct cuda_attn p, bool *ran);
int cuda_attn_bwd_latent_sm90(struct cuda *c, const struct attn_args *a, struct cuda_attn p, bool *ran);

#endif
