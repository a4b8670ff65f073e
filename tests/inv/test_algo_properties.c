/* test_algo_properties.c - inv03 for every policy loss and every loss_agg_mode, and for the
 * value loss: loss and gradient do not depend on how a mini-batch is cut into micro-batches,
 * on the order of its rows, or on padding.  With importance weights, entropy and KL.
 *
 * The exceptions are verl's, and the test demands that they are exceptions still: clip_cov
 * and kl_cov rank the tokens of the call, bypass_mode can normalise its weights over it. */
#include "algo/policy_loss.h"
#include "algo/value_loss.h"
#include "worst.h"
#include "base/buf.h"
#include "base/err.h"
#include "base/rng.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

enum { ROWS = 9, PAD = 3, MAX_LEN = 12, WIDTH = MAX_LEN + PAD, MAX_TOKENS = ROWS * WIDTH };
static const int64_t LEN[ROWS] = {5, 1, 12, 4, 7, 1, 3, 9, 6};
enum { ALL_MASKED = 3 }; /* this row has no valid token */

/* fp64 sums of some ten terms in another order: a few times 2^-53 of the largest. */
#define TOLERANCE 1e-13

#define EACH(i, array) for (size_t i = 0; i < sizeof(array) / sizeof *(array); i++)
#define OK(call)                                   \
    do {                                           \
        if ((call) < 0) fail_msg("%s", err_msg()); \
    } while (0)

static const char *const LOSSES[] = {"vanilla",
                                     "gspo",
                                     "sapo",
                                     "gpg",
                                     "clip_cov",
                                     "kl_cov",
                                     "geo_mean",
                                     "cispo",
                                     "dppo_tv",
                                     "dppo_kl",
                                     "dro",
                                     "bypass_mode",
                                     "bypass_mode reinforce",
                                     "bypass_mode normalised"};
static const char *const MODES[] = {"token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm",
                                    "seq-mean-token-mean"};

enum { OLD, LOGP, ADV, WEIGHT, REF, ENTROPY, VALUES, RETURNS, N_INPUTS };
struct data { /* one layout of the same rows; inputs and gradients per token */
    int64_t off[ROWS + 1];
    uint8_t mask[MAX_TOKENS];
    double x[N_INPUTS][MAX_TOKENS];
    double dlogp[MAX_TOKENS], dentropy[MAX_TOKENS];
    double loss;
};

static void draw(struct data *d) {
    struct rng rng = {.seed = 3, .stream = RNG_TEST};
    d->off[0] = 0;
    for (int i = 0; i < ROWS; i++) {
        d->off[i + 1] = d->off[i] + LEN[i];
        for (int64_t t = d->off[i]; t < d->off[i + 1]; t++) {
            d->mask[t] = i != ALL_MASKED && rng_below(&rng, 6) != 0;
            d->x[OLD][t] = -0.1 - 2 * rng_unit(&rng);
            d->x[LOGP][t] = d->x[OLD][t] + 0.3 * (double)rng_normal(&rng);
            d->x[ADV][t] = (double)rng_normal(&rng);
            d->x[WEIGHT][t] = 0.5 + rng_unit(&rng);
            d->x[REF][t] = d->x[OLD][t] + 0.3 * (double)rng_normal(&rng);
            d->x[ENTROPY][t] = 2 * rng_unit(&rng);
            d->x[VALUES][t] = (double)rng_normal(&rng);
            d->x[RETURNS][t] = (double)rng_normal(&rng);
        }
    }
}

/* Row order[i] of `from` becomes row i of `to`, with `pad` masked tokens more, NaN in all their inputs. */
static void arrange(struct data *to, const struct data *from, const int *order, int64_t pad) {
    memset(to, 0, sizeof *to);
    for (int i = 0; i < ROWS; i++) {
        const int64_t n = LEN[order[i]], at = to->off[i], src = from->off[order[i]];
        to->off[i + 1] = at + n + pad;
        memcpy(to->mask + at, from->mask + src, (size_t)n);
        for (int k = 0; k < N_INPUTS; k++) {
            memcpy(to->x[k] + at, from->x[k] + src, (size_t)n * sizeof(double));
            for (int64_t t = at + n; t < to->off[i + 1]; t++) to->x[k][t] = NAN;
        }
    }
}

struct rig {
    const struct algo_policy_entry *loss; /* NULL: the value loss */
    struct algo_corr corr;
    struct algo_policy_cfg cfg;
    struct algo_agg agg;
};

static void rig_open(struct rig *r, const char *loss, const char *mode, const struct data *d) {
    char name[32] = "";
    if (loss) memcpy(name, loss, strcspn(loss, " "));
    r->loss = loss ? algo_policy_find(name) : NULL;
    r->cfg = algo_policy_defaults();
    r->cfg.clip_cov_ratio = 1; /* all candidates: the random choice among them depends on their order */
    r->cfg.clip_cov_lb = 0.1;
    r->cfg.kl_cov_ratio = 0.3;
    r->cfg.dro_beta = 0.5;
    const struct algo_corr_spec spec = {.rollout_is = "token",
                                        .rollout_rs = "token_k1,seq_mean_k3",
                                        .rollout_rs_threshold = "0.6_1.8,0.1",
                                        .loss_type = loss && strchr(loss, ' ') ? "reinforce" : "ppo_clip",
                                        .rollout_is_batch_normalize = loss && strstr(loss, "normalised")};
    OK(algo_corr_parse(&r->corr, &spec));
    r->cfg.corr = &r->corr;
    const struct algo_ragged all = {ROWS, d->off, d->mask};
    r->agg = (struct algo_agg){.mode = algo_agg_find(mode),
                               .batch_num_tokens = algo_n_valid(&all),
                               .global_batch_size = ROWS - 1,
                               .width = WIDTH,
                               .batch_rows = ROWS};
}

