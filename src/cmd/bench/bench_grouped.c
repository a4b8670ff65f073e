/* bench_grouped.c - `verlc bench grouped`: rates of a device's grouped GEMMs and of dense GEMMs of the same arithmetic, which are
 * run in turn with them, at the shapes of a layer with experts (those of Qwen3-30B-A3B by default).
 *
 * A token's experts are drawn at random, all alike, or are all among the first --load. A time is the median of several
 * measurements of several calls. */
#include "cmd/bench/bench.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/rng.h"
#include "cmd/cmd.h"
#include "device/device.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

enum { PIECE = 1 << 22, MOST_ROUNDS = 200 }; /* PIECE: random elements; a tensor is that many again and again */

struct grouped_bench {
    struct dev dev;
    struct tensor x, dy, y, dx, dw, offset; /* dw: of all experts */
    struct tensor w;                        /* of all experts, packed */
    int64_t rows, experts, n, k;
    double seconds;
};

enum op { FWD, DX, DW, DW_ADD, N_OPS };
static const char *const op_names[N_OPS] = {"fwd", "dx", "dw", "dw +="};

static int alloc_random(struct dev *d, struct tensor *t, enum dtype dt, int64_t r, int64_t c) {
    const size_t size = dtype_size(dt);
    *t = tensor_2d(NULL, dt, r, c);
    TRY(dev_alloc(d, (size_t)(r * c) * size, &t->data));
    char *const host = xmalloc(PIECE * size);
    struct rng g = {.seed = 5, .stream = RNG_TEST};
    int rc = 0;
    for (int64_t i = 0; i < PIECE; i++) {
        const float v = (float)rng_below(&g, 65536) / 32768 - 1;
        if (dt == DT_BF16) ((uint16_t *)(void *)host)[i] = f32_to_bf16(v);
        else ((float *)(void *)host)[i] = v;
    }
    for (int64_t at = 0; at < r * c && rc == 0; at += PIECE) {
        const int64_t n = r * c - at < PIECE ? r * c - at : PIECE;
        rc = dev_copy_in(d, (char *)t->data + (size_t)at * size, host, (size_t)n * size);
    }
    free(host);
    return rc;
}
static void free_tensor(struct dev *d, struct tensor t) { dev_free(d, t.data, (size_t)tensor_count(t) * dtype_size(t.dt)); }

/* Where each expert's rows begin. */
static int draw_offsets(struct grouped_bench *b, int64_t load) {
    struct rng g = {.seed = 7, .stream = RNG_TEST};
    int32_t *const at = xcalloc((size_t)b->experts + 1, sizeof *at);
    for (int64_t i = 0; i < b->rows; i++) at[1 + rng_below(&g, (uint64_t)(load ? load : b->experts))]++;
    for (int64_t e = 0; e < b->experts; e++) at[e + 1] += at[e];
    b->offset = tensor_1d(NULL, DT_I32, b->experts + 1);
    int rc = dev_alloc(&b->dev, (size_t)(b->experts + 1) * sizeof *at, &b->offset.data);
    if (rc == 0) rc = dev_copy_in(&b->dev, b->offset.data, at, (size_t)(b->experts + 1) * sizeof *at);
    free(at);
    return rc;
}

static int call(struct grouped_bench *b, enum op op, bool dense) {
    struct dev *const d = &b->dev;
    const struct weight w = {b->w.data, b->w.dt, b->n, b->k, 0, 0};
    const struct weight_stack all = {w, b->experts};
    struct tensor dw = b->dw;
    if (!dense) dw = (struct tensor){b->dw.data, DT_F32, 3, {b->experts, b->n, b->k, 1}};
    else dw = tensor_rows(dw, 0, b->n);
    switch (op) {
    case FWD: return dense ? dev_matmul_fwd(d, b->y, b->x, w, TENSOR_NONE, false) : dev_grouped_fwd(d, b->y, b->x, all, b->offset);
    case DX: return dense ? dev_matmul_dx(d, b->dx, b->dy, w, false) : dev_grouped_dx(d, b->dx, b->dy, all, b->offset);
    default:
        return dense ? dev_matmul_dw(d, dw, TENSOR_NONE, b->dy, b->x, op == DW_ADD)
                     : dev_grouped_dw(d, dw, b->dy, b->x, b->offset, op == DW_ADD);
    }
}

/* Seconds of a call. */
static int timed(struct grouped_bench *b, enum op op, bool dense, int64_t calls, double *s) {
    TRY(dev_sync(&b->dev));
    const double t = clock_now();
    for (int64_t i = 0; i < calls; i++) TRY(call(b, op, dense));
    TRY(dev_sync(&b->dev));
    *s = (clock_now() - t) / (double)calls;
    return 0;
}

