/* test_ranks_start_workers.c - worker processes and their calls; the workers are this program again. How they end by force:
 * tests/fault/ranks_test.py. */
#include "base/err.h"
#include "ranks/launcher.h"
#include "ranks/start_workers.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

extern char **environ;

/* ---- services ---- */

static int sum(struct comm *c, const struct comm_call *call, struct ctl_result *out) {
    int64_t all[8] = {0};
    size_t at[9] = {0};
    for (int r = 0; r < comm_size(c); r++) at[r + 1] = at[r] + sizeof *all;
    if (comm_size(c) > 8) FAIL(ERR_INTERNAL, "too many ranks");
    all[comm_rank(c)] = json_integer_value(json_object_get(call->args, "x")) + comm_rank(c);
    TRY(comm_all_gather(c, all, at));
    int64_t total = 0;
    for (int r = 0; r < comm_size(c); r++) total += all[r];
    out->value = json_pack("{s:I,s:b}", "sum", (json_int_t)total, "is_rank",
                           getenv("VERLC_RANK") != NULL || getenv("VERLC_GROUP_KEY") != NULL);
    out->arrays = calloc(1, sizeof *out->arrays);
    out->arrays[0] = (struct comm_bytes){strdup("bytes"), 6};
    out->n_arrays = 1;
    return 0;
}

static int refuse(struct comm *c, const struct comm_call *call, struct ctl_result *out) {
    (void)call;
    (void)out;
    if (comm_rank(c) == 1) FAIL(ERR_INPUT, "no such file");
    return comm_barrier(c);
}

static int leave(struct comm *c, const struct comm_call *call, struct ctl_result *out) {
    (void)call;
    (void)out;
    if (comm_rank(c) != 1) return comm_barrier(c);
    fprintf(stderr, "cannot go on\n");
    exit(3);
}

/* What a launcher sends all processes of a job when it is to end. */
static int get_signals(struct comm *c, const struct comm_call *call, struct ctl_result *out) {
    (void)call;
    (void)out;
    raise(SIGTERM);
    raise(SIGINT);
    raise(SIGHUP);
    return comm_barrier(c);
}

static int arguments(struct comm *c, const struct comm_call *call, struct ctl_result *out) {
    char line[4096];
    int64_t n = 0;
    FILE *f = fopen("/proc/self/cmdline", "r");
    (void)c;
    (void)call;
    if (!f) FAIL(ERR_IO, "/proc/self/cmdline");
    const size_t bytes = fread(line, 1, sizeof line, f);
    fclose(f);
    for (size_t i = 0; i < bytes; i++) n += line[i] == '\0';
    out->value = json_pack("{s:I}", "n", (json_int_t)n);
    return 0;
}

static const struct worker_process_service services[] = {
    {"arguments", arguments}, {"sum", sum}, {"refuse", refuse}, {"leave", leave}, {"get_signals", get_signals}, {NULL, NULL}};

/* ---- the controller ---- */

static struct workers *open_program(int ranks, bool own_arguments) {
    struct launch l;
    struct workers *c;
    assert_int_equal(launch_read(&l, environ), 0);
    const struct workers_args a = {.ranks = ranks, .start_s = 60, .own_arguments = own_arguments};
    if (workers_open(&c, &a, &l) < 0) fail_msg("%s", err_msg());
    assert_int_equal(workers_size(c), ranks);
    return c;
}

static struct workers *open_workers(int ranks) { return open_program(ranks, false); }

static void calls_are_collected_in_order(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 3; ranks += 2) {
        struct coordinator_reply replies[3];
        struct workers *c = open_workers(ranks);
        for (int64_t x = 0; x < 50; x++) {
            json_t *args = json_pack("{s:I}", "x", (json_int_t)x);
            if (workers_call_all(c, &(struct coordinator_call_args){.name = "sum", .args = args, .answer_s = 60}, replies) < 0)
                fail_msg("%s", err_msg());
            json_decref(args);
            for (int r = 0; r < ranks; r++) {
                assert_int_equal(json_integer_value(json_object_get(replies[r].result, "sum")),
                                 ranks * x + ranks * (ranks - 1) / 2);
                assert_false(json_is_true(json_object_get(replies[r].result, "is_rank"))); /* what a worker starts is none */
                assert_int_equal(replies[r].n_arrays, 1);
                assert_string_equal((char *)replies[r].arrays[0].p, "bytes");
                coordinator_reply_free(&replies[r]);
            }
        }
        workers_close(c, true);
    }
}

static void signals_are_for_the_controller(void **state) {
    (void)state;
    struct coordinator_reply replies[2];
    struct workers *c = open_workers(2);
    if (workers_call_all(c, &(struct coordinator_call_args){.name = "get_signals", .answer_s = 60}, replies) < 0)
        fail_msg("%s", err_msg());
    for (int r = 0; r < 2; r++) coordinator_reply_free(&replies[r]);
    workers_close(c, true);
}

/* A program that embeds libverlc, as this one, is its own worker. */
static void workers_get_this_programs_arguments(void **state) {
    (void)state;
    for (int own = 0; own < 2; own++) {
        struct coordinator_reply reply;
        struct workers *c = open_program(1, own);
        if (workers_call_all(c, &(struct coordinator_call_args){.name = "arguments", .answer_s = 60}, &reply) < 0)
            fail_msg("%s", err_msg());
        assert_int_equal(json_integer_value(json_object_get(reply.result, "n")), own ? 1 : 2);
        coordinator_reply_free(&reply);
        workers_close(c, true);
    }
}

static void expect_error(const char *service, int code, const char *what, const char *detail) {
    struct coordinator_reply replies[3];
    struct workers *c = open_workers(3);
    assert_int_equal(workers_call_all(c, &(struct coordinator_call_args){.name = service, .answer_s = 60}, replies), code);
    if (!strstr(err_msg(), what) || !strstr(err_msg(), detail)) fail_msg("not '%s', '%s': %s", what, detail, err_msg());
    workers_close(c, false);
}

static void errors_name_the_rank(void **state) {
    (void)state;
    expect_error("refuse", ERR_INPUT, "rank 1 (host ", ": no such file");
    expect_error("unknown", ERR_INTERNAL, "rank ", "no service has the name 'unknown'");
    expect_error("leave", ERR_RANK, "rank 1 (host ", "");
}

static void a_worker_starts_no_workers(void **state) {
    (void)state;
    struct launch l;
    struct workers *c;
    char *const env[] = {"VERLC_RANK=0", "VERLC_RANKS=1", NULL};
    assert_int_equal(launch_read(&l, env), 0);
    assert_true(workers_started_this(&l));
    assert_int_equal(workers_open(&c, &(struct workers_args){.ranks = 1, .start_s = 1}, &l), ERR_INTERNAL);
}

int main(int argc, char **argv) {
    struct launch l;
    int rc = launch_read(&l, environ);
    if (rc >= 0 && workers_started_this(&l) && (argc == 1 || strcmp(argv[1], "worker") == 0)) {
        rc = worker_process_serve(&(struct workers_args){.start_s = 60}, &l, services);
        if (rc < 0) fprintf(stderr, "%s\n", err_msg());
        return rc < 0;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(calls_are_collected_in_order),   cmocka_unit_test(workers_get_this_programs_arguments),
        cmocka_unit_test(signals_are_for_the_controller), cmocka_unit_test(errors_name_the_rank),
        cmocka_unit_test(a_worker_starts_no_workers),
    };
    return cmocka_run_group_tests_name("ctl", tests, NULL, NULL);
}
