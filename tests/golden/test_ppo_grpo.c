/* test_ppo_grpo.c - GRPO steps on recorded rollouts against plain torch.
 *
 * tools/oracle_grpo.py trained the tiny Qwen2.5 of tests/fixtures/model/qwen2 on
 * seeded samples, padded, without micro-batches.  Here the same samples go
 * through the program's own stages - ppo_reward, ppo_old_log_probs, ppo_reference, ppo_advantage, ppo_update_actor -
 * packed and cut in several ways, on both CPU backends.
 *
 * Tolerances: the oracle's own fp32 run is off its fp64 run by 6e-8 in the loss,
 * 2e-6 in the gradient norm and 2e-9 NMSE in the worst tensor (it prints them):
 * what a correct fp32 run with another order of sums can be asked for. */
#include "trainer_case.h"

/* The same numbers as VARIANTS of the oracle. */
struct variant {
    const char *name, *agg_mode;
    int64_t steps, groups, mini, epochs;
    bool by_std, forced; /* forced: old log-probs by a pass of the policy, else the recorded ones */
    double kl_coef, entropy_coeff, lr, grad_clip;
    int64_t warmup;
};
static const struct variant VARIANTS[] = {
    {.name = "token_mean",
     .agg_mode = "token-mean",
     .steps = 10,
     .groups = 4,
     .mini = 4,
     .epochs = 1,
     .by_std = true,
     .kl_coef = 0.2,
     .lr = 1e-3,
     .warmup = 2,
     .grad_clip = 0.5},
    {.name = "seq_norm",
     .agg_mode = "seq-mean-token-sum-norm",
     .steps = 3,
     .groups = 4,
     .mini = 2,
     .epochs = 2,
     .forced = true,
     .kl_coef = 0.1,
     .entropy_coeff = 0.02,
     .lr = 4e-3,
     .grad_clip = 1.0},
};
enum { N = 4, WIDTH = 24, MAX_LEN = 64 };

struct setup {
    const char *backend;
    int threads;
    struct micro_batch_limits cut;
    bool whole; /* the cut leaves a mini-batch in one piece */
};
static const struct setup SETUPS[] = {
    {"ref", 1, {.max_seqs = 16}, true},    {"cpu", 2, {.max_seqs = 16}, true}, {"cpu", 2, {.max_seqs = 3}, false},
    {"cpu", 1, {.max_rows = 100}, false},  {"cpu", 1, {.max_seqs = 1}, false}, {"cuda", 1, {.max_seqs = 16}, true},
    {"cuda", 1, {.max_rows = 100}, false},
};

struct rig {
    struct trainer_case c;
    const struct variant *v;
    struct safetensors_file *want;
    const int32_t *prompt_len, *response_len, *prompts, *responses;
    int64_t at_prompt, at_response; /* tokens of the steps before */
    double worst_loss, worst_norm, worst_logp;
};

static int64_t batch_rows(const struct rig *r) { return r->v->groups * N; }
static int64_t updates(const struct rig *r) { return r->v->epochs * (r->v->groups / r->v->mini); }

static void configure(struct ppo_config *k, const struct variant *v, struct micro_batch_limits cut, char *dir) {
    *k = (struct ppo_config){
        .data.max_prompt_length = MAX_LEN - WIDTH,
        .data.max_response_length = WIDTH,
        .rollout.train = {.n = N, .temperature = 0.8},
        .algorithm.force_old_log_prob = v->forced,
        .ref.cut = cut,
        .rollout.logp_cut = cut,
        .actor.update_cut = cut,
        .algorithm.adv_estimator = "grpo",
        .algorithm.adv = algo_adv_find("grpo"),
        .algorithm.gamma = 1,
        .algorithm.lam = 1,
        .algorithm.norm_adv_by_std = v->by_std,
        .actor.loss_mode = algo_policy_find("vanilla"),
        .actor.policy = algo_policy_defaults(),
        .actor.agg_mode = algo_agg_find(v->agg_mode),
        .actor.entropy_coeff = v->entropy_coeff,
        .actor.use_kl_loss = true,
        .actor.kl_loss_coef = v->kl_coef,
        .actor.mini_batch_size = v->mini,
        .actor.epochs = v->epochs,
        .actor.optim = {.lr = v->lr,
                        .beta1 = 0.9,
                        .beta2 = 0.999,
                        .eps = 1e-8,
                        .weight_decay = 0.01,
                        .clip = v->grad_clip,
                        .schedule = "constant",
                        .warmup_steps = v->warmup,
                        .total_steps = v->steps,
                        .zero_indexed_step = true},
        .trainer.run = {.default_local_dir = dir, .max_bad_steps = 1},
    };
    k->actor.policy.clip_ratio_low = 0.2;
    k->actor.policy.clip_ratio_high = 0.28;
    k->actor.policy.clip_ratio_c = 3;
    OK(algo_kl_find(&k->actor.kl_loss_type, "low_var_kl"));
}

