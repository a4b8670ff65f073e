/* message.c - what peers send, read and checked: frames, JSON messages, arrays' sizes, the rendezvous file.
 * Nothing here waits or holds a socket.
 * Invariant: whatever the bytes, what comes out is in its bounds, or an error that names the sender. */
#include "comm/comm_int.h"

#include "base/err.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/json.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST_ARRAYS = 4096, RENDEZVOUS_BYTES = 1 << 16 };
#define MOST_BYTES ((uint64_t)1 << 46)

const char *comm__kind_name(unsigned kind) {
    static const char *const names[] = {"?", "barrier", "broadcast", "gather", "all_gather", "exchange", "call", "reply"};
    return names[kind < COMM__KINDS ? kind : 0];
}

int comm__frame_read(struct comm__frame *f, const void *p, size_t n, const char *who) {
    if (n < sizeof *f) FAIL(ERR_FORMAT, "%s sent a frame of %zu bytes, less than its header", who, n);
    memcpy(f, p, sizeof *f);
    const uint64_t payload = n - sizeof *f;
    if (f->magic != COMM__MAGIC) FAIL(ERR_FORMAT, "%s sent a frame that is none of verlc's", who);
    if (f->protocol != COMM_PROTOCOL) FAIL(ERR_FORMAT, "%s speaks protocol %d, this rank %d", who, f->protocol, COMM_PROTOCOL);
    if (f->kind == 0 || f->kind >= COMM__KINDS || f->rank < -1 || f->rank >= COMM_MOST_RANKS || f->part > MOST_ARRAYS)
        FAIL(ERR_FORMAT, "%s sent a frame of unknown kind", who);
    if (f->total > MOST_BYTES || f->offset > f->total || payload > f->total - f->offset || payload > COMM_FRAME ||
        (payload == 0 && f->total > 0))
        FAIL(ERR_FORMAT, "%s sent a frame of %llu bytes at %llu of %llu", who, (unsigned long long)payload,
             (unsigned long long)f->offset, (unsigned long long)f->total);
    return 0;
}

static int text(const json_t *m, const char *key, const char **out, size_t most, const char *where) {
    TRY(json_str(m, key, out, where));
    const size_t n = json_string_length(json_object_get(m, key));
    if (n >= most || strlen(*out) != n) FAIL(ERR_FORMAT, "%s: \"%s\" is not a text of at most %zu bytes", where, key, most - 1);
    for (const char *s = *out; *s; s++)
        if ((unsigned char)*s < ' ') FAIL(ERR_FORMAT, "%s: \"%s\" has control characters", where, key);
    return 0;
}

static int number(const json_t *m, const char *key, int64_t least, int64_t most, int *out, const char *where) {
    int64_t v;
    TRY(json_i64(m, key, &v, where));
    if (v < least || v > most) FAIL(ERR_FORMAT, "%s: \"%s\" is %lld", where, key, (long long)v);
    *out = (int)v;
    return 0;
}

static bool is_address(const json_t *v) {
    const size_t n = json_string_length(v);
    return n > 0 && n < COMM__ADDRESSES && strlen(json_string_value(v)) == n;
}

int comm__join_read(struct comm__join *j, const json_t *m, const char *where) {
    int protocol;
    TRY(number(m, "protocol", 0, 1 << 30, &protocol, where));
    TRY(number(m, "rank", 0, COMM_MOST_RANKS - 1, &j->rank, where));
    TRY(text(m, "host", &j->host, COMM__NAME, where));
    TRY(text(m, "version", &j->version, COMM__NAME, where));
    TRY(number(m, "pid", 1, 1 << 30, &j->pid, where));
    if (protocol != COMM_PROTOCOL)
        FAIL(ERR_RANK,
             "rank %d (host %s, pid %d) speaks protocol %d of verlc %s, the controller %d of %s; install one version on all hosts",
             j->rank, j->host, j->pid, protocol, j->version, COMM_PROTOCOL, VERLC_VERSION);
    TRY(number(m, "size", 1, COMM_MOST_RANKS, &j->size, where));
    TRY(text(m, "build", &j->build, COMM__NAME, where));
    TRY(text(m, "machine", &j->machine, COMM__MACHINE, where));
    TRY(text(m, "calls", &j->calls, COMM__ADDRESSES, where));
    j->mesh = json_object_get(m, "mesh");
    if ((int)json_array_size(j->mesh) != j->size) FAIL(ERR_FORMAT, "%s: \"mesh\" has not %d elements", where, j->size);
    for (int r = j->rank + 1; r < j->size; r++)
        if (!is_address(json_array_get(j->mesh, (size_t)r))) FAIL(ERR_FORMAT, "%s: no address for rank %d", where, r);
    return 0;
}

int comm__heartbeat_read(struct comm__heartbeat *p, const json_t *m, const char *where) {
    const char *stage;
    TRY(text(m, "stage", &stage, COMM_STAGE, where));
    TRY(json_i64(m, "done", &p->progress.done, where));
    TRY(json_i64(m, "total", &p->progress.total, where));
    TRY(json_f64(m, "age", &p->age, where));
    TRY(number(m, "waits_for", COMM__NOBODY, COMM_MOST_RANKS - 1, &p->waits_for, where));
    TRY(json_i64(m, "call", &p->call, where));
    if (!(p->age >= 0 && p->age < 1e9)) FAIL(ERR_FORMAT, "%s: \"age\" is %g", where, p->age);
    if (p->progress.done < 0 || p->progress.total < 0) FAIL(ERR_FORMAT, "%s: \"done\" or \"total\" is negative", where);
    snprintf(p->progress.stage, sizeof p->progress.stage, "%s", stage);
    return 0;
}

