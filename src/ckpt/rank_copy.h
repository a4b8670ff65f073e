/* rank_copy.h - host memory of rank 0 into which every rank copies its part of something.
 *
 * On one host the others map rank 0's memory and each copies on its own; what is elsewhere goes through comm in pieces of
 * bounded size. One rank: pinned memory and copies. It does not know what the bytes are.
 * Invariant: no byte has two ranks, and after rank_copy_run rank 0 has all of them. */
#ifndef VERLC_CKPT_RANK_COPY_H
#define VERLC_CKPT_RANK_COPY_H

#include "comm/comm.h"
#include "device/device.h"

/* n bytes at `from`, memory that dev_evict takes, belong at byte `to` of the memory. */
struct rank_copy_piece {
    const char *from;
    size_t to, n;
};
struct rank_copy;
/* Collective. c: borrowed; NULL: one rank. bytes: of all, the same everywhere. pieces: of this rank, copied; what they point to is
 * borrowed until the close. ERR_NOMEM: rank 0 has not as much host memory. */
int rank_copy_open(struct rank_copy **out, struct dev *d, struct comm *c, size_t bytes, const struct rank_copy_piece *pieces,
                   int64_t n);
void rank_copy_close(struct rank_copy *r);         /* not collective; NULL ok */
void *rank_copy_memory(const struct rank_copy *r); /* on rank 0 (bytes); NULL elsewhere */
/* Collective: what the pieces have now is in the memory when it returns, until the next one. */
int rank_copy_run(struct rank_copy *r);

#endif
