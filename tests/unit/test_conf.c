/* test_conf.c - the configuration: the table itself, refusals and their
 * messages, types and ranges, statuses, older names.
 * What values mean in Hydra's grammar is tested against Hydra in
 * golden/test_conf_hydra.c. */
#include "conf/conf_int.h"
#include "base/err.h"
#include "base/encoding/number.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#define A "actor_rollout_ref.actor."
#define R "actor_rollout_ref.rollout."

static int load_n(struct conf **c, const char *schema, const char *const *args) {
    char *argv[64];
    int n = 0;
    for (; args[n]; n++) argv[n] = (char *)args[n];
    return conf_load(c, schema, n, argv);
}
#define LOAD(c, ...) load_n((c), "ppo_trainer", (const char *const[]){__VA_ARGS__, NULL})

/* Loading fails as a configuration error whose message holds each of the texts. */
#define REFUSED(texts, ...)                                        \
    do {                                                           \
        struct conf *refused_ = NULL;                              \
        assert_int_equal(LOAD(&refused_, __VA_ARGS__), ERR_INVAL); \
        assert_null(refused_);                                     \
        message_has(texts);                                        \
    } while (0)

/* texts: pieces between '|'. */
static void message_has(const char *texts) {
    char *copy = xstrdup(texts), *save = NULL;
    for (char *t = strtok_r(copy, "|", &save); t; t = strtok_r(NULL, "|", &save))
        if (!strstr(err_msg(), t)) fail_msg("message: %s\nlacks: %s", err_msg(), t);
    free(copy);
}

static const char *text_of(const struct conf *c, const char *key) {
    const struct conf_node *v = conf__node_at(c->tree, key);
    if (!v || v->kind == CONF_LIST || v->kind == CONF_DICT) fail_msg("%s has no text", key);
    return v->s;
}

/* ---- the table ---- */

static void test_table(void **state) {
    (void)state;
    for (const char *const *s = conf_schemas(); *s; s++) {
        struct conf_table t;
        struct conf_node *defaults = NULL, *resolved = NULL;
        assert_int_equal(conf__table_open(&t, *s), 0);
        if (conf__table_defaults(&defaults, &t) < 0) fail_msg("%s: %s", *s, err_msg());
        if (conf__resolve(&resolved, defaults) < 0) fail_msg("%s: %s", *s, err_msg());
        for (int64_t k = 0; k < t.n; k++) {
            const struct conf_key *row = &t.rows[k];
            if (!conf__type_valid(row->type)) fail_msg("%s: '%s' is no type", row->path, row->type);
            if (row->status == CONF_MOVED && !conf__table_owner(&t, row->text)) /* a key, or in a dict that is one */
                fail_msg("%s: its new name %s is no key", row->path, row->text);
            assert_true(strlen(row->text) >= 4);
            const struct conf_node *v = conf__node_at(resolved, row->path);
            if ((v != NULL) != (row->def != NULL)) fail_msg("%s: %s", row->path, v ? "absent, yet there" : "no default");
            if (v && !conf__node_missing(v) && !conf__type_ok(row->type, v))
                fail_msg("%s: the default %s is no %s", row->path, row->def, row->type);
            struct conf_node *other = NULL;
            if (row->other) assert_int_equal(conf__parse_value(&other, row->other, row->path), 0);
            if (other && !conf__type_ok(row->type, other)) fail_msg("%s: null means %s, no %s", row->path, row->other, row->type);
            conf__node_free(other);
        }
        conf__node_free(defaults);
        conf__node_free(resolved);
        conf__table_free(&t);
    }
}

