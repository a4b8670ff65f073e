/* coordinator.c - the controller's end of a group: who joins, heartbeats, calls.
 * A thread serves the control endpoint: it receives the heartbeats, detects silent ranks, and sends all ranks an abort when the
 * group has ended. The connections for calls belong to the caller's thread.
 * Invariant: once coordinator_fail has been called, or a rank is silent or lost, every call fails with the same message. */
#include "comm/comm_int.h"

#include "base/clock.h"
#include "base/err.h"
#include "base/json.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { SLICE_MS = 100, CONTROL_LINGER_MS = 1000, CONTROL_QUEUE = 4096, HEAD_BYTES = 1 << 26 };
#define LOST_S 0.25

struct member {
    json_t *join; /* its message; NULL: it has not joined */
    uint8_t id[COMM__ID];
    size_t n_id;
    int pid;
    char who[COMM__NAME + 64];
    struct comm__link calls;
    uint64_t call;
    bool pending;                     /* a call is under way */
    double deadline, seconds;         /* of that call, on clock_awake; from when it was made */
    bool shares;                      /* large arrays are shared memory */
    int shared_fd;                    /* those of the call that is under way; -1: none */
    struct comm__heartbeat heartbeat; /* the last one; under the coordinator's lock, like last_seen and last_call */
    uint64_t last_call;               /* the number of its last call */
    double last_seen;                 /* when its last heartbeat came, of clock_awake */
};
struct coordinator {
    struct coordinator_args a;
    int size, port;
    struct comm_where where;
    void *ctx, *control; /* control: the ROUTER that ranks join at and send heartbeats to */
    struct member *m;
    struct comm__alarm ended, cancel; /* the group has ended; a call has failed, and the ranks are to leave their operations */
    pthread_t thread;
    bool threaded;
    int stop;
    atomic_int stop_signal;   /* to send to the ranks; 0: none */
    atomic_int failed;        /* coordinator_failed_rank */
    struct comm__probe probe; /* whether a rank can open this process' memory */
    pthread_mutex_t lock;
};

static void close_shared(struct member *m) {
    if (m->shared_fd >= 0) close(m->shared_fd);
    m->shared_fd = -1;
}

const struct comm_where *coordinator_where(const struct coordinator *h) { return &h->where; }
const char *coordinator_who(const struct coordinator *h, int rank) { return h->m[rank].who; }
bool coordinator_same_host(const struct coordinator *h, int a, int b) {
    return json_equal(json_object_get(h->m[a].join, "machine"), json_object_get(h->m[b].join, "machine"));
}
int coordinator_pid(const struct coordinator *h, int rank) { return h->m[rank].pid; }

static void blame(struct coordinator *h, int rank) { (void)atomic_compare_exchange_strong(&h->failed, &(int){-1}, rank); }

int coordinator_failed_rank(const struct coordinator *h) { return atomic_load(&h->failed); }

void coordinator_fail(struct coordinator *h, int rank, const char *fmt, ...) {
    char why[sizeof h->ended.why];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(why, sizeof why, fmt, ap);
    va_end(ap);
    blame(h, rank);
    comm__alarm_ring(&h->ended, why);
}

void coordinator_state(struct coordinator *h, int rank, char *text, size_t n) {
    pthread_mutex_lock(&h->lock);
    const struct member *m = &h->m[rank];
    const double age = m->heartbeat.age + (m->last_seen > 0 ? clock_awake() - m->last_seen : 0);
    snprintf(text, n, "%s, in %s for %.0f s", m->who, m->heartbeat.progress.stage[0] ? m->heartbeat.progress.stage : "start", age);
    pthread_mutex_unlock(&h->lock);
}

void coordinator_progress(struct coordinator *h, int rank, struct coordinator_progress *p) {
    pthread_mutex_lock(&h->lock);
    *p = h->m[rank].heartbeat.progress;
    pthread_mutex_unlock(&h->lock);
}

void coordinator_ask_stop(struct coordinator *h, int sig) { (void)atomic_compare_exchange_strong(&h->stop_signal, &(int){0}, sig); }

/* ---- the control endpoint's thread ---- */

