/* conv_norm_gate.cu - the row ops of a gated delta net layer: causal convolution, gated norm, and the output gate of
 * gated attention; each with its backward.
 *
 * A thread's unit is a chunk of 8 columns (convolution, gate), a warp's a row (norm).  Gradients of weights: each block adds up its
 * run of rows in order, then one kernel adds the blocks' sums.
 * Invariant: how many rows a block takes touches only the order in which weight gradients are added. */
#include "device/cuda/swiglu.cuh"
#include "device/cuda/vec.cuh"

typedef __nv_bfloat16 bf16;

enum { THREADS = 128, TAPS = DEV_CONV_TAPS, ROWS = 16 }; /* ROWS: of a block of the convolution's forward */

static __device__ __forceinline__ float silu(float x) { return __fmul_rn(x, sigmoid(x)); }
static __device__ __forceinline__ float silu_slope(float x) {
    const float s = sigmoid(x);
    return __fmul_rn(s, __fmaf_rn(x, __fsub_rn(1.0f, s), 1.0f));
}

template <typename T> static __device__ __forceinline__ float one(const T *p, int64_t i) {
    float v[CHUNK];
    load8<false>(v, p + i, 1);
    return v[0];
}
template <typename T> static __device__ __forceinline__ void put(T *p, int64_t i, float x) {
    const float v[CHUNK] = {x};
    store8<false>(p + i, v, 1);
}

/* ---- causal convolution ---- */

template <typename T> struct conv_job {
    int64_t n, rows, cols, n_slots, kept, per; /* sequences; rows of the batch, of a slot, of a block */
    int64_t x_width;                           /* columns from a row of x and dx to the next */
    const int32_t *start, *pos0, *slot;
    const T *x, *w, *dy;
    T *y, *state, *dx;
    float *parts;
};
/* The sequence of a row: rows [lo, hi), lo at position pos0; its state, NULL: zeros before it. */
template <typename T> struct conv_seq {
    int64_t i, lo, hi, pos0;
    const T *state;
};
template <typename T> static __device__ void conv_enter(const conv_job<T> &j, conv_seq<T> &s) {
    s.lo = j.start[s.i], s.hi = j.start[s.i + 1];
    s.pos0 = j.pos0[s.i];
    s.state = NULL;
    if (s.pos0 == 0) return;
    const int64_t slot = j.slot ? j.slot[s.i] : -1;
    if (slot < 0 || slot >= j.n_slots) __trap();
    s.state = j.state + slot * j.kept * j.cols;
}
/* The first sequence that ends behind row r; i = n: none. */
template <typename T> static __device__ conv_seq<T> conv_find(const conv_job<T> &j, int64_t r) {
    conv_seq<T> s = {};
    int64_t hi = j.n;
    while (s.i < hi) {
        const int64_t mid = (s.i + hi) / 2;
        if (j.start[mid + 1] > r) hi = mid;
        else s.i = mid + 1;
    }
    if (s.i < j.n) conv_enter(j, s);
    return s;
}
template <typename T> static __device__ void conv_next(const conv_job<T> &j, conv_seq<T> &s, int64_t r) {
    while (s.i < j.n && r >= s.hi)
        if (++s.i < j.n) conv_enter(j, s);
}
/* Where row r of a sequence with a slot is kept. */
template <typename T> static __device__ __forceinline__ T *conv_state_row(const conv_job<T> &j, const conv_seq<T> &s, int64_t r) {
    const int64_t slot = j.slot[s.i];
    if (slot < 0 || slot >= j.n_slots) __trap();
    return j.state + (slot * j.kept + (s.pos0 + r - s.lo) % j.kept) * j.cols;
}
/* Columns [c, c + n) of the input row r of the sequence, which may be before its first one in the batch. */
template <bool VEC, typename T>
static __device__ __forceinline__ void conv_load(float v[CHUNK], const conv_job<T> &j, const conv_seq<T> &s, int64_t r, int64_t c,
                                                 int n) {
    if (r >= s.lo) load8<VEC>(v, j.x + r * j.x_width + c, n);
    else if (s.state && s.pos0 + r >= s.lo) load8<VEC>(v, s.state + (s.pos0 + r - s.lo) % j.kept * j.cols + c, n);
    else {
#pragma unroll
        for (int i = 0; i < CHUNK; i++) v[i] = 0;
    }
}
template <bool VEC, typename T>
static __device__ __forceinline__ void conv_weights(float w[TAPS][CHUNK], const conv_job<T> &j, int64_t c, int n) {
    float flat[TAPS][CHUNK];
#pragma unroll
    for (int t = 0; t < TAPS; t++) load8<VEC>(flat[t], j.w + (c + 2 * t) * TAPS, n * TAPS - t * CHUNK); /* two columns */
#pragma unroll
    for (int t = 0; t < TAPS; t++)
#pragma unroll
        for (int i = 0; i < CHUNK; i++) w[t][i] = flat[(i * TAPS + t) / CHUNK][(i * TAPS + t) % CHUNK];
}
/* A chunk as it is in memory. */
template <typename T> struct alignas(16) conv_chunk { T v[CHUNK]; };
/* Forward: the last rows of x, and the next ones, whose loads are under way. A row has a place by its distance from where the run
 * began, modulo TAPS, so none is moved. */
