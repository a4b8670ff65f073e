/* test_model_experts.c - models with experts at their edges: files whose experts are stacked, as transformers 5 has them in memory;
 * where an adapter may be and where not; a quantised base; what is refused, by name.
 *
 * Numbers are compared with transformers in golden/test_model_golden.c, the bits in inv/test_model_invariants.c. */
#include "model_case.h"

#include "model/files/export.h"

#include <jansson.h>

static int open_dir(struct model **m, struct dev *d, const char *dir, enum quant_kind quant) {
    return model_open(m, d, &(struct model_open_args){.dir = dir, .act = DT_F32, .max_len = 32, .quant = quant});
}

/* ---- stacked files ---- */

enum { LAYERS = 3, EXPERTS = 6, HIDDEN = 32, WIDTH = 24 };

/* Which tensors a stacked file of the fixture has in the place of its experts'; `rows` less than there should be. */
static void write_stacked(const struct safetensors_file *from, const char *dir, int64_t cut) {
    struct safetensors_write_tensor t[80] = {0};
    char names[2 * LAYERS][80];
    float *data[2 * LAYERS] = {0};
    int64_t n = 0, stacks = 0;
    for (int64_t i = 0; i < safetensors_count(from); i++) {
        const struct safetensors_tensor *s = safetensors_at(from, i);
        if (strstr(s->name, ".experts.")) continue;
        t[n] = (struct safetensors_write_tensor){.name = s->name, .dt = s->dt, .nd = s->nd, .data = s->data};
        memcpy(t[n++].dim, s->dim, sizeof s->dim);
    }
    for (int l = 0; l < LAYERS; l++)
        for (int down = 0; down < 2 && l != 1; down++) { /* layer 1 has one MLP */
            static const char *const part[2][2] = {{"gate_proj", "up_proj"}, {"down_proj", NULL}};
            const int64_t rows = down ? HIDDEN : 2 * WIDTH, cols = down ? WIDTH : HIDDEN;
            float *at = data[stacks] = xmalloc((size_t)(EXPERTS * rows * cols) * sizeof *at);
            for (int e = 0; e < EXPERTS; e++)
                for (int p = 0; p < 2 && part[down][p]; p++) {
                    char *name = xasprintf("model.layers.%d.mlp.experts.%d.%s.weight", l, e, part[down][p]);
                    const struct safetensors_tensor *s = safetensors_find(from, name);
                    assert_non_null(s);
                    memcpy(at, s->data, s->bytes);
                    at += s->bytes / sizeof *at;
                    free(name);
                }
            snprintf(names[stacks], sizeof names[0], "model.layers.%d.mlp.experts.%s", l, down ? "down_proj" : "gate_up_proj");
            t[n++] = (struct safetensors_write_tensor){
                .name = names[stacks], .dt = DT_F32, .nd = 3, .dim = {EXPERTS, rows - cut, cols}, .data = data[stacks]};
            stacks++;
        }
    char *path = file_join(dir, "model.safetensors");
    OK(safetensors_write(NULL, path, t, n, NULL));
    for (int64_t i = 0; i < stacks; i++) free(data[i]);
    free(path);
}

static void stacked_files(void **state) {
    char *released = case_path("qwen3_moe", "model.safetensors"), *config = case_path("qwen3_moe", "config.json");
    char *dir = case_temp_dir(), *out = case_temp_dir(), *path = file_join(out, "model.safetensors");
    struct safetensors_file *want, *got;
    struct model *m;
    struct dev d;
    (void)state;
    case_dev(&d, "cpu", 2);
    OK(safetensors_open(&want, released));
    case_copy(config, dir, "config.json");
    write_stacked(want, dir, 0);
    OK(open_dir(&m, &d, dir, QUANT_NONE));
    OK(model_export(m, out, &(struct model_export_args){.dt = -1})); /* under the released names */
    OK(safetensors_open(&got, path));
    assert_int_equal(safetensors_count(got), safetensors_count(want));
    for (int64_t i = 0; i < safetensors_count(want); i++) {
        const struct safetensors_tensor *a = safetensors_at(want, i), *b = safetensors_find(got, a->name);
        if (!b || b->bytes != a->bytes || memcmp(b->data, a->data, a->bytes) != 0) fail_msg("%s differs", a->name);
    }
    safetensors_close(got);
    model_close(m);
    write_stacked(want, dir, 1);
    assert_int_equal(open_dir(&m, &d, dir, QUANT_NONE), ERR_FORMAT);
    if (!strstr(err_msg(), "model.layers.0.mlp.experts.gate_up_proj has shape (6, 47, 32), config.json asks for (6, 48, 32)"))
        fail_msg("%s", err_msg());
    safetensors_close(want);
    dev_close(&d);
    case_drop_dir(dir);
    case_drop_dir(out);
    free(released);
    free(config);
    free(path);
}

