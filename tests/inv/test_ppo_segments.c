/* test_ppo_segments.c - responses of several segments, of the policy and of an environment, through the stages of a step.
 *
 * tools/oracle_segments.py has verl's estimators on them, in fp64. What an environment wrote is context: log-probs, reference,
 * versions and values there are in no loss, no metric and no bit of the new weights. */
#include "trainer_case.h"

#include "base/json.h"
#include "text/text.h"

#include <sqlite3.h>

enum { MAX_LEN = 32, WIDTH = 16, ROWS = 6, PROMPT = 4, VOCAB = 100, TOPK = 3 };

struct rig {
    struct trainer_case c;
    struct algo_kl_ctrl kl;
    json_t *want;
};

static void rig_open(struct rig *r) {
    trainer_case_open(&r->c, "segments");
    OK(json_load(&r->want, FIXTURES "/train/segments.json", 1 << 20));
    r->c.k = (struct ppo_config){
        .data.max_prompt_length = PROMPT,
        .data.max_response_length = WIDTH,
        .rollout.train = {.n = 3, .temperature = 0.8},
        .algorithm.gamma = json_number_value(json_object_get(r->want, "gamma")),
        .algorithm.lam = json_number_value(json_object_get(r->want, "lam")),
        .algorithm.norm_adv_by_std = true,
        .actor.loss_mode = algo_policy_find("vanilla"),
        .actor.policy = algo_policy_defaults(),
        .actor.agg_mode = algo_agg_find("token-mean"),
        .actor.loss_scale_factor = WIDTH,
        .actor.entropy_coeff = 0.02,
        .actor.kl_loss_coef = 0.1,
        .actor.mini_batch_size = 2,
        .actor.epochs = 1,
        .actor.update_cut = {.max_seqs = 2},
        .rollout.logp_cut = {.max_seqs = 4},
        .actor.optim = {.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .clip = 1, .schedule = "constant"},
        .trainer.run = {.default_local_dir = r->c.dir, .max_bad_steps = 1},
    };
    OK(algo_kl_find(&r->c.k.actor.kl_loss_type, "low_var_kl"));
    OK(algo_kl_find(&r->c.k.algorithm.kl_penalty, "kl"));
    ppo_config_sizes(&r->c.k);
    OK(algo_kl_ctrl_init(&r->kl, "fixed", 0.1, 0, 0));
}

static void rig_close(struct rig *r) {
    trainer_case_close(&r->c);
    json_decref(r->want);
}

/* ---- the batch ---- */

static const json_t *sample(const struct rig *r, int64_t i) {
    return json_array_get(json_object_get(r->want, "samples"), (size_t)i);
}

static double number_at(const json_t *list, int64_t i) { return json_number_value(json_array_get(list, (size_t)i)); }

static void add_numbers(const struct rig *r, struct batch *b, const char *name, enum batch_type type, const char *as) {
    OK(ppo_add_like(b, as, type, "responses", 1, NULL));
    const struct batch_col *c = batch_find(b, as);
    for (int64_t i = 0; i < ROWS; i++)
        for (int64_t t = 0; t < batch_len(c, i); t++) {
            const double v = number_at(json_object_get(sample(r, i), name), t);
            if (type == BATCH_F64) c->f64[c->off[i] + t] = v;
            else c->f32[c->off[i] + t] = (float)v;
        }
}

