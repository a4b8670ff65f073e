/* test_ckpt_ranks.c - checkpoints of several ranks: from any number of processes, also such as cannot map rank 0's memory, come
 * the files of one, for every optimizer and an adapter; what one number saved another loads, and makes the same next step of; a
 * group that is killed while it saves, or a rank while it copies, leaves the newest complete checkpoint good. The ranks are this
 * program again. */
#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/rng.h"
#include "ckpt/async_save.h"
#include "comm/comm.h"
#include "model/files/export.h"
#include "model/files/init.h"
#include "model/files/load.h"
#include "model/lora/lora.h"

#include <errno.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

extern char **environ;

#define OK(call)                                                                \
    do {                                                                        \
        if ((call) < 0) fail_msg("%s: %s (%s)", #call, err_msg(), err_trace()); \
    } while (0)

enum { MOST = 4, KILLS = 8, NAMED = 3 /* exit code: the lost rank is named */ };

static const struct setup {
    const char *name;
    struct optim_config optim;
    bool every;     /* number of ranks to MOST; else 3 alone */
    bool lora, ref; /* ref: a device whose compute copy is one flat array */
    enum dtype act;
} SETUPS[] = {
    {.name = "AdamW", .every = true, .optim = {.kind = OPTIM_ADAMW}, .act = DT_BF16},
    {.name = "AdamW, flat", .optim = {.kind = OPTIM_ADAMW}, .ref = true, .act = DT_BF16},
    {.name = "AdamW8bit", .optim = {.kind = OPTIM_ADAMW8}, .act = DT_BF16},
    {.name = "AMSGrad", .every = true, .optim = {.kind = OPTIM_ADAM, .amsgrad = true}, .act = DT_BF16},
    {.name = "RMSprop", .optim = {.kind = OPTIM_RMSPROP, .alpha = 0.9, .momentum = 0.5, .centered = true}, .act = DT_F32},
    {.name = "SGD without momentum", .optim = {.kind = OPTIM_SGD}, .act = DT_F32},
    {.name = "Muon", .every = true, .optim = {.kind = OPTIM_MUON, .momentum = 0.95, .ns_steps = 2}, .act = DT_BF16},
    {.name = "LoRA", .optim = {.kind = OPTIM_ADAMW}, .lora = true, .act = DT_F32},
    {.name = "state and master in host memory",
     .optim = {.kind = OPTIM_ADAMW, .host_state = true, .host_master = true},
     .act = DT_BF16},
};
enum { N_SETUPS = sizeof SETUPS / sizeof *SETUPS };

static char own_path[4096];

/* ---- a rank ---- */

struct rank {
    const struct setup *s;
    struct comm *comm; /* NULL: alone */
    struct dev dev;
    struct model *m;
    struct optim *o;
    struct ckpt_part part;
    json_t *trainer;
};

static int open_rank(struct rank *k, const char *model_dir) {
    const struct setup *s = k->s;
    const int rank = k->comm ? comm_rank(k->comm) : 0, size = k->comm ? comm_size(k->comm) : 1;
    if (s->ref) TRY(dev_open_ref(&k->dev));
    else TRY(dev_open_cpu(&k->dev, 1, NULL));
    const struct model_open_args a = {.dir = model_dir,
                                      .act = s->act,
                                      .flags =
                                          (s->lora ? MODEL_INFER : MODEL_TRAIN) | (s->optim.host_master ? MODEL_HOST_MASTER : 0),
                                      .max_len = 8,
                                      .shard = {rank, size, s->optim.kind == OPTIM_MUON}};
    TRY(model_open(&k->m, &k->dev, &a));
    if (s->lora) {
        struct lora_config l = {.rank = 4, .alpha = 8, .targets = json_string("all-linear")};
        const int rc = model_lora_create(k->m, &l, 3);
        lora_config_free(&l);
        TRY(rc);
    }
    TRY(k->m->own ? optim_create_part(&k->o, k->m, &s->optim, k->m->own, k->m->n_own) : optim_create(&k->o, k->m, &s->optim));
    k->part = (struct ckpt_part){"actor", k->m, k->o, NULL};
    k->trainer = json_pack("{s:i}", "global_step", 1);
    return 0;
}

static void close_rank(struct rank *k) {
    json_decref(k->trainer);
    optim_destroy(k->o, k->m);
    model_close(k->m);
    dev_close(&k->dev);
}

/* An update with gradients that are a function of element and step. */
static int update(struct rank *k) {
    struct optim_config c = k->s->optim;
    const struct model_range all = {0, k->m->n_train}, *own = k->m->own ? k->m->own : &all;
    const int64_t n = k->m->own ? k->m->n_own : 1;
    float *g = xcalloc((size_t)k->m->n_master + 1, sizeof *g), *at = g;
    void *d = NULL;
    int rc = 0;
    c.beta1 = 0.9;
    c.beta2 = 0.99;
    c.eps = 1e-8;
    c.weight_decay = 0.01;
    for (int64_t i = 0; i < n; i++)
        for (int64_t e = own[i].lo; e < own[i].hi; e++)
            *at++ = (float)((double)((uint64_t)(e + 17 * k->o->step) * 2654435761u % 2000003u) * 1e-6 - 1);
    TRYG(dev_alloc(&k->dev, ((size_t)k->m->n_master + 1) * sizeof *g, &d), out);
    TRYG(dev_copy_in(&k->dev, d, g, (size_t)k->m->n_master * sizeof *g), out);
    TRYG(optim_update(k->o, k->m, d, &c, 1e-3, 1), out);
out:
    dev_free(&k->dev, d, ((size_t)k->m->n_master + 1) * sizeof *g);
    free(g);
    return rc;
}

static struct ckpt_save_args args_of(const struct rank *k, const char *root, int64_t step) {
    return (struct ckpt_save_args){
        .root = root, .step = step, .parts = &k->part, .n_parts = 1, .trainer = k->trainer, .config_yaml = "a: 1\n", .keep = 3};
}

static int save(struct rank *k, const char *root, int64_t step) {
    const struct ckpt_save_args a = args_of(k, root, step);
    struct ckpt_async *s;
    if (!k->comm) return ckpt_save(&a);
    TRY(ckpt_async_open(&s, &k->part, 1, k->comm));
    const int rc = ckpt_async_save(s, &a);
    ckpt_async_close(s);
    return rc;
}

/* The bits of log-probs' weights: the compute copy as it is exported, without a master. */
static int export_compute(struct rank *k, const char *root) {
    struct model view = *k->m;
    int rc = 0;
    if (k->m->lora || k->m->act == DT_F32) return 0;
    char *dir = xasprintf("%s/compute-%d", root, k->comm ? comm_rank(k->comm) : 0);
    view.master = NULL;
    rc = model_export(&view, dir, &(struct model_export_args){.dt = DT_BF16});
    free(dir);
    return rc;
}

/* Two updates, saved; or what `from` has, its compute copy, a third update, saved. */
static int task(struct rank *k, const char *root, const char *from) {
    if (strcmp(from, "-") == 0) {
        for (int i = 0; i < 2; i++) TRY(update(k));
        return save(k, root, 2);
    }
    TRY(ckpt_load_part(from, &k->part));
    if (k->o->step != 2) FAIL(ERR_INTERNAL, "step %lld", (long long)k->o->step);
    TRY(export_compute(k, root));
    TRY(update(k));
    return save(k, root, 3);
}

/* Copies and writes beside the next steps, until it is killed. */
static int save_for_ever(struct rank *k, const char *root) {
    struct ckpt_async *s;
    int64_t step = 0;
    TRY(ckpt_async_open(&s, &k->part, 1, k->comm));
    for (int64_t i = 1; i < 100000; i++) {
        const struct ckpt_save_args a = args_of(k, root, i);
        TRY(update(k));
        TRY(ckpt_async_copy(s, &a));
        if (comm_rank(k->comm) == 0) {
            ckpt_async_write(s, NULL, NULL);
            while ((step = ckpt_async_take(s, 1, &step)) == 0) {
            }
            TRY((int)step);
        }
    }
    ckpt_async_close(s);
    return 0;
}

/* A weight of the last rank is not finite: rank 0, which writes, names it, and the next save is good. */
static int save_diverged(struct rank *k, const char *root) {
    const bool last = comm_rank(k->comm) == comm_size(k->comm) - 1;
    const float nan = __builtin_nanf(""), zero = 0;
    struct ckpt_async *s;
    TRY(ckpt_async_open(&s, &k->part, 1, k->comm));
    const struct ckpt_save_args a = args_of(k, root, 1);
    if (last) TRY(dev_copy_in(&k->dev, k->m->master + k->m->n_master - 1, &nan, sizeof nan));
    int rc = ckpt_async_save(s, &a);
    if (comm_rank(k->comm) == 0) rc = rc == ERR_NUMERIC && strstr(err_msg(), "holds NaN or Inf") ? 0 : ERR_INTERNAL;
    if (last) TRY(dev_copy_in(&k->dev, k->m->master + k->m->n_master - 1, &zero, sizeof zero));
    if (rc == 0 && comm_rank(k->comm) == 0 && file_exists(root)) {
        int64_t step;
        char *dir;
        TRY(ckpt_find(root, &step, &dir));
        if (dir) FAIL(ERR_INTERNAL, "saved: %s", dir);
    }
    if (rc == 0) rc = ckpt_async_save(s, &a);
    ckpt_async_close(s);
    return rc;
}

/* From now on a copy ends in a signal, at the optimizer's first array: the master is copied. */
static int break_copies(const struct rank *k) {
    struct optim_array a[OPTIM_MAX_ARRAYS];
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const struct rlimit none = {0};
    setrlimit(RLIMIT_CORE, &none);
    signal(SIGSEGV, SIG_DFL); /* not a sanitizer's */
    optim_arrays(k->o, a);
    const uintptr_t lo = ((uintptr_t)a[0].data + page - 1) / page * page;
    if (mprotect((void *)lo, page, PROT_NONE) < 0) FAIL(ERR_INTERNAL, "mprotect: %s", strerror(errno));
    return 0;
}

/* The last rank dies in the middle of its copy for step 2: the others end at once, and say who it was. */
static int die_copying(struct rank *k, const char *root) {
    const int last = comm_size(k->comm) - 1;
    struct ckpt_save_args a = args_of(k, root, 1);
    struct ckpt_async *s;
    char who[32];
    TRY(ckpt_async_open(&s, &k->part, 1, k->comm));
    TRY(ckpt_async_save(s, &a));
    if (comm_rank(k->comm) == last) TRY(break_copies(k));
    a.step = 2;
    const int rc = ckpt_async_save(s, &a);
    ckpt_async_close(s);
    snprintf(who, sizeof who, "rank %d", last);
    if (rc != ERR_RANK || !strstr(err_msg(), who)) FAIL(ERR_INTERNAL, "%d, and not %s: %s", rc, who, rc < 0 ? err_msg() : "");
    exit(NAMED);
}

static int do_task(struct rank *k, char **argv) {
    if (strcmp(argv[10], "dies") == 0) return die_copying(k, argv[8]);
    if (strcmp(argv[10], "killed") == 0) return save_for_ever(k, argv[8]);
    if (strcmp(argv[10], "diverged") == 0) return save_diverged(k, argv[8]);
    return task(k, argv[8], argv[9]);
}

/* PROGRAM rank RANK SIZE ADDRESS KEY SETUP MODEL ROOT FROM WAY */
static int rank_main(char **argv) {
    struct comm_args a = {.rank = atoi(argv[2]), .size = atoi(argv[3]), .start_s = 60, .deadline_s = 30};
    struct rank k = {.s = &SETUPS[atoi(argv[6])]};
    const bool apart = strcmp(argv[10], "apart") == 0 && a.rank > 0; /* as if it were on another host */
    snprintf(a.where.address, sizeof a.where.address, "%s", argv[4]);
    snprintf(a.where.key, sizeof a.where.key, "%s", argv[5]);
    if (apart && (unshare(CLONE_NEWUTS) < 0 && unshare(CLONE_NEWUSER | CLONE_NEWUTS) < 0)) return 77;
    if (apart && sethostname("elsewhere", 9) < 0) return 77;
    int rc = comm_open(&k.comm, &a);
    if (rc >= 0 && apart && comm_same_host(k.comm, 0)) rc = err_set(ERR_INTERNAL, __FILE__, __LINE__, "on the same host");
    if (rc >= 0) rc = open_rank(&k, argv[7]);
    if (rc >= 0) rc = do_task(&k, argv);
    if (rc >= 0) rc = comm_barrier(k.comm);
    if (rc < 0) fprintf(stderr, "rank %d of %d, %s: %s (%s)\n", a.rank, a.size, k.s->name, err_msg(), err_trace());
    close_rank(&k);
    comm_close(k.comm);
    return rc < 0;
}

/* ---- groups ---- */

struct group {
    struct coordinator *hub;
    pid_t pid[MOST];
    int size;
};

static void start_group(struct group *g, int size, int setup, const char *model, const char *root, const char *from,
                        const char *way) {
    const struct coordinator_args a = {.size = size, .start_s = 60, .deadline_s = 30};
    g->size = size;
    if (coordinator_open(&g->hub, &a) < 0) fail_msg("%s", err_msg());
    const struct comm_where *w = coordinator_where(g->hub);
    for (int r = 0; r < size; r++) {
        char rank[16], ranks[16], which[16];
        char *const argv[] = {own_path,
                              "rank",
                              rank,
                              ranks,
                              (char *)(uintptr_t)w->address,
                              (char *)(uintptr_t)w->key,
                              which,
                              (char *)(uintptr_t)model,
                              (char *)(uintptr_t)root,
                              (char *)(uintptr_t)from,
                              (char *)(uintptr_t)way,
                              NULL};
        snprintf(rank, sizeof rank, "%d", r);
        snprintf(ranks, sizeof ranks, "%d", size);
        snprintf(which, sizeof which, "%d", setup);
        assert_int_equal(posix_spawn(&g->pid[r], own_path, NULL, NULL, argv, environ), 0);
    }
}

static int no_check(void *arg) {
    (void)arg;
    return 0;
}

/* 77: namespaces are not to be had. */
static int end_group(struct group *g) {
    int worst = 0, status;
    for (int r = 0; r < g->size; r++) {
        assert_int_equal(waitpid(g->pid[r], &status, 0), g->pid[r]);
        const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
        worst = code > worst ? code : worst;
    }
    coordinator_close(g->hub, false);
    return worst;
}

static int run_group(int size, int setup, const char *model, const char *root, const char *from, const char *way) {
    struct group g;
    start_group(&g, size, setup, model, root, from, way);
    if (strcmp(way, "apart") != 0) OK(coordinator_join(g.hub, no_check, NULL));
    else coordinator_join(g.hub, no_check, NULL); /* a rank may have left with 77 */
    return end_group(&g);
}

/* ---- the tests ---- */

struct fix {
    char dir[64];
    char *model;
};

static int setup(void **state) {
    struct fix *f = *state = xcalloc(1, sizeof *f);
    json_t *c =
        json_pack("{s:[s], s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:b, s:f, s:s, s:f}", "architectures", "Qwen2ForCausalLM",
                  "model_type", "qwen2", "hidden_size", 128, "intermediate_size", 700, "num_hidden_layers", 2,
                  "num_attention_heads", 4, "num_key_value_heads", 2, "vocab_size", 700, "max_position_embeddings", 64,
                  "tie_word_embeddings", 0, "rms_norm_eps", 1e-6, "torch_dtype", "bfloat16", "rope_theta", 1e4);
    snprintf(f->dir, sizeof f->dir, "/tmp/verlc-test-XXXXXX");
    if (!mkdtemp(f->dir)) return -1;
    f->model = file_join(f->dir, "model");
    const int rc = model_init_dir(c, f->model, 3, DT_BF16);
    json_decref(c);
    return rc;
}

static int teardown(void **state) {
    struct fix *f = *state;
    const int rc = file_remove_tree(f->dir);
    free(f->model);
    free(f);
    return rc;
}

/* What is in a checkpoint, checksums and all. */
static char *manifest(const char *root, int64_t step) {
    struct buf b = {0};
    char *dir = xasprintf("%s/global_step_%lld", root, (long long)step), *path = file_join(dir, "manifest.json");
    OK(ckpt_verify(dir));
    OK(file_read(&b, path, 0));
    free(dir);
    free(path);
    return buf_take(&b);
}

static void check_same(const char *root, const char *want_root, int64_t step, const char *what) {
    char *got = manifest(root, step), *want = manifest(want_root, step);
    if (strcmp(got, want) != 0) fail_msg("%s, step %lld:\n%s\n%s", what, (long long)step, got, want);
    free(got);
    free(want);
}

/* Every rank's compute copy is that of one. */
static void check_compute(const char *root, const char *want_root, int size, const char *what) {
    char *want_path = xasprintf("%s/compute-0/model.safetensors", want_root);
    struct buf want = {0};
    if (!file_exists(want_path)) size = 0;
    else OK(file_read(&want, want_path, 0));
    for (int r = 0; r < size; r++) {
        char *path = xasprintf("%s/compute-%d/model.safetensors", root, r);
        struct buf got = {0};
        OK(file_read(&got, path, 0));
        if (got.n != want.n || memcmp(got.p, want.p, got.n) != 0) fail_msg("%s: the compute copy of rank %d", what, r);
        buf_free(&got);
        free(path);
    }
    buf_free(&want);
    free(want_path);
}

/* One rank without a group: ckpt_save, in this process. */
static void alone(const struct fix *f, int which, const char *root, const char *from) {
    struct rank k = {.s = &SETUPS[which]};
    OK(open_rank(&k, f->model));
    OK(task(&k, root, from));
    close_rank(&k);
}

static void test_same_files(void **state) {
    const struct fix *f = *state;
    for (int i = 0; i < N_SETUPS; i++) {
        char *one = xasprintf("%s/one-%d", f->dir, i), *last = xasprintf("%s/global_step_2", one);
        alone(f, i, one, "-");
        alone(f, i, one, last);
        for (int n = SETUPS[i].every ? 2 : 3; n <= (SETUPS[i].every ? MOST : 3); n++) {
            char *root = xasprintf("%s/ranks-%d-%d", f->dir, i, n), what[128];
            snprintf(what, sizeof what, "%s, %d ranks", SETUPS[i].name, n);
            assert_int_equal(run_group(n, i, f->model, root, "-", "-"), 0);
            check_same(root, one, 2, what);
            assert_int_equal(run_group(n, i, f->model, root, last, "-"), 0); /* of another number of ranks */
            check_same(root, one, 3, what);
            check_compute(root, one, n, what);
            free(last);
            last = xasprintf("%s/global_step_2", root);
            free(root);
        }
        char *back = xasprintf("%s/back-%d", f->dir, i);
        alone(f, i, back, last);
        check_same(back, one, 3, "several ranks, then one");
        free(last);
        free(back);
        free(one);
    }
}

/* Ranks that cannot map rank 0's memory send what they have. */
static void test_elsewhere(void **state) {
    const struct fix *f = *state;
    static const int which[] = {0, 2, 4};
    for (int i = 0; i < 3; i++) {
        char *root = xasprintf("%s/apart-%d", f->dir, which[i]), *one = xasprintf("%s/one-%d", f->dir, which[i]);
        const int rc = run_group(3, which[i], f->model, root, "-", "apart");
        if (rc == 77) print_message("no UTS namespace is to be had: not tested\n");
        else {
            assert_int_equal(rc, 0);
            check_same(root, one, 2, "ranks elsewhere");
        }
        free(root);
        free(one);
    }
}

static void test_diverged(void **state) {
    const struct fix *f = *state;
    char *root = xasprintf("%s/diverged", f->dir), *dir = xasprintf("%s/global_step_1", root);
    assert_int_equal(run_group(3, 0, f->model, root, "-", "diverged"), 0);
    OK(ckpt_verify(dir));
    free(root);
    free(dir);
}

/* kill -9 of all ranks at random moments while rank 0 writes: what is published is complete, the rest is removed. */
static void test_killed(void **state) {
    const struct fix *f = *state;
    struct rng rng = {.seed = 5, .stream = RNG_TEST};
    int published = 0;
    for (int i = 0; i < KILLS; i++) {
        struct group g;
        char *root = xasprintf("%s/killed", f->dir), *dir = NULL;
        int64_t step;
        start_group(&g, 2 + i % 2, 0, f->model, root, "-", "killed");
        OK(coordinator_join(g.hub, no_check, NULL));
        char *newest = file_join(root, "latest_checkpointed_iteration.txt");
        for (int wait = 0; wait < 30000 && i % 4 && !file_exists(newest); wait++) usleep(1000);
        usleep((useconds_t)rng_below(&rng, 60000)); /* some checkpoints later; of each fourth group in the first */
        free(newest);
        for (int r = 0; r < g.size; r++) kill(g.pid[r], SIGKILL);
        assert_true(end_group(&g) != 0);
        OK(ckpt_recover(root));
        OK(ckpt_find(root, &step, &dir));
        if (dir) {
            char *shell =
                xasprintf("ls -A %s | grep -v '^global_step_[0-9]*$' | grep -v '^latest_checkpointed_iteration.txt$'", root);
            published++;
            struct rank k = {.s = &SETUPS[0]};
            OK(open_rank(&k, f->model));
            OK(ckpt_load_part(dir, &k.part));
            assert_int_equal(k.o->step, step);
            close_rank(&k);
            assert_true(system(shell) != 0); /* grep finds nothing else */
            free(shell);
        }
        free(dir);
        OK(file_remove_tree(root));
        free(root);
    }
    print_message("%d of %d killed groups had published checkpoints\n", published, KILLS);
    assert_true(published >= KILLS * 3 / 4);
}

static void test_killed_copying(void **state) {
    const struct fix *f = *state;
    const double start = clock_now();
    char *root = xasprintf("%s/copying", f->dir), *dir = NULL;
    struct group g;
    int64_t step;
    int status;
    start_group(&g, 3, 0, f->model, root, "-", "dies");
    OK(coordinator_join(g.hub, no_check, NULL));
    for (int r = 0; r < g.size; r++) {
        assert_int_equal(waitpid(g.pid[r], &status, 0), g.pid[r]);
        if (r == g.size - 1) assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
        else assert_true(WIFEXITED(status) && WEXITSTATUS(status) == NAMED);
    }
    coordinator_close(g.hub, false);
    assert_true(clock_now() - start < 10);
    OK(ckpt_find(root, &step, &dir));
    assert_int_equal(step, 1);
    free(dir);
    free(root);
}

int main(int argc, char **argv) {
    log_set_level(LOG_ERROR);
    if (argc == 11 && strcmp(argv[1], "rank") == 0) return rank_main(argv);
    const ssize_t n = readlink("/proc/self/exe", own_path, sizeof own_path - 1);
    assert_true(n > 0);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_same_files), cmocka_unit_test(test_elsewhere),
                                       cmocka_unit_test(test_diverged), cmocka_unit_test(test_killed),
                                       cmocka_unit_test(test_killed_copying)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
