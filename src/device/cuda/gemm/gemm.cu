/* gemm.cu - the CUDA backend's GEMMs: which kernel serves one, and the weights' layout, which is plain
 * row-major.
 *
 * bf16 and f32 GEMMs whose rows are multiples of 16 bytes go to cuBLASLt or to our kernels, all others to the
 * fallback.  How a batch-invariant GEMM (FWD, DX) is computed depends on n, k and the dtypes alone; where the library cannot
 * write the output as it is (odd rows, a bias of another dtype) the sums go through scratch and gemm_epilogue gives the same bits.
 * Invariant: a row of FWD and of DX has the same bits for every m, ld_out and kernel; DW is deterministic from run
 * to run, and out += DW has the bits of DW added to out. */
#include "device/cuda/gemm/gemm.cuh"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* ---- dispatch ---- */

static bool aligned(const void *p) { return (uintptr_t)p % 16 == 0; }

/* Whether cuBLASLt takes rows of n and of k of this dtype. */
static bool library_size(const struct cuda_gemm_args *a) {
    const int64_t vec = 16 / (int64_t)dtype_size(a->in);
    return a->n % vec == 0 && a->whole_n % vec == 0 && a->k % vec == 0 && a->k > 0;
}
/* Sizes that only the fallback takes; but not rows of a matrix that the library takes: they would have other bits. */
static int run_odd(struct cuda *c, const struct cuda_gemm_args *a) {
    struct cuda_gemm_args whole = *a;
    whole.n = a->whole_n;
    whole.whole_n = 0;
    if (a->whole_n && library_size(&whole))
        FAIL(ERR_UNSUPPORTED, "cuda: %lld of %lld rows of a matrix are no multiple of 16 bytes; take 1 as the tensor parallel size",
             (long long)a->n, (long long)a->whole_n);
    return gemm_fallback(c, a);
}
static int64_t out_width(const struct cuda_gemm_args *a) { return gemm_out_width(a->op, a->n, a->k); }
static bool library_out(const struct cuda_gemm_args *a) {
    return aligned(a->out) && (size_t)a->ld_out * dtype_size(a->out_dt) % 16 == 0;
}
static int no_algo(const struct gemm_plan *p, int64_t m) {
    char name[128];
    FAIL(ERR_DEVICE, "cuda: cuBLASLt has no algorithm for %s with %lld rows", gemm_plan_name(p, name, sizeof name), (long long)m);
}

static struct cuda_gemm_args sum_only(const struct cuda_gemm_args *a) {
    struct cuda_gemm_args s = *a;
    s.out_dt = DT_F32;
    s.add = false;
    s.bias = NULL;
    s.gate_up = NULL;
    return s;
}

/* DW: the library's first single-pass algorithm for the bucket of m; for m itself where that does not fit. One plan serves
 * `add` and not: the same sums, which the epilogue adds with one rounding. */
static int run_deterministic(struct cuda *c, const struct cuda_gemm_args *a) {
    if (!library_size(a) || !aligned(a->a) || !aligned(a->b) || !library_out(a)) return gemm_fallback(c, a);
    const struct cuda_gemm_args s = sum_only(a);
    struct gemm_plan *p;
    TRY(gemm_plan_get(c, &s, &p));
    const int bucket = gemm_bucket(a->m);
    struct gemm_pick *pick = &p->pick[bucket];
    cublasLtMatmulAlgo_t algos[GEMM_MAX_ALGOS];
    bool ran = false;
    int n = 1;
    if (pick->how == GEMM_UNKNOWN) {
        TRY(gemm_plan_algos(c, p, gemm_bucket_top(bucket), a->ld_out, algos, &n));
        if (n == 0) return no_algo(p, gemm_bucket_top(bucket));
        pick->algo = algos[0];
        pick->how = GEMM_ALGO;
    }
    TRY(gemm_plan_run(c, p, &pick->algo, a, &ran));
    if (ran) return 0;
    TRY(gemm_plan_algos(c, p, a->m, a->ld_out, algos, &n));
    for (int i = 0; i < n && !ran; i++) TRY(gemm_plan_run(c, p, &algos[i], a, &ran));
    return ran ? 0 : no_algo(p, a->m);
}

