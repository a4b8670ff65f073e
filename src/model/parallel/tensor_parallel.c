/* tensor_parallel.c - see tensor_parallel.h. Which rows a rank has, how they are taken, and the gathers of a pass.
 *
 * The head is cut at chunks of the vocabulary, in which every backend computes logits: those of a rank are whole chunks of one
 * rank, so they have the same bits by construction. Logits are then gathered, and all ranks draw the same tokens. */
#include "model/parallel/tensor_parallel.h"

#include "base/buf.h"
#include "base/err.h"
#include "model/lora/lora_int.h"
#include "model/model_int.h"
#include "model/parallel/weight_streaming.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum {
    NARROW = 8, /* columns of a rank are a multiple of it, but for the last rank's: rows of 16 bytes */
    WIDE = 64,  /* of wide matrices */
    MOST_RANGES = 5,
    LOGIT_ROWS = 64, /* of logits that fit at once what is gathered, at least */
};

struct model_tp {
    struct model *whole;
    struct collective *group;
    bool in_graph; /* the gathers of a pass may be in a CUDA graph */
    bool left_out; /* there are none: model_tp_leave_out_gathers */
    int rank, size;
    int64_t cut[MODEL_TP_DIMS][DEV_MOST_COLUMNS + 1]; /* columns that ranks compute: rank r has cut[r]..cut[r + 1] */
    int64_t max_rows;
    bool taken;              /* all rows are here, for good */
    char *send;              /* columns of all ranks, gathered: shared with them */
    void *joined;            /* the same as one matrix; what model__tp_delta_rows says */
    void *row[2];            /* q, k, v of all heads, and their norms; families that normalise whole rows */
    void *rows[2];           /* where weights are packed: a group's rows, and those of them that are this rank's */
    struct lora_group *lora; /* of its groups, in their order; NULL: no adapter */
};

/* ---- which outputs a rank has ---- */

struct heads {
    int64_t q0, q1, kv0, kv1; /* [q0, q1) of the queries' and [kv0, kv1) of the keys' */
};

/* By key head; where ranks are more, those of one key head share its queries. */
static struct heads split_heads(int64_t q, int64_t kv, int rank, int size) {
    const int64_t group = q / kv, at = kv * rank / size;
    if (size <= kv) {
        const int64_t end = kv * (rank + 1) / size;
        return (struct heads){at * group, end * group, at, end};
    }
    const int64_t first = (at * size + kv - 1) / kv, n = ((at + 1) * size + kv - 1) / kv - first, i = rank - first;
    return (struct heads){at * group + group * i / n, at * group + group * (i + 1) / n, at, at + 1};
}

static struct heads heads_of(const struct model_config *c, int rank, int size) {
    return split_heads(c->n_q_heads, c->n_kv_heads, rank, size);
}
/* Of gated delta nets, whose value heads are as queries. */
static struct heads delta_heads(const struct model_config *c, int rank, int size) {
    return c->delta.k_heads ? split_heads(c->delta.v_heads, c->delta.k_heads, rank, size) : (struct heads){0};
}

/* Where the keys of a rank begin, of one that is not the first with its key head behind them: each key has one rank. */
static int64_t first_key(const struct model_config *c, int rank, int size) {
    if (rank == size) return c->n_kv_heads;
    const int64_t at = heads_of(c, rank, size).kv0;
    return at + (rank > 0 && size > c->n_kv_heads && heads_of(c, rank - 1, size).kv0 == at);
}

static int64_t cut_of(int64_t n, int rank, int size) {
    const int64_t unit = n >= (int64_t)WIDE * 4 * size ? WIDE : NARROW;
    return rank == size ? n : n / unit * rank / size * unit;
}

/* Whole chunks of the vocabulary; a rank may have none of a small one. */
static int64_t cut_of_vocab(int64_t n, int rank, int size) {
    const int64_t chunk = DEV_VOCAB_CHUNK, at = (n + chunk - 1) / chunk * rank / size * chunk;
    return at < n ? at : n;
}

/* What attention gives of a head, and the width of an MLP, if there is one. */
static int64_t head_width(const struct model_config *c) { return c->mla.kv_rank ? c->mla.v : c->head_dim; }
static int64_t dense_ffn(const struct model_config *c) {
    return model_has_group(c, offsetof(struct model_layer, gate_up)) ? c->ffn : 0;
}
static int64_t shared_ffn(const struct model_config *c) {
    return model_has_group(c, offsetof(struct model_layer, shared_down)) ? c->shared_ffn : 0;
}

static void make_cuts(const struct model_config *c, int size, int64_t cut[MODEL_TP_DIMS][DEV_MOST_COLUMNS + 1]) {
    for (int r = 0; r <= size; r++) {
        cut[MODEL_TP_HEADS][r] = (r < size ? heads_of(c, r, size).q0 : c->n_q_heads) * head_width(c);
        cut[MODEL_TP_KEYS][r] = first_key(c, r, size) * c->head_dim;
        cut[MODEL_TP_DELTA][r] = (r < size ? delta_heads(c, r, size).q0 : c->delta.v_heads) * c->delta.v_dim;
        cut[MODEL_TP_FFN][r] = cut_of(dense_ffn(c), r, size);
        cut[MODEL_TP_SHARED][r] = cut_of(shared_ffn(c), r, size);
        cut[MODEL_TP_HIDDEN][r] = cut_of(c->hidden, r, size);
        cut[MODEL_TP_VOCAB][r] = cut_of_vocab(c->vocab, r, size);
    }
}

/* Outputs of a head's queries, in heads: a gate behind each where attention has output gates. */
static int64_t query_parts(const struct model_config *c) { return c->features & MODEL_OUTPUT_GATE ? 2 : 1; }

