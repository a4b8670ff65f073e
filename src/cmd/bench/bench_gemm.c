/* bench_gemm.c - `verlc bench gemm`: rates of a device's GEMMs on the shapes of Qwen2.5-0.5B, on the CPU next to memory
 * bandwidth (the roofline at small M).
 *
 * With --jsonl it times GEMMs named on standard input, so that a script can
 * alternate with another library in one run: {"op": "fwd"|"dx"|"dw", "m", "n",
 * "k"} -> {"op", "m", "n", "k", "seconds", "gflops"}.  A time is the best of
 * several calls; at small M weights rotate through more memory than the caches hold, as in decoding. */
#include "cmd/bench/bench.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/rng.h"
#include "base/thread_pool.h"
#include "cmd/cmd.h"
#include "device/device.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Rotating weights of this many bytes are never found in a cache. */
#define COLD_BYTES ((int64_t)768 << 20)

struct gemm_case {
    const char *op;
    int64_t m, n, k;
};

struct gemm_bench {
    struct dev dev;
    enum dtype act;
    double min_time; /* seconds of measuring for each case */
};

static int alloc_random(struct dev *d, struct tensor *t, enum dtype dt, int64_t r, int64_t c) {
    *t = tensor_2d(NULL, dt, r, c);
    const size_t bytes = (size_t)(r * c) * dtype_size(dt);
    TRY(dev_alloc(d, bytes, &t->data));
    void *host = xmalloc(bytes);
    uint32_t s = 12345; /* random values: multipliers slow down with the bits that flip */
    for (int64_t i = 0; i < r * c; i++) {
        s = s * 1664525u + 1013904223u;
        const float v = (float)(s >> 8) * 0x1p-23f - 1.0f;
        if (dt == DT_BF16) ((uint16_t *)host)[i] = f32_to_bf16(v);
        else ((float *)host)[i] = v;
    }
    const int rc = dev_copy_in(d, t->data, host, bytes);
    free(host);
    return rc;
}

static bool on_cpu(const struct dev *d) { return !dev_has_own_memory(d); }

static void free_tensor(struct dev *d, struct tensor t) { dev_free(d, t.data, (size_t)tensor_count(t) * dtype_size(t.dt)); }

static int run_case(struct gemm_bench *b, const struct gemm_case *c, double *best) {
    struct dev *d = &b->dev;
    struct tensor x = {0}, dy = {0}, y = {0}, dx = {0}, dw = {0}, src = {0};
    const size_t bytes = dev_weight_bytes(d, b->act, c->n, c->k);
    int64_t copies = c->m <= 128 ? COLD_BYTES / (int64_t)bytes : 1;
    if (copies < 1 || strcmp(c->op, "fwd") != 0) copies = 1;
    void *block = NULL;
    int rc = 0;
    TRYG(alloc_random(d, &x, b->act, c->m, c->k), out);
    TRYG(alloc_random(d, &dy, b->act, c->m, c->n), out);
    TRYG(alloc_random(d, &src, b->act, c->n, c->k), out);
    TRYG(alloc_random(d, &y, b->act, c->m, c->n), out);
    TRYG(alloc_random(d, &dx, b->act, c->m, c->k), out);
    TRYG(alloc_random(d, &dw, DT_F32, c->n, c->k), out);
    TRYG(dev_alloc(d, bytes * (size_t)copies, &block), out);
    struct weight w = {block, b->act, c->n, c->k, 0, 0};
    for (int64_t i = 0; i < copies; i++) {
        w.data = (char *)block + (size_t)i * bytes;
        TRYG(dev_weight_pack(d, w, src), out);
    }
    *best = 1e9;
    const int64_t calls = on_cpu(d) ? copies : copies > 100 ? copies : 100;
    const double end = clock_now() + b->min_time;
    for (int64_t i = 0; i < 3 || clock_now() < end; i++) {
        /* with rotating weights a measurement is one turn through all of them; on a GPU many calls are queued,
         * so that launch latency is not what is measured */
        TRYG(dev_sync(d), out);
        const double t = clock_now();
        for (int64_t j = 0; j < calls; j++) {
            w.data = (char *)block + (size_t)(j % copies) * bytes;
            if (strcmp(c->op, "fwd") == 0) TRYG(dev_matmul_fwd(d, y, x, w, TENSOR_NONE, false), out);
            else if (strcmp(c->op, "dx") == 0) TRYG(dev_matmul_dx(d, dx, dy, w, false), out);
            else if (strcmp(c->op, "dw") == 0) TRYG(dev_matmul_dw(d, dw, TENSOR_NONE, dy, x, true), out);
            else FAILG(out, ERR_INVAL, "op '%s': one of fwd, dx, dw", c->op);
        }
        TRYG(dev_sync(d), out);
        const double dt = (clock_now() - t) / (double)calls;
        if (dt < *best) *best = dt;
    }
out:
    dev_free(d, block, bytes * (size_t)copies);
    free_tensor(d, x);
    free_tensor(d, dy);
    free_tensor(d, src);
    free_tensor(d, y);
    free_tensor(d, dx);
    free_tensor(d, dw);
    return rc;
}

