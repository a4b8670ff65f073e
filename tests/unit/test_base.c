/* test_base.c - src/base: errors, buffers, maps, files, checksums, the random
 * generator against published vectors, the thread pool, JSON.
 * Files are written under a fresh directory in TMPDIR and removed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/encoding/number.h"
#include "base/encoding/utf8.h"
#include "base/log.h"
#include "base/map.h"
#include "base/thread_pool.h"
#include "base/rng.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <math.h>
#include <pthread.h>
#include <pwd.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- err ---- */

static int fails_deep(void) { FAIL(ERR_INPUT, "file %s: gone", "x"); }
static int passes_on(void) {
    TRY(fails_deep());
    return 0;
}
static int cleans_up(int *cleaned) {
    int rc = 0;
    TRYG(passes_on(), out);
out:
    (*cleaned)++;
    return rc;
}
static void *other_thread(void *arg) {
    err_set(ERR_IO, "f", 1, "of another thread");
    return arg;
}

/* Ill-formed parts of a text. */
static int utf8_bad(const char *s) {
    int bad = 0;
    for (size_t n = strlen(s); n > 0;) {
        const int k = utf8_step(s, n);
        bad += k < 0;
        s += abs(k);
        n -= (size_t)abs(k);
    }
    return bad;
}

static void test_err(void **state) {
    (void)state;
    int cleaned = 0;
    assert_int_equal(cleans_up(&cleaned), ERR_INPUT);
    assert_int_equal(cleaned, 1);
    assert_string_equal(err_msg(), "file x: gone");
    const char *trace = err_trace();
    int hops = 1;
    while ((trace = strstr(trace, " < ")) != NULL) hops++, trace += 3;
    assert_int_equal(hops, 3);
    assert_int_equal(err_wrap(ERR_INPUT, "loading %s", "m"), ERR_INPUT);
    assert_string_equal(err_msg(), "loading m: file x: gone");
    assert_non_null(strstr(err_trace(), "test_base.c")); /* a message made longer keeps where it came from */
    struct err_saved why;
    err_save(&why);
    err_set(ERR_IO, "f", 1, "of a call in between");
    err_restore(&why);
    assert_int_equal(err_append(ERR_INPUT, "; %d left", 2), ERR_INPUT);
    assert_string_equal(err_msg(), "loading m: file x: gone; 2 left");
    for (hops = 1, trace = err_trace(); (trace = strstr(trace, " < ")) != NULL; trace += 3) hops++;
    assert_int_equal(hops, 5);
    err_set(ERR_IO, "f", 1, "loading m: file x: gone");
    assert_int_equal(err_set(ERR_IO, "f", 1, "again: %s", err_msg()), ERR_IO); /* own message as argument */
    assert_string_equal(err_msg(), "again: loading m: file x: gone");
    pthread_t t;
    assert_int_equal(pthread_create(&t, NULL, other_thread, NULL), 0);
    pthread_join(t, NULL);
    assert_string_equal(err_msg(), "again: loading m: file x: gone");

    char big[5000]; /* truncated, never overflows */
    memset(big, 'a', sizeof big - 1);
    big[sizeof big - 1] = '\0';
    err_set(ERR_IO, "f", 1, "%s", big);
    err_wrap(ERR_IO, "%s", big);
    err_append(ERR_IO, "%s", big);
    assert_true(strlen(err_msg()) < sizeof big);
    for (size_t lead = 0; lead < 4; lead++) { /* never cut inside a character, and UTF-8 whatever it quotes */
        memset(big, 'a', lead);
        for (size_t i = lead; i + 3 < sizeof big; i += 3) memcpy(big + i, "\xe6\x97\xa5", 4);
        err_set(ERR_IO, "f", 1, "%s", big);
        assert_int_equal(utf8_bad(err_msg()), 0);
        assert_true(strlen(err_msg()) > 2040);
        err_set(ERR_IO, "f", 1, "\xff%.4s and \xc3", "\xe6\x97\xa5\xe6\x97\xa5");
        assert_string_equal(err_msg(), "?\xe6\x97\xa5? and ");
        err_wrap(ERR_IO, "%s", big);
        err_append(ERR_IO, "%s", big);
        assert_int_equal(utf8_bad(err_msg()), 0);
    }
    for (int i = 0; i < 200; i++) err_pass(ERR_IO, "some/long/path/to/a/file.c", i);
    assert_true(strlen(err_trace()) < sizeof big);

    assert_int_equal(err_exit_status(0), 0);
    assert_int_equal(err_exit_status(7), 0); /* a count */
    assert_int_equal(err_exit_status(ERR_INVAL), 2);
    assert_int_equal(err_exit_status(ERR_FORMAT), 3);
    assert_int_equal(err_exit_status(ERR_IO), 4);
    assert_int_equal(err_exit_status(ERR_NUMERIC), 5);
    assert_int_equal(err_exit_status(ERR_TIMEOUT), 6);
    assert_int_equal(err_exit_status(-999), 1);
    assert_string_equal(err_name(ERR_NOMEM), "out of memory");
}

