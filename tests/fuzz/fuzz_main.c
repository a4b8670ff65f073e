/* fuzz_main.c - runs a fuzz target where there is no libFuzzer: every file of the
 * corpus as it is, then changed ones, always the same sequence.
 *
 *   fuzz_X [--rounds N] [--seconds S] [--keep DIR] FILE|DIR...
 *
 * The inputs run in a child process, in memory that both see; when the child dies or
 * takes 20 s over one input, the parent keeps that input as DIR/crash-NAME and exits 1.
 * `fuzz_X FILE` runs a kept one again.  No coverage guides it: libFuzzer finds more. */
#include "fuzz.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/rng.h"

#include <dirent.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

enum { INPUT_MAX = 1 << 20, PER_INPUT_S = 20, LOOK_EVERY = 16 };

struct seeds {
    struct buf *p;
    int64_t n, cap;
};
struct shared { /* what the child is at, for the parent */
    int64_t done;
    size_t n;
    uint8_t input[INPUT_MAX];
};
struct plan {
    int64_t rounds; /* changed inputs; -1: until the time is over */
    double seconds; /* 0: no limit */
    const char *keep;
};

static int add_file(struct seeds *s, const char *path) {
    struct buf b = {0};
    TRY(file_read(&b, path, INPUT_MAX));
    xgrow((void **)&s->p, &s->cap, s->n + 1, sizeof *s->p);
    s->p[s->n++] = b;
    return 0;
}

/* A file, or every file of a directory by name, so that the sequence is the same everywhere. */
static int add_path(struct seeds *s, const char *path) {
    if (!file_is_dir(path)) return add_file(s, path);
    struct dirent **list;
    const int n = scandir(path, &list, NULL, alphasort);
    if (n < 0) FAIL(ERR_INPUT, "%s: cannot be listed", path);
    int rc = 0;
    for (int i = 0; i < n; i++) {
        char *file = file_join(path, list[i]->d_name);
        if (rc == 0 && list[i]->d_name[0] != '.') rc = add_file(s, file);
        free(file);
        free(list[i]);
    }
    free(list);
    return rc;
}

/* ---- changing an input ---- */

static void splice(struct buf *b, size_t at, size_t drop, const void *p, size_t n) {
    struct buf out = {0};
    buf_add(&out, b->p, at);
    buf_add(&out, p, n);
    buf_add(&out, b->p + at + drop, b->n - at - drop);
    buf_free(b);
    *b = out;
}

static void change_once(struct buf *b, const struct buf *other, struct rng *r) {
    static const char *const tokens[] = {
        "${",      "}",       "[",    "]",        "{",    ",",      ":",     "\"",
        "'",       "\\",      "null", "true",     "-1",   "0",      "1e400", "9223372036854775808",
        "\\u0000", "\\ud800", "\xff", "\xe2\x96", "\n",   " ",      "#### ", "\\boxed{",
        "(?:",     ")",       "*",    "+",        "{2,}", "\\p{L}", "|",     "(?=",
        "..",      "/",
    };
    if (b->n == 0) buf_addc(b, 0);
    const size_t at = (size_t)rng_below(r, rng_below(r, 3) ? b->n : (b->n < 64 ? b->n : 64)); /* headers stand in front */
    const size_t left = b->n - at;
    const char *t = tokens[rng_below(r, sizeof tokens / sizeof tokens[0])];
    switch (rng_below(r, 7)) {
    case 0: b->p[at] = (char)rng_below(r, 256); break;
    case 1: b->p[at] ^= (char)(1 << rng_below(r, 8)); break;
    case 2: splice(b, at, 0, t, strlen(t)); break;
    case 3: splice(b, at, (size_t)rng_below(r, 1 + (left < 16 ? left : 16)), t, strlen(t)); break;
    case 4: splice(b, at, (size_t)rng_below(r, left + 1), "", 0); break;
    case 5: { /* a piece of it once more */
        const size_t n = (size_t)rng_below(r, 1 + (left < 200 ? left : 200));
        char *piece = xmalloc(n + 1);
        memcpy(piece, b->p + at, n);
        splice(b, (size_t)rng_below(r, b->n + 1), 0, piece, n);
        free(piece);
        break;
    }
    default: /* the end of another one */
        if (other->n) {
            const size_t from = (size_t)rng_below(r, other->n);
            splice(b, at, left, other->p + from, other->n - from);
        }
    }
}

