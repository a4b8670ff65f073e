/* rank_group.c - see rank_group.h. */
#include "ranks/rank_group.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/json.h"
#include "base/log.h"
#include "ranks/launcher.h"
#include "ranks/worker.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

extern char **environ;

/* To load models, and to answer a call that does little. */
#define START_S 1800.0

/* ---- calls ---- */

void rank_group_heartbeat(struct rank_group *g, const char *phase) {
    struct coordinator_progress p;
    if (!g->run) return;
    coordinator_progress(g->coordinator, g->first, &p);
    if (phase_stop_due()) coordinator_ask_stop(g->coordinator, phase_stop_due());
    phase_beat(g->run->stages); /* the group's own deadlines hold for the ranks */
    if (phase && p.total > 0 && strcmp(p.stage, phase) == 0) track_progress(g->run->track, g->run->step, phase, p.done, p.total, 0);
}

/* After an error no call of any part is under way. */
static int given_up(struct rank_group *whole, int rc) {
    for (int r = 0; rc < 0 && r < whole->n; r++) whole->busy[r] = false;
    return rc;
}

static struct coordinator_call_args call_args(const struct rank_group *g, const char *name, const struct message *m) {
    return (struct coordinator_call_args){
        .name = name, .args = m->head, .arrays = m->arrays, .n_arrays = m->n, .answer_s = g->deadline_s};
}

int rank_group_start(struct rank_group *g, int rank, const char *name, const struct message *m) {
    const struct coordinator_call_args a = call_args(g, name, m);
    TRY(given_up(g->whole, coordinator_call(g->coordinator, g->first + rank, &a)));
    g->busy[rank] = true;
    return 0;
}

/* A reply of this part that has come. */
static bool stored(struct rank_group *g, int *rank, struct coordinator_reply *reply) {
    for (int r = 0; r < g->n; r++) {
        if (!g->replies[r].result) continue;
        *rank = r;
        *reply = g->replies[r];
        g->replies[r] = (struct coordinator_reply){0};
        g->busy[r] = false;
        return true;
    }
    return false;
}

/* The next reply of any part, for whoever takes it; an error ends all calls. */
static int receive(struct rank_group *whole, double wait_s) {
    struct coordinator_reply reply;
    int rank;
    const int got = coordinator_take(whole->coordinator, wait_s, &rank, &reply);
    if (got > 0) whole->replies[rank] = reply;
    return given_up(whole, got);
}

int rank_group_take(struct rank_group *g, double wait_s, int *rank, struct coordinator_reply *reply) {
    const double until = clock_now() + wait_s;
    while (!stored(g, rank, reply)) {
        const double left = until - clock_now();
        const int got = receive(g->whole, left > 0 ? left : 0);
        TRY(got);
        if (g->while_waiting && g->while_waiting->step) TRY(g->while_waiting->step(g->while_waiting->arg));
        if (got == 0 && !stored(g, rank, reply)) return 0;
        if (got == 0) return 1;
    }
    return 1;
}

void rank_group_drain(struct rank_group *g) {
    struct err_saved why;
    struct coordinator_reply reply;
    int rank, got = 0;
    err_save(&why);
    rank_group_heartbeat(g, NULL); /* a stop request ends the calls sooner */
    for (int r = 0; r < g->n; r++)
        while (g->busy[r] && (got = rank_group_take(g, RANK_SLICE_S, &rank, &reply)) >= 0)
            if (got > 0) coordinator_reply_free(&reply);
    err_restore(&why);
}

static bool under_way(const struct rank_group *g) {
    bool any = false;
    for (int r = 0; r < g->n; r++) any |= g->busy[r];
    return any;
}

/* Waits for the calls under way, of all ranks. Where another part has met an error there are none any more. */
static int take_all(struct rank_group *g, const char *phase, struct coordinator_reply *replies) {
    for (int left = g->n; left > 0;) {
        struct coordinator_reply reply;
        int rank;
        const int got = rank_group_take(g, RANK_SLICE_S, &rank, &reply);
        TRY(got);
        rank_group_heartbeat(g, phase);
        if (got == 0 && !under_way(g)) FAIL(ERR_RANK, "%s: its call was given up", coordinator_who(g->coordinator, g->first));
        if (got == 0) continue;
        replies[rank] = reply;
        left--;
    }
    return 0;
}

