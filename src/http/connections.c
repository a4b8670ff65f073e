/* connections.c - the limits of a server's connections: how many, of each peer, for how long.
 *
 * What connections there are is read from the process's sockets of the server's port, by number and inode: libevent does not
 * report when it closes one. A connection is dropped by shutdown(2), and libevent does the rest. The sockets are looked at when
 * there may be too many, and once a second.
 *
 * A server that its owner steps answers nobody between two steps, so that time counts in no limit, but for CLOCK_GAP_S of each.
 *
 * Invariant: a slow sender, a slow reader and a flood of connections hold nothing for ever, and cost a constant time each. */
#include "http/http_int.h"

#include "base/clock.h"
#include "base/err.h"

#include <arpa/inet.h>
#include <event2/bufferevent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>

enum {
    MAX_CONNECTIONS = 64,
    MAX_OF_PEER = 32,  /* of one address */
    OTHER_FILES = 160, /* descriptors that the process needs besides */
    REQUEST_S = 10,    /* of a whole request, from the connection or the answer before on */
    ANSWER_S = 600,
};

static double now(const struct http_connections *t) { return clock_awake() - t->missed; }

double http_server_clock(const struct http_server *s) { return now(&s->connections); }

void http__connections_step(struct http_server *s, bool end) {
    struct http_connections *t = &s->connections;
    const double gap = t->stepped > 0 ? clock_awake() - t->stepped : 0;
    if (!end && gap > CLOCK_GAP_S) t->missed += gap - CLOCK_GAP_S;
    if (end) t->stepped = clock_awake();
}

static void drop(struct http_connections *t, int fd) {
    t->at[fd].dropped = true;
    shutdown(fd, SHUT_RDWR);
}

/* Whether it is a socket of this server: the process has others, of helpers, of ranks, of another server. */
static bool is_ours(const struct http_connections *t, int fd) {
    struct sockaddr_storage at = {0};
    if (getsockname(fd, (struct sockaddr *)&at, &(socklen_t){sizeof at}) != 0) return false;
    if (at.ss_family == AF_INET) return ntohs(((const struct sockaddr_in *)&at)->sin_port) == t->port;
    return at.ss_family == AF_INET6 && ntohs(((const struct sockaddr_in6 *)&at)->sin6_port) == t->port;
}

/* Notes whether it was opened or closed; whether it is there. */
static bool look_at(struct http_connections *t, int fd) {
    struct http_connection *c = &t->at[fd];
    struct sockaddr_storage peer = {0};
    struct stat st;
    const bool there = getpeername(fd, (struct sockaddr *)&peer, &(socklen_t){sizeof peer}) == 0 && fstat(fd, &st) == 0 &&
                       (st.st_ino == c->inode || is_ours(t, fd));
    if (there && st.st_ino != c->inode) *c = (struct http_connection){.inode = st.st_ino, .since = now(t), .peer = peer};
    else if (!there && !c->dropped) c->inode = 0;
    else if (!there && fcntl(fd, F_GETFD) < 0) *c = (struct http_connection){0}; /* shut down, it has no peer until it is closed */
    return c->inode != 0;
}

/* Of all; how many there are. */
static int look(struct http_connections *t) {
    int n = 0;
    for (int fd = 3; fd < t->max_fd; fd++) n += look_at(t, fd);
    t->open = n;
    t->accepted = 0;
    return n;
}

static bool same_peer(const struct sockaddr_storage *a, const struct sockaddr_storage *b) {
    if (a->ss_family != b->ss_family) return false;
    if (a->ss_family == AF_INET)
        return ((const struct sockaddr_in *)a)->sin_addr.s_addr == ((const struct sockaddr_in *)b)->sin_addr.s_addr;
    return memcmp(&((const struct sockaddr_in6 *)a)->sin6_addr, &((const struct sockaddr_in6 *)b)->sin6_addr,
                  sizeof(struct in6_addr)) == 0;
}

/* Drops the oldest connection without a request, of that peer or (NULL) of any; false: there is none. */
static bool drop_oldest(struct http_connections *t, const struct sockaddr_storage *peer) {
    int oldest = -1;
    for (int fd = 3; fd < t->max_fd; fd++) {
        const struct http_connection *c = &t->at[fd];
        if (!c->inode || c->dropped || c->busy || (peer && !same_peer(peer, &c->peer))) continue;
        if (oldest < 0 || c->since < t->at[oldest].since) oldest = fd;
    }
    if (oldest >= 0) drop(t, oldest);
    return oldest >= 0;
}

/* Those that are not dropped, of that peer or of any. */
static int count_of(const struct http_connections *t, const struct sockaddr_storage *peer) {
    int n = 0;
    for (int fd = 3; fd < t->max_fd; fd++) {
        const struct http_connection *c = &t->at[fd];
        n += c->inode && !c->dropped && (!peer || same_peer(peer, &c->peer));
    }
    return n;
}

