/* test_comm.c - groups of 2 to 5 processes: bytes arrive as they were sent, and whatever a rank does (dies, is stopped, fails,
 * is late, has another key or build, makes another call) the controller and all other ranks say which rank it was, in time.
 * The ranks are this program again. */
#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/rng.h"
#include "comm/comm_int.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "concurrent.h"

extern char **environ;
static char own_path[4096];

enum { BARRIER, BROADCAST, GATHER, ALL_GATHER, EXCHANGE, N_OPS, MOST = 5 };
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { BIG = 16 << 20, SLOWER = 6 };
#else
enum { BIG = 64 << 20, SLOWER = 1 };
#endif

/* ---- a rank ---- */

/* What rank `from` sends rank `to` in operation `k`: never the same twice. */
static void fill(uint8_t *p, size_t n, int from, int to, uint64_t k) {
    uint32_t x = (uint32_t)(from * 31 + to) * 2654435761u ^ (uint32_t)k * 40503u;
    for (size_t i = 0; i < n; i++) p[i] = (uint8_t)((x = x * 1664525u + 1013904223u) >> 24);
}

static bool is_filled(const uint8_t *p, size_t n, int from, int to, uint64_t k) {
    uint8_t *want = xmalloc(n + 1);
    fill(want, n, from, to, k);
    const bool same = n == 0 || memcmp(p, want, n) == 0;
    free(want);
    return same;
}

/* One operation with sizes below `most`, of which every rank draws the same. */
static int operate_once(struct comm *c, int op, uint64_t k, size_t most, struct rng *rng) {
    const int n = comm_size(c), me = comm_rank(c), root = (int)rng_below(rng, (uint64_t)n);
    size_t size[MOST][MOST], at[MOST + 1] = {0};
    uint8_t *buf[MOST] = {0}, *sent[MOST] = {0};
    int rc = 0;
    bool same = true;
    for (int i = 0; i < MOST; i++)
        for (int j = 0; j < MOST; j++) size[i][j] = rng_below(rng, 3) ? rng_below(rng, most) : 0;
    for (int i = 0; i < n; i++) at[i + 1] = at[i] + size[i][0];
    if (op == BARRIER) return comm_barrier(c);
    if (op == EXCHANGE) {
        struct comm_bytes out[MOST], in[MOST];
        for (int r = 0; r < n; r++) {
            out[r] = (struct comm_bytes){sent[r] = xmalloc(size[me][r] + 1), size[me][r]};
            in[r] = (struct comm_bytes){buf[r] = xmalloc(size[r][me] + 1), size[r][me]};
            fill(out[r].p, out[r].n, me, r, k);
        }
        rc = comm_exchange(c, out, in);
        for (int r = 0; rc >= 0 && r < n; r++) same = same && is_filled(buf[r], in[r].n, r, me, k);
    } else if (op == BROADCAST) {
        buf[0] = xmalloc(size[0][1] + 1);
        if (me == root) fill(buf[0], size[0][1], root, 0, k);
        rc = comm_broadcast(c, root, buf[0], size[0][1]);
        same = rc < 0 || is_filled(buf[0], size[0][1], root, 0, k);
    } else {
        const bool all = op == ALL_GATHER;
        buf[0] = xmalloc(at[n] + 1);
        sent[0] = xmalloc(size[me][0] + 1);
        fill(all ? buf[0] + at[me] : sent[0], size[me][0], me, 0, k);
        rc = all ? comm_all_gather(c, buf[0], at) : comm_gather(c, root, sent[0], me == root ? buf[0] : NULL, at);
        for (int r = 0; rc >= 0 && (all || me == root) && r < n; r++) same = same && is_filled(buf[0] + at[r], size[r][0], r, 0, k);
    }
    for (int r = 0; r < n; r++) {
        free(buf[r]);
        free(sent[r]);
    }
    if (rc >= 0 && !same) FAIL(ERR_INTERNAL, "operation %d: other bytes than were sent", op);
    return rc;
}

struct fault {
    int sig, after_us;
};
static void *strike(void *arg) {
    const struct fault *f = arg;
    usleep((useconds_t)f->after_us);
    kill(getpid(), f->sig);
    return NULL;
}

static int64_t arg(const struct comm_call *call, const char *key) { return json_integer_value(json_object_get(call->args, key)); }

/* This rank alone, as a part of a part of c. */
static int part_of_part(struct comm *c, struct comm *part, int rank) {
    struct comm *own;
    int rc = comm_part(&own, part, rank, 1);
    if (rc < 0) return rc;
    if (comm_rank(own) != 0 || comm_size(own) != 1 || strcmp(comm_who(own, 0), comm_who(c, comm_rank(c))) != 0)
        rc = err_set(ERR_INTERNAL, __FILE__, __LINE__, "a part of a part has another rank");
    if (rc >= 0) rc = comm_barrier(own);
    comm_close(own);
    return rc;
}