/* Data in a message neither steers the terminal nor makes a line of its own. */
static void test_log_escapes(void **state) {
    (void)state;
    static char got[1 << 14], longer[9000];
    int fd[2];
    assert_int_equal(pipe(fd), 0);
    const int saved = dup(2);
    assert_true(saved >= 0 && dup2(fd[1], 2) == 2);
    log_warn("row \x1b[2J%s\r", "a\nerror: not one");
    log_info("a table\n  of two lines");
    log_info("\xc2\x9b"
             "0m \xe9t\xc3\xa9"); /* CSI in one character; Latin-1 and UTF-8 */
    memset(longer, 'a', sizeof longer - 1);
    log_info("%s", longer); /* a line is as long as it is */
    dup2(saved, 2);
    close(saved);
    close(fd[1]);
    assert_true(read(fd[0], got, sizeof got - 1) > 0);
    close(fd[0]);
    const char want[] = "warning: row \\x1b[2Ja\\nerror: not one\\x0d\na table\n  of two lines\n\\xc2\\x9b"
                        "0m \\xe9t\xc3\xa9\n";
    assert_memory_equal(got, want, sizeof want - 1);
    assert_int_equal(strlen(got), sizeof want + sizeof longer - 1);
}

/* CHECK stops the process, also in release builds. */
static void test_check(void **state) {
    (void)state;
    const pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        const struct rlimit no_core = {0, 0};
        setrlimit(RLIMIT_CORE, &no_core);
        signal(SIGABRT, SIG_DFL);
        if (freopen("/dev/null", "w", stderr) == NULL) _exit(1);
        CHECK(getpid() < 0);
        _exit(0);
    }
    int status = 0;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

/* ---- buf, arena ---- */

static void test_buf(void **state) {
    (void)state;
    struct buf b = {0};
    char *s = buf_take(&b);
    assert_string_equal(s, "");
    free(s);
    for (int i = 0; i < 1000; i++) {
        assert_int_equal(buf_addf(&b, "%d,", i), 0);
        assert_int_equal(strlen(b.p), b.n);
    }
    assert_int_equal(buf_addc(&b, '\0'), 0); /* any byte */
    assert_int_equal(buf_adds(&b, "end"), 0);
    assert_memory_equal(b.p + b.n - 8, "999,\0end", 9);
    buf_reset(&b);
    assert_int_equal(b.n, 0);
    assert_string_equal(b.p, "");
    buf_free(&b);
    assert_null(b.p);

    b.max = 10;
    assert_int_equal(buf_adds(&b, "12345678"), 0);
    assert_int_equal(buf_adds(&b, "abc"), ERR_FORMAT);
    assert_string_equal(b.p, "12345678"); /* unchanged */
    assert_int_equal(buf_add(&b, "x", SIZE_MAX), ERR_FORMAT);
    assert_int_equal(buf_adds(&b, "90"), 0);
    s = buf_take(&b);
    assert_string_equal(s, "1234567890");
    assert_int_equal(b.max, 10); /* the ceiling stays, the text is gone */
    assert_int_equal(b.n, 0);
    free(s);

    int64_t *v = NULL, cap = 0;
    for (int64_t n = 1; n <= 1000; n++) {
        xgrow((void **)&v, &cap, n, sizeof *v);
        assert_true(cap >= n);
        v[n - 1] = n;
    }
    for (int64_t n = 0; n < 1000; n++) assert_int_equal(v[n], n + 1);
    free(v);
}

static void *layout(struct arena *a) { /* the same lines measure and bind */
    arena_take(a, 10);
    arena_take(a, 0);
    return arena_take(a, 300);
}
static void test_arena(void **state) {
    (void)state;
    struct arena a = {0};
    assert_null(layout(&a));
    assert_int_equal(a.used, 256 + 300);
    char *block = aligned_alloc(ARENA_ALIGN, 1024);
    struct arena b = {.base = block, .cap = a.used};
    assert_ptr_equal(layout(&b), block + 256);
    assert_int_equal(b.used, a.used);
    free(block);
}

/* ---- map ---- */

static void test_map(void **state) {
    (void)state;
    enum { N = 5000 };
    struct map m = {0};
    int64_t v = -1;
    char key[32];
    assert_false(map_gets(&m, "absent", &v));
    for (int64_t i = 0; i < N; i++) {
        const int n = snprintf(key, sizeof key, "k%lld", (long long)i);
        map_set(&m, key, (size_t)n, i);
    }
    map_set(&m, "k7", 2, 777); /* replaces */
    map_set(&m, "a\0b", 3, 1); /* keys are bytes */
    map_set(&m, "a\0c", 3, 2);
    map_set(&m, "", 0, 3);
    assert_int_equal(m.n, N + 3);
    for (int64_t i = 0; i < N; i++) {
        snprintf(key, sizeof key, "k%lld", (long long)i);
        assert_true(map_gets(&m, key, &v));
        assert_int_equal(v, i == 7 ? 777 : i);
        assert_string_equal(m.entries[i].key, key); /* insertion order */
    }
    assert_true(map_get(&m, "a\0c", 3, &v));
    assert_int_equal(v, 2);
    assert_true(map_get(&m, "", 0, NULL));
    assert_false(map_gets(&m, "a", NULL));
    map_free(&m);
    assert_int_equal(m.n, 0);
}

/* ---- files ---- */

static char *tmp_dir(void) {
    const char *t = getenv("TMPDIR");
    char *d = xasprintf("%s/verlc_base_XXXXXX", t ? t : "/tmp");
    if (mkdtemp(d) == NULL) fail_msg("cannot make %s", d);
    return d;
}
static char *read_text(const char *path) {
    struct buf b = {0};
    if (file_read(&b, path, 0) < 0) fail_msg("%s", err_msg());
    return buf_take(&b);
}

