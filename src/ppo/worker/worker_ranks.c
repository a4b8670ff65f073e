/* worker_ranks.c - see worker_ranks.h. */
#include "ppo/worker/worker_ranks.h"

#include "ranks/dispatch.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "base/log.h"

#include <stdlib.h>

struct worker_group {
    struct rank_group ranks, part[PPO_POOLS];
    struct rank_dealing dispatch[PPO_POOLS]; /* of each part that has ranks */
    struct ppo_pools pools;
    struct worker_scores *scores;
    struct rank_spare *idle_passes;           /* of the generation under way; NULL: none */
    char *judge;                              /* where the judge is that a rank serves; NULL: there is none */
    bool roles[N_ROLES], collective[N_ROLES]; /* collective: its passes are, since its weights are sharded */
    bool stale;                               /* those that generate do not have the trainer's weights */
    bool updating;                            /* the critic's own ranks */
};

/* The ranks that do this part of the work. */
static struct rank_group *part_of(struct worker_group *g, enum ppo_pool part) { return &g->part[ppo_pool_of(&g->pools, part)]; }
static struct rank_dealing *dispatch_of(const struct worker_group *g, enum ppo_pool part) {
    return (struct rank_dealing *)(uintptr_t)&g->dispatch[ppo_pool_of(&g->pools, part)];
}

int worker_group_size(const struct worker_group *g) { return g->ranks.n; }

const char *worker_group_device(const struct worker_group *g, bool *own_memory) {
    *own_memory = g->ranks.own_memory;
    return g->ranks.device;
}

struct worker_scores *worker_group_scores(const struct worker_group *g) {
    return g->scores;
}
bool worker_group_has(const struct worker_group *g, enum verlc_role role) { return g->roles[role]; }
bool worker_group_collective(const struct worker_group *g, enum verlc_role role) { return g->collective[role]; }

/* ---- opening ---- */

static const json_t *result_of(const struct worker_group *g, const json_t *results, enum ppo_pool part) {
    return json_array_get(results, (size_t)g->part[ppo_pool_of(&g->pools, part)].first);
}

/* The trainer's plan, with those of other pools behind it. */
static int take_plans(struct worker *w, const json_t *results) {
    const struct worker_group *g = w->group;
    struct buf text = {0};
    json_t *pools = json_object();
    int rc = 0;
    for (int i = 0; i < PPO_POOLS && rc == 0; i++) {
        const char *own = "";
        if (g->part[i].n == 0) continue;
        const json_t *plan = json_array_get(results, (size_t)g->part[i].first);
        rc = json_str(plan, "text", &own, "plan");
        if (rc == 0) rc = buf_addf(&text, "%s%s", text.n ? "\n" : "", own);
        if (i == PPO_TRAIN) w->plan_json = json_incref(json_object_get(plan, "plan"));
        else json_object_set(pools, ppo_pool_name((enum ppo_pool)i), json_object_get(plan, "plan"));
    }
    if (json_object_size(pools)) json_object_set(w->plan_json, "pools", pools);
    json_decref(pools);
    w->plan_text = buf_take(&text);
    return rc;
}

static int take_plan(struct worker *w, const json_t *results) {
    struct worker_group *g = w->group;
    const char *judge = NULL;
    int64_t copy = 0;
    TRY(take_plans(w, results));
    TRY(json_i64(result_of(g, results, PPO_TRAIN), "copy", &copy, "plan"));
    TRY(json_i64(result_of(g, results, PPO_ROLLOUT), "max_seqs", &w->plan.max_seqs, "plan"));
    TRY(json_str_opt(result_of(g, results, PPO_REWARD), "judge", &judge, "plan"));
    const json_t *f = json_object_get(result_of(g, results, PPO_TRAIN), "flops");
    double *const flops[] = {&w->plan.flops.token, &w->plan.flops.square, &w->plan.flops.peak};
    for (size_t i = 0; i < sizeof flops / sizeof *flops; i++) *flops[i] = json_number_value(json_array_get(f, i));
    if (judge) w->k->reward.router_address = g->judge = xstrdup(judge);
    w->plan.copy = (size_t)copy;
    return 0;
}

static void make_parts(struct worker_group *g, const struct ppo_pools *pools) {
    const int all = g->ranks.n;
    g->pools = *pools;
    if (ppo_pool_ranks(pools) != all) g->pools = (struct ppo_pools){.n = {[PPO_TRAIN] = all}};
    for (int i = 0; i < PPO_POOLS; i++) {
        if (g->pools.n[i] == 0) continue;
        rank_group_part(&g->part[i], &g->ranks, (int)ppo_pool_first(&g->pools, (enum ppo_pool)i), (int)g->pools.n[i]);
        rank_dealing_init(&g->dispatch[i], &g->part[i]);
        const struct rank_group *const part = &g->part[i];
        if (part->n == 1 && all > 1) log_info("rank %d: %s", part->first, ppo_pool_name((enum ppo_pool)i));
        else if (part->n < all)
            log_info("ranks %d to %d: %s", part->first, part->first + part->n - 1, ppo_pool_name((enum ppo_pool)i));
    }
    g->stale = g->pools.n[PPO_ROLLOUT] > 0;
}

