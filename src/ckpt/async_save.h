/* async_save.h - checkpoints of a copy: written while the run goes on, or of what several ranks have.
 *
 * What a checkpoint holds is copied to host memory of rank 0, each rank its part, which is all that the run waits for; there a
 * thread writes and publishes it by ckpt_save. One is under way at a time. What it knows of a run is struct ckpt_save_args.
 * Invariant: the files are those of ckpt_save at the moment of the copy, byte for byte, whatever the number of ranks. */
#ifndef VERLC_CKPT_ASYNC_SAVE_H
#define VERLC_CKPT_ASYNC_SAVE_H

#include "ckpt/ckpt.h"
#include "comm/comm.h"

struct ckpt_async;

/* Host memory for a copy of these parts (4 bytes a trained parameter and the optimizer's arrays), pinned on a GPU. The parts'
 * models and optimizers, and c, are borrowed until ckpt_async_close. c: the ranks, of which each has what its models' shards say,
 * for open, copy and save are collective; NULL: one. ERR_NOMEM. */
int ckpt_async_open(struct ckpt_async **out, const struct ckpt_part *parts, int n_parts, struct comm *c);
void ckpt_async_close(struct ckpt_async *s); /* waits for the one that is written; NULL ok */
/* Copies what a->parts, those of ckpt_async_open, hold now; a is copied too, its root and config_yaml are borrowed until
 * the checkpoint is taken. Not while one is copied or written. */
int ckpt_async_copy(struct ckpt_async *s, const struct ckpt_save_args *a);
/* Copies, and on rank 0 writes in the foreground. */
int ckpt_async_save(struct ckpt_async *s, const struct ckpt_save_args *a);
/* This and the next on rank 0 alone. Begins to write the copy. before(arg) is called by the writing thread first: what must be on
 * disk before the checkpoint is. */
void ckpt_async_write(struct ckpt_async *s, void (*before)(void *arg), void *arg);
/* 1: the checkpoint of *step is published, or < 0 why it is not, as ckpt_save says it; reported once. 0: there is none under way,
 * or it is not done within wait_s. */
int ckpt_async_take(struct ckpt_async *s, double wait_s, int64_t *step);

#endif
