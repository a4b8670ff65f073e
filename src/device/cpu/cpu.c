/* cpu.c - the CPU backend's table, its opening, and its memory (scratch_memory.c takes pages).
 *
 * Opening chooses one instruction set for the whole run, starts the threads
 * and takes each thread's working memory, so that ops allocate nothing once
 * every shape has been seen.  Device memory is plain memory; nothing is
 * queued, so sync has nothing to do. */
#include "device/device.h"

#include "base/buf.h"
#include "device/cpu/gemm/gemm.h"
#include "device/host_decode.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- memory ---- */

/* The rest: partial sums of row ops, attention's list of parts. */
static size_t op_working_bytes(struct dev *d, const struct dev_sizes *s) {
    enum { REST = 4 << 20 };
    return cpu_gemm_scratch_bytes(s) + cpu_lmhead_scratch_bytes(s) + (size_t)cpu_of(d)->n_threads * CPU_THREAD_BYTES + REST;
}

static int op_alloc(struct dev *d, size_t bytes, void **out) {
    (void)d;
    *out = cpu_pages_alloc(bytes);
    if (!*out) FAIL(ERR_NOMEM, "cpu: out of memory (%zu MiB asked)", bytes >> 20);
    return 0;
}
static void op_free(struct dev *d, void *p, size_t bytes) {
    (void)d;
    cpu_pages_free(p, bytes);
}

/* Copies and clears are cut so that all threads move memory. */
struct move_job {
    char *dst;
    const char *src; /* NULL: clear */
    size_t bytes;
};
enum { MOVE_BYTES = 1 << 20 };

static void move_part(void *arg, int64_t part, int thread) {
    const struct move_job *j = arg;
    const size_t at = (size_t)part * MOVE_BYTES, left = j->bytes - at;
    const size_t n = left < MOVE_BYTES ? left : MOVE_BYTES;
    (void)thread;
    if (j->src) memcpy(j->dst + at, j->src + at, n);
    else memset(j->dst + at, 0, n);
}

static int move(struct dev *d, void *dst, const void *src, size_t bytes) {
    struct move_job j = {dst, src, bytes};
    pool_run(cpu_of(d)->pool, (int64_t)((bytes + MOVE_BYTES - 1) / MOVE_BYTES), move_part, &j);
    return 0;
}

static int op_copy(struct dev *d, void *dst, const void *src, size_t bytes) {
    const char *a = dst, *b = src;
    if (a < b + bytes && b < a + bytes) { /* overlap */
        memmove(dst, src, bytes);
        return 0;
    }
    return move(d, dst, src, bytes);
}
static int op_copy_out(struct dev *d, void *dst, const void *src, size_t bytes) { return op_copy(d, dst, src, bytes); }
static int op_zero(struct dev *d, void *dst, size_t bytes) { return move(d, dst, NULL, bytes); }
static int op_sync(struct dev *d) {
    (void)d;
    return 0;
}

/* ---- opening ---- */

static void op_close(struct dev *d) {
    struct cpu *c = cpu_of(d);
    pool_destroy(c->pool);
    for (int i = 0; i < CPU_N_SCRATCH; i++) cpu_pages_free(c->scratch[i].p, c->scratch[i].bytes);
    cpu_pages_free(c->thread_mem, (size_t)c->n_threads * CPU_THREAD_BYTES);
    free(c);
}

static bool op_keeps_logits(struct dev *d, struct weight w) {
    (void)d, (void)w;
    return true;
}

static const struct dev_ops cpu_ops = {
    .name = "cpu",
    .close = op_close,
    .alloc = op_alloc,
    .free = op_free,
    .sync = op_sync,
    .copy_in = op_copy,
    .copy_out = op_copy_out,
    .copy = op_copy,
    .zero = op_zero,
    .working_bytes = op_working_bytes,
    .weight_bytes = cpu_weight_bytes,
    .keeps_logits = op_keeps_logits,
    .decode_next = host_decode_next,
#define OP(name, ...) .name = cpu_##name,
#include "device/ops.def"
};

/* Bytes this process may have: the machine's, or its control group's limit. */
static size_t memory_total(void) {
    const long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    size_t total = pages > 0 && page > 0 ? (size_t)pages * (size_t)page : 0;
    FILE *f = fopen("/sys/fs/cgroup/memory.max", "r"); /* absent, or "max": no limit */
    unsigned long long limit = 0;
    if (f) {
        if (fscanf(f, "%llu", &limit) == 1 && limit > 0 && (total == 0 || limit < total)) total = (size_t)limit;
        fclose(f);
    }
    return total;
}

static int choose_isa(struct cpu *c, const char *name, bool *probed) {
    const char *env = getenv("VERLC_ISA");
    if (!name && env && *env) name = env;
    *probed = name == NULL;
    if (!name) {
        c->isa = cpu_isa_fastest(c->thread_mem);
        return 0;
    }
    for (int i = 0; i < CPU_N_ISA; i++) {
        if (strcmp(name, cpu_isa_name((enum cpu_isa_id)i)) != 0) continue;
        if (!cpu_isa_available((enum cpu_isa_id)i))
            FAIL(ERR_UNSUPPORTED,
                 "this CPU does not have %s; leave VERLC_ISA unset to use the fastest "
                 "it has",
                 name);
        c->isa = (enum cpu_isa_id)i;
        return 0;
    }
    FAIL(ERR_INVAL, "instruction set '%s' is unknown; one of amx, avx512bf16, avx512, avx2, c", name);
}

int dev_open_cpu(struct dev *d, int n_threads, const char *isa) {
    int rc = 0;
    struct cpu *c = xcalloc(1, sizeof *c);
    bool probed = false;
    *d = (struct dev){.ops = &cpu_ops, .ctx = c, .mem_total = memory_total()};
    TRYG(pool_create(&c->pool, n_threads), fail);
    c->n_threads = pool_threads(c->pool);
    c->thread_mem = cpu_pages_alloc((size_t)c->n_threads * CPU_THREAD_BYTES);
    if (!c->thread_mem) FAILG(fail, ERR_NOMEM, "cpu: out of memory for %d threads", c->n_threads);
    TRYG(choose_isa(c, isa, &probed), fail);
    c->gemm = cpu_gemm_isa_of(c->isa);
    snprintf(d->isa, sizeof d->isa, "%s", c->gemm->name);
    snprintf(d->describe, sizeof d->describe, "cpu: %d thread%s, %s%s", c->n_threads, c->n_threads == 1 ? "" : "s", c->gemm->name,
             probed ? " (fastest here)" : "");
    return 0;
fail:
    op_close(d);
    *d = (struct dev){0};
    return rc;
}
