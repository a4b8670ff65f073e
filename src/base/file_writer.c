/* file_writer.c - see file_writer.h. Pieces of fixed size go round: filled and hashed by the caller, queued, written by any of
 * the threads, free again. */
#include "base/file_writer.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/hash.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PIECE = 4 << 20, PIECES = 8, THREADS = 4, BLOCK = 4096 /* O_DIRECT wants multiples of it */ };

struct out_file {
    char *path;
    int fd; /* -1: on disk and closed */
    bool direct;
    size_t bytes, n; /* in the end; given so far */
    int64_t pending; /* pieces that are not written yet */
    bool ended;
    struct hash_stream *hash; /* NULL once ended */
    char hex[33];
};
struct piece {
    char *p;
    size_t n, at; /* bytes, their place in the file */
    int64_t file;
};

struct file_writer {
    struct out_file *files;
    int64_t n_files, cap;
    struct piece pieces[PIECES];
    struct piece *idle[PIECES], *queue[PIECES]; /* a stack; a ring */
    int n_idle, head, n_queued;
    struct piece *now; /* being filled, NULL: none */
    pthread_t threads[THREADS];
    int n_threads;
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    bool stop;
    int rc; /* of the first failure */
    struct err_saved why;
};

/* ---- the threads ---- */

/* f: as it is while this piece is pending. The last block is written whole and cut by sync_and_close. */
static int write_at(const struct out_file *f, struct piece *k) {
    bool direct = f->direct;
    const size_t n = direct ? (k->n + BLOCK - 1) / BLOCK * BLOCK : k->n;
    memset(k->p + k->n, 0, n - k->n);
    for (size_t done = 0; done < n;) {
        const ssize_t w = pwrite(f->fd, k->p + done, n - done, (off_t)(k->at + done));
        if (w < 0 && errno == EINTR) continue;
        if (w < 0 && errno == EINVAL && direct) { /* larger blocks than these */
            direct = false;
            if (fcntl(f->fd, F_SETFL, fcntl(f->fd, F_GETFL) & ~O_DIRECT) == 0) continue;
        }
        if (w < 0) FAIL(ERR_IO, "%s: %s", f->path, strerror(errno));
        done += (size_t)w;
    }
    /* Through the page cache: the disk begins now. What is not a disk does not, which fsync finds. */
    if (!direct && n == PIECE) (void)!sync_file_range(f->fd, (off_t)k->at, PIECE, SYNC_FILE_RANGE_WRITE);
    return 0;
}

static int sync_and_close(const struct out_file *f) {
    const bool cut = f->direct && f->n % BLOCK != 0;
    const int bad = (cut && ftruncate(f->fd, (off_t)f->n) < 0) || fsync(f->fd) < 0 ? errno : 0;
    const int also = close(f->fd) < 0 ? errno : 0;
    if (bad || also) FAIL(ERR_IO, "%s: %s", f->path, strerror(bad ? bad : also));
    return 0;
}

/* These with the lock held; the latter two give it up meanwhile. */
static void keep_error(struct file_writer *w, int rc) {
    if (rc == 0 || w->rc < 0) return;
    w->rc = rc;
    err_save(&w->why);
}

static void close_if_complete(struct file_writer *w, int64_t file) {
    const struct out_file f = w->files[file];
    if (!f.ended || f.pending > 0 || f.fd < 0) return;
    w->files[file].fd = -1;
    w->files[file].pending = 1; /* not done until it is on disk */
    pthread_mutex_unlock(&w->lock);
    const int rc = sync_and_close(&f);
    pthread_mutex_lock(&w->lock);
    keep_error(w, rc);
    w->files[file].pending = 0;
    pthread_cond_signal(&w->done);
}

static void write_piece(struct file_writer *w, struct piece *k) {
    const struct out_file f = w->files[k->file];
    const bool dropped = w->rc < 0;
    pthread_mutex_unlock(&w->lock);
    const int rc = dropped ? 0 : write_at(&f, k);
    pthread_mutex_lock(&w->lock);
    keep_error(w, rc);
    w->idle[w->n_idle++] = k;
    w->files[k->file].pending--;
    pthread_cond_signal(&w->done);
    close_if_complete(w, k->file);
}

