/* test_train_critic.c - the critic against Hugging Face's ForTokenClassification and
 * torch: values, the clipped value loss, every gradient, on every backend and under
 * every cut into micro-batches; what a directory without a head becomes; what is
 * exported; an adapter with its head against peft.  The fixtures come from tools/oracle_critic.py. */
#include "model_case.h"

#include "algo/value_loss.h"
#include "base/json.h"
#include "model/master_weights.h"
#include "train/trained_model.h"

static const double MAX_REL = 1e-5; /* the bar of the project for values and gradients in fp32 */

enum { MAX_LEN = 128, MAX_SEQS = 8, MAX_TARGETS = 128 };

static const char *const ARCHS[] = {"qwen2", "llama", "qwen3", "mistral"};
static const char *const BACKENDS[] = {"ref", "cpu", "cuda"};
#define EACH(i, list) for (size_t i = 0; i < sizeof(list) / sizeof((list)[0]); i++)
#define EACH_BACKEND(i) EACH(i, BACKENDS) if (case_has(BACKENDS[i]))

struct rig {
    struct dev dev;
    struct model *m;
    struct trained_model *critic;
    struct safetensors_file *want;
    struct packed_seq seqs[MAX_SEQS];
    int64_t n_seqs, n_targets, off[MAX_SEQS + 1];
    double vpreds[MAX_TARGETS], dvpreds[MAX_TARGETS], loss;
};

/* Bodies of tests/fixtures/model with the golden head put into place, so that every architecture is covered. */
static void put_head(struct rig *r) {
    static const char *const names[] = {"score.weight", "score.bias"};
    for (int i = 0; i < 2; i++) {
        int64_t n, k = 0;
        const float *v = case_data(r->want, names[i], DT_F32, &n);
        while (k < r->m->n_params && strcmp(r->m->params[k].name, names[i]) != 0) k++;
        assert_true(k < r->m->n_params);
        OK(dev_copy_in(&r->dev, r->m->master + r->m->params[k].offset, v, (size_t)n * 4));
    }
    OK(model_refresh(r->m));
}

/* The critic of r->m on the golden sequences. */
static void rig_critic(struct rig *r, struct model_keep keep) {
    const int32_t *ids = case_data(r->want, "ids", DT_I32, NULL), *first = case_data(r->want, "first", DT_I32, &r->n_seqs),
                  *q_start = case_data(r->want, "q_start", DT_I32, NULL);
    for (int64_t i = 0; i < r->n_seqs; i++) {
        r->seqs[i] = (struct packed_seq){.ids = ids + q_start[i], .n = q_start[i + 1] - q_start[i], .first = first[i]};
        r->off[i + 1] = r->off[i] + packed_seq_targets(&r->seqs[i]);
    }
    r->n_targets = r->off[r->n_seqs];
    assert_true(r->n_targets <= MAX_TARGETS);
    const struct trained_model_args a = {
        .dev = &r->dev, .model = r->m, .train = true, .keep = keep, .max_rows = r->n_seqs * MAX_LEN, .max_seqs = r->n_seqs};
    OK(trained_model_create(&r->critic, &a));
}

static void rig_open(struct rig *r, const char *arch, const char *backend, const char *dir, struct model_keep keep) {
    *r = (struct rig){0};
    char *path = xasprintf("%s/critic/%s.safetensors", FIXTURES, arch), *base = dir ? xstrdup(dir) : case_path(arch, "");
    OK(safetensors_open(&r->want, path));
    case_dev(&r->dev, backend, 2);
    OK(model_open_value(&r->m, &r->dev,
                        &(struct model_open_args){.dir = base, .act = DT_F32, .flags = MODEL_TRAIN, .max_len = MAX_LEN}, 7));
    if (!dir) put_head(r);
    rig_critic(r, keep);
    free(path);
    free(base);
}

