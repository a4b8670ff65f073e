/* test_cmd_device.c - a device that fails in mid-run, by an ops table that fails on purpose:
 * lost, hung, giving NaN, out of memory, shared with another program.  Each ends in one error
 * line and its exit status, and what was saved before resumes to the bits of an unbroken run.
 *
 * The program is this one, linked with dev_open_named wrapped: the CPU backend opens, and one
 * entry of a copy of its table does the damage. Each run is a child, as a fault may end it. */
#include "model_case.h"

#include "cmd/cmd.h"
#include "base/log.h"

#include <sys/wait.h>
#include <unistd.h>

enum fault {
    NO_FAULT,
    LOST,
    BROKEN,
    DRIFT,
    HUNG,
    NAN_GRADIENT,
    NAN_FORWARD,
    NO_MEMORY,
    SHARED,
    FAR
}; /* FAR: none, host memory apart */
static struct {
    enum fault kind;
    int after; /* steps that go well; of alloc: calls */
    int steps; /* backward passes that ended: one a step */
    bool lost;
} plan;
static const struct dev_ops *real;

/* ---- the table ---- */

static int is_lost(void) {
    FAIL(ERR_DEVICE, "cuda: unspecified launch failure (cudaErrorLaunchFailure) in a test; the GPU's state is lost");
}
static int lost_attn_bwd(struct dev *d, const struct attn_args *a, struct tensor dout, struct tensor dq, struct tensor dk,
                         struct tensor dv) {
    if (plan.steps >= plan.after) plan.lost = true;
    return plan.lost ? is_lost() : real->attn_bwd(d, a, dout, dq, dk, dv);
}
static int lost_copy_out(struct dev *d, void *dst, const void *src, size_t bytes) {
    return plan.lost ? is_lost() : real->copy_out(d, dst, src, bytes);
}
/* Its memory can still be read, whatever it holds by then. */
static int broken_attn_bwd(struct dev *d, const struct attn_args *a, struct tensor dout, struct tensor dq, struct tensor dk,
                           struct tensor dv) {
    return plan.steps >= plan.after ? is_lost() : real->attn_bwd(d, a, dout, dq, dk, dv);
}
/* Training's log-probs leave the rollout's: one token of a micro-batch, by one part in a million. */
static int drift_lmhead_fwd(struct dev *d, const struct lmhead_args *a) {
    TRY(real->lmhead_fwd(d, a));
    if (plan.steps >= plan.after) ((float *)a->logp.data)[3] *= 1.000001f;
    return 0;
}
static int hung_swiglu_bwd(struct dev *d, struct tensor dgu, struct tensor dy, struct tensor gu) {
    if (plan.steps >= plan.after) sleep(120);
    return real->swiglu_bwd(d, dgu, dy, gu);
}
static int nan_matmul_dw(struct dev *d, struct tensor dw, struct tensor db, struct tensor dy, struct tensor x, bool add) {
    TRY(real->matmul_dw(d, dw, db, dy, x, add));
    if (plan.steps >= plan.after) ((float *)dw.data)[tensor_count(dw) / 2] = NAN;
    return 0;
}
static int nan_rmsnorm_fwd(struct dev *d, const struct rmsnorm_args *a) {
    TRY(real->rmsnorm_fwd(d, a));
    if (plan.steps >= plan.after) memset(a->y.data, 0xff, (size_t)tensor_count(a->y) * dtype_size(a->y.dt));
    return 0;
}
static int counted_embed_bwd(struct dev *d, struct tensor dw, int64_t lo, int64_t vocab, struct tensor ids, struct tensor dx) {
    plan.steps++; /* the end of a backward pass */
    return real->embed_bwd(d, dw, lo, vocab, ids, dx);
}
static int small_alloc(struct dev *d, size_t bytes, void **out) {
    return plan.after-- <= 0 ? ERR_NOMEM : real->alloc(d, bytes, out);
}

