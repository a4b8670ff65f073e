/* netcheck.c - `verlc netcheck`: worker processes, and the performance of the links between them: latency and bandwidth of every
 * pair, time of every operation, in host memory; and between the memories of the ranks' devices what an update moves. A link far
 * below the others of its kind is named. */
#include "cmd/netcheck/netcheck.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/json.h"
#include "cmd/cmd.h"
#include "ranks/launcher.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { N_SIZES = 3, MOST_ROUNDS = 2000, N_OPERATIONS = NETCHECK_OPERATIONS + NETCHECK_CALLS };
static const int64_t sizes[N_SIZES] = {64 << 10, 1 << 20, 16 << 20};
static const char *const size_names[N_SIZES] = {"64 KiB", "1 MiB", "16 MiB"};
enum { N_DEVICE_SIZES = 3 };
static const int64_t device_sizes[N_DEVICE_SIZES] = {4 << 20, 64 << 20, 256 << 20};
static const char *const device_names[N_DEVICE_SIZES] = {"4 MiB", "64 MiB", "256 MiB"};
#define CALL_S 60.0    /* for one call; a link of 5 Mbit/s moves 16 MiB in that time */
#define SLOW_S 1.0     /* a size that takes longer is the last one that is measured on a link */
#define SLOW_SHARE 0.5 /* of the median link of its kind */

static const struct worker_process_service services[] = {NETCHECK_SERVICES, {NULL, NULL}};
extern char **environ;

struct link {
    int a, b;
    bool same_host;
    double latency;          /* seconds; of one direction */
    double rate[2][N_SIZES]; /* bytes a second, a to b and b to a; NAN: not measured */
    bool slow;
};
struct check {
    struct workers *workers;
    int size;
    double seconds; /* for one measurement */
    struct link *links;
    int n_links;
    double operation[N_OPERATIONS][N_SIZES];             /* seconds; a barrier's in [0] */
    const char *device;                                  /* of the ranks: "cuda", "cpu"; NULL: not measured */
    char described[128], way[64];                        /* rank 0's device; what the bytes go through */
    double fold[N_DEVICE_SIZES], gather[N_DEVICE_SIZES]; /* seconds */
};

/* One call on all ranks; *seconds: of the slowest. */
static int call(struct check *c, const char *name, json_t *args, double *seconds) {
    struct coordinator_reply *replies = xcalloc((size_t)c->size, sizeof *replies);
    const int rc =
        workers_call_all(c->workers, &(struct coordinator_call_args){.name = name, .args = args, .answer_s = CALL_S}, replies);
    *seconds = 0;
    for (int r = 0; rc >= 0 && r < c->size; r++) {
        const double s = json_number_value(json_object_get(replies[r].result, "seconds"));
        if (s > *seconds) *seconds = s;
        coordinator_reply_free(&replies[r]);
    }
    free(replies);
    json_decref(args);
    TRY(rc);
    return 0;
}

/* Seconds of one round: a first one says how many fit in the time. args: borrowed. */
static int measure(struct check *c, const char *name, const json_t *args, double *seconds) {
    for (int64_t pass = 0, rounds = 1; pass < 2; pass++) {
        json_t *a = json_deep_copy(args);
        json_object_set_new(a, "rounds", json_integer(rounds));
        TRY(call(c, name, a, seconds));
        *seconds /= (double)rounds;
        const double fit = c->seconds / fmax(*seconds, 1e-6);
        rounds = fit < 1 ? 1 : fit > MOST_ROUNDS ? MOST_ROUNDS : (int64_t)fit;
        if (rounds == 1) break;
    }
    return 0;
}

static int measure_pair(struct check *c, int from, int to, int64_t bytes, bool back, double *seconds) {
    json_t *args = json_pack("{s:i,s:i,s:I,s:b}", "a", from, "b", to, "bytes", (json_int_t)bytes, "back", back);
    const int rc = measure(c, "netcheck_pair", args, seconds);
    json_decref(args);
    TRY(rc);
    return 0;
}