void comm__arrays_free(struct comm_bytes *p, int n, struct comm_bytes map) {
    for (int i = 0; p && !map.n && i < n; i++) free(p[i].p);
    if (map.n) munmap(map.p, map.n);
    free(p);
}

int comm__arrays_read(struct comm__arrays *a, const json_t *head, bool own, const char *who) {
    const json_t *sizes = json_object_get(head, "arrays");
    const size_t count = json_array_size(sizes);
    *a = (struct comm__arrays){0};
    if (!json_is_array(sizes) || count > MOST_ARRAYS) FAIL(ERR_FORMAT, "%s: a message without its arrays' sizes", who);
    uint64_t sum = 0;
    for (size_t i = 0; i < count; i++) {
        const json_t *v = json_array_get(sizes, i);
        const json_int_t bytes = json_integer_value(v);
        if (!json_is_integer(v) || bytes < 0 || (uint64_t)bytes > MOST_BYTES || (sum += (uint64_t)bytes) > MOST_BYTES)
            FAIL(ERR_FORMAT, "%s: an array's size is none", who);
    }
    struct comm_bytes *out = xcalloc(count + 1, sizeof *out);
    for (size_t i = 0; i < count; i++) {
        out[i].n = (size_t)json_integer_value(json_array_get(sizes, i));
        if (own) out[i].p = malloc(out[i].n + !out[i].n);
        if (own && !out[i].p) {
            comm__arrays_free(out, (int)count, (struct comm_bytes){0});
            FAIL(ERR_NOMEM, "%s: no memory for an array of %llu bytes", who, (unsigned long long)sum);
        }
    }
    a->p = out;
    a->n = (int)count;
    return 0;
}

void comm__machine(char *out, size_t n) {
    char host[COMM__NAME] = "?", boot[40] = "";
    gethostname(host, sizeof host - 1);
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "r");
    if (f && fscanf(f, "%39s", boot) != 1) boot[0] = '\0';
    if (f) fclose(f);
    snprintf(out, n, "%s %s", host, boot);
}

const char *comm__build(void) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static char hex[33];
    pthread_mutex_lock(&lock);
    if (!hex[0] && hash_file_hex("/proc/self/exe", hex) < 0) strcpy(hex, "?");
    pthread_mutex_unlock(&lock);
    return hex;
}

/* ---- DIR/.rendezvous ---- */

static char *rendezvous_path(const char *dir) { return file_join(dir, ".rendezvous"); }

int comm_rendezvous_write(const char *dir, const struct comm_where *w, const char *job) {
    json_t *m = json_pack("{s:i,s:s,s:s,s:s}", "protocol", COMM_PROTOCOL, "address", w->address, "key", w->key, "job", job);
    struct buf b = {0};
    char *path = rendezvous_path(dir);
    int rc = m ? json_dump_line(&b, m) : err_set(ERR_INVAL, __FILE__, __LINE__, "%s: a job's name that is no UTF-8", path);
    if (rc >= 0) rc = file_write_atomic_mode(path, b.p, b.n, 0600);
    json_decref(m);
    buf_free(&b);
    free(path);
    TRY(rc);
    return 0;
}

void comm_rendezvous_remove(const char *dir) {
    char *path = rendezvous_path(dir);
    unlink(path);
    free(path);
}

int comm__rendezvous_parse(struct comm_where *w, const char *job, const char *p, size_t n, const char *path) {
    json_t *m = NULL;
    const char *address, *key, *theirs;
    int protocol, rc;
    TRY(json_parse(&m, p, n, path));
    TRYG(number(m, "protocol", 0, 1 << 30, &protocol, path), out);
    if (protocol != COMM_PROTOCOL)
        FAILG(out, ERR_FORMAT, "%s: protocol %d, and this is %d of verlc %s; install one version on all hosts", path, protocol,
              COMM_PROTOCOL, VERLC_VERSION);
    TRYG(text(m, "address", &address, sizeof w->address, path), out);
    TRYG(text(m, "key", &key, COMM_KEY, path), out);
    TRYG(text(m, "job", &theirs, COMM_JOB, path), out);
    if (strlen(key) != COMM_KEY - 1) FAILG(out, ERR_FORMAT, "%s: \"key\" is not a key of %d characters", path, COMM_KEY - 1);
    rc = strcmp(job, theirs) == 0;
    if (rc) {
        strcpy(w->address, address);
        strcpy(w->key, key);
    }
out:
    json_decref(m);
    return rc;
}

int comm_rendezvous_read(const char *dir, struct comm_where *w, const char *job) {
    char *path = rendezvous_path(dir);
    struct buf b = {0};
    int rc = 0;
    if (access(path, F_OK) == 0) {
        rc = file_read(&b, path, RENDEZVOUS_BYTES);
        if (rc >= 0) rc = comm__rendezvous_parse(w, job, b.p ? b.p : "", b.n, path);
    }
    buf_free(&b);
    free(path);
    TRY(rc);
    return rc;
}
