/* tracker_client_int.h - a tracker that has a client in Python, between the files that make it: its queue on disk
 * (tracker_spool.c), the requests to the helper (tracker_send.c), the tracker (tracker_client.c), and what is sent when the run
 * is over (tracker_sync.c). */
#ifndef VERLC_TRACK_TRACKER_CLIENT_INT_H
#define VERLC_TRACK_TRACKER_CLIENT_INT_H

#include "track/track_int.h"

#include "helper/helper.h"

#include <pthread.h>

enum { CLIENT_BATCH_BYTES = 1 << 20, CLIENT_BATCH_RECORDS = 256 };

struct client {
    const char *name;
    bool traces; /* samples as traces, and nothing else */
    char *run_dir, *path, *state_path;
    int fd;
    struct helper_pool *helper;
    pthread_t sender;
    bool started;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* under the lock */
    int64_t size;     /* of the file */
    int64_t at;       /* where the first unsent record begins; the sender's to change */
    int64_t n_unsent; /* records from there on */
    int64_t last_seq; /* of the record written last */
    int64_t n_dropped;
    bool answered; /* the client has opened its run */
    bool ending, finished;
    double end_by, give_up; /* end_by moves on by `more` while records are sent, up to give_up */
    double more;
    const char *how;
    /* the sender's */
    int64_t sent; /* number of the record sent last */
    json_t *run;  /* what the client calls its run; NULL: none yet */
    json_t *end;  /* how its run ended there; null: it is open, NULL: not reported by an older verlc */
    bool failing;
    double delay;
    int64_t most; /* records of a request: one after a failure, so that a record which ends the client is alone with it */
    int64_t n_refused;
};

/* --- tracker_spool.c --- */
/* A client without a thread: paths and locks, no file is open yet. name is static. */
struct client *client__new(const char *name, const char *run_dir);
void client__free(struct client *c); /* closes its file, ends its helper */
/* What an earlier run of the directory left, of steps up to resume_step (0: nothing; the run starts from scratch); opens the
 * file. */
int client__take_up(struct client *c, int64_t resume_step, int64_t *n_kept, int64_t *n_left);
/* Appends a record, which it takes over. droppable: not one of those that come last where there is no room. */
int client__spool(struct client *c, json_t *record, bool droppable);
void client__save_state(struct client *c);
/* Removes what is sent from the file's start: all of it, or once it is the greater part. */
int client__compact(struct client *c);
struct client_batch {
    json_t *records;
    int64_t n, end[CLIENT_BATCH_RECORDS], seq[CLIENT_BATCH_RECORDS]; /* of each: the file offset behind it, its number */
};
/* The next records, none where all is sent; b->records is the caller's. */
void client__next_batch(struct client *c, struct client_batch *b);
/* Counts what a directory has of a tracker that is not sent; 0: it knows no such tracker. */
int client__pending(struct track_pending *p, const char *name, const char *run_dir);

/* --- tracker_send.c --- */
int client__start_helper(struct client *c, const struct track_args *a);
/* One request with a batch, whose records it takes over, and what the answer says. how: the run's end, at the wall clock
 * `ended` (0: now); NULL: it goes on. ERR_HELPER: the client's own words. */
int client__exchange(struct client *c, const struct client_batch *b, const char *how, double ended);
void *client__send_loop(void *client);
/* Waits for the thread of the loop, and says so where it takes a while. */
void client__wait(struct client *c);

#endif
