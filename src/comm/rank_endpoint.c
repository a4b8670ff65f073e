/* rank_endpoint.c - a rank: how it joins, its heartbeats, its operations with the other ranks, the calls that it serves.
 * A thread of its own has the connection to the controller's control endpoint: it sends a heartbeat every second, and receives
 * the abort when the group has ended. All other connections belong to the caller's thread.
 * A part of the ranks (comm_part) is another struct comm over the same connections. Only its operations' numbers are its own.
 * Invariant: after an operation has failed no further one moves a byte, since the connections' streams are out of step. */
#include "comm/comm_int.h"

#include "base/clock.h"
#include "base/err.h"
#include "base/json.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { SLICE_MS = 100, HEAD_BYTES = 1 << 26 };

struct comm {
    struct comm *whole; /* the group that this is a part of; itself */
    struct comm_args a; /* from here on what a part does not have, but as views: mesh, machine */
    int rank, size;     /* in this part */
    void *ctx;
    struct comm__link control, calls, *mesh; /* mesh[rank] is not used */
    char (*machine)[COMM__MACHINE];          /* of each rank */
    uint64_t seq, call;                      /* operations and calls so far, including the call that is waited for */
    uint64_t taken;                          /* the last call that arrived; under the lock, like reported */
    int shared_fd;                           /* shared memory of the last reply, or of the probe; -1: none */
    bool shares;                             /* large arrays of replies go to shared memory */
    bool broken;
    struct comm__alarm cancel, lost; /* the group has ended; the controller is lost */
    pthread_t thread;
    bool threaded;
    atomic_bool ending;     /* the controller has announced the group's end */
    atomic_int stop_signal; /* of a stop that was requested; 0: none */
    int stop;               /* an eventfd */
    pthread_mutex_t lock;   /* of what the heartbeats report */
    struct coordinator_progress reported;
    double progress; /* time of the last one, of clock_awake */
    int waits_for;
};

/* ---- heartbeats ---- */

static void waiting(void *arg, int rank) {
    struct comm *c = arg;
    pthread_mutex_lock(&c->lock);
    c->waits_for = rank;
    if (rank == COMM__NOBODY) c->progress = clock_awake();
    pthread_mutex_unlock(&c->lock);
}

void comm_stage(struct comm *part, const char *fmt, ...) {
    struct comm *const c = part->whole;
    va_list ap;
    va_start(ap, fmt);
    pthread_mutex_lock(&c->lock);
    c->reported = (struct coordinator_progress){0};
    vsnprintf(c->reported.stage, sizeof c->reported.stage, fmt, ap);
    c->progress = clock_awake();
    pthread_mutex_unlock(&c->lock);
    va_end(ap);
}

void comm_progress(struct comm *part, int64_t done, int64_t total) {
    struct comm *const c = part->whole;
    pthread_mutex_lock(&c->lock);
    c->reported.done = done;
    c->reported.total = total;
    c->progress = clock_awake();
    pthread_mutex_unlock(&c->lock);
}

int comm_stop_asked(const struct comm *c) { return atomic_load(&c->whole->stop_signal); }

static json_t *heartbeat(struct comm *c) {
    pthread_mutex_lock(&c->lock);
    json_t *m = json_pack("{s:s,s:s,s:I,s:I,s:f,s:i,s:I}", "type", "heartbeat", "stage", c->reported.stage, "done",
                          (json_int_t)c->reported.done, "total", (json_int_t)c->reported.total, "age", clock_awake() - c->progress,
                          "waits_for", c->waits_for, "call", (json_int_t)c->taken);
    pthread_mutex_unlock(&c->lock);
    return m;
}

/* The file's group is complete or has ended. A controller that was killed leaves the file behind. */
static void remove_rendezvous(const struct comm *c) {
    struct comm_where now = {0};
    struct err_saved e;
    if (!c->a.dir || !c->a.where.key[0]) return;
    err_save(&e);
    if (comm_rendezvous_read(c->a.dir, &now, c->a.job) > 0 && strcmp(now.key, c->a.where.key) == 0)
        comm_rendezvous_remove(c->a.dir);
    err_restore(&e);
}