template <typename T> struct conv_rows {
    float x[TAPS][CHUNK];
    conv_chunk<T> coming[TAPS];
    int64_t c;
    int n;
};
template <bool VEC, typename T> static __device__ __forceinline__ void conv_get_chunk(conv_chunk<T> &to, const T *p, int n) {
    if (VEC) to = *(const conv_chunk<T> *)p;
    else
#pragma unroll
        for (int i = 0; i < CHUNK; i++) put(to.v, i, i < n ? one(p, i) : 0.0f);
}
/* y of row r, which has place P. */
template <int P, bool VEC, bool SINGLE, typename T>
static __device__ __forceinline__ void conv_put_y(conv_rows<T> &o, const conv_job<T> &j, const conv_seq<T> &s,
                                                  const float w[TAPS][CHUNK], int64_t r, int64_t end) {
    const conv_chunk<T> row = o.coming[P];
    float u[CHUNK];
    if (!SINGLE && r + TAPS < end) conv_get_chunk<VEC>(o.coming[P], j.x + (r + TAPS) * j.x_width + o.c, o.n);
#pragma unroll
    for (int i = 0; i < CHUNK; i++) o.x[P][i] = one(row.v, i);
    if (SINGLE && j.state) store8<VEC>(conv_state_row(j, s, r) + o.c, o.x[P], o.n); /* its place was a row before these */
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
        float sum = 0;
#pragma unroll
        for (int t = 0; t < TAPS; t++) sum = __fmaf_rn(w[t][i], o.x[(P + 1 + t) % TAPS][i], sum);
        u[i] = silu(round_to<T>(sum));
    }
    store8<VEC>(j.y + r * j.cols + o.c, u, o.n);
}

/* grid (column blocks, row blocks). SINGLE: no sequence has more than one row, and a block has one. */
template <typename T, bool VEC, bool SINGLE>
static __global__ void __launch_bounds__(THREADS, VEC ? 4 : 1) conv_fwd_kernel(const conv_job<T> j) {
    pdl_launch_dependents();
    pdl_wait();
    const int64_t c = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * CHUNK, lo = (int64_t)blockIdx.y * j.per;
    if (c >= j.cols) return;
    const int64_t hi = lo + j.per < j.rows ? lo + j.per : j.rows;
    float w[TAPS][CHUNK];
    conv_rows<T> o;
    o.c = c, o.n = j.cols - c < CHUNK ? (int)(j.cols - c) : CHUNK;
    conv_weights<VEC>(w, j, c, o.n);
    conv_seq<T> s = conv_find(j, lo);
    for (int64_t r = lo, end; r < hi; r = end) {
        conv_next(j, s, r);
        if (s.i == j.n) return;
        if (r < s.lo) r = s.lo; /* rows of no sequence */
        end = SINGLE ? r + 1 : hi < s.hi ? hi : s.hi;
        if (r >= hi) return;
#pragma unroll
        for (int a = 0; a < (SINGLE ? 1 : TAPS); a++)
            if (r + a < end) conv_get_chunk<VEC>(o.coming[a], j.x + (r + a) * j.x_width + c, o.n);
#pragma unroll
        for (int t = 1; t < TAPS; t++) conv_load<VEC>(o.x[t], j, s, r - TAPS + t, c, o.n);
        static_assert(TAPS == 4, "the places below");
#pragma unroll 1
        for (int64_t to = r; to < end; to += TAPS) {
            conv_put_y<0, VEC, SINGLE>(o, j, s, w, to, end);
            if (SINGLE || to + 1 >= end) break;
            conv_put_y<1, VEC, false>(o, j, s, w, to + 1, end);
            if (to + 2 >= end) break;
            conv_put_y<2, VEC, false>(o, j, s, w, to + 2, end);
            if (to + 3 >= end) break;
            conv_put_y<3, VEC, false>(o, j, s, w, to + 3, end);
        }
    }
}

/* Afterwards the last inputs of each sequence: grid (column blocks, sequences). */
template <typename T, bool VEC> static __global__ void __launch_bounds__(THREADS) conv_state_kernel(const conv_job<T> j) {
    pdl_launch_dependents();
    pdl_wait();
    const int64_t c = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * CHUNK;
    conv_seq<T> s = {};
    s.i = blockIdx.y;
    if (c >= j.cols) return;
    conv_enter(j, s);
    if (s.hi == s.lo) return;
    const int n = j.cols - c < CHUNK ? (int)(j.cols - c) : CHUNK;
    for (int64_t r = s.hi - s.lo < j.kept ? s.lo : s.hi - j.kept; r < s.hi; r++) {
        float x[CHUNK];
        conv_load<VEC>(x, j, s, r, c, n);
        store8<VEC>(conv_state_row(j, s, r) + c, x, n);
    }
}

