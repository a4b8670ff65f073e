/* perf_metrics.h - how fast and how large a run is: model FLOPs utilisation and memory, as verl counts them. */
#ifndef VERLC_TRAIN_PERF_METRICS_H
#define VERLC_TRAIN_PERF_METRICS_H

#include "model/config.h"
#include "track/track.h"

/* FLOPs of forward and backward over sequences of len[n] tokens (verl utils/flops_counter.py _estimate_qwen2_flops):
 * nothing is added for what is recomputed. */
double train_flops(const struct model_config *c, const int64_t *len, int64_t n);
/* The same as numbers of a model: token a token, square a token and token of its sequence; peak: train_peak_flops. */
struct model_flops {
    double token, square, peak;
};
struct model_flops train_model_flops(const struct model_config *c, const struct dev *d);
/* FLOP/s that the device's maker promises for dense bf16, by verl's table; INFINITY: a device that is not in it. */
double train_peak_flops(const struct dev *d);
/* perf/max_memory_allocated_gb, perf/max_memory_reserved_gb, perf/cpu_memory_used_gb, each also with verl's prefix where
 * there is one ("actor/"), perf/memory_of_plan where there is a plan (d->planned), and perf/device_allocations since *before, which
 * becomes now: 0 says that the plan held. Of a GPU with NVML from the second call on also perf/gpu_utilization and
 * perf/gpu_memory_used_gb, since the call before. */
int train_memory_metrics(struct metrics *m, struct dev *d, const char *prefix, struct dev_memory *before);

#endif
