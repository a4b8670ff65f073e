/* rank_copy.c - see rank_copy.h. */
#include "ckpt/rank_copy.h"

#include "base/buf.h"
#include "base/err.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { COPY_STREAM = 0, SLICE = 1 << 20 /* bytes that a rank elsewhere sends at a time */ };

/* What a rank says of itself. */
struct word {
    uint64_t bytes; /* that it sends; 0: it copies */
    uint64_t n;     /* pieces of these */
};
/* Bytes of rank 0's memory that another one sends. */
struct place {
    uint64_t to, n;
};
struct span { /* pinned */
    char *p;
    size_t n;
};

struct rank_copy {
    struct dev *dev;
    struct comm *comm; /* NULL: one rank */
    int rank, size;
    char *memory; /* NULL: not here */
    size_t bytes;
    struct rank_copy_piece *pieces;
    int64_t n;
    struct span *pinned;
    int64_t n_pinned;
    struct word *words;    /* (size) */
    struct place **places; /* (size), on rank 0: of those that send */
    char *slices;          /* of a round: on rank 0 of all that send, elsewhere its own */
};

/* ---- memory that processes of one host share ---- */

struct handle {
    int64_t pid, fd;
    uint64_t dev, ino, bytes;
};

static int create_shared(struct rank_copy *r, int *fd, struct handle *h) {
    struct stat st;
    *fd = memfd_create("verlc-checkpoint", MFD_CLOEXEC);
    if (*fd < 0 || ftruncate(*fd, (off_t)r->bytes) < 0 || fstat(*fd, &st) < 0)
        FAIL(ERR_NOMEM, "no shared memory of %.3f GiB for checkpoints: %s", (double)r->bytes / 0x1p30, strerror(errno));
    void *p = mmap(NULL, r->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
    if (p == MAP_FAILED)
        FAIL(ERR_NOMEM, "shared memory of %.3f GiB for checkpoints cannot be mapped: %s", (double)r->bytes / 0x1p30,
             strerror(errno));
    r->memory = p;
    *h = (struct handle){getpid(), *fd, st.st_dev, st.st_ino, r->bytes};
    return 0;
}

/* Where this process may not look into rank 0's /proc (another container), or it is another one's, there is no mapping. */
static void map_shared(struct rank_copy *r, const struct handle *h) {
    char path[64];
    struct stat st;
    snprintf(path, sizeof path, "/proc/%lld/fd/%lld", (long long)h->pid, (long long)h->fd);
    const int fd = comm_same_host(r->comm, 0) ? open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK) : -1;
    if (fd < 0) return;
    const bool same = fstat(fd, &st) == 0 && st.st_dev == h->dev && st.st_ino == h->ino && (uint64_t)st.st_size == h->bytes;
    void *p = same ? mmap(NULL, r->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    close(fd);
    if (p != MAP_FAILED) r->memory = p;
}

static int by_place(const void *a, const void *b) {
    const struct rank_copy_piece *x = a, *y = b;
    return (x->to > y->to) - (x->to < y->to);
}

/* The pages of this rank's pieces are there from now on, and pinned on a GPU. */
static int pin_pages(struct rank_copy *r) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    r->pinned = xcalloc((size_t)r->n + 1, sizeof *r->pinned);
    for (int64_t i = 0; i < r->n; i++) {
        char *lo = r->memory + r->pieces[i].to / page * page;
        char *const hi = r->memory + (r->pieces[i].to + r->pieces[i].n + page - 1) / page * page;
        struct span *last = r->n_pinned > 0 ? &r->pinned[r->n_pinned - 1] : NULL;
        if (last && lo <= last->p + last->n) last->n = (size_t)(hi - last->p);
        else r->pinned[r->n_pinned++] = (struct span){lo, (size_t)(hi - lo)};
    }
    const int64_t spans = r->n_pinned;
    for (r->n_pinned = 0; r->n_pinned < spans; r->n_pinned++) { /* those that are pinned, where one cannot be */
        const struct span s = r->pinned[r->n_pinned];
        if (madvise(s.p, s.n, MADV_POPULATE_WRITE) < 0 && errno != EINVAL) /* a kernel before 5.14 */
            FAIL(ERR_NOMEM, "the host has no %.3f GiB for checkpoints during the next steps: %s", (double)s.n / 0x1p30,
                 strerror(errno));
        TRY(dev_host_register(r->dev, s.p, s.n));
    }
    return 0;
}

