/* attention_bwd_sm90_256.cu - backward of causal attention on Hopper's WGMMA for heads of 256, under a softcap too;
 * attention_bwd.cu has the formulas.
 *
 * A block is two warpgroups, each with 64 x 256 accumulators.  A dk/dv block has 64 keys of a KV head and walks the rows that see
 * them, head of the group by head, 64 at a time in a two-stage pipeline: the first warpgroup makes the scores and p, and sums dv;
 * the second makes dp, takes p from the first by shared memory, makes ds, and sums dk.  A dq block has 128 packed rows of a KV
 * head, 64 a warpgroup, and walks the keys that they see: two stages of keys, one of values, which is free again once dp is there.
 * Both kinds are blocks of one kernel, dk/dv first, since they take longer.
 *
 * Invariant: no atomics; dk and dv sum over the group's heads, then rows ascending, in two halves (keys_block), dq over keys
 * ascending, in tiles counted from the start of the sequence: a sequence's gradients do not depend on its place in the batch. */
#include "device/cuda/attention/attention_bwd_sm90.cuh"

enum {
    D = 256,
    THREADS = 2 * WARPGROUP,
    CHUNKS = D / 8,
    OPERAND = D / 64 * PANEL, /* bytes of 64 rows */
    /* of a dk/dv block: keys, values, two stages of rows of q and dout; weights on their way from warpgroup to warpgroup; stat */
    AT_STAGES = 2 * OPERAND,
    AT_WEIGHTS = 6 * OPERAND,
    AT_STAT = AT_WEIGHTS + TILE * TILE * (int)sizeof(float),
    /* of a dq block: 128 rows of q, of dout, two stages of keys, values */
    AT_DOUT = 2 * OPERAND,
    AT_KEYS = 4 * OPERAND,
    AT_VALUES = 6 * OPERAND,
    SMEM = 7 * OPERAND,
    BAR_WEIGHTS = 1
};
static_assert(AT_STAT + 2 * TILE * (int)sizeof(float2) <= SMEM, "a dk/dv block needs no more than a dq block");

/* Queues the copy of this thread's part of 64 rows: row r, of the first n, is number first + r * stride of x; zeros from n on. */
static __device__ __forceinline__ void load_tile(uint32_t to, const void *x, int64_t first, int stride, int n) {
    constexpr int STEP = THREADS / CHUNKS, COPIES = TILE / STEP;
    static_assert(STEP % 8 == 0, "a thread's rows have one swizzle");
    const int r = (int)threadIdx.x / CHUNKS, c = (int)threadIdx.x % CHUNKS;
    const uint32_t dst = to + (uint32_t)(c / 8 * PANEL) + panel_offset(r, c % 8);
    const int64_t step = (int64_t)stride * (STEP * CHUNKS); /* in 16 bytes */
    const uint4 *px = (const uint4 *)x + (first + (int64_t)r * stride) * CHUNKS + c;
    if (n >= TILE) {
#pragma unroll
        for (int i = 0; i < COPIES; i++, px += step) cp_async16(dst + i * STEP * PANEL_ROW, px, true);
    } else {
#pragma unroll
        for (int i = 0; i < COPIES; i++, px += step) {
            const bool take = r + i * STEP < n;
            cp_async16(dst + i * STEP * PANEL_ROW, take ? px : (const uint4 *)x, take);
        }
    }
}
/* Queues the copy of 128 packed rows of x from `first` on, zeros beyond the last. */
static __device__ __forceinline__ void load_packed(const struct cuda_attn &a, const struct seq_rows &s, int head, int first,
                                                   const void *x, uint32_t to) {
#pragma unroll 4
    for (int i = 0; i < 2 * TILE * CHUNKS / THREADS; i++) {
        const int row = i * (THREADS / CHUNKS) + (int)threadIdx.x / CHUNKS, c = (int)threadIdx.x % CHUNKS;
        const bool take = first + row < s.packed;
        const int64_t from = take ? packed_index(a, s, head, first + row) * CHUNKS + c : 0;
        cp_async16(to + (uint32_t)(row / TILE * OPERAND + c / 8 * PANEL) + panel_offset(row % TILE, c % 8), (const uint4 *)x + from,
                   take);
    }
}

