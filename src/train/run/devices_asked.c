/* devices_asked.c - see devices_asked.h. */
#include "train/run/devices_asked.h"

#include "base/err.h"
#include "base/log.h"

int64_t train_devices_asked(const struct conf *c, int64_t nodes, int64_t per_node) {
    return conf_is_set(c, "trainer.n_gpus_per_node") ? per_node * nodes : nodes;
}

int train_check_devices(const struct conf *c, int64_t nodes, int64_t per_node, bool for_run) {
    const int64_t n = train_devices_asked(c, nodes, per_node);
    if (n > 1 && for_run)
        FAIL(ERR_INVAL,
             "trainer.nnodes and trainer.n_gpus_per_node ask for %lld devices: one is supported; pass trainer.nnodes=1 "
             "trainer.n_gpus_per_node=1 (batch sizes are those of the whole run, and stay)",
             (long long)n);
    if (n > 1)
        log_note("planned for 1 device of the %lld that trainer.nnodes and trainer.n_gpus_per_node ask for: one is supported",
                 (long long)n);
    return 0;
}