static int far_copy(struct dev *d, int stream, void *dst, const void *src, size_t bytes) {
    (void)d, (void)stream;
    memcpy(dst, src, bytes);
    return 0;
}
static int far_wait(struct dev *d, int stream) {
    (void)d, (void)stream;
    return 0;
}
static int far_alloc(struct dev *d, size_t bytes, void **out) { return real->alloc(d, bytes, out); }
static void far_free(struct dev *d, void *p, size_t bytes) { real->free(d, p, bytes); }

int __real_dev_open_named(struct dev *d, const char *name, int n_threads, const char *isa);
int __wrap_dev_open_named(struct dev *d, const char *name, int n_threads, const char *isa);
int __wrap_dev_open_named(struct dev *d, const char *name, int n_threads, const char *isa) {
    static struct dev_ops table;
    (void)name, (void)n_threads;
    TRY(__real_dev_open_named(d, "cpu", 1, isa));
    real = d->ops;
    table = *real;
    table.embed_bwd = counted_embed_bwd;
    if (plan.kind == LOST) {
        table.attn_bwd = lost_attn_bwd;
        table.copy_out = lost_copy_out;
    }
    if (plan.kind == HUNG) table.swiglu_bwd = hung_swiglu_bwd;
    if (plan.kind == NAN_GRADIENT) table.matmul_dw = nan_matmul_dw;
    if (plan.kind == NAN_FORWARD) table.rmsnorm_fwd = nan_rmsnorm_fwd;
    if (plan.kind == NO_MEMORY) table.alloc = small_alloc;
    if (plan.kind == BROKEN) table.attn_bwd = broken_attn_bwd;
    if (plan.kind == DRIFT) table.lmhead_fwd = drift_lmhead_fwd;
    if (plan.kind == FAR) {
        table.caps.own_memory = true;
        table.fetch = table.evict = far_copy;
        table.copy_stream_wait = table.copy_stream_sync = far_wait;
        table.host_alloc = far_alloc;
        table.host_free = far_free;
    }
    if (plan.kind == SHARED) {
        d->mem_total = 4 << 20;
        d->mem_others = (size_t)30 << 30;
    }
    d->ops = &table;
    return 0;
}

/* ---- runs ---- */

static char *scratch;
static const char *model = "small";

static void write_rows(const char *path) {
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    for (int i = 0; i < 32; i++)
        fprintf(f,
                "{\"data_source\": \"openai/gsm8k\", \"prompt\": [{\"role\": \"user\", \"content\": \"What is %d + %d?\"}],"
                " \"ability\": \"math\", \"reward_model\": {\"style\": \"rule\", \"ground_truth\": \"%d\"},"
                " \"extra_info\": {\"index\": %d}}\n",
                i % 7, i % 5, i % 7 + i % 5, i);
    assert_int_equal(fclose(f), 0);
}

static void write_chats(void) {
    char *path = file_join(scratch, "chats.jsonl");
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    for (int i = 0; i < 32; i++)
        fprintf(f, "{\"messages\": [{\"role\": \"user\", \"content\": \"%d?\"}, {\"role\": \"assistant\", \"content\": \"%d\"}]}\n",
                i, i);
    assert_int_equal(fclose(f), 0);
    free(path);
}

/* A run of four steps in a child with this fault: GRPO, with sft SFT, or the GRPO run's plan where name is "plan". extra: more
 * keys, a space between them; NULL: none. Its exit status; what it says in *text (owned). */
