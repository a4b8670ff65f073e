/* dev.h - what a compute backend must provide, and the checked way to call it.
 *
 * A backend is a table of functions (struct dev_ops) at the granularity of a
 * layer's step.  `ref` (plain C) is the definition of every op; `cpu` (threads
 * and vector kernels) and `cuda` (a shared object) must agree with it within
 * the tolerances of tests/ops.  Callers use the dev_* wrappers, which check
 * shapes, dtypes and the presence of the op once, so that backends hold
 * arithmetic only.
 *
 * Two rules make training and generation agree bit for bit (DESIGN invariants
 * 1 and 2).  Within one backend and one run:
 *  - a row of an op's result depends only on that row's inputs, never on how
 *    many rows come with it, on their order, or on the number of threads;
 *  - reductions go in one fixed order (k ascending in a matmul, keys in tiles
 *    of DEV_KEY_TILE in position order in attention, vocabulary in chunks of
 *    DEV_VOCAB_CHUNK in the head).
 * Weight gradients sum over rows in row order; splitting rows into several
 * calls changes them by fp32 rounding only.
 *
 * Numbers: "act" is the compute dtype of the run, DT_F32 or DT_BF16, the dtype
 * of weights and of every matmul input.  The residual stream and all gradients
 * of it are f32, all sums are f32 (dot products of long reductions may use
 * wider).  bf16 results are rounded once, to nearest even.
 *
 * Work is queued in order; only dev_sync, dev_copy_out and the ops that
 * say so wait. */
#ifndef VERLC_DEV_H
#define VERLC_DEV_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

enum dtype { DT_F32, DT_BF16, DT_F16, DT_F64, DT_I32, DT_I64, DT_U8 };
size_t dtype_size(enum dtype dt);
const char *dtype_name(enum dtype dt); /* "f32", "bf16", ... */

#define DEV_KEY_TILE 64      /* keys of one attention tile */
#define DEV_VOCAB_CHUNK 4096 /* vocabulary entries of one chunk of the LM head */
#define DEV_QUANT_BLOCK 256  /* elements that share one scale in 8-bit arrays */
#define DEV_LANES 7          /* orders of transfers beside the queue: three of the model's, four of the decoder's */

/* A view: never owns.  Row-major and contiguous; dim[0] is the slowest.
 * data == NULL (TENSOR_NONE) stands for "not given" where an op says optional. */
struct tensor {
    void *data;
    enum dtype dt;
    int nd;
    int64_t dim[4];
};
#define TENSOR_NONE ((struct tensor){0})
static inline struct tensor tensor_1d(void *p, enum dtype dt, int64_t n) {
    struct tensor t = {p, dt, 1, {n, 1, 1, 1}};
    return t;
}
static inline struct tensor tensor_2d(void *p, enum dtype dt, int64_t r, int64_t c) {
    struct tensor t = {p, dt, 2, {r, c, 1, 1}};
    return t;
}
int64_t tensor_count(struct tensor t);                             /* elements */
struct tensor tensor_rows(struct tensor t, int64_t lo, int64_t n); /* rows [lo, lo+n) of dim[0] */

/* A matrix parameter W (n outputs, k inputs) in the backend's own layout. This
 * is the only copy that forward, backward and sampling read ("one weight
 * buffer"); the fp32 master in the optimizer is plain row-major. */
struct weight {
    void *data;
    enum dtype dt; /* DT_F32 or DT_BF16 */
    int64_t n, k;
};

/* Keys and values of one layer: (n_pages, n_kv_heads, page_len, head_dim), act.
 * Slot s is row s % page_len of page s / page_len.  The rollout pool has many
 * pages of 16; packed training has one page as long as the batch. */
struct kv {
    struct tensor k, v;
};

/* Which rows of a packed batch belong together and where their keys are.
 * Sequence i owns rows [q_start[i], q_start[i+1]); its first row stands at
 * position pos0[i] and sees the pos0[i] keys before it, so row r sees keys
 * 0 .. pos0[i] + r (causal), minus those `window` or more positions back when
 * window > 0.  Key j is in slot
 *     pages ? pages[i][j / page_len] * page_len + j % page_len : kv_start[i] + j.
 * All arrays are i32 on the device. */
