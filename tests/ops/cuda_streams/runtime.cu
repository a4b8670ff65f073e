/* runtime.cu - streams, events, copies and flags without a GPU. A hardware queue is a thread, which does what was submitted to it
 * in that order, late at random; streams of a device share its queues in turn, as on a GPU that has fewer queues than streams. */
#include "device/cuda/context.cuh"

#include <atomic>
#include <cuda.h>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <unistd.h>
#include <vector>

struct queue {
    std::mutex lock;
    std::deque<std::function<bool()>> work;
    std::minstd_rand rng;
    std::atomic<bool> end{false};
    std::thread thread;
    explicit queue(unsigned seed) : rng(seed + 1), thread(&queue::run, this) {}
    ~queue() {
        end = true;
        thread.join();
    }
    void run() {
        for (std::function<bool()> next; !end; next = nullptr) {
            lock.lock();
            if (!work.empty()) next = work.front();
            lock.unlock();
            if (!next || rng() % 6 == 0) usleep(next ? (useconds_t)(rng() % 200) : 50);
            if (!next) continue;
            while (!next()) usleep(20);
            const std::lock_guard<std::mutex> own(lock);
            work.pop_front();
        }
    }
};
struct device {
    std::vector<queue *> queues;
    std::vector<stream *> streams;
    std::set<const void *> loaded; /* kernels */
    size_t next;                   /* queue */
};
struct stream {
    queue *q;
    std::atomic<int64_t> pushed{0}, done{0};
};
struct event {
    std::shared_ptr<std::atomic<bool>> there; /* of the last record */
};
static thread_local device *here;
thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

void streams_device(int queues) {
    static std::atomic<unsigned> seed;
    here = new device();
    for (int i = 0; i < queues; i++) here->queues.push_back(new queue(seed++));
}

void streams_idle() {
    for (stream *s : here->streams) cudaStreamSynchronize(s);
}

void streams_load(const void *kernel) {
    if (here->loaded.insert(kernel).second) streams_idle();
}

void streams_end() {
    for (queue *q : here->queues) delete q;
    for (stream *s : here->streams) delete s;
    delete here;
}

void streams_push(cudaStream_t s, std::function<bool()> what) {
    s->pushed++;
    const std::lock_guard<std::mutex> own(s->q->lock);
    s->q->work.push_back([s, what] {
        if (!what()) return false;
        s->done++;
        return true;
    });
}

cudaError_t cudaGetLastError() { return cudaSuccess; }
const char *cudaGetErrorString(cudaError_t e) { return e == cudaSuccess ? "none" : "some"; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = *greatest = 0;
    return cudaSuccess;
}

/* ---- streams, events ---- */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned, int) {
    *s = new stream();
    (*s)->q = here->queues[here->next++ % here->queues.size()];
    here->streams.push_back(*s);
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t s) { /* until streams_end its queue may hold what was pushed */
    return cudaStreamSynchronize(s);
}
cudaError_t cudaStreamQuery(cudaStream_t s) { return s->done == s->pushed ? cudaSuccess : cudaErrorNotReady; }
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    while (s->done != s->pushed) usleep(10);
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned) {
    *e = new event();
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t e) {
    delete e;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    const auto there = e->there = std::make_shared<std::atomic<bool>>(false);
    streams_push(s, [there] { return there->exchange(true), true; });
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    while (e->there && !*e->there) usleep(10);
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
    const auto there = e->there;
    if (there) streams_push(s, [there] { return there->load(); });
    return cudaSuccess;
}

/* ---- memory ---- */

cudaError_t cudaMemcpy(void *to, const void *from, size_t n, cudaMemcpyKind) {
    memcpy(to, from, n);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, cudaMemcpyKind, cudaStream_t s) {
    streams_push(s, [=] { return memcpy(to, from, n), true; });
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *to, int byte, size_t n, cudaStream_t s) {
    streams_push(s, [=] { return memset(to, byte, n), true; });
    return cudaSuccess;
}
cudaError_t cudaMalloc(void **p, size_t n) {
    *p = aligned_alloc(4096, (n + 4095) / 4096 * 4096);
    return cudaSuccess;
}
cudaError_t cudaFree(void *p) {
    streams_idle();
    free(p);
    return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned) { return cudaMalloc(p, n); }
