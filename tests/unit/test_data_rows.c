/* Rows in and out of JSON, JSONL and Parquet, and what bad files say. */
#include "base/buf.h"
#include "base/file.h"
#include "data/data.h"

#include <math.h>
#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static char dir[64];

static int setup(void **state) {
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/verlc_rows_XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}
static int teardown(void **state) {
    (void)state;
    return file_remove_tree(dir);
}

/* Files in dir that end in .tmp. */
static int n_temporary(void) {
    int n = 0;
    DIR *d = opendir(dir);
    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d));) n += strlen(e->d_name) > 4 && strcmp(e->d_name + strlen(e->d_name) - 4, ".tmp") == 0;
    closedir(d);
    return n;
}

static char *put(const char *name, const char *text) {
    char *path = file_join(dir, name);
    assert_int_equal(file_write_atomic(path, text, strlen(text)), 0);
    return path;
}

static void expect(const char *name, const char *text, const char *need, int code, const char *message) {
    const char *const required[] = {need, NULL};
    char *path = text ? put(name, text) : file_join(dir, name);
    json_t *rows = NULL;
    const int rc = data_read_rows(&rows, path, need ? required : NULL);
    if (rc != code || (rc < 0 && !strstr(err_msg(), message))) print_message("%s: %d %s\n", name, rc, err_msg());
    assert_int_equal(rc, code);
    if (rc < 0) {
        assert_non_null(strstr(err_msg(), message));
        assert_non_null(strstr(err_msg(), name));
    }
    json_decref(rows);
    free(path);
}

static void json_files(void **state) {
    (void)state;
    char *path = put("a.jsonl", "\xef\xbb\xbf{\"a\": 1}\r\n\n{\"a\": \"\\u0000\", \"b\": null}");
    json_t *rows = NULL;
    assert_int_equal(data_read_rows(&rows, path, NULL), 0);
    assert_int_equal(json_array_size(rows), 2);
    assert_int_equal(json_string_length(json_object_get(json_array_get(rows, 1), "a")), 1);
    json_decref(rows);
    free(path);
    path = put("b.json", "\n [{\"a\": 1}, {\"a\": 2}, {\"a\": 3}]");
    assert_int_equal(data_read_rows(&rows, path, NULL), 0);
    assert_int_equal(json_array_size(rows), 3);
    json_decref(rows);
    free(path);
    path = put("c.json", "{\"a\": 1}\n{\"a\": 2}\n"); /* JSONL under another name */
    assert_int_equal(data_read_rows(&rows, path, NULL), 0);
    assert_int_equal(json_array_size(rows), 2);
    json_decref(rows);
    free(path);
}

static void bad_files(void **state) {
    (void)state;
    expect("x.jsonl", "{\"a\": 1}\n{\"a\": \n{\"a\": 3}\n", NULL, ERR_FORMAT, "x.jsonl:2: not JSON");
    expect("x.jsonl", "{\"a\": 1}\n[1]\n", NULL, ERR_FORMAT, "x.jsonl:2: not a JSON object");
    expect("x.jsonl", "{\"a\": 1}\n{\"a\": NaN}\n", NULL, ERR_FORMAT, "x.jsonl:2: not JSON");
    expect("x.jsonl", "{\"a\": \"\xff\"}\n", NULL, ERR_FORMAT, "x.jsonl:1: not JSON");
    expect("x.jsonl", "{\"a\": 1}\n{\"b\": 1}\n", "a", ERR_INPUT, "x.jsonl:2: there is no column 'a'; it has: b");
    expect("x.json", "[{\"a\": 1}, 7]", NULL, ERR_FORMAT, "x.json row 2");
    expect("x.json", "[{\"a\": 1}, {", NULL, ERR_FORMAT, "not JSON");
    expect("x.csv", "a\n1\n", NULL, ERR_UNSUPPORTED, "unsupported file format");
    expect("no.jsonl", NULL, NULL, ERR_INPUT, "no such file");
    expect("x.parquet", "PAR1 this is not Parquet", NULL, ERR_FORMAT, "not a readable Parquet file");
    expect("empty.jsonl", "", NULL, 0, "");
    json_t *rows = NULL;
    const char *const required[] = {"prompt", "solution", NULL};
    assert_int_equal(data_read_rows(&rows, FIXTURES "/data/verl.parquet", required), ERR_INPUT);
    assert_non_null(strstr(err_msg(), "verl.parquet: there is no column 'solution'; it has: data_source, prompt, ability"));
    const char *const both[] = {"question", "prompt", "solution", NULL};
    assert_int_equal(data_read_rows(&rows, FIXTURES "/data/verl.parquet", both), ERR_INPUT);
    assert_non_null(strstr(err_msg(), "verl.parquet: there are no columns 'question', 'solution'; it has: data_source, prompt"));
    setenv("PATH_SAVED", getenv("PATH"), 1);
    setenv("PATH", "/nowhere", 1);
    assert_int_equal(data_read_rows(&rows, "hdfs://host/not/there.parquet", NULL), ERR_HELPER);
    assert_non_null(strstr(err_msg(), "install the Hadoop client"));
    setenv("PATH", getenv("PATH_SAVED"), 1);
}

