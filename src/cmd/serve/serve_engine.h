/* serve_engine.h - what draws, on one thread, as the backend of a server on another.
 *
 * The engine's thread is the one that opened the device, or has the ranks. What is submitted and cancelled crosses by one queue,
 * what is drawn by another; the server's thread is woken for it.
 * Invariant: reports reach the server in their order, and none of a ticket after its cancellation has been read. */
#ifndef VERLC_CMD_SERVE_SERVE_ENGINE_H
#define VERLC_CMD_SERVE_SERVE_ENGINE_H

#include "serve/serve.h"

/* What draws. All by the engine's thread. */
struct serve_source {
    void *ctx;
    void (*submit)(void *ctx, const struct engine_request *r, uint64_t ticket); /* r is borrowed for the call */
    void (*cancel)(void *ctx, uint64_t ticket);
    /* 1: work remains, and it is called again at once; else after the next order, or a second. Gives what is drawn to
     * serve_engine_report. */
    int (*step)(void *ctx);
};

struct serve_engine;
struct serve_engine *serve_engine_create(void);
void serve_engine_destroy(struct serve_engine *e); /* NULL ok */
struct serve_backend serve_engine_backend(struct serve_engine *e);
/* The server that is woken. Before serve_engine_run. */
void serve_engine_attach(struct serve_engine *e, struct http_server *http);

/* The engine's thread: steps until serve_engine_stop. An error is the source's; the server is woken then. */
int serve_engine_run(struct serve_engine *e, const struct serve_source *source);
/* From within its calls: n bytes of reports (serve_tickets.h), and what the source does now. */
void serve_engine_report(struct serve_engine *e, const void *reports, size_t n, const struct engine_stats *stats);

/* The server's thread. */
bool serve_engine_deliver(struct serve_engine *e, struct serve *s); /* all that has been drawn; false: the engine is lost */
void serve_engine_stop(struct serve_engine *e);
void serve_engine_fail(struct serve_engine *e); /* any thread: as if the engine were lost */

#endif
