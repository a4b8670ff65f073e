/* distillation.c - on-policy distillation: a frozen teacher, what it says of the student's samples, and its part of the
 * update's loss.  Formulas live in algo/distillation.c, the log-probs of lists in the LM head of dev.
 *
 * The teacher is a model of its own with the student's tokenizer.  Its logits are taken at temperature 1, as verl's
 * servers give them; the student's at the rollout's.
 * Invariant: what is kept of the teacher is one number or topk (token, log-prob) pairs for each response token, never
 * a row of the vocabulary. */
#include "train/ppo/ppo_int.h"

#include "base/buf.h"
#include "base/err.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- the teacher ---- */

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

static int check_tokenizer(const struct ppo *p) {
    struct tokenizer *t = NULL;
    int rc = tokenizer_open(&t, p->k.distill.teacher_dir);
    if (rc == 0) rc = same_tokens(t, p->tok);
    tokenizer_close(t);
    return rc < 0 ? err_wrap(rc, "distillation.teacher_models.teacher_model.model_path") : 0;
}

int ppo_open_teacher(struct ppo *p) {
    const struct ppo_plan *l = &p->plan;
    const struct model_open_args a = {
        .dir = p->k.distill.teacher_dir, .act = p->k.act, .flags = MODEL_INFER, .max_len = l->max_len};
    TRY(check_tokenizer(p));
    const int rc = model_open(&p->teacher, &p->dev, &a);
    if (rc < 0) return err_wrap(rc, "distillation.teacher_models.teacher_model.model_path");
    const struct actor_args t = {.dev = &p->dev,
                                 .model = p->teacher,
                                 .max_rows = l->max_rows_teacher,
                                 .max_seqs = l->max_seqs_teacher,
                                 .list = ppo_distill_k(&p->k),
                                 .block = p->block};
    return actor_create(&p->teacher_actor, &t);
}

int64_t ppo_distill_k(const struct ppo_config *k) { return k->distill.enable && k->distill.loss.list ? k->distill.topk : 0; }

/* A new column of k elements for each response token. */
static int list_column(struct batch *b, const char *name, enum batch_type type, int64_t k, const void *data) {
    const struct batch_col *responses = batch_find(b, "responses");
    int64_t *lens = xmalloc((size_t)b->n_rows * sizeof *lens);
    for (int64_t i = 0; i < b->n_rows; i++) lens[i] = batch_len(responses, i) * k;
    const int rc = batch_add(b, name, type, lens, data, NULL);
    free(lens);
    return rc;
}

static int check_finite(const float *x, int64_t n, int64_t per_token) {
    for (int64_t i = 0; i < n; i++)
        if (!isfinite(x[i]))
            FAIL(ERR_NUMERIC, "teacher_logprobs: not finite at token %lld of the batch", (long long)(i / per_token));
    return 0;
}

int ppo_teacher(struct ppo *p, struct batch *b) {
    struct batch_col *responses;
    struct actor_seq *seqs;
    TRY(batch_get(b, "responses", BATCH_I32, &responses));
    TRY(ppo_sequences(b, &seqs));
    const int64_t n = responses->off[b->n_rows], k = ppo_distill_k(&p->k), per = k > 0 ? k : 1;
    float *logp = xmalloc((size_t)(n * per) * sizeof *logp);
    int32_t *id = k > 0 ? xmalloc((size_t)(n * k) * sizeof *id) : NULL;
    int rc = 0;
    for (int64_t lo = 0, hi; lo < b->n_rows; lo = hi) { /* in pieces, for the watchdog and the progress */
        hi = lo + 16 < b->n_rows ? lo + 16 : b->n_rows;
        const int64_t at = responses->off[lo];
        const struct actor_list list = {.top_id = k > 0 ? id + at * k : NULL, .top_logp = k > 0 ? logp + at * k : NULL};
        const struct actor_out out = {.logp = k > 0 ? NULL : logp + at, .list = k > 0 ? &list : NULL};
        TRYG(actor_logp(p->teacher_actor, seqs + lo, hi - lo, p->k.distill.cut, 1, out), done);
        stage_beat(p->stages);
        track_progress(p->track, p->step, "teacher", hi, b->n_rows, 0);
        if (stage_stop_signal()) FAILG(done, ERR_SIGNAL, "stopped by %s", stage_signal_name(stage_stop_signal()));
    }
    TRYG(check_finite(logp, n * per, per), done);
    TRYG(list_column(b, "teacher_logprobs", BATCH_F32, per, logp), done);
    if (k > 0) TRYG(list_column(b, "teacher_ids", BATCH_I32, k, id), done);
done:
    free(logp);
    free(id);
    free(seqs);
    return rc;
}

