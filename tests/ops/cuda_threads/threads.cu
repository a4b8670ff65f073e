/* threads.cu - the threads of a block, or of a cluster of blocks, as fibers of one CPU thread, and a device that has the ops of the
 * kernels linked to it.
 *
 * Fibers are made by makecontext and switched by setjmp, which keeps no signal mask and so makes no system call. */
#include "device/cuda/attention/attention.cuh"
#include "device/cuda/norm_rope.cuh"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

enum { MAX_THREADS = 1024, STACK = 64 << 10, SHARED = 256 << 10, NAMED_BARRIERS = 16, MAX_CLUSTER = 2 };
enum wait { READY, WARP, BLOCK, CLUSTER, NAMED, EVENT, ENDED };
dim3 threadIdx, blockIdx, blockDim, gridDim;

alignas(1024) static char shared_memory[MAX_CLUSTER][SHARED];
char *threads_shared = shared_memory[0];

struct fiber {
    ucontext_t start;
    jmp_buf at;
    char *stack;
    bool begun;
    unsigned turn; /* of its exchanges */
};
static struct fiber fiber[MAX_THREADS];
static uint8_t state[MAX_THREADS];           /* of each thread: enum wait */
static unsigned ready[MAX_THREADS], n_ready; /* those that have their turn in the next round */
static const void *event[MAX_THREADS];
static unsigned events; /* how many wait for one */
/* Threads that wait for each other: how many have not ended, how many of these wait. */
struct partners {
    unsigned alive, waiting;
};
static struct partners warp[MAX_THREADS / 32], block[MAX_CLUSTER], whole;
static lane_bytes exchange[MAX_THREADS / 32][2][32];
static ucontext_t caller;
static jmp_buf scheduler;
static unsigned current, block_threads;      /* this thread; threads of a block of the cluster */
static unsigned cluster_blocks, first_block; /* blockIdx.x of the cluster's first */
static bool asked;                           /* for clusters of two, by a kernel that began as if it had none */
static const std::function<void()> *body;
static int eager; /* of THREADS_COPY, THREADS_WGMMA */
static uint64_t block_number;
static size_t shared_bytes;
static struct {
    void (*hook)(void *of, bool ended);
    void *of;
    bool ended; /* this cluster's threads know */
    int64_t early;
} in_front;
static struct {
    int arrived;
    bool waits[MAX_THREADS];
} named[MAX_CLUSTER][NAMED_BARRIERS];
static uint64_t drawn = 88172645463325252u;

