/* bench_delta.c - `verlc bench delta`: a gated delta net layer in bf16, of one shape (Qwen3.5-2B's by default): the gated delta
 * rule alone (forward, backward, decoding steps) and the layer: its two GEMMs, convolution, delta rule, gated norm.
 *
 * A decoding step is measured `open` tokens into a chunk of 64, and as the mean over all 64. Each call of a step has another
 * layer's weights and states, so that none are left in the cache. A time is the median of several measurements.
 * The roofline of a case is the sum over its ops of the longer of arithmetic and memory, at what a large GEMM and a large copy
 * reach here; an op reads what it takes and writes what it gives once.
 * Norm, residual stream and what a model has around a layer are not measured. */
#include "cmd/bench/bench.h"

#include "base/clock.h"
#include "base/err.h"
#include "base/rng.h"
#include "cmd/cmd.h"
#include "device/graph.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { C = DEV_DELTA_CHUNK, TAPS = DEV_CONV_TAPS, MOST_LAYERS = 8, PIECE = 1 << 20, ROUNDS = 50, MOST_TENSORS = 64 };
enum { BF16 = 2, F32 = 4 }; /* bytes */

struct delta_bench {
    struct dev dev;
    struct tensor of[MOST_TENSORS]; /* all that were allocated */
    int n_tensors;
    int64_t hidden, hk, hv, dim, layers;
    double seconds, memory, gemm; /* of a case; bytes/s, FLOP/s */
    bool json, first;
    /* of all layers */
    struct weight w_in, w_out;
    size_t in_bytes, out_bytes;
    struct tensor taps, a_log, dt_bias, w_norm, dtaps, da_log, ddt_bias, dw_norm, dw_in, dw_out;
    /* of the rows of a case */
    struct row_seqs seqs;
    struct tensor x, in, u, o, y, res, rstd, e, states, dres, dy, dout, du, din, dx;
    struct tensor conv; /* states of all layers */
    struct delta_state state;
    int64_t rows, slots;
};

static int64_t channels(const struct delta_bench *b) { return (2 * b->hk + b->hv) * b->dim; }
static int64_t width(const struct delta_bench *b) { return channels(b) + b->hv * (b->dim + 2); }

/* ---- tensors ---- */

