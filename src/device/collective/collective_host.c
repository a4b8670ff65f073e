/* collective_host.c - the transport through host memory and comm: for devices that are the host (cpu, ref), and for GPUs that
 * have no other. Everything is done when a call returns, or queued on the compute stream, so there is nothing to reuse or join.
 *
 * Knows no buckets: what moves when is collective_staged.c's. An all-gather goes as comm's, a window of all ranks at a time. */
#include "device/collective/collective_int.h"

#include "base/buf.h"

#include <stdlib.h>
#include <string.h>

enum { SLOT = 4 << 20 }; /* bytes */

struct host {
    struct dev *d;
    struct comm *comm;
    int rank, size;
    bool far;        /* the device has memory of its own */
    char *in, *sent; /* host: a slot for each rank; what is sent (far) */
    void *staging;   /* device: slots to receive into and halves to send from (far) */
    char *out;       /* host: halves of slots to send from (not far) */
    void *ids;       /* device (far) */
    size_t id_bytes;
};

static size_t staging_bytes(int size) { return (size_t)(size - 1) * (SLOT + SLOT / 2); }
size_t collective_host_bytes(const struct dev *d, int size) { return dev_has_own_memory(d) ? staging_bytes(size) : 0; }

static void host_close(void *t) {
    struct host *h = t;
    free(h->in);
    free(h->sent);
    free(h->out);
    dev_free(h->d, h->staging, staging_bytes(h->size));
    dev_free(h->d, h->ids, h->id_bytes);
    free(h);
}

int collective_host_open(struct dev *d, struct comm *c, void **t) {
    struct host *h = *t = xcalloc(1, sizeof *h);
    *h = (struct host){.d = d, .comm = c, .rank = comm_rank(c), .size = comm_size(c), .far = dev_has_own_memory(d)};
    h->in = xmalloc((size_t)h->size * SLOT);
    if (!h->far) h->out = xmalloc((size_t)h->size * (SLOT / 2));
    if (!h->far) return 0;
    h->sent = xmalloc((size_t)h->size * SLOT);
    return dev_alloc(d, staging_bytes(h->size), &h->staging);
}

static int host_begin(void *t) {
    (void)t;
    return 0;
}
static int host_reuse(void *t, int64_t ticket) {
    (void)t, (void)ticket;
    return 0;
}

static int host_turn(void *t, struct dev_slots *s) {
    struct host *h = t;
    char *const staging = h->staging;
    *s = (struct dev_slots){.in = h->in, .out = h->out, .bytes = SLOT};
    if (h->far) *s = (struct dev_slots){.in = staging, .out = staging + (size_t)(h->size - 1) * SLOT, .bytes = SLOT};
    return 0;
}

static int host_ids(void *t, const int32_t *ids, int64_t n, const int32_t **on_device) {
    struct host *h = t;
    const size_t bytes = (size_t)n * sizeof *ids;
    *on_device = ids;
    if (!h->far) return 0;
    if (bytes > h->id_bytes) {
        dev_free(h->d, h->ids, h->id_bytes);
        h->ids = NULL;
        h->id_bytes = 0;
        TRY(dev_alloc(h->d, bytes, &h->ids));
        h->id_bytes = bytes;
    }
    *on_device = h->ids;
    return dev_copy_in(h->d, h->ids, ids, bytes);
}

static int host_sum_rows(void *t, struct tensor y, int64_t lo, int64_t vocab, struct tensor ids, struct tensor dx) {
    struct dev *const d = ((struct host *)t)->d;
    TRY(dev_zero(d, y.data, (size_t)y.dim[0] * sizeof(float)));
    return dev_embed_bwd_part(d, y, lo, vocab, ids, dx);
}

