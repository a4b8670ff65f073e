/* test_cmd_config.c - a value that is refused is refused by the name of its key, in ppo and in sft; what null and unset keys
 * come to; which words a type has. */
#include "ppo/config.h"
#include "sft/sft.h"

#include "base/err.h"
#include "base/file.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#define ACTOR "actor_rollout_ref.actor."
#define ROLLOUT "actor_rollout_ref.rollout."
#define MODEL "actor_rollout_ref.model."
#define CORR "algorithm.rollout_correction."
#define DISTILL "distillation.distillation_loss."
#define RM "reward.reward_model."

static char dir[] = "/tmp/verlc-config-XXXXXX";

static int make_dir(void **state) {
    (void)state;
    return mkdtemp(dir) ? 0 : -1;
}
static int remove_dir(void **state) {
    (void)state;
    return rmdir(dir);
}

/* Loads the schema with `path`=dir, the given arguments over the fixed ones. */
static int load(struct conf **c, const char *schema, const char *path, const char *const *fixed, const char *const *args) {
    char *argv[48], *model = xasprintf("%s=%s", path, dir);
    int n = 0;
    argv[n++] = model;
    for (; *fixed; fixed++) argv[n++] = (char *)(uintptr_t)*fixed;
    for (; *args; args++) argv[n++] = (char *)(uintptr_t)*args;
    const int rc = conf_load(c, schema, n, argv);
    free(model);
    return rc;
}

static int read_ppo(const struct ppo_config **k, const char *const *args, struct conf **c) {
    static const char *const fixed[] = {"algorithm.adv_estimator=grpo",
                                        "data.train_batch_size=8",
                                        ACTOR "ppo_mini_batch_size=8",
                                        ACTOR "ppo_micro_batch_size_per_gpu=4",
                                        ROLLOUT "n=2",
                                        ROLLOUT "log_prob_micro_batch_size_per_gpu=4",
                                        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
                                        ROLLOUT "name=verlc",
                                        NULL};
    *k = NULL;
    TRY(load(c, "ppo_trainer", MODEL "path", fixed, args));
    return ppo_config_read(k, *c, PPO_PLAN);
}

static int read_sft(struct supervised_config *k, const char *const *args, struct conf **c) {
    static const char *const fixed[] = {"data.train_files=x.jsonl", NULL};
    *k = (struct supervised_config){0};
    TRY(load(c, "sft_trainer_engine", "model.path", fixed, args));
    return supervised_config_read(k, &sft_program, *c);
}

/* The arguments are refused as a configuration error that names the key of the last one, or `key`. */
struct refusal {
    const char *args[6], *key;
};

/* By its full path, or as "SECTION: ... LEAF" where the section's reader says it. */
static bool names(const char *message, const char *key) {
    const char *dot = strrchr(key, '.');
    char *section = xasprintf("%.*s: ", (int)(dot - key), key);
    const char *at = strstr(message, section);
    const bool ok = strstr(message, key) || (at && strstr(at, dot + 1));
    free(section);
    return ok;
}

static void check(const struct refusal *r, int rc) {
    int last = 0;
    while (last < 5 && r->args[last + 1]) last++;
    const char *arg = r->args[last] + strspn(r->args[last], "+~");
    char *key = r->key ? xstrdup(r->key) : xstrndup(arg, strcspn(arg, "="));
    if (rc >= 0) fail_msg("%s is not refused", r->args[last]);
    if (rc != ERR_INVAL && rc != ERR_INPUT) fail_msg("%s: error %d: %s", r->args[last], rc, err_msg());
    if (!names(err_msg(), key)) fail_msg("%s: the message does not name %s: %s", r->args[last], key, err_msg());
    free(key);
}

