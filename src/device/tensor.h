/* tensor.h - views of arrays on a device: dtypes, tensors, packed weights, the KV cache of a layer. */
#ifndef VERLC_DEVICE_TENSOR_H
#define VERLC_DEVICE_TENSOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum dtype { DT_F32, DT_BF16, DT_F16, DT_F64, DT_I32, DT_I64, DT_U8, DT_E4M3 /* of files alone */ };
size_t dtype_size(enum dtype dt);
const char *dtype_name(enum dtype dt); /* "f32", "bf16", ... */

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
    float softcap; /* of a head, above 0: a logit l is softcap * tanh(l / softcap), raw as it is written; 0: l */
    int64_t of;    /* n of the matrix that these are some rows of, and whose bits products with it shall have; 0: they are all */
};

/* Matrices of one shape, each in the backend's layout, the next one dev_weight_bytes further: the experts of a layer. */
struct weight_stack {
    struct weight w; /* the first */
    int64_t count;
};

/* KV cache of one layer: blocks of block_len tokens, k and v (n_kv_blocks, n_kv_heads, block_len, head_dim) act.
 * Slot s is row s % block_len of block s / block_len.  The rollout's pool has many blocks of 16 tokens;
 * packed training has one block as long as the batch. */
struct kv {
    struct tensor k, v;
};

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
