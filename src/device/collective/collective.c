/* collective.c - a group of ranks: opening, shared memory, checks; which way the bytes go.
 *
 * The way is decided once, when the group is opened, and is the same on all ranks: peers' memory where every rank of it can be
 * read by every other one, else NCCL where every rank has it, else host memory. VERLC_GROUP of rank 0 asks for one. */
#include "device/collective/collective_int.h"

#include "base/buf.h"
#include "base/log.h"
#include "base/encoding/utf8.h"
#include "device/collective/peers.h"
#include "device/collective/transport.h"
#include "device/device_int.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int collective_rank(const struct collective *g) { return g->rank; }
int collective_size(const struct collective *g) { return g->size; }
struct comm *collective_comm(struct collective *g) {
    return g->comm;
}

const char *collective_way(const struct collective *g) { return g->way; }

size_t collective_bytes(const struct dev *d, int size, int local) {
    if (size < 2) return 0;
    const size_t host = collective_host_bytes(d, size);
    size_t most = 0;
    const char *const asked = getenv("VERLC_GROUP"); /* of rank 0, and mostly of all */
    const bool near = local >= size && !(asked && strcmp(asked, "nccl") == 0);
    if (!near && d->ops->nccl) most = d->ops->nccl->bytes(size);
    if (near && d->ops->peers) most = d->ops->peers->bytes();
    return most > host ? most : host;
}

/* all: `each` bytes of every rank; this one's are there. */
static int gather(struct collective *g, void *all, size_t each) {
    size_t at[COMM_MOST_RANKS + 1];
    for (int r = 0; r <= g->size; r++) at[r] = (size_t)r * each;
    return comm_all_gather(g->comm, all, at);
}

/* ---- opening ---- */

/* What a rank tells the others at a step of the opening: whether it has failed there, and why. */
struct step {
    int32_t failed, nccl; /* nccl: the library's version */
    char why[400];
    struct dev_peer_memory flags;
    unsigned char id[DEV_NCCL_ID]; /* rank 0's */
    char gpu[sizeof((struct dev *)0)->id];
};

/* *whole: no rank has failed at this step. why: the first that has, appended. */
static int agree(struct collective *g, struct step *all, int rc, bool *whole, struct buf *why) {
    struct step *const mine = &all[g->rank];
    mine->failed = rc < 0;
    if (rc < 0) snprintf(mine->why, sizeof mine->why, "%.*s", (int)utf8_cut(err_msg(), sizeof mine->why - 1), err_msg());
    TRY(gather(g, all, sizeof *all));
    *whole = true;
    for (int r = 0; r < g->size && *whole; r++) {
        *whole = !all[r].failed;
        if (!*whole)
            buf_addf(why, "%s%s: %.*s", why->n ? "; " : "", comm_who(g->comm, r), (int)strnlen(all[r].why, sizeof all[r].why),
                     all[r].why);
    }
    return 0;
}

static int open_peers(struct collective *g, struct dev_peer_memory *flags) {
    if (!g->d->ops->peers) FAIL(ERR_UNSUPPORTED, "memory of the %s backend is read by no other process", g->d->ops->name);
    for (int r = 0; r < g->size; r++)
        if (r != g->rank && !comm_same_host(g->comm, r)) FAIL(ERR_UNSUPPORTED, "%s is on another host", comm_who(g->comm, r));
    return g->d->ops->peers->open(g->d, g->rank, g->size, &g->peers, flags);
}

static int map_flags(struct collective *g, const struct step *all) {
    for (int r = 0; r < g->size; r++)
        if (r != g->rank) TRY(g->d->ops->peers->flags(g->peers, r, &all[r].flags));
    return 0;
}

static void close_peers(struct collective *g) {
    if (g->peers) g->d->ops->peers->close(g->peers);
    g->peers = NULL;
}

static void close_transport(struct collective *g) {
    if (g->t) g->move->close(g->t);
    g->t = NULL;
}

enum way { ANY, PEERS, NCCL, HOST, PEERS_GRAPH };
static const char *const names[] = {"", "peers", "nccl", "host", "peers_graph"};

