/* gemm.cuh - what the files of the CUDA matrix products share.
 *
 * gemm.cu holds the entry and the choice of path, gemm_cublaslt.cu the
 * calls of cuBLASLt, gemm_autotune.cu the choice of its algorithms for exact products,
 * gemm_small_m.cu our kernels for few rows, gemm_small_m_sm90.cu those for Hopper, SwiGLU included,
 * gemm_fallback.cu our other kernels.
 *
 * Exactness.  FWD and DX are exact.  The bits of an exact product are those of one sum, over k or n,
 * for each (op, n, k, in): the accumulators of the shape's canonical algorithm.  out = round(sum + bias), or out + (sum + bias),
 * whatever computes it: an algorithm serves only where it was seen to give these bits. */
#ifndef VERLC_DEV_CUDA_GEMM_CUH
#define VERLC_DEV_CUDA_GEMM_CUH

#include "dev/cuda/context.cuh"
#include "dev/cuda/cublaslt_open.cuh"

enum {
    GEMM_MAX_ALGOS = 16, /* that the library names at a time */
    GEMM_SMALL_ROWS = 96,
    GEMM_N_SMALL = 8,
    GEMM_N_FEW = 8,
    GEMM_N_PAIR = 3 /* of our kernels for few rows: most rows, kinds */
};

enum gemm_how { GEMM_UNKNOWN, GEMM_ALGO, GEMM_SMALL, GEMM_FEW, GEMM_TWO_PASS, GEMM_PARTS, GEMM_SWIGLU_AFTER, GEMM_SWIGLU_MANY };
struct gemm_pick { /* what computes a product */
    enum gemm_how how;
    int small;                 /* GEMM_SMALL, GEMM_FEW: which kind */
    cublasLtMatmulAlgo_t algo; /* GEMM_ALGO */
};

/* One product of cuBLASLt but for m, the pointers and ld_out. */
struct gemm_plan {
    struct gemm_plan *next;
    enum cuda_gemm_op op;
    int64_t n, k, part;
    enum dtype in, out_dt;
    bool add, bias, swiglu;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, d; /* the library's operands: our b, our a, out */
    int64_t m, ld_out;              /* what the layouts say now */
    struct gemm_pick pick[GEMM_N_BUCKETS];
    /* exact products that only sum (f32 out, no bias, no add): the definition of the shape's bits */
    bool settled, plain; /* plain: no algorithm of the library will do, our kernel serves */
    cublasLtMatmulAlgo_t canonical;
};

struct cuda_gemm {
    const struct cuda_blaslt *lt;
    cublasLtHandle_t handle;
    void *work;  /* GEMM_WORKSPACE_BYTES */
    bool poison; /* VERLC_CUDA_POISON: gemm_plan_run fills what the library is to write with NaN */
    struct gemm_plan *plans[64];
    bool small_ready[GEMM_SMALL_ROWS / 16][GEMM_N_SMALL], few_ready[GEMM_N_FEW + GEMM_N_PAIR];
    int n_tuned, n_two_pass; /* exact (plan, class) pairs chosen; those without an exact algorithm */
};

