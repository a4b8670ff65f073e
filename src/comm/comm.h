/* comm.h - a group of ranks and their controller: bytes between hosts' memories, calls, and liveness.
 *
 * The controller (hub_*) is a process of its own without a rank. It opens a port, the ranks join it, and each rank is then
 * connected to each other one. Every connection is ZeroMQ over TCP with CURVE encryption; who has the group's key may join.
 * Everything on one host is on loopback. No device, no model: this module does not know what the bytes are.
 *
 *  - Operations of the ranks among each other (comm_barrier to comm_exchange). Every rank makes the same calls in the same
 *    order. Bytes move, nothing is added. One that is not everywhere the same is refused by name.
 *  - Calls of the controller: a name, JSON arguments and byte arrays go to a rank, a result comes back.
 *  - Heartbeats: each rank reports to the controller every second: its stage, its progress, and for how long. A rank that is
 *    silent for COMM_SILENCE_S is lost, on its side too: where the network is cut nobody acknowledges its bytes. A lost
 *    connection is detected at once. The controller sends a stop request back.
 *
 * Large arrays of calls and results are shared memory between the controller and the ranks of its host. All other
 * messages are cut into frames of at most COMM_FRAME bytes, and a connection holds at most COMM_QUEUE of them a side.
 * Invariant: no wait without a deadline (of clock_awake), and a rank that fails, dies or does not answer ends the waits of all
 * others with an error that names it. */
#ifndef VERLC_COMM_H
#define VERLC_COMM_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    COMM_PROTOCOL = 1,
    COMM_FRAME = 256 * 1024,
    COMM_QUEUE = 8,
    COMM_KEY = 41 /* Z85 and NUL */,
    COMM_JOB = 192 /* a job's name and NUL */,
    COMM_MOST_RANKS = 1024,
    COMM_STAGE = 96
};
#define COMM_SILENCE_S 6.0

struct comm;
struct coordinator;

/* Where a group's controller is. */
struct comm_where {
    char address[512];  /* HOST:PORT; several, separated by commas: one of them */
    char key[COMM_KEY]; /* the group's secret key */
};
int comm_key_new(char key[COMM_KEY]);
/* DIR/.rendezvous, readable by its owner alone, on a file system that all hosts share. job: a name of this start, shorter than
 * COMM_JOB, so that the file of another is not taken for this one's. read: 1: there it is; 0: not yet; ERR_FORMAT: malformed. */
int comm_rendezvous_write(const char *dir, const struct comm_where *w, const char *job);
int comm_rendezvous_read(const char *dir, struct comm_where *w, const char *job);
void comm_rendezvous_remove(const char *dir);

/* Bytes that go with a call or its result. */
struct comm_bytes {
    void *p;
    size_t n;
};

/* ---- a rank ---- */

struct comm_args {
    int rank, size;
    struct comm_where where; /* address "": read it in `dir`, polled until the controller is found */
    const char *dir, *job;
    double start_s;                           /* for the group to be complete */
    double deadline_s;                        /* of each operation */
    void (*lost)(void *arg, const char *why); /* on a thread of comm's, once: the controller is lost; may not return */
    void *lost_arg;
};
/* Joins, and returns when all ranks are connected. ERR_TIMEOUT, ERR_RANK: refused, with the controller's reason. */
int comm_open(struct comm **out, const struct comm_args *a);
/* Ranks first..first + n - 1 of c, of which this one is one, as a group: ranks count from 0 there, its operations are made by
 * them alone. c may be such a part. It lives no longer than all ranks' and serves no calls. Not collective. */
