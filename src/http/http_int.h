/* http_int.h - private to http: the server's state, and what its files give each other. */
#ifndef VERLC_HTTP_HTTP_INT_H
#define VERLC_HTTP_HTTP_INT_H

#include "http/server.h"

#include <event2/event.h>
#include <event2/http.h>
#include <event2/listener.h>
#include <sys/socket.h>
#include <sys/types.h>

enum { HTTP_TOKEN_BYTES = 16 };

/* A connection, at its descriptor's place. */
struct http_connection {
    ino_t inode;  /* 0: none */
    double since; /* http_server_clock: of the connection, of its last answer's end, of its request */
    bool busy, dropped;
    struct sockaddr_storage peer;
};
struct http_connections {
    struct http_connection *at; /* (max_fd) */
    int max_fd, max, max_of_peer;
    int open, accepted; /* at the last look; since then */
    int port;           /* of the server */
    double request_s, answer_s;
    double stepped, missed; /* stepped server: the last step's end; seconds between steps that count for nobody */
};

struct http_server {
    struct http_server_args a;
    struct event_base *base;
    struct evhttp *http;
    struct evconnlistener *listener;
    struct event *on_int, *on_term, *reopen, *tick, *woken;
    struct http_connections connections;
    struct stream *streams;          /* all that are under way */
    struct http_exchange *exchanges; /* all that are not answered */
    char *token, *url, *address;     /* token "": none is needed */
    char cookie[32];
    int port, wake_fd;
    bool loopback, draining;
};

void http__add_headers(struct evhttp_request *r, const char *type);
const char *http__reason(int status);

/* connections.c */
int http__connections_open(struct http_server *s);
void http__connections_close(struct http_server *s);
void http__asked(struct http_server *s, struct evhttp_request *r); /* a whole request has come */
void http__connections_drop_idle(struct http_server *s);
void http__connections_step(struct http_server *s, bool end); /* around each step */
bool http__connections_busy(struct http_server *s);
void http__connections_tick(struct http_server *s); /* drops those whose time is over */

/* exchange.c */
struct http_exchange *http__exchange_create(struct http_server *s, struct evhttp_request *r, const void *params);
void http__exchanges_tick(struct http_server *s); /* notices clients that have left while nothing is sent */
void http__exchanges_close(struct http_server *s);

#endif
