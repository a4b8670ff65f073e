/* err.c - the thread's last error: message, trace, exit status. Prints nothing
 * except in err_check_failed, the program's only abort. */
#include "base/err.h"

#include "base/encoding/utf8.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static _Thread_local char msg_buf[2048];
static _Thread_local char trace_buf[1024];

const char *err_name(int code) {
    switch (code) {
    case 0: return "ok";
#define X(name, val, status, text) \
    case val: return text;
        ERR_MAP(X)
#undef X
    default: return "unknown error";
    }
}

int err_exit_status(int code) {
    switch (code) {
    case 0: return 0;
#define X(name, val, status, text) \
    case val: return status;
        ERR_MAP(X)
#undef X
    default: return code > 0 ? 0 : 1;
    }
}

const char *err_msg(void) { return msg_buf; }
const char *err_trace(void) { return trace_buf; }

/* The message stays one line of UTF-8, whatever the input that it quotes holds and wherever it was cut. */
static void tidy(void) {
    size_t n = utf8_cut(msg_buf, sizeof msg_buf), k;
    msg_buf[n] = '\0';
    for (char *p = msg_buf; *p; p += k, n -= k) {
        const int step = utf8_step(p, n);
        k = (size_t)(step < 0 ? -step : step);
        if (step < 0) memset(p, '?', k);
        else if ((unsigned char)*p < ' ') *p = ' ';
    }
}

int err_set(int code, const char *file, int line, const char *fmt, ...) {
    va_list ap;
    char text[sizeof msg_buf]; /* an argument may point into msg_buf */
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    memcpy(msg_buf, text, sizeof text);
    tidy();
    snprintf(trace_buf, sizeof trace_buf, "%s:%d", file, line);
    return code;
}

int err_pass(int code, const char *file, int line) {
    size_t n = strlen(trace_buf);
    snprintf(trace_buf + n, sizeof trace_buf - n, " < %s:%d", file, line);
    return code;
}

int err_put_before(int code, const char *file, int line, const char *fmt, ...) {
    va_list ap;
    char text[sizeof msg_buf]; /* an argument may point into msg_buf */
    va_start(ap, fmt);
    int n = vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    if (n < 0) n = 0;
    if ((size_t)n >= sizeof text) n = (int)sizeof text - 1;
    snprintf(text + n, sizeof text - (size_t)n, ": %s", msg_buf);
    memcpy(msg_buf, text, sizeof text);
    tidy();
    return err_pass(code, file, line);
}

int err_put_after(int code, const char *file, int line, const char *fmt, ...) {
    va_list ap;
    const size_t n = strlen(msg_buf);
    va_start(ap, fmt);
    vsnprintf(msg_buf + n, sizeof msg_buf - n, fmt, ap);
    va_end(ap);
    tidy();
    return err_pass(code, file, line);
}

void err_save(struct err_saved *s) {
    memcpy(s->msg, msg_buf, sizeof msg_buf);
    memcpy(s->trace, trace_buf, sizeof trace_buf);
}

void err_restore(const struct err_saved *s) {
    memcpy(msg_buf, s->msg, sizeof msg_buf);
    memcpy(trace_buf, s->trace, sizeof trace_buf);
}

void err_check_failed(const char *what, const char *file, int line) {
    fprintf(stderr, "%s:%d: CHECK failed: %s\n", file, line, what);
    abort();
}
