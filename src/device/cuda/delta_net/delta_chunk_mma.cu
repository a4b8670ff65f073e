/* delta_chunk_mma.cu - the gated delta rule's forward on tensor cores: rows of packed sequences, from the start or from a state.
 *
 * A block takes up to 128 value columns of a value head through a sequence's chunks, warp-specialized. A consumer warp has 16
 * columns, of which S^T is in its registers: as an accumulator of S', and in parts of bf16 as the operand A of x_k . S and
 * x_q . S. Four producer warps make the next chunk's heads, gates, a and p meanwhile (delta_chunk_producer.cuh). Of a chunk with
 * keys x_k and queries x_q as the convolution left them, a_ij and p_ij their decayed and normalised products (delta_mma.cuh):
 *   u_i = v_i - exp(G_i) k_i . S;  e_i = beta_i (u_i - sum_{j<i} a_ij e_j);  o_i = exp(G_i) q_i . S + sum_{j<=i} p_ij e_j
 *   S' = exp(G_63) S + sum_j exp(G_63 - G_j) k_j e_j^T
 * e comes in parts of 16 rows: within a part a quad of lanes has a column's rows and takes them two at a time by FMAs, then the
 * part is operand A of what it adds to sums and outputs of its and later parts.
 *
 * Columns never meet: two groups of four consumer warps wait for the producer warps alone.
 * Not here: one new row (delta_step_mma.cu), keys and G of the open chunk (delta_rule_fwd.cu), backward.
 * Invariant: an output's bits depend on its row and the rows before it in the sequence alone, and are the step kernel's: the order
 * of each sum is a chunk's, whatever rows of it are here. */
#include "device/cuda/delta_net/delta_chunk_producer.cuh"
#include "device/cuda/wgmma.cuh"

enum {
    TILES = DELTA_C / 8,             /* accumulators of a warp's columns: over the chunk's rows, */
    STATE_TILES = DEV_DELTA_DIM / 8, /* and over elements of S */
    GROUP = 4,                       /* warps that go from chunk to chunk together */
    FULL = 1,                        /* named barriers: a buffer has a chunk, of each group; */
    EMPTY = 5,                       /* it has been read */
    CONSUMER_REGISTERS = 208,        /* of a thread, of 168 that 384 threads have (bf16) */
    PRODUCER_REGISTERS = 88,
};

template <typename T> struct chunk_memory {
    enum {
        BUFFERS = sizeof(T) == 2 ? 2 : 1,
        CONSUMER_WARPS = chunk_heads<T>::CONSUMER_WARPS,
        THREADS = 32 * CONSUMER_WARPS + PRODUCER_THREADS
    };
    chunk_heads<T> heads[BUFFERS];
};
static_assert(sizeof(chunk_memory<bf16>) <= 163 << 10 && sizeof(chunk_memory<float>) <= 163 << 10, "fits an A100");

/* ---- a warp's columns: 2g and 2g + 1 are rows g and g + 8 of its tiles, so that a lane has neighbours ---- */

template <typename T> struct two_of;
template <> struct two_of<bf16> {
    typedef uint32_t word;
    static __device__ __forceinline__ float at(word w, int i) { return __uint_as_float(i ? w & 0xffff0000u : w << 16); }
    static __device__ __forceinline__ word of(float x, float y) { return pack_bf16(x, y); }
};
template <> struct two_of<float> {
    typedef float2 word;
    static __device__ __forceinline__ float at(word w, int i) { return i ? w.y : w.x; }
    static __device__ __forceinline__ word of(float x, float y) { return make_float2(x, y); }
};

