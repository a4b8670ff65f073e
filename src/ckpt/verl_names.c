/* verl_names.c - global_step_N/actor/huggingface and actor/lora_adapter, where verl has configuration, tokenizer and adapter.
 *
 * For scripts that look there; nothing of verlc reads them. Scripts write there as well (a merged model, say), so nothing that a
 * resume needs is there, and what is small is a copy.
 * Invariant: no link leads out of a directory, and weights are linked only where the run requested them here. */
#include "ckpt/ckpt_int.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "model/files/export.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define HUGGINGFACE "huggingface"
#define ADAPTER "lora_adapter"

static int copy_file(const char *from, const char *to) {
    struct file_map f;
    int rc = file_map_open(&f, from);
    if (rc < 0) return err_wrap(ERR_IO, "%s", to);
    rc = file_write_new(to, f.p ? (const char *)f.p : "", f.n);
    file_unmap(&f);
    return rc;
}

static bool is_weights(const char *name) {
    const char *dot = strrchr(name, '.');
    return (dot && strcmp(dot, ".safetensors") == 0) || strstr(name, ".index.json");
}

/* The files of `from` that begin with "adapter_", or the others, under the same names in from/sub. */
static int add_names(const char *from, const char *sub, bool adapter, bool weights) {
    char *to = file_join(from, sub);
    int rc = file_mkdirs(to);
    DIR *d = rc == 0 ? opendir(from) : NULL;
    if (rc == 0 && !d) rc = err_set(ERR_IO, __FILE__, __LINE__, "%s: %s", from, strerror(errno));
    for (struct dirent *e; d && rc == 0 && (e = readdir(d));) {
        char *source = file_join(from, e->d_name), *target = file_join(to, e->d_name);
        const bool ours = (strncmp(e->d_name, "adapter_", 8) == 0) == adapter && (weights || !is_weights(e->d_name));
        if (ours && !file_is_dir(source) && (!is_weights(e->d_name) || link(source, target) < 0)) rc = copy_file(source, target);
        free(source);
        free(target);
    }
    if (d) closedir(d);
    free(to);
    return rc;
}

int ckpt__add_verl_names(const char *dir, const struct ckpt_part *part, bool hf_model) {
    char *of = ckpt_part_dir(dir, part->name), *config = file_join(of, HUGGINGFACE);
    int rc = add_names(of, HUGGINGFACE, false, hf_model);
    if (rc == 0 && part->model->lora) rc = add_names(of, ADAPTER, true, true);
    if (rc == 0 && part->model->lora) rc = model_export_config(part->model, config);
    free(of);
    free(config);
    return rc;
}

bool ckpt__is_verl_name(const char *rel) {
    const char *sub = strchr(rel, '/');
    return sub && (strncmp(sub, "/" HUGGINGFACE "/", sizeof HUGGINGFACE + 1) == 0 ||
                   strncmp(sub, "/" ADAPTER "/", sizeof ADAPTER + 1) == 0);
}
