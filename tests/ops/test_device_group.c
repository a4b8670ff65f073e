/* test_device_group.c - groups of 1 to 4 processes: folds and all-gathers of random sizes end in the bits of dev_fold and
 * dev_embed_bwd on one process, whatever the ranks own, and although every buffer is used again at once. The ranks are this
 * program again.
 *
 *   test_device_group                                cpu, ref, and a device with memory of its own through the host; the choice
 *                                                 of the way, with a backend that says that it has NCCL
 *   test_device_group cuda N                         all that GPUs 0..N-1 can show, by the way that VERLC_GROUP says
 *   test_device_group run DEVICE RANKS ROUNDS MB     one device: cpu, ref, far, or cuda:N (GPUs 0..N-1 in turn) with buckets of up
 *                                                 to MB
 *   test_device_group abandoned cuda:N RANKS         rank 0, alone with a fold, closes its group
 *   test_device_group bench cuda:N RANKS MB          what a fold and an all-gather take, alone and beside GEMMs */
#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/rng.h"
#include "comm/comm.h"
#include "device/collective/collective_int.h"
#include "device/collective/peers.h"
#include "device/graph.h"

#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

extern char **environ;
static char own_path[4096];

enum {
    MOST = 8,
    SLOTS = 2,
    FLIGHT = 3,
    MAX_WIDTH = 900,
    MAX_ROWS = 3000,
    SHIFT = 67,
    FEW_ROWS = 11,
    FEW = 2728 * FEW_ROWS,
    MOST_TIMES = 3,
    SPARE = 64 * MOST_TIMES
};

/* ---- a rank ---- */

/* One fold, which all ranks draw alike. */
struct round {
    int64_t count, width, cut[MOST + 1], n_rows[MOST], vocab;
    int64_t shift[2];   /* where x and own begin in their memory */
    int n, times[MOST]; /* summands of a rank */
    int64_t stride;     /* 0: one of each, by default */
    bool x, rows, add;
    uint64_t seed;
};

struct rank {
    struct dev d;
    struct comm *comm;
    struct collective *g;
    struct comm *part; /* all ranks but the last, where they are more than two, have a second group */
    struct collective *few;
    uint32_t *few_whole;  /* (FEW), shared there */
    uint32_t *few_source; /* (FEW) device */
    uint32_t *few_part;   /* the same */
    int n_replays;        /* of gather_part */
    void *graph;          /* of it; NULL: not yet */
    struct comm *opening; /* the group that is opened */
    int rank, size;
    int64_t most;        /* elements of a bucket */
    int64_t rows;        /* of the embedding a rank, at most */
    float *base;         /* (2 most) device: what all summands are made of */
    float *slot[SLOTS];  /* shared: x (most + SHIFT), dx (rows, MAX_WIDTH), ids (rows) */
    float *own[FLIGHT];  /* (most + SHIFT) */
    float *want, *term;  /* (most), (most and the rows) */
    int32_t *ids;        /* device */
    char *whole;         /* (4 most bytes), shared */
    char *copy;          /* device, of it */
    float *got, *expect; /* host */
    struct {
        void *p;
        size_t bytes;
    } block[16]; /* of dev_alloc */
    int n_blocks;
};

static struct dev_ops far_ops;

static int far_host_alloc(struct dev *d, size_t bytes, void **out) { return far_ops.alloc(d, bytes, out); }
static void far_host_free(struct dev *d, void *p, size_t bytes) { far_ops.free(d, p, bytes); }

/* ---- a backend that says that it has NCCL, and moves bytes as the host does ---- */

static struct rank *self;
static int fake_version_number = 29901; /* 0: the library is not there */

static size_t fake_bytes(int size) { return (size_t)size; }
static int fake_version(struct dev *d, int *version) {
    (void)d;
    if (fake_version_number == 0) FAIL(ERR_UNSUPPORTED, "the library is not there");
    *version = fake_version_number;
    return 0;
}
static int fake_id(struct dev *d, unsigned char *id) {
    (void)d;
    for (int i = 0; i < DEV_NCCL_ID; i++) id[i] = (unsigned char)(7 * i + 1);
    return 0;
}
static int fake_open(struct dev *d, const struct dev_nccl_args *a, void **t);
/* What was received before is gone; and what is added up may be so later, so the next piece has slots of its own. */
static struct dev_slots slots;
static bool in_use;
static int fake_turn(void *t, struct dev_slots *s) {
    TRY(collective_host.turn(t, s));
    memset(s->in, 0xff, (size_t)(self->size - 1) * s->bytes);
    memset(s->out, 0xff, (size_t)(self->size - 1) * s->bytes / 2);
    slots = *s;
    in_use = false;
    return 0;
}
/* Whether it is within one of the slots from `base` on, or starts in none of them. */
static bool in_one(struct dev_part part, const char *base, size_t slot) {
    const size_t at = (uintptr_t)part.p - (uintptr_t)base, all = (size_t)(self->size - 1) * slot;
    return part.n == 0 || at >= all || at / slot == (at + part.n - 1) / slot;
}
static int fake_exchange(void *t, const struct dev_part *out, const struct dev_part *in) {
    if (in_use) FAIL(ERR_INTERNAL, "an exchange into slots that are read");
    for (int r = 0; r < self->size; r++)
        if (!in_one(in[r], slots.in, slots.bytes) || !in_one(out[r], slots.out, slots.bytes / 2))
            FAIL(ERR_INTERNAL, "%zu bytes from rank %d, or %zu for it, leave their slot", in[r].n, r, out[r].n);
    return collective_host.exchange(t, out, in);
}
static int fake_fold(void *t, struct tensor y, const struct tensor *x, int n, bool add) {
    in_use = true;
    return collective_host.fold(t, y, x, n, add);
}
static int fake_add_rows(void *t, struct tensor y, int64_t lo, int64_t vocab, struct tensor ids, struct tensor dx) {
    in_use = true;
    return collective_host.add_rows(t, y, lo, vocab, ids, dx);
}
static struct dev_nccl_ops fake_nccl = {.bytes = fake_bytes, .version = fake_version, .id = fake_id, .open = fake_open};

/* ---- a backend that says that it reads peers' memory; a group by it is opened, and closed where another rank cannot ---- */

static int fake_opened; /* and not closed */
static const char *fake_fails = "";

