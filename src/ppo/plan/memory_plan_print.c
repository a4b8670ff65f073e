/* memory_plan_print.c - a memory plan as a table for people, and the same rows as JSON for run.db and programs. */
#include "plan/memory_rows.h"
#include "ppo/plan/memory_plan_int.h"

#include "base/buf.h"

/* Why the update recomputes what it does. */
static void recompute_line(const struct memory_plan *p, const struct ppo_worker_config *k, const struct model_config *m,
                           struct dev *dev, struct buf *b) {
    struct model_keep whole = MODEL_KEEP_ALL;
    whole.context = p->keep.context;
    whole.parts = p->keep.parts;
    whole.experts = p->keep.experts;
    const size_t all = plan_update_bytes(p, k, m, dev, whole);
    const bool partly = p->update<all, on_host = p->host> 0;
    if (k->model.recompute != RECOMPUTE_AUTO)
        buf_addf(b, "  recompute: as %s says\n",
                 conf_is_null(k->conf, "trainer.recompute") ? "enable_gradient_checkpointing" : "trainer.recompute");
    else if (!partly) buf_addf(b, "  recompute: nothing, all activations of an update fit\n");
    else
        buf_addf(b, "  recompute: all activations of an update: %.2f GiB; kept: what fits %s\n",
                 (double)(all - p->policy.grads - p->policy.chunk) / 0x1p30,
                 on_host ? "the block that other phases need" : "the limit");
}

/* What a trained policy has in addition to its weights, and the reference. */
static void training_rows(const struct memory_rows *b, const struct memory_plan *p, const struct ppo_worker_config *k,
                          bool several) {
    char adapter[96], state[96];
    snprintf(adapter, sizeof adapter, "of the adapter: %lld parameters", (long long)p->policy.n_train);
    snprintf(state, sizeof state, "%s%s%s", optim_kind_name(k->actor.optim.kind),
             k->actor.optim.kind == OPTIM_ADAMW ? ", fp32" : "",
             k->actor.optim.host_state    ? "; in host memory, here are buffers"
             : k->actor.optim.host_master ? "; with buffers of the master"
                                          : "");
    const char *const master = k->actor.optim.host_master ? "in host memory"
                               : p->policy.adapter        ? adapter
                               : several                  ? "a shard"
                                                          : "";
    const struct memory_training t = {
        .model = &p->policy, .master = master, .state = state, .grad_chunk = k->actor.grad_chunk, .several = several};
    memory_rows_training(b, &t);
    if (p->ref)
        memory_row(b, "reference weights", p->ref,
                   memory_plan_ref_from(p, k) == MODEL_STREAM_HOST
                       ? "in host memory; a pass holds two layers and the LM head, in the block"
                   : memory_plan_ref_from(p, k) == MODEL_STREAM_RANKS
                       ? "a share; a pass gathers two layers at a time, embedding and LM head, in the block"
                       : "");
}

