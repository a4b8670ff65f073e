/* test_device_moe.c - mixture of experts to the bit, on every backend: the order of choices, ties and NaN; the sort against one
 * made here; a row's bits at every load of its expert, at any place; what does not fit is refused.
 *
 * The values themselves are compared with ref in test_device_ops.c, the gradients with differences in test_device_grad.c, and a
 * weight's gradient over several calls with the fold of theirs in test_device_add.c. */
#include "ops/ops_table.h"

static struct backends two; /* threads */

static struct tensor upload(struct run *r, enum dtype dt, int64_t rows, int64_t cols, const float *f, const int32_t *i) {
    return up_values(r, shape_2d(dt, rows, cols), false, f, i);
}

/* ---- choices ---- */

static void check_choices(struct dev *d, enum dtype act) {
    enum { E = 40, K = 5, T = 4 };
    float z[T * E];
    struct run r = {.d = d, .act = act};
    for (int e = 0; e < E; e++) {
        z[e] = 0.25f * (float)(e % 4);             /* ten of each value: 3, 7, 11, ... are the largest */
        z[E + e] = e == 33 ? INFINITY : -INFINITY; /* one, then all others by id */
        z[2 * E + e] = e % 2 ? NAN : (float)-e;    /* numbers first */
        z[3 * E + e] = NAN;
    }
    static const int32_t want[T][K] = {{3, 7, 11, 15, 19}, {33, 0, 1, 2, 3}, {0, 2, 4, 6, 8}, {0, 1, 2, 3, 4}};
    int32_t id[T][K];
    for (int normalize = 0; normalize < 2; normalize++) {
        struct route_args a = {.logits = upload(&r, act, T, E, z, NULL),
                               .expert = dev_new(&r, shape_2d(DT_I32, T, K), false),
                               .weight = dev_new(&r, shape_2d(DT_F32, T, K), false),
                               .normalize = normalize};
        if (dev_route_fwd(d, &a) < 0 || dev_copy_out(d, id, a.expert.data, sizeof id) < 0) fail_msg("%s", err_msg());
        float *w = down_values(&r, a.weight);
        assert_memory_equal(id, want, sizeof id);
        for (int s = 1; s < K; s++) assert_memory_equal(&w[s], &w[0], sizeof *w); /* equal logits, equal weights */
        assert_true(fabsf(w[0] - (normalize ? 1.0f / K : 0.1f / (1 + expf(-0.25f) + expf(-0.5f) + expf(-0.75f)))) < 1e-6f);
        for (int s = K; s < T * K; s++) assert_true(isnan(w[s])); /* an infinity or NaN is no distribution */
        free(w);
    }
    run_free_blocks(&r);
}

/* Given choices stand in the place of the largest; their weights, and the gradient, are those of the logits that are there now. */
static void check_given(struct dev *d, enum dtype act, bool normalize, bool sigmoid) {
    enum { E = 40, K = 3, T = 3 };
    static const int32_t given[T * K] = {-1, -1, -1, 39, 0, 33, -1, -1, -1};
    struct run r = {.d = d, .act = act};
    float z[T * E], p[E], dw[T * K], sum = 0, chosen = 0, dot = 0;
    int32_t own[T * K], id[T * K];
    for (int i = 0; i < T * E; i++) z[i] = 0.25f * (float)((i * 7) % 11);
    for (int i = 0; i < T * K; i++) dw[i] = (float)(i + 1);
    for (int e = 0; e < E; e++) sum += p[e] = expf(z[E + e]);
    for (int e = 0; e < E; e++) p[e] = sigmoid ? p[e] / (1 + p[e]) : p[e] / sum;
    struct route_args a = {.logits = upload(&r, act, T, E, z, NULL),
                           .expert = dev_new(&r, shape_2d(DT_I32, T, K), false),
                           .weight = dev_new(&r, shape_2d(DT_F32, T, K), false),
                           .normalize = normalize,
                           .sigmoid = sigmoid};
    if (dev_route_fwd(d, &a) < 0 || dev_copy_out(d, own, a.expert.data, sizeof own) < 0) fail_msg("%s", err_msg());
    float *const before = down_values(&r, a.weight);
    a.given = upload(&r, DT_I32, T, K, NULL, given);
    if (dev_route_fwd(d, &a) < 0 || dev_copy_out(d, id, a.expert.data, sizeof id) < 0) fail_msg("%s", err_msg());
    const struct tensor dz = dev_new(&r, shape_2d(DT_F32, T, E), false);
    if (dev_route_bwd(d, &a, dz, upload(&r, DT_F32, T, K, dw, NULL)) < 0) fail_msg("%s", err_msg());
    float *const w = down_values(&r, a.weight), *const g = down_values(&r, dz);
    for (int s = 0; s < K; s++) chosen += p[given[K + s]];
    for (int s = 0; s < K; s++) {
        const float want = p[given[K + s]] / (normalize ? chosen : 1);
        assert_int_equal(id[s], own[s]);
        assert_int_equal(id[K + s], given[K + s]);
        assert_int_equal(id[2 * K + s], own[2 * K + s]);
        assert_memory_equal(&w[s], &before[s], sizeof *w);
        assert_true(fabsf(w[K + s] - want) < 1e-6f);
        dot += want * dw[K + s];
    }
    for (int s = 0; s < K && !sigmoid; s++) assert_true(fabsf(g[E + given[K + s]] - w[K + s] * (dw[K + s] - dot)) < 1e-5f);
    assert_true(sigmoid || fabsf(g[E + 1] - (normalize ? 0 : -p[1] * dot)) < 1e-6f);
    free(before);
    free(w);
    free(g);
    run_free_blocks(&r);
}

