/* fuzz_helper.c - what a helper process may send: arbitrary bytes as the other end of its
 * socket.  The first byte says how many requests are pending, the second whether it has
 * answered its init.  helper.c is included whole, so that no process has to be started.
 * What comes out is at most one reply a request, and then one error. */
#include "fuzz.h"

#include "helper/helper.c"

#include <fcntl.h>

enum { MAX_BYTES = 1 << 16 /* fits the socket's buffer */, MAX_STEPS = 64 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    int pair[2];
    struct helper h = {.a = {.module = "fuzz", .max_reply_bytes = 1 << 12}, .proc = HELPER__NOT_RUNNING};
    int64_t replies = 0;
    int rc = 0;
    if (n < 2 || n > MAX_BYTES) return 0;
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) == 0);
    CHECK(send(pair[1], data + 2, n - 2, 0) == (ssize_t)(n - 2));
    close(pair[1]);
    h.proc.sock = pair[0];
    const int64_t sent = data[0] % 8;
    bool answered[9] = {0};
    h.pending = xcalloc(8, sizeof *h.pending);
    h.cap_pending = 8;
    for (; h.n_pending < sent; h.n_pending++) h.pending[h.n_pending] = h.n_pending + 1;
    h.last_id = sent;
    h.ready = data[1] % 2;
    for (int i = 0; i < MAX_STEPS && rc >= 0; i++) {
        struct helper__reply r = {0};
        rc = helper__step(&h, &r);
        fuzz_check_rc(rc);
        if (rc != 1) continue;
        CHECK(r.id >= 1 && r.id <= sent && !answered[r.id] && (r.rc < 0 || r.value));
        fuzz_check_rc(r.rc);
        answered[r.id] = true;
        replies++;
        json_decref(r.value);
    }
    CHECK(rc < 0 && replies <= sent); /* the stream has ended: it is dead */
    CHECK(h.proc.sock < 0 && h.n_pending == 0 && h.in.n == 0 && h.out.n == 0);
    free(h.pending);
    return 0;
}
