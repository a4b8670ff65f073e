/* launcher.c - see launcher.h. One function for each launcher; the innermost one present decides, since mpirun and
 * torchrun also run inside a Slurm job, whose variables are those of the node's daemon then. */
#include "ranks/launcher.h"

#include "base/err.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_RANKS = 1 << 16 };

static const char *get(char *const *env, const char *name) {
    const size_t n = strlen(name);
    for (; *env; env++)
        if (strncmp(*env, name, n) == 0 && (*env)[n] == '=') return (*env)[n + 1] ? *env + n + 1 : NULL;
    return NULL;
}

static int whole(const char *by, const char *name, const char *value, int least, int most, int *out) {
    char *end;
    errno = 0;
    const long v = strtol(value, &end, 10);
    if (errno || *end || v < least || v > most)
        FAIL(ERR_INVAL, "started by %s: %s='%.60s' is not a whole number from %d to %d", by, name, value, least, most);
    *out = (int)v;
    return 0;
}

/* *out keeps its value where the variable is not set. */
static int optional(char *const *env, const char *by, const char *name, int least, int most, int *out) {
    const char *v = get(env, name);
    return v ? whole(by, name, v, least, most, out) : 0;
}

/* seen: the variable that shows the launcher. */
static int needed(char *const *env, const char *by, const char *seen, const char *name, int least, int *out) {
    const char *v = get(env, name);
    if (!v) FAIL(ERR_INVAL, "started by %s: %s is set and %s is not", by, seen, name);
    return whole(by, name, v, least, MOST_RANKS, out);
}

/* Names of a launcher's variables; NULL where it has none. */
struct names {
    const char *by, *rank, *size, *local_rank, *local_size, *node;
};

static int read_names(struct launch *l, char *const *env, const struct names *n) {
    const char *const seen = get(env, n->rank) ? n->rank : n->size;
    *l = (struct launch){.by = n->by, .size = 1, .local_rank = -1, .node = -1};
    TRY(needed(env, n->by, seen, n->rank, 0, &l->rank));
    TRY(needed(env, n->by, seen, n->size, 1, &l->size));
    if (l->rank >= l->size) FAIL(ERR_INVAL, "started by %s: %s=%d is not below %s=%d", n->by, n->rank, l->rank, n->size, l->size);
    if (n->local_rank) TRY(optional(env, n->by, n->local_rank, 0, MOST_RANKS, &l->local_rank));
    if (n->local_size) TRY(optional(env, n->by, n->local_size, 1, l->size, &l->local_size));
    if (n->node) TRY(optional(env, n->by, n->node, 0, MOST_RANKS, &l->node));
    if (l->local_size && l->local_rank >= l->local_size)
        FAIL(ERR_INVAL, "started by %s: %s=%d is not below %s=%d", n->by, n->local_rank, l->local_rank, n->local_size,
             l->local_size);
    return 0;
}

/* "A/B/C" of those that are set: distinguishes one start from another. */
static void join_job(struct launch *l, char *const *env, const char *const *names) {
    for (; *names; names++) {
        const char *v = get(env, *names);
        const size_t n = strlen(l->job);
        if (v) snprintf(l->job + n, sizeof l->job - n, "%s%s", n ? "/" : "", v);
    }
}

static int read_verlc(struct launch *l, char *const *env) {
    static const struct names names = {"verlc", "VERLC_RANK", "VERLC_RANKS", "VERLC_LOCAL_RANK", "VERLC_LOCAL_RANKS", "VERLC_NODE"};
    TRY(read_names(l, env, &names));
    if (l->local_rank < 0) l->local_rank = l->rank;
    return 0;
}

