/* test_model_optim.c - optimizers and schedules against torch's, bitsandbytes' and verl's
 * (tools/oracle_optim.py). Weights and gradients are the formulas of that file. */
#include "conf/conf.h"
#include "conf/keys/enums.def"
#include "model_case.h"

#include "base/json.h"
#include "model/optim/optimizer_int.h"

static json_t *want;

static double num(const json_t *o, const char *key) { return json_number_value(json_object_get(o, key)); }

static bool flag(const json_t *o, const char *key) { return json_is_true(json_object_get(o, key)); }

static int setup(void **state) {
    (void)state;
    const char *dir = getenv("VERLC_TRAIN_FIXTURES"); /* the oracle's, with schedules by the thousand */
    char path[512];
    snprintf(path, sizeof path, "%s/optim.json", dir ? dir : FIXTURES "/train");
    return json_load(&want, path, 1 << 28);
}
static int teardown(void **state) {
    (void)state;
    json_decref(want);
    return 0;
}

static struct optim_config config_of(const json_t *k) {
    const json_t *betas = json_object_get(want, "betas");
    struct optim_config c = {.lr = num(want, "lr"),
                             .weight_decay = num(want, "weight_decay"),
                             .eps = num(want, "eps"),
                             .beta1 = json_number_value(json_array_get(betas, 0)),
                             .beta2 = json_number_value(json_array_get(betas, 1)),
                             .momentum = num(k, "momentum"),
                             .dampening = num(k, "dampening"),
                             .ns_steps = 5,
                             .alpha = num(k, "alpha"),
                             .nesterov = flag(k, "nesterov"),
                             .muon_original_lr = flag(k, "original"),
                             .amsgrad = flag(k, "amsgrad"),
                             .maximize = flag(k, "maximize"),
                             .centered = flag(k, "centered"),
                             .decoupled = flag(k, "decoupled_weight_decay"),
                             .schedule = "constant"};
    const struct conf_word *w = CONF_WORDS(OPTIMIZERS);
    while (strcmp(w->word, json_string_value(json_object_get(k, "optimizer"))) != 0) w++;
    c.kind = (enum optim_kind)w->value;
    return c;
}

static void fill(const struct model *m, float *flat, int step) {
    for (int64_t x = 0; x < m->n_params; x++) {
        const struct model_param *p = &m->params[x];
        const double len = (double)strlen(p->name);
        for (int64_t k = 0; k < p->rows * p->cols; k++) {
            const double i = (double)k;
            flat[p->offset + k] = step == 0 ? (float)(0.05 * sin(0.11 * i + len))
                                            : (float)(sin(0.37 * i + 0.013 * i * i + 1.7 * step + len) * (k % 5 == 0 ? 1.0 : 1e-3));
        }
    }
}

struct trained {
    struct dev dev;
    struct model *m;
    float *w;        /* the master after the fixture's steps */
    struct optim *o; /* NULL: none */
};

static void open_case(struct trained *t, const char *backend, int threads, enum dtype act) {
    char dir[] = "/tmp/verlc_optim_XXXXXX";
    assert_non_null(mkdtemp(dir));
    OK(model_init_dir(json_object_get(want, "config"), dir, 1, DT_F32));
    case_dev(&t->dev, backend, threads);
    OK(model_open(&t->m, &t->dev, &(struct model_open_args){.dir = dir, .act = act, .flags = MODEL_TRAIN, .max_len = 8}));
    OK(file_remove_tree(dir));
    t->w = xmalloc((size_t)t->m->n_elems * 4);
    t->o = NULL;
}

static void train(struct trained *t, const struct optim_config *c, const char *backend, int threads, enum dtype act) {
    struct optim *o;
    struct optim_result r;
    open_case(t, backend, threads, act);
    OK(optim_create(&o, t->m, c));
    struct optim_plan p;
    OK(optim_plan(&p, &t->m->cfg, &t->dev, act, NULL, c));
    assert_int_equal(o->block_bytes, p.moments);
    const size_t bytes = (size_t)t->m->n_elems * 4;
    float *g = case_alloc(&t->dev, bytes);
    fill(t->m, t->w, 0);
    OK(dev_copy_in(&t->dev, t->m->master, t->w, bytes));
    for (int step = 1; step <= (int)num(want, "steps"); step++) {
        fill(t->m, t->w, step);
        OK(dev_copy_in(&t->dev, g, t->w, bytes));
        OK(optim_step(o, t->m, g, c, c->lr, &r));
    }
    OK(dev_copy_out(&t->dev, t->w, t->m->master, bytes));
    dev_free(&t->dev, g, bytes);
    t->o = o;
}

