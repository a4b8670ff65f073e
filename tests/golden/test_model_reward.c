/* test_model_reward.c - reward models against Hugging Face's ForSequenceClassification: scores at the last token that
 * is not padding, and every gradient, on every backend; what is refused.  The fixtures come from tools/oracle_reward.py. */
#include "model_case.h"

#include "base/json.h"

static const double MAX_REL = 1e-5; /* the bar of the project for values and gradients in fp32 */

enum { MAX_LEN = 128, MAX_SEQS = 8 };

static const char *const ARCHS[] = {"qwen2", "llama", "qwen3", "mistral"};
static const char *const BACKENDS[] = {"ref", "cpu", "cuda"};
#define EACH(i, list) for (size_t i = 0; i < sizeof(list) / sizeof((list)[0]); i++)

struct rig {
    struct dev dev;
    struct model *m;
    struct safetensors_file *want;
    struct case_seq seqs[MAX_SEQS];
    int32_t row[MAX_SEQS]; /* of the score, in the packed batch */
    int64_t n;
};

static void rig_open(struct rig *r, const char *arch, const char *backend) {
    char *dir = xasprintf("%s/reward/%s", FIXTURES, arch), *path = file_join(dir, "golden.safetensors");
    *r = (struct rig){0};
    OK(safetensors_open(&r->want, path));
    case_dev(&r->dev, backend, 2);
    OK(model_open_reward(&r->m, &r->dev,
                         &(struct model_open_args){.dir = dir, .act = DT_F32, .flags = MODEL_TRAIN, .max_len = MAX_LEN}));
    const int32_t *ids = case_data(r->want, "ids", DT_I32, NULL), *q_start = case_data(r->want, "q_start", DT_I32, &r->n);
    r->n--;
    for (int64_t i = 0; i < r->n; i++) {
        r->seqs[i] = (struct case_seq){ids + q_start[i], q_start[i + 1] - q_start[i]};
        r->row[i] = q_start[i] + (int32_t)model_reward_row(&r->m->cfg, r->seqs[i].ids, r->seqs[i].n);
    }
    free(dir);
    free(path);
}

static void rig_close(struct rig *r) {
    model_close(r->m);
    safetensors_close(r->want);
    assert_int_equal(r->dev.allocated, 0);
    dev_close(&r->dev);
}

static void check(const char *arch, const char *backend, struct model_keep keep) {
    struct rig r;
    struct model_batch b;
    struct model_acts *a;
    float score[MAX_SEQS];
    rig_open(&r, arch, backend);
    case_pack(&r.dev, &b, r.seqs, r.n);
    OK(model_acts_create(&a, r.m, b.n_rows, keep, NULL));
    OK(model_forward(r.m, &b, a));
    OK(model_value(r.m, a, r.row, r.n, score));
    const double e_score = case_worst(score, case_data(r.want, "score", DT_F32, NULL), r.n);
    const size_t bytes = (size_t)r.m->n_elems * 4;
    float *g_dev = case_garbage(&r.dev, bytes), *g = xmalloc(bytes);
    const struct model_value_backward_args args = {.batch = &b,
                                                   .row = r.row,
                                                   .n = r.n,
                                                   .dvalue = case_data(r.want, "weight", DT_F32, NULL),
                                                   .sink = &(struct model_grad_sink){.flat = g_dev}};
    OK(model_value_backward(r.m, a, &args));
    OK(dev_copy_out(&r.dev, g, g_dev, bytes));
    double nmse;
    const double e_grad = case_gradient_error(r.want, r.m->params, r.m->n_params, g, &nmse);
    print_message("%-8s %-4s: scores %.1e, gradients %.1e\n", arch, backend, e_score, e_grad);
    assert_true(e_score <= MAX_REL && e_grad <= MAX_REL);
    dev_free(&r.dev, g_dev, bytes);
    free(g);
    model_acts_destroy(a);
    case_unpack(&r.dev, &b);
    rig_close(&r);
}

static void like_transformers(void **state) {
    (void)state;
    EACH(b, BACKENDS) EACH(i, ARCHS) {
        if (case_has(BACKENDS[b])) check(ARCHS[i], BACKENDS[b], i % 2 ? MODEL_KEEP_ALL : MODEL_KEEP_LAYER);
    }
}

/* The last token that is not padding, also where padding stands inside, is all there is, or is not named. */
static void last_token(void **state) {
    (void)state;
    const int32_t ids[] = {7, 5, 9, 5, 5}, pads[] = {5, 5, 5};
    struct model_config c = {.pad = 5};
    assert_int_equal(model_reward_row(&c, ids, 5), 2);
    assert_int_equal(model_reward_row(&c, ids, 3), 2);
    assert_int_equal(model_reward_row(&c, ids, 2), 0);
    assert_int_equal(model_reward_row(&c, pads, 3), 0);
    c.pad = -1;
    assert_int_equal(model_reward_row(&c, ids, 5), 4);
}

static void refused(const char *patch, const char *word) {
    struct model_config c;
    json_t *o, *p = json_loads(patch, 0, NULL);
    OK(json_load(&o, FIXTURES "/reward/qwen2/config.json", 1 << 20));
    json_object_update(o, p);
    OK(model_config_from_json(&c, o, "x/config.json"));
    assert_int_equal(model_config_make_reward(&c, "x"), ERR_UNSUPPORTED);
    if (!strstr(err_msg(), word)) fail_msg("no '%s' in: %s", word, err_msg());
    model_config_free(&c);
    json_decref(o);
    json_decref(p);
}

static void refusals(void **state) {
    (void)state;
    refused("{\"architectures\": [\"Qwen2ForCausalLM\"]}", "Qwen2ForCausalLM");
    refused("{\"architectures\": []}", "ForSequenceClassification");
    refused("{\"id2label\": {\"0\": \"a\", \"1\": \"b\", \"2\": \"c\"}}", "3 labels");
    refused("{\"id2label\": null}", "2 labels");
    struct dev d;
    struct model *m;
    char *dir = case_temp_dir(), *body = case_path("qwen2", "model.safetensors");
    case_copy(FIXTURES "/reward/qwen2/config.json", dir, "config.json");
    case_copy(body, dir, "model.safetensors");
    OK(dev_open_ref(&d)); /* a head is never invented */
    assert_int_equal(model_open_reward(&m, &d, &(struct model_open_args){.dir = dir, .act = DT_F32, .max_len = 8}), ERR_FORMAT);
    assert_non_null(strstr(err_msg(), "score.weight"));
    dev_close(&d);
    case_drop_dir(dir);
    free(body);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(like_transformers), cmocka_unit_test(last_token),
                                       cmocka_unit_test(refusals)};
    return cmocka_run_group_tests_name("reward models", tests, NULL, NULL);
}
