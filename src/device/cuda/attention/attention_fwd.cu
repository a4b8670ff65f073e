/* attention_fwd.cu - forward of causal attention on the GPU: training's packed sequences, chunked prefill and decode with a
 * paged KV cache, with one arithmetic of a row.
 *
 * Two tensor-core kernels (bf16) are here.  fwd_prefill: a warp has 16 packed rows and walks all keys alone.
 * fwd_decode: a block has the (at most 16) packed rows of one sequence; its warps share the keys of one or two tiles for
 * Q.K^T and the columns of the output for P.V.  On Hopper attention_decode_sm90.cu takes most of decode and attention_fwd_sm90.cu
 * takes training.  fwd_plain is for f32 and odd sizes.
 * No split-KV, no reduction between blocks: attention is batch-invariant.
 *
 * Invariant: an element of a row's output goes through the same chain of operations in
 * all of these, whoever the row's neighbours are:
 *   s       mma over D in ascending blocks of 16, under the softcap where there is one; masked scores become -inf
 *   m       max(m, max s * c), exact in any order
 *   p       2^(s c - m), one fma and one ex2; rounded to bf16 for P.V, not for the sum
 *   l       32 running sums a row: of quarter w of every tile (16 keys), lane t of the quad
 *           has ((p0 + p1) + (p2 + p3)) of its four columns 2t, 2t+1, 2t+8, 2t+9
 *   acc     acc 2^(m_old - m), then mma over the 64 keys of the tile in ascending blocks of 16
 * and at the end l sums over the quad as a butterfly, then ((w0 + w1) + (w2 + w3)).
 * A tile that a row does not see multiplies by 2^0 = 1 and adds zeros, so it may be skipped
 * or not.  (That can turn a sum of -0 into +0; the output adds +0, which settles it.)
 * All steps outside of mma are written as intrinsics that the compiler does not fuse. */
#include "device/cuda/attention/attention_warp.cuh"
#include "device/cuda/attention/online_softmax.cuh"

/* ---- loads of both kernels ---- */

/* Two packed rows (r and r + 8 of this lane) as A fragments, zeros beyond the last row and the head size. */
template <int SIZE>
static __device__ __forceinline__ void load_q(const struct cuda_attn &a, const struct seq_rows &s, int head, int r,
                                              uint32_t (&q)[SIZE / 16][4]) {
    const int t = (int)threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const bool have = r + 8 * i < s.packed;
        const uint16_t *row = (const uint16_t *)a.q + (have ? packed_index(a, s, head, r + 8 * i) * a.dim : 0);
#pragma unroll
        for (int k = 0; k < SIZE / 16; k++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int c = k * 16 + h * 8 + 2 * t;
                q[k][2 * h + i] = have && c < a.dim ? *(const uint32_t *)(row + c) : 0;
            }
    }
}

/* Keys [lo, hi) are what the block's rows see; all other rows of its tiles are zeros. */
struct key_range {
    int lo, hi, head;
};
/* A lane's share of a tile's rows, as numbers of 16-byte chunks of k and v, -1 where there is no key; block tables are read
 * here, a tile before the copy. A warp copies whole rows at a time where a row has a power of two of chunks: then a lane
 * has one row, lane / RUN of the copy and lane % RUN in it; else the rows are 2 x 32, as many as a lane has bits for. */
