/* test_agent_tool_journal.c - what tools said is found again, and only by the same question. */
#include "agent/tool_journal.h"

#include "base/err.h"
#include "base/file.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#define OK(call) assert_int_equal(call, 0)

/* A directory that is not there yet, in one that is new. Caller frees. */
static char *new_dir(void) {
    char parent[] = "/tmp/verlc-test-XXXXXX";
    assert_non_null(mkdtemp(parent));
    return file_join(parent, "journal");
}

static void remove_dir(char *dir) {
    *strrchr(dir, '/') = 0;
    OK(file_remove_tree(dir));
    free(dir);
}

static struct tool_journal_key key(int64_t step, const char *episode, int64_t turn, int64_t call, const char *question) {
    return (struct tool_journal_key){step, episode, turn, call, "add", question, strlen(question)};
}

static void found_again(void **state) {
    (void)state;
    char *dir = new_dir();
    struct tool_journal *j;
    struct tool_result r = {.status = TOOL_TIMEOUT,
                            .text = (char *)(uintptr_t) "a\"\n\xc3\xa9",
                            .n_text = 5,
                            .has_reward = true,
                            .reward = 0.1,
                            .seconds = 2,
                            .truncated = true,
                            .set = json_pack("{s:i}", "seen", 3)},
                       got;
    OK(tool_journal_open(&j, dir, -1, false));
    const struct tool_journal_key one = key(1, "step1-0-7", 2, 0, "{\"x\":1}"), two = key(2, "step2-0-7", 2, -1, "again");
    assert_false(tool_journal_find(j, &one, &got));
    OK(tool_journal_add(j, &one, &r));
    OK(tool_journal_add(j, &two, &r));
    OK(tool_journal_sync(j));
    tool_journal_close(j);
    OK(tool_journal_open(&j, dir, 1, false));
    assert_true(tool_journal_find(j, &one, &got)); /* a validation of step 1 may be made again */
    assert_int_equal(got.status, TOOL_TIMEOUT);
    assert_int_equal(got.n_text, r.n_text);
    assert_memory_equal(got.text, r.text, r.n_text);
    assert_true(got.has_reward && got.reward == 0.1 && got.seconds == 2 && got.truncated && !got.stop && !got.removed);
    assert_true(json_equal(got.set, r.set));
    tool_result_free(&got);
    const struct tool_journal_key others[] = {key(1, "step1-0-8", 2, 0, "{\"x\":1}"), key(1, "step1-0-7", 4, 0, "{\"x\":1}"),
                                              key(1, "step1-0-7", 2, 1, "{\"x\":1}"), key(1, "step1-0-7", 2, 0, "{\"x\":2}")};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) assert_false(tool_journal_find(j, &others[i], &got));
    OK(tool_journal_forget(j, 2));
    tool_journal_close(j);
    OK(tool_journal_open(&j, dir, 2, false));
    assert_false(tool_journal_find(j, &one, &got));
    assert_true(tool_journal_find(j, &two, &got));
    tool_result_free(&got);
    OK(tool_journal_clear(j));
    tool_journal_close(j);
    assert_false(file_exists(dir));
    json_decref(r.set);
    remove_dir(dir);
}

/* Records reach the disk while others are added; a wait brings at least one. */
static void flushed(void **state) {
    (void)state;
    char *dir = new_dir();
    struct tool_journal *j;
    struct tool_result r = {.text = (char *)(uintptr_t) "4", .n_text = 1}, got;
    int64_t synced = -1, before;
    OK(tool_journal_open(&j, dir, -1, false));
    OK(tool_journal_flush(j, true, &synced));
    assert_int_equal(synced, 0);
    for (int64_t i = 0; i < 200; i++) {
        const struct tool_journal_key k = key(i / 100, "e", i, 0, "q"); /* of two files */
        OK(tool_journal_add(j, &k, &r));
        assert_int_equal(tool_journal_added(j), i + 1);
        before = synced;
        OK(tool_journal_flush(j, i % 3 == 0, &synced));
        assert_true(synced >= before && synced <= i + 1 && (i % 3 != 0 || synced > before || synced == i + 1));
    }
    OK(tool_journal_sync(j));
    OK(tool_journal_flush(j, true, &synced));
    assert_int_equal(synced, 200);
    tool_journal_close(j);
    OK(tool_journal_open(&j, dir, -1, false));
    for (int64_t i = 0; i < 200; i++) {
        const struct tool_journal_key k = key(i / 100, "e", i, 0, "q");
        assert_true(tool_journal_find(j, &k, &got));
        tool_result_free(&got);
    }
    OK(tool_journal_clear(j));
    tool_journal_close(j);
    remove_dir(dir);
}

/* A process that was killed has half written a line, or somebody has damaged the file. */
static void half_written(void **state) {
    (void)state;
    char *dir = new_dir(), *path = file_join(dir, "3.jsonl");
    struct tool_journal *j;
    struct tool_result r = {.text = (char *)(uintptr_t) "4", .n_text = 1}, got;
    const struct tool_journal_key k = key(3, "e", 2, 0, "q"), next = key(3, "e", 4, 0, "q");
    static const char torn[] = "\n{\"key\":\"e/2/0/add/0\",\"text\":\"nev";
    OK(file_mkdirs(dir));
    OK(file_write_atomic(path, torn, sizeof torn - 1));
    OK(tool_journal_open(&j, dir, 2, false));
    OK(tool_journal_add(j, &k, &r));
    tool_journal_close(j);
    static const char wrong[] = "[]\n{\"key\":5}\n{\"key\":\"x\",\"text\":7,\"status\":[],\"set\":1}\n\xff\n";
    char *other = file_join(dir, "4.jsonl");
    OK(file_write_atomic(other, wrong, sizeof wrong - 1));
    OK(tool_journal_open(&j, dir, 2, false));
    assert_true(tool_journal_find(j, &k, &got));
    assert_string_equal(got.text, "4");
    tool_result_free(&got);
    assert_false(tool_journal_find(j, &next, &got));
    tool_journal_close(j);
    OK(tool_journal_open(&j, dir, 2, true)); /* a run that does not go on */
    assert_false(tool_journal_find(j, &k, &got));
    tool_journal_close(j);
    free(path);
    free(other);
    remove_dir(dir);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(found_again), cmocka_unit_test(flushed), cmocka_unit_test(half_written)};
    return cmocka_run_group_tests_name("tool_journal", tests, NULL, NULL);
}
