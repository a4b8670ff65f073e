/* test_model_peft.c - adapters in fp32 against peft and torch, on every backend: logits,
 * log-probs, every gradient, merged weights; and the directories in both directions.
 * The fixtures come from tools/oracle_lora.py. */
#include "model_case.h"

#include "base/json.h"

/* Bars of the project: 1e-5 relative, NMSE of a tensor 1e-9. */
static const double MAX_REL = 1e-5, MAX_NMSE = 1e-9;

static const struct {
    const char *name, *base;
    int64_t n_modules, n_last; /* adapted; tensors of the last layer, of which the fixture has the merged ones */
} CASES[] = {{"lora_qwen2", "qwen2", 14, 12},        {"lora_llama", "llama", 6, 9},        {"lora_qwen3", "qwen3", 3, 11},
             {"lora_bias", "llama_bias", 4, 16},     {"lora_phi3", "phi3", 4, 6},          {"lora_exaone4", "exaone4", 10, 11},
             {"lora_qwen3_moe", "qwen3_moe", 12, 9}, {"lora_experts", "qwen3_moe", 42, 27}};
static const char *const BACKENDS[] = {"ref", "cpu", "cuda"};
#define EACH(i, list) for (size_t i = 0; i < sizeof(list) / sizeof((list)[0]); i++)
#define EACH_BACKEND(i) EACH(i, BACKENDS) if (case_has(BACKENDS[i]))

/* The base with the adapter of `dir` on it; the golden numbers are those of `name`. */
static void open_adapted(struct model_case *c, size_t i, const char *backend, const char *dir) {
    *c = (struct model_case){0};
    case_dev(&c->dev, backend, 2);
    char *base = case_path(CASES[i].base, ""), *own = case_path(CASES[i].name, "");
    OK(model_open(&c->m, &c->dev, &(struct model_open_args){.dir = base, .act = DT_F32, .max_len = 128}));
    OK(model_lora_load(c->m, dir ? dir : own));
    case_golden(c, CASES[i].name);
    free(base);
    free(own);
}

static void forward(struct model_case *c, struct model_batch *b, struct model_acts **a, struct model_keep keep) {
    const struct case_seq s[2] = {case_seq_at(c, 0), case_seq_at(c, 1)};
    case_pack(&c->dev, b, s, 2);
    OK(model_acts_create(a, c->m, c->n_rows, keep, NULL));
    OK(model_forward(c->m, b, *a));
    OK(model_logp(c->m, *a, &c->l));
}

static void check_case(size_t i, const char *backend, struct model_keep keep) {
    struct model_case c;
    struct model_batch b;
    struct model_acts *a;
    double nmse;
    open_adapted(&c, i, backend, NULL);
    assert_int_equal(c.m->n_train_params, 2 * CASES[i].n_modules);
    forward(&c, &b, &a, keep);
    const double e_logp = case_worst(c.l.logp, c.want_logp, c.l.n), e_ent = case_worst(c.l.entropy, c.want_entropy, c.l.n);
    const size_t bytes = (size_t)c.m->n_train * 4;
    float *g_dev = case_garbage(&c.dev, bytes), *g = xmalloc(bytes);
    OK(model_backward(c.m, a,
                      &(struct model_backward_args){.batch = &b,
                                                    .logp = &c.l,
                                                    .dlogp = c.dlogp,
                                                    .dentropy = c.dentropy,
                                                    .sink = &(struct model_grad_sink){.flat = g_dev}}));
    OK(dev_copy_out(&c.dev, g, g_dev, bytes));
    const double e_grad = case_gradient_error(c.golden, c.m->train_params, c.m->n_train_params, g, &nmse);
    print_message("%-12s %-3s: logp %.1e, entropy %.1e, gradients %.1e (nmse %.1e)\n", CASES[i].name, backend, e_logp, e_ent,
                  e_grad, nmse);
    assert_true(e_logp <= MAX_REL && e_ent <= MAX_REL);
    assert_true(e_grad <= MAX_REL && nmse <= MAX_NMSE);
    dev_free(&c.dev, g_dev, bytes);
    free(g);
    model_acts_destroy(a);
    case_unpack(&c.dev, &b);
    case_close(&c);
}

static void against_peft(void **state) {
    (void)state;
    EACH_BACKEND(k) EACH(i, CASES) check_case(i, BACKENDS[k], MODEL_KEEP_ALL);
}
static void with_recompute(void **state) {
    (void)state;
    EACH(i, CASES) check_case(i, "ref", MODEL_KEEP_LAYER);
}

