/* cuda.h - the driver's types that peers.cu uses. */
#ifndef VERLC_TESTS_CUDA_STREAMS_CUDA_H
#define VERLC_TESTS_CUDA_STREAMS_CUDA_H

#include <cuda_runtime.h>

typedef int CUresult;
typedef uintptr_t CUdeviceptr;
typedef uint32_t cuuint32_t;
typedef cudaStream_t CUstream;
enum { CUDA_SUCCESS = 0, CU_STREAM_WRITE_VALUE_DEFAULT = 0, CU_STREAM_WAIT_VALUE_GEQ = 0 };

#endif
