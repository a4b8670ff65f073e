/* nccl_open.cu - opens NCCL. NVLink multicast (NVLS) is off, always: nothing here reduces, and where it fails it takes the GPUs of
 * the whole host with it. */
#include "device/cuda/collective/nccl_open.cuh"

#include "base/err.h"
#include "device/cuda/library_open.cuh"

#include <dlfcn.h>
#include <stdlib.h>

#define LIB_NAME "libnccl.so.2"

static const struct cuda_library nccl = {LIB_NAME, {"nccl", NULL}};

static int read_table(void *handle, struct cuda_nccl *table) {
#define X(name, type, args)                                           \
    table->name = (decltype(table->name))dlsym(handle, "nccl" #name); \
    if (!table->name) FAIL(ERR_UNSUPPORTED, "cuda: " LIB_NAME " has no nccl" #name ": 2.18 is the oldest that serves");
    CUDA_NCCL_MAP(X)
#undef X
    if (table->GetVersion(&table->version) != NCCL_OK) FAIL(ERR_UNSUPPORTED, "cuda: " LIB_NAME " does not know its version");
    if (table->version < NCCL_LEAST || table->version >= 30000)
        FAIL(ERR_UNSUPPORTED, "cuda: " LIB_NAME " is version %d; 2.18 (%d) or a newer 2.x serves", table->version, NCCL_LEAST);
    return 0;
}

int cuda_nccl_open(const struct cuda_nccl **out) {
    static struct cuda_nccl table;
    static void *library;
    if (!library) {
        setenv("NCCL_NVLS_ENABLE", "0", 1);
        setenv("NCCL_COMM_BLOCKING", "0", 1); /* it would go before what the communicator is opened with */
        void *handle = cuda_library_open(&nccl);
        if (!handle)
            FAIL(ERR_UNSUPPORTED,
                 "NCCL is missing: no " LIB_NAME
                 " that opens in the system's library paths, CUDA_HOME, /usr/local/cuda or the Python "
                 "environment; `pip install nvidia-nccl-cu%d` (the wheel's extra verlc[nccl])",
                 CUDART_VERSION / 1000);
        const int rc = read_table(handle, &table);
        if (rc < 0) dlclose(handle);
        TRY(rc);
        library = handle;
    }
    *out = &table;
    return 0;
}