static int alloc_tensor(struct delta_bench *b, struct tensor *t, enum dtype dt, int nd, const int64_t *dim) {
    *t = (struct tensor){NULL, dt, nd, {1, 1, 1, 1}};
    memcpy(t->dim, dim, (size_t)nd * sizeof *dim);
    CHECK(b->n_tensors < MOST_TENSORS);
    TRY(dev_alloc(&b->dev, (size_t)tensor_count(*t) * dtype_size(dt), &t->data));
    b->of[b->n_tensors++] = *t;
    return 0;
}
/* Frees those that were allocated last, down to n. */
static void free_down_to(struct delta_bench *b, int n) {
    while (b->n_tensors > n) {
        const struct tensor t = b->of[--b->n_tensors];
        dev_free(&b->dev, t.data, (size_t)tensor_count(t) * dtype_size(t.dt));
    }
}
struct range {
    float lo, hi;
};
/* Random values, the same PIECE of them again and again. */
static int random_fill(struct delta_bench *b, struct tensor t, struct range r) {
    const size_t size = dtype_size(t.dt);
    char *const host = xmalloc(PIECE * size);
    struct rng g = {.seed = 5, .stream = RNG_TEST};
    const int64_t count = tensor_count(t), piece = count < PIECE ? count : PIECE;
    int rc = 0;
    for (int64_t i = 0; i < piece; i++) {
        const float v = r.lo + (r.hi - r.lo) * (float)rng_below(&g, 65536) / 65536;
        if (t.dt == DT_BF16) ((uint16_t *)(void *)host)[i] = f32_to_bf16(v);
        else ((float *)(void *)host)[i] = v;
    }
    for (int64_t at = 0; at < count && rc == 0; at += piece)
        rc = dev_copy_in(&b->dev, (char *)t.data + (size_t)at * size, host,
                         (size_t)(count - at < piece ? count - at : piece) * size);
    free(host);
    return rc;
}
static int alloc_random(struct delta_bench *b, struct tensor *t, enum dtype dt, int nd, const int64_t *dim, struct range r) {
    TRY(alloc_tensor(b, t, dt, nd, dim));
    return random_fill(b, *t, r);
}
static int alloc_ids(struct delta_bench *b, struct tensor *t, int64_t n, int64_t first, int64_t by) {
    int32_t *const ids = xcalloc((size_t)n, sizeof *ids);
    for (int64_t i = 0; i < n; i++) ids[i] = (int32_t)(first + i * by);
    int rc = alloc_tensor(b, t, DT_I32, 1, (const int64_t[]){n});
    if (rc == 0) rc = dev_copy_in(&b->dev, t->data, ids, (size_t)n * sizeof *ids);
    free(ids);
    return rc;
}
/* `layers` matrices (n, k) in the device's layout. */
static int alloc_weights(struct delta_bench *b, struct weight *w, size_t *bytes, int64_t n, int64_t k) {
    const int before = b->n_tensors;
    struct tensor all, src;
    *w = (struct weight){NULL, DT_BF16, n, k, 0, 0};
    *bytes = dev_weight_bytes(&b->dev, DT_BF16, n, k);
    TRY(alloc_tensor(b, &all, DT_U8, 1, (const int64_t[]){b->layers * (int64_t)*bytes}));
    w->data = all.data;
    TRY(alloc_random(b, &src, DT_BF16, 2, (const int64_t[]){n, k}, (struct range){-0.03f, 0.03f}));
    for (int64_t l = 0; l < b->layers; l++) {
        struct weight one = *w;
        one.data = (char *)w->data + (size_t)l * *bytes;
        TRY(dev_weight_pack(&b->dev, one, src));
    }
    TRY(dev_sync(&b->dev));
    free_down_to(b, before + 1);
    return 0;
}
static int alloc_layer(struct delta_bench *b) {
    const int64_t v = b->hv * b->dim, c = channels(b);
    const int64_t taps[] = {c, TAPS}, heads[] = {b->hv}, dim[] = {b->dim};
    TRY(alloc_weights(b, &b->w_in, &b->in_bytes, width(b), b->hidden));
    TRY(alloc_weights(b, &b->w_out, &b->out_bytes, b->hidden, v));
    TRY(alloc_random(b, &b->taps, DT_BF16, 2, taps, (struct range){-0.5f, 0.5f}));
    TRY(alloc_random(b, &b->a_log, DT_BF16, 1, heads, (struct range){-4, 0}));
    TRY(alloc_random(b, &b->dt_bias, DT_BF16, 1, heads, (struct range){-1, 1}));
    TRY(alloc_random(b, &b->w_norm, DT_BF16, 1, dim, (struct range){0.5f, 1.5f}));
    TRY(alloc_random(b, &b->dtaps, DT_F32, 2, taps, (struct range){0, 0}));
    TRY(alloc_random(b, &b->da_log, DT_F32, 1, heads, (struct range){0, 0}));
    TRY(alloc_random(b, &b->ddt_bias, DT_F32, 1, heads, (struct range){0, 0}));
    TRY(alloc_random(b, &b->dw_norm, DT_F32, 1, dim, (struct range){0, 0}));
    TRY(alloc_tensor(b, &b->dw_in, DT_F32, 2, (const int64_t[]){width(b), b->hidden}));
    return alloc_tensor(b, &b->dw_out, DT_F32, 2, (const int64_t[]){b->hidden, v});
}
static int alloc_rows(struct delta_bench *b, int64_t rows) {
    const int64_t v = b->hv * b->dim, of_v[] = {rows, v}, of_hidden[] = {rows, b->hidden}, of_in[] = {rows, width(b)};
    b->rows = rows;
    TRY(alloc_random(b, &b->x, DT_BF16, 2, of_hidden, (struct range){-1, 1}));
    TRY(alloc_random(b, &b->in, DT_BF16, 2, of_in, (struct range){-1, 1}));
    TRY(alloc_random(b, &b->u, DT_BF16, 2, (const int64_t[]){rows, channels(b)}, (struct range){-1, 1}));
    TRY(alloc_random(b, &b->o, DT_BF16, 2, of_v, (struct range){-1, 1}));
    TRY(alloc_random(b, &b->y, DT_BF16, 2, of_v, (struct range){-1, 1}));
    return alloc_random(b, &b->res, DT_F32, 2, of_hidden, (struct range){0, 0});
}
static int alloc_backward(struct delta_bench *b) {
    const int64_t rows = b->rows, v = b->hv * b->dim;
    TRY(alloc_random(b, &b->rstd, DT_F32, 1, (const int64_t[]){rows * b->hv}, (struct range){1, 1}));
    TRY(alloc_tensor(b, &b->e, DT_F32, 2, (const int64_t[]){rows, v}));
    TRY(alloc_tensor(b, &b->states, DT_F32, 4, (const int64_t[]){rows / C + 1, b->hv, b->dim, b->dim}));
    TRY(alloc_random(b, &b->dres, DT_BF16, 2, b->x.dim, (struct range){-0.01f, 0.01f}));
    TRY(alloc_random(b, &b->dy, DT_BF16, 2, b->y.dim, (struct range){-0.01f, 0.01f}));
    TRY(alloc_random(b, &b->dout, DT_BF16, 2, b->o.dim, (struct range){-0.01f, 0.01f}));
    TRY(alloc_tensor(b, &b->du, DT_BF16, 2, b->u.dim));
    TRY(alloc_tensor(b, &b->din, DT_BF16, 2, b->in.dim));
    return alloc_tensor(b, &b->dx, DT_BF16, 2, b->x.dim);
}
/* States of `layers` layers, as if each sequence were some way on: random S, k and e, r of about such keys, G falling. */
static int alloc_states(struct delta_bench *b, int64_t slots) {
    const int64_t n = slots * b->layers;
    b->slots = slots;
    struct delta_state *const s = &b->state;
    TRY(alloc_random(b, &b->conv, DT_BF16, 3, (const int64_t[]){n, TAPS, channels(b)}, (struct range){-1, 1}));
    TRY(alloc_random(b, &s->s, DT_F32, 4, (const int64_t[]){n, b->hv, b->dim, b->dim}, (struct range){-0.1f, 0.1f}));
    TRY(alloc_random(b, &s->k, DT_BF16, 4, (const int64_t[]){n, b->hk, C, b->dim}, (struct range){-1, 1}));
    TRY(alloc_random(b, &s->r, DT_F32, 3, (const int64_t[]){n, b->hk, C}, (struct range){0.15f, 0.16f}));
    TRY(alloc_random(b, &s->e, DT_F32, 4, (const int64_t[]){n, b->hv, C, b->dim}, (struct range){-1, 1}));
    TRY(alloc_tensor(b, &s->g, DT_F32, 3, (const int64_t[]){n, b->hv, C}));
    float g[PIECE / 1024 * C];
    const int64_t all = n * b->hv * C, piece = sizeof g / sizeof *g;
    for (int64_t i = 0; i < piece; i++) g[i] = -0.01f * (float)(i % C + 1);
    for (int64_t at = 0; at < all; at += piece)
        TRY(dev_copy_in(&b->dev, (float *)s->g.data + at, g, (size_t)(all - at < piece ? all - at : piece) * sizeof *g));
    return 0;
}