static void rig_open(struct rig *r, const struct variant *v, const struct setup *s) {
    *r = (struct rig){.v = v};
    char *path = xasprintf("%s/train/%s.safetensors", FIXTURES, v->name);
    OK(safetensors_open(&r->want, path));
    free(path);
    r->prompt_len = case_data(r->want, "prompt_len", DT_I32, NULL);
    r->response_len = case_data(r->want, "response_len", DT_I32, NULL);
    r->prompts = case_data(r->want, "prompts", DT_I32, NULL);
    r->responses = case_data(r->want, "responses", DT_I32, NULL);
    trainer_case_open(&r->c, v->name);
    configure(&r->c.k, v, s->cut, r->c.dir);
    case_dev(&r->c.w.base.dev, s->backend, s->threads);
    static const enum verlc_role roles[] = {VERLC_ACTOR, VERLC_REF};
    for (int i = 0; i < 2; i++)
        trainer_case_model(&r->c, &(struct trainer_case_model){.role = roles[i], .max_len = MAX_LEN, .max_seqs = batch_rows(r)});
    trainer_case_ready(&r->c);
}

static void rig_close(struct rig *r) {
    trainer_case_close(&r->c);
    safetensors_close(r->want);
}

/* ---- one training step ---- */

/* The recorded samples of a step as the generation stage would hand them on. */
static void recorded(struct rig *r, int64_t step, struct batch *b) {
    const int64_t n = batch_rows(r), lo = step * n;
    int64_t prompt_len[64], response_len[64];
    assert_true(n <= 64);
    batch_init(b, n);
    for (int64_t i = 0; i < n; i++) {
        prompt_len[i] = r->prompt_len[lo + i];
        response_len[i] = r->response_len[lo + i];
    }
    const float *old = case_data(r->want, "old_logp", DT_F32, NULL);
    OK(batch_add(b, "prompts", BATCH_I32, prompt_len, r->prompts + r->at_prompt, NULL));
    OK(batch_add(b, "responses", BATCH_I32, response_len, r->responses + r->at_response, NULL));
    OK(batch_add(b, "rollout_log_probs", BATCH_F32, response_len, old + r->at_response, NULL));
    OK(batch_add(b, "uid", BATCH_I64, NULL, (const int64_t *)case_data(r->want, "uid", DT_I64, NULL) + lo, NULL));
    OK(batch_add(b, "group", BATCH_I64, NULL, (const int64_t *)case_data(r->want, "uid", DT_I64, NULL) + lo, NULL));
    OK(batch_add(b, "score", BATCH_F64, NULL, (const double *)case_data(r->want, "score", DT_F64, NULL) + lo, NULL));
}

/* |got - want| against 1 or the value itself, whichever is larger; NaN fails. */
static double off(double got, double want) { return fabs(got - want) / fmax(1, fabs(want)); }

static void check_logp(struct rig *r, const struct batch *b, const char *column, const char *name) {
    const struct batch_col *c = batch_find(b, column);
    const float *want = (const float *)case_data(r->want, name, DT_F32, NULL) + r->at_response;
    assert_non_null(c);
    for (int64_t t = 0; t < c->off[b->n_rows]; t++) {
        r->worst_logp = worse_of(r->worst_logp, off(c->f64[t], (double)want[t]));
        assert_true(isfinite(c->f64[t]));
    }
}

static void check_advantages(const struct rig *r, const struct batch *b, int64_t step) {
    const struct batch_col *c = batch_find(b, "advantages");
    const double *want = (const double *)case_data(r->want, "advantage", DT_F64, NULL) + step * b->n_rows;
    for (int64_t i = 0; i < b->n_rows; i++)
        for (int64_t t = c->off[i]; t < c->off[i + 1]; t++)
            if (!(off(c->f64[t], want[i]) <= 1e-12)) /* both in fp64: two passes over four scores */
                fail_msg("advantage of sample %lld: %.17g, torch %.17g", (long long)i, c->f64[t], want[i]);
}

/* The mean over the first n optimizer steps of this training step. */
static double wanted_of(const struct rig *r, const char *name, int64_t step, int64_t n) {
    const double *v = (const double *)case_data(r->want, name, DT_F64, NULL) + step * updates(r);
    double sum = 0;
    for (int64_t u = 0; u < n; u++) sum += v[u];
    return sum / (double)n;
}
/* Over all, as verl reports every metric of an update. */
static double wanted(const struct rig *r, const char *name, int64_t step) { return wanted_of(r, name, step, updates(r)); }

