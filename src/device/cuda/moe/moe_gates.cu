/* moe_gates.cu - the CUDA backend's ops that some families' experts have besides router, GEMMs and combination.
 *
 * Invariant: a token's results are made in one order that depends on h alone. */
#include "device/cuda/vec.cuh"

typedef __nv_bfloat16 bf16;

enum { WARPS = 4 };

static __device__ __forceinline__ float value_at(const void *p, bool half, int64_t i) {
    return half ? __bfloat162float(((const bf16 *)p)[i]) : ((const float *)p)[i];
}
static __device__ __forceinline__ void put(void *p, bool half, int64_t i, float v) {
    if (half) ((bf16 *)p)[i] = __float2bfloat16_rn(v);
    else ((float *)p)[i] = v;
}
static __device__ __forceinline__ float sigmoid_of(float x) { return __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-x))); }

/* ---- the gate of a shared expert: a warp has a row ---- */

struct row_gate {
    float *out;
    const float *from;
    const void *y, *gate, *dout;
    void *dy, *dgate;
    int64_t rows, h;
    bool half;
};

static __global__ void __launch_bounds__(32 * WARPS) row_gate_fwd_kernel(const struct row_gate a) {
    const int64_t t = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    pdl_launch_dependents();
    pdl_wait();
    if (t >= a.rows) return;
    const float s = sigmoid_of(value_at(a.gate, a.half, t));
    for (int64_t i = t * a.h + threadIdx.x % 32; i < (t + 1) * a.h; i += 32)
        a.out[i] = __fadd_rn(a.from[i], __fmul_rn(s, value_at(a.y, a.half, i)));
}

/* dy may be y: a thread reads an element before it writes it. */
static __global__ void __launch_bounds__(32 * WARPS) row_gate_bwd_kernel(const struct row_gate a) {
    const int64_t t = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    float dot = 0;
    pdl_launch_dependents();
    pdl_wait();
    if (t >= a.rows) return;
    const float s = sigmoid_of(value_at(a.gate, a.half, t));
    for (int64_t i = t * a.h + threadIdx.x % 32; i < (t + 1) * a.h; i += 32) {
        const float g = value_at(a.dout, a.half, i);
        dot = __fadd_rn(dot, __fmul_rn(g, value_at(a.y, a.half, i)));
        put(a.dy, a.half, i, __fmul_rn(s, g));
    }
    dot = warp_sum(dot);
    if (threadIdx.x % 32 == 0) put(a.dgate, a.half, t, __fmul_rn(__fmul_rn(s, __fsub_rn(1.0f, s)), dot));
}

static struct row_gate row_gate_of(const struct row_gate_args *a) {
    struct row_gate p = {};
    p.y = a->y.data;
    p.half = a->y.dt == DT_BF16;
    p.gate = a->gate.data;
    p.rows = a->y.dim[0];
    p.h = a->y.dim[1];
    return p;
}

int cuda_row_gate_fwd(struct dev *d, const struct row_gate_args *a) {
    struct row_gate p = row_gate_of(a);
    p.out = (float *)a->out.data;
    p.from = (const float *)a->from.data;
    CU_TRY(cuda_launch_pdl(cuda_of(d), row_gate_fwd_kernel, (unsigned)ceil_div(p.rows, WARPS), 32 * WARPS, 0, p));
    return 0;
}

int cuda_row_gate_bwd(struct dev *d, const struct row_gate_args *a, struct tensor dout, struct tensor dy, struct tensor dgate) {
    struct row_gate p = row_gate_of(a);
    p.dout = dout.data;
    p.dy = dy.data;
    p.dgate = dgate.data;
    CU_TRY(cuda_launch_pdl(cuda_of(d), row_gate_bwd_kernel, (unsigned)ceil_div(p.rows, WARPS), 32 * WARPS, 0, p));
    return 0;
}
