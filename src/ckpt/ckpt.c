/* ckpt.c - writes, finds, verifies, loads and retires checkpoint directories.
 * The layout and the promise are in ckpt.h; the model's own files are model's. */
#include "ckpt/ckpt.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/log.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PREFIX "global_step_"
#define TRACKER "latest_checkpointed_iteration.txt"
enum { MANIFEST_MAX = 16 << 20, TRAINER_MAX = 256 << 20 };

int ckpt_step_of(const char *dir, int64_t *step) {
    size_t n = strlen(dir);
    while (n > 1 && dir[n - 1] == '/') n--;
    size_t at = n;
    while (at > 0 && dir[at - 1] != '/') at--;
    const char *digits = dir + at + strlen(PREFIX);
    if (n - at <= strlen(PREFIX) || strncmp(dir + at, PREFIX, strlen(PREFIX)) != 0)
        FAIL(ERR_INVAL, "%s: a checkpoint directory is named %sN", dir, PREFIX);
    int64_t v = 0;
    for (const char *p = digits; p < dir + n; p++) {
        if (!isdigit((unsigned char)*p) || v > INT64_MAX / 10 - 10)
            FAIL(ERR_INVAL, "%s: a checkpoint directory is named %sN", dir, PREFIX);
        v = v * 10 + (*p - '0');
    }
    *step = v;
    return 0;
}

char *ckpt_part_dir(const char *dir, const char *name) { return file_join(dir, name); }

/* ---- writing ---- */

struct dev_read { /* a flat device array as the writer's source */
    struct dev *dev;
    const char *base;
};

static int read_device(void *arg, size_t off, void *dst, size_t n) {
    const struct dev_read *r = arg;
    return dev_copy_out(r->dev, dst, r->base + off, n);
}

static int read_host(void *arg, size_t off, void *dst, size_t n) {
    memcpy(dst, (const char *)arg + off, n);
    return 0;
}

/* optim.safetensors: the flat fp32 arrays as they are, so that a resume is bitwise. */
static int save_optim(const char *dir, const struct ckpt_part *p) {
    struct model *m = p->model;
    struct dev_read src[3] = {{m->dev, (const char *)m->master},
                              {m->dev, (const char *)p->optim->m},
                              {m->dev, (const char *)p->optim->v}};
    static const char *const names[3] = {"master", "exp_avg", "exp_avg_sq"};
    struct st_write_tensor t[4] = {
        [3] = {.name = "step", .dt = DT_I64, .nd = 1, .dim = {1}, .read = read_host, .arg = &p->optim->step}};
    for (int i = 0; i < 3; i++)
        t[i] = (struct st_write_tensor){.name = names[i], .dt = DT_F32, .nd = 1, .dim = {m->n_elems},
                                        .read = read_device, .arg = &src[i]};
    char *path = file_join(dir, "optim.safetensors");
    const int rc = st_write(path, t, 4, NULL);
    free(path);
    return rc;
}

static int save_part(const char *tmp, const struct ckpt_part *p) {
    char *dir = file_join(tmp, p->name);
    int rc = file_mkdirs(dir);
    if (rc == 0) rc = model_export(p->model, dir, -1, p->tokenizer_dir, 0);
    if (rc == 0 && p->optim) rc = save_optim(dir, p);
    free(dir);
    return rc;
}

/* Calls fn for every regular file under root/sub, with its path relative to root. */
static int each_file(const char *root, const char *sub, int (*fn)(void *, const char *rel, const char *full), void *arg) {
    int rc = 0;
    char *dir = sub[0] ? file_join(root, sub) : xstrdup(root);
    DIR *d = opendir(dir);
    if (!d) {
        rc = err_set(ERR_INPUT, __FILE__, __LINE__, "%s: %s", dir, strerror(errno));
        free(dir);
        return rc;
    }
    for (struct dirent *e; rc == 0 && (e = readdir(d));) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
        char *rel = sub[0] ? file_join(sub, e->d_name) : xstrdup(e->d_name), *full = file_join(root, rel);
        rc = file_is_dir(full) ? each_file(root, rel, fn, arg) : fn(arg, rel, full);
        free(rel);
        free(full);
    }
    closedir(d);
    free(dir);
    return rc;
}

static int fsync_file(const char *path) {
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) FAIL(ERR_IO, "%s: %s", path, strerror(errno));
    const int bad = fsync(fd), e = errno;
    close(fd);
    if (bad) FAIL(ERR_IO, "%s: fsync: %s", path, strerror(e));
    return 0;
}

static int manifest_add(void *arg, const char *rel, const char *full) {
    char hex[33];
    TRY(fsync_file(full));
    TRY(hash_file_hex(full, hex));
    json_object_set_new(arg, rel, json_pack("{s:I, s:s}", "bytes", (json_int_t)file_size(full), "xxh3_128", hex));
    return 0;
}

