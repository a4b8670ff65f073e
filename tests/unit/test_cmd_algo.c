/* test_cmd_algo.c - algo from first principles: the vectors of the verl inventory
 * (computed without verl), garbage outside the mask, empty masks, gradients by finite differences, bad input. */
#include "cmd/algo_json.h"
#include "algo/kl_controller.h"
#include "algo/value_loss.h"
#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "base/rng.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { B = 4, T = 4, N = B * T };
static const int64_t off[B + 1] = {0, 4, 8, 12, 16};
static const uint8_t mask[N] = {1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 0, 1, 0, 1, 1};
static const struct algo_ragged batch = {B, off, mask};
static const double rewards[N] = {0, 0, 1, 0, 0, 0, 0, .25, 0, .5, 0, 0, 0, 0, 0, 1};
static const int64_t uid[B] = {0, 0, 1, 1};
static const double values[N] = {.1, .2, .3, 9, 0, -.1, .4, .2, .5, .1, 7, 7, .2, 5, .3, .6};
static const double old_lp[N] = {-1, -.5, -2, 0, -.7, -1.2, -.3, -2.5, -.1, -3, 0, 0, -1.5, -.9, -.4, -.8};
static const double new_lp[N] = {-.6, -.9, -1.7, 0, -.75, -.05, -.35, -2.4, -.3, -2.2, 0, 0, -1.4, -.9, -1.3, -.7};
static const double ref_lp[N] = {-.9, -.7, -1.8, 0, -.8, -1, -.2, -2, -.1, -2.9, 0, 0, -1.6, -1, -.5, -1.1};
static const double vpreds[N] = {.9, .2, .95, 0, .3, -.9, .5, .1, .4, .3, 0, 0, .1, 0, 1.2, .2};

/* The vectors are printed with 9 digits: half a unit of the last one. */
#define NEAR(x, y) assert_float_equal_msg((x), (y), #x)
static void assert_float_equal_msg(double x, double y, const char *what) {
    if (!(fabs(x - y) <= 5e-9 * fmax(1, fabs(y)))) fail_msg("%s is %.12g, want %.12g", what, x, y);
}

static struct algo_adv_args adv_args(void) {
    struct algo_adv_args a = algo_adv_defaults();
    static const double baselines[B] = {.2, .2, .6, .6};
    a.r = &batch;
    a.rewards = rewards;
    a.group = uid;
    a.values = values;
    a.reward_baselines = baselines;
    return a;
}

static void advantages(const char *name, const struct algo_adv_args *a, double *adv, double *ret) {
    const struct algo_adv_entry *e = algo_adv_find(name);
    assert_non_null(e);
    assert_int_equal(algo_advantage(e, a, adv, ret), 0);
}

static void outcome(const char *name, bool by_std, const double want[B]) {
    struct algo_adv_args a = adv_args();
    double adv[N], ret[N];
    a.norm_by_std = by_std;
    advantages(name, &a, adv, ret);
    for (int t = 0; t < N; t++) NEAR(adv[t], mask[t] ? want[t / T] : 0);
}

static void appendix_outcome_estimators(void **state) {
    (void)state;
    outcome("grpo", true, (double[]){.707105448, -.707105448, -.707104781, .707104781});
    outcome("grpo", false, (double[]){.375, -.375, -.25, .25});
    outcome("grpo_passk", true, (double[]){1.4142109, 0, 0, 1.41420956});
    outcome("rloo", true, (double[]){.75, -.75, -.5, .5});
    outcome("opo", true, (double[]){.428571428571, -.321428571429, -.3, .2});
    outcome("gpg", true, (double[]){.375, -.375, -.25, .25});
}

