/* log.h - what a person reads on stderr. Results go to stdout, metrics to track. */
#ifndef VERLC_BASE_LOG_H
#define VERLC_BASE_LOG_H

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

enum log_level { LOG_DEBUG, LOG_INFO, LOG_WARN, LOG_ERROR, LOG_OFF };

/* Set once from VERL_LOGGING_LEVEL (DEBUG, INFO, WARN, ERROR); default INFO. */
void log_set_level(enum log_level level);
enum log_level log_level(void);

void log_debug(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
void log_info(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
void log_warn(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
void log_error(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* A line that another process of the run has printed, whatever the level. */
void log_child(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* "note: ..." for an accepted setting that means something else here; each
 * distinct text is printed once in a process. */
void log_note(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* Whether what is written to this descriptor may have colours: a terminal, without NO_COLOR or TERM=dumb; VERLC_COLOR=always or
 * never says otherwise. Warnings and errors are coloured by it. */
bool log_colour(int fd);

/* A live progress line owns the last terminal line: it registers how to clear
 * and redraw itself, so that log lines do not tear it.  NULL unregisters. */
void log_set_redraw(void (*clear)(void *), void (*draw)(void *), void *arg);

#ifdef __cplusplus
}
#endif
#endif