static void send_to(struct coordinator *h, int rank, const char *type, const char *why) {
    const struct member *m = &h->m[rank];
    if (m->join) (void)comm__send_json(h->control, m->id, m->n_id, json_pack("{s:s,s:s}", "type", type, "why", why));
}

static int find(const struct coordinator *h, const uint8_t *id, size_t n) {
    for (int r = 0; r < h->size; r++)
        if (h->m[r].join && h->m[r].n_id == n && memcmp(h->m[r].id, id, n) == 0) return r;
    return -1;
}

static void take_heartbeat(struct coordinator *h, int rank, const json_t *m) {
    struct comm__heartbeat p;
    if (comm__heartbeat_read(&p, m, h->m[rank].who) < 0) {
        coordinator_fail(h, rank, "%s", err_msg());
        return;
    }
    pthread_mutex_lock(&h->lock);
    struct member *const to = &h->m[rank];
    const double now = clock_awake();
    if (p.call >= (int64_t)to->last_call) to->heartbeat = p;
    else to->heartbeat.age += now - to->last_seen; /* sent before the call under way arrived: it only shows liveness */
    to->last_seen = now;
    pthread_mutex_unlock(&h->lock);
}

static void receive(struct coordinator *h) {
    uint8_t from[COMM__ID];
    size_t n;
    json_t *m;
    for (;;) {
        const int rc = comm__recv_json(h->control, from, &n, &m, "a rank");
        if (rc == 0) return;
        const int rank = find(h, from, n);
        if (rank >= 0 && rc > 0) take_heartbeat(h, rank, m);
        else if (rank >= 0) coordinator_fail(h, rank, "%s sent a message that is not a heartbeat: %s", h->m[rank].who, err_msg());
        else if (rc > 0)
            (void)comm__send_json(h->control, from, n, json_pack("{s:s,s:s}", "type", "refused", "why", "the group is complete"));
        json_decref(m);
    }
}

static void check_silence(struct coordinator *h) {
    const double now = clock_awake();
    for (int r = 0; r < h->size; r++) {
        pthread_mutex_lock(&h->lock);
        const double silent = now - h->m[r].last_seen;
        pthread_mutex_unlock(&h->lock);
        char state[256];
        coordinator_state(h, r, state, sizeof state);
        if (silent > COMM_SILENCE_S) coordinator_fail(h, r, "%s: no heartbeat for %.0f s", state, silent);
    }
}

/* Sends all ranks an abort with the reason: the group's end, or the error of a call. false: there is neither. */
static bool send_abort(struct coordinator *h) {
    const bool ended = comm__alarm_rung(&h->ended);
    if (!ended && !comm__alarm_rung(&h->cancel)) return false;
    (void)comm__alarm_error(ended ? &h->ended : &h->cancel);
    for (int r = 0; r < h->size; r++) send_to(h, r, "abort", err_msg());
    return true;
}

static bool send_stop(struct coordinator *h) {
    const int sig = atomic_load(&h->stop_signal);
    for (int r = 0; sig && r < h->size; r++)
        (void)comm__send_json(h->control, h->m[r].id, h->m[r].n_id, json_pack("{s:s,s:i}", "type", "stop", "signal", sig));
    return sig != 0;
}

static void *serve_control(void *arg) {
    struct coordinator *h = arg;
    bool aborted = false, stopped = false; /* the ranks have been sent an abort, a stop */
    for (;;) {
        zmq_pollitem_t items[] = {{h->control, 0, ZMQ_POLLIN, 0},
                                  {NULL, h->stop, ZMQ_POLLIN, 0},
                                  {NULL, h->ended.fd, ZMQ_POLLIN, 0},
                                  {NULL, h->cancel.fd, ZMQ_POLLIN, 0}};
        (void)zmq.poll(items, aborted ? 2 : 4, SLICE_MS);
        if (items[0].revents) receive(h);
        if (!aborted) check_silence(h);
        if (!stopped) stopped = send_stop(h);
        if (!aborted) aborted = send_abort(h);
        if (items[1].revents) return NULL;
    }
}

/* ---- joining ---- */

static int refuse(struct coordinator *h, const uint8_t *from, size_t n, int rc) {
    struct err_saved e;
    err_save(&e);
    (void)comm__send_json(h->control, from, n, json_pack("{s:s,s:s}", "type", "refused", "why", e.msg));
    err_restore(&e);
    return rc;
}

