/* gather_columns.cu - the kernel of gather_columns.cuh: a thread writes its lines of this rank's block into slots of a peer's
 * memory, waits for the peer's lines in its own memory, and puts them where dev_join_columns does.
 *
 * No flag says that a line is there, its words do: a slot is all ones until a line is written to it, and a word that is to be sent
 * is never all ones (plain()), so each of the four words shows by itself that it has come, in whatever order stores arrive. Once
 * read, a slot is all ones again. So bytes cross the link once, and no fence or flag waits for a round trip.
 *
 * A thread exchanges lines with the thread of its number on a peer and with no other, in rounds: it sends at most
 * CUDA_GATHER_LINES lines, then receives as many, always at least one both ways. Slots of two rounds alternate, and the count of
 * rounds is kept in device memory from launch to launch, so a graph's replay goes on where the last one ended.
 * Invariant: nothing is written that is still to be read. A thread sends round i + 2 when it has round i + 1 of the peer's thread,
 * which that one sent when it had read round i and had reset the slot: in the same launch, behind a fence, or in one that had
 * ended. A thread needs no other of its rank, so blocks may run in any order.
 * And it ends, whatever becomes of the other ranks: when the host says so, which needs no stream, or after its deadline; and it
 * says that it did. */
#include "device/cuda/collective/gather_columns.cuh"

#include "device/cuda/collective/system_scope.cuh"

enum { BLOCKS = CUDA_GATHER_BLOCKS, THREADS = CUDA_GATHER_THREADS, LINES = CUDA_GATHER_LINES, LINE = CUDA_GATHER_LINE };
enum {
    SPINS = 64,       /* looks without a nap */
    LOOKS = 256,      /* looks between two at whether the wait goes on */
    HOST_LOOKS = 256, /* of those, one is at the host's memory, by each thread at another time */
    NAP_NS = 100,
};
static_assert((int)CUDA_GATHER_RANKS >= (int)DEV_MOST_COLUMNS, "a place for each rank");
static_assert(CUDA_GATHER_CHANNELS / HOST_LOOKS <= 128, "few threads look at the host at a time");

struct launch {
    struct cuda_gather g;
    struct join_columns_args a;
    int channels; /* of a rank's pair */
};

/* A rank's block of columns. */
struct columns {
    int64_t first, width, count; /* columns; elements */
    int lines;
};
template <typename T>
static __host__ __device__ __forceinline__ struct columns columns_of(const struct join_columns_args &a, int r) {
    const int64_t width = a.cut[r + 1] - a.cut[r], count = a.y.dim[0] * width;
    return {a.cut[r], width, count, (int)((count * (int64_t)sizeof(T) + LINE - 1) / LINE)};
}

/* ---- elements: words of f32 or halves of bf16, which only `add` computes with ---- */

template <typename T> static constexpr __host__ __device__ int per_line() { return LINE / (int)sizeof(T); }

/* All ones is a NaN that no operation makes, but a file may hold: it is sent, and kept here, as the usual one. */
static __device__ __forceinline__ uint32_t plain(uint32_t v, uint32_t) { return v == 0xffffffffu ? 0x7fffffffu : v; }
static __device__ __forceinline__ uint32_t plain(uint32_t v, uint16_t) {
    if ((v & 0xffffu) == 0xffffu) v &= 0xffff7fffu;
    if (v >> 16 == 0xffffu) v &= 0x7fffffffu;
    return v;
}

/* Line i of n elements. WHOLE: 16-aligned, and as many elements as lines hold. */
template <typename T, bool WHOLE> static __device__ __forceinline__ struct line read_line(const T *x, int64_t n, int i) {
    struct line v = {};
    if constexpr (WHOLE) {
        v = ((const struct line *)x)[i];
    } else {
        for (int k = 0; k < per_line<T>(); k++) {
            const int64_t at = (int64_t)i * per_line<T>() + k;
            if (at < n) v.word[k * (int)sizeof(T) / 4] |= (uint32_t)x[at] << (k * 8 * (int)sizeof(T) % 32);
        }
    }
#pragma unroll
    for (int k = 0; k < 4; k++) v.word[k] = plain(v.word[k], (T)0);
    return v;
}
template <typename T> static __device__ __forceinline__ T element(const struct line &v, int k) {
    return (T)(v.word[k * (int)sizeof(T) / 4] >> (k * 8 * (int)sizeof(T) % 32));
}

static __device__ __forceinline__ uint32_t add(uint32_t base, uint32_t v) {
    return __float_as_uint(__fadd_rn(__uint_as_float(base), __uint_as_float(v)));
}

