/* ops.h - the ops table: what a compute backend must provide, at the granularity of a layer's step, and the
 * arguments of its ops.  device.h has the checked wrappers, with the shapes of each op.
 *
 * Letters in shapes: T or R rows, Hq query heads, Hk KV heads, D head_dim, V vocabulary, h hidden size. */
#ifndef VERLC_DEVICE_OPS_H
#define VERLC_DEVICE_OPS_H

#include "device/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DEV_KEY_TILE 64      /* keys of one attention tile */
#define DEV_VOCAB_CHUNK 4096 /* vocabulary entries of one chunk of the LM head */
#define DEV_QUANT_BLOCK 256  /* elements that share one scale in 8-bit arrays */
#define DEV_CONV_TAPS 4      /* of the causal convolution */
#define DEV_DELTA_CHUNK 64   /* tokens of a chunk of the gated delta rule, counted from the sequence's first */
#define DEV_DELTA_DIM 128    /* largest head of it; heads are multiples of 16 */
#define DEV_DELTA_EPS 1e-6f  /* added to the sum of squares of q and k */
#define DEV_SEGMENT 65536    /* elements of a segment, at most: what dev_sumsq sums together */
#define DEV_MAX_EXPERTS 1024 /* experts of a layer */
#define DEV_MAX_CHOICES 32   /* experts of a token */

#ifdef __CUDACC__
#define DEV_HOST_OR_DEVICE __device__
#else
#define DEV_HOST_OR_DEVICE
#endif
/* dev_checksum's summand of word i. */
DEV_HOST_OR_DEVICE static inline uint64_t dev_checksum_word(uint64_t w, int64_t i) {
    w += ((uint64_t)i + 1) * 0x9e3779b97f4a7c15u;
    w = (w ^ w >> 30) * 0xbf58476d1ce4e5b9u;
    w = (w ^ w >> 27) * 0x94d049bb133111ebu;
    return w ^ w >> 31;
}

/* Which rows of a packed batch belong together and where their keys are.
 * Sequence i owns rows [q_start[i], q_start[i+1]); its first row stands at
 * position pos0[i] and sees the pos0[i] keys before it, so row r sees keys
 * 0 .. pos0[i] + r (causal), minus those `window` or more positions back when
 * window > 0.  Key j is in slot (struct kv)
 *     block_table ? block_table[i][j / block_len] * block_len + j % block_len : kv_start[i] + j.
 * All arrays are i32 on the device. */
struct attn_seqs {
    int64_t n;                 /* sequences */
    int64_t max_q, max_kv;     /* longest query run, most keys; for sizing only */
    struct tensor q_start;     /* (n + 1) */
    struct tensor pos0;        /* (n) */
    struct tensor block_table; /* (n, max_blocks), or TENSOR_NONE: packed */
    struct tensor kv_start;    /* (n), when block_table is TENSOR_NONE */
    /* Some are rows of one sequence (the tokens that a speculative step verifies), so that one sees the new key of another. Where
     * it is false, no sequence sees a new key but its own, and in a CUDA graph all others may be read early (device/graph.h). */
    bool shared_new_keys;
};

/* Of n = x / rms(x), (T, c) f32, and the weights. */
enum norm_kind {
    NORM_CAST_SCALE, /* n rounded to act, times w (Llama) */
    NORM_SCALE_CAST, /* n * w (OLMo 2) */
    NORM_ONE_PLUS,   /* n * (1 + w) (Gemma) */
};

