/* attention_bwd.cu - backward of causal attention over packed training sequences, after
 * FlashAttention-2 (Dao 2023): probabilities are recomputed from the forward's log-sum-exp,
 *   p = 2^(scale log2(e) q.k - log2(e) lse)   ds = p (dout.v - delta)   delta = dout . out
 *   dv = p^T dout     dk = scale ds^T q       dq = scale ds k
 *
 * bwd_delta writes (log2(e) lse, delta) of every row and head; a block of bwd_keys has 64 keys of one
 * KV head and walks the rows that see them; a block of bwd_rows has 64 packed rows and walks the keys that they see.
 * p and ds are computed twice and rounded to bf16 as MMA operands.  Nothing is shared between blocks, so there are no
 * atomics: a result is one sum in one order, packed rows (row, then head of the group) ascending for
 * dk and dv, keys ascending for dq.  The plain kernels do the same for f32 and odd sizes.
 * There is no backward over a paged KV cache or behind a prefix.
 *
 * Invariant: tiles start at multiples of their size counted from the start of the sequence,
 * so a sequence's gradients do not depend on its place in the batch. */
#include "device/cuda/attention/attention.cuh"

extern __shared__ __align__(128) char attn_smem[];

enum { BWD_THREADS = 128, BWD_BLOCK = 64 }; /* 4 warps of 16 keys or packed rows */

/* SIZE: padded head size. A block's own 64 rows of two operands stay in shared memory; STREAM rows of the two others go
 * through a pipeline of STAGES, PIECE of them at a time through the registers. dk and dv of COLS columns at a time:
 * larger heads are computed in parts. */
template <int SIZE> struct bwd_shape {
    static constexpr int STREAM = SIZE <= 64 ? 64 : SIZE <= 192 ? 32 : 16;
    static constexpr int PIECE = SIZE <= 128 ? 32 : 16;
    static constexpr int STAGES = SIZE <= 128 ? 2 : 1;
    static constexpr int COLS = SIZE <= 128 ? SIZE : SIZE / 2;
    static constexpr int BLOCKS = SIZE <= 64 ? 3 : SIZE <= 96 ? 2 : 1; /* of a multiprocessor */
    static constexpr int OWN = BWD_BLOCK * tile_stride(SIZE);
    static constexpr int STAGE = 2 * STREAM * tile_stride(SIZE) + STREAM * (int)sizeof(float2);
    static constexpr int SMEM = 2 * OWN + STAGES * STAGE;
};

/* ---- delta ---- */

/* 8 lanes a (row, head). flags become 0. */
__global__ void __launch_bounds__(256) bwd_delta(const struct cuda_attn a, int64_t n, int *flags, int64_t n_flags) {
    const int64_t at = (int64_t)cuda_block_reversed() * 32 + threadIdx.x / 8;
    pdl_launch_dependents();
    pdl_wait();
    for (int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x; i < n_flags; i += (int64_t)gridDim.x * 256) flags[i] = 0;
    if (at - threadIdx.x % 32 / 8 >= n) return; /* the whole warp is beyond the end */
    float sum = 0;
    for (int c = (int)threadIdx.x % 8 * 8; c < a.dim && at < n; c += 64) {
        const uint4 x = *(const uint4 *)((const uint16_t *)a.out + at * a.dim + c);
        const uint4 y = *(const uint4 *)((const uint16_t *)a.dout + at * a.dim + c);
        const uint32_t u[4] = {x.x, x.y, x.z, x.w}, v[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sum = __fmaf_rn(__uint_as_float(u[i] << 16), __uint_as_float(v[i] << 16), sum);
            sum = __fmaf_rn(__uint_as_float(u[i] & 0xffff0000u), __uint_as_float(v[i] & 0xffff0000u), sum);
        }
    }
#pragma unroll
    for (int k = 4; k > 0; k /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(WARP_ALL, sum, k));
    if (threadIdx.x % 8 == 0 && at < n) a.stat[at] = make_float2(__fmul_rn(a.lse[at], LOG2_E), sum);
}

