/* test_algo_user.c - a user's own estimator and loss as the trainer calls them: a built-in
 * formula written by a user gives the built-in's numbers, on whole batches and on
 * micro-batches of them, with masked tokens that hold NaN; what is refused leaves nothing. */
#include "algo/custom/user.h"
#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/rng.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { B = 5, N = 16 };
static const int64_t off[B + 1] = {0, 4, 5, 9, 9, 16}, uid[B] = {7, 7, 9, 9, 9};
static uint8_t mask[N];
static double old_lp[N], new_lp[N], adv[N], rewards[N], is_weights[N];
static const struct algo_ragged batch = {B, off, mask};
static char dir[64];

static const char C_FILE[] =
    "#include <verlc_algo.h>\n"
    "int gpg(const struct verlc_loss *a, double *loss, double *dlogp) {\n"
    "    const double scale = verlc_param(a->params, a->n_params, \"scale\", 1);\n"
    "    for (int64_t t = 0; t < a->off[a->n]; t++) {\n" /* masked tokens too: what it writes there is not read */
    "        loss[t] = -scale * a->logp[t] * a->advantages[t];\n"
    "        dlogp[t] = -scale * a->weight[t] * a->advantages[t];\n"
    "    }\n"
    "    return 0;\n"
    "}\n"
    "int mean_logp(const struct verlc_loss *a, double *loss, double *dlogp) {\n" /* the tokens of a sample are coupled */
    "    for (int64_t i = 0; i < a->n; i++) {\n"
    "        double s = 0, n = 0, w = 0;\n"
    "        for (int64_t t = a->off[i]; t < a->off[i + 1]; t++)\n"
    "            if (a->mask[t]) s += a->logp[t], w += a->weight[t] * a->advantages[t], n++;\n"
    "        for (int64_t t = a->off[i]; t < a->off[i + 1]; t++) {\n"
    "            loss[t] = -a->advantages[t] * s / n;\n"
    "            dlogp[t] = -w / n;\n"
    "        }\n"
    "    }\n"
    "    return 0;\n"
    "}\n"
    "VERLC_NEEDS(raw, VERLC_VALUES)\n"
    "int raw(const struct verlc_adv *a, double *advantages, double *returns) {\n"
    "    if (!a->values) return 1;\n"
    "    for (int64_t t = 0; t < a->off[a->n]; t++) returns[t] = advantages[t] = a->rewards[t] - a->values[t];\n"
    "    return 0;\n"
    "}\n";

static int setup(void **state) {
    (void)state;
    struct rng g = {.seed = 11, .stream = RNG_TEST};
    for (int t = 0; t < N; t++) {
        mask[t] = t % 5 != 3;
        old_lp[t] = mask[t] ? -2 * rng_unit(&g) : NAN;
        new_lp[t] = mask[t] ? -2 * rng_unit(&g) : NAN;
        adv[t] = mask[t] ? rng_unit(&g) - 0.5 : NAN;
        rewards[t] = rng_unit(&g);
        is_weights[t] = 0.5 + rng_unit(&g);
    }
    snprintf(dir, sizeof dir, "/tmp/verlc_user_XXXXXX");
    if (!mkdtemp(dir)) return -1;
    char *path = file_join(dir, "mine.c");
    const int rc = file_write_atomic(path, C_FILE, sizeof C_FILE - 1);
    free(path);
    return rc;
}

static int teardown(void **state) {
    (void)state;
    return file_remove_tree(dir);
}

static int open_mine(struct algo_user **u, const char *name, bool loss) {
    char *spec = xasprintf("%s/mine.c:%s", dir, name);
    const int rc = algo_user_open(u, &(struct algo_user_args){.key = "the key", .spec = spec, .loss = loss, .dir = dir});
    free(spec);
    return rc;
}

static struct algo_policy_args args(const char *mode) {
    return (struct algo_policy_args){.r = &batch,
                                     .old_logp = old_lp,
                                     .logp = new_lp,
                                     .advantages = adv,
                                     .is_weights = is_weights,
                                     .agg = {.mode = algo_agg_find(mode),
                                             .batch_num_tokens = algo_n_valid(&batch),
                                             .global_batch_size = B,
                                             .width = 7,
                                             .loss_scale_factor = 7},
                                     .cfg = algo_policy_defaults()};
}

static void close_to(double a, double b) {
    if (!(fabs(a - b) <= 1e-14 * fmax(1, fabs(b)))) fail_msg("%.17g, want %.17g", a, b);
}

