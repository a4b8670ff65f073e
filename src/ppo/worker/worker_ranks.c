/* worker_ranks.c - how a ppo run's ranks are opened, from its controller (worker.h): which of them do what, and what they plan. The
 * workers' side is ppo_worker_calls.c.
 *
 * Invariant: results do not depend on the number of ranks, nor on which rank did what; what all ranks computed is compared. */
#include "ppo/worker/worker.h"

#include "ranks/dispatch.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "base/log.h"

#include <stdlib.h>

struct ppo_ranks {
    struct worker_ranks base;
    struct rank_group part[PPO_POOLS], weight_sync;
    struct rank_dispatch dispatch[PPO_POOLS]; /* of each part that has ranks */
    struct ppo_pools pools;
    char *judge; /* where the judge is that a rank serves; NULL: there is none */
};

/* To the ranks that do this part of the work. */
static struct rank_dispatch *dispatch_of(struct ppo_ranks *g, enum ppo_pool part) {
    return &g->dispatch[ppo_pool_of(&g->pools, part)];
}

static const json_t *result_of(const struct ppo_ranks *g, const json_t *results, enum ppo_pool part) {
    return json_array_get(results, (size_t)g->part[ppo_pool_of(&g->pools, part)].first);
}

/* The trainer's plan, with those of other pools behind it. */
static int take_plans(struct ppo_worker *w, const json_t *results) {
    const struct ppo_ranks *g = w->ranks;
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

static int take_plan(struct ppo_worker *w, const json_t *results) {
    struct ppo_ranks *g = w->ranks;
    const char *judge = NULL;
    int64_t copy = 0;
    TRY(take_plans(w, results));
    TRY(json_i64(result_of(g, results, PPO_TRAIN), "copy", &copy, "plan"));
    TRY(json_i64(result_of(g, results, PPO_ROLLOUT), "max_seqs", &w->plan.max_seqs, "plan"));
    TRY(json_str_opt(result_of(g, results, PPO_REWARD), "judge", &judge, "plan"));
    const json_t *f = json_object_get(result_of(g, results, PPO_TRAIN), "flops");
    double *const flops[] = {&w->plan.flops.token, &w->plan.flops.square, &w->plan.flops.peak};
    for (size_t i = 0; i < sizeof flops / sizeof *flops; i++) *flops[i] = json_number_value(json_array_get(f, i));
    w->base.flops = w->plan.flops;
    TRY(json_i64(result_of(g, results, PPO_ROLLOUT), "tensor_parallel", &w->plan.tensor_parallel, "plan"));
    w->base.tensor_parallel = w->plan.tensor_parallel;
    dispatch_of(g, PPO_ROLLOUT)->together = (int)w->plan.tensor_parallel;
    TRY(json_i64(result_of(g, results, PPO_REWARD), "rm_together", &w->plan.rm_together, "plan"));
    if (judge) w->judge_address = g->judge = xstrdup(judge);
    w->plan.copy = (size_t)copy;
    return 0;
}

static void make_parts(struct ppo_ranks *g, const struct ppo_pools *pools) {
    const int all = g->base.all.n;
    g->pools = *pools;
    if (ppo_pool_ranks(pools) != all) g->pools = (struct ppo_pools){.n = {[PPO_TRAIN] = all}};
    for (int i = 0; i < PPO_POOLS; i++) {
        if (g->pools.n[i] == 0) continue;
        rank_group_part(&g->part[i], &g->base.all, (int)ppo_pool_first(&g->pools, (enum ppo_pool)i), (int)g->pools.n[i]);
        rank_dispatch_init(&g->dispatch[i], &g->part[i]);
        const struct rank_group *const part = &g->part[i];
        if (part->n == 1 && all > 1) log_info("rank %d: %s", part->first, ppo_pool_name((enum ppo_pool)i));
        else if (part->n < all)
            log_info("ranks %d to %d: %s", part->first, part->first + part->n - 1, ppo_pool_name((enum ppo_pool)i));
    }
}

/* Which of them a worker's operations go to. */
static void set_operations(struct ppo_worker *w) {
    static const enum ppo_pool parts[N_ROLES] = {PPO_TRAIN, PPO_TRAIN, PPO_CRITIC, PPO_TEACHER};
    struct ppo_ranks *const g = w->ranks;
    const int64_t *const n = g->pools.n;
    for (int i = 0; i < N_ROLES; i++) g->base.has[i] = dispatch_of(g, parts[i]);
    g->base.generates = dispatch_of(g, PPO_ROLLOUT);
    g->base.own[VERLC_CRITIC] = n[PPO_CRITIC] > 0;
    g->part[PPO_TRAIN].while_waiting = &w->base.overlapped;
    w->base.disaggregated = g->base.stale = n[PPO_ROLLOUT] > 0;
    if (!w->base.disaggregated) return;
    rank_group_part(&g->weight_sync, &g->base.all, 0, (int)(n[PPO_TRAIN] + n[PPO_ROLLOUT]));
    g->base.weight_sync = &g->weight_sync;
}

int ppo_ranks_plan(struct ppo_worker *w, struct run *run) {
    const struct ppo_worker_config *const k = &w->k;
    struct ppo_ranks *g = xcalloc(1, sizeof *g);
    json_t *results = NULL;
    struct rank_group_args a = rank_group_args_of(k->conf, k->trainer, &k->ranks.all, run);
    a.embedded = w->embedded;
    w->ranks = g;
    TRY(dispatch_open(&w->base, &g->base, &a, "plan", json_pack("{s:o}", "pools", ppo_pools_json(&k->ranks.pools)), &results));
    make_parts(g, &k->ranks.pools);
    set_operations(w);
    const int rc = take_plan(w, results);
    json_decref(results);
    const int together = w->plan.rm_together > 1 ? (int)w->plan.rm_together : 1;
    ppo_scorer_open_ranks(&w->scorer, &k->rm, dispatch_of(g, PPO_REWARD), together, k->ranks.pools.n[PPO_REWARD] > 0);
    return rc;
}

void ppo_ranks_close(struct ppo_ranks *g, bool ok) {
    if (!g) return;
    for (int i = 0; i < PPO_POOLS; i++) rank_dispatch_free(&g->dispatch[i]);
    free(g->judge);
    dispatch_close(&g->base, ok);
    free(g);
}

int ppo_ranks_open(struct ppo_worker *w, int64_t total_steps, int64_t validation_rows) {
    struct rank_group *const all = &w->ranks->base.all;
    struct message m = message_new(true);
    struct coordinator_reply *replies;
    json_object_set_new(m.head, "total_steps", json_integer((json_int_t)total_steps));
    json_object_set_new(m.head, "validation_rows", json_integer((json_int_t)validation_rows));
    const int rc = rank_group_call(all, "models", NULL, &m, &replies);
    for (int r = 0; r < all->n && rc == 0; r++)
        for (size_t role = 0; role < N_ROLES; role++) {
            w->base.has[role] |= json_is_true(json_array_get(json_object_get(replies[r].result, "roles"), role));
            w->base.collective[role] |= json_is_true(json_array_get(json_object_get(replies[r].result, "collective"), role));
            const json_t *const context = json_array_get(json_object_get(replies[r].result, "context"), role);
            if (json_integer_value(context) > 1) w->base.context[role] = (int)json_integer_value(context);
        }
    message_free(&m);
    rank_group_free(all, replies);
    return rc;
}