/* A thread a (row, head), summed as plain_dot sums dout.v: where a row sees one key the two cancel exactly. */
template <class T> __global__ void __launch_bounds__(256) bwd_delta_plain(const struct cuda_attn a, int64_t n) {
    const int64_t at = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (at < n)
        a.stat[at] = make_float2(a.lse[at], plain_dot((const T *)a.dout + at * a.dim, (const T *)a.out + at * a.dim, a.dim));
}

/* ---- tensor cores ---- */

/* Copies N packed rows from r on of two tensors shaped as q into two tiles, one after the other; zeros beyond the last. */
template <int SIZE, int N>
static __device__ __forceinline__ void load_packed(const struct cuda_attn &a, const struct seq_rows &s, int head, int r,
                                                   const void *x, const void *y, uint32_t to) {
#pragma unroll
    for (int i = 0; i < chunks_of<SIZE, N, BWD_THREADS>(); i++) {
        const struct chunk at = chunk_of<SIZE, BWD_THREADS>(i);
        copy_chunk<SIZE, N>(a, to, at, x, y, r + at.row < s.packed ? packed_index(a, s, head, r + at.row) : -1);
    }
}
/* Copies N keys from j on and their values into two tiles, one after the other; zeros beyond the last. */
template <int SIZE, int N>
static __device__ __forceinline__ void load_keys(const struct cuda_attn &a, const struct seq_rows &s, int head, int j,
                                                 uint32_t to) {
#pragma unroll
    for (int i = 0; i < chunks_of<SIZE, N, BWD_THREADS>(); i++) {
        const struct chunk at = chunk_of<SIZE, BWD_THREADS>(i);
        copy_chunk<SIZE, N>(a, to, at, a.k, a.v, j + at.row < s.n ? key_row(a, s.seq, head, j + at.row) : -1);
    }
}

/* End of the packed rows that see key j, which start at j * group. */
static __device__ __forceinline__ int rows_end(const struct cuda_attn &a, const struct seq_rows &s, int j) {
    return a.window > 0 && j < s.n - a.window ? (j + a.window) * a.group : s.packed;
}

/* Queues the copy of a stage of rows from r on: q, dout, stat. */
template <int SIZE>
static __device__ __forceinline__ void queue_rows(const struct cuda_attn &a, const struct seq_rows &s, int head, int r, int end,
                                                  uint32_t to) {
    constexpr int N = bwd_shape<SIZE>::STREAM;
    if (r < end) {
        load_packed<SIZE, N>(a, s, head, r, a.q, a.dout, to);
        const int n = (int)threadIdx.x;
        if (n < N) {
            const bool take = r + n < s.packed;
            cp_async8(to + 2 * N * tile_stride(SIZE) + n * 8, a.stat + (take ? packed_index(a, s, head, r + n) : 0), take);
        }
    }
    cp_commit();
}

template <int N> static __device__ __forceinline__ void times(float (&s)[N][4], const float (&by)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[n][e] = __fmul_rn(s[n][e], by[n][e]);
}

/* s becomes p, rows of the tile being keys and columns packed rows from r on; see[i] is the range of rows that see the
 * lane's key i. */
template <int N>
static __device__ __forceinline__ void keys_weights(float (&s)[N / 8][4], const float2 *stat, float scale_log2,
                                                    const int2 (&see)[2], int r, bool all) {
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int c = n * 8 + (int)threadIdx.x % 4 * 2 + e % 2;
            const float p = exp2_approx(__fmaf_rn(s[n][e], scale_log2, -stat[c].x));
            s[n][e] = all || (r + c >= see[e / 2].x && r + c < see[e / 2].y) ? p : 0.0f;
        }
}

