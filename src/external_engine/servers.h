/* servers.h - the servers of an external engine: who they are, which of them live, requests and answers by their tickets.
 *
 * Private to the module. Invariant: a server that is lost gets no request until it has taken new weights. */
#ifndef VERLC_EXTERNAL_ENGINE_SERVERS_H
#define VERLC_EXTERNAL_ENGINE_SERVERS_H

#include "external_engine/external_engine.h"
#include "external_engine/server_api.h"

struct server {
    char *url; /* owned, without a slash at its end */
    enum server_kind kind;
    char *model;       /* owned */
    bool lost;         /* no answer, a closed connection, or a deadline that passed */
    char *why;         /* owned; of a lost one */
    int64_t in_flight; /* requests */
};
struct servers { /* a zeroed one may be closed */
    struct server *all;
    int n;
    int64_t max_concurrent;
    double timeout_s;
    const char *update_command;
    struct helper_pool *pool;
    struct server_sent { /* requests under way */
        int64_t ticket;
        int server;
    } * sent;
    int64_t n_sent, cap_sent;
};
struct server_answer {
    int64_t ticket;
    int server, rc, status; /* rc ERR_IO, ERR_TIMEOUT: it is lost now, err_msg() says why */
    const char *text;       /* the body, the reply's */
    json_t *reply;          /* owned */
};

int servers_open(struct servers *s, const struct external_engine_args *a); /* as external_engine_open */
void servers_close(struct servers *s);
int64_t servers_live(const struct servers *s);
/* The server for a request: `home` where it lives (-1: none), else the one with the fewest under way, and another than `not` where
 * there is one. ERR_IO: all are lost; says why each is. */
int servers_choose(const struct servers *s, int home, int not );
/* body: stolen. */
int servers_send(struct servers *s, int server, const char *method, const char *path, json_t *body, int64_t *ticket);
/* 1: *a is an answer to a request that is under way, for server_answer_free; 0: none within wait_s. */
int servers_take(struct servers *s, double wait_s, struct server_answer *a);
void server_answer_free(struct server_answer *a);
void servers_cancel(struct servers *s); /* all that is under way */
/* Every server, the lost ones too, reads the weights in dir; one that does not answer is lost. No request is under way. */
int servers_update(struct servers *s, const char *dir);

#endif