/* ---- its part of the loss ---- */

void ppo_distill_begin(struct ppo_distill *d, const struct ppo *p, const struct batch *mini) {
    const int64_t k = ppo_distill_k(&p->k), n = batch_find(mini, "responses")->off[mini->n_rows];
    d->k = k;
    d->teacher = batch_find(mini, "teacher_logprobs")->f32;
    if (k == 0) return;
    d->list = (struct actor_list){.id = batch_find(mini, "teacher_ids")->i32,
                                  .logp = xmalloc((size_t)(n * k) * 4),
                                  .top_id = xmalloc((size_t)(n * k) * 4),
                                  .dlogp = xcalloc((size_t)(n * k), 4)};
}

void ppo_distill_end(struct ppo_distill *d) {
    free(d->list.logp);
    free(d->list.top_id);
    free(d->list.dlogp);
    d->list = (struct actor_list){0};
}

static double *widen(const float *x, int64_t n) {
    double *y = xmalloc((size_t)n * sizeof *y);
    for (int64_t i = 0; i < n; i++) y[i] = (double)x[i];
    return y;
}

int ppo_distill_loss(struct ppo_distill *d, const struct ppo *p, const struct algo_policy_args *policy, double *dlogp,
                     struct algo_metrics *m) {
    const struct ppo_distill_config *c = &p->k.distill;
    /* of the micro-batch's tokens alone: offsets from its first one */
    const struct algo_ragged *r = policy->r;
    const int64_t t0 = r->off[0], n = r->off[r->n] - t0, k = d->k;
    int64_t *off = xmalloc((size_t)(r->n + 1) * sizeof *off);
    for (int64_t i = 0; i <= r->n; i++) off[i] = r->off[i] - t0;
    const struct algo_ragged own = {.n = r->n, .off = off, .mask = r->mask + t0};
    double *teacher = widen(d->teacher + t0 * (k > 0 ? k : 1), n * (k > 0 ? k : 1)), *student = NULL, *dlist = NULL, loss;
    struct algo_distill_args a = {.r = &own,
                                  .d = &c->loss,
                                  .agg = policy->agg,
                                  .logp = policy->logp + t0,
                                  .old_logp = policy->old_logp + t0,
                                  .is_weights = policy->is_weights ? policy->is_weights + t0 : NULL,
                                  .teacher_logp = teacher};
    if (k > 0) {
        a.k = k;
        a.vocab = p->policy->cfg.vocab;
        a.list_teacher = teacher;
        a.list_logp = student = widen(d->list.logp + t0 * k, n * k);
        a.list_id = d->list.id + t0 * k;
        a.student_top = d->list.top_id + t0 * k;
        dlist = xmalloc((size_t)(n * k) * sizeof *dlist);
    }
    const int rc = algo_distill_loss(&a, c->use_task_rewards ? c->coef : 1, &loss, dlogp + t0, dlist, &d->sums, m);
    for (int64_t i = 0; k > 0 && i < n * k; i++) d->list.dlogp[t0 * k + i] = (float)dlist[i];
    free(off);
    free(teacher);
    free(student);
    free(dlist);
    return rc;
}