/* A piece of rows from r on, whose q and, a tile on, dout are at `q`, against the warp's keys at `keys`. */
template <int SIZE, bool CAP>
static __device__ __forceinline__ void keys_piece(const struct cuda_attn &a, float (&dk)[bwd_shape<SIZE>::COLS / 8][4],
                                                  float (&dv)[bwd_shape<SIZE>::COLS / 8][4], uint32_t keys, uint32_t q,
                                                  uint32_t col_bytes, const float2 *stat, const int2 (&see)[2], int r, bool all) {
    constexpr int N = bwd_shape<SIZE>::PIECE, COLS = bwd_shape<SIZE>::COLS;
    const uint32_t dout = q + bwd_shape<SIZE>::STREAM * tile_stride(SIZE);
    float p[N / 8][4], ds[N / 8][4], slope[CAP ? N / 8 : 1][4];
    uint32_t x[N / 16][4];
    fill_zero(p);
    mma_abt<SIZE, N>(p, keys, q);
    if constexpr (CAP) {
        cap_scores(a, p);
        cap_slopes(a, slope, p);
    }
    keys_weights<N>(p, stat, a.scale_log2, see, r, all);
    pack_fragments<N>(x, p);
    mma_pb<SIZE, COLS, N>(dv, x, dout + col_bytes);
    fill_zero(ds);
    mma_abt<SIZE, N>(ds, keys + bwd_shape<SIZE>::OWN, dout);
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            ds[n][e] = __fmul_rn(p[n][e], __fsub_rn(ds[n][e], stat[n * 8 + (int)threadIdx.x % 4 * 2 + e % 2].y));
    if constexpr (CAP) times(ds, slope);
    pack_fragments<N>(x, ds);
    mma_pb<SIZE, COLS, N>(dk, x, q + col_bytes);
}

/* acc * factor -> columns [col, col + COLS) of the lane's two key rows. */
template <int COLS>
static __device__ __forceinline__ void store_keys(const struct cuda_attn &a, const struct seq_rows &s, int head, int j, int col,
                                                  const float (&acc)[COLS / 8][4], float factor, float *to) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (j + 8 * i >= s.n) continue;
        float *row = to + (int64_t)key_row(a, s.seq, head, j + 8 * i) * a.dim;
#pragma unroll
        for (int n = 0; n < COLS / 8; n++) {
            const int c = col + n * 8;
            if (c < a.dim)
                *(float2 *)(row + c + (int)threadIdx.x % 4 * 2) =
                    make_float2(__fmul_rn(acc[n][2 * i], factor), __fmul_rn(acc[n][2 * i + 1], factor));
        }
    }
}

/* Block (64 keys of a sequence, kv head, part of the columns); a warp has 16 keys. */
template <int SIZE, bool CAP>
__global__ void __launch_bounds__(BWD_THREADS, bwd_shape<SIZE>::BLOCKS) bwd_keys(const struct cuda_attn a) {
    using shape = bwd_shape<SIZE>;
    constexpr int N = shape::STREAM, COLS = shape::COLS;
    const struct seq_rows s = seq_rows_of(a, (int)(blockIdx.x / (unsigned)a.n_tiles));
    const int first = (int)(blockIdx.x % (unsigned)a.n_tiles) * BWD_BLOCK, head = (int)blockIdx.y, col = (int)blockIdx.z * COLS;
    if (first >= s.n) return;
    const int mine = first + (int)threadIdx.x / 32 * 16, j = mine + (int)threadIdx.x % 32 / 4;
    const int2 see[2] = {{j * a.group, rows_end(a, s, j)}, {(j + 8) * a.group, rows_end(a, s, j + 8)}};
    const int2 see_any = {mine * a.group, rows_end(a, s, mine + 15)}, see_all = {(mine + 15) * a.group, rows_end(a, s, mine)};
    const int end = rows_end(a, s, min(first + BWD_BLOCK, s.n) - 1);
    const uint32_t keys = smem_addr(attn_smem) + (uint32_t)(mine - first) * tile_stride(SIZE);
    float dk[COLS / 8][4], dv[COLS / 8][4];
    fill_zero(dk);
    fill_zero(dv);
    load_keys<SIZE, BWD_BLOCK>(a, s, head, first, smem_addr(attn_smem));
    int r = first * a.group / N * N;
    char *stage = attn_smem + 2 * shape::OWN, *other = stage + (shape::STAGES - 1) * shape::STAGE;
    queue_rows<SIZE>(a, s, head, r, end, smem_addr(stage));
    for (; r < end; r += N) {
        cp_wait<0>();
        __syncthreads();
        if (shape::STAGES > 1) queue_rows<SIZE>(a, s, head, r + N, end, smem_addr(other));
#pragma unroll 1
        for (int x = 0; x < N; x += shape::PIECE)
            if (mine < s.n && r + x + shape::PIECE > see_any.x && r + x < see_any.y) {
                const uint32_t q = smem_addr(stage) + (uint32_t)x * tile_stride(SIZE);
                const bool all = r + x >= see_all.x && r + x + shape::PIECE <= see_all.y;
                keys_piece<SIZE, CAP>(a, dk, dv, keys, q, (uint32_t)col * 2,
                                      (const float2 *)(stage + 2 * N * tile_stride(SIZE)) + x, see, r + x, all);
            }
        if (shape::STAGES == 1) {
            __syncthreads();
            queue_rows<SIZE>(a, s, head, r + N, end, smem_addr(stage));
        }
        char *t = stage;
        stage = other;
        other = t;
    }
    cp_wait<0>();
    store_keys<COLS>(a, s, head, j, col, dk, a.scale, a.dk);
    store_keys<COLS>(a, s, head, j, col, dv, 1.0f, a.dv);
}

