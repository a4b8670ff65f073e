/* test_ppo_validate_config.c - verl's rules across keys, each with a command line that breaks it. */
#include "base/err.h"
#include "ppo/config.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define A "actor_rollout_ref.actor."
#define R "actor_rollout_ref.rollout."

/* The two command lines that the project must take. */
#define COMMON                                                                                                                 \
    "algorithm.adv_estimator=grpo", "data.train_files=/d/train.parquet", "data.val_files=/d/test.parquet",                     \
        "data.max_prompt_length=512", "data.max_response_length=1024", "data.filter_overlong_prompts=True",                    \
        "data.truncation='error'", A "optim.lr=1e-6", "actor_rollout_ref.model.use_remove_padding=True", A "use_kl_loss=True", \
        A "kl_loss_coef=0.001", A "kl_loss_type=low_var_kl", A "entropy_coeff=0",                                              \
        "actor_rollout_ref.model.enable_gradient_checkpointing=True", A "fsdp_config.param_offload=False",                     \
        A "fsdp_config.optimizer_offload=False", R "tensor_model_parallel_size=1", R "name=vllm",                              \
        "actor_rollout_ref.ref.fsdp_config.param_offload=True", "algorithm.use_kl_in_reward=False", "trainer.critic_warmup=0", \
        "trainer.n_gpus_per_node=1", "trainer.nnodes=1"
#define SEED_0                                                                                                                 \
    COMMON, "data.train_batch_size=16", "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct", A "ppo_mini_batch_size=16", \
        A "ppo_micro_batch_size_per_gpu=4", R "gpu_memory_utilization=0.7", R "n=5", R "log_prob_micro_batch_size_per_gpu=8",  \
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8", R "trace.backend=mlflow", R "trace.token2text=True",      \
        R "trace.max_samples_per_step_per_worker=2", "trainer.logger=[\"console\",\"mlflow\"]",                                \
        "trainer.project_name=verl_grpo_gsm8k", "trainer.experiment_name=qwen25_05b",                                          \
        "trainer.default_local_dir=/data/gsmk8/checkpoints", "trainer.save_freq=20", "trainer.test_freq=5",                    \
        "trainer.total_epochs=5"
#define SEED_2                                                                                                                    \
    COMMON, "data.train_batch_size=1024", "actor_rollout_ref.model.path=Qwen/Qwen3-1.7B", A "ppo_mini_batch_size=80",             \
        A "ppo_micro_batch_size_per_gpu=20", R "gpu_memory_utilization=0.6", R "n=3", R "log_prob_micro_batch_size_per_gpu=20",   \
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=20", "trainer.logger=['console']",                               \
        "trainer.project_name=verl_grpo_example_gsm8k", "trainer.experiment_name=qwen3_1_7b_function_rm", "trainer.save_freq=-1", \
        "trainer.test_freq=5", "trainer.total_epochs=15"

static int load_n(struct conf **c, const char *schema, const char *const *args) {
    char *argv[64];
    int n = 0;
    for (; args[n]; n++) argv[n] = (char *)args[n];
    return conf_load(c, schema, n, argv);
}
#define LOAD(c, ...) load_n((c), "ppo_trainer", (const char *const[]){__VA_ARGS__, NULL})

static int validate(const struct conf *c) {
    struct ppo_config k;
    TRY(ppo_config_fill(&k, c));
    ppo_config_sizes(&k);
    return ppo_validate_config(&k);
}

/* texts: pieces between '|'. */
static void message_has(const char *texts) {
    char *copy = xstrdup(texts), *save = NULL;
    for (char *t = strtok_r(copy, "|", &save); t; t = strtok_r(NULL, "|", &save))
        if (!strstr(err_msg(), t)) fail_msg("message: %s\nlacks: %s", err_msg(), t);
    free(copy);
}

static void test_seeds_pass(void **state) {
    (void)state;
    struct conf *c = NULL;
    assert_int_equal(LOAD(&c, SEED_0), 0);
    if (validate(c) < 0) fail_msg("%s", err_msg());
    conf_free(c);
    assert_int_equal(LOAD(&c, SEED_2), 0);
    if (validate(c) < 0) fail_msg("%s", err_msg());
    conf_free(c);
}

static void test_rules(void **state) {
    (void)state;
    static const struct {
        const char *args[3], *texts; /* texts NULL: passes */
    } cases[] = {
        {{"trainer.n_gpus_per_node=3"}, "real_train_batch_size|(80)|divisible|n_gpus_per_node|(3)"},
        {{A "ppo_micro_batch_size=4"}, "[actor_rollout_ref.actor] You have set both|ppo_micro_batch_size_per_gpu"},
        {{A "ppo_micro_batch_size_per_gpu=null"}, "[actor_rollout_ref.actor] Please set at least one of"},
        {{A "ppo_mini_batch_size=32"}, "data.train_batch_size (16) must be >= actor_rollout_ref.actor.ppo_mini_batch_size (32)"},
        {{A "ppo_micro_batch_size_per_gpu=null", A "ppo_micro_batch_size=5"}, "ppo_mini_batch_size (16) must be divisible by|(5)"},
        {{A "ppo_micro_batch_size_per_gpu=null", A "ppo_micro_batch_size=8"}, NULL},
        {{A "ppo_micro_batch_size_per_gpu=3"}, "(16) * actor_rollout_ref.rollout.n (5)|(80) must be divisible by|(3)"},
        {{A "ppo_micro_batch_size_per_gpu=3", A "use_dynamic_bsz=true"}, NULL},
        {{R "log_prob_micro_batch_size_per_gpu=null"}, "[actor_rollout_ref.rollout] Please set at least one of"},
        {{R "log_prob_micro_batch_size=8"}, "[actor_rollout_ref.rollout] You have set both"},
        {{"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=null"}, "[actor_rollout_ref.ref] Please set at least one of"},
        {{"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=null", A "use_kl_loss=false"}, NULL},
        {{R "mode=sync"}, "'sync' has been removed"},
        {{R "val_kwargs.do_sample=true", R "temperature=0"}, "greater than 0 when enabling do_sample"},
        {{"trainer.resume_mode=resume_path"}, "trainer.resume_from_path"},
        {{"trainer.resume_mode=resume_path", "trainer.resume_from_path=/c/global_step_3"}, NULL},
        {{"algorithm.adv_estimator=gae"}, "[critic] Please set at least one of 'critic.ppo_micro_batch_size'"},
        {{"algorithm.adv_estimator=gae", "critic.ppo_micro_batch_size_per_gpu=3"}, "critic.ppo_mini_batch_size|divisible"},
        {{"algorithm.adv_estimator=gae", "critic.ppo_micro_batch_size_per_gpu=4"}, NULL},
        {{"algorithm.use_kl_in_reward=true"}, NULL},
    };
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        const char *seed[] = {SEED_0, cases[k].args[0], cases[k].args[1], cases[k].args[2], NULL};
        struct conf *c = NULL;
        if (load_n(&c, "ppo_trainer", seed) < 0) fail_msg("%s: %s", cases[k].args[0], err_msg());
        const int rc = validate(c);
        if (!cases[k].texts && rc < 0) fail_msg("%s: %s", cases[k].args[0], err_msg());
        if (cases[k].texts && rc != ERR_INVAL) fail_msg("%s passes", cases[k].args[0]);
        if (cases[k].texts) message_has(cases[k].texts);
        conf_free(c);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_seeds_pass), cmocka_unit_test(test_rules)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
