/* group_streams.cu - peers.cu, gather_columns.cu, nccl.cu and collective_staged.c without a GPU: ranks are threads, whose streams
 * (runtime.cu) are late at random. Folds, all-gathers and all-to-alls of random sizes, of two groups that share devices, end in the
 * bits of one process although every buffer is used again at once, slots of gathers in CUDA graphs too; on as few hardware queues
 * as one; and a rank that is left alone closes its groups, or hears which rank is late. Kernels are loaded as by the driver: late,
 * and then it waits for all streams.
 * With thread sanitizer: nothing is read before it is there or written while it is read. */
#include "device/cuda/context.cuh"
extern "C" {
#include "device/collective/collective_int.h"
}
#include "device/collective/peers.h"
#include "device/cuda/collective/system_scope.cuh"

#include "base/buf.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <random>
#include <signal.h>
#include <thread>
#include <unistd.h>
#include <vector>

#ifdef __SANITIZE_THREAD__
enum { ROUNDS = 12 };
#else
enum { ROUNDS = 60 };
#endif
enum { MOST = 60000, ROWS = 150, WIDTH = 64, SLOTS = 2, FLIGHT = 3, SHARED = 60000, TIMES = 3, COLUMNS = 2000 };

#define OK(call)                                           \
    do {                                                   \
        if ((call) < 0) {                                  \
            fprintf(stderr, "%s: %s\n", #call, err_msg()); \
            _exit(1);                                      \
        }                                                  \
    } while (0)

/* ---- what ranks have in common ---- */

struct barrier {
    std::mutex lock;
    std::condition_variable all;
    int size, there, round;
    void wait() {
        std::unique_lock<std::mutex> own(lock);
        const int now = round;
        if (++there == size) {
            there = 0;
            round++;
            all.notify_all();
        }
        all.wait(own, [&] { return round != now; });
    }
};
struct world { /* of a group */
    barrier b;
    std::vector<void *> p;
    std::vector<dev_peer_memory> flags;
    std::vector<void *> whole;
    unsigned char id[DEV_NCCL_ID];
};
struct comm {
    world *w;
    int rank;
};
struct run {
    bool peers;
    int size, queues, rounds;
    unsigned seed;
    bool alone, lost;  /* at the end rank 0 goes on by itself; flags that are written do not come */
    double deadline_s; /* of a gather in a graph */
    world all, few;
    std::vector<const void *> x[SLOTS], dx[SLOTS], ids[SLOTS];
    std::atomic<int> bad;
};

extern "C" int comm_all_gather(struct comm *c, void *all, const size_t *at) {
    world *const w = c->w;
    std::vector<char> got(at[w->b.size]);
    w->p[(size_t)c->rank] = all;
    w->b.wait();
    for (int r = 0; r < w->b.size; r++) memcpy(got.data() + at[r], (char *)w->p[(size_t)r] + at[r], at[r + 1] - at[r]);
    w->b.wait();
    memcpy(all, got.data(), got.size());
    return 0;
}
extern "C" int dev_copy_out(struct dev *d, void *to, const void *from, size_t n) {
    cudaStreamSynchronize(cuda_of(d)->stream);
    memcpy(to, from, n);
    return 0;
}

/* ---- a group, as collective.c has it ---- */

static void open_group(const struct run *k, struct collective *g, world *w, struct dev *d, int rank, void *whole) {
    *g = {};
    g->d = d;
    g->comm = new comm{w, rank};
    g->rank = rank;
    g->size = w->b.size;
    w->whole[(size_t)rank] = whole;
    if (k->peers) {
        OK(cuda_peers.open(d, rank, g->size, &g->peers, &w->flags[(size_t)rank]));
        w->b.wait();
        for (int r = 0; r < g->size; r++)
            if (r != rank) OK(cuda_peers.flags(g->peers, r, &w->flags[(size_t)r]));
        w->b.wait();
        if (!k->lost) OK(cuda_peers.greeted(g->peers));
        else if (cuda_peers.greeted(g->peers) != ERR_UNSUPPORTED) exit(1);
        OK(cuda_peers.graphs(g->peers, k->deadline_s));
    } else {
        g->move = &cuda_nccl_ops.transport;
        if (rank == 0) OK(cuda_nccl_ops.id(d, w->id));
        w->b.wait();
        const struct dev_nccl_args a = {rank, g->size, w->id, 60};
        OK(cuda_nccl_ops.open(d, &a, &g->t));
    }
    w->b.wait();
}
static void close_group(struct collective *g) {
    if (g->peers) cuda_peers.close(g->peers);
    if (g->t) g->move->close(g->t);
    delete g->comm;
    *g = {};
}
static int reuse(struct collective *g, int64_t ticket) {
    if (ticket == 0) return 0;
    return g->peers ? cuda_peers.reuse(g->peers, ticket) : g->move->reuse(g->t, ticket);
}
static int join(struct collective *g) { return g->peers ? cuda_peers.join(g->peers) : g->move->join(g->t); }
static int fold(struct run *k, struct collective *g, const struct dev_bucket *b, size_t slot, int64_t *ticket) {
    *ticket = ++g->ticket;
    if (!g->peers) return collective_staged_fold(g, b);
    return cuda_peers.fold(g->peers, b, b->x ? k->x[slot].data() : NULL, b->ids ? k->ids[slot].data() : NULL,
                           b->ids ? k->dx[slot].data() : NULL);
}
static int gather(struct collective *g, const world *w, const size_t *at, int64_t parts, int64_t *ticket) {
    *ticket = ++g->ticket;
    void *const *const whole = w->whole.data();
    OK(g->peers ? cuda_peers.gather(g->peers, whole, at, parts) : g->move->gather(g->t, whole[g->rank], at, parts));
    return g->peers ? cuda_peers.gathered(g->peers) : g->move->gathered(g->t);
}

/* As collective.c's. */
static int exchange(struct collective *g, const world *w, const struct dev_exchange *x) {
    const int64_t ticket = ++g->ticket;
    if (!g->peers) {
        OK(collective_staged_exchange(g, x));
    } else {
        std::vector<void *> of((size_t)g->size);
        std::vector<size_t> at((size_t)g->size + 1);
        collective_exchange_places(g->rank, g->size, x, w->whole.data(), of.data(), at.data());
        OK(cuda_peers.gather(g->peers, of.data(), at.data(), 1));
        OK(cuda_peers.gathered(g->peers));
    }
    return reuse(g, ticket);
}

/* ---- numbers that all ranks draw alike ---- */

struct round {
    bool x, rows, add;
    int n;
    unsigned seed;
    int64_t count, width, stride; /* stride 0: a summand of each rank, by default */
    std::vector<int64_t> cut, n_rows;
    std::vector<int> times; /* summands of a rank */
};

/* Values whose sums depend on the order. what: 0: x, 1: dx, 2: own's first content, 3 and more: further summands. */
static float value(const struct round &w, int rank, int what, int64_t i) {
    uint32_t v = w.seed * 2654435761u + (uint32_t)(rank * 3 + what) * 40503u + (uint32_t)i * 2246822519u;
    v = (v ^ v >> 13) * 3266489917u;
    return (float)((int32_t)(v ^ v >> 16) >> 8) * (v & 1 ? 0x1p-20f : 0x1p-10f);
}
static int32_t id_of(const struct round &w, int rank, int64_t t) {
    const uint32_t v = (w.seed + (uint32_t)rank * 7919u + (uint32_t)t / 3) * 2654435761u;
    return (int32_t)((int64_t)(v >> 8) % (w.count / w.width));
}

/* n - 1 places of [0, top] between its ends, with empty shares. */
template <class T> static std::vector<T> draw_cuts(std::mt19937 &rng, int n, T top) {
    std::vector<T> cut(1);
    for (int i = 1; i < n; i++) cut.push_back(rng() % 4 ? (T)(rng() % ((uint64_t)top + 1)) : rng() % 2 ? top : 0);
    cut.push_back(top);
    std::sort(cut.begin(), cut.end());
    return cut;
}

static struct round draw(std::mt19937 &rng, int size) {
    struct round w = {};
    const unsigned kind = (unsigned)rng() % 3; /* a bucket, tied with rows, rows alone */
    w.x = kind < 2;
    w.rows = kind > 0;
    w.add = rng() % 2;
    w.n = 1 + (int)(rng() % (unsigned)size);
    w.seed = (unsigned)rng();
    w.count = rng() % 4 == 0 ? (int64_t)MOST : 1 + (int64_t)(rng() % 3000);
    if (!w.rows && rng() % 8 == 0) w.count = 0;
    w.width = w.rows ? std::min<int64_t>(1 + rng() % WIDTH, w.count) : 1;
    w.count = w.count / w.width * w.width;
    const int64_t stride = (w.count + 63) / 64 * 64;
    if (w.x && rng() % 2 && TIMES * stride <= MOST) w.stride = stride;
    for (int r = 0; r < size; r++) w.times.push_back(w.stride ? 1 + (int)(rng() % TIMES) : 1);
    w.cut = draw_cuts<int64_t>(rng, size, w.count);
    for (int r = 0; r < size; r++) w.n_rows.push_back(rng() % 4 ? rng() % ROWS : 0);
    return w;
}

/* Elements [lo, hi) of the bucket, on one process. */
static std::vector<float> expected(const struct round &w, int64_t lo, int64_t hi) {
    std::vector<float> y;
    for (int64_t i = lo; i < hi; i++) y.push_back(w.add ? value(w, 0, 2, i) : 0);
    for (int r = 0; r < w.n; r++) {
        for (int s = 0; w.x && s < w.times[(size_t)r]; s++)
            for (int64_t i = lo; i < hi; i++) {
                float &sum = y[(size_t)(i - lo)];
                sum = r == 0 && s == 0 && !w.add ? value(w, r, 0, i) : sum + value(w, r, 300 * s, i);
            }
        std::vector<float> rows(w.rows ? (size_t)w.count : 0);
        std::vector<bool> there(rows.size());
        for (int64_t i = 0; w.rows && i < w.n_rows[(size_t)r] * w.width; i++) {
            const size_t at = (size_t)(id_of(w, r, i / w.width) * w.width + i % w.width);
            rows[at] += value(w, r, 1, i);
            there[at] = true;
        }
        for (int64_t i = lo; w.rows && i < hi; i++)
            if (there[(size_t)i]) y[(size_t)(i - lo)] += rows[(size_t)i];
    }
    return y;
}

/* ---- a rank ---- */

struct rank {
    struct run *k;
    int rank;
    struct cuda c;
    struct dev d;
    struct collective all, few;
    float *x[SLOTS], *dx[SLOTS], *own[FLIGHT];
    int32_t *ids[SLOTS];
    char *whole, *whole_few;
    char *columns[3];        /* (COLUMNS) of f32: x, y, from of gathers of columns */
    int64_t read, read_few;  /* tickets of the last all-gathers */
    std::vector<char> taken; /* by an all-to-all */
};

template <class T> static T *memory(size_t n) {
    void *p;
    cudaMalloc(&p, n * sizeof(T));
    return (T *)p;
}

/* The bucket's summands and the sum's first content, on the compute stream; what else is there is no number. */
static void fill(struct rank *k, const struct round &w, int slot, float *own) {
    float *const x = k->x[slot], *const dx = k->dx[slot];
    int32_t *const ids = k->ids[slot];
    const int rank = k->rank;
    streams_push(k->c.stream, [=] {
        const int64_t rows = w.rows && rank < w.n ? w.n_rows[(size_t)rank] : 0;
        memset(x, 0xff, MOST * sizeof *x);
        memset(dx, 0xff, ROWS * WIDTH * sizeof *dx);
        memset(ids, 0x7f, ROWS * sizeof *ids);
        for (int s = 0; w.x && rank < w.n && s < w.times[(size_t)rank]; s++)
            for (int64_t i = 0; i < w.count; i++) x[s * w.stride + i] = value(w, rank, 300 * s, i);
        for (int64_t i = 0; i < rows * w.width; i++) dx[i] = value(w, rank, 1, i);
        for (int64_t i = 0; i < rows; i++) ids[i] = id_of(w, rank, i);
        const int64_t lo = w.cut[(size_t)rank], hi = w.cut[(size_t)rank + 1];
        for (int64_t i = lo; i < hi; i++) own[i - lo] = value(w, 0, 2, i);
        return true;
    });
}

static void check(struct rank *k, const struct round &w, const float *own) {
    struct run *const run = k->k;
    const int rank = k->rank;
    streams_push(k->c.stream, [=] {
        const int64_t lo = w.cut[(size_t)rank], hi = w.cut[(size_t)rank + 1];
        const std::vector<float> want = expected(w, lo, hi);
        if (hi > lo && memcmp(want.data(), own, want.size() * sizeof *own) != 0 && run->bad++ < 3)
            fprintf(stderr, "rank %d: a fold of %d ranks%s%s%s: other bits in %lld..%lld of %lld\n", rank, w.n, w.x ? ", x" : "",
                    w.rows ? ", rows" : "", w.add ? ", add" : "", (long long)lo, (long long)hi, (long long)w.count);
        return true;
    });
}

/* Parts with gaps, which are looked at by what the compute stream does next. */
static void gather_once(struct rank *k, std::mt19937 &rng, bool few) {
    struct collective *const g = few ? &k->few : &k->all;
    const world *const w = few ? &k->k->few : &k->k->all;
    char *const whole = few ? k->whole_few : k->whole;
    struct run *const run = k->k;
    const unsigned seed = (unsigned)rng();
    const int parts = (int)(rng() % 4), n = w->b.size, rank = k->rank;
    std::vector<size_t> at;
    size_t end = 0;
    for (int i = 0; i < parts; i++) {
        for (size_t cut : draw_cuts<size_t>(rng, n, rng() % (SHARED / 4))) at.push_back(end + cut);
        end = at.back() + rng() % 9;
    }
    if (rank >= n) return;
    OK(reuse(g, few ? k->read_few : k->read));
    streams_push(k->c.stream, [=] {
        memset(whole, 0xcd, SHARED);
        for (int i = 0; i < parts; i++)
            for (size_t b = at[(size_t)(i * (n + 1) + rank)]; b < at[(size_t)(i * (n + 1) + rank + 1)]; b++)
                whole[b] = (char)(seed + b * 7);
        return true;
    });
    OK(gather(g, w, at.data(), parts, few ? &k->read_few : &k->read));
    streams_push(k->c.stream, [=] {
        bool same = true;
        for (int i = 0; i < parts; i++)
            for (size_t b = at[(size_t)(i * (n + 1))]; b < at[(size_t)(i * (n + 1) + n)]; b++)
                same = same && whole[b] == (char)(seed + b * 7);
        if (!same && run->bad++ < 3) fprintf(stderr, "rank %d: other bytes in an all-gather\n", rank);
        return true;
    });
}

/* Columns of all ranks, some of none, which may be added to what y has; what this rank has given is written over at once. */
static void gather_columns_once(struct rank *k, std::mt19937 &rng, bool few) {
    struct collective *const g = few ? &k->few : &k->all;
    struct run *const run = k->k;
    const int n = few ? run->few.b.size : run->all.b.size, rank = k->rank;
    const unsigned seed = (unsigned)rng(), unit = rng() % 2 ? 8 : 1, shift = rng() % 4 ? 0 : 1;
    const bool bf16 = rng() % 2, from = !bf16 && rng() % 2, same = rng() % 2;
    const size_t bytes = bf16 ? 2 : 4, room = COLUMNS * sizeof(float);
    struct join_columns_args a = {};
    const int64_t rows = 1 + rng() % 9, columns = 1 + (int64_t)(rng() % (rng() % 2 ? COLUMNS / unit / 9 : 4));
    const std::vector<int64_t> cut = draw_cuts<int64_t>(rng, n, columns);
    if (rank >= n) return;
    char *const x = k->columns[0] + shift * bytes, *const y = k->columns[1] + shift * bytes;
    char *const base = same ? y : k->columns[2] + shift * bytes;
    for (int r = 0; r <= n; r++) a.cut[r] = cut[(size_t)r] * unit;
    const int64_t all = columns * unit, lo = a.cut[rank] * rows, hi = a.cut[rank + 1] * rows;
    a.n = n;
    a.y = tensor_2d(y, bf16 ? DT_BF16 : DT_F32, rows, all);
    a.x = tensor_1d(x, a.y.dt, rows * all);
    if (from) a.from = tensor_2d(base, DT_F32, rows, all);
    /* Element i of the blocks; all ones now and then. */
    const auto bits = [=](int64_t i) -> uint32_t {
        const uint32_t v = (seed + (uint32_t)i) * 2654435761u, f = (v & 0x807fffffu) | 0x3f000000u | (v & 7) << 24;
        return v >> 29 == 0 ? UINT32_MAX >> (bf16 ? 16 : 0) : bf16 ? f >> 16 : f;
    };
    const auto base_of = [=](int64_t i) { return (float)((seed ^ (uint32_t)i) % 1000) * 0.37f; };
    streams_push(k->c.stream, [=] {
        memset(x, 0xcd, room - 8);
        memset(y, 0xcd, room - 8);
        for (int64_t i = lo; i < hi; i++) {
            const uint32_t v = bits(i);
            memcpy(x + (size_t)i * bytes, &v, bytes);
        }
        for (int64_t i = 0; from && i < rows * all; i++) ((float *)base)[i] = base_of(i);
        return true;
    });
    OK(cuda_peers.gather_columns(g->peers, &a));
    streams_push(k->c.stream, [=] {
        bool good = true;
        memset(x, 0xab, room - 8);
        for (int r = 0; r < n; r++)
            for (int64_t i = a.cut[r] * rows, width = a.cut[r + 1] - a.cut[r]; i < a.cut[r + 1] * rows; i++) {
                const int64_t at = (i - a.cut[r] * rows) / width * all + a.cut[r] + (i - a.cut[r] * rows) % width;
                uint32_t want = bits(i), got = 0;
                if (want == UINT32_MAX >> (bf16 ? 16 : 0)) want = bf16 ? 0x7fffu : 0x7fffffffu;
                if (from) want = __float_as_uint(base_of(at) + __uint_as_float(want));
                memcpy(&got, y + (size_t)at * bytes, bytes);
                good = good && got == want;
            }
        for (size_t b = (size_t)(rows * all) * bytes; b < room - 8 && !(from && same); b++) good = good && y[b] == (char)0xcd;
        if (!good && run->bad++ < 3) fprintf(stderr, "rank %d: other columns in a gather of %d ranks\n", rank, n);
        return true;
    });
}

/* Of one row, a column of each rank, for which nobody looks. */
static int gather_a_row(struct collective *g, char *const *columns) {
    struct join_columns_args a = {};
    a.n = g->size;
    a.y = tensor_2d(columns[1], DT_F32, 1, g->size);
    a.x = tensor_1d(columns[0], DT_F32, g->size);
    for (int r = 0; r <= g->size; r++) a.cut[r] = r;
    return cuda_peers.gather_columns(g->peers, &a);
}

/* Each rank has something for each other one, or nothing; what it gave is written over at once. */
static void exchange_once(struct rank *k, std::mt19937 &rng) {
    const int n = k->all.size, rank = k->rank;
    char *const whole = k->whole, *const taken = k->taken.data();
    struct run *const run = k->k;
    const unsigned seed = (unsigned)rng();
    std::vector<size_t> at, bytes;
    for (int s = 0; s < n; s++) {
        const std::vector<size_t> cut = draw_cuts<size_t>(rng, n, rng() % (SHARED / 4));
        for (int r = 0; r < n; r++) at.push_back(cut[(size_t)r]);
        for (int r = 0; r < n; r++) bytes.push_back(cut[(size_t)r + 1] - cut[(size_t)r]);
    }
    OK(reuse(&k->all, k->read));
    streams_push(k->c.stream, [=] {
        for (size_t b = 0; b < SHARED / 4; b++) whole[b] = (char)(seed + (unsigned)rank * 31 + b * 7);
        return true;
    });
    const struct dev_exchange x = {whole, at.data(), bytes.data(), taken};
    OK(exchange(&k->all, &run->all, &x));
    streams_push(k->c.stream, [=] {
        bool same = true;
        const char *got = taken;
        for (int r = 0; r < n; r++)
            for (size_t b = 0; b < bytes[(size_t)(r * n + rank)]; b++, got++)
                same = same && (r == rank || *got == (char)(seed + (unsigned)r * 31 + (at[(size_t)(r * n + rank)] + b) * 7));
        if (!same && run->bad++ < 3) fprintf(stderr, "rank %d: other bytes in an all-to-all\n", rank);
        memset(whole, 0xcd, SHARED);
        return true;
    });
}

static struct dev_bucket bucket(const struct rank *k, const struct round &w, int slot, float *own) {
    struct dev_bucket b = {};
    b.x = w.x ? k->x[slot] : NULL;
    b.cut = w.cut.data();
    b.n = w.n;
    b.times = w.stride ? w.times.data() : NULL;
    b.stride = w.stride;
    b.own = own;
    b.add = w.add;
    b.ids = w.rows ? k->ids[slot] : NULL;
    b.dx = w.rows ? k->dx[slot] : NULL;
    b.n_rows = w.n_rows.data();
    b.width = w.width;
    return b;
}

static void run_rounds(struct rank *k) {
    const struct run *const run = k->k;
    std::mt19937 rng(run->seed), alone(run->seed * 64 + (unsigned)k->rank);
    int64_t ticket[SLOTS] = {};
    struct round w[FLIGHT];
    int slot = 0;
    for (int done = 0; done < run->rounds;) {
        const int flight = 1 + (int)(rng() % FLIGHT);
        for (int f = 0; f < flight; f++, slot = (slot + 1) % SLOTS) {
            w[f] = draw(rng, run->size);
            if (alone() % 4 == 0) usleep((useconds_t)(alone() % 1000)); /* ranks are late in turn */
            OK(reuse(&k->all, ticket[slot]));
            fill(k, w[f], slot, k->own[f]);
            const struct dev_bucket b = bucket(k, w[f], slot, k->own[f]);
            OK(fold(k->k, &k->all, &b, (size_t)slot, &ticket[slot]));
            for (const bool few : {false, true})
                if (rng() % 3 == 0) gather_once(k, rng, few);
            /* An abandoned rank's first such gather comes behind what waits. */
            for (const bool few : {false, true})
                for (unsigned n = run->peers && !run->alone ? (unsigned)rng() % 4 : 0; n > 0; n--) gather_columns_once(k, rng, few);
            if (rng() % 3 == 0) exchange_once(k, rng);
        }
        OK(join(&k->all));
        if (alone() % 2) cudaStreamSynchronize(k->c.stream);
        for (int f = 0; f < flight; f++, done++) check(k, w[f], k->own[f]);
    }
    streams_idle(); /* nothing is queued anywhere when a group is closed */
}

/* Folds, each behind what waits for the one before, and an all-gather of the second group. */
static void go_on_alone(struct rank *k) {
    std::mt19937 rng(1);
    struct round w = draw(rng, k->k->size);
    w.x = true;
    w.rows = false;
    w.n = k->k->size;
    w.stride = 0;
    for (int i = 0; i < 3; i++) {
        const struct dev_bucket b = bucket(k, w, 0, k->own[0]);
        int64_t ticket;
        OK(fold(k->k, &k->all, &b, 0, &ticket));
        OK(reuse(&k->all, ticket));
    }
    std::vector<size_t> at;
    for (int r = 0; r <= k->few.size; r++) at.push_back((size_t)r * 100);
    OK(gather(&k->few, &k->k->few, at.data(), 1, &k->read_few));
    if (k->k->peers) OK(gather_a_row(&k->few, k->columns));
}

/* The first gather of some ends after its deadline, the others at once. */
static void wait_in_vain(struct rank *k) {
    enum { GATHERS = 30 };
    const int before = cuda_peers.lost(k->all.peers);
    const uint64_t start = now_ns();
    for (int i = 0; i < GATHERS; i++) OK(gather_a_row(&k->all, k->columns));
    cudaStreamSynchronize(k->c.stream);
    const double s = (double)(now_ns() - start) * 1e-9, least = k->k->deadline_s;
    const int after = cuda_peers.lost(k->all.peers);
    if (before == -1 && after == 1 && s >= least && s < GATHERS * least) return;
    fprintf(stderr, "a rank that does not come: %d, then %d, after %.3f s\n", before, after, s);
    k->k->bad++;
}

/* Closes its groups, with what waits in both. */
static void be_left(struct rank *k) {
    const bool in_time = k->k->deadline_s < 1;
    if (k->k->peers && in_time) wait_in_vain(k);
    go_on_alone(k);
    close_group(&k->all);
    const int size = k->few.size, lost = k->few.peers ? cuda_peers.lost(k->few.peers) : size;
    close_group(&k->few);
    if (lost == size || in_time) return;
    fprintf(stderr, "a gather that was ended by close: %d\n", lost);
    k->k->bad++;
}

/* While the compute stream is busy one group is closed; the other goes on. Not by NCCL, where close ends all of this GPU. */
static void go_on_with_one(struct rank *k) {
    std::mt19937 rng(k->k->seed);
    streams_push(k->c.stream, [] { return usleep(3000), true; });
    close_group(&k->few);
    k->k->all.b.wait(); /* what close sets no other rank has written meanwhile */
    for (int i = 0; i < 4; i++) gather_once(k, rng, false);
    for (int i = 0; i < 4; i++) gather_columns_once(k, rng, false);
    streams_idle();
    if (cuda_peers.lost(k->all.peers) != -1) k->k->bad++;
}

static void be_rank(struct run *run, int number) {
    struct rank k = {};
    k.k = run;
    k.taken.resize((size_t)run->size * SHARED);
    k.rank = number;
    k.d.ctx = &k.c;
    streams_device(run->queues);
    OK(cudaStreamCreateWithPriority(&k.c.stream, cudaStreamNonBlocking, 0));
    for (size_t s = 0; s < SLOTS; s++) {
        run->x[s][(size_t)number] = k.x[s] = memory<float>(MOST);
        run->dx[s][(size_t)number] = k.dx[s] = memory<float>(ROWS * WIDTH);
        run->ids[s][(size_t)number] = k.ids[s] = memory<int32_t>(ROWS);
    }
    for (float *&own : k.own) own = memory<float>(MOST);
    k.whole = memory<char>(SHARED);
    k.whole_few = memory<char>(SHARED);
    for (char *&columns : k.columns) columns = memory<char>(COLUMNS * sizeof(float));
    open_group(run, &k.all, &run->all, &k.d, number, k.whole);
    if (number < run->few.b.size) open_group(run, &k.few, &run->few, &k.d, number, k.whole_few);
    run_rounds(&k);
    run->all.b.wait();
    if (run->alone && number == 0) be_left(&k);
    if (!run->alone && run->peers) go_on_with_one(&k);
    run->all.b.wait();
    close_group(&k.few);
    close_group(&k.all);
    run->all.b.wait(); /* its memory was there until now */
    for (size_t s = 0; s < SLOTS; s++)
        for (void *p : {(void *)k.x[s], (void *)k.dx[s], (void *)k.ids[s]}) cudaFree(p);
    for (float *own : k.own) cudaFree(own);
    for (char *columns : k.columns) cudaFree(columns);
    cudaFree(k.whole);
    cudaFree(k.whole_few);
    streams_end();
}

/* ---- all ---- */

static char now[128];

static void too_long(int) {
    (void)!write(STDERR_FILENO, now, strlen(now));
    _exit(1);
}

static bool try_run(bool peers, int size, int queues, int rounds, unsigned seed, bool alone) {
    struct run k = {};
    std::vector<std::thread> ranks;
    k.peers = peers;
    k.size = size;
    k.queues = queues;
    k.rounds = rounds;
    k.seed = seed;
    k.alone = alone;
    k.deadline_s = alone && size == 2 ? 0.1 : 60;
    k.all.b.size = size;
    k.few.b.size = size > 2 ? size - 1 : size; /* a second group on their devices */
    for (world *w : {&k.all, &k.few}) {
        w->p.resize((size_t)size);
        w->flags.resize((size_t)size);
        w->whole.resize((size_t)w->b.size);
    }
    for (size_t s = 0; s < SLOTS; s++)
        for (auto *list : {&k.x[s], &k.dx[s], &k.ids[s]}) list->resize((size_t)size);
    snprintf(now, sizeof now, "%s, %d ranks, %d hardware queues%s, seed %u: it hangs\n", peers ? "peers" : "NCCL", size, queues,
             alone ? ", one is left alone" : "", seed);
    alarm(120);
    for (int r = 0; r < size; r++) ranks.emplace_back(be_rank, &k, r);
    for (std::thread &t : ranks) t.join();
    printf("%s, %d ranks, %d hardware queues%s: %s\n", peers ? "peers" : "NCCL", size, queues, alone ? ", one is left alone" : "",
           k.bad ? "FAILED" : "equal bits");
    return !k.bad;
}

/* What a rank writes does not come: the group is not used. */
static void be_lost(struct run *run, int number) {
    struct rank k = {};
    k.d.ctx = &k.c;
    streams_device(8);
    OK(cudaStreamCreateWithPriority(&k.c.stream, cudaStreamNonBlocking, 0));
    open_group(run, &k.all, &run->all, &k.d, number, NULL);
    run->all.b.wait();
    close_group(&k.all);
    run->all.b.wait();
    streams_end();
}

static void try_lost() {
    struct run k = {};
    std::vector<std::thread> ranks;
    k.peers = k.lost = true;
    k.all.b.size = 2;
    k.all.flags.resize(2);
    k.all.whole.resize(2);
    streams_lose_writes(true);
    for (int r = 0; r < 2; r++) ranks.emplace_back(be_lost, &k, r);
    for (std::thread &t : ranks) t.join();
    streams_lose_writes(false);
    printf("peers, writes that are lost: not used\n");
}

int main(int argc, char **argv) {
    const unsigned seed = argc > 1 ? (unsigned)atoi(argv[1]) : 1;
    bool good = true;
    signal(SIGALRM, too_long);
    try_lost();
    for (const bool peers : {true, false}) {
        for (int size = 2; size <= 4; size++)
            for (const int queues : {8, 1}) good &= try_run(peers, size, queues, ROUNDS, seed + (unsigned)size, false);
        for (int size = 2; size <= 3; size++) good &= try_run(peers, size, 8, 4, seed, true);
    }
    fflush(NULL);
    _exit(!good); /* what the stand-in for NCCL has is left */
}