/* A frozen base, with the golden adapter on it unless it is NULL. */
static void rig_open_frozen(struct rig *r, const char *base, const char *adapter, const char *backend) {
    *r = (struct rig){0};
    char *path = xasprintf("%s/critic/%s/golden.safetensors", FIXTURES, adapter ? adapter : "lora_llama"),
         *dir = xasprintf("%s/critic/%s", FIXTURES, adapter ? adapter : "");
    OK(safetensors_open(&r->want, path));
    case_dev(&r->dev, backend, 2);
    OK(model_open_value(&r->m, &r->dev, &(struct model_open_args){.dir = base, .act = DT_F32, .max_len = MAX_LEN}, 7));
    if (adapter) OK(model_lora_load(r->m, dir));
    free(path);
    free(dir);
}

static void rig_close(struct rig *r) {
    trained_model_destroy(r->critic);
    model_close(r->m);
    safetensors_close(r->want);
    assert_int_equal(r->dev.allocated, 0);
    dev_close(&r->dev);
}

static int loss_fn(void *arg, const struct micro_loss *m) {
    struct rig *r = arg;
    const int64_t t0 = m->t0, t1 = m->t1;
    const uint8_t *mask = case_data(r->want, "mask", DT_U8, NULL);
    const struct algo_ragged ragged = {.n = m->hi - m->lo, .off = r->off + m->lo, .mask = mask};
    int64_t valid = 0;
    for (int64_t t = 0; t < r->n_targets; t++) valid += mask[t];
    for (int64_t t = t0; t < t1; t++) r->vpreds[t] = (double)m->out[t - t0];
    const struct algo_value_args a = {.r = &ragged,
                                      .vpreds = r->vpreds,
                                      .values = case_data(r->want, "old", DT_F64, NULL),
                                      .returns = case_data(r->want, "returns", DT_F64, NULL),
                                      .cliprange_value = 0.5,
                                      .agg = {.mode = algo_agg_find("token-mean"), .batch_num_tokens = valid}};
    double loss;
    TRY(algo_value_loss(&a, &loss, r->dvpreds, NULL));
    r->loss += loss;
    for (int64_t t = t0; t < t1; t++) m->dout[t - t0] = (float)r->dvpreds[t];
    return 0;
}

/* Values, loss and gradients beside the golden ones; closes r. */
static void check_rig(struct rig *r, const char *what, struct micro_batch_limits cut) {
    int64_t n;
    float *values = xcalloc((size_t)r->n_targets, 4);
    OK(trained_model_forward(r->critic, r->seqs, r->n_seqs, cut, 1, (struct forward_out){.value = values}));
    const float *want = case_data(r->want, "values", DT_F32, &n);
    assert_int_equal(n, r->n_targets);
    const double e_value = case_worst(values, want, n);
    free(values);

    struct step_result o;
    const struct mini_batch s = {.seqs = r->seqs, .n = r->n_seqs, .cut = cut, .loss = loss_fn, .arg = r};
    OK(trained_model_backward(r->critic, &s, &o));
    double want_loss, nmse, e_dvalue = 0;
    memcpy(&want_loss, case_data(r->want, "loss", DT_F64, NULL), sizeof want_loss);
    const double e_loss = fabs(r->loss - want_loss) / want_loss;
    want = case_data(r->want, "dvalue", DT_F32, NULL);
    for (int64_t t = 0; t < r->n_targets; t++) e_dvalue = worse_of(e_dvalue, fabs(r->dvpreds[t] - (double)want[t]));
    float *g = xmalloc((size_t)r->m->n_train * 4);
    OK(dev_copy_out(&r->dev, g, trained_model_grads(r->critic), (size_t)r->m->n_train * 4));
    const double e_grad = case_gradient_error(r->want, r->m->train_params, r->m->n_train_params, g, &nmse);
    free(g);
    print_message("%-10s %-3s: values %.1e, loss %.1e, d loss / d value %.1e, gradients %.1e\n", what, r->dev.ops->name, e_value,
                  e_loss, e_dvalue, e_grad);
    assert_true(e_value <= MAX_REL && e_loss <= MAX_REL && e_dvalue <= MAX_REL && e_grad <= MAX_REL);
    rig_close(r);
}

