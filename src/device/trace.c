/* trace.c - a trace of the checked calls: when the host made each, when the device
 * ran it.  Written as Chrome's trace events (Perfetto opens them) and as a table; the log
 * says how long the device idled, waiting for the host, by phase and for each launch of a CUDA graph.
 * Calls captured in a CUDA graph are one span, that of graph_run.  Operations between ranks have tracks of their own, for they
 * overlap the calls or contain them.  A profiler that listens (struct dev's range) gets NVTX ranges of the same calls,
 * operations and phases.
 *
 * Invariant: with no trace on and no profiler, a call costs two comparisons more. */
#include "device/device_int.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/log.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

struct span {
    const char *op;
    int64_t dim[3];
    double host0, host1; /* seconds since the trace began */
    double dev0, dev1;   /* microseconds; equal to the host's where every op waits */
    int64_t stamp;       /* of dev0; dev1's is the next one */
};
struct exchange { /* as a span */
    const char *op;
    int64_t bytes;
    int ranks;
    double host0, host1, dev0, dev1;
    int64_t stamp; /* -1: the host's times */
};
struct phase {
    char name[48];
    double from, to; /* seconds since the trace began */
};
struct dev_trace {
    struct span *spans;
    int64_t n, cap;
    struct phase *phases;
    int64_t n_phases, cap_phases;
    bool in_phase; /* the last one has not ended */
    struct exchange *exchanges;
    int64_t n_exchanges, cap_exchanges;
    int64_t n_stamps;   /* of the device; the first is where its clock is set by the host's */
    double start, zero; /* zero: the host's time of that stamp, since the trace began */
    int rank;           /* -1: there is one process */
    bool paused;
};

void dev_trace_start(struct dev *d) { dev_trace_start_rank(d, -1, clock_now()); }

void dev_trace_start_rank(struct dev *d, int rank, double zero) {
    dev_trace__drop(d);
    d->trace = xcalloc(1, sizeof *d->trace);
    d->trace->start = zero;
    d->trace->rank = rank;
}

void dev_trace__drop(struct dev *d) {
    if (!d->trace) return;
    free(d->trace->spans);
    free(d->trace->phases);
    free(d->trace->exchanges);
    free(d->trace);
    d->trace = NULL;
}

void dev_trace__pause(struct dev *d, bool paused) {
    if (d->trace) d->trace->paused = paused;
}

/* Two more stamps: the first one's number. */
static int64_t two_stamps(struct dev *d) {
    struct dev_trace *t = d->trace;
    if (t->n_stamps == 0) {
        t->zero = clock_now() - t->start;
        if (d->ops->stamp) (void)d->ops->stamp(d, t->n_stamps);
        t->n_stamps++;
    }
    t->n_stamps += 2;
    return t->n_stamps - 2;
}

void dev_trace__open(struct dev *d, const char *op, int64_t a, int64_t b, int64_t c) {
    struct dev_trace *t = d->trace;
    if (d->range) d->range(op);
    if (!t || t->paused) return;
    xgrow((void **)&t->spans, &t->cap, t->n + 1, sizeof *t->spans);
    const int64_t stamp = two_stamps(d);
    if (d->ops->stamp) (void)d->ops->stamp(d, stamp);
    t->spans[t->n] = (struct span){.op = op, .dim = {a, b, c}, .host0 = clock_now() - t->start, .stamp = stamp};
}

int dev_trace__close(struct dev *d, int rc) {
    struct dev_trace *t = d->trace;
    if (d->range) d->range(NULL);
    if (!t || t->paused) return rc;
    t->spans[t->n].host1 = clock_now() - t->start;
    if (d->ops->stamp) (void)d->ops->stamp(d, t->spans[t->n].stamp + 1);
    t->n++;
    return rc;
}

int64_t dev_trace__exchange_open(struct dev *d, const char *op, int64_t bytes, int ranks, bool overlapped) {
    struct dev_trace *t = d->trace;
    if (d->range) d->range(op);
    if (!t) return -1;
    xgrow((void **)&t->exchanges, &t->cap_exchanges, t->n_exchanges + 1, sizeof *t->exchanges);
    struct exchange *x = &t->exchanges[t->n_exchanges];
    *x = (struct exchange){.op = op, .bytes = bytes, .ranks = ranks, .stamp = overlapped && d->ops->stamp ? two_stamps(d) : -1};
    x->host0 = clock_now() - t->start;
    return x->stamp;
}

