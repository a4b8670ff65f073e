/* moe.cu - the CUDA backend's mixture of experts but for its GEMMs (grouped_gemm.cu): router, sort by expert, combination.
 *
 * A warp has a token of the router, and a choice of a token in the backward of the combination; a block has an expert of the
 * sort, whose rows it finds by reading all ids, so nothing is counted with atomics and nothing waits for the host.
 * Invariant: a token's results are made in one order that depends on E, k and h alone. */
#include "device/cuda/vec.cuh"

#include <math.h>

typedef __nv_bfloat16 bf16;

enum { WARPS = 4, SORT_THREADS = 512 };

static __device__ __forceinline__ float value_at(const void *p, bool half, int64_t i) {
    return half ? __bfloat162float(((const bf16 *)p)[i]) : ((const float *)p)[i];
}
static __device__ __forceinline__ void put(void *p, bool half, int64_t i, float v) {
    if (half) ((bf16 *)p)[i] = __float2bfloat16_rn(v);
    else ((float *)p)[i] = v;
}

/* ---- router: lane l has the experts l, l + 32, ... ---- */

struct route {
    const void *logits;
    int32_t *expert;
    void *weight;
    const float *dweight;
    void *dlogits;
    const int32_t *given; /* may be NULL */
    const float *load;    /* of balance_bwd */
    float *loss, *z_loss; /* of balance_bwd; z_loss may be NULL */
    float z;
    int64_t tokens;
    int experts, choices;
    bool logits_half, weight_half, dlogits_half, normalize, sigmoid;
};

/* p: softmax of token t's logits; z: they, NaN as -infinity. PER: experts of a lane; those from E on are -infinity and 0. */
template <int PER>
static __device__ void row_softmax(const struct route &a, int64_t t, int lane, float (&p)[PER], float (&z)[PER]) {
    float max = -INFINITY, sum = 0;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int e = i * 32 + lane;
        p[i] = e < a.experts ? value_at(a.logits, a.logits_half, t * a.experts + e) : -INFINITY;
        z[i] = isnan(p[i]) ? -INFINITY : p[i];
        max = fmaxf(max, z[i]);
    }
    max = warp_max(max);
#pragma unroll
    for (int i = 0; i < PER; i++) {
        p[i] = i * 32 + lane < a.experts ? expf(p[i] - max) : 0.0f;
        sum = __fadd_rn(sum, p[i]);
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < PER; i++) p[i] = __fdiv_rn(p[i], sum);
}

/* Lane s gets the s-th choice and its probability. */
template <int PER>
static __device__ void top_k(const struct route &a, int lane, const float (&p)[PER], float (&z)[PER], int *id, float *prob) {
    unsigned taken = 0; /* bit i: expert i * 32 + lane */
    for (int s = 0; s < a.choices; s++) {
        float best = -INFINITY, best_p = 0;
        int at = INT32_MAX;
#pragma unroll
        for (int i = 0; i < PER; i++) {
            const int e = i * 32 + lane;
            if (e < a.experts && !(taken >> i & 1) && (at == INT32_MAX || z[i] > best)) best = z[i], at = e, best_p = p[i];
        }
#pragma unroll
        for (int o = 16; o > 0; o /= 2) {
            const float z2 = __shfl_xor_sync(WARP_ALL, best, o), p2 = __shfl_xor_sync(WARP_ALL, best_p, o);
            const int at2 = __shfl_xor_sync(WARP_ALL, at, o);
            if (at2 != INT32_MAX && (at == INT32_MAX || z2 > best || (z2 == best && at2 < at))) best = z2, at = at2, best_p = p2;
        }
        if (at % 32 == lane) taken |= 1u << (at / 32);
        if (lane == s) *id = at, *prob = best_p;
    }
}

/* Over the first n lanes, in their order. */
static __device__ float lanes_in_order(float v, int n) {
    float sum = 0;
    for (int s = 0; s < n; s++) sum = __fadd_rn(sum, __shfl_sync(WARP_ALL, v, s));
    return sum;
}

/* Lane s gets p of expert id of its own, s < choices. */
template <int PER> static __device__ float prob_of(const struct route &a, int lane, const float (&p)[PER], int id) {
    float prob = 0;
    for (int s = 0; s < a.choices; s++) {
        const int e = __shfl_sync(WARP_ALL, id, s);
        float mine = 0;
#pragma unroll
        for (int i = 0; i < PER; i++)
            if (e / 32 == i) mine = p[i];
        const float v = __shfl_sync(WARP_ALL, mine, e % 32);
        if (lane == s) prob = v;
    }
    return prob;
}