static void *work(void *arg) {
    struct file_writer *w = arg;
    pthread_mutex_lock(&w->lock);
    for (;;) {
        while (w->n_queued == 0 && !w->stop) pthread_cond_wait(&w->work, &w->lock);
        if (w->n_queued == 0) break;
        struct piece *k = w->queue[w->head];
        w->head = (w->head + 1) % PIECES;
        w->n_queued--;
        write_piece(w, k);
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

/* ---- the caller ---- */

void file_writer_open(struct file_writer **out) {
    struct file_writer *w = xcalloc(1, sizeof *w);
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->work, NULL);
    pthread_cond_init(&w->done, NULL);
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
    pthread_mutex_unlock(&w->lock);
    for (int i = 0; i < w->n_threads; i++) pthread_join(w->threads[i], NULL);
    for (int64_t i = 0; i < w->n_files; i++) {
        if (w->files[i].fd >= 0) close(w->files[i].fd);
        hash_stream_free(w->files[i].hash);
        free(w->files[i].path);
    }
    for (int i = 0; i < PIECES; i++) free(w->pieces[i].p);
    pthread_cond_destroy(&w->done);
    pthread_cond_destroy(&w->work);
    pthread_mutex_destroy(&w->lock);
    free(w->files);
    free(w);
}

/* The first failure of a thread, if any; with the lock held. */
static int failed(const struct file_writer *w) {
    if (w->rc < 0) err_restore(&w->why);
    return w->rc;
}

int file_writer_begin(struct file_writer *w, const char *path, size_t bytes) {
    const int flags = O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC;
    int fd = bytes >= PIECE ? open(path, flags | O_DIRECT, 0644) : -1;
    const bool direct = fd >= 0;
    if (!direct) fd = open(path, flags, 0644);
    if (fd < 0) FAIL(ERR_IO, "%s: %s", path, strerror(errno));
    /* Room at once: writes side by side need not wait for each other. A file system without this call does without. */
    if (direct && fallocate(fd, 0, 0, (off_t)bytes) < 0 && errno == ENOSPC) {
        close(fd);
        FAIL(ERR_IO, "%s: %s", path, strerror(ENOSPC));
    }
    CHECK(w->n_files == 0 || w->files[w->n_files - 1].ended);
    pthread_mutex_lock(&w->lock);
    xgrow((void **)&w->files, &w->cap, w->n_files + 1, sizeof *w->files);
    w->files[w->n_files++] =
        (struct out_file){.path = xstrdup(path), .fd = fd, .direct = direct, .bytes = bytes, .hash = hash_stream_new()};
    pthread_mutex_unlock(&w->lock);
    return 0;
}

int file_writer_room(struct file_writer *w, void **p, size_t *n) {
    pthread_mutex_lock(&w->lock);
    while (!w->now && w->n_idle == 0 && w->rc == 0) pthread_cond_wait(&w->done, &w->lock);
    const int rc = failed(w);
    if (rc == 0 && !w->now) {
        struct piece *k = w->idle[--w->n_idle];
        if (!k->p) CHECK(posix_memalign((void **)&k->p, BLOCK, PIECE) == 0);
        k->n = 0;
        k->at = w->files[w->n_files - 1].n;
        k->file = w->n_files - 1;
        w->now = k;
    }
    pthread_mutex_unlock(&w->lock);
    TRY(rc);
    *p = w->now->p + w->now->n;
    *n = PIECE - w->now->n;
    return 0;
}

static void submit(struct file_writer *w) {
    struct piece *k = w->now;
    pthread_mutex_lock(&w->lock);
    w->now = NULL;
    w->files[k->file].pending++;
    if (w->n_threads == 0) { /* none is to be had: here and now */
        write_piece(w, k);
    } else {
        w->queue[(w->head + w->n_queued++) % PIECES] = k;
        pthread_cond_signal(&w->work);
    }
    pthread_mutex_unlock(&w->lock);
}

void file_writer_add(struct file_writer *w, size_t n) {
    struct out_file *f = &w->files[w->n_files - 1];
    CHECK(w->now && n <= PIECE - w->now->n);
    hash_stream_add(f->hash, w->now->p + w->now->n, n);
    f->n += n;
    w->now->n += n;
    if (w->now->n == PIECE) submit(w);
}

int file_writer_put(struct file_writer *w, const void *p, size_t n) {
    const char *from = p;
    while (n > 0) {
        void *to;
        size_t room;
        TRY(file_writer_room(w, &to, &room));
        if (room > n) room = n;
        memcpy(to, from, room);
        file_writer_add(w, room);
        from += room;
        n -= room;
    }
    return 0;
}

int file_writer_end(struct file_writer *w) {
    struct out_file *f = &w->files[w->n_files - 1];
    void *p;
    size_t room;
    TRY(file_writer_room(w, &p, &room)); /* the last piece, maybe an empty one: after it a thread closes the file */
    CHECK(f->n == f->bytes);
    hash_stream_end(f->hash, f->hex);
    f->hash = NULL;
    pthread_mutex_lock(&w->lock);
    f->ended = true;
    pthread_mutex_unlock(&w->lock);
    submit(w);
    return 0;
}

int file_writer_finish(struct file_writer *w) {
    pthread_mutex_lock(&w->lock);
    for (int64_t i = 0; i < w->n_files; i++)
        while (w->files[i].pending > 0) pthread_cond_wait(&w->done, &w->lock);
    const int rc = failed(w);
    pthread_mutex_unlock(&w->lock);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

const char *file_writer_hash(const struct file_writer *w, const char *path) {
    for (int64_t i = 0; i < w->n_files; i++)
        if (w->files[i].ended && strcmp(w->files[i].path, path) == 0) return w->files[i].hex;
    return NULL;
}