cudaError_t cudaFreeHost(void *p) {
    free(p);
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *now, size_t *total) {
    *now = *total = 0;
    return cudaSuccess;
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *h, void *p) {
    *h = {};
    memcpy(h->bytes, &p, sizeof p);
    return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void **p, cudaIpcMemHandle_t h, unsigned) {
    memcpy(p, h.bytes, sizeof *p);
    return cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void *) { return cudaSuccess; }

int cuda_hold(struct cuda *, size_t bytes, void **out) {
    cudaMalloc(out, bytes);
    memset(*out, 0xee, bytes);
    return 0;
}
int cuda_drop(struct cuda *, void *p, size_t) {
    if (p) cudaFree(p);
    return 0;
}

/* ---- the driver's calls ---- */

static std::atomic<bool> lost;
void streams_lose_writes(bool lose) { lost = lose; }

static CUresult write_value(CUstream s, CUdeviceptr at, cuuint32_t v, unsigned) {
    if (!lost) streams_push(s, [=] { return __atomic_store_n((uint32_t *)at, v, __ATOMIC_SEQ_CST), true; });
    return CUDA_SUCCESS;
}
static CUresult wait_value(CUstream s, CUdeviceptr at, cuuint32_t v, unsigned) {
    streams_push(s, [=] { return (int32_t)(__atomic_load_n((uint32_t *)at, __ATOMIC_SEQ_CST) - v) >= 0; });
    return CUDA_SUCCESS;
}
static CUresult address_range(CUdeviceptr *base, size_t *size, CUdeviceptr p) {
    *base = p / 4096 * 4096;
    *size = SIZE_MAX / 2;
    return CUDA_SUCCESS;
}
int cuda_driver_entry(const char *name, void **f) {
    *f = strcmp(name, "cuStreamWriteValue32") == 0  ? (void *)write_value
         : strcmp(name, "cuStreamWaitValue32") == 0 ? (void *)wait_value
                                                    : (void *)address_range;
    return 0;
}

/* ---- kernels ---- */

int cuda_load_group_kernels(void) {
    streams_load((const void *)cuda_fold_on);
    streams_load((const void *)cuda_embed_bwd_on);
    return 0;
}

int cuda_fold_on(cudaStream_t s, struct tensor y, const struct tensor *x, int n, bool add) {
    std::vector<const float *> from;
    streams_load((const void *)cuda_fold_on);
    for (int k = 0; k < n; k++) from.push_back((const float *)x[k].data);
    streams_push(s, [=] {
        for (int64_t i = 0; i < y.dim[0]; i++) {
            float sum = add ? ((float *)y.data)[i] : from[0][i];
            for (size_t k = add ? 0 : 1; k < from.size(); k++) sum += from[k][i];
            ((float *)y.data)[i] = sum;
        }
        return true;
    });
    return 0;
}

size_t cuda_embed_bwd_table(int64_t lo, int64_t n, int64_t h) { return (size_t)((lo + n - 1) / h - lo / h + 1) * 8; }

/* Equal ids are summed first, from 0; the table is used all the time. */
int cuda_embed_bwd_on(cudaStream_t s, void *table, const struct cuda_embed_bwd_args *a) {
    const struct tensor dw = a->dw, ids = a->ids, dx = a->dx;
    const int64_t lo = a->lo, h = dx.dim[1], n = dw.dim[0];
    const size_t bytes = cuda_embed_bwd_table(lo, n, h);
    streams_load((const void *)cuda_embed_bwd_on);
    streams_push(s, [=] {
        std::map<int32_t, std::vector<float>> sums;
        memset(table, 0, bytes);
        for (int64_t t = 0; t < ids.dim[0]; t++) {
            std::vector<float> &sum = sums[((const int32_t *)ids.data)[t]];
            sum.resize((size_t)h);
            for (int64_t c = 0; c < h; c++) sum[(size_t)c] += ((const float *)dx.data)[t * h + c];
        }
        for (const auto &one : sums)
            for (int64_t c = 0; c < h; c++) {
                const int64_t at = one.first * h + c - lo;
                if (at >= 0 && at < n) ((float *)dw.data)[at] += one.second[(size_t)c];
            }
        memset(table, 0xff, bytes);
        return true;
    });
    return 0;
}