template <int PER> static __global__ void __launch_bounds__(32 * WARPS) route_fwd_kernel(const struct route a) {
    const int64_t t = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    float p[PER], z[PER], prob = 0;
    int id = 0;
    pdl_launch_dependents();
    pdl_wait();
    if (t >= a.tokens) return;
    row_softmax<PER>(a, t, lane, p, z);
    if (a.given && a.given[t * a.choices] >= 0) {
        id = lane < a.choices ? a.given[t * a.choices + lane] : 0;
        if (id < 0 || id >= a.experts) __trap();
        prob = prob_of<PER>(a, lane, p, id);
    } else {
        top_k<PER>(a, lane, p, z, &id, &prob);
    }
    const float sum = lanes_in_order(prob, a.choices);
    if (lane >= a.choices) return;
    a.expert[t * a.choices + lane] = id;
    put(a.weight, a.weight_half, t * a.choices + lane, a.normalize ? __fdiv_rn(prob, sum) : prob);
}

template <int PER> static __global__ void __launch_bounds__(32 * WARPS) route_bwd_kernel(const struct route a) {
    const int64_t t = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    float p[PER], dz[PER], prob = 0;
    pdl_launch_dependents();
    pdl_wait();
    if (t >= a.tokens) return;
    row_softmax<PER>(a, t, lane, p, dz);
    const bool chosen = lane < a.choices;
    const int id = chosen ? a.expert[t * a.choices + lane] : -1;
    const float dw = chosen ? a.dweight[t * a.choices + lane] : 0.0f;
    prob = prob_of<PER>(a, lane, p, id);
    const float sum = a.normalize ? lanes_in_order(prob, a.choices) : 1.0f, w = __fdiv_rn(prob, sum);
    const float dot = lanes_in_order(__fmul_rn(w, dw), a.choices), given = __fmul_rn(w, __fsub_rn(dw, dot));
#pragma unroll
    for (int i = 0; i < PER; i++) dz[i] = a.normalize ? 0.0f : __fmul_rn(-p[i], dot);
    for (int s = 0; s < a.choices; s++) {
        const int e = __shfl_sync(WARP_ALL, id, s);
        const float v = __shfl_sync(WARP_ALL, given, s);
#pragma unroll
        for (int i = 0; i < PER; i++)
            if (e == i * 32 + lane) dz[i] = v;
    }
#pragma unroll
    for (int i = 0; i < PER; i++)
        if (i * 32 + lane < a.experts) put(a.dlogits, a.dlogits_half, t * a.experts + i * 32 + lane, dz[i]);
}

template <int PER> static __global__ void __launch_bounds__(32 * WARPS) balance_bwd_kernel(const struct route a) {
    const int64_t t = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    float p[PER], z[PER], dot = 0;
    pdl_launch_dependents();
    pdl_wait();
    if (t >= a.tokens) return;
    row_softmax<PER>(a, t, lane, p, z);
#pragma unroll
    for (int i = 0; i < PER; i++)
        if (i * 32 + lane < a.experts) dot = __fadd_rn(dot, __fmul_rn(a.load[i * 32 + lane], p[i]));
    dot = warp_sum(dot);
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int e = i * 32 + lane;
        const int64_t at = t * a.experts + e;
        if (e >= a.experts) continue;
        const float d = __fmul_rn(p[i], __fsub_rn(a.load[e], dot));
        put(a.dlogits, a.dlogits_half, at, __fadd_rn(value_at(a.dlogits, a.dlogits_half, at), d));
    }
    if (lane == 0) a.loss[t] = dot;
}

/* As balance_bwd_kernel, with a z-loss or of sigmoids. */
template <int PER> static __global__ void __launch_bounds__(32 * WARPS) router_losses_kernel(const struct route a) {
    const int64_t t = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    float p[PER], z[PER], share[PER], slope[PER], dot = 0, sum = 0, max = -INFINITY, by = 0;
    pdl_launch_dependents();
    pdl_wait();
    if (t >= a.tokens) return;
    row_softmax<PER>(a, t, lane, p, z);
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const float s = __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-z[i])));
        share[i] = a.sigmoid ? s : p[i];
        slope[i] = a.sigmoid ? __fsub_rn(1.0f, s) : 1.0f;
        if (i * 32 + lane < a.experts) sum = __fadd_rn(sum, share[i]);
    }
    sum = __fadd_rn(warp_sum(sum), 1e-20f);
