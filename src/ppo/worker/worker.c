/* worker.c - see worker.h. */
#include "ppo/worker/worker.h"

#include "model/files/load.h"
#include "model/parallel/tensor_parallel.h"
#include "model/parallel/weight_streaming.h"
#include "ranks/weight_sync.h"
#include "train/optimizer_keys.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/log.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- opening ---- */

/* What ranks agree on: the layout of the one with the least memory; of those that generate together also how many they are, and KV
 * blocks. */
struct agreed {
    int64_t layout, tensor_parallel, experts, n_kv_blocks, rm_together; /* experts: whether ranks have those of the updates */
    int64_t keep, critic_keep; /* what updates keep that ranks compute together: the least */
};

/* A larger number keeps more. */
static int64_t kept(struct model_keep k) {
    const int64_t most = 1 << 30;
    return (k.all < most ? k.all : most - 1) * most + (k.attention < most ? k.attention : most - 1);
}
static void keep_less(struct model_keep *k, bool together, int64_t n) {
    if (!together || kept(*k) <= n) return;
    k->all = n >> 30;
    k->attention = n & ((1 << 30) - 1);
}

static int gather_agreed(struct comm *c, const struct memory_plan *p, struct agreed *out) {
    const int size = comm_size(c);
    struct agreed *all = xcalloc((size_t)size, sizeof *all);
    size_t *at = xmalloc((size_t)(size + 1) * sizeof *at);
    for (int r = 0; r <= size; r++) at[r] = (size_t)r * sizeof *all;
    *out = all[comm_rank(c)] = (struct agreed){(int64_t)p->layout, p->tensor_parallel, p->experts.ranks > 1, p->n_kv_blocks,
                                               p->rm_together,     kept(p->keep),      kept(p->critic_keep)};
    const int rc = comm_all_gather(c, all, at);
    for (int r = 0; r < size && rc == 0; r++) {
        if (all[r].layout > out->layout) out->layout = all[r].layout;
        if (all[r].tensor_parallel > out->tensor_parallel) out->tensor_parallel = all[r].tensor_parallel;
        if (all[r].rm_together > out->rm_together) out->rm_together = all[r].rm_together;
        if (all[r].experts > out->experts) out->experts = all[r].experts;
        if (all[r].n_kv_blocks < out->n_kv_blocks) out->n_kv_blocks = all[r].n_kv_blocks;
        if (all[r].keep < out->keep) out->keep = all[r].keep;
        if (all[r].critic_keep < out->critic_keep) out->critic_keep = all[r].critic_keep;
    }
    free(all);
    free(at);
    return rc;
}

static int agree(struct ppo_worker *w, const struct memory_plan_shapes *shapes) {
    struct memory_plan *const p = &w->plan;
    struct agreed a;
    if (!w->base.comm || comm_size(w->base.comm) == 1) return 0;
    TRY(gather_agreed(w->base.comm, p, &a));
    if (a.layout != (int64_t)p->layout || a.tensor_parallel != p->tensor_parallel || a.rm_together != p->rm_together ||
        a.experts != (p->experts.ranks > 1)) {
        struct ppo_worker_config k = w->k;
        k.layout = (enum weight_layout)a.layout;
        k.rollout.tensor_parallel = a.tensor_parallel;
        k.rollout.expert_parallel = 1;
        k.rm.together = a.rm_together;
        k.actor.expert_parallel = a.experts ? k.ranks.pools.n[PPO_TRAIN] : 1;
        TRY(memory_plan_make(p, &k, shapes, &w->base.dev));
        snprintf(p->why, sizeof p->why, "another rank has room for no other");
    }
    if (a.tensor_parallel == 1 && p->experts.ranks <= 1 && p->keep.context <= 1 && p->critic_keep.context <= 1) return 0;
    TRY(gather_agreed(w->base.comm, p, &a)); /* of the plan as it is now */
    if (a.tensor_parallel > 1) p->n_kv_blocks = a.n_kv_blocks;
    keep_less(&p->keep, p->keep.context > 1 || p->experts.ranks > 1, a.keep);
    keep_less(&p->critic_keep, p->critic_keep.context > 1, a.critic_keep);
    return 0;
}

