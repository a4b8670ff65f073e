/* bench_attention.c - `verlc bench attention`: a layer's attention: decoding, with the rate at which its keys are read, forward and
 * backward of packed sequences as in training. Heads are Moonlight's by default: latent attention, whose values are its keys.
 *
 * Decoding: --prompts of --prompt keys each, which --n samples share, and up to --len keys of each sample's own. Each call is
 * another layer's, so that no keys are left in the cache by the one before. A time is the median of several measurements. */
#include "cmd/bench/bench.h"

#include "base/clock.h"
#include "base/err.h"
#include "base/rng.h"
#include "cmd/cmd.h"
#include "device/graph.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { LAYERS = 8, KV_BLOCK = 16, PIECE = 1 << 20, ROUNDS = 50, MOST_TENSORS = 16 };

struct attention_bench {
    struct dev dev;
    struct tensor of[MOST_TENSORS]; /* all that were allocated */
    int n_tensors;
    int64_t heads, kv_heads, dim;
    bool latent;
    double seconds;
};

/* Random values, or the integers `ids`. */
static int alloc_tensor(struct attention_bench *b, struct tensor *t, const int32_t *ids) {
    struct dev *const d = &b->dev;
    const int64_t count = tensor_count(*t);
    const size_t size = dtype_size(t->dt);
    CHECK(b->n_tensors < MOST_TENSORS);
    TRY(dev_alloc(d, (size_t)count * size, &t->data));
    b->of[b->n_tensors++] = *t;
    if (ids) return dev_copy_in(d, t->data, ids, (size_t)count * size);
    uint16_t *const host = xmalloc(PIECE * sizeof *host);
    struct rng g = {.seed = 5, .stream = RNG_TEST};
    int rc = 0;
    for (int64_t i = 0; i < PIECE; i++) host[i] = f32_to_bf16((float)rng_below(&g, 65536) / 32768 - 1);
    for (int64_t at = 0; at < count && t->dt == DT_BF16 && rc == 0; at += PIECE)
        rc = dev_copy_in(d, (char *)t->data + (size_t)at * size, host, (size_t)(count - at < PIECE ? count - at : PIECE) * size);
    free(host);
    return rc;
}
static void free_tensors(struct attention_bench *b) {
    while (b->n_tensors > 0) {
        const struct tensor t = b->of[--b->n_tensors];
        dev_free(&b->dev, t.data, (size_t)tensor_count(t) * dtype_size(t.dt));
    }
}

static struct attn_args args_of(const struct attention_bench *b) {
    return (struct attn_args){
        .n_q_heads = b->heads, .n_kv_heads = b->kv_heads, .head_dim = b->dim, .scale = 1.0f / sqrtf((float)b->dim)};
}
static int alloc_keys(struct attention_bench *b, struct attn_args *a, int64_t blocks, int64_t block_len) {
    a->kv.k = (struct tensor){NULL, DT_BF16, 4, {blocks, b->kv_heads, block_len, b->dim}};
    TRY(alloc_tensor(b, &a->kv.k, NULL));
    a->kv.v = a->kv.k;
    return b->latent ? 0 : alloc_tensor(b, &a->kv.v, NULL);
}

/* One measurement more of what `run` does; *s: seconds. */
typedef int run_fn(struct attention_bench *b, const void *of);
static int timed(struct attention_bench *b, run_fn *run, const void *of, double *s) {
    TRY(dev_sync(&b->dev));
    const double t = clock_now();
    TRY(run(b, of));
    TRY(dev_sync(&b->dev));
    *s = clock_now() - t;
    return 0;
}
static int median_of(struct attention_bench *b, run_fn *run, const void *of, double *s) {
    static double of_round[ROUNDS];
    const double end = clock_now() + b->seconds;
    int64_t n = 0;
    for (int i = 0; i < 2; i++) TRY(timed(b, run, of, s));
    while (n < 3 || (n < ROUNDS && clock_now() < end)) TRY(timed(b, run, of, &of_round[n++]));
    *s = bench_median(of_round, n);
    return 0;
}

/* ---- decoding ---- */

struct decoding {
    struct attn_args args; /* of the first layer */
    int64_t blocks;        /* of a layer */
    void *graph;           /* of all layers; NULL: this device has none */
};

static int all_layers(struct attention_bench *b, const struct decoding *x) {
    for (int64_t l = 0; l < LAYERS; l++) {
        struct attn_args a = x->args;
        const int64_t at = l * x->blocks * KV_BLOCK * b->kv_heads * b->dim * (int64_t)dtype_size(DT_BF16);
        a.kv.k.data = (char *)a.kv.k.data + at;
        a.kv.v.data = (char *)a.kv.v.data + at;
        a.kv.k.dim[0] = a.kv.v.dim[0] = x->blocks;
        TRY(dev_attn_fwd(&b->dev, &a));
    }
    return 0;
}
static int run_decode(struct attention_bench *b, const void *of) {
    const struct decoding *const x = of;
    return x->graph ? dev_graph_run(&b->dev, x->graph) : all_layers(b, x);
}