static size_t fake_peer_bytes(void) { return 1; }
static int fake_peers_open(struct dev *d, int rank, int size, void **peers, struct dev_peer_memory *flags) {
    (void)d, (void)size;
    if (strcmp(fake_fails, "peers-open") == 0) FAIL(ERR_UNSUPPORTED, "its memory cannot be shared");
    fake_opened++;
    *peers = &fake_opened;
    memset(flags->handle, rank + 1, sizeof flags->handle);
    return 0;
}
static int fake_peers_flags(void *peers, int rank, const struct dev_peer_memory *flags) {
    (void)peers;
    for (size_t i = 0; i < sizeof flags->handle; i++)
        if (flags->handle[i] != rank + 1) FAIL(ERR_INTERNAL, "the flags of rank %d are another's", rank);
    if (strcmp(fake_fails, "peers-map") == 0) FAIL(ERR_UNSUPPORTED, "it cannot read the others");
    return 0;
}
static int fake_peers_greeted(void *peers) {
    (void)peers;
    if (strcmp(fake_fails, "peers-greet") == 0) FAIL(ERR_UNSUPPORTED, "what it read was something else");
    return 0;
}
static void fake_peers_close(void *peers) {
    CHECK(peers == &fake_opened);
    fake_opened--;
}
static int fake_peers_graphs(void *peers, double deadline_s) {
    (void)peers, (void)deadline_s;
    return 0;
}
static const struct dev_peer_ops fake_peers = {.bytes = fake_peer_bytes,
                                               .open = fake_peers_open,
                                               .flags = fake_peers_flags,
                                               .greeted = fake_peers_greeted,
                                               .graphs = fake_peers_graphs,
                                               .close = fake_peers_close};

/* DEVICE of rank r; "far" is the cpu with memory that counts as its own; "nccl" has the fake one, "nccl-without" all but rank 1,
 * "nccl-other" another version there; "peers-open", "peers-map" and "peers-greet" have the peers' memory of above, where rank 1
 * cannot; "peers:each" have it, and a device each, "peers:shared" one device. */
static int open_device(struct rank *k, const char *device) {
    const bool peers = strncmp(device, "peers", 5) == 0, nccl = strncmp(device, "nccl", 4) == 0;
    const bool far = peers || nccl || strcmp(device, "far") == 0;
    const char *const gpus = far ? NULL : strchr(device, ':');
    char name[64];
    if (gpus) snprintf(name, sizeof name, "cuda:%d", k->rank % atoi(gpus + 1));
    else snprintf(name, sizeof name, "%s", far ? "cpu" : device);
    TRY(dev_open_named(&k->d, name, 1, NULL));
    far_ops = *k->d.ops;
    if (far) {
        far_ops.caps.own_memory = true;
        far_ops.host_alloc = far_host_alloc;
        far_ops.host_free = far_host_free;
    }
    if (nccl) far_ops.nccl = &fake_nccl;
    if (peers) far_ops.peers = &fake_peers;
    if (peers && k->rank == 1) fake_fails = device;
    if (strcmp(device, "peers:each") == 0) snprintf(k->d.id, sizeof k->d.id, "%d", k->rank);
    if (strcmp(device, "peers:shared") == 0) snprintf(k->d.id, sizeof k->d.id, "%d", k->rank / 2);
    if (k->rank == 1 && strcmp(device, "nccl-without") == 0) fake_version_number = 0;
    if (k->rank == 1 && strcmp(device, "nccl-other") == 0) fake_version_number = 29902;
    k->d.ops = &far_ops;
    return 0;
}

static size_t slot_bytes(const struct rank *k) { return (size_t)(k->most + SPARE + SHIFT + k->rows * (MAX_WIDTH + 1)) * 4; }
static float *slot_dx(const struct rank *k, int s) { return k->slot[s] + k->most + SPARE + SHIFT; }
static int32_t *slot_ids(const struct rank *k, int s) { return (int32_t *)(void *)(slot_dx(k, s) + k->rows * MAX_WIDTH); }

static int alloc(struct rank *k, int64_t words, void *out) {
    void *p;
    TRY(dev_alloc(&k->d, (size_t)words * 4, &p));
    memcpy(out, &p, sizeof p);
    k->block[k->n_blocks].p = p;
    k->block[k->n_blocks++].bytes = (size_t)words * 4;
    return 0;
}

/* Values whose sums depend on the order. */
static int fill_base(struct rank *k) {
    const int64_t n = 2 * k->most;
    float *v = xmalloc((size_t)n * sizeof *v);
    uint32_t x = 1;
    for (int64_t i = 0; i < n; i++) {
        x = x * 1664525u + 1013904223u;
        v[i] = (float)((int32_t)x >> 8) * (x >> 31 ? 0x1p-20f : 0x1p-14f);
    }
    const int rc = dev_copy_in(&k->d, k->base, v, (size_t)n * sizeof *v);
    free(v);
    return rc;
}

static int open_group(struct rank *k, struct comm *c, struct collective **g) {
    k->opening = c;
    const int rc = collective_open(g, &k->d, c);
    CHECK(fake_opened == 0);
    return rc;
}

/* It goes the way of the first. */
static int open_few(struct rank *k) {
    const int n = k->size > 2 ? k->size - 1 : k->size;
    if (k->rank >= n) return 0;
    TRY(comm_part(&k->part, k->comm, 0, n));
    TRY(open_group(k, k->part, &k->few));
    if (strcmp(collective_way(k->few), collective_way(k->g)) != 0)
        FAIL(ERR_INTERNAL, "one group goes through %s, another through %s", collective_way(k->g), collective_way(k->few));
    TRY(alloc(k, FEW, &k->few_whole));
    TRY(alloc(k, FEW, &k->few_source));
    TRY(alloc(k, FEW, &k->few_part));
    return collective_share(k->few, k->few_whole, FEW * sizeof *k->few_whole);
}

static int open_rank(struct rank *k, const char *device, int64_t most, int64_t rows) {
    k->most = most;
    k->rows = rows;
    TRY(open_device(k, device));
    TRY(alloc(k, 2 * most, &k->base));
    TRY(alloc(k, most, &k->want));
    TRY(alloc(k, most + rows * MAX_WIDTH, &k->term));
    TRY(alloc(k, rows, &k->ids));
    TRY(alloc(k, most, &k->whole));
    TRY(alloc(k, most, &k->copy));
    TRY(open_group(k, k->comm, &k->g));
    TRY(open_few(k));
    TRY(collective_share(k->g, k->whole, (size_t)most * 4));
    for (int s = 0; s < SLOTS; s++) {
        TRY(alloc(k, (int64_t)(slot_bytes(k) / 4), &k->slot[s]));
        TRY(collective_share(k->g, k->slot[s], slot_bytes(k)));
    }
    for (int f = 0; f < FLIGHT; f++) TRY(alloc(k, most + SHIFT, &k->own[f]));
    k->got = xmalloc((size_t)most * 4);
    k->expect = xmalloc((size_t)most * 4);
    return fill_base(k);
}

