/* memory_plan.c - the memory of a run before it starts: every block it will take,
 * from the same layout functions that take it (DESIGN 6, invariant 6).
 * Which layout and split a run has is memory_plan_layout.c's. */
#include "ppo/plan/memory_plan_int.h"

#include "engine/engine.h"
#include "model/parallel/tensor_parallel.h"
#include "model/parallel/weight_streaming.h"
#include "plan/memory_limit.h"
#include "ranks/weight_sync.h"
#include "train/micro_batch.h"
#include "train/trained_model.h"

#include "base/err.h"
#include "base/file.h"
#include "base/log.h"
#include "base/size.h"

#include <string.h>
#include <unistd.h>

/* ---- the shapes ---- */

int64_t memory_plan_distill_list(const struct ppo_distill_config *k) { return k->enable && k->loss.list ? k->topk : 0; }

static int load_critic(const struct ppo_worker_config *k, struct memory_plan_shapes *s) {
    const int rc = model_config_load(&s->critic, k->critic.model_dir);
    if (rc < 0) return err_wrap(rc, "critic.model.path");
    model_config_make_value(&s->critic);
    if (s->critic.vocab < s->policy.vocab)
        FAIL(ERR_INPUT,
             "critic.model.path: %s has a vocabulary of %lld and the policy one of %lld; the critic reads the policy's "
             "tokens, so it must have the same tokenizer",
             k->critic.model_dir, (long long)s->critic.vocab, (long long)s->policy.vocab);
    return 0;
}

static int load_teacher(const struct ppo_worker_config *k, struct memory_plan_shapes *s) {
    const int rc = model_config_load(&s->teacher, k->distill->teacher_dir);
    if (rc < 0) return err_wrap(rc, "distillation.teacher_models.teacher_model.model_path");
    const int64_t least = s->teacher.vocab < s->policy.vocab ? s->teacher.vocab : s->policy.vocab;
    if (memory_plan_distill_list(k->distill) > least)
        FAIL(ERR_INVAL, "distillation.distillation_loss.topk=%lld: the vocabulary has %lld tokens", (long long)k->distill->topk,
             (long long)least);
    return 0;
}

int memory_plan_shapes_load(struct memory_plan_shapes *s, const struct ppo_worker_config *k) {
    TRY(train_model_shape(&s->policy, k->model.dir, &k->model.mtp));
    if (k->critic.enable) TRY(load_critic(k, s));
    return k->distill->enable ? load_teacher(k, s) : 0;
}

void memory_plan_shapes_free(struct memory_plan_shapes *s) {
    model_config_free(&s->policy);
    model_config_free(&s->critic);
    model_config_free(&s->teacher);
}

/* ---- sizes ---- */

static int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static size_t max_size(size_t a, size_t b) { return a > b ? a : b; }

/* Samples that a rank generates, or those that generate together. */
static int64_t rank_batch(const struct memory_plan *p, const struct ppo_worker_config *k) {
    const int64_t ranks = k->ranks.pools.n[ppo_pool_of(&k->ranks.pools, PPO_ROLLOUT)] / p->tensor_parallel;
    return size_mul((k->sizes->open_prompts + ranks - 1) / ranks, k->rollout.train.n);
}

/* Rows of the largest micro-batch under a cut, and its samples. key: of the number of samples. */
static int cut_limits(const char *key, struct micro_batch_limits cut, int64_t batch, int64_t max_len, int64_t *rows,
                      int64_t *seqs) {
    if (cut.max_seqs > 0) {
        *seqs = min_i64(cut.max_seqs, batch);
        *rows = size_mul(*seqs, max_len);
    } else {
        *rows = cut.max_rows > max_len ? cut.max_rows : max_len;
        *seqs = min_i64(batch, *rows / 2 + 1);
    }
    return micro_batch_rows_check(key, *seqs, max_len, *rows);
}

enum model_stream_from memory_plan_policy_from(const struct memory_plan *p) {
    return p->layout == LAYOUT_SHARDED ? MODEL_STREAM_RANKS : MODEL_STREAM_NONE;
}

enum model_stream_from memory_plan_ref_from(const struct memory_plan *p, const struct ppo_worker_config *k) {
    if (k->model.lora.on) return memory_plan_policy_from(p); /* the policy without its adapter */
    return k->ref.offload ? MODEL_STREAM_HOST : p->layout >= LAYOUT_REF ? MODEL_STREAM_RANKS : MODEL_STREAM_NONE;
}