/* Backward: a thread has COLS columns, of which it keeps the weights, their gradients and a window of rows in registers. */
enum { COLS = 4 };
template <typename T> struct alignas(COLS * sizeof(T)) conv_cols { T v[COLS]; };
template <bool VEC, typename T> static __device__ __forceinline__ void conv_get(conv_cols<T> &to, const T *p, int n) {
    if (VEC) to = *(const conv_cols<T> *)p;
    else
#pragma unroll
        for (int i = 0; i < COLS; i++) put(to.v, i, i < n ? one(p, i) : 0.0f);
}
template <bool VEC, typename T> static __device__ __forceinline__ void conv_put(T *p, const float v[COLS], int n) {
    conv_cols<T> to;
#pragma unroll
    for (int i = 0; i < COLS; i++) put(to.v, i, v[i]);
    if (VEC) *(conv_cols<T> *)p = to;
    else
#pragma unroll
        for (int i = 0; i < COLS; i++)
            if (i < n) p[i] = to.v[i];
}
/* A row that is to come, as it is in memory: its loads are under way. */
template <typename T> struct conv_row { conv_cols<T> x, dy; };
template <bool VEC, typename T>
static __device__ __forceinline__ void conv_get_row(conv_row<T> &to, const conv_job<T> &j, int64_t r, int64_t c, int n) {
    if (r >= j.rows) return;
    conv_get<VEC>(to.x, j.x + r * j.x_width + c, n);
    conv_get<VEC>(to.dy, j.dy + r * j.cols + c, n);
}
/* Rows r - TAPS + 1 to r, of which du, the gradient of u, is 0 behind the sequence; and the TAPS rows after them. A row has a place
 * by its distance from where the run began, modulo TAPS, so none is moved while it is under way. */
template <typename T> struct conv_window {
    float x[TAPS][COLS], du[TAPS][COLS], dw[TAPS][COLS];
    conv_row<T> coming[TAPS];
    int64_t c; /* its columns: n from c on */
    int n;
};
/* The window before a sequence's row r, which is its first one or that of a block's run. */
template <bool VEC, typename T>
static __device__ __forceinline__ void conv_begin(conv_window<T> &o, const conv_job<T> &j, const conv_seq<T> &s, int64_t r) {
#pragma unroll
    for (int t = 1; t < TAPS; t++) {
        conv_cols<T> x = {};
        if (r - TAPS + t >= s.lo) conv_get<VEC>(x, j.x + (r - TAPS + t) * j.x_width + o.c, o.n);
#pragma unroll
        for (int i = 0; i < COLS; i++) o.x[t][i] = one(x.v, i);
    }
#pragma unroll
    for (int a = 0; a < TAPS; a++) conv_get_row<VEC>(o.coming[a], j, r + a, o.c, o.n);
}
/* On to row r of place P, which is in the sequence or behind it; those before end count for the weights. */
template <int P, bool VEC, typename T>
static __device__ __forceinline__ void conv_go_on(conv_window<T> &o, const conv_job<T> &j, const conv_seq<T> &s,
                                                  const float w[TAPS][COLS], int64_t r, int64_t end) {
    const conv_row<T> row = o.coming[P];
    conv_get_row<VEC>(o.coming[P], j, r + TAPS, o.c, o.n);
#pragma unroll
    for (int i = 0; i < COLS; i++) {
        float u = 0;
        o.x[P][i] = one(row.x.v, i);
#pragma unroll
        for (int t = 0; t < TAPS; t++) u = __fmaf_rn(w[t][i], o.x[(P + 1 + t) % TAPS][i], u); /* as forward */
        o.du[P][i] = r < s.hi ? __fmul_rn(one(row.dy.v, i), silu_slope(round_to<T>(u))) : 0.0f;
    }
    if (r >= end) return;
#pragma unroll
    for (int t = 0; t < TAPS; t++)
#pragma unroll
        for (int i = 0; i < COLS; i++) o.dw[t][i] = __fmaf_rn(o.du[P][i], o.x[(P + 1 + t) % TAPS][i], o.dw[t][i]);
}
/* dx of the first row of a window whose last one has place P. */
template <int P, bool VEC, typename T>
static __device__ __forceinline__ void conv_put_dx(const conv_window<T> &o, const conv_job<T> &j, const float w[TAPS][COLS],
                                                   int64_t r) {
    float dx[COLS];
#pragma unroll
    for (int i = 0; i < COLS; i++) {
        dx[i] = 0;
#pragma unroll
        for (int t = 0; t < TAPS; t++) dx[i] = __fmaf_rn(w[t][i], o.du[(P + TAPS - t) % TAPS][i], dx[i]);
    }
    conv_put<VEC>(j.dx + r * j.x_width + o.c, dx, o.n);
}