static int read_torchrun(struct launch *l, char *const *env) {
    static const struct names names = {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"};
    TRY(read_names(l, env, &names));
    const char *const address = get(env, "MASTER_ADDR");
    if (l->size > 1 && !address) FAIL(ERR_INVAL, "started by torchrun: RANK is set and MASTER_ADDR is not");
    if (address && strlen(address) >= sizeof l->address) FAIL(ERR_INVAL, "started by torchrun: MASTER_ADDR is too long");
    if (address) strcpy(l->address, address);
    if (l->local_rank < 0) l->local_rank = 0; /* a pod of one GPU has none */
    join_job(l, env,
             (const char *const[]){"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", NULL});
    return 0;
}

static int read_openmpi(struct launch *l, char *const *env) {
    static const struct names names = {"mpirun (Open MPI)",          "OMPI_COMM_WORLD_RANK",       "OMPI_COMM_WORLD_SIZE",
                                       "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", NULL};
    TRY(read_names(l, env, &names));
    if (l->local_rank < 0) FAIL(ERR_INVAL, "started by %s: %s is not set", l->by, names.local_rank);
    join_job(l, env, (const char *const[]){"PMIX_NAMESPACE", NULL});
    return 0;
}

static int read_pmi(struct launch *l, char *const *env) {
    static const struct names names = {"mpirun (PMI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", NULL};
    TRY(read_names(l, env, &names));
    if (l->local_rank < 0) TRY(optional(env, l->by, "PALS_LOCAL_RANKID", 0, MOST_RANKS, &l->local_rank));
    if (l->local_rank < 0) TRY(optional(env, l->by, "SLURM_LOCALID", 0, MOST_RANKS, &l->local_rank)); /* srun --mpi=pmi2 */
    if (l->local_rank < 0) FAIL(ERR_INVAL, "started by %s: PMI_RANK is set and MPI_LOCALRANKID is not", l->by);
    join_job(l, env, (const char *const[]){"PALS_APID", "SLURM_JOB_ID", "SLURM_STEP_ID", NULL});
    return 0;
}

/* Tasks of host `node` in Slurm's "2(x3),1". */
static int tasks_of_node(const char *name, const char *list, int node, int *out) {
    const char *s = list;
    while (*s) {
        char *end;
        const long tasks = strtol(s, &end, 10);
        long times = 1;
        if (end == s || tasks < 1 || tasks > MOST_RANKS) break;
        if (strncmp(end, "(x", 2) == 0) {
            s = end + 2;
            times = strtol(s, &end, 10);
            if (end == s || *end != ')' || times < 1 || times > MOST_RANKS) break;
            end++;
        }
        if (*end && *end != ',') break;
        if (node < times) {
            *out = (int)tasks;
            return 0;
        }
        node -= (int)times;
        s = *end ? end + 1 : end;
        if (!*s) break;
    }
    FAIL(ERR_INVAL, "started by srun: %s='%.60s' does not say how many tasks this node has", name, list);
}

/* The shell of sbatch and of salloc has SLURM_PROCID too; a step of srun has a small step id. */
static bool in_slurm_step(char *const *env) {
    const char *v = get(env, "SLURM_STEP_ID");
    return get(env, "SLURM_PROCID") && v && strtoul(v, NULL, 10) < 0xfffffff0UL;
}

static int read_slurm(struct launch *l, char *const *env) {
    const char *const size = get(env, "SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
    const struct names names = {"srun", "SLURM_PROCID", size, "SLURM_LOCALID", NULL, "SLURM_NODEID"};
    TRY(read_names(l, env, &names));
    if (l->local_rank < 0) FAIL(ERR_INVAL, "started by srun: SLURM_PROCID is set and SLURM_LOCALID is not");
    const char *name = get(env, "SLURM_STEP_TASKS_PER_NODE") ? "SLURM_STEP_TASKS_PER_NODE" : "SLURM_TASKS_PER_NODE";
    const char *tasks = get(env, name);
    if (tasks && l->node >= 0) TRY(tasks_of_node(name, tasks, l->node, &l->local_size));
    if (l->local_size && l->local_rank >= l->local_size)
        FAIL(ERR_INVAL, "started by srun: SLURM_LOCALID=%d, but %s='%.60s' gives node %d %d tasks", l->local_rank, name, tasks,
             l->node, l->local_size);
    join_job(l, env, (const char *const[]){"SLURM_JOB_ID", "SLURM_STEP_ID", NULL});
    return 0;
}

int launch_read(struct launch *l, char *const *env) {
    *l = (struct launch){.size = 1, .local_size = 1};
    if (get(env, "VERLC_RANK")) return read_verlc(l, env);
    const bool torch = get(env, "LOCAL_RANK") || get(env, "TORCHELASTIC_RUN_ID") || get(env, "MASTER_ADDR");
    const bool rank = get(env, "RANK"), size = get(env, "WORLD_SIZE");
    if ((rank && size) || (torch && (rank || size))) return read_torchrun(l, env);
    if (get(env, "OMPI_COMM_WORLD_RANK") || get(env, "OMPI_COMM_WORLD_SIZE")) return read_openmpi(l, env);
    if (get(env, "PMI_RANK") && get(env, "PMI_SIZE")) return read_pmi(l, env);
    if (in_slurm_step(env)) return read_slurm(l, env);
    if (get(env, "PMIX_RANK"))
        FAIL(ERR_INVAL, "PMIX_RANK is set, and nothing says how many ranks there are: OMPI_COMM_WORLD_SIZE (mpirun) or "
                        "SLURM_STEP_NUM_TASKS (srun)");
    if (get(env, "PMI_RANK")) FAIL(ERR_INVAL, "started by mpirun (PMI): PMI_RANK is set and PMI_SIZE is not");
    return 0;
}