static void test_types(void **state) {
    (void)state;
    static const struct {
        const char *type, *value;
        bool ok;
    } cases[] = {
        {"int", "3", true},
        {"int", "3.0", false},
        {"int", "true", false},
        {"int", "'3'", false},
        {"int", "null", false},
        {"int", "9007199254740992", true}, /* without an interval: what a double holds exactly */
        {"int", "9007199254740993", false},
        {"int[1,2^24]", "1", true},
        {"int[1,2^24]", "0", false},
        {"int[1,2^24]", "16777216", true},
        {"int[1,2^24]", "16777217", false},
        {"int[1,2^24]|null", "null", true},
        {"int[-2^62,2^62]", "-4611686018427387904", true},
        {"int[-2^62,2^62]", "-4611686018427387905", false}, /* which no double tells from the bound */
        {"int[-2^63,2^63)", "9223372036854775807", true},
        {"float", "3", true},
        {"float", "1e-3", true},
        {"float", "1e308", true},
        {"float", "inf", false},
        {"float", "-inf", false},
        {"float", "nan", false},
        {"float[0,inf)", "nan", false},
        {"float[0,inf)", "inf", false},
        {"float[1e-6,1e6]", "1e-6", true},
        {"float[1e-6,1e6]", "9.99999e-7", false},
        {"float[0,0.1)", "0.1", false},
        {"float(0,inf]", "inf", true},
        {"float(0,inf]", "nan", false},
        {"float[-inf,0]", "-inf", true},
        {"float(0,inf)", "0", false},
        {"float(0,inf)", "1e-300", true},
        {"float(0,1]", "0", false},
        {"float(0,1]", "1", true},
        {"float[0,1]", "0", true},
        {"float[0,1]", "1.0001", false},
        {"bool", "True", true},
        {"bool", "1", false},
        {"bool", "'True'", false},
        {"str", "abc", true},
        {"str", "3", true},
        {"str", "null", false},
        {"str", "[a]", false},
        {"'a'|'b'", "b", true},
        {"'a'|'b'", "c", false},
        {"'a'|'b'", "A", false},
        {"list[str]", "[a,b]", true},
        {"list[str]", "[a,null]", false},
        {"list[str]", "a", false},
        {"str|list[str]", "a", true},
        {"list[float]", "[1,2.5]", true},
        {"list[float]", "[1,x]", false},
        {"list", "[]", true},
        {"dict", "{}", true},
        {"dict", "[]", false},
        {"any", "{a:[1]}", true},
    };
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        struct conf_node *v = NULL;
        assert_true(conf__type_valid(cases[k].type));
        assert_int_equal(conf__parse_value(&v, cases[k].value, "v"), 0);
        if (conf__type_ok(cases[k].type, v) != cases[k].ok) fail_msg("%s of %s", cases[k].value, cases[k].type);
        conf__node_free(v);
    }
    assert_false(conf__type_valid("integer"));
    assert_false(conf__type_valid("int>=1"));
    assert_false(conf__type_valid("int[1,x]"));
    assert_false(conf__type_valid("int|"));
}

/* ---- refusals ---- */

static void test_unknown_keys(void **state) {
    (void)state;
    REFUSED("trainer.total_epoch|did you mean trainer.total_epochs?|+trainer.total_epoch=3", "trainer.total_epoch=3");
    REFUSED("did you mean actor_rollout_ref.rollout.n?", "rollout.n=5");
    REFUSED("did you mean actor_rollout_ref.actor.optim.lr?", "actor.optim.lr=1e-6");
    REFUSED("did you mean data.train_batch_size?", "train_batch_size=8");
    REFUSED("did you mean algorithm.adv_estimator?", "algorithm.adv_estimater=grpo");
    REFUSED("no key zzz.qqq|+zzz.qqq=1", "zzz.qqq=1");
    /* names of other trainers */
    REFUSED("did you mean actor_rollout_ref.actor.optim.lr?", "learning_rate=1e-6");
    REFUSED("did you mean actor_rollout_ref.actor.optim.lr?", "actor_rollout_ref.actor.learning_rate=1e-6");
    REFUSED("did you mean trainer.total_training_steps?", "trainer.max_steps=10");
    REFUSED("did you mean actor_rollout_ref.rollout.n?", "num_generations=8");
    REFUSED("algorithm.kl_ctrl.kl_coeff|did you mean algorithm.kl_ctrl.kl_coef?", "algorithm.kl_ctrl={kl_coeff: 1}");
    REFUSED("exists already", "+trainer.nnodes=2");
    REFUSED("there is no key trainer.nope to delete", "~trainer.nope");
    REFUSED("not deleted, the value is 1", "~trainer.nnodes=2");
}

static void test_wrong_values(void **state) {
    (void)state;
    REFUSED("data.train_batch_size='abc'|expected int[1,2^24]|command line", "data.train_batch_size=abc");
    REFUSED("data.train_batch_size=0|expected int[1,2^24]", "data.train_batch_size=0");
    REFUSED("data.train_batch_size=16.5", "data.train_batch_size=16.5");
    REFUSED("data.shuffle='yes'|expected bool", "data.shuffle=yes");
    REFUSED("actor_rollout_ref.rollout.top_p=1.5|float[1e-6,1]", R "top_p=1.5");
    REFUSED("optim.lr=nan", A "optim.lr=nan");
    REFUSED("data.truncation='eror'|'error'|'middle'", "data.truncation=eror");
    REFUSED("loss_agg_mode='token_mean'|'token-mean'", A "loss_agg_mode=token_mean");
    REFUSED("data.train_files={a: 1}", "data.train_files={a: 1}");
    REFUSED("clip_ratio_c=1|float(1,1e9]", A "clip_ratio_c=1");
    REFUSED("trainer is a group of keys", "trainer=3x");
    REFUSED("rollout.response_length='x'", "data.max_response_length=1024", R "response_length=x");
    REFUSED("trainer.experiment_name=[1, 'a']|expected str", "trainer.experiment_name=[1,a]");
    REFUSED("does not fit in 64 bits", "trainer.seed=9223372036854775808");
}

