/* attention_latent.cuh - what the kernels of attention whose values are its keys (latent attention) share: sizes, operands of
 * rows in shared memory, the two halves of a score.
 *
 * Invariant: a row has the same bits in all forward kernels: tiles of keys ascending, a score the sum of two sums over columns
 * ascending, the steps of online_softmax.cuh and the sums of attention_fwd.cu. */
#ifndef VERLC_DEV_CUDA_ATTENTION_LATENT_CUH
#define VERLC_DEV_CUDA_ATTENTION_LATENT_CUH

#include "device/cuda/attention/online_softmax.cuh"

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

/* attention_latent_decode.cu: one row of each sequence. *ran: false, it does not take this device or batch. */
int cuda_attn_decode_latent(struct cuda *c, const struct attn_args *a, struct cuda_attn p, bool *ran);

#endif