static int check_join(struct coordinator *h, const struct comm__join *j) {
    if (j->size != h->size)
        FAIL(ERR_RANK, "rank %d (host %s, pid %d) was started in a group of %d, and this one has %d", j->rank, j->host, j->pid,
             j->size, h->size);
    if (strcmp(j->build, comm__build()) != 0)
        FAIL(ERR_RANK,
             "rank %d (host %s, pid %d) runs another build of verlc (%s, %s; the controller's is %s, %s); install one on all hosts",
             j->rank, j->host, j->pid, j->version, j->build, VERLC_VERSION, comm__build());
    if (h->m[j->rank].join)
        FAIL(ERR_RANK, "two processes say that they are rank %d: %s, and pid %d on host %s", j->rank, h->m[j->rank].who, j->pid,
             j->host);
    return 0;
}

static int take_join(struct coordinator *h, const uint8_t *from, size_t n, json_t *m) {
    struct comm__join j;
    const char *type;
    int rc = json_str(m, "type", &type, "a rank that joins");
    if (rc >= 0 && strcmp(type, "join") != 0) return 0;
    if (rc >= 0) rc = comm__join_read(&j, m, "a rank that joins");
    if (rc >= 0) rc = check_join(h, &j);
    if (rc < 0) return refuse(h, from, n, rc);
    struct member *one = &h->m[j.rank];
    memcpy(one->id, from, n);
    one->n_id = n;
    one->pid = j.pid;
    one->join = json_incref(m);
    snprintf(one->who, sizeof one->who, "rank %d (host %s, pid %d)", j.rank, j.host, j.pid);
    return 0;
}

static int too_few(const struct coordinator *h) {
    struct buf b = {0};
    int missing = 0;
    for (int r = 0; r < h->size; r++)
        if (!h->m[r].join && missing++ < 16) buf_addf(&b, "%s%d", b.n ? ", " : "", r);
    err_set(ERR_TIMEOUT, __FILE__, __LINE__, "%d of %d ranks have not joined the controller at %s within %.0f s: rank %s%s",
            missing, h->size, h->where.address, h->a.start_s, b.p, missing > 16 ? ", ..." : "");
    buf_free(&b);
    return ERR_TIMEOUT;
}

static int wait_joins(struct coordinator *h, double deadline, int (*check)(void *), void *arg) {
    for (int joined = 0; joined < h->size;) {
        zmq_pollitem_t item = {h->control, 0, ZMQ_POLLIN, 0};
        uint8_t from[COMM__ID];
        size_t n;
        json_t *m = NULL;
        (void)zmq.poll(&item, 1, SLICE_MS);
        int rc = comm__recv_json(h->control, from, &n, &m, "a rank that joins");
        if (rc > 0) rc = take_join(h, from, n, m);
        json_decref(m);
        TRY(rc);
        if (check) TRY(check(arg));
        joined = 0;
        for (int r = 0; r < h->size; r++) joined += h->m[r].join != NULL;
        if (joined < h->size && clock_awake() >= deadline) return too_few(h);
    }
    return 0;
}

/* Sends a rank the list of the others, and where to connect to those below it. */
static int send_group(struct coordinator *h, int rank) {
    json_t *ranks = json_array();
    for (int r = 0; r < h->size; r++) {
        const json_t *j = h->m[r].join;
        const char *address = r < rank ? json_string_value(json_array_get(json_object_get(j, "mesh"), (size_t)rank)) : "";
        json_array_append_new(
            ranks, json_pack("{s:s,s:O,s:s}", "who", h->m[r].who, "machine", json_object_get(j, "machine"), "address", address));
    }
    json_t *probe = json_pack("{s:i,s:i,s:s}", "pid", (int)getpid(), "fd", h->probe.fd, "token", h->probe.token);
    TRY(comm__send_json(h->control, h->m[rank].id, h->m[rank].n_id,
                        json_pack("{s:s,s:o,s:o}", "type", "group", "ranks", ranks, "probe", probe)));
    return 0;
}

