/* view_int.h - what the files of the page's answers share. Private to view.
 *
 * An answer is a function of view.c's table: it fills the reply, or its error is what the page shows. */
#ifndef VERLC_VIEW_VIEW_INT_H
#define VERLC_VIEW_VIEW_INT_H

#include "view/run_reader.h"
#include "view/view.h"

/* The reader of the run that the request names, borrowed until the next call. ERR_INPUT: there is none. */
int view__reader(struct view *v, const struct http_get *g, struct run_reader **out);
/* The parameter `validation`, 0 or 1; absent: 0. */
int view__is_validation(const struct http_get *g, bool *out);
int view__send(struct http_reply *reply, json_t *o); /* takes o over */

/* ---- values; new references ---- */
json_t *view__number(double v); /* null: not finite */
json_t *view__text(const char *p, size_t n);
json_t *view__text0(const char *p); /* NULL: null */
json_t *view__base64(const void *data, size_t n);
json_t *view__steps(const int64_t *v, int64_t n); /* in base64 */

/* ---- answers of view_samples.c ---- */
int view__steps_answer(struct view *v, const struct http_get *g, struct http_reply *reply);
int view__samples(struct view *v, const struct http_get *g, struct http_reply *reply);
int view__excerpts(struct view *v, const struct http_get *g, struct http_reply *reply);
int view__group(struct view *v, const struct http_get *g, struct http_reply *reply);
int view__prompt(struct view *v, const struct http_get *g, struct http_reply *reply);
int view__tokens(struct view *v, const struct http_get *g, struct http_reply *reply);
int view__errors(struct view *v, const struct http_get *g, struct http_reply *reply);
int view__search(struct view *v, const struct http_get *g, struct http_reply *reply);

#endif
