/* trace.h - which call took how long, on the host and on the device. */
#ifndef VERLC_DEVICE_TRACE_H
#define VERLC_DEVICE_TRACE_H

#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

struct dev;

void dev_trace_start(struct dev *d);
/* The trace of one of several ranks: a process of its own in it. zero: the clock_now at which it begins; ranks of one host that
 * take the same have one time. */
void dev_trace_start_rank(struct dev *d, int rank, double zero);
/* What the run does from here on, until the next call: a track of its own in the trace, and an NVTX range where a profiler
 * listens. NULL: nothing. Without a trace only the range. */
void dev_trace_phase(struct dev *d, const char *name);
/* Ends the trace. path: Chrome's trace format, for Perfetto or chrome://tracing; NULL: none. table: the calls
 * that took the most device time, to this stream; NULL: none. The log says how long the device idled, by phase. */
int dev_trace_stop(struct dev *d, const char *path, FILE *table);

#ifdef __cplusplus
}
#endif
#endif
