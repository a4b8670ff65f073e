/* peers.cu - a group's ranks on the GPUs of one host: each maps the others' memory (CUDA IPC) and pulls what it owns.
 *
 * Three streams besides the compute stream, of all groups of a GPU. `tell` says that this rank's bytes are there, `pull` copies
 * peers' bytes by copy engines, `fold` adds them up and says that they are read. Flags are 32-bit counters in device memory, which
 * hold the ticket of the last operation: a rank writes its own in the memory of every peer and waits for the peers' in its own
 * memory, both by stream memory operations, so the host waits for nothing. A write is behind what it vouches for in its stream,
 * with a fence of the system's scope. Bytes with a flag are read from where they were written, never pushed, so no copy can pass
 * its flag.
 *
 * A gather that a CUDA graph holds is one kernel of the compute stream (gather_columns.cu). Its counts lie behind the flags, and
 * behind these its slots, the one thing that is pushed to a peer.
 *
 * Rows of the token embedding are read where they lie, by the kernel that adds them: only those of ids that this rank owns.
 * Invariant: a stream that waits for a flag waits for work that every rank has queued without waiting for this operation or a
 * later one, of any of its groups. So whoever is behind can always go on; and no two of the streams may share a hardware queue
 * (check_queues). */
#include "device/cuda/context.cuh"

#include "base/log.h"
#include "device/cuda/collective/gather_columns.cuh"
#include "device/collective/peers.h"

#include <cuda.h>
#include <stdlib.h>
#include <time.h>

enum { HALF = CUDA_PEER_HALF, FLAG_BYTES = CUDA_PEER_FLAGS, ROW_BYTES = CUDA_PEER_ROWS };
enum { COUNTS_AT = FLAG_BYTES / 2, SHARED_BYTES = FLAG_BYTES + CUDA_GATHER_SLOTS }; /* flags, counts of gathers, their slots */
enum { QUEUES = 8 };                /* hardware queues of a process, and the streams that it has at most */
enum flag { READY, READ, N_FLAGS }; /* of a rank: its bytes are there; it has read the others' */

typedef CUresult (*flag_fn)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);
typedef CUresult (*range_fn)(CUdeviceptr *, size_t *, CUdeviceptr);

/* What the groups of a GPU have in common, while there is one. */
struct cuda_peer_streams {
    cudaStream_t tell, pull, fold;
    cudaStream_t rescue;  /* has nothing that waits: what release() queues is done at once */
    struct peers *groups; /* all */
};

struct peers {
    struct cuda *c;
    struct cuda_peer_streams *streams; /* with this one in its list; NULL: not yet */
    struct peers *next;                /* of that list */
    int rank, size;
    uint32_t ticket; /* of the last operation */
    int64_t stamp;   /* of a trace, for the next operation; -1: none */
    flag_fn write, wait;
    range_fn range;
    cudaStream_t tell, pull, fold;    /* those of streams */
    cudaEvent_t queued;               /* the end of the compute stream when an operation was asked for */
    cudaEvent_t pulled[2], folded[2]; /* of a half of the staging buffer */
    cudaEvent_t done;                 /* the end of `fold` that the compute stream waits for */
    cudaEvent_t gathered;             /* the end of the last gather on `pull` */
    int half;                         /* the next one */
    char *staging;                    /* 2 x HALF */
    void *rows;
    size_t row_bytes;
    uint32_t **flags;              /* (size) of each rank, (size, N_FLAGS): row r is what rank r says */
    struct tensor *x;              /* (size, DEV_BUCKET_TIMES) pieces, by rank and summand, without gaps */
    struct cuda_gather_host *host; /* NULL: no graph holds a gather */
    uint64_t deadline_ns;          /* of such a gather's wait */
    void **mapped;
    int n_mapped;
};

static int driver_failed(CUresult r, const char *what) {
    if (r != CUDA_SUCCESS) FAIL(ERR_DEVICE, "cuda: %s failed with the driver's error %d", what, (int)r);
    return 0;
}

/* ---- flags ---- */