static int run_program(bool sft, const char *name, enum fault kind, int after, const char *extra, char **text) {
    static const char *const grpo_keys[] = {"algorithm.adv_estimator=grpo",
                                            "data.max_prompt_length=64",
                                            "data.max_response_length=12",
                                            "actor_rollout_ref.actor.fsdp_config.dtype=float32",
                                            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
                                            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
                                            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
                                            "actor_rollout_ref.rollout.n=2",
                                            "trainer.val_before_train=False",
                                            NULL};
    static const char *const sft_keys[] = {"data.max_length=128", "data.micro_batch_size_per_gpu=4", "data.use_dynamic_bsz=False",
                                           NULL};
    static const char *const both[] = {"data.train_batch_size=4", "trainer.total_training_steps=4", "trainer.save_freq=1",
                                       "trainer.logger=[file]", NULL};
    const char *const *const lists[] = {sft ? sft_keys : grpo_keys, both};
    char keys[4][256], *argv[32] = {sft ? "sft" : "ppo"}, path[512], *more = xstrdup(extra ? extra : "trainer.test_freq=-1");
    int n = 0;
    for (int l = 0; l < 2; l++)
        for (int i = 0; lists[l][i]; i++) argv[++n] = (char *)(uintptr_t)lists[l][i];
    snprintf(keys[0], sizeof keys[0], "data.train_files=%s/%s.jsonl", scratch, sft ? "chats" : "train");
    snprintf(keys[1], sizeof keys[1], "data.val_files=%s/%s.jsonl", scratch, sft ? "chats" : "train");
    snprintf(keys[2], sizeof keys[2], "%smodel.path=%s/%s", sft ? "" : "actor_rollout_ref.", scratch, model);
    snprintf(keys[3], sizeof keys[3], "trainer.default_local_dir=%s/%s", scratch, name);
    for (int i = 0; i < 4; i++) argv[++n] = keys[i];
    for (char *key = strtok(more, " "); key; key = strtok(NULL, " ")) argv[++n] = key;
    snprintf(path, sizeof path, "%s/stderr", scratch);
    fflush(NULL);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        if (!freopen(path, "w", stderr)) _exit(99);
        plan.kind = kind;
        plan.after = after;
        const bool planned = strcmp(name, "plan") == 0;
        if (planned && !freopen(path, "a", stdout)) _exit(99);
        const int rc = planned ? cmd_plan(n + 1, argv) : sft ? cmd_sft(n + 1, argv) : cmd_ppo(n + 1, argv);
        if (rc < 0) log_error("%s", err_msg());
        if (rc < 0) log_debug("%s", err_trace());
        fflush(NULL);
        _exit(rc < 0 ? err_exit_status(rc) : rc);
    }
    free(more);
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    struct buf b = {0};
    OK(file_read(&b, path, 0));
    *text = buf_take(&b);
    if (!WIFEXITED(status)) fail_msg("%s ended by a signal", name);
    if (getenv("VERBOSE")) printf("---- %s\n%s", name, *text);
    return WEXITSTATUS(status);
}
static int run(const char *name, enum fault kind, int after, const char *extra, char **text) {
    return run_program(false, name, kind, after, extra, text);
}

/* One error line, with these words. */
static void one_error(const char *text, const char *word, const char *other) {
    int lines = 0;
    for (const char *p = text; (p = strstr(p, "error: ")) != NULL; p++) lines += p == text || p[-1] == '\n';
    if (lines != 1 || !strstr(text, word) || !strstr(text, other))
        fail_msg("wanted one error with '%s' and '%s': %s", word, other, text);
}

static bool has_step(const char *name, int step) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s/global_step_%d/manifest.json", scratch, name, step);
    return file_exists(path);
}

static void same_weights(const char *one, const char *other, int step) {
    struct buf a = {0}, b = {0};
    char path[512];
    snprintf(path, sizeof path, "%s/%s/global_step_%d/actor/model.safetensors", scratch, one, step);
    OK(file_read(&a, path, 0));
    snprintf(path, sizeof path, "%s/%s/global_step_%d/actor/model.safetensors", scratch, other, step);
    OK(file_read(&b, path, 0));
    assert_int_equal(a.n, b.n);
    assert_memory_equal(a.p, b.p, a.n);
    buf_free(&a);
    buf_free(&b);
}

