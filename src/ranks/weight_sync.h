/* weight_sync.h - the weights of a model that some ranks train, sent to ranks that only generate with them.
 *
 * Only what training changes is sent: all compute copies of a model, or those of its adapter. Each training rank sends a share
 * (device/collective/collective.h: by copy engines within a host). Afterwards every rank computes a checksum of its weights; the
 * controller compares. Knows nothing of optimizers, nor when to send.
 * Invariant: all ranks opened the same model on the same kind of device, so the bytes mean the same on each. */
#ifndef VERLC_RANKS_WEIGHT_SYNC_H
#define VERLC_RANKS_WEIGHT_SYNC_H

#include "comm/comm.h"
#include "model/parallel/weight_streaming.h"

struct weight_sync;
struct weight_sync_args { /* borrowed until the close */
    struct dev *dev;
    struct comm *comm;
    struct model *model;
    int trainers;       /* ranks 0..trainers - 1 train it; frozen weights are the same everywhere */
    bool spans;         /* the others generate together: weights go span by span, through room for one of them on each rank */
    struct model *part; /* with spans, of such a rank: its part of model, whose layers have stayed in the files; else NULL */
};
/* Collective over comm. Without spans all have the model whole; with them trainers may have it sharded. */
int weight_sync_open(struct weight_sync **out, const struct weight_sync_args *a);
/* Device bytes of that room; none with an adapter, which goes as a whole. */
size_t weight_sync_room(const struct model_stream_shape *s);
void weight_sync_close(struct weight_sync *w); /* NULL ok */
/* Collective. *sum: dev_checksum of this rank's weights now. */
int weight_sync_send(struct weight_sync *w, uint64_t *sum);

#endif
