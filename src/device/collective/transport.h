/* transport.h - what moves bytes between the devices of a group's ranks where none reads another's memory: host memory and comm
 * (collective_host.c), or a library that the backend opens (NCCL: cuda/nccl.cu). collective_staged.c says what moves when, and
 * what is added to what.
 *
 * Everything is queued, and done in this order on this rank; a transport may also have done it when a call returns. All ranks make
 * the same calls with sizes that fit, and tickets count up by one with each begin. */
#ifndef VERLC_DEVICE_COLLECTIVE_TRANSPORT_H
#define VERLC_DEVICE_COLLECTIVE_TRANSPORT_H

#include "device/collective/collective.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes on the device that go to a rank, or room for those that come from it. */
struct dev_part {
    void *p;
    size_t n;
};

/* Memory of the transport for a piece: a slot for each other rank to receive into, one after the other, and half a slot for each
 * to send from. 256-aligned. */
struct dev_slots {
    char *in, *out;
    size_t bytes; /* of a slot */
};

struct dev_transport_ops {
    int (*begin)(void *t);                     /* an operation, behind what the compute stream has now */
    int (*turn)(void *t, struct dev_slots *s); /* a piece: what is in the slots is given up */
    /* Host ids to the device, until the next such call. */
    int (*ids)(void *t, const int32_t *ids, int64_t n, const int32_t **on_device);
    /* y = 0, then as dev_embed_bwd_part: y is sent by the next exchange. */
    int (*sum_rows)(void *t, struct tensor y, int64_t lo, int64_t vocab, struct tensor ids, struct tensor dx);
    /* out[r] to rank r's in[this rank], for each other rank; n 0: nothing. */
    int (*exchange)(void *t, const struct dev_part *out, const struct dev_part *in);
    /* As dev_zero, dev_fold, dev_embed_bwd_part; with what was received. */
    int (*zero)(void *t, void *p, size_t bytes);
    int (*fold)(void *t, struct tensor y, const struct tensor *x, int n, bool add);
    int (*add_rows)(void *t, struct tensor y, int64_t lo, int64_t vocab, struct tensor ids, struct tensor dx);
    int (*end)(void *t); /* of what began last */
    /* Begins, moves as collective_all_gather says, and ends; the compute stream waits for it in `gathered`. */
    int (*gather)(void *t, void *whole, const size_t *at, int64_t n_parts);
    int (*gathered)(void *t);
    int (*reuse)(void *t, int64_t ticket); /* the compute stream waits until this operation has read what it sends and adds */
    int (*join)(void *t);                  /* and until all is done */
    void (*close)(void *t);                /* also after an error, with work queued */
};

/* A backend's transport by NCCL. */
enum { DEV_NCCL_ID = 128 };
struct dev_nccl_args {
    int rank, size;
    const unsigned char *id; /* (DEV_NCCL_ID) rank 0's */
    double deadline_s;       /* of a wait for another rank */
};
struct dev_nccl_ops {
    size_t (*bytes)(int size);                   /* device memory that it takes, NCCL's own included */
    int (*version)(struct dev *d, int *version); /* opens the library; ERR_UNSUPPORTED: there is none that serves */
    int (*id)(struct dev *d, unsigned char *id); /* (DEV_NCCL_ID) */
    int (*open)(struct dev *d, const struct dev_nccl_args *a, void **t); /* collective; returns when all ranks are connected */
    struct dev_transport_ops transport;
};

#ifdef __cplusplus
}
#endif
#endif