/* Elements of a row of a, and of out, of an exact product (FWD or DX). */
static inline int64_t gemm_in_width(enum cuda_gemm_op op, int64_t n, int64_t k) { return op == CUDA_GEMM_FWD ? k : n; }
static inline int64_t gemm_out_width(enum cuda_gemm_op op, int64_t n, int64_t k) { return op == CUDA_GEMM_FWD ? n : k; }
static inline int64_t gemm_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t gemm_min(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- gemm_cublaslt.cu ---- */

/* The plan of these arguments' shape, made at first use; owned by c->gemm. */
int gemm_plan_get(struct cuda *c, const struct cuda_gemm_args *a, struct gemm_plan **out);
void gemm_plan_destroy(struct cuda_gemm *g, struct gemm_plan *p);
/* The library's algorithms for m rows, its favourite first. exact: only those that sum k in one go. */
int gemm_plan_algos(struct cuda *c, struct gemm_plan *p, int64_t m, int64_t ld_out, bool exact,
                    cublasLtMatmulAlgo_t algos[GEMM_MAX_ALGOS], int *n);
/* Queues one product of p's kind with a's m, pointers and ld_out. False: this algorithm does not
 * take these sizes, and nothing was queued. */
int gemm_plan_run(struct cuda *c, struct gemm_plan *p, const cublasLtMatmulAlgo_t *algo, const struct cuda_gemm_args *a, bool *ran);
/* The same by what was picked: a library's algorithm, our kernels for few rows, or a product and then SwiGLU. */
int gemm_pick_run(struct cuda *c, struct gemm_plan *p, const struct gemm_pick *pick, const struct cuda_gemm_args *a, bool *ran);
/* "matmul_fwd (n 896, k 4864, bf16 to f32, bias)" */
const char *gemm_plan_name(const struct gemm_plan *p, char *buf, size_t size);

/* ---- gemm_autotune.cu: may wait; an error while the stream is captured ---- */

/* Chooses the canonical algorithm of a plan that only sums, or makes it plain. */
int gemm_settle(struct cuda *c, struct gemm_plan *base);
/* Chooses p's algorithm for this class of m among those whose bits are the canonical ones. base NULL:
 * p is in parts, and theirs are the bits; they must have been chosen for this class before (gemm_parts
 * was run), since one choice at a time has the memory for it. */
int gemm_tune(struct cuda *c, struct gemm_plan *p, struct gemm_plan *base, int bucket);

/* ---- gemm.cu ---- */

/* The sums of a product in parts, part by part. */
int gemm_parts(struct cuda *c, const struct cuda_gemm_args *a);
/* a->out as SwiGLU of a->gate_up, once that is the product. */
int gemm_swiglu_after(struct cuda *c, const struct cuda_gemm_args *a);

/* ---- gemm_small_m.cu ---- */

/* FWD by our kernel for few rows, kind in [0, GEMM_N_SMALL). *ran: false, it does not take these sizes.
 * pre: a->a and a->b are aligned to 16 bytes. */
int gemm_small(struct cuda *c, const struct cuda_gemm_args *a, int kind, bool *ran);

/* ---- gemm_small_m_sm90.cu ---- */

/* The same on sm_90: kinds in [0, GEMM_N_FEW) of a product, in [GEMM_N_FEW, GEMM_N_FEW + GEMM_N_PAIR) of its SwiGLU. */
int gemm_few(struct cuda *c, const struct cuda_gemm_args *a, int kind, bool *ran);

/* ---- gemm_swiglu_sm90.cu ---- */

/* SwiGLU of a product of many rows on sm_90. pre, *ran: as gemm_small. */
int gemm_swiglu_many(struct cuda *c, const struct cuda_gemm_args *a, bool *ran);

/* ---- gemm_fallback.cu ---- */

/* The product by our own kernel: any size and alignment, r ascending, one accumulator. */
int gemm_plain(struct cuda *c, const struct cuda_gemm_args *a);
/* The last step of an exact product: a->out from its f32 sums acc, which may be a->out itself. */
int gemm_finish(struct cuda *c, const struct cuda_gemm_args *a, const float *acc, int64_t ld_acc);
/* db (n) f32 = column sums of dy (m, n), in an order that depends on m and n alone; add: +=. */
int gemm_colsum(struct cuda *c, float *db, const void *dy, enum dtype dt, int64_t m, int64_t n, bool add);
/* Test values of one operand: row i is a function of (seed, i, cols). mirror -1 and 1: the second
 * half of a row is the first half backwards, times mirror; -2: that of a column, times -1; 0: plain noise. */
int gemm_fill(struct cuda *c, void *dst, enum dtype dt, int64_t rows, int64_t cols, unsigned seed, int mirror, float scale);
/* *flag (device) becomes 1 where the first `bytes` (a multiple of 16) of x and y differ. */
int gemm_compare(struct cuda *c, const void *x, const void *y, size_t bytes, int *flag);

#endif
