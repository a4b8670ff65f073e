/* test_text_golden.c - ids, text and Unicode tables against Hugging Face tokenizers.
 * The fixtures were written by tools/oracle_text.py fixtures from the real package. */
#include "base/clock.h"
#include "base/file.h"
#include "base/json.h"
#include "text/text.h"
#include "text/text_int.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* All lines of a fixture as one array. */
static int add_line(void *arg, char *line, size_t n, int64_t no) {
    json_t *v;
    char where[64];
    snprintf(where, sizeof where, "line %lld", (long long)no);
    TRY(json_parse(&v, line, n, where));
    json_array_append_new(arg, v);
    return 0;
}
static json_t *load_lines(const char *name) {
    char *path = file_join(FIXTURES "/text", name);
    json_t *all = json_array();
    if (file_each_line(path, add_line, all) < 0) fail_msg("%s", err_msg());
    assert_true(json_array_size(all) > 0);
    free(path);
    return all;
}

static uint64_t fnv(uint64_t h, const void *p, size_t n) {
    for (size_t i = 0; i < n; i++) h = (h ^ ((const uint8_t *)p)[i]) * 0x100000001B3ull;
    return h;
}
#define FNV_START 0xCBF29CE484222325ull

static void check_digest(const json_t *row, const char *what, int64_t count, uint64_t h) {
    char hex[17];
    snprintf(hex, sizeof hex, "%016llx", (unsigned long long)h);
    if (count != json_integer_value(json_object_get(row, "count")) ||
        strcmp(hex, json_string_value(json_object_get(row, "digest"))) != 0)
        fail_msg("%s: %lld %s, the reference has %lld %s", what, (long long)count, hex,
                 (long long)json_integer_value(json_object_get(row, "count")), json_string_value(json_object_get(row, "digest")));
}

/* ---- every feature on small tokenizers ------------------------------------------ */

static void check_ids(const char *name, const json_t *c, const char *key, const struct text_ids *got) {
    const json_t *want = json_object_get(c, key);
    bool same = (int64_t)json_array_size(want) == got->n;
    for (int64_t i = 0; same && i < got->n; i++) same = json_integer_value(json_array_get(want, (size_t)i)) == got->p[i];
    if (same) return;
    struct buf b = {0};
    buf_addf(&b, "%s: \"%s\" of ", name, key);
    json_dump_line(&b, c);
    buf_adds(&b, "\n got");
    for (int64_t i = 0; i < got->n; i++) buf_addf(&b, " %d", got->p[i]);
    fail_msg("%s", b.p);
}

static void check_text(const char *name, const json_t *c, const char *key, const struct buf *got) {
    const json_t *want = json_object_get(c, key);
    if (json_string_length(want) == got->n && (got->n == 0 || memcmp(json_string_value(want), got->p, got->n) == 0)) return;
    struct buf b = {0};
    buf_addf(&b, "%s: \"%s\" of ", name, key);
    json_dump_line(&b, c);
    fail_msg("%s\n got %s", b.p, got->p ? got->p : "");
}

/* The stream must give what decode gives, in whole characters all the way. */
static void check_stream(const char *name, const struct tokenizer *t, const struct text_ids *ids, const struct buf *want) {
    struct tokenizer_stream *s;
    struct buf out = {0};
    assert_int_equal(tokenizer_stream_create(&s, t, false), 0);
    for (int64_t i = 0; i < ids->n; i++) {
        assert_int_equal(tokenizer_stream_push(s, ids->p[i], &out), 0);
        assert_true(text_utf8_valid(out.p ? out.p : "", out.n));
    }
    assert_int_equal(tokenizer_stream_finish(s, &out), 0);
    if (out.n != want->n || (out.n && memcmp(out.p, want->p, out.n) != 0)) fail_msg("%s: stream gives %s", name, out.p);
    tokenizer_stream_destroy(s);
    buf_free(&out);
}

static void check_case(const char *name, const struct tokenizer *t, const json_t *c) {
    const json_t *text = json_object_get(c, "text"), *mixed = json_object_get(c, "mixed");
    struct text_ids ids = {0};
    struct buf out = {0};
    assert_int_equal(tokenizer_encode(t, json_string_value(text), json_string_length(text), true, &ids), 0);
    check_ids(name, c, "special", &ids);
    ids.n = 0;
    assert_int_equal(tokenizer_encode(t, json_string_value(text), json_string_length(text), false, &ids), 0);
    check_ids(name, c, "ids", &ids);
    ids.n = 0;
    for (size_t i = 0; i < json_array_size(mixed); i++) {
        const int32_t id = (int32_t)json_integer_value(json_array_get(mixed, i));
        text_ids_add(&ids, &id, 1);
    }
    assert_int_equal(tokenizer_decode(t, ids.p, ids.n, true, &out), 0);
    check_text(name, c, "skipped", &out);
    buf_reset(&out);
    assert_int_equal(tokenizer_decode(t, ids.p, ids.n, false, &out), 0);
    check_text(name, c, "decoded", &out);
    check_stream(name, t, &ids, &out);
    text_ids_free(&ids);
    buf_free(&out);
}

