/* struct batch against the definitions of verl's DataProto (spec section 7.1). */
#include "base/json.h"
#include "data/data.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* Row r: ids of length r % 3, score r / 2, name "row r", NUL, "end", meta object {"r": r}. */
static struct batch make(int64_t n) {
    struct batch b;
    struct batch_col *c;
    int64_t lens[64];
    char name[32];
    batch_init(&b, n);
    for (int64_t r = 0; r < n; r++) lens[r] = r % 3;
    assert_int_equal(batch_add(&b, "ids", BATCH_I32, lens, NULL, &c), 0);
    for (int64_t r = 0; r < n; r++)
        for (int64_t k = 0; k < lens[r]; k++) c->i32[c->off[r] + k] = (int32_t)(10 * r + k);
    assert_int_equal(batch_add(&b, "score", BATCH_F32, NULL, NULL, &c), 0);
    for (int64_t r = 0; r < n; r++) c->f32[r] = (float)r / 2;
    assert_int_equal(batch_add(&b, "name", BATCH_STR, NULL, NULL, &c), 0);
    for (int64_t r = 0; r < n; r++) {
        const int len = snprintf(name, sizeof name, "row %d%cend", (int)r, 0);
        batch_set_str(c, r, name, (size_t)len);
    }
    assert_int_equal(batch_add(&b, "info", BATCH_JSON, NULL, NULL, &c), 0);
    for (int64_t r = 0; r < n; r++) {
        json_decref(c->json[r]);
        c->json[r] = json_pack("{s:I}", "r", (json_int_t)r);
    }
    return b;
}

/* Row i of b is row `r` of make(). */
static void assert_row(const struct batch *b, int64_t i, int64_t r) {
    struct batch_col *c;
    char name[32];
    assert_int_equal(batch_get(b, "ids", BATCH_I32, &c), 0);
    assert_int_equal(batch_len(c, i), r % 3);
    for (int64_t k = 0; k < r % 3; k++) assert_int_equal(c->i32[c->off[i] + k], 10 * r + k);
    assert_int_equal(batch_get(b, "score", BATCH_F32, &c), 0);
    assert_true(c->f32[i] == (float)r / 2);
    assert_int_equal(batch_get(b, "name", BATCH_STR, &c), 0);
    const int n = snprintf(name, sizeof name, "row %d%cend", (int)r, 0);
    assert_int_equal(c->str_len[i], n);
    assert_memory_equal(c->str[i], name, (size_t)n + 1);
    assert_int_equal(batch_get(b, "info", BATCH_JSON, &c), 0);
    assert_int_equal(json_integer_value(json_object_get(c->json[i], "r")), r);
}

static void select_and_repeat(void **state) {
    (void)state;
    struct batch b = make(5), r;
    const int64_t pick[] = {4, 0, 0, 2}, bad[] = {5};
    assert_int_equal(batch_select(&r, &b, pick, 4), 0);
    assert_int_equal(r.n_rows, 4);
    for (int i = 0; i < 4; i++) assert_row(&r, i, pick[i]);
    batch_free(&r);
    assert_int_equal(batch_repeat(&r, &b, 3), 0);
    assert_int_equal(r.n_rows, 15);
    for (int i = 0; i < 15; i++) assert_row(&r, i, i / 3);
    batch_free(&r);
    assert_int_equal(batch_select(&r, &b, bad, 1), ERR_INTERNAL);
    assert_int_equal(batch_repeat(&r, &b, 0), ERR_INVAL);
    batch_free(&b);
}

