/* validate_config.c - verl's rules across keys, which stop a run before it starts:
 * validate_config (verl/utils/config.py), ActorConfig, CriticConfig and
 * RolloutConfig (verl/workers/config).  Left out are the rules about GPU
 * engines and about what splits of a model divide: here no model is split.
 * Messages carry verl's key names, the values, and what to change. */
#include "ppo/config.h"

#include "base/err.h"
#include "base/log.h"

#include <string.h>

#define ACTOR "actor_rollout_ref.actor"
#define REF "actor_rollout_ref.ref"
#define ROLLOUT "actor_rollout_ref.rollout"

/* "exactly one of NAME and NAME_per_gpu" */
static int set_once(const char *section, const char *name, const struct micro_batch_keys *w) {
    if (!w->all && !w->each)
        FAIL(ERR_INVAL, "[%s] Please set at least one of '%s.%s' or '%s.%s_per_gpu'.", section, section, name, section, name);
    if (w->all && w->each)
        FAIL(ERR_INVAL,
             "[%s] You have set both '%s.%s' AND '%s.%s_per_gpu'. Please remove '%s.%s' because only '*_%s_per_gpu' is "
             "supported (the former is deprecated).",
             section, section, name, section, name, section, name, name);
    return 0;
}

/* "a (3) must be divisible by b (2)" */
static int divides(const char *what_a, int64_t a, const char *what_b, int64_t b) {
    if (a % b == 0) return 0;
    FAIL(ERR_INVAL, "%s (%lld) must be divisible by %s (%lld)", what_a, (long long)a, what_b, (long long)b);
}

/* Rules of the actor and, with the same names, of the critic; mini: prompts of a mini-batch, and its samples. */
static int check_updates(const struct ppo_config *k, const char *section, int64_t mini, int64_t samples,
                         const struct micro_batch_keys *w) {
    char key[128], what[256];
    const int64_t devices = rank_count_data_parallel(k->conf, &k->trainer.devices, section);
    const bool critic = w == &k->raw.critic_cut;
    if ((critic ? k->critic.context : k->actor.context) > 1 && (critic ? k->critic.grad_chunk : k->actor.grad_chunk) > 1)
        FAIL(ERR_INVAL, "%s.grad_chunk and %s.ulysses_sequence_parallel_size both say how gradients are summed; leave one out",
             section, section);
    if (w->dynamic) return 0;
    TRY(set_once(section, "ppo_micro_batch_size", w));
    if (k->data.train_batch_size < mini)
        FAIL(ERR_INVAL, "data.train_batch_size (%lld) must be >= %s.ppo_mini_batch_size (%lld)",
             (long long)k->data.train_batch_size, section, (long long)mini);
    snprintf(key, sizeof key, "%s.ppo_micro_batch_size", section);
    if (w->all) {
        snprintf(what, sizeof what, "%s.ppo_mini_batch_size", section);
        TRY(divides(what, mini, key, w->all));
        if (w->all < devices) FAIL(ERR_INVAL, "%s (%lld) must be >= n_gpus (%lld)", key, (long long)w->all, (long long)devices);
    }
    const int64_t share = samples / devices; /* samples of a mini-batch on one device */
    snprintf(what, sizeof what, "%s.ppo_mini_batch_size (%lld) * " ROLLOUT ".n (%lld) / n_gpus (%lld) =", section, (long long)mini,
             (long long)k->rollout.train.n, (long long)devices);
    if (share == 0) FAIL(ERR_INVAL, "%s 0: a mini-batch needs a sample for every device", what);
    snprintf(key, sizeof key, "%s.ppo_micro_batch_size_per_gpu", section);
    return w->each ? divides(what, share, key, w->each) : 0;
}

static int check_actor(const struct ppo_config *k) {
    if (!k->raw.update_cut.dynamic)
        TRY(divides("real_train_batch_size = data.train_batch_size * " ROLLOUT ".n", k->sizes.samples,
                    "minimal possible batch size = trainer.n_gpus_per_node * trainer.nnodes",
                    rank_count_data_parallel(k->conf, &k->trainer.devices, ACTOR)));
    return check_updates(k, ACTOR, k->actor.mini_batch_size, k->sizes.mini_batch, &k->raw.update_cut);
}