/* The run goes on after the fault and ends in the unbroken run's bits. */
static void resumes(const char *name) {
    char *text;
    const int status = run(name, NO_FAULT, 0, NULL, &text);
    if (status != 0) fail_msg("the resumed run ended with %d: %s", status, text);
    assert_non_null(strstr(text, "resumed from"));
    same_weights("whole", name, 4);
    free(text);
}

/* ---- the faults ---- */

static void test_lost(void **state) {
    char *text;
    (void)state;
    assert_int_equal(run("lost", LOST, 2, NULL, &text), 4); /* in step 3 */
    one_error(text, "state is lost", "step 2");
    assert_true(has_step("lost", 2) && !has_step("lost", 3));
    free(text);
    resumes("lost");
}

/* A device that failed may have left anything in its memory, even where that can still be read: nothing of it is saved. */
static void test_nothing_saved(void **state) {
    (void)state;
    for (int sft = 0; sft < 2; sft++) {
        const char *name = sft ? "broken_sft" : "broken_ppo";
        char *text;
        assert_int_equal(run_program(sft, name, BROKEN, 2, "trainer.save_freq=-1", &text), 4); /* in step 3 */
        one_error(text, "state is lost", "no step was saved");
        for (int step = 1; step < 5; step++) assert_false(has_step(name, step));
        free(text);
        assert_int_equal(run_program(sft, name, BROKEN, 2, "trainer.save_freq=2", &text), 4);
        one_error(text, "state is lost", "the state of step 2");
        assert_true(has_step(name, 2) && !has_step(name, 3));
        free(text);
    }
}

/* The update's own forward pass finds a rollout whose log-probs are not training's, and says where. */
static void test_drift(void **state) {
    char *text;
    (void)state;
    assert_int_equal(run("drift", DRIFT, 1, NULL, &text), 0); /* from step 2 on */
    if (!strstr(text, "warning: step 2: log-probs of the rollout are not training's") || !strstr(text, "sample 0, token 3") ||
        strstr(text, "warning: step 1:"))
        fail_msg("no warning of step 2 at token 3: %s", text);
    free(text);
}

static void test_hung(void **state) {
    char *text;
    (void)state;
    assert_int_equal(run("hung", HUNG, 2, "trainer.deadline=5", &text), 6);
    one_error(text, "update_actor", "no progress");
    assert_true(has_step("hung", 2) && !has_step("hung", 3));
    free(text);
    resumes("hung");
}

static void test_nan(void **state) {
    char *text;
    (void)state;
    assert_int_equal(run("nan", NAN_GRADIENT, 1, NULL, &text), 5); /* every step from the second on */
    one_error(text, "not finite", "3 steps in a row");
    free(text);
    assert_int_equal(run("nan_forward", NAN_FORWARD, 2, NULL, &text), 5);
    one_error(text, "log-prob of", "resume_mode=auto");
    free(text);
    resumes("nan_forward");
}

static void test_memory(void **state) {
    char *text;
    (void)state;
    for (int i = 0; i < 4; i++) { /* whichever block does not come */
        assert_int_equal(run("memory", NO_MEMORY, i, NULL, &text), 4);
        one_error(text, "cannot allocate", "GiB");
        free(text);
    }
    assert_int_equal(run("shared", SHARED, 0, NULL, &text), 4);
    one_error(text, "other programs hold 30.00 GiB", "limit");
    free(text);
}

/* Where only host memory helps, the refusal names the switches; with them the run fits its limit and ends in the
 * bits of one with all memory. */