static void test_given(void **state) {
    (void)state;
    for (int b = 0; b < two.n; b++)
        for (int i = 0; i < 8; i++) check_given(&two.dev[b], i < 4 ? DT_F32 : DT_BF16, i % 2, i / 2 % 2);
}

static void test_choices(void **state) {
    (void)state;
    for (int b = 0; b < two.n; b++) {
        check_choices(&two.dev[b], DT_F32);
        check_choices(&two.dev[b], DT_BF16);
    }
}

/* ---- sort ---- */

/* load 0: uniform; 1: all slots have the same experts; 2: the last experts alone; 3: a few. */
static void draw_experts(int32_t *id, int64_t tokens, int64_t experts, int64_t k, int load) {
    struct rng g = {.seed = (uint64_t)(23 + load), .stream = RNG_TEST};
    int64_t e[DEV_MAX_EXPERTS];
    for (int64_t i = 0; i < experts; i++) e[i] = i;
    for (int64_t t = 0; t < tokens; t++) {
        if (load == 0 || load == 3) rng_shuffle(&g, e, load == 3 && 2 * k < experts ? 2 * k : experts);
        for (int64_t s = 0; s < k; s++) id[t * k + s] = (int32_t)(load == 2 ? experts - 1 - s : e[s]);
    }
}

static void check_sort(struct dev *d, int64_t tokens, int64_t experts, int64_t k, int load) {
    const int64_t slots = tokens * k;
    int32_t *id = xcalloc((size_t)slots, sizeof *id), *offset = xcalloc((size_t)experts + 1, sizeof *offset);
    int32_t *token = xcalloc((size_t)slots, sizeof *token), *row = xcalloc((size_t)slots, sizeof *row);
    struct run r = {.d = d};
    draw_experts(id, tokens, experts, k, load);
    const struct tensor expert = upload(&r, DT_I32, tokens, k, NULL, id), at = dev_new(&r, shape_1d(DT_I32, experts + 1), false);
    const struct tensor of = dev_new(&r, shape_1d(DT_I32, slots), false), to = dev_new(&r, shape_2d(DT_I32, tokens, k), false);
    if (dev_expert_sort(d, at, of, to, expert) < 0) fail_msg("%s", err_msg());
    assert_int_equal(dev_copy_out(d, offset, at.data, (size_t)(experts + 1) * 4), 0);
    assert_int_equal(dev_copy_out(d, token, of.data, (size_t)slots * 4), 0);
    assert_int_equal(dev_copy_out(d, row, to.data, (size_t)slots * 4), 0);
    int32_t next = 0;
    for (int64_t e = 0; e < experts; e++) {
        assert_int_equal(offset[e], next);
        for (int64_t i = 0; i < slots; i++) {
            if (id[i] != e) continue;
            assert_int_equal(row[i], next);
            assert_int_equal(token[next], i / k);
            next++;
        }
    }
    assert_int_equal(offset[experts], slots);
    run_free_blocks(&r);
    free(id);
    free(offset);
    free(token);
    free(row);
}