static int write_flag(const struct peers *p, cudaStream_t s, uint32_t *at) {
    return driver_failed(p->write(s, (CUdeviceptr)at, p->ticket, CU_STREAM_WRITE_VALUE_DEFAULT), "cuStreamWriteValue32");
}
/* Rank `rank` learns on `s` that this one has come so far. */
static int say(const struct peers *p, cudaStream_t s, int rank, enum flag flag) {
    return write_flag(p, s, &p->flags[rank][p->rank * N_FLAGS + flag]);
}
static int wait_for(const struct peers *p, cudaStream_t s, int rank, enum flag flag, uint32_t ticket) {
    uint32_t *const at = &p->flags[p->rank][rank * N_FLAGS + flag];
    return driver_failed(p->wait(s, (CUdeviceptr)at, ticket, CU_STREAM_WAIT_VALUE_GEQ), "cuStreamWaitValue32");
}

/* A rank's greetings lie behind its flags, one of each rank. */
static uint32_t *greetings(const struct peers *p, int rank) { return p->flags[rank] + p->size * N_FLAGS; }
static uint32_t greeting(int rank) { return 0x9e3779b9u * (uint32_t)(rank + 1); }

/* Writes this rank's into the memory of rank `rank`. */
static int greet(const struct peers *p, int rank) {
    const CUdeviceptr at = (CUdeviceptr)(greetings(p, rank) + p->rank);
    TRY(driver_failed(p->write(p->tell, at, greeting(p->rank), CU_STREAM_WRITE_VALUE_DEFAULT), "cuStreamWriteValue32"));
    CU_TRY(cudaStreamSynchronize(p->tell));
    return 0;
}

/* The next operation begins: behind the compute stream, and on `pull` when the bytes of ranks 0..n-1 are there. */
static int begin(struct peers *p, int n) {
    p->ticket++;
    CU_TRY(cudaEventRecord(p->queued, p->c->stream));
    CU_TRY(cudaStreamWaitEvent(p->tell, p->queued, 0));
    CU_TRY(cudaStreamWaitEvent(p->pull, p->queued, 0));
    if (p->stamp >= 0) TRY(cuda_stamp_on(p->c, p->pull, p->stamp));
    for (int r = 0; r < p->size; r++)
        if (r != p->rank) TRY(say(p, p->tell, r, READY));
    for (int r = 0; r < n; r++)
        if (r != p->rank) TRY(wait_for(p, p->pull, r, READY, p->ticket));
    return 0;
}

/* It ends with what `fold` has now. */
static int end(struct peers *p) {
    if (p->stamp >= 0) TRY(cuda_stamp_on(p->c, p->fold, p->stamp + 1)); /* before what the compute stream waits for */
    p->stamp = -1;
    for (int r = 0; r < p->size; r++) TRY(say(p, p->fold, r, READ));
    return 0;
}

static void peers_stamp(void *peers, int64_t i) { ((struct peers *)peers)->stamp = i; }

static int peers_reuse(void *peers, int64_t ticket) {
    struct peers *p = (struct peers *)peers;
    for (int r = 0; r < p->size; r++) TRY(wait_for(p, p->c->stream, r, READ, (uint32_t)ticket));
    return 0;
}

static int peers_join(void *peers) {
    struct peers *p = (struct peers *)peers;
    CU_TRY(cudaEventRecord(p->done, p->fold));
    CU_TRY(cudaStreamWaitEvent(p->c->stream, p->done, 0));
    return 0;
}

/* ---- opening ---- */

/* Streams that share a hardware queue wait for each other, and would do so for ever. */
static int check_queues(const struct cuda *c) {
    if (c->nccl) FAIL(ERR_UNSUPPORTED, "this GPU has a group by NCCL already, whose streams take up the hardware queues");
    const char *const queues = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    if (queues && atoi(queues) < QUEUES)
        FAIL(ERR_UNSUPPORTED, "CUDA_DEVICE_MAX_CONNECTIONS=%s is less than %d: unset it", queues, QUEUES);
    return 0;
}

