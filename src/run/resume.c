/* resume.c - see resume.h. */
#include "run/resume.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "ckpt/ckpt.h"
#include "data/data.h"
#include "model/files/shards.h"

#include <stdlib.h>
#include <string.h>

/* The newest checkpoint of the run directory. */
static int find_newest(struct resume *r, const char *root) {
    const int rc = ckpt_find(root, &r->step, &r->dir);
    if (rc != ERR_UNSUPPORTED) return rc;
    return err_append(rc,
                      "; start in another trainer.default_local_dir, or with trainer.resume_mode=disable, which writes next "
                      "to it and never over it; trainer.resume_mode=resume_path with "
                      "trainer.resume_from_path=.../global_step_N resumes one of verlc's. A run can start from the weights "
                      "of verl's FSDP and Megatron checkpoints, without their optimizer: "
                      "actor_rollout_ref.model.path=%s/global_step_N/actor, "
                      "for sft model.path",
                      root);
}

static int not_ours(const char *path) {
    char *shards = shards_find_dir(path);
    int rc = err_set(ERR_UNSUPPORTED, __FILE__, __LINE__,
                     "trainer.resume_from_path=%s: it was not written by verlc and cannot be resumed", path);
    if (shards)
        rc = err_append(rc,
                        "; a run can start from its weights, without its optimizer: actor_rollout_ref.model.path=%s, for sft "
                        "model.path, with trainer.resume_mode=disable",
                        shards);
    free(shards);
    return rc;
}

/* A checkpoint that does not verify is removed from the cache, so that another try fetches it again. */
static int find_remote(struct resume *r, const char *url) {
    char *dir;
    TRY(data_remote_fetch(url, &dir));
    int rc = ckpt_is_ours(dir) ? ckpt_verify(dir) : not_ours(url);
    if (rc == 0) {
        r->dir = dir;
        return 0;
    }
    struct err_saved why;
    err_save(&why);
    (void)file_remove_tree(dir);
    err_restore(&why);
    free(dir);
    return rc;
}

static int find_named(struct resume *r, const char *path) {
    if (!path) FAIL(ERR_INVAL, "trainer.resume_mode=resume_path needs trainer.resume_from_path=.../global_step_N");
    TRY(ckpt_step_of(path, &r->step));
    if (data_is_remote(path)) return find_remote(r, path);
    if (file_is_dir(path) && !ckpt_is_ours(path)) return not_ours(path);
    TRY(ckpt_verify(path));
    r->dir = xstrdup(path);
    return 0;
}

int resume_find(struct resume *r, const struct resume_args *a) {
    *r = (struct resume){.step = -1};
    if (strcmp(a->mode, "disable") == 0) return 0;
    if (strcmp(a->mode, "auto") == 0) TRY(find_newest(r, a->root));
    else if (strcmp(a->mode, "resume_path") == 0) TRY(find_named(r, a->path));
    else FAIL(ERR_INVAL, "trainer.resume_mode=%s: expected auto, disable or resume_path", a->mode);
    return r->dir ? ckpt_read_trainer(r->dir, &r->trainer) : 0;
}

int resume_check_room(const struct resume *r, const char *root, int64_t total_steps) {
    const int64_t from = r->step > 0 ? r->step : 0;
    int64_t foreign;
    TRY(ckpt_foreign(root, from, total_steps, &foreign));
    if (foreign >= 0)
        FAIL(ERR_INPUT,
             "trainer.default_local_dir=%s: global_step_%lld there was not written by verlc, is never written over, and is among "
             "the steps %lld to %lld of this run; give another trainer.default_local_dir, or fewer trainer.total_training_steps",
             root, (long long)foreign, (long long)from + 1, (long long)total_steps);
    TRY(ckpt_foreign(root, -1, INT64_MAX, &foreign));
    if (foreign >= 0)
        log_note("%s/global_step_%lld was not written by verlc: it is left as it is and not counted by retention; "
                 "trainer.resume_mode=resume_path with trainer.resume_from_path=.../global_step_N resumes this run",
                 root, (long long)foreign);
    return 0;
}

void resume_free(struct resume *r) {
    free(r->dir);
    json_decref(r->trainer);
    json_decref(r->models);
    json_decref(r->changes);
    *r = (struct resume){.step = -1};
}

int resume_compare(const json_t *trainer, const char *field, const char *key, int64_t now, const char *where) {
    int64_t saved = 1;
    TRY(json_i64_opt(trainer, field, &saved, where));
    if (saved != now)
        log_warn("%s was made with %s=%lld, this run has %lld; its bits differ from an unbroken run's", where, key,
                 (long long)saved, (long long)now);
    return 0;
}

/* A GPU that is named but missing: the run uses another device, with a note. */
static const char *device_there(const char *device) {
    char why[512];
    if (device == NULL) return "auto";
    if (strcmp(device, "npu") == 0) {
        log_note("trainer.device=npu: there is no such backend; the device is chosen by what the machine has");
        return "auto";
    }
    if (strncmp(device, "cuda", 4) == 0 && !dev_cuda_present(why, sizeof why)) {
        log_note("trainer.device=%s: %s; the run is on the CPU", device, why);
        return "cpu";
    }
    return device;
}

int resume_open_device(struct dev *d, const struct resume *r, const char *device, int threads) {
    const char *isa = NULL;
    const char *name = device_there(device);
    if (r->trainer) TRY(json_str_opt(r->trainer, "isa", &isa, r->dir));
    const bool of_cpu = isa && strncmp(isa, "cuda", 4) != 0 && strcmp(isa, "ref") != 0 && getenv("VERLC_ISA") == NULL;
    int rc = dev_open_named(d, name, threads, of_cpu ? isa : NULL);
    if (rc == ERR_UNSUPPORTED && of_cpu) rc = dev_open_named(d, name, threads, NULL); /* this CPU lacks them */
    if (rc == 0 && isa && strcmp(isa, d->isa) != 0)
        log_warn("%s was made with the %s kernels, this run uses %s; its bits differ from an unbroken run's", r->dir, isa, d->isa);
    return rc;
}
