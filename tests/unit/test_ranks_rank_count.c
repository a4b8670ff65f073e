/* test_ranks_rank_count.c - how many ranks a run has, by its keys, what started it and the GPUs of the host; what is said where
 * that is another number than asked for. */
#include "ranks/rank_count.h"

#include "base/buf.h"
#include "base/err.h"
#include "ranks/launcher.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static int there, counted, ray_nodes;
static struct train_pool_devices pool_devices;
static bool ray;
static int n_gpus(void) {
    counted++;
    return there;
}

static const struct conf_binding bindings[] = {
    {"trainer.nnodes", INTO_I64, offsetof(struct train_devices_keys, nnodes), 0, 0, NULL},
    {"trainer.n_gpus_per_node", INTO_I64, offsetof(struct train_devices_keys, n_gpus_per_node), 0, 0, NULL},
    {"trainer.ranks", INTO_I64, offsetof(struct train_devices_keys, ranks), 0, 0, NULL},
};

/* The number of ranks; *said: what came to stderr, freed by the caller. */
static int64_t ranks(const char *const *args, const char *device, const char *by, int size, char **said) {
    struct conf *c = NULL;
    struct train_devices_keys k = {0};
    char *argv[4];
    int n = 0;
    for (; args[n]; n++) argv[n] = (char *)(uintptr_t)args[n];
    if (conf_load(&c, "ppo_trainer", n, argv) < 0 || conf_fill(c, bindings, sizeof bindings / sizeof *bindings, &k) < 0)
        fail_msg("%s", err_msg());
    const struct launch l = {.by = by, .size = size};
    const struct train_ranks_args a = {
        .conf = c, .keys = &k, .pools = pool_devices, .device = device, .launch = &l, .n_gpus = n_gpus, .ray = ray};
    FILE *f = tmpfile();
    assert_non_null(f);
    fflush(stderr);
    const int saved = dup(2);
    assert_true(dup2(fileno(f), 2) == 2);
    const int64_t got = rank_count_asked(&a, &ray_nodes);
    fflush(stderr);
    dup2(saved, 2);
    close(saved);
    struct buf b = {0};
    char line[1024];
    rewind(f);
    while (fgets(line, sizeof line, f)) buf_adds(&b, line);
    fclose(f);
    *said = b.p ? buf_take(&b) : xstrdup("");
    conf_free(c);
    return got;
}

#define GPUS(n) "trainer.n_gpus_per_node=" #n

