/* backend.cu - the CUDA backend's opening, memory, copies and ops table.
 *
 * One context of one GPU with one compute stream; all kernels queue there.  Pageable host memory goes
 * through a pinned staging buffer of two halves, so that a caller may reuse its memory at once
 * and a large copy fills one half while the other is in flight.
 * Invariant: the thread that opened the device is the one that uses it (the current
 * GPU is a property of the thread). */
#include "device/cuda/abi.h"
#include "device/cuda/context.cuh"

#include "base/log.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef VERLC_CUDA_ARCHS
#define VERLC_CUDA_ARCHS "unknown"
#endif

static const size_t HALF = 4 << 20; /* bytes of one half of the staging buffer */

struct staging {
    char *half[2];       /* pinned, HALF each */
    cudaEvent_t done[2]; /* the half has been read */
    size_t used;         /* bytes of the current half */
    int current;
};
enum { MAX_OLD = 64 };
struct cuda_dev {
    struct cuda c; /* first: cuda_of casts */
    struct staging stage;
    bool captured;      /* a CUDA graph was captured: it may use any scratch buffer of that time */
    void *old[MAX_OLD]; /* outgrown scratch buffers that a CUDA graph may use */
    int n_old;
};
static struct staging *staging_of(struct dev *d) { return &((struct cuda_dev *)d->ctx)->stage; }

/* ---- errors, scratch ---- */

/* Errors after which the context answers every call with the same error. */
static bool context_lost(cudaError_t e) {
    return e == cudaErrorIllegalAddress || e == cudaErrorLaunchFailure || e == cudaErrorECCUncorrectable || e == cudaErrorAssert ||
           e == cudaErrorLaunchTimeout || e == cudaErrorHardwareStackError || e == cudaErrorIllegalInstruction ||
           e == cudaErrorMisalignedAddress || e == cudaErrorInvalidAddressSpace || e == cudaErrorInvalidPc ||
           e == cudaErrorUnknown || e == cudaErrorDevicesUnavailable;
}

int cuda_err(cudaError_t e, const char *what, const char *file, int line) {
    const char *advice = "";
    cudaGetLastError(); /* so that the next call does not report this one */
    if (e == cudaErrorMemoryAllocation)
        return err_set(ERR_NOMEM, file, line,
                       "cuda: the GPU is out of memory (%s); lower the batch or sequence lengths, or "
                       "free it of other programs (nvidia-smi lists them)",
                       what);
    if (e == cudaErrorECCUncorrectable)
        advice = "; its memory is failing: see `nvidia-smi -q -d ECC`, then resume from the last checkpoint";
    else if (context_lost(e))
        advice = "; the GPU's state is lost: see the kernel log for an Xid, then resume from the last checkpoint";
    else if (e == cudaErrorNoKernelImageForDevice) advice = "; this GPU's architecture is not among those built: " VERLC_CUDA_ARCHS;
    return err_set(ERR_DEVICE, file, line, "cuda: %s (%s) in %s%s", cudaGetErrorString(e), cudaGetErrorName(e), what, advice);
}

static cudaError_t find_entry(const char *name, unsigned version, void **f, cudaDriverEntryPointQueryResult *result) {
#if CUDART_VERSION >= 12050
    return cudaGetDriverEntryPointByVersion(name, f, version, cudaEnableDefault, result);
#else
    (void)version;
    return cudaGetDriverEntryPoint(name, f, cudaEnableDefault, result);
#endif
}

int cuda_driver_entry(const char *name, void **f) {
    cudaDriverEntryPointQueryResult result;
    void *found = NULL;
    CU_TRY(find_entry(name, 12000, &found, &result));
    if (result != cudaDriverEntryPointSuccess || !found) FAIL(ERR_DEVICE, "cuda: the driver has no %s", name);
    *f = found;
    return 0;
}