/* Whether the outputs of a group are those that rows_of splits. */
static bool has_rows(const struct model_config *c, const struct model_group_row *row) {
    int64_t n = 0;
    for (int i = 0; i < MODEL_MAX_PARTS && row->part[i].name; i++) n += model_dim(c, row->part[i].rows);
    if (row->place == offsetof(struct model_layer, qkv))
        return n == (query_parts(c) * c->n_q_heads + 2 * c->n_kv_heads) * c->head_dim;
    if (row->place == offsetof(struct model_layer, gate_up)) return n == 2 * c->ffn;
    const bool sums = row->place == offsetof(struct model_layer, o) || row->place == offsetof(struct model_layer, down);
    return !sums || n == c->hidden;
}

/* For each rank one of the queries' at least. */
static bool enough_heads(int64_t q, int64_t kv, int size) {
    const int64_t share = (size + kv - 1) / kv; /* ranks of a key head */
    return share <= q / kv;
}

/* Whether rows that any two ranks have end with a block of NF4: rows and their lengths are multiples of NARROW. */
static bool whole_blocks(const struct model_config *c) {
    const int64_t n[] = {c->hidden,     c->ffn,        model_query_dim(c), c->delta.k_dim,        c->delta.v_dim,
                         c->shared_ffn, c->mla.q_rank, c->mla.kv_rank,     c->mla.nope + c->mla.v};
    bool whole = NARROW * NARROW % DEV_NF4_BLOCK == 0;
    for (size_t i = 0; i < sizeof n / sizeof *n; i++) whole &= n[i] % NARROW == 0;
    return whole;
}

const char *model_tp_unable(const struct model_config *c, enum quant_kind quant, int size) {
#define PLACE(x) offsetof(struct model_layer, x)
    static const size_t known[] = {
        PLACE(attn_norm),   PLACE(qkv),           PLACE(q_norm),   PLACE(k_norm),         PLACE(q_row_norm),  PLACE(k_row_norm),
        PLACE(q_rope_norm), PLACE(k_rope_norm),   PLACE(o),        PLACE(attn_post_norm), PLACE(mlp_norm),    PLACE(gate_up),
        PLACE(down),        PLACE(mlp_post_norm), PLACE(delta_in), PLACE(delta_conv),     PLACE(delta_a_log), PLACE(delta_dt_bias),
        PLACE(delta_norm),  PLACE(sinks),         PLACE(mla_q_a),  PLACE(mla_q_norm),     PLACE(mla_q),       PLACE(mla_kv_a),
        PLACE(mla_kv_norm), PLACE(mla_kv),        PLACE(router),   PLACE(expert_gate_up), PLACE(expert_down), PLACE(shared_gate_up),
        PLACE(shared_down), PLACE(shared_gate)};
#undef PLACE
    if (size > DEV_MOST_COLUMNS) return "at most 16 ranks split a model";
    if (quant == QUANT_NF4 && !whole_blocks(c)) return "its rows end within blocks of NF4";
    for (const struct model_group_row *row = c->family->layer; row->part->name; row++) {
        bool is_known = !model_has_group(c, row->place);
        for (size_t i = 0; i < sizeof known / sizeof *known; i++) is_known |= row->place == known[i] && has_rows(c, row);
        if (!is_known) return "its family has layers of another kind";
    }
    if (!enough_heads(c->n_q_heads, c->n_kv_heads, size)) return "it has fewer heads";
    if (model_joint_delta(c)) return "its delta nets have the rows of a key head together";
    if (c->delta.k_heads && !enough_heads(c->delta.v_heads, c->delta.k_heads, size)) return "its delta nets have fewer heads";
    const int64_t least = (int64_t)NARROW * size, ffn = dense_ffn(c), shared = shared_ffn(c);
    return c->hidden < least || (ffn && ffn < least) || (shared && shared < least) ? "it is too narrow" : NULL;
}

static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

struct model_config model_tp_config(const struct model_config *c, int rank, int size) {
    struct model_config out = *c;
    if (size == 1) return out;
    out.mtp = false; /* it drafts nothing */
    out.n_q_heads = out.n_kv_heads = out.ffn = out.shared_ffn = out.delta.k_heads = out.delta.v_heads = 0;
    for (int r = 0; r < size; r++) {
        const struct heads h = heads_of(c, r, size), d = delta_heads(c, r, size);
        if (rank >= 0 && r != rank) continue;
        out.n_q_heads = max64(out.n_q_heads, h.q1 - h.q0);
        out.n_kv_heads = max64(out.n_kv_heads, h.kv1 - h.kv0);
        out.delta.k_heads = max64(out.delta.k_heads, d.kv1 - d.kv0);
        out.delta.v_heads = max64(out.delta.v_heads, d.q1 - d.q0);
        out.ffn = max64(out.ffn, cut_of(c->ffn, r + 1, size) - cut_of(c->ffn, r, size));
        out.shared_ffn = max64(out.shared_ffn, cut_of(c->shared_ffn, r + 1, size) - cut_of(c->shared_ffn, r, size));
    }
    return out;
}

static bool is_of(const struct model_group *g, const struct model_group *of) { return of && (g == of || g == of->bias); }