struct model_dispatch_shape memory_plan_ref_experts(const struct memory_plan *p, const struct ppo_worker_config *k) {
    return k->model.lora.on ? p->experts : (struct model_dispatch_shape){0}; /* else it has weights of its own */
}

enum model_stream_from memory_plan_teacher_from(const struct memory_plan *p, const struct ppo_worker_config *k) {
    return p->layout >= LAYOUT_REF && ppo_does(&k->ranks, PPO_TEACHER) ? MODEL_STREAM_RANKS : MODEL_STREAM_NONE;
}

enum model_stream_from memory_plan_critic_from(const struct memory_plan *p, const struct ppo_worker_config *k) {
    return p->layout == LAYOUT_SHARDED && ppo_does(&k->ranks, PPO_CRITIC) ? MODEL_STREAM_RANKS : MODEL_STREAM_NONE;
}

int64_t memory_plan_draft(const struct memory_plan *p, const struct ppo_worker_config *k) {
    return p->tensor_parallel > 1 ? 0 : k->model.mtp.draft; /* an MTP layer is each rank's own */
}

/* The reference's weights; its rope table is on the device in any case. */
static void plan_ref(struct memory_plan *p, const struct ppo_worker_config *k, const struct model_config *policy, struct dev *dev) {
    struct model_config own = *policy, *const m = &own;
    const enum model_stream_from from = memory_plan_ref_from(p, k);
    struct model_open_args frozen = {.act = k->model.act,
                                     .flags = model_stream_flags(from),
                                     .max_len = p->max_len,
                                     .shard = {.size = (int)k->ranks.pools.n[PPO_TRAIN]}};
    own.mtp = false; /* it has no MTP layer */
    p->ref = train_pages(model_open_bytes(m, dev, &frozen));
    frozen.flags = MODEL_INFER;
    if (from == MODEL_STREAM_HOST) p->offload += train_pages(model_open_bytes(m, dev, &frozen)) - p->ref;
}

/* Device bytes of the reference's pass. */
static int ref_bytes(struct memory_plan *p, const struct ppo_worker_config *k, const struct model_config *m, struct dev *dev) {
    TRY(cut_limits("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", k->ref.cut, k->sizes->samples, p->max_len,
                   &p->max_rows_ref, &p->max_seqs_ref));
    const struct trained_model_args a = {.dev = dev,
                                         .keep = {.context = p->keep.context},
                                         .max_rows = p->max_rows_ref,
                                         .max_seqs = p->max_seqs_ref,
                                         .stream = memory_plan_ref_from(p, k),
                                         .experts = memory_plan_ref_experts(p, k),
                                         .quant = k->model.lora.quant};
    struct model_config own = *m;
    own.mtp = false;
    p->ref_pass = trained_model_block_bytes(&own, k->model.act, &a);
    return 0;
}

/* The same of an update that keeps so many activations. */
size_t plan_update_bytes(const struct memory_plan *p, const struct ppo_worker_config *k, const struct model_config *m,
                         struct dev *dev, struct model_keep keep) {
    const struct trained_model_args a = {.dev = dev,
                                         .train = true,
                                         .keep = keep,
                                         .parts = p->parts,
                                         .max_rows = p->max_rows_update,
                                         .max_seqs = p->max_seqs_update,
                                         .list = memory_plan_distill_list(k->distill),
                                         .routes = k->actor.replay_words > 0,
                                         .stream = memory_plan_policy_from(p),
                                         .experts = p->experts,
                                         .quant = k->model.lora.quant,
                                         .grads = p->policy.grads,
                                         .chunk = p->policy.chunk};
    return trained_model_block_bytes(m, k->model.act, &a);
}
static size_t critic_bytes(const struct memory_plan *p, const struct ppo_worker_config *k, const struct model_config *v,
                           struct dev *dev, struct model_keep keep) {
    const struct trained_model_args a = {.dev = dev,
                                         .train = true,
                                         .keep = keep,
                                         .parts = p->critic_parts,
                                         .max_rows = p->max_rows_critic,
                                         .max_seqs = p->max_seqs_critic,
                                         .stream = memory_plan_critic_from(p, k),
                                         .quant = k->critic.lora.quant,
                                         .grads = p->critic_grads,
                                         .chunk = p->critic_chunk};
    return trained_model_block_bytes(v, k->model.act, &a);
}

/* ---- outside the device's blocks ----
 * Nothing here is laid out beforehand, so these are estimates: constants of the
 * code where there are some, else measured (scripts/measure_plan.sh). */

