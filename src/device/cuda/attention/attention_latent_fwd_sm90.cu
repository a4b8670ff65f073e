/* attention_latent_fwd_sm90.cu - forward of attention whose values are its keys (latent attention) on Hopper's WGMMA: training,
 * prefill, and decoding of more heads than attention_latent_decode_sm90.cu takes. attention_latent.cu serves everything else.
 *
 * A block has 64 packed rows and two warpgroups. Of a tile of keys each has the scores of one half, which go through shared memory
 * to both, and the columns of 4 or 5 of nine panels of the result. A tile is there once, as keys and as values, while the next is
 * copied.
 *
 * Invariant: a row goes through the operations of attention_latent.cuh, so its bits are those of decode. What a row does not see is
 * multiplied by 1 and adds 0. */
#include "device/cuda/attention/attention_latent.cuh"

enum { ROWS = 64, GROUP = 128, GROUPS = 2, THREADS = GROUPS * GROUP, STAGES = 2, HALF = DEV_KEY_TILE / GROUPS, LEFT = 5 };
static constexpr int P_STRIDE = tile_stride(DEV_KEY_TILE);
/* q, tiles of keys, probabilities, maxima of half a tile or sums of a quarter, by row */
static constexpr int KEYS_AT = LATENT_ROWS, P_AT = KEYS_AT + STAGES * LATENT_ROWS, BY_ROW_AT = P_AT + ROWS * P_STRIDE;
static constexpr int SMEM = BY_ROW_AT + ROWS * 4 * 4;

