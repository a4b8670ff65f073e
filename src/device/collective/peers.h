/* peers.h - what collective.c asks of a backend whose device reads the memory of other processes of its host.
 *
 * Everything is queued; nothing waits for a peer on the host. Tickets count up by one; a fold and a gather each take the next,
 * which is the same on all ranks. */
#ifndef VERLC_DEVICE_COLLECTIVE_PEERS_H
#define VERLC_DEVICE_COLLECTIVE_PEERS_H

#include "device/collective/collective.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Memory of a process, for the others of its host. Plain bytes. */
struct dev_peer_memory {
    unsigned char handle[64];
    uint64_t offset; /* of the memory in what the handle opens */
};

struct dev_peer_ops {
    size_t (*bytes)(void); /* device memory that it takes, of any number of ranks */
    /* *flags: memory of its own that every peer writes to */
    int (*open)(struct dev *d, int rank, int size, void **peers, struct dev_peer_memory *flags);
    int (*flags)(void *peers, int rank, const struct dev_peer_memory *flags); /* that of each other rank, once; and greets it */
    /* After flags of all ranks on all of them: whether every greeting came. ERR_UNSUPPORTED: what one rank writes the other does
     * not read, as with an IOMMU between them. */
    int (*greeted)(void *peers);
    void (*close)(void *peers); /* also after an error, with work queued */
    int (*share)(void *peers, void *p, size_t bytes, struct dev_peer_memory *m);
    int (*map)(void *peers, const struct dev_peer_memory *m, void **p); /* a peer's; until it is closed */
    /* x, ids, dx: of every rank (size), b's where it is this one */
    int (*fold)(void *peers, const struct dev_bucket *b, const void *const *x, const void *const *ids, const void *const *dx);
    int (*reuse)(void *peers, int64_t ticket);
    int (*join)(void *peers);
    int (*gather)(void *peers, void *const *whole, const size_t *at, int64_t n_parts);
    int (*gathered)(void *peers); /* the compute stream waits for the last one */
    /* dev_join_columns of the blocks that ranks have in their x, on the compute stream alone, so that a CUDA graph may hold it.
     * graphs: once, after greeted, and on all ranks before any of these, of at most DEV_MOST_COLUMNS ranks; a wait takes deadline_s
     * at most. */
    int (*graphs)(void *peers, double deadline_s);
    int (*gather_columns)(void *peers, const struct join_columns_args *a);
    /* -1: none of these has ended without a rank. A rank: that one did not come in time; size: close has ended it. */
    int (*lost)(void *peers);
    /* The next operation takes stamps i and i + 1 (dev_ops.stamp): once this rank's bytes are there, and at its end. */
    void (*stamp)(void *peers, int64_t i);
};

#ifdef __cplusplus
}
#endif
#endif