static void appendix_token_estimators(void **state) {
    (void)state;
    struct algo_adv_args a = adv_args();
    double adv[N], ret[N];
    a.gamma = .9;
    a.lam = .8;
    advantages("gae", &a, adv, ret);
    const double gae_ret[N] = {.59328, .774, 1, 9, .1458144, .22752, .216, .25, .378, .5, 7, 7, .65016, 5.528, .828, 1};
    const double gae_adv[N] = {.641198929,  .929196276, 1.37874615,  -1.11875314, -.59850834, .0497910981, -1.77523867, -.940360333,
                               -1.55403159, .30838931,  -1.11875314, -1.11875314, .487352973, .765074894,  .765074894,  .30838931};
    for (int t = 0; t < N; t++) {
        NEAR(ret[t], gae_ret[t]);
        assert_true(fabs(adv[t] - gae_adv[t]) < 1e-8); /* printed with 9 digits, up to 1.8 */
    }
    advantages("remax", &a, adv, ret);
    const double remax[N] = {.8, .8, .8, 0, .05, .05, .05, .05, -.1, -.1, 0, 0, .4, 1, .4, .4};
    for (int t = 0; t < N; t++) NEAR(adv[t], remax[t]);
}

static struct algo_policy_args policy_args(double adv[N]) {
    struct algo_adv_args a = adv_args();
    double ret[N];
    advantages("grpo", &a, adv, ret);
    struct algo_policy_args p = {.r = &batch, .old_logp = old_lp, .logp = new_lp, .advantages = adv, .cfg = algo_policy_defaults()};
    p.cfg.clip_ratio_high = .28;
    p.agg.mode = algo_agg_find("token-mean");
    return p;
}

static double policy(const char *name, const struct algo_policy_args *p, double *dlogp, struct algo_metrics *m) {
    double loss = NAN;
    const struct algo_policy_entry *e = algo_policy_find(name);
    assert_non_null(e);
    assert_int_equal(algo_policy_loss(e, p, &loss, dlogp, m), 0);
    return loss;
}

static double metric(const struct algo_metrics *m, const char *name) {
    double v = NAN;
    assert_true(algo_metrics_get(m, name, &v));
    return v;
}

static void appendix_policy_losses(void **state) {
    (void)state;
    double adv[N], d[N];
    struct algo_policy_args p = policy_args(adv);
    struct algo_metrics m = {0};
    NEAR(policy("vanilla", &p, d, &m), .188836605);
    const double want[N] = {0,           -.039498913, 0, 0, .0560516257,  0, .0560516257,  .0651226981,
                            .0482440358, .131140886,  0, 0, -.0651226367, 0, -.0239572792, -.0651226367};
    for (int t = 0; t < N; t++) NEAR(d[t], want[t]);
    NEAR(metric(&m, "actor/pg_clipfrac"), .166666667);
    NEAR(metric(&m, "actor/pg_clipfrac_lower"), .0833333333);
    NEAR(metric(&m, "actor/ppo_kl"), -.1125);
    p.agg.mode = algo_agg_find("seq-mean-token-sum");
    NEAR(policy("vanilla", &p, d, NULL), .566509816);
    p.agg.mode = algo_agg_find("seq-mean-token-mean");
    NEAR(policy("vanilla", &p, d, NULL), .190028488);
    NEAR(policy("gspo", &p, d, NULL), .13892649);
    NEAR(policy("sapo", &p, d, NULL), .106569882);
    p.agg.mode = algo_agg_find("seq-mean-token-sum-norm"); /* 0.9.1 divides by the rows too */
    NEAR(policy("vanilla", &p, d, NULL), .566509816 / 4);
    p.agg.mode = algo_agg_find("token-mean");
    NEAR(policy("gpg", &p, d, NULL), .0324089497);
    NEAR(policy("cispo", &p, d, NULL), .0118131894);
    NEAR(policy("geo_mean", &p, d, NULL), .147834204);
    NEAR(policy("kl_cov", &p, d, &m), .182393199);
    NEAR(metric(&m, "actor/ppo_kl"), .379166666);
    algo_metrics_free(&m);
}

