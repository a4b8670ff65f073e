/* score_route.cu - the CUDA backend's routers that choose by scores: sigmoids or a softmax, a bias that the choice alone sees,
 * groups.
 *
 * A warp has a token, whose scores lie in shared memory: s without the bias, c what is compared.
 * Invariant: a token's results are made in one order that depends on E, k and the groups alone. */
#include "device/cuda/vec.cuh"

#include <math.h>

typedef __nv_bfloat16 bf16;

enum { WARPS = 4 };

struct score_route {
    const void *logits;
    const float *bias;
    const int32_t *given; /* may be NULL */
    int32_t *expert;
    void *weight;
    const float *dweight;
    void *dlogits;
    int64_t tokens;
    int experts, choices, groups, top_groups;
    float scale;
    bool logits_half, weight_half, dlogits_half, normalize, sigmoid;
};

static __device__ __forceinline__ float value_at(const void *p, bool half, int64_t i) {
    return half ? __bfloat162float(((const bf16 *)p)[i]) : ((const float *)p)[i];
}
static __device__ __forceinline__ void put(void *p, bool half, int64_t i, float v) {
    if (half) ((bf16 *)p)[i] = __float2bfloat16_rn(v);
    else ((float *)p)[i] = v;
}

/* s (E): scores of row t; a lane writes the experts l, l + 32, ... */
static __device__ void scores_of(const struct score_route &a, int64_t t, int lane, float *s) {
    float max = -INFINITY, sum = 0;
    for (int e = lane; e < a.experts; e += 32) {
        s[e] = value_at(a.logits, a.logits_half, t * a.experts + e);
        max = fmaxf(max, isnan(s[e]) ? -INFINITY : s[e]);
    }
    max = warp_max(max);
    for (int e = lane; e < a.experts; e += 32) {
        s[e] = a.sigmoid ? __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-s[e]))) : expf(s[e] - max);
        sum = __fadd_rn(sum, s[e]);
    }
    sum = warp_sum(sum);
    for (int e = lane; e < a.experts && !a.sigmoid; e += 32) s[e] = __fdiv_rn(s[e], sum);
    __syncwarp();
}

/* Bit g: group g is among the best; lane g has it. */
static __device__ unsigned kept_groups(const struct score_route &a, int lane, const float *c) {
    float first = -INFINITY, second = -INFINITY;
    if (a.groups <= 1) return ~0u;
    const int n = a.experts / a.groups;
    for (int e = lane * n; lane < a.groups && e < (lane + 1) * n; e++) {
        if (c[e] > first) second = first, first = c[e];
        else if (c[e] > second) second = c[e];
    }
    const float score = a.sigmoid ? __fadd_rn(first, second) : first;
    int better = 0;
    for (int g = 0; g < a.groups; g++) {
        const float other = __shfl_sync(WARP_ALL, score, g);
        better += other > score || (other == score && g < lane);
    }
    return __ballot_sync(WARP_ALL, lane < a.groups && better < a.top_groups);
}

/* The best that is not taken, in all lanes; equal ones: the lower id. taken: bit i of expert i * 32 + lane. */
static __device__ int best_of(const struct score_route &a, int lane, const float *c, unsigned taken) {
    float best = -INFINITY;
    int at = INT32_MAX;
    for (int e = lane, i = 0; e < a.experts; e += 32, i++)
        if (!(taken >> i & 1) && (at == INT32_MAX || c[e] > best)) best = c[e], at = e;
#pragma unroll
    for (int o = 16; o > 0; o /= 2) {
        const float c2 = __shfl_xor_sync(WARP_ALL, best, o);
        const int at2 = __shfl_xor_sync(WARP_ALL, at, o);
        if (at2 != INT32_MAX && (at == INT32_MAX || c2 > best || (c2 == best && at2 < at))) best = c2, at = at2;
    }
    return at;
}

/* Over the first n lanes, in their order. */
static __device__ float lanes_in_order(float v, int n) {
    float sum = 0;
    for (int s = 0; s < n; s++) sum = __fadd_rn(sum, __shfl_sync(WARP_ALL, v, s));
    return sum;
}

