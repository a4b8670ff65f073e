/* test_ppo_distillation.c - on-policy distillation through whole models beside transformers and verl's loss: what the
 * teacher says, the loss, and the gradient of every parameter of the student, for a loss over the teacher's list and
 * for an estimator, on every backend and under several cuts.  The fixtures come from tools/oracle_distill.py. */
#include "model_case.h"

#include "algo/distillation.h"
#include "ppo/stages/stages.h"

static const double MAX_REL = 1e-5, MAX_NMSE = 1e-9; /* the bars of the project in fp32 */

enum { MAX_LEN = 128, MAX_SEQS = 8, TOPK = 7 };
static const float TEMPERATURE = 0.8f; /* the student's; the teacher's is 1 */

static const char *const BACKENDS[] = {"ref", "cpu", "cuda"};
#define EACH(i, list) for (size_t i = 0; i < sizeof(list) / sizeof((list)[0]); i++)
#define EACH_BACKEND(i) EACH(i, BACKENDS) if (case_has(BACKENDS[i]))

struct rig {
    struct dev dev;
    struct safetensors_file *want;
    struct model *student, *teacher;
    struct packed_seq seqs[MAX_SEQS];
    int64_t n_seqs, n, off[MAX_SEQS + 1]; /* response tokens */
    struct ppo_config k;                  /* of distillation alone */
    struct ppo_worker worker;             /* its student alone */
    struct distill_batch distill;
    double *logp, *dlogp, loss;
};

static void rig_open(struct rig *r, const char *backend, const char *mode) {
    *r = (struct rig){.n = 0};
    char *path = xasprintf("%s/algo/distill_%s.safetensors", FIXTURES, mode), *student = case_path("qwen2", ""),
         *teacher = case_path("llama", "");
    OK(safetensors_open(&r->want, path));
    case_dev(&r->dev, backend, 2);
    OK(model_open(&r->student, &r->dev,
                  &(struct model_open_args){.dir = student, .act = DT_F32, .flags = MODEL_TRAIN, .max_len = MAX_LEN}));
    OK(model_open(&r->teacher, &r->dev, &(struct model_open_args){.dir = teacher, .act = DT_F32, .max_len = MAX_LEN}));
    free(path);
    free(student);
    free(teacher);
    const int32_t *ids = case_data(r->want, "ids", DT_I32, NULL), *first = case_data(r->want, "first", DT_I32, &r->n_seqs),
                  *q_start = case_data(r->want, "q_start", DT_I32, NULL);
    for (int64_t i = 0; i < r->n_seqs; i++) {
        r->seqs[i] = (struct packed_seq){.ids = ids + q_start[i], .n = q_start[i + 1] - q_start[i], .first = first[i]};
        r->off[i + 1] = r->off[i] + packed_seq_targets(&r->seqs[i]);
    }
    r->n = r->off[r->n_seqs];
    r->logp = xcalloc((size_t)r->n * 2, sizeof *r->logp);
    r->dlogp = r->logp + r->n;
    struct ppo_distill_config *c = &r->k.distill;
    *c = (struct ppo_distill_config){.enable = true, .topk = TOPK};
    OK(algo_distill_find(&c->loss, mode));
    r->worker.base.vocab = r->student->cfg.vocab;
}

static void rig_close(struct rig *r) {
    model_close(r->student);
    model_close(r->teacher);
    safetensors_close(r->want);
    free(r->logp);
    assert_int_equal(r->dev.allocated, 0);
    dev_close(&r->dev);
}

/* The teacher's columns of a batch, as golden. */
static void ask_teacher(struct rig *r, struct batch *b, struct micro_batch_limits cut) {
    const int64_t k = memory_plan_distill_list(&r->k.distill), per = k > 0 ? k : 1;
    int64_t lens[MAX_SEQS], tokens[MAX_SEQS];
    struct trained_model *teacher;
    const struct trained_model_args a = {
        .dev = &r->dev, .model = r->teacher, .max_rows = r->n_seqs * MAX_LEN, .max_seqs = r->n_seqs, .list = k};
    float *logp = xcalloc((size_t)(r->n * per), sizeof *logp);
    int32_t *id = xcalloc((size_t)(r->n * per), sizeof *id);
    const struct token_lists list = {.top_id = id, .top_logp = logp};
    OK(trained_model_create(&teacher, &a));
    const struct forward_out out = {.logp = k > 0 ? NULL : logp, .list = k > 0 ? &list : NULL};
    OK(trained_model_forward(teacher, r->seqs, r->n_seqs, cut, 1, out));
    trained_model_destroy(teacher);
    int64_t n;
    const double worst = case_worst(logp, case_data(r->want, "teacher", DT_F32, &n), r->n * per);
    assert_int_equal(n, r->n * per);
    print_message("teacher's log-probs %.1e; ", worst);
    assert_true(worst <= MAX_REL);
    if (k > 0) assert_memory_equal(id, case_data(r->want, "top_id", DT_I32, NULL), (size_t)(r->n * k) * sizeof *id);
    for (int64_t i = 0; i < r->n_seqs; i++) {
        tokens[i] = r->off[i + 1] - r->off[i];
        lens[i] = tokens[i] * per;
    }
    batch_init(b, r->n_seqs);
    OK(batch_add(b, "responses", BATCH_I32, tokens, NULL, NULL));
    OK(batch_add(b, "teacher_logprobs", BATCH_F32, lens, logp, NULL));
    if (k > 0) OK(batch_add(b, "teacher_ids", BATCH_I32, lens, id, NULL));
    free(logp);
    free(id);
}

