/* moe_gates.cu - the CUDA backend's ops that some families' experts have besides router, GEMMs and combination.
 *
 * Invariant: a token's results are made in one order that depends on h alone. */
#include "device/cuda/vec.cuh"

typedef __nv_bfloat16 bf16;

enum { WARPS = 4 };

static __device__ __forceinline__ float value_at(const void *p, bool half, int64_t i) {
    return half ? __bfloat162float(((const bf16 *)p)[i]) : ((const float *)p)[i];
}
static __device__ __forceinline__ void put(void *p, bool half, int64_t i, float v) {
    if (half) ((bf16 *)p)[i] = __float2bfloat16_rn(v);
    else ((float *)p)[i] = v;
}
static __device__ __forceinline__ float sigmoid_of(float x) { return __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-x))); }

/* ---- the gate of a shared expert: a warp has a row ---- */

struct row_gate {
    float *out;
    const float *from;
    const void *y, *gate, *dout;
    void *dy, *dgate;
    int64_t rows, h;
    bool half;
};

static __global__ void __launch_bounds__(32 * WARPS) row_gate_fwd_kernel(const struct row_gate a) {
    const int64_t t = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    pdl_launch_dependents();
    pdl_wait();
    if (t >= a.rows) return;
    const float s = sigmoid_of(value_at(a.gate, a.half, t));
    for (int64_t i = t * a.h + threadIdx.x % 32; i < (t + 1) * a.h; i += 32)
        a.out[i] = __fadd_rn(a.from[i], __fmul_rn(s, value_at(a.y, a.half, i)));
}

/* dy may be y: a thread reads an element before it writes it. */
static __global__ void __launch_bounds__(32 * WARPS) row_gate_bwd_kernel(const struct row_gate a) {
    const int64_t t = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    float dot = 0;
    pdl_launch_dependents();
    pdl_wait();
    if (t >= a.rows) return;
    const float s = sigmoid_of(value_at(a.gate, a.half, t));
    for (int64_t i = t * a.h + threadIdx.x % 32; i < (t + 1) * a.h; i += 32) {
        const float g = value_at(a.dout, a.half, i);
        dot = __fadd_rn(dot, __fmul_rn(g, value_at(a.y, a.half, i)));
        put(a.dy, a.half, i, __fmul_rn(s, g));
    }
    dot = warp_sum(dot);
    if (threadIdx.x % 32 == 0) put(a.dgate, a.half, t, __fmul_rn(__fmul_rn(s, __fsub_rn(1.0f, s)), dot));
}

static struct row_gate row_gate_of(const struct row_gate_args *a) {
    struct row_gate p = {};
    p.y = a->y.data;
    p.half = a->y.dt == DT_BF16;
    p.gate = a->gate.data;
    p.rows = a->y.dim[0];
    p.h = a->y.dim[1];
    return p;
}

int cuda_row_gate_fwd(struct dev *d, const struct row_gate_args *a) {
    struct row_gate p = row_gate_of(a);
    p.out = (float *)a->out.data;
    p.from = (const float *)a->from.data;
    CU_TRY(cuda_launch_pdl(cuda_of(d), row_gate_fwd_kernel, (unsigned)ceil_div(p.rows, WARPS), 32 * WARPS, 0, p));
    return 0;
}

int cuda_row_gate_bwd(struct dev *d, const struct row_gate_args *a, struct tensor dout, struct tensor dy, struct tensor dgate) {
    struct row_gate p = row_gate_of(a);
    p.dout = dout.data;
    p.dy = dy.data;
    p.dgate = dgate.data;
    CU_TRY(cuda_launch_pdl(cuda_of(d), row_gate_bwd_kernel, (unsigned)ceil_div(p.rows, WARPS), 32 * WARPS, 0, p));
    return 0;
}

/* ---- biases of experts ---- */

struct expert_bias {
    void *y;
    const void *bias, *dy;
    float *db;
    const int32_t *offset;
    int64_t rows, n;
    int experts;
    bool half, add;
};

/* The expert of row r: the last whose rows begin at or before it. */
static __device__ int expert_of(const struct expert_bias &a, int64_t r) {
    int lo = 0, hi = a.experts;
    while (hi - lo > 1) {
        const int mid = (lo + hi) / 2;
        if (a.offset[mid] <= r) lo = mid;
        else hi = mid;
    }
    return lo;
}

/* A warp has a row. */
static __global__ void __launch_bounds__(32 * WARPS) expert_bias_fwd_kernel(const struct expert_bias a) {
    const int64_t r = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    pdl_launch_dependents();
    pdl_wait();
    if (r >= a.rows) return;
    const int64_t at = expert_of(a, r) * a.n;
    for (int64_t c = threadIdx.x % 32; c < a.n; c += 32)
        put(a.y, a.half, r * a.n + c, __fadd_rn(value_at(a.y, a.half, r * a.n + c), value_at(a.bias, a.half, at + c)));
}

