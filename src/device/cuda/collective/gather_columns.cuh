/* gather_columns.cuh - an all-gather of columns over a group's ranks on the GPU, as one kernel of a stream: a CUDA graph may hold
 * it, since all that changes from one to the next is in device memory. */
#ifndef VERLC_DEV_CUDA_GATHER_COLUMNS_CUH
#define VERLC_DEV_CUDA_GATHER_COLUMNS_CUH

#include "device/cuda/context.cuh"

#include <stdint.h>

/* A thread has a channel to the thread of its number on one peer: two slots of CUDA_GATHER_LINES lines of 16 bytes in each
 * direction. All channels of a rank are CUDA_GATHER_BLOCKS blocks of threads, whatever the number of ranks. */
enum {
    CUDA_GATHER_RANKS = 16,
    CUDA_GATHER_LINE = 16,
    CUDA_GATHER_CHANNELS = CUDA_GATHER_BLOCKS * CUDA_GATHER_THREADS,
    CUDA_GATHER_WORDS = 1 + CUDA_GATHER_CHANNELS, /* lost; a count for each channel */
};
static_assert(2 * CUDA_GATHER_CHANNELS * CUDA_GATHER_LINES * (int)CUDA_GATHER_LINE == (int)CUDA_GATHER_SLOTS, "two slots each");
#define CUDA_GATHER_ENDED UINT32_MAX

struct cuda_gather_host { /* pinned host memory that the GPU reads and writes */
    uint32_t end;         /* the host's: while it is set no wait goes on */
    uint32_t lost;        /* the GPU's, for good: 1 + the rank that did not come, or CUDA_GATHER_ENDED: the host ended a wait */
};
struct cuda_gather {
    int rank, size;
    char *slots[CUDA_GATHER_RANKS]; /* (CUDA_GATHER_SLOTS) of rank r, all ones before the first gather; peers write there */
    uint32_t *words;                /* (CUDA_GATHER_WORDS) of this rank alone, zeroed */
    struct cuda_gather_host *host;
    uint64_t deadline_ns; /* of a wait */
};

/* Before a stream waits for a peer: the driver may load a kernel at its first launch, and waits there until every stream of the
 * GPU has come to its end. */
int cuda_load_gather(void);
/* On the compute stream: dev_join_columns of the blocks that all ranks have in their x. What ends a wait otherwise is in
 * host->lost; from then on this rank neither sends nor waits, and y is nobody's. */
int cuda_gather_columns(struct cuda *c, const struct cuda_gather *g, const struct join_columns_args *a);

#endif
