/* bench_update_rank.c - the ranks' side of `verlc bench update`: optimizer steps of a model on random tokens, timed with several
 * values of grad_chunk in turn, so that what changes on the machine meanwhile meets them all.
 *
 * Each turn opens the group of devices and the trained model again, as a run with that value does, so that it takes a run's
 * memory; its first step warms up.
 * Invariant: all ranks make the same steps, each between two barriers. */
#include "cmd/bench/bench.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/json.h"
#include "base/log.h"
#include "base/rng.h"
#include "cmd/cmd.h"
#include "comm/comm.h"
#include "ranks/worker_calls.h"
#include "train/trained_model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct update_bench {
    struct comm *comm;
    const char *model, *dtype, *device, *recompute;
    const char *trace; /* a file, or NULL */
    int64_t batch, len, micro, steps, rounds, threads;
    const json_t *chunks; /* the values of grad_chunk */
    struct dev dev;
    struct model *m;
    struct packed_seq *seqs; /* (batch) */
    int32_t *ids;            /* (batch, len) */
    json_t *seconds;         /* of each value's steps */
};

static const struct optim_config adamw = {
    .lr = 1e-6, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01, .clip = 1, .schedule = "constant"};

static int read_args(struct update_bench *b, const struct comm_call *call) {
    const json_t *const a = call->args;
    const char *const at = call->name;
    TRY(json_str(a, "model", &b->model, at));
    TRY(json_str(a, "dtype", &b->dtype, at));
    TRY(json_str(a, "device", &b->device, at));
    TRY(json_str(a, "recompute", &b->recompute, at));
    TRY(json_i64(a, "batch", &b->batch, at));
    TRY(json_i64(a, "len", &b->len, at));
    TRY(json_i64(a, "micro", &b->micro, at));
    TRY(json_i64(a, "steps", &b->steps, at));
    TRY(json_i64(a, "rounds", &b->rounds, at));
    TRY(json_i64(a, "threads", &b->threads, at));
    TRY(json_str_opt(a, "trace", &b->trace, at));
    b->chunks = json_object_get(a, "chunks");
    return json_array_size(b->chunks) > 0 ? 0 : err_set(ERR_INVAL, __FILE__, __LINE__, "%s: no \"chunks\"", at);
}

static int open_all(struct update_bench *b) {
    struct model_open_args a = {
        .dir = b->model, .flags = MODEL_TRAIN, .max_len = b->len, .shard = {comm_rank(b->comm), comm_size(b->comm), false}};
    struct rng r = {.seed = 1, .stream = RNG_TEST};
    int gpu;
    TRY(cmd_compute_dtype(b->dtype, &a.act));
    TRY(bench_open_rank_device(b->comm, b->device, b->threads, &b->dev, &gpu));
    TRY(model_open(&b->m, &b->dev, &a));
    b->ids = xmalloc((size_t)(b->batch * b->len) * sizeof *b->ids);
    b->seqs = xmalloc((size_t)b->batch * sizeof *b->seqs);
    for (int64_t i = 0; i < b->batch * b->len; i++) b->ids[i] = (int32_t)rng_below(&r, (uint64_t)b->m->cfg.vocab);
    for (int64_t i = 0; i < b->batch; i++) b->seqs[i] = (struct packed_seq){.ids = b->ids + i * b->len, .n = b->len, .first = 1};
    b->seconds = json_array();
    for (size_t i = 0; i < json_array_size(b->chunks); i++) json_array_append_new(b->seconds, json_array());
    return 0;
}

static void close_all(struct update_bench *b) {
    model_close(b->m);
    dev_close(&b->dev);
    free(b->ids);
    free(b->seqs);
    json_decref(b->seconds);
}