/* A truncated Parquet file: every cut is refused, none crashes or gives other rows. */
static void damaged_parquet(void **state) {
    (void)state;
    struct buf b = {0};
    char *path = file_join(dir, "cut.parquet");
    assert_int_equal(file_read(&b, FIXTURES "/data/verl.parquet", 0), 0);
    for (size_t n = 0; n < b.n; n += b.n / 5 + 1) {
        json_t *rows = NULL;
        assert_int_equal(file_write_atomic(path, b.p, n), 0);
        assert_true(data_read_rows(&rows, path, NULL) < 0);
        assert_non_null(strstr(err_msg(), "cut.parquet"));
    }
    free(path);
    buf_free(&b);
}

static void parquet_in(void **state) {
    (void)state;
    json_t *rows = NULL;
    assert_int_equal(data_read_rows(&rows, FIXTURES "/data/verl.parquet", NULL), 0);
    assert_int_equal(json_array_size(rows), 5);
    const json_t *r = json_array_get(rows, 3);
    assert_string_equal(json_string_value(json_object_get(json_object_get(r, "reward_model"), "ground_truth")), "1003");
    assert_string_equal(json_string_value(json_object_get(json_array_get(json_object_get(r, "prompt"), 0), "content")),
                        "What is 3 + 3? \xc3\xa9\xe6\x97\xa5 Let's think step by step and output the final answer after "
                        "\"####\".");
    assert_int_equal(json_integer_value(json_object_get(json_object_get(r, "extra_info"), "index")), 3);
    json_decref(rows);
    /* what JSON cannot hold */
    assert_int_equal(data_read_rows(&rows, FIXTURES "/data/odd.parquet", NULL), 0);
    json_t *want = json_loads("[{\"bytes\": {\"base64\": \"AP8=\"}, \"day\": \"2024-02-29\", \"price\": \"1.50\", \"x\": null,"
                              " \"big\": \"18446744073709551615\", \"nested\": [{\"k\": null}]},"
                              " {\"bytes\": null, \"day\": null, \"price\": null, \"x\": 0.1, \"big\": 1, \"nested\": []}]",
                              0, NULL);
    assert_true(json_equal(rows, want));
    json_decref(want);
    json_decref(rows);
}