/* Enters the list of the GPU's groups; the first one makes the streams. */
static int join_streams(struct peers *p) {
    struct cuda_peer_streams *s = p->c->peer_streams;
    int least = 0, greatest = 0;
    if (!s) s = p->c->peer_streams = (struct cuda_peer_streams *)calloc(1, sizeof *s);
    if (!s) FAIL(ERR_NOMEM, "cuda: out of host memory");
    p->streams = s;
    p->next = s->groups;
    s->groups = p;
    CU_TRY(cudaDeviceGetStreamPriorityRange(&least, &greatest)); /* folds are short and others wait for them */
    for (cudaStream_t *one : {&s->tell, &s->pull, &s->fold, &s->rescue})
        if (!*one) CU_TRY(cudaStreamCreateWithPriority(one, cudaStreamNonBlocking, greatest));
    p->tell = s->tell;
    p->pull = s->pull;
    p->fold = s->fold;
    return 0;
}

static void leave_streams(struct peers *p) {
    struct cuda_peer_streams *const s = p->streams;
    if (!s) return;
    struct peers **at = &s->groups;
    while (*at != p) at = &(*at)->next;
    *at = p->next;
    if (s->groups) return;
    for (cudaStream_t one : {s->tell, s->pull, s->fold, s->rescue})
        if (one) cudaStreamDestroy(one);
    p->c->peer_streams = NULL;
    free(s);
}

static int open_events(struct peers *p) {
    cudaEvent_t *const events[] = {&p->queued, &p->pulled[0], &p->pulled[1], &p->folded[0], &p->folded[1], &p->done, &p->gathered};
    for (cudaEvent_t *e : events) CU_TRY(cudaEventCreateWithFlags(e, cudaEventDisableTiming));
    return 0;
}

/* Memory for the table of ids and the ids of all ranks of a fold of rows; it grows, if ever, at the first folds. */
static int hold_rows(struct peers *p, size_t bytes) {
    if (bytes <= p->row_bytes) return 0;
    CU_TRY(cudaStreamSynchronize(p->fold)); /* the fold before may use it */
    TRY(cuda_drop(p->c, p->rows, p->row_bytes));
    p->rows = NULL;
    p->row_bytes = 0;
    if (bytes < ROW_BYTES) bytes = ROW_BYTES;
    TRY(cuda_hold(p->c, bytes, &p->rows));
    p->row_bytes = bytes;
    return 0;
}

static int peers_share(void *peers, void *p, size_t bytes, struct dev_peer_memory *m);

static int open_all(struct peers *p, struct dev_peer_memory *flags) {
    void *at;
    TRY(check_queues(p->c));
    TRY(cuda_load_group_kernels());
    TRY(cuda_driver_entry("cuStreamWriteValue32", (void **)&p->write));
    TRY(cuda_driver_entry("cuStreamWaitValue32", (void **)&p->wait));
    TRY(cuda_driver_entry("cuMemGetAddressRange", (void **)&p->range));
    TRY(join_streams(p));
    TRY(open_events(p));
    TRY(cuda_hold(p->c, 2 * (size_t)HALF, (void **)&p->staging));
    TRY(hold_rows(p, ROW_BYTES));
    TRY(cuda_hold(p->c, SHARED_BYTES, &at));
    p->flags[p->rank] = (uint32_t *)at;
    CU_TRY(cudaMemsetAsync(at, 0, FLAG_BYTES, p->pull));
    CU_TRY(cudaStreamSynchronize(p->pull)); /* before a peer hears of it */
    TRY(greet(p, p->rank));
    return peers_share(p, at, SHARED_BYTES, flags);
}

static void peers_close(void *peers);

static int peers_open(struct dev *d, int rank, int size, void **peers, struct dev_peer_memory *flags) {
    struct peers *p = (struct peers *)calloc(1, sizeof *p);
    if (p) p->flags = (uint32_t **)calloc((size_t)size, sizeof *p->flags);
    if (p) p->x = (struct tensor *)calloc((size_t)size * DEV_BUCKET_TIMES, sizeof *p->x);
    if (!p || !p->flags || !p->x) FAIL(ERR_NOMEM, "cuda: out of host memory");
    p->c = cuda_of(d);
    p->stamp = -1;
    p->rank = rank;
    p->size = size;
    const int rc = open_all(p, flags);
    if (rc < 0) {
        peers_close(p);
        return rc;
    }
    *peers = p;
    return 0;
}

