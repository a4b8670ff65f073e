/* barrier.cuh - a barrier of a group's ranks on the GPU, as one kernel of a stream: a CUDA graph may hold it, since what it waits
 * for is counted in device memory. */
#ifndef VERLC_DEV_CUDA_BARRIER_CUH
#define VERLC_DEV_CUDA_BARRIER_CUH

#include <cuda_runtime.h>
#include <stdint.h>

enum { CUDA_BARRIER_RANKS = 16, CUDA_BARRIER_WORDS = 2 * CUDA_BARRIER_RANKS };
#define CUDA_BARRIER_ENDED UINT32_MAX

struct cuda_barrier_host { /* pinned host memory that the GPU reads and writes; each word has one writer */
    uint32_t end;          /* the host's: while it is set no wait goes on */
    uint32_t lost;         /* the GPU's, for good: 1 + the rank that did not come, or CUDA_BARRIER_ENDED: the host ended a wait */
};
struct cuda_barrier {
    int rank, size;
    /* Rank r's memory (CUDA_BARRIER_WORDS, zeroed): at[r][s], which rank s writes: how often s has come to a barrier with r; behind
     * these how often r has said so to the others. */
    uint64_t *at[CUDA_BARRIER_RANKS];
    struct cuda_barrier_host *host;
    uint64_t deadline_ns; /* of a wait */
};

/* Before a stream waits for a peer: the driver may load a kernel at its first launch, and waits there until every stream of the
 * GPU has come to its end. */
int cuda_load_barrier(void);
/* The stream goes on when all ranks' streams have come to this barrier: with all that they had read and written until then. What
 * ends a wait otherwise is in host->lost, and from then on no barrier of this rank waits. */
int cuda_barrier_on(cudaStream_t s, const struct cuda_barrier *b);

#endif