static void test_variants(void **state) {
    (void)state;
    json_t *models = load_lines("models.jsonl"), *rows = load_lines("variants.jsonl");
    int64_t n = 0;
    size_t i, k;
    json_t *row, *m, *c;
    json_array_foreach(rows, i, row) {
        const char *name = json_string_value(json_object_get(row, "name"));
        json_t *file = json_deep_copy(json_object_get(row, "sections"));
        json_array_foreach(models, k, m) if (json_equal(json_object_get(m, "name"), json_object_get(row, "model")))
            json_object_set_new(file, "model", json_deep_copy(json_object_get(m, "model")));
        json_object_update(json_object_get(file, "model"), json_object_get(row, "options"));
        struct buf b = {0};
        assert_int_equal(json_dump_line(&b, file), 0);
        struct tokenizer *t;
        if (tokenizer_open_bytes(&t, b.p, b.n, name) < 0) fail_msg("%s: %s", name, err_msg());
        json_array_foreach(json_object_get(row, "cases"), k, c) {
            check_case(name, t, c);
            n++;
        }
        tokenizer_close(t);
        buf_free(&b);
        json_decref(file);
    }
    print_message("%zu tokenizers, %lld texts\n", json_array_size(rows), (long long)n);
    json_decref(models);
    json_decref(rows);
}

/* ---- every code point -------------------------------------------------------------- */

static bool next_code_point(int32_t *c) {
    ++*c;
    if (*c == 0xD800) *c = 0xE000;
    return *c < 0x110000;
}

static void check_regex(const json_t *row, const char *pattern) {
    struct text__regex *r;
    struct text__regex_scratch *s;
    struct buf tmp = {0};
    int64_t count = 0;
    uint64_t h = FNV_START;
    if (text__regex_create(&r, pattern, strlen(pattern), "fixture") < 0) fail_msg("%s", err_msg());
    assert_int_equal(text__regex_scratch_create(&s), 0);
    for (int32_t c = -1; next_code_point(&c);) {
        char text[4];
        const size_t n = (size_t)text__put_char(text, c);
        struct text__regex_iter it = {0};
        const int found = text__regex_next(r, s, text__proxy(&tmp, text, n), n, &it);
        assert_true(found >= 0);
        const uint8_t bit = (uint8_t)found;
        count += found;
        h = fnv(h, &bit, 1);
    }
    check_digest(row, pattern, count, h);
    text__regex_scratch_destroy(s);
    text__regex_destroy(r);
    buf_free(&tmp);
}

static void check_class(const json_t *row, const char *name) {
    bool (*class)(int32_t) = strcmp(name, "space") == 0   ? text__is_space
                             : strcmp(name, "punct") == 0 ? text__is_punct
                                                          : text__is_digit;
    int64_t count = 0;
    uint64_t h = FNV_START;
    for (int32_t c = -1; next_code_point(&c);) {
        const uint8_t bit = class(c);
        count += bit;
        h = fnv(h, &bit, 1);
    }
    check_digest(row, name, count, h);
}

/* Each character alone, with a mark before and after it, and as a mark and a base itself. */
static void check_form(const json_t *row, const char *name) {
    static const char *const before[] = {"", "\xCD\x85", "", "A", ""}, *const after[] = {"", "", "\xCC\xB4", "",
                                                                                         "\xCC\x81\xE3\x82\x99"};
    static const char *const forms[] = {"NFC", "NFD", "NFKC", "NFKD"};
    struct text__chars tmp = {0};
    struct buf in = {0}, out = {0};
    int64_t count = 0;
    uint64_t h = FNV_START;
    int form = 0;
    while (form < 4 && strcmp(forms[form], name) != 0) form++;
    for (int32_t c = -1; next_code_point(&c);) {
        char ch[4];
        const size_t n = (size_t)text__put_char(ch, c);
        for (int k = 0; k < 5; k++) {
            buf_reset(&in);
            buf_reset(&out);
            buf_adds(&in, before[k]);
            buf_add(&in, ch, n);
            buf_adds(&in, after[k]);
            if (form < 4) assert_int_equal(text__normal_form(&out, &tmp, (enum text__form)form, in.p, in.n), 0);
            else assert_int_equal(text__lowercase(&out, in.p, in.n), 0);
            if (in.n == out.n && memcmp(in.p, out.p, in.n) == 0) continue;
            count += (int64_t)out.n;
            h = fnv(h, out.p, out.n);
        }
    }
    check_digest(row, name, count, h);
    free(tmp.p);
    buf_free(&in);
    buf_free(&out);
}

static void test_unicode(void **state) {
    (void)state;
    json_t *rows = load_lines("unicode.jsonl"), *row;
    size_t i;
    json_array_foreach(rows, i, row) {
        const char *regex = json_string_value(json_object_get(row, "regex"));
        const char *class = json_string_value(json_object_get(row, "class"));
        if (regex) check_regex(row, regex);
        else if (class) check_class(row, class);
        else check_form(row, json_string_value(json_object_get(row, "form")));
    }
    json_decref(rows);
}

