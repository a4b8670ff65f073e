/* scratch_sizes.h - how much device memory the CUDA backend takes in addition to all allocations for a run of
 * given sizes, as plain arithmetic: the backend reserves by it, and `verlc plan` counts by it for a GPU
 * that is not there.  For C and CUDA C.
 *
 * The limits that bound a kernel's scratch are defined here and nowhere else; the kernels read them.
 * One bound for each scratch buffer, over the ops that use it. */
#ifndef VERLC_DEVICE_CUDA_SCRATCH_SIZES_H
#define VERLC_DEVICE_CUDA_SCRATCH_SIZES_H

#include "device/device.h"

/* Scratch buffers that grow and stay. One op at a time uses a buffer: the stream orders them. */
enum cuda_scratch_id {
    CUDA_SCRATCH_GEMM,
    CUDA_SCRATCH_HEAD,
    CUDA_SCRATCH_SAMPLE_PARAM,
    CUDA_SCRATCH_ATTN,
    CUDA_SCRATCH_ROW,
    CUDA_SCRATCH_SAMPLE,
    CUDA_SCRATCH_DECODE,
    CUDA_SCRATCH_AUTOTUNE,
    CUDA_N_SCRATCH
};

enum {                               /* GEMM */
       GEMM_N_BUCKETS = 22,          /* buckets of M for which a GEMM is autotuned: gemm_bucket_top */
       GEMM_TRIAL_BYTES = 320 << 20, /* activations of an autotuned GEMM; the weight comes on top */
       CUDA_TWO_PASS_ROWS = 1024,    /* rows at a time of a GEMM whose f32 sums go through scratch */
       CUDA_COLSUM_ROWS = 256,       /* rows of one partial column sum (a bias's gradient) */
       /* LM head and sampler */
       CUDA_HEAD_ROWS = 8192,                 /* rows of a block of logits */
       CUDA_HEAD_BWD_COLS = 9600,             /* vocabulary entries of a block of logits in the backward; the widest block */
       CUDA_HEAD_DZ_COLS = 19200,             /* the same where logits are not stored */
       CUDA_HEAD_TILE = 256,                  /* entries whose softmax statistics are one struct head_stats */
       CUDA_HEAD_GROUP = DEV_VOCAB_CHUNK / 8, /* entries of a chunk that one warp holds */
       /* row ops */
       CUDA_NORM_BLOCKS = 8, /* blocks a multiprocessor of a norm's backward, at most */
};
#define GEMM_SPLIT_TRIAL_BYTES ((size_t)9 << 28) /* as GEMM_TRIAL_BYTES, of a column-split GEMM: logits of 1281 rows and more fit */

/* Softmax statistics of some logits of a row: sum e, sum e (z - max), sum e^2, with e = exp(z - max). */
struct head_stats {
    float max, sum, sum_t, sum_sq;
};

/* What the sizes depend on of the GPU itself. head_check: bytes in which the two ways to the head's statistics are compared
 * at start; 0 where nobody can ask: from about a thousand rows on the buffer is larger in any case. */
struct cuda_shape {
    int64_t n_sm;
    size_t l2_bytes, head_check;
};

/* The largest M of a bucket, at which its GEMMs are timed. Buckets are narrow at the M of decoding, where the fastest kernel
 * depends on how many tiles there are for how many multiprocessors. */
static inline int64_t gemm_bucket_top(int bucket) {
    static const int64_t top[GEMM_N_BUCKETS] = {1,   8,   16,   32,   64,   80,   96,   128,   192,   256,   384,
                                                512, 768, 1024, 1280, 2048, 4096, 8192, 16384, 32768, 65536, 131072};
    return top[bucket];
}
static inline int gemm_bucket(int64_t m) {
    int b = 0;
    while (b < GEMM_N_BUCKETS - 1 && m > gemm_bucket_top(b)) b++;
    return b;
}

static inline int64_t cuda_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t cuda_max(int64_t a, int64_t b) { return a > b ? a : b; }

/* For autotuning: a GEMM with a weight of so many bytes, or the head's column-split GEMM with the logits of `decode` rows
 * (per_row: bytes of a row of logits, input and statistics); a buffer that flushes the L2 cache between two timings; padding. */
