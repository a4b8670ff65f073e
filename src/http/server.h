/* server.h - answers GET requests of browsers, on one thread, until SIGINT or SIGTERM.
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

struct http_server_args {
    const char *host; /* an address or name to listen on */
    int64_t port;     /* 0: a free one, 8266 if it is */
    bool token;       /* require a token on loopback too, where other users of the machine are */
    /* ERR_INPUT: there is no such thing (404); ERR_INVAL: a wrong parameter (400); another error is a 500. The message is the
     * body then: {"error": ...}. */
    int (*handle)(void *arg, const struct http_get *get, struct http_reply *reply);
    void *arg;
};
struct http_server;
/* Listens. ERR_IO: the address cannot be bound. */
int http_server_open(struct http_server **out, const struct http_server_args *a);
void http_server_close(struct http_server *s);            /* NULL ok */
const char *http_server_url(const struct http_server *s); /* with the token; borrowed */
int http_server_run(struct http_server *s);               /* until a signal; 0 */

#endif