template <int SIZE, int NT> struct tile_rows {
    static constexpr int CHUNKS = SIZE / 8;
    static constexpr bool WHOLE = 32 % CHUNKS == 0;
    static constexpr int RUN = WHOLE ? 32 / CHUNKS : 32; /* rows of a warp at a time */
    int at[WHOLE ? 1 : 2];

    static __device__ __forceinline__ int chunk_of_key(const struct cuda_attn &a, const struct seq_rows &s,
                                                       const struct key_range &range, int j) {
        return j >= range.lo && j < range.hi ? key_row(a, s.seq, range.head, j) * (a.dim / 8) : -1;
    }
    __device__ __forceinline__ void read(const struct cuda_attn &a, const struct seq_rows &s, const struct key_range &range,
                                         int tile) {
        const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
        if constexpr (WHOLE) {
            const int row = lane / RUN * (NT / CHUNKS) + warp * RUN + lane % RUN; /* beyond the tile: read for nothing */
            at[0] = row < DEV_KEY_TILE ? chunk_of_key(a, s, range, tile * DEV_KEY_TILE + row) : -1;
        } else {
#pragma unroll
            for (int i = 0; i < 2; i++) at[i] = chunk_of_key(a, s, range, tile * DEV_KEY_TILE + i * 32 + lane);
        }
    }
    /* First chunk of the row of this thread's i-th copy. */
    __device__ __forceinline__ int of_copy(int i, int row) const {
        const int lane = (int)threadIdx.x % 32;
        if constexpr (WHOLE) return __shfl_sync(WARP_ALL, at[0], i * RUN + lane / CHUNKS);
        else {
            const int lower = __shfl_sync(WARP_ALL, at[0], row % 32), upper = __shfl_sync(WARP_ALL, at[1], row % 32);
            return row < 32 ? lower : upper;
        }
    }
};
/* Queues the copy of a tile of keys and, behind it, of values. */
template <int SIZE, int NT>
static __device__ __forceinline__ void load_keys(const struct cuda_attn &a, const struct tile_rows<SIZE, NT> &t, uint32_t to) {
#pragma unroll
    for (int i = 0; i < chunks_of<SIZE, DEV_KEY_TILE, NT>(); i++) {
        const struct chunk at = chunk_of<SIZE, NT>(i);
        const int first = t.of_copy(i, at.row);
        const bool take = first >= 0 && at.col < a.dim;
        const int64_t from = take ? (int64_t)(first + at.col / 8) * 16 : 0;
        const uint32_t dst = to + (uint32_t)(at.row * tile_stride(SIZE) + at.col * 2);
        cp_async16(dst, (const char *)a.k + from, take);
        cp_async16(dst + DEV_KEY_TILE * tile_stride(SIZE), (const char *)a.v + from, take);
    }
}

/* The pipeline of key and value tiles, T at a time, STAGES deep. Invariant: at `next`, the copies of tiles up to
 * now + STAGES - T - 1 are queued, one group each. */
template <int SIZE, int NT, int STAGES, int T> struct kv_pipeline {
    static constexpr int STAGE_BYTES = 2 * DEV_KEY_TILE * tile_stride(SIZE);
    const struct cuda_attn &a;
    const struct seq_rows &s;
    const struct key_range range;
    const uint32_t base;
    int now, end, queued; /* tiles */
    struct tile_rows<SIZE, NT> next_rows[T];

    __device__ __forceinline__ kv_pipeline(const struct cuda_attn &attn, const struct seq_rows &rows, struct key_range keys,
                                           uint32_t at)
        : a(attn), s(rows), range(keys), base(at), now(keys.lo / DEV_KEY_TILE), end((keys.hi + DEV_KEY_TILE - 1) / DEV_KEY_TILE),
          queued(now) {
        struct tile_rows<SIZE, NT> first[STAGES]; /* all loads are issued before the first is needed */
#pragma unroll
        for (int i = 0; i < STAGES; i++) first[i].read(a, s, range, queued + i);
#pragma unroll
        for (int i = 0; i < STAGES - T; i++) queue(first[i]);
#pragma unroll
        for (int i = 0; i < T; i++) next_rows[i] = first[STAGES - T + i];
    }
    __device__ __forceinline__ uint32_t stage(int tile) const { return base + (uint32_t)(tile % STAGES) * STAGE_BYTES; }
    __device__ __forceinline__ void queue(const struct tile_rows<SIZE, NT> &t) {
        if (queued < end) load_keys<SIZE, NT>(a, t, stage(queued));
        cp_commit();
        queued++;
    }
    __device__ __forceinline__ void queue_next() {
#pragma unroll
        for (int i = 0; i < T; i++) queue(next_rows[i]);
#pragma unroll
        for (int i = 0; i < T; i++) next_rows[i].read(a, s, range, queued + i);
    }
    /* Waits for tiles [now, now + T) and queues T others. All threads of the block call it, after they are done with the
     * tiles before. */
    __device__ __forceinline__ void next() {
        if (STAGES == T) {
            __syncthreads();
            queue_next();
            cp_wait<0>();
            __syncthreads();
        } else {
            cp_wait<STAGES >= 2 * T ? STAGES - 2 * T : 0>();
            __syncthreads();
            queue_next();
        }
    }
};