static void appendix_kl_value_controller(void **state) {
    (void)state;
    const struct {
        const char *name;
        double want;
    } kls[] = {{"k1", .0791666666}, {"abs", .370833333}, {"k2", .108229167}, {"k3", .103438964}};
    for (int k = 0; k < 4; k++) {
        struct algo_kl_type type;
        assert_int_equal(algo_kl_find(&type, kls[k].name), 0);
        double mat[N], d;
        for (int t = 0; t < N; t++) mat[t] = algo_kl(&type, new_lp[t], ref_lp[t], &d);
        NEAR(algo_masked_mean(&batch, mat), kls[k].want);
    }
    double adv[N], ret[N], d[N], loss;
    struct algo_adv_args a = adv_args();
    a.gamma = .9;
    a.lam = .8;
    advantages("gae", &a, adv, ret);
    struct algo_metrics m = {0};
    const struct algo_value_args v = {.r = &batch,
                                      .vpreds = vpreds,
                                      .values = values,
                                      .returns = ret,
                                      .cliprange_value = .5,
                                      .agg.mode = algo_agg_find("token-mean")};
    assert_int_equal(algo_value_loss(&v, &loss, d, &m), 0);
    NEAR(loss, .124305322);
    NEAR(metric(&m, "critic/vf_clipfrac"), .0833333333);
    struct algo_kl_ctrl c;
    assert_int_equal(algo_kl_ctrl_init(&c, "adaptive", .1, .1, 100), 0);
    struct algo_kl_type k1;
    assert_int_equal(algo_kl_find(&k1, "k1"), 0);
    double r[N];
    algo_kl_in_reward(&c, &(struct algo_kl_reward_args){&batch, rewards, old_lp, ref_lp, &k1}, r, &m);
    NEAR(metric(&m, "actor/reward_kl_penalty"), -.0229166666);
    NEAR(metric(&m, "actor/reward_kl_penalty_coeff"), .1);
    NEAR(c.value, .0992);
    NEAR(r[2], 1 - .1 * (-2 + 1.8));
    NEAR(r[3], 0);
    algo_metrics_free(&m);
}

static void appendix_rollout_correction(void **state) {
    (void)state;
    struct algo_corr c;
    struct algo_metrics m = {0};
    double w[N];
    uint8_t kept[N];
    assert_int_equal(algo_corr_parse(&c, &(struct algo_corr_spec){.rollout_is = "token", .rollout_is_threshold = "1.1"}), 0);
    const struct algo_corr_args a = {&batch, &c, old_lp, ref_lp};
    assert_int_equal(algo_corr_run(&a, w, kept, &m), 0);
    const double tis[N] = {.904837418, 1.1,        .818730753, 0, 1.1, .818730753, .904837418, .60653066,
                           1,          .904837418, 0,          0, 1.1, 0,          1.1,        1.1};
    for (int t = 0; t < N; t++) NEAR(w[t], tis[t]);
    assert_int_equal(algo_corr_parse(&c, &(struct algo_corr_spec){.rollout_is = "sequence",
                                                                  .rollout_is_threshold = "1.1",
                                                                  .rollout_rs = "seq_mean_k1",
                                                                  .rollout_rs_threshold = "0.95_1.06"}),
                     0);
    assert_int_equal(algo_corr_run(&a, w, kept, &m), 0);
    const double seq[B] = {.904837418, .496585304, .904837418, 1.1};
    const uint8_t keep[B] = {1, 0, 1, 0};
    for (int t = 0; t < N; t++) {
        NEAR(w[t], mask[t] ? seq[t / T] : 0);
        assert_int_equal(kept[t], mask[t] && keep[t / T]);
    }
    algo_metrics_free(&m);
}

/* ---- properties ---- */

static const char *const modes[] = {"token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm",
                                    "seq-mean-token-mean"};