/* Of a gated delta net; unit: elements of a row. */
static int delta_rows(const struct model_config *c, int rank, int size, const struct model_layer *y, const struct model_group *g,
                      struct model_range *out) {
    const struct heads h = delta_heads(c, rank, size);
    const int64_t k = c->delta.k_dim, v = c->delta.v_dim, keys = c->delta.k_heads * k,
                  unit = g == y->delta_conv ? DEV_CONV_TAPS : 1;
    if (g == y->delta_in || g == y->delta_conv) {
        out[0] = (struct model_range){unit * h.kv0 * k, unit * h.kv1 * k};
        out[1] = (struct model_range){unit * (keys + h.kv0 * k), unit * (keys + h.kv1 * k)};
        out[2] = (struct model_range){unit * (2 * keys + h.q0 * v), unit * (2 * keys + h.q1 * v)};
        if (g == y->delta_conv) return 3;
        const int64_t channels = 2 * keys + c->delta.v_heads * v, heads = channels + c->delta.v_heads * v;
        out[3] = (struct model_range){channels + h.q0 * v, channels + h.q1 * v};
        out[4] = (struct model_range){heads, heads + 2 * c->delta.v_heads}; /* b and a of all heads */
        return 5;
    }
    if (g == y->delta_a_log || g == y->delta_dt_bias) out[0] = (struct model_range){h.q0, h.q1};
    else return 0;
    return 1;
}

/* Of gate and up, each so wide. */
static int gate_up_rows(int64_t width, int rank, int size, struct model_range *out) {
    const int64_t lo = cut_of(width, rank, size), hi = cut_of(width, rank + 1, size);
    out[0] = (struct model_range){lo, hi};
    out[1] = (struct model_range){width + lo, width + hi};
    return 2;
}

/* Rows of a layer's group that a rank has: ranges of it, at most MOST_RANGES; how many. */
static int rows_of(const struct model_config *c, int rank, int size, const struct model_layer *y, const struct model_group *g,
                   struct model_range *out) {
    const int64_t dim = c->head_dim, q = query_parts(c) * dim, keys = c->n_q_heads * q, values = keys + c->n_kv_heads * dim;
    const struct heads h = heads_of(c, rank, size);
    if (is_of(g, y->qkv)) {
        out[0] = (struct model_range){h.q0 * q, h.q1 * q};
        out[1] = (struct model_range){keys + h.kv0 * dim, keys + h.kv1 * dim};
        out[2] = (struct model_range){values + h.kv0 * dim, values + h.kv1 * dim};
        return 3;
    }
    if (is_of(g, y->gate_up)) return gate_up_rows(c->ffn, rank, size, out);
    if (is_of(g, y->shared_gate_up)) return gate_up_rows(c->shared_ffn, rank, size, out);
    const int n = y->delta_in ? delta_rows(c, rank, size, y, g, out) : 0;
    if (n > 0) return n;
    const bool split = is_of(g, y->o) || is_of(g, y->down) || is_of(g, y->shared_down);
    out[0] = (struct model_range){split ? cut_of(c->hidden, rank, size) : 0, split ? cut_of(c->hidden, rank + 1, size) : g->n};
    if (g == y->sinks) out[0] = (struct model_range){h.q0, h.q1};
    if (g == y->mla_q) out[0] = (struct model_range){h.q0 * model_query_dim(c), h.q1 * model_query_dim(c)};
    if (g == y->mla_kv) out[0] = (struct model_range){h.q0 * (c->mla.nope + c->mla.v), h.q1 * (c->mla.nope + c->mla.v)};
    if (is_of(g, y->expert_gate_up) || is_of(g, y->expert_down)) {
        const struct model_range own = model__ep_experts(c->n_experts, rank, size);
        const int64_t each = g->n / c->n_experts;
        out[0] = (struct model_range){own.lo * each, own.hi * each};
    }
    return 1;
}

static int64_t count_rows(const struct model_range *r, int n) {
    int64_t sum = 0;
    for (int i = 0; i < n; i++) sum += r[i].hi - r[i].lo;
    return sum;
}

/* ---- memory ---- */

/* What of n ranges of a group's rows is of its parameter p, whose first row is `first`, counted from there; how many ranges. */
static int of_param(const struct model_range *range, int n, int64_t first, int64_t rows, struct model_range *out) {
    int k = 0;
    for (int i = 0; i < n; i++) {
        const struct model_range r = {max64(range[i].lo - first, 0), range[i].hi - first < rows ? range[i].hi - first : rows};
        if (r.lo < r.hi) out[k++] = r;
    }
    return k;
}

static bool has_codes(const struct model *whole, const struct model_group *g) { return whole->quant && model__adaptable(g); }

/* Codes of the rows in n ranges of a group; to: NULL, or the split model. */
static void codes_layout(const struct model *whole, const struct model_group *g, const struct model_range *range, int n,
                         struct model *to, struct arena *a) {
    int64_t first = 0;
    for (int64_t p = g->first_param; p < g->first_param + g->n_params; first += whole->params[p++].rows) {
        struct model_range own[MOST_RANGES];
        const enum quant_kind kind = whole->quant->kind;
        const int64_t rows = count_rows(own, of_param(range, n, first, whole->params[p].rows, own));
        const int64_t codes = model__quant_codes(kind, rows * g->k), scales = model__quant_scales(kind, rows, g->k);
        void *const code = arena_take(a, (size_t)codes), *const scale = arena_take(a, (size_t)scales * sizeof(float));
        if (!to) continue;
        to->params[p].rows = rows;
        to->quant->parts[p] = (struct quant_part){tensor_1d(code, DT_U8, codes), tensor_1d(scale, DT_F32, scales)};
    }
}

/* The groups of whole's layers as rank `rank` has them: measure (m NULL), then bind those of the split model m. */
static void weights_layout(struct model *whole, int rank, int size, struct model *m, struct arena *a) {
    for (int64_t l = 0; l < whole->cfg.n_layers; l++) {
        const struct model_layer *const y = &whole->layers[l];
        for (const struct model_group *g = y->first; g <= y->last; g++) {
            struct model_range range[MOST_RANGES];
            if (g->role == MODEL_EXPERTS) {
                model__ep_layout(whole, g, rank, size, m, a);
                continue;
            }
            const int n_ranges = rows_of(&whole->cfg, rank, size, y, g, range);
            const int64_t n = count_rows(range, n_ranges);
            if (has_codes(whole, g)) {
                codes_layout(whole, g, range, n_ranges, m, a);
                if (m) m->groups[g - whole->groups].n = n;
                continue;
            }
            void *const at =
                arena_take(a, g->k ? dev_weight_bytes(whole->dev, whole->act, n, g->k) : (size_t)n * dtype_size(whole->act));
            if (!m) continue;
            struct model_group *const to = &m->groups[g - whole->groups];
            to->n = n;
            if (g->k) to->mat = (struct weight){.data = at, .dt = whole->act, .n = n, .k = g->k, .of = g->n};
            else to->vec = tensor_1d(at, whole->act, n);
        }
    }
}

