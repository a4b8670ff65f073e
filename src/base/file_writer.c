/* file_writer.c - see file_writer.h. Pieces of fixed size are recycled: queued, read and hashed, written by one of the threads,
 * free again. */
#include "base/file_writer.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/hash.h"
#include "base/thread_pool.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PIECE = 4 << 20, PIECES = 8, THREADS = 4, BLOCK = FILE_WRITER_BLOCK };

struct out_file {
    char *path;
    struct file_source source;
    int fd; /* -1: on disk and closed */
    bool direct;
    size_t bytes, hashed, written; /* in the end; so far */
    struct hash_stream *hash;      /* NULL: all is hashed */
    char hex[33];
};
struct piece {
    struct out_file *file;
    size_t at, n;
    bool loaded;
    char *buffer;
    const char *p; /* once loaded: its bytes, in buffer or where the source has them */
};

struct file_writer {
    struct out_file **files;
    int64_t n_files, cap;
    struct piece pieces[PIECES];
    struct piece *idle[PIECES], *queue[PIECES]; /* a stack; a ring */
    int n_idle, head, n_queued;
    pthread_t threads[THREADS];
    int n_threads, n_reading; /* the latter: calls of sources */
    pthread_mutex_t lock;
    pthread_cond_t work, changed; /* a piece is queued; anything else */
    bool stop;
    int rc; /* of the first failure */
    struct err_saved why;
};

/* ---- pieces; with the lock held, which is given up meanwhile ---- */

static void keep_error(struct file_writer *w, int rc) {
    if (rc == 0 || w->rc < 0) return;
    w->rc = rc;
    err_save(&w->why);
}

/* Reads and hashes: reads are concurrent, hashing is in order. A file's first piece that is not hashed has left the queue
 * before those behind it, so that no thread waits for a waiting one. */
static void load(struct file_writer *w, struct piece *k) {
    struct out_file *f = k->file;
    w->n_reading++;
    pthread_mutex_unlock(&w->lock);
    k->p = k->buffer;
    const int rc = f->source.read(f->source.arg, k->at, k->n, k->buffer, &k->p);
    pthread_mutex_lock(&w->lock);
    w->n_reading--;
    keep_error(w, rc);
    while (w->rc == 0 && f->hashed != k->at) pthread_cond_wait(&w->changed, &w->lock);
    if (w->rc == 0) {
        pthread_mutex_unlock(&w->lock);
        hash_stream_add(f->hash, k->p, k->n);
        pthread_mutex_lock(&w->lock);
        f->hashed += k->n;
        if (f->hashed == f->bytes) {
            hash_stream_end(f->hash, f->hex);
            f->hash = NULL;
        }
    }
    k->loaded = true;
    pthread_cond_broadcast(&w->changed);
}

/* What O_DIRECT does not take goes through the buffer. The last block is written whole and cut by sync_and_close. */
static int write_at(const struct out_file *f, const struct piece *k) {
    bool direct = f->direct;
    const char *p = k->p;
    size_t n = k->n;
    if (direct && ((uintptr_t)p % BLOCK != 0 || n % BLOCK != 0)) {
        if (p != k->buffer) memcpy(k->buffer, p, n);
        n = (n + BLOCK - 1) / BLOCK * BLOCK;
        memset(k->buffer + k->n, 0, n - k->n);
        p = k->buffer;
    }
    for (size_t done = 0; done < n;) {
        const ssize_t wrote = pwrite(f->fd, p + done, n - done, (off_t)(k->at + done));
        if (wrote < 0 && errno == EINTR) continue;
        if (wrote < 0 && errno == EINVAL && direct) { /* larger blocks than these */
            direct = false;
            if (fcntl(f->fd, F_SETFL, fcntl(f->fd, F_GETFL) & ~O_DIRECT) == 0) continue;
        }
        if (wrote < 0) FAIL(ERR_IO, "%s: %s", f->path, strerror(errno));
        done += (size_t)wrote;
    }
    /* Through the page cache: the disk begins now. What is not a disk does not, which fsync finds. */
    if (!direct && n == PIECE) (void)!sync_file_range(f->fd, (off_t)k->at, PIECE, SYNC_FILE_RANGE_WRITE);
    return 0;
}

static int sync_and_close(const struct out_file *f) {
    const bool cut = f->direct && f->bytes % BLOCK != 0;
    const int bad = (cut && ftruncate(f->fd, (off_t)f->bytes) < 0) || fsync(f->fd) < 0 ? errno : 0;
    const int also = close(f->fd) < 0 ? errno : 0;
    if (bad || also) FAIL(ERR_IO, "%s: %s", f->path, strerror(bad ? bad : also));
    return 0;
}

/* Whoever writes the last piece of a file closes it. After a failure pieces are dropped. */
static void handle(struct file_writer *w, struct piece *k) {
    struct out_file *f = k->file;
    if (w->rc == 0 && !k->loaded) load(w, k);
    if (w->rc == 0) {
        pthread_mutex_unlock(&w->lock);
        const int rc = write_at(f, k);
        pthread_mutex_lock(&w->lock);
        keep_error(w, rc);
        f->written += k->n;
    }
    w->idle[w->n_idle++] = k;
    pthread_cond_broadcast(&w->changed);
    if (w->rc < 0 || f->written < f->bytes) return;
    pthread_mutex_unlock(&w->lock);
    const int rc = sync_and_close(f);
    pthread_mutex_lock(&w->lock);
    f->fd = -1;
    keep_error(w, rc);
    pthread_cond_broadcast(&w->changed);
}

