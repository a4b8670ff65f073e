/* worker_ranks.c - a supervised run on several ranks: how they are opened, from the learner (worker.h) and on a rank.
 *
 * Invariant: names and arguments of these calls stand here alone, at both ends. */
#include "ranks/worker_calls.h"
#include "supervised/worker.h"

#include "base/err.h"
#include "base/json.h"

/* ---- the learner's end ---- */

int supervised_ranks_start(struct supervised_worker *w, struct run *run) {
    const struct supervised_worker_config *k = &w->k;
    const struct rank_group_args a = rank_group_args_of(k->conf, k->trainer, &k->ranks, run);
    return dispatch_open(&w->base, &w->ranks, &a, w->program->open, NULL, NULL);
}

int supervised_ranks_open(struct supervised_worker *w, int64_t total_steps, int64_t longest) {
    struct supervised_planned *const out = &w->planned;
    const char *text;
    json_t *first = NULL;
    int64_t context = 1;
    TRY(rank_group_plain_call(&w->ranks.all, "supervised_model",
                              json_pack("{s:I, s:I}", "total_steps", (json_int_t)total_steps, "longest", (json_int_t)longest),
                              &first));
    int rc = json_str(first, "text", &text, "supervised_model");
    if (rc == 0) rc = json_bool(first, "async_save", &out->async_save, "supervised_model");
    if (rc == 0) rc = json_i64(first, "context", &context, "supervised_model");
    w->base.context[WORKER_POLICY] = (int)context;
    if (rc == 0) rc = json_bool(first, "collective", &w->base.collective[WORKER_POLICY], "supervised_model");
    if (rc == 0) {
        out->text = xstrdup(text);
        out->json = json_incref(json_object_get(first, "plan"));
    }
    json_decref(first);
    return rc;
}

/* ---- a rank's end ---- */

static struct {
    struct supervised_config k;
    struct supervised_worker w;
} self;

static void rank_close(void) {
    supervised_worker_close(&self.w, 0);
    supervised_config_free(&self.k);
}

int supervised_open_rank(const struct supervised_program *p, struct comm *comm, const struct comm_call *call,
                         struct ctl_result *out) {
    static const struct worker_update *const updates[] = {&supervised_update, NULL};
    rank_self()->updates = updates;
    rank_self()->close = rank_close;
    self.w = (struct supervised_worker){.program = p};
    TRY(rank_open_config(comm, call));
    TRY(supervised_config_read(&self.k, p, rank_self()->conf));
    TRY(rank_open_run(&self.k.trainer.run));
    TRY(rank_open_device(call, &self.w.base.dev, self.k.trainer.run.device, self.k.trainer.run.threads));
    worker_open_local(&self.w.base, comm);
    rank_self()->worker = &self.w.base;
    const struct rank_placement ranks = {.n = comm_size(comm), .n_local = comm_local_size(comm)};
    self.w.k = supervised_worker_config(&self.k, ranks);
    out->value = json_object();
    rank_describe(out->value, &self.w.base.dev);
    return 0;
}

static int rank_open_model(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    const struct supervised_planned *p = &self.w.planned;
    int64_t total_steps, longest;
    (void)comm;
    TRY(json_i64(call->args, "total_steps", &total_steps, call->name));
    TRY(json_i64(call->args, "longest", &longest, call->name));
    TRY(supervised_worker_open(&self.w, total_steps, longest));
    self.w.base.ops->checkpoints(&self.w.base, &rank_self()->run.checkpoints);
    out->value = json_pack("{s:O, s:s, s:b, s:i, s:b}", "plan", p->json, "text", p->text, "async_save", p->async_save, "context",
                           self.w.base.context[WORKER_POLICY], "collective", self.w.base.collective[WORKER_POLICY]);
    return 0;
}

const struct worker_process_service supervised_services[] = {{"supervised_model", rank_open_model}, {NULL, NULL}};
