/* ray_placement.c - a group's workers on the nodes of a Ray cluster: Ray's own client places them, in a helper process
 * (python/verlc_helpers/ray_launch.py), starts them and passes on what they print.
 * Invariant: they live as long as the helper process, and that as long as this one. */
#include "ranks/start_workers_int.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* For a cluster to place the ranks. */
#define PLACE_S 300.0

extern char **environ;

/* The interpreter of the `ray` on PATH; NULL: there is none. */
static char *python_of_ray(void) {
    const char *path = getenv("PATH");
    for (const char *s = path ? path : ""; *s;) {
        const size_t n = strcspn(s, ":");
        char *ray = xasprintf("%.*s/ray", (int)n, s), *python = xasprintf("%.*s/python3", (int)n, s);
        const bool found = n > 0 && access(ray, X_OK) == 0 && access(python, X_OK) == 0;
        free(ray);
        if (found) return python;
        free(python);
        s += n + (s[n] == ':');
    }
    return NULL;
}

/* What a worker needs of this process' environment, in addition to what Ray gives it. */
static json_t *worker_env(const struct coordinator *h) {
    static const char *const taken[] = {"VERLC_", "VERL_", "NCCL_"};
    static const char *const own[] = {CTL__VARIABLES, "VERLC_RAY_PYTHON"};
    json_t *env = json_object();
    for (char **e = environ; *e; e++) {
        const size_t n = strcspn(*e, "=");
        char *name = xstrndup(*e, n);
        bool take = false;
        for (size_t i = 0; i < sizeof taken / sizeof *taken; i++) take |= strncmp(name, taken[i], strlen(taken[i])) == 0;
        for (size_t i = 0; i < sizeof own / sizeof *own; i++) take &= strcmp(name, own[i]) != 0;
        if (take && (*e)[n]) json_object_set_new(env, name, json_string(*e + n + 1));
        free(name);
    }
    json_object_set_new(env, "VERLC_COLOR", json_string("never")); /* as worker_env of start_workers.c */
    json_object_set_new(env, WORKERS__CONTROLLER, json_string(coordinator_where(h)->address));
    json_object_set_new(env, WORKERS__KEY, json_string(coordinator_where(h)->key));
    return env;
}

int ray_placement__start(struct helper **out, const struct coordinator *h, const struct workers_args *a, char *const *argv) {
    const char *python = getenv("VERLC_RAY_PYTHON");
    char *found = python && *python ? NULL : python_of_ray();
    const struct helper_args args = {.module = "verlc_helpers.ray_launch",
                                     .python = python && *python ? python : found,
                                     .log_as = "ray",
                                     .memory_bytes = -1,
                                     .start_timeout_s = 120};
    json_t *list = json_array(), *reply = NULL, *request = NULL;
    int rc = helper_create(out, &args);
    free(found);
    for (; *argv; argv++) json_array_append_new(list, json_string(*argv));
    request = json_pack("{s:i, s:i, s:i, s:o, s:o, s:f}", "ranks", a->ranks, "nodes", a->ray_nodes, "gpus", a->ray_gpus ? 1 : 0,
                        "argv", list, "env", worker_env(h), "wait_s", PLACE_S);
    if (rc >= 0) rc = helper_call(*out, request, PLACE_S + 60, &reply);
    json_decref(request);
    json_decref(reply);
    TRY(rc);
    return 0;
}
