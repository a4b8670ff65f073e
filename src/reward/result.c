/* result.c - the result of one sample: a score, or why there is none.
 *
 * Invariant: a failure has no score, and says why where its status does not. */
#include "reward/reward_int.h"

#include <stdlib.h>

static const char *const status_names[REWARD_N_STATUS] = {"score", "timeout", "crash", "unparsed", "missing"};
const char *reward_status_name(enum reward_status s) { return status_names[s]; }

void reward_result_free(struct reward_result *r) {
    json_decref(r->extra);
    free(r->message);
    *r = (struct reward_result){0};
}

struct reward_result reward__failure(enum reward_status status, char *message) {
    return (struct reward_result){.status = status, .extra = json_object(), .message = message};
}