/* B of the adapters, likewise; to: NULL, or where they are in the order of the groups. */
static void lora_layout(const struct model *whole, int rank, int size, struct lora_group *to, struct arena *a) {
    for (int64_t l = 0; l < whole->cfg.n_layers; l++) {
        const struct model_layer *const y = &whole->layers[l];
        for (const struct model_group *g = y->first; g <= y->last; g++) {
            struct model_range range[MOST_RANGES];
            if (!g->lora) continue;
            if (g->role == MODEL_EXPERTS) {
                if (to) *to++ = model__ep_lora(whole, g->lora, rank, size);
                continue;
            }
            const int64_t n = count_rows(range, rows_of(&whole->cfg, rank, size, y, g, range)), width = g->lora->width;
            void *const at = arena_take(a, dev_weight_bytes(whole->dev, whole->act, n, width));
            if (!to) continue;
            *to = *g->lora;
            to->n = n;
            to->b = (struct weight){.data = at, .dt = whole->act, .n = n, .k = width, .of = g->n};
            to++;
        }
    }
}

/* Of a head: of one that gives values, whole on each rank, all. */
static struct model_range head_rows(const struct model_config *c, int rank, int size) {
    if (c->value) return (struct model_range){0, 1};
    return (struct model_range){cut_of_vocab(c->vocab, rank, size), cut_of_vocab(c->vocab, rank + 1, size)};
}

/* Columns of the embedding, rows of the head, its bias, the final norm. */
static void ends_layout(struct model *whole, int rank, int size, struct model *m, struct arena *a) {
    const struct model_config *const c = &whole->cfg;
    const int64_t width = cut_of(c->hidden, rank + 1, size) - cut_of(c->hidden, rank, size), unit = (int64_t)dtype_size(whole->act);
    const struct model_range own = head_rows(c, rank, size);
    const int64_t n = own.hi - own.lo;
    void *const embed = arena_take(a, dev_weight_bytes(whole->dev, whole->act, c->vocab, width)),
                *const head = n > 0 ? arena_take(a, dev_weight_bytes(whole->dev, whole->act, n, c->hidden)) : NULL,
                *const norm = arena_take(a, SIZE_OF(c->hidden, unit)),
                *const bias = whole->g_head_bias ? arena_take(a, SIZE_OF(whole->g_head_bias->n, unit)) : NULL;
    if (!m) return;
    if (m->g_head_bias) m->g_head_bias->vec = tensor_1d(bias, whole->act, m->g_head_bias->n);
    m->embed = (struct weight){.data = embed, .dt = whole->act, .n = c->vocab, .k = width};
    m->head = (struct weight){
        .data = head, .dt = whole->act, .n = n, .k = c->hidden, .softcap = whole->g_head->mat.softcap, .of = whole->g_head->n};
    m->final_norm = tensor_1d(norm, whole->act, c->hidden);
}

/* Elements of the largest matrix of layers, or chunk of the embedding, of all its rows or of the rank's; 0: plain weights. */
static int64_t packed_elements(const struct model *whole, int rank, int size, bool all) {
    const int64_t h = whole->cfg.hidden, width = all ? h : cut_of(h, rank + 1, size) - cut_of(h, rank, size);
    int64_t most = whole->dev->ops->caps.plain_weights ? 0 : width * DEV_VOCAB_CHUNK;
    for (int64_t l = 0; l < whole->cfg.n_layers && !whole->dev->ops->caps.plain_weights; l++) {
        const struct model_layer *const y = &whole->layers[l];
        for (const struct model_group *g = y->first; g <= y->last; g++) {
            struct model_range range[MOST_RANGES];
            if (g->role == MODEL_EXPERTS) continue; /* copied as they are */
            const int64_t n = count_rows(range, rows_of(&whole->cfg, rank, size, y, g, range));
            most = max64(most, (all ? g->n : n) * max64(has_codes(whole, g) ? 0 : g->k, g->lora ? g->lora->width : 0));
        }
    }
    return most;
}

/* Columns of the widest matrix in the compute type that is gathered. */
static int64_t most_columns(const struct model_config *c) {
    return max64(max64(c->n_q_heads * head_width(c), model_dim(c, MODEL_DELTA_V)), max64(dense_ffn(c), shared_ffn(c)));
}

/* Of what a rank's part of a gated delta net's first matrix gives: q, k, v and z of its heads, b and a of all. */
static int64_t delta_columns(const struct model_config *c, int rank, int size) {
    const struct heads h = delta_heads(c, rank, size);
    return 2 * ((h.kv1 - h.kv0) * c->delta.k_dim + (h.q1 - h.q0) * c->delta.v_dim + c->delta.v_heads);
}

static size_t send_bytes(const struct model_config *c, enum dtype act, int64_t rows) {
    const int64_t outputs = c->n_experts ? c->n_choices * c->hidden : 0;
    const size_t wide = SIZE_OF(rows, max64(most_columns(c), outputs), (int64_t)dtype_size(act));
    const size_t sums = SIZE_OF(rows, c->hidden, (int64_t)sizeof(float));
    const size_t logits = SIZE_OF(rows < LOGIT_ROWS ? rows : LOGIT_ROWS, c->vocab, (int64_t)sizeof(float));
    const size_t most = wide > sums ? wide : sums;
    return most > logits ? most : logits;
}

