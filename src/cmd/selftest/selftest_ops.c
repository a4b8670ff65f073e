/* selftest_ops.c - every op of a device against `ref`, for `verlc selftest`.
 *
 * A case is a function that makes inputs on a device, calls ops and keeps their results; it
 * runs on ref and on the device, and the results are compared by their normalised mean
 * square error.  The same inputs come from the same seed, so the two runs differ in the
 * device only.  tests/ops checks more of each op; this is what a user's machine can answer.
 * Invariant: a case with no result is a failure. */
#include "cmd/selftest/selftest.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/rng.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_BLOCKS = 48, MAX_RESULTS = 10 };
enum how { EXACT, SUM, INNER }; /* moves; sums in another order; an intermediate may be rounded to act */

struct shape { /* what a case reads of it */
    int64_t rows, n, k, hq, hk, dim;
};
struct run {
    struct dev *d;
    enum dtype act;
    struct shape s;
    struct rng rng;
    uint32_t n_drawn;
    struct {
        void *p;
        size_t bytes;
    } block[MAX_BLOCKS];
    int n_blocks, n_results;
    struct {
        const char *name;
        float *v;
        int64_t n;
        enum how how;
        enum dtype dt;
    } result[MAX_RESULTS];
    int rc; /* of the first failure; later calls do nothing */
};

/* ---- inputs and results ---- */

static void *block(struct run *r, size_t bytes, const void *host) {
    void *p = NULL;
    if (r->rc < 0) return NULL;
    CHECK(r->n_blocks < MAX_BLOCKS);
    if ((r->rc = dev_alloc(r->d, bytes, &p)) < 0) return NULL;
    r->block[r->n_blocks].p = p;
    r->block[r->n_blocks++].bytes = bytes;
    r->rc = host ? dev_copy_in(r->d, p, host, bytes) : dev_zero(r->d, p, bytes);
    return p;
}

static struct tensor shaped(enum dtype dt, int64_t a, int64_t b) {
    return b > 0 ? tensor_2d(NULL, dt, a, b) : tensor_1d(NULL, dt, a);
}

/* Two values of mean 0 and variance 1, each the sum of four uniform ones (Irwin-Hall): nearly normal, in a tenth of the time. */
static void draw(struct run *r, float v[2]) {
    const uint32_t ctr[4] = {r->n_drawn++, (uint32_t)r->rng.stream, 0, 1}, key[2] = {(uint32_t)r->rng.seed, 0};
    uint32_t w[4];
    philox4x32(w, ctr, key);
    for (int i = 0; i < 2; i++) {
        const uint32_t a = w[2 * i], b = w[2 * i + 1], sum = (a & 0xffff) + (a >> 16) + (b & 0xffff) + (b >> 16);
        v[i] = ((float)sum - 2 * 65535.0f) * (1.7320508f / 65536); /* a sum's variance is a third of 65536^2 */
    }
}

