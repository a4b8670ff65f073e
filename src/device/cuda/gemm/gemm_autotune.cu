/* gemm_autotune.cu - which cuBLASLt algorithms and which kernels of ours give a batch-invariant GEMM's bits, and which
 * of those is the fastest: from a cold L2, and at small M inside a CUDA graph, where our kernels overlap with their
 * neighbours (PDL).
 *
 * A shape's canonical algorithm is the library's first whose rows do not depend on M.  Every other
 * algorithm, bucket of M and kind of output is compared with its sums, at several M of the bucket.  The test values make
 * differences visible: in each dot product the second half cancels the first, so that what remains is the
 * rounding error of the running sum, and another order of addition changes nearly every element, even after rounding to
 * bf16; bias and addend are as small as it.
 *
 * Invariant: autotuning chooses among bitwise-identical kernels only, so time never decides a result. */
#include "device/cuda/gemm/gemm.cuh"

#include "base/log.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum {
    CANONICAL_ROWS = 1024, /* M of the trial that finds the canonical algorithm */
    CANONICAL_M = 256,     /* M for which the library is asked */
    PART_ROWS = 64,        /* M of the trial of some rows of a matrix */
    MAX_TESTS = 8,
    MAX_ROUNDS = 5,
    MAX_MORE = 7,      /* algorithms tried after the heuristic's for the bucket */
    MAX_IN_GRAPH = 10, /* of the fastest, timed again inside a CUDA graph */
    MIN_CHAIN = 16,
    MAX_CHAIN = 64,   /* GEMMs of such a graph */
    CHAIN_ROUNDS = 3, /* the first one warms up */
    CHAIN_BLOCKS = 80,
    CHAIN_THREADS = 128,
    MAX_TRIED = GEMM_MAX_ALGOS + MAX_MORE + 1 + GEMM_N_SMALL_M + GEMM_N_SMALL_M_TMA,
    CANONICAL = MAX_TRIED, /* flag of the canonical algorithm against itself */
    N_FLAGS
};
static const double TIMING_SECONDS = 0.05;
static const float SMALL = 0x1p-17f; /* the size of a rounding error of a sum of ~1000 terms of size 1 */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Memory and operands of one autotuning. */
struct trial {
    void *block;                /* scratch: kept for the next one, so that autotuning in mid-run allocates nothing */
    struct cuda_gemm_args args; /* the GEMM: operands, out, rows */
    float *sums;                /* (rows, n): of the canonical algorithm */
    void *want;                 /* (rows, n): the output they give; the sums themselves where out is the sum */
    size_t out_bytes;           /* of want, and of args.out */
    int *flags;                 /* (N_FLAGS): something differed */
    float *chain;               /* (CHAIN_BLOCKS, CHAIN_THREADS): output of the small kernel between two GEMMs */
    void *flush;                /* written to flush L2 before a timing */
    size_t flush_bytes;
    cudaEvent_t begin[MAX_TRIED], end[MAX_TRIED];
};

static int check_not_capturing(struct cuda *c, const struct gemm_plan *p, int64_t m) {
    cudaStreamCaptureStatus status;
    CU_TRY(cudaStreamIsCapturing(c->stream, &status));
    if (status == cudaStreamCaptureStatusNone) return 0;
    char name[128];
    FAIL(ERR_INTERNAL, "cuda: %s was not run with about %lld rows before a CUDA graph was captured",
         gemm_plan_name(p, name, sizeof name), (long long)m);
}

static void trial_free(struct cuda *c, struct trial *t) {
    cudaStreamSynchronize(c->stream);
    for (int i = 0; i < MAX_TRIED; i++) {
        if (t->begin[i]) cudaEventDestroy(t->begin[i]);
        if (t->end[i]) cudaEventDestroy(t->end[i]);
    }
}

static size_t flush_bytes(const struct cuda *c) {
    int l2 = 0;
    return cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, c->index) == cudaSuccess ? (size_t)l2 * 2 : 0;
}

/* Cuts 256-aligned pieces off block; with NULL only counts. */
static void *piece(void *block, size_t *at, size_t bytes) {
    void *p = block ? (char *)block + *at : NULL;
    *at += (bytes + 255) / 256 * 256;
    return p;
}