static uint64_t draw() { /* xorshift64 */
    drawn ^= drawn << 13, drawn ^= drawn >> 7, drawn ^= drawn << 17;
    return drawn;
}
static void make_ready(unsigned i) {
    state[i] = READY;
    ready[n_ready++] = i;
}
static void pause(enum wait why) {
    state[current] = why;
    if (why == WARP) warp[current / 32].waiting++;
    else if (why == BLOCK) block[current / block_threads].waiting++;
    else if (why == CLUSTER) whole.waiting++;
    if (!_setjmp(fiber[current].at)) _longjmp(scheduler, 1);
}
static void fiber_main() {
    (*body)();
    state[current] = ENDED;
    warp[current / 32].alive--, block[current / block_threads].alive--, whole.alive--;
    _longjmp(scheduler, 1);
}
bool threads_eager(int what) { return eager & what; }
uint64_t threads_block_number() { return block_number; }
void threads_named_barrier(int id, int threads, bool wait) {
    const unsigned first = current / block_threads * block_threads;
    auto &bar = named[current / block_threads][id];
    if (++bar.arrived == threads) {
        bar.arrived = 0;
        for (unsigned i = first; i < first + block_threads; i++) {
            if (bar.waits[i]) make_ready(i);
            bar.waits[i] = false;
        }
    } else if (wait) {
        bar.waits[current] = true;
        pause(NAMED);
    }
}
void threads_block_barrier() { pause(BLOCK); }
void threads_cluster_barrier() { pause(CLUSTER); }
void threads_wait(const void *what) {
    event[current] = what, events++;
    pause(EVENT);
}
void threads_wake(const void *what) {
    for (unsigned i = 0; events > 0 && i < block_threads * cluster_blocks; i++)
        if (state[i] == EVENT && event[i] == what) make_ready(i), events--;
}
bool threads_awaited(const void *what) {
    for (unsigned i = 0; events > 0 && i < block_threads * cluster_blocks; i++)
        if (state[i] == EVENT && event[i] == what) return true;
    return false;
}
void threads_in_front(void (*hook)(void *, bool), void *of) { in_front = {hook, of, false, 0}; }
int64_t threads_early_copies() { return in_front.early; }
void threads_copy_issued() { in_front.early += !in_front.ended; }
void threads_pdl_wait() {
    if (in_front.hook && !in_front.ended) threads_wait(&in_front);
}
/* The kernel in front ends when nobody can go on before; false: nobody waits for it. */
static bool end_in_front() {
    if (in_front.ended || !threads_awaited(&in_front)) return false;
    in_front.hook(in_front.of, true);
    in_front.ended = true;
    threads_wake(&in_front);
    return true;
}
unsigned threads_number() { return current; }
size_t threads_shared_bytes() { return shared_bytes; }
unsigned threads_cluster_rank() { return current / block_threads; }
void threads_in_pairs() {
    if (cluster_blocks == 2) return;
    asked = true;
    _longjmp(scheduler, 1);
}
char *threads_shared_of(unsigned rank) { return shared_memory[rank]; }
const lane_bytes *threads_exchange(const void *mine, size_t bytes) {
    lane_bytes *all = exchange[current / 32][fiber[current].turn++ & 1];
    memcpy(all[current % 32], mine, bytes);
    pause(WARP);
    return all;
}
/* Releases threads [from, to), these partners, that wait for `what` if all of these do that have not ended. */
static bool release_all(struct partners *p, unsigned from, unsigned to, enum wait what) {
    if (p->waiting == 0 || p->waiting < p->alive) return false;
    for (unsigned i = from; i < to; i++)
        if (state[i] == what) make_ready(i);
    p->waiting = 0;
    return true;
}
/* Releases whoever all of whose partners wait with it; false: nobody could be. */
static bool release(unsigned n) {
    bool any = false;
    for (unsigned i = 0; i < n; i += 32) any |= release_all(&warp[i / 32], i, min(n, i + 32), WARP);
    for (unsigned i = 0; i < n; i += block_threads) any |= release_all(&block[i / block_threads], i, i + block_threads, BLOCK);
    return release_all(&whole, 0, n, CLUSTER) || any;
}
/* Not inline, as setjmp would lose the locals of a function that calls it. */
static __noinline__ void run_fiber(unsigned i) {
    current = i;
    threadIdx = dim3(i % block_threads), blockIdx.x = first_block + i / block_threads;
    threads_shared = shared_memory[i / block_threads];
    if (_setjmp(scheduler)) return;
    if (fiber[i].begun) _longjmp(fiber[i].at, 1);
    fiber[i].begun = true;
    setcontext(&fiber[i].start);
}
static void run_cluster() {
    const unsigned n = block_threads * cluster_blocks;
    if (n > MAX_THREADS || cluster_blocks > MAX_CLUSTER || gridDim.x % cluster_blocks) abort();
    if (cluster_blocks > 1 && block_threads % 32) abort();
    static unsigned turn[MAX_THREADS];
    whole = {n, 0}, events = 0, n_ready = 0;
    for (unsigned b = 0; b < cluster_blocks; b++) block[b] = {block_threads, 0};
    for (unsigned i = 0; i < n; i += 32) warp[i / 32] = {min(32u, n - i), 0};
    for (unsigned i = 0; i < n; i++) {
        struct fiber *f = &fiber[i];
        if (!f->stack) f->stack = (char *)malloc(STACK);
        getcontext(&f->start);
        f->start.uc_stack.ss_sp = f->stack, f->start.uc_stack.ss_size = STACK, f->start.uc_link = &caller;
        makecontext(&f->start, fiber_main, 0);
        f->begun = false, f->turn = 0;
        make_ready(i);
    }
    eager = (int)(draw() >> 40 & 3), block_number++;
    in_front.ended = false;
    if (in_front.hook) in_front.hook(in_front.of, false);
    const uint64_t slow = draw() & draw() & draw();       /* warps that run in one of 16 turns */
    memset(shared_memory, 0xff, cluster_blocks * SHARED); /* NaN */
    for (;;) {
        const unsigned turns = n_ready;
        const bool all = (draw() >> 40 & 15) == 0;
        memcpy(turn, ready, turns * sizeof *turn);
        n_ready = 0;
        for (unsigned k = 0; k < turns && !asked; k++) { /* in a random order */
            std::swap(turn[k], turn[k + (unsigned)((draw() >> 32) * (turns - k) >> 32)]);
            const unsigned i = turn[k];
            if (all || !(slow >> i / 32 & 1)) run_fiber(i);
            else make_ready(i);
        }
        if (asked) return;
        if (whole.alive == 0) return;
        if (!release(n) && n_ready == 0 && !end_in_front()) {
            fprintf(stderr, "threads: a barrier that some threads of the block never reach\n");
            abort();
        }
    }
}
void threads_run(dim3 grid, unsigned threads, size_t shared, const std::function<void()> &kernel, unsigned cluster) {
    if (shared > SHARED) abort();
    block_threads = threads, cluster_blocks = cluster, asked = false;
    body = &kernel, shared_bytes = shared;
    gridDim = grid, blockDim = dim3(threads);
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x += cluster_blocks) {
                blockIdx = dim3(x, y, z);
                first_block = x;
                run_cluster();
                if (!asked) continue;
                cluster_blocks = 2, asked = false;
                run_cluster();
            }
}