static bool a_gpu_each(const struct step *all, int size) {
    for (int r = 0; r < size; r++)
        for (int i = 0; i <= r; i++)
            if (i < r ? strcmp(all[i].gpu, all[r].gpu) == 0 : !all[r].gpu[0]) return false;
    return true;
}

/* Leaves g->peers NULL on all ranks where one of them cannot. CUDA graphs have gathers where ranks have a GPU each, or where that
 * is asked for: a kernel that waits keeps the other ranks of a GPU that is shared from their turn. */
static int try_peers(struct collective *g, enum way asked, struct step *all, struct buf *why) {
    bool whole = false, graphs = asked == PEERS_GRAPH;
    int rc = agree(g, all, open_peers(g, &all[g->rank].flags), &whole, why);
    if (rc >= 0 && whole) rc = agree(g, all, map_flags(g, all), &whole, why);
    if (rc >= 0 && whole) rc = agree(g, all, g->d->ops->peers->greeted(g->peers), &whole, why);
    if (asked == ANY && rc >= 0 && whole) graphs = a_gpu_each(all, g->size); /* agree() gathered their names */
    graphs = graphs && g->size <= DEV_MOST_COLUMNS;
    if (rc >= 0 && whole && graphs) rc = agree(g, all, g->d->ops->peers->graphs(g->peers, comm_deadline_s(g->comm)), &whole, why);
    if (rc < 0 || !whole) close_peers(g);
    g->graphs = graphs && g->peers;
    snprintf(g->way, sizeof g->way, "peers' memory%s", graphs ? ", gathers in CUDA graphs" : "");
    return rc;
}

static int find_nccl(struct collective *g, int32_t *version) {
    int found = 0;
    if (!g->d->ops->nccl) FAIL(ERR_UNSUPPORTED, "the %s backend has no NCCL", g->d->ops->name);
    TRY(g->d->ops->nccl->version(g->d, &found));
    *version = found;
    return 0;
}

/* One version on all ranks: what two of them do with each other nobody has tried. */
static int open_nccl(struct collective *g, const struct step *all) {
    const struct dev_nccl_args a = {.rank = g->rank, .size = g->size, .id = all[0].id, .deadline_s = comm_deadline_s(g->comm)};
    for (int r = 0; r < g->size; r++)
        if (all[r].nccl != all[g->rank].nccl)
            FAIL(ERR_UNSUPPORTED, "its NCCL is version %d, that of %s %d", (int)all[g->rank].nccl, comm_who(g->comm, r),
                 (int)all[r].nccl);
    g->move = &g->d->ops->nccl->transport;
    return g->d->ops->nccl->open(g->d, &a, &g->t);
}

/* Leaves g->t NULL on all ranks where one of them cannot. */
static int try_nccl(struct collective *g, struct step *all, struct buf *why) {
    struct step *const mine = &all[g->rank];
    bool whole = false;
    int rc = agree(g, all, find_nccl(g, &mine->nccl), &whole, why);
    if (rc >= 0 && whole) rc = agree(g, all, g->rank == 0 ? g->d->ops->nccl->id(g->d, mine->id) : 0, &whole, why);
    if (rc >= 0 && whole) rc = agree(g, all, open_nccl(g, all), &whole, why);
    if (rc < 0 || !whole) close_transport(g);
    snprintf(g->way, sizeof g->way, "NCCL %d.%d.%d", mine->nccl / 10000, mine->nccl / 100 % 100, mine->nccl % 100);
    return rc;
}

/* Rank 0's VERLC_GROUP, on all ranks. */
static int way_asked(struct collective *g, enum way *way) {
    const char *env = g->rank == 0 ? getenv("VERLC_GROUP") : NULL;
    char name[16] = "";
    snprintf(name, sizeof name, "%s", env ? env : "");
    TRY(comm_broadcast(g->comm, 0, name, sizeof name));
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(name, names[i]) == 0) {
            *way = (enum way)i;
            return 0;
        }
    FAIL(ERR_INVAL, "VERLC_GROUP=%s: expected peers, nccl, host or peers_graph", name);
}