/* Such values times scale, plus mean. b == 0: one dimension. */
static struct tensor values(struct run *r, enum dtype dt, int64_t a, int64_t b, float scale, float mean) {
    struct tensor t = shaped(dt, a, b);
    const int64_t n = tensor_count(t);
    char *host = xmalloc((size_t)n * dtype_size(dt) + 1);
    float drawn[2];
    for (int64_t i = 0; i < n; i++) {
        if (i % 2 == 0) draw(r, drawn);
        const float v = mean + scale * drawn[i % 2];
        if (dt == DT_BF16) ((uint16_t *)(void *)host)[i] = f32_to_bf16(v);
        else ((float *)(void *)host)[i] = v;
    }
    t.data = block(r, (size_t)n * dtype_size(dt), host);
    free(host);
    return t;
}
static struct tensor empty(struct run *r, enum dtype dt, int64_t a, int64_t b) {
    struct tensor t = shaped(dt, a, b);
    t.data = block(r, (size_t)tensor_count(t) * dtype_size(dt), NULL);
    return t;
}
/* step > 0: first, first + step, ...; 0: random below `below`. */
static struct tensor ints(struct run *r, int64_t n, int64_t below, int64_t first, int64_t step) {
    int32_t *host = xmalloc((size_t)n * 4 + 4);
    for (int64_t i = 0; i < n; i++) host[i] = step ? (int32_t)(first + i * step) : (int32_t)rng_below(&r->rng, (uint64_t)below);
    struct tensor t = tensor_1d(block(r, (size_t)n * 4, host), DT_I32, n);
    free(host);
    return t;
}
static struct weight packed(struct run *r, int64_t n, int64_t k, float scale) {
    struct weight w = {NULL, r->act, n, k, 0, 0};
    const struct tensor src = values(r, DT_F32, n, k, scale, 0);
    w.data = block(r, dev_weight_bytes(r->d, r->act, n, k), NULL);
    if (r->rc == 0) r->rc = dev_weight_pack(r->d, w, src);
    return w;
}
static void keep(struct run *r, const char *name, struct tensor t, enum how how) {
    if (r->rc < 0) return;
    CHECK(r->n_results < MAX_RESULTS);
    const int64_t n = tensor_count(t);
    char *host = xmalloc((size_t)n * dtype_size(t.dt) + 8);
    float *v = xmalloc((size_t)n * 4 + 4);
    r->rc = dev_copy_out(r->d, host, t.data, (size_t)n * dtype_size(t.dt));
    for (int64_t i = 0; i < n && r->rc == 0; i++) {
        switch (t.dt) {
        case DT_BF16: v[i] = bf16_to_f32(((uint16_t *)(void *)host)[i]); break;
        case DT_I32: v[i] = (float)((int32_t *)(void *)host)[i]; break;
        case DT_F64: v[i] = (float)((double *)(void *)host)[i]; break;
        case DT_U8: v[i] = (float)((uint8_t *)(void *)host)[i]; break;
        default: v[i] = ((float *)(void *)host)[i];
        }
    }
    free(host);
    r->result[r->n_results].name = name;
    r->result[r->n_results].v = v;
    r->result[r->n_results].n = n;
    r->result[r->n_results].how = how;
    r->result[r->n_results++].dt = t.dt;
}
static void call(struct run *r, int (*fn)(struct run *r)) {
    if (r->rc == 0) r->rc = fn(r);
}
static void run_free(struct run *r) {
    (void)dev_sync(r->d);
    for (int i = 0; i < r->n_blocks; i++) dev_free(r->d, r->block[i].p, r->block[i].bytes);
    for (int i = 0; i < r->n_results; i++) free(r->result[i].v);
}
/* Calls of an op between inputs that may have failed. */
#define OP(call_)                        \
    do {                                 \
        if (r->rc == 0) r->rc = (call_); \
    } while (0)

/* ---- the cases: rows x n over k, heads ---- */

static int weight_case(struct run *r) {
    const struct weight w = packed(r, r->s.n, r->s.k, 1);
    const struct tensor out = empty(r, DT_F32, r->s.n, r->s.k);
    OP(dev_weight_unpack(r->d, out, w));
    keep(r, "weight", out, EXACT);
    const struct tensor x = values(r, DT_F32, r->s.rows, r->s.n, 1, 0), y = empty(r, DT_BF16, r->s.rows, r->s.n);
    OP(dev_cast(r->d, y, x));
    keep(r, "cast", y, EXACT);
    return r->rc;
}

static int embed_case(struct run *r) {
    const struct weight w = packed(r, r->s.n, r->s.k, 1);
    const struct tensor ids = ints(r, r->s.rows, r->s.n, 0, 0), x = empty(r, DT_F32, r->s.rows, r->s.k);
    const struct tensor dx = values(r, DT_F32, r->s.rows, r->s.k, 1, 0), dw = empty(r, DT_F32, r->s.n, r->s.k);
    const struct tensor some = ints(r, (r->s.rows + 1) / 2, 0, 0, 2), part = empty(r, DT_F32, (r->s.rows + 1) / 2, r->s.k),
                        back = values(r, DT_F32, r->s.rows, r->s.k, 1, 0);
    OP(dev_embed_fwd(r->d, x, ids, w));
    OP(dev_embed_bwd(r->d, dw, ids, dx));
    OP(dev_gather_rows(r->d, part, x, some));
    OP(dev_scatter_rows_add(r->d, back, part, some));
    keep(r, "embed_fwd", x, EXACT);
    keep(r, "embed_bwd", dw, SUM);
    keep(r, "gather_rows", part, EXACT);
    keep(r, "scatter_rows_add", back, SUM);
    return r->rc;
}

