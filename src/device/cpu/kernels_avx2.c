/* kernels_avx2.c - the kernels for AVX2 and FMA; empty elsewhere. */
#if defined(__AVX2__)
#define KERN_TABLE cpu_kern_avx2
#include "device/cpu/kernels_tmpl.h"
#endif
