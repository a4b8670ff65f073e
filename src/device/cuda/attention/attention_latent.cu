/* attention_latent.cu - attention whose values are its keys, with heads of more than 256 elements (latent attention): forward of
 * training, prefill and decode where attention_latent_decode_sm90.cu and attention_latent_fwd_sm90.cu do not serve them; backward.
 *
 * bf16 on mma.sync. A block has 32 packed rows (or, for dk and dv, 32 keys) and 8 warps: two groups of 16 rows, in each four warps
 * that share the scores of a tile by quarters, and the columns of the result. Scores go through shared memory to all four. A tile
 * of keys is there once, as keys and as values. Shared memory that has no room for two tiles (before Hopper) has one.
 * The arithmetic of a row is that of attention_fwd.cu and attention_bwd.cu, but that a score of forward has two halves.
 *
 * Invariant: an element is one sum in one order: tiles start at multiples of their size from the sequence's first key or row, and
 * what a row does not see is multiplied by 1 and adds 0; so its bits do not depend on the other rows of its block. */
#include "device/cuda/attention/attention_latent.cuh"

enum {
    SIZE = LATENT_SIZE,
    ROWS = 32, /* packed rows, or keys, of a block; rows or keys of a tile in backward */
    WARPS = 8,
    THREADS = 32 * WARPS,
    COLS = SIZE / 4, /* of the result that a warp has */
    STEPS = LATENT_STEPS
};
static constexpr int STRIDE = LATENT_STRIDE, ROWS_BYTES = ROWS * STRIDE, KEYS_BYTES = DEV_KEY_TILE * STRIDE;
static constexpr int P_STRIDE = tile_stride(DEV_KEY_TILE), PAIR_STRIDE = tile_stride(ROWS);
/* rows, tiles of keys, probabilities, a number of each warp and row */
static constexpr int fwd_bytes(int stages) { return ROWS_BYTES + stages * KEYS_BYTES + ROWS * P_STRIDE + WARPS * 16 * 4; }
/* what a block has of its own: keys; in stages rows of q and of dout with their stat; p and ds */
static constexpr int KEYS_STAGE = 2 * ROWS_BYTES + ROWS * 8;
static constexpr int keys_bytes(int stages) { return ROWS_BYTES + stages * KEYS_STAGE + 2 * ROWS * PAIR_STRIDE; }
/* q and dout; in stages keys; ds */
static constexpr int rows_bytes(int stages) { return (2 + stages) * ROWS_BYTES + ROWS * PAIR_STRIDE; }

/* Queues the copy of N rows of a.dim elements: of row i that of index of(i), zeros where it is negative. */
template <int N, class Of>
static __device__ __forceinline__ void load_rows(const struct cuda_attn &a, const void *src, uint32_t to, Of of) {
#pragma unroll 3
    for (int i = 0; i < N * (SIZE / 8) / THREADS; i++) {
        const int at = (int)threadIdx.x + i * THREADS, row = at / (SIZE / 8), col = at % (SIZE / 8) * 8;
        const int64_t index = of(row);
        const bool take = index >= 0 && col < a.dim;
        cp_async16(to + (uint32_t)(row * STRIDE + col * 2), (const char *)src + (take ? (index * a.dim + col) * 2 : 0), take);
    }
}

/* acc (16, COLS) += w (16, 16 K) at `w` . rows of the tile at b, of which this warp has the columns from byte `col` on. */
template <int K>
static __device__ __forceinline__ void add_columns(float (&acc)[COLS / 8][4], uint32_t w, int stride, uint32_t b, uint32_t col) {
    const int lane = (int)threadIdx.x % 32;
    uint32_t x[K][4];
#pragma unroll
    for (int k = 0; k < K; k++) load_a(x[k], w, stride, k);
    b += (uint32_t)(lane % 16 * STRIDE + lane / 16 * 16) + col;
#pragma unroll
    for (int n = 0; n < COLS / 16; n++)
#pragma unroll
        for (int k = 0; k < K; k++) {
            uint32_t y[4];
            ldmatrix_x4_trans(y, b + (uint32_t)(k * 16 * STRIDE + n * 32));
            mma_bf16(acc[2 * n], x[k], y[0], y[1]);
            mma_bf16(acc[2 * n + 1], x[k], y[2], y[3]);
        }
}

