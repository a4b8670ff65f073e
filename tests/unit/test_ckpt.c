/* test_ckpt.c - checkpoint directories: what is saved comes back bit by bit, what is
 * damaged is found, and a save that fails leaves everything as it was. */
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "ckpt/ckpt.h"
#include "model/files/init.h"
#include "model/files/load.h"
#include "model/master_weights.h"

#include <dirent.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>
#include <cmocka.h>

#define OK(call)                                                                \
    do {                                                                        \
        if ((call) < 0) fail_msg("%s: %s (%s)", #call, err_msg(), err_trace()); \
    } while (0)

struct fix { /* a tiny model with its optimizer, and an empty root */
    char dir[64];
    char *root, *model_dir;
    struct dev dev;
    struct model *model;
    struct optim *optim;
};

static int setup(void **state) {
    struct fix *f = calloc(1, sizeof *f);
    snprintf(f->dir, sizeof f->dir, "/tmp/verlc-test-XXXXXX");
    assert_non_null(mkdtemp(f->dir));
    f->root = file_join(f->dir, "root");
    f->model_dir = file_join(f->dir, "model");
    json_t *c =
        json_pack("{s:[s], s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:b, s:f, s:s, s:f}", "architectures", "Qwen2ForCausalLM",
                  "model_type", "qwen2", "hidden_size", 16, "intermediate_size", 24, "num_hidden_layers", 1, "num_attention_heads",
                  2, "num_key_value_heads", 1, "vocab_size", 40, "max_position_embeddings", 64, "tie_word_embeddings", 1,
                  "rms_norm_eps", 1e-6, "torch_dtype", "bfloat16", "rope_theta", 1e4);
    OK(model_init_dir(c, f->model_dir, 3, DT_BF16));
    json_decref(c);
    OK(dev_open_cpu(&f->dev, 1, NULL));
    const struct model_open_args a = {.dir = f->model_dir, .act = DT_F32, .flags = MODEL_TRAIN, .max_len = 32};
    OK(model_open(&f->model, &f->dev, &a));
    OK(optim_create(&f->optim, f->model, &(struct optim_config){.kind = OPTIM_ADAMW}));
    *state = f;
    return 0;
}

static int teardown(void **state) {
    struct fix *f = *state;
    optim_destroy(f->optim, f->model);
    model_close(f->model);
    dev_close(&f->dev);
    OK(file_remove_tree(f->dir));
    free(f->root);
    free(f->model_dir);
    free(f);
    return 0;
}

/* Fills weights and moments with values that depend on `seed`. */
static void fill(struct fix *f, int64_t seed) {
    const size_t n = (size_t)f->model->n_elems;
    float *x = malloc(n * sizeof *x);
    float *const to[3] = {f->model->master, f->optim->m, f->optim->v};
    for (int k = 0; k < 3; k++) {
        for (size_t i = 0; i < n; i++) x[i] = (float)((int64_t)(i * 2654435761u % 1000003u) * (k + 1) + seed) * 1e-7f;
        OK(dev_copy_in(&f->dev, to[k], x, n * sizeof *x));
    }
    OK(model_refresh(f->model));
    f->optim->step = seed;
    free(x);
}

static uint64_t sum(struct fix *f, const float *p) { /* order-dependent, over the bits */
    const size_t n = (size_t)f->model->n_elems;
    uint32_t *x = malloc(n * sizeof *x);
    uint64_t h = 1469598103934665603u;
    OK(dev_copy_out(&f->dev, x, p, n * sizeof *x));
    for (size_t i = 0; i < n; i++) h = (h ^ x[i]) * 1099511628211u;
    free(x);
    return h;
}

static int save_part(struct fix *f, int64_t step, int64_t keep, const char *name, bool parts_only, bool joins) {
    const struct ckpt_part part = {name, f->model, f->optim, NULL};
    json_t *trainer = json_pack("{s:I}", "global_step", (json_int_t)step);
    const struct ckpt_save_args a = {.root = f->root,
                                     .step = step,
                                     .parts = &part,
                                     .n_parts = 1,
                                     .trainer = trainer,
                                     .config_yaml = "a: 1\n",
                                     .keep = keep,
                                     .parts_only = parts_only,
                                     .joins = joins};
    const int rc = ckpt_save(&a);
    json_decref(trainer);
    return rc;
}
static int save(struct fix *f, int64_t step, int64_t keep) { return save_part(f, step, keep, "actor", false, false); }

static char *path_of(struct fix *f, int64_t step, const char *name) {
    return xasprintf("%s/global_step_%lld%s%s", f->root, (long long)step, name ? "/" : "", name ? name : "");
}
static bool there(struct fix *f, int64_t step) {
    char *p = path_of(f, step, NULL);
    const bool yes = file_is_dir(p);
    free(p);
    return yes;
}
static int64_t newest(struct fix *f) {
    int64_t step;
    char *dir;
    OK(ckpt_find(f->root, &step, &dir));
    free(dir);
    return step;
}

/* Changes one byte in the middle of a file. */
static void flip(struct fix *f, int64_t step, const char *name) {
    char *p = path_of(f, step, name);
    FILE *io = fopen(p, "r+b");
    assert_non_null(io);
    assert_int_equal(fseek(io, file_size(p) / 2, SEEK_SET), 0);
    const int c = fgetc(io);
    assert_int_equal(fseek(io, -1, SEEK_CUR), 0);
    fputc(c ^ 1, io);
    fclose(io);
    free(p);
}

static int count_files(const char *dir, const char *end) {
    int n = 0;
    DIR *d = opendir(dir);
    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d));) {
        const size_t len = strlen(e->d_name), tail = strlen(end);
        n += e->d_name[0] != '.' && len >= tail && strcmp(e->d_name + len - tail, end) == 0;
    }
    closedir(d);
    return n;
}