static void make_batch(const struct rig *r, struct batch *b) {
    int64_t lens[ROWS], pairs[ROWS], uid[ROWS];
    double score[ROWS], baseline[ROWS], *level;
    struct batch_col *c;
    batch_init(b, ROWS);
    for (int64_t i = 0; i < ROWS; i++) {
        const json_t *s = json_object_get(sample(r, i), "segments");
        lens[i] = (int64_t)json_array_size(json_object_get(sample(r, i), "values"));
        pairs[i] = 2 * (int64_t)json_array_size(s);
        uid[i] = json_integer_value(json_object_get(sample(r, i), "uid"));
        score[i] = json_number_value(json_object_get(sample(r, i), "score"));
        baseline[i] = json_number_value(json_object_get(sample(r, i), "reward_baseline"));
    }
    OK(batch_add(b, "responses", BATCH_I32, lens, NULL, &c));
    for (int64_t t = 0; t < c->off[ROWS]; t++) c->i32[t] = (int32_t)(5 + 7 * t % (VOCAB - 5));
    OK(batch_add(b, BATCH_SEGMENTS, BATCH_I32, pairs, NULL, &c));
    for (int64_t i = 0; i < ROWS; i++)
        for (int64_t k = 0; k < pairs[i]; k++)
            c->i32[c->off[i] + k] =
                (int32_t)number_at(json_array_get(json_object_get(sample(r, i), "segments"), (size_t)k / 2), k % 2);
    for (int64_t i = 0; i < ROWS; i++) lens[i] = PROMPT;
    OK(batch_add(b, "prompts", BATCH_I32, lens, NULL, &c));
    for (int64_t t = 0; t < c->off[ROWS]; t++) c->i32[t] = (int32_t)(9 + t % PROMPT);
    OK(batch_add(b, "uid", BATCH_I64, NULL, uid, NULL));
    OK(batch_add(b, "group", BATCH_I64, NULL, uid, NULL));
    OK(batch_add(b, "score", BATCH_F64, NULL, score, NULL));
    OK(batch_add(b, "reward_baselines", BATCH_F64, NULL, baseline, NULL));
    OK(ppo_add_f64(b, "token_level_scores", "responses", &level));
    for (int64_t i = 0; i < ROWS; i++) level[batch_find(b, "responses")->off[i + 1] - 1] = score[i];
    add_numbers(r, b, "values", BATCH_F64, "values");
    add_numbers(r, b, "ref_log_prob", BATCH_F64, "ref_log_prob");
    add_numbers(r, b, "old_log_probs", BATCH_F32, "rollout_log_probs");
    OK(ppo_add_like(b, "param_versions", BATCH_I32, "responses", 1, NULL));
}

static void mask_by_hand(const struct rig *r, const struct batch *b, uint8_t *mask) {
    for (int64_t i = 0, t = 0; i < ROWS; i++) {
        size_t k;
        const json_t *pair;
        json_array_foreach(json_object_get(sample(r, i), "segments"), k, pair) for (int64_t n = (int64_t)number_at(pair, 0); n > 0;
                                                                                    n--) mask[t++] = number_at(pair, 1) == 0;
        assert_int_equal(t, batch_find(b, "responses")->off[i + 1]);
    }
}

/* ---- estimators ---- */

static double worst_of(const struct rig *r, const struct batch *b, const char *estimator, const char *name, const uint8_t *mask) {
    const json_t *want = json_object_get(json_object_get(json_object_get(r->want, "want"), estimator), name);
    const struct batch_col *c = batch_find(b, name);
    double worst = 0;
    for (int64_t i = 0; i < ROWS; i++)
        for (int64_t t = c->off[i]; t < c->off[i + 1]; t++) {
            if (!mask[t]) continue;
            const double w = number_at(json_array_get(want, (size_t)i), t - c->off[i]), e = fabs(c->f64[t] - w);
            worst = worse_of(worst, e);
            if (!(e <= 1e-7))
                fail_msg("%s: %s of sample %lld, token %lld: %.12g, verl has %.12g", estimator, name, (long long)i,
                         (long long)(t - c->off[i]), c->f64[t], w);
        }
    return worst;
}

