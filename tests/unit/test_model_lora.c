/* test_model_lora.c - adapters that are wrong, foreign or odd: every refusal names what
 * and where; the start of training; a rank and rows that fill no tile. */
#include "model_case.h"

#include "base/json.h"

#define EACH(i, list) for (size_t i = 0; i < sizeof(list) / sizeof((list)[0]); i++)

static void open_base(struct dev *d, struct model **m, const char *name, enum dtype act) {
    char *dir = case_path(name, "");
    case_dev(d, "cpu", 2);
    OK(model_open(m, d, &(struct model_open_args){.dir = dir, .act = act, .max_len = 128}));
    free(dir);
}
static void close_base(struct dev *d, struct model *m) {
    model_close(m);
    assert_int_equal(d->allocated, 0);
    dev_close(d);
}

/* ---- which modules ---- */

static int create(struct model *m, const char *config) {
    json_t *o = json_loads(config, 0, NULL);
    assert_non_null(o);
    struct lora_config l = {
        .rank = 4, .alpha = 8, .targets = json_incref(json_object_get(o, "t")), .exclude = json_incref(json_object_get(o, "x"))};
    json_t *r = json_object_get(o, "r");
    if (r) l.rank = json_integer_value(r);
    json_decref(o);
    const int rc = model_lora_create(m, &l, 1);
    lora_config_free(&l);
    return rc;
}

static void targets(void **state) {
    (void)state;
    static const struct {
        const char *config;
        int64_t n; /* modules of the 2-layer Qwen2 */
    } good[] = {
        {"{\"t\": \"all-linear\"}", 14},
        {"{\"t\": [\"q_proj\"]}", 2},
        {"{\"t\": [\"layers.1.mlp.up_proj\", \"model.layers.0.self_attn.o_proj\"]}", 2},
        {"{\"t\": \".*proj\"}", 14},
        {"{\"t\": \".*(q|v)_proj\", \"x\": \".*0.*\"}", 2},
        {"{\"t\": \"all-linear\", \"x\": [\"down_proj\", \"layers.0.mlp.up_proj\"]}", 11},
        {"{\"t\": \"ALL-LINEAR\", \"r\": 32}", 14},
    };
    static const struct {
        const char *config, *say;
        int code;
    } bad[] = {
        {"{\"t\": [\"q_proj\", \"wq\"]}", "called 'wq'; there are q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj",
         ERR_INVAL},
        {"{\"t\": [\"lm_head\"]}", "lm_head is unsupported", ERR_UNSUPPORTED},
        {"{\"t\": [\"model.embed_tokens\"]}", "embed_tokens is unsupported", ERR_UNSUPPORTED},
        {"{\"t\": [\"_proj\"]}", "called '_proj'", ERR_INVAL},
        {"{\"t\": \"proj\"}", "matches no module; there are q_proj", ERR_INVAL},
        {"{\"t\": \".*(q_proj\"}", "not a regular expression", ERR_INVAL},
        {"{\"t\": [\"q_proj\"], \"x\": [\"q_proj\"]}", "without exclude_modules matches no module", ERR_INVAL},
        {"{\"t\": [3]}", "entry 0 is not a module name", ERR_INVAL},
        {"{\"t\": {}}", "expected a list", ERR_INVAL},
        {"{\"t\": []}", "matches no module", ERR_INVAL},
        {"{}", "target_modules is null", ERR_INVAL},
        {"{\"t\": \"all-linear\", \"r\": 0}", "lora_rank=0", ERR_INVAL},
        {"{\"t\": \"all-linear\", \"r\": 33}", "expected 1 to 32", ERR_INVAL},
    };
    struct dev d;
    struct model *m;
    EACH(i, good) {
        open_base(&d, &m, "qwen2", DT_BF16);
        OK(create(m, good[i].config));
        if (m->n_train_params != 2 * good[i].n) fail_msg("%s: %lld tensors", good[i].config, (long long)m->n_train_params);
        close_base(&d, m);
    }
    EACH(i, bad) {
        open_base(&d, &m, "qwen2", DT_F32);
        const int rc = create(m, bad[i].config);
        if (rc != bad[i].code || !strstr(err_msg(), bad[i].say)) fail_msg("%s: %d, %s", bad[i].config, rc, err_msg());
        close_base(&d, m);
    }
}