static void garbage_outside_the_mask_does_not_leak(void **state) {
    (void)state;
    double adv[N], d[N], d2[N], old2[N], new2[N], adv2[N], w[N];
    struct algo_policy_args p = policy_args(adv);
    p.cfg.dro_beta = .3;
    p.cfg.clip_cov_lb = -10;
    for (int t = 0; t < N; t++) {
        old2[t] = mask[t] ? old_lp[t] : NAN;
        new2[t] = mask[t] ? new_lp[t] : INFINITY;
        adv2[t] = mask[t] ? adv[t] : NAN;
        w[t] = mask[t] ? 1 : NAN;
    }
    const char *const all[] = {"vanilla", "gspo", "sapo",     "gpg",      "cispo", "dppo_tv",
                               "dppo_kl", "dro",  "geo_mean", "clip_cov", "kl_cov"};
    for (size_t l = 0; l < sizeof all / sizeof *all; l++)
        for (size_t k = 0; k < sizeof modes / sizeof *modes; k++) {
            struct algo_policy_args q = p;
            p.agg.mode = q.agg.mode = algo_agg_find(modes[k]);
            q.old_logp = old2;
            q.logp = new2;
            q.advantages = adv2;
            q.is_weights = w;
            const double clean = policy(all[l], &p, d, NULL), dirty = policy(all[l], &q, d2, NULL);
            assert_true(fabs(clean - dirty) < 1e-9); /* geo_mean takes log(1 + 1e-10) of the weights */
            for (int t = 0; t < N; t++) assert_true(fabs(d[t] - d2[t]) < 1e-9 && (mask[t] || d2[t] == 0));
        }
}

static void no_valid_token_is_loss_zero(void **state) {
    (void)state;
    const uint8_t none[N] = {0};
    const struct algo_ragged empty = {B, off, none};
    double adv[N], d[N];
    struct algo_policy_args p = policy_args(adv);
    struct algo_corr corr;
    assert_int_equal(algo_corr_parse(&corr, &(struct algo_corr_spec){.rollout_is = "token"}), 0);
    p.cfg.corr = &corr;
    p.cfg.dro_beta = 1;
    p.r = &empty;
    const char *const all[] = {"vanilla", "gspo", "sapo",     "gpg",      "cispo",  "dppo_tv",
                               "dppo_kl", "dro",  "geo_mean", "clip_cov", "kl_cov", "bypass_mode"};
    for (size_t l = 0; l < sizeof all / sizeof *all; l++)
        for (size_t k = 0; k < sizeof modes / sizeof *modes; k++) {
            struct algo_metrics m = {0};
            p.agg.mode = algo_agg_find(modes[k]);
            assert_true(policy(all[l], &p, d, &m) == 0);
            assert_true(metric(&m, "actor/no_valid_tokens") == 1);
            for (int t = 0; t < N; t++) assert_true(d[t] == 0);
            algo_metrics_free(&m);
        }
    double loss = NAN;
    struct algo_metrics m = {0};
    const struct algo_value_args v = {
        .r = &empty, .vpreds = vpreds, .values = values, .returns = rewards, .agg.mode = algo_agg_find("token-mean")};
    assert_int_equal(algo_value_loss(&v, &loss, d, &m), 0);
    assert_true(loss == 0 && metric(&m, "critic/no_valid_tokens") == 1);
    algo_metrics_free(&m);
    struct algo_adv_args a = adv_args();
    a.r = &empty;
    assert_int_equal(algo_advantage(algo_adv_find("gae"), &a, adv, d), ERR_INPUT);
    assert_int_equal(algo_advantage(algo_adv_find("grpo"), &a, adv, d), 0);
}

/* Where a loss is smooth, its derivative is the slope of its value. Losses with a
 * constant weight on logp (cispo, dppo) and gspo's detached ratio are not slopes
 * of their values by design; verl's autograd covers them in the golden test. */
static void derivatives_are_slopes(void **state) {
    (void)state;
    const char *const smooth[] = {"vanilla", "sapo", "gpg", "dro", "geo_mean", "kl_cov"};
    double adv[N], d[N], scratch[N], lp[N];
    struct algo_policy_args p = policy_args(adv);
    p.cfg.dro_beta = .3;
    p.cfg.clip_ratio_low = .25; /* no log-ratio of the batch on a bound */
    memcpy(lp, new_lp, sizeof lp);
    p.logp = lp;
    for (size_t l = 0; l < sizeof smooth / sizeof *smooth; l++) {
        policy(smooth[l], &p, d, NULL);
        for (int t = 0; t < N; t++) {
            const double h = 1e-6;
            lp[t] = new_lp[t] + h;
            const double up = policy(smooth[l], &p, scratch, NULL);
            lp[t] = new_lp[t] - h;
            const double down = policy(smooth[l], &p, scratch, NULL);
            lp[t] = new_lp[t];
            assert_true(fabs((up - down) / (2 * h) - d[t]) < 1e-8); /* h^2 and rounding / h */
        }
    }
}

