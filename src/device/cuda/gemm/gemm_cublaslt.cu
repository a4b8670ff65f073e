/* gemm_cublaslt.cu - GEMMs by cuBLASLt: descriptors, layouts, its heuristic and the call itself.
 *
 * The library is column-major: our row-major (r, c) is its (c, r).
 *     FWD  out (m, n): D (n x m) = b (k x n)^T . a (k x m)
 *     DX   out (m, k): D (k x m) = b (k x n)   . a (n x m)
 *     DW   out (n, k): D (k x n) = b (k x m)   . a (n x m)^T
 * so its first operand is always our b.
 * Invariant: a plan's descriptors are made once; a call sets m, ld_out and the pointers only. */
#include "device/cuda/gemm/gemm.cuh"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define LT_TRY(g, call)                                                                             \
    do {                                                                                            \
        const cublasStatus_t lt_s_ = (g)->lt->call;                                                 \
        if (lt_s_ != CUBLAS_STATUS_SUCCESS)                                                         \
            FAIL(ERR_DEVICE, "cuda: %.40s...: %s", #call, (g)->lt->cublasLtGetStatusString(lt_s_)); \
    } while (0)

const char *gemm_plan_name(const struct gemm_plan *p, char *buf, size_t size) {
    static const char *const op[] = {"matmul_fwd", "matmul_dx", "matmul_dw"};
    snprintf(buf, size, "%s (n %lld%s, k %lld, %s to %s%s%s%s)", op[p->op], (long long)p->n, p->split_cols ? " column-split" : "",
             (long long)p->k, dtype_name(p->in), dtype_name(p->out_dt), p->bias ? ", bias" : "", p->add ? ", add" : "",
             p->swiglu ? ", SwiGLU" : "");
    return buf;
}

/* ---- making a plan ---- */

static cudaDataType type_of(enum dtype dt) { return dt == DT_BF16 ? CUDA_R_16BF : CUDA_R_32F; }

static int set_desc(struct cuda_gemm *g, struct gemm_plan *p) {
    const cublasOperation_t trans = CUBLAS_OP_T;
    LT_TRY(g, cublasLtMatmulDescCreate(&p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    if (p->op == CUDA_GEMM_FWD)
        LT_TRY(g, cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &trans, sizeof trans));
    if (p->op == CUDA_GEMM_DW)
        LT_TRY(g, cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_TRANSB, &trans, sizeof trans));
    if (p->bias) {
        const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
        const cudaDataType type = type_of(p->in);
        const void *any = (const void *)(uintptr_t)256; /* the list of algorithms depends on its alignment */
        LT_TRY(g, cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue));
        LT_TRY(g, cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &type, sizeof type));
        LT_TRY(g, cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &any, sizeof any));
    }
    return 0;
}

static int set_layouts(struct cuda_gemm *g, struct gemm_plan *p) {
    const cudaDataType in = type_of(p->in), out = type_of(p->out_dt);
    const uint64_t n = (uint64_t)p->n, k = (uint64_t)p->k, m = (uint64_t)p->m;
    const uint64_t b_cols = p->op == CUDA_GEMM_DW ? m : n, a_rows = p->op == CUDA_GEMM_FWD ? k : n;
    const uint64_t d_rows = p->op == CUDA_GEMM_FWD ? n : k, d_cols = p->op == CUDA_GEMM_DW ? n : m;
    LT_TRY(g, cublasLtMatrixLayoutCreate(&p->a, in, k, b_cols, p->k));
    LT_TRY(g, cublasLtMatrixLayoutCreate(&p->b, in, a_rows, m, (int64_t)a_rows));
    LT_TRY(g, cublasLtMatrixLayoutCreate(&p->d, out, d_rows, d_cols, p->ld_out));
    return 0;
}

static bool same_plan(const struct gemm_plan *p, const struct cuda_gemm_args *a) {
    return p->n == a->n && p->k == a->k && p->whole_n == a->whole_n && p->split_cols == a->split_cols && p->op == a->op &&
           p->in == a->in && p->out_dt == a->out_dt && p->add == a->add && p->bias == (a->bias != NULL) &&
           p->swiglu == (a->gate_up != NULL);
}