/* Bytes of a list of data files as rows in memory: parquet is compressed, and a row keeps its JSON and its ids. */
static size_t rows_bytes(const char *const *files, int64_t n) {
    size_t sum = 0;
    for (int64_t i = 0; i < n; i++) {
        const int64_t bytes = file_size(files[i]);
        const size_t len = strlen(files[i]);
        const bool parquet = len > 8 && strcmp(files[i] + len - 8, ".parquet") == 0;
        if (bytes > 0) sum += (size_t)bytes * (parquet ? 8 : 3);
    }
    return sum;
}

/* The columns of a step's samples, twice in the update, and the lists of teacher and student. */
static size_t batch_bytes(const struct ppo_worker_config *k, const struct memory_plan *p) {
    enum { TOKEN = 256, LIST = 32 };
    return SIZE_OF(k->sizes->samples, p->max_len, TOKEN + LIST * memory_plan_distill_list(k->distill));
}

/* The samples of a validation, which are kept until it ends. */
size_t plan_validation_bytes(const struct ppo_worker_config *k, int64_t rows) {
    enum { SAMPLE = 512, PROMPT = 8, RESPONSE = 32 };
    return SIZE_OF(rows, k->rollout.val.n, SAMPLE + PROMPT * k->data->max_prompt_length + RESPONSE * k->data->max_response_length);
}

/* Rows of the validation data, estimated from the files' sizes before they are read. */
static int64_t validation_rows(const struct ppo_worker_config *k) {
    enum { ROW = 1024 };
    const int64_t rows = k->data->n_val_files > 0 ? 1 + (int64_t)(rows_bytes(k->data->val_files, k->data->n_val_files) / ROW) : 0;
    return k->data->val_max_samples >= 0 ? min_i64(rows, k->data->val_max_samples) : rows;
}

/* The program, and what reads and keeps samples. */
static size_t process_bytes(const struct ppo_worker_config *k) {
    enum { PROGRAM = 12 << 20 };
    char *path = file_join(k->model.tokenizer_dir, "tokenizer.json");
    const int64_t file = file_size(path);
    free(path);
    return PROGRAM                              /* code, libraries, stacks, trackers */
           + (file > 0 ? (size_t)file * 4 : 0); /* tokenizer, and its file while it is read */
}

static size_t data_bytes(const struct ppo_worker_config *k, const struct memory_plan *p) {
    return rows_bytes(k->data->train_files, k->data->n_train_files) + rows_bytes(k->data->val_files, k->data->n_val_files) +
           max_size(p->batch, p->validation); /* one after the other */
}

/* Of a process with a device. With several ranks it has no data but the batch that it is sent. */
static size_t host_bytes(const struct ppo_worker_config *k, const struct memory_plan *p) {
    enum { ROW = 40 };
    const int64_t blocks = (p->max_len + KV_BLOCK_LEN - 1) / KV_BLOCK_LEN;
    return process_bytes(k) + (k->ranks.all.n > 1 ? p->batch : data_bytes(k, p)) +
           SIZE_OF(p->max_seqs, blocks, 8)                                                                    /* block tables */
           + (size_t)(p->max_rows_update + p->max_rows_ref + p->max_rows_critic + p->max_rows_teacher) * ROW; /* packed arrays */
}

/* A rank's share of what a host has. */
size_t plan_rank_share(const struct ppo_worker_config *k, const struct memory_plan *p, size_t all) {
    return (all > p->controller ? all - p->controller : 0) / (size_t)k->ranks.all.n_local;
}

/* Which is why a model is planned after the rows of its update. */
static int plan_model(struct model_memory *out, const struct ppo_worker_config *k, struct model_memory_args a) {
    a.ranks = k->ranks.pools.n[k->ranks.pool];
    a.local = k->ranks.all.n_local;
    return model_memory(out, &a);
}

/* The policy of ranks that generate and do not train. */
static int plan_copy(struct model_memory *out, const struct ppo_worker_config *k, const struct model_config *m, struct dev *dev,
                     const struct model_open_args *open) {
    struct optim_plan l = {0};
    if (k->model.lora.on) TRY(optim_plan(&l, m, dev, k->model.act, &k->model.lora.cfg, &k->actor.optim));
    *out = (struct model_memory){.weights = train_pages(model_open_bytes(m, dev, open)),
                                 .adapter = train_pages(l.adapter),
                                 .master = train_pages(l.master),
                                 .n_train = l.n_train};
    return 0;
}