static void test_sort(void **state) {
    static const int64_t cases[][3] = {{1, 1, 1}, {3, 8, 2}, {700, 16, 4}, {257, 128, 8}, {64, 1024, 32}, {0, 8, 2}};
    (void)state;
    for (int b = 0; b < two.n; b++)
        for (int64_t i = 0; i < cases_of(COUNT(cases), 3); i++)
            for (int load = 0; load < 4; load++) check_sort(&two.dev[b], cases[i][0], cases[i][1], cases[i][2], load);
}

/* ---- load ---- */

enum { LOAD_E = 4, LOAD_MOST = 420, LOAD_MINE = 3 };
static const struct load_size { int64_t n, k; } load_sizes[] = {{72, 136}, {264, 328}};

/* The result of LOAD_MINE rows of expert 2 when it has `before` more ahead of them and `after` behind, and expert 0 has `other`.
 * Of the others' values some are NaN. */
static float *load_rows(struct dev *d, enum dtype act, struct load_size size, bool dx, int64_t before, int64_t after,
                        int64_t other) {
    const int64_t total = other + before + LOAD_MINE + after, in = dx ? size.n : size.k, out = dx ? size.k : size.n;
    struct run r = {.d = d, .act = act};
    struct slot x = {.name = "x", .dt = act, .nd = 2, .dim = {LOAD_MOST * 2, in}};
    struct slot w = {.name = "w", .dt = act, .nd = 2, .dim = {LOAD_E * size.n, size.k}};
    const int32_t offset[LOAD_E + 1] = {0, (int32_t)other, (int32_t)other, (int32_t)total, (int32_t)total};
    struct weight_stack stack;
    slot_fill(&x, 1, 0);
    slot_fill(&w, 0.3f, 0);
    float *rows = xcalloc((size_t)(total * in), sizeof *rows);
    for (int64_t i = 0; i < total; i++) { /* the rows in question are the first of x; the others differ from call to call */
        const int64_t mine = i - other - before, from = mine >= 0 && mine < LOAD_MINE ? mine : LOAD_MINE + (i + before) % 400;
        memcpy(rows + i * in, x.f + from * in, (size_t)in * sizeof *rows);
        if (from >= LOAD_MINE && i % 7 == 3) rows[i * in + i % in] = NAN;
    }
    const struct tensor y = dev_new(&r, shape_2d(act, total, out), false), at = up_i32(&r, shape_1d(DT_I32, LOAD_E + 1), offset);
    const struct tensor a = upload(&r, act, total, in, rows, NULL);
    if (up_experts(&r, &w, LOAD_E, &stack) < 0) fail_msg("%s", err_msg());
    if ((dx ? dev_grouped_dx(d, y, a, stack, at) : dev_grouped_fwd(d, y, a, stack, at)) < 0) fail_msg("%s", err_msg());
    float *all = down_values(&r, y), *got = xcalloc((size_t)(LOAD_MINE * out), sizeof *got);
    memcpy(got, all + (other + before) * out, (size_t)(LOAD_MINE * out) * sizeof *got);
    free(all);
    free(rows);
    free(x.f);
    free(w.f);
    run_free_blocks(&r);
    return got;
}

static void check_load(struct dev *d, const char *name, enum dtype act, struct load_size size, bool dx) {
    static const int64_t loads[][3] = {{0, 0, 0},   {0, 40, 0},   {1, 0, 5},   {17, 17, 3},   {100, 20, 300},
                                       {126, 0, 0}, {400, 0, 10}, {5, 400, 1}, {63, 300, 127}};
    const int64_t n = LOAD_MINE * (dx ? size.k : size.n);
    float *alone = load_rows(d, act, size, dx, 0, 0, 0);
    for (int64_t i = 1; i < cases_of(COUNT(loads), 4); i++) {
        float *got = load_rows(d, act, size, dx, loads[i][0], loads[i][1], loads[i][2]);
        const int64_t at = first_diff(got, alone, n);
        if (at >= 0)
            fail_msg("%s %s %s: element %lld with %lld rows ahead, %lld behind and %lld of another expert is %.9g, alone %.9g",
                     name, dtype_name(act), dx ? "dx" : "fwd", (long long)at, (long long)loads[i][0], (long long)loads[i][1],
                     (long long)loads[i][2], (double)got[at], (double)alone[at]);
        free(got);
    }
    free(alone);
}

