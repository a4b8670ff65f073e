/* test_ranks_worker.c - the seam between stages and devices: an update sees and adds the columns that it declares, in one process
 * as on ranks, which get no other ones. */
#include "model_case.h"

#include "ranks/worker.h"

static int result;

static int update(struct worker *w, struct run *run, struct batch *b) {
    struct batch_col *c;
    (void)w, (void)run;
    assert_int_equal(b->n_rows, 2);
    assert_non_null(batch_find(b, "read"));
    assert_null(batch_find(b, "unread"));
    assert_null(batch_find(b, "written")); /* of an update before */
    OK(batch_add(b, "written", BATCH_F32, NULL, NULL, &c));
    c->f32[1] = 7;
    return batch_add(b, "undeclared", BATCH_F32, NULL, NULL, NULL) < 0 ? -1 : result;
}

static const struct worker_update declared = {.name = "update",
                                              .reads = (const char *const[]){"read", "not there", NULL},
                                              .writes = (const char *const[]){"written", NULL},
                                              .run = update};

static void test_declared_columns(void **state) {
    struct worker w = {.ops = &worker_local};
    struct run run = {0};
    struct batch b;
    (void)state;
    batch_init(&b, 2);
    OK(batch_add(&b, "read", BATCH_I32, (const int64_t[]){2, 1}, (const int32_t[]){1, 2, 3}, NULL));
    OK(batch_add(&b, "unread", BATCH_STR, NULL, NULL, NULL));
    OK(batch_add(&b, "written", BATCH_F32, NULL, NULL, NULL));
    const int32_t *const data = batch_find(&b, "read")->i32;
    result = ERR_NUMERIC;
    assert_int_equal(w.ops->update(&w, &declared, &run, &b), ERR_NUMERIC);
    assert_true(batch_find(&b, "written")->f32[1] == 0);
    result = 0;
    OK(w.ops->update(&w, &declared, &run, &b));
    assert_int_equal(b.n_cols, 3);
    assert_true(batch_find(&b, "written")->f32[1] == 7);
    assert_true(batch_find(&b, "read")->i32 == data && data[2] == 3); /* moved, not copied */
    assert_non_null(batch_find(&b, "unread"));
    batch_free(&b);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_declared_columns)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