static int host_exchange(void *t, const struct dev_part *out, const struct dev_part *in) {
    struct host *h = t;
    struct comm_bytes sent[COMM_MOST_RANKS], taken[COMM_MOST_RANKS];
    for (int r = 0; r < h->size; r++) {
        sent[r] = (struct comm_bytes){h->far ? h->sent + (size_t)r * SLOT : out[r].p, out[r].n};
        taken[r] = (struct comm_bytes){h->far ? h->in + (size_t)r * SLOT : in[r].p, in[r].n};
        if (h->far) TRY(dev_copy_out(h->d, sent[r].p, out[r].p, out[r].n));
    }
    TRY(comm_exchange(h->comm, sent, taken));
    for (int r = 0; h->far && r < h->size; r++) TRY(dev_copy_in(h->d, in[r].p, taken[r].p, in[r].n));
    return 0;
}

static int host_zero(void *t, void *p, size_t bytes) { return dev_zero(((struct host *)t)->d, p, bytes); }
static int host_fold(void *t, struct tensor y, const struct tensor *x, int n, bool add) {
    return dev_fold(((struct host *)t)->d, y, x, n, add);
}
static int host_add_rows(void *t, struct tensor y, int64_t lo, int64_t vocab, struct tensor ids, struct tensor dx) {
    return dev_embed_bwd_part(((struct host *)t)->d, y, lo, vocab, ids, dx);
}

/* ---- all-gather ---- */

/* A rank's bytes of all parts, one after the other, are its stream. */
struct window { /* bytes [lo, hi) of rank r's stream, at `host` */
    int r;
    size_t lo, hi;
    char *host;
};

/* Copies them between `whole` and the host. */
static int move_window(struct host *h, char *whole, const size_t *at, int64_t n_parts, struct window w) {
    size_t begin = 0; /* of this part, in the stream */
    for (int64_t i = 0; i < n_parts && begin < w.hi; i++) {
        const size_t *const part = at + i * (h->size + 1) + w.r;
        const size_t end = begin + (part[1] - part[0]);
        const size_t from = w.lo > begin ? w.lo : begin, to = w.hi < end ? w.hi : end;
        char *const there = whole + part[0] + (from - begin), *const here = w.host + (from - w.lo);
        if (from < to && w.r == h->rank) TRY(dev_copy_out(h->d, here, there, to - from));
        if (from < to && w.r != h->rank) TRY(dev_copy_in(h->d, there, here, to - from));
        begin = end;
    }
    return 0;
}

static int host_gather(void *t, void *whole, const size_t *at, int64_t n_parts) {
    struct host *h = t;
    size_t total[COMM_MOST_RANKS] = {0}, window[COMM_MOST_RANKS + 1] = {0}, most = 0;
    for (int r = 0; r < h->size; r++) {
        for (int64_t i = 0; i < n_parts; i++) total[r] += at[i * (h->size + 1) + r + 1] - at[i * (h->size + 1) + r];
        if (total[r] > most) most = total[r];
    }
    for (size_t lo = 0; lo < most; lo += SLOT) {
        for (int r = 0; r < h->size; r++) {
            const size_t left = total[r] > lo ? total[r] - lo : 0;
            window[r + 1] = window[r] + (left < SLOT ? left : SLOT);
        }
        const size_t mine = window[h->rank + 1] - window[h->rank];
        TRY(move_window(h, whole, at, n_parts, (struct window){h->rank, lo, lo + mine, h->in + window[h->rank]}));
        TRY(comm_all_gather(h->comm, h->in, window));
        for (int r = 0; r < h->size; r++) {
            const struct window w = {r, lo, lo + window[r + 1] - window[r], h->in + window[r]};
            if (r != h->rank) TRY(move_window(h, whole, at, n_parts, w));
        }
    }
    return 0;
}

const struct dev_transport_ops collective_host = {.begin = host_begin,
                                                  .turn = host_turn,
                                                  .ids = host_ids,
                                                  .sum_rows = host_sum_rows,
                                                  .exchange = host_exchange,
                                                  .zero = host_zero,
                                                  .fold = host_fold,
                                                  .add_rows = host_add_rows,
                                                  .end = host_begin,
                                                  .gather = host_gather,
                                                  .gathered = host_begin,
                                                  .reuse = host_reuse,
                                                  .join = host_begin,
                                                  .close = host_close};