static void model_rows(const struct memory_rows *b, const struct memory_plan *p, const struct ppo_worker_config *k, bool several) {
    const bool trains = ppo_does(&k->ranks, PPO_TRAIN);
    char note[160];
    if (p->policy.weights)
        memory_row(b, "policy weights", p->policy.weights,
                   !trains ? "a copy of the trainer's"
                   : k->model.lora.on && memory_plan_policy_from(p)
                       ? "frozen, a share; passes gather two layers at a time, embedding and LM head, in the block"
                   : k->model.lora.on           ? "frozen; without the adapter they are the reference"
                   : memory_plan_policy_from(p) ? "a share; passes gather two layers at a time, embedding and LM head, in the block"
                                                : "one buffer for rollout and training");
    if (p->policy.adapter) memory_row(b, "adapter", p->policy.adapter, "compute copies and scratch");
    if (trains) training_rows(b, p, k, several);
    else if (p->policy.exchange)
        memory_row(b, "exchange", p->policy.master + p->policy.exchange, "weights in transfer between ranks");
    if (p->teacher)
        memory_row(b, "teacher weights", p->teacher,
                   memory_plan_teacher_from(p, k) ? "frozen, a share; a pass gathers two layers at a time, in the block"
                                                  : "frozen");
    const bool shares = memory_plan_critic_from(p, k);
    snprintf(note, sizeof note, "%s; adapter and value head: %lld parameters",
             ppo_critic_shares(k) ? "frozen weights are the policy's"
             : shares             ? "a share of frozen weights"
                                  : "frozen weights",
             (long long)p->n_train_critic);
    if (p->critic)
        memory_row(b, "critic", p->critic,
                   p->n_train_critic ? note
                   : shares          ? "a share of weights, fp32 master, optimizer state; passes gather two layers at a time"
                                     : "weights, fp32 master, optimizer state");
    if (!p->rm) return;
    if (judge_is_wanted(&p->rm_args.judge))
        snprintf(note, sizeof note, "judge: weights, KV cache of %lld requests", (long long)p->rm_args.judge.max_seqs);
    else snprintf(note, sizeof note, "weights, and activations of %lld tokens", (long long)p->rm_args.max_rows);
    memory_row(b, "reward model", p->rm, note);
    if (p->rm_together > 1) json_object_set_new(b->json, "reward_model_together", json_integer((json_int_t)p->rm_together));
}

static void block_rows(const struct memory_rows *b, const struct memory_plan *p, const struct memory_plan_shapes *s) {
    char note[160], kept[96];
    buf_addf(b->text, "  one block, used in turn by\n");
    const char *const lent = p->split_room ? "; a part of the policy's weights" : p->gathered ? "; the policy's weights" : "";
    snprintf(note, sizeof note, "%lld KV blocks of %d tokens, %lld samples at a time%s", (long long)p->n_kv_blocks, KV_BLOCK_LEN,
             (long long)p->max_seqs, lent);
    const struct decoder_args limits = {
        .n_kv_blocks = p->n_kv_blocks, .max_seqs = p->max_seqs, .max_rows = p->max_rows_roll, .max_len = p->max_len};
    const int64_t states = p->rollout ? decoder_states(&s->policy, &limits) : 0;
    if (states > 0)
        snprintf(note, sizeof note, "%lld KV blocks of %d tokens, states of %lld samples, as many at a time%s",
                 (long long)p->n_kv_blocks, KV_BLOCK_LEN, (long long)states, lent);
    if (p->rollout) memory_row(b, states ? "  rollout: KV cache, states, logits" : "  rollout: KV cache, logits", p->rollout, note);
    if (p->update) memory_row(b, "  reference log-probs", p->ref_pass, "");
    snprintf(note, sizeof note, "micro-batch of %lld tokens", (long long)p->max_rows_teacher);
    if (p->teacher) memory_row(b, "  teacher log-probs", p->teacher_pass, note);
    snprintf(note, sizeof note, "micro-batch of %lld tokens, %s", (long long)p->max_rows_update,
             train_keep_text(p->keep, &s->policy, kept, sizeof kept));
    if (p->update) memory_row_update(b, "  update", p->update, p->policy.grads + p->policy.chunk, note);
    if (p->update) memory_row_logits(b, "  of the update: kept logits", &s->policy, p->keep.logits);
    if (!p->critic) return;
    snprintf(note, sizeof note, "micro-batch of %lld tokens, %s", (long long)p->max_rows_critic,
             train_keep_text(p->critic_keep, &s->critic, kept, sizeof kept));
    memory_row_update(b, "  critic: values and update", p->critic_pass, p->critic_grads + p->critic_chunk, note);
}