/* The gradient of a mean over tokens, with the sign of the sample's index as its advantage. */
static int loss_fn(void *arg, const struct micro_loss *m) {
    const struct update_bench *b = arg;
    const float scale = 1.0f / (float)(b->batch * (b->len - 1));
    for (int64_t t = 0; t < m->t1 - m->t0; t++) m->dout[t] = (m->lo + t / (b->len - 1)) % 2 ? scale : -scale;
    return 0;
}

static int one_step(struct update_bench *b, struct trained_model *t, double *seconds) {
    const struct mini_batch s = {
        .seqs = b->seqs, .n = b->batch, .cut = {.max_seqs = b->micro}, .temperature = 1, .loss = loss_fn, .arg = b};
    struct step_result r;
    TRY(comm_barrier(b->comm));
    const double start = clock_now();
    TRY(trained_model_step(t, &s, &adamw, adamw.lr, &r));
    TRY(dev_sync(&b->dev));
    TRY(comm_barrier(b->comm));
    *seconds = clock_now() - start;
    if (!isfinite(r.optim.grad_norm)) FAIL(ERR_NUMERIC, "bench update: the gradient of %s is not finite", r.optim.bad_tensor);
    return 0;
}

static int traced_step(struct update_bench *b, struct trained_model *t) {
    double s;
    TRY(rank_trace_start(b->comm, &b->dev));
    TRY(one_step(b, t, &s));
    return rank_trace_stop(b->comm, &b->dev, b->trace);
}

static int steps(struct update_bench *b, struct trained_model *t, json_t *seconds, bool trace) {
    for (int64_t i = 0; i <= b->steps; i++) { /* the first one warms up */
        double s;
        TRY(one_step(b, t, &s));
        if (i > 0) json_array_append_new(seconds, json_real(s));
    }
    if (trace) TRY(traced_step(b, t));
    return comm_barrier(b->comm); /* peers may read this rank's memory until here */
}

static int turn(struct update_bench *b, int64_t chunk, json_t *seconds, bool trace) {
    struct trained_model_args a = {.dev = &b->dev,
                                   .model = b->m,
                                   .train = true,
                                   .max_rows = b->micro * b->len,
                                   .max_seqs = b->micro,
                                   .grad_chunk = chunk,
                                   .optim = &adamw};
    struct trained_model *t = NULL;
    struct collective *g = NULL;
    int rc = 0;
    comm_stage(b->comm, "update, grad_chunk=%lld", (long long)chunk);
    TRY(bench_keep(b->recompute, &a.keep));
    TRY(collective_open(&g, &b->dev, b->comm));
    a.group = g;
    TRYG(trained_model_create(&t, &a), out);
    TRYG(steps(b, t, seconds, trace), out);
out:
    collective_close(g);
    if (rc == 0) rc = comm_barrier(b->comm); /* none has this rank's memory mapped any more */
    trained_model_destroy(t);
    return rc;
}

/* Every second round the other way round. */
static int rounds(struct update_bench *b) {
    const int64_t n = (int64_t)json_array_size(b->chunks);
    for (int64_t i = 0; i < b->rounds * n; i++) {
        const size_t k = (size_t)(i / n % 2 ? n - 1 - i % n : i % n);
        TRY(turn(b, json_integer_value(json_array_get(b->chunks, k)), json_array_get(b->seconds, k),
                 b->trace && k == 0 && i / n == b->rounds - 1));
    }
    return 0;
}

int bench_update_rank(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    struct update_bench b = {.comm = comm};
    int rc = 0;
    log_set_level(LOG_WARN); /* the controller says which device it is */
    TRY(read_args(&b, call));
    TRYG(open_all(&b), out);
    TRYG(rounds(&b), out);
    out->value = json_pack("{s:s, s:s, s:O, s:I, s:I}", "device", b.dev.describe, "isa", b.dev.isa, "seconds", b.seconds,
                           "parameters", (json_int_t)model_config_params(&b.m->cfg), "peak_bytes", (json_int_t)b.dev.peak);
out:
    close_all(&b);
    return rc;
}