#pragma unroll
    for (int i = 0; i < PER; i++) {
        if (a.sigmoid) share[i] = __fdiv_rn(share[i], sum);
        if (i * 32 + lane < a.experts) dot = __fadd_rn(dot, __fmul_rn(a.load[i * 32 + lane], share[i]));
    }
    dot = warp_sum(dot);
    if (a.z_loss) {
        sum = 0;
#pragma unroll
        for (int i = 0; i < PER; i++) max = fmaxf(max, z[i]);
        max = warp_max(max);
#pragma unroll
        for (int i = 0; i < PER; i++) sum = __fadd_rn(sum, i * 32 + lane < a.experts ? expf(__fsub_rn(z[i], max)) : 0.0f);
        const float lse = __fadd_rn(max, logf(warp_sum(sum)));
        by = __fmul_rn(__fmul_rn(2.0f, a.z), lse);
        if (lane == 0) a.z_loss[t] = __fmul_rn(__fmul_rn(a.z, lse), lse);
    }
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int e = i * 32 + lane;
        const int64_t at = t * a.experts + e;
        if (e >= a.experts) continue;
        const float d = __fmul_rn(__fmul_rn(share[i], __fsub_rn(a.load[e], dot)), slope[i]);
        put(a.dlogits, a.dlogits_half, at, __fadd_rn(value_at(a.dlogits, a.dlogits_half, at), __fadd_rn(d, __fmul_rn(by, p[i]))));
    }
    if (lane == 0) a.loss[t] = dot;
}

typedef void (*route_kernel)(struct route);
/* By experts of a lane: 1, 2, 4, ... 32. */
static const route_kernel route_fwd_kernels[] = {route_fwd_kernel<1>, route_fwd_kernel<2>,  route_fwd_kernel<4>,
                                                 route_fwd_kernel<8>, route_fwd_kernel<16>, route_fwd_kernel<32>};
static const route_kernel route_bwd_kernels[] = {route_bwd_kernel<1>, route_bwd_kernel<2>,  route_bwd_kernel<4>,
                                                 route_bwd_kernel<8>, route_bwd_kernel<16>, route_bwd_kernel<32>};

static const route_kernel balance_bwd_kernels[] = {balance_bwd_kernel<1>, balance_bwd_kernel<2>,  balance_bwd_kernel<4>,
                                                   balance_bwd_kernel<8>, balance_bwd_kernel<16>, balance_bwd_kernel<32>};
static const route_kernel router_losses_kernels[] = {router_losses_kernel<1>, router_losses_kernel<2>,  router_losses_kernel<4>,
                                                     router_losses_kernel<8>, router_losses_kernel<16>, router_losses_kernel<32>};

static struct route route_of(const struct route_args *a) {
    struct route r = {};
    r.logits = a->logits.data;
    r.logits_half = a->logits.dt == DT_BF16;
    r.expert = (int32_t *)a->expert.data;
    r.tokens = a->logits.dim[0];
    r.experts = (int)a->logits.dim[1];
    r.choices = (int)a->expert.dim[1];
    r.normalize = a->normalize;
    return r;
}
static int route_launch(struct cuda *c, const route_kernel *kernels, const struct route &r) {
    int i = 0;
    while (32 << i < r.experts) i++;
    CU_TRY(cuda_launch_pdl(c, kernels[i], (unsigned)ceil_div(r.tokens, WARPS), 32 * WARPS, 0, r));
    return 0;
}

int cuda_route_fwd(struct dev *d, const struct route_args *a) {
    if (route_by_scores(a)) return cuda_score_route_fwd(d, a);
    struct route r = route_of(a);
    r.weight = a->weight.data;
    r.weight_half = a->weight.dt == DT_BF16;
    r.given = (const int32_t *)a->given.data;
    return route_launch(cuda_of(d), route_fwd_kernels, r);
}

int cuda_route_bwd(struct dev *d, const struct route_args *a, struct tensor dlogits, struct tensor dweight) {
    if (route_by_scores(a)) return cuda_score_route_bwd(d, a, dlogits, dweight);
    struct route r = route_of(a);
    r.dlogits = dlogits.data;
    r.dlogits_half = dlogits.dt == DT_BF16;
    r.dweight = (const float *)dweight.data;
    return route_launch(cuda_of(d), route_bwd_kernels, r);
}

