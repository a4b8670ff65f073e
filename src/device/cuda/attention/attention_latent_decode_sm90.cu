/* attention_latent_decode_sm90.cu - decode attention whose values are its keys (latent attention) on Hopper: one new row of each
 * sequence, 16 of its heads a cluster of two blocks. attention_latent_fwd_sm90.cu serves more heads than MOST_HEADS,
 * attention_latent.cu everything else.
 *
 * Each block of a cluster has half of the columns, of keys and of values: the half that is one of the two sums of a score. So it
 * copies and reads half of each key, gives its sums to the other block, and has its half of the result. Both compute all
 * probabilities.
 * A block is warp-specialized: four producer warps copy pieces of 16 keys into a ring; four score warps have a piece of each
 * tile, with the queries in registers; four value warps have a quarter of the block's columns of the result. Two blocks fit a
 * multiprocessor. In a CUDA graph all but the newest keys are loaded before the kernel in front, which makes those, has ended
 * (device/graph.h allows it), unless sequences see each other's.
 *
 * Invariant: a row's operations are those of attention_latent.cuh, in that order; the two sums of a score are added in either
 * order, which are the same bits. */
#include "device/cuda/attention/attention_latent.cuh"
#include "device/cuda/tma.cuh"

enum { ROWS = 16, GROUP = 4, THREADS = 3 * GROUP * 32 }; /* score warps, as many value and producer warps */
enum { PIECE = DEV_KEY_TILE / GROUP, RING = 11, STEPS = LATENT_STEPS / 2 };
enum { MOST_HEADS = 32 /* with more, blocks of 64 heads (attention_latent_fwd_sm90.cu) */ };
/* Of a thread, of 80 that two blocks leave. setmaxnreg in each branch, also where it changes nothing: else ptxas spills. */
enum { SCORE_REGISTERS = 120, VALUE_REGISTERS = 80, PRODUCER_REGISTERS = 40 };
enum { BAR_SCORES = 1, BAR_ALL = 2 }; /* named barriers: of the score warps; of these and the value warps */
/* A piece is nine boxes, of 32 columns of each panel: rows of 64 bytes, chunk c of row r at place c ^ (r / 2 % 4). */
enum { BOX_ROW = 64, BOX = PIECE * BOX_ROW, PIECE_BYTES = LATENT_PANELS * BOX };
static_assert(PIECE == 16 && latent_half(1) == 0 && latent_half(2) == 1 && latent_half(3) == 1 && latent_half(4) == 0,
              "a score warp has a quarter of a tile; a half is 32 columns of each panel");

/* A tile's probabilities, from the score warps to the value warps. */
struct weight_tile {
    uint4 p[GROUP][32]; /* fragments (16 keys each), by lane */
    float correction[ROWS];
};
struct decode_smem {
    char ring[RING][PIECE_BYTES];
    float4 received[2][GROUP][2][32]; /* of tiles in turn: the other block's sums, of warp, 8 keys, lane */
    struct weight_tile weights[2];    /* of tiles in turn */
    float4 tops[2][ROWS], sums[ROWS]; /* of the score warps: maxima of tiles in turn; at the end the sums of quarters */
    uint64_t full[RING], empty[RING], received_full[2][GROUP], weights_full[2], weights_empty[2]; /* mbarriers */
};
static constexpr int SMEM = (int)sizeof(struct decode_smem);
static_assert(SMEM <= (228 / 2 - 1) * 1024, "two blocks fit a multiprocessor");

static __device__ __forceinline__ struct decode_smem *block_smem() { return (struct decode_smem *)panel_memory(); }
/* The chunks of an 8 x 8 matrix of a box: where row r has chunk c. */
static __device__ __forceinline__ uint32_t box_offset(int r, int c) { return (uint32_t)(r * BOX_ROW + ((c ^ r / 2 % 4) << 4)); }

/* A stage of the ring, and the parity of its phase. */
struct ring_place {
    int stage;
    uint32_t parity;
};
static __device__ __forceinline__ void advance(struct ring_place &p, int by) {
    p.stage += by;
    if (p.stage >= RING) p.stage -= RING, p.parity ^= 1;
}

/* What a block does: half `half` of the columns, of rows [at, at + rows) of q, over keys [lo, hi) in tiles [tile, end). */
struct work {
    int half, seq, pos0, rows, lo, hi, tile, end;
    int64_t at;
};

/* ---- producer warps ---- */

/* This lane's chunks of a piece, of rows lane / 4 and 8 on, which are these keys' rows; zeros where that is negative. WHOLE: it
 * is nowhere, and a head has all its elements. */