/* ---- prefill and training: 16 packed rows a warp ---- */

template <int SIZE> struct prefill_shape {
    static constexpr int WARPS = SIZE <= 64 ? 8 : 4, ROWS = 16 * WARPS;
    static constexpr int STAGES = SIZE <= 128 ? 2 : 1;
    static constexpr int BLOCKS = SIZE <= 64 ? 2 : SIZE <= 128 ? 3 : 1; /* of a multiprocessor */
    static constexpr bool Q_IN_SMEM = SIZE > 128;                       /* else its fragments stay in registers */
    static constexpr int KEYS = STAGES * 2 * DEV_KEY_TILE * tile_stride(SIZE);
    static constexpr int SMEM = KEYS + (Q_IN_SMEM ? ROWS * tile_stride(SIZE) : 0);
};

/* One tile whose scores are s: all 64 keys by one warp. */
template <int SIZE>
static __device__ __forceinline__ void attend_tile(struct row_pair<SIZE> &x, float (&s)[8][4], uint32_t v, float scale_log2) {
    uint32_t p[4][4];
    softmax_tile<SIZE>(x, p, s, scale_log2);
    mma_pb<SIZE, SIZE, DEV_KEY_TILE>(x.acc, p, v);
}

/* s = q . K^T with q in registers, the same MMAs in the same order as mma_abt. */
template <int SIZE>
static __device__ __forceinline__ void rows_scores(float (&s)[8][4], const uint32_t (&q)[SIZE / 16][4], uint32_t k_tile) {
    const int lane = (int)threadIdx.x % 32;
    k_tile += (lane % 8 + lane / 16 * 8) * tile_stride(SIZE) + lane / 8 % 2 * 16;
#pragma unroll
    for (int k = 0; k < SIZE / 16; k++)
#pragma unroll
        for (int n = 0; n < 4; n++) {
            uint32_t y[4];
            ldmatrix_x4(y, k_tile + n * 16 * tile_stride(SIZE) + k * 32);
            mma_bf16(s[2 * n], q[k], y[0], y[1]);
            mma_bf16(s[2 * n + 1], q[k], y[2], y[3]);
        }
}

/* The block's packed rows [first, last] as a tile, zeros beyond. */
template <int SIZE>
static __device__ __forceinline__ void load_q_tile(const struct cuda_attn &a, const struct seq_rows &s, int head, int first,
                                                   int last, uint32_t to) {
    constexpr int ROWS = prefill_shape<SIZE>::ROWS;
#pragma unroll 4
    for (int i = 0; i < chunks_of<SIZE, ROWS, ROWS * 2>(); i++) {
        const struct chunk at = chunk_of<SIZE, ROWS * 2>(i);
        const bool take = first + at.row <= last && at.col < a.dim;
        const int64_t from = take ? packed_index(a, s, head, first + at.row) * a.dim + at.col : 0;
        cp_async16(to + at.row * tile_stride(SIZE) + at.col * 2, (const uint16_t *)a.q + from, take);
    }
}

