/* attention_latent_bwd_sm90.cu - backward of attention whose values are its keys (latent attention) on Hopper's WGMMA, after the
 * sums of out and dout that attention_latent.cu makes. attention_latent.cu serves other GPUs.
 *
 * A block has dk or dv of 64 keys, or dq of 64 packed rows, in the registers of two warpgroups: each has 4 or 5 of nine panels of
 * columns. What it keeps of its operands stays in shared memory; 32 rows, or keys, at a time of the others are copied while those
 * before are computed on. One warpgroup makes the scores and one dout . V^T (for dv, each half of the scores' columns). They swap
 * a half, so that each has p and ds of 16 of the 32, and swap those as A operands of the last MMA. All blocks are of one kernel,
 * those of keys first, as they take longer.
 *
 * Invariant: no atomics; dk and dv sum over packed rows ascending, dq over keys ascending, in tiles counted from the start of the
 * sequence: a sequence's gradients do not depend on its place in the batch. */
#include "device/cuda/attention/attention_latent.cuh"

enum { ROWS = 64, SOME = 32, GROUP = 128, GROUPS = 2, THREADS = GROUPS * GROUP, LEFT = 5 };
enum { OPERAND = LATENT_ROWS, STREAM = OPERAND / 2 }; /* bytes of 64 rows and of 32 */
/* operands, numbers that two threads swap, (lse, delta) of the rows of two stages */
enum { SWAP_AT = 3 * OPERAND, STAT_AT = SWAP_AT + THREADS * 32, SMEM = STAT_AT + 2 * SOME * 8 };
enum of { DQ, DK, DV };

/* s (64, 32) = A . B^T over columns; HALVES: over half `half` of them. */
template <bool HALVES> static __device__ __forceinline__ void multiply(float (&s)[SOME / 8][4], uint32_t a, uint32_t b, int half) {
    fill_zero(s);
    wgmma_fence_registers(s);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < LATENT_STEPS; k++) {
        const uint32_t x = (uint32_t)(k / 4 * latent_panel(ROWS) + k % 4 * 32) >> 4,
                       y = (uint32_t)(k / 4 * latent_panel(SOME) + k % 4 * 32) >> 4;
        if (!HALVES || latent_half(k) == half) wgmma_small_n<SOME / 8>(s, panel_desc_low(a) + x, panel_desc_low(b) + y);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_fence_registers(s);
}

