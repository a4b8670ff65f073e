/* fuzz_score.c - a request of `verlc score`: a line of arbitrary bytes, without a model. score.c is included whole, for its
 * reader is its own.  What is accepted has ids of the vocabulary and a response in them. */
#include "fuzz.h"

#include "cmd/score.c"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    fuzz_quiet();
    struct score s = {.vocab = 512};
    char *line = xstrndup((const char *)data, n);
    const int rc = read_request(&s, line, n, 1);
    fuzz_check_rc(rc);
    CHECK((rc == 0) == (s.n == 1));
    for (int64_t k = 0; s.n == 1 && k < s.rq[0].n; k++) CHECK(s.rq[0].ids[k] >= 0 && s.rq[0].ids[k] < s.vocab);
    if (s.n == 1) CHECK(s.rq[0].start >= 1 && s.rq[0].start <= s.rq[0].n && s.longest == s.rq[0].n);
    for (int64_t i = 0; i < s.n; i++) free(s.rq[i].ids);
    free(s.rq);
    free(line);
    return 0;
}