/* ---- closing ---- */

static int is_idle(const struct peers *p, bool *idle) {
    *idle = true;
    for (cudaStream_t s : {p->tell, p->pull, p->fold, p->c->stream}) {
        const cudaError_t e = cudaStreamQuery(s);
        if (e != cudaErrorNotReady) CU_TRY(e);
        *idle = *idle && e == cudaSuccess;
    }
    cudaGetLastError(); /* cudaErrorNotReady */
    return 0;
}

/* Whether gathers in graphs wait no more: a word of host memory that kernels look at, so no stream is needed. */
static void end_gathers(const struct peers *p, bool end) {
    if (p->host) __atomic_store_n(&p->host->end, (uint32_t)end, __ATOMIC_SEQ_CST);
}

/* Every wait of every group of this GPU is over. By stream memory operations, since a copy may be queued behind one that waits,
 * and on `rescue`, since each other stream may be behind the compute stream, and that wait for a peer. Gathers in graphs first:
 * what is queued on `rescue` may come behind a kernel that waits. */
static int set_flags(const struct cuda_peer_streams *s) {
    for (const struct peers *g = s->groups; g; g = g->next) end_gathers(g, true);
    for (const struct peers *g = s->groups; g; g = g->next)
        for (int i = 0; g->flags[g->rank] && i < g->size * N_FLAGS; i++) TRY(write_flag(g, s->rescue, &g->flags[g->rank][i]));
    CU_TRY(cudaStreamSynchronize(s->rescue));
    return 0;
}

/* What is queued may wait for an ended peer: it comes to its end. A peer that is late may write over a flag, so until all is
 * done they are set again. Gathers that other groups queue afterwards wait as before; one that was ended here is lost. */
static int release(struct peers *p) {
    const struct timespec nap = {0, 1000000};
    end_gathers(p, true);
    for (bool idle;;) {
        TRY(is_idle(p, &idle));
        if (idle) break;
        TRY(set_flags(p->streams));
        nanosleep(&nap, NULL);
    }
    for (const struct peers *g = p->streams->groups; g; g = g->next) end_gathers(g, g == p);
    return 0;
}

static void peers_close(void *peers) {
    struct peers *p = (struct peers *)peers;
    cudaEvent_t const events[] = {p->queued, p->pulled[0], p->pulled[1], p->folded[0], p->folded[1], p->done, p->gathered};
    struct err_saved e;
    err_save(&e);
    if (p->fold && p->flags[p->rank] && release(p) < 0) log_warn("%s", err_msg());
    for (int i = 0; i < p->n_mapped; i++) (void)cudaIpcCloseMemHandle(p->mapped[i]);
    for (cudaEvent_t event : events)
        if (event) cudaEventDestroy(event);
    leave_streams(p);
    if (p->host) (void)cudaFreeHost(p->host);
    (void)cuda_drop(p->c, p->staging, 2 * (size_t)HALF);
    (void)cuda_drop(p->c, p->flags[p->rank], SHARED_BYTES);
    (void)cuda_drop(p->c, p->rows, p->row_bytes);
    cudaGetLastError();
    free(p->flags);
    free(p->x);
    free(p->mapped);
    free(p);
    err_restore(&e);
}

/* ---- memory ---- */

static int peers_share(void *peers, void *p, size_t bytes, struct dev_peer_memory *m) {
    CUdeviceptr base;
    size_t size;
    cudaIpcMemHandle_t handle;
    static_assert(sizeof handle == sizeof m->handle, "an IPC handle fits");
    TRY(driver_failed(((struct peers *)peers)->range(&base, &size, (CUdeviceptr)p), "cuMemGetAddressRange"));
    if ((CUdeviceptr)p + bytes > base + size) FAIL(ERR_INVAL, "cuda: %zu bytes at %p are not of one allocation", bytes, p);
    const cudaError_t e = cudaIpcGetMemHandle(&handle, (void *)base);
    if (e != cudaSuccess) {
        cudaGetLastError();
        FAIL(ERR_UNSUPPORTED, "cuda: memory of this GPU cannot be shared between processes: %s", cudaGetErrorString(e));
    }
    memcpy(m->handle, &handle, sizeof handle);
    m->offset = (uint64_t)((CUdeviceptr)p - base);
    return 0;
}