/* Block (columns, expert): warp w has the rows w, w + WARPS, ... of 32 columns; the warps' sums are added in their order. */
static __global__ void __launch_bounds__(32 * WARPS) expert_bias_bwd_kernel(const struct expert_bias a) {
    __shared__ float sums[WARPS][32];
    const int64_t c = (int64_t)blockIdx.x * 32 + threadIdx.x % 32, e = blockIdx.y;
    const int warp = threadIdx.x / 32;
    float sum = 0;
    pdl_launch_dependents();
    pdl_wait();
    const int64_t lo = a.offset[e], hi = a.offset[e + 1];
    if (lo < 0 || lo > hi || hi > a.rows) __trap();
    for (int64_t r = lo + warp; r < hi && c < a.n; r += WARPS) sum = __fadd_rn(sum, value_at(a.dy, a.half, r * a.n + c));
    sums[warp][threadIdx.x % 32] = sum;
    __syncthreads();
    if (warp || c >= a.n) return;
    for (int w = 1; w < WARPS; w++) sum = __fadd_rn(sum, sums[w][threadIdx.x]);
    a.db[e * a.n + c] = a.add ? __fadd_rn(a.db[e * a.n + c], sum) : sum;
}

static struct expert_bias expert_bias_of(struct tensor rows, struct tensor offset) {
    struct expert_bias p = {};
    p.offset = (const int32_t *)offset.data;
    p.experts = (int)offset.dim[0] - 1;
    p.rows = rows.dim[0];
    p.n = rows.dim[1];
    p.half = rows.dt == DT_BF16;
    return p;
}

int cuda_expert_bias_fwd(struct dev *d, struct tensor y, struct tensor bias, struct tensor offset) {
    struct expert_bias p = expert_bias_of(y, offset);
    p.y = y.data;
    p.bias = bias.data;
    CU_TRY(cuda_launch_pdl(cuda_of(d), expert_bias_fwd_kernel, (unsigned)ceil_div(p.rows, WARPS), 32 * WARPS, 0, p));
    return 0;
}

int cuda_expert_bias_bwd(struct dev *d, struct tensor db, struct tensor dy, struct tensor offset, bool add) {
    struct expert_bias p = expert_bias_of(dy, offset);
    const dim3 grid((unsigned)ceil_div(p.n, 32), (unsigned)p.experts);
    p.db = (float *)db.data;
    p.dy = dy.data;
    p.add = add;
    CU_TRY(cuda_launch_pdl(cuda_of(d), expert_bias_bwd_kernel, grid, 32 * WARPS, 0, p));
    return 0;
}

/* ---- SwiGLU with limits: a thread has an element ---- */

enum { THREADS = 256 };

struct clamped {
    void *y;
    const void *gate_up, *dy;
    void *dgate_up;
    int64_t n, f;
    float alpha, limit;
    bool half;
};

static __global__ void __launch_bounds__(THREADS) clamped_swiglu_fwd_kernel(const struct clamped a) {
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x, at = i / a.f * 2 * a.f + i % a.f;
    pdl_launch_dependents();
    pdl_wait();
    if (i >= a.n) return;
    const float g = fminf(value_at(a.gate_up, a.half, at), a.limit);
    const float u = fmaxf(fminf(value_at(a.gate_up, a.half, at + a.f), a.limit), -a.limit);
    put(a.y, a.half, i, __fmul_rn(__fadd_rn(u, 1.0f), __fmul_rn(g, sigmoid_of(__fmul_rn(a.alpha, g)))));
}

static __global__ void __launch_bounds__(THREADS) clamped_swiglu_bwd_kernel(const struct clamped a) {
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x, at = i / a.f * 2 * a.f + i % a.f;
    pdl_launch_dependents();
    pdl_wait();
    if (i >= a.n) return;
    const float gate = value_at(a.gate_up, a.half, at), up = value_at(a.gate_up, a.half, at + a.f), dy = value_at(a.dy, a.half, i);
    const float g = fminf(gate, a.limit), u = fmaxf(fminf(up, a.limit), -a.limit), s = sigmoid_of(__fmul_rn(a.alpha, g));
    const float slope = __fmul_rn(s, __fadd_rn(1.0f, __fmul_rn(__fmul_rn(a.alpha, g), __fsub_rn(1.0f, s))));
    put(a.dgate_up, a.half, at, gate <= a.limit ? __fmul_rn(__fmul_rn(dy, __fadd_rn(u, 1.0f)), slope) : 0.0f);
    put(a.dgate_up, a.half, at + a.f, fabsf(up) <= a.limit ? __fmul_rn(dy, __fmul_rn(g, s)) : 0.0f);
}

