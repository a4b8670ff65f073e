/* kernels_avx512.c - the kernels for AVX-512, also where the CPU has its
 * bf16 dot products or AMX: attention's probabilities stay f32, which those cannot
 * take, and vdpbf16ps ran at half the rate of f32 multiply-adds where measured.
 * Empty elsewhere. */
#if defined(__AVX512F__)
#define KERN_TABLE cpu_kern_avx512
#include "device/cpu/kernels_tmpl.h"
#endif
