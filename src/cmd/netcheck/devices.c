/* devices.c - the ranks' side of `verlc netcheck` for devices: what an update on several ranks moves between their memories.
 * A rank opens its device and the group for one call, and closes both. Knows no links: every rank moves at once.
 * Invariant: all ranks make the same moves with the same sizes. */
#include "cmd/netcheck/netcheck.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/json.h"
#include "base/log.h"
#include "device/collective/collective.h"
#include "ranks/worker_calls.h"

#include <stdlib.h>
#include <string.h>

enum { MOST = 1000, LONG = 10 };

int netcheck_has_gpu(struct comm *c, const struct comm_call *call, struct ctl_result *out) {
    char why[256] = "";
    (void)c, (void)call;
    const bool has = dev_cuda_present(why, sizeof why);
    out->value = json_pack("{s:b, s:s}", "has", has, "why", why);
    return 0;
}

struct moves {
    struct dev dev;
    struct collective *group;
    float *x, *own; /* device, (n) each; x is shared */
    int64_t n;      /* elements */
    int64_t *cut;   /* (ranks + 1): whose elements they are */
    size_t *at;     /* the same in bytes */
};

static int fold_once(struct moves *m) {
    int64_t ticket;
    const struct dev_bucket b = {.x = m->x, .cut = m->cut, .n = collective_size(m->group), .own = m->own};
    TRY(collective_fold(m->group, &b, &ticket));
    return collective_reuse(m->group, ticket);
}

static int gather_once(struct moves *m) { return collective_all_gather(m->group, m->x, m->at, 1); }

/* Seconds of one, of as many as fit in `seconds` by the time of the first, which is left out; a first that takes LONG times
 * `seconds` stands. */
static int time_move(struct comm *c, struct moves *m, int (*once)(struct moves *m), double seconds, double *out) {
    int64_t rounds = 1;
    for (int pass = 0; pass < 2 && rounds > 0; pass++) {
        TRY(comm_barrier(c));
        const double start = clock_now();
        for (int64_t k = 0; k < rounds; k++) TRY(once(m));
        TRY(collective_join(m->group));
        TRY(dev_sync(&m->dev));
        TRY(comm_barrier(c));
        *out = (clock_now() - start) / (double)rounds;
        const double fit = seconds / *out;
        rounds = *out > LONG * seconds ? 0 : fit < 1 ? 1 : fit > MOST ? MOST : (int64_t)fit;
        TRY(comm_broadcast(c, 0, &rounds, sizeof rounds)); /* the same on all */
    }
    return 0;
}

static int open_moves(struct comm *c, struct moves *m, const char *device, int64_t bytes) {
    char name[32];
    const int size = comm_size(c);
    void *p;
    const bool cuda = strcmp(device, "cuda") == 0;
    int gpu = 0;
    log_set_level(LOG_WARN); /* the controller says which device it is */
    if (cuda) TRY(rank_gpu(c, &gpu));
    snprintf(name, sizeof name, "cuda:%d", gpu);
    TRY(dev_open_named(&m->dev, cuda ? name : device, 0, NULL));
    m->n = bytes / (int64_t)sizeof *m->x;
    m->cut = xcalloc((size_t)size + 1, sizeof *m->cut);
    m->at = xcalloc((size_t)size + 1, sizeof *m->at);
    for (int r = 0; r <= size; r++) {
        m->cut[r] = m->n * r / size / 64 * 64;
        if (r == size) m->cut[r] = m->n;
        m->at[r] = (size_t)m->cut[r] * sizeof *m->x;
    }
    TRY(collective_open(&m->group, &m->dev, c));
    TRY(dev_alloc(&m->dev, (size_t)bytes, &p));
    m->x = p;
    TRY(dev_zero(&m->dev, m->x, (size_t)bytes));
    TRY(dev_alloc(&m->dev, (size_t)bytes, &p));
    m->own = p;
    return collective_share(m->group, m->x, (size_t)bytes);
}

/* After a failure another rank may be anywhere: the process ends with the group. */
static void close_moves(struct moves *m) {
    collective_close(m->group);
    dev_free(&m->dev, m->x, (size_t)m->n * sizeof *m->x);
    dev_free(&m->dev, m->own, (size_t)m->n * sizeof *m->own);
    dev_close(&m->dev);
    free(m->cut);
    free(m->at);
}

int netcheck_devices(struct comm *c, const struct comm_call *call, struct ctl_result *out) {
    const char *device;
    int64_t bytes;
    double seconds, fold, gather;
    struct moves m = {0};
    TRY(json_str(call->args, "device", &device, call->name));
    TRY(json_i64(call->args, "bytes", &bytes, call->name));
    TRY(json_f64(call->args, "seconds", &seconds, call->name));
    if (bytes < 4096 || bytes > (int64_t)1 << 34) FAIL(ERR_INVAL, "%s: \"bytes\" is %lld", call->name, (long long)bytes);
    comm_stage(c, "devices, %lld bytes", (long long)bytes);
    int rc = open_moves(c, &m, device, bytes);
    if (rc == 0) rc = time_move(c, &m, fold_once, seconds, &fold);
    if (rc == 0) rc = time_move(c, &m, gather_once, seconds, &gather);
    if (rc == 0) rc = comm_barrier(c); /* peers may read this rank's memory until here */
    if (rc == 0)
        out->value = json_pack("{s:s, s:s, s:f, s:f}", "device", m.dev.describe, "way", collective_way(m.group), "fold", fold,
                               "all_gather", gather);
    close_moves(&m);
    return rc;
}
