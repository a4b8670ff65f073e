/* sampler_keys.h - the keys data.sampler.*, the same in ppo and sft.  Private to train. */
#ifndef VERLC_TRAIN_SAMPLER_H
#define VERLC_TRAIN_SAMPLER_H

#include "conf/conf.h"
#include "data/data.h"

/* shuffle: what data.shuffle says where data.sampler.name is not set. */
int train_read_sampler(const struct conf *c, bool shuffle, const char *source_key, struct data_sampler_spec *s);

#endif