/* Two parts of the ranks on their own, and all of them, in turns. */
static int operate_in_parts(struct comm *c, int cut, uint64_t seed) {
    const int n = comm_size(c), me = comm_rank(c), first = me < cut ? 0 : cut;
    struct rng own = {.seed = seed + (uint64_t)first, .stream = RNG_TEST}, all = {.seed = seed, .stream = RNG_TEST};
    struct comm *part, *alone = NULL;
    int rc = comm_part(&part, c, first, me < cut ? cut : n - cut);
    if (rc >= 0 && comm_rank(part) != me - first) rc = err_set(ERR_INTERNAL, __FILE__, __LINE__, "another rank of the part");
    if (rc >= 0) rc = comm_part(&alone, part, me - first, 1); /* a part of a part counts in it */
    if (rc >= 0 && (comm_rank(alone) != 0 || strcmp(comm_who(alone, 0), comm_who(c, me)) != 0))
        rc = err_set(ERR_INTERNAL, __FILE__, __LINE__, "another rank of a part's part");
    comm_close(alone);
    for (uint64_t k = 0; rc >= 0 && k < 40; k++)
        rc = operate_once(k % 4 == 3 ? c : part, (int)rng_below(k % 4 == 3 ? &all : &own, N_OPS), k, COMM_FRAME + 100,
                          k % 4 == 3 ? &all : &own);
    if (rc >= 0) rc = part_of_part(c, part, me - first);
    if (rc >= 0 && cut < n && comm_part(&part, c, me < cut ? cut : 0, 1) == 0)
        rc = err_set(ERR_INTERNAL, __FILE__, __LINE__, "a rank is in a part that is without it");
    comm_close(part);
    return rc;
}

static int serve_call(struct comm *c, const struct comm_call *call) {
    struct rng rng = {.seed = (uint64_t)arg(call, "seed"), .stream = RNG_TEST};
    const int me = comm_rank(c), op = (int)arg(call, "op");
    const bool victim = me == arg(call, "victim");
    int rc = 0;
    if (strcmp(call->name, "random") == 0) {
        for (int k = 0; rc >= 0 && k < 40; k++)
            rc = operate_once(c, (int)rng_below(&rng, N_OPS), (uint64_t)k, 2 * COMM_FRAME + 100, &rng);
    } else if (strcmp(call->name, "parts") == 0) {
        for (int cut = 1; rc >= 0 && cut <= comm_size(c); cut++) rc = operate_in_parts(c, cut, (uint64_t)arg(call, "seed"));
    } else if (strcmp(call->name, "part differs") == 0) { /* the whole group's operation where the others make their part's */
        struct comm *part;
        rc = comm_part(&part, c, 0, comm_size(c));
        if (rc >= 0) rc = comm_barrier(victim ? c : part);
        comm_close(part);
    } else if (strcmp(call->name, "big") == 0) {
        rc = operate_once(c, op, 1, BIG, &rng);
    } else if (strcmp(call->name, "fault") == 0) { /* goes on until the fault ends it */
        static struct fault f;
        pthread_t t;
        f = (struct fault){(int)arg(call, "signal"), (int)arg(call, "after_us")};
        if (victim && f.sig) pthread_create(&t, NULL, strike, &f);
        for (uint64_t k = 0; rc >= 0; k++) {
            if (victim && !f.sig && k == 20) FAIL(ERR_NUMERIC, "a loss that is not finite");
            rc = operate_once(c, op, k, 1 << 20, &rng);
        }
    } else if (strcmp(call->name, "differ") == 0) {
        rc = victim ? comm_barrier(c) : operate_once(c, op, 1, 100, &rng);
    } else if (strcmp(call->name, "sizes") == 0) {
        char text[64];
        rc = comm_broadcast(c, 0, text, victim ? 63 : 64);
    } else if (strcmp(call->name, "late") == 0) {
        if (victim) sleep((unsigned)arg(call, "seconds"));
        rc = comm_barrier(c);
    } else if (strcmp(call->name, "nap") == 0) { /* its next call waits */
        rc = comm_reply(c, NULL, NULL, 0);
        comm_stage(c, "idle");
        sleep((unsigned)arg(call, "seconds"));
        return rc;
    } else if (strcmp(call->name, "until_stop") == 0) { /* as a long stage: its share, then it looks whether to stop */
        for (int64_t k = 0; rc >= 0 && !comm_stop_asked(c); k++) {
            comm_progress(c, k, 1000);
            usleep(1000);
        }
        json_t *result = json_pack("{s:i}", "signal", comm_stop_asked(c));
        rc = comm_reply(c, result, NULL, 0);
        json_decref(result);
        return rc;
    } else if (strcmp(call->name, "echo") == 0) {
        json_t *result = json_pack("{s:i,s:O}", "rank", me, "args", call->args);
        rc = comm_reply(c, result, call->arrays, call->n_arrays);
        json_decref(result);
        return rc;
    }
    if (rc < 0) return rc;
    return comm_reply(c, NULL, NULL, 0);
}

static void lost(void *a, const char *why) {
    (void)a;
    (void)why;
    _exit(7);
}

static int serve(struct comm *c) {
    struct comm_call call;
    int rc;
    while ((rc = comm_next_call(c, &call)) > 0) {
        rc = serve_call(c, &call);
        if (rc < 0) {
            rc = comm_reply_error(c, rc);
            if (rc >= 0 && comm_barrier(c) != ERR_RANK) rc = err_set(ERR_INTERNAL, __FILE__, __LINE__, "operations after an error");
        }
        comm_call_free(&call);
        TRY(rc);
    }
    return rc;
}

/* rank RANK SIZE ADDRESS KEY OPERATION_S; its exit status: 0, or as err_exit_status. */
static int be_rank(char **argv) {
    struct comm_args a = {
        .rank = atoi(argv[2]), .size = atoi(argv[3]), .start_s = 20, .deadline_s = atof(argv[6]), .lost = lost, .job = ""};
    struct comm *c;
    snprintf(a.where.address, sizeof a.where.address, "%s", argv[4]);
    snprintf(a.where.key, sizeof a.where.key, "%s", argv[5]);
    int rc = comm_open(&c, &a);
    if (rc >= 0) {
        rc = serve(c);
        comm_close(c);
    }
    if (rc < 0) fprintf(stderr, "%s\n", err_msg());
    return rc < 0 ? err_exit_status(rc) : 0;
}