/* Of t's whole model, rank, size and rows. */
static void tp_layout(struct model_tp *t, struct model *m, struct arena *a) {
    const struct model *const whole = t->whole;
    const struct model_config *const c = &whole->cfg;
    const int64_t unit = (int64_t)dtype_size(whole->act);
    t->send = arena_take(a, send_bytes(c, whole->act, t->max_rows));
    t->joined = arena_take(a, SIZE_OF(t->max_rows, max64(most_columns(c), delta_columns(c, t->rank, t->size)), unit));
    const bool row_norms = model_has_group(c, offsetof(struct model_layer, q_row_norm));
    for (int i = 0; i < 2 && row_norms; i++) t->row[i] = arena_take(a, SIZE_OF(t->max_rows, model_dim(c, MODEL_QKV), unit));
    weights_layout(t->whole, t->rank, t->size, m, a);
    ends_layout(t->whole, t->rank, t->size, m, a);
    lora_layout(whole, t->rank, t->size, t->lora, a);
    for (int i = 0; i < 2; i++) t->rows[i] = arena_take(a, SIZE_OF(packed_elements(whole, t->rank, t->size, i == 0), unit));
}

int model_tp_bytes(const struct model_tp_shape *s, size_t *out) {
    struct model *m;
    *out = 0;
    TRY(model_shape(&m, s->config, s->dev, s->act, s->quant, s->lora));
    for (int r = 0; r < s->size; r++) {
        struct model_tp t = {.whole = m, .rank = r, .size = s->size, .max_rows = s->max_rows};
        struct arena a = {0};
        tp_layout(&t, NULL, &a);
        *out = a.used > *out ? a.used : *out;
    }
    model_shape_free(m);
    return 0;
}

/* ---- opening ---- */

/* A group of whole in the copy of its groups. */
static struct model_group *same(const struct model *m, const struct model *whole, const struct model_group *g) {
    return g ? &m->groups[g - whole->groups] : NULL;
}

static void copy_groups(struct model *m, const struct model *whole) {
    const size_t layers = (size_t)whole->cfg.n_layers;
    m->groups = xmalloc((size_t)whole->n_groups * sizeof *m->groups);
    m->layers = xmalloc(layers * sizeof *m->layers);
    memcpy(m->groups, whole->groups, (size_t)whole->n_groups * sizeof *m->groups);
    memcpy(m->layers, whole->layers, layers * sizeof *m->layers);
    for (int64_t i = 0; i < m->n_groups; i++) m->groups[i].bias = same(m, whole, whole->groups[i].bias);
    for (size_t l = 0; l < layers; l++) {
        struct model_layer *const y = &m->layers[l];
        y->first = same(m, whole, y->first);
        y->last = same(m, whole, y->last);
        for (const struct model_group_row *row = whole->cfg.family->layer; row->part->name; row++) /* a place may be in two rows */
            *(struct model_group **)(void *)((char *)y + row->place) =
                same(m, whole, *(struct model_group *const *)(const void *)((const char *)&whole->layers[l] + row->place));
    }
    m->g_embed = same(m, whole, whole->g_embed);
    m->g_head = same(m, whole, whole->g_head);
    m->g_norm = same(m, whole, whole->g_norm);
    m->g_head_bias = same(m, whole, whole->g_head_bias);
}

/* Codes of its own, the scratch of whole: the two run in turn. */
static void copy_quant(struct model *m, const struct model *whole) {
    const size_t n = (size_t)whole->n_params;
    m->n_params = whole->n_params;
    m->params = xmalloc(n * sizeof *m->params);
    memcpy(m->params, whole->params, n * sizeof *m->params);
    model__quant_create(m, whole->quant->kind);
    m->quant->stage = whole->quant->stage;
    m->quant->pack = whole->quant->pack;
}

int model_tp_open(struct model **out, struct model *whole, struct collective *g, int64_t max_rows, void *block) {
    const int rank = collective_rank(g), size = collective_size(g);
    const enum quant_kind quant = whole->quant ? whole->quant->kind : QUANT_NONE;
    CHECK(!model_tp_unable(&whole->cfg, quant, size));
    struct model_tp *const t = xcalloc(1, sizeof *t);
    struct model *const m = *out = xcalloc(1, sizeof *m);
    *t = (struct model_tp){.whole = whole, .group = g, .rank = rank, .size = size, .max_rows = max_rows};
    t->in_graph = collective_has_graphs(g) && whole->cfg.n_experts == 0; /* the host reads the load of experts */
    *m = (struct model){.cfg = model_tp_config(&whole->cfg, rank, size),
                        .dev = whole->dev,
                        .act = whole->act,
                        .n_groups = whole->n_groups,
                        .query_scale = whole->query_scale,
                        .lora = whole->lora, /* its scratch */
                        .tp = t};
    if (whole->lora) t->lora = xcalloc((size_t)whole->lora->n_groups, sizeof *t->lora);
    memcpy(m->rope, whole->rope, sizeof m->rope);
    copy_groups(m, whole);
    make_cuts(&whole->cfg, size, t->cut);
    struct arena a = {.base = block, .cap = SIZE_MAX};
    if (quant) copy_quant(m, whole);
    tp_layout(t, m, &a);
    struct lora_group *adapter = t->lora;
    for (struct model_group *x = m->groups; x < m->groups + m->n_groups; x++)
        if (x->lora) x->lora = adapter++;
    const int rc = collective_share(g, t->send, send_bytes(&whole->cfg, whole->act, max_rows));
    if (rc < 0) {
        model_tp_close(m);
        *out = NULL;
    }
    return rc;
}

