/* heads_gemm.cu - the CUDA backend's products of heads with their own rows of a matrix: forward either way, and dw. One launch for
 * all heads, a head being blockIdx.z.
 *
 * bf16 whose rows and columns are multiples of 16 bytes goes to the tiles of mma_tile.cuh, all else to a thread an element.
 * Invariant: a row's bits do not depend on how many rows there are: an element is one sum in one order whatever the tile. */
#include "device/cuda/gemm/mma_tile.cuh"

enum { PLAIN_THREADS = 256 };

struct heads {
    const void *a, *b;
    void *out;
    int64_t m, n, r;                    /* of a head: out (m, n) = A B over r */
    int64_t a_head, b_head, out_head;   /* elements from one head to the next */
    int64_t a_m, a_r, b_n, b_r, ld_out; /* strides; one of each operand's is 1 */
    bool half, out_f32, add;
};

/* blockIdx (columns, rows, head). AT, BT: rows of the operand run along the result, not along the reduction. */
template <int BM, int BN, int WM, int WN, int STAGES, bool AT, bool BT>
static __global__ void __launch_bounds__(32 * WM * WN) heads_kernel(const struct heads g) {
    const int64_t row0 = (int64_t)blockIdx.y * BM, col0 = (int64_t)blockIdx.x * BN, out = (int64_t)blockIdx.z * g.out_head;
    pdl_launch_dependents();
    pdl_wait();
    struct tile t = {};
    t.a = (const bf16 *)g.a + blockIdx.z * g.a_head + row0 * g.a_m;
    t.b = (const bf16 *)g.b + blockIdx.z * g.b_head + col0 * g.b_n;
    t.lda = AT ? g.a_r : g.a_m;
    t.ldb = BT ? g.b_r : g.b_n;
    t.m = g.m - row0;
    t.n = g.n - col0;
    t.r = g.r;
    t.out_f32 = g.out_f32;
    t.add = g.add;
    t.ld_out = g.ld_out;
    const int64_t at = out + row0 * g.ld_out + col0;
    t.out = g.out_f32 ? (void *)((float *)g.out + at) : (void *)((bf16 *)g.out + at);
    tile_gemm<BM, BN, WM, WN, STAGES, AT, BT>(t);
}

static __device__ __forceinline__ float element(const void *p, bool half, int64_t i) {
    return half ? __bfloat162float(((const bf16 *)p)[i]) : ((const float *)p)[i];
}

static __global__ void __launch_bounds__(PLAIN_THREADS) heads_plain(const struct heads g) {
    const int64_t i = (int64_t)blockIdx.x * PLAIN_THREADS + threadIdx.x, row = i / g.n, col = i % g.n;
    pdl_launch_dependents();
    pdl_wait();
    if (row >= g.m) return;
    const int64_t a = (int64_t)blockIdx.z * g.a_head + row * g.a_m, b = (int64_t)blockIdx.z * g.b_head + col * g.b_n;
    const int64_t to = (int64_t)blockIdx.z * g.out_head + row * g.ld_out + col;
    float sum = 0;
    for (int64_t k = 0; k < g.r; k++)
        sum = __fmaf_rn(element(g.a, g.half, a + k * g.a_r), element(g.b, g.half, b + k * g.b_r), sum);
    if (g.add) sum = __fadd_rn(element(g.out, !g.out_f32, to), sum);
    if (g.out_f32) ((float *)g.out)[to] = sum;
    else ((bf16 *)g.out)[to] = __float2bfloat16_rn(sum);
}

/* ---- launch ---- */

