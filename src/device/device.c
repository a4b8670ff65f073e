/* device.c - the checked way to call a backend: the dev_* wrappers of device.h; those of the
 * LM head, of experts, MLA and gated delta nets are in files of their own.
 *
 * A wrapper checks shapes and dtypes once, answers a missing table entry with
 * ERR_UNSUPPORTED, keeps the memory accounts, and returns early when there is
 * no row to work on, so that backends hold arithmetic only.  It never reads
 * device memory: ids, indices and sequence tables are the caller's promise
 * (the ref backend CHECKs them).
 * Invariant: a backend entry runs only with tensors that fit each other. */
#include "device/checks_int.h"
#include "device/device_int.h"

#include <stdio.h>

void dev_close(struct dev *d) {
    dev_trace__drop(d);
    dev_gpu_use__drop(d);
    if (d->ops && d->ops->close) d->ops->close(d);
    *d = (struct dev){0};
}

/* ---- weights ---- */

size_t dev_weight_bytes(struct dev *d, enum dtype dt, int64_t n, int64_t k) {
    CHECK(d->ops->weight_bytes && (set_of(dt) & ACT) && n > 0 && k > 0);
    return d->ops->weight_bytes(d, dt, n, k);
}
int dev_weight_pack(struct dev *d, struct weight w, struct tensor src) {
    TRY(want_weight("weight_pack", w, ACT, ANY, ANY));
    TRY(want2("weight_pack", "src", src, ACT, w.n, w.k));
    HAVE(weight_pack);
    return TRACED(weight_pack, (d, w, src), w.n, w.k, 0);
}
int dev_weight_unpack(struct dev *d, struct tensor dst, struct weight w) {
    TRY(want_weight("weight_unpack", w, ACT, ANY, ANY));
    TRY(want2("weight_unpack", "dst", dst, F32 | set_of(w.dt), w.n, w.k));
    HAVE(weight_unpack);
    return d->ops->weight_unpack(d, dst, w);
}
/* Where weights are plain a stack is one matrix; else its matrices one by one. */
static int each_of_stack(struct dev *d, struct weight_stack w, struct tensor rows, bool pack) {
    const size_t bytes = dev_weight_bytes(d, w.w.dt, w.w.n, w.w.k);
    const bool whole = d->ops->caps.plain_weights;
    TRY(want2("weight_stack", "rows", rows, ACT, w.count * w.w.n, w.w.k));
    for (int64_t i = 0; i < (whole ? 1 : w.count); i++) {
        struct weight one = w.w;
        one.data = (char *)w.w.data + (size_t)i * bytes;
        if (whole) one.n *= w.count;
        const struct tensor own = tensor_rows(rows, i * one.n, one.n);
        TRY(pack ? dev_weight_pack(d, one, own) : dev_weight_unpack(d, own, one));
    }
    return 0;
}
int dev_weight_stack_pack(struct dev *d, struct weight_stack w, struct tensor src) { return each_of_stack(d, w, src, true); }
int dev_weight_stack_unpack(struct dev *d, struct tensor dst, struct weight_stack w) { return each_of_stack(d, w, dst, false); }

/* ---- forward ---- */

int dev_cast(struct dev *d, struct tensor dst, struct tensor src) {
    TRY(want_like("cast", "src", src, ACT, src));
    TRY(want_like("cast", "dst", dst, ACT, dst));
    if (tensor_count(dst) != tensor_count(src))
        FAIL(ERR_INVAL, "dev op cast: %lld elements into %lld", (long long)tensor_count(src), (long long)tensor_count(dst));
    HAVE(cast);
    return tensor_count(src) ? TRACED(cast, (d, dst, src), tensor_count(src), 0, 0) : 0;
}

int dev_embed_fwd(struct dev *d, struct tensor x, struct tensor ids, struct weight w) {
    TRY(want_weight("embed_fwd", w, ACT, ANY, ANY));
    TRY(want1("embed_fwd", "ids", ids, I32, ANY));
    TRY(want2("embed_fwd", "x", x, F32, ids.dim[0], w.k));
    HAVE(embed_fwd);
    return ids.dim[0] ? TRACED(embed_fwd, (d, x, ids, w), ids.dim[0], w.n, w.k) : 0;
}

int dev_gather_rows(struct dev *d, struct tensor dst, struct tensor src, struct tensor idx) {
    TRY(want2("gather_rows", "src", src, ACT, ANY, ANY));
    TRY(want1("gather_rows", "idx", idx, I32, ANY));
    TRY(want2("gather_rows", "dst", dst, set_of(src.dt), idx.dim[0], src.dim[1]));
    HAVE(gather_rows);
    return tensor_count(dst) ? TRACED(gather_rows, (d, dst, src, idx), dst.dim[0], dst.dim[1], 0) : 0;
}

