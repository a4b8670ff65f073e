/* memory_plan_layout.c - how ranks share the models of a run: which layout of the weights, how many ranks generate together, have
 * experts or a reward model together. What a plan takes is memory_plan.c's.
 * Invariant: what the keys leave open is the first that fits, in an order that costs speed last; no choice changes a bit. */
#include "ppo/plan/memory_plan_int.h"

#include "model/parallel/tensor_parallel.h"

#include "base/err.h"

#include <string.h>

static int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }

/* Why the ranks of a pool do not come in groups of n that are on one host each; NULL: they do. */
static const char *no_groups(const struct ppo_worker_config *k, enum ppo_pool pool, int64_t n) {
    const int64_t ranks = k->ranks.pools.n[pool], local = k->ranks.all.n_local, first = ppo_pool_first(&k->ranks.pools, pool);
    if (ranks == 1) return "there is one rank";
    if (ranks % n != 0) return "it does not divide the ranks";
    for (int64_t at = first; at < first + ranks; at += n)
        if (at % local + n > local) return "it does not divide the ranks of a host";
    return NULL;
}

/* How many ranks the keys have generate together, 0: as many as the plan chooses; and which key says it. */
static int64_t asked_together(const struct ppo_worker_config *k, const struct memory_plan_shapes *s, const char **key) {
    const int64_t of_experts = s->policy.n_experts ? k->rollout.expert_parallel : 1;
    const bool by_experts = of_experts > 1 && of_experts > k->rollout.tensor_parallel;
    *key = by_experts ? "rollout.expert_parallel_size" : "rollout.tensor_model_parallel_size";
    return by_experts ? of_experts : k->rollout.tensor_parallel;
}

/* Why n ranks that only generate cannot do so together; NULL: they can. The same for those that send them weights. */
static const char *no_pool_split(const struct ppo_worker_config *k, const struct memory_plan_shapes *s, int64_t n) {
    const char *const unable = no_groups(k, PPO_ROLLOUT, n);
    if (unable) return unable;
    if (k->model.lora.quant != QUANT_NONE) return "the base is quantised";
    if (k->model.mtp.used) return "the policy has an MTP layer";
    return model_tp_unable(&s->policy, QUANT_NONE, (int)n);
}

/* Of a pool that only generates: as many as a key says, as the ranks that train have to know it too. */
int64_t plan_pool_together(const struct ppo_worker_config *k, const struct memory_plan_shapes *s) {
    const char *key;
    const int64_t n = asked_together(k, s, &key);
    return k->ranks.pools.n[PPO_ROLLOUT] > 0 && n > 1 && !no_pool_split(k, s, n) ? n : 1;
}
/* The same of ranks that do not train the policy. */
static const char *no_pool_layout(enum ppo_pool pool, enum weight_layout l) {
    if (pool == PPO_CRITIC) return l == LAYOUT_SHARDED ? NULL : "there is no reference";
    if (pool == PPO_TEACHER) return l == LAYOUT_REF ? NULL : "a teacher is not trained";
    return "these ranks do not train";
}

/* Why a run cannot have a layout; NULL: it can. */
static const char *no_layout(const struct ppo_worker_config *k, const struct memory_plan_shapes *s, enum weight_layout l) {
    if (l <= LAYOUT_WHOLE) return NULL;
    if (k->ranks.pools.n[k->ranks.pool] < 2) return "there is one rank";
    if (!ppo_does(&k->ranks, PPO_TRAIN)) return no_pool_layout(k->ranks.pool, l);
    if (l == LAYOUT_SHARDED && k->rollout.external.n_urls > 0) return "servers get the weights from a rank that has them whole";
    if (k->model.lora.on && ppo_critic_shares(k)) return "the critic reads the policy's weights";
    if (l == LAYOUT_SHARDED)
        return k->ranks.pools.n[PPO_ROLLOUT] > 0 && plan_pool_together(k, s) == 1 ? "other ranks generate, each alone" : NULL;
    if (k->distill->enable && ppo_does(&k->ranks, PPO_TEACHER)) return NULL; /* the teacher */
    if (k->model.lora.on) return "there is an adapter";
    if (!plan_has_ref(k)) return "there is no reference";
    return k->ref.offload ? "the reference is in host memory" : NULL;
}

