/* worker.c - see worker.h. */
#include "ppo/worker/worker_ranks.h"

#include "model/files/load.h"
#include "ranks/weight_sync.h"
#include "train/perf_metrics.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/log.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- opening ---- */

/* All ranks have the layout of the one with the least memory. */
static int agree_layout(struct worker *w, const struct model_shapes *shapes) {
    const int size = w->comm ? comm_size(w->comm) : 1;
    if (size == 1) return 0;
    int32_t *all = xcalloc((size_t)size, sizeof *all), most = 0;
    size_t *at = xmalloc((size_t)(size + 1) * sizeof *at);
    for (int r = 0; r <= size; r++) at[r] = (size_t)r * sizeof *all;
    all[comm_rank(w->comm)] = (int32_t)w->plan.layout;
    const int rc = comm_all_gather(w->comm, all, at);
    for (int r = 0; r < size; r++) most = all[r] > most ? all[r] : most;
    free(all);
    free(at);
    TRY(rc);
    if (most == (int32_t)w->plan.layout) return 0;
    struct ppo_config k = *w->k;
    k.layout = (enum weight_layout)most;
    TRY(memory_plan_make(&w->plan, &k, shapes, &w->dev));
    snprintf(w->plan.why, sizeof w->plan.why, "another rank has room for no other");
    return 0;
}

int worker_plan(struct worker *w, struct ppo_config *k) {
    struct model_shapes shapes = {0};
    struct buf text = {0};
    int rc = 0;
    w->k = k;
    memory_plan_offload(k, &w->dev);
    TRYG(model_shapes_load(&shapes, k), out);
    TRYG(memory_plan_make(&w->plan, k, &shapes, &w->dev), out);
    TRYG(agree_layout(w, &shapes), out);
    w->plan_json = memory_plan_print(&w->plan, k, &shapes, &w->dev, &text);
    w->plan_text = buf_take(&text);
    w->dev.planned = w->plan.total - w->plan.host;
    TRYG(memory_plan_check(&w->plan, k, &shapes, &w->dev), out);
out:
    model_shapes_free(&shapes);
    buf_free(&text);
    return rc;
}

/* The trained model of a role on the shared block. a: what differs. */
static int open_role(struct worker *w, enum verlc_role role, struct trained_model_args a) {
    a.dev = &w->dev;
    a.model = w->model[role] ? w->model[role] : w->model[VERLC_ACTOR];
    a.block = w->block;
    if (a.train || a.stream == MODEL_STREAM_RANKS) a.group = w->devices;
    return trained_model_create(&w->role[role], &a);
}

/* Of ranks that generate and do not train. */
static int open_copy(struct worker *w) {
    const struct ppo_config *k = w->k;
    const struct model_open_args m = {.dir = k->model_dir, .act = k->act, .flags = MODEL_INFER, .max_len = w->plan.max_len};
    if (k->lora.on) return train_open_model(&w->model[VERLC_ACTOR], &w->dev, &m, &k->lora, k->seed);
    return model_open(&w->model[VERLC_ACTOR], &w->dev, &m);
}

static int open_policy(struct worker *w) {
    const struct ppo_config *k = w->k;
    const struct memory_plan *l = &w->plan;
    const struct model_open_args m = {.dir = k->model_dir,
                                      .act = k->act,
                                      .flags = (k->optim.host_master ? MODEL_HOST_MASTER : 0) |
                                               model_stream_flags(memory_plan_policy_from(l)),
                                      .max_len = l->max_len,
                                      .shard = rank_shard(w->devices, &k->optim)};
    return train_open_model(&w->model[VERLC_ACTOR], &w->dev, &m, &k->lora, k->seed);
}

static int open_reference_model(struct worker *w) {
    const struct ppo_config *k = w->k;
    const struct memory_plan *l = &w->plan;
    const struct model_open_args frozen = {.dir = k->model_dir,
                                           .act = k->act,
                                           .flags = model_stream_flags(memory_plan_ref_from(l, k)),
                                           .max_len = l->max_len,
                                           .shard = rank_shard(w->devices, NULL)};
    return model_open(&w->model[VERLC_REF], &w->dev, &frozen);
}