/* ---- the ops ---- */

/* The part of `t` that is layer l's. */
static struct tensor part_of(const struct delta_bench *b, struct tensor t, int64_t l) {
    return t.data ? tensor_rows(t, l * b->slots, b->slots) : t;
}
static struct weight weight_of(struct weight w, size_t bytes, int64_t l) {
    w.data = (char *)w.data + (size_t)l * bytes;
    return w;
}
static struct causal_conv_args conv_args(const struct delta_bench *b, int64_t l) {
    return (struct causal_conv_args){.seqs = b->seqs, .x = b->in, .w = b->taps, .y = b->u, .state = part_of(b, b->conv, l)};
}
static struct delta_args rule_args(const struct delta_bench *b, int64_t l, bool kept) {
    const struct delta_state *const s = &b->state;
    struct delta_args a = {
        .n_k_heads = b->hk,
        .n_v_heads = b->hv,
        .k_dim = b->dim,
        .v_dim = b->dim,
        .seqs = b->seqs,
        .qkv = b->u,
        .ba = b->in,
        .ba_at = channels(b) + b->hv * b->dim,
        .a_log = b->a_log,
        .dt_bias = b->dt_bias,
        .out = b->o,
        .state = {part_of(b, s->s, l), part_of(b, s->k, l), part_of(b, s->r, l), part_of(b, s->e, l), part_of(b, s->g, l)}};
    if (kept) a.states = b->states, a.e = b->e;
    return a;
}
static struct gated_norm_args norm_args(const struct delta_bench *b, bool kept) {
    const int64_t rows = b->rows * b->hv;
    return (struct gated_norm_args){.x = tensor_2d(b->o.data, DT_BF16, rows, b->dim),
                                    .y = tensor_2d(b->y.data, DT_BF16, rows, b->dim),
                                    .z = b->in,
                                    .z_at = channels(b),
                                    .w = b->w_norm,
                                    .rstd = kept ? b->rstd : TENSOR_NONE,
                                    .eps = 1e-6f};
}

