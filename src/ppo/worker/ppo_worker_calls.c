/* ppo_worker_calls.c - a worker's process: the calls of worker_ranks.c, each done by worker.h's functions on this rank's device.
 *
 * What a process holds is made by the calls "plan" and "models" and lives until it ends; the rest is worker_calls.h's.
 * Invariant: as worker_calls.h's. */
#include "ppo/worker/ppo_worker_calls.h"

#include "ppo/worker/worker_ranks.h"
#include "ranks/rank_group.h"
#include "ranks/weight_sync.h"
#include "ranks/worker_calls.h"
#include "train/optimizer_keys.h"

#include "base/err.h"
#include "base/json.h"
#include "base/log.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static struct {
    struct ppo_config k;
    struct worker w;
    struct comm *senders; /* owned; NULL: none */
    struct tokenizer *tok;
} self;

/* ---- callbacks of the shared calls ---- */

static int get_role(const json_t *args, enum verlc_role *role) {
    int64_t v;
    TRY(json_i64(args, "role", &v, "role"));
    if (v < 0 || v >= N_ROLES || !worker_has(&self.w, (enum verlc_role)v))
        FAIL(ERR_INTERNAL, "there is no model of role %lld", (long long)v);
    *role = (enum verlc_role)v;
    return 0;
}

static int forward(const json_t *args, const struct packed_seq *seqs, int64_t n, struct forward_out out) {
    const struct progress at = run_progress(&rank_self()->run);
    enum verlc_role role;
    TRY(get_role(args, &role));
    return worker_forward(&self.w, role, &at, seqs, n, out);
}

static int generate_begin(const struct rollout_config *c) {
    struct rollout_config own = *c;
    own.no_prefix_cache = !self.k.prefix_cache;
    own.tok = self.tok;
    return worker_generate_begin(&self.w, &own);
}

static int generate_add(void *arg, struct rollout_request *q) {
    (void)arg;
    return worker_generate_add(&self.w, q);
}

static int generate_step(void) { return worker_generate_step(&self.w, false); }
static int generate_interrupt(void) { return worker_generate_interrupt(&self.w); }
static struct rollout_stats generate_stats(void) { return worker_generate_stats(&self.w); }
static void generate_end(void) { worker_generate_end(&self.w); }

static void close_all(void) {
    worker_close(&self.w);
    comm_close(self.senders);
    tokenizer_close(self.tok);
    ppo_config_free(&self.k);
}

/* ---- opening ---- */

/* Whose work this rank does, and with whom. */
static int join_pool(struct comm *comm, const struct comm_call *call) {
    struct ppo_config *const k = &self.k;
    const int rank = comm_rank(comm), size = comm_size(comm);
    TRY(ppo_pools_read(&k->pools, json_object_get(call->args, "pools"), size));
    k->n_ranks = size;
    k->n_local = comm_local_size(comm);
    for (int i = 0; i < PPO_POOLS; i++)
        if (k->pools.n[i] > 0 && rank >= ppo_pool_first(&k->pools, (enum ppo_pool)i)) k->pool = (enum ppo_pool)i;
    TRY(rank_open_pool((int)ppo_pool_first(&k->pools, k->pool), (int)k->pools.n[k->pool]));
    self.w.comm = rank_self()->pool;
    const int64_t pair = k->pools.n[PPO_TRAIN] + k->pools.n[PPO_ROLLOUT];
    if (k->pools.n[PPO_ROLLOUT] == 0 || rank >= pair) return 0;
    TRY(comm_part(&self.senders, comm, 0, (int)pair));
    self.w.senders = self.senders;
    return 0;
}

static int plan(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    rank_self()->program = (struct rank_program){.dev = &self.w.dev,
                                                 .forward = forward,
                                                 .generate_begin = generate_begin,
                                                 .generate_add = generate_add,
                                                 .generate_step = generate_step,
                                                 .generate_interrupt = generate_interrupt,
                                                 .generate_stats = generate_stats,
                                                 .generate_end = generate_end,
                                                 .close = close_all};
    TRY(rank_open_config(comm, call));
    TRY(ppo_config_read(&self.k, rank_self()->conf, PPO_WORKER));
    TRY(rank_open_run(&self.k.run));
    TRY(rank_open_device(call, &self.w.dev, self.k.run.device, self.k.run.threads));
    TRY(join_pool(comm, call));
    TRY(worker_plan(&self.w, &self.k));
    if (ppo_does(&self.k, PPO_REWARD) && comm_rank(self.w.comm) == 0) TRY(worker_listen(&self.w));
    const struct model_flops *f = &self.w.plan.flops;
    out->value = json_pack("{s:O, s:s, s:I, s:I, s:s?, s:[f, f, f]}", "plan", self.w.plan_json, "text", self.w.plan_text, "copy",
                           (json_int_t)self.w.plan.copy, "max_seqs", (json_int_t)self.w.plan.max_seqs, "judge",
                           self.k.reward.router_address, "flops", f->token, f->square, isfinite(f->peak) ? f->peak : 0.0);
    rank_describe(out->value, &self.w.dev);
    return 0;
}

