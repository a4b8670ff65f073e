/* fuzz_sandbox.c - any bytes as a request of `verlc sandbox --request`: read or refused, and what is read is what a run takes.
 * No program is run. */
#include "fuzz.h"

#include "sandbox/request.h"

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n) {
    struct sandbox_request *r = xcalloc(1, sizeof *r);
    const int rc = sandbox_request_read(r, (const char *)p, n);
    fuzz_check_rc(rc);
    if (rc == 0) {
        size_t bytes = r->args.n_stdin;
        CHECK(r->args.n_files <= SANDBOX_MAX_FILES && (r->args.stdin_data || bytes == 0));
        for (int i = 0; i < r->args.n_files; i++) bytes += r->args.files[i].n + strlen(r->args.files[i].name);
        for (const char *const *a = r->args.argv; *a; a++) bytes += strlen(*a);
        for (const char *const *d = r->args.read_dirs; *d; d++) bytes += strlen(*d);
        CHECK(bytes <= 2 * n); /* escapes only shorten */
    }
    sandbox_request_free(r);
    free(r);
    /* as the output of a program */
    struct sandbox_result result = {.end = SANDBOX_EXITED};
    buf_add(&result.out, p, n);
    json_t *o = sandbox_result_json(&result);
    CHECK(o && json_string_length(json_object_get(o, "stdout")) <= 3 * n);
    json_decref(o);
    sandbox_result_free(&result);
    return 0;
}
