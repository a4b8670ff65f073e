/* test_train_gradient.c - inv03: the gradient of a mini-batch does not depend on
 * how it is cut into micro-batches, for every loss_agg_mode, by samples and by
 * tokens, packed together or one by one, with and without entropy and KL. */
#include "model_case.h"

#include "algo/micro_batch_balance.h"
#include "algo/policy_loss.h"
#include "base/rng.h"
#include "train/activation_recompute.h"
#include "train/trained_model.h"

enum { N = 11, MAX_LEN = 70, VOCAB = 100 };
static const int64_t PROMPT[N] = {1, 5, 40, 9, 2, 17, 30, 3, 8, 1, 12}, RESPONSE[N] = {69, 3, 20, 1, 33, 17, 40, 8, 2, 64, 11};

#define EACH(i, array) for (size_t i = 0; i < sizeof(array) / sizeof *(array); i++)

static const char *const AGG_MODES[] = {"token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm",
                                        "seq-mean-token-mean"};

struct rig {
    struct model_case c;
    struct trained_model *actor;
    struct packed_seq seqs[N];
    int32_t ids[N][MAX_LEN];
    int64_t off[N + 1];
    /* per token of the mini-batch */
    uint8_t mask[N * MAX_LEN];
    double old[N * MAX_LEN], ref[N * MAX_LEN], adv[N * MAX_LEN], logp[N * MAX_LEN], entropy[N * MAX_LEN], dlogp[N * MAX_LEN],
        dentropy[N * MAX_LEN];
    struct algo_agg agg;
    bool regularized; /* entropy bonus and KL loss */
    double loss;
    int64_t n_told; /* micro-batches of the pass */
};

static void rig_open(struct rig *r, const char *backend) {
    case_open(&r->c, &(struct case_args){"qwen2", backend, 2, DT_F32, MODEL_TRAIN});
    const struct trained_model_args a = {
        .dev = &r->c.dev, .model = r->c.m, .train = true, .keep = MODEL_KEEP_LAYER, .max_rows = N * MAX_LEN, .max_seqs = N};
    OK(trained_model_create(&r->actor, &a));
    struct rng rng = {.seed = 6, .stream = RNG_TEST};
    r->off[0] = 0;
    for (int64_t i = 0; i < N; i++) {
        const int64_t n = PROMPT[i] + RESPONSE[i];
        assert_true(n <= MAX_LEN);
        for (int64_t t = 0; t < n; t++) r->ids[i][t] = (int32_t)rng_below(&rng, VOCAB);
        r->seqs[i] = (struct packed_seq){.ids = r->ids[i], .n = n, .first = PROMPT[i]};
        r->off[i + 1] = r->off[i] + RESPONSE[i];
    }
    const struct micro_batch_limits all = {.max_seqs = N};
    float logp[N * MAX_LEN];
    OK(trained_model_forward(r->actor, r->seqs, N, all, 1, (struct forward_out){.logp = logp}));
    for (int64_t i = 0; i < N; i++) {
        const double adv = (double)rng_normal(&rng);
        for (int64_t t = r->off[i]; t < r->off[i + 1]; t++) {
            r->mask[t] = rng_below(&rng, 8) != 0; /* some tokens are not the policy's */
            r->old[t] = (double)logp[t] + 0.3 * (double)rng_normal(&rng);
            r->ref[t] = (double)logp[t] + 0.3 * (double)rng_normal(&rng);
            r->adv[t] = adv;
        }
    }
}

static void rig_close(struct rig *r) {
    trained_model_destroy(r->actor);
    case_close(&r->c);
}

static int loss_fn(void *arg, const struct micro_loss *m) {
    struct rig *r = arg;
    const int64_t t0 = m->t0, t1 = m->t1;
    const struct algo_ragged ragged = {.n = m->hi - m->lo, .off = r->off + m->lo, .mask = r->mask};
    struct algo_kl_type kl;
    double loss;
    assert_true(r->off[m->lo] == t0 && r->off[m->hi] == t1);
    TRY(algo_kl_find(&kl, "low_var_kl"));
    for (int64_t t = t0; t < t1; t++) {
        r->logp[t] = (double)m->out[t - t0];
        r->entropy[t] = (double)m->entropy[t - t0];
    }
    const struct algo_actor_args a = {
        .policy =
            {.r = &ragged, .old_logp = r->old, .logp = r->logp, .advantages = r->adv, .agg = r->agg, .cfg = algo_policy_defaults()},
        .loss_mode = algo_policy_find("vanilla"),
        .entropy = r->entropy,
        .entropy_coeff = r->regularized ? 0.01 : 0,
        .ref_logp = r->regularized ? r->ref : NULL,
        .kl_loss_type = &kl,
        .kl_loss_coef = 0.1};
    TRY(algo_actor_loss(&a, &loss, r->dlogp, r->dentropy, NULL));
    for (int64_t t = t0; t < t1; t++) {
        m->dout[t - t0] = (float)r->dlogp[t];
        if (m->dentropy) m->dentropy[t - t0] = (float)r->dentropy[t];
    }
    return buf_add(m->record, &loss, sizeof loss);
}