static void test_round_trip(void **state) {
    struct fix *f = *state;
    const struct ckpt_part part = {"actor", f->model, f->optim, NULL};
    json_t *trainer;
    int64_t step;
    char *dir;
    assert_int_equal(newest(f), -1); /* no directory at all */
    fill(f, 5);
    const uint64_t w = sum(f, f->model->master), m = sum(f, f->optim->m), v = sum(f, f->optim->v);
    OK(save(f, 12, 0));
    fill(f, 6);
    assert_true(sum(f, f->model->master) != w);
    OK(ckpt_find(f->root, &step, &dir));
    assert_int_equal(step, 12);
    OK(ckpt_verify(dir));
    OK(ckpt_load_part(dir, &part));
    assert_true(sum(f, f->model->master) == w && sum(f, f->optim->m) == m && sum(f, f->optim->v) == v);
    assert_int_equal(f->optim->step, 5);
    OK(ckpt_read_trainer(dir, &trainer));
    assert_int_equal(json_integer_value(json_object_get(trainer, "global_step")), 12);
    json_decref(trainer);
    /* actor/ is a model directory and nothing else: loaders read every *.safetensors where there is no index */
    char *model = ckpt_part_dir(dir, "actor");
    assert_int_equal(count_files(model, ".safetensors"), 1);
    struct model *again;
    const struct model_open_args a = {.dir = model, .act = DT_F32, .flags = MODEL_INFER, .max_len = 32};
    OK(model_open(&again, &f->dev, &a));
    model_close(again);
    free(model);
    free(dir);
}

static void test_other_shape(void **state) {
    struct fix *f = *state;
    fill(f, 1);
    OK(save(f, 1, 0));
    char *dir = path_of(f, 1, NULL);
    struct model smaller = *f->model; /* claims one element less */
    smaller.n_train--;
    const struct ckpt_part part = {"actor", &smaller, f->optim, NULL}, missing = {"critic", f->model, f->optim, NULL};
    assert_int_equal(ckpt_load_part(dir, &part), ERR_FORMAT);
    assert_non_null(strstr(err_msg(), "optim/actor.safetensors"));
    assert_true(ckpt_load_part(dir, &missing) < 0);
    assert_non_null(strstr(err_msg(), "critic"));
    free(dir);
}

static void test_step_of(void **state) {
    (void)state;
    int64_t v;
    OK(ckpt_step_of("a/global_step_12", &v));
    assert_int_equal(v, 12);
    OK(ckpt_step_of("global_step_0///", &v));
    assert_int_equal(v, 0);
    static const char *const bad[] = {"",
                                      "/",
                                      "a",
                                      "global_step_",
                                      "global_step_1x",
                                      "global_step_-1",
                                      "a/global_step_1.tmp",
                                      "global_step_99999999999999999999",
                                      "global_step_1/actor"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) assert_int_equal(ckpt_step_of(bad[i], &v), ERR_INVAL);
}

