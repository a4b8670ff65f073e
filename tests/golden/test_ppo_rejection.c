/* test_ppo_rejection.c - updates of policy and critic after rejection sampling against verl's own functions.
 *
 * tools/oracle_rejection.py gave verl's rollout correction, gae, ppo_loss and value_loss recorded samples and the log-probs and
 * values of two tiny models in fp64. Here the same samples go through ppo_old_log_probs, ppo_advantage, ppo_update_critic and
 * ppo_update_actor. What differs between verl's trainers is what token-mean divides by: all tokens, or those that are left. The
 * rate is 0, so every case begins with the same weights. Tolerance: fp32's own error, as in test_ppo_grpo.c. */
#include "trainer_case.h"

#include "base/json.h"

/* The same numbers as the oracle's. */
enum { WIDTH = 24, MAX_LEN = 64 };
static const char *const BACKENDS[] = {"ref", "cpu", "cuda"};
static const struct micro_batch_limits CUTS[] = {{.max_seqs = 9}, {.max_seqs = 2}};

struct rig {
    struct trainer_case c;
    json_t *want;
};

static void configure(struct ppo_config *k, char *dir) {
    const struct optim_config still = {.beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .clip = 1, .schedule = "constant"};
    *k = (struct ppo_config){
        .data.max_prompt_length = MAX_LEN - WIDTH,
        .data.max_response_length = WIDTH,
        .rollout.train = {.n = 3, .temperature = 0.8},
        .algorithm.correct = true,
        .algorithm.adv_estimator = "gae",
        .algorithm.adv = algo_adv_find("gae"),
        .algorithm.gamma = 1,
        .algorithm.lam = 0.95,
        .actor.loss_mode = algo_policy_find("vanilla"),
        .actor.policy = algo_policy_defaults(),
        .actor.loss_scale_factor = 16,
        .actor.entropy_coeff = 0.02,
        .actor.use_kl_loss = true,
        .actor.kl_loss_coef = 0.1,
        .actor.mini_batch_size = 3,
        .actor.epochs = 1,
        .actor.optim = still,
        .critic = {.optim = still, .cliprange = 0.5, .mini_batch_size = 3, .epochs = 1, .loss_scale_factor = 16},
        .trainer.run = {.default_local_dir = dir, .max_bad_steps = 1},
    };
    k->actor.policy.clip_ratio_high = 0.28;
    const struct algo_corr_spec names = {
        .rollout_is = "token", .rollout_is_threshold = "1.1", .rollout_rs = "token_k1", .rollout_rs_threshold = "0.8_1.3"};
    OK(algo_corr_parse(&k->algorithm.corr, &names));
    OK(algo_kl_find(&k->actor.kl_loss_type, "low_var_kl"));
}

static void rig_open(struct rig *r, const char *backend) {
    OK(json_load(&r->want, FIXTURES "/train/rejection.json", 1 << 20));
    trainer_case_open(&r->c, "rejection");
    configure(&r->c.k, r->c.dir);
    case_dev(&r->c.w.base.dev, backend, 2);
    trainer_case_model(&r->c, &(struct trainer_case_model){.role = VERLC_ACTOR, .max_len = MAX_LEN, .max_seqs = 9});
    trainer_case_model(&r->c, &(struct trainer_case_model){
                                  .role = VERLC_CRITIC, .critic_dir = FIXTURES "/critic/qwen2", .max_len = MAX_LEN, .max_seqs = 9});
    trainer_case_ready(&r->c);
}

static void rig_close(struct rig *r) {
    trainer_case_close(&r->c);
    json_decref(r->want);
}

/* The column `name`, a list of each sample, as `as`. */
static void add(struct batch *b, const json_t *samples, const char *name, const char *as, enum batch_type type) {
    struct batch_col *c;
    int64_t lens[16];
    for (int64_t i = 0; i < b->n_rows; i++)
        lens[i] = (int64_t)json_array_size(json_object_get(json_array_get(samples, (size_t)i), name));
    OK(batch_add(b, as, type, lens, NULL, &c));
    for (int64_t i = 0; i < b->n_rows; i++)
        for (int64_t t = 0; t < lens[i]; t++) {
            const double x =
                json_number_value(json_array_get(json_object_get(json_array_get(samples, (size_t)i), name), (size_t)t));
            if (type == BATCH_F64) c->f64[c->off[i] + t] = x;
            else if (type == BATCH_F32) c->f32[c->off[i] + t] = (float)x;
            else c->i32[c->off[i] + t] = (int32_t)x;
        }
}

