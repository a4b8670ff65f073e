/* barrier.cu - the kernel of barrier.cuh: one warp, a lane for each other rank, so that what waits takes up one SM.
 *
 * A lane writes a count, one more than before, to the peer's memory, by a release of the system's scope behind all that the stream
 * has done, and looks at the peer's count in its own memory, by acquires of that scope. Lanes have nothing in common. Counts only
 * grow, so nothing is ever reset, and a replay of a graph goes on where the last one ended. Launched without programmatic dependent
 * launch: the kernel before has ended, with its writes, and what comes next begins after it.
 * Invariant: it ends, whatever becomes of the other ranks: when the host says so, which needs no stream, or after its deadline; and
 * it says that it did. A rank that waits no more still tells the others that it has come. */
#include "device/cuda/collective/barrier.cuh"

#include "device/cuda/collective/system_scope.cuh"
#include "device/cuda/context.cuh"

enum { WARP = 32, SPINS = 64, NAP_NS = 100 }; /* SPINS: looks between two at the host's memory, which is far */
static_assert((int)CUDA_BARRIER_RANKS <= (int)WARP, "a lane for each rank");

/* Until rank r has come `count` times. */
static __device__ void wait_for(const struct cuda_barrier &b, int r, uint64_t count) {
    const uint64_t start = now_ns();
    for (int spins = 1; load_acquire(&b.at[b.rank][r]) < count; spins++) {
        if (spins % SPINS) continue;
        if (load_host(&b.host->lost)) return;
        const bool ended = load_host(&b.host->end), late = now_ns() - start > b.deadline_ns;
        if (ended || late) {
            store_host(&b.host->lost, ended ? CUDA_BARRIER_ENDED : (uint32_t)r + 1);
            return;
        }
        nap_ns(NAP_NS); /* whoever is late by so much is not held up by it */
    }
}

__global__ static void barrier_kernel(const struct cuda_barrier b) {
    const int r = (int)threadIdx.x;
    if (r >= b.size || r == b.rank) return;
    uint64_t *const said = &b.at[b.rank][CUDA_BARRIER_RANKS + r]; /* this lane's own */
    const uint64_t count = *said + 1;
    *said = count;
    store_release(&b.at[r][b.rank], count);
    wait_for(b, r, count);
}

int cuda_load_barrier(void) {
    cudaFuncAttributes a;
    CU_TRY(cudaFuncGetAttributes(&a, barrier_kernel));
    return 0;
}

int cuda_barrier_on(cudaStream_t s, const struct cuda_barrier *b) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(1);
    config.blockDim = dim3((unsigned)WARP);
    config.stream = s;
    CU_TRY(cudaLaunchKernelEx(&config, barrier_kernel, *b));
    return 0;
}
