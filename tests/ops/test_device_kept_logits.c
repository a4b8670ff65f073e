/* test_device_kept_logits.c - kept logits of the LM head change no bit: any number of rows kept, written by forwards of parts of
 * the rows, read by backwards of other parts.  And a backend that says that it keeps them reads them. */
#include "ops/ops_table.h"

static struct backends backends;

static const struct op_shape cpu_shapes[] = {{.rows = 300, .n = 9001, .k = 40, .flags = S_ENTROPY},
                                             {.rows = 129, .n = 520, .k = 24, .flags = S_SOFTCAP},
                                             {.rows = 1100, .n = 4200, .k = 8}},
                             ref_shapes[] = {{.rows = 150, .n = 4200, .k = 8, .flags = S_ENTROPY}},
                             threads_shapes[] = {{.rows = 300, .n = 1048, .k = 40, .flags = S_ENTROPY},
                                                 {.rows = 129, .n = 520, .k = 24}},
                             gpu_shapes[] = {{.rows = 9000, .n = 21000, .k = 128, .flags = S_ENTROPY},
                                             {.rows = 1000, .n = 39000, .k = 896},
                                             {.rows = 300, .n = 9000, .k = 64, .flags = S_SOFTCAP}};

struct results {
    float *v[5]; /* logp, lse, entropy; dx, dw */
    int64_t n[5];
};
static void results_free(struct results *x) {
    for (int i = 0; i < 5; i++) free(x->v[i]);
}

/* What is done: rows with a place, the first row of the second forward and of the second backward, whether what is kept is
 * overwritten by zeros between them. */
struct keep {
    int64_t kept, forward, backward;
    bool spoil;
};

static struct lmhead_args rows_of(const struct lmhead_args *a, int64_t lo, int64_t n) {
    struct lmhead_args r = *a;
    struct tensor *const all[] = {&r.x, &r.inv_temp, &r.target, &r.logp, &r.lse, &r.entropy};
    for (size_t i = 0; i < COUNT(all); i++)
        if (all[i]->data) *all[i] = tensor_rows(*all[i], lo, n);
    r.kept_at += lo;
    return r;
}

static void pass(struct run *r, const struct keep *k, struct results *out) {
    const int64_t rows = r->rows, n = r->s->n;
    const struct tensor row = shape_1d(DT_F32, rows);
    struct lmhead_args a = {.x = up(r, &r->in[0]),
                            .inv_temp = up(r, &r->in[2]),
                            .target = up(r, &r->in[3]),
                            .logp = dev_new(r, row, true),
                            .lse = dev_new(r, row, true),
                            .entropy = r->s->flags & S_ENTROPY ? dev_new(r, row, true) : TENSOR_NONE};
    assert_int_equal(up_weight(r, &r->in[1], &a.w), 0);
    if (r->s->flags & S_SOFTCAP) a.w.softcap = 1.5f;
    if (k->kept) a.kept = dev_new(r, shape_2d(DT_F32, k->kept, dev_kept_cols(n)), false);
    const struct lmhead_bwd_args g = {.dlogp = up(r, &r->gout[0]),
                                      .dentropy = a.entropy.data ? up(r, &r->gout[1]) : TENSOR_NONE,
                                      .dx = dev_new(r, slot_shape(&r->in[0]), true),
                                      .dw = dev_new(r, shape_2d(DT_F32, n, r->s->k), false)};
    for (int i = 0; i < 2; i++) {
        const int64_t lo = i ? k->forward : 0, hi = i ? rows : k->forward;
        const struct lmhead_args part = rows_of(&a, lo, hi - lo);
        if (hi > lo && dev_lmhead_fwd(r->d, &part) < 0) fail_msg("%s", err_msg());
    }
    if (k->spoil) assert_int_equal(dev_zero(r->d, a.kept.data, (size_t)tensor_count(a.kept) * sizeof(float)), 0);
    for (int i = 0; i < 2; i++) {
        const int64_t lo = i ? k->backward : 0, hi = i ? rows : k->backward;
        const struct lmhead_args part = rows_of(&a, lo, hi - lo);
        struct lmhead_bwd_args d = g;
        d.dlogp = tensor_rows(g.dlogp, lo, hi - lo);
        if (g.dentropy.data) d.dentropy = tensor_rows(g.dentropy, lo, hi - lo);
        d.dx = tensor_rows(g.dx, lo, hi - lo);
        d.add = i == 1;
        if (dev_lmhead_bwd(r->d, &part, &d) < 0) fail_msg("%s", err_msg());
    }
    const struct tensor all[] = {a.logp, a.lse, a.entropy, g.dx, g.dw};
    *out = (struct results){0};
    for (int i = 0; i < 5; i++) {
        if (!all[i].data) continue;
        out->n[i] = tensor_count(all[i]);
        out->v[i] = down_values(r, all[i]);
    }
    run_free_blocks(r);
}