int worker_group_open(struct worker *w, struct ppo_config *k, int ranks, struct run *run) {
    struct worker_group *g = xcalloc(1, sizeof *g);
    json_t *results = NULL;
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
    TRY(rank_group_open(&g->ranks, &a, "plan", json_pack("{s:o}", "pools", ppo_pools_json(&k->pools)), &results));
    make_parts(g, &k->pools);
    int rc = take_plan(w, results);
    json_decref(results);
    if (rc == 0) rc = worker_scores_open(&g->scores, k, dispatch_of(g, PPO_REWARD), k->pools.n[PPO_REWARD] > 0);
    return rc;
}

void worker_group_close(struct worker_group *g, bool ok) {
    if (!g) return;
    worker_scores_close(g->scores);
    for (int i = 0; i < PPO_POOLS; i++) rank_dealing_free(&g->dispatch[i]);
    free(g->judge);
    rank_group_close(&g->ranks, ok);
    free(g);
}

int worker_group_models(struct worker_group *g, int64_t total_steps, int64_t validation_rows) {
    const json_t *args =
        json_pack("{s:I, s:I}", "total_steps", (json_int_t)total_steps, "validation_rows", (json_int_t)validation_rows);
    struct message m = {.head = (json_t *)(uintptr_t)args, .borrows = true};
    struct hub_reply *replies;
    const int rc = rank_group_call(&g->ranks, "models", NULL, &m, &replies);
    for (int r = 0; r < g->ranks.n && rc == 0; r++)
        for (size_t role = 0; role < N_ROLES; role++) {
            g->roles[role] |= json_is_true(json_array_get(json_object_get(replies[r].result, "roles"), role));
            g->collective[role] |= json_is_true(json_array_get(json_object_get(replies[r].result, "collective"), role));
        }
    message_free(&m);
    rank_group_free(&g->ranks, replies);
    return rc;
}

/* ---- generation and passes ---- */

int worker_group_send_weights(struct worker_group *g) {
    struct hub_reply *replies;
    struct rank_group pair;
    if (!g->stale) return 0;
    struct message m = message_new(true);
    rank_group_part(&pair, &g->ranks, 0, g->part[PPO_TRAIN].n + g->part[PPO_ROLLOUT].n);
    int rc = rank_group_call(&pair, "send_weights", NULL, &m, &replies);
    if (rc == 0) rc = rank_group_same(&pair, replies, "sum", "checksum of the weights");
    message_free(&m);
    rank_group_free(&pair, replies);
    g->stale = rc < 0;
    return rc;
}

int worker_group_generate_begin(struct worker_group *g, const struct rollout_config *c) {
    return rank_generate_begin(dispatch_of(g, PPO_ROLLOUT), c);
}

int worker_group_generate_add(struct worker_group *g, const struct rollout_request *q) {
    rank_generate_add(dispatch_of(g, PPO_ROLLOUT), q);
    return 0;
}

int worker_group_generate_interrupt(struct worker_group *g) { return rank_generate_interrupt(dispatch_of(g, PPO_ROLLOUT)); }
int worker_group_generate_step(struct worker_group *g, bool wait) { return rank_generate_step(dispatch_of(g, PPO_ROLLOUT), wait); }
struct rollout_stats worker_group_generate_stats(const struct worker_group *g) {
    return rank_generate_stats(dispatch_of(g, PPO_ROLLOUT));
}
void worker_group_generate_end(struct worker_group *g) {
    rank_generate_end(dispatch_of(g, PPO_ROLLOUT));
    worker_scores_rest(g->scores);
}

void worker_group_beside(struct worker_group *g, int (*step)(void *arg), void *arg) {
    g->part[PPO_TRAIN].while_waiting.step = step;
    g->part[PPO_TRAIN].while_waiting.arg = arg;
}

int worker_group_spare_open(struct worker_group *g, const enum verlc_role *roles, int n,
                            int (*done)(void *arg, int pass, int64_t tag, const float *x, int64_t n), void *arg) {
    struct rank_spare_pass passes[RANK_SPARE_PASSES];
    struct rank_dealing *const d = dispatch_of(g, PPO_ROLLOUT);
    if (n == 0 || d->g->n < 2 || g->pools.n[PPO_ROLLOUT] > 0) return 0;
    for (int i = 0; i < n; i++) passes[i] = (struct rank_spare_pass){.role = roles[i], .value = roles[i] == VERLC_CRITIC};
    TRY(rank_spare_open(&g->idle_passes, d->g, passes, n, done, arg));
    d->idle = g->idle_passes;
    return 0;
}

