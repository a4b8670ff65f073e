/* update_critic.c - the critic's two stages of a step: values before the advantages,
 * its own updates after them.  The mirror of update_actor.c; the loss lives in algo. */
#include "ppo/stages/stages.h"

#include "algo/value_loss.h"
#include "base/buf.h"
#include "base/err.h"

#include <stdlib.h>

int ppo_values(const struct stage *s, struct batch *b) {
    float *values = xmalloc((size_t)batch_find(b, "responses")->off[b->n_rows] * sizeof *values + 1);
    int rc = ppo_numbers(s, VERLC_CRITIC, b, PPO_VALUES_PRECOMPUTED, values);
    if (rc == 0) rc = ppo_add_numbers(b, "values", values);
    free(values);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

/* ---- the update ---- */

static int value_loss(void *arg, const struct micro_loss *x) {
    struct ppo_mini *mini = arg;
    const struct algo_ragged r = {.n = x->hi - x->lo, .off = mini->off + x->lo, .mask = mini->mask};
    double *const vpreds = mini->work, *const dvpreds = mini->work + mini->n_tokens;
    for (int64_t t = x->t0; t < x->t1; t++) vpreds[t] = (double)x->out[t - x->t0];
    const struct algo_value_args a = {.r = &r,
                                      .vpreds = vpreds,
                                      .values = ppo_column(&mini->b, "values"),
                                      .returns = ppo_column(&mini->b, "returns"),
                                      .cliprange_value = mini->k->critic.cliprange,
                                      .agg = mini->agg};
    struct algo_metrics m = {0};
    double loss;
    TRY(algo_value_loss(&a, &loss, dvpreds, &m));
    for (int64_t t = x->t0; t < x->t1; t++) x->dout[t - x->t0] = (float)dvpreds[t];
    algo_metrics_set(&m, "critic/loss", loss);
    return ppo_mini_record(x, &m);
}

static int update(struct worker *w, struct run *run, struct batch *b) {
    const struct stage own = ppo_update_stage(w, run), *const s = &own;
    const struct ppo_worker_config *const slices = ppo_worker_slices(w);
    const struct ppo_critic_config *k = &slices->critic;
    const int64_t index = train_lr_index(s->run->step, 1, k->optim.zero_indexed_step);
    struct ppo_mini mini = {.s = s,
                            .role = VERLC_CRITIC,
                            .k = slices,
                            .whole = b,
                            .loss = value_loss,
                            .report = ppo_mini_reported,
                            .n_work = 2,
                            .agg = {.mode = k->agg_mode, .loss_scale_factor = k->loss_scale_factor}};
    struct update u = {.optim = &k->optim,
                       .lr = optim_lr(&k->optim, index),
                       .mini_batch = slices->sizes->critic_mini_batch,
                       .epochs = k->epochs,
                       .cut = k->update_cut,
                       .shuffle = k->shuffle,
                       .seed = k->seed};
    return ppo_mini_run(&mini, &u, optim_lr(&k->optim, index + 1));
}

const struct worker_update ppo_update_critic = {.name = "update_critic",
                                                .role = VERLC_CRITIC,
                                                .reads = (const char *const[]){PPO_MINI_READS, NULL},
                                                .writes = (const char *const[]){NULL},
                                                .run = update};
