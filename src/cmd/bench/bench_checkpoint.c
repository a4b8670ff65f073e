/* bench_checkpoint.c - `verlc bench checkpoint`: how long a run waits for a checkpoint of a model with AdamW, how fast it is
 * written, and what the disk takes of plain writes beside it. One JSON line. */
#include "cmd/bench/bench.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/rng.h"
#include "ckpt/async_save.h"
#include "cmd/cmd.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PIECE = 16 << 20, WRITERS = 4 };

struct bench {
    const char *model, *dir, *device;
    int64_t steps, threads;
    struct dev dev;
    struct model *m;
    struct optim *optim;
    double disk, save, copy, write; /* seconds, the best of all */
    size_t bytes;                   /* of the checkpoint */
};

/* ---- the disk ---- */

struct disk {
    int fd;
    size_t bytes;
    char *piece;
    atomic_size_t next;
    atomic_int bad; /* errno */
};

static void *write_pieces(void *arg) {
    struct disk *d = arg;
    for (size_t at; (at = atomic_fetch_add(&d->next, PIECE)) < d->bytes;)
        if (pwrite(d->fd, d->piece, PIECE, (off_t)at) != PIECE) d->bad = errno ? errno : ENOSPC;
    return NULL;
}

/* Whole pieces of random bytes, past the page cache where the file system lets them, then fsync. */
static int time_disk(const char *path, size_t bytes, double *seconds) {
    struct disk d = {.bytes = (bytes + PIECE - 1) / PIECE * PIECE};
    struct rng r = {.seed = 1};
    pthread_t threads[WRITERS];
    int n = 0;
    d.fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_DIRECT, 0644);
    if (d.fd < 0) d.fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (d.fd < 0) FAIL(ERR_IO, "%s: %s", path, strerror(errno));
    CHECK(posix_memalign((void **)&d.piece, 4096, PIECE) == 0);
    for (size_t i = 0; i < PIECE / 4; i++) ((uint32_t *)(void *)d.piece)[i] = rng_u32(&r);
    const double start = clock_now();
    while (n < WRITERS && pthread_create(&threads[n], NULL, write_pieces, &d) == 0) n++;
    if (n == 0) write_pieces(&d);
    for (int i = 0; i < n; i++) pthread_join(threads[i], NULL);
    if (!d.bad && fsync(d.fd) < 0) d.bad = errno;
    *seconds = (clock_now() - start) * (double)bytes / (double)d.bytes;
    free(d.piece);
    close(d.fd);
    unlink(path);
    if (d.bad) FAIL(ERR_IO, "%s: %s", path, strerror(d.bad));
    return 0;
}

/* ---- the checkpoint ---- */

static int open_all(struct bench *b) {
    const struct model_open_args a = {.dir = b->model, .act = DT_BF16, .flags = MODEL_TRAIN, .max_len = 32};
    struct optim_array state[OPTIM_MAX_ARRAYS];
    TRY(dev_open_named(&b->dev, b->device, (int)b->threads, NULL));
    TRY(model_open(&b->m, &b->dev, &a));
    TRY(optim_create(&b->optim, b->m, &(struct optim_config){.kind = OPTIM_ADAMW}));
    const int n = optim_arrays(b->optim, state);
    for (int i = 0; i < n; i++) TRY(dev_copy(&b->dev, state[i].data, b->m->master, (size_t)state[i].n * 4)); /* not zeros */
    return 0;
}

static void close_all(struct bench *b) {
    optim_destroy(b->optim, b->m);
    model_close(b->m);
    dev_close(&b->dev);
}

static void keep_best(double *best, double seconds) {
    if (*best == 0 || seconds < *best) *best = seconds;
}

static int measure(struct bench *b, struct ckpt_async *async, const char *root, const char *plain) {
    const struct ckpt_part part = {"actor", b->m, b->optim, NULL};
    json_t *trainer = json_object();
    struct ckpt_save_args a = {
        .root = root, .parts = &part, .n_parts = 1, .trainer = trainer, .config_yaml = "bench: checkpoint\n", .keep = 1};
    int rc = 0, got = 0;
    double start;
    for (int64_t i = 0; i < b->steps; i++) {
        a.step = 1 + 2 * i;
        start = clock_now();
        TRYG(ckpt_save(&a), out);
        keep_best(&b->save, clock_now() - start);
        a.step++;
        start = clock_now();
        TRYG(ckpt_async_copy(async, &a), out);
        keep_best(&b->copy, clock_now() - start);
        start = clock_now();
        ckpt_async_write(async, NULL, NULL);
        while ((got = ckpt_async_take(async, 1, &a.step)) == 0) {
        }
        TRYG(got, out);
        keep_best(&b->write, clock_now() - start);
        TRYG(time_disk(plain, b->bytes, &start), out);
        keep_best(&b->disk, start);
    }
out:
    json_decref(trainer);
    return rc;
}

static int run(struct bench *b) {
    struct ckpt_async *async = NULL;
    char *root = file_join(b->dir, "verlc-bench-checkpoint"), *plain = file_join(b->dir, "verlc-bench-disk");
    int rc = 0;
    if (file_exists(root) || file_exists(plain)) FAILG(out, ERR_INVAL, "--dir: %s or %s is there; remove it", root, plain);
    TRYG(open_all(b), out);
    const struct ckpt_part part = {"actor", b->m, b->optim, NULL};
    b->bytes = (size_t)b->m->n_train * 12;
    for (int64_t i = 0; i < b->m->n_params; i++)
        b->bytes += (size_t)(b->m->params[i].rows * b->m->params[i].cols) * dtype_size(b->m->params[i].src_dt);
    TRYG(ckpt_async_open(&async, &part, 1, NULL), out);
    rc = measure(b, async, root, plain);
    ckpt_async_close(async);
    file_remove_tree(root);
    TRYG(rc, out);
    printf("{\"subject\":\"checkpoint\",\"bytes\":%zu,\"foreground_seconds\":%.3f,\"copy_seconds\":%.3f,\"write_seconds\":%.3f,"
           "\"write_gb_s\":%.3f,\"disk_gb_s\":%.3f}\n",
           b->bytes, b->save, b->copy, b->write, (double)b->bytes / b->write / 1e9, (double)b->bytes / b->disk / 1e9);
out:
    free(root);
    free(plain);
    return rc;
}

int bench_checkpoint(int argc, char **argv) {
    struct bench b = {.steps = 3};
    const struct cmd_opt opts[] = {
        {"--model", CMD_STR, &b.model, "DIR", "model directory (verlc model init makes one)"},
        {"--dir", CMD_STR, &b.dir, "DIR", "where it writes; twice the checkpoint is needed"},
        {"--steps", CMD_I64(CMD_COUNT), &b.steps, "N", "repetitions; the best counts (3)"},
        {"--device", CMD_STR, &b.device, "NAME", CMD_DEVICE_HELP},
        {"--threads", CMD_I64(CMD_THREADS), &b.threads, "N", "threads (all)"},
    };
    const struct cmd_spec spec =
        CMD_SPEC(opts, "verlc bench checkpoint --model DIR --dir DIR [options]",
                 "A checkpoint of a model with AdamW: written in the foreground, copied, the copy written;\n"
                 "and plain writes of as many bytes.");
    const int rc = cmd_parse(&spec, argc, argv);
    if (rc != 0) return rc < 0 ? rc : 0;
    if (!b.model || !b.dir) FAIL(ERR_INVAL, "--model or --dir is missing; usage: verlc bench checkpoint --model DIR --dir DIR");
    const int done = run(&b);
    close_all(&b);
    return done;
}
