/* bench_decode.c - `verlc bench decode`: decoding by ranks that have a model together (tensor parallel), with its roofline, and how
 * much of a step is not the model's kernels: it is timed with the gathers between ranks, and without, each rank by itself.
 *
 * Ranks that share a GPU take turns on it: a step is then at least all of theirs together. VERLC_GROUP says which way gathers go.
 * Invariant: a figure is that of the slowest rank, or of the device whose ranks take the longest. */
#include "cmd/bench/bench.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "cmd/cmd.h"
#include "ranks/launcher.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern char **environ;

struct decode_rank {
    int64_t host, gpu, weights, kv;
    double first_s, token_s, step_s, alone_s, bytes_per_s;
};
struct decode_bench {
    const char *model, *dtype, *device, *graph;
    int64_t batch, prompt, len, steps, threads;
    double deadline_s;
    bool json;
    struct workers *workers;
    int n;
    struct decode_rank *ranks;
    bool in_graph;
    char device_text[128], way[64];
    /* of all ranks: the slowest; of a device: what its ranks take one after the other, the device with the most */
    double first_s, token_s, step_s, alone_s, least_s; /* alone_s: below 0: not measured; least_s: by the memory's rate */
};

static int take_rank(struct decode_bench *b, int rank, const char *who, const json_t *x) {
    struct decode_rank *const r = &b->ranks[rank];
    const char *device, *way;
    TRY(json_str(x, "device", &device, who));
    TRY(json_str(x, "way", &way, who));
    TRY(json_i64(x, "host", &r->host, who));
    TRY(json_i64(x, "gpu", &r->gpu, who));
    TRY(json_i64(x, "weights", &r->weights, who));
    TRY(json_i64(x, "kv", &r->kv, who));
    r->first_s = json_number_value(json_object_get(x, "first_s"));
    r->token_s = json_number_value(json_object_get(x, "token_s"));
    r->step_s = json_number_value(json_object_get(x, "step_s"));
    r->alone_s = json_number_value(json_object_get(x, "alone_s"));
    r->bytes_per_s = json_number_value(json_object_get(x, "bytes_per_s"));
    b->in_graph = json_is_true(json_object_get(x, "graph"));
    snprintf(b->device_text, sizeof b->device_text, "%s", device);
    snprintf(b->way, sizeof b->way, "%s", way);
    return 0;
}