static void test_syntax(void **state) {
    (void)state;
    REFUSED("not an override; write key=value", "trainer.nnodes");
    REFUSED("sweep|[a,b]", "trainer.seed=1,2");
    REFUSED("choice(...)", "trainer.seed=choice(1,2)");
    REFUSED("not closed", "trainer.experiment_name='x");
    REFUSED("','", "trainer.logger=[a b");
    REFUSED("unexpected '!'|quotes", "trainer.experiment_name=a!");
    REFUSED("unexpected '='", "trainer.experiment_name=a=b");
    REFUSED("has no end", "trainer.experiment_name=${a");
    REFUSED("key", "=3");
    REFUSED("cannot be part of a key", "a..b=3");
    REFUSED("does not run sweeps", "--multirun");
    REFUSED("not UTF-8", "trainer.experiment_name=a\xff");
    REFUSED("unknown flag --cgf", "--cgf", "job");
    REFUSED("--config-name needs a value", "--config-name");
    REFUSED("job is the one", "--cfg", "hydra");
    REFUSED("no such file", "--config-name", "nope");
    char deep[400] = "+x=";
    memset(deep + 3, '[', 200);
    REFUSED("nested", deep);
    char parts[200] = "+a";
    for (int k = 0; k < 40; k++) strcat(parts, ".a");
    strcat(parts, "=1");
    REFUSED("over 32 parts", parts);
}

static void type_says(const char *type, const char *words) {
    struct buf b = {0};
    conf_type_words(type, &b);
    assert_string_equal(b.p, words);
    buf_free(&b);
}

static void test_type_words(void **state) {
    (void)state;
    type_says("int[1,2^24]", "a whole number from 1 to 2^24");
    type_says("int[1,2^31)|null", "a whole number from 1 to below 2^31 or null");
    type_says("float(0,inf]", "a number above 0 up to inf");
    type_says("float[0,inf)", "a number from 0 on");
    type_says("float[0,0]|float[1e-6,1e6]", "0 or a number from 1e-6 to 1e6");
    type_says("str|list[str]|null", "a text, a list of texts or null");
    type_says("'a'|'b'", "a or b");
    type_says("list[int[0,9]]", "a list, each of it a whole number from 0 to 9");
    type_says("bool", "True or False");
    for (const char *const *s = conf_schemas(); *s; s++) { /* every type of every key has words */
        struct conf_table t;
        assert_int_equal(conf__table_open(&t, *s), 0);
        for (int64_t k = 0; k < t.n; k++) {
            struct buf b = {0};
            conf_type_words(t.rows[k].type, &b);
            assert_true(b.n > 0 && !strchr(b.p, '|') && !strchr(b.p, '\''));
            buf_free(&b);
        }
        conf__table_free(&t);
    }
}

static void test_references(void **state) {
    (void)state;
    REFUSED("trainer.seed: ${data.nope}: there is no key data.nope", "trainer.seed=${data.nope}");
    REFUSED("circle", "+a=${b}", "+b=${a}");
    REFUSED("circle", "+a.b=${a}");
    REFUSED("no variable VERLC_TEST_UNSET", "+a=${oc.env:VERLC_TEST_UNSET}");
    REFUSED("resolver 'now'", "+a=${now:x}");
    REFUSED("takes 1 to 2 arguments, not 3", "+a=${oc.select:a,b,c}");
    REFUSED("cannot be part of a text", "+a=x${algorithm.kl_ctrl}");
    REFUSED("expected int[1,2^24]", "data.train_batch_size=${trainer.project_name}");
    /* a dozen doublings of a dozen doublings: refused before it fills the memory */
    char *args[25];
    for (int k = 0; k < 24; k++) args[k] = xasprintf("+x%d=[${x%d},${x%d}]", k, k + 1, k + 1);
    args[24] = xstrdup("+x24=1");
    struct conf *c = NULL;
    assert_int_equal(conf_load(&c, "ppo_trainer", 25, args), ERR_INVAL);
    message_has("blow the configuration up");
    for (int k = 0; k < 25; k++) free(args[k]);
    struct buf b = {0}; /* ${${${... deeper than the limit */
    buf_adds(&b, "+a='");
    for (int k = 0; k < 5000; k++) buf_adds(&b, "${");
    for (int k = 0; k < 5000; k++) buf_adds(&b, "}");
    buf_adds(&b, "'");
    REFUSED("deep", b.p);
    buf_free(&b);
}

static void test_groups(void **state) {
    (void)state;
    struct conf *c = NULL;
    assert_int_equal(LOAD(&c, "actor@actor_rollout_ref.actor=dp_actor", "model_engine=dp", "critic=dp_critic"), 0);
    conf_free(c);
    REFUSED("verlc has one engine|model_engine=megatron", "actor@actor_rollout_ref.actor=megatron_actor");
    REFUSED("verlc has one engine|model_engine=veomni", "actor@actor_rollout_ref.actor=veomni_actor");
    REFUSED("takes actor@actor_rollout_ref.actor=dp_actor", "actor@actor_rollout_ref.actor=torchtitan_actor");
    REFUSED("model_engine=torchtitan|dp, megatron and veomni", "model_engine=torchtitan");
    REFUSED("there is no config group foo@bar", "foo@bar=x");
    assert_int_equal(LOAD(&c, "model_engine=megatron", A "megatron.param_offload=True"), 0);
    assert_string_equal(conf_schema(c), "ppo_megatron_trainer");
    assert_string_equal(text_of(c, A "megatron.param_offload"), "True");
    assert_string_equal(text_of(c, "actor_rollout_ref.ref.megatron.param_offload"),
                        "True"); /* follows the actor by interpolation */
    conf_free(c);
}