static int fsync_dirs(const char *dir) {
    DIR *d = opendir(dir);
    if (!d) FAIL(ERR_IO, "%s: %s", dir, strerror(errno));
    int rc = 0;
    for (struct dirent *e; rc == 0 && (e = readdir(d));) {
        if (e->d_name[0] == '.') continue;
        char *sub = file_join(dir, e->d_name);
        if (file_is_dir(sub)) rc = fsync_dirs(sub);
        free(sub);
    }
    closedir(d);
    TRY(rc);
    return file_fsync_dir(dir);
}

static int write_manifest(const char *tmp, int64_t step) {
    json_t *files = json_object();
    int rc = each_file(tmp, "", manifest_add, files);
    json_t *m = json_pack("{s:i, s:s, s:I, s:o}", "format", 1, "verlc", VERLC_VERSION, "step", (json_int_t)step, "files", files);
    char *path = file_join(tmp, "manifest.json");
    if (rc == 0) rc = json_save_atomic(path, m);
    free(path);
    json_decref(m);
    return rc;
}

static int write_all(const char *tmp, const struct ckpt_save_args *a) {
    TRY(file_remove_tree(tmp)); /* left by a process that was killed while saving */
    TRY(file_mkdirs(tmp));
    for (int i = 0; i < a->n_parts; i++) TRY(save_part(tmp, &a->parts[i]));
    char *p = file_join(tmp, "trainer.json");
    int rc = json_save_atomic(p, a->trainer);
    free(p);
    TRY(rc);
    p = file_join(tmp, "config.yaml");
    rc = file_write_atomic(p, a->config_yaml, strlen(a->config_yaml));
    free(p);
    TRY(rc);
    TRY(write_manifest(tmp, a->step));
    return fsync_dirs(tmp);
}

/* Steps of all directories named global_step_N, ascending; caller frees. */
static int list_steps(const char *root, int64_t **steps, int64_t *n) {
    int64_t cap = 0;
    *steps = NULL;
    *n = 0;
    DIR *d = opendir(root);
    if (!d) {
        if (errno == ENOENT) return 0;
        FAIL(ERR_INPUT, "%s: %s", root, strerror(errno));
    }
    for (struct dirent *e; (e = readdir(d));) {
        int64_t step;
        if (strncmp(e->d_name, PREFIX, strlen(PREFIX)) != 0 || ckpt_step_of(e->d_name, &step) < 0) continue;
        xgrow((void **)steps, &cap, *n + 1, sizeof **steps);
        int64_t i = (*n)++;
        for (; i > 0 && (*steps)[i - 1] > step; i--) (*steps)[i] = (*steps)[i - 1];
        (*steps)[i] = step;
    }
    closedir(d);
    return 0;
}

static char *step_dir(const char *root, int64_t step) {
    return xasprintf("%s/" PREFIX "%lld", root, (long long)step);
}

/* Keeps the newest `keep` up to `step`; what is on disk counts, not what this process wrote. */
static int retire(const char *root, int64_t step, int64_t keep) {
    int64_t *steps, n;
    if (keep <= 0) return 0;
    TRY(list_steps(root, &steps, &n));
    int rc = 0;
    int64_t newer = 0;
    for (int64_t i = n; i-- > 0 && rc == 0;) {
        if (steps[i] > step || ++newer <= keep) continue;
        char *dir = step_dir(root, steps[i]), *dead = xasprintf("%s.tmp", dir);
        rc = file_remove_tree(dead);
        if (rc == 0 && rename(dir, dead) < 0) /* a half-deleted directory must not look complete */
            rc = err_set(ERR_IO, __FILE__, __LINE__, "%s: %s", dir, strerror(errno));
        if (rc == 0) rc = file_remove_tree(dead);
        free(dir);
        free(dead);
    }
    free(steps);
    return rc;
}

static int publish(const char *root, const char *tmp, int64_t step) {
    int rc = 0;
    char *dir = step_dir(root, step), *old = NULL, *path = NULL;
    if (file_exists(dir)) { /* a run repeated over an older one */
        old = xasprintf("%s.old.tmp", dir);
        TRYG(file_remove_tree(old), out);
        if (rename(dir, old) < 0) FAILG(out, ERR_IO, "%s: %s", dir, strerror(errno));
    }
    if (rename(tmp, dir) < 0) FAILG(out, ERR_IO, "%s: %s", dir, strerror(errno));
    TRYG(file_fsync_dir(root), out);
    if (old) TRYG(file_remove_tree(old), out);
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)step);
    path = file_join(root, TRACKER);
    TRYG(file_write_atomic(path, text, strlen(text)), out);
out:
    free(dir);
    free(old);
    free(path);
    return rc;
}