/* ---- a group ---- */

struct group {
    int size;
    struct coordinator *coordinator;
    pid_t pid[MOST];
    int err[MOST]; /* what the ranks print */
};

static pid_t spawn(const char *program, char *const *argv, int err) {
    posix_spawn_file_actions_t fa;
    pid_t pid;
    posix_spawn_file_actions_init(&fa);
    if (err >= 0) posix_spawn_file_actions_adddup2(&fa, err, 2);
    assert_int_equal(posix_spawn(&pid, program, &fa, NULL, argv, environ), 0);
    posix_spawn_file_actions_destroy(&fa);
    return pid;
}

static void start_rank(struct group *g, int slot, const char *program, int rank, int size, const char *key) {
    const struct comm_where *w = coordinator_where(g->coordinator);
    char rank_text[16], size_text[16],
        *argv[] = {own_path, "rank", rank_text, size_text, (char *)(uintptr_t)w->address, (char *)(uintptr_t)key, "30", NULL};
    int ends[2];
    snprintf(rank_text, sizeof rank_text, "%d", rank);
    snprintf(size_text, sizeof size_text, "%d", size);
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    g->pid[slot] = spawn(program, argv, ends[1]);
    g->err[slot] = ends[0];
    close(ends[1]);
}

static void open_hub(struct group *g, int size, double start_s) {
    *g = (struct group){.size = size};
    const struct coordinator_args a = {.size = size, .start_s = start_s, .deadline_s = 20};
    if (coordinator_open(&g->coordinator, &a) < 0) fail_msg("%s", err_msg());
}

static void join_group(struct group *g) {
    for (int r = 0; r < g->size; r++) start_rank(g, r, own_path, r, g->size, coordinator_where(g->coordinator)->key);
    if (coordinator_join(g->coordinator, NULL, NULL) < 0) fail_msg("%s", err_msg());
}

static void open_group(struct group *g, int size) {
    open_hub(g, size, 30);
    join_group(g);
}

/* The exit status of a rank, within some seconds; 128 + its signal. */
static int end_of(struct group *g, int slot) {
    int status;
    for (int i = 0; i < 1000; i++) {
        if (waitpid(g->pid[slot], &status, WNOHANG) == g->pid[slot]) {
            g->pid[slot] = 0;
            return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
        }
        usleep(10000);
    }
    return -1;
}

static void close_group(struct group *g) {
    for (int i = 0; i < MOST; i++) {
        if (g->pid[i]) {
            kill(g->pid[i], SIGKILL);
            waitpid(g->pid[i], NULL, 0);
        }
        if (g->err[i]) close(g->err[i]);
    }
    coordinator_close(g->coordinator, false);
}

static void end_group(struct group *g) {
    coordinator_close(g->coordinator, true);
    g->coordinator = NULL;
    for (int r = 0; r < g->size; r++) assert_int_equal(end_of(g, r), 0);
    close_group(g);
}

static void call_all_for(struct group *g, const char *name, json_t *args, double answer_s) {
    if (coordinator_call_ranks(g->coordinator, 0, g->size,
                               &(struct coordinator_call_args){.name = name, .args = args, .answer_s = answer_s}) < 0)
        fail_msg("%s", err_msg());
    json_decref(args);
}

static void call_all(struct group *g, const char *name, json_t *args) { call_all_for(g, name, args, 60); }

static int collect(struct group *g) {
    struct coordinator_reply replies[MOST];
    const int rc = coordinator_collect(g->coordinator, replies);
    for (int r = 0; rc >= 0 && r < g->size; r++) coordinator_reply_free(&replies[r]);
    return rc;
}

static void expect_ok(struct group *g) {
    if (collect(g) < 0) fail_msg("%s", err_msg());
}

/* The call fails within `within` seconds, with this code and a message that begins or goes on with the rank. */
static void expect_failure(struct group *g, int code, int rank, double within) {
    const double start = clock_now();
    char who[64];
    snprintf(who, sizeof who, "rank %d (host ", rank);
    const int rc = collect(g);
    if (rc != code || !strstr(err_msg(), who)) fail_msg("%d: %s", rc, err_msg());
    if (clock_now() - start > within * SLOWER) fail_msg("after %.1f s: %s", clock_now() - start, err_msg());
}

/* ---- tests ---- */

static void bytes_arrive(void **state) {
    (void)state;
    for (int size = 1; size <= MOST; size++) {
        struct group g;
        open_group(&g, size);
        for (int seed = 0; seed < 1 + (size == 3); seed++) {
            call_all(&g, "random", json_pack("{s:i}", "seed", seed));
            expect_ok(&g);
        }
        end_group(&g);
    }
}

static void parts(void **state) {
    (void)state;
    struct group g;
    open_group(&g, 4);
    call_all(&g, "parts", json_pack("{s:i}", "seed", 5));
    expect_ok(&g);
    end_group(&g);
    open_group(&g, 2);
    call_all(&g, "part differs", json_pack("{s:i}", "victim", 1));
    if (collect(&g) >= 0) fail_msg("ranks in different operations went on");
    close_group(&g);
}

