/* distillation.c - on-policy distillation: a frozen teacher's log-probs of the student's samples, and its part of the update's
 * loss.  Formulas live in algo/distillation.c, the log-probs of lists in the LM head of dev.
 *
 * Invariant: what is kept of the teacher is one number or topk (token, log-prob) pairs for each response token, never
 * a row of the vocabulary. */
#include "ppo/stages/stages.h"

#include "base/buf.h"
#include "base/err.h"

#include <math.h>
#include <stdlib.h>

/* ---- the teacher ---- */

static int check_finite(const float *x, int64_t n, int64_t per_token) {
    for (int64_t i = 0; i < n; i++)
        if (!isfinite(x[i]))
            FAIL(ERR_NUMERIC, "teacher_logprobs: not finite at token %lld of the batch", (long long)(i / per_token));
    return 0;
}

int ppo_teacher(const struct stage *s, const struct ppo_distill_config *c, struct batch *b) {
    const struct progress at = run_progress(s->run);
    struct packed_seq *seqs;
    TRY(ppo_sequences(b, &seqs));
    const int64_t n = batch_find(b, "responses")->off[b->n_rows], k = memory_plan_distill_list(c), per = k > 0 ? k : 1;
    float *logp = xmalloc((size_t)(n * per) * sizeof *logp);
    int32_t *id = xmalloc((size_t)(n * per) * sizeof *id);
    const struct token_lists lists = {.top_id = id, .top_logp = logp};
    const struct worker_pass pass = {.role = VERLC_TEACHER,
                                     .phase = "teacher",
                                     .at = &at,
                                     .seqs = seqs,
                                     .n = b->n_rows,
                                     .k = k,
                                     .out = {.logp = k > 0 ? NULL : logp, .list = k > 0 ? &lists : NULL}};
    int rc = 0;
    TRYG(s->worker->ops->forward(s->worker, &pass), done);
    TRYG(check_finite(logp, n * per, per), done);
    TRYG(ppo_add_like(b, "teacher_logprobs", BATCH_F32, "responses", per, logp), done);
    if (k > 0) TRYG(ppo_add_like(b, "teacher_ids", BATCH_I32, "responses", k, id), done);
done:
    free(logp);
    free(id);
    free(seqs);
    return rc;
}

/* ---- its part of the loss ---- */

void ppo_distillation_begin(struct distill_batch *d, const struct ppo_distill_config *c, int64_t vocab, const struct batch *mini) {
    const int64_t k = memory_plan_distill_list(c), n = batch_find(mini, "responses")->off[mini->n_rows];
    *d = (struct distill_batch){.k = k, .vocab = vocab, .teacher = batch_find(mini, "teacher_logprobs")->f32};
    if (k == 0) return;
    d->list = (struct token_lists){.id = batch_find(mini, "teacher_ids")->i32,
                                   .logp = xmalloc((size_t)(n * k) * 4),
                                   .top_id = xmalloc((size_t)(n * k) * 4),
                                   .dlogp = xcalloc((size_t)(n * k), 4)};
}

void ppo_distillation_end(struct distill_batch *d) {
    free(d->list.logp);
    free(d->list.top_id);
    free(d->list.dlogp);
    *d = (struct distill_batch){0};
}

static double *widen(const float *x, int64_t n) {
    double *y = xmalloc((size_t)n * sizeof *y);
    for (int64_t i = 0; i < n; i++) y[i] = (double)x[i];
    return y;
}

int ppo_distillation_loss(struct distill_batch *d, const struct ppo_distill_config *c, const struct algo_policy_args *policy,
                          double *loss, double *dlogp, struct algo_metrics *m) {
    /* of the micro-batch's tokens alone: offsets from its first one */
    const struct algo_ragged *r = policy->r;
    const int64_t t0 = r->off[0], n = r->off[r->n] - t0, k = d->k, per = k > 0 ? k : 1;
    int64_t *off = xmalloc((size_t)(r->n + 1) * sizeof *off);
    for (int64_t i = 0; i <= r->n; i++) off[i] = r->off[i] - t0;
    const struct algo_ragged own = {.n = r->n, .off = off, .mask = r->mask + t0};
    double *teacher = widen(d->teacher + t0 * per, n * per), *student = NULL, *dlist = NULL, value = 0;
    struct algo_distill_sums sums = {0};
    struct algo_distill_args a = {.r = &own,
                                  .d = &c->loss,
                                  .agg = policy->agg,
                                  .coef = c->use_task_rewards ? c->coef : 1,
                                  .logp = policy->logp + t0,
                                  .old_logp = policy->old_logp + t0,
                                  .is_weights = policy->is_weights ? policy->is_weights + t0 : NULL,
                                  .teacher_logp = teacher};
    if (k > 0) {
        a.k = k;
        a.vocab = d->vocab;
        a.list_teacher = teacher;
        a.list_logp = student = widen(d->list.logp + t0 * k, n * k);
        a.list_id = d->list.id + t0 * k;
        a.student_top = d->list.top_id + t0 * k;
        dlist = xmalloc((size_t)(n * k) * sizeof *dlist);
    }
    const int rc = algo_distill_loss(&a, &value, dlogp + t0, dlist, &sums, m);
    for (int64_t i = 0; k > 0 && i < n * k; i++) d->list.dlogp[t0 * k + i] = (float)dlist[i];
    algo_distill_metrics(&sums, m);
    *loss += a.coef * value;
    free(off);
    free(teacher);
    free(student);
    free(dlist);
    return rc;
}
