/* gpu_delta_inexact.cuh - inexact forms of the gated delta rule, as fast as we can make them: what exactness is measured beside
 * (docs/kernels/delta_net.md). Heads of 128, bf16; the library has none of them.
 *
 * A decoding step is the plain recurrence: a state of f32 (or bf16) is read once and written once. Rows of a prefill or of training
 * go by chunks of 64: with x_k, x_q as they came, S the state at the chunk's start, G_i the sum of g up to row i,
 *   e = T' (v - (exp(G_i) / |x_k,i|) x_k S),  T' = (I + A)^-1 diag(beta),  A_ij = beta_i k_i.k_j exp(G_i - G_j), j < i
 *   out = (exp(G_i) / |x_q,i| / sqrt(128)) x_q S + P e,  P_ij = q_i.k_j exp(G_i - G_j), j <= i
 *   S' = exp(G_63) S + x_k^T ((exp(G_63 - G_j) / |x_k,j|) e)
 * T' and P need no state: they are made of all chunks at once (parts), or by four warps of the block for the chunk after that which
 * its other eight warps are at (delta_one). Products are bf16 mma with f32 sums. A warp of `consume` has 16 value columns and
 * holds S^T of them as accumulators, which are its own next operand: no S goes through memory, and no two warps exchange anything.
 *
 * Invariant: none of bits. S, u, e, T', P are rounded to bf16 where they are operands, as flash-linear-attention's are. */
#ifndef VERLC_TOOLS_GPU_DELTA_INEXACT_CUH
#define VERLC_TOOLS_GPU_DELTA_INEXACT_CUH

#include "device/cuda/ptx.cuh"

#include <math.h>

enum {
    DIM = 128,        /* elements of a head */
    CHUNK_ROWS = 64,  /* rows of a chunk */
    PARTS = 4,        /* of a chunk, 16 rows each */
    TILES = 10,       /* of 16 x 16 on and below a chunk's diagonal */
    LD = DIM + 8,     /* bf16 between rows in shared memory: ldmatrix meets no bank twice */
    LD_TILE = 16 + 8, /* likewise in a tile */
    COLUMN_WARPS = DIM / 16,
    PART_WARPS = PARTS,
    PART_THREADS = 32 * PART_WARPS,
};
typedef uint16_t bf16_bits;

struct delta_shape {
    int hk, hv, group, n; /* heads, value heads of a key head; sequences */
    int width, ba_width;  /* of rows of qkv: q, k, v heads; of ba: b, then a of each value head, then others */
    const int *start;     /* (n + 1) rows where sequences begin */
    int max_chunks;       /* of a sequence */
    const bf16_bits *qkv, *ba, *a_log, *dt_bias;
    bf16_bits *out;    /* (rows, hv * DIM) */
    float *s;          /* (slots, hv, DIM, DIM): what a sequence leaves, or the state of a step */
    bf16_bits *s16;    /* the same of steps with states of bf16 */
    const int *slot;   /* of steps: (n) */
    float *states, *e; /* what backward reads, as device/ops.h's delta_args; NULL: not kept */
    bf16_bits *tiles;  /* parts to scan: (n, max_chunks, hv, 2, TILES, 16, 16), and scales of each */
    struct chunk_scales *scales;
};
/* Of a chunk's rows: what x_k S, x_q S and e are multiplied with; and S. */
struct chunk_scales {
    float by_k[CHUNK_ROWS], by_q[CHUNK_ROWS], left[CHUNK_ROWS], last, pad[3];
};
struct chunk_rows {
    bf16_bits x[CHUNK_ROWS][LD];
};
/* T' and P. */
struct chunk_parts {
    bf16_bits t[TILES][16][LD_TILE], p[TILES][16][LD_TILE];
    chunk_scales scales;
};
static __device__ __forceinline__ int tile_of(int row, int col) { return row * (row + 1) / 2 + col; }

static __device__ __forceinline__ float bf16_low(uint32_t x) { return __uint_as_float(x << 16); }
static __device__ __forceinline__ float bf16_high(uint32_t x) { return __uint_as_float(x & 0xffff0000u); }
static __device__ __forceinline__ float bf16_float(bf16_bits x) { return __uint_as_float((uint32_t)x << 16); }
static __device__ __forceinline__ bf16_bits float_bf16(float x) { return (bf16_bits)pack_bf16(x, 0.0f); }
static __device__ __forceinline__ float exp_of(float x) { return exp2_approx(x * 1.4426950408889634f); }
static __device__ __forceinline__ float beta_of(const delta_shape &j, int64_t t, int n) {
    return bf16_float(float_bf16(1.0f / (1.0f + expf(-bf16_float(j.ba[t * j.ba_width + n])))));
}
/* g of a token. */
static __device__ __forceinline__ float gate_of(const delta_shape &j, int64_t t, int n) {
    const float x = bf16_float(j.ba[t * j.ba_width + j.hv + n]) + bf16_float(j.dt_bias[n]);
    return -expf(bf16_float(j.a_log[n])) * (x > 20 ? x : log1pf(expf(x)));
}