static int open_way(struct collective *g, enum way asked, struct step *all, struct buf *why) {
    const bool peers = asked == PEERS || asked == PEERS_GRAPH || (asked == ANY && g->d->ops->peers);
    const bool nccl = asked == NCCL || (asked == ANY && g->d->ops->nccl);
    if (peers) TRY(try_peers(g, asked, all, why));
    if (nccl && !g->peers) TRY(try_nccl(g, all, why));
    if (g->peers || g->t) return 0;
    if (asked == PEERS || asked == PEERS_GRAPH || asked == NCCL)
        FAIL(ERR_UNSUPPORTED, "VERLC_GROUP=%s is not possible here: %s", names[asked], why->p);
    snprintf(g->way, sizeof g->way, "the host");
    g->move = &collective_host;
    return collective_host_open(g->d, g->comm, &g->t);
}

static int choose_way(struct collective *g) {
    struct step *all = xcalloc((size_t)g->size, sizeof *all);
    struct buf why = {0};
    enum way asked = HOST;
    int rc = 0;
    snprintf(all[g->rank].gpu, sizeof all->gpu, "%s", g->d->id);
    if (g->size > 1) TRYG(way_asked(g, &asked), out);
    TRYG(open_way(g, asked, all, &why), out);
    if (g->rank == 0 && g->size > 1 && (g->d->ops->peers || g->d->ops->nccl))
        log_info("devices of this group exchange memory through %s%s%s", g->way,
                 asked != ANY ? ", as VERLC_GROUP says"
                 : why.n      ? ": "
                              : "",
                 why.n ? why.p : "");
out:
    buf_free(&why);
    free(all);
    return rc;
}

int collective_open(struct collective **out, struct dev *d, struct comm *c) {
    struct collective *g = xcalloc(1, sizeof *g);
    *g = (struct collective){.d = d, .comm = c, .rank = comm_rank(c), .size = comm_size(c)};
    *out = NULL;
    const int rc = choose_way(g);
    if (rc < 0) {
        collective_close(g);
        return rc;
    }
    *out = g;
    return 0;
}

void collective_close(struct collective *g) {
    if (!g) return;
    close_peers(g);
    close_transport(g);
    for (int i = 0; i < g->n_shared; i++) free(g->shared[i].at);
    free(g->shared);
    free(g);
}

/* ---- shared memory ---- */

struct offer {
    uint64_t bytes;
    struct dev_peer_memory memory;
};

static int map_offers(struct collective *g, const struct offer *all, void *p, size_t bytes, void **at) {
    for (int r = 0; r < g->size; r++)
        if (all[r].bytes != bytes)
            FAIL(ERR_RANK, "%s shares %llu bytes where rank %d shares %zu", comm_who(g->comm, r), (unsigned long long)all[r].bytes,
                 g->rank, bytes);
    for (int r = 0; r < g->size; r++) {
        at[r] = p;
        if (g->peers && r != g->rank) TRY(g->d->ops->peers->map(g->peers, &all[r].memory, &at[r]));
    }
    return 0;
}

int collective_share(struct collective *g, void *p, size_t bytes) {
    struct offer *all = xcalloc((size_t)g->size, sizeof *all);
    void **at = xcalloc((size_t)g->size, sizeof *at);
    int rc = 0;
    all[g->rank].bytes = bytes;
    if (g->peers) TRYG(g->d->ops->peers->share(g->peers, p, bytes, &all[g->rank].memory), out);
    TRYG(gather(g, all, sizeof *all), out);
    TRYG(map_offers(g, all, p, bytes, at), out);
    g->shared = xrealloc(g->shared, (size_t)(g->n_shared + 1) * sizeof *g->shared);
    g->shared[g->n_shared].p = p;
    g->shared[g->n_shared].bytes = bytes;
    g->shared[g->n_shared++].at = at;
    at = NULL;
out:
    free(at);
    free(all);
    return rc;
}

/* p (bytes) lies in shared memory; at (size): where it is of each rank, with peers. */
static int find_shared(const struct collective *g, const char *what, const void *p, size_t bytes, const void **at) {
    const char *const from = p;
    for (int i = 0; i < g->n_shared; i++) {
        const char *const lo = g->shared[i].p;
        if (from < lo || bytes > g->shared[i].bytes || (size_t)(from - lo) > g->shared[i].bytes - bytes) continue;
        for (int r = 0; r < g->size; r++) at[r] = (const char *)g->shared[i].at[r] + (from - lo);
        return 0;
    }
    FAIL(ERR_INVAL, "dev group: %s (%zu bytes) is not in memory that the ranks share", what, bytes);
}

