/* library_open.cuh - libraries of NVIDIA's that are opened at run time: cuBLASLt and NCCL. */
#ifndef VERLC_DEV_CUDA_LIBRARY_OPEN_CUH
#define VERLC_DEV_CUDA_LIBRARY_OPEN_CUH

struct cuda_library {
    const char *name;
    const char *packages[2]; /* its directories below nvidia/ of a Python environment; NULL: none */
};
/* dlopen's handle; NULL: it is nowhere, or none opens. */
void *cuda_library_open(const struct cuda_library *l);

#endif