/* Every micro-batch once, in order, with what its loss has told. */
static int told_fn(void *arg, const struct pack_micro *m, const void *record, size_t n) {
    struct rig *r = arg;
    assert_int_equal(n, sizeof(double));
    assert_int_equal(m->index, r->n_told++);
    assert_true(r->off[m->lo] == m->t0 && r->off[m->hi] == m->t0 + m->n_targets);
    r->loss += *(const double *)record;
    return 0;
}

/* The flat gradient under a cut; caller frees. */
static float *gradient(struct rig *r, struct micro_batch_limits cut, int64_t *n_micro) {
    const size_t bytes = (size_t)r->c.m->n_elems * sizeof(float);
    struct step_result res;
    const struct mini_batch a = {.seqs = r->seqs,
                                 .n = N,
                                 .cut = cut,
                                 .temperature = 1,
                                 .entropy = true,
                                 .entropy_grad = r->regularized,
                                 .loss = loss_fn,
                                 .on_record = told_fn,
                                 .arg = r};
    float *g = xmalloc(bytes);
    r->loss = 0;
    r->n_told = 0;
    OK(trained_model_backward(r->actor, &a, &res));
    OK(dev_copy_out(&r->c.dev, g, trained_model_grads(r->actor), bytes));
    *n_micro = res.n_micro;
    assert_int_equal(r->n_told, res.n_micro);
    return g;
}

static int64_t valid(const struct rig *r) {
    int64_t n = 0;
    for (int64_t t = 0; t < r->off[N]; t++) n += r->mask[t];
    return n;
}

static void inv03_micro_batches(void **state) {
    (void)state;
    static const char *const backends[] = {"ref", "cpu", "cuda"};
    static int64_t ends[] = {2, 5, 6, N};
    static const struct {
        struct micro_batch_limits cut;
        int64_t n_micro;
    } cuts[] = {{{.max_rows = 200, .ends = ends}, 4},
                {{.max_seqs = 1}, 11},
                {{.max_seqs = 3}, 4},
                {{.max_rows = 100}, 5},
                {{.max_rows = 1}, 11},
                {{.max_rows = 800}, 1}};
    struct rig *r = xcalloc(1, sizeof *r);
    EACH(b, backends) {
        if (!case_has(backends[b])) continue;
        rig_open(r, backends[b]);
        EACH(m, AGG_MODES) for (int regularized = 0; regularized < 2; regularized++) {
            int64_t n_micro;
            double worst = 0, worst_loss = 0;
            r->regularized = regularized;
            r->agg = (struct algo_agg){
                .mode = algo_agg_find(AGG_MODES[m]), .batch_num_tokens = valid(r), .global_batch_size = N, .width = MAX_LEN};
            float *all = gradient(r, (struct micro_batch_limits){.max_seqs = N}, &n_micro);
            const double loss = r->loss;
            assert_int_equal(n_micro, 1);
            assert_true(case_nmse(all, all, r->c.m->n_elems) == 0);
            double size = 0;
            for (int64_t k = 0; k < r->c.m->n_elems; k++) size += (double)all[k] * (double)all[k];
            assert_true(sqrt(size) > 1e-3);
            EACH(c, cuts) {
                float *g = gradient(r, cuts[c].cut, &n_micro);
                assert_int_equal(n_micro, cuts[c].n_micro);
                worst = worse_of(worst, sqrt(case_nmse(g, all, r->c.m->n_elems)));
                worst_loss = fmax(worst_loss, fabs(r->loss - loss) / fmax(1, fabs(loss)));
                free(g);
            }
            print_message("%s %-24s %s: gradient %.1e relative, loss %.1e\n", backends[b], AGG_MODES[m],
                          regularized ? "with entropy and KL" : "policy loss alone  ", worst, worst_loss);
            assert_true(worst <= 1e-6);       /* the bar: fp32 sums of up to 11 parts in another order */
            assert_true(worst_loss <= 1e-12); /* fp64 sums of the same log-probs */
            free(all);
        }
        rig_close(r);
    }
    free(r);
}

