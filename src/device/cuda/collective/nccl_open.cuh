/* nccl_open.cuh - NCCL as a table of function pointers, opened at run time: a run whose GPUs read each other's memory needs none.
 *
 * What it says is declared here, as in nccl.h of 2.18.3, 2.21.5, 2.28.3 and 2.32.3. ncclConfig_t has grown since, at its end; NCCL
 * takes a shorter one. Only what moves bytes is here: no reduction (invariant 12). */
#ifndef VERLC_DEV_CUDA_NCCL_OPEN_CUH
#define VERLC_DEV_CUDA_NCCL_OPEN_CUH

#include "device/collective/transport.h"

#include <cuda_runtime.h>
#include <limits.h>

enum { NCCL_LEAST = 21800 };                /* 2.18: the first whose ncclConfig_t is this one */
enum { NCCL_OK = 0, NCCL_IN_PROGRESS = 7 }; /* ncclResult_t */
enum { NCCL_BYTE = 0 };                     /* ncclInt8, of ncclDataType_t */
enum { NCCL_UNSET = INT_MIN };              /* NCCL_CONFIG_UNDEF_INT */
static const unsigned nccl_config_magic = 0xcafebeef;

typedef struct ncclComm *nccl_comm;
struct nccl_id { /* ncclUniqueId */
    char bytes[DEV_NCCL_ID];
};
struct nccl_config { /* ncclConfig_t */
    size_t size;
    unsigned magic, version;
    int blocking, cga_cluster_size, min_ctas, max_ctas;
    const char *net_name;
    int split_share;
};

#define CUDA_NCCL_MAP(X)                                                               \
    X(GetVersion, int, (int *))                                                        \
    X(GetUniqueId, int, (struct nccl_id *))                                            \
    X(CommInitRankConfig, int, (nccl_comm *, int, struct nccl_id, int, nccl_config *)) \
    X(CommGetAsyncError, int, (nccl_comm, int *))                                      \
    X(CommAbort, int, (nccl_comm))                                                     \
    X(GetLastError, const char *, (nccl_comm))                                         \
    X(GetErrorString, const char *, (int))                                             \
    X(GroupStart, int, (void))                                                         \
    X(GroupEnd, int, (void))                                                           \
    X(Send, int, (const void *, size_t, int, int, nccl_comm, cudaStream_t))            \
    X(Recv, int, (void *, size_t, int, int, nccl_comm, cudaStream_t))

struct cuda_nccl {
#define X(name, type, args) type(*name) args;
    CUDA_NCCL_MAP(X)
#undef X
    int version; /* 23203: 2.32.3 */
};

/* Opens the library at the first call; the table stays valid until the process ends. One thread at a time. ERR_UNSUPPORTED says
 * where it was looked for and what to install. */
int cuda_nccl_open(const struct cuda_nccl **out);

#endif