struct qkv_args { /* shapes: T rows, Hq query heads, Hk KV heads, D = head_dim */
    int64_t n_q_heads, n_kv_heads, head_dim;
    struct tensor qkv;            /* (T, (Hq + 2 Hk) * D) act: q heads, then k heads, then v heads */
    struct tensor q_norm, k_norm; /* (D) act, optional: RMSNorm of each head before RoPE (Qwen3) */
    enum norm_kind kind;          /* of these */
    float eps;
    struct tensor rope;  /* (P, D/2, 2) f32: cos, sin of position p; of pairs above rotary/2 they are 1, 0 */
    int64_t rotary;      /* RoPE turns the first so many elements of a head; 0: all, D */
    bool interleaved;    /* pairs (2i, 2i + 1) of them turn, else (i, i + rotary/2) */
    struct tensor pos;   /* (T) i32 */
    struct tensor slots; /* (T) i32: where row t's key and value go */
    struct tensor q;     /* (T, Hq * D) act: normalised, rotated queries; like keys in dev_rope_source's order */
    struct kv kv;        /* keys (normalised, rotated) and values */
};
/* Whether q and keys have another order of a head's elements than qkv. */
static inline bool dev_rope_reorders(const struct qkv_args *a) { return a->interleaved || (a->rotary && a->rotary != a->head_dim); }
/* The element of a head of qkv that is element i of a query or a key, where pair j is (j, j + D/2), whatever pair of qkv it is. */
static inline int64_t dev_rope_source(const struct qkv_args *a, int64_t i) {
    const int64_t half = a->head_dim / 2, turned = (a->rotary ? a->rotary : a->head_dim) / 2, second = i >= half,
                  j = i - second * half;
    if (j >= turned) return second ? i : i + turned;
    return a->interleaved ? 2 * j + second : j + second * turned;
}

/* Gradients of struct qkv_args, whose q and kv backward does not read; all on the device, the caller's. */
struct qkv_bwd_args {
    struct tensor dq;               /* (T, Hq * D) act, given */
    struct tensor dk, dv;           /* (n_kv_blocks, Hk, block_len, D) f32, given, at the slots of the forward */
    struct tensor dqkv;             /* (T, (Hq + 2 Hk) * D) act: the result */
    struct tensor dq_norm, dk_norm; /* (D) f32 +=, when the norms are there */
};

struct rmsnorm_args {
    struct tensor y;    /* (T, c) act: the norm, rounded; with from: (T, c) f32 = from + the norm in f32 */
    struct tensor rstd; /* (T) f32, optional */
    struct tensor x;    /* (T, c) f32 */
    struct tensor w;    /* (c) act */
    float eps;
    enum norm_kind kind;
    struct tensor from; /* (T, c) f32, optional; may be y */
};

/* The backward of RMSNorm: x, w, rstd, kind as in forward. All on the device, the caller's. */
struct rmsnorm_bwd_args {
    struct tensor dx;      /* (T, c) f32 += */
    struct tensor rounded; /* (T, c) act or f32 = dx afterwards; optional */
    struct tensor dw;      /* (c) f32 += */
    struct tensor dy;      /* (T, c) act or f32 */
    struct tensor x;       /* (T, c) f32 */
    struct tensor w;       /* (c) act */
    struct tensor rstd;    /* (T) f32 */
    enum norm_kind kind;
};

/* RMSNorm of all queries of a row together, and of all its keys (OLMo 2): over N = Hq D and M = Hk D elements. */
struct qk_norm_args {
    struct tensor x;              /* (T, N + 2 M) act: queries, keys, values */
    struct tensor q_norm, k_norm; /* (N), (M) act */
    struct tensor y;              /* as x, other memory: queries and keys normalised, values as they are */
    struct tensor rstd;           /* (T, 2) f32: of queries, of keys; optional in forward */
    float eps;
    enum norm_kind kind;
};
/* Its gradients; y is not read. */
struct qk_norm_bwd_args {
    struct tensor dy;               /* (T, N + 2 M) act: the gradient of y becomes that of x */
    struct tensor dq_norm, dk_norm; /* (N), (M) f32 += */
};

/* RoPE of queries and keys, rounded, then RMSNorm of each head (Hunyuan). */
struct rope_norm_args {
    int64_t n_q_heads, n_kv_heads, head_dim;
    struct tensor x;              /* (T, (Hq + 2 Hk) * D) act: queries, keys, values */
    struct tensor q_norm, k_norm; /* (D) act */
    struct tensor rope;           /* (P, D/2, 2) f32, pairs (i, i + D/2) */
    struct tensor pos;            /* (T) i32 */
    struct tensor y;              /* as x, other memory: queries and keys turned and normalised, values as they are */
    struct tensor rstd;           /* (T, Hq + Hk) f32, optional in forward */
    float eps;
    enum norm_kind kind;
};

