/* reward.c - from what scorers said to rewards: samples without a score, weights of data sources, scores on tokens.
 *
 * Invariant: an error is never a number (DESIGN 8). */
#include "train/ppo/stages.h"

#include "base/buf.h"
#include "base/err.h"

#include <math.h>
#include <stdlib.h>

static bool no_score(const struct batch_col *score, const struct batch_col *baseline, int64_t i) {
    return isnan(score->f64[i]) || (baseline && isnan(baseline->f64[i]));
}

static int drop_errors(const struct stage *s, struct batch *b) {
    struct batch_col *score, *group;
    TRY(batch_get(b, "score", BATCH_F64, &score));
    TRY(batch_get(b, "group", BATCH_I64, &group));
    const struct batch_col *baseline = batch_find(b, "reward_baselines"); /* without it a sample has no advantage */
    int64_t n_bad = 0, n_keep = 0;
    int64_t *keep = xmalloc((size_t)b->n_rows * sizeof *keep);
    for (int64_t i = 0; i < b->n_rows; i++) n_bad += no_score(score, baseline, i);
    metrics_set_i64(&s->run->metrics, n_bad, "reward/num_errors");
    for (int64_t i = 0; i < b->n_rows; i++) {
        bool drop = no_score(score, baseline, i);
        if (s->k->on_error == REWARD_DROP_GROUP) /* samples of a prompt are neighbours */
            for (int64_t j = 0; j < b->n_rows && !drop; j++) drop = group->i64[j] == group->i64[i] && no_score(score, baseline, j);
        if (!drop) keep[n_keep++] = i;
    }
    int rc = 0;
    if (n_bad > 0 && s->k->on_error == REWARD_STOP)
        rc = err_set(ERR_HELPER, __FILE__, __LINE__, "reward: %lld of %lld samples have no score and reward.on_error=stop",
                     (long long)n_bad, (long long)b->n_rows);
    else if (n_keep == 0)
        rc = err_set(ERR_HELPER, __FILE__, __LINE__,
                     "reward: none of the %lld samples of this step has a score; see the warnings above", (long long)b->n_rows);
    else if (n_keep < b->n_rows) {
        struct batch kept;
        rc = batch_select(&kept, b, keep, n_keep);
        if (rc == 0) {
            batch_free(b);
            *b = kept;
        }
    }
    free(keep);
    return rc;
}

static int weigh_sources(const struct stage *s, struct batch *b) {
    struct batch_col *score, *source;
    if (!json_object_size(s->k->source_weights)) return 0;
    TRY(batch_get(b, "score", BATCH_F64, &score));
    TRY(batch_get(b, s->k->reward_fn_key, BATCH_STR, &source));
    struct batch_col *baseline = batch_find(b, "reward_baselines");
    for (int64_t i = 0; i < b->n_rows; i++) {
        const json_t *w = json_object_get(s->k->source_weights, source->str[i]);
        if (w) score->f64[i] *= json_number_value(w);
        if (w && baseline) baseline->f64[i] *= json_number_value(w);
    }
    return 0;
}

int ppo_reward(const struct stage *s, struct batch *b) {
    double *level;
    TRY(drop_errors(s, b));
    TRY(weigh_sources(s, b));
    TRY(ppo_add_f64(b, "token_level_scores", "responses", &level));
    const struct batch_col *responses = batch_find(b, "responses"), *score = batch_find(b, "score");
    for (int64_t i = 0; i < b->n_rows; i++) level[responses->off[i + 1] - 1] = score->f64[i];
    return 0;
}
