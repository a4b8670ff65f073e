/* attention_fwd_sm90.cu - forward of causal attention over packed sequences on Hopper's WGMMA, for heads of 64, 128 and
 * 256 (these under a softcap too) with contiguous keys: training and log-prob passes.  attention_fwd.cu serves everything else, a
 * paged KV cache included.
 *
 * A warpgroup has 64 packed rows; two (three, with heads of 128) make a block and share its tiles of K and V in a
 * cp.async pipeline.  Probabilities stay in registers as the A operand of P.V, which is in flight while the
 * next Q.K^T is issued.
 *
 * Invariant: a row goes through the chain of operations that attention_fwd.cu lists, so its bits are those of
 * decode.  All warpgroups of a block walk all of its tiles: one that a row does not see changes nothing. */
#include "device/cuda/attention/attention_warp.cuh"
#include "device/cuda/wgmma.cuh"

enum { TILE = DEV_KEY_TILE, GROUP = 128, PANEL = TILE * PANEL_ROW };
static_assert(TILE == 64, "a tile of keys is a panel's rows");

/* Tiles of K and V take turns in SLOTS places. */
template <int D> struct shape {
    static constexpr int GROUPS = D == 128 ? 3 : 2, ROWS = 64 * GROUPS, THREADS = GROUP * GROUPS;
    static constexpr int BLOCKS = D == 64 ? 2 : 1; /* of a multiprocessor */
    static constexpr int OPERAND = D / 64 * PANEL; /* bytes of 64 rows of D */
    static constexpr int PREFETCH = D == 256 ? 1 : 2, SLOTS = D == 256 ? 5 : 8;
    static constexpr int KEYS = GROUPS * OPERAND, SMEM = KEYS + SLOTS * OPERAND;
    /* at a tile's copy: V of the tile before the current one, whose P.V is in flight, and both of all from there to the new one */
    static_assert(SLOTS >= 2 * PREFETCH + 3, "no place is refilled that a WGMMA still reads");
};

/* Where 8 columns from 8 * chunk on, of row `row`, lie in panels of 64 rows. */
template <int D> static __device__ __forceinline__ uint32_t place(int row, int chunk) {
    return (uint32_t)(row / 64 * shape<D>::OPERAND + chunk / 8 * PANEL) + panel_offset(row % 64, chunk % 8);
}

/* The block's packed rows [first, last], zeros beyond. */
template <int D>
static __device__ __forceinline__ void load_rows(const struct cuda_attn &a, const struct seq_rows &s, int head, int first, int last,
                                                 uint32_t to) {
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < shape<D>::ROWS * D / 8; i += shape<D>::THREADS) {
        const int row = i / (D / 8), chunk = i % (D / 8);
        const bool take = first + row <= last;
        const int64_t from = take ? packed_index(a, s, head, first + row) * D + chunk * 8 : 0;
        cp_async16(to + place<D>(row, chunk), (const uint16_t *)a.q + from, take);
    }
}
/* Keys [key, key + 64) and their values; zeros outside of [see.x, see.y). row: that of key 0. */
template <int D>
static __device__ __forceinline__ void load_keys(const struct cuda_attn &a, int64_t row, int key, int2 see, uint32_t k_to,
                                                 uint32_t v_to) {
    constexpr int CHUNKS = TILE * D / 8, COPIES = (CHUNKS + shape<D>::THREADS - 1) / shape<D>::THREADS;
#pragma unroll
    for (int n = 0; n < COPIES; n++) {
        const int i = n * shape<D>::THREADS + (int)threadIdx.x, r = i / (D / 8), chunk = i % (D / 8), k = key + r;
        if (CHUNKS % shape<D>::THREADS != 0 && i >= CHUNKS) break;
        const bool take = k >= see.x && k < see.y;
        const int64_t from = take ? (row + k) * D + chunk * 8 : 0;
        cp_async16(k_to + place<D>(r, chunk), (const uint16_t *)a.k + from, take);
        cp_async16(v_to + place<D>(r, chunk), (const uint16_t *)a.v + from, take);
    }
}

/* s (64, 64) = Q . K^T over D columns, ascending. */
template <int D> static __device__ __forceinline__ void qk_scores(float (&s)[8][4], uint32_t q, uint32_t k) {
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        const uint32_t at = (uint32_t)(i / 4 * PANEL + i % 4 * 32);
        if (i == 0) wgmma_m64n64_ss_zero(s, panel_desc(q), panel_desc(k));
        else wgmma_m64n64_ss(s, panel_desc(q) + (at >> 4), panel_desc(k) + (at >> 4), 1);
    }
}
/* acc (64, D) += P . V over 64 keys, ascending. */
template <int D>
static __device__ __forceinline__ void pv_accumulate(float (&acc)[D / 8][4], const uint32_t (&p)[4][4], uint32_t v) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t rows = v + (uint32_t)(i * 16 * PANEL_ROW);
        if constexpr (D == 256) wgmma_m64n256_rs(acc, p[i], panels_desc_mn(rows, PANEL));
        else
#pragma unroll
            for (int n = 0; n < D / 64; n++)
                wgmma_m64n64_rs(reinterpret_cast<float(&)[8][4]>(acc[n * 8]), p[i], panel_desc(rows + (uint32_t)(n * PANEL)));
    }
}