/* dw of expert 2, which has `mine` rows, when experts 0 and 3 have `before` and `after`, all NaN. */
static float *load_dw(struct dev *d, enum dtype act, struct load_size size, int64_t mine, int64_t before, int64_t after) {
    const int64_t total = before + mine + after, count = size.n * size.k;
    const int32_t offset[LOAD_E + 1] = {0, (int32_t)before, (int32_t)before, (int32_t)(before + mine), (int32_t)total};
    struct run r = {.d = d, .act = act};
    struct slot x = {.name = "x", .dt = act, .nd = 2, .dim = {mine, size.k}};
    struct slot dy = {.name = "dy", .dt = act, .nd = 2, .dim = {mine, size.n}};
    slot_fill(&x, 1, 0);
    slot_fill(&dy, 1, 0);
    float *const a = xcalloc((size_t)(total * size.n), sizeof *a), *const b = xcalloc((size_t)(total * size.k), sizeof *b);
    for (int64_t i = 0; i < total * size.n; i++) {
        const int64_t at = i - before * size.n;
        a[i] = at >= 0 && at < mine * size.n ? dy.f[at] : NAN;
    }
    for (int64_t i = 0; i < total * size.k; i++) {
        const int64_t at = i - before * size.k;
        b[i] = at >= 0 && at < mine * size.k ? x.f[at] : NAN;
    }
    const struct tensor flat = dev_new(&r, shape_2d(DT_F32, LOAD_E * size.n, size.k), false);
    const struct tensor dw = {flat.data, DT_F32, 3, {LOAD_E, size.n, size.k, 1}};
    if (dev_grouped_dw(d, dw, upload(&r, act, total, size.n, a, NULL), upload(&r, act, total, size.k, b, NULL),
                       up_i32(&r, shape_1d(DT_I32, LOAD_E + 1), offset), false) < 0)
        fail_msg("%s", err_msg());
    float *const all = down_values(&r, flat), *const got = xcalloc((size_t)count, sizeof *got);
    for (int64_t i = 0; i < count; i++) assert_true(memcmp(&all[count + i], &(float){0}, sizeof(float)) == 0); /* no rows */
    memcpy(got, all + 2 * count, (size_t)count * sizeof *got);
    free(all);
    free(a);
    free(b);
    free(x.f);
    free(dy.f);
    run_free_blocks(&r);
    return got;
}

static void check_dw_load(struct dev *d, const char *name, enum dtype act, struct load_size size) {
    static const int64_t mine[] = {1, 64, 67, 150}, others[][2] = {{1, 3}, {200, 0}, {64, 130}};
    for (int64_t i = 0; i < COUNT(mine); i++) {
        float *const alone = load_dw(d, act, size, mine[i], 0, 0);
        for (int64_t j = 0; j < COUNT(others); j++) {
            float *const got = load_dw(d, act, size, mine[i], others[j][0], others[j][1]);
            const int64_t at = first_diff(got, alone, size.n * size.k);
            if (at >= 0)
                fail_msg("%s %s dw of %lld rows: element %lld with %lld and %lld of others is %.9g, alone %.9g", name,
                         dtype_name(act), (long long)mine[i], (long long)at, (long long)others[j][0], (long long)others[j][1],
                         (double)got[at], (double)alone[at]);
            free(got);
        }
        free(alone);
    }
}

static void test_load(void **state) {
    (void)state;
    for (int b = 1; b < two.n; b++) /* ref sums each element by itself */
        for (int64_t i = 0; i < cases_of(COUNT(load_sizes), 1); i++)
            for (int f32 = 0; f32 < 2; f32++) {
                const enum dtype act = f32 ? DT_F32 : DT_BF16;
                check_load(&two.dev[b], two.name[b], act, load_sizes[i], false);
                check_load(&two.dev[b], two.name[b], act, load_sizes[i], true);
                check_dw_load(&two.dev[b], two.name[b], act, load_sizes[i]);
            }
}