/* ---- who sends ---- */

static int gather_places(struct rank_copy *r) {
    size_t *at = xcalloc((size_t)r->size + 1, sizeof *at);
    struct place *own = xcalloc((size_t)r->n + 1, sizeof *own), *all = NULL;
    int rc = 0;
    for (int64_t i = 0; i < r->n; i++) own[i] = (struct place){r->pieces[i].to, r->pieces[i].n};
    for (int k = 0; k < r->size; k++) at[k + 1] = at[k] + r->words[k].n * sizeof *own;
    if (r->rank == 0) all = xmalloc(at[r->size] + 1);
    TRYG(comm_gather(r->comm, 0, own, all, at), out);
    for (int k = 1; r->rank == 0 && k < r->size; k++) {
        const size_t bytes = at[k + 1] - at[k];
        if (bytes == 0) continue;
        r->places[k] = xmalloc(bytes);
        memcpy(r->places[k], (char *)all + at[k], bytes);
        for (uint64_t i = 0; i < r->words[k].n; i++) {
            const struct place p = r->places[k][i];
            if (p.n > r->bytes || p.to > r->bytes - p.n)
                FAILG(out, ERR_INTERNAL, "%s: a part of a checkpoint is outside of it", comm_who(r->comm, k));
        }
    }
out:
    free(at);
    free(own);
    free(all);
    return rc;
}

static int open_ranks(struct rank_copy *r) {
    struct handle h = {0};
    int fd = -1, rc = 0;
    size_t *at = xcalloc((size_t)r->size + 1, sizeof *at), sent = 0;
    r->words = xcalloc((size_t)r->size, sizeof *r->words);
    r->places = xcalloc((size_t)r->size, sizeof *r->places);
    if (r->rank == 0) TRYG(create_shared(r, &fd, &h), out);
    TRYG(comm_broadcast(r->comm, 0, &h, sizeof h), out);
    if (h.bytes != r->bytes)
        FAILG(out, ERR_INTERNAL, "a checkpoint of %zu bytes here has %llu on rank 0", r->bytes, (unsigned long long)h.bytes);
    if (r->rank != 0) map_shared(r, &h);
    if (r->memory) TRYG(pin_pages(r), out);
    else {
        for (int64_t i = 0; i < r->n; i++) r->words[r->rank].bytes += r->pieces[i].n;
        if (r->words[r->rank].bytes > 0) r->words[r->rank].n = (uint64_t)r->n;
    }
    for (int k = 0; k < r->size; k++) at[k + 1] = at[k] + sizeof *r->words;
    TRYG(comm_all_gather(r->comm, r->words, at), out);
    for (int k = 0; k < r->size; k++)
        if (r->words[k].bytes > 0 && (r->rank == 0 || r->rank == k)) sent += SLICE;
    if (sent > 0) r->slices = xmalloc(sent);
    TRYG(gather_places(r), out); /* all have opened the memory: its number is not needed any more */
out:
    if (fd >= 0) close(fd);
    free(at);
    return rc;
}

