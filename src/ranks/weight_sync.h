/* weight_sync.h - the weights of a model that some ranks train, sent to ranks that only generate with them.
 *
 * Only what training changes is sent: all compute copies of a model, or those of its adapter. Each training rank sends a share
 * (device/collective/collective.h: by copy engines within a host). Afterwards every rank computes a checksum of its weights; the
 * controller compares. Knows nothing of optimizers, nor when to send.
 * Invariant: all ranks opened the same model on the same kind of device, so the bytes mean the same on each. */
#ifndef VERLC_RANKS_WEIGHT_SYNC_H
#define VERLC_RANKS_WEIGHT_SYNC_H

#include "comm/comm.h"
#include "model/parameters.h"

struct weight_sync;
/* Collective over c, whose ranks 0..trainers - 1 train m and have it whole; frozen weights are the same everywhere. All borrowed
 * until the close. */
int weight_sync_open(struct weight_sync **out, struct dev *d, struct comm *c, struct model *m, int trainers);
void weight_sync_close(struct weight_sync *w); /* NULL ok */
/* Collective. *sum: dev_checksum of this rank's weights now. */
int weight_sync_send(struct weight_sync *w, uint64_t *sum);

#endif