static void *work(void *arg) {
    struct file_writer *w = arg;
    pool_set_fp_mode(); /* sources convert as on the main thread */
    pthread_mutex_lock(&w->lock);
    for (;;) {
        while (w->n_queued == 0 && !w->stop) pthread_cond_wait(&w->work, &w->lock);
        if (w->n_queued == 0) break;
        struct piece *k = w->queue[w->head];
        w->head = (w->head + 1) % PIECES;
        w->n_queued--;
        handle(w, k);
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

/* ---- the caller ---- */

void file_writer_open(struct file_writer **out) {
    struct file_writer *w = xcalloc(1, sizeof *w);
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->work, NULL);
    pthread_cond_init(&w->changed, NULL);
    for (; w->n_idle < PIECES; w->n_idle++) w->idle[w->n_idle] = &w->pieces[w->n_idle];
    while (w->n_threads < THREADS && pthread_create(&w->threads[w->n_threads], NULL, work, w) == 0) w->n_threads++;
    *out = w;
}

void file_writer_close(struct file_writer *w) {
    if (!w) return;
    pthread_mutex_lock(&w->lock);
    if (w->rc == 0) w->rc = ERR_IO; /* what is queued is dropped; after finish there is nothing */
    w->stop = true;
    pthread_cond_broadcast(&w->work);
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
    for (int i = 0; i < w->n_threads; i++) pthread_join(w->threads[i], NULL);
    for (int64_t i = 0; i < w->n_files; i++) {
        struct out_file *f = w->files[i];
        if (f->fd >= 0) close(f->fd);
        hash_stream_free(f->hash);
        free(f->path);
        free(f);
    }
    for (int i = 0; i < PIECES; i++) free(w->pieces[i].buffer);
    pthread_cond_destroy(&w->changed);
    pthread_cond_destroy(&w->work);
    pthread_mutex_destroy(&w->lock);
    free(w->files);
    free(w);
}

static int create(struct file_writer *w, const char *path, size_t bytes, const struct file_source *s, struct out_file **out) {
    const int flags = O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC;
    int fd = bytes >= PIECE ? open(path, flags | O_DIRECT, 0644) : -1;
    const bool direct = fd >= 0;
    if (!direct) fd = open(path, flags, 0644);
    if (fd < 0) FAIL(ERR_IO, "%s: %s", path, strerror(errno));
    /* Room at once: concurrent writes need not wait for each other. A file system without this call does without. */
    if (direct && fallocate(fd, 0, 0, (off_t)bytes) < 0 && errno == ENOSPC) {
        close(fd);
        FAIL(ERR_IO, "%s: %s", path, strerror(ENOSPC));
    }
    struct out_file *f = *out = xcalloc(1, sizeof *f);
    *f = (struct out_file){
        .path = xstrdup(path), .source = *s, .fd = fd, .direct = direct, .bytes = bytes, .hash = hash_stream_new()};
    xgrow((void **)&w->files, &w->cap, w->n_files + 1, sizeof *w->files);
    w->files[w->n_files++] = f;
    return 0;
}

/* The first failure, if any. */
static int unlock(struct file_writer *w) {
    const int rc = w->rc;
    if (rc < 0) err_restore(&w->why);
    pthread_mutex_unlock(&w->lock);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

/* One piece from `at` on; with the lock held. */
static void submit(struct file_writer *w, struct out_file *f, size_t at) {
    while (w->n_idle == 0 && w->rc == 0) pthread_cond_wait(&w->changed, &w->lock);
    if (w->rc < 0) return;
    struct piece *k = w->idle[--w->n_idle];
    if (!k->buffer) CHECK(posix_memalign((void **)&k->buffer, BLOCK, PIECE) == 0);
    k->file = f;
    k->at = at;
    k->n = f->bytes - at < PIECE ? f->bytes - at : PIECE;
    k->loaded = false;
    if (!f->source.any_thread) load(w, k);
    if (w->n_threads == 0) { /* none is to be had: here and now */
        handle(w, k);
    } else {
        w->queue[(w->head + w->n_queued++) % PIECES] = k;
        pthread_cond_signal(&w->work);
    }
}

int file_writer_add(struct file_writer *w, const char *path, size_t bytes, const struct file_source *s) {
    struct out_file *f;
    TRY(create(w, path, bytes, s, &f));
    pthread_mutex_lock(&w->lock);
    for (size_t at = 0; w->rc == 0 && (at == 0 || at < bytes); at += PIECE) submit(w, f, at);     /* of no bytes: an empty piece */
    while ((w->rc == 0 && f->hash) || w->n_reading > 0) pthread_cond_wait(&w->changed, &w->lock); /* s is the caller's again */
    return unlock(w);
}

int file_writer_finish(struct file_writer *w) {
    pthread_mutex_lock(&w->lock);
    for (int64_t i = 0; i < w->n_files; i++)
        while (w->rc == 0 && w->files[i]->fd >= 0) pthread_cond_wait(&w->changed, &w->lock);
    return unlock(w);
}

const char *file_writer_hash(const struct file_writer *w, const char *path) {
    for (int64_t i = 0; i < w->n_files; i++)
        if (strcmp(w->files[i]->path, path) == 0) return w->files[i]->hex;
    return NULL;
}