/* s becomes p, rows of the tile being packed rows at positions at[i], columns keys from j on. */
template <int N>
static __device__ __forceinline__ void softmax_tile(const struct cuda_attn &a, float (&s)[N / 8][4], const float2 (&stat)[2],
                                                    const int (&at)[2], int j, bool all) {
    const int from[2] = {first_key(a, at[0]), first_key(a, at[1])};
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int key = j + n * 8 + (int)threadIdx.x % 4 * 2 + e % 2;
            const float p = exp2_approx(__fmaf_rn(s[n][e], a.scale_log2, -stat[e / 2].x));
            s[n][e] = all || (key <= at[e / 2] && key >= from[e / 2]) ? p : 0.0f;
        }
}

/* A piece of keys from j on, which are at `keys` and their values a tile on, against the warp's rows at `q`. */
template <int SIZE, bool CAP>
static __device__ __forceinline__ void rows_piece(const struct cuda_attn &a, float (&dq)[SIZE / 8][4], uint32_t q, uint32_t keys,
                                                  const float2 (&stat)[2], const int (&at)[2], int j, bool all) {
    constexpr int N = bwd_shape<SIZE>::PIECE;
    float p[N / 8][4], ds[N / 8][4], slope[CAP ? N / 8 : 1][4];
    uint32_t x[N / 16][4];
    fill_zero(p);
    mma_abt<SIZE, N>(p, q, keys);
    if constexpr (CAP) {
        cap_scores(a, p);
        cap_slopes(a, slope, p);
    }
    softmax_tile<N>(a, p, stat, at, j, all);
    fill_zero(ds);
    mma_abt<SIZE, N>(ds, q + bwd_shape<SIZE>::OWN, keys + bwd_shape<SIZE>::STREAM * tile_stride(SIZE));
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) ds[n][e] = __fmul_rn(p[n][e], __fsub_rn(ds[n][e], stat[e / 2].y));
    if constexpr (CAP) times(ds, slope);
    pack_fragments<N>(x, ds);
    mma_pb<SIZE, SIZE, N>(dq, x, keys);
}

