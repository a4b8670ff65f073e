/* resume_changes.c - see resume_changes.h. */
#include "run/resume_changes.h"

#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "ckpt/ckpt.h"
#include "model/files/load.h"
#include "track/track.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

enum { CONFIG_MAX = 16 << 20 };

/* Keys that say how to resume. */
static const char *const about_resuming[] = {"trainer.resume_mode", "trainer.resume_from_path", "trainer.resume_other_model"};

/* ---- where it goes on from ---- */

static void wall_text(double wall, char out[32]) {
    const time_t t = (time_t)wall;
    struct tm tm;
    localtime_r(&t, &tm);
    strftime(out, 32, "%Y-%m-%d %H:%M", &tm);
}

/* With mode auto: the user did not name this checkpoint, so the line says where a second start in the directory goes on. */
static void say_continued(const struct resume *r, const char *root) {
    char *manifest = file_join(r->dir, "manifest.json"), saved[32] = "?", began[32] = "";
    struct stat st;
    const double start = track_began(root);
    if (stat(manifest, &st) == 0) wall_text((double)st.st_mtim.tv_sec, saved);
    if (start > 0) wall_text(start, began);
    log_info("continuing from step %lld of the run in %s%s%s, saved %s; trainer.resume_mode=disable or another "
             "trainer.default_local_dir starts from scratch",
             (long long)r->step, root, began[0] ? " that began " : "", began, saved);
    free(manifest);
}

/* ---- models ---- */

static void find_fingerprints(struct resume *r, const struct resume_tell_args *a) {
    r->models = json_object();
    for (int i = 0; i < a->n_models; i++) {
        char hex[33];
        if (!a->models[i].dir) continue;
        if (model_fingerprint(a->models[i].dir, hex) == 0) json_object_set_new(r->models, a->models[i].key, json_string(hex));
        else log_debug("no fingerprint of %s: %s", a->models[i].dir, err_msg()); /* opening it reports why */
    }
}

/* Whether the directory has another model than the checkpoint's run had. */
static bool is_other(const struct resume *r, const char *key) {
    const char *was = json_string_value(json_object_get(json_object_get(r->trainer, "models"), key));
    const char *now = json_string_value(json_object_get(r->models, key));
    return was && now && strcmp(was, now) != 0;
}

static int check_models(const struct resume *r, const struct resume_tell_args *a) {
    for (int i = 0; i < a->n_models && !a->other_model; i++) {
        const struct resume_model *m = &a->models[i];
        if (!m->fixed || !is_other(r, m->key)) continue;
        FAIL(
            ERR_INPUT,
            "%s=%s: not the model that the run of %s began from: its config.json or weights are others, so the reference of the KL "
            "divergence, or an adapter's base, would change in the middle of the run; give the same model, start from scratch in "
            "another trainer.default_local_dir, or go on with this one: trainer.resume_other_model=True",
            m->key, m->dir, r->dir);
    }
    return 0;
}

/* ---- keys ---- */

struct comparison {
    struct resume *r;
    const struct resume_tell_args *a;
};

static void log_change(struct resume *r, const char *key, const char *was, const char *now) {
    char *line = xasprintf("changed since step %lld: %s %s -> %s", (long long)r->step, key, was, now);
    log_info("%s", line);
    json_array_append_new(r->changes, json_string(line));
    free(line);
}

static void log_key(void *arg, const struct conf_change *change) {
    const struct comparison *t = arg;
    for (size_t i = 0; i < sizeof about_resuming / sizeof *about_resuming; i++)
        if (strcmp(about_resuming[i], change->key) == 0) return;
    log_change(t->r, change->key, change->was, change->now);
}

static bool is_logged(const struct resume *r, const char *key) {
    char *begin = xasprintf("changed since step %lld: %s ", (long long)r->step, key);
    bool logged = false;
    size_t k;
    json_t *line;
    json_array_foreach(r->changes, k, line) logged |= strncmp(json_string_value(line), begin, strlen(begin)) == 0;
    free(begin);
    return logged;
}

