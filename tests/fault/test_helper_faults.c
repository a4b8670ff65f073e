/* Helpers that die, hang, print garbage, are missing or eat memory: each costs its
 * request, is named with what happened, and leaves no process or descriptor behind. */
#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "helper/helper.h"

#include <dirent.h>
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "concurrent.h"

static char dir[64];

static int setup(void **state) {
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/verlc_helper_XXXXXX");
    if (!mkdtemp(dir)) return -1;
    char to[128];
    snprintf(to, sizeof to, "%s/verlc_helpers", dir);
    if (symlink(SOURCE_DIR "/python/verlc_helpers", to) != 0) return -1;
    snprintf(to, sizeof to, "%s/faulty_helper.py", dir);
    if (symlink(SOURCE_DIR "/tests/fault/faulty_helper.py", to) != 0) return -1;
    return setenv("VERLC_HELPERS_DIR", dir, 1);
}

static int teardown(void **state) {
    (void)state;
    char p[128];
    snprintf(p, sizeof p, "%s/verlc_helpers", dir);
    unlink(p);
    snprintf(p, sizeof p, "%s/faulty_helper.py", dir);
    unlink(p);
    return rmdir(dir);
}

static struct helper *make(const struct helper_args *extra) {
    struct helper_args a = extra ? *extra : (struct helper_args){0};
    struct helper *h = NULL;
    a.module = "faulty_helper";
    assert_int_equal(helper_create(&h, &a), 0);
    return h;
}

/* One request written as JSON; the reply or NULL with *rc. */
static json_t *ask(struct helper *h, const char *request, double timeout_s, int *rc) {
    json_t *q = json_loads(request, JSON_ALLOW_NUL, NULL), *reply = NULL;
    assert_non_null(q);
    *rc = helper_call(h, q, timeout_s, &reply);
    json_decref(q);
    return *rc == 0 ? reply : NULL;
}

static void expect_ok(struct helper *h) {
    int rc;
    json_t *r = ask(h, "{\"do\":\"echo\",\"value\":\"h\\u00e9 \\u0000 \\ud83d\\ude00\"}", 20, &rc);
    if (rc) print_message("%s\n", err_msg());
    assert_int_equal(rc, 0);
    const json_t *v = json_object_get(r, "value");
    assert_int_equal(json_string_length(v), 3 + 1 + 1 + 1 + 4);
    assert_memory_equal(json_string_value(v), "h\xc3\xa9 \0 \xf0\x9f\x98\x80", 10);
    json_decref(r);
}

static void expect_fail(struct helper *h, const char *request, double timeout_s, int code, const char *text) {
    int rc;
    json_t *r = ask(h, request, timeout_s, &rc);
    assert_null(r);
    if (rc != code || !strstr(err_msg(), text)) print_message("%s: %d %s\n", request, rc, err_msg());
    assert_int_equal(rc, code);
    assert_non_null(strstr(err_msg(), text));
    assert_null(strchr(err_msg(), '\n'));
}

static int count_fds(void) {
    int n = 0;
    DIR *d = opendir("/proc/self/fd");
    for (struct dirent *e; (e = readdir(d));) n += e->d_name[0] != '.';
    closedir(d);
    return n - 1; /* opendir's own */
}

static void assert_no_children(void) {
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
    assert_int_equal(errno, ECHILD);
}

static void every_fault_is_survived(void **state) {
    (void)state;
    const int fds = count_fds();
    json_t *init = json_pack("{s:i}", "k", 5);
    struct helper *h = make(&(struct helper_args){.init = init, .max_reply_bytes = 1 << 20, .memory_bytes = (int64_t)1 << 30});
    expect_ok(h);
    expect_fail(h, "{\"do\":\"exit\"}", 20, ERR_HELPER, "exit code 7; its last output: last words");
    expect_ok(h);
    expect_fail(h, "{\"do\":\"segv\"}", 20, ERR_HELPER, "signal 11");
    expect_ok(h);
    expect_fail(h, "{\"do\":\"hang\"}", 0.3, ERR_TIMEOUT,
                "did not answer within 0.3 s and was killed; its last output: about to hang");
    expect_ok(h);
    expect_fail(h, "{\"do\":\"garbage\"}", 20, ERR_HELPER, "or garbage while serving a request and was killed");
    expect_ok(h);
    expect_fail(h, "{\"do\":\"text\"}", 20, ERR_HELPER, "not a JSON object");
    expect_ok(h);
    expect_fail(h, "{\"do\":\"wrong_id\"}", 20, ERR_HELPER, "broke the protocol");
    expect_ok(h);
    expect_fail(h, "{\"do\":\"memory\",\"bytes\":3000000000}", 20, ERR_NOMEM, "out of memory");
    expect_fail(h, "{\"do\":\"child\",\"die\":true}", 20, ERR_HELPER, "exit code 3");
    int rc;
    json_t *r = ask(h, "{\"do\":\"echo\"}", 20, &rc);
    assert_int_equal(json_integer_value(json_object_get(json_object_get(r, "init"), "k")), 5); /* init came again */
    assert_int_equal(json_integer_value(json_object_get(r, "n")), 1);
    json_decref(r);
    json_decref(init);
    helper_destroy(h);
    assert_no_children();
    assert_int_equal(count_fds(), fds);
}