static void estimators_like_verl(void **state) {
    (void)state;
    struct rig r;
    const char *name;
    const json_t *v;
    uint8_t mask[ROWS * WIDTH];
    double worst = 0;
    int n = 0;
    rig_open(&r);
    json_object_foreach(json_object_get(r.want, "want"), name, v) {
        struct batch b;
        make_batch(&r, &b);
        mask_by_hand(&r, &b, mask);
        add_numbers(&r, &b, "old_log_probs", BATCH_F64, "old_log_probs");
        add_numbers(&r, &b, "sum_pi_squared", BATCH_F64, "sum_pi_squared");
        r.c.k.algorithm.adv_estimator = (char *)(uintptr_t)name;
        r.c.k.algorithm.adv = algo_adv_find(name);
        assert_non_null(r.c.k.algorithm.adv);
        OK(ppo_advantage(&r.c.stage, &r.c.k.algorithm, &r.kl, &b));
        const struct batch_col *made = batch_find(&b, "response_mask");
        for (int64_t t = 0; t < made->off[ROWS]; t++) assert_int_equal(made->i32[t], mask[t]);
        worst = worse_of(worst, worst_of(&r, &b, name, "advantages", mask));
        worst = worse_of(worst, worst_of(&r, &b, name, "returns", mask));
        batch_free(&b);
        n++;
    }
    assert_int_equal(n, 14);
    print_message("%d estimators: largest difference %.1e\n", n, worst);
    rig_close(&r);
}

/* ---- episodes of several samples ---- */

/* Rows 0 and 1 are of one episode, 3, 4 and 5 of another; the last of each is scored. The advantages by hand. */
static void episodes_have_one_score(void **state) {
    (void)state;
    static const int64_t session[ROWS] = {7, 7, 2, 5, 5, 5};
    struct rig r;
    struct batch b, dropped;
    uint8_t mask[ROWS * WIDTH];
    for (int lost = 0; lost < 2; lost++) {
        rig_open(&r);
        make_batch(&r, &b);
        mask_by_hand(&r, &b, mask);
        add_numbers(&r, &b, "old_log_probs", BATCH_F64, "old_log_probs");
        batch_drop(&b, "token_level_scores");
        batch_drop(&b, "reward_baselines");
        OK(batch_add(&b, BATCH_SESSION, BATCH_I64, NULL, session, NULL));
        OK(batch_add(&b, "reward_extra_info", BATCH_JSON, NULL, NULL, NULL));
        double *const score = ppo_column(&b, "score");
        for (int64_t i = 0; i < ROWS; i++) score[i] = i == 1 ? 3 : i == 2 ? 1 : i == 5 && !lost ? 0.5 : NAN;
        json_decref(batch_find(&b, "reward_extra_info")->json[1]);
        batch_find(&b, "reward_extra_info")->json[1] = json_pack("{s:b}", "acc", 1);
        OK(ppo_reward(&r.c.stage, &r.c.k.reward, &b, &dropped));
        assert_int_equal(b.n_rows, lost ? 3 : ROWS); /* an episode without a score goes as a whole */
        assert_int_equal(dropped.n_rows, lost ? 3 : 0);
        assert_true(json_is_true(json_object_get(batch_find(&b, "reward_extra_info")->json[0], "acc")));
        r.c.k.algorithm.adv = algo_adv_find("grpo");
        OK(ppo_advantage(&r.c.stage, &r.c.k.algorithm, &r.kl, &b));
        const struct batch_col *adv = batch_find(&b, "advantages"), *level = batch_find(&b, "token_level_scores");
        for (int64_t i = 0; i < b.n_rows; i++)
            for (int64_t t = adv->off[i]; t < adv->off[i + 1]; t++) {
                /* of the scores 3 and 1; of one alone in its group its score */
                const double want = !mask[t] ? 0 : i < 2 ? 1 / sqrt(2) : i == 2 ? -1 / sqrt(2) : 0.5;
                if (fabs(adv->f64[t] - want) > 1e-5)
                    fail_msg("row %lld: an advantage of %g, not %g", (long long)i, adv->f64[t], want);
            }
        assert_true(level->f64[level->off[1] - 1] == 3 && level->f64[level->off[2] - 1] == 3);
        batch_free(&dropped);
        batch_free(&b);
        rig_close(&r);
    }
}

/* ---- losses ---- */

