/* async_save.h - checkpoints that are written while the run goes on.
 *
 * What a checkpoint holds is copied to host memory, which is all that the run waits for; a thread writes and publishes it by
 * ckpt_save. One is under way at a time. What it knows of a run is struct ckpt_save_args.
 * Invariant: the files are those of ckpt_save at the moment of the copy, byte for byte. */
#ifndef VERLC_CKPT_ASYNC_SAVE_H
#define VERLC_CKPT_ASYNC_SAVE_H

#include "ckpt/ckpt.h"

struct ckpt_async;

/* Host memory for a copy of these parts (4 bytes a trained parameter and the optimizer's arrays), pinned on a GPU. The parts'
 * models and optimizers are borrowed until ckpt_async_close. ERR_NOMEM. */
int ckpt_async_open(struct ckpt_async **out, const struct ckpt_part *parts, int n_parts);
void ckpt_async_close(struct ckpt_async *s); /* waits for the one that is written; NULL ok */
/* Copies what a->parts, those of ckpt_async_open, hold now; a is copied too, its root and config_yaml are borrowed until
 * the checkpoint is taken. Not while one is copied or written. */
int ckpt_async_copy(struct ckpt_async *s, const struct ckpt_save_args *a);
/* Begins to write the copy. before(arg) is called by the writing thread first: what must be on disk before the checkpoint is. */
void ckpt_async_write(struct ckpt_async *s, void (*before)(void *arg), void *arg);
/* 1: the checkpoint of *step is published, or < 0 why it is not, as ckpt_save says it; told once. 0: there is none under way, or
 * it is not done within wait_s. */
int ckpt_async_take(struct ckpt_async *s, double wait_s, int64_t *step);
bool ckpt_async_copied(const struct ckpt_async *s); /* a copy waits for ckpt_async_write */
bool ckpt_async_busy(const struct ckpt_async *s);   /* one is written, or not taken yet */

#endif