/* The sums alone, into f32 memory that the library can write. */
static int run_sums(struct cuda *c, struct gemm_plan *base, const struct cuda_gemm_args *a) {
    const int bucket = gemm_bucket(a->m);
    bool ran = false;
    if (base->pick[bucket].how == GEMM_UNKNOWN) TRY(gemm_autotune(c, base, base, bucket));
    TRY(gemm_pick_run(c, base, &base->pick[bucket], a, &ran));
    if (!ran) TRY(gemm_plan_run(c, base, &base->canonical, a, &ran));
    return ran ? 0 : no_algo(base, a->m);
}

static int run_two_pass(struct cuda *c, struct gemm_plan *base, const struct cuda_gemm_args *a) {
    struct cuda_gemm_args s = sum_only(a);
    const int64_t width = out_width(a), in_width = gemm_in_width(a->op, a->n, a->k);
    if (a->out_dt == DT_F32 && !a->add && library_out(a)) {
        TRY(run_sums(c, base, &s));
        return a->bias ? gemm_epilogue(c, a, (const float *)a->out, a->ld_out) : 0;
    }
    TRY(cuda_scratch(c, CUDA_SCRATCH_GEMM, (size_t)(gemm_min(a->m, CUDA_TWO_PASS_ROWS) * width) * sizeof(float), &s.out));
    s.ld_out = width;
    struct cuda_gemm_args part = *a;
    for (int64_t row = 0; row < a->m; row += CUDA_TWO_PASS_ROWS) {
        part.m = s.m = gemm_min(CUDA_TWO_PASS_ROWS, a->m - row);
        part.a = s.a = (const char *)a->a + (size_t)(row * in_width) * dtype_size(a->in);
        part.out = (char *)a->out + (size_t)(row * a->ld_out) * dtype_size(a->out_dt);
        TRY(run_sums(c, base, &s));
        TRY(gemm_epilogue(c, &part, (const float *)s.out, width));
    }
    return 0;
}

static int run_batch_invariant(struct cuda *c, const struct cuda_gemm_args *a) {
    if (!library_size(a)) return run_odd(c, a);
    const struct cuda_gemm_args s = sum_only(a);
    struct gemm_plan *base, *p;
    TRY(gemm_plan_get(c, &s, &base));
    if (!base->has_canonical) TRY(gemm_choose_canonical(c, base));
    if (base->fallback) return gemm_fallback(c, a);
    if (!aligned(a->a) || !aligned(a->b))
        FAIL(ERR_INTERNAL, "cuda: a GEMM's rows %p and w %p must be aligned to 16 bytes (n %lld, k %lld)", a->a, a->b,
             (long long)a->n, (long long)a->k);
    const bool bias_fits = a->bias == NULL || (a->out_dt == a->in && !a->add && aligned(a->bias));
    if (!bias_fits || !library_out(a)) return run_two_pass(c, base, a);
    TRY(gemm_plan_get(c, a, &p));
    if (p == base) return run_sums(c, base, a);
    const int bucket = gemm_bucket(a->m);
    bool ran = false;
    if (p->pick[bucket].how == GEMM_UNKNOWN) TRY(gemm_autotune(c, p, base, bucket));
    TRY(gemm_pick_run(c, p, &p->pick[bucket], a, &ran));
    return ran ? 0 : run_two_pass(c, base, a);
}

int gemm_split_cols(struct cuda *c, const struct cuda_gemm_args *a) {
    struct cuda_gemm_args s = *a;
    s.split_cols = 0;
    for (int64_t lo = 0; lo < a->n; lo += a->split_cols) {
        s.n = gemm_min(a->split_cols, a->n - lo);
        s.b = (const char *)a->b + (size_t)(lo * a->k) * dtype_size(a->in);
        s.out = (float *)a->out + lo;
        TRY(run_batch_invariant(c, &s));
    }
    return 0;
}

/* One GEMM in place of its pieces, where it gives their bits. */
static int run_split_cols(struct cuda *c, const struct cuda_gemm_args *a) {
    struct gemm_plan *p;
    if (!library_size(a) || !library_out(a) || !aligned(a->a) || !aligned(a->b)) return gemm_split_cols(c, a);
    TRY(gemm_plan_get(c, a, &p));
    const int bucket = gemm_bucket(a->m);
    bool ran = false;
    if (p->pick[bucket].how == GEMM_UNKNOWN) { /* this time by its pieces, which are autotuned first */
        TRY(gemm_split_cols(c, a));
        return gemm_autotune(c, p, NULL, bucket);
    }
    TRY(gemm_pick_run(c, p, &p->pick[bucket], a, &ran));
    return ran ? 0 : gemm_split_cols(c, a);
}