/* What a step is of. */
enum how { KL_LOSS, KL_REWARD, DISTILL_ESTIMATOR, DISTILL_LISTS, CRITIC, N_HOW };

static enum verlc_role trained(enum how how) { return how == CRITIC ? VERLC_CRITIC : VERLC_ACTOR; }

static void configure(struct ppo_config *k, enum how how) {
    k->algorithm.adv = algo_adv_find("gae");
    k->actor.use_kl_loss = how == KL_LOSS;
    k->algorithm.use_kl_in_reward = how == KL_REWARD;
    k->critic = (struct ppo_critic_config){.optim = k->actor.optim,
                                           .cliprange = 0.5,
                                           .mini_batch_size = 2,
                                           .epochs = 1,
                                           .update_cut = {.max_seqs = 2},
                                           .agg_mode = k->actor.agg_mode};
    if (how == DISTILL_ESTIMATOR || how == DISTILL_LISTS) {
        k->distill = (struct ppo_distill_config){.enable = true, .topk = TOPK, .use_task_rewards = true, .coef = 0.5};
        OK(algo_distill_find(&k->distill.loss, how == DISTILL_LISTS ? "forward_kl_topk" : "k3"));
    }
    ppo_config_sizes(k);
}

static void open_model(struct rig *r, enum verlc_role role) {
    OK(dev_open_cpu(&r->c.w.base.dev, 1, NULL));
    trainer_case_model(&r->c, &(struct trainer_case_model){.role = role, .max_len = MAX_LEN, .max_seqs = ROWS});
    trainer_case_ready(&r->c);
}

/* What a teacher would say. */
static void add_teacher(const struct rig *r, struct batch *b) {
    const int64_t list = memory_plan_distill_list(&r->c.k.distill), per = list > 0 ? list : 1;
    if (!r->c.k.distill.enable) return;
    OK(ppo_add_like(b, "teacher_logprobs", BATCH_F32, "responses", per, NULL));
    if (list > 0) OK(ppo_add_like(b, "teacher_ids", BATCH_I32, "responses", per, NULL));
    const struct batch_col *logp = batch_find(b, "teacher_logprobs"), *id = batch_find(b, "teacher_ids");
    for (int64_t t = 0; t < logp->off[ROWS]; t++) {
        logp->f32[t] = -1.5f - 0.25f * (float)(t % 7);
        if (id) id->i32[t] = (int32_t)((t * 11) % VOCAB);
    }
}

enum change { NOTHING, ENVIRONMENT, POLICY };

/* Other numbers at the tokens of one side. */
static void change(struct batch *b, enum change what, const uint8_t *mask) {
    const struct batch_col *teacher = batch_find(b, "teacher_logprobs"), *id = batch_find(b, "teacher_ids");
    const int64_t n = batch_find(b, "responses")->off[ROWS], per = teacher ? teacher->off[ROWS] / n : 0;
    for (int64_t t = 0; t < n && what != NOTHING; t++) {
        if (mask[t] != (what == POLICY)) continue;
        batch_find(b, "rollout_log_probs")->f32[t] = -7;
        batch_find(b, "param_versions")->i32[t] = -3;
        batch_find(b, "ref_log_prob")->f64[t] = -9;
        batch_find(b, "values")->f64[t] = 5;
        for (int64_t k = t * per; k < (t + 1) * per; k++) {
            teacher->f32[k] = -11;
            if (id) id->i32[k] = (int32_t)(k % 5);
        }
    }
}

/* A step; what: whose log-probs, reference, versions, values and teacher are changed. after: the log-probs of all tokens, or their
 * values, by the new weights. */