static int norm_case(struct run *r) {
    const int64_t t = r->s.rows, n = r->s.n;
    const struct tensor x = values(r, DT_F32, t, n, 1, 0.1f), w = values(r, r->act, n, 0, 0.2f, 1), y = empty(r, r->act, t, n),
                        rstd = empty(r, DT_F32, t, 0), dy = values(r, r->act, t, n, 1, 0), dx = empty(r, DT_F32, t, n),
                        dw = empty(r, DT_F32, n, 0);
    OP(dev_rmsnorm_fwd(r->d, &(struct rmsnorm_args){.y = y, .rstd = rstd, .x = x, .w = w, .eps = 1e-6f}));
    OP(dev_rmsnorm_bwd(r->d, &(struct rmsnorm_bwd_args){.dx = dx, .dw = dw, .dy = dy, .x = x, .w = w, .rstd = rstd}));
    keep(r, "rmsnorm_fwd", y, INNER);
    keep(r, "rmsnorm_bwd dx", dx, INNER);
    keep(r, "rmsnorm_bwd dw", dw, INNER);
    const struct tensor gu = values(r, r->act, t, 2 * n, 1.5f, 0), s = empty(r, r->act, t, n), dgu = empty(r, r->act, t, 2 * n);
    OP(dev_swiglu_fwd(r->d, s, gu));
    OP(dev_swiglu_bwd(r->d, dgu, dy, gu));
    keep(r, "swiglu_fwd", s, SUM);
    keep(r, "swiglu_bwd", dgu, SUM);
    return r->rc;
}

static int matmul_case(struct run *r) {
    const int64_t t = r->s.rows, n = r->s.n, k = r->s.k;
    const struct weight w = packed(r, n, k, 0.1f);
    const struct tensor x = values(r, r->act, t, k, 1, 0), bias = values(r, r->act, n, 0, 1, 0), y = empty(r, r->act, t, n),
                        sum = values(r, DT_F32, t, n, 1, 0), dy = values(r, r->act, t, n, 1, 0), dx = empty(r, DT_F32, t, k),
                        dw = empty(r, DT_F32, n, k), db = empty(r, DT_F32, n, 0);
    OP(dev_matmul_fwd(r->d, y, x, w, bias, false));
    OP(dev_matmul_fwd(r->d, sum, x, w, TENSOR_NONE, true));
    OP(dev_matmul_dx(r->d, dx, dy, w, false));
    OP(dev_matmul_dw(r->d, dw, db, dy, x, true));
    keep(r, "matmul_fwd", y, SUM);
    keep(r, "matmul_fwd add", sum, SUM);
    keep(r, "matmul_dx", dx, SUM);
    keep(r, "matmul_dw", dw, SUM);
    keep(r, "matmul_dw bias", db, SUM);
    const struct tensor gate_up = empty(r, r->act, t, n), half = empty(r, r->act, t, n / 2);
    for (int i = 0; i < 2; i++) OP(dev_matmul_swiglu(r->d, half, gate_up, x, w, bias)); /* the first call autotunes */
    keep(r, "matmul_swiglu", half, INNER);
    return r->rc;
}

