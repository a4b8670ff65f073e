/* grade_code.c - programs by their tests, as verl's prime_code and sandbox_fusion score them: one helper process
 * (verlc_helpers/code_reward.py) that has many programs run at once, each in a sandbox, or sends them to a SandboxFusion service.
 *
 * Invariant: before the first program this machine has shown that it can make a sandbox. */
#include "reward/reward_int.h"

#include "base/err.h"
#include "helper/helper.h"
#include "sandbox/sandbox.h"

#include <unistd.h>

static int64_t n_cores(void) {
    const long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? n : 1;
}

int reward__code_check(const struct reward_args *a, const char *data_source) {
    if (a->code.service_url) return 0;
    const int rc = sandbox_check();
    return rc < 0 ? err_wrap(rc, "data_source '%s' is programs", data_source) : 0;
}

int reward__code_create(struct reward__calls **out, const struct reward_args *a) {
    enum { DEFAULT_MB = 1024, DEFAULT_CALLS = 64, TRIES = 2 };
    const struct reward_code_args *c = &a->code;
    const bool service = c->service_url != NULL;
    const int64_t requested = service ? c->service_max_concurrent : c->max_concurrent,
                  mb = service ? c->service_memory_limit_mb : c->memory_limit_mb;
    const int64_t parallel = requested > 0 ? requested : service ? DEFAULT_CALLS : n_cores();
    json_t *init = json_pack("{s:I, s:I, s:s?}", "parallel", (json_int_t)parallel, "memory_mb",
                             (json_int_t)(mb > 0 ? mb : DEFAULT_MB), "url", c->service_url);
    const struct helper_args h = {
        .module = "verlc_helpers.code_reward", .init = init, .python = a->python, .log_as = "code", .memory_bytes = -1};
    const struct helper_pool_args pool = {.n = 1, .n_calls = parallel, .n_tries = TRIES};
    const int rc = reward__calls_open(out, &h, &pool, a->timeout_s);
    json_decref(init);
    return rc;
}