int dev_rmsnorm_fwd(struct dev *d, const struct rmsnorm_args *a) {
    const struct tensor x = a->x;
    TRY(want2("rmsnorm_fwd", "x", x, F32, ANY, ANY));
    TRY(want1("rmsnorm_fwd", "w", a->w, ACT, x.dim[1]));
    TRY(want2("rmsnorm_fwd", "y", a->y, a->from.data ? F32 : set_of(a->w.dt), x.dim[0], x.dim[1]));
    if (a->from.data) TRY(want_like("rmsnorm_fwd", "from", a->from, F32, x));
    if (a->rstd.data) TRY(want1("rmsnorm_fwd", "rstd", a->rstd, F32, x.dim[0]));
    HAVE(rmsnorm_fwd);
    return tensor_count(x) ? TRACED(rmsnorm_fwd, (d, a), x.dim[0], x.dim[1], 0) : 0;
}

int dev_matmul_fwd(struct dev *d, struct tensor y, struct tensor x, struct weight w, struct tensor bias, bool add) {
    TRY(want2("matmul_fwd", "x", x, ACT, ANY, ANY));
    TRY(want_weight("matmul_fwd", w, set_of(x.dt), ANY, x.dim[1]));
    TRY(want2("matmul_fwd", "y", y, add ? F32 : F32 | set_of(x.dt), x.dim[0], w.n));
    if (bias.data) TRY(want1("matmul_fwd", "bias", bias, set_of(x.dt), w.n));
    HAVE(matmul_fwd);
    return x.dim[0] ? TRACED(matmul_fwd, (d, y, x, w, bias, add), x.dim[0], w.n, w.k) : 0;
}

int dev_matmul_add(struct dev *d, struct tensor y, struct tensor from, struct tensor x, struct weight w, struct tensor bias) {
    TRY(want2("matmul_add", "x", x, ACT, ANY, ANY));
    TRY(want_weight("matmul_add", w, set_of(x.dt), ANY, x.dim[1]));
    TRY(want2("matmul_add", "y", y, F32, x.dim[0], w.n));
    TRY(want_like("matmul_add", "from", from, F32, y));
    if (bias.data) TRY(want1("matmul_add", "bias", bias, set_of(x.dt), w.n));
    if (from.data == y.data) return dev_matmul_fwd(d, y, x, w, bias, true);
    if (!d->ops->matmul_add) {
        TRY(dev_copy(d, y.data, from.data, (size_t)tensor_count(y) * sizeof(float)));
        return dev_matmul_fwd(d, y, x, w, bias, true);
    }
    return x.dim[0] ? TRACED(matmul_add, (d, y, from, x, w, bias), x.dim[0], w.n, w.k) : 0;
}

int dev_matmul_swiglu(struct dev *d, struct tensor y, struct tensor gate_up, struct tensor x, struct weight w, struct tensor bias) {
    TRY(want2("matmul_swiglu", "x", x, ACT, ANY, ANY));
    TRY(want2("matmul_swiglu", "y", y, set_of(x.dt), x.dim[0], ANY));
    TRY(want2("matmul_swiglu", "gate_up", gate_up, set_of(x.dt), x.dim[0], 2 * y.dim[1]));
    TRY(want_weight("matmul_swiglu", w, set_of(x.dt), 2 * y.dim[1], x.dim[1]));
    if (bias.data) TRY(want1("matmul_swiglu", "bias", bias, set_of(x.dt), w.n));
    if (!d->ops->matmul_swiglu) {
        TRY(dev_matmul_fwd(d, gate_up, x, w, bias, false));
        return dev_swiglu_fwd(d, y, gate_up);
    }
    return tensor_count(y) ? TRACED(matmul_swiglu, (d, y, gate_up, x, w, bias), x.dim[0], w.n, w.k) : 0;
}

/* What qkv_fwd and qkv_bwd have in common. */
static int check_qkv(const char *op, const struct qkv_args *a) {
    const int64_t n_heads = a->n_q_heads + 2 * a->n_kv_heads, dim = a->head_dim;
    TRY(want_heads(op, a->n_q_heads, a->n_kv_heads, dim));
    TRY(want2(op, "qkv", a->qkv, ACT, ANY, n_heads * dim));
    const unsigned act = set_of(a->qkv.dt);
    if (a->q_norm.data) TRY(want1(op, "q_norm", a->q_norm, act, dim));
    if (a->k_norm.data) TRY(want1(op, "k_norm", a->k_norm, act, dim));
    TRY(want(op, "rope", a->rope, F32, 3, (const int64_t[]){ANY, dim / 2, 2}));
    if (a->rotary < 0 || a->rotary > dim || a->rotary % 2 != 0)
        FAIL(ERR_INVAL, "dev op %s: RoPE of %lld elements of a head of %lld", op, (long long)a->rotary, (long long)dim);
    TRY(want1(op, "pos", a->pos, I32, a->qkv.dim[0]));
    return want1(op, "slots", a->slots, I32, a->qkv.dim[0]);
}

