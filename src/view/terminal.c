/* terminal.c - see terminal.h. */
#include "view/terminal.h"

#include "base/err.h"
#include "base/log.h"
#include "base/encoding/utf8.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>
#include <utf8proc.h>

enum { MIN_WIDTH = 40, MAX_WIDTH = 1000, DEFAULT_WIDTH = 80 };

/* ---- the terminal ---- */

static int output_width(void) {
    struct winsize w;
    const char *columns = getenv("COLUMNS");
    int n = columns ? atoi(columns) : 0;
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &w) == 0 && w.ws_col > 0) n = w.ws_col;
    return n <= 0 ? DEFAULT_WIDTH : n < MIN_WIDTH ? MIN_WIDTH : n > MAX_WIDTH ? MAX_WIDTH : n;
}

int terminal_of_output(struct terminal *t, const char *how) {
    t->width = output_width();
    t->colour = log_colour(STDOUT_FILENO);
    if (strcmp(how, "always") == 0) t->colour = true;
    else if (strcmp(how, "never") == 0) t->colour = false;
    else if (strcmp(how, "auto") != 0) FAIL(ERR_INVAL, "--color %s: expected auto, always or never", how);
    return 0;
}

void term_begin(const struct terminal *t, struct buf *b, const char *sgr) {
    if (t->colour) buf_addf(b, "\x1b[%sm", sgr);
}
void term_end(const struct terminal *t, struct buf *b) {
    if (t->colour) buf_adds(b, "\x1b[0m");
}
void term_add(const struct terminal *t, struct buf *b, const char *sgr, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    char *s = xvasprintf(fmt, ap);
    va_end(ap);
    term_begin(t, b, sgr);
    buf_adds(b, s);
    term_end(t, b);
    free(s);
}

/* ---- text ---- */

void term_text(struct buf *b, const char *s, size_t n, bool lines) {
    char *copy = xmalloc(n + 1);
    memcpy(copy, s, n);
    copy[n] = '\0';
    for (size_t at = 0; at < n; at++) {
        buf_add_visible(b, copy + at, lines);
        at += strlen(copy + at);
        if (at < n) buf_adds(b, "\\x00");
    }
    free(copy);
}

/* The columns of the character at p, and its bytes. */
static int char_width(const char *p, size_t n, int *bytes) {
    utf8proc_int32_t c;
    const utf8proc_ssize_t k = utf8proc_iterate((const utf8proc_uint8_t *)p, (utf8proc_ssize_t)n, &c);
    *bytes = k > 0 ? (int)k : 1;
    return k > 0 ? utf8proc_charwidth(c) : 1;
}

int term_width(const char *s, size_t n) {
    int sum = 0, k;
    for (size_t at = 0; at < n; at += (size_t)k) sum += char_width(s + at, n - at, &k);
    return sum;
}

void term_cell(struct buf *b, const char *s, size_t n, int columns, bool pad) {
    struct buf text = {0};
    int used = 0, k;
    const size_t most = (size_t)columns * 16; /* no more of a long text is looked at */
    const size_t take = n > most ? utf8_cut(s, most) : n;
    term_text(&text, s, take, false);
    for (char *p = text.p; p && *p; p++)
        if (*p == '\t') *p = ' ';
    const bool cut = take < n || term_width(text.p ? text.p : "", text.n) > columns;
    size_t at = 0;
    for (; at < text.n; at += (size_t)k) {
        const int w = char_width(text.p + at, text.n - at, &k);
        if (used + w > columns - (cut ? 1 : 0)) break;
        used += w;
    }
    buf_add(b, text.p ? text.p : "", at);
    if (cut && columns > 0) {
        buf_adds(b, "…");
        used++;
    }
    for (; pad && used < columns; used++) buf_addc(b, ' ');
    buf_free(&text);
}

void term_wrapped(struct buf *b, const char *s, size_t n, int at, int indent, int width) {
    struct buf text = {0};
    term_text(&text, s, n, false);
    bool first = true;
    for (const char *p = text.p ? text.p : ""; *p;) {
        const size_t word = strcspn(p, " "), gap = strspn(p + word, " ");
        const int columns = term_width(p, word);
        if (!first && at + 1 + columns > width) {
            buf_addf(b, "\n%*s", indent, "");
            at = indent;
        } else if (!first) {
            buf_addc(b, ' ');
            at++;
        }
        buf_add(b, p, word);
        at += columns;
        first = false;
        p += word + gap;
    }
    buf_free(&text);
}

