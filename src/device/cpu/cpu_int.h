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

/* ---- ops in gemm.c ---- */
int cpu_matmul_fwd(struct dev *d, struct tensor y, struct tensor x, struct weight w, struct tensor bias, bool add);
int cpu_matmul_dx(struct dev *d, struct tensor dx, struct tensor dy, struct weight w, bool add);
int cpu_matmul_dw(struct dev *d, struct tensor dw, struct tensor db, struct tensor dy, struct tensor x, bool add);

/* ---- ops in elementwise.c ---- */
size_t cpu_weight_bytes(struct dev *d, enum dtype dt, int64_t n, int64_t k);
int cpu_weight_pack(struct dev *d, struct weight w, struct tensor src);
int cpu_weight_unpack(struct dev *d, struct tensor dst, struct weight w);
int cpu_cast(struct dev *d, struct tensor dst, struct tensor src);
int cpu_embed_fwd(struct dev *d, struct tensor x, struct tensor ids, struct weight w);
int cpu_gather_rows(struct dev *d, struct tensor dst, struct tensor src, struct tensor idx);
int cpu_scatter_rows_add(struct dev *d, struct tensor dst, struct tensor src, struct tensor idx);
int cpu_embed_bwd(struct dev *d, struct tensor dw, int64_t lo, int64_t vocab, struct tensor ids, struct tensor dx);
int cpu_checksum(struct dev *d, struct tensor sum, struct tensor bytes);
int cpu_sumsq(struct dev *d, struct tensor sums, struct tensor x, struct tensor segments, int64_t base);
int cpu_fold(struct dev *d, struct tensor y, const struct tensor *x, int n, bool add);
int cpu_adamw(struct dev *d, const struct adamw_args *a);

/* ---- ops in optimizer.c ---- */
int cpu_adaptive(struct dev *d, const struct adaptive_args *a);
int cpu_axpby(struct dev *d, struct tensor y, float a, struct tensor x, float b);
int cpu_quant8(struct dev *d, const struct quant8_args *a);
int cpu_dequant8(struct dev *d, const struct quant8_args *a);

/* ---- ops in lora.c ---- */
int cpu_add_block(struct dev *d, const struct add_block_args *a);

/* ---- ops in dequantize.c ---- */
int cpu_dequant(struct dev *d, const struct dequant_args *a);

/* ---- ops in attention.c ---- */
int cpu_attn_fwd(struct dev *d, const struct attn_args *a);
int cpu_attn_bwd(struct dev *d, const struct attn_args *a, struct tensor dout, struct tensor dq, struct tensor dk,
                 struct tensor dv);

/* ---- ops in norm_rope.c ---- */
int cpu_rmsnorm_fwd(struct dev *d, struct tensor y, struct tensor rstd, struct tensor x, struct tensor w, float eps);
int cpu_rmsnorm_bwd(struct dev *d, const struct rmsnorm_bwd_args *a);
int cpu_qkv_fwd(struct dev *d, const struct qkv_args *a);
int cpu_qkv_bwd(struct dev *d, const struct qkv_args *a, const struct qkv_bwd_args *g);
int cpu_swiglu_fwd(struct dev *d, struct tensor y, struct tensor gate_up);
int cpu_swiglu_bwd(struct dev *d, struct tensor dgate_up, struct tensor dy, struct tensor gate_up);

/* ---- ops in lm_head.c and sampler.c ---- */
int cpu_lmhead_fwd(struct dev *d, const struct lmhead_args *a);
int cpu_logits(struct dev *d, struct tensor out, struct tensor x, struct weight w);
int cpu_lmhead_bwd(struct dev *d, const struct lmhead_args *a, const struct lmhead_bwd_args *g);
int cpu_sample(struct dev *d, const struct sample_args *a);

#endif