static void controller_lost(struct comm *c, const char *why) {
    if (atomic_load(&c->ending)) return;
    if (!comm__alarm_ring(&c->cancel, why)) { /* it has sent the reason before */
        (void)comm__alarm_error(&c->cancel);
        why = err_msg();
    }
    remove_rendezvous(c);
    if (comm__alarm_ring(&c->lost, why) && c->a.lost) c->a.lost(c->a.lost_arg, why);
}

/* The controller's messages to a rank that has joined. */
static void receive(struct comm *c) {
    json_t *m;
    int rc;
    while ((rc = comm__recv_json(c->control.sock, NULL, NULL, &m, "the controller")) > 0) {
        const char *type = json_string_value(json_object_get(m, "type")), *why = json_string_value(json_object_get(m, "why"));
        if (type && strcmp(type, "abort") == 0 && why) comm__alarm_ring(&c->cancel, why);
        if (type && strcmp(type, "end") == 0) atomic_store(&c->ending, true);
        if (type && strcmp(type, "stop") == 0) atomic_store(&c->stop_signal, (int)json_integer_value(json_object_get(m, "signal")));
        json_decref(m);
    }
    if (rc < 0) controller_lost(c, err_msg());
}

static void *heartbeats(void *arg) {
    struct comm *c = arg;
    double next = 0;
    for (;;) {
        const double now = clock_awake();
        if (now >= next) {
            (void)comm__send_json(c->control.sock, NULL, 0, heartbeat(c)); /* it fails where a stopped controller's queue is full */
            next = now + 1;
        }
        zmq_pollitem_t items[] = {
            {c->control.sock, 0, ZMQ_POLLIN, 0}, {c->control.events, 0, ZMQ_POLLIN, 0}, {NULL, c->stop, ZMQ_POLLIN, 0}};
        (void)zmq.poll(items, 3, clock_poll_ms(next));
        if (items[2].revents) return NULL;
        if (items[0].revents) receive(c);
        comm__link_events(&c->control);
        if (c->control.lost_at > 0) {
            controller_lost(c, "the connection to the controller was lost");
            return NULL;
        }
    }
}

/* ---- joining ---- */

static int listen_all(struct comm *c, const char *own, json_t *mesh, char *calls) {
    const bool loopback = strncmp(own, "127.", 4) == 0;
    const char *const address = loopback ? "127.0.0.1" : "*";
    char text[COMM__ADDRESSES];
    int port;
    for (int r = 0; r <= c->size; r++) {
        struct comm__link *l = r < c->size ? &c->mesh[r] : &c->calls;
        text[0] = '\0';
        if (r > c->rank) {
            TRY(comm__link_listen(l, c->ctx, c->a.where.key, address, &port));
            if (loopback) snprintf(text, sizeof text, "127.0.0.1:%d", port);
            else comm__host_addresses(text, sizeof text, port, own);
        }
        if (r < c->size) json_array_append_new(mesh, json_string(text));
        else strcpy(calls, text);
    }
    return 0;
}

static int send_join(struct comm *c, const char *own) {
    char host[COMM__NAME] = "?", machine[COMM__MACHINE], calls[COMM__ADDRESSES];
    json_t *mesh = json_array();
    gethostname(host, sizeof host - 1);
    comm__machine(machine, sizeof machine);
    const int rc = listen_all(c, own, mesh, calls);
    json_t *m = json_pack("{s:s,s:i,s:s,s:s,s:i,s:i,s:s,s:s,s:i,s:s,s:o}", "type", "join", "protocol", COMM_PROTOCOL, "version",
                          VERLC_VERSION, "build", comm__build(), "rank", c->rank, "size", c->size, "host", host, "machine", machine,
                          "pid", (int)getpid(), "calls", calls, "mesh", mesh);
    if (rc < 0) json_decref(m);
    TRY(rc);
    TRY(comm__send_json(c->control.sock, NULL, 0, m));
    return 0;
}

static void close_links(struct comm *c, bool linger) {
    comm__link_close(&c->control, linger);
    comm__link_close(&c->calls, linger);
    for (int r = 0; r < c->size; r++) comm__link_close(&c->mesh[r], linger);
    c->control = c->calls = (struct comm__link){.rank = COMM__CONTROLLER, .who = "the controller"};
}