static double metric(const struct rig *r, const char *name) {
    double v = NAN;
    if (!metrics_get(&r->c.run.metrics, name, &v)) fail_msg("no metric %s", name);
    return v;
}

static void check_metrics(struct rig *r, int64_t step, bool whole) {
    /* Advantages of a group sum to 0, so the loss is a small difference of terms of size 1: its error is absolute. */
    static const char *const losses[][2] = {{"actor/pg_loss", "pg_loss"},
                                            {"actor/kl_loss", "kl_loss"},
                                            {"actor/entropy", "entropy"},
                                            {"actor/entropy_loss", "entropy"}};
    for (int i = 0; i < (r->v->entropy_coeff != 0 ? 4 : 3); i++) {
        /* actor/entropy is of the batch: of each token when it is first met, in the first epoch */
        const int64_t n = i == 2 ? updates(r) / r->v->epochs : updates(r);
        const double got = metric(r, losses[i][0]), want = wanted_of(r, losses[i][1], step, n), e = off(got, want);
        r->worst_loss = worse_of(r->worst_loss, e);
        if (!(e <= 1e-6)) fail_msg("step %lld: %s %.9g, torch %.9g", (long long)step, losses[i][0], got, want);
    }
    const double entropy = r->v->entropy_coeff != 0 ? r->v->entropy_coeff * metric(r, "actor/entropy_loss") : 0;
    assert_true(off(metric(r, "actor/loss"), metric(r, "actor/pg_loss") - entropy + r->v->kl_coef * metric(r, "actor/kl_loss")) <=
                1e-12);
    const double norm = wanted(r, "grad_norm", step), e = fabs(metric(r, "actor/grad_norm") - norm) / norm;
    r->worst_norm = worse_of(r->worst_norm, e);
    if (!(e <= 1e-5)) fail_msg("step %lld: grad norm %.9g, torch %.9g", (long long)step, metric(r, "actor/grad_norm"), norm);
    const double *lr = case_data(r->want, "lr", DT_F64, NULL);
    if (step + 1 < r->v->steps) assert_true(fabs(metric(r, "actor/lr") - lr[step + 1]) <= 1e-15); /* verl: the next one */
    if (!whole) return; /* verl averages these over micro-batches of unequal size, so they depend on the cut */
    /* counts of tokens over counts: an fp32 quotient on one side */
    assert_true(off(metric(r, "actor/pg_clipfrac"), wanted(r, "clipfrac", step)) <= 1e-6);
    assert_true(off(metric(r, "actor/pg_clipfrac_lower"), wanted(r, "clipfrac_lower", step)) <= 1e-6);
}

/* verl's numbers of two probability vectors (calculate_debug_metrics): the recorded rollout's, and those of the policy before
 * its first step, which is the reference. Over the first mini-batch. */
static void check_rollout_diff(const struct rig *r, const struct batch *b) {
    const int64_t n = b->n_rows / (r->v->groups / r->v->mini), tokens = batch_find(b, "responses")->off[n];
    const float *old = batch_find(b, "rollout_log_probs")->f32;
    const double *ref = batch_find(b, "ref_log_prob")->f64;
    double max = 0, mean = 0, var = 0, ma = 0, mb = 0, ab = 0, aa = 0, bb = 0;
    for (int64_t t = 0; t < tokens; t++) {
        const double x = exp(ref[t]), y = exp((double)old[t]);
        max = fmax(max, fabs(x - y));
        mean += fabs(x - y) / (double)tokens;
        ma += x / (double)tokens;
        mb += y / (double)tokens;
    }
    for (int64_t t = 0; t < tokens; t++) {
        const double x = exp(ref[t]), y = exp((double)old[t]), d = fabs(x - y) - mean;
        var += d * d / (double)(tokens - 1);
        ab += (x - ma) * (y - mb);
        aa += (x - ma) * (x - ma);
        bb += (y - mb) * (y - mb);
    }
    if (!r->v->forced) assert_true(max > 0.01); /* recorded samples of another policy: there is something to see */
    assert_true(fabs(metric(r, "training/rollout_probs_diff_max") - max) <= 1e-6);
    assert_true(fabs(metric(r, "training/rollout_probs_diff_mean") - mean) <= 1e-6);
    assert_true(fabs(metric(r, "training/rollout_probs_diff_std") - sqrt(var)) <= 1e-6);
    assert_true(fabs(metric(r, "training/rollout_actor_probs_pearson_corr") - ab / sqrt(aa * bb)) <= 1e-6);
}

/* Of the watched tensors after a step, of all at the end. */
struct weights_off {
    double all, tensor, key_bias; /* NMSE over all of them, of the worst tensor, of the worst key bias */
};

