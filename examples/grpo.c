/* grpo.c - GRPO (arXiv 2402.03300): n answers to each prompt, each judged against the
 * others of its prompt.
 *
 *   grpo data.train_files=train.parquet actor_rollout_ref.model.path=DIR KEY=VALUE...
 *
 * takes the keys of `verlc ppo` and gives its bits. */
#include <verlc.h>

static const char *const own[] = {"algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_kl_loss=True", NULL};

int main(int argc, char **argv) {
    struct verlc *v = verlc_open(own, argc, argv);
    struct verlc_batch *b = verlc_batch_create();
    while (verlc_begin_step(v)) {
        verlc_rollout(v, b);
        verlc_reward(v, b);
        verlc_log_probs(v, VERLC_ACTOR, b);
        verlc_log_probs(v, VERLC_REF, b);
        verlc_advantage(v, b);
        verlc_update(v, VERLC_ACTOR, b);
        verlc_end_step(v, b);
    }
    verlc_batch_free(b);
    return verlc_close(v);
}
