/* bench_update.c - `verlc bench update`: what it costs that gradients are summed in the order of micro-batches, whatever the
 * number of ranks. An optimizer step of a model on ranks, with an exchange for every wave of micro-batches (grad_chunk=1), next to
 * the same step with one exchange, which moves the bytes of an f32 reduce-scatter. In one run, alternating; medians. */
#include "cmd/bench/bench.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "cmd/cmd.h"
#include "ranks/launcher.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N_CHUNKS = 2 }; /* compared: 1, and another */
extern char **environ;

struct update_bench {
    const char *model, *dtype, *device, *recompute, *trace;
    int64_t batch, len, micro, chunk, steps, rounds, threads;
    double deadline_s;
    bool json;
    struct workers *workers;
    int ranks;
    int64_t n_micro, chunks[N_CHUNKS];
    /* results */
    double *seconds[N_CHUNKS]; /* (n) of each step, of the slowest rank */
    int64_t n, parameters, peak;
    char device_text[128];
};

/* ---- measuring ---- */

/* Of a step: one a wave. */
static int64_t exchanges(const struct update_bench *b, int64_t chunk) {
    const int64_t chunks = (b->n_micro + chunk - 1) / chunk;
    return b->ranks > 1 ? (chunks + b->ranks - 1) / b->ranks : 0;
}

static int take_rank(struct update_bench *b, const char *who, const json_t *result, char isa[32]) {
    const char *device, *own;
    int64_t peak;
    TRY(json_str(result, "device", &device, who));
    TRY(json_str(result, "isa", &own, who));
    TRY(json_i64(result, "parameters", &b->parameters, who));
    TRY(json_i64(result, "peak_bytes", &peak, who));
    if (*isa && strcmp(isa, own) != 0) FAIL(ERR_INPUT, "%s computes with %s and the ranks before it with %s", who, own, isa);
    snprintf(isa, 32, "%s", own);
    snprintf(b->device_text, sizeof b->device_text, "%s", device);
    if (peak > b->peak) b->peak = peak;
    for (size_t k = 0; k < N_CHUNKS; k++) {
        const json_t *const s = json_array_get(json_object_get(result, "seconds"), k);
        if ((int64_t)json_array_size(s) != b->n)
            FAIL(ERR_FORMAT, "%s: %zu times of %lld", who, json_array_size(s), (long long)b->n);
        for (int64_t i = 0; i < b->n; i++) {
            const double x = json_number_value(json_array_get(s, (size_t)i));
            if (x > b->seconds[k][i]) b->seconds[k][i] = x;
        }
    }
    return 0;
}

