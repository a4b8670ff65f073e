/* kernels.h - the inner loops of the CPU backend other than GEMM, one table for each instruction set.
 *
 * Every entry runs on one thread, over memory that its caller owns, and knows
 * nothing of KV blocks, sequences or threads; the ops in attention.c, lm_head.c, norm_rope.c
 * and sampler.c cut the work and call these.
 *
 * Invariant: what is written for a row depends on that row's inputs alone,
 * never on how many rows come in one call. */
#ifndef VERLC_DEVICE_CPU_KERNELS_H
#define VERLC_DEVICE_CPU_KERNELS_H

#include "device/device.h"
#include "device/cpu/cpu_int.h"

enum { CPU_ATTN_DECODE_ROWS = 16 }; /* most rows of attn_decode */

/* Rows of attention are (token, query head of one group) pairs, token first.  D is head_dim, Dp is
 * D rounded up to 16, the pad is zero. */
struct cpu_attn_tile {
    int64_t rows, group, dim;
    const int32_t *pos;   /* (rows): position of each, pos[0] + r / group */
    int64_t key0, n_keys; /* the tile's keys: key0 is a multiple of DEV_KEY_TILE */
    int64_t window;       /* 0: none */
    float scale, softcap; /* softcap 0: none */
    const float *q;       /* (rows, Dp) */
    const float *kt;      /* (D, DEV_KEY_TILE): keys are the lanes; keys >= n_keys are 0 */
    /* forward */
    const float *v;   /* (n_keys, Dp) */
    float *acc;       /* (rows, Dp), running */
    float *max, *sum; /* (rows) running; max is in units of log 2 */
    /* decode, instead of kt and v: each group of 16 keys (16, D), the last padded */
    const uint16_t *k_rows[DEV_KEY_TILE / 16], *v_rows[DEV_KEY_TILE / 16];
    const uint16_t *k_next[DEV_KEY_TILE / 16], *v_next[DEV_KEY_TILE / 16]; /* to be prefetched */
    /* backward */
    const float *k;           /* (n_keys, Dp) */
    const float *vt;          /* as kt */
    const float *dout;        /* (rows, Dp) */
    const float *lse, *delta; /* (rows): lse in units of log 2; dout . out */
    float *p, *ds;            /* (rows, DEV_KEY_TILE) scratch */
    float *dq;                /* (rows, Dp) running */
    float *dk, *dv;           /* (n_keys, D) running */
};

/* Softmax statistics of a run of at most DEV_VOCAB_CHUNK entries; e = exp(z - max). */
struct cpu_head_sum {
    float max, sum, sum_t, sum_sq; /* sum e, sum e (z - max), sum e^2; the last two when asked */
};

/* One row's gradient of the logits:
 * dz_j = inv_temp (dlogp 1[j = target] + dlist_i 1[j = list_i] - dsum p_j - dentropy p_j (log p_j + entropy)). */
struct cpu_head_dz {
    float inv_temp, lse, dlogp, dentropy, entropy;
    float softcap;       /* 0: none; raw logits are under it, and the gradient is that of what is under */
    float dsum;          /* dlogp + sum of dlist over the whole row */
    int64_t target;      /* within this run of entries, or -1 */
    const int32_t *list; /* (n_list) ids of the vocabulary, distinct */
    const float *dlist;
    int64_t n_list, first; /* first: id of this run's first entry */
};

/* One head of one row of qkv: optional RMSNorm, then RoPE by cos and sin (D/2 each). */
struct cpu_head_rot {
    int64_t dim;
    enum dtype act;
    float eps;
    const void *norm; /* (D) act, or NULL */
    enum norm_kind kind;
    const float *cos, *sin; /* (D/2) */
    /* backward */
    enum dtype dy_dt;
    float *dnorm, *tmp; /* (D): += with norm; scratch */
};

/* RMSNorm of one row. */
struct cpu_norm {
    void *y;           /* (n) act; with from f32 */
    const float *x;    /* (n) */
    const void *w;     /* (n) act */
    const float *from; /* (n), or NULL */
    enum dtype act;
    enum norm_kind kind;
    int64_t n;
    float eps;
};