#ifndef VERLC_STMATRIX_TRANS
/* The inverse of ldmatrix_x4_trans. */
static __device__ __forceinline__ void stmatrix_x4_trans(uint32_t addr, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
}
#endif

/* Where the row of 16 bytes is whose address this lane gives for a 16 x 16 tile at x, ld numbers between rows; what the words are:
 * B_DIRECT: rows of x are columns of B: b0, b1 of B's columns 0-7, then of 8-15. Of C, transposed: rows 0-7 and 8-15 of its columns
 * 0-7, then of 8-15, as accumulators have them.
 * B_TRANS: rows of x are rows of B; the words as before.
 * A_DIRECT: a[0] to a[3] of A. A_TRANS: of A whose transpose is x. */
enum tile_order { B_DIRECT, B_TRANS, A_DIRECT, A_TRANS };
static __device__ __forceinline__ uint32_t tile_address(const bf16_bits *x, int ld, tile_order how) {
    const int lane = (int)(threadIdx.x & 31), in = lane & 7, first = lane >> 3 & 1, second = lane >> 4;
    const bool rows_first = how == B_TRANS || how == A_DIRECT;
    return smem_addr(x + (in + 8 * (rows_first ? first : second)) * ld + 8 * (rows_first ? second : first));
}
/* 16 x 16 of an A operand from two accumulator tiles. */
static __device__ __forceinline__ void operand_of(uint32_t (&a)[4], const float (&c0)[4], const float (&c1)[4]) {
    a[0] = pack_bf16(c0[0], c0[1]), a[1] = pack_bf16(c0[2], c0[3]);
    a[2] = pack_bf16(c1[0], c1[1]), a[3] = pack_bf16(c1[2], c1[3]);
}

/* ---- what needs no state ---- */

struct parts_scratch {
    bf16_bits a[TILES][16][LD_TILE];   /* A below the diagonal tiles (tiles of the diagonal are not used) */
    bf16_bits inv[PARTS][16][LD_TILE]; /* (I + A)^-1 of the diagonal tiles */
    float diag[PARTS][16][16];         /* A of them */
    float kk[CHUNK_ROWS], qq[CHUNK_ROWS], g[CHUNK_ROWS], beta[CHUNK_ROWS], rk[CHUNK_ROWS], rq[CHUNK_ROWS];
    float sum; /* of g of the first 32 rows */
};

/* (I + A)^-1 of a diagonal tile: a lane has a column; the upper half of the warp writes it times beta. */
static __device__ __forceinline__ void invert_tile(parts_scratch &m, chunk_parts &to, int part) {
    const int lane = (int)(threadIdx.x & 31), c = lane & 15;
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        float even = i == c ? 1.0f : 0.0f, odd = 0;
#pragma unroll
        for (int j = 0; j < i; j++) {
            const float a = m.diag[part][i][j];
            if (j & 1) odd = fmaf(-a, x[j], odd);
            else even = fmaf(-a, x[j], even);
        }
        x[i] = even + odd;
    }
    const float by = lane < 16 ? 1.0f : m.beta[16 * part + c];
    bf16_bits(*const y)[LD_TILE] = lane < 16 ? m.inv[part] : to.t[tile_of(part, part)];
#pragma unroll
    for (int i = 0; i < 16; i++) y[i][c] = float_bf16(x[i] * by);
}
/* Column `col` of tiles of T', from its diagonal tile down: X_p = -inv_p sum of A_pr X_r, as transposed products whose accumulators
 * are the next operands. */
static __device__ __forceinline__ void invert_column(const parts_scratch &m, chunk_parts &to, int col) {
    const int lane = (int)(threadIdx.x & 31), g = lane / 4, t = lane & 3;
    uint32_t y[PARTS][4], b[4];
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        if (p < col) continue;
        if (p == col) {
            ldmatrix_x4_trans(y[p], tile_address(m.inv[p][0], LD_TILE, A_TRANS));
            continue;
        }
        float z[2][4] = {}, w[2][4] = {};
        uint32_t a[4];
#pragma unroll
        for (int r = 0; r < p; r++) {
            if (r < col) continue;
            ldmatrix_x4(b, tile_address(m.a[tile_of(p, r)][0], LD_TILE, B_DIRECT));
            mma_bf16(z[0], y[r], b[0], b[1]);
            mma_bf16(z[1], y[r], b[2], b[3]);
        }
        operand_of(a, z[0], z[1]);
        ldmatrix_x4(b, tile_address(m.inv[p][0], LD_TILE, B_DIRECT));
        mma_bf16(w[0], a, b[0], b[1]);
        mma_bf16(w[1], a, b[2], b[3]);
        const float lo = m.beta[16 * col + g], hi = m.beta[16 * col + g + 8];
        bf16_bits(*const tile)[LD_TILE] = to.t[tile_of(p, col)];
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int x = 0; x < 4; x++) {
                w[n][x] = -w[n][x];
                tile[8 * n + 2 * t + (x & 1)][g + (x & 2 ? 8 : 0)] = float_bf16(w[n][x] * (x & 2 ? hi : lo));
            }
        operand_of(y[p], w[0], w[1]);
    }
}

