/* trace.h - what dev.c notes while a trace is on (trace.c). */
#ifndef VERLC_DEV_TRACE_H
#define VERLC_DEV_TRACE_H

#include "dev/dev.h"

void dev_trace__open(struct dev *d, const char *op, int64_t a, int64_t b, int64_t c);
int dev_trace__close(struct dev *d, int rc);       /* gives rc back */
void dev_trace__pause(struct dev *d, bool paused); /* no trace is fine */
void dev_trace__drop(struct dev *d);

#endif