static void refusals_keep_the_process(void **state) {
    (void)state;
    struct helper *h = make(&(struct helper_args){.max_reply_bytes = 40 << 20});
    expect_fail(h, "{\"do\":\"refuse\"}", 20, ERR_INPUT, "row 3 is bad (helper faulty_helper)");
    expect_fail(h, "{\"do\":\"raise\"}", 20, ERR_FORMAT, "ZeroDivisionError");
    expect_fail(h, "{\"do\":\"nan\"}", 20, ERR_FORMAT, "not JSON");
    expect_fail(h, "{\"do\":\"surrogate\"}", 20, ERR_FORMAT, "not JSON");
    for (int before = 0; before < 20; before++) { /* the integer may begin anywhere in the reply */
        char text[64];
        snprintf(text, sizeof text, "{\"do\":\"integer\",\"before\":%d}", before);
        expect_fail(h, text, 20, ERR_FORMAT, "an integer over 64 bits");
    }
    expect_fail(h, "{\"do\":\"key\"}", 20, ERR_FORMAT, "a NUL in a key");
    expect_fail(h, "{\"do\":\"deep\"}", 20, ERR_FORMAT, "not JSON");
    expect_fail(h, "{\"do\":\"unprintable\"}", 20, ERR_FORMAT, "<Unprintable>");
    expect_fail(h, "{\"do\":\"big\",\"bytes\":60000000}", 20, ERR_FORMAT, "limit 41943040");
    expect_fail(h, "[]", 20, ERR_FORMAT, "TypeError");
    int rc;
    json_t *r = ask(h, "{\"do\":\"print\",\"lines\":100000}", 20, &rc); /* 8 MB of prints do not block or corrupt */
    assert_int_equal(rc, 0);
    json_decref(r);
    r = ask(h, "{\"do\":\"big\",\"bytes\":30000000}", 20, &rc);
    assert_int_equal(json_string_length(r), 30000000);
    json_decref(r);
    r = ask(h, "{\"do\":\"echo\"}", 20, &rc);
    assert_int_equal(json_integer_value(json_object_get(r, "n")), 32); /* one process served them all */
    json_decref(r);
    helper_destroy(h);
    assert_no_children();
}

static void send_all(pid_t pid) {
    static const int stops[] = {SIGTERM, SIGINT, SIGHUP};
    for (int i = 0; i < 3; i++) assert_int_equal(kill(pid, stops[i]), 0);
}

/* Found below the reaper, which is our only child. */
static pid_t helper_pid(void) {
    for (int tries = 0; tries < 500; tries++) {
        char path[64];
        int reaper = 0, pid = 0;
        FILE *f = fopen("/proc/thread-self/children", "r");
        if (f && fscanf(f, "%d", &reaper) != 1) reaper = 0;
        if (f) fclose(f);
        snprintf(path, sizeof path, "/proc/%d/task/%d/children", reaper, reaper);
        f = reaper ? fopen(path, "r") : NULL;
        if (f && fscanf(f, "%d", &pid) != 1) pid = 0;
        if (f) fclose(f);
        snprintf(path, sizeof path, "/proc/%d/comm", pid);
        char name[32] = "";
        f = pid ? fopen(path, "r") : NULL;
        if (f && fscanf(f, "%31s", name) != 1) name[0] = '\0';
        if (f) fclose(f);
        if (strncmp(name, "python", 6) == 0) return pid;
        usleep(10000);
    }
    return 0;
}

