/* rank_count.c - see rank_count.h. */
#include "ranks/rank_count.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/log.h"
#include "device/device.h"
#include "ranks/launcher.h"
#include "ranks/trainer_config.h"

#include <stdlib.h>
#include <string.h>

extern char **environ;

#define ASKED_BY "trainer.nnodes x trainer.n_gpus_per_node"

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

int64_t rank_count_devices(const struct conf *c, const struct train_devices_keys *k) {
    return conf_is_set(c, "trainer.n_gpus_per_node") ? k->n_gpus_per_node * k->nnodes : k->nnodes;
}

/* The size that a key of the group says, of its engine where it is not there; 1: none. */
static int64_t split_size(const struct conf *c, const char *group, const char *name) {
    static const char *const engines[] = {"", ".fsdp_config", ".fsdp", ".megatron", ".veomni"};
    int64_t n = 1;
    for (size_t i = 0; i < sizeof engines / sizeof *engines; i++) {
        char *key = xasprintf("%s%s.%s", group, engines[i], name);
        const json_t *v = NULL;
        if (!conf_is_null(c, key) && conf_json(c, key, &v) == 0 && json_integer_value(v) > n) n = json_integer_value(v);
        free(key);
    }
    return n;
}

int64_t rank_count_data_parallel(const struct conf *c, const struct train_devices_keys *k, const char *group) {
    static const char *const names[] = {"ulysses_sequence_parallel_size",
                                        "ulysses_parallel_size",
                                        "tensor_model_parallel_size",
                                        "pipeline_model_parallel_size",
                                        "context_parallel_size",
                                        "tp_size",
                                        "pp_size",
                                        "cp_size"};
    int64_t n = rank_count_devices(c, k);
    for (size_t i = 0; i < sizeof names / sizeof *names && n > 1; i++) n /= split_size(c, group, names[i]);
    return n > 1 ? n : 1;
}

/* By trainer.ranks and those of pools; 0: none is set. */
static int64_t ranks_asked(const struct train_ranks_args *a) {
    const int64_t own = a->keys->ranks;
    return a->pools.ranks > 0 ? a->pools.ranks + (own > 0 ? own : 1) : own;
}

static const char *asked_by(const struct train_ranks_args *a) { return a->pools.gpus > 0 ? ASKED_BY " and by pools" : ASKED_BY; }

/* Under a launcher: a process a rank. */
static int64_t launched(const struct train_ranks_args *a, int64_t asked) {
    const int64_t n = a->launch->size, by_ranks = ranks_asked(a);
    const bool said = asked > 1 || by_ranks > 0 || conf_is_set(a->conf, "trainer.n_gpus_per_node");
    if (strcmp(a->launch->by, "verlc") != 0 && said && n != asked && n != by_ranks)
        log_note("%s started %lld processes: %lld ranks, one a process, whatever " ASKED_BY " and trainer.ranks say", a->launch->by,
                 (long long)n, (long long)n);
    return n;
}

/* Started by hand, on the GPUs of this host. there: how many it has; >= 1. */
static int64_t on_gpus(const struct train_ranks_args *a, int64_t asked, int64_t there) {
    const bool one = a->device && strncmp(a->device, "cuda:", 5) == 0;
    const int64_t here = least(one ? 1 : a->keys->nnodes > 1 ? asked / a->keys->nnodes : asked, there);
    if (here == asked) return here;
    if (one)
        log_note("trainer.device=%s names one GPU: one rank of the %lld asked for by %s; the result is the same", a->device,
                 (long long)asked, asked_by(a));
    else if (a->keys->nnodes > 1)
        log_note("%lld of the %lld GPUs asked for by " ASKED_BY ", those of this host: srun, mpirun or torchrun start the command "
                 "on all of them (docs/scaling.md); the result is the same",
                 (long long)here, (long long)asked);
    else
        log_note("this host has %lld of the %lld GPUs asked for by %s: %lld rank%s; the result is the same", (long long)there,
                 (long long)asked, a->pools.gpus > 0 ? asked_by(a) : "trainer.n_gpus_per_node", (long long)here,
                 here == 1 ? "" : "s");
    return here;
}