struct attn_seqs {
    int64_t n;              /* sequences */
    int64_t max_q, max_kv;  /* longest query run, most keys; for sizing only */
    struct tensor q_start;  /* (n + 1) */
    struct tensor pos0;     /* (n) */
    struct tensor pages;    /* (n, max_pages) or TENSOR_NONE */
    struct tensor kv_start; /* (n), when pages is TENSOR_NONE */
};

struct qkv_args { /* shapes: T rows, Hq query heads, Hk key/value heads, D = head_dim */
    int64_t n_q_heads, n_kv_heads, head_dim;
    struct tensor qkv;            /* (T, (Hq + 2 Hk) * D) act: q heads, then k heads, then v heads */
    struct tensor q_norm, k_norm; /* (D) act, optional: RMSNorm of each head before RoPE (Qwen3) */
    float eps;
    struct tensor rope;  /* (P, D/2, 2) f32: cos, sin of position p; pairs (i, i + D/2) rotate */
    struct tensor pos;   /* (T) i32 */
    struct tensor slots; /* (T) i32: where row t's key and value go */
    struct tensor q;     /* (T, Hq * D) act: normalised, rotated queries */
    struct kv kv;        /* keys (normalised, rotated) and values */
};

struct attn_args {
    int64_t n_q_heads, n_kv_heads, head_dim;
    float scale;    /* of q.k, usually 1/sqrt(D) */
    int64_t window; /* 0: none */
    struct attn_seqs seqs;
    struct tensor q; /* (T, Hq * D) act */
    struct kv kv;
    struct tensor out; /* (T, Hq * D) act */
    struct tensor lse; /* (T, Hq) f32: log-sum-exp of scaled scores; optional in forward */
};

/* The LM head with log-softmax, never materialising rows x vocabulary.
 * z = (x . W^T) * inv_temp; p = softmax(z). */
struct lmhead_args {
    struct tensor x;         /* (R, h) act */
    struct weight w;         /* (V, h) */
    struct tensor inv_temp;  /* (R) f32 */
    struct tensor target;    /* (R) i32, in [0, V) */
    struct tensor logp;      /* (R) f32: z[target] - lse */
    struct tensor entropy;   /* (R) f32, optional in forward: lse - sum p z */
    struct tensor lse;       /* (R) f32: needed by backward; optional in forward */
    struct tensor sum_pi_sq; /* (R) f32, optional: sum p^2 */
    /* Several entries of a row (distillation), 1 <= K, P <= V; all optional. */
    struct tensor top_id, top_logp;   /* (R, K) i32, f32; forward: the K most probable, largest first, equal ones by id; a
                                         row whose logits are NaN gets ids in range and NaN. Both or none. */
    struct tensor list_id, list_logp; /* (R, P) i32 in [0, V), distinct in a row, and f32: z[id] - lse */
    struct tensor dlist;              /* (R, P) f32; backward, with list_id: d loss / d list_logp */
};

/* One row's sampling rule. Order: repetition penalty (a positive logit is divided
 * by it, a negative one multiplied), temperature, top-k, then top-p on the
 * renormalised rest (the shortest run of the most probable whose sum reaches
 * top_p), then min-p (times the largest probability).  Equal entries rank by id,
 * lowest first, so top-k keeps exactly k.  The largest entry is always kept. */
struct sample_param {
    float inv_temp;           /* 1/T; ignored when greedy */
    float top_p, min_p;       /* 1 and 0: off */
    float repetition_penalty; /* 1: off */
    float u;                  /* uniform in [0, 1): inverse CDF over the kept entries in id order */
    int32_t top_k;            /* <= 0: off */
    int32_t greedy;           /* argmax, lowest id on ties; logp at temperature 1 */
};

struct sample_args {
    struct tensor logits;             /* (R, V) f32, raw, as dev_logits wrote them */
    const struct sample_param *param; /* (R), host memory */
    struct tensor seen;               /* (R, ceil(V/8)) u8 bit set of ids that the penalty applies to; optional */
    struct tensor id;                 /* (R) i32 */
    struct tensor logp;               /* (R) f32: full softmax at T: bits equal to dev_lmhead_fwd's logp */
    struct tensor logp_kept;          /* (R) f32, optional: after penalty and truncation; 0 when greedy */
};

/* One row of a decoding loop that stays on the device: its rule, the address of its
 * randomness (base/rng.h) and how far it may go. */