static int plan_policy(struct memory_plan *p, const struct ppo_worker_config *k, const struct model_config *m, struct dev *dev) {
    const struct model_open_args open = {.act = k->model.act,
                                         .flags = !ppo_does(&k->ranks, PPO_TRAIN) && p->tensor_parallel > 1
                                                      ? MODEL_FILE_LAYERS
                                                      : model_stream_flags(memory_plan_policy_from(p)),
                                         .max_len = p->max_len,
                                         .quant = k->model.lora.quant,
                                         .shard = {.size = (int)k->ranks.pools.n[PPO_TRAIN],
                                                   .whole_matrices = k->actor.optim.kind == OPTIM_MUON,
                                                   .experts = p->experts.ranks > 1}};
    const int64_t pair = k->ranks.pools.n[PPO_ROLLOUT] > 0 ? k->ranks.pools.n[PPO_TRAIN] + k->ranks.pools.n[PPO_ROLLOUT] : 0;
    const struct model_memory_args trained = {.config = m,
                                              .dev = dev,
                                              .open = &open,
                                              .lora = &k->model.lora,
                                              .optim = &k->actor.optim,
                                              .max_rows = p->max_rows_update,
                                              .grad_chunk = k->actor.grad_chunk,
                                              .parts = k->actor.context};
    if (ppo_does(&k->ranks, PPO_TRAIN)) TRY(plan_model(&p->policy, k, trained));
    else if (ppo_does(&k->ranks, PPO_ROLLOUT)) TRY(plan_copy(&p->policy, k, m, dev, &open));
    else return 0;
    p->policy.exchange += train_pages(collective_bytes(dev, (int)pair, (int)k->ranks.all.n_local)); /* to send weights */
    const struct model_stream_shape spans = {m, dev, k->model.act, QUANT_NONE, MODEL_STREAM_RANKS, false, 0};
    if (p->pool_together > 1 && !k->model.lora.on) p->policy.exchange += train_pages(weight_sync_room(&spans));
    else if (p->pool_together > 1 && !ppo_does(&k->ranks, PPO_TRAIN)) /* at the start, the base */
        p->policy.exchange += train_pages(model_file_room(m, dev, k->model.act) - model_file_ends(m, dev, k->model.act));
    p->policy.exchange += train_pages(collective_bytes(dev, (int)p->tensor_parallel, (int)k->ranks.all.n_local));
    return 0;
}

/* Bytes of a group of ranks that share rows, outside the block. */
static size_t context_bytes(const struct ppo_worker_config *k, struct dev *dev, int context) {
    return context > 1 ? train_pages(collective_bytes(dev, context, (int)k->ranks.all.n_local)) : 0;
}

/* How many ranks share the rows of a micro-batch of so many parts; 0: none do. */
static int shared_rows(const struct ppo_worker_config *k, int64_t parts) {
    const int64_t n = min_i64(parts, k->ranks.pools.n[k->ranks.pool]);
    return n > 1 ? (int)n : 0;
}

/* Parts of a micro-batch, and how many ranks share them. */
static void plan_parts(struct memory_plan *p, const struct ppo_worker_config *k, bool critic) {
    const int64_t parts = critic ? k->critic.context : k->actor.context;
    struct model_keep *const keep = critic ? &p->critic_keep : &p->keep;
    *(critic ? &p->critic_parts : &p->parts) = parts;
    keep->context = shared_rows(k, parts);
    keep->parts = keep->context ? (int)parts : 0;
}