static inline size_t cuda_autotune_bytes(const struct cuda_shape *gpu, int64_t weight, int64_t head, int64_t per_row,
                                         int64_t decode) {
    const size_t rows = (size_t)gemm_bucket_top(gemm_bucket(decode)) * (size_t)per_row;
    const size_t split = rows < GEMM_SPLIT_TRIAL_BYTES ? rows : GEMM_SPLIT_TRIAL_BYTES;
    const size_t whole = GEMM_TRIAL_BYTES + (size_t)weight, logits = split + (size_t)head;
    return 2 * gpu->l2_bytes + (whole > logits ? whole : logits) + ((size_t)2 << 20);
}

/* Bytes of each buffer. */
static inline void cuda_scratch_sizes(const struct cuda_shape *gpu, const struct dev_sizes *s, size_t bytes[CUDA_N_SCRATCH]) {
    const int64_t in = (int64_t)dtype_size(s->act), chunks = (s->vocab + DEV_VOCAB_CHUNK - 1) / DEV_VOCAB_CHUNK;
    const int64_t widest = cuda_max(2 * s->ffn, cuda_max(s->qkv, s->hidden)), head_rows = cuda_min(s->rows, CUDA_HEAD_ROWS);
    const int64_t logits = head_rows * cuda_min(s->vocab, CUDA_HEAD_BWD_COLS), sum = (int64_t)sizeof(struct head_stats);
    const int64_t tiles = (s->vocab + CUDA_HEAD_TILE - 1) / CUDA_HEAD_TILE;
    for (int i = 0; i < CUDA_N_SCRATCH; i++) bytes[i] = 0;
    /* f32 sums of a two-pass GEMM, and partial column sums */
    const int64_t bands = (s->rows + CUDA_COLSUM_ROWS - 1) / CUDA_COLSUM_ROWS;
    bytes[CUDA_SCRATCH_GEMM] = (size_t)cuda_max(cuda_min(s->rows, CUDA_TWO_PASS_ROWS), bands) * (size_t)widest * 4;
    /* logits and their gradient, or statistics of tiles; statistics of chunks, targets' logits; in f32 dx of all rows, and where
     * they are more than one block, some entries of dw */
    const int64_t dw = s->train_rows > CUDA_HEAD_ROWS ? cuda_min(s->vocab, CUDA_HEAD_DZ_COLS) * s->hidden * 4 : 0;
    const size_t head = (size_t)cuda_max(logits * (4 + in), tiles * head_rows * sum) + (size_t)(chunks * head_rows * sum) +
                        (size_t)head_rows * 4 + (s->train_rows ? (size_t)(s->train_rows * s->hidden * 4 + dw) + 768 : 0);
    bytes[CUDA_SCRATCH_HEAD] = head > gpu->head_check ? head : gpu->head_check;
    bytes[CUDA_SCRATCH_SAMPLE_PARAM] = (size_t)s->decode * sizeof(struct sample_param);
    /* backward: two statistics of each row and head, and a semaphore for each tile of keys of each head */
    bytes[CUDA_SCRATCH_ATTN] = (size_t)(s->train_rows * s->n_q_heads) * (2 * sizeof(float) + 2 * sizeof(int));
    /* partial sums of norms' gradients; two numbers of each token id */
    const int64_t per_block = cuda_max(s->hidden, 2 * s->head_dim) * 4, ids = s->train_rows ? s->vocab * 8 : 0;
    bytes[CUDA_SCRATCH_ROW] = (size_t)cuda_max(gpu->n_sm * CUDA_NORM_BLOCKS * per_block, ids);
    /* gated delta nets' backward: a block's sums of the convolution's gradient, a sequence's of the gates' */
    const int64_t conv = gpu->n_sm * s->conv * DEV_CONV_TAPS * 4, gates = s->train_rows * 2 * s->delta_heads * 4;
    if (s->train_rows && (size_t)cuda_max(conv, gates) > bytes[CUDA_SCRATCH_ROW])
        bytes[CUDA_SCRATCH_ROW] = (size_t)cuda_max(conv, gates);
    /* a row: statistics of its chunks, twice, and four numbers of each group of entries */
    const int64_t groups = (s->vocab + CUDA_HEAD_GROUP - 1) / CUDA_HEAD_GROUP;
    bytes[CUDA_SCRATCH_SAMPLE] = (size_t)s->decode * (size_t)(2 * chunks * sum + 4 * groups * 4) + 8 * 256;
    /* a row: its sampling parameters, four numbers, statistics of its tiles */
    bytes[CUDA_SCRATCH_DECODE] = (size_t)s->decode * (sizeof(struct sample_param) + 4 * 4 + (size_t)(tiles * sum)) + 6 * 256;
    const int64_t layer = cuda_max(widest, cuda_min(s->vocab, DEV_VOCAB_CHUNK)) * s->hidden * in;
    bytes[CUDA_SCRATCH_AUTOTUNE] =
        cuda_autotune_bytes(gpu, layer, s->vocab * s->hidden * in, s->hidden * in + 12 * s->vocab, s->decode);
}