/* The offsets of a part of the rows. */
static void test_clip(void **state) {
    static const int32_t offset[] = {0, 3, 3, 10, 14};
    static const struct {
        int64_t lo, n;
        int32_t want[5];
    } cases[] = {{0, 14, {0, 3, 3, 10, 14}}, {2, 5, {0, 1, 1, 5, 5}}, {10, 4, {0, 0, 0, 0, 4}}, {3, 7, {0, 0, 0, 7, 7}}};
    (void)state;
    for (int b = 0; b < two.n; b++)
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            struct run r = {.d = &two.dev[b], .act = DT_F32};
            struct tensor at = upload(&r, DT_I32, 1, 5, NULL, offset), to = dev_new(&r, shape_1d(DT_I32, 5), false);
            int32_t got[5];
            at = tensor_1d(at.data, DT_I32, 5);
            if (dev_clip_offsets(r.d, to, at, cases[i].lo, cases[i].n) < 0) fail_msg("%s", err_msg());
            assert_int_equal(dev_copy_out(r.d, got, to.data, sizeof got), 0);
            assert_memory_equal(got, cases[i].want, sizeof got);
            if (dev_clip_offsets(r.d, at, at, cases[i].lo, cases[i].n) < 0) fail_msg("%s", err_msg()); /* in place */
            assert_int_equal(dev_copy_out(r.d, got, at.data, sizeof got), 0);
            assert_memory_equal(got, cases[i].want, sizeof got);
            run_free_blocks(&r);
        }
}

/* ---- refusals ---- */

static void refused(int rc, const char *words) {
    assert_int_equal(rc, ERR_INVAL);
    if (!strstr(err_msg(), words)) fail_msg("'%s' does not say '%s'", err_msg(), words);
}

static void test_refused(void **state) {
    struct dev *const d = &two.dev[0];
    struct run r = {.d = d, .act = DT_F32};
    const struct tensor z = dev_new(&r, shape_2d(DT_F32, 3, 4), false), id = dev_new(&r, shape_2d(DT_I32, 3, 2), false);
    const struct tensor w = dev_new(&r, shape_2d(DT_F32, 3, 2), false), many = dev_new(&r, shape_2d(DT_I32, 3, 5), false);
    const struct tensor at = dev_new(&r, shape_1d(DT_I32, 5), false), slots = dev_new(&r, shape_1d(DT_I32, 6), false);
    const struct tensor rows = dev_new(&r, shape_2d(DT_F32, 6, 4), false);
    struct weight_stack stack = {{.data = rows.data, .dt = DT_F32, .n = 2, .k = 4}, 3};
    (void)state;
    refused(dev_route_fwd(d, &(struct route_args){.logits = z, .expert = many, .weight = w}), "5 of 4 experts");
    refused(dev_route_fwd(d, &(struct route_args){.logits = z, .expert = id, .weight = z}), "weight is f32 (3, 4)");
    refused(dev_route_fwd(d, &(struct route_args){.logits = z, .expert = id, .weight = w, .given = many}), "given is i32");
    refused(dev_route_bwd(d, &(struct route_args){.logits = z, .expert = id}, w, w), "dlogits");
    refused(dev_balance_bwd(d, &(struct balance_args){.logits = z, .load = w, .dlogits = z, .loss = w}), "load");
    refused(dev_expert_sort(d, at, at, id, id), "token is i32 (5), expected i32 (6)");
    refused(dev_expert_sort(d, slots, slots, z, id), "row is f32");
    refused(dev_grouped_fwd(d, rows, rows, stack, at), "y is f32 (6, 4), expected f32 (6, 2)");
    refused(dev_grouped_fwd(d, dev_new(&r, shape_2d(DT_F32, 6, 2), false), rows, stack, at), "offset is i32 (5), expected i32 (4)");
    refused(dev_grouped_dx(d, rows, rows, stack, at), "weight is f32 (2, 4)");
    refused(dev_grouped_dw(d, rows, rows, rows, at, true), "dw is f32 (6, 4), expected f32 (4, 4, 4)");
    refused(dev_combine_fwd(d, &(struct combine_args){.out = z, .y = z, .row = id}), "y is f32 (3, 4), expected f32|bf16 (6, any)");
    refused(dev_combine_bwd(d, &(struct combine_args){.y = rows, .row = id}, z, rows, w), "weight");
    run_free_blocks(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_choices), cmocka_unit_test(test_given), cmocka_unit_test(test_clip),
        cmocka_unit_test(test_sort),    cmocka_unit_test(test_load),  cmocka_unit_test(test_refused),
    };
    backends_open(&two, 2);
    const int failed = cmocka_run_group_tests_name("ops: mixture of experts", tests, NULL, NULL);
    backends_close(&two);
    return failed;
}
