/* worker_group.c - see worker_group.h. */
#include "train/ppo/worker_group.h"

#include "train/run/rank_dealing.h"
#include "train/train.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"

#include <stdlib.h>

struct worker_group {
    struct rank_group ranks;
    struct rank_dealing dealing;
    struct worker_scores *scores;
    char *judge; /* where the judge is that rank 0 serves; NULL: there is none */
    bool roles[N_ROLES];
};

int worker_group_size(const struct worker_group *g) { return g->ranks.n; }

const char *worker_group_device(const struct worker_group *g, bool *own_memory) {
    *own_memory = g->ranks.own_memory;
    return g->ranks.device;
}

struct worker_scores *worker_group_scores(const struct worker_group *g) {
    return g->scores;
}
bool worker_group_has(const struct worker_group *g, enum verlc_role role) { return g->roles[role]; }

/* ---- opening ---- */

static int take_plan(struct worker *w, const json_t *plan) {
    const char *text = "", *judge = NULL;
    int64_t copy = 0;
    TRY(json_str(plan, "text", &text, "plan"));
    TRY(json_i64(plan, "copy", &copy, "plan"));
    TRY(json_i64(plan, "max_seqs", &w->plan.max_seqs, "plan"));
    TRY(json_str_opt(plan, "judge", &judge, "plan"));
    if (judge) w->k->reward.router_address = w->group->judge = xstrdup(judge);
    w->plan.copy = (size_t)copy;
    w->plan_text = xstrdup(text);
    w->plan_json = json_incref(json_object_get(plan, "plan"));
    return 0;
}

int worker_group_open(struct worker *w, struct ppo_config *k, int ranks, struct run *run) {
    struct worker_group *g = xcalloc(1, sizeof *g);
    json_t *plan = NULL;
    const struct rank_group_args a = {.conf = k->conf,
                                      .ranks = ranks,
                                      .dir = k->run.default_local_dir,
                                      .controller = k->devices.controller,
                                      .deadline_s = k->run.deadline_s,
                                      .run = run,
                                      .ray_nodes = k->n_ray_nodes,
                                      .ray_gpus = !train_on_cpu(k->run.device),
                                      .embedded = w->embedded};
    w->k = k;
    w->group = g;
    TRY(rank_group_open(&g->ranks, &a, "plan", &plan));
    rank_dealing_init(&g->dealing, &g->ranks);
    int rc = take_plan(w, plan);
    json_decref(plan);
    if (rc == 0) rc = worker_scores_open(&g->scores, k, &g->dealing);
    return rc;
}

int worker_group_serve(const struct conf *c, const struct launch *l) {
    struct ppo_config k;
    TRY(ppo_config_fill(&k, c));
    const struct ctl_args a = {.dir = k.run.default_local_dir, .controller = k.devices.controller, .start_s = RANK_START_S};
    return train_worker(l, &a, NULL);
}

void worker_group_close(struct worker_group *g, bool ok) {
    if (!g) return;
    worker_scores_close(g->scores);
    rank_dealing_free(&g->dealing);
    free(g->judge);
    rank_group_close(&g->ranks, ok);
    free(g);
}

int worker_group_models(struct worker_group *g, int64_t total_steps, int64_t validation_rows) {
    json_t *first = NULL;
    TRY(rank_group_plain_call(
        &g->ranks, "models",
        json_pack("{s:I, s:I}", "total_steps", (json_int_t)total_steps, "validation_rows", (json_int_t)validation_rows), &first));
    for (int role = 0; role < N_ROLES; role++)
        g->roles[role] = json_is_true(json_array_get(json_object_get(first, "roles"), (size_t)role));
    json_decref(first);
    return 0;
}

/* ---- generation and passes ---- */

int worker_group_generate_begin(struct worker_group *g, const struct rollout_config *c) {
    return rank_generate_begin(&g->dealing, c);
}

int worker_group_generate_add(struct worker_group *g, const struct rollout_request *q) {
    rank_generate_add(&g->dealing, q);
    return 0;
}

int worker_group_generate_interrupt(struct worker_group *g) { return rank_generate_interrupt(&g->dealing); }
int worker_group_generate_step(struct worker_group *g) { return rank_generate_step(&g->dealing); }
struct rollout_stats worker_group_generate_stats(const struct worker_group *g) {
    return rank_generate_stats(&g->dealing);
}
void worker_group_generate_end(struct worker_group *g) { rank_generate_end(&g->dealing); }

int worker_group_forward(struct worker_group *g, enum verlc_role role, const struct progress *at, const struct packed_seq *seqs,
                         int64_t n, int64_t k, struct forward_out out) {
    static const char *const phases[N_ROLES] = {"old_log_prob", "ref_log_prob", "values", "teacher"};
    json_t *args = json_pack("{s:i}", "role", (int)role);
    const int rc = rank_forward(&g->dealing, args, phases[role], at, seqs, n, k, out);
    json_decref(args);
    return rc;
}

/* ---- updates ---- */

int worker_group_update(struct worker_group *g, enum verlc_role role, const struct stage *s, struct batch *b) {
    static const char *const read[] = {"prompts",
                                       "responses",
                                       "response_mask",
                                       "rollout_log_probs",
                                       "old_log_probs",
                                       "advantages",
                                       "ref_log_prob",
                                       "values",
                                       "returns",
                                       "rollout_is_weights",
                                       "teacher_ids",
                                       "teacher_logprobs",
                                       "uid",
                                       "sample_index",
                                       "score",
                                       "param_versions",
                                       NULL};
    struct hub_reply *replies;
    struct message m = message_new(true);
    json_object_set_new(m.head, "role", json_integer(role));
    json_object_set_new(m.head, "step", json_integer((json_int_t)s->run->step));
    message_columns(&m, b, read);
    g->ranks.steps = -1;
    int rc = rank_group_call(&g->ranks, "update", role == VERLC_CRITIC ? "update_critic" : "update_actor", &m, &replies);
    if (rc == 0) rc = rank_group_updated(&g->ranks, replies, b);
    message_free(&m);
    rank_group_free(&g->ranks, replies);
    return rc;
}

int worker_group_memory_metrics(struct worker_group *g, struct metrics *m, const char *prefix) {
    return rank_group_memory(&g->ranks, m, prefix);
}

int worker_group_trace(struct worker_group *g, const char *path) {
    return rank_group_plain_call(&g->ranks, "trace", json_pack("{s:s?}", "path", path), NULL);
}

void worker_group_checkpoints(struct worker_group *g, struct checkpoints *out) { rank_group_checkpoints(&g->ranks, out); }