/* Why so many ranks cannot generate together; NULL: they can. */
static const char *no_split(const struct ppo_worker_config *k, const struct memory_plan_shapes *s, enum weight_layout l,
                            int64_t n) {
    const int64_t ranks = k->ranks.pools.n[PPO_TRAIN];
    if (n == 1) return NULL;
    if (!ppo_has_engine(k)) return "generation is not here";
    if (k->ranks.pools.n[PPO_ROLLOUT] > 0) return plan_pool_together(k, s) == n ? NULL : no_pool_split(k, s, n);
    if (l != LAYOUT_SHARDED)
        return no_layout(k, s, LAYOUT_SHARDED) ? no_layout(k, s, LAYOUT_SHARDED) : "each rank has the weights whole";
    if (ranks % n != 0) return "it does not divide the ranks";
    if (k->ranks.all.n_local % n != 0) return "it does not divide the ranks of a host";
    return model_tp_unable(&s->policy, k->model.lora.quant, (int)n);
}

/* Why updates cannot have experts on ranks; NULL: they can. */
static const char *no_experts(const struct ppo_worker_config *k, const struct memory_plan_shapes *s, enum weight_layout l) {
    const char *const unable = model_dispatch_unable(&s->policy);
    if (unable) return unable;
    if (!ppo_does(&k->ranks, PPO_TRAIN)) return "these ranks do not train";
    if (l != LAYOUT_SHARDED)
        return no_layout(k, s, LAYOUT_SHARDED) ? no_layout(k, s, LAYOUT_SHARDED) : "each rank has the weights whole";
    if (k->ranks.pools.n[PPO_ROLLOUT] > 0) return "other ranks generate";
    if (k->actor.context > 1) return "ranks share the rows of a micro-batch (context parallel)";
    return k->actor.grad_chunk > 1 ? "grad_chunk adds up gradients of several micro-batches first" : NULL;
}

/* KV blocks for a quarter, at least, of the samples that may run at once. */
static bool kv_fits(const struct memory_plan *p) {
    return p->n_kv_blocks * 4 >= p->max_seqs * ((p->max_len + KV_BLOCK_LEN - 1) / KV_BLOCK_LEN);
}

/* Whether q is the better plan of the two, which has more ranks generate together. */
static bool better_split(const struct memory_plan *q, const struct memory_plan *p) {
    if (!plan_fits_limits(p)) return q->least < p->least;
    return plan_fits_limits(q) && q->n_kv_blocks * p->tensor_parallel > p->n_kv_blocks * q->tensor_parallel;
}

/* The plan with this layout, and with as many ranks that generate together as the key says; else each alone where that fits, or as
 * few as leave the KV cache its room. */
static int plan_together(struct memory_plan *p, const struct ppo_worker_config *k, const struct memory_plan_shapes *s,
                         struct dev *dev, enum weight_layout layout, bool experts) {
    const char *key;
    const int64_t asked = asked_together(k, s, &key), first = asked > 0 ? asked : 1;
    const char *const unable = no_split(k, s, layout, first);
    char why[sizeof p->why_split] = "";
    if (unable) snprintf(why, sizeof why, "not the %lld asked for: %s", (long long)first, unable);
    else if (asked > 0) snprintf(why, sizeof why, "as %s says", key);
    else if (k->rollout.expert_parallel > 1) snprintf(why, sizeof why, "rollout.expert_parallel_size: the model has no experts");
    TRY(plan_layout(p, k, s, dev, (struct split){layout, unable ? 1 : first, experts}));
    const bool chooses = asked == 0 && k->ranks.pools.n[PPO_ROLLOUT] == 0;
    for (int64_t n = first + 1; chooses && n <= k->ranks.pools.n[PPO_TRAIN]; n++) {
        struct memory_plan q;
        const bool fits = plan_fits_limits(p);
        if (fits && (p->tensor_parallel == 1 || kv_fits(p))) break;
        if (no_split(k, s, layout, n)) continue;
        TRY(plan_layout(&q, k, s, dev, (struct split){layout, n, experts}));
        if (!better_split(&q, p)) continue;
        if (fits)
            snprintf(why, sizeof why, "with %lld there is room for %lld KV blocks", (long long)p->tensor_parallel,
                     (long long)p->n_kv_blocks);
        else snprintf(why, sizeof why, "with %lld a rank needs %.2f GiB", (long long)p->tensor_parallel, (double)p->total / 0x1p30);
        *p = q;
    }
    memcpy(p->why_split, why, sizeof why);
    return 0;
}

