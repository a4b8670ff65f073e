/* cublaslt_open.cu - finds and opens cuBLASLt.
 *
 * Looked for, in this order: where the dynamic linker looks; the nvidia-* packages of the
 * program's own Python environment; CUDA_HOME and CUDA_PATH; /usr/local/cuda*; the nvidia-*
 * packages of the other environments at hand (VIRTUAL_ENV, .venv here, the python3 of PATH,
 * the user's own).  LD_LIBRARY_PATH is
 * not needed.  What a directory holds is decided by trying to open it. */
#include "dev/cuda/cublaslt_open.cuh"

#include "base/err.h"
#include "base/file.h"

#include <dlfcn.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
#define LIB_MAJOR TEXT(CUBLAS_VER_MAJOR)
#define LIB_NAME "libcublasLt.so." LIB_MAJOR

/* The first file of a glob pattern that opens, NULL: none. */
static void *open_glob(const char *pattern) {
    glob_t g;
    void *handle = NULL;
    if (glob(pattern, 0, NULL, &g) != 0) return NULL;
    for (size_t i = 0; i < g.gl_pathc && !handle; i++) handle = dlopen(g.gl_pathv[i], RTLD_NOW | RTLD_LOCAL);
    globfree(&g);
    return handle;
}

static void *open_toolkit(const char *root) {
    static const char *const dirs[] = {"lib64", "lib", "targets/*-linux/lib"};
    char path[4096];
    void *handle = NULL;
    for (size_t i = 0; root && *root && !handle && i < sizeof dirs / sizeof *dirs; i++) {
        const int n = snprintf(path, sizeof path, "%s/%s/" LIB_NAME, root, dirs[i]);
        if (n < (int)sizeof path) handle = open_glob(path); /* longer ones the system does not open */
    }
    return handle;
}

/* prefix: what has lib/python3.X/site-packages below it. cu13 is nvidia-cublas, cublas is nvidia-cublas-cu12. */
static void *open_python(const char *prefix) {
    static const char *const dirs[] = {"lib/python3*/site-packages", "lib64/python3*/site-packages", "lib/python3*/dist-packages",
                                       "local/lib/python3*/dist-packages"};
    static const char *const packages[] = {"cu" LIB_MAJOR, "cublas"};
    char path[4096];
    void *handle = NULL;
    if (!prefix || !*prefix) return NULL;
    for (size_t i = 0; i < sizeof dirs / sizeof *dirs; i++)
        for (size_t k = 0; k < sizeof packages / sizeof *packages && !handle; k++) {
            const int n = snprintf(path, sizeof path, "%s/%s/nvidia/%s/lib/" LIB_NAME, prefix, dirs[i], packages[k]);
            if (n < (int)sizeof path) handle = open_glob(path);
        }
    return handle;
}

/* The environments of each python3 on PATH: DIR/bin/python3 has the prefix DIR. */
static void *open_path_pythons(void) {
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
        handle = open_python(*dir ? dir : "/");
    }
    return handle;
}

/* A wheel's program is PREFIX/bin/verlc; a tarball's may have .venv beside it. */
static void *open_own_python(void) {
    char *dir = file_program_dir();
    if (!dir) return NULL;
    char *beside = file_join(dir, ".venv");
    void *handle = open_python(beside);
    free(beside);
    char *slash = strrchr(dir, '/');
    if (slash) *slash = '\0';
    if (!handle) handle = open_python(*dir ? dir : "/");
    free(dir);
    return handle;
}

static void *open_somewhere(void) {
    char home[4000] = "";
    void *handle = dlopen(LIB_NAME, RTLD_NOW | RTLD_LOCAL);
    if (getenv("HOME") && snprintf(home, sizeof home, "%s/.local", getenv("HOME")) >= (int)sizeof home) *home = '\0';
    if (!handle) handle = open_own_python();
    if (!handle) handle = open_toolkit(getenv("CUDA_HOME"));
    if (!handle) handle = open_toolkit(getenv("CUDA_PATH"));
    if (!handle) handle = open_toolkit("/usr/local/cuda");
    if (!handle) handle = open_toolkit("/usr/local/cuda-" LIB_MAJOR "*");
    if (!handle) handle = open_python(getenv("VIRTUAL_ENV"));
    if (!handle) handle = open_python(".venv");
    if (!handle) handle = open_path_pythons();
    if (!handle) handle = open_python(home);
    return handle;
}

int cuda_blaslt_open(const struct cuda_blaslt **out) {
    static struct cuda_blaslt table;
    static void *library;
    if (!library) {
        void *handle = open_somewhere();
        if (!handle)
            FAIL(ERR_DEVICE,
                 "cuda: cuBLASLt is missing: no " LIB_NAME " in the system's library paths, CUDA_HOME, /usr/local/cuda "
                 "or the Python environment; install the CUDA " LIB_MAJOR
                 " math libraries, or `pip install '%s'` (the wheel's extra "
                 "verlc[cuda])",
                 CUBLAS_VER_MAJOR < 13 ? "nvidia-cublas-cu" LIB_MAJOR : "nvidia-cublas==" LIB_MAJOR ".*");
#define X(name)                                                                      \
    table.name = (decltype(table.name))dlsym(handle, #name);                         \
    if (!table.name) {                                                               \
        dlclose(handle);                                                             \
        FAIL(ERR_DEVICE, "cuda: " LIB_NAME " has no " #name ": it is not NVIDIA's"); \
    }
        CUDA_BLASLT_MAP(X)
#undef X
        library = handle;
    }
    *out = &table;
    return 0;
}
