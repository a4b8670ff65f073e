/* nvtx.cu - named ranges for a profiler: phases and calls in Nsight's timeline.
 *
 * NVTX 3 is headers only: a profiler that starts the program names its library in
 * NVTX_INJECTION64_PATH, which the first NVTX call opens.  Without it no call is made.
 * Invariant: where no profiler listens, cuda_range_of gives NULL and costs nothing after. */
#include "device/cuda/context.cuh"

#include <stdlib.h>

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>

static void range(const char *name) {
    if (name) nvtxRangePushA(name);
    else nvtxRangePop();
}

/* A thread's depth of open ranges, or a negative number where nobody counts them. */
static bool listens(void) {
    const int depth = nvtxRangePushA("verlc");
    nvtxRangePop();
    return depth >= 0;
}

void (*cuda_range_of(void))(const char *name) {
    const char *path = getenv("NVTX_INJECTION64_PATH");
    return path && *path && listens() ? range : NULL;
}
#else
void (*cuda_range_of(void))(const char *name) { return NULL; }
#endif