int rank_group_start_all(struct rank_group *g, const char *name, const struct message *m) {
    for (int r = 0; r < g->n; r++)
        if (g->busy[r])
            FAIL(ERR_INTERNAL, "%s: the call %s while another is under way", coordinator_who(g->coordinator, g->first + r), name);
    const struct coordinator_call_args a = call_args(g, name, m);
    TRY(given_up(g->whole, coordinator_call_ranks(g->coordinator, g->first, g->n, &a)));
    for (int r = 0; r < g->n; r++) g->busy[r] = true;
    return 0;
}

int rank_group_take_all(struct rank_group *g, const char *phase, struct coordinator_reply **replies) {
    *replies = xcalloc((size_t)g->n, sizeof **replies);
    return take_all(g, phase, *replies);
}

int rank_group_call(struct rank_group *g, const char *name, const char *phase, const struct message *m,
                    struct coordinator_reply **replies) {
    *replies = NULL;
    TRY(rank_group_start_all(g, name, m));
    return rank_group_take_all(g, phase, replies);
}

void rank_group_free(struct rank_group *g, struct coordinator_reply *replies) {
    for (int r = 0; replies && r < g->n; r++) coordinator_reply_free(&replies[r]);
    free(replies);
}

int rank_group_plain_call(struct rank_group *g, const char *name, json_t *args, json_t **first) {
    struct coordinator_reply *replies;
    struct message m = {.head = args, .borrows = true};
    const int rc = rank_group_call(g, name, NULL, &m, &replies);
    if (rc == 0 && first) *first = json_incref(replies[0].result);
    message_free(&m);
    rank_group_free(g, replies);
    return rc;
}

struct message_reader rank_group_reader(const struct rank_group *g, int rank, const struct coordinator_reply *reply) {
    return (struct message_reader){.head = reply->result,
                                   .arrays = reply->arrays,
                                   .n = reply->n_arrays,
                                   .who = coordinator_who(g->coordinator, g->first + rank)};
}

int rank_group_same(struct rank_group *g, const struct coordinator_reply *replies, const char *field, const char *what) {
    const json_t *first = json_object_get(replies[0].result, field);
    for (int r = 1; r < g->n; r++) {
        const json_t *own = json_object_get(replies[r].result, field);
        if (json_equal(first, own)) continue;
        FAIL(ERR_INPUT, "%s: its %s is \"%s\", and \"%s\" on %s; ranks that differ in it would not compute the same bits",
             coordinator_who(g->coordinator, g->first + r), what, json_string_value(own) ? json_string_value(own) : "",
             json_string_value(first) ? json_string_value(first) : "", coordinator_who(g->coordinator, g->first));
    }
    return 0;
}

/* ---- opening ---- */

/* The configuration as the ranks load it, and as they must find it. */
static int config_message(const struct conf *c, struct message *m) {
    const struct conf_args a = conf_args(c);
    struct buf yaml = {0};
    char *cwd = getcwd(NULL, 0);
    json_t *argv = json_array();
    for (int i = 0; i < a.argc; i++) json_array_append_new(argv, json_string(a.argv[i]));
    json_object_set_new(m->head, "argv", argv);
    json_object_set_new(m->head, "schema", json_string(a.schema));
    const bool utf8 = json_object_set_new(m->head, "cwd", json_string(cwd ? cwd : ".")) == 0;
    const int rc = utf8 ? conf_yaml(c, &yaml)
                        : err_set(ERR_INPUT, __FILE__, __LINE__,
                                  "the working directory's name is not UTF-8, and ranks get it as text; start the run elsewhere");
    if (rc == 0) json_object_set_new(m->head, "yaml", json_string(yaml.p));
    buf_free(&yaml);
    free(cwd);
    return rc;
}

