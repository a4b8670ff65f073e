/* test_agent_loop_output.c - what a loop of the user returns is a sample only where the model has drawn what it says. */
#include "agent/loop_output.h"

#include "base/err.h"
#include "data/data.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

/* "1 2 | 3 4": drawn 3 4 after 1 2. */
static int32_t prompt1[] = {1, 2}, ids1[] = {3, 4}, prompt2[] = {1, 2, 3, 4, 9}, ids2[] = {5, 6}, prompt3[] = {1, 2, 3, 4, 9, 5, 6},
               ids3[] = {7};
static int32_t versions1[] = {4, 5}, versions2[] = {5, 5}, versions3[] = {6};
static float logp1[] = {-1, -2}, logp2[] = {-3, -4}, logp3[] = {-5};
static const struct drawn_turn turns[] = {{prompt1, ids1, logp1, logp1, versions1, 2, 2},
                                          {prompt2, ids2, logp2, logp2, versions2, 5, 2},
                                          {prompt3, ids3, logp3, logp3, versions3, 7, 1}};
static const struct loop_limits limits = {3, 8};

static int read_text(const char *text, struct loop_output *out) {
    json_t *o = json_loads(text, 0, NULL);
    assert_non_null(o);
    const int rc = loop_output_read(out, o, turns, 3, &limits);
    json_decref(o);
    return rc;
}

static void drawn(void **state) {
    (void)state;
    struct loop_output o;
    assert_int_equal(
        read_text("{\"prompt_ids\": [1, 2], \"response_ids\": [3, 4, 9, 5, 6, 7], \"response_mask\": [1, 1, 0, 1, 1, 1],"
                  " \"num_turns\": 4, \"reward_score\": 0.5, \"metrics\": {\"tool_calls\": 2},"
                  " \"extra_fields\": {\"a\": 1}}",
                  &o),
        0);
    static const float logp[] = {-1, -2, 0, -3, -4, -5};
    static const int32_t segments[] = {2, SEGMENT_POLICY, 1, SEGMENT_ENVIRONMENT, 3, SEGMENT_POLICY};
    assert_int_equal(o.n, 6);
    assert_memory_equal(o.logp, logp, sizeof logp);
    static const int32_t versions[] = {4, 5, 5, 5, 5, 6};
    assert_memory_equal(o.versions, versions, sizeof versions);
    assert_int_equal(o.n_segments, 3);
    assert_memory_equal(o.segments, segments, sizeof segments);
    assert_true(o.has_reward && o.reward == 0.5 && o.num_turns == 4 && o.tool_seconds == 2);
    assert_int_equal(json_object_size(o.extra_fields), 1);
    loop_output_free(&o);
    /* a turn may be cut, and nothing be drawn at all */
    assert_int_equal(read_text("{\"prompt_ids\": [1, 2], \"response_ids\": [3], \"response_mask\": [1]}", &o), 0);
    loop_output_free(&o);
    assert_int_equal(read_text("{\"prompt_ids\": [1, 2], \"response_ids\": [], \"response_mask\": []}", &o), 0);
    loop_output_free(&o);
}

static void not_drawn(void **state) {
    (void)state;
    static const char *const bad[][2] = {
        {"{\"prompt_ids\": [1, 2], \"response_ids\": [3, 4, 9, 5], \"response_mask\": [1, 1, 1, 1]}", "has drawn nothing"},
        {"{\"prompt_ids\": [1, 2], \"response_ids\": [3, 8], \"response_mask\": [1, 1]}", "which is 8 where the model drew 4"},
        {"{\"prompt_ids\": [1, 3], \"response_ids\": [3], \"response_mask\": [1]}", "has drawn nothing"},
        {"{\"prompt_ids\": [1, 2], \"response_ids\": [3, 4, 8, 5], \"response_mask\": [1, 1, 0, 1]}", "has drawn nothing"},
        {"{\"prompt_ids\": [1, 2], \"response_ids\": [3, 4], \"response_mask\": [1]}", "a mask of 1"},
        {"{\"prompt_ids\": [1, 2], \"response_ids\": [3], \"response_mask\": [2]}", "0 and 1"},
        {"{\"prompt_ids\": [], \"response_ids\": [3], \"response_mask\": [1]}", "data.max_prompt_length=3"},
        {"{\"prompt_ids\": [1, 2, 3, 4], \"response_ids\": [3], \"response_mask\": [1]}", "data.max_prompt_length=3"},
        {"{\"prompt_ids\": [1, -2], \"response_ids\": [3], \"response_mask\": [1]}", "no token id"},
        {"{\"prompt_ids\": [1, 2], \"response_ids\": 5, \"response_mask\": [1]}", "response_ids is no list"},
        {"{\"prompt_ids\": [1, 2], \"response_ids\": [3], \"response_mask\": [1], \"reward_score\": \"x\"}", "reward_score"},
        {"{}", "prompt_ids is no list"}};
    struct loop_output o;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(read_text(bad[i][0], &o), ERR_FORMAT);
        if (!strstr(err_msg(), bad[i][1])) fail_msg("%s: %s", bad[i][0], err_msg());
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(drawn), cmocka_unit_test(not_drawn)};
    return cmocka_run_group_tests_name("loop_output", tests, NULL, NULL);
}