template <bool WHOLE>
static __device__ __forceinline__ void copy_piece(const struct cuda_attn &a, uint32_t to, const int (&row)[2], int half) {
    const int lane = (int)threadIdx.x % 32, c = lane % 4;
    to += box_offset(lane / 4, c);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const char *const from = (const char *)a.k + (int64_t)row[i] * (WHOLE ? LATENT_SIZE : a.dim) * 2 + half * BOX_ROW + c * 16;
#pragma unroll
        for (int p = 0; p < LATENT_PANELS; p++) {
            const bool take = WHOLE || (row[i] >= 0 && p * 64 + half * 32 + c * 8 < a.dim);
            cp_async16(to + (uint32_t)(p * BOX + i * 8 * BOX_ROW), take ? from + p * PANEL_ROW : (const char *)a.k, take);
        }
    }
}

/* Producer warp `warp`: keys [16 warp, 16 warp + 16) of each tile. */
static __device__ __forceinline__ void produce(const struct cuda_attn &a, const struct work &w, int warp) {
    const int lane = (int)threadIdx.x % 32;
    struct decode_smem *const s = block_smem();
    struct ring_place at = {warp, 1};
    bool waited = a.shared_new_keys;
    if (waited) pdl_wait();
    /* Of the piece's key lane % 16. */
    const auto row_of = [&](int tile) {
        const int j = tile * DEV_KEY_TILE + warp * PIECE + lane % PIECE;
        return j >= w.lo && j < w.hi ? key_row(a, w.seq, 0, j) : -1;
    };
    int next = row_of(w.tile);
#pragma unroll 1
    for (int tile = w.tile; tile < w.end; tile++, advance(at, GROUP)) {
        const int row[2] = {__shfl_sync(WARP_ALL, next, lane / 4), __shfl_sync(WARP_ALL, next, lane / 4 + 8)};
        const bool whole = a.dim == LATENT_SIZE && !__any_sync(WARP_ALL, next < 0);
        next = row_of(tile + 1);
        if (!waited && tile * DEV_KEY_TILE + (warp + 1) * PIECE > w.pos0) pdl_wait(), waited = true; /* the newest key */
        mbarrier_wait(smem_addr(&s->empty[at.stage]), at.parity);
        if (whole) copy_piece<true>(a, smem_addr(s->ring[at.stage]), row, w.half);
        else copy_piece<false>(a, smem_addr(s->ring[at.stage]), row, w.half);
        mbarrier_arrive_cp_async(smem_addr(&s->full[at.stage]));
    }
    if (!waited) pdl_wait();
}

/* ---- score warps ---- */

/* The block's half of the columns of the rows, as A fragments; zeros beyond the last row and beyond the head's end. */
static __device__ __forceinline__ void load_queries(const struct cuda_attn &a, const struct work &w, uint32_t (&q)[STEPS][4]) {
    const int lane = (int)threadIdx.x % 32, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = lane / 4 + 8 * i;
        const uint16_t *const from = (const uint16_t *)a.q + (row < w.rows ? (w.at + row) * a.dim : 0);
#pragma unroll
        for (int k = 0; k < STEPS; k++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int c = (k / 2 * 4 + w.half * 2 + k % 2) * 16 + h * 8 + 2 * t;
                q[k][2 * h + i] = row < w.rows && c < a.dim ? *(const uint32_t *)(from + c) : 0;
            }
    }
}

/* x (16 rows, 16 keys) = the block's half of q . K^T */
static __device__ __forceinline__ void half_scores(float (&x)[2][4], const uint32_t (&q)[STEPS][4], uint32_t piece) {
    const int lane = (int)threadIdx.x % 32, row = lane / 16 * 8 + lane % 8, chunk = lane / 8 % 2;
    const uint32_t at[2] = {piece + box_offset(row, chunk), piece + box_offset(row, chunk + 2)};
    fill_zero(x);
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        uint32_t y[4];
        ldmatrix_x4(y, at[k % 2] + (uint32_t)(k / 2 * BOX));
        mma_bf16(x[0], q[k], y[0], y[1]);
        mma_bf16(x[1], q[k], y[2], y[3]);
    }
}

/* Score warp `warp`: keys [16 warp, 16 warp + 16) of each tile. It sends its sums of tile i + 2 when it has the other block's of
 * tile i + 1, which that sent when it had read those of tile i: so two places are enough. */
static __device__ __forceinline__ void score_tiles(const struct cuda_attn &a, const struct work &w, int warp) {
    const int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    struct decode_smem *const s = block_smem();
    struct ring_place at = {warp, 0};
    uint32_t turn = 0, parity = 0; /* turn: tile % 2, from the first on; of mbarriers that tiles have in turn */
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0};
    uint32_t q[STEPS][4];
    pdl_wait();
    load_queries(a, w, q);