int dev_qkv_fwd(struct dev *d, const struct qkv_args *a) {
    TRY(check_qkv("qkv_fwd", a));
    const unsigned act = set_of(a->qkv.dt);
    TRY(want2("qkv_fwd", "q", a->q, act, a->qkv.dim[0], a->n_q_heads * a->head_dim));
    TRY(want_kv("qkv_fwd", "kv.k", a->kv.k, act, a->n_kv_heads, a->head_dim));
    TRY(want_like("qkv_fwd", "kv.v", a->kv.v, act, a->kv.k));
    HAVE(qkv_fwd);
    return a->qkv.dim[0] ? TRACED(qkv_fwd, (d, a), a->qkv.dim[0], a->qkv.dim[1], 0) : 0;
}

/* What attn_fwd and attn_bwd have in common. */
static int check_attn(const char *op, const struct attn_args *a) {
    const struct attn_seqs *s = &a->seqs;
    TRY(want_heads(op, a->n_q_heads, a->n_kv_heads, a->head_dim));
    TRY(want2(op, "q", a->q, ACT, ANY, a->n_q_heads * a->head_dim));
    const unsigned act = set_of(a->q.dt);
    TRY(want_kv(op, "kv.k", a->kv.k, act, a->n_kv_heads, a->head_dim));
    TRY(want_like(op, "kv.v", a->kv.v, act, a->kv.k));
    TRY(want_like(op, "out", a->out, act, a->q));
    if (a->lse.data) TRY(want2(op, "lse", a->lse, F32, a->q.dim[0], a->n_q_heads));
    if (a->window < 0) FAIL(ERR_INVAL, "dev op %s: window %lld", op, (long long)a->window);
    if (!(a->softcap >= 0)) FAIL(ERR_INVAL, "dev op %s: softcap %g", op, (double)a->softcap);
    if (s->n < 0 || (s->n > 0 && a->kv.k.dim[2] <= 0))
        FAIL(ERR_INVAL, "dev op %s: %lld sequences over KV blocks of %lld", op, (long long)s->n, (long long)a->kv.k.dim[2]);
    TRY(want1(op, "q_start", s->q_start, I32, s->n + 1));
    TRY(want1(op, "pos0", s->pos0, I32, s->n));
    if (s->block_table.data == NULL) return want1(op, "kv_start", s->kv_start, I32, s->n);
    TRY(want2(op, "block_table", s->block_table, I32, s->n, ANY));
    if (s->max_kv > s->block_table.dim[1] * a->kv.k.dim[2])
        FAIL(ERR_INVAL, "dev op %s: %lld keys do not fit %lld KV blocks of %lld", op, (long long)s->max_kv,
             (long long)s->block_table.dim[1], (long long)a->kv.k.dim[2]);
    return 0;
}

int dev_attn_fwd(struct dev *d, const struct attn_args *a) {
    TRY(check_attn("attn_fwd", a));
    HAVE(attn_fwd);
    return a->q.dim[0] && a->seqs.n ? TRACED(attn_fwd, (d, a), a->q.dim[0], a->q.dim[1], 0) : 0;
}

int dev_qkv_attn_fwd(struct dev *d, const struct qkv_args *q, const struct attn_args *a) {
    const char *const op = "qkv_attn_fwd";
    TRY(check_qkv(op, q));
    TRY(check_attn(op, a));
    TRY(want2(op, "q", q->q, set_of(q->qkv.dt), q->qkv.dim[0], q->n_q_heads * q->head_dim));
    TRY(want_like(op, "attention's q", a->q, set_of(q->q.dt), q->q));
    if (a->seqs.max_q > 1 || a->n_q_heads != q->n_q_heads || a->n_kv_heads != q->n_kv_heads || a->head_dim != q->head_dim ||
        a->q.data != q->q.data || a->kv.k.data != q->kv.k.data || a->kv.v.data != q->kv.v.data)
        FAIL(ERR_INVAL, "dev op %s: both share q, KV cache and heads, and sequences have at most one row, not %lld", op,
             (long long)a->seqs.max_q);
    if (!d->ops->qkv_attn_fwd || dev_rope_reorders(q) || q->kind != NORM_CAST_SCALE || a->softcap > 0) {
        TRY(dev_qkv_fwd(d, q));
        return dev_attn_fwd(d, a);
    }
    return a->q.dim[0] && a->seqs.n ? TRACED(qkv_attn_fwd, (d, q, a), a->q.dim[0], a->q.dim[1], 0) : 0;
}

static int check_glu(const char *op, struct tensor y, struct tensor gate_up) {
    TRY(want2(op, "y", y, ACT, ANY, ANY));
    return want2(op, "gate_up", gate_up, set_of(y.dt), y.dim[0], 2 * y.dim[1]);
}
int dev_geglu_fwd(struct dev *d, struct tensor y, struct tensor gate_up) {
    TRY(check_glu("geglu_fwd", y, gate_up));
    HAVE(geglu_fwd);
    return tensor_count(y) ? TRACED(geglu_fwd, (d, y, gate_up), y.dim[0], y.dim[1], 0) : 0;
}
int dev_swiglu_fwd(struct dev *d, struct tensor y, struct tensor gate_up) {
    TRY(check_glu("swiglu_fwd", y, gate_up));
    HAVE(swiglu_fwd);
    return tensor_count(y) ? TRACED(swiglu_fwd, (d, y, gate_up), y.dim[0], y.dim[1], 0) : 0;
}

