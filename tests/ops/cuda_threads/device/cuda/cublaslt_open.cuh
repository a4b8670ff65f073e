/* cublaslt_open.cuh - the names of cuBLASLt's types, for headers that mention them. */
#ifndef VERLC_TESTS_CUDA_THREADS_CUBLASLT_OPEN_CUH
#define VERLC_TESTS_CUDA_THREADS_CUBLASLT_OPEN_CUH

typedef struct cublaslt_none *cublasLtHandle_t, *cublasLtMatmulDesc_t, *cublasLtMatrixLayout_t;
struct cublasLtMatmulAlgo_t {
    int none;
};
struct cuda_blaslt;

#endif