/* T', P and scales of a chunk whose first row is row t of the batch, of which n are there (others are zeros). warp: of PART_WARPS, each
 * with 16 rows; sync: their barrier, which is also needed before what this writes is read. */
template <class Sync>
static __device__ __forceinline__ void make_parts(const delta_shape &j, parts_scratch &m, chunk_parts &to, const chunk_rows &k,
                                                  const chunk_rows &q, int64_t t, int n, int head, int warp, const Sync &sync) {
    const int lane = (int)(threadIdx.x & 31), g = lane / 4, c2 = 2 * (lane & 3), row = 32 * warp + lane;
    float decay = 0, beta = 0;
    if (row < n) beta = beta_of(j, t + row, head), decay = gate_of(j, t + row, head);
    float kk[PARTS][2][4] = {}, qk[PARTS][2][4] = {}, qq[2][4] = {};
    for (int d = 0; d < DIM; d += 16) {
        uint32_t ak[4], aq[4], b[4];
        ldmatrix_x4(ak, tile_address(&k.x[16 * warp][d], LD, A_DIRECT));
        ldmatrix_x4(aq, tile_address(&q.x[16 * warp][d], LD, A_DIRECT));
        ldmatrix_x4(b, tile_address(&q.x[16 * warp][d], LD, B_DIRECT));
        mma_bf16(qq[0], aq, b[0], b[1]);
        mma_bf16(qq[1], aq, b[2], b[3]);
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            if (p > warp) continue;
            ldmatrix_x4(b, tile_address(&k.x[16 * p][d], LD, B_DIRECT));
#pragma unroll
            for (int h = 0; h < 2; h++) {
                mma_bf16(kk[p][h], ak, b[2 * h], b[2 * h + 1]);
                mma_bf16(qk[p][h], aq, b[2 * h], b[2 * h + 1]);
            }
        }
    }
#pragma unroll
    for (int p = 0; p < PARTS; p++) /* |x|^2 of rows: the diagonal */
        if (p == warp)
#pragma unroll
            for (int x = 0; x < 2; x++)
                if (g == c2 + x) {
                    m.kk[16 * p + g] = kk[p][0][x], m.kk[16 * p + g + 8] = kk[p][1][x + 2];
                    m.qq[16 * p + g] = qq[0][x], m.qq[16 * p + g + 8] = qq[1][x + 2];
                }
    if (warp < 2) {
#pragma unroll
        for (int by = 1; by < 32; by *= 2) {
            const float up = __shfl_up_sync(WARP_ALL, decay, by);
            if (lane >= by) decay += up;
        }
        m.g[row] = decay, m.beta[row] = beta;
        if (row == 31) m.sum = decay;
    }
    sync();
    if (warp < 2) {
        const float last = m.g[CHUNK_ROWS - 1] + m.sum, sum = decay + (warp ? m.sum : 0.0f);
        const float rk = rsqrtf(m.kk[row] + 1e-6f), rq = rsqrtf(m.qq[row] + 1e-6f) * 0.08838834764831845f, by = exp_of(sum);
        m.rk[row] = rk, m.rq[row] = rq;
        to.scales.by_k[row] = by * rk, to.scales.by_q[row] = by * rq, to.scales.left[row] = exp_of(last - sum) * rk;
        if (row == 0) to.scales.last = exp_of(last);
    }
    sync();
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        if (p > warp) continue;
#pragma unroll
        for (int h = 0; h < 4; h++) { /* n tile h / 2, rows g + 8 (h % 2) */
            const int i = g + 8 * (h & 1), c = 8 * (h / 2) + c2, at = 16 * warp + i, of = 16 * p + c;
            const float sum = m.g[at] + (at < 32 ? 0.0f : m.sum), beta_k = m.beta[at] * m.rk[at], rq = m.rq[at];
            float a[2], b[2];
#pragma unroll
            for (int x = 0; x < 2; x++) {
                const float left = exp_of(sum - (m.g[of + x] + (of + x < 32 ? 0.0f : m.sum))) * m.rk[of + x];
                a[x] = of + x < at ? kk[p][h / 2][2 * (h & 1) + x] * beta_k * left : 0.0f;
                b[x] = of + x <= at ? qk[p][h / 2][2 * (h & 1) + x] * rq * left : 0.0f;
            }
            *(uint32_t *)&to.p[tile_of(warp, p)][i][c] = pack_bf16(b[0], b[1]);
            if (p < warp) *(uint32_t *)&m.a[tile_of(warp, p)][i][c] = pack_bf16(a[0], a[1]);
            else m.diag[warp][i][c] = a[0], m.diag[warp][i][c + 1] = a[1];
        }
    }
    __syncwarp();
    invert_tile(m, to, warp);
    sync();
    invert_column(m, to, warp);
}

/* ---- a chunk's rows of 16 value columns ---- */

/* What a warp of consume knows: its columns' first one of head n of value heads, the sequence. */
struct columns_of {
    int head, column, sequence;
};