/* Other engines of verl: their keys, and names that stand elsewhere here. */
static void test_engines(void **state) {
    (void)state;
    struct conf *c = NULL;
    assert_int_equal(LOAD(&c, "model_engine=veomni", "actor@actor_rollout_ref.actor=veomni_actor", A "veomni.param_offload=True",
                          "--config-name=ppo_trainer"),
                     0);
    assert_string_equal(conf_schema(c), "ppo_veomni_trainer");
    assert_string_equal(text_of(c, "actor_rollout_ref.ref.veomni.param_offload"), "True");
    assert_string_equal(text_of(c, A "optim.lr_scheduler_type"), "cosine");
    conf_free(c);
    assert_int_equal(LOAD(&c, A "model_engine=megatron", A "megatron.grad_offload=True", "actor_rollout_ref.model.lora.rank=8",
                          A "optim.lr_decay_style=cosine",
                          "+actor_rollout_ref.ref.megatron.override_transformer_config.gradient_accumulation_fusion=False"),
                     0);
    assert_string_equal(conf_schema(c), "ppo_megatron_trainer");
    assert_string_equal(text_of(c, "actor_rollout_ref.model.lora_rank"), "8");
    assert_string_equal(text_of(c, "actor_rollout_ref.model.lora_alpha"), "32");
    assert_string_equal(text_of(c, A "optim.lr_scheduler_type"), "cosine");
    assert_int_equal(conf_check(c), 0);
    conf_free(c);
    assert_int_equal(LOAD(&c, A "optim.betas='[0.9,0.95]'", "+actor_rollout_ref.model.lora.merge=True"), 0);
    assert_string_equal(text_of(c, A "optim.betas.1"), "0.95");
    conf_free(c);
    REFUSED(A "optim.betas|list[float[0,1)]", A "optim.betas='[0.9,x]'");
}

/* ---- statuses ---- */

static void test_older_names(void **state) {
    (void)state;
    struct conf *c = NULL;
    assert_int_equal(LOAD(&c, "custom_reward_function.path=/x.py", "reward_model.reward_manager=dapo",
                          "reward_model.sandbox_fusion.max_concurrent=3", "critic.model.fsdp_config.forward_prefetch=true",
                          "+custom_reward_function.reward_kwargs.a=1"),
                     0);
    assert_string_equal(text_of(c, "reward.custom_reward_function.path"), "/x.py");
    assert_string_equal(text_of(c, "reward.custom_reward_function.name"),
                        "compute_score"); /* the older key is null: the new default holds */
    assert_string_equal(text_of(c, "reward.reward_manager.name"), "dapo");
    assert_string_equal(text_of(c, "reward.sandbox_fusion.max_concurrent"), "3");
    assert_string_equal(text_of(c, "critic.fsdp.forward_prefetch"), "True");
    assert_string_equal(text_of(c, "reward.custom_reward_function.reward_kwargs.a"), "1");
    conf_free(c);
    assert_int_equal(LOAD(&c, "reward_manager.name=${oc.select:reward_model.reward_manager,naive}",
                          "+reward_manager.module.path=${.file}", "+reward_manager.module.file=f.py",
                          "+algorithm.filter_groups.enable=false"),
                     0);
    assert_string_equal(text_of(c, "reward.reward_manager.name"), "naive");       /* a null hands on nothing */
    assert_string_equal(text_of(c, "reward.reward_manager.module.path"), "f.py"); /* relative to where it was written */
    conf_free(c);
    REFUSED("same setting", "custom_reward_function.path=/x.py", "reward.custom_reward_function.path=/y.py");
    assert_int_equal(load_n(&c, "sft_trainer", (const char *const[]){"model.partial_pretrain=/m", NULL}), 0);
    assert_string_equal(text_of(c, "model.path"), "/m");
    assert_string_equal(text_of(c, "optim.lr_scheduler_type"), "cosine"); /* the older trainer's default */
    conf_free(c);
    const char *const old_sft[] = {"data.prompt_key=question", "optim.lr_scheduler=cosine", NULL};
    assert_int_equal(load_n(&c, "sft_trainer_engine", old_sft), 0);
    assert_string_equal(text_of(c, "optim.lr_scheduler_type"), "cosine");
    conf_free(c);
}