/* ---- running ---- */

/* In memory of its exact size, so that a sanitizer sees one byte too far. */
static void run_one(struct shared *s, const struct buf *b) {
    s->n = b->n < INPUT_MAX ? b->n : INPUT_MAX;
    if (s->n) memcpy(s->input, b->p, s->n);
    uint8_t *exact = xmalloc(s->n ? s->n : 1);
    memcpy(exact, s->input, s->n);
    alarm(PER_INPUT_S);
    LLVMFuzzerTestOneInput(exact, s->n);
    free(exact);
    s->done++;
}

static void run_all(struct shared *s, const struct seeds *seeds, const struct plan *p) {
    struct rng r = {.seed = 1, .stream = RNG_TEST};
    const double until = clock_now() + p->seconds;
    for (int64_t i = 0; i < seeds->n; i++) run_one(s, &seeds->p[i]);
    for (int64_t k = 0; (p->rounds < 0 || k < p->rounds) && seeds->n; k++) {
        if (p->seconds > 0 && k % LOOK_EVERY == 0 && clock_now() > until) break;
        const struct buf *seed = &seeds->p[rng_below(&r, (uint64_t)seeds->n)];
        struct buf b = {0};
        buf_add(&b, seed->p, seed->n);
        for (uint64_t n = 1 + rng_below(&r, 5); n-- > 0;) change_once(&b, &seeds->p[rng_below(&r, (uint64_t)seeds->n)], &r);
        run_one(s, &b);
        buf_free(&b);
    }
    alarm(0);
}

static int keep_crasher(const struct shared *s, const struct plan *p, const char *name, int status) {
    char *base = xasprintf("crash-%s", name), *path = file_join(p->keep, base);
    if (file_mkdirs(p->keep) < 0 || file_write_atomic(path, s->input, s->n) < 0) fprintf(stderr, "%s\n", err_msg());
    const int sig = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    printf("%s: FAILED at input %lld: %s; kept as %s\n", name, (long long)s->done + 1,
           sig == 0         ? "a sanitizer's report"
           : sig == SIGALRM ? "took 20 s"
                            : strsignal(sig),
           path);
    free(base);
    free(path);
    return 1;
}

static int run_in_child(const struct seeds *seeds, const struct plan *p, const char *name) {
    struct shared *s = mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(s != MAP_FAILED);
    const double t0 = clock_now();
    int status = 0;
    fflush(NULL);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        run_all(s, seeds, p);
        exit(0);
    }
    CHECK(waitpid(pid, &status, 0) == pid);
    if (status != 0) return keep_crasher(s, p, name, status);
    printf("%s: %lld seeds, %lld inputs in %.1f s, no crash\n", name, (long long)seeds->n, (long long)s->done, clock_now() - t0);
    return 0;
}

int main(int argc, char **argv) {
    struct plan p = {.rounds = 0, .keep = "."};
    struct seeds seeds = {0};
    const char *name = strrchr(argv[0], '/') ? strrchr(argv[0], '/') + 1 : argv[0];
    bool timed = false, counted = false;
    int rc = 0;
    for (int i = 1; i < argc && rc == 0; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "0";
        if (strcmp(argv[i], "--rounds") == 0) p.rounds = strtoll(value, NULL, 10), counted = true, i++;
        else if (strcmp(argv[i], "--seconds") == 0) p.seconds = strtod(value, NULL), timed = true, i++;
        else if (strcmp(argv[i], "--keep") == 0) p.keep = value, i++;
        else rc = add_path(&seeds, argv[i]);
    }
    if (timed && !counted) p.rounds = -1;
    if (rc == 0 && seeds.n == 0)
        rc = err_set(ERR_INVAL, __FILE__, __LINE__, "no input; usage: %s [--rounds N] [--seconds S] FILE|DIR...", name);
    if (rc < 0) fprintf(stderr, "%s: %s\n", name, err_msg());
    else rc = run_in_child(&seeds, &p, name);
    for (int64_t i = 0; i < seeds.n; i++) buf_free(&seeds.p[i]);
    free(seeds.p);
    return rc < 0 ? 3 : rc;
}