/* Multi-turn GAE must not depend on values at masked tokens (verl test_core_algos). */
static void gae_skips_masked_values(void **state) {
    (void)state;
    enum { L = 11 };
    const int64_t one[2] = {0, L};
    const uint8_t m[L] = {0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0};
    const double r[L] = {0, 0, .1, .1, .1, 0, 0, .1, 1, 0, 0};
    double v1[L], v2[L], a1[L], a2[L], ret1[L], ret2[L];
    struct rng rng = {7, RNG_TEST, 0};
    for (int t = 0; t < L; t++) {
        v1[t] = v2[t] = t;
        if (!m[t]) {
            v1[t] = rng_unit(&rng) * 100;
            v2[t] = NAN;
        }
    }
    const struct algo_ragged row = {1, one, m};
    struct algo_adv_args a = algo_adv_defaults();
    a.r = &row;
    a.rewards = r;
    a.gamma = .97;
    a.lam = .61;
    a.values = v1;
    advantages("gae", &a, a1, ret1);
    a.values = v2;
    advantages("gae", &a, a2, ret2);
    for (int t = 0; t < L; t++) {
        assert_true(a1[t] == a2[t]);
        if (m[t]) assert_true(ret1[t] == ret2[t]);
    }
}

static void clip_cov_drops_what_it_says(void **state) {
    (void)state;
    double adv[N], d[N], d2[N], plain[N];
    struct algo_policy_args p = policy_args(adv);
    p.cfg.clip_cov_ratio = .26; /* int(.26 * 12) = 3 tokens */
    p.cfg.clip_cov_lb = -10;
    p.cfg.clip_cov_ub = 10;
    struct algo_metrics m = {0};
    policy("clip_cov", &p, d, &m);
    NEAR(metric(&m, "actor/pg_clipfrac"), 3. / 12);
    p.cfg.clip_cov_lb = 9;
    policy("clip_cov", &p, plain, NULL);
    p.cfg.clip_cov_lb = -10;
    int dropped = 0;
    for (int t = 0; t < N; t++) {
        dropped += plain[t] != 0 && d[t] == 0;
        assert_true(d[t] == 0 || d[t] == plain[t]);
    }
    assert_int_equal(dropped, 3);
    policy("clip_cov", &p, d2, NULL);
    assert_memory_equal(d, d2, sizeof d); /* the same seed and step draw the same tokens */
    int differ = 0;
    for (uint64_t step = 1; step < 8; step++) {
        p.cfg.step = step;
        policy("clip_cov", &p, d2, NULL);
        differ += memcmp(d, d2, sizeof d) != 0;
    }
    assert_true(differ > 0);
    algo_metrics_free(&m);
}

/* Equal advantages: every covariance is 0, and the first int(.26 * 12) = 3 valid tokens pay the KL. */
static void kl_cov_takes_the_first_of_equals(void **state) {
    (void)state;
    double adv[N], d[N], plain[N];
    struct algo_policy_args p = policy_args(adv);
    for (int t = 0; t < N; t++) adv[t] = 0.5;
    p.cfg.kl_cov_ratio = .26;
    p.cfg.ppo_kl_coef = 1;
    policy("kl_cov", &p, d, NULL);
    p.cfg.ppo_kl_coef = 0;
    policy("kl_cov", &p, plain, NULL);
    for (int t = 0, k = 0; t < N; t++) {
        if (!mask[t]) continue;
        assert_true((d[t] != plain[t]) == (k++ < 3));
    }
}

/* ---- bad input ---- */

static void refuses(const char *request, const char *says) {
    json_t *q, *answer = NULL;
    assert_int_equal(json_parse(&q, request, strlen(request), "stdin:1"), 0);
    const int rc = algo_json(q, "stdin:1", NULL, &answer);
    if (rc >= 0) fail_msg("accepted: %s", request);
    if (!strstr(err_msg(), says)) fail_msg("'%s' does not say '%s'", err_msg(), says);
    json_decref(q);
}