static void json_and_back(void **state) {
    (void)state;
    for (int64_t n = 0; n < 40; n += 13) {
        struct batch b = make(n), r;
        struct batch_col *c;
        assert_int_equal(batch_add(&b, "nan", BATCH_F64, NULL, NULL, &c), 0);
        for (int64_t i = 0; i < n; i++) c->f64[i] = i % 2 ? NAN : -0.1 / 3;
        assert_int_equal(batch_add(&b, "big", BATCH_I64, NULL, NULL, &c), 0);
        for (int64_t i = 0; i < n; i++) c->i64[i] = INT64_MIN + i;
        json_t *v = batch_json(&b, NULL), *again;
        struct buf text = {0};
        assert_int_equal(json_dump_line(&text, v), 0);
        assert_int_equal(json_parse(&again, text.p, text.n, "x"), 0);
        assert_int_equal(batch_of_json(&r, again, "x"), 0);
        assert_int_equal(r.n_rows, n);
        assert_int_equal(r.n_cols, b.n_cols);
        for (int64_t i = 0; i < n; i++) assert_row(&r, i, i);
        for (int k = 4; k < 6 && n > 0; k++) assert_memory_equal(r.cols[k].p, b.cols[k].p, (size_t)n * 8);
        batch_free(&r);
        json_t *less = batch_json(&b, (const char *const[]){"name", "big", NULL});
        assert_int_equal(batch_of_json(&r, less, "x"), 0);
        assert_int_equal(r.n_cols, b.n_cols - 2);
        json_decref(less);
        batch_free(&r);
        /* each column cut, of another type, or with other lengths */
        static const char *const bad[] = {"{\"type\": \"i64\"}",
                                          "{\"type\": \"none\"}",
                                          "{\"lens\": [1, 2]}",
                                          "{\"lens\": [-1]}",
                                          "{\"name\": 3}",
                                          "{\"data\": \"AAAA\"}",
                                          "{\"data\": null, \"bytes\": null}"};
        for (size_t k = 0; n > 0 && k < json_array_size(json_object_get(again, "columns")); k++)
            for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
                if (i == 0 && k >= 4) continue; /* as long as that type */
                json_t *one = json_deep_copy(again), *change = json_loads(bad[i], 0, NULL);
                json_object_update(json_array_get(json_object_get(one, "columns"), k), change);
                assert_int_equal(batch_of_json(&r, one, "where"), ERR_FORMAT);
                assert_true(strncmp(err_msg(), "where", 5) == 0);
                json_decref(one);
                json_decref(change);
            }
        buf_free(&text);
        json_decref(again);
        json_decref(v);
        batch_free(&b);
    }
}

static void concat_is_the_inverse_of_select(void **state) {
    (void)state;
    static const int64_t rows[12] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
    for (int64_t n = 1; n <= 12; n++) {
        struct batch b = make(n), all, p[12];
        const struct batch *refs[12];
        for (int64_t size = 1; size <= n + 1; size++) {
            int64_t k = 0;
            for (int64_t lo = 0; lo < n; lo += size, k++) {
                assert_int_equal(batch_select(&p[k], &b, rows + lo, n - lo < size ? n - lo : size), 0);
                refs[k] = &p[k];
            }
            assert_int_equal(batch_concat(&all, refs, k), 0);
            assert_int_equal(all.n_rows, n);
            for (int64_t i = 0; i < n; i++) assert_row(&all, i, i);
            batch_free(&all);
            for (int64_t i = 0; i < k; i++) batch_free(&p[i]);
        }
        batch_free(&b);
    }
}

static void columns(void **state) {
    (void)state;
    struct batch b = make(2), other = make(1), r;
    const struct batch *const both[] = {&b, &other};
    struct batch_col *c;
    assert_int_equal(batch_get(&b, "nothing", BATCH_I32, &c), ERR_INTERNAL);
    assert_non_null(strstr(err_msg(), "'nothing'; it has: ids, score, name, info"));
    assert_int_equal(batch_get(&b, "ids", BATCH_F32, &c), ERR_INTERNAL);
    assert_non_null(strstr(err_msg(), "holds i32, not f32"));
    assert_int_equal(batch_add(&b, "ids", BATCH_I32, NULL, NULL, NULL), ERR_INTERNAL);
    batch_drop(&b, "score");
    batch_drop(&b, "score");
    assert_null(batch_find(&b, "score"));
    assert_int_equal(batch_concat(&r, both, 2), ERR_INTERNAL);
    assert_int_equal(batch_concat(&r, both, 0), ERR_INTERNAL);
    batch_free(&b);
    batch_free(&other);
}

/* --- sampler --- */

static void drain(struct data_sampler *s, int64_t *seen, int64_t batches) {
    const int64_t *rows;
    int64_t n;
    for (int64_t i = 0; i < batches;) {
        if (data_sampler_next(s, &rows, &n) == 0) continue;
        for (int64_t k = 0; k < n; k++) *seen++ = rows[k];
        *seen++ = -1;
        i++;
    }
    *seen = -2;
}

