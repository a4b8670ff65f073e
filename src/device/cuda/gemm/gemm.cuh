/* gemm.cuh - what the files of the CUDA backend's GEMMs share.
 *
 * gemm.cu is the entry and dispatches; gemm_cublaslt.cu calls cuBLASLt; gemm_autotune.cu chooses among bitwise-identical
 * kernels; gemm_small_m.cu and gemm_small_m_sm90.cu are our small-M kernels for decoding; gemm_swiglu_sm90.cu is large M with a
 * fused SwiGLU; gemm_fallback.cu serves odd sizes.
 *
 * Batch invariance.  FWD and DX are batch-invariant: the bits of a row are those of one sum over k or n, whatever M
 * is.  For each (op, n, k, in) the shape's canonical algorithm defines them.  out = round(sum + bias), or out + (sum + bias),
 * whatever computes it: a kernel serves only where it was seen to give these bits. */
#ifndef VERLC_DEV_CUDA_GEMM_CUH
#define VERLC_DEV_CUDA_GEMM_CUH

#include "device/cuda/context.cuh"
#include "device/cuda/cublaslt_open.cuh"

enum {
    GEMM_MAX_ALGOS = 16, /* of the library's heuristic, at a time */
    /* Our small-M kernels: the largest M (TMA: of those for Hopper), and how many variants each kind has. */
    GEMM_SMALL_M_MAX = 96,
    GEMM_SMALL_M_TMA_MAX = 128,
    GEMM_N_SMALL_M = 8,
    GEMM_N_SMALL_M_TMA = 12,
    GEMM_N_SMALL_M_SWIGLU = 3
};

enum gemm_method {
    GEMM_UNKNOWN,
    GEMM_ALGO,
    GEMM_SMALL_M,
    GEMM_SMALL_M_TMA,
    GEMM_TWO_PASS,
    GEMM_SPLIT_COLS,
    GEMM_SWIGLU_UNFUSED,
    GEMM_SWIGLU_FUSED
};
struct gemm_pick { /* the kernel that serves a GEMM */
    enum gemm_method how;
    int small;                 /* GEMM_SMALL_M, GEMM_SMALL_M_TMA: which variant */
    cublasLtMatmulAlgo_t algo; /* GEMM_ALGO */
};

/* A GEMM of cuBLASLt but for m, the pointers and ld_out. */
struct gemm_plan {
    struct gemm_plan *next;
    enum cuda_gemm_op op;
    int64_t n, k, whole_n, split_cols;
    enum dtype in, out_dt;
    bool add, bias, swiglu;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, d; /* the library's operands: our b, our a, out */
    int64_t m, ld_out;              /* of the layouts now */
    struct gemm_pick pick[GEMM_N_BUCKETS];
    /* of a batch-invariant plan that only sums (f32 out, no bias, no add): the definition of the shape's bits */
    bool has_canonical, fallback; /* fallback: no algorithm of the library is batch-invariant, our fallback serves */
    cublasLtMatmulAlgo_t canonical;
};

struct cuda_gemm {
    const struct cuda_blaslt *lt;
    cublasLtHandle_t handle;
    bool poison; /* VERLC_CUDA_POISON: gemm_plan_run fills outputs with NaN first */
    struct gemm_plan *plans[64];
    bool small_m_ready[GEMM_SMALL_M_MAX / 16][GEMM_N_SMALL_M];
    bool small_m_tma_ready[GEMM_N_SMALL_M_TMA + GEMM_N_SMALL_M_SWIGLU];
    int n_autotuned, n_two_pass; /* (plan, bucket) pairs autotuned; those without a bitwise-identical kernel */
};

