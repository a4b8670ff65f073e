/* memory_limit.c - see memory_limit.h. */
#include "plan/memory_limit.h"

#include "base/log.h"

#include <unistd.h>

size_t plan_memory_limit(const struct dev *dev, int64_t set) {
    const size_t there = (size_t)((double)dev->mem_total * 0.95);
    const bool beyond = dev_has_own_memory(dev) && (size_t)set > there; /* without: one may plan for another machine */
    return set > 0 && !beyond ? (size_t)set : there;
}

size_t plan_host_limit(int64_t bytes) {
    if (bytes > 0) return (size_t)bytes / 8 * 7;
    const long n = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    return n > 0 && page > 0 ? (size_t)n / 8 * 7 * (size_t)page : SIZE_MAX;
}

size_t plan_checkpoint_copy(const struct run_config *k, const struct conf *c, size_t copy, size_t taken, size_t there) {
    const bool is_set = !conf_is_null(c, "trainer.async_save"), fits = copy <= (there > taken ? there - taken : 0) / 2;
    return run_saves_midway(k) && (is_set ? k->async_save : fits) ? copy : 0;
}

bool plan_can_offload(const struct dev *dev, bool wanted) {
    const bool own = dev_has_own_memory(dev);
    if (wanted && !own) log_note("param_offload and optimizer_offload change nothing on this device, whose memory is the host's");
    return own;
}