static void large_messages(void **state) {
    (void)state;
    struct group g;
    open_group(&g, 2);
    for (int op = BROADCAST; op < N_OPS; op++) {
        call_all(&g, "big", json_pack("{s:i,s:i}", "seed", 3, "op", op));
        expect_ok(&g);
    }
    end_group(&g);
}

/* The controller's memory is none that a rank can open: as in another container. */
static void hide_memory(void) {
    for (int fd = 3; fd < 1024; fd++) {
        char path[64], name[64] = "";
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        if (readlink(path, name, sizeof name - 1) <= 0 || !strstr(name, "memfd:verlc-arrays")) continue;
        const int other = open("/dev/null", O_RDONLY | O_CLOEXEC);
        assert_int_equal(dup3(other, fd, O_CLOEXEC), fd);
        close(other);
    }
}

static void calls_carry_arrays(void **state) {
    (void)state;
    struct coordinator_reply replies[3];
    uint8_t *big = xmalloc(BIG / 16);
    struct comm_bytes arrays[] = {{(uint8_t[]){1, 2, 3}, 3}, {NULL, 0}, {big, BIG / 16}};
    fill(big, BIG / 16, 1, 2, 3);
    for (int shared = 0; shared < 2; shared++) {
        struct group g;
        open_hub(&g, 3, 30);
        if (!shared) hide_memory();
        join_group(&g);
        for (int round = 0; round < 3; round++) {
            json_t *args = json_pack("{s:i}", "round", round);
            const struct coordinator_call_args echo = {
                .name = "echo", .args = args, .arrays = arrays, .n_arrays = 3, .answer_s = 60};
            const int step = round == 2 ? 1 : 2; /* rank 1 is not called */
            for (int r = 0; step == 2 && r < 3; r += step) assert_int_equal(coordinator_call(g.coordinator, r, &echo), 0);
            if (step == 1) assert_int_equal(coordinator_call_ranks(g.coordinator, 0, g.size, &echo), 0);
            if (coordinator_collect(g.coordinator, replies) < 0) fail_msg("%s", err_msg());
            for (int r = 0; r < 3; r += step) {
                assert_int_equal(json_integer_value(json_object_get(replies[r].result, "rank")), r);
                assert_true(json_equal(json_object_get(replies[r].result, "args"), args));
                assert_int_equal(replies[r].n_arrays, 3);
                assert_int_equal(replies[r].map.n > 0, shared);
                for (int i = 0; i < 3; i++) {
                    assert_int_equal(replies[r].arrays[i].n, arrays[i].n);
                    if (arrays[i].n) assert_memory_equal(replies[r].arrays[i].p, arrays[i].p, arrays[i].n);
                }
            }
            if (step == 2) assert_null(replies[1].result);
            for (int r = 0; r < 3; r++) coordinator_reply_free(&replies[r]);
            json_decref(args);
        }
        end_group(&g);
    }
    free(big);
}

/* Maps the next shared memory, so that it cannot be sealed, for a third of a second. */
static void *hold_memory(void *held) {
    enum { HOLD_US = 300000 };
    const double deadline = clock_awake() + 20;
    while (!atomic_load((atomic_bool *)held) && clock_awake() < deadline)
        for (int fd = 3; fd < 64; fd++) {
            char path[64], name[64] = "";
            snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
            if (readlink(path, name, sizeof name - 1) <= 0 || !strstr(name, "memfd:verlc-arrays")) continue;
            const int own = open(path, O_RDWR | O_CLOEXEC);
            void *const p = own < 0 ? MAP_FAILED : mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, own, 0);
            if (own >= 0) close(own);
            if (p == MAP_FAILED) continue; /* it is sealed */
            usleep(HOLD_US);
            atomic_store((atomic_bool *)held, true);
            munmap(p, 4096);
            break;
        }
    return NULL;
}
static void memory_that_is_held(void **state) {
    (void)state;
    enum { TRIES = 20 };
    static uint8_t bytes[1 << 24];
    atomic_bool held = false;
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, hold_memory, &held), 0);
    for (int i = 0; i < TRIES && !atomic_load(&held); i++) {
        int fd;
        if (comm__share(&(struct comm_bytes){bytes, sizeof bytes}, 1, &fd) < 0) fail_msg("%s", err_msg());
        close(fd);
    }
    assert_true(atomic_load(&held));
    pthread_join(thread, NULL);
}

static void fault(struct group *g, int op, int victim, int sig, int after_us) {
    call_all(g, "fault",
             json_pack("{s:i,s:i,s:i,s:i,s:i}", "seed", op, "op", op, "victim", victim, "signal", sig, "after_us", after_us));
}

static void a_rank_dies_in_each_operation(void **state) {
    (void)state;
    for (int op = 0; op < N_OPS; op++) {
        const int size = 2 + op % 4, victim = (op * 7 + 1) % size;
        struct group g;
        open_group(&g, size);
        fault(&g, op, victim, SIGKILL, 20000 + 7000 * op);
        expect_failure(&g, ERR_RANK, victim, 5);
        assert_int_equal(end_of(&g, victim), 128 + SIGKILL);
        close_group(&g);
    }
}

