/* delta_rule.cuh - what the kernels of the gated delta rule share: arguments, gates, normalised heads.
 *
 * Invariant: intrinsics alone, which the compiler does not fuse, and functions that are not inlined where they are the
 * library's; so a number has the same bits in each kernel. */
#ifndef VERLC_DEV_CUDA_DELTA_RULE_CUH
#define VERLC_DEV_CUDA_DELTA_RULE_CUH

#include "device/cuda/vec.cuh"

enum { DELTA_C = DEV_DELTA_CHUNK, DELTA_THREADS = 256, DELTA_WARPS = DELTA_THREADS / 32 };

template <typename T> struct delta_job {
    int64_t hk, hv, dk, dv, group, width, ba_width; /* width: of a row of qkv; ba_width: of ba, which points to its b */
    const int32_t *start, *pos0, *slot;             /* slot: NULL without a state */
    int64_t n_slots;
    const T *qkv, *ba, *a_log, *dt_bias;
    T *out;
    float *s, *r, *e, *g; /* the state, and its keys */
    T *k;
    float *states, *kept; /* for backward, or NULL; kept: e of all rows */
    const T *dout;        /* backward */
    T *dqkv, *dba;
    float *sums; /* (sequences, 2, Hv) */
};

struct delta_seq {
    int64_t row0, n, pos0, slot, entry; /* entry + c: of its chunk c in states */
};
template <typename T> static __device__ __forceinline__ delta_seq delta_seq_at(const delta_job<T> &j, int64_t i) {
    delta_seq s;
    s.row0 = j.start[i], s.n = j.start[i + 1] - s.row0, s.pos0 = j.pos0[i];
    s.slot = j.slot ? j.slot[i] : -1, s.entry = s.row0 / DELTA_C - 1;
    if (s.n < 0 || s.pos0 < 0 || s.slot >= j.n_slots || (s.slot < 0 && s.pos0 != 0)) __trap();
    return s;
}

/* e^x for x <= 0, to about 2^-22: 2^n times 2^r. */
static __device__ __forceinline__ float decay_exp(float x) {
    x = x < -104.0f ? -104.0f : x;   /* NaN stays */
    const float whole = 12582912.0f; /* 1.5 x 2^23: a sum with it has no fraction */
    const float n = __fsub_rn(__fadd_rn(__fmul_rn(x, 1.4426950408889634f), whole), whole);
    const float r = __fmaf_rn(n, 2.12194440e-4f, __fmaf_rn(n, -0.693359375f, x));
    return __fmul_rn(exp2_approx(__fmul_rn(r, 1.4426950408889634f)), exp2_approx(n));
}
static __device__ __noinline__ float delta_sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
/* g of a token: -exp(a_log) softplus(x). */
static __device__ __noinline__ float delta_g(float a_log, float x) { return -expf(a_log) * (x > 20 ? x : log1pf(expf(x))); }

template <typename T> static __device__ __forceinline__ float act_at(const T *p, int64_t i) {
    float v[CHUNK];
    load8<false>(v, p + i, 1);
    return v[0];
}
template <typename T> static __device__ __forceinline__ void act_put(T *p, int64_t i, float x) {
    float v[CHUNK] = {x};
    store8<false>(p + i, v, 1);
}
template <typename T> static __device__ __forceinline__ float delta_beta(const delta_job<T> &j, int64_t t, int64_t n) {
    return round_to<T>(delta_sigmoid(act_at(j.ba, t * j.ba_width + n)));
}
/* What softplus takes. */
template <typename T> static __device__ __forceinline__ float delta_input(const delta_job<T> &j, int64_t t, int64_t n) {
    return __fadd_rn(act_at(j.ba, t * j.ba_width + j.hv + n), act_at(j.dt_bias, n));
}

