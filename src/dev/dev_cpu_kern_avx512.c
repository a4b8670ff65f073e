/* dev_cpu_kern_avx512.c - the kernels for AVX-512, used by all its kin (its
 * bf16 products ran at half the rate of its f32 ones on the CPU at hand, and
 * attention is not matmul-bound enough for AMX to matter first); empty elsewhere. */
#if defined(__AVX512F__)
#define KERN_TABLE cpu_kern_avx512
#include "dev/dev_cpu_kern_tmpl.h"
#endif
