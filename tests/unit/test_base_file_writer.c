/* test_base_file_writer.c - files of every size around a block and a piece have their bytes and their hash, several at a time; a
 * file that cannot be written is named, and ends all. */
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

/* Given in unequal parts, half of them in place. */
static void give(struct file_writer *w, const char *p, size_t n) {
    for (size_t at = 0, k = 1; at < n; at += k) {
        void *to;
        size_t room;
        k = at % 3 == 0 ? 100003 : 7;
        if (k > n - at) k = n - at;
        if (at % 2) {
            OK(file_writer_put(w, p + at, k));
            continue;
        }
        OK(file_writer_room(w, &to, &room));
        assert_true(room > 0);
        if (k > room) k = room;
        memcpy(to, p + at, k);
        file_writer_add(w, k);
    }
}

static void test_sizes(void **state) {
    (void)state;
    static const size_t sizes[] = {0,         1,     4095,      4096,          4097,          PIECE - 1,
                                   PIECE + 0, 13003, PIECE + 1, PIECE + 12288, 2 * PIECE - 1, 12 * PIECE + 4097};
    enum { N = sizeof sizes / sizeof *sizes };
    struct file_writer *w;
    file_writer_open(&w);
    for (int round = 0; round < 2; round++) /* a file that is there is replaced */
        for (int i = 0; i < N; i++) {
            char *path = name_of(sizes[i]), *p = bytes_of(sizes[i]);
            if (round == 0) OK(file_write_atomic(path, "a longer one than the empty file", 32));
            OK(file_writer_begin(w, path, sizes[i]));
            give(w, p, sizes[i]);
            OK(file_writer_end(w));
            free(path);
            free(p);
        }
    OK(file_writer_finish(w));
    for (int i = 0; i < N; i++) {
        struct buf got = {0};
        char *path = name_of(sizes[i]), *p = bytes_of(sizes[i]), hex[33];
        OK(file_read(&got, path, 0));
        assert_int_equal(got.n, sizes[i]);
        assert_memory_equal(got.p, p, got.n);
        OK(hash_file_hex(path, hex));
        assert_string_equal(hex, file_writer_hash(w, path));
        buf_free(&got);
        free(path);
        free(p);
    }
    assert_null(file_writer_hash(w, "another"));
    file_writer_close(w);
}

/* Closed in mid-file: nothing waits, nothing leaks. */
static void test_given_up(void **state) {
    (void)state;
    struct file_writer *w;
    char *path = name_of(5), *p = bytes_of(2 * PIECE);
    file_writer_open(&w);
    OK(file_writer_begin(w, path, 3 * PIECE));
    give(w, p, 2 * PIECE);
    file_writer_close(w);
    free(path);
    free(p);
}

static void test_no_directory(void **state) {
    (void)state;
    struct file_writer *w;
    file_writer_open(&w);
    assert_int_equal(file_writer_begin(w, "/nonexistent/x", 3), ERR_IO);
    assert_non_null(strstr(err_msg(), "/nonexistent/x"));
    file_writer_close(w);
}

/* A limit of the file's size: what is before it is written, then the file is named and every later call fails. */
static void test_too_large(void **state) {
    (void)state;
    const struct rlimit small = {PIECE + 4096, RLIM_INFINITY}, all = {RLIM_INFINITY, RLIM_INFINITY};
    struct file_writer *w;
    char *path = name_of(PIECE), *p = bytes_of(PIECE);
    int rc = 0;
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    file_writer_open(&w);
    OK(file_writer_begin(w, path, (size_t)40 * PIECE));
    for (int i = 0; rc == 0 && i < 40; i++) rc = file_writer_put(w, p, PIECE); /* more than are under way at once */
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
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_sizes), cmocka_unit_test(test_given_up),
                                       cmocka_unit_test(test_no_directory), cmocka_unit_test(test_too_large)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