/* Elements of a row of a, and of out (FWD or DX). */
static inline int64_t gemm_in_width(enum cuda_gemm_op op, int64_t n, int64_t k) { return op == CUDA_GEMM_FWD ? k : n; }
static inline int64_t gemm_out_width(enum cuda_gemm_op op, int64_t n, int64_t k) { return op == CUDA_GEMM_FWD ? n : k; }
static inline int64_t gemm_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t gemm_min(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- gemm_cublaslt.cu ---- */

/* The plan of these arguments' shape, made at first use; owned by c->gemm. */
int gemm_plan_get(struct cuda *c, const struct cuda_gemm_args *a, struct gemm_plan **out);
void gemm_plan_destroy(struct cuda_gemm *g, struct gemm_plan *p);
/* The library's heuristic for m rows, its favourite first: single-pass algorithms, without split-K or stream-K. */
int gemm_plan_algos(struct cuda *c, struct gemm_plan *p, int64_t m, int64_t ld_out, cublasLtMatmulAlgo_t algos[GEMM_MAX_ALGOS],
                    int *n);
/* Queues one GEMM of p's kind with a's m, pointers and ld_out. False: this algorithm does not
 * take these sizes, and nothing was queued. */
int gemm_plan_run(struct cuda *c, struct gemm_plan *p, const cublasLtMatmulAlgo_t *algo, const struct cuda_gemm_args *a, bool *ran);
/* The same by what was picked: a library's algorithm, one of our kernels, or a GEMM and then SwiGLU. */
int gemm_pick_run(struct cuda *c, struct gemm_plan *p, const struct gemm_pick *pick, const struct cuda_gemm_args *a, bool *ran);
/* "matmul_fwd (n 896, k 4864, bf16 to f32, bias)" */
const char *gemm_plan_name(const struct gemm_plan *p, char *buf, size_t size);

/* ---- gemm_autotune.cu: may wait; an error while the stream is captured ---- */

/* Chooses the canonical algorithm of a plan that only sums, or the fallback: of rows of a matrix that of the matrix. */
int gemm_choose_canonical(struct cuda *c, struct gemm_plan *base);
/* Chooses the fastest kernel for this bucket of M among those that give the canonical bits. base NULL: p is column-split, and
 * the bits are those of its pieces; they must have been autotuned for this bucket before (gemm_split_cols was run),
 * since only one trial at a time has the memory. */
int gemm_autotune(struct cuda *c, struct gemm_plan *p, struct gemm_plan *base, int bucket);

/* ---- gemm.cu ---- */

/* A column-split GEMM (cuda_gemm_args.split_cols), piece by piece. */
int gemm_split_cols(struct cuda *c, const struct cuda_gemm_args *a);
/* The GEMM into a->gate_up, then SwiGLU of it into a->out. */
int gemm_swiglu_unfused(struct cuda *c, const struct cuda_gemm_args *a);

/* ---- gemm_small_m.cu ---- */

/* FWD at small M, kind in [0, GEMM_N_SMALL_M). *ran: false, it does not take these sizes.
 * pre: a->a and a->b are aligned to 16 bytes. */
int gemm_small_m(struct cuda *c, const struct cuda_gemm_args *a, int kind, bool *ran);

/* ---- gemm_small_m_sm90.cu ---- */

/* The same on sm_90a: kinds in [0, GEMM_N_SMALL_M_TMA) are plain, the GEMM_N_SMALL_M_SWIGLU after them have fused SwiGLU. */
int gemm_small_m_tma(struct cuda *c, const struct cuda_gemm_args *a, int kind, bool *ran);

/* ---- gemm_swiglu_sm90.cu ---- */

/* Fused SwiGLU at large M on sm_90a. pre, *ran: as gemm_small_m. */
int gemm_swiglu_fused(struct cuda *c, const struct cuda_gemm_args *a, bool *ran);

/* ---- grouped GEMMs (device/cuda/moe/grouped_gemm.cu) ---- */

/* out rows of expert e = a's rows [offset[e], offset[e + 1]) by matrix e of b; DW: matrix e of out from those rows of a and b. */
struct gemm_grouped {
    enum cuda_gemm_op op;
    int64_t m, n, k; /* rows of all experts; a matrix is (n, k) */
    const void *a, *b;
    void *out;
    enum dtype in, out_dt;
    const int32_t *offset; /* (experts + 1), on the device */
    int experts;
    bool add; /* DW: += */
};
/* Tiles of bm rows that all experts have together, at most: each may end with a part of one. */
static inline int64_t gemm_group_tiles(const struct gemm_grouped *g, int bm) { return g->m / bm + gemm_min(g->experts, g->m); }
/* Which expert has tile i of bm rows, where it begins and how many rows there are from there on; false: there is no such tile.
 * Every thread of a warp asks, lane l about its part of the experts. */
static __device__ __forceinline__ bool gemm_group_tile(const struct gemm_grouped &g, int bm, int i, int *expert, int64_t *row0,
                                                       int64_t *rows) {
    const int lane = threadIdx.x % 32, per = (g.experts + 31) / 32, e0 = lane * per;
    int mine = 0;
    for (int e = e0; e < e0 + per && e < g.experts; e++) mine += (g.offset[e + 1] - g.offset[e] + bm - 1) / bm;
    int end = mine; /* tiles of this lane's experts and those of lower lanes */
    for (int o = 1; o < 32; o *= 2) {
        const int below = __shfl_up_sync(WARP_ALL, end, o);
        if (lane >= o) end += below;
    }
    const unsigned has = __ballot_sync(WARP_ALL, i < end && i >= end - mine);
    if (!has) return false;
    const int owner = __ffs((int)has) - 1, most = (owner + 1) * per;
    i -= __shfl_sync(WARP_ALL, end - mine, owner);
    for (int e = owner * per; e < most && e < g.experts; e++) {
        const int lo = g.offset[e], hi = g.offset[e + 1], tiles = (hi - lo + bm - 1) / bm;
        if (i < tiles) {
            *expert = e;
            *row0 = lo + (int64_t)i * bm;
            *rows = hi - *row0;
            return true;
        }
        i -= tiles;
    }
    return false;
}

/* ---- grouped_gemm_sm90.cu (device/cuda/moe) ---- */

/* Whether this GPU and this output are for the kernel of experts with many rows. */
bool gemm_grouped_sm90_takes(const struct cuda *c, const struct gemm_grouped *g);
/* pre: it takes it; bf16 operands; n and k multiples of 8, all pointers aligned to 16 bytes. */
int gemm_grouped_sm90(struct cuda *c, const struct gemm_grouped *g);

/* ---- gemm_fallback.cu ---- */

/* A grouped GEMM of any size and alignment: as gemm_fallback. */
int gemm_grouped_fallback(struct cuda *c, const struct gemm_grouped *g);

/* A GEMM of any size and alignment: r ascending, one accumulator. */
int gemm_fallback(struct cuda *c, const struct cuda_gemm_args *a);
/* The epilogue: a->out from its f32 sums acc, which may be a->out itself. */
int gemm_epilogue(struct cuda *c, const struct cuda_gemm_args *a, const float *acc, int64_t ld_acc);
/* db (n) f32 = column sums of dy (m, n), in an order that depends on m and n alone; add: +=. */
int gemm_colsum(struct cuda *c, float *db, struct tensor dy, bool add);
/* Test values of an operand (rows, cols): row i is a function of (seed, i, cols), of size `scale`. mirror -1 and 1: the second
 * half of a row is the first half backwards, times mirror; -2: that of a column, times -1; 0: plain noise. */
int gemm_fill_test_values(struct cuda *c, struct tensor dst, unsigned seed, int mirror, float scale);
/* *flag (device) becomes 1 where the first `bytes` (a multiple of 16) of x and y differ. */
int gemm_compare(struct cuda *c, const void *x, const void *y, size_t bytes, int *flag);

#endif