/* ---- CUDA graphs ---- */

bool dev_has_graphs(const struct dev *d) { return d->ops->caps.graphs; }
int dev_graph_begin(struct dev *d) {
    HAVE(graph_begin);
    dev_trace__pause(d, true); /* captured calls take no time of their own */
    return d->ops->graph_begin(d);
}
int dev_graph_end(struct dev *d, void **graph) {
    *graph = NULL;
    HAVE(graph_end);
    dev_trace__pause(d, false);
    return d->ops->graph_end(d, graph);
}
int dev_graph_run(struct dev *d, void *graph) {
    HAVE(graph_run);
    return TRACED(graph_run, (d, graph), 0, 0, 0);
}
void dev_graph_list(struct dev *d, FILE *to) { d->graph_list = to; }
void dev_graph_free(struct dev *d, void *graph) {
    if (graph) d->ops->graph_free(d, graph);
}

/* ---- backward ---- */

static int check_qk_norm(const char *op, const struct qk_norm_args *a) {
    const enum dtype act = a->x.dt;
    TRY(want2(op, "x", a->x, ACT, ANY, ANY));
    TRY(want1(op, "q_norm", a->q_norm, set_of(act), ANY));
    TRY(want1(op, "k_norm", a->k_norm, set_of(act), ANY));
    if (a->rstd.data) TRY(want2(op, "rstd", a->rstd, F32, a->x.dim[0], 2));
    if (a->q_norm.dim[0] + 2 * a->k_norm.dim[0] != a->x.dim[1])
        FAIL(ERR_INVAL, "dev op %s: %lld queries and %lld keys in rows of %lld", op, (long long)a->q_norm.dim[0],
             (long long)a->k_norm.dim[0], (long long)a->x.dim[1]);
    return 0;
}
int dev_qk_norm_fwd(struct dev *d, const struct qk_norm_args *a) {
    TRY(check_qk_norm("qk_norm_fwd", a));
    TRY(want_like("qk_norm_fwd", "y", a->y, set_of(a->x.dt), a->x));
    HAVE(qk_norm_fwd);
    return tensor_count(a->x) ? TRACED(qk_norm_fwd, (d, a), a->x.dim[0], a->x.dim[1], 0) : 0;
}
int dev_qk_norm_bwd(struct dev *d, const struct qk_norm_args *a, const struct qk_norm_bwd_args *g) {
    TRY(check_qk_norm("qk_norm_bwd", a));
    TRY(want2("qk_norm_bwd", "rstd", a->rstd, F32, a->x.dim[0], 2));
    TRY(want_like("qk_norm_bwd", "dy", g->dy, set_of(a->x.dt), a->x));
    TRY(want1("qk_norm_bwd", "dq_norm", g->dq_norm, F32, a->q_norm.dim[0]));
    TRY(want1("qk_norm_bwd", "dk_norm", g->dk_norm, F32, a->k_norm.dim[0]));
    HAVE(qk_norm_bwd);
    return tensor_count(a->x) ? TRACED(qk_norm_bwd, (d, a, g), a->x.dim[0], a->x.dim[1], 0) : 0;
}

static int check_rope_norm(const char *op, const struct rope_norm_args *a) {
    const int64_t dim = a->head_dim, rows = a->x.dim[0];
    const enum dtype act = a->x.dt;
    if (dim < 2 || dim % 2 != 0) FAIL(ERR_INVAL, "dev op %s: head_dim %lld", op, (long long)dim);
    TRY(want2(op, "x", a->x, ACT, ANY, (a->n_q_heads + 2 * a->n_kv_heads) * dim));
    TRY(want1(op, "q_norm", a->q_norm, set_of(act), dim));
    TRY(want1(op, "k_norm", a->k_norm, set_of(act), dim));
    TRY(want(op, "rope", a->rope, F32, 3, (const int64_t[]){ANY, dim / 2, 2}));
    TRY(want1(op, "pos", a->pos, I32, rows));
    return a->rstd.data ? want2(op, "rstd", a->rstd, F32, rows, a->n_q_heads + a->n_kv_heads) : 0;
}
int dev_rope_norm_fwd(struct dev *d, const struct rope_norm_args *a) {
    TRY(check_rope_norm("rope_norm_fwd", a));
    TRY(want_like("rope_norm_fwd", "y", a->y, set_of(a->x.dt), a->x));
    HAVE(rope_norm_fwd);
    return tensor_count(a->x) ? TRACED(rope_norm_fwd, (d, a), a->x.dim[0], a->x.dim[1], 0) : 0;
}
int dev_rope_norm_bwd(struct dev *d, const struct rope_norm_args *a, const struct qk_norm_bwd_args *g) {
    TRY(check_rope_norm("rope_norm_bwd", a));
    TRY(want2("rope_norm_bwd", "rstd", a->rstd, F32, a->x.dim[0], a->n_q_heads + a->n_kv_heads));
    TRY(want_like("rope_norm_bwd", "dy", g->dy, set_of(a->x.dt), a->x));
    TRY(want1("rope_norm_bwd", "dq_norm", g->dq_norm, F32, a->head_dim));
    TRY(want1("rope_norm_bwd", "dk_norm", g->dk_norm, F32, a->head_dim));
    HAVE(rope_norm_bwd);
    return tensor_count(a->x) ? TRACED(rope_norm_bwd, (d, a, g), a->x.dim[0], a->x.dim[1], 0) : 0;
}