static void step(enum change what, enum how how, struct metrics *m, float *after, int64_t *n) {
    struct rig r;
    struct batch b;
    struct packed_seq *seqs;
    uint8_t mask[ROWS * WIDTH];
    rig_open(&r);
    configure(&r.c.k, how);
    open_model(&r, trained(how));
    r.c.k.schedule = r.c.stage.schedule = PPO_ONE_STEP_OFF;
    trainer_case_configure(&r.c);
    make_batch(&r, &b);
    mask_by_hand(&r, &b, mask);
    add_teacher(&r, &b);
    *n = batch_find(&b, "responses")->off[ROWS];
    change(&b, what, mask);
    if (how == CRITIC) add_numbers(&r, &b, "old_log_probs", BATCH_F64, "old_log_probs");
    else OK(ppo_old_log_probs(&r.c.stage, &r.c.k.algorithm, &b)); /* a pass where the versions are not the policy's */
    OK(ppo_advantage(&r.c.stage, &r.c.k.algorithm, &r.kl, &b));
    OK(worker_local.update(&r.c.w.base, how == CRITIC ? &ppo_update_critic : &ppo_update_actor, &r.c.run, &b));
    OK(ppo_data_metrics(&r.c.stage, &r.c.k.data, &b));
    OK(ppo_sequences(&b, &seqs));
    OK(trained_model_forward(r.c.w.base.role[trained(how)].model, seqs, ROWS, r.c.k.rollout.logp_cut, 1,
                             (struct forward_out){.logp = how == CRITIC ? NULL : after, .value = how == CRITIC ? after : NULL}));
    *m = r.c.run.metrics;
    r.c.run.metrics = (struct metrics){0};
    free(seqs);
    batch_free(&b);
    rig_close(&r);
}

static bool is_time(const char *name) { return strstr(name, "timing") || strncmp(name, "perf/", 5) == 0 || strstr(name, "memory"); }

static int64_t differing(const struct metrics *a, const struct metrics *b, bool say) {
    int64_t n = a->n != b->n;
    for (int64_t i = 0; i < a->n && i < b->n; i++) {
        if (is_time(a->items[i].name) || memcmp(&a->items[i].value, &b->items[i].value, sizeof(double)) == 0) continue;
        if (say)
            fail_msg("%s is %.17g, and %.17g with other numbers at the environment's tokens", a->items[i].name, a->items[i].value,
                     b->items[i].value);
        n++;
    }
    return n;
}

static void environment_is_context_alone(void **state) {
    (void)state;
    for (int how = 0; how < N_HOW; how++) {
        struct metrics m[3];
        float logp[3][ROWS * WIDTH];
        int64_t n;
        double v;
        for (int k = 0; k < 3; k++) step((enum change)k, (enum how)how, &m[k], logp[k], &n);
        assert_int_equal(differing(&m[NOTHING], &m[ENVIRONMENT], true), 0);
        assert_memory_equal(logp[NOTHING], logp[ENVIRONMENT], (size_t)n * sizeof(float));
        assert_true(differing(&m[NOTHING], &m[POLICY], false) > 5); /* the comparison is one that fails */
        assert_memory_not_equal(logp[NOTHING], logp[POLICY], (size_t)n * sizeof(float));
        /* as verl counts: lengths with the environment's tokens, two tools' results are one turn */
        static const struct {
            const char *name;
            double value;
        } want[] = {{"response_length/max", 11},    {"response_length/min", 5}, {"response_length/mean", 47 / 6.0},
                    {"num_turns/min", 2},           {"num_turns/max", 6},       {"num_turns/mean", 23 / 6.0},
                    {"training/version_lag/max", 0}};
        for (size_t i = 0; i < sizeof want / sizeof *want; i++)
            if (!metrics_get(&m[ENVIRONMENT], want[i].name, &v) || fabs(v - want[i].value) > 1e-12)
                fail_msg("%s is %g, not %g", want[i].name, v, want[i].value);
        for (int k = 0; k < 3; k++) metrics_free(&m[k]);
    }
}