static void test_ranks(void **state) {
    (void)state;
    static const struct {
        const char *args[4], *device, *by;
        int size, there;
        int64_t n;
        const char *said; /* NULL: nothing */
    } cases[] = {
        /* by hand, on GPUs */
        {{NULL}, NULL, NULL, 1, 8, 1, NULL}, /* verl's default of 8 is no promise */
        {{GPUS(1)}, NULL, NULL, 1, 8, 1, NULL},
        {{GPUS(4)}, NULL, NULL, 1, 4, 4, NULL},
        {{GPUS(4)}, NULL, NULL, 1, 8, 4, NULL},
        {{GPUS(4)},
         "cuda",
         NULL,
         1,
         2,
         2,
         "this host has 2 of the 4 GPUs asked for by trainer.n_gpus_per_node: 2 ranks; the result"},
        {{GPUS(4)}, "cuda", NULL, 1, 1, 1, "this host has 1 of the 4 GPUs asked for by trainer.n_gpus_per_node: 1 rank;"},
        {{GPUS(4)}, "cuda:1", NULL, 1, 4, 1, "trainer.device=cuda:1 names one GPU: one rank of the 4"},
        {{GPUS(4), "trainer.nnodes=2"}, NULL, NULL, 1, 4, 4, "those of this host: srun, mpirun or torchrun start the command"},
        {{GPUS(4), "trainer.nnodes=2"}, NULL, NULL, 1, 3, 3, "3 of the 8 GPUs asked for"},
        /* with trainer.ranks, which may share them */
        {{"trainer.ranks=3"}, NULL, NULL, 1, 4, 3, NULL},
        {{"trainer.ranks=3"}, "cuda", NULL, 1, 1, 3, "3 ranks share 1 GPU (trainer.ranks)"},
        {{"trainer.ranks=3", GPUS(1)}, NULL, NULL, 1, 2, 3, "3 ranks share 2 GPUs"},
        {{"trainer.ranks=2"}, "cuda:1", NULL, 1, 4, 2, "2 ranks share 1 GPU"},
        {{"trainer.ranks=1", GPUS(4)}, NULL, NULL, 1, 4, 1, "trainer.ranks: 1 rank, not the 4 GPUs asked for by trainer.nnodes"},
        {{GPUS(2), "trainer.ranks=2"}, NULL, NULL, 1, 4, 2, NULL},
        /* on a CPU */
        {{NULL}, "cpu", NULL, 1, 8, 1, NULL},
        {{"trainer.ranks=3"}, "cpu", NULL, 1, 8, 3, NULL},
        {{"trainer.ranks=3"}, "ref", NULL, 1, 8, 3, NULL},
        {{"trainer.ranks=3"}, NULL, NULL, 1, 0, 3, NULL},
        {{"trainer.ranks=3", GPUS(3)}, "cpu", NULL, 1, 8, 3, NULL},
        {{"trainer.ranks=3", GPUS(4)}, "cpu", NULL, 1, 8, 3, "3 CPU ranks (trainer.device=cpu), not the 4 GPUs asked for"},
        {{GPUS(4)}, "cpu", NULL, 1, 8, 1, "1 CPU rank (trainer.device=cpu), not the 4 GPUs asked for"},
        {{GPUS(4)}, NULL, NULL, 1, 0, 1, "1 CPU rank (trainer.device=auto), not the 4 GPUs"},
        /* under a launcher */
        {{NULL}, NULL, "srun", 8, 4, 8, NULL},
        {{GPUS(4), "trainer.nnodes=2"}, NULL, "srun", 8, 4, 8, NULL},
        {{GPUS(4)}, NULL, "mpirun", 8, 4, 8, "mpirun started 8 processes: 8 ranks, one a process, whatever"},
        {{"trainer.ranks=2"}, "cpu", "torchrun", 4, 0, 4, "torchrun started 4 processes"},
        {{"trainer.ranks=4"}, "cpu", "torchrun", 4, 0, 4, NULL},
        {{GPUS(4)}, NULL, "srun", 1, 4, 4, NULL}, /* a shell of srun is by hand */
        /* a worker of verlc's own: its controller has said it */
        {{GPUS(4)}, NULL, "verlc", 2, 2, 2, NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *said;
        there = cases[i].there;
        const int64_t n = ranks(cases[i].args, cases[i].device, cases[i].by, cases[i].size, &said);
        if (n != cases[i].n) fail_msg("case %zu: %lld ranks, not %lld", i, (long long)n, (long long)cases[i].n);
        if (cases[i].said ? !strstr(said, cases[i].said) : *said != '\0') fail_msg("case %zu said: %s", i, said);
        free(said);
    }
}

/* What pools ask for counts with the trainer's. */
static void test_pools(void **state) {
    (void)state;
    static const struct {
        const char *args[4], *device;
        int there;
        int64_t n;
        const char *said;
    } cases[] = {
        {{GPUS(4)}, NULL, 8, 6, NULL},
        {{GPUS(4)}, NULL, 6, 6, NULL},
        {{GPUS(4)}, NULL, 2, 2, "this host has 2 of the 6 GPUs asked for by trainer.nnodes x trainer.n_gpus_per_node and by pools"},
        {{NULL}, NULL, 8, 3, NULL},
        {{"trainer.ranks=2"},
         NULL,
         8,
         2,
         "2 ranks, not the 3 GPUs asked for by trainer.nnodes x trainer.n_gpus_per_node and by pools"},
        {{NULL}, "cpu", 0, 4, NULL},
        {{"trainer.ranks=2"}, "cpu", 0, 5, NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *said;
        there = cases[i].there;
        const bool cpu = cases[i].device != NULL;
        pool_devices = (struct train_pool_devices){.gpus = cpu ? 0 : 2, .ranks = cpu ? 3 : 0};
        const int64_t n = ranks(cases[i].args, cases[i].device, NULL, 1, &said);
        if (n != cases[i].n) fail_msg("case %zu: %lld ranks, not %lld", i, (long long)n, (long long)cases[i].n);
        if (cases[i].said ? !strstr(said, cases[i].said) : *said != '\0') fail_msg("case %zu said: %s", i, said);
        free(said);
    }
    there = 1;
    pool_devices = (struct train_pool_devices){.ranks = 2};
    char *shared;
    assert_int_equal(ranks((const char *const[]){NULL}, NULL, NULL, 1, &shared), 3);
    assert_non_null(strstr(shared, "3 ranks share 1 GPU"));
    free(shared);
    ray = true; /* hosts of the trainer's and of a pool, with as many GPUs each */
    there = 0;
    pool_devices = (struct train_pool_devices){.gpus = 4, .nodes = 1};
    char *said;
    assert_int_equal(ranks((const char *const[]){GPUS(4), NULL}, NULL, NULL, 1, &said), 8);
    assert_int_equal(ray_nodes, 2);
    free(said);
    ray = false;
    pool_devices = (struct train_pool_devices){0};
}

static void test_ray(void **state) {
    (void)state;
    static const struct {
        const char *args[4], *device, *by;
        int size, there, nodes;
        int64_t n;
    } cases[] = {
        {{GPUS(4), "trainer.nnodes=2"}, NULL, NULL, 1, 4, 2, 8}, /* this host may be one of them */
        {{GPUS(8)}, NULL, NULL, 1, 8, 0, 8},
        {{GPUS(8)}, NULL, NULL, 1, 0, 1, 8}, /* a cluster's head without GPUs */
        {{NULL}, NULL, NULL, 1, 0, 0, 1},
        {{"trainer.nnodes=2"}, NULL, NULL, 1, 0, 2, 2},
        {{"trainer.nnodes=2", "trainer.ranks=4"}, "cpu", NULL, 1, 0, 2, 4},
        {{"trainer.nnodes=2", "trainer.ranks=3"}, "cpu", NULL, 1, 0, 0, 3},
        {{"trainer.ranks=2"}, "cpu", NULL, 1, 0, 0, 2},
        {{GPUS(4), "trainer.nnodes=2"}, NULL, "srun", 8, 4, 0, 8}, /* the innermost launcher */
    };
    ray = true;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *said;
        there = cases[i].there;
        const int64_t n = ranks(cases[i].args, cases[i].device, cases[i].by, cases[i].size, &said);
        if (n != cases[i].n || ray_nodes != cases[i].nodes)
            fail_msg("case %zu: %lld ranks on %d nodes of Ray: %s", i, (long long)n, ray_nodes, said);
        free(said);
    }
    ray = false;
}

/* One rank costs nothing: no driver is opened to count. */
static void test_one_rank_counts_no_gpus(void **state) {
    (void)state;
    char *said;
    counted = 0;
    assert_int_equal(ranks((const char *const[]){GPUS(1), NULL}, NULL, NULL, 1, &said), 1);
    free(said);
    assert_int_equal(ranks((const char *const[]){"trainer.ranks=4", NULL}, "cpu", NULL, 1, &said), 4);
    free(said);
    assert_int_equal(counted, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_ranks), cmocka_unit_test(test_pools), cmocka_unit_test(test_ray),
                                       cmocka_unit_test(test_one_rank_counts_no_gpus)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