/* Block (tile of rows, sequence; kv head). The last rows of all sequences, which see most keys, start first. */
template <int D, bool CAP>
__global__ void __launch_bounds__(shape<D>::THREADS, shape<D>::BLOCKS) fwd_kernel(const struct cuda_attn a) {
    using sh = shape<D>;
    const int n_seqs = (int)gridDim.x / a.n_tiles, head = (int)blockIdx.y;
    pdl_launch_dependents();
    pdl_wait();
    const int64_t keys = (int64_t)head * a.block_len + a.kv_start[(int)blockIdx.x % n_seqs]; /* loaded with s */
    const struct seq_rows s = seq_rows_of(a, (int)blockIdx.x % n_seqs);
    const int first = (a.n_tiles - 1 - (int)blockIdx.x / n_seqs) * sh::ROWS;
    if (first >= s.packed) return;
    const int last = min(first + sh::ROWS, s.packed) - 1, lane = (int)threadIdx.x % 32;
    const int group = D == 256 ? __shfl_sync(WARP_ALL, (int)threadIdx.x / GROUP, 0) : (int)threadIdx.x / GROUP;
    const int top = first + group * 64, r = first + (int)threadIdx.x / 32 * 16 + lane / 4; /* of the warpgroup, of the lane */
    /* positions of my rows, the first and the last of my warpgroup's; rows beyond the last stand where the last does */
    const auto position = [&](int row) { return s.pos0 + min(row, last) / a.group; };
    const int p[2] = {position(r), position(r + 8)}, p_min = position(top), from_max = first_key(a, position(top + 63));
    const int lo = first_key(a, position(first)), hi = position(last) + 1, end = (hi + TILE - 1) / TILE;
    const uint32_t smem = smem_addr(panel_memory()), q = smem + (uint32_t)(group * sh::OPERAND);
    int now = lo / TILE, turn = D == 256 ? 0 : now; /* of the tiles' places; from 0 on where the compiler shall see it uniform */
    const auto k_place = [&](int i) { return smem + sh::KEYS + (uint32_t)(2 * i % sh::SLOTS * sh::OPERAND); };
    const auto v_place = [&](int i) {
        if constexpr (sh::SLOTS % 2 == 0) return k_place(i) + sh::OPERAND;
        else return smem + sh::KEYS + (uint32_t)((2 * i + 1) % sh::SLOTS * sh::OPERAND);
    };
    /* tile i from now on */
    const auto queue = [&](int i) {
        if (now + i < end) load_keys<D>(a, keys, (now + i) * TILE, {lo, hi}, k_place(turn + i), v_place(turn + i));
        cp_commit();
    };
    load_rows<D>(a, s, head, first, last, smem); /* in the first cp.async group */
#pragma unroll
    for (int i = 0; i < sh::PREFETCH; i++) queue(i);
    struct row_pair<D> x = {
        {-INFINITY, -INFINITY}, {}, {}
    };
#pragma unroll 1
    do { /* there is one: hi > lo */
        float score[8][4];
        uint32_t weight[4][4];
        cp_wait<sh::PREFETCH - 1>();
        fence_proxy_async();
        __syncthreads();
        queue(sh::PREFETCH);
        wgmma_fence();
        qk_scores<D>(score, q, k_place(turn));
        wgmma_commit();
        wgmma_wait<0>(); /* P.V of the tile before, too */
        wgmma_fence_registers(score), wgmma_fence_registers(x.acc);
        if constexpr (CAP) cap_scores(a, score);
        const int j = now * TILE;
        if (j + TILE - 1 > p_min || j < from_max) mask_scores(a, score, p, j);
        softmax_tile<D>(x, weight, score, a.scale_log2);
        wgmma_fence_registers(x.acc);
        wgmma_fence();
        pv_accumulate<D>(x.acc, weight, v_place(turn));
        wgmma_commit();
    } while (turn++, ++now < end);
    wgmma_wait<0>();
    wgmma_fence_registers(x.acc);
    rows_store<D>(a, s, head, r, x);
}

static bool takes(const struct cuda *c, const struct cuda_attn &p) {
    const bool heads = p.dim == 256 || ((p.dim == 64 || p.dim == 128) && p.softcap == 0);
    return cuda_hopper(c) && heads && p.kv_start && p.n_kv_blocks == 1;
}

template <int D, bool CAP = false> static int run(struct cuda *c, const struct attn_args *a, struct cuda_attn p) {
    using sh = shape<D>;
    p.n_tiles = attn_tiles(a, sh::ROWS);
    return attn_launch(c, fwd_kernel<D, CAP>, {a->seqs.n, 1, sh::THREADS, sh::SMEM, true}, p);
}

int cuda_attn_fwd_sm90(struct cuda *c, const struct attn_args *a, struct cuda_attn p, bool *ran) {
    *ran = takes(c, p);
    if (!*ran) return 0;
    if (p.dim == 256) return p.softcap > 0 ? run<256, true>(c, a, p) : run<256>(c, a, p);
    return p.dim == 64 ? run<64>(c, a, p) : run<128>(c, a, p);
}
