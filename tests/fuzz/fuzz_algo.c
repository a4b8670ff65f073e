/* fuzz_algo.c - requests of `verlc algo` from arbitrary JSON: an answer that prints, or an
 * error with a message. */
#include "fuzz.h"

#include "cmd/algo_json.h"
#include "base/buf.h"
#include "base/json.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    json_t *request = NULL, *answer = NULL;
    struct buf b = {0};
    fuzz_quiet();
    int rc = json_parse(&request, (const char *)data, n, "fuzz");
    fuzz_check_rc(rc);
    if (rc < 0) return 0;
    rc = algo_json(request, "fuzz", NULL, &answer);
    fuzz_check_rc(rc);
    if (rc == 0) fuzz_check_rc(json_dump_line(&b, answer));
    buf_free(&b);
    json_decref(answer);
    json_decref(request);
    return 0;
}