/* The others leave their operation, and all still take calls. */
static void a_rank_fails(void **state) {
    (void)state;
    struct group g;
    open_group(&g, 3);
    fault(&g, ALL_GATHER, 2, 0, 0);
    expect_failure(&g, ERR_NUMERIC, 2, 5);
    assert_non_null(strstr(err_msg(), ": a loss that is not finite"));
    call_all(&g, "echo", json_object());
    expect_ok(&g);
    call_all(&g, "random", json_pack("{s:i}", "seed", 1));
    expect_failure(&g, ERR_RANK, 2, 5); /* operations are over */
    call_all(&g, "echo", json_object());
    expect_ok(&g);
    close_group(&g);
}

static void other_calls_are_refused(void **state) {
    (void)state;
    struct group g;
    open_group(&g, 3);
    call_all(&g, "differ", json_pack("{s:i,s:i,s:i}", "victim", 1, "op", ALL_GATHER, "seed", 5));
    assert_int_equal(collect(&g), ERR_RANK); /* of rank 1 by another one, or the other way round */
    assert_non_null(strstr(err_msg(), "rank 1"));
    assert_non_null(strstr(err_msg(), "in barrier 2"));
    assert_non_null(strstr(err_msg(), "in all_gather 2"));
    assert_non_null(strstr(err_msg(), "the same calls in the same order"));
    close_group(&g);
    open_group(&g, 2);
    call_all(&g, "sizes", json_pack("{s:i}", "victim", 1));
    expect_failure(&g, ERR_RANK, 0, 5);
    assert_non_null(strstr(err_msg(), "rank 1 expects 63"));
    close_group(&g);
}

/* The one that is behind is named, not those that wait for it. */
static void the_deadline_names_who_is_behind(void **state) {
    (void)state;
    struct group g;
    open_group(&g, 3);
    call_all_for(&g, "late", json_pack("{s:i,s:i}", "victim", 1, "seconds", 20), 2.5);
    const double start = clock_now();
    assert_int_equal(collect(&g), ERR_TIMEOUT);
    assert_true(clock_now() - start < 4);
    assert_non_null(strstr(err_msg(), "rank 1 (host "));
    assert_non_null(strstr(err_msg(), "in late for "));
    assert_null(strstr(err_msg(), "rank 0"));
    assert_null(strstr(err_msg(), "rank 2"));
    close_group(&g);
}

/* Each rank is called again as soon as it has answered; one takes long and holds no other up. */
/* Heartbeats from before it do not tell of another stage. */
static void a_call_that_has_not_arrived(void **state) {
    (void)state;
    struct group g;
    struct coordinator_progress p;
    open_group(&g, 1);
    call_all(&g, "nap", json_pack("{s:i}", "seconds", 3));
    expect_ok(&g);
    call_all(&g, "echo", json_object());
    const double until = clock_now() + 2;
    while (clock_now() < until) {
        usleep(10000);
        coordinator_progress(g.coordinator, 0, &p);
        assert_string_equal(p.stage, "echo");
    }
    expect_ok(&g);
    close_group(&g);
}

/* A rank is lost between the calls of two others: further ones fail, and what is under way is given up. */
static void a_call_that_fails_ends_those_under_way(void **state) {
    (void)state;
    struct group g;
    struct coordinator_reply reply;
    int rank;
    open_group(&g, 2);
    assert_int_equal(coordinator_call(g.coordinator, 0, &(struct coordinator_call_args){.name = "until_stop", .answer_s = 60}), 0);
    coordinator_fail(g.coordinator, 1, "rank 1 was lost");
    for (int r = 1; r >= 0; r--) {
        assert_int_equal(coordinator_call(g.coordinator, r, &(struct coordinator_call_args){.name = "echo", .answer_s = 60}),
                         ERR_RANK);
        assert_string_equal(err_msg(), "rank 1 was lost");
    }
    assert_int_equal(coordinator_take(g.coordinator, 1, &rank, &reply), 0);
    close_group(&g);
}

static void ranks_answer_at_their_own_time(void **state) {
    (void)state;
    int answers[3] = {0}, slices = 0, rank, rc;
    struct group g;
    open_group(&g, 3);
    struct coordinator_reply reply;
    assert_int_equal(coordinator_take(g.coordinator, 60, &rank, &reply), 0); /* at once: none is called */
    assert_int_equal(coordinator_call(g.coordinator, 0, &(struct coordinator_call_args){.name = "until_stop", .answer_s = 60}), 0);
    for (int r = 1; r < 3; r++)
        assert_int_equal(coordinator_call(g.coordinator, r, &(struct coordinator_call_args){.name = "echo", .answer_s = 60}), 0);
    for (; answers[1] + answers[2] < 40 || slices == 0; slices += rc == 0) {
        rc = coordinator_take(g.coordinator, 0.01, &rank, &reply);
        if (rc < 0) fail_msg("%s", err_msg());
        if (rc == 0) continue;
        assert_int_equal(json_integer_value(json_object_get(reply.result, "rank")), rank);
        assert_int_not_equal(rank, 0);
        coordinator_reply_free(&reply);
        answers[rank]++;
        if (answers[rank] < 20)
            assert_int_equal(coordinator_call(g.coordinator, rank, &(struct coordinator_call_args){.name = "echo", .answer_s = 60}),
                             0);
    }
    assert_int_equal(answers[1], 20);
    assert_int_equal(answers[2], 20);
    struct coordinator_progress p = {0};
    for (int i = 0; i < 300 && p.done == 0; i++) {
        usleep(10000);
        coordinator_progress(g.coordinator, 0, &p);
    }
    assert_string_equal(p.stage, "until_stop");
    assert_true(p.done > 0 && p.total == 1000);
    coordinator_ask_stop(g.coordinator, SIGTERM);
    coordinator_ask_stop(g.coordinator, SIGINT); /* the first one stays */
    if (coordinator_take(g.coordinator, 10, &rank, &reply) != 1) fail_msg("%s", err_msg());
    assert_int_equal(rank, 0);
    assert_int_equal(json_integer_value(json_object_get(reply.result, "signal")), SIGTERM);
    coordinator_reply_free(&reply);
    end_group(&g);
}

