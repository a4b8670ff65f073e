/* cublaslt_open.cu - opens cuBLASLt. */
#include "device/cuda/cublaslt_open.cuh"

#include "base/err.h"
#include "device/cuda/library_open.cuh"

#include <dlfcn.h>

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
#define LIB_MAJOR TEXT(CUBLAS_VER_MAJOR)
#define LIB_NAME "libcublasLt.so." LIB_MAJOR

/* cu13 is nvidia-cublas, cublas is nvidia-cublas-cu12. */
static const struct cuda_library cublaslt = {LIB_NAME, {"cu" LIB_MAJOR, "cublas"}};

int cuda_blaslt_open(const struct cuda_blaslt **out) {
    static struct cuda_blaslt table;
    static void *library;
    if (!library) {
        void *handle = cuda_library_open(&cublaslt);
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