/* A connection of a peer with too many is dropped, then the one that waits longest; of many, several at a time. */
static void keep_to_limits(struct http_connections *t) {
    const int more = t->max / 64 - 1, most = t->max_of_peer;
    for (int fd = 3; fd < t->max_fd && most < t->max && t->open > most; fd++) {
        const struct http_connection *c = &t->at[fd];
        if (!c->inode || c->dropped) continue;
        for (int over = count_of(t, &c->peer) - most; over > 0 && drop_oldest(t, &c->peer); over--) t->open--;
    }
    const int n = count_of(t, NULL);
    for (int over = n > t->max ? n - t->max + more : 0; over > 0 && drop_oldest(t, NULL); over--) t->open--;
}

void http__connections_tick(struct http_server *s) {
    struct http_connections *t = &s->connections;
    look(t);
    for (int i = 3; i < t->max_fd; i++) {
        const struct http_connection *c = &t->at[i];
        if (c->inode && !c->dropped && now(t) - c->since > (c->busy ? t->answer_s : t->request_s)) drop(t, i);
    }
}

void http__connections_drop_idle(struct http_server *s) {
    struct http_connections *t = &s->connections;
    look(t);
    for (int i = 3; i < t->max_fd; i++)
        if (t->at[i].inode && !t->at[i].dropped && !t->at[i].busy) drop(t, i);
}

bool http__connections_busy(struct http_server *s) {
    struct http_connections *t = &s->connections;
    look(t);
    for (int i = 3; i < t->max_fd; i++)
        if (t->at[i].inode && !t->at[i].dropped && t->at[i].busy) return true;
    return false;
}

/* ---- requests ---- */

static int fd_of(const struct http_server *s, struct evhttp_request *r) {
    struct evhttp_connection *c = evhttp_request_get_connection(r);
    const int fd = c ? bufferevent_getfd(evhttp_connection_get_bufferevent(c)) : -1;
    return fd >= 3 && fd < s->connections.max_fd ? fd : -1;
}

static void on_answered(struct evhttp_request *r, void *arg) {
    struct http_server *s = arg;
    const int fd = fd_of(s, r);
    if (fd < 0) return;
    s->connections.at[fd].busy = false;
    s->connections.at[fd].since = now(&s->connections);
}

void http__asked(struct http_server *s, struct evhttp_request *r) {
    const int fd = fd_of(s, r), on = 1;
    evhttp_request_set_on_complete_cb(r, on_answered, s);
    if (fd < 0) return;
    look_at(&s->connections, fd);
    s->connections.at[fd].busy = true;
    s->connections.at[fd].since = now(&s->connections);
    (void)!setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on); /* a stream's pieces are small */
}

/* ---- accepting ---- */

static void on_reopen(evutil_socket_t fd, short what, void *arg) {
    (void)fd, (void)what;
    struct http_server *s = arg;
    if (s->draining) return;
    if (look(&s->connections) < s->connections.max) evconnlistener_enable(s->listener);
    else event_add(s->reopen, &(struct timeval){0, 50000});
}

/* Before each connection: at the limits another one makes room. None is accepted while those dropped are not closed, or where
 * all are busy. */
static struct bufferevent *on_accept(struct event_base *base, void *arg) {
    struct http_server *s = arg;
    struct http_connections *t = &s->connections;
    const int room = t->max_of_peer < t->max ? t->max_of_peer : t->max;
    if (t->open + ++t->accepted > room && t->accepted > t->max / 64) {
        const int open = look(t);
        keep_to_limits(t);
        if (open > t->max) {
            evconnlistener_disable(s->listener);
            event_add(s->reopen, &(struct timeval){0, 1000});
        }
    }
    return bufferevent_socket_new(base, -1, BEV_OPT_CLOSE_ON_FREE);
}

int http__connections_open(struct http_server *s) {
    struct http_connections *t = &s->connections;
    struct rlimit files;
    t->max = s->a.max_connections > 0 ? (int)s->a.max_connections : MAX_CONNECTIONS;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur != RLIM_INFINITY && (rlim_t)t->max + OTHER_FILES > files.rlim_cur)
        t->max = files.rlim_cur > OTHER_FILES + 16 ? (int)files.rlim_cur - OTHER_FILES : 16;
    t->max_of_peer = s->a.max_of_peer > 0 ? (int)s->a.max_of_peer : MAX_OF_PEER;
    t->request_s = s->a.request_s > 0 ? s->a.request_s : REQUEST_S;
    t->answer_s = s->a.answer_s > 0 ? s->a.answer_s : ANSWER_S;
    t->max_fd = 1024 + 2 * t->max;
    t->at = xcalloc((size_t)t->max_fd, sizeof *t->at);
    s->reopen = evtimer_new(s->base, on_reopen, s);
    if (!s->reopen) FAIL(ERR_NOMEM, "no memory for the server");
    evhttp_set_bevcb(s->http, on_accept, s);
    return 0;
}

void http__connections_close(struct http_server *s) {
    if (s->reopen) event_free(s->reopen);
    free(s->connections.at);
}
