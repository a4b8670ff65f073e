/* test_base_file_writer.c - files of every size around a block and a piece have their bytes and their hash, several at a time,
 * whether their source lends memory or fills it, read by one thread or several; a file that cannot be written is named, and ends
 * all, as does a source that fails. */
#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/file_writer.h"
#include "base/hash.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>
#include <cmocka.h>

#define OK(call)                                                                \
    do {                                                                        \
        if ((call) < 0) fail_msg("%s: %s (%s)", #call, err_msg(), err_trace()); \
    } while (0)

enum { PIECE = 4 << 20 };

static char dir[64];

static int setup(void **state) {
    (void)state;
    snprintf(dir, sizeof dir, "./verlc-test-XXXXXX"); /* not /tmp: a file system that takes O_DIRECT, if there is one */
    return mkdtemp(dir) ? 0 : -1;
}
static int teardown(void **state) {
    (void)state;
    return file_remove_tree(dir);
}

static char *name_of(size_t bytes) { return xasprintf("%s/%zu", dir, bytes); }

static char *bytes_of(size_t n) {
    char *p = xmalloc(n + 1);
    for (size_t i = 0; i < n; i++) p[i] = (char)((i * 2654435761u + n) >> 13);
    return p;
}

/* Bytes as a source has them: lent where they are, or copied; read by any thread, or in order by one. */
struct source {
    const char *p;
    bool lend;
    size_t fails_at; /* a read of it or of what is behind it; 0: none */
    size_t next;     /* in order */
    bool any_thread;
};

static int read_bytes(void *arg, size_t at, size_t n, char *dst, const char **p) {
    struct source *s = arg;
    if (s->fails_at > 0 && at + n > s->fails_at) FAIL(ERR_NUMERIC, "the source fails");
    if (!s->any_thread) assert_int_equal(at, s->next);
    if (!s->any_thread) s->next += n;
    if (s->lend) *p = s->p + at;
    else memcpy(dst, s->p + at, n);
    return 0;
}

static int add(struct file_writer *w, const char *path, size_t bytes, struct source *s) {
    return file_writer_add(w, path, bytes, &(struct file_source){read_bytes, s, s->any_thread});
}

/* Memory that is lent lies at a block's beginning, where it is written from, or shift bytes behind one. */
static void check_sizes(bool any_thread, bool lend, size_t shift) {
    static const size_t sizes[] = {0,         1,     4095,      4096,          4097,          PIECE - 1,
                                   PIECE + 0, 13003, PIECE + 1, PIECE + 12288, 2 * PIECE - 1, 12 * PIECE + 4097};
    enum { N = sizeof sizes / sizeof *sizes };
    struct file_writer *w;
    char *p[N], *whole[N], *want[N];
    file_writer_open(&w);
    for (int i = 0; i < N; i++) {
        char *path = name_of(sizes[i]), *bytes = bytes_of(sizes[i]);
        assert_int_equal(posix_memalign((void **)&whole[i], FILE_WRITER_BLOCK, sizes[i] + shift + 1), 0);
        p[i] = memcpy(whole[i] + shift, bytes, sizes[i] + 1);
        OK(file_write_atomic(path, "a longer one than the empty file", 32)); /* is replaced */
        OK(add(w, path, sizes[i], &(struct source){.p = p[i], .lend = lend, .any_thread = any_thread}));
        if (!lend) memset(p[i], 0xa5, sizes[i]); /* has been read, so that it is not looked at again */
        free(path);
        want[i] = bytes;
    }
    OK(file_writer_finish(w));
    for (int i = 0; i < N; i++) {
        struct buf got = {0};
        char *path = name_of(sizes[i]), hex[33];
        OK(file_read(&got, path, 0));
        assert_int_equal(got.n, sizes[i]);
        assert_memory_equal(got.p, want[i], got.n);
        OK(hash_file_hex(path, hex));
        assert_string_equal(hex, file_writer_hash(w, path));
        buf_free(&got);
        free(path);
        free(whole[i]);
        free(want[i]);
    }
    assert_null(file_writer_hash(w, "another"));
    file_writer_close(w);
}

static void test_sizes(void **state) {
    (void)state;
    for (int any_thread = 0; any_thread < 2; any_thread++) {
        check_sizes(any_thread, false, 0);
        check_sizes(any_thread, true, 0);
        check_sizes(any_thread, true, 8);
    }
}

/* A source that fails is what add says, and is not called any more once it has; nothing waits, nothing leaks. */
static void test_source_fails(void **state) {
    (void)state;
    char *path = name_of(5), *p = bytes_of((size_t)20 * PIECE);
    for (int i = 0; i < 4; i++) {
        struct file_writer *w;
        file_writer_open(&w);
        struct source s = {.p = p, .lend = i / 2, .any_thread = i % 2, .fails_at = (size_t)11 * PIECE};
        assert_int_equal(add(w, path, (size_t)20 * PIECE, &s), ERR_NUMERIC);
        memset(&s, 0, sizeof s);
        assert_int_equal(file_writer_finish(w), ERR_NUMERIC);
        assert_non_null(strstr(err_msg(), "the source fails"));
        file_writer_close(w);
    }
    free(path);
    free(p);
}

/* Closed without finish: nothing waits, nothing leaks. */
static void test_given_up(void **state) {
    (void)state;
    struct file_writer *w;
    char *path = name_of(5), *p = bytes_of((size_t)12 * PIECE);
    file_writer_open(&w);
    OK(add(w, path, (size_t)12 * PIECE, &(struct source){.p = p, .lend = true, .any_thread = true}));
    file_writer_close(w);
    free(path);
    free(p);
}

static void test_no_directory(void **state) {
    (void)state;
    struct file_writer *w;
    file_writer_open(&w);
    assert_int_equal(add(w, "/nonexistent/x", 3, &(struct source){.p = "abc"}), ERR_IO);
    assert_non_null(strstr(err_msg(), "/nonexistent/x"));
    file_writer_close(w);
}

/* A limit of the file's size: what is before it is written, then the file is named and every later call fails. */
static void test_too_large(void **state) {
    (void)state;
    const struct rlimit small = {PIECE + 4096, RLIM_INFINITY}, all = {RLIM_INFINITY, RLIM_INFINITY};
    struct file_writer *w;
    char *path = name_of(PIECE), *p = bytes_of((size_t)40 * PIECE);
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    file_writer_open(&w);
    const int rc = add(w, path, (size_t)40 * PIECE, &(struct source){.p = p, .any_thread = true}); /* more than are under way */
    assert_int_equal(rc, ERR_IO);
    assert_non_null(strstr(err_msg(), path));
    assert_non_null(strstr(err_msg(), "File too large"));
    assert_int_equal(file_writer_finish(w), ERR_IO);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &all), 0);
    file_writer_close(w);
    free(path);
    free(p);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_sizes), cmocka_unit_test(test_source_fails),
                                       cmocka_unit_test(test_given_up), cmocka_unit_test(test_no_directory),
                                       cmocka_unit_test(test_too_large)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