static const char *const modes[] = {"token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm",
                                    "seq-mean-token-mean"};

static void a_loss_is_the_built_in_of_its_formula(void **state) {
    (void)state;
    struct algo_user *u = NULL;
    json_t *twice = json_pack("{s:i}", "scale", 2);
    assert_int_equal(open_mine(&u, "gpg", true), 0);
    assert_int_equal(algo_user_check(u), 0);
    for (size_t m = 0; m < sizeof modes / sizeof *modes; m++) {
        struct algo_policy_args a = args(modes[m]);
        double want, got, dwant[N] = {0}, dgot[N] = {0};
        assert_int_equal(algo_policy_loss(algo_policy_find("gpg"), &a, &want, dwant, NULL), 0);
        assert_int_equal(algo_policy_loss(algo_user_policy(u), &a, &got, dgot, NULL), 0);
        close_to(got, want);
        for (int t = 0; t < N; t++) close_to(dgot[t], dwant[t]);
        a.cfg.kwargs = twice;
        assert_int_equal(algo_policy_loss(algo_user_policy(u), &a, &got, dgot, NULL), 0);
        close_to(got, 2 * want);
    }
    json_decref(twice);
    algo_user_close(u);
}

static void inv03_micro_batches_sum_to_a_users_loss(void **state) {
    (void)state;
    static const char *const names[] = {"gpg", "mean_logp"};
    for (size_t k = 0; k < 2; k++) {
        struct algo_user *u = NULL;
        assert_int_equal(open_mine(&u, names[k], true), 0);
        assert_int_equal(algo_user_check(u), 0);
        for (size_t m = 0; m < sizeof modes / sizeof *modes; m++) {
            struct algo_policy_args a = args(modes[m]);
            double whole, dwhole[N] = {0}, sum = 0, dsum[N] = {0};
            assert_int_equal(algo_policy_loss(algo_user_policy(u), &a, &whole, dwhole, NULL), 0);
            for (int64_t i = 0; i < B; i += 2) {
                const struct algo_ragged part = {B - i < 2 ? 1 : 2, off + i, mask};
                double loss;
                a.r = &part;
                assert_int_equal(algo_policy_loss(algo_user_policy(u), &a, &loss, dsum, NULL), 0);
                sum += loss;
            }
            close_to(sum, whole);
            for (int t = 0; t < N; t++) close_to(dsum[t], dwhole[t]);
        }
        algo_user_close(u);
    }
}

static void an_estimator_says_what_it_needs(void **state) {
    (void)state;
    struct algo_user *u = NULL;
    double out[N], ret[N];
    assert_int_equal(open_mine(&u, "raw", false), 0);
    assert_int_equal(algo_user_check(u), 0);
    const struct algo_adv_entry *e = algo_user_adv(u);
    assert_int_equal(e->needs, ALGO_NEEDS_VALUES);
    struct algo_adv_args a = algo_adv_defaults();
    a.r = &batch;
    a.rewards = rewards;
    a.group = uid;
    assert_int_equal(algo_advantage(e, &a, out, ret), ERR_INVAL);
    assert_non_null(strstr(err_msg(), "values from a critic"));
    a.values = is_weights;
    assert_int_equal(algo_advantage(e, &a, out, ret), 0);
    for (int t = 0; t < N; t++) assert_true(out[t] == (mask[t] ? rewards[t] - is_weights[t] : 0));
    algo_user_close(u);
}

static void names(void **state) {
    (void)state;
    struct algo_user *u = NULL;
    assert_true(algo_user_named("./a.c:f") && algo_user_named("a.py:f") && algo_user_named("a.py"));
    assert_false(algo_user_named("grpo") || algo_user_named("a.cc:f") || algo_user_named("c:py"));
    assert_int_equal(open_mine(&u, "nothing", true), ERR_INPUT);
    assert_non_null(strstr(err_msg(), "has no function 'nothing'"));
    assert_int_equal(open_mine(&u, "raw", true), ERR_INPUT); /* an estimator is no loss */
    assert_non_null(strstr(err_msg(), "verlc_loss_fn"));
    assert_null(u);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_loss_is_the_built_in_of_its_formula),
        cmocka_unit_test(inv03_micro_batches_sum_to_a_users_loss),
        cmocka_unit_test(an_estimator_says_what_it_needs),
        cmocka_unit_test(names),
    };
    return cmocka_run_group_tests_name("a user's own algorithms", tests, setup, teardown);
}