static int64_t in_width(const struct gemm_plan *p) { return gemm_in_width(p->op, p->n, p->k); }
static int64_t sum_width(const struct gemm_plan *p) { return gemm_out_width(p->op, p->n, p->k); }
static int64_t out_width(const struct gemm_plan *p) { return p->swiglu ? p->n / 2 : sum_width(p); }

static size_t trial_bind(struct trial *t, const struct gemm_plan *p, void *block) {
    struct cuda_gemm_args *a = &t->args;
    const int64_t width = sum_width(p);
    const size_t in = dtype_size(p->in);
    const bool is_sum = p->out_dt == DT_F32 && !p->add && !p->bias;
    size_t at = 0;
    a->a = piece(block, &at, (size_t)(a->m * in_width(p)) * in);
    a->b = piece(block, &at, (size_t)(p->n * p->k) * in);
    a->bias = p->bias ? piece(block, &at, (size_t)p->n * in) : NULL;
    a->out = piece(block, &at, (size_t)(a->m * width) * sizeof(float)); /* also for sums */
    t->sums = (float *)piece(block, &at, (size_t)(a->m * width) * sizeof(float));
    t->want = is_sum ? t->sums : piece(block, &at, t->out_bytes);
    a->gate_up = p->swiglu ? piece(block, &at, (size_t)(a->m * width) * in) : NULL;
    t->flags = (int *)piece(block, &at, N_FLAGS * sizeof(int));
    t->chain = (float *)piece(block, &at, CHAIN_BLOCKS * CHAIN_THREADS * sizeof(float));
    t->flush = piece(block, &at, t->flush_bytes);
    return at;
}

/* Fills a trial of p with up to `rows` rows, fewer where they would take too much memory.
 * ERR_NOMEM: the GPU has no room for it now. */
static int trial_init(struct cuda *c, struct trial *t, const struct gemm_plan *p, int64_t rows) {
    const size_t out = (size_t)sum_width(p) * dtype_size(p->out_dt);
    const size_t per_row = (size_t)in_width(p) * dtype_size(p->in) + (size_t)sum_width(p) * 8 + (p->swiglu ? 2 * out : out);
    const int64_t most = (int64_t)((p->split_cols ? GEMM_SPLIT_TRIAL_BYTES : (size_t)GEMM_TRIAL_BYTES) / per_row);
    struct cuda_gemm_args *a = &t->args;
    memset(t, 0, sizeof *t);
    a->op = p->op;
    a->m = rows < most ? rows : most < 1 ? 1 : most;
    a->n = p->n;
    a->k = p->k;
    a->whole_n = p->whole_n;
    a->ld_out = out_width(p);
    a->in = p->in;
    a->split_cols = p->split_cols;
    a->out_dt = p->out_dt;
    a->add = p->add;
    t->out_bytes = (size_t)(a->m * out_width(p)) * dtype_size(p->out_dt);
    t->flush_bytes = flush_bytes(c);
    TRY(cuda_scratch(c, CUDA_SCRATCH_AUTOTUNE, trial_bind(t, p, NULL), &t->block));
    trial_bind(t, p, t->block);
    TRY(gemm_fill_test_values(c, tensor_2d((void *)a->a, p->in, a->m, in_width(p)), 1, 1, 1));
    TRY(gemm_fill_test_values(c, tensor_2d((void *)a->b, p->in, p->n, p->k), 2, p->op == CUDA_GEMM_FWD ? -1 : -2, 1));
    if (p->bias) TRY(gemm_fill_test_values(c, tensor_2d((void *)a->bias, p->in, 1, p->n), 3, 0, SMALL));
    CU_TRY(cudaMemsetAsync(t->flags, 0, N_FLAGS * sizeof(int), c->stream));
    for (int i = 0; i < MAX_TRIED; i++) {
        CU_TRY(cudaEventCreate(&t->begin[i]));
        CU_TRY(cudaEventCreate(&t->end[i]));
    }
    return 0;
}

/* What an output holds before the GEMM: the addend, or NaN that must not stay. */
static int prepare_out(struct cuda *c, const struct trial *t, void *out) {
    if (t->args.add) return gemm_fill_test_values(c, tensor_2d(out, t->args.out_dt, t->args.m, t->args.ld_out), 4, 0, SMALL);
    CU_TRY(cudaMemsetAsync(out, 0xff, t->out_bytes, c->stream));
    return 0;
}

/* A kernel, the output that it must give, at which m (n of them), and the flag that says it did not. */
struct candidate {
    const struct gemm_pick *pick;
    const void *want;
    const int64_t *m;
    int n, flag;
};