static int measure_link(struct check *c, struct link *l) {
    double s;
    TRY(measure_pair(c, l->a, l->b, 1, true, &s));
    l->latency = s / 2;
    for (int way = 0; way < 2; way++)
        for (int i = 0; i < N_SIZES; i++) l->rate[way][i] = NAN;
    for (int way = 0; way < 2; way++)
        for (int i = 0; i < N_SIZES; i++) {
            TRY(measure_pair(c, way ? l->b : l->a, way ? l->a : l->b, sizes[i], false, &s));
            l->rate[way][i] = (double)sizes[i] / s;
            if (s > SLOW_S) break;
        }
    return 0;
}

static int measure_operations(struct check *c) {
    for (int o = 0; o < NETCHECK_OPERATIONS; o++)
        for (int i = 0; i < N_SIZES; i++) {
            json_t *args = json_pack("{s:s,s:I}", "operation", netcheck_operations[o], "bytes", (json_int_t)(o ? sizes[i] : 0));
            c->operation[o][i] = NAN;
            const int rc = i && (o == 0 || c->operation[o][i - 1] > SLOW_S || isnan(c->operation[o][i - 1]))
                               ? 0
                               : measure(c, "netcheck_operation", args, &c->operation[o][i]);
            json_decref(args);
            TRY(rc);
        }
    return 0;
}

/* Arrays to every rank, or from every rank. */
static int call_round(struct check *c, const struct comm_bytes *array, int64_t back) {
    struct coordinator_reply *replies = xcalloc((size_t)c->size, sizeof *replies);
    json_t *args = json_pack("{s:I}", "bytes", (json_int_t)back);
    const int rc =
        workers_call_all(c->workers,
                         &(struct coordinator_call_args){
                             .name = "netcheck_call", .args = args, .arrays = array, .n_arrays = array ? 1 : 0, .answer_s = CALL_S},
                         replies);
    for (int r = 0; rc >= 0 && r < c->size; r++) coordinator_reply_free(&replies[r]);
    free(replies);
    json_decref(args);
    TRY(rc);
    return 0;
}

static int measure_calls(struct check *c) {
    const struct comm_bytes most = {xcalloc(1, (size_t)sizes[N_SIZES - 1]), 0};
    int rc = 0;
    for (int way = 0; way < NETCHECK_CALLS; way++)
        for (int i = 0; i < N_SIZES; i++) {
            double *s = &c->operation[NETCHECK_OPERATIONS + way][i];
            const struct comm_bytes array = {most.p, (size_t)sizes[i]};
            int64_t rounds = 0;
            *s = NAN;
            if (i > 0 && (s[-1] > SLOW_S || isnan(s[-1]))) continue;
            const double start = clock_now();
            do rc = call_round(c, way ? NULL : &array, way ? sizes[i] : 0);
            while (rc >= 0 && ++rounds < MOST_ROUNDS && clock_now() - start < c->seconds);
            if (rc < 0) goto out;
            *s = (clock_now() - start) / (double)rounds;
        }
out:
    free(most.p);
    TRY(rc);
    return 0;
}

/* ---- devices ---- */

/* Whether every rank has a GPU. */
static int all_have_gpus(struct check *c, bool *all) {
    struct coordinator_reply *replies = xcalloc((size_t)c->size, sizeof *replies);
    const int rc =
        workers_call_all(c->workers, &(struct coordinator_call_args){.name = "netcheck_has_gpu", .answer_s = CALL_S}, replies);
    *all = rc >= 0;
    for (int r = 0; rc >= 0 && r < c->size; r++) {
        *all &= json_is_true(json_object_get(replies[r].result, "has"));
        coordinator_reply_free(&replies[r]);
    }
    free(replies);
    TRY(rc);
    return 0;
}