int cuda_balance_bwd(struct dev *d, const struct balance_args *a) {
    struct route r = {};
    r.logits = a->logits.data;
    r.logits_half = a->logits.dt == DT_BF16;
    r.dlogits = a->dlogits.data;
    r.dlogits_half = a->dlogits.dt == DT_BF16;
    r.load = (const float *)a->load.data;
    r.loss = (float *)a->loss.data;
    r.tokens = a->logits.dim[0];
    r.experts = (int)a->logits.dim[1];
    r.z = a->z;
    r.z_loss = (float *)a->z_loss.data;
    r.sigmoid = a->sigmoid;
    return route_launch(cuda_of(d), r.sigmoid || r.z_loss ? router_losses_kernels : balance_bwd_kernels, r);
}

/* ---- rows by expert ---- */

/* Block e: its rows begin after those of all lower ids, and keep the order of the slots. */
static __global__ void __launch_bounds__(SORT_THREADS)
    expert_sort_kernel(int32_t *offset, int32_t *token, int32_t *row, const int32_t *expert, int slots, int choices) {
    __shared__ int sums[SORT_THREADS / 32];
    const int e = (int)blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int below = 0;
    pdl_launch_dependents();
    pdl_wait();
    for (int i = threadIdx.x; i < slots; i += SORT_THREADS) {
        const int id = expert[i];
        if (id < 0 || id >= (int)gridDim.x) __trap();
        below += id < e;
    }
    for (int o = 16; o > 0; o /= 2) below += __shfl_xor_sync(WARP_ALL, below, o);
    if (lane == 0) sums[warp] = below;
    __syncthreads();
    int at = 0; /* of the next row */
    for (int w = 0; w < SORT_THREADS / 32; w++) at += sums[w];
    if (threadIdx.x == 0) offset[e] = at;
    for (int i0 = 0; i0 < slots; i0 += SORT_THREADS) {
        const int i = i0 + (int)threadIdx.x;
        const bool mine = i < slots && expert[i] == e;
        const unsigned found = __ballot_sync(WARP_ALL, mine);
        __syncthreads(); /* all have read sums */
        if (lane == 0) sums[warp] = __popc(found);
        __syncthreads();
        int before = __popc(found & ((1u << lane) - 1)), all = 0;
        for (int w = 0; w < SORT_THREADS / 32; w++) {
            if (w < warp) before += sums[w];
            all += sums[w];
        }
        if (mine) {
            token[at + before] = i / choices;
            row[i] = at + before;
        }
        at += all;
    }
    if (threadIdx.x == 0 && e + 1 == (int)gridDim.x) offset[e + 1] = at;
}

int cuda_expert_sort(struct dev *d, struct tensor offset, struct tensor token, struct tensor row, struct tensor expert) {
    CU_TRY(cuda_launch_pdl(cuda_of(d), expert_sort_kernel, (unsigned)(offset.dim[0] - 1), SORT_THREADS, 0, (int32_t *)offset.data,
                           (int32_t *)token.data, (int32_t *)row.data, (const int32_t *)expert.data, (int)tensor_count(expert),
                           (int)expert.dim[1]));
    return 0;
}

static __global__ void clip_offsets_kernel(int32_t *dst, const int32_t *offset, int count, int lo, int n) {
    const int e = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    pdl_launch_dependents();
    pdl_wait();
    if (e < count) dst[e] = min(max(offset[e] - lo, 0), n);
}

int cuda_clip_offsets(struct dev *d, struct tensor dst, struct tensor offset, int64_t lo, int64_t n) {
    const int count = (int)offset.dim[0];
    CU_TRY(cuda_launch_pdl(cuda_of(d), clip_offsets_kernel, (unsigned)ceil_div(count, 256), 256, 0, (int32_t *)dst.data,
                           (const int32_t *)offset.data, count, (int)lo, (int)n));
    return 0;
}

/* ---- combination ---- */

struct combine {
    void *out;
    const float *from;
    const void *y, *weight, *dout;
    const int32_t *row;
    float *dweight;
    void *dy;
    int64_t rows, h, slots; /* rows of y */
    int choices;
    bool out_half, half, weight_half; /* half: of y, dout and dy */
};

static __device__ __forceinline__ int64_t row_of(const struct combine &a, int64_t slot) {
    const int64_t r = a.row[slot];
    if (r < 0 || r >= a.rows) __trap();
    return r;
}
template <bool VEC> static __device__ __forceinline__ void store8_any(void *p, bool half, int64_t at, const float v[CHUNK], int n) {
    if (half) store8<VEC>((bf16 *)p + at, v, n);
    else store8<VEC>((float *)p + at, v, n);
}