void cuda_driver_has(const char *name, void **f) {
    cudaDriverEntryPointQueryResult result;
    void *found = NULL;
    const cudaError_t e = find_entry(name, 12030, &found, &result);
    cudaGetLastError();
    if (e == cudaSuccess && result == cudaDriverEntryPointSuccess && found) *f = found;
}

int cuda_hold(struct cuda *c, size_t bytes, void **out) {
    CU_TRY(cudaMalloc(out, bytes));
    c->held += bytes;
    c->n_holds++;
    return 0;
}

int cuda_drop(struct cuda *c, void *p, size_t bytes) {
    if (!p) return 0;
    CU_TRY(cudaFree(p));
    c->held -= bytes;
    return 0;
}

/* Releases a scratch buffer, at once where no CUDA graph can use it: autotuning is never captured. */
static int retire(struct cuda_dev *cd, enum cuda_scratch_id id) {
    void *p = cd->c.scratch[id].p;
    const size_t bytes = cd->c.scratch[id].bytes;
    cd->c.scratch[id].p = NULL;
    cd->c.scratch[id].bytes = 0;
    if (!p) return 0;
    if (!cd->captured || id == CUDA_SCRATCH_AUTOTUNE) {
        CU_TRY(cudaStreamSynchronize(cd->c.stream)); /* what is queued may read it */
        return cuda_drop(&cd->c, p, bytes);
    }
    if (cd->n_old == MAX_OLD)
        FAIL(ERR_INTERNAL, "cuda: scratch buffers were outgrown %d times after a CUDA graph was captured", MAX_OLD);
    cd->old[cd->n_old++] = p;
    return 0;
}

int cuda_scratch(struct cuda *c, enum cuda_scratch_id id, size_t bytes, void **out) {
    const size_t unit = 1 << 20, need = bytes ? (bytes + unit - 1) / unit * unit : unit;
    if (c->scratch[id].bytes < bytes || !c->scratch[id].p) {
        TRY(retire((struct cuda_dev *)c, id));
        TRY(cuda_hold(c, need, &c->scratch[id].p));
        c->scratch[id].bytes = need;
    }
    *out = c->scratch[id].p;
    return 0;
}

int cuda_pinned(struct cuda *c, size_t bytes, void **out) {
    if (c->pinned_bytes < bytes || !c->pinned) {
        CU_TRY(cudaStreamSynchronize(c->stream));
        CU_TRY(cudaFreeHost(c->pinned));
        c->pinned = NULL;
        c->pinned_bytes = 0;
        CU_TRY(cudaHostAlloc(&c->pinned, bytes ? bytes : 1, cudaHostAllocDefault));
        c->pinned_bytes = bytes ? bytes : 1;
    }
    *out = c->pinned;
    return 0;
}

/* ---- memory ---- */

static int op_alloc(struct dev *d, size_t bytes, void **out) {
    (void)d;
    const cudaError_t e = cudaMalloc(out, bytes); /* 256-aligned */
    if (e != cudaErrorMemoryAllocation) CU_TRY(e);
    else cudaGetLastError();
    return e == cudaSuccess ? 0 : ERR_NOMEM; /* the wrapper words the message */
}
static void op_free(struct dev *d, void *p, size_t bytes) {
    (void)d, (void)bytes;
    cudaFree(p); /* waits for what is queued */
}
static int op_memory(struct dev *d, struct dev_memory *out) {
    const struct cuda *c = cuda_of(d);
    size_t free_now = 0, total = 0;
    CU_TRY(cudaMemGetInfo(&free_now, &total));
    const size_t used = total - free_now, known = c->used_at_open + d->allocated + c->held;
    out->working = c->held;
    out->system = used > known ? used - known : 0;
    out->n_allocs = c->n_holds;
    return 0;
}
static int op_sync(struct dev *d) { return cuda_offload_settle(cuda_of(d)); }

