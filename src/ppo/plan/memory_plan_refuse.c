/* memory_plan_refuse.c - a run that does not fit is refused with the nearest change that does: first those that leave the result
 * as it is.
 * Invariant: a change that is proposed has been planned, and fits. */
#include "plan/memory_limit.h"
#include "plan/memory_rows.h"
#include "ppo/plan/memory_plan_int.h"

#include "base/err.h"
#include "base/size.h"

#include <stdio.h>

static size_t max_size(size_t a, size_t b) { return a > b ? a : b; }

/* Whether a run with this configuration instead would fit. */
static bool fits(const struct ppo_worker_config *k, const struct memory_plan_shapes *s, struct dev *dev) {
    struct memory_plan p;
    return memory_plan_make(&p, k, s, dev) == 0 && plan_fits_limits(&p);
}

/* The largest cut below `cut` under which the run fits: halved until it does, so that it is found soon. False: none. */
static bool smaller_cut(const struct ppo_worker_config *k, const struct memory_plan_shapes *s, struct dev *dev,
                        struct micro_batch_limits *cut) {
    struct ppo_worker_config c = *k;
    while (micro_batch_limits_lower(cut, k->sizes->max_len)) {
        c.actor.update_cut = *cut;
        if (c.ref.cut.max_seqs > 0 && c.ref.cut.max_seqs > cut->max_seqs && cut->max_seqs > 0) c.ref.cut.max_seqs = cut->max_seqs;
        if (fits(&c, s, dev)) return true;
    }
    return false;
}

/* The same of the critic's update; its values follow. */
static bool smaller_critic_cut(const struct ppo_worker_config *k, const struct memory_plan_shapes *s, struct dev *dev,
                               struct micro_batch_limits *cut) {
    struct ppo_worker_config c = *k;
    struct micro_batch_limits *values = &c.critic.values_cut;
    while (s->critic.json && micro_batch_limits_lower(cut, k->sizes->max_len)) {
        c.critic.update_cut = *cut;
        if (values->max_seqs > cut->max_seqs && cut->max_seqs > 0) values->max_seqs = cut->max_seqs;
        if (values->max_rows > cut->max_rows && cut->max_rows > 0) values->max_rows = cut->max_rows;
        if (fits(&c, s, dev)) return true;
    }
    return false;
}

/* " (other programs hold 30.1 GiB of this GPU)", " (its part of a GPU that ranks share)", or nothing. */
static const char *others_text(const struct dev *dev, char text[96]) {
    text[0] = '\0';
    if (dev->shared) snprintf(text, 96, " (its part of a GPU that ranks share)");
    else if (dev->mem_others)
        snprintf(text, 96, " (other programs hold %.2f GiB of this GPU: nvidia-smi lists them)", (double)dev->mem_others / 0x1p30);
    return text;
}

#define REF_KEY "actor_rollout_ref.ref.fsdp_config.param_offload=True"
#define STATE_KEY "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True"

/* Offloads all that it can to host memory, as the text of its keys; false: that is offloaded already, or cannot be. */
static bool offload_all(const struct ppo_worker_config *k, const struct dev *dev, struct ppo_worker_config *c, const char **text) {
    const bool ref = plan_has_ref(k) && !k->ref.offload, state = !k->actor.optim.host_state;
    if (!dev_has_own_memory(dev) || (!ref && !state)) return false;
    *text = !state ? REF_KEY : ref ? STATE_KEY " with " REF_KEY : STATE_KEY;
    c->ref.offload = plan_has_ref(k);
    c->actor.optim.host_state = c->actor.optim.host_master = true;
    return true;
}