/* The backward of RMSNorm on one row. */
struct cpu_norm_grad {
    float *dx, *dw; /* (n) += */
    const void *dy, *w;
    enum dtype dy_dt, w_dt;
    enum norm_kind kind;
    const float *x;
    int64_t n;
    float rstd;
};

/* The backward of SwiGLU or GeGLU on n entries of a row, all of one dtype. */
struct cpu_swiglu_grad {
    void *dgate, *dup;
    const void *dy, *gate, *up;
    int64_t n;
};

/* Rows [n0, n1) of a chunk of one value head of the gated delta rule; C = DEV_DELTA_CHUNK, heads are multiples of 16. */
struct cpu_delta {
    int64_t n0, n1, dk, dv;
    const float *kt;    /* (dk, C): normalised keys, columns [0, n1) */
    const float *q, *v; /* (rows, dk) normalised and scaled, (rows, dv) */
    const float *beta;  /* (rows) */
    const float *g;     /* (C): running sums, [0, n1) */
    const float *s;     /* (dk, dv): the state at the chunk's start; NULL: zeros */
    float *kk, *qk;     /* (rows, C): k.k and q.k */
    float *a, *p;       /* (rows, C) scratch */
    float *e;           /* (C, dv): rows [0, n0) given, the others a result */
    float *o;           /* (rows, dv): the result */
    float *u, *t;       /* (rows, dv), (16, dv) scratch */
};
/* The backward of rows [0, n) of such a chunk. */
struct cpu_delta_grad {
    const struct cpu_delta *f; /* v, o, u are not read */
    const float *k, *dout;     /* (n, dk), (n, dv) */
    const float *ds;           /* (dk, dv): of the state after the chunk; NULL: zeros */
    float *ds0;                /* of the state at its start, with s; may be s */
    float *dq, *dk;            /* (n, dk) += */
    float *dv;                 /* (n, dv) */
    float *dbeta_beta, *dg;    /* (n), of g itself, not of its sums */
    float *start, *after;      /* (C) scratch: of exp(G_i); of exp(G_last - G_j) */
    float *pairs;              /* (2, C, C) scratch */
    float *de, *x, *rs, *os;   /* (C, dv) scratch */
    float *st, *et;            /* (dv, dk), (dv, C) scratch */
};
/* Rows of a chunk in a state: keys as they came, (C, dk), and 1 / |k| of each. */
struct cpu_open_keys {
    int64_t rows, dk;
    const void *k;
    const float *r;
};
/* y (dim) = x r by, r = 1 / |x|. */
struct cpu_l2 {
    const float *y;
    int64_t dim;
    float r, by;
};
/* n columns of a row of the causal convolution: the row of each tap, the oldest first, and the taps' weights. */
struct cpu_conv {
    const void *x[DEV_CONV_TAPS];
    const float *w; /* (DEV_CONV_TAPS, ldw) */
    int64_t ldw, n;
};
/* A row of the gated norm; from rstd on of its backward. */
struct cpu_gated_norm {
    const void *x, *z, *w;
    int64_t n;
    float eps, rstd;
    const void *dy;
    void *dx, *dz;
    float *dw; /* (n) += */
};
struct cpu_output_gate { /* n entries of the output gate's backward */
    const void *dy, *x, *gate;
    void *dx, *dgate;
    int64_t n;
};

struct cpu_kern {
    /* attention */
    /* kt columns [0, 16) (row stride DEV_KEY_TILE) = 16 rows (D) of src, transposed. */
    void (*pack_kt)(float *kt, const void *src, enum dtype dt, int64_t dim);
    /* dst (n, Dp) = src (n, D). */
    void (*widen)(float *dst, const void *src, enum dtype dt, int64_t n, int64_t dim);
    void (*attn_fwd)(const struct cpu_attn_tile *t);
    /* The same bits; bf16, D a multiple of 32, at most CPU_ATTN_DECODE_ROWS rows, all of one position. */
    void (*attn_decode)(const struct cpu_attn_tile *t);
    void (*attn_bwd)(const struct cpu_attn_tile *t);
    /* out (D) act = acc * by, never -0. */
    void (*attn_out)(void *out, enum dtype dt, const float *acc, float by, int64_t dim);
    /* dots (rows) = row of a times row of b; both (rows, Dp). */
    void (*row_dots)(float *dots, const float *a, const float *b, int64_t rows, int64_t dim);

