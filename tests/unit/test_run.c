/* test_run.c - a run has neither models nor a device of its own: what it asks of struct checkpoints, in which order, and
 * what becomes of a checkpoint that fails. */
#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "run/run.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#define OK(call)                                                                \
    do {                                                                        \
        if ((call) < 0) fail_msg("%s: %s (%s)", #call, err_msg(), err_trace()); \
    } while (0)

struct fix {
    char dir[64];
    struct conf *conf;
    struct run_config k;
    struct run run;
    struct buf calls;  /* of the fake, in order */
    int64_t optim;     /* its optimizer steps */
    int64_t saved;     /* step of the copy */
    int left;          /* calls of take until the copy is published */
    int fails;         /* what take then says */
    bool logged_first; /* before() was called before the copy was published */
};

static int64_t steps(void *ctx) { return ((struct fix *)ctx)->optim; }
static int note(struct fix *f, const char *call, const struct ckpt_save_args *a) {
    assert_int_equal(a->n_parts, 0);
    assert_string_equal(a->root, f->dir);
    assert_int_equal(json_integer_value(json_object_get(a->trainer, "global_step")), a->step);
    assert_string_equal(json_string_value(json_object_get(a->trainer, "isa")), "abacus");
    f->saved = a->step;
    return buf_addf(&f->calls, "%s %lld keep %lld, ", call, (long long)a->step, (long long)a->keep);
}
static int load(void *ctx, const char *dir) { return buf_addf(&((struct fix *)ctx)->calls, "load %s, ", dir); }
static int save(void *ctx, const struct ckpt_save_args *a) { return note(ctx, "save", a); }
static int open_copy(void *ctx) { return buf_adds(&((struct fix *)ctx)->calls, "open, "); }
static int copy(void *ctx, const struct ckpt_save_args *a) { return note(ctx, "copy", a); }
static int begin_write(void *ctx, void (*before)(void *arg), void *arg) {
    struct fix *f = ctx;
    before(arg);
    f->logged_first = true;
    return buf_adds(&f->calls, "write, ");
}
static int take(void *ctx, double wait_s, int64_t *step) {
    struct fix *f = ctx;
    (void)wait_s;
    if (f->left-- > 0) return 0;
    TRY(buf_addf(&f->calls, "taken %lld, ", (long long)f->saved));
    *step = f->saved;
    if (f->fails == 0) return 1;
    FAIL(f->fails, "the disk is full");
}
static void close_fake(void *ctx) { OK(buf_adds(&((struct fix *)ctx)->calls, "close")); }

static void no_state(const void *ctx, json_t *trainer) {
    (void)ctx;
    json_object_set_new(trainer, "own", json_true());
}

static void open_fix(struct fix *f, bool beside, int64_t save_freq) {
    static const char *const loggers[] = {"file"};
    char *argv[] = {"data.train_files=x"};
    *f = (struct fix){0};
    snprintf(f->dir, sizeof f->dir, "/tmp/verlc-test-XXXXXX");
    assert_non_null(mkdtemp(f->dir));
    OK(conf_load(&f->conf, "sft_trainer", 1, argv));
    f->k = (struct run_config){.title = "t",
                               .project = "p",
                               .experiment = "e",
                               .default_local_dir = f->dir,
                               .resume_mode = "disable",
                               .loggers = loggers,
                               .n_loggers = 1,
                               .save_freq = save_freq,
                               .keep_ckpts = 3,
                               .max_bad_steps = 3,
                               .async_save = beside};
    const struct run_program p = {.ctx = f, .state = no_state};
    const struct checkpoints models = {.ctx = f,
                                       .isa = "abacus",
                                       .steps = steps,
                                       .load = load,
                                       .save = save,
                                       .open_copy = open_copy,
                                       .copy = copy,
                                       .write = begin_write,
                                       .take = take,
                                       .close = close_fake};
    OK(run_open(&f->run, f->conf, &f->k, &p));
    OK(run_open_sampler(&f->run, &(struct data_sampler_args){.n_rows = 8, .batch_size = 2, .drop_last = true}, 1, 0));
    OK(run_ready(&f->run, f->conf, &models));
}

static void close_fix(struct fix *f, int rc, const char *calls) {
    run_close(&f->run, rc);
    assert_string_equal(f->calls.p, calls);
    run_lock_release(f->run.k.lock);
    conf_free(f->conf);
    buf_free(&f->calls);
    OK(file_remove_tree(f->dir));
}

static int one_step(struct fix *f) {
    assert_true(run_begin_step(&f->run));
    f->optim++;
    return run_end_step(&f->run);
}

static void test_foreground(void **state) {
    (void)state;
    struct fix f;
    open_fix(&f, false, 2);
    for (int i = 0; i < 4; i++) OK(one_step(&f));
    assert_false(run_begin_step(&f.run));
    assert_int_equal(f.run.saved_step, 4);
    close_fix(&f, 0, "save 2 keep 3, save 4 keep 3, close");
}

/* A step passes while the first is written; the last one is waited for. */
static void test_beside(void **state) {
    (void)state;
    struct fix f;
    open_fix(&f, true, 3);
    for (int i = 0; i < 3; i++) OK(one_step(&f));
    assert_true(f.logged_first);
    assert_int_equal(f.run.saved_step, -1);
    f.left = 1;
    OK(one_step(&f));
    assert_int_equal(f.run.saved_step, 4);
    close_fix(&f, 0, "open, copy 3 keep 3, write, taken 3, copy 4 keep 3, write, taken 4, close");
}

/* The run ends with the failure of a checkpoint, and names the one before it. A disk's is not tried again. */
static void test_failed(void **state) {
    (void)state;
    struct fix f;
    open_fix(&f, true, 1);
    OK(one_step(&f));
    f.fails = ERR_IO;
    const int rc = one_step(&f);
    assert_int_equal(rc, ERR_IO);
    assert_non_null(strstr(err_msg(), "the disk is full; no step was saved"));
    close_fix(&f, rc, "open, copy 1 keep 3, write, taken 1, close");
}

/* A failure in a step after the weights have changed, or where that is not known: nothing is saved. Before: the last step. */
static void test_half_made(void **state) {
    (void)state;
    for (int way = 0; way < 3; way++) {
        struct fix f;
        open_fix(&f, false, 4);
        OK(one_step(&f));
        assert_true(run_begin_step(&f.run));
        if (way == 1) f.optim++;
        if (way == 2) f.optim = ERR_RANK;
        err_set(ERR_INPUT, __FILE__, __LINE__, "a bad row");
        const int rc = run_fail(&f.run, ERR_INPUT);
        assert_int_equal(rc, ERR_INPUT);
        assert_int_equal(f.run.saved_step, way ? -1 : 1);
        close_fix(&f, rc, way ? "close" : "save 1 keep 3, close");
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_foreground), cmocka_unit_test(test_beside),
                                       cmocka_unit_test(test_failed), cmocka_unit_test(test_half_made)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
