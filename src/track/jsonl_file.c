/* jsonl_file.c - the JSONL file: {"step": s, "data": {name: value}} a line, at
 * VERL_FILE_LOGGER_PATH, else VERL_FILE_LOGGER_ROOT/project/experiment.jsonl,
 * else RUN_DIR/metrics.jsonl.  A resumed run keeps the lines up to its step. */
#include "track/track_int.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

struct file_ctx {
    FILE *f;
    char *path;
};

static char *choose_path(const struct track_args *a) {
    const char *p = getenv("VERL_FILE_LOGGER_PATH"), *root = getenv("VERL_FILE_LOGGER_ROOT");
    if (p && *p) return file_expand(p);
    if (root && *root) return xasprintf("%s/%s/%s.jsonl", root, a->project, a->experiment);
    return file_join(a->run_dir, "metrics.jsonl");
}

struct keep {
    struct buf out;
    int64_t upto;
};
static int keep_line(void *arg, char *line, size_t n, int64_t no) {
    struct keep *k = arg;
    json_t *o;
    int64_t step;
    (void)no;
    if (json_parse(&o, line, n, "") < 0) return 0; /* a line torn by a crash */
    const bool ok = json_i64(o, "step", &step, "") == 0 && step <= k->upto;
    json_decref(o);
    if (!ok) return 0;
    TRY(buf_add(&k->out, line, n));
    return buf_addc(&k->out, '\n');
}

static int start_file(const char *path, int64_t resume_step) {
    struct keep k = {.upto = resume_step};
    struct stat st;
    int rc = 0;
    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode)) return 0; /* a pipe or a device: written to, never replaced */
    if (resume_step > 0 && file_exists(path)) rc = file_each_line(path, keep_line, &k);
    if (rc == 0) rc = file_write_atomic(path, k.out.p ? k.out.p : "", k.out.n);
    buf_free(&k.out);
    return rc;
}

static void file_close(void *v) {
    struct file_ctx *c = v;
    if (c->f) fclose(c->f);
    free(c->path);
    free(c);
}

static int file_open(void **ctx, const char *name, const struct track_args *a) {
    (void)name;
    struct file_ctx *c = xcalloc(1, sizeof *c);
    int rc = 0;
    c->path = choose_path(a);
    char *dir = xstrdup(c->path), *slash = strrchr(dir, '/');
    if (slash && slash != dir) {
        *slash = '\0';
        rc = file_mkdirs(dir);
    }
    free(dir);
    if (rc == 0) rc = start_file(c->path, a->resume_step);
    if (rc == 0 && !(c->f = fopen(c->path, "a"))) rc = err_set(ERR_IO, __FILE__, __LINE__, "%s: %s", c->path, strerror(errno));
    if (rc < 0) file_close(c);
    else *ctx = c;
    return rc;
}

static int file_log(void *v, int64_t step, const struct metrics *m, double wall) {
    struct file_ctx *c = v;
    struct buf b = {0};
    (void)wall;
    json_t *data = json_object();
    for (int64_t i = 0; i < m->n; i++) {
        const struct metric *x = &m->items[i];
        json_object_set_new(data, x->name,
                            !isfinite(x->value) ? json_null()
                            : x->whole          ? json_integer((json_int_t)x->value)
                                                : json_real(x->value));
    }
    json_t *o = json_pack("{s:I, s:o}", "step", (json_int_t)step, "data", data);
    int rc = json_dump_line(&b, o);
    json_decref(o);
    if (rc == 0 && fprintf(c->f, "%s\n", b.p) < 0) rc = err_set(ERR_IO, __FILE__, __LINE__, "%s: %s", c->path, strerror(errno));
    buf_free(&b);
    return rc;
}

static int file_flush(void *v) {
    struct file_ctx *c = v;
    if (fflush(c->f) != 0) FAIL(ERR_IO, "%s: %s", c->path, strerror(errno));
    return 0;
}

const struct tracker track_file = {.name = "file", .open = file_open, .log = file_log, .flush = file_flush, .close = file_close};