/* A row of x and of dy is read once, but for those at the ends of a block's run. */
template <typename T, bool VEC> static __global__ void __launch_bounds__(THREADS, 4) conv_bwd_kernel(const conv_job<T> j) {
    pdl_launch_dependents();
    pdl_wait();
    const int64_t c = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * COLS, lo = (int64_t)blockIdx.y * j.per;
    if (c >= j.cols) return;
    const int64_t hi = lo + j.per < j.rows ? lo + j.per : j.rows;
    const int n = j.cols - c < COLS ? (int)(j.cols - c) : COLS;
    float w[TAPS][COLS];
    conv_window<T> o;
    o.c = c, o.n = n;
#pragma unroll
    for (int i = 0; i < COLS; i++)
#pragma unroll
        for (int t = 0; t < TAPS; t++) w[t][i] = i < n ? one(j.w, (c + i) * TAPS + t) : 0.0f, o.dw[t][i] = 0;
    conv_seq<T> s = conv_find(j, lo);
    for (int64_t r = lo, end; r < hi; r = end) {
        conv_next(j, s, r);
        if (s.i == j.n) break;
        if (r < s.lo) r = s.lo; /* rows of no sequence */
        end = hi < s.hi ? hi : s.hi;
        if (r >= end) continue;
        conv_begin<VEC>(o, j, s, r);
        const int64_t last = end + TAPS - 1, ready = r + TAPS - 1;
        static_assert(TAPS == 4, "the places below");
#pragma unroll 1
        for (int64_t to = r; to < last; to += TAPS) {
            conv_go_on<0, VEC>(o, j, s, w, to, end);
            if (to >= ready) conv_put_dx<0, VEC>(o, j, w, to - TAPS + 1);
            if (to + 1 >= last) break;
            conv_go_on<1, VEC>(o, j, s, w, to + 1, end);
            if (to + 1 >= ready) conv_put_dx<1, VEC>(o, j, w, to - TAPS + 2);
            if (to + 2 >= last) break;
            conv_go_on<2, VEC>(o, j, s, w, to + 2, end);
            if (to + 2 >= ready) conv_put_dx<2, VEC>(o, j, w, to - TAPS + 3);
            if (to + 3 >= last) break;
            conv_go_on<3, VEC>(o, j, s, w, to + 3, end);
            conv_put_dx<3, VEC>(o, j, w, to);
        }
    }
    float *const part = j.parts + (int64_t)blockIdx.y * j.cols * TAPS;
#pragma unroll
    for (int i = 0; i < COLS; i++)
        if (i < n) *(float4 *)(part + (c + i) * TAPS) = make_float4(o.dw[0][i], o.dw[1][i], o.dw[2][i], o.dw[3][i]);
}

template <typename T> static conv_job<T> conv_job_of(const struct causal_conv_args *a) {
    conv_job<T> j = {};
    j.n = a->seqs.n, j.rows = a->x.dim[0], j.cols = a->w.dim[0], j.x_width = a->x.dim[1], j.per = ROWS;
    j.start = (const int32_t *)a->seqs.start.data, j.pos0 = (const int32_t *)a->seqs.pos0.data;
    j.slot = (const int32_t *)a->seqs.slot.data, j.n_slots = a->state.data ? a->state.dim[0] : 0;
    j.kept = a->state.data ? a->state.dim[1] : 0;
    j.x = (const T *)a->x.data + a->x_at, j.w = (const T *)a->w.data, j.y = (T *)a->y.data, j.state = (T *)a->state.data;
    return j;
}
static unsigned column_blocks(int64_t cols) { return (unsigned)ceil_div(cols, THREADS * CHUNK); }
template <typename T> static bool wide(const conv_job<T> &j, const void *a, const void *b, const void *c, const void *d) {
    return j.cols % CHUNK == 0 && j.x_width % CHUNK == 0 && aligned16(a) && aligned16(b) && aligned16(c) && aligned16(d);
}

template <typename T> static int conv_fwd_any(struct cuda *c, const struct causal_conv_args *a) {
    conv_job<T> j = conv_job_of<T>(a);
    const bool single = a->seqs.max_rows == 1, vec = wide(j, j.x, j.w, j.y, j.state);
    if (single) j.per = 1; /* each row would look up its own sequence, one after the other */
    const dim3 grid(column_blocks(j.cols), (unsigned)ceil_div(j.rows, j.per)), states(grid.x, (unsigned)j.n);
    void (*const kernel)(conv_job<T>) = single ? (vec ? conv_fwd_kernel<T, true, true> : conv_fwd_kernel<T, false, true>)
                                               : (vec ? conv_fwd_kernel<T, true, false> : conv_fwd_kernel<T, false, false>);
    CU_TRY(cuda_launch_pdl(c, kernel, grid, THREADS, 0, j));
    if (!j.state || j.n == 0 || single) return 0;
    if (vec) CU_TRY(cuda_launch_pdl(c, conv_state_kernel<T, true>, states, THREADS, 0, j));
    else CU_TRY(cuda_launch_pdl(c, conv_state_kernel<T, false>, states, THREADS, 0, j));
    return 0;
}
int cuda_causal_conv_fwd(struct dev *d, const struct causal_conv_args *a) {
    return a->x.dt == DT_BF16 ? conv_fwd_any<bf16>(cuda_of(d), a) : conv_fwd_any<float>(cuda_of(d), a);
}