/* Rows one by one are the rows of the batches, whatever the order and wherever it was cut and restored; the tail
 * that batches leave out comes too. */
static void sampler_takes_rows(void **state) {
    (void)state;
    enum { ROWS = 10, SIZE = 4 };
    static const double keys[ROWS] = {1, 5, 2, 8, 0, 3, 3, 9, 1, 4};
    static const enum data_order orders[] = {DATA_SEQUENTIAL, DATA_SHUFFLE, DATA_WEIGHTED, DATA_CURRICULUM};
    for (int k = 0; k < 4; k++) {
        const struct data_sampler_args a = {
            .n_rows = ROWS, .batch_size = SIZE, .seed = 5, .order = orders[k], .keys = k >= 2 ? keys : NULL};
        struct data_sampler batches, one, cut;
        assert_int_equal(data_sampler_init(&batches, &a), 0);
        assert_int_equal(data_sampler_init(&one, &a), 0);
        for (int epoch = 0; epoch < 2; epoch++) {
            const int64_t *rows;
            int64_t n;
            while (data_sampler_next(&batches, &rows, &n) == 1) {
                for (int64_t i = 0; i < n; i++) {
                    json_t *at = data_sampler_state(&one);
                    assert_int_equal(data_sampler_init(&cut, &a), 0);
                    assert_int_equal(data_sampler_restore(&cut, at, "state"), 0);
                    json_decref(at);
                    assert_int_equal(data_sampler_take(&one), rows[i]);
                    assert_int_equal(data_sampler_take(&cut), rows[i]);
                    assert_int_equal(one.epoch, epoch);
                    data_sampler_free(&cut);
                }
            }
        }
        data_sampler_free(&batches);
        data_sampler_free(&one);
    }
}

static void sampler_is_a_pure_function(void **state) {
    (void)state;
    const struct data_sampler_args a = {.n_rows = 10, .batch_size = 3, .order = DATA_SHUFFLE, .drop_last = true, .seed = 42};
    struct data_sampler s, t;
    int64_t whole[200], part[200];
    assert_int_equal(data_sampler_init(&s, &a), 0);
    assert_int_equal(data_sampler_batches(&s), 3);
    drain(&s, whole, 12);
    data_sampler_free(&s);
    /* cut at every batch, saved, restored into a new sampler: the same batches follow */
    for (int64_t cut = 0; cut <= 12; cut++) {
        assert_int_equal(data_sampler_init(&s, &a), 0);
        drain(&s, part, cut);
        json_t *st = data_sampler_state(&s);
        assert_int_equal(data_sampler_init(&t, &a), 0);
        assert_int_equal(data_sampler_restore(&t, st, "trainer.json"), 0);
        drain(&t, part, 12 - cut);
        for (int64_t i = 0; i < (12 - cut) * 4; i++) assert_int_equal(part[i], whole[cut * 4 + i]);
        json_decref(st);
        data_sampler_free(&s);
        data_sampler_free(&t);
    }
    /* each epoch has 9 of the 10 rows once, and epochs differ */
    bool seen[10] = {0}, differ = false;
    for (int i = 0; i < 12; i++)
        if (whole[i] >= 0) {
            assert_false(seen[whole[i]]);
            seen[whole[i]] = true;
        }
    for (int i = 0; i < 12; i++) differ |= whole[i] != whole[12 + i];
    assert_true(differ);
}