    /* rows of the residual stream */
    float (*rmsnorm_fwd)(const struct cpu_norm *a); /* returns 1 / rms */
    void (*rmsnorm_bwd)(const struct cpu_norm_grad *g);
    void (*rot_fwd)(void *y, const void *x, const struct cpu_head_rot *h);
    void (*rot_bwd)(void *dx, const void *dy, const void *x, const struct cpu_head_rot *h); /* dx (D) act; dy (D) of dy_dt */
    void (*swiglu_fwd)(void *y, const void *gate, const void *up, enum dtype dt, int64_t n);
    void (*swiglu_bwd)(const struct cpu_swiglu_grad *g, enum dtype dt);
    void (*geglu_fwd)(void *y, const void *gate, const void *up, enum dtype dt, int64_t n);
    void (*geglu_bwd)(const struct cpu_swiglu_grad *g, enum dtype dt);
    void (*narrow)(void *dst, enum dtype dt, const float *src, int64_t n);
    void (*add)(float *dst, const float *src, int64_t n); /* dst += src */

    /* gated delta net */
    float (*l2_fwd)(float *y, const void *x, enum dtype dt, int64_t dim, float by); /* y = x / |x| * by; returns 1 / |x| */
    void (*l2_bwd)(void *dx, enum dtype dt, const float *dy, const struct cpu_l2 *p);
    void (*delta_keys)(float *kt, const float *k, int64_t dk); /* kt (dk, C) = k (C, dk), transposed */
    void (*delta_open_keys)(float *kt, const struct cpu_open_keys *p,
                            enum dtype dt); /* the first rows of kt, whose others are free */
    void (*delta_dots)(const struct cpu_delta *p);
    void (*delta_fwd)(const struct cpu_delta *p);
    void (*delta_state)(const struct cpu_delta *p, float *next, float *w); /* next may be s; w (dk, C) scratch */
    void (*delta_bwd)(const struct cpu_delta_grad *g);
    void (*conv_fwd)(void *y, const struct cpu_conv *p, enum dtype dt);
    void (*conv_du)(float *du, float *dw, const void *dy, const struct cpu_conv *p, enum dtype dt); /* dw (taps, n) +=, or NULL */
    void (*conv_dx)(void *dx, const float *const du[DEV_CONV_TAPS], const struct cpu_conv *p, enum dtype dt);
    float (*gated_norm_fwd)(void *y, const struct cpu_gated_norm *p, enum dtype dt); /* returns 1 / rms */
    void (*gated_norm_bwd)(const struct cpu_gated_norm *p, enum dtype dt);
    void (*output_gate_fwd)(void *y, const void *x, const void *gate, enum dtype dt, int64_t n);
    void (*output_gate_bwd)(const struct cpu_output_gate *p, enum dtype dt);

    /* head and sampler: z = raw * inv_temp */
    void (*head_sum)(struct cpu_head_sum *s, const float *raw, int64_t n, float inv_temp, bool moments);
    void (*head_dz)(void *dz, enum dtype dt, const float *raw, int64_t n, const struct cpu_head_dz *a);
    void (*head_exp)(float *e, const float *raw, int64_t n, float inv_temp, float max);
    void (*softcap)(float *x, int64_t n, float cap); /* x = cap tanh(x / cap) */
    void (*scale)(float *dst, const float *src, int64_t n, float by);
    /* Sum of e^(x - max) over the x >= least. */
    float (*mass)(const float *x, int64_t n, float max, float least);
    float (*max)(const float *x, int64_t n); /* -infinity when n is 0; NaN entries may be skipped */
    /* idx gets the i with x[i] >= least, ascending; returns how many. */
    int64_t (*at_least)(int32_t *idx, const float *x, int64_t n, float least);
};

extern const struct cpu_kern cpu_kern_c;
#if defined(__x86_64__)
extern const struct cpu_kern cpu_kern_avx2, cpu_kern_avx512;
#endif

/* The table of this run's instruction set. */
const struct cpu_kern *cpu_kern_of(const struct cpu *c);

#endif
