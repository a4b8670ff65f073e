/* collective_int.h - a group of ranks, for its files: collective.c, collective_staged.c (folds of pieces that a transport
 * brings), and
 * collective_host.c (the transport through host memory). */
#ifndef VERLC_DEVICE_COLLECTIVE_INT_H
#define VERLC_DEVICE_COLLECTIVE_INT_H

#include "base/err.h"
#include "comm/comm.h"
#include "device/collective/collective.h"
#include "device/collective/transport.h"

struct collective {
    struct dev *d;
    struct comm *comm;
    int rank, size;
    int64_t ticket; /* the last one */
    struct {
        char *p;
        size_t bytes;
        void **at; /* (size) where each rank's is in this process; peers only */
    } * shared;
    int n_shared;
    void *peers; /* the backend's; NULL: a transport */
    bool graphs; /* it was asked for gathers that CUDA graphs hold */
    const struct dev_transport_ops *move;
    void *t;      /* of move; NULL: one rank */
    char way[64]; /* for people */
};

int collective_staged_fold(struct collective *g, const struct dev_bucket *b);
/* An all-to-all as a gather of peers: rank r's bytes go from of[r] + at[r] to of[rank] + at[r]. from: x->from of each rank. */
static inline void collective_exchange_places(int rank, int size, const struct dev_exchange *x, const void *const *from, void **of,
                                              size_t *at) {
    at[0] = 0;
    for (int r = 0; r < size; r++) {
        const char *const there = (const char *)from[r] + x->at[r * size + rank];
        at[r + 1] = at[r] + x->bytes[r * size + rank];
        of[r] = r == rank ? x->to : (void *)((uintptr_t)there - at[r]); /* read from at[r] on alone */
    }
}
int collective_staged_exchange(struct collective *g, const struct dev_exchange *x);

extern const struct dev_transport_ops collective_host; /* of a group of any device */
size_t collective_host_bytes(const struct dev *d, int size);
int collective_host_open(struct dev *d, struct comm *c, void **t);

#endif