static int planned(const char *keys, int64_t mib, char *small, size_t size, char **text) {
    snprintf(small, size, "%s trainer.device_memory_limit=%lldMiB", keys, (long long)mib);
    return run("plan", FAR, 0, small, text);
}
static void offload_helps(const char *reference, const char *proposal) {
    char *text = NULL, keys[512], small[768];
    bool found = false;
    snprintf(keys, sizeof keys,
             "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 "
             "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1 "
             "actor_rollout_ref.model.enable_gradient_checkpointing=True");
    int64_t fits = 256, refused = 0;
    while (fits - refused > 1) {
        const int64_t mib = (fits + refused) / 2;
        *(planned(keys, mib, small, sizeof small, &text) == 0 ? &fits : &refused) = mib;
        free(text);
    }
    text = NULL;
    for (int64_t mib = refused; mib > 0 && !found; mib--) { /* down to the first limit at which this is the nearest change */
        free(text);
        found = planned(keys, mib, small, sizeof small, &text) == 4 && strstr(text, proposal) != NULL;
    }
    if (!found) fail_msg("no limit makes the plan say '%s': %s", proposal, text);
    assert_non_null(strstr(text, "the result is the same"));
    free(text);
    if (!has_step(reference, 4)) assert_int_equal(run(reference, FAR, 0, keys, &text), 0);
    else text = NULL;
    free(text);
    const size_t n = strlen(small);
    snprintf(small + n, sizeof small - n, " %.*s", (int)strcspn(proposal, " "), proposal);
    const char *name = strstr(proposal, "optimizer_offload") ? "far_optimizer" : "far_reference";
    const int status = run(name, FAR, 0, small, &text);
    if (status != 0 || !strstr(text, "offloaded: pinned host memory")) fail_msg("%s: exit %d: %s", proposal, status, text);
    same_weights(reference, name, 4);
    free(text);
}
static void test_offload(void **state) {
    (void)state;
    model = "tiny"; /* where only some limits need the one or the other */
    offload_helps("near", "actor_rollout_ref.ref.fsdp_config.param_offload=True fits");
    offload_helps("near", "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True fits");
    model = "small";
    char *text;
    assert_int_equal(run("noted", NO_FAULT, 0, "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True", &text), 0);
    assert_non_null(strstr(text, "change nothing on this device"));
    same_weights("whole", "noted", 4);
    free(text);
}

static int setup(void **state) {
    char *text;
    (void)state;
    scratch = case_temp_dir();
    char *tiny = file_join(scratch, "tiny"), *rows = file_join(scratch, "train.jsonl");
    char *small = file_join(scratch, "small"), *config = file_join(tiny, "config.json"), *arch = file_join(scratch, "small.json");
    char *argv[] = {"model", "init", "--preset", "tiny", "--out", tiny, "--seed", "1"};
    OK(cmd_model(8, argv));
    json_t *shape = json_load_file(config, 0, NULL);
    assert_non_null(shape);
    json_object_set_new(shape, "hidden_size", json_integer(64));
    json_object_set_new(shape, "intermediate_size", json_integer(128));
    json_object_set_new(shape, "num_hidden_layers", json_integer(2));
    assert_int_equal(json_dump_file(shape, arch, 0), 0);
    json_decref(shape);
    char *small_argv[] = {"model", "init", "--arch", arch, "--out", small, "--tokenizer", tiny, "--seed", "1"};
    OK(cmd_model(10, small_argv));
    write_rows(rows);
    write_chats();
    free(tiny);
    free(small);
    free(config);
    free(arch);
    free(rows);
    const int status = run("whole", NO_FAULT, 0, NULL, &text);
    if (status != 0) fail_msg("a run without a fault ended with %d: %s", status, text);
    free(text);
    return 0;
}
static int teardown(void **state) {
    (void)state;
    return file_remove_tree(scratch);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_lost),   cmocka_unit_test(test_nothing_saved),
                                       cmocka_unit_test(test_drift),  cmocka_unit_test(test_hung),
                                       cmocka_unit_test(test_nan),    cmocka_unit_test(test_memory),
                                       cmocka_unit_test(test_offload)};
    return cmocka_run_group_tests_name("a device that fails", tests, setup, teardown);
}
