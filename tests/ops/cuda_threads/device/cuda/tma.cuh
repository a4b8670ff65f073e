/* tma.cuh - mbarriers, tensor copies and clusters of src/device/cuda/tma.cuh, in C.
 *
 * In one half of the clusters a copy, or a store to another block, happens where it is issued, in the other not before
 * its mbarrier is waited for: a kernel that reads shared memory too early, or overwrites it too early, gives other results. */
#ifndef VERLC_TESTS_CUDA_THREADS_TMA_CUH
#define VERLC_TESTS_CUDA_THREADS_TMA_CUH

#include "device/cuda/context.cuh"
#include "device/cuda/wgmma.cuh"

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
/* What is under way to an mbarrier: copies, and then an arrival; or 16 bytes; or a tile of so many. */
struct threads_late {
    uint64_t block;
    threads_mbarrier *bar;
    std::vector<threads_copy> copies;
    char *to;
    float x[4];
    std::function<void()> tile;
    int tile_bytes;
};
static std::vector<threads_late> threads_lates;
static inline void threads_late_run(const threads_late &x) {
    for (const threads_copy &c : x.copies) threads_copy_run(c);
    if (x.to) memcpy(x.to, x.x, sizeof x.x);
    if (x.tile) x.tile();
    threads_mbarrier_change(x.bar, x.to || x.tile ? 0 : 1, x.to ? -(int)sizeof x.x : -x.tile_bytes);
}
static inline void threads_late_issue(const threads_late &x) {
    if (threads_eager(THREADS_COPY) || threads_awaited(x.bar)) threads_late_run(x);
    else threads_lates.push_back(x);
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
static inline void mbarrier_arrive_cp_async(uint32_t bar) {
    threads_late x = {threads_block_number(), threads_mbarrier_at(bar), {}, NULL, {}, {}, 0};
    for (const auto &group : threads_copies.mine()) x.copies.insert(x.copies.end(), group.begin(), group.end());
    threads_copies.mine().clear();
    threads_late_issue(x);
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
static inline void mbarrier_arrive_cluster(uint32_t bar, uint32_t rank) {
    threads_mbarrier_change((threads_mbarrier *)(threads_shared_of(rank) + bar), 1, 0);
}

/* ---- tensor copies ---- */

struct CUtensorMap {
    const char *data;
    int64_t count, rows, cols;
    int box, deep;
};
static inline int cuda_tensor_map(CUtensorMap *map, const void *data, int64_t rows, int64_t cols, int box) {
    *map = {(const char *)data, 1, rows, cols, box, 1};
    return 0;
}
static inline int cuda_tensor_map_pair(CUtensorMap *map, const void *data, int64_t rows, int64_t cols, int box) {
    *map = {(const char *)data, 2, rows, cols, box, 2};
    return 0;
}
/* A tile, swizzled; what lies outside of the matrix is zero. */
static inline void threads_tile(const CUtensorMap &m, char *to, int x, int y) {
    for (int r = 0; r < m.box * m.deep; r++)
        for (int c = 0; c < PANEL_ROW / 2; c++) {
            const int64_t row = y + r % m.box, col = x + c, at = (r / m.box * m.rows + row) * m.cols + col;
            uint16_t v = 0;
            if (row < m.rows && col < m.cols) memcpy(&v, m.data + 2 * at, sizeof v);
            memcpy(to + panel_offset(r, c / 8) + c % 8 * 2, &v, sizeof v);
        }
}
static inline void tma_load_multicast(uint32_t dst, const CUtensorMap *map, int x, int y, uint32_t bar, uint16_t ranks) {
    const CUtensorMap m = *map;
    if (dst % 1024) {
        fprintf(stderr, "tma_load: a panel is not aligned\n");
        abort();
    }
    for (unsigned rank = 0; ranks >> rank; rank++) {
        char *const there = threads_shared_of(rank);
        if (ranks >> rank & 1)
            threads_late_issue({threads_block_number(),
                                (threads_mbarrier *)(there + bar),
                                {},
                                NULL,
                                {},
                                [=] { threads_tile(m, there + dst, x, y); },
                                m.box * m.deep * PANEL_ROW});
    }
}
static inline void tma_load(uint32_t dst, const CUtensorMap *map, int x, int y, uint32_t bar) {
    tma_load_multicast(dst, map, x, y, bar, (uint16_t)(1u << threads_cluster_rank()));
}
static inline void tma_load_pair(uint32_t dst, const CUtensorMap *map, int x, int y, uint32_t bar) {
    tma_load(dst, map, x, y, bar);
}
static inline void tma_prefetch_map(const CUtensorMap *) {}

static inline uint32_t cluster_rank() { return threads_cluster_rank(); }
static inline void cluster_sync() { threads_cluster_barrier(); }
static inline void cluster_store16(uint32_t to, uint32_t bar, uint32_t rank, const float (&x)[4]) {
    char *const there = threads_shared_of(rank);
    if (to % 16 || bar % 8) {
        fprintf(stderr, "cluster_store16: an address is not aligned\n");
        abort();
    }
    threads_late_issue(
        {threads_block_number(), (threads_mbarrier *)(there + bar), {}, there + to, {x[0], x[1], x[2], x[3]}, {}, 0});
}

#endif