static void check(const char *backend, struct dev *d, const struct op_shape *s, enum dtype act) {
    static const struct op_def op = {"lmhead", lmhead_setup, NULL, NULL, NULL, 0, true};
    const int64_t whole = (s->rows + DEV_KEPT_ROWS - 1) / DEV_KEPT_ROWS * DEV_KEPT_ROWS, last = whole - DEV_KEPT_ROWS;
    const struct keep cases[] = {{whole, s->rows, s->rows, false}, {DEV_KEPT_ROWS, s->rows, s->rows, false},
                                 {last, last, 0, false},           {whole, DEV_KEPT_ROWS, 37, false},
                                 {whole, s->rows, s->rows, true},  {whole + DEV_KEPT_ROWS, s->rows, s->rows - 1, false}};
    struct run r;
    run_init(&r, &op, s, act, d);
    for (int64_t i = 0; i < s->rows; i += 7) { /* rows without a gradient */
        r.gout[0].f[i] = 0;
        if (r.n_gout > 1) r.gout[1].f[i] = 0;
    }
    const struct weight head = {.dt = act, .n = s->n, .k = s->k, .softcap = s->flags & S_SOFTCAP ? 1.5f : 0};
    for (size_t c = 0; c < COUNT(cases); c++) {
        const struct keep none = {0, cases[c].forward, cases[c].backward, false};
        struct results want, got;
        if ((cases[c].spoil && !dev_keeps_logits(d, head)) || (SANITIZED && c != 3)) continue;
        pass(&r, &none, &want);
        pass(&r, &cases[c], &got);
        for (int i = 0; i < 5; i++) {
            const int64_t at = got.n[i] ? first_diff(got.v[i], want.v[i], got.n[i]) : -1;
            if (at >= 0 && !(cases[c].spoil && i >= 3))
                fail_msg("%s %s, %lld x %lld, case %zu: element %lld of result %d is %.9g, without kept logits %.9g", backend,
                         dtype_name(act), (long long)s->rows, (long long)s->n, c, (long long)at, i, (double)got.v[i][at],
                         (double)want.v[i][at]);
            if (at < 0 && cases[c].spoil && i >= 3)
                fail_msg("%s %s, %lld x %lld: kept logits are not read", backend, dtype_name(act), (long long)s->rows,
                         (long long)s->n);
        }
        results_free(&want);
        results_free(&got);
    }
    run_free(&r);
}

static void test_bits(void **state) {
    (void)state;
    for (int b = 0; b < backends.n; b++) {
        struct dev *const d = &backends.dev[b];
        const bool cuda = strcmp(backends.name[b], "cuda") == 0, threads = strcmp(d->isa, "cuda-threads") == 0;
        const struct op_shape *const s = b == 0 ? ref_shapes : threads ? threads_shapes : cuda ? gpu_shapes : cpu_shapes;
        const int64_t n = b == 0 ? COUNT(ref_shapes) : threads ? COUNT(threads_shapes) : COUNT(cpu_shapes);
        for (int64_t i = 0; i < cases_of(n, 2); i++) {
            if (!threads) check(backends.name[b], d, &s[i], DT_F32);
            check(backends.name[b], d, &s[i], DT_BF16);
        }
    }
}

static void test_refused(void **state) {
    struct dev *const d = &backends.dev[0];
    float x[DEV_KEPT_ROWS * DEV_KEPT_COLS] = {0};
    int32_t id[2] = {0};
    (void)state;
    const struct tensor row = tensor_1d(x, DT_F32, 2), ids = tensor_1d(id, DT_I32, 2);
    const struct lmhead_args good = {.x = tensor_2d(x, DT_F32, 2, 3),
                                     .w = {.data = x, .dt = DT_F32, .n = 5, .k = 3},
                                     .inv_temp = row,
                                     .target = ids,
                                     .logp = row,
                                     .kept = tensor_2d(x, DT_F32, DEV_KEPT_ROWS, DEV_KEPT_COLS)};
    struct lmhead_args bad = good;
    bad.kept_at = 1; /* of a forward */
    assert_int_equal(dev_lmhead_fwd(d, &bad), ERR_INVAL);
    bad = good, bad.kept.dim[0]--;
    assert_int_equal(dev_lmhead_fwd(d, &bad), ERR_INVAL);
    bad = good, bad.kept.dim[1]--;
    assert_int_equal(dev_lmhead_fwd(d, &bad), ERR_INVAL);
    bad = good, bad.list_id = tensor_2d(id, DT_I32, 2, 1), bad.list_logp = tensor_2d(x, DT_F32, 2, 1);
    assert_int_equal(dev_lmhead_fwd(d, &bad), ERR_INVAL);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_bits), cmocka_unit_test(test_refused)};
    backends_open(&backends, 2);
    const int failed = cmocka_run_group_tests_name("ops: kept logits", tests, NULL, NULL);
    backends_close(&backends);
    return failed;
}
