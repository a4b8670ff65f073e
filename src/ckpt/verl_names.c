/* verl_names.c - global_step_N/actor/huggingface and actor/lora_adapter, where verl has configuration, tokenizer and adapter.
 *
 * Scripts look there, and loaders take either directory. Nothing of verlc reads them.
 * Invariant: a name here is a file of the part's directory itself, or a small copy of one; no link leads out of a directory. */
#include "ckpt/ckpt_int.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "model/files/export.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define HUGGINGFACE "huggingface"
#define ADAPTER "lora_adapter"

static bool is_weights(const char *name) {
    const char *dot = strrchr(name, '.');
    return dot && strcmp(dot, ".safetensors") == 0;
}

static int copy_small(const char *from, const char *to) {
    struct buf b = {0};
    int rc = file_read(&b, from, 0);
    if (rc == 0) rc = file_write_atomic(to, b.p ? b.p : "", b.n);
    buf_free(&b);
    return rc < 0 ? err_wrap(ERR_IO, "%s", to) : 0;
}

/* *bare: there are no hard links here, and this index or file of weights stays away. */
static int add_name(const char *from, const char *to, const char *name, bool *bare) {
    char *source = file_join(from, name), *target = file_join(to, name);
    int rc = 0;
    if (*bare || link(source, target) < 0) {
        *bare = true;
        if (!is_weights(name) && !strstr(name, ".index.json")) rc = copy_small(source, target);
    }
    free(source);
    free(target);
    return rc;
}

/* The files of `from` that begin with "adapter_", or the others, under the same names in from/sub. */
static int add_names(const char *from, const char *sub, bool adapter) {
    char *to = file_join(from, sub);
    bool bare = false;
    int rc = file_mkdirs(to);
    DIR *d = rc == 0 ? opendir(from) : NULL;
    if (rc == 0 && !d) rc = err_set(ERR_IO, __FILE__, __LINE__, "%s: %s", from, strerror(errno));
    for (struct dirent *e; d && rc == 0 && (e = readdir(d));) {
        char *path = file_join(from, e->d_name);
        if (!file_is_dir(path) && (strncmp(e->d_name, "adapter_", 8) == 0) == adapter) rc = add_name(from, to, e->d_name, &bare);
        free(path);
    }
    if (d) closedir(d);
    free(to);
    return rc;
}

int ckpt__add_verl_names(const char *dir, const struct ckpt_part *part) {
    char *of = ckpt_part_dir(dir, part->name), *config = file_join(of, HUGGINGFACE);
    int rc = add_names(of, HUGGINGFACE, false);
    if (rc == 0 && part->model->lora) rc = add_names(of, ADAPTER, true);
    if (rc == 0 && part->model->lora) rc = model_export_config(part->model, config);
    free(of);
    free(config);
    return rc;
}

char *ckpt__linked_file(const char *dir, const char *rel) {
    static const char *const subs[] = {"/" HUGGINGFACE "/", "/" ADAPTER "/"};
    struct stat a, b;
    for (size_t i = 0; i < sizeof subs / sizeof *subs; i++) {
        const char *at = strstr(rel, subs[i]);
        if (!at || at == rel) continue;
        char *name = xasprintf("%.*s/%s", (int)(at - rel), rel, at + strlen(subs[i]));
        char *here = file_join(dir, rel), *there = file_join(dir, name);
        const bool same =
            lstat(here, &a) == 0 && lstat(there, &b) == 0 && S_ISREG(a.st_mode) && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
        free(here);
        free(there);
        if (same) return name;
        free(name);
    }
    return NULL;
}
