/* validate_config.c - verl's rules across keys, which stop a run before it starts:
 * validate_config (verl/utils/config.py), ActorConfig, CriticConfig and
 * RolloutConfig (verl/workers/config).  Left out are the rules about GPU
 * engines and splits over devices, which the table refuses key by key.
 * Messages carry verl's key names, the values, and what to change. */
#include "train/ppo/validate_config.h"

#include "base/err.h"
#include "base/log.h"

#include <string.h>

#define ACTOR "actor_rollout_ref.actor"
#define REF "actor_rollout_ref.ref"
#define ROLLOUT "actor_rollout_ref.rollout"

struct batches { /* prompts, samples, devices */
    int64_t train, mini, n, n_gpus;
    bool dynamic;
};

/* trainer.n_gpus_per_node defaults to 8; only a number that the user gave is a promise. */
static int count_devices(const struct conf *c, int64_t *out) {
    int64_t per_node, nodes;
    TRY(conf_i64(c, "trainer.n_gpus_per_node", &per_node));
    TRY(conf_i64(c, "trainer.nnodes", &nodes));
    if (!conf_is_set(c, "trainer.n_gpus_per_node")) per_node = 1;
    if (__builtin_mul_overflow(per_node, nodes, out))
        FAIL(ERR_INVAL, "trainer.nnodes * trainer.n_gpus_per_node does not fit in 64 bits");
    return 0;
}

/* "exactly one of NAME and NAME_per_gpu" */
static int set_once(const struct conf *c, const char *section, const char *name) {
    char key[128], per_gpu[144];
    snprintf(key, sizeof key, "%s.%s", section, name);
    snprintf(per_gpu, sizeof per_gpu, "%s_per_gpu", key);
    const bool a = !conf_is_null(c, key), b = !conf_is_null(c, per_gpu);
    if (!a && !b) FAIL(ERR_INVAL, "[%s] Please set at least one of '%s' or '%s'.", section, key, per_gpu);
    if (a && b)
        FAIL(ERR_INVAL,
             "[%s] You have set both '%s' AND '%s'. Please remove '%s' because only '*_%s_per_gpu' is "
             "supported (the former is deprecated).",
             section, key, per_gpu, key, name);
    return 0;
}

/* "a (3) must be divisible by b (2)" */
static int divides(const char *what_a, int64_t a, const char *what_b, int64_t b) {
    if (a % b == 0) return 0;
    FAIL(ERR_INVAL, "%s (%lld) must be divisible by %s (%lld)", what_a, (long long)a, what_b, (long long)b);
}

/* Rules of the actor and, with the same names, of the critic. */
static int check_updates(const struct conf *c, const char *section, const struct batches *b) {
    char key[128], what[256];
    int64_t micro = 0, micro_gpu = 0;
    if (b->dynamic) return 0;
    TRY(set_once(c, section, "ppo_micro_batch_size"));
    if (b->train < b->mini)
        FAIL(ERR_INVAL, "data.train_batch_size (%lld) must be >= %s.ppo_mini_batch_size (%lld)", (long long)b->train, section,
             (long long)b->mini);
    snprintf(key, sizeof key, "%s.ppo_micro_batch_size", section);
    TRY(conf_i64_opt(c, key, &micro));
    if (micro) {
        snprintf(what, sizeof what, "%s.ppo_mini_batch_size", section);
        TRY(divides(what, b->mini, key, micro));
        if (micro < b->n_gpus) FAIL(ERR_INVAL, "%s (%lld) must be >= n_gpus (%lld)", key, (long long)micro, (long long)b->n_gpus);
    }
    snprintf(key, sizeof key, "%s.ppo_micro_batch_size_per_gpu", section);
    TRY(conf_i64_opt(c, key, &micro_gpu));
    int64_t samples;
    if (__builtin_mul_overflow(b->mini, b->n, &samples))
        FAIL(ERR_INVAL, "%s.ppo_mini_batch_size * " ROLLOUT ".n does not fit in 64 bits", section);
    const int64_t share = samples / b->n_gpus; /* samples of a mini-batch on one device */
    snprintf(what, sizeof what, "%s.ppo_mini_batch_size (%lld) * " ROLLOUT ".n (%lld) / n_gpus (%lld) =", section,
             (long long)b->mini, (long long)b->n, (long long)b->n_gpus);
    if (share == 0) FAIL(ERR_INVAL, "%s 0: a mini-batch needs a sample for every device", what);
    return micro_gpu ? divides(what, share, key, micro_gpu) : 0;
}

/* A section's updates: "actor_rollout_ref.actor", "critic". */
static int read_batches(const struct conf *c, const char *section, struct batches *b) {
    char key[128];
    TRY(conf_i64(c, "data.train_batch_size", &b->train));
    TRY(conf_i64(c, ROLLOUT ".n", &b->n));
    snprintf(key, sizeof key, "%s.ppo_mini_batch_size", section);
    TRY(conf_i64(c, key, &b->mini));
    snprintf(key, sizeof key, "%s.use_dynamic_bsz", section);
    TRY(conf_bool(c, key, &b->dynamic));
    return count_devices(c, &b->n_gpus);
}

