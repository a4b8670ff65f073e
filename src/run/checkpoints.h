/* checkpoints.h - what a run needs of the owner of its models: their state out of a checkpoint, and into one.
 *
 * ckpt has the files, the run decides when; this interface is between them, so that a run needs neither models nor a device.
 * Invariant: at most one checkpoint is copied or written at a time. */
#ifndef VERLC_RUN_CHECKPOINTS_H
#define VERLC_RUN_CHECKPOINTS_H

#include "ckpt/ckpt.h"
#include "comm/comm.h"

enum { CHECKPOINTS_MAX_PARTS = 2 };

/* Calls get ctx. In struct ckpt_save_args parts and n_parts are left to the callee. */
struct checkpoints {
    void *ctx;
    const char *isa;             /* of the device: what a resumed run keeps; borrowed */
    int64_t (*steps)(void *ctx); /* optimizer steps of all parts; < 0: not known, since a rank was lost */
    /* All parts. ERR_INPUT: dir is of a run without one of them. */
    int (*load)(void *ctx, const char *dir);
    int (*save)(void *ctx, const struct ckpt_save_args *a); /* published, as ckpt_save */
    /* The same, overlapped with the next steps (ckpt/async_save.h): host memory for copies, once; a copy; it is written; how it
     * ended. */
    int (*open_copy)(void *ctx);
    int (*copy)(void *ctx, const struct ckpt_save_args *a);
    int (*write)(void *ctx, void (*before)(void *arg), void *arg);
    int (*take)(void *ctx, double wait_s, int64_t *step);
    void (*close)(void *ctx); /* waits for one that is written */
};

/* Of models in this process, or of the ranks of c (NULL: one), which all call open_copy, copy, save and load; write and take are
 * rank 0's. The parts' models and optimizers are borrowed until close; isa as above. */
void checkpoints_local(struct checkpoints *out, const struct ckpt_part *parts, int n_parts, const char *isa, struct comm *c);

/* Of two that have parts of a run each: `first` writes its parts separately, then `last` the checkpoint, which they join. Both are
 * closed with this. */
void checkpoints_joint(struct checkpoints *out, const struct checkpoints *first, const struct checkpoints *last);

#endif