/* acc (64, 256) += P . B, P 64 x 64 as fragments, B 64 rows. */
static __device__ __forceinline__ void wgmma_pb(float (&acc)[D / 8][4], const uint32_t (&p)[4][4], uint32_t b) {
#pragma unroll
    for (int k = 0; k < 4; k++) wgmma_m64n256_rs(acc, p[k], panels_desc_mn(b + (uint32_t)(k * 16 * PANEL_ROW), PANEL));
}

/* Number of the warpgroup, which the compiler sees to be uniform. */
static __device__ __forceinline__ int warpgroup() { return __shfl_sync(WARP_ALL, (int)threadIdx.x / WARPGROUP, 0); }

/* s becomes p = 2^(s scale log2(e) - its row's stat), s being under the softcap already; returned: what dp - delta is multiplied
 * by, p but for the softcap's slope. */
template <bool CAP> static __device__ __forceinline__ float weight(const struct cuda_attn &a, float &s, float lse, float cap_in) {
    const float t = CAP ? fmaxf(-1.0f, __fmul_rn(s, cap_in)) : 0.0f; /* a masked score is -inf */
    s = exp2_approx(__fmaf_rn(s, a.scale_log2, -lse));
    return CAP ? __fmul_rn(s, __fsub_rn(1.0f, __fmul_rn(t, t))) : s;
}
template <bool CAP> static __device__ __forceinline__ float cap_factor(const struct cuda_attn &a) {
    return CAP ? __fdiv_rn(a.scale, a.softcap) : 0.0f;
}

/* ---- dk, dv ---- */

/* The first warpgroup's part between the WGMMAs: p of scores s; the weights of dp go to the other warpgroup. */
template <bool CAP>
static __device__ __forceinline__ void make_p(const struct cuda_attn &a, float (&s)[8][4], const float2 *stat, float4 *weights,
                                              int pos, int key) {
    if constexpr (CAP) cap_scores(a, s);
    if (!all_see(a, pos, key)) mask<true>(a, s, pos, key);
    const float in = cap_factor<CAP>(a);
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float4 st = *(const float4 *)(stat + pair_col(n));
        float w[4];
#pragma unroll
        for (int e = 0; e < 4; e++) w[e] = weight<CAP>(a, s[n][e], e % 2 ? st.z : st.x, in);
        weights[n * WARPGROUP] = make_float4(w[0], w[1], w[2], w[3]);
    }
}
/* The second one's: dp becomes ds. */
static __device__ __forceinline__ void make_ds(float (&dp)[8][4], const float2 *stat, const float4 *weights) {
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float4 st = *(const float4 *)(stat + pair_col(n)), w = weights[n * WARPGROUP];
        dp[n][0] = __fmul_rn(w.x, __fsub_rn(dp[n][0], st.y));
        dp[n][1] = __fmul_rn(w.y, __fsub_rn(dp[n][1], st.w));
        dp[n][2] = __fmul_rn(w.z, __fsub_rn(dp[n][2], st.y));
        dp[n][3] = __fmul_rn(w.w, __fsub_rn(dp[n][3], st.w));
    }
}

