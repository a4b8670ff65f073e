/* mla.cu - the CUDA backend's multi-head latent attention: what joins its parts into heads of queries, K and V. A thread has an
 * element.
 *
 * Invariant: a row of a result reads the inputs of its own token alone, in one order. */
#include "device/cuda/vec.cuh"

typedef __nv_bfloat16 bf16;

enum { THREADS = 256 };

struct join {
    void *q, *kv, *qkv, *latent;
    int64_t tokens, heads, nope, rope, v, width; /* width: of latent */
    bool half, latent_half;
};

static __device__ __forceinline__ float value_at(const void *p, bool half, int64_t i) {
    return half ? __bfloat162float(((const bf16 *)p)[i]) : ((const float *)p)[i];
}
static __device__ __forceinline__ void put(void *p, bool half, int64_t i, float v) {
    if (half) ((bf16 *)p)[i] = __float2bfloat16_rn(v);
    else ((float *)p)[i] = v;
}

static __global__ void __launch_bounds__(THREADS) mla_join_fwd_kernel(const struct join a) {
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x, dim = a.nope + a.rope, each = a.heads * dim;
    const int64_t t = i / (3 * each), in = i % (3 * each), part = in / each, h = in % each / dim, c = in % dim;
    const int64_t kv = (t * a.heads + h) * (a.nope + a.v);
    float x = 0;
    pdl_launch_dependents();
    pdl_wait();
    if (t >= a.tokens) return;
    if (part == 0) x = value_at(a.q, a.half, t * each + h * dim + (c < a.rope ? a.nope + c : c - a.rope));
    else if (part == 2) x = c < a.v ? value_at(a.kv, a.half, kv + a.nope + c) : 0.0f;
    else if (c < a.rope) x = value_at(a.latent, a.latent_half, (t + 1) * a.width - a.rope + c);
    else x = value_at(a.kv, a.half, kv + c - a.rope);
    put(a.qkv, a.half, i, x);
}

/* The elements of q, then those of kv, then the latent's last columns. */
static __global__ void __launch_bounds__(THREADS) mla_join_bwd_kernel(const struct join a) {
    const int64_t dim = a.nope + a.rope, each = a.heads * dim, of_kv = a.nope + a.v, n_kv = a.heads * of_kv;
    const int64_t row = each + n_kv + a.rope, i = (int64_t)blockIdx.x * THREADS + threadIdx.x, t = i / row, in = i % row;
    pdl_launch_dependents();
    pdl_wait();
    if (t >= a.tokens) return;
    const int64_t q = t * 3 * each, k = q + each, v = k + each;
    if (in < each) {
        const int64_t c = in % dim;
        put(a.q, a.half, t * each + in, value_at(a.qkv, a.half, q + in - c + (c < a.nope ? a.rope + c : c - a.nope)));
    } else if (in < each + n_kv) {
        const int64_t h = (in - each) / of_kv, c = (in - each) % of_kv;
        put(a.kv, a.half, t * n_kv + in - each,
            value_at(a.qkv, a.half, c < a.nope ? k + h * dim + a.rope + c : v + h * dim + c - a.nope));
    } else {
        const int64_t c = in - each - n_kv;
        float sum = 0;
        for (int64_t h = 0; h < a.heads; h++) sum = __fadd_rn(sum, value_at(a.qkv, a.half, k + h * dim + c));
        put(a.latent, a.latent_half, (t + 1) * a.width - a.rope + c, sum);
    }
}

static struct join join_of(const struct mla_join_args *a) {
    struct join p = {};
    p.q = a->q.data;
    p.kv = a->kv.data;
    p.qkv = a->qkv.data;
    p.latent = a->latent.data;
    p.tokens = a->qkv.dim[0];
    p.heads = a->n_heads;
    p.nope = a->nope;
    p.rope = a->rope;
    p.v = a->v;
    p.width = a->latent.dim[1];
    p.half = a->qkv.dt == DT_BF16;
    p.latent_half = a->latent.dt == DT_BF16;
    return p;
}

int cuda_mla_join_fwd(struct dev *d, const struct mla_join_args *a) {
    const unsigned grid = (unsigned)ceil_div(tensor_count(a->qkv), THREADS);
    CU_TRY(cuda_launch_pdl(cuda_of(d), mla_join_fwd_kernel, grid, THREADS, 0, join_of(a)));
    return 0;
}

int cuda_mla_join_bwd(struct dev *d, const struct mla_join_args *a) {
    const int64_t n = tensor_count(a->q) + tensor_count(a->kv) + a->qkv.dim[0] * a->rope;
    CU_TRY(cuda_launch_pdl(cuda_of(d), mla_join_bwd_kernel, (unsigned)ceil_div(n, THREADS), THREADS, 0, join_of(a)));
    return 0;
}

struct resize {
    void *dst;
    const void *src;
    int64_t n, to, from; /* elements; of a head */
    bool dst_half, src_half, keep;
};

static __global__ void __launch_bounds__(THREADS) resize_heads_kernel(const struct resize a) {
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x, c = i % a.to;
    pdl_launch_dependents();
    pdl_wait();
    if (i < a.n && (c < a.from || !a.keep))
        put(a.dst, a.dst_half, i, c < a.from ? value_at(a.src, a.src_half, i / a.to * a.from + c) : 0.0f);
}

int cuda_resize_heads(struct dev *d, struct tensor dst, struct tensor src, int64_t n_heads, bool keep) {
    struct resize p = {};
    p.keep = keep;
    p.dst = dst.data;
    p.src = src.data;
    p.n = tensor_count(dst);
    p.to = dst.dim[1] / n_heads;
    p.from = src.dim[1] / n_heads;
    p.dst_half = dst.dt == DT_BF16;
    p.src_half = src.dt == DT_BF16;
    CU_TRY(cuda_launch_pdl(cuda_of(d), resize_heads_kernel, (unsigned)ceil_div(p.n, THREADS), THREADS, 0, p));
    return 0;
}