/* out = from + GEMM by the kernel chosen for out +=, where there is one. */
static int run_from(struct cuda *c, const struct cuda_gemm_args *a, bool *ran) {
    struct gemm_plan *p;
    *ran = false;
    if (!library_size(a) || a->bias || !library_out(a) || !aligned(a->a) || !aligned(a->b) || !aligned(a->from)) return 0;
    TRY(gemm_plan_get(c, a, &p));
    const struct gemm_pick *pick = &p->pick[gemm_bucket(a->m)];
    return pick->how == GEMM_ALGO ? gemm_plan_run(c, p, &pick->algo, a, ran) : 0;
}

int gemm_swiglu_unfused(struct cuda *c, const struct cuda_gemm_args *a) {
    struct cuda_gemm_args gemm = *a;
    gemm.out = a->gate_up;
    gemm.gate_up = NULL;
    gemm.ld_out = 0;
    TRY(cuda_gemm(c, &gemm));
    return cuda_swiglu(c, tensor_2d(a->out, a->in, a->m, a->n / 2), tensor_2d(a->gate_up, a->in, a->m, a->n));
}

/* One kernel with the SwiGLU epilogue, where it gives the bits of two. */
static int run_swiglu(struct cuda *c, const struct cuda_gemm_args *a) {
    struct cuda_gemm_args sums = sum_only(a);
    struct gemm_plan *p, *base;
    const bool fits =
        library_size(a) && library_out(a) && aligned(a->a) && aligned(a->b) && aligned(a->gate_up) && aligned(a->bias);
    if (!cuda_hopper(c) || a->in != DT_BF16 || !fits) return gemm_swiglu_unfused(c, a);
    TRY(gemm_plan_get(c, a, &p));
    const int bucket = gemm_bucket(a->m);
    bool ran = false;
    if (p->pick[bucket].how == GEMM_UNKNOWN) { /* this time unfused: that GEMM is autotuned first */
        TRY(gemm_swiglu_unfused(c, a));
        sums.ld_out = a->n;
        TRY(gemm_plan_get(c, &sums, &base));
        if (!base->fallback) return gemm_autotune(c, p, base, bucket);
        p->pick[bucket].how = GEMM_SWIGLU_UNFUSED;
        return 0;
    }
    TRY(gemm_pick_run(c, p, &p->pick[bucket], a, &ran));
    return ran ? 0 : gemm_swiglu_unfused(c, a);
}

int cuda_gemm(struct cuda *c, const struct cuda_gemm_args *a) {
    if (a->m == 0 || a->n == 0 || (a->k == 0 && a->op != CUDA_GEMM_FWD)) return 0;
    struct cuda_gemm_args full = *a;
    if (full.ld_out == 0) full.ld_out = a->gate_up ? a->n / 2 : out_width(a);
    if (full.gate_up) return run_swiglu(c, &full);
    if (full.split_cols >= full.n) full.split_cols = 0;
    if (full.from) { /* pre: whole rows, FWD or DX */
        bool ran;
        TRY(run_from(c, &full, &ran));
        if (ran) return 0;
        const size_t bytes = (size_t)(a->m * full.ld_out) * sizeof(float);
        CU_TRY(cudaMemcpyAsync(full.out, full.from, bytes, cudaMemcpyDeviceToDevice, c->stream));
        full.from = NULL;
    }
    if (full.split_cols) return run_split_cols(c, &full);
    return a->op == CUDA_GEMM_DW ? run_deterministic(c, &full) : run_batch_invariant(c, &full);
}

/* ---- opening ---- */