json_t *memory_plan_print(const struct memory_plan *p, const struct ppo_worker_config *k, const struct memory_plan_shapes *s,
                          struct dev *dev, struct buf *text) {
    const struct model_config *m = &s->policy;
    struct memory_rows table = {.text = text}, *const b = &table;
    const int64_t n = k->ranks.pools.n[k->ranks.pool];
    const bool trains = ppo_does(&k->ranks, PPO_TRAIN), several = trains && n > 1;
    char ranks[64] = "";
    memory_rows_open(b, p->total, p->limit);
    if (k->ranks.all.n > n)
        snprintf(ranks, sizeof ranks, "; each of %lld ranks of pool %s:", (long long)n, ppo_pool_name(k->ranks.pool));
    else if (n > 1) snprintf(ranks, sizeof ranks, "; each of %lld ranks:", (long long)n);
    buf_addf(text, "memory plan: %.3f B parameters, %s, %lld prompts x %lld samples x (%lld + %lld) tokens%s\n",
             (double)model_config_params(m) / 1e9, dtype_name(k->model.act), (long long)k->data->train_batch_size,
             (long long)k->rollout.train.n, (long long)k->data->max_prompt_length, (long long)k->data->max_response_length, ranks);
    model_rows(b, p, k, several);
    if (p->block) block_rows(b, p, s);
    if (k->rollout.external.n_urls > 0) buf_addf(text, "  rollout: on the servers of engine_url, with their memory\n");
    memory_row(b, "scratch", p->working, "of GEMM, LM head and threads");
    if (p->system) memory_row(b, "kernels and CUDA graphs", p->system, "the driver's (measured)");
    if (p->host) memory_row(b, "host", p->host, "program, tokenizer, data, a batch's columns (estimate)");
    if (p->copy && p->host) memory_row(b, "checkpoint", p->copy, "a copy, written during the next steps");
    memory_row_text(b, "total", p->total, "");
    buf_addf(text, "  %-34s %9.2f GiB\n", "limit", (double)p->limit / 0x1p30);
    if (trains) recompute_line(p, k, m, dev, text);
    const size_t copy = p->host ? 0 : p->copy;
    if (p->offload > copy) memory_row_text(b, "offloaded: pinned host memory", p->offload - copy, "");
    if (copy) memory_row_text(b, "checkpoint: pinned host memory", copy, "a copy, written during the next steps");
    if (several) {
        const struct rank_plan r = plan_ranks(p, k, s, dev);
        json_object_set_new(b->json, "ranks", rank_plan_print(&r, text));
    } else if (trains && *p->why) {
        buf_addf(text, "  %s\n", p->why);
    } else if (p->layout > LAYOUT_WHOLE) {
        buf_addf(text, "  layout %s: the weights of the %s sharded over %lld ranks\n    %s\n", rank_plan_layout_name(p->layout),
                 ppo_pool_name(k->ranks.pool), (long long)n, p->why);
        json_object_set_new(b->json, "layout", json_string(rank_plan_layout_name(p->layout)));
    }
    if (p->parts > 1 && p->keep.context <= 1)
        buf_addf(text, "  context parallel: 1, there is one rank; gradients are summed in %lld parts, as on %lld ranks\n",
                 (long long)p->parts, (long long)p->parts);
    const bool asked = k->rollout.tensor_parallel > 1 || k->rollout.expert_parallel > 1;
    if (p->rm_together > 1)
        buf_addf(text, "  reward model: %lld ranks have it together%s%s\n", (long long)p->rm_together, *p->why_rm ? ": " : "",
                 p->why_rm);
    else if (p->rm && *p->why_rm) buf_addf(text, "  reward model: whole on each rank, %s\n", p->why_rm);
    const bool generates = ppo_does(&k->ranks, PPO_ROLLOUT);
    if (!trains && p->tensor_parallel > 1) {
        buf_addf(text,
                 "  tensor parallel: %lld ranks generate together, each with its heads and rows of the layers' matrices; %s\n",
                 (long long)p->tensor_parallel, p->why_split);
        json_object_set_new(b->json, "tensor_parallel", json_integer((json_int_t)p->tensor_parallel));
    } else if (!several && generates && asked && *p->why_split) {
        buf_addf(text, "  tensor parallel: 1, %s\n", p->why_split);
    }
    return b->json;
}
