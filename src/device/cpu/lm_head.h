/* lm_head.h - the log-softmax that the LM head and the sampler share.
 *
 * A row's statistics are those of its chunks of DEV_VOCAB_CHUNK entries, each
 * summed in f32 by the kernel head_sum, merged in chunk order in double.
 * Invariant: both callers walk the same chunks through the same functions, so
 * the log-prob of a sampled id and that of a training row have equal bits. */
#ifndef VERLC_DEVICE_CPU_LM_HEAD_H
#define VERLC_DEVICE_CPU_LM_HEAD_H

#include "device/cpu/kernels.h"

/* Of a row's chunks so far: e = exp(z - max). A zeroed one is empty. */
struct cpu_head_state {
    double max, sum, sum_t, sum_sq; /* sum e, sum e (z - max), sum e^2 */
};
void cpu_head_merge(struct cpu_head_state *s, const struct cpu_head_sum *chunk);
static inline int64_t cpu_head_chunks(int64_t vocab) { return (vocab + DEV_VOCAB_CHUNK - 1) / DEV_VOCAB_CHUNK; }
/* Entries of chunk i. */
static inline int64_t cpu_head_chunk_len(int64_t vocab, int64_t i) {
    const int64_t left = vocab - i * DEV_VOCAB_CHUNK;
    return left < DEV_VOCAB_CHUNK ? left : DEV_VOCAB_CHUNK;
}
/* The log-prob of an entry, from its raw logit. */
float cpu_head_logp(const struct cpu_head_state *s, float raw, float inv_temp);

#endif