struct attn_args {
    int64_t n_q_heads, n_kv_heads, head_dim;
    float scale;    /* of q.k, usually 1/sqrt(D) */
    float softcap;  /* above 0: a scaled score s is softcap * tanh(s / softcap); 0: s */
    int64_t window; /* 0: none */
    struct attn_seqs seqs;
    struct tensor q; /* (T, Hq * D) act */
    struct kv kv;
    struct tensor out; /* (T, Hq * D) act */
    struct tensor lse; /* (T, Hq) f32: log-sum-exp of scaled scores; optional in forward */
};

/* The router of a mixture of experts (Shazeer et al. 2017, softmax before top-k). E experts, k choices of each token; slot t k + s
 * is choice s of token t, P = T k the slots. */
struct route_args {
    struct tensor logits; /* (T, E) act or f32 */
    struct tensor expert; /* (T, k) i32: the k largest logits, largest first, equal ones by id; NaN ranks as -infinity */
    struct tensor weight; /* (T, k) act or f32: their softmax over all E in f32, rounded once; backward does not read it */
    bool normalize;       /* divided by the sum of the k, which adds them in their order */
    /* Other rules of choice (DeepSeek-V2, DeepSeek-V3); 0: as above. The k largest of score + bias are chosen, in f32, of the
     * experts in the top_groups best of `groups` groups of neighbours alone, a group being as good as the sum of its two largest
     * sigmoids or as its largest probability. Weights are the scores without the bias; normalised: divided by their sum + 1e-20. */
    bool sigmoid;       /* scores are the sigmoids of logits, else the softmax */
    struct tensor bias; /* (E) f32, optional */
    int64_t groups, top_groups;
    float scale;         /* of the weights; 0: 1 */
    struct tensor given; /* (T, k) i32, optional: a token whose first id is not negative has these in the place of its k largest */
};
/* The losses of a router, in f32. Load balancing (Fedus et al. 2022): of a token sum_e load_e p_e, p its softmax over all E;
 * sigmoid: p_e = s_e / sum_j s_j, s the sigmoids (DeepSeek-V3). The z-loss (Zoph et al. 2022): z times the square of the logits'
 * log-sum-exp. */
struct balance_args {
    struct tensor logits; /* (T, E) act or f32 */
    struct tensor load;   /* (E) f32: of all tokens' choices, times what the loss is multiplied by */
    bool sigmoid;
    float z;
    struct tensor dlogits; /* (T, E) act or f32: += p_e (load_e - sum_j load_j p_j), times 1 - s_e; += 2 z lse softmax_e */
    struct tensor loss;    /* (T) f32 */
    struct tensor z_loss;  /* (T) f32, optional: without it there is no z-loss */
};
enum { DEV_MAX_EXPERT_GROUPS = 32 };
static inline bool route_by_scores(const struct route_args *a) {
    return a->sigmoid || a->bias.data || a->groups > 1 || a->scale != 0;
}

/* y (T, N) = blocks side by side: block i is (T, cut[i + 1] - cut[i]), rows one after the other, and follows those before it in x.
 * With from, y f32 = from + that, each sum rounded once. */
enum { DEV_MOST_COLUMNS = 16 };
struct join_columns_args {
    struct tensor y;                   /* (T, N) act */
    struct tensor from;                /* (T, N) f32, optional; may be y */
    struct tensor x;                   /* (T N), dtype of y; not y */
    int n;                             /* 1..DEV_MOST_COLUMNS blocks */
    int64_t cut[DEV_MOST_COLUMNS + 1]; /* host, ascending from 0 to N */
};

/* Columns [y_at, y_at + n) of y = [x_at, x_at + n) of x; y's others stay. */
struct copy_columns_args {
    struct tensor y; /* (T, N) act */
    int64_t y_at;
    struct tensor x; /* (T, K), dtype of y; other memory than y */
    int64_t x_at, n;
};