/* Block (tile of rows of a sequence, kv head). The last rows, which see most keys, start first. */
template <int SIZE, bool CAP>
__global__ void __launch_bounds__(prefill_shape<SIZE>::ROWS * 2, prefill_shape<SIZE>::BLOCKS)
    fwd_prefill(const struct cuda_attn a) {
    using shape = prefill_shape<SIZE>;
    pdl_launch_dependents();
    pdl_wait();
    const struct seq_rows s = seq_rows_of(a, (int)(blockIdx.x / (unsigned)a.n_tiles));
    const int first = (a.n_tiles - 1 - (int)(blockIdx.x % (unsigned)a.n_tiles)) * shape::ROWS, head = (int)blockIdx.y;
    if (first >= s.packed || s.packed <= a.decode_rows) return;
    const int last = min(first + shape::ROWS, s.packed) - 1;
    const int lane = (int)threadIdx.x % 32, mine = first + (int)threadIdx.x / 32 * 16, r = mine + lane / 4;
    const uint32_t smem = smem_addr(&dynamic_shared<char>()), q_tile = smem + shape::KEYS;
    const int p_last = s.pos0 + last / a.group;
    if constexpr (shape::Q_IN_SMEM) load_q_tile<SIZE>(a, s, head, first, last, q_tile); /* in the first group of copies */
    const struct key_range range = {first_key(a, s.pos0 + first / a.group), p_last + 1, head};
    kv_pipeline<SIZE, shape::ROWS * 2, shape::STAGES, 1> walk(a, s, range, smem);
    uint32_t q[shape::Q_IN_SMEM ? 1 : SIZE / 16][4];
    if constexpr (!shape::Q_IN_SMEM) load_q<SIZE>(a, s, head, r, q);
    /* positions of my rows, the first and the last of my warp; rows beyond the last stand where the last does */
    const int p[2] = {s.pos0 + min(r, last) / a.group, s.pos0 + min(r + 8, last) / a.group};
    const int p_min = s.pos0 + min(mine, last) / a.group, p_max = s.pos0 + min(mine + 15, last) / a.group;
    const int from_min = first_key(a, p_min), from_max = first_key(a, p_max);
    struct row_pair<SIZE> x = {
        {-INFINITY, -INFINITY}, {}, {}
    };
    for (; walk.now < walk.end; walk.now++) {
        walk.next();
        const uint32_t k_tile = walk.stage(walk.now);
        const int j = walk.now * DEV_KEY_TILE;
        if (mine > last || j > p_max || j + DEV_KEY_TILE <= from_min) continue;
        float score[8][4];
        fill_zero(score);
        if constexpr (shape::Q_IN_SMEM)
            mma_abt<SIZE, DEV_KEY_TILE>(score, q_tile + (uint32_t)(mine - first) * tile_stride(SIZE), k_tile);
        else rows_scores<SIZE>(score, q, k_tile);
        if constexpr (CAP) cap_scores(a, score);
        if (j + DEV_KEY_TILE - 1 > p_min || j < from_max) mask_scores(a, score, p, j);
        attend_tile<SIZE>(x, score, k_tile + DEV_KEY_TILE * tile_stride(SIZE), a.scale_log2);
    }
    rows_store<SIZE>(a, s, head, r, x);
}

/* ---- decode: 16 packed rows a block ---- */

enum { DECODE_SMALL_BLOCK = 0 }; /* in place of T: one tile at a time and a small block, so that many share a multiprocessor */
template <int SIZE, int TS> struct decode_shape { /* T: tiles at a time; TS: T, or DECODE_SMALL_BLOCK */
    static constexpr int T = TS == DECODE_SMALL_BLOCK ? 1 : TS;
    static constexpr int WARPS = 4 * T; /* of a block, four a tile */
    static constexpr int STAGES = SIZE > 128 ? 1 : SIZE > 64 || TS == DECODE_SMALL_BLOCK ? 2 : 3 + T;
    static constexpr int BLOCKS = SIZE > 128 || T > 1                      ? 2
                                  : SIZE <= 64 && TS == DECODE_SMALL_BLOCK ? 5
                                                                           : 3; /* of a multiprocessor */
    static constexpr int KEYS = STAGES * 2 * DEV_KEY_TILE * tile_stride(SIZE);
    static constexpr int P = 16 * tile_stride(DEV_KEY_TILE); /* probabilities of a tile */
    static constexpr int SUMS = 4 * 64 * (int)sizeof(float); /* what the second tile's warps add to the sums of the first's */
    static constexpr int SMEM = KEYS + T * P + WARPS * 16 * (int)sizeof(float) + (T - 1) * SUMS; /* and one number a row and warp */
    static constexpr int COLS = (SIZE / 8 + WARPS - 1) / WARPS; /* groups of 8 columns of the output that a warp has, at most */
};