/* u, o += x_k . S, x_q . S. */
template <typename T>
static __device__ __forceinline__ void state_dots(float (&u)[TILES][4], float (&o)[TILES][4], const float (&s)[STATE_TILES][4],
                                                  const chunk_heads<T> &h, int dk) {
    enum { X = delta_parts<T>::X, F = delta_parts<T>::F, MOST = delta_parts<T>::MOST };
#pragma unroll
    for (int d = 0; d < DEV_DELTA_DIM; d += 16) {
        if (d >= dk) break;
        uint32_t a[1][F][4];
        acc_split(a[0], s[d / 8], s[d / 8 + 1]);
#pragma unroll
        for (int query = 0; query < 2; query++) {
            uint32_t b[PARTS][2][X][2];
#pragma unroll
            for (int part = 0; part < PARTS; part++)
#pragma unroll
                for (int p = 0; p < X; p++)
                    load_b(b[part], p, smem_addr(&(query ? h.q : h.k)[p][PART * part][d] + tile_by_cols(LD)), false);
            mma_parts<MOST>(tiles<TILES>(query ? o : u, 0), a, *(uint32_t(*)[TILES][X][2])b);
        }
    }
}

/* e of a part in place of u. A lane has rows 2t, 2t+1, 8+2t, 9+2t of two columns; those of a lane at a time are done, of all that
 * come after them the sums go on. */
static __device__ __forceinline__ void part_e(float (&u)[1][2][4], float (&sum)[2][4], const float (&a)[PART][PART],
                                              const float *beta) {
    const int lane = (int)threadIdx.x & 31, t = lane & 3;
    float2 by[2];
#pragma unroll
    for (int h = 0; h < 2; h++) by[h] = *(const float2 *)&beta[8 * h + 2 * t];
#pragma unroll
    for (int s = 0; s < PART / 2; s++) {
        const int h = s / 4;
        const float4 v0 = *(const float4 *)&a[2 * s][4 * t], v1 = *(const float4 *)&a[2 * s + 1][4 * t];
        const float a0[2][2] = {{v0.x, v0.y}, {v0.z, v0.w}}, a1[2][2] = {{v1.x, v1.y}, {v1.z, v1.w}};
#pragma unroll
        for (int c = 0; c < 2; c++) {
            float *const mine = &u[0][h][2 * c];
            float e0 = delta_e(by[h].x, mine[0], sum[h][2 * c]);
            float e1 = delta_e(by[h].y, mine[1], __fmaf_rn(a0[h][1], e0, sum[h][2 * c + 1]));
            e0 = __shfl_sync(WARP_ALL, e0, s % 4, 4), e1 = __shfl_sync(WARP_ALL, e1, s % 4, 4);
            if (t == s % 4) mine[0] = e0, mine[1] = e1;
#pragma unroll
            for (int x = h; x < 2; x++)
#pragma unroll
                for (int y = 0; y < 2; y++) {
                    float &to = sum[x][2 * c + y];
                    to = __fmaf_rn(a1[x][y], e1, __fmaf_rn(a0[x][y], e0, to));
                }
        }
    }
}

/* acc += tile (16, 16) of the square at row r, column c, times a part's e. */
template <typename T>
static __device__ __forceinline__ void add_part(float (&acc)[1][2][4], const uint32_t (&e)[1][delta_parts<T>::F][4],
                                                const chunk_heads<T> &m, int r, int c) {
    enum { F = delta_parts<T>::F };
    uint32_t b[2][F][2];
#pragma unroll
    for (int p = 0; p < F; p++) load_b(b, p, smem_addr(&m.square[p][r][c] + tile_by_rows(LDS)), true);
    mma_parts<delta_parts<T>::MOST>(acc, e, b);
}
/* o of a part's own rows += p . e. An e that is not finite makes its row's o so, and none before it in the part. */
template <typename T>
static __device__ __forceinline__ void add_own(float (&o)[1][2][4], const float (&e)[1][2][4],
                                               const uint32_t (&parts)[1][delta_parts<T>::F][4], const chunk_heads<T> &m,
                                               int part) {
    float zero = 0;
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int x = 0; x < 4; x++) zero = __fmaf_rn(e[0][h][x], 0.0f, zero);
    if (!__any_sync(WARP_ALL, !(zero == 0))) {
        add_part(o, parts, m, PART * part, PART * part);
        return;
    }
    uint32_t finite_parts[1][delta_parts<T>::F][4];
    float finite[2][4];
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int x = 0; x < 4; x++) finite[h][x] = __fmul_rn(e[0][h][x], 0.0f) == 0 ? e[0][h][x] : 0.0f;
    acc_split(finite_parts[0], finite[0], finite[1]);
    add_part(o, finite_parts, m, PART * part, PART * part);
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int x = 0; x < 4; x++)
            if (!(__fmul_rn(e[0][h][x], 0.0f) == 0)) o[0][h][x] = __fmul_rn(e[0][h][x], 0.0f);
}