static int measure(struct update_bench *b) {
    struct coordinator_reply *replies = xcalloc((size_t)b->ranks, sizeof *replies);
    char isa[32] = "";
    json_t *args =
        json_pack("{s:s, s:s, s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:s?, s:[I, I]}", "model", b->model, "dtype", b->dtype,
                  "device", b->device, "recompute", b->recompute, "batch", (json_int_t)b->batch, "len", (json_int_t)b->len, "micro",
                  (json_int_t)b->micro, "steps", (json_int_t)b->steps, "rounds", (json_int_t)b->rounds, "threads",
                  (json_int_t)b->threads, "trace", b->trace, "chunks", (json_int_t)b->chunks[0], (json_int_t)b->chunks[1]);
    int rc = workers_call_all(
        b->workers, &(struct coordinator_call_args){.name = "bench_update", .args = args, .answer_s = b->deadline_s}, replies);
    for (int r = 0; rc >= 0 && r < b->ranks; r++)
        rc = take_rank(b, coordinator_who(workers_coordinator(b->workers), r), replies[r].result, isa);
    for (int r = 0; r < b->ranks; r++) coordinator_reply_free(&replies[r]);
    json_decref(args);
    free(replies);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

/* ---- printing ---- */

struct figures {
    double median, least;
};

static int print_json(const struct update_bench *b, const struct figures *f) {
    json_t *chunks = json_array();
    struct buf line = {0};
    for (int k = 0; k < N_CHUNKS; k++) {
        json_t *all = json_array();
        for (int64_t i = 0; i < b->n; i++) json_array_append_new(all, json_real(b->seconds[k][i]));
        json_array_append_new(chunks, json_pack("{s:I, s:I, s:f, s:f, s:o}", "grad_chunk", (json_int_t)b->chunks[k], "exchanges",
                                                (json_int_t)exchanges(b, b->chunks[k]), "seconds", f[k].median, "least_seconds",
                                                f[k].least, "all", all));
    }
    json_t *o = json_pack("{s:s, s:i, s:I, s:I, s:I, s:o, s:f, s:I, s:s}", "subject", "update", "ranks", b->ranks, "parameters",
                          (json_int_t)b->parameters, "tokens", (json_int_t)(b->batch * b->len), "micro_batches",
                          (json_int_t)b->n_micro, "chunks", chunks, "cost", f[0].median / f[1].median - 1, "peak_bytes",
                          (json_int_t)b->peak, "device", b->device_text);
    int rc = json_dump_line(&line, o);
    if (rc >= 0) rc = cmd_print_line(line.p, line.n - (line.p[line.n - 1] == '\n'));
    json_decref(o);
    buf_free(&line);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

static void print_table(const struct update_bench *b, const struct figures *f) {
    printf("%.3f B parameters, %lld micro-batches of %lld x %lld tokens, %d rank%s on %s\n", (double)b->parameters / 1e9,
           (long long)b->n_micro, (long long)b->micro, (long long)b->len, b->ranks, b->ranks == 1 ? "" : "s, each", b->device_text);
    printf("\n%10s  %9s  %10s  %10s  %10s\n", "grad_chunk", "exchanges", "seconds", "least", "tokens/s");
    for (int k = 0; k < N_CHUNKS; k++)
        printf("%10lld  %9lld  %10.5f  %10.5f  %10.0f\n", (long long)b->chunks[k], (long long)exchanges(b, b->chunks[k]),
               f[k].median, f[k].least, (double)(b->batch * b->len) / f[k].median);
    printf("\ngrad_chunk=%lld costs %.2f %% over grad_chunk=%lld: medians of %lld steps each\n", (long long)b->chunks[0],
           100 * (f[0].median / f[1].median - 1), (long long)b->chunks[1], (long long)b->n);
}

static int print_all(struct update_bench *b) {
    struct figures f[N_CHUNKS];
    for (int k = 0; k < N_CHUNKS; k++) {
        double *sorted = xmalloc((size_t)b->n * sizeof *sorted);
        memcpy(sorted, b->seconds[k], (size_t)b->n * sizeof *sorted);
        f[k].median = bench_median(sorted, b->n);
        f[k].least = sorted[0];
        free(sorted);
    }
    if (b->json) return print_json(b, f);
    print_table(b, f);
    return 0;
}

/* ---- the command ---- */

static int control(struct update_bench *b, const struct workers_args *a, const struct launch *l) {
    TRY(workers_open(&b->workers, a, l));
    b->ranks = workers_size(b->workers);
    b->n_micro = (b->batch + b->micro - 1) / b->micro;
    b->n = b->steps * b->rounds;
    b->chunks[0] = 1;
    b->chunks[1] = b->chunk ? b->chunk : (b->n_micro + b->ranks - 1) / b->ranks;
    for (int k = 0; k < N_CHUNKS; k++) b->seconds[k] = xcalloc((size_t)b->n, sizeof *b->seconds[k]);
    const int rc = measure(b);
    workers_close(b->workers, rc >= 0);
    TRY(rc);
    return print_all(b);
}

static const struct worker_process_service services[] = {BENCH_SERVICES, {NULL, NULL}};

int bench_update(int argc, char **argv) {
    struct update_bench b = {.dtype = "bf16",
                             .device = "auto",
                             .recompute = "layer",
                             .batch = 16,
                             .len = 256,
                             .micro = 2,
                             .steps = 3,
                             .rounds = 4,
                             .deadline_s = 3600};
    struct workers_args a = {.dir = "."};
    int64_t ranks = 2;
    const struct cmd_opt opts[] = {
        {"--model", CMD_STR, &b.model, "DIR", "model directory (verlc model init makes one)"},
        {"--ranks", CMD_I64("int[1,64]"), &ranks, "N", "worker processes on this host (2); under a launcher its own number holds"},
        {"--dtype", CMD_STR, &b.dtype, "bf16|fp32", "compute dtype (bf16)"},
        {"--batch", CMD_I64(CMD_COUNT), &b.batch, "N", "samples of an optimizer step (16)"},
        {"--len", CMD_I64("int[2,2^28]"), &b.len, "N", "tokens of each (256)"},
        {"--micro", CMD_I64(CMD_COUNT), &b.micro, "N", "samples of a micro-batch (2)"},
        {"--grad-chunk", CMD_I64("int[0,2^24]"), &b.chunk, "N", "compared with 1 (0: so many that there is one exchange)"},
        {"--steps", CMD_I64("int[1,2^16]"), &b.steps, "N", "measured steps of a turn (3)"},
        {"--rounds", CMD_I64("int[1,2^10]"), &b.rounds, "N", "turns of each (4)"},
        {"--recompute", CMD_STR, &b.recompute, BENCH_RECOMPUTE " (layer)"},
        {"--device", CMD_STR, &b.device, "NAME",
         "auto, cpu, cuda (a GPU for each rank of a host) or ref (auto: GPUs if there are some)"},
        {"--threads", CMD_I64(CMD_THREADS), &b.threads, "N", "threads of a rank (its share of the cores)"},
        {"--trace", CMD_STR, &b.trace, "FILE",
         "traces one more step with grad_chunk=1: Chrome's format to FILE, that of rank N to FILE_rank_N.json"},
        {"--dir", CMD_STR, &a.dir, "DIR", "under a launcher: a directory that all hosts share, for .rendezvous (.)"},
        {"--deadline", CMD_F64("float[1,1e6]"), &b.deadline_s, "S", "for the whole measurement (3600)"},
        {"--json", CMD_FLAG, &b.json, NULL, "one line of JSON, with the seconds of every step"},
    };
    const struct cmd_spec spec =
        CMD_SPEC(opts, "verlc bench update --model DIR [--ranks N] [options]",
                 "An optimizer step on several ranks, with AdamW: gradients exchanged with every wave of\n"
                 "micro-batches, as by default, against one exchange a step, alternating. The difference is\n"
                 "what it costs that results do not depend on the number of ranks.");
    struct launch l;
    struct model_keep keep;
    enum dtype act;
    int rc = cmd_parse(&spec, argc, argv);
    if (rc != 0) return rc < 0 ? rc : 0;
    if (!b.model) FAIL(ERR_INVAL, "--model is missing; usage: %s", spec.usage);
    TRY(cmd_batch_size(b.batch, 0, b.len));
    TRY(cmd_compute_dtype(b.dtype, &act));
    TRY(bench_keep(b.recompute, &keep));
    if (b.micro > b.batch) b.micro = b.batch;
    TRY(launch_read(&l, environ));
    a.ranks = (int)ranks;
    a.start_s = 300;
    if (workers_started_this(&l)) return worker_process_serve(&a, &l, services);
    rc = control(&b, &a, &l);
    for (int k = 0; k < N_CHUNKS; k++) free(b.seconds[k]);
    return rc;
}