/* Where element `at` of a block is in y. */
static __device__ __forceinline__ int64_t place_of(const struct join_columns_args &a, const struct columns &c, int64_t at) {
    return at / c.width * a.y.dim[1] + c.first + at % c.width;
}
/* The same of line i, where rows are whole lines. */
template <typename T>
static __device__ __forceinline__ int64_t place_of_line(const struct join_columns_args &a, const struct columns &c, int i) {
    const unsigned each = (unsigned)(c.width / per_line<T>()), row = (unsigned)i / each;
    return (int64_t)row * a.y.dim[1] + c.first + (int64_t)((unsigned)i - row * each) * per_line<T>();
}

/* What line i of a block is added to; read while the line is on its way. */
template <typename T, bool WHOLE, bool ADD>
static __device__ __forceinline__ struct line base_of(const struct join_columns_args &a, const struct columns &c, int i) {
    if constexpr (WHOLE && ADD) return ((const struct line *)((const T *)a.from.data + place_of_line<T>(a, c, i)))[0];
    return {};
}

template <typename T, bool WHOLE, bool ADD>
static __device__ __forceinline__ void put_line(const struct join_columns_args &a, const struct columns &c, int i, struct line v,
                                                const struct line &base) {
    T *const y = (T *)a.y.data;
    if constexpr (WHOLE) {
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (ADD) v.word[k] = add(base.word[k], v.word[k]);
        write_line((struct line *)(y + place_of_line<T>(a, c, i)), v);
    } else {
        const int64_t first = (int64_t)i * per_line<T>();
        for (int k = 0; k < per_line<T>() && first + k < c.count; k++) {
            const int64_t at = place_of(a, c, first + k);
            y[at] = ADD ? (T)add(((const uint32_t *)a.from.data)[at], element<T>(v, k)) : element<T>(v, k);
        }
    }
}

/* ---- a channel ---- */

static __device__ __forceinline__ bool is_there(const struct line &v) {
    return v.word[0] != UINT32_MAX && v.word[1] != UINT32_MAX && v.word[2] != UINT32_MAX && v.word[3] != UINT32_MAX;
}

/* Whether a wait for a peer that began at `start` goes on. The host's memory is far: were all threads to look at it at once, it
 * would hold them up for longer than what they wait for, and the peer then waits for them, which does the same: so for good. */
static __device__ bool goes_on(const struct cuda_gather &g, int peer, uint64_t start, bool look_at_host) {
    if (load_relaxed(g.words)) return false;
    const bool ended = look_at_host && load_relaxed(&g.host->end), late = now_ns() - start > g.deadline_ns;
    if (!ended && !late) return true;
    store_relaxed(&g.host->lost, ended ? CUDA_GATHER_ENDED : (uint32_t)peer + 1);
    store_relaxed(g.words, 1);
    return false;
}

/* The first n lines of the slot of channel `id`, which are all ones again; false: the wait is over without them. */
static __device__ __forceinline__ bool receive(const struct cuda_gather &g, int peer, int id, struct line *slot, int n,
                                               struct line (&v)[LINES]) {
    uint64_t start = 0;
    for (unsigned looks = 1;; looks++) {
        bool there = true;
#pragma unroll
        for (int k = 0; k < LINES; k++)
            if (k < n) v[k] = load_line(slot + k * CUDA_GATHER_CHANNELS);
#pragma unroll
        for (int k = 0; k < LINES; k++) there = there && (k >= n || is_there(v[k]));
        if (there) break;
        if (looks < SPINS) continue;
        if (looks == SPINS) start = now_ns();
        if (looks % LOOKS == 0 && !goes_on(g, peer, start, looks / LOOKS % HOST_LOOKS == (unsigned)id % HOST_LOOKS)) return false;
        nap_ns(NAP_NS); /* whoever is late by so much is not held up by it */
    }
#pragma unroll
    for (int k = 0; k < LINES; k++)
        if (k < n) store_line(slot + k * CUDA_GATHER_CHANNELS, {{UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX}});
    return true;
}

/* Where rank `to` has what `from` sends to it, by channel; odd: of the second slot. */
static __device__ __forceinline__ struct line *slot_of(const struct launch &l, int to, int from, bool odd) {
    const int pair = from < to ? from : from - 1;
    return (struct line *)l.g.slots[to] + (odd ? LINES * CUDA_GATHER_CHANNELS : 0) + pair * l.channels;
}