/* s = s_by s + x_k^T . end_by e; of a sequence's first chunk s is 0. */
template <typename T>
static __device__ __forceinline__ void next_state(float (&s)[STATE_TILES][4], const float (&e)[TILES][4], const chunk_heads<T> &h,
                                                  bool first, int dk) {
    enum { X = delta_parts<T>::X, F = delta_parts<T>::F, MOST = delta_parts<T>::MOST };
    const int t = (int)threadIdx.x & 3;
    const float by = h.s_by;
#pragma unroll
    for (int n = 0; n < STATE_TILES; n++)
#pragma unroll
        for (int x = 0; x < 4; x++) s[n][x] = first ? 0.0f : __fmul_rn(by, s[n][x]);
#pragma unroll
    for (int j = 0; j < PARTS; j++) {
        uint32_t a[1][F][4];
        float we[2][4];
#pragma unroll
        for (int y = 0; y < 2; y++) {
            const float2 end = *(const float2 *)&h.end_by[PART * j + 8 * y + 2 * t];
#pragma unroll
            for (int x = 0; x < 4; x++) we[y][x] = __fmul_rn(x & 1 ? end.y : end.x, e[2 * j + y][x]);
        }
        acc_split(a[0], we[0], we[1]);
#pragma unroll
        for (int d = 0; d < DEV_DELTA_DIM; d += 32) {
            if (d >= dk) break;
            uint32_t b[2][2][X][2];
#pragma unroll
            for (int y = 0; y < 2; y++)
#pragma unroll
                for (int p = 0; p < X; p++) load_b(b[y], p, smem_addr(&h.k[p][PART * j][d + 16 * y] + tile_by_rows(LD)), true);
            mma_parts<MOST>(tiles<4>(s, d / 8), a, *(uint32_t(*)[4][X][2])b);
        }
    }
}
/* A lane's columns of S (dk, dv). */
static __device__ __forceinline__ void load_state(float (&s)[STATE_TILES][4], const float *from, int dk, int dv) {
    const int t = (int)threadIdx.x & 3;
#pragma unroll
    for (int n = 0; n < STATE_TILES; n++)
#pragma unroll
        for (int y = 0; y < 2; y++) {
            const int d = 8 * n + 2 * t + y;
            const float2 v = d < dk ? *(const float2 *)&from[d * dv] : make_float2(0, 0);
            s[n][y] = v.x, s[n][2 + y] = v.y;
        }
}
static __device__ __forceinline__ void store_state(float *to, const float (&s)[STATE_TILES][4], int dk, int dv) {
    const int t = (int)threadIdx.x & 3;
#pragma unroll
    for (int n = 0; n < STATE_TILES; n++)
#pragma unroll
        for (int y = 0; y < 2; y++) {
            const int d = 8 * n + 2 * t + y;
            if (d < dk) *(float2 *)&to[d * dv] = make_float2(s[n][y], s[n][2 + y]);
        }
}

/* A lane's two columns of the chunk's rows, `stride` from each other, row 0 at `to`. WHOLE: of all rows, not of [n0, n1) alone. */
template <bool WHOLE, typename T>
static __device__ __forceinline__ void store_rows(T *to, int64_t stride, const float (&v)[TILES][4], const chunk_rows &x) {
    typedef typename two_of<T>::word word;
    const int t = (int)threadIdx.x & 3;
    to += 2 * t * stride;
#pragma unroll
    for (int i = 0; i < TILES; i++, to += 8 * stride)
#pragma unroll
        for (int y = 0; y < 2; y++) {
            const int at = 8 * i + 2 * t + y;
            if (WHOLE || (at >= x.n0 && at < x.n1)) *(word *)(to + y * stride) = two_of<T>::of(v[i][y], v[i][2 + y]);
        }
}

