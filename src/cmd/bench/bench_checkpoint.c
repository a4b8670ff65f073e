/* bench_checkpoint.c - `verlc bench checkpoint`: how long a run waits for a checkpoint of a model with AdamW; how fast it is
 * written, alone and during training passes, and by how much these take longer; what the disk takes of plain writes. One JSON
 * line. */
#include "cmd/bench/bench.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/rng.h"
#include "ckpt/async_save.h"
#include "cmd/cmd.h"
#include "train/trained_model.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

enum { PIECE = 16 << 20, WRITERS = 4, TOKENS = 32 /* of a training pass */ };

struct bench {
    const char *model, *dir, *device;
    int64_t steps, threads;
    struct dev dev;
    struct model *m;
    struct trained_model *t;
    struct ckpt_part part;
    struct ckpt_async *async;
    json_t *trainer;
    char *root, *plain;                                      /* checkpoints, the plain file */
    double disk, save, copy, write, cpu, overlapped, delete; /* seconds, the best of all; cpu: of all threads, of a write alone */
    double alone_s, overlapped_s;                            /* all training passes without a write, and during one */
    int64_t alone_n, overlapped_n;
    size_t bytes; /* of the checkpoint */
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

/* Whole pieces of random bytes into room that is there, past the page cache where the file system lets them, then fsync. */
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
    (void)!fallocate(d.fd, 0, 0, (off_t)d.bytes);
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

/* ---- training ---- */

static int loss(void *arg, const struct micro_loss *m) {
    (void)arg;
    for (int64_t t = 0; t < m->t1 - m->t0; t++) m->dout[t] = -1.0f / TOKENS;
    return 0;
}

/* A forward and a backward pass. */
static int train(struct bench *b, double *seconds, int64_t *n) {
    int32_t ids[TOKENS];
    for (int i = 0; i < TOKENS; i++) ids[i] = (int32_t)(i % b->m->cfg.vocab);
    const struct packed_seq seq = {.ids = ids, .n = TOKENS, .first = 1};
    const struct mini_batch batch = {.seqs = &seq, .n = 1, .cut = {.max_seqs = 1}, .temperature = 1, .loss = loss};
    struct step_result r;
    const double start = clock_now();
    TRY(trained_model_backward(b->t, &batch, &r));
    TRY(dev_sync(&b->dev));
    *seconds += clock_now() - start;
    ++*n;
    return 0;
}

/* ---- the checkpoint ---- */

static int open_all(struct bench *b) {
    const struct model_open_args a = {.dir = b->model, .act = DT_BF16, .flags = MODEL_TRAIN, .max_len = TOKENS};
    struct optim_array state[OPTIM_MAX_ARRAYS];
    TRY(dev_open_named(&b->dev, b->device, (int)b->threads, NULL));
    TRY(model_open(&b->m, &b->dev, &a));
    const struct trained_model_args args = {
        .dev = &b->dev, .model = b->m, .train = true, .keep = {.train = true}, .max_rows = TOKENS, .max_seqs = 1};
    TRY(trained_model_create(&b->t, &args));
    b->part = (struct ckpt_part){"actor", b->m, trained_model_optim(b->t), NULL};
    const int n = optim_arrays(b->part.optim, state);
    for (int i = 0; i < n; i++) TRY(dev_copy(&b->dev, state[i].data, b->m->master, (size_t)state[i].n * 4)); /* not zeros */
    b->bytes = (size_t)b->m->n_train * 12;
    for (int64_t i = 0; i < b->m->n_params; i++)
        b->bytes += (size_t)(b->m->params[i].rows * b->m->params[i].cols) * dtype_size(b->m->params[i].src_dt);
    b->trainer = json_object();
    return ckpt_async_open(&b->async, &b->part, 1, NULL);
}

static void close_all(struct bench *b) {
    ckpt_async_close(b->async);
    json_decref(b->trainer);
    trained_model_destroy(b->t);
    model_close(b->m);
    dev_close(&b->dev);
}

static void keep_best(double *best, double seconds) {
    if (*best == 0 || seconds < *best) *best = seconds;
}

static struct ckpt_save_args args(const struct bench *b) {
    return (struct ckpt_save_args){
        .root = b->root, .step = 1, .parts = &b->part, .n_parts = 1, .trainer = b->trainer, .config_yaml = "bench: checkpoint\n"};
}

static int delete (struct bench *b) {
    const double start = clock_now();
    TRY(file_remove_tree(b->root));
    keep_best(&b->delete, clock_now() - start);
    return 0;
}

static int save(struct bench *b) {
    const struct ckpt_save_args a = args(b);
    const double start = clock_now();
    TRY(ckpt_save(&a));
    keep_best(&b->save, clock_now() - start);
    return delete (b);
}

static int copy(struct bench *b) {
    const struct ckpt_save_args a = args(b);
    const double start = clock_now();
    TRY(ckpt_async_copy(b->async, &a));
    keep_best(&b->copy, clock_now() - start);
    return 0;
}

static double cpu_now(void) {
    struct rusage r;
    getrusage(RUSAGE_SELF, &r);
    return (double)(r.ru_utime.tv_sec + r.ru_stime.tv_sec) + (double)(r.ru_utime.tv_usec + r.ru_stime.tv_usec) * 1e-6;
}

/* Until the write that is under way is published. */
struct wait {
    struct ckpt_async *async;
    double end;
    int rc;
    struct err_saved why;
    atomic_bool done;
};

static void *wait(void *arg) {
    struct wait *w = arg;
    int64_t step;
    while ((w->rc = ckpt_async_take(w->async, 1, &step)) == 0) {
    }
    w->end = clock_now();
    if (w->rc < 0) err_save(&w->why);
    w->done = true;
    return NULL;
}

static int write_alone(struct bench *b) {
    struct wait w = {.async = b->async};
    TRY(copy(b));
    const double start = clock_now(), cpu = cpu_now();
    ckpt_async_write(b->async, NULL, NULL);
    wait(&w);
    TRY(w.rc);
    keep_best(&b->write, w.end - start);
    keep_best(&b->cpu, cpu_now() - cpu);
    return delete (b);
}

static int write_overlapped(struct bench *b) {
    struct wait w = {.async = b->async};
    pthread_t waiting;
    int rc = 0;
    TRY(copy(b));
    const double start = clock_now();
    ckpt_async_write(b->async, NULL, NULL);
    if (pthread_create(&waiting, NULL, wait, &w) != 0) FAIL(ERR_NOMEM, "no thread is to be had");
    do rc = train(b, &b->overlapped_s, &b->overlapped_n);
    while (rc == 0 && !w.done);
    pthread_join(waiting, NULL);
    TRY(rc);
    if (w.rc < 0) err_restore(&w.why);
    TRY(w.rc);
    keep_best(&b->overlapped, w.end - start);
    for (const double until = clock_now() + (w.end - start); rc == 0 && clock_now() < until;)
        rc = train(b, &b->alone_s, &b->alone_n);
    TRY(rc);
    return delete (b);
}

static int measure(struct bench *b) {
    double warm = 0;
    int64_t n = 0;
    TRY(train(b, &warm, &n));
    for (int64_t i = 0; i < b->steps; i++) {
        double seconds;
        TRY(save(b));
        TRY(write_alone(b));
        TRY(time_disk(b->plain, b->bytes, &seconds));
        keep_best(&b->disk, seconds);
        TRY(write_overlapped(b));
    }
    return 0;
}

static void print(const struct bench *b) {
    const double gb = (double)b->bytes / 1e9, alone = b->alone_s / (double)b->alone_n,
                 overlapped = b->overlapped_s / (double)b->overlapped_n;
    printf("{\"subject\":\"checkpoint\",\"bytes\":%zu,\"foreground_seconds\":%.3f,\"copy_seconds\":%.3f,\"write_seconds\":%.3f,"
           "\"write_cpu_seconds\":%.3f,\"delete_seconds\":%.3f,\"write_gb_s\":%.3f,\"async_gb_s\":%.3f,\"disk_gb_s\":%.3f,"
           "\"training_slower\":%.3f}\n",
           b->bytes, b->save, b->copy, b->write, b->cpu, b->delete, gb / b->write, gb / b->overlapped, gb / b->disk,
           overlapped / alone - 1);
}

static int run(struct bench *b) {
    int rc = 0;
    b->root = file_join(b->dir, "verlc-bench-checkpoint");
    b->plain = file_join(b->dir, "verlc-bench-disk");
    if (file_exists(b->root) || file_exists(b->plain))
        FAILG(out, ERR_INVAL, "--dir: %s or %s is there; remove it", b->root, b->plain);
    TRYG(open_all(b), out);
    rc = measure(b);
    if (rc == 0) print(b);
    else file_remove_tree(b->root);
out:
    close_all(b);
    free(b->root);
    free(b->plain);
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
                 "A checkpoint of a model with AdamW: written in the foreground, copied, the copy written\n"
                 "alone and during training passes; and plain writes of as many bytes.");
    const int rc = cmd_parse(&spec, argc, argv);
    if (rc != 0) return rc < 0 ? rc : 0;
    if (!b.model || !b.dir) FAIL(ERR_INVAL, "--model or --dir is missing; usage: verlc bench checkpoint --model DIR --dir DIR");
    return run(&b);
}