/* The deadline of a call is its own: the rank that has longer goes on meanwhile. */
static void each_call_has_its_deadline(void **state) {
    (void)state;
    int rank;
    struct coordinator_reply reply;
    struct group g;
    open_group(&g, 2);
    assert_int_equal(coordinator_call(g.coordinator, 0, &(struct coordinator_call_args){.name = "until_stop", .answer_s = 60}), 0);
    assert_int_equal(coordinator_call(g.coordinator, 1, &(struct coordinator_call_args){.name = "until_stop", .answer_s = 1}), 0);
    assert_int_equal(coordinator_take(g.coordinator, 0.2, &rank, &reply), 0);
    assert_int_equal(coordinator_take(g.coordinator, 60, &rank, &reply), ERR_TIMEOUT);
    assert_non_null(strstr(err_msg(), "no answer within 1 s from rank 1 (host "));
    assert_null(strstr(err_msg(), "rank 0"));
    close_group(&g);
}

static void the_controller_goes(void **state) {
    (void)state;
    struct group g;
    open_group(&g, 3);
    call_all(&g, "late", json_pack("{s:i,s:i}", "victim", 1, "seconds", 20));
    const double start = clock_now();
    coordinator_close(g.coordinator, false);
    g.coordinator = NULL;
    for (int r = 0; r < 3; r++) assert_int_equal(end_of(&g, r), 7);
    assert_true(clock_now() - start < 3);
    close_group(&g);
}

/* ---- who may join ---- */

static void expect_refused(struct group *g, int slot, const char *what) {
    char text[4096] = "";
    assert_int_not_equal(end_of(g, slot), 0);
    const ssize_t n = read(g->err[slot], text, sizeof text - 1);
    if (n <= 0 || !strstr(text, what)) fail_msg("not '%s': %s", what, text);
}

static void strangers_are_refused(void **state) {
    (void)state;
    char key[COMM_KEY];
    struct group g;
    assert_int_equal(comm_key_new(key), 0);
    open_hub(&g, 2, 2);
    start_rank(&g, 0, own_path, 0, 2, coordinator_where(g.coordinator)->key);
    start_rank(&g, 1, own_path, 1, 2, key);
    assert_int_equal(coordinator_join(g.coordinator, NULL, NULL), ERR_TIMEOUT);
    assert_non_null(strstr(err_msg(), "1 of 2 ranks have not joined"));
    assert_non_null(strstr(err_msg(), "rank 1"));
    expect_refused(&g, 1, "rank 1: the controller at 127.0.0.1:");
    expect_refused(&g, 0, "the controller refused rank 0: 1 of 2 ranks");
    close_group(&g);

    static const struct {
        int rank, size;
        const char *what;
    } bad[] = {{1, 3, "rank 1 (host "}, {0, 2, "two processes say that they are rank 0"}};
    for (int i = 0; i < 2; i++) {
        open_hub(&g, 2, 20);
        start_rank(&g, 0, own_path, 0, 2, coordinator_where(g.coordinator)->key);
        start_rank(&g, 1, own_path, bad[i].rank, bad[i].size, coordinator_where(g.coordinator)->key);
        assert_int_equal(coordinator_join(g.coordinator, NULL, NULL), ERR_RANK);
        assert_non_null(strstr(err_msg(), bad[i].what));
        if (i == 0) expect_refused(&g, 1, bad[i].what); /* of the two that say the same, either */
        close_group(&g);
    }
}

/* ---- what a stranger sends to a port ---- */

/* A TLS hello's first bytes, and a greeting of ZMTP 3.1 that asks for CURVE as a server does not. */
static const char tls[] = "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", zmtp[] = "\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01"
                                                                                   "CURVE";

static int stranger(int port, struct rng *r, int kind) {
    char bytes[200];
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0 && connect(fd, (struct sockaddr *)&to, sizeof to) == 0);
    for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (char)rng_below(r, 256);
    const struct {
        const char *p;
        size_t n;
    } sent[] = {
        {"GET / HTTP/1.0\r\n\r\n", 18}, {tls, sizeof tls}, {bytes, sizeof bytes}, {"\n", 1}, {zmtp, sizeof zmtp}, {bytes, 0}};
    (void)!send(fd, sent[kind % 6].p, sent[kind % 6].n, MSG_NOSIGNAL);
    return fd;
}

static bool lost_within(struct comm__link *l, double seconds) {
    for (const double end = clock_now() + seconds; clock_now() < end; usleep(1000)) {
        comm__link_events(l);
        if (l->lost_at > 0) return true;
    }
    return false;
}

