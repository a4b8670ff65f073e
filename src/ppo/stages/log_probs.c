/* log_probs.c - old log-probs and the reference's: of the samples' tokens, by the policy and by the frozen reference. */
#include "ppo/stages/stages.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int ppo_numbers(const struct stage *s, enum verlc_role role, struct batch *b, const char *precomputed, float *out) {
    const struct progress at = run_progress(s->run);
    const struct batch_col *there = batch_find(b, precomputed);
    const int64_t *const off = batch_find(b, "responses")->off;
    struct packed_seq *seqs;
    int64_t n = 0, tokens = 0;
    TRY(ppo_sequences(b, &seqs));
    for (int64_t i = 0; i < b->n_rows; i++) { /* those that are missing move to the front */
        if (there && batch_len(there, i) > 0) continue;
        seqs[n++] = seqs[i];
        tokens += off[i + 1] - off[i];
    }
    float *rest = xmalloc((size_t)tokens * sizeof *rest + 1), *from = rest;
    const struct worker_pass pass = {
        .role = (int)role,
        .phase = role == VERLC_CRITIC ? "values" : "ref_log_prob",
        .at = &at,
        .seqs = seqs,
        .n = n,
        .out = {.logp = role == VERLC_CRITIC ? NULL : rest, .value = role == VERLC_CRITIC ? rest : NULL}};
    const int rc = s->worker->ops->forward(s->worker, &pass);
    for (int64_t i = 0; i < b->n_rows && rc == 0; i++) {
        const int64_t own = off[i + 1] - off[i];
        const bool done = there && batch_len(there, i) > 0;
        memcpy(out + off[i], done ? there->f32 + there->off[i] : from, (size_t)own * sizeof *out);
        if (!done) from += own;
    }
    if (there) batch_drop(b, precomputed);
    free(rest);
    free(seqs);
    return rc;
}

/* MFU of a forward pass of the policy over seqs[n] that took so long; 0: the device's peak is not known. */
static double forward_mfu(const struct worker *w, const struct packed_seq *seqs, int64_t n, double seconds) {
    const struct model_flops *f = &w->flops;
    double flops = 0;
    for (int64_t i = 0; i < n; i++) flops += (f->token + f->square * (double)seqs[i].n) * (double)seqs[i].n;
    if (!isfinite(f->peak) || f->peak <= 0 || seconds <= 0) return 0;
    return flops / 3 / seconds / f->peak / w->n_ranks; /* forward: a third */
}

/* words: of each token of the sequences. */
static int add_routes(struct batch *b, const struct packed_seq *seqs, int64_t words, const int32_t *routes) {
    int64_t *lens = xmalloc((size_t)b->n_rows * sizeof *lens + 1);
    for (int64_t i = 0; i < b->n_rows; i++) lens[i] = seqs[i].n * words;
    const int rc = batch_add(b, PPO_ROUTES, BATCH_I32, lens, routes, NULL);
    free(lens);
    return rc;
}

int ppo_record_routes(const struct stage *s, int64_t words, struct batch *b) {
    const struct progress at = run_progress(s->run);
    struct packed_seq *seqs;
    int64_t tokens = 0;
    TRY(ppo_sequences(b, &seqs));
    for (int64_t i = 0; i < b->n_rows; i++) tokens += seqs[i].n;
    int32_t *const routes = xmalloc((size_t)(tokens * words) * sizeof *routes + 1);
    const struct worker_pass pass = {.role = VERLC_ACTOR,
                                     .phase = "old_log_prob",
                                     .at = &at,
                                     .seqs = seqs,
                                     .n = b->n_rows,
                                     .words = words,
                                     .out = {.routes = routes}};
    int rc = s->worker->ops->forward(s->worker, &pass);
    if (rc == 0) rc = add_routes(b, seqs, words, routes);
    free(routes);
    free(seqs);
    return rc;
}

/* The policy's log-probs of all responses into old_log_probs; with sum_pi the sums of squared probabilities as well, with words
 * the choices of experts, which are recorded unless b has them: then they are replayed. */