/* ---- the device ---- */

int cuda_scratch(struct cuda *c, enum cuda_scratch_id id, size_t bytes, void **out) {
    c->scratch[id] = realloc(c->scratch[id], bytes);
    *out = c->scratch[id];
    return 0;
}
static int op_alloc(struct dev *, size_t bytes, void **out) {
    *out = aligned_alloc(256, (bytes + 255) & ~(size_t)255);
    return *out ? 0 : ERR_NOMEM;
}
static void op_free(struct dev *, void *p, size_t) { free(p); }
static int op_sync(struct dev *) { return 0; }
static int op_copy(struct dev *, void *dst, const void *src, size_t bytes) {
    memcpy(dst, src, bytes);
    return 0;
}
static int op_zero(struct dev *, void *dst, size_t bytes) {
    memset(dst, 0, bytes);
    return 0;
}
static size_t op_weight_bytes(struct dev *, enum dtype dt, int64_t n, int64_t k) { return (size_t)(n * k) * dtype_size(dt); }
static int op_weight_pack(struct dev *, struct weight w, struct tensor src) {
    memcpy(w.data, src.data, (size_t)(w.n * w.k) * dtype_size(w.dt));
    return 0;
}
static float of_bf16(const void *p, int64_t i) { return __uint_as_float((uint32_t)((const uint16_t *)p)[i] << 16); }
static int op_attn_bwd(struct dev *d, const struct attn_args *a, struct tensor dout, struct tensor dq, struct tensor dk,
                       struct tensor dv) {
    struct cuda_attn p;
    void *stat;
    bool ran = false;
    TRY(attn_params("attn_bwd", a, &p));
    const int64_t n = a->q.dim[0] * a->n_q_heads;
    const size_t flags = cuda_attn_bwd_sm90_bytes(cuda_of(d), a, p);
    TRY(cuda_scratch(cuda_of(d), CUDA_SCRATCH_ATTN, (size_t)n * sizeof(float2) + flags, &stat));
    p.stat = (float2 *)stat;
    p.dout = dout.data, p.dq = dq.data, p.dk = (float *)dk.data, p.dv = (float *)dv.data;
    if (attn_is_latent(a)) return cuda_attn_bwd_latent(cuda_of(d), a, p);
    if (attn_on_tensor_cores(a)) {
        memset(p.stat + n, 0, flags);
        for (int64_t i = 0; i < n; i++) {
            float sum = 0;
            for (int c = 0; c < p.dim; c++) sum += of_bf16(p.out, i * p.dim + c) * of_bf16(p.dout, i * p.dim + c);
            p.stat[i] = make_float2(p.lse[i] * LOG2_E, sum);
        }
        TRY(cuda_attn_bwd_sm90(cuda_of(d), a, p, p.stat + n, &ran));
    }
    if (!ran) FAIL(ERR_UNSUPPORTED, "attention of another kind");
    return 0;
}
static void op_close(struct dev *d) { free(d->ctx); }
/* In place of device/open.c's, by the linker: a device of SM_COUNT multiprocessors whose blocks may have
 * SMEM_KIB of shared memory. */