struct lines {
    struct buf text;
    int64_t n, stop_at;
};
static int add_line(void *arg, char *line, size_t n, int64_t no) {
    struct lines *l = arg;
    assert_int_equal(no, ++l->n);
    assert_int_equal(line[n], '\0');
    if (no == l->stop_at) FAIL(ERR_FORMAT, "line %lld", (long long)no);
    TRY(buf_add(&l->text, line, n));
    return buf_addc(&l->text, '|');
}

static void test_file(void **state) {
    (void)state;
    char *dir = tmp_dir(), *sub = file_join(dir, "a/b//c/"), *path = file_join(sub, "f.txt");
    struct buf b = {0};
    assert_int_equal(file_mkdirs(sub), 0);
    assert_int_equal(file_mkdirs(sub), 0); /* again is fine */
    assert_true(file_is_dir(sub));
    assert_int_equal(file_size(path), -1);

    assert_int_equal(file_write_atomic(path, "one\ntwo\r\n\nlast", 14), 0);
    assert_int_equal(file_size(path), 14);
    assert_int_equal(file_read(&b, path, 14), 0);
    assert_int_equal(file_read(&b, path, 13), ERR_INPUT); /* over the limit */
    buf_free(&b);
    assert_int_equal(file_read(&b, sub, 0), ERR_INPUT); /* a directory */
    assert_int_equal(file_read(&b, "/nonexistent/f", 0), ERR_INPUT);
    assert_non_null(strstr(err_msg(), "/nonexistent/f"));
    buf_free(&b);

    char *fifo = file_join(dir, "fifo"), of_shell[33];
    int ends[2];
    struct file_map none;
    assert_int_equal(mkfifo(fifo, 0600), 0);
    static const char *const devices[] = {"/dev/zero", "/dev/tty", "/dev/null"};
    assert_int_equal(file_read(&b, fifo, 0), ERR_INPUT); /* and does not wait for a writer */
    assert_non_null(strstr(err_msg(), "is a FIFO"));
    assert_int_equal(file_map_open(&none, fifo), ERR_INPUT);
    assert_int_equal(file_each_line(fifo, add_line, NULL), ERR_INPUT);
    assert_int_equal(hash_file_hex(fifo, of_shell), ERR_INPUT);
    for (size_t i = 0; i < sizeof devices / sizeof *devices; i++) assert_int_equal(file_read(&b, devices[i], 0), ERR_INPUT);
    free(fifo);
    assert_int_equal(pipe(ends), 0); /* <(...) */
    snprintf(of_shell, sizeof of_shell, "/dev/fd/%d", ends[0]);
    assert_int_equal(write(ends[1], "piped", 5), 5);
    close(ends[1]);
    assert_int_equal(file_read(&b, of_shell, 0), 0);
    assert_string_equal(b.p, "piped");
    assert_int_equal(file_map_open(&none, of_shell), ERR_INPUT);
    close(ends[0]);
    buf_free(&b);

    struct lines l = {0};
    assert_int_equal(file_each_line(path, add_line, &l), 0);
    assert_string_equal(l.text.p, "one|two\r||last|");
    buf_free(&l.text);
    l = (struct lines){.stop_at = 2};
    assert_int_equal(file_each_line(path, add_line, &l), ERR_FORMAT); /* the callback's error */
    assert_int_equal(l.n, 2);
    buf_free(&l.text);

    struct file_map m;
    assert_int_equal(file_map_open(&m, path), 0);
    assert_int_equal(m.n, 14);
    assert_memory_equal(m.p, "one\n", 4);
    file_unmap(&m);
    assert_int_equal(file_map_open(&m, sub), ERR_INPUT);
    assert_int_equal(file_write_atomic(path, "", 0), 0);
    assert_int_equal(file_map_open(&m, path), 0);
    assert_null(m.p);
    file_unmap(&m);

    assert_int_equal(file_mkdirs("/proc/self/no/such"), ERR_IO);
    char *under = file_join(path, "dir");
    assert_int_equal(file_mkdirs(under), ERR_IO); /* a file is in the way */
    free(under);
    assert_int_equal(file_remove_tree(dir), 0);
    assert_false(file_exists(dir));
    assert_int_equal(file_remove_tree(dir), 0); /* a missing path is fine */

    char *j = file_join("a/", "b");
    assert_string_equal(j, "a/b");
    free(j);
    free(path);
    free(sub);
    free(dir);
}

/* What Python's os.path.expanduser gives for the same. */
static void test_expand(void **state) {
    (void)state;
    static const char *const cases[][3] = {{"/home/me", "~/x", "/home/me/x"},
                                           {"/home/me", "~", "/home/me"},
                                           {"/home/me/", "~/x", "/home/me/x"},
                                           {"/", "~", "/"},
                                           {"/", "~/x", "/x"},
                                           {"/home/me", "a/~", "a/~"},
                                           {"/home/me", "", ""},
                                           {"/home/me", "~root", NULL},
                                           {"/home/me", "~no-such-user/x", "~no-such-user/x"},
                                           {NULL, "~/x", NULL}};
    char *home = xstrdup(getenv("HOME") ? getenv("HOME") : "/");
    const struct passwd *root = getpwnam("root");
    char *of_root = xstrdup(root ? root->pw_dir : "~root");
    const struct passwd *me = getpwuid(getuid());
    char *of_me = xasprintf("%s/x", me ? me->pw_dir : "~");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (cases[i][0]) setenv("HOME", cases[i][0], 1);
        else unsetenv("HOME");
        char *got = file_expand(cases[i][1]);
        assert_string_equal(got, cases[i][2] ? cases[i][2] : cases[i][0] ? of_root : of_me);
        free(got);
    }
    setenv("HOME", home, 1);
    free(of_me);
    free(of_root);
    free(home);
}

