/* device.h - what a compute backend must provide, and the checked way to call it.
 *
 * A backend is a table of functions (struct dev_ops) at the granularity of a
 * layer's step.  `ref` (plain C) is the definition of every op; `cpu` (threads
 * and vector kernels) and `cuda` (a shared object) must agree with it within
 * the tolerances of tests/ops.  Callers use the dev_* wrappers, which check
 * shapes, dtypes and the presence of the op once, so that backends hold
 * arithmetic only.
 *
 * Two rules make every op batch-invariant, and training and generation agree bit for bit (DESIGN
 * invariants 1 and 2).  Within one backend and one run:
 *  - a row of an op's result depends only on that row's inputs, never on how
 *    many rows come with it, on their order, or on the number of threads;
 *  - reductions go in one fixed order (k ascending in a matmul, keys in tiles
 *    of DEV_KEY_TILE in position order in attention, vocabulary in chunks of
 *    DEV_VOCAB_CHUNK in the head).
 * Weight gradients sum over rows in row order; splitting rows into several
 * calls changes them by fp32 rounding only.  An op that adds to a gradient makes its own sum first and
 * adds it with one rounding: y += op(x) has the bits of y + op(x), so that a gradient over several calls is
 * the left fold of theirs (dev_fold), wherever each was computed.
 *
 * Numbers: "act" is the compute dtype of the run, DT_F32 or DT_BF16, the dtype
 * of weights and of every matmul input.  The residual stream and all gradients
 * of it are f32, all sums are f32 (dot products of long reductions may use
 * wider).  bf16 results are rounded once, to nearest even.
 *
 * Work is queued in order; only dev_sync, dev_copy_out and the ops that say so wait.  ops.h is the table,
 * memory.h has copies and copy streams, graph.h CUDA graphs, trace.h the trace; this file includes them all. */
#ifndef VERLC_DEVICE_H
#define VERLC_DEVICE_H

#include "device/graph.h"
#include "device/memory.h"
#include "device/ops.h"
#include "device/tensor.h"
#include "device/trace.h"