static struct clamped clamped_of(const struct clamped_swiglu_args *a) {
    struct clamped p = {};
    p.gate_up = a->gate_up.data;
    p.half = a->gate_up.dt == DT_BF16;
    p.f = a->gate_up.dim[1] / 2;
    p.n = a->gate_up.dim[0] * p.f;
    p.alpha = a->alpha;
    p.limit = a->limit;
    return p;
}

int cuda_clamped_swiglu_fwd(struct dev *d, const struct clamped_swiglu_args *a) {
    struct clamped p = clamped_of(a);
    p.y = a->y.data;
    CU_TRY(cuda_launch_pdl(cuda_of(d), clamped_swiglu_fwd_kernel, (unsigned)ceil_div(p.n, THREADS), THREADS, 0, p));
    return 0;
}

int cuda_clamped_swiglu_bwd(struct dev *d, const struct clamped_swiglu_args *a, struct tensor dgate_up, struct tensor dy) {
    struct clamped p = clamped_of(a);
    p.dgate_up = dgate_up.data;
    p.dy = dy.data;
    CU_TRY(cuda_launch_pdl(cuda_of(d), clamped_swiglu_bwd_kernel, (unsigned)ceil_div(p.n, THREADS), THREADS, 0, p));
    return 0;
}

/* ---- sinks of attention ---- */

struct sink {
    void *out;
    const void *dout, *sink;
    float *lse, *dsink;
    int64_t rows, dim; /* rows: of lse, tokens times heads */
    int heads;
    bool half;
};

/* A warp has a head of a token. */
static __global__ void __launch_bounds__(32 * WARPS) attn_sink_fwd_kernel(const struct sink a) {
    const int64_t i = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    pdl_launch_dependents();
    pdl_wait();
    if (i >= a.rows) return;
    const float lse = a.lse[i], sink = value_at(a.sink, a.half, i % a.heads), keep = sigmoid_of(__fsub_rn(lse, sink));
    for (int64_t c = i * a.dim + threadIdx.x % 32; c < (i + 1) * a.dim; c += 32)
        put(a.out, a.half, c, __fmul_rn(keep, value_at(a.out, a.half, c)));
    __syncwarp(); /* all have read lse */
    if (threadIdx.x % 32 == 0) a.lse[i] = __fadd_rn(fmaxf(lse, sink), log1pf(expf(-fabsf(__fsub_rn(lse, sink)))));
}

/* A block has a head: warp w the tokens w, w + WARPS, ...; the warps' sums are added in their order. */
static __global__ void __launch_bounds__(32 * WARPS) attn_sink_bwd_kernel(const struct sink a) {
    __shared__ float sums[WARPS];
    const int h = (int)blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float sum = 0;
    pdl_launch_dependents();
    pdl_wait();
    const float sink = value_at(a.sink, a.half, h);
    for (int64_t i = (int64_t)warp * a.heads + h; i < a.rows; i += (int64_t)WARPS * a.heads) {
        float dot = 0;
        for (int64_t c = i * a.dim + lane; c < (i + 1) * a.dim; c += 32)
            dot = __fadd_rn(dot, __fmul_rn(value_at(a.dout, a.half, c), value_at(a.out, a.half, c)));
        sum = __fadd_rn(sum, __fmul_rn(expf(__fsub_rn(sink, a.lse[i])), warp_sum(dot)));
    }
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    if (threadIdx.x) return;
    for (int w = 1; w < WARPS; w++) sum = __fadd_rn(sum, sums[w]);
    a.dsink[h] = __fsub_rn(a.dsink[h], sum);
}

static struct sink sink_of(const struct attn_sink_args *a) {
    struct sink p = {};
    p.out = a->out.data;
    p.half = a->out.dt == DT_BF16;
    p.sink = a->sink.data;
    p.lse = (float *)a->lse.data;
    p.heads = (int)a->lse.dim[1];
    p.rows = a->lse.dim[0] * p.heads;
    p.dim = a->out.dim[1] / p.heads;
    return p;
}

int cuda_attn_sink_fwd(struct dev *d, const struct attn_sink_args *a) {
    const struct sink p = sink_of(a);
    CU_TRY(cuda_launch_pdl(cuda_of(d), attn_sink_fwd_kernel, (unsigned)ceil_div(p.rows, WARPS), 32 * WARPS, 0, p));
    return 0;
}

int cuda_attn_sink_bwd(struct dev *d, const struct attn_sink_args *a, struct tensor dout, struct tensor dsink) {
    struct sink p = sink_of(a);
    p.dout = dout.data;
    p.dsink = (float *)dsink.data;
    CU_TRY(cuda_launch_pdl(cuda_of(d), attn_sink_bwd_kernel, (unsigned)p.heads, 32 * WARPS, 0, p));
    return 0;
}