/* ---- adapters ---- */

static int adapt(struct model *m, const char *targets) {
    struct lora_config l = {.rank = 2, .alpha = 4, .targets = json_loads(targets, JSON_DECODE_ANY, NULL)};
    assert_non_null(l.targets);
    const int rc = model_lora_create(m, &l, 1);
    lora_config_free(&l);
    return rc;
}

static void adapters(void **state) {
    static const struct {
        const char *targets, *says;
        int64_t n; /* modules */
    } cases[] = {
        {"\"all-linear\"", NULL, 3 * 4 + 3 + 2 * 6 * 3}, /* attention, the MLP of layer 1, the experts of the others */
        {"[\"q_proj\", \"o_proj\"]", NULL, 6},
        {"[\"down_proj\"]", NULL, 1 + 2 * 6},
        {"\".*experts.*\"", NULL, 2 * 6 * 3},
        {"\".*layers.0.mlp.experts.*.(gate|up)_proj\"", NULL, 6 * 2},
        {"[\"q_proj\", \"gate\"]", "an adapter on gate, the router of the experts, is unsupported; it can be on q_proj, k_proj", 0},
        {"[\"mlp.experts.3.up_proj\"]", "an adapter on some experts of a layer alone is unsupported: model.layers.0.mlp.experts.3",
         0},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *dir = case_path("qwen3_moe", "");
        struct model *m;
        struct dev d;
        case_dev(&d, "cpu", 1);
        OK(open_dir(&m, &d, dir, QUANT_NONE));
        const int rc = adapt(m, cases[i].targets);
        if (cases[i].says && (rc == 0 || !strstr(err_msg(), cases[i].says)))
            fail_msg("%s: %d, %s", cases[i].targets, rc, err_msg());
        if (!cases[i].says) {
            OK(rc);
            assert_int_equal(m->n_train_params, 2 * cases[i].n);
        }
        model_close(m);
        dev_close(&d);
        free(dir);
    }
}

/* A quantised model has the numbers of one whose matrices are the dequantised ones, whichever device computes. */
static void quantized_base(void **state) {
    char *dir = case_path("qwen3_moe", "");
    (void)state;
    for (int kind = QUANT_NF4; kind <= QUANT_INT8; kind++) {
        float *logp[3] = {0};
        int64_t n = 0;
        for (int way = 0; way < 3; way++) { /* ref, cpu; the export of the former, not quantised */
            struct model_case c = {0};
            struct model_batch b;
            struct model_acts *a;
            static char *exported;
            case_dev(&c.dev, way == 0 ? "ref" : "cpu", 2);
            OK(open_dir(&c.m, &c.dev, way == 2 ? exported : dir, way == 2 ? QUANT_NONE : (enum quant_kind)kind));
            if (way == 0) {
                exported = case_temp_dir();
                OK(model_export(c.m, exported, &(struct model_export_args){.dt = DT_F32}));
            }
            case_golden(&c, "qwen3_moe");
            const struct case_seq s = {case_seq_at(&c, 0).ids, 20};
            int32_t row[19];
            float inv_temp[19];
            for (int i = 0; i < 19; i++) row[i] = i, inv_temp[i] = 1;
            case_pack(&c.dev, &b, &s, 1);
            OK(model_acts_create(&a, c.m, s.n, MODEL_KEEP_NONE, NULL));
            OK(model_forward(c.m, &b, a));
            logp[way] = xmalloc(sizeof inv_temp);
            n = 19;
            OK(model_logp(
                c.m, a,
                &(struct model_logp_args){.n = n, .row = row, .target = s.ids + 1, .inv_temp = inv_temp, .logp = logp[way]}));
            model_acts_destroy(a);
            case_unpack(&c.dev, &b);
            case_close(&c);
            if (way == 2) case_drop_dir(exported);
        }
        assert_true(case_worst(logp[1], logp[0], n) <= 1e-5);
        assert_memory_equal(logp[1], logp[2], (size_t)n * sizeof(float));
        for (int way = 0; way < 3; way++) free(logp[way]);
    }
    free(dir);
}

