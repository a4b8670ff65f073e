/* attention_latent_decode.cu - decode attention whose values are its keys (latent attention): one new row of each sequence, 16 of
 * its heads a block. attention_latent.cu serves everything else, and GPUs whose blocks have less than 227 KiB of shared memory.
 *
 * A block has eight warps. For Q.K^T each has 16 keys of a tile and half of the columns, with the queries in registers; for the
 * softmax two rows; for P.V 72 columns of the output. Three tiles are in shared memory: one, and two that cp.async brings
 * meanwhile. In a CUDA graph all but the newest key of the first tiles are asked for before the kernel in front, which makes that,
 * has ended (device/graph.h allows it), unless sequences see each other's.
 *
 * Invariant: a row's operations are those of attention_latent.cuh, in that order. */
#include "device/cuda/attention/attention_latent.cuh"

enum { ROWS = 16, WARPS = LATENT_WARPS, THREADS = 32 * WARPS, STAGES = 3, COLS = LATENT_SIZE / WARPS };
enum { PREFETCH = 2 /* tiles that are queued before the first is waited for */ };
enum { MOST_HEADS = 32 /* with more, blocks of 64 heads (attention_latent_fwd_sm90.cu) */ };
static_assert(STAGES == PREFETCH + 1, "a stage is refilled when all warps are past its P.V");
static constexpr int KEYS_BYTES = LATENT_ROWS, P_STRIDE = tile_stride(DEV_KEY_TILE);
static constexpr int HALF = ROWS * DEV_KEY_TILE; /* numbers */
/* tiles, both halves of the scores, probabilities, a number of each row */
static constexpr int SCORES_AT = STAGES * KEYS_BYTES, P_AT = SCORES_AT + 2 * HALF * 4, BY_ROW_AT = P_AT + ROWS * P_STRIDE;
static constexpr int SMEM = BY_ROW_AT + ROWS * 4;

/* This warp's half of the columns of the block's rows as A fragments, zeros beyond the last row and beyond the head's end. */
static __device__ __forceinline__ void load_queries(const struct cuda_attn &a, int64_t first, int rows,
                                                    uint32_t (&q)[LATENT_STEPS / 2][4]) {
    const int lane = (int)threadIdx.x % 32, t = lane % 4, half = (int)threadIdx.x / 32 % 2;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = lane / 4 + 8 * i;
        const uint16_t *const from = (const uint16_t *)a.q + (row < rows ? (first + row) * a.dim : 0);
#pragma unroll
        for (int k = 0; k < LATENT_STEPS / 2; k++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int c = (k / 2 * 4 + half * 2 + k % 2) * 16 + h * 8 + 2 * t;
                q[k][2 * h + i] = row < rows && c < a.dim ? *(const uint32_t *)(from + c) : 0;
            }
    }
}

/* s (16 rows, 16 keys) = this warp's half of q . K^T, for its keys of the tile at `keys`. */
static __device__ __forceinline__ void scores_of(float (&s)[2][4], const uint32_t (&q)[LATENT_STEPS / 2][4], uint32_t keys) {
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, swap = lane % 8;
    const int chunk = warp % 2 * 4 + lane / 8 % 2; /* of a panel; the half's other two are 2 on */
    keys += (uint32_t)((warp / 2 * 16 + lane / 16 * 8 + lane % 8) * PANEL_ROW);
    const uint32_t at[2] = {keys + (uint32_t)((chunk ^ swap) * 16), keys + (uint32_t)(((chunk + 2) ^ swap) * 16)};
    fill_zero(s);
#pragma unroll
    for (int i = 0; i < LATENT_STEPS / 2; i++) {
        uint32_t x[4];
        ldmatrix_x4(x, at[i % 2] + (uint32_t)(i / 2 * LATENT_PANEL));
        mma_bf16(s[0], q[i], x[0], x[1]);
        mma_bf16(s[1], q[i], x[2], x[3]);
    }
}
static_assert(latent_half(1) == 0 && latent_half(2) == 1 && latent_half(3) == 1 && latent_half(4) == 0, "halves of a panel");