/* Marks the current half as in flight and turns to the other, which is free on return. */
static int turn(struct cuda *c, struct staging *s) {
    CU_TRY(cudaEventRecord(s->done[s->current], c->stream));
    s->current ^= 1;
    s->used = 0;
    CU_TRY(cudaEventSynchronize(s->done[s->current]));
    return 0;
}

/* Between host and host, once nothing queued can touch either. */
static int settled_copy(struct cuda *c, void *dst, const void *src, size_t bytes) {
    TRY(cuda_offload_settle(c));
    memmove(dst, src, bytes);
    return 0;
}

static int op_copy_in(struct dev *d, void *dst, const void *src, size_t bytes) {
    struct cuda *c = cuda_of(d);
    struct staging *s = staging_of(d);
    if (cuda_offload_has(c, dst)) return settled_copy(c, dst, src, bytes);
    for (size_t at = 0; at < bytes;) {
        if (s->used == HALF) TRY(turn(c, s));
        const size_t room = HALF - s->used, n = bytes - at < room ? bytes - at : room;
        char *from = s->half[s->current] + s->used;
        memcpy(from, (const char *)src + at, n);
        CU_TRY(cudaMemcpyAsync((char *)dst + at, from, n, cudaMemcpyHostToDevice, c->stream));
        s->used = n == room ? HALF : (s->used + n + 255) & ~(size_t)255;
        at += n;
    }
    return 0;
}

/* The halves serve in turn; the stream has read what copy_in left in them before it writes there. */
static int op_copy_out(struct dev *d, void *dst, const void *src, size_t bytes) {
    struct cuda *c = cuda_of(d);
    struct staging *s = staging_of(d);
    const size_t parts = (bytes + HALF - 1) / HALF;
    if (cuda_offload_has(c, src)) return settled_copy(c, dst, src, bytes);
    for (size_t i = 0; i <= parts; i++) { /* part i is queued, then part i - 1 is taken */
        if (i < parts) {
            const size_t at = i * HALF, n = bytes - at < HALF ? bytes - at : HALF;
            CU_TRY(cudaMemcpyAsync(s->half[i & 1], (const char *)src + at, n, cudaMemcpyDeviceToHost, c->stream));
            CU_TRY(cudaEventRecord(s->done[i & 1], c->stream));
        }
        if (i > 0) {
            const size_t at = (i - 1) * HALF, n = bytes - at < HALF ? bytes - at : HALF;
            CU_TRY(cudaEventSynchronize(s->done[(i - 1) & 1]));
            memcpy((char *)dst + at, s->half[(i - 1) & 1], n);
        }
    }
    s->used = 0; /* all that was queued before is done, so both halves are free */
    return 0;
}

static int op_copy(struct dev *d, void *dst, const void *src, size_t bytes) {
    struct cuda *c = cuda_of(d);
    const bool to = cuda_offload_has(c, dst), from = cuda_offload_has(c, src);
    if (to && from) return settled_copy(c, dst, src, bytes);
    CU_TRY(cudaMemcpyAsync(dst, src, bytes,
                           to     ? cudaMemcpyDeviceToHost
                           : from ? cudaMemcpyHostToDevice
                                  : cudaMemcpyDeviceToDevice,
                           c->stream));
    return 0;
}
static int op_zero(struct dev *d, void *dst, size_t bytes) {
    struct cuda *c = cuda_of(d);
    if (cuda_offload_has(c, dst)) {
        TRY(cuda_offload_settle(c));
        memset(dst, 0, bytes);
        return 0;
    }
    CU_TRY(cudaMemsetAsync(dst, 0, bytes, c->stream));
    return 0;
}

/* ---- opening ---- */