/* The critic's own memory, and its pass in the block: one size for values and updates. */
static int plan_critic(struct memory_plan *p, const struct ppo_worker_config *k, const struct model_config *v, struct dev *dev) {
    const struct ppo_critic_config *c = &k->critic;
    const int flags = (ppo_critic_shares(k) ? MODEL_SHARED_BASE : MODEL_INFER) | model_stream_flags(memory_plan_critic_from(p, k));
    const struct model_open_args open = {
        .act = k->model.act,
        .flags = flags,
        .max_len = p->max_len,
        .quant = c->lora.quant,
        .shard = {.size = (int)k->ranks.pools.n[k->ranks.pool], .whole_matrices = c->optim.kind == OPTIM_MUON}};
    const int64_t batch = k->sizes->samples;
    struct model_memory own;
    int64_t rows, seqs;
    TRY(cut_limits("critic.ppo_micro_batch_size_per_gpu", c->update_cut, batch, p->max_len, &p->max_rows_critic,
                   &p->max_seqs_critic));
    TRY(cut_limits("critic.forward_micro_batch_size_per_gpu", c->values_cut, batch, p->max_len, &rows, &seqs));
    if (rows > p->max_rows_critic) p->max_rows_critic = rows;
    if (seqs > p->max_seqs_critic) p->max_seqs_critic = seqs;
    TRY(plan_model(&own, k,
                   (struct model_memory_args){.config = v,
                                              .dev = dev,
                                              .open = &open,
                                              .lora = &c->lora,
                                              .optim = &c->optim,
                                              .max_rows = p->max_rows_critic,
                                              .grad_chunk = c->grad_chunk,
                                              .parts = c->context}));
    plan_parts(p, k, true);
    p->critic = model_memory_kept_bytes(&own) + context_bytes(k, dev, p->critic_keep.context);
    p->critic_grads = own.grads;
    p->critic_chunk = own.chunk;
    p->n_train_critic = own.n_train;
    p->offload += own.host;
    p->copy += own.copy;
    p->critic_keep = train_keep(c->recompute, v, k->model.act, p->max_rows_critic, p->critic_keep, 0);
    p->critic_pass = critic_bytes(p, k, v, dev, p->critic_keep);
    return 0;
}

/* The reward model scores during generation, so its memory is not part of the block. */
static int plan_reward_model(struct memory_plan *p, const struct ppo_worker_config *k, struct dev *dev) {
    const struct ppo_rm_config *r = &k->rm;
    struct reward_model_args *a = &p->rm_args;
    *a = (struct reward_model_args){.dev = dev,
                                    .dir = r->model_dir,
                                    .act = k->model.act,
                                    .cut = r->cut,
                                    .max_len = r->max_length,
                                    .policy_tokens = r->policy_tokens};
    if (judge_is_wanted(&r->judge)) {
        const int64_t batch =
            size_mul(k->sizes->open_prompts, k->rollout.train.n + 1); /* and a baseline: no more are requested at once */
        a->judge = r->judge;
        a->judge.dev = dev;
        a->judge.dir = r->model_dir;
        a->judge.act = k->model.act;
        a->judge.max_seqs = min_i64(r->judge.max_seqs, batch);
        if (a->judge.max_rows < a->judge.max_seqs) a->judge.max_rows = a->judge.max_seqs;
        a->max_rows = a->judge.max_rows;
    } else {
        TRY(cut_limits("reward.reward_model.micro_batch_size_per_gpu", r->cut, INT32_MAX, a->max_len, &a->max_rows, &a->max_seqs));
    }
    p->rm_together = r->together > 1 ? r->together : 1;
    a->together = a->judge.together = (int)p->rm_together;
    p->rm = train_pages(reward_model_bytes(&r->model, a));
    return 0;
}

static int plan_teacher(struct memory_plan *p, const struct ppo_worker_config *k, const struct model_config *t, struct dev *dev) {
    const enum model_stream_from from = memory_plan_teacher_from(p, k);
    const struct model_open_args open = {.act = k->model.act,
                                         .flags = model_stream_flags(from),
                                         .max_len = p->max_len,
                                         .shard = {.size = (int)k->ranks.pools.n[k->ranks.pool]}};
    p->teacher_context = shared_rows(k, k->actor.context);
    p->teacher = train_pages(model_open_bytes(t, dev, &open));
    if (p->teacher_context != p->keep.context) p->teacher += context_bytes(k, dev, p->teacher_context);
    if (from && !ppo_does(&k->ranks, PPO_TRAIN))
        p->teacher += train_pages(collective_bytes(dev, open.shard.size, (int)k->ranks.all.n_local));
    TRY(cut_limits("distillation.teacher_models.teacher_model.inference.max_num_batched_tokens", k->distill->cut, k->sizes->samples,
                   p->max_len, &p->max_rows_teacher, &p->max_seqs_teacher));
    const struct trained_model_args a = {.dev = dev,
                                         .keep = {.context = p->teacher_context},
                                         .max_rows = p->max_rows_teacher,
                                         .max_seqs = p->max_seqs_teacher,
                                         .list = memory_plan_distill_list(k->distill),
                                         .stream = from};
    p->teacher_pass = trained_model_block_bytes(t, k->model.act, &a);
    return 0;
}

/* The largest of the passes that share the block with the rollout. */
static size_t passes_bytes(const struct memory_plan *p) {
    return max_size(max_size(p->update, p->ref_pass), max_size(p->teacher_pass, p->critic_pass));
}

size_t plan_fixed_bytes(const struct memory_plan *p) {
    return model_memory_kept_bytes(&p->policy) + p->ref + p->teacher + p->critic + p->rm + p->working + p->system + p->host;
}

