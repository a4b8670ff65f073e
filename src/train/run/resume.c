/* resume.c - see resume.h. */
#include "train/run/resume.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "base/log.h"
#include "ckpt/ckpt.h"

#include <stdlib.h>
#include <string.h>

int resume_find(struct resume *r, const struct resume_args *a) {
    *r = (struct resume){.step = -1};
    if (strcmp(a->mode, "disable") == 0) return 0;
    if (strcmp(a->mode, "auto") == 0) {
        TRY(ckpt_find(a->root, &r->step, &r->dir));
    } else if (strcmp(a->mode, "resume_path") == 0) {
        if (!a->path) FAIL(ERR_INVAL, "trainer.resume_mode=resume_path needs trainer.resume_from_path=.../global_step_N");
        TRY(ckpt_step_of(a->path, &r->step));
        TRY(ckpt_verify(a->path));
        r->dir = xstrdup(a->path);
    } else {
        FAIL(ERR_INVAL, "trainer.resume_mode=%s: expected auto, disable or resume_path", a->mode);
    }
    return r->dir ? ckpt_read_trainer(r->dir, &r->trainer) : 0;
}

void resume_free(struct resume *r) {
    free(r->dir);
    json_decref(r->trainer);
    *r = (struct resume){.step = -1};
}

/* A GPU that is named but not there: the run goes on elsewhere and says so. */
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