static void what_is_written_is_read(void **state) {
    (void)state;
    json_t *rows = json_array(), *back = NULL;
    for (int i = 0; i < 1500; i++) /* three pieces */
        json_array_append_new(rows,
                              json_pack("{s:i, s:f, s:s, s:[{s:s, s:s}], s:b}", "i", i, "x", (double)i / 3, "s", "\xe6\x97\xa5\n\"",
                                        "prompt", "role", "user", "content", i % 2 ? "odd" : "even", "b", i % 2));
    const char *const names[] = {"rows.jsonl", "rows.parquet"};
    for (int k = 0; k < 2; k++) {
        char *path = file_join(dir, names[k]);
        assert_int_equal(data_write_rows(path, rows, NULL), 0);
        assert_int_equal(data_read_rows(&back, path, NULL), 0);
        assert_true(json_equal(rows, back));
        assert_int_equal(n_temporary(), 0);
        json_decref(back);
        free(path);
    }
    /* a schema is kept: a row that does not fit is an error that leaves the old file */
    json_t *schema = json_pack("{s:s}", "i", "int64"), *bad = json_pack("[{s:s}]", "i", "text");
    char *path = file_join(dir, "rows.parquet");
    const int64_t size = file_size(path);
    assert_true(data_write_rows(path, bad, schema) < 0);
    assert_non_null(strstr(err_msg(), "rows.parquet"));
    assert_int_equal(file_size(path), size);
    assert_int_equal(n_temporary(), 0);
    char *none = file_join(dir, "not/there.parquet");
    assert_true(data_write_rows(none, rows, NULL) < 0);
    assert_non_null(strstr(err_msg(), "not/there.parquet"));
    free(none);
    free(path);
    json_decref(schema);
    json_decref(bad);
    json_decref(rows);
}

/* Of a file of rows {i, prompt: [{role, content}], answer}: each content has `chars` of this character. */
static void check_large(const char *path, int n, const char *ch, size_t chars) {
    json_t *rows = NULL, *row;
    size_t i;
    if (data_read_rows(&rows, path, NULL) < 0) fail_msg("%s", err_msg());
    assert_int_equal(json_array_size(rows), n);
    const size_t len = strlen(ch);
    json_array_foreach(rows, i, row) {
        const json_t *text = json_object_get(json_array_get(json_object_get(row, "prompt"), 0), "content");
        const char *s = json_string_value(text);
        assert_int_equal(json_integer_value(json_object_get(row, "i")), i);
        assert_int_equal(json_string_length(text), chars * len);
        assert_memory_equal(s, ch, len);
        assert_memory_equal(s, s + len, (chars - 1) * len); /* the same character all along */
    }
    json_decref(rows);
}

/* Replies are cut by bytes, whatever the rows' size and their row groups. 0.1.0 took 512 rows over 256 MiB for garbage. */
static void large_rows_come_whole(void **state) {
    (void)state;
    check_large(FIXTURES "/data/rows_600k.parquet", 520, "x", 600000); /* 200 in a row group */
    check_large(FIXTURES "/data/rows_2m.parquet", 20, "\xc3\xa9", 1000000);
    char *path = file_join(dir, "large.parquet"), *text = xmalloc(2000000);
    memset(text, 'z', 2000000);
    json_t *rows = json_array(), *s = json_stringn(text, 2000000);
    for (int i = 0; i < 40; i++) json_array_append_new(rows, json_pack("{s:i, s:[{s:O}]}", "i", i, "prompt", "content", s));
    assert_int_equal(data_write_rows(path, rows, NULL), 0);
    check_large(path, 40, "z", 2000000);
    json_decref(rows);
    json_decref(s);
    free(text);
    free(path);
}

/* A row over the limit is named with its place, its column and its size. */
static void too_large_a_row_is_named(void **state) {
    (void)state;
    json_t *rows = NULL;
    assert_int_equal(data_read_rows(&rows, FIXTURES "/data/row_300m.parquet", NULL), ERR_INPUT);
    assert_non_null(
        strstr(err_msg(), "row_300m.parquet row 2: 300 MiB as JSON, the limit of a row is 255 MiB; column 'prompt' has 300 MiB"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(json_files),
        cmocka_unit_test(bad_files),
        cmocka_unit_test(damaged_parquet),
        cmocka_unit_test(parquet_in),
        cmocka_unit_test(what_is_written_is_read),
        cmocka_unit_test(large_rows_come_whole),
        cmocka_unit_test(too_large_a_row_is_named),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
