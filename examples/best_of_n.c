/* best_of_n.c - best-of-n distillation (RAFT, arXiv 2304.06767): of n answers to a prompt
 * the policy learns the best one by heart, where it beats the worst.
 *
 *   best_of_n data.train_files=train.parquet actor_rollout_ref.model.path=DIR actor_rollout_ref.rollout.n=8 KEY=VALUE...
 *
 * The loss is -log p of the chosen answers: the policy gradient (gpg) with advantage 1. */
#include <stdlib.h>
#include <verlc.h>

static const char *const own[] = {"algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.policy_loss.loss_mode=gpg",
                                  "actor_rollout_ref.actor.use_kl_loss=False", NULL};

/* out: the best sample of each prompt that has a better and a worse one. */
static int64_t choose(struct verlc *v, const struct verlc_batch *b, struct verlc_batch *out) {
    struct verlc_column score, group;
    if (verlc_column(v, b, "score", &score) < 0 || verlc_column(v, b, "group", &group) < 0) return 0;
    int64_t *rows = malloc((size_t)(score.n + 1) * sizeof *rows), n = 0;
    for (int64_t lo = 0, hi; lo < score.n; lo = hi) { /* the samples of a prompt are neighbours */
        int64_t best = lo, worst = lo;
        for (hi = lo; hi < score.n && group.i64[hi] == group.i64[lo]; hi++) {
            if (score.f64[hi] > score.f64[best]) best = hi;
            if (score.f64[hi] < score.f64[worst]) worst = hi;
        }
        if (score.f64[best] > score.f64[worst]) rows[n++] = best;
    }
    verlc_select(v, b, rows, n, out);
    free(rows);
    return n;
}

int main(int argc, char **argv) {
    struct verlc *v = verlc_open(own, argc, argv);
    struct verlc_batch *b = verlc_batch_create(), *best = verlc_batch_create();
    while (verlc_begin_step(v)) {
        verlc_rollout(v, b);
        verlc_reward(v, b);
        if (choose(v, b, best) > 0) {
            verlc_log_probs(v, VERLC_ACTOR, best);
            verlc_add_column(v, best, "advantages", "responses", 1);
            verlc_update(v, VERLC_ACTOR, best);
        }
        verlc_end_step(v, b);
    }
    verlc_batch_free(b);
    verlc_batch_free(best);
    return verlc_close(v);
}
