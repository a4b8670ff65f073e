/* devices_asked.h - trainer.nnodes and trainer.n_gpus_per_node, in every program that opens a device.  Private to train. */
#ifndef VERLC_TRAIN_DEVICES_ASKED_H
#define VERLC_TRAIN_DEVICES_ASKED_H

#include "conf/conf.h"

/* How many devices the user asks for. verl's default of n_gpus_per_node is 8; only a number that was set is a promise. */
int64_t train_devices_asked(const struct conf *c, int64_t nodes, int64_t per_node);
/* Where that is several: a note that one is used. device: trainer.device, may be NULL. */
void train_note_devices(const struct conf *c, int64_t nodes, int64_t per_node, const char *device);

#endif