/* As `ray job stop` and a closed terminal send them to every process: the helper goes on, at its start and in a request. */
static void signals_are_for_the_program(void **state) {
    (void)state;
    setenv("FAULTY_START", "slow", 1);
    struct helper *h = make(NULL);
    json_t *q = json_loads("{\"do\":\"sleep\",\"s\":0.5}", 0, NULL), *reply = NULL;
    assert_int_equal(helper_send(h, q), 0);
    unsetenv("FAULTY_START");
    const pid_t pid = helper_pid();
    send_all(pid);
    usleep(1300000); /* in the request */
    send_all(pid);
    assert_int_equal(helper_recv(h, 20, &reply), 0);
    json_decref(reply);
    json_decref(q);
    int rc;
    reply = ask(h, "{\"do\":\"echo\"}", 20, &rc);
    assert_int_equal(json_integer_value(json_object_get(reply, "pid")), pid);
    json_decref(reply);
    reply = ask(h, "{\"do\":\"children\"}", 20, &rc); /* what it starts ends by them as ever */
    assert_int_equal(rc, 0);
    assert_int_equal(json_integer_value(json_array_get(reply, 0)), -SIGTERM);
    assert_int_equal(json_integer_value(json_array_get(reply, 1)), SIGTERM);
    json_decref(reply);
    helper_destroy(h);
    assert_no_children();
}

static void processor_time_is_limited(void **state) {
    (void)state;
    struct helper *h = make(&(struct helper_args){.cpu_s = 1});
    expect_fail(h, "{\"do\":\"spin\"}", 30, ERR_HELPER, "processor time");
    expect_ok(h);
    helper_destroy(h);
}

static void start_failures(void **state) {
    (void)state;
    struct helper *h = make(&(struct helper_args){.start_timeout_s = 0.5});
    setenv("FAULTY_START", "hang", 1);
    expect_fail(h, "{\"do\":\"echo\"}", 20, ERR_TIMEOUT, "not ready after 0.5 s");
    setenv("FAULTY_START", "exit", 1);
    helper_destroy(h);
    h = make(NULL);
    expect_fail(h, "{\"do\":\"echo\"}", 20, ERR_HELPER, "died while starting: exit code 1; its last output: no good start");
    unsetenv("FAULTY_START");
    setenv("FAULTY_IMPORT", "no_such_package_x", 1);
    expect_fail(h, "{\"do\":\"echo\"}", 20, ERR_HELPER, "pip install no_such_package_x");
    unsetenv("FAULTY_IMPORT");
    expect_ok(h);
    helper_destroy(h);
    json_t *refuse = json_string("refuse");
    h = make(&(struct helper_args){.init = refuse});
    expect_fail(h, "{\"do\":\"echo\"}", 20, ERR_INVAL, "this init is refused");
    helper_destroy(h);
    json_decref(refuse);
    assert_no_children();
}

static void missing_pieces(void **state) {
    (void)state;
    struct helper *h = NULL;
    assert_int_equal(helper_create(&h, &(struct helper_args){.module = "verlc_helpers.nothing"}), ERR_HELPER);
    assert_non_null(strstr(err_msg(), "verlc_helpers/nothing.py is missing"));
    char *old = getenv("VERLC_PYTHON") ? xstrdup(getenv("VERLC_PYTHON")) : NULL;
    setenv("VERLC_PYTHON", "/no/such/python", 1);
    assert_int_equal(helper_create(&h, &(struct helper_args){.module = "faulty_helper"}), ERR_HELPER);
    assert_non_null(strstr(err_msg(), "apt-get install python3"));
    setenv("VERLC_PYTHON", "/bin/false", 1); /* runs, but is no Python */
    assert_int_equal(helper_create(&h, &(struct helper_args){.module = "faulty_helper"}), 0);
    expect_fail(h, "{\"do\":\"echo\"}", 20, ERR_HELPER, "died while starting: exit code 1");
    helper_destroy(h);
    if (old) setenv("VERLC_PYTHON", old, 1);
    else unsetenv("VERLC_PYTHON");
    free(old);
    setenv("VERLC_HELPERS_DIR", "/tmp", 1);
    assert_int_equal(helper_create(&h, &(struct helper_args){.module = "faulty_helper"}), ERR_HELPER);
    assert_non_null(strstr(err_msg(), "VERLC_HELPERS_DIR=/tmp"));
    setenv("VERLC_HELPERS_DIR", dir, 1);
}