int comm_part(struct comm **out, struct comm *c, int first, int n);
void comm_close(struct comm *c); /* NULL ok; of a part too */
int comm_rank(const struct comm *c);
int comm_size(const struct comm *c);
const char *comm_who(const struct comm *c, int rank); /* "rank 2 (host b, pid 71)" */
bool comm_same_host(const struct comm *c, int rank);
int comm_local_rank(const struct comm *c);    /* among the ranks of its host, in their order */
int comm_local_size(const struct comm *c);    /* how many those are */
double comm_deadline_s(const struct comm *c); /* of an operation */
/* What this rank does, for the heartbeats: a change of it counts as progress. Any thread. A new stage has done 0 of 0. */
void comm_stage(struct comm *c, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void comm_progress(struct comm *c, int64_t done, int64_t total);
/* 0; else the signal of coordinator_ask_stop. Ranks get it at different times: those that stop together agree first. Any thread. */
int comm_stop_asked(const struct comm *c);

/* The operations. ERR_TIMEOUT; ERR_RANK: another rank failed, was lost or made a different call. After an error all further
 * ones fail with ERR_RANK; calls still work. No memory is held beyond the connections' queues. */
int comm_barrier(struct comm *c);
int comm_broadcast(struct comm *c, int root, void *p, size_t n);
/* all: root's, at[size] bytes, rank r's at at[r]..at[r + 1]; others pass NULL. mine: this rank's at[r + 1] - at[r] bytes. */
int comm_gather(struct comm *c, int root, const void *mine, void *all, const size_t *at);
/* all: rank r's part is on rank r before, and on all ranks after. */
int comm_all_gather(struct comm *c, void *all, const size_t *at);
/* out[r] goes to rank r's in[this rank]; 0 bytes: nothing is sent. out[self] is copied to in[self]. */
int comm_exchange(struct comm *c, const struct comm_bytes *out, const struct comm_bytes *in);

struct comm_call {
    const char *name;   /* borrowed from head */
    const json_t *args; /* an object, borrowed from head */
    struct comm_bytes *arrays;
    int n_arrays;
    struct comm_bytes map; /* where they lie together; n 0: each by itself */
    json_t *head;
};
void comm_call_free(struct comm_call *call);
/* Waits for the controller's next call. 1: a call, to be answered by comm_reply or comm_reply_error and freed; 0: the
 * controller has ended the group; ERR_RANK: it is lost. */
int comm_next_call(struct comm *c, struct comm_call *call);
int comm_reply(struct comm *c, const json_t *result, const struct comm_bytes *arrays, int n); /* result: borrowed; NULL: {} */
int comm_reply_error(struct comm *c, int code); /* with err_msg(); this rank makes no operation after it */

/* ---- the controller ---- */

struct coordinator_args {
    int size;
    const char *listen; /* "HOST:PORT" to be reached at; NULL: any port on loopback; "*": any port on all addresses of this host */
    const char *key;    /* NULL: a new one */
    double start_s;     /* for all ranks to join */
    double deadline_s;  /* to send a call to a rank that takes its bytes */
};
int coordinator_open(struct coordinator **out,
                     const struct coordinator_args *a); /* the port is open; the ranks are still to join */
const struct comm_where *coordinator_where(const struct coordinator *h);
/* Waits until all ranks have joined and are connected. check (may be NULL) is polled: < 0 ends the wait.
 * ERR_TIMEOUT names who is missing; ERR_RANK: a rank of another version, build or size, by name. */
int coordinator_join(struct coordinator *h, int (*check)(void *arg), void *arg);
/* end: ranks in comm_next_call get their 0 first. NULL ok. */
void coordinator_close(struct coordinator *h, bool end);
const char *coordinator_who(const struct coordinator *h, int rank);
bool coordinator_same_host(const struct coordinator *h, int a, int b);
int coordinator_pid(const struct coordinator *h, int rank);
/* "rank 2 (host b, pid 71), in STAGE for 3 s", as of its last heartbeat. */
void coordinator_state(struct coordinator *h, int rank, char *text, size_t n);
struct coordinator_progress {
    char stage[COMM_STAGE];
    int64_t done, total; /* of the stage, as comm_progress reported; 0 of 0: nothing */
};
void coordinator_progress(struct coordinator *h, int rank, struct coordinator_progress *p); /* as of its last heartbeat */
/* Requests a stop of all ranks, now or when they have joined (comm_stop_asked). sig > 0; the first one stays. Any thread, a
 * signal handler too. */
void coordinator_ask_stop(struct coordinator *h, int sig);
/* Any thread: ends the group, and with it every wait of every rank. rank: whose failure it is; -1: none's. */
void coordinator_fail(struct coordinator *h, int rank, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
int coordinator_failed_rank(
    const struct coordinator *h); /* the first of coordinator_fail, or whose own error ended the calls; -1: none */

struct coordinator_call_args {
    const char *name;
    const json_t *args; /* an object; NULL: {} */
    const struct comm_bytes *arrays;
    int n_arrays;
    double answer_s; /* deadline of its result, from now on */
};
/* Starts a call on a rank that has none under way; the arrays are sent when it returns. ERR_RANK, ERR_TIMEOUT; an error ends all
 * calls, as coordinator_take's. */
int coordinator_call(struct coordinator *h, int rank, const struct coordinator_call_args *a);
/* The same call on ranks first..first + ranks - 1: its arrays are copied once for all ranks of the controller's host. */
int coordinator_call_ranks(struct coordinator *h, int first, int ranks, const struct coordinator_call_args *a);
struct coordinator_reply {
    json_t *result; /* an object */
    struct comm_bytes *arrays;
    int n_arrays;
    struct comm_bytes map; /* where they lie together; n 0: each by itself */
};
void coordinator_reply_free(struct coordinator_reply *r);
/* Takes the result of a call that is under way, of whichever rank. 1: *rank and *reply; 0: none came within wait_s, or no call is
 * under way. The first error ends all calls: a rank's own keeps its code, with the rank's name in front, and the others leave
 * their operations. ERR_TIMEOUT names the stragglers, not the ranks that wait for them. */
int coordinator_take(struct coordinator *h, double wait_s, int *rank, struct coordinator_reply *reply);
/* The results of all calls that are under way; replies: one a rank, {0} for those not called. Errors as coordinator_take. */
int coordinator_collect(struct coordinator *h, struct coordinator_reply *replies);

#endif
