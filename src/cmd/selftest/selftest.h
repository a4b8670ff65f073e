/* selftest.h - what the files of `verlc selftest` share. */
#ifndef VERLC_CMD_SELFTEST_H
#define VERLC_CMD_SELFTEST_H

#include "device/device.h"

struct selftest {
    struct dev *dev, *ref;
    int lines, failed, missing; /* comparisons made, that found a difference, ops that the device lacks */
};
/* One line of the table. */
void selftest_line(struct selftest *t, const char *what, bool ok, const char *detail);

/* ---- selftest_ops.c ---- */

/* Every op against ref, and batch invariance. An error of the device ends it. */
int selftest_ops(struct selftest *t);

/* ---- selftest_rollout.c ---- */

/* seqs samples, n to a prompt; prompts of up to `prompt` tokens and up to `new` after them. */
struct rollout_size {
    int64_t seqs, n, prompt, new;
};
/* Rollout against training, on small models. */
int selftest_rollout(struct selftest *t);
/* The same on the model in dir. */
int selftest_model(struct selftest *t, const char *dir, enum dtype act, const struct rollout_size *size);

#endif
