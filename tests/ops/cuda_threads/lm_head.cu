/* lm_head.cu - the LM head of this device: logits by plain sums, where a warpgroup's MMA would have them, kept and read by the
 * functions of Hopper's kernels (src/device/cuda/lm_head/kept_logits.cuh); all else in loops of the host. */
#include "device/cuda/lm_head/kept_logits.cuh"

#include <vector>

static float of_bf16(struct tensor t, int64_t i) { return __uint_as_float((uint32_t)((const uint16_t *)t.data)[i] << 16); }
static float logit(const struct lmhead_args *a, int64_t row, int64_t col) {
    const struct tensor w = tensor_2d(a->w.data, DT_BF16, a->w.n, a->w.k);
    double sum = 0;
    if (row >= a->x.dim[0] || col >= a->w.n) return 0;
    for (int64_t k = 0; k < a->w.k; k++) sum += (double)of_bf16(a->x, row * a->w.k + k) * (double)of_bf16(w, col * a->w.k + k);
    return (float)sum;
}
/* Of the warp's 16 rows from `row` on, and the tile of column col. */
static void accumulate(const struct lmhead_args *a, float (&z)[32][4], int64_t row, int64_t col) {
    const int lane = (int)threadIdx.x % 32;
    for (int n = 0; n < 32; n++)
        for (int e = 0; e < 4; e++) z[n][e] = logit(a, row + lane / 4 + e / 2 * 8, col + 8 * n + 2 * (lane % 4) + e % 2);
}

/* Block (x, y): a tile of columns and of rows, as in the kernels; a warp for each 16 rows. */
static void keep_kernel(const struct lmhead_args *a) {
    const int64_t row = (int64_t)blockIdx.y * DEV_KEPT_ROWS + threadIdx.x / 32 * 16, col = (int64_t)blockIdx.x * DEV_KEPT_COLS;
    float z[32][4];
    if (a->kept_at + row >= a->kept.dim[0]) return;
    accumulate(a, z, row, col);
    kept_store((float4 *)a->kept.data + kept_index(a->kept_at + row, col, a->kept.dim[1] / DEV_KEPT_COLS), z);
}
struct again_job {
    const struct lmhead_args *a;
    struct head_block b;
    struct dz_rows rows;
    __nv_bfloat16 *dz;
};
template <bool ENTROPY> static void again_kernel(const struct again_job j) {
    const int64_t row = (int64_t)blockIdx.y * DEV_KEPT_ROWS + threadIdx.x / 32 * 16, col = (int64_t)blockIdx.x * DEV_KEPT_COLS;
    const int lane = (int)threadIdx.x % 32;
    const struct dz_row r[2] = {read_row(j.rows, row + lane / 4), read_row(j.rows, row + lane / 4 + 8)};
    float z[32][4];
    accumulate(j.a, z, j.b.row + row, j.b.lo + col);
    gradients<ENTROPY>(z, r, col);
    for (int n = 0; n < 32; n++)
        for (int e = 0; e < 4; e++) {
            const int64_t at = row + lane / 4 + e / 2 * 8, c = col + 8 * n + 2 * (lane % 4) + e % 2;
            if (at < j.b.rows && c < j.b.cols) j.dz[at * j.b.cols + c] = __float2bfloat16_rn(z[n][e]);
        }
}
static dim3 tiles(int64_t rows, int64_t cols) {
    return dim3((unsigned)((cols + DEV_KEPT_COLS - 1) / DEV_KEPT_COLS), (unsigned)((rows + DEV_KEPT_ROWS - 1) / DEV_KEPT_ROWS));
}

bool cuda_keeps_logits(struct dev *, struct weight w) { return w.dt == DT_BF16 && w.n % 8 == 0 && w.softcap == 0; }

int cuda_lmhead_fwd(struct dev *d, const struct lmhead_args *a) {
    const int64_t rows = a->x.dim[0];
    if (a->kept.data) CU_TRY(cuda_launch_plain(cuda_of(d), keep_kernel, tiles(rows, a->w.n), 2 * DEV_KEPT_ROWS, 0, a));
    for (int64_t i = 0; i < rows; i++) {
        const double by = (double)((const float *)a->inv_temp.data)[i];
        double sum = 0, sum_z = 0;
        for (int64_t j = 0; j < a->w.n; j++) {
            const double z = (double)logit(a, i, j) * by;
            sum += exp(z), sum_z += exp(z) * z;
        }
        ((float *)a->lse.data)[i] = (float)log(sum);
        ((float *)a->logp.data)[i] = (float)((double)logit(a, i, ((const int32_t *)a->target.data)[i]) * by - log(sum));
        if (a->entropy.data) ((float *)a->entropy.data)[i] = (float)(log(sum) - sum_z / sum);
    }
    return 0;
}

int cuda_lmhead_bwd(struct dev *d, const struct lmhead_args *a, const struct lmhead_bwd_args *g) {
    enum { COLS = 2 * DEV_KEPT_COLS };
    struct cuda *c = cuda_of(d);
    const int64_t rows = a->x.dim[0], k = a->w.k, kept = dev_kept_rows(a, 0, rows);
    const struct tensor w = tensor_2d(a->w.data, DT_BF16, a->w.n, k);
    std::vector<float> dx((size_t)(rows * k));
    float *const dw = (float *)g->dw.data;
    for (int64_t lo = 0; lo < a->w.n; lo += COLS) {
        const int64_t cols = a->w.n - lo < COLS ? a->w.n - lo : COLS;
        char *const dz = (char *)aligned_alloc(16, (size_t)(rows * cols) * 2);
        if (kept > 0) TRY(cuda_head_kept_dz(c, a, g, {0, kept, lo, cols}, dz));
        const struct head_block b = {kept, rows - kept, lo, cols};
        const struct again_job j = {a, b, dz_rows_of(a, g, b), (__nv_bfloat16 *)(dz + kept * cols * 2)};
        const auto kernel = g->dentropy.data ? again_kernel<true> : again_kernel<false>;
        if (kept < rows) CU_TRY(cuda_launch_plain(c, kernel, tiles(b.rows, cols), 2 * DEV_KEPT_ROWS, 0, j));
        const struct tensor t = tensor_2d(dz, DT_BF16, rows, cols);
        for (int64_t i = 0; i < k; i++) {
            for (int64_t v = 0; v < cols; v++) {
                float sum = 0;
                for (int64_t r = 0; r < rows; r++) sum += of_bf16(t, r * cols + v) * of_bf16(a->x, r * k + i);
                float *const to = dw + (lo + v) * k + i;
                *to = g->add ? *to + sum : sum;
            }
            for (int64_t r = 0; r < rows; r++)
                for (int64_t v = 0; v < cols; v++)
                    dx[(size_t)(r * k + i)] += of_bf16(t, r * cols + v) * of_bf16(w, (lo + v) * k + i);
        }
        free(dz);
    }
    for (size_t i = 0; i < dx.size(); i++) ((__nv_bfloat16 *)g->dx.data)[i] = __float2bfloat16_rn(dx[i]);
    return 0;
}