static void test_rejected(void **state) {
    (void)state;
    struct conf *c = NULL;
    static const struct {
        const char *arg, *texts;
    } cases[] = {
        {"actor_rollout_ref.model.lora.rank=8", "actor_rollout_ref.model.lora.rank=8|lora_rank"},
        {"actor_rollout_ref.rollout.agent.agent_loop_manager_class=a.B", "agent loops"},
        {"actor_rollout_ref.hybrid_engine=false", "share the devices"},
        {"trainer.v1.trainer_mode=colocate_async", "sync"},
        {"+actor_rollout_ref.model.override_config.num_hidden_layers=2", "num_hidden_layers=2|config.json"},
        {"+async_training.require_batches=2", "async"},
    };
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        if (LOAD(&c, cases[k].arg) < 0) fail_msg("%s", err_msg()); /* shown by --cfg job, refused by a run */
        assert_int_equal(conf_check(c), ERR_INVAL);
        message_has(cases[k].texts);
        conf_free(c);
    }
#define OF_ENGINE(key) "+" A "megatron.override_transformer_config.moe_" key
    assert_int_equal(LOAD(&c, "model_engine=megatron", "+critic.megatron.override_transformer_config.moe_aux_loss_coeff=0.01"), 0);
    assert_int_equal(conf_check(c), ERR_INVAL);
    message_has("moe_aux_loss_coeff=0.01|a critic's routers");
    conf_free(c);
    REFUSED("moe_router_load_balancing_type='seq_aux_loss'|did you mean aux_loss", "model_engine=megatron",
            OF_ENGINE("router_load_balancing_type=seq_aux_loss"));
    REFUSED("moe_z_loss_coeff", "model_engine=megatron", OF_ENGINE("z_loss_coeff=-1"));
    assert_int_equal(LOAD(&c, "model_engine=megatron", OF_ENGINE("router_load_balancing_type=aux_loss"),
                          OF_ENGINE("aux_loss_coeff=0.01"), OF_ENGINE("z_loss_coeff=0.001")),
                     0);
    assert_int_equal(conf_check(c), 0);
    conf_free(c);
    assert_int_equal(LOAD(&c, "actor_rollout_ref.model.lora_rank=0", "actor_rollout_ref.hybrid_engine=true",
                          "reward_model.enable=false", A "router_replay.mode=R2",
                          "+actor_rollout_ref.model.override_config.attn_implementation=eager",
                          "+actor_rollout_ref.model.override_config.router_aux_loss_coef=0.01",
                          "+actor_rollout_ref.model.override_config.moe_config.freeze_moe_router=True"),
                     0);
    assert_int_equal(conf_check(c), 0);
    conf_free(c);
}

/* What conf_notes writes to stderr. */
static char *notes_of(const struct conf *c) {
    FILE *f = tmpfile();
    assert_non_null(f);
    fflush(stderr);
    const int saved = dup(2);
    assert_true(dup2(fileno(f), 2) == 2);
    conf_notes(c);
    fflush(stderr);
    dup2(saved, 2);
    close(saved);
    struct buf b = {0};
    char line[1024];
    rewind(f);
    while (fgets(line, sizeof line, f)) buf_adds(&b, line);
    fclose(f);
    return buf_take(&b);
}

static void test_notes(void **state) {
    (void)state;
    struct conf *c = NULL;
    assert_int_equal(LOAD(&c, A "fsdp_config.reshard_after_forward=False", "data.use_shm=true",
                          A "fsdp_config.forward_prefetch=True", "+my.key=1", "hydra.run.dir=x", "trainer.save_freq=3",
                          "trainer.use_legacy_worker_impl=auto"),
                     0);
    char *n = notes_of(c);
    const char *has[] = {"reshard_after_forward, actor_rollout_ref.actor.fsdp_config.forward_prefetch: ", "data.use_shm: ",
                         "my.key: nothing reads this key", "hydra.run.dir=x", "trainer.use_v1"};
    for (size_t k = 0; k < sizeof has / sizeof has[0]; k++)
        if (!strstr(n, has[k])) fail_msg("no '%s' in\n%s", has[k], n);
    assert_null(strstr(n, "save_freq"));
    free(n);
    conf_free(c);
    /* the one engine, asked for by its name, needs no note */
    assert_int_equal(LOAD(&c, "actor_rollout_ref.rollout.name=verlc"), 0);
    n = notes_of(c);
    assert_string_equal(n, "");
    free(n);
    conf_free(c);
    assert_int_equal(LOAD(&c, "actor_rollout_ref.rollout.name=sglang"), 0);
    n = notes_of(c);
    assert_non_null(strstr(n, "rollout.name: generation runs in verlc's own engine"));
    free(n);
    conf_free(c);
}

/* ---- printing ---- */

