/* bench.h - the subjects of `verlc bench`, one file each. */
#ifndef VERLC_CMD_BENCH_H
#define VERLC_CMD_BENCH_H

#include "device/device.h"
#include "engine/engine.h"
#include "model/files/load.h"
#include "model/forward.h"
#include "model/optim/optimizer.h"
#include "ranks/start_workers.h"

/* name, one-line help; bench_NAME(argc, argv) parses its own options */
#define BENCH_MAP(X)                                                                          \
    X(gemm, "GEMMs of a device; on the CPU next to memory bandwidth, the roofline of decode") \
    X(attention, "attention of a layer: decoding, forward and backward")                      \
    X(grouped, "grouped GEMMs of experts on a GPU, and dense GEMMs of the same work")         \
    X(delta, "a gated delta net layer: forward, backward, decoding steps")                    \
    X(read, "memory bandwidth (reads): the roofline of decoding one sequence")                \
    X(train, "forward and backward of a model, tokens per second")                            \
    X(logprob, "log-probs of a model, tokens per second")                                     \
    X(generate, "sampling from a model, tokens per second")                                   \
    X(decode, "decoding steps on several ranks: how much of one is not the model's kernels")  \
    X(update, "an optimizer step on several ranks: what the order of its sums costs")         \
    X(step, "generation, reference log-probs and update of one GRPO step, seconds")           \
    X(checkpoint, "a checkpoint: how long a run waits, how fast it is written")               \
    X(grade, "responses that the native graders score per second on one core")                \
    X(reward, "scoring responses, natively or with a Python function, milliseconds each")

#define X(name, help) int bench_##name(int argc, char **argv);
BENCH_MAP(X)
#undef X

/* The call of a rank: the options of `verlc bench update` but those of ranks, with "chunks": [..], the values of grad_chunk. A step
 * with the first is traced. Gives {"device", "isa", "parameters", "peak_bytes", "seconds": a list of each value's steps}. */
#define BENCH_SERVICES \
    {"bench_update", bench_update_rank}, { "bench_decode", bench_decode_rank }
int bench_update_rank(struct comm *c, const struct comm_call *call, struct ctl_result *out);
/* The call of a rank: the options of `verlc bench decode` but those of ranks. Gives {"device", "isa", "way", "host": its
 * first rank, "gpu": -1 on a CPU, "graph": whether one holds a step, "weights" and "kv": bytes that a step reads, "first_s",
 * "token_s", "step_s", "alone_s": below 0: not measured, "bytes_per_s": 0: rank 0's}. */
int bench_decode_rank(struct comm *c, const struct comm_call *call, struct ctl_result *out);
/* The GPU of this rank, where GPUs are there and nothing else is named; *gpu: its number, -1: none. */
int bench_open_rank_device(struct comm *c, const char *device, int64_t threads, struct dev *d, int *gpu);

/* Bytes per second of passes of all threads over 128 MiB each, 1 GiB at most: the best pass and the median one. */
int bench_read_bandwidth(struct dev *d, int n_threads, double *best, double *median);
/* The median of v (n > 0), which is sorted by it. */
double bench_median(double *v, int64_t n);
/* Of --recompute. ERR_INVAL. */
int bench_keep(const char *recompute, struct model_keep *out);
/* Random prompts of so many tokens, n samples of max_tokens tokens each; user counts the prompts. */
struct bench_prompts {
    int64_t vocab, prompts, n, length, max_tokens;
    int64_t repeat;      /* so many random tokens again and again; 0: all are random */
    const int32_t *text; /* in their place these n_text tokens again and again, prompt i from the i-th on; NULL: none */
    int64_t n_text;
};
int bench_submit(struct engine *e, const struct bench_prompts *p);
#define BENCH_RECOMPUTE "none|mlp|layer", "what the backward recomputes: nothing, every layer's MLP, every layer"

#endif
