/* cpu_int.h - what the files of the CPU backend share.
 *
 * Four parts: the context behind dev.ctx, scratch memory, the layout of a packed weight, and the GEMMs that other ops
 * of the backend build on.  Every function that takes a struct cpu runs on the caller's thread and
 * uses the pool inside, so none may be called from a part of a pool_run.
 *
 * Invariant: ops never nest and never run at the same time, so the memory of
 * a thread (cpu_thread_mem) belongs to whichever op is running. */
#ifndef VERLC_DEVICE_CPU_INT_H
#define VERLC_DEVICE_CPU_INT_H

#include "base/err.h"
#include "base/thread_pool.h"
#include "device/device.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- instruction sets ---- */
/* Ascending: a CPU that runs one also runs those before it. Choosing among
 * them is a matter of speed; within a run one is used throughout. */
enum cpu_isa_id { CPU_ISA_C, CPU_ISA_AVX2, CPU_ISA_AVX512, CPU_ISA_AVX512BF16, CPU_ISA_AMX, CPU_N_ISA };
const char *cpu_isa_name(enum cpu_isa_id id);
bool cpu_isa_available(enum cpu_isa_id id); /* this CPU and this operating system; asks for AMX */
/* The one that multiplies bf16 fastest, by a short measurement in mem (1 MiB, 64-aligned). */
enum cpu_isa_id cpu_isa_fastest(void *mem);

struct cpu_gemm_isa; /* gemm.h: GEMM micro-kernels */

/* ---- context ---- */
/* Scratch memory that outlives one call, one buffer for each purpose. */
enum cpu_scratch_id {
    CPU_SCRATCH_GEMM, /* packed left operand; cpu_matmul_* use it */
    CPU_SCRATCH_HEAD, /* logits of one vocabulary chunk, gradients of them */
    CPU_SCRATCH_ATTN,
    CPU_SCRATCH_ROW, /* partial sums of row ops and reductions */
    CPU_N_SCRATCH
};
/* Per thread: the largest user is a block of a GEMM. */
#define CPU_THREAD_BYTES ((size_t)4 << 20)

struct cpu {
    struct pool *pool;
    int n_threads;
    enum cpu_isa_id isa;
    const struct cpu_gemm_isa *gemm;
    char *thread_mem; /* n_threads x CPU_THREAD_BYTES, 2 MiB aligned, owned */
    struct {
        void *p;
        size_t bytes;
    } scratch[CPU_N_SCRATCH]; /* owned */
};
static inline struct cpu *cpu_of(struct dev *d) { return d->ctx; }

/* The running op's private memory of `thread`, CPU_THREAD_BYTES, not cleared. */
static inline void *cpu_thread_mem(const struct cpu *c, int thread) { return c->thread_mem + (size_t)thread * CPU_THREAD_BYTES; }
/* At least `bytes` of this buffer, 256-aligned, contents undefined. Grows (and then
 * allocates) only when no earlier call asked for as much: nothing after warm-up. */
int cpu_scratch(struct cpu *c, enum cpu_scratch_id id, size_t bytes, void **out);
/* What the ops of gemm.c and of lm_head.c take of it at most in a run of these sizes. */
size_t cpu_gemm_scratch_bytes(const struct dev_sizes *s);
size_t cpu_lmhead_scratch_bytes(const struct dev_sizes *s);
/* Zeroed pages, 2 MiB aligned and advised to be huge when large. NULL: none left. */
void *cpu_pages_alloc(size_t bytes);
void cpu_pages_free(void *p, size_t bytes);

/* ---- packed weights ---- */
/* W (n, k) is cut into panels of 32 outputs and blocks of 32 inputs, both zero padded.
 *   f32:  [panel][k][32 outputs]
 *   bf16: [panel][block][2 halves][16 pairs of k][16 outputs][2 k]: a line of 64 bytes holds
 *         two k of 16 outputs, what vdpbf16ps and an AMX tile read. */
enum { CPU_PANEL = 32 };
static inline int64_t cpu_up32(int64_t n) { return (n + 31) & ~(int64_t)31; }
/* Elements from one panel to the next. */
static inline int64_t cpu_panel_elems(int64_t k) { return cpu_up32(k) * CPU_PANEL; }
/* Element index of W[n][k]. */
static inline int64_t cpu_weight_index(const struct weight *w, int64_t n, int64_t k) {
    const int64_t panel = (n / CPU_PANEL) * cpu_panel_elems(w->k), j = n % CPU_PANEL;
    if (w->dt == DT_F32) return panel + k * CPU_PANEL + j;
    return panel + (k / 32) * 1024 + (j / 16) * 512 + (k % 32) / 2 * 32 + (j % 16) * 2 + k % 2;
}

/* ---- GEMM for other ops ---- */
/* The first n1 - n0 columns of y (T, at least so many) f32 = x (T, k) act . W[n0:n1)^T: the bits that
 * dev_matmul_fwd gives without bias. n0 is a multiple of 32. */
int cpu_matmul_cols(struct cpu *c, struct tensor y, struct tensor x, const struct weight *w, int64_t n0, int64_t n1);
/* dx (T, k) f32 += dz (T, n1 - n0) act . W[n0:n1). n0 is a multiple of 32. */
int cpu_matmul_dx_cols(struct cpu *c, float *dx, struct tensor dz, const struct weight *w, int64_t n0, int64_t n1);

/* ---- the ops ---- */
size_t cpu_weight_bytes(struct dev *d, enum dtype dt, int64_t n, int64_t k);
#define OP(name, ...) int cpu_##name(struct dev *d, __VA_ARGS__);
#include "device/ops.def"

/* Routers that choose by scores (moe/score_route.c). */
int cpu_score_route_fwd(struct dev *d, const struct route_args *a);
int cpu_score_route_bwd(struct dev *d, const struct route_args *a, struct tensor dlogits, struct tensor dweight);

#endif