/* The first of these that makes c fit, as the text of its keys, or NULL; c is as it was then. */
static void try_offload(const struct ppo_worker_config *k, const struct memory_plan_shapes *s, struct dev *dev,
                        struct ppo_worker_config *c, const char **text) {
    const bool ref = plan_has_ref(k) && !k->ref.offload, state = !k->actor.optim.host_state;
    *text = NULL;
    if (!dev_has_own_memory(dev)) return;
    for (int i = 1; i < 4; i++) { /* the cheapest first */
        const bool r = i & 1, o = i & 2;
        if ((r && !ref) || (o && !state)) continue;
        c->ref.offload = k->ref.offload || r;
        c->actor.optim.host_state = k->actor.optim.host_state || o;
        c->actor.optim.host_master = k->actor.optim.host_master || o;
        if (fits(c, s, dev)) {
            *text = i == 1 ? REF_KEY : i == 2 ? STATE_KEY : STATE_KEY " with " REF_KEY;
            return;
        }
    }
    c->ref.offload = k->ref.offload;
    c->actor.optim = k->actor.optim;
}

static bool keeps_more(enum train_recompute r) { return r == RECOMPUTE_NONE || r == RECOMPUTE_MLP; }

/* Lets the plan of c choose what the updates recompute; the keys that say so, or NULL where that takes no less memory. */
static const char *let_recompute(struct ppo_worker_config *c) {
    const bool actor = keeps_more(c->model.recompute), critic = c->critic.enable && keeps_more(c->critic.recompute);
    if (!actor && !critic) return NULL;
    c->model.recompute = c->critic.recompute = RECOMPUTE_AUTO;
    if (!conf_is_null(c->conf, "trainer.recompute")) return "trainer.recompute=auto";
#define ACTOR_KEY "actor_rollout_ref.model.enable_gradient_checkpointing=True"
#define CRITIC_KEY "critic.model.enable_gradient_checkpointing=True"
    return !critic ? ACTOR_KEY : actor ? ACTOR_KEY " with " CRITIC_KEY : CRITIC_KEY;
#undef ACTOR_KEY
#undef CRITIC_KEY
}

/* Whether the run fits without the memory of chunks. */
static bool fits_without_chunks(const struct ppo_worker_config *k, const struct memory_plan_shapes *s, struct dev *dev) {
    struct ppo_worker_config c = *k;
    c.actor.grad_chunk = c.critic.grad_chunk = 1;
    return (k->actor.grad_chunk > 1 || (s->critic.json && k->critic.grad_chunk > 1)) && fits(&c, s, dev);
}

/* The host memory of samples alone exceeds what the host has. */
static int refuse_samples(const struct memory_plan *p, const struct ppo_worker_config *k, size_t there) {
    const bool validation = p->validation > p->batch;
    char need[96];
    snprintf(need, sizeof need, "%.2f GiB of host memory, at most %.2f GiB are available", (double)p->host_all / 0x1p30,
             (double)there / 0x1p30);
    if (validation)
        FAIL(ERR_NOMEM,
             "the samples of a validation, actor_rollout_ref.rollout.val_kwargs.n=%lld of each prompt, need %s; lower it, or set "
             "data.val_max_samples",
             (long long)k->rollout.val.n, need);
    FAIL(ERR_NOMEM,
         "the samples of a step, data.train_batch_size=%lld x actor_rollout_ref.rollout.n=%lld, of up to %lld tokens "
         "(data.max_prompt_length, data.max_response_length) need %s; lower one of them",
         (long long)k->data->train_batch_size, (long long)k->rollout.train.n, (long long)p->max_len, need);
}

int memory_plan_validation(const struct memory_plan *p, const struct ppo_worker_config *k, const struct dev *dev, int64_t rows) {
    const bool own = dev_has_own_memory(dev);
    struct memory_plan q = *p;
    q.validation = plan_validation_bytes(k, rows);
    const size_t more = max_size(q.batch, q.validation) - max_size(p->batch, p->validation);
    if (k->ranks.all.n > 1) q.controller += more;
    else q.host_all += more;
    const size_t need = own ? q.offload + q.host_all : q.total - p->host_all + q.host_all,
                 there = plan_rank_share(
                     k, &q, own ? plan_host_limit(k->ranks.all.host_memory) : plan_memory_limit(dev, k->trainer->memory_limit));
    return need > there && q.validation > q.batch ? refuse_samples(&q, k, there) : 0;
}

