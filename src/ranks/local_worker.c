/* local_worker.c - the operations of a worker on the device of this process, which is the only one or a rank (worker.h).
 *
 * What is opened, and by which keys, is the program's; what a role computes, its trained model's.
 * Invariant: a stage sees the columns that it declares, as it would on a rank that gets no other ones. */
#include "ranks/worker.h"

#include "model/files/export.h"
#include "model/parallel/tensor_parallel.h"
#include "model/parallel/weight_streaming.h"
#include "train/perf_metrics.h"

#include "base/buf.h"
#include "train/router_replay.h"

#include "base/err.h"

#include <stdlib.h>
#include <string.h>

static int nothing(struct worker *w) {
    (void)w;
    return 0;
}

/* ---- generation ---- */

static int generate_begin(struct worker *w, const struct worker_generation *g) {
    const struct engine_config c = {.no_prefix_cache = w->generator.no_prefix_cache,
                                    .longest_first = w->generator.longest_first,
                                    .tok = w->generator.tok,
                                    .done = g->done,
                                    .done_arg = g->arg};
    if (w->generator.gather) TRY(model_gather(w->generator.model, w->generator.gather));
    if (w->generator.split) TRY(model_tp_take(w->generator.split));
    return decoder_engine(&w->generator.engine, w->generator.decoder, &c); /* its cache is empty: weights may have changed */
}

static int generate_add(struct worker *w, const struct engine_request *q) {
    const struct engine_stop_ids stop = engine_stop_ids(&w->generator.model->cfg, w->generator.tok);
    struct engine_request own = *q;
    int32_t *ids = xmalloc((size_t)(stop.n + q->n_stop_ids + 1) * sizeof *ids);
    memcpy(ids, stop.id, (size_t)stop.n * sizeof *ids);
    if (q->n_stop_ids) memcpy(ids + stop.n, q->stop_ids, (size_t)q->n_stop_ids * sizeof *ids);
    own.stop_ids = ids;
    own.n_stop_ids = stop.n + q->n_stop_ids;
    const int rc = engine_submit(w->generator.engine, &own, NULL);
    free(ids);
    return rc;
}

static int generate_step(struct worker *w, bool wait) {
    (void)wait;
    return engine_step(w->generator.engine);
}

static int generate_interrupt(struct worker *w) { return engine_interrupt(w->generator.engine); }
static struct engine_stats generate_stats(struct worker *w) { return engine_stats(w->generator.engine); }

static void generate_end(struct worker *w) {
    engine_destroy(w->generator.engine);
    w->generator.engine = NULL;
    if (w->generator.gather || w->generator.split) model_stream_begin(w->generator.model);
}

static void idle_add(struct worker *w, const struct engine_sample *s, int64_t tag) { (void)w, (void)s, (void)tag; }

/* ---- passes ---- */

/* at, row: targets and tokens before. */
static struct forward_out out_at(const struct worker_pass *p, struct token_lists *list, int64_t at, int64_t row) {
    const struct forward_out *const o = &p->out;
    if (o->list) *list = (struct token_lists){.top_id = o->list->top_id + at * p->k, .top_logp = o->list->top_logp + at * p->k};
    return (struct forward_out){.logp = o->logp ? o->logp + at : NULL,
                                .sum_pi_sq = o->sum_pi_sq ? o->sum_pi_sq + at : NULL,
                                .value = o->value ? o->value + at : NULL,
                                .routes = o->routes ? o->routes + row * p->words : NULL,
                                .list = o->list ? list : NULL};
}

/* The end of what is computed between two heartbeats of the watchdog and checks for a signal: at most one micro-batch. */
static int64_t piece_end(const struct packed_seq *seqs, int64_t lo, int64_t n, struct micro_batch_limits cut) {
    const int64_t most = cut.max_seqs > 0 ? cut.max_seqs : 16;
    int64_t hi = lo + 1, rows = seqs[lo].n;
    for (; hi < n && hi - lo < most && (cut.max_rows <= 0 || rows + seqs[hi].n <= cut.max_rows); hi++) rows += seqs[hi].n;
    return hi;
}