static void trained_free(struct trained *t) {
    free(t->w);
    optim_destroy(t->o, t->m);
    model_close(t->m);
    dev_close(&t->dev);
}

/* Largest difference of the sampled weights from a case's. */
static double worst_of(const struct trained *t, const json_t *k) {
    const int64_t stride = (int64_t)num(want, "stride");
    double worst = 0;
    for (int64_t p = 0; p < t->m->n_params; p++) {
        const struct model_param *x = &t->m->params[p];
        const json_t *v = json_object_get(json_object_get(k, "values"), x->name);
        assert_int_equal(json_array_size(v), (x->rows * x->cols + stride - 1) / stride);
        for (size_t s = 0; s < json_array_size(v); s++)
            worst = worse_of(worst, fabs(t->w[x->offset + (int64_t)s * stride] - json_number_value(json_array_get(v, s))));
    }
    return worst;
}

static void optimizers_match(void **state) {
    (void)state;
    const json_t *cases = json_object_get(want, "cases"), *k;
    static const char *const backends[] = {"ref", "cpu", "cuda"};
    size_t i;
    assert_int_equal(json_array_size(cases), 21);
    json_array_foreach((json_t *)(uintptr_t)cases, i, k) for (int b = 0; b < 3; b++) {
        if (!case_has(backends[b])) continue;
        const struct optim_config c = config_of(k);
        struct trained one, two;
        train(&one, &c, backends[b], 1, DT_F32);
        train(&two, &c, backends[b], 2, DT_F32);
        const double worst = worst_of(&one, k);
        print_message("%s on %s: %.1e\n", json_string_value(json_object_get(k, "name")), backends[b], worst);
        /* Weights moved by about 0.06. Newton-Schulz enlarges roundings 3.4 times an iteration; a moment
         * between two 8-bit codes may take either. */
        assert_true(worst <= (c.kind == OPTIM_MUON ? 1e-6 : c.kind == OPTIM_ADAMW8 ? 1e-4 : 2e-7));
        assert_memory_equal(one.w, two.w, (size_t)one.m->n_elems * 4); /* threads change nothing, nor does a second run */
        trained_free(&one);
        trained_free(&two);
    }
}

/* Master and state of the parts, put together by their pieces, are those of the whole. */
static void pieces_make_the_whole(const struct trained *whole, struct trained *part, struct optim **o, int n_parts) {
    struct optim_array want_arrays[OPTIM_MAX_ARRAYS + 1], got_arrays[OPTIM_MAX_ARRAYS + 1];
    struct optim_piece *pieces;
    char *got[OPTIM_MAX_ARRAYS + 1];
    int64_t n_pieces, seen[OPTIM_MAX_ARRAYS + 1] = {0};
    const int n = optim_pieces(whole->o, whole->m, want_arrays, &pieces, &n_pieces);
    for (int k = 0; k < n; k++) {
        got[k] = xmalloc((size_t)want_arrays[k].n * dtype_size(want_arrays[k].dt));
        assert_true(k > 0 || want_arrays[k].n == whole->m->n_train);
    }
    free(pieces);
    for (int p = 0; p < n_parts; p++) {
        assert_int_equal(optim_pieces(o[p], part[p].m, got_arrays, &pieces, &n_pieces), n);
        for (int64_t i = 0; i < n_pieces; i++) {
            const struct optim_piece *x = &pieces[i];
            const struct optim_array *a = &got_arrays[x->array];
            const size_t unit = dtype_size(a->dt);
            assert_true(x->at >= 0 && x->at + x->n <= a->n && a->n == want_arrays[x->array].n);
            memcpy(got[x->array] + (size_t)x->at * unit, (char *)a->data + (size_t)x->own * unit, (size_t)x->n * unit);
            seen[x->array] += x->n;
        }
        free(pieces);
    }
    for (int k = 0; k < n; k++) {
        assert_string_equal(want_arrays[k].name, got_arrays[k].name);
        assert_int_equal(seen[k], want_arrays[k].n);
        assert_memory_equal(got[k], want_arrays[k].data, (size_t)want_arrays[k].n * dtype_size(want_arrays[k].dt));
        free(got[k]);
    }
}

