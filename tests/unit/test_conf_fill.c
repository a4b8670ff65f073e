/* test_conf_fill.c - values into a program's struct: each kind of member, null, what a row says null means, refusals. */
#include "conf/conf.h"

#include "base/err.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static int load_n(struct conf **c, const char *const *args) {
    char *argv[64];
    int n = 0;
    for (; args[n]; n++) argv[n] = (char *)args[n];
    return conf_load(c, "ppo_trainer", n, argv);
}
#define LOAD(c, ...) load_n((c), (const char *const[]){__VA_ARGS__, NULL})

/* texts: pieces between '|'. */
static void message_has(const char *texts) {
    char *copy = xstrdup(texts), *save = NULL;
    for (char *t = strtok_r(copy, "|", &save); t; t = strtok_r(NULL, "|", &save))
        if (!strstr(err_msg(), t)) fail_msg("message: %s\nlacks: %s", err_msg(), t);
    free(copy);
}

struct sample {
    int64_t batch, response, threads, seed, most;
    int small;
    double lr, entropy;
    float top_p;
    bool filter, gate, either;
    const char *name, *resume, *metric;
    const char *const *loggers, *const *files, *const *dirs;
    int64_t n_loggers, n_files, n_dirs, n_betas, bytes, every;
    double betas[2];
    const json_t *ctrl, *kwargs;
    enum { BIG = 7, SMALL = 0 } size;
};
#define CONF_STRUCT struct sample
#include "conf/bind.h"
#define SIZES(F, W) F("bfloat16", BIG) W("float32", SMALL)

static void test_fill(void **state) {
    (void)state;
    const struct conf_binding b[] = {
        {.key = "data.train_batch_size", AT(batch)},
        {.key = "actor_rollout_ref.rollout.response_length", AT(response)},
        {.key = "trainer.threads", AT(threads)},
        {.key = "trainer.seed", AT(small)},
        {.key = "actor_rollout_ref.actor.optim.lr", AT(lr)},
        {.key = "actor_rollout_ref.actor.entropy_coeff", AT(entropy)},
        {.key = "actor_rollout_ref.rollout.top_p", AT(top_p)},
        {.key = "data.filter_overlong_prompts", AT(filter)},
        {.key = "data.shuffle", OR(either)},
        {.key = "trainer.val_only", OR(either)},
        {.key = "trainer.val_only", OR(gate)},
        {.key = "data.max_response_length", MOST(most)},
        {.key = "trainer.save_freq", MOST(most)},
        {.key = "data.seed", MOST(most)},
        {.key = "trainer.experiment_name", AT(name)},
        {.key = "trainer.resume_from_path", AT(resume)},
        {.key = "trainer.logger", STRS(loggers, n_loggers)},
        {.key = "data.train_files", STRS(files, n_files)},
        {.key = "trainer.rollout_data_dir", STRS(dirs, n_dirs)},
        {.key = "actor_rollout_ref.actor.optim.betas", F64S(betas, n_betas)},
        {.key = "data.apply_chat_template_kwargs", AT(ctrl)},
        {.key = "algorithm.adv_kwargs", AT(kwargs)},
        {.key = "trainer.device_memory_limit", BYTES(bytes)},
        {.key = "actor_rollout_ref.actor.fsdp_config.dtype", AT(size), .words = CONF_WORDS(SIZES)},
        {.key = "algorithm.filter_groups.metric", AT(metric)},
        {.key = "trainer.max_bad_steps", AT(every)},
        {.key = "of.another.schema", AT(seed)},

    };
    struct conf *c = NULL;
    struct sample s = {.threads = 3, .resume = "kept", .small = 5, .size = SMALL, .seed = 8};
    assert_int_equal(LOAD(&c, "data.train_batch_size=16", "data.max_response_length=1024", "actor_rollout_ref.actor.optim.lr=1e-6",
                          "data.filter_overlong_prompts=True", "trainer.experiment_name=run", "trainer.logger=[console,mlflow]",
                          "data.train_files=/d/train.parquet", "trainer.save_freq=20", "+data.apply_chat_template_kwargs={a: 1}",
                          "trainer.device_memory_limit=20GiB", "algorithm.filter_groups.metric=null"),
                     0);
    assert_int_equal(conf_fill(c, b, sizeof b / sizeof *b, &s), 0);
    assert_int_equal(s.batch, 16);
    assert_int_equal(s.response, 1024);                          /* interpolated */
    assert_true(s.lr == 1e-6 && s.entropy == 0 && s.top_p == 1); /* an integer is a number */
    assert_true(s.filter && s.either && !s.gate && s.most == 1024);
    assert_true(s.threads == 3 && s.seed == 8); /* null, and no such key here, leave the member */
    assert_string_equal(s.resume, "kept");
    assert_string_equal(s.name, "run");
    assert_int_equal(s.small, 1);
    assert_int_equal(s.n_loggers, 2);
    assert_string_equal(s.loggers[1], "mlflow");
    assert_true(s.n_files == 1 && strcmp(s.files[0], "/d/train.parquet") == 0); /* one text is a list of one */
    assert_true(s.n_dirs == 0 && !s.dirs);
    assert_true(s.n_betas == 2 && s.betas[1] == 0.999);
    assert_true(json_integer_value(json_object_get(s.ctrl, "a")) == 1 && !s.kwargs);
    assert_true(s.bytes == (int64_t)20 << 30 && s.size == BIG && s.every == 3);
    assert_string_equal(s.metric, "reward"); /* what the row says null means */
    assert_true(conf_is_null(c, "data.seed") && conf_is_null(c, "data.nope") && !conf_is_null(c, "trainer.seed"));
    assert_true(conf_is_set(c, "trainer.save_freq") && !conf_is_set(c, "trainer.seed"));
    const json_t *j;
    assert_int_equal(conf_json(c, "", &j), 0);
    assert_non_null(json_object_get(j, "trainer"));
    conf_free(c);
}