/* ---- numbers and times ---- */

void term_number(struct buf *b, double v) {
    const double size = fabs(v);
    if (isnan(v)) buf_adds(b, "-");
    else if (!isfinite(v)) buf_adds(b, v > 0 ? "inf" : "-inf");
    else if (v == floor(v) && size < 1e7) buf_addf(b, "%.0f", v);
    else if (size >= 1e7 || size < 1e-4) buf_addf(b, "%.3g", v);
    else if (size >= 1000) buf_addf(b, "%.0f", v);
    else buf_addf(b, "%.4g", v);
}

void term_duration(struct buf *b, double seconds) {
    const int64_t s = seconds > 0 && seconds < 1e12 ? (int64_t)seconds : 0;
    if (seconds < 1) buf_addf(b, "%.0f ms", seconds > 0 ? 1000 * seconds : 0);
    else if (seconds < 10) buf_addf(b, "%.1f s", seconds);
    else if (s < 60) buf_addf(b, "%lld s", (long long)s);
    else if (s < 3600) buf_addf(b, "%lld:%02lld", (long long)(s / 60), (long long)(s % 60));
    else buf_addf(b, "%lld:%02lld:%02lld", (long long)(s / 3600), (long long)(s / 60 % 60), (long long)(s % 60));
}

void term_when(struct buf *b, double wall) {
    char text[32];
    struct tm tm;
    const time_t t = (time_t)(wall > 0 && wall < 1e11 ? wall : 0);
    if (t == 0 || !localtime_r(&t, &tm)) {
        buf_adds(b, "-");
        return;
    }
    strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S", &tm);
    buf_adds(b, text);
}

void term_bytes(struct buf *b, double bytes) {
    if (bytes >= 0x1p30) buf_addf(b, "%.2f GiB", bytes / 0x1p30);
    else if (bytes >= 0x1p20) buf_addf(b, "%.1f MiB", bytes / 0x1p20);
    else buf_addf(b, "%.0f KiB", bytes / 0x1p10);
}

/* ---- plots ---- */

/* The value on the scale; NaN: a gap. */
static double scaled(double y, bool log) { return !isfinite(y) || (log && y <= 0) ? NAN : log ? log10(y) : y; }

struct canvas {
    uint8_t *cells; /* (height, width) bits of the braille block */
    int width, height;
};

static void dot(struct canvas *c, int x, int y) { /* y from the bottom */
    static const uint8_t bits[4][2] = {{0x01, 0x08}, {0x02, 0x10}, {0x04, 0x20}, {0x40, 0x80}};
    const int row = 4 * c->height - 1 - y;
    c->cells[(int64_t)(row / 4) * c->width + x / 2] |= bits[row % 4][x % 2];
}

/* From the point before to this one: in each column of dots what the line covers there. */
static void line(struct canvas *c, int x0, int y0, int x1, int y1) {
    for (int x = x0; x <= x1; x++) {
        const double left = x1 == x0 ? 0 : fmax(0, (x - x0 - 0.5) / (x1 - x0)),
                     right = x1 == x0 ? 1 : fmin(1, (x - x0 + 0.5) / (x1 - x0));
        const int a = (int)lround(y0 + left * (y1 - y0)), b = (int)lround(y0 + right * (y1 - y0));
        for (int y = a < b ? a : b; y <= (a < b ? b : a); y++) dot(c, x, y);
    }
}

static bool range(const double *v, int64_t n, bool log, double *lo, double *hi) {
    for (int64_t i = 0; i < n; i++) {
        const double y = scaled(v[i], log);
        if (isnan(y)) continue;
        *lo = fmin(*lo, y);
        *hi = fmax(*hi, y);
    }
    return *lo <= *hi;
}

/* The dot of a value on an axis of n dots. */
static int place(double v, double lo, double hi, int n) {
    return hi > lo ? (int)lround((v / 2 - lo / 2) / (hi / 2 - lo / 2) * (n - 1)) : n / 2; /* no overflow */
}

/* a: ranges on the scale. The last point's dot in *px, *py; -1: it has none. */
static void draw(const struct term_plot *p, struct canvas *c, const struct term_axes *a, int *px, int *py) {
    const bool wide = a->x_hi > a->x_lo;
    int before = -1;
    *px = -1;
    for (int64_t i = 0; i < p->n; i++) {
        const double v = scaled(p->y[i], p->log);
        if (isnan(v)) {
            before = -1;
            continue;
        }
        const int x = wide ? place(p->x[i], a->x_lo, a->x_hi, 2 * c->width) : 0, y = place(v, a->y_lo, a->y_hi, 4 * c->height);
        line(c, before < 0 ? x : *px, before < 0 ? y : *py, x, y);
        before = *px = x;
        *py = y;
    }
}