/* Row to[i] of x = row from[i]. */
struct copy_rows_args {
    struct tensor x; /* (R, N) act or f32 */
    int64_t n;
    const int32_t *from, *to; /* (n), host: no row is in both, none is twice in `to` */
};

/* out = from + ((w_0 y_0 + w_1 y_1) + ...) over a token's choices in their order, product and sum in f32, out rounded once. */
struct combine_args {
    struct tensor out;    /* (T, h) act or f32 */
    struct tensor from;   /* (T, h) f32, optional; may be out */
    struct tensor y;      /* (P, h) act */
    struct tensor row;    /* (T, k) i32: which row of y choice s of token t has, of dev_expert_sort */
    struct tensor weight; /* (T, k) act or f32, optional: without it each is 1 */
};

/* out = from + sigmoid(gate) y: a shared expert behind its gate, one number a row. Sigmoid, product and sum in f32. */
struct row_gate_args {
    struct tensor out;  /* (T, h) f32 */
    struct tensor from; /* (T, h) f32; may be out */
    struct tensor y;    /* (T, h) act */
    struct tensor gate; /* (T, 1) act */
};

/* gpt-oss' SwiGLU: y = (u + 1) g sigmoid(alpha g), g = min(gate, limit), u = up within [-limit, limit]. */
struct clamped_swiglu_args {
    struct tensor y;       /* (T, f) act */
    struct tensor gate_up; /* (T, 2f) act: gate columns first */
    float alpha, limit;
};

/* A logit of each query head that joins the softmax of its scores and has no value (gpt-oss' sinks): after attention, out *=
 * sigmoid(lse - sink), lse = ln(e^lse + e^sink). attn_bwd with these has the gradients of queries, K and V. */
struct attn_sink_args {
    struct tensor out;  /* (T, Hq * D) act, in place */
    struct tensor lse;  /* (T, Hq) f32, in place */
    struct tensor sink; /* (Hq) act */
};

/* Multi-head latent attention (DeepSeek-V2, section 2.1) in its absorbed form: attention of H query heads and one key head of
 * D = rope + r elements, whose values are the keys. A query is [what RoPE turns, q_nope W_uk], a key [what RoPE turns, latent].
 * Forward writes the first `rope` elements of each query, and the keys; backward reads gradients in q, k and v, and writes those
 * in the others. */
struct mla_join_args {
    int64_t n_heads, nope, rope;
    struct tensor heads;  /* (T, H * (nope + rope)) act: nope first in each head; backward: the last `rope` of each are written */
    struct tensor latent; /* (T, r + rope): the last `rope` columns; forward f32, backward act */
    struct tensor cn;     /* (T, r) act: the normalised latent */
    struct tensor table;  /* (P, rope/2, 2) f32: cos, sin of position p */
    struct tensor pos;    /* (T) i32 */
    struct tensor slots;  /* (T) i32 */
    bool interleaved;     /* pairs (2i, 2i + 1) of heads and latent turn, else (i, i + rope/2); in q and k they are the latter */
    struct tensor q;      /* (T, H * D) act */
    struct tensor k;      /* (n_kv_blocks, 1, block_len, D): forward act; backward f32, of keys */
    struct tensor v;      /* backward: as k, of values */
};

/* The products of each head's part of a row with its own rows of one matrix W (N, K): head h of H has the rows from h N / H + row
 * on, `rows` of them. Its part of x is from column h (columns of x) / H + x_at on, that of y likewise. */
struct heads_args {
    int64_t n_heads;
    struct tensor x, y; /* (T, H * any): act; forward's y act or f32 */
    int64_t x_at, y_at;
    struct weight w;
    int64_t row, rows;
    bool transposed; /* y (K a head) = x (rows) W, else y (rows) = x (K) W^T */
    bool add;        /* y += the sum in f32, rounded once */
};
/* The gradient of such rows: dw (N, K) f32 = sum over t of x (rows) y (K)^T; other rows of dw stay. add: += . */
struct heads_dw_args {
    int64_t n_heads;
    struct tensor x, y; /* act */
    int64_t x_at, y_at;
    struct tensor dw;
    int64_t row, rows;
    bool add;
};