/* ---- memory bandwidth ---- */

struct read_job {
    const uint64_t *p;
    int64_t n;
    uint64_t sums[64]; /* so that the reads are not optimised away */
};

static void read_part(void *arg, int64_t part, int thread) {
    struct read_job *j = arg;
    int64_t lo, hi;
    uint64_t s = 0;
    (void)thread;
    pool_range(j->n / 32, 64, part, &lo, &hi);
    /* One word of each line: the line moves whole, and adding words is not the limit. */
    for (int64_t i = lo * 32; i < hi * 32; i += 32) {
        const uint64_t *q = j->p + i;
        for (int l = 0; l < 4; l++) __builtin_prefetch(q + 1024 + 8 * l);
        s += q[0] + q[8] + q[16] + q[24];
    }
    j->sums[part] = s;
}

static int by_size(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double bench_median(double *v, int64_t n) {
    qsort(v, (size_t)n, sizeof *v, by_size);
    return v[n / 2];
}

int bench_read_bandwidth(struct dev *d, int n_threads, double *best, double *median) {
    enum { PASSES = 25 };
    const size_t share = (size_t)128 << 20; /* of a thread: more than the caches that it has */
    double rates[PASSES];
    struct read_job j = {.n = 0};
    struct pool *pool = NULL;
    size_t bytes = 0;
    void *p = NULL;
    int rc = 0;
    *best = *median = 0;
    TRYG(pool_create(&pool, n_threads), out);
    bytes = (size_t)(pool_threads(pool) < 8 ? pool_threads(pool) : 8) * share;
    TRYG(dev_alloc(d, bytes, &p), out);
    memset(p, 1, bytes);
    j.p = p;
    j.n = (int64_t)(bytes / 8);
    for (int i = 0; i < PASSES; i++) {
        const double t = clock_now();
        pool_run(pool, 64, read_part, &j);
        rates[i] = (double)bytes / (clock_now() - t);
    }
    *median = bench_median(rates, PASSES);
    *best = rates[PASSES - 1];
out:
    pool_destroy(pool);
    dev_free(d, p, bytes);
    return rc;
}

/* ---- output ---- */

static int jsonl_line(void *arg, char *line, size_t n, int64_t no) {
    struct gemm_bench *b = arg;
    char where[32];
    struct gemm_case c;
    json_t *o = NULL;
    double best = 0;
    int rc = 0;
    snprintf(where, sizeof where, "stdin:%" PRId64, no);
    TRY(json_parse(&o, line, n, where));
    TRYG(json_str(o, "op", &c.op, where), out);
    TRYG(json_i64(o, "m", &c.m, where), out);
    TRYG(json_i64(o, "n", &c.n, where), out);
    TRYG(json_i64(o, "k", &c.k, where), out);
    const int64_t most = 1 << 20;
    if (c.m < 1 || c.n < 1 || c.k < 1 || c.m > most || c.n > most || c.k > most)
        FAILG(out, ERR_INVAL, "%s: m, n and k must be in [1, %" PRId64 "]", where, most);
    rc = run_case(b, &c, &best);
    if (rc < 0) {
        err_wrap(rc, "%s", where);
        goto out;
    }
    printf("{\"op\": \"%s\", \"m\": %" PRId64 ", \"n\": %" PRId64 ", \"k\": %" PRId64 ", \"seconds\": %.17g, \"gflops\": %.17g}\n",
           c.op, c.m, c.n, c.k, best, 2e-9 * (double)(c.m * c.n) * (double)c.k / best);
    fflush(stdout);
out:
    json_decref(o);
    return rc;
}

static int print_table(struct gemm_bench *b, int n_threads) {
    static const struct {
        const char *name;
        int64_t n, k;
    } layers[] = {{"qkv", 1152, 896}, {"o", 896, 896}, {"gate_up", 9728, 896}, {"down", 896, 4864}, {"head", 151936, 896}};
    static const int64_t rows[] = {1, 8, 80, 512, 2048};
    static const char *const ops[] = {"fwd", "dx", "dw"};
    double bandwidth = 0, median;
    printf("%s, %s", b->dev.describe, dtype_name(b->act));
    if (on_cpu(&b->dev)) {
        TRY(bench_read_bandwidth(&b->dev, n_threads, &bandwidth, &median));
        printf("; memory bandwidth %.1f GB/s", bandwidth * 1e-9);
    }
    printf("\n");
    printf("%-8s %-4s %6s %10s %10s %10s\n", "layer", "op", "rows", "ms", "GFLOP/s", "roofl. %");
    for (size_t l = 0; l < sizeof layers / sizeof *layers; l++)
        for (size_t o = 0; o < 3; o++)
            for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
                /* backward runs on whole batches; 2048 x 151936 logits never exist at once */
                if ((o > 0 && rows[r] < 512) || (layers[l].n > 100000 && rows[r] > 80)) continue;
                const struct gemm_case c = {ops[o], rows[r], layers[l].n, layers[l].k};
                double s;
                TRY(run_case(b, &c, &s));
                const double wb = (double)dev_weight_bytes(&b->dev, b->act, c.n, c.k);
                printf("%-8s %-4s %6" PRId64 " %10.3f %10.1f", layers[l].name, c.op, c.m, s * 1e3,
                       2e-9 * (double)(c.m * c.n) * (double)c.k / s);
                if (c.m <= 80 && o == 0 && bandwidth > 0) printf(" %10.1f", 100 * wb / s / bandwidth);
                printf("\n");
                fflush(stdout);
            }
    return 0;
}

