/* test_ppo_segments_ranks.c - inv11: a step over responses of several segments, of episodes with several samples, gives the same
 * bits on 1, 2 and 3 ranks: policy with a KL loss and a teacher's lists, and critic. Rows are no multiple of the mini-batch.
 *
 * The test starts itself as a program of include/verlc.h, with keys. Where the batch has no response_mask, as in programs with
 * advantages of their own, ranks find it in the segments. */
#include "model_case.h"

#include "base/file.h"
#include "ppo/controller.h"
#include "text/text.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PROMPTS = 2, PER = 4, ROWS = PROMPTS * PER - 1 };

/* ---- the program ---- */

/* Segments of a response: a third of the environment, where it is long enough; its log-probs are 0. */
static void add_segments(struct batch *b) {
    int64_t pairs[ROWS];
    struct batch_col *c;
    const struct batch_col *responses = batch_find(b, "responses"), *logp = batch_find(b, "rollout_log_probs");
    for (int64_t i = 0; i < ROWS; i++) pairs[i] = batch_len(responses, i) < 3 ? 2 : 6;
    CHECK(batch_add(b, BATCH_SEGMENTS, BATCH_I32, pairs, NULL, &c) == 0);
    for (int64_t i = 0; i < ROWS; i++) {
        const int32_t n = (int32_t)batch_len(responses, i), third = n / 3;
        const int32_t all[6] = {n < 3 ? n : third, SEGMENT_POLICY, third, SEGMENT_ENVIRONMENT, n - 2 * third, SEGMENT_POLICY};
        memcpy(c->i32 + c->off[i], all, (size_t)pairs[i] * sizeof *all);
        for (int64_t t = third; t < 2 * third; t++) logp->f32[logp->off[i] + t] = 0;
    }
}

/* Rows 1 and 2 are of one episode, which the latter ends; scores that are not all alike. */
static void add_episodes(struct batch *b) {
    const int64_t session[ROWS] = {0, 1, 1, 2, 3, 4, 5};
    const struct batch_col *score = batch_find(b, "score");
    CHECK(batch_add(b, BATCH_SESSION, BATCH_I64, NULL, session, NULL) == 0);
    for (int64_t i = 0; i < ROWS; i++) score->f64[i] = i == 1 ? NAN : (double)(i % 3) - 0.5;
}

static int program(int argc, char **argv) {
    static const int64_t rows[ROWS] = {0, 1, 2, 3, 4, 5, 6};
    struct verlc *v = verlc_open(NULL, argc, argv);
    struct verlc_batch *all = verlc_batch_create(), *b = verlc_batch_create();
    while (verlc_begin_step(v)) {
        verlc_rollout(v, all);
        if (verlc_select(v, all, rows, ROWS, b) < 0) break;
        add_segments(verlc_batch_data(b));
        add_episodes(verlc_batch_data(b));
        verlc_reward(v, b);
        verlc_log_probs(v, VERLC_ACTOR, b);
        verlc_log_probs(v, VERLC_REF, b);
        verlc_log_probs(v, VERLC_TEACHER, b);
        verlc_values(v, b);
        if (verlc_advantage(v, b) < 0) break;
        const struct batch_col *adv = batch_find(verlc_batch_data(b), "advantages"), *score;
        CHECK(adv->f64[adv->off[1]] == adv->f64[adv->off[2]]); /* of one episode: one score, one advantage */
        score = batch_find(verlc_batch_data(b), "score");
        CHECK(score->f64[1] == score->f64[2]);
        if (!getenv("KEEP_MASK")) batch_drop(verlc_batch_data(b), "response_mask");
        verlc_update(v, VERLC_CRITIC, b);
        verlc_update(v, VERLC_ACTOR, b);
        verlc_end_step(v, b);
    }
    verlc_batch_free(all);
    verlc_batch_free(b);
    return verlc_close(v);
}

/* ---- the test ---- */

static void make_model(const char *dir) {
    struct tokenizer *t;
    json_t *config = model_arch_config("tiny");
    OK(file_mkdirs(dir));
    OK(data_write_tiny_tokenizer(dir));
    OK(tokenizer_open(&t, dir));
    json_object_set_new(config, "vocab_size", json_integer((tokenizer_vocab_size(t) + 63) / 64 * 64));
    json_object_set_new(config, "eos_token_id", json_integer(tokenizer_eos(t)));
    json_object_set_new(config, "pad_token_id", json_integer(tokenizer_pad(t)));
    json_object_set_new(config, "num_hidden_layers", json_integer(1));
    json_object_set_new(config, "intermediate_size", json_integer(128));
    tokenizer_close(t);
    OK(model_init_dir(config, dir, 1, DT_F32));
    json_decref(config);
}

