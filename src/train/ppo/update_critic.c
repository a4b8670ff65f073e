/* update_critic.c - the critic's two stages of a step: values before the advantages,
 * its own updates after them.  The mirror of update_actor.c; the loss lives in algo. */
#include "train/ppo/stages.h"

#include "algo/value_loss.h"
#include "base/buf.h"
#include "base/err.h"

#include <stdlib.h>

int ppo_values(const struct stage *s, struct batch *b) {
    const struct progress at = run_progress(s->run);
    struct packed_seq *seqs;
    TRY(ppo_sequences(b, &seqs));
    float *values = xmalloc((size_t)batch_find(b, "responses")->off[b->n_rows] * sizeof *values);
    int rc = worker_forward(s->worker, VERLC_CRITIC, &at, seqs, b->n_rows, (struct forward_out){.value = values});
    if (rc == 0) rc = ppo_add_numbers(b, "values", values);
    free(values);
    free(seqs);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

/* ---- the update ---- */

struct critic_update {
    struct ppo_mini mini;
    double *vpreds, *dvpreds; /* of the mini-batch's tokens */
};

static int value_loss(void *arg, const struct micro_loss *x) {
    struct critic_update *u = arg;
    const struct ppo_mini *mini = &u->mini;
    const struct algo_ragged r = {.n = x->hi - x->lo, .off = mini->off + x->lo, .mask = mini->mask};
    for (int64_t t = x->t0; t < x->t1; t++) u->vpreds[t] = (double)x->out[t - x->t0];
    const struct algo_value_args a = {.r = &r,
                                      .vpreds = u->vpreds,
                                      .values = ppo_column(&mini->b, "values"),
                                      .returns = ppo_column(&mini->b, "returns"),
                                      .cliprange_value = mini->s->k->critic.cliprange,
                                      .agg = mini->agg};
    struct algo_metrics m = {0};
    double loss;
    TRY(algo_value_loss(&a, &loss, u->dvpreds, &m));
    for (int64_t t = x->t0; t < x->t1; t++) x->dout[t - x->t0] = (float)u->dvpreds[t];
    algo_metrics_set(&m, "critic/loss", loss);
    ppo_mini_report(&u->mini, x, "critic/", "update_critic", &m);
    return 0;
}

static int take(void *ctx, const int64_t *rows, int64_t n, struct mini_batch *m) {
    struct critic_update *u = ctx;
    TRY(ppo_mini_take(&u->mini, rows, n, m));
    const int64_t tokens = u->mini.off[n];
    u->vpreds = xcalloc((size_t)tokens * 2, sizeof *u->vpreds);
    u->dvpreds = u->vpreds + tokens;
    m->loss = value_loss;
    m->loss_arg = u;
    return 0;
}

static void drop(void *ctx) {
    struct critic_update *u = ctx;
    ppo_mini_drop(&u->mini);
    free(u->vpreds);
    u->vpreds = NULL;
}

static int not_finite(void *ctx, const int64_t *rows, int64_t n, const struct optim_result *o) {
    (void)rows, (void)n;
    return ppo_mini_not_finite(&((struct critic_update *)ctx)->mini, o);
}

int ppo_update_critic(const struct stage *s, const struct batch *b) {
    const struct ppo_critic_config *k = &s->k->critic;
    const int64_t index = s->run->step - (k->zero_indexed_step ? 1 : 0);
    struct critic_update u = {
        .mini = {.s = s, .whole = b, .agg = {.mode = k->agg_mode, .loss_scale_factor = k->loss_scale_factor}}};
    struct update a = {.optim = &k->optim,
                       .lr = optim_lr(&k->optim, index),
                       .mini_batch = k->mini_batch_size * s->k->train.n,
                       .epochs = k->epochs,
                       .cut = k->update_cut,
                       .shuffle = k->shuffle,
                       .seed = k->seed,
                       .ctx = &u,
                       .take = take,
                       .drop = drop,
                       .not_finite = not_finite};
    return ppo_mini_run(&u.mini, VERLC_CRITIC, &a, optim_lr(&k->optim, index + 1));
}