static char *answer(const char *const *args, int *rc) {
    struct conf *c = NULL;
    FILE *f = tmpfile();
    if (load_n(&c, "ppo_trainer", args) < 0) fail_msg("%s", err_msg());
    *rc = conf_answer(c, f);
    conf_free(c);
    struct buf b = {0};
    char line[1024];
    rewind(f);
    while (fgets(line, sizeof line, f)) buf_adds(&b, line);
    fclose(f);
    return buf_take(&b);
}

static void test_answers(void **state) {
    (void)state;
    int rc;
    /* no divisibility, no mandatory value is asked for when printing */
    char *s = answer((const char *const[]){"--cfg", "job", "data.train_batch_size=7", "trainer.n_gpus_per_node=4", NULL}, &rc);
    assert_int_equal(rc, 1);
    assert_non_null(strstr(s, "    name: ???\n"));
    assert_non_null(strstr(s, "  train_batch_size: 7\n"));
    assert_non_null(strstr(s, "    prompt_length: 512\n"));
    assert_non_null(strstr(s, "      lr: 1.0e-06\n"));
    free(s);
    s = answer((const char *const[]){"--help", "trainer.total_e", NULL}, &rc);
    assert_int_equal(rc, 1);
    assert_non_null(strstr(s, "trainer.total_epochs=30\n    int[1,2^31); passes over the training data\n"));
    assert_null(strstr(s, "data."));
    free(s);
    s = answer((const char *const[]){"trainer.nnodes=1", NULL}, &rc);
    assert_int_equal(rc, 0);
    assert_string_equal(s, "");
    free(s);
    assert_int_equal(conf_help(stdout, "ppo_trainer", "zzz"), ERR_INVAL);
    assert_int_equal(conf_help(stdout, "nope", NULL), ERR_INVAL);
}

static char *help_text(const char *schema, const char *prefix) {
    struct buf b = {0};
    char line[2048];
    FILE *f = tmpfile();
    assert_int_equal(conf_help(f, schema, prefix), 0);
    rewind(f);
    while (fgets(line, sizeof line, f)) buf_adds(&b, line);
    fclose(f);
    return buf_take(&b);
}

/* A plain --help names every key that acts, by its last parts under its group, and is short; --help all has every key. */
static void test_help_names_acting_keys(void **state) {
    (void)state;
    for (const char *const *s = conf_schemas(); *s; s++) {
        char *plain = help_text(*s, NULL), *all = help_text(*s, "all"), *save = NULL;
        int lines = 0, keys = 0;
        for (const char *p = plain; *p; p++) lines += *p == '\n';
        assert_true(lines < 150);
        for (char *key = strtok_r(all, "\n", &save), *text; key && (text = strtok_r(NULL, "\n", &save));
             key = strtok_r(NULL, "\n", &save), keys++) {
            if (strstr(text, "; noted: ") || strstr(text, "; fixed: ") || strstr(text, "; older name of ")) continue;
            key[strcspn(key, "=")] = '\0';
            const char *leaf = strrchr(key, '.');
            if (leaf && !strstr(plain, leaf)) fail_msg("%s: --help does not name %s", *s, key);
        }
        assert_true(keys > 5);
        free(plain);
        free(all);
    }
}

/* Every text survives a trip through YAML, whatever it looks like. */
static void test_yaml_texts(void **state) {
    (void)state;
    static const char *const texts[] = {
        "",
        " ",
        "a",
        "null",
        "Null",
        "~",
        "true",
        "yes",
        "n",
        "Y",
        "1",
        "-1",
        "1_000",
        "0x1f",
        "010",
        "1.5",
        "1e5",
        ".5",
        "inf",
        ".inf",
        "nan",
        "1:30",
        "2024-01-01",
        "2024-01-01 10:00:00",
        "=",
        "<<",
        "- a",
        "a: b",
        "a:b",
        "#x",
        "a #b",
        "'",
        "\"",
        "a'b\"c",
        "{a}",
        "[a]",
        "&a",
        "*a",
        "!a",
        "|",
        ">",
        "%",
        "@",
        "`",
        "a\nb",
        "\n",
        "a\n\n",
        " lead",
        "trail ",
        "tab\there",
        "\x01",
        "\xc3\xa9",
        "\xe4\xb8\xad\xf0\x9f\x98\x80",
        "???",
        "a\\b",
        "\\",
        "-",
        "--",
        "---",
        "...",
        "${a}",
        "${a}\\",
        "\\${a} \\\\",
        "\\${a}",
        "\\\\${a}",
        "x${",
        "$",
        "${a} and ${b}",
    };
    struct conf_node *list = conf__node_new(CONF_LIST), *raw = NULL, *back = NULL;
    for (size_t k = 0; k < sizeof texts / sizeof texts[0]; k++) {
        struct conf_node *v = conf__node_str(texts[k], strlen(texts[k]));
        v->literal = true;
        conf__node_put(list, NULL, v);
    }
    struct conf_node *root = conf__node_new(CONF_DICT);
    conf__node_put(root, "list", list);
    struct buf b = {0};
    assert_int_equal(conf__yaml_print(&b, root), 0);
    if (conf__yaml_parse(&raw, b.p, b.n, "texts") < 0 || conf__resolve(&back, raw) < 0) fail_msg("%s\n%s", err_msg(), b.p);
    for (size_t k = 0; k < sizeof texts / sizeof texts[0]; k++) {
        const struct conf_node *v = conf__node_child(back, "list", 4)->items[k].v;
        if (v->kind != CONF_STR || strcmp(v->s, texts[k]) != 0) fail_msg("'%s' came back as '%s'", texts[k], v->s);
    }
    conf__node_free(root);
    conf__node_free(raw);
    conf__node_free(back);
    buf_free(&b);
}

