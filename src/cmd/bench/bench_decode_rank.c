/* bench_decode_rank.c - the ranks' side of `verlc bench decode`: a model of which each rank has its rows, or which the only rank
 * has whole, draws tokens; then its last step is repeated, with the gathers of all ranks and, by each rank in turn, without.
 *
 * Knows nothing of tables. Invariant: all ranks make the same steps; a step without gathers meets no other rank's. */
#include "cmd/bench/bench.h"

#include "base/clock.h"
#include "base/err.h"
#include "base/json.h"
#include "base/log.h"
#include "cmd/cmd.h"
#include "comm/comm.h"
#include "engine/decode_graph.h"
#include "ranks/split_model.h"

#include <stdio.h>

enum { WARM = 3, COPIED = 1 << 30, COPIES = 8, QUIET_S = 2 };

struct decode_bench {
    struct comm *comm;
    const char *model, *dtype, *device, *graph;
    int64_t batch, prompt, len, steps, threads;
    enum dtype act;
    struct dev dev;
    struct split_model split; /* with several ranks */
    struct model *whole;      /* else */
    struct model *m;
    struct decoder *decoder;
    int gpu;            /* -1: none */
    size_t weights, kv; /* bytes that a step reads; kv: of the KV cache at the middle of a sample */
    double first_s, token_s, step_s, alone_s, bytes_per_s; /* alone_s: below 0: not measured */
    double begun;
};

/* Where it takes long, as where ranks share a GPU: repetition i of n was done, so many seconds each. By one rank. */
static void say(const struct decode_bench *b, const char *what, int64_t i, int64_t n, double seconds) {
    if (comm_rank(b->comm) == 0 && clock_now() - b->begun > QUIET_S)
        log_child("%s, %lld of %lld: %.3f ms", what, (long long)i + 1, (long long)n, 1e3 * seconds);
}

static int read_args(struct decode_bench *b, const struct comm_call *call) {
    const json_t *const a = call->args;
    const char *const at = call->name;
    TRY(json_str(a, "model", &b->model, at));
    TRY(json_str(a, "dtype", &b->dtype, at));
    TRY(json_str(a, "device", &b->device, at));
    TRY(json_str_opt(a, "graph", &b->graph, at));
    TRY(json_i64(a, "batch", &b->batch, at));
    TRY(json_i64(a, "prompt", &b->prompt, at));
    TRY(json_i64(a, "len", &b->len, at));
    TRY(json_i64(a, "steps", &b->steps, at));
    TRY(json_i64(a, "threads", &b->threads, at));
    return cmd_compute_dtype(b->dtype, &b->act);
}

/* The prompts are one step. On devices whose steps are no bursts there are short ones, so that one can be repeated. */
static struct decoder_args size_decoder(const struct decode_bench *b, const struct model_config *c) {
    const int64_t total = b->prompt + b->len;
    const struct decoder_args limits = {.max_seqs = b->batch, .max_rows = b->batch * b->prompt, .max_len = total};
    struct decoder_args a = decoder_size(&b->dev, c, b->act, &limits, SIZE_MAX);
    if (a.max_burst < 2) a.max_burst = 2;
    return a;
}

static int open_split(struct decode_bench *b, struct decoder_args *d) {
    const int size = comm_size(b->comm);
    const struct split_model_args a = {.dev = &b->dev, .dir = b->model, .act = b->act, .max_len = b->prompt + b->len, .size = size};
    TRY(split_model_open(&b->split, &a));
    const struct model_config *const whole = &b->split.whole->cfg;
    const char *const unable = model_tp_unable(whole, QUANT_NONE, size);
    if (unable) FAIL(ERR_UNSUPPORTED, "unsupported --ranks %d: %s", size, unable);
    const struct model_config part = model_tp_config(whole, -1, size);
    *d = size_decoder(b, &part);
    TRY(split_model_split(&b->split, b->comm, decoder_most_rows(d)));
    b->m = b->split.part;
    return 0;
}

static int open_whole(struct decode_bench *b, struct decoder_args *d) {
    const struct model_open_args a = {.dir = b->model, .act = b->act, .flags = MODEL_INFER, .max_len = b->prompt + b->len};
    TRY(model_open(&b->whole, &b->dev, &a));
    *d = size_decoder(b, &b->whole->cfg);
    b->m = b->whole;
    return 0;
}