/* A link inside a tree is removed, what it points to is not. */
static void test_remove_tree_links(void **state) {
    (void)state;
    char *dir = tmp_dir(), *keep = file_join(dir, "keep"), *gone = file_join(dir, "gone");
    char *kept_file = file_join(keep, "f"), *link_path = file_join(gone, "link");
    assert_int_equal(file_mkdirs(keep), 0);
    assert_int_equal(file_mkdirs(gone), 0);
    assert_int_equal(file_write_atomic(kept_file, "x", 1), 0);
    assert_int_equal(symlink(keep, link_path), 0);
    assert_int_equal(file_remove_tree(gone), 0);
    assert_false(file_exists(gone));
    assert_true(file_exists(kept_file));
    assert_int_equal(file_remove_tree(dir), 0);
    free(link_path);
    free(kept_file);
    free(gone);
    free(keep);
    free(dir);
}

static int entries(const char *dir) {
    int n = 0;
    DIR *d = opendir(dir);
    assert_non_null(d);
    while (readdir(d)) n++;
    closedir(d);
    return n - 2;
}

/* Two processes never share a temporary name, and only such names are removed. */
static void test_temp_names(void **state) {
    (void)state;
    static const char *const others[] = {"f.tmp",
                                         "f.12-0123456789abcdef.tmp.x",
                                         "f.12-0123456789abcde.tmp",
                                         "f.x-0123456789abcdef.tmp",
                                         ".12-0123456789abcdef.tmp",
                                         "f12-0123456789abcdef.tmp"};
    char *dir = tmp_dir(), *longest = xcalloc(256, 1), *sub = file_join(dir, "sub//"), *a = file_temp_path(sub),
         *b = file_temp_path(sub), *in = file_join(a, "f");
    assert_string_not_equal(a, b);
    assert_true(file_is_temp_name(strrchr(a, '/') + 1));
    assert_ptr_equal(strstr(a, "sub."), strrchr(a, '/') + 1);
    memset(longest, 'x', 255);
    char *path = file_join(dir, longest);
    assert_int_equal(file_write_atomic(path, "x", 1), 0); /* NAME_MAX holds for its temporary name */
    assert_int_equal(file_mkdirs(a), 0);
    assert_int_equal(file_write_atomic(in, "x", 1), 0);
    assert_int_equal(file_write_atomic(b, "x", 1), 0);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        char *other = file_join(dir, others[i]);
        assert_int_equal(file_write_atomic(other, "x", 1), 0);
        free(other);
    }
    assert_int_equal(file_remove_temps(dir), 0);
    assert_false(file_exists(a) || file_exists(b));
    assert_int_equal(entries(dir), 1 + (int)(sizeof others / sizeof *others));
    assert_int_equal(file_remove_tree(dir), 0);
    assert_int_equal(file_remove_temps(dir), 0); /* no such directory */
    free(path);
    free(in);
    free(b);
    free(a);
    free(sub);
    free(longest);
    free(dir);
}

static void test_modes(void **state) {
    (void)state;
    static const unsigned modes[][2] = {{0600, 0600}, {0444, 0444}, {0666, 0644}, {04755, 0755}};
    struct stat st;
    char *dir = tmp_dir(), *path = file_join(dir, "f");
    const mode_t mask = umask(022);
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        assert_int_equal(file_write_atomic_mode(path, "x", 1, modes[i][0]), 0);
        assert_int_equal(stat(path, &st), 0);
        assert_int_equal(st.st_mode & 07777, modes[i][1]);
    }
    umask(mask);
    assert_int_equal(file_remove_tree(dir), 0);
    free(path);
    free(dir);
}

static void put(const char *dir, const char *name, const char *text) {
    char *path = file_join(dir, name);
    assert_int_equal(file_mkdirs(dir), 0);
    assert_int_equal(file_write_atomic(path, text, strlen(text)), 0);
    free(path);
}

static void assert_holds(const char *dir, const char *name, const char *text) {
    char *path = file_join(dir, name), *is = read_text(path);
    assert_string_equal(is, text);
    free(is);
    free(path);
}

/* renameat2 as on a file system without the exchange. */
static void refuse_exchange(void) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_renameat2, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[4])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, RENAME_EXCHANGE, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const struct sock_fprog program = {sizeof code / sizeof *code, code};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) _exit(77);
}

static int replaced_in_child(const char *tmp, const char *dir) {
    int status = -1;
    const pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        refuse_exchange();
        _exit(renameat2(AT_FDCWD, tmp, AT_FDCWD, dir, RENAME_EXCHANGE) == 0 ? 1 : file_replace_dir(tmp, dir) == 0 ? 0 : 2);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WEXITSTATUS(status);
}