/* An agent loop's output may be empty, and one may begin with the environment's tokens: no stage minds. */
static void empty_and_led_by_the_environment(void **state) {
    (void)state;
    enum { N = 3 };
    static const int64_t lens[N] = {4, 0, 3}, pairs[N] = {4, 0, 2}, prompt[N] = {2, 2, 2}, uid[N] = {0, 0, 0};
    static const int32_t segments[] = {2, SEGMENT_ENVIRONMENT, 2, SEGMENT_POLICY, 3, SEGMENT_POLICY};
    static const double score[N] = {1, 0, 0.5};
    struct rig r;
    struct batch b, dropped;
    struct batch_col *c;
    double v;
    rig_open(&r);
    configure(&r.c.k, KL_LOSS);
    open_model(&r, VERLC_ACTOR);
    r.c.k.algorithm.adv = algo_adv_find("rloo");
    trainer_case_configure(&r.c);
    batch_init(&b, N);
    OK(batch_add(&b, "prompts", BATCH_I32, prompt, NULL, NULL));
    OK(batch_add(&b, "responses", BATCH_I32, lens, NULL, &c));
    for (int64_t t = 0; t < c->off[N]; t++) c->i32[t] = (int32_t)(5 + t);
    OK(batch_add(&b, "rollout_log_probs", BATCH_F32, lens, NULL, &c));
    for (int64_t t = 2; t < c->off[N]; t++) c->f32[t] = -1;
    OK(batch_add(&b, BATCH_SEGMENTS, BATCH_I32, pairs, segments, NULL));
    OK(batch_add(&b, "uid", BATCH_I64, NULL, uid, NULL));
    OK(batch_add(&b, "group", BATCH_I64, NULL, uid, NULL));
    OK(batch_add(&b, "score", BATCH_F64, NULL, score, NULL));
    OK(batch_add(&b, "ref_log_prob", BATCH_F64, lens, NULL, NULL));
    OK(ppo_reward(&r.c.stage, &r.c.k.reward, &b, &dropped));
    OK(ppo_old_log_probs(&r.c.stage, &r.c.k.algorithm, &b));
    OK(ppo_advantage(&r.c.stage, &r.c.k.algorithm, &r.kl, &b));
    OK(worker_local.update(&r.c.w.base, &ppo_update_actor, &r.c.run, &b));
    OK(ppo_data_metrics(&r.c.stage, &r.c.k.data, &b));
    static const struct {
        const char *name;
        double value;
    } want[] = {
        {"response/aborted_ratio", 1 / 3.0},           {"response_length/min", 0},     {"response_length_non_aborted/min", 3},
        {"response_length_non_aborted/mean", 3.5},     {"critic/score/mean", 1.5 / 2}, {"critic/score/min", 0.5},
        {"critic/advantages/max", 1 - (0.5 + 0) / 2.0}};
    for (size_t i = 0; i < sizeof want / sizeof *want; i++)
        if (!metrics_get(&r.c.run.metrics, want[i].name, &v) || fabs(v - want[i].value) > 1e-9)
            fail_msg("%s is %g, not %g", want[i].name, v, want[i].value);
    batch_free(&b);
    rig_close(&r);
}

/* ---- how conversations with tools go ---- */