template <typename T>
static int conv_bwd_any(struct cuda *c, const struct causal_conv_args *a, const struct causal_conv_bwd_args *b) {
    conv_job<T> j = conv_job_of<T>(a);
    void *parts;
    j.per = ceil_div(j.rows, c->n_sm) < 4 * ROWS ? 4 * ROWS : ceil_div(j.rows, c->n_sm);
    const int64_t n = ceil_div(j.rows, j.per), each = j.cols * TAPS;
    TRY(cuda_scratch(c, CUDA_SCRATCH_ROW, (size_t)(n * each) * sizeof(float), &parts));
    j.dy = (const T *)b->dy.data, j.dx = (T *)b->dx.data + a->x_at, j.parts = (float *)parts;
    const dim3 grid((unsigned)ceil_div(j.cols, THREADS * COLS), (unsigned)n);
    if (wide(j, j.x, j.w, j.dy, j.dx)) CU_TRY(cuda_launch_pdl(c, conv_bwd_kernel<T, true>, grid, THREADS, 0, j));
    else CU_TRY(cuda_launch_pdl(c, conv_bwd_kernel<T, false>, grid, THREADS, 0, j));
    return cuda_add_parts(c, (float *)b->dw.data, j.parts, n, each, each);
}
int cuda_causal_conv_bwd(struct dev *d, const struct causal_conv_args *a, const struct causal_conv_bwd_args *b) {
    return a->x.dt == DT_BF16 ? conv_bwd_any<bf16>(cuda_of(d), a, b) : conv_bwd_any<float>(cuda_of(d), a, b);
}

/* ---- gated norm ---- */

enum { WARPS = THREADS / 32 };

template <typename T> struct norm_job {
    int64_t rows, cols, per;
    int64_t heads, z_width; /* of a row of z and dz: heads, columns to the next one */
    float eps;
    const T *x, *z, *w, *dy;
    T *y, *dx, *dz;
    float *rstd, *parts;
};

/* The row of a warp, and where its columns of z are: grid (tokens, blocks of heads). */
struct norm_place {
    int64_t t, z;
};
template <typename T> static __device__ __forceinline__ bool norm_place_of(const norm_job<T> &j, norm_place &p) {
    const int64_t token = blockIdx.x, head = (int64_t)blockIdx.y * WARPS + threadIdx.x / 32;
    p.t = token * j.heads + head, p.z = token * j.z_width + head * j.cols;
    return head < j.heads;
}
template <typename T> static dim3 norm_grid(const norm_job<T> &j) {
    return dim3((unsigned)(j.rows / j.heads), (unsigned)ceil_div(j.heads, WARPS));
}

template <typename T> static __global__ void __launch_bounds__(THREADS) gated_norm_fwd_kernel(const norm_job<T> j) {
    pdl_launch_dependents();
    pdl_wait();
    norm_place p;
    if (!norm_place_of(j, p)) return;
    const int64_t row = p.t * j.cols;
    float sum = 0;
    for (int64_t c = threadIdx.x & 31; c < j.cols; c += 32) {
        const float x = one(j.x, row + c);
        sum = __fmaf_rn(x, x, sum);
    }
    sum = lanes_sum(sum, 32);
    const float rs = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, (float)j.cols), j.eps)));
    for (int64_t c = threadIdx.x & 31; c < j.cols; c += 32) {
        const float u = round_to<T>(__fmul_rn(round_to<T>(__fmul_rn(one(j.x, row + c), rs)), one(j.w, c)));
        put(j.y, row + c, __fmul_rn(u, silu(one(j.z, p.z + c))));
    }
    if (j.rstd && (threadIdx.x & 31) == 0) j.rstd[p.t] = rs;
}
/* n = x rstd, g = dy silu(z): dx = rstd (g w - n mean(g w n)), dz = dy n w silu'(z), dw = sum of g n.
 * A warp has each NORM_WARPS-th row of the block's run, a lane COLS columns side by side; with ONE no others of a row, and the next
 * row's are under way. */