struct decode_row {
    struct sample_param rule; /* u is not read: it is rng_token(seed, uid, sample, at) */
    uint32_t sample, at;      /* index of the sample; place of the token to draw in its response */
    uint64_t seed, uid;
    int32_t left; /* tokens it may still draw; 0: the row stays as it is */
    int32_t unused;
};

/* The end of one step of that loop: the head, draw, note, move on. */
struct decode_args {
    struct tensor x;      /* (R, h) act: the last states */
    struct weight w;      /* (V, h) act: the head */
    struct tensor logits; /* (R, V) f32: raw, as dev_logits writes them */
    struct tensor rows;   /* (R, sizeof(struct decode_row)) u8, updated */
    struct tensor stop;   /* (R, S) i32, optional: tokens that end the row, -1 fills up */
    int64_t page_len;
    struct tensor pages;           /* (R, max_pages) i32: where the row's keys go */
    struct tensor ids, pos, slots; /* (R) i32: inputs of this step's forward -> of the next one's */
    struct tensor step;            /* (1) i32: which row of the results is written; counts up */
    struct tensor id;              /* (steps, R) i32 */
    struct tensor logp, logp_kept; /* (steps, R) f32 */
};

/* A rectangle of one matrix added to one of another: dst[dst_row + i][dst_col + j] += scale * src[...]. */
struct add_block_args {
    struct tensor dst, src; /* (R, C), (R', C') f32, different memory */
    int64_t dst_row, dst_col, src_row, src_col, rows, cols;
    float scale; /* product and sum are rounded one by one */
};

/* A frozen matrix in 4 or 8 bits, turned back into act before it is packed and multiplied.
 * NF4 (Dettmers et al. 2023): the flat matrix in blocks of DEV_NF4_BLOCK elements, two codes a byte, the
 * first in the high half; an element is book[code] times its block's largest magnitude.
 * INT8 (Dettmers et al. 2022, without outlier columns): an element is its row's largest magnitude times
 * code / 127, code in two's complement. */
enum quant_kind { QUANT_NONE, QUANT_NF4, QUANT_INT8 };
#define DEV_NF4_BLOCK 64
struct dequant_args {
    enum quant_kind kind;
    struct tensor code;  /* NF4: (ceil(n k / 2)) u8, INT8: (n k) u8 */
    struct tensor scale; /* NF4: (ceil(n k / DEV_NF4_BLOCK)) f32, INT8: (n) f32 */
    struct tensor w;     /* (n, k) act: the result */
};
extern const float dev_nf4_book[16]; /* ascending */

struct adamw_args { /* flat fp32 arrays of equal length; decoupled weight decay (torch AdamW) */
    struct tensor p, m, v, g;
    double lr, beta1, beta2, eps, weight_decay; /* double: 1 - 0.999f is off by 1.3e-5 */
    float grad_scale;                           /* multiplies g (gradient clipping) */
    int64_t step;                               /* 1-based */
};

/* An f32 array x (n) as 8-bit codes, block by block: x[i] is about
 * scale[i / DEV_QUANT_BLOCK] * book[code[i]], scale being the largest |x| of the block. */
struct quant8_args {
    struct tensor x;     /* (n) f32 */
    struct tensor code;  /* (n) u8 */
    struct tensor scale; /* (ceil(n / DEV_QUANT_BLOCK)) f32 */
    struct tensor book;  /* (256) f32, ascending */
};

/* What a backend can do and where its memory lies: known without a device, so that a plan may ask. */
struct dev_caps {
    bool own_memory;     /* device memory is not the host's: there is pinned host memory and there are copy streams */
    bool graphs;         /* calls can be captured and replayed: CUDA graphs */
    bool plain_weights;  /* a packed weight is its row-major matrix and nothing else: neighbours may be written as one array */
    size_t driver_bytes; /* device memory that the driver takes beside all else: kernels' code, graphs (measured) */
};

/* The largest sizes of a run, from which a backend sizes its scratch memory. */
struct dev_sizes {
    enum dtype act;
    int64_t rows;                    /* of one forward, training or generating */
    int64_t decode;                  /* rows of one decoding step */
    int64_t hidden, ffn, qkv, vocab; /* qkv: (Hq + 2 Hk) * D columns */
    int64_t n_q_heads, head_dim;
    bool train;
};