/* ALL: heads have DEV_DELTA_DIM elements. */
template <typename T, bool ALL>
static __global__ void __launch_bounds__(chunk_memory<T>::THREADS, 1) delta_chunk_kernel(const delta_job<T> job, int cols) {
    enum { F = delta_parts<T>::F, BUFFERS = chunk_memory<T>::BUFFERS, CONSUMER_THREADS = 32 * chunk_memory<T>::CONSUMER_WARPS };
    enum { FULL_THREADS = 32 * GROUP + PRODUCER_THREADS, EMPTY_THREADS = CONSUMER_THREADS + PRODUCER_THREADS };
    typedef two_of<T> two;
    delta_job<T> j = job;
    if (ALL) j.dk = j.dv = DEV_DELTA_DIM; /* numbers that the compiler knows */
    chunk_memory<T> &m = dynamic_shared<chunk_memory<T>>();
    const delta_seq seq = delta_seq_at(j, blockIdx.z);
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x & 31, t = lane & 3, dk = (int)j.dk, dv = (int)j.dv;
    const int64_t n = blockIdx.y;
    if (warp >= chunk_memory<T>::CONSUMER_WARPS) {
        if (sizeof(T) == 2) setmaxnreg_dec<PRODUCER_REGISTERS>();
        const int thread = (int)threadIdx.x - CONSUMER_THREADS;
        const chunk_cols of = {n, (int)blockIdx.x * cols, cols};
        int r = 0;
        for (int c = 0; r < seq.n; c++) {
            const chunk_rows x = chunk_at(seq, r);
            chunk_heads<T> &h = m.heads[c % BUFFERS];
            if (c >= BUFFERS) named_barrier_sync(EMPTY + c % BUFFERS, EMPTY_THREADS);
            make_heads(h, j, seq, of, x, thread);
            make_pairs(h, thread / 32, dk);
#pragma unroll
            for (int group = 0; group < chunk_memory<T>::CONSUMER_WARPS / GROUP; group++)
                named_barrier_arrive(FULL + 2 * group + c % BUFFERS, FULL_THREADS);
            r += x.n1 - x.n0;
        }
        return;
    }
    if (sizeof(T) == 2) setmaxnreg_inc<CONSUMER_REGISTERS>();
    const int col = (int)blockIdx.x * cols + warp * PART + lane / 4 * 2;
    const bool on = warp * PART < cols && (int)blockIdx.x * cols + warp * PART < dv; /* else this warp has no columns */
    const int64_t state = (seq.slot * j.hv + n) * dk * dv + col;
    float *const slot_e = seq.slot >= 0 ? j.e + (seq.slot * j.hv + n) * DELTA_C * dv + col : NULL;
    float s[STATE_TILES][4];
    if (on && seq.pos0 >= DELTA_C) load_state(s, j.s + state, dk, dv);
    int r = 0;
    for (int c = 0; r < seq.n; c++) {
        const chunk_rows x = chunk_at(seq, r);
        const chunk_heads<T> &h = m.heads[c % BUFFERS];
        const bool first = x.chunk == 0;
        const int64_t row_at = (x.t * j.hv + n) * dv + col; /* of the chunk's row 0 */
        float u[TILES][4] = {}, o[TILES][4] = {}, sum[TILES][4] = {};
        named_barrier_sync(FULL + warp / GROUP * 2 + c % BUFFERS, FULL_THREADS);
        if (on) {
            if (!first) state_dots(u, o, s, h, dk);
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                const typename two::word v[2] = {*(const typename two::word *)&h.v[8 * i + 2 * t][warp * PART + lane / 4 * 2],
                                                 *(const typename two::word *)&h.v[8 * i + 2 * t + 1][warp * PART + lane / 4 * 2]};
                const float2 u_by = *(const float2 *)&h.u_by[8 * i + 2 * t], o_by = *(const float2 *)&h.o_by[8 * i + 2 * t];
#pragma unroll
                for (int y = 0; y < 4; y++) {
                    const float value = two::at(v[y & 1], y / 2);
                    u[i][y] = first ? value : __fmaf_rn(y & 1 ? u_by.y : u_by.x, u[i][y], value);
                    o[i][y] = __fmul_rn(y & 1 ? o_by.y : o_by.x, o[i][y]);
                }
            }
            if (x.n0 > 0)
#pragma unroll
                for (int i = 0; i < TILES; i++)
#pragma unroll
                    for (int y = 0; y < 2; y++)
                        if (8 * i + 2 * t + y < x.n0) {
                            const float2 e = *(const float2 *)&slot_e[(8 * i + 2 * t + y) * dv];
                            u[i][y] = e.x, u[i][2 + y] = e.y;
                        }
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                part_e(tiles<2>(u, 2 * part), tiles<2>(sum, 2 * part)[0], h.diagonal[part], &h.beta[PART * part]);
                uint32_t e[1][F][4];
                acc_split(e[0], u[2 * part], u[2 * part + 1]);
#pragma unroll
                for (int i = part + 1; i < PARTS; i++) add_part(tiles<2>(sum, 2 * i), e, h, PART * i, PART * part);
                add_own(tiles<2>(o, 2 * part), tiles<2>(u, 2 * part), e, h, part);
#pragma unroll
                for (int i = part + 1; i < PARTS; i++) add_part(tiles<2>(o, 2 * i), e, h, PART * part, PART * i);
            }
            const int64_t stride = j.hv * dv;
            if (x.n0 == 0 && x.n1 == DELTA_C) {
                store_rows<true>(j.out + row_at, stride, o, x);
                if (j.kept) store_rows<true>(j.kept + row_at, stride, u, x);
            } else {
                store_rows<false>(j.out + row_at, stride, o, x);
                if (j.kept) store_rows<false>(j.kept + row_at, stride, u, x);
                if (slot_e && x.n1 < DELTA_C) store_rows<false>(slot_e, dv, u, x);
            }
            if (x.n1 == DELTA_C) next_state(s, u, h, first, dk);
        }
        r += x.n1 - x.n0;
        /* the producer warps wait where a chunk is BUFFERS after this one */
        if (r + (BUFFERS - 1) * DELTA_C < seq.n) named_barrier_arrive(EMPTY + c % BUFFERS, EMPTY_THREADS);
        if (!on || x.n1 < DELTA_C) continue;
        if (j.states && r < seq.n) store_state(j.states + ((seq.entry + x.chunk + 1) * j.hv + n) * dk * dv + col, s, dk, dv);
        if (slot_e && seq.n - r < DELTA_C) store_state(j.s + state, s, dk, dv); /* none comes after it here */
    }
}