int gemm_plan_get(struct cuda *c, const struct cuda_gemm_args *a, struct gemm_plan **out) {
    struct cuda_gemm *g = c->gemm;
    const uint64_t kind = (uint64_t)a->op * 8 + (a->out_dt == DT_F32) * 4u + a->add * 2u + (a->bias != NULL);
    const uint64_t h = ((uint64_t)a->n * 0x9e3779b97f4a7c15u + (uint64_t)a->k) * 0xc2b2ae3d27d4eb4fu + kind * 0x165667b19e3779f9u;
    struct gemm_plan **head = &g->plans[h >> 58];
    for (struct gemm_plan *p = *head; p; p = p->next)
        if (same_plan(p, a)) {
            *out = p;
            return 0;
        }
    struct gemm_plan *p = (struct gemm_plan *)calloc(1, sizeof *p);
    if (p == NULL) FAIL(ERR_NOMEM, "out of memory");
    p->op = a->op;
    p->n = a->n;
    p->k = a->k;
    p->whole_n = a->whole_n;
    p->split_cols = a->split_cols;
    p->in = a->in;
    p->out_dt = a->out_dt;
    p->add = a->add;
    p->bias = a->bias != NULL;
    p->swiglu = a->gate_up != NULL;
    p->m = a->m;
    p->ld_out = a->ld_out;
    int rc = set_desc(g, p);
    if (rc == 0) rc = set_layouts(g, p);
    if (rc < 0) {
        gemm_plan_destroy(g, p);
        return rc;
    }
    p->next = *head;
    *out = *head = p;
    return 0;
}

void gemm_plan_destroy(struct cuda_gemm *g, struct gemm_plan *p) {
    if (p->a) g->lt->cublasLtMatrixLayoutDestroy(p->a);
    if (p->b) g->lt->cublasLtMatrixLayoutDestroy(p->b);
    if (p->d) g->lt->cublasLtMatrixLayoutDestroy(p->d);
    if (p->desc) g->lt->cublasLtMatmulDescDestroy(p->desc);
    free(p);
}

/* ---- using it ---- */

static int set_rows(struct cuda_gemm *g, struct gemm_plan *p, int64_t m, int64_t ld_out) {
    if (m != p->m) {
        const uint64_t cols = (uint64_t)m;
        const cublasLtMatrixLayout_t other = p->op == CUDA_GEMM_DW ? p->a : p->d;
        LT_TRY(g, cublasLtMatrixLayoutSetAttribute(p->b, CUBLASLT_MATRIX_LAYOUT_COLS, &cols, sizeof cols));
        LT_TRY(g, cublasLtMatrixLayoutSetAttribute(other, CUBLASLT_MATRIX_LAYOUT_COLS, &cols, sizeof cols));
        p->m = m;
    }
    if (ld_out != p->ld_out) {
        LT_TRY(g, cublasLtMatrixLayoutSetAttribute(p->d, CUBLASLT_MATRIX_LAYOUT_LD, &ld_out, sizeof ld_out));
        p->ld_out = ld_out;
    }
    return 0;
}

/* No split-K, and no workspace for the partial sums of stream-K. */
static bool one_sum(const struct cuda_gemm *g, const cublasLtMatmulHeuristicResult_t *r) {
    int32_t split = 1;
    uint32_t scheme = CUBLASLT_REDUCTION_SCHEME_NONE;
    size_t written;
    g->lt->cublasLtMatmulAlgoConfigGetAttribute(&r->algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &split, sizeof split, &written);
    g->lt->cublasLtMatmulAlgoConfigGetAttribute(&r->algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme, sizeof scheme, &written);
    return split <= 1 && scheme == CUBLASLT_REDUCTION_SCHEME_NONE && r->workspaceSize == 0;
}

static int set_preference(struct cuda_gemm *g, cublasLtMatmulPreference_t pref) {
    static const cublasLtMatmulPreferenceAttributes_t operand[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    const uint64_t bytes = 0;
    const uint32_t scheme = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, align = 16; /* partial sums stay f32 */
    LT_TRY(g, cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes));
    LT_TRY(g, cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &scheme, sizeof scheme));
    for (int i = 0; i < 4; i++) LT_TRY(g, cublasLtMatmulPreferenceSetAttribute(pref, operand[i], &align, sizeof align));
    return 0;
}

