/* dev_cuda_plan.cu - how much device memory the backend needs for its ops in a run of given
 * sizes, and taking it before the run.
 *
 * One bound for each scratch slot, over the ops that use it.  A slot that an op outgrows grows
 * all the same: that is counted (struct dev_memory), and tests/inv holds the count still.
 * Invariant: cuda_working_bytes counts what cuda_reserve takes. */
#include "dev/dev_cuda_gemm.cuh"
#include "dev/dev_cuda_head.cuh"

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

/* Bytes of each slot. */
static void slot_sizes(struct cuda *c, const struct dev_sizes *s, size_t bytes[CUDA_N_SLOTS]) {
    enum { HEAD_BLOCK = 8192, HEAD_COLS = 9600 /* dev_cuda_head.cu */, SUM_BLOCKS = 1024, BAND = 256, TWO_PASS = 1024 };
    const int64_t in = (int64_t)dtype_size(s->act), chunks = head_chunks(s->vocab);
    const int64_t widest = max64(2 * s->ffn, max64(s->qkv, s->hidden)), head_rows = min64(s->rows, HEAD_BLOCK);
    const int64_t logits = head_rows * min64(s->vocab, HEAD_COLS);
    for (int i = 0; i < CUDA_N_SLOTS; i++) bytes[i] = 0;
    /* sums that go through f32, and column sums of a bias's gradient */
    bytes[CUDA_SLOT_GEMM] = (size_t)max64(min64(s->rows, TWO_PASS), gemm_ceil_div(s->rows, BAND)) * (size_t)widest * sizeof(float);
    const size_t head_room = (size_t)max64(logits * (4 + in), head_tiles(s->vocab) * head_rows * (int64_t)sizeof(head_sum));
    const size_t head = head_room + (size_t)(chunks * head_rows) * sizeof(head_sum) + (size_t)head_rows * 4 +
                        (s->train ? (size_t)(head_rows * s->hidden) * sizeof(float) : 0);
    const size_t tried = s->act == DT_BF16 ? cuda_head_try_bytes(s->hidden, s->vocab) : 0;
    bytes[CUDA_SLOT_HEAD] = head > tried ? head : tried;
    bytes[CUDA_SLOT_HEAD2] = (size_t)s->decode * sizeof(struct sample_param);
    /* two numbers a row and head, and a flag for each tile of keys of each head */
    const int64_t row_heads = s->rows * s->n_q_heads;
    bytes[CUDA_SLOT_ATTN] = s->train ? (size_t)row_heads * (sizeof(float2) + 2 * sizeof(int)) : 0;
    const int64_t per_block = max64(s->hidden, 2 * s->head_dim) * 4;
    bytes[CUDA_SLOT_ROW] = (size_t)max64((int64_t)c->n_sm * 6 * per_block, max64(s->rows, SUM_BLOCKS * 8));
    /* of a row: sums of its chunks, twice, and four numbers of each group of entries */
    const int64_t groups = (s->vocab + HEAD_GROUP - 1) / HEAD_GROUP;
    bytes[CUDA_SLOT_SAMPLE] = (size_t)s->decode * (size_t)(2 * chunks * (int64_t)sizeof(head_sum) + 4 * groups * 4) + 8 * 256;
    bytes[CUDA_SLOT_DECODE] = (size_t)s->decode * (sizeof(struct sample_param) + 3 * 4) + 4 * 256;
    const int64_t layer = max64(widest, min64(s->vocab, DEV_VOCAB_CHUNK)) * s->hidden * in;
    bytes[CUDA_SLOT_TUNE] = cuda_gemm_tune_bytes(c, layer, s->vocab * s->hidden * in, s->hidden * in + 12 * s->vocab, s->decode);
}

/* The unit in which scratch grows, and the driver's of a block of that size. */
static size_t rounded(size_t bytes) { return (bytes + ((size_t)2 << 20) - 1) & ~(((size_t)2 << 20) - 1); }

size_t cuda_working_bytes(struct dev *d, const struct dev_sizes *s) {
    size_t bytes[CUDA_N_SLOTS], sum = GEMM_WORK_BYTES;
    slot_sizes(cuda_of(d), s, bytes);
    for (int i = 0; i < CUDA_N_SLOTS; i++) sum += rounded(bytes[i]);
    return sum;
}

int cuda_reserve(struct dev *d, const struct dev_sizes *s) {
    size_t bytes[CUDA_N_SLOTS];
    void *p;
    slot_sizes(cuda_of(d), s, bytes);
    for (int i = 0; i < CUDA_N_SLOTS; i++)
        if (bytes[i]) TRY(cuda_scratch(cuda_of(d), (enum cuda_slot)i, rounded(bytes[i]), &p));
    return 0;
}
