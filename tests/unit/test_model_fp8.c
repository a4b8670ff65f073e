/* test_model_fp8.c - files with matrices in FP8 by blocks: read as the model in bf16 that torch makes of them, exported as that;
 * what is refused, by name. The fixture comes from tools/oracle_model.py (make_fp8). */
#include "model_case.h"

#include "model/files/export.h"

#include <jansson.h>

static const char CASE[] = "qwen3_moe_fp8", CODES[] = "model.layers.0.self_attn.o_proj.weight",
                  SCALES[] = "model.layers.0.self_attn.o_proj.weight_scale_inv";

static int open_dir(struct model **m, struct dev *d, const char *dir, enum dtype act) {
    return model_open(m, d, &(struct model_open_args){.dir = dir, .act = act, .max_len = 32});
}

static void export_is_bf16(void **state) {
    static const enum dtype acts[] = {DT_F32, DT_BF16};
    struct dev d;
    struct safetensors_file *want, *got;
    char *dir = case_path(CASE, ""), *golden = case_path(CASE, "bf16.safetensors");
    (void)state;
    OK(dev_open_cpu(&d, 2, NULL));
    OK(safetensors_open(&want, golden));
    for (int k = 0; k < 2; k++) {
        struct model *m;
        char *out = case_temp_dir(), *file = file_join(out, "model.safetensors"), *config = file_join(out, "config.json");
        OK(open_dir(&m, &d, dir, acts[k]));
        OK(model_export(m, out, &(struct model_export_args){.dt = -1}));
        OK(safetensors_open(&got, file));
        assert_int_equal(safetensors_count(got), safetensors_count(want));
        for (int64_t i = 0; i < safetensors_count(want); i++) {
            const struct safetensors_tensor *const w = safetensors_at(want, i), *const g = safetensors_find(got, w->name);
            assert_non_null(g);
            assert_int_equal(g->dt, DT_BF16);
            assert_int_equal(g->bytes, w->bytes);
            assert_memory_equal(g->data, w->data, w->bytes);
        }
        json_t *const o = json_load_file(config, 0, NULL);
        assert_true(o && !json_object_get(o, "quantization_config"));
        json_decref(o);
        safetensors_close(got);
        model_close(m);
        case_drop_dir(out);
        free(file);
        free(config);
    }
    safetensors_close(want);
    free(dir);
    free(golden);
    dev_close(&d);
}

/* The fixture with other tensors for CODES and SCALES; NULL: without. Opens it. */
static int open_with(struct dev *d, const struct safetensors_write_tensor *codes, const struct safetensors_write_tensor *scales,
                     const char *block) {
    struct safetensors_file *from;
    struct safetensors_write_tensor t[256];
    struct model *m = NULL;
    int64_t n = 0;
    char *path = case_path(CASE, "model.safetensors"), *config = case_path(CASE, "config.json"), *dir = case_temp_dir();
    char *file = file_join(dir, "model.safetensors"), *to = file_join(dir, "config.json");
    OK(safetensors_open(&from, path));
    for (int64_t i = 0; i < safetensors_count(from); i++) {
        const struct safetensors_tensor *const s = safetensors_at(from, i);
        const bool is_codes = strcmp(s->name, CODES) == 0, is_scales = strcmp(s->name, SCALES) == 0;
        assert_true(n < 256);
        if (is_scales && !scales) continue;
        t[n] = (struct safetensors_write_tensor){.name = s->name, .dt = s->dt, .nd = s->nd, .data = s->data};
        memcpy(t[n].dim, s->dim, sizeof s->dim);
        if (is_codes && codes) t[n] = *codes;
        if (is_scales && scales->name) t[n] = *scales;
        n++;
    }
    OK(safetensors_write(NULL, file, t, n, NULL));
    json_t *const o = json_load_file(config, 0, NULL);
    if (!block) json_object_del(o, "quantization_config");
    else json_object_set_new(json_object_get(o, "quantization_config"), "weight_block_size", json_loads(block, 0, NULL));
    assert_int_equal(json_dump_file(o, to, 0), 0);
    const int rc = open_dir(&m, d, dir, DT_F32);
    if (rc == 0) model_close(m);
    json_decref(o);
    safetensors_close(from);
    case_drop_dir(dir);
    free(path);
    free(config);
    free(file);
    free(to);
    return rc;
}

#define REFUSED(call, code, text)                                           \
    do {                                                                    \
        assert_int_equal(call, code);                                       \
        if (!strstr(err_msg(), text)) fail_msg("%s: %s", #call, err_msg()); \
    } while (0)

static void refused(void **state) {
    enum { ROWS = 32, COLS = 64 };
    static uint8_t code[ROWS * COLS];
    static const float scale[2 * 4] = {1, 1, 1, 1, 1, 1, 1, 1};
    static const char same[] = "[24, 20]";
    const struct safetensors_write_tensor own = {0};
    struct safetensors_write_tensor w = {.name = CODES, .dt = DT_E4M3, .nd = 2, .dim = {ROWS, COLS}, .data = code},
                                    s = {.name = SCALES, .dt = DT_F32, .nd = 2, .dim = {2, 4}, .data = scale};
    struct dev d;
    (void)state;
    OK(dev_open_cpu(&d, 2, NULL));
    memset(code, 0x38, sizeof code); /* 1 */
    OK(open_with(&d, NULL, &own, same));
    OK(open_with(&d, &w, &s, same));
    code[ROWS * COLS - 1] = 0x7f;
    REFUSED(open_with(&d, &w, &s, same), ERR_FORMAT, "o_proj.weight holds NaN or Inf");
    REFUSED(open_with(&d, NULL, NULL, same), ERR_FORMAT, "tensor model.layers.0.self_attn.o_proj.weight_scale_inv is missing");
    s.dim[1] = 3;
    REFUSED(open_with(&d, NULL, &s, same), ERR_FORMAT, "does not have the shape (2, 4): a number for each block of 24 x 20");
    s = (struct safetensors_write_tensor){.name = SCALES, .dt = DT_U8, .nd = 2, .dim = {2, 4}, .data = code};
    REFUSED(open_with(&d, NULL, &s, same), ERR_UNSUPPORTED, "unsupported dtype u8 for scales");
    w.dim[0] = ROWS - 1;
    REFUSED(open_with(&d, &w, &own, same), ERR_FORMAT, "has shape (31, 64), config.json asks for (32, 64)");
    REFUSED(open_with(&d, NULL, &own, NULL), ERR_UNSUPPORTED, "unsupported FP8, which config.json's quantization_config does not");
    REFUSED(open_with(&d, NULL, &own, "[128, 128]"), ERR_FORMAT, "does not have the shape (1, 1)");
    REFUSED(open_with(&d, NULL, &own, "[0, 128]"), ERR_FORMAT, "\"weight_block_size\" is not two numbers");
    REFUSED(open_with(&d, NULL, &own, "[128]"), ERR_UNSUPPORTED,
            "(fp8, fmt e4m3, activation_scheme dynamic, no weight_block_size)");
    dev_close(&d);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(export_is_bf16), cmocka_unit_test(refused)};
    return cmocka_run_group_tests_name("model fp8", tests, NULL, NULL);
}