/* A warp's lanes hold a head: lane + 32 i is element i of a lane. */
struct lane_head {
    float v[DEV_DELTA_DIM / 32];
};
template <typename T> static __device__ __forceinline__ lane_head head_load(const T *x, int64_t dim) {
    const int lane = threadIdx.x & 31;
    lane_head h;
#pragma unroll
    for (int i = 0; i < DEV_DELTA_DIM / 32; i++) h.v[i] = lane + 32 * i < dim ? act_at(x, lane + 32 * i) : 0.0f;
    return h;
}
/* The head as it came, of which nothing is rounded. */
template <typename T> static __device__ __forceinline__ void head_put(T *y, const lane_head &x, int64_t dim) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < DEV_DELTA_DIM / 32; i++)
        if (lane + 32 * i < dim) act_put(y, lane + 32 * i, x.v[i]);
}
static __device__ __forceinline__ float scale_of(float squares) {
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(squares, DEV_DELTA_EPS)));
}
/* 1 / |x|. */
static __device__ __forceinline__ float head_scale(const lane_head &x) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < DEV_DELTA_DIM / 32; i++) sum = __fmaf_rn(x.v[i], x.v[i], sum);
    return scale_of(lanes_sum(sum, 32));
}
/* G of rows [n0, n1), of whose g (in place) one thread makes the sums; before: G of the row before n0. */
static __device__ __forceinline__ void running_sum(float *g, int n0, int n1, float before) {
    int i = n0;
    if (n0 == 0)
        for (; i + 16 <= n1; i += 16) { /* from registers: a step is an addition, no trip to shared memory */
            float v[16];
#pragma unroll
            for (int x = 0; x < 16; x++) v[x] = g[i + x];
#pragma unroll
            for (int x = 0; x < 16; x++) v[x] = before = i + x ? __fadd_rn(before, v[x]) : v[x];
#pragma unroll
            for (int x = 0; x < 16; x++) g[i + x] = v[x];
        }
    for (; i < n1; i++) {
        before = i ? __fadd_rn(before, g[i]) : g[i];
        g[i] = before;
    }
}
static __device__ __forceinline__ float delta_q_scale(int64_t dk) { return __fdiv_rn(1.0f, __fsqrt_rn((float)dk)); }

template <typename T> static inline delta_job<T> delta_job_of(const struct delta_args *a) {
    delta_job<T> j = {};
    j.hk = a->n_k_heads, j.hv = a->n_v_heads, j.dk = a->k_dim, j.dv = a->v_dim, j.group = j.hv / j.hk;
    j.width = a->qkv.dim[1];
    j.start = (const int32_t *)a->seqs.start.data, j.pos0 = (const int32_t *)a->seqs.pos0.data;
    j.slot = (const int32_t *)a->seqs.slot.data, j.n_slots = a->state.s.data ? a->state.s.dim[0] : 0;
    j.qkv = (const T *)a->qkv.data, j.ba = (const T *)a->ba.data + a->ba_at, j.ba_width = a->ba.dim[1];
    j.a_log = (const T *)a->a_log.data, j.dt_bias = (const T *)a->dt_bias.data;
    j.out = (T *)a->out.data;
    j.s = (float *)a->state.s.data, j.k = (T *)a->state.k.data, j.r = (float *)a->state.r.data;
    j.e = (float *)a->state.e.data, j.g = (float *)a->state.g.data;
    j.states = (float *)a->states.data, j.kept = (float *)a->e.data;
    return j;
}
/* Lets a kernel have so many bytes of shared memory. */
static inline int delta_shared(const struct cuda *c, const void *kernel, size_t bytes, const struct delta_args *a) {
    if (bytes > c->smem_max)
        FAIL(ERR_UNSUPPORTED, "cuda delta rule: heads of %lld and %lld take %zu KiB of shared memory, this GPU has %zu",
             (long long)a->k_dim, (long long)a->v_dim, bytes >> 10, c->smem_max >> 10);
    CU_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    return 0;
}

#endif