/* Runs it for p on the first m rows and raises its flag where they differ from want.
 * *ran: false where it does not take m rows. */
static int try_rows(struct cuda *c, struct gemm_plan *p, const struct trial *t, const struct candidate *k, int64_t m, bool *ran) {
    struct cuda_gemm_args a = t->args;
    a.m = m;
    TRY(prepare_out(c, t, a.out));
    TRY(gemm_pick_run(c, p, k->pick, &a, ran));
    if (*ran) TRY(gemm_compare(c, a.out, k->want, (size_t)(m * a.ld_out) * dtype_size(a.out_dt), &t->flags[k->flag]));
    return 0;
}

/* All of its m that fit into the trial. */
static int try_all(struct cuda *c, struct gemm_plan *p, const struct trial *t, const struct candidate *k, bool *ran) {
    *ran = true;
    for (int j = 0; j < k->n && *ran; j++)
        if (k->m[j] >= 1 && k->m[j] <= t->args.m) TRY(try_rows(c, p, t, k, k->m[j], ran));
    return 0;
}

static struct gemm_pick pick_algo(const cublasLtMatmulAlgo_t *algo) {
    struct gemm_pick pick = {};
    pick.how = GEMM_ALGO;
    pick.algo = *algo;
    return pick;
}

static int read_flags(struct cuda *c, const struct trial *t, int flags[N_FLAGS]) {
    CU_TRY(cudaMemcpyAsync(flags, t->flags, N_FLAGS * sizeof(int), cudaMemcpyDeviceToHost, c->stream));
    CU_TRY(cudaStreamSynchronize(c->stream));
    return 0;
}

/* ---- the canonical algorithm ---- */

static int choose_canonical(struct cuda *c, struct gemm_plan *base, struct trial *t) {
    static const int64_t tests[MAX_TESTS] = {1, 2, 8, 17, 80, 129, 300, 777};
    cublasLtMatmulAlgo_t algos[GEMM_MAX_ALGOS];
    int n, flags[N_FLAGS], chosen = -1;
    TRY(trial_init(c, t, base, CANONICAL_ROWS));
    TRY(gemm_plan_algos(c, base, CANONICAL_M, out_width(base), algos, &n));
    struct cuda_gemm_args whole = t->args;
    whole.out = t->sums;
    for (int i = 0; i < n && chosen < 0; i++) {
        bool ran;
        TRY(gemm_plan_run(c, base, &algos[i], &whole, &ran));
        const struct gemm_pick pick = pick_algo(&algos[i]);
        const struct candidate k = {&pick, t->sums, tests, MAX_TESTS, i};
        if (ran) TRY(try_all(c, base, t, &k, &ran));
        TRY(read_flags(c, t, flags));
        if (ran && !flags[i]) chosen = i;
    }
    char name[128];
    gemm_plan_name(base, name, sizeof name);
    base->has_canonical = true;
    base->fallback = chosen < 0;
    if (base->fallback) {
        log_warn("cuda: %s: none of %d algorithms of cuBLASLt is batch-invariant; the slow fallback kernel serves", name, n);
        return 0;
    }
    base->canonical = algos[chosen];
    log_debug("cuda: %s: the canonical algorithm is the library's no. %d of %d", name, chosen + 1, n);
    return 0;
}

/* The canonical algorithm of the whole matrix gives some of its rows the bits that they have within it. t: of the whole. */
static int check_part(struct cuda *c, struct gemm_plan *base, struct gemm_plan *whole, struct trial *t) {
    static const int64_t tests[] = {PART_ROWS, 17, 1};
    int flags[N_FLAGS];
    bool ran;
    TRY(trial_init(c, t, whole, PART_ROWS));
    struct cuda_gemm_args all = t->args, part = t->args;
    all.out = t->sums;
    part.n = part.ld_out = base->n;
    TRY(gemm_plan_run(c, whole, &whole->canonical, &all, &ran));
    for (int i = 0; i < (int)(sizeof tests / sizeof *tests) && ran; i++) {
        part.m = gemm_min(tests[i], t->args.m);
        CU_TRY(cudaMemsetAsync(part.out, 0xff, (size_t)(part.m * part.n) * sizeof(float), c->stream));
        TRY(gemm_plan_run(c, base, &whole->canonical, &part, &ran));
        for (int64_t r = 0; r < part.m && ran; r++)
            TRY(gemm_compare(c, (float *)part.out + r * part.n, t->sums + r * whole->n, (size_t)part.n * sizeof(float), t->flags));
    }
    TRY(read_flags(c, t, flags));
    if (ran && !flags[0]) return 0;
    char name[128];
    FAIL(ERR_UNSUPPORTED, "cuda: %s: rows of a matrix of %lld %s; take 1 as the tensor parallel size",
         gemm_plan_name(base, name, sizeof name), (long long)whole->n,
         ran ? "have other bits alone than within it" : "are not computed by its algorithm");
}