/* The smallest pool of these ranks under which the run fits; 0: none. */
static int64_t larger_pool(const struct ppo_worker_config *k, const struct memory_plan_shapes *s, struct dev *dev) {
    enum { MOST = 64 };
    struct ppo_worker_config c = *k;
    const bool one_host = k->ranks.all.n_local == k->ranks.all.n;
    while (c.ranks.pools.n[c.ranks.pool] < MOST) {
        c.ranks.pools.n[c.ranks.pool]++;
        c.ranks.all.n++;
        c.ranks.all.n_local += one_host;
        if (fits(&c, s, dev)) return c.ranks.pools.n[c.ranks.pool];
    }
    return 0;
}

/* A pool of its own shares what it trains, or reads, among its ranks: whether more of them would fit is said, in text. */
static bool pool_text(const struct ppo_worker_config *k, const struct memory_plan_shapes *s, struct dev *dev, char text[160]) {
    const enum ppo_pool pool = k->ranks.pool;
    const char *const group = pool == PPO_CRITIC ? "critic" : "distillation";
    char key[64];
    if (pool != PPO_CRITIC && pool != PPO_TEACHER) return false;
    const int64_t n = larger_pool(k, s, dev);
    if (n == 0) return false;
    snprintf(key, sizeof key, "%s.ranks", group);
    if (!dev_has_own_memory(dev) || conf_is_set(k->conf, key)) snprintf(text, 160, "%s=%lld", key, (long long)n);
    else snprintf(text, 160, "a pool of %lld GPUs (%s.nnodes x %s.n_gpus_per_node)", (long long)n, group, group);
    return true;
}