template <int BM, int BN, int WM, int WN, int STAGES, bool AT, bool BT>
static int launch_tiles(struct cuda *c, const struct heads &g, int64_t n_heads) {
    const int bytes = STAGES * (BM + BN) * KC * 2;
    void (*const kernel)(struct heads) = heads_kernel<BM, BN, WM, WN, STAGES, AT, BT>;
    const int64_t rows = (g.m + BM - 1) / BM;
    if (rows > 65535) FAIL(ERR_UNSUPPORTED, "cuda: %lld rows of heads are too many for one call", (long long)g.m);
    CU_TRY(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    CU_TRY(cuda_launch_pdl(c, kernel, dim3((unsigned)((g.n + BN - 1) / BN), (unsigned)rows, (unsigned)n_heads), 32 * WM * WN,
                           (size_t)bytes, g));
    return 0;
}

static bool whole(int64_t n) { return n % 8 == 0; }
/* Whether all chunks of 8 elements that tiles copy are whole and aligned. */
static bool for_tiles(const struct heads &g) {
    return g.half && whole(g.m * (g.a_m == 1) + g.r * (g.a_r == 1 || g.b_r == 1)) && whole(g.n) && whole(g.a_m * g.a_r) &&
           whole(g.b_n * g.b_r) && whole(g.a_head) && whole(g.b_head) && whole(g.out_head) && whole(g.ld_out) &&
           (((uintptr_t)g.a | (uintptr_t)g.b | (uintptr_t)g.out) & 15) == 0;
}

static int launch_plain(struct cuda *c, const struct heads &g, int64_t n_heads) {
    const int64_t blocks = (g.m * g.n + PLAIN_THREADS - 1) / PLAIN_THREADS;
    if (blocks > INT32_MAX) FAIL(ERR_UNSUPPORTED, "cuda: %lld rows of heads are too many for one call", (long long)g.m);
    CU_TRY(cuda_launch_pdl(c, heads_plain, dim3((unsigned)blocks, 1, (unsigned)n_heads), PLAIN_THREADS, 0, g));
    return 0;
}

static const void *at(struct tensor t, int64_t i) { return (const char *)t.data + (size_t)i * dtype_size(t.dt); }

int cuda_heads_fwd(struct dev *d, const struct heads_args *a) {
    struct cuda *const c = cuda_of(d);
    const int64_t h = a->n_heads, k = a->w.k;
    struct heads g = {};
    g.a = at(a->x, a->x_at);
    g.b = (const char *)a->w.data + (size_t)(a->row * k) * dtype_size(a->w.dt);
    g.out = (void *)at(a->y, a->y_at);
    g.m = a->x.dim[0];
    g.n = a->transposed ? k : a->rows;
    g.r = a->transposed ? a->rows : k;
    g.a_head = a->x.dim[1] / h;
    g.b_head = a->w.n / h * k;
    g.out_head = a->y.dim[1] / h;
    g.a_m = a->x.dim[1];
    g.a_r = 1;
    g.b_n = a->transposed ? 1 : k;
    g.b_r = a->transposed ? k : 1;
    g.ld_out = a->y.dim[1];
    g.half = a->x.dt == DT_BF16;
    g.out_f32 = a->y.dt == DT_F32;
    g.add = a->add;
    if (!for_tiles(g)) return launch_plain(c, g, h);
    if (a->transposed)
        return g.m <= 16 ? launch_tiles<16, 64, 1, 4, 4, false, true>(c, g, h)
                         : launch_tiles<64, 128, 2, 4, 3, false, true>(c, g, h);
    return g.m <= 16 ? launch_tiles<16, 64, 1, 4, 4, false, false>(c, g, h) : launch_tiles<64, 128, 2, 4, 3, false, false>(c, g, h);
}

int cuda_heads_dw(struct dev *d, const struct heads_dw_args *a) {
    struct cuda *const c = cuda_of(d);
    const int64_t h = a->n_heads, k = a->dw.dim[1];
    struct heads g = {};
    g.a = at(a->x, a->x_at);
    g.b = at(a->y, a->y_at);
    g.out = (void *)at(a->dw, a->row * k);
    g.m = a->rows;
    g.n = k;
    g.r = a->x.dim[0];
    g.a_head = a->x.dim[1] / h;
    g.b_head = a->y.dim[1] / h;
    g.out_head = a->dw.dim[0] / h * k;
    g.a_m = 1;
    g.a_r = a->x.dim[1];
    g.b_n = 1;
    g.b_r = a->y.dim[1];
    g.ld_out = k;
    g.half = a->x.dt == DT_BF16;
    g.out_f32 = true;
    g.add = a->add;
    return for_tiles(g) ? launch_tiles<128, 128, 2, 4, 3, true, true>(c, g, h) : launch_plain(c, g, h);
}
