/* ppo_worker_calls.c - a worker's process: the calls of worker_ranks.c, each done on this rank's device.
 *
 * What a process holds is made by the calls "plan" and "models" and lives until it ends; the rest is worker_calls.h's.
 * Invariant: as worker_calls.h's. */
#include "ppo/worker/ppo_worker_calls.h"

#include "ppo/stages/stages.h"
#include "ranks/rank_group.h"
#include "ranks/weight_sync.h"
#include "ranks/worker_calls.h"

#include "base/err.h"
#include "base/json.h"
#include "base/log.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static struct {
    const struct ppo_config *k; /* owned */
    struct ppo_worker w;
    struct comm *senders; /* owned; NULL: none */
    struct tokenizer *tok;
} self;

static void close_all(void) {
    ppo_worker_close(&self.w);
    comm_close(self.senders);
    tokenizer_close(self.tok);
    ppo_config_free(self.k);
}

/* ---- opening ---- */

/* Whose work this rank does, and with whom. */
static int join_pool(struct comm *comm, const struct comm_call *call, struct ppo_placement *p) {
    const int rank = comm_rank(comm), size = comm_size(comm);
    *p = (struct ppo_placement){.all = {.n = size, .n_local = comm_local_size(comm)}};
    TRY(ppo_pools_read(&p->pools, json_object_get(call->args, "pools"), size));
    for (int i = 0; i < PPO_POOLS; i++)
        if (p->pools.n[i] > 0 && rank >= ppo_pool_first(&p->pools, (enum ppo_pool)i)) p->pool = (enum ppo_pool)i;
    TRY(rank_open_pool((int)ppo_pool_first(&p->pools, p->pool), (int)p->pools.n[p->pool]));
    const int64_t pair = p->pools.n[PPO_TRAIN] + p->pools.n[PPO_ROLLOUT];
    if (p->pools.n[PPO_ROLLOUT] == 0 || rank >= pair) return 0;
    TRY(comm_part(&self.senders, comm, 0, (int)pair));
    self.w.senders = self.senders;
    return 0;
}

static int plan(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    static const struct worker_update *const updates[] = {&ppo_update_actor, &ppo_update_critic, NULL};
    rank_self()->updates = updates;
    struct ppo_placement ranks;
    rank_self()->close = close_all;
    TRY(rank_open_config(comm, call));
    TRY(ppo_config_read(&self.k, rank_self()->conf, PPO_WORKER));
    const struct run_config *const run = &self.k->trainer.run;
    TRY(rank_open_run(run));
    TRY(rank_open_device(call, &self.w.base.dev, run->device, run->threads));
    TRY(join_pool(comm, call, &ranks));
    self.w.k = ppo_worker_config(self.k, &ranks);
    worker_open_local(&self.w.base, rank_self()->pool);
    rank_self()->worker = &self.w.base;
    TRY(ppo_worker_plan(&self.w));
    const struct model_flops *f = &self.w.plan.flops;
    out->value = json_pack("{s:O, s:I, s:I, s:s, s:I, s:I, s:s?, s:[f, f, f]}", "plan", self.w.plan_json, "tensor_parallel",
                           (json_int_t)self.w.plan.tensor_parallel, "rm_together", (json_int_t)self.w.plan.rm_together, "text",
                           self.w.plan_text, "copy", (json_int_t)self.w.plan.copy, "max_seqs", (json_int_t)self.w.plan.max_seqs,
                           "judge", self.w.judge_address, "flops", f->token, f->square, isfinite(f->peak) ? f->peak : 0.0);
    rank_describe(out->value, &self.w.base.dev);
    return 0;
}

static int models(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    int64_t total_steps, rows;
    (void)comm;
    TRY(json_i64(call->args, "total_steps", &total_steps, call->name));
    TRY(json_i64(call->args, "validation_rows", &rows, call->name));
    TRY(tokenizer_open(&self.tok, self.k->model.tokenizer_dir));
    TRY(ppo_worker_open(&self.w, self.tok, total_steps, rows));
    json_t *roles = json_array(), *collective = json_array(), *context = json_array();
    self.w.base.ops->checkpoints(&self.w.base, &rank_self()->run.checkpoints); /* none without a model that is trained */
    for (int i = 0; i < N_ROLES; i++) {
        json_array_append_new(roles, json_boolean(self.w.base.has[i]));
        json_array_append_new(collective, json_boolean(self.w.base.collective[i]));
        json_array_append_new(context, json_integer(self.w.base.context[i]));
    }
    out->value = json_pack("{s:o, s:o, s:o}", "roles", roles, "collective", collective, "context", context);
    return 0;
}

static int send_weights(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    char text[17];
    uint64_t sum;
    (void)comm, (void)call;
    TRY(weight_sync_send(self.w.weights, &sum));
    snprintf(text, sizeof text, "%016llx", (unsigned long long)sum);
    out->value = json_pack("{s:s}", "sum", text);
    return 0;
}

/* ---- scores ---- */

static int score(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    (void)comm;
    return ppo_scorer_answer(&self.w.scorer, call, out);
}

static int score_together(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    (void)comm, (void)call, (void)out;
    return ppo_scorer_follow(&self.w.scorer);
}

static int ppo_reward_drop(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    (void)comm, (void)call, (void)out;
    self.w.scorer.ops->drop(&self.w.scorer);
    return 0;
}

const struct worker_process_service ppo_worker_services[] = {{"plan", plan},
                                                             {"models", models},
                                                             {"send_weights", send_weights},
                                                             {"score", score},
                                                             {"score_together", score_together},
                                                             {"score_drop", ppo_reward_drop},
                                                             {NULL, NULL}};

int ppo_worker_serve(const struct conf *c, const struct launch *l) {
    const struct ppo_config *k;
    log_set_level(LOG_WARN); /* what is logged once is logged by the controller */
    int rc = ppo_config_read(&k, c, PPO_WORKER);
    const struct worker_process_service *const tables[] = {ppo_worker_services, NULL};
    if (rc == 0) rc = rank_serve(l, k->trainer.run.default_local_dir, k->trainer.devices.controller, tables);
    ppo_config_free(k);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : rc;
}