/* Which rows of a packed batch are one sequence, for ops with a state: sequence i owns rows [start[i], start[i+1]), which follow
 * pos0[i] earlier ones. Its state is in slot[i], one of the state's slots and no other sequence's: read unless pos0[i] is 0, then
 * written. Without a state (training) slot is TENSOR_NONE and each pos0 is 0. All arrays are i32 on the device. */
struct row_seqs {
    int64_t n, max_rows; /* sequences; rows of the longest: none may have more (grids, and which kernel, depend on it) */
    struct tensor start; /* (n + 1) */
    struct tensor pos0;  /* (n) */
    struct tensor slot;  /* (n), or TENSOR_NONE */
};

/* What a gated delta net reads of its normalised input are columns of one GEMM's output (T, W): those from x_at, ba_at, z_at on.
 * Their gradients are the same columns of a matrix of the same shape, of which other columns are not touched. */

/* Depthwise causal convolution and SiLU: y[t] = silu(u[t]), u[t] = sum over i < DEV_CONV_TAPS of w[i] x[t - 3 + i], i ascending,
 * zeros before the sequence. u is rounded to act, as Hugging Face does. */
struct causal_conv_args {
    struct row_seqs seqs;
    struct tensor x; /* (T, W) act: c columns from x_at on */
    int64_t x_at;
    struct tensor w; /* (c, DEV_CONV_TAPS) act */
    struct tensor y; /* (T, c) act */
    /* (slots, R, c) act, optional: the sequence's last inputs, that at position p in row p modulo R; R >= DEV_CONV_TAPS - 1. Up to
     * R - (DEV_CONV_TAPS - 1) rows can be taken back: the next call then goes on from a position before them. */
    struct tensor state;
};
struct causal_conv_bwd_args { /* no state */
    struct tensor dy;         /* (T, c) act, given */
    struct tensor dx;         /* (T, W) act: the result, as x */
    struct tensor dw;         /* (c, DEV_CONV_TAPS) f32 += */
};

/* The gated delta rule (Yang, Kautz & Hatamizadeh 2024): per value head n, with key head m = n / (Hv / Hk) and a state S
 * (Dk, Dv) that is 0 before the sequence, for each token
 *   S = exp(g) S;  e = beta (v - S^T k);  S = S + k e^T;  out = S^T q,
 * k = k / |k|, q = q / |q| / sqrt(Dk) with |x|^2 = x.x + DEV_DELTA_EPS; beta = sigmoid(b), rounded to act;
 * g = -exp(a_log) softplus(a + dt_bias). In f32, in the chunk form: chunks of DEV_DELTA_CHUNK tokens from the sequence's first
 * token on; with S the state at the chunk's start, G_i the sum of g over the chunk's rows up to i, one by one,
 *   e_i = beta_i ((v_i - exp(G_i) S^T k_i) - sum_{j<i} exp(G_i - G_j) (k_i.k_j) e_j)
 *   out_i = exp(G_i) S^T q_i + sum_{j<=i} exp(G_i - G_j) (q_i.k_j) e_j
 *   S' = exp(G_C) S + sum_j exp(G_C - G_j) k_j e_j^T, at the end of a whole chunk alone.
 * A row reads rows before it alone, so a decoding step is a row like others, from the state: S and the rows k, e, G of the open
 * chunk, (position modulo DEV_DELTA_CHUNK) of them. A key is kept as it came, with 1 / |k|; their product, rounded, is the k above.
 * Rows of the open chunk can be taken back, those of a whole one cannot. */