/* Grid (tokens, column blocks); a thread has a chunk of columns. */
template <bool VEC> static __global__ void combine_fwd_kernel(const struct combine a) {
    const int64_t t = blockIdx.x, c = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * CHUNK;
    const int n = a.h - c < CHUNK ? (int)(a.h - c) : CHUNK;
    float sum[CHUNK] = {}, v[CHUNK];
    pdl_launch_dependents();
    pdl_wait();
    if (c >= a.h) return;
    for (int s = 0; s < a.choices; s++) {
        const int64_t slot = t * a.choices + s;
        const float w = a.weight ? value_at(a.weight, a.weight_half, slot) : 1.0f;
        load8_any<VEC>(v, a.y, a.half, row_of(a, slot) * a.h + c, n);
#pragma unroll
        for (int i = 0; i < CHUNK; i++) sum[i] = s ? __fadd_rn(sum[i], __fmul_rn(w, v[i])) : __fmul_rn(w, v[i]);
    }
    if (a.from) {
        load8<VEC>(v, a.from + t * a.h + c, n);
#pragma unroll
        for (int i = 0; i < CHUNK; i++) sum[i] = __fadd_rn(v[i], sum[i]);
    }
    store8_any<VEC>(a.out, a.out_half, t * a.h + c, sum, n);
}

/* A warp has a slot: lane l the chunks l, l + 32, ... dy may be y: a thread reads a chunk before it writes it. */
template <bool VEC> static __global__ void __launch_bounds__(32 * WARPS) combine_bwd_kernel(const struct combine a) {
    const int64_t slot = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    float dot = 0;
    pdl_launch_dependents();
    pdl_wait();
    if (slot >= a.slots) return;
    const int64_t from = slot / a.choices * a.h, at = row_of(a, slot) * a.h;
    const float w = value_at(a.weight, a.weight_half, slot);
    for (int64_t c = lane * CHUNK; c < a.h; c += 32 * CHUNK) {
        const int n = a.h - c < CHUNK ? (int)(a.h - c) : CHUNK;
        float g[CHUNK], y[CHUNK];
        load8_any<VEC>(g, a.dout, a.half, from + c, n);
        load8_any<VEC>(y, a.y, a.half, at + c, n);
#pragma unroll
        for (int i = 0; i < CHUNK; i++) dot = __fadd_rn(dot, __fmul_rn(g[i], y[i])), g[i] = __fmul_rn(w, g[i]);
        store8_any<VEC>(a.dy, a.half, at + c, g, n);
    }
    dot = warp_sum(dot);
    if (lane == 0) a.dweight[slot] = dot;
}

static struct combine combine_of(const struct combine_args *a) {
    struct combine p = {};
    p.y = a->y.data;
    p.half = a->y.dt == DT_BF16;
    p.weight = a->weight.data;
    p.weight_half = a->weight.dt == DT_BF16;
    p.row = (const int32_t *)a->row.data;
    p.rows = a->y.dim[0];
    p.h = a->y.dim[1];
    p.slots = tensor_count(a->row);
    p.choices = (int)a->row.dim[1];
    return p;
}

int cuda_combine_fwd(struct dev *d, const struct combine_args *a) {
    struct combine p = combine_of(a);
    const int64_t chunks = ceil_div(p.h, CHUNK);
    const int threads = warps_for(chunks, 128);
    const dim3 grid((unsigned)a->row.dim[0], (unsigned)ceil_div(chunks, threads));
    p.out = a->out.data;
    p.out_half = a->out.dt == DT_BF16;
    p.from = (const float *)a->from.data;
    if (p.h % CHUNK == 0 && aligned16(p.out) && aligned16(p.from) && aligned16(p.y))
        CU_TRY(cuda_launch_pdl(cuda_of(d), combine_fwd_kernel<true>, grid, threads, 0, p));
    else CU_TRY(cuda_launch_pdl(cuda_of(d), combine_fwd_kernel<false>, grid, threads, 0, p));
    return 0;
}

int cuda_combine_bwd(struct dev *d, const struct combine_args *a, struct tensor dout, struct tensor dy, struct tensor dweight) {
    struct combine p = combine_of(a);
    const unsigned grid = (unsigned)ceil_div(p.slots, WARPS);
    p.dout = dout.data;
    p.dy = dy.data;
    p.dweight = (float *)dweight.data;
    if (p.h % CHUNK == 0 && aligned16(p.dout) && aligned16(p.dy) && aligned16(p.y))
        CU_TRY(cuda_launch_pdl(cuda_of(d), combine_bwd_kernel<true>, grid, 32 * WARPS, 0, p));
    else CU_TRY(cuda_launch_pdl(cuda_of(d), combine_bwd_kernel<false>, grid, 32 * WARPS, 0, p));
    return 0;
}
