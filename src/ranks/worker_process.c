/* worker_process.c - a worker process: its share of the cores, and the loop that serves calls.
 * Invariant: every call is answered once, with a result or with the error of its service. */
#include "ranks/start_workers_int.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/log.h"
#include "ranks/launcher.h"

#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Of each operation of the ranks; a call's own deadline is the controller's, and mostly sooner. */
#define OPERATION_S 3600.0

/* ---- cores ---- */

struct core {
    int cpu, package, core;
};

static int topology(int cpu, const char *what) {
    char path[128];
    int v = 0;
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/%s", cpu, what);
    FILE *f = fopen(path, "r");
    if (f && fscanf(f, "%d", &v) != 1) v = 0;
    if (f) fclose(f);
    return v;
}

static int by_place(const void *a, const void *b) {
    const struct core *x = a, *y = b;
    if (x->package != y->package) return x->package < y->package ? -1 : 1;
    if (x->core != y->core) return x->core < y->core ? -1 : 1;
    return (x->cpu > y->cpu) - (x->cpu < y->cpu);
}

bool worker_process__unbound(void) {
    cpu_set_t own, launchers;
    return sched_getaffinity(0, sizeof own, &own) == 0 && sched_getaffinity(getppid(), sizeof launchers, &launchers) == 0 &&
           CPU_EQUAL(&own, &launchers);
}

/* Part `rank` of `ranks` of the CPUs that this process may use: whole cores, neighbours. None where there are fewer. */
static void take_cores(int rank, int ranks) {
    static struct core cores[CPU_SETSIZE];
    cpu_set_t all, own;
    int n = 0;
    if (sched_getaffinity(0, sizeof all, &all) != 0) return;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &all)) cores[n++] = (struct core){cpu, topology(cpu, "physical_package_id"), topology(cpu, "core_id")};
    if (n < ranks) return;
    qsort(cores, (size_t)n, sizeof *cores, by_place);
    CPU_ZERO(&own);
    for (int i = n * rank / ranks; i < n * (rank + 1) / ranks; i++) CPU_SET(cores[i].cpu, &own);
    (void)sched_setaffinity(0, sizeof own, &own);
}

/* ---- serving ---- */

static void lost(void *arg, const char *why) {
    (void)arg;
    log_error("%s", why);
    _exit(err_exit_status(ERR_RANK)); /* the main thread may be in any call */
}

static int serve_one(struct comm *comm, const struct comm_call *call, const struct worker_process_service *services) {
    struct ctl_result out = {0};
    while (services->name && strcmp(services->name, call->name) != 0) services++;
    int rc = services->name ? services->run(comm, call, &out)
                            : err_set(ERR_INTERNAL, __FILE__, __LINE__, "no service has the name '%s'", call->name);
    rc = rc < 0 ? comm_reply_error(comm, rc) : comm_reply(comm, out.value, out.arrays, out.n_arrays);
    comm_stage(comm, "idle");
    json_decref(out.value);
    for (int i = 0; i < out.n_arrays; i++) free(out.arrays[i].p);
    free(out.arrays);
    TRY(rc);
    return 0;
}

static int serve(struct comm *comm, const struct worker_process_service *services) {
    struct comm_call call;
    int rc;
    while ((rc = comm_next_call(comm, &call)) > 0) {
        rc = serve_one(comm, &call, services);
        comm_call_free(&call);
        TRY(rc);
    }
    TRY(rc);
    return 0;
}

int worker_process_serve(const struct workers_args *a, const struct launch *l, const struct worker_process_service *services) {
    struct comm_args c = {
        .rank = l->rank, .size = l->size, .start_s = a->start_s, .deadline_s = OPERATION_S, .lost = lost, .job = l->job};
    const char *address = a->controller ? a->controller : getenv(WORKERS__CONTROLLER), *key = getenv(WORKERS__KEY);
    static const char *const names[] = {CTL__VARIABLES};
    static const int stops[] = {SIGINT, SIGTERM, SIGHUP}; /* a launcher sends them to all; the controller decides */
    struct comm *comm;
    if (address && strlen(address) >= sizeof c.where.address)
        FAIL(ERR_INVAL, "the controller's address is too long: %.60s...", address);
    if (key && strlen(key) != COMM_KEY - 1) FAIL(ERR_INVAL, WORKERS__KEY " is not a key of %d characters", COMM_KEY - 1);
    if (key && !address)
        FAIL(ERR_INVAL, WORKERS__KEY " is set, and nothing says where the controller is (" WORKERS__CONTROLLER "=HOST:PORT)");
    if (key) {
        strcpy(c.where.address, address);
        strcpy(c.where.key, key);
    } else {
        c.dir = a->dir;
    }
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) unsetenv(names[i]); /* what it starts is no rank */
    const bool ours = l->by && strcmp(l->by, "verlc") == 0;                       /* its controller has checked the binding */
    if (l->local_size > 1 && (ours || worker_process__unbound())) take_cores(l->local_rank, l->local_size);
    TRY(comm_open(&comm, &c));
    for (size_t i = 0; i < sizeof stops / sizeof *stops; i++) signal(stops[i], SIG_IGN);
    const int rc = serve(comm, services);
    comm_close(comm);
    TRY(rc);
    return 0;
}