/* Log-probs and the adapter's gradient of n sequences from `first` on. */
static void pass_of(struct model *m, const int32_t *ids, int first, int n, float *logp, float *grad, bool add) {
    enum { LEN = 90 };
    struct case_seq s[8];
    struct model_batch b;
    struct model_acts *a;
    int32_t row[8 * LEN], target[8 * LEN];
    float inv_temp[8 * LEN], dlogp[8 * LEN];
    int64_t k = 0;
    for (int i = 0; i < n; i++) {
        s[i] = (struct case_seq){ids + (first + i) * LEN, LEN};
        for (int t = 0; t + 1 < LEN; t++, k++) {
            row[k] = i * LEN + t;
            target[k] = s[i].ids[t + 1];
            inv_temp[k] = 1;
            dlogp[k] = 0.01f * (float)((t + first + i) % 5 - 2);
        }
    }
    struct model_logp_args l = {.n = k, .row = row, .target = target, .inv_temp = inv_temp, .logp = logp};
    case_pack(m->dev, &b, s, n);
    OK(model_acts_create(&a, m, b.n_rows, MODEL_KEEP_ALL, NULL));
    OK(model_forward(m, &b, a));
    OK(model_logp(m, a, &l));
    OK(model_backward(m, a,
                      &(struct model_backward_args){
                          .batch = &b, .logp = &l, .dlogp = dlogp, .sink = &(struct model_grad_sink){.flat = grad, .add = add}}));
    model_acts_destroy(a);
    case_unpack(m->dev, &b);
}

/* More rows of experts than a block of adapters takes: the same bits as sequence by sequence, and the same gradient. */
static void adapters_in_blocks(void **state) {
    enum { SEQS = 8, LEN = 90, TARGETS = SEQS * (LEN - 1) };
    char *dir = case_path("qwen3_moe", ""), *adapter = case_path("lora_experts", "");
    int32_t ids[SEQS * LEN];
    float whole[TARGETS], alone[TARGETS];
    struct model *m;
    struct dev d;
    (void)state;
    for (int i = 0; i < SEQS * LEN; i++) ids[i] = (i * 37 + i / 11) % 100;
    case_dev(&d, "cpu", 2);
    OK(model_open(&m, &d, &(struct model_open_args){.dir = dir, .act = DT_F32, .max_len = LEN}));
    OK(model_lora_load(m, adapter));
    const size_t bytes = (size_t)m->n_train * sizeof(float);
    float *const g = case_garbage(&d, bytes), *const one = case_garbage(&d, bytes), *host[2] = {xmalloc(bytes), xmalloc(bytes)};
    pass_of(m, ids, 0, SEQS, whole, g, false);
    for (int i = 0; i < SEQS; i++) pass_of(m, ids, i, 1, alone + i * (LEN - 1), one, i > 0);
    assert_memory_equal(whole, alone, sizeof whole);
    OK(dev_copy_out(&d, host[0], g, bytes));
    OK(dev_copy_out(&d, host[1], one, bytes));
    assert_true(case_worst(host[0], host[1], m->n_train) <= 1e-5);
    dev_free(&d, g, bytes);
    dev_free(&d, one, bytes);
    for (int i = 0; i < 2; i++) free(host[i]);
    model_close(m);
    dev_close(&d);
    free(dir);
    free(adapter);
}