static void op_close(struct dev *d) {
    struct cuda_dev *cd = (struct cuda_dev *)d->ctx;
    struct cuda *c = &cd->c;
    struct staging *s = &cd->stage;
    if (c->stream) cudaStreamSynchronize(c->stream);
    cuda_offload_close(c);
    if (c->gemm) cuda_gemm_close(c);
    for (int i = 0; i < CUDA_N_SCRATCH; i++) cudaFree(c->scratch[i].p);
    for (int i = 0; i < cd->n_old; i++) cudaFree(cd->old[i]);
    cudaFreeHost(c->pinned);
    for (int64_t i = 0; i < c->n_stamps; i++) cudaEventDestroy(c->stamps[i]);
    free(c->stamps);
    for (int i = 0; i < 2; i++) {
        cudaFreeHost(s->half[i]);
        if (s->done[i]) cudaEventDestroy(s->done[i]);
    }
    if (c->stream) cudaStreamDestroy(c->stream);
    cudaGetLastError();
    free(cd);
}

static int op_graph_begin(struct dev *d) {
    ((struct cuda_dev *)d->ctx)->captured = true;
    return cuda_graph_begin(d);
}

static struct dev_ops make_ops(void) {
    static const struct dev_caps caps = CUDA_CAPS;
    struct dev_ops o = {};
    o.name = "cuda";
    o.caps = caps;
    o.close = op_close;
    o.alloc = op_alloc;
    o.free = op_free;
    o.sync = op_sync;
    o.copy_in = op_copy_in;
    o.copy_out = op_copy_out;
    o.copy = op_copy;
    o.zero = op_zero;
    o.working_bytes = cuda_working_bytes;
    o.reserve = cuda_reserve;
    o.memory = op_memory;
    o.host_alloc = cuda_host_alloc;
    o.host_free = cuda_host_free;
    o.host_register = cuda_host_register;
    o.host_unregister = cuda_host_unregister;
    o.fetch = cuda_fetch;
    o.evict = cuda_evict;
    o.copy_stream_wait = cuda_copy_stream_wait;
    o.copy_stream_sync = cuda_copy_stream_sync;
    o.weight_bytes = cuda_weight_bytes;
    o.keeps_logits = cuda_keeps_logits;
    o.decode_next = cuda_decode_next;
#define OP(name, ...) o.name = cuda_##name;
#define OP_FUSED OP
#include "device/ops.def"
    o.graph_begin = op_graph_begin;
    o.graph_end = cuda_graph_end;
    o.graph_run = cuda_graph_run;
    o.graph_free = cuda_graph_free;
    o.stamp = cuda_stamp;
    o.stamp_us = cuda_stamp_us;
    o.peers = &cuda_peers;
    o.nccl = &cuda_nccl_ops;
    return o;
}

static __global__ void probe_kernel(void) {}

/* ERR_DEVICE when no code of this library runs on this GPU. */
static int check_arch(const cudaDeviceProp *p) {
    cudaFuncAttributes a;
    const cudaError_t e = cudaFuncGetAttributes(&a, probe_kernel);
    if (e == cudaErrorNoKernelImageForDevice || e == cudaErrorInvalidDeviceFunction) {
        cudaGetLastError();
        FAIL(ERR_DEVICE, "cuda: %s is sm_%d%d; this library was built for %s: build again with VERLC_CUDA_ARCHS=%d%d", p->name,
             p->major, p->minor, VERLC_CUDA_ARCHS, p->major, p->minor);
    }
    CU_TRY(e);
    return 0;
}

static int open_context(struct cuda_dev *cd, const cudaDeviceProp *p) {
    struct cuda *c = &cd->c;
    c->n_sm = p->multiProcessorCount;
    c->cc = p->major * 10 + p->minor;
    c->smem_max = p->sharedMemPerBlockOptin;
    CU_TRY(cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking));
    for (int i = 0; i < 2; i++) {
        CU_TRY(cudaHostAlloc((void **)&cd->stage.half[i], HALF, cudaHostAllocDefault));
        CU_TRY(cudaEventCreateWithFlags(&cd->stage.done[i], cudaEventDisableTiming));
    }
    return cuda_gemm_open(c);
}

