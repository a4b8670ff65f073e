/* test_supervised_program.c - a program of another loss than sft's on the supervised learner, with rows from memory: what a new
 * trainer writes is all that is here. Its loss is the mean over sequences of each one's summed -log p.
 *
 * inv03: however the batch is cut, the loss that is reported is that of the log-probs that the validation gets, and each statistic
 * is reduced as its row says. The learning rate is 0, so both have the same weights. */
#include "model_case.h"

#include "data/data.h"
#include "supervised/supervised.h"

enum { ROWS = 6, STEPS = 2 };

static int32_t ids[ROWS][16];
static const int64_t LEN[ROWS] = {5, 16, 9, 2, 12, 7};

static int read_keys(struct supervised_config *k) {
    (void)k;
    return 0;
}

static int open_data(struct supervised_data *d, const struct supervised_config *k) {
    struct packed_seq *seqs = xcalloc(ROWS, sizeof *seqs);
    for (int i = 0; i < ROWS; i++) {
        for (int t = 0; t < LEN[i]; t++) ids[i][t] = 3 + (i * 7 + t * 5) % 40;
        seqs[i] = (struct packed_seq){.ids = ids[i], .n = LEN[i], .first = 1};
    }
    d->own = seqs;
    d->train = d->val = (struct supervised_rows){.seqs = seqs, .n = ROWS};
    assert_int_equal(k->data.train.n_files, 1);
    return 0;
}

static void close_data(struct supervised_data *d) { free(d->own); }

static int loss(const struct supervised_batch *b, const struct micro_loss *m, double *stats) {
    int64_t targets = 0;
    for (int64_t t = 0; t < m->t1 - m->t0; t++) {
        stats[0] -= (double)m->out[t] / (double)b->n;
        m->dout[t] = -1.0f / (float)b->n;
    }
    for (int64_t i = m->lo; i < m->hi; i++) targets += packed_seq_targets(&b->seqs[i]);
    assert_int_equal(targets, m->t1 - m->t0); /* its sequences, in the batch's order */
    stats[1] = (double)b->targets;
    stats[2] = stats[3] = (double)(m->hi - m->lo);
    return 0;
}

static const struct supervised_stat stats[] = {
    {"train/loss", REDUCE_SUM}, {"all_targets", REDUCE_MIN}, {"largest", REDUCE_MAX}, {"sequences", REDUCE_SUM}, {NULL}};

static int validations;

static void validate(const struct supervised_rows *val, const float *logp, struct metrics *out) {
    double sum = 0, trained, targets, largest, sequences;
    int64_t n = 0;
    for (int64_t i = 0; i < val->n; i++) n += packed_seq_targets(&val->seqs[i]);
    for (int64_t t = 0; t < n; t++) sum -= (double)logp[t] / ROWS;
    assert_true(metrics_get(out, "train/loss", &trained) && metrics_get(out, "all_targets", &targets) &&
                metrics_get(out, "largest", &largest) && metrics_get(out, "sequences", &sequences));
    if (!(fabs(trained - sum) <= 1e-12 * sum)) fail_msg("the loss is %.17g, of the validation's log-probs %.17g", trained, sum);
    assert_true(targets == (double)n && sequences == ROWS && largest < ROWS); /* in several micro-batches */
    metrics_set(out, sum, "val/loss");
    validations++;
}

static const struct supervised_program program = {.name = "sequences",
                                                  .open = "sequences_device",
                                                  .read = read_keys,
                                                  .open_data = open_data,
                                                  .close_data = close_data,
                                                  .loss = loss,
                                                  .stats = stats,
                                                  .validate = validate};

static void test_inv03_another_loss(void **state) {
    (void)state;
    char *dir = case_temp_dir(), *model = file_join(dir, "m"), *config = case_path("qwen2", "config.json");
    json_t *c = json_load_file(config, 0, NULL);
    assert_non_null(c);
    OK(model_init_dir(c, model, 3, DT_F32));
    OK(data_write_tiny_tokenizer(model));
    json_decref(c);
    static const char *const cuts[] = {"data.max_token_len_per_gpu=20", "data.use_dynamic_bsz=False"};
    for (int i = 0; i < 2; i++) {
        char *argv[] = {xasprintf("model.path=%s", model),
                        xasprintf("trainer.default_local_dir=%s/run%d", dir, i),
                        xasprintf("data.train_files=%s", config),
                        xasprintf("data.val_files=%s", config),
                        xasprintf("data.train_batch_size=%d", ROWS),
                        xasprintf("trainer.total_training_steps=%d", STEPS),
                        xasprintf("%s", cuts[i]),
                        xasprintf("data.micro_batch_size_per_gpu=%d", 4),
                        xasprintf("data.max_length=16"),
                        xasprintf("optim.lr=0"),
                        xasprintf("trainer.test_freq=1"),
                        xasprintf("trainer.save_freq=0"),
                        xasprintf("trainer.device=cpu"),
                        xasprintf("trainer.logger=[]")};
        struct conf *conf;
        OK(conf_load(&conf, "sft_trainer_engine", sizeof argv / sizeof *argv, argv));
        OK(supervised_train(&program, conf));
        assert_int_equal(validations, STEPS * (i + 1));
        conf_free(conf);
        for (size_t k = 0; k < sizeof argv / sizeof *argv; k++) free(argv[k]);
    }
    OK(file_remove_tree(dir));
    free(config);
    free(model);
    free(dir);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_inv03_another_loss)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