int dev_scale_rows(struct dev *d, struct tensor x, struct tensor factor, struct tensor pos) {
    TRY(want2("scale_rows", "x", x, ACT, ANY, ANY));
    TRY(want1("scale_rows", "factor", factor, F32, ANY));
    TRY(want1("scale_rows", "pos", pos, I32, x.dim[0]));
    HAVE(scale_rows);
    return tensor_count(x) ? TRACED(scale_rows, (d, x, factor, pos), x.dim[0], x.dim[1], 0) : 0;
}

int dev__check_join_columns(const struct join_columns_args *a) {
    static const char *const op = "join_columns";
    TRY(want2(op, "y", a->y, a->from.data ? F32 : ACT, ANY, ANY));
    TRY(want1(op, "x", a->x, set_of(a->y.dt), tensor_count(a->y)));
    if (a->from.data) TRY(want_like(op, "from", a->from, F32, a->y));
    bool fits = a->n >= 1 && a->n <= DEV_MOST_COLUMNS && a->cut[0] == 0;
    for (int i = 0; fits && i < a->n; i++) fits = a->cut[i] <= a->cut[i + 1];
    if (!fits || a->cut[a->n] != a->y.dim[1])
        FAIL(ERR_INVAL, "dev op %s: %d blocks that are not the %lld columns", op, a->n, (long long)a->y.dim[1]);
    return 0;
}

int dev_join_columns(struct dev *d, const struct join_columns_args *a) {
    TRY(dev__check_join_columns(a));
    HAVE(join_columns);
    return tensor_count(a->y) ? TRACED(join_columns, (d, a), a->y.dim[0], a->y.dim[1], 0) : 0;
}

int dev_copy_columns(struct dev *d, const struct copy_columns_args *a) {
    static const char *const op = "copy_columns";
    TRY(want2(op, "y", a->y, ACT, ANY, ANY));
    TRY(want2(op, "x", a->x, set_of(a->y.dt), a->y.dim[0], ANY));
    if (a->n < 0 || a->x_at < 0 || a->y_at < 0 || a->n > a->x.dim[1] - a->x_at || a->n > a->y.dim[1] - a->y_at)
        FAIL(ERR_INVAL, "dev op %s: %lld columns from %lld of %lld to %lld of %lld", op, (long long)a->n, (long long)a->x_at,
             (long long)a->x.dim[1], (long long)a->y_at, (long long)a->y.dim[1]);
    HAVE(copy_columns);
    return a->n > 0 && a->y.dim[0] > 0 ? TRACED(copy_columns, (d, a), a->y.dim[0], a->n, 0) : 0;
}

int dev_copy_rows(struct dev *d, const struct copy_rows_args *a) {
    static const char *const op = "copy_rows";
    TRY(want2(op, "x", a->x, ACT, ANY, ANY));
    const int64_t rows = a->x.dim[0];
    for (int64_t i = 0; i < a->n; i++)
        if (a->from[i] < 0 || a->from[i] >= rows || a->to[i] < 0 || a->to[i] >= rows || a->from[i] == a->to[i])
            FAIL(ERR_INVAL, "dev op %s: row %d to row %d of %lld", op, (int)a->from[i], (int)a->to[i], (long long)rows);
    HAVE(copy_rows);
    return a->n > 0 && a->x.dim[1] > 0 ? TRACED(copy_rows, (d, a), a->n, a->x.dim[1], 0) : 0;
}

int dev_scatter_rows_add(struct dev *d, struct tensor dst, struct tensor src, struct tensor idx) {
    TRY(want2("scatter_rows_add", "dst", dst, F32, ANY, ANY));
    TRY(want1("scatter_rows_add", "idx", idx, I32, ANY));
    TRY(want2("scatter_rows_add", "src", src, ACT, idx.dim[0], dst.dim[1]));
    HAVE(scatter_rows_add);
    return tensor_count(src) ? TRACED(scatter_rows_add, (d, dst, src, idx), src.dim[0], src.dim[1], 0) : 0;
}