/* A judge that is served is the first rank's of those that score. */
static int listen_for_judge(struct ppo_worker *w) {
    const bool first = !w->base.comm || comm_rank(w->base.comm) == 0;
    if (!ppo_serves_judge(&w->k.rm) || !ppo_does(&w->k.ranks, PPO_REWARD) || !first) return 0;
    TRY(judge_server_listen(&w->judge));
    w->judge_address = judge_server_address(w->judge);
    return 0;
}

int ppo_worker_plan(struct ppo_worker *w) {
    struct ppo_worker_config *const k = &w->k;
    struct memory_plan_shapes shapes = {0};
    struct buf text = {0};
    int rc = 0;
    if (k->actor.replay == ROUTER_REPLAY_R3 && k->ranks.pools.n[PPO_ROLLOUT] > 0)
        FAIL(ERR_UNSUPPORTED,
             "router_replay.mode=R3 needs ranks that generate and train: leave out actor_rollout_ref.rollout.nnodes, or "
             "take R2");
    memory_plan_offload(k, &w->base.dev);
    TRYG(memory_plan_shapes_load(&shapes, k), out);
    TRYG(memory_plan_make(&w->plan, k, &shapes, &w->base.dev), out);
    TRYG(agree(w, &shapes), out);
    w->plan_json = memory_plan_print(&w->plan, k, &shapes, &w->base.dev, &text);
    w->plan_text = buf_take(&text);
    w->base.dev.planned = w->plan.total - w->plan.host;
    TRYG(memory_plan_check(&w->plan, k, &shapes, &w->base.dev), out);
    rc = listen_for_judge(w);
out:
    memory_plan_shapes_free(&shapes);
    buf_free(&text);
    return rc;
}

/* The trained model of a role on the shared block. a: what differs. */
static int open_role(struct ppo_worker *w, enum verlc_role role, struct trained_model_args a) {
    a.dev = &w->base.dev;
    a.model = w->model[role] ? w->model[role] : w->model[VERLC_ACTOR];
    a.block = w->block;
    if (a.train || a.stream == MODEL_STREAM_RANKS || a.keep.context > 1) a.group = w->devices;
    if (role != VERLC_ACTOR) a.shares = w->base.role[VERLC_ACTOR].model;
    return trained_model_create(&w->base.role[role].model, &a);
}

/* Of ranks that generate and do not train. */
static int open_copy(struct ppo_worker *w) {
    const struct ppo_worker_config *k = &w->k;
    const struct model_open_args m = {.dir = k->model.dir,
                                      .act = k->model.act,
                                      .flags = w->plan.tensor_parallel > 1 ? MODEL_FILE_LAYERS : MODEL_INFER,
                                      .mtp = k->model.mtp.used,
                                      .mtp_detached = k->model.mtp.detach,
                                      .max_len = w->plan.max_len};
    if (k->model.lora.on) return train_open_model(&w->model[VERLC_ACTOR], &w->base.dev, &m, &k->model.lora, k->trainer->seed);
    return model_open(&w->model[VERLC_ACTOR], &w->base.dev, &m);
}

static int open_policy(struct ppo_worker *w) {
    const struct ppo_worker_config *k = &w->k;
    const struct memory_plan *l = &w->plan;
    const struct model_open_args m = {.dir = k->model.dir,
                                      .act = k->model.act,
                                      .flags = (k->actor.optim.host_master ? MODEL_HOST_MASTER : 0) |
                                               model_stream_flags(memory_plan_policy_from(l)),
                                      .mtp = k->model.mtp.used,
                                      .mtp_detached = k->model.mtp.detach,
                                      .max_len = l->max_len,
                                      .shard = all_reduce_shard(w->devices, &k->actor.optim, l->experts.ranks > 1)};
    return train_open_model(&w->model[VERLC_ACTOR], &w->base.dev, &m, &k->model.lora, k->trainer->seed);
}

static int open_reference_model(struct ppo_worker *w) {
    const struct ppo_worker_config *k = &w->k;
    const struct memory_plan *l = &w->plan;
    const struct model_open_args frozen = {.dir = k->model.dir,
                                           .act = k->model.act,
                                           .flags = model_stream_flags(memory_plan_ref_from(l, k)),
                                           .max_len = l->max_len,
                                           .shard = all_reduce_shard(w->devices, NULL, false)};
    return model_open(&w->model[VERLC_REF], &w->base.dev, &frozen);
}

