/* request.h - a run of the sandbox as JSON (`verlc sandbox --request`). */
#ifndef VERLC_SANDBOX_REQUEST_H
#define VERLC_SANDBOX_REQUEST_H

#include "sandbox/sandbox.h"

#include <jansson.h>

enum { SANDBOX_MAX_ARGS = 256 };
struct sandbox_request {
    json_t *json; /* owned; the strings below are its */
    const char *argv[SANDBOX_MAX_ARGS + 1], *read_dirs[SANDBOX_MAX_ARGS + 1];
    struct sandbox_file files[SANDBOX_MAX_FILES];
    struct sandbox_args args; /* of all the above, with the default limits; the request's place in memory is to stay */
};
/* {"argv": [...], "stdin": text, "files": {name: text}, "read": [directory, ...]} into *r, which is zeroed. ERR_FORMAT. Free it
 * in either case. */
int sandbox_request_read(struct sandbox_request *r, const char *text, size_t n);
void sandbox_request_free(struct sandbox_request *r);
/* {"end", "status", "stdout", "stderr", "wall_s", "peak_bytes"}; a new reference. */
json_t *sandbox_result_json(const struct sandbox_result *r);

#endif