int dev_embed_bwd(struct dev *d, struct tensor dw, struct tensor ids, struct tensor dx) {
    TRY(want2("embed_bwd", "dw", dw, F32, ANY, ANY));
    TRY(want1("embed_bwd", "ids", ids, I32, ANY));
    TRY(want2("embed_bwd", "dx", dx, F32, ids.dim[0], dw.dim[1]));
    return dev_embed_bwd_part(d, tensor_1d(dw.data, DT_F32, tensor_count(dw)), 0, dw.dim[0], ids, dx);
}
int dev_embed_bwd_part(struct dev *d, struct tensor dw, int64_t lo, int64_t vocab, struct tensor ids, struct tensor dx) {
    TRY(want1("embed_bwd", "dw", dw, F32, ANY));
    TRY(want1("embed_bwd", "ids", ids, I32, ANY));
    TRY(want2("embed_bwd", "dx", dx, F32, ids.dim[0], ANY));
    if (lo < 0 || vocab < 0 || lo + dw.dim[0] > vocab * dx.dim[1])
        FAIL(ERR_INVAL, "dev op embed_bwd: elements %lld to %lld are not in a table of %lld x %lld", (long long)lo,
             (long long)(lo + dw.dim[0]), (long long)vocab, (long long)dx.dim[1]);
    HAVE(embed_bwd);
    return tensor_count(dx) && dw.dim[0]
               ? TRACED(embed_bwd, (d, dw, lo, vocab, ids, dx), ids.dim[0], dw.dim[0] / dx.dim[1], dx.dim[1])
               : 0;
}

int dev_rmsnorm_bwd(struct dev *d, const struct rmsnorm_bwd_args *a) {
    const struct tensor x = a->x;
    TRY(want2("rmsnorm_bwd", "x", x, F32, ANY, ANY));
    TRY(want1("rmsnorm_bwd", "w", a->w, ACT, x.dim[1]));
    TRY(want1("rmsnorm_bwd", "rstd", a->rstd, F32, x.dim[0]));
    TRY(want_like("rmsnorm_bwd", "dy", a->dy, ACT, x));
    TRY(want_like("rmsnorm_bwd", "dx", a->dx, F32, x));
    if (a->rounded.data) TRY(want_like("rmsnorm_bwd", "rounded", a->rounded, ACT, x));
    TRY(want1("rmsnorm_bwd", "dw", a->dw, F32, x.dim[1]));
    HAVE(rmsnorm_bwd);
    return tensor_count(x) ? TRACED(rmsnorm_bwd, (d, a), x.dim[0], x.dim[1], 0) : 0;
}

int dev_matmul_dx(struct dev *d, struct tensor dx, struct tensor dy, struct weight w, bool add) {
    TRY(want2("matmul_dx", "dy", dy, ACT, ANY, ANY));
    TRY(want_weight("matmul_dx", w, set_of(dy.dt), dy.dim[1], ANY));
    TRY(want2("matmul_dx", "dx", dx, add ? F32 : F32 | set_of(dy.dt), dy.dim[0], w.k));
    HAVE(matmul_dx);
    return dy.dim[0] ? TRACED(matmul_dx, (d, dx, dy, w, add), dy.dim[0], w.n, w.k) : 0;
}

int dev__no_rows(struct dev *d, struct tensor dw, struct tensor db, bool add) {
    if (add) return 0;
    if (dw.data) TRY(dev_zero(d, dw.data, (size_t)tensor_count(dw) * sizeof(float)));
    return db.data ? dev_zero(d, db.data, (size_t)tensor_count(db) * sizeof(float)) : 0;
}

int dev_matmul_dw(struct dev *d, struct tensor dw, struct tensor db, struct tensor dy, struct tensor x, bool add) {
    TRY(want2("matmul_dw", "dy", dy, ACT, ANY, ANY));
    TRY(want2("matmul_dw", "x", x, set_of(dy.dt), dy.dim[0], ANY));
    TRY(want2("matmul_dw", "dw", dw, F32, dy.dim[1], x.dim[1]));
    if (db.data) TRY(want1("matmul_dw", "db", db, F32, dy.dim[1]));
    HAVE(matmul_dw);
    return dy.dim[0] ? TRACED(matmul_dw, (d, dw, db, dy, x, add), dy.dim[0], dy.dim[1], x.dim[1]) : dev__no_rows(d, dw, db, add);
}

int dev_qkv_bwd(struct dev *d, const struct qkv_args *a, const struct qkv_bwd_args *g) {
    TRY(check_qkv("qkv_bwd", a));
    const unsigned act = set_of(a->qkv.dt);
    TRY(want2("qkv_bwd", "dq", g->dq, act, a->qkv.dim[0], a->n_q_heads * a->head_dim));
    TRY(want_kv("qkv_bwd", "dk", g->dk, F32, a->n_kv_heads, a->head_dim));
    TRY(want_like("qkv_bwd", "dv", g->dv, F32, g->dk));
    TRY(want_like("qkv_bwd", "dqkv", g->dqkv, act, a->qkv));
    if (a->q_norm.data) TRY(want1("qkv_bwd", "dq_norm", g->dq_norm, F32, a->head_dim));
    if (a->k_norm.data) TRY(want1("qkv_bwd", "dk_norm", g->dk_norm, F32, a->head_dim));
    HAVE(qkv_bwd);
    return a->qkv.dim[0] ? TRACED(qkv_bwd, (d, a, g), a->qkv.dim[0], a->qkv.dim[1], 0) : 0;
}

