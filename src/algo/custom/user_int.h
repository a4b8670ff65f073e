/* user_int.h - a user-defined function between the files that name, compile, call and
 * check it. Private to algo. */
#ifndef VERLC_ALGO_CUSTOM_USER_INT_H
#define VERLC_ALGO_CUSTOM_USER_INT_H

#include "algo/algo_int.h"
#include "algo/custom/user.h"
#include "helper/helper.h"

#include <verlc_algo.h>

struct algo_user {
    char *spec;        /* FILE:NAME as given: the entry's name */
    char *key;         /* the configuration key that named it, for messages */
    char *path, *name; /* FILE; NAME */
    bool loss, python;
    double timeout_s;
    json_t *kwargs; /* NULL: none; for the check at load */
    struct algo_adv_entry adv;
    struct algo_policy_entry policy;
    struct algo_policy_cfg cfg; /* of the check at load */
    void *so;                   /* C */
    verlc_adv_fn *run_adv;
    verlc_loss_fn *run_loss;
    struct helper *helper; /* Python */
};

/* "FILE.c:NAME" or "FILE.py:NAME" in its parts, copies; ERR_INVAL. */
int algo__user_parse(const char *spec, char **path, char **name, bool *python);

/* C: compiles the file into dir, opens it, finds the function and its needs. */
int algo__user_open_c(struct algo_user *u, const char *dir);
void algo__user_close_c(struct algo_user *u);
/* The line of a compiler's output that says what is wrong; caller frees. */
char *algo__first_error(const char *output);

/* Python: starts the helper, which loads the file, and reads what the function needs. */
int algo__user_open_py(struct algo_user *u);
int algo__user_adv_py(struct algo_user *u, const struct verlc_adv *a, const json_t *kwargs, double *adv, double *ret);
int algo__user_loss_py(struct algo_user *u, const struct verlc_loss *a, const json_t *kwargs, double *loss, double *dlogp);
/* n doubles of a helper's reply: base64 of their little-endian bytes under `key`. ERR_FORMAT. */
int algo__unpack_f64(const json_t *reply, const char *key, int64_t n, double *out);

/* The compilation's header, as it was when verlc was built. */
extern const char algo__user_header[];
extern const char algo__user_header_end[];

#endif
