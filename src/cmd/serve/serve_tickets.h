/* serve_tickets.h - the samples of an engine by the tickets of a server's requests, and what is drawn of them as bytes, which
 * another thread or process passes on to the server.
 *
 * Knows neither threads nor ranks: who calls it has the device.
 * Invariant: a ticket's tokens are reported once and in the order in which they were drawn, never after its cancellation. */
#ifndef VERLC_CMD_SERVE_SERVE_TICKETS_H
#define VERLC_CMD_SERVE_SERVE_TICKETS_H

#include "base/buf.h"
#include "serve/serve.h"

struct serve_tickets;
/* part: called after each part of a burst that was reported; NULL: not wanted. */
int serve_tickets_create(struct serve_tickets **out, struct decoder *d, const struct tokenizer *tok, int (*part)(void *arg),
                         void *arg);
void serve_tickets_destroy(struct serve_tickets *t); /* NULL ok */
/* What the engine refuses is a report. */
void serve_tickets_submit(struct serve_tickets *t, const struct engine_request *r, uint64_t ticket);
void serve_tickets_cancel(struct serve_tickets *t, uint64_t ticket); /* of one that there is not: nothing happens */
int serve_tickets_step(struct serve_tickets *t);                     /* 1: work remains */
struct engine_stats serve_tickets_stats(const struct serve_tickets *t);
struct buf *serve_tickets_reports(struct serve_tickets *t); /* since the caller has reset it */

/* Gives n bytes of reports to the server, on its thread; s NULL: only looks whether they are whole. ERR_FORMAT: they are not. */
int serve_reports_read(const void *p, size_t n, struct serve *s);

#endif
