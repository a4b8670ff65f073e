/* nccl.cu - the transport by NCCL, for GPUs of other hosts and those whose memory no peer can read. Bytes are sent and received;
 * NCCL adds nothing.
 *
 * Two streams besides the compute stream. `wire` makes the sums of rows that are sent, sends and receives; `fold` adds up what has
 * come. A piece is received into one half of the slots while the other one is added up. What a rank sends is its own again when its
 * own `wire` has sent it: it waits for no word of the others.
 *
 * NCCL does not notice a rank that has ended. So its calls return at once, and are asked for their end until a deadline; what is
 * queued on the device and waits for such a rank ends when this communicator is aborted, in close.
 * Invariant: all ranks queue the same operations in the same order, and the first one that is not done anywhere waits for nothing
 * behind it. So whoever is behind can always go on. */
#include "device/cuda/context.cuh"

#include "base/clock.h"
#include "base/log.h"
#include "device/collective/transport.h"
#include "device/cuda/collective/nccl_open.cuh"

#include <sched.h>
#include <stdlib.h>
#include <time.h>

enum { TICKETS = 64 };            /* operations whose ends have an event each */
enum { GREETING = 256 };          /* bytes that each sends to each when the group is opened */
static const double open_s = 120; /* for all ranks to be connected, at most */

/* Memory that grows, if ever, at the first folds of rows. */
struct grown {
    void *p;
    size_t bytes;
};
/* Ids of a fold: on their way they are in pinned memory. */
struct sent_ids {
    void *host;
    struct grown dev;
    cudaEvent_t used;
};

struct nccl {
    struct cuda *c;
    const struct cuda_nccl *lib;
    int rank, size;
    double deadline_s;
    nccl_comm comm;
    struct nccl *next; /* of the GPU's list */
    size_t own;        /* bytes that NCCL itself took, in c->held */
    int64_t ticket;    /* of the last operation */
    cudaStream_t wire, fold;
    cudaEvent_t queued;         /* the end of the compute stream when an operation was asked for */
    cudaEvent_t arrived;        /* what the last exchange received */
    cudaEvent_t used[2];        /* a half of the slots */
    cudaEvent_t gathered, done; /* the last all-gather; all of `fold` */
    cudaEvent_t ended[TICKETS]; /* an operation, by its ticket */
    char *staging;
    int half;              /* of the piece at hand */
    struct grown table[2]; /* of ids, for the kernel of rows: on `wire`, on `fold` */
    struct sent_ids ids[2];
    int at_ids, next_ids;      /* at: those of the operation at hand; -1: none */
    struct dev_part *greeting; /* (2 size) */
};

/* ---- calls of NCCL ---- */

static int failed(const struct nccl *n, int rc, const char *what) {
    const bool other = rc == 2 || rc == 6; /* ncclSystemError, ncclRemoteError */
    const char *more = n->lib->GetLastError(n->comm);
    FAIL(other ? ERR_RANK : ERR_DEVICE, "NCCL: nccl%s failed: %s%s%s", what, n->lib->GetErrorString(rc), more && *more ? ": " : "",
         more ? more : "");
}

