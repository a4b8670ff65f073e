/* test_ckpt_async.c - a checkpoint that is written beside the run has the bytes of the moment of its copy, for every optimizer
 * and an adapter; its failure is told once; nothing of a run waits for it. */
#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "ckpt/async_save.h"
#include "model/files/init.h"
#include "model/files/load.h"
#include "model/master_weights.h"
#include "model/lora/lora.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#define OK(call)                                                                \
    do {                                                                        \
        if ((call) < 0) fail_msg("%s: %s (%s)", #call, err_msg(), err_trace()); \
    } while (0)

struct fix { /* a tiny model with its optimizer, a root for each way of saving */
    char dir[64];
    char *model_dir, *root, *now; /* now: of ckpt_save */
    struct dev dev;
    struct model *model;
    struct optim *optim;
    struct ckpt_part part;
    struct ckpt_async *async;
    json_t *trainer;
    pthread_mutex_t gate; /* held: the writing thread waits */
    bool passed;
};

static void open_fix(struct fix *f, enum optim_kind kind, bool adapter) {
    *f = (struct fix){.gate = PTHREAD_MUTEX_INITIALIZER};
    snprintf(f->dir, sizeof f->dir, "/tmp/verlc-test-XXXXXX");
    assert_non_null(mkdtemp(f->dir));
    f->root = file_join(f->dir, "root");
    f->now = file_join(f->dir, "now");
    f->model_dir = file_join(f->dir, "model");
    json_t *c =
        json_pack("{s:[s], s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:b, s:f, s:s, s:f}", "architectures", "Qwen2ForCausalLM",
                  "model_type", "qwen2", "hidden_size", 64, "intermediate_size", 96, "num_hidden_layers", 2, "num_attention_heads",
                  2, "num_key_value_heads", 1, "vocab_size", 40, "max_position_embeddings", 64, "tie_word_embeddings", 1,
                  "rms_norm_eps", 1e-6, "torch_dtype", "bfloat16", "rope_theta", 1e4);
    OK(model_init_dir(c, f->model_dir, 3, DT_BF16));
    json_decref(c);
    OK(dev_open_cpu(&f->dev, 1, NULL));
    const struct model_open_args a = {
        .dir = f->model_dir, .act = DT_F32, .flags = adapter ? MODEL_INFER : MODEL_TRAIN, .max_len = 32};
    OK(model_open(&f->model, &f->dev, &a));
    if (adapter) {
        struct lora_config l = {.rank = 4, .alpha = 8, .targets = json_string("all-linear")};
        OK(model_lora_create(f->model, &l, 5));
        json_decref(l.targets);
    }
    OK(optim_create(&f->optim, f->model, &(struct optim_config){.kind = kind, .momentum = 0.9, .centered = true}));
    f->part = (struct ckpt_part){"actor", f->model, f->optim, NULL};
    f->trainer = json_pack("{s:i}", "global_step", 1);
    OK(ckpt_async_open(&f->async, &f->part, 1, NULL));
}

static void close_fix(struct fix *f) {
    ckpt_async_close(f->async);
    json_decref(f->trainer);
    optim_destroy(f->optim, f->model);
    model_close(f->model);
    dev_close(&f->dev);
    OK(file_remove_tree(f->dir));
    free(f->root);
    free(f->now);
    free(f->model_dir);
}

/* Other values in everything that a checkpoint holds. */
static void change(struct fix *f, int seed) {
    struct optim_array a[OPTIM_MAX_ARRAYS + 1] = {{"master", DT_F32, f->model->n_train, f->model->master}};
    const int n = 1 + optim_arrays(f->optim, a + 1);
    for (int k = 0; k < n; k++) {
        const size_t bytes = (size_t)a[k].n * dtype_size(a[k].dt);
        char *x = malloc(bytes);
        for (int64_t i = 0; i < a[k].n; i++) {
            if (a[k].dt == DT_F32)
                ((float *)x)[i] = (float)((int64_t)((uint64_t)i * 2654435761u % 1000003u) * (k + 1) + seed) * 1e-7f;
            else x[i] = (char)(i * (k + 7) + seed);
        }
        OK(dev_copy_in(&f->dev, a[k].data, x, bytes));
        free(x);
    }
    OK(model_refresh(f->model));
    f->optim->step = seed;
}

static struct ckpt_save_args args(const struct fix *f, const char *root, int64_t step) {
    return (struct ckpt_save_args){
        .root = root, .step = step, .parts = &f->part, .n_parts = 1, .trainer = f->trainer, .config_yaml = "a: 1\n", .keep = 2};
}

static void wait_at_gate(void *arg) {
    struct fix *f = arg;
    pthread_mutex_lock(&f->gate);
    f->passed = true;
    pthread_mutex_unlock(&f->gate);
}

/* What is in the files, checksums and all: the manifest. */
static char *manifest(const char *root, int64_t step) {
    struct buf b = {0};
    char *path = xasprintf("%s/global_step_%lld/manifest.json", root, (long long)step);
    OK(file_read(&b, path, 0));
    free(path);
    return buf_take(&b);
}

static int take(struct fix *f, int64_t *step) {
    int got = 0;
    for (int i = 0; i < 600 && got == 0; i++) got = ckpt_async_take(f->async, 0.1, step);
    return got;
}

/* Copied, then changed while the writing thread is held: the bytes are those of ckpt_save at the copy. */
static void check_moment(enum optim_kind kind, bool adapter) {
    struct fix f;
    int64_t step = 0;
    open_fix(&f, kind, adapter);
    for (int64_t s = 1; s <= 2; s++) {
        change(&f, (int)s);
        struct ckpt_save_args a = args(&f, f.now, s);
        OK(ckpt_save(&a));
        a.root = f.root;
        OK(ckpt_async_copy(f.async, &a));
        pthread_mutex_lock(&f.gate);
        ckpt_async_write(f.async, wait_at_gate, &f);
        change(&f, 100); /* the next step, while nothing is written yet */
        json_object_set_new(f.trainer, "global_step", json_integer(100));
        assert_int_equal(ckpt_async_take(f.async, 0.01, &step), 0);
        assert_false(f.passed);
        pthread_mutex_unlock(&f.gate);
        assert_int_equal(take(&f, &step), 1);
        assert_int_equal(step, s);
        assert_int_equal(ckpt_async_take(f.async, 0, &step), 0); /* told once */
        json_object_set_new(f.trainer, "global_step", json_integer(1));
        char *const want = manifest(f.now, s), *const got = manifest(f.root, s);
        assert_string_equal(got, want);
        free(want);
        free(got);
        f.passed = false;
        char *dir = xasprintf("%s/global_step_%lld", f.root, (long long)s);
        OK(ckpt_verify(dir));
        OK(ckpt_load_part(dir, &f.part));
        assert_int_equal(f.optim->step, s);
        free(dir);
    }
    close_fix(&f);
}

static void test_adamw(void **state) {
    (void)state;
    check_moment(OPTIM_ADAMW, false);
}
static void test_adamw8(void **state) {
    (void)state;
    check_moment(OPTIM_ADAMW8, false);
}
static void test_sgd(void **state) {
    (void)state;
    check_moment(OPTIM_SGD, false);
}
static void test_rmsprop(void **state) {
    (void)state;
    check_moment(OPTIM_RMSPROP, false);
}
static void test_muon(void **state) {
    (void)state;
    check_moment(OPTIM_MUON, false);
}
static void test_adapter(void **state) {
    (void)state;
    check_moment(OPTIM_ADAMW, true);
}

/* Two parts are copied at one moment. */
static void test_two_parts(void **state) {
    (void)state;
    struct fix f, critic;
    int64_t step;
    open_fix(&f, OPTIM_ADAMW, false);
    open_fix(&critic, OPTIM_MUON, false);
    struct ckpt_part parts[2] = {f.part, critic.part};
    struct ckpt_async *both;
    parts[1].name = "critic";
    change(&f, 3);
    change(&critic, 4);
    OK(ckpt_async_open(&both, parts, 2, NULL));
    struct ckpt_save_args a = args(&f, f.now, 1);
    a.parts = parts;
    a.n_parts = 2;
    OK(ckpt_save(&a));
    a.root = f.root;
    OK(ckpt_async_copy(both, &a));
    change(&critic, 5);
    ckpt_async_write(both, NULL, NULL);
    while (ckpt_async_take(both, 1, &step) == 0) {
    }
    char *const want = manifest(f.now, 1), *const got = manifest(f.root, 1);
    assert_string_equal(got, want);
    free(want);
    free(got);
    ckpt_async_close(both);
    close_fix(&critic);
    close_fix(&f);
}

/* A root that is no directory, then a weight that is not finite: why, once; then it saves again. */
static void test_failures(void **state) {
    (void)state;
    struct fix f;
    int64_t step = 0;
    const float nan = __builtin_nanf("");
    open_fix(&f, OPTIM_ADAMW, false);
    change(&f, 1);
    const struct ckpt_save_args a = args(&f, f.root, 7);
    OK(file_write_atomic(f.root, "x", 1));
    OK(ckpt_async_copy(f.async, &a));
    ckpt_async_write(f.async, NULL, NULL);
    assert_int_equal(take(&f, &step), ERR_IO);
    assert_non_null(strstr(err_msg(), f.root));
    assert_int_equal(step, 7);
    assert_int_equal(take(&f, &step), 0);
    OK(file_remove_tree(f.root));
    OK(dev_copy_in(&f.dev, f.model->master + 5, &nan, sizeof nan));
    OK(ckpt_async_copy(f.async, &a));
    ckpt_async_write(f.async, NULL, NULL);
    assert_int_equal(take(&f, &step), ERR_NUMERIC);
    assert_non_null(strstr(err_msg(), "holds NaN"));
    change(&f, 2);
    OK(ckpt_async_copy(f.async, &a));
    ckpt_async_write(f.async, NULL, NULL);
    assert_int_equal(take(&f, &step), 1);
    close_fix(&f);
}

/* Closed while it is written: it is published first. */
static void test_close_waits(void **state) {
    (void)state;
    struct fix f;
    char *dir = NULL;
    int64_t step;
    open_fix(&f, OPTIM_ADAMW, false);
    change(&f, 1);
    const struct ckpt_save_args a = args(&f, f.root, 3);
    OK(ckpt_async_copy(f.async, &a));
    ckpt_async_write(f.async, NULL, NULL);
    ckpt_async_close(f.async);
    f.async = NULL;
    OK(ckpt_find(f.root, &step, &dir));
    assert_int_equal(step, 3);
    free(dir);
    close_fix(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_adamw),     cmocka_unit_test(test_adamw8),   cmocka_unit_test(test_sgd),
        cmocka_unit_test(test_rmsprop),   cmocka_unit_test(test_muon),     cmocka_unit_test(test_adapter),
        cmocka_unit_test(test_two_parts), cmocka_unit_test(test_failures), cmocka_unit_test(test_close_waits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