static int rule(struct delta_bench *b, int64_t l, bool kept) {
    const struct delta_args a = rule_args(b, l, kept);
    return dev_delta_fwd(&b->dev, &a);
}
static int rule_backward(struct delta_bench *b) {
    const struct delta_args a = rule_args(b, 0, true);
    return dev_delta_bwd(&b->dev, &a, &(struct delta_bwd_args){b->dout, b->du, b->din, b->da_log, b->ddt_bias});
}
static int layer(struct delta_bench *b, int64_t l, bool kept) {
    struct dev *const d = &b->dev;
    const struct causal_conv_args conv = conv_args(b, l);
    const struct gated_norm_args norm = norm_args(b, kept);
    TRY(dev_matmul_fwd(d, b->in, b->x, weight_of(b->w_in, b->in_bytes, l), TENSOR_NONE, false));
    TRY(dev_causal_conv_fwd(d, &conv));
    TRY(rule(b, l, kept));
    TRY(dev_gated_norm_fwd(d, &norm));
    return dev_matmul_add(d, b->res, b->res, b->y, weight_of(b->w_out, b->out_bytes, l), TENSOR_NONE);
}
static int layer_backward(struct delta_bench *b) {
    struct dev *const d = &b->dev;
    const struct causal_conv_args conv = conv_args(b, 0);
    const struct gated_norm_args norm = norm_args(b, true);
    const struct tensor dy = tensor_2d(b->dy.data, DT_BF16, norm.x.dim[0], b->dim),
                        dout = tensor_2d(b->dout.data, DT_BF16, norm.x.dim[0], b->dim);
    TRY(dev_matmul_dx(d, b->dy, b->dres, b->w_out, false));
    TRY(dev_matmul_dw(d, b->dw_out, TENSOR_NONE, b->dres, b->y, false));
    TRY(dev_gated_norm_bwd(d, &norm, &(struct gated_norm_bwd_args){dy, dout, b->din, b->dw_norm}));
    TRY(rule_backward(b));
    TRY(dev_causal_conv_bwd(d, &conv, &(struct causal_conv_bwd_args){b->du, b->din, b->dtaps}));
    TRY(dev_matmul_dx(d, b->dx, b->din, b->w_in, false));
    return dev_matmul_dw(d, b->dw_in, TENSOR_NONE, b->din, b->x, false);
}

/* ---- what they cost at least ---- */

