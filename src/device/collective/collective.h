/* collective.h - ranks that exchange device memory: the ordered fold of gradients, all-gather, and all-to-all.
 *
 * Bytes move between ranks; nothing is added on the way. The owner of an element adds its summands in rank order, each sum
 * rounded once, so any number of ranks gives the bits of dev_fold and dev_embed_bwd on one.
 * GPUs of one host that reach each other read each other's memory by copy engines, other GPUs send by NCCL; both on streams of
 * the group's own, overlapped with the compute stream. All other devices go through host memory and comm, and a call returns when
 * its bytes have arrived.
 *
 * Collective calls are made by every rank, in the same order; ranks that are in two groups make those of both in one order.
 * Invariant: a rank's own range is written by that rank alone. */
#ifndef VERLC_DEVICE_COLLECTIVE_H
#define VERLC_DEVICE_COLLECTIVE_H

#include "device/device.h"

#ifdef __cplusplus
extern "C" {
#endif

struct comm;
struct collective;

/* Collective. d and c are borrowed. Of GPUs one log line says which way their bytes go, and why no faster one; VERLC_GROUP of
 * rank 0 (peers, nccl, host, or peers_graph: the first, with gathers that CUDA graphs hold) asks for one: ERR_UNSUPPORTED where it
 * is not possible. ERR_RANK, ERR_TIMEOUT: comm's. */
int collective_open(struct collective **out, struct dev *d, struct comm *c);
/* NULL ok. Not collective: what is queued comes to its end, whatever the others do, in other groups of this device as well. Where
 * they shall get what it sends, all ranks reach this point (a barrier) with nothing queued; until then leave shared memory as it
 * is. */
void collective_close(struct collective *g);
int collective_rank(const struct collective *g);
int collective_size(const struct collective *g);
struct comm *collective_comm(struct collective *g);
const char *collective_way(const struct collective *g); /* for people: "peers' memory", "NCCL 2.28.9", "the host"; "": one rank */
/* Device memory, at most, that a group of `size` ranks, `local` of them on this host, takes in addition to what they share: by
 * NCCL where VERLC_GROUP says so, else by the fastest way there, or through the host. */
size_t collective_bytes(const struct dev *d, int size, int local);

/* Collective, with equal sizes: peers may read p (bytes), memory of dev_alloc, until the group is closed. */
int collective_share(struct collective *g, void *p, size_t bytes);

/* A part of a gradient (a bucket) of which ranks 0..n-1 each have a summand, or several, in shared memory at the same offset. Each
 * rank owns some of its elements. A fold is fastest where own and x + cut[rank] are congruent modulo 16 bytes. */
enum { DEV_BUCKET_TIMES = 64 };
struct dev_bucket {
    const float *x;     /* (cut[size]) f32: this rank's summand; NULL: rows alone */
    const int64_t *cut; /* (size + 1) host, ascending: rank r owns elements cut[r]..cut[r + 1] */
    int n;              /* ranks 0..n-1 have one; 1..size. The others' x, ids and dx are not read, but are given too */
    const int *times;   /* (n) host: how many summands each has, 1..DEV_BUCKET_TIMES, added one after the other; NULL: one */
    int64_t stride;     /* with times: elements from a summand to the next, a multiple of 64, at least cut[size] */
    float *own;         /* (cut[rank + 1] - cut[rank]) f32, device: own = ((own + x_0) + x_1) + ... */
    bool add;           /* false: x_0 is copied (rows alone: zero first) */
    /* Rows of the token embedding: after x_r those of rank r are added, as dev_embed_bwd does: equal ids summed first, from 0.
     * NULL: none. Shared memory. */
    const int32_t *ids;    /* (n_rows[rank]) */
    const float *dx;       /* (n_rows[rank], width) */
    const int64_t *n_rows; /* (size), host; 0: none */
    int64_t width;         /* element e of the bucket is row e / width, column e % width of the table, which is the whole bucket */
};

/* Collective. Queued behind what the compute stream has now; overlaps what comes later on it. *b may go. */
int collective_fold(struct collective *g, const struct dev_bucket *b, int64_t *ticket);
/* The compute stream waits until all ranks have read what this fold or gather reads. 0: none. */
int collective_reuse(struct collective *g, int64_t ticket);
/* The compute stream waits for all folds of this rank. */
int collective_join(struct collective *g);
/* Collective. whole: shared memory; part i has rank r's bytes at [at[i * (size + 1) + r], at[i * (size + 1) + r + 1]), host;
 * afterwards every rank has all. Queued behind what the compute stream has now; overlaps what comes later on it. */
int collective_gather_begin(struct collective *g, void *whole, const size_t *at, int64_t n_parts, int64_t *ticket);
/* The compute stream waits until this rank has all of the last one that was begun, and of those before it. */
int collective_gather_end(struct collective *g);
/* Collective. Both, and the compute stream may change this rank's bytes. */
int collective_all_gather(struct collective *g, void *whole, const size_t *at, int64_t n_parts);
/* Collective. dev_join_columns of the blocks that all ranks have in their x, block r of rank r, as work of the compute stream
 * alone, which a CUDA graph may hold; only where collective_has_graphs. x: any device memory; of a NaN another one may come. Also
 * fails as collective_on_time does. */
bool collective_has_graphs(const struct collective *g);
int collective_gather_columns(struct collective *g, const struct join_columns_args *a);
/* Whether all ranks have come to such gathers, as far as the compute stream has done them; else what was gathered is not theirs.
 * ERR_TIMEOUT: a rank did not within comm_deadline_s. ERR_RANK: a group of this device was closed while one waited. */
int collective_on_time(const struct collective *g);

/* What each rank has for each other one, in shared memory at the same offset: rank s has bytes[s * size + r] for rank r, at
 * from + at[s * size + r]. They come to `to` on rank r, by rank, one after the other. All arrays are the same on every rank. */
struct dev_exchange {
    const void *from;
    const size_t *at, *bytes; /* (size, size) host */
    void *to;                 /* device memory that overlaps nothing of these */
};
/* Collective. The compute stream may then read what has come, and change what it has given. */
int collective_exchange(struct collective *g, const struct dev_exchange *x);

#ifdef __cplusplus
}
#endif
#endif