enum { NORM_BWD_THREADS = 512, NORM_WARPS = NORM_BWD_THREADS / 32, WARP_COLS = 32 * COLS, NORM_BWD_SHARED = 48 << 10 };
template <typename T> struct norm_cols { conv_cols<T> x, z, dy; };
template <bool VEC, typename T>
static __device__ __forceinline__ void norm_get(norm_cols<T> &v, const norm_job<T> &j, const norm_place &p, int64_t c) {
    const int n = j.cols - c < COLS ? (int)(j.cols - c) : COLS;
    conv_get<VEC>(v.x, j.x + p.t * j.cols + c, n), conv_get<VEC>(v.z, j.z + p.z + c, n),
        conv_get<VEC>(v.dy, j.dy + p.t * j.cols + c, n);
}
template <typename T, bool VEC, bool ONE>
static __global__ void __launch_bounds__(NORM_BWD_THREADS, 2) gated_norm_bwd_kernel(const norm_job<T> j) {
    pdl_launch_dependents();
    pdl_wait();
    float *const sums = &dynamic_shared<float>(); /* (NORM_WARPS, cols, to a multiple of COLS) */
    const int64_t c0 = (int64_t)(threadIdx.x & 31) * COLS, width = (j.cols + COLS - 1) / COLS * COLS;
    const int64_t lo = (int64_t)blockIdx.x * j.per, hi = lo + j.per < j.rows ? lo + j.per : j.rows;
    const int warp = threadIdx.x / 32;
    float w[COLS], dw[COLS] = {};
    for (int64_t c = c0; c < width; c += WARP_COLS)
#pragma unroll
        for (int i = 0; i < COLS; i++) {
            w[i] = c + i < j.cols ? one(j.w, c + i) : 0.0f;
            sums[warp * width + c + i] = 0;
        }
    int64_t token = (lo + warp) / j.heads, head = (lo + warp) % j.heads;
    norm_place next = {lo + warp, token * j.z_width + head * j.cols};
    norm_cols<T> coming = {};
    if (ONE && next.t < hi && c0 < width) norm_get<VEC>(coming, j, next, c0);
    while (next.t < hi) {
        const norm_place p = next;
        const float rs = j.rstd[p.t];
        norm_cols<T> v = coming;
        float sum = 0;
        for (head += NORM_WARPS; head >= j.heads; head -= j.heads) token++;
        next = {p.t + NORM_WARPS, token * j.z_width + head * j.cols};
        if (ONE && next.t < hi && c0 < width) norm_get<VEC>(coming, j, next, c0);
        for (int64_t c = c0; c < width; c += WARP_COLS) {
            if (!ONE) norm_get<VEC>(v, j, p, c);
#pragma unroll
            for (int i = 0; i < COLS; i++) {
                const float by = ONE ? w[i] : c + i < j.cols ? one(j.w, c + i) : 0.0f;
                const float g = __fmul_rn(__fmul_rn(one(v.dy.v, i), silu(one(v.z.v, i))), by);
                sum = __fmaf_rn(g, __fmul_rn(one(v.x.v, i), rs), sum);
            }
            if (ONE) break;
        }
        const float mean = __fdiv_rn(lanes_sum(sum, 32), (float)j.cols);
        for (int64_t c = c0; c < width; c += WARP_COLS) {
            const int n = j.cols - c < COLS ? (int)(j.cols - c) : COLS;
            float dx[COLS], dz[COLS];
            if (!ONE) norm_get<VEC>(v, j, p, c);
#pragma unroll
            for (int i = 0; i < COLS; i++) {
                const float dy = one(v.dy.v, i), z = one(v.z.v, i), g = __fmul_rn(dy, silu(z)), x = __fmul_rn(one(v.x.v, i), rs);
                const float by = ONE ? w[i] : c + i < j.cols ? one(j.w, c + i) : 0.0f;
                dx[i] = __fmul_rn(rs, __fmaf_rn(-x, mean, __fmul_rn(g, by)));
                dz[i] = __fmul_rn(__fmul_rn(dy, __fmul_rn(x, by)), silu_slope(z));
                if (ONE) dw[i] = __fmaf_rn(g, x, dw[i]);
                else sums[warp * width + c + i] = __fmaf_rn(g, x, sums[warp * width + c + i]);
            }
            conv_put<VEC>(j.dx + p.t * j.cols + c, dx, n), conv_put<VEC>(j.dz + p.z + c, dz, n);
            if (ONE) break;
        }
    }
    if (ONE && c0 < width)
#pragma unroll
        for (int i = 0; i < COLS; i++) sums[warp * width + c0 + i] = dw[i];
    __syncthreads();
    for (int64_t c = threadIdx.x; c < j.cols; c += NORM_BWD_THREADS) {
        float sum = 0;
        for (int i = 0; i < NORM_WARPS; i++) sum = __fadd_rn(sum, sums[i * width + c]);
        j.parts[(int64_t)blockIdx.x * j.cols + c] = sum;
    }
}