static int connect_calls(struct coordinator *h, int rank, double deadline) {
    struct member *m = &h->m[rank];
    char endpoint[COMM__ENDPOINT], own[COMM__NAME];
    const char *address = json_string_value(json_object_get(m->join, "calls"));
    const int rc = comm__reach(address, endpoint, own);
    TRY(rc);
    if (rc == 0) {
        usleep((useconds_t)(LOST_S * 1e6)); /* where its process has ended, who started it says so first */
        coordinator_fail(h, rank, "%s cannot be reached from the controller at %s", m->who, address);
        return comm__alarm_error(&h->ended);
    }
    m->calls.rank = rank;
    m->calls.pid = m->pid;
    snprintf(m->calls.who, sizeof m->calls.who, "%s", m->who);
    TRY(comm__link_connect(&m->calls, h->ctx, h->where.key, endpoint));
    m->pending = true; /* it replies when it is connected to the others */
    m->deadline = deadline;
    m->seconds = h->a.start_s;
    return 0;
}

static int complete(struct coordinator *h, double deadline) {
    struct coordinator_reply *replies = xcalloc((size_t)h->size, sizeof *replies);
    int rc = 0;
    for (int r = 0; rc >= 0 && r < h->size; r++) rc = send_group(h, r);
    for (int r = 0; rc >= 0 && r < h->size; r++) rc = connect_calls(h, r, deadline);
    for (int r = 0; r < h->size; r++) h->m[r].last_seen = clock_awake();
    if (rc >= 0) {
        const int e = pthread_create(&h->thread, NULL, serve_control, h);
        h->threaded = e == 0;
        if (e) rc = err_set(ERR_NOMEM, __FILE__, __LINE__, "no thread for the heartbeats: %s", strerror(e));
    }
    if (rc >= 0) rc = coordinator_collect(h, replies);
    for (int r = 0; r < h->size; r++) {
        const json_t *fd = json_object_get(replies[r].result, "probe");
        h->m[r].shares = json_is_integer(fd) && comm__probe_seen(&h->probe, h->m[r].pid, (int)json_integer_value(fd));
        coordinator_reply_free(&replies[r]);
    }
    free(replies);
    TRY(rc);
    return 0;
}

int coordinator_join(struct coordinator *h, int (*check)(void *arg), void *arg) {
    const double deadline = clock_awake() + h->a.start_s;
    int rc = wait_joins(h, deadline, check, arg);
    if (rc >= 0) rc = complete(h, deadline);
    if (rc < 0 && !h->threaded) {
        struct err_saved e;
        err_save(&e);
        for (int r = 0; r < h->size; r++) send_to(h, r, "refused", e.msg);
        err_restore(&e);
    }
    TRY(rc);
    return 0;
}

/* ---- opening and closing ---- */

static int bind_control(struct coordinator *h) {
    const char *listen = h->a.listen ? h->a.listen : "127.0.0.1:*";
    const char *colon = strrchr(listen, ':');
    const bool loopback = strncmp(listen, "127.", 4) == 0 || strncmp(listen, "localhost:", 10) == 0, any = strcmp(listen, "*") == 0;
    char endpoint[COMM__ENDPOINT];
    size_t n = sizeof endpoint;
    if (!any) TRY(comm__address_check(listen));
    snprintf(endpoint, sizeof endpoint, "tcp://%s:%.16s", loopback ? "127.0.0.1" : "*", any ? "*" : colon + 1);
    if (zmq.bind(h->control, endpoint) != 0)
        FAIL(ERR_IO, "the controller cannot listen at %s: %s", endpoint + 6, zmq.strerror(errno));
    if (zmq.getsockopt(h->control, ZMQ_LAST_ENDPOINT, endpoint, &n) != 0) return comm__zmq_fail("ZMQ_LAST_ENDPOINT");
    const int port = atoi(strrchr(endpoint, ':') + 1);
    if (any) comm__host_addresses(h->where.address, sizeof h->where.address, port, NULL);
    else snprintf(h->where.address, sizeof h->where.address, "%.*s:%d", (int)(colon - listen), listen, port);
    if (!h->where.address[0]) FAIL(ERR_IO, "this host has no IPv4 address but loopback: ranks on other hosts cannot reach it");
    return 0;
}