void model_tp_close(struct model *m) {
    if (!m) return;
    model__quant_free(m);
    free(m->params);
    free(m->groups);
    free(m->layers);
    free(m->tp->lora);
    free(m->tp);
    free(m);
}

/* ---- the weights ---- */

/* Rows [lo, hi) of a matrix or vector of row-major elements, k to a row, to `to`; *to: behind them. */
static int copy_rows(const struct model *m, char **to, const void *from, struct model_range r, int64_t k) {
    const size_t row = (size_t)k * dtype_size(m->act), bytes = (size_t)(r.hi - r.lo) * row;
    TRY(dev_copy(m->dev, *to, (const char *)from + (size_t)r.lo * row, bytes));
    *to += bytes;
    return 0;
}

/* Of a matrix the rows in n ranges, as the backend has them. */
static int take_rows(struct model *m, struct weight to, struct weight from, const struct model_range *range, int n) {
    const struct model_tp *const t = m->tp;
    const bool plain = m->dev->ops->caps.plain_weights;
    char *at = plain ? to.data : t->rows[1];
    if (!plain) TRY(dev_weight_unpack(m->dev, tensor_2d(t->rows[0], m->act, from.n, from.k), from));
    for (int i = 0; i < n; i++) TRY(copy_rows(m, &at, plain ? from.data : t->rows[0], range[i], from.k));
    return plain ? 0 : dev_weight_pack(m->dev, to, tensor_2d(t->rows[1], m->act, to.n, to.k));
}

/* Of a quantised matrix: rows begin and end with blocks of NF4 (whole_blocks). */
static int take_codes(struct model *m, const struct model_group *g, const struct model_range *range, int n) {
    const struct model *const whole = m->tp->whole;
    const enum quant_kind kind = whole->quant->kind;
    int64_t first = 0;
    for (int64_t p = g->first_param; p < g->first_param + g->n_params; first += whole->params[p++].rows) {
        const struct quant_part from = whole->quant->parts[p], to = m->quant->parts[p];
        struct model_range own[MOST_RANGES];
        char *code = to.code.data;
        float *scale = to.scale.data;
        const int k = of_param(range, n, first, whole->params[p].rows, own);
        for (int i = 0; i < k; i++) {
            const int64_t codes = model__quant_codes(kind, (own[i].hi - own[i].lo) * g->k),
                          scales = model__quant_scales(kind, own[i].hi - own[i].lo, g->k);
            TRY(dev_copy(m->dev, code, (const char *)from.code.data + model__quant_codes(kind, own[i].lo * g->k), (size_t)codes));
            TRY(dev_copy(m->dev, scale, (const float *)from.scale.data + model__quant_scales(kind, own[i].lo, g->k),
                         (size_t)scales * sizeof *scale));
            code += codes;
            scale += scales;
        }
    }
    return 0;
}

static int take_group(struct model *m, const struct model_layer *y, const struct model_group *from, const struct model_group *to) {
    const struct model_tp *const t = m->tp;
    struct model_range range[MOST_RANGES];
    if (from->role == MODEL_EXPERTS) return model__ep_take(m, from, to);
    const int n = rows_of(&t->whole->cfg, t->rank, t->size, y, from, range);
    if (from->lora) TRY(take_rows(m, to->lora->b, from->lora->b, range, n));
    if (has_codes(t->whole, from)) return take_codes(m, from, range, n);
    if (from->k) return take_rows(m, to->mat, from->mat, range, n);
    char *at = to->vec.data;
    for (int i = 0; i < n; i++) TRY(copy_rows(m, &at, from->vec.data, range[i], 1));
    return 0;
}

/* n columns of x from x_at on to those of y from y_at on. */
static int copy_columns(struct model *m, struct tensor y, int64_t y_at, struct tensor x, int64_t x_at, int64_t n) {
    return dev_copy_columns(m->dev, &(struct copy_columns_args){.y = y, .y_at = y_at, .x = x, .x_at = x_at, .n = n});
}

static struct weight rows_from(const struct model *m, struct weight w, int64_t lo, int64_t n) {
    if (lo > 0) w.data = (char *)w.data + dev_weight_bytes(m->dev, w.dt, lo, w.k);
    w.n = n;
    return w;
}

/* The embedding's columns: of plain weights all rows at once, else a chunk of them. */
static int take_embedding(struct model *m, struct weight from) {
    const struct model_tp *const t = m->tp;
    const struct weight to = m->embed;
    const bool plain = m->dev->ops->caps.plain_weights;
    for (int64_t lo = 0, n; lo < from.n; lo += n) {
        n = plain ? from.n : from.n - lo < DEV_VOCAB_CHUNK ? from.n - lo : DEV_VOCAB_CHUNK;
        const struct weight x = rows_from(m, from, lo, n), y = rows_from(m, to, lo, n);
        const struct tensor all = tensor_2d(plain ? x.data : t->rows[0], m->act, n, from.k),
                            own = tensor_2d(plain ? y.data : t->rows[1], m->act, n, to.k);
        if (!plain) TRY(dev_weight_unpack(m->dev, all, x));
        TRY(copy_columns(m, own, 0, all, t->cut[MODEL_TP_HIDDEN][t->rank], to.k));
        if (!plain) TRY(dev_weight_pack(m->dev, y, own));
    }
    return 0;
}

static int copy_vec(struct model *m, struct tensor to, struct tensor from) {
    return dev_copy(m->dev, to.data, from.data, (size_t)tensor_count(to) * dtype_size(m->act));
}

static int take_head(struct model *m, struct weight all) {
    const struct model_tp *const t = m->tp;
    const struct weight from = rows_from(m, all, head_rows(&t->whole->cfg, t->rank, t->size).lo, m->head.n);
    return from.n > 0 ? dev_copy(m->dev, m->head.data, from.data, dev_weight_bytes(m->dev, from.dt, from.n, from.k)) : 0;
}