static void test_damage(void **state) {
    static const char *const files[] = {"actor/model.safetensors", "optim/actor.safetensors", "actor/config.json", "trainer.json",
                                        "config.yaml"};
    struct fix *f = *state;
    fill(f, 1);
    OK(save(f, 1, 0));
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        OK(save(f, 2, 0));
        char *dir = path_of(f, 2, NULL), *path = path_of(f, 2, files[i]);
        flip(f, 2, files[i]);
        assert_int_equal(ckpt_verify(dir), ERR_FORMAT);
        assert_non_null(strstr(err_msg(), files[i]));
        assert_int_equal(newest(f), 1);
        OK(save(f, 2, 0)); /* a whole one takes its place */
        assert_int_equal(newest(f), 2);
        assert_int_equal(truncate(path, file_size(path) - 1), 0);
        assert_int_equal(ckpt_verify(dir), ERR_FORMAT);
        assert_int_equal(unlink(path), 0);
        assert_int_equal(ckpt_verify(dir), ERR_FORMAT);
        assert_int_equal(newest(f), 1);
        free(path);
        free(dir);
    }
    static const char *const manifests[] = {"",
                                            "{}",
                                            "[]",
                                            "{\"files\": {}}",
                                            "{\"files\": {\"config.yaml\": 1}}",
                                            "{\"files\": {\"/etc/passwd\": {\"bytes\": 1, \"xxh3_128\": \"00\"}}}",
                                            "{\"files\": {\"../../x\": {\"bytes\": 1, \"xxh3_128\": \"00\"}}}"};
    OK(save(f, 2, 0));
    char *dir = path_of(f, 2, NULL), *path = path_of(f, 2, "manifest.json");
    for (size_t i = 0; i < sizeof manifests / sizeof *manifests; i++) {
        OK(file_write_atomic(path, manifests[i], strlen(manifests[i])));
        assert_int_equal(ckpt_verify(dir), ERR_FORMAT);
    }
    assert_int_equal(unlink(path), 0);
    assert_true(ckpt_verify(dir) < 0);
    assert_int_equal(newest(f), 1);
    free(path);
    free(dir);
}

static void test_newest(void **state) {
    struct fix *f = *state;
    fill(f, 1);
    for (int64_t s = 1; s <= 3; s++) OK(save(f, s, 0));
    assert_int_equal(newest(f), 3);
    OK(save(f, 2, 0)); /* a run that started over: 3 is of the one before */
    assert_int_equal(newest(f), 2);
    flip(f, 2, "trainer.json");
    assert_int_equal(newest(f), 1);
    flip(f, 1, "trainer.json");
    assert_int_equal(newest(f), 3);
    char *tracker = file_join(f->root, "latest_checkpointed_iteration.txt");
    static const char *const texts[] = {"", "x", "-4", "99999999999999999999999"};
    for (size_t i = 0; i < 4; i++) {
        OK(file_write_atomic(tracker, texts[i], strlen(texts[i])));
        assert_int_equal(newest(f), 3);
    }
    free(tracker);
}

static void test_retention(void **state) {
    struct fix *f = *state;
    fill(f, 1);
    for (int64_t s = 1; s <= 4; s++) OK(save(f, s, 0));
    OK(save(f, 5, 2));
    for (int64_t s = 1; s <= 5; s++) assert_int_equal(there(f, s), s >= 4);
    OK(save(f, 6, 1));
    assert_false(there(f, 4) || there(f, 5));
    assert_true(there(f, 6));
}