static void check(const char *arch, const char *backend, const char *dir, struct model_keep keep, struct micro_batch_limits cut) {
    struct rig r;
    rig_open(&r, arch, backend, dir, keep);
    check_rig(&r, dir ? "its files" : arch, cut);
}

static void like_transformers(void **state) {
    (void)state;
    const struct micro_batch_limits all = {.max_seqs = MAX_SEQS}, one = {.max_seqs = 1};
    EACH_BACKEND(b) EACH(i, ARCHS) check(ARCHS[i], BACKENDS[b], NULL, MODEL_KEEP_ALL, all);
    check("qwen2", "cpu", NULL, MODEL_KEEP_LAYER, one);
    check("qwen3", "ref", NULL, MODEL_KEEP_LAYER, (struct micro_batch_limits){.max_rows = 80});
    check("qwen2", "cpu", FIXTURES "/critic/qwen2", MODEL_KEEP_LAYER, all); /* as transformers saved it */
}

/* The value head is batch-invariant (invariant 2). */
static void alone_or_together(void **state) {
    (void)state;
    EACH_BACKEND(b) {
        struct rig r;
        float together[MAX_TARGETS], alone[MAX_TARGETS];
        rig_open(&r, "qwen2", BACKENDS[b], NULL, MODEL_KEEP_LAYER);
        OK(trained_model_forward(r.critic, r.seqs, r.n_seqs, (struct micro_batch_limits){.max_seqs = MAX_SEQS}, 1,
                                 (struct forward_out){.value = together}));
        OK(trained_model_forward(r.critic, r.seqs, r.n_seqs, (struct micro_batch_limits){.max_seqs = 1}, 1,
                                 (struct forward_out){.value = alone}));
        assert_memory_equal(together, alone, (size_t)r.n_targets * 4);
        rig_close(&r);
    }
}

static float *master_of(struct rig *r) {
    float *w = xmalloc((size_t)r->m->n_elems * 4);
    OK(dev_copy_out(&r->dev, w, r->m->master, (size_t)r->m->n_elems * 4));
    return w;
}

/* A causal model becomes a critic with a seeded head; what is exported is a ForTokenClassification directory, read
 * back to the same weights; a bf16 run and one without a bias work. */