/* P.V for this warp's columns: groups of 8 number warp, warp + WARPS, ... */
template <int SIZE, int TS>
static __device__ __forceinline__ void decode_pv(float (&acc)[decode_shape<SIZE, TS>::COLS][4], const float (&correction)[2],
                                                 uint32_t p, uint32_t v) {
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    uint32_t w[4][4];
#pragma unroll
    for (int k = 0; k < 4; k++) ldmatrix_x4(w[k], p + (lane % 16) * tile_stride(DEV_KEY_TILE) + lane / 16 * 16 + k * 32);
#pragma unroll
    for (int n = 0; n < decode_shape<SIZE, TS>::COLS; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) acc[n][j] = __fmul_rn(acc[n][j], correction[j / 2]);
#pragma unroll
    for (int n = 0; n < decode_shape<SIZE, TS>::COLS; n++) {
        const int block = warp + decode_shape<SIZE, TS>::WARPS * n;
        if (block >= SIZE / 8) break;
#pragma unroll
        for (int k = 0; k < 4; k += 2) {
            uint32_t y[4];
            ldmatrix_x4_trans(y, v + (k * 16 + lane) * tile_stride(SIZE) + block * 16);
            mma_bf16(acc[n], w[k], y[0], y[1]);
            mma_bf16(acc[n], w[k + 1], y[2], y[3]);
        }
    }
}

/* s (16 rows, my quarter of the tile: 16 keys) = q . K^T */
template <int SIZE>
static __device__ __forceinline__ void decode_scores(float (&s)[2][4], const uint32_t (&q)[SIZE / 16][4], uint32_t k_tile) {
    const int lane = (int)threadIdx.x % 32, quarter = (int)threadIdx.x / 32 % 4;
    k_tile += (quarter * 16 + lane % 8 + lane / 16 * 8) * tile_stride(SIZE) + lane / 8 % 2 * 16;
#pragma unroll
    for (int k = 0; k < SIZE / 16; k++) {
        uint32_t y[4];
        ldmatrix_x4(y, k_tile + k * 32);
        mma_bf16(s[0], q[k], y[0], y[1]);
        mma_bf16(s[1], q[k], y[2], y[3]);
    }
}

/* The value of row r that each of the 4 warps of a tile has left in `by_warp` (4, 16), after a barrier. */
static __device__ __forceinline__ float4 of_warps(const float *by_warp, int r) {
    return make_float4(by_warp[r], by_warp[16 + r], by_warp[32 + r], by_warp[48 + r]);
}
static __device__ __forceinline__ float max4(float4 v) { return fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)); }

template <int SIZE, int TS>
static __device__ __forceinline__ void decode_store(const struct cuda_attn &a, const struct seq_rows &s, int head, int r, int i,
                                                    const float (&acc)[decode_shape<SIZE, TS>::COLS][4], float m, float4 l4) {
    const int t = (int)threadIdx.x % 4, warp = (int)threadIdx.x / 32;
    const float l = __fadd_rn(__fadd_rn(l4.x, l4.y), __fadd_rn(l4.z, l4.w)), inv = __frcp_rn(l);
    if (r >= s.packed) return;
    const int64_t at = packed_index(a, s, head, r);
    uint16_t *out = (uint16_t *)a.out + at * a.dim;
#pragma unroll
    for (int n = 0; n < decode_shape<SIZE, TS>::COLS; n++) {
        const int c = (warp + decode_shape<SIZE, TS>::WARPS * n) * 8;
        if (c < a.dim) *(uint32_t *)(out + c + 2 * t) = row_out(acc[n][2 * i], acc[n][2 * i + 1], inv);
    }
    if (a.lse && t == 0 && warp == 0) a.lse[at] = row_lse(m, l);
}

/* Block (16 packed rows of a sequence, kv head), four warps for each of T tiles. Warp w of a tile scores its quarter w; every
 * warp keeps the maxima of all rows and its columns of the result; the first tile's warps keep the sums. */
