/* ckpt.c - writes, finds, verifies, loads and retires checkpoint directories. Layout and invariants are in
 * ckpt.h; the model's own files are model's. */
#include "ckpt/ckpt_int.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/file_writer.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/log.h"
#include "model/files/convert.h"
#include "model/files/export.h"
#include "model/files/load.h"
#include "model/master_weights.h"
#include "model/files/safetensors.h"
#include "model/lora/lora.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PREFIX "global_step_"
#define OLD ".old.tmp"     /* file_replace_dir's */
#define PARTS ".parts.tmp" /* parts that wait for the rest of their checkpoint */
#define TRACKER "latest_checkpointed_iteration.txt"
enum { FORMAT = 2, MANIFEST_MAX = 16 << 20, TRAINER_MAX = 2047 << 20 };

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

static bool has_file(const char *dir, const char *name) {
    char *path = file_join(dir, name);
    const bool yes = file_exists(path);
    free(path);
    return yes;
}

static char *step_dir(const char *root, int64_t step) { return xasprintf("%s/" PREFIX "%lld", root, (long long)step); }

/* ---- ours or foreign ---- */

bool ckpt_is_ours(const char *dir) {
    json_t *m = NULL;
    char *path = file_join(dir, "manifest.json");
    const bool says = file_exists(path) && json_load(&m, path, MANIFEST_MAX) == 0 && json_is_string(json_object_get(m, "verlc"));
    json_decref(m);
    free(path);
    return says || (has_file(dir, "trainer.json") && has_file(dir, "config.yaml"));
}

/* Steps of the directories global_step_N that are ours, or of those that are not, ascending; caller frees. */
static int list_steps(const char *root, bool ours, int64_t **steps, int64_t *n) {
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
        char *dir = step_dir(root, step), *here = file_join(root, e->d_name);
        const bool listed = strcmp(dir, here) == 0 && ckpt_is_ours(dir) == ours; /* global_step_07 is nobody's */
        free(dir);
        free(here);
        if (!listed) continue;
        xgrow((void **)steps, &cap, *n + 1, sizeof **steps);
        int64_t i = (*n)++;
        for (; i > 0 && (*steps)[i - 1] > step; i--) (*steps)[i] = (*steps)[i - 1];
        (*steps)[i] = step;
    }
    closedir(d);
    return 0;
}

int ckpt_count(const char *root, int64_t to, int64_t *n) {
    int64_t *steps, all;
    TRY(list_steps(root, true, &steps, &all));
    *n = 0;
    for (int64_t i = 0; i < all; i++) *n += steps[i] <= to;
    free(steps);
    return 0;
}

int ckpt_foreign(const char *root, int64_t after, int64_t to, int64_t *step) {
    int64_t *steps, n;
    *step = -1;
    TRY(list_steps(root, false, &steps, &n));
    for (int64_t i = n; i-- > 0;)
        if (steps[i] > after && steps[i] <= to) *step = steps[i];
    free(steps);
    return 0;
}

static bool is_foreign(const char *root, int64_t step) {
    char *dir = step_dir(root, step);
    const bool yes = file_exists(dir) && !ckpt_is_ours(dir);
    free(dir);
    return yes;
}

/* The step that was saved last, -1 where the file says nothing usable. */
static int64_t read_tracker(const char *root) {
    struct buf text = {0};
    char *path = file_join(root, TRACKER), *end = NULL;
    long long v = -1;
    if (file_exists(path) && file_read(&text, path, 64) == 0 && text.n > 0) {
        v = strtoll(text.p, &end, 10);
        if (end == text.p || v < 0) v = -1;
    }
    buf_free(&text);
    free(path);
    return v;
}

/* ---- writing ---- */

struct flat_array { /* of a part; one safetensors_write_tensor's arg */
    const struct ckpt_part *part;
    const char *base;
};

static int read_device(void *arg, size_t off, void *dst, size_t n) {
    const struct flat_array *a = arg;
    return dev_copy_out(a->part->model->dev, dst, a->base + off, n);
}