struct cost {
    double bytes, flop, seconds;
};
static void add_cost(const struct delta_bench *b, struct cost *c, double bytes, double flop) {
    const double m = bytes / b->memory, g = flop / b->gemm;
    c->bytes += bytes, c->flop += flop, c->seconds += m > g ? m : g;
}
/* of_rows: elements of so many columns in all rows. */
static double of_rows(const struct delta_bench *b, int64_t columns, double bytes) { return (double)(b->rows * columns) * bytes; }
/* The rule's forward; kept: with what backward reads. */
static void cost_rule(const struct delta_bench *b, struct cost *c, bool kept) {
    const int64_t v = b->hv * b->dim;
    const double entries = kept ? (double)(b->rows / C * v * b->dim) * F32 : 0;
    add_cost(b, c, of_rows(b, channels(b) + 2 * b->hv + v, BF16) + (kept ? of_rows(b, v, F32) + entries : 0),
             6 * of_rows(b, v * b->dim, 1));
}
static void cost_rule_backward(const struct delta_bench *b, struct cost *c) {
    const int64_t v = b->hv * b->dim;
    add_cost(b, c,
             of_rows(b, 2 * (channels(b) + 2 * b->hv) + v, BF16) + of_rows(b, v, F32) + (double)(b->rows / C * v * b->dim) * F32,
             12 * of_rows(b, v * b->dim, 1));
}
/* A step with `open` rows before it in the chunk. */
static void cost_step(const struct delta_bench *b, struct cost *c, double open) {
    const int64_t v = b->hv * b->dim, k = b->hk * b->dim;
    const double s = of_rows(b, v * b->dim, F32), written = open < C - 1 ? 0 : s; /* the chunk's last row writes S */
    const double rows = of_rows(b, v + b->hk + b->hv, F32) + of_rows(b, k, BF16); /* k, r, e, G */
    add_cost(b, c, s + written + (open + 1) * rows + of_rows(b, channels(b) + 2 * b->hv + v, BF16), 4 * of_rows(b, v * b->dim, 1));
}
static void cost_gemm(const struct delta_bench *b, struct cost *c, int64_t n, int64_t k, double out, double weight) {
    add_cost(b, c, of_rows(b, k, BF16) + of_rows(b, n, out) + (double)(n * k) * weight, 2 * of_rows(b, n * k, 1));
}
/* A layer without its rule; taken: whether the convolution has a state. */
static void cost_around(const struct delta_bench *b, struct cost *c, bool state) {
    const int64_t v = b->hv * b->dim;
    cost_gemm(b, c, width(b), b->hidden, BF16, BF16);
    add_cost(b, c, of_rows(b, (state ? 2 + TAPS : 2) * channels(b), BF16), 0);
    add_cost(b, c, of_rows(b, 3 * v, BF16), 0);
    cost_gemm(b, c, b->hidden, v, 2 * F32, BF16);
}
static void cost_around_backward(const struct delta_bench *b, struct cost *c) {
    const int64_t v = b->hv * b->dim, in = width(b);
    cost_gemm(b, c, v, b->hidden, BF16, BF16);
    cost_gemm(b, c, v, b->hidden, BF16, F32);
    add_cost(b, c, of_rows(b, 5 * v, BF16), 0);
    add_cost(b, c, of_rows(b, 3 * channels(b), BF16), 0);
    cost_gemm(b, c, b->hidden, in, BF16, BF16);
    cost_gemm(b, c, b->hidden, in, BF16, F32);
}

/* ---- measurements ---- */

/* What a case does `times` times, or what one replay of its graph does. */
struct work {
    int (*run)(struct delta_bench *b, int64_t open, bool whole);
    int64_t open; /* of a step: tokens of the chunk before it; C: all 64 steps of a chunk */
    bool whole;   /* the layer, not the rule alone */
    int64_t times;
    bool small;  /* many launches, which a graph makes where there are graphs */
    void *graph; /* NULL: there is none */
};
static int once(struct delta_bench *b, const struct work *w) {
    return w->graph ? dev_graph_run(&b->dev, w->graph) : w->run(b, w->open, w->whole);
}
static int timed(struct delta_bench *b, const struct work *w, int64_t calls, double *s) {
    TRY(dev_sync(&b->dev));
    const double t = clock_now();
    for (int64_t i = 0; i < calls; i++) TRY(once(b, w));
    TRY(dev_sync(&b->dev));
    *s = (clock_now() - t) / (double)calls;
    return 0;
}
/* The median of some measurements of several calls each. */
static int measure(struct delta_bench *b, struct work *w, double *s) {
    double of_round[ROUNDS];
    int64_t n = 0, calls = 1;
    int rc = 0;
    for (int i = 0; i < 2; i++) TRY(timed(b, w, 1, s));
    if (w->small && dev_has_graphs(&b->dev)) {
        TRY(dev_graph_begin(&b->dev));
        rc = w->run(b, w->open, w->whole);
        const int ended = dev_graph_end(&b->dev, &w->graph);
        TRYG(rc < 0 ? rc : ended, out);
        TRYG(timed(b, w, 1, s), out);
    }
    while (calls < 64 && (double)calls * *s < b->seconds / 20) calls *= 2;
    const double end = clock_now() + b->seconds;
    while (n < 3 || (n < ROUNDS && clock_now() < end)) TRYG(timed(b, w, calls, &of_round[n++]), out);
    *s = bench_median(of_round, n) / (double)w->times;
out:
    dev_graph_free(&b->dev, w->graph);
    w->graph = NULL;
    return rc;
}
/* open: below 0: no step; C: the mean over a chunk. */
static void print_case(struct delta_bench *b, const char *name, double seconds, const struct cost *c, int64_t open) {
    char at[16] = "-";
    if (open >= 0) snprintf(at, sizeof at, open < C ? "%" PRId64 : "mean", open);
    if (b->json) {
        printf("%s{\"case\": \"%s\", \"rows\": %" PRId64 ", ", b->first ? "" : ", ", name, b->rows);
        if (open >= 0) printf(open < C ? "\"open\": %s, " : "\"open\": \"%s\", ", at);
        printf("\"seconds\": %.9g, \"bytes\": %.9g, \"flop\": %.9g, \"roofline\": %.4g}", seconds, c->bytes, c->flop,
               c->seconds / seconds);
    } else {
        printf("%-16s %8" PRId64 " %6s %12.1f %12.1f %10.1f %10.2f %8.1f\n", name, b->rows, at, seconds * 1e6, c->bytes * 1e-6,
               c->bytes / seconds * 1e-9, c->flop / seconds * 1e-12, 100 * c->seconds / seconds);
    }
    b->first = false;
    fflush(stdout);
}
static int measure_case(struct delta_bench *b, const char *name, struct work w, const struct cost *c, int64_t open) {
    double s;
    TRY(measure(b, &w, &s));
    print_case(b, name, s, c, open);
    return 0;
}