static int measure_devices_of(struct check *c, int i) {
    struct coordinator_reply *replies = xcalloc((size_t)c->size, sizeof *replies);
    json_t *args = json_pack("{s:s, s:I, s:f}", "device", c->device, "bytes", (json_int_t)device_sizes[i], "seconds", c->seconds);
    const int rc = workers_call_all(
        c->workers, &(struct coordinator_call_args){.name = "netcheck_devices", .args = args, .answer_s = 2 * CALL_S}, replies);
    for (int r = 0; rc >= 0 && r < c->size; r++) {
        const json_t *x = replies[r].result;
        const double fold = json_number_value(json_object_get(x, "fold")),
                     gather = json_number_value(json_object_get(x, "all_gather"));
        const char *described = json_string_value(json_object_get(x, "device"));
        const char *way = json_string_value(json_object_get(x, "way"));
        if (r == 0) snprintf(c->described, sizeof c->described, "%s", described ? described : "");
        if (r == 0) snprintf(c->way, sizeof c->way, "%s", way ? way : "");
        c->fold[i] = fmax(c->fold[i], fold); /* of the slowest */
        c->gather[i] = fmax(c->gather[i], gather);
        coordinator_reply_free(&replies[r]);
    }
    free(replies);
    json_decref(args);
    TRY(rc);
    return 0;
}

/* requested: --device. */
static int measure_devices(struct check *c, const char *requested) {
    bool gpus = false;
    if (c->size == 1 || strcmp(requested, "none") == 0) return 0;
    if (strcmp(requested, "auto") == 0) TRY(all_have_gpus(c, &gpus));
    c->device = strcmp(requested, "auto") != 0 ? requested : gpus ? "cuda" : NULL;
    for (int i = 0; c->device && i < N_DEVICE_SIZES; i++) TRY(measure_devices_of(c, i));
    return 0;
}

/* What a rank takes from the others, a second. */
static double pulled(const struct check *c, int i, double seconds) {
    return (double)device_sizes[i] * (c->size - 1) / c->size / seconds;
}

/* ---- slow links ---- */

