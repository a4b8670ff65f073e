/* algo_json.h - the functions of algo on JSON requests (DESIGN section 8: the golden tests read what `verlc algo` reads). */
#ifndef VERLC_CMD_ALGO_JSON_H
#define VERLC_CMD_ALGO_JSON_H

#include "algo/custom/user.h"

/* User-defined estimators and losses that a request may name by their spec; NULL: none. */
struct algo_json_user {
    const struct algo_user *adv, *loss;
};
/* `where` names the line in messages; user may be NULL. *answer is a new reference. ERR_INPUT, ERR_INVAL: the request. */
int algo_json(const json_t *request, const char *where, const struct algo_json_user *user, json_t **answer);

#endif