static int measure(struct decode_bench *b) {
    struct coordinator_reply *const replies = xcalloc((size_t)b->n, sizeof *replies);
    json_t *const args = json_pack("{s:s, s:s, s:s, s:s?, s:I, s:I, s:I, s:I, s:I}", "model", b->model, "dtype", b->dtype, "device",
                                   b->device, "graph", b->graph, "batch", (json_int_t)b->batch, "prompt", (json_int_t)b->prompt,
                                   "len", (json_int_t)b->len, "steps", (json_int_t)b->steps, "threads", (json_int_t)b->threads);
    int rc = workers_call_all(
        b->workers, &(struct coordinator_call_args){.name = "bench_decode", .args = args, .answer_s = b->deadline_s}, replies);
    for (int r = 0; rc >= 0 && r < b->n; r++)
        rc = take_rank(b, r, coordinator_who(workers_coordinator(b->workers), r), replies[r].result);
    for (int r = 0; r < b->n; r++) coordinator_reply_free(&replies[r]);
    json_decref(args);
    free(replies);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

/* ---- what they say together ---- */

static double most(double a, double b) { return a > b ? a : b; }

/* Ranks of a CPU have cores of their own; those of a GPU take turns. */
static bool same_device(const struct decode_rank *a, const struct decode_rank *b) {
    return a == b || (a->gpu >= 0 && a->gpu == b->gpu && a->host == b->host);
}

static void add_up(struct decode_bench *b) {
    for (int i = 0; i < b->n; i++) {
        const struct decode_rank *const r = &b->ranks[i];
        const double rate = r->bytes_per_s > 0 ? r->bytes_per_s : b->ranks[0].bytes_per_s;
        double bytes = 0, alone = 0;
        for (int k = 0; k < b->n; k++) {
            if (!same_device(r, &b->ranks[k])) continue;
            bytes += (double)(b->ranks[k].weights + b->ranks[k].kv);
            alone = alone < 0 || b->ranks[k].alone_s < 0 ? -1 : alone + b->ranks[k].alone_s;
        }
        b->first_s = most(b->first_s, r->first_s);
        b->token_s = most(b->token_s, r->token_s);
        b->step_s = most(b->step_s, r->step_s);
        b->least_s = most(b->least_s, bytes / rate);
        b->alone_s = i > 0 ? most(b->alone_s, alone) : alone;
    }
}

static double not_kernels(const struct decode_bench *b) { return b->alone_s < 0 ? 0 : most(b->step_s - b->alone_s, 0); }

static int print_json(const struct decode_bench *b) {
    struct buf line = {0};
    json_t *const weights = json_array(), *const kv = json_array();
    for (int r = 0; r < b->n; r++) {
        json_array_append_new(weights, json_integer((json_int_t)b->ranks[r].weights));
        json_array_append_new(kv, json_integer((json_int_t)b->ranks[r].kv));
    }
    json_t *const o =
        json_pack("{s:s, s:i, s:I, s:s, s:b, s:f, s:f, s:f, s:f, s:o, s:f, s:f, s:o, s:o, s:s}", "subject", "decode", "ranks", b->n,
                  "batch", (json_int_t)b->batch, "way", b->way, "graph", b->in_graph, "prefill_seconds", b->first_s,
                  "token_seconds", b->token_s, "tokens_per_s", (double)b->batch / b->token_s, "step_seconds", b->step_s,
                  "kernel_seconds", b->alone_s < 0 ? json_null() : json_real(b->alone_s), "roofline_seconds", b->least_s,
                  "bytes_per_s", b->ranks[0].bytes_per_s, "weight_bytes", weights, "kv_bytes", kv, "device", b->device_text);
    int rc = json_dump_line(&line, o);
    if (rc >= 0) rc = cmd_print_line(line.p, line.n - (line.p[line.n - 1] == '\n'));
    json_decref(o);
    buf_free(&line);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

static void print_table(const struct decode_bench *b) {
    printf("%lld samples, %lld + %lld tokens, %d rank%s on %s; gathers by %s%s\n", (long long)b->batch, (long long)b->prompt,
           (long long)b->len, b->n, b->n == 1 ? "" : "s, each", b->device_text, b->way,
           b->in_graph ? "; a step is a CUDA graph" : "");
    printf("\n%-34s %10.1f tokens/s\n", "drawn", (double)b->batch / b->token_s);
    printf("%-34s %10.4f ms\n", "a token of all samples", 1e3 * b->token_s);
    printf("%-34s %10.4f ms\n", "a step, repeated", 1e3 * b->step_s);
    if (b->alone_s >= 0) {
        printf("%-34s %10.4f ms\n", "  the model's kernels", 1e3 * b->alone_s);
        printf("%-34s %10.4f ms, %.1f %%\n", "  gathers, barriers, gaps", 1e3 * not_kernels(b), 100 * not_kernels(b) / b->step_s);
    }
    printf("%-34s %10.4f ms, %.1f %% of the step\n", "roofline: reading weights and KV", 1e3 * b->least_s,
           100 * b->least_s / b->step_s);
}

/* ---- the command ---- */

static int control(struct decode_bench *b, const struct workers_args *a, const struct launch *l) {
    TRY(workers_open(&b->workers, a, l));
    b->n = workers_size(b->workers);
    b->ranks = xcalloc((size_t)b->n, sizeof *b->ranks);
    const int rc = measure(b);
    workers_close(b->workers, rc >= 0);
    TRY(rc);
    add_up(b);
    if (b->json) return print_json(b);
    print_table(b);
    return 0;
}

static const struct worker_process_service services[] = {BENCH_SERVICES, {NULL, NULL}};

int bench_decode(int argc, char **argv) {
    struct decode_bench b = {
        .dtype = "bf16", .device = "auto", .batch = 1, .prompt = 64, .len = 64, .steps = 3, .deadline_s = 3600};
    struct workers_args a = {.dir = "."};
    int64_t ranks = 2;
    const struct cmd_opt opts[] = {
        {"--model", CMD_STR, &b.model, "DIR", "model directory (verlc model init makes one)"},
        {"--ranks", CMD_I64("int[1,64]"), &ranks, "N", "worker processes on this host that have it together (2); GPUs in turn"},
        {"--dtype", CMD_STR, &b.dtype, "bf16|fp32", "compute dtype (bf16)"},
        {"--batch", CMD_I64(CMD_COUNT), &b.batch, "N", "samples (1)"},
        {"--prompt", CMD_I64(CMD_COUNT), &b.prompt, "N", "tokens of each prompt (64)"},
        {"--len", CMD_I64("int[8,2^28]"), &b.len, "N", "tokens that each sample draws (64)"},
        {"--steps", CMD_I64(CMD_COUNT), &b.steps, "N", "measured repetitions; the best counts (3)"},
        {"--device", CMD_STR, &b.device, "NAME", "auto, cpu, cuda or ref (auto: GPUs if there are some)"},
        {"--threads", CMD_I64(CMD_THREADS), &b.threads, "N", "threads of a rank (its share of the cores)"},
        {"--graph", CMD_STR, &b.graph, "FILE", "rank 0's step as a CUDA graph: its nodes, in order, to FILE"},
        {"--deadline", CMD_F64("float[1,1e6]"), &b.deadline_s, "S", "for the whole measurement (3600)"},
        {"--json", CMD_FLAG, &b.json, NULL, "one line of JSON"},
    };
    const struct cmd_spec spec =
        CMD_SPEC(opts, "verlc bench decode --model DIR [--ranks N] [options]",
                 "Decoding by ranks that have a model together (tensor parallel). A step is repeated with the\n"
                 "gathers of all ranks and, by each rank in turn, without: the difference is not the model's\n"
                 "kernels. VERLC_GROUP=peers, peers_graph, nccl or host selects the way of the gathers.");
    struct launch l;
    enum dtype act;
    int rc = cmd_parse(&spec, argc, argv);
    if (rc != 0) return rc < 0 ? rc : 0;
    if (!b.model) FAIL(ERR_INVAL, "--model is missing; usage: %s", spec.usage);
    TRY(cmd_batch_size(b.batch, b.prompt, b.len));
    TRY(cmd_compute_dtype(b.dtype, &act));
    TRY(launch_read(&l, environ));
    a.ranks = (int)ranks;
    a.start_s = 300;
    if (workers_started_this(&l)) return worker_process_serve(&a, &l, services);
    rc = control(&b, &a, &l);
    free(b.ranks);
    return rc;
}