/* The slower direction at the largest size that was measured in both. */
static double rate(const struct link *l) {
    for (int i = N_SIZES - 1; i >= 0; i--)
        if (!isnan(l->rate[0][i]) && !isnan(l->rate[1][i])) return fmin(l->rate[0][i], l->rate[1][i]);
    return 0;
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Of the links of one kind: the median rate; 0: there are too few to compare. */
static double median(const struct check *c, bool same_host) {
    double *v = xcalloc((size_t)c->n_links + 1, sizeof *v);
    int n = 0;
    for (int i = 0; i < c->n_links; i++)
        if (c->links[i].same_host == same_host) v[n++] = rate(&c->links[i]);
    qsort(v, (size_t)n, sizeof *v, by_value);
    const double m = n >= 3 ? v[n / 2] : 0;
    free(v);
    return m;
}

static void mark_slow(struct check *c) {
    for (int i = 0; i < c->n_links; i++) c->links[i].slow = rate(&c->links[i]) < SLOW_SHARE * median(c, c->links[i].same_host);
}

/* ---- printing ---- */

static void print_rate(double bytes_s) {
    if (isnan(bytes_s)) printf("  %9s", "-");
    else printf("  %9.3f", bytes_s * 1e-9);
}

static void print_table(const struct check *c) {
    printf("%d ranks, host memory, ZeroMQ with CURVE over TCP\n", c->size);
    for (int r = 0; r < c->size; r++) printf("  %s\n", coordinator_who(workers_coordinator(c->workers), r));
    if (c->n_links)
        printf("\n%-14s %-8s %10s  GB/s of %s, %s, %s: there, and back\n", "link", "", "latency us", size_names[0], size_names[1],
               size_names[2]);
    for (int k = 0; k < c->n_links; k++) {
        const struct link *l = &c->links[k];
        char name[32];
        snprintf(name, sizeof name, "%d - %d", l->a, l->b);
        printf("%-14s %-8s %10.0f", name, l->same_host ? "one host" : "network", l->latency * 1e6);
        for (int way = 0; way < 2; way++)
            for (int i = 0; i < N_SIZES; i++) print_rate(l->rate[way][i]);
        printf("%s\n", l->slow ? "  slow" : "");
    }
    printf("\n%-14s ms of %s, %s, %s a rank\n", "operation", size_names[0], size_names[1], size_names[2]);
    printf("%-14s  %9.3f\n", netcheck_operations[0], c->operation[0][0] * 1e3);
    for (int o = 1; o < N_OPERATIONS; o++) {
        printf("%-14s", netcheck_operations[o]);
        for (int i = 0; i < N_SIZES; i++) {
            if (isnan(c->operation[o][i])) printf("  %9s", "-");
            else printf("  %9.3f", c->operation[o][i] * 1e3);
        }
        printf("\n");
    }
    if (c->device) {
        printf("\n%-14s %s, through %s: GB/s that each takes from the others, of %s, %s, %s a rank\n", "devices", c->described,
               c->way, device_names[0], device_names[1], device_names[2]);
        const struct {
            const char *name;
            const double *seconds;
        } rows[] = {{"fold", c->fold}, {"all_gather", c->gather}};
        for (int k = 0; k < 2; k++) {
            printf("%-14s", rows[k].name);
            for (int i = 0; i < N_DEVICE_SIZES; i++) printf("  %9.3f", pulled(c, i, rows[k].seconds[i]) * 1e-9);
            printf("\n");
        }
    }
    printf("\n");
    int slow = 0;
    for (int k = 0; k < c->n_links; k++) {
        const struct link *l = &c->links[k];
        if (!l->slow) continue;
        slow++;
        printf("slow: %s - %s: %.3f GB/s, and %.3f in the middle of the links of its kind\n",
               coordinator_who(workers_coordinator(c->workers), l->a), coordinator_who(workers_coordinator(c->workers), l->b),
               rate(l) * 1e-9, median(c, l->same_host) * 1e-9);
    }
    if (!slow) printf("no link is far below the others\n");
}

static json_t *number(double v) { return isnan(v) ? json_null() : json_real(v); }

static int print_json(const struct check *c) {
    json_t *ranks = json_array(), *links = json_array(), *operations = json_array();
    struct buf b = {0};
    for (int r = 0; r < c->size; r++) {
        json_array_append_new(ranks,
                              json_pack("{s:i,s:s,s:i}", "rank", r, "who", coordinator_who(workers_coordinator(c->workers), r),
                                        "pid", coordinator_pid(workers_coordinator(c->workers), r)));
    }
    for (int k = 0; k < c->n_links; k++) {
        const struct link *l = &c->links[k];
        json_t *rates[2] = {json_array(), json_array()};
        for (int way = 0; way < 2; way++)
            for (int i = 0; i < N_SIZES; i++) json_array_append_new(rates[way], number(l->rate[way][i]));
        json_array_append_new(links, json_pack("{s:i,s:i,s:b,s:f,s:o,s:o,s:b}", "a", l->a, "b", l->b, "same_host", l->same_host,
                                               "latency_s", l->latency, "a_to_b", rates[0], "b_to_a", rates[1], "slow", l->slow));
    }
    for (int o = 0; o < N_OPERATIONS; o++)
        for (int i = 0; i < (o ? N_SIZES : 1); i++)
            json_array_append_new(operations, json_pack("{s:s,s:I,s:o}", "operation", netcheck_operations[o], "bytes",
                                                        (json_int_t)(o ? sizes[i] : 0), "seconds", number(c->operation[o][i])));
    json_t *bytes = json_array();
    for (int i = 0; i < N_SIZES; i++) json_array_append_new(bytes, json_integer(sizes[i]));
    json_t *devices = json_array();
    for (int i = 0; c->device && i < N_DEVICE_SIZES; i++)
        json_array_append_new(devices, json_pack("{s:s,s:s,s:I,s:f,s:f}", "device", c->described, "way", c->way, "bytes",
                                                 (json_int_t)device_sizes[i], "fold_s", c->fold[i], "all_gather_s", c->gather[i]));
    json_t *all = json_pack("{s:o,s:o,s:o,s:o,s:o}", "ranks", ranks, "bytes", bytes, "links", links, "operations", operations,
                            "devices", devices);
    int rc = json_dump_line(&b, all);
    if (rc >= 0) rc = cmd_print_line(b.p, b.n - (b.p[b.n - 1] == '\n'));
    json_decref(all);
    buf_free(&b);
    TRY(rc);
    return 0;
}

/* ---- the commands ---- */

static int check_links(struct check *c, const char *device) {
    for (int a = 0; a < c->size; a++)
        for (int b = a + 1; b < c->size; b++)
            c->links[c->n_links++] =
                (struct link){.a = a, .b = b, .same_host = coordinator_same_host(workers_coordinator(c->workers), a, b)};
    for (int k = 0; k < c->n_links; k++) TRY(measure_link(c, &c->links[k]));
    TRY(measure_operations(c));
    TRY(measure_calls(c));
    TRY(measure_devices(c, device));
    mark_slow(c);
    return 0;
}

static int control(const struct workers_args *a, const struct launch *l, double seconds, const char *device, bool json) {
    struct check c = {.seconds = seconds};
    TRY(workers_open(&c.workers, a, l));
    c.size = workers_size(c.workers);
    c.links = xcalloc((size_t)c.size * (size_t)c.size, sizeof *c.links);
    int rc = check_links(&c, device);
    if (rc >= 0 && json) rc = print_json(&c);
    else if (rc >= 0) print_table(&c);
    free(c.links);
    workers_close(c.workers, rc >= 0);
    TRY(rc);
    return 0;
}

int cmd_netcheck(int argc, char **argv) {
    int64_t ranks = 2;
    double seconds = 0.1, start_s = 60;
    const char *device = "auto";
    bool json = false;
    struct workers_args a = {.dir = "."};
    const struct cmd_opt opts[] = {
        {"--ranks", CMD_I64("int[1,64]"), &ranks, "N", "worker processes on this host (2); under a launcher its own number holds"},
        {"--dir", CMD_STR, &a.dir, "DIR", "under a launcher: a directory that all hosts share, for .rendezvous (.)"},
        {"--controller", CMD_STR, &a.controller, "HOST:PORT", "where rank 0 listens (any port of its host)"},
        {"--device", CMD_STR, &device, "NAME",
         "what an update moves between devices' memories: auto (GPUs where every rank has one), cuda, cpu, or none (auto)"},
        {"--seconds", CMD_F64("float[0.001,10]"), &seconds, "S", "for each measurement (0.1)"},
        {"--wait", CMD_F64("float[1,86400]"), &start_s, "S", "for all ranks to join (60)"},
        {"--json", CMD_FLAG, &json, NULL, "one line of JSON, in seconds and bytes a second"},
    };
    const struct cmd_spec spec =
        CMD_SPEC(opts, "verlc netcheck [--ranks N] [--json]",
                 "Starts worker processes and measures the links between them: latency and bandwidth of every pair, time of every\n"
                 "operation, in host memory. A link far below the others of its kind is named. Under srun, mpirun or torchrun,\n"
                 "which start this command once a rank, the ranks on all hosts.");
    struct launch l;
    const int rc = cmd_parse(&spec, argc, argv);
    if (rc != 0) return rc > 0 ? 0 : rc;
    if (strcmp(device, "auto") && strcmp(device, "cuda") && strcmp(device, "cpu") && strcmp(device, "none"))
        FAIL(ERR_INVAL, "--device %s: expected auto, cuda, cpu or none", device);
    TRY(launch_read(&l, environ));
    a.ranks = (int)ranks;
    a.start_s = start_s;
    return workers_started_this(&l) ? worker_process_serve(&a, &l, services) : control(&a, &l, seconds, device, json);
}
