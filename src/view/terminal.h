/* terminal.h - text for a terminal: columns of characters, colours, numbers, plots of braille characters.
 *
 * Everything goes into a buf; nothing is printed here. Text from outside comes through the functions of this file, which
 * make control characters visible. */
#ifndef VERLC_VIEW_TERMINAL_H
#define VERLC_VIEW_TERMINAL_H

#include "base/buf.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct terminal {
    int width;   /* columns */
    bool colour; /* escape sequences may be written */
};
/* Of standard output: its width, else COLUMNS, else 80; colours as log_colour says. how: "auto", "always" or
 * "never". ERR_INVAL: another word. */
int terminal_of_output(struct terminal *t, const char *how);

/* ---- colours: an SGR sequence, or nothing ---- */
#define TERM_BOLD "1"
#define TERM_DIM "2"
#define TERM_RED "31"
#define TERM_GREEN "32"
#define TERM_YELLOW "33"
#define TERM_BLUE "34"
#define TERM_MAGENTA "35"
#define TERM_CYAN "36"
void term_begin(const struct terminal *t, struct buf *b, const char *sgr);
void term_end(const struct terminal *t, struct buf *b);
void term_add(const struct terminal *t, struct buf *b, const char *sgr, const char *fmt, ...) __attribute__((format(printf, 4, 5)));

/* ---- text from outside ---- */
/* n bytes of UTF-8, NUL and control characters visible; lines: newlines stay. */
void term_text(struct buf *b, const char *s, size_t n, bool lines);
/* Its columns on a terminal: wide characters have two, combining ones none. */
int term_width(const char *s, size_t n);
/* At most so many columns of a text, in one line, "…" where it is cut; padded with spaces to them if pad. */
void term_cell(struct buf *b, const char *s, size_t n, int columns, bool pad);

/* n bytes, wrapped at spaces to `width` columns; the first line goes on at column `at`, the others begin with `indent` spaces. */
void term_wrapped(struct buf *b, const char *s, size_t n, int at, int indent, int width);

/* ---- numbers and times ---- */
void term_number(struct buf *b, double v);         /* four digits; "-": NaN */
void term_duration(struct buf *b, double seconds); /* 12 ms, 3.4 s, 12 s, 3:04, 1:02:03 */
void term_when(struct buf *b, double wall);        /* local date and time; "-": 0 */
void term_bytes(struct buf *b, double bytes);      /* 12.3 MiB */

/* ---- plots ---- */
struct term_plot {
    const double *x, *y; /* (n) x ascending; y NaN: a gap */
    int64_t n;
    int width, height; /* characters; one has 2 x 4 dots */
    bool log;          /* log scale; values <= 0 are gaps */
};
/* height lines of width braille characters, without newlines, caller frees each; the y range that they show. False: nothing
 * to show, and no lines. */
bool term_plot(const struct term_plot *p, char **lines, double *lo, double *hi);

/* Curves over each other, on common axes: x and y ranges are those of all of them. */
struct term_curve {
    const double *x, *y; /* as of a plot */
    int64_t n;
    const char *sgr; /* its colour */
    char mark;       /* stands at its last point, so that it is identified without colours too */
};
struct term_axes {
    double x_lo, x_hi, y_lo, y_hi;
};
/* shape: width, height and log of a plot. Appends one line to each of lines[height]. A place that several curves share has no
 * colour. False: nothing to show, and nothing is appended. */
bool term_plot_curves(const struct term_curve *c, int n, const struct term_plot *shape, const struct terminal *t, struct buf *lines,
                      struct term_axes *axes);

#endif