static int fake_open(struct dev *d, const struct dev_nccl_args *a, void **t) {
    unsigned char id[DEV_NCCL_ID];
    TRY(fake_id(d, id));
    if (a->rank != comm_rank(self->opening) || a->size != comm_size(self->opening) || memcmp(a->id, id, sizeof id) != 0 ||
        a->deadline_s <= 0)
        FAIL(ERR_INTERNAL, "NCCL is opened as something else");
    return collective_host_open(d, self->opening, t);
}

static void close_rank(struct rank *k) {
    if (k->graph) dev_graph_free(&k->d, k->graph);
    collective_close(k->few);
    collective_close(k->g);
    comm_close(k->part);
    free(k->got);
    free(k->expect);
    for (int i = 0; i < k->n_blocks; i++) dev_free(&k->d, k->block[i].p, k->block[i].bytes);
    dev_close(&k->d);
}

static int64_t up_to(struct rng *rng, int64_t most) { return (int64_t)rng_below(rng, (uint64_t)most + 1); }

/* Small ones more often than large ones, but for the largest. */
static int64_t any_size(struct rng *rng, int64_t most) {
    int bits = 0;
    if (rng_below(rng, 8) == 0) return most;
    while ((int64_t)1 << bits < most) bits++;
    const int64_t top = (int64_t)1 << up_to(rng, bits);
    return 1 + up_to(rng, top < most ? top - 1 : most - 1);
}

/* Ascending cuts of [0, count], with empty shares. */
static void draw_cuts(struct rng *rng, int64_t *cut, int size, int64_t count) {
    for (int i = 1; i < size; i++) cut[i] = rng_below(rng, 4) ? up_to(rng, count) : rng_below(rng, 2) ? count : 0;
    for (int i = 1; i < size; i++)
        for (int j = i; j > 1 && cut[j - 1] > cut[j]; j--) {
            const int64_t t = cut[j];
            cut[j] = cut[j - 1];
            cut[j - 1] = t;
        }
    cut[0] = 0;
    cut[size] = count;
}

static struct round draw(const struct rank *k, struct rng *rng) {
    struct round w = {.n = 1 + (int)up_to(rng, k->size - 1), .add = rng_below(rng, 2), .seed = rng_u32(rng)};
    const int kind = (int)rng_below(rng, 3); /* a bucket, tied with rows, rows alone */
    w.x = kind < 2;
    w.rows = kind > 0;
    const bool large = w.rows && rng_below(rng, 8) == 0; /* more rows than fit a slot, if the device has slots of 4 MiB */
    w.count = !w.rows && rng_below(rng, 8) == 0 ? 0 : large ? k->most : any_size(rng, k->most);
    for (int i = 0; i < 2; i++) w.shift[i] = rng_below(rng, 2) ? up_to(rng, SHIFT) : 0;
    if (w.rows) {
        w.width = MAX_WIDTH < w.count ? MAX_WIDTH : w.count;
        if (!large) w.width = any_size(rng, w.width);
        w.vocab = w.count / w.width;
        w.count = w.vocab * w.width;
    }
    const int64_t stride = (w.count + 63) / 64 * 64 + 64 * up_to(rng, 1);
    if (w.x && rng_below(rng, 2) && MOST_TIMES * stride <= k->most + SPARE) w.stride = stride;
    for (int r = 0; r < k->size; r++) w.times[r] = w.stride ? 1 + (int)up_to(rng, MOST_TIMES - 1) : 1;
    draw_cuts(rng, w.cut, k->size, w.count);
    for (int r = 0; r < k->size; r++) w.n_rows[r] = large ? k->rows : rng_below(rng, 4) ? any_size(rng, k->rows) : 0;
    return w;
}

/* What rank r has in a round: 0: x, 1: dx, 2: own's first content, 3 and more: further summands. */
static int make(struct rank *k, const struct round *w, int r, int what, int64_t n, float *to) {
    struct rng rng = {.seed = w->seed * 64 + (uint64_t)(r * 3 + what % 3), .n = (uint64_t)what << 8, .stream = RNG_TEST};
    const int64_t from = up_to(&rng, k->most - (n < k->most ? n : k->most));
    const float scale = 1.0f + (float)rng_unit(&rng);
    for (int64_t lo = 0; lo < n; lo += k->most) { /* the rows may be more than the base */
        const int64_t part = n - lo < k->most ? n - lo : k->most;
        TRY(dev_axpby(&k->d, tensor_1d(to + lo, DT_F32, part), scale, tensor_1d(k->base + from, DT_F32, part), 0));
    }
    return 0;
}

static int make_ids(struct rank *k, const struct round *w, int r, int32_t *to) {
    struct rng rng = {.seed = w->seed * 64 + (uint64_t)r, .stream = RNG_DATA};
    const uint64_t some = 1 + rng_below(&rng, (uint64_t)w->vocab); /* often equal */
    int32_t *id = xmalloc((size_t)w->n_rows[r] * sizeof *id + 1);
    for (int64_t t = 0; t < w->n_rows[r]; t++) id[t] = (int32_t)rng_below(&rng, rng_below(&rng, 2) ? (uint64_t)w->vocab : some);
    const int rc = dev_copy_in(&k->d, to, id, (size_t)w->n_rows[r] * sizeof *id);
    free(id);
    return rc;
}

static int start_fold(struct rank *k, const struct round *w, int slot, float *own, int64_t *ticket) {
    float *const x = k->slot[slot] + w->shift[0];
    const struct dev_bucket b = {.x = w->x ? x : NULL,
                                 .cut = w->cut,
                                 .n = w->n,
                                 .times = w->stride ? w->times : NULL,
                                 .stride = w->stride,
                                 .own = own,
                                 .add = w->add,
                                 .ids = w->rows ? slot_ids(k, slot) : NULL,
                                 .dx = w->rows ? slot_dx(k, slot) : NULL,
                                 .n_rows = w->n_rows,
                                 .width = w->width};
    const int64_t n = w->cut[k->rank + 1] - w->cut[k->rank];
    for (int i = 0; w->x && k->rank < w->n && i < w->times[k->rank]; i++)
        TRY(make(k, w, k->rank, 3 * i, w->count, x + i * w->stride));
    if (w->rows && k->rank < w->n) {
        TRY(make(k, w, k->rank, 1, w->n_rows[k->rank] * w->width, slot_dx(k, slot)));
        TRY(make_ids(k, w, k->rank, slot_ids(k, slot)));
    }
    TRY(make(k, w, 0, 2, w->count, k->term)); /* of the whole bucket; this rank's part is taken */
    if (n) TRY(dev_copy(&k->d, own, k->term + w->cut[k->rank], (size_t)n * 4));
    return collective_fold(k->g, &b, ticket);
}