static int choose_of_whole(struct cuda *c, struct gemm_plan *base) {
    struct cuda_gemm_args a = {};
    struct gemm_plan *whole;
    a.op = base->op;
    a.m = CANONICAL_M;
    a.n = base->whole_n;
    a.k = base->k;
    a.ld_out = gemm_out_width(a.op, a.n, a.k);
    a.in = base->in;
    a.out_dt = DT_F32;
    TRY(gemm_plan_get(c, &a, &whole));
    if (!whole->has_canonical) TRY(gemm_choose_canonical(c, whole));
    if (!whole->fallback) {
        struct trial t;
        const int rc = check_part(c, base, whole, &t);
        trial_free(c, &t);
        TRY(rc);
    }
    base->fallback = whole->fallback;
    base->canonical = whole->canonical;
    base->has_canonical = true;
    return 0;
}

int gemm_choose_canonical(struct cuda *c, struct gemm_plan *base) {
    struct trial t;
    TRY(check_not_capturing(c, base, CANONICAL_M));
    if (base->whole_n) return choose_of_whole(c, base);
    const int rc = choose_canonical(c, base, &t);
    trial_free(c, &t);
    return rc;
}

/* ---- the fastest of a bucket ---- */

/* The canonical sums of the trial's rows, and the output that p makes of them. */
static int make_want(struct cuda *c, struct gemm_plan *base, const struct trial *t) {
    struct cuda_gemm_args a = t->args;
    const int64_t sum_width = gemm_out_width(a.op, a.n, a.k);
    bool ran;
    a.out = t->sums;
    a.out_dt = DT_F32;
    a.add = false;
    a.bias = NULL;
    a.gate_up = NULL;
    a.ld_out = sum_width;
    if (!base) return gemm_split_cols(c, &a);
    TRY(gemm_plan_run(c, base, &base->canonical, &a, &ran));
    if (!ran)
        FAIL(ERR_DEVICE, "cuda: the canonical algorithm of n %lld, k %lld does not take %lld rows", (long long)a.n, (long long)a.k,
             (long long)a.m);
    if (t->want == t->sums) return 0;
    a = t->args;
    a.out = t->want;
    TRY(prepare_out(c, t, a.out));
    if (!a.gate_up) return gemm_epilogue(c, &a, t->sums, sum_width);
    a.out = a.gate_up;
    a.ld_out = sum_width;
    TRY(gemm_epilogue(c, &a, t->sums, sum_width));
    return cuda_swiglu(c, tensor_2d(t->want, a.in, a.m, a.n / 2), tensor_2d(a.gate_up, a.in, a.m, a.n));
}

/* The canonical algorithm must be batch-invariant in this bucket too. */
static int check_canonical(struct cuda *c, struct gemm_plan *base, const struct trial *t, const int64_t *m, int n) {
    struct trial sums = *t;
    bool ran;
    sums.args.out_dt = DT_F32;
    sums.args.add = false;
    sums.args.bias = NULL;
    sums.args.gate_up = NULL;
    sums.args.ld_out = gemm_out_width(t->args.op, t->args.n, t->args.k);
    sums.out_bytes = (size_t)(t->args.m * sums.args.ld_out) * sizeof(float);
    const struct gemm_pick pick = pick_algo(&base->canonical);
    const struct candidate k = {&pick, t->sums, m, n, CANONICAL};
    return try_all(c, base, &sums, &k, &ran);
}

static void add_new(struct gemm_pick *picks, int *n, const cublasLtMatmulAlgo_t *algo) {
    for (int i = 0; i < *n; i++)
        if (memcmp(&picks[i].algo, algo, sizeof *algo) == 0) return;
    picks[(*n)++] = pick_algo(algo);
}