/* A part that another process has written comes into the checkpoint; without it there is none, and what waits is no checkpoint. */
static void test_joined_parts(void **state) {
    struct fix *f = *state;
    char *dir = path_of(f, 2, NULL), *waits = xasprintf("%s.parts.tmp", dir), *manifest = file_join(waits, "manifest.json"),
         *critic = path_of(f, 2, "critic/model.safetensors");
    fill(f, 1);
    assert_true(save_part(f, 2, 1, "actor", false, true) < 0); /* nobody has written one */
    assert_false(there(f, 2) || count_files(f->root, ".tmp"));
    OK(save_part(f, 2, 1, "critic", true, false));
    assert_true(file_exists(manifest) && !there(f, 2));
    OK(ckpt_recover(f->root)); /* its run was killed before the other part came */
    assert_false(file_exists(waits));
    fill(f, 2);
    for (int i = 0; i < 2; i++) OK(save_part(f, 2, 1, "critic", true, false)); /* the newer one counts */
    OK(save_part(f, 2, 1, "actor", false, true));
    OK(ckpt_verify(dir));
    assert_true(file_exists(critic) && !file_exists(waits));
    for (int i = 0; i < 2; i++) { /* verl's names are there for both parts, and harm no resume whatever becomes of them */
        char *config = path_of(f, 2, i ? "critic/huggingface/config.json" : "actor/huggingface/config.json");
        assert_true(file_exists(config));
        OK(file_write_atomic(config, "{}", 2));
        OK(ckpt_verify(dir));
        free(config);
    }
    assert_int_equal(newest(f), 2);
    OK(file_remove_tree(dir));
    OK(file_mkdirs(waits));
    static const char text[] = "{\"files\": {\"../outside\": {\"bytes\": 1, \"xxh3_128\": \"0\"}}, \"parts\": [\"critic\"]}";
    OK(file_write_atomic(manifest, text, strlen(text)));
    assert_int_equal(save_part(f, 2, 1, "actor", false, true), ERR_FORMAT);
    assert_false(there(f, 2));
    free(dir);
    free(waits);
    free(manifest);
    free(critic);
}

/* What a killed save left is removed by the next run alone, and a checkpoint that was moved away is brought back. */
static void test_recover(void **state) {
    struct fix *f = *state;
    char *step9 = path_of(f, 9, NULL), *step8 = path_of(f, 8, NULL),
         *half[] = {xasprintf("%s.tmp/actor", step9), xasprintf("%s.41-0123456789abcdef.tmp/actor", step9),
                    xasprintf("%s.old.tmp", step8),
                    xasprintf("%s/latest_checkpointed_iteration.txt.41-0123456789abcdef.tmp", f->root)};
    char *kept[] = {xasprintf("%s.tmp2", step9), xasprintf("%s/mine.tmp", f->root), xasprintf("%s/global_step_x.tmp", f->root),
                    xasprintf("%s/latest_checkpointed_iteration.txt.mine", f->root)};
    OK(ckpt_recover(f->root)); /* there is no directory */
    fill(f, 1);
    OK(save(f, 8, 0));
    for (int i = 0; i < 4; i++) {
        OK(file_mkdirs(half[i]));
        OK(file_mkdirs(kept[i]));
    }
    OK(save(f, 9, 0));
    for (int i = 0; i < 4; i++) assert_true(file_exists(half[i])); /* whose they are a save does not know */
    OK(ckpt_recover(f->root));
    for (int i = 0; i < 4; i++) assert_true(!file_exists(half[i]) && file_exists(kept[i]));
    assert_int_equal(newest(f), 9);
    assert_int_equal(rename(step8, half[2]), 0);
    assert_false(there(f, 8));
    OK(ckpt_recover(f->root));
    OK(ckpt_verify(step8));
    for (int i = 0; i < 4; i++) {
        free(half[i]);
        free(kept[i]);
    }
    free(step8);
    free(step9);
}

static json_t *manifest_of(struct fix *f, int64_t step) {
    char *path = path_of(f, step, "manifest.json");
    json_t *m;
    OK(json_load(&m, path, 0));
    free(path);
    return m;
}
static void put_manifest(struct fix *f, int64_t step, json_t *m) {
    char *path = path_of(f, step, "manifest.json");
    OK(json_save_atomic(path, m));
    json_decref(m);
    free(path);
}

/* Every file that is there has the bytes that the manifest says; what it leaves out makes the difference. */
static void test_required(void **state) {
    static const char *const files[] = {"actor/model.safetensors", "optim/actor.safetensors", "actor/config.json", "trainer.json",
                                        "config.yaml"};
    struct fix *f = *state;
    fill(f, 1);
    OK(save(f, 1, 0));
    char *dir = path_of(f, 2, NULL);
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        OK(save(f, 2, 0));
        json_t *m = manifest_of(f, 2);
        assert_int_equal(json_object_del(json_object_get(m, "files"), files[i]), 0);
        put_manifest(f, 2, m);
        assert_int_equal(ckpt_verify(dir), ERR_FORMAT);
        assert_non_null(strstr(err_msg(), files[i]));
        assert_int_equal(newest(f), 1);
    }
    json_t *m = manifest_of(f, 1);
    json_array_append_new(json_object_get(m, "parts"), json_string("critic"));
    put_manifest(f, 1, m);
    free(dir);
    dir = path_of(f, 1, NULL);
    assert_int_equal(ckpt_verify(dir), ERR_FORMAT);
    assert_non_null(strstr(err_msg(), "critic"));
    free(dir);
    dir = path_of(f, 2, NULL);
    OK(save(f, 2, 0));
    m = manifest_of(f, 2);
    json_object_set_new(m, "format", json_integer(3));
    put_manifest(f, 2, m);
    assert_int_equal(ckpt_verify(dir), ERR_UNSUPPORTED);
    OK(save(f, 2, 0));
    m = manifest_of(f, 2);
    json_object_del(m, "step");
    put_manifest(f, 2, m);
    assert_int_equal(ckpt_verify(dir), ERR_FORMAT);
    free(dir);
}

