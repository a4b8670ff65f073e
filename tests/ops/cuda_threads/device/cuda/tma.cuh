/* tma.cuh - mbarriers, TMA and clusters of src/device/cuda/tma.cuh, in C; and tensor maps.
 *
 * In one half of the clusters a copy by TMA or cp.async, or a store to another block, happens where it is issued, in the other not
 * before its mbarrier is waited for, and a store by TMA reads its source when it is waited for: a kernel that reads shared memory
 * too early, or overwrites it too early, gives other results. A store that nobody waits for never happens there. */
#ifndef VERLC_TESTS_CUDA_THREADS_TMA_CUH
#define VERLC_TESTS_CUDA_THREADS_TMA_CUH

#include "device/cuda/context.cuh"
#include "device/cuda/wgmma.cuh"

/* ---- mbarriers ---- */

struct threads_mbarrier {
    uint16_t arrivals, pending;
    int32_t bytes : 31; /* that are expected and have not come */
    uint32_t phase : 1;
};
static_assert(sizeof(threads_mbarrier) == 8, "as large as an mbarrier");

static inline threads_mbarrier *threads_mbarrier_at(uint32_t bar) {
    if (bar % 8) {
        fprintf(stderr, "mbarrier: an address is not aligned\n");
        abort();
    }
    return (threads_mbarrier *)(threads_shared + bar);
}
static inline void threads_mbarrier_change(threads_mbarrier *b, int arrivals, int bytes) {
    if (arrivals > b->pending) {
        fprintf(stderr, "mbarrier: more arrivals than a phase has\n");
        abort();
    }
    b->pending = (uint16_t)(b->pending - arrivals), b->bytes = b->bytes + bytes;
    if (b->pending || b->bytes) return;
    b->phase = b->phase ^ 1, b->pending = b->arrivals;
    threads_wake(b);
}
/* What is under way to an mbarrier: what it does to memory, and then so many arrivals and bytes. */
struct threads_late {
    uint64_t block;
    threads_mbarrier *bar;
    int arrivals, bytes;
    std::function<void()> copy;
};
static std::vector<threads_late> threads_lates;
static inline void threads_late_run(const threads_late &x) {
    x.copy();
    threads_mbarrier_change(x.bar, x.arrivals, -x.bytes);
}
static inline void threads_late_issue(threads_mbarrier *bar, int arrivals, int bytes, std::function<void()> copy) {
    const threads_late x = {threads_block_number(), bar, arrivals, bytes, std::move(copy)};
    if (threads_eager(THREADS_COPY) || threads_awaited(bar)) threads_late_run(x);
    else threads_lates.push_back(x);
}
/* The same place in block `rank` of the cluster. */
static inline threads_mbarrier *threads_mbarrier_of(uint32_t bar, uint32_t rank) {
    return (threads_mbarrier *)(threads_shared_of(rank) + ((char *)threads_mbarrier_at(bar) - threads_shared));
}

static inline void mbarrier_init(uint32_t bar, int arrivals) {
    *threads_mbarrier_at(bar) = {(uint16_t)arrivals, (uint16_t)arrivals, 0, 0};
}
static inline void mbarrier_init_fence() {}
static inline void mbarrier_expect_tx(uint32_t bar, uint32_t bytes) {
    threads_mbarrier_change(threads_mbarrier_at(bar), 0, (int)bytes);
    threads_mbarrier_change(threads_mbarrier_at(bar), 1, 0);
}
static inline void mbarrier_arrive(uint32_t bar) { threads_mbarrier_change(threads_mbarrier_at(bar), 1, 0); }
static inline void mbarrier_arrive_cluster(uint32_t bar, uint32_t rank) {
    threads_mbarrier_change(threads_mbarrier_of(bar, rank), 1, 0);
}
static inline void mbarrier_arrive_cp_async(uint32_t bar) {
    std::vector<threads_copy> copies;
    for (const auto &group : threads_copies.mine()) copies.insert(copies.end(), group.begin(), group.end());
    threads_copies.mine().clear();
    threads_late_issue(threads_mbarrier_at(bar), 1, 0, [copies] {
        for (const threads_copy &c : copies) threads_copy_run(c);
    });
}
static inline void mbarrier_wait(uint32_t bar, uint32_t parity) {
    threads_mbarrier *const b = threads_mbarrier_at(bar);
    while (b->phase == parity) {
        bool any = false;
        for (size_t i = 0; i < threads_lates.size();) {
            const threads_late x = threads_lates[i];
            if (x.block == threads_block_number() && x.bar != b) {
                i++;
                continue;
            }
            threads_lates.erase(threads_lates.begin() + (ptrdiff_t)i);
            if (x.block == threads_block_number()) threads_late_run(x), any = true;
        }
        if (!any) threads_wait(b);
    }
}

static inline bool mbarrier_test(uint32_t bar, uint32_t parity) { return threads_mbarrier_at(bar)->phase != parity; }

/* ---- TMA ---- */

