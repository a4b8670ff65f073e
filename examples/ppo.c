/* ppo.c - PPO (arXiv 1707.06347) with a critic: generalised advantage estimation
 * (arXiv 1506.02438) on its values, then both learn.
 *
 *   ppo data.train_files=train.parquet actor_rollout_ref.model.path=DIR critic.model.path=DIR KEY=VALUE...
 */
#include <verlc.h>

static const char *const own[] = {"algorithm.adv_estimator=gae", NULL};

int main(int argc, char **argv) {
    struct verlc *v = verlc_open(own, argc, argv);
    struct verlc_batch *b = verlc_batch_create();
    while (verlc_begin_step(v)) {
        verlc_rollout(v, b);
        verlc_reward(v, b);
        verlc_log_probs(v, VERLC_ACTOR, b);
        if (verlc_has(v, VERLC_REF)) verlc_log_probs(v, VERLC_REF, b);
        verlc_values(v, b);
        verlc_advantage(v, b);
        verlc_update(v, VERLC_CRITIC, b);
        verlc_update(v, VERLC_ACTOR, b); /* waits for trainer.critic_warmup */
        verlc_end_step(v, b);
    }
    verlc_batch_free(b);
    return verlc_close(v);
}