/* Sampling lengths and modes. */
static int check_rollout(const struct ppo_config *k) {
    if (k->trainer.run.trace.backend && strcmp(k->trainer.run.trace.backend, "mlflow") != 0)
        FAIL(ERR_INVAL, ROLLOUT ".trace.backend=%s is not supported: its client works with W&B's servers alone; use mlflow",
             k->trainer.run.trace.backend);
    const json_t *mode, *do_sample;
    TRY(conf_json(k->conf, ROLLOUT ".mode", &mode)); /* keys that are noted, whose values may still be impossible */
    TRY(conf_json(k->conf, ROLLOUT ".val_kwargs.do_sample", &do_sample));
    if (json_is_string(mode) && strcmp(json_string_value(mode), "sync") == 0)
        FAIL(ERR_INVAL, "Rollout mode 'sync' has been removed. Please set `" ROLLOUT ".mode=async` or remove the mode "
                        "setting entirely.");
    if (!json_is_true(do_sample)) return 0;
    if (!(k->rollout.train.temperature > 0))
        FAIL(ERR_INVAL,
             "validation gen temperature should be greater than 0 when enabling do_sample "
             "(" ROLLOUT ".temperature=%g, val_kwargs.do_sample=true)",
             k->rollout.train.temperature);
    if (k->rollout.val.temperature <= 0)
        log_note(ROLLOUT ".val_kwargs.do_sample=true has no effect with val_kwargs.temperature=0, which is greedy");
    return 0;
}

int ppo_validate_critic_config(const struct ppo_config *k) {
    return check_updates(k, "critic", k->critic.mini_batch_size, k->sizes.critic_mini_batch, &k->raw.critic_cut);
}

static int check_grader(const struct ppo_config *k) {
    if (!k->reward.args.grader) return 0;
    if (k->reward.args.path || k->rm.enable)
        FAIL(ERR_INVAL, "reward.grader has no effect with %s; give one of them",
             k->reward.args.path ? "reward.custom_reward_function.path" : "reward.reward_model.enable=True");
    return reward_check_grader(k->reward.args.grader);
}

int ppo_validate_config(const struct ppo_config *k) {
    TRY(check_grader(k));
    const bool gae = strcmp(k->algorithm.adv_estimator, "gae") == 0, by_samples = !k->raw.update_cut.dynamic;
    TRY(check_actor(k));
    if (k->algorithm.use_kl_in_reward && k->actor.use_kl_loss)
        log_warn("You have both enabled in-reward kl and kl loss: the same penalty counts twice, in the rewards with "
                 "algorithm.kl_ctrl.kl_coef and in the loss with " ACTOR ".kl_loss_coef; one of them is usual");
    if (k->data.val_batch_size)
        log_note("data.val_batch_size: verl passes the validation data as one batch; here it bounds a batch");
    if (by_samples && (k->algorithm.use_kl_in_reward || k->actor.use_kl_loss) && !k->raw.ref_cut.dynamic)
        TRY(set_once(REF, "log_prob_micro_batch_size", &k->raw.ref_cut));
    if (by_samples && !k->raw.logp_cut.dynamic) TRY(set_once(ROLLOUT, "log_prob_micro_batch_size", &k->raw.logp_cut));
    TRY(check_rollout(k));
    if (strcmp(k->trainer.run.resume_mode, "resume_path") == 0 &&
        (!k->trainer.run.resume_from || !strstr(k->trainer.run.resume_from, "global_step_")))
        FAIL(ERR_INVAL, "trainer.resume_mode=resume_path needs trainer.resume_from_path=.../global_step_N");
    const bool critic = conf_is_null(k->conf, "critic.enable") ? gae : k->critic.enable;
    return critic ? ppo_validate_critic_config(k) : 0;
}