static void from_a_causal_model(void **state) {
    (void)state;
    struct rig r, back;
    char *base = case_path("llama", ""), *dir = case_temp_dir(), *out = file_join(dir, "critic");
    rig_open(&r, "llama", "cpu", base, MODEL_KEEP_LAYER);
    const struct model_group *head = r.m->g_head;
    float *w = master_of(&r);
    double sum = 0, square = 0;
    for (int64_t k = 0; k < head->k; k++) {
        sum += (double)w[head->offset + k];
        square += (double)w[head->offset + k] * (double)w[head->offset + k];
    }
    const double std = sqrt(square / (double)head->k);
    assert_true(std > 0.01 && std < 0.03 && fabs(sum / (double)head->k) < 0.02); /* initializer_range 0.02, 32 draws */
    assert_true(w[r.m->g_head_bias->offset] == 0);
    OK(model_export(r.m, out, &(struct model_export_args){.dt = -1}));
    rig_open(&back, "llama", "cpu", out, MODEL_KEEP_LAYER);
    float *again = master_of(&back);
    assert_memory_equal(w, again, (size_t)r.m->n_elems * 4);
    assert_string_equal(json_string_value(json_array_get(json_object_get(back.m->cfg.json, "architectures"), 0)),
                        "LlamaForTokenClassification");
    free(again);
    rig_close(&back);

    struct model *other; /* another seed is another head */
    OK(model_open_value(&other, &r.dev,
                        &(struct model_open_args){.dir = base, .act = DT_F32, .flags = MODEL_TRAIN, .max_len = MAX_LEN}, 8));
    float *v = xmalloc((size_t)other->n_elems * 4);
    OK(dev_copy_out(&r.dev, v, other->master, (size_t)other->n_elems * 4));
    assert_memory_not_equal(v + head->offset, w + head->offset, (size_t)head->k * 4);
    free(v);
    model_close(other);
    OK(model_open_value(&other, &r.dev,
                        &(struct model_open_args){.dir = base, .act = DT_BF16, .flags = MODEL_TRAIN, .max_len = MAX_LEN}, 7));
    struct trained_model *c;
    float rough[MAX_TARGETS], fine[MAX_TARGETS];
    const struct trained_model_args a = {
        .dev = &r.dev, .model = other, .train = true, .keep = MODEL_KEEP_LAYER, .max_rows = MAX_LEN, .max_seqs = MAX_SEQS};
    OK(trained_model_create(&c, &a));
    OK(trained_model_forward(c, r.seqs, r.n_seqs, (struct micro_batch_limits){.max_seqs = 1}, 1,
                             (struct forward_out){.value = rough}));
    OK(trained_model_forward(r.critic, r.seqs, r.n_seqs, (struct micro_batch_limits){.max_seqs = 1}, 1,
                             (struct forward_out){.value = fine}));
    assert_true(case_nmse(rough, fine, r.n_targets) < 1e-3); /* bf16 has 8 bits: 2e-5 for a product, 2 layers */
    struct step_result o;
    OK(trained_model_backward(
        c, &(struct mini_batch){.seqs = r.seqs, .n = r.n_seqs, .cut = {.max_seqs = 1}, .loss = loss_fn, .arg = &r}, &o));
    trained_model_destroy(c);
    model_close(other);

    json_t *config = NULL;
    char *path = file_join(out, "config.json");
    OK(json_load(&config, path, 1 << 20));
    json_object_set_new(config, "token_classification_bias", json_false());
    OK(json_save_atomic(path, config));
    json_decref(config);
    free(path);
    OK(model_open_value(&other, &r.dev,
                        &(struct model_open_args){.dir = out, .act = DT_F32, .flags = MODEL_TRAIN, .max_len = MAX_LEN}, 7));
    assert_null(other->g_head_bias);
    assert_int_equal(other->n_elems, r.m->n_elems - 1);
    model_close(other);
    free(w);
    rig_close(&r);
    free(base);
    free(out);
    case_drop_dir(dir);
}

/* ---- an adapter, and the head that is trained beside it ---- */

#define QWEN2_CRITIC FIXTURES "/critic/qwen2"

static void like_peft(void **state) {
    (void)state;
    char *llama = case_path("llama", ""); /* a causal model: its new head is replaced by the adapter's */
    EACH_BACKEND(b) for (int k = 0; k < 4; k++) {
        struct rig r;
        const bool one = k & 1, all = k < 2;
        rig_open_frozen(&r, all ? QWEN2_CRITIC : llama, all ? "lora_qwen2" : "lora_llama", BACKENDS[b]);
        assert_int_equal(r.m->n_train_params, (all ? 28 : 6) + 2);
        rig_critic(&r, one ? MODEL_KEEP_LAYER : MODEL_KEEP_ALL);
        check_rig(&r, all ? "lora_qwen2" : "lora_llama", (struct micro_batch_limits){.max_seqs = one ? 1 : MAX_SEQS});
    }
    free(llama);
}

static float *trained_of(struct rig *r) {
    float *w = xmalloc((size_t)r->m->n_train * 4);
    OK(dev_copy_out(&r->dev, w, r->m->master, (size_t)r->m->n_train * 4));
    return w;
}

/* What is exported is read back to the same bits; merged it is a token classifier with the same values and the trained
 * head; a policy does not take it. */