static int open_control(struct coordinator *h) {
    const int linger = CONTROL_LINGER_MS, queue = CONTROL_QUEUE;
    h->ctx = zmq.ctx_new();
    h->control = h->ctx ? zmq.socket(h->ctx, ZMQ_ROUTER) : NULL;
    if (!h->control) return comm__zmq_fail("a ZeroMQ socket");
    TRY(comm__set_options(h->control, h->where.key, true));
    zmq.setsockopt(h->control, ZMQ_LINGER, &linger, sizeof linger);
    zmq.setsockopt(h->control, ZMQ_RCVHWM, &queue, sizeof queue);
    TRY(bind_control(h));
    return 0;
}

int coordinator_open(struct coordinator **out, const struct coordinator_args *a) {
    struct coordinator *h = xcalloc(1, sizeof *h);
    int rc;
    *h = (struct coordinator){.a = *a, .size = a->size, .stop = -1, .ended.fd = -1, .cancel.fd = -1, .probe.fd = -1, .failed = -1};
    pthread_mutex_init(&h->lock, NULL);
    h->m = xcalloc((size_t)h->size, sizeof *h->m);
    for (int r = 0; r < h->size; r++) {
        h->m[r].heartbeat.waits_for = COMM__NOBODY;
        h->m[r].shared_fd = -1;
    }
    TRYG(comm__zmq_open(), fail);
    if (a->size < 1 || a->size > COMM_MOST_RANKS)
        FAILG(fail, ERR_INVAL, "a group has 1 to %d ranks, not %d", COMM_MOST_RANKS, a->size);
    if (a->key && strlen(a->key) != COMM_KEY - 1)
        FAILG(fail, ERR_INVAL, "the group's key is not one of %d characters", COMM_KEY - 1);
    if (a->key) strcpy(h->where.key, a->key);
    else TRYG(comm_key_new(h->where.key), fail);
    TRYG(comm__alarm_init(&h->ended), fail);
    TRYG(comm__alarm_init(&h->cancel), fail);
    h->stop = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (h->stop < 0) FAILG(fail, ERR_IO, "no eventfd: %s", strerror(errno));
    TRYG(comm__probe_new(&h->probe), fail);
    TRYG(open_control(h), fail);
    *out = h;
    return 0;
fail:
    coordinator_close(h, false);
    return rc;
}

/* On the control endpoint, for the heartbeats' thread; on the connection for calls, after those that are queued. */
static void end_ranks(struct coordinator *h) {
    for (int r = 0; r < h->size; r++) {
        struct member *m = &h->m[r];
        send_to(h, r, "end", "");
        struct comm__wait w = {.rank = COMM__CONTROLLER, .kind = COMM__CALL, .seq = ++m->call, .deadline = clock_awake() + 1};
        json_t *head = json_pack("{s:b}", "end", 1);
        if (m->calls.sock) (void)comm__send_message(&w, &m->calls, head, NULL, 0, -1);
        json_decref(head);
    }
}

void coordinator_close(struct coordinator *h, bool end) {
    if (!h) return;
    if (h->threaded) {
        (void)!write(h->stop, &(uint64_t){1}, sizeof(uint64_t));
        pthread_join(h->thread, NULL);
    }
    if (end) end_ranks(h);
    for (int r = 0; r < h->size; r++) {
        comm__link_close(&h->m[r].calls, end);
        json_decref(h->m[r].join);
        close_shared(&h->m[r]);
    }
    if (h->control) zmq.close(h->control);
    if (h->ctx) zmq.ctx_term(h->ctx);
    if (h->stop >= 0) close(h->stop);
    if (h->probe.fd >= 0) close(h->probe.fd);
    comm__alarm_destroy(&h->ended);
    comm__alarm_destroy(&h->cancel);
    pthread_mutex_destroy(&h->lock);
    free(h->m);
    free(h);
}

/* ---- calls ---- */

/* After an error the ranks get the reason. No reply is waited for: one that still comes is dropped. */
static void give_up(struct coordinator *h) {
    struct err_saved e;
    err_save(&e);
    comm__alarm_ring(&h->cancel, e.msg);
    for (int r = 0; r < h->size; r++) h->m[r].pending = false;
    err_restore(&e);
}

