/* gpu_delta_inexact.cu - what exactness of the gated delta rule costs: times of inexact forms (gpu_delta_inexact.cuh) at the shapes
 * of `verlc bench delta`, as JSON, a line each, which tools/delta_exactness.py puts in ratio to it. For a person to run.
 *
 *   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -I. -Isrc -o gpu_delta_inexact tools/gpu_delta_inexact.cu
 *   gpu_delta_inexact [BATCH LEN KEY_HEADS VALUE_HEADS ROWS...]      (16 1024 16 16 80 512)
 *
 * First every form is compared with a plain recurrence in double on a small case; nothing is timed where one is wrong. States of bf16
 * are timed too, but not counted: ours are f32.
 * Heads are of 128. Backward is not here: ours makes its products itself, so an inexact form has the same. */
#include "tools/gpu_delta_inexact.cuh"

#include <algorithm>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

#ifndef GPU_DELTA_INEXACT_TEST /* which defines these for a CPU */
#define C(x)                                                         \
    do {                                                             \
        const cudaError_t e_ = (x);                                  \
        if (e_) {                                                    \
            fprintf(stderr, "%s: %s\n", #x, cudaGetErrorString(e_)); \
            exit(1);                                                 \
        }                                                            \
    } while (0)
static cudaStream_t stream;
static void *gpu_alloc(size_t bytes) {
    void *p;
    C(cudaMalloc(&p, bytes));
    C(cudaMemset(p, 0xff, bytes)); /* NaN */
    C(cudaDeviceSynchronize());    /* `stream` waits for no other */
    return p;
}
static void gpu_free(void *p) { C(cudaFree(p)); }
static void gpu_copy(void *to, const void *from, size_t bytes) {
    C(cudaStreamSynchronize(stream));
    C(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
}
static void launch(void (*kernel)(delta_shape), dim3 grid, int threads, size_t shared, bool early, const delta_shape &j) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = early;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = dim3(threads), config.dynamicSmemBytes = shared, config.stream = stream;
    config.attrs = &attribute, config.numAttrs = early ? 1 : 0;
    C(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
    C(cudaLaunchKernelEx(&config, kernel, j));
}
#endif

/* ---- the forms ---- */

static void run_parts(const delta_shape &j) {
    launch(delta_parts, dim3(j.hv, j.n, j.max_chunks), PART_THREADS, sizeof(parts_memory), false, j);
}
template <int STAGES, int AT_ONCE> static void run_scan(const delta_shape &j) {
    run_parts(j);
    launch(j.e ? delta_scan<STAGES, AT_ONCE, true> : delta_scan<STAGES, AT_ONCE, false>, dim3(j.group, j.hk, j.n), SCAN_THREADS,
           sizeof(scan_memory<STAGES>), false, j);
}
static void run_one(const delta_shape &j) {
    launch(j.e ? delta_one<true> : delta_one<false>, dim3(j.group, j.hk, j.n), ONE_THREADS, sizeof(one_memory), false, j);
}
template <class S, int COLUMNS> static void run_step(const delta_shape &j) {
    launch(delta_recurrence<S, COLUMNS>, dim3(DIM / COLUMNS, j.hv, j.n), 256, sizeof(typename step_plan<S, COLUMNS>::memory), true,
           j);
}
struct form {
    const char *name;
    void (*run)(const delta_shape &j);
    bool counted; /* states between calls are f32 */
};
static const form row_forms[] = {{"tiles, then two blocks of a multiprocessor", run_scan<1, 2>, true},
                                 {"tiles, then one block of two stages", run_scan<2, 4>, true},
                                 {"one kernel", run_one, true}};
static const form step_forms[] = {{"f32 state, 128 columns a block", run_step<float, 128>, true},
                                  {"f32 state, 64 columns a block", run_step<float, 64>, true},
                                  {"f32 state, 32 columns a block", run_step<float, 32>, true},
                                  {"bf16 state, 128 columns a block", run_step<bf16_bits, 128>, false},
                                  {"bf16 state, 64 columns a block", run_step<bf16_bits, 64>, false}};

/* ---- random inputs ---- */

static uint64_t drawn = 0x9e3779b97f4a7c15u;
static float uniform() { /* -1 to 1; splitmix64 */
    uint64_t x = drawn += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u, x = (x ^ x >> 27) * 0x94d049bb133111ebu, x ^= x >> 31;
    return (float)(x >> 40) * 0x1p-23f - 1;
}
static bf16_bits host_bf16(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return (bf16_bits)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
static float host_float(bf16_bits x) {
    const uint32_t u = (uint32_t)x << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
/* The same million of them again and again. */
static std::vector<bf16_bits> random_bf16(size_t n, float lo, float hi) {
    const size_t period = 1048573; /* a prime: rows of a power of two differ */
    std::vector<bf16_bits> v(n);
    for (size_t i = 0; i < n; i++) v[i] = i < period ? host_bf16(lo + (hi - lo) * (uniform() + 1) / 2) : v[i - period];
    return v;
}
template <class T> static T *to_gpu(const std::vector<T> &v) {
    T *const p = (T *)gpu_alloc(v.size() * sizeof(T));
    gpu_copy(p, v.data(), v.size() * sizeof(T));
    return p;
}
template <class T> static std::vector<T> from_gpu(const T *p, size_t n) {
    std::vector<T> v(n);
    gpu_copy(v.data(), p, n * sizeof(T));
    return v;
}

/* A batch of sequences on the GPU. */
struct batch {
    delta_shape j = {};
    std::vector<int> start;
    std::vector<bf16_bits> qkv, ba, a_log, dt_bias;
    size_t rows;
    batch(const std::vector<int> &lengths, int hk, int hv, int ba_more) {
        start.push_back(0);
        for (int n : lengths) start.push_back(start.back() + n), j.max_chunks = std::max(j.max_chunks, (n + 63) / 64);
        rows = (size_t)start.back();
        j.hk = hk, j.hv = hv, j.group = hv / hk, j.n = (int)lengths.size(), j.width = (2 * hk + hv) * DIM,
        j.ba_width = 2 * hv + ba_more;
        qkv = random_bf16(rows * j.width, -1, 1), ba = random_bf16(rows * j.ba_width, -2, 2);
        a_log = random_bf16(hv, -4, 0), dt_bias = random_bf16(hv, -1, 1);
        j.start = to_gpu(start), j.qkv = to_gpu(qkv), j.ba = to_gpu(ba), j.a_log = to_gpu(a_log), j.dt_bias = to_gpu(dt_bias);
        j.out = (bf16_bits *)gpu_alloc(rows * hv * DIM * sizeof *j.out);
    }
    batch(const batch &) = delete;
    void with_chunks() {
        const size_t entries = (size_t)j.n * j.max_chunks * j.hv;
        j.s = (float *)gpu_alloc((size_t)j.n * j.hv * DIM * DIM * sizeof *j.s);
        j.tiles = (bf16_bits *)gpu_alloc(entries * 2 * TILES * 256 * sizeof *j.tiles);
        j.scales = (chunk_scales *)gpu_alloc(entries * sizeof *j.scales);
    }
    void with_kept() {
        j.e = (float *)gpu_alloc(rows * j.hv * DIM * sizeof *j.e);
        j.states = (float *)gpu_alloc((rows / CHUNK_ROWS + 1) * j.hv * DIM * DIM * sizeof *j.states);
    }
    ~batch() {
        const void *const all[] = {j.start, j.qkv,  j.ba,     j.a_log, j.dt_bias, j.out,   j.s,
                                   j.s16,   j.slot, j.states, j.e,     j.tiles,   j.scales};
        for (const void *p : all)
            if (p) gpu_free((void *)p);
    }
};

/* ---- the plain recurrence ---- */

/* Of one row of value head n from s (DIM, DIM), which it changes. out, e: (DIM). */
static void plain_row(double *s, double *out, double *e, const batch &b, size_t t, int n) {
    const bf16_bits *const row = &b.qkv[t * b.j.width], *const ba = &b.ba[t * b.j.ba_width];
    const int key = n / (b.j.hv / b.j.hk) * DIM;
    const auto head = [&](double *x, int column, double by) {
        double sum = 1e-6;
        for (int d = 0; d < DIM; d++) x[d] = host_float(row[column + d]), sum += x[d] * x[d];
        for (int d = 0; d < DIM; d++) x[d] *= by / sqrt(sum);
    };
    double q[DIM], k[DIM], x = (double)host_float(ba[b.j.hv + n]) + host_float(b.dt_bias[n]);
    head(q, key, 1 / sqrt((double)DIM)), head(k, b.j.hk * DIM + key, 1);
    const double beta = host_float(host_bf16((float)(1 / (1 + exp(-(double)host_float(ba[n]))))));
    const double by = exp(-exp((double)host_float(b.a_log[n])) * log1p(exp(x)));
    for (int c = 0; c < DIM; c++) {
        double sum = 0, o = 0;
        for (int d = 0; d < DIM; d++) sum += (s[d * DIM + c] *= by) * k[d];
        e[c] = beta * (host_float(row[(2 * b.j.hk + n) * DIM + c]) - sum);
        for (int d = 0; d < DIM; d++) o += (s[d * DIM + c] += k[d] * e[c]) * q[d];
        out[c] = o;
    }
}
struct error {
    double of = 0, all = 0;
    void add(double got, double want) { of += (got - want) * (got - want), all += want * want; }
    double nmse() const { return of / all; } /* NaN: something was not written */
};
static bool report(const char *name, const char *what, const error &e, double most) {
    const bool ok = e.nmse() <= most;
    printf("{\"check\": \"%s\", \"of\": \"%s\", \"nmse\": %.3g, \"at_most\": %.3g, \"ok\": %s}\n", name, what, e.nmse(), most,
           ok ? "true" : "false");
    fflush(stdout);
    return ok;
}

/* What each form gives for sequences of other lengths, from nothing. 4 (2^-9)^2 is 1.5e-5: outputs, S, u and e rounded to bf16. */
static bool check_rows(bool kept) {
    const double most = 3e-5;
    batch b({130, 64, 1, 200}, 1, 2, 3);
    const size_t heads = (size_t)b.j.hv * DIM, states = (size_t)b.j.n * b.j.hv * DIM * DIM;
    std::vector<double> out(b.rows * heads), e(b.rows * heads), s(states, 0.0),
        at((b.rows / CHUNK_ROWS + 1) * b.j.hv * DIM * DIM, NAN);
    for (int i = 0; i < b.j.n; i++)
        for (int n = 0; n < b.j.hv; n++)
            for (int t = b.start[i]; t < b.start[i + 1]; t++) {
                double *const of = &s[((size_t)i * b.j.hv + n) * DIM * DIM];
                const int row = t - b.start[i], entry = b.start[i] / CHUNK_ROWS + row / CHUNK_ROWS - 1;
                if (row > 0 && row % CHUNK_ROWS == 0) std::copy(of, of + DIM * DIM, &at[((size_t)entry * b.j.hv + n) * DIM * DIM]);
                plain_row(of, &out[t * heads + n * DIM], &e[t * heads + n * DIM], b, (size_t)t, n);
            }
    bool ok = true;
    b.with_chunks();
    if (kept) b.with_kept();
    for (const form &f : row_forms) {
        const std::vector<bf16_bits> none(b.rows * heads, 0xffff);
        error of_out, of_s, of_e, of_at;
        gpu_copy(b.j.out, none.data(), none.size() * sizeof none[0]);
        f.run(b.j);
        const auto got = from_gpu(b.j.out, b.rows * heads);
        const auto got_s = from_gpu(b.j.s, states);
        for (size_t i = 0; i < got.size(); i++) of_out.add(host_float(got[i]), out[i]);
        for (size_t i = 0; i < states; i++) of_s.add(got_s[i], s[i]);
        ok = report(f.name, "out", of_out, most) && ok;
        ok = report(f.name, "S", of_s, most) && ok;
        if (!kept) continue;
        const auto got_e = from_gpu(b.j.e, e.size());
        const auto got_at = from_gpu(b.j.states, at.size());
        for (size_t i = 0; i < e.size(); i++) of_e.add(got_e[i], e[i]);
        for (size_t i = 0; i < at.size(); i++)
            if (at[i] == at[i]) of_at.add(got_at[i], at[i]);
        ok = report(f.name, "e", of_e, most) && ok;
        ok = report(f.name, "S of chunks", of_at, most) && ok;
    }
    return ok;
}
/* Three steps of three sequences, whose states are in other slots' places. */
static bool check_steps() {
    bool ok = true;
    for (const form &f : step_forms) {
        const int rows = 3, hv = 2, slots = 4;
        const std::vector<int> slot = {2, 0, 3};
        std::vector<float> s((size_t)slots * hv * DIM * DIM);
        std::vector<bf16_bits> s16(s.size());
        for (size_t i = 0; i < s.size(); i++) s16[i] = host_bf16(uniform()), s[i] = host_float(s16[i]);
        std::vector<double> want(s.begin(), s.end()), out(rows * hv * DIM), e(DIM);
        batch b(std::vector<int>(rows, 1), 1, hv, 3);
        error of_out, of_s;
        b.j.s = to_gpu(s), b.j.s16 = to_gpu(s16), b.j.slot = to_gpu(slot);
        for (int step = 0; step < 3; step++) {
            f.run(b.j);
            for (int t = 0; t < rows; t++)
                for (int n = 0; n < hv; n++)
                    plain_row(&want[((size_t)slot[t] * hv + n) * DIM * DIM], &out[(t * hv + n) * DIM], e.data(), b, (size_t)t, n);
            const auto got = from_gpu(b.j.out, out.size());
            for (size_t i = 0; i < got.size(); i++) of_out.add(host_float(got[i]), out[i]);
        }
        const auto got = from_gpu(b.j.s, s.size());
        const auto got16 = from_gpu(b.j.s16, s.size());
        for (size_t i = 0; i < s.size(); i++) of_s.add(f.counted ? got[i] : host_float(got16[i]), want[i]);
        ok = report(f.name, "out", of_out, f.counted ? 5e-6 : 3e-5) && ok;
        ok = report(f.name, "S", of_s, f.counted ? 1e-10 : 3e-5) && ok;
    }
    return ok;
}

#ifndef GPU_DELTA_INEXACT_TEST

/* ---- times ---- */

enum { LAYERS = 8, ROUNDS = 30 };
static float elapsed(const cudaEvent_t (&at)[2]) {
    float ms;
    C(cudaEventSynchronize(at[1]));
    C(cudaEventElapsedTime(&ms, at[0], at[1]));
    return ms * 1e-3f;
}
/* The median of `run`, whose work is done `times` times. */
template <class Run> static double seconds_of(const Run &run, int times) {
    cudaEvent_t at[2];
    std::vector<float> s(ROUNDS);
    for (cudaEvent_t &e : at) C(cudaEventCreate(&e));
    for (int i = 0; i < 3; i++) run();
    for (float &x : s) {
        C(cudaEventRecord(at[0], stream));
        run();
        C(cudaEventRecord(at[1], stream));
        x = elapsed(at);
    }
    for (cudaEvent_t e : at) C(cudaEventDestroy(e));
    std::sort(s.begin(), s.end());
    return s[ROUNDS / 2] / times;
}
static void print_time(const char *what, const form &f, size_t rows, double seconds, double bytes, double flop) {
    printf(
        "{\"case\": \"%s\", \"form\": \"%s\", \"counted\": %s, \"rows\": %zu, \"seconds\": %.9g, \"bytes\": %.9g, \"gb_s\": %.1f, "
        "\"tflop_s\": %.2f}\n",
        what, f.name, f.counted ? "true" : "false", rows, seconds, bytes, bytes / seconds * 1e-9, flop / seconds * 1e-12);
    fflush(stdout);
}
/* Forward, without and with what backward reads. */
static void time_rows(int n, int len, int hk, int hv) {
    batch b(std::vector<int>(n, len), hk, hv, (hk + hv) * 2 * DIM); /* ba is among a layer's inputs */
    const double rows = (double)b.rows, heads = (double)hv * DIM, kept = 4 * heads * (rows + rows / CHUNK_ROWS * DIM);
    const double bytes = 2 * rows * (b.j.width + 2 * hv + heads) + 4 * n * heads * DIM;
    b.with_chunks();
    for (int with = 0; with < 2; with++) {
        if (with) b.with_kept();
        for (const form &f : row_forms) {
            const double s = seconds_of(
                [&] {
                    for (int i = 0; i < 4; i++) f.run(b.j);
                },
                4);
            print_time(with ? "rule kept" : "rule forward", f, b.rows, s, bytes + with * kept, 6 * rows * heads * DIM);
        }
    }
}
/* Steps of several layers, whose states are not in the cache, as a graph. */
static void time_steps(int rows, int hk, int hv) {
    batch b(std::vector<int>(rows, 1), hk, hv, (hk + hv) * 2 * DIM);
    const size_t layer = (size_t)rows * hv * DIM * DIM;
    std::vector<int> slot(rows);
    std::vector<float> some(1 << 20);
    for (int i = 0; i < rows; i++) slot[i] = i;
    for (float &x : some) x = 0.1f * uniform();
    const std::vector<bf16_bits> some16 = random_bf16(1 << 20, -0.1f, 0.1f);
    float *const s = (float *)gpu_alloc(LAYERS * layer * 4);
    b.j.slot = to_gpu(slot);
    for (const form &f : step_forms) {
        const size_t size = f.counted ? 4 : 2, all = LAYERS * layer * size;
        const char *const from = f.counted ? (const char *)some.data() : (const char *)some16.data();
        for (size_t at = 0; at < all; at += size << 20) gpu_copy((char *)s + at, from, std::min(all - at, size << 20));
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        C(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        delta_shape j = b.j;
        for (int l = 0; l < LAYERS; l++) {
            j.s = s + l * layer, j.s16 = (bf16_bits *)s + l * layer;
            f.run(j);
        }
        C(cudaStreamEndCapture(stream, &graph));
        C(cudaGraphInstantiate(&exec, graph, 0));
        const double t = seconds_of(
            [&] {
                for (int i = 0; i < 2; i++) C(cudaGraphLaunch(exec, stream));
            },
            2 * LAYERS);
        const double bytes = 2.0 * (double)layer * (double)size + 2.0 * rows * (b.j.width + (2 + DIM) * hv);
        print_time("rule step", f, (size_t)rows, t, bytes, 7 * (double)layer);
        C(cudaGraphExecDestroy(exec));
        C(cudaGraphDestroy(graph));
    }
    gpu_free(s);
}

int main(int argc, char **argv) {
    int of[] = {16, 1024, 16, 16};
    std::vector<int> steps;
    for (int i = 1; i < argc; i++) {
        const int v = atoi(argv[i]);
        if (v < 1) {
            fprintf(stderr, "usage: gpu_delta_inexact [BATCH LEN KEY_HEADS VALUE_HEADS ROWS...]\n");
            return 2;
        }
        if (i <= 4) of[i - 1] = v;
        else steps.push_back(v);
    }
    if (steps.empty()) steps = {80, 512};
    if (of[3] % of[2]) {
        fprintf(stderr, "%d value heads are no multiple of %d key heads\n", of[3], of[2]);
        return 2;
    }
    C(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    bool ok = check_rows(false);
    ok = check_rows(true) && ok;
    ok = check_steps() && ok;
    if (!ok) return 1;
    time_rows(of[0], of[1], of[2], of[3]);
    for (int rows : steps) time_steps(rows, of[2], of[3]);
    return 0;
}
#endif