/* An optimizer of some ranges updates them as that of the whole does, given the norm from everybody's sums: same bits. */
static void optimizers_of_ranges_match(void **state) {
    (void)state;
    enum { PARTS = 3 };
    const json_t *cases = json_object_get(want, "cases"), *k;
    size_t i;
    json_array_foreach((json_t *)(uintptr_t)cases, i, k) {
        struct optim_config c = config_of(k);
        struct trained whole, part[PARTS];
        struct optim *o[PARTS];
        struct optim_result r;
        struct model_range own[PARTS];
        int64_t n_sums = 0;
        c.clip = 0.01; /* so that the norm matters */
        train(&whole, &c, "cpu", 1, DT_F32);
        model_cut(whole.m, (struct model_range){0, whole.m->n_elems},
                  (struct model_shard){.size = PARTS, .whole_matrices = c.kind == OPTIM_MUON}, own);
        const int64_t n_segments = model_n_segments(whole.m);
        double *sums = xmalloc((size_t)n_segments * sizeof *sums);
        for (int p = 0; p < PARTS; p++) {
            assert_true(own[p].lo == (p == 0 ? 0 : own[p - 1].hi) && own[p].hi > own[p].lo);
            open_case(&part[p], "cpu", 2, DT_F32);
            OK(optim_create_part(&o[p], part[p].m, &c, &own[p], 1));
            fill(part[p].m, part[p].w, 0);
            memcpy(part[p].m->master, part[p].w + own[p].lo, (size_t)(own[p].hi - own[p].lo) * 4);
        }
        assert_int_equal(own[PARTS - 1].hi, whole.m->n_elems);
        for (int step = 1; step <= (int)num(want, "steps"); step++, n_sums = 0) {
            for (int p = 0; p < PARTS; p++) {
                fill(part[p].m, part[p].w, step);
                OK(optim_sums(o[p], part[p].m, part[p].w + own[p].lo));
                memcpy(sums + n_sums, o[p]->sums, (size_t)o[p]->n_segments * sizeof *sums);
                n_sums += o[p]->n_segments;
            }
            assert_int_equal(n_sums, n_segments);
            optim_norm(whole.m, sums, &r);
            for (int p = 0; p < PARTS; p++) OK(optim_update(o[p], part[p].m, part[p].w + own[p].lo, &c, c.lr, r.grad_norm));
        }
        pieces_make_the_whole(&whole, part, o, PARTS);
        for (int p = 0; p < PARTS; p++) {
            assert_memory_equal(part[p].m->master, whole.w + own[p].lo, (size_t)(own[p].hi - own[p].lo) * 4);
            optim_destroy(o[p], part[p].m);
            trained_free(&part[p]);
        }
        trained_free(&whole);
        free(sums);
    }
}

/* In bf16 the GEMMs round, the direction stays: as in torch, whose Muon is bf16 always. */
static void muon_in_bf16(void **state) {
    (void)state;
    const json_t *k = json_array_get(json_object_get(want, "cases"), 5);
    const struct optim_config c = config_of(k);
    struct trained f32, bf16;
    assert_int_equal(c.kind, OPTIM_MUON);
    train(&f32, &c, "cpu", 1, DT_F32);
    train(&bf16, &c, "cpu", 1, DT_BF16);
    float *start = xmalloc((size_t)f32.m->n_elems * 4);
    double diff = 0, all = 0;
    fill(f32.m, start, 0);
    for (int64_t i = 0; i < f32.m->n_elems; i++) {
        diff += pow((double)f32.w[i] - (double)bf16.w[i], 2);
        all += pow((double)f32.w[i] - (double)start[i], 2);
    }
    print_message("bf16 against f32: %.3f of the way\n", sqrt(diff / all));
    assert_true(diff > 0 && sqrt(diff / all) < 0.05); /* 2^-8 a rounding, enlarged over five iterations */
    free(start);
    trained_free(&f32);
    trained_free(&bf16);
}