/* Block (64 packed rows of a sequence, kv head); a warp has 16. The last rows, which see most keys, start first. */
template <int SIZE, bool CAP>
__global__ void __launch_bounds__(BWD_THREADS, bwd_shape<SIZE>::BLOCKS) bwd_rows(const struct cuda_attn a) {
    using shape = bwd_shape<SIZE>;
    constexpr int N = shape::STREAM, STAGE = 2 * N * tile_stride(SIZE);
    const struct seq_rows s = seq_rows_of(a, (int)(blockIdx.x / (unsigned)a.n_tiles));
    const int first = (a.n_tiles - 1 - (int)(blockIdx.x % (unsigned)a.n_tiles)) * BWD_BLOCK, head = (int)blockIdx.y;
    if (first >= s.packed) return;
    const int last = min(first + BWD_BLOCK, s.packed) - 1;
    const int mine = first + (int)threadIdx.x / 32 * 16, r = mine + (int)threadIdx.x % 32 / 4;
    const int at[2] = {min(r, last) / a.group, min(r + 8, last) / a.group};
    const int p_min = min(mine, last) / a.group, p_max = min(mine + 15, last) / a.group;
    const int end = last / a.group + 1, from_min = first_key(a, p_min), from_max = first_key(a, p_max);
    const uint32_t smem = smem_addr(attn_smem);
    const uint32_t q = smem + (uint32_t)(mine - first) * tile_stride(SIZE);
    const float2 stat[2] = {a.stat[packed_index(a, s, head, min(r, last))], a.stat[packed_index(a, s, head, min(r + 8, last))]};
    float dq[SIZE / 8][4];
    fill_zero(dq);
    load_packed<SIZE, BWD_BLOCK>(a, s, head, first, a.q, a.dout, smem);
    int j = first_key(a, first / a.group) / N * N;
    uint32_t stage = smem + 2 * shape::OWN, other = stage + (shape::STAGES - 1) * STAGE;
    load_keys<SIZE, N>(a, s, head, j, stage);
    cp_commit();
    for (; j < end; j += N) {
        cp_wait<0>();
        __syncthreads();
        if (shape::STAGES > 1 && j + N < end) load_keys<SIZE, N>(a, s, head, j + N, other);
        cp_commit();
#pragma unroll 1
        for (int x = j; x < j + N; x += shape::PIECE)
            if (mine <= last && x <= p_max && x + shape::PIECE > from_min)
                rows_piece<SIZE, CAP>(a, dq, q, stage + (uint32_t)(x - j) * tile_stride(SIZE), stat, at, x,
                                      x + shape::PIECE - 1 <= p_min && x >= from_max);
        if (shape::STAGES == 1) {
            __syncthreads();
            if (j + N < end) load_keys<SIZE, N>(a, s, head, j + N, stage);
            cp_commit();
        }
        const uint32_t t = stage;
        stage = other;
        other = t;
    }
    cp_wait<0>();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (r + 8 * i > last) continue;
        uint16_t *to = (uint16_t *)a.dq + packed_index(a, s, head, r + 8 * i) * a.dim + (int)threadIdx.x % 4 * 2;
#pragma unroll
        for (int n = 0; n < SIZE / 8; n++)
            if (n * 8 < a.dim)
                *(uint32_t *)(to + n * 8) = pack_bf16(__fmul_rn(dq[n][2 * i], a.scale), __fmul_rn(dq[n][2 * i + 1], a.scale));
    }
}

/* ---- plain: a warp has one row or key and up to 256 columns of its gradients ---- */

/* p and ds of a pair; 0, 0 where it does not count. stat: lse (not scaled), delta. */
template <class T> static __device__ __forceinline__ float2 plain_pair(const struct cuda_attn &a, int64_t q, int key, bool seen) {
    if (!seen) return make_float2(0, 0);
    const int64_t k = (int64_t)key * a.dim;
    const float2 stat = a.stat[q];
    const float score = __fmul_rn(plain_dot((const T *)a.q + q * a.dim, (const T *)a.k + k, a.dim), a.scale);
    float slope;
    const float p = expf(__fsub_rn(plain_capped(a, score, &slope), stat.x));
    const float ds = __fmul_rn(p, __fsub_rn(plain_dot((const T *)a.dout + q * a.dim, (const T *)a.v + k, a.dim), stat.y));
    return make_float2(p, __fmul_rn(ds, slope));
}