/* Its answer to the join. 1: *m; 0: there is no controller with this key. */
static int wait_answer(struct comm *c, double deadline, json_t **m) {
    for (;;) {
        zmq_pollitem_t items[] = {{c->control.sock, 0, ZMQ_POLLIN, 0}, {c->control.events, 0, ZMQ_POLLIN, 0}};
        const int left = clock_poll_ms(deadline);
        (void)zmq.poll(items, 2, left < SLICE_MS ? left : SLICE_MS);
        const int rc = comm__recv_json(c->control.sock, NULL, NULL, m, "the controller");
        if (rc != 0) return rc;
        comm__link_events(&c->control);
        if (c->control.refused) return 0;
        if (c->control.lost_at > 0) FAIL(ERR_RANK, "the controller at %s ended before all ranks had joined", c->a.where.address);
        if (clock_awake() >= deadline) FAIL(ERR_TIMEOUT, "not all ranks had joined the controller before the deadline");
    }
}

/* Finds the controller and sends it the join. 1: *m, its answer; 0: not yet. */
static int try_join(struct comm *c, double deadline, json_t **m) {
    struct comm_where *w = &c->a.where;
    char endpoint[COMM__ENDPOINT], own[COMM__NAME];
    int rc = 1;
    if (c->a.dir) rc = comm_rendezvous_read(c->a.dir, w, c->a.job);
    if (rc > 0) rc = comm__reach(w->address, endpoint, own);
    TRY(rc);
    if (rc == 0) return 0;
    close_links(c, false);
    TRY(comm__link_connect(&c->control, c->ctx, w->key, endpoint));
    TRY(send_join(c, own));
    rc = wait_answer(c, deadline, m);
    TRY(rc);
    if (rc == 0 && !c->a.dir && c->control.refused)
        FAIL(ERR_RANK, "rank %d: the controller at %s does not take this rank's key", c->rank, w->address);
    return rc;
}

static int find_controller(struct comm *c, double deadline, json_t **m) {
    for (;;) {
        const int rc = try_join(c, deadline, m);
        TRY(rc);
        if (rc > 0) return 0;
        if (clock_awake() >= deadline) break;
        usleep(SLICE_MS * 1000);
    }
    if (c->a.dir && !c->a.where.address[0])
        FAIL(ERR_TIMEOUT, "rank %d: no controller has written %s/.rendezvous; is that directory the same on all hosts?", c->rank,
             c->a.dir);
    FAIL(ERR_TIMEOUT, "rank %d: no controller answers at %s", c->rank, c->a.where.address);
}

static int check_answer(struct comm *c, const json_t *m, const char *type) {
    const char *theirs, *why;
    TRY(json_str(m, "type", &theirs, "the controller"));
    if (strcmp(theirs, "refused") == 0) {
        TRY(json_str(m, "why", &why, "the controller"));
        FAIL(ERR_RANK, "the controller refused rank %d: %s", c->rank, why);
    }
    if (strcmp(theirs, type) != 0) FAIL(ERR_FORMAT, "the controller sent '%.40s', and '%s' is next", theirs, type);
    return 0;
}

static int connect_mesh(struct comm *c, const json_t *m) {
    char endpoint[COMM__ENDPOINT], own[COMM__NAME];
    for (int r = 0; r < c->size; r++) {
        const json_t *peer = json_array_get(json_object_get(m, "ranks"), (size_t)r);
        const char *who, *machine, *address;
        struct comm__link *l = &c->mesh[r];
        TRY(json_str(peer, "who", &who, "the controller"));
        TRY(json_str(peer, "machine", &machine, "the controller"));
        TRY(json_str(peer, "address", &address, "the controller"));
        snprintf(c->machine[r], COMM__MACHINE, "%s", machine);
        snprintf(l->who, sizeof l->who, "%s", who);
        l->rank = r;
        if (r >= c->rank) continue;
        const int rc = comm__reach(address, endpoint, own);
        TRY(rc);
        if (rc == 0) FAIL(ERR_RANK, "%s cannot be reached from rank %d at %s", who, c->rank, address);
        TRY(comm__link_connect(l, c->ctx, c->a.where.key, endpoint));
    }
    return 0;
}