int dev_trace__exchange_close(struct dev *d, int rc) {
    struct dev_trace *t = d->trace;
    if (d->range) d->range(NULL);
    if (t) t->exchanges[t->n_exchanges++].host1 = clock_now() - t->start;
    return rc;
}

static void phase_range(struct dev *d, const char *name) {
    if (d->in_range) d->range(NULL);
    d->in_range = name != NULL;
    if (name) d->range(name);
}

void dev_trace_phase(struct dev *d, const char *name) {
    struct dev_trace *t = d->trace;
    if (d->range) phase_range(d, name);
    if (!t) return;
    const double now = clock_now() - t->start;
    if (t->in_phase) t->phases[t->n_phases - 1].to = now;
    t->in_phase = name != NULL;
    if (!name) return;
    xgrow((void **)&t->phases, &t->cap_phases, t->n_phases + 1, sizeof *t->phases);
    struct phase *p = &t->phases[t->n_phases++];
    *p = (struct phase){.from = now, .to = now};
    snprintf(p->name, sizeof p->name, "%s", name);
}

/* ---- reading it ---- */

/* From a stamp to the next. */
static int between_stamps(struct dev *d, int64_t stamp, double *from, double *to) {
    TRY(d->ops->stamp_us(d, stamp, from));
    TRY(d->ops->stamp_us(d, stamp + 1, to));
    *from += d->trace->zero * 1e6;
    *to += d->trace->zero * 1e6;
    return 0;
}

static int device_times(struct dev *d) {
    struct dev_trace *t = d->trace;
    TRY(dev_sync(d));
    if (t->in_phase) t->phases[t->n_phases - 1].to = clock_now() - t->start;
    for (int64_t i = 0; i < t->n; i++) {
        struct span *s = &t->spans[i];
        s->dev0 = s->host0 * 1e6;
        s->dev1 = s->host1 * 1e6;
        if (d->ops->stamp) TRY(between_stamps(d, s->stamp, &s->dev0, &s->dev1));
    }
    for (int64_t i = 0; i < t->n_exchanges; i++) {
        struct exchange *x = &t->exchanges[i];
        x->dev0 = x->host0 * 1e6;
        x->dev1 = x->host1 * 1e6;
        if (x->stamp >= 0) TRY(between_stamps(d, x->stamp, &x->dev0, &x->dev1));
    }
    return 0;
}

static void label(const struct span *s, char *out, size_t size) {
    int n = snprintf(out, size, "%s", s->op);
    for (int i = 0; i < 3 && s->dim[i] > 0; i++)
        n += snprintf(out + n, size - (size_t)n, "%c%lld", i ? 'x' : ' ', (long long)s->dim[i]);
}

struct total {
    char label[96];
    double us;
    int64_t n;
};
static int by_label(const void *a, const void *b) {
    return strcmp(((const struct total *)a)->label, ((const struct total *)b)->label);
}
static int by_time(const void *a, const void *b) {
    const double x = ((const struct total *)a)->us, y = ((const struct total *)b)->us;
    return (x < y) - (x > y);
}

/* Equal calls added up, the longest first. */
static int64_t totals(const struct dev_trace *t, struct total *out) {
    int64_t n = 0;
    for (int64_t i = 0; i < t->n; i++) {
        label(&t->spans[i], out[i].label, sizeof out[i].label);
        out[i].us = t->spans[i].dev1 - t->spans[i].dev0;
        out[i].n = 1;
    }
    if (t->n > 0) qsort(out, (size_t)t->n, sizeof *out, by_label);
    for (int64_t i = 0; i < t->n; i++) {
        if (n > 0 && strcmp(out[n - 1].label, out[i].label) == 0) {
            out[n - 1].us += out[i].us;
            out[n - 1].n++;
        } else {
            out[n++] = out[i];
        }
    }
    if (n > 0) qsort(out, (size_t)n, sizeof *out, by_time);
    return n;
}