static int policy_log_probs(const struct stage *s, struct batch *b, bool sum_pi, int64_t words) {
    const struct progress at = run_progress(s->run);
    struct packed_seq *seqs;
    TRY(ppo_sequences(b, &seqs));
    const int64_t n = batch_find(b, "responses")->off[b->n_rows];
    float *logp = xmalloc((size_t)n * 2 * sizeof *logp), *squares = sum_pi ? logp + n : NULL;
    int64_t tokens = 0;
    for (int64_t i = 0; i < b->n_rows; i++) tokens += seqs[i].n;
    const struct batch_col *const recorded = batch_find(b, PPO_ROUTES);
    for (int64_t i = 0; recorded && i < b->n_rows; i++) seqs[i].routes = recorded->i32 + recorded->off[i];
    int32_t *const routes = words > 0 && !recorded ? xmalloc((size_t)(tokens * words) * sizeof *routes + 1) : NULL;
    const double start = clock_now();
    int rc = 0;
    const struct worker_pass pass = {.role = VERLC_ACTOR,
                                     .phase = "old_log_prob",
                                     .at = &at,
                                     .seqs = seqs,
                                     .n = b->n_rows,
                                     .words = words,
                                     .out = {.logp = logp, .sum_pi_sq = squares, .routes = routes}};
    TRYG(s->worker->ops->forward(s->worker, &pass), out);
    metrics_set(&s->run->metrics, forward_mfu(s->worker, seqs, b->n_rows, clock_now() - start), "perf/mfu/actor_infer");
    TRYG(ppo_add_numbers(b, "old_log_probs", logp), out);
    if (sum_pi) TRYG(ppo_add_numbers(b, "sum_pi_squared", squares), out);
    if (routes) TRYG(add_routes(b, seqs, words, routes), out);
out:
    free(routes);
    free(logp);
    free(seqs);
    return rc;
}

const struct batch_col *ppo_sampling_log_probs(const struct batch *b) {
    const struct batch_col *c = batch_find(b, "sampling_log_probs");
    return c ? c : batch_find(b, "rollout_log_probs");
}

bool ppo_on_policy(const struct stage *s, const struct batch *b) {
    const struct batch_col *c = batch_find(b, "param_versions"), *other = batch_find(b, "other_temperature");
    for (int64_t i = 0; other && i < b->n_rows; i++)
        if (other->i64[i] > 0) return false; /* its log-probs are those of another temperature */
    if (!c) return true;
    uint8_t *mask = ppo_policy_mask(b);
    int64_t t = 0;
    while (t < c->off[b->n_rows] && (!mask[t] || c->i32[t] == ppo_version(s))) t++;
    free(mask);
    return t == c->off[b->n_rows];
}

int ppo_old_log_probs(const struct stage *s, const struct ppo_algorithm_config *k, struct batch *b) {
    double *old;
    const bool sum_pi = k->adv->needs & ALGO_NEEDS_SUM_PI;
    metrics_set(&s->run->metrics, 0, "perf/mfu/actor_infer"); /* without a pass */
    /* Where the policy has not moved since the rollout, both use one forward pass, so the rollout's log-probs are the
     * policy's (invariant 1); the pass is for estimators that need more from it, for router replay, whose choices of experts are
     * the rollout's as well, and can be forced. */
    if (k->force_old_log_prob || sum_pi || (k->replay_words > 0 && !batch_find(b, PPO_ROUTES)) ||
        (!k->bypass && !ppo_on_policy(s, b))) {
        TRY(policy_log_probs(s, b, sum_pi, k->replay_words));
        if (!k->bypass || ppo_on_policy(s, b)) return 0;
        batch_drop(b, "old_log_probs");
    }
    TRY(ppo_add_f64(b, "old_log_probs", "responses", &old));
    const struct batch_col *rollout = k->bypass ? ppo_sampling_log_probs(b) : batch_find(b, "rollout_log_probs");
    for (int64_t t = 0; t < rollout->off[b->n_rows]; t++) old[t] = (double)rollout->f32[t];
    return 0;
}

int ppo_reference(const struct stage *s, struct batch *b) {
    float *logp = xmalloc((size_t)batch_find(b, "responses")->off[b->n_rows] * sizeof *logp + 1);
    int rc = ppo_numbers(s, VERLC_REF, b, PPO_REF_PRECOMPUTED, logp);
    if (rc == 0) rc = ppo_add_numbers(b, "ref_log_prob", logp);
    free(logp);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}
