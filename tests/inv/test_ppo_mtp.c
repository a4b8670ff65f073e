/* test_ppo_mtp.c - training of the MTP layer: detached, everything else is trained to the bits that it has without; micro-batches
 * change its gradient by rounding alone; and trained on repetitive text it drafts what is drawn, with the bits of a generation
 * without drafts. */
#include "model_case.h"

#include "engine/engine.h"
#include "train/trained_model.h"

enum { SEQS = 8, LEN = 40, PERIOD = 5 };

struct text {
    int32_t ids[SEQS][LEN];
    uint8_t mask[SEQS][LEN];
    struct packed_seq seqs[SEQS];
};

/* Sequences that repeat PERIOD tokens; the tokens of one half are those of the other, in another order. */
static void write_text(struct text *t, uint64_t seed) {
    for (int i = 0; i < SEQS; i++) {
        for (int k = 0; k < LEN; k++) {
            t->ids[i][k] = 3 + (int32_t)((seed + (uint64_t)i) % 4) * 8 + (i + k) % PERIOD;
            t->mask[i][k] = k >= 3 && (i + k) % 11 != 0;
        }
        t->seqs[i] = (struct packed_seq){.ids = t->ids[i], .n = LEN - i, .mask = t->mask[i]};
    }
}

static int loss(void *arg, const struct micro_loss *m) {
    const double targets = *(const double *)arg;
    for (int64_t i = 0; i < m->t1 - m->t0; i++) m->dout[i] = (float)(-1 / targets);
    return 0;
}

static const struct optim_config optim = {
    .kind = OPTIM_ADAMW, .lr = 3e-3, .beta1 = 0.9, .beta2 = 0.98, .eps = 1e-8, .weight_decay = 0.01, .clip = 1};

struct trained {
    struct dev dev;
    struct model *m;
    struct trained_model *t;
};

static void open_trained(struct trained *x, const char *name, bool mtp, bool detached, double weight) {
    char *dir = case_path(name, "");
    *x = (struct trained){0};
    case_dev(&x->dev, "cpu", 2);
    OK(model_open(&x->m, &x->dev,
                  &(struct model_open_args){
                      .dir = dir, .act = DT_F32, .flags = MODEL_TRAIN, .max_len = 128, .mtp = mtp, .mtp_detached = detached}));
    OK(trained_model_create(&x->t, &(struct trained_model_args){.dev = &x->dev,
                                                                .model = x->m,
                                                                .train = true,
                                                                .keep = MODEL_KEEP_LAYER,
                                                                .max_rows = SEQS * LEN,
                                                                .max_seqs = SEQS,
                                                                .optim = &optim,
                                                                .mtp_loss = weight}));
    free(dir);
}
static void close_trained(struct trained *x) {
    trained_model_destroy(x->t);
    model_close(x->m);
    assert_int_equal(x->dev.allocated, 0);
    dev_close(&x->dev);
}

static struct mini_batch batch_of(const struct text *t, double *targets, int64_t cut) {
    *targets = 0;
    for (int i = 0; i < SEQS; i++) *targets += (double)packed_seq_targets(&t->seqs[i]);
    return (struct mini_batch){
        .seqs = t->seqs, .n = SEQS, .cut = {.max_seqs = cut}, .temperature = 1, .loss = loss, .arg = targets};
}

static double step(struct trained *x, uint64_t seed) {
    struct text t;
    struct step_result r;
    double targets;
    write_text(&t, seed);
    const struct mini_batch b = batch_of(&t, &targets, 4);
    OK(trained_model_step(x->t, &b, &optim, optim.lr, &r));
    assert_true(isfinite(r.optim.grad_norm) && r.optim.grad_norm > 0);
    return r.mtp.n > 0 ? -r.mtp.logp / (double)r.mtp.n : NAN;
}

static void check_detached(const char *name) {
    struct trained with, without;
    struct optim_config no_clip = optim;
    struct step_result r;
    struct text t;
    double targets;
    no_clip.clip = 0; /* of the norm of all gradients */
    open_trained(&with, name, true, true, 0.3);
    open_trained(&without, name, false, false, 0);
    const int64_t n = without.m->n_elems;
    for (int i = 0; i < 3; i++) {
        write_text(&t, (uint64_t)i);
        const struct mini_batch b = batch_of(&t, &targets, 3);
        OK(trained_model_step(with.t, &b, &no_clip, 1e-3, &r));
        assert_true(r.mtp.n > 0 && (double)r.mtp.n <= targets);
        OK(trained_model_step(without.t, &b, &no_clip, 1e-3, &r));
        assert_true(r.mtp.n == 0);
    }
    assert_memory_equal(with.m->master, without.m->master, (size_t)n * sizeof(float));
    struct trained untouched;
    open_trained(&untouched, name, true, true, 0.3);
    int64_t changed = 0;
    for (int64_t i = n; i < with.m->n_elems; i++) changed += with.m->master[i] != untouched.m->master[i];
    assert_true(changed > (with.m->n_elems - n) * 9 / 10);
    close_trained(&untouched);
    close_trained(&with);
    close_trained(&without);
}