static void add_ours(struct gemm_pick *picks, int *n, enum gemm_method how, int first, int end) {
    for (int i = first; i < end; i++, (*n)++) {
        memset(&picks[*n], 0, sizeof *picks);
        picks[*n].how = how;
        picks[*n].small = i;
    }
}

/* The library's algorithms for this bucket, some of those for more rows (for one row the heuristic may name only split-K),
 * for a plan of sums the canonical one, and our small-M kernels. */
static int candidates(struct cuda *c, struct gemm_plan *p, struct gemm_plan *base, int64_t rows, struct gemm_pick picks[MAX_TRIED],
                      int *n) {
    const bool fwd = p->op == CUDA_GEMM_FWD, small_m = fwd && rows <= GEMM_SMALL_M_MAX;
    const bool hopper = fwd && rows <= GEMM_SMALL_M_TMA_MAX && cuda_hopper(c);
    cublasLtMatmulAlgo_t algos[GEMM_MAX_ALGOS];
    int n_algos;
    *n = 0;
    if (p->swiglu) {
        add_ours(picks, n, GEMM_SWIGLU_UNFUSED, 0, 1);
        if (hopper) add_ours(picks, n, GEMM_SMALL_M_TMA, GEMM_N_SMALL_M_TMA, GEMM_N_SMALL_M_TMA + GEMM_N_SMALL_M_SWIGLU);
        if (!small_m && cuda_hopper(c)) add_ours(picks, n, GEMM_SWIGLU_FUSED, 0, 1);
        return 0;
    }
    TRY(gemm_plan_algos(c, p, rows, out_width(p), algos, &n_algos));
    for (int i = 0; i < n_algos; i++) add_new(picks, n, &algos[i]);
    TRY(gemm_plan_algos(c, p, CANONICAL_M, out_width(p), algos, &n_algos));
    for (int i = 0; i < n_algos && i < MAX_MORE; i++) add_new(picks, n, &algos[i]);
    if (p == base) add_new(picks, n, &base->canonical);
    if (small_m) add_ours(picks, n, GEMM_SMALL_M, 0, GEMM_N_SMALL_M);
    if (hopper) add_ours(picks, n, GEMM_SMALL_M_TMA, 0, GEMM_N_SMALL_M_TMA);
    return 0;
}

static const float NOT_TIMED = 1e30f;

/* Milliseconds of each candidate whose ms is 0: the minimum of a few rounds, each from a cold L2. */
static int time_all(struct cuda *c, struct gemm_plan *p, struct trial *t, const struct gemm_pick *picks, int n, float *ms) {
    const double end = now() + TIMING_SECONDS;
    bool ran;
    for (int round = 0; round < MAX_ROUNDS && (round == 0 || now() < end); round++) {
        for (int i = 0; i < n; i++) {
            if (ms[i] == NOT_TIMED) continue;
            CU_TRY(cudaMemsetAsync(t->flush, round, t->flush_bytes, c->stream));
            CU_TRY(cudaEventRecord(t->begin[i], c->stream));
            TRY(gemm_pick_run(c, p, &picks[i], &t->args, &ran));
            CU_TRY(cudaEventRecord(t->end[i], c->stream));
        }
        CU_TRY(cudaStreamSynchronize(c->stream));
        for (int i = 0; i < n; i++) {
            float one;
            if (ms[i] == NOT_TIMED) continue;
            CU_TRY(cudaEventElapsedTime(&one, t->begin[i], t->end[i]));
            if (round == 0 || one < ms[i]) ms[i] = one;
        }
    }
    return 0;
}

/* Stands for the small kernel between two GEMMs of a decoding step. */
static __global__ void chain_kernel(float *p) {
    pdl_launch_dependents();
    pdl_wait();
    p[blockIdx.x * blockDim.x + threadIdx.x] += 1;
}

/* Queues the GEMM n times over weights that are not in L2, with a small kernel before each. */
static int queue_chain(struct cuda *c, struct gemm_plan *p, const struct trial *t, const struct gemm_pick *pick, int n) {
    const size_t w_bytes = (size_t)(p->n * p->k) * dtype_size(p->in), fit = t->flush_bytes / w_bytes;
    struct cuda_gemm_args a = t->args;
    bool ran;
    for (int i = 0; i < n; i++) {
        if (fit) a.b = (const char *)t->flush + (size_t)i % fit * w_bytes / 256 * 256;
        CU_TRY(cuda_launch(c, chain_kernel, CHAIN_BLOCKS, CHAIN_THREADS, 0, t->chain));
        TRY(gemm_pick_run(c, p, pick, &a, &ran));
    }
    return 0;
}