/* The largest block that the limit leaves room for. */
static size_t block_room(const struct memory_plan *p) {
    const size_t fixed = plan_fixed_bytes(p), page = train_pages(1);
    return p->limit > fixed ? (p->limit - fixed) / page * page : 0;
}

/* Rows of each phase, and what the ops need for so many. */
static void plan_working(struct memory_plan *p, const struct ppo_worker_config *k, const struct memory_plan_shapes *s,
                         struct dev *dev) {
    const struct model_config *m = &s->policy;
    enum { DECODE_UNIT = 128 }; /* the decoder pads its rows to buckets */
    const int64_t batch = rank_batch(p, k);
    p->max_seqs = min_i64(k->rollout.max_num_seqs, batch > k->rollout.val.n ? batch : k->rollout.val.n);
    p->max_rows_roll = k->rollout.max_num_batched_tokens > p->max_seqs ? k->rollout.max_num_batched_tokens : p->max_seqs;
    p->max_rows_roll = min_i64(p->max_rows_roll, size_mul(p->max_seqs, p->max_len));
    if (!ppo_has_engine(k)) p->max_seqs = p->max_rows_roll = 0;
    int64_t rows = p->max_rows_update > p->max_rows_ref ? p->max_rows_update : p->max_rows_ref;
    if (p->max_rows_critic > rows) rows = p->max_rows_critic;
    if (p->rm_args.max_rows > rows) rows = p->rm_args.max_rows;
    if (p->max_rows_teacher > rows) rows = p->max_rows_teacher;
    const struct decoder_args drafts = {
        .max_seqs = p->max_seqs, .max_rows = p->max_rows_roll, .max_len = p->max_len, .max_draft = memory_plan_draft(p, k)};
    const int64_t decode = decoder_verify_rows(&drafts);
    p->sizes = model_dev_sizes(m, k->model.act, rows > p->max_rows_roll ? rows : p->max_rows_roll,
                               p->max_rows_update > p->max_rows_critic ? p->max_rows_update : p->max_rows_critic,
                               decode > p->max_seqs + DECODE_UNIT ? decode : p->max_seqs + DECODE_UNIT);
    if (s->critic.json) model_dev_sizes_widen(&p->sizes, &s->critic);
    if (s->teacher.json) model_dev_sizes_widen(&p->sizes, &s->teacher);
    if (k->rm.enable) model_dev_sizes_widen(&p->sizes, &k->rm.model);
    if (p->rm_args.judge.max_seqs + DECODE_UNIT > p->sizes.decode) p->sizes.decode = p->rm_args.judge.max_seqs + DECODE_UNIT;
    p->system = dev_driver_bytes(dev);
    p->working = dev_working_bytes(dev, &p->sizes);
}

/* The policy's weights in the rollout's part of the block: whole, or the part of ranks that generate together. */
static int plan_weights(struct memory_plan *p, const struct ppo_worker_config *k, const struct model_config *m, struct dev *dev,
                        const struct decoder_args *limits) {
    const enum dtype act = k->model.act;
    const struct model_stream_shape stream = {m,
                                              dev,
                                              act,
                                              k->model.lora.quant,
                                              memory_plan_policy_from(p),
                                              p->experts.ranks > 1,
                                              model_dispatch_bytes(m, act, p->experts)};
    p->split_room = p->gathered = 0;
    if (!stream.from && p->tensor_parallel == 1) return 0;
    if (p->tensor_parallel == 1) {
        p->gathered = train_pages(model_gathered_bytes(&stream));
        return 0;
    }
    struct decoder_args a = decoder_size(dev, m, act, limits, SIZE_MAX);
    p->split_room = train_pages(model_stream_bytes(&stream)); /* none of ranks that only generate */
    const struct model_tp_shape shape = {.config = m,
                                         .dev = dev,
                                         .act = act,
                                         .quant = k->model.lora.quant,
                                         .size = (int)p->tensor_parallel,
                                         .max_rows = decoder_most_rows(&a),
                                         .lora = k->model.lora.on ? &k->model.lora.cfg : NULL};
    TRY(model_tp_bytes(&shape, &p->gathered));
    p->gathered = train_pages(p->gathered);
    return 0;
}

/* Of the rollout, with a decoder of so many bytes. */
static size_t rollout_bytes(const struct memory_plan *p, size_t decoder) {
    return p->gathered + (p->split_room ? max_size(p->split_room, train_pages(decoder)) : decoder);
}