/* ---- forward ---- */

/* s (16 rows, 16 keys) = q . K^T */
static __device__ __forceinline__ void quarter_scores(float (&s)[2][4], uint32_t q, uint32_t keys) {
    const int lane = (int)threadIdx.x % 32;
    float half[2][2][4] = {};
    keys += (uint32_t)((lane % 8 + lane / 16 * 8) * STRIDE + lane / 8 % 2 * 16);
#pragma unroll 3
    for (int i = 0; i < STEPS; i += 4)
#pragma unroll
        for (int k = i; k < i + 4; k++) {
            uint32_t x[4], y[4];
            load_a(x, q, STRIDE, k);
            ldmatrix_x4(y, keys + (uint32_t)(k * 32));
            mma_bf16(half[latent_half(k - i)][0], x, y[0], y[1]);
            mma_bf16(half[latent_half(k - i)][1], x, y[2], y[3]);
        }
#pragma unroll
    for (int e = 0; e < 8; e++) s[e / 4][e % 4] = __fadd_rn(half[0][e / 4][e % 4], half[1][e / 4][e % 4]);
}

/* Of the 4 warps of a group, what each has left of row r. */
static __device__ __forceinline__ float4 of_group(const float *by_warp, int group, int r) {
    const float *const p = by_warp + group * 64 + r;
    return make_float4(p[0], p[16], p[32], p[48]);
}