static int open_ranks(struct rank_group *g, const struct conf *c, const char *open, const json_t *more, json_t **results) {
    struct message m = message_new(true);
    struct coordinator_reply *replies = NULL;
    const char *isa = NULL, *device;
    int rc = 0;
    if (c) TRYG(config_message(c, &m), out);
    if (more) json_object_update(m.head, (json_t *)(uintptr_t)more);
    if (g->run && g->run->from.trainer) TRYG(json_str_opt(g->run->from.trainer, "isa", &isa, g->run->from.dir), out);
    if (isa) json_object_set_new(m.head, "isa", json_string(isa));
    TRYG(rank_group_call(g, open, NULL, &m, &replies), out);
    TRYG(rank_group_same(g, replies, "isa", "instruction set"), out);
    TRYG(rank_group_same(g, replies, "device", "device"), out);
    TRYG(json_str(replies[0].result, "isa", &isa, coordinator_who(g->coordinator, 0)), out);
    TRYG(json_str(replies[0].result, "device", &device, coordinator_who(g->coordinator, 0)), out);
    TRYG(json_bool(replies[0].result, "own_memory", &g->own_memory, coordinator_who(g->coordinator, 0)), out);
    snprintf(g->device, sizeof g->device, "%d ranks, each on %s", g->n, device);
    log_info("%s", g->device);
    snprintf(g->isa, sizeof g->isa, "%s", isa);
    if (!results) goto out;
    *results = json_array();
    for (int r = 0; r < g->n; r++) json_array_append(*results, replies[r].result);
out:
    message_free(&m);
    rank_group_free(g, replies);
    return rc;
}

struct rank_group_args rank_group_args_of(const struct conf *c, const struct trainer_config *k, const struct rank_placement *p,
                                          struct run *run) {
    return (struct rank_group_args){.conf = c,
                                    .ranks = (int)p->n,
                                    .dir = k->run.default_local_dir,
                                    .controller = k->devices.controller,
                                    .deadline_s = k->run.deadline_s,
                                    .run = run,
                                    .ray_nodes = p->n_ray_nodes,
                                    .ray_gpus = !rank_count_on_cpu(k->run.device)};
}

int rank_group_open(struct rank_group *g, const struct rank_group_args *a, const char *open, json_t *more, json_t **results) {
    struct launch l;
    int rc = 0;
    *g = (struct rank_group){.run = a->run, .deadline_s = a->deadline_s > START_S ? a->deadline_s : START_S};
    TRYG(launch_read(&l, environ), out);
    const struct workers_args start = {.ranks = a->ranks,
                                       .dir = a->dir,
                                       .controller = a->controller,
                                       .start_s = RANK_START_S,
                                       .own_arguments = a->embedded,
                                       .ray_nodes = a->ray_nodes,
                                       .ray_gpus = a->ray_gpus};
    TRYG(workers_open(&g->workers, &start, &l), out);
    g->coordinator = workers_coordinator(g->workers);
    g->n = workers_size(g->workers);
    g->whole = g;
    g->busy = xcalloc((size_t)g->n, sizeof *g->busy);
    g->replies = xcalloc((size_t)g->n, sizeof *g->replies);
    rc = open_ranks(g, a->conf, open, more, results);
out:
    json_decref(more);
    return rc;
}

void rank_group_part(struct rank_group *out, struct rank_group *whole, int first, int n) {
    *out = *whole;
    out->workers = NULL;
    out->first = first;
    out->n = n;
    out->busy = whole->busy + first;
    out->replies = whole->replies + first;
}

void rank_group_close(struct rank_group *g, bool ok) {
    workers_close(g->workers, ok);
    for (int r = 0; g->replies && r < g->n; r++) coordinator_reply_free(&g->replies[r]);
    free(g->busy);
    free(g->replies);
    *g = (struct rank_group){0};
}

/* ---- updates ---- */

static int dump_text(void *arg, struct buf *out) {
    const struct comm_bytes *text = arg;
    return buf_add(out, text->p, text->n);
}

/* What rank 0 found: a gradient that is not finite. */
static int take_bad(const struct rank_group *g, const json_t *bad, struct message_reader *in) {
    struct optim_result o = {.grad_norm = 0.0 / 0.0};
    struct comm_bytes text;
    const char *tensor;
    if (!bad) return 0;
    TRY(json_str(bad, "tensor", &tensor, in->who));
    TRY(message_next(in, SIZE_MAX, &text));
    snprintf(o.bad_tensor, sizeof o.bad_tensor, "%s", tensor);
    return run_bad_gradient(g->run, &o, dump_text, &text);
}