/* Loss and gradients, summed over micro-batches of at most `rows` rows. */
static void run(const struct rig *r, struct data *d, int rows) {
    struct algo_kl_type kl;
    OK(algo_kl_find(&kl, "low_var_kl"));
    d->loss = 0;
    for (int lo = 0; lo < ROWS; lo += rows) {
        const struct algo_ragged part = {ROWS - lo < rows ? ROWS - lo : rows, d->off + lo, d->mask};
        double loss;
        if (r->loss) {
            const struct algo_actor_args a = {.policy = {.r = &part,
                                                         .old_logp = d->x[OLD],
                                                         .logp = d->x[LOGP],
                                                         .advantages = d->x[ADV],
                                                         .is_weights = d->x[WEIGHT],
                                                         .agg = r->agg,
                                                         .cfg = r->cfg},
                                              .loss_mode = r->loss,
                                              .entropy = d->x[ENTROPY],
                                              .entropy_coeff = 0.02,
                                              .ref_logp = d->x[REF],
                                              .kl_loss_type = &kl,
                                              .kl_loss_coef = 0.1};
            OK(algo_actor_loss(&a, &loss, d->dlogp, d->dentropy, NULL));
        } else {
            const struct algo_value_args a = {.r = &part,
                                              .vpreds = d->x[LOGP],
                                              .values = d->x[VALUES],
                                              .returns = d->x[RETURNS],
                                              .cliprange_value = 0.5,
                                              .agg = r->agg};
            OK(algo_value_loss(&a, &loss, d->dlogp, NULL));
        }
        d->loss += loss;
    }
}

/* Largest difference of loss and gradients, relative to the largest gradient. Row i of b is row order[i] of a. */
static double difference(const struct data *a, const struct data *b, const int *order) {
    double size = 0, worst = 0;
    for (int64_t t = 0; t < a->off[ROWS]; t++) size = fmax(size, fabs(a->dlogp[t]));
    assert_true(size > 1e-6);
    for (int i = 0; i < ROWS; i++)
        for (int64_t t = 0; t < LEN[order[i]]; t++) {
            const int64_t ta = a->off[order[i]] + t, tb = b->off[i] + t;
            worst = worse_of(worst, fabs(a->dlogp[ta] - b->dlogp[tb]) / size);
            worst = worse_of(worst, fabs(a->dentropy[ta] - b->dentropy[tb]) / size);
        }
    for (int i = 0; i < ROWS; i++) /* padding gets no gradient */
        for (int64_t t = b->off[i] + LEN[order[i]]; t < b->off[i + 1]; t++) assert_true(b->dlogp[t] == 0 && b->dentropy[t] == 0);
    return fmax(worst, fabs(a->loss - b->loss) / fmax(size, fabs(a->loss)));
}

static const int AS_IT_IS[ROWS] = {0, 1, 2, 3, 4, 5, 6, 7, 8};
static const int ORDERS[][ROWS] = {{8, 7, 6, 5, 4, 3, 2, 1, 0}, {3, 6, 0, 8, 1, 4, 7, 2, 5}};

/* One loss under one mode: the worst of cuts, orders and paddings. */
static void properties(const struct rig *r, const struct data *base, double *cut, double *order, double *pad) {
    static struct data whole, other;
    *cut = *order = *pad = 0;
    whole = *base;
    run(r, &whole, ROWS);
    static const int rows[] = {1, 2, 4, ROWS - 1};
    EACH(k, rows) {
        other = *base;
        run(r, &other, rows[k]);
        *cut = worse_of(*cut, difference(&whole, &other, AS_IT_IS));
    }
    EACH(k, ORDERS) {
        arrange(&other, base, ORDERS[k], 0);
        run(r, &other, ROWS);
        *order = worse_of(*order, difference(&whole, &other, ORDERS[k]));
    }
    for (int64_t n = 1; n <= PAD; n++) {
        arrange(&other, base, AS_IT_IS, n);
        run(r, &other, ROWS);
        *pad = worse_of(*pad, difference(&whole, &other, AS_IT_IS));
    }
}

static void inv03_every_loss_and_mode(void **state) {
    (void)state;
    static struct data base;
    draw(&base);
    for (size_t k = 0; k <= sizeof LOSSES / sizeof *LOSSES; k++) {
        const char *loss = k < sizeof LOSSES / sizeof *LOSSES ? LOSSES[k] : NULL;
        const bool of_the_call = loss && (strstr(loss, "_cov") || strstr(loss, "normalised"));
        double worst = 0;
        EACH(m, MODES) {
            struct rig r;
            double cut, order, pad;
            rig_open(&r, loss, MODES[m], &base);
            properties(&r, &base, &cut, &order, &pad);
            const char *what = loss ? loss : "value loss";
            if (pad != 0) fail_msg("%s, %s: padding changes the result by %.1e", what, MODES[m], pad); /* it is skipped */
            if (order > TOLERANCE) fail_msg("%s, %s: the order of rows changes the result by %.1e", what, MODES[m], order);
            if (of_the_call ? cut < 1e-6 : cut > TOLERANCE)
                fail_msg("%s, %s: micro-batches change the result by %.1e", what, MODES[m], cut);
            worst = worse_of(worst, fmax(order, of_the_call ? 0 : cut));
        }
        print_message("%-24s %.1e%s\n", loss ? loss : "value loss", worst, of_the_call ? " (not over micro-batches)" : "");
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(inv03_every_loss_and_mode)};
    return cmocka_run_group_tests_name("properties of losses", tests, NULL, NULL);
}