static void make_rows(const char *path) {
    struct buf text = {0};
    for (int i = 0; i < PROMPTS; i++)
        buf_addf(&text,
                 "{\"data_source\": \"openai/gsm8k\", \"prompt\": [{\"role\": \"user\", \"content\": \"%d + 2\"}], "
                 "\"reward_model\": {\"style\": \"rule\", \"ground_truth\": \"%d\"}}\n",
                 i, i + 2);
    OK(file_write_atomic(path, text.p, text.n));
    buf_free(&text);
}

/* A step of the program on so many ranks, into top/name. */
static void run_program(const char *top, const char *name, int ranks, bool keep_mask) {
    static const char *const keys[] = {"algorithm.adv_estimator=grpo",
                                       "data.train_batch_size=2",
                                       "data.max_prompt_length=64",
                                       "data.max_response_length=16",
                                       "actor_rollout_ref.rollout.n=4",
                                       "actor_rollout_ref.rollout.name=verlc",
                                       "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
                                       "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2",
                                       "actor_rollout_ref.actor.fsdp_config.dtype=float32",
                                       "actor_rollout_ref.actor.ppo_mini_batch_size=1",
                                       "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
                                       "actor_rollout_ref.actor.optim.lr=1e-3",
                                       "actor_rollout_ref.actor.use_kl_loss=True",
                                       "critic.enable=True",
                                       "critic.ppo_micro_batch_size_per_gpu=1",
                                       "critic.optim.lr=1e-3",
                                       "distillation.enabled=True",
                                       "distillation.distillation_loss.loss_mode=forward_kl_topk",
                                       "distillation.distillation_loss.topk=4",
                                       "distillation.distillation_loss.use_task_rewards=True",
                                       "trainer.total_training_steps=1",
                                       "trainer.save_freq=1",
                                       "trainer.test_freq=-1",
                                       "trainer.val_before_train=False",
                                       "trainer.device=cpu",
                                       "trainer.logger=[file]"};
    enum { N = sizeof keys / sizeof *keys };
    char *argv[N + 9] = {"program"};
    int n = 1;
    for (int i = 0; i < N; i++) argv[n++] = (char *)(uintptr_t)keys[i];
    argv[n++] = xasprintf("data.train_files=%s/train.jsonl", top);
    argv[n++] = xasprintf("data.val_files=%s/train.jsonl", top);
    argv[n++] = xasprintf("actor_rollout_ref.model.path=%s/model", top);
    argv[n++] = xasprintf("critic.model.path=%s/model", top);
    argv[n++] = xasprintf("distillation.teacher_models.teacher_model.model_path=%s/model", top);
    argv[n++] = xasprintf("trainer.default_local_dir=%s/%s", top, name);
    argv[n++] = xasprintf("trainer.ranks=%d", ranks);
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        if (keep_mask) setenv("KEEP_MASK", "1", 1);
        else unsetenv("KEEP_MASK");
        char *log = xasprintf("%s/%s.log", top, name);
        const int fd = open(log, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        dup2(fd, 1);
        dup2(fd, 2);
        execv("/proc/self/exe", argv);
        _exit(127);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    for (int i = N + 1; i < n; i++) free(argv[i]);
    if (status == 0) return;
    char *log = xasprintf("%s/%s.log", top, name);
    struct buf text = {0};
    OK(file_read(&text, log, 1 << 20));
    fail_msg("%s: the program ended with status %d: %s", name, status, text.p);
}

static struct buf file_of(const char *top, const char *run, const char *name) {
    struct buf b = {0};
    char *path = xasprintf("%s/%s/global_step_1/%s", top, run, name);
    OK(file_read(&b, path, 64 << 20));
    free(path);
    return b;
}

static void ranks_see_segments(void **state) {
    (void)state;
    static const char *const files[] = {"optim/actor.safetensors", "optim/critic.safetensors", "actor/model.safetensors"};
    static const char *const runs[] = {"masked", "two", "three"};
    char *top = case_temp_dir(), *model = file_join(top, "model"), *rows = file_join(top, "train.jsonl");
    make_model(model);
    make_rows(rows);
    for (int r = 0; r < 3; r++) run_program(top, runs[r], r + 1, r == 0);
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        struct buf want = file_of(top, runs[0], files[i]);
        for (int r = 1; r < 3; r++) {
            struct buf got = file_of(top, runs[r], files[i]);
            if (got.n != want.n || memcmp(got.p, want.p, want.n) != 0)
                fail_msg("%s of %d ranks, which know the segments, differs from one process', which has the mask", files[i], r + 1);
            buf_free(&got);
        }
        buf_free(&want);
    }
    free(model);
    free(rows);
    case_drop_dir(top);
}

int main(int argc, char **argv) {
    if (argc > 1) return program(argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(ranks_see_segments)};
    return cmocka_run_group_tests_name("segments over ranks", tests, NULL, NULL);
}
