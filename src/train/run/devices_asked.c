/* devices_asked.c - see devices_asked.h. */
#include "train/run/devices_asked.h"

#include "base/log.h"

int64_t train_devices_asked(const struct conf *c, int64_t nodes, int64_t per_node) {
    return conf_is_set(c, "trainer.n_gpus_per_node") ? per_node * nodes : nodes;
}

void train_note_devices(const struct conf *c, int64_t nodes, int64_t per_node, const char *device) {
    const int64_t n = train_devices_asked(c, nodes, per_node);
    if (n > 1)
        log_note("1 device (trainer.device=%s) of the %lld asked for by trainer.nnodes and trainer.n_gpus_per_node: several are "
                 "not supported yet",
                 device ? device : "auto", (long long)n);
}