/* A checkpoint under another number would be gone on from as that step. */
static void test_other_number(void **state) {
    struct fix *f = *state;
    char *one = path_of(f, 1, NULL), *nine = path_of(f, 9, NULL), *copy = file_join(f->root, "best"),
         *tracker = file_join(f->root, "latest_checkpointed_iteration.txt");
    fill(f, 1);
    OK(save(f, 1, 0));
    OK(save(f, 2, 0));
    assert_int_equal(rename(one, nine), 0);
    OK(file_write_atomic(tracker, "9", 1));
    assert_int_equal(ckpt_verify(nine), ERR_FORMAT);
    assert_non_null(strstr(err_msg(), "global_step_9"));
    assert_int_equal(newest(f), 2);
    assert_int_equal(rename(nine, copy), 0); /* a name without a number says nothing about the step */
    OK(ckpt_verify(copy));
    free(tracker);
    free(copy);
    free(nine);
    free(one);
}

/* A checkpoint of 0.1.0 has the optimizer's state within actor/. */
static void test_format_1(void **state) {
    struct fix *f = *state;
    const struct ckpt_part part = {"actor", f->model, f->optim, NULL};
    fill(f, 5);
    const uint64_t w = sum(f, f->model->master), v = sum(f, f->optim->v);
    OK(save(f, 3, 0));
    char *dir = path_of(f, 3, NULL), *at = path_of(f, 3, "optim/actor.safetensors"),
         *old = path_of(f, 3, "actor/optim.safetensors");
    assert_int_equal(rename(at, old), 0);
    json_t *m = manifest_of(f, 3), *files = json_object_get(m, "files");
    json_object_set(files, "actor/optim.safetensors", json_object_get(files, "optim/actor.safetensors"));
    json_object_del(files, "optim/actor.safetensors");
    json_object_del(m, "parts");
    json_object_set_new(m, "format", json_integer(1));
    put_manifest(f, 3, m);
    fill(f, 6);
    assert_int_equal(newest(f), 3);
    OK(ckpt_load_part(dir, &part));
    assert_true(sum(f, f->model->master) == w && sum(f, f->optim->v) == v);
    assert_int_equal(f->optim->step, 5);
    free(old);
    free(at);
    free(dir);
}

static void put_foreign(struct fix *f, int64_t step, const char *name, const char *text) {
    char *path = path_of(f, step, name), *dir = xstrdup(path);
    *strrchr(dir, '/') = 0;
    OK(file_mkdirs(dir));
    OK(file_write_atomic(path, text, strlen(text)));
    free(dir);
    free(path);
}
static bool holds(struct fix *f, const char *path, const char *text) {
    struct buf b = {0};
    char *full = file_join(f->root, path);
    const bool yes = file_read(&b, full, 0) == 0 && b.n == strlen(text) && memcmp(b.p, text, b.n) == 0;
    buf_free(&b);
    free(full);
    return yes;
}

