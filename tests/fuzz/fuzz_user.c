/* fuzz_user.c - what comes from outside with an algorithm of the user's: first byte 0: the name
 * FILE:FUNCTION; 1: a compiler's output, of which one line is shown; 2: a helper's reply, whose
 * arrays have the elements that were asked for or are refused, and pack again to the same text. */
#include "fuzz.h"

#include "algo/custom/user_int.h"
#include "base/encoding/base64.h"
#include "base/json.h"

static void name(const char *text) {
    char *path = NULL, *function = NULL;
    bool python;
    const int rc = algo__user_parse(text, &path, &function, &python);
    fuzz_check_rc(rc);
    CHECK(rc < 0 || (algo_user_named(text) && *function && !strpbrk(path, "\"\\\n")));
    free(path);
    free(function);
}

static void output(const char *text) {
    char *line = algo__first_error(text);
    CHECK(*line && strlen(line) <= 500 && !strpbrk(line, "\r\n"));
    free(line);
}

static void reply(const char *text, size_t n) {
    json_t *r = NULL;
    if (json_parse(&r, text, n, "fuzz") < 0) return;
    for (int64_t count = 0; count < 8; count++) {
        double x[8] = {0};
        const int rc = algo__unpack_f64(r, "loss", count, x);
        fuzz_check_rc(rc);
        if (rc < 0) continue;
        char *again = base64_text(x, (size_t)count * sizeof *x);
        CHECK(strlen(again) == json_string_length(json_object_get(r, "loss")));
        free(again);
    }
    json_decref(r);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    fuzz_quiet();
    if (n == 0) return 0;
    char *text = xstrndup((const char *)data + 1, n - 1);
    if (data[0] % 3 == 0) name(text);
    else if (data[0] % 3 == 1) output(text);
    else reply(text, strlen(text));
    free(text);
    return 0;
}