/* Weighted batches hold distinct rows in proportion to the weights; curriculum goes by the key; both resume. */
static void sampler_by_keys(void **state) {
    (void)state;
    const double keys[10] = {0, 4, 1, 1, 1, 1, 1, 1, 1, 1}, levels[10] = {3, 1, 2, 1, 3, 2, 1, 2, 3, 1};
    struct data_sampler_args a = {
        .n_rows = 10, .batch_size = 2, .drop_last = true, .seed = 7, .order = DATA_WEIGHTED, .keys = keys};
    struct data_sampler s, t;
    const int64_t *rows;
    int64_t n, count[10] = {0}, part[64], whole[64];
    assert_int_equal(data_sampler_init(&s, &a), 0);
    for (int i = 0; i < 24000; i++) {
        if (data_sampler_next(&s, &rows, &n) == 0) continue;
        assert_true(n == 2 && rows[0] != rows[1]);
        count[rows[0]]++; /* the first of a batch has exactly the chance of its weight */
    }
    data_sampler_free(&s);
    assert_int_equal(count[0], 0);
    for (int i = 1; i < 10; i++) { /* 20,000 draws: 4 of 12, or 1 of 12 each; six standard deviations are 400 and 234 */
        const double want = 20000.0 * keys[i] / 12;
        assert_true(fabs((double)count[i] - want) < (i == 1 ? 400 : 234));
    }
    for (int kind = 0; kind < 2; kind++) {
        if (kind == 1) {
            a.order = DATA_CURRICULUM;
            a.keys = levels;
        }
        assert_int_equal(data_sampler_init(&s, &a), 0);
        drain(&s, whole, 12);
        data_sampler_free(&s);
        assert_int_equal(data_sampler_init(&s, &a), 0);
        drain(&s, part, 7);
        json_t *st = data_sampler_state(&s);
        assert_int_equal(data_sampler_init(&t, &a), 0);
        assert_int_equal(data_sampler_restore(&t, st, "x"), 0);
        drain(&t, part, 5);
        for (int i = 0; i < 5 * 3; i++) assert_int_equal(part[i], whole[7 * 3 + i]);
        data_sampler_free(&t);
        struct data_sampler_args b = a;
        double other[10];
        memcpy(other, a.keys, sizeof other);
        other[3] = 9;
        b.keys = other;
        assert_int_equal(data_sampler_init(&t, &b), 0);
        assert_int_equal(data_sampler_restore(&t, st, "x"), ERR_INPUT);
        assert_non_null(strstr(err_msg(), "other data.sampler weights or another column"));
        data_sampler_free(&t);
        b.keys = NULL;
        b.order = DATA_SHUFFLE;
        assert_int_equal(data_sampler_init(&t, &b), 0);
        assert_int_equal(data_sampler_restore(&t, st, "x"), ERR_INPUT);
        data_sampler_free(&t);
        data_sampler_free(&s);
        json_decref(st);
    }
    bool differ = false; /* whole: the curriculum's, five batches an epoch */
    for (int i = 0, at = 0, last = 0; i < 5; i++)
        for (int k = 0; k < 2; k++, at++) {
            const int64_t one = whole[3 * i + k], two = whole[3 * (i + 5) + k];
            assert_true(levels[one] >= last && levels[one] == levels[two]);
            last = (int)levels[one];
            differ |= one != two;
        }
    assert_true(differ); /* equal keys change places from epoch to epoch */
    a = (struct data_sampler_args){.n_rows = 3, .batch_size = 2, .order = DATA_WEIGHTED, .keys = (const double[]){0, 0, 1}};
    assert_int_equal(data_sampler_init(&s, &a), ERR_INVAL);
    assert_non_null(strstr(err_msg(), "1 rows have a weight above 0"));
}

static void sampler_keys_of_rows(void **state) {
    (void)state;
    json_t *row = json_pack("{s:s, s:{s:{s:i}}, s:s}", "data_source", "a", "extra_info", "x", "level", 3, "text", "t");
    json_t *weights = json_pack("{s:f}", "a", 2.5), *bad = json_pack("{s:i}", "a", -1);
    double k = 0;
    struct data_sampler_spec s = {.order = DATA_CURRICULUM, .column = "extra_info.x.level", .source_key = "data_source"};
    assert_int_equal(data_sampler_key(&s, row, &k), 0);
    assert_true(k == 3);
    s.descending = true;
    assert_int_equal(data_sampler_key(&s, row, &k), 0);
    assert_true(k == -3);
    static const char longer[] = "a_column_whose_name_has_more_than_sixty_four_characters_in_it_and_then_some.level";
    json_object_set_new(row, "a_column_whose_name_has_more_than_sixty_four_characters_in_it_and_then_some",
                        json_pack("{s:i}", "level", 5));
    s.column = longer;
    assert_int_equal(data_sampler_key(&s, row, &k), 0);
    assert_true(k == -5);
    s.column = "text";
    assert_int_equal(data_sampler_key(&s, row, &k), ERR_INPUT);
    assert_non_null(strstr(err_msg(), "data.sampler.column=text is not a number"));
    s.column = NULL;
    assert_int_equal(data_sampler_spec_check(&s), ERR_INVAL);
    s = (struct data_sampler_spec){.order = DATA_WEIGHTED, .source_key = "data_source"};
    assert_int_equal(data_sampler_spec_check(&s), ERR_INVAL);
    s.weights = bad;
    assert_int_equal(data_sampler_spec_check(&s), ERR_INVAL);
    s.weights = weights;
    assert_int_equal(data_sampler_spec_check(&s), 0);
    assert_int_equal(data_sampler_key(&s, row, &k), 0);
    assert_true(k == 2.5);
    json_object_set_new(row, "data_source", json_string("b"));
    assert_int_equal(data_sampler_key(&s, row, &k), 0);
    assert_true(k == 1);
    json_decref(row);
    json_decref(weights);
    json_decref(bad);
}