static void test_ppo_refusals(void **state) {
    (void)state;
#define GAE "algorithm.adv_estimator=gae", "critic.model.path=/", "critic.ppo_micro_batch_size_per_gpu=4"
#define TEACHER "distillation.enabled=True", "distillation.teacher_models.teacher_model.model_path=/"
    static const struct refusal cases[] = {
        {{ACTOR "kl_loss_type=k9"}, NULL},
        {{"algorithm.kl_penalty=k9"}, NULL},
        {{"algorithm.kl_ctrl.type=wild"}, NULL},
        {{"algorithm.adv_estimator=gpro"}, NULL},
        {{"algorithm.adv_estimator=gdpo"}, "algorithm.gdpo_reward_keys"},
        {{"algorithm.adv_estimator=gdpo", "+algorithm.gdpo_reward_keys=[a]", "+algorithm.gdpo_reward_weights=[1,2]"}, NULL},
        {{"+algorithm.adv_kwargs={a: 1}"}, NULL},
        {{"algorithm.use_pf_ppo=True"}, NULL},
        {{GAE, "algorithm.use_pf_ppo=True", "algorithm.pf_ppo.reweight_method=best"}, "pf_ppo.reweight_method"},
        {{GAE, "critic.loss_agg_mode=mean"}, NULL},
        {{GAE, "critic.optim.betas=[0.9]"}, NULL},
        {{GAE, "critic.enable=False"}, NULL},
        {{"trainer.critic_warmup=3"}, NULL},
        {{"algorithm.adv_estimator=gae", "critic.ppo_micro_batch_size_per_gpu=4"}, "critic.model.path"},
        {{"algorithm.adv_estimator=gae", "critic.ppo_micro_batch_size_per_gpu=4", "critic.model.path=/no/such"}, NULL},
        {{ACTOR "policy_loss.loss_mode=vanila"}, NULL},
        {{"+" ACTOR "policy_loss.kwargs={a: 1}"}, NULL},
        {{ACTOR "loss_agg_mode=mean"}, NULL},
        {{ACTOR "optim.optimizer=Lion"}, NULL},
        {{ACTOR "optim.betas=[0.9,1.5]"}, NULL},
        {{ACTOR "optim.lr_scheduler_type=step"}, NULL},
        {{ACTOR "optim.override_optimizer_config={nesterov: True}"}, NULL},
        {{ACTOR "optim.optimizer=NAdam"}, ACTOR "optim.optimizer"},
        {{ACTOR "optim.optimizer=RMSprop", "+" ACTOR "optim.override_optimizer_config={alpha: 1}"}, "alpha"},
        {{ACTOR "optim.optimizer=RAdam", "+" ACTOR "optim.override_optimizer_config={amsgrad: True}"}, "RAdam has no such option"},
        {{ACTOR "optim.optimizer=Muon", "+" ACTOR "optim.override_optimizer_config={maximize: True}"}, "Muon has no such option"},
        {{ACTOR "optim.optimizer=Muon", "+" ACTOR "optim.override_optimizer_config={adjust_lr_fn: x}"},
         ACTOR "optim.override_optimizer_config"},
        {{ACTOR "fsdp_config.dtype=fp8"}, NULL},
        {{ROLLOUT "dtype=half"}, NULL},
        {{ROLLOUT "temperature=0"}, NULL},
        {{ROLLOUT "mode=sync"}, NULL},
        {{CORR "rollout_is=tokens"}, NULL},
        {{CORR "rollout_is=token", CORR "rollout_is_threshold=x"}, NULL},
        {{CORR "rollout_rs=token_k9"}, NULL},
        {{CORR "bypass_mode=True", CORR "loss_type=dpo"}, NULL},
        {{"algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=seq_final_reward"}, NULL},
        {{"algorithm.filter_groups.enable=True", "algorithm.filter_groups.max_num_gen_batches=1", "data.gen_batch_size=2"}, NULL},
        {{"+data.sampler.name=random"}, NULL},
        {{"+data.sampler.name=curriculum"}, "data.sampler.column"},
        {{"data.truncation=centre"}, NULL},
        {{MODEL "path=/no/such/dir"}, NULL},
        {{MODEL "lora_rank=-1"}, NULL},
        {{"+" MODEL "quantization=nf4"}, NULL},
        {{MODEL "lora_adapter_path=/no/such"}, NULL},
        {{TEACHER, DISTILL "loss_mode=k9"}, NULL},
        {{TEACHER, DISTILL "loss_mode=forward_kl_topk", DISTILL "topk=null"}, NULL},
        {{TEACHER, DISTILL "loss_mode=forward_kl_topk", DISTILL "topk=0"}, NULL},
        {{TEACHER, DISTILL "policy_loss_mode=gspo"}, NULL},
        {{"distillation.enabled=True"}, "distillation.teacher_models.teacher_model.model_path"},
        {{TEACHER, "+distillation.teacher_models.second.model_path=/"}, "distillation.teacher_models.second"},
        {{"reward.reward_manager.name=mine"}, NULL},
        {{"reward.reward_manager.source=importlib"}, "reward.reward_manager.module.path"},
        {{"+reward.reward_model.router_address=localhost:1"}, "reward.custom_reward_function.path"},
        {{"reward.on_error=ignore"}, NULL},
        {{"+reward.source_weights={a: b}"}, "reward.source_weights.a"},
        {{"reward.reward_manager.name=dapo", "+reward.reward_kwargs.overlong_buffer_cfg={enable: True, len: x}"}, NULL},
        {{"+reward.reward_kwargs.max_len=3"}, NULL},
        {{RM "enable=True"}, RM "model_path"},
        {{RM "enable=True", RM "model_path=/no/such"}, NULL},
        {{"+" RM "template=mine"}, NULL},
        {{"trainer.device_memory_limit=20XiB"}, NULL},
        {{"trainer.threads=5000000000"}, NULL},
        {{"trainer.recompute=some"}, NULL},
        {{"trainer.resume_mode=resume_path"}, "trainer.resume_from_path"},
        {{"trainer.profile_steps=[x]"}, NULL},
        {{"global_profiler.steps=3"}, NULL},
        {{"trainer.nnodes=9223372036854775807"}, NULL},
        {{"+trainer.early_stopping.mode=high"}, NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct ppo_config *k;
        struct conf *c = NULL;
        check(&cases[i], read_ppo(&k, cases[i].args, &c));
        ppo_config_free(k);
        conf_free(c);
    }
}

static void test_sft_refusals(void **state) {
    (void)state;
    static const struct refusal cases[] = {
        {{"engine.dtype=fp8"}, NULL},
        {{"data.truncation=middle"}, NULL},
        {{"optim.optimizer=Lion"}, NULL},
        {{"optim.betas=[0.9,0.95,0.99]"}, NULL},
        {{"optim.override_optimizer_config={beta: 1}"}, NULL},
        {{"+data.prompt_key=question"}, "data.response_key"},
        {{"+data.sampler.name=weighted"}, "data.sampler.weights"},
        {{"model.path=/no/such/dir"}, NULL},
        {{"model.lora_adapter_path=/no/such"}, NULL},
        {{"trainer.save_freq=often"}, NULL},
        {{"trainer.device_memory_limit=-3"}, NULL},
        {{"trainer.n_gpus_per_node=3"}, NULL},
        {{"trainer.resume_mode=perhaps"}, NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct supervised_config k;
        struct conf *c = NULL;
        check(&cases[i], read_sft(&k, cases[i].args, &c));
        supervised_config_free(&k);
        conf_free(c);
    }
}

#define PPO(k, c, ...) assert_int_equal(read_ppo(&(k), (const char *const[]){__VA_ARGS__, NULL}, &(c)), 0)

static void done(const struct ppo_config *k, struct conf *c) {
    ppo_config_free(k);
    conf_free(c);
}

/* data.seed is the order's alone; a null data_loader_seed is trainer.seed. */
static void test_seeds(void **state) {
    (void)state;
    const struct ppo_config *k;
    struct conf *c = NULL;
    PPO(k, c, "trainer.seed=7");
    assert_true(k->trainer.seed == 7 && k->data.seed == 7 && k->actor.seed == 42 && k->actor.policy.seed == 7);
    done(k, c);
    PPO(k, c, "trainer.seed=7", "data.seed=9", ACTOR "data_loader_seed=null");
    assert_true(k->trainer.seed == 7 && k->data.seed == 9 && k->actor.seed == 7 && k->actor.policy.seed == 7);
    done(k, c);
    PPO(k, c, "trainer.seed=7", "algorithm.adv_estimator=gae", "critic.model.path=/", "critic.ppo_micro_batch_size_per_gpu=4",
        "critic.data_loader_seed=null");
    assert_true(k->critic.seed == 7);
    done(k, c);
}

/* The same names of dtypes everywhere; what decides between a key and an older one. */
static void test_choices(void **state) {
    (void)state;
    static const struct {
        const char *word;
        enum dtype dt;
    } names[] = {{"bfloat16", DT_BF16}, {"bf16", DT_BF16}, {"auto", DT_BF16},
                 {"float32", DT_F32},   {"fp32", DT_F32},  {"float", DT_F32}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const struct ppo_config *k;
        struct supervised_config s;
        struct conf *c = NULL;
        char *arg[3] = {xasprintf(ACTOR "fsdp_config.dtype=%s", names[i].word), xasprintf(ROLLOUT "dtype=%s", names[i].word),
                        xasprintf("engine.dtype=%s", names[i].word)};
        PPO(k, c, arg[0]);
        assert_int_equal(k->model.act, names[i].dt);
        done(k, c);
        PPO(k, c, arg[1]);
        assert_int_equal(k->model.act, names[i].dt);
        done(k, c);
        assert_int_equal(read_sft(&s, (const char *const[]){arg[2], NULL}, &c), 0);
        assert_int_equal(s.model.act, names[i].dt);
        supervised_config_free(&s);
        conf_free(c);
        for (int j = 0; j < 3; j++) free(arg[j]);
    }
    const struct ppo_config *k;
    struct conf *c = NULL;
    PPO(k, c, ACTOR "optim.clip_grad=0.5", "trainer.device_memory_limit=1.5GiB", "global_profiler.steps=[1,3]");
    assert_true(k->actor.optim.clip == 0.5 && k->trainer.memory_limit == (int64_t)3 << 29);
    assert_true(k->output.n_profile_steps == 2 && k->output.profile_steps[1] == 3 && k->model.recompute == RECOMPUTE_AUTO);
    done(k, c);
    PPO(k, c, ACTOR "optim.clip_grad=0.5", ACTOR "grad_clip=2", "trainer.profile_steps=[5]", "global_profiler.steps=[1,3]",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False", ACTOR "fsdp_config.optimizer_offload=True");
    assert_true(k->actor.optim.clip == 2 && k->output.n_profile_steps == 1 && k->output.profile_steps[0] == 5 &&
                k->model.recompute == RECOMPUTE_NONE);
    assert_true(k->actor.optim.host_state && k->actor.optim.host_master);
    done(k, c);
    PPO(k, c, "trainer.recompute=mlp", ACTOR "use_dynamic_bsz=True", ACTOR "fsdp_config.param_offload=True");
    assert_true(k->model.recompute == RECOMPUTE_MLP && k->actor.update_cut.max_rows == 16384 && k->actor.update_cut.max_seqs == 0);
    assert_true(!k->actor.optim.host_state && k->actor.optim.host_master && k->trainer.run.max_bad_steps == 3 &&
                k->trainer.run.early_stop.patience == 3);
    done(k, c);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_ppo_refusals), cmocka_unit_test(test_sft_refusals),
                                       cmocka_unit_test(test_seeds), cmocka_unit_test(test_choices)};
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