template <typename T, bool WHOLE, bool ADD> static __device__ __forceinline__ void exchange(const struct launch &l, int peer) {
    const int id = (int)(blockIdx.x * blockDim.x + threadIdx.x), n = (int)(gridDim.x * blockDim.x);
    const struct columns own = columns_of<T>(l.a, l.g.rank), its = columns_of<T>(l.a, peer);
    const int most = own.lines > its.lines ? own.lines : its.lines;
    const T *const x = (const T *)l.a.x.data + l.a.y.dim[0] * own.first;
    uint32_t *const count = l.g.words + 1 + (peer < l.g.rank ? peer : peer - 1) * l.channels + id;
    const uint32_t lost = load_relaxed(l.g.words);
    uint32_t round = *count;
    for (int lo = id;; lo += LINES * n, round++) {
        struct line v[LINES], base[LINES] = {};
        struct line *const out = slot_of(l, peer, l.g.rank, round & 1) + id, *const in = slot_of(l, l.g.rank, peer, round & 1) + id;
        int sent = 1, got = 1;
#pragma unroll
        for (int k = 0; k < LINES; k++) {
            const int i = lo + k * n;
            v[k] = {};
            if (i < own.lines) sent = k + 1, v[k] = read_line<T, WHOLE>(x, own.count, i);
        }
        if (lost) return; /* its loads go together with those above */
#pragma unroll
        for (int k = 0; k < LINES; k++)
            if (k < sent) store_line(out + k * CUDA_GATHER_CHANNELS, v[k]);
#pragma unroll
        for (int k = 0; k < LINES; k++) {
            const int i = lo + k * n;
            if (i < its.lines) got = k + 1;
            if (i < its.lines) base[k] = base_of<T, WHOLE, ADD>(l.a, its, i);
        }
        if (!receive(l.g, peer, id, in, got, v)) return;
#pragma unroll
        for (int k = 0; k < LINES; k++)
            if (lo + k * n < its.lines) put_line<T, WHOLE, ADD>(l.a, its, lo + k * n, v[k], base[k]);
        if (lo - id + LINES * n >= most) break; /* of all threads: the last round */
        fence_system();
    }
    *count = round + 1;
}

template <typename T, bool WHOLE, bool ADD>
__global__ static void __launch_bounds__(THREADS) gather_columns_kernel(const __grid_constant__ struct launch l) {
    const int peer = (int)blockIdx.y;
    pdl_launch_dependents();
    pdl_wait();
    if (peer != l.g.rank) {
        exchange<T, WHOLE, ADD>(l, peer);
        return;
    }
    const struct columns own = columns_of<T>(l.a, peer);
    const T *const x = (const T *)l.a.x.data + l.a.y.dim[0] * own.first;
    for (int i = (int)(blockIdx.x * blockDim.x + threadIdx.x); i < own.lines; i += (int)(gridDim.x * blockDim.x)) {
        const struct line base = base_of<T, WHOLE, ADD>(l.a, own, i), v = read_line<T, WHOLE>(x, own.count, i);
        put_line<T, WHOLE, ADD>(l.a, own, i, v, base);
    }
}

/* ---- the host's ---- */

typedef void (*kernel_fn)(const struct launch);
template <typename T, bool WHOLE> static kernel_fn kernel_of(bool add) {
    return add && sizeof(T) == 4 ? gather_columns_kernel<uint32_t, WHOLE, true> : gather_columns_kernel<T, WHOLE, false>;
}
static kernel_fn kernel_of(bool bf16, bool whole, bool add) {
    if (bf16) return whole ? kernel_of<uint16_t, true>(add) : kernel_of<uint16_t, false>(add);
    return whole ? kernel_of<uint32_t, true>(add) : kernel_of<uint32_t, false>(add);
}

int cuda_load_gather(void) {
    for (int i = 0; i < 8; i++) {
        cudaFuncAttributes a;
        CU_TRY(cudaFuncGetAttributes(&a, kernel_of(i & 1, i & 2, i & 4)));
    }
    return 0;
}

/* As many threads as there are lines of the largest block, and a line each, if that many channels are there. */
int cuda_gather_columns(struct cuda *c, const struct cuda_gather *g, const struct join_columns_args *a) {
    const bool bf16 = a->y.dt == DT_BF16;
    const int per = bf16 ? per_line<uint16_t>() : per_line<uint32_t>(), blocks = BLOCKS / (g->size - 1);
    const struct launch l = {*g, *a, blocks * THREADS};
    bool whole = a->y.dim[1] % per == 0;
    int most = 0;
    for (const void *p : {a->y.data, a->from.data, a->x.data}) whole = whole && (uintptr_t)p % LINE == 0;
    for (int r = 0; r < a->n; r++) {
        const int n = bf16 ? columns_of<uint16_t>(*a, r).lines : columns_of<uint32_t>(*a, r).lines;
        whole = whole && a->cut[r] % per == 0;
        most = n > most ? n : most;
    }
    const int wanted = (most + THREADS - 1) / THREADS;
    const dim3 grid((unsigned)(wanted < blocks ? wanted : blocks), (unsigned)g->size);
    CU_TRY(cuda_launch_pdl(c, kernel_of(bf16, whole, a->from.data != NULL), grid, THREADS, 0, l));
    return 0;
}
