/* device_int.h - what the checked calls share: the test for a missing table entry, and spans of a trace. */
#ifndef VERLC_DEVICE_INT_H
#define VERLC_DEVICE_INT_H

#include "base/err.h"
#include "device/device.h"

void dev_trace__open(struct dev *d, const char *op, int64_t a, int64_t b, int64_t c);
int dev_trace__close(struct dev *d, int rc); /* gives rc back */
/* An operation between ranks, in which calls may lie: of so many bytes, with a part of so many ranks. overlapped: it runs on
 * streams of its own, whose backend takes the stamp that is given back and the next one, at its begin and end; else, and with -1,
 * it takes as long as the host's call. */
int64_t dev_trace__exchange_open(struct dev *d, const char *op, int64_t bytes, int ranks, bool overlapped);
int dev_trace__exchange_close(struct dev *d, int rc); /* gives rc back */
void dev_trace__pause(struct dev *d, bool paused);    /* no trace is fine */
void dev_trace__drop(struct dev *d);
void dev_gpu_use__drop(struct dev *d);

/* The gradients of no rows: nothing to add, or zeros. */
int dev__no_rows(struct dev *d, struct tensor dw, struct tensor db, bool add);

/* The checks of dev_join_columns. */
int dev__check_join_columns(const struct join_columns_args *a);

/* After the checks, so that a bad call is refused on every backend alike. */
#define HAVE(op)                                                                                      \
    do {                                                                                              \
        if (d->ops->op == NULL) FAIL(ERR_UNSUPPORTED, "the %s backend has no %s", d->ops->name, #op); \
    } while (0)

/* The call, with its span noted while a trace is on or a profiler listens; a, b, c: what distinguishes calls of one op. */
#define TRACED(op, args, a, b, c)                           \
    (d->trace == NULL && d->range == NULL ? d->ops->op args \
                                          : (dev_trace__open(d, #op, (a), (b), (c)), dev_trace__close(d, d->ops->op args)))

#endif