/* One micro-batch, and one a sequence. */
static void check_micro_batches(const char *name) {
    struct trained x;
    struct text t;
    struct step_result r;
    double targets, size = 0, worst = 0;
    open_trained(&x, name, true, false, 0.3);
    const int64_t n = x.m->n_elems;
    float *const first = xmalloc((size_t)n * sizeof *first);
    write_text(&t, 1);
    for (int i = 0; i < 2; i++) {
        const struct mini_batch b = batch_of(&t, &targets, i ? 1 : SEQS);
        OK(trained_model_backward(x.t, &b, &r));
        assert_int_equal(r.n_micro, i ? SEQS : 1);
        if (i == 0) memcpy(first, trained_model_grads(x.t), (size_t)n * sizeof *first);
    }
    for (int64_t i = 0; i < n; i++) {
        size = fmax(size, fabs((double)first[i]));
        worst = fmax(worst, fabs((double)first[i] - (double)trained_model_grads(x.t)[i]));
    }
    assert_true(size > 0 && worst / size < 1e-5); /* sums of some hundred f32 in another order */
    free(first);
    close_trained(&x);
}

/* ---- drafts ---- */

struct drawn {
    int32_t ids[64];
    float logp[64];
    int64_t n;
};
static int take(void *arg, const struct engine_sample *s) {
    struct drawn *const d = (struct drawn *)arg + (intptr_t)s->user;
    d->n = s->n;
    memcpy(d->ids, s->ids, (size_t)s->n * sizeof *d->ids);
    memcpy(d->logp, s->logp, (size_t)s->n * sizeof *d->logp);
    return 0;
}

static double generate(struct trained *x, enum engine_draft draft, struct drawn out[SEQS]) {
    struct decoder *d;
    struct engine *e;
    struct text t;
    write_text(&t, 2);
    struct decoder_args a = {.max_rows = 64, .max_seqs = SEQS, .max_len = 128, .max_draft = 2};
    a = decoder_size(&x->dev, &x->m->cfg, x->m->act, &a, SIZE_MAX);
    a.model = x->m;
    OK(decoder_open(&d, &a));
    OK(decoder_engine(&e, d, &(struct engine_config){.draft = draft, .done = take, .done_arg = out}));
    for (intptr_t i = 0; i < SEQS; i++)
        OK(engine_submit(e,
                         &(struct engine_request){.prompt = t.ids[i],
                                                  .n_prompt = 12 + i,
                                                  .n = 1,
                                                  .max_tokens = 60,
                                                  .temperature = 1,
                                                  .top_p = 1,
                                                  .repetition_penalty = 1,
                                                  .seed = 4,
                                                  .uid = (uint64_t)i,
                                                  .ignore_eos = true,
                                                  .user = (void *)i},
                         NULL));
    OK(engine_run(e));
    const struct engine_stats s = engine_stats(e);
    engine_destroy(e);
    decoder_close(d);
    return s.verified > 0 ? 1 + (double)s.accepted / (double)s.verified : 0;
}

static void check_drafts(const char *name) {
    static struct drawn with[SEQS], without[SEQS];
    struct trained x;
    double first = 0, last = 0;
    open_trained(&x, name, true, false, 0.3);
    const double before = generate(&x, ENGINE_DRAFT_ALWAYS, with);
    for (uint64_t i = 0; i < 60; i++) {
        last = step(&x, i);
        if (i == 0) first = last;
    }
    const double after = generate(&x, ENGINE_DRAFT_ALWAYS, with);
    assert_true(generate(&x, ENGINE_DRAFT_NEVER, without) == 0);
    print_message("%s: MTP loss %.2f, after 60 steps %.3f; %.2f tokens a verifying step, then %.2f\n", name, first, last, before,
                  after);
    assert_true(last < 0.3 && first > 3 && before < 1.5 && after > 2);
    for (int i = 0; i < SEQS; i++) {
        assert_int_equal(with[i].n, 60);
        assert_memory_equal(with[i].ids, without[i].ids, sizeof(int32_t) * 60);
        assert_memory_equal(with[i].logp, without[i].logp, sizeof(float) * 60);
    }
    close_trained(&x);
}

static const char *const models[] = {"mimo", "qwen3_5_mtp", "qwen3_5_mtp_experts"};
static void detached_changes_nothing_else(void **state) {
    (void)state;
    for (int i = 0; i < 3; i++) check_detached(models[i]);
}
static void micro_batches_change_rounding(void **state) {
    (void)state;
    for (int i = 0; i < 3; i++) check_micro_batches(models[i]);
}
static void learns_to_draft(void **state) {
    (void)state;
    for (int i = 0; i < 3; i++) check_drafts(models[i]);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(detached_changes_nothing_else),
                                       cmocka_unit_test(micro_batches_change_rounding), cmocka_unit_test(learns_to_draft)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
