/* bad_gradient.c - a gradient that is not finite (NaN, Inf): the step changes nothing, its batch is kept in bad_batches/,
 * and after trainer.max_bad_steps of them in a row the run ends. */
#include "run/run.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/log.h"

#include <stdlib.h>
#include <string.h>

/* What was not finite, for a message. */
static const char *bad_name(const struct optim_result *o, char text[128]) {
    if (!o->bad_tensor[0]) return "the gradient norm";
    if (strchr(o->bad_tensor, ' ')) return o->bad_tensor; /* the loss: not a tensor of the model */
    snprintf(text, 128, "the gradient of %s", o->bad_tensor);
    return text;
}

int run_bad_gradient(struct run *r, const struct optim_result *o, int (*dump)(void *arg, struct buf *out), void *arg) {
    if (r->bad && !r->bad->met) {
        r->bad->met = true;
        r->bad->what = *o;
        return dump(arg, &r->bad->dump);
    }
    char text[128], *dir = file_join(r->k.default_local_dir, "bad_batches"),
                    *path = xasprintf("%s/%lld.jsonl", dir, (long long)r->step);
    const char *const what = bad_name(o, text);
    struct buf out = {0};
    int rc = file_mkdirs(dir);
    if (rc == 0) rc = dump(arg, &out);
    if (rc == 0) rc = file_write_atomic(path, out.p ? out.p : "", out.n);
    if (rc < 0)
        log_warn("step %lld: %s is not finite; nothing was changed; its batch could not be saved: %s", (long long)r->step, what,
                 err_msg());
    else log_warn("step %lld: %s is not finite; nothing was changed; its batch is in %s", (long long)r->step, what, path);
    buf_free(&out);
    free(path);
    free(dir);
    if (!r->step_bad) r->bad_steps++;
    if (!r->step_bad) r->all_bad++;
    r->step_bad = true;
    if (r->bad_steps >= r->k.max_bad_steps)
        FAIL(ERR_NUMERIC,
             "step %lld: %s is not finite, %lld steps in a row (trainer.max_bad_steps); their batches are in bad_batches/; "
             "lower the learning rate, or look at the data",
             (long long)r->step, what, (long long)r->bad_steps);
    return 0;
}
