/* perf_metrics.c - see perf_metrics.h. */
#include "train/perf_metrics.h"

#include "base/err.h"
#include "device/gpu_use.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static struct model_flops flops_of(const struct model_config *c) {
    const double matrices = (double)model_config_linear_params(c) + 2 * (double)c->vocab * (double)c->hidden;
    /* the delta rule by chunks of C: 6 Dk Dv + 4 C max(Dk, Dv) a token and value head, and as much twice in backward */
    const double dk = (double)c->delta.k_dim, dv = (double)c->delta.v_dim, layers = (double)model_attention_layers(c);
    const double rule =
        ((double)c->n_layers - layers) * (double)c->delta.v_heads * (6 * dk * dv + 4 * DEV_DELTA_CHUNK * fmax(dk, dv));
    /* a query's head and a key: of the score, then of the value; with latent attention both are of the latent */
    const double pair = (double)(c->head_dim + (c->mla.kv_rank ? c->mla.kv_rank : c->head_dim)) / 2;
    return (struct model_flops){.token = 6 * matrices + 3 * rule, .square = 6 * (double)c->n_q_heads * pair * layers};
}

struct model_flops train_model_flops(const struct model_config *c, const struct dev *d) {
    struct model_flops f = flops_of(c);
    f.peak = train_peak_flops(d);
    return f;
}

double train_flops(const struct model_config *c, const int64_t *len, int64_t n) {
    const struct model_flops f = flops_of(c);
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += (double)len[i];
        squares += (double)len[i] * (double)len[i];
    }
    return f.token * sum + f.square * squares;
}

double train_peak_flops(const struct dev *d) {
    static const struct {
        const char *name; /* of those that are part of another the longer one first */
        double flops;
    } table[] = {{"L40S", 362.05e12}, {"L40", 181.05e12}, {"L20", 119.5e12},        {"H800", 989e12},  {"H200", 989e12},
                 {"H20", 148e12},     {"H100", 989e12},   {"GB200", 2.5e15},        {"B200", 2.25e15}, {"A800", 312e12},
                 {"A40", 149.7e12},   {"A100", 312e12},   {"RTX 3070 Ti", 21.75e12}};
    if (strcmp(d->ops->name, "cuda") != 0) return 448e9;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (strstr(d->describe, table[i].name)) return table[i].flops;
    return INFINITY;
}

/* Memory of the machine that is in use, as psutil counts it: total less available. 0: not known. */
static double host_memory_used(void) {
    double total = 0, available = 0;
    char line[128];
    FILE *f = fopen("/proc/meminfo", "r");
    while (f && fgets(line, sizeof line, f)) {
        sscanf(line, "MemTotal: %lf", &total);
        sscanf(line, "MemAvailable: %lf", &available);
    }
    if (f) fclose(f);
    return (total - available) * 1024;
}

int train_memory_metrics(struct metrics *m, struct dev *d, const char *prefix, struct dev_memory *before) {
    struct dev_memory now;
    double busy, bytes;
    TRY(dev_memory(d, &now));
    const struct {
        const char *name;
        double bytes;
    } sizes[] = {{"max_memory_allocated_gb", (double)d->peak},
                 {"max_memory_reserved_gb", (double)(d->peak + now.working + now.system)},
                 {"cpu_memory_used_gb", host_memory_used()}};
    for (int i = 0; i < 3; i++) {
        metrics_set(m, sizes[i].bytes / 0x1p30, "perf/%s", sizes[i].name);
        if (prefix[0]) metrics_set(m, sizes[i].bytes / 0x1p30, "%sperf/%s", prefix, sizes[i].name);
    }
    if (dev_gpu_use(d, &busy, &bytes)) {
        metrics_set(m, busy, "perf/gpu_utilization");
        metrics_set(m, bytes / 0x1p30, "perf/gpu_memory_used_gb");
    }
    if (d->planned > 0) metrics_set(m, sizes[1].bytes / (double)d->planned, "perf/memory_of_plan");
    metrics_set_i64(m, now.n_allocs - before->n_allocs, "perf/device_allocations");
    *before = now;
    return 0;
}