static int peers_map(void *peers, const struct dev_peer_memory *m, void **out) {
    struct peers *p = (struct peers *)peers;
    cudaIpcMemHandle_t handle;
    void *base, **grown = (void **)realloc(p->mapped, (size_t)(p->n_mapped + 1) * sizeof *grown);
    if (!grown) FAIL(ERR_NOMEM, "cuda: out of host memory");
    p->mapped = grown;
    memcpy(&handle, m->handle, sizeof handle);
    const cudaError_t e = cudaIpcOpenMemHandle(&base, handle, cudaIpcMemLazyEnablePeerAccess);
    if (e != cudaSuccess) {
        cudaGetLastError();
        FAIL(ERR_UNSUPPORTED, "cuda: a peer's GPU cannot be read from GPU %d: %s", p->c->index, cudaGetErrorString(e));
    }
    p->mapped[p->n_mapped++] = base;
    *out = (char *)base + m->offset;
    return 0;
}

static int peers_flags(void *peers, int rank, const struct dev_peer_memory *flags) {
    struct peers *const p = (struct peers *)peers;
    void *at;
    TRY(peers_map(peers, flags, &at));
    p->flags[rank] = (uint32_t *)at;
    return greet(p, rank);
}

/* What lies in the memory of rank `rank`, read as folds read it: what every rank has written there. */
static int check_greetings(const struct peers *p, int rank, uint32_t *got) {
    const size_t bytes = (size_t)p->size * sizeof *got;
    CU_TRY(cudaMemcpyAsync(p->staging, greetings(p, rank), bytes, cudaMemcpyDefault, p->pull));
    CU_TRY(cudaStreamSynchronize(p->pull));
    CU_TRY(cudaMemcpy(got, p->staging, bytes, cudaMemcpyDeviceToHost));
    for (int r = 0; r < p->size; r++)
        if (got[r] != greeting(r))
            FAIL(ERR_UNSUPPORTED,
                 "cuda: what rank %d wrote into the memory of rank %d did not come: these GPUs cannot write to or read from each "
                 "other (an IOMMU, or ACS of a PCIe switch)",
                 r, rank);
    return 0;
}

static int peers_greeted(void *peers) {
    struct peers *const p = (struct peers *)peers;
    uint32_t *const got = (uint32_t *)malloc((size_t)p->size * sizeof *got);
    int rc = got ? 0 : err_set(ERR_NOMEM, __FILE__, __LINE__, "cuda: out of host memory");
    for (int r = 0; r < p->size && rc == 0; r++) rc = check_greetings(p, r, got);
    free(got);
    return rc;
}

/* ---- folds ---- */

/* A fold: what of it does not change from piece to piece. */
struct folding {
    const struct dev_bucket *b;
    const void *const *x, *const *ids, *const *dx; /* (size) */
    int64_t lo, hi, vocab;                         /* the elements that this rank owns; rows of the table */
    int64_t piece;                                 /* elements */
    size_t slot;                                   /* bytes of the staging buffer for a piece of one rank */
    size_t table;                                  /* bytes, in front of the ids */
};

static int times_of(const struct dev_bucket *b, int r) { return b->times ? b->times[r] : 1; }
/* Summands of the ranks before r. */
static int times_before(const struct dev_bucket *b, int r) {
    int n = 0;
    for (int i = 0; i < r && i < b->n; i++) n += times_of(b, i);
    return n;
}

static void size_pieces(const struct peers *p, struct folding *f) {
    const struct dev_bucket *const b = f->b;
    const int peers = times_before(b, b->n) - (p->rank < b->n ? times_of(b, p->rank) : 0);
    f->slot = peers ? HALF / (size_t)peers / 256 * 256 : 0;
    f->piece = f->x && peers ? (int64_t)(f->slot / 256 - 1) * 64 : f->hi - f->lo; /* 256 bytes of alignment */
    if (f->piece < 1) f->piece = 1;
    f->table = f->ids && f->hi > f->lo ? (cuda_embed_bwd_table(0, f->hi - f->lo, f->b->width) + 2 * 8 + 255) & ~(size_t)255 : 0;
}

