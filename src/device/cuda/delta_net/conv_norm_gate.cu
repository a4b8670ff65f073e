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
    bool single;                               /* no sequence has more than one row */
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
/* u of a row, whose inputs are x. */
template <typename T>
static __device__ __forceinline__ void conv_sum(float u[CHUNK], const float x[TAPS][CHUNK], const float w[TAPS][CHUNK]) {
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
        float s = 0;
#pragma unroll
        for (int t = 0; t < TAPS; t++) s = __fmaf_rn(w[t][i], x[t][i], s);
        u[i] = round_to<T>(s);
    }
}

/* grid (column blocks, row blocks) */
template <typename T, bool VEC> static __global__ void __launch_bounds__(THREADS) conv_fwd_kernel(const conv_job<T> j) {
    pdl_launch_dependents();
    pdl_wait();
    const int64_t c = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * CHUNK, lo = (int64_t)blockIdx.y * j.per;
    if (c >= j.cols) return;
    const int64_t hi = lo + j.per < j.rows ? lo + j.per : j.rows;
    const int n = j.cols - c < CHUNK ? (int)(j.cols - c) : CHUNK;
    float w[TAPS][CHUNK], x[TAPS][CHUNK], u[CHUNK];
    conv_weights<VEC>(w, j, c, n);
    conv_seq<T> s = conv_find(j, lo);
    for (int64_t r = lo, loaded = -1; r < hi; r++) {
        conv_next(j, s, r);
        if (s.i == j.n) return;
        if (r < s.lo) continue;
        if (loaded != r - 1 || r == s.lo) { /* else the last three are there */
#pragma unroll
            for (int t = 1; t < TAPS; t++) conv_load<VEC>(x[t], j, s, r - TAPS + t, c, n);
        }
#pragma unroll
        for (int t = 0; t < TAPS - 1; t++)
#pragma unroll
            for (int i = 0; i < CHUNK; i++) x[t][i] = x[t + 1][i];
        conv_load<VEC>(x[TAPS - 1], j, s, r, c, n);
        loaded = r;
        if (j.single && j.state) store8<VEC>(conv_state_row(j, s, r) + c, x[TAPS - 1], n); /* its place was a row before these */
        conv_sum<T>(u, x, w);
#pragma unroll
        for (int i = 0; i < CHUNK; i++) u[i] = silu(u[i]);
        store8<VEC>(j.y + r * j.cols + c, u, n);
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
enum { COLS = 4, COMING = 3 };
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
/* Rows r - TAPS + 1 to r, of which du, the gradient of u, is 0 behind the sequence; and the rows after them. */
template <typename T> struct conv_window {
    float x[TAPS][COLS], du[TAPS][COLS];
    conv_row<T> coming[COMING];
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
    for (int a = 0; a < COMING; a++) conv_get_row<VEC>(o.coming[a], j, r + a, o.c, o.n);
}
/* On to row r, which is in the sequence or behind it. */
template <bool VEC, typename T>
static __device__ __forceinline__ void conv_go_on(conv_window<T> &o, const conv_job<T> &j, const conv_seq<T> &s,
                                                  const float w[TAPS][COLS], int64_t r) {
    const conv_row<T> row = o.coming[0];
#pragma unroll
    for (int t = 0; t < TAPS - 1; t++)
#pragma unroll
        for (int i = 0; i < COLS; i++) o.x[t][i] = o.x[t + 1][i], o.du[t][i] = o.du[t + 1][i];
#pragma unroll
    for (int a = 0; a < COMING - 1; a++) o.coming[a] = o.coming[a + 1];
    conv_get_row<VEC>(o.coming[COMING - 1], j, r + COMING, o.c, o.n);
#pragma unroll
    for (int i = 0; i < COLS; i++) {
        float u = 0;
        o.x[TAPS - 1][i] = one(row.x.v, i);
#pragma unroll
        for (int t = 0; t < TAPS; t++) u = __fmaf_rn(w[t][i], o.x[t][i], u); /* as conv_sum */
        o.du[TAPS - 1][i] = r < s.hi ? __fmul_rn(one(row.dy.v, i), silu_slope(round_to<T>(u))) : 0.0f;
    }
}

/* A row of x and of dy is read once, but for those at the ends of a block's run. */
template <typename T, bool VEC> static __global__ void __launch_bounds__(THREADS, 4) conv_bwd_kernel(const conv_job<T> j) {
    pdl_launch_dependents();
    pdl_wait();
    const int64_t c = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * COLS, lo = (int64_t)blockIdx.y * j.per;
    if (c >= j.cols) return;
    const int64_t hi = lo + j.per < j.rows ? lo + j.per : j.rows;
    const int n = j.cols - c < COLS ? (int)(j.cols - c) : COLS;
    float w[TAPS][COLS], dw[TAPS][COLS] = {};
    conv_window<T> o;
    o.c = c, o.n = n;
#pragma unroll
    for (int i = 0; i < COLS; i++)
#pragma unroll
        for (int t = 0; t < TAPS; t++) w[t][i] = i < n ? one(j.w, (c + i) * TAPS + t) : 0.0f;
    conv_seq<T> s = conv_find(j, lo);
    for (int64_t r = lo, ready = -1; r < hi; r++) {
        conv_next(j, s, r);
        if (s.i == j.n) break;
        if (r < s.lo) continue;
        const bool begins = ready != r || r == s.lo;
        if (begins) conv_begin<VEC>(o, j, s, r);
#pragma unroll 1
        for (int64_t to = begins ? r : r + TAPS - 1; to < r + TAPS; to++) {
            conv_go_on<VEC>(o, j, s, w, to);
            if (to >= hi || to >= s.hi) continue;
#pragma unroll
            for (int t = 0; t < TAPS; t++)
#pragma unroll
                for (int i = 0; i < COLS; i++) dw[t][i] = __fmaf_rn(o.du[TAPS - 1][i], o.x[t][i], dw[t][i]);
        }
        float dx[COLS];
#pragma unroll
        for (int i = 0; i < COLS; i++) {
            dx[i] = 0;
#pragma unroll
            for (int t = 0; t < TAPS; t++) dx[i] = __fmaf_rn(w[t][i], o.du[TAPS - 1 - t][i], dx[i]);
        }
        conv_put<VEC>(j.dx + r * j.x_width + c, dx, n);
        ready = r + 1;
    }
    float *const part = j.parts + (int64_t)blockIdx.y * j.cols * TAPS;
#pragma unroll
    for (int i = 0; i < COLS; i++)
        if (i < n) *(float4 *)(part + (c + i) * TAPS) = make_float4(dw[0][i], dw[1][i], dw[2][i], dw[3][i]);
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
    j.single = a->seqs.max_rows == 1;
    if (j.single) j.per = 1; /* each row would look up its own sequence, one after the other */
    const dim3 grid(column_blocks(j.cols), (unsigned)ceil_div(j.rows, j.per)), states(grid.x, (unsigned)j.n);
    const bool vec = wide(j, j.x, j.w, j.y, j.state);
    if (vec) CU_TRY(cuda_launch_pdl(c, conv_fwd_kernel<T, true>, grid, THREADS, 0, j));
    else CU_TRY(cuda_launch_pdl(c, conv_fwd_kernel<T, false>, grid, THREADS, 0, j));
    if (!j.state || j.n == 0 || j.single) return 0;
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
/* n = x rstd, g = dy silu(z): dx = rstd (g w - n mean(g w n)), dz = dy n w silu'(z), dw = sum of g n. */
template <typename T> static __global__ void __launch_bounds__(THREADS) gated_norm_bwd_kernel(const norm_job<T> j) {
    pdl_launch_dependents();
    pdl_wait();
    norm_place p;
    if (!norm_place_of(j, p)) return;
    const int64_t row = p.t * j.cols;
    float sum = 0;
    const float rs = j.rstd[p.t];
    for (int64_t c = threadIdx.x & 31; c < j.cols; c += 32) {
        const float g = __fmul_rn(__fmul_rn(one(j.dy, row + c), silu(one(j.z, p.z + c))), one(j.w, c));
        sum = __fmaf_rn(g, __fmul_rn(one(j.x, row + c), rs), sum);
    }
    const float mean = __fdiv_rn(lanes_sum(sum, 32), (float)j.cols);
    for (int64_t c = threadIdx.x & 31; c < j.cols; c += 32) {
        const float dy = one(j.dy, row + c), z = one(j.z, p.z + c), w = one(j.w, c), n = __fmul_rn(one(j.x, row + c), rs);
        put(j.dx, row + c, __fmul_rn(rs, __fmaf_rn(-n, mean, __fmul_rn(__fmul_rn(dy, silu(z)), w))));
        put(j.dz, p.z + c, __fmul_rn(__fmul_rn(dy, __fmul_rn(n, w)), silu_slope(z)));
    }
}
/* grid (column blocks, row blocks): the block's sum of g n. */
template <typename T> static __global__ void __launch_bounds__(THREADS) gated_norm_dw_kernel(const norm_job<T> j) {
    pdl_launch_dependents();
    pdl_wait();
    const int64_t c = (int64_t)blockIdx.x * THREADS + threadIdx.x, lo = (int64_t)blockIdx.y * j.per;
    const int64_t hi = lo + j.per < j.rows ? lo + j.per : j.rows;
    int64_t head = lo % j.heads, z = lo / j.heads * j.z_width + head * j.cols + c;
    const int64_t next = j.z_width - (j.heads - 1) * j.cols; /* from a token's last head to the first one after it */
    float sum = 0;
    if (c >= j.cols) return;
#pragma unroll 4
    for (int64_t t = lo; t < hi; t++) {
        const float g = __fmul_rn(one(j.dy, t * j.cols + c), silu(one(j.z, z)));
        const bool last = ++head == j.heads;
        z += last ? next : j.cols;
        if (last) head = 0;
        sum = __fmaf_rn(g, __fmul_rn(one(j.x, t * j.cols + c), j.rstd[t]), sum);
    }
    j.parts[(int64_t)blockIdx.y * j.cols + c] = sum;
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
    j.per = ceil_div(j.rows, (int64_t)c->n_sm * 4);
    const int64_t n = ceil_div(j.rows, j.per);
    TRY(cuda_scratch(c, CUDA_SCRATCH_ROW, (size_t)(n * j.cols) * sizeof(float), &parts));
    j.dy = (const T *)b->dy.data, j.dx = (T *)b->dx.data, j.dz = (T *)b->dz.data + a->z_at, j.parts = (float *)parts;
    CU_TRY(cuda_launch_pdl(c, gated_norm_bwd_kernel<T>, norm_grid(j), THREADS, 0, j));
    CU_TRY(cuda_launch_pdl(c, gated_norm_dw_kernel<T>, dim3((unsigned)ceil_div(j.cols, THREADS), (unsigned)n), THREADS, 0, j));
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