/* acc (16, COLS) += p . V of the tile at `values`, of which this warp has COLS columns. */
static __device__ __forceinline__ void add_values(float (&acc)[COLS / 8][4], uint32_t p_tile, uint32_t values) {
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    uint32_t p[DEV_KEY_TILE / 16][4];
#pragma unroll
    for (int k = 0; k < DEV_KEY_TILE / 16; k++) load_a(p[k], p_tile, P_STRIDE, k);
    values += (uint32_t)(lane * PANEL_ROW);
#pragma unroll
    for (int by = 0; by < DEV_KEY_TILE / 32; by++)
#pragma unroll
        for (int n = 0; n < COLS / 8; n++) {
            const int of = warp * (COLS / 8) + n; /* columns 8 of and on */
            uint32_t y[4];
            ldmatrix_x4_trans(y, values + (uint32_t)(of / 8 * LATENT_PANEL + ((of ^ lane) % 8) * 16 + by * 32 * PANEL_ROW));
            mma_bf16(acc[n], p[2 * by], y[0], y[1]);
            mma_bf16(acc[n], p[2 * by + 1], y[2], y[3]);
        }
}

/* Where the score of a row and key is in a half: the groups of 8 keys are swapped by the row, for the banks. */
static __device__ __forceinline__ int score_at(int row, int key) { return row * DEV_KEY_TILE + (key ^ row % 8 * 8); }

/* Block (16 heads of a sequence). Lanes 16 i and on of warp w have row 2 w + i in the softmax, each four keys of a tile. */
static __global__ void __launch_bounds__(THREADS, 1) decode_latent(const struct cuda_attn a) {
    pdl_launch_dependents();
    const struct seq_rows s = seq_rows_of(a, (int)(blockIdx.x / (unsigned)a.n_tiles));
    const int first = (int)(blockIdx.x % (unsigned)a.n_tiles) * ROWS, rows = min((int)ROWS, a.group - first);
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int mine = warp * 2 + lane / 16, keys_at = lane / 4 % 4 * 16 + t * 2; /* and 8 on */
    const int lo = first_key(a, s.pos0), hi = s.n > 0 ? s.pos0 + 1 : lo, end = (hi + DEV_KEY_TILE - 1) / DEV_KEY_TILE;
    char *const base = &dynamic_shared<char>();
    float *const scores = (float *)(base + SCORES_AT), *const by_row = (float *)(base + BY_ROW_AT);
    const uint32_t smem = smem_addr(base), p_tile = smem + P_AT;
    const auto stage = [&](int tile) { return smem + (uint32_t)(tile % STAGES * KEYS_BYTES); };
    int tile = lo / DEV_KEY_TILE, key[PREFETCH];
#pragma unroll
    for (int i = 0; i < PREFETCH; i++) key[i] = latent_key(a, s.seq, tile + i, lo, hi);
    bool waited = a.shared_new_keys;
    if (waited) pdl_wait();
#pragma unroll
    for (int i = 0; i < PREFETCH; i++) {
        if (!waited && (tile + i + 1) * DEV_KEY_TILE > s.pos0) {
            pdl_wait(); /* the newest key */
            waited = true;
        }
        if (tile + i < end) latent_copy<8>(a, a.k, key[i], stage(tile + i));
        cp_commit();
    }
    if (!waited) pdl_wait();
    if (s.n == 0) return;
    int next = latent_key(a, s.seq, tile + PREFETCH, lo, hi);
    const int64_t at = (int64_t)s.first * a.n_q_heads + first;
    uint32_t q[LATENT_STEPS / 2][4];
    load_queries(a, at, rows, q);
    float m = -INFINITY, l = 0, acc[COLS / 8][4], score[2][4];
    fill_zero(acc);
    /* Of a tile whose halves of scores are in `score`: probabilities, and by_row what the sums before are multiplied by. */
    const auto softmax = [&](int of) {
#pragma unroll
        for (int e = 0; e < 4; e++) /* row g + 8 (e / 2), group of keys e % 2 */
            *(float2 *)(scores + warp % 2 * HALF + score_at(g + e / 2 * 8, warp / 2 * 16 + e % 2 * 8 + t * 2)) =
                make_float2(score[e % 2][e / 2 * 2], score[e % 2][e / 2 * 2 + 1]);
        __syncthreads();
        const int j = of * DEV_KEY_TILE + keys_at;
        float p[4], top = -INFINITY, correction;
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const float2 *const x = (const float2 *)(scores + score_at(mine, keys_at + n * 8));
            p[2 * n] = __fadd_rn(x[0].x, x[HALF / 2].x);
            p[2 * n + 1] = __fadd_rn(x[0].y, x[HALF / 2].y);
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int k = j + e / 2 * 8 + e % 2;
            if (k >= hi || k < lo) p[e] = -INFINITY;
            top = fmaxf(top, p[e]);
        }
#pragma unroll
        for (int k = 8; k > 0; k /= 2) top = fmaxf(top, __shfl_xor_sync(WARP_ALL, top, k));
        const float to = row_rescale(&m, top, a.scale_log2, &correction);
#pragma unroll
        for (int e = 0; e < 4; e++) p[e] = row_p(p[e], a.scale_log2, to);
        l = row_sum(l, correction, row_quarter(p[0], p[1], p[2], p[3]));
        uint32_t *const w = (uint32_t *)(base + P_AT + mine * P_STRIDE + keys_at * 2);
        w[0] = pack_bf16(p[0], p[1]);
        w[4] = pack_bf16(p[2], p[3]);
        if (lane % 16 == 0) by_row[mine] = correction;
    };
    const auto rescale = [&]() {
        const float correction[2] = {by_row[g], by_row[g + 8]};
#pragma unroll
        for (int n = 0; n < COLS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) acc[n][e] = __fmul_rn(acc[n][e], correction[e / 2]);
    };
