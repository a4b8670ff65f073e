/* group_int.h - a group of ranks, for its two files: group.c, and group_host.c, the way through host memory. */
#ifndef VERLC_DEV_GROUP_INT_H
#define VERLC_DEV_GROUP_INT_H

#include "base/err.h"
#include "comm/comm.h"
#include "dev/group.h"

/* The way through host memory: pieces of a bounded size. */
struct group_host {
    char *in, *out;   /* host: a piece from each rank, and to each (own memory only) */
    void *staging;    /* device: the pieces from each rank (own memory only) */
    void *rows;       /* device: rows from other ranks (own memory only) */
    size_t row_bytes; /* of rows */
};

struct dev_group {
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
    void *peers; /* the backend's; NULL: through host memory */
    struct group_host host;
};

size_t group_host_bytes(const struct dev *d, int size);
int group_host_open(struct dev_group *g);
void group_host_close(struct dev_group *g);
int group_host_fold(struct dev_group *g, const struct dev_bucket *b);
int group_host_all_gather(struct dev_group *g, char *whole, const size_t *at, int64_t n_parts);

#endif
