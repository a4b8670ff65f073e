/* test_model_files.c - damaged model directories and failing disks: each gives
 * one line that names the file and the tensor, and leaves no memory behind. */
#include "model_case.h"

#include "base/json.h"

struct place {
    char *dir, *weights, *config;
};
static void place_open(struct place *p) {
    p->dir = case_temp_dir();
    p->weights = file_join(p->dir, "model.safetensors");
    p->config = file_join(p->dir, "config.json");
    char *w = case_path("qwen2", "model.safetensors"), *c = case_path("qwen2", "config.json");
    case_copy(w, p->dir, "model.safetensors");
    case_copy(c, p->dir, "config.json");
    free(w);
    free(c);
}
static void place_close(struct place *p) {
    free(p->weights);
    free(p->config);
    case_drop_dir(p->dir);
}

/* Opening dir must fail with this code, and say each of the words. */
static void refuses(const char *dir, int code, const char *says, const char *also) {
    struct dev d;
    struct model *m = NULL;
    OK(dev_open_ref(&d));
    const int rc = model_open(&m, &d, &(struct model_open_args){.dir = dir, .act = DT_F32, .flags = MODEL_TRAIN, .max_len = 8});
    if (rc != code) fail_msg("expected %d (%s), got %d: %s", code, says, rc, rc < 0 ? err_msg() : "success");
    if (!strstr(err_msg(), says) || !strstr(err_msg(), also)) fail_msg("expected '%s' and '%s' in: %s", says, also, err_msg());
    assert_null(strchr(err_msg(), '\n'));
    assert_null(m);
    assert_int_equal(d.allocated, 0);
    dev_close(&d);
}

/* Replaces the weights by a file with this header and n bytes of zeros. */
static void write_header(const struct place *p, const char *header, size_t n) {
    struct buf b = {0};
    const uint64_t len = strlen(header);
    buf_add(&b, &len, 8);
    buf_adds(&b, header);
    for (size_t i = 0; i < n; i++) buf_addc(&b, 0);
    OK(file_write_atomic(p->weights, b.p, b.n));
    buf_free(&b);
}

static void missing_things(void **state) {
    (void)state;
    struct place p;
    place_open(&p);
    refuses("/nonexistent/model", ERR_INPUT, "/nonexistent/model", "does not exist");
    refuses(p.config, ERR_INPUT, "config.json", "not a model directory");
    unlink(p.weights);
    refuses(p.dir, ERR_INPUT, p.dir, "model.safetensors");
    char *bin = file_join(p.dir, "pytorch_model.bin");
    OK(file_write_atomic(bin, "x", 1));
    refuses(p.dir, ERR_UNSUPPORTED, "unsupported", "pytorch_model.bin");
    free(bin);
    OK(file_write_atomic(p.config, "{\"model_type\": ", 15));
    refuses(p.dir, ERR_FORMAT, "config.json", "not JSON");
    OK(file_write_atomic(p.config, "{\"model_type\": \"mamba\"}", 23));
    refuses(p.dir, ERR_UNSUPPORTED, "unsupported architecture mamba", "config.json");
    unlink(p.config);
    refuses(p.dir, ERR_INPUT, p.dir, "no config.json");
    place_close(&p);
}

static void truncated_at_every_kind_of_place(void **state) {
    (void)state;
    struct place p;
    struct buf whole = {0};
    place_open(&p);
    OK(file_read(&whole, p.weights, 0));
    const size_t cuts[] = {0, 7, 8, 100, 1000, whole.n / 2, whole.n - 1};
    for (size_t i = 0; i < sizeof cuts / sizeof cuts[0]; i++) {
        OK(file_write_atomic(p.weights, whole.p, cuts[i]));
        refuses(p.dir, ERR_FORMAT, p.weights, "");
    }
    buf_addc(&whole, 'x');
    OK(file_write_atomic(p.weights, whole.p, whole.n));
    refuses(p.dir, ERR_FORMAT, p.weights, "1 bytes after the last tensor");
    buf_free(&whole);
    place_close(&p);
}

