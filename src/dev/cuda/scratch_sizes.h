/* scratch_sizes.h - what the CUDA backend takes beside all blocks for a run of given sizes, as plain
 * arithmetic: the library reserves by it, and `verlc plan` counts by it for a GPU that is not there.
 *
 * One bound for each scratch slot, over the ops that use it. The sizes of what kernels put there
 * are checked where the kernels are (scratch_memory.cu).  For C and CUDA C. */
#ifndef VERLC_DEV_CUDA_SIZES_H
#define VERLC_DEV_CUDA_SIZES_H

#include "dev/dev.h"

/* Scratch that grows and stays; one slot is used by one op at a time (the stream orders them). */
enum cuda_slot {
    CUDA_SLOT_GEMM,
    CUDA_SLOT_HEAD,
    CUDA_SLOT_HEAD2,
    CUDA_SLOT_ATTN,
    CUDA_SLOT_ROW,
    CUDA_SLOT_SAMPLE,
    CUDA_SLOT_DECODE,
    CUDA_SLOT_TUNE,
    CUDA_N_SLOTS
};

enum {
    GEMM_WORK_BYTES = 32 << 20,   /* the library's workspace */
    GEMM_N_BUCKETS = 22,          /* classes of a product's rows, see gemm_bucket_top */
    GEMM_TRIAL_BYTES = 320 << 20, /* of the rows of a product that is tried; the weight comes on top */
    CUDA_HEAD_SUM = 16,           /* bytes of the sums of a chunk or of a tile of the vocabulary */
    CUDA_HEAD_TILE = 256,
    CUDA_HEAD_GROUP = DEV_VOCAB_CHUNK / 8 /* entries of a chunk that one warp holds */
};
#define GEMM_PARTS_BYTES ((size_t)9 << 28) /* as TRIAL_BYTES, of a product in parts: logits of 1281 rows and more fit */

/* What the sizes depend on of the GPU itself. head_try: bytes in which its two ways to the head's statistics are compared
 * at start; 0 where nobody can ask: from about a thousand rows on the slot is larger in any case. */
struct cuda_shape {
    int64_t n_sm;
    size_t l2_bytes, head_try;
};

/* The largest number of rows of a class, for which its products are timed: narrow ones where rows are those of a decoding step, as
 * what is the fastest hangs on how many tiles there are for how many multiprocessors. */
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

/* Where algorithms are chosen: a trial with a weight of so many bytes, and one in parts, that of the head with the
 * logits of `decode` rows (per_row: bytes of one and of what stands beside it); memory that empties the cache between
 * two timings; padding. */
static inline size_t cuda_tune_bytes(const struct cuda_shape *gpu, int64_t weight, int64_t head, int64_t per_row, int64_t decode) {
    const size_t rows = (size_t)gemm_bucket_top(gemm_bucket(decode)) * (size_t)per_row;
    const size_t parts = rows < GEMM_PARTS_BYTES ? rows : GEMM_PARTS_BYTES;
    const size_t whole = GEMM_TRIAL_BYTES + (size_t)weight, logits = parts + (size_t)head;
    return 2 * gpu->l2_bytes + (whole > logits ? whole : logits) + ((size_t)2 << 20);
}

/* Bytes of each slot. */
static inline void cuda_slot_bytes(const struct cuda_shape *gpu, const struct dev_sizes *s, size_t bytes[CUDA_N_SLOTS]) {
    enum { HEAD_BLOCK = 8192, HEAD_COLS = 9600 /* dev/cuda/lm_head/lm_head.cu */, SUM_BLOCKS = 1024, BAND = 256, TWO_PASS = 1024 };
    const int64_t in = (int64_t)dtype_size(s->act), chunks = (s->vocab + DEV_VOCAB_CHUNK - 1) / DEV_VOCAB_CHUNK;
    const int64_t widest = cuda_max(2 * s->ffn, cuda_max(s->qkv, s->hidden)), head_rows = cuda_min(s->rows, HEAD_BLOCK);
    const int64_t logits = head_rows * cuda_min(s->vocab, HEAD_COLS);
    for (int i = 0; i < CUDA_N_SLOTS; i++) bytes[i] = 0;
    /* sums that go through f32, and column sums of a bias's gradient */
    bytes[CUDA_SLOT_GEMM] = (size_t)cuda_max(cuda_min(s->rows, TWO_PASS), (s->rows + BAND - 1) / BAND) * (size_t)widest * 4;
    const int64_t tiles = (s->vocab + CUDA_HEAD_TILE - 1) / CUDA_HEAD_TILE * head_rows;
    const size_t head = (size_t)cuda_max(logits * (4 + in), tiles * CUDA_HEAD_SUM) + (size_t)(chunks * head_rows) * CUDA_HEAD_SUM +
                        (size_t)head_rows * 4 + (s->train ? (size_t)(head_rows * s->hidden) * 4 : 0);
    bytes[CUDA_SLOT_HEAD] = head > gpu->head_try ? head : gpu->head_try;
    bytes[CUDA_SLOT_HEAD2] = (size_t)s->decode * sizeof(struct sample_param);
    /* two numbers a row and head, and a flag for each tile of keys of each head */
    bytes[CUDA_SLOT_ATTN] = s->train ? (size_t)(s->rows * s->n_q_heads) * (2 * sizeof(float) + 2 * sizeof(int)) : 0;
    /* sums of blocks, of norms' gradients and of squares; two numbers an id */
    const int64_t per_block = cuda_max(s->hidden, 2 * s->head_dim) * 4, ids = s->train ? s->vocab * 8 : 0;
    bytes[CUDA_SLOT_ROW] = (size_t)cuda_max(gpu->n_sm * 8 * per_block, cuda_max(ids, SUM_BLOCKS * 8));
    /* of a row: sums of its chunks, twice, and four numbers of each group of entries */
    const int64_t groups = (s->vocab + CUDA_HEAD_GROUP - 1) / CUDA_HEAD_GROUP;
    bytes[CUDA_SLOT_SAMPLE] = (size_t)s->decode * (size_t)(2 * chunks * CUDA_HEAD_SUM + 4 * groups * 4) + 8 * 256;
    /* of a row: its rule, four numbers, statistics of its tiles */
    const size_t row_tiles = (size_t)((s->vocab + CUDA_HEAD_TILE - 1) / CUDA_HEAD_TILE) * CUDA_HEAD_SUM;
    bytes[CUDA_SLOT_DECODE] = (size_t)s->decode * (sizeof(struct sample_param) + 4 * 4 + row_tiles) + 6 * 256;
    const int64_t layer = cuda_max(widest, cuda_min(s->vocab, DEV_VOCAB_CHUNK)) * s->hidden * in;
    bytes[CUDA_SLOT_TUNE] = cuda_tune_bytes(gpu, layer, s->vocab * s->hidden * in, s->hidden * in + 12 * s->vocab, s->decode);
}

/* The unit in which scratch grows, and the driver's of a block of that size. */
static inline size_t cuda_slot_round(size_t bytes) { return (bytes + ((size_t)2 << 20) - 1) & ~(((size_t)2 << 20) - 1); }

/* All of them. */
static inline size_t cuda_sizes_sum(const struct cuda_shape *gpu, const struct dev_sizes *s) {
    size_t bytes[CUDA_N_SLOTS], sum = GEMM_WORK_BYTES;
    cuda_slot_bytes(gpu, s, bytes);
    for (int i = 0; i < CUDA_N_SLOTS; i++) sum += cuda_slot_round(bytes[i]);
    return sum;
}

#endif