/* ---- operations ---- */

static int check_bucket(const struct collective *g, const struct dev_bucket *b) {
    const int64_t n = b->cut[g->size];
    for (int r = 0; r < g->size; r++)
        if (b->cut[r] < 0 || b->cut[r] > b->cut[r + 1]) FAIL(ERR_INVAL, "dev group: a bucket whose cuts do not ascend");
    if (b->n < 1 || b->n > g->size) FAIL(ERR_INVAL, "dev group: a bucket of %d ranks in a group of %d", b->n, g->size);
    for (int r = 0; b->times && r < b->n; r++)
        if (b->times[r] < 1 || b->times[r] > DEV_BUCKET_TIMES || b->stride < n || b->stride % 64)
            FAIL(ERR_INVAL, "dev group: a bucket with %d summands of a rank, each %lld elements on", b->times[r],
                 (long long)b->stride);
    if (!b->x && !b->ids) FAIL(ERR_INVAL, "dev group: a bucket without summands");
    if (!b->own && b->cut[g->rank] < b->cut[g->rank + 1]) FAIL(ERR_INVAL, "dev group: a bucket without memory for its sum");
    if (b->ids && (!b->dx || b->width < 1 || n % b->width))
        FAIL(ERR_INVAL, "dev group: a bucket of %lld elements is no table with rows of %lld", (long long)n, (long long)b->width);
    return 0;
}

/* Its event in a trace begins. */
static void trace(struct collective *g, const char *op, size_t bytes, int ranks) {
    const int64_t stamp = dev_trace__exchange_open(g->d, op, (int64_t)bytes, ranks, g->peers != NULL);
    if (g->peers && stamp >= 0) g->d->ops->peers->stamp(g->peers, stamp);
}

/* From the first summand of this rank to the end of its last one. */
static size_t summand_bytes(const struct collective *g, const struct dev_bucket *b) {
    const int64_t more = b->times && g->rank < b->n ? b->times[g->rank] - 1 : 0;
    return (size_t)(more * b->stride + b->cut[g->size]) * sizeof(float);
}

/* Of the bucket, and of all ranks' rows. */
static size_t bucket_bytes(const struct collective *g, const struct dev_bucket *b) {
    size_t sum = b->x ? (size_t)b->cut[g->size] * sizeof(float) : 0;
    for (int r = 0; b->ids && r < b->n; r++) sum += (size_t)b->n_rows[r] * (sizeof *b->ids + (size_t)b->width * sizeof(float));
    return sum;
}

int collective_fold(struct collective *g, const struct dev_bucket *b, int64_t *ticket) {
    const void *x[COMM_MOST_RANKS], *ids[COMM_MOST_RANKS], *dx[COMM_MOST_RANKS];
    TRY(check_bucket(g, b));
    const size_t rows = b->ids && g->rank < b->n ? (size_t)b->n_rows[g->rank] : 0;
    if (b->x) TRY(find_shared(g, "the summand", b->x, summand_bytes(g, b), x));
    if (b->ids) TRY(find_shared(g, "the ids", b->ids, rows * sizeof *b->ids, ids));
    if (b->ids) TRY(find_shared(g, "the rows", b->dx, rows * (size_t)b->width * sizeof(float), dx));
    *ticket = ++g->ticket;
    trace(g, "fold", bucket_bytes(g, b), b->n);
    const int rc = g->peers ? g->d->ops->peers->fold(g->peers, b, b->x ? x : NULL, b->ids ? ids : NULL, b->ids ? dx : NULL)
                            : collective_staged_fold(g, b);
    return dev_trace__exchange_close(g->d, rc);
}

int collective_reuse(struct collective *g, int64_t ticket) {
    if (ticket < 0 || ticket > g->ticket) FAIL(ERR_INVAL, "dev group: there is no fold or gather %lld", (long long)ticket);
    if (ticket == 0) return 0;
    return g->peers ? g->d->ops->peers->reuse(g->peers, ticket) : g->move->reuse(g->t, ticket);
}

int collective_join(struct collective *g) { return g->peers ? g->d->ops->peers->join(g->peers) : g->move->join(g->t); }

