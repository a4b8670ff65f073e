/* isa.c - which instruction sets this CPU has, and which of them is
 * the fastest for GEMM here.  Their order is fixed but for one question that
 * names cannot answer: vdpbf16ps runs at twice the rate of f32 multiply-add on some
 * CPUs and at half of it on others.  A probe of a few milliseconds tells.
 *
 * Invariant: the same machine always gives the same answer. */
#include "device/cpu/gemm/gemm.h"

#include "base/clock.h"

#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

static const char *const isa_names[CPU_N_ISA] = {"c", "avx2", "avx512", "avx512bf16", "amx"};

const char *cpu_isa_name(enum cpu_isa_id id) { return isa_names[id]; }

#if defined(__x86_64__)
/* State components the system saves for us (XCR0): a CPU feature without it is unusable. */
static uint64_t xcr0(void) {
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 0;
    uint32_t lo, hi;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return (uint64_t)hi << 32 | lo;
}

static bool amx_allowed(void) {
    enum { REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 }; /* asm/prctl.h, Linux 5.16 */
    return syscall(SYS_arch_prctl, REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

bool cpu_isa_available(enum cpu_isa_id id) {
    const uint64_t avx_state = 0x6, zmm_state = 0xe6, tile_state = 0x60000, os = xcr0();
    uint32_t a, b, c, d, a1 = 0, b1, c1, d1;
    if (id == CPU_ISA_C) return true;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_FMA)) return false;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    if (!(b & bit_AVX2) || (os & avx_state) != avx_state) return false;
    if (id == CPU_ISA_AVX2) return true;
    const uint32_t need = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
    if ((b & need) != need || (os & zmm_state) != zmm_state) return false;
    if (id == CPU_ISA_AVX512) return true;
    if (!__get_cpuid_count(7, 1, &a1, &b1, &c1, &d1) || !(a1 & bit_AVX512BF16)) return false;
    if (id == CPU_ISA_AVX512BF16) return true;
    const uint32_t amx_tile = 1u << 24, amx_bf16 = 1u << 22;
    return (d & amx_tile) && (d & amx_bf16) && (os & tile_state) == tile_state && amx_allowed();
}

const struct cpu_gemm_isa *cpu_gemm_isa_of(enum cpu_isa_id id) {
    static const struct cpu_gemm_isa *const table[CPU_N_ISA] = {&cpu_gemm_c, &cpu_gemm_avx2, &cpu_gemm_avx512, &cpu_gemm_avx512bf16,
                                                                &cpu_gemm_amx};
    return table[id];
}
#else
bool cpu_isa_available(enum cpu_isa_id id) { return id == CPU_ISA_C; }
const struct cpu_gemm_isa *cpu_gemm_isa_of(enum cpu_isa_id id) { return id == CPU_ISA_C ? &cpu_gemm_c : NULL; }
#endif

/* Seconds of one round of a bf16 block over operands in cache. */
static double probe_round(const struct cpu_gemm_isa *isa, void *mem) {
    enum { BLOCKS = 4 };
    const struct cpu_gemm_ops *g = isa->bf16;
    const int64_t kc = 256;
    char *a = mem, *b = a + (size_t)(g->max_rows * kc) * g->a_bytes;
    float *c = (float *)(b + kc * CPU_PANEL * 4);
    memset(mem, 0, (size_t)((char *)c - a)); /* zeros: no denormals, no NaN */
    const double t = clock_now();
    for (int k = 0; k < BLOCKS; k++) g->block(g->max_rows, kc, a, b, c, false);
    return (clock_now() - t) / (double)g->max_rows;
}

/* The rounds take turns and the best of each counts, so that neither a busy machine
 * nor a core that is still changing its clock can turn 2x into 1/2x: two runs on one
 * machine must choose alike, or they differ in their last bits, and ranks that do not refuse to start.
 * A round of some microseconds is short against the slices that a thread gets where others wait for its core: of rounds of 40 us
 * every single one could be interrupted. A ratio in between is no CPU's, and is measured for longer. */
static bool bf16_dot_is_faster(void *mem) {
    enum { ROUNDS = 200, TRIES = 10 };
    const struct cpu_gemm_isa *dot = cpu_gemm_isa_of(CPU_ISA_AVX512BF16), *fma = cpu_gemm_isa_of(CPU_ISA_AVX512);
    double best_dot = 1e9, best_fma = 1e9;
    for (int try = 0; try < TRIES; try++) {
        for (int i = 0; i < ROUNDS; i++) {
            const double d = probe_round(dot, mem), f = probe_round(fma, mem);
            if (d < best_dot) best_dot = d;
            if (f < best_fma) best_fma = f;
        }
        if (best_fma > 1.7 * best_dot || best_fma < 0.8 * best_dot) break;
    }
    return best_fma > 1.4 * best_dot;
}

enum cpu_isa_id cpu_isa_fastest(void *mem) {
    if (cpu_isa_available(CPU_ISA_AMX)) return CPU_ISA_AMX;
    if (cpu_isa_available(CPU_ISA_AVX512BF16) && bf16_dot_is_faster(mem)) return CPU_ISA_AVX512BF16;
    if (cpu_isa_available(CPU_ISA_AVX512)) return CPU_ISA_AVX512;
    return cpu_isa_available(CPU_ISA_AVX2) ? CPU_ISA_AVX2 : CPU_ISA_C;
}