/* ---- what a router adds to its scores ---- */

/* It keeps its bits, whatever the weights are rounded to, and a file without it is refused. */
static void correction_bias(void **state) {
    char *dir = case_path("glm4_moe", ""), *path = file_join(dir, "model.safetensors"), *out = case_temp_dir(),
         *exported = file_join(out, "model.safetensors");
    static const char name[] = "model.layers.1.mlp.gate.e_score_correction_bias";
    struct safetensors_file *want, *got;
    struct model *m;
    struct dev d;
    (void)state;
    case_dev(&d, "cpu", 1);
    OK(model_open(&m, &d, &(struct model_open_args){.dir = dir, .act = DT_BF16, .max_len = 32}));
    assert_int_equal(m->n_buffers, 1);
    assert_true(m->layers[1].route_bias == m->buffers && !m->layers[0].route_bias);
    OK(model_export(m, out, &(struct model_export_args){.dt = DT_BF16}));
    OK(safetensors_open(&want, path));
    OK(safetensors_open(&got, exported));
    const struct safetensors_tensor *a = safetensors_find(want, name), *b = safetensors_find(got, name);
    assert_true(a && b && b->dt == DT_F32 && b->bytes == a->bytes && memcmp(a->data, b->data, a->bytes) == 0);
    struct safetensors_write_tensor t[64];
    int64_t n = 0;
    for (int64_t i = 0; i < safetensors_count(want); i++) {
        const struct safetensors_tensor *s = safetensors_at(want, i);
        if (strcmp(s->name, name) == 0) continue;
        assert_true(n < 64);
        t[n] = (struct safetensors_write_tensor){.name = s->name, .dt = s->dt, .nd = s->nd, .data = s->data};
        memcpy(t[n++].dim, s->dim, sizeof s->dim);
    }
    model_close(m);
    safetensors_close(got);
    OK(safetensors_write(NULL, exported, t, n, NULL));
    assert_int_equal(open_dir(&m, &d, out, QUANT_NONE), ERR_FORMAT);
    if (!strstr(err_msg(), "tensor model.layers.1.mlp.gate.e_score_correction_bias is missing")) fail_msg("%s", err_msg());
    safetensors_close(want);
    dev_close(&d);
    case_drop_dir(out);
    free(dir);
    free(path);
    free(exported);
}

/* ---- layers behind the last one ---- */

/* A tensor of an MTP layer is written as it was, whatever dtype is chosen. */
static void kept_layers(void **state) {
    static const char name[] = "model.layers.2.eh_proj.weight";
    char *from = case_path("glm4_moe", "model.safetensors"), *config = case_path("glm4_moe", "config.json"), *dir = case_temp_dir(),
         *out = case_temp_dir(), *path = file_join(dir, "model.safetensors"), *exported = file_join(out, "model.safetensors");
    const float values[6] = {1, -2, 0.1f, 3e-9f, 5, 1e20f};
    struct safetensors_write_tensor t[65];
    struct safetensors_file *file;
    struct model *m;
    struct dev d;
    int64_t n = 0;
    (void)state;
    case_dev(&d, "cpu", 1);
    case_copy(config, dir, "config.json");
    OK(safetensors_open(&file, from));
    for (; n < safetensors_count(file); n++) {
        const struct safetensors_tensor *s = safetensors_at(file, n);
        assert_true(n < 64);
        t[n] = (struct safetensors_write_tensor){.name = s->name, .dt = s->dt, .nd = s->nd, .data = s->data};
        memcpy(t[n].dim, s->dim, sizeof s->dim);
    }
    t[n++] = (struct safetensors_write_tensor){.name = name, .dt = DT_F32, .nd = 2, .dim = {2, 3}, .data = values};
    OK(safetensors_write(NULL, path, t, n, NULL));
    safetensors_close(file);
    OK(model_open(&m, &d, &(struct model_open_args){.dir = dir, .act = DT_BF16, .max_len = 32}));
    OK(model_export(m, out, &(struct model_export_args){.dt = DT_BF16}));
    OK(safetensors_open(&file, exported));
    const struct safetensors_tensor *s = safetensors_find(file, name);
    assert_true(s && s->dt == DT_F32 && s->nd == 2 && s->dim[0] == 2 && s->dim[1] == 3 &&
                memcmp(s->data, values, sizeof values) == 0);
    assert_int_equal(safetensors_count(file), n);
    safetensors_close(file);
    model_close(m);
    dev_close(&d);
    case_drop_dir(dir);
    case_drop_dir(out);
    free(from);
    free(config);
    free(path);
    free(exported);
}