/* A package of our name where the program is started is not ours; a module that only lies there is found. */
static void the_current_directory_comes_after_ours(void **state) {
    (void)state;
    char here[64] = "/tmp/verlc_beside_XXXXXX", package[96], file[128], *back = getcwd(NULL, 0);
    assert_non_null(mkdtemp(here));
    snprintf(package, sizeof package, "%s/verlc_helpers", here);
    snprintf(file, sizeof file, "%s/__init__.py", package);
    assert_int_equal(mkdir(package, 0700), 0);
    FILE *f = fopen(file, "w");
    assert_true(f && fputs("raise SystemExit(3)\n", f) >= 0 && fclose(f) == 0);
    assert_int_equal(chdir(here), 0);
    struct helper *h = make(NULL);
    expect_ok(h);
    helper_destroy(h);
    assert_int_equal(chdir(back), 0);
    free(back);
    assert_true(unlink(file) == 0 && rmdir(package) == 0 && rmdir(here) == 0);
}

static void pipelined_requests_keep_order_and_fail_together(void **state) {
    (void)state;
    struct helper *h = make(NULL);
    char *big = xmalloc(300001); /* fills both socket buffers: neither side may block the other */
    memset(big, 'z', 300000);
    big[300000] = '\0';
    for (int i = 0; i < 40; i++) {
        json_t *q = json_pack("{s:s, s:[i, s]}", "do", "echo", "value", i, big);
        assert_int_equal(helper_send(h, q), 0);
        json_decref(q);
    }
    assert_int_equal(helper_pending(h), 40);
    for (int i = 0; i < 40; i++) {
        json_t *r;
        assert_int_equal(helper_recv(h, 20, &r), 0);
        assert_int_equal(json_integer_value(json_array_get(json_object_get(r, "value"), 0)), i);
        json_decref(r);
    }
    json_t *q = json_pack("{s:s}", "do", "echo"), *die = json_pack("{s:s}", "do", "exit"), *r;
    assert_int_equal(helper_send(h, q), 0);
    assert_int_equal(helper_send(h, die), 0);
    assert_int_equal(helper_send(h, q), 0);
    assert_int_equal(helper_recv(h, 20, &r), 0);
    json_decref(r);
    assert_int_equal(helper_recv(h, 20, &r), ERR_HELPER);
    assert_int_equal(helper_pending(h), 0);
    assert_int_equal(helper_recv(h, 20, &r), ERR_HELPER);
    json_decref(q);
    json_decref(die);
    free(big);
    helper_destroy(h);
}

static void pool_loses_only_the_bad_request(void **state) {
    (void)state;
    const int fds = count_fds();
    static const char *const kinds[] = {"echo", "exit", "echo", "hang", "refuse", "echo", "segv", "echo"};
    struct helper_pool *p = NULL;
    assert_int_equal(helper_pool_create(&p, &(struct helper_args){.module = "faulty_helper"}, &(struct helper_pool_args){.n = 3}),
                     0);
    for (int i = 0; i < 24; i++) {
        int64_t ticket;
        json_t *q = json_pack("{s:s, s:i}", "do", kinds[i % 8], "value", i);
        assert_int_equal(helper_pool_send(p, q, strcmp(kinds[i % 8], "hang") == 0 ? 0.2 : 20, &ticket), 0);
        assert_int_equal(ticket, i);
        json_decref(q);
    }
    bool seen[24] = {0};
    struct helper_result r;
    for (int i = 0; i < 24; i++) {
        assert_int_equal(helper_pool_recv(p, 60, &r), 1);
        assert_in_range(r.ticket, 0, 23);
        assert_false(seen[r.ticket]);
        seen[r.ticket] = true;
        const char *kind = kinds[r.ticket % 8];
        if (strcmp(kind, "echo") == 0) {
            assert_int_equal(r.rc, 0);
            assert_int_equal(json_integer_value(json_object_get(r.reply, "value")), r.ticket);
        } else {
            assert_int_equal(r.rc, strcmp(kind, "hang") == 0 ? ERR_TIMEOUT : strcmp(kind, "refuse") == 0 ? ERR_INPUT : ERR_HELPER);
            assert_non_null(r.error);
        }
        helper_result_free(&r);
    }
    assert_int_equal(helper_pool_pending(p), 0);
    assert_int_equal(helper_pool_recv(p, 5, &r), 0); /* nothing pending: returns at once */
    /* destroyed with work under way and queued */
    json_t *q = json_pack("{s:s, s:i}", "do", "sleep", "s", 600);
    for (int i = 0; i < 6; i++) {
        int64_t ticket;
        assert_int_equal(helper_pool_send(p, q, 900, &ticket), 0);
    }
    json_decref(q);
    const double t = clock_now();
    helper_pool_destroy(p);
    assert_true(clock_now() - t < 5);
    assert_no_children();
    assert_int_equal(count_fds(), fds);
}