/* What is not of a layer. */
static int take_ends(struct model *m) {
    const struct model *const whole = m->tp->whole;
    TRY(take_embedding(m, whole->embed));
    TRY(take_head(m, whole->head));
    if (m->g_head_bias) TRY(copy_vec(m, m->g_head_bias->vec, whole->g_head_bias->vec));
    return copy_vec(m, m->final_norm, whole->final_norm);
}

static int take_layer(struct model *m, int64_t l) {
    const struct model *const whole = m->tp->whole;
    const struct model_layer *const y = &whole->layers[l];
    for (const struct model_group *g = y->first; g <= y->last; g++) TRY(take_group(m, y, g, same(m, whole, g)));
    return 0;
}

/* Each rank reads all of a layer, which is checked so, and keeps its rows. */
static int take_from_files(struct model *m) {
    struct model *const whole = m->tp->whole;
    int rc = 0;
    for (int64_t l = 0; l < whole->cfg.n_layers && rc == 0; l++) {
        rc = model__files_layer(whole, l);
        if (rc == 0) rc = take_layer(m, l);
    }
    if (rc == 0) rc = take_ends(m);
    if (rc == 0) rc = dev_sync(m->dev);
    model__files_end(whole, rc == 0);
    return rc;
}

static int take_from_shares(struct model *m) {
    struct model *const whole = m->tp->whole;
    model_stream_begin(whole);
    if (whole->stream) model__stream_with_experts(whole);
    TRY(model__stream_start(whole));
    for (int64_t l = 0; l < whole->cfg.n_layers; l++) {
        TRY(model_stream_layer(whole, l, l + 1));
        TRY(take_layer(m, l));
    }
    TRY(model__stream_head(whole));
    TRY(take_ends(m));
    return model_stream_end(whole);
}

int model_tp_take(struct model *m) {
    struct model_tp *const t = m->tp;
    if (t->taken) return 0; /* files do not change */
    TRY(t->whole->files ? take_from_files(m) : take_from_shares(m));
    t->taken = t->whole->files != NULL;
    return 0;
}

int model_tp_take_span(struct model *m, int64_t i, void *room) {
    struct model *const whole = m->tp->whole;
    const int64_t tail = i - whole->cfg.n_layers; /* embedding, norm, head unless it is the embedding */
    struct weight w = tail == 2 ? whole->head : whole->embed;
    CHECK(whole->files);
    if (!m->tp->taken) model__files_end(whole, true);
    m->tp->taken = true;
    if (tail < 0) {
        model__layer_place(whole, i, room);
        return take_layer(m, i);
    }
    if (tail == 1) return copy_vec(m, m->final_norm, tensor_1d(room, m->act, m->final_norm.dim[0]));
    w.data = room;
    if (tail == 0) TRY(take_embedding(m, w));
    return tail == 2 || whole->g_head == whole->g_embed ? take_head(m, w) : 0;
}

int model_tp_take_adapter(struct model *m) {
    const struct model *const whole = m->tp->whole;
    for (int64_t l = 0; l < whole->cfg.n_layers; l++) {
        const struct model_layer *const y = &whole->layers[l];
        for (const struct model_group *g = y->first; g <= y->last; g++) {
            struct model_range range[MOST_RANGES];
            if (!g->lora || g->role == MODEL_EXPERTS) continue; /* those of experts are whole's */
            const int n = rows_of(&whole->cfg, m->tp->rank, m->tp->size, y, g, range);
            TRY(take_rows(m, same(m, whole, g)->lora->b, g->lora->b, range, n));
        }
    }
    return 0;
}

/* ---- a pass ---- */

bool model_tp_in_graph(const struct model *m) { return m->tp->in_graph || m->tp->left_out; }
void model_tp_leave_out_gathers(struct model *m, bool out) { m->tp->left_out = out; }
int model_tp_on_time(const struct model *m) { return m->tp ? collective_on_time(m->tp->group) : 0; }

const struct model *model__tp_whole(const struct model *m) { return m->tp->whole; }
int model__tp_rank(const struct model *m, int *size) {
    *size = m->tp->size;
    return m->tp->rank;
}

static struct tensor part_of(const struct model *m, enum model_tp_dim d, int64_t rows, enum dtype dt) {
    const struct model_tp *const t = m->tp;
    const int64_t *const cut = t->cut[d];
    CHECK(rows <= t->max_rows);
    return tensor_2d(t->send + (size_t)(rows * cut[t->rank]) * dtype_size(dt), dt, rows, cut[t->rank + 1] - cut[t->rank]);
}

struct tensor model__tp_part(const struct model *m, enum model_tp_dim d, int64_t rows) {
    return part_of(m, d, rows, m->act);
}

/* Gathers, and joins into y. */
static int gather(struct model *m, enum model_tp_dim d, struct tensor y, struct tensor from) {
    const struct model_tp *const t = m->tp;
    const int64_t rows = y.dim[0];
    struct join_columns_args a = {.y = y, .from = from, .x = tensor_1d(t->send, y.dt, tensor_count(y)), .n = t->size};
    size_t at[DEV_MOST_COLUMNS + 1];
    if (rows == 0) return 0;
    for (int r = 0; r <= t->size; r++) at[r] = (size_t)(rows * t->cut[d][r]) * dtype_size(y.dt);
    memcpy(a.cut, t->cut[d], sizeof a.cut);
    if (t->in_graph && !t->left_out) return collective_gather_columns(t->group, &a);
    if (!t->left_out) TRY(collective_all_gather(t->group, t->send, at, 1));
    return dev_join_columns(m->dev, &a);
}