/* Elements [lo, hi) of each rank that has a summand, where they can be added: peers' in the staging buffer, once `pulled`. */
static int pull_piece(struct peers *p, const struct folding *f, int64_t lo, int64_t hi) {
    const size_t bytes = (size_t)(hi - lo) * sizeof(float);
    char *at = p->staging + (size_t)p->half * HALF;
    CU_TRY(cudaStreamWaitEvent(p->pull, p->folded[p->half], 0)); /* no wait before its first use */
    for (int i = 0; f->x && i < p->size; i++) {
        const int r = (p->rank + i) % p->size; /* the ranks begin with different peers */
        if (r >= f->b->n) continue;
        struct tensor *const x = p->x + times_before(f->b, r);
        for (int k = 0; k < times_of(f->b, r); k++) {
            const float *const from = (const float *)f->x[r] + k * f->b->stride + lo;
            x[k] = tensor_1d((void *)from, DT_F32, hi - lo);
            if (i == 0) continue;
            x[k].data = at + ((uintptr_t)from & 255); /* aligned as the others */
            CU_TRY(cudaMemcpyAsync(x[k].data, from, bytes, cudaMemcpyDefault, p->pull));
            at += f->slot;
        }
    }
    CU_TRY(cudaEventRecord(p->pulled[p->half], p->pull));
    CU_TRY(cudaStreamWaitEvent(p->fold, p->pulled[p->half], 0));
    return 0;
}

/* The ids of all ranks into memory of this GPU, where they are read many times. */
static int copy_ids(struct peers *p, const struct folding *f) {
    char *at = (char *)p->rows + f->table;
    for (int r = 0; r < f->b->n; r++) {
        const size_t bytes = (size_t)f->b->n_rows[r] * sizeof(int32_t);
        if (bytes) CU_TRY(cudaMemcpyAsync(at, f->ids[r], bytes, cudaMemcpyDefault, p->fold));
        at += bytes;
    }
    return 0;
}

static int add_up(struct peers *p, const struct folding *f, int64_t lo, int64_t hi) {
    const struct dev_bucket *b = f->b;
    const struct tensor y = tensor_1d(b->own + (lo - f->lo), DT_F32, hi - lo);
    if (!f->ids) return cuda_fold_on(p->fold, y, p->x, times_before(b, b->n), b->add);
    if (!f->x && !b->add) CU_TRY(cudaMemsetAsync(y.data, 0, (size_t)(hi - lo) * sizeof(float), p->fold));
    const char *ids = (const char *)p->rows + f->table;
    for (int r = 0; r < b->n; r++) {
        const int64_t n = b->n_rows[r];
        if (f->x) TRY(cuda_fold_on(p->fold, y, p->x + times_before(b, r), times_of(b, r), b->add || r > 0));
        const struct cuda_embed_bwd_args rows = {y, lo, f->vocab, tensor_1d((void *)ids, DT_I32, n),
                                                 tensor_2d((void *)f->dx[r], DT_F32, n, b->width)};
        if (n) TRY(cuda_embed_bwd_on(p->fold, p->rows, &rows));
        ids += (size_t)n * sizeof(int32_t);
    }
    return 0;
}

static int peers_fold(void *peers, const struct dev_bucket *b, const void *const *x, const void *const *ids,
                      const void *const *dx) {
    struct peers *p = (struct peers *)peers;
    struct folding f = {b, x, ids, dx, b->cut[p->rank], b->cut[p->rank + 1], ids ? b->cut[p->size] / b->width : 0, 0, 0, 0};
    size_pieces(p, &f);
    size_t bytes = f.table;
    for (int r = 0; f.ids && r < b->n; r++) bytes += (size_t)b->n_rows[r] * sizeof(int32_t);
    if (f.ids && f.hi > f.lo) TRY(hold_rows(p, bytes));
    TRY(begin(p, b->n));
    for (int64_t lo = f.lo; lo < f.hi; lo += f.piece) {
        const int64_t hi = f.hi - lo < f.piece ? f.hi : lo + f.piece;
        TRY(pull_piece(p, &f, lo, hi));
        if (f.ids && lo == f.lo) TRY(copy_ids(p, &f));
        TRY(add_up(p, &f, lo, hi));
        CU_TRY(cudaEventRecord(p->folded[p->half], p->fold));
        p->half ^= 1;
    }
    return end(p);
}

