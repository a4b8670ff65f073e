/* open.c - opens a device by name; finds libverlc_cuda.so, opens it and asks it for a GPU.
 *
 * The program itself links nothing of CUDA: the same file runs on a machine without a
 * GPU.  The library calls err_set and related functions back in the program, which exports them.
 * Invariant: nothing of the library is used before its verlc_cuda_abi equals ours. */
#include "device/device.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/log.h"
#include "base/encoding/utf8.h"
#include "device/collective/peers.h"
#include "device/collective/transport.h"
#include "device/cuda/abi.h"
#include "device/cuda/scratch_sizes.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LIB_NAME "libverlc_cuda.so"

static struct { /* opened once, stays until the process ends: the CUDA runtime cannot be unloaded safely */
    void *handle;
    int (*count)(int *count);
    int (*open)(struct dev *d, int index);
} lib;

/* The library's path, caller frees: VERLC_CUDA_LIB, or next to the program, or ../lib/verlc. */
static int find_library(char **out) {
    const char *env = getenv("VERLC_CUDA_LIB");
    if (env && *env) {
        if (!file_exists(env)) FAIL(ERR_DEVICE, "cuda: VERLC_CUDA_LIB=%s: there is no such file", env);
        *out = xstrdup(env);
        return 0;
    }
    char *dir = file_program_dir();
    if (!dir) FAIL(ERR_DEVICE, "cuda: cannot tell where the program is (/proc/self/exe: %s); set VERLC_CUDA_LIB", strerror(errno));
    *out = file_join(dir, LIB_NAME);
    if (!file_exists(*out)) {
        free(*out);
        *out = file_join(dir, "../lib/verlc/" LIB_NAME); /* the wheel's place in an environment */
    }
    free(dir);
    if (file_exists(*out)) return 0;
    free(*out);
    *out = NULL;
    FAIL(ERR_DEVICE, "cuda: built without CUDA: " LIB_NAME " is not next to the program (`make CUDA=1` builds it)");
}

/* The runtime inside the library looks the driver up by this name; where it lies outside the
 * system's paths (WSL, some containers), having it open already is how it is found. */
static int find_driver(void) {
    static const char *const places[] = {"libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1", "/usr/local/nvidia/lib64/libcuda.so.1"};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++)
        if (dlopen(places[i], RTLD_LAZY | RTLD_GLOBAL)) return 0;
    FAIL(ERR_DEVICE, "cuda: no NVIDIA driver: libcuda.so.1 is not found (in a container: start it with its GPUs)");
}

static int check_abi(void *handle, const char *path) {
    static const char here[] = VERLC_CUDA_ABI;
    const char *there = dlsym(handle, "verlc_cuda_abi");
    if (!there) FAIL(ERR_DEVICE, "cuda: %s is not verlc's CUDA backend", path);
    if (memcmp(there, here, sizeof here) != 0)
        FAIL(ERR_DEVICE, "cuda: %s belongs to another build of verlc (its headers differ); build both together", path);
    return 0;
}

/* dlsym's void * as a function pointer, which ISO C has no cast for. */
static int symbol(void *handle, const char *path, const char *name, void *fn, size_t size) {
    void *p = dlsym(handle, name);
    if (!p) FAIL(ERR_DEVICE, "cuda: %s has no %s", path, name);
    memcpy(fn, &p, size);
    return 0;
}

static int open_library(void) {
    char *path = NULL;
    void *handle = NULL;
    int rc = 0;
    if (lib.handle) return 0;
    TRYG(find_library(&path), out);
    handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle) FAILG(out, ERR_DEVICE, "cuda: cannot open %s: %s", path, dlerror());
    TRYG(check_abi(handle, path), out);
    TRYG(find_driver(), out); /* loading the library does not need it, its first call does */
    TRYG(symbol(handle, path, "verlc_cuda_count", &lib.count, sizeof lib.count), out);
    TRYG(symbol(handle, path, "verlc_cuda_open", &lib.open, sizeof lib.open), out);
    lib.handle = handle;
    handle = NULL;