/* ---- many requests in one process ---- */

static struct helper_pool *make_pool(const struct helper_pool_args *args) {
    struct helper_pool *p = NULL;
    json_t *init = args->n_calls > 1 ? json_string("async") : NULL;
    assert_int_equal(helper_pool_create(&p, &(struct helper_args){.module = "faulty_helper", .init = init}, args), 0);
    json_decref(init);
    return p;
}

static struct helper_pool *make_concurrent(int n, int64_t n_calls) {
    return make_pool(&(struct helper_pool_args){.n = n, .n_calls = n_calls});
}

static int64_t send_to(struct helper_pool *p, const char *kind, double seconds, double timeout_s) {
    int64_t ticket;
    json_t *q = json_pack("{s:s, s:f}", "do", kind, "s", seconds);
    assert_int_equal(helper_pool_send(p, q, timeout_s, &ticket), 0);
    json_decref(q);
    return ticket;
}

/* The next result's ticket; rc is what it must be. */
static int64_t next(struct helper_pool *p, int rc, json_t **reply) {
    struct helper_result r;
    assert_int_equal(helper_pool_recv(p, 60, &r), 1);
    if (r.rc != rc) fail_msg("%lld: %s", (long long)r.ticket, r.error ? r.error : "no error");
    if (reply) *reply = json_incref(r.reply);
    const int64_t ticket = r.ticket;
    helper_result_free(&r);
    return ticket;
}

static void pool_serves_many_at_once(void **state) {
    (void)state;
    enum { N = 200 };
    const int fds = count_fds();
    struct helper_pool *p = make_concurrent(1, N);
    json_t *first, *last = NULL;
    send_to(p, "wait", 0, 20);
    assert_int_equal(next(p, 0, &first), 0);
    const double t = clock_now();
    for (int i = 0; i < N; i++) send_to(p, "wait", i == 0 ? 2 : 1, 20); /* the first takes longest */
    for (int i = 0; i < N - 1; i++) assert_true(next(p, 0, NULL) != 1);
    assert_int_equal(next(p, 0, &last), 1);
    assert_true(clock_now() - t < 10);    /* one by one: 201 s */
    assert_true(json_equal(first, last)); /* one process served them all */
    json_decref(first);
    json_decref(last);
    helper_pool_destroy(p);
    assert_no_children();
    assert_int_equal(count_fds(), fds);
}

/* Of a process of the pool, who served it; its pid. */
static json_int_t pid_of(struct helper_pool *p, int worker, const char *kind) {
    int64_t ticket;
    struct helper_result r;
    json_t *q = json_pack("{s:s}", "do", kind);
    assert_int_equal(helper_pool_send_to(p, worker, q, 20, &ticket), 0);
    assert_int_equal(helper_pool_recv(p, 60, &r), 1);
    assert_int_equal(r.ticket, ticket);
    assert_int_equal(r.rc, strcmp(kind, "exit") == 0 ? ERR_HELPER : 0);
    const json_int_t pid = json_integer_value(json_object_get(r.reply, "pid"));
    helper_result_free(&r);
    json_decref(q);
    return pid;
}

static void a_request_goes_to_its_process(void **state) {
    (void)state;
    struct helper_pool *p = make_pool(&(struct helper_pool_args){.n = 3, .n_tries = 2});
    json_int_t pid[3];
    for (int w = 0; w < 3; w++) pid[w] = pid_of(p, w, "echo");
    assert_true(pid[0] != pid[1] && pid[1] != pid[2] && pid[0] != pid[2]);
    for (int i = 0; i < 9; i++) assert_true(pid_of(p, i % 3, "echo") == pid[i % 3]);
    pid_of(p, 1, "exit"); /* twice: its own again */
    for (int w = 0; w < 3; w++) assert_true((pid_of(p, w, "echo") == pid[w]) == (w != 1));
    json_t *q = json_pack("{s:s, s:f}", "do", "sleep", "s", 0.2);
    int64_t ticket;
    for (int i = 0; i < 4; i++) assert_int_equal(helper_pool_send_to(p, 2, q, 20, &ticket), 0);
    assert_int_equal(helper_pool_pending(p), 4);
    const double t = clock_now();
    for (int i = 0; i < 4; i++) next(p, 0, NULL);
    assert_true(clock_now() - t > 0.7); /* one after another, though others are idle */
    json_decref(q);
    helper_pool_destroy(p);
    assert_no_children();
}