template <int SIZE, int TS, bool CAP>
__global__ void __launch_bounds__(decode_shape<SIZE, TS>::WARPS * 32, decode_shape<SIZE, TS>::BLOCKS)
    fwd_decode(const struct cuda_attn a) {
    using shape = decode_shape<SIZE, TS>;
    constexpr int T = shape::T;
    pdl_launch_dependents();
    pdl_wait();
    const struct seq_rows s = seq_rows_of(a, (int)(blockIdx.x / (unsigned)a.n_tiles));
    const int first = (int)(blockIdx.x % (unsigned)a.n_tiles) * 16, head = (int)blockIdx.y;
    if (first >= s.packed || (a.decode_rows >= 0 && s.packed > a.decode_rows)) return;
    const int last = min(first + 16, s.packed) - 1, lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const int mine = T == 1 ? 0 : warp / 4, quarter = warp % 4, row = lane / 4, t = lane % 4, r = first + row;
    const struct key_range range = {first_key(a, s.pos0 + first / a.group), s.pos0 + last / a.group + 1, head};
    const uint32_t smem = smem_addr(&dynamic_shared<char>());
    char *p_tile = &dynamic_shared<char>() + shape::KEYS;
    float *by_warp = (float *)(p_tile + T * shape::P), *sums = by_warp + shape::WARPS * 16;
    const int p_min = s.pos0 + first / a.group, from_max = first_key(a, s.pos0 + last / a.group);
    kv_pipeline<SIZE, shape::WARPS * 32, shape::STAGES, T> walk(a, s, range, smem);
    uint32_t q[SIZE / 16][4];
    load_q<SIZE>(a, s, head, r, q);
    const int p[2] = {s.pos0 + min(r, last) / a.group, s.pos0 + min(r + 8, last) / a.group};
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0}, acc[shape::COLS][4], score[2][4], correction[T][2], sum[2];
    fill_zero(acc);
    for (; walk.now < walk.end; walk.now += T) {
        const int n = T == 1 ? 1 : min(T, walk.end - walk.now); /* tiles of this round */
        walk.next();
        const int tile = walk.now + min(mine, n - 1); /* warps without a tile of their own score the last again; unused */
        fill_zero(score);
        decode_scores<SIZE>(score, q, walk.stage(tile));
        if constexpr (CAP) cap_scores(a, score);
        if (tile * DEV_KEY_TILE + DEV_KEY_TILE - 1 > p_min || tile * DEV_KEY_TILE < from_max)
            mask_scores(a, score, p, tile * DEV_KEY_TILE + quarter * 16);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float top =
                quad_max(fmaxf(fmaxf(score[0][2 * i], score[0][2 * i + 1]), fmaxf(score[1][2 * i], score[1][2 * i + 1])));
            if (t == 0) by_warp[warp * 16 + row + 8 * i] = top;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float base = 0;
#pragma unroll
            for (int u = 0; u < T; u++) {
                if (u >= n) break;
                const float to = row_rescale(&m[i], max4(of_warps(by_warp + u * 64, row + 8 * i)), a.scale_log2, &correction[u][i]);
                if (u == mine) base = to;
            }
#pragma unroll
            for (int e = 0; e < 4; e++) score[e / 2][2 * i + e % 2] = row_p(score[e / 2][2 * i + e % 2], a.scale_log2, base);
            sum[i] = row_quarter(score[0][2 * i], score[0][2 * i + 1], score[1][2 * i], score[1][2 * i + 1]);
            if (mine > 0) sums[(quarter * 32 + lane) * 2 + i] = sum[i];
            uint32_t *to = (uint32_t *)(p_tile + mine * shape::P + (row + 8 * i) * tile_stride(DEV_KEY_TILE)) + quarter * 8 + t;
            to[0] = pack_bf16(score[0][2 * i], score[0][2 * i + 1]);
            to[4] = pack_bf16(score[1][2 * i], score[1][2 * i + 1]);
        }
        __syncthreads();
#pragma unroll
        for (int u = 0; u < T; u++) {
            if (u >= n) break;
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (mine == 0) l[i] = row_sum(l[i], correction[u][i], u == 0 ? sum[i] : sums[(quarter * 32 + lane) * 2 + i]);
            decode_pv<SIZE, TS>(acc, correction[u], smem + shape::KEYS + u * shape::P,
                                walk.stage(walk.now + u) + DEV_KEY_TILE * tile_stride(SIZE));
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) { /* every warp is past the barrier after which by_warp was read */
        l[i] = quad_sum(l[i]);
        if (t == 0 && mine == 0) by_warp[warp * 16 + row + 8 * i] = l[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++) decode_store<SIZE, TS>(a, s, head, r + 8 * i, i, acc, m[i], of_warps(by_warp, row + 8 * i));
}