/* What a group does in a block of W from packed row or key `first` on: it has N panels of columns, the first or the others. */
template <enum of W, int N>
static __device__ __forceinline__ void group_walk(const struct cuda_attn &a, struct seq_rows s, int first) {
    constexpr int group = N != LEFT, panel = group * LEFT, OWN = W == DQ ? 2 : 1;
    constexpr int STAGE = (W == DQ ? 1 : 2) * STREAM;
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, of_warp = warp % 4 * 16, t = lane % 4;
    const int mine = first + of_warp + lane / 4; /* row or key, and 8 on */
    char *const base = panel_memory();
    const uint32_t smem = smem_addr(base);
    float4 *const swap = (float4 *)(base + SWAP_AT) + threadIdx.x, *const other = swap + (group ? -GROUP : GROUP);
    /* of a row: keys [x, y); of a key: packed rows [x, y) */
    int2 see[2];
    float2 stat[2] = {};
    const int last = W == DQ ? min(first + ROWS, s.packed) - 1 : min(first + ROWS, s.pos0 + s.n) - 1;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = min(mine + 8 * i, last), pos = s.pos0 + row / a.group, key = mine + 8 * i - s.pos0; /* from its own */
        if (W == DQ) see[i] = {first_key(a, pos), pos + 1};
        else see[i] = {key * a.group, rows_end(a, s, key)};
        if (W == DQ) stat[i] = a.stat[packed_index(a, s, 0, row)];
    }
    const int begin = (W == DQ ? first_key(a, s.pos0 + first / a.group) : max(first - s.pos0, 0) * a.group) / SOME * SOME;
    const int end = W == DQ ? s.pos0 + last / a.group + 1 : rows_end(a, s, last - s.pos0);
    const auto stage = [&](int i) { return smem + (uint32_t)(OWN * OPERAND + i * STAGE); };
    const auto queue = [&](int at, int i) {
        if (at < end) {
            const int x = at + warp * (SOME / 8) + lane % (SOME / 8);
            if (W == DQ) latent_copy<SOME / 8>(a, a.k, x < end ? key_row(a, s.seq, 0, x) : -1, stage(i));
            else {
                const int row = x < s.packed ? (int)packed_index(a, s, 0, x) : -1, y = at + (int)threadIdx.x;
                latent_copy<SOME / 8>(a, a.q, row, stage(i));
                latent_copy<SOME / 8>(a, a.dout, row, stage(i) + STREAM);
                if (threadIdx.x < SOME)
                    cp_async8(smem + (uint32_t)(STAT_AT + (i * SOME + (int)threadIdx.x) * 8),
                              a.stat + (y < s.packed ? packed_index(a, s, 0, y) : 0), y < s.packed);
            }
        }
        cp_commit();
    };
    const int own = first + warp * 8 + lane % 8;
    if (W == DQ) {
        const int row = own <= last ? (int)packed_index(a, s, 0, own) : -1;
        latent_copy<8>(a, a.q, row, smem);
        latent_copy<8>(a, a.dout, row, smem + OPERAND);
    } else latent_copy<8>(a, a.k, own <= last ? key_row(a, s.seq, 0, own) : -1, smem);
    float acc[N][8][4];
#pragma unroll
    for (int n = 0; n < N; n++) fill_zero(acc[n]);
    int i = 0;
    queue(begin, i);
#pragma unroll 1
    for (int at = begin; at < end; at += SOME, i ^= 1) {
        float x[SOME / 8][4];
        uint32_t w[GROUPS][4];
        cp_wait<0>();
        fence_proxy_async();
        __syncthreads();
        queue(at + SOME, i ^ 1);
        const uint32_t now = __shfl_sync(WARP_ALL, stage(i), 0); /* warp-uniform, as descriptors must be */
        multiply<W == DV>(x, W == DQ ? smem + group * OPERAND : smem, W == DK ? now + group * STREAM : now, group);
        constexpr int kept = group * 2, sent = 2 - kept; /* groups of 8 columns, two each */
#pragma unroll
        for (int n = 0; n < 2; n++) swap[n * THREADS] = make_float4(x[sent + n][0], x[sent + n][1], x[sent + n][2], x[sent + n][3]);
        __syncthreads();
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const int c = group * 16 + n * 8 + t * 2;
            const float4 theirs = other[n * THREADS];
            const float y[4] = {theirs.x, theirs.y, theirs.z, theirs.w};
            float4 st = {};
            if (W != DQ) st = *(const float4 *)(base + STAT_AT + (i * SOME + c) * 8);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float lse = W == DQ ? stat[e / 2].x
                                  : e % 2 ? st.z
                                          : st.x,
                            delta = W == DQ ? stat[e / 2].y
                                    : e % 2 ? st.w
                                            : st.y;
                const float score = W == DV ? __fadd_rn(x[kept + n][e], y[e]) : group ? y[e] : x[kept + n][e];
                const int j = at + c + e % 2;
                const bool seen = j >= see[e / 2].x && j < see[e / 2].y;
                const float p = seen ? exp2_approx(__fmaf_rn(score, a.scale_log2, -lse)) : 0.0f;
                x[n][e] = W == DV ? p : __fmul_rn(p, __fsub_rn(group ? x[kept + n][e] : y[e], delta));
            }
        }
