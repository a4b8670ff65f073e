/* test_device_ops.c - every op of the table, forward and backward, on every
 * backend this machine has, against ref: f32 and bf16, awkward shapes, results
 * of += starting from zero and, in every other shape, from random values. */
#include "ops/ops_table.h"

static struct backends backends;

/* Worst NMSE relative to its limit over one op, backend and dtype. */
struct worst {
    double nmse, limit, ratio;
    const char *what;
};

static void compare(const char *backend, const struct op_def *op, const struct slot *got, const struct slot *want, enum dtype act,
                    struct worst *w) {
    const double e = nmse(got->f, want->f, slot_count(want), want->floor);
    const double limit = tol_limit(want->tol, act, want->dt);
    if (!(e <= limit)) {
        const struct slot *s = want;
        fail_msg("%s %s %s: %s (%lld, %lld, ...) has NMSE %.3g, allowed %.3g", backend, op->name, dtype_name(act), s->name,
                 (long long)s->dim[0], (long long)s->dim[1], e, limit);
    }
    const double ratio = limit > 0 ? e / limit : 0;
    if (w->what == NULL || ratio > w->ratio) *w = (struct worst){e, limit, ratio, want->name};
}

/* One op on one backend in one dtype, all shapes. False: the backend lacks it. */
static bool check_op(const struct op_def *op, int backend, enum dtype act) {
    struct worst worst = {0};
    bool have = true;
    for (int64_t i = 0; i < cases_of(op->n_shapes, 2); i++) {
        struct run want, got;
        run_init(&want, op, &op->shapes[i], act, &backends.dev[0]);
        run_init(&got, op, &op->shapes[i], act, &backends.dev[backend]);
        want.accumulate = got.accumulate = i % 2;
        if (run_exec(&want, op) < 0) fail_msg("ref %s: %s", op->name, err_msg());
        const int rc = run_exec(&got, op);
        if (rc < 0 && rc != ERR_UNSUPPORTED) fail_msg("%s %s: %s", backends.name[backend], op->name, err_msg());
        have = have && rc == 0; /* a forward without its backward is compared all the same */
        for (int k = 0; k < got.n_out; k++) compare(backends.name[backend], op, &got.out[k], &want.out[k], act, &worst);
        for (int k = 0; k < got.n_gin; k++) compare(backends.name[backend], op, &got.gin[k], &want.gin[k], act, &worst);
        run_free(&want);
        run_free(&got);
    }
    if (worst.what)
        print_message("%-15s %-8s %-4s %2lld shapes, worst %s: NMSE %.2g of %.2g allowed\n", backends.name[backend], op->name,
                      dtype_name(act), (long long)op->n_shapes, worst.what, worst.nmse, worst.limit);
    return have;
}

static void test_op(void **state) {
    const struct op_def *op = *state;
    for (int b = 1; b < backends.n; b++)
        if (!check_op(op, b, DT_F32) || !check_op(op, b, DT_BF16)) report_skip(backends.name[b], op->name);
}

int main(void) {
    struct CMUnitTest tests[N_OPS];
    backends_open(&backends, 2);
    for (int64_t i = 0; i < N_OPS; i++)
        tests[i] = (struct CMUnitTest){ops_table[i].name, test_op, NULL, NULL, (void *)(uintptr_t)&ops_table[i]};
    const int failed = cmocka_run_group_tests_name("ops: backends against ref", tests, NULL, NULL);
    backends_close(&backends);
    return failed;
}
