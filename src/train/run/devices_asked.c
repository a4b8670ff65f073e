/* devices_asked.c - see devices_asked.h. */
#include "train/run/devices_asked.h"

#include "base/err.h"
#include "base/log.h"

int train_devices_asked(const struct conf *c, int64_t nodes, int64_t per_node, int64_t *out) {
    if (!conf_is_set(c, "trainer.n_gpus_per_node")) per_node = 1;
    if (__builtin_mul_overflow(per_node, nodes, out))
        FAIL(ERR_INVAL, "trainer.nnodes * trainer.n_gpus_per_node does not fit in 64 bits");
    return 0;
}

int train_note_devices(const struct conf *c, int64_t nodes, int64_t per_node, const char *device) {
    int64_t n;
    TRY(train_devices_asked(c, nodes, per_node, &n));
    if (n > 1)
        log_note("1 device (trainer.device=%s) of the %lld asked for by trainer.nnodes and trainer.n_gpus_per_node: several are "
                 "not supported yet",
                 device ? device : "auto", (long long)n);
    return 0;
}