static void each_request_has_its_own_deadline(void **state) {
    (void)state;
    struct helper_pool *p = make_concurrent(1, 16);
    json_t *before, *after;
    const int64_t slow = send_to(p, "wait", 600, 1), stubborn = send_to(p, "stubborn", 0, 1), good = send_to(p, "wait", 2, 20);
    const int64_t cancelled = send_to(p, "cancel", 0, 20), refused = send_to(p, "refuse", 0, 20);
    const int64_t a = next(p, ERR_HELPER, NULL), b = next(p, ERR_INPUT, NULL);
    assert_true(a == cancelled && b == refused);
    const int64_t c = next(p, ERR_TIMEOUT, NULL), d = next(p, ERR_TIMEOUT, NULL);
    assert_true((c == slow && d == stubborn) || (c == stubborn && d == slow));
    assert_int_equal(next(p, 0, &before), good);
    send_to(p, "wait", 0, 20);
    next(p, 0, &after);
    assert_true(json_equal(before, after)); /* nobody was killed */
    json_decref(before);
    json_decref(after);
    helper_pool_destroy(p);
    /* a blocked event loop: that request has no answer, the others are served by a new process */
    for (int own_task = 0; own_task < 2; own_task++) {
        p = make_pool(&(struct helper_pool_args){.n = 1, .n_calls = 16, .n_tries = 5});
        const int64_t blocks = send_to(p, own_task ? "block" : "hang", 0, 1), held_up = send_to(p, "wait", 0.5, 20);
        assert_int_equal(next(p, ERR_TIMEOUT, NULL), blocks);
        assert_int_equal(next(p, 0, NULL), held_up);
        helper_pool_destroy(p);
    }
    assert_no_children();
}

/* Requests 7 and 27 of 40 end their process whenever they are served; no other is lost with them. */
static void only_the_guilty_are_blamed(void **state) {
    (void)state;
    const struct helper_pool_args pools[] = {{.n = 3, .n_tries = 3}, {.n = 2, .n_calls = 30, .n_tries = 3}};
    for (int k = 0; k < 2; k++) {
        struct helper_pool *p = make_pool(&pools[k]);
        for (int i = 0; i < 40; i++) send_to(p, i % 20 == 7 ? "exit" : pools[k].n_calls ? "wait" : "sleep", i % 3 * 0.002, 20);
        for (int i = 0; i < 40; i++) {
            struct helper_result r;
            assert_int_equal(helper_pool_recv(p, 60, &r), 1);
            if ((r.rc == 0) == (r.ticket % 20 == 7)) fail_msg("request %lld: %s", (long long)r.ticket, r.error);
            if (r.rc < 0) assert_non_null(strstr(r.error, "exit code 7"));
            if (r.rc < 0) assert_non_null(strstr(r.error, "processes before it"));
            helper_result_free(&r);
        }
        assert_int_equal(helper_pool_pending(p), 0);
        helper_pool_destroy(p);
    }
    assert_no_children();
    /* a process that does not start is no request's fault, and is not tried for ever */
    setenv("FAULTY_START", "exit", 1);
    struct helper_pool *p = make_pool(&pools[0]);
    for (int i = 0; i < 6; i++) send_to(p, "echo", 0, 20);
    for (int i = 0; i < 6; i++) next(p, ERR_HELPER, NULL);
    helper_pool_destroy(p);
    unsetenv("FAULTY_START");
    assert_no_children();
}