/* What all running samples need, or what the memory leaves (gpu_memory_utilization: a share of the limit). */
static int plan_rollout(struct memory_plan *p, const struct ppo_worker_config *k, const struct model_config *whole,
                        struct dev *dev) {
    if (!ppo_has_engine(k)) return 0;
    const size_t room = block_room(p), share = (size_t)((double)p->limit * k->rollout.memory_fraction);
    const size_t budget = max_size(passes_bytes(p), share < room ? share : room);
    const int64_t per_seq = (p->max_len + KV_BLOCK_LEN - 1) / KV_BLOCK_LEN;
    const struct decoder_args limits = {
        .max_seqs = p->max_seqs, .max_rows = p->max_rows_roll, .max_len = p->max_len, .max_draft = memory_plan_draft(p, k)};
    TRY(plan_weights(p, k, whole, dev, &limits));
    const struct model_config part = model_tp_config(whole, -1, (int)p->tensor_parallel), *const m = &part;
    struct decoder_args r = decoder_size(dev, m, k->model.act, &limits, SIZE_MAX);
    p->rollout = rollout_bytes(p, decoder_bytes(m, k->model.act, &r));
    struct decoder_args one = r; /* the least: one sample at a time */
    one.n_kv_blocks = min_i64(r.n_kv_blocks, per_seq);
    p->least_rollout = rollout_bytes(p, decoder_bytes(m, k->model.act, &one));
    if (p->rollout > budget) {
        const size_t decoder = decoder_bytes(m, k->model.act, &r), cut = p->split_room ? train_pages(1) : 0;
        const size_t other = p->gathered + decoder - decoder_kv_bytes(m, k->model.act, &r) + cut;
        const int64_t fit = budget > other ? decoder_kv_blocks_fit(m, k->model.act, &r, r.n_kv_blocks, budget - other) : 0;
        r.n_kv_blocks = fit > per_seq ? fit : per_seq;
        p->rollout = rollout_bytes(p, decoder_bytes(m, k->model.act, &r));
    }
    p->split_at = p->split_room ? p->rollout - p->gathered : 0;
    p->n_kv_blocks = r.n_kv_blocks;
    return 0;
}

/* Where the plan is to choose: the updates keep as many activations as fit next to everything else, and behind all of them logits.
 * On a GPU that is up to the limit, for memory that a run leaves is of no use to it. On a CPU the rest of the memory is other
 * programs', so that it is what the block holds in any case. */
static void plan_keep(struct memory_plan *p, const struct ppo_worker_config *k, const struct memory_plan_shapes *s,
                      struct dev *dev) {
    const struct model_config *m = &s->policy, *v = &s->critic;
    const size_t room = dev_has_own_memory(dev) ? block_room(p) : max_size(p->rollout, passes_bytes(p));
    if (p->update > 0 && k->model.recompute == RECOMPUTE_AUTO && room > p->update) {
        p->keep = train_keep(RECOMPUTE_AUTO, m, k->model.act, p->max_rows_update, p->keep, room - p->update);
        p->update = plan_update_bytes(p, k, m, dev, p->keep);
    }
    if (p->update > 0 && room > p->update && memory_plan_distill_list(k->distill) == 0) { /* with lists none are kept */
        p->keep = train_keep_logits(p->keep, dev, m, k->model.act, p->max_rows_update, room - p->update);
        p->update = plan_update_bytes(p, k, m, dev, p->keep);
    }
    if (p->critic > 0 && k->critic.recompute == RECOMPUTE_AUTO && room > p->critic_pass) {
        p->critic_keep = train_keep(RECOMPUTE_AUTO, v, k->model.act, p->max_rows_critic, p->critic_keep, room - p->critic_pass);
        p->critic_pass = critic_bytes(p, k, v, dev, p->critic_keep);
    }
}

/* Whether a checkpoint is copied and written during the next steps. */
static void plan_async_save(struct memory_plan *p, const struct ppo_worker_config *k, const struct dev *dev) {
    const bool own = dev_has_own_memory(dev);
    p->copy = plan_checkpoint_copy(&k->trainer->run, k->conf, p->copy, own ? p->offload + p->host_all : p->total,
                                   own ? p->host_limit : p->limit);
    if (own) p->offload += p->copy;
    else p->total += p->copy;
}

