/* memory.c - see memory.h; keeps the accounts of what a device has allocated. */
#include "device/device_int.h"

/* A request beyond the machine's memory is refused here: the system would grant it and kill the
 * process later. */
int dev_alloc(struct dev *d, size_t bytes, void **out) {
    const double gib = 1024.0 * 1024.0 * 1024.0;
    if (bytes == 0) {
        *out = NULL;
        return 0;
    }
    HAVE(alloc);
    size_t room = SIZE_MAX; /* mem_total == 0: the backend does not know */
    if (d->mem_total) room = d->mem_total > d->allocated ? d->mem_total - d->allocated : 0;
    const int rc = bytes > room ? ERR_NOMEM : d->ops->alloc(d, bytes, out);
    if (rc == ERR_NOMEM)
        FAIL(ERR_NOMEM,
             "%s: cannot allocate %.3f GiB: %.3f of %.3f GiB are in use; "
             "lower the batch or sequence lengths",
             d->describe, (double)bytes / gib, (double)d->allocated / gib, (double)d->mem_total / gib);
    TRY(rc);
    d->n_allocs++;
    d->allocated += bytes;
    if (d->allocated > d->peak) d->peak = d->allocated;
    return 0;
}

void dev_free(struct dev *d, void *p, size_t bytes) {
    if (p == NULL) return;
    CHECK(d->ops && d->ops->free && bytes <= d->allocated);
    d->ops->free(d, p, bytes);
    d->allocated -= bytes;
}

size_t dev_working_bytes(struct dev *d, const struct dev_sizes *s) {
    return d->ops->working_bytes ? d->ops->working_bytes(d, s) : 0;
}
int dev_reserve(struct dev *d, const struct dev_sizes *s) { return d->ops->reserve ? d->ops->reserve(d, s) : 0; }

int dev_memory(struct dev *d, struct dev_memory *out) {
    *out = (struct dev_memory){0};
    if (d->ops->memory) TRY(d->ops->memory(d, out));
    if (d->shared) out->system = 0; /* it may be another's */
    out->n_allocs += d->n_allocs;
    return 0;
}

/* ---- pinned host memory, copy streams ---- */

bool dev_has_own_memory(const struct dev *d) { return d->ops->caps.own_memory; }
size_t dev_driver_bytes(const struct dev *d) { return d->ops->caps.driver_bytes; }

int dev_host_alloc(struct dev *d, size_t bytes, void **out) {
    if (!dev_has_own_memory(d)) return dev_alloc(d, bytes, out);
    *out = NULL;
    if (bytes == 0) return 0;
    const int rc = d->ops->host_alloc(d, bytes, out);
    if (rc == ERR_NOMEM)
        FAIL(ERR_NOMEM, "%s: the host cannot pin %.3f GiB for offload, in addition to %.3f GiB already pinned", d->describe,
             (double)bytes / 0x1p30, (double)d->host_allocated / 0x1p30);
    TRY(rc);
    d->host_allocated += bytes;
    return 0;
}

void dev_host_free(struct dev *d, void *p, size_t bytes) {
    if (!dev_has_own_memory(d)) {
        dev_free(d, p, bytes);
        return;
    }
    if (p == NULL) return;
    CHECK(bytes <= d->host_allocated);
    d->ops->host_free(d, p, bytes);
    d->host_allocated -= bytes;
}

int dev_host_register(struct dev *d, void *p, size_t bytes) {
    const int rc = d->ops->host_register ? d->ops->host_register(d, p, bytes) : 0;
    if (rc == ERR_NOMEM)
        FAIL(ERR_NOMEM, "%s: the host cannot pin %.3f GiB that processes share", d->describe, (double)bytes / 0x1p30);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

void dev_host_unregister(struct dev *d, void *p) {
    if (d->ops->host_unregister) d->ops->host_unregister(d, p);
}

int dev_fetch(struct dev *d, int stream, void *dst_dev, const void *src_host, size_t bytes) {
    CHECK(stream >= 0 && stream < DEV_COPY_STREAMS);
    if (!d->ops->fetch) return dev_copy(d, dst_dev, src_host, bytes);
    return bytes ? TRACED(fetch, (d, stream, dst_dev, src_host, bytes), (int64_t)bytes, 0, 0) : 0;
}
int dev_evict(struct dev *d, int stream, void *dst_host, const void *src_dev, size_t bytes) {
    CHECK(stream >= 0 && stream < DEV_COPY_STREAMS);
    if (!d->ops->evict) return dev_copy(d, dst_host, src_dev, bytes);
    return bytes ? TRACED(evict, (d, stream, dst_host, src_dev, bytes), (int64_t)bytes, 0, 0) : 0;
}
int dev_copy_stream_wait(struct dev *d, int stream) {
    CHECK(stream >= 0 && stream < DEV_COPY_STREAMS);
    return d->ops->copy_stream_wait ? TRACED(copy_stream_wait, (d, stream), stream, 0, 0) : 0;
}
int dev_copy_stream_sync(struct dev *d, int stream) {
    CHECK(stream >= 0 && stream < DEV_COPY_STREAMS);
    return d->ops->copy_stream_sync ? d->ops->copy_stream_sync(d, stream) : 0;
}

int dev_sync(struct dev *d) { return d->ops->sync ? d->ops->sync(d) : 0; /* a backend without a queue has nothing to wait for */ }
int dev_copy_in(struct dev *d, void *dst_dev, const void *src_host, size_t bytes) {
    HAVE(copy_in);
    return bytes ? TRACED(copy_in, (d, dst_dev, src_host, bytes), (int64_t)bytes, 0, 0) : 0;
}
int dev_copy_out(struct dev *d, void *dst_host, const void *src_dev, size_t bytes) {
    HAVE(copy_out);
    return bytes ? TRACED(copy_out, (d, dst_host, src_dev, bytes), (int64_t)bytes, 0, 0) : 0;
}
int dev_copy(struct dev *d, void *dst_dev, const void *src_dev, size_t bytes) {
    HAVE(copy);
    return bytes ? TRACED(copy, (d, dst_dev, src_dev, bytes), (int64_t)bytes, 0, 0) : 0;
}
int dev_zero(struct dev *d, void *dst_dev, size_t bytes) {
    HAVE(zero);
    return bytes ? TRACED(zero, (d, dst_dev, bytes), (int64_t)bytes, 0, 0) : 0;
}