/* And with the policy's experts on ranks in its updates where the key says so, or where the run does not fit without and needs less
 * with it. */
static int plan_split(struct memory_plan *p, const struct ppo_worker_config *k, const struct memory_plan_shapes *s, struct dev *dev,
                      enum weight_layout layout) {
    const char *const unable = no_experts(k, s, layout);
    const int64_t asked = k->actor.expert_parallel, ranks = k->ranks.pools.n[PPO_TRAIN];
    struct memory_plan q;
    TRY(plan_together(p, k, s, dev, layout, asked > 1 && !unable));
    if (asked > 1 && unable)
        snprintf(p->why_experts, sizeof p->why_experts, "not the %lld asked for: %s", (long long)asked, unable);
    else if (asked > 1)
        snprintf(p->why_experts, sizeof p->why_experts, "as expert_model_parallel_size says%s",
                 asked == ranks ? "" : ", over all ranks");
    if (asked > 1 || unable || plan_fits_limits(p)) return 0;
    TRY(plan_together(&q, k, s, dev, layout, true));
    if (q.least >= p->least) return 0;
    snprintf(q.why_experts, sizeof q.why_experts, "without it a rank needs %.2f GiB", (double)p->total / 0x1p30);
    *p = q;
    return 0;
}

/* The plan with as many ranks that have a reward model together as k says. */
static int make_with(struct memory_plan *p, const struct ppo_worker_config *k, const struct memory_plan_shapes *s,
                     struct dev *dev) {
    const enum weight_layout asked =
        k->layout == LAYOUT_SHARDED && k->ranks.pool == PPO_TEACHER ? LAYOUT_REF : k->layout; /* all that there is */
    const char *const missing = no_layout(k, s, asked);
    char why[sizeof p->why] = "";
    if (k->layout != LAYOUT_AUTO) {
        TRY(plan_split(p, k, s, dev, missing ? LAYOUT_WHOLE : asked));
        snprintf(p->why, sizeof p->why, "trainer.layout=%s%s%s", rank_plan_layout_name(k->layout), missing ? ": " : "",
                 missing ? missing : "");
        return 0;
    }
    for (enum weight_layout l = LAYOUT_WHOLE; l < LAYOUTS; l++) {
        if (no_layout(k, s, l)) continue;
        TRY(plan_split(p, k, s, dev, l));
        snprintf(p->why, sizeof p->why, "%s", why);
        if (plan_fits_limits(p)) break;
        snprintf(why, sizeof why, "%s does not fit: it needs %.2f GiB", rank_plan_layout_name(l), (double)p->total / 0x1p30);
    }
    return 0;
}

/* Why so many ranks cannot have the reward model together; NULL: they can. p: of a plan with that number. */
static const char *no_reward_split(const struct ppo_worker_config *k, const struct memory_plan *p, int64_t n) {
    const enum ppo_pool pool = ppo_pool_of(&k->ranks.pools, PPO_REWARD);
    if (n == 1) return NULL;
    const char *const unable = no_groups(k, pool, n);
    if (unable) return unable;
    if (p && p->tensor_parallel > 1 && n % p->tensor_parallel != 0) return "it is no multiple of the ranks that generate together";
    return model_tp_unable(&k->rm.model, QUANT_NONE, (int)n);
}