/* The same on one process, and whether the owned elements have its bits. */
static int check_fold(struct rank *k, const struct round *w, const float *own, int64_t number) {
    const struct tensor y = tensor_1d(k->want, DT_F32, w->count), x = tensor_1d(k->term, DT_F32, w->count);
    const int64_t lo = w->cut[k->rank], n = w->cut[k->rank + 1] - lo;
    if (w->x || w->add) TRY(make(k, w, 0, 2, w->count, k->want));
    else TRY(dev_zero(&k->d, k->want, (size_t)w->count * 4));
    for (int r = 0; r < w->n; r++) {
        for (int i = 0; w->x && i < w->times[r]; i++) {
            TRY(make(k, w, r, 3 * i, w->count, k->term));
            TRY(dev_fold(&k->d, y, &x, 1, w->add || r > 0 || i > 0));
        }
        if (!w->rows) continue;
        TRY(make(k, w, r, 1, w->n_rows[r] * w->width, k->term));
        TRY(make_ids(k, w, r, k->ids));
        TRY(dev_embed_bwd(&k->d, tensor_2d(k->want, DT_F32, w->vocab, w->width), tensor_1d(k->ids, DT_I32, w->n_rows[r]),
                          tensor_2d(k->term, DT_F32, w->n_rows[r], w->width)));
    }
    TRY(dev_copy_out(&k->d, k->got, own, (size_t)n * 4));
    TRY(dev_copy_out(&k->d, k->expect, k->want + lo, (size_t)n * 4));
    for (int64_t i = 0; i < n; i++)
        if (memcmp(&k->got[i], &k->expect[i], 4) != 0)
            FAIL(ERR_INTERNAL, "fold %lld of %d of %d ranks%s%s%s: element %lld of %lld..%lld of %lld (width %lld): %.9g, not %.9g",
                 (long long)number, w->n, k->size, w->x ? ", x" : "", w->rows ? ", rows" : "", w->add ? ", add" : "",
                 (long long)(lo + i), (long long)lo, (long long)(lo + n), (long long)w->count, (long long)w->width,
                 (double)k->got[i], (double)k->expect[i]);
    return 0;
}

/* Parts one after the other, with gaps; what is gathered is taken and written over at once. Half of them beside other work. */
static int gather_once(struct rank *k, struct rng *rng) {
    enum { PARTS = 5 };
    const struct round w = {.seed = rng_u32(rng)};
    const int64_t parts = up_to(rng, PARTS), bytes = rng_below(rng, 2) ? k->most * 4 : any_size(rng, k->most * 4);
    size_t at[PARTS * (MOST + 1)];
    for (int64_t i = 0; i < parts; i++) {
        int64_t cut[MOST + 1];
        const int64_t from = bytes * i / parts, room = bytes * (i + 1) / parts - from;
        const int64_t n = rng_below(rng, 2) ? room : up_to(rng, room);
        draw_cuts(rng, cut, k->size, n);
        for (int r = 0; r <= k->size; r++) at[i * (k->size + 1) + r] = (size_t)(from + cut[r]);
    }
    TRY(make(k, &w, 0, 0, (bytes + 3) / 4, k->want));
    for (int64_t i = 0; i < parts; i++) {
        const size_t *const own = at + i * (k->size + 1) + k->rank;
        TRY(dev_copy(&k->d, k->whole + own[0], (const char *)k->want + own[0], own[1] - own[0]));
    }
    const bool beside = rng_below(rng, 2);
    int64_t ticket = 0;
    if (beside) {
        TRY(collective_gather_begin(k->g, k->whole, at, parts, &ticket));
        TRY(dev_zero(&k->d, k->copy, (size_t)bytes));
        TRY(collective_gather_end(k->g));
    } else {
        TRY(collective_all_gather(k->g, k->whole, at, parts));
    }
    TRY(dev_copy(&k->d, k->copy, k->whole, (size_t)bytes));
    TRY(collective_reuse(k->g, ticket));
    for (int64_t i = 0; i < parts; i++) {
        const size_t *const own = at + i * (k->size + 1) + k->rank;
        TRY(dev_zero(&k->d, k->whole + own[0], own[1] - own[0]));
    }
    TRY(dev_copy_out(&k->d, k->got, k->copy, (size_t)bytes));
    TRY(dev_copy_out(&k->d, k->expect, k->want, (size_t)bytes));
    for (int64_t i = 0; i < parts; i++) {
        const size_t *const part = at + i * (k->size + 1), from = part[0], n = part[k->size] - from;
        if (memcmp((char *)k->got + from, (char *)k->expect + from, n) != 0)
            FAIL(ERR_INTERNAL, "all-gather: other bytes in part %lld of %lld, %zu bytes", (long long)i, (long long)parts, n);
    }
    return 0;
}

/* Columns of all ranks, also added to others, in place now and then, from memory that no other rank can read; against
 * dev_join_columns of all of them on one process. */
static int gather_columns_once(struct rank *k, struct rng *rng) {
    const struct round w = {.seed = rng_u32(rng)};
    const int64_t unit = rng_below(rng, 4) ? 8 : 1, most = (k->most / 2 - 1) / unit,
                  columns = any_size(rng, most < 9000 ? most : 9000);
    const int64_t rows = any_size(rng, most / columns), all = columns * unit, count = rows * all, shift = rng_below(rng, 4) == 0;
    const enum dtype dt = rng_below(rng, 2) ? DT_BF16 : DT_F32;
    const bool from = dt == DT_F32 && rng_below(rng, 2), same = rng_below(rng, 2);
    const size_t bytes = (size_t)count * dtype_size(dt);
    float *const base = same ? (float *)(void *)k->copy : k->term;
    struct join_columns_args a = {.n = k->size}, want;
    int64_t cut[MOST + 1];
    if (!collective_has_graphs(k->g)) return 0;
    draw_cuts(rng, cut, k->size, columns);
    for (int r = 0; r <= k->size; r++) a.cut[r] = cut[r] * unit;
    TRY(make(k, &w, 0, 0, count, k->want));
    const struct tensor blocks = tensor_1d(dt == DT_F32 ? k->want : (float *)(void *)k->whole, dt, count);
    if (dt == DT_BF16) TRY(dev_cast(&k->d, blocks, tensor_1d(k->want, DT_F32, count)));
    want = a;
    want.y = tensor_2d(k->term + k->most / 2 + shift, dt, rows, all);
    want.x = blocks;
    if (from) {
        TRY(make(k, &w, 1, 0, count, base + shift));
        want.from = tensor_2d(base + shift, DT_F32, rows, all);
    }
    TRY(dev_join_columns(&k->d, &want));
    a.y = tensor_2d((float *)(void *)k->copy + shift, dt, rows, all);
    a.x = tensor_1d((float *)(void *)k->whole + k->most / 2 + shift, dt, count);
    a.from = want.from;
    const size_t lo = (size_t)(a.cut[k->rank] * rows) * dtype_size(dt), hi = (size_t)(a.cut[k->rank + 1] * rows) * dtype_size(dt);
    TRY(dev_copy(&k->d, (char *)a.x.data + lo, (char *)blocks.data + lo, hi - lo));
    if (!from) TRY(dev_zero(&k->d, a.y.data, bytes));
    TRY(collective_gather_columns(k->g, &a));
    TRY(dev_zero(&k->d, a.x.data, bytes));
    TRY(dev_copy_out(&k->d, k->got, a.y.data, bytes));
    TRY(dev_copy_out(&k->d, k->expect, want.y.data, bytes));
    TRY(collective_on_time(k->g));
    if (memcmp(k->got, k->expect, bytes) != 0)
        FAIL(ERR_INTERNAL, "other bits in %lld columns of %lld rows of %zu bytes%s", (long long)all, (long long)rows, bytes,
             from ? ", added" : "");
    return 0;
}