/* A uniform in +-1/sqrt(k), B zero; the same for the same seed. */
static void start(void **state) {
    (void)state;
    struct dev d;
    struct model *m;
    float *w[3];
    int64_t n = 0;
    for (int i = 0; i < 3; i++) {
        open_base(&d, &m, "qwen2", DT_F32);
        struct lora_config l = {.rank = 4, .alpha = 8, .targets = json_string("all-linear")};
        OK(model_lora_create(m, &l, i == 2 ? 8 : 7));
        lora_config_free(&l);
        n = m->n_train;
        w[i] = xmalloc((size_t)n * 4);
        OK(dev_copy_out(&d, w[i], m->master, (size_t)n * 4));
        double sum = 0, square = 0, bound = 0;
        int64_t count = 0;
        for (int64_t k = 0; k < m->n_train_params; k++) {
            const struct model_param *p = &m->train_params[k];
            for (int64_t j = 0; j < p->rows * p->cols; j++) {
                const double v = (double)w[i][p->offset + j] * sqrt((double)p->cols);
                if (strstr(p->name, "lora_B")) {
                    assert_true(v == 0);
                    continue;
                }
                bound = fmax(bound, fabs(v));
                sum += v;
                square += v * v;
                count++;
            }
        }
        assert_true(bound < 1.0001 && bound > 0.99);
        assert_true(fabs(sum / (double)count) < 4 * sqrt(1.0 / 3 / (double)count));               /* four sigma */
        assert_true(fabs(square / (double)count - 1.0 / 3) < 4 * sqrt(4.0 / 45 / (double)count)); /* variance of x^2 */
        close_base(&d, m);
    }
    assert_memory_equal(w[0], w[1], (size_t)n * 4);
    assert_memory_not_equal(w[0], w[2], (size_t)n * 4);
    for (int i = 0; i < 3; i++) free(w[i]);
}

/* A critic's head is longer than any scratch that the adapter's own widths ask for. */
static void wide_head(void **state) {
    (void)state;
    enum { HIDDEN = 16448 };
    char text[512], *tmp = case_temp_dir(), *dir = file_join(tmp, "m");
    snprintf(text, sizeof text,
             "{\"model_type\": \"qwen2\", \"architectures\": [\"Qwen2ForCausalLM\"], \"hidden_size\": %d,"
             " \"intermediate_size\": 16, \"num_hidden_layers\": 1, \"num_attention_heads\": 1, \"head_dim\": 16,"
             " \"num_key_value_heads\": 1, \"vocab_size\": 16, \"rms_norm_eps\": 1e-6, \"hidden_act\": \"silu\","
             " \"tie_word_embeddings\": true, \"torch_dtype\": \"bfloat16\"}",
             HIDDEN);
    json_t *o = json_loads(text, 0, NULL);
    assert_non_null(o);
    OK(model_init_dir(o, dir, 3, DT_BF16));
    json_decref(o);
    static const char *const backends[] = {"ref", "cpu", "cuda"};
    EACH(b, backends) {
        if (!case_has(backends[b])) continue;
        struct dev d;
        struct model *m;
        uint16_t head[HIDDEN];
        case_dev(&d, backends[b], 2);
        OK(model_open_value(&m, &d, &(struct model_open_args){.dir = dir, .act = DT_BF16, .max_len = 8}, 4));
        struct lora_config l = {.rank = 1, .alpha = 1, .targets = json_string("all-linear")};
        OK(model_lora_create(m, &l, 7));
        lora_config_free(&l);
        const struct model_param *p = &m->train_params[m->n_train_params - 2];
        assert_string_equal(p->name, "score.weight");
        float *w = xmalloc((size_t)m->n_train * 4);
        OK(dev_copy_out(&d, w, m->master, (size_t)m->n_train * 4));
        double square = 0;
        for (int64_t i = 0; i < HIDDEN; i++) square += (double)w[p->offset + i] * (double)w[p->offset + i];
        assert_true(fabs(square / HIDDEN / (0.02 * 0.02) - 1) < 0.05); /* initializer_range 0.02; sqrt(2 / 16448) is 0.011 */
        const struct tensor as = tensor_2d(case_alloc(&d, sizeof head), DT_BF16, 1, HIDDEN);
        OK(dev_weight_unpack(&d, as, m->head));
        OK(dev_copy_out(&d, head, as.data, sizeof head));
        for (int64_t i = 0; i < HIDDEN; i++) {
            const uint32_t bits = (uint32_t)head[i] << 16;
            assert_memory_equal(&bits, &w[p->offset + i], 4);
        }
        case_free(&d, as);
        free(w);
        close_base(&d, m);
    }
    free(dir);
    case_drop_dir(tmp);
}

/* ---- directories ---- */

static const char ADAPTER[] = "lora_qwen2";