/* QKV to heads and the KV cache, attention over it as two sequences, and backward. */
static int attention_case(struct run *r) {
    const int64_t t = r->s.rows, q = r->s.hq * r->s.dim, kv = r->s.hk * r->s.dim, cut = t / 3;
    const int32_t starts[] = {0, (int32_t)cut, (int32_t)t};
    struct qkv_args a = {.n_q_heads = r->s.hq,
                         .n_kv_heads = r->s.hk,
                         .head_dim = r->s.dim,
                         .eps = 1e-6f,
                         .qkv = values(r, r->act, t, q + 2 * kv, 1, 0),
                         .q_norm = values(r, r->act, r->s.dim, 0, 0.2f, 1),
                         .k_norm = values(r, r->act, r->s.dim, 0, 0.2f, 1),
                         .pos = ints(r, t, 0, 0, 1),
                         .slots = ints(r, t, 0, 0, 1),
                         .q = empty(r, r->act, t, q)};
    a.rope = values(r, DT_F32, t * r->s.dim, 0, 0.7f, 0);
    a.rope = (struct tensor){a.rope.data, DT_F32, 3, {t, r->s.dim / 2, 2, 1}};
    const struct tensor k = empty(r, r->act, t, kv), v = empty(r, r->act, t, kv);
    const struct tensor dk = empty(r, DT_F32, t, kv), dv = empty(r, DT_F32, t, kv);
    const int64_t cache[4] = {1, r->s.hk, t, r->s.dim};
    struct tensor as_cache[4] = {k, v, dk, dv};
    for (int i = 0; i < 4; i++) {
        as_cache[i].nd = 4;
        memcpy(as_cache[i].dim, cache, sizeof cache);
    }
    a.kv = (struct kv){as_cache[0], as_cache[1]};
    const struct tensor start = tensor_1d(block(r, sizeof starts, starts), DT_I32, 3);
    struct attn_args f = {.n_q_heads = r->s.hq,
                          .n_kv_heads = r->s.hk,
                          .head_dim = r->s.dim,
                          .scale = 1 / sqrtf((float)r->s.dim),
                          .seqs = {.n = 2,
                                   .max_q = t - cut,
                                   .max_kv = t - cut,
                                   .q_start = start,
                                   .pos0 = empty(r, DT_I32, 2, 0),
                                   .kv_start = tensor_1d(start.data, DT_I32, 2)},
                          .q = a.q,
                          .kv = a.kv,
                          .out = empty(r, r->act, t, q),
                          .lse = empty(r, DT_F32, t, r->s.hq)};
    const struct tensor dout = values(r, r->act, t, q, 1, 0), dq = empty(r, r->act, t, q), dqkv = empty(r, r->act, t, q + 2 * kv),
                        dqn = empty(r, DT_F32, r->s.dim, 0), dkn = empty(r, DT_F32, r->s.dim, 0);
    OP(dev_qkv_fwd(r->d, &a));
    OP(dev_attn_fwd(r->d, &f));
    OP(dev_attn_bwd(r->d, &f, dout, dq, as_cache[2], as_cache[3]));
    OP(dev_qkv_bwd(r->d, &a, &(struct qkv_bwd_args){dq, as_cache[2], as_cache[3], dqkv, dqn, dkn}));
    keep(r, "qkv_fwd q", a.q, INNER);
    keep(r, "qkv_fwd k", k, INNER);
    keep(r, "attn_fwd", f.out, INNER);
    keep(r, "attn_fwd lse", f.lse, INNER);
    keep(r, "attn_bwd dq", dq, INNER);
    keep(r, "attn_bwd dk", dk, INNER);
    keep(r, "attn_bwd dv", dv, INNER);
    keep(r, "qkv_bwd", dqkv, INNER);
    return r->rc;
}

/* Decode attention: one new row of each sequence; all share the first two KV blocks. */
static int step_case(struct run *r) {
    enum { BLOCK_LEN = 16, SHARED = 2, OWN = 6, BLOCKS = SHARED + OWN };
    const int64_t n = r->s.rows, q = r->s.hq * r->s.dim, kv = r->s.hk * r->s.dim, n_kv_blocks = SHARED + n * OWN;
    int32_t *table_of = xmalloc((size_t)(n * BLOCKS) * 4), *pos = xmalloc((size_t)n * 4), *slot = xmalloc((size_t)n * 4);
    for (int64_t i = 0; i < n; i++) {
        for (int64_t k = 0; k < BLOCKS; k++) table_of[i * BLOCKS + k] = (int32_t)(k < SHARED ? k : i * OWN + k);
        pos[i] = SHARED * BLOCK_LEN + (int32_t)(i * 37 % (OWN * BLOCK_LEN));
        slot[i] = table_of[i * BLOCKS + pos[i] / BLOCK_LEN] * BLOCK_LEN + pos[i] % BLOCK_LEN;
    }
    struct qkv_args a = {.n_q_heads = r->s.hq,
                         .n_kv_heads = r->s.hk,
                         .head_dim = r->s.dim,
                         .eps = 1e-6f,
                         .qkv = values(r, r->act, n, q + 2 * kv, 1, 0),
                         .q_norm = values(r, r->act, r->s.dim, 0, 0.2f, 1),
                         .k_norm = values(r, r->act, r->s.dim, 0, 0.2f, 1),
                         .pos = tensor_1d(block(r, (size_t)n * 4, pos), DT_I32, n),
                         .slots = tensor_1d(block(r, (size_t)n * 4, slot), DT_I32, n),
                         .q = empty(r, r->act, n, q)};
    a.rope = values(r, DT_F32, BLOCKS * BLOCK_LEN * r->s.dim, 0, 0.7f, 0);
    a.rope = (struct tensor){a.rope.data, DT_F32, 3, {BLOCKS * BLOCK_LEN, r->s.dim / 2, 2, 1}};
    const struct tensor k = values(r, r->act, n_kv_blocks * BLOCK_LEN, kv, 1, 0),
                        v = values(r, r->act, n_kv_blocks * BLOCK_LEN, kv, 1, 0);
    void *table = block(r, (size_t)(n * BLOCKS) * 4, table_of);
    const struct tensor as_cache = {NULL, r->act, 4, {n_kv_blocks, r->s.hk, BLOCK_LEN, r->s.dim}};
    a.kv = (struct kv){as_cache, as_cache};
    a.kv.k.data = k.data, a.kv.v.data = v.data;
    const struct attn_args f = {.n_q_heads = r->s.hq,
                                .n_kv_heads = r->s.hk,
                                .head_dim = r->s.dim,
                                .scale = 1 / sqrtf((float)r->s.dim),
                                .q = a.q,
                                .kv = a.kv,
                                .out = empty(r, r->act, n, q),
                                .seqs = {.n = n,
                                         .max_q = 1,
                                         .max_kv = BLOCKS * BLOCK_LEN,
                                         .q_start = ints(r, n + 1, 0, 0, 1),
                                         .pos0 = a.pos,
                                         .block_table = tensor_2d(table, DT_I32, n, BLOCKS)}};
    free(table_of);
    free(pos);
    free(slot);
    OP(dev_qkv_attn_fwd(r->d, &a, &f));
    keep(r, "qkv_attn_fwd", f.out, INNER);
    keep(r, "qkv_attn_fwd k", k, INNER);
    keep(r, "qkv_attn_fwd v", v, EXACT);
    return r->rc;
}