static void adapter_directories(void **state) {
    (void)state;
    struct rig r, back;
    float values[MAX_TARGETS], again[MAX_TARGETS];
    const struct micro_batch_limits all = {.max_seqs = MAX_SEQS};
    char *tmp = case_temp_dir(), *dir = file_join(tmp, "adapter"), *merged = file_join(tmp, "merged");
    rig_open_frozen(&r, QWEN2_CRITIC, "lora_qwen2", "cpu");
    rig_critic(&r, MODEL_KEEP_LAYER);
    OK(trained_model_forward(r.critic, r.seqs, r.n_seqs, all, 1, (struct forward_out){.value = values}));
    OK(model_lora_export(r.m, dir, NULL));
    OK(file_mkdirs(merged));
    OK(model_export(r.m, merged, &(struct model_export_args){.dt = DT_F32}));
    rig_open_frozen(&back, QWEN2_CRITIC, NULL, "cpu");
    OK(model_lora_load(back.m, dir));
    assert_int_equal(back.m->n_train, r.m->n_train);
    float *w = trained_of(&r), *v = trained_of(&back);
    assert_memory_equal(w, v, (size_t)r.m->n_train * 4);
    rig_critic(&back, MODEL_KEEP_LAYER);
    OK(trained_model_forward(back.critic, back.seqs, back.n_seqs, all, 1, (struct forward_out){.value = again}));
    assert_memory_equal(values, again, (size_t)r.n_targets * 4);
    rig_close(&back);
    free(v);
    rig_open(&back, "qwen2", "cpu", merged, MODEL_KEEP_LAYER); /* the golden sequences are the same */
    OK(trained_model_forward(back.critic, back.seqs, back.n_seqs, all, 1, (struct forward_out){.value = again}));
    assert_true(case_worst(again, values, r.n_targets) <= MAX_REL);
    v = master_of(&back);
    assert_memory_equal(v + back.m->g_head->offset, w + r.m->train_params[28].offset, (size_t)back.m->cfg.hidden * 4);
    free(v);
    free(w);
    rig_close(&back);

    struct model *policy;
    char *causal = case_path("qwen2", "");
    OK(model_open(&policy, &r.dev, &(struct model_open_args){.dir = causal, .act = DT_F32, .max_len = MAX_LEN}));
    assert_int_equal(model_lora_load(policy, dir), ERR_UNSUPPORTED);
    assert_non_null(strstr(err_msg(), "is a critic's, with a score head"));
    model_close(policy);
    free(causal);
    rig_close(&r);
    case_drop_dir(tmp);
    free(dir);
    free(merged);
}

/* A new adapter changes no bit of the values, and one without a head leaves the head that there is. */
static void heads_that_stay(void **state) {
    (void)state;
    struct rig r;
    float values[MAX_TARGETS], again[MAX_TARGETS];
    const struct micro_batch_limits all = {.max_seqs = MAX_SEQS};
    EACH_BACKEND(b) {
        char *base = case_path("llama", ""), *adapter = case_path("lora_llama", "");
        rig_open(&r, "llama", BACKENDS[b], base, MODEL_KEEP_LAYER);
        OK(trained_model_forward(r.critic, r.seqs, r.n_seqs, all, 1, (struct forward_out){.value = values}));
        float *w = master_of(&r), *head = w + r.m->g_head->offset;
        rig_close(&r);
        rig_open_frozen(&r, base, NULL, BACKENDS[b]);
        struct lora_config l = {.rank = 2, .alpha = 4, .targets = json_string("all-linear")};
        OK(model_lora_create(r.m, &l, 5));
        lora_config_free(&l);
        rig_critic(&r, MODEL_KEEP_LAYER);
        OK(trained_model_forward(r.critic, r.seqs, r.n_seqs, all, 1, (struct forward_out){.value = again}));
        assert_memory_equal(values, again, (size_t)r.n_targets * 4);
        rig_close(&r);
        rig_open_frozen(&r, base, NULL, BACKENDS[b]);
        OK(model_lora_load(r.m, adapter)); /* of a causal model */
        float *v = trained_of(&r);
        const struct model_param *p = &r.m->train_params[r.m->n_train_params - 2];
        assert_string_equal(p->name, "score.weight");
        assert_memory_equal(v + p->offset, head, (size_t)p->cols * 4);
        rig_close(&r);
        free(v);
        free(w);
        free(base);
        free(adapter);
    }
}

