/* view.h - the page of `verlc view`: its files, and the runs as JSON.
 *
 * Reads only, by run_reader.h; a run that is missing, broken or replaced while the page is open is a message there. */
#ifndef VERLC_VIEW_VIEW_H
#define VERLC_VIEW_VIEW_H

#include "http/server.h"

/* roots: n directories with runs in or below them; borrowed. ERR_INPUT: one is no directory, or none has a run.db. */
struct view;
int view_open(struct view **out, const char *const *roots, int n);
void view_close(struct view *v); /* NULL ok */
/* Of http_server_args; arg is the view. */
int view_answer(void *view, const struct http_get *get, struct http_reply *reply);

/* The page's file of this path, "/" too. False: there is none. The bytes are part of the program. */
bool view_page_file(const char *path, struct http_reply *reply);

#endif