int dev_attn_bwd(struct dev *d, const struct attn_args *a, struct tensor dout, struct tensor dq, struct tensor dk,
                 struct tensor dv) {
    TRY(check_attn("attn_bwd", a));
    if (a->seqs.block_table.data) FAIL(ERR_INVAL, "dev op attn_bwd: a paged KV cache has no backward");
    TRY(want2("attn_bwd", "lse", a->lse, F32, a->q.dim[0], a->n_q_heads));
    TRY(want_like("attn_bwd", "dout", dout, set_of(a->q.dt), a->q));
    TRY(want_like("attn_bwd", "dq", dq, set_of(a->q.dt), a->q));
    TRY(want_like("attn_bwd", "dk", dk, F32, a->kv.k));
    TRY(want_like("attn_bwd", "dv", dv, F32, a->kv.k));
    HAVE(attn_bwd);
    return a->q.dim[0] && a->seqs.n ? TRACED(attn_bwd, (d, a, dout, dq, dk, dv), a->q.dim[0], a->q.dim[1], 0) : 0;
}

int dev_geglu_bwd(struct dev *d, struct tensor dgate_up, struct tensor dy, struct tensor gate_up) {
    TRY(check_glu("geglu_bwd", dy, gate_up));
    TRY(want_like("geglu_bwd", "dgate_up", dgate_up, set_of(dy.dt), gate_up));
    HAVE(geglu_bwd);
    return tensor_count(dy) ? TRACED(geglu_bwd, (d, dgate_up, dy, gate_up), dy.dim[0], dy.dim[1], 0) : 0;
}
int dev_swiglu_bwd(struct dev *d, struct tensor dgate_up, struct tensor dy, struct tensor gate_up) {
    TRY(check_glu("swiglu_bwd", dy, gate_up));
    TRY(want_like("swiglu_bwd", "dgate_up", dgate_up, set_of(dy.dt), gate_up));
    HAVE(swiglu_bwd);
    return tensor_count(dy) ? TRACED(swiglu_bwd, (d, dgate_up, dy, gate_up), dy.dim[0], dy.dim[1], 0) : 0;
}

/* ---- optimizer ---- */

int dev_sumsq(struct dev *d, struct tensor sums, struct tensor x, struct tensor segments, int64_t base) {
    TRY(want1("sumsq", "x", x, F32, ANY));
    TRY(want2("sumsq", "segments", segments, I64, ANY, 2));
    TRY(want1("sumsq", "sums", sums, F64, segments.dim[0]));
    HAVE(sumsq);
    return segments.dim[0] ? TRACED(sumsq, (d, sums, x, segments, base), segments.dim[0], x.dim[0], 0) : 0;
}

int dev_checksum(struct dev *d, struct tensor sum, struct tensor bytes) {
    TRY(want1("checksum", "bytes", bytes, U8, ANY));
    TRY(want1("checksum", "sum", sum, I64, 1));
    HAVE(checksum);
    return TRACED(checksum, (d, sum, bytes), bytes.dim[0], 0, 0);
}

int dev_fold(struct dev *d, struct tensor y, const struct tensor *x, int n, bool add) {
    TRY(want_like("fold", "y", y, F32, y)); /* any shape */
    if (n < 1) FAIL(ERR_INVAL, "dev op fold: %d arrays", n);
    for (int i = 0; i < n; i++) {
        TRY(want_like("fold", "x", x[i], F32, y));
        if (x[i].data == y.data && y.data) FAIL(ERR_INVAL, "dev op fold: array %d is the result", i);
    }
    HAVE(fold);
    return tensor_count(y) ? TRACED(fold, (d, y, x, n, add), tensor_count(y), n, 0) : 0;
}

static int check_adamw(const struct adamw_args *a) {
    TRY(want1("adamw", "p", a->p, F32, ANY));
    TRY(want_like("adamw", "m", a->m, F32, a->p));
    TRY(want_like("adamw", "v", a->v, F32, a->p));
    TRY(want_like("adamw", "g", a->g, F32, a->p));
    if (a->step < 1) FAIL(ERR_INVAL, "dev op adamw: step %lld, the first is 1", (long long)a->step);
    return 0;
}
int dev_adamw(struct dev *d, const struct adamw_args *a) {
    TRY(check_adamw(a));
    HAVE(adamw);
    return a->p.dim[0] ? TRACED(adamw, (d, a), a->p.dim[0], 0, 0) : 0;
}
int dev_adamw_round(struct dev *d, const struct adamw_args *a, struct tensor rounded) {
    TRY(check_adamw(a));
    TRY(want_like("adamw_round", "rounded", rounded, ACT, a->p));
    HAVE(adamw);
    if (a->p.dim[0] == 0) return 0;
    if (d->ops->adamw_round) return TRACED(adamw_round, (d, a, rounded), a->p.dim[0], 0, 0);
    TRY(dev_adamw(d, a));
    return dev_cast(d, rounded, a->p);
}