/* A step reads all of a rank's matrices and of the head's rows, and of the embedding next to nothing. */
static void count_bytes(struct decode_bench *b, const struct decoder_args *d) {
    const struct model *const m = b->m;
    const int64_t tables = (m->cfg.tied ? 1 : 2) * m->cfg.vocab * m->cfg.hidden;
    const double tokens = (double)b->batch * ((double)b->prompt + (double)b->len / 2);
    b->weights = (size_t)(model_config_params(&m->cfg) - tables + m->head.n * m->head.k) * dtype_size(b->act);
    b->kv = (size_t)((double)decoder_kv_bytes(&m->cfg, b->act, d) / (double)(d->n_kv_blocks * KV_BLOCK_LEN) * tokens);
}

static int open_all(struct decode_bench *b) {
    struct decoder_args d;
    TRY(bench_open_rank_device(b->comm, b->device, b->threads, &b->dev, &b->gpu));
    TRY(comm_size(b->comm) > 1 ? open_split(b, &d) : open_whole(b, &d));
    d.model = b->m;
    TRY(decoder_open(&b->decoder, &d));
    count_bytes(b, &d);
    return 0;
}

static void close_all(struct decode_bench *b) {
    split_model_leave(&b->split);
    decoder_close(b->decoder);
    split_model_close(&b->split);
    model_close(b->whole);
    dev_close(&b->dev);
}

/* Seconds to all first tokens, and of each later token of all samples. */
static int draw(struct decode_bench *b, double *first_s, double *token_s) {
    const struct engine_config cfg = {0};
    const struct bench_prompts p = {
        .vocab = b->m->cfg.vocab, .prompts = b->batch, .n = 1, .length = b->prompt, .max_tokens = b->len};
    struct engine *e = NULL;
    int rc = decoder_engine(&e, b->decoder, &cfg);
    if (rc == 0) rc = bench_submit(e, &p);
    if (rc == 0) rc = comm_barrier(b->comm);
    const double start = clock_now();
    while (rc >= 0 && engine_stats(e).sampled < b->batch) rc = engine_step(e);
    const double all_first = clock_now();
    while (rc > 0) rc = engine_step(e);
    *first_s = all_first - start;
    *token_s = (clock_now() - all_first) / (double)(b->len - 1);
    engine_destroy(e);
    return rc < 0 ? rc : 0;
}

static int draw_all(struct decode_bench *b) {
    for (int64_t i = 0; i <= b->steps; i++) { /* the first one warms up */
        double first_s, token_s;
        TRY(draw(b, &first_s, &token_s));
        say(b, "a token of all samples", i, b->steps + 1, token_s);
        if (i == 1 || (i > 1 && first_s < b->first_s)) b->first_s = first_s;
        if (i == 1 || (i > 1 && token_s < b->token_s)) b->token_s = token_s;
    }
    return 0;
}

/* The least seconds of a step, of some turns of as many steps as a sample has tokens. */
static int time_steps(struct decode_bench *b, struct decode_graphs *graphs, const char *what, double *seconds) {
    *seconds = 0;
    TRY(decoder_repeat(b->decoder, graphs, WARM));
    TRY(dev_sync(&b->dev));
    for (int64_t i = 0; i < b->steps; i++) {
        const double start = clock_now();
        TRY(decoder_repeat(b->decoder, graphs, b->len));
        TRY(dev_sync(&b->dev));
        const double s = (clock_now() - start) / (double)b->len;
        if (i == 0 || s < *seconds) *seconds = s;
        say(b, what, i, b->steps, s);
    }
    return 0;
}

static int repeat(struct decode_bench *b, const char *what, double *seconds) {
    struct decode_graphs graphs = {.n = 0};
    const int rc = time_steps(b, &graphs, what, seconds);
    decode_graphs_free(&graphs, &b->dev);
    return rc;
}