int cuda_gemm_open(struct cuda *c) {
    struct cuda_gemm *g = (struct cuda_gemm *)calloc(1, sizeof *g);
    if (g == NULL) FAIL(ERR_NOMEM, "out of memory");
    c->gemm = g;
    const char *poison = getenv("VERLC_CUDA_POISON");
    g->poison = poison && *poison && strcmp(poison, "0") != 0;
    TRY(cuda_blaslt_open(&g->lt));
    const cublasStatus_t s = g->lt->cublasLtCreate(&g->handle);
    if (s != CUBLAS_STATUS_SUCCESS) {
        g->handle = NULL;
        FAIL(ERR_DEVICE, "cuda: cublasLtCreate: %s", g->lt->cublasLtGetStatusString(s));
    }
    return 0;
}

void cuda_gemm_close(struct cuda *c) {
    struct cuda_gemm *g = c->gemm;
    if (g == NULL) return;
    for (size_t i = 0; i < sizeof g->plans / sizeof *g->plans; i++)
        while (g->plans[i]) {
            struct gemm_plan *p = g->plans[i];
            g->plans[i] = p->next;
            gemm_plan_destroy(g, p);
        }
    if (g->handle) g->lt->cublasLtDestroy(g->handle);
    free(g);
    c->gemm = NULL;
}

/* ---- the ops ---- */

size_t cuda_weight_bytes(struct dev *d, enum dtype dt, int64_t n, int64_t k) {
    (void)d;
    return (size_t)(n * k) * dtype_size(dt);
}
int cuda_weight_pack(struct dev *d, struct weight w, struct tensor src) {
    return cuda_cast(d, tensor_2d(w.data, w.dt, w.n, w.k), src);
}
int cuda_weight_unpack(struct dev *d, struct tensor dst, struct weight w) {
    return cuda_cast(d, dst, tensor_2d(w.data, w.dt, w.n, w.k));
}

/* out = in times w one way or the other: FWD or DX. */
static struct cuda_gemm_args weight_args(enum cuda_gemm_op op, struct tensor out, struct tensor in, struct weight w, bool add) {
    struct cuda_gemm_args a = {};
    a.op = op;
    a.m = in.dim[0];
    a.n = w.n;
    a.k = w.k;
    a.whole_n = op == CUDA_GEMM_FWD && w.of != w.n ? w.of : 0;
    a.a = in.data;
    a.b = w.data;
    a.out = out.data;
    a.in = in.dt;
    a.out_dt = out.dt;
    a.add = add;
    return a;
}
int cuda_matmul_fwd(struct dev *d, struct tensor y, struct tensor x, struct weight w, struct tensor bias, bool add) {
    struct cuda_gemm_args a = weight_args(CUDA_GEMM_FWD, y, x, w, add);
    a.bias = bias.data;
    return cuda_gemm(cuda_of(d), &a);
}
int cuda_matmul_add(struct dev *d, struct tensor y, struct tensor from, struct tensor x, struct weight w, struct tensor bias) {
    struct cuda_gemm_args a = weight_args(CUDA_GEMM_FWD, y, x, w, true);
    a.bias = bias.data;
    a.from = from.data;
    return cuda_gemm(cuda_of(d), &a);
}

int cuda_matmul_swiglu(struct dev *d, struct tensor y, struct tensor gate_up, struct tensor x, struct weight w,
                       struct tensor bias) {
    struct cuda_gemm_args a = weight_args(CUDA_GEMM_FWD, y, x, w, false);
    a.bias = bias.data;
    a.gate_up = gate_up.data;
    return cuda_gemm(cuda_of(d), &a);
}

int cuda_matmul_dx(struct dev *d, struct tensor dx, struct tensor dy, struct weight w, bool add) {
    const struct cuda_gemm_args a = weight_args(CUDA_GEMM_DX, dx, dy, w, add);
    return cuda_gemm(cuda_of(d), &a);
}

int cuda_matmul_dw(struct dev *d, struct tensor dw, struct tensor db, struct tensor dy, struct tensor x, bool add) {
    struct cuda_gemm_args a = {};
    a.op = CUDA_GEMM_DW;
    a.m = dy.dim[0];
    a.n = dy.dim[1];
    a.k = x.dim[1];
    a.a = dy.data;
    a.b = x.data;
    a.out = dw.data;
    a.in = dy.dt;
    a.out_dt = DT_F32;
    a.add = add;
    /* column sums first, while dy is in L2 */
    if (db.data && a.m > 0) TRY(gemm_colsum(cuda_of(d), (float *)db.data, dy, add));
    return cuda_gemm(cuda_of(d), &a);
}
