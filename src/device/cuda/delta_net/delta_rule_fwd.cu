/* delta_rule_fwd.cu - the gated delta rule over packed sequences, from the start or from a state: which kernels.
 *
 * Rows go through a sequence's chunks (delta_chunk_mma.cu), or one of each sequence by steps that read S without writing it
 * (delta_step_mma.cu): decoding, and the rows of a step with drafts one after the other. Sequences with more rows leave their open
 * chunk's keys and G by the kernel here, when nobody reads the old ones any more.
 *
 * Invariant: a row's bits do not depend on what computes it; both kernels have the order of sums of delta_mma.cuh. */
#include "device/cuda/delta_net/delta_mma.cuh"

typedef __nv_bfloat16 bf16;

enum { FEW_ROWS = 4 }; /* of a sequence: as many steps are quicker than a chunk's products */

/* Keys and G of the open chunk that a sequence ends in, to its slot. A block: a key head of a sequence. */
template <typename T> static __global__ void __launch_bounds__(DELTA_THREADS) delta_open_kernel(const delta_job<T> j) {
    __shared__ float g[DELTA_C];
    const delta_seq s = delta_seq_at(j, blockIdx.y);
    const int64_t head = blockIdx.x, end = s.pos0 + s.n, chunk = end / DELTA_C * DELTA_C;
    const int n0 = (int)(s.pos0 > chunk ? s.pos0 - chunk : 0), n1 = (int)(end - chunk);
    const int64_t t = s.row0 + s.n - (n1 - n0); /* the row of n0 */
    if (s.n == 0) return;
    const int64_t keys = (s.slot * j.hk + head) * DELTA_C;
    for (int i = n0 + threadIdx.x / 32; i < n1; i += DELTA_WARPS) {
        const lane_head k = head_load(j.qkv + (t + i - n0) * j.width + (j.hk + head) * j.dk, j.dk);
        const float r = head_scale(k);
        head_put(j.k + (keys + i) * j.dk, k, j.dk);
        if ((threadIdx.x & 31) == 0) j.r[keys + i] = r;
    }
    for (int64_t n = head * j.group; n < (head + 1) * j.group; n++) {
        float *const slot_g = j.g + (s.slot * j.hv + n) * DELTA_C;
        for (int i = n0 + threadIdx.x; i < n1; i += DELTA_THREADS)
            g[i] = delta_g(act_at(j.a_log, n), delta_input(j, t + i - n0, n));
        __syncthreads();
        if (threadIdx.x == 0) running_sum(g, n0, n1, n0 ? slot_g[n0 - 1] : 0.0f);
        __syncthreads();
        for (int i = n0 + threadIdx.x; i < n1; i += DELTA_THREADS) slot_g[i] = g[i];
        __syncthreads();
    }
}

template <typename T> static int forward_any(struct cuda *c, const struct delta_args *a) {
    const delta_job<T> j = delta_job_of<T>(a);
    if (a->seqs.n == 0) return 0;
    if (!aligned16(j.qkv)) FAIL(ERR_INVAL, "cuda delta rule: heads are copied by 16 bytes, which they are not aligned to");
    if (j.s && a->seqs.max_rows <= FEW_ROWS) {
        for (int row = 0; row < (int)a->seqs.max_rows; row++) TRY(delta_step_mma(c, a, j, row));
        return 0;
    }
    TRY(delta_chunk_mma(c, a, j));
    if (j.s) CU_TRY(cuda_launch_plain(c, delta_open_kernel<T>, dim3((unsigned)j.hk, (unsigned)a->seqs.n), DELTA_THREADS, 0, j));
    return 0;
}

int cuda_delta_fwd(struct dev *d, const struct delta_args *a) {
    return a->qkv.dt == DT_BF16 ? forward_any<bf16>(cuda_of(d), a) : forward_any<float>(cuda_of(d), a);
}