/* What all ranks do at once; rank 0's graph is written where one is asked for. */
static int repeat_together(struct decode_bench *b) {
    FILE *const to = b->graph && comm_rank(b->comm) == 0 ? fopen(b->graph, "w") : NULL;
    if (b->graph && comm_rank(b->comm) == 0 && !to) FAIL(ERR_IO, "cannot write %s", b->graph);
    dev_graph_list(&b->dev, to);
    int rc = comm_barrier(b->comm);
    if (rc == 0) rc = repeat(b, "a step, repeated", &b->step_s);
    dev_graph_list(&b->dev, NULL);
    if (to && fclose(to) != 0 && rc == 0) FAIL(ERR_IO, "cannot write %s", b->graph);
    if (rc == 0 && b->m->tp) rc = model_tp_on_time(b->m);
    return rc;
}

static int repeat_alone(struct decode_bench *b) {
    b->alone_s = b->m->cfg.n_experts ? -1 : b->step_s;
    if (!b->m->tp || b->m->cfg.n_experts) return 0;
    for (int r = 0; r < comm_size(b->comm); r++) {
        TRY(comm_barrier(b->comm));
        if (r != comm_rank(b->comm)) continue;
        model_tp_leave_out_gathers(b->m, true);
        const int rc = repeat(b, "a step without gathers", &b->alone_s);
        model_tp_leave_out_gathers(b->m, false);
        TRY(rc);
    }
    return comm_barrier(b->comm);
}

/* Bytes a second: of copies on a GPU, which read and write, by rank 0 while the others wait; of reads on a CPU. */
static int memory_rate(struct decode_bench *b) {
    char *from = NULL;
    double start = 0, median;
    int rc = 0;
    if (!dev_has_own_memory(&b->dev)) return bench_read_bandwidth(&b->dev, (int)b->threads, &b->bytes_per_s, &median);
    if (comm_rank(b->comm) != 0) return 0;
    TRY(dev_alloc(&b->dev, 2 * (size_t)COPIED, (void **)&from));
    for (int i = 0; rc == 0 && i <= COPIES; i++) {
        if (i == 1) rc = dev_sync(&b->dev);
        if (i == 1) start = clock_now();
        if (rc == 0) rc = dev_copy(&b->dev, from + COPIED, from, COPIED);
    }
    if (rc == 0) rc = dev_sync(&b->dev);
    b->bytes_per_s = 2.0 * COPIED * COPIES / (clock_now() - start);
    dev_free(&b->dev, from, 2 * (size_t)COPIED);
    return rc;
}

static int check_graph(const struct decode_bench *b) {
    if (!b->graph) return 0;
    if (!dev_has_graphs(&b->dev)) FAIL(ERR_UNSUPPORTED, "--graph: %s has no CUDA graphs", b->dev.describe);
    if (b->m->tp && !model_tp_in_graph(b->m))
        FAIL(ERR_UNSUPPORTED, "--graph: gathers through %s are in no CUDA graph: set VERLC_GROUP=peers_graph",
             collective_way(b->split.devices));
    return 0;
}

static int measure(struct decode_bench *b) {
    TRY(check_graph(b));
    TRY(comm_barrier(b->comm));
    TRY(memory_rate(b));
    TRY(draw_all(b));
    TRY(repeat_together(b));
    return repeat_alone(b);
}

int bench_decode_rank(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    struct decode_bench b = {.comm = comm, .begun = clock_now()};
    int rc = 0;
    log_set_level(LOG_WARN); /* the controller says which device it is */
    TRYG(read_args(&b, call), out);
    TRYG(open_all(&b), out);
    TRYG(measure(&b), out);
    out->value = json_pack("{s:s, s:s, s:s, s:i, s:i, s:b, s:I, s:I, s:f, s:f, s:f, s:f, s:f}", "device", b.dev.describe, "isa",
                           b.dev.isa, "way", b.split.devices ? collective_way(b.split.devices) : "none", "host",
                           comm_rank(comm) - comm_local_rank(comm), "gpu", b.gpu, "graph",
                           dev_has_graphs(&b.dev) && (!b.m->tp || model_tp_in_graph(b.m)), "weights", (json_int_t)b.weights, "kv",
                           (json_int_t)b.kv, "first_s", b.first_s, "token_s", b.token_s, "step_s", b.step_s, "alone_s", b.alone_s,
                           "bytes_per_s", b.bytes_per_s);
    rc = comm_barrier(comm); /* peers may read this rank's memory until here */
out:
    close_all(&b);
    return rc;
}