static int models(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    int64_t total_steps, rows;
    (void)comm;
    TRY(json_i64(call->args, "total_steps", &total_steps, call->name));
    TRY(json_i64(call->args, "validation_rows", &rows, call->name));
    if (rows > 0) TRY(memory_plan_validation(&self.w.plan, &self.k, &self.w.dev, rows));
    train_optim_steps(&self.k.optim, total_steps, self.k.warmup_ratio);
    train_optim_steps(&self.k.critic.optim, total_steps, self.k.critic.warmup_ratio);
    TRY(tokenizer_open(&self.tok, self.k.tokenizer_dir));
    TRY(worker_open(&self.w, self.tok));
    TRY(dev_memory(&self.w.dev, &rank_self()->run.memory));
    json_t *roles = json_array(), *collective = json_array();
    worker_checkpoints(&self.w, &rank_self()->run.checkpoints); /* none without a model that is trained */
    for (int i = 0; i < N_ROLES; i++) {
        json_array_append_new(roles, json_boolean(worker_has(&self.w, (enum verlc_role)i)));
        json_array_append_new(collective, json_boolean(worker_collective(&self.w, (enum verlc_role)i)));
    }
    out->value = json_pack("{s:o, s:o}", "roles", roles, "collective", collective);
    return 0;
}

static int send_weights(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    char text[17];
    uint64_t sum;
    (void)comm, (void)call;
    TRY(rank_weights_send(self.w.weights, &sum));
    snprintf(text, sizeof text, "%016llx", (unsigned long long)sum);
    out->value = json_pack("{s:s}", "sum", text);
    return 0;
}

/* ---- updates ---- */

static int update(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    static const char *const added[] = {"entropys", NULL}, *const none[] = {NULL};
    const struct stage s = {&self.k, &self.w, &rank_self()->run};
    struct message_reader in = rank_reader(call);
    struct batch b = {0};
    enum verlc_role role;
    int64_t step;
    bool may_stop;
    int rc = 0;
    (void)comm;
    TRY(get_role(call->args, &role));
    TRY(json_i64(call->args, "step", &step, call->name));
    TRY(json_bool(call->args, "may_stop", &may_stop, call->name));
    TRYG(message_read_columns(&in, &b), out);
    const bool critic = role == VERLC_CRITIC;
    rank_update_begin(step, critic ? "update_critic" : "update_actor", may_stop);
    rc = critic ? ppo_update_critic(&s, &b) : ppo_update_actor(&s, &b);
    rc = rank_update_end(out, rc, &b, critic ? none : added);
out:
    batch_free(&b);
    return rc;
}

/* ---- scores ---- */

static int score(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    (void)comm;
    return worker_scores_answer(&self.w, call, out);
}

static int score_drop(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    (void)comm, (void)call, (void)out;
    worker_score_drop(&self.w);
    return 0;
}

/* ---- traces (global_profiler.steps), of each rank's device ---- */

static int trace(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    const char *path = NULL;
    (void)out;
    TRY(json_str_opt(call->args, "path", &path, call->name));
    return path ? rank_trace_stop(comm, &self.w.dev, path) : rank_trace_start(comm, &self.w.dev);
}

const struct ctl_service ppo_worker_services[] = {
    {"plan", plan},   {"models", models},         {"update", update}, {"send_weights", send_weights},
    {"score", score}, {"score_drop", score_drop}, {"trace", trace},   {NULL, NULL}};

int ppo_worker_serve(const struct conf *c, const struct launch *l) {
    struct ppo_config k;
    log_set_level(LOG_WARN); /* what is logged once is logged by the controller */
    int rc = ppo_config_read(&k, c, PPO_WORKER);
    const struct ctl_args a = {.dir = k.run.default_local_dir, .controller = k.devices.controller, .start_s = RANK_START_S};
    if (rc == 0) rc = rank_serve(l, &a, (const struct ctl_service *const[]){ppo_worker_services, NULL});
    ppo_config_free(&k);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : rc;
}