static void check_weights(const struct rig *r, const char *prefix, struct weights_off *o) {
    const struct model *m = r->c.w.model[VERLC_ACTOR];
    float *master = xmalloc((size_t)m->n_elems * 4);
    OK(dev_copy_out(m->dev, master, m->master, (size_t)m->n_elems * 4));
    double err = 0, size = 0;
    int64_t found = 0;
    for (int64_t i = 0; i < m->n_params; i++) {
        const struct model_param *q = &m->params[i];
        char *name = xasprintf("%s.%s", prefix, q->name);
        const struct safetensors_tensor *t = safetensors_find(r->want, name);
        free(name);
        if (!t) continue;
        const int64_t n = q->rows * q->cols;
        const float *want = (const float *)(const void *)t->data;
        assert_int_equal(t->bytes, (size_t)n * 4);
        double e = 0, w = 0;
        for (int64_t k = 0; k < n; k++) {
            const double d = (double)master[q->offset + k] - (double)want[k];
            e += d * d;
            w += (double)want[k] * (double)want[k];
        }
        double *worst = strstr(q->name, "k_proj.bias") ? &o->key_bias : &o->tensor;
        *worst = worse_of(*worst, e / w);
        err += e;
        size += w;
        found++;
    }
    free(master);
    assert_true(found >= 3);
    o->all = worse_of(o->all, err / size);
}

static void steps_like_torch(void **state) {
    (void)state;
    for (size_t v = 0; v < sizeof VARIANTS / sizeof *VARIANTS; v++)
        for (size_t s = 0; s < sizeof SETUPS / sizeof *SETUPS; s++) {
            struct rig r;
            struct weights_off w = {0};
            if (!case_has(SETUPS[s].backend)) continue;
            rig_open(&r, &VARIANTS[v], &SETUPS[s]);
            for (int64_t step = 0; step < r.v->steps; step++) {
                struct batch b;
                recorded(&r, step, &b);
                r.c.run.step = step + 1;
                metrics_reset(&r.c.run.metrics);
                struct batch dropped;
                OK(ppo_reward(&r.c.stage, &r.c.k.reward, &b, &dropped));
                assert_int_equal(dropped.n_rows, 0);
                OK(ppo_old_log_probs(&r.c.stage, &r.c.k.algorithm, &b));
                OK(ppo_reference(&r.c.stage, &b));
                OK(ppo_advantage(&r.c.stage, &r.c.k.algorithm, NULL, &b));
                check_logp(&r, &b, "ref_log_prob", "ref_logp");
                check_logp(&r, &b, "old_log_probs", "old_logp");
                check_advantages(&r, &b, step);
                OK(worker_local.update(&r.c.w.base, &ppo_update_actor, &r.c.run, &b));
                check_metrics(&r, step, SETUPS[s].whole);
                if (step == 0) check_rollout_diff(&r, &b);
                char prefix[32];
                snprintf(prefix, sizeof prefix, "weights.%lld", (long long)step);
                check_weights(&r, prefix, &w);
                r.at_prompt += batch_find(&b, "prompts")->off[b.n_rows];
                r.at_response += batch_find(&b, "responses")->off[b.n_rows];
                batch_free(&b);
            }
            check_weights(&r, "final", &w);
            print_message("%-10s %s, %s %2lld: %2lld steps; loss %.1e, grad norm %.1e, log-probs %.1e, weights NMSE %.1e, "
                          "worst tensor %.1e, key bias %.1e\n",
                          r.v->name, SETUPS[s].backend, SETUPS[s].cut.max_seqs ? "samples" : "tokens",
                          (long long)(SETUPS[s].cut.max_seqs ? SETUPS[s].cut.max_seqs : SETUPS[s].cut.max_rows),
                          (long long)trained_model_optim(r.c.w.base.role[VERLC_ACTOR].model)->step, r.worst_loss, r.worst_norm,
                          r.worst_logp, w.all, w.tensor, w.key_bias);
            assert_int_equal(trained_model_optim(r.c.w.base.role[VERLC_ACTOR].model)->step, r.v->steps * updates(&r));
            assert_true(r.worst_logp <= 1e-5);
            assert_true(w.all <= 1e-9);
            assert_true(w.tensor <= 1e-9);
            /* A key's bias shifts all scores of a query nearly alike, which softmax takes out again: its gradient is
             * mostly rounding, and AdamW scales that up to the size of lr. fp32 against fp64 in torch: 2e-9. */
            assert_true(w.key_bias <= 1e-6);
            rig_close(&r);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(steps_like_torch)};
    return cmocka_run_group_tests_name("grpo against torch", tests, NULL, NULL);
}