/* acc (columns, rows of AT_ONCE parts from the part on) = S^T x^T. */
template <int AT_ONCE>
static __device__ __forceinline__ void by_state(float (&acc)[2 * AT_ONCE][4], const float (&s)[DIM / 8][4], const chunk_rows &x,
                                                int part) {
#pragma unroll
    for (int i = 0; i < 2 * AT_ONCE; i++) acc[i][0] = acc[i][1] = acc[i][2] = acc[i][3] = 0;
#pragma unroll
    for (int d = 0; d < DIM / 16; d++) {
        uint32_t a[4], b[4];
        operand_of(a, s[2 * d], s[2 * d + 1]);
#pragma unroll
        for (int p = 0; p < AT_ONCE; p++) {
            ldmatrix_x4(b, tile_address(&x.x[16 * (part + p)][16 * d], LD, B_DIRECT));
            mma_bf16(acc[2 * p], a, b[0], b[1]);
            mma_bf16(acc[2 * p + 1], a, b[2], b[3]);
        }
    }
}
/* u of AT_ONCE parts as operands. */
template <int AT_ONCE>
static __device__ __forceinline__ void make_u(uint32_t (&u)[PARTS][4], const float (&s)[DIM / 8][4], const chunk_rows &k,
                                              const chunk_rows &v, const chunk_scales &by, int column, bool first, int part) {
    const int t2 = 2 * ((int)threadIdx.x & 3);
    float acc[2 * AT_ONCE][4];
    if (!first) by_state<AT_ONCE>(acc, s, k, part);
#pragma unroll
    for (int p = 0; p < AT_ONCE; p++) {
        uint32_t x[4];
        ldmatrix_x4_trans(x, tile_address(&v.x[16 * (part + p)][column], LD, B_DIRECT));
        if (first) { /* words: rows 0-7 of columns 0-7, 8-15, rows 8-15 of them, which is A's order */
#pragma unroll
            for (int i = 0; i < 4; i++) u[part + p][i] = x[i];
            continue;
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float b0 = by.by_k[16 * (part + p) + 8 * h + t2], b1 = by.by_k[16 * (part + p) + 8 * h + t2 + 1];
            float(&c)[4] = acc[2 * p + h];
            u[part + p][2 * h] = pack_bf16(bf16_low(x[2 * h]) - b0 * c[0], bf16_high(x[2 * h]) - b1 * c[1]);
            u[part + p][2 * h + 1] = pack_bf16(bf16_low(x[2 * h + 1]) - b0 * c[2], bf16_high(x[2 * h + 1]) - b1 * c[3]);
        }
    }
}
/* u becomes e = T' u, AT_ONCE parts at a time from the last, since a part reads those before it. */
template <int AT_ONCE> static __device__ __forceinline__ void make_e(uint32_t (&u)[PARTS][4], const chunk_parts &parts) {
#pragma unroll
    for (int part = PARTS - AT_ONCE; part >= 0; part -= AT_ONCE) {
        float e[2 * AT_ONCE][4] = {};
#pragma unroll
        for (int q = 0; q < part + AT_ONCE; q++)
#pragma unroll
            for (int p = 0; p < AT_ONCE; p++) {
                if (part + p < q) continue;
                uint32_t b[4];
                ldmatrix_x4(b, tile_address(parts.t[tile_of(part + p, q)][0], LD_TILE, B_DIRECT));
                mma_bf16(e[2 * p], u[q], b[0], b[1]);
                mma_bf16(e[2 * p + 1], u[q], b[2], b[3]);
            }
#pragma unroll
        for (int p = 0; p < AT_ONCE; p++) operand_of(u[part + p], e[2 * p], e[2 * p + 1]);
    }
}
/* The outputs of AT_ONCE parts over the warp's columns of v. */
template <int AT_ONCE>
static __device__ __forceinline__ void make_out(chunk_rows &v, const float (&s)[DIM / 8][4], const uint32_t (&e)[PARTS][4],
                                                const chunk_rows &q, const chunk_parts &parts, int column, bool first, int part) {
    const int t2 = 2 * ((int)threadIdx.x & 3);
    float o[2 * AT_ONCE][4];
    if (first) {
#pragma unroll
        for (int i = 0; i < 2 * AT_ONCE; i++) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0;
    } else {
        by_state<AT_ONCE>(o, s, q, part);
#pragma unroll
        for (int i = 0; i < 2 * AT_ONCE; i++) {
            const float b0 = parts.scales.by_q[16 * part + 8 * i + t2], b1 = parts.scales.by_q[16 * part + 8 * i + t2 + 1];
            o[i][0] *= b0, o[i][1] *= b1, o[i][2] *= b0, o[i][3] *= b1;
        }
    }
#pragma unroll
    for (int r = 0; r < PARTS; r++)
#pragma unroll
        for (int p = 0; p < AT_ONCE; p++) {
            if (part + p < r) continue;
            uint32_t b[4];
            ldmatrix_x4(b, tile_address(parts.p[tile_of(part + p, r)][0], LD_TILE, B_DIRECT));
            mma_bf16(o[2 * p], e[r], b[0], b[1]);
            mma_bf16(o[2 * p + 1], e[r], b[2], b[3]);
        }
#pragma unroll
    for (int p = 0; p < AT_ONCE; p++) {
        uint32_t x[4];
        operand_of(x, o[2 * p], o[2 * p + 1]);
        stmatrix_x4_trans(tile_address(&v.x[16 * (part + p)][column], LD, B_DIRECT), x);
    }
}
/* S of the chunk's end. */
static __device__ __forceinline__ void next_state(float (&s)[DIM / 8][4], const uint32_t (&e)[PARTS][4], const chunk_rows &k,
                                                  const chunk_scales &by) {
    const int t2 = 2 * ((int)threadIdx.x & 3);
    const float last = by.last;
#pragma unroll
    for (int d = 0; d < DIM / 8; d++) s[d][0] *= last, s[d][1] *= last, s[d][2] *= last, s[d][3] *= last;
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *const left = &by.left[16 * p + 8 * (i / 2) + t2];
            a[i] = pack_bf16(bf16_low(e[p][i]) * left[0], bf16_high(e[p][i]) * left[1]);
        }