/* ---- all-gather ---- */

static int peers_gather(void *peers, void *const *whole, const size_t *at, int64_t n_parts) {
    struct peers *p = (struct peers *)peers;
    char *const own = (char *)whole[p->rank];
    TRY(begin(p, p->size));
    for (int i = 1; i < p->size; i++) {
        const int r = (p->rank + i) % p->size;
        for (int64_t k = 0; k < n_parts; k++) {
            const size_t lo = at[k * (p->size + 1) + r], hi = at[k * (p->size + 1) + r + 1];
            if (lo < hi) CU_TRY(cudaMemcpyAsync(own + lo, (const char *)whole[r] + lo, hi - lo, cudaMemcpyDefault, p->pull));
        }
    }
    CU_TRY(cudaEventRecord(p->gathered, p->pull));
    CU_TRY(cudaStreamWaitEvent(p->fold, p->gathered, 0));
    return end(p);
}

static int peers_gathered(void *peers) {
    struct peers *p = (struct peers *)peers;
    CU_TRY(cudaStreamWaitEvent(p->c->stream, p->gathered, 0));
    return 0;
}

/* ---- all-gather in a CUDA graph ---- */

static char *slots(const struct peers *p, int rank) { return (char *)p->flags[rank] + FLAG_BYTES; }

static int peers_graphs(void *peers, double deadline_s) {
    struct peers *const p = (struct peers *)peers;
    static_assert(CUDA_GATHER_WORDS * sizeof(uint32_t) <= FLAG_BYTES - COUNTS_AT, "counts fit");
    TRY(cuda_load_gather());
    CU_TRY(cudaHostAlloc((void **)&p->host, sizeof *p->host, cudaHostAllocMapped));
    memset(p->host, 0, sizeof *p->host);
    p->deadline_ns = (uint64_t)(deadline_s * 1e9);
    CU_TRY(cudaMemsetAsync(slots(p, p->rank), 0xff, CUDA_GATHER_SLOTS, p->pull));
    CU_TRY(cudaStreamSynchronize(p->pull)); /* before a peer hears of it */
    return 0;
}

static int peers_lost(void *peers) {
    const struct peers *const p = (const struct peers *)peers;
    const uint32_t lost = __atomic_load_n(&p->host->lost, __ATOMIC_SEQ_CST);
    return lost == CUDA_GATHER_ENDED ? p->size : (int)lost - 1;
}

static int peers_gather_columns(void *peers, const struct join_columns_args *a) {
    const struct peers *const p = (const struct peers *)peers;
    struct cuda_gather g = {p->rank, p->size, {}, p->flags[p->rank] + COUNTS_AT / sizeof(uint32_t), p->host, p->deadline_ns};
    for (int r = 0; r < p->size; r++) g.slots[r] = slots(p, r);
    return cuda_gather_columns(p->c, &g, a);
}

static const struct dev_peer_ops make_peers(void) {
    struct dev_peer_ops o = {};
    o.bytes = cuda_peer_bytes;
    o.open = peers_open;
    o.flags = peers_flags;
    o.greeted = peers_greeted;
    o.close = peers_close;
    o.share = peers_share;
    o.map = peers_map;
    o.fold = peers_fold;
    o.reuse = peers_reuse;
    o.join = peers_join;
    o.gather = peers_gather;
    o.gathered = peers_gathered;
    o.graphs = peers_graphs;
    o.gather_columns = peers_gather_columns;
    o.lost = peers_lost;
    o.stamp = peers_stamp;
    return o;
}
const struct dev_peer_ops cuda_peers = make_peers();