#ifdef __cplusplus
extern "C" {
#endif

struct dev {
    const struct dev_ops *ops;
    void *ctx;                       /* backend state: thread pool, streams, workspace */
    char describe[128];              /* for people: "cpu: 2 threads, avx512" */
    char id[40];                     /* distinguishes the devices of a host; "" where ranks of a host have one anyhow */
    char isa[32];                    /* what decides the bits: "avx512", "ref"; part of a run's identity */
    size_t mem_total;                /* bytes the device (or the machine) has for this process */
    size_t mem_others;               /* bytes of the device that other programs held when it was opened */
    bool shared;                     /* other processes of this run use the device too, with parts of their own */
    size_t allocated, peak;          /* through dev_alloc */
    int64_t n_allocs;                /* calls of dev_alloc */
    size_t host_allocated;           /* through dev_host_alloc, where that is not dev_alloc */
    size_t planned;                  /* bytes that a memory plan says the run takes of the device; 0: none has said */
    struct dev_trace *trace;         /* NULL: no trace is on */
    struct gpu_use *use;             /* what looks at how busy it is (gpu_use.h); NULL: nobody asked */
    FILE *graph_list;                /* dev_graph_list's */
    void (*range)(const char *name); /* begins a named range of a profiler that listens (NVTX), NULL ends it; NULL: none does */
    bool in_range;                   /* the range of a phase is open */
};

/* ---- opening ---- */
int dev_open_ref(struct dev *d);
/* n_threads <= 0: all CPUs this process may use. isa: NULL (probe for the
 * fastest at start-up; VERLC_ISA overrides), or "amx", "avx512bf16", "avx512",
 * "avx2", "c". ERR_UNSUPPORTED when this CPU lacks it. */
int dev_open_cpu(struct dev *d, int n_threads, const char *isa);
/* GPU number `index` (CUDA's numbering: CUDA_VISIBLE_DEVICES applies). Opens libverlc_cuda.so from
 * next to the program or ../lib/verlc, or the file that VERLC_CUDA_LIB names. ERR_DEVICE says in one
 * line why it cannot: not built, no driver, an old driver, no GPU, an architecture that was not built. */
int dev_open_cuda(struct dev *d, int index);
/* Whether dev_open_cuda has a library, a driver and a GPU to work with; else why not, in one line.
 * Opens no device; the thread's error message is changed. */
bool dev_cuda_present(char *why, size_t size);
/* How many GPUs this process sees; 0 where there is no library, no driver or no GPU. */
int dev_cuda_count(void);
/* A GPU with `mem` bytes to plan for, be there one or not: it answers what the sizes of a run are (those of an H100 or
 * H200 where they depend on the GPU), and does nothing else. */
void dev_open_cuda_planned(struct dev *d, size_t mem);
/* By name: "cpu", "ref", "cuda" (the first GPU), "cuda:N", or "auto" (or NULL): the first GPU if there
 * is one that works, else the CPU, and one log line says which and why. isa: of the CPU, as above. */
int dev_open_named(struct dev *d, const char *name, int n_threads, const char *isa);
void dev_close(struct dev *d); /* a zeroed or closed dev is fine */

/* ---- checked calls; every one may return ERR_INVAL (shape or dtype that does
 * not fit: a bug of the caller, with the op named), ERR_UNSUPPORTED, ERR_DEVICE ---- */

/* Bytes of a weight's buffer in this backend's layout. Its rows from a multiple of DEV_VOCAB_CHUNK on are a weight of their own,
 * which begins the bytes of the rows before it further. */
size_t dev_weight_bytes(struct dev *d, enum dtype dt, int64_t n, int64_t k);
/* src (n, k) f32 or bf16, row-major on the device -> w (rounded to w.dt). */
int dev_weight_pack(struct dev *d, struct weight w, struct tensor src);
/* The same of all matrices of a stack, src (count n, k); at once where weights are plain. */
int dev_weight_stack_pack(struct dev *d, struct weight_stack w, struct tensor src);
/* w -> dst (n, k) f32 or w.dt, row-major on the device; exact. */
int dev_weight_unpack(struct dev *d, struct tensor dst, struct weight w);
int dev_weight_stack_unpack(struct dev *d, struct tensor dst, struct weight_stack w); /* likewise */

int dev_cast(struct dev *d, struct tensor dst, struct tensor src); /* f32 <-> bf16, or equal; same count */
/* x (T, h) f32 = rows ids (T) i32 of w (V, h). ids must be in [0, V). */
int dev_embed_fwd(struct dev *d, struct tensor x, struct tensor ids, struct weight w);
/* dst (R, c) = src (T, c) rows idx (R) i32; dst dtype may be f32 or bf16, same as src. */
int dev_gather_rows(struct dev *d, struct tensor dst, struct tensor src, struct tensor idx);
/* y = x / rms(x) * w, rounded as Hugging Face's classes of that kind do; or from + that. */
int dev_rmsnorm_fwd(struct dev *d, const struct rmsnorm_args *a);
/* y (T, n) = x (T, k) act . W^T + bias (n) act, optional; y act or f32. add: y (f32) += instead of =. */
int dev_matmul_fwd(struct dev *d, struct tensor y, struct tensor x, struct weight w, struct tensor bias, bool add);
/* y (T, n) f32 = from (T, n) f32 + (x . W^T + bias): bitwise a copy and dev_matmul_fwd with add. from may be y. */
int dev_matmul_add(struct dev *d, struct tensor y, struct tensor from, struct tensor x, struct weight w, struct tensor bias);
/* y (T, f) act = silu(gate) * up of gate, up = x (T, k) act . W^T + bias (2f) act, optional, W (2f, k): fused, bitwise
 * dev_matmul_fwd and dev_swiglu_fwd. gate_up (T, 2f) act: memory that it may write. */
int dev_matmul_swiglu(struct dev *d, struct tensor y, struct tensor gate_up, struct tensor x, struct weight w, struct tensor bias);
/* Columns of a GEMM's output that ranks have computed, as one matrix. */
int dev_join_columns(struct dev *d, const struct join_columns_args *a);
int dev_copy_columns(struct dev *d, const struct copy_columns_args *a);
int dev_copy_rows(struct dev *d, const struct copy_rows_args *a);
int dev_qkv_fwd(struct dev *d, const struct qkv_args *a);
int dev_qk_norm_fwd(struct dev *d, const struct qk_norm_args *a);
/* What RoPE turns of a.q, and a.k, of the others. */
int dev_mla_join_fwd(struct dev *d, const struct mla_join_args *a);
int dev_heads_fwd(struct dev *d, const struct heads_args *a);
/* dst (T, H * n) of src (T, H * m), act or f32 each: the first elements of each head; where src has less, zeros, or with keep
 * what is there. */
int dev_resize_heads(struct dev *d, struct tensor dst, struct tensor src, int64_t n_heads, bool keep);
int dev_rope_norm_fwd(struct dev *d, const struct rope_norm_args *a);
/* x (T, c) act *= factor (P) f32 at pos (T) i32: of each row the number of its position. */
int dev_scale_rows(struct dev *d, struct tensor x, struct tensor factor, struct tensor pos);
int dev_attn_fwd(struct dev *d, const struct attn_args *a);
/* Both, for decode: one new row of each sequence (or none). a.q, a.kv and the heads are q's, each row is some sequence's, and
 * its slot that of its newest key, which no other sequence sees. The same bits in kv, a.out and a.lse; q is undefined
 * afterwards. */
int dev_qkv_attn_fwd(struct dev *d, const struct qkv_args *q, const struct attn_args *a);
/* y (T, f) act = silu(gate) * up; gate_up (T, 2f) act: gate columns first. */
int dev_swiglu_fwd(struct dev *d, struct tensor y, struct tensor gate_up);
/* The same with GELU in its tanh form (Hendrycks & Gimpel 2016) in the place of silu. */
int dev_geglu_fwd(struct dev *d, struct tensor y, struct tensor gate_up);
/* Mixture of experts: route, sort, gather rows by `token`, grouped GEMMs and SwiGLU over the P rows, combine. No call waits: how
 * many rows an expert has is known on the device alone, so a CUDA graph serves every load. */
int dev_route_fwd(struct dev *d, const struct route_args *a);
/* The slots of expert (T, k) i32, sorted by expert and stable: offset (E + 1) i32, expert e has rows offset[e] to offset[e + 1];
 * token (P) i32 of each row; row (T, k) i32 of each slot. The ids of a token are distinct. */
int dev_expert_sort(struct dev *d, struct tensor offset, struct tensor token, struct tensor row, struct tensor expert);
/* dst (E + 1) i32 = the offsets of rows [lo, lo + n) alone, counted from lo: a part of the rows for the grouped GEMMs.
 * dst may be offset. */
int dev_clip_offsets(struct dev *d, struct tensor dst, struct tensor offset, int64_t lo, int64_t n);
/* y (P, n) act or f32 = x (P, k) act . W_e^T, e the expert that the row is of: the grouped GEMM. */
int dev_grouped_fwd(struct dev *d, struct tensor y, struct tensor x, struct weight_stack w, struct tensor offset);
int dev_combine_fwd(struct dev *d, const struct combine_args *a);
int dev_row_gate_fwd(struct dev *d, const struct row_gate_args *a);
/* y (P, n) act += bias_e, rounded; bias (E * n) act, rows by expert as offset (E + 1) says. */
int dev_expert_bias_fwd(struct dev *d, struct tensor y, struct tensor bias, struct tensor offset);
int dev_clamped_swiglu_fwd(struct dev *d, const struct clamped_swiglu_args *a);
int dev_attn_sink_fwd(struct dev *d, const struct attn_sink_args *a);
int dev_causal_conv_fwd(struct dev *d, const struct causal_conv_args *a);
int dev_delta_fwd(struct dev *d, const struct delta_args *a);
int dev_gated_norm_fwd(struct dev *d, const struct gated_norm_args *a);
/* y (T, c) act = x * sigmoid(gate), the sigmoid rounded to act; x, gate (T, c) act. y may be x. */
int dev_output_gate_fwd(struct dev *d, struct tensor y, struct tensor x, struct tensor gate);
/* rest, gate = joint; and the other way round. */
int dev_gate_split(struct dev *d, const struct gate_split_args *a);
int dev_gate_join(struct dev *d, const struct gate_split_args *a);
int dev_lmhead_fwd(struct dev *d, const struct lmhead_args *a);
/* out (R, V) f32 = x (R, h) act . W^T, with w's softcap: the same bits that lmhead_fwd computes inside. */
int dev_logits(struct dev *d, struct tensor out, struct tensor x, struct weight w);
int dev_sample(struct dev *d, const struct sample_args *a); /* waits */
/* Logits as dev_logits, or those given; a draw as dev_sample's for each row with left > 0, written as (id, logp, logp_kept) to row
 * *step of the results. Then left falls by one, to 0 at an end token; while it is above 0, ids, pos and slots become the next
 * step's. Rows with left == 0 change nothing. */
int dev_decode_next(struct dev *d, const struct decode_args *a);

/* dst (T, c) f32 rows idx (R) += src (R, c) f32 or act. Rows of idx are distinct. */
int dev_scatter_rows_add(struct dev *d, struct tensor dst, struct tensor src, struct tensor idx);
/* dw (V, h) f32 += ; dx (T, h) f32. Rows with equal ids are summed in row order first, from 0. */
int dev_embed_bwd(struct dev *d, struct tensor dw, struct tensor ids, struct tensor dx);
/* Its elements [lo, lo + n) alone, which may begin and end inside a row: dw (n) f32 is that part of the gradient (vocab, h). */
int dev_embed_bwd_part(struct dev *d, struct tensor dw, int64_t lo, int64_t vocab, struct tensor ids, struct tensor dx);
int dev_rmsnorm_bwd(struct dev *d, const struct rmsnorm_bwd_args *a);
/* dx (T, k) act or f32 = dy (T, n) act . W; add: dx (f32) +=. */
int dev_matmul_dx(struct dev *d, struct tensor dx, struct tensor dy, struct weight w, bool add);
/* dw (n, k) f32 = dy^T . x; db (n) f32 = column sums of dy, optional; add: both += instead of =; dy (T, n), x (T, k) act. */
int dev_matmul_dw(struct dev *d, struct tensor dw, struct tensor db, struct tensor dy, struct tensor x, bool add);
/* a as in forward, qkv the raw input. */
int dev_qkv_bwd(struct dev *d, const struct qkv_args *a, const struct qkv_bwd_args *g);
/* a.rstd is the forward's. */
/* Gradients of what RoPE turned, of a.heads and a.latent, and of a.cn, from those of queries, K and V; those of K and V,
 * one memory in forward, are added. */
int dev_mla_join_bwd(struct dev *d, const struct mla_join_args *a);
int dev_heads_dw(struct dev *d, const struct heads_dw_args *a);
int dev_qk_norm_bwd(struct dev *d, const struct qk_norm_args *a, const struct qk_norm_bwd_args *g);
int dev_rope_norm_bwd(struct dev *d, const struct rope_norm_args *a, const struct qk_norm_bwd_args *g);
/* a.out and a.lse are the forward's. dout (T, Hq*D) act -> dq (T, Hq*D) act, dk, dv f32 shaped
 * as kv (overwritten at the slots of these sequences' keys, those before pos0 included). Only packed seqs (no block table); where
 * one has pos0 > 0, max_kv is above max_q. */
int dev_attn_bwd(struct dev *d, const struct attn_args *a, struct tensor dout, struct tensor dq, struct tensor dk,
                 struct tensor dv);
int dev_swiglu_bwd(struct dev *d, struct tensor dgate_up, struct tensor dy, struct tensor gate_up);
int dev_geglu_bwd(struct dev *d, struct tensor dgate_up, struct tensor dy, struct tensor gate_up);
/* dlogits (T, E) act or f32, from dweight (T, k) f32. With p the softmax and w the normalised weights: normalize:
 * dz_e = w_e (dw_e - sum_s w_s dw_s) for the k, 0 for others; else dz_e = p_e (dw_e - sum_s p_s dw_s), dw_e = 0 for others. */
int dev_route_bwd(struct dev *d, const struct route_args *a, struct tensor dlogits, struct tensor dweight);
int dev_balance_bwd(struct dev *d, const struct balance_args *a);
/* dx (P, k) act or f32 = dy (P, n) act . W_e. */
int dev_grouped_dx(struct dev *d, struct tensor dx, struct tensor dy, struct weight_stack w, struct tensor offset);
/* dw (E, n, k) f32 = dy^T . x of each expert's rows, in their order; zeros where it has none. add: +=. dy (P, n), x (P, k) act. */
int dev_grouped_dw(struct dev *d, struct tensor dw, struct tensor dy, struct tensor x, struct tensor offset, bool add);
/* dy (P, h) act = w dout and dweight (T, k) f32 = dout . y, from dout (T, h) act; a as in forward, out and from are not
 * read. dy may be a.y. */
int dev_combine_bwd(struct dev *d, const struct combine_args *a, struct tensor dout, struct tensor dy, struct tensor dweight);
/* dy (T, h) act = sigmoid(gate) dout and dgate (T, 1) act = s (1 - s) (dout . y), s the sigmoid, from dout (T, h) act; a.out and
 * a.from are not read. dy may be a.y. */
int dev_row_gate_bwd(struct dev *d, const struct row_gate_args *a, struct tensor dout, struct tensor dy, struct tensor dgate);
/* db (E * n) f32 = sums of each expert's rows of dy (P, n) act, in their order; zeros where it has none. add: +=. */
int dev_expert_bias_bwd(struct dev *d, struct tensor db, struct tensor dy, struct tensor offset, bool add);
/* dgate_up (T, 2f) act, from dy (T, f) act; a.y is not read. What is clamped has no gradient. */
int dev_clamped_swiglu_bwd(struct dev *d, const struct clamped_swiglu_args *a, struct tensor dgate_up, struct tensor dy);
/* dsink (Hq) f32 -= sum over rows of e^(sink - lse) (dout . out), from dout (T, Hq * D) act; a as forward left it. */
int dev_attn_sink_bwd(struct dev *d, const struct attn_sink_args *a, struct tensor dout, struct tensor dsink);
/* a as in forward, without a state; a.y is not read. */
int dev_causal_conv_bwd(struct dev *d, const struct causal_conv_args *a, const struct causal_conv_bwd_args *g);
/* a.states and a.e are the forward's; states is overwritten. a.out is not read. */
int dev_delta_bwd(struct dev *d, const struct delta_args *a, const struct delta_bwd_args *g);
/* a.rstd is the forward's; a.y is not read. */
int dev_gated_norm_bwd(struct dev *d, const struct gated_norm_args *a, const struct gated_norm_bwd_args *g);
int dev_output_gate_bwd(struct dev *d, const struct output_gate_bwd_args *a);
/* Logits are made again, but those that the forward has kept.
 *   dlogp/dz_j = 1[j = target] - p_j;  dH/dz_j = -p_j (log p_j + H);  times inv_temp. */
int dev_lmhead_bwd(struct dev *d, const struct lmhead_args *a, const struct lmhead_bwd_args *g);
/* Whether backward is faster with lmhead_args.kept for a head of this shape; w.data is not read. Elsewhere it may be unused. */
bool dev_keeps_logits(struct dev *d, struct weight w);

/* sums (S) f64 = the sum of squares of each segment of x (n) f32, in an order that depends on its length alone; NaN and Inf
 * carry through. segments (S, 2) i64 on the device: first element, length of 1 to DEV_SEGMENT; base: the element that x begins
 * with. */
int dev_sumsq(struct dev *d, struct tensor sums, struct tensor x, struct tensor segments, int64_t base);
/* sum (1) i64 = the sum modulo 2^64 over the 8-byte little-endian words of bytes (n) u8, the last one filled up with zeros, of
 * SplitMix64's finalizer of word + (its index + 1) x 0x9e3779b97f4a7c15. Other bytes have another sum but for a chance of 2^-64;
 * the same on every device. */
int dev_checksum(struct dev *d, struct tensor sum, struct tensor bytes);
/* y (any shape) f32 = ((y + x[0]) + x[1]) + ..., each sum rounded once, in this order; without add x[0] takes y's place. x: n >= 1
 * of y's shape, in the host's array; none of them y. */
int dev_fold(struct dev *d, struct tensor y, const struct tensor *x, int n, bool add);
int dev_adamw(struct dev *d, const struct adamw_args *a);
/* The same, and rounded (n) act = the new p. */
int dev_adamw_round(struct dev *d, const struct adamw_args *a, struct tensor rounded);
/* Adam, AMSGrad, RAdam, RMSprop: p and the means after one step. */
int dev_adaptive(struct dev *d, const struct adaptive_args *a);
/* y (any shape) f32 = a * x + b * y, two products and their sum rounded one by one. b == 0: y is not read. */
int dev_axpby(struct dev *d, struct tensor y, float a, struct tensor x, float b);
/* x -> code, scale. Each x / scale takes the code of the nearest entry of the book, the lower one
 * of two that are equally near; a block of zeros has scale 0. x must be finite. */
int dev_quant8(struct dev *d, const struct quant8_args *a);
/* code, scale -> x = book[code] * scale. */
int dev_dequant8(struct dev *d, const struct quant8_args *a);
int dev_add_block(struct dev *d, const struct add_block_args *a);
int dev_dequant(struct dev *d, const struct dequant_args *a); /* rounded to act once */

#ifdef __cplusplus
}
#endif
#endif