static void print_table(const struct dev_trace *t, FILE *f) {
    enum { SHOWN = 40 };
    struct total *sum = xmalloc((size_t)(t->n ? t->n : 1) * sizeof *sum);
    const int64_t n = totals(t, sum);
    double all = 0;
    for (int64_t i = 0; i < n; i++) all += sum[i].us;
    const double from = t->n ? t->spans[0].dev0 : 0, to = t->n ? t->spans[t->n - 1].dev1 : 0;
    fprintf(f, "%lld calls, %.3f ms in calls of %.3f ms\n", (long long)t->n, all * 1e-3, (to - from) * 1e-3);
    for (int64_t i = 0; i < n && i < SHOWN; i++)
        fprintf(f, "%10.3f ms %5.1f %%  %6lld x %9.1f us  %s\n", sum[i].us * 1e-3, 100 * sum[i].us / all, (long long)sum[i].n,
                sum[i].us / (double)sum[i].n, sum[i].label);
    free(sum);
}

/* ---- how long the device idles, waiting for the host ----
 * The calls of a device follow each other; it idles in the gaps between them. Each gap has two timestamps, which take some
 * microseconds that are not there without a trace: gaps of about the median's length do not count. */

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The longest gap that the timestamps alone may make, in microseconds; 0 where there are none. */
static double stamp_gap(const struct dev *d) {
    const struct dev_trace *t = d->trace;
    if (!d->ops->stamp || t->n < 2) return 0;
    double *gap = xmalloc((size_t)(t->n - 1) * sizeof *gap);
    for (int64_t i = 1; i < t->n; i++) gap[i - 1] = t->spans[i].dev0 - t->spans[i - 1].dev1;
    qsort(gap, (size_t)(t->n - 1), sizeof *gap, by_value);
    const double median = gap[(t->n - 1) / 2];
    free(gap);
    return 3 * median;
}

/* Microseconds of [from, to) in gaps longer than `least`. */
static double idle_us(const struct dev_trace *t, double from, double to, double least) {
    double sum = 0, end = from - least; /* before the first call too */
    for (int64_t i = 0; i <= t->n; i++) {
        const double next = i < t->n ? t->spans[i].dev0 : to + least;
        const double lo = end > from ? end : from, hi = next < to ? next : to;
        if (next - end > least && hi > lo) sum += hi - lo;
        if (i < t->n && t->spans[i].dev1 > end) end = t->spans[i].dev1;
    }
    return sum;
}

/* Each phase once, with those of the same name. */
static void log_phases(const struct dev_trace *t, double least) {
    const double from = t->phases[0].from * 1e6, to = t->phases[t->n_phases - 1].to * 1e6, all = to - from,
                 idle = idle_us(t, from, to, least);
    log_info("trace: %.1f ms, in which the device idles %.2f ms (%.2f %%)", all * 1e-3, idle * 1e-3, 100 * idle / all);
    for (int64_t i = 0; i < t->n_phases; i++) {
        const char *name = t->phases[i].name;
        double us = 0, idle_phase = 0;
        int64_t first = 0;
        while (strcmp(t->phases[first].name, name) != 0) first++;
        if (first < i) continue;
        for (int64_t k = i; k < t->n_phases; k++) {
            const struct phase *p = &t->phases[k];
            if (strcmp(p->name, name) != 0) continue;
            us += (p->to - p->from) * 1e6;
            idle_phase += idle_us(t, p->from * 1e6, p->to * 1e6, least);
        }
        log_info("trace:   %s %.1f ms, idle %.2f ms", name, us * 1e-3, idle_phase * 1e-3);
    }
}

