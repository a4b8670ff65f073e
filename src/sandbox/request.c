/* request.c - what to run as JSON, and what happened as JSON: `verlc sandbox --request`.
 * Knows no limits: they come from the caller, never from the request, which may hold a model's words.
 * Invariant: the strings of a request belong to its JSON and are used as they are. */
#include "sandbox/request.h"

#include "base/err.h"
#include "base/json.h"
#include "base/encoding/utf8.h"

#include <string.h>

/* A list of strings without NUL; absent: empty. */
static int read_list(const json_t *o, const char *key, const char **to) {
    const json_t *list = json_object_get(o, key);
    const size_t n = json_array_size(list);
    if (list && (!json_is_array(list) || n > SANDBOX_MAX_ARGS))
        FAIL(ERR_FORMAT, "request: \"%s\" is not a list of up to %d strings", key, SANDBOX_MAX_ARGS);
    for (size_t i = 0; i < n; i++) {
        const json_t *s = json_array_get(list, i);
        to[i] = json_string_value(s);
        if (!to[i] || strlen(to[i]) != json_string_length(s))
            FAIL(ERR_FORMAT, "request: element %zu of \"%s\" is not a string without NUL", i, key);
    }
    return 0;
}

static int read_files(const json_t *files, struct sandbox_request *r) {
    const char *name;
    json_t *data;
    if (files && !json_is_object(files)) FAIL(ERR_FORMAT, "request: \"files\" is not an object of names and texts");
    if (json_object_size(files) > SANDBOX_MAX_FILES) FAIL(ERR_FORMAT, "request: more than %d \"files\"", SANDBOX_MAX_FILES);
    json_object_foreach((json_t *)(uintptr_t)files, name, data) {
        if (!json_is_string(data)) FAIL(ERR_FORMAT, "request: one of the \"files\" is not a text");
        r->files[r->args.n_files++] = (struct sandbox_file){name, json_string_value(data), json_string_length(data)};
    }
    return 0;
}

int sandbox_request_read(struct sandbox_request *r, const char *text, size_t n) {
    TRY(json_parse(&r->json, text, n, "request"));
    const json_t *in = json_object_get(r->json, "stdin");
    if (!json_is_object(r->json)) FAIL(ERR_FORMAT, "request: not a JSON object");
    if (in && !json_is_string(in)) FAIL(ERR_FORMAT, "request: \"stdin\" is not a text");
    r->args = (struct sandbox_args){.argv = r->argv,
                                    .read_dirs = r->read_dirs,
                                    .files = r->files,
                                    .stdin_data = json_string_value(in),
                                    .n_stdin = json_string_length(in),
                                    .limits = sandbox_default_limits};
    TRY(read_list(r->json, "argv", r->argv));
    TRY(read_list(r->json, "read", r->read_dirs));
    return read_files(json_object_get(r->json, "files"), r);
}

void sandbox_request_free(struct sandbox_request *r) { json_decref(r->json); }

/* The bytes as text: U+FFFD for each part that is no UTF-8. */
static json_t *text_of(const struct buf *b) {
    struct buf t = {0};
    for (size_t i = 0; i < b->n;) {
        const int k = utf8_step(b->p + i, b->n - i);
        buf_add(&t, k > 0 ? b->p + i : "\xEF\xBF\xBD", k > 0 ? (size_t)k : 3);
        i += (size_t)(k > 0 ? k : -k);
    }
    json_t *s = json_stringn(t.p ? t.p : "", t.n);
    buf_free(&t);
    return s;
}

json_t *sandbox_result_json(const struct sandbox_result *r) {
    return json_pack("{s:s, s:i, s:o, s:o, s:f, s:I}", "end", sandbox_end_name(r->end), "status", r->status, "stdout",
                     text_of(&r->out), "stderr", text_of(&r->err), "wall_s", r->wall_s, "peak_bytes", (json_int_t)r->peak_bytes);
}