/* Where a part's optimizer state is: next to the model directories, since loaders read every *.safetensors of one. */
static char *optim_name(const char *part) { return xasprintf("optim/%s.safetensors", part); }
/* Where checkpoints of format 1 have it. */
static char *optim_name_1(const char *part) { return xasprintf("%s/optim.safetensors", part); }

/* ERR_NUMERIC with the tensor's name: a state that diverged must not become the newest good one. */
static int check_finite(void *arg, size_t off, const void *p, size_t n) {
    const struct flat_array *a = arg;
    const struct model *m = a->part->model;
    CHECK(off % sizeof(float) == 0 && n % sizeof(float) == 0);
    if (model_all_finite(p, DT_F32, (int64_t)(n / sizeof(float)))) return 0;
    const float *x = p;
    int64_t at = (int64_t)(off / sizeof(float)), k = 0;
    for (; isfinite(*x); x++) at++;
    while (k + 1 < m->n_train_params && m->train_params[k + 1].offset <= at) k++;
    FAIL(ERR_NUMERIC, "tensor %s of the %s holds NaN or Inf", m->train_params[k].name, a->part->name);
}

/* Master, state arrays and step: as they are, so that a resume is bitwise. */
struct optim_file {
    struct flat_array from[OPTIM_MAX_ARRAYS + 1];
    struct safetensors_write_tensor t[OPTIM_MAX_ARRAYS + 2];
    int n;
};

/* a: master, then the optimizer's. */
static void list_optim(struct optim_file *f, const struct ckpt_part *p, const struct optim_array *a, int n) {
    const bool host = !dev_has_own_memory(p->model->dev);
    for (int i = 0; i < n; i++) {
        f->from[i] = (struct flat_array){p, a[i].data};
        f->t[i] = (struct safetensors_write_tensor){
            .name = a[i].name, .dt = a[i].dt, .nd = 1, .dim = {a[i].n}, .read = read_device, .arg = &f->from[i]};
        if (host) f->t[i].data = a[i].data;
    }
    f->t[0].check = check_finite;
    f->t[n] = (struct safetensors_write_tensor){.name = "step", .dt = DT_I64, .nd = 1, .dim = {1}, .data = &p->optim->step};
    f->n = n + 1;
}

size_t ckpt_optim_begin(const struct ckpt_part *p, const struct optim_array *a, int n) {
    struct optim_file f;
    list_optim(&f, p, a, n);
    return safetensors_header_bytes(f.t, f.n, NULL);
}

static int save_optim(struct file_writer *w, const char *tmp, const struct ckpt_part *p) {
    struct optim_array a[OPTIM_MAX_ARRAYS + 1] = {{"master", DT_F32, p->model->n_train, p->model->master}};
    struct optim_file f;
    list_optim(&f, p, a, 1 + optim_arrays(p->optim, a + 1));
    char *dir = file_join(tmp, "optim"), *name = optim_name(p->name), *path = file_join(tmp, name);
    int rc = file_mkdirs(dir);
    if (rc == 0) rc = safetensors_write(w, path, f.t, f.n, NULL);
    free(dir);
    free(name);
    free(path);
    return rc;
}