int ckpt_save(const struct ckpt_save_args *a) {
    TRY(file_mkdirs(a->root));
    char *tmp = xasprintf("%s/" PREFIX "%lld.tmp", a->root, (long long)a->step);
    int rc = write_all(tmp, a);
    if (rc == 0) rc = publish(a->root, tmp, a->step);
    if (rc < 0) {
        char *why = xstrdup(err_msg());
        file_remove_tree(tmp);
        rc = err_set(rc == ERR_INPUT ? ERR_IO : rc, __FILE__, __LINE__,
                     "checkpoint of step %lld was not saved: %s; older checkpoints are untouched", (long long)a->step, why);
        free(why);
    }
    free(tmp);
    TRY(rc);
    return retire(a->root, a->step, a->keep);
}

/* ---- reading ---- */

static int verify_file(const char *dir, const char *rel, const json_t *want) {
    int64_t bytes;
    const char *sum;
    char hex[33];
    if (rel[0] == '/' || strstr(rel, "..")) FAIL(ERR_FORMAT, "%s: manifest.json names '%s'", dir, rel);
    TRY(json_i64(want, "bytes", &bytes, dir));
    TRY(json_str(want, "xxh3_128", &sum, dir));
    char *path = file_join(dir, rel);
    int rc = 0;
    if (file_size(path) != bytes)
        rc = err_set(ERR_FORMAT, __FILE__, __LINE__, "%s: %lld bytes where the manifest says %lld", path,
                     (long long)file_size(path), (long long)bytes);
    if (rc == 0) rc = hash_file_hex(path, hex);
    if (rc == 0 && strcmp(hex, sum) != 0)
        rc = err_set(ERR_FORMAT, __FILE__, __LINE__, "%s: contents differ from the manifest's checksum", path);
    free(path);
    return rc;
}

int ckpt_verify(const char *dir) {
    json_t *m = NULL;
    char *path = file_join(dir, "manifest.json");
    int rc = json_load(&m, path, MANIFEST_MAX);
    free(path);
    TRY(rc);
    const json_t *files = json_object_get(m, "files");
    if (!json_is_object(files) || json_object_size(files) == 0)
        rc = err_set(ERR_FORMAT, __FILE__, __LINE__, "%s/manifest.json: no list of files", dir);
    const char *rel;
    json_t *want;
    if (rc == 0) json_object_foreach((json_t *)(uintptr_t)files, rel, want) {
        rc = verify_file(dir, rel, want);
        if (rc < 0) break;
    }
    json_decref(m);
    return rc;
}

int ckpt_find(const char *root, int64_t *step, char **dir) {
    int64_t *steps, n;
    *step = -1;
    *dir = NULL;
    TRY(list_steps(root, &steps, &n));
    for (int64_t i = n; i-- > 0 && *step < 0;) {
        char *d = step_dir(root, steps[i]);
        if (ckpt_verify(d) == 0) {
            *step = steps[i];
            *dir = d;
            break;
        }
        log_warn("checkpoint %s is not usable (%s); trying the one before it", d, err_msg());
        free(d);
    }
    free(steps);
    return 0;
}

int ckpt_read_trainer(const char *dir, json_t **trainer) {
    char *path = file_join(dir, "trainer.json");
    const int rc = json_load(trainer, path, TRAINER_MAX);
    free(path);
    return rc;
}

static int load_flat(const struct st_file *f, const char *name, struct model *m, float *dst, const char *path) {
    const struct st_tensor *t = st_find(f, name);
    if (!t) FAIL(ERR_FORMAT, "%s: tensor %s is missing", path, name);
    if (t->dt != DT_F32 || t->bytes != (size_t)m->n_elems * 4)
        FAIL(ERR_FORMAT, "%s: tensor %s has %zu bytes of %s, this model needs %lld f32 elements", path, name, t->bytes,
             dtype_name(t->dt), (long long)m->n_elems);
    return dev_copy_in(m->dev, dst, t->data, t->bytes);
}

int ckpt_load_part(const char *dir, const struct ckpt_part *p) {
    CHECK(p->optim != NULL && p->model->master != NULL);
    char *path = xasprintf("%s/%s/optim.safetensors", dir, p->name);
    struct st_file *f = NULL;
    int rc = 0;
    TRYG(st_open(&f, path), out);
    TRYG(load_flat(f, "master", p->model, p->model->master, path), out);
    TRYG(load_flat(f, "exp_avg", p->model, p->optim->m, path), out);
    TRYG(load_flat(f, "exp_avg_sq", p->model, p->optim->v, path), out);
    const struct st_tensor *step = st_find(f, "step");
    if (!step || step->dt != DT_I64 || step->bytes != 8) FAILG(out, ERR_FORMAT, "%s: tensor step is missing", path);
    memcpy(&p->optim->step, step->data, 8);
    TRYG(model_refresh(p->model), out);
out:
    st_close(f);
    free(path);
    return rc;
}
