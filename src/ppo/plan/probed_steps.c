/* probed_steps.c - the steps that `verlc plan --probe` measures: those of a ppo run with the same keys, by the same program;
 * and the changes of keys that it may try.  Knows no arithmetic of times (plan/time_probe.h). */
#include "ppo/plan/probed_steps.h"

#include "plan/time_probe.h"
#include "ppo/controller.h"

#include "base/err.h"

#include <stdlib.h>

struct probe {
    struct verlc *v;
    struct verlc_batch *batch, *drawn;
    struct ppo_rollout_config full; /* responses of full length */
};

static bool begin(void *ctx) { return verlc_begin_step(((struct probe *)ctx)->v); }

/* Means of the step's samples. */
static int lengths(struct probe *x, struct time_probe *p) {
    const int64_t limit = verlc_controller(x->v)->k->data.max_response_length;
    struct verlc_column prompts, responses;
    TRY(verlc_column(x->v, x->batch, "prompts", &prompts));
    TRY(verlc_column(x->v, x->batch, "responses", &responses));
    const double n = (double)responses.n;
    p->prompt = (double)prompts.off[responses.n] / n;
    p->length = (double)responses.off[responses.n] / n;
    p->tokens = n * (p->prompt + p->length);
    p->longest = p->clipped = p->half = 0;
    for (int64_t i = 0; i < responses.n; i++) {
        const int64_t len = responses.off[i + 1] - responses.off[i];
        if ((double)len > p->longest) p->longest = (double)len;
        p->clipped += len == limit ? 1 / n : 0;
        p->half += (double)(len < limit / 2 ? len : limit / 2) / n;
    }
    return 0;
}

static int step(void *ctx, struct time_probe *p) {
    struct probe *x = ctx;
    TRY(ppo_step(x->v, x->batch, x->drawn));
    return lengths(x, p);
}

static void full_length(void *ctx) {
    struct probe *x = ctx;
    struct controller *c = verlc_controller(x->v);
    x->full = c->k->rollout;
    x->full.train.ignore_eos = true;
    c->generation.rollout = &x->full;
}

/* A pass over the validation data, or where they are many over rows spread evenly: so many that the tail, where a longest sample
 * runs alone, weighs little. */
static int validate(void *ctx, struct time_probe *p) {
    enum { WAVES = 8 }; /* as many samples as fit at a time, so often */
    struct controller *c = verlc_controller(((struct probe *)ctx)->v);
    const int64_t all = c->val_data->n, most = 1 + WAVES * c->ranks.all.n * c->worker.plan.max_seqs / c->k->rollout.val.n;
    struct rl_dataset part = *c->val_data;
    part.n = all < most ? all : most;
    part.prompts = xcalloc((size_t)part.n, sizeof *part.prompts);
    for (int64_t i = 0; i < part.n; i++) part.prompts[i] = c->val_data->prompts[i * all / part.n];
    p->validated = part.n;
    p->val_rows = all;
    const int rc = ppo_validate(&c->stage, &c->generation, &part, c->k->output.log_val_generations, &c->validation_dir);
    free(part.prompts);
    return rc;
}

/* What the run would do and a probe leaves out. Dynamic sampling may find no groups that differ among responses of
 * another length, so then there is no step at full length. */
static int measure(struct probe *x, bool whole, struct time_probe *p) {
    struct controller *c = verlc_controller(x->v);
    const struct probe_calls calls = {.ctx = x,
                                      .begin = begin,
                                      .step = step,
                                      .full_length = c->k->algorithm.filter.enable ? NULL : full_length,
                                      .validate = validate};
    const struct run_config *const k = &c->k->trainer.run;
    if (k->val_only) FAIL(ERR_INVAL, "trainer.val_only=True: there are no steps to measure");
    probe_prepare(p, &c->run, c->worker.base.device, c->worker.base.own_memory);
    p->validates = c->val_data && (p->test_freq > 0 || k->val_before_train);
    p->val_first = c->val_data && k->val_before_train;
    p->policy_from = c->k->critic.actor_from;
    p->limit = c->k->data.max_response_length;
    p->n = c->k->rollout.train.n;
    return probe_measure(p, &c->run, &calls, whole);
}

int ppo_probe(const struct conf *conf, bool whole, struct time_probe *p) {
    *p = probe_opening();
    struct probe x = {.v = verlc_open_conf(conf), .batch = verlc_batch_create(), .drawn = verlc_batch_create()};
    probe_opened(p);
    int rc = verlc_failed(x.v);
    if (rc == 0) rc = measure(&x, whole, p);
    verlc_batch_free(x.batch);
    verlc_batch_free(x.drawn);
    const int ended = verlc_end(x.v); /* has the message, where a step failed */
    if (ended < 0) rc = ended;
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

/* ---- changes to try ---- */

/* The next number of samples of a prompt that micro-batches divide. */
static int64_t more_samples(const struct ppo_config *k) {
    const int64_t micro = k->actor.update_cut.max_seqs;
    int64_t n = k->rollout.train.n + 1;
    while (micro > 0 && k->actor.mini_batch_size * n % micro != 0) n++;
    return n;
}

int ppo_choices(const struct conf *conf, bool own_memory, struct buf *out) {
    const struct ppo_config *k;
    const int rc = ppo_config_read(&k, conf, PPO_PLAN);
    if (rc == 0) {
        const struct probe_keys keys = {.samples = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
                                        .tokens = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
                                        .cut = k->actor.update_cut,
                                        .most = k->sizes.mini_batch,
                                        .recompute = k->model.recompute,
                                        .offload = own_memory ? "actor_rollout_ref.actor.fsdp_config.optimizer_offload" : NULL,
                                        .offloads = k->actor.optim.host_state};
        probe_choices(&keys, out);
        if (own_memory && !k->model.lora.on && (k->actor.use_kl_loss || k->algorithm.use_kl_in_reward))
            buf_addf(out, "actor_rollout_ref.ref.fsdp_config.param_offload=%s\n", k->ref.offload ? "False" : "True");
        buf_addf(out, "actor_rollout_ref.rollout.n=%lld\n", (long long)more_samples(k));
        if (k->data.max_response_length > 1)
            buf_addf(out, "data.max_response_length=%lld\n", (long long)k->data.max_response_length / 2);
    }
    ppo_config_free(k);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}