struct delta_state {
    struct tensor s; /* (slots, Hv, Dk, Dv) f32 */
    struct tensor k; /* (slots, Hk, DEV_DELTA_CHUNK, Dk) act: before normalisation */
    struct tensor r; /* (slots, Hk, DEV_DELTA_CHUNK) f32: 1 / |k| */
    struct tensor e; /* (slots, Hv, DEV_DELTA_CHUNK, Dv) f32 */
    struct tensor g; /* (slots, Hv, DEV_DELTA_CHUNK) f32: G */
};
struct delta_args { /* Hk key heads of Dk, Hv value heads of Dv */
    int64_t n_k_heads, n_v_heads, k_dim, v_dim;
    struct row_seqs seqs;
    struct tensor qkv; /* (T, 2 Hk Dk + Hv Dv) act: q heads, then k heads, then v heads */
    struct tensor ba;  /* (T, W) act: 2 Hv columns from ba_at on: b, then a */
    int64_t ba_at;
    struct tensor a_log, dt_bias; /* (Hv) act */
    struct tensor out;            /* (T, Hv Dv) act */
    struct delta_state state;     /* optional: all of it or none */
    /* What backward needs of forward; optional there, both or none, not with a state. Chunk c of sequence i is entry
     * start[i] / DEV_DELTA_CHUNK + c - 1 of states: such chunks' first rows are at least a chunk from each other. */
    struct tensor states; /* (T / DEV_DELTA_CHUNK + 1, Hv, Dk, Dv) f32: S at the start of each chunk but a sequence's first */
    struct tensor e;      /* (T, Hv Dv) f32 */
};
struct delta_bwd_args {
    struct tensor dout;             /* (T, Hv Dv) act, given */
    struct tensor dqkv, dba;        /* as qkv, ba: the results */
    struct tensor da_log, ddt_bias; /* (Hv) f32 += */
};

/* y = (x / rms(x) * w) * silu(z), a row a head: x / rms(x) is rounded to act before it is multiplied by w, the product again. */
struct gated_norm_args {
    struct tensor x, y; /* (R, c) act, R = T H */
    struct tensor z;    /* (T, W) act: H heads of c columns from z_at on */
    int64_t z_at;
    struct tensor w;    /* (c) act */
    struct tensor rstd; /* (R) f32; optional in forward */
    float eps;
};
struct gated_norm_bwd_args {
    struct tensor dy;     /* (R, c) act, given */
    struct tensor dx, dz; /* (R, c) act, and as z: the results */
    struct tensor dw;     /* (c) f32 += */
};

/* Columns that belong together in another way: of H heads the parts stand side by side (a query and its gate; q, k, v and z of
 * a key head of a gated delta net) from column `at` on, M other columns (keys, values) follow. N: those of all heads' last parts.
 * The columns before `at` are not touched, neither of joint nor of rest. */
enum { DEV_SPLIT_PARTS = 4 };
struct gate_split_args {
    int64_t n_heads, n_parts, width[DEV_SPLIT_PARTS]; /* of a head */
    int64_t at;
    struct tensor joint; /* (T, at + H sum of width + M) act or f32 */
    struct tensor rest;  /* (T, joint's less N): part by part, each of all heads, the other columns */
    struct tensor gate;  /* (T, N): the last part; absent: it is in rest too */
};
struct output_gate_bwd_args {
    struct tensor dy, x, gate; /* (T, c) act, given */
    struct tensor dx, dgate;   /* (T, c) act: the results; dx may be dy */
};

/* The LM head with log-softmax. All logits (rows, vocabulary) are stored at most where the caller has room for them.
 * z = (x . W^T, with w's softcap) * inv_temp; p = softmax(z). */
enum { DEV_KEPT_ROWS = 128, DEV_KEPT_COLS = 256 };
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
    /* Kept logits, optional, not with lists: (K, C) f32, raw logits of K rows in the backend's order; K a multiple of
     * DEV_KEPT_ROWS, C the vocabulary rounded up to one of DEV_KEPT_COLS. This call's first row is row kept_at there, which may be
     * K or more. The forward, whose kept_at is a multiple of DEV_KEPT_ROWS, writes those of its rows that have a place; a backward
     * of some of these rows reads them, and makes the others again: the same bits. */
    struct tensor kept;
    int64_t kept_at;
};
/* K rows of a head of so many entries have places for so many columns. */
static inline int64_t dev_kept_cols(int64_t vocab) { return (vocab + DEV_KEPT_COLS - 1) / DEV_KEPT_COLS * DEV_KEPT_COLS; }
/* How many of n rows, the first of which is the call's row `row`, have a place. */
static inline int64_t dev_kept_rows(const struct lmhead_args *a, int64_t row, int64_t n) {
    const int64_t left = a->kept.data ? a->kept.dim[0] - a->kept_at - row : 0;
    return left < 0 ? 0 : left < n ? left : n;
}