/* With an adapter the reference is the policy without it: no second copy of the weights. */
static int open_reference(struct ppo_worker *w) {
    const struct memory_plan *l = &w->plan;
    const struct trained_model_args a = {.no_adapter = true,
                                         .keep = {.context = l->keep.context},
                                         .stream = memory_plan_ref_from(l, &w->k),
                                         .max_rows = l->max_rows_ref,
                                         .max_seqs = l->max_seqs_ref,
                                         .experts = memory_plan_ref_experts(l, &w->k)};
    return open_role(w, VERLC_REF, a);
}

static int open_critic(struct ppo_worker *w) {
    const struct memory_plan *l = &w->plan;
    const struct ppo_critic_config *k = &w->k.critic;
    const bool shares = ppo_critic_shares(&w->k);
    const int flags = (k->optim.host_master ? MODEL_HOST_MASTER : 0) | (shares ? MODEL_SHARED_BASE : 0) |
                      model_stream_flags(memory_plan_critic_from(l, &w->k));
    const struct model_open_args m = {.dir = k->model_dir,
                                      .act = w->k.model.act,
                                      .flags = flags,
                                      .max_len = l->max_len,
                                      .shard = all_reduce_shard(w->devices, &k->optim, false),
                                      .base = shares ? w->model[VERLC_ACTOR] : NULL};
    const int rc = train_open_critic(&w->model[VERLC_CRITIC], &w->base.dev, &m, &k->lora, w->k.trainer->seed);
    if (rc < 0) return err_wrap(rc, "critic.model");
    const struct trained_model_args a = {.train = true,
                                         .keep = l->critic_keep,
                                         .optim = &k->optim,
                                         .max_rows = l->max_rows_critic,
                                         .max_seqs = l->max_seqs_critic,
                                         .stream = memory_plan_critic_from(l, &w->k),
                                         .grad_chunk = k->grad_chunk,
                                         .parts = l->critic_parts,
                                         .grads = l->critic_grads,
                                         .chunk = l->critic_chunk};
    return open_role(w, VERLC_CRITIC, a);
}

/* The same token for the same id. */
static int same_tokens(const struct tokenizer *teacher, const struct tokenizer *student) {
    const int64_t n = tokenizer_vocab_size(teacher), own = tokenizer_vocab_size(student);
    for (int64_t id = 0; id < (n > own ? n : own); id++) {
        const char *a = tokenizer_token(teacher, (int32_t)id), *b = tokenizer_token(student, (int32_t)id);
        if ((a && b) ? strcmp(a, b) == 0 : a == b) continue;
        FAIL(ERR_INPUT,
             "another tokenizer than the student's: token %lld is \"%s\" there and \"%s\" here; a teacher must read the "
             "student's tokens",
             (long long)id, a ? a : "", b ? b : "");
    }
    return 0;
}

static int open_teacher_model(struct ppo_worker *w, const struct tokenizer *tok) {
    struct tokenizer *t = NULL;
    const struct model_open_args m = {.dir = w->k.distill->teacher_dir,
                                      .act = w->k.model.act,
                                      .flags = model_stream_flags(memory_plan_teacher_from(&w->plan, &w->k)),
                                      .max_len = w->plan.max_len,
                                      .shard = all_reduce_shard(w->devices, NULL, false)};
    int rc = tokenizer_open(&t, m.dir);
    if (rc == 0) rc = same_tokens(t, tok);
    tokenizer_close(t);
    TRY(rc);
    return model_open(&w->model[VERLC_TEACHER], &w->base.dev, &m);
}

static int open_teacher(struct ppo_worker *w, const struct tokenizer *tok) {
    const int rc = open_teacher_model(w, tok);
    if (rc < 0) return err_wrap(rc, "distillation.teacher_models.teacher_model.model_path");
    const struct trained_model_args a = {.keep = {.context = w->plan.teacher_context},
                                         .max_rows = w->plan.max_rows_teacher,
                                         .max_seqs = w->plan.max_seqs_teacher,
                                         .stream = memory_plan_teacher_from(&w->plan, &w->k),
                                         .list = memory_plan_distill_list(w->k.distill)};
    return open_role(w, VERLC_TEACHER, a);
}