static char *with_print(const json_t *models, const struct resume_model *m) {
    return xasprintf("%s (%.8s)", m->dir, json_string_value(json_object_get(models, m->key)));
}

/* Another model, under the same name or not. */
static void log_models(struct resume *r, const struct resume_tell_args *a) {
    for (int i = 0; i < a->n_models; i++) {
        const struct resume_model *m = &a->models[i];
        if (!is_other(r, m->key)) continue;
        char *was = with_print(json_object_get(r->trainer, "models"), m), *now = with_print(r->models, m);
        if (!is_logged(r, m->key)) log_change(r, m->key, was, now);
        if (!m->fixed || a->other_model)
            log_warn("%s=%s: another model than the one that the run of %s began from", m->key, m->dir, r->dir);
        free(was);
        free(now);
    }
}

static int log_keys(struct resume *r, const struct resume_tell_args *a) {
    struct comparison t = {r, a};
    struct buf yaml = {0};
    char *path = file_join(r->dir, "config.yaml");
    const char *program = NULL;
    int rc = 0;
    TRYG(json_str_opt(r->trainer, "config_name", &program, r->dir), out);
    if (program && strcmp(program, conf_schema(a->conf)) != 0) log_change(r, "--config-name", program, conf_schema(a->conf));
    TRYG(file_read(&yaml, path, CONFIG_MAX), out);
    TRYG(conf_changes(a->conf, yaml.p ? yaml.p : "", yaml.n, path, log_key, &t), out);
    log_models(r, a);
out:
    buf_free(&yaml);
    free(path);
    return rc;
}

int resume_tell(struct resume *r, const struct resume_tell_args *a) {
    find_fingerprints(r, a);
    if (!r->dir) return 0;
    if (strcmp(a->mode, "auto") == 0) say_continued(r, a->root);
    r->changes = json_array();
    if (log_keys(r, a) < 0) log_warn("%s: what has changed since is not known: %s", r->dir, err_msg());
    return check_models(r, a);
}

/* ---- adapters ---- */

static char *in_words(const struct lora_config *l) {
    return xasprintf("an adapter (LoRA) of rank %lld, alpha %g", (long long)l->rank, l->alpha);
}

int resume_check_adapter(const struct resume *r, const char *part, const char *section, const struct lora_config *l) {
    struct lora_config saved = {0};
    char *dir, *config, *was, *now;
    int rc = 0;
    if (!r->dir) return 0;
    dir = ckpt_part_dir(r->dir, part);
    config = file_join(dir, "adapter_config.json");
    const bool adapter = file_exists(config);
    was = now = NULL;
    if (!file_is_dir(dir)) goto out; /* a part that is not there: the load says so */
    if (adapter) TRYG(lora_config_load(&saved, dir), out);
    if (adapter ? l && saved.rank == l->rank && saved.alpha == l->alpha : !l) goto out;
    was = adapter ? in_words(&saved) : xstrdup("all weights");
    now = l ? in_words(l) : xstrdup("all weights");
    if (adapter)
        rc = err_set(ERR_INPUT, __FILE__, __LINE__,
                     "%s was trained as %s, and this run trains %s: resume with %s.lora_rank=%lld %s.lora_alpha=%g, or start from "
                     "scratch in another trainer.default_local_dir",
                     dir, was, now, section, (long long)saved.rank, section, saved.alpha);
    else
        rc = err_set(ERR_INPUT, __FILE__, __LINE__,
                     "%s was trained as a whole, all weights, and this run trains %s: resume with %s.lora_rank=0, or start from "
                     "scratch in another trainer.default_local_dir; an adapter can start from its weights: %s.path=%s",
                     dir, now, section, section, dir);
out:
    lora_config_free(&saved);
    free(dir);
    free(config);
    free(was);
    free(now);
    return rc;
}