template <typename T> static norm_job<T> norm_job_of(const struct gated_norm_args *a) {
    norm_job<T> j = {};
    j.rows = a->x.dim[0], j.cols = a->x.dim[1], j.eps = a->eps;
    j.heads = j.rows / a->z.dim[0], j.z_width = a->z.dim[1];
    j.x = (const T *)a->x.data, j.z = (const T *)a->z.data + a->z_at, j.w = (const T *)a->w.data, j.y = (T *)a->y.data;
    j.rstd = (float *)a->rstd.data;
    return j;
}
template <typename T> static int gated_norm_fwd_any(struct cuda *c, const struct gated_norm_args *a) {
    const norm_job<T> j = norm_job_of<T>(a);
    CU_TRY(cuda_launch_pdl(c, gated_norm_fwd_kernel<T>, norm_grid(j), THREADS, 0, j));
    return 0;
}
int cuda_gated_norm_fwd(struct dev *d, const struct gated_norm_args *a) {
    return a->x.dt == DT_BF16 ? gated_norm_fwd_any<bf16>(cuda_of(d), a) : gated_norm_fwd_any<float>(cuda_of(d), a);
}
template <typename T>
static int gated_norm_bwd_any(struct cuda *c, const struct gated_norm_args *a, const struct gated_norm_bwd_args *b) {
    norm_job<T> j = norm_job_of<T>(a);
    void *parts;
    j.per = ceil_div(j.rows, (int64_t)c->n_sm * 2); /* as many blocks as run at a time */
    const int64_t n = ceil_div(j.rows, j.per);
    const size_t sums = (size_t)(NORM_WARPS * ceil_div(j.cols, COLS) * COLS) * sizeof(float);
    if (sums > NORM_BWD_SHARED)
        FAIL(ERR_UNSUPPORTED, "cuda gated norm: rows of %lld columns, at most %d", (long long)j.cols,
             (int)(NORM_BWD_SHARED / sizeof(float) / NORM_WARPS));
    TRY(cuda_scratch(c, CUDA_SCRATCH_ROW, (size_t)(n * j.cols) * sizeof(float), &parts));
    j.dy = (const T *)b->dy.data, j.dx = (T *)b->dx.data, j.dz = (T *)b->dz.data + a->z_at, j.parts = (float *)parts;
    const bool vec = j.cols % COLS == 0 && j.z_width % COLS == 0 && aligned16(j.x) && aligned16(j.dy) && aligned16(j.dx) &&
                     aligned16(j.z) && aligned16(j.dz);
    void (*const kernel)(norm_job<T>) = j.cols > WARP_COLS ? gated_norm_bwd_kernel<T, false, false>
                                        : vec              ? gated_norm_bwd_kernel<T, true, true>
                                                           : gated_norm_bwd_kernel<T, false, true>;
    CU_TRY(cuda_launch_pdl(c, kernel, dim3((unsigned)n), NORM_BWD_THREADS, sums, j));
    return cuda_add_parts(c, (float *)b->dw.data, j.parts, n, j.cols, j.cols);
}
int cuda_gated_norm_bwd(struct dev *d, const struct gated_norm_args *a, const struct gated_norm_bwd_args *b) {
    return a->x.dt == DT_BF16 ? gated_norm_bwd_any<bf16>(cuda_of(d), a, b) : gated_norm_bwd_any<float>(cuda_of(d), a, b);
}

/* ---- output gate ---- */

template <typename T>
static __global__ void __launch_bounds__(THREADS) gate_fwd_kernel(T *y, const T *x, const T *gate, int64_t n) {
    pdl_launch_dependents();
    pdl_wait();
    const int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * CHUNK;
    float a[CHUNK], g[CHUNK];
    if (i >= n) return;
    const int left = n - i < CHUNK ? (int)(n - i) : CHUNK;
    load8<false>(a, x + i, left);
    load8<false>(g, gate + i, left);
#pragma unroll
    for (int k = 0; k < CHUNK; k++) a[k] = __fmul_rn(a[k], round_to<T>(sigmoid(g[k])));
    store8<false>(y + i, a, left);
}
template <typename T>
static __global__ void __launch_bounds__(THREADS)
    gate_bwd_kernel(T *dx, T *dgate, const T *dy, const T *x, const T *gate, int64_t n) {
    pdl_launch_dependents();
    pdl_wait();
    const int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * CHUNK;
    float d[CHUNK], a[CHUNK], g[CHUNK];
    if (i >= n) return;
    const int left = n - i < CHUNK ? (int)(n - i) : CHUNK;
    load8<false>(d, dy + i, left);
    load8<false>(a, x + i, left);
    load8<false>(g, gate + i, left);
#pragma unroll
    for (int k = 0; k < CHUNK; k++) {
        const float s = sigmoid(g[k]);
        d[k] = __fmul_rn(d[k], s);
        g[k] = __fmul_rn(__fmul_rn(d[k], a[k]), __fsub_rn(1.0f, s));
    }
    store8<false>(dx + i, d, left);
    store8<false>(dgate + i, g, left);
}
int cuda_output_gate_fwd(struct dev *d, struct tensor y, struct tensor x, struct tensor gate) {
    struct cuda *c = cuda_of(d);
    const int64_t n = tensor_count(x);
    const unsigned blocks = (unsigned)ceil_div(n, THREADS * CHUNK);
    if (x.dt == DT_BF16)
        CU_TRY(cuda_launch_pdl(c, gate_fwd_kernel<bf16>, blocks, THREADS, 0, (bf16 *)y.data, (const bf16 *)x.data,
                               (const bf16 *)gate.data, n));
    else
        CU_TRY(cuda_launch_pdl(c, gate_fwd_kernel<float>, blocks, THREADS, 0, (float *)y.data, (const float *)x.data,
                               (const float *)gate.data, n));
    return 0;
}
template <typename T> static int gate_bwd_any(struct cuda *c, const struct output_gate_bwd_args *a) {
    const int64_t n = tensor_count(a->dy);
    CU_TRY(cuda_launch_pdl(c, gate_bwd_kernel<T>, (unsigned)ceil_div(n, THREADS * CHUNK), THREADS, 0, (T *)a->dx.data,
                           (T *)a->dgate.data, (const T *)a->dy.data, (const T *)a->x.data, (const T *)a->gate.data, n));
    return 0;
}
int cuda_output_gate_bwd(struct dev *d, const struct output_gate_bwd_args *a) {
    return a->dy.dt == DT_BF16 ? gate_bwd_any<bf16>(cuda_of(d), a) : gate_bwd_any<float>(cuda_of(d), a);
}

