/* link.c - a connection to one peer, what its monitor says, and the loop that moves bytes over several of them.
 * A connection that is lost is not made again: what was on its way is lost with it.
 * Invariant: comm__run returns when all is moved, when a peer it still needs is lost, at the alarm or at the deadline. */
#include "comm/comm_int.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/json.h"

#include <errno.h>
#include <limits.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

enum { SLICE_MS = 100, LINGER_MS = 3000, DAY_MS = 86400000, HANDSHAKE_MS = 10000, JSON_BYTES = 1 << 20 };
/* A peer's system acknowledges bytes in milliseconds, also for a process that is stopped or does not read. */
#define UNACKED_S COMM_SILENCE_S
/* Bytes that came before a disconnection may still be on their way through ZeroMQ. */
#define LOST_S 0.25

/* ---- the alarm ---- */

int comm__alarm_init(struct comm__alarm *a) {
    *a = (struct comm__alarm){.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
    if (a->fd < 0) FAIL(ERR_IO, "no eventfd: %s", strerror(errno));
    pthread_mutex_init(&a->lock, NULL);
    return 0;
}

void comm__alarm_destroy(struct comm__alarm *a) {
    if (a->fd < 0) return;
    close(a->fd);
    pthread_mutex_destroy(&a->lock);
    a->fd = -1;
}

bool comm__alarm_ring(struct comm__alarm *a, const char *why) {
    pthread_mutex_lock(&a->lock);
    const bool first = !a->rung;
    if (first) snprintf(a->why, sizeof a->why, "%s", why);
    a->rung = true;
    pthread_mutex_unlock(&a->lock);
    if (first) (void)!write(a->fd, &(uint64_t){1}, sizeof(uint64_t));
    return first;
}

bool comm__alarm_rung(struct comm__alarm *a) {
    pthread_mutex_lock(&a->lock);
    const bool rung = a->rung;
    pthread_mutex_unlock(&a->lock);
    return rung;
}

int comm__alarm_error(struct comm__alarm *a) {
    char why[sizeof a->why];
    pthread_mutex_lock(&a->lock);
    memcpy(why, a->why, sizeof why);
    pthread_mutex_unlock(&a->lock);
    FAIL(ERR_RANK, "%s", why);
}

/* ---- sockets ---- */

static int set_int(void *sock, int option, int value) {
    return zmq.setsockopt(sock, option, &value, sizeof value) == 0 ? 0 : comm__zmq_fail("a ZeroMQ option");
}

int comm__set_options(void *sock, const char *key, bool server) {
    char public_key[COMM_KEY];
    if (zmq.curve_public(public_key, key) != 0) FAIL(ERR_FORMAT, "the group's key is not a key of %d Z85 characters", COMM_KEY - 1);
    TRY(set_int(sock, ZMQ_SNDHWM, COMM_QUEUE));
    TRY(set_int(sock, ZMQ_RCVHWM, COMM_QUEUE));
    TRY(set_int(sock, ZMQ_LINGER, 0));
    TRY(set_int(sock, ZMQ_RECONNECT_IVL, DAY_MS));
    TRY(set_int(sock, ZMQ_HANDSHAKE_IVL, HANDSHAKE_MS));
    TRY(set_int(sock, ZMQ_TCP_KEEPALIVE, 1)); /* a host that is switched off loses its connection, a stopped process does not */
    TRY(set_int(sock, ZMQ_TCP_KEEPALIVE_IDLE, 3));
    TRY(set_int(sock, ZMQ_TCP_KEEPALIVE_INTVL, 1));
    TRY(set_int(sock, ZMQ_TCP_KEEPALIVE_CNT, 5));
    const int64_t most = JSON_BYTES;
    _Static_assert(JSON_BYTES > COMM_FRAME + (int)sizeof(struct comm__frame), "a frame is one message");
    if (zmq.setsockopt(sock, ZMQ_MAXMSGSIZE, &most, sizeof most) != 0) return comm__zmq_fail("ZMQ_MAXMSGSIZE");
    if (server) TRY(set_int(sock, ZMQ_CURVE_SERVER, 1));
    else if (zmq.setsockopt(sock, ZMQ_CURVE_SERVERKEY, public_key, COMM_KEY) != 0 ||
             zmq.setsockopt(sock, ZMQ_CURVE_PUBLICKEY, public_key, COMM_KEY) != 0)
        return comm__zmq_fail("a CURVE key");
    if (zmq.setsockopt(sock, ZMQ_CURVE_SECRETKEY, key, COMM_KEY) != 0) return comm__zmq_fail("a CURVE key");
    return 0;
}

static int open_link(struct comm__link *l, void *ctx, const char *key, bool server) {
    static atomic_int count;
    char name[64];
    l->sock = zmq.socket(ctx, ZMQ_DEALER);
    if (!l->sock) return comm__zmq_fail("a ZeroMQ socket (does the limit of open files allow more?)");
    TRY(comm__set_options(l->sock, key, server));
    snprintf(name, sizeof name, "inproc://events-%d", atomic_fetch_add(&count, 1));
    l->listens = server;
    const int events = server ? ZMQ_EVENT_ACCEPTED | ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_DISCONNECTED
                              : ZMQ_EVENT_CONNECTED | ZMQ_EVENT_DISCONNECTED | ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL |
                                    ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL | ZMQ_EVENT_HANDSHAKE_FAILED_AUTH;
    if (zmq.socket_monitor(l->sock, name, events) != 0) return comm__zmq_fail("a ZeroMQ monitor");
    l->events = zmq.socket(ctx, ZMQ_PAIR);
    if (!l->events) return comm__zmq_fail("a ZeroMQ monitor");
    TRY(set_int(l->events, ZMQ_RCVHWM, 0)); /* the I/O thread, which also sends the heartbeats, blocks where this queue is full */
    if (zmq.connect(l->events, name) != 0) return comm__zmq_fail("a ZeroMQ monitor");
    return 0;
}

int comm__link_listen(struct comm__link *l, void *ctx, const char *key, const char *address, int *port) {
    char endpoint[COMM__ENDPOINT];
    size_t n = sizeof endpoint;
    TRY(open_link(l, ctx, key, true));
    snprintf(endpoint, sizeof endpoint, "tcp://%.100s:*", address);
    if (zmq.bind(l->sock, endpoint) != 0) return comm__zmq_fail(endpoint);
    if (zmq.getsockopt(l->sock, ZMQ_LAST_ENDPOINT, endpoint, &n) != 0) return comm__zmq_fail("ZMQ_LAST_ENDPOINT");
    *port = atoi(strrchr(endpoint, ':') + 1);
    return 0;
}

int comm__link_connect(struct comm__link *l, void *ctx, const char *key, const char *endpoint) {
    TRY(open_link(l, ctx, key, false));
    if (zmq.connect(l->sock, endpoint) != 0) return comm__zmq_fail(endpoint);
    return 0;
}

void comm__link_close(struct comm__link *l, bool linger) {
    const int ms = linger ? LINGER_MS : 0;
    if (l->sock) {
        zmq.setsockopt(l->sock, ZMQ_LINGER, &ms, sizeof ms);
        zmq.socket_monitor(l->sock, NULL, 0);
        zmq.close(l->sock);
    }
    if (l->events) zmq.close(l->events);
    free(l->maybe);
    l->sock = l->events = NULL;
    l->maybe = NULL;
    l->n_maybe = l->cap_maybe = 0;
    l->joined = l->known = false;
    l->fd = 0;
    l->unacked = 0;
}

static void lost(struct comm__link *l) {
    if (l->lost_at == 0) l->lost_at = clock_awake();
}

/* On a port that this side listens on. Connections without the key are ignored. */
static void listener_event(struct comm__link *l, int what, int fd) {
    int at = 0;
    while (at < l->n_maybe && l->maybe[at] != fd) at++;
    if (what == ZMQ_EVENT_HANDSHAKE_SUCCEEDED) {
        l->joined = true;
    } else if (what == ZMQ_EVENT_ACCEPTED && !l->joined && at == l->n_maybe) {
        if (l->n_maybe == l->cap_maybe) {
            l->cap_maybe = 2 * l->cap_maybe + 8;
            l->maybe = xrealloc(l->maybe, (size_t)l->cap_maybe * sizeof *l->maybe);
        }
        l->maybe[l->n_maybe++] = fd;
    } else if (what == ZMQ_EVENT_DISCONNECTED && at < l->n_maybe) {
        l->maybe[at] = l->maybe[--l->n_maybe];
        if (l->joined && l->n_maybe == 0) lost(l);
    }
}

static void dialer_event(struct comm__link *l, int what, int fd) {
    if (what == ZMQ_EVENT_CONNECTED) {
        l->fd = fd;
    } else if (what != ZMQ_EVENT_DISCONNECTED) {
        l->refused = true;
        l->ignore++;
    } else if (l->ignore > 0) {
        l->ignore--;
    } else {
        lost(l);
        l->fd = 0;
    }
}

/* Where the network is cut while bytes are on their way the system sends no keepalive, but those bytes again, for a quarter of an
 * hour. A time-out of the system's own (TCP_USER_TIMEOUT) would also end connections to a peer that reads nothing for long. */
static void check_acknowledged(struct comm__link *l) {
    const int fd = !l->listens ? l->fd : l->joined && l->n_maybe == 1 ? l->maybe[0] : 0;
    const double now = clock_awake(), since = l->unacked;
    struct tcp_info tcp;
    socklen_t n = sizeof tcp;
    l->unacked = 0;
    if (fd <= 0 || getsockopt(fd, IPPROTO_TCP, TCP_INFO, &tcp, &n) != 0) return;
    if (tcp.tcpi_unacked == 0 && tcp.tcpi_probes == 0) return;
    l->unacked = since > 0 && tcp.tcpi_last_ack_recv / 1000. >= now - since ? since : now;
    if (now - l->unacked > UNACKED_S) lost(l);
}

void comm__link_events(struct comm__link *l) {
    uint8_t event[6], endpoint[256];
    while (zmq.recv(l->events, event, sizeof event, ZMQ_DONTWAIT) >= 2) {
        uint16_t what;
        int32_t fd;
        memcpy(&what, event, sizeof what);
        memcpy(&fd, event + sizeof what, sizeof fd);
        (void)zmq.recv(l->events, endpoint, sizeof endpoint, 0);
        if (l->listens) listener_event(l, what, fd);
        else dialer_event(l, what, fd);
    }
    check_acknowledged(l);
}

/* The peer's own message came by this descriptor, as ZeroMQ has it in the message (NULL: unknown). */
static void note_descriptor(struct comm__link *l, const char *fd) {
    if (!l->listens || l->known || !fd) return;
    comm__link_events(l); /* descriptors are reused: events of connections before this one are taken first */
    l->known = true;
    const int peer = atoi(fd);
    for (int i = 0; i < l->n_maybe; i++)
        if (l->maybe[i] == peer) {
            l->maybe[0] = peer;
            l->n_maybe = 1;
            return;
        }
}

/* ---- the loop ---- */

static bool pending(const struct comm__move *m) { return !m->out_done || !m->in_done; }

/* 1: a frame was passed to ZeroMQ; 0: its queue is full. */
static int send_frame(const struct comm__wait *w, struct comm__move *m) {
    const size_t left = m->n_out - m->sent, n = left < COMM_FRAME ? left : COMM_FRAME;
    const struct comm__frame f = {COMM__MAGIC, COMM_PROTOCOL, (uint16_t)w->kind, w->rank, w->part, w->seq, m->sent, m->n_out};
    zmq_msg_t msg;
    int events;
    size_t size = sizeof events;
    if (zmq.getsockopt(m->link->sock, ZMQ_EVENTS, &events, &size) != 0) return comm__zmq_fail(m->link->who);
    if (!(events & ZMQ_POLLOUT)) return 0;
    if (zmq.msg_init_size(&msg, sizeof f + n) != 0) FAIL(ERR_NOMEM, "%s: no memory for a frame", m->link->who);
    memcpy(zmq.msg_data(&msg), &f, sizeof f);
    if (n) memcpy((uint8_t *)zmq.msg_data(&msg) + sizeof f, m->out + m->sent, n);
    if (zmq.msg_send(&msg, m->link->sock, ZMQ_DONTWAIT) < 0) {
        const int e = errno;
        zmq.msg_close(&msg);
        return e == EAGAIN ? 0 : comm__zmq_fail(m->link->who);
    }
    m->sent += n;
    m->out_done = m->sent == m->n_out;
    return 1;
}

static int take_frame(const struct comm__wait *w, struct comm__move *m, const uint8_t *p, size_t n) {
    struct comm__frame f;
    const char *who = m->link->who;
    TRY(comm__frame_read(&f, p, n, who));
    if (f.rank != m->link->rank) FAIL(ERR_FORMAT, "%s says that it is rank %d", who, f.rank);
    if (f.kind == COMM__REPLY && w->kind == COMM__REPLY && f.seq < w->seq) return 0; /* of a call that was given up */
    if (f.kind != w->kind || f.seq != w->seq || f.part != w->part)
        FAIL(ERR_RANK, "%s is in %s %llu and rank %d in %s %llu: all ranks must make the same calls in the same order", who,
             comm__kind_name(f.kind), (unsigned long long)f.seq, w->rank, comm__kind_name(w->kind), (unsigned long long)w->seq);
    const size_t want = m->head ? m->head->max : m->n_in;
    if (m->head ? f.total > want : f.total != want)
        FAIL(ERR_RANK, "%s %llu: %s sends %llu bytes, and rank %d expects %zu", comm__kind_name(w->kind),
             (unsigned long long)w->seq, who, (unsigned long long)f.total, w->rank, want);
    if (f.offset != m->got)
        FAIL(ERR_FORMAT, "%s sent bytes at %llu, and those at %zu are next", who, (unsigned long long)f.offset, m->got);
    n -= sizeof f;
    if (m->head) TRY(buf_add(m->head, p + sizeof f, n));
    else if (n) memcpy(m->in + m->got, p + sizeof f, n);
    m->got += n;
    m->in_done = m->got == f.total;
    return 0;
}

/* 1: a frame was taken; 0: there is none. */
static int recv_frame(const struct comm__wait *w, struct comm__move *m) {
    zmq_msg_t msg;
    zmq.msg_init(&msg);
    if (zmq.msg_recv(&msg, m->link->sock, ZMQ_DONTWAIT) < 0) return errno == EAGAIN ? 0 : comm__zmq_fail(m->link->who);
    note_descriptor(m->link, zmq.msg_gets(&msg, "__fd"));
    const int rc = take_frame(w, m, zmq.msg_data(&msg), zmq.msg_size(&msg));
    zmq.msg_close(&msg);
    TRY(rc);
    return 1;
}

static int move_what_can_be(const struct comm__wait *w, struct comm__move *moves, int n, bool *moved) {
    int rc = 0;
    for (int i = 0; i < n; i++) {
        struct comm__move *m = &moves[i];
        while (!m->out_done && (rc = send_frame(w, m)) > 0) *moved = true;
        while (rc >= 0 && !m->in_done && (rc = recv_frame(w, m)) > 0) *moved = true;
        TRY(rc);
    }
    return 0;
}

static int too_late(const struct comm__wait *w, const struct comm__move *moves, int n) {
    struct buf who = {0};
    for (int i = 0; i < n; i++)
        if (pending(&moves[i])) buf_addf(&who, "%s%s", who.n ? ", " : "", moves[i].link->who);
    err_set(ERR_TIMEOUT, __FILE__, __LINE__, "%s %llu: no answer from %s before the deadline", comm__kind_name(w->kind),
            (unsigned long long)w->seq, who.p);
    buf_free(&who);
    return ERR_TIMEOUT;
}

static int check_waits(const struct comm__wait *w, struct comm__move *moves, int n) {
    const double now = clock_awake();
    if (w->alarm && comm__alarm_rung(w->alarm)) return comm__alarm_error(w->alarm);
    for (int i = 0; i < n; i++) {
        struct comm__link *l = moves[i].link;
        if (!pending(&moves[i])) continue;
        comm__link_events(l);
        if (l->lost_at > 0 && now - l->lost_at > LOST_S)
            FAIL(ERR_RANK, "the connection to %s was lost in %s %llu", l->who, comm__kind_name(w->kind),
                 (unsigned long long)w->seq);
    }
    return now >= w->deadline ? too_late(w, moves, n) : 0;
}

static int wait_for_more(const struct comm__wait *w, const struct comm__move *moves, int n, zmq_pollitem_t *items) {
    int n_items = 0, first = COMM__NOBODY;
    for (int i = 0; i < n; i++) {
        const struct comm__move *m = &moves[i];
        if (!pending(m)) continue;
        if (first == COMM__NOBODY && !m->in_done) first = m->link->rank;
        items[n_items++] =
            (zmq_pollitem_t){m->link->sock, 0, (short)((m->in_done ? 0 : ZMQ_POLLIN) | (m->out_done ? 0 : ZMQ_POLLOUT)), 0};
        items[n_items++] = (zmq_pollitem_t){m->link->events, 0, ZMQ_POLLIN, 0};
    }
    if (w->alarm) items[n_items++] = (zmq_pollitem_t){NULL, w->alarm->fd, ZMQ_POLLIN, 0};
    if (w->waiting) w->waiting(w->arg, first);
    const int left = clock_poll_ms(w->deadline);
    if (zmq.poll(items, n_items, left < SLICE_MS ? left : SLICE_MS) < 0 && errno != EINTR)
        return comm__zmq_fail("a wait for peers");
    return 0;
}

int comm__run(const struct comm__wait *w, struct comm__move *moves, int n) {
    zmq_pollitem_t few[2 * 8 + 1], *items = n <= 8 ? few : xmalloc((2 * (size_t)n + 1) * sizeof *items);
    int rc;
    for (int i = 0; i < n; i++) {
        moves[i].out_done = !moves[i].sends;
        moves[i].in_done = !moves[i].receives;
    }
    for (;;) {
        bool moved = false, more = false;
        TRYG(move_what_can_be(w, moves, n, &moved), out);
        for (int i = 0; i < n && !more; i++) more = pending(&moves[i]);
        if (!more) break;
        if (!moved) TRYG(wait_for_more(w, moves, n, items), out);
        if (!moved) TRYG(move_what_can_be(w, moves, n, &moved), out); /* before a lost connection counts */
        if (!moved) TRYG(check_waits(w, moves, n), out);
        else if (clock_awake() >= w->deadline) TRYG(check_waits(w, moves, n), out);
    }
    rc = 0;
out:
    if (w->waiting) w->waiting(w->arg, COMM__NOBODY);
    if (items != few) free(items);
    return rc;
}

int comm__send_message(struct comm__wait *w, struct comm__link *l, json_t *head, const struct comm_bytes *arrays, int n,
                       int shared) {
    struct buf text = {0};
    json_t *sizes = json_array();
    for (int i = 0; i < n; i++) json_array_append_new(sizes, json_integer((json_int_t)arrays[i].n));
    json_object_set_new(head, "arrays", sizes);
    if (shared >= 0) json_object_set_new(head, "shared", json_integer(shared));
    int rc = json_dump_line(&text, head);
    struct comm__move m = {.link = l, .sends = true, .out = (const uint8_t *)text.p, .n_out = text.n};
    w->part = 0;
    if (rc >= 0) rc = comm__run(w, &m, 1);
    for (int i = 0; rc >= 0 && shared < 0 && i < n; i++) {
        m = (struct comm__move){.link = l, .sends = true, .out = arrays[i].p, .n_out = arrays[i].n};
        w->part = (uint32_t)i + 1;
        rc = comm__run(w, &m, 1);
    }
    buf_free(&text);
    TRY(rc);
    return 0;
}

int comm__recv_message(struct comm__wait *w, struct comm__link *l, struct buf *text, json_t **head, struct comm__arrays *arrays) {
    struct comm__move m = {.link = l, .receives = true, .head = text};
    int64_t fd = -1;
    w->part = 0;
    TRY(comm__run(w, &m, 1));
    TRY(json_parse(head, text->p ? text->p : "", text->n, l->who));
    TRY(json_i64_opt(*head, "shared", &fd, l->who));
    const bool shared = fd >= 0 && fd <= INT_MAX;
    TRY(comm__arrays_read(arrays, *head, !shared, l->who));
    if (shared) return comm__map(arrays->p, arrays->n, l->pid, (int)fd, &arrays->map, l->who);
    for (int i = 0; i < arrays->n; i++) {
        m = (struct comm__move){.link = l, .receives = true, .in = arrays->p[i].p, .n_in = arrays->p[i].n};
        w->part = (uint32_t)i + 1;
        TRY(comm__run(w, &m, 1));
    }
    return 0;
}

/* ---- JSON ---- */

int comm__send_json(void *sock, const void *to, size_t n_to, json_t *m) {
    struct buf b = {0};
    int rc = m ? json_dump_line(&b, m) : err_set(ERR_INTERNAL, __FILE__, __LINE__, "a message that is no UTF-8");
    json_decref(m);
    if (rc >= 0 && to && zmq.send(sock, to, n_to, ZMQ_DONTWAIT | ZMQ_SNDMORE) < 0) rc = comm__zmq_fail("a message to a rank");
    if (rc >= 0 && zmq.send(sock, b.p, b.n, ZMQ_DONTWAIT) < 0) rc = comm__zmq_fail("a message to a peer");
    buf_free(&b);
    TRY(rc);
    return 0;
}

int comm__recv_json(void *sock, uint8_t *from, size_t *n_from, json_t **m, const char *who) {
    zmq_msg_t msg;
    int rc, parts = 0;
    zmq.msg_init(&msg);
    *m = NULL;
    if (from) {
        const int n = zmq.recv(sock, from, COMM__ID, ZMQ_DONTWAIT);
        if (n < 0) return errno == EAGAIN ? 0 : comm__zmq_fail(who);
        *n_from = n < COMM__ID ? (size_t)n : COMM__ID;
    }
    for (bool more = true; more; more = zmq.msg_more(&msg)) { /* the last part counts; only one is valid */
        if (zmq.msg_recv(&msg, sock, from || parts ? 0 : ZMQ_DONTWAIT) < 0) return errno == EAGAIN ? 0 : comm__zmq_fail(who);
        parts++;
    }
    if (parts != 1) rc = err_set(ERR_FORMAT, __FILE__, __LINE__, "%s: a message of %d parts", who, parts);
    else rc = json_parse(m, zmq.msg_data(&msg), zmq.msg_size(&msg), who);
    zmq.msg_close(&msg);
    TRY(rc);
    return 1;
}