int rank_copy_open(struct rank_copy **out, struct dev *d, struct comm *c, size_t bytes, const struct rank_copy_piece *pieces,
                   int64_t n) {
    struct rank_copy *r = xcalloc(1, sizeof *r);
    const bool one = !c || comm_size(c) == 1;
    void *p = NULL;
    r->dev = d;
    r->comm = one ? NULL : c;
    r->rank = one ? 0 : comm_rank(c);
    r->size = one ? 1 : comm_size(c);
    r->bytes = bytes;
    r->n = n;
    r->pieces = xcalloc((size_t)n + 1, sizeof *r->pieces);
    if (n > 0) memcpy(r->pieces, pieces, (size_t)n * sizeof *pieces);
    qsort(r->pieces, (size_t)n, sizeof *r->pieces, by_place);
    int rc = one ? dev_host_alloc(d, bytes, &p) : open_ranks(r);
    if (one) r->memory = p;
    if (rc < 0) rank_copy_close(r);
    else *out = r;
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

void rank_copy_close(struct rank_copy *r) {
    if (!r) return;
    for (int64_t i = 0; i < r->n_pinned; i++) dev_host_unregister(r->dev, r->pinned[i].p);
    if (r->size == 1) dev_host_free(r->dev, r->memory, r->bytes);
    else if (r->memory) munmap(r->memory, r->bytes);
    for (int k = 0; r->places && k < r->size; k++) free(r->places[k]);
    free(r->places);
    free(r->words);
    free(r->slices);
    free(r->pinned);
    free(r->pieces);
    free(r);
}

void *rank_copy_memory(const struct rank_copy *r) { return r->rank == 0 ? r->memory : NULL; }

/* ---- a copy ---- */

/* How much of the stream of a rank's pieces has been sent. */
struct cursor {
    uint64_t piece, done; /* done of the piece */
};

/* The next n bytes of what this rank sends. */
static int fill_slice(struct rank_copy *r, struct cursor *c, char *dst, size_t n) {
    while (n > 0) {
        const struct rank_copy_piece *p = &r->pieces[c->piece];
        const size_t left = p->n - c->done, k = n < left ? n : left;
        TRY(dev_copy_out(r->dev, dst, p->from + c->done, k));
        dst += k;
        n -= k;
        c->done += k;
        if (c->done == p->n) *c = (struct cursor){c->piece + 1, 0};
    }
    return 0;
}

static void place_slice(struct rank_copy *r, const struct place *places, struct cursor *c, const char *src, size_t n) {
    while (n > 0) {
        const struct place *p = &places[c->piece];
        const size_t left = p->n - c->done, k = n < left ? n : left;
        memcpy(r->memory + p->to + c->done, src, k);
        src += k;
        n -= k;
        c->done += k;
        if (c->done == p->n) *c = (struct cursor){c->piece + 1, 0};
    }
}

/* In rounds, since a gather needs memory for all it brings. */
static int send_rest(struct rank_copy *r) {
    size_t *at = xcalloc((size_t)r->size + 1, sizeof *at);
    struct cursor *c = xcalloc((size_t)r->size, sizeof *c);
    int rc = 0;
    for (uint64_t done = 0;; done += SLICE) {
        for (int k = 0; k < r->size; k++) {
            const uint64_t left = r->words[k].bytes > done ? r->words[k].bytes - done : 0;
            at[k + 1] = at[k] + (size_t)(left < SLICE ? left : SLICE);
        }
        if (at[r->size] == 0) break;
        if (r->rank != 0) TRYG(fill_slice(r, &c[r->rank], r->slices, at[r->rank + 1] - at[r->rank]), out);
        TRYG(comm_gather(r->comm, 0, r->slices, r->slices, at), out);
        for (int k = 1; r->rank == 0 && k < r->size; k++) place_slice(r, r->places[k], &c[k], r->slices + at[k], at[k + 1] - at[k]);
    }
out:
    free(at);
    free(c);
    return rc;
}

int rank_copy_run(struct rank_copy *r) {
    if (r->comm) TRY(comm_barrier(r->comm)); /* rank 0 has finished with the last one */
    for (int64_t i = 0; r->memory && i < r->n; i++)
        TRY(dev_evict(r->dev, COPY_STREAM, r->memory + r->pieces[i].to, r->pieces[i].from, r->pieces[i].n));
    TRY(dev_copy_stream_sync(r->dev, COPY_STREAM));
    if (!r->comm) return 0;
    TRY(send_rest(r));
    return comm_barrier(r->comm);
}