/* A copy of the adapter with config[key] = value (JSON text; NULL: as it is). */
static char *changed(const char *key, const char *value) {
    char *dir = case_temp_dir(), *weights = case_path(ADAPTER, "adapter_model.safetensors");
    char *config = case_path(ADAPTER, "adapter_config.json"), *to = file_join(dir, "adapter_config.json");
    json_t *o;
    OK(json_load(&o, config, 1 << 20));
    if (value) json_object_set_new(o, key, json_loads(value, JSON_DECODE_ANY, NULL));
    else if (key) json_object_del(o, key);
    OK(json_save_atomic(to, o));
    case_copy(weights, dir, "adapter_model.safetensors");
    json_decref(o);
    free(weights);
    free(config);
    free(to);
    return dir;
}

static void refused(const char *dir, const char *base, int code, const char *say) {
    struct dev d;
    struct model *m;
    open_base(&d, &m, base, DT_F32);
    const int rc = model_lora_load(m, dir);
    if (rc != code || !strstr(err_msg(), say)) fail_msg("expected %d '%s', got %d: %s", code, say, rc, rc < 0 ? err_msg() : "");
    close_base(&d, m);
}

static void bad_config(void **state) {
    (void)state;
    static const struct {
        const char *key, *value;
        int code;
        const char *say;
    } cases[] = {
        {"peft_type", "\"LOHA\"", ERR_UNSUPPORTED, "unsupported peft_type LOHA"},
        {"use_dora", "true", ERR_UNSUPPORTED, "unsupported use_dora"},
        {"bias", "\"all\"", ERR_UNSUPPORTED, "unsupported bias=all"},
        {"modules_to_save", "[\"lm_head\"]", ERR_UNSUPPORTED, "unsupported modules_to_save"},
        {"rank_pattern", "{\"q_proj\": 2}", ERR_UNSUPPORTED, "unsupported rank_pattern"},
        {"corda_config", "{\"a\": 2}", ERR_UNSUPPORTED, "unsupported corda_config"},
        {"init_lora_weights", "\"pissa\"", ERR_UNSUPPORTED, "unsupported init_lora_weights=pissa"},
        {"r", "8", ERR_FORMAT, "has shape (4, 32), this model and adapter_config.json ask for (8, 32)"},
        {"r", "0", ERR_FORMAT, "r=0"},
        {"r", "\"4\"", ERR_FORMAT, "r"},
        {"r", NULL, ERR_FORMAT, "r"},
        {"lora_alpha", "[]", ERR_FORMAT, "lora_alpha"},
        {"target_modules", "[\"q_proj\"]", ERR_UNSUPPORTED, "target_modules does not name its module"},
        {"target_modules", "[\"fc\"]", ERR_INVAL, "called 'fc'"},
        {"target_modules", "null", ERR_INVAL, "target_modules is null"},
    };
    EACH(i, cases) {
        char *dir = changed(cases[i].key, cases[i].value);
        refused(dir, "qwen2", cases[i].code, cases[i].say);
        case_drop_dir(dir);
    }
    char *dir = case_temp_dir();
    refused(dir, "qwen2", ERR_INPUT, "no adapter_config.json");
    case_drop_dir(dir);
    dir = changed(NULL, NULL);
    char *weights = file_join(dir, "adapter_model.safetensors");
    OK(file_write_atomic(weights, "garbage", 7));
    refused(dir, "qwen2", ERR_FORMAT, "adapter_model.safetensors");
    unlink(weights);
    refused(dir, "qwen2", ERR_INPUT, "adapter_model.safetensors");
    char *config = file_join(dir, "adapter_config.json");
    OK(file_write_atomic(config, "[1, 2]", 6));
    refused(dir, "qwen2", ERR_FORMAT, "not a JSON object");
    free(weights);
    free(config);
    case_drop_dir(dir);
}

/* Of another shape; of the same shape but another base: what verlc wrote knows its base. */
static void other_base(void **state) {
    (void)state;
    struct dev d;
    struct model *m;
    char *theirs = case_path(ADAPTER, ""), *dir = case_temp_dir();
    refused(theirs, "qwen3", ERR_FORMAT, "is it an adapter of another model?");
    open_base(&d, &m, "qwen2", DT_BF16);
    OK(model_lora_load(m, theirs));
    model_lora_set_base(m, "their/base");
    OK(model_lora_export(m, dir, NULL));
    close_base(&d, m);
    refused(dir, "qwen2_window", ERR_INPUT, "was trained on another base model than this one; it names their/base");
    open_base(&d, &m, "qwen2", DT_F32); /* the right one, in another dtype than it was written from */
    OK(model_lora_load(m, dir));
    close_base(&d, m);
    case_drop_dir(dir);
    free(theirs);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(targets), cmocka_unit_test(start), cmocka_unit_test(wide_head),
                                       cmocka_unit_test(bad_config), cmocka_unit_test(other_base)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