int bench_gemm(int argc, char **argv) {
    int64_t threads = 0;
    double seconds = 0.2;
    const char *isa = NULL, *device = "cpu";
    bool f32 = false, jsonl = false;
    const struct cmd_opt opts[] = {
        {"--device", CMD_STR, &device, "NAME", "cpu (the default), cuda, cuda:N or ref"},
        {"--threads", CMD_I64(CMD_THREADS), &threads, "N", "threads (0: all)"},
        {"--isa", CMD_STR, &isa, "NAME", "amx, avx512bf16, avx512, avx2 or c (the fastest)"},
        {"--f32", CMD_FLAG, &f32, NULL, "f32 operands instead of bf16"},
        {"--seconds", CMD_F64("float(0,1e6]"), &seconds, "S", "time spent on each case (0.2)"},
        {"--jsonl", CMD_FLAG, &jsonl, NULL, "cases on standard input, one JSON object a line"},
    };
    const struct cmd_spec spec = CMD_SPEC(opts, "verlc bench gemm [options]", "GEMMs of a device.");
    const int help = cmd_parse(&spec, argc, argv);
    if (help != 0) return help < 0 ? help : 0;
    struct gemm_bench b = {.act = f32 ? DT_F32 : DT_BF16, .min_time = seconds};
    TRY(dev_open_named(&b.dev, device, (int)threads, isa));
    const int rc = jsonl ? file_each_line("-", jsonl_line, &b) : print_table(&b, (int)threads);
    dev_close(&b.dev);
    return rc;
}