/* Device memory beside that of dev_alloc, in bytes. */
struct dev_memory {
    size_t working;   /* held by the backend: scratch, a library's workspace, memory to choose algorithms in */
    size_t system;    /* taken by the driver since the device was opened: kernels' code, recorded work; 0: not known */
    int64_t n_allocs; /* requests for device memory so far, dev_alloc's included */
};

struct dev;

/* pre for every op: tensors live on this device and were checked by the
 * wrapper. A NULL entry makes the wrapper return ERR_UNSUPPORTED. */
struct dev_ops {
    const char *name; /* "ref", "cpu", "cuda": for messages */
    struct dev_caps caps;
    void (*close)(struct dev *d);
    /* memory; alloc is 256-aligned, zeroed where the system does so for free */
    int (*alloc)(struct dev *d, size_t bytes, void **out);
    void (*free)(struct dev *d, void *p, size_t bytes);
    int (*sync)(struct dev *d);
    int (*copy_in)(struct dev *d, void *dst_dev, const void *src_host, size_t bytes);
    int (*copy_out)(struct dev *d, void *dst_host, const void *src_dev, size_t bytes); /* waits */
    int (*copy)(struct dev *d, void *dst_dev, const void *src_dev, size_t bytes);
    int (*zero)(struct dev *d, void *dst_dev, size_t bytes);
    /* NULL: the wrapper zeroes them one by one */
    int (*zero_rows)(struct dev *d, void *dst_dev, int64_t rows, size_t stride, size_t bytes);
    /* scratch memory of the ops, beside alloc; NULL: next to none, nothing to reserve, not counted */
    size_t (*working_bytes)(struct dev *d, const struct dev_sizes *s);
    int (*reserve)(struct dev *d, const struct dev_sizes *s);
    int (*memory)(struct dev *d, struct dev_memory *out);
    /* pinned host memory and the copy streams; NULL without caps.own_memory */
    int (*host_alloc)(struct dev *d, size_t bytes, void **out);
    void (*host_free)(struct dev *d, void *p, size_t bytes);
    int (*fetch)(struct dev *d, int lane, void *dst_dev, const void *src_host, size_t bytes);
    int (*evict)(struct dev *d, int lane, void *dst_host, const void *src_dev, size_t bytes);
    int (*lane_wait)(struct dev *d, int lane);
    int (*lane_sync)(struct dev *d, int lane);

    /* weights */
    size_t (*weight_bytes)(struct dev *d, enum dtype dt, int64_t n, int64_t k);
    int (*weight_pack)(struct dev *d, struct weight w, struct tensor src);
    int (*weight_unpack)(struct dev *d, struct tensor dst, struct weight w);

    /* forward */
    int (*cast)(struct dev *d, struct tensor dst, struct tensor src);
    int (*embed_fwd)(struct dev *d, struct tensor x, struct tensor ids, struct weight w);
    int (*gather_rows)(struct dev *d, struct tensor dst, struct tensor src, struct tensor idx);
    int (*rmsnorm_fwd)(struct dev *d, struct tensor y, struct tensor rstd, struct tensor x, struct tensor w, float eps);
    int (*matmul_fwd)(struct dev *d, struct tensor y, struct tensor x, struct weight w, struct tensor bias, bool add);
    /* NULL: the wrapper copies, then adds */
    int (*matmul_add)(struct dev *d, struct tensor y, struct tensor from, struct tensor x, struct weight w, struct tensor bias);
    /* NULL: the wrapper multiplies into gate_up, then calls swiglu_fwd */
    int (*matmul_swiglu)(struct dev *d, struct tensor y, struct tensor gate_up, struct tensor x, struct weight w,
                         struct tensor bias);
    int (*qkv_fwd)(struct dev *d, const struct qkv_args *a);
    int (*attn_fwd)(struct dev *d, const struct attn_args *a);
    /* NULL: the wrapper calls qkv_fwd, then attn_fwd */
    int (*qkv_attn_fwd)(struct dev *d, const struct qkv_args *q, const struct attn_args *a);
    int (*swiglu_fwd)(struct dev *d, struct tensor y, struct tensor gate_up);
    int (*lmhead_fwd)(struct dev *d, const struct lmhead_args *a);
    int (*logits)(struct dev *d, struct tensor out, struct tensor x, struct weight w);
    int (*sample)(struct dev *d, const struct sample_args *a);
    int (*decode_next)(struct dev *d, const struct decode_args *a);