static int head_case(struct run *r) {
    const int64_t t = r->s.rows, n = r->s.n, k = r->s.k;
    struct lmhead_args a = {.x = values(r, r->act, t, k, 1, 0),
                            .w = packed(r, n, k, 0.5f / sqrtf((float)k)),
                            .inv_temp = values(r, DT_F32, t, 0, 0.1f, 1),
                            .target = ints(r, t, n, 0, 0),
                            .logp = empty(r, DT_F32, t, 0),
                            .entropy = empty(r, DT_F32, t, 0),
                            .lse = empty(r, DT_F32, t, 0),
                            .sum_pi_sq = empty(r, DT_F32, t, 0)};
    const struct tensor dlogp = values(r, DT_F32, t, 0, 1, 0), dentropy = values(r, DT_F32, t, 0, 0.1f, 0);
    const struct tensor dx = empty(r, r->act, t, k), dw = empty(r, DT_F32, n, k), z = empty(r, DT_F32, t, n);
    OP(dev_lmhead_fwd(r->d, &a));
    OP(dev_lmhead_bwd(r->d, &a, &(struct lmhead_bwd_args){dlogp, dentropy, dx, dw, true}));
    OP(dev_logits(r->d, z, a.x, a.w));
    keep(r, "lmhead_fwd logp", a.logp, SUM);
    keep(r, "lmhead_fwd entropy", a.entropy, SUM);
    keep(r, "lmhead_fwd sum_pi_sq", a.sum_pi_sq, SUM);
    keep(r, "lmhead_bwd dx", dx, INNER);
    keep(r, "lmhead_bwd dw", dw, INNER);
    keep(r, "logits", z, SUM);
    struct sample_param *p = xcalloc((size_t)t, sizeof *p);
    for (int64_t i = 0; i < t; i++)
        p[i] = (struct sample_param){.inv_temp = 1,
                                     .top_p = i % 3 == 1 ? 0.9f : 1,
                                     .repetition_penalty = 1,
                                     .u = (float)rng_unit(&r->rng),
                                     .top_k = i % 3 == 2 ? 5 : 0,
                                     .greedy = i % 4 == 0};
    const struct sample_args s = {
        .logits = z, .param = p, .id = empty(r, DT_I32, t, 0), .logp = empty(r, DT_F32, t, 0), .logp_kept = empty(r, DT_F32, t, 0)};
    OP(dev_sample(r->d, &s));
    keep(r, "sample logp", s.logp, SUM);
    free(p);
    return r->rc;
}