template <typename T> int delta_chunk_mma(struct cuda *c, const struct delta_args *a, const delta_job<T> &j) {
    typedef chunk_memory<T> memory;
    /* as many columns a block as leave no multiprocessor without one: heads and a, p are made by each block */
    int cols = chunk_heads<T>::COLS;
    const auto blocks = [&](int width) { return (j.dv + width - 1) / width * j.hv * a->seqs.n; };
    while (cols > 2 * PART && blocks(cols / 2) <= c->n_sm) cols /= 2;
    const dim3 grid((unsigned)((j.dv + cols - 1) / cols), (unsigned)j.hv, (unsigned)a->seqs.n);
    const bool all = j.dk == DEV_DELTA_DIM && j.dv == DEV_DELTA_DIM;
    void (*const kernel)(delta_job<T>, int) = all ? delta_chunk_kernel<T, true> : delta_chunk_kernel<T, false>;
    TRY(delta_shared(c, (const void *)kernel, sizeof(memory), a));
    CU_TRY(cuda_launch_plain(c, kernel, grid, (int)memory::THREADS, sizeof(memory), j, cols));
    return 0;
}
template int delta_chunk_mma<bf16>(struct cuda *, const struct delta_args *, const delta_job<bf16> &);
template int delta_chunk_mma<float>(struct cuda *, const struct delta_args *, const delta_job<float> &);
