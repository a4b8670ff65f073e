/* barrier.cu - the kernel of barrier.cuh: one warp, a lane for each other rank, so that what waits takes up one SM.
 *
 * A lane writes this rank's count, one more than before, to the peer's memory, by a release of the system's scope behind all that
 * the stream has done, and looks at the peer's count in its own memory, by acquires of that scope. Counts only grow, so nothing is
 * ever reset, and a replay of a graph goes on where the last one ended. Launched without programmatic dependent launch: the kernel
 * before has ended, with its writes, and what comes next begins after it.
 * Invariant: it ends, whatever becomes of the other ranks: after its deadline, or when the host says so. */
#include "device/cuda/collective/barrier.cuh"

#include "device/cuda/context.cuh"

enum { WARP = 32, SPINS = 256 }; /* looks between two at the host's memory, which is far */
static_assert((int)CUDA_BARRIER_RANKS <= (int)WARP, "a lane for each rank");

static __device__ __forceinline__ uint64_t now_ns(void) {
    uint64_t t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}
static __device__ __forceinline__ void store_release(uint64_t *p, uint64_t v) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
static __device__ __forceinline__ uint64_t load_acquire(const uint64_t *p) {
    uint64_t v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}

/* Until rank r has come. */
static __device__ void wait_for(const struct cuda_barrier &b, int r, uint64_t count) {
    volatile struct cuda_barrier_host *const host = b.host;
    const uint64_t start = now_ns();
    for (int spins = 0; load_acquire(&b.at[b.rank][r]) < count; spins++) {
        if (spins % SPINS != SPINS - 1) continue;
        if (host->end) return;
        if (now_ns() - start <= b.deadline_ns) continue;
        host->late = (uint32_t)r + 1;
        __threadfence_system();
        host->end = 1;
        return;
    }
}

__global__ static void barrier_kernel(const struct cuda_barrier b) {
    const int r = (int)threadIdx.x;
    uint64_t *const own = b.at[b.rank];
    const uint64_t count = own[b.rank] + 1;
    __syncwarp(); /* all lanes have read it */
    if (r == b.rank) own[r] = count;
    if (r >= b.size || r == b.rank) return;
    __threadfence_system();
    store_release(&b.at[r][b.rank], count);
    wait_for(b, r, count);
}

int cuda_barrier_on(cudaStream_t s, const struct cuda_barrier *b) {
    barrier_kernel<<<1, WARP, 0, s>>>(*b);
    CU_LAUNCHED();
    return 0;
}