/* ---- gpt-oss' files ---- */

enum { OSS_EXPERTS = 6, OSS_OUT = 24, OSS_IN = 32 };

/* Value of an E2M1 code by its fields: sign, exponent with bias 1, mantissa. */
static float e2m1_value(unsigned code) {
    const unsigned e = code >> 1 & 3, m = code & 1;
    const float v = e ? ldexpf(1 + 0.5f * (float)m, (int)e - 1) : 0.5f * (float)m;
    return code & 8 ? -v : v;
}

/* The fixture with gate_up of layer 1 as MXFP4; cut: blocks that are missing. */
static void write_mxfp4(const struct safetensors_file *from, const char *dir, const uint8_t *codes, const uint8_t *scales,
                        int64_t cut) {
    static const char name[] = "model.layers.1.mlp.experts.gate_up_proj";
    struct safetensors_write_tensor t[64];
    int64_t n = 0;
    for (int64_t i = 0; i < safetensors_count(from); i++) {
        const struct safetensors_tensor *s = safetensors_at(from, i);
        if (strcmp(s->name, name) == 0) continue;
        assert_true(n < 62);
        t[n] = (struct safetensors_write_tensor){.name = s->name, .dt = s->dt, .nd = s->nd, .data = s->data};
        memcpy(t[n++].dim, s->dim, sizeof s->dim);
    }
    t[n++] = (struct safetensors_write_tensor){.name = "model.layers.1.mlp.experts.gate_up_proj_blocks",
                                               .dt = DT_U8,
                                               .nd = 4,
                                               .dim = {OSS_EXPERTS - cut, OSS_OUT, 1, 16},
                                               .data = codes};
    t[n++] = (struct safetensors_write_tensor){.name = "model.layers.1.mlp.experts.gate_up_proj_scales",
                                               .dt = DT_U8,
                                               .nd = 3,
                                               .dim = {OSS_EXPERTS, OSS_OUT, 1},
                                               .data = scales};
    char *path = file_join(dir, "model.safetensors");
    OK(safetensors_write(NULL, path, t, n, NULL));
    free(path);
}

/* A config.json that says so as released ones do. */
static void write_mxfp4_config(const char *dir) {
    char *from = case_path("gpt_oss", "config.json"), *to = file_join(dir, "config.json");
    json_t *o = json_load_file(from, 0, NULL);
    json_object_set_new(o, "quantization_config",
                        json_pack("{s:s,s:[s]}", "quant_method", "mxfp4", "modules_to_not_convert", "lm_head"));
    assert_int_equal(json_dump_file(o, to, 0), 0);
    json_decref(o);
    free(from);
    free(to);
}

/* As a quantised base it has the codes of the same weights in bf16: `released`. */
static void quantized_alike(struct dev *d, const char *released, const char *dir) {
    char *out[2], *path[2];
    struct safetensors_file *file[2];
    for (int i = 0; i < 2; i++) {
        struct model *m;
        out[i] = case_temp_dir();
        path[i] = file_join(out[i], "model.safetensors");
        OK(model_open(&m, d,
                      &(struct model_open_args){.dir = i ? dir : released, .act = DT_BF16, .max_len = 32, .quant = QUANT_INT8}));
        OK(model_export(m, out[i], &(struct model_export_args){.dt = DT_BF16}));
        model_close(m);
        OK(safetensors_open(&file[i], path[i]));
    }
    const struct safetensors_tensor *a = safetensors_find(file[0], "model.layers.1.mlp.experts.gate_up_proj"),
                                    *b = safetensors_find(file[1], "model.layers.1.mlp.experts.gate_up_proj");
    assert_true(a && b && a->bytes == b->bytes && memcmp(a->data, b->data, a->bytes) == 0);
    for (int i = 0; i < 2; i++) {
        safetensors_close(file[i]);
        case_drop_dir(out[i]);
        free(path[i]);
    }
}