/* A leading ~ is expanded in paths, as os.path.expanduser does it, and nowhere else. */
static void test_fill_paths(void **state) {
    (void)state;
    const struct conf_binding b[] = {
        {.key = "trainer.default_local_dir", PATH(name)},         {.key = "trainer.resume_from_path", PATH(resume)},
        {.key = "trainer.experiment_name", AT(metric)},           {.key = "data.train_files", PATHS(files, n_files)},
        {.key = "trainer.rollout_data_dir", PATHS(dirs, n_dirs)}, {.key = "data.val_files", PATHS(loggers, n_loggers)},
    };
    struct conf *c = NULL;
    struct sample s = {0};
    char *home = xstrdup(getenv("HOME") ? getenv("HOME") : "/");
    setenv("HOME", "/home/me/", 1);
    assert_int_equal(LOAD(&c, "trainer.default_local_dir=~", "trainer.resume_from_path='~no-such-user/x'",
                          "trainer.experiment_name='~/x'", "data.train_files=['~/a.parquet',b~/c,'d/~/e']", "data.val_files='~/v'"),
                     0);
    assert_int_equal(conf_fill(c, b, sizeof b / sizeof *b, &s), 0);
    assert_string_equal(s.name, "/home/me");
    assert_string_equal(s.resume, "~no-such-user/x");
    assert_string_equal(s.metric, "~/x"); /* not a path */
    assert_int_equal(s.n_files, 3);
    assert_string_equal(s.files[0], "/home/me/a.parquet");
    assert_string_equal(s.files[1], "b~/c");
    assert_string_equal(s.files[2], "d/~/e");
    assert_true(s.n_dirs == 0 && !s.dirs);
    assert_int_equal(s.n_loggers, 1);
    assert_string_equal(s.loggers[0], "/home/me/v");
    struct buf yaml = {0};
    assert_int_equal(conf_yaml(c, &yaml), 0);
    assert_non_null(strstr(yaml.p, "default_local_dir: '~'\n")); /* as it was written */
    buf_free(&yaml);
    conf_free(c);
    setenv("HOME", home, 1);
    free(home);
}

static void test_fill_refusals(void **state) {
    (void)state;
    const struct {
        const char *arg;
        struct conf_binding b;
        const char *texts;
    } cases[] = {
        {"trainer.seed=3000000000", {.key = "trainer.seed", AT(small)}, "trainer.seed=3000000000|32 bits"},
        {"trainer.resume_mode=auto", {.key = "trainer.resume_mode", AT(batch)}, "trainer.resume_mode='auto'|a whole number"},
        {"trainer.seed=1", {.key = "trainer.seed", AT(filter)}, "trainer.seed=1|true or false"},
        {"~trainer.seed", {.key = "trainer.seed", AT(batch)}, "trainer.seed is needed but was deleted"},
        {"trainer.seed=1", {.key = "actor_rollout_ref.rollout.name", AT(name)}, "mandatory|set actor_rollout_ref.rollout.name="},
        {"actor_rollout_ref.actor.optim.betas=[0.1,0.2,0.3]",
         {.key = "actor_rollout_ref.actor.optim.betas", F64S(betas, n_betas)},
         "optim.betas|at most 2 numbers"},
        {"trainer.device_memory_limit=20XiB",
         {.key = "trainer.device_memory_limit", BYTES(bytes)},
         "device_memory_limit=20XiB|GiB"},
        {"actor_rollout_ref.actor.fsdp_config.dtype=fp32",
         {.key = "actor_rollout_ref.actor.fsdp_config.dtype", AT(size), .words = CONF_WORDS(SIZES)},
         "actor.fsdp_config.dtype=fp32|bfloat16 or float32"},
        {"actor_rollout_ref.rollout.cudagraph_capture_sizes=[x]",
         {.key = "actor_rollout_ref.rollout.cudagraph_capture_sizes", F64S(betas, n_betas)},
         "capture_sizes|numbers"},
    };
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        struct conf *c = NULL;
        struct sample s = {0};
        if (LOAD(&c, cases[k].arg) < 0) fail_msg("%s", err_msg());
        assert_int_equal(conf_fill(c, &cases[k].b, 1, &s), ERR_INVAL);
        message_has(cases[k].texts);
        conf_free(c);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_fill), cmocka_unit_test(test_fill_paths),
                                       cmocka_unit_test(test_fill_refusals)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