static void test_yaml_refusals(void **state) {
    (void)state;
    static const struct {
        const char *yaml, *texts;
    } cases[] = {
        {"a: [1", "f.yaml:"},
        {"a: 1\na: 2\n", "f.yaml:2|stands twice"},
        {"a: !!python/object:x {}", "f.yaml:1|tag"},
        {"a: !!int 3", "tag"},
        {"a: *b", "anchor"},
        {"--- 1\n--- 2\n", "more than one"},
        {"? [a]\n: 1", "key must be a word"},
        {"a: 99999999999999999999", "64 bits"},
        {"a: \"x\\0y\"", "zero byte"},
        {"<<: 3", "takes a mapping"},
        {"a: \xff", "f.yaml:1"},
    };
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        struct conf_node *v = NULL;
        if (conf__yaml_parse(&v, cases[k].yaml, strlen(cases[k].yaml), "f.yaml") != ERR_INVAL) fail_msg("%s", cases[k].yaml);
        message_has(cases[k].texts);
    }
    struct buf b = {0}; /* aliases that double */
    buf_adds(&b, "a0: &a0 [1]\n");
    for (int k = 1; k < 30; k++) buf_addf(&b, "a%d: &a%d [*a%d, *a%d]\n", k, k, k - 1, k - 1);
    struct conf_node *v = NULL;
    assert_int_equal(conf__yaml_parse(&v, b.p, b.n, "f.yaml"), ERR_INVAL);
    message_has("values");
    buf_free(&b);
}

static void test_floats(void **state) {
    (void)state;
    static const struct {
        double f;
        const char *text;
    } cases[] = {{0, "0.0"},
                 {-0.0, "-0.0"},
                 {1, "1.0"},
                 {0.1, "0.1"},
                 {1e-6, "1e-06"},
                 {1e-4, "0.0001"},
                 {1e16, "1e+16"},
                 {123456789012345680.0, "1.2345678901234568e+17"},
                 {1e15, "1000000000000000.0"},
                 {5e-324, "5e-324"},
                 {1.7976931348623157e308, "1.7976931348623157e+308"},
                 {2.5, "2.5"},
                 {100, "100.0"}};
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        char t[32];
        number_text(cases[k].f, t);
        assert_string_equal(t, cases[k].text);
    }
}

/* ---- changes since a checkpoint ---- */

static void add_change(void *arg, const struct conf_change *change) {
    assert_int_equal(buf_addf(arg, "%s %s -> %s|", change->key, change->was, change->now), 0);
}

/* What conf_changes tells of `now` after a run with `was`; caller frees. */
static char *changes_n(const char *schema, const char *const *was, const char *const *now) {
    struct conf *a = NULL, *b = NULL;
    struct buf yaml = {0}, said = {0};
    assert_int_equal(load_n(&a, schema, was), 0);
    assert_int_equal(load_n(&b, schema, now), 0);
    assert_int_equal(conf_yaml(a, &yaml), 0);
    assert_int_equal(conf_changes(b, yaml.p, yaml.n, "config.yaml", add_change, &said), 0);
    conf_free(a);
    conf_free(b);
    buf_free(&yaml);
    return said.p ? buf_take(&said) : xstrdup("");
}
#define ARGS(...) ((const char *const[]){__VA_ARGS__, NULL})
#define CHANGES(want, was, now)                               \
    do {                                                      \
        char *said_ = changes_n("ppo_trainer", (was), (now)); \
        assert_string_equal(said_, want);                     \
        free(said_);                                          \
    } while (0)
#define NOTHING ((const char *const[]){NULL})