static void test_replace_dir(void **state) {
    (void)state;
    char *root = tmp_dir(), *dir = file_join(root, "d"), *link_path = file_join(root, "link"), *old = file_join(root, "d.old.tmp"),
         *tmp = file_temp_path(dir);
    put(tmp, "f", "one");
    assert_int_equal(file_replace_dir(tmp, dir), 0); /* nothing was there */
    assert_holds(dir, "f", "one");
    put(tmp, "f", "two");
    assert_int_equal(file_replace_dir(tmp, dir), 0);
    assert_holds(dir, "f", "two");
    assert_int_equal(entries(root), 1);
    put(tmp, "f", "three");
    assert_int_equal(replaced_in_child(tmp, dir), 0);
    assert_holds(dir, "f", "three");
    assert_int_equal(entries(root), 1);
    assert_int_equal(symlink("d", link_path), 0);
    put(tmp, "f", "four");
    assert_int_equal(file_replace_dir(tmp, link_path), 0); /* the link is replaced, not what it leads to */
    assert_holds(dir, "f", "three");
    assert_holds(link_path, "f", "four");
    assert_int_equal(entries(root), 2);
    assert_int_equal(rename(dir, old), 0); /* killed between two renames */
    assert_int_equal(file_recover_dir(dir), 0);
    assert_holds(dir, "f", "three");
    put(old, "f", "older");
    assert_int_equal(file_recover_dir(dir), 0);
    assert_holds(dir, "f", "three");
    assert_int_equal(file_replace_dir(tmp, dir), ERR_IO); /* there is no tmp */
    assert_holds(dir, "f", "three");
    put(tmp, "f", "five");
    assert_int_equal(replaced_in_child(tmp, dir), 0); /* the older one in the way is removed */
    assert_holds(dir, "f", "five");
    assert_int_equal(entries(root), 2);
    assert_int_equal(file_remove_tree(root), 0);
    free(tmp);
    free(old);
    free(link_path);
    free(dir);
    free(root);
}

/* dir/name -> to; what file_in_dir says of it. */
static int linked(const char *dir, const char *name, const char *to) {
    char *link_path = file_join(dir, name), *path = NULL;
    assert_int_equal(symlink(to, link_path), 0);
    const int rc = file_in_dir(&path, dir, name);
    assert_true((rc == 0) == (path != NULL));
    if (rc < 0) assert_non_null(strstr(err_msg(), link_path));
    free(path);
    free(link_path);
    return rc;
}

static void test_in_dir(void **state) {
    (void)state;
    char *root = tmp_dir(), *dir = file_join(root, "model"), *alias = file_join(root, "alias"), *path = NULL,
         *own = file_join(dir, "own.json"), *by_alias = file_join(alias, "own.json"), *fifo = file_join(dir, "fifo"),
         *repo = file_join(root, "models--a--b"), *blobs = file_join(repo, "blobs"), *rev = file_join(repo, "snapshots/1f"),
         *other = file_join(root, "models--a--c/blobs"), *data = file_join(root, "datasets--a--b/snapshots/1f"),
         *data_blobs = file_join(root, "datasets--a--b/blobs"), *beside = file_join(root, "model2");
    put(root, "secret", "s");
    put(dir, "own.json", "{}");
    put(beside, "f", "x");
    assert_int_equal(file_in_dir(&path, dir, "none"), 0);
    assert_null(path);
    assert_int_equal(file_in_dir(&path, dir, "own.json"), 0);
    assert_string_equal(path, own);
    free(path);
    assert_int_equal(symlink("model", alias), 0);
    assert_int_equal(file_in_dir(&path, alias, "own.json"), 0); /* the directory itself may be a link */
    free(path);
    assert_int_equal(linked(dir, "inside", "own.json"), 0);
    assert_int_equal(linked(dir, "absolute", own), 0);
    assert_int_equal(linked(dir, "round", by_alias), 0);
    assert_int_equal(linked(dir, "out", "../secret"), ERR_INPUT);
    assert_int_equal(linked(dir, "name", "../model2/f"), ERR_INPUT); /* only begins as the directory's name does */
    assert_int_equal(linked(dir, "chain", "out"), ERR_INPUT);
    assert_int_equal(linked(dir, "loop", "loop"), ERR_INPUT);
    assert_int_equal(linked(dir, "dangling", "nothing"), ERR_INPUT);
    assert_int_equal(linked(dir, "subdir", "."), ERR_INPUT);
    assert_int_equal(mkfifo(fifo, 0600), 0);
    assert_int_equal(file_in_dir(&path, dir, "fifo"), ERR_INPUT);
    put(blobs, "abc", "x");
    put(rev, "own", "x");
    put(other, "abc", "x");
    put(data_blobs, "abc", "x");
    put(data, "own", "x");
    assert_int_equal(linked(rev, "f", "../../blobs/abc"), 0); /* as the hub cache has it */
    assert_int_equal(linked(rev, "other", "../../../models--a--c/blobs/abc"), ERR_INPUT);
    assert_int_equal(linked(rev, "up", "../../../secret"), ERR_INPUT);
    assert_int_equal(linked(data, "f", "../../blobs/abc"), ERR_INPUT);
    assert_int_equal(file_remove_tree(root), 0);
    free(beside);
    free(data_blobs);
    free(data);
    free(other);
    free(rev);
    free(blobs);
    free(repo);
    free(fifo);
    free(by_alias);
    free(own);
    free(alias);
    free(dir);
    free(root);
}

/* A write that fails part way (here: a limit on the size of files, as a full disk does) leaves the
 * old file and no other. */
static void test_atomic_failure(void **state) {
    (void)state;
    char *dir = tmp_dir(), *path = file_join(dir, "f");
    assert_int_equal(file_write_atomic(path, "old", 3), 0);
    const pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        const struct rlimit small = {1000, 1000};
        char *big = xcalloc(5000, 1);
        signal(SIGXFSZ, SIG_IGN);
        setrlimit(RLIMIT_FSIZE, &small);
        const int rc = file_write_atomic(path, big, 5000);
        _exit(rc == ERR_IO && strstr(err_msg(), path) ? 0 : 1);
    }
    int status = -1;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    char *text = read_text(path);
    assert_string_equal(text, "old");
    free(text);
    assert_int_equal(entries(dir), 1);
    assert_int_equal(file_remove_tree(dir), 0);
    assert_int_equal(file_write_atomic(path, "x", 1), ERR_IO); /* no such directory */
    free(path);
    free(dir);
}