    /* backward */
    int (*scatter_rows_add)(struct dev *d, struct tensor dst, struct tensor src, struct tensor idx);
    int (*embed_bwd)(struct dev *d, struct tensor dw, struct tensor ids, struct tensor dx);
    int (*rmsnorm_bwd)(struct dev *d, struct tensor dx, struct tensor dw, struct tensor dy, struct tensor x, struct tensor w,
                       struct tensor rstd);
    /* NULL: the wrapper calls rmsnorm_bwd, then cast */
    int (*rmsnorm_bwd_round)(struct dev *d, struct tensor dx, struct tensor rounded, struct tensor dw, struct tensor dy,
                             struct tensor x, struct tensor w, struct tensor rstd);
    int (*matmul_dx)(struct dev *d, struct tensor dx, struct tensor dy, struct weight w, bool add);
    int (*matmul_dw)(struct dev *d, struct tensor dw, struct tensor db, struct tensor dy, struct tensor x, bool add);
    int (*qkv_bwd)(struct dev *d, const struct qkv_args *a, struct tensor dq, struct tensor dk, struct tensor dv,
                   struct tensor dqkv, struct tensor dq_norm, struct tensor dk_norm);
    int (*attn_bwd)(struct dev *d, const struct attn_args *a, struct tensor dout, struct tensor dq, struct tensor dk,
                    struct tensor dv);
    int (*swiglu_bwd)(struct dev *d, struct tensor dgate_up, struct tensor dy, struct tensor gate_up);
    int (*lmhead_bwd)(struct dev *d, const struct lmhead_args *a, struct tensor dlogp, struct tensor dentropy, struct tensor dx,
                      struct tensor dw, bool add);

    /* CUDA graphs; NULL without caps.graphs */
    int (*graph_begin)(struct dev *d);
    int (*graph_end)(struct dev *d, void **graph);
    int (*graph_run)(struct dev *d, void *graph);
    void (*graph_free)(struct dev *d, void *graph);

    /* Points in the queue's time; NULL where every op waits. stamp_us: microseconds from stamp 0,
     * after a sync. */
    int (*stamp)(struct dev *d, int64_t i);
    int (*stamp_us)(struct dev *d, int64_t i, double *us);

    /* optimizer */
    int (*sumsq)(struct dev *d, struct tensor out, struct tensor x);
    int (*adamw)(struct dev *d, const struct adamw_args *a);
    /* NULL: the wrapper calls adamw, then cast */
    int (*adamw_round)(struct dev *d, const struct adamw_args *a, struct tensor rounded);
    int (*axpby)(struct dev *d, struct tensor y, float a, struct tensor x, float b);
    int (*quant8)(struct dev *d, const struct quant8_args *a);
    int (*dequant8)(struct dev *d, const struct quant8_args *a);
    int (*add_block)(struct dev *d, const struct add_block_args *a);
    int (*dequant)(struct dev *d, const struct dequant_args *a);
};