static int open_reward_model(struct ppo_worker *w, const struct tokenizer *tok) {
    struct reward_model_args a = w->plan.rm_args;
    a.dev = &w->base.dev;
    a.policy_tok = tok;
    a.comm = a.judge.comm = w->base.comm;
    const bool serves = ppo_serves_judge(&w->k.rm);
    if (serves && !w->judge && (!a.comm || comm_rank(a.comm) >= a.judge.together)) return 0; /* rank 0's, and of those with it */
    const int rc = w->judge ? judge_server_load(w->judge, &a.judge) : reward_model_create(&w->rm, &a);
    return rc < 0 ? err_wrap(rc, "reward.reward_model") : 0;
}

/* The policy split over the ranks that generate together. */
static int open_split(struct ppo_worker *w, int64_t max_rows) {
    if (w->plan.tensor_parallel == 1) return 0;
    const int size = (int)w->plan.tensor_parallel, rank = comm_rank(w->base.comm);
    TRY(comm_part(&w->together, w->base.comm, rank - rank % size, size));
    TRY(collective_open(&w->splits, &w->base.dev, w->together));
    struct model *const m = w->model[VERLC_ACTOR];
    TRY(model_tp_open(&w->split, m, w->splits, max_rows, (char *)w->block + w->plan.split_at));
    return m->flags & MODEL_FILE_LAYERS && m->lora ? model_tp_take(w->split) : 0; /* its base, which nobody sends */
}

static int open_decoder(struct ppo_worker *w) {
    const struct memory_plan *l = &w->plan;
    struct model *const m = w->model[VERLC_ACTOR];
    const struct decoder_args limits = {.model = m,
                                        .max_seqs = l->max_seqs,
                                        .max_rows = l->max_rows_roll,
                                        .max_len = l->max_len,
                                        .max_draft = memory_plan_draft(l, &w->k),
                                        .block = (char *)w->block + (l->split_at ? 0 : l->gathered)};
    struct decoder_args a = decoder_size(&w->base.dev, &m->cfg, w->k.model.act, &limits, SIZE_MAX);
    a.n_kv_blocks = l->n_kv_blocks;
    TRY(open_split(w, decoder_most_rows(&a)));
    if (w->split) a.model = w->split;
    CHECK(decoder_bytes(&a.model->cfg, a.model->act, &a) <= l->rollout - l->gathered);
    return decoder_open(&w->base.generator.decoder, &a);
}

/* The policy's training, and the reference. */
static int open_training(struct ppo_worker *w) {
    const struct ppo_worker_config *k = &w->k;
    const struct memory_plan *l = &w->plan;
    struct router_losses routers;
    w->model[VERLC_ACTOR]->frozen_routers = k->model.router.freeze;
    TRY(router_losses(&k->model.router, &w->model[VERLC_ACTOR]->cfg, &routers));
    const struct trained_model_args policy = {.train = true,
                                              .routers = routers,
                                              .routes = k->actor.replay_words > 0,
                                              .stream = memory_plan_policy_from(l),
                                              .experts = l->experts,
                                              .keep = l->keep,
                                              .optim = &k->actor.optim,
                                              .mtp_loss = train_mtp_loss(&k->model.mtp),
                                              .list = memory_plan_distill_list(k->distill),
                                              .max_rows = l->max_rows_update,
                                              .max_seqs = l->max_seqs_update,
                                              .grad_chunk = k->actor.grad_chunk,
                                              .parts = l->parts,
                                              .grads = l->policy.grads,
                                              .chunk = l->policy.chunk};
    TRY(open_role(w, VERLC_ACTOR, policy));
    return l->max_rows_ref > 0 ? open_reference(w) : 0;
}