/* Gradients of struct lmhead_args, whose lse (and entropy, when dentropy is given) are the forward's. */
struct lmhead_bwd_args {
    struct tensor dlogp;    /* (R) f32, given */
    struct tensor dentropy; /* (R) f32, given; optional */
    struct tensor dx;       /* (R, h) act: the result */
    struct tensor dw;       /* (V, h) f32: the result; optional */
    bool add;               /* dw += */
};

/* One row's sampling parameters. Order: repetition penalty (a positive logit is divided
 * by it, a negative one multiplied), temperature, top-k, then top-p on the
 * renormalised rest (the shortest run of the most probable whose sum reaches
 * top_p), then min-p (times the largest probability).  Equal entries rank by id,
 * lowest first, so top-k keeps exactly k.  The largest entry is always kept. */
struct sample_param {
    float inv_temp;           /* 1/T, times what logits are multiplied by; greedy: that alone */
    float top_p, min_p;       /* 1 and 0: off */
    float repetition_penalty; /* 1: off */
    float u;                  /* uniform in [0, 1): inverse CDF over the kept entries in id order */
    int32_t top_k;            /* <= 0: off */
    int32_t greedy;           /* argmax, lowest id on ties */
};

struct sample_args {
    struct tensor logits;             /* (R, V) f32, raw, as dev_logits wrote them */
    const struct sample_param *param; /* (R), host memory */
    struct tensor seen;               /* (R, ceil(V/8)) u8 bit set of ids that the penalty applies to; optional */
    struct tensor id;                 /* (R) i32 */
    struct tensor logp;               /* (R) f32: full softmax at T: bits equal to dev_lmhead_fwd's logp */
    struct tensor logp_kept;          /* (R) f32, optional: after penalty and truncation; 0 when greedy */
};

/* One row of a decoding loop on the device: its sampling parameters, the address of its
 * randomness (base/rng.h) and how many tokens it may still draw. */
struct decode_row {
    struct sample_param rule; /* u is not read: it is rng_token(seed, uid, sample, at) */
    uint32_t sample, at;      /* index of the sample; place of the token to draw in its response */
    uint64_t seed, uid;
    int32_t left; /* tokens it may still draw; 0: the row idles */
    int32_t unused;
};

/* The end of one step of that loop: logits, unless they are there, sampling, results, inputs of the next step. */
struct decode_args {
    struct tensor x;      /* (R, h) act: the last states; TENSOR_NONE: the logits are given */
    struct weight w;      /* (V, h) act: the head; with x */
    struct tensor logits; /* (R, V) f32: raw, as dev_logits writes them */
    struct tensor rows;   /* (R, sizeof(struct decode_row)) u8, updated */
    struct tensor stop;   /* (R, S) i32, optional: tokens that end the row, -1 fills up */
    int64_t block_len;
    struct tensor block_table;     /* (R, max_blocks) i32 */
    struct tensor ids, pos, slots; /* (R) i32: inputs of this step's forward -> of the next one's */
    struct tensor step;            /* (1) i32: which row of the results is written; counts up */
    struct tensor id;              /* (steps, R) i32 */
    struct tensor logp, logp_kept; /* (steps, R) f32 */
};

/* A block of one matrix added to a block of another (LoRA): dst[dst_row + i][dst_col + j] += scale * src[...]. Of stacks (experts)
 * the same block of `count` pairs of matrices. */
struct add_block_args {
    struct tensor dst, src; /* (R, C), (R', C') f32, different memory; of stacks the first matrices */
    int64_t dst_row, dst_col, src_row, src_col, rows, cols;
    float scale;                       /* product and sum are rounded one by one */
    int64_t count, dst_next, src_next; /* 0: one pair; above 1: the next matrices are so many elements further */
};

/* A frozen matrix in 4 or 8 bits, dequantized to act before its GEMM.
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

/* The other optimizers that divide by a mean of squares, over flat f32 arrays of equal length. m, v and x are means over steps;
 * one that is absent (data NULL) is not kept. */