#pragma unroll
        for (int d = 0; d < DIM / 16; d++) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, tile_address(&k.x[16 * p][16 * d], LD, B_TRANS));
            mma_bf16(s[2 * d], a, b[0], b[1]);
            mma_bf16(s[2 * d + 1], a, b[2], b[3]);
        }
    }
}
/* The warp's columns of S, to or from (DIM, DIM). */
static __device__ __forceinline__ void store_state(float *to, const float (&s)[DIM / 8][4], int column) {
    const int lane = (int)(threadIdx.x & 31), g = lane / 4, t2 = 2 * (lane & 3);
#pragma unroll
    for (int d = 0; d < DIM / 8; d++)
#pragma unroll
        for (int x = 0; x < 4; x++) to[(8 * d + t2 + (x & 1)) * DIM + column + g + (x & 2 ? 8 : 0)] = s[d][x];
}
static __device__ __forceinline__ void store_e(float *to, int64_t stride, int n, const uint32_t (&e)[PARTS][4]) {
    const int lane = (int)(threadIdx.x & 31), g = lane / 4, t2 = 2 * (lane & 3);
#pragma unroll
    for (int p = 0; p < PARTS; p++)
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int x = 0; x < 2; x++) {
                const int row = 16 * p + 8 * (i / 2) + t2 + x;
                if (row < n) to[row * stride + g + (i & 1 ? 8 : 0)] = x ? bf16_high(e[p][i]) : bf16_low(e[p][i]);
            }
}
/* A chunk, whose first row is t, of n rows. AT_ONCE: parts whose products with S a warp has in registers at a time. */
template <int AT_ONCE, bool KEPT>
static __device__ __forceinline__ void consume(const delta_shape &j, float (&s)[DIM / 8][4], const chunk_rows &k,
                                               const chunk_rows &q, chunk_rows &v, const chunk_parts &parts, const columns_of &w,
                                               int chunk, int64_t t, int n) {
    const int lane = (int)(threadIdx.x & 31);
    const bool first = chunk == 0;
    uint32_t e[PARTS][4]; /* u at first */
    if (KEPT && !first) {
        const int64_t entry = j.start[w.sequence] / CHUNK_ROWS + chunk - 1;
        store_state(j.states + (entry * j.hv + w.head) * DIM * DIM, s, w.column);
    }
#pragma unroll
    for (int p = 0; p < PARTS; p += AT_ONCE) make_u<AT_ONCE>(e, s, k, v, parts.scales, w.column, first, p);
    make_e<AT_ONCE>(e, parts);
    if (KEPT) store_e(j.e + (t * j.hv + w.head) * DIM + w.column, (int64_t)j.hv * DIM, n, e);
#pragma unroll
    for (int p = 0; p < PARTS; p += AT_ONCE) make_out<AT_ONCE>(v, s, e, q, parts, w.column, first, p);
    next_state(s, e, k, parts.scales);
    __syncwarp();
#pragma unroll
    for (int x = 0; x < CHUNK_ROWS; x += 16) {
        const int row = x + lane / 2, c = w.column + lane % 2 * 8;
        if (row < n) *(float4 *)&j.out[((t + row) * j.hv + w.head) * DIM + c] = *(const float4 *)&v.x[row][c];
    }
}

