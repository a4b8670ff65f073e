/* grouped.cu - of the files around the grouped GEMMs (gemm_fallback.cu, gemm_autotune.cu, elementwise.cu) what these need, in C. */
#include "device/cuda/gemm/gemm.cuh"

static float value(const void *p, enum dtype dt, int64_t i) {
    return dt == DT_F32 ? ((const float *)p)[i] : __bfloat162float(((const __nv_bfloat16 *)p)[i]);
}

int gemm_grouped_fallback(struct cuda *, const struct gemm_grouped *g) {
    const bool fwd = g->op == CUDA_GEMM_FWD, dw = g->op == CUDA_GEMM_DW;
    for (int64_t e = 0; e < g->experts; e++) {
        const int64_t lo = g->offset[e], hi = g->offset[e + 1], rows = dw ? g->n : hi - lo, cols = fwd ? g->n : g->k;
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < cols; j++) {
                float sum = 0;
                for (int64_t r = 0; r < (fwd ? g->k : dw ? hi - lo : g->n); r++) {
                    const float a = value(g->a, g->in, dw ? (lo + r) * g->n + i : (lo + i) * (fwd ? g->k : g->n) + r);
                    const int64_t w = e * g->n * g->k;
                    sum += a * value(g->b, g->in, fwd ? w + j * g->k + r : dw ? (lo + r) * g->k + j : w + r * g->k + j);
                }
                const int64_t at = ((dw ? e * g->n : lo) + i) * cols + j;
                if (g->out_dt == DT_BF16) ((__nv_bfloat16 *)g->out)[at] = __float2bfloat16_rn(sum);
                else ((float *)g->out)[at] = g->add ? ((float *)g->out)[at] + sum : sum;
            }
    }
    return 0;
}

int gemm_fill_test_values(struct cuda *, struct tensor dst, unsigned seed, int, float scale) {
    uint32_t s = seed * 2654435761u + 12345;
    for (int64_t i = 0; i < tensor_count(dst); i++) {
        s = s * 1664525u + 1013904223u;
        ((__nv_bfloat16 *)dst.data)[i] = __float2bfloat16_rn(((float)(s >> 8) * 0x1p-23f - 1.0f) * scale);
    }
    return 0;
}
/* Kernels that differ would not be used from then on, and no test fail. */
int gemm_compare(struct cuda *, const void *x, const void *y, size_t bytes, int *) {
    if (memcmp(x, y, bytes) == 0) return 0;
    fprintf(stderr, "grouped GEMMs: two kernels differ in their bits\n");
    abort();
}

int cuda_gather_rows(struct dev *, struct tensor dst, struct tensor src, struct tensor idx) {
    const size_t row = (size_t)src.dim[1] * dtype_size(src.dt);
    for (int64_t i = 0; i < dst.dim[0]; i++)
        memcpy((char *)dst.data + (size_t)i * row, (const char *)src.data + (size_t)((const int32_t *)idx.data)[i] * row, row);
    return 0;
}
/* Of moe.cu's router, which is not run here. */
int cuda_score_route_fwd(struct dev *, const struct route_args *) { return ERR_UNSUPPORTED; }
int cuda_score_route_bwd(struct dev *, const struct route_args *, struct tensor, struct tensor) { return ERR_UNSUPPORTED; }