/* Codes of every kind are read exactly, and exported as bf16 under the names that transformers has. */
static void mxfp4_files(void **state) {
    uint8_t codes[OSS_EXPERTS * OSS_OUT * 16], scales[OSS_EXPERTS * OSS_OUT];
    char *released = case_path("gpt_oss", "model.safetensors"), *dir = case_temp_dir(), *out = case_temp_dir(),
         *path = file_join(out, "model.safetensors"), *config = file_join(out, "config.json");
    struct safetensors_file *from, *got;
    struct model *m;
    struct dev d;
    (void)state;
    for (size_t i = 0; i < sizeof codes; i++) codes[i] = (uint8_t)(i * 37 + i / 256);
    for (size_t i = 0; i < sizeof scales; i++) scales[i] = (uint8_t)(118 + i % 12);
    case_dev(&d, "cpu", 2);
    OK(safetensors_open(&from, released));
    write_mxfp4_config(dir);
    write_mxfp4(from, dir, codes, scales, 0);
    OK(model_open(&m, &d, &(struct model_open_args){.dir = dir, .act = DT_BF16, .max_len = 32}));
    OK(model_export(m, out, &(struct model_export_args){.dt = DT_BF16}));
    OK(safetensors_open(&got, path));
    const struct safetensors_tensor *w = safetensors_find(got, "model.layers.1.mlp.experts.gate_up_proj");
    assert_true(w && w->dt == DT_BF16 && w->nd == 3 && w->dim[0] == OSS_EXPERTS && w->dim[1] == OSS_IN && w->dim[2] == OSS_OUT);
    for (int e = 0; e < OSS_EXPERTS; e++)
        for (int c = 0; c < OSS_IN; c++)
            for (int j = 0; j < OSS_OUT; j++) {
                const int block = e * OSS_OUT + j, byte = codes[block * 16 + c / 2];
                const float want = ldexpf(e2m1_value((unsigned)(c % 2 ? byte >> 4 : byte & 15)), scales[block] - 127);
                uint16_t bits;
                memcpy(&bits, w->data + ((e * OSS_IN + c) * OSS_OUT + j) * 2, 2);
                if (bf16_to_f32(bits) != want)
                    fail_msg("(%d, %d, %d): %g, expected %g", e, c, j, (double)bf16_to_f32(bits), (double)want);
            }
    json_t *o = json_load_file(config, 0, NULL);
    assert_true(o && !json_object_get(o, "quantization_config"));
    json_decref(o);
    safetensors_close(got);
    model_close(m);
    quantized_alike(&d, out, dir);
    write_mxfp4(from, dir, codes, scales, 1);
    assert_int_equal(open_dir(&m, &d, dir, QUANT_NONE), ERR_FORMAT);
    if (!strstr(err_msg(), "gate_up_proj_blocks does not have the shape (6, 24, 1, 16)")) fail_msg("%s", err_msg());
    scales[7] = 255; /* NaN */
    write_mxfp4(from, dir, codes, scales, 0);
    assert_int_equal(open_dir(&m, &d, dir, QUANT_NONE), ERR_FORMAT);
    if (!strstr(err_msg(), "holds NaN or Inf")) fail_msg("%s", err_msg());
    safetensors_close(from);
    dev_close(&d);
    case_drop_dir(dir);
    case_drop_dir(out);
    free(released);
    free(path);
    free(config);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kept_layers),        cmocka_unit_test(stacked_files),   cmocka_unit_test(adapters),
        cmocka_unit_test(quantized_base),     cmocka_unit_test(correction_bias), cmocka_unit_test(mxfp4_files),
        cmocka_unit_test(adapters_in_blocks),
    };
    return cmocka_run_group_tests_name("models with experts", tests, NULL, NULL);
}
