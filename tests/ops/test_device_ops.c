/* test_device_ops.c - every op of the table, or those named in the arguments, forward and backward, on every
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

/* One shape of an op in one dtype on all backends; ref's results are computed once. */
static void check_shape(const struct op_def *op, int64_t shape, enum dtype act, struct worst *worst, bool *lacks) {
    struct run want;
    run_init(&want, op, &op->shapes[shape], act, &backends.dev[0]);
    want.accumulate = shape % 2;
    if (run_exec(&want, op) < 0) fail_msg("ref %s: %s", op->name, err_msg());
    for (int b = 1; b < backends.n; b++) {
        struct run got;
        run_init(&got, op, &op->shapes[shape], act, &backends.dev[b]);
        got.accumulate = want.accumulate;
        const int rc = run_exec(&got, op);
        if (rc < 0 && rc != ERR_UNSUPPORTED) fail_msg("%s %s: %s", backends.name[b], op->name, err_msg());
        if (rc < 0 && !lacks[b]) report_skip(backends.name[b], op->name);
        lacks[b] = lacks[b] || rc < 0; /* a forward without its backward is compared all the same */
        for (int k = 0; k < got.n_out; k++) compare(backends.name[b], op, &got.out[k], &want.out[k], act, &worst[b]);
        for (int k = 0; k < got.n_gin; k++) compare(backends.name[b], op, &got.gin[k], &want.gin[k], act, &worst[b]);
        run_free(&got);
    }
    run_free(&want);
}

static void test_op(void **state) {
    static const enum dtype act[] = {DT_F32, DT_BF16};
    const struct op_def *op = *state;
    bool lacks[MAX_BACKENDS] = {0};
    for (int64_t k = 0; k < COUNT(act); k++) {
        struct worst worst[MAX_BACKENDS] = {0};
        for (int64_t i = 0; i < cases_of(op->n_shapes, 2); i++) check_shape(op, i, act[k], worst, lacks);
        for (int b = 1; b < backends.n; b++)
            if (worst[b].what)
                print_message("%-15s %-8s %-4s %2lld shapes, worst %s: NMSE %.2g of %.2g allowed\n", backends.name[b], op->name,
                              dtype_name(act[k]), (long long)op->n_shapes, worst[b].what, worst[b].nmse, worst[b].limit);
    }
}

static bool wanted(const char *name, int argc, char **argv) {
    for (int i = 1; i < argc; i++)
        if (strcmp(name, argv[i]) == 0) return true;
    return argc < 2;
}

int main(int argc, char **argv) {
    struct CMUnitTest tests[N_OPS];
    size_t n = 0;
    backends_open(&backends, 2);
    for (int64_t i = 0; i < N_OPS; i++)
        if (wanted(ops_table[i].name, argc, argv))
            tests[n++] = (struct CMUnitTest){ops_table[i].name, test_op, NULL, NULL, (void *)(uintptr_t)&ops_table[i]};
    const int failed = n ? _cmocka_run_group_tests("ops: backends against ref", tests, n, NULL, NULL) : 1; /* no such op */
    backends_close(&backends);
    return failed;
}