int rank_group_updated(struct rank_group *g, const struct coordinator_reply *replies, struct batch *b) {
    TRY(rank_group_same(g, replies, "hash", "result of this update"));
    struct message_reader in = rank_group_reader(g, 0, &replies[0]);
    TRY(json_i64(in.head, "steps", &g->steps, in.who));
    if (json_is_true(json_object_get(in.head, "stopped"))) TRY(phase_check_stop());
    TRY(message_read_metrics(&in, &g->run->metrics));
    TRY(message_read_columns(&in, b));
    return take_bad(g, json_object_get(in.head, "bad"), &in);
}

int rank_group_memory(struct rank_group *g, struct metrics *m, const char *prefix) {
    struct coordinator_reply *replies;
    struct message q = message_new(true);
    int rc;
    json_object_set_new(q.head, "prefix", json_string(prefix));
    TRYG(rank_group_call(g, "memory", NULL, &q, &replies), out);
    for (int r = 0; r < g->n; r++) {
        struct metrics own = {0};
        struct message_reader in = rank_group_reader(g, r, &replies[r]);
        double v;
        rc = message_read_metrics(&in, &own);
        for (int64_t i = 0; i < own.n && rc == 0; i++) {
            const struct metric *x = &own.items[i];
            if (r > 0 && metrics_get(m, x->name, &v) && x->value <= v) continue;
            if (x->whole) metrics_set_i64(m, (int64_t)x->value, "%s", x->name);
            else metrics_set(m, x->value, "%s", x->name);
        }
        metrics_free(&own);
        TRYG(rc, out);
    }
out:
    message_free(&q);
    rank_group_free(g, replies);
    return rc;
}

/* ---- checkpoints ---- */

static int64_t steps(void *ctx) { return ((struct rank_group *)ctx)->steps; }

static int load(void *ctx, const char *dir) {
    struct rank_group *g = ctx;
    json_t *first = NULL;
    TRY(rank_group_plain_call(g, "load", json_pack("{s:s}", "dir", dir), &first));
    const int rc = json_i64(first, "steps", &g->steps, "load");
    json_decref(first);
    return rc;
}

static json_t *save_args(const struct ckpt_save_args *a) {
    return json_pack("{s:s, s:I, s:O, s:s, s:I, s:I, s:b, s:b, s:b}", "root", a->root, "step", (json_int_t)a->step, "trainer",
                     a->trainer, "config_yaml", a->config_yaml, "keep", (json_int_t)a->keep, "best", (json_int_t)a->best,
                     "parts_only", a->parts_only, "joins", a->joins, "hf_model", a->hf_model);
}

static int save(void *ctx, const struct ckpt_save_args *a) { return rank_group_plain_call(ctx, "save", save_args(a), NULL); }
static int open_copy(void *ctx) { return rank_group_plain_call(ctx, "open_copy", json_object(), NULL); }
static int copy(void *ctx, const struct ckpt_save_args *a) { return rank_group_plain_call(ctx, "copy", save_args(a), NULL); }

static int begin_write(void *ctx, void (*before)(void *arg), void *arg) {
    before(arg);
    return rank_group_plain_call(ctx, "write", json_object(), NULL);
}

static int take_written(void *ctx, double wait_s, int64_t *step) {
    const double until = clock_now() + wait_s;
    for (;;) {
        json_t *first = NULL;
        bool done = false;
        TRY(rank_group_plain_call(ctx, "take", json_object(), &first));
        int rc = json_bool(first, "done", &done, "take");
        if (rc == 0 && done) rc = json_i64(first, "step", step, "take");
        json_decref(first);
        TRY(rc);
        if (done) return 1;
        if (clock_now() >= until) return 0;
        usleep(20000);
    }
}

static void close_checkpoints(void *ctx) { (void)ctx; } /* the ranks do, when the group ends */

void rank_group_checkpoints(struct rank_group *g, struct checkpoints *out) {
    *out = (struct checkpoints){.ctx = g,
                                .isa = g->isa,
                                .steps = steps,
                                .load = load,
                                .save = save,
                                .open_copy = open_copy,
                                .copy = copy,
                                .write = begin_write,
                                .take = take_written,
                                .close = close_checkpoints};
}