/* With an adapter the reference is the policy without it: no second copy of the weights. */
static int open_reference(struct worker *w) {
    const struct memory_plan *l = &w->plan;
    const struct trained_model_args a = {
        .no_adapter = true, .stream = memory_plan_ref_from(l, w->k), .max_rows = l->max_rows_ref, .max_seqs = l->max_seqs_ref};
    return open_role(w, VERLC_REF, a);
}

static int open_critic(struct worker *w) {
    const struct memory_plan *l = &w->plan;
    const struct ppo_critic_config *k = &w->k->critic;
    const bool shares = ppo_critic_shares(w->k);
    const int flags = (k->optim.host_master ? MODEL_HOST_MASTER : 0) | (shares ? MODEL_SHARED_BASE : 0);
    const struct model_open_args m = {.dir = k->model_dir,
                                      .act = w->k->act,
                                      .flags = flags,
                                      .max_len = l->max_len,
                                      .shard = rank_shard(w->devices, &k->optim),
                                      .base = shares ? w->model[VERLC_ACTOR] : NULL};
    const int rc = train_open_critic(&w->model[VERLC_CRITIC], &w->dev, &m, &k->lora, w->k->seed);
    if (rc < 0) return err_wrap(rc, "critic.model");
    const struct trained_model_args a = {.train = true,
                                         .keep = l->critic_keep,
                                         .optim = &k->optim,
                                         .max_rows = l->max_rows_critic,
                                         .max_seqs = l->max_seqs_critic,
                                         .grad_chunk = k->grad_chunk,
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

static int open_teacher_model(struct worker *w, const struct tokenizer *tok) {
    struct tokenizer *t = NULL;
    const struct model_open_args m = {
        .dir = w->k->distill.teacher_dir, .act = w->k->act, .flags = MODEL_INFER, .max_len = w->plan.max_len};
    int rc = tokenizer_open(&t, m.dir);
    if (rc == 0) rc = same_tokens(t, tok);
    tokenizer_close(t);
    TRY(rc);
    return model_open(&w->model[VERLC_TEACHER], &w->dev, &m);
}

static int open_teacher(struct worker *w, const struct tokenizer *tok) {
    const int rc = open_teacher_model(w, tok);
    if (rc < 0) return err_wrap(rc, "distillation.teacher_models.teacher_model.model_path");
    const struct trained_model_args a = {
        .max_rows = w->plan.max_rows_teacher, .max_seqs = w->plan.max_seqs_teacher, .list = distill_list(w->k)};
    return open_role(w, VERLC_TEACHER, a);
}

static int open_reward_model(struct worker *w, const struct tokenizer *tok) {
    struct reward_model_args a = w->plan.rm_args;
    a.dev = &w->dev;
    a.policy_tok = tok;
    if (w->k->rm.judge.serve && !w->judge) return 0; /* rank 0 serves it */
    const int rc = w->judge ? judge_server_load(w->judge, &a.judge) : reward_model_create(&w->rm, &a);
    return rc < 0 ? err_wrap(rc, "reward.reward_model") : 0;
}

int worker_listen(struct worker *w) {
    if (!w->k->rm.judge.serve || w->group) return 0;
    TRY(judge_server_listen(&w->judge));
    w->k->reward.router_address = judge_server_address(w->judge);
    return 0;
}

static int open_decoder(struct worker *w) {
    const struct memory_plan *l = &w->plan;
    struct model *const m = w->model[VERLC_ACTOR];
    const struct rollout_decoder_args limits = {.model = m,
                                                .max_seqs = l->max_seqs,
                                                .max_rows = l->max_rows_roll,
                                                .max_len = l->max_len,
                                                .block = (char *)w->block + l->gathered};
    struct rollout_decoder_args a = rollout_decoder_size(&w->dev, &m->cfg, w->k->act, &limits, SIZE_MAX);
    a.n_kv_blocks = l->n_kv_blocks;
    return rollout_decoder_open(&w->decoder, &a);
}

/* The policy's training, and the reference. */
static int open_training(struct worker *w) {
    const struct ppo_config *k = w->k;
    const struct memory_plan *l = &w->plan;
    const struct trained_model_args policy = {.train = true,
                                              .stream = memory_plan_policy_from(l),
                                              .keep = l->keep,
                                              .optim = &k->optim,
                                              .list = distill_list(k),
                                              .max_rows = l->max_rows_update,
                                              .max_seqs = l->max_seqs_update,
                                              .grad_chunk = k->grad_chunk,
                                              .grads = l->policy.grads,
                                              .chunk = l->policy.chunk};
    TRY(open_role(w, VERLC_ACTOR, policy));
    return l->max_rows_ref > 0 ? open_reference(w) : 0;
}

int worker_open(struct worker *w, const struct tokenizer *tok) {
    const struct ppo_config *k = w->k;
    const struct memory_plan *l = &w->plan;
    const bool trains = ppo_does(k, PPO_TRAIN), generates = ppo_does(k, PPO_ROLLOUT);
    w->tok = tok;
    TRY(tokenizer_files_read(&w->tokenizer, k->tokenizer_dir));
    TRY(dev_reserve(&w->dev, &l->sizes));
    if (w->comm && (trains || l->critic > 0)) TRY(dev_group_open(&w->devices, &w->dev, w->comm));
    if (trains) TRY(open_policy(w));
    else if (generates) TRY(open_copy(w));
    if (l->ref > 0) TRY(open_reference_model(w));
    if (l->block > 0) TRY(dev_alloc(&w->dev, l->block, &w->block));
    if (l->block > 0) TRY(dev_zero(&w->dev, w->block, l->block)); /* commits the memory now rather than in mid-run */
    if (l->gathered > 0) TRY(dev_group_share(w->devices, w->block, l->gathered));
    if (generates) TRY(open_decoder(w));
    if (trains) TRY(open_training(w));
    if (l->critic > 0) TRY(open_critic(w));
    if (l->teacher > 0) TRY(open_teacher(w, tok));
    if (l->rm > 0) TRY(open_reward_model(w, tok));
    if (!w->senders) return 0;
    return rank_weights_open(&w->weights, &w->dev, w->senders, w->model[VERLC_ACTOR], (int)k->pools.n[PPO_TRAIN]);
}

void worker_close(struct worker *w) {
    worker_group_close(w->group, w->ok);
    rank_weights_close(w->weights);
    dev_group_close(w->devices); /* first: what waits for a lost rank ends, and no memory is read any more */
    rollout_decoder_close(w->decoder);
    for (int i = 0; i < N_ROLES; i++) trained_model_destroy(w->role[i]);
    reward_model_destroy(w->rm);
    judge_server_close(w->judge);
    for (int i = N_ROLES - 1; i >= 0; i--) model_close(w->model[i]); /* the policy last: others may read its weights */
    if (w->block) dev_free(&w->dev, w->block, w->plan.block);
    tokenizer_files_free(w->tokenizer);
    json_decref(w->plan_json);
    free(w->plan_text);
    dev_close(&w->dev);
}

int worker_ranks(const struct worker *w) {
    if (w->group) return worker_group_size(w->group);
    return w->comm ? comm_size(w->comm) : 1;
}

bool worker_has(const struct worker *w, enum verlc_role role) {
    return w->group ? worker_group_has(w->group, role) : w->role[role] != NULL;
}

bool worker_collective(const struct worker *w, enum verlc_role role) {
    return w->group ? worker_group_collective(w->group, role) : w->role[role] && trained_model_collective(w->role[role]);
}

const char *worker_device(const struct worker *w, bool *own_memory) {
    if (w->group) return worker_group_device(w->group, own_memory);
    *own_memory = dev_has_own_memory(&w->dev);
    return w->dev.describe;
}

int worker_memory_metrics(struct worker *w, struct metrics *m, const char *prefix, struct dev_memory *before) {
    if (w->group) return worker_group_memory_metrics(w->group, m, prefix);
    return train_memory_metrics(m, &w->dev, prefix, before);
}

void worker_checkpoints(struct worker *w, struct checkpoints *out) {
    static const struct {
        enum verlc_role role;
        const char *name;
    } kept[] = {{VERLC_ACTOR, "actor"}, {VERLC_CRITIC, "critic"}};
    struct ckpt_part parts[CHECKPOINTS_MAX_PARTS];
    int n = 0;
    if (w->group) {
        worker_group_checkpoints(w->group, out);
        return;
    }
    for (int i = 0; i < CHECKPOINTS_MAX_PARTS; i++) {
        struct trained_model *t = w->role[kept[i].role];
        if (t) parts[n++] = (struct ckpt_part){kept[i].name, w->model[kept[i].role], trained_model_optim(t), w->tokenizer};
    }
    if (n > 0) checkpoints_local(out, parts, n, w->dev.isa, w->comm);
}

int worker_join(struct worker *w) { return w->group ? worker_group_join(w->group) : 0; }

int worker_trace(struct worker *w, const char *path) {
    if (w->group) return worker_group_trace(w->group, path);
    if (path) return dev_trace_stop(&w->dev, path, NULL);
    dev_trace_start(&w->dev);
    return 0;
}

/* ---- generation ---- */

void worker_beside(struct worker *w, int (*step)(void *arg), void *arg) {
    if (w->group) worker_group_beside(w->group, step, arg);
}

int worker_send_weights(struct worker *w) { return w->group ? worker_group_send_weights(w->group) : 0; }
bool worker_generates_apart(const struct worker *w) { return w->group && w->k->pools.n[PPO_ROLLOUT] > 0; }

int worker_generate_begin(struct worker *w, const struct rollout_config *c) {
    if (w->group) return worker_group_generate_begin(w->group, c);
    if (w->plan.gathered) TRY(model_gather(w->model[VERLC_ACTOR], w->block));
    return rollout_decoder_engine(&w->engine, w->decoder, c); /* its cache is empty: the weights may have changed */
}

int worker_generate_add(struct worker *w, const struct rollout_request *q) {
    if (w->group) return worker_group_generate_add(w->group, q);
    const struct rollout_stop_ids stop = rollout_stop_ids(&w->model[VERLC_ACTOR]->cfg, w->tok);
    struct rollout_request own = *q;
    own.stop_ids = stop.id;
    own.n_stop_ids = stop.n;
    return rollout_submit(w->engine, &own, NULL);
}

int worker_generate_step(struct worker *w, bool wait) {
    return w->group ? worker_group_generate_step(w->group, wait) : rollout_step(w->engine);
}

int worker_generate_interrupt(struct worker *w) {
    return w->group ? worker_group_generate_interrupt(w->group) : rollout_interrupt(w->engine);
}

struct rollout_stats worker_generate_stats(const struct worker *w) {
    return w->group ? worker_group_generate_stats(w->group) : rollout_stats(w->engine);
}

void worker_generate_end(struct worker *w) {
    if (w->group) {
        worker_group_generate_end(w->group);
        return;
    }
    rollout_destroy(w->engine);
    w->engine = NULL;
    model_stream_begin(w->model[VERLC_ACTOR]);
}

int worker_spare_open(struct worker *w, const enum verlc_role *roles, int n,
                      int (*done)(void *arg, int pass, int64_t tag, const float *x, int64_t n), void *arg) {
    return w->group ? worker_group_spare_open(w->group, roles, n, done, arg) : 0;
}

void worker_spare_add(struct worker *w, const int32_t *prompt, int64_t n_prompt, const int32_t *response, int64_t n, int64_t tag) {
    if (w->group) worker_group_spare_add(w->group, prompt, n_prompt, response, n, tag);
}

void worker_spare_close(struct worker *w) {
    if (w->group) worker_group_spare_close(w->group);
}

/* ---- scores ---- */

bool worker_scores(const struct worker *w) { return w->k->rm.enable && !w->k->rm.judge.serve; }
bool worker_has_judge(const struct worker *w) { return w->k->rm.enable && w->k->rm.judge.serve; }

int worker_score_submit(struct worker *w, const struct reward_model_sample *s, int64_t tag) {
    return w->group ? worker_scores_submit(worker_group_scores(w->group), s, tag) : reward_model_submit(w->rm, s, tag);
}

int worker_score_step(struct worker *w, bool flush) {
    if (w->group) return worker_scores_step(worker_group_scores(w->group), flush);
    if (w->judge) return judge_server_step(w->judge);
    return w->rm ? reward_model_step(w->rm, flush) : 0;
}

int worker_score_poll(struct worker *w, int64_t *tag, struct reward_result *out) {
    if (w->group) return worker_scores_poll(worker_group_scores(w->group), tag, out);
    return w->rm ? reward_model_poll(w->rm, tag, out) : 0;
}

int64_t worker_score_pending(const struct worker *w) {
    if (w->group) return worker_scores_pending(worker_group_scores(w->group));
    return w->rm ? reward_model_pending(w->rm) : 0;
}

void worker_score_drop(struct worker *w) {
    if (w->group) worker_scores_drop(worker_group_scores(w->group));
    if (w->rm) reward_model_drop(w->rm);
    if (w->judge) judge_server_drop(w->judge);
}

/* ---- passes and updates ---- */

static struct forward_out out_at(const struct forward_out *o, struct token_lists *list, int64_t at, int64_t k) {
    if (o->list) *list = (struct token_lists){.top_id = o->list->top_id + at * k, .top_logp = o->list->top_logp + at * k};
    return (struct forward_out){.logp = o->logp ? o->logp + at : NULL,
                                .sum_pi_sq = o->sum_pi_sq ? o->sum_pi_sq + at : NULL,
                                .value = o->value ? o->value + at : NULL,
                                .list = o->list ? list : NULL};
}

/* The end of what is computed between two heartbeats of the watchdog and checks for a signal: at most one micro-batch. */
static int64_t piece_end(const struct packed_seq *seqs, int64_t lo, int64_t n, struct micro_batch_limits cut) {
    const int64_t most = cut.max_seqs > 0 ? cut.max_seqs : 16;
    int64_t hi = lo + 1, rows = seqs[lo].n;
    for (; hi < n && hi - lo < most && (cut.max_rows <= 0 || rows + seqs[hi].n <= cut.max_rows); hi++) rows += seqs[hi].n;
    return hi;
}

int worker_forward(struct worker *w, enum verlc_role role, const struct progress *at, const struct packed_seq *seqs, int64_t n,
                   struct forward_out out) {
    static const char *const phases[N_ROLES] = {"old_log_prob", "ref_log_prob", "values", "teacher"};
    const struct micro_batch_limits cuts[N_ROLES] = {w->k->logp_cut, w->k->ref_cut, w->k->critic.values_cut, w->k->distill.cut};
    const struct micro_batch_limits cut = cuts[role];
    /* a teacher's logits are taken at temperature 1, as verl's servers give them */
    const float temperature = role == VERLC_TEACHER ? 1 : (float)w->k->train.temperature;
    struct token_lists list;
    int64_t targets = 0;
    if (w->group) {
        const struct worker_group_pass p = {.role = role, .at = at, .seqs = seqs, .n = n, .k = distill_list(w->k)};
        return worker_group_forward(w->group, &p, out);
    }
    trained_model_begin(w->role[role]);
    for (int64_t lo = 0, hi; lo < n; lo = hi) {
        hi = piece_end(seqs, lo, n, cut);
        TRY(trained_model_forward(w->role[role], seqs + lo, hi - lo, cut, temperature,
                                  out_at(&out, &list, targets, distill_list(w->k))));
        for (int64_t i = lo; i < hi; i++) targets += packed_seq_targets(&seqs[i]);
        progress_report(at, phases[role], hi, n, 0);
        if (!worker_collective(w, role)) TRY(stage_check_stop());
    }
    return trained_model_end(w->role[role]);
}

double worker_forward_mfu(const struct worker *w, const struct packed_seq *seqs, int64_t n, double seconds) {
    const struct model_flops *f = &w->plan.flops;
    double flops = 0;
    for (int64_t i = 0; i < n; i++) flops += (f->token + f->square * (double)seqs[i].n) * (double)seqs[i].n;
    return isfinite(f->peak) && f->peak > 0 && seconds > 0 ? flops / 3 / seconds / f->peak / worker_ranks(w)
                                                           : 0; /* forward: a third */
}

int worker_update(struct worker *w, enum verlc_role role, struct update *u, struct update_result *r) {
    u->model = w->role[role];
    TRY(update_run(u, r));
    r->flops /= train_peak_flops(&w->dev) * worker_ranks(w);
    return 0;
}