#pragma unroll
        for (int e = 0; e < 4; e++) w[group][e] = pack_bf16(x[e / 2][e % 2 * 2], x[e / 2][e % 2 * 2 + 1]);
        *(uint4 *)other = make_uint4(w[group][0], w[group][1], w[group][2], w[group][3]); /* nobody else reads that */
        __syncthreads();
        const uint4 theirs = *(const uint4 *)swap;
        w[1 - group][0] = theirs.x, w[1 - group][1] = theirs.y, w[1 - group][2] = theirs.z, w[1 - group][3] = theirs.w;
#pragma unroll
        for (int n = 0; n < N; n++) wgmma_fence_registers(acc[n]);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < GROUPS; k++)
#pragma unroll
            for (int n = 0; n < N; n++)
                wgmma_m64n64_rs(
                    acc[n], w[k],
                    panel_desc(now + (uint32_t)((W == DV ? STREAM : 0) + (panel + n) * latent_panel(SOME) + k * 16 * PANEL_ROW)));
        wgmma_commit();
        wgmma_wait<0>();
#pragma unroll
        for (int n = 0; n < N; n++) wgmma_fence_registers(acc[n]);
    }
    cp_wait<0>();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int at = mine + 8 * h;
        if (at > last) continue;
        const int64_t to = (W == DQ ? packed_index(a, s, 0, at) : (int64_t)key_row(a, s.seq, 0, at)) * a.dim + 2 * t;
        float *const key = (W == DK ? a.dk : a.dv) + to;
        uint16_t *const row = (uint16_t *)a.dq + to;
        const float scale = W == DV ? 1.0f : a.scale;
#pragma unroll
        for (int n = 0; n < N * 8; n++) {
            const int c = panel * 64 + n * 8;
            const float v[2] = {__fmul_rn(acc[n / 8][n % 8][2 * h], scale), __fmul_rn(acc[n / 8][n % 8][2 * h + 1], scale)};
            if (c >= a.dim) continue;
            if (W == DQ) *(uint32_t *)(row + c) = pack_bf16(v[0], v[1]);
            else *(float2 *)(key + c) = make_float2(v[0], v[1]);
        }
    }
}

template <enum of W> static __device__ __forceinline__ void walk(const struct cuda_attn &a, const struct seq_rows &s, int first) {
    if (first >= (W == DQ ? s.packed : s.pos0 + s.n)) return;
    if (threadIdx.x < GROUP) group_walk<W, LEFT>(a, s, first);
    else group_walk<W, LATENT_PANELS - LEFT>(a, s, first);
}

/* Blocks: by tile of keys, the first, which most rows see, before the others, dk and dv of each sequence; then by tile of rows, the
 * last before the others, dq of each sequence. */
static __global__ void __launch_bounds__(THREADS, 1) bwd_latent_sm90(const struct cuda_attn a, int n_seqs, int n_keys) {
    const int block = (int)blockIdx.x, row_block = block - n_keys;
    pdl_launch_dependents();
    pdl_wait();
    if (block < n_keys) {
        const struct seq_rows s = seq_rows_of(a, block / 2 % n_seqs);
        const int first = block / 2 / n_seqs * ROWS;
        if (block % 2) walk<DV>(a, s, first);
        else walk<DK>(a, s, first);
    } else walk<DQ>(a, seq_rows_of(a, row_block % n_seqs), (a.n_tiles - 1 - row_block / n_seqs) * ROWS);
}

int cuda_attn_bwd_latent_sm90(struct cuda *c, const struct attn_args *a, struct cuda_attn p, bool *ran) {
    *ran = cuda_hopper(c);
    if (!*ran) return 0;
    p.n_tiles = attn_tiles(a, ROWS);
    const int64_t n = a->seqs.n, keys = attn_key_tiles(a, ROWS) * n * 2;
    return attn_launch_blocks(c, bwd_latent_sm90, keys + n * p.n_tiles, THREADS, SMEM, p, (int)n, (int)keys);
}