static int run_forward(struct delta_bench *b, int64_t open, bool whole) {
    (void)open;
    return whole ? layer(b, 0, false) : rule(b, 0, false);
}
static int run_kept(struct delta_bench *b, int64_t open, bool whole) {
    (void)open;
    return whole ? layer(b, 0, true) : rule(b, 0, true);
}
static int run_backward(struct delta_bench *b, int64_t open, bool whole) {
    (void)open;
    return whole ? layer_backward(b) : rule_backward(b);
}
static int run_train(struct delta_bench *b, int64_t open, bool whole) {
    TRY(run_kept(b, open, whole));
    return run_backward(b, open, whole);
}

static int bench_rows(struct delta_bench *b, int64_t batch, int64_t len) {
    const int before = b->n_tensors;
    int rc = 0;
    b->seqs = (struct row_seqs){.n = batch, .max_rows = len};
    TRYG(alloc_ids(b, &b->seqs.start, batch + 1, 0, len), out);
    TRYG(alloc_ids(b, &b->seqs.pos0, batch, 0, 0), out);
    TRYG(alloc_rows(b, batch * len), out);
    TRYG(alloc_backward(b), out);
    for (int whole = 0; whole < 2; whole++) {
        struct cost forward = {0}, kept = {0}, backward = {0}, train;
        cost_rule(b, &forward, false);
        cost_rule(b, &kept, true);
        cost_rule_backward(b, &backward);
        if (whole) {
            cost_around(b, &forward, false);
            cost_around(b, &kept, false);
            cost_around_backward(b, &backward);
        }
        train = (struct cost){kept.bytes + backward.bytes, kept.flop + backward.flop, kept.seconds + backward.seconds};
        const struct work w = {run_forward, 0, whole, 1, false, NULL}, k = {run_kept, 0, whole, 1, false, NULL},
                          x = {run_backward, 0, whole, 1, false, NULL}, t = {run_train, 0, whole, 1, false, NULL};
        TRYG(measure_case(b, whole ? "layer forward" : "rule forward", w, &forward, -1), out);
        TRYG(measure_case(b, whole ? "layer kept" : "rule kept", k, &kept, -1), out);
        if (!whole) TRYG(measure_case(b, "rule backward", x, &backward, -1), out); /* may spend what forward has kept */
        TRYG(measure_case(b, whole ? "layer train" : "rule train", t, &train, -1), out);
    }
out:
    free_down_to(b, before);
    return rc;
}

