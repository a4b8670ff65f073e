/* gpu_use.c - see gpu_use.h.
 *
 * NVML is opened at run time: nothing here needs its headers. It is asked for the device by its UUID, so CUDA_VISIBLE_DEVICES
 * plays no role. Invariant: whoever computes never waits for it. */
#include "device/device_int.h"
#include "device/gpu_use.h"

#include "base/buf.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { PERIOD_MS = 500 };

/* What is used of nvml.h; each returns 0 for success. */
struct utilization {
    unsigned gpu, memory; /* percent of the time */
};
struct memory {
    unsigned long long total, free, used;
};
struct nvml {
    int (*init)(void);
    int (*shutdown)(void);
    int (*by_uuid)(const char *uuid, void **device);
    int (*utilization)(void *device, struct utilization *u);
    int (*memory)(void *device, struct memory *m);
};

struct gpu_use {
    char id[40];
    void *library, *device;
    struct nvml nvml;
    pthread_t thread;
    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t end;
    bool ending, running;
    double busy, bytes; /* sums */
    int64_t n;
};

static bool load(struct gpu_use *u) {
    static const char *const names[] = {"nvmlInit_v2", "nvmlShutdown", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetUtilizationRates",
                                        "nvmlDeviceGetMemoryInfo"};
    void *functions[sizeof names / sizeof *names];
    const char *chosen = getenv("VERLC_NVML_LIB");
    u->library = dlopen(chosen ? chosen : "libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!u->library) return false;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!(functions[i] = dlsym(u->library, names[i]))) return false;
    _Static_assert(sizeof functions == sizeof u->nvml, "a pointer each");
    memcpy(&u->nvml, functions, sizeof functions);
    return true;
}

/* "GPU-8-4-4-4-12" of the 32 digits of struct dev's id. */
static bool find_device(struct gpu_use *u) {
    const char *id = u->id;
    char uuid[48];
    if (strlen(id) != 32) return false;
    snprintf(uuid, sizeof uuid, "GPU-%.8s-%.4s-%.4s-%.4s-%.12s", id, id + 8, id + 12, id + 16, id + 20);
    return u->nvml.by_uuid(uuid, &u->device) == 0;
}

static void look(struct gpu_use *u) {
    struct utilization busy = {0};
    struct memory memory = {0};
    if (u->nvml.utilization(u->device, &busy) != 0 || u->nvml.memory(u->device, &memory) != 0) return;
    pthread_mutex_lock(&u->lock);
    u->busy += busy.gpu / 100.0;
    u->bytes += (double)memory.used;
    u->n++;
    pthread_mutex_unlock(&u->lock);
}

/* Half a second; false: it is to end. */
static bool wait(struct gpu_use *u) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += PERIOD_MS * 1000000L;
    until.tv_sec += until.tv_nsec / 1000000000L;
    until.tv_nsec %= 1000000000L;
    pthread_mutex_lock(&u->lock);
    while (!u->ending && pthread_cond_timedwait(&u->end, &u->lock, &until) == 0) continue;
    const bool on = !u->ending;
    pthread_mutex_unlock(&u->lock);
    return on;
}

/* NVML is opened here too, which takes a moment. */
static void *watch(void *arg) {
    struct gpu_use *u = arg;
    if (!load(u) || u->nvml.init() != 0) return NULL;
    for (bool on = find_device(u); on; on = wait(u)) look(u);
    u->nvml.shutdown();
    return NULL;
}

static void begin(struct gpu_use *u, const char *id) {
    pthread_condattr_t monotonic;
    pthread_mutex_init(&u->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&u->end, &monotonic);
    pthread_condattr_destroy(&monotonic);
    snprintf(u->id, sizeof u->id, "%s", id);
    u->running = pthread_create(&u->thread, NULL, watch, u) == 0;
}

bool dev_gpu_use(struct dev *d, double *busy, double *bytes) {
    struct gpu_use *u = d->use;
    if (strcmp(d->ops->name, "cuda") != 0) return false;
    if (!u) {
        u = d->use = xcalloc(1, sizeof *u);
        begin(u, d->id);
    }
    pthread_mutex_lock(&u->lock);
    const int64_t n = u->n;
    if (n > 0) *busy = u->busy / (double)n;
    if (n > 0) *bytes = u->bytes / (double)n;
    u->busy = u->bytes = 0;
    u->n = 0;
    pthread_mutex_unlock(&u->lock);
    return n > 0;
}

void dev_gpu_use__drop(struct dev *d) {
    struct gpu_use *u = d->use;
    if (!u) return;
    if (u->running) {
        pthread_mutex_lock(&u->lock);
        u->ending = true;
        pthread_cond_signal(&u->end);
        pthread_mutex_unlock(&u->lock);
        pthread_join(u->thread, NULL);
    }
    if (u->library) dlclose(u->library);
    pthread_cond_destroy(&u->end);
    pthread_mutex_destroy(&u->lock);
    free(u);
    d->use = NULL;
}