/* In a block that other phases use between updates, whatever they leave there: the bits of memory of its own. */
static void gradients_in_a_shared_block(void **state) {
    (void)state;
    static const char *const backends[] = {"ref", "cpu", "cuda"};
    const struct micro_batch_limits cut = {.max_seqs = 3};
    struct rig *r = xcalloc(1, sizeof *r);
    EACH(b, backends) {
        if (!case_has(backends[b])) continue;
        rig_open(r, backends[b]);
        r->agg = (struct algo_agg){
            .mode = algo_agg_find(AGG_MODES[0]), .batch_num_tokens = valid(r), .global_batch_size = N, .width = MAX_LEN};
        struct trained_model *const own = r->actor;
        const size_t bytes = (size_t)r->c.m->n_elems * sizeof(float);
        for (int64_t chunk = 1; chunk <= 2; chunk++) {
            struct trained_model_args a = {.dev = &r->c.dev,
                                           .model = r->c.m,
                                           .train = true,
                                           .keep = MODEL_KEEP_LAYER,
                                           .max_rows = N * MAX_LEN,
                                           .max_seqs = N,
                                           .grad_chunk = chunk};
            struct trained_model *apart;
            int64_t n_micro;
            OK(trained_model_create(&apart, &a));
            r->actor = apart;
            float *const want = gradient(r, cut, &n_micro);
            assert_int_equal(n_micro, 4);
            trained_model_destroy(apart);
            a.grads = bytes + 100;
            a.chunk = chunk > 1 ? bytes : 0;
            const size_t n_block = trained_model_block_bytes(&r->c.m->cfg, DT_F32, &a);
            assert_true(n_block >= (size_t)chunk * bytes);
            void *junk = xmalloc(n_block);
            memset(junk, 0xff, n_block); /* NaN */
            OK(dev_alloc(&r->c.dev, n_block, &a.block));
            OK(trained_model_create(&r->actor, &a));
            for (int update = 0; update < 2; update++) {
                OK(dev_copy_in(&r->c.dev, a.block, junk, n_block));
                float *const g = gradient(r, cut, &n_micro);
                assert_memory_equal(g, want, bytes);
                free(g);
            }
            trained_model_destroy(r->actor);
            dev_free(&r->c.dev, a.block, n_block);
            free(junk);
            free(want);
        }
        r->actor = own;
        rig_close(r);
    }
    free(r);
}

/* However many logits a mini-batch keeps, and in however many parts its micro-batches are: the bits of none kept. Passes without
 * backward change nothing that is kept. */
static void kept_logits(void **state) {
    (void)state;
    static const char *const backends[] = {"ref", "cpu", "cuda"};
    static const int64_t logits[] = {1, 129, INT64_MAX}, parts[] = {1, 3};
    struct rig *r = xcalloc(1, sizeof *r);
    float logp[N * MAX_LEN];
    EACH(b, backends) {
        if (!case_has(backends[b])) continue;
        rig_open(r, backends[b]);
        r->regularized = true;
        r->agg = (struct algo_agg){
            .mode = algo_agg_find(AGG_MODES[0]), .batch_num_tokens = valid(r), .global_batch_size = N, .width = MAX_LEN};
        struct trained_model *const own = r->actor;
        EACH(p, parts) {
            struct trained_model_args a = {.dev = &r->c.dev,
                                           .model = r->c.m,
                                           .train = true,
                                           .keep = MODEL_KEEP_ALL,
                                           .parts = parts[p],
                                           .max_rows = N * MAX_LEN,
                                           .max_seqs = N};
            float *want = NULL;
            for (size_t k = 0; k <= sizeof logits / sizeof *logits; k++) {
                int64_t n_micro;
                a.keep.logits = k ? logits[k - 1] : 0;
                OK(trained_model_create(&r->actor, &a));
                const struct micro_batch_limits all = {.max_seqs = N};
                OK(trained_model_forward(r->actor, r->seqs, N, all, 1, (struct forward_out){.logp = logp}));
                float *const g = gradient(r, (struct micro_batch_limits){.max_seqs = N - 2}, &n_micro);
                if (want) assert_memory_equal(g, want, (size_t)r->c.m->n_elems * sizeof(float));
                else want = g;
                if (g != want) free(g);
                trained_model_destroy(r->actor);
            }
            free(want);
        }
        r->actor = own;
        rig_close(r);
    }
    free(r);
}

/* What a plan keeps of them: what fits, and only behind all activations. */
static void kept_logits_fit(void **state) {
    (void)state;
    struct rig *r = xcalloc(1, sizeof *r);
    rig_open(r, "ref");
    const struct model_config *const c = &r->c.m->cfg;
    struct dev *const d = &r->c.dev;
    const size_t one = model_kept_bytes(c, 1);
    assert_true(one == (size_t)dev_kept_cols(c->vocab) * DEV_KEPT_ROWS * sizeof(float));
    for (int64_t room = 0; room < 4; room++) {
        const struct model_keep k = train_keep_logits(MODEL_KEEP_ALL, d, c, DT_F32, 300, (size_t)room * one + one / 2);
        const size_t without = model_acts_bytes(c, DT_F32, 300, MODEL_KEEP_ALL);
        assert_int_equal(k.logits, (room < 3 ? room : 3) * DEV_KEPT_ROWS);
        assert_true(model_acts_bytes(c, DT_F32, 300, k) == without + model_kept_bytes(c, k.logits));
    }
    assert_int_equal(train_keep_logits(MODEL_KEEP_LAYER, d, c, DT_F32, 300, 9 * one).logits, 0);
    rig_close(r);
    free(r);
}