/* Values of a scale. */
static void unscale(struct term_axes *a, bool log) {
    if (!log) return;
    a->y_lo = pow(10, a->y_lo);
    a->y_hi = pow(10, a->y_hi);
}

static void add_braille(struct buf *b, uint8_t dots) {
    const int code = 0x2800 + dots;
    if (dots == 0) buf_addc(b, ' ');
    else buf_addf(b, "%c%c%c", 0xe0 | code >> 12, 0x80 | (code >> 6 & 0x3f), 0x80 | (code & 0x3f));
}

static struct canvas canvas_of(const struct term_plot *p) {
    return (struct canvas){xcalloc((size_t)(p->width * p->height), 1), p->width, p->height};
}

bool term_plot(const struct term_plot *p, char **lines, double *lo, double *hi) {
    struct term_axes a = {.y_lo = INFINITY, .y_hi = -INFINITY};
    int px, py;
    if (!range(p->y, p->n, p->log, &a.y_lo, &a.y_hi)) return false;
    struct canvas c = canvas_of(p);
    a.x_lo = p->x[0];
    a.x_hi = p->x[p->n - 1];
    draw(p, &c, &a, &px, &py);
    for (int row = 0; row < p->height; row++) {
        struct buf b = {0};
        for (int x = 0; x < p->width; x++) add_braille(&b, c.cells[(int64_t)row * p->width + x]);
        lines[row] = buf_take(&b);
    }
    free(c.cells);
    unscale(&a, p->log);
    *lo = a.y_lo;
    *hi = a.y_hi;
    return true;
}

/* n curves, each drawn on a canvas of its own; end: the cell of its last point, -1: none. */
struct drawn {
    const struct term_curve *curve;
    struct canvas *canvas;
    int64_t *end;
    int n;
};

/* One character: a curve's end, else the dots of all curves there, in the colour of one that is alone. */
static void add_cell(const struct drawn *d, int64_t at, const struct terminal *t, struct buf *out) {
    const struct term_curve *const c = d->curve;
    int owner = -1, owners = 0, ends = -1;
    uint8_t dots = 0;
    for (int i = 0; i < d->n; i++) {
        if (d->end[i] == at && ends < 0) ends = i;
        if (!d->canvas[i].cells[at]) continue;
        dots |= d->canvas[i].cells[at];
        owner = i;
        owners++;
    }
    if (ends >= 0) {
        term_add(t, out, c[ends].sgr, "%c", c[ends].mark);
        return;
    }
    if (owners == 1) term_begin(t, out, c[owner].sgr);
    add_braille(out, dots);
    if (owners == 1) term_end(t, out);
}

bool term_plot_curves(const struct term_curve *c, int n, const struct term_plot *shape, const struct terminal *t, struct buf *lines,
                      struct term_axes *axes) {
    struct term_axes a = {INFINITY, -INFINITY, INFINITY, -INFINITY};
    bool any = false;
    for (int i = 0; i < n; i++) {
        if (!range(c[i].y, c[i].n, shape->log, &a.y_lo, &a.y_hi)) continue;
        any = true;
        (void)range(c[i].x, c[i].n, false, &a.x_lo, &a.x_hi);
    }
    if (!any) return false;
    const struct drawn d = {c, xcalloc((size_t)n, sizeof *d.canvas), xcalloc((size_t)n, sizeof *d.end), n};
    for (int i = 0; i < n; i++) {
        const struct term_plot p = {c[i].x, c[i].y, c[i].n, shape->width, shape->height, shape->log};
        int px, py = 0;
        d.canvas[i] = canvas_of(&p);
        draw(&p, &d.canvas[i], &a, &px, &py);
        d.end[i] = px < 0 ? -1 : (int64_t)((4 * p.height - 1 - py) / 4) * p.width + px / 2;
    }
    for (int64_t at = 0; at < (int64_t)shape->width * shape->height; at++) add_cell(&d, at, t, &lines[at / shape->width]);
    for (int i = 0; i < n; i++) free(d.canvas[i].cells);
    free(d.canvas);
    free(d.end);
    unscale(&a, shape->log);
    *axes = a;
    return true;
}