/* n rows of a head's 128 columns of qkv from column `column` on; zeros up to 64. A thread has the same columns of each row. */
template <int THREADS>
static __device__ __forceinline__ void load_rows(chunk_rows &to, const delta_shape &j, int t, int n, int column) {
    enum { LANES = DIM / 8, ROWS = THREADS / LANES };
    const int c = (int)(threadIdx.x % LANES) * 8, first = (int)(threadIdx.x / LANES);
#pragma unroll
    for (int x = 0; x < CHUNK_ROWS; x += ROWS) {
        const int row = first + x;
        if (x + ROWS > CHUNK_ROWS && row >= CHUNK_ROWS) break;
        cp_async16(smem_addr(&to.x[row][c]), j.qkv + (uint32_t)((t + (row < n ? row : 0)) * j.width + column + c), row < n);
    }
}
/* T', P and scales as parts has left them. */
template <int THREADS>
static __device__ __forceinline__ void load_parts(chunk_parts &to, const bf16_bits *tiles, const chunk_scales *scales) {
    enum { UNITS = 2 * TILES * 32 };
    const unsigned x0 = threadIdx.x;
#pragma unroll
    for (unsigned x = 0; x < UNITS; x += THREADS)
        if (x + THREADS <= UNITS || x0 + x < UNITS)
            cp_async16(smem_addr(&to.t[0][(x0 + x) / 2][x0 % 2 * 8]), tiles + 8 * (x0 + x), true); /* p is behind t */
    if (x0 < sizeof(chunk_scales) / 16) cp_async16(smem_addr((float4 *)&to.scales + x0), (const float4 *)scales + x0, true);
}
static __device__ __forceinline__ int rows_left(int rows, int chunk) { return min(rows - chunk * CHUNK_ROWS, (int)CHUNK_ROWS); }

/* ---- kernels ---- */

/* A block: a chunk of a value head; those at the end first, so that those which scan begins with are left in L2. */
struct parts_memory {
    chunk_rows k;
    union {
        chunk_rows q; /* read before the first barrier of make_parts, after which `to` is written */
        chunk_parts to;
    };
    parts_scratch scratch;
};
static __global__ void __launch_bounds__(PART_THREADS, 4) delta_parts(const delta_shape j) {
    parts_memory &m = dynamic_shared<parts_memory>();
    const int head = (int)blockIdx.x, sequence = (int)blockIdx.y, chunk = j.max_chunks - 1 - (int)blockIdx.z;
    const int64_t t = j.start[sequence] + chunk * CHUNK_ROWS;
    const int n = rows_left(j.start[sequence + 1] - j.start[sequence], chunk), key = head / j.group * DIM;
    if (n <= 0) return;
    load_rows<PART_THREADS>(m.k, j, t, n, j.hk * DIM + key);
    load_rows<PART_THREADS>(m.q, j, t, n, key);
    cp_commit();
    cp_wait<0>();
    __syncthreads();
    make_parts(j, m.scratch, m.to, m.k, m.q, t, n, head, (int)(threadIdx.x / 32), [] { __syncthreads(); });
    __syncthreads();
    const int64_t entry = ((int64_t)sequence * j.max_chunks + chunk) * j.hv + head;
    bf16_bits *const tiles = j.tiles + entry * 2 * TILES * 256;
    for (int x = (int)threadIdx.x; x < 2 * TILES * 32; x += PART_THREADS)
        *(float4 *)&tiles[8 * x] = *(const float4 *)&m.to.t[0][x / 2][x % 2 * 8]; /* p is behind t */
    for (int x = (int)threadIdx.x; x < (int)sizeof(chunk_scales) / 16; x += PART_THREADS)
        ((float4 *)&j.scales[entry])[x] = ((const float4 *)&m.to.scales)[x];
}

/* Blocks below: value head x of those of key head y, sequence z. */
static __device__ __forceinline__ int block_head(const delta_shape &j) { return (int)(blockIdx.y * j.group + blockIdx.x); }
/* A block: a value head of a sequence, chunk by chunk, from parts' tiles; STAGES: chunks in shared memory. */
template <int STAGES> struct scan_memory {
    chunk_rows k[STAGES], q[STAGES], v[STAGES];
    chunk_parts parts[STAGES];
};
enum { SCAN_THREADS = 32 * COLUMN_WARPS };
template <int STAGES>
static __device__ __forceinline__ void load_scan(scan_memory<STAGES> &m, const delta_shape &j, int head, int chunk) {
    const int sequence = (int)blockIdx.z, at = chunk % STAGES, key = (int)blockIdx.y * DIM;
    const int t = j.start[sequence] + chunk * CHUNK_ROWS;
    const int64_t entry = ((int64_t)sequence * j.max_chunks + chunk) * j.hv + head;
    const int n = rows_left(j.start[sequence + 1] - j.start[sequence], chunk);
    load_rows<SCAN_THREADS>(m.k[at], j, t, n, j.hk * DIM + key);
    load_rows<SCAN_THREADS>(m.q[at], j, t, n, key);
    load_rows<SCAN_THREADS>(m.v[at], j, t, n, (2 * j.hk + head) * DIM);
    load_parts<SCAN_THREADS>(m.parts[at], j.tiles + entry * 2 * TILES * 256, j.scales + entry);
}
template <int STAGES, int AT_ONCE, bool KEPT>
static __global__ void __launch_bounds__(SCAN_THREADS, STAGES == 1 ? 2 : 1) delta_scan(const delta_shape j) {
    scan_memory<STAGES> &m = dynamic_shared<scan_memory<STAGES>>();
    const int sequence = (int)blockIdx.z, rows = j.start[sequence + 1] - j.start[sequence];
    const int chunks = (rows + CHUNK_ROWS - 1) / CHUNK_ROWS;
    const columns_of w = {block_head(j), (int)(threadIdx.x / 32) * 16, sequence};
    float s[DIM / 8][4] = {};
    if (STAGES > 1) load_scan(m, j, w.head, 0);
    cp_commit();
    for (int c = 0; c < chunks; c++) {
        if (STAGES == 1) {
            __syncthreads(); /* the chunk before has been read */
            load_scan(m, j, w.head, c);
            cp_commit();
        }
        cp_wait<0>();
        __syncthreads();
        if (STAGES > 1 && c + 1 < chunks) load_scan(m, j, w.head, c + 1);
        cp_commit();
        const int at = c % STAGES;
        consume<AT_ONCE, KEPT>(j, s, m.k[at], m.q[at], m.v[at], m.parts[at], w, c, j.start[sequence] + c * CHUNK_ROWS,
                               rows_left(rows, c));
    }
    store_state(j.s + ((int64_t)sequence * j.hv + w.head) * DIM * DIM, s, w.column);
}