void memory_plan_offload(struct ppo_worker_config *k, const struct dev *dev) {
    struct optim_config *const o = &k->actor.optim, *const v = &k->critic.optim;
    if (plan_can_offload(dev, o->host_master || v->host_master || k->ref.offload)) return;
    o->host_state = o->host_master = v->host_state = v->host_master = k->ref.offload = false;
}

/* The trainer's part: the policy's updates, and passes over the reference. */
static int plan_training(struct memory_plan *p, const struct ppo_worker_config *k, const struct memory_plan_shapes *s,
                         struct dev *dev) {
    const struct model_config *m = &s->policy;
    if (k->has_ref && !k->model.lora.on) plan_ref(p, k, m, dev);
    plan_parts(p, k, false);
    p->policy.exchange += context_bytes(k, dev, p->keep.context);
    p->keep.experts = p->experts.ranks > 1;
    p->keep = train_keep(k->model.recompute, m, k->model.act, p->max_rows_update, p->keep, 0);
    p->update = plan_update_bytes(p, k, m, dev, p->keep);
    /* old_log_prob passes, when forced, use the update's buffers in its own cut */
    return k->has_ref ? ref_bytes(p, k, m, dev) : 0;
}

/* The experts of layers on ranks: the largest pass of the policy, with an adapter also without it. */
static int plan_experts(struct memory_plan *p, const struct ppo_worker_config *k) {
    int64_t rows = 0, seqs;
    if (k->has_ref && k->model.lora.on)
        TRY(cut_limits("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", k->ref.cut, k->sizes->samples, p->max_len, &rows,
                       &seqs));
    if (p->max_rows_update > rows) rows = p->max_rows_update;
    p->experts = (struct model_dispatch_shape){(int)k->ranks.pools.n[PPO_TRAIN], rows};
    return 0;
}

/* The plan with this split. */
int plan_layout(struct memory_plan *p, const struct ppo_worker_config *k, const struct memory_plan_shapes *s, struct dev *dev,
                struct split split) {
    const struct model_config *m = &s->policy;
    *p = (struct memory_plan){.max_len = k->sizes->max_len,
                              .layout = split.layout,
                              .tensor_parallel = split.tensor_parallel,
                              .flops = train_model_flops(m, dev)};
    p->pool_together = plan_pool_together(k, s);
    p->batch = batch_bytes(k, p);
    p->validation = plan_validation_bytes(k, validation_rows(k));
    if (k->ranks.all.n > 1) p->controller = process_bytes(k) + data_bytes(k, p);
    p->host_limit = plan_rank_share(k, p, plan_host_limit(k->ranks.all.host_memory));
    p->limit = plan_memory_limit(dev, k->trainer->memory_limit);
    if (!dev_has_own_memory(dev)) p->limit = plan_rank_share(k, p, p->limit);
    const bool trains = ppo_does(&k->ranks, PPO_TRAIN);
    if (trains)
        TRY(cut_limits("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", k->actor.update_cut, k->sizes->samples, p->max_len,
                       &p->max_rows_update, &p->max_seqs_update));
    if (split.experts) TRY(plan_experts(p, k));
    TRY(plan_policy(p, k, m, dev));
    p->offload = p->policy.host;
    p->copy = p->policy.copy;
    if (trains) TRY(plan_training(p, k, s, dev));
    if (s->critic.json && ppo_does(&k->ranks, PPO_CRITIC)) TRY(plan_critic(p, k, &s->critic, dev));
    if (s->teacher.json && ppo_does(&k->ranks, PPO_TEACHER)) TRY(plan_teacher(p, k, &s->teacher, dev));
    if (k->rm.enable && ppo_does(&k->ranks, PPO_REWARD)) TRY(plan_reward_model(p, k, dev));
    plan_working(p, k, s, dev);
    p->host_all = host_bytes(k, p);
    p->host = dev_has_own_memory(dev) ? 0 : p->host_all; /* other memory than the limit's */
    TRY(plan_rollout(p, k, m, dev));
    p->least_passes = passes_bytes(p);
    plan_keep(p, k, s, dev);
    TRY(plan_rollout(p, k, m, dev));
    p->least = plan_fixed_bytes(p) + train_pages(max_size(p->least_rollout, p->least_passes));
    p->block = max_size(p->rollout, passes_bytes(p));
    p->total = plan_fixed_bytes(p) + train_pages(p->block);
    plan_async_save(p, k, dev);
    return 0;
}

bool plan_has_ref(const struct ppo_worker_config *k) { return !k->model.lora.on && k->has_ref; }
bool plan_fits_limits(const struct memory_plan *p) { return p->total <= p->limit && p->offload <= p->host_limit; }