/* Each rank has something for each other one, or nothing; what it gave is written over at once. */
static int exchange_once(struct rank *k, struct rng *rng) {
    const struct round w = {.seed = rng_u32(rng)};
    const int64_t room = k->most * 4 / k->size;
    size_t at[MOST * MOST], bytes[MOST * MOST], to = 0;
    for (int s = 0; s < k->size; s++) {
        int64_t cut[MOST + 1];
        draw_cuts(rng, cut, k->size, rng_below(rng, 2) ? room : any_size(rng, room));
        for (int r = 0; r < k->size; r++) {
            at[s * k->size + r] = (size_t)cut[r];
            bytes[s * k->size + r] = (size_t)(cut[r + 1] - cut[r]);
        }
    }
    TRY(make(k, &w, k->rank, 0, room / 4, (float *)(void *)k->whole));
    TRY(dev_zero(&k->d, k->copy, (size_t)k->most * 4));
    TRY(collective_exchange(k->g, &(struct dev_exchange){k->whole, at, bytes, k->copy}));
    TRY(dev_zero(&k->d, k->whole, (size_t)room));
    TRY(dev_copy_out(&k->d, k->got, k->copy, (size_t)k->most * 4));
    for (int r = 0; r < k->size; r++) {
        const int pair = r * k->size + k->rank;
        TRY(dev_zero(&k->d, k->want, (size_t)room));
        TRY(make(k, &w, r, 0, room / 4, k->want));
        TRY(dev_copy_out(&k->d, k->expect, k->want, (size_t)room));
        const size_t whole = (size_t)room / 4 * 4, end = at[pair] + bytes[pair], n = end > whole ? end - whole : 0; /* not made */
        if (bytes[pair] > n && memcmp((char *)k->got + to, (char *)k->expect + at[pair], bytes[pair] - n) != 0)
            FAIL(ERR_INTERNAL, "all-to-all: other bytes from rank %d to %d, %zu bytes", r, k->rank, bytes[pair]);
        to += bytes[pair];
    }
    return 0;
}

/* Columns of the second group, in FEW_ROWS rows; x: this rank's. */
static struct join_columns_args few_columns(const struct rank *k, void *x) {
    const int64_t columns = FEW / FEW_ROWS, n = collective_size(k->few);
    struct join_columns_args a = {.y = tensor_2d(k->few_whole, DT_F32, FEW_ROWS, columns), .n = (int)n};
    a.x = tensor_1d(x, DT_F32, FEW);
    for (int r = 0; r <= n; r++) a.cut[r] = r < n ? columns * r / n / 4 * 4 : columns;
    return a;
}

/* This rank's bytes to where they are gathered from; and gathers. */
static int gather_part(struct rank *k) {
    const struct join_columns_args a = few_columns(k, k->few_part);
    TRY(dev_copy(&k->d, k->few_part, k->few_source, FEW * sizeof *k->few_part));
    return collective_gather_columns(k->few, &a);
}

/* The same in a CUDA graph, which is made at the second call and replayed, twice each time: the first replay's bytes are not looked
 * at, but written over at once. */
static int gather_in_graph(struct rank *k) {
    if (k->n_replays++ == 0 || !dev_has_graphs(&k->d)) return gather_part(k);
    if (!k->graph) {
        TRY(dev_graph_begin(&k->d));
        const int rc = gather_part(k), end = dev_graph_end(&k->d, &k->graph);
        TRY(rc);
        TRY(end);
    }
    for (int i = 0; i < 2; i++) TRY(dev_graph_run(&k->d, k->graph));
    return 0;
}

/* v, of whose blocks this rank sends its own, in rows. */
static int gather_few_columns(struct rank *k, const uint32_t *v, uint32_t *want) {
    const struct join_columns_args a = few_columns(k, NULL);
    const int r = collective_rank(k->few);
    const size_t lo = (size_t)(a.cut[r] * FEW_ROWS), hi = (size_t)(a.cut[r + 1] * FEW_ROWS);
    for (int b = 0; b < a.n; b++)
        for (int64_t row = 0, width = a.cut[b + 1] - a.cut[b]; row < FEW_ROWS; row++)
            memcpy(want + row * a.y.dim[1] + a.cut[b], v + a.cut[b] * FEW_ROWS + row * width, (size_t)width * sizeof *v);
    TRY(dev_copy_in(&k->d, k->few_source + lo, v + lo, (hi - lo) * sizeof *v));
    return gather_in_graph(k);
}

static int gather_few_bytes(struct rank *k, const uint32_t *v, uint32_t *want) {
    size_t at[MOST + 1];
    for (int r = 0, n = collective_size(k->few); r <= n; r++) at[r] = (size_t)(FEW * r / n) * sizeof *v;
    const size_t lo = at[collective_rank(k->few)], n = at[collective_rank(k->few) + 1] - lo;
    memcpy(want, v, FEW * sizeof *v);
    TRY(dev_copy_in(&k->d, (char *)k->few_whole + lo, (const char *)v + lo, n));
    return collective_all_gather(k->few, k->few_whole, at, 1);
}