/* A block: the same without tiles in memory: warps 8 to 11 make those of chunk c, while the others are at chunk c - 1 and rows of chunk
 * c + 1 are under way. */
struct one_memory {
    chunk_rows k[3], q[3], v[2];
    chunk_parts parts[2];
    parts_scratch scratch;
};
enum { ONE_THREADS = 32 * (COLUMN_WARPS + PART_WARPS) };
/* What both roles do before step c: what was under way is there, and the step before has been read; then the next rows. */
static __device__ __forceinline__ void next_rows(one_memory &m, const delta_shape &j, int t, int rows, int head, int c) {
    const int key = (int)blockIdx.y * DIM, left = rows_left(rows, c + 1);
    cp_wait<0>();
    __syncthreads();
    if (left > 0) {
        load_rows<ONE_THREADS>(m.k[(c + 1) % 3], j, t + (c + 1) * CHUNK_ROWS, left, j.hk * DIM + key);
        load_rows<ONE_THREADS>(m.q[(c + 1) % 3], j, t + (c + 1) * CHUNK_ROWS, left, key);
    }
    if (c >= 0 && rows_left(rows, c) > 0)
        load_rows<ONE_THREADS>(m.v[c % 2], j, t + c * CHUNK_ROWS, rows_left(rows, c), (2 * j.hk + head) * DIM);
    cp_commit();
}
template <bool KEPT> static __global__ void __launch_bounds__(ONE_THREADS, 1) delta_one(const delta_shape j) {
    one_memory &m = dynamic_shared<one_memory>();
    const int sequence = (int)blockIdx.z, rows = j.start[sequence + 1] - j.start[sequence], head = block_head(j);
    const int chunks = (rows + CHUNK_ROWS - 1) / CHUNK_ROWS, warp = (int)(threadIdx.x / 32);
    const int64_t t = j.start[sequence];
    next_rows(m, j, t, rows, head, -1);
    if (warp >= COLUMN_WARPS) {
        for (int c = 0; c <= chunks; c++) {
            next_rows(m, j, t, rows, head, c);
            if (c < chunks)
                make_parts(j, m.scratch, m.parts[c % 2], m.k[c % 3], m.q[c % 3], t + c * CHUNK_ROWS, rows_left(rows, c), head,
                           warp - COLUMN_WARPS, [] { named_barrier_sync(1, PART_THREADS); });
        }
        return;
    }
    const columns_of w = {head, warp * 16, sequence};
    float s[DIM / 8][4] = {};
    next_rows(m, j, t, rows, head, 0);
    for (int c = 0; c < chunks; c++) {
        next_rows(m, j, t, rows, head, c + 1);
        consume<PARTS, KEPT>(j, s, m.k[c % 3], m.q[c % 3], m.v[c % 2], m.parts[c % 2], w, c, t + c * CHUNK_ROWS,
                             rows_left(rows, c));
    }
    store_state(j.s + ((int64_t)sequence * j.hv + head) * DIM * DIM, s, w.column);
}

/* ---- a decoding step ---- */

/* UNIT numbers of a state: 16 bytes. */
template <class S> struct state_unit;
template <> struct state_unit<float> {
    enum { UNIT = 4 };
    static __device__ __forceinline__ void get(float (&x)[4], const float4 &v) { x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w; }
    static __device__ __forceinline__ float4 put(const float (&x)[4]) { return make_float4(x[0], x[1], x[2], x[3]); }
    typedef float4 word;
};
template <> struct state_unit<bf16_bits> {
    enum { UNIT = 8 };
    typedef uint4 word;
    static __device__ __forceinline__ void get(float (&x)[8], const uint4 &v) {
        x[0] = bf16_low(v.x), x[1] = bf16_high(v.x), x[2] = bf16_low(v.y), x[3] = bf16_high(v.y);
        x[4] = bf16_low(v.z), x[5] = bf16_high(v.z), x[6] = bf16_low(v.w), x[7] = bf16_high(v.w);
    }
    static __device__ __forceinline__ uint4 put(const float (&x)[8]) {
        return make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
    }
};
static __device__ __forceinline__ float *state_of(const delta_shape &j, float) { return j.s; }
static __device__ __forceinline__ bf16_bits *state_of(const delta_shape &j, bf16_bits) { return j.s16; }