/* trainer.ranks, or a pool's where no number of GPUs is set, decides, whatever GPUs there are. */
static bool says_ranks(const struct train_ranks_args *a, int64_t asked) {
    return a->keys->ranks > 0 || (a->pools.ranks > 0 && asked == 1);
}
static int64_t ranks_on_gpus(const struct train_ranks_args *a, int64_t asked, int64_t there) {
    const int64_t n = ranks_asked(a);
    if (asked > 1 && asked != n)
        log_note("trainer.ranks: %lld rank%s, not the %lld GPUs asked for by %s; the result is the same", (long long)n,
                 n == 1 ? "" : "s", (long long)asked, asked_by(a));
    if (a->device && strncmp(a->device, "cuda:", 5) == 0) there = 1;
    if (n > there) log_info("%lld ranks share %lld GPU%s (trainer.ranks)", (long long)n, (long long)there, there == 1 ? "" : "s");
    return n;
}

static int64_t on_cpu(const struct train_ranks_args *a, int64_t asked) {
    const int64_t by_ranks = ranks_asked(a), n = by_ranks > 0 ? by_ranks : 1;
    if (asked > 1 && asked != n)
        log_note(
            "%lld CPU rank%s (trainer.device=%s), not the %lld GPUs asked for by %s; trainer.ranks says how many; the result is "
            "the same",
            (long long)n, n == 1 ? "" : "s", a->device ? a->device : "auto", (long long)asked, asked_by(a));
    return n;
}

bool rank_count_on_cpu(const char *device) { return device && (strcmp(device, "cpu") == 0 || strcmp(device, "ref") == 0); }

/* Several nodes are Ray's where it has some; one is, where this host has no GPU (a cluster's head). */
int64_t rank_count_asked(const struct train_ranks_args *a, int *ray_nodes) {
    const int64_t asked = rank_count_devices(a->conf, a->keys) + a->pools.gpus, nodes = a->keys->nnodes + a->pools.nodes,
                  by_ranks = ranks_asked(a);
    const bool cpu = rank_count_on_cpu(a->device), several = a->ray && nodes > 1;
    *ray_nodes = 0;
    if (a->launch->size > 1) return launched(a, asked);
    if (cpu && several && by_ranks >= nodes && by_ranks % nodes == 0) {
        *ray_nodes = (int)nodes;
        return by_ranks;
    }
    if (cpu) return on_cpu(a, asked);
    if (asked == 1 && by_ranks <= 1) return 1; /* without looking for a GPU, which takes a while */
    const int64_t there = several ? 0 : a->n_gpus();
    if (a->ray && asked > 1 && there == 0 && asked % nodes == 0) {
        *ray_nodes = (int)nodes;
        return asked;
    }
    if (there == 0) return on_cpu(a, asked);
    return says_ranks(a, asked) ? ranks_on_gpus(a, asked, there) : on_gpus(a, asked, there);
}

/* RAY_ADDRESS is set by `ray job submit` too; the file, by `ray start` on this machine. */
static bool ray_is_there(int64_t nodes) {
    const char *address = getenv("RAY_ADDRESS"), *dir = getenv("RAY_TMPDIR");
    char *file = file_join(dir && *dir ? dir : "/tmp", "ray/ray_current_cluster");
    const bool there = (address && *address) || (nodes > 1 && file_exists(file));
    free(file);
    return there;
}

bool rank_count_launched(void) {
    struct launch l;
    return launch_read(&l, environ) == 0 && l.size > 1;
}

int rank_count_decide(const struct conf *c, const struct trainer_config *k, const struct train_pool_devices *pools, bool ray,
                      struct rank_placement *p) {
    struct launch l;
    TRY(launch_read(&l, environ));
    const struct train_ranks_args a = {.conf = c,
                                       .keys = &k->devices,
                                       .pools = pools ? *pools : (struct train_pool_devices){0},
                                       .device = k->run.device,
                                       .launch = &l,
                                       .n_gpus = dev_cuda_count,
                                       .ray = ray && ray_is_there(k->devices.nnodes + (pools ? pools->nodes : 0))};
    p->n_local = 1;
    p->n = rank_count_asked(&a, &p->n_ray_nodes);
    return 0;
}