/* What a link's port hears before its peer is there, while it is, and after it has gone. message: it has said something. */
static void strangers_beside(bool message) {
    enum { EACH = 60 };
    char key[COMM_KEY], endpoint[64];
    struct comm__link here = {.rank = 1, .who = "rank 1"}, peer = {.rank = 0, .who = "rank 0"};
    struct rng r = {7, RNG_TEST, 0};
    int port, held[6];
    uint8_t in[5];
    assert_int_equal(comm_key_new(key), 0);
    void *ctx = zmq.ctx_new();
    assert_int_equal(comm__link_listen(&here, ctx, key, "127.0.0.1", &port), 0);
    for (int i = 0; i < EACH; i++) close(stranger(port, &r, i));
    for (int i = 0; i < 6; i++) held[i] = stranger(port, &r, i); /* those that are heard out end by themselves */
    snprintf(endpoint, sizeof endpoint, "tcp://127.0.0.1:%d", port);
    assert_int_equal(comm__link_connect(&peer, ctx, key, endpoint), 0);
    struct comm__wait w = {.rank = 0, .kind = COMM__GATHER, .seq = 1, .deadline = clock_awake() + 10}, v = w;
    struct comm__move out = {.link = &here, .sends = true, .out = (const uint8_t *)"hello", .n_out = 5},
                      got = {.link = &peer, .receives = true, .in = in, .n_in = 5};
    assert_int_equal(comm__run(&w, &out, 1), 0); /* waits for the peer's handshake */
    v.rank = 1;
    assert_int_equal(comm__run(&v, &got, 1), 0);
    assert_memory_equal(in, "hello", 5);
    if (message) {
        struct comm__move back = {.link = &peer, .sends = true, .out = (const uint8_t *)"there", .n_out = 5},
                          take = {.link = &here, .receives = true, .in = in, .n_in = 5};
        assert_int_equal(comm__run(&v, &back, 1), 0);
        assert_int_equal(comm__run(&w, &take, 1), 0);
        assert_memory_equal(in, "there", 5);
    }
    for (int i = 0; i < EACH; i++) close(stranger(port, &r, i));
    assert_false(lost_within(&here, 0.2));
    for (int i = 0; i < 6; i++) close(held[i]);
    for (int i = 0; i < EACH; i++) close(stranger(port, &r, i));
    assert_false(lost_within(&here, 0.2));
    comm__link_close(&peer, false);
    assert_true(lost_within(&here, 2));
    comm__link_close(&here, false);
    zmq.ctx_term(ctx);
}

static void strangers_cost_nothing(void **state) {
    (void)state;
    strangers_beside(false);
    strangers_beside(true);
}

static void addresses_are_ipv4(void **state) {
    (void)state;
    static const char *const bad[] = {"[::1]:29500", "::1:29500", "fe80::1%eth0:5", "host", "host:", ":29500"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct coordinator *h;
        char endpoint[COMM__ENDPOINT], own[COMM__NAME];
        assert_int_equal(
            coordinator_open(&h, &(struct coordinator_args){.size = 1, .listen = bad[i], .start_s = 1, .deadline_s = 1}),
            ERR_INVAL);
        assert_non_null(strstr(err_msg(), bad[i]));
        assert_non_null(strstr(err_msg(), i < 3 ? "IPv4" : "HOST:PORT"));
        assert_int_equal(comm__reach(bad[i], endpoint, own), ERR_INVAL);
    }
}

static void another_build_is_refused(void **state) {
    (void)state;
    struct group g;
    struct buf b = {0};
    char other[] = "/tmp/verlc_test_comm_XXXXXX";
    const int fd = mkstemp(other);
    assert_true(fd >= 0);
    assert_int_equal(file_read(&b, own_path, (size_t)1 << 30), 0);
    buf_addc(&b, '!');
    assert_int_equal(write(fd, b.p, b.n), (ssize_t)b.n);
    assert_int_equal(fchmod(fd, 0700), 0);
    close(fd);
    buf_free(&b);
    open_hub(&g, 2, 20);
    start_rank(&g, 0, own_path, 0, 2, coordinator_where(g.coordinator)->key);
    start_rank(&g, 1, other, 1, 2, coordinator_where(g.coordinator)->key);
    assert_int_equal(coordinator_join(g.coordinator, NULL, NULL), ERR_RANK);
    assert_non_null(strstr(err_msg(), "rank 1 (host "));
    assert_non_null(strstr(err_msg(), "another build"));
    expect_refused(&g, 1, "another build");
    close_group(&g);
    unlink(other);
}

/* check of coordinator_join: rank 1 is killed as soon as both ranks have joined. */
static int kill_when_joined(void *arg) {
    struct group *g = arg;
    if (!coordinator_pid(g->coordinator, 0) || !coordinator_pid(g->coordinator, 1)) return 0;
    assert_int_equal(kill(g->pid[1], SIGKILL), 0);
    assert_int_equal(end_of(g, 1), 128 + SIGKILL);
    return 0;
}

static void a_rank_dies_as_it_joins(void **state) {
    (void)state;
    struct group g;
    open_hub(&g, 2, 20);
    for (int r = 0; r < 2; r++) start_rank(&g, r, own_path, r, 2, coordinator_where(g.coordinator)->key);
    assert_int_equal(coordinator_join(g.coordinator, kill_when_joined, &g), ERR_RANK);
    assert_non_null(strstr(err_msg(), "rank 1 (host "));
    assert_int_equal(coordinator_failed_rank(g.coordinator), 1);
    close_group(&g);
}