/* The keys of each sample, its block table, where samples of a prompt share the prompt's whole blocks. Returns keys read once. */
static int64_t place_keys(const struct bench_prompts *p, int32_t *pos0, int32_t *table, int64_t max_blocks, int64_t *all) {
    struct rng g = {.seed = 7, .stream = RNG_TEST};
    int64_t once = 0;
    int32_t next = 0;
    *all = 0;
    for (int64_t i = 0; i < p->prompts * p->n; i++) {
        const int64_t keys = p->length + (int64_t)rng_below(&g, (uint64_t)p->max_tokens + 1),
                      shared = i % p->n ? p->length / KV_BLOCK : 0;
        for (int64_t k = 0; k < max_blocks; k++)
            table[i * max_blocks + k] = k < shared ? table[(i - 1) * max_blocks + k] : k * KV_BLOCK <= keys ? next++ : 0;
        pos0[i] = (int32_t)keys;
        *all += keys + 1;
        once += keys + 1 - shared * KV_BLOCK;
    }
    return once;
}

static int bench_decoding(struct attention_bench *b, const struct bench_prompts *p) {
    const int64_t rows = p->prompts * p->n, max_blocks = (p->length + p->max_tokens) / KV_BLOCK + 1;
    int32_t *const start = xcalloc((size_t)rows + 1, sizeof *start), *const pos0 = xcalloc((size_t)rows, sizeof *pos0),
                   *const table = xcalloc((size_t)(rows * max_blocks), sizeof *table);
    int64_t all, once = place_keys(p, pos0, table, max_blocks, &all);
    struct decoding x = {.args = args_of(b), .blocks = (once + rows * KV_BLOCK) / KV_BLOCK + 1};
    struct attn_args *const a = &x.args;
    double s;
    int rc = 0;
    for (int64_t i = 0; i <= rows; i++) start[i] = (int32_t)i;
    a->seqs.n = rows;
    a->seqs.max_q = 1;
    a->seqs.max_kv = p->length + p->max_tokens + 1;
    a->seqs.q_start = tensor_1d(NULL, DT_I32, rows + 1);
    a->seqs.pos0 = tensor_1d(NULL, DT_I32, rows);
    a->seqs.block_table = tensor_2d(NULL, DT_I32, rows, max_blocks);
    a->q = a->out = tensor_2d(NULL, DT_BF16, rows, b->heads * b->dim);
    TRYG(alloc_tensor(b, &a->seqs.q_start, start), out);
    TRYG(alloc_tensor(b, &a->seqs.pos0, pos0), out);
    TRYG(alloc_tensor(b, &a->seqs.block_table, table), out);
    TRYG(alloc_tensor(b, &a->q, NULL), out);
    TRYG(alloc_tensor(b, &a->out, NULL), out);
    TRYG(alloc_keys(b, a, LAYERS * x.blocks, KV_BLOCK), out);
    TRYG(all_layers(b, &x), out);
    if (dev_has_graphs(&b->dev)) {
        TRYG(dev_graph_begin(&b->dev), out);
        rc = all_layers(b, &x);
        const int ended = dev_graph_end(&b->dev, &x.graph);
        TRYG(rc < 0 ? rc : ended, out);
    }
    TRYG(median_of(b, run_decode, &x, &s), out);
    const double us = s * 1e6 / LAYERS, bytes = (double)(b->kv_heads * b->dim * (b->latent ? 2 : 4));
    printf("decode   %6" PRId64 " x %-4" PRId64 " %8.1f us   %6.2f TB/s of keys read once, %6.2f of each sample's, %7.1f TFLOP/s\n",
           p->prompts, p->n, us, (double)once * bytes / us * 1e-6, (double)all * bytes / us * 1e-6,
           4 * (double)(all * b->heads * b->dim) / us * 1e-6);
out:
    dev_graph_free(&b->dev, x.graph);
    free_tensors(b);
    free(start);
    free(pos0);
    free(table);
    return rc;
}

/* ---- training ---- */

struct training {
    struct attn_args args;
    struct tensor dout, dq, dk, dv;
};
static int run_forward(struct attention_bench *b, const void *of) {
    return dev_attn_fwd(&b->dev, &((const struct training *)of)->args);
}
static int run_backward(struct attention_bench *b, const void *of) {
    const struct training *const x = of;
    return dev_attn_bwd(&b->dev, &x->args, x->dout, x->dq, x->dk, x->dv);
}