struct CUtensorMap {
    char *data;
    int64_t count, rows, cols;
    int box, deep; /* a tile: so many rows, 64 columns, of so many matrices */
};
/* A tile at (x, y) of the matrices from z on: to or from shared memory, where it is swizzled. Outside of a matrix is 0. */
static inline void threads_tile(const CUtensorMap &m, int x, int y, int z, char *panel, bool load) {
    const int64_t row_bytes = m.cols * 2, from = (int64_t)x * 2;
    const size_t size = (size_t)std::min((int64_t)PANEL_ROW, std::max(row_bytes - from, (int64_t)0));
    for (int r = 0; r < m.box * m.deep; r++) {
        const int64_t row = y + r % m.box, matrix = z + r / m.box;
        const bool inside = matrix < m.count && row < m.rows;
        for (size_t at = 0; at < PANEL_ROW; at += 16) {
            char *const here = panel + panel_offset(r, (int)at / 16);
            const size_t n = inside && at < size ? std::min(size - at, (size_t)16) : 0;
            char *const there = n ? m.data + (matrix * m.rows + row) * row_bytes + from + at : NULL;
            if (load) memset(here, 0, 16);
            if (n) memcpy(load ? here : there, load ? there : here, n);
        }
    }
}
static inline void threads_panel_check(uint32_t at) {
    if (at % 1024) {
        fprintf(stderr, "TMA: a tile is not aligned\n");
        abort();
    }
}
/* to: of the blocks of the cluster, whose mbarriers all get the bytes. */
static inline void threads_load(uint32_t dst, const CUtensorMap *map, int x, int y, int z, uint32_t bar, unsigned to) {
    const CUtensorMap m = *map;
    threads_panel_check(dst);
    for (uint32_t rank = 0; to >> rank; rank++)
        if (to >> rank & 1) {
            char *const panel = threads_shared_of(rank) + dst;
            threads_late_issue(threads_mbarrier_of(bar, rank), 0, m.box * m.deep * PANEL_ROW,
                               [=] { threads_tile(m, x, y, z, panel, true); });
        }
}
static inline void tma_load_stack(uint32_t dst, const CUtensorMap *map, int x, int y, int z, uint32_t bar) {
    threads_load(dst, map, x, y, z, bar, 1u << threads_cluster_rank());
}
static inline void tma_load(uint32_t dst, const CUtensorMap *map, int x, int y, uint32_t bar) {
    tma_load_stack(dst, map, x, y, 0, bar);
}
static inline void tma_load_multicast(uint32_t dst, const CUtensorMap *map, int x, int y, uint32_t bar, uint16_t to) {
    threads_load(dst, map, x, y, 0, bar, to);
}
static inline void tma_load_stack_pair(uint32_t dst, const CUtensorMap *map, int x, int y, int z, uint32_t bar) {
    threads_load(dst, map, x, y, z, bar, 3);
}
static inline void tma_load_pair(uint32_t dst, const CUtensorMap *map, int x, int y, uint32_t bar) {
    tma_load_stack(dst, map, x, y, 0, bar);
}
static inline void tma_prefetch_map(const CUtensorMap *) {}
static inline void bulk_prefetch_l2(const void *, uint32_t) {}

struct threads_store {
    CUtensorMap map;
    int x, y;
    uint32_t src;
};
static threads_groups<threads_store> threads_stores;
static inline void threads_store_run(const threads_store &s) { threads_tile(s.map, s.x, s.y, 0, threads_shared + s.src, false); }
static inline void tma_store(const CUtensorMap *map, int x, int y, uint32_t src) {
    const threads_store s = {*map, x, y, src};
    threads_panel_check(src);
    if (threads_eager(THREADS_COPY)) threads_store_run(s);
    else threads_stores.issue(s);
    threads_stores.commit();
}
template <int N> static inline void tma_store_wait_read() { threads_stores.wait(N, threads_store_run); }
static inline void tma_store_wait() { threads_stores.wait(0, threads_store_run); }

/* ---- clusters ---- */

static inline uint32_t cluster_rank() {
    threads_in_pairs();
    return threads_cluster_rank();
}
static inline void cluster_sync() { threads_cluster_barrier(); }
static inline void cluster_store16(uint32_t to, uint32_t bar, uint32_t rank, const float (&x)[4]) {
    const std::vector<float> values(x, x + 4);
    char *const there = threads_shared_of(rank) + to;
    if (to % 16) {
        fprintf(stderr, "cluster_store16: an address is not aligned\n");
        abort();
    }
    threads_late_issue(threads_mbarrier_of(bar, rank), 0, sizeof x, [=] { memcpy(there, values.data(), 4 * sizeof(float)); });
}

/* ---- host ---- */

static inline int cuda_tensor_map_stack(CUtensorMap *map, const void *data, int64_t count, int64_t rows, int64_t cols, int box) {
    *map = {(char *)data, count, rows, cols, box, 1};
    return 0;
}
static inline int cuda_tensor_map(CUtensorMap *map, const void *data, int64_t rows, int64_t cols, int box) {
    return cuda_tensor_map_stack(map, data, 1, rows, cols, box);
}
static inline int cuda_tensor_map_pair(CUtensorMap *map, const void *data, int64_t rows, int64_t cols, int box) {
    *map = {(char *)data, 2, rows, cols, box, 2};
    return 0;
}

#endif