enum adaptive_rule {
    ADAPTIVE_ADAM,    /* Adam, AdamW; x: the largest v so far (amsgrad) */
    ADAPTIVE_RADAM,   /* Adam without its division while the variance of v is not known */
    ADAPTIVE_RMSPROP, /* m: momentum beta1 of the update; x: mean gradient, whose square v is taken less (centered) */
};
struct adaptive_args {
    enum adaptive_rule rule;
    struct tensor p, m, v, x, g;
    double lr, beta1, beta2, eps, weight_decay;
    bool coupled;     /* weight decay is added to the gradient (L2), else to the update */
    float grad_scale; /* multiplies g; below 0: the objective is maximized */
    int64_t step;     /* 1-based */
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
    size_t driver_bytes; /* device memory that the driver takes in addition: kernels' code, graphs (measured) */
};

/* The largest sizes of a run, from which a backend sizes its scratch memory. */
struct dev_sizes {
    enum dtype act;
    int64_t rows;                    /* of one forward, training or generating */
    int64_t train_rows;              /* of one backward; 0: none */
    int64_t decode;                  /* rows of one decoding step */
    int64_t hidden, ffn, qkv, vocab; /* qkv: (Hq + 2 Hk) * D columns */
    int64_t n_q_heads, head_dim;
    int64_t conv, delta_heads; /* of gated delta nets: columns of the convolution, value heads; 0: none */
};

/* Device memory in addition to that of dev_alloc, in bytes. */
struct dev_memory {
    size_t working;   /* held by the backend: scratch, memory for autotuning */
    size_t system;    /* taken by the driver since the device was opened: kernels' code, CUDA graphs; 0: not known, as on a
                         device that ranks share */
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
    /* scratch memory of the ops, not of alloc; NULL: next to none, nothing to reserve, not counted */
    size_t (*working_bytes)(struct dev *d, const struct dev_sizes *s);
    int (*reserve)(struct dev *d, const struct dev_sizes *s);
    int (*memory)(struct dev *d, struct dev_memory *out);
    /* pinned host memory and the copy streams; NULL without caps.own_memory */
    int (*host_alloc)(struct dev *d, size_t bytes, void **out);
    void (*host_free)(struct dev *d, void *p, size_t bytes);
    int (*host_register)(struct dev *d, void *p, size_t bytes);
    void (*host_unregister)(struct dev *d, void *p);
    int (*fetch)(struct dev *d, int stream, void *dst_dev, const void *src_host, size_t bytes);
    int (*evict)(struct dev *d, int stream, void *dst_host, const void *src_dev, size_t bytes);
    int (*copy_stream_wait)(struct dev *d, int stream);
    int (*copy_stream_sync)(struct dev *d, int stream);

    /* weights */
    size_t (*weight_bytes)(struct dev *d, enum dtype dt, int64_t n, int64_t k);
    bool (*keeps_logits)(struct dev *d, struct weight w); /* dev_keeps_logits; NULL: never */
    int (*decode_next)(struct dev *d, const struct decode_args *a);
#define OP(name, ...) int (*name)(struct dev * d, __VA_ARGS__);
#define OP_FUSED OP
#include "device/ops.def"

    /* CUDA graphs; NULL without caps.graphs */
    int (*graph_begin)(struct dev *d);
    int (*graph_end)(struct dev *d, void **graph);
    int (*graph_run)(struct dev *d, void *graph);
    void (*graph_free)(struct dev *d, void *graph);

    /* Timestamps of the compute stream; NULL where every op waits. stamp_us: microseconds from stamp 0,
     * after a sync. */
    int (*stamp)(struct dev *d, int64_t i);
    int (*stamp_us)(struct dev *d, int64_t i, double *us);

    /* Memory of other processes of this host (device/collective/peers.h); NULL: it reads none. */
    const struct dev_peer_ops *peers;
    /* Other processes' devices by NCCL (device/collective/transport.h); NULL: not of this backend. */
    const struct dev_nccl_ops *nccl;
};

#ifdef __cplusplus
}
#endif
#endif