/* half_done: keys_walk_flag's. */
template <bool CAP>
static __device__ __forceinline__ void keys_block(const struct cuda_attn &a, int block, int n_seqs, int *half_done) {
    struct keys_walk w;
    if (!keys_walk_of(w, a, block, n_seqs)) return;
    const struct seq_rows s = w.s;
    const int key = w.key, end = w.end;
    const int64_t key_first = w.key_first;
    int left = w.left;
    const int group = warpgroup();
    const uint32_t smem = smem_addr(panel_memory()), own = smem + (uint32_t)(group * OPERAND);
    float4 *const weights = (float4 *)(panel_memory() + AT_WEIGHTS) + threadIdx.x % WARPGROUP;
    float acc[D / 8][4]; /* dv of the first warpgroup, dk of the second */
    fill_zero(acc);
    /* q, dout, stat */
    const auto queue = [&](int pos, int h, int stage) {
        const int64_t row = (int64_t)(s.first + pos) * a.n_q_heads + h;
        const uint32_t to = smem + AT_STAGES + (uint32_t)(stage * 2 * OPERAND);
        load_tile(to, a.q, row, a.n_q_heads, s.n - pos);
        load_tile(to + OPERAND, a.dout, row, a.n_q_heads, s.n - pos);
        if (threadIdx.x < TILE) {
            const bool take = pos + (int)threadIdx.x < s.n;
            cp_async8(smem + AT_STAT + (uint32_t)(stage * TILE + (int)threadIdx.x) * 8,
                      a.stat + (take ? row + (int64_t)threadIdx.x * a.n_q_heads : 0), take);
        }
        cp_commit();
    };
    load_tile(smem, a.k, key_first, 1, s.n - key);
    load_tile(smem + OPERAND, a.v, key_first, 1, s.n - key);
    int pos = key + w.first % w.tiles * TILE, h = w.head * a.group + w.first / w.tiles, stage = 0;
    queue(pos, h, 0);
#pragma unroll 1
    for (; left > 0; left--, stage ^= 1) {
        cp_wait<0>();
        fence_proxy_async();
        __syncthreads();
        const uint32_t q = smem + AT_STAGES + (uint32_t)(stage * 2 * OPERAND);
        const float2 *stat = (const float2 *)(panel_memory() + AT_STAT) + stage * TILE;
        float t[8][4]; /* s, then p; dp, then ds */
        uint32_t x[4][4];
        wgmma_fence_registers(t);
        wgmma_fence();
        wgmma_abt<D>(t, own, q + (uint32_t)(group * OPERAND));
        wgmma_commit();
        const int now = pos; /* the next tiles are loaded while these WGMMAs run */
        pos += TILE;
        if (pos >= end) pos = key, h++;
        if (left > 1) queue(pos, h, stage ^ 1);
        wgmma_wait<0>();
        wgmma_fence_registers(t);
        if (group == 0) {
            make_p<CAP>(a, t, stat, weights, now, key);
            named_barrier_arrive(BAR_WEIGHTS, THREADS);
        } else {
            named_barrier_sync(BAR_WEIGHTS, THREADS);
            make_ds(t, stat, weights);
        }
        pack_fragments<TILE>(x, t);
        wgmma_fence_registers(acc);
        wgmma_fence();
        wgmma_pb(acc, x, q + (uint32_t)((1 - group) * OPERAND));
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_fence_registers(acc);
    }
    volatile int *const done = keys_walk_flag(w, a, half_done);
    keys_walk_wait(w, done);
    store_keys<D>(w, group ? a.dk : a.dv, group ? a.scale : 1.0f, [&](int g, int e) { return acc[g][e]; });
    keys_walk_signal(w, done);
}

/* ---- dq ---- */