/* The ranges of an all-gather: where each rank's memory is, and how many bytes there are. */
static int check_gather(struct collective *g, void *whole, const size_t *at, int64_t n_parts, const void **of, size_t *bytes) {
    size_t end = 0;
    *bytes = 0;
    for (int64_t i = 0; i < n_parts * (g->size + 1); i++) {
        if (i % (g->size + 1) && at[i] < at[i - 1])
            FAIL(ERR_INVAL, "dev group: a part of an all-gather whose ranges do not ascend");
        if (at[i] > end) end = at[i];
        if (i % (g->size + 1)) *bytes += at[i] - at[i - 1];
    }
    return find_shared(g, "what is gathered", whole, end, of);
}

int collective_gather_begin(struct collective *g, void *whole, const size_t *at, int64_t n_parts, int64_t *ticket) {
    const void *of[COMM_MOST_RANKS];
    size_t bytes;
    TRY(check_gather(g, whole, at, n_parts, of, &bytes));
    *ticket = ++g->ticket;
    trace(g, "all_gather", bytes, g->size);
    const int rc =
        g->peers ? g->d->ops->peers->gather(g->peers, (void *const *)of, at, n_parts) : g->move->gather(g->t, whole, at, n_parts);
    return dev_trace__exchange_close(g->d, rc);
}

int collective_gather_end(struct collective *g) {
    return g->peers ? g->d->ops->peers->gathered(g->peers) : g->move->gathered(g->t);
}

int collective_all_gather(struct collective *g, void *whole, const size_t *at, int64_t n_parts) {
    int64_t ticket;
    TRY(collective_gather_begin(g, whole, at, n_parts, &ticket));
    TRY(collective_gather_end(g));
    return collective_reuse(g, ticket);
}

static int peers_exchange(struct collective *g, const struct dev_exchange *x, const void *const *from) {
    size_t at[COMM_MOST_RANKS + 1];
    void *of[COMM_MOST_RANKS];
    collective_exchange_places(g->rank, g->size, x, from, of, at);
    TRY(g->d->ops->peers->gather(g->peers, of, at, 1));
    return g->d->ops->peers->gathered(g->peers);
}

int collective_exchange(struct collective *g, const struct dev_exchange *x) {
    const void *from[COMM_MOST_RANKS];
    size_t end = 0, all = 0, own = 0;
    for (int i = 0; i < g->size * g->size; i++) {
        if (x->bytes[i] && x->at[i] + x->bytes[i] > end) end = x->at[i] + x->bytes[i];
        all += x->bytes[i];
    }
    if (all == 0) return 0;
    TRY(find_shared(g, "what is exchanged", x->from, end, from));
    for (int r = 0; r < g->rank; r++) own += x->bytes[r * g->size + g->rank];
    const int self = g->rank * g->size + g->rank;
    if (x->bytes[self]) TRY(dev_copy(g->d, (char *)x->to + own, (const char *)x->from + x->at[self], x->bytes[self]));
    const int64_t ticket = ++g->ticket;
    trace(g, "exchange", all, g->size);
    TRY(dev_trace__exchange_close(g->d, g->peers ? peers_exchange(g, x, from) : collective_staged_exchange(g, x)));
    return collective_reuse(g, ticket);
}

bool collective_has_graphs(const struct collective *g) { return g->graphs; }

int collective_on_time(const struct collective *g) {
    const int lost = g->graphs ? g->d->ops->peers->lost(g->peers) : -1;
    if (lost == g->size) FAIL(ERR_RANK, "an all-gather of %d ranks has failed before: a group of this device was closed", g->size);
    if (lost >= 0) FAIL(ERR_TIMEOUT, "all-gather: no answer from %s before the deadline", comm_who(g->comm, lost));
    return 0;
}

int collective_gather_columns(struct collective *g, const struct join_columns_args *a) {
    CHECK(g->graphs && a->n == g->size);
    TRY(collective_on_time(g));
    TRY(dev__check_join_columns(a));
    if (tensor_count(a->y) == 0) return 0;
    dev_trace__open(g->d, "gather_columns", a->y.dim[0], a->y.dim[1], 0);
    return dev_trace__close(g->d, g->d->ops->peers->gather_columns(g->peers, a));
}