static void bad_requests_are_refused(void **state) {
    (void)state;
    refuses("{\"op\":\"nope\"}", "unknown");
    refuses("{\"o\":1}", "\"op\"");
    refuses("[]", "\"op\"");
    refuses("{\"op\":\"advantage\",\"estimator\":\"grp\",\"response_mask\":[[1]],\"token_level_rewards\":[[1]]}",
            "did you mean grpo? There are gae, grpo");
    refuses("{\"op\":\"advantage\",\"estimator\":\"grpo\",\"response_mask\":[[1]],\"token_level_rewards\":[[1]]}", "uid");
    refuses("{\"op\":\"advantage\",\"estimator\":\"gae\",\"response_mask\":[[1]],\"token_level_rewards\":[[1]]}", "values");
    refuses("{\"op\":\"advantage\",\"estimator\":\"gae\",\"response_mask\":[[1]],\"token_level_rewards\":[[1]],\"values\":[[1]]}",
            "at least 2");
    refuses("{\"op\":\"advantage\",\"estimator\":\"grpo\",\"response_mask\":[[1,1]],\"token_level_rewards\":[[1]],\"uid\":[0]}",
            "row 0");
    refuses("{\"op\":\"advantage\",\"estimator\":\"grpo\",\"response_mask\":[[2]],\"token_level_rewards\":[[1]],\"uid\":[0]}",
            "not 0 or 1");
    refuses("{\"op\":\"advantage\",\"estimator\":\"grpo\",\"response_mask\":[[1]],\"token_level_rewards\":[[\"x\"]],\"uid\":[0]}",
            "not a number");
    refuses("{\"op\":\"advantage\",\"estimator\":\"grpo_passk\",\"response_mask\":[[1]],\"token_level_rewards\":[[1]],\"uid\":[0]}",
            "at least 2 samples");
    refuses("{\"op\":\"kl\",\"type\":\"full\",\"logp\":[[1]],\"ref_logp\":[[1]]}", "unsupported");
    refuses("{\"op\":\"kl\",\"type\":\"k4\",\"logp\":[[1]],\"ref_logp\":[[1]]}", "unknown");
    refuses("{\"op\":\"agg_loss\",\"loss_mat\":[[1]],\"loss_mask\":[[1]],\"loss_agg_mode\":\"mean\"}", "token-mean");
    refuses("{\"op\":\"agg_loss\",\"loss_mat\":[[1]],\"loss_mask\":[[1]],\"dp_size\":2}", "batch_num_tokens");
    refuses("{\"op\":\"agg_loss\",\"loss_mat\":[[null]],\"loss_mask\":[[1]]}", "not finite");
    refuses("{\"op\":\"policy_loss\",\"response_mask\":[[1]],\"old_log_prob\":[[0]],\"log_prob\":[[0]],\"advantages\":[[0]],"
            "\"config\":{\"clip_ratio_c\":1.0}}",
            "clip_ratio_c");
    refuses("{\"op\":\"policy_loss\",\"loss_mode\":\"dro\","
            "\"response_mask\":[[1]],\"old_log_prob\":[[0]],\"log_prob\":[[0]],\"advantages\":[[0]]}",
            "dro_beta");
    refuses("{\"op\":\"policy_loss\",\"loss_mode\":\"bypass_mode\","
            "\"response_mask\":[[1]],\"old_log_prob\":[[0]],\"log_prob\":[[0]],\"advantages\":[[0]]}",
            "rollout_correction");
    refuses("{\"op\":\"kl_controller\",\"type\":\"adaptive\",\"horizon\":0}", "horizon");
    refuses("{\"op\":\"kl_controller\",\"type\":\"pid\"}", "fixed or adaptive");
}