static int time_graph(struct cuda *c, struct dev *d, const struct trial *t, void *graph, float *ms) {
    for (int round = 0; round < CHAIN_ROUNDS; round++) {
        float one;
        CU_TRY(cudaEventRecord(t->begin[0], c->stream));
        TRY(cuda_graph_run(d, graph));
        CU_TRY(cudaEventRecord(t->end[0], c->stream));
        CU_TRY(cudaStreamSynchronize(c->stream));
        CU_TRY(cudaEventElapsedTime(&one, t->begin[0], t->end[0]));
        if (round == 0 || one < *ms) *ms = one;
    }
    return 0;
}

/* Milliseconds of a GEMM and a small kernel inside a CUDA graph, where our kernels start early. */
static int time_in_graph(struct cuda *c, struct gemm_plan *p, const struct trial *t, const struct gemm_pick *pick, float *ms) {
    const int64_t fit = (int64_t)(t->flush_bytes / ((size_t)(p->n * p->k) * dtype_size(p->in)));
    const int n = (int)(fit < MIN_CHAIN ? (int64_t)MIN_CHAIN : gemm_min(fit, MAX_CHAIN));
    struct dev d = {};
    void *graph = NULL;
    d.ctx = c;
    TRY(cuda_graph_begin(&d));
    int rc = queue_chain(c, p, t, pick, n);
    const int end = cuda_graph_end(&d, &graph);
    if (rc == 0) rc = end;
    if (rc == 0) rc = time_graph(c, &d, t, graph, ms);
    if (graph) cuda_graph_free(&d, graph);
    *ms /= (float)n;
    return rc;
}

/* "algorithm 3" of the list, or "small-M kernel 0" */
static const char *pick_name(const struct gemm_pick *picks, int i, char *buf, size_t size) {
    if (picks[i].how == GEMM_SMALL_M) snprintf(buf, size, "small-M kernel %d", picks[i].small);
    else if (picks[i].how == GEMM_SMALL_M_TMA) snprintf(buf, size, "small-M TMA kernel %d", picks[i].small);
    else if (picks[i].how == GEMM_SWIGLU_UNFUSED) snprintf(buf, size, "GEMM and SwiGLU");
    else if (picks[i].how == GEMM_SWIGLU_FUSED) snprintf(buf, size, "fused SwiGLU");
    else snprintf(buf, size, "algorithm %d", i + 1);
    return buf;
}

/* The same of the fastest of them; the others' become infinite. */
static int time_fastest_in_graph(struct cuda *c, struct gemm_plan *p, const struct trial *t, const struct gemm_pick *picks, int n,
                                 float *ms) {
    float chained[MAX_TRIED];
    char plan[128], who[32];
    for (int i = 0; i < n; i++) chained[i] = NOT_TIMED;
    for (int k = 0; k < MAX_IN_GRAPH; k++) {
        int best = 0;
        for (int i = 1; i < n; i++)
            if (ms[i] < ms[best]) best = i;
        if (ms[best] == NOT_TIMED) break;
        const float alone = ms[best];
        ms[best] = NOT_TIMED;
        TRY(time_in_graph(c, p, t, &picks[best], &chained[best]));
        log_debug("cuda: %s, %lld rows: %s %.1f us alone, %.1f us in a CUDA graph", gemm_plan_name(p, plan, sizeof plan),
                  (long long)t->args.m, pick_name(picks, best, who, sizeof who), 1e3 * alone, 1e3 * chained[best]);
    }
    memcpy(ms, chained, (size_t)n * sizeof *ms);
    return 0;
}