/* Memory that this process may have: what is free now. Says so where others hold some. */
static int memory_room(struct dev *d, struct cuda *c, size_t own) {
    const double gib = 1024.0 * 1024.0 * 1024.0;
    size_t now = 0, total = 0;
    CU_TRY(cudaMemGetInfo(&now, &total));
    d->mem_total = now;
    c->used_at_open = total - now - c->held;
    const size_t others = total > now + own ? total - now - own : 0;
    if ((double)others > 0.02 * (double)total) {
        d->mem_others = others;
        log_warn("cuda:%d: other processes hold %.1f of its %.1f GiB; %.1f GiB are free", c->index, (double)others / gib,
                 (double)total / gib, (double)now / gib);
    }
    return 0;
}

extern "C" int verlc_cuda_count(int *count) {
    *count = 0;
    const cudaError_t e = cudaGetDeviceCount(count);
    if (e == cudaSuccess && *count > 0) return 0;
    cudaGetLastError();
    int driver = 0;
    if (e == cudaErrorInsufficientDriver && cudaDriverGetVersion(&driver) == cudaSuccess && driver > 0)
        FAIL(ERR_DEVICE,
             "cuda: the NVIDIA driver is too old: it has CUDA %d.%d, this build needs %d.%d; update the driver or "
             "build with an older toolkit",
             driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    if (e == cudaErrorInsufficientDriver) FAIL(ERR_DEVICE, "cuda: no NVIDIA driver runs here (libcuda.so.1 answers nothing)");
    if (e == cudaSuccess || e == cudaErrorNoDevice)
        FAIL(ERR_DEVICE, "cuda: no GPU is visible%s", getenv("CUDA_VISIBLE_DEVICES") ? " (CUDA_VISIBLE_DEVICES is set)" : "");
    return cuda_err(e, "cudaGetDeviceCount", __FILE__, __LINE__);
}

/* Bytes in use before this process has a context cannot be asked without one: its own are the difference. */
static int open_device(struct dev *d, struct cuda_dev *cd, int index) {
    cudaDeviceProp p;
    size_t before = 0, after = 0, total = 0;
    CU_TRY(cudaGetDeviceProperties(&p, index));
    CU_TRY(cudaSetDevice(index));
    TRY(check_arch(&p));
    CU_TRY(cudaMemGetInfo(&before, &total));
    TRY(open_context(cd, &p));
    CU_TRY(cudaMemGetInfo(&after, &total));
    const size_t context = (size_t)1 << 30; /* a context and its modules take about half of this */
    TRY(memory_room(d, &cd->c, context + (before > after ? before - after : 0)));
    for (size_t i = 0; i < sizeof p.uuid.bytes; i++) snprintf(d->id + 2 * i, 3, "%02x", (unsigned char)p.uuid.bytes[i]);
    snprintf(d->isa, sizeof d->isa, "cuda-sm_%d", cd->c.cc);
    snprintf(d->describe, sizeof d->describe, "cuda: %.80s, sm_%d, %.0f GiB", p.name, cd->c.cc,
             (double)p.totalGlobalMem / (1024.0 * 1024.0 * 1024.0));
    return 0;
}

extern "C" int verlc_cuda_open(struct dev *d, int index) {
    static struct dev_ops ops;
    struct cuda_dev *cd = (struct cuda_dev *)calloc(1, sizeof *cd);
    if (!cd) FAIL(ERR_NOMEM, "cuda: out of host memory");
    ops = make_ops();
    *d = dev{};
    d->ops = &ops;
    d->ctx = cd;
    d->range = cuda_range_of();
    cd->c.index = index;
    const int rc = open_device(d, cd, index);
    if (rc < 0) {
        op_close(d);
        *d = dev{};
    }
    return rc;
}

extern "C" const char verlc_cuda_abi[] = VERLC_CUDA_ABI;