static void sampler_edges(void **state) {
    (void)state;
    struct data_sampler s;
    const int64_t *rows;
    int64_t n;
    assert_int_equal(data_sampler_init(&s, &(struct data_sampler_args){.n_rows = 2, .batch_size = 3, .drop_last = true}),
                     ERR_INVAL);
    assert_non_null(strstr(err_msg(), "fewer than one batch"));
    assert_int_equal(data_sampler_init(&s, &(struct data_sampler_args){.n_rows = 0, .batch_size = 3}), ERR_INVAL);
    assert_int_equal(data_sampler_init(&s, &(struct data_sampler_args){.n_rows = 5, .batch_size = 3}), 0);
    assert_int_equal(data_sampler_batches(&s), 2);
    assert_int_equal(data_sampler_next(&s, &rows, &n), 1);
    assert_int_equal(rows[2], 2); /* not shuffled */
    assert_int_equal(data_sampler_next(&s, &rows, &n), 1);
    assert_int_equal(n, 2); /* the rest is kept */
    assert_int_equal(data_sampler_next(&s, &rows, &n), 0);
    assert_int_equal(s.epoch, 1);
    json_t *st = json_pack("{s:i, s:i, s:i, s:s, s:b}", "epoch", 0, "index", 3, "n_rows", 6, "seed", "0", "shuffle", 0);
    assert_int_equal(data_sampler_restore(&s, st, "x"), ERR_INPUT);
    assert_non_null(strstr(err_msg(), "had 6 rows when this was saved and has 5 now"));
    json_object_set_new(st, "n_rows", json_integer(5));
    json_object_set_new(st, "index", json_integer(9));
    assert_int_equal(data_sampler_restore(&s, st, "x"), ERR_FORMAT);
    json_object_del(st, "epoch");
    assert_int_equal(data_sampler_restore(&s, st, "x"), ERR_FORMAT);
    json_decref(st);
    data_sampler_free(&s);
}

static void truncation(void **state) {
    (void)state;
    int32_t a[] = {0, 1, 2, 3, 4, 5, 6}, l[] = {4, 5, 6}, r[] = {0, 1, 2}, m[] = {0, 5, 6};
    int32_t x[7];
    assert_int_equal(data_truncate(memcpy(x, a, sizeof a), 7, 3, DATA_TRUNC_LEFT), 3);
    assert_memory_equal(x, l, sizeof l);
    assert_int_equal(data_truncate(memcpy(x, a, sizeof a), 7, 3, DATA_TRUNC_RIGHT), 3);
    assert_memory_equal(x, r, sizeof r);
    assert_int_equal(data_truncate(memcpy(x, a, sizeof a), 7, 3, DATA_TRUNC_MIDDLE), 3);
    assert_memory_equal(x, m, sizeof m); /* verl: max // 2 from the front, the rest from the end */
    assert_int_equal(data_truncate(x, 7, 3, DATA_TRUNC_ERROR), ERR_INPUT);
    assert_int_equal(data_truncate(x, 3, 3, DATA_TRUNC_ERROR), 3);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(select_and_repeat),
        cmocka_unit_test(json_and_back),
        cmocka_unit_test(concat_is_the_inverse_of_select),
        cmocka_unit_test(columns),
        cmocka_unit_test(sampler_is_a_pure_function),
        cmocka_unit_test(sampler_takes_rows),
        cmocka_unit_test(sampler_by_keys),
        cmocka_unit_test(sampler_keys_of_rows),
        cmocka_unit_test(sampler_edges),
        cmocka_unit_test(truncation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
