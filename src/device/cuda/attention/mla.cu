/* mla.cu - the CUDA backend's multi-head latent attention: what RoPE turns of queries and keys, and the keys. A thread has a pair
 * of what is turned, or an element of the latent.
 *
 * Invariant: a row of a result reads the inputs of its own token alone, in one order. */
#include "device/cuda/vec.cuh"

typedef __nv_bfloat16 bf16;

enum { THREADS = 256 };

struct join {
    void *heads, *latent, *cn, *q, *k;
    const void *v;
    const float2 *table;
    const int32_t *pos, *slots;
    int64_t tokens, n_heads, nope, rope, r;
    bool half, interleaved;
};

static __device__ __forceinline__ float value_at(const void *p, bool half, int64_t i) {
    return half ? __bfloat162float(((const bf16 *)p)[i]) : ((const float *)p)[i];
}
static __device__ __forceinline__ void put(void *p, bool half, int64_t i, float v) {
    if (half) ((bf16 *)p)[i] = __float2bfloat16_rn(v);
    else ((float *)p)[i] = v;
}

/* Which part of token t thread i has: pairs of the heads, then of the latent, then elements of the latent. */
struct place {
    int64_t t, in, pairs;
};
static __device__ __forceinline__ struct place place_of(const struct join &a) {
    const int64_t pairs = (a.n_heads + 1) * (a.rope / 2), each = pairs + a.r, i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    return {i / each, i % each, pairs};
}
/* Where the two elements of a pair are: in what is turned, and in a query or key. */
struct pair {
    int64_t x0, x1, y0, y1;
    bool key;
    float2 angle; /* cos, sin */
};
static __device__ __forceinline__ struct pair pair_of(const struct join &a, const struct place &p) {
    const int64_t half = a.rope / 2, h = p.in / half, i = p.in % half, dim = a.rope + a.r;
    struct pair at;
    at.key = h == a.n_heads;
    const int64_t x = at.key ? p.t * dim + a.r : (p.t * a.n_heads + h) * (a.nope + a.rope) + a.nope;
    at.x0 = x + (a.interleaved ? 2 * i : i);
    at.x1 = x + (a.interleaved ? 2 * i + 1 : i + half);
    at.y0 = (at.key ? (int64_t)a.slots[p.t] : p.t * a.n_heads + h) * dim + i;
    at.y1 = at.y0 + half;
    at.angle = a.table[a.pos[p.t] * half + i];
    return at;
}

static __global__ void __launch_bounds__(THREADS) mla_join_fwd_kernel(const struct join a) {
    pdl_launch_dependents();
    pdl_wait();
    const struct place p = place_of(a);
    if (p.t >= a.tokens) return;
    if (p.in >= p.pairs) {
        const int64_t c = p.in - p.pairs;
        put(a.k, a.half, (int64_t)a.slots[p.t] * (a.rope + a.r) + a.rope + c, value_at(a.cn, a.half, p.t * a.r + c));
        return;
    }
    const struct pair at = pair_of(a, p);
    const void *const from = at.key ? a.latent : a.heads;
    void *const to = at.key ? a.k : a.q;
    const float x0 = value_at(from, a.half && !at.key, at.x0), x1 = value_at(from, a.half && !at.key, at.x1);
    put(to, a.half, at.y0, __fsub_rn(__fmul_rn(x0, at.angle.x), __fmul_rn(x1, at.angle.y)));
    put(to, a.half, at.y1, __fadd_rn(__fmul_rn(x1, at.angle.x), __fmul_rn(x0, at.angle.y)));
}

static __global__ void __launch_bounds__(THREADS) mla_join_bwd_kernel(const struct join a) {
    pdl_launch_dependents();
    pdl_wait();
    const struct place p = place_of(a);
    if (p.t >= a.tokens) return;
    if (p.in >= p.pairs) {
        const int64_t c = p.in - p.pairs, at = (int64_t)a.slots[p.t] * (a.rope + a.r) + a.rope + c;
        put(a.cn, a.half, p.t * a.r + c, __fadd_rn(((const float *)a.k)[at], ((const float *)a.v)[at]));
        return;
    }
    const struct pair at = pair_of(a, p);
    const void *const from = at.key ? a.k : a.q;
    void *const to = at.key ? a.latent : a.heads;
    const float y0 = value_at(from, a.half && !at.key, at.y0), y1 = value_at(from, a.half && !at.key, at.y1);
    put(to, a.half, at.x0, __fadd_rn(__fmul_rn(y0, at.angle.x), __fmul_rn(y1, at.angle.y)));
    put(to, a.half, at.x1, __fsub_rn(__fmul_rn(y1, at.angle.x), __fmul_rn(y0, at.angle.y)));
}

static int launch_join(struct dev *d, void (*kernel)(struct join), const struct mla_join_args *a) {
    struct join p = {};
    p.heads = a->heads.data;
    p.latent = a->latent.data;
    p.cn = a->cn.data;
    p.q = a->q.data;
    p.k = a->k.data;
    p.v = a->v.data;
    p.table = (const float2 *)a->table.data;
    p.pos = (const int32_t *)a->pos.data;
    p.slots = (const int32_t *)a->slots.data;
    p.tokens = a->cn.dim[0];
    p.n_heads = a->n_heads;
    p.nope = a->nope;
    p.rope = a->rope;
    p.r = a->cn.dim[1];
    p.half = a->cn.dt == DT_BF16;
    p.interleaved = a->interleaved;
    const int64_t n = p.tokens * ((a->n_heads + 1) * (a->rope / 2) + p.r);
    CU_TRY(cuda_launch_pdl(cuda_of(d), kernel, (unsigned)ceil_div(n, THREADS), THREADS, 0, p));
    return 0;
}
int cuda_mla_join_fwd(struct dev *d, const struct mla_join_args *a) { return launch_join(d, mla_join_fwd_kernel, a); }
int cuda_mla_join_bwd(struct dev *d, const struct mla_join_args *a) { return launch_join(d, mla_join_bwd_kernel, a); }

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
