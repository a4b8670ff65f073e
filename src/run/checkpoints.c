/* checkpoints.c - see checkpoints.h. */
#include "run/checkpoints.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "ckpt/async_save.h"

#include <stdlib.h>
#include <string.h>

struct local {
    struct ckpt_part parts[CHECKPOINTS_MAX_PARTS];
    int n;
    struct ckpt_async *async; /* NULL until open_copy */
    struct comm *comm;        /* NULL: one rank */
};

static int64_t steps(void *ctx) {
    const struct local *l = ctx;
    int64_t sum = 0;
    for (int i = 0; i < l->n; i++) sum += l->parts[i].optim->step;
    return sum;
}

static int load(void *ctx, const char *dir) {
    const struct local *l = ctx;
    for (int i = 0; i < l->n; i++) {
        char *part = ckpt_part_dir(dir, l->parts[i].name);
        const bool there = file_is_dir(part);
        free(part);
        if (!there)
            FAIL(ERR_INPUT,
                 "%s has no %s: it is of a run without one; go on with the same algorithm.adv_estimator, or start from "
                 "scratch with trainer.resume_mode=disable or another trainer.default_local_dir",
                 dir, l->parts[i].name);
        TRY(ckpt_load_part(dir, &l->parts[i]));
    }
    return 0;
}

static struct ckpt_save_args with_parts(const struct local *l, const struct ckpt_save_args *a) {
    struct ckpt_save_args b = *a;
    b.parts = l->parts;
    b.n_parts = l->n;
    return b;
}

static int open_copy(void *ctx) {
    struct local *l = ctx;
    return ckpt_async_open(&l->async, l->parts, l->n, l->comm);
}

/* Several ranks: by way of a copy. Its memory is for this one alone, unless others are written overlapped with the next steps. */
static int save(void *ctx, const struct ckpt_save_args *a) {
    struct local *l = ctx;
    const struct ckpt_save_args b = with_parts(l, a);
    const bool keep = l->async != NULL;
    if (!l->comm) return ckpt_save(&b);
    if (!keep) TRY(open_copy(l));
    const int rc = ckpt_async_save(l->async, &b);
    if (!keep) {
        ckpt_async_close(l->async);
        l->async = NULL;
    }
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

static int copy(void *ctx, const struct ckpt_save_args *a) {
    const struct ckpt_save_args b = with_parts(ctx, a);
    return ckpt_async_copy(((struct local *)ctx)->async, &b);
}

static int begin_write(void *ctx, void (*before)(void *arg), void *arg) {
    ckpt_async_write(((struct local *)ctx)->async, before, arg);
    return 0;
}

static int take(void *ctx, double wait_s, int64_t *step) { return ckpt_async_take(((struct local *)ctx)->async, wait_s, step); }

static void close_local(void *ctx) {
    struct local *l = ctx;
    ckpt_async_close(l->async);
    free(l);
}

void checkpoints_local(struct checkpoints *out, const struct ckpt_part *parts, int n_parts, const char *isa, struct comm *c) {
    struct local *l = xcalloc(1, sizeof *l);
    CHECK(n_parts >= 1 && n_parts <= CHECKPOINTS_MAX_PARTS);
    memcpy(l->parts, parts, (size_t)n_parts * sizeof *parts);
    l->n = n_parts;
    l->comm = c && comm_size(c) > 1 ? c : NULL;
    *out = (struct checkpoints){.ctx = l,
                                .isa = isa,
                                .steps = steps,
                                .load = load,
                                .save = save,
                                .open_copy = open_copy,
                                .copy = copy,
                                .write = begin_write,
                                .take = take,
                                .close = close_local};
}

/* ---- two together ---- */

struct joint {
    struct checkpoints first, last;
    enum { IDLE, FIRST, LAST } writes;
};

static int64_t joint_steps(void *ctx) {
    struct joint *j = ctx;
    const int64_t a = j->first.steps(j->first.ctx), b = j->last.steps(j->last.ctx);
    return a < 0 || b < 0 ? -1 : a + b;
}

static int joint_load(void *ctx, const char *dir) {
    struct joint *j = ctx;
    TRY(j->first.load(j->first.ctx, dir));
    return j->last.load(j->last.ctx, dir);
}

static struct ckpt_save_args as_first(const struct ckpt_save_args *a) {
    struct ckpt_save_args b = *a;
    b.parts_only = true;
    return b;
}
static struct ckpt_save_args as_last(const struct ckpt_save_args *a) {
    struct ckpt_save_args b = *a;
    b.joins = true;
    return b;
}

static int joint_save(void *ctx, const struct ckpt_save_args *a) {
    struct joint *j = ctx;
    const struct ckpt_save_args first = as_first(a), last = as_last(a);
    TRY(j->first.save(j->first.ctx, &first));
    return j->last.save(j->last.ctx, &last);
}

static int joint_open_copy(void *ctx) {
    struct joint *j = ctx;
    TRY(j->first.open_copy(j->first.ctx));
    return j->last.open_copy(j->last.ctx);
}

static int joint_copy(void *ctx, const struct ckpt_save_args *a) {
    struct joint *j = ctx;
    const struct ckpt_save_args first = as_first(a), last = as_last(a);
    TRY(j->first.copy(j->first.ctx, &first));
    return j->last.copy(j->last.ctx, &last);
}

static int joint_write(void *ctx, void (*before)(void *arg), void *arg) {
    struct joint *j = ctx;
    j->writes = FIRST;
    return j->first.write(j->first.ctx, before, arg);
}

static void nothing(void *arg) { (void)arg; }

static int joint_take(void *ctx, double wait_s, int64_t *step) {
    struct joint *j = ctx;
    if (j->writes == FIRST) {
        const int got = j->first.take(j->first.ctx, wait_s, step);
        if (got <= 0) return got;
        j->writes = LAST;
        TRY(j->last.write(j->last.ctx, nothing, NULL));
    }
    const int got = j->writes == LAST ? j->last.take(j->last.ctx, wait_s, step) : 0;
    if (got != 0) j->writes = IDLE;
    return got;
}

static void joint_close(void *ctx) {
    struct joint *j = ctx;
    j->first.close(j->first.ctx);
    j->last.close(j->last.ctx);
    free(j);
}

void checkpoints_joint(struct checkpoints *out, const struct checkpoints *first, const struct checkpoints *last) {
    struct joint *j = xcalloc(1, sizeof *j);
    j->first = *first;
    j->last = *last;
    *out = (struct checkpoints){.ctx = j,
                                .isa = last->isa,
                                .steps = joint_steps,
                                .load = joint_load,
                                .save = joint_save,
                                .open_copy = joint_open_copy,
                                .copy = joint_copy,
                                .write = joint_write,
                                .take = joint_take,
                                .close = joint_close};
}