/* dq of a packed row: 32 keys at a time, one a lane, ascending. */
template <class T> __global__ void __launch_bounds__(ATTN_PLAIN_WARPS * 32) bwd_rows_plain(const struct cuda_attn a) {
    constexpr int N = ATTN_PLAIN_COLS / 32;
    const struct seq_rows s = seq_rows_of(a, (int)(blockIdx.x / (unsigned)a.n_tiles));
    const int r = (int)(blockIdx.x % (unsigned)a.n_tiles) * ATTN_PLAIN_WARPS + (int)threadIdx.x / 32;
    if (r >= s.packed) return;
    const int lane = (int)threadIdx.x % 32, head = (int)blockIdx.y, col = (int)blockIdx.z * ATTN_PLAIN_COLS + lane;
    const int p = s.pos0 + r / a.group;
    const int64_t at = packed_index(a, s, head, r);
    float dq[N] = {};
    for (int j = first_key(a, p); j <= p; j += 32) {
        const bool seen = j + lane <= p;
        const int key = seen ? key_row(a, s.seq, head, j + lane) : 0;
        const float ds = plain_pair<T>(a, at, key, seen).y;
        for (int x = 0; x < min(32, p + 1 - j); x++) {
            const float w = __shfl_sync(WARP_ALL, ds, x);
            const T *k = (const T *)a.k + (int64_t)__shfl_sync(WARP_ALL, key, x) * a.dim;
#pragma unroll
            for (int i = 0; i < N; i++)
                if (col + 32 * i < a.dim) dq[i] = __fmaf_rn(w, plain_get(k, col + 32 * i), dq[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < N; i++)
        if (col + 32 * i < a.dim) plain_put((T *)a.dq, at * a.dim + col + 32 * i, __fmul_rn(dq[i], a.scale));
}

/* dk and dv of a key: 32 packed rows at a time, one a lane, ascending. */
template <class T> __global__ void __launch_bounds__(ATTN_PLAIN_WARPS * 32) bwd_keys_plain(const struct cuda_attn a) {
    constexpr int N = ATTN_PLAIN_COLS / 32;
    const struct seq_rows s = seq_rows_of(a, (int)(blockIdx.x / (unsigned)a.n_tiles));
    const int j = (int)(blockIdx.x % (unsigned)a.n_tiles) * ATTN_PLAIN_WARPS + (int)threadIdx.x / 32;
    if (j >= s.pos0 + s.n) return;
    const int lane = (int)threadIdx.x % 32, head = (int)blockIdx.y, col = (int)blockIdx.z * ATTN_PLAIN_COLS + lane;
    const int key = key_row(a, s.seq, head, j), end = rows_end(a, s, j - s.pos0);
    float dk[N] = {}, dv[N] = {};
    for (int r = max(j - s.pos0, 0) * a.group; r < end; r += 32) {
        const bool seen = r + lane < end;
        const int at = seen ? (int)packed_index(a, s, head, r + lane) : 0; /* T Hq < 2^31: attn_params */
        const float2 e = plain_pair<T>(a, at, key, seen);
        for (int x = 0; x < min(32, end - r); x++) {
            const float p = __shfl_sync(WARP_ALL, e.x, x), ds = __shfl_sync(WARP_ALL, e.y, x);
            const int64_t q = (int64_t)__shfl_sync(WARP_ALL, at, x) * a.dim;
#pragma unroll
            for (int i = 0; i < N; i++) {
                if (col + 32 * i >= a.dim) continue;
                dk[i] = __fmaf_rn(ds, plain_get((const T *)a.q, q + col + 32 * i), dk[i]);
                dv[i] = __fmaf_rn(p, plain_get((const T *)a.dout, q + col + 32 * i), dv[i]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (col + 32 * i >= a.dim) continue;
        a.dk[(int64_t)key * a.dim + col + 32 * i] = __fmul_rn(dk[i], a.scale);
        a.dv[(int64_t)key * a.dim + col + 32 * i] = dv[i];
    }
}

/* ---- the op ---- */

template <int SIZE, bool CAP = false> static int bwd_size(struct cuda *c, const struct attn_args *a, struct cuda_attn p) {
    using shape = bwd_shape<SIZE>;
    const int64_t n = a->q.dim[0] * a->n_q_heads;
    bool ran;
    int *const flags = (int *)(p.stat + n);
    const int64_t n_flags = (int64_t)(cuda_attn_bwd_sm90_bytes(c, a, p) / sizeof(int));
    CU_TRY(cuda_launch_pdl(c, bwd_delta, (unsigned)((n + 31) / 32), 256, 0, p, n, flags, n_flags));
    TRY(cuda_attn_bwd_sm90(c, a, p, flags, &ran));
    if (ran) return 0;
    p.n_tiles = (int)((a->seqs.max_q + BWD_BLOCK - 1) / BWD_BLOCK);
    TRY(attn_launch(c, bwd_keys<SIZE, CAP>, {a->seqs.n, SIZE / shape::COLS, BWD_THREADS, shape::SMEM, false}, p));
    p.n_tiles = attn_tiles(a, BWD_BLOCK);
    return attn_launch(c, bwd_rows<SIZE, CAP>, {a->seqs.n, 1, BWD_THREADS, shape::SMEM, false}, p);
}

template <class T> static int bwd_plain(struct cuda *c, const struct attn_args *a, struct cuda_attn p) {
    const int64_t n = a->q.dim[0] * a->n_q_heads;
    const int parts = (p.dim + ATTN_PLAIN_COLS - 1) / ATTN_PLAIN_COLS, threads = ATTN_PLAIN_WARPS * 32;
    bwd_delta_plain<T><<<(unsigned)((n + 255) / 256), 256, 0, c->stream>>>(p, n);
    CU_LAUNCHED();
    p.n_tiles = attn_key_tiles(a, ATTN_PLAIN_WARPS);
    TRY(attn_launch(c, bwd_keys_plain<T>, {a->seqs.n, parts, threads, 0, false}, p));
    p.n_tiles = attn_tiles(a, ATTN_PLAIN_WARPS);
    return attn_launch(c, bwd_rows_plain<T>, {a->seqs.n, parts, threads, 0, false}, p);
}

int cuda_attn_bwd(struct dev *d, const struct attn_args *a, struct tensor dout, struct tensor dq, struct tensor dk,
                  struct tensor dv) {
    struct cuda *c = cuda_of(d);
    struct cuda_attn p;
    void *stat = NULL;
    TRY(attn_params("attn_bwd", a, &p));
    if (attn_on_tensor_cores(a) && (((uintptr_t)dout.data | (uintptr_t)dq.data | (uintptr_t)dk.data | (uintptr_t)dv.data) & 15))
        FAIL(ERR_INVAL, "dev op attn_bwd: dout, dq, dk and dv must be aligned to 16 bytes");
    TRY(cuda_scratch(c, CUDA_SCRATCH_ATTN,
                     (size_t)(a->q.dim[0] * a->n_q_heads) * sizeof(float2) + cuda_attn_bwd_sm90_bytes(c, a, p), &stat));
    p.stat = (float2 *)stat;
    p.dout = dout.data;
    p.dq = dq.data;
    p.dk = (float *)dk.data;
    p.dv = (float *)dv.data;
    const bool after = a->seqs.max_kv > a->seqs.max_q; /* keys before the rows: of latent attention alone */
    if (!attn_on_tensor_cores(a) || (after && !attn_is_latent(a)))
        return a->q.dt == DT_F32 ? bwd_plain<float>(c, a, p) : bwd_plain<bf16_bits>(c, a, p);
    if (attn_is_latent(a)) return cuda_attn_bwd_latent(c, a, p);
    if (p.softcap > 0) return p.dim <= 128 ? bwd_size<128, true>(c, a, p) : bwd_size<256, true>(c, a, p);
    if (p.dim <= 32) return bwd_size<32>(c, a, p);
    if (p.dim <= 64) return bwd_size<64>(c, a, p);
    if (p.dim <= 96) return bwd_size<96>(c, a, p);
    if (p.dim <= 128) return bwd_size<128>(c, a, p);
    if (p.dim <= 192) return bwd_size<192>(c, a, p);
    return bwd_size<256>(c, a, p);
}