/* no_adapter gives the bits of the base model alone. */
static void base_alone(void **state) {
    (void)state;
    EACH(i, CASES) {
        struct model_case c, plain;
        struct model_batch b;
        struct model_acts *a;
        open_adapted(&c, i, "cpu", NULL);
        const struct case_seq s[2] = {case_seq_at(&c, 0), case_seq_at(&c, 1)};
        case_pack(&c.dev, &b, s, 2);
        b.no_adapter = true;
        OK(model_acts_create(&a, c.m, c.n_rows, MODEL_KEEP_NONE, NULL));
        OK(model_forward(c.m, &b, a));
        OK(model_logp(c.m, a, &c.l));
        model_acts_destroy(a);
        case_unpack(&c.dev, &b);
        case_dev(&plain.dev, "cpu", 2);
        char *dir = case_path(CASES[i].base, "");
        OK(model_open(&plain.m, &plain.dev, &(struct model_open_args){.dir = dir, .act = DT_F32, .max_len = 128}));
        free(dir);
        case_golden(&plain, CASES[i].name);
        forward(&plain, &b, &a, MODEL_KEEP_NONE);
        assert_memory_equal(c.l.logp, plain.l.logp, (size_t)c.l.n * 4);
        assert_true(case_worst(c.l.logp, c.want_logp, c.l.n) > 1e-3); /* and the adapter does something */
        model_acts_destroy(a);
        case_unpack(&plain.dev, &b);
        case_close(&plain);
        case_close(&c);
    }
}

/* ---- directories ---- */

static void merged_weights(void **state) {
    (void)state;
    EACH(i, CASES) {
        struct model_case c;
        struct safetensors_file *f;
        double worst = 0;
        int64_t n_seen = 0;
        open_adapted(&c, i, "ref", NULL);
        char *dir = case_temp_dir(), *path = file_join(dir, "model.safetensors");
        OK(model_export(c.m, dir, &(struct model_export_args){.dt = DT_F32}));
        OK(safetensors_open(&f, path));
        for (int64_t k = 0; k < c.m->n_params; k++) {
            char key[128];
            int64_t n;
            snprintf(key, sizeof key, "merged.%s", c.m->params[k].name);
            if (!safetensors_find(c.golden, key)) continue;
            const float *want = case_data(c.golden, key, DT_F32, NULL), *got = case_data(f, c.m->params[k].name, DT_F32, &n);
            worst = worse_of(worst, case_worst(got, want, n));
            n_seen++;
        }
        print_message("%-12s merged: %.1e in %lld tensors\n", CASES[i].name, worst, (long long)n_seen);
        assert_true(worst <= 1e-6); /* a sum of r products in another order */
        assert_int_equal(n_seen, CASES[i].n_last);
        safetensors_close(f);
        free(path);
        case_drop_dir(dir);
        case_close(&c);
    }
}

/* What is written is what peft wrote: every tensor, and the fields that say what it is. */
static void round_trip(void **state) {
    (void)state;
    EACH(i, CASES) {
        struct model_case c;
        char *dir = case_temp_dir();
        open_adapted(&c, i, "cpu", NULL);
        OK(model_lora_export(c.m, dir, NULL));
        struct safetensors_file *a, *b;
        char *mine = file_join(dir, "adapter_model.safetensors"), *theirs = case_path(CASES[i].name, "adapter_model.safetensors");
        OK(safetensors_open(&a, mine));
        OK(safetensors_open(&b, theirs));
        assert_int_equal(safetensors_count(a), safetensors_count(b));
        for (int64_t k = 0; k < safetensors_count(b); k++) {
            const struct safetensors_tensor *want = safetensors_at(b, k), *got = safetensors_find(a, want->name);
            assert_non_null(got);
            assert_int_equal(got->bytes, want->bytes);
            assert_int_equal(got->dim[0], want->dim[0]);
            assert_memory_equal(got->data, want->data, want->bytes);
        }
        safetensors_close(a);
        safetensors_close(b);
        json_t *x, *y;
        char *my_config = file_join(dir, "adapter_config.json"), *their_config = case_path(CASES[i].name, "adapter_config.json");
        OK(json_load(&x, my_config, 1 << 20));
        OK(json_load(&y, their_config, 1 << 20));
        static const char *const fields[] = {
            "r", "use_rslora", "peft_type", "task_type", "bias", "base_model_name_or_path", "fan_in_fan_out"};
        EACH(k, fields) assert_true(json_equal(json_object_get(x, fields[k]), json_object_get(y, fields[k])));
        assert_true(json_number_value(json_object_get(x, "lora_alpha")) == json_number_value(json_object_get(y, "lora_alpha")));
        json_decref(x);
        json_decref(y);
        free(mine);
        free(theirs);
        free(my_config);
        free(their_config);
        case_close(&c);
        struct model_batch batch;
        struct model_acts *acts;
        open_adapted(&c, i, "cpu", dir); /* and it loads */
        forward(&c, &batch, &acts, MODEL_KEEP_NONE);
        assert_true(case_worst(c.l.logp, c.want_logp, c.l.n) <= MAX_REL);
        model_acts_destroy(acts);
        case_unpack(&c.dev, &batch);
        case_close(&c);
        case_drop_dir(dir);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(against_peft),   cmocka_unit_test(with_recompute), cmocka_unit_test(base_alone),
        cmocka_unit_test(merged_weights), cmocka_unit_test(round_trip),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