/* A global_step_N of another program (verl's) is not counted, moved, deleted, written over or resumed. */
static void test_foreign(void **state) {
    static const char tracker[] = "latest_checkpointed_iteration.txt", verls[] = "global_step_7/actor/model_world_size_1_rank_0.pt";
    struct fix *f = *state;
    int64_t step;
    char *dir, *path = file_join(f->root, tracker), *tmp = path_of(f, 7, NULL);
    fill(f, 1);
    put_foreign(f, 7, "actor/model_world_size_1_rank_0.pt", "verl");
    assert_int_equal(ckpt_find(f->root, &step, &dir), ERR_UNSUPPORTED);
    assert_non_null(strstr(err_msg(), "global_step_7"));
    OK(save(f, 1, 0)); /* beside it: the tracker file is ours, and so is the newest */
    assert_int_equal(newest(f), 1);
    put_foreign(f, 2, "manifest.json", "{\"files\": {}}"); /* not ours either */
    for (int64_t s = 3; s <= 8; s++)
        if (s != 7) OK(save(f, s, 2));
    for (int64_t s = 1; s <= 8; s++) assert_int_equal(there(f, s), s == 2 || s >= 6);
    assert_int_equal(save(f, 7, 2), ERR_IO);
    assert_non_null(strstr(err_msg(), "global_step_7"));
    assert_int_equal(newest(f), 8);
    assert_true(holds(f, verls, "verl"));
    assert_int_equal(count_files(tmp, ""), 1);
    /* verl's tracker file names verl's checkpoint: it stays, and no other is resumed in its place */
    OK(file_write_atomic(path, "7", 1));
    OK(save(f, 9, 1));
    assert_true(holds(f, tracker, "7") && holds(f, verls, "verl"));
    assert_int_equal(ckpt_find(f->root, &step, &dir), ERR_UNSUPPORTED);
    static const int64_t spans[][3] = {{0, 9, 2}, {2, 9, 7}, {2, 6, -1}, {7, 9, -1}, {6, 7, 7}};
    for (size_t i = 0; i < sizeof spans / sizeof *spans; i++) {
        OK(ckpt_foreign(f->root, spans[i][0], spans[i][1], &step));
        assert_int_equal(step, spans[i][2]);
    }
    free(path);
    free(tmp);
}

static void test_not_finite(void **state) {
    struct fix *f = *state;
    const float bad[2] = {__builtin_nanf(""), -__builtin_inff()};
    fill(f, 1);
    OK(save(f, 1, 1));
    for (int i = 0; i < 2; i++) {
        fill(f, 2);
        OK(dev_copy_in(&f->dev, f->model->master + f->model->params[1].offset, &bad[i], sizeof bad[i]));
        assert_int_equal(save(f, 2, 1), ERR_NUMERIC);
        assert_non_null(strstr(err_msg(), f->model->params[1].name));
        assert_true(there(f, 1) && !there(f, 2));
        assert_int_equal(newest(f), 1);
    }
}

/* No file may grow past a limit: whichever write meets it, nothing is left of the save. */
static void test_full_disk(void **state) {
    struct fix *f = *state;
    struct rlimit was, limit;
    fill(f, 1);
    OK(save(f, 1, 1));
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &was), 0);
    static const rlim_t limits[] = {0, 10, 100, 500, 3000, 20000};
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        limit = (struct rlimit){limits[i], was.rlim_max};
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
        const int rc = save(f, 2, 1);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &was), 0);
        assert_int_equal(rc, ERR_IO);
        assert_non_null(strstr(err_msg(), "checkpoint of step 2 was not saved"));
        assert_false(count_files(f->root, ".tmp") || there(f, 2));
        assert_int_equal(newest(f), 1);
        OK(save_part(f, 2, 1, "critic", true, false)); /* it had come before the disk was full */
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
        const int joins = save_part(f, 2, 1, "actor", false, true);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &was), 0);
        assert_int_equal(joins, ERR_IO);
        assert_false(count_files(f->root, ".tmp") || there(f, 2));
    }
    OK(save(f, 2, 1));
    assert_int_equal(newest(f), 2);
}

static void test_root_in_the_way(void **state) {
    struct fix *f = *state;
    int64_t step;
    char *dir;
    OK(file_write_atomic(f->root, "x", 1));
    assert_int_equal(save(f, 1, 0), ERR_IO);
    assert_int_equal(ckpt_find(f->root, &step, &dir), ERR_INPUT);
    OK(file_remove_tree(f->root));
}

#define T(fn) cmocka_unit_test_setup_teardown(fn, setup, teardown)
int main(void) {
    const struct CMUnitTest tests[] = {
        T(test_round_trip),   T(test_other_shape), cmocka_unit_test(test_step_of),
        T(test_damage),       T(test_newest),      T(test_retention),
        T(test_joined_parts), T(test_recover),     T(test_required),
        T(test_other_number), T(test_format_1),    T(test_foreign),
        T(test_not_finite),   T(test_full_disk),   T(test_root_in_the_way),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
