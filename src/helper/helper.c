/* helper.c - one helper: frames over its socket, deadlines, and what to say when
 * it fails.  A frame is a 4-byte little-endian length and that many bytes of JSON:
 *   to it    {"id": 0, "max_reply_bytes": N, "init": ...}, then {"id": N, "timeout_s": T, "req": ...}
 *   from it  {"id": N, "ok": ...} or {"id": N, "error": text, "code": name}
 * Ids count up from 1 in each process.  Replies may come in any order; only helper_recv
 * insists on that of the requests.
 * Invariant: a reply names a pending request, once; whatever breaks this ends the
 * process, so a late reply can never answer a later request. */
#include "helper/helper_int.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/json.h"
#include "base/log.h"
#include "base/encoding/utf8.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define DEFAULT_MEMORY ((int64_t)8 << 30)
#define DEFAULT_REPLY ((int64_t)256 << 20)
#define DEFAULT_START_S 60.0
enum { HEAD = 4, SLICE_MS = 100 };

int helper_create(struct helper **out, const struct helper_args *args) {
    int rc = 0;
    struct helper *h = xcalloc(1, sizeof *h);
    h->a = *args;
    h->proc = HELPER__NOT_RUNNING;
    h->a.module = xstrdup(args->module);
    h->a.init = args->init ? json_deep_copy(args->init) : json_null();
    if (h->a.memory_bytes == 0) h->a.memory_bytes = DEFAULT_MEMORY;
    if (h->a.max_reply_bytes <= 0) h->a.max_reply_bytes = DEFAULT_REPLY;
    if (h->a.max_reply_bytes > UINT32_MAX) h->a.max_reply_bytes = UINT32_MAX;
    if (!(h->a.start_timeout_s > 0)) h->a.start_timeout_s = DEFAULT_START_S;
    TRYG(helper__find_python(args->python, &h->python), fail);
    TRYG(helper_find_dir(h->a.module, &h->dir), fail);
    *out = h;
    return 0;
fail:
    helper_destroy(h);
    return rc;
}

int helper__queue_frame(struct helper *h, const char *key, const json_t *value, int64_t id, double timeout_s) {
    const size_t start = h->out.n;
    int rc = 0;
    TRYG(buf_add(&h->out, "\0\0\0\0", HEAD), fail);
    TRYG(buf_addf(&h->out, "{\"id\":%lld,", (long long)id), fail);
    if (id == 0) TRYG(buf_addf(&h->out, "\"max_reply_bytes\":%lld,", (long long)h->a.max_reply_bytes), fail);
    if (timeout_s > 0) TRYG(buf_addf(&h->out, "\"timeout_s\":%.17g,", timeout_s), fail);
    TRYG(buf_addf(&h->out, "\"%s\":", key), fail);
    TRYG(json_dump_line(&h->out, value), fail);
    TRYG(buf_addc(&h->out, '}'), fail);
    const size_t n = h->out.n - start - HEAD;
    if (n > UINT32_MAX) FAILG(fail, ERR_INVAL, "helper %s: a request of %zu bytes is over 4 GiB", h->a.module, n);
    for (int i = 0; i < HEAD; i++) h->out.p[start + (size_t)i] = (char)(n >> (8 * i) & 0xff);
    return 0;
fail:
    h->out.n = start;
    return rc;
}

void helper_destroy(struct helper *h) {
    if (!h) return;
    if (h->proc.process.pid > 0) {
        /* a helper that still owes replies gets no request, it is only ended */
        const double grace = h->n_pending == 0 ? 2.0 : 0.0;
        helper__end(h, grace);
    }
    buf_free(&h->out);
    buf_free(&h->in);
    free(h->pending);
    json_decref((json_t *)(uintptr_t)h->a.init);
    free((char *)(uintptr_t)h->a.module);
    free(h->python);
    free(h->dir);
    free(h);
}

/* --- one step --- */