static void test_hash(void **state) {
    (void)state;
    char *dir = tmp_dir(), *path = file_join(dir, "f"), a[33], b[33];
    char *data = xcalloc(3 << 20, 1);
    for (int i = 0; i < 3 << 20; i++) data[i] = (char)(i * 31 + (i >> 9));
    assert_int_equal(file_write_atomic(path, data, 3 << 20), 0);
    hash_hex(data, 3 << 20, a);
    assert_int_equal(hash_file_hex(path, b), 0);
    assert_string_equal(a, b);
    data[2 << 20] ^= 1;
    hash_hex(data, 3 << 20, b);
    assert_string_not_equal(a, b);
    /* XXH3 of nothing, from the xxHash specification's reference implementation */
    assert_true(hash64("", 0) == 0x2d06800538d394c2u);
    hash_hex("", 0, a);
    assert_string_equal(a, "99aa06d3014798d86001c324468d497f");
    assert_int_equal(hash_file_hex("/nonexistent/f", a), ERR_INPUT);
    assert_int_equal(file_remove_tree(dir), 0);
    free(data);
    free(path);
    free(dir);
}

/* ---- rng ---- */

/* Known answers of philox4x32-10 from Random123's kat_vectors (Salmon et al. 2011). */
static void test_philox(void **state) {
    (void)state;
    static const struct {
        uint32_t ctr[4], key[2], want[4];
    } kat[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < sizeof kat / sizeof kat[0]; i++) {
        uint32_t out[4];
        philox4x32(out, kat[i].ctr, kat[i].key);
        assert_memory_equal(out, kat[i].want, sizeof out);
    }
}

static void test_rng_token(void **state) {
    (void)state;
    enum { N = 20000 };
    const float base = rng_token(1, 2, 3, 4);
    assert_true(base == rng_token(1, 2, 3, 4));
    /* every part of the address counts, high halves too */
    assert_true(base != rng_token(2, 2, 3, 4) && base != rng_token(1, 3, 3, 4));
    assert_true(base != rng_token(1, 2, 4, 4) && base != rng_token(1, 2, 3, 5));
    assert_true(base != rng_token(1 + (1ull << 32), 2, 3, 4) && base != rng_token(1, 2 + (1ull << 32), 3, 4));
    double sum = 0, sq = 0;
    for (uint32_t i = 0; i < N; i++) {
        const double u = rng_token(42, 7, i % 5, i / 5);
        assert_true(u >= 0 && u < 1);
        sum += u;
        sq += u * u;
    }
    /* mean 1/2 with deviation 0.002, mean square 1/3 with 0.0021: five deviations */
    assert_true(fabs(sum / N - 0.5) < 0.0102 && fabs(sq / N - 1.0 / 3) < 0.0106);
}

static void test_rng_stream(void **state) {
    (void)state;
    enum { N = 20000 };
    struct rng a = {.seed = 5, .stream = RNG_DATA}, other = {.seed = 5, .stream = RNG_INIT};
    uint32_t first[10];
    int equal = 0;
    for (int i = 0; i < 10; i++) first[i] = rng_u32(&a);
    for (int i = 0; i < 10; i++) equal += rng_u32(&other) == first[i];
    assert_int_equal(equal, 0);
    struct rng resumed = {.seed = 5, .stream = RNG_DATA, .n = 3}; /* the count is the whole state */
    for (int i = 3; i < 10; i++) assert_int_equal(rng_u32(&resumed), first[i]);

    double sum = 0, sq = 0;
    int64_t seen[7] = {0}, perm[100];
    for (int i = 0; i < N; i++) {
        const double x = rng_normal(&a), u = rng_unit(&a);
        assert_true(isfinite(x) && u >= 0 && u < 1);
        sum += x;
        sq += x * x;
        seen[rng_below(&a, 7)]++;
    }
    /* deviations 0.007 and 0.01; counts 2857 with 49: five of each */
    assert_true(fabs(sum / N) < 0.036 && fabs(sq / N - 1) < 0.05);
    for (int i = 0; i < 7; i++) assert_true(llabs(seen[i] - N / 7) < 250);
    assert_int_equal(rng_below(&a, 1), 0);
    for (int i = 0; i < 1000; i++) assert_true(rng_below(&a, (1ull << 63) + 1) <= 1ull << 63);

    for (int64_t i = 0; i < 100; i++) perm[i] = i;
    rng_shuffle(&a, perm, 100);
    int64_t moved = 0, total = 0;
    for (int64_t i = 0; i < 100; i++) {
        moved += perm[i] != i;
        total += perm[i];
    }
    assert_true(moved > 80); /* one fixed point is expected */
    assert_int_equal(total, 4950);
    rng_shuffle(&a, perm, 1);
    rng_shuffle(&a, perm, 0);
}

/* ---- pool ---- */

struct job {
    _Atomic int64_t *hits; /* (n_parts) */
    _Atomic int bad_thread;
    _Atomic int denormals;
    int n_threads;
};
static void part(void *arg, int64_t i, int thread) {
    struct job *j = arg;
    volatile float tiny = 1e-38f; /* its tenth is denormal: zero under FTZ */
    atomic_fetch_add(&j->hits[i], 1);
    if (thread < 0 || thread >= j->n_threads) atomic_store(&j->bad_thread, 1);
    if (tiny * 0.1f != 0) atomic_store(&j->denormals, 1);
}