/* The nearest change that fits: first those that leave the result as it is. */
static int refuse(const struct memory_plan *p, const struct ppo_worker_config *k, const struct memory_plan_shapes *s,
                  struct dev *dev) {
    char others[96], text[160], pool[160];
    struct ppo_worker_config c = *k;
    struct micro_batch_limits cut = k->actor.update_cut;
    const char *offload;
    const bool tokens = cut.max_seqs == 0, rows = k->critic.update_cut.max_seqs == 0;
    const char *const key = tokens ? "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
                                   : "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
                      *const critic = rows ? "max_token_len_per_gpu" : "micro_batch_size_per_gpu";
    if (p->host > 0 && max_size(p->batch, p->validation) > p->limit) return refuse_samples(p, k, p->limit);
    const char *const need = memory_need(text, p->total, p->limit, others_text(dev, others));
    c.layout = LAYOUT_AUTO;
    if (k->layout != LAYOUT_AUTO && fits(&c, s, dev)) return memory_refuse(need, "trainer.layout=auto");
    c.layout = k->layout;
    if (smaller_cut(k, s, dev, &cut)) return memory_refuse(need, "%s=%lld", key, (long long)(tokens ? cut.max_rows : cut.max_seqs));
    cut = k->critic.update_cut;
    if (smaller_critic_cut(k, s, dev, &cut))
        return memory_refuse(need, "critic.ppo_%s=%lld, and critic.forward_%s no larger,", critic,
                             (long long)(rows ? cut.max_rows : cut.max_seqs), critic);
    if (fits_without_chunks(k, s, dev))
        return memory_refuse(need, "without actor_rollout_ref.actor.grad_chunk and critic.grad_chunk it");
    if (judge_is_wanted(&p->rm_args.judge)) {
        for (c.rm.judge.max_seqs = p->rm_args.judge.max_seqs / 2; c.rm.judge.max_seqs >= 1; c.rm.judge.max_seqs /= 2)
            if (fits(&c, s, dev))
                return memory_refuse(need, "reward.reward_model.rollout.max_num_seqs=%lld", (long long)c.rm.judge.max_seqs);
        c = *k;
    }
    for (c.rollout.tensor_parallel = 2;
         k->rollout.tensor_parallel <= 1 && c.rollout.tensor_parallel <= k->ranks.pools.n[PPO_ROLLOUT]; c.rollout.tensor_parallel++)
        if (fits(&c, s, dev))
            return memory_refuse(need, "actor_rollout_ref.rollout.tensor_model_parallel_size=%lld",
                                 (long long)c.rollout.tensor_parallel);
    c = *k;
    for (c.actor.context = c.critic.context = 2;
         k->actor.context == 1 && c.actor.context <= k->ranks.pools.n[PPO_TRAIN] && k->actor.grad_chunk == 1 && !c.critic.enable;
         c.actor.context++)
        if (k->ranks.pools.n[PPO_TRAIN] % c.actor.context == 0 && fits(&c, s, dev))
            return memory_refuse(need, "actor_rollout_ref.actor.ulysses_sequence_parallel_size=%lld (context parallel)",
                                 (long long)c.actor.context);
    c = *k;
    const char *recompute = let_recompute(&c); /* stays so in all that follows */
    if (recompute && fits(&c, s, dev)) return memory_refuse(need, "%s", recompute);
    const char *with = recompute ? " with " : "";
    if (!recompute) recompute = "";
    try_offload(k, s, dev, &c, &offload);
    if (offload) return memory_refuse(need, "%s%s%s", offload, with, recompute);
    for (c.rollout.max_num_seqs = p->max_seqs / 2; c.rollout.max_num_seqs >= 1; c.rollout.max_num_seqs /= 2)
        if (fits(&c, s, dev))
            return memory_refuse(need, "actor_rollout_ref.rollout.max_num_seqs=%lld%s%s", (long long)c.rollout.max_num_seqs, with,
                                 recompute);
    c.rollout.max_num_seqs = k->rollout.max_num_seqs;
    cut = k->actor.update_cut;
    if (offload_all(k, dev, &c, &offload) && smaller_cut(&c, s, dev, &cut))
        return memory_refuse(need, "%s with %s=%lld%s%s", offload, key, (long long)(tokens ? cut.max_rows : cut.max_seqs), with,
                             recompute);
    if (pool_text(k, s, dev, pool)) return memory_refuse(need, "%s", pool);
    if (plan_fixed_bytes(p) >= p->limit)
        FAIL(ERR_NOMEM, "the run needs %.2f GiB for weights and optimizer alone, the limit is %.2f GiB%s; take a smaller model%s",
             (double)plan_fixed_bytes(p) / 0x1p30, (double)p->limit / 0x1p30, others,
             p->ref ? ", or use_kl_loss=False (no reference model)" : "");
    FAIL(ERR_NOMEM, "%s; lower data.max_response_length", need);
}

int memory_plan_check(const struct memory_plan *p, const struct ppo_worker_config *k, const struct memory_plan_shapes *s,
                      struct dev *dev) {
    if (p->copy && (p->offload > p->host_limit || p->total > p->limit) && p->offload - (p->host ? 0 : p->copy) <= p->host_limit &&
        p->total - (p->host ? p->copy : 0) <= p->limit)
        FAIL(ERR_NOMEM, "trainer.async_save=True needs %.2f GiB of host memory more than there is; without it the run fits",
             (double)(p->host ? p->total - p->limit : p->offload - p->host_limit) / 0x1p30);
    if (p->offload > p->host_limit)
        FAIL(ERR_NOMEM,
             "offload needs %.2f GiB of host memory, at most %.2f GiB of it may be locked; leave param_offload or "
             "optimizer_offload off",
             (double)p->offload / 0x1p30, (double)p->host_limit / 0x1p30);
    if (p->host == 0 && p->offload + p->host_all > p->host_limit) return refuse_samples(p, k, p->host_limit);
    return p->total > p->limit ? refuse(p, k, s, dev) : 0;
}
