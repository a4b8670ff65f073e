/* barrier.cuh - a barrier of a group's ranks on the GPU, as one kernel of a stream: a CUDA graph may hold it, since what it waits
 * for is counted in device memory. */
#ifndef VERLC_DEV_CUDA_BARRIER_CUH
#define VERLC_DEV_CUDA_BARRIER_CUH

#include <cuda_runtime.h>
#include <stdint.h>

enum { CUDA_BARRIER_RANKS = 16 };

struct cuda_barrier_host { /* pinned host memory */
    uint32_t end;          /* host to GPU: waits end at once */
    uint32_t late;         /* GPU to host: 1 + the rank that did not come */
};
struct cuda_barrier {
    int rank, size;
    uint64_t *at[CUDA_BARRIER_RANKS]; /* rank r's memory (size): at[r][s], which rank s writes: barriers that it has come to */
    struct cuda_barrier_host *host;
    uint64_t deadline_ns;
};

/* The stream goes on when all ranks' streams have come to this barrier: with all that they had read and written until then. After a
 * wait of deadline_ns it sets host->late and goes on, now and at all later barriers. */
int cuda_barrier_on(cudaStream_t s, const struct cuda_barrier *b);

#endif