/* Block (32 packed rows of a sequence). The last rows, which see most keys, start first. */
template <int STAGES> static __global__ void __launch_bounds__(THREADS, 1) fwd_latent(const struct cuda_attn a) {
    pdl_launch_dependents();
    pdl_wait();
    const struct seq_rows s = seq_rows_of(a, (int)(blockIdx.x / (unsigned)a.n_tiles));
    const int first = (a.n_tiles - 1 - (int)(blockIdx.x % (unsigned)a.n_tiles)) * ROWS;
    if (first >= s.packed) return;
    const int last = min(first + ROWS, s.packed) - 1, lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const int part = warp / 4, quarter = warp % 4, mine = first + part * 16, row = lane / 4, t = lane % 4, r = mine + row;
    const int p[2] = {s.pos0 + min(r, last) / a.group, s.pos0 + min(r + 8, last) / a.group};
    const int p_min = s.pos0 + min(mine, last) / a.group, from_max = first_key(a, s.pos0 + min(mine + 15, last) / a.group);
    const int lo = first_key(a, s.pos0 + first / a.group), hi = s.pos0 + last / a.group + 1;
    char *const base = &dynamic_shared<char>(), *const p_base = base + ROWS_BYTES + STAGES * KEYS_BYTES;
    float *const by_warp = (float *)(p_base + ROWS * P_STRIDE);
    const uint32_t q = smem_addr(base), p_tile = smem_addr(p_base) + (uint32_t)(part * 16 * P_STRIDE);
    const int end = (hi + DEV_KEY_TILE - 1) / DEV_KEY_TILE;
    const auto stage = [&](int tile) { return q + (uint32_t)(ROWS_BYTES + tile % STAGES * KEYS_BYTES); };
    const auto queue = [&](int tile) {
        if (tile < end)
            load_rows<DEV_KEY_TILE>(a, a.k, stage(tile), [&](int i) -> int64_t {
                const int j = tile * DEV_KEY_TILE + i;
                return j >= lo && j < hi ? key_row(a, s.seq, 0, j) : -1;
            });
        cp_commit();
    };
    load_rows<ROWS>(a, a.q, q, [&](int i) -> int64_t { return first + i <= last ? packed_index(a, s, 0, first + i) : -1; });
    int tile = lo / DEV_KEY_TILE;
    queue(tile);
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0}, acc[COLS / 8][4], score[2][4], correction[2];
    fill_zero(acc);
    for (; tile < end; tile++) {
        cp_wait<0>();
        __syncthreads();
        if (STAGES > 1) queue(tile + 1);
        const int j = tile * DEV_KEY_TILE;
        quarter_scores(score, q + (uint32_t)(part * 16 * STRIDE), stage(tile) + (uint32_t)(quarter * 16 * STRIDE));
        if (j + DEV_KEY_TILE - 1 > p_min || j < from_max) {
#pragma unroll
            for (int e = 0; e < 8; e++) {
                const int key = j + quarter * 16 + e / 4 * 8 + t * 2 + e % 2, of = p[e % 4 / 2];
                if (key > of || key < first_key(a, of)) score[e / 4][e % 4] = -INFINITY;
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float top =
                quad_max(fmaxf(fmaxf(score[0][2 * i], score[0][2 * i + 1]), fmaxf(score[1][2 * i], score[1][2 * i + 1])));
            if (t == 0) by_warp[warp * 16 + row + 8 * i] = top;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float4 tops = of_group(by_warp, part, row + 8 * i);
            const float to = row_rescale(&m[i], fmaxf(fmaxf(tops.x, tops.y), fmaxf(tops.z, tops.w)), a.scale_log2, &correction[i]);
#pragma unroll
            for (int e = 0; e < 4; e++) score[e / 2][2 * i + e % 2] = row_p(score[e / 2][2 * i + e % 2], a.scale_log2, to);
            l[i] = row_sum(l[i], correction[i],
                           row_quarter(score[0][2 * i], score[0][2 * i + 1], score[1][2 * i], score[1][2 * i + 1]));
            uint32_t *const w = (uint32_t *)(p_base + (part * 16 + row + 8 * i) * P_STRIDE) + quarter * 8 + t;
            w[0] = pack_bf16(score[0][2 * i], score[0][2 * i + 1]);
            w[4] = pack_bf16(score[1][2 * i], score[1][2 * i + 1]);
        }
        __syncthreads();
#pragma unroll
        for (int n = 0; n < COLS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) acc[n][e] = __fmul_rn(acc[n][e], correction[e / 2]);
        add_columns<DEV_KEY_TILE / 16>(acc, p_tile, P_STRIDE, stage(tile), (uint32_t)(quarter * COLS * 2));
        if (STAGES == 1) {
            __syncthreads();
            queue(tile + 1);
        }
    }
    cp_wait<0>();
#pragma unroll
    for (int i = 0; i < 2; i++) { /* every warp is past the barrier after which by_warp was read */
        l[i] = quad_sum(l[i]);
        if (t == 0) by_warp[warp * 16 + row + 8 * i] = l[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float4 l4 = of_group(by_warp, part, row + 8 * i);
        const float sum = __fadd_rn(__fadd_rn(l4.x, l4.y), __fadd_rn(l4.z, l4.w)), inv = __frcp_rn(sum);
        if (r + 8 * i > last) continue;
        const int64_t at = packed_index(a, s, 0, r + 8 * i);
        uint16_t *const out = (uint16_t *)a.out + at * a.dim;
#pragma unroll
        for (int n = 0; n < COLS / 8; n++) {
            const int c = quarter * COLS + n * 8;
            if (c < a.dim) *(uint32_t *)(out + c + 2 * t) = row_out(acc[n][2 * i], acc[n][2 * i + 1], inv);
        }
        if (a.lse && t == 0 && quarter == 0) a.lse[at] = row_lse(m[i], sum);
    }
}

/* ---- backward ---- */

/* A warp a (row, head): log2(e) lse, dout . out. */
static __global__ void __launch_bounds__(THREADS) latent_delta(const struct cuda_attn a, int64_t n) {
    const int64_t at = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    pdl_launch_dependents();
    pdl_wait();
    if (at >= n) return;
    float sum = 0;
    for (int c = (int)threadIdx.x % 32 * 2; c < a.dim; c += 64) {
        const uint32_t x = *(const uint32_t *)((const uint16_t *)a.out + at * a.dim + c);
        const uint32_t y = *(const uint32_t *)((const uint16_t *)a.dout + at * a.dim + c);
        sum = __fmaf_rn(__uint_as_float(x << 16), __uint_as_float(y << 16), sum);
        sum = __fmaf_rn(__uint_as_float(x & 0xffff0000u), __uint_as_float(y & 0xffff0000u), sum);
    }
#pragma unroll
    for (int k = 16; k > 0; k /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(WARP_ALL, sum, k));
    if (threadIdx.x % 32 == 0) a.stat[at] = make_float2(__fmul_rn(a.lse[at], LOG2_E), sum);
}

/* Block (32 keys of a sequence): dk and dv, of which a warp has 16 keys and COLS columns. */
template <int STAGES> static __global__ void __launch_bounds__(THREADS, 1) bwd_latent_keys(const struct cuda_attn a) {
    pdl_launch_dependents();
    pdl_wait();
    const struct seq_rows s = seq_rows_of(a, (int)(blockIdx.x / (unsigned)a.n_tiles));
    const int first = (int)(blockIdx.x % (unsigned)a.n_tiles) * ROWS, n_keys = s.pos0 + s.n;
    if (first >= n_keys) return;
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, part = warp / 4, quarter = warp % 4, t = lane % 4;
    const int j = first + part * 16 + lane / 4;
    const int at = j - s.pos0; /* from the first row's own key */
    const int2 see[2] = {{at * a.group, rows_end(a, s, at)}, {(at + 8) * a.group, rows_end(a, s, at + 8)}};
    const int end = rows_end(a, s, min(first + ROWS, n_keys) - 1 - s.pos0);
    char *const base = &dynamic_shared<char>(), *const p_base = base + ROWS_BYTES + STAGES * KEYS_STAGE,
                *const ds_base = p_base + ROWS * PAIR_STRIDE;
    const uint32_t keys = smem_addr(base) + (uint32_t)(part * 16 * STRIDE), col = (uint32_t)(quarter * COLS * 2);
    const uint32_t p_tile = smem_addr(p_base) + (uint32_t)(part * 16 * PAIR_STRIDE),
                   ds_tile = smem_addr(ds_base) + (uint32_t)(part * 16 * PAIR_STRIDE);
    const auto queue = [&](int r, char *to) {
        if (r < end) {
            const auto of = [&](int i) -> int64_t { return r + i < s.packed ? packed_index(a, s, 0, r + i) : -1; };
            const int n = (int)threadIdx.x;
            load_rows<ROWS>(a, a.q, smem_addr(to), of);
            load_rows<ROWS>(a, a.dout, smem_addr(to) + ROWS_BYTES, of);
            if (n < ROWS) cp_async8(smem_addr(to) + 2 * ROWS_BYTES + n * 8, a.stat + (of(n) < 0 ? 0 : of(n)), of(n) >= 0);
        }
        cp_commit();
    };
    float dk[COLS / 8][4], dv[COLS / 8][4];
    fill_zero(dk);
    fill_zero(dv);
    load_rows<ROWS>(a, a.k, smem_addr(base),
                    [&](int i) -> int64_t { return first + i < n_keys ? key_row(a, s.seq, 0, first + i) : -1; });
    int r = max(first - s.pos0, 0) * a.group / ROWS * ROWS;
    char *stage = base + ROWS_BYTES, *other = stage + (STAGES - 1) * KEYS_STAGE;
    queue(r, stage);
    for (; r < end; r += ROWS) {
        cp_wait<0>();
        __syncthreads();
        if (STAGES > 1) queue(r + ROWS, other);
        const uint32_t q = smem_addr(stage), dout = q + ROWS_BYTES;
        const float2 *const stat = (const float2 *)(stage + 2 * ROWS_BYTES);
        const uint32_t b = (lane < 16 ? q : dout) + (uint32_t)((quarter * 8 + lane % 8) * STRIDE + lane / 8 % 2 * 16);
        float p[4] = {}, ds[4] = {};
#pragma unroll 4
        for (int k = 0; k < STEPS; k++) {
            uint32_t x[4], y[4];
            load_a(x, keys, STRIDE, k);
            ldmatrix_x4(y, b + (uint32_t)(k * 32));
            mma_bf16(p, x, y[0], y[1]);
            mma_bf16(ds, x, y[2], y[3]);
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int c = quarter * 8 + t * 2 + e % 2;
            const bool seen = r + c >= see[e / 2].x && r + c < see[e / 2].y;
            p[e] = seen ? exp2_approx(__fmaf_rn(p[e], a.scale_log2, -stat[c].x)) : 0.0f;
            ds[e] = __fmul_rn(p[e], __fsub_rn(ds[e], stat[c].y));
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int at = (part * 16 + lane / 4 + 8 * i) * PAIR_STRIDE + quarter * 16 + t * 4;
            *(uint32_t *)(p_base + at) = pack_bf16(p[2 * i], p[2 * i + 1]);
            *(uint32_t *)(ds_base + at) = pack_bf16(ds[2 * i], ds[2 * i + 1]);
        }
        __syncthreads();
        add_columns<ROWS / 16>(dv, p_tile, PAIR_STRIDE, dout, col);
        add_columns<ROWS / 16>(dk, ds_tile, PAIR_STRIDE, q, col);
        if (STAGES == 1) {
            __syncthreads();
            queue(r + ROWS, stage);
        }
        char *const x = stage;
        stage = other;
        other = x;
    }
    cp_wait<0>();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (j + 8 * i >= n_keys) continue;
        const int64_t to = (int64_t)key_row(a, s.seq, 0, j + 8 * i) * a.dim + 2 * t;
#pragma unroll
        for (int n = 0; n < COLS / 8; n++) {
            const int c = quarter * COLS + n * 8;
            if (c >= a.dim) continue;
            *(float2 *)(a.dk + to + c) = make_float2(__fmul_rn(dk[n][2 * i], a.scale), __fmul_rn(dk[n][2 * i + 1], a.scale));
            *(float2 *)(a.dv + to + c) = make_float2(dv[n][2 * i], dv[n][2 * i + 1]);
        }
    }
}