/* shared: the arrays, for ranks that can open them; -1: they were not copied. */
static int call(struct coordinator *h, int rank, const struct coordinator_call_args *a, int shared) {
    struct member *m = &h->m[rank];
    if (comm__alarm_rung(&h->ended)) return comm__alarm_error(&h->ended);
    CHECK(!m->pending);
    struct comm__wait w = {.rank = COMM__CONTROLLER,
                           .kind = COMM__CALL,
                           .seq = ++m->call,
                           .deadline = clock_awake() + h->a.deadline_s,
                           .alarm = &h->ended};
    close_shared(m); /* of a call that was given up */
    if (m->shares && shared >= 0) m->shared_fd = fcntl(shared, F_DUPFD_CLOEXEC, 0);
    json_t *head =
        json_pack("{s:s,s:o,s:b}", "call", a->name, "args", a->args ? json_deep_copy(a->args) : json_object(), "share", m->shares);
    const int rc = comm__send_message(&w, &m->calls, head, a->arrays, a->n_arrays, m->shared_fd);
    json_decref(head);
    TRY(rc);
    m->pending = true;
    m->deadline = clock_awake() + a->answer_s;
    m->seconds = a->answer_s;
    pthread_mutex_lock(&h->lock); /* until its next heartbeat */
    m->heartbeat.progress = (struct coordinator_progress){0};
    snprintf(m->heartbeat.progress.stage, sizeof m->heartbeat.progress.stage, "%s", a->name);
    m->heartbeat.age = m->last_seen - clock_awake();
    m->heartbeat.waits_for = COMM__NOBODY;
    m->last_call = m->call;
    pthread_mutex_unlock(&h->lock);
    return 0;
}

int coordinator_call_ranks(struct coordinator *h, int first, int ranks, const struct coordinator_call_args *a) {
    bool share = false;
    int shared = -1, rc = 0;
    CHECK(first >= 0 && ranks >= 0 && first <= h->size - ranks);
    for (int r = first; r < first + ranks; r++) share |= h->m[r].shares;
    if (share && comm__worth_sharing(a->arrays, a->n_arrays)) TRY(comm__share(a->arrays, a->n_arrays, &shared));
    for (int r = first; rc >= 0 && r < first + ranks; r++) rc = call(h, r, a, shared);
    if (shared >= 0) close(shared);
    if (rc < 0) give_up(h);
    TRY(rc);
    return 0;
}

int coordinator_call(struct coordinator *h, int rank, const struct coordinator_call_args *a) {
    TRY(coordinator_call_ranks(h, rank, 1, a));
    return 0;
}

void coordinator_reply_free(struct coordinator_reply *r) {
    comm__arrays_free(r->arrays, r->n_arrays, r->map);
    json_decref(r->result);
    *r = (struct coordinator_reply){0};
}

static int take_reply(struct coordinator *h, int rank, struct coordinator_reply *out) {
    struct member *m = &h->m[rank];
    struct comm__wait w = {
        .rank = COMM__CONTROLLER, .kind = COMM__REPLY, .seq = m->call, .deadline = m->deadline, .alarm = &h->ended};
    struct buf text = {.max = HEAD_BYTES};
    json_t *head = NULL;
    int64_t code = 0;
    const char *message = "";
    struct comm__arrays arrays = {0};
    int rc = comm__recv_message(&w, &m->calls, &text, &head, &arrays);
    buf_free(&text);
    out->arrays = arrays.p;
    out->n_arrays = arrays.n;
    out->map = arrays.map;
    m->pending = false;
    close_shared(m);
    if (rc >= 0) rc = json_i64_opt(head, "error", &code, m->who);
    if (rc >= 0) rc = json_str_opt(head, "message", &message, m->who);
    if (rc >= 0 && code < 0 && code != ERR_RANK) blame(h, rank); /* ERR_RANK names another rank */
    if (rc >= 0 && code < 0 && code >= ERR_INTERNAL)
        rc = code == ERR_RANK ? err_set(ERR_RANK, __FILE__, __LINE__, "%s", message) /* it names another rank */
                              : err_set((int)code, __FILE__, __LINE__, "%s: %s", m->who, message);
    if (rc >= 0) {
        out->result = json_incref(json_object_get(head, "result"));
        if (!json_is_object(out->result)) rc = err_set(ERR_FORMAT, __FILE__, __LINE__, "%s sent a reply without a result", m->who);
    }
    json_decref(head);
    TRY(rc);
    return 0;
}

