/* measure.c - the ranks' side of `verlc netcheck`: one link, or one operation, a number of times.
 * Invariant: every rank makes the same operations, those that a link does not join with no bytes. */
#include "cmd/netcheck/netcheck.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/json.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_ROUNDS = 100000 };
#define MOST_BYTES ((int64_t)1 << 34)

const char *const netcheck_operations[] = {"barrier", "broadcast", "gather", "all_gather", "exchange", "call", "result"};

static int whole(const struct comm_call *call, const char *key, int64_t least, int64_t most, int64_t *out) {
    TRY(json_i64(call->args, key, out, call->name));
    if (*out < least || *out > most) FAIL(ERR_INVAL, "%s: \"%s\" is %lld", call->name, key, (long long)*out);
    return 0;
}

/* Written once, so that the system has given it memory. */
static int new_bytes(void **p, int64_t n) {
    *p = malloc((size_t)n + 1);
    if (!*p) FAIL(ERR_NOMEM, "no memory for %lld bytes", (long long)n);
    memset(*p, 1, (size_t)n + 1);
    return 0;
}

static int timed(struct comm *c, int64_t rounds, int (*once)(struct comm *c, void *arg), void *arg, struct ctl_result *out) {
    TRY(comm_barrier(c));
    const double start = clock_now();
    for (int64_t k = 0; k < rounds; k++) TRY(once(c, arg));
    TRY(comm_barrier(c));
    out->value = json_pack("{s:f}", "seconds", clock_now() - start);
    return 0;
}

struct pair {
    int a, b;
    bool back;
    size_t n;
    void *out, *in;
    struct comm_bytes *sends, *receives; /* [size], zeroed */
};

static int one_way(struct comm *c, struct pair *p, int from, int to) {
    const int me = comm_rank(c);
    if (me == from) p->sends[to] = (struct comm_bytes){p->out, p->n};
    if (me == to) p->receives[from] = (struct comm_bytes){p->in, p->n};
    const int rc = comm_exchange(c, p->sends, p->receives);
    p->sends[to] = p->receives[from] = (struct comm_bytes){0};
    TRY(rc);
    return 0;
}

static int pair_once(struct comm *c, void *arg) {
    struct pair *p = arg;
    TRY(one_way(c, p, p->a, p->b));
    if (p->back) TRY(one_way(c, p, p->b, p->a));
    return 0;
}

int netcheck_pair(struct comm *c, const struct comm_call *call, struct ctl_result *out) {
    const int size = comm_size(c);
    struct pair p = {0};
    int64_t a, b, n, rounds;
    int rc;
    TRY(whole(call, "a", 0, size - 1, &a));
    TRY(whole(call, "b", 0, size - 1, &b));
    TRY(whole(call, "bytes", 1, MOST_BYTES, &n));
    TRY(whole(call, "rounds", 1, MOST_ROUNDS, &rounds));
    TRY(json_bool(call->args, "back", &p.back, call->name));
    p.a = (int)a;
    p.b = (int)b;
    p.n = (size_t)n;
    p.sends = xcalloc((size_t)size, sizeof *p.sends);
    p.receives = xcalloc((size_t)size, sizeof *p.receives);
    if (comm_rank(c) == a || comm_rank(c) == b) {
        TRYG(new_bytes(&p.out, n), done);
        TRYG(new_bytes(&p.in, n), done);
    }
    comm_stage(c, "link %d - %d, %lld bytes", p.a, p.b, (long long)n);
    rc = timed(c, rounds, pair_once, &p, out);
done:
    free(p.out);
    free(p.in);
    free(p.sends);
    free(p.receives);
    return rc;
}

struct operation {
    const char *name;
    size_t n, *at; /* rank r's part: at[r] to at[r + 1] */
    uint8_t *out, *in;
    struct comm_bytes *sends, *receives;
};

static int operation_once(struct comm *c, void *arg) {
    struct operation *o = arg;
    if (strcmp(o->name, "barrier") == 0) return comm_barrier(c);
    if (strcmp(o->name, "broadcast") == 0) return comm_broadcast(c, 0, o->out, o->n);
    if (strcmp(o->name, "gather") == 0) return comm_gather(c, 0, o->out, comm_rank(c) == 0 ? o->in : NULL, o->at);
    if (strcmp(o->name, "all_gather") == 0) return comm_all_gather(c, o->in, o->at);
    return comm_exchange(c, o->sends, o->receives);
}

int netcheck_operation(struct comm *c, const struct comm_call *call, struct ctl_result *out) {
    const size_t size = (size_t)comm_size(c);
    struct operation o = {0};
    void *sent = NULL, *got = NULL;
    int64_t n, rounds;
    int rc;
    TRY(json_str(call->args, "operation", &o.name, call->name));
    TRY(whole(call, "bytes", 0, MOST_BYTES, &n));
    TRY(whole(call, "rounds", 1, MOST_ROUNDS, &rounds));
    o.n = (size_t)n / size * size; /* as many bytes for each */
    o.at = xcalloc(size + 1, sizeof *o.at);
    o.sends = xcalloc(size, sizeof *o.sends);
    o.receives = xcalloc(size, sizeof *o.receives);
    TRYG(new_bytes(&sent, n), done);
    TRYG(new_bytes(&got, n), done);
    o.out = sent;
    o.in = got;
    for (size_t r = 0; r < size; r++) {
        o.at[r + 1] = o.at[r] + o.n / size;
        o.sends[r] = (struct comm_bytes){o.out + o.at[r], o.n / size};
        o.receives[r] = (struct comm_bytes){o.in + o.at[r], o.n / size};
    }
    comm_stage(c, "%s, %lld bytes", o.name, (long long)n);
    rc = timed(c, rounds, operation_once, &o, out);
done:
    free(sent);
    free(got);
    free(o.at);
    free(o.sends);
    free(o.receives);
    return rc;
}

int netcheck_call(struct comm *c, const struct comm_call *call, struct ctl_result *out) {
    int64_t n, seen = 0;
    void *p;
    (void)c;
    TRY(whole(call, "bytes", 0, MOST_BYTES, &n));
    for (int i = 0; i < call->n_arrays; i++)
        for (size_t k = 0; k < call->arrays[i].n; k += 64) seen += ((const uint8_t *)call->arrays[i].p)[k];
    out->value = json_pack("{s:I}", "seen", (json_int_t)seen);
    if (n == 0) return 0;
    TRY(new_bytes(&p, n));
    out->arrays = xcalloc(1, sizeof *out->arrays);
    out->arrays[0] = (struct comm_bytes){p, (size_t)n};
    out->n_arrays = 1;
    return 0;
}
