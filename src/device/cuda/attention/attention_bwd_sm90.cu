/* attention_bwd_sm90.cu - backward of causal attention on Hopper's WGMMA, for heads of 64 and of 128; attention_bwd_sm90_256.cu has
 * heads of 256, attention_bwd.cu the formulas, and serves everything else.
 *
 * A block is one warpgroup.  A dk/dv block has 64 keys of a KV head and walks the rows that see them, head of the group
 * by head; a dq block has 64 rows of a head and walks the keys that they see.  Both kinds are blocks of one kernel, dk/dv
 * first, since they take longer: dq blocks fill the multiprocessors that run out of them.  The block's own two tiles stay in
 * shared memory, 64 rows of the two others go through a two-stage pipeline.  p and ds never leave the registers: they
 * are the A operand of the WGMMAs that use them.
 *
 * Invariant: no atomics; dk and dv sum over the group's heads, then rows
 * ascending, dq over keys ascending, in tiles counted from the start of the sequence: a
 * sequence's gradients do not depend on its place in the batch. */
#include "device/cuda/attention/attention_bwd_sm90.cuh"

enum { THREADS = WARPGROUP };

template <int D> struct shape {
    static constexpr int PANELS = D / 64, OPERAND = PANELS * PANEL; /* bytes of 64 rows of D */
    static constexpr int STAGE = 2 * OPERAND;
    static constexpr int STAT = 6 * OPERAND; /* after own and two stages: two times 64 float2 */
    static constexpr int SMEM = STAT + 2 * TILE * (int)sizeof(float2);
    static constexpr int BLOCKS = D == 64 ? 3 : 2; /* of a multiprocessor */
};

/* Queues the copy of this thread's part of 64 rows of two tensors: row r, of the first n, is number first + r * stride; zeros
 * from n on.
 * What depends on the tile alone is the same for all threads, so that a copy costs few instructions. */
template <int D>
static __device__ __forceinline__ void load_pair(uint32_t to, const void *x, const void *y, int64_t first, int stride, int n) {
    constexpr int CHUNKS = D / 8, STEP = THREADS / CHUNKS, COPIES = TILE / STEP;
    static_assert(STEP % 8 == 0, "a thread's rows have one swizzle");
    const int r = (int)threadIdx.x / CHUNKS, c = (int)threadIdx.x % CHUNKS;
    const uint32_t dst = to + (uint32_t)(c / 8 * PANEL) + panel_offset(r, c % 8);
    const int64_t from = (first + (int64_t)r * stride) * CHUNKS + c, step = (int64_t)stride * (STEP * CHUNKS); /* in 16 bytes */
    const uint4 *px = (const uint4 *)x + from, *py = (const uint4 *)y + from;
    if (n >= TILE) {
#pragma unroll
        for (int i = 0; i < COPIES; i++, px += step, py += step) {
            cp_async16(dst + i * STEP * PANEL_ROW, px, true);
            cp_async16(dst + i * STEP * PANEL_ROW + shape<D>::OPERAND, py, true);
        }
    } else {
#pragma unroll
        for (int i = 0; i < COPIES; i++, px += step, py += step) {
            const bool take = r + i * STEP < n;
            cp_async16(dst + i * STEP * PANEL_ROW, take ? px : (const uint4 *)x, take);
            cp_async16(dst + i * STEP * PANEL_ROW + shape<D>::OPERAND, take ? py : (const uint4 *)y, take);
        }
    }
}

/* acc (64, D) += P . B, P 64 x 64 as fragments, B 64 rows. */
template <int D>
static __device__ __forceinline__ void wgmma_pb(float (&acc)[D / 64][8][4], const uint32_t (&p)[4][4], uint32_t b) {
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
        for (int n = 0; n < D / 64; n++) wgmma_m64n64_rs(acc[n], p[k], panel_desc(b + (uint32_t)(n * PANEL + k * 16 * PANEL_ROW)));
}
template <int D> static __device__ __forceinline__ void fence_accumulators(float (&acc)[D / 64][8][4]) {
#pragma unroll
    for (int n = 0; n < D / 64; n++) wgmma_fence_registers(acc[n]);
}

/* ---- dk, dv ---- */

/* p and ds = p (dp - delta) as A fragments, from s and dp, whose columns are rows of q; stat is theirs. */
static __device__ __forceinline__ void keys_weights(uint32_t (&p)[4][4], uint32_t (&ds)[4][4], float (&s)[8][4], float (&dp)[8][4],
                                                    const float2 *stat, float scale_log2) {
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float4 st = *(const float4 *)(stat + pair_col(n));
#pragma unroll
        for (int e = 0; e < 4; e++) {
            s[n][e] = exp2_approx(__fmaf_rn(s[n][e], scale_log2, -(e % 2 ? st.z : st.x)));
            dp[n][e] = __fmul_rn(s[n][e], __fsub_rn(dp[n][e], e % 2 ? st.w : st.y));
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            p[n / 2][n % 2 * 2 + i] = pack_bf16(s[n][2 * i], s[n][2 * i + 1]);
            ds[n / 2][n % 2 * 2 + i] = pack_bf16(dp[n][2 * i], dp[n][2 * i + 1]);
        }
    }
}