/* A call of NCCL; what goes on in the background is asked for later. */
#define NCCL_TRY(n, name, args)                                                                     \
    do {                                                                                            \
        const int nccl_rc_ = (n)->lib->name args;                                                   \
        if (nccl_rc_ != NCCL_OK && nccl_rc_ != NCCL_IN_PROGRESS) return failed(n, nccl_rc_, #name); \
    } while (0)

/* Short waits are the rule, so it yields at first. */
static void rest(double waited) {
    const struct timespec nap = {0, 100000};
    if (waited < 0.001) sched_yield();
    else nanosleep(&nap, NULL);
}

/* Until what was called last is done, as far as the host has to do with it. */
static int settle(const struct nccl *n, const char *what, double within) {
    const double start = clock_awake();
    for (;;) {
        int state = NCCL_OK;
        const int rc = n->lib->CommGetAsyncError(n->comm, &state);
        const double waited = clock_awake() - start;
        if (rc != NCCL_OK || (state != NCCL_OK && state != NCCL_IN_PROGRESS)) return failed(n, rc != NCCL_OK ? rc : state, what);
        if (state == NCCL_OK) return 0;
        if (waited > within) FAIL(ERR_TIMEOUT, "NCCL: nccl%s has not ended after %.0f s", what, waited);
        rest(waited);
    }
}

static int peer_of(const struct nccl *n, int distance) { return (n->rank + distance + n->size) % n->size; }

/* `wire` has moved what is queued next between two of these. */
static int group_start(const struct nccl *n) {
    NCCL_TRY(n, GroupStart, ());
    return 0;
}
/* rc: of what was queued. A group ends after an error too: within one nothing is done, not even an abort. */
static int group_end(const struct nccl *n, int rc) {
    struct err_saved e;
    if (rc < 0) {
        err_save(&e);
        (void)n->lib->GroupEnd();
        err_restore(&e);
        return rc;
    }
    NCCL_TRY(n, GroupEnd, ());
    return settle(n, "GroupEnd", n->deadline_s);
}
static int send(const struct nccl *n, const void *p, size_t bytes, int to) {
    if (bytes) NCCL_TRY(n, Send, (p, bytes, NCCL_BYTE, to, n->comm, n->wire));
    return 0;
}
static int receive(const struct nccl *n, void *p, size_t bytes, int from) {
    if (bytes) NCCL_TRY(n, Recv, (p, bytes, NCCL_BYTE, from, n->comm, n->wire));
    return 0;
}

/* ---- an operation ---- */

static int nccl_begin(void *t) {
    struct nccl *n = (struct nccl *)t;
    n->ticket++;
    n->at_ids = -1;
    CU_TRY(cudaEventRecord(n->queued, n->c->stream));
    CU_TRY(cudaStreamWaitEvent(n->wire, n->queued, 0));
    return 0;
}

/* `fold` goes on when `wire` has come so far. */
static int meet(struct nccl *n) {
    CU_TRY(cudaEventRecord(n->arrived, n->wire));
    CU_TRY(cudaStreamWaitEvent(n->fold, n->arrived, 0));
    return 0;
}

static int nccl_end(void *t) {
    struct nccl *n = (struct nccl *)t;
    TRY(meet(n)); /* what is sent has been read, too */
    CU_TRY(cudaEventRecord(n->ended[n->ticket % TICKETS], n->fold));
    if (n->at_ids >= 0) CU_TRY(cudaEventRecord(n->ids[n->at_ids].used, n->fold));
    return 0;
}

/* Of those whose ends have no event any more the compute stream waits for the oldest that is. */
static int nccl_reuse(void *t, int64_t ticket) {
    struct nccl *n = (struct nccl *)t;
    if (ticket <= n->ticket - TICKETS) ticket = n->ticket - TICKETS + 1;
    CU_TRY(cudaStreamWaitEvent(n->c->stream, n->ended[ticket % TICKETS], 0));
    return 0;
}

static int nccl_join(void *t) {
    struct nccl *n = (struct nccl *)t;
    CU_TRY(cudaEventRecord(n->done, n->fold));
    CU_TRY(cudaStreamWaitEvent(n->c->stream, n->done, 0));
    return 0;
}

/* The half that was filled before this one is free once it has been added up, which is on `fold` by now. */
static int nccl_turn(void *t, struct dev_slots *s) {
    struct nccl *n = (struct nccl *)t;
    const size_t slot = cuda_nccl_slot(n->size), half = (size_t)(n->size - 1) * slot;
    CU_TRY(cudaEventRecord(n->used[n->half], n->fold));
    n->half ^= 1;
    CU_TRY(cudaStreamWaitEvent(n->wire, n->used[n->half], 0));
    s->in = n->staging + (size_t)n->half * half;
    s->out = n->staging + 2 * half;
    s->bytes = slot;
    return 0;
}

/* ---- rows ---- */

static int hold(struct nccl *n, struct grown *g, size_t bytes, size_t least, cudaStream_t user) {
    if (g->p && bytes <= g->bytes) return 0;
    CU_TRY(cudaStreamSynchronize(user));
    TRY(cuda_drop(n->c, g->p, g->bytes));
    g->p = NULL;
    g->bytes = bytes > least ? bytes : least;
    return cuda_hold(n->c, g->bytes, &g->p);
}

/* Where ids are sent from: on the device and, pinned, on the host. */
static int hold_ids(struct nccl *n, struct sent_ids *s, size_t bytes) {
    if (s->dev.p && bytes <= s->dev.bytes) return 0;
    CU_TRY(cudaFreeHost(s->host));
    s->host = NULL;
    TRY(hold(n, &s->dev, bytes, CUDA_NCCL_IDS, n->fold));
    CU_TRY(cudaHostAlloc(&s->host, s->dev.bytes, cudaHostAllocDefault));
    return 0;
}

/* What folds of rows take, from the start; longer ones let it grow. */
static int hold_rows(struct nccl *n) {
    for (struct sent_ids &s : n->ids) TRY(hold_ids(n, &s, CUDA_NCCL_IDS));
    for (struct grown &t : n->table) TRY(hold(n, &t, CUDA_NCCL_TABLE, CUDA_NCCL_TABLE, n->wire));
    return 0;
}

static int nccl_ids(void *t, const int32_t *ids, int64_t count, const int32_t **on_device) {
    struct nccl *n = (struct nccl *)t;
    const size_t bytes = (size_t)count * sizeof *ids;
    n->at_ids = n->next_ids;
    n->next_ids ^= 1;
    struct sent_ids *s = &n->ids[n->at_ids];
    CU_TRY(cudaEventSynchronize(s->used)); /* by the fold of rows before the last one */
    TRY(hold_ids(n, s, bytes));
    memcpy(s->host, ids, bytes);
    CU_TRY(cudaMemcpyAsync(s->dev.p, s->host, bytes, cudaMemcpyHostToDevice, n->wire));
    *on_device = (const int32_t *)s->dev.p;
    return 0;
}

static int embed_bwd(struct nccl *n, bool on_fold, struct cuda_embed_bwd_args a) {
    cudaStream_t const s = on_fold ? n->fold : n->wire;
    TRY(hold(n, &n->table[on_fold], cuda_embed_bwd_table(a.lo, a.dw.dim[0], a.dx.dim[1]), CUDA_NCCL_TABLE, s));
    return cuda_embed_bwd_on(s, n->table[on_fold].p, &a);
}

static int nccl_sum_rows(void *t, struct tensor y, int64_t lo, int64_t vocab, struct tensor ids, struct tensor dx) {
    struct nccl *n = (struct nccl *)t;
    CU_TRY(cudaMemsetAsync(y.data, 0, (size_t)y.dim[0] * sizeof(float), n->wire));
    return embed_bwd(n, false, {y, lo, vocab, ids, dx});
}

static int nccl_add_rows(void *t, struct tensor y, int64_t lo, int64_t vocab, struct tensor ids, struct tensor dx) {
    return embed_bwd((struct nccl *)t, true, {y, lo, vocab, ids, dx});
}

/* ---- pieces ---- */

static int queue_parts(const struct nccl *n, const struct dev_part *out, const struct dev_part *in) {
    for (int i = 1; i < n->size; i++) { /* the ranks begin with different ones */
        const int to = peer_of(n, i), from = peer_of(n, -i);
        TRY(send(n, out[to].p, out[to].n, to));
        TRY(receive(n, in[from].p, in[from].n, from));
    }
    return 0;
}
static int move_parts(const struct nccl *n, const struct dev_part *out, const struct dev_part *in) {
    TRY(group_start(n));
    return group_end(n, queue_parts(n, out, in));
}

static int nccl_exchange(void *t, const struct dev_part *out, const struct dev_part *in) {
    struct nccl *n = (struct nccl *)t;
    bool any = false;
    for (int r = 0; r < n->size; r++) any |= r != n->rank && (out[r].n || in[r].n);
    if (any) TRY(move_parts(n, out, in));
    return meet(n);
}

static int nccl_zero(void *t, void *p, size_t bytes) {
    CU_TRY(cudaMemsetAsync(p, 0, bytes, ((struct nccl *)t)->fold));
    return 0;
}
static int nccl_fold(void *t, struct tensor y, const struct tensor *x, int count, bool add) {
    return cuda_fold_on(((struct nccl *)t)->fold, y, x, count, add);
}

/* From where they are to where they go; of a pair of ranks part by part, in the same order on both. */
static int tell_gather(const struct nccl *n, char *whole, const size_t *at, int64_t n_parts) {
    for (int i = 1; i < n->size; i++) {
        const int to = peer_of(n, i), from = peer_of(n, -i);
        for (int64_t k = 0; k < n_parts; k++) {
            const size_t *const part = at + k * (n->size + 1);
            TRY(send(n, whole + part[n->rank], part[n->rank + 1] - part[n->rank], to));
            TRY(receive(n, whole + part[from], part[from + 1] - part[from], from));
        }
    }
    return 0;
}
static int gather_parts(const struct nccl *n, char *whole, const size_t *at, int64_t n_parts) {
    TRY(group_start(n));
    return group_end(n, tell_gather(n, whole, at, n_parts));
}

static int nccl_gather(void *t, void *whole, const size_t *at, int64_t n_parts) {
    struct nccl *n = (struct nccl *)t;
    size_t bytes = 0;
    for (int64_t k = 0; k < n_parts; k++) bytes += at[k * (n->size + 1) + n->size] - at[k * (n->size + 1)];
    TRY(nccl_begin(n));
    if (bytes) TRY(gather_parts(n, (char *)whole, at, n_parts));
    CU_TRY(cudaEventRecord(n->gathered, n->wire));
    return nccl_end(n);
}

static int nccl_gathered(void *t) {
    struct nccl *n = (struct nccl *)t;
    CU_TRY(cudaStreamWaitEvent(n->c->stream, n->gathered, 0));
    return 0;
}

/* ---- closing ---- */

static bool is_idle(const struct cuda *c) {
    bool idle = cudaStreamQuery(c->stream) == cudaSuccess;
    for (const struct nccl *n = c->nccl; n; n = n->next)
        for (cudaStream_t s : {n->wire, n->fold}) idle = idle && (!s || cudaStreamQuery(s) == cudaSuccess);
    cudaGetLastError(); /* cudaErrorNotReady */
    return idle;
}

static void abort_comm(struct nccl *n) {
    if (n->comm) (void)n->lib->CommAbort(n->comm);
    n->comm = NULL;
}

/* What waits for another rank comes to its end: in this group, and where something is queued, in all of this GPU, since memory is
 * freed when all streams have come to theirs. Within NCCL's group all are queued before one of them frees its own. */
static void abort_waits(struct nccl *n) {
    const bool all = n->comm && n->c->nccl->next && !is_idle(n->c) && n->lib->GroupStart() == NCCL_OK;
    abort_comm(n);
    for (struct nccl *other = n->c->nccl; all && other; other = other->next) abort_comm(other);
    if (all) (void)n->lib->GroupEnd();
}

static void leave_list(struct nccl *n) {
    struct nccl **at = &n->c->nccl;
    while (*at != n) at = &(*at)->next;
    *at = n->next;
}

static void nccl_close(void *t) {
    struct nccl *n = (struct nccl *)t;
    cudaEvent_t const events[] = {n->queued,   n->arrived, n->used[0],     n->used[1],
                                  n->gathered, n->done,    n->ids[0].used, n->ids[1].used};
    struct err_saved e;
    err_save(&e);
    abort_waits(n);
    for (cudaStream_t s : {n->wire, n->fold})
        if (s) (void)cudaStreamSynchronize(s);
    for (cudaEvent_t event : events)
        if (event) cudaEventDestroy(event);
    for (cudaEvent_t event : n->ended)
        if (event) cudaEventDestroy(event);
    for (cudaStream_t s : {n->wire, n->fold})
        if (s) cudaStreamDestroy(s);
    leave_list(n);
    (void)cuda_drop(n->c, n->staging, cuda_nccl_staging(n->size));
    for (int i = 0; i < 2; i++) {
        (void)cuda_drop(n->c, n->table[i].p, n->table[i].bytes);
        (void)cuda_drop(n->c, n->ids[i].dev.p, n->ids[i].dev.bytes);
        (void)cudaFreeHost(n->ids[i].host);
    }
    cudaGetLastError();
    n->c->held -= n->own;
    free(n->greeting);
    free(n);
    err_restore(&e);
}

/* ---- opening ---- */

static int nccl_version(struct dev *d, int *version) {
    const struct cuda_nccl *lib;
    if (cuda_of(d)->peer_streams) /* said here, where all ranks hear it before one waits for another */
        FAIL(ERR_UNSUPPORTED, "this GPU has a group by peers' memory already, whose streams take up the hardware queues");
    TRY(cuda_nccl_open(&lib));
    *version = lib->version;
    return 0;
}

static int nccl_id(struct dev *d, unsigned char *id) {
    struct nccl n = {};
    struct nccl_id unique;
    (void)d;
    TRY(cuda_nccl_open(&n.lib));
    NCCL_TRY(&n, GetUniqueId, (&unique));
    memcpy(id, unique.bytes, sizeof unique.bytes);
    return 0;
}

static int open_streams(struct nccl *n) {
    cudaEvent_t *const events[] = {&n->queued,   &n->arrived, &n->used[0],     &n->used[1],
                                   &n->gathered, &n->done,    &n->ids[0].used, &n->ids[1].used};
    int least = 0, greatest = 0;
    TRY(cuda_load_group_kernels());
    CU_TRY(cudaDeviceGetStreamPriorityRange(&least, &greatest)); /* others wait for what is sent */
    CU_TRY(cudaStreamCreateWithPriority(&n->wire, cudaStreamNonBlocking, greatest));
    CU_TRY(cudaStreamCreateWithPriority(&n->fold, cudaStreamNonBlocking, greatest));
    for (cudaEvent_t *e : events) CU_TRY(cudaEventCreateWithFlags(e, cudaEventDisableTiming));
    for (cudaEvent_t &e : n->ended) CU_TRY(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    return 0;
}

static int connect(struct nccl *n, const unsigned char *id, double within) {
    struct nccl_id unique;
    struct nccl_config config = {};
    config.size = offsetof(struct nccl_config, split_share) + sizeof config.split_share; /* without padding, which is not set */
    config.magic = nccl_config_magic;
    config.version = NCCL_LEAST;
    config.blocking = 0;
    config.cga_cluster_size = config.min_ctas = config.max_ctas = config.split_share = NCCL_UNSET;
    memcpy(unique.bytes, id, sizeof unique.bytes);
    NCCL_TRY(n, CommInitRankConfig, (&n->comm, n->size, unique, n->rank, &config));
    return settle(n, "CommInitRankConfig", within);
}

static int wait_for_wire(const struct nccl *n, double within) {
    const double start = clock_awake();
    for (;;) {
        const cudaError_t e = cudaStreamQuery(n->wire);
        const double waited = clock_awake() - start;
        if (e == cudaSuccess) return 0;
        if (e != cudaErrorNotReady) CU_TRY(e);
        cudaGetLastError();
        if (waited > within) FAIL(ERR_TIMEOUT, "NCCL: the first bytes have not come after %.0f s", waited);
        rest(waited);
    }
}

/* Each rank sends each other one its number: NCCL connects two ranks, and takes memory for that, when they first meet. */
static int greet(struct nccl *n, double within) {
    struct dev_slots s;
    struct dev_part *const out = n->greeting, *const in = out + n->size;
    unsigned char got[GREETING];
    TRY(nccl_turn(n, &s));
    for (int r = 0; r < n->size; r++) {
        out[r] = {s.out, GREETING};
        in[r] = {s.in + (size_t)(r < n->rank ? r : r - 1) * s.bytes, GREETING};
    }
    CU_TRY(cudaMemsetAsync(s.out, n->rank & 255, GREETING, n->wire));
    TRY(move_parts(n, out, in));
    TRY(wait_for_wire(n, within));
    for (int r = 0; r < n->size; r++) {
        if (r == n->rank) continue;
        CU_TRY(cudaMemcpy(got, in[r].p, GREETING, cudaMemcpyDeviceToHost));
        if (got[0] != (r & 255) || memcmp(got, got + 1, GREETING - 1) != 0)
            FAIL(ERR_DEVICE, "NCCL: what rank %d sent came as something else", r);
    }
    return 0;
}

static int open_all(struct nccl *n, const unsigned char *id) {
    const double within = n->deadline_s / 2 < open_s ? n->deadline_s / 2 : open_s; /* then the ranks can still agree */
    size_t before = 0, after = 0, total = 0;
    TRY(cuda_nccl_open(&n->lib));
    TRY(open_streams(n));
    TRY(cuda_hold(n->c, cuda_nccl_staging(n->size), (void **)&n->staging));
    TRY(hold_rows(n));
    CU_TRY(cudaMemGetInfo(&before, &total));
    TRY(connect(n, id, within));
    TRY(greet(n, within));
    CU_TRY(cudaMemGetInfo(&after, &total));
    n->own = before > after ? before - after : 0;
    n->c->held += n->own;
    return 0;
}

static int nccl_open(struct dev *d, const struct dev_nccl_args *a, void **t) {
    struct nccl *n = (struct nccl *)calloc(1, sizeof *n);
    if (n) n->greeting = (struct dev_part *)calloc((size_t)a->size * 2, sizeof *n->greeting);
    if (!n || !n->greeting) FAIL(ERR_NOMEM, "cuda: out of host memory");
    n->c = cuda_of(d);
    n->rank = a->rank;
    n->size = a->size;
    n->deadline_s = a->deadline_s;
    n->next = n->c->nccl;
    n->c->nccl = n;
    const int rc = open_all(n, a->id);
    if (rc < 0) {
        nccl_close(n);
        return rc;
    }
    *t = n;
    return 0;
}

static const struct dev_nccl_ops make_nccl(void) {
    struct dev_nccl_ops o = {};
    o.bytes = cuda_nccl_bytes;
    o.version = nccl_version;
    o.id = nccl_id;
    o.open = nccl_open;
    o.transport.begin = nccl_begin;
    o.transport.turn = nccl_turn;
    o.transport.ids = nccl_ids;
    o.transport.sum_rows = nccl_sum_rows;
    o.transport.exchange = nccl_exchange;
    o.transport.zero = nccl_zero;
    o.transport.fold = nccl_fold;
    o.transport.add_rows = nccl_add_rows;
    o.transport.end = nccl_end;
    o.transport.gather = nccl_gather;
    o.transport.gathered = nccl_gathered;
    o.transport.reuse = nccl_reuse;
    o.transport.join = nccl_join;
    o.transport.close = nccl_close;
    return o;
}
const struct dev_nccl_ops cuda_nccl_ops = make_nccl();