static void tools_as_shares(void **state) {
    (void)state;
    static const char *const records[ROWS] = {
        "{\"end\": \"stop\", \"malformed\": 1, \"calls\": [{\"status\": \"ok\", \"truncated\": true}, {\"status\": \"error\"}]}",
        "{\"end\": \"max_user_turns\", \"malformed\": 0, \"calls\": [{\"status\": \"timeout\", \"truncated\": false}]}",
        "{\"end\": \"refused\", \"malformed\": 0, \"calls\": []}",
        "{\"end\": \"max_assistant_turns\", \"malformed\": 0, \"calls\": [{\"status\": \"ok\"}]}",
        "{\"end\": \"timeout\", \"malformed\": 0, \"calls\": []}",
        "null"};
    static const struct {
        const char *name;
        double value;
    } want[] = {{"tool_errors", 2 / 4.0},    {"truncated_results", 1 / 4.0}, {"malformed_calls", 1 / 5.0},
                {"turns_at_limit", 2 / 5.0}, {"refused", 1 / 5.0},           {"failed", 1 / 5.0}};
    struct batch b;
    struct metrics m = {0};
    struct batch_col *c;
    batch_init(&b, ROWS);
    ppo_episode_metrics(&m, &b);
    OK(batch_add(&b, BATCH_EPISODE, BATCH_JSON, NULL, NULL, &c));
    ppo_episode_metrics(&m, &b);
    assert_int_equal(m.n, 0); /* without tools nothing is said */
    for (int64_t i = 0; i < ROWS; i++) {
        json_decref(c->json[i]);
        c->json[i] = json_loads(records[i], JSON_DECODE_ANY, NULL);
        assert_non_null(c->json[i]);
    }
    ppo_episode_metrics(&m, &b);
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        char name[64];
        double v = NAN;
        snprintf(name, sizeof name, "agent_loop/%s/mean", want[i].name);
        if (!metrics_get(&m, name, &v) || v != want[i].value) fail_msg("%s is %g, not %g", name, v, want[i].value);
    }
    assert_int_equal(m.n, sizeof want / sizeof *want);
    metrics_free(&m);
    batch_free(&b);
}

/* ---- run.db ---- */

static void add_strings(struct batch *b, const char *name, const char *value) {
    struct batch_col *c;
    OK(batch_add(b, name, BATCH_STR, NULL, NULL, &c));
    for (int64_t i = 0; i < ROWS; i++) batch_set_str(c, i, value, strlen(value));
}

static void recorded_in_run_db(void **state) {
    (void)state;
    static const char json[] = "{\"decoder\": {\"type\": \"ByteLevel\"}, \"model\": {\"type\": \"BPE\", \"merges\": [], \"vocab\": "
                               "{\"a\": 9, \"b\": 10, \"c\": 11, \"d\": 12}}}";
    struct rig r;
    struct batch b;
    struct tokenizer *tok;
    sqlite3 *db;
    sqlite3_stmt *st;
    int64_t index[ROWS] = {0, 1, 2, 0, 1, 2};
    rig_open(&r);
    OK(tokenizer_open_bytes(&tok, json, sizeof json - 1, "test"));
    make_batch(&r, &b);
    add_strings(&b, "text", "abc");
    add_strings(&b, "finish", "stop");
    add_strings(&b, "reward_status", "score");
    OK(batch_add(&b, "reward_extra_info", BATCH_JSON, NULL, NULL, NULL));
    OK(batch_add(&b, "sample_index", BATCH_I64, NULL, index, NULL));
    ppo_record(&r.c.stage, tok, &b, &r.c.k.rollout.train, false);
    OK(track_flush(r.c.run.track));
    char *path = file_join(r.c.dir, "run.db");
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    assert_int_equal(sqlite3_prepare_v2(db, "SELECT segments FROM samples ORDER BY id", -1, &st, NULL), SQLITE_OK);
    const struct batch_col *c = batch_find(&b, BATCH_SEGMENTS);
    for (int64_t i = 0; i < ROWS; i++) {
        assert_int_equal(sqlite3_step(st), SQLITE_ROW);
        assert_int_equal(sqlite3_column_bytes(st, 0), batch_len(c, i) * 4);
        assert_memory_equal(sqlite3_column_blob(st, 0), c->i32 + c->off[i], (size_t)batch_len(c, i) * 4);
    }
    assert_int_equal(sqlite3_step(st), SQLITE_DONE);
    sqlite3_finalize(st);
    sqlite3_close(db);
    free(path);
    tokenizer_close(tok);
    batch_free(&b);
    rig_close(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(estimators_like_verl),
                                       cmocka_unit_test(episodes_have_one_score),
                                       cmocka_unit_test(environment_is_context_alone),
                                       cmocka_unit_test(empty_and_led_by_the_environment),
                                       cmocka_unit_test(tools_as_shares),
                                       cmocka_unit_test(recorded_in_run_db)};
    return cmocka_run_group_tests_name("segments", tests, NULL, NULL);
}