struct dev {
    const struct dev_ops *ops;
    void *ctx;                       /* backend state: thread pool, streams, workspace */
    char describe[128];              /* for people: "cpu: 2 threads, avx512" */
    char isa[32];                    /* what decides the bits: "avx512", "ref"; part of a run's identity */
    size_t mem_total;                /* bytes the device (or the machine) has for this process */
    size_t mem_others;               /* bytes of the device that other programs held when it was opened */
    size_t allocated, peak;          /* through dev_alloc */
    int64_t n_allocs;                /* calls of dev_alloc */
    size_t host_allocated;           /* through dev_host_alloc, where that is not dev_alloc */
    struct dev_trace *trace;         /* NULL: no trace is on */
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
 * beside the program or ../lib/verlc, or the file that VERLC_CUDA_LIB names. ERR_DEVICE says in one
 * line why it cannot: not built, no driver, an old driver, no GPU, an architecture that was not built. */
int dev_open_cuda(struct dev *d, int index);
/* Whether dev_open_cuda has a library, a driver and a GPU to work with; else why not, in one line.
 * Opens no device; the thread's error message is changed. */
bool dev_cuda_present(char *why, size_t size);
/* A GPU with `mem` bytes to plan for, be there one or not: it answers what the sizes of a run are (those of an H100 or
 * H200 where they depend on the GPU), and does nothing else. */
void dev_open_cuda_planned(struct dev *d, size_t mem);
/* By name: "cpu", "ref", "cuda" (the first GPU), "cuda:N", or "auto" (or NULL): the first GPU if there
 * is one that works, else the CPU, and one log line says which and why. isa: of the CPU, as above. */
int dev_open_named(struct dev *d, const char *name, int n_threads, const char *isa);
void dev_close(struct dev *d); /* a zeroed or closed dev is fine */

/* ---- tracing: which call took how long, on the host and on the device ---- */
void dev_trace_start(struct dev *d);
/* What the run does from here on, until the next call: a track of its own in the trace, a range of a profiler that
 * listens. NULL: nothing. No trace is fine. */
void dev_trace_phase(struct dev *d, const char *name);
/* Ends it. path: Chrome's trace format, for Perfetto or chrome://tracing; NULL: none. table: the calls
 * that took the most device time, to this stream; NULL: none. The log says how long the device waited, by phase. */
int dev_trace_stop(struct dev *d, const char *path, FILE *table);

/* ---- checked calls; every one may return ERR_INVAL (shape or dtype that does
 * not fit: a bug of the caller, with the op named), ERR_UNSUPPORTED, ERR_DEVICE ---- */

/* bytes == 0 gives NULL. ERR_NOMEM says how much was asked and is there. */
int dev_alloc(struct dev *d, size_t bytes, void **out);
void dev_free(struct dev *d, void *p, size_t bytes);
/* Bytes of scratch that the ops of a run of these sizes take at most, each thread's included. */
size_t dev_working_bytes(struct dev *d, const struct dev_sizes *s);
/* With memory of its own the device takes them now: afterwards no op of a run within these sizes asks for memory. Else the
 * ops take them as they need them. ERR_NOMEM. */
int dev_reserve(struct dev *d, const struct dev_sizes *s);
/* Bytes that the driver takes beside every allocation: kernels' code and CUDA graphs. What the context takes was gone before
 * mem_total was asked. */
size_t dev_driver_bytes(const struct dev *d);
int dev_memory(struct dev *d, struct dev_memory *out);
/* Memory of the host beside the device's: every call below takes it as it takes the device's, the ops of
 * a GPU at the speed of its bus. Where the device's memory is the host's it is dev_alloc's. */
bool dev_has_own_memory(const struct dev *d); /* whether the two are not the same */
int dev_host_alloc(struct dev *d, size_t bytes, void **out);
void dev_host_free(struct dev *d, void *p, size_t bytes); /* NULL ok */
/* Transfers between the two that run beside the queue. One begins when what was queued before it, and the
 * transfers of its lane (0 to DEV_LANES - 1) before it, are done; what is queued after dev_lane_wait begins
 * when the lane's are done. Source and destination are left alone until then. Not in recorded work. */
int dev_fetch(struct dev *d, int lane, void *dst_dev, const void *src_host, size_t bytes);
int dev_evict(struct dev *d, int lane, void *dst_host, const void *src_dev, size_t bytes);
int dev_lane_wait(struct dev *d, int lane);
int dev_lane_sync(struct dev *d, int lane); /* the host waits for the lane's */
int dev_sync(struct dev *d);
int dev_copy_in(struct dev *d, void *dst_dev, const void *src_host, size_t bytes);
int dev_copy_out(struct dev *d, void *dst_host, const void *src_dev, size_t bytes);
int dev_copy(struct dev *d, void *dst_dev, const void *src_dev, size_t bytes);
int dev_zero(struct dev *d, void *dst_dev, size_t bytes);
/* The same of `bytes` at the start of each of `rows` pieces, one `stride` bytes behind the other. */
int dev_zero_rows(struct dev *d, void *dst_dev, int64_t rows, size_t stride, size_t bytes);

/* Bytes of a weight's buffer in this backend's layout. */
size_t dev_weight_bytes(struct dev *d, enum dtype dt, int64_t n, int64_t k);
/* src (n, k) f32 or bf16, row-major on the device -> w (rounded to w.dt). */
int dev_weight_pack(struct dev *d, struct weight w, struct tensor src);
/* w -> dst (n, k) f32 or w.dt, row-major on the device; exact. */
int dev_weight_unpack(struct dev *d, struct tensor dst, struct weight w);

int dev_cast(struct dev *d, struct tensor dst, struct tensor src); /* f32 <-> bf16, or equal; same count */
/* x (T, h) f32 = rows ids (T) i32 of w (V, h). ids must be in [0, V). */
int dev_embed_fwd(struct dev *d, struct tensor x, struct tensor ids, struct weight w);
/* dst (R, c) = src (T, c) rows idx (R) i32; dst dtype may be f32 or bf16, same as src. */
int dev_gather_rows(struct dev *d, struct tensor dst, struct tensor src, struct tensor idx);
/* y (T, c) act = x / rms(x) * w; x (T, c) f32; w (c) act; rstd (T) f32 optional.
 * As Hugging Face: x * rstd is rounded to act before it is multiplied by w, the product again. */
int dev_rmsnorm_fwd(struct dev *d, struct tensor y, struct tensor rstd, struct tensor x, struct tensor w, float eps);
/* y (T, n) = x (T, k) act . W^T + bias (n) act, optional; y act or f32. add: y (f32) += instead of =. */
int dev_matmul_fwd(struct dev *d, struct tensor y, struct tensor x, struct weight w, struct tensor bias, bool add);
/* y (T, n) f32 = from (T, n) f32 + (x . W^T + bias): the bits of a copy and dev_matmul_fwd with add. from may be y. */
int dev_matmul_add(struct dev *d, struct tensor y, struct tensor from, struct tensor x, struct weight w, struct tensor bias);
/* y (T, f) act = silu(gate) * up of gate, up = x (T, k) act . W^T + bias (2f) act, optional, W (2f, k): the bits of dev_matmul_fwd
 * and dev_swiglu_fwd. gate_up (T, 2f) act: memory that it may write. */
int dev_matmul_swiglu(struct dev *d, struct tensor y, struct tensor gate_up, struct tensor x, struct weight w, struct tensor bias);
int dev_qkv_fwd(struct dev *d, const struct qkv_args *a);
int dev_attn_fwd(struct dev *d, const struct attn_args *a);
/* Both, for one new row of each sequence (or none): a.q, a.kv and the heads are q's, each row is some sequence's, and its slot
 * that of its newest key, which no other sequence sees. The same bits in kv, a.out and a.lse; q's contents are undefined
 * afterwards. */
int dev_qkv_attn_fwd(struct dev *d, const struct qkv_args *q, const struct attn_args *a);
/* y (T, f) act = silu(gate) * up; gate_up (T, 2f) act: gate columns first. */
int dev_swiglu_fwd(struct dev *d, struct tensor y, struct tensor gate_up);
int dev_lmhead_fwd(struct dev *d, const struct lmhead_args *a);
/* out (R, V) f32 = x (R, h) act . W^T: the same bits that lmhead_fwd computes inside. */
int dev_logits(struct dev *d, struct tensor out, struct tensor x, struct weight w);
int dev_sample(struct dev *d, const struct sample_args *a); /* waits */
/* Logits as dev_logits has them; draws as dev_sample does for each row with left > 0, writes (id, logp, logp_kept) to row *step
 * of the results, and moves the row on: left falls by one, to 0 at an end token; while it is
 * above 0, ids, pos, slots become the next step's. Rows with left == 0 change nothing. */
int dev_decode_next(struct dev *d, const struct decode_args *a);

/* Records the calls between begin and end instead of running them, to run them many times at the
 * cost of one. They must have run once before at the same shapes, and none may wait or read host
 * memory; none writes a weight. Attention of one row a sequence may read ahead of the calls before it what is there
 * when a run begins - attn_seqs, pos, slots, and all keys and values but those of its own rows - so the calls of a
 * recording that write them (dev_decode_next) come after it. dev_has_graphs tells whether the backend can. */
bool dev_has_graphs(const struct dev *d);
int dev_graph_begin(struct dev *d);
int dev_graph_end(struct dev *d, void **graph); /* also ends a recording that failed: *graph is NULL then */
int dev_graph_run(struct dev *d, void *graph);
void dev_graph_free(struct dev *d, void *graph); /* NULL ok */

/* dst (T, c) f32 rows idx (R) += src (R, c) f32 or act. Rows of idx are distinct. */
int dev_scatter_rows_add(struct dev *d, struct tensor dst, struct tensor src, struct tensor idx);
/* dw (V, h) f32 += ; dx (T, h) f32. Rows with equal ids add in row order. */
int dev_embed_bwd(struct dev *d, struct tensor dw, struct tensor ids, struct tensor dx);
/* rounded (T, c) act or f32 = dx, after dev_rmsnorm_bwd's dx +=. */
int dev_rmsnorm_bwd_round(struct dev *d, struct tensor dx, struct tensor rounded, struct tensor dw, struct tensor dy,
                          struct tensor x, struct tensor w, struct tensor rstd);
/* dx (T, c) f32 +=; dw (c) f32 +=; dy (T, c) act or f32; x, w, rstd as in forward. */
int dev_rmsnorm_bwd(struct dev *d, struct tensor dx, struct tensor dw, struct tensor dy, struct tensor x, struct tensor w,
                    struct tensor rstd);
/* dx (T, k) act or f32 = dy (T, n) act . W; add: dx (f32) +=. */
int dev_matmul_dx(struct dev *d, struct tensor dx, struct tensor dy, struct weight w, bool add);
/* dw (n, k) f32 = dy^T . x; db (n) f32 = column sums of dy, optional; add: both += instead of =; dy (T, n), x (T, k) act. */
int dev_matmul_dw(struct dev *d, struct tensor dw, struct tensor db, struct tensor dy, struct tensor x, bool add);
/* a as in forward (qkv the raw input; q and kv not read). dq (T, Hq*D) act, dk and dv
 * (n_pages, Hk, page_len, D) f32 at the slots of the forward -> dqkv (T, (Hq+2Hk)*D) act,
 * dq_norm and dk_norm (D) f32 +=, when the norms are there. */
int dev_qkv_bwd(struct dev *d, const struct qkv_args *a, struct tensor dq, struct tensor dk, struct tensor dv, struct tensor dqkv,
                struct tensor dq_norm, struct tensor dk_norm);
/* a.out and a.lse are the forward's. dout (T, Hq*D) act -> dq (T, Hq*D) act, dk, dv f32 shaped
 * as kv (overwritten at the slots of these sequences). Only seqs without pages and with pos0 = 0. */
int dev_attn_bwd(struct dev *d, const struct attn_args *a, struct tensor dout, struct tensor dq, struct tensor dk,
                 struct tensor dv);
int dev_swiglu_bwd(struct dev *d, struct tensor dgate_up, struct tensor dy, struct tensor gate_up);
/* Given dlogp (R) and dentropy (R, optional) f32: dx (R, h) act = d/dx, dw (V, h, optional) f32 = d/dw; add: dw +=.
 * a.lse (and a.entropy when dentropy is given) are the forward's. Logits are recomputed.
 *   dlogp/dz_j = 1[j = target] - p_j;  dH/dz_j = -p_j (log p_j + H);  times inv_temp. */
int dev_lmhead_bwd(struct dev *d, const struct lmhead_args *a, struct tensor dlogp, struct tensor dentropy, struct tensor dx,
                   struct tensor dw, bool add);

/* out (1) f64 = sum of squares of x (f32), in a fixed order; NaN and Inf carry through. */
int dev_sumsq(struct dev *d, struct tensor out, struct tensor x);
int dev_adamw(struct dev *d, const struct adamw_args *a);
/* The same, and rounded (n) act = the new p. */
int dev_adamw_round(struct dev *d, const struct adamw_args *a, struct tensor rounded);
/* y (any shape) f32 = a * x + b * y, two products and their sum rounded one by one. b == 0: y is not read. */
int dev_axpby(struct dev *d, struct tensor y, float a, struct tensor x, float b);
/* x -> code, scale. Each x / scale takes the code of the nearest entry of the book, the lower one
 * of two that are equally near; a block of zeros has scale 0. x must be finite. */
int dev_quant8(struct dev *d, const struct quant8_args *a);
/* code, scale -> x = book[code] * scale. */
int dev_dequant8(struct dev *d, const struct quant8_args *a);
int dev_add_block(struct dev *d, const struct add_block_args *a);
int dev_dequant(struct dev *d, const struct dequant_args *a); /* rounded to act once */

/* ---- scalar conversions, used by backends, loaders and tests ---- */
static inline float bf16_to_f32(uint16_t b) {
    const uint32_t u = (uint32_t)b << 16;
    float f;
    __builtin_memcpy(&f, &u, 4);
    return f;
}
static inline uint16_t f32_to_bf16(float f) { /* nearest even; NaN stays NaN */
    uint32_t u;
    __builtin_memcpy(&u, &f, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

#ifdef __cplusplus
}
#endif
#endif