static int code_of(const char *name) {
#define X(n, val, status, text) \
    if (strcmp(name, #n) == 0) return (val);
    ERR_MAP(X)
#undef X
    return ERR_HELPER;
}

static uint32_t frame_len(const char *p) {
    const unsigned char *u = (const unsigned char *)p;
    return (uint32_t)u[0] | (uint32_t)u[1] << 8 | (uint32_t)u[2] << 16 | (uint32_t)u[3] << 24;
}

/* Takes one whole frame out of h->in. 1: *frame (new reference); 0: not all there yet. */
static int take_frame(struct helper *h, json_t **frame) {
    if (h->in.n < HEAD) return 0;
    const size_t n = frame_len(h->in.p);
    if ((int64_t)n > h->a.max_reply_bytes) {
        char what[128];
        snprintf(what, sizeof what, "sent a reply of %zu bytes (limit %lld) or garbage", n, (long long)h->a.max_reply_bytes);
        return helper__died(h, what);
    }
    if (h->in.n < HEAD + n) return 0;
    json_error_t e;
    json_t *v = json_loadb(h->in.p + HEAD, n, JSON_ALLOW_NUL, &e);
    if (!json_is_object(v)) {
        json_decref(v);
        return helper__died(h, "sent a reply that is not a JSON object");
    }
    h->in.n -= HEAD + n;
    memmove(h->in.p, h->in.p + HEAD + n, h->in.n);
    *frame = v;
    return 1;
}

static int io_write(struct helper *h) {
    while (h->out_pos < h->out.n) {
        const ssize_t n = send(h->proc.sock, h->out.p + h->out_pos, h->out.n - h->out_pos, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && (errno == EAGAIN || errno == EPIPE || errno == ECONNRESET)) return 0; /* a death shows in io_read */
        if (n < 0) return helper__died(h, "cannot be written to");
        h->out_pos += (size_t)n;
    }
    buf_reset(&h->out);
    h->out_pos = 0;
    return 0;
}

/* 0: all that was there is read; 1: end of the stream. */
static int io_read(struct helper *h) {
    char chunk[1 << 16];
    for (;;) {
        const ssize_t n = recv(h->proc.sock, chunk, sizeof chunk, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) return 0;
        if (n <= 0) return 1;
        TRY(buf_add(&h->in, chunk, (size_t)n));
        if (n < (ssize_t)sizeof chunk) return 0;                      /* more will wake poll */
        if ((int64_t)h->in.n > h->a.max_reply_bytes + HEAD) return 0; /* take_frame judges it first */
    }
}

/* Takes an id out of the pending ones; false: it is not among them. */
static bool settle(struct helper *h, const json_t *id) {
    for (int64_t i = 0; json_is_integer(id) && i < h->n_pending; i++) {
        if (h->pending[i] != json_integer_value(id)) continue;
        h->n_pending--;
        memmove(h->pending + i, h->pending + i + 1, (size_t)(h->n_pending - i) * sizeof *h->pending);
        return true;
    }
    return false;
}

/* 1: a reply frame is one request's value or error; 0: it answered the init; < 0: the process has exited. */
static int give_reply(struct helper *h, json_t *frame, struct helper__reply *r) {
    const json_t *id = json_object_get(frame, "id"), *text = json_object_get(frame, "error");
    json_t *ok = json_object_get(frame, "ok");
    const bool known = h->ready ? settle(h, id) : json_is_integer(id) && json_integer_value(id) == 0;
    if (!known || (!ok && !json_is_string(text))) {
        json_decref(frame);
        return helper__died(h, "broke the protocol");
    }
    *r = (struct helper__reply){.id = (int64_t)json_integer_value(id),
                                .value = h->ready && ok ? json_incref(ok) : NULL,
                                .last = json_is_true(json_object_get(frame, "last"))};
    if (!ok) {
        const json_t *name = json_object_get(frame, "code");
        const int code = code_of(json_is_string(name) ? json_string_value(name) : "");
        r->rc = err_set(code, __FILE__, __LINE__, "%.1023s (helper %s)", json_string_value(text), h->a.module);
    }
    json_decref(frame);
    if (h->ready) return 1;
    if (r->rc == 0) h->ready = true;
    else helper__kill(h); /* refused its init: useless, and the pending requests with it */
    return r->rc;
}

int helper__step(struct helper *h, struct helper__reply *r) {
    for (bool ended = false;;) {
        json_t *frame;
        const int got = take_frame(h, &frame);
        if (got < 0) return got;
        if (got == 1) {
            const int rc = give_reply(h, frame, r);
            if (rc != 0) return rc;
            continue; /* the start was answered; its first reply may be here as well */
        }
        if (ended) return helper__died(h, NULL);
        const size_t before = h->in.n;
        /* Looked at before the read, so that its last reply is not missed.  A grandchild
         * that keeps the socket open must not hide the helper's death. */
        const bool exited = process_exited(&h->proc.process);
        helper__drain_output(h);
        TRY(io_write(h));
        const int rc = io_read(h);
        if (rc < 0) return rc;
        ended = rc == 1 || exited;
        if (!ended && h->in.n == before) return 0;
    }
}

void helper__fds(const struct helper *h, struct pollfd fds[HELPER__N_FDS]) {
    fds[0] = (struct pollfd){h->proc.sock, POLLIN, 0};
    if (h->out_pos < h->out.n) fds[0].events |= POLLOUT;
    fds[1] = (struct pollfd){h->proc.err, POLLIN, 0};
}

bool helper__ready(const struct helper *h) { return h->ready; }
double helper__start_deadline(const struct helper *h) { return h->start_deadline; }
int64_t helper_pending(const struct helper *h) { return h->n_pending; }

/* --- requests --- */

int helper__send(struct helper *h, const json_t *request, double timeout_s, int64_t *id) {
    TRY(helper__ensure_started(h));
    TRY(helper__queue_frame(h, "req", request, h->last_id + 1, timeout_s));
    *id = ++h->last_id;
    xgrow((void **)&h->pending, &h->cap_pending, h->n_pending + 1, sizeof *h->pending);
    h->pending[h->n_pending++] = *id;
    if (h->a.cpu_s > 0) process_grant_cpu(&h->proc.process, h->a.cpu_s * helper_pending(h));
    return io_write(h);
}

int helper_send(struct helper *h, const json_t *request) {
    int64_t id;
    return helper__send(h, request, 0, &id);
}

int helper_recv(struct helper *h, double timeout_s, json_t **reply) {
    struct helper__reply r;
    if (helper_pending(h) == 0) FAIL(ERR_HELPER, "helper %s: no request is pending (lost with an earlier failure)", h->a.module);
    const int64_t oldest = h->pending[0];
    double deadline = 0;
    for (;;) {
        const int rc = helper__step(h, &r);
        if (rc < 0) return rc;
        if (rc == 1 && r.id != oldest) {
            json_decref(r.value);
            return helper__died(h, "broke the protocol: it answered out of order");
        }
        if (rc == 1) {
            *reply = r.value;
            return r.rc;
        }
        if (h->ready && deadline == 0) deadline = clock_awake() + timeout_s;
        int ms = clock_poll_ms(h->ready ? deadline : h->start_deadline);
        if (ms == 0) return helper__expire(h, timeout_s);
        if (h->a.check) TRY(h->a.check());
        struct pollfd fds[HELPER__N_FDS];
        helper__fds(h, fds);
        /* Slices, since the death of a helper whose children hold the socket wakes nobody. */
        if (poll(fds, HELPER__N_FDS, ms < SLICE_MS ? ms : SLICE_MS) < 0 && errno != EINTR)
            FAIL(ERR_INTERNAL, "poll: %s", strerror(errno));
    }
}

int helper_call(struct helper *h, const json_t *request, double timeout_s, json_t **reply) {
    CHECK(helper_pending(h) == 0); /* else the reply would be another request's */
    TRY(helper_send(h, request));
    return helper_recv(h, timeout_s, reply);
}