/* An all-gather of the second group, between folds of the first. */
static int gather_few(struct rank *k, uint32_t seed) {
    uint32_t *const v = xmalloc(3 * FEW * sizeof *v), *const got = v + FEW, *const want = got + FEW;
    int rc = 0;
    if (!k->few) goto out;
    for (uint32_t i = 0; i < FEW; i++) v[i] = (seed + i) * 2654435761u & ~1u; /* no word is all ones */
    TRYG(dev_zero(&k->d, k->few_whole, FEW * sizeof *v), out);
    TRYG((collective_has_graphs(k->few) ? gather_few_columns : gather_few_bytes)(k, v, want), out);
    TRYG(dev_copy_out(&k->d, got, k->few_whole, FEW * sizeof *got), out);
    TRYG(collective_on_time(k->few), out);
    if (memcmp(got, want, FEW * sizeof *v) != 0) rc = err_set(ERR_INTERNAL, __FILE__, __LINE__, "other bytes in the second group");
out:
    free(v);
    return rc;
}

static int run_rounds(struct rank *k, int64_t rounds) {
    struct rng rng = {.seed = 7, .stream = RNG_TEST}, alone = {.seed = (uint64_t)k->rank, .stream = RNG_TRACE};
    int64_t ticket[SLOTS] = {0};
    struct round w[FLIGHT];
    int slot = 0;
    for (int64_t done = 0; done < rounds;) {
        const int flight = 1 + (int)rng_below(&rng, FLIGHT);
        for (int f = 0; f < flight; f++, slot = (slot + 1) % SLOTS) {
            w[f] = draw(k, &rng);
            if (rng_below(&alone, 4) == 0) usleep((useconds_t)rng_below(&alone, 3000)); /* ranks are late in turn */
            TRY(collective_reuse(k->g, ticket[slot]));
            TRY(start_fold(k, &w[f], slot, k->own[f] + w[f].shift[1], &ticket[slot]));
            if (rng_below(&rng, 4) == 0) TRY(gather_once(k, &rng));
            for (uint64_t n = rng_below(&rng, 4); n > 0; n--) TRY(gather_columns_once(k, &rng));
            if (rng_below(&rng, 4) == 0) TRY(exchange_once(k, &rng));
            const uint32_t seed = rng_u32(&rng);
            if (seed % 4 == 0) TRY(gather_few(k, seed));
        }
        TRY(collective_join(k->g));
        for (int f = 0; f < flight; f++) TRY(check_fold(k, &w[f], k->own[f] + w[f].shift[1], done++));
    }
    if (k->rank == 0)
        printf("%s, %d ranks through %s: %lld folds, all-gathers and all-to-alls: equal bits\n", k->d.describe, k->size,
               collective_way(k->g), (long long)rounds);
    return 0;
}

/* A bucket that is not in shared memory, or makes no sense, is refused before a byte moves. */
static int check_refused(struct rank *k) {
    int64_t cut[MOST + 1], ticket;
    for (int r = 0; r <= k->size; r++) cut[r] = r;
    const struct dev_bucket good = {.x = k->slot[0], .cut = cut, .n = 1, .own = k->own[0]};
    struct dev_bucket bad[7] = {good, good, good, good, good, good, good};
    int many[MOST], two[MOST];
    for (int r = 0; r < MOST; r++) many[r] = DEV_BUCKET_TIMES + 1, two[r] = 2;
    bad[0].x = k->own[0];
    bad[1].n = k->size + 1;
    bad[2].x = NULL;
    bad[3].own = NULL;
    for (int i = 4; i < 7; i++) bad[i].times = i == 4 ? many : two;
    bad[4].stride = 64;
    bad[5].stride = 63;
    bad[6].stride = 1024 * k->most;
    bad[6].n = k->size;
    for (int i = 0; i < 7; i++)
        if (collective_fold(k->g, &bad[i], &ticket) != ERR_INVAL) FAIL(ERR_INTERNAL, "bad bucket %d is taken", i);
    return 0;
}

/* A rank that is left alone does not wait in close: with a fold, what waits for it, another fold behind that, and an all-gather of
 * the second group. */
static int check_abandoned(struct rank *k) {
    int64_t cut[MOST + 1], ticket;
    for (int r = 0; r <= k->size; r++) cut[r] = k->most * r / k->size;
    const struct dev_bucket b = {.x = k->slot[0], .cut = cut, .n = k->size, .own = k->own[0]};
    if (k->rank == 0) {
        size_t at[MOST + 1];
        for (int r = 0; r <= k->size; r++) at[r] = (size_t)r * 4;
        for (int i = 0; i < 2; i++) {
            TRY(collective_fold(k->g, &b, &ticket));
            TRY(collective_reuse(k->g, ticket));
        }
        TRY(collective_gather_begin(k->few, k->few_whole, at, 1, &ticket));
        TRY(collective_gather_end(k->few));
        const struct join_columns_args columns = few_columns(k, k->few_source);
        if (collective_has_graphs(k->few)) TRY(collective_gather_columns(k->few, &columns));
        const double start = clock_now();
        collective_close(k->g);
        collective_close(k->few);
        k->g = k->few = NULL;
        TRY(dev_sync(&k->d));
        if (clock_now() - start > 5) FAIL(ERR_INTERNAL, "close took %.1f s", clock_now() - start);
    }
    return comm_barrier(k->comm);
}

/* ---- what it takes ---- */

enum { GEMM = 4096, FOLDS = 40 };

static int gemms(struct rank *k, int n) {
    const struct tensor x = tensor_2d(k->term, DT_BF16, GEMM, GEMM), y = tensor_2d(k->want, DT_BF16, GEMM, GEMM);
    const struct weight w = {k->term, DT_BF16, GEMM, GEMM, 0, 0}; /* a GPU's are plain */
    for (int i = 0; i < n; i++) TRY(dev_matmul_fwd(&k->d, y, x, w, TENSOR_NONE, false));
    return 0;
}

