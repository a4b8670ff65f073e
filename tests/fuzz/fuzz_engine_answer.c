/* fuzz_engine_answer.c - any bytes as what a server of an external engine answers: a response, who it is, that it has new weights.
 *
 * The first byte chooses the kind of server. A sample that is taken has ids of the model, finite log-probs of at most 0, no more
 * tokens than were asked for, and no end token but at its end. */
#include "fuzz.h"

#include "external_engine/server_api.h"

#include <math.h>

enum { VOCAB = 512, MOST = 16, END = 457 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    static const int32_t end[] = {END};
    const struct server_limits limits = {VOCAB, MOST, {end, 1}};
    struct server_identity id;
    struct server_sample s;
    fuzz_quiet();
    if (n == 0) return 0;
    const enum server_kind kind = (enum server_kind)(data[0] % SERVER_KINDS);
    char *text = xstrndup((const char *)data + 1, n - 1); /* as a body comes: with a NUL behind it */
    n = strlen(text);
    if (server_read_sample(&s, kind, text, n, &limits) == 0) {
        CHECK(s.n >= 1 && s.n <= MOST && (s.stopped || s.n == MOST));
        for (int64_t t = 0; t < s.n; t++) {
            CHECK(s.ids[t] >= 0 && s.ids[t] < VOCAB && isfinite(s.logp[t]) && s.logp[t] <= 0);
            CHECK(t + 1 == s.n || s.ids[t] != END);
        }
        server_sample_free(&s);
    }
    if (server_read_identity(&id, text, n) == 0) CHECK(id.model && id.max_len >= 0);
    free(id.model);
    (void)!server_read_update(kind, text, n);
    free(text);
    return 0;
}