/* Blocks by tile of rows, the last, which see most keys, before the others; then sequence, then KV head. */
template <bool CAP> static __device__ __forceinline__ void rows_block(const struct cuda_attn &a, int block, int n_seqs) {
    const int per_tile = n_seqs * a.n_kv_heads, rest = block % per_tile, head = rest % a.n_kv_heads;
    const int64_t key_first = (int64_t)head * a.block_len + a.kv_start[rest / a.n_kv_heads]; /* loaded with s */
    const struct seq_rows s = seq_rows_of(a, rest / a.n_kv_heads);
    const int top = (a.n_tiles - 1 - block / per_tile) * 2 * TILE;
    if (top >= s.packed) return;
    const int group = warpgroup(), mine = top + group * TILE, last = min(top + 2 * TILE, s.packed) - 1;
    /* positions; rows beyond the last stand where the last does */
    const auto position = [&](int r) { return min(r, last) / a.group; };
    const int at[2] = {position(mine + lane_row()), position(mine + lane_row() + 8)};
    const int see_from[2] = {first_key(a, at[0]), first_key(a, at[1])};
    const int all_to = position(mine), all_from = first_key(a, position(mine + TILE - 1)); /* keys that all of my rows see */
    const int from = first_key(a, position(top)) / TILE * TILE, end = position(last) + 1;
    const uint32_t smem = smem_addr(panel_memory()), v = smem + AT_VALUES;
    const uint32_t q = smem + (uint32_t)(group * OPERAND), dout = q + AT_DOUT;
    const auto load_keys = [&](const void *x, int key, uint32_t to) { load_tile(to, x, key_first + key, 1, s.n - key); };
    float2 stat[2];
#pragma unroll
    for (int i = 0; i < 2; i++) stat[i] = a.stat[packed_index(a, s, head, min(mine + lane_row() + 8 * i, last))];
    float dq[D / 8][4];
    fill_zero(dq);
    const float in = cap_factor<CAP>(a);
    load_packed(a, s, head, top, a.q, smem);
    load_packed(a, s, head, top, a.dout, smem + AT_DOUT);
    load_keys(a.k, from, smem + AT_KEYS);
    load_keys(a.v, from, v);
    cp_commit();
    int stage = 0;
#pragma unroll 1
    for (int key = from; key < end; key += TILE, stage ^= 1) {
        cp_wait<0>();
        fence_proxy_async();
        __syncthreads();
        const uint32_t k = smem + AT_KEYS + (uint32_t)(stage * OPERAND);
        float p[8][4], ds[8][4];
        uint32_t x[4][4];
        wgmma_fence_registers(p), wgmma_fence_registers(ds);
        wgmma_fence();
        wgmma_abt<D>(ds, dout, v);
        wgmma_commit();
        wgmma_abt<D>(p, q, k);
        wgmma_commit();
        if (key + TILE < end) load_keys(a.k, key + TILE, smem + AT_KEYS + (uint32_t)((stage ^ 1) * OPERAND));
        wgmma_wait<1>();
        __syncthreads(); /* nobody reads these values any more */
        if (key + TILE < end) load_keys(a.v, key + TILE, v);
        cp_commit();
        wgmma_wait<0>();
        wgmma_fence_registers(p), wgmma_fence_registers(ds);
        if constexpr (CAP) cap_scores(a, p);
        if (key + TILE - 1 > all_to || key < all_from) {
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int j = key + pair_col(n) + e % 2;
                    if (j > at[e / 2] || j < see_from[e / 2]) p[n][e] = -INFINITY;
                }
        }
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float w = weight<CAP>(a, p[n][e], stat[e / 2].x, in);
                ds[n][e] = __fmul_rn(w, __fsub_rn(ds[n][e], stat[e / 2].y));
            }
        pack_fragments<TILE>(x, ds);
        wgmma_fence_registers(dq);
        wgmma_fence();
        wgmma_pb(dq, x, k);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_fence_registers(dq);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int r = mine + lane_row() + 8 * i;
        if (r > last) continue;
        uint16_t *to = (uint16_t *)a.dq + packed_index(a, s, head, r) * D;
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            *(uint32_t *)(to + pair_col(n)) = pack_bf16(__fmul_rn(dq[n][2 * i], a.scale), __fmul_rn(dq[n][2 * i + 1], a.scale));
    }
}

/* ---- the op ---- */

template <bool CAP>
__global__ void __launch_bounds__(THREADS, 1) bwd_256(const struct cuda_attn a, int n_seqs, int n_keys, int *half_done) {
    const int block = (int)blockIdx.x;
    pdl_launch_dependents();
    pdl_wait();
    if (block < n_keys) keys_block<CAP>(a, block, n_seqs, half_done);
    else rows_block<CAP>(a, block - n_keys, n_seqs);
}

template <bool CAP> static int run(struct cuda *c, const struct attn_args *a, struct cuda_attn p, int *flags) {
    const int64_t key_tiles = (a->seqs.max_q + TILE - 1) / TILE, keys = a->seqs.n * key_tiles * p.n_kv_heads * 2;
    p.n_tiles = attn_tiles(a, 2 * TILE);
    return attn_launch_blocks(c, bwd_256<CAP>, keys + a->seqs.n * p.n_tiles * p.n_kv_heads, THREADS, SMEM, p, (int)a->seqs.n,
                              (int)keys, flags);
}

int cuda_attn_bwd_sm90_256(struct cuda *c, const struct attn_args *a, struct cuda_attn p, int *flags) {
    return p.softcap > 0 ? run<true>(c, a, p, flags) : run<false>(c, a, p, flags);
}
