/* gemm.h - the GEMM micro-kernels of one instruction set, and the layout of packed operands.
 *
 * A GEMM is C (m, n) = sum over r of A(m, r) . B(r, n), the sum in ascending
 * r, f32.  Operands are packed into blocks whose format belongs to the kernels:
 *  - A: blocks of up to `max_rows` rows; within a block [r][rows] of f32,
 *    [r / 2][rows] of bf16 pairs, or [r / 32][16 or 32 rows] of 32 bf16 (AMX);
 *  - B: panels of 32 columns, [r][32] of f32 or the tiles of a packed bf16 weight.
 * r is padded to a multiple of 32 with zeros on both sides.
 *
 * Invariant: an element of C is the same chain of operations whatever the
 * block's number of rows; `load` continues a chain exactly, through f32. */
#ifndef VERLC_DEVICE_CPU_GEMM_H
#define VERLC_DEVICE_CPU_GEMM_H

#include "device/cpu/cpu_int.h"

/* Where a finished block goes. */
struct cpu_gemm_out {
    void *y;           /* element [0][0] of the block */
    int64_t ld;        /* elements from row to row */
    enum dtype dt;     /* DT_F32 or DT_BF16 */
    bool add;          /* f32: y += */
    const float *bias; /* (32), or NULL */
};

struct cpu_gemm_ops { /* for operands of one dtype */
    int max_rows;
    int64_t kc;     /* longest reduction of one cache block, a multiple of 32 */
    int64_t mc, nc; /* most blocks of rows, most panels, of one thread's unit of work */
    size_t a_bytes; /* of a packed A element */
    size_t b_bytes; /* of a packed B element; 0: b_fwd returns the weight itself */

    /* A block: src[i * ld + r], resp. src[r * ld + i]; rn valid r, the rest up to 32 zero. */
    void (*pack_a)(void *dst, const void *src, int64_t ld, int rows, int64_t rn);
    void (*pack_at)(void *dst, const void *src, int64_t ld, int rows, int64_t rn);
    /* B panel of r in [r0, r0 + rn) from a panel of a packed weight; may return the weight. */
    const void *(*b_fwd)(void *dst, const void *panel, int64_t r0, int64_t rn);
    /* B panel whose columns are inputs [k, k + 32) and whose r are outputs: `panels` weight
     * panels, with a stride of that many elements; src is the first one's block of those 32 inputs. */
    void (*b_dx)(void *dst, const void *src, int64_t stride, int64_t panels);
    /* B panel from rows: src[r * ld + j], j < cols <= 32. */
    void (*b_rows)(void *dst, const void *src, int64_t ld, int cols, int64_t rn);

    /* c [rows][32] f32, contiguous: (load ? c : 0) + A . B of the block. There is
     * room for max_rows; rows beyond `rows` may be overwritten. */
    void (*block)(int rows, int64_t rn, const void *a, const void *b, float *c, bool load);
    /* The same, load = false, with B a weight's panel streamed from memory. */
    void (*stream)(int rows, int64_t rn, const void *a, const void *panel, float *c);
    /* Two panels at once into two blocks, for rows <= two_rows; 0 and NULL: it has none. */
    int two_rows;
    void (*stream_two)(int rows, int64_t rn, const void *a, const void *panel, const void *panel2, float *c, float *c2);
    void (*store)(const struct cpu_gemm_out *o, int rows, int cols, const float *c);

    /* Weight panel from rows of f32 or bf16 (rows <= 32, k inputs, row stride ld). */
    void (*pack_w)(void *panel, const void *src, enum dtype dt, int64_t ld, int rows, int64_t k);
};

/* Kernels are compiled for each number of rows, and a switch picks one. CPU_ROWS_N(X): X(1) ... X(N), N at most 14;
 * CPU_PICK_ROWS(EACH), with X(R) defined as `case R: ...; return;`, ends a function of `rows`. */
#define CPU_ROWS_1(X) X(1)
#define CPU_ROWS_2(X) CPU_ROWS_1(X) X(2)
#define CPU_ROWS_4(X) CPU_ROWS_2(X) X(3) X(4)
#define CPU_ROWS_6(X) CPU_ROWS_4(X) X(5) X(6)
#define CPU_ROWS_14(X) CPU_ROWS_6(X) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14)
#define CPU_PICK_ROWS(EACH)   \
    switch (rows) { EACH(X) } \
    CHECK(!"rows of a block")

struct cpu_gemm_isa {
    const char *name;
    const struct cpu_gemm_ops *bf16, *f32;
    /* Bracket a thread's use of the kernels (AMX tile state); NULL: nothing to do. */
    void (*enter)(void), (*leave)(void);
};
static inline const struct cpu_gemm_ops *cpu_gemm_ops_of(const struct cpu *c, enum dtype dt) {
    return dt == DT_BF16 ? c->gemm->bf16 : c->gemm->f32;
}

extern const struct cpu_gemm_isa cpu_gemm_c;
#if defined(__x86_64__)
extern const struct cpu_gemm_isa cpu_gemm_avx2, cpu_gemm_avx512, cpu_gemm_avx512bf16, cpu_gemm_amx;
extern const struct cpu_gemm_ops cpu_gemm_avx512_f32; /* the wider sets multiply f32 with it too */
#endif
/* NULL: not built for this processor family. */
const struct cpu_gemm_isa *cpu_gemm_isa_of(enum cpu_isa_id id);

#endif
