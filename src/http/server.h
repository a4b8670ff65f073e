/* server.h - the HTTP server of this program, on one thread: GET requests of browsers that are answered at once (handle), or
 * requests of any method that are answered later and piece by piece (serve).
 *
 * Invariant: nothing is answered to a request whose Host is not this server's (on loopback) or that lacks the token (where one
 * is required), and no path of a request reaches the file system: the handler knows the names that it serves. */
#ifndef VERLC_HTTP_SERVER_H
#define VERLC_HTTP_SERVER_H

#include "base/buf.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* One request. Names and values of the query are decoded; a request has at most one value of each name but those that
 * http_params reads. */
struct http_get {
    const char *path; /* as it was sent, without the query */
    const void *params;
};
const char *http_param(const struct http_get *g, const char *name); /* borrowed; NULL: absent */
/* A whole number from lo to hi; absent: *out stays. ERR_INVAL. */
int http_param_i64(const struct http_get *g, const char *name, int64_t lo, int64_t hi, int64_t *out);
int http_params(const struct http_get *g, const char *name, const char **out, int max); /* how many there are, up to max */

/* A body that is made piece by piece, other requests in between. */
struct http_stream {
    int (*next)(void *state, struct buf *out); /* appends, for some 10 ms: 1: there is more; 0: that was all; ERR_* */
    void (*close)(void *state);
    void *state;
};
/* What is answered: one of body, file, stream. */
struct http_reply {
    const char *type;  /* of the content; outlives the reply */
    struct buf body;   /* taken over */
    const void *file;  /* static bytes */
    size_t file_bytes; /* of file */
    struct http_stream stream;
};

/* One request that is answered when its owner has the answer: at once, or from a later callback on the server's thread. It lives
 * until http_exchange_reply or http_exchange_end, or until its client leaves, which `closed` reports; not after it. */
struct http_exchange;
const char *http_exchange_method(const struct http_exchange *x);                   /* "GET", "POST", ... */
const char *http_exchange_path(const struct http_exchange *x);                     /* as it was sent, without the query */
const char *http_exchange_param(const struct http_exchange *x, const char *name);  /* of the query, decoded; NULL: absent */
const char *http_exchange_header(const struct http_exchange *x, const char *name); /* NULL: absent */
const char *http_exchange_body(const struct http_exchange *x, size_t *n);          /* borrowed, never NULL, no NUL behind it */
void http_exchange_on_close(struct http_exchange *x, void (*closed)(void *arg), void *arg);
void http_exchange_add_header(struct http_exchange *x, const char *name, const char *value);       /* of the answer */
void http_exchange_reply(struct http_exchange *x, int status, const char *type, struct buf *body); /* takes body over; the end */
/* An answer in pieces: begin, any number of send, end. What a slow client has not taken is kept in memory. */
void http_exchange_begin(struct http_exchange *x, int status, const char *type);
void http_exchange_send(struct http_exchange *x, const char *p, size_t n);
void http_exchange_end(struct http_exchange *x);

struct http_server_args {
    const char *host;                     /* an address or name to listen on */
    int64_t port;                         /* 0: a free one, first_port or one soon after it where one is */
    int64_t first_port;                   /* 0: any */
    bool token;                           /* require a token on loopback too, where other users of the machine are */
    const char *key;                      /* the token; NULL: a random one */
    const char *open_path;                /* answered without a token; NULL: none */
    int64_t max_connections, max_of_peer; /* all, of one address; 0: 64, 32 */
    int64_t max_body;                     /* bytes; 0: a request has none */
    double request_s, answer_s;           /* longest time of a whole request, of an answer; 0: 10, 600 */
    bool stepped;                         /* by http_server_step: signals are left alone */
    /* ERR_INPUT: there is no such thing (404); ERR_INVAL: a wrong parameter (400); another error is a 500. The message is the
     * body then: {"error": ...}. */
    int (*handle)(void *arg, const struct http_get *get, struct http_reply *reply);
    void *arg;
    /* In place of handle: requests of any method. What may not be asked goes to `refused`, which answers it. Both NULL: handle. */
    void (*serve)(void *arg, struct http_exchange *x);
    void (*refused)(void *arg, struct http_exchange *x, int status, const char *message);
    void (*signalled)(void *arg); /* SIGINT or SIGTERM; NULL: http_server_run returns */
    void (*woken)(void *arg);     /* after http_server_wake */
    void (*tick)(void *arg);      /* each second */
};
struct http_server;
/* Listens. ERR_IO: the address cannot be bound. */
int http_server_open(struct http_server **out, const struct http_server_args *a);
void http_server_close(struct http_server *s);                /* NULL ok */
const char *http_server_url(const struct http_server *s);     /* with the token; borrowed */
const char *http_server_address(const struct http_server *s); /* "http://HOST:PORT" */
const char *http_server_token(const struct http_server *s);   /* "": none is needed */
int http_server_run(struct http_server *s);                   /* until a signal or http_server_stop; 0 */
void http_server_stop(struct http_server *s);                 /* from a callback: http_server_run returns */
void http_server_wake(struct http_server *s);                 /* any thread: `woken` is called on the server's */
/* Answers what there is, without waiting. Time without a step counts in no client's limit. ERR_IO. */
int http_server_step(struct http_server *s);
double http_server_clock(const struct http_server *s); /* clock_awake without such time: for deadlines of clients */
/* Also answers what comes to a socket that listens elsewhere on loopback, such as in another network namespace, at this server's
 * port; fd is taken over. remove: it is closed. */
struct http_listener;
struct http_listener *http_server_add_listener(struct http_server *s, int fd);
void http_server_remove_listener(struct http_server *s, struct http_listener *l);
/* No new connections; those without a request are closed, the others after their answer. */
void http_server_drain(struct http_server *s);
bool http_server_is_busy(struct http_server *s); /* a request is not answered, or its answer not sent to its end */

#endif
