/* rank_weights.h - the weights of a model that some ranks train, sent to ranks that only generate with them.
 *
 * What training changes travels and nothing else: all compute copies of a model, or those of its adapter. Each trainer gives a
 * share of it (dev/group.h: by copy engines within a host). Afterwards every rank sums up what it has; the controller compares.
 * Knows nothing of optimizers, and not when to send.  Private to train.
 * Invariant: all ranks opened the same model on the same kind of device, so the bytes mean the same on each. */
#ifndef VERLC_TRAIN_RUN_RANK_WEIGHTS_H
#define VERLC_TRAIN_RUN_RANK_WEIGHTS_H

#include "comm/comm.h"
#include "model/parameters.h"

struct rank_weights;
/* Collective over c, whose ranks 0..trainers - 1 train m and have it whole; what is frozen is the same everywhere. All borrowed
 * until the close. */
int rank_weights_open(struct rank_weights **out, struct dev *d, struct comm *c, struct model *m, int trainers);
void rank_weights_close(struct rank_weights *w); /* NULL ok */
/* Collective. *sum: dev_checksum of what this rank has now. */
int rank_weights_send(struct rank_weights *w, uint64_t *sum);

#endif