static void bad_headers(void **state) {
    (void)state;
    struct place p;
    place_open(&p);
    uint64_t huge[2] = {UINT64_MAX, 0};
    OK(file_write_atomic(p.weights, huge, sizeof huge));
    refuses(p.dir, ERR_FORMAT, p.weights, "header of 18446744073709551615 bytes");
    static const struct {
        const char *header;
        size_t bytes;
        int code;
        const char *says;
    } bad[] = {
        {"{", 0, ERR_FORMAT, "not JSON"},
        {"[1]", 0, ERR_FORMAT, "not a JSON object"},
        {"{\"a\":1}", 0, ERR_FORMAT, "tensor a"},
        {"{\"a\":{\"dtype\":\"F8_E5M2\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, ERR_UNSUPPORTED,
         "tensor a: unsupported dtype F8_E5M2"},
        {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, ERR_FORMAT, "no \"shape\""},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", 4, ERR_FORMAT, "list of sizes"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}", 4, ERR_FORMAT, "4 bytes of data for a shape of 8"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 4, ERR_FORMAT, "outside the 4 bytes"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}", 4, ERR_FORMAT, "outside"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}", 4, ERR_FORMAT, "[begin, end]"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,4]}}", 4, ERR_FORMAT, "too large"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
         "\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}",
         4, ERR_FORMAT, "overlaps tensor"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}", 8, ERR_FORMAT, "4 unused bytes before tensor a"},
        {"{}", 0, ERR_FORMAT, "tensor model.embed_tokens.weight is missing"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        write_header(&p, bad[i].header, bad[i].bytes);
        refuses(p.dir, bad[i].code, p.weights, bad[i].says);
    }
    place_close(&p);
}

static void wrong_shape(void **state) {
    (void)state;
    struct place p;
    json_t *o;
    place_open(&p);
    OK(json_load(&o, p.config, 0));
    json_object_set_new(o, "intermediate_size", json_integer(48));
    OK(json_save_atomic(p.config, o));
    refuses(p.dir, ERR_FORMAT, "model.safetensors: tensor model.layers.0.mlp.gate_proj.weight has shape (40, 32)", "(48, 32)");
    json_object_set_new(o, "tie_word_embeddings", json_false());
    json_object_set_new(o, "intermediate_size", json_integer(40));
    OK(json_save_atomic(p.config, o));
    refuses(p.dir, ERR_FORMAT, "tensor lm_head.weight is missing", p.weights);
    json_decref(o);
    place_close(&p);
}

static void not_finite(void **state) {
    (void)state;
    struct place p;
    struct safetensors_file *f;
    struct buf b = {0};
    place_open(&p);
    OK(safetensors_open(&f, p.weights));
    OK(file_read(&b, p.weights, 0));
    const struct safetensors_tensor *t = safetensors_find(f, "model.layers.1.mlp.up_proj.weight");
    size_t header;
    memcpy(&header, b.p, 8);
    const size_t at = 8 + header + (size_t)(t->data - safetensors_at(f, 0)->data) + t->bytes - 4; /* its last value */
    safetensors_close(f);
    const float bad[] = {NAN, -INFINITY};
    for (int i = 0; i < 2; i++) {
        memcpy(b.p + at, &bad[i], 4);
        OK(file_write_atomic(p.weights, b.p, b.n));
        refuses(p.dir, ERR_FORMAT, "tensor model.layers.1.mlp.up_proj.weight holds NaN or Inf", p.weights);
    }
    buf_free(&b);
    place_close(&p);
}