static __global__ void __launch_bounds__(32 * WARPS) score_route_fwd_kernel(const struct score_route a) {
    extern __shared__ float shared[];
    const int64_t t = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    float *const s = shared + (int)(threadIdx.x / 32) * 2 * a.experts, *const c = s + a.experts;
    unsigned taken = 0;
    int id = 0;
    pdl_launch_dependents();
    pdl_wait();
    if (t >= a.tokens) return;
    scores_of(a, t, lane, s);
    for (int e = lane; e < a.experts; e += 32) {
        c[e] = a.bias ? __fadd_rn(s[e], a.bias[e]) : s[e];
        if (isnan(c[e])) c[e] = -INFINITY;
    }
    __syncwarp();
    const unsigned kept = kept_groups(a, lane, c);
    __syncwarp();
    for (int e = lane; e < a.experts && a.groups > 1; e += 32)
        if (!(kept >> (e / (a.experts / a.groups)) & 1)) c[e] = -INFINITY;
    if (a.given && a.given[t * a.choices] >= 0) {
        id = lane < a.choices ? a.given[t * a.choices + lane] : 0;
        if (id < 0 || id >= a.experts) __trap();
    } else {
        for (int i = 0; i < a.choices; i++) {
            const int at = best_of(a, lane, c, taken);
            if (at % 32 == lane) taken |= 1u << (at / 32);
            if (lane == i) id = at;
        }
    }
    const float mine = lane < a.choices ? s[id] : 0.0f, sum = __fadd_rn(lanes_in_order(mine, a.choices), 1e-20f);
    if (lane >= a.choices) return;
    a.expert[t * a.choices + lane] = id;
    put(a.weight, a.weight_half, t * a.choices + lane, __fmul_rn(a.normalize ? __fdiv_rn(mine, sum) : mine, a.scale));
}

static __global__ void __launch_bounds__(32 * WARPS) score_route_bwd_kernel(const struct score_route a) {
    extern __shared__ float shared[];
    const int64_t t = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    float *const s = shared + (int)(threadIdx.x / 32) * 2 * a.experts, *const ds = s + a.experts;
    pdl_launch_dependents();
    pdl_wait();
    if (t >= a.tokens) return;
    scores_of(a, t, lane, s);
    const bool chosen = lane < a.choices;
    const int id = chosen ? a.expert[t * a.choices + lane] : 0;
    const float dw = chosen ? a.dweight[t * a.choices + lane] : 0.0f, mine = chosen ? s[id] : 0.0f;
    const float sum = a.normalize ? __fadd_rn(lanes_in_order(mine, a.choices), 1e-20f) : 1.0f;
    const float dot = a.normalize ? lanes_in_order(__fmul_rn(__fdiv_rn(mine, sum), dw), a.choices) : 0.0f;
    const float given = __fdiv_rn(__fmul_rn(a.scale, __fsub_rn(dw, dot)), sum);
    const float mean = a.sigmoid ? 0.0f : lanes_in_order(__fmul_rn(mine, given), a.choices);
    for (int e = lane; e < a.experts; e += 32) ds[e] = 0;
    __syncwarp();
    if (chosen) ds[id] = given;
    __syncwarp();
    for (int e = lane; e < a.experts; e += 32)
        put(a.dlogits, a.dlogits_half, t * a.experts + e,
            a.sigmoid ? __fmul_rn(__fmul_rn(ds[e], s[e]), __fsub_rn(1.0f, s[e])) : __fmul_rn(s[e], __fsub_rn(ds[e], mean)));
}

static struct score_route route_of(const struct route_args *a) {
    struct score_route r = {};
    r.logits = a->logits.data;
    r.logits_half = a->logits.dt == DT_BF16;
    r.bias = (const float *)a->bias.data;
    r.given = (const int32_t *)a->given.data;
    r.expert = (int32_t *)a->expert.data;
    r.tokens = a->logits.dim[0];
    r.experts = (int)a->logits.dim[1];
    r.choices = (int)a->expert.dim[1];
    r.groups = (int)a->groups;
    r.top_groups = (int)a->top_groups;
    r.scale = a->scale != 0 ? a->scale : 1.0f;
    r.normalize = a->normalize;
    r.sigmoid = a->sigmoid;
    return r;
}
static size_t shared_bytes(const struct score_route *r) { return (size_t)(WARPS * 2 * r->experts) * sizeof(float); }

int cuda_score_route_fwd(struct dev *d, const struct route_args *a) {
    struct score_route r = route_of(a);
    r.weight = a->weight.data;
    r.weight_half = a->weight.dt == DT_BF16;
    CU_TRY(
        cuda_launch_pdl(cuda_of(d), score_route_fwd_kernel, (unsigned)ceil_div(r.tokens, WARPS), 32 * WARPS, shared_bytes(&r), r));
    return 0;
}

int cuda_score_route_bwd(struct dev *d, const struct route_args *a, struct tensor dlogits, struct tensor dweight) {
    struct score_route r = route_of(a);
    r.dlogits = dlogits.data;
    r.dlogits_half = dlogits.dt == DT_BF16;
    r.dweight = (const float *)dweight.data;
    CU_TRY(
        cuda_launch_pdl(cuda_of(d), score_route_bwd_kernel, (unsigned)ceil_div(r.tokens, WARPS), 32 * WARPS, shared_bytes(&r), r));
    return 0;
}
