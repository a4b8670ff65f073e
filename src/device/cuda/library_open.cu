/* library_open.cu - finds and opens a library of NVIDIA's that is not part of the driver.
 *
 * Looked for, in this order: where the dynamic linker looks; the nvidia-* packages of the
 * program's own Python environment; CUDA_HOME and CUDA_PATH; /usr/local/cuda*; the nvidia-*
 * packages of the other environments at hand (VIRTUAL_ENV, .venv here, the python3 of PATH,
 * the user's own).  LD_LIBRARY_PATH is
 * not needed.  What a directory holds is decided by trying to open it. */
#include "device/cuda/library_open.cuh"

#include "base/file.h"

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The first file of a glob pattern that opens, NULL: none. */
static void *open_glob(const char *pattern) {
    glob_t g;
    void *handle = NULL;
    if (glob(pattern, 0, NULL, &g) != 0) return NULL;
    for (size_t i = 0; i < g.gl_pathc && !handle; i++) handle = dlopen(g.gl_pathv[i], RTLD_NOW | RTLD_LOCAL);
    globfree(&g);
    return handle;
}

static void *open_toolkit(const struct cuda_library *l, const char *root) {
    static const char *const dirs[] = {"lib64", "lib", "targets/*-linux/lib"};
    char path[4096];
    void *handle = NULL;
    for (size_t i = 0; root && *root && !handle && i < sizeof dirs / sizeof *dirs; i++) {
        const int n = snprintf(path, sizeof path, "%s/%s/%s", root, dirs[i], l->name);
        if (n < (int)sizeof path) handle = open_glob(path); /* longer ones the system does not open */
    }
    return handle;
}

/* prefix: what has lib/python3.X/site-packages below it. */
static void *open_python(const struct cuda_library *l, const char *prefix) {
    static const char *const dirs[] = {"lib/python3*/site-packages", "lib64/python3*/site-packages", "lib/python3*/dist-packages",
                                       "local/lib/python3*/dist-packages"};
    char path[4096];
    void *handle = NULL;
    if (!prefix || !*prefix) return NULL;
    for (size_t i = 0; i < sizeof dirs / sizeof *dirs; i++)
        for (size_t k = 0; k < sizeof l->packages / sizeof *l->packages && l->packages[k] && !handle; k++) {
            const int n = snprintf(path, sizeof path, "%s/%s/nvidia/%s/lib/%s", prefix, dirs[i], l->packages[k], l->name);
            if (n < (int)sizeof path) handle = open_glob(path);
        }
    return handle;
}

/* The environments of each python3 on PATH: DIR/bin/python3 has the prefix DIR. */
static void *open_path_pythons(const struct cuda_library *l) {
    const char *path = getenv("PATH");
    char dir[4000], file[4096];
    void *handle = NULL;
    while (path && *path && !handle) {
        const size_t n = strcspn(path, ":");
        const char *here = path;
        path += n + (path[n] == ':');
        if (n >= sizeof dir) continue;
        snprintf(dir, sizeof dir, "%.*s", (int)n, here);
        snprintf(file, sizeof file, "%s/python3", dir);
        if (access(file, X_OK) != 0) continue;
        char *slash = strrchr(dir, '/');
        if (!slash) continue;
        *slash = '\0';
        handle = open_python(l, *dir ? dir : "/");
    }
    return handle;
}

/* A wheel's program is PREFIX/bin/verlc; a tarball's may have .venv next to it. */
static void *open_own_python(const struct cuda_library *l) {
    char *dir = file_program_dir();
    if (!dir) return NULL;
    char *venv = file_join(dir, ".venv");
    void *handle = open_python(l, venv);
    free(venv);
    char *slash = strrchr(dir, '/');
    if (slash) *slash = '\0';
    if (!handle) handle = open_python(l, *dir ? dir : "/");
    free(dir);
    return handle;
}

void *cuda_library_open(const struct cuda_library *l) {
    char home[4000] = "", toolkits[64];
    void *handle = dlopen(l->name, RTLD_NOW | RTLD_LOCAL);
    if (getenv("HOME") && snprintf(home, sizeof home, "%s/.local", getenv("HOME")) >= (int)sizeof home) *home = '\0';
    snprintf(toolkits, sizeof toolkits, "/usr/local/cuda-%d*", CUDART_VERSION / 1000);
    if (!handle) handle = open_own_python(l);
    if (!handle) handle = open_toolkit(l, getenv("CUDA_HOME"));
    if (!handle) handle = open_toolkit(l, getenv("CUDA_PATH"));
    if (!handle) handle = open_toolkit(l, "/usr/local/cuda");
    if (!handle) handle = open_toolkit(l, toolkits);
    if (!handle) handle = open_python(l, getenv("VIRTUAL_ENV"));
    if (!handle) handle = open_python(l, ".venv");
    if (!handle) handle = open_path_pythons(l);
    if (!handle) handle = open_python(l, home);
    return handle;
}