int dev_adaptive(struct dev *d, const struct adaptive_args *a) {
    const bool rmsprop = a->rule == ADAPTIVE_RMSPROP;
    TRY(want1("adaptive", "p", a->p, F32, ANY));
    TRY(want_like("adaptive", "v", a->v, F32, a->p));
    TRY(want_like("adaptive", "g", a->g, F32, a->p));
    if (a->m.data || !rmsprop) TRY(want_like("adaptive", "m", a->m, F32, a->p));
    if (a->x.data) TRY(want_like("adaptive", "x", a->x, F32, a->p));
    if (a->x.data && a->rule == ADAPTIVE_RADAM) FAIL(ERR_INVAL, "dev op adaptive: RAdam has no third mean");
    if (a->step < 1) FAIL(ERR_INVAL, "dev op adaptive: step %lld, the first is 1", (long long)a->step);
    HAVE(adaptive);
    return a->p.dim[0] ? TRACED(adaptive, (d, a), a->p.dim[0], 0, 0) : 0;
}

int dev_axpby(struct dev *d, struct tensor y, float a, struct tensor x, float b) {
    TRY(want_like("axpby", "y", y, F32, y)); /* any shape */
    TRY(want_like("axpby", "x", x, F32, y));
    HAVE(axpby);
    return tensor_count(y) ? TRACED(axpby, (d, y, a, x, b), tensor_count(y), 0, 0) : 0;
}

static int check_quant8(const char *op, const struct quant8_args *a) {
    TRY(want1(op, "x", a->x, F32, ANY));
    TRY(want_like(op, "code", a->code, U8, a->x));
    TRY(want1(op, "scale", a->scale, F32, (a->x.dim[0] + DEV_QUANT_BLOCK - 1) / DEV_QUANT_BLOCK));
    return want1(op, "book", a->book, F32, 256);
}

int dev_quant8(struct dev *d, const struct quant8_args *a) {
    TRY(check_quant8("quant8", a));
    HAVE(quant8);
    return a->x.dim[0] ? TRACED(quant8, (d, a), a->x.dim[0], 0, 0) : 0;
}

int dev_dequant8(struct dev *d, const struct quant8_args *a) {
    TRY(check_quant8("dequant8", a));
    HAVE(dequant8);
    return a->x.dim[0] ? TRACED(dequant8, (d, a), a->x.dim[0], 0, 0) : 0;
}

/* ---- LoRA and quantised weights ---- */

static int want_block(const char *name, struct tensor t, int64_t row, int64_t col, int64_t next, const struct add_block_args *a) {
    TRY(want2("add_block", name, t, F32, ANY, ANY));
    if (row < 0 || col < 0 || a->rows < 0 || a->cols < 0 || row + a->rows > t.dim[0] || col + a->cols > t.dim[1])
        FAIL(ERR_INVAL, "dev op add_block: rows [%lld, %lld) x columns [%lld, %lld) are not inside %s (%lld, %lld)", (long long)row,
             (long long)(row + a->rows), (long long)col, (long long)(col + a->cols), name, (long long)t.dim[0],
             (long long)t.dim[1]);
    if (a->count > 1 && next < tensor_count(t))
        FAIL(ERR_INVAL, "dev op add_block: %s of a stack overlap: %lld elements, the next one is %lld further", name,
             (long long)tensor_count(t), (long long)next);
    return 0;
}

int dev_add_block(struct dev *d, const struct add_block_args *a) {
    struct add_block_args job = *a;
    TRY(want_block("dst", a->dst, a->dst_row, a->dst_col, a->dst_next, a));
    TRY(want_block("src", a->src, a->src_row, a->src_col, a->src_next, a));
    if (a->count < 0) FAIL(ERR_INVAL, "dev op add_block: a stack of %lld matrices", (long long)a->count);
    HAVE(add_block);
    if (job.count == 0) job.count = 1;
    return a->rows && a->cols ? d->ops->add_block(d, &job) : 0;
}

/* The 16 quantiles of bitsandbytes' NF4 (its create_normal_map, offset 0.9677083). */
const float dev_nf4_book[16] = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};

int dev_dequant(struct dev *d, const struct dequant_args *a) {
    TRY(want2("dequant", "w", a->w, ACT, ANY, ANY));
    const int64_t n = tensor_count(a->w), row = a->w.dim[0];
    const bool nf4 = a->kind == QUANT_NF4;
    if (a->kind != QUANT_NF4 && a->kind != QUANT_INT8) FAIL(ERR_INVAL, "dev op dequant: kind %d", (int)a->kind);
    TRY(want1("dequant", "code", a->code, U8, nf4 ? (n + 1) / 2 : n));
    TRY(want1("dequant", "scale", a->scale, F32, nf4 ? (n + DEV_NF4_BLOCK - 1) / DEV_NF4_BLOCK : row));
    HAVE(dequant);
    return n ? TRACED(dequant, (d, a), n, 0, 0) : 0;
}