static int optim_case(struct run *r) {
    const int64_t n = r->s.n, half = n / 2, segment[2][2] = {{0, half ? half : n}, {half, n - half}}, n_seg = half ? 2 : 1;
    const struct tensor table = tensor_2d(block(r, sizeof segment, segment), DT_I64, n_seg, 2);
    const struct tensor p = values(r, DT_F32, n, 0, 1, 0), m = values(r, DT_F32, n, 0, 0.1f, 0), g = values(r, DT_F32, n, 0, 1, 0),
                        v = values(r, DT_F32, n, 0, 0.01f, 0.5f), sq = empty(r, DT_F64, n_seg, 0);
    OP(dev_sumsq(r->d, sq, g, table, 0));
    OP(dev_adamw(r->d, &(struct adamw_args){p, m, v, g, 1e-2, 0.9, 0.999, 1e-8, 0.01, 0.5f, 3}));
    keep(r, "sumsq", sq, SUM);
    const struct tensor parts[] = {m, v}, sum = values(r, DT_F32, n, 0, 1, 0);
    OP(dev_fold(r->d, sum, parts, 2, true));
    keep(r, "fold", sum, EXACT);
    keep(r, "adamw p", p, SUM);
    keep(r, "adamw m", m, SUM);
    keep(r, "adamw v", v, SUM);
    return r->rc;
}

static int adaptive_case(struct run *r) {
    static const struct {
        enum adaptive_rule rule;
        bool m, x;
    } rules[] = {
        {ADAPTIVE_ADAM, true, false}, {ADAPTIVE_ADAM, true, true}, {ADAPTIVE_RADAM, true, false}, {ADAPTIVE_RMSPROP, true, true}};
    const int64_t n = r->s.n;
    const struct tensor p = values(r, DT_F32, n, 0, 1, 0), m = values(r, DT_F32, n, 0, 0.1f, 0), g = values(r, DT_F32, n, 0, 1, 0),
                        v = values(r, DT_F32, n, 0, 0.01f, 0.5f), x = values(r, DT_F32, n, 0, 0.1f, 0);
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        const struct adaptive_args a = {.rule = rules[i].rule,
                                        .p = p,
                                        .m = m,
                                        .v = v,
                                        .x = rules[i].x ? x : TENSOR_NONE,
                                        .g = g,
                                        .lr = 1e-2,
                                        .beta1 = 0.9,
                                        .beta2 = 0.99,
                                        .eps = 1e-8,
                                        .weight_decay = 0.01,
                                        .coupled = i % 2 == 0,
                                        .grad_scale = -0.5f,
                                        .step = 9};
        OP(dev_adaptive(r->d, &a));
    }
    keep(r, "adaptive p", p, SUM);
    keep(r, "adaptive m", m, SUM);
    keep(r, "adaptive v", v, SUM);
    keep(r, "adaptive x", x, SUM);
    return r->rc;
}

static int axpby_case(struct run *r) {
    const struct tensor x = values(r, DT_F32, r->s.n, 0, 1, 0), y = values(r, DT_F32, r->s.n, 0, 1, 0);
    OP(dev_axpby(r->d, y, 0.3f, x, 0.7f));
    keep(r, "axpby", y, SUM);
    return r->rc;
}

static int quant_case(struct run *r) {
    float book[256];
    for (int i = 0; i < 256; i++) book[i] = ((float)i - 127.5f) / 127.5f;
    const int64_t n = r->s.n, blocks = (n + DEV_QUANT_BLOCK - 1) / DEV_QUANT_BLOCK;
    const struct quant8_args a = {values(r, DT_F32, n, 0, 1, 0), empty(r, DT_U8, n, 0), empty(r, DT_F32, blocks, 0),
                                  tensor_1d(block(r, sizeof book, book), DT_F32, 256)};
    OP(dev_quant8(r->d, &a));
    keep(r, "quant8", a.code, SUM);
    OP(dev_dequant8(r->d, &a));
    keep(r, "dequant8", a.x, SUM);
    return r->rc;
}

static int adapter_case(struct run *r) {
    const struct tensor dst = values(r, DT_F32, 12, 20, 1, 0), src = values(r, DT_F32, 9, 14, 1, 0);
    const struct tensor all = values(r, DT_F32, 36, 20, 1, 0), from = values(r, DT_F32, 27, 14, 1, 0);
    struct add_block_args a = {
        .dst = dst, .src = src, .dst_row = 2, .dst_col = 3, .src_row = 1, .src_col = 4, .rows = 7, .cols = 10, .scale = 0.5f};
    OP(dev_add_block(r->d, &a));
    keep(r, "add_block", dst, SUM);
    a.dst = tensor_rows(all, 0, 12);
    a.src = tensor_rows(from, 0, 9);
    a.count = 3;
    a.dst_next = tensor_count(a.dst);
    a.src_next = tensor_count(a.src);
    OP(dev_add_block(r->d, &a));
    keep(r, "add_block of a stack", all, SUM);
    return r->rc;
}