/* Whether this process can open the controller's memory: then a copy of its probe, for its side; *fd -1: it cannot. */
static int answer_probe(struct comm *c, const json_t *m, int *fd) {
    const json_t *probe = json_object_get(m, "probe");
    const char *token;
    int64_t pid, theirs;
    TRY(json_str(probe, "token", &token, "the controller"));
    TRY(json_i64(probe, "pid", &pid, "the controller"));
    TRY(json_i64(probe, "fd", &theirs, "the controller"));
    struct comm__probe p = {.fd = -1};
    snprintf(p.token, sizeof p.token, "%s", token);
    c->calls.pid = (int)pid;
    if (comm__probe_seen(&p, (int)pid, (int)theirs)) TRY(comm__probe_copy(&p));
    *fd = p.fd;
    return 0;
}

static int join(struct comm *c) {
    const double deadline = clock_awake() + c->a.start_s;
    json_t *m = NULL, *seen = NULL;
    int rc;
    TRYG(find_controller(c, deadline, &m), out);
    TRYG(check_answer(c, m, "group"), out);
    TRYG(connect_mesh(c, m), out);
    TRYG(answer_probe(c, m, &c->shared_fd), out);
    rc = pthread_create(&c->thread, NULL, heartbeats, c);
    if (rc != 0) FAILG(out, ERR_NOMEM, "no thread for the heartbeats: %s", strerror(rc));
    c->threaded = true;
    rc = comm_barrier(c);
    seen = json_pack("{s:i}", "probe", c->shared_fd);
    if (rc >= 0) rc = comm_reply(c, seen, NULL, 0); /* coordinator_join waits for it */
    else (void)comm_reply_error(c, rc);
out:
    json_decref(m);
    json_decref(seen);
    return rc;
}

int comm_open(struct comm **out, const struct comm_args *a) {
    TRY(comm__zmq_open());
    struct comm *c = xcalloc(1, sizeof *c);
    *c = (struct comm){.whole = c,
                       .a = *a,
                       .rank = a->rank,
                       .size = a->size,
                       .waits_for = COMM__NOBODY,
                       .stop = -1,
                       .shared_fd = -1,
                       .cancel.fd = -1,
                       .lost.fd = -1,
                       .reported.stage = "start",
                       .progress = clock_awake()};
    int rc;
    pthread_mutex_init(&c->lock, NULL);
    c->mesh = xcalloc((size_t)c->size, sizeof *c->mesh);
    c->machine = xcalloc((size_t)c->size, sizeof *c->machine);
    TRYG(comm__alarm_init(&c->cancel), fail);
    TRYG(comm__alarm_init(&c->lost), fail);
    c->stop = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    c->ctx = zmq.ctx_new();
    if (c->stop < 0 || !c->ctx) FAILG(fail, ERR_IO, "no ZeroMQ context: %s", strerror(errno));
    TRYG(join(c), fail);
    remove_rendezvous(c);
    *out = c;
    return 0;
fail:
    c->broken = true;
    remove_rendezvous(c);
    comm_close(c);
    return rc;
}

int comm_part(struct comm **out, struct comm *c, int first, int n) {
    if (first < 0 || n < 1 || first > c->size - n || c->rank < first || c->rank >= first + n)
        FAIL(ERR_INTERNAL, "rank %d is in no part of ranks %d to %d", c->rank, first, first + n - 1);
    const int of_all = c->whole->rank - c->rank + first;
    struct comm *part = *out = xcalloc(1, sizeof *part);
    *part = (struct comm){.whole = c->whole,
                          .rank = c->rank - first,
                          .size = n,
                          .mesh = c->mesh + first,
                          .machine = c->machine + first,
                          .seq = ((uint64_t)n << 52) + ((uint64_t)(of_all + 1) << 40)}; /* an operation of another part is seen */
    return 0;
}

void comm_close(struct comm *c) {
    if (!c) return;
    if (c->whole != c) {
        free(c);
        return;
    }
    atomic_store(&c->ending, true);
    if (c->threaded) {
        (void)!write(c->stop, &(uint64_t){1}, sizeof(uint64_t));
        pthread_join(c->thread, NULL);
    }
    close_links(c, !c->broken);
    if (c->ctx) zmq.ctx_term(c->ctx);
    if (c->stop >= 0) close(c->stop);
    if (c->shared_fd >= 0) close(c->shared_fd);
    comm__alarm_destroy(&c->cancel);
    comm__alarm_destroy(&c->lost);
    pthread_mutex_destroy(&c->lock);
    free(c->mesh);
    free(c->machine);
    free(c);
}