/* Block (32 packed rows of a sequence): dq, of which a warp has 16 rows and COLS columns. */
template <int STAGES> static __global__ void __launch_bounds__(THREADS, 1) bwd_latent_rows(const struct cuda_attn a) {
    pdl_launch_dependents();
    pdl_wait();
    const struct seq_rows s = seq_rows_of(a, (int)(blockIdx.x / (unsigned)a.n_tiles));
    const int first = (a.n_tiles - 1 - (int)(blockIdx.x % (unsigned)a.n_tiles)) * ROWS;
    if (first >= s.packed) return;
    const int last = min(first + ROWS, s.packed) - 1, end = s.pos0 + last / a.group + 1;
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, part = warp / 4, quarter = warp % 4, t = lane % 4;
    const int r = first + part * 16 + lane / 4;
    const int at[2] = {s.pos0 + min(r, last) / a.group, s.pos0 + min(r + 8, last) / a.group};
    const int from[2] = {first_key(a, at[0]), first_key(a, at[1])};
    const float2 stat[2] = {a.stat[packed_index(a, s, 0, min(r, last))], a.stat[packed_index(a, s, 0, min(r + 8, last))]};
    char *const base = &dynamic_shared<char>(), *const ds_base = base + (2 + STAGES) * ROWS_BYTES;
    const uint32_t q = smem_addr(base) + (uint32_t)(part * 16 * STRIDE), dout = q + ROWS_BYTES;
    const uint32_t ds_tile = smem_addr(ds_base) + (uint32_t)(part * 16 * PAIR_STRIDE);
    const auto of = [&](int i) -> int64_t { return first + i <= last ? packed_index(a, s, 0, first + i) : -1; };
    const auto queue = [&](int j, uint32_t to) {
        if (j < end)
            load_rows<ROWS>(a, a.k, to, [&](int i) -> int64_t { return j + i < s.pos0 + s.n ? key_row(a, s.seq, 0, j + i) : -1; });
        cp_commit();
    };
    float dq[COLS / 8][4];
    fill_zero(dq);
    load_rows<ROWS>(a, a.q, smem_addr(base), of);
    load_rows<ROWS>(a, a.dout, smem_addr(base) + ROWS_BYTES, of);
    int j = first_key(a, s.pos0 + first / a.group) / ROWS * ROWS;
    uint32_t stage = smem_addr(base) + 2 * ROWS_BYTES, other = stage + (STAGES - 1) * ROWS_BYTES;
    queue(j, stage);
    for (; j < end; j += ROWS) {
        cp_wait<0>();
        __syncthreads();
        if (STAGES > 1) queue(j + ROWS, other);
        const uint32_t b = stage + (uint32_t)((quarter * 8 + lane % 8) * STRIDE + lane / 8 * 16);
        float p[4] = {}, ds[4] = {};
#pragma unroll 3
        for (int k = 0; k < STEPS; k += 2) {
            uint32_t x[4], y[4];
            ldmatrix_x4(y, b + (uint32_t)(k * 32));
            load_a(x, q, STRIDE, k);
            mma_bf16(p, x, y[0], y[1]);
            load_a(x, dout, STRIDE, k);
            mma_bf16(ds, x, y[0], y[1]);
            load_a(x, q, STRIDE, k + 1);
            mma_bf16(p, x, y[2], y[3]);
            load_a(x, dout, STRIDE, k + 1);
            mma_bf16(ds, x, y[2], y[3]);
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int key = j + quarter * 8 + t * 2 + e % 2;
            const bool seen = key <= at[e / 2] && key >= from[e / 2];
            const float w = seen ? exp2_approx(__fmaf_rn(p[e], a.scale_log2, -stat[e / 2].x)) : 0.0f;
            ds[e] = __fmul_rn(w, __fsub_rn(ds[e], stat[e / 2].y));
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
            *(uint32_t *)(ds_base + (part * 16 + lane / 4 + 8 * i) * PAIR_STRIDE + quarter * 16 + t * 4) =
                pack_bf16(ds[2 * i], ds[2 * i + 1]);
        __syncthreads();
        add_columns<ROWS / 16>(dq, ds_tile, PAIR_STRIDE, stage, (uint32_t)(quarter * COLS * 2));
        if (STAGES == 1) {
            __syncthreads();
            queue(j + ROWS, stage);
        }
        const uint32_t x = stage;
        stage = other;
        other = x;
    }
    cp_wait<0>();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (r + 8 * i > last) continue;
        uint16_t *const to = (uint16_t *)a.dq + packed_index(a, s, 0, r + 8 * i) * a.dim + 2 * t;
#pragma unroll
        for (int n = 0; n < COLS / 8; n++) {
            const int c = quarter * COLS + n * 8;
            if (c < a.dim)
                *(uint32_t *)(to + c) = pack_bf16(__fmul_rn(dq[n][2 * i], a.scale), __fmul_rn(dq[n][2 * i + 1], a.scale));
        }
    }
}

