/* host_offload.cu - pinned host memory for offload, and copy streams.
 *
 * Blocks are pinned and in the unified address space, so kernels and copies take their pointers as
 * they are.  The copy streams of device/memory.h are logical: one CUDA stream copies host to device, one device to
 * host, so both directions of the bus are used at once, and an event for each copy stream keeps its order across the two.
 * Invariant: a transfer waits for all that was queued before it on the compute stream, and
 * the host touches such a block only after everything queued is done. */
#include "device/cuda/context.cuh"

#include <stdlib.h>
#include <string.h>

enum { MAX_BLOCKS = 64 };

struct cuda_offload {
    cudaStream_t in, out;
    cudaEvent_t queued;                 /* the end of the compute stream when a transfer was asked for */
    cudaEvent_t done[DEV_COPY_STREAMS]; /* the copy stream's last transfer */
    struct {
        char *p;
        size_t bytes;
    } block[MAX_BLOCKS];
    int n;
};

static int open_offload(struct cuda *c) {
    if (c->offload) return 0;
    struct cuda_offload *o = c->offload = (struct cuda_offload *)calloc(1, sizeof *o);
    if (!o) FAIL(ERR_NOMEM, "cuda: out of host memory");
    CU_TRY(cudaStreamCreateWithFlags(&o->in, cudaStreamNonBlocking));
    CU_TRY(cudaStreamCreateWithFlags(&o->out, cudaStreamNonBlocking));
    CU_TRY(cudaEventCreateWithFlags(&o->queued, cudaEventDisableTiming));
    for (int i = 0; i < DEV_COPY_STREAMS; i++) CU_TRY(cudaEventCreateWithFlags(&o->done[i], cudaEventDisableTiming));
    return 0;
}

void cuda_offload_close(struct cuda *c) {
    struct cuda_offload *o = c->offload;
    if (!o) return;
    for (int i = 0; i < o->n; i++) cudaFreeHost(o->block[i].p);
    for (int i = 0; i < DEV_COPY_STREAMS; i++)
        if (o->done[i]) cudaEventDestroy(o->done[i]);
    if (o->queued) cudaEventDestroy(o->queued);
    if (o->in) cudaStreamDestroy(o->in);
    if (o->out) cudaStreamDestroy(o->out);
    free(o);
    c->offload = NULL;
}

int cuda_host_alloc(struct dev *d, size_t bytes, void **out) {
    struct cuda *c = cuda_of(d);
    TRY(open_offload(c));
    struct cuda_offload *o = c->offload;
    if (o->n == MAX_BLOCKS) FAIL(ERR_INTERNAL, "cuda: more than %d blocks of host memory", MAX_BLOCKS);
    const cudaError_t e = cudaHostAlloc(out, bytes, cudaHostAllocDefault);
    if (e == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        return ERR_NOMEM; /* the wrapper words the message */
    }
    CU_TRY(e);
    o->block[o->n].p = (char *)*out;
    o->block[o->n++].bytes = bytes;
    return 0;
}

void cuda_host_free(struct dev *d, void *p, size_t bytes) {
    struct cuda *c = cuda_of(d);
    struct cuda_offload *o = c->offload;
    (void)bytes;
    cuda_offload_settle(c);
    for (int i = 0; i < o->n; i++)
        if (o->block[i].p == p) o->block[i] = o->block[--o->n];
    cudaFreeHost(p);
}

int cuda_host_register(struct dev *d, void *p, size_t bytes) {
    TRY(open_offload(cuda_of(d)));
    const cudaError_t e = cudaHostRegister(p, bytes, cudaHostRegisterDefault);
    if (e == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        return ERR_NOMEM; /* the wrapper words the message */
    }
    CU_TRY(e);
    return 0;
}

void cuda_host_unregister(struct dev *d, void *p) {
    cuda_offload_settle(cuda_of(d));
    if (cudaHostUnregister(p) != cudaSuccess) cudaGetLastError(); /* else the next launch reports it */
}

bool cuda_offload_has(const struct cuda *c, const void *p) {
    const struct cuda_offload *o = c->offload;
    for (int i = 0; o && i < o->n; i++)
        if ((const char *)p >= o->block[i].p && (const char *)p < o->block[i].p + o->block[i].bytes) return true;
    return false;
}

int cuda_offload_settle(struct cuda *c) {
    CU_TRY(cudaStreamSynchronize(c->stream));
    if (!c->offload) return 0;
    CU_TRY(cudaStreamSynchronize(c->offload->in));
    CU_TRY(cudaStreamSynchronize(c->offload->out));
    return 0;
}

/* One transfer after the compute stream and the copy stream. out: to the host, where what is offloaded lies. */
static int transfer(struct cuda *c, bool out, int stream, void *dst, const void *src, size_t bytes) {
    TRY(open_offload(c));
    struct cuda_offload *o = c->offload;
    cudaStream_t const s = out ? o->out : o->in;
    CU_TRY(cudaEventRecord(o->queued, c->stream));
    CU_TRY(cudaStreamWaitEvent(s, o->queued, 0));
    CU_TRY(cudaStreamWaitEvent(s, o->done[stream], 0)); /* no wait before its first transfer */
    CU_TRY(cudaMemcpyAsync(dst, src, bytes, out ? cudaMemcpyDefault : cudaMemcpyHostToDevice, s));
    CU_TRY(cudaEventRecord(o->done[stream], s));
    return 0;
}
int cuda_fetch(struct dev *d, int stream, void *dst, const void *src, size_t bytes) {
    return transfer(cuda_of(d), false, stream, dst, src, bytes);
}
int cuda_evict(struct dev *d, int stream, void *dst, const void *src, size_t bytes) {
    return transfer(cuda_of(d), true, stream, dst, src, bytes);
}
int cuda_copy_stream_wait(struct dev *d, int stream) {
    struct cuda *c = cuda_of(d);
    if (c->offload) CU_TRY(cudaStreamWaitEvent(c->stream, c->offload->done[stream], 0));
    return 0;
}
int cuda_copy_stream_sync(struct dev *d, int stream) {
    struct cuda *c = cuda_of(d);
    if (c->offload) CU_TRY(cudaEventSynchronize(c->offload->done[stream]));
    return 0;
}