static int check_actor(const struct conf *c, struct batches *b) {
    TRY(read_batches(c, ACTOR, b));
    int64_t samples;
    if (__builtin_mul_overflow(b->train, b->n, &samples))
        FAIL(ERR_INVAL, "data.train_batch_size * " ROLLOUT ".n does not fit in 64 bits");
    if (!b->dynamic)
        TRY(divides("real_train_batch_size = data.train_batch_size * " ROLLOUT ".n", samples,
                    "minimal possible batch size = trainer.n_gpus_per_node * trainer.nnodes", b->n_gpus));
    return check_updates(c, ACTOR, b);
}

/* Sampling lengths and modes. */
static int check_rollout(const struct conf *c) {
    const char *mode;
    double temperature, val_temperature;
    bool do_sample;
    TRY(conf_str(c, ROLLOUT ".mode", &mode));
    if (strcmp(mode, "sync") == 0)
        FAIL(ERR_INVAL, "Rollout mode 'sync' has been removed. Please set `" ROLLOUT ".mode=async` or remove the mode "
                        "setting entirely.");
    TRY(conf_bool(c, ROLLOUT ".val_kwargs.do_sample", &do_sample));
    TRY(conf_f64(c, ROLLOUT ".temperature", &temperature));
    TRY(conf_f64(c, ROLLOUT ".val_kwargs.temperature", &val_temperature));
    if (do_sample && !(temperature > 0))
        FAIL(ERR_INVAL,
             "validation gen temperature should be greater than 0 when enabling do_sample "
             "(" ROLLOUT ".temperature=%g, val_kwargs.do_sample=true)",
             temperature);
    if (do_sample && val_temperature <= 0)
        log_note(ROLLOUT ".val_kwargs.do_sample=true has no effect with val_kwargs.temperature=0, which is greedy");
    return 0;
}

static int check_schedule(const struct conf *c) {
    int64_t steps = 0;
    const char *mode, *from = NULL;
    TRY(conf_i64_opt(c, "trainer.total_training_steps", &steps));
    TRY(conf_str(c, "trainer.resume_mode", &mode));
    TRY(conf_str_opt(c, "trainer.resume_from_path", &from));
    if (strcmp(mode, "resume_path") == 0 && (!from || !strstr(from, "global_step_")))
        FAIL(ERR_INVAL, "trainer.resume_mode=resume_path needs trainer.resume_from_path=.../global_step_N");
    return 0;
}

static int check_algorithm(const struct conf *c, bool *reference, bool *critic) {
    bool in_reward, in_loss;
    const char *estimator;
    TRY(conf_bool(c, "algorithm.use_kl_in_reward", &in_reward));
    TRY(conf_bool(c, ACTOR ".use_kl_loss", &in_loss));
    TRY(conf_str(c, "algorithm.adv_estimator", &estimator));
    if (in_reward && in_loss)
        log_warn("You have both enabled in-reward kl and kl loss: the same penalty counts twice, in the rewards with "
                 "algorithm.kl_ctrl.kl_coef and in the loss with " ACTOR ".kl_loss_coef; one of them is usual");
    if (!conf_is_null(c, "data.val_batch_size"))
        log_note("data.val_batch_size: verl hands the validation data over whole; here it bounds a batch");
    *reference = in_reward || in_loss;
    *critic = strcmp(estimator, "gae") == 0;
    TRY(conf_bool_opt(c, "critic.enable", critic));
    return 0;
}

int ppo_validate_critic_config(const struct conf *c) {
    struct batches b = {0};
    TRY(read_batches(c, "critic", &b));
    return check_updates(c, "critic", &b);
}

int ppo_validate_config(const struct conf *c) {
    struct batches b = {0};
    bool reference = false, critic = false, ref_dynamic, old_dynamic;
    TRY(conf_check(c));
    TRY(check_actor(c, &b));
    TRY(check_algorithm(c, &reference, &critic));
    TRY(conf_bool(c, REF ".log_prob_use_dynamic_bsz", &ref_dynamic));
    TRY(conf_bool(c, ROLLOUT ".log_prob_use_dynamic_bsz", &old_dynamic));
    if (!b.dynamic && reference && !ref_dynamic) TRY(set_once(c, REF, "log_prob_micro_batch_size"));
    if (!b.dynamic && !old_dynamic) TRY(set_once(c, ROLLOUT, "log_prob_micro_batch_size"));
    TRY(check_rollout(c));
    TRY(check_schedule(c));
    return critic ? ppo_validate_critic_config(c) : 0;
}