/* ---- comparisons ---- */

struct self_case {
    const char *name;
    int (*fn)(struct run *r);
    struct shape shapes[3]; /* up to the first with no rows */
};
static const struct self_case cases[] = {
    {"weights, casts", weight_case, {{3, 33, 17, 0, 0, 0}, {80, 1152, 128, 0, 0, 0}}},
    {"embedding, gather, scatter", embed_case, {{7, 50, 33, 0, 0, 0}, {129, 300, 128, 0, 0, 0}}},
    {"norm, swiglu", norm_case, {{1, 17, 0, 0, 0, 0}, {80, 896, 0, 0, 0, 0}, {9, 4864, 0, 0, 0, 0}}},
    {"matmul", matmul_case, {{1, 896, 896, 0, 0, 0}, {33, 100, 129, 0, 0, 0}, {300, 320, 896, 0, 0, 0}}},
    {"attention", attention_case, {{17, 0, 0, 14, 2, 64}, {200, 0, 0, 7, 1, 64}, {130, 0, 0, 4, 2, 128}}},
    {"decode attention", step_case, {{1, 0, 0, 14, 2, 64}, {300, 0, 0, 14, 2, 64}, {150, 0, 0, 16, 8, 128}}},
    {"LM head, sampler", head_case, {{1, 4097, 64, 0, 0, 0}, {17, 9000, 128, 0, 0, 0}}},
    {"adamw, sums of squares", optim_case, {{1, 1, 0, 0, 0, 0}, {1, 100003, 0, 0, 0, 0}}},
    {"adaptive optimizers", adaptive_case, {{1, 1000, 0, 0, 0, 0}, {1, 100003, 0, 0, 0, 0}}},
    {"axpby", axpby_case, {{1, 1000, 0, 0, 0, 0}}},
    {"8-bit state", quant_case, {{1, 1000, 0, 0, 0, 0}}},
    {"LoRA, add_block", adapter_case, {{1, 1, 0, 0, 0, 0}}},
};

/* The largest error that a sum in another order, or a rounding to act on the way, may leave (tests/ops has the reasons). */
static double allowed(enum how how, enum dtype act, enum dtype result) {
    if (how == EXACT) return 0;
    if (how == SUM) return result == DT_BF16 ? 1e-6 : 1e-11;
    return act == DT_BF16 ? 3e-5 : 1e-11;
}
static double error(const float *got, const float *want, int64_t n) {
    double num = 0, den = 0;
    for (int64_t i = 0; i < n; i++) {
        const double e = (double)got[i] - (double)want[i];
        num += e * e;
        den += (double)want[i] * (double)want[i];
    }
    if (num == 0) return 0;
    return isfinite(num) ? num / fmax(den, 1e-4 * (double)n) : 1e300;
}

static void run_init(struct run *r, struct dev *d, enum dtype act, const struct shape *s) {
    *r = (struct run){.d = d, .act = act, .s = *s, .rng = {.seed = 11, .stream = RNG_TEST}};
}

/* Worst error as a part of what is allowed over the results of one case. */
struct verdict {
    double ratio;
    const char *name;
    int n;
};
static void compare(const struct run *got, const struct run *want, struct verdict *v) {
    for (int i = 0; i < want->n_results; i++) {
        const double e = error(got->result[i].v, want->result[i].v, want->result[i].n);
        const double most = allowed(want->result[i].how, want->act, want->result[i].dt);
        const double ratio = most > 0 ? e / most : e > 0 ? 1e300 : 0;
        if (ratio >= v->ratio) *v = (struct verdict){ratio, want->result[i].name, v->n};
        v->n++;
    }
}