int gemm_plan_algos(struct cuda *c, struct gemm_plan *p, int64_t m, int64_t ld_out, cublasLtMatmulAlgo_t algos[GEMM_MAX_ALGOS],
                    int *n) {
    struct cuda_gemm *g = c->gemm;
    cublasLtMatmulHeuristicResult_t found[GEMM_MAX_ALGOS];
    cublasLtMatmulPreference_t pref;
    int n_found = 0;
    *n = 0;
    TRY(set_rows(g, p, m, ld_out));
    LT_TRY(g, cublasLtMatmulPreferenceCreate(&pref));
    const int rc = set_preference(g, pref);
    cublasStatus_t s = CUBLAS_STATUS_SUCCESS;
    if (rc == 0)
        s = g->lt->cublasLtMatmulAlgoGetHeuristic(g->handle, p->desc, p->a, p->b, p->d, p->d, pref, GEMM_MAX_ALGOS, found,
                                                  &n_found);
    g->lt->cublasLtMatmulPreferenceDestroy(pref);
    if (rc < 0) return rc;
    if (s == CUBLAS_STATUS_NOT_SUPPORTED) return 0; /* no algorithm */
    if (s != CUBLAS_STATUS_SUCCESS) {
        char name[128];
        FAIL(ERR_DEVICE, "cuda: cuBLASLt: algorithms for %s, %lld rows: %s", gemm_plan_name(p, name, sizeof name), (long long)m,
             g->lt->cublasLtGetStatusString(s));
    }
    for (int i = 0; i < n_found; i++)
        if (found[i].state == CUBLAS_STATUS_SUCCESS && one_sum(g, &found[i])) algos[(*n)++] = found[i].algo;
    return 0;
}

/* Fills out with NaN, so that an element that the GEMM left unwritten shows in every result. The fill is also what initcheck
 * sees: it does not follow TMA stores, by which the library's kernels write. */
static int poison_out(struct cuda *c, const struct gemm_plan *p, const struct cuda_gemm_args *a) {
    const size_t size = dtype_size(a->out_dt), width = (size_t)gemm_out_width(p->op, p->n, p->k) * size;
    const int64_t rows = p->op == CUDA_GEMM_DW ? p->n : a->m;
    CU_TRY(cudaMemset2DAsync(a->out, (size_t)a->ld_out * size, 0xff, width, (size_t)rows, c->stream));
    return 0;
}

int gemm_plan_run(struct cuda *c, struct gemm_plan *p, const cublasLtMatmulAlgo_t *algo, const struct cuda_gemm_args *a,
                  bool *ran) {
    struct cuda_gemm *g = c->gemm;
    const float one = 1, beta = a->add ? 1 : 0;
    TRY(set_rows(g, p, a->m, a->ld_out));
    if (g->poison && !a->add) TRY(poison_out(c, p, a));
    if (p->bias) LT_TRY(g, cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &a->bias, sizeof a->bias));
    /* Without a workspace the library schedules tiles in a fixed order, not by a counter that it clears before each GEMM, and so
     * the GEMM may start while the previous kernel still runs (PDL). */
    const cublasStatus_t s = g->lt->cublasLtMatmul(g->handle, p->desc, &one, a->b, p->a, a->a, p->b, &beta,
                                                   a->from ? a->from : a->out, p->d, a->out, p->d, algo, NULL, 0, c->stream);
    *ran = s == CUBLAS_STATUS_SUCCESS;
    if (*ran || s == CUBLAS_STATUS_NOT_SUPPORTED || s == CUBLAS_STATUS_INVALID_VALUE) return 0;
    char name[128];
    CU_TRY(cudaGetLastError()); /* an earlier kernel's failure shows here first */
    FAIL(ERR_DEVICE, "cuda: cuBLASLt: %s, %lld rows: %s", gemm_plan_name(p, name, sizeof name), (long long)a->m,
         g->lt->cublasLtGetStatusString(s));
}

int gemm_pick_run(struct cuda *c, struct gemm_plan *p, const struct gemm_pick *pick, const struct cuda_gemm_args *a, bool *ran) {
    *ran = false;
    if (pick->how == GEMM_SMALL_M) return gemm_small_m(c, a, pick->small, ran);
    if (pick->how == GEMM_SMALL_M_TMA) return gemm_small_m_tma(c, a, pick->small, ran);
    if (pick->how == GEMM_SWIGLU_FUSED) return gemm_swiglu_fused(c, a, ran);
    if (pick->how == GEMM_SWIGLU_UNFUSED) {
        *ran = true;
        return gemm_swiglu_unfused(c, a);
    }
    return pick->how == GEMM_ALGO ? gemm_plan_run(c, p, &pick->algo, a, ran) : 0;
}
