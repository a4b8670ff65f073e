/* worker_ranks.c - a supervised run on several ranks: the learner's calls of them (worker.h), and a rank's end of these.
 *
 * An update goes to all ranks with all rows, a validation to them in parts.
 * Invariant: call names and arguments of both ends stand here alone. */
#include "ranks/worker_calls.h"
#include "supervised/worker.h"

#include "base/err.h"
#include "base/json.h"

#include <stdlib.h>

/* ---- the learner's end ---- */

static int open_device(struct supervised_worker *w) {
    const struct supervised_config *k = w->k;
    const struct rank_group_args a = {.conf = k->conf,
                                      .ranks = (int)k->n_ranks,
                                      .dir = k->run.default_local_dir,
                                      .controller = k->devices.controller,
                                      .deadline_s = k->run.deadline_s,
                                      .run = w->run,
                                      .ray_nodes = k->n_ray_nodes,
                                      .ray_gpus = !train_on_cpu(k->run.device)};
    TRY(rank_group_open(&w->ranks, &a, w->program->open, NULL, NULL));
    rank_dealing_init(&w->dispatch, &w->ranks);
    w->device = w->ranks.device;
    w->own_memory = w->ranks.own_memory;
    return 0;
}

static int open_model(struct supervised_worker *w, int64_t longest, struct checkpoints *models) {
    struct supervised_planned *const out = &w->planned;
    const char *text;
    json_t *first = NULL;
    TRY(rank_group_plain_call(
        &w->ranks, "supervised_model",
        json_pack("{s:I, s:I}", "total_steps", (json_int_t)w->run->total_steps, "longest", (json_int_t)longest), &first));
    int rc = json_str(first, "text", &text, "supervised_model");
    if (rc == 0) rc = json_bool(first, "async_save", &out->async_save, "supervised_model");
    if (rc == 0) {
        out->text = xstrdup(text);
        out->json = json_incref(json_object_get(first, "plan"));
        rank_group_checkpoints(&w->ranks, models);
    }
    json_decref(first);
    return rc;
}

static int ready(struct supervised_worker *w) { return rank_group_ready(&w->ranks); }

static int update(struct supervised_worker *w, const struct supervised_rows *rows) {
    struct message m = message_new(false);
    struct hub_reply *replies;
    struct batch none = {0};
    json_object_set_new(m.head, "step", json_integer((json_int_t)w->run->step));
    message_seqs(&m, rows->seqs, rows->n);
    message_add(&m, rows->row, (size_t)rows->n * sizeof *rows->row);
    w->ranks.steps = -1;
    int rc = rank_group_call(&w->ranks, "supervised_update", "train", &m, &replies);
    if (rc == 0) rc = rank_group_updated(&w->ranks, replies, &none);
    batch_free(&none);
    message_free(&m);
    rank_group_free(&w->ranks, replies);
    return rc;
}

static int forward(struct supervised_worker *w, const struct packed_seq *seqs, int64_t n, float *logp) {
    const struct progress at = run_progress(w->run);
    json_t *args = json_object();
    const int rc = rank_forward(
        &w->dispatch,
        &(struct rank_forward_args){.args = args, .phase = "testing", .at = &at, .seqs = seqs, .n = n, .out = {.logp = logp}});
    json_decref(args);
    return rc;
}

static int memory(struct supervised_worker *w) { return rank_group_memory(&w->ranks, &w->run->metrics, ""); }

const struct supervised_ops supervised_on_ranks = {
    .open_device = open_device, .open_model = open_model, .ready = ready, .update = update, .forward = forward, .memory = memory};

/* ---- a rank's end ---- */

static struct {
    struct supervised_config k;
    struct supervised_worker w;
} self;

static int rank_pass(const json_t *args, const struct packed_seq *seqs, int64_t n, struct forward_out out) {
    (void)args;
    return supervised_local.forward(&self.w, seqs, n, out.logp);
}

static void rank_close(void) {
    supervised_worker_close(&self.w, 0);
    supervised_config_free(&self.k);
}

int supervised_open_rank(const struct supervised_program *p, struct comm *comm, const struct comm_call *call,
                         struct ctl_result *out) {
    rank_self()->program = (struct rank_program){.dev = &self.w.dev, .forward = rank_pass, .close = rank_close};
    self.w = (struct supervised_worker){.program = p, .k = &self.k, .run = &rank_self()->run, .comm = comm};
    TRY(rank_open_config(comm, call));
    TRY(supervised_config_read(&self.k, p, rank_self()->conf));
    TRY(rank_open_run(&self.k.run));
    TRY(rank_open_device(call, &self.w.dev, self.k.run.device, self.k.run.threads));
    self.k.n_ranks = comm_size(comm);
    self.k.n_local = comm_local_size(comm);
    out->value = json_object();
    rank_describe(out->value, &self.w.dev);
    return 0;
}

static int rank_open_model(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    const struct supervised_planned *p = &self.w.planned;
    int64_t total_steps, longest;
    (void)comm;
    TRY(json_i64(call->args, "total_steps", &total_steps, call->name));
    TRY(json_i64(call->args, "longest", &longest, call->name));
    train_optim_steps(&self.k.optim, total_steps, self.k.warmup_ratio);
    TRY(supervised_local.open_model(&self.w, longest, &self.w.run->checkpoints));
    out->value = json_pack("{s:O, s:s, s:b}", "plan", p->json, "text", p->text, "async_save", p->async_save);
    return 0;
}

static int rank_update(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    static const char *const none[] = {NULL};
    struct message_reader in = rank_reader(call);
    struct packed_seq *seqs = NULL;
    struct supervised_rows rows = {0};
    struct batch b = {0};
    int64_t step;
    int rc = 0;
    (void)comm;
    TRY(json_i64(call->args, "step", &step, call->name));
    TRY(message_read_seqs(&in, &seqs, &rows.n));
    struct comm_bytes row;
    TRYG(message_next(&in, (size_t)rows.n * sizeof *rows.row, &row), out);
    rows.seqs = seqs;
    rows.row = row.p;
    rank_update_begin(step, "train", true);
    rc = rank_update_end(out, supervised_local.update(&self.w, &rows), &b, none);
out:
    free(seqs);
    return rc;
}

const struct ctl_service supervised_services[] = {
    {"supervised_model", rank_open_model}, {"supervised_update", rank_update}, {NULL, NULL}};