static int against_ref(struct selftest *t, const struct self_case *c, enum dtype act) {
    struct verdict v = {0};
    char what[96], detail[128];
    int rc = 0;
    for (int i = 0; i < 3 && c->shapes[i].rows > 0 && rc == 0; i++) {
        struct run want, got;
        run_init(&want, t->ref, act, &c->shapes[i]);
        run_init(&got, t->dev, act, &c->shapes[i]);
        call(&want, c->fn);
        call(&got, c->fn);
        rc = want.rc < 0 ? want.rc : got.rc;
        if (rc == 0) compare(&got, &want, &v);
        run_free(&want);
        run_free(&got);
    }
    if (rc < 0 && rc != ERR_UNSUPPORTED) return rc;
    snprintf(what, sizeof what, "%s, %s", c->name, dtype_name(act));
    if (rc == ERR_UNSUPPORTED) {
        printf("%-40s %-9s %s\n", what, "missing", err_msg());
        t->missing++;
        return 0;
    }
    snprintf(detail, sizeof detail, "%d results, worst %s: %.2g of what is allowed", v.n, v.name ? v.name : "none", v.ratio);
    selftest_line(t, what, v.n > 0 && v.ratio <= 1, detail);
    return 0;
}

/* ---- rows ---- */

/* x (rows, k) through a matmul, a norm and the head: the last `take` rows alone. */
static int row_results(struct run *r, int64_t take) {
    const int64_t t = r->s.rows, n = r->s.n, k = r->s.k, lo = t - take;
    const struct weight w = packed(r, n, k, 0.1f);
    const struct tensor x = tensor_rows(values(r, r->act, t, k, 1, 0), lo, take), bias = values(r, r->act, n, 0, 1, 0),
                        res = tensor_rows(values(r, DT_F32, t, k, 1, 0), lo, take), g = values(r, r->act, k, 0, 0.2f, 1);
    const struct tensor y = empty(r, r->act, take, n), xn = empty(r, r->act, take, k);
    struct lmhead_args a = {.x = xn,
                            .w = w,
                            .inv_temp = tensor_rows(values(r, DT_F32, t, 0, 0.1f, 1), lo, take),
                            .target = tensor_rows(ints(r, t, n, 0, 0), lo, take),
                            .logp = empty(r, DT_F32, take, 0),
                            .entropy = empty(r, DT_F32, take, 0),
                            .lse = empty(r, DT_F32, take, 0)};
    OP(dev_matmul_fwd(r->d, y, x, w, bias, false));
    OP(dev_rmsnorm_fwd(r->d, &(struct rmsnorm_args){.y = xn, .x = res, .w = g, .eps = 1e-6f}));
    OP(dev_lmhead_fwd(r->d, &a));
    keep(r, "matmul_fwd", y, EXACT);
    keep(r, "rmsnorm_fwd", xn, EXACT);
    keep(r, "lmhead_fwd logp", a.logp, EXACT);
    keep(r, "lmhead_fwd entropy", a.entropy, EXACT);
    return r->rc;
}

static int rows_alone(struct selftest *t, enum dtype act) {
    static const int64_t takes[] = {1, 2, 8, 17, 80, 129, 256};
    const struct shape s = {.rows = 300, .n = 4352, .k = 256};
    struct run all;
    char what[96], detail[96];
    int64_t bad = 0, seen = 0;
    run_init(&all, t->dev, act, &s);
    int rc = row_results(&all, s.rows);
    for (size_t i = 0; i < sizeof takes / sizeof *takes && rc == 0; i++) {
        struct run few;
        run_init(&few, t->dev, act, &s);
        rc = row_results(&few, takes[i]);
        for (int k = 0; k < few.n_results && rc == 0; k++) {
            const int64_t n = few.result[k].n;
            const float *whole = all.result[k].v + all.result[k].n - n;
            for (int64_t j = 0; j < n; j++) bad += memcmp(&few.result[k].v[j], &whole[j], sizeof *whole) != 0;
            seen += n;
        }
        run_free(&few);
    }
    run_free(&all);
    if (rc < 0) return rc;
    snprintf(what, sizeof what, "batch-invariant, %s", dtype_name(act));
    snprintf(detail, sizeof detail, "%lld of %lld values differ", (long long)bad, (long long)seen);
    selftest_line(t, what, bad == 0 && seen > 0, detail);
    return 0;
}

int selftest_ops(struct selftest *t) {
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        TRY(against_ref(t, &cases[i], DT_F32));
        TRY(against_ref(t, &cases[i], DT_BF16));
    }
    TRY(rows_alone(t, DT_F32));
    return rows_alone(t, DT_BF16);
}