/* Names the stragglers: ranks past their deadline, but for those that wait for another rank, unless all do. */
static int too_late(struct coordinator *h, double seconds) {
    const double now = clock_awake();
    struct buf b = {0};
    for (int pass = 0; pass < 3 && b.n == 0; pass++)
        for (int r = 0; r < h->size; r++) {
            char state[256];
            coordinator_state(h, r, state, sizeof state);
            pthread_mutex_lock(&h->lock);
            const bool waits = h->m[r].heartbeat.waits_for >= 0;
            pthread_mutex_unlock(&h->lock);
            if (!h->m[r].pending || (pass == 0 && now < h->m[r].deadline) || (pass < 2 && waits)) continue;
            blame(h, r);
            buf_addf(&b, "%s%s", b.n ? "; " : "", state);
        }
    err_set(ERR_TIMEOUT, __FILE__, __LINE__, "no answer within %.0f s from %s", seconds, b.p);
    buf_free(&b);
    return ERR_TIMEOUT;
}

/* Whether a connection was lost, or the deadline of a call is past. */
static int check_ranks(struct coordinator *h) {
    const double now = clock_awake();
    for (int r = 0; r < h->size; r++) {
        struct member *m = &h->m[r];
        char state[256];
        comm__link_events(&m->calls);
        if (m->calls.lost_at > 0 && now - m->calls.lost_at >= LOST_S) {
            coordinator_state(h, r, state, sizeof state);
            coordinator_fail(h, r, "%s: the connection to it was lost", state);
            return comm__alarm_error(&h->ended);
        }
        if (m->pending && now >= m->deadline) return too_late(h, m->seconds);
    }
    return 0;
}

/* Waits for a reply of a rank with a call under way. 1: *rank; 0: none came until then, or no call is under way. */
static int next_to_answer(struct coordinator *h, double until, int *rank, zmq_pollitem_t *items) {
    for (;;) {
        int n = 0;
        double next = until;
        for (int r = 0; r < h->size; r++) {
            if (!h->m[r].pending) continue;
            items[n++] = (zmq_pollitem_t){h->m[r].calls.sock, 0, ZMQ_POLLIN, 0};
            if (h->m[r].deadline < next) next = h->m[r].deadline;
        }
        if (n == 0) return 0;
        items[n] = (zmq_pollitem_t){NULL, h->ended.fd, ZMQ_POLLIN, 0};
        const int left = clock_poll_ms(next);
        (void)zmq.poll(items, n + 1, left < SLICE_MS ? left : SLICE_MS);
        if (comm__alarm_rung(&h->ended)) return comm__alarm_error(&h->ended);
        for (int r = 0, i = 0; r < h->size; r++) {
            if (!h->m[r].pending || !items[i++].revents) continue;
            *rank = r;
            return 1;
        }
        TRY(check_ranks(h));
        if (clock_awake() >= until) return 0;
    }
}

int coordinator_take(struct coordinator *h, double wait_s, int *rank, struct coordinator_reply *reply) {
    zmq_pollitem_t *items = xmalloc(((size_t)h->size + 1) * sizeof *items);
    *reply = (struct coordinator_reply){0};
    int rc = next_to_answer(h, clock_awake() + wait_s, rank, items);
    free(items);
    if (rc > 0) {
        const int taken = take_reply(h, *rank, reply);
        if (taken < 0) rc = taken;
    }
    if (rc < 0) {
        coordinator_reply_free(reply);
        give_up(h);
    }
    TRY(rc);
    return rc;
}

int coordinator_collect(struct coordinator *h, struct coordinator_reply *replies) {
    struct coordinator_reply one;
    int rank, rc;
    for (int r = 0; r < h->size; r++) replies[r] = (struct coordinator_reply){0};
    while ((rc = coordinator_take(h, INFINITY, &rank, &one)) > 0) replies[rank] = one;
    for (int r = 0; rc < 0 && r < h->size; r++) coordinator_reply_free(&replies[r]);
    TRY(rc);
    return 0;
}