/* ---- the op ---- */

int cuda_attn_fwd_latent(struct cuda *c, const struct attn_args *a, struct cuda_attn p) {
    bool ran;
    TRY(cuda_attn_decode_latent_sm90(c, a, p, &ran));
    if (ran) return 0;
    TRY(cuda_attn_fwd_latent_sm90(c, a, p, &ran));
    if (ran) return 0;
    p.n_tiles = attn_tiles(a, ROWS);
    const bool two = (size_t)fwd_bytes(2) <= c->smem_max;
    return attn_launch(c, two ? fwd_latent<2> : fwd_latent<1>, {a->seqs.n, 1, THREADS, (size_t)fwd_bytes(two ? 2 : 1), true}, p);
}

int cuda_attn_bwd_latent(struct cuda *c, const struct attn_args *a, struct cuda_attn p) {
    const int64_t n = a->q.dim[0] * a->n_q_heads;
    const bool two_keys = (size_t)keys_bytes(2) <= c->smem_max, two_rows = (size_t)rows_bytes(2) <= c->smem_max;
    CU_TRY(cuda_launch_pdl(c, latent_delta, (unsigned)((n + WARPS - 1) / WARPS), THREADS, 0, p, n));
    bool ran;
    TRY(cuda_attn_bwd_latent_sm90(c, a, p, &ran));
    if (ran) return 0;
    p.n_tiles = attn_key_tiles(a, ROWS);
    TRY(attn_launch(c, two_keys ? bwd_latent_keys<2> : bwd_latent_keys<1>,
                    {a->seqs.n, 1, THREADS, (size_t)keys_bytes(two_keys ? 2 : 1), true}, p));
    p.n_tiles = attn_tiles(a, ROWS);
    return attn_launch(c, two_rows ? bwd_latent_rows<2> : bwd_latent_rows<1>,
                       {a->seqs.n, 1, THREADS, (size_t)rows_bytes(two_rows ? 2 : 1), true}, p);
}