extern "C" bool __wrap_dev_cuda_present(char *, size_t) { return true; }
extern "C" int __wrap_dev_open_cuda(struct dev *d, int) {
    static struct dev_ops o;
    o.name = "cuda";
    o.close = op_close, o.alloc = op_alloc, o.free = op_free, o.sync = op_sync;
    o.copy_in = o.copy_out = o.copy = op_copy, o.zero = op_zero;
    o.mla_join_fwd = cuda_mla_join_fwd, o.mla_join_bwd = cuda_mla_join_bwd, o.resize_heads = cuda_resize_heads;
    o.heads_fwd = cuda_heads_fwd, o.heads_dw = cuda_heads_dw;
    o.weight_bytes = op_weight_bytes, o.weight_pack = op_weight_pack;
    o.add_block = cuda_add_block;
    o.grouped_fwd = cuda_grouped_fwd, o.grouped_dx = cuda_grouped_dx, o.grouped_dw = cuda_grouped_dw;
    o.expert_sort = cuda_expert_sort, o.gather_rows = cuda_gather_rows;
    o.combine_fwd = cuda_combine_fwd, o.combine_bwd = cuda_combine_bwd;
    o.attn_fwd = cuda_attn_fwd, o.qkv_fwd = cuda_qkv_fwd, o.qkv_attn_fwd = cuda_qkv_attn_fwd, o.attn_bwd = op_attn_bwd;
    o.causal_conv_fwd = cuda_causal_conv_fwd, o.causal_conv_bwd = cuda_causal_conv_bwd;
    o.delta_fwd = cuda_delta_fwd, o.delta_bwd = cuda_delta_bwd;
    o.gated_norm_fwd = cuda_gated_norm_fwd, o.gated_norm_bwd = cuda_gated_norm_bwd;
    o.output_gate_fwd = cuda_output_gate_fwd, o.output_gate_bwd = cuda_output_gate_bwd;
    o.keeps_logits = cuda_keeps_logits, o.lmhead_fwd = cuda_lmhead_fwd, o.lmhead_bwd = cuda_lmhead_bwd;
    o.gate_split = cuda_gate_split, o.gate_join = cuda_gate_join;
    *d = dev{};
    struct cuda *c = (struct cuda *)calloc(1, sizeof *c);
    if (!c) return ERR_NOMEM;
    const char *const kib = getenv("SMEM_KIB"), *const sm = getenv("SM_COUNT");
    c->n_sm = sm ? atoi(sm) : 2, c->smem_max = (size_t)(kib ? atoi(kib) : 227) << 10;
    d->ops = &o, d->ctx = c;
    snprintf(d->isa, sizeof d->isa, "cuda-threads");
    return 0;
}

/* Of norm_rope.cu. */
int cuda_add_parts(struct cuda *, float *out, const float *part, int64_t n, int64_t stride, int64_t cols) {
    for (int64_t c = 0; c < cols; c++) {
        float sum = 0;
        for (int64_t i = 0; i < n; i++) sum += part[i * stride + c];
        out[c] += sum;
    }
    return 0;
}
/* In bf16, heads of at most 512; a warp has a head, and those lanes of it that have columns take part. */
static void qkv_head(const struct qkv_args *q, int64_t t, int64_t head) {
    typedef __nv_bfloat16 bf16;
    const int64_t n = q->n_q_heads + 2 * q->n_kv_heads, D = q->head_dim, k_head = head - q->n_q_heads;
    const int lanes = (int)D / 16, i = (int)threadIdx.x % lanes * CHUNK;
    const bool is_q = k_head < 0, is_v = k_head >= q->n_kv_heads;
    const bf16 *const from = (const bf16 *)q->qkv.data + (t * n + head) * D + i;
    const bf16 *const norm = (const bf16 *)(is_v ? NULL : is_q ? q->q_norm.data : q->k_norm.data);
    const int64_t slot = ((const int32_t *)q->slots.data)[t], len = q->kv.k.dim[2];
    const int64_t row = (slot / len * q->n_kv_heads + k_head % q->n_kv_heads) * len + slot % len;
    float x0[CHUNK], x1[CHUNK], w0[CHUNK], w1[CHUNK], cs[2 * CHUNK];
    load8<true>(x0, from, CHUNK), load8<true>(x1, from + D / 2, CHUNK);
    const float rs = head_rstd(x0, x1, D, lanes, q->eps);
    if (norm) {
        load8<true>(w0, norm + i, CHUNK), load8<true>(w1, norm + D / 2 + i, CHUNK);
        norm_head<bf16>(x0, x1, w0, w1, rs);
    }
    if (!is_v) load_rope<true>(cs, (const float *)q->rope.data, ((const int32_t *)q->pos.data)[t], D, i, CHUNK), rotate(x0, x1, cs);
    bf16 *const to = is_q ? (bf16 *)q->q.data + (t * q->n_q_heads + head) * D : (bf16 *)(is_v ? q->kv.v : q->kv.k).data + row * D;
    store8<true>(to + i, x0, CHUNK), store8<true>(to + D / 2 + i, x1, CHUNK);
}
int cuda_qkv_fwd(struct dev *, const struct qkv_args *q) {
    const int64_t n = q->n_q_heads + 2 * q->n_kv_heads;
    if (q->qkv.dt != DT_BF16 || q->head_dim % 64) FAIL(ERR_UNSUPPORTED, "qkv of another kind");
    threads_run(dim3((unsigned)(q->qkv.dim[0] * n)), 32, 0, [&] { qkv_head(q, blockIdx.x / n, blockIdx.x % n); });
    return 0;
}