int comm_rank(const struct comm *c) { return c->rank; }
int comm_size(const struct comm *c) { return c->size; }
const char *comm_who(const struct comm *c, int rank) { return c->mesh[rank].who; }
bool comm_same_host(const struct comm *c, int rank) { return strcmp(c->machine[rank], c->machine[c->rank]) == 0; }

int comm_local_rank(const struct comm *c) {
    int n = 0;
    for (int r = 0; r < c->rank; r++) n += comm_same_host(c, r);
    return n;
}

double comm_deadline_s(const struct comm *c) { return c->whole->a.deadline_s; }

int comm_local_size(const struct comm *c) {
    int n = 0;
    for (int r = 0; r < c->size; r++) n += comm_same_host(c, r);
    return n;
}

/* ---- operations ---- */

/* moves: one for each other rank that takes part. */
static int operate(struct comm *part, enum comm__kind kind, struct comm__move *moves, int n) {
    struct comm *const c = part->whole;
    part->seq++;
    if (c->broken || comm__alarm_rung(&c->cancel)) {
        c->broken = true;
        if (comm__alarm_rung(&c->cancel)) return comm__alarm_error(&c->cancel);
        FAIL(ERR_RANK, "%s %llu: an operation of the group has failed before", comm__kind_name(kind),
             (unsigned long long)part->seq);
    }
    const struct comm__wait w = {.rank = c->rank,
                                 .kind = kind,
                                 .seq = part->seq,
                                 .deadline = clock_awake() + c->a.deadline_s,
                                 .alarm = &c->cancel,
                                 .waiting = waiting,
                                 .arg = c};
    const int rc = comm__run(&w, moves, n);
    c->broken = rc < 0;
    TRY(rc);
    return 0;
}

static struct comm__move *moves_new(const struct comm *c) { return xcalloc((size_t)c->size, sizeof(struct comm__move)); }

static int operate_all(struct comm *c, enum comm__kind kind, struct comm__move *all) {
    int n = 0;
    for (int r = 0; r < c->size; r++) {
        if (r == c->rank || !(all[r].sends || all[r].receives)) continue;
        all[r].link = &c->mesh[r];
        all[n++] = all[r];
    }
    const int rc = operate(c, kind, all, n);
    free(all);
    TRY(rc);
    return 0;
}

int comm_barrier(struct comm *c) {
    struct comm__move *m = moves_new(c);
    for (int r = 0; r < c->size; r++) m[r].sends = m[r].receives = true;
    return operate_all(c, COMM__BARRIER, m);
}

int comm_broadcast(struct comm *c, int root, void *p, size_t n) {
    struct comm__move *m = moves_new(c);
    for (int r = 0; r < c->size; r++) {
        if (c->rank == root) m[r] = (struct comm__move){.sends = true, .out = p, .n_out = n};
        else if (r == root) m[r] = (struct comm__move){.receives = true, .in = p, .n_in = n};
    }
    return operate_all(c, COMM__BROADCAST, m);
}

int comm_gather(struct comm *c, int root, const void *mine, void *all, const size_t *at) {
    struct comm__move *m = moves_new(c);
    uint8_t *const in = all;
    const size_t own = at[c->rank + 1] - at[c->rank];
    for (int r = 0; r < c->size; r++) {
        if (c->rank == root) m[r] = (struct comm__move){.receives = true, .in = in + at[r], .n_in = at[r + 1] - at[r]};
        else if (r == root) m[r] = (struct comm__move){.sends = true, .out = mine, .n_out = own};
    }
    if (c->rank == root && own) memmove(in + at[root], mine, own);
    return operate_all(c, COMM__GATHER, m);
}

int comm_all_gather(struct comm *c, void *all, const size_t *at) {
    struct comm__move *m = moves_new(c);
    uint8_t *const p = all;
    for (int r = 0; r < c->size; r++)
        m[r] = (struct comm__move){.sends = true,
                                   .out = p + at[c->rank],
                                   .n_out = at[c->rank + 1] - at[c->rank],
                                   .receives = true,
                                   .in = p + at[r],
                                   .n_in = at[r + 1] - at[r]};
    return operate_all(c, COMM__ALL_GATHER, m);
}