/* s (64 rows, this group's keys) = q . K^T */
static __device__ __forceinline__ void half_scores(float (&s)[HALF / 8][4], uint32_t q, uint32_t keys) {
    float half[2][HALF / 8][4];
    fill_zero(half[0]);
    fill_zero(half[1]);
    wgmma_fence_registers(half[0]), wgmma_fence_registers(half[1]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < LATENT_STEPS; k++) {
        const uint32_t at = (uint32_t)(k / 4 * LATENT_PANEL + k % 4 * 32) >> 4;
        wgmma_small_n<HALF / 8>(half[latent_half(k)], panel_desc_low(q) + at, panel_desc_low(keys) + at);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_fence_registers(half[0]), wgmma_fence_registers(half[1]);
#pragma unroll
    for (int n = 0; n < HALF / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[n][e] = __fadd_rn(half[0][n][e], half[1][n][e]);
}

/* Tiles of keys that a block walks: those of [lo, hi). */
struct walk {
    struct seq_rows s;
    int first, last, lo, hi; /* packed rows, keys */
};

/* What a group does, which has N panels of columns: the first, or the others. */
template <int N> static __device__ __forceinline__ void group_rows(const struct cuda_attn &a, const struct walk &w) {
    constexpr int group = N != LEFT, panel = group * LEFT;
    const int lane = (int)threadIdx.x % 32, of_warp = (int)threadIdx.x / 32 % 4 * 16, t = lane % 4;
    const int row = of_warp + lane / 4, r = w.first + row; /* and 8 on */
    const auto position = [&](int i) { return w.s.pos0 + min(i, w.last) / a.group; };
    const int p[2] = {position(r), position(r + 8)}, p_min = position(w.first + of_warp),
              from_max = first_key(a, position(w.first + of_warp + 15));
    char *const base = panel_memory();
    const uint32_t smem = smem_addr(base), p_tile = smem + P_AT + (uint32_t)(of_warp * P_STRIDE);
    float *const by_row = (float *)(base + BY_ROW_AT);
    const int end = (w.hi + DEV_KEY_TILE - 1) / DEV_KEY_TILE;
    const auto stage = [&](int tile) { return smem + (uint32_t)(KEYS_AT + tile % STAGES * LATENT_ROWS); };
    int tile = w.lo / DEV_KEY_TILE, key = latent_key(a, w.s.seq, tile, w.lo, w.hi);
    const auto queue = [&](int of) {
        if (of < end) latent_copy<8>(a, a.k, key, stage(of));
        cp_commit();
        key = latent_key(a, w.s.seq, of + 1, w.lo, w.hi);
    };
    const int mine = w.first + (int)threadIdx.x / 32 * 8 + lane % 8;
    latent_copy<8>(a, a.q, mine <= w.last ? (int)packed_index(a, w.s, 0, mine) : -1, smem);
    queue(tile);
    float m[2] = {-INFINITY, -INFINITY}, l[2][2] = {}, acc[N][8][4], correction[2];
#pragma unroll
    for (int n = 0; n < N; n++) fill_zero(acc[n]);
#pragma unroll 1
    for (; tile < end; tile++) {
        float score[HALF / 8][4];
        uint32_t x[DEV_KEY_TILE / 16][4];
        cp_wait<0>();
        fence_proxy_async();
        __syncthreads();
        queue(tile + 1);
        const uint32_t now = __shfl_sync(WARP_ALL, stage(tile), 0); /* warp-uniform, as descriptors must be */
        half_scores(score, smem, now + (uint32_t)(group * HALF * PANEL_ROW));
        const int j = tile * DEV_KEY_TILE + group * HALF;
        if (j + HALF - 1 > p_min || j < from_max)
#pragma unroll
            for (int e = 0; e < HALF / 2; e++) {
                const int k = j + e / 4 * 8 + t * 2 + e % 2, of = p[e % 4 / 2];
                if (k > of || k < first_key(a, of)) score[e / 4][e % 4] = -INFINITY;
            }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float top = -INFINITY;
#pragma unroll
            for (int n = 0; n < HALF / 8; n++) top = fmaxf(top, fmaxf(score[n][2 * i], score[n][2 * i + 1]));
            top = quad_max(top);
            if (t == 0) by_row[group * ROWS + row + 8 * i] = top;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float top = fmaxf(by_row[row + 8 * i], by_row[ROWS + row + 8 * i]);
            const float to = row_rescale(&m[i], top, a.scale_log2, &correction[i]);
            uint32_t *const at = (uint32_t *)(base + P_AT + (row + 8 * i) * P_STRIDE) + group * (HALF / 2) + t;
#pragma unroll
            for (int n = 0; n < HALF / 8; n++) {
                score[n][2 * i] = row_p(score[n][2 * i], a.scale_log2, to);
                score[n][2 * i + 1] = row_p(score[n][2 * i + 1], a.scale_log2, to);
                at[n * 4] = pack_bf16(score[n][2 * i], score[n][2 * i + 1]);
            }
#pragma unroll
            for (int q = 0; q < 2; q++)
                l[i][q] = row_sum(l[i][q], correction[i],
                                  row_quarter(score[2 * q][2 * i], score[2 * q][2 * i + 1], score[2 * q + 1][2 * i],
                                              score[2 * q + 1][2 * i + 1]));
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < DEV_KEY_TILE / 16; k++) load_a(x[k], p_tile, P_STRIDE, k);
        if (__any_sync(WARP_ALL, correction[0] != 1.0f || correction[1] != 1.0f))
#pragma unroll
            for (int n = 0; n < N * 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) acc[n / 8][n % 8][e] = __fmul_rn(acc[n / 8][n % 8][e], correction[e / 2]);
#pragma unroll
        for (int n = 0; n < N; n++) wgmma_fence_registers(acc[n]);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < DEV_KEY_TILE / 16; k++)
#pragma unroll
            for (int n = 0; n < N; n++)
                wgmma_m64n64_rs(acc[n], x[k], panel_desc(now + (uint32_t)((panel + n) * LATENT_PANEL + k * 16 * PANEL_ROW)));
        wgmma_commit();
        wgmma_wait<0>();
#pragma unroll
        for (int n = 0; n < N; n++) wgmma_fence_registers(acc[n]);
    }
    cp_wait<0>();
#pragma unroll
    for (int i = 0; i < 2; i++) /* every warp is past the barrier after which the maxima were read */
#pragma unroll
        for (int q = 0; q < 2; q++) {
            l[i][q] = quad_sum(l[i][q]);
            if (t == 0) by_row[(group * 2 + q) * ROWS + row + 8 * i] = l[i][q];
        }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (r + 8 * i > w.last) continue;
        const float *const part = by_row + row + 8 * i;
        const float sum = __fadd_rn(__fadd_rn(part[0], part[ROWS]), __fadd_rn(part[2 * ROWS], part[3 * ROWS])),
                    inv = __frcp_rn(sum);
        const int64_t at = packed_index(a, w.s, 0, r + 8 * i);
        uint16_t *const out = (uint16_t *)a.out + at * a.dim;
#pragma unroll
        for (int n = 0; n < N * 8; n++) {
            const int c = panel * 64 + n * 8;
            if (c < a.dim) *(uint32_t *)(out + c + 2 * t) = row_out(acc[n / 8][n % 8][2 * i], acc[n / 8][n % 8][2 * i + 1], inv);
        }
        if (a.lse && t == 0 && group == 0) a.lse[at] = row_lse(m[i], sum);
    }
}

/* Block (64 packed rows of a sequence). The last rows of all sequences, which see most keys, start first. */
static __global__ void __launch_bounds__(THREADS, 1) fwd_latent_sm90(const struct cuda_attn a, int n_seqs) {
    pdl_launch_dependents();
    pdl_wait();
    struct walk w;
    w.s = seq_rows_of(a, (int)blockIdx.x % n_seqs);
    w.first = (a.n_tiles - 1 - (int)blockIdx.x / n_seqs) * ROWS;
    if (w.first >= w.s.packed) return;
    w.last = min(w.first + (int)ROWS, w.s.packed) - 1;
    w.lo = first_key(a, w.s.pos0 + w.first / a.group);
    w.hi = w.s.pos0 + w.last / a.group + 1;
    if (threadIdx.x < GROUP) group_rows<LEFT>(a, w);
    else group_rows<LATENT_PANELS - LEFT>(a, w);
}

int cuda_attn_fwd_latent_sm90(struct cuda *c, const struct attn_args *a, struct cuda_attn p, bool *ran) {
    *ran = cuda_hopper(c);
    if (!*ran) return 0;
    p.n_tiles = attn_tiles(a, ROWS);
    return attn_launch_blocks(c, fwd_latent_sm90, a->seqs.n * p.n_tiles, THREADS, SMEM, p, (int)a->seqs.n);
}
