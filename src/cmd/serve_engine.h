/* serve_engine.h - an engine on one thread as the backend of a server on another.
 *
 * The engine's thread is the one that opened the device. What is submitted and cancelled crosses by one queue, what is drawn by
 * another; the server's thread is woken for it.
 * Invariant: a ticket is reported in the order in which it was drawn, and never after its cancellation has been read. */
#ifndef VERLC_CMD_SERVE_ENGINE_H
#define VERLC_CMD_SERVE_ENGINE_H

#include "serve/serve.h"

struct serve_engine;
int serve_engine_create(struct serve_engine **out, struct decoder *d, const struct tokenizer *tok);
void serve_engine_destroy(struct serve_engine *e); /* NULL ok */
struct serve_backend serve_engine_backend(struct serve_engine *e);
/* The server that is woken. Before serve_engine_run. */
void serve_engine_attach(struct serve_engine *e, struct http_server *http);

/* The engine's thread: steps until serve_engine_stop. An error is the engine's; the server is woken then. */
int serve_engine_run(struct serve_engine *e);

/* The server's thread. */
bool serve_engine_deliver(struct serve_engine *e, struct serve *s); /* all that has been drawn; false: the engine is lost */
void serve_engine_stop(struct serve_engine *e);
void serve_engine_fail(struct serve_engine *e); /* any thread: as if the engine were lost */

#endif
