/* fuzz_comm.c - what another process may send or set: a frame, the JSON messages of ranks and controller, the rendezvous file,
 * a launcher's environment; the first byte picks which. Each is an error with a message, or values in their bounds. */
#include "fuzz.h"

#include "base/json.h"
#include "comm/comm_int.h"
#include "ranks/launcher.h"

enum { FRAME, JOIN, PULSE, ARRAYS, RENDEZVOUS, ENVIRONMENT, N_READERS };

static void read_frame(const uint8_t *p, size_t n) {
    struct comm__frame f;
    const int rc = comm__frame_read(&f, p, n, "rank 1");
    fuzz_check_rc(rc);
    if (rc >= 0) CHECK(f.kind < COMM__KINDS && f.offset <= f.total && n - sizeof f <= f.total - f.offset);
}

static void read_arrays(const json_t *m) {
    const json_t *first = json_array_get(json_object_get(m, "arrays"), 0);
    struct comm__arrays a;
    if (json_integer_value(first) > 1 << 20) return; /* would be allocated */
    for (size_t i = 0; i < json_array_size(json_object_get(m, "arrays")); i++)
        if (json_integer_value(json_array_get(json_object_get(m, "arrays"), i)) > 1 << 20) return;
    const int rc = comm__arrays_read(&a, m, true, "rank 1");
    fuzz_check_rc(rc);
    for (int i = 0; rc >= 0 && i < a.n; i++)
        if (a.p[i].n) ((uint8_t *)a.p[i].p)[a.p[i].n - 1] = 1;
    if (rc >= 0) comm__arrays_free(a.p, a.n, a.map);
}

static void read_json(int which, const char *p, size_t n) {
    struct comm__join j;
    struct comm__heartbeat pulse;
    json_t *m = NULL;
    int rc = json_parse(&m, p, n, "rank 1");
    if (rc >= 0 && which == ARRAYS) read_arrays(m);
    else if (rc >= 0) rc = which == JOIN ? comm__join_read(&j, m, "rank 1") : comm__heartbeat_read(&pulse, m, "rank 1");
    fuzz_check_rc(rc);
    if (rc >= 0 && which == JOIN) CHECK(j.rank < COMM_MOST_RANKS && strlen(j.host) < COMM__NAME);
    json_decref(m);
}

/* Lines NAME=VALUE. */
static void read_environment(const char *p, size_t n) {
    char *text = xstrndup(p, n), *at = text, *env[64];
    struct launch l;
    int k = 0;
    for (char *line; k < 63 && (line = strsep(&at, "\n")) != NULL;) env[k++] = line;
    env[k] = NULL;
    const int rc = launch_read(&l, env);
    fuzz_check_rc(rc);
    if (rc >= 0) CHECK(l.rank >= 0 && l.rank < l.size && l.local_rank >= 0 && (!l.local_size || l.local_rank < l.local_size));
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    struct comm_where w;
    if (n == 0) return 0;
    fuzz_quiet();
    const char *const text = (const char *)data + 1;
    switch (data[0] % N_READERS) {
    case FRAME: read_frame(data + 1, n - 1); break;
    case RENDEZVOUS: fuzz_check_rc(comm__rendezvous_parse(&w, "7/0", text, n - 1, ".rendezvous")); break;
    case ENVIRONMENT: read_environment(text, n - 1); break;
    default: read_json(data[0] % N_READERS, text, n - 1);
    }
    return 0;
}
