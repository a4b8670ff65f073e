/* cuda_graph.cu - CUDA graphs, the end of a decoding step on the device (sampling is sampler.cu's), and timestamps
 * of the compute stream (events).
 *
 * Invariant: the uniform number of a token is that of base/rng.c at the same address,
 * so a decoding loop on the device draws what a loop on the host would. */
#include "device/cuda/lm_head/log_softmax.cuh"

#include <cuda.h>
#include <cxxabi.h>
#include <stdlib.h>

/* rng_token of base/rng.c: Philox4x32-10 (Salmon et al., SC 2011), 24 bits of its first word. */
__device__ static float token_uniform(const struct decode_row *w) {
    uint32_t c0 = (uint32_t)w->uid, c1 = (uint32_t)(w->uid >> 32), c2 = w->sample, c3 = w->at;
    uint32_t k0 = (uint32_t)w->seed, k1 = (uint32_t)(w->seed >> 32);
    for (int r = 0; r < 10; r++) {
        const uint32_t hi0 = __umulhi(0xD2511F53u, c0), lo0 = 0xD2511F53u * c0;
        const uint32_t hi1 = __umulhi(0xCD9E8D57u, c2), lo1 = 0xCD9E8D57u * c2;
        c0 = hi1 ^ c1 ^ k0;
        c1 = lo1;
        c2 = hi0 ^ c3 ^ k1;
        c3 = lo0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return (float)(c0 >> 8) * 0x1p-24f;
}

/* Sampling parameters of this step; the step counts up, which only the last kernel reads. */
__global__ static void sample_params_kernel(struct sample_param *param, float *inv_temp, int32_t *step,
                                            const struct decode_row *rows, int64_t n) {
    const int64_t r = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    pdl_launch_dependents();
    pdl_wait();
    if (r == 0) *step += 1;
    if (r >= n) return;
    param[r] = rows[r].rule;
    param[r].u = token_uniform(&rows[r]);
    inv_temp[r] = rows[r].rule.inv_temp;
}

struct advance_args {
    struct decode_row *rows;
    const int32_t *stop, *block_table, *drawn, *step;
    const float *logp, *kept;
    int32_t *ids, *pos, *slots, *out_id;
    float *out_logp, *out_kept;
    int64_t n, n_stop, max_blocks, block_len;
};

__global__ static void advance_kernel(struct advance_args a) {
    const int64_t r = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    pdl_launch_dependents();
    pdl_wait();
    if (r >= a.n) return;
    struct decode_row *w = &a.rows[r];
    if (w->left == 0) return;
    const int64_t at = (int64_t)(*a.step - 1) * a.n + r;
    const int32_t id = a.drawn[r];
    a.out_id[at] = id;
    a.out_logp[at] = a.logp[r];
    a.out_kept[at] = a.kept[r];
    bool ended = false;
    for (int64_t i = 0; i < a.n_stop; i++) ended |= a.stop[r * a.n_stop + i] == id;
    w->at++;
    w->left = ended ? 0 : w->left - 1;
    if (w->left == 0) return;
    const int64_t pos = a.pos[r] + 1;
    a.pos[r] = (int32_t)pos;
    a.ids[r] = id;
    a.slots[r] = (int32_t)(a.block_table[r * a.max_blocks + pos / a.block_len] * a.block_len + pos % a.block_len);
}

/* Scratch between the kernels of a step. */
struct step_mem {
    struct sample_param *param;             /* (n) */
    struct tensor inv_temp, id, logp, kept; /* (n) */
    head_stats *tiles;                      /* (tiles of the vocabulary, n) */
};

static int step_take(struct cuda *c, int64_t n, int64_t vocab, struct step_mem *m) {
    const auto padded = [](size_t bytes) { return (bytes + 255) & ~(size_t)255; };
    const size_t params = padded((size_t)n * sizeof(struct sample_param)), column = padded((size_t)n * 4);
    void *p;
    TRY(cuda_scratch(c, CUDA_SCRATCH_DECODE, params + 4 * column + (size_t)(head_tiles(vocab) * n) * sizeof(head_stats), &p));
    char *columns = (char *)p + params;
    m->param = (struct sample_param *)p;
    m->inv_temp = tensor_1d(columns, DT_F32, n);
    m->id = tensor_1d(columns + column, DT_I32, n);
    m->logp = tensor_1d(columns + 2 * column, DT_F32, n);
    m->kept = tensor_1d(columns + 3 * column, DT_F32, n);
    m->tiles = (head_stats *)(columns + 4 * column);
    return 0;
}

/* From FUSED_ROWS rows on the fused head kernel is faster than the library's GEMM and a pass over its logits. */
enum { FUSED_ROWS = 129, BLOCK = 128 };

int cuda_decode_next(struct dev *d, const struct decode_args *a) {
    struct cuda *c = cuda_of(d);
    const int64_t n = a->logits.dim[0];
    const unsigned blocks = (unsigned)((n + BLOCK - 1) / BLOCK);
    struct step_mem m;
    bool fused = false;
    TRY(step_take(c, n, a->logits.dim[1], &m));
    if (a->x.nd && n >= FUSED_ROWS) TRY(cuda_head_fused(c, a->x, a->w, &fused));
    CU_TRY(cuda_launch(c, sample_params_kernel, blocks, BLOCK, 0, m.param, (float *)m.inv_temp.data, (int32_t *)a->step.data,
                       (const struct decode_row *)a->rows.data, n));
    if (fused) TRY(cuda_head_fused_logits(c, a->x, a->w, (const float *)m.inv_temp.data, (float *)a->logits.data, m.tiles));
    else if (a->x.nd) TRY(cuda_logits(d, a->logits, a->x, a->w));
    struct sample_args s = {};
    s.logits = a->logits, s.param = m.param;
    s.id = m.id, s.logp = m.logp, s.logp_kept = m.kept;
    TRY(cuda_sample_device(c, &s, fused ? m.tiles : NULL));
    const struct advance_args move = {(struct decode_row *)a->rows.data,
                                      (const int32_t *)a->stop.data,
                                      (const int32_t *)a->block_table.data,
                                      (const int32_t *)m.id.data,
                                      (const int32_t *)a->step.data,
                                      (const float *)m.logp.data,
                                      (const float *)m.kept.data,
                                      (int32_t *)a->ids.data,
                                      (int32_t *)a->pos.data,
                                      (int32_t *)a->slots.data,
                                      (int32_t *)a->id.data,
                                      (float *)a->logp.data,
                                      (float *)a->logp_kept.data,
                                      n,
                                      a->stop.data ? a->stop.dim[1] : 0,
                                      a->block_table.dim[1],
                                      a->block_len};
    CU_TRY(cuda_launch(c, advance_kernel, blocks, BLOCK, 0, move));
    return 0;
}

/* ---- a graph's nodes, for people ---- */

struct node_names { /* of the driver, 12.3 and newer; NULL: it has none */
    CUresult (*params)(CUgraphNode, CUDA_KERNEL_NODE_PARAMS *);
    CUresult (*function)(const char **, CUfunction);
    CUresult (*kernel)(const char **, CUkernel);
};

static void write_kernel(const struct node_names *names, cudaGraphNode_t node, FILE *to) {
    CUDA_KERNEL_NODE_PARAMS k = {};
    const char *name = NULL;
    int rc = -1;
    const bool known = names->params && names->params(node, &k) == CUDA_SUCCESS;
    if (known && k.func && names->function) (void)names->function(&name, k.func);
    if (known && !name && k.kern && names->kernel) (void)names->kernel(&name, k.kern);
    char *const plain = name ? abi::__cxa_demangle(name, NULL, NULL, &rc) : NULL;
    fprintf(to, "kernel %s, %ux%ux%u blocks of %u\n",
            plain  ? plain
            : name ? name
                   : "?",
            k.gridDimX, k.gridDimY, k.gridDimZ, k.blockDimX * k.blockDimY * k.blockDimZ);
    free(plain);
}

static int write_node(const struct node_names *names, cudaGraphNode_t node, FILE *to) {
    cudaGraphNodeType type;
    CU_TRY(cudaGraphNodeGetType(node, &type));
    if (type == cudaGraphNodeTypeKernel) {
        write_kernel(names, node, to);
    } else if (type == cudaGraphNodeTypeMemcpy) {
        cudaMemcpy3DParms m = {};
        CU_TRY(cudaGraphMemcpyNodeGetParams(node, &m));
        fprintf(to, "copy %zu bytes\n", m.extent.width * m.extent.height * m.extent.depth);
    } else if (type == cudaGraphNodeTypeMemset) {
        cudaMemsetParams m = {};
        CU_TRY(cudaGraphMemsetNodeGetParams(node, &m));
        fprintf(to, "memset %zu bytes\n", m.width * m.height * m.elementSize);
    } else {
        fprintf(to, "node of kind %d\n", (int)type);
    }
    return 0;
}

static int write_nodes(cudaGraph_t g, cudaGraphNode_t *nodes, size_t n, FILE *to) {
    struct node_names names = {};
    CU_TRY(cudaGraphGetNodes(g, nodes, &n));
    cuda_driver_has("cuGraphKernelNodeGetParams", (void **)&names.params);
    cuda_driver_has("cuFuncGetName", (void **)&names.function);
    cuda_driver_has("cuKernelGetName", (void **)&names.kernel);
    fprintf(to, "graph of %zu nodes\n", n);
    for (size_t i = 0; i < n; i++) TRY(write_node(&names, nodes[i], to));
    return 0;
}

static int list_nodes(cudaGraph_t g, FILE *to) {
    size_t n = 0;
    CU_TRY(cudaGraphGetNodes(g, NULL, &n));
    cudaGraphNode_t *const nodes = (cudaGraphNode_t *)calloc(n + 1, sizeof *nodes);
    if (!nodes) FAIL(ERR_NOMEM, "cuda: out of host memory");
    const int rc = write_nodes(g, nodes, n, to);
    free(nodes);
    return rc;
}

/* ---- CUDA graphs ---- */

int cuda_graph_begin(struct dev *d) {
    CU_TRY(cudaStreamBeginCapture(cuda_of(d)->stream, cudaStreamCaptureModeThreadLocal));
    cuda_of(d)->capturing = true;
    return 0;
}

int cuda_graph_end(struct dev *d, void **graph) {
    cudaGraph_t g = NULL;
    cudaGraphExec_t exec = NULL;
    cuda_of(d)->capturing = false;
    CU_TRY(cudaStreamEndCapture(cuda_of(d)->stream, &g));
    const cudaError_t e = cudaGraphInstantiate(&exec, g, 0);
    *graph = e == cudaSuccess ? exec : NULL;
    const int rc = e == cudaSuccess && d->graph_list ? list_nodes(g, d->graph_list) : 0;
    (void)cudaGraphDestroy(g);
    CU_TRY(e);
    return rc;
}

int cuda_graph_run(struct dev *d, void *graph) {
    CU_TRY(cudaGraphLaunch((cudaGraphExec_t)graph, cuda_of(d)->stream));
    return 0;
}

void cuda_graph_free(struct dev *d, void *graph) {
    (void)d;
    (void)cudaGraphExecDestroy((cudaGraphExec_t)graph);
}

/* ---- timestamps ---- */

int cuda_stamp_on(struct cuda *c, cudaStream_t s, int64_t i) {
    if (i >= c->n_stamps) {
        const int64_t n = i + 1 > 2 * c->n_stamps ? i + 1 + 1024 : 2 * c->n_stamps;
        cudaEvent_t *grown = (cudaEvent_t *)realloc(c->stamps, (size_t)n * sizeof *grown);
        if (!grown) FAIL(ERR_NOMEM, "cuda: out of host memory for %lld events", (long long)n);
        c->stamps = grown;
        for (; c->n_stamps < n; c->n_stamps++) CU_TRY(cudaEventCreate(&c->stamps[c->n_stamps]));
    }
    CU_TRY(cudaEventRecord(c->stamps[i], s));
    return 0;
}

int cuda_stamp(struct dev *d, int64_t i) { return cuda_stamp_on(cuda_of(d), cuda_of(d)->stream, i); }

int cuda_stamp_us(struct dev *d, int64_t i, double *us) {
    float ms = 0;
    CU_TRY(cudaEventElapsedTime(&ms, cuda_of(d)->stamps[0], cuda_of(d)->stamps[i]));
    *us = (double)ms * 1e3;
    return 0;
}