static int autotune(struct cuda *c, struct gemm_plan *p, struct gemm_plan *base, int bucket, struct trial *t) {
    const int64_t top = gemm_bucket_top(bucket), low = bucket ? gemm_bucket_top(bucket - 1) + 1 : 1;
    struct gemm_pick picks[MAX_TRIED];
    int n, n_good = 0, first = -1, best = -1, flags[N_FLAGS];
    bool good[MAX_TRIED];
    float ms[MAX_TRIED];
    char name[128], who[2][32];
    gemm_plan_name(p, name, sizeof name);
    TRY(trial_init(c, t, p, top));
    if (!base && t->args.m < low) { /* too large to try: its pieces are large GEMMs too */
        p->pick[bucket].how = GEMM_SPLIT_COLS;
        return 0;
    }
    const int64_t tests[] = {t->args.m, low, (low + t->args.m) / 2, t->args.m - 1, 1};
    const int n_tests = (int)(sizeof tests / sizeof *tests);
    if (p->swiglu && t->args.m < low) { /* the GEMM of fewer rows was not autotuned, and must not be now */
        p->pick[bucket].how = GEMM_SWIGLU_UNFUSED;
        return 0;
    }
    TRY(candidates(c, p, base, top, picks, &n));
    TRY(make_want(c, base, t));
    if (base) TRY(check_canonical(c, base, t, tests, n_tests));
    for (int i = 0; i < n; i++) {
        good[i] = picks[i].how == GEMM_SWIGLU_UNFUSED; /* that is the definition; and its GEMM must not be autotuned now */
        const struct candidate k = {&picks[i], t->want, tests, n_tests, i};
        if (!good[i]) TRY(try_all(c, p, t, &k, &good[i]));
    }
    TRY(read_flags(c, t, flags));
    if (flags[CANONICAL])
        FAIL(ERR_INTERNAL, "cuda: %s: the canonical algorithm is not batch-invariant near %lld rows", name, (long long)top);
    for (int i = 0; i < n; i++) {
        good[i] = good[i] && !flags[i];
        ms[i] = good[i] ? 0 : NOT_TIMED;
    }
    TRY(time_all(c, p, t, picks, n, ms));
    if (c->cc >= 90 && top <= GEMM_SMALL_M_TMA_MAX) TRY(time_fastest_in_graph(c, p, t, picks, n, ms));
    for (int i = 0; i < n; i++) {
        if (!good[i]) continue;
        n_good++;
        if (first < 0) first = i;
        if (best < 0 || ms[i] < ms[best]) best = i;
    }
    c->gemm->n_autotuned++;
    if (best >= 0) {
        p->pick[bucket] = picks[best];
        log_debug("cuda: %s, rows %lld to %lld: %d of %d candidates are bitwise identical; %s takes %.1f us, %s %.1f us", name,
                  (long long)low, (long long)top, n_good, n, pick_name(picks, best, who[0], sizeof who[0]), 1e3 * ms[best],
                  pick_name(picks, first, who[1], sizeof who[1]), 1e3 * ms[first]);
        return 0;
    }
    if (!base) {
        p->pick[bucket].how = GEMM_SPLIT_COLS;
        log_debug("cuda: %s, rows %lld to %lld: none of %d candidates is bitwise identical", name, (long long)low, (long long)top,
                  n);
        return 0;
    }
    c->gemm->n_two_pass += p != base;
    p->pick[bucket] = pick_algo(&base->canonical); /* of the sums: it takes most m, if not each */
    if (p != base) p->pick[bucket].how = GEMM_TWO_PASS;
    log_debug("cuda: %s, rows %lld to %lld: none of %d candidates is bitwise identical, %s (%d of %d so far)", name, (long long)low,
              (long long)top, n, p == base ? "the canonical one serves" : "two passes serve", c->gemm->n_two_pass,
              c->gemm->n_autotuned);
    return 0;
}

int gemm_autotune(struct cuda *c, struct gemm_plan *p, struct gemm_plan *base, int bucket) {
    struct trial t;
    TRY(check_not_capturing(c, p, gemm_bucket_top(bucket)));
    const int rc = autotune(c, p, base, bucket, &t);
    trial_free(c, &t);
    if (rc != ERR_NOMEM) return rc;
    /* No memory to try: what needs no check serves for this bucket. Slower, and the same bits. */
    char name[128];
    log_warn("cuda: %s: no memory to autotune for %lld rows, a slower kernel serves", gemm_plan_name(p, name, sizeof name),
             (long long)gemm_bucket_top(bucket));
    if (p->swiglu) {
        p->pick[bucket].how = GEMM_SWIGLU_UNFUSED;
        return 0;
    }
    if (base) p->pick[bucket] = pick_algo(&base->canonical);
    if (p != base) p->pick[bucket].how = base ? GEMM_TWO_PASS : GEMM_SPLIT_COLS;
    return 0;
}