static void recorded(const struct rig *r, struct batch *b) {
    const json_t *samples = json_object_get(r->want, "samples");
    const int64_t n = (int64_t)json_array_size(samples);
    int64_t uid[16];
    double *level;
    int32_t *earlier; /* drawn by other weights: their log-probs are nobody else's */
    assert_true(n <= 16);
    batch_init(b, n);
    add(b, samples, "prompt", "prompts", BATCH_I32);
    add(b, samples, "response", "responses", BATCH_I32);
    add(b, samples, "rollout_log_probs", "rollout_log_probs", BATCH_F32);
    add(b, samples, "ref_log_prob", "ref_log_prob", BATCH_F64);
    add(b, samples, "values", "values", BATCH_F64);
    OK(ppo_add_like(b, "param_versions", BATCH_I32, "responses", 1, NULL));
    earlier = batch_find(b, "param_versions")->i32;
    for (int64_t t = 0; t < batch_find(b, "responses")->off[n]; t++) earlier[t] = -1;
    OK(ppo_add_f64(b, "token_level_scores", "responses", &level));
    for (int64_t i = 0; i < n; i++) {
        const json_t *s = json_array_get(samples, (size_t)i);
        uid[i] = json_integer_value(json_object_get(s, "uid"));
        level[batch_find(b, "responses")->off[i + 1] - 1] = json_number_value(json_object_get(s, "score"));
    }
    OK(batch_add(b, "uid", BATCH_I64, NULL, uid, NULL));
    OK(batch_add(b, "group", BATCH_I64, NULL, uid, NULL));
}

static void check_mask(const struct rig *r, const struct batch *b) {
    struct batch want;
    batch_init(&want, b->n_rows);
    add(&want, json_object_get(r->want, "samples"), "left", "left", BATCH_I32);
    const struct batch_col *left = batch_find(&want, "left"), *mask = batch_find(b, "response_mask"),
                           *all = batch_find(b, "loss_mask");
    assert_non_null(all);
    assert_memory_equal(mask->i32, left->i32, (size_t)left->off[b->n_rows] * 4);
    for (int64_t t = 0; t < all->off[b->n_rows]; t++) assert_int_equal(all->i32[t], 1);
    batch_free(&want);
}

/* One case: verl's default trainer counts all tokens, the one that its asynchronous trainers are made of those that are left. */
static double check_case(struct rig *r, const json_t *c, const char *what) {
    const char *agg = json_string_value(json_object_get(c, "agg")), *counts = json_string_value(json_object_get(c, "counts")),
               *name;
    struct batch b;
    const json_t *v;
    double worst = 0, got;
    r->c.k.actor.agg_mode = r->c.k.critic.agg_mode = algo_agg_find(agg);
    r->c.k.schedule = strcmp(counts, "all") == 0 ? PPO_SYNC : PPO_ONE_STEP_OFF;
    trainer_case_configure(&r->c);
    metrics_reset(&r->c.run.metrics);
    recorded(r, &b);
    OK(ppo_old_log_probs(&r->c.stage, &r->c.k.algorithm, &b));
    OK(ppo_advantage(&r->c.stage, &r->c.k.algorithm, NULL, &b));
    check_mask(r, &b);
    OK(worker_local.update(&r->c.w.base, &ppo_update_critic, &r->c.run, &b));
    OK(worker_local.update(&r->c.w.base, &ppo_update_actor, &r->c.run, &b));
    json_object_foreach((json_t *)(uintptr_t)json_object_get(c, "want"), name, v) {
        if (!metrics_get(&r->c.run.metrics, name, &got)) fail_msg("no metric %s", name);
        const double want = json_number_value(v), e = fabs(got - want) / fmax(1, fabs(want));
        worst = worse_of(worst, e);
        if (!(e <= 1e-5)) fail_msg("%s, %s, %s tokens: %s is %.9g, verl has %.9g", what, agg, counts, name, got, want);
    }
    batch_free(&b);
    return worst;
}

static void losses_like_verl(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof BACKENDS / sizeof *BACKENDS; i++) {
        struct rig r;
        const json_t *c;
        size_t k;
        double worst = 0;
        if (!case_has(BACKENDS[i])) continue;
        rig_open(&r, BACKENDS[i]);
        for (size_t cut = 0; cut < sizeof CUTS / sizeof *CUTS; cut++) {
            r.c.k.rollout.logp_cut = r.c.k.actor.update_cut = r.c.k.critic.update_cut = CUTS[cut];
            json_array_foreach(json_object_get(r.want, "cases"), k, c) worst = worse_of(worst, check_case(&r, c, BACKENDS[i]));
            assert_int_equal(k, 10);
        }
        print_message("%s: largest difference %.1e\n", BACKENDS[i], worst);
        rig_close(&r);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(losses_like_verl)};
    return cmocka_run_group_tests_name("rejection like verl", tests, NULL, NULL);
}