static int run_step(struct delta_bench *b, int64_t open, bool whole) {
    const struct tensor pos = b->seqs.pos0;
    const int64_t first = open < C ? open : 0, last = open < C ? open : C - 1;
    int rc = 0;
    for (int64_t i = first; i <= last && rc == 0; i++) {
        b->seqs.pos0 = tensor_1d((int32_t *)pos.data + i * b->rows, DT_I32, b->rows);
        for (int64_t l = 0; l < b->layers && rc == 0; l++) rc = whole ? layer(b, l, false) : rule(b, l, false);
    }
    b->seqs.pos0 = pos;
    return rc;
}

static int bench_steps(struct delta_bench *b, int64_t rows) {
    static const int64_t open_rows[] = {0, 31, C - 2, C - 1, C};
    const int before = b->n_tensors;
    int rc = 0;
    int32_t *const pos = xcalloc((size_t)(rows * C), sizeof *pos);
    for (int64_t i = 0; i < rows * C; i++) pos[i] = (int32_t)(8 * C + i / rows);
    b->seqs = (struct row_seqs){.n = rows, .max_rows = 1};
    TRYG(alloc_ids(b, &b->seqs.start, rows + 1, 0, 1), out);
    TRYG(alloc_ids(b, &b->seqs.slot, rows, 0, 1), out);
    TRYG(alloc_tensor(b, &b->seqs.pos0, DT_I32, 1, (const int64_t[]){rows * C}), out);
    TRYG(dev_copy_in(&b->dev, b->seqs.pos0.data, pos, (size_t)(rows * C) * sizeof *pos), out);
    TRYG(alloc_rows(b, rows), out);
    TRYG(alloc_states(b, rows), out);
    for (int whole = 0; whole < 2; whole++)
        for (size_t i = 0; i < sizeof open_rows / sizeof *open_rows; i++) {
            const int64_t open = open_rows[i];
            struct cost c = {0};
            for (int64_t at = open < C ? open : 0; at < (open < C ? open + 1 : C); at++) {
                cost_step(b, &c, (double)at);
                if (whole) cost_around(b, &c, true);
            }
            if (open == C) c.bytes /= C, c.flop /= C, c.seconds /= C;
            const struct work w = {run_step, open, whole, b->layers * (open < C ? 1 : C), true, NULL};
            TRYG(measure_case(b, whole ? "layer step" : "rule step", w, &c, open), out);
        }
out:
    free_down_to(b, before);
    b->conv = TENSOR_NONE;
    b->state = (struct delta_state){TENSOR_NONE, TENSOR_NONE, TENSOR_NONE, TENSOR_NONE, TENSOR_NONE};
    free(pos);
    return rc;
}

/* ---- the machine ---- */

static int run_gemm(struct delta_bench *b, int64_t open, bool whole) {
    (void)open, (void)whole;
    return dev_matmul_fwd(&b->dev, b->y, b->x, b->w_in, TENSOR_NONE, false);
}
static int run_copy(struct delta_bench *b, int64_t open, bool whole) {
    (void)open, (void)whole;
    return dev_copy(&b->dev, b->y.data, b->x.data, (size_t)tensor_count(b->x) * F32);
}
static int measure_gemm(struct delta_bench *b, int64_t n) {
    struct work w = {run_gemm, 0, false, 1, false, NULL};
    double s;
    b->layers = 1;
    TRY(alloc_random(b, &b->x, DT_BF16, 2, (const int64_t[]){n, n}, (struct range){-1, 1}));
    TRY(alloc_tensor(b, &b->y, DT_BF16, 2, (const int64_t[]){n, n}));
    TRY(alloc_weights(b, &b->w_in, &b->in_bytes, n, n));
    TRY(measure(b, &w, &s));
    b->gemm = 2 * (double)(n * n) * (double)n / s;
    return 0;
}
static int measure_copy(struct delta_bench *b, int64_t n) {
    struct work w = {run_copy, 0, false, 1, false, NULL};
    double s;
    TRY(alloc_random(b, &b->x, DT_F32, 1, &n, (struct range){-1, 1}));
    TRY(alloc_tensor(b, &b->y, DT_F32, 1, &n));
    TRY(measure(b, &w, &s));
    b->memory = 2.0 * (double)n * F32 / s;
    return 0;
}
/* FLOP/s of a large GEMM; bytes/s of a large copy, on a CPU of reading. */
static int measure_machine(struct delta_bench *b, int threads) {
    const int before = b->n_tensors;
    const bool gpu = dev_has_own_memory(&b->dev);
    double median;
    int rc = measure_gemm(b, gpu ? 8192 : 1024);
    free_down_to(b, before);
    if (rc == 0) rc = gpu ? measure_copy(b, (int64_t)1 << 28) : bench_read_bandwidth(&b->dev, threads, &b->memory, &median);
    free_down_to(b, before);
    return rc;
}