/* half_done: keys_walk_flag's. */
template <int D>
static __device__ __forceinline__ void keys_block(const struct cuda_attn &a, int block, int n_seqs, int *half_done) {
    using sh = shape<D>;
    struct keys_walk w;
    if (!keys_walk_of(w, a, block, n_seqs)) return;
    const struct seq_rows s = w.s;
    const int key = w.key, end = w.end;
    const int64_t key_first = w.key_first;
    int left = w.left;
    const uint32_t smem = smem_addr(panel_memory());
    float dk[D / 64][8][4], dv[D / 64][8][4];
#pragma unroll
    for (int n = 0; n < D / 64; n++) fill_zero(dk[n]), fill_zero(dv[n]);
    /* q, dout, stat */
    const auto queue = [&](int pos, int h, int stage) {
        const int64_t row = (int64_t)(s.first + pos) * a.n_q_heads + h;
        load_pair<D>(smem + 2 * sh::OPERAND + (uint32_t)(stage * sh::STAGE), a.q, a.dout, row, a.n_q_heads, s.n - pos);
        if (threadIdx.x < TILE) {
            const bool take = pos + (int)threadIdx.x < s.n;
            cp_async8(smem + sh::STAT + (uint32_t)(stage * TILE + (int)threadIdx.x) * 8,
                      a.stat + (take ? row + (int64_t)threadIdx.x * a.n_q_heads : 0), take);
        }
        cp_commit();
    };
    load_pair<D>(smem, a.k, a.v, key_first, 1, s.n - key);
    int pos = key + w.first % w.tiles * TILE, h = w.head * a.group + w.first / w.tiles, stage = 0;
    queue(pos, h, 0);
#pragma unroll 1
    for (; left > 0; left--, stage ^= 1) {
        cp_wait<0>();
        fence_proxy_async();
        __syncthreads();
        const uint32_t q = smem + 2 * sh::OPERAND + (uint32_t)(stage * sh::STAGE), dout = q + sh::OPERAND;
        const float2 *stat = (const float2 *)(panel_memory() + sh::STAT) + stage * TILE;
        float t[8][4], dp[8][4];
        uint32_t p[4][4], ds[4][4];
        wgmma_fence_registers(t), wgmma_fence_registers(dp);
        wgmma_fence();
        wgmma_abt<D>(t, smem, q);
        wgmma_abt<D>(dp, smem + sh::OPERAND, dout);
        wgmma_commit();
        const int now = pos; /* the next tiles are loaded while these WGMMAs run */
        pos += TILE;
        if (pos >= end) pos = key, h++;
        if (left > 1) queue(pos, h, stage ^ 1);
        wgmma_wait<0>();
        wgmma_fence_registers(t), wgmma_fence_registers(dp);
        if (!all_see(a, now, key)) mask<true>(a, t, now, key);
        keys_weights(p, ds, t, dp, stat, a.scale_log2);
        fence_accumulators<D>(dv), fence_accumulators<D>(dk);
        wgmma_fence();
        wgmma_pb<D>(dv, p, dout);
        wgmma_pb<D>(dk, ds, q);
        wgmma_commit();
        wgmma_wait<0>();
        fence_accumulators<D>(dv), fence_accumulators<D>(dk);
    }
    volatile int *const done = keys_walk_flag(w, a, half_done);
    keys_walk_wait(w, done);
    store_keys<D>(w, a.dk, a.scale, [&](int g, int e) { return dk[g / 8][g % 8][e]; });
    store_keys<D>(w, a.dv, 1.0f, [&](int g, int e) { return dv[g / 8][g % 8][e]; });
    keys_walk_signal(w, done);
}

/* ---- dq ---- */