#pragma unroll 1
    for (int j = w.tile * DEV_KEY_TILE + warp * PIECE; j < w.hi + warp * PIECE; j += DEV_KEY_TILE) {
        float x[2][4], top[2], correction[2];
        const uint32_t received = smem_addr(&s->received_full[turn][warp]);
        if (lane == 0) mbarrier_expect_tx(received, 2 * 32 * 16);
        mbarrier_wait(smem_addr(&s->full[at.stage]), at.parity);
        half_scores(x, q, smem_addr(s->ring[at.stage]));
#pragma unroll
        for (int n = 0; n < 2; n++)
            cluster_store16(smem_addr(&s->received[turn][warp][n][lane]), received, (uint32_t)w.half ^ 1, x[n]);
        mbarrier_wait(received, parity);
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const float4 y = s->received[turn][warp][n][lane];
            x[n][0] = __fadd_rn(x[n][0], y.x), x[n][1] = __fadd_rn(x[n][1], y.y);
            x[n][2] = __fadd_rn(x[n][2], y.z), x[n][3] = __fadd_rn(x[n][3], y.w);
        }
        if (j < w.lo || j + PIECE > w.hi)
#pragma unroll
            for (int e = 0; e < 8; e++) {
                const int k = j + e / 4 * 8 + t * 2 + e % 2;
                if (k >= w.hi || k < w.lo) x[e / 4][e % 4] = -INFINITY;
            }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            top[i] = quad_max(fmaxf(fmaxf(x[0][2 * i], x[0][2 * i + 1]), fmaxf(x[1][2 * i], x[1][2 * i + 1])));
            if (t == 0) ((float *)&s->tops[turn][g + 8 * i])[warp] = top[i];
        }
        named_barrier_sync(BAR_SCORES, GROUP * 32);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float4 y = s->tops[turn][g + 8 * i];
            const float to = row_rescale(&m[i], fmaxf(fmaxf(y.x, y.y), fmaxf(y.z, y.w)), a.scale_log2, &correction[i]);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float &p = x[e / 2][2 * i + e % 2];
                p = row_p(p, a.scale_log2, to);
            }
            l[i] = row_sum(l[i], correction[i], row_quarter(x[0][2 * i], x[0][2 * i + 1], x[1][2 * i], x[1][2 * i + 1]));
        }
        struct weight_tile *const to = &s->weights[turn];
        mbarrier_wait(smem_addr(&s->weights_empty[turn]), parity ^ 1);
        to->p[warp][lane] = make_uint4(pack_bf16(x[0][0], x[0][1]), pack_bf16(x[0][2], x[0][3]), pack_bf16(x[1][0], x[1][1]),
                                       pack_bf16(x[1][2], x[1][3]));
        if (warp == 0 && t == 0) to->correction[g] = correction[0], to->correction[g + 8] = correction[1];
        mbarrier_arrive(smem_addr(&s->weights_full[turn]));
        advance(at, GROUP);
        parity ^= turn, turn ^= 1;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        l[i] = quad_sum(l[i]);
        if (t == 0) ((float *)&s->sums[g + 8 * i])[warp] = l[i];
    }
    named_barrier_sync(BAR_ALL, 2 * GROUP * 32);
    if (!a.lse || warp > 0 || w.half > 0 || t > 0) return;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float4 y = s->sums[g + 8 * i];
        if (g + 8 * i < w.rows) a.lse[w.at + g + 8 * i] = row_lse(m[i], __fadd_rn(__fadd_rn(y.x, y.y), __fadd_rn(y.z, y.w)));
    }
}

/* ---- value warps ---- */