int comm_exchange(struct comm *c, const struct comm_bytes *out, const struct comm_bytes *in) {
    CHECK(out[c->rank].n == in[c->rank].n);
    struct comm__move *m = moves_new(c);
    for (int r = 0; r < c->size; r++)
        m[r] = (struct comm__move){
            .sends = out[r].n > 0, .out = out[r].p, .n_out = out[r].n, .receives = in[r].n > 0, .in = in[r].p, .n_in = in[r].n};
    if (in[c->rank].n) memcpy(in[c->rank].p, out[c->rank].p, in[c->rank].n);
    return operate_all(c, COMM__EXCHANGE, m);
}

/* ---- calls ---- */

static struct comm__wait call_wait(struct comm *c, enum comm__kind kind) {
    return (struct comm__wait){.rank = c->rank,
                               .kind = kind,
                               .seq = c->call,
                               .deadline = INFINITY,
                               .alarm = &c->lost,
                               .waiting = waiting,
                               .arg = c}; /* the deadline is the controller's: `lost` rings without one */
}

void comm_call_free(struct comm_call *call) {
    comm__arrays_free(call->arrays, call->n_arrays, call->map);
    json_decref(call->head);
    *call = (struct comm_call){0};
}

/* From now on the heartbeats report this call. */
static void take_call(struct comm *c, const char *name) {
    comm_stage(c, "%s", name);
    pthread_mutex_lock(&c->lock);
    c->taken = c->call;
    pthread_mutex_unlock(&c->lock);
}

int comm_next_call(struct comm *c, struct comm_call *call) {
    CHECK(c->whole == c);
    struct buf text = {.max = HEAD_BYTES};
    struct comm__arrays arrays = {0};
    *call = (struct comm_call){0};
    c->call++;
    struct comm__wait w = call_wait(c, COMM__CALL);
    int rc = comm__recv_message(&w, &c->calls, &text, &call->head, &arrays);
    buf_free(&text);
    call->arrays = arrays.p;
    call->n_arrays = arrays.n;
    call->map = arrays.map;
    if (c->shared_fd >= 0) close(c->shared_fd); /* the controller has mapped the last reply */
    c->shared_fd = -1;
    c->shares = json_is_true(json_object_get(call->head, "share"));
    if (rc >= 0 && json_object_get(call->head, "end")) {
        comm_call_free(call);
        return 0;
    }
    if (rc >= 0) rc = json_str(call->head, "call", &call->name, "the controller");
    call->args = json_object_get(call->head, "args");
    if (rc >= 0 && !json_is_object(call->args))
        rc = err_set(ERR_FORMAT, __FILE__, __LINE__, "the controller sent a call without arguments");
    if (rc < 0) comm_call_free(call);
    TRY(rc);
    take_call(c, call->name);
    return 1;
}

static int reply(struct comm *c, json_t *head, const struct comm_bytes *arrays, int n) {
    struct comm__wait w = call_wait(c, COMM__REPLY);
    const bool share = c->shares && comm__worth_sharing(arrays, n);
    int rc = share ? comm__share(arrays, n, &c->shared_fd) : 0;
    if (rc >= 0) rc = comm__send_message(&w, &c->calls, head, arrays, n, share ? c->shared_fd : -1);
    json_decref(head);
    TRY(rc);
    return 0;
}

int comm_reply(struct comm *c, const json_t *result, const struct comm_bytes *arrays, int n) {
    json_t *r = result ? json_deep_copy(result) : json_object();
    return reply(c, json_pack("{s:o}", "result", r), arrays, n);
}

/* The controller aborts the group's operations at this reply. This rank makes none until then either: its peers may still be in the
 * one that it did not come to. */
int comm_reply_error(struct comm *c, int code) {
    struct buf b = {0};
    char why[sizeof c->cancel.why];
    buf_add_visible(&b, err_msg(), false);
    const char *const message = b.p ? b.p : "";
    if (code == ERR_RANK) snprintf(why, sizeof why, "%s", message); /* it names another rank */
    else snprintf(why, sizeof why, "%s: %s", c->mesh[c->rank].who, message);
    comm__alarm_ring(&c->cancel, why);
    json_t *head = json_pack("{s:i,s:s}", "error", code, "message", message);
    buf_free(&b);
    return reply(c, head, NULL, 0);
}