static void test_pool(void **state) {
    (void)state;
    enum { MAX_PARTS = 1000, JOBS = 300 };
    _Atomic int64_t *hits = xcalloc(MAX_PARTS, sizeof *hits);
    for (int n_threads = 1; n_threads <= 4; n_threads++) {
        struct pool *p;
        assert_int_equal(pool_create(&p, n_threads), 0);
        assert_int_equal(pool_threads(p), n_threads);
        struct job j = {.hits = hits, .n_threads = n_threads};
        for (int job = 0; job < JOBS; job++) {
            const int64_t n = job % 10 == 0 ? 3 * job % MAX_PARTS : job % 7; /* 0 parts too */
            for (int64_t i = 0; i < n; i++) atomic_store(&hits[i], 0);
            pool_run(p, n, part, &j);
            for (int64_t i = 0; i < n; i++) assert_int_equal(atomic_load(&hits[i]), 1); /* each once, all done */
        }
        if (n_threads == 2) { /* workers that went to sleep are woken */
            usleep(50000);
            pool_run(p, 100, part, &j);
        }
        assert_int_equal(atomic_load(&j.bad_thread), 0);
#if defined(__x86_64__)
        assert_int_equal(atomic_load(&j.denormals), 0);
#endif
        pool_destroy(p);
    }
    pool_destroy(NULL);
    free(hits);
    for (int64_t n = 0; n < 40; n++) /* ranges tile [0, n) */
        for (int64_t parts = 1; parts < 12; parts++) {
            int64_t end = 0;
            for (int64_t i = 0; i < parts; i++) {
                int64_t lo, hi;
                pool_range(n, parts, i, &lo, &hi);
                assert_int_equal(lo, end);
                assert_true(hi >= lo && hi - lo <= n / parts + 1);
                end = hi;
            }
            assert_int_equal(end, n);
        }
}

static void test_clock(void **state) {
    (void)state;
    const double t = clock_now();
    usleep(2000);
    const double dt = clock_now() - t;
    assert_true(dt >= 0.002 && dt < 5);
    assert_true(clock_wall() > 1.6e9); /* after 2020 */
    assert_int_equal(clock_poll_ms(clock_awake() - 1), 0);
    const int ms = clock_poll_ms(clock_awake() + 10);
    assert_true(ms > 9000 && ms <= 10001);
    assert_true(clock_poll_ms(clock_awake() + 1e12) > 1000000000); /* no overflow */
}

/* A process that is stopped for a second has been awake for less than that. This test is the first to read the awake
   clock: a child of fork inherits neither its thread nor, if that thread holds it, a lock that is ever released. */
static void test_clock_stopped(void **state) {
    (void)state;
    int status;
    const pid_t child = fork();
    if (child == 0) {
        alarm(30);
        const double now = clock_now(), awake = clock_awake();
        raise(SIGSTOP);
        const double passed = clock_now() - now, counted = clock_awake() - awake;
        _exit(passed > 1 && counted > 0 && counted < CLOCK_GAP_S + 0.3 ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &status, WUNTRACED), child);
    assert_true(WIFSTOPPED(status));
    usleep(1200000);
    kill(child, SIGCONT);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* ---- json ---- */

/* Shortest, as Python prints it, and read back as the same bits: the corners, and doubles and floats of any bits. */
static void test_number_text(void **state) {
    (void)state;
    static const struct {
        double v;
        const char *text;
    } cases[] = {{0.24, "0.24"},
                 {0.1 + 0.2, "0.30000000000000004"},
                 {1.1, "1.1"},
                 {3, "3.0"},
                 {-0.0, "-0.0"},
                 {1e-5, "1e-05"},
                 {9.5367431640625e-07, "9.5367431640625e-07"},
                 {0.0001, "0.0001"},
                 {1e22, "1e+22"},
                 {9007199254740992.0, "9007199254740992.0"},
                 {5e-324, "5e-324"},
                 {DBL_MIN, "2.2250738585072014e-308"},
                 {DBL_MAX, "1.7976931348623157e+308"},
                 {-INFINITY, "-inf"}};
    struct rng r = {.seed = 3, .stream = RNG_TEST};
    char s[NUMBER_TEXT], other[64];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        number_text(cases[i].v, s);
        assert_string_equal(s, cases[i].text);
    }
    for (int i = 0; i < 200000; i++) {
        const uint64_t bits = (uint64_t)rng_u32(&r) << 32 | rng_u32(&r);
        double v, back;
        float f;
        memcpy(&v, &bits, sizeof v);
        memcpy(&f, &bits, sizeof f);
        if (!isfinite(v) || !isfinite(f)) continue;
        number_text(v, s);
        back = strtod(s, NULL);
        assert_memory_equal(&back, &v, sizeof v);
        if (fabs(v) > DBL_MIN) { /* one digit less is another number */
            int digits = 17;
            while (digits > 1 && (snprintf(other, sizeof other, "%.*e", digits - 2, v), strtod(other, NULL) == v)) digits--;
            int n = 0;
            for (const char *c = s; *c && *c != 'e'; c++) n += *c >= '0' && *c <= '9' && (n > 0 || *c != '0');
            if (strchr(s, 'e')) assert_int_equal(n, digits);
        }
        if (!(fabsf(f) >= FLT_MIN)) continue; /* such a float is 0 in this program */
        number_text(number_of_f32(f), s);
        const float back32 = strtof(s, NULL);
        assert_memory_equal(&back32, &f, sizeof f);
        assert_true(strcspn(s, "e") <= 12 || !strchr(s, 'e')); /* sign, point, 9 digits */
    }
    number_text(number_of_f32(0.24f), s);
    assert_string_equal(s, "0.24");
}