int model__tp_gather(struct model *m, enum model_tp_dim d, int64_t rows, struct tensor *whole) {
    *whole = tensor_2d(m->tp->joined, m->act, rows, m->tp->cut[d][m->tp->size]);
    return gather(m, d, *whole, TENSOR_NONE);
}

int model__tp_linear(struct model *m, const struct linear_args *a) {
    const struct tensor own = part_of(m, MODEL_TP_HIDDEN, a->x.dim[0], a->y.dt);
    const struct linear_args part = {.group = a->group, .y = own, .x = a->x, .base = a->add || a->base};
    TRY(model__linear(m, &part));
    TRY(gather(m, MODEL_TP_HIDDEN, a->y, a->add ? a->from : TENSOR_NONE));
    if (!a->add || a->base || !a->group->lora) return 0;
    TRY(model__lora_linear(m, &part)); /* behind the base's sum, as on one rank */
    return gather(m, MODEL_TP_HIDDEN, a->y, a->y);
}

/* Columns of all ranks to those of row from `at` on; this rank's are in x from x_at on. */
static int gather_columns(struct model *m, enum model_tp_dim d, struct tensor row, int64_t at, struct tensor x, int64_t x_at) {
    const struct tensor part = model__tp_part(m, d, x.dim[0]);
    struct tensor all;
    TRY(copy_columns(m, part, 0, x, x_at, part.dim[1]));
    TRY(model__tp_gather(m, d, x.dim[0], &all));
    return copy_columns(m, row, at, all, 0, all.dim[1]);
}

int model__tp_embed(struct model *m, struct tensor x, struct tensor ids) {
    const struct tensor own = part_of(m, MODEL_TP_HIDDEN, x.dim[0], DT_F32);
    TRY(dev_embed_fwd(m->dev, own, ids, m->embed));
    return gather(m, MODEL_TP_HIDDEN, x, TENSOR_NONE);
}

/* As many rows at a time as there is room for. */
int model__tp_logits(struct model *m, struct tensor logits, struct tensor x) {
    const struct model_tp *const t = m->tp;
    const int64_t row = logits.dim[1] * (int64_t)sizeof(float), rows = x.dim[0];
    const int64_t most = (int64_t)send_bytes(&t->whole->cfg, m->act, t->max_rows) / row;
    for (int64_t lo = 0, n; lo < rows; lo += n) {
        n = rows - lo < most ? rows - lo : most;
        const struct tensor own = part_of(m, MODEL_TP_VOCAB, n, DT_F32);
        if (own.dim[1] > 0) TRY(dev_logits(m->dev, own, tensor_rows(x, lo, n), m->head));
        TRY(gather(m, MODEL_TP_VOCAB, tensor_rows(logits, lo, n), TENSOR_NONE));
    }
    return 0;
}

/* The norms' sums are of whole rows, so each rank has the rows of q and k whole for them, and takes its heads again. The values
 * of `row` are never read. */
int model__tp_qk_norm(struct model *m, const struct qk_norm_args *a) {
    const struct model_tp *const t = m->tp;
    const struct model_config *const c = &t->whole->cfg;
    const int64_t keys = model_dim(c, MODEL_Q), width = model_dim(c, MODEL_QKV), rows = a->x.dim[0];
    const int64_t q = model_dim(&m->cfg, MODEL_Q), kv = model_dim(&m->cfg, MODEL_KV), first = heads_of(c, t->rank, t->size).kv0;
    const struct tensor row = tensor_2d(t->row[0], m->act, rows, width), normed = tensor_2d(t->row[1], m->act, rows, width);
    struct qk_norm_args whole = *a;
    whole.x = row;
    whole.y = normed;
    TRY(gather_columns(m, MODEL_TP_HEADS, row, 0, a->x, 0));
    TRY(gather_columns(m, MODEL_TP_KEYS, row, keys, a->x, q));
    TRY(dev_qk_norm_fwd(m->dev, &whole));
    TRY(copy_columns(m, a->y, 0, normed, t->cut[MODEL_TP_HEADS][t->rank], q));
    TRY(copy_columns(m, a->y, q, normed, keys + first * c->head_dim, kv));
    return copy_columns(m, a->y, q + kv, a->x, q + kv, kv);
}

struct tensor model__tp_delta_rows(const struct model *m, int64_t rows) {
    const struct model_tp *const t = m->tp;
    return tensor_2d(t->joined, m->act, rows, delta_columns(&t->whole->cfg, t->rank, t->size));
}

int model__tp_delta_in(struct model *m, const struct linear_args *a) {
    const struct model_tp *const t = m->tp;
    const int64_t all = t->whole->cfg.delta.v_heads, n = m->cfg.delta.v_heads, ba = model_dim(&m->cfg, MODEL_DELTA_QKVZ),
                  at = ba + delta_heads(&t->whole->cfg, t->rank, t->size).q0;
    struct linear_args rows = *a;
    rows.y = model__tp_delta_rows(m, a->x.dim[0]);
    TRY(model__linear(m, &rows));
    for (int i = 0; i < 2; i++) TRY(copy_columns(m, a->y, ba + i * n, rows.y, at + i * all, n));
    return 0;
}

struct tensor model__tp_rows(const struct model *m, struct model_range rows, int64_t width) {
    return tensor_2d(m->tp->send + (size_t)(rows.lo * width) * dtype_size(m->act), m->act, rows.hi - rows.lo, width);
}

int model__tp_gather_rows(struct model *m, const int64_t *cut, int64_t width) {
    const struct model_tp *const t = m->tp;
    size_t at[DEV_MOST_COLUMNS + 1];
    for (int r = 0; r <= t->size; r++) at[r] = (size_t)(cut[r] * width) * dtype_size(m->act);
    return at[t->size] ? collective_all_gather(t->group, t->send, at, 1) : 0;
}