static int forward(struct worker *w, const struct worker_pass *p) {
    const struct worker_role *const r = &w->role[p->role];
    struct token_lists list;
    int64_t targets = 0, rows = 0;
    CHECK(!p->out.routes || p->words == router_replay_words(&trained_model_model(r->model)->cfg));
    trained_model_begin(r->model);
    for (int64_t lo = 0, hi; lo < p->n; lo = hi) {
        hi = piece_end(p->seqs, lo, p->n, r->cut);
        TRY(trained_model_forward(r->model, p->seqs + lo, hi - lo, r->cut, r->temperature, out_at(p, &list, targets, rows)));
        for (int64_t i = lo; i < hi; i++) {
            targets += packed_seq_targets(&p->seqs[i]);
            rows += p->seqs[i].n;
        }
        phase_progress(p->at, p->phase, hi, p->n, 0);
        if (!w->collective[p->role]) TRY(phase_check_stop());
    }
    return trained_model_end(r->model);
}

/* ---- updates ---- */

static void move_columns(struct batch *to, struct batch *from, const char *const *names) {
    for (; *names; names++) batch_move(to, from, *names);
}

static int update(struct worker *w, const struct worker_update *u, struct run *run, struct batch *b) {
    struct batch own;
    batch_init(&own, b->n_rows);
    move_columns(&own, b, u->reads);
    const int rc = u->run(w, run, &own);
    move_columns(b, &own, u->reads);
    if (rc == 0) move_columns(b, &own, u->writes);
    batch_free(&own);
    return rc;
}

int worker_update_model(struct worker *w, int role, struct update *u, struct update_result *r) {
    u->model = w->role[role].model;
    TRY(update_run(u, r));
    r->flops /= train_peak_flops(&w->dev) * w->n_ranks;
    return 0;
}

/* ---- the run around it ---- */

static int ready(struct worker *w, struct run *run) { return dev_memory(&w->dev, &run->memory); }

static int memory(struct worker *w, struct run *run, const char *prefix) {
    return train_memory_metrics(&run->metrics, &w->dev, prefix, &run->memory);
}

static void checkpoints(struct worker *w, struct checkpoints *out) {
    if (w->n_parts > 0) checkpoints_local(out, w->parts, w->n_parts, w->dev.isa, w->comm);
}

/* By every rank: sharded weights become whole together. */
static int export_policy(struct worker *w, const char *dir) {
    struct model *const m = w->generator.model;
    struct model_export_args a = {.dt = m->lora || m->own ? (int)m->act : -1};
    int rc = 0;
    for (int i = 0; i < w->n_parts; i++)
        if (w->parts[i].model == m) a.tokenizer = w->parts[i].tokenizer;
    if (w->generator.gather) TRY(model_gather(m, w->generator.gather));
    if (!w->comm || comm_rank(w->comm) == 0) rc = model_export(m, dir, &a);
    if (w->generator.gather) model_stream_begin(m);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

static int trace(struct worker *w, const char *path) {
    if (path) return dev_trace_stop(&w->dev, path, NULL);
    dev_trace_start(&w->dev);
    return 0;
}

const struct worker_ops worker_local = {.send_weights = nothing,
                                        .generate_begin = generate_begin,
                                        .generate_add = generate_add,
                                        .generate_step = generate_step,
                                        .generate_interrupt = generate_interrupt,
                                        .generate_stats = generate_stats,
                                        .generate_end = generate_end,
                                        .idle_add = idle_add,
                                        .forward = forward,
                                        .update = update,
                                        .join = nothing,
                                        .ready = ready,
                                        .memory = memory,
                                        .checkpoints = checkpoints,
                                        .export_policy = export_policy,
                                        .trace = trace};

void worker_open_local(struct worker *w, struct comm *comm) {
    w->ops = &worker_local;
    w->comm = comm;
    w->n_ranks = comm ? comm_size(comm) : 1;
    w->device = w->dev.describe;
    w->own_memory = dev_has_own_memory(&w->dev);
}

void worker_set_role(struct worker *w, int role, const struct worker_role *r) {
    w->role[role] = *r;
    w->has[role] = true;
    w->collective[role] = trained_model_collective(r->model);
    w->context[role] = trained_model_context(r->model);
}