out:
    if (handle) dlclose(handle);
    free(path);
    return rc;
}

int dev_open_cuda(struct dev *d, int index) {
    int count = 0;
    *d = (struct dev){0};
    TRY(open_library());
    TRY(lib.count(&count));
    if (index < 0 || index >= count)
        FAIL(ERR_DEVICE, "cuda: there is no GPU %d: this process sees %d, numbered from 0", index, count);
    return lib.open(d, index);
}

/* ---- a GPU that is not there ---- */

static size_t planned_weight(struct dev *d, enum dtype dt, int64_t n, int64_t k) {
    (void)d;
    return (size_t)(n * k) * dtype_size(dt);
}
static size_t planned_working(struct dev *d, const struct dev_sizes *s) {
    static const struct cuda_shape h100 = {.n_sm = 132, .l2_bytes = (size_t)50 << 20}; /* it moves the sum by tens of MiB */
    (void)d;
    return cuda_scratch_sum(&h100, s);
}

static bool planned_logits(struct dev *d, struct weight w) { /* Hopper's, of which no smaller one is known */
    return d->mem_total >= (size_t)70 << 30 && w.dt == DT_BF16 && w.n % 8 == 0 && w.k % 8 == 0 && w.softcap <= 0;
}

void dev_open_cuda_planned(struct dev *d, size_t mem) {
    static const struct dev_peer_ops peers = {.bytes = cuda_peer_bytes};
    static const struct dev_nccl_ops nccl = {.bytes = cuda_nccl_bytes};
    static const struct dev_ops ops = {.name = "cuda",
                                       .caps = CUDA_CAPS,
                                       .weight_bytes = planned_weight,
                                       .working_bytes = planned_working,
                                       .keeps_logits = planned_logits,
                                       .peers = &peers,
                                       .nccl = &nccl};
    *d = (struct dev){.ops = &ops, .mem_total = mem};
    snprintf(d->describe, sizeof d->describe, "cuda: a GPU of %.0f GiB, not there", (double)mem / 0x1p30);
}

bool dev_cuda_present(char *why, size_t size) {
    int count = 0, rc = open_library();
    if (rc == 0) rc = lib.count(&count);
    const char *msg = rc < 0 ? err_msg() : "";
    snprintf(why, size, "%.*s", (int)utf8_cut(msg, size - 1), msg);
    return rc == 0;
}

int dev_cuda_count(void) {
    int count = 0;
    return open_library() == 0 && lib.count(&count) == 0 ? count : 0;
}

/* "cuda" is 0, "cuda:N" is N. */
static int cuda_index(const char *name, int *index) {
    char *end = NULL;
    *index = 0;
    if (strcmp(name, "cuda") == 0) return 0;
    const char *number = strncmp(name, "cuda:", 5) == 0 ? name + 5 : "";
    const long n = *number >= '0' && *number <= '9' ? strtol(number, &end, 10) : -1;
    if (n < 0 || n > 1023 || *end)
        FAIL(ERR_INVAL, "device '%s' is unknown: expected auto, cpu, cuda, cuda:N (N from 0) or ref", name);
    *index = (int)n;
    return 0;
}

static int open_auto(struct dev *d, int n_threads, const char *isa) {
    if (dev_open_cuda(d, 0) == 0) {
        log_info("device: %s", d->describe);
        return 0;
    }
    char *why = xstrdup(err_msg());
    const int rc = dev_open_cpu(d, n_threads, isa);
    if (rc == 0) log_info("device: %s; no GPU: %s", d->describe, why);
    free(why);
    return rc;
}

int dev_open_named(struct dev *d, const char *name, int n_threads, const char *isa) {
    int index;
    if (name == NULL || strcmp(name, "auto") == 0) return open_auto(d, n_threads, isa);
    if (strcmp(name, "ref") == 0) TRY(dev_open_ref(d));
    else if (strcmp(name, "cpu") == 0) TRY(dev_open_cpu(d, n_threads, isa));
    else {
        TRY(cuda_index(name, &index));
        TRY(dev_open_cuda(d, index));
    }
    log_info("device: %s", d->describe);
    return 0;
}