int bench_delta(int argc, char **argv) {
    const char *device = "cuda";
    int64_t batch = 16, len = 1024, rows = 80, threads = 0;
    struct delta_bench b = {.hidden = 2048, .hk = 16, .hv = 16, .dim = 128, .seconds = 0.3, .first = true};
    const struct cmd_opt opts[] = {
        {"--device", CMD_STR, &device, "NAME", "cuda (the default), cuda:N or cpu"},
        {"--threads", CMD_I64(CMD_THREADS), &threads, "N", "of the CPU (0: all)"},
        {"--hidden", CMD_I64("int[16,65536]"), &b.hidden, "N", "the model's width (2048)"},
        {"--key-heads", CMD_I64("int[1,1024]"), &b.hk, "N", "key heads (16)"},
        {"--value-heads", CMD_I64("int[1,1024]"), &b.hv, "N", "value heads (16)"},
        {"--dim", CMD_I64("int[16,128]"), &b.dim, "N", "elements of a head, a multiple of 16 (128)"},
        {"--batch", CMD_I64("int[1,4096]"), &batch, "N", "prefill and training: sequences (16)"},
        {"--len", CMD_I64("int[1,131072]"), &len, "N", "prefill and training: tokens of each (1024)"},
        {"--rows", CMD_I64("int[0,65536]"), &rows, "N", "decoding: sequences; 0: no decoding steps (80)"},
        {"--seconds", CMD_F64("float(0,1e6]"), &b.seconds, "S", "time spent on each case (0.3)"},
        {"--json", CMD_FLAG, &b.json, NULL, "one line of JSON"},
    };
    const struct cmd_spec spec =
        CMD_SPEC(opts, "verlc bench delta [options]",
                 "A gated delta net layer in bf16: the gated delta rule alone and the whole layer; forward, forward\n"
                 "that keeps what backward reads, backward, and decoding steps, so many tokens into a chunk of 64.");
    const int help = cmd_parse(&spec, argc, argv);
    if (help != 0) return help < 0 ? help : 0;
    if (b.hv % b.hk) FAIL(ERR_INVAL, "--value-heads %" PRId64 ": not a multiple of --key-heads %" PRId64, b.hv, b.hk);
    if (b.dim % 16) FAIL(ERR_INVAL, "--dim %" PRId64 ": not a multiple of 16", b.dim);
    TRY(dev_open_named(&b.dev, device, (int)threads, NULL));
    int rc = 0;
    TRYG(measure_machine(&b, (int)threads), out);
    b.layers = dev_has_own_memory(&b.dev) && rows ? MOST_LAYERS : 1;
    TRYG(alloc_layer(&b), out);
    if (b.json)
        printf("{\"device\": \"%s\", \"hidden\": %" PRId64 ", \"key_heads\": %" PRId64 ", \"value_heads\": %" PRId64
               ", \"dim\": %" PRId64 ", \"batch\": %" PRId64 ", \"len\": %" PRId64
               ", \"memory\": %.6g, \"gemm\": %.6g, \"cases\": [",
               b.dev.describe, b.hidden, b.hk, b.hv, b.dim, batch, len, b.memory, b.gemm);
    else
        printf("%s, bf16; %" PRId64 " key and %" PRId64 " value heads of %" PRId64 ", width %" PRId64
               "; memory %.1f GB/s, a GEMM %.2f TFLOP/s\n%-16s %8s %6s %12s %12s %10s %10s %8s\n",
               b.dev.describe, b.hk, b.hv, b.dim, b.hidden, b.memory * 1e-9, b.gemm * 1e-12, "case", "rows", "open", "us", "MB",
               "GB/s", "TFLOP/s", "roofl. %");
    TRYG(bench_rows(&b, batch, len), out);
    if (rows) TRYG(bench_steps(&b, rows), out);
    if (b.json) printf("]}\n");
out:
    free_down_to(&b, 0);
    dev_close(&b.dev);
    return rc;
}