/* Real numbers of a JSON text are written so; whole ones, strings and keys that look like numbers are as they were. */
static void test_json_numbers(void **state) {
    (void)state;
    static const char text[] =
        "{\"a0.1000000000000000055\":0.24,\"s\":\"0.1000000000000000055 \\\" 1e5\\\\\",\"n\":[1,-7,1.0,-1e-05,"
        "1e+30,123456789012345678],\"z\":null}";
    struct buf b = {0};
    json_t *v;
    assert_int_equal(json_parse(&v, text, strlen(text), "text"), 0);
    assert_int_equal(json_dump_line(&b, v), 0);
    assert_string_equal(b.p, text);
    json_decref(v);
    buf_free(&b);
}

static void test_json(void **state) {
    (void)state;
    static const char text[] = "{\"i\": -9007199254740993, \"f\": 0.1, \"b\": true, \"s\": \"h\\u00e9\\u0000x\", \"n\": null}";
    json_t *v = NULL;
    int64_t i = 5;
    double f = 5;
    bool b = false;
    const char *s = "default";
    assert_int_equal(json_parse(&v, text, strlen(text), "stdin:3"), 0);
    assert_int_equal(json_i64(v, "i", &i, "w"), 0);
    assert_true(i == -9007199254740993);
    assert_int_equal(json_f64(v, "f", &f, "w"), 0);
    assert_true(f == 0.1);
    assert_int_equal(json_f64(v, "i", &f, "w"), 0); /* a whole number is a number */
    assert_int_equal(json_bool(v, "b", &b, "w"), 0);
    assert_true(b);
    assert_int_equal(json_i64(v, "f", &i, "w"), ERR_FORMAT);
    assert_int_equal(json_i64(v, "missing", &i, "stdin:3"), ERR_FORMAT);
    assert_non_null(strstr(err_msg(), "stdin:3"));
    assert_non_null(strstr(err_msg(), "missing"));
    assert_int_equal(json_str(v, "i", &s, "w"), ERR_FORMAT);
    assert_string_equal(s, "default");                  /* written only on success */
    assert_int_equal(json_str_opt(v, "n", &s, "w"), 0); /* null: the default stays */
    assert_int_equal(json_str_opt(v, "missing", &s, "w"), 0);
    assert_string_equal(s, "default");
    assert_int_equal(json_i64_opt(v, "s", &i, "w"), ERR_FORMAT); /* there, but of another type */

    struct buf out = {0};
    json_t *again = NULL;
    assert_int_equal(json_dump_line(&out, v), 0);
    assert_null(strchr(out.p, '\n'));
    assert_int_equal(json_parse(&again, out.p, out.n, "again"), 0);
    assert_true(json_equal(v, again));
    json_decref(again);
    buf_reset(&out);
    json_t *third = json_real(1.0 / 3);
    assert_int_equal(json_dump_line(&out, third), 0);
    assert_true(strtod(out.p, NULL) == 1.0 / 3); /* parses back to the same value */
    json_decref(third);
    buf_free(&out);

    static const char *const bad[] = {"", "{", "{\"a\":1,}", "[1 2]", "{\"a\":1} x", "nul", "\"\xff\"", "1e999"};
    for (size_t k = 0; k < sizeof bad / sizeof bad[0]; k++) {
        json_t *none = NULL;
        assert_int_equal(json_parse(&none, bad[k], strlen(bad[k]), "stdin:9"), ERR_FORMAT);
        assert_non_null(strstr(err_msg(), "stdin:9"));
        assert_null(none);
    }
    char *deep = xmalloc(200000); /* nesting is limited, not a stack overflow */
    memset(deep, '[', 200000);
    json_t *none = NULL;
    assert_int_equal(json_parse(&none, deep, 200000, "deep"), ERR_FORMAT);
    free(deep);

    char *dir = tmp_dir(), *path = file_join(dir, "v.json");
    assert_int_equal(json_save_atomic(path, v), 0);
    assert_int_equal(json_load(&again, path, 0), 0);
    assert_true(json_equal(v, again));
    json_decref(again);
    assert_int_equal(json_load(&again, path, 5), ERR_INPUT);
    assert_int_equal(json_load(&again, dir, 0), ERR_INPUT);
    assert_int_equal(file_remove_tree(dir), 0);
    free(path);
    free(dir);
    json_decref(v);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_err),           cmocka_unit_test(test_check),
        cmocka_unit_test(test_log_escapes),   cmocka_unit_test(test_buf),
        cmocka_unit_test(test_arena),         cmocka_unit_test(test_map),
        cmocka_unit_test(test_file),          cmocka_unit_test(test_remove_tree_links),
        cmocka_unit_test(test_expand),        cmocka_unit_test(test_temp_names),
        cmocka_unit_test(test_modes),         cmocka_unit_test(test_replace_dir),
        cmocka_unit_test(test_in_dir),        cmocka_unit_test(test_atomic_failure),
        cmocka_unit_test(test_hash),          cmocka_unit_test(test_philox),
        cmocka_unit_test(test_rng_token),     cmocka_unit_test(test_rng_stream),
        cmocka_unit_test(test_clock_stopped), cmocka_unit_test(test_pool),
        cmocka_unit_test(test_clock),         cmocka_unit_test(test_json),
        cmocka_unit_test(test_number_text),   cmocka_unit_test(test_json_numbers),
    };
    return cmocka_run_group_tests_name("base", tests, NULL, NULL);
}
