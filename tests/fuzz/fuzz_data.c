/* fuzz_data.c - rows of JSON and JSONL from arbitrary bytes, and a sampler's saved
 * state from arbitrary JSON: an error with a message, or rows that print again. */
#include "fuzz.h"

#include "base/buf.h"
#include "base/json.h"
#include "data/data.h"

static void read_as(const char *name, const uint8_t *data, size_t size) {
    char *path = fuzz_file(name, data, size);
    json_t *rows = NULL;
    struct buf b = {0};
    size_t i;
    json_t *row;
    const int rc = data_read_rows(&rows, path, NULL);
    fuzz_check_rc(rc);
    if (rc == 0) json_array_foreach(rows, i, row) CHECK(json_dump_line(&b, row) == 0);
    buf_free(&b);
    json_decref(rows);
    free(path);
}

static void restore(const uint8_t *data, size_t size) {
    struct data_sampler s;
    json_t *state = NULL;
    const int64_t *rows;
    int64_t n;
    if (json_parse(&state, (const char *)data, size, "fuzz") < 0) return;
    CHECK(data_sampler_init(&s, &(struct data_sampler_args){.n_rows = 5, .batch_size = 2}) == 0);
    if (data_sampler_restore(&s, state, "fuzz") == 0)
        for (int i = 0; i < 8; i++)
            if (data_sampler_next(&s, &rows, &n) == 1) CHECK(n >= 1 && n <= 2 && rows[0] >= 0 && rows[n - 1] < 5);
    data_sampler_free(&s);
    json_decref(state);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_quiet();
    read_as("x.jsonl", data, size);
    read_as("x.json", data, size);
    restore(data, size);
    return 0;
}
