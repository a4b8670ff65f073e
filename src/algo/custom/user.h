/* user.h - a user-defined estimator or loss: a function of a C or Python file (docs/extending.md). */
#ifndef VERLC_ALGO_CUSTOM_USER_H
#define VERLC_ALGO_CUSTOM_USER_H

#include "algo/advantage.h"
#include "algo/policy_loss.h"

struct algo_user;
struct algo_user_args {
    const char *key;      /* what named it, for messages: "algorithm.adv_estimator" */
    const char *spec;     /* "./my_adv.c:name" or "./my_adv.py:name" */
    bool loss;            /* a policy loss, else an estimator */
    const char *dir;      /* a C file is compiled here; NULL: in a temporary directory */
    double timeout_s;     /* of one call of a Python function; 0: 60 */
    const json_t *kwargs; /* its parameters in the check at load, may be NULL; copied */
};
bool algo_user_named(const char *spec); /* has the form of a file, so is no name of the tables */
/* Compiles and opens, or starts the helper. ERR_INVAL: the name; ERR_INPUT: the file, with the compiler's or
 * Python's first word on it; ERR_TIMEOUT. */
int algo_user_open(struct algo_user **out, const struct algo_user_args *a);
/* Calls it on a small batch: ERR_NUMERIC where a number is not finite, ERR_INPUT where a loss has another derivative
 * than finite differences find. NULL: 0. */
int algo_user_check(struct algo_user *u);
void algo_user_close(struct algo_user *u); /* NULL ok */
const struct algo_adv_entry *algo_user_adv(const struct algo_user *u);
const struct algo_policy_entry *algo_user_policy(const struct algo_user *u);

#endif