static void another_protocol_is_refused(void **state) {
    (void)state;
    struct comm__join j;
    json_t *m =
        json_pack("{s:i,s:i,s:s,s:s,s:i}", "protocol", COMM_PROTOCOL + 1, "rank", 3, "host", "b", "version", "9.9", "pid", 5);
    assert_int_equal(comm__join_read(&j, m, "a rank that joins"), ERR_RANK);
    assert_non_null(strstr(err_msg(), "rank 3 (host b, pid 5) speaks protocol 2 of verlc 9.9"));
    json_decref(m);
    struct comm__frame f = {COMM__MAGIC, COMM_PROTOCOL + 1, COMM__BARRIER, 3, 0, 1, 0, 0};
    assert_int_equal(comm__frame_read(&f, &f, sizeof f, "rank 3"), ERR_FORMAT);
    assert_non_null(strstr(err_msg(), "rank 3 speaks protocol 2"));
}

static void the_rendezvous_file(void **state) {
    (void)state;
    char dir[] = "/tmp/verlc_test_comm_XXXXXX";
    struct comm_where w = {"10.0.0.1:5", ""}, back = {0};
    struct stat st;
    assert_non_null(mkdtemp(dir));
    assert_int_equal(comm_key_new(w.key), 0);
    assert_int_equal(comm_rendezvous_read(dir, &back, "7/0"), 0); /* not there yet */
    assert_int_equal(comm_rendezvous_write(dir, &w, "7/0"), 0);
    char *path = file_join(dir, ".rendezvous");
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    assert_int_equal(comm_rendezvous_read(dir, &back, "8/0"), 0); /* another start's */
    assert_int_equal(comm_rendezvous_read(dir, &back, "7/0"), 1);
    assert_string_equal(back.address, w.address);
    assert_string_equal(back.key, w.key);
    assert_int_equal(truncate(path, 20), 0);
    assert_int_equal(comm_rendezvous_read(dir, &back, "7/0"), ERR_FORMAT);
    comm_rendezvous_remove(dir);
    assert_int_equal(access(path, F_OK), -1);
    free(path);
    assert_int_equal(rmdir(dir), 0);
}

/* ---- time in which all are stopped ---- */

/* A group of its own: what a machine that is suspended for longer than every deadline does to it. */
static int be_stopped_group(void) {
    struct group g;
    open_group(&g, 2);
    call_all_for(&g, "late", json_pack("{s:i,s:i}", "victim", 1, "seconds", 1), 5);
    kill(0, SIGSTOP);
    const int rc = collect(&g);
    if (rc < 0) fprintf(stderr, "%s\n", err_msg());
    close_group(&g);
    return rc < 0;
}

/* It and five groups with a stopped rank wait at the same time. */
static void stopped_ranks_and_stopped_machines(void **state) {
    (void)state;
    posix_spawnattr_t attr;
    pid_t pid;
    int status;
    char *argv[] = {own_path, "stopped", NULL};
    struct group g[N_OPS];
    posix_spawnattr_init(&attr);
    posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETPGROUP);
    assert_int_equal(posix_spawn(&pid, own_path, NULL, &attr, argv, environ), 0);
    posix_spawnattr_destroy(&attr);
    assert_int_equal(waitpid(pid, &status, WUNTRACED), pid);
    assert_true(WIFSTOPPED(status));
    const double stopped = clock_now();
    for (int op = 0; op < N_OPS; op++) open_group(&g[op], 2 + op % 2);
    for (int op = 0; op < N_OPS; op++) fault(&g[op], op, 1, SIGSTOP, 20000);
    for (int op = 0; op < N_OPS; op++) {
        expect_failure(&g[op], ERR_RANK, 1, 10);
        if (!strstr(err_msg(), "in fault for ") || !strstr(err_msg(), "no heartbeat")) fail_msg("%s", err_msg());
        close_group(&g[op]);
    }
    const double left = stopped + COMM_SILENCE_S + 1 - clock_now();
    if (left > 0) usleep((useconds_t)(left * 1e6));
    kill(-pid, SIGCONT);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
}

int main(int argc, char **argv) {
    const ssize_t n = readlink("/proc/self/exe", own_path, sizeof own_path - 1);
    if (n <= 0) return 1;
    if (argc > 1) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        return strcmp(argv[1], "rank") == 0 && argc == 7 ? be_rank(argv) : strcmp(argv[1], "stopped") == 0 ? be_stopped_group() : 2;
    }
    if (getenv("VERLC_TEST_FILTER")) cmocka_set_test_filter(getenv("VERLC_TEST_FILTER"));
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_arrive),
        cmocka_unit_test(parts),
        cmocka_unit_test(large_messages),
        cmocka_unit_test(calls_carry_arrays),
        cmocka_unit_test(memory_that_is_held),
        cmocka_unit_test(a_rank_dies_in_each_operation),
        cmocka_unit_test(a_rank_fails),
        cmocka_unit_test(other_calls_are_refused),
        cmocka_unit_test(the_deadline_names_who_is_behind),
        cmocka_unit_test(a_call_that_has_not_arrived),
        cmocka_unit_test(a_call_that_fails_ends_those_under_way),
        cmocka_unit_test(ranks_answer_at_their_own_time),
        cmocka_unit_test(each_call_has_its_deadline),
        cmocka_unit_test(the_controller_goes),
        cmocka_unit_test(strangers_are_refused),
        cmocka_unit_test(strangers_cost_nothing),
        cmocka_unit_test(addresses_are_ipv4),
        cmocka_unit_test(another_build_is_refused),
        cmocka_unit_test(a_rank_dies_as_it_joins),
        cmocka_unit_test(another_protocol_is_refused),
        cmocka_unit_test(the_rendezvous_file),
        cmocka_unit_test(stopped_ranks_and_stopped_machines),
    };
    return concurrent_tests(tests, sizeof tests / sizeof *tests, NULL, NULL);
}