static void code_books_are_bitsandbytes(void **state) {
    (void)state;
    for (int s = 0; s < 2; s++) {
        float book[256];
        optim__dynamic_book(s == 0, book);
        for (int i = 0; i < 256; i++) {
            const json_t *theirs = json_array_get(json_object_get(want, "books"), (size_t)s);
            const double b = json_number_value(json_array_get(theirs, (size_t)i));
            assert_true(fabs(book[i] - b) <= 2e-7 * fabs(b)); /* theirs is computed in fp32: two roundings apart */
        }
    }
}

static void schedules_match(void **state) {
    (void)state;
    json_t *k, *v;
    size_t i, step;
    double worst = 0;
    json_array_foreach(json_object_get(want, "schedules"), i, k) {
        const struct optim_config c = {.lr = num(k, "lr"),
                                       .schedule = json_string_value(json_object_get(k, "schedule")),
                                       .warmup_steps = (int64_t)num(k, "warmup"),
                                       .total_steps = (int64_t)num(k, "total"),
                                       .min_lr_ratio = num(k, "min_lr_ratio"),
                                       .num_cycles = num(k, "num_cycles"),
                                       .init_lr_ratio = num(k, "init_lr_ratio")};
        const int64_t first = json_is_true(json_object_get(k, "zero_indexed_step")) ? 0 : 1;
        json_array_foreach(json_object_get(k, "rates"), step, v) {
            const double lr = optim_lr(&c, (int64_t)step + first), e = fabs(lr - json_number_value(v));
            if (e > 1e-15) /* of a rate of 0.5, by cosines of two libraries */
                fail_msg("%s %zu, step %zu: %.17g, verl has %.17g", c.schedule, i, step, lr, json_number_value(v));
            worst = worse_of(worst, e);
        }
    }
    assert_true(i >= 7);
    print_message("schedules: %zu runs, largest difference %.1e\n", i, worst);
    const struct optim_config linear = {.lr = 2, .schedule = "linear", .warmup_steps = 2, .total_steps = 10, .min_lr_ratio = 0.25};
    const double at[] = {0, 1, 2, 2 - 1.5 / 8, 2 - 3.0 / 8};
    for (int t = 0; t < 5; t++) assert_true(fabs(optim_lr(&linear, t) - at[t]) < 1e-15);
    assert_true(optim_lr(&linear, 10) == 0.5 && optim_lr(&linear, 1000) == 0.5);
}

static double moments(const struct model_config *m, struct dev *dev, const struct optim_config *c) {
    struct optim_plan p;
    OK(optim_plan(&p, m, dev, DT_BF16, NULL, c));
    return (double)p.moments;
}

static void state_is_as_small_as_said(void **state) {
    (void)state;
    const struct optim_config adamw = {.kind = OPTIM_ADAMW}, adamw8 = {.kind = OPTIM_ADAMW8}, sgd = {.kind = OPTIM_SGD},
                              amsgrad = {.kind = OPTIM_ADAM, .amsgrad = true}, rmsprop = {.kind = OPTIM_RMSPROP},
                              momentum = {.kind = OPTIM_SGD, .momentum = 0.9};
    json_t *j = model_arch_config("qwen2.5-0.5b");
    struct model_config m;
    struct dev dev;
    assert_non_null(j);
    OK(model_config_from_json(&m, j, "qwen2.5-0.5b"));
    case_dev(&dev, "ref", 1);
    const double n = (double)model_config_params(&m);
    assert_true(fabs(moments(&m, &dev, &adamw) / n - 8) < 1e-3);
    assert_true(fabs(moments(&m, &dev, &momentum) / n - 4) < 1e-3);
    assert_true(fabs(moments(&m, &dev, &amsgrad) / n - 12) < 1e-3);
    assert_true(fabs(moments(&m, &dev, &rmsprop) / n - 4) < 1e-3);
    assert_true(moments(&m, &dev, &sgd) / n < 1e-3); /* the segments' table and sums */
    /* codes, scales, one piece */
    assert_true(moments(&m, &dev, &adamw8) / n < 2.04 + 2 * 4 * (1 << 22) / n);
    dev_close(&dev);
    model_config_free(&m);
    json_decref(j);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(optimizers_match), cmocka_unit_test(optimizers_of_ranges_match),
        cmocka_unit_test(muon_in_bf16),     cmocka_unit_test(code_books_are_bitsandbytes),
        cmocka_unit_test(schedules_match),  cmocka_unit_test(state_is_as_small_as_said),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
