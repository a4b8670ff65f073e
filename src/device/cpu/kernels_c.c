/* kernels_c.c - the kernels in plain C, and the choice among the tables. */
#define KERN_TABLE cpu_kern_c
#include "device/cpu/kernels_tmpl.h"

const struct cpu_kern *cpu_kern_of(const struct cpu *c) {
#if defined(__x86_64__)
    if (c->isa >= CPU_ISA_AVX512) return &cpu_kern_avx512;
    if (c->isa >= CPU_ISA_AVX2) return &cpu_kern_avx2;
#endif
    return &cpu_kern_c;
}