/* The micro-batches that micro_batch_order names are those that micro_batch_next takes, in whatever order the rows came. */
static void balanced_micro_batches(void **state) {
    (void)state;
    const struct pack p = {.max_rows = N * MAX_LEN, .max_seqs = N};
    struct packed_seq seqs[N];
    int64_t order[N], len[N], total = 0;
    uint64_t seen = 0;
    struct micro_batch_limits cut = {.max_rows = 60}; /* below the longest row, which raises it to 70 */
    for (int64_t i = 0; i < N; i++) {
        order[i] = N - 1 - i;
        len[i] = PROMPT[order[i]] + RESPONSE[order[i]];
        total += len[i];
    }
    OK(micro_batch_order(&cut, len, order, N));
    for (int64_t i = 0; i < N; i++) {
        seqs[i] = (struct packed_seq){.n = PROMPT[order[i]] + RESPONSE[order[i]]};
        seen |= UINT64_C(1) << order[i];
    }
    assert_true(seen == (UINT64_C(1) << N) - 1);
    int64_t n_micro = 0;
    struct pack_micro m;
    for (int64_t lo = 0; lo < N; lo = m.hi, n_micro++) {
        OK(micro_batch_next(&p, seqs, N, lo, cut, &m));
        assert_int_equal(m.hi, cut.ends[n_micro]);
        assert_true(m.n_rows <= 70);
    }
    assert_true((total + 69) / 70 == 6 && n_micro == 8); /* these lengths can be packed so; a number that ranks share evenly */
    free(cut.ends);
}

/* Random lengths: limits hold, every row has one place, the count is the least that ranks share evenly, the first has the most
 * work, and with as many rows as the limit takes no micro-batch is far from another. */
static void update_micro_batches(void **state) {
    (void)state;
    enum { MOST = 400 };
    static const int64_t up[] = {0, 1, 2, 4, 4, 8, 8, 8, 8, 16};
    struct rng g = {.seed = 5, .stream = RNG_TEST};
    for (int round = 0; round < 300; round++) {
        int64_t len[MOST], row[MOST], end[MOST], n_micro, first = 0, worst = 0;
        bool seen[MOST] = {false};
        const int64_t n = 1 + (int64_t)rng_below(&g, MOST), by = 1 + (int64_t)rng_below(&g, 20),
                      tokens = 1000 + (int64_t)rng_below(&g, 3000);
        for (int64_t i = 0; i < n; i++) len[i] = 1 + (int64_t)rng_below(&g, 1000);
        const bool by_rows = round % 2;
        const struct algo_update_rows u = {.len = len, .n = n, .max_rows = by_rows ? by : 0, .max_tokens = by_rows ? 0 : tokens};
        OK(algo_update_micro_batches(&u, row, end, &n_micro));
        for (int64_t b = 0, at = 0; b < n_micro; b++) {
            int64_t sum = 0, work = 0;
            assert_true(end[b] > at && (!by_rows || end[b] - at <= by));
            for (; at < end[b]; at++) {
                assert_false(seen[row[at]]);
                seen[row[at]] = true;
                sum += len[row[at]];
                work += 24576 * len[row[at]] + len[row[at]] * len[row[at]];
            }
            assert_true(by_rows || sum <= tokens);
            if (b == 0) first = work;
            assert_true(work <= first);
            worst = work;
        }
        assert_int_equal(end[n_micro - 1], n);
        assert_true(n_micro == n || (n_micro <= 8 ? (n_micro & (n_micro - 1)) == 0 : n_micro % 8 == 0));
        const int64_t least = (n + by - 1) / by;
        if (by_rows) assert_int_equal(n_micro, algo_update_micro_batch_count(n, by)); /* what a plan says of them */
        if (by_rows)
            assert_int_equal(n_micro, least < 9                 ? (up[least] < n ? up[least] : n)
                                      : (least + 7) / 8 * 8 < n ? (least + 7) / 8 * 8
                                                                : n);
        if (n / n_micro >= 4) assert_true((double)(first - worst) <= 0.1 * (double)first);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(inv03_micro_batches),
                                       cmocka_unit_test(gradients_in_a_shared_block),
                                       cmocka_unit_test(kept_logits),
                                       cmocka_unit_test(kept_logits_fit),
                                       cmocka_unit_test(balanced_micro_batches),
                                       cmocka_unit_test(update_micro_batches)};
    return cmocka_run_group_tests_name("micro-batches", tests, NULL, NULL);
}