static void bad_index(void **state) {
    (void)state;
    struct place p;
    place_open(&p);
    char *index = file_join(p.dir, "model.safetensors.index.json");
    static const struct {
        const char *text, *says;
        int code;
    } bad[] = {
        {"{}", "weight_map", ERR_FORMAT},
        {"{\"weight_map\":{\"a\":\"../model.safetensors\"}}", "tensor a", ERR_FORMAT},
        {"{\"weight_map\":{\"a\":\"/etc/passwd\"}}", "tensor a", ERR_FORMAT},
        {"{\"weight_map\":{\"a\":3}}", "tensor a", ERR_FORMAT},
        {"{\"weight_map\":{\"a\":\"absent.safetensors\"}}", "absent.safetensors", ERR_INPUT},
        {"{\"weight_map\":{\"a\":\"model.safetensors\"}}", "does not list tensor model.embed_tokens.weight", ERR_FORMAT},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        OK(file_write_atomic(index, bad[i].text, strlen(bad[i].text)));
        refuses(p.dir, bad[i].code, bad[i].says, p.dir);
    }
    free(index);
    place_close(&p);
}

/* ---- writing ---- */

static int zeros(void *arg, size_t off, void *dst, size_t n) {
    (void)arg, (void)off;
    memset(dst, 0, n);
    return 0;
}
static int broken(void *arg, size_t off, void *dst, size_t n) {
    (void)arg, (void)dst, (void)n;
    if (off > 0) FAIL(ERR_DEVICE, "lost the device");
    memset(dst, 0, n);
    return 0;
}
static void full_disk(void **state) {
    (void)state;
    struct safetensors_write_tensor t = {.name = "a", .dt = DT_F32, .nd = 1, .dim = {4 << 20}, .read = zeros};
    assert_int_equal(safetensors_write(NULL, "/dev/full", &t, 1, NULL), ERR_IO);
    assert_non_null(strstr(err_msg(), "/dev/full: No space left on device"));
    assert_int_equal(safetensors_write(NULL, "/nonexistent/x", &t, 1, NULL), ERR_IO);
    t.read = broken;
    assert_int_equal(safetensors_write(NULL, "/dev/null", &t, 1, NULL), ERR_DEVICE); /* the reader's error, not the writer's */
    assert_string_equal(err_msg(), "lost the device");
}
static void unwritable_output(void **state) {
    (void)state;
    struct place p;
    struct dev d;
    struct model *m;
    struct tokenizer_files *none;
    place_open(&p);
    OK(dev_open_ref(&d));
    OK(model_open(&m, &d, &(struct model_open_args){.dir = p.dir, .act = DT_F32, .max_len = 8}));
    char *under_file = file_join(p.config, "out");
    assert_int_equal(model_export(m, under_file, &(struct model_export_args){.dt = -1}), ERR_IO);
    assert_non_null(strstr(err_msg(), "config.json"));
    OK(tokenizer_files_read(&none, p.dir));
    assert_null(none);
    free(under_file);
    model_close(m);
    assert_int_equal(d.allocated, 0);
    dev_close(&d);
    place_close(&p);
}

/* Too little memory: an error with the size, not a crash. */
static void no_memory(void **state) {
    (void)state;
    struct place p;
    struct dev d;
    struct model *m = NULL;
    place_open(&p);
    OK(dev_open_ref(&d));
    for (size_t room = 0; room < 200000; room += 20000) {
        d.mem_total = room + 1;
        const int rc =
            model_open(&m, &d, &(struct model_open_args){.dir = p.dir, .act = DT_F32, .flags = MODEL_TRAIN, .max_len = 8});
        if (rc == 0) {
            model_close(m);
            break;
        }
        assert_int_equal(rc, ERR_NOMEM);
        assert_int_equal(d.allocated, 0);
    }
    dev_close(&d);
    place_close(&p);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(missing_things), cmocka_unit_test(truncated_at_every_kind_of_place),
        cmocka_unit_test(bad_headers),    cmocka_unit_test(wrong_shape),
        cmocka_unit_test(not_finite),     cmocka_unit_test(bad_index),
        cmocka_unit_test(full_disk),      cmocka_unit_test(unwritable_output),
        cmocka_unit_test(no_memory),
    };
    return cmocka_run_group_tests_name("model files", tests, NULL, NULL);
}