/* ---- queries and gates ---- */

struct split_widths {
    int64_t heads, parts, head, width[DEV_SPLIT_PARTS]; /* head: all parts of one */
    int64_t at, cols, rest, gate;                       /* at: where heads begin; of a row; gate 0: the last part is in rest */
};
/* U: what a thread moves; sizes are in units of it. A block's y: a row. */
template <typename U, bool JOIN>
static __global__ void __launch_bounds__(THREADS) split_kernel(U *joint, U *rest, U *gate, const split_widths s) {
    pdl_launch_dependents();
    pdl_wait();
    const int64_t t = blockIdx.y, c = (int64_t)blockIdx.x * THREADS + threadIdx.x, end = s.heads * s.head;
    if (c >= s.cols - s.at) return;
    U *const from = joint + t * s.cols + s.at + c;
    U *to = rest + t * s.rest + s.rest - (s.cols - s.at - c);
    if (c < end) {
        int64_t in = c % s.head, before = 0, width = 0;
        int part = 0;
#pragma unroll
        for (int p = 0; p < DEV_SPLIT_PARTS; p++) {
            if (p >= s.parts || part < p) continue;
            width = s.width[p];
            if (in < width) continue;
            in -= width, before += s.heads * width, part++;
        }
        to = s.gate && part == s.parts - 1 ? gate + t * s.gate : rest + t * s.rest + s.at + before;
        to += c / s.head * width + in;
    }
    if (JOIN) *from = *to;
    else *to = *from;
}
template <typename U> static int split_units(struct cuda *c, const struct gate_split_args *a, bool join) {
    const int64_t unit = (int64_t)sizeof(U) / (int64_t)dtype_size(a->joint.dt), rows = a->joint.dim[0], most = 65535;
    split_widths s = {};
    s.heads = a->n_heads, s.parts = a->n_parts, s.at = a->at / unit;
    s.cols = a->joint.dim[1] / unit, s.rest = a->rest.dim[1] / unit, s.gate = a->gate.data ? a->gate.dim[1] / unit : 0;
    for (int64_t p = 0; p < a->n_parts; p++) s.width[p] = a->width[p] / unit, s.head += s.width[p];
    for (int64_t lo = 0; lo < rows; lo += most) {
        U *const joint = (U *)a->joint.data + lo * s.cols, *const rest = (U *)a->rest.data + lo * s.rest,
                 *const gate = (U *)a->gate.data + lo * s.gate;
        const dim3 grid((unsigned)ceil_div(s.cols - s.at, THREADS), (unsigned)(rows - lo < most ? rows - lo : most));
        if (join) CU_TRY(cuda_launch_pdl(c, split_kernel<U, true>, grid, THREADS, 0, joint, rest, gate, s));
        else CU_TRY(cuda_launch_pdl(c, split_kernel<U, false>, grid, THREADS, 0, joint, rest, gate, s));
    }
    return 0;
}
static int split_any(struct cuda *c, const struct gate_split_args *a, bool join) {
    const int64_t size = (int64_t)dtype_size(a->joint.dt);
    bool wide = a->joint.dim[1] * size % 16 == 0 && a->at * size % 16 == 0 && aligned16(a->joint.data) && aligned16(a->rest.data) &&
                aligned16(a->gate.data);
    for (int64_t p = 0; p < a->n_parts; p++) wide = wide && a->width[p] * size % 16 == 0;
    if (wide) return split_units<uint4>(c, a, join);
    return size == 2 ? split_units<uint16_t>(c, a, join) : split_units<uint32_t>(c, a, join);
}
int cuda_gate_split(struct dev *d, const struct gate_split_args *a) { return split_any(cuda_of(d), a, false); }
int cuda_gate_join(struct dev *d, const struct gate_split_args *a) { return split_any(cuda_of(d), a, true); }
