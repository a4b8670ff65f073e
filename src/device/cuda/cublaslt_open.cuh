/* cublaslt_open.cuh - cuBLASLt as a table of function pointers, opened at run time.
 *
 * The library is half a gigabyte and not part of the driver; opening it by hand lets
 * one build run where it lies in the system, in a toolkit or in a Python environment,
 * and say what to install where it does not.
 * Invariant: the types are those of the cublasLt.h the build saw, so only a library of
 * the same major version is accepted. */
#ifndef VERLC_DEV_CUDA_CUBLASLT_OPEN_CUH
#define VERLC_DEV_CUDA_CUBLASLT_OPEN_CUH

#include <cublasLt.h>

/* clang-format off */
#define CUDA_BLASLT_MAP(X) \
    X(cublasLtCreate) \
    X(cublasLtDestroy) \
    X(cublasLtGetVersion) \
    X(cublasLtGetStatusString) \
    X(cublasLtMatmulDescCreate) \
    X(cublasLtMatmulDescSetAttribute) \
    X(cublasLtMatmulDescDestroy) \
    X(cublasLtMatrixLayoutCreate) \
    X(cublasLtMatrixLayoutSetAttribute) \
    X(cublasLtMatrixLayoutDestroy) \
    X(cublasLtMatmulPreferenceCreate) \
    X(cublasLtMatmulPreferenceSetAttribute) \
    X(cublasLtMatmulPreferenceDestroy) \
    X(cublasLtMatmulAlgoGetHeuristic) \
    X(cublasLtMatmulAlgoGetIds) \
    X(cublasLtMatmulAlgoInit) \
    X(cublasLtMatmulAlgoCheck) \
    X(cublasLtMatmulAlgoConfigSetAttribute) \
    X(cublasLtMatmulAlgoConfigGetAttribute) \
    X(cublasLtMatmulAlgoCapGetAttribute) \
    X(cublasLtMatmul)
/* clang-format on */

struct cuda_blaslt {
#define X(name) decltype(&::name) name;
    CUDA_BLASLT_MAP(X)
#undef X
};

/* Opens the library at the first call; the table stays valid until the process ends, and
 * so does the library (handles of several devices share it). One thread at a time.
 * ERR_DEVICE says where it was looked for and what to install. */
int cuda_blaslt_open(const struct cuda_blaslt **out);

#endif