/* FOLDS folds or gathers of `bytes`, with `n_gemms` GEMMs before each. */
static int bench_once(struct rank *k, int64_t bytes, bool folds, int n_gemms, double *seconds) {
    const int64_t count = bytes / 4;
    int64_t cut[MOST + 1], ticket[SLOTS] = {0};
    size_t at[MOST + 1];
    for (int r = 0; r <= k->size; r++) cut[r] = count * r / k->size / 64 * 64;
    cut[k->size] = count;
    for (int r = 0; r <= k->size; r++) at[r] = (size_t)cut[r] * 4;
    const struct dev_bucket whole = {.cut = cut, .n = k->size, .own = k->own[0], .add = true};
    struct join_columns_args columns = {
        .y = tensor_2d(k->want, DT_F32, 16, count / 16), .x = tensor_1d(k->whole, DT_F32, count / 16 * 16), .n = k->size};
    for (int r = 0; r <= k->size; r++) columns.cut[r] = r < k->size ? count / 16 * r / k->size / 4 * 4 : count / 16;
    for (int pass = 0; pass < 2; pass++) { /* the first one warms up */
        TRY(dev_sync(&k->d));
        TRY(comm_barrier(k->comm));
        const double start = clock_now();
        for (int i = 0; i < FOLDS; i++) {
            struct dev_bucket b = whole;
            b.x = k->slot[i % SLOTS];
            TRY(gemms(k, n_gemms));
            if (folds) TRY(collective_reuse(k->g, ticket[i % SLOTS]));
            if (folds) TRY(collective_fold(k->g, &b, &ticket[i % SLOTS]));
            else if (bytes && collective_has_graphs(k->g)) TRY(collective_gather_columns(k->g, &columns));
            else if (bytes) TRY(collective_all_gather(k->g, k->whole, at, 1));
        }
        TRY(collective_join(k->g));
        TRY(dev_sync(&k->d));
        *seconds = (clock_now() - start) / FOLDS;
    }
    return 0;
}

static int bench(struct rank *k) {
    const double part = (double)(k->size - 1) / k->size;
    double alone, fold, both;
    if (k->most < GEMM * GEMM) FAIL(ERR_INVAL, "the bench needs %d MB", GEMM * GEMM >> 18);
    TRY(dev_cast(&k->d, tensor_1d(k->term, DT_BF16, GEMM * GEMM), tensor_1d(k->base, DT_F32, GEMM * GEMM)));
    for (int64_t bytes = 4096; bytes <= k->most * 4; bytes *= 4) {
        const double pulled = (double)bytes * part;
        TRY(bench_once(k, bytes, true, 0, &fold));
        TRY(bench_once(k, bytes, false, 0, &both));
        if (k->rank == 0)
            printf("%11lld bytes: a fold %8.1f us, %6.1f GB/s pulled; an all-gather %8.1f us, %6.1f GB/s\n", (long long)bytes,
                   fold * 1e6, pulled / fold / 1e9, both * 1e6, pulled / both / 1e9);
    }
    for (int n = 4; n <= 64; n *= 4) {
        const int64_t bytes = k->most * 4;
        TRY(bench_once(k, 0, false, n, &alone));
        TRY(bench_once(k, bytes, true, n, &both));
        if (k->rank == 0)
            printf("%d GEMMs of %d: %.1f us alone, %.1f us beside a fold of %lld bytes: %.1f %% more\n", n, GEMM, alone * 1e6,
                   both * 1e6, (long long)bytes, (both / alone - 1) * 100);
    }
    return 0;
}

/* The environment says how a group is to open: the way that it goes, or what it is refused with. */
#define WANT_WAY "TEST_DEV_GROUP_WAY"
#define WANT_REFUSED "TEST_DEV_GROUP_REFUSED"

/* rc: of opening. *done: it was refused, as it should. */
static int check_way(struct rank *k, int rc, bool *done) {
    const char *way = getenv(WANT_WAY), *refused = getenv(WANT_REFUSED);
    *done = refused && rc < 0 && strstr(err_msg(), refused);
    if (*done) return 0;
    TRY(rc);
    if (refused) FAIL(ERR_INTERNAL, "the group goes through %s, and is not refused", collective_way(k->g));
    if (way && strcmp(collective_way(k->g), way) != 0) FAIL(ERR_INTERNAL, "the way is %s, not %s", collective_way(k->g), way);
    return 0;
}

/* A group through memory that nobody has is opened, and that is all. */
static int only_open(struct rank *k, const char *device) {
    bool done;
    TRY(open_device(k, device));
    TRY(check_way(k, collective_open(&k->g, &k->d, k->comm), &done));
    CHECK(fake_opened == 1);
    return 0;
}

/* rank RANK SIZE ADDRESS KEY DEVICE ROUNDS MB; ROUNDS 0: bench, -1: abandoned. */
static int be_rank(char **argv) {
    struct rank k = {.rank = atoi(argv[2]), .size = atoi(argv[3])};
    const struct comm_args args = {.rank = k.rank, .size = k.size, .start_s = 60, .deadline_s = 60, .job = ""};
    struct comm_args a = args;
    const int64_t rounds = atoll(argv[7]), most = (int64_t)(atof(argv[8]) * 0x1p18);
    snprintf(a.where.address, sizeof a.where.address, "%s", argv[4]);
    snprintf(a.where.key, sizeof a.where.key, "%s", argv[5]);
    self = &k;
    fake_nccl.transport = collective_host;
    fake_nccl.transport.turn = fake_turn;
    fake_nccl.transport.exchange = fake_exchange;
    fake_nccl.transport.fold = fake_fold;
    fake_nccl.transport.add_rows = fake_add_rows;
    int rc = comm_open(&k.comm, &a);
    bool done = false;
    if (rc >= 0 && strncmp(argv[6], "peers:", 6) == 0) rc = only_open(&k, argv[6]), done = true;
    else if (rc >= 0) rc = check_way(&k, open_rank(&k, argv[6], most, most < MAX_ROWS ? most : MAX_ROWS), &done);
    if (rc >= 0 && rounds > 0 && !done) rc = check_refused(&k);
    if (rc >= 0 && !done) rc = rounds > 0 ? run_rounds(&k, rounds) : rounds ? check_abandoned(&k) : bench(&k);
    if (rc >= 0) rc = comm_barrier(k.comm);
    if (rc < 0) fprintf(stderr, "rank %d: %s\n", k.rank, err_msg());
    close_rank(&k);
    comm_close(k.comm);
    return rc < 0;
}

/* ---- a group ---- */

/* Whether all ranks ended well. */
static bool run_group(const char *device, int size, int64_t rounds, const char *mb) {
    const struct coordinator_args a = {.size = size, .start_s = 60, .deadline_s = 20};
    struct coordinator *hub;
    pid_t pid[MOST];
    bool good = true;
    if (coordinator_open(&hub, &a) < 0) fail_msg("%s", err_msg());
    for (int r = 0; r < size; r++) {
        const struct comm_where *w = coordinator_where(hub);
        char rank[16], ranks[16], n[32];
        char *const argv[] = {own_path,
                              "rank",
                              rank,
                              ranks,
                              (char *)(uintptr_t)w->address,
                              (char *)(uintptr_t)w->key,
                              (char *)(uintptr_t)device,
                              n,
                              (char *)(uintptr_t)mb,
                              NULL};
        snprintf(rank, sizeof rank, "%d", r);
        snprintf(ranks, sizeof ranks, "%d", size);
        snprintf(n, sizeof n, "%lld", (long long)rounds);
        if (posix_spawn(&pid[r], own_path, NULL, NULL, argv, environ) != 0) fail_msg("cannot start a rank");
    }
    good = coordinator_join(hub, NULL, NULL) >= 0;
    if (!good) fprintf(stderr, "%s\n", err_msg());
    for (int i = 0; i < size; i++) { /* one that fails ends the others */
        int status;
        const pid_t ended = wait(&status);
        const bool fine = WIFEXITED(status) && WEXITSTATUS(status) == 0;
        for (int r = 0; r < size; r++)
            if (pid[r] == ended) pid[r] = 0;
        for (int r = 0; good && !fine && r < size; r++)
            if (pid[r]) kill(pid[r], SIGKILL);
        good = good && fine;
    }
    coordinator_close(hub, false);
    return good;
}

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { ROUNDS = 12 };
#else
enum { ROUNDS = 60 };
#endif

