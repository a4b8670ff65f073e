/* err.h - one error convention for the whole program.
 *
 * A function that can fail for reasons outside the program (files, devices,
 * helpers, user input) returns int: 0 (or a count >= 0) on success, a negative
 * ERR_* code otherwise.  The code says what kind of failure it is and with it
 * the exit status; the thread's message says what, where and what to do, in
 * one line for the user; the trace says which lines of C it passed through,
 * for the developer.  Programming mistakes are not errors: they stop at CHECK().
 *
 * Invariant: whoever returns a negative code has set the message. */
#ifndef VERLC_BASE_ERR_H
#define VERLC_BASE_ERR_H

#ifdef __cplusplus
extern "C" {
#endif

/* name, code, exit status, text */
#define ERR_MAP(X)                                                          \
    X(INVAL, -1, 2, "invalid argument")  /* command line, configuration */  \
    X(INPUT, -2, 3, "cannot read input") /* input data or model files */    \
    X(FORMAT, -3, 3, "malformed input")                                     \
    X(UNSUPPORTED, -4, 3, "unsupported") /* a feature of an input */        \
    X(NOMEM, -5, 4, "out of memory")                                        \
    X(IO, -6, 4, "input/output error") /* writing: disk full, denied */     \
    X(DEVICE, -7, 4, "device error")                                        \
    X(NUMERIC, -8, 5, "numerical failure")                                  \
    X(TIMEOUT, -9, 6, "deadline passed")                                    \
    X(HELPER, -10, 1, "helper process failed")                              \
    X(RANK, -11, 1, "a rank of the group failed")                           \
    X(SIGNAL, -12, 1, "interrupted by a signal") /* exit is 128 + signal */ \
    X(INTERNAL, -13, 1, "internal error")

enum err {
    ERR_OK = 0,
#define X(name, val, status, text) ERR_##name = (val),
    ERR_MAP(X)
#undef X
};

const char *err_name(int code);
int err_exit_status(int code); /* DESIGN section 7 */
const char *err_msg(void);     /* this thread's last message, never NULL */
const char *err_trace(void);   /* its "file:line" chain, innermost first */

/* Records code and message, starts the trace; returns code. */
int err_set(int code, const char *file, int line, const char *fmt, ...) __attribute__((format(printf, 4, 5)));
/* Appends "file:line" to the trace; returns code. */
int err_pass(int code, const char *file, int line);
/* Puts "prefix: " in front of the message ("loading model DIR: ..."), or text behind it, and appends "file:line" to the
 * trace; returns code. */
int err_put_before(int code, const char *file, int line, const char *fmt, ...) __attribute__((format(printf, 4, 5)));
int err_put_after(int code, const char *file, int line, const char *fmt, ...) __attribute__((format(printf, 4, 5)));
/* Message and trace, to be there again after calls that may fail on their own. */
struct err_saved {
    char msg[2048], trace[1024];
};
void err_save(struct err_saved *s);
void err_restore(const struct err_saved *s);
void err_check_failed(const char *what, const char *file, int line) __attribute__((noreturn));

/* The code is returned as it stands, so that the compiler sees that a failure is negative. */
#define FAIL(code, ...) return (err_set((code), __FILE__, __LINE__, __VA_ARGS__), (code))
#define TRY(call)                                                                 \
    do {                                                                          \
        int try_rc_ = (call);                                                     \
        if (try_rc_ < 0) return (err_pass(try_rc_, __FILE__, __LINE__), try_rc_); \
    } while (0)
#define err_wrap(code, ...) err_put_before((code), __FILE__, __LINE__, __VA_ARGS__)
#define err_append(code, ...) err_put_after((code), __FILE__, __LINE__, __VA_ARGS__)
/* For functions with cleanup: need a local "int rc" and the label. */
#define FAILG(label, code, ...)                           \
    do {                                                  \
        err_set((code), __FILE__, __LINE__, __VA_ARGS__); \
        rc = (code);                                      \
        goto label;                                       \
    } while (0)
#define TRYG(call, label)                     \
    do {                                      \
        rc = (call);                          \
        if (rc < 0) {                         \
            err_pass(rc, __FILE__, __LINE__); \
            goto label;                       \
        }                                     \
    } while (0)
/* Never compiled out, unlike assert(). Not for checking input. */
#define CHECK(cond) ((cond) ? (void)0 : err_check_failed(#cond, __FILE__, __LINE__))

#ifdef __cplusplus
}
#endif
#endif
