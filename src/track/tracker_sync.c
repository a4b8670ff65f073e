/* tracker_sync.c - what a run that is over has kept for its trackers: counted, and sent as the run itself would have.
 *
 * Invariant: a record is taken out of the queue only when the client has it, so a sync that ends at any point loses none. */
#include "track/tracker_client_int.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/log.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { TRIES = 3 }; /* without a record sent in between */

/* Traces name the run of the tracker, which is to be there by then. */
static const struct tracker *queue(int i) { return i < TRACK_N_CLIENTS ? &track_clients[i] : &track_traces; }

int track_pending(struct track_pending out[TRACK_N_QUEUES], const char *run_dir) {
    int n = 0;
    for (int i = 0; i < TRACK_N_QUEUES; i++) {
        const int known = client__pending(&out[n], queue(i)->name, run_dir);
        TRY(known);
        n += known;
    }
    return n;
}

/* All batches, then the end. */
static int send_all(struct client *c, const struct track_sync_args *a) {
    const int64_t total = c->n_unsent;
    struct client_batch *b = xmalloc(sizeof *b);
    int rc = 0;
    for (int tries = 0; tries < TRIES;) {
        const int64_t before = c->n_unsent;
        client__next_batch(c, b);
        const bool last = b->n == 0;
        rc = client__exchange(c, b, last ? a->how : NULL, a->ended);
        if (rc == 0 && last) break;
        const int reported = a->progress(a->arg, c->name, total - c->n_unsent, total);
        if (reported < 0) {
            rc = reported;
            break;
        }
        tries = rc == 0 || c->n_unsent < before ? 0 : tries + 1;
        if (rc == 0 || tries == TRIES) continue;
        log_info("tracker %s: %s; once more", c->name, err_msg());
        nanosleep(&(struct timespec){.tv_sec = 1 + tries}, NULL);
    }
    free(b);
    return rc;
}

int track_sync(const char *name, const struct track_sync_args *a) {
    int64_t n_kept, n_left;
    const char *known = NULL;
    for (int i = 0; i < TRACK_N_QUEUES; i++)
        if (strcmp(queue(i)->name, name) == 0) known = queue(i)->name;
    if (!known) FAIL(ERR_INVAL, "there is no tracker '%s' with a client", name);
    struct client *c = client__new(known, a->track->run_dir);
    int rc = client__take_up(c, INT64_MAX, &n_kept, &n_left);
    if (rc == 0) rc = client__start_helper(c, a->track);
    if (rc == 0) rc = send_all(c, a);
    if (rc == ERR_HELPER || rc == ERR_TIMEOUT || rc == ERR_SIGNAL)
        err_wrap(rc, "tracker %s %s; %lld records are still kept in %s", c->name, rc == ERR_SIGNAL ? "was left" : "fails",
                 (long long)c->n_unsent, c->path);
    client__free(c);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

int track_client_usable(const char *name) {
    const char *const package = strcmp(name, track_traces.name) == 0 ? track_clients[TRACK_MLFLOW].name : name;
    enum track_client_state state;
    char *python = NULL;
    TRY(track_client_check(&package, 1, &state, &python));
    int rc = 0;
    if (state == TRACK_MISSING)
        rc = err_set(ERR_HELPER, __FILE__, __LINE__,
                     "tracker %s: the Python package '%s' is missing; '%s -m pip install %s' (VERLC_PYTHON names another Python)",
                     name, package, python, package);
    if (state == TRACK_LOGGED_OUT)
        rc = err_set(ERR_HELPER, __FILE__, __LINE__, "tracker %s is not logged in: " TRACK_WANDB_LOGIN, name);
    free(python);
    return rc;
}