/* ---- plain: a warp has one packed row and up to 256 columns of the result ---- */

template <class T> static __device__ __forceinline__ float plain_score(const struct cuda_attn &a, const T *q, int row, bool seen) {
    float slope;
    return seen ? plain_capped(a, __fmul_rn(plain_dot(q, (const T *)a.k + (int64_t)row * a.dim, a.dim), a.scale), &slope)
                : -INFINITY;
}

/* Tiles and running maximum as in ref; a lane scores two keys of the tile and sums columns lane, lane + 32, ... */
template <class T> __global__ void __launch_bounds__(ATTN_PLAIN_WARPS * 32) fwd_plain(const struct cuda_attn a) {
    constexpr int N = ATTN_PLAIN_COLS / 32;
    pdl_launch_dependents();
    pdl_wait();
    const struct seq_rows s = seq_rows_of(a, (int)(blockIdx.x / (unsigned)a.n_tiles));
    const int r = (int)(blockIdx.x % (unsigned)a.n_tiles) * ATTN_PLAIN_WARPS + (int)threadIdx.x / 32;
    if (r >= s.packed) return;
    const int lane = (int)threadIdx.x % 32, head = (int)blockIdx.y, col = (int)blockIdx.z * ATTN_PLAIN_COLS + lane;
    const int p = s.pos0 + r / a.group, lo = first_key(a, p);
    const int64_t at = packed_index(a, s, head, r);
    const T *q = (const T *)a.q + at * a.dim;
    float m = -INFINITY, l = 0, acc[N] = {};
    for (int j = lo / DEV_KEY_TILE * DEV_KEY_TILE; j <= p; j += DEV_KEY_TILE) {
        const int key[2] = {j + lane, j + 32 + lane};
        const bool seen[2] = {key[0] >= lo && key[0] <= p, key[1] >= lo && key[1] <= p};
        const int row[2] = {seen[0] ? key_row(a, s.seq, head, key[0]) : 0, seen[1] ? key_row(a, s.seq, head, key[1]) : 0};
        const float score[2] = {plain_score(a, q, row[0], seen[0]), plain_score(a, q, row[1], seen[1])};
        const float now = fmaxf(m, warp_max(fmaxf(score[0], score[1]))), correction = expf(__fsub_rn(m, now));
        const float e[2] = {expf(__fsub_rn(score[0], now)), expf(__fsub_rn(score[1], now))};
        m = now;
        l = __fmaf_rn(l, correction, warp_sum(__fadd_rn(e[0], e[1])));
#pragma unroll
        for (int i = 0; i < N; i++) acc[i] = __fmul_rn(acc[i], correction);
        for (int x = max(lo - j, 0); x < min(DEV_KEY_TILE, p + 1 - j); x++) {
            const float w = __shfl_sync(WARP_ALL, x < 32 ? e[0] : e[1], x % 32);
            const T *v = (const T *)a.v + (int64_t)__shfl_sync(WARP_ALL, x < 32 ? row[0] : row[1], x % 32) * a.dim;
#pragma unroll
            for (int i = 0; i < N; i++)
                if (col + 32 * i < a.dim) acc[i] = __fmaf_rn(w, plain_get(v, col + 32 * i), acc[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < N; i++)
        if (col + 32 * i < a.dim) plain_put((T *)a.out, at * a.dim + col + 32 * i, __fadd_rn(__fdiv_rn(acc[i], l), 0.0f));
    if (a.lse && lane == 0 && blockIdx.z == 0) a.lse[at] = __fadd_rn(m, logf(l));
}

/* ---- the op ---- */

/* Sequences of up to 16 packed rows (decoding: one row of up to 16 heads a group) go to fwd_decode, the others to fwd_prefill.
 * In a batch that has both, each kernel leaves the other's sequences out. */
template <int SIZE, int TS, bool CAP = false>
static int decode_launch(struct cuda *c, const struct attn_args *a, const struct cuda_attn &p) {
    using shape = decode_shape<SIZE, TS>;
    return attn_launch(c, fwd_decode<SIZE, TS, CAP>, {a->seqs.n, 1, shape::WARPS * 32, shape::SMEM, true}, p);
}

/* With few blocks each walks its tiles in half as many rounds; with many, small blocks hide each other's latency. */
template <int SIZE> static int decode_fit(struct cuda *c, const struct attn_args *a, const struct cuda_attn &p) {
    const int64_t blocks = a->seqs.n * p.n_tiles * p.n_kv_heads;
    if constexpr (SIZE <= 64) {
        if (blocks <= 2 * c->n_sm) return decode_launch<SIZE, 2>(c, a, p);
        if (blocks > 3 * c->n_sm) return decode_launch<SIZE, DECODE_SMALL_BLOCK>(c, a, p);
    }
    return decode_launch<SIZE, 1>(c, a, p);
}

template <int SIZE> static int fwd_size(struct cuda *c, const struct attn_args *a, struct cuda_attn p) {
    const int tiles = attn_tiles(a, 16);
    const bool only_decode = tiles <= 1 || a->seqs.max_q == 1;
    if (only_decode || p.block_table) { /* training has no batch of both: it is not worth a launch */
        p.decode_rows = only_decode ? -1 : 16;
        p.n_tiles = only_decode ? tiles : 1;
        TRY(decode_fit<SIZE>(c, a, p));
        if (only_decode) return 0;
    }
    bool ran;
    TRY(cuda_attn_fwd_sm90(c, a, p, &ran));
    if (ran) return 0;
    p.n_tiles = attn_tiles(a, prefill_shape<SIZE>::ROWS);
    return attn_launch(c, fwd_prefill<SIZE, false>,
                       {a->seqs.n, 1, prefill_shape<SIZE>::WARPS * 32, prefill_shape<SIZE>::SMEM, true}, p);
}

/* Under a softcap: two sizes, and none of Hopper's kernels for decode. */
template <int SIZE> static int fwd_capped(struct cuda *c, const struct attn_args *a, struct cuda_attn p) {
    using shape = prefill_shape<SIZE>;
    const int tiles = attn_tiles(a, 16);
    const bool only_decode = tiles <= 1 || a->seqs.max_q == 1;
    if (only_decode || p.block_table) {
        p.decode_rows = only_decode ? -1 : 16;
        p.n_tiles = only_decode ? tiles : 1;
        TRY((decode_launch<SIZE, 1, true>(c, a, p)));
        if (only_decode) return 0;
    }
    bool ran;
    TRY(cuda_attn_fwd_sm90(c, a, p, &ran));
    if (ran) return 0;
    p.n_tiles = attn_tiles(a, shape::ROWS);
    return attn_launch(c, fwd_prefill<SIZE, true>, {a->seqs.n, 1, shape::WARPS * 32, shape::SMEM, true}, p);
}

int cuda_attn_fwd(struct dev *d, const struct attn_args *a) {
    struct cuda *c = cuda_of(d);
    struct cuda_attn p;
    TRY(attn_params("attn_fwd", a, &p));
    if (attn_is_latent(a)) return cuda_attn_fwd_latent(c, a, p);
    if (attn_on_tensor_cores(a)) {
        bool ran;
        if (p.softcap > 0) return p.dim <= 128 ? fwd_capped<128>(c, a, p) : fwd_capped<256>(c, a, p);
        TRY(cuda_attn_decode_sm90(c, a, p, &ran));
        if (ran) return 0;
        if (p.dim <= 32) return fwd_size<32>(c, a, p);
        if (p.dim <= 64) return fwd_size<64>(c, a, p);
        if (p.dim <= 96) return fwd_size<96>(c, a, p);
        if (p.dim <= 128) return fwd_size<128>(c, a, p);
        if (p.dim <= 192) return fwd_size<192>(c, a, p);
        return fwd_size<256>(c, a, p);
    }
    p.n_tiles = attn_tiles(a, ATTN_PLAIN_WARPS);
    const int parts = (p.dim + ATTN_PLAIN_COLS - 1) / ATTN_PLAIN_COLS, threads = ATTN_PLAIN_WARPS * 32;
    return a->q.dt == DT_F32 ? attn_launch(c, fwd_plain<float>, {a->seqs.n, parts, threads, 0, true}, p)
                             : attn_launch(c, fwd_plain<bf16_bits>, {a->seqs.n, parts, threads, 0, true}, p);
}