static int bench_training(struct attention_bench *b, int64_t tokens, int64_t length) {
    const int64_t n = (tokens + length - 1) / length, rows = n * length;
    int32_t *const start = xcalloc((size_t)n + 1, sizeof *start), *const pos0 = xcalloc((size_t)n, sizeof *pos0);
    struct training x = {.args = args_of(b)};
    struct attn_args *const a = &x.args;
    int rc = 0;
    for (int64_t i = 0; i <= n; i++) start[i] = (int32_t)(i * length);
    a->seqs.n = n;
    a->seqs.max_q = a->seqs.max_kv = length;
    a->seqs.q_start = tensor_1d(NULL, DT_I32, n + 1);
    a->seqs.pos0 = a->seqs.kv_start = tensor_1d(NULL, DT_I32, n);
    a->q = a->out = x.dout = x.dq = tensor_2d(NULL, DT_BF16, rows, b->heads * b->dim);
    a->lse = tensor_2d(NULL, DT_F32, rows, b->heads);
    struct tensor *const each[] = {&a->q, &a->out, &a->lse, &x.dout, &x.dq};
    TRYG(alloc_tensor(b, &a->seqs.q_start, start), out);
    TRYG(alloc_tensor(b, &a->seqs.pos0, pos0), out);
    TRYG(alloc_tensor(b, &a->seqs.kv_start, start), out);
    for (size_t i = 0; i < sizeof each / sizeof *each; i++) TRYG(alloc_tensor(b, each[i], NULL), out);
    TRYG(alloc_keys(b, a, 1, rows), out);
    x.dk = x.dv = a->kv.k;
    x.dk.dt = x.dv.dt = DT_F32;
    TRYG(alloc_tensor(b, &x.dk, NULL), out);
    TRYG(alloc_tensor(b, &x.dv, NULL), out);
    const double flop = 4 * (double)(b->heads * b->dim) * (double)n * ((double)length * (double)(length + 1) / 2);
    double s;
    TRYG(median_of(b, run_forward, &x, &s), out);
    printf("forward  %6" PRId64 " x %-4" PRId64 " %8.1f us   %6.1f TFLOP/s\n", n, length, s * 1e6, flop / s * 1e-12);
    TRYG(median_of(b, run_backward, &x, &s), out);
    printf("backward %6" PRId64 " x %-4" PRId64 " %8.1f us   %6.1f TFLOP/s\n", n, length, s * 1e6, 2.5 * flop / s * 1e-12);
out:
    free_tensors(b);
    free(start);
    free(pos0);
    return rc;
}

int bench_attention(int argc, char **argv) {
    const char *device = "cuda";
    struct bench_prompts p = {.prompts = 16, .n = 5, .length = 512, .max_tokens = 1000};
    struct attention_bench b = {.heads = 16, .kv_heads = 0, .dim = 576, .seconds = 0.5};
    int64_t tokens = 16384, sequence = 1024;
    const struct cmd_opt opts[] = {
        {"--device", CMD_STR, &device, "NAME", "cuda (the default), cuda:N or cpu"},
        {"--heads", CMD_I64("int[1,1024]"), &b.heads, "N", "query heads (16)"},
        {"--kv-heads", CMD_I64("int[0,1024]"), &b.kv_heads, "N", "key heads; 0, the default: one, whose keys are the values"},
        {"--dim", CMD_I64("int[8,576]"), &b.dim, "N", "elements of a head (576)"},
        {"--prompts", CMD_I64("int[1,4096]"), &p.prompts, "N", "decoding: prompts (16)"},
        {"--n", CMD_I64("int[1,256]"), &p.n, "N", "decoding: samples of each, which share its keys (5)"},
        {"--prompt", CMD_I64("int[1,131072]"), &p.length, "N", "decoding: keys of a prompt (512)"},
        {"--len", CMD_I64("int[0,131072]"), &p.max_tokens, "N",
         "decoding: most keys of a sample's own; each has up to so many (1000)"},
        {"--tokens", CMD_I64("int[1,1048576]"), &tokens, "N", "training: tokens (16384)"},
        {"--sequence", CMD_I64("int[1,131072]"), &sequence, "N", "training: of sequences of so many each (1024)"},
        {"--seconds", CMD_F64("float(0,1e6]"), &b.seconds, "S", "time spent on each case (0.5)"},
    };
    const struct cmd_spec spec =
        CMD_SPEC(opts, "verlc bench attention [options]", "Attention of a layer in bf16: decoding, forward, backward.");
    const int help = cmd_parse(&spec, argc, argv);
    if (help != 0) return help < 0 ? help : 0;
    b.latent = b.kv_heads == 0;
    if (b.latent) b.kv_heads = 1;
    if (b.heads % b.kv_heads) FAIL(ERR_INVAL, "--heads %" PRId64 ": not a multiple of --kv-heads %" PRId64, b.heads, b.kv_heads);
    TRY(dev_open_named(&b.dev, device, 0, NULL));
    printf("%s, bf16; %" PRId64 " heads of %" PRId64 ", %" PRId64 " of keys%s\n", b.dev.describe, b.heads, b.dim, b.kv_heads,
           b.latent ? ", which are the values" : "");
    int rc = bench_decoding(&b, &p);
    if (rc == 0) rc = bench_training(&b, tokens, sequence);
    dev_close(&b.dev);
    return rc;
}