static int save_part(struct file_writer *w, const char *tmp, const struct ckpt_part *p) {
    const struct model_export_args a = {.dt = -1, .tokenizer = p->tokenizer, .writer = w};
    TRY(save_optim(w, tmp, p)); /* the one that may find the state diverged comes first */
    char *dir = file_join(tmp, p->name);
    int rc = file_mkdirs(dir);
    if (rc == 0 && !p->model->lora) rc = model_export(p->model, dir, &a);
    if (rc == 0 && p->model->lora) rc = model_lora_export(p->model, dir, w);
    if (rc == 0 && p->model->lora && p->tokenizer) rc = tokenizer_files_write(p->tokenizer, dir);
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

/* What the order of a save guarantees, whenever the machine goes down: a global_step_N is there whole or not at all.
 * 1. Every file is written under the temporary directory, and is on disk when its writer returns: file_writer, file_write_new,
 *    file_write_atomic fsync it. 2. The manifest, which has the hash of each, comes last. 3. fsync_dirs: all names in the directory
 * are on disk, by one fsync a directory. 4. The directory is renamed, and that name fsynced (publish). What is cut off before the
 * fourth is a temporary name, which the next start removes. */

struct manifest {
    const struct file_writer *w;
    json_t *files;
    const json_t *joined; /* of another process: hashed and on disk; NULL: none */
    bool parts_only;      /* all files are to be taken into a checkpoint */
};

/* All files are on disk. What the writer wrote is hashed; the rest are small. */
static int manifest_add(void *arg, const char *rel, const char *full) {
    const struct manifest *m = arg;
    if (!m->parts_only && ckpt__is_verl_name(rel)) return 0;
    const json_t *theirs = json_object_get(m->joined, rel);
    if (theirs) return json_object_set(m->files, rel, (json_t *)(uintptr_t)theirs);
    const char *known = file_writer_hash(m->w, full);
    char hex[33];
    if (!known) TRY(hash_file_hex(full, hex));
    json_object_set_new(m->files, rel,
                        json_pack("{s:I, s:s}", "bytes", (json_int_t)file_size(full), "xxh3_128", known ? known : hex));
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

/* joined: the manifest of parts that another process has written, whose files are there by now; NULL: none. */
static int write_manifest(const struct file_writer *w, const char *tmp, const struct ckpt_save_args *a, const json_t *joined) {
    json_t *files = json_object(), *parts = json_array();
    struct manifest of = {w, files, json_object_get(joined, "files"), a->parts_only};
    int rc = each_file(tmp, "", manifest_add, &of);
    for (int i = 0; i < a->n_parts; i++) json_array_append_new(parts, json_string(a->parts[i].name));
    if (joined) json_array_extend(parts, json_object_get(joined, "parts"));
    json_t *m = json_pack("{s:i, s:s, s:I, s:o, s:o}", "format", FORMAT, "verlc", VERLC_VERSION, "step", (json_int_t)a->step,
                          "parts", parts, "files", files);
    char *path = file_join(tmp, "manifest.json");
    if (rc == 0) rc = json_save_new(path, m);
    free(path);
    json_decref(m);
    return rc;
}

static char *parts_dir(const struct ckpt_save_args *a) { return xasprintf("%s/" PREFIX "%lld" PARTS, a->root, (long long)a->step); }

/* A file of parts that another process has written, into tmp. */
static int take_in(const char *from, const char *tmp, const char *rel) {
    char *source = file_join(from, rel), *target = file_join(tmp, rel), *dir = xstrdup(target);
    *strrchr(dir, '/') = '\0';
    int rc =
        rel[0] == '/' || strstr(rel, "..") ? err_set(ERR_FORMAT, __FILE__, __LINE__, "%s: manifest.json names '%s'", from, rel) : 0;
    if (rc == 0) rc = file_mkdirs(dir);
    if (rc == 0 && rename(source, target) < 0) rc = err_set(ERR_IO, __FILE__, __LINE__, "%s: %s", source, strerror(errno));
    free(source);
    free(target);
    free(dir);
    return rc;
}

/* *manifest: of the parts that have come; the caller owns it. */
static int join_parts(const char *tmp, const struct ckpt_save_args *a, json_t **manifest) {
    char *dir = parts_dir(a), *path = file_join(dir, "manifest.json");
    int rc = json_load(manifest, path, (size_t)64 << 20);
    const char *rel;
    json_t *entry;
    json_object_foreach(json_object_get(*manifest, "files"), rel, entry) if (rc == 0) rc = take_in(dir, tmp, rel);
    if (rc == 0) rc = file_remove_tree(dir);
    free(path);
    free(dir);
    return rc;
}

/* Of a checkpoint that there will not be. */
static void drop_parts(const struct ckpt_save_args *a) {
    char *dir = parts_dir(a);
    file_remove_tree(dir);
    free(dir);
}

static int write_parts(struct file_writer *w, const char *tmp, const struct ckpt_save_args *a) {
    TRY(file_mkdirs(tmp));
    for (int i = 0; i < a->n_parts; i++) TRY(save_part(w, tmp, &a->parts[i]));
    return 0;
}

/* All of them is on disk, and has verl's names for it too. */
static int finish_parts(struct file_writer *w, const char *tmp, const struct ckpt_save_args *a) {
    TRY(file_writer_finish(w));
    for (int i = 0; i < a->n_parts; i++) TRY(ckpt__add_verl_names(tmp, &a->parts[i], a->hf_model));
    return 0;
}

/* The parts alone, with a manifest of them. */
static int save_parts_only(struct file_writer *w, const char *tmp, const struct ckpt_save_args *a) {
    TRY(write_parts(w, tmp, a));
    TRY(finish_parts(w, tmp, a));
    TRY(write_manifest(w, tmp, a, NULL));
    TRY(fsync_dirs(tmp));
    char *dir = parts_dir(a);
    const int rc = file_replace_dir(tmp, dir);
    free(dir);
    return rc;
}

static int write_all(struct file_writer *w, const char *tmp, const struct ckpt_save_args *a) {
    json_t *joined = NULL;
    if (is_foreign(a->root, a->step))
        FAIL(ERR_IO, "%s/" PREFIX "%lld is there and was not written by verlc, which never writes over such a one", a->root,
             (long long)a->step);
    TRY(write_parts(w, tmp, a));
    char *p = file_join(tmp, "trainer.json");
    int rc = json_save_new(p, a->trainer);
    free(p);
    TRY(rc);
    p = file_join(tmp, "config.yaml");
    rc = file_write_new(p, a->config_yaml, strlen(a->config_yaml));
    free(p);
    TRY(rc);
    TRY(finish_parts(w, tmp, a));
    if (a->joins) rc = join_parts(tmp, a, &joined);
    if (rc == 0) rc = write_manifest(w, tmp, a, joined);
    json_decref(joined);
    TRY(rc);
    return fsync_dirs(tmp);
}

/* Keeps the newest `keep` up to `step`, and `best`; what is on disk counts, not what this process wrote. */
static int retire(const char *root, int64_t step, int64_t keep, int64_t best) {
    int64_t *steps, n;
    if (keep <= 0) return 0;
    TRY(list_steps(root, true, &steps, &n));
    int rc = 0;
    int64_t newer = 0;
    for (int64_t i = n; i-- > 0 && rc == 0;) {
        if (steps[i] > step || ++newer <= keep || (best > 0 && steps[i] == best)) continue;
        char *dir = step_dir(root, steps[i]), *dead = file_temp_path(dir);
        if (rename(dir, dead) < 0) /* a half-deleted directory must not look complete */
            rc = err_set(ERR_IO, __FILE__, __LINE__, "%s: %s", dir, strerror(errno));
        if (rc == 0) rc = file_remove_tree(dead);
        free(dir);
        free(dead);
    }
    free(steps);
    return rc;
}

static int publish(const char *root, const char *tmp, int64_t step) {
    char text[32], *dir = step_dir(root, step);
    int rc = file_replace_dir(tmp, dir);
    free(dir);
    TRY(rc);
    if (is_foreign(root, read_tracker(root))) return 0; /* another program's tracker file: it stays */
    snprintf(text, sizeof text, "%lld", (long long)step);
    char *path = file_join(root, TRACKER);
    rc = file_write_atomic(path, text, strlen(text));
    free(path);
    return rc;
}

int ckpt_save(const struct ckpt_save_args *a) {
    TRY(file_mkdirs(a->root));
    char *dir = step_dir(a->root, a->step), *tmp = file_temp_path(dir);
    struct file_writer *w;
    file_writer_open(&w);
    int rc = a->parts_only ? save_parts_only(w, tmp, a) : write_all(w, tmp, a);
    file_writer_close(w);
    free(dir);
    if (rc == 0 && !a->parts_only) rc = publish(a->root, tmp, a->step);
    if (rc < 0) {
        struct err_saved why;
        err_save(&why);
        file_remove_tree(tmp);
        if (a->joins) drop_parts(a);
        err_restore(&why);
        err_wrap(rc, "checkpoint of step %lld was not saved", (long long)a->step);
        rc = err_append(rc == ERR_INPUT ? ERR_IO : rc, "; older checkpoints are untouched");
    }
    free(tmp);
    TRY(rc);
    if (a->parts_only) return 0;
    if (retire(a->root, a->step, a->keep, a->best) < 0) log_warn("an old checkpoint was not deleted: %s", err_msg());
    return 0;
}

/* ---- what killed processes left ---- */

static bool ends_with(const char *s, const char *end) {
    const size_t n = strlen(s), m = strlen(end);
    return n >= m && strcmp(s + n - m, end) == 0;
}

/* The tracker, or global_step_N, with something behind it that only verlc makes; 0.1.0 had global_step_N.tmp. */
static bool is_temporary(const char *name) {
    if (strncmp(name, TRACKER ".", strlen(TRACKER ".")) == 0) return file_is_temp_name(name);
    const size_t n = strlen(PREFIX), digits = strncmp(name, PREFIX, n) == 0 ? strspn(name + n, "0123456789") : 0;
    return digits > 0 && (strcmp(name + n + digits, ".tmp") == 0 || strcmp(name + n + digits, PARTS) == 0 ||
                          strcmp(name + n + digits, OLD) == 0 || file_is_temp_name(name));
}

int ckpt_recover(const char *root) {
    int rc = 0;
    DIR *d = opendir(root);
    if (!d && errno == ENOENT) return 0;
    if (!d) FAIL(ERR_IO, "%s: %s", root, strerror(errno));
    for (struct dirent *e; rc == 0 && (e = readdir(d));) {
        char *path = file_join(root, e->d_name);
        if (strncmp(e->d_name, PREFIX, strlen(PREFIX)) == 0 && ends_with(path, OLD)) {
            path[strlen(path) - strlen(OLD)] = '\0';
            rc = file_recover_dir(path);
            path[strlen(path)] = OLD[0];
        }
        if (rc == 0 && is_temporary(e->d_name)) rc = file_remove_tree(path);
        free(path);
    }
    closedir(d);
    return rc;
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
    if (!file_exists(path)) rc = err_set(ERR_FORMAT, __FILE__, __LINE__, "%s is missing", path);
    else if (file_size(path) != bytes)
        rc = err_set(ERR_FORMAT, __FILE__, __LINE__, "%s: %lld bytes where the manifest says %lld", path,
                     (long long)file_size(path), (long long)bytes);
    if (rc == 0) rc = hash_file_hex(path, hex);
    if (rc == 0 && strcmp(hex, sum) != 0)
        rc = err_set(ERR_FORMAT, __FILE__, __LINE__, "%s: contents differ from the manifest's checksum", path);
    free(path);
    return rc;
}

/* ERR_FORMAT unless the manifest lists name, which is taken. */
static int check_listed(const char *dir, const json_t *files, char *name) {
    int rc = 0;
    if (!json_object_get(files, name)) rc = err_set(ERR_FORMAT, __FILE__, __LINE__, "%s/manifest.json does not list %s", dir, name);
    free(name);
    return rc;
}

/* The shards that a part's index names. */
static int check_shards(const char *dir, const json_t *files, const char *part, const char *index) {
    json_t *j = NULL, *shard;
    char *path = file_join(dir, index);
    const char *tensor;
    int rc = 0;
    TRYG(json_load(&j, path, MANIFEST_MAX), out);
    json_t *map = json_object_get(j, "weight_map");
    if (json_object_size(map) == 0) FAILG(out, ERR_FORMAT, "%s: no weight_map", path);
    json_object_foreach(map, tensor, shard) {
        if (!json_is_string(shard)) FAILG(out, ERR_FORMAT, "%s: the file of %s is not a name", path, tensor);
        TRYG(check_listed(dir, files, file_join(part, json_string_value(shard))), out);
    }
out:
    json_decref(j);
    free(path);
    return rc;
}

/* A part's optimizer state, configuration and weights. */
static int check_part(const char *dir, const json_t *files, const char *part, int64_t format) {
    char *adapter = file_join(part, "adapter_config.json"), *index = file_join(part, "model.safetensors.index.json");
    int rc = 0;
    TRYG(check_listed(dir, files, format == 1 ? optim_name_1(part) : optim_name(part)), out);
    if (json_object_get(files, adapter)) {
        TRYG(check_listed(dir, files, file_join(part, "adapter_model.safetensors")), out);
    } else {
        TRYG(check_listed(dir, files, file_join(part, "config.json")), out);
        if (json_object_get(files, index)) TRYG(check_shards(dir, files, part, index), out);
        else TRYG(check_listed(dir, files, file_join(part, "model.safetensors")), out);
    }
out:
    free(adapter);
    free(index);
    return rc;
}

/* The files without which there is no resuming: a manifest that leaves one out must not pass. Format 1 does not
 * say its parts: an actor, and a critic where there is its directory. */
static int check_required(const char *dir, const json_t *m, const json_t *files) {
    const json_t *parts = json_object_get(m, "parts");
    int64_t format;
    TRY(json_i64(m, "format", &format, dir));
    if (format < 1 || format > FORMAT)
        FAIL(ERR_UNSUPPORTED, "%s/manifest.json: format %lld, this verlc reads 1 to %d", dir, (long long)format, FORMAT);
    TRY(check_listed(dir, files, xstrdup("trainer.json")));
    TRY(check_listed(dir, files, xstrdup("config.yaml")));
    if (format == 1) {
        TRY(check_part(dir, files, "actor", format));
        return has_file(dir, "critic") ? check_part(dir, files, "critic", format) : 0;
    }
    if (json_array_size(parts) == 0) FAIL(ERR_FORMAT, "%s/manifest.json: no list of parts", dir);
    for (size_t i = 0; i < json_array_size(parts); i++) {
        const char *part = json_string_value(json_array_get(parts, i));
        if (!part) FAIL(ERR_FORMAT, "%s/manifest.json: a part is not a name", dir);
        TRY(check_part(dir, files, part, format));
    }
    return 0;
}

/* A copy of one step under another's number is not that step. A directory of another name may hold any. */
static int check_step(const char *dir, const json_t *m) {
    int64_t step, named;
    TRY(json_i64(m, "step", &step, dir));
    if (ckpt_step_of(dir, &named) == 0 && step != named)
        FAIL(ERR_FORMAT, "%s/manifest.json: of step %lld, and not of the step in the directory's name", dir, (long long)step);
    return 0;
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
    if (rc == 0) rc = check_required(dir, m, files);
    if (rc == 0) rc = check_step(dir, m);
    json_decref(m);
    return rc;
}

int ckpt_adopt(const char *root, const char *dir, int64_t step) {
    int64_t named;
    TRY(ckpt_step_of(dir, &named));
    CHECK(named == step);
    TRY(ckpt_verify(dir));
    if (is_foreign(root, step))
        FAIL(ERR_IO, "%s/" PREFIX "%lld is there and was not written by verlc, which never writes over such a one", root,
             (long long)step);
    TRY(fsync_dirs(dir));
    return publish(root, dir, step);
}

/* ERR_UNSUPPORTED when the newest under root is another program's: the one that the tracker names, else the highest. */
static int check_newest(const char *root, int64_t last, int64_t highest) {
    int64_t step = -1;
    char *dir = last >= 0 ? step_dir(root, last) : NULL;
    const bool named = dir && file_exists(dir);
    free(dir);
    if (named) step = is_foreign(root, last) ? last : -1;
    else TRY(ckpt_foreign(root, highest, INT64_MAX, &step));
    if (step < 0) return 0;
    FAIL(ERR_UNSUPPORTED, "the newest checkpoint in %s, " PREFIX "%lld, was not written by verlc and cannot be read", root,
         (long long)step);
}

int ckpt_find(const char *root, int64_t *step, char **dir) {
    int64_t *steps, n, at = 0;
    *step = -1;
    *dir = NULL;
    const int64_t last = read_tracker(root);
    TRY(list_steps(root, true, &steps, &n));
    int rc = check_newest(root, last, n > 0 ? steps[n - 1] : -1);
    /* The one saved last comes first: a higher number may be left of an earlier run
     * that this one started over. Those come after all others. */
    while (at < n && (last < 0 || steps[at] <= last)) at++;
    for (int64_t k = 0; rc == 0 && k < n && *step < 0; k++) {
        const int64_t i = k < at ? at - 1 - k : n - 1 - (k - at);
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
    return rc;
}

int ckpt_read_trainer(const char *dir, json_t **trainer) {
    char *path = file_join(dir, "trainer.json");
    const int rc = json_load(trainer, path, TRAINER_MAX);
    free(path);
    return rc;
}

/* The tensor of an array, which is a whole model's. */
static int find_flat(const struct safetensors_file *f, const struct optim_array *a, const char *path,
                     const struct safetensors_tensor **out) {
    const struct safetensors_tensor *t = *out = safetensors_find(f, a->name);
    if (!t) FAIL(ERR_FORMAT, "%s: tensor %s is missing; resume with the optimizer that saved it", path, a->name);
    if (t->dt != a->dt || t->bytes != (size_t)a->n * dtype_size(a->dt))
        FAIL(ERR_FORMAT, "%s: tensor %s has %zu bytes of %s, this model and optimizer need %lld elements of %s", path, a->name,
             t->bytes, dtype_name(t->dt), (long long)a->n, dtype_name(a->dt));
    return 0;
}

/* Every tensor of the file is one of these, or the step: another optimizer's state is never dropped silently. */
static int check_names(const struct safetensors_file *f, const struct optim_array *a, int n, const char *path) {
    for (int64_t k = 0; k < safetensors_count(f); k++) {
        const char *name = safetensors_at(f, k)->name;
        bool known = strcmp(name, "step") == 0;
        for (int i = 0; i < n && !known; i++) known = strcmp(name, a[i].name) == 0;
        if (!known) FAIL(ERR_FORMAT, "%s: tensor %s is of another optimizer; resume with the one that saved it", path, name);
    }
    return 0;
}

/* What this rank has of the optimizer's arrays. */
static int load_optim(const struct safetensors_file *f, const struct ckpt_part *p, const char *path) {
    struct optim_array whole[OPTIM_MAX_ARRAYS + 1];
    const struct safetensors_tensor *t[OPTIM_MAX_ARRAYS + 1];
    struct optim_piece *pieces;
    int64_t n_pieces;
    int rc = 0;
    const int n = optim_pieces(p->optim, p->model, whole, &pieces, &n_pieces);
    for (int i = 0; i < n; i++) TRYG(find_flat(f, &whole[i], path, &t[i]), out);
    TRYG(check_names(f, whole, n, path), out);
    for (int64_t i = 0; i < n_pieces; i++) {
        const struct optim_piece *k = &pieces[i];
        const size_t size = dtype_size(whole[k->array].dt);
        if (k->array == 0) continue; /* the master is the model's */
        TRYG(dev_copy_in(p->model->dev, (char *)whole[k->array].data + (size_t)k->own * size,
                         t[k->array]->data + (size_t)k->at * size, (size_t)k->n * size),
             out);
    }
out:
    free(pieces);
    return rc;
}

/* "…q_proj" of "base_model.model.…q_proj.lora_A.weight": the module that a tensor of an adapter is on; 0: it is another tensor. */
static int module_of(const char *tensor, const char **name) {
    static const char prefix[] = "base_model.model.";
    const char *end = strstr(tensor, ".lora_A.");
    *name = strncmp(tensor, prefix, sizeof prefix - 1) == 0 ? tensor + sizeof prefix - 1 : tensor;
    return end ? (int)(end - *name) : 0;
}

static bool adapts(const struct model *m, const char *module, int n) {
    const char *name;
    for (int64_t i = 0; i < m->n_train_params; i++)
        if (module_of(m->train_params[i].name, &name) == n && strncmp(name, module, (size_t)n) == 0) return true;
    return false;
}

/* The adapter's modules are the model's: state of the same size may be of others. */
static int check_modules(const char *dir, const struct ckpt_part *p) {
    char *part = ckpt_part_dir(dir, p->name), *path = file_join(part, "adapter_model.safetensors");
    struct safetensors_file *f = NULL;
    const char *name, *odd = NULL;
    int rc = 0, n = 0;
    int64_t there = 0, here = 0;
    if (!p->model->lora || !file_exists(path)) goto out;
    TRYG(safetensors_open(&f, path), out);
    for (int64_t i = 0; i < safetensors_count(f); i++) {
        const int k = module_of(safetensors_at(f, i)->name, &name);
        there += k > 0;
        if (k > 0 && !odd && !adapts(p->model, name, k)) odd = name, n = k;
    }
    for (int64_t i = 0; i < p->model->n_train_params; i++) here += module_of(p->model->train_params[i].name, &name) > 0;
    if (odd || there != here)
        FAILG(out, ERR_INPUT,
              "%s: its adapter is on %lld modules, this run's on %lld%s%.*s%s; resume with the target_modules and exclude_modules "
              "that it was trained with, or start from scratch in another trainer.default_local_dir",
              part, (long long)there, (long long)here, odd ? ", without " : "", n, odd ? odd : "", odd ? " for one" : "");
out:
    safetensors_close(f);
    free(part);
    free(path);
    return rc;
}

/* The file of a part's optimizer state; caller frees. */
static char *optim_path(const char *dir, const char *part) {
    char *name = optim_name(part);
    if (!has_file(dir, name)) {
        free(name);
        name = optim_name_1(part);
    }
    char *path = file_join(dir, name);
    free(name);
    return path;
}

int ckpt_master_size(const char *dir, const char *part, int64_t *n) {
    char *path = optim_path(dir, part);
    struct safetensors_file *f = NULL;
    int rc = safetensors_open(&f, path);
    const struct safetensors_tensor *master = rc == 0 ? safetensors_find(f, "master") : NULL;
    *n = master ? (int64_t)(master->bytes / sizeof(float)) : 0;
    safetensors_close(f);
    free(path);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

int ckpt_load_part(const char *dir, const struct ckpt_part *p) {
    CHECK(p->model->master != NULL);
    TRY(check_modules(dir, p));
    char *path = optim_path(dir, p->name);
    struct safetensors_file *f = NULL;
    int rc = 0;
    TRYG(safetensors_open(&f, path), out);
    const struct optim_array master = {"master", DT_F32, p->model->n_train, NULL};
    const struct safetensors_tensor *flat;
    TRYG(find_flat(f, &master, path, &flat), out);
    if (p->optim) TRYG(load_optim(f, p, path), out);
    const struct safetensors_tensor *step = safetensors_find(f, "step");
    if (!step || step->dt != DT_I64 || step->bytes != 8) FAILG(out, ERR_FORMAT, "%s: tensor step is missing", path);
    if (p->optim) memcpy(&p->optim->step, step->data, 8);
    TRYG(model_set_master(p->model, (const float *)(const void *)flat->data), out);
out:
    safetensors_close(f);
    free(path);
    return rc;
}