/* A group's ranks that read each other's memory: the two halves of the buffer that peers' bytes are copied to; flags, and the slots
 * of gathers in CUDA graphs, in a block of the driver's own, since what is exported has no neighbours then; ids of rows and a table
 * of them, usually. */
enum { CUDA_PEER_HALF = 32 << 20, CUDA_PEER_FLAGS = 2 << 20, CUDA_PEER_ROWS = 4 << 20 };
enum { CUDA_GATHER_BLOCKS = 128, CUDA_GATHER_THREADS = 256, CUDA_GATHER_LINES = 4 }; /* lines of a round: gather_columns.cu */
enum { CUDA_GATHER_SLOTS = 2 * CUDA_GATHER_BLOCKS * CUDA_GATHER_THREADS * CUDA_GATHER_LINES * 16 };
static inline size_t cuda_peer_bytes(void) {
    return 2 * (size_t)CUDA_PEER_HALF + CUDA_PEER_FLAGS + CUDA_GATHER_SLOTS + CUDA_PEER_ROWS;
}

/* A group's ranks that send by NCCL: slots of two pieces to receive into and halves of slots to send from, as many as there are
 * other ranks; ids of rows and tables of them, usually. NCCL's own buffers by its source (2.28): 64 MiB for each direction of the
 * network, and to each GPU of the host 2 to 4 channels of 9.4 MiB; what it took is counted once it has it. */
enum {
    CUDA_NCCL_STAGING = 32 << 20,
    CUDA_NCCL_LEAST_SLOT = 512 << 10,
    CUDA_NCCL_IDS = 1 << 20,
    CUDA_NCCL_TABLE = 1 << 20,
    CUDA_NCCL_OWN = 448 << 20
};
static inline size_t cuda_nccl_slot(int size) {
    const size_t share = (size_t)CUDA_NCCL_STAGING / (size_t)(size > 1 ? size - 1 : 1) / 512 * 512;
    return share > (size_t)CUDA_NCCL_LEAST_SLOT ? share : (size_t)CUDA_NCCL_LEAST_SLOT;
}
static inline size_t cuda_nccl_staging(int size) {
    return (size_t)(size - 1) * (2 * cuda_nccl_slot(size) + cuda_nccl_slot(size) / 2);
}
static inline size_t cuda_nccl_bytes(int size) {
    return cuda_nccl_staging(size) + 2 * (size_t)CUDA_NCCL_IDS + 2 * (size_t)CUDA_NCCL_TABLE + CUDA_NCCL_OWN;
}

/* What the backend can do: of the backend itself and of a GPU that is only planned for. driver_bytes: at most this was
 * measured on an H200 with a model of 24 layers and some CUDA graphs. */
#define CUDA_CAPS \
    { true, true, true, (size_t)64 << 20 } /* own_memory, graphs, plain_weights, driver_bytes; also C++17 */

/* The unit in which scratch grows, and the driver's of a block of that size. */
static inline size_t cuda_scratch_round(size_t bytes) { return (bytes + ((size_t)2 << 20) - 1) & ~(((size_t)2 << 20) - 1); }

/* All of them. */
static inline size_t cuda_scratch_sum(const struct cuda_shape *gpu, const struct dev_sizes *s) {
    size_t bytes[CUDA_N_SCRATCH], sum = 0;
    cuda_scratch_sizes(gpu, s, bytes);
    for (int i = 0; i < CUDA_N_SCRATCH; i++) sum += cuda_scratch_round(bytes[i]);
    return sum;
}

#endif