/* Launches of CUDA graphs (decoding steps), from the first to the last. */
static void log_graphs(const struct dev_trace *t, double least) {
    const struct span *first = NULL, *last = NULL;
    double host = 0, device = 0;
    int64_t n = 0;
    for (int64_t i = 0; i < t->n; i++) {
        const struct span *s = &t->spans[i];
        if (strcmp(s->op, "graph_run") != 0) continue;
        if (!first) first = s;
        last = s;
        host += (s->host1 - s->host0) * 1e6;
        device += s->dev1 - s->dev0;
        n++;
    }
    if (n < 2) return;
    const double all = last->dev1 - first->dev0, idle = idle_us(t, first->dev0, last->dev1, least);
    log_info("trace: %lld CUDA graph launches in %.1f ms: each takes the device %.1f us and the host %.1f us to launch, "
             "and the device idles %.1f us (%.2f %%)",
             (long long)n, all * 1e-3, device / (double)n, host / (double)n, idle / (double)n, 100 * idle / all);
}

static int process(const struct dev_trace *t) { return t->rank < 0 ? 1 : t->rank + 1; }

static json_t *event(const struct dev_trace *t, const char *name, int track, double us, double for_us) {
    return json_pack("{s:s,s:s,s:i,s:i,s:f,s:f}", "name", name, "ph", "X", "pid", process(t), "tid", track, "ts", us, "dur",
                     for_us);
}

/* track < 0: the process'. */
static void add_name(const struct dev_trace *t, json_t *events, int track, const char *name) {
    json_t *e = json_pack("{s:s,s:s,s:i,s:{s:s}}", "name", track < 0 ? "process_name" : "thread_name", "ph", "M", "pid", process(t),
                          "args", "name", name);
    if (track >= 0) json_object_set_new(e, "tid", json_integer(track));
    json_array_append_new(events, e);
}

/* Those that overlap go to different tracks, the first of which is number `first`. */
static void add_exchanges(const struct dev_trace *t, json_t *events, int first) {
    enum { TRACKS = 4 };
    double end[TRACKS] = {0};
    int named = 0;
    for (int64_t i = 0; i < t->n_exchanges; i++) {
        const struct exchange *x = &t->exchanges[i];
        int k = 0;
        while (k < TRACKS - 1 && x->dev0 < end[k]) k++;
        for (; named <= k; named++) add_name(t, events, first + named, "exchange");
        end[k] = x->dev1;
        json_t *e = event(t, x->op, first + k, x->dev0, x->dev1 - x->dev0);
        json_object_set_new(e, "args", json_pack("{s:I,s:i}", "bytes", (json_int_t)x->bytes, "ranks", x->ranks));
        json_array_append_new(events, e);
    }
}

static int write_trace(const struct dev_trace *t, const char *path) {
    json_t *events = json_array(), *doc = json_pack("{s:o}", "traceEvents", events);
    static const char *const tracks[] = {"host", "device", "phases"};
    char rank[32];
    snprintf(rank, sizeof rank, "rank %d", t->rank);
    if (t->rank >= 0) add_name(t, events, -1, rank);
    for (int i = 0; i < 3; i++) add_name(t, events, i, tracks[i]);
    add_exchanges(t, events, 3);
    for (int64_t i = 0; i < t->n; i++) {
        const struct span *s = &t->spans[i];
        char name[96];
        label(s, name, sizeof name);
        json_array_append_new(events, event(t, name, 0, s->host0 * 1e6, (s->host1 - s->host0) * 1e6));
        json_array_append_new(events, event(t, name, 1, s->dev0, s->dev1 - s->dev0));
    }
    for (int64_t i = 0; i < t->n_phases; i++) {
        const double from = t->phases[i].from * 1e6, to = t->phases[i].to * 1e6;
        json_array_append_new(events, event(t, t->phases[i].name, 2, from, to - from));
    }
    const int rc = json_dump_file(doc, path, JSON_COMPACT | JSON_REAL_PRECISION(12));
    json_decref(doc);
    if (rc != 0) FAIL(ERR_IO, "%s: cannot write the trace", path);
    return 0;
}

int dev_trace_stop(struct dev *d, const char *path, FILE *table) {
    if (!d->trace) return 0;
    int rc = device_times(d);
    if (rc == 0 && d->trace->n_phases > 0) log_phases(d->trace, stamp_gap(d));
    if (rc == 0) log_graphs(d->trace, stamp_gap(d));
    if (rc == 0 && path) rc = write_trace(d->trace, path);
    if (rc == 0 && table) print_table(d->trace, table);
    dev_trace__drop(d);
    return rc;
}