#pragma unroll 1
    for (; tile < end; tile++) {
        cp_wait<PREFETCH - 1>();
        __syncthreads();
        if (tile + PREFETCH < end) latent_copy<8>(a, a.k, next, stage(tile + PREFETCH));
        cp_commit();
        next = latent_key(a, s.seq, tile + PREFETCH + 1, lo, hi);
        scores_of(score, q, stage(tile));
        softmax(tile);
        __syncthreads();
        rescale();
        add_values(acc, p_tile, stage(tile));
    }
    l = quad_sum(l);
    l = __fadd_rn(l, __shfl_xor_sync(WARP_ALL, l, 4));
    l = __fadd_rn(l, __shfl_xor_sync(WARP_ALL, l, 8));
    __syncthreads(); /* by_row has been read */
    if (lane % 16 == 0) by_row[mine] = __frcp_rn(l);
    if (a.lse && lane % 16 == 0 && mine < rows) a.lse[at + mine] = row_lse(m, l);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int r = g + 8 * i;
        if (r >= rows) continue;
        uint16_t *const out = (uint16_t *)a.out + (at + r) * a.dim;
#pragma unroll
        for (int n = 0; n < COLS / 8; n++) {
            const int c = warp * COLS + n * 8;
            if (c < a.dim) *(uint32_t *)(out + c + 2 * t) = row_out(acc[n][2 * i], acc[n][2 * i + 1], by_row[r]);
        }
    }
}

int cuda_attn_decode_latent(struct cuda *c, const struct attn_args *a, struct cuda_attn p, bool *ran) {
    *ran = a->seqs.max_q == 1 && c->smem_max >= (size_t)SMEM && (p.group <= MOST_HEADS || !cuda_hopper(c));
    if (!*ran) return 0;
    p.n_tiles = attn_tiles(a, ROWS);
    const int64_t blocks = a->seqs.n * p.n_tiles;
    if (blocks == 0) return 0;
    if (blocks > INT32_MAX)
        FAIL(ERR_INVAL, "dev op attn_fwd: %lld sequences of %d heads: too many for one call", (long long)a->seqs.n, p.group);
    CU_TRY(cudaFuncSetAttribute((const void *)decode_latent, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM));
    CU_TRY(cuda_launch(c, decode_latent, dim3((unsigned)blocks), THREADS, SMEM, p));
    return 0;
}