void worker_group_spare_add(struct worker_group *g, const int32_t *prompt, int64_t n_prompt, const int32_t *response, int64_t n,
                            int64_t tag) {
    if (g->idle_passes) rank_spare_add(g->idle_passes, prompt, n_prompt, response, n, tag);
}

void worker_group_spare_close(struct worker_group *g) {
    dispatch_of(g, PPO_ROLLOUT)->idle = NULL;
    rank_spare_close(g->idle_passes);
    g->idle_passes = NULL;
}

int worker_group_forward(struct worker_group *g, const struct worker_group_pass *p, struct forward_out out) {
    static const char *const phases[N_ROLES] = {"old_log_prob", "ref_log_prob", "values", "teacher"};
    const enum verlc_role role = p->role;
    json_t *args = json_pack("{s:i}", "role", (int)role);
    static const enum ppo_pool parts[N_ROLES] = {PPO_TRAIN, PPO_TRAIN, PPO_CRITIC, PPO_TEACHER};
    int rc = parts[role] == PPO_CRITIC ? worker_group_join(g) : 0;
    if (rc == 0)
        rc = rank_forward(dispatch_of(g, parts[role]), &(struct rank_forward_args){.args = args,
                                                                                   .collective = g->collective[role],
                                                                                   .phase = phases[role],
                                                                                   .at = p->at,
                                                                                   .seqs = p->seqs,
                                                                                   .n = p->n,
                                                                                   .k = p->k,
                                                                                   .out = out});
    json_decref(args);
    return rc;
}

/* ---- updates ---- */

int worker_group_update(struct worker_group *g, enum verlc_role role, const struct stage *s, struct batch *b) {
    static const char *const read[] = {
        "prompts",          "responses",    "response_mask", "loss_mask", "rollout_log_probs",  "old_log_probs",
        "advantages",       "ref_log_prob", "values",        "returns",   "rollout_is_weights", "teacher_ids",
        "teacher_logprobs", "uid",          "sample_index",  "score",     "param_versions",     NULL};
    struct hub_reply *replies;
    struct message m = message_new(true);
    json_object_set_new(m.head, "role", json_integer(role));
    json_object_set_new(m.head, "step", json_integer((json_int_t)s->run->step));
    message_columns(&m, b, read);
    struct rank_group *const part = part_of(g, role == VERLC_CRITIC ? PPO_CRITIC : PPO_TRAIN);
    const bool overlapped = role == VERLC_CRITIC && g->pools.n[PPO_CRITIC] > 0; /* overlapped with the policy's update */
    int rc = overlapped ? worker_group_join(g) : 0;
    json_object_set_new(m.head, "may_stop", json_boolean(!overlapped && !stage_stop_held()));
    part->steps = -1;
    if (role != VERLC_CRITIC) g->stale = g->pools.n[PPO_ROLLOUT] > 0;
    if (rc == 0 && overlapped) {
        rc = rank_group_start_all(part, "update", &m);
        g->updating = rc == 0;
    } else if (rc == 0) {
        rc = rank_group_call(part, "update", role == VERLC_CRITIC ? "update_critic" : "update_actor", &m, &replies);
        if (rc == 0) rc = rank_group_updated(part, replies, b);
        rank_group_free(part, replies);
    }
    message_free(&m);
    return rc;
}

int worker_group_join(struct worker_group *g) {
    struct rank_group *const part = part_of(g, PPO_CRITIC);
    struct batch none = {0};
    struct hub_reply *replies;
    if (!g->updating) return 0;
    g->updating = false;
    int rc = rank_group_take_all(part, "update_critic", &replies);
    if (rc == 0) rc = rank_group_updated(part, replies, &none);
    rank_group_free(part, replies);
    batch_free(&none);
    return rc;
}

int worker_group_memory_metrics(struct worker_group *g, struct metrics *m, const char *prefix) {
    return rank_group_memory(&g->ranks, m, prefix);
}

int worker_group_trace(struct worker_group *g, const char *path) {
    return rank_group_plain_call(&g->ranks, "trace", json_pack("{s:s?}", "path", path), NULL);
}

void worker_group_checkpoints(struct worker_group *g, struct checkpoints *out) {
    struct checkpoints critic, trainer;
    rank_group_checkpoints(part_of(g, PPO_TRAIN), &trainer);
    *out = trainer;
    if (g->pools.n[PPO_CRITIC] == 0) return;
    rank_group_checkpoints(part_of(g, PPO_CRITIC), &critic);
    checkpoints_joint(out, &critic, &trainer);
}