static int run_op(struct grouped_bench *b, const char *layer, enum op op) {
    static double s[2][MOST_ROUNDS];
    const double flop = 2 * (double)b->rows * (double)(b->n * b->k), end = clock_now() + b->seconds;
    int64_t rounds = 0, calls = 1;
    double rate[2];
    for (int dense = 0; dense < 2; dense++) { /* the first call may autotune */
        TRY(timed(b, op, dense, 1, &s[dense][0]));
        TRY(timed(b, op, dense, 1, &s[dense][0]));
    }
    while (calls < 100 && (double)calls * (s[0][0] + s[1][0]) < b->seconds / 10) calls *= 2;
    while (rounds < 3 || (rounds < MOST_ROUNDS && clock_now() < end)) {
        for (int dense = 0; dense < 2; dense++) TRY(timed(b, op, dense, calls, &s[dense][rounds]));
        rounds++;
    }
    for (int dense = 0; dense < 2; dense++) rate[dense] = flop / bench_median(s[dense], rounds) * 1e-12;
    printf("%-8s %-6s %8" PRId64 " %6" PRId64 " %6" PRId64 " %10.3f %10.1f %10.1f %7.0f\n", layer, op_names[op], b->rows, b->n,
           b->k, flop / rate[0] * 1e-9, rate[0], rate[1], 100 * rate[0] / rate[1]);
    fflush(stdout);
    return 0;
}

static int run_layer(struct grouped_bench *b, const char *layer, enum dtype act, int64_t n, int64_t k) {
    struct dev *const d = &b->dev;
    int rc = 0;
    b->n = n, b->k = k;
    b->x = b->dy = b->y = b->dx = b->w = b->dw = TENSOR_NONE;
    TRYG(alloc_random(d, &b->x, act, b->rows, k), out);
    TRYG(alloc_random(d, &b->dy, act, b->rows, n), out);
    TRYG(alloc_random(d, &b->y, act, b->rows, n), out);
    TRYG(alloc_random(d, &b->dx, act, b->rows, k), out);
    TRYG(alloc_random(d, &b->w, act, b->experts * n, k), out);
    TRYG(alloc_random(d, &b->dw, DT_F32, b->experts * n, k), out);
    for (int op = 0; op < N_OPS; op++) TRYG(run_op(b, layer, (enum op)op), out);
out:
    free_tensor(d, b->x);
    free_tensor(d, b->dy);
    free_tensor(d, b->y);
    free_tensor(d, b->dx);
    free_tensor(d, b->w);
    free_tensor(d, b->dw);
    return rc;
}

int bench_grouped(int argc, char **argv) {
    const char *device = "cuda";
    int64_t tokens = 16384, experts = 128, choices = 8, hidden = 2048, ffn = 768, load = 0;
    double seconds = 0.5;
    bool f32 = false;
    const struct cmd_opt opts[] = {
        {"--device", CMD_STR, &device, "NAME", "cuda (the default) or cuda:N"},
        {"--tokens", CMD_I64("int[1,1048576]"), &tokens, "N", "tokens (16384)"},
        {"--experts", CMD_I64("int[1,1024]"), &experts, "N", "experts of the layer (128)"},
        {"--choices", CMD_I64("int[1,32]"), &choices, "N", "experts of a token (8)"},
        {"--hidden", CMD_I64("int[8,65536]"), &hidden, "N", "the model's width (2048)"},
        {"--ffn", CMD_I64("int[8,65536]"), &ffn, "N", "an expert's width (768)"},
        {"--load", CMD_I64("int[0,1024]"), &load, "N", "all rows are of the first N experts (0: of all)"},
        {"--f32", CMD_FLAG, &f32, NULL, "f32 operands instead of bf16"},
        {"--seconds", CMD_F64("float(0,1e6]"), &seconds, "S", "time spent on each case (0.5)"},
    };
    const struct cmd_spec spec =
        CMD_SPEC(opts, "verlc bench grouped [options]", "Grouped GEMMs of experts, and dense GEMMs of the same work.");
    const int help = cmd_parse(&spec, argc, argv);
    if (help != 0) return help < 0 ? help : 0;
    if (load > experts) FAIL(ERR_INVAL, "--load %" PRId64 ": there are %" PRId64 " experts", load, experts);
    struct grouped_bench b = {.rows = tokens * choices, .experts = experts, .seconds = seconds};
    const enum dtype act = f32 ? DT_F32 : DT_BF16;
    int rc = 0;
    TRY(dev_open_named(&b.dev, device, 0, NULL));
    if (!dev_has_own_memory(&b.dev)) /* whose weights are packed otherwise */
        FAILG(out, ERR_UNSUPPORTED, "bench grouped: GPUs alone are measured, not %s: --device cuda", device);
    printf("%s, %s; rows of %" PRId64 " experts\n", b.dev.describe, dtype_name(act), load ? load : experts);
    printf("%-8s %-6s %8s %6s %6s %10s %10s %10s %7s\n", "matrix", "op", "rows", "n", "k", "ms", "TFLOP/s", "dense", "%");
    TRYG(draw_offsets(&b, load), out);
    TRYG(run_layer(&b, "gate_up", act, 2 * ffn, hidden), out);
    TRYG(run_layer(&b, "down", act, hidden, ffn), out);
out:
    if (b.offset.data) free_tensor(&b.dev, b.offset);
    dev_close(&b.dev);
    return rc;
}
