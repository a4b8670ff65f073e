/* gemm_args.h - what the CUDA backend's GEMM is asked for.
 *
 * Invariant: all matrices are row-major, sums in f32. */
#ifndef VERLC_DEV_CUDA_GEMM_ARGS_H
#define VERLC_DEV_CUDA_GEMM_ARGS_H

#include "device/device.h"

enum cuda_gemm_op {
    CUDA_GEMM_FWD, /* out (m, n) = a (m, k) . b (n, k)^T: batch-invariant, a row's bits do not depend on m */
    CUDA_GEMM_DX,  /* out (m, k) = a (m, n) . b (n, k): batch-invariant */
    CUDA_GEMM_DW,  /* out (n, k) = a (m, n)^T . b (m, k): deterministic */
};
struct cuda_gemm_args {
    enum cuda_gemm_op op;
    int64_t m, n, k;
    const void *a, *b;
    void *out;
    enum dtype in, out_dt; /* in: DT_F32 (plain f32, no TF32) or DT_BF16, of a and b; out: f32, or in */
    int64_t ld_out;        /* elements between rows of out; 0: its width */
    bool add;              /* out (f32) += */
    const void *from;      /* add: what is accumulated on, of out's shape; NULL: out itself */
    int64_t whole_n;       /* FWD: b is some rows of a matrix of so many, whose bits the result has; 0: it is all of them */
    int64_t split_cols;    /* FWD, out f32, no add: the bits are those of GEMMs of split_cols columns each (the last may have
                              fewer), one after the other; 0: of one GEMM */
    void *gate_up;         /* FWD: fused SwiGLU: out is (m, n / 2) of dtype in; this (m, n) may be written, as the GEMM's
                              output; NULL: no SwiGLU */
    const void *bias;      /* FWD: (n) of dtype in, optional: added in f32 before the one rounding */
};

#endif