static void a_crash_costs_the_requests_in_flight(void **state) {
    (void)state;
    struct helper_pool *p = make_concurrent(2, 4);
    for (int i = 0; i < 2; i++) { /* both are up */
        send_to(p, "wait", 0.5, 20);
    }
    next(p, 0, NULL);
    next(p, 0, NULL);
    int64_t lost = 0, served = 0;
    for (int i = 0; i < 20; i++) send_to(p, i == 6 ? "exit" : "wait", 1, 20); /* 8 in flight, 12 queued */
    for (int i = 0; i < 20; i++) {
        struct helper_result r;
        assert_int_equal(helper_pool_recv(p, 60, &r), 1);
        assert_true(r.rc == 0 || (r.rc == ERR_HELPER && strstr(r.error, "exit code 7")));
        lost += r.rc < 0;
        served += r.rc == 0;
        helper_result_free(&r);
    }
    assert_int_equal(lost, 4);
    assert_int_equal(served, 16);
    /* cancelled with work in flight and queued: nothing is left, and the pool goes on */
    for (int i = 0; i < 20; i++) send_to(p, "wait", 600, 900);
    assert_int_equal(helper_pool_pending(p), 20);
    const double t = clock_now();
    helper_pool_cancel(p);
    assert_true(clock_now() - t < 5);
    assert_int_equal(helper_pool_pending(p), 0);
    assert_no_children();
    const int64_t ticket = send_to(p, "wait", 0, 20);
    assert_int_equal(next(p, 0, NULL), ticket);
    for (int i = 0; i < 20; i++) send_to(p, "stubborn", 0, 900);
    helper_pool_destroy(p);
    assert_no_children();
}

static bool is_gone(pid_t pid) {
    char path[64], text[256] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    FILE *f = fopen(path, "r");
    if (!f) return true;
    if (!fgets(text, sizeof text, f)) text[0] = '\0';
    fclose(f);
    const char *s = strrchr(text, ')');
    return s && s[1] && s[2] == 'Z'; /* dead, waiting for its adoptive parent */
}

static bool gone_within(pid_t pid, double seconds) {
    for (const double until = clock_now() + seconds; clock_now() < until; usleep(20000))
        if (is_gone(pid)) return true;
    return false;
}

static void nothing_outlives_us(void **state) {
    (void)state;
    struct helper *h = make(NULL);
    int rc;
    json_t *r = ask(h, "{\"do\":\"child\"}", 20, &rc);
    const pid_t grandchild = (pid_t)json_integer_value(r);
    json_decref(r);
    helper_destroy(h);
    assert_true(gone_within(grandchild, 5));

    /* a parent that is killed takes its helper along */
    int fd[2];
    assert_int_equal(pipe(fd), 0);
    const pid_t parent = fork();
    if (parent == 0) {
        struct helper *mine = make(NULL);
        json_t *e = ask(mine, "{\"do\":\"echo\"}", 20, &rc);
        pid_t pid = e ? (pid_t)json_integer_value(json_object_get(e, "pid")) : -1;
        json_t *hang = json_pack("{s:s}", "do", "hang"), *none = NULL;
        if (write(fd[1], &pid, sizeof pid) != sizeof pid) _exit(1);
        helper_call(mine, hang, 600, &none);
        _exit(0);
    }
    pid_t helper = -1;
    assert_int_equal(read(fd[0], &helper, sizeof helper), sizeof helper);
    assert_true(helper > 0);
    assert_false(is_gone(helper));
    kill(parent, SIGKILL);
    assert_int_equal(waitpid(parent, NULL, 0), parent);
    assert_true(gone_within(helper, 5));
    close(fd[0]);
    close(fd[1]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_fault_is_survived),
        cmocka_unit_test(refusals_keep_the_process),
        cmocka_unit_test(signals_are_for_the_program),
        cmocka_unit_test(processor_time_is_limited),
        cmocka_unit_test(start_failures),
        cmocka_unit_test(missing_pieces),
        cmocka_unit_test(the_current_directory_comes_after_ours),
        cmocka_unit_test(pipelined_requests_keep_order_and_fail_together),
        cmocka_unit_test(pool_loses_only_the_bad_request),
        cmocka_unit_test(pool_serves_many_at_once),
        cmocka_unit_test(a_request_goes_to_its_process),
        cmocka_unit_test(each_request_has_its_own_deadline),
        cmocka_unit_test(only_the_guilty_are_blamed),
        cmocka_unit_test(a_crash_costs_the_requests_in_flight),
        cmocka_unit_test(nothing_outlives_us),
    };
    return concurrent_tests(tests, sizeof tests / sizeof *tests, setup, teardown);
}