/* With a reward model here: each rank has it whole where that fits, else as few together as fit; or as many as the key says. */
static int plan_reward_split(struct memory_plan *p, const struct ppo_worker_config *k, const struct memory_plan_shapes *s,
                             struct dev *dev) {
    const int64_t asked = k->rm.together, ranks = k->ranks.pools.n[ppo_pool_of(&k->ranks.pools, PPO_REWARD)];
    struct ppo_worker_config own = *k;
    struct memory_plan q;
    char why[sizeof p->why_rm] = "";
    const char *unable = asked > 1 ? no_reward_split(k, NULL, asked) : NULL;
    if (asked > 1 && !unable) {
        TRY(make_with(p, k, s, dev));
        unable = no_reward_split(k, p, asked);
        snprintf(p->why_rm, sizeof p->why_rm, "as reward.reward_model.rollout.tensor_model_parallel_size says");
        if (!unable) return 0;
    }
    if (unable) snprintf(why, sizeof why, "not the %lld asked for: %s", (long long)asked, unable);
    own.rm.together = 1;
    TRY(make_with(p, &own, s, dev));
    for (int64_t n = 2; asked == 0 && n <= ranks && !plan_fits_limits(p); n++) {
        own.rm.together = n;
        if (no_reward_split(k, NULL, n)) continue;
        TRY(make_with(&q, &own, s, dev));
        if (q.least >= p->least || no_reward_split(k, &q, n)) continue;
        snprintf(why, sizeof why, "with %lld a rank needs %.2f GiB", (long long)p->rm_together, (double)p->total / 0x1p30);
        *p = q;
    }
    memcpy(p->why_rm, why, sizeof why);
    return 0;
}

int memory_plan_make(struct memory_plan *p, const struct ppo_worker_config *k, const struct memory_plan_shapes *s,
                     struct dev *dev) {
    const bool scores = k->rm.enable && ppo_does(&k->ranks, PPO_REWARD);
    return scores ? plan_reward_split(p, k, s, dev) : make_with(p, k, s, dev);
}

/* ---- several ranks ---- */

struct rank_plan plan_ranks(const struct memory_plan *p, const struct ppo_worker_config *k, const struct memory_plan_shapes *s,
                            struct dev *dev) {
    const int64_t mini = min_i64(k->sizes->mini_batch, k->sizes->samples);
    struct rank_plan r = {.n = k->ranks.pools.n[PPO_TRAIN],
                          .local = k->ranks.all.n_local,
                          .micro = rank_plan_micro_batches(k->actor.update_cut, p->max_rows_update, p->max_len, mini),
                          .chunk = k->actor.grad_chunk,
                          .context = p->keep.context > 1 ? p->keep.context : 1,
                          .key_heads = model_is_latent(&s->policy) ? 0 : s->policy.n_kv_heads,
                          .parts = p->parts,
                          .uneven = p->policy.uneven,
                          .limit = p->limit,
                          .layout = p->layout,
                          .why = *p->why ? p->why : NULL,
                          .together = p->tensor_parallel,
                          .experts = s->policy.n_experts > 0,
                          .why_together = *p->why_split && k->ranks.pools.n[PPO_ROLLOUT] == 0 ? p->why_split : NULL,
                          .expert_ranks = p->experts.ranks,
                          .why_experts = *p->why_experts ? p->why_experts : NULL};
    struct ppo_worker_config one = *k, own = *k;
    struct memory_plan q;
    own.rm.together = p->rm_together;
    for (enum weight_layout l = LAYOUT_WHOLE; l < LAYOUTS; l++)
        if (!no_layout(k, s, l) && plan_split(&q, &own, s, dev, l) == 0) r.least[l] = q.least;
    one.ranks.all.n = one.ranks.all.n_local = 1;
    one.ranks.pools = (struct ppo_pools){.n = {[PPO_TRAIN] = 1}};
    if (memory_plan_make(&q, &one, s, dev) == 0) r.one = q.least;
    return r;
}