static int loss_fn(void *arg, const struct micro_loss *x) {
    struct rig *r = arg;
    const uint8_t *mask = case_data(r->want, "mask", DT_U8, NULL);
    const struct algo_ragged whole = {.n = r->n_seqs, .off = r->off, .mask = mask},
                             own = {.n = x->hi - x->lo, .off = r->off + x->lo, .mask = mask};
    for (int64_t t = x->t0; t < x->t1; t++) r->logp[t] = (double)x->out[t - x->t0];
    const struct algo_policy_args a = {
        .r = &own,
        .old_logp = r->logp,
        .logp = r->logp,
        .agg = {.mode = algo_agg_find("token-mean"), .batch_num_tokens = algo_n_valid(&whole), .global_batch_size = r->n_seqs}};
    struct algo_metrics m = {0};
    double part = NAN;
    TRY(ppo_distillation_loss(&r->distill, &r->k.distill, &a, &r->loss, r->dlogp, &m));
    assert_true(algo_metrics_get(&m, "distillation/loss", &part) && isfinite(part));
    algo_metrics_free(&m);
    for (int64_t t = x->t0; t < x->t1; t++) x->dout[t - x->t0] = (float)r->dlogp[t];
    return 0;
}

static void check(const char *mode, const char *backend, struct model_keep keep, struct micro_batch_limits cut) {
    struct rig r;
    struct batch b;
    struct trained_model *student;
    struct step_result res;
    rig_open(&r, backend, mode);
    const size_t bytes = (size_t)r.student->n_train * sizeof(float);
    ask_teacher(&r, &b, cut);
    ppo_distillation_begin(&r.distill, &r.k.distill, r.worker.base.vocab, &b);
    const struct trained_model_args a = {.dev = &r.dev,
                                         .model = r.student,
                                         .train = true,
                                         .keep = keep,
                                         .max_rows = r.n_seqs * MAX_LEN,
                                         .max_seqs = r.n_seqs,
                                         .list = r.distill.k};
    OK(trained_model_create(&student, &a));
    const struct mini_batch s = {.seqs = r.seqs,
                                 .n = r.n_seqs,
                                 .cut = cut,
                                 .temperature = TEMPERATURE,
                                 .list = r.distill.k > 0 ? &r.distill.list : NULL,
                                 .loss = loss_fn,
                                 .arg = &r};
    OK(trained_model_backward(student, &s, &res));
    float *g = xmalloc(bytes);
    double nmse, want, got = 0;
    OK(dev_copy_out(&r.dev, g, trained_model_grads(student), bytes));
    const double e_grad = case_gradient_error(r.want, r.student->train_params, r.student->n_train_params, g, &nmse);
    memcpy(&want, case_data(r.want, "loss", DT_F64, NULL), sizeof want);
    got = r.loss;
    print_message("%s %s, %lld micro-batches: loss %.1e, gradients %.1e (nmse %.1e)\n", mode, backend, (long long)res.n_micro,
                  fabs(got - want) / want, e_grad, nmse);
    assert_true(fabs(got - want) / want <= MAX_REL && e_grad <= MAX_REL && nmse <= MAX_NMSE);
    ppo_distillation_end(&r.distill);
    trained_model_destroy(student);
    batch_free(&b);
    free(g);
    rig_close(&r);
}

static void whole_gradient(void **state) {
    (void)state;
    static const char *const modes[] = {"forward_kl_topk", "k3"};
    EACH(k, modes) EACH_BACKEND(i) {
        check(modes[k], BACKENDS[i], MODEL_KEEP_ALL, (struct micro_batch_limits){.max_seqs = MAX_SEQS});
        check(modes[k], BACKENDS[i], MODEL_KEEP_LAYER, (struct micro_batch_limits){.max_rows = 72});
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(whole_gradient)};
    return cmocka_run_group_tests_name("distillation", tests, NULL, NULL);
}