/* A block: COLUMNS value columns of a head of a row. All of S that it has is under way at once; a thread keeps its numbers in
 * registers from the load to the store. */
template <class S, int COLUMNS> struct step_plan {
    enum { THREADS = 256, UNIT = state_unit<S>::UNIT, ACROSS = COLUMNS / UNIT, DOWN = THREADS / ACROSS, LOADS = DIM / DOWN };
    struct memory {
        float k[DIM], q[DIM], sums[2][THREADS / 32][COLUMNS], e[COLUMNS];
        float beta, by, kq;
    };
};
template <class S, int COLUMNS> static __global__ void __launch_bounds__(256, 2) delta_recurrence(const delta_shape j) {
    typedef step_plan<S, COLUMNS> plan;
    typedef state_unit<S> unit;
    typename plan::memory &m = dynamic_shared<typename plan::memory>();
    pdl_launch_dependents();
    pdl_wait();
    const int tid = (int)threadIdx.x, lane = tid & 31, warp = (int)(threadIdx.x / 32), c = tid % plan::ACROSS * plan::UNIT,
              d0 = tid / plan::ACROSS;
    const int head = (int)blockIdx.y, key = head / j.group, column0 = (int)blockIdx.x * COLUMNS;
    const int64_t t = blockIdx.z;
    S *const st = state_of(j, S()) + ((int64_t)j.slot[t] * j.hv + head) * DIM * DIM + column0 + c;
    typename unit::word at[plan::LOADS];
#pragma unroll
    for (int x = 0; x < plan::LOADS; x++) at[x] = *(const typename unit::word *)&st[(d0 + x * plan::DOWN) * DIM];
    const float value = tid < COLUMNS ? bf16_float(j.qkv[t * j.width + (2 * j.hk + head) * DIM + column0 + tid]) : 0.0f;
    if (warp < 2) { /* k, q */
        const bf16_bits *const row = j.qkv + t * j.width + ((warp ? 0 : j.hk) + key) * DIM;
        float x[4], sum = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = bf16_float(row[lane + 32 * i]), sum = fmaf(x[i], x[i], sum);
        const float r = rsqrtf(warp_sum(sum) + 1e-6f) * (warp ? 0.08838834764831845f : 1.0f);
#pragma unroll
        for (int i = 0; i < 4; i++) (warp ? m.q : m.k)[lane + 32 * i] = x[i] * r;
    } else if (tid == 64) {
        m.beta = beta_of(j, t, head), m.by = exp_of(gate_of(j, t, head));
    }
    __syncthreads();
    float by_k[plan::UNIT] = {}, by_q[plan::UNIT] = {};
#pragma unroll
    for (int x = 0; x < plan::LOADS; x++) {
        const float k = m.k[d0 + x * plan::DOWN], q = m.q[d0 + x * plan::DOWN];
        float v[plan::UNIT];
        unit::get(v, at[x]);
#pragma unroll
        for (int i = 0; i < plan::UNIT; i++) by_k[i] = fmaf(k, v[i], by_k[i]), by_q[i] = fmaf(q, v[i], by_q[i]);
    }
#pragma unroll
    for (int l = plan::ACROSS; l < 32; l *= 2)
#pragma unroll
        for (int i = 0; i < plan::UNIT; i++) {
            by_k[i] += __shfl_xor_sync(WARP_ALL, by_k[i], l);
            by_q[i] += __shfl_xor_sync(WARP_ALL, by_q[i], l);
        }
    if (lane < plan::ACROSS)
#pragma unroll
        for (int i = 0; i < plan::UNIT; i++) m.sums[0][warp][c + i] = by_k[i], m.sums[1][warp][c + i] = by_q[i];
    if (warp == 7) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) sum = fmaf(m.k[lane + 32 * i], m.q[lane + 32 * i], sum);
        sum = warp_sum(sum);
        if (lane == 0) m.kq = sum;
    }
    __syncthreads();
    if (tid < COLUMNS) {
        float k = 0, q = 0;
#pragma unroll
        for (int x = 0; x < plan::THREADS / 32; x++) k += m.sums[0][x][tid], q += m.sums[1][x][tid];
        const float e = m.beta * (value - m.by * k);
        m.e[tid] = e;
        j.out[(t * j.hv + head) * DIM + column0 + tid] = float_bf16(fmaf(e, m.kq, m.by * q));
    }
    __syncthreads();
    const float by = m.by;
    float e[plan::UNIT];
#pragma unroll
    for (int i = 0; i < plan::UNIT; i++) e[i] = m.e[c + i];
#pragma unroll
    for (int x = 0; x < plan::LOADS; x++) {
        const float k = m.k[d0 + x * plan::DOWN];
        float v[plan::UNIT];
        unit::get(v, at[x]);
#pragma unroll
        for (int i = 0; i < plan::UNIT; i++) v[i] = fmaf(k, e[i], by * v[i]);
        __stcs((typename unit::word *)&st[(d0 + x * plan::DOWN) * DIM], unit::put(v)); /* 16 bytes in one */
    }
}

#endif