static void any_number_of_ranks(void **state) {
    (void)state;
    for (int size = 1; size <= 4; size++) assert_true(run_group("cpu", size, ROUNDS, size == 2 ? "12" : "1"));
}
static void through_host_memory(void **state) {
    (void)state;
    assert_true(run_group("far", 2, ROUNDS / 2, "12"));
    assert_true(run_group("far", 3, ROUNDS, "1"));
}
static void the_reference(void **state) {
    (void)state;
    assert_true(run_group("ref", 3, ROUNDS / 2, "0.02"));
}

static void the_way(void **state) {
    static const struct {
        const char *device, *asked, *way, *refused;
    } cases[] = {
        {"nccl", "", "NCCL 2.99.1", NULL},
        {"nccl", "nccl", "NCCL 2.99.1", NULL},
        {"nccl", "host", "the host", NULL},
        {"nccl-without", "", "the host", NULL},
        {"nccl-other", "", "the host", NULL},
        {"cpu", "", "the host", NULL},
        {"peers-open", "", "the host", NULL},
        {"peers-map", "", "the host", NULL},
        {"peers-greet", "", "the host", NULL},
        {"peers:each", "", "peers' memory, gathers in CUDA graphs", NULL},
        {"peers:each", "peers", "peers' memory", NULL},
        {"peers:shared", "", "peers' memory", NULL},
        {"peers:shared", "peers_graph", "peers' memory, gathers in CUDA graphs", NULL},
        {"peers-open", "peers", NULL, "rank 1"},
        {"peers-map", "peers", NULL, "it cannot read the others"},
        {"peers-greet", "peers", NULL, "what it read was something else"},
        {"peers-map", "peers_graph", NULL, "VERLC_GROUP=peers_graph is not possible here: rank 1"},
        {"nccl-without", "nccl", NULL, "VERLC_GROUP=nccl is not possible here: rank 1 ("},
        {"nccl-other", "nccl", NULL, "its NCCL is version 29901, that of rank 1"},
        {"nccl", "peers", NULL, "VERLC_GROUP=peers is not possible here: rank 0"},
        {"cpu", "nccl", NULL, "the cpu backend has no NCCL"},
        {"cpu", "fast", NULL, "VERLC_GROUP=fast: expected peers, nccl, host or peers_graph"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        setenv("VERLC_GROUP", cases[i].asked, 1);
        if (cases[i].way) setenv(WANT_WAY, cases[i].way, 1);
        if (cases[i].refused) setenv(WANT_REFUSED, cases[i].refused, 1);
        const bool good = run_group(cases[i].device, 3, i == 0 ? ROUNDS / 2 : 6, i == 0 ? "9" : "1");
        unsetenv("VERLC_GROUP");
        unsetenv(WANT_WAY);
        unsetenv(WANT_REFUSED);
        if (!good) fail_msg("%s, VERLC_GROUP=%s", cases[i].device, cases[i].asked);
    }
}

/* A plan counts the way that is asked for. */
static void bytes_of_the_way(void **state) {
    struct dev d;
    struct dev_ops ops;
    (void)state;
    if (dev_open_named(&d, "cpu", 1, NULL) < 0) fail_msg("%s", err_msg());
    ops = *d.ops;
    ops.peers = &fake_peers;
    ops.nccl = &fake_nccl;
    d.ops = &ops;
    assert_int_equal(collective_bytes(&d, 4, 4), 1);
    assert_int_equal(collective_bytes(&d, 4, 2), 4);
    assert_int_equal(collective_bytes(&d, 1, 1), 0);
    setenv("VERLC_GROUP", "nccl", 1);
    assert_int_equal(collective_bytes(&d, 4, 4), 4);
    unsetenv("VERLC_GROUP");
    dev_close(&d);
}

/* Small buckets, some of several pieces, and large ones; then a rank that is left alone. */
static bool run_gpus(int n) {
    static const struct {
        int64_t rounds;
        const char *mb;
    } runs[] = {{300, "1"}, {120, "48"}, {24, "300"}, {-1, "64"}};
    char device[32];
    bool good = n >= 2 && n <= MOST;
    snprintf(device, sizeof device, "cuda:%d", n);
    for (size_t i = 0; good && i < sizeof runs / sizeof *runs; i++) good = run_group(device, n, runs[i].rounds, runs[i].mb);
    printf("%s: %s\n", device, good ? "all is well" : "FAILED");
    return good;
}

int main(int argc, char **argv) {
    const ssize_t n = readlink("/proc/self/exe", own_path, sizeof own_path - 1);
    if (n <= 0) return 1;
    if (argc == 9 && strcmp(argv[1], "rank") == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        return be_rank(argv);
    }
    if (argc == 3 && strcmp(argv[1], "cuda") == 0) return !run_gpus(atoi(argv[2]));
    if (argc == 6 && strcmp(argv[1], "run") == 0) return !run_group(argv[2], atoi(argv[3]), atoll(argv[4]), argv[5]);
    if (argc == 4 && strcmp(argv[1], "abandoned") == 0) return !run_group(argv[2], atoi(argv[3]), -1, "64");
    if (argc == 5 && strcmp(argv[1], "bench") == 0) return !run_group(argv[2], atoi(argv[3]), 0, argv[4]);
    if (argc > 1) {
        fprintf(
            stderr,
            "usage: test_device_group [cuda N | run DEVICE RANKS ROUNDS MB | abandoned DEVICE RANKS | bench DEVICE RANKS MB]\n");
        return 2;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_number_of_ranks), cmocka_unit_test(through_host_memory),
        cmocka_unit_test(the_reference),       cmocka_unit_test(the_way),
        cmocka_unit_test(bytes_of_the_way),
    };
    return cmocka_run_group_tests_name("dev group", tests, NULL, NULL);
}
