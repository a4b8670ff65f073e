/* resume.c - see resume.h. */
#include "train/resume.h"

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

int resume_open_device(struct dev *d, const struct resume *r, const char *device, int threads) {
    const char *isa = NULL;
    if (device && strcmp(device, "ref") == 0) return dev_open_ref(d);
    if (device && strcmp(device, "cpu") != 0)
        log_note("trainer.device=%s: this build runs on the CPU", device);
    if (r->trainer) TRY(json_str_opt(r->trainer, "isa", &isa, r->dir));
    if (isa && getenv("VERLC_ISA") == NULL) {
        if (dev_open_cpu(d, threads, isa) == 0) return 0;
        log_warn("%s was made with the %s kernels, which this CPU lacks; the run goes on with others and its bits differ "
                 "from an unbroken run's", r->dir, isa);
    }
    return dev_open_cpu(d, threads, NULL);
}