static void bad_corrections_are_refused(void **state) {
    (void)state;
    const struct algo_corr_spec bad[] = {
        {.rollout_is = "turn"},
        {.rollout_is = "token", .rollout_is_threshold = "x"},
        {.rollout_is = "token", .rollout_is_threshold = "-1"},
        {.rollout_is = "token", .rollout_is_threshold = "2_1"},
        {.rollout_rs = "token_k1"},
        {.rollout_rs = "token_k4", .rollout_rs_threshold = "2"},
        {.rollout_rs = "token_k2", .rollout_rs_threshold = "1_2"},
        {.rollout_rs = "token_k1,token_k2,token_k3", .rollout_rs_threshold = "2,3"},
        {.rollout_rs = ",", .rollout_rs_threshold = "2"},
        {.loss_type = "ppo"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct algo_corr c;
        assert_int_equal(algo_corr_parse(&c, &bad[i]), ERR_INVAL);
    }
}

/* A number counts whole, however many digits it has. */
static void long_thresholds_are_whole(void **state) {
    (void)state;
    char digits[200] = "1.";
    memset(digits + 2, '0', 150);
    strcpy(digits + 152, "e1,3");
    struct algo_corr c;
    assert_int_equal(
        algo_corr_parse(&c, &(struct algo_corr_spec){.rollout_rs = "token_k2,seq_mean_k3", .rollout_rs_threshold = digits}), 0);
    assert_true(c.n_rs == 2 && c.rs[0].upper == 10 && c.rs[1].upper == 3);
    *strchr(digits, ',') = '\0';
    assert_int_equal(algo_corr_parse(&c, &(struct algo_corr_spec){.rollout_is = "token", .rollout_is_threshold = digits}), 0);
    assert_true(c.is_upper == 10);
}

static void empty_batches_do_not_crash(void **state) {
    (void)state;
    const char *const fine[] = {
        "{\"op\":\"advantage\",\"estimator\":\"grpo\",\"response_mask\":[],\"token_level_rewards\":[],\"uid\":[]}",
        "{\"op\":\"advantage\",\"estimator\":\"tir_optimal_token_baseline\",\"response_mask\":[[],[]],"
        "\"token_level_rewards\":[[],[]],\"uid\":[1,1],\"old_log_probs\":[[],[]],\"sum_pi_squared\":[[],[]]}",
        "{\"op\":\"policy_loss\",\"response_mask\":[[]],\"old_log_prob\":[[]],\"log_prob\":[[]],\"advantages\":[[]]}",
        "{\"op\":\"kl\",\"type\":\"k3\",\"logp\":[],\"ref_logp\":[]}",
        "{\"op\":\"agg_loss\",\"loss_mat\":[[1,2]],\"loss_mask\":[[false,false]]}",
        "{\"op\":\"rollout_correction\",\"old_log_prob\":[[0]],\"rollout_log_prob\":[[0]],\"response_mask\":[[0]],"
        "\"rollout_is\":\"token\",\"rollout_rs\":\"token_k1\",\"rollout_rs_threshold\":2}",
        "{\"op\":\"rollout_correction\",\"old_log_prob\":[0,1],\"rollout_log_prob\":[0,0],\"response_mask\":[1,1],"
        "\"rollout_rs\":\"token_k1,token_k2\",\"rollout_rs_threshold\":[\"0.5_2\",0.1]}",
    };
    for (size_t i = 0; i < sizeof fine / sizeof *fine; i++) {
        json_t *q, *answer = NULL;
        assert_int_equal(json_parse(&q, fine[i], strlen(fine[i]), "stdin:1"), 0);
        if (algo_json(q, "stdin:1", NULL, &answer) < 0) fail_msg("%s: %s", fine[i], err_msg());
        json_decref(q);
        json_decref(answer);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(appendix_outcome_estimators),      cmocka_unit_test(appendix_token_estimators),
        cmocka_unit_test(appendix_policy_losses),           cmocka_unit_test(appendix_kl_value_controller),
        cmocka_unit_test(appendix_rollout_correction),      cmocka_unit_test(garbage_outside_the_mask_does_not_leak),
        cmocka_unit_test(no_valid_token_is_loss_zero),      cmocka_unit_test(derivatives_are_slopes),
        cmocka_unit_test(gae_skips_masked_values),          cmocka_unit_test(clip_cov_drops_what_it_says),
        cmocka_unit_test(kl_cov_takes_the_first_of_equals), cmocka_unit_test(bad_requests_are_refused),
        cmocka_unit_test(bad_corrections_are_refused),      cmocka_unit_test(long_thresholds_are_whole),
        cmocka_unit_test(empty_batches_do_not_crash),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