static void test_repair(void **state) {
    (void)state;
    json_t *rows = load_lines("repair.jsonl"), *row;
    size_t i;
    json_array_foreach(rows, i, row) {
        const char *hex = json_string_value(json_object_get(row, "hex"));
        const json_t *want = json_object_get(row, "text");
        struct buf raw = {0}, out = {0};
        for (const char *p = hex; *p; p += 2) {
            unsigned b;
            assert_int_equal(sscanf(p, "%2x", &b), 1);
            buf_addc(&raw, (char)b);
        }
        assert_int_equal(text_utf8_repair(&out, raw.p, raw.n), 0);
        if (out.n != json_string_length(want) || memcmp(out.p, json_string_value(want), out.n) != 0) fail_msg("%s", hex);
        assert_true(text_utf8_valid(out.p, out.n));
        assert_int_equal(text_utf8_valid(raw.p, raw.n), raw.n == out.n && memcmp(raw.p, out.p, raw.n) == 0);
        buf_free(&raw);
        buf_free(&out);
    }
    json_decref(rows);
}

/* ---- the real tokenizers, where they are at hand -------------------------------------- */

static char *shared_data(void) {
    const char *env = getenv("SHARED_DATA");
    return xstrdup(env ? env : SOURCE_DIR "/../shared/data");
}

static char *unpack(const char *dir, const char *name) {
    char *path = xasprintf("%s/tokenizers/%s/tokenizer.json.xz", dir, name), *out = NULL;
    if (file_exists(path)) {
        char *cmd = xasprintf("xz -dc '%s'", path);
        FILE *f = popen(cmd, "r");
        struct buf b = {0};
        char part[65536];
        size_t n;
        while (f && (n = fread(part, 1, sizeof part, f)) > 0) buf_add(&b, part, n);
        if (f && pclose(f) == 0 && b.n > 0) out = buf_take(&b);
        buf_free(&b);
        free(cmd);
    }
    free(path);
    return out;
}

static void encode_row(const struct tokenizer *t, const json_t *row, const char *key, struct text_ids *ids) {
    const json_t *text = json_object_get(row, key);
    if (tokenizer_encode(t, json_string_value(text), json_string_length(text), true, ids) < 0) fail_msg("%s", err_msg());
}

static void check_shared(const json_t *row, const char *part, const char *name, const struct text_ids *ids) {
    check_digest(json_object_get(row, part), name, ids->n, fnv(FNV_START, ids->p, (size_t)ids->n * sizeof *ids->p));
}

static json_t *load_gsm8k(const char *dir) {
    json_t *all = json_array();
    static const char *const parts[] = {"train", "test"};
    for (int i = 0; i < 2; i++) {
        char *path = xasprintf("%s/gsm8k/%s.jsonl", dir, parts[i]);
        if (!file_exists(path) || file_each_line(path, add_line, all) < 0) json_array_clear(all);
        free(path);
    }
    return all;
}

static void test_shared(void **state) {
    (void)state;
    char *dir = shared_data();
    json_t *rows = load_lines("shared.jsonl"), *hostile = load_lines("hostile.jsonl"), *gsm = load_gsm8k(dir), *row, *line;
    size_t i, k, n_done = 0;
    json_array_foreach(rows, i, row) {
        const char *name = json_string_value(json_object_get(row, "name"));
        char *json = unpack(dir, name);
        if (!json) continue;
        struct tokenizer *t;
        struct text_ids ids = {0};
        const double t0 = clock_now();
        if (tokenizer_open_bytes(&t, json, strlen(json), name) < 0) fail_msg("%s", err_msg());
        const double t1 = clock_now();
        json_array_foreach(hostile, k, line) encode_row(t, line, "text", &ids);
        check_shared(row, "hostile", name, &ids);
        ids.n = 0;
        const double t2 = clock_now();
        json_array_foreach(gsm, k, line) {
            encode_row(t, line, "question", &ids);
            encode_row(t, line, "answer", &ids);
        }
        const double t3 = clock_now();
        if (json_array_size(gsm)) check_shared(row, "gsm8k", name, &ids);
        print_message("%-12s opened in %.3f s; GSM8K: %lld tokens, %.2f M tokens/s\n", name, t1 - t0, (long long)ids.n,
                      (double)ids.n / (t3 - t2) / 1e6);
        tokenizer_close(t);
        text_ids_free(&ids);
        free(json);
        n_done++;
    }
    json_decref(rows);
    json_decref(hostile);
    json_decref(gsm);
    if (n_done == 0) print_message("skipped: no tokenizers under %s/tokenizers (SHARED_DATA names another place)\n", dir);
    free(dir);
    if (n_done == 0) skip();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_repair),
        cmocka_unit_test(test_unicode),
        cmocka_unit_test(test_variants),
        cmocka_unit_test(test_shared),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