/* Blocks by tile of rows, the last, which see most keys, before the others; then sequence, then head. */
template <int D> static __device__ __forceinline__ void rows_block(const struct cuda_attn &a, int block, int n_seqs) {
    using sh = shape<D>;
    const int per_tile = n_seqs * a.n_q_heads, rest = block % per_tile, head = rest % a.n_q_heads;
    const int64_t key_first = (int64_t)(head / a.group) * a.block_len + a.kv_start[rest / a.n_q_heads]; /* loaded with s */
    const struct seq_rows s = seq_rows_of(a, rest / a.n_q_heads);
    const int pos = (a.n_tiles - 1 - block / per_tile) * TILE;
    if (pos >= s.n) return;
    const int from = first_key(a, pos) / TILE * TILE, end = min(s.n, pos + TILE);
    const uint32_t smem = smem_addr(panel_memory());
    const auto row = [&](int r) { return pos + r < s.n ? (s.first + pos + r) * a.n_q_heads + head : -1; };
    /* k, v */
    const auto queue = [&](int key, int stage) {
        load_pair<D>(smem + 2 * sh::OPERAND + (uint32_t)(stage * sh::STAGE), a.k, a.v, key_first + key, 1, s.n - key);
        cp_commit();
    };
    float2 stat[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int at = row(lane_row() + 8 * i);
        stat[i] = at < 0 ? make_float2(0, 0) : a.stat[at];
    }
    float dq[D / 64][8][4];
#pragma unroll
    for (int n = 0; n < D / 64; n++) fill_zero(dq[n]);
    load_pair<D>(smem, a.q, a.dout, (int64_t)(s.first + pos) * a.n_q_heads + head, a.n_q_heads, s.n - pos);
    queue(from, 0);
    int stage = 0;
#pragma unroll 1
    for (int key = from; key < end; key += TILE, stage ^= 1) {
        cp_wait<0>();
        fence_proxy_async();
        __syncthreads();
        const uint32_t k = smem + 2 * sh::OPERAND + (uint32_t)(stage * sh::STAGE), v = k + sh::OPERAND;
        float p[8][4], ds[8][4];
        uint32_t x[4][4];
        wgmma_fence_registers(p), wgmma_fence_registers(ds);
        wgmma_fence();
        wgmma_abt<D>(p, smem, k);
        wgmma_commit();
        wgmma_abt<D>(ds, smem + sh::OPERAND, v);
        wgmma_commit();
        if (key + TILE < end) queue(key + TILE, stage ^ 1); /* while these WGMMAs run */
        wgmma_wait<1>();
        wgmma_fence_registers(p);
        if (!all_see(a, pos, key)) mask<false>(a, p, pos, key);
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) p[n][e] = exp2_approx(__fmaf_rn(p[n][e], a.scale_log2, -stat[e / 2].x));
        wgmma_wait<0>();
        wgmma_fence_registers(ds);
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) ds[n][e] = __fmul_rn(p[n][e], __fsub_rn(ds[n][e], stat[e / 2].y));
        pack_fragments<TILE>(x, ds);
        fence_accumulators<D>(dq);
        wgmma_fence();
        wgmma_pb<D>(dq, x, k);
        wgmma_commit();
        wgmma_wait<0>();
        fence_accumulators<D>(dq);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int at = row(lane_row() + 8 * i);
        if (at < 0) continue;
        uint16_t *to = (uint16_t *)a.dq + (int64_t)at * D;
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            *(uint32_t *)(to + pair_col(n)) =
                pack_bf16(__fmul_rn(dq[n / 8][n % 8][2 * i], a.scale), __fmul_rn(dq[n / 8][n % 8][2 * i + 1], a.scale));
    }
}

/* ---- the op ---- */

template <int D>
__global__ void __launch_bounds__(THREADS, shape<D>::BLOCKS)
    bwd_kernel(const struct cuda_attn a, int n_seqs, int n_keys, int *half_done) {
    const int block = (int)blockIdx.x;
    pdl_launch_dependents();
    pdl_wait();
    if (block < n_keys) keys_block<D>(a, block, n_seqs, half_done);
    else rows_block<D>(a, block - n_keys, n_seqs);
}

template <int D> static int run(struct cuda *c, const struct attn_args *a, const struct cuda_attn &p, int *half_done) {
    const int64_t keys = a->seqs.n * p.n_tiles * p.n_kv_heads * 2;
    return attn_launch_blocks(c, bwd_kernel<D>, keys + a->seqs.n * p.n_tiles * p.n_q_heads, THREADS, shape<D>::SMEM, p,
                              (int)a->seqs.n, (int)keys, half_done);
}

static bool takes(const struct cuda *c, const struct cuda_attn &p) {
    const bool heads = p.dim == 256 || ((p.dim == 64 || p.dim == 128) && p.softcap == 0);
    return cuda_hopper(c) && heads && p.kv_start && p.n_kv_blocks == 1;
}

size_t cuda_attn_bwd_sm90_bytes(const struct cuda *c, const struct attn_args *a, const struct cuda_attn &p) {
    return takes(c, p) ? bwd_sm90_flags(a) : 0;
}

int cuda_attn_bwd_sm90(struct cuda *c, const struct attn_args *a, struct cuda_attn p, void *scratch, bool *ran) {
    *ran = takes(c, p);
    if (!*ran) return 0;
    if (p.dim == 256) return cuda_attn_bwd_sm90_256(c, a, p, (int *)scratch);
    p.n_tiles = (int)((a->seqs.max_q + TILE - 1) / TILE);
    return p.dim == 64 ? run<64>(c, a, p, (int *)scratch) : run<128>(c, a, p, (int *)scratch);
}