/* What a worker's operations use. */
static void set_operations(struct ppo_worker *w, const struct tokenizer *tok) {
    static const char *const names[] = {[VERLC_ACTOR] = "actor", [VERLC_CRITIC] = "critic", [VERLC_TEACHER] = NULL};
    const struct ppo_worker_config *const k = &w->k;
    const struct micro_batch_limits cuts[N_ROLES] = {k->rollout.logp_cut, k->ref.cut, k->critic.values_cut, k->distill->cut};
    struct model *const policy = w->model[VERLC_ACTOR];
    w->base.generator.model = policy;
    w->base.generator.tok = tok;
    w->base.generator.gather = w->plan.gathered && !w->split ? w->block : NULL;
    w->base.generator.split = w->split;
    w->base.generator.reports = !w->split || comm_rank(w->together) == 0;
    w->base.tensor_parallel = w->plan.tensor_parallel;
    w->base.generator.no_prefix_cache = !k->rollout.prefix_cache;
    w->base.generator.longest_first = k->schedule != PPO_FULLY_ASYNC; /* there what was begun goes first */
    w->base.flops = w->plan.flops;
    w->base.vocab = policy ? policy->cfg.vocab : 0;
    for (int i = 0; i < N_ROLES; i++) {
        struct trained_model *const t = w->base.role[i].model;
        if (!t) continue;
        /* a teacher's logits are taken at temperature 1, as verl's servers give them */
        const float temperature = i == VERLC_TEACHER ? 1 : (float)k->rollout.train.temperature;
        worker_set_role(&w->base, i, &(struct worker_role){t, cuts[i], temperature});
        if (names[i])
            w->base.parts[w->base.n_parts++] = (struct ckpt_part){names[i], w->model[i], trained_model_optim(t), w->tokenizer};
    }
    ppo_scorer_open_local(&w->scorer, w->rm, w->judge);
}

int ppo_worker_open(struct ppo_worker *w, const struct tokenizer *tok, int64_t total_steps, int64_t validation_rows) {
    struct ppo_worker_config *const k = &w->k;
    const struct memory_plan *l = &w->plan;
    const bool trains = ppo_does(&k->ranks, PPO_TRAIN), generates = ppo_does(&k->ranks, PPO_ROLLOUT);
    train_optim_steps(&k->actor.optim, total_steps);
    train_optim_steps(&k->critic.optim, total_steps);
    if (validation_rows > 0) TRY(memory_plan_validation(&w->plan, k, &w->base.dev, validation_rows));
    TRY(tokenizer_files_read(&w->tokenizer, k->model.tokenizer_dir));
    TRY(dev_reserve(&w->base.dev, &l->sizes));
    if (w->base.comm && (trains || l->critic > 0 || l->teacher_context > 1 || memory_plan_teacher_from(l, k)))
        TRY(collective_open(&w->devices, &w->base.dev, w->base.comm));
    if (trains) TRY(open_policy(w));
    else if (generates) TRY(open_copy(w));
    if (l->ref > 0) TRY(open_reference_model(w));
    if (l->block > 0) TRY(dev_alloc(&w->base.dev, l->block, &w->block));
    if (l->block > 0) TRY(dev_zero(&w->base.dev, w->block, l->block)); /* commits the memory now rather than in mid-run */
    if (l->gathered > 0 && l->tensor_parallel == 1) TRY(collective_share(w->devices, w->block, l->gathered));
    if (ppo_has_engine(k)) TRY(open_decoder(w));
    if (trains) TRY(open_training(w));
    if (l->critic > 0) TRY(open_critic(w));
    if (l->teacher > 0) TRY(open_teacher(w, tok));
    if (l->rm > 0) TRY(open_reward_model(w, tok));
    set_operations(w, tok);
    if (!w->senders) return 0;
    const struct weight_sync_args sync = {.dev = &w->base.dev,
                                          .comm = w->senders,
                                          .model = w->model[VERLC_ACTOR],
                                          .trainers = (int)k->ranks.pools.n[PPO_TRAIN],
                                          .spans = l->pool_together > 1,
                                          .part = trains ? NULL : w->split};
    return weight_sync_open(&w->weights, &sync);
}

void ppo_worker_close(struct ppo_worker *w) {
    ppo_scorer_close(&w->scorer);
    ppo_ranks_close(w->ranks, w->ok);
    weight_sync_close(w->weights);
    collective_close(w->splits); /* first: what waits for a lost rank ends, and no memory is read any more */
    collective_close(w->devices);
    decoder_close(w->base.generator.decoder);
    model_tp_close(w->split);
    comm_close(w->together);
    for (int i = 0; i < N_ROLES; i++) trained_model_destroy(w->base.role[i].model);
    reward_model_destroy(w->rm);
    judge_server_close(w->judge);
    for (int i = N_ROLES - 1; i >= 0; i--) model_close(w->model[i]); /* the policy last: others may read its weights */
    if (w->block) dev_free(&w->base.dev, w->block, w->plan.block);
    tokenizer_files_free(w->tokenizer);
    json_decref(w->plan_json);
    free(w->plan_text);
    dev_close(&w->base.dev);
}