static void test_changes(void **state) {
    (void)state;
    CHANGES(A "optim.lr 1e-06 -> 0.5|", NOTHING, ARGS(A "optim.lr=0.5"));
    CHANGES("", ARGS(A "optim.lr=0.5"), ARGS(A "optim.lr=5e-1"));
    /* a key that follows another is told where it is set, or was */
    CHANGES("data.max_response_length 512 -> 16|", NOTHING, ARGS("data.max_response_length=16"));
    CHANGES(R "response_length 512 -> 16|", NOTHING, ARGS(R "response_length=16"));
    CHANGES(R "response_length 16 -> 512|", ARGS(R "response_length=16"), NOTHING);
    CHANGES(R "response_length 512 -> 16|data.max_response_length 512 -> 16|", NOTHING,
            ARGS("data.max_response_length=16", R "response_length=${data.max_response_length}"));
    CHANGES("trainer.experiment_name gsm8k -> b|", NOTHING, ARGS("trainer.experiment_name=b"));
    /* noted and unknown keys, older names, what null means */
    CHANGES("", NOTHING, ARGS(A "use_torch_compile=False", "+my.own=1", R "mode=async"));
    CHANGES("", ARGS("reward_model.num_workers=2"), ARGS("reward.num_workers=2"));
    CHANGES("reward.num_workers 2 -> 8|", ARGS("reward_model.num_workers=2"), NOTHING);
    CHANGES("", ARGS("actor_rollout_ref.model.lora_alpha=16"), ARGS("actor_rollout_ref.model.lora_alpha=null"));
    /* members of a dict, lists, keys that are absent by default */
    CHANGES("data.apply_chat_template_kwargs.a.b 1 -> 2|data.apply_chat_template_kwargs.c x -> null|",
            ARGS("+data.apply_chat_template_kwargs.a.b=1", "+data.apply_chat_template_kwargs.c=x"),
            ARGS("+data.apply_chat_template_kwargs.a.b=2"));
    CHANGES("reward.source_weights.a null -> 2|", NOTHING, ARGS("+reward.source_weights.a=2"));
    CHANGES("reward.source_weights.a 2 -> null|", ARGS("+reward.source_weights.a=2"), ARGS("reward.source_weights=null"));
    CHANGES(A "optim.betas [0.9, 0.999] -> [0.9, 0.95]|", NOTHING, ARGS(A "optim.betas=[0.9,0.95]"));
    CHANGES(A "grad_chunk 2 -> 1|", ARGS("+" A "grad_chunk=2"), NOTHING);
    CHANGES("reward.custom_reward_function.path null -> r.py|", NOTHING, ARGS("reward.custom_reward_function.path=r.py"));
}

static void test_changes_are_lines(void **state) {
    (void)state;
    CHANGES("actor_rollout_ref.model.custom_chat_template null -> 'a\\nb -> c \\'d\\''|", NOTHING,
            ARGS("actor_rollout_ref.model.custom_chat_template=\"a\nb -> c 'd'\""));
    CHANGES("trainer.experiment_name '7' -> gsm8k|", ARGS("trainer.experiment_name='7'"), NOTHING);
    char first[400], second[400];
    snprintf(first, sizeof first, "actor_rollout_ref.model.custom_chat_template=%0300d", 1);
    snprintf(second, sizeof second, "actor_rollout_ref.model.custom_chat_template=%0300d", 2);
    char *said = changes_n("ppo_trainer", ARGS(first), ARGS(second)), *arrow = strstr(said, " -> ");
    assert_non_null(arrow);
    assert_true(strlen(said) < 500 && strstr(said, "... (3"));
    assert_true(strncmp(arrow + 4, strchr(said, ' ') + 1, (size_t)(arrow - strchr(said, ' '))) != 0);
    free(said);
}

static void test_no_changes(void **state) {
    (void)state;
    for (const char *const *s = conf_schemas(); *s; s++) {
        char *said = changes_n(*s, NOTHING, NOTHING);
        if (*said) fail_msg("%s: %s", *s, said);
        free(said);
    }
    char *said = changes_n("sft_trainer", ARGS("model.partial_pretrain=a", "optim.lr_scheduler=wsd"),
                           ARGS("model.path=a", "optim.lr_scheduler_type=wsd"));
    if (*said) fail_msg("sft_trainer: %s", said);
    free(said);
    struct conf *c = NULL;
    assert_int_equal(LOAD(&c, "trainer.seed=2"), 0);
    assert_int_equal(conf_changes(c, "- 1\n", 4, "config.yaml", add_change, NULL), ERR_INVAL);
    assert_int_equal(conf_changes(c, "{", 1, "config.yaml", add_change, NULL), ERR_INVAL);
    conf_free(c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_table),
        cmocka_unit_test(test_types),
        cmocka_unit_test(test_unknown_keys),
        cmocka_unit_test(test_wrong_values),
        cmocka_unit_test(test_syntax),
        cmocka_unit_test(test_references),
        cmocka_unit_test(test_type_words),
        cmocka_unit_test(test_groups),
        cmocka_unit_test(test_engines),
        cmocka_unit_test(test_older_names),
        cmocka_unit_test(test_rejected),
        cmocka_unit_test(test_notes),
        cmocka_unit_test(test_answers),
        cmocka_unit_test(test_help_names_acting_keys),
        cmocka_unit_test(test_yaml_texts),
        cmocka_unit_test(test_yaml_refusals),
        cmocka_unit_test(test_floats),
        cmocka_unit_test(test_changes),
        cmocka_unit_test(test_changes_are_lines),
        cmocka_unit_test(test_no_changes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