/* Value warp `warp`: of each box, columns 8 warp and on. */
static __device__ __forceinline__ void value_tiles(const struct cuda_attn &a, const struct work &w, int warp) {
    const int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    struct decode_smem *const s = block_smem();
    const uint32_t ring = smem_addr(s->ring) + box_offset(lane % 16, warp);
    struct ring_place at = {0, 0};
    uint32_t turn = 0, parity = 0;
    float acc[LATENT_PANELS][4];
    fill_zero(acc);
    pdl_wait();
#pragma unroll 1
    for (int left = w.end - w.tile; left > 0; left--) {
        const struct weight_tile *const x = &s->weights[turn];
        mbarrier_wait(smem_addr(&s->weights_full[turn]), parity);
        const float correction[2] = {x->correction[g], x->correction[g + 8]};
#pragma unroll
        for (int n = 0; n < LATENT_PANELS; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) acc[n][e] = __fmul_rn(acc[n][e], correction[e / 2]);
#pragma unroll
        for (int k = 0; k < GROUP; k += 2) { /* two pieces, each the keys of 16 lanes */
            const uint4 p0 = x->p[k][lane], p1 = x->p[k + 1][lane];
            const uint32_t p[2][4] = {{p0.x, p0.y, p0.z, p0.w}, {p1.x, p1.y, p1.z, p1.w}};
            struct ring_place second = at;
            advance(second, 1);
            const uint32_t from = ring + (uint32_t)((lane < 16 ? at.stage : second.stage) * PIECE_BYTES);
#pragma unroll
            for (int n = 0; n < LATENT_PANELS; n++) {
                uint32_t y[4];
                ldmatrix_x4_trans(y, from + (uint32_t)(n * BOX));
                mma_bf16(acc[n], p[0], y[0], y[1]);
                mma_bf16(acc[n], p[1], y[2], y[3]);
            }
            mbarrier_arrive(smem_addr(&s->empty[at.stage])), mbarrier_arrive(smem_addr(&s->empty[second.stage]));
            advance(at, 2);
        }
        mbarrier_arrive(smem_addr(&s->weights_empty[turn]));
        parity ^= turn, turn ^= 1;
    }
    named_barrier_sync(BAR_ALL, 2 * GROUP * 32);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int r = g + 8 * i;
        if (r >= w.rows) continue;
        const float4 y = s->sums[r];
        const float inv = __frcp_rn(__fadd_rn(__fadd_rn(y.x, y.y), __fadd_rn(y.z, y.w)));
        uint16_t *const out = (uint16_t *)a.out + (w.at + r) * a.dim;
#pragma unroll
        for (int n = 0; n < LATENT_PANELS; n++) {
            const int c = n * 64 + w.half * 32 + warp * 8;
            if (c < a.dim) *(uint32_t *)(out + c + 2 * t) = row_out(acc[n][2 * i], acc[n][2 * i + 1], inv);
        }
    }
}

static __device__ __forceinline__ void init_mbarriers() {
    struct decode_smem *const s = block_smem();
    for (int i = 0; i < RING; i++) mbarrier_init(smem_addr(&s->full[i]), 32), mbarrier_init(smem_addr(&s->empty[i]), GROUP * 32);
    for (int i = 0; i < 2; i++) {
        for (int k = 0; k < GROUP; k++) mbarrier_init(smem_addr(&s->received_full[i][k]), 1);
        mbarrier_init(smem_addr(&s->weights_full[i]), GROUP * 32), mbarrier_init(smem_addr(&s->weights_empty[i]), GROUP * 32);
    }
    mbarrier_init_fence();
}

/* Cluster (16 heads of a sequence). No block ends before it has all that the other sends. */
static __global__ void __launch_bounds__(THREADS, 2) decode_latent_sm90(const struct cuda_attn a) {
    const int warp = (int)threadIdx.x / 32;
    pdl_launch_dependents();
    const unsigned pair = blockIdx.x / 2;
    const struct seq_rows s = seq_rows_of(a, (int)(pair / (unsigned)a.n_tiles));
    const int first = (int)(pair % (unsigned)a.n_tiles) * ROWS;
    struct work w;
    w.half = (int)cluster_rank();
    w.seq = s.seq;
    w.pos0 = s.pos0;
    w.rows = min((int)ROWS, a.group - first);
    w.lo = first_key(a, s.pos0);
    w.hi = s.pos0 + 1;
    w.tile = w.lo / DEV_KEY_TILE;
    w.end = (w.hi + DEV_KEY_TILE - 1) / DEV_KEY_TILE;
    w.at = (int64_t)s.first * a.n_q_heads + first;
    if (threadIdx.x == 0) init_mbarriers();
    __syncwarp();
    cluster_sync();
    if (s.n == 0) return;
    if (warp < GROUP) {
        setmaxnreg_inc<SCORE_REGISTERS>();
        score_tiles(a, w, warp);
    } else if (warp < 2 * GROUP) {
        setmaxnreg_inc<VALUE_REGISTERS>();
        value_tiles(a, w, warp - GROUP);
    } else {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        produce(a, w, warp - 2 * GROUP);
    }
}

int cuda_attn_decode_latent_sm90(struct cuda *c, const struct attn_args *a, struct cuda_attn p, bool *ran) {
    *ran = a->seqs.max_q == 1 && cuda_hopper(c) && p.group <= MOST_HEADS;
    if (!*ran) return 0;
    p.n_tiles = attn_tiles(a, ROWS);
    const int64_t blocks = 2 * a->seqs.n * p.n_tiles;
    if (blocks == 0) return 0;
    if (blocks > INT32_MAX)
        FAIL(ERR_INVAL, "dev op attn_fwd: %lld sequences of %d heads: too many for one call", (long long)a->seqs.n, p.group);
    CU_TRY(cudaFuncSetAttribute((const void *)decode_latent_sm90, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM));
    CU_TRY(cuda_launch_pairs(c, decode_latent_sm90, dim3((unsigned)blocks), THREADS, SMEM, p));
    return 0;
}