/* Values of a critic with an adapter in mid-training, its base its own or the policy's. */
static void values_beside(struct rig *r, const char *dir, enum quant_kind quant, const struct model *policy, float *values) {
    struct model_open_args a = {.dir = dir,
                                .act = DT_F32,
                                .flags = policy ? MODEL_SHARED_BASE : MODEL_INFER,
                                .max_len = MAX_LEN,
                                .quant = quant,
                                .base = policy};
    const size_t before = r->dev.allocated;
    OK(model_open_value(&r->m, &r->dev, &a, 7));
    assert_int_equal(r->dev.allocated - before, model_open_bytes(&r->m->cfg, &r->dev, &a)); /* what a plan counts */
    struct lora_config l = {.rank = 2, .alpha = 4, .targets = json_string("all-linear")};
    OK(model_lora_create(r->m, &l, 5));
    lora_config_free(&l);
    rig_critic(r, MODEL_KEEP_LAYER);
    struct step_result o;
    const struct optim_config adamw = {.beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .clip = 1, .schedule = "constant"};
    const struct mini_batch s = {.seqs = r->seqs, .n = r->n_seqs, .cut = {.max_seqs = MAX_SEQS}, .loss = loss_fn, .arg = r};
    OK(trained_model_step(r->critic, &s, &adamw, 1e-2, &o));
    OK(trained_model_forward(r->critic, r->seqs, r->n_seqs, (struct micro_batch_limits){.max_seqs = MAX_SEQS}, 1,
                             (struct forward_out){.value = values}));
    trained_model_destroy(r->critic);
    model_close(r->m);
    r->critic = NULL;
    r->m = NULL;
}

/* The policy's frozen base serves a critic with an adapter of its own: the bits of two copies. */
static void one_base(void **state) {
    (void)state;
    static const enum quant_kind quant[] = {QUANT_NONE, QUANT_NF4, QUANT_INT8};
    char *dir = case_path("llama", ""), *golden = xasprintf("%s/critic/lora_llama/golden.safetensors", FIXTURES);
    EACH_BACKEND(b) EACH(q, quant) {
        struct rig r = {0};
        struct model *policy;
        float own[MAX_TARGETS], shared[MAX_TARGETS], again[MAX_TARGETS];
        OK(safetensors_open(&r.want, golden));
        case_dev(&r.dev, BACKENDS[b], 2);
        OK(model_open(&policy, &r.dev,
                      &(struct model_open_args){.dir = dir, .act = DT_F32, .max_len = MAX_LEN, .quant = quant[q]}));
        struct lora_config l = {.rank = 3, .alpha = 4, .targets = json_string("all-linear")};
        OK(model_lora_create(policy, &l, 6));
        lora_config_free(&l);
        values_beside(&r, dir, quant[q], NULL, own);
        values_beside(&r, dir, quant[q], policy, shared);
        values_beside(&r, dir, quant[q], policy, again); /* the first left the base as it was */
        assert_memory_equal(own, shared, (size_t)r.n_targets * 4);
        assert_memory_equal(own, again, (size_t)r.n_targets * 4);
        struct model_open_args a = {.dir = NULL, .act = DT_F32, .max_len = MAX_LEN, .quant = quant[q]};
        struct model_config c = policy->cfg;
        c.value = c.value_bias = true;
        const size_t alone = model_open_bytes(&c, &r.dev, &a);
        a.flags = MODEL_SHARED_BASE;
        assert_true(model_open_bytes(&c, &r.dev, &a) < alone / 2); /* the rope table and the head are left */
        char *qwen2 = case_path("qwen2", "");
        a = (struct model_open_args){
            .dir = qwen2, .act = DT_F32, .flags = MODEL_SHARED_BASE, .max_len = MAX_LEN, .quant = quant[q], .base = policy};
        assert_int_equal(model_open_value(&r.m, &r.dev, &a, 7), ERR_INPUT);
        assert_non_null(strstr(err_msg(), "not the model that was opened from there before"));
        free(qwen2);
        model_close(policy);
        r.m = NULL;
        rig_close(&r);
    }
    free(dir);
    free(golden);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(like_transformers), cmocka_unit_test(alone_or_together),   cmocka_unit_test(from_a_causal_model),
        cmocka_unit_test(like_peft),         cmocka_unit_test(adapter_directories), cmocka_unit_test(heads_that_stay),
        cmocka_unit_test(one_base)};
    return cmocka_run_group_tests_name("critic", tests, NULL, NULL);
}
