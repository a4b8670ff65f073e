/* test_view_reader.c - the read side of run.db: what a tracker wrote comes back, of a run that goes on as well; databases of
 * format 1, of others, broken ones; search. */
#include "base/err.h"
#include "base/file.h"
#include "track/track.h"
#include "view/run_reader.h"
#include "view/show.h"

#include <math.h>
#include <setjmp.h>
#include <sqlite3.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

#define OK(call) assert_int_equal((call), 0)

static char dir[64];

static int make_dir(void **state) {
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/verlc-test-XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}
static int remove_dir(void **state) {
    (void)state;
    return file_remove_tree(dir);
}

static struct track *open_track(const char *at, int64_t resume_step) {
    static const char *const headlines[][2] = {{"critic/rewards/mean", "reward"}, {NULL, NULL}};
    json_t *config = json_pack("{s:{s:i}}", "data", "train_batch_size", 2), *plan = json_pack("{s:I}", "total", (json_int_t)7);
    struct track *t = NULL;
    const struct track_args a = {.project = "p\xE2\x82\xAC",
                                 .experiment = "e",
                                 .run_dir = at,
                                 .config = config,
                                 .plan = plan,
                                 .headlines = headlines,
                                 .total_steps = 10,
                                 .resume_step = resume_step,
                                 .title = "test"};
    OK(track_open(&t, &a));
    json_decref(config);
    json_decref(plan);
    return t;
}

/* Two groups of two samples: scores 0, 1; none, 0.5. */
/* One turn with two calls, one of which failed, and what they gave; the second turn's call came to nothing. */
static json_t *episode(void) {
    json_t *o = json_loads(
        "{\"turns\": 4, \"end\": \"max_user_turns\", \"malformed\": 1, \"dropped\": 2, \"calls\": ["
        "{\"segment\": 0, \"name\": \"add\", \"arguments\": \"{\\\"a\\\": 1}\", \"result\": \"2\", \"status\": \"ok\", "
        "\"seconds\": 0.25,"
        " \"reward\": 0.5, \"truncated\": true},"
        "{\"segment\": 0, \"name\": \"find\", \"arguments\": \"\", \"result\": \"Error\", \"status\": \"timeout\", \"seconds\": "
        "30},"
        "{\"segment\": 2, \"name\": \"add\", \"arguments\": \"{}\", \"result\": \"lost\", \"status\": \"ok\", \"seconds\": 1}]}",
        0, NULL);
    assert_non_null(o);
    return o;
}

static void log_samples(struct track *t, int64_t step, bool validation) {
    static const int32_t prompt[] = {5, -1, 7}, ids[] = {9, 10, 11}, segments[] = {1, 0, 1, 1, 1, 0};
    static const float logp[] = {-0.5f, -1.25f, 0}, entropy[] = {0.25f, 2, 0}, advantages[] = {1, -1, 0};
    static const uint16_t bytes[] = {2, 3, 0};
    static const double scores[] = {0, 1, NAN, 0.5};
    for (int i = 0; i < 4; i++) {
        json_t *extra = json_pack("{s:i}", "acc", i), *record = i == 2 ? episode() : NULL;
        const struct track_sample s = {.step = step,
                                       .validation = validation,
                                       .uid = 40 + i / 2,
                                       .index = i % 2,
                                       .data_source = "d",
                                       .prompt = {"one\ntwo", 7},
                                       .response = {"4\0\xE2\x82\xAC", 5},
                                       .ground_truth = {"4", 1},
                                       .prompt_ids = prompt,
                                       .ids = ids,
                                       .n_prompt = 3,
                                       .n = i == 3 ? 1 : 3,
                                       .logp = logp,
                                       .entropy = entropy,
                                       .advantages = advantages,
                                       .token_bytes = bytes,
                                       .segments = i == 1 || i == 2 ? segments : NULL,
                                       .n_segments = i == 1 || i == 2 ? 3 : 1,
                                       .episode = record,
                                       .score = scores[i],
                                       .advantage = i,
                                       .reward_status = i == 2 ? "crash" : "score",
                                       .reward_message = i == 2 ? "ValueError" : NULL,
                                       .extra = extra,
                                       .finish = i == 3 ? "length" : "stop"};
        track_sample(t, &s);
        json_decref(extra);
        json_decref(record);
    }
}

static void log_step(struct track *t, int64_t step, double v) {
    struct metrics m = {0};
    metrics_set(&m, v, "critic/rewards/mean");
    if (step % 2) metrics_set(&m, NAN, "actor/odd");
    log_samples(t, step, false);
    track_log(t, step, &m);
    metrics_free(&m);
}

static struct run_reader *open_reader(const char *path) {
    struct run_reader *r;
    OK(run_reader_open(&r, path));
    return r;
}

/* Runs SQL on the file of the directory. */
static void sql(const char *text) {
    sqlite3 *db;
    char *path = file_join(dir, "run.db");
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    assert_int_equal(sqlite3_exec(db, text, NULL, NULL, NULL), SQLITE_OK);
    sqlite3_close(db);
    free(path);
}

/* ---- metrics, meta, status, events ---- */

static int count_event(void *arg, const struct run_event *e) {
    int *n = arg;
    assert_string_equal(e->kind, *n ? "warning" : "checkpoint");
    assert_string_equal(e->message, *n ? "low" : "there");
    assert_true(e->wall > 1e9 && e->step == 2 + *n);
    ++*n;
    return 0;
}

static int check_histogram(void *arg, const struct run_histogram *h) {
    int64_t sum = 0;
    for (int64_t i = 0; i < h->n; i++) sum += h->counts[i];
    assert_true(h->lo == 0 && h->hi == 1 && sum == 3);
    ++*(int *)arg;
    return 0;
}

static void test_run(void **state) {
    (void)state;
    struct track *t = open_track(dir, -1);
    struct run_meta m;
    struct run_status s;
    struct run_names names;
    struct run_series v;
    struct run_steps steps;
    struct metrics all = {0};
    struct run_reader *r = open_reader(dir);
    OK(run_reader_meta(r, &m));
    assert_true(m.format == 2 && m.last_step == -1 && m.total_steps == 10 && m.started > 1e9 && m.ended == 0 && !m.exit);
    run_meta_free(&m);
    for (int i = 1; i <= 5; i++) log_step(t, i, i / 4.0);
    track_event(t, 2, "checkpoint", "there");
    track_event(t, 3, "warning", "low");
    track_phase(t, 6, "update_actor");
    OK(track_flush(t)); /* and the run goes on */
    OK(run_reader_meta(r, &m));
    assert_string_equal(m.project, "p\xE2\x82\xAC");
    assert_string_equal(json_string_value(json_array_get(m.headline, 0)), "critic/rewards/mean");
    assert_int_equal(json_integer_value(json_object_get(m.plan, "total")), 7);
    assert_int_equal(m.last_step, 5);
    run_meta_free(&m);
    OK(run_reader_metric_names(r, &names));
    assert_int_equal(names.n, 2);
    assert_string_equal(names.v[0], "actor/odd");
    run_names_free(&names);
    OK(run_reader_series(r, "critic/rewards/mean", 2, &v));
    assert_true(v.n == 3 && v.step[0] == 3 && v.value[2] == 1.25);
    run_series_free(&v);
    OK(run_reader_series(r, "actor/odd", -1, &v));
    assert_true(v.n == 3 && v.step[2] == 5 && isnan(v.value[0]));
    run_series_free(&v);
    OK(run_reader_series(r, "no", -1, &v));
    assert_int_equal(v.n, 0);
    run_series_free(&v);
    OK(run_reader_steps(r, 3, &steps));
    assert_true(steps.n == 2 && steps.v[0] == 4);
    run_steps_free(&steps);
    OK(run_reader_step(r, 4, &all));
    assert_true(all.n == 1 && all.items[0].value == 1);
    metrics_free(&all);
    int n = 0;
    OK(run_reader_events(r, 0, count_event, &n));
    assert_int_equal(n, 2);
    n = 0;
    OK(run_reader_histograms(r, "score", false, 1, check_histogram, &n));
    assert_int_equal(n, 4);
    track_close(t, err_set(ERR_IO, "x", 1, "disk full"));
    OK(run_reader_status(r, &s));
    assert_true(s.known && s.step == 6 && s.pid == getpid() && s.since > 1e9 && s.host[0]);
    assert_string_equal(s.phase, "update_actor");
    OK(run_reader_meta(r, &m));
    assert_string_equal(m.exit, "failed: disk full");
    assert_true(m.ended >= m.started);
    run_meta_free(&m);
    run_reader_close(r);
}

/* ---- samples ---- */

struct seen {
    int n;
    bool whole;
};

static int check_sample(void *arg, const struct run_sample *s) {
    struct seen *seen = arg;
    const int i = seen->n++;
    assert_true(s->step == 2 && s->uid == 40 + i / 2 && s->index == i % 2 && s->n_prompt == 3 && s->n == (i == 3 ? 1 : 3));
    assert_true(i == 2 ? isnan(s->score) : s->score == (i == 3 ? 0.5 : i));
    assert_true(s->advantage == i);
    assert_string_equal(s->finish, i == 3 ? "length" : "stop");
    if (i == 2) assert_string_equal(s->reward_message, "ValueError");
    else assert_null(s->reward_message);
    assert_true((s->logp != NULL) == seen->whole);
    if (!seen->whole) return 0;
    assert_memory_equal(s->response.p, "4\0\xE2\x82\xAC", 6);
    assert_true(s->response.n == 5 && s->prompt.n == 7 && s->ids[0] == 9 && s->prompt_ids[1] == -1 && s->logp[0] == -0.5f);
    assert_true(s->entropy && s->advantages && !s->ref_logp);
    if (i == 3) assert_null(s->ends); /* lengths that are not the text's */
    else assert_true(s->ends[0] == 2 && s->ends[1] == 5 && s->ends[2] == 5);
    assert_int_equal(json_integer_value(json_object_get(s->extra, "acc")), i);
    return 0;
}

static int refuse_sample(void *arg, const struct run_sample *s) {
    (void)s;
    ++*(int *)arg;
    FAIL(ERR_IO, "no");
}

static void test_samples(void **state) {
    (void)state;
    struct track *t = open_track(dir, -1);
    for (int i = 1; i <= 3; i++) log_step(t, i, i);
    log_samples(t, 3, true);
    OK(track_flush(t));
    char *path = file_join(dir, "run.db");
    struct run_reader *r = open_reader(path);
    free(path);
    struct run_sample_query q = {.step = 2, .uid = -1, .index = -1};
    struct seen seen = {0};
    OK(run_reader_samples(r, &q, check_sample, &seen));
    assert_int_equal(seen.n, 4);
    q.whole = true;
    seen = (struct seen){.whole = true};
    OK(run_reader_samples(r, &q, check_sample, &seen));
    assert_int_equal(seen.n, 4);
    q.uid = 41;
    q.index = 1;
    seen = (struct seen){.n = 3, .whole = true};
    OK(run_reader_samples(r, &q, check_sample, &seen));
    assert_int_equal(seen.n, 4);
    q = (struct run_sample_query){.step = 2, .uid = -1, .index = -1, .offset = 1, .limit = 2};
    seen = (struct seen){.n = 1};
    OK(run_reader_samples(r, &q, check_sample, &seen));
    assert_int_equal(seen.n, 3);
    q = (struct run_sample_query){.id = 6, .whole = true}; /* the second one of step 2 */
    seen = (struct seen){.n = 1, .whole = true};
    OK(run_reader_samples(r, &q, check_sample, &seen));
    assert_int_equal(seen.n, 2);
    int n = 0;
    assert_int_equal(run_reader_samples(r, &(struct run_sample_query){.step = 2, .uid = -1, .index = -1}, refuse_sample, &n),
                     ERR_IO);
    assert_int_equal(n, 1);
    struct run_steps steps;
    OK(run_reader_sample_steps(r, true, &steps));
    assert_true(steps.n == 1 && steps.v[0] == 3);
    run_steps_free(&steps);
    run_reader_close(r);
    track_close(t, 0);
}

/* A sample of prompt 40, as text or JSON; caller frees. */
static char *shown(struct run_reader *r, int64_t step, int64_t index, bool json) {
    struct buf out = {0};
    const struct show_args a = {.term = {.width = 40}, .json = json, .step = step, .uid = 40 + index / 2, .index = index % 2};
    OK(show_sample(r, &a, &out));
    return buf_take(&out);
}

/* Turns with calls and results; damaged records are absent or empty. */
static void test_episode(void **state) {
    (void)state;
    static const char *const lines[] = {
        "episode: 4 turns, ended by max_user_turns; 3 tool calls, 1 failed, 1 malformed, 2 dropped\n",
        "\n  call add {\"a\": 1}\n  call find \n── environment 1 tokens, mask 0 ",
        "\n  result of add: ok, 0.25 s, reward 0.5, cut\n  result of find: timeout, 30 s\n",
        "\n  call add {}\n  result of add: ok, 1 s, not in the response: lost\n"};
    static const char *const damage[] = {"'{\"turns\": -3, \"calls\": 5}'",
                                         "'{\"calls\": [1, null, [], \"x\", {\"segment\": 1e99, \"name\": 2, \"status\": []}]}'",
                                         "'[]'",
                                         "'{\"calls\": [{\"segment\": 0}'",
                                         "x'7B7D'",
                                         "NULL",
                                         "17"};
    struct track *t = open_track(dir, -1);
    for (int i = 1; i <= 3; i++) log_step(t, i, i);
    track_close(t, 0);
    struct run_reader *r = open_reader(dir);
    char *turns = shown(r, 2, 2, false), *one = shown(r, 2, 0, false), *as_json = shown(r, 2, 2, true);
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
        if (!strstr(turns, lines[i])) fail_msg("no line '%s' in\n%s", lines[i], turns);
    assert_null(strstr(one, "episode"));
    assert_non_null(strstr(as_json, "\"end\":\"max_user_turns\""));
    run_reader_close(r);
    free(turns);
    free(one);
    free(as_json);
    for (size_t i = 0; i < sizeof damage / sizeof *damage; i++) {
        char *change = xasprintf("UPDATE samples SET episode = %s", damage[i]);
        sql(change);
        r = open_reader(dir);
        turns = shown(r, 2, 2, false);
        assert_int_equal(strstr(turns, "episode: 0 turns") != NULL, i < 2);
        run_reader_close(r);
        free(turns);
        free(change);
    }
    sql("ALTER TABLE samples DROP COLUMN episode");
    r = open_reader(dir);
    turns = shown(r, 2, 2, false);
    assert_null(strstr(turns, "episode"));
    run_reader_close(r);
    free(turns);
    t = open_track(dir, 3); /* a run of a verlc that had no such column goes on */
    log_step(t, 4, 4);
    track_close(t, 0);
    r = open_reader(dir);
    turns = shown(r, 4, 2, false);
    assert_non_null(strstr(turns, lines[0]));
    run_reader_close(r);
    free(turns);
}

static void test_episode_filter(void **state) {
    (void)state;
    json_t *record = episode();
    static const struct {
        struct run_episode_filter f;
        bool fits;
    } cases[] = {{{0}, true},
                 {{.tool = "find"}, true},
                 {{.tool = "fin"}, false},
                 {{.failed = true}, true},
                 {{.min_turns = 4, .max_turns = 4}, true},
                 {{.min_turns = 5}, false},
                 {{.max_turns = 3}, false},
                 {{.tool = "add", .failed = true, .min_turns = 2}, true}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(run_episode_fits(record, &cases[i].f), cases[i].fits);
        assert_int_equal(run_episode_fits(NULL, &cases[i].f), i == 0);
    }
    json_t *tools = run_episode_tools(record);
    assert_int_equal(json_array_size(tools), 2);
    json_decref(tools);
    json_object_set_new(record, "malformed", json_integer(0));
    json_object_set_new(json_array_get(json_object_get(record, "calls"), 1), "status", json_string("ok"));
    assert_false(run_episode_fits(record, &cases[3].f));
    json_decref(record);
}

/* Who wrote a response's tokens is shown where it is not the policy alone; a run.db without the column has one segment. */
static void test_segments(void **state) {
    (void)state;
    static const char *const damage[] = {"UPDATE samples SET segments = x'0100000000000000'", "UPDATE samples SET segments = x'01'",
                                         "UPDATE samples SET segments = x'FFFFFFFF000000000400000001000000'",
                                         "ALTER TABLE samples DROP COLUMN segments"};
    struct track *t = open_track(dir, -1);
    for (int i = 1; i <= 3; i++) log_step(t, i, i);
    track_close(t, 0);
    struct run_reader *r = open_reader(dir);
    char *several = shown(r, 2, 1, false), *one = shown(r, 2, 0, false), *as_json = shown(r, 2, 1, true);
    assert_non_null(strstr(several, "segments (tokens): policy (1), environment (1), policy (1)\n"));
    assert_non_null(strstr(several, "response ─"));
    assert_non_null(strstr(several, "environment ─"));
    assert_null(strstr(one, "environment"));
    assert_null(strstr(one, "segments"));
    assert_non_null(strstr(as_json, "\"segments\":[[1,\"policy\"],[1,\"environment\"],[1,\"policy\"]]"));
    run_reader_close(r);
    free(several);
    free(as_json);
    for (size_t i = 0; i < sizeof damage / sizeof *damage; i++) {
        sql(damage[i]);
        r = open_reader(dir);
        several = shown(r, 2, 1, false);
        assert_null(strstr(several, "environment"));
        run_reader_close(r);
        free(several);
    }
    t = open_track(dir, 3); /* a run of a verlc that had no such column goes on */
    log_step(t, 4, 4);
    track_close(t, 0);
    r = open_reader(dir);
    several = shown(r, 2, 0, false);
    assert_string_equal(several, one);
    free(several);
    free(one);
    several = shown(r, 4, 1, false);
    assert_non_null(strstr(several, "environment ─"));
    free(several);
    run_reader_close(r);
}

/* ---- search ---- */

static void test_search(void **state) {
    (void)state;
    struct track *t = open_track(dir, -1);
    for (int i = 1; i <= 3; i++) log_step(t, i, i);
    track_close(t, 0);
    struct run_reader *r = open_reader(dir);
    struct run_search *s;
    struct run_match m;
    int64_t done, total;
    struct run_search_args a = {.pattern = "^T.o$", .ignore_case = true, .prompts = true, .responses = true, .step = -1};
    OK(run_search_create(&s, r, &a));
    for (int i = 0; i < 12; i++) {
        int rc;
        while ((rc = run_search_next(s, 0, &m)) == RUN_SEARCH_MORE) continue;
        assert_int_equal(rc, RUN_SEARCH_MATCH);
        assert_true(m.step == 3 - i / 4 && m.uid == 40 + i % 4 / 2 && m.index == i % 2 && m.line_no == 2 && !m.in_response);
        assert_true(m.line.n == 3 && m.lo == 0 && m.hi == 3);
    }
    while (run_search_next(s, 0, &m) == RUN_SEARCH_MORE) continue;
    run_search_progress(s, &done, &total);
    assert_true(done == 12 && total == 12);
    assert_int_equal(run_search_next(s, 1, &m), RUN_SEARCH_END);
    run_search_destroy(s);
    a = (struct run_search_args){.pattern = "o|\xE2\x82\xAC", .prompts = true, .responses = true, .step = 2};
    OK(run_search_create(&s, r, &a));
    int lines = 0, in_response = 0;
    while (run_search_next(s, 60, &m) == RUN_SEARCH_MATCH) {
        lines++;
        in_response += m.in_response;
        if (m.in_response) assert_true(m.line.n == 5 && m.lo == 2 && m.hi == 5);
        if (m.in_response) run_search_skip_sample(s);
    }
    assert_true(lines == 12 && in_response == 4);
    size_t lo, hi;
    assert_true(run_search_in_line(s, (struct track_text){"foo", 3}, 2, &lo, &hi) && lo == 2 && hi == 3);
    assert_false(run_search_in_line(s, (struct track_text){"foo", 3}, 3, &lo, &hi));
    run_search_destroy(s);
    a.pattern = "a(b";
    assert_int_equal(run_search_create(&s, r, &a), ERR_INVAL);
    assert_non_null(strstr(err_msg(), "at byte 3"));
    run_reader_close(r);
}

/* ---- files of others ---- */

static void refused(const char *path, int code, const char *text) {
    struct run_reader *r;
    assert_int_equal(run_reader_open(&r, path), code);
    if (!strstr(err_msg(), text)) fail_msg("no '%s' in: %s", text, err_msg());
}

static void test_no_run(void **state) {
    (void)state;
    refused(dir, ERR_INPUT, "nor has a directory below");
    refused("/nonexistent/x", ERR_INPUT, "does not exist");
    char *below = file_join(dir, "a/b"), *ckpt = file_join(dir, "a/b/global_step_3"), *hidden = file_join(dir, ".x");
    OK(file_mkdirs(ckpt));
    OK(file_mkdirs(hidden));
    struct track *t = open_track(below, -1);
    track_close(t, 0);
    char *copy = file_join(hidden, "run.db"), *path = file_join(below, "run.db");
    char junk[4096];
    memset(junk, 'x', sizeof junk);
    OK(file_write_atomic(copy, junk, sizeof junk));
    refused(dir, ERR_INPUT, "runs below it: ");
    refused(dir, ERR_INPUT, below);
    struct run_list p;
    OK(run_list_find(&p, dir));
    assert_int_equal(p.n, 1); /* not the hidden one */
    assert_string_equal(p.v[0].dir, below);
    assert_true(p.v[0].modified > 1e9);
    run_list_free(&p);
    assert_int_equal(run_list_find(&p, path), ERR_INPUT);
    refused(copy, ERR_FORMAT, "not a database");
    OK(file_write_atomic(copy, "", 0));
    refused(copy, ERR_FORMAT, "has no table meta");
    free(below);
    free(ckpt);
    free(hidden);
    free(copy);
    free(path);
}

/* Values of other types, sizes that do not fit: absent. */
static void test_foreign(void **state) {
    (void)state;
    struct track *t = open_track(dir, -1);
    log_step(t, 2, 1);
    track_close(t, 0);
    sql("UPDATE samples SET logp = x'00', entropy = 'text', ids = 7, score = 'high', extra = '[1', response = x'ff', uid = 'u';"
        "UPDATE samples SET prompt = CAST(x'41ff42' AS TEXT) WHERE sample = 1;"
        "UPDATE meta SET value = '{' WHERE key = 'config'; UPDATE meta SET value = 3 WHERE key = 'headline';"
        "UPDATE meta SET value = '1e999' WHERE key = 'total_steps'; UPDATE status SET value = x'00';"
        "UPDATE histograms SET counts = x'0102', lo = 'x'; UPDATE metrics SET value = 'text';"
        "INSERT INTO metrics VALUES('step', 'name', 1)");
    struct run_reader *r = open_reader(dir);
    struct run_meta m;
    struct run_series v;
    struct run_status s;
    OK(run_reader_meta(r, &m));
    assert_true(!m.config && json_array_size(m.headline) == 0 && m.total_steps == 0);
    run_meta_free(&m);
    OK(run_reader_status(r, &s));
    OK(run_reader_series(r, "critic/rewards/mean", -1, &v));
    assert_true(v.n == 1 && isnan(v.value[0]));
    run_series_free(&v);
    int n = 0;
    OK(run_reader_histograms(r, "score", false, -1, check_histogram, &n));
    assert_int_equal(n, 0);
    struct run_sample_query q = {.step = 2, .uid = -1, .index = -1, .whole = true};
    assert_int_equal(run_reader_samples(r, &q, refuse_sample, &n), ERR_IO); /* it comes, with what it has */
    struct run_search *find;
    struct run_match match;
    OK(run_search_create(&find, r,
                         &(struct run_search_args){.pattern = "^A\xEF\xBF\xBD"
                                                              "B$",
                                                   .prompts = true,
                                                   .step = -1}));
    assert_int_equal(run_search_next(find, 60, &match), RUN_SEARCH_MATCH); /* what is not UTF-8 is repaired */
    run_search_destroy(find);
    run_reader_close(r);
    sql("UPDATE meta SET value = '3' WHERE key = 'format'");
    refused(dir, ERR_UNSUPPORTED, "format 3");
    sql("DROP TABLE samples; CREATE VIEW samples AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM "
        "c");
    refused(dir, ERR_FORMAT, "no table samples");
}

/* ---- prompts ---- */

/* "<s> user \n Hi! </s>" of tokens 1, 20, 21, 22, 2, of which 1 and 2 are special. */
static void log_prompt(struct track *t) {
    static const int32_t prompt[] = {1, 20, 21, 22, 2}, ids[] = {30, 2};
    static const float logp[] = {-1, -2};
    static const uint16_t prompt_bytes[] = {0, 4, 1, 3, 0}, bytes[] = {2, 0};
    const struct track_sample s = {.step = 1,
                                   .uid = 7,
                                   .prompt = {"user\nHi!", 8},
                                   .response = {"ok", 2},
                                   .prompt_ids = prompt,
                                   .n_prompt = 5,
                                   .prompt_bytes = prompt_bytes,
                                   .ids = ids,
                                   .n = 2,
                                   .logp = logp,
                                   .token_bytes = bytes,
                                   .score = 1,
                                   .advantage = NAN,
                                   .reward_status = "score",
                                   .finish = "stop"};
    track_sample(t, &s);
}

static int check_prompt(void *arg, const struct run_sample *s) {
    static const int64_t ends[] = {0, 4, 5, 8, 8};
    assert_memory_equal(s->prompt_ends, ends, sizeof ends);
    const struct track_text m = run_user_message(s, ((struct run_meta *)arg)->special_tokens);
    assert_true(m.n == 3 && memcmp(m.p, "Hi!", 3) == 0);
    return 0;
}

static void test_prompt_tokens(void **state) {
    (void)state;
    json_t *set = json_pack("[s, s]", "data.seed", "trainer"), *special = json_pack("{s:s, s:s}", "1", "<s>", "2", "</s>");
    struct track *t = NULL;
    struct run_meta m;
    struct run_steps steps;
    OK(track_open(&t, &(struct track_args){.run_dir = dir, .set = set, .special_tokens = special, .title = "test"}));
    log_prompt(t);
    track_close(t, 0);
    struct run_reader *r = open_reader(dir);
    OK(run_reader_meta(r, &m));
    assert_true(json_equal(m.set, set) && json_equal(m.special_tokens, special));
    OK(run_reader_samples(r, &(struct run_sample_query){.step = 1, .uid = -1, .index = -1, .whole = true}, check_prompt, &m));
    OK(run_reader_prompt_steps(r, 7, false, &steps));
    assert_true(steps.n == 1 && steps.v[0] == 1);
    run_steps_free(&steps);
    OK(run_reader_prompt_steps(r, 7, true, &steps));
    assert_int_equal(steps.n, 0);
    run_steps_free(&steps);
    OK(run_reader_prompt_steps(r, 8, false, &steps));
    assert_int_equal(steps.n, 0);
    run_steps_free(&steps);
    run_meta_free(&m);
    run_reader_close(r);
    json_decref(set);
    json_decref(special);
}

/* The last message of the user in prompts of several templates, of which only the text is known. */
static void test_user_message(void **state) {
    (void)state;
    static const struct {
        const char *prompt, *message;
    } cases[] = {{"system\nYou are Qwen.\nuser\nHow many?\nassistant\n", "How many?"},
                 {"user\nFirst?\nassistant\nYes.\nuser\nAnd then?\nassistant\n<think>\n", "And then?"},
                 {"system\n\nCutting\n\nuser\n\nHow many?assistant\n\n", "How many?assistant"}, /* no line says where it ends */
                 {"user\nTwo\nlines?\nmodel\n", "Two\nlines?"},
                 {"<s>[INST] How many? [/INST]", "How many?"},
                 {"<|user|>\nHow many?\n<|assistant|>\n", "How many?"},
                 {"User: How many?\n\nAssistant:", "How many?"},
                 {"Human: How many?\n\nAssistant:", "How many?"},
                 {"How many users\nare there?", "How many users\nare there?"},
                 {"the user\nasks", "the user\nasks"},
                 {"user\n\nassistant\n", "user\n\nassistant\n"},
                 {"user\n", "user\n"},
                 {"user", "user"},
                 {"", ""}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct run_sample s = {.prompt = {cases[i].prompt, strlen(cases[i].prompt)}};
        const struct track_text m = run_user_message(&s, NULL);
        char got[128];
        snprintf(got, sizeof got, "%.*s", (int)m.n, m.p);
        assert_string_equal(got, cases[i].message);
    }
}

/* With its tokens: a line "user" in the message is not taken for a role, a part of a character not for its end, and the end needs
 * no new line. */
static void test_user_message_by_tokens(void **state) {
    (void)state;
    static const char text[] = "system\nBe brief.user\n\nIs a line\nuser\na role \xE2\x82\xAC?assistant\n\n";
    static const char message[] = "Is a line\nuser\na role \xE2\x82\xAC?";
    const int64_t user = strstr(text, "user") - text, euro = strstr(text, "\xE2") - text, end = strstr(text, "assistant") - text,
                  n = (int64_t)strlen(text);
    const int32_t ids[] = {1, 50, 1, 51, 52, 53, 54, 2, 1, 55};
    const int64_t ends[] = {0, user, user, euro, euro, euro + 3, end, end, end, n};
    json_t *special = json_pack("{s:s, s:s}", "1", "<|start|>", "2", "<|end|>"), *named = json_pack("{s:s}", "1", "<|user|>");
    const struct run_sample s = {.prompt = {text, (size_t)n}, .prompt_ids = ids, .prompt_ends = ends, .n_prompt = 10};
    struct track_text m = run_user_message(&s, special);
    assert_true(m.n == strlen(message) && memcmp(m.p, message, m.n) == 0);
    const int32_t turn[] = {1, 60, 2};
    const int64_t turn_ends[] = {0, 3, 3};
    const struct run_sample by_name = {.prompt = {"Hi!", 3}, .prompt_ids = turn, .prompt_ends = turn_ends, .n_prompt = 3};
    m = run_user_message(&by_name, named);
    assert_true(m.n == 3 && memcmp(m.p, "Hi!", 3) == 0);
    json_decref(special);
    json_decref(named);
}

/* ---- what a list of runs shows ---- */

static void test_recent(void **state) {
    (void)state;
    struct track *t = open_track(dir, -1);
    char name[256];
    double v;
    for (int i = 1; i <= 9; i++) {
        struct metrics m = {0};
        metrics_set(&m, i == 8 ? NAN : (double)i, "critic/rewards/mean");
        metrics_set(&m, -1, "critic/rewards/mean_of_others");
        if (i == 4) metrics_set(&m, 0.5, "val-core/b/mean@4");
        if (i == 4) metrics_set(&m, 0.25, "val-core/a/mean@4");
        if (i == 4) metrics_set(&m, 0.75, "val-core/a/best@4/mean");
        track_log(t, i, &m);
        metrics_free(&m);
    }
    track_close(t, 0);
    struct run_reader *r = open_reader(dir);
    OK(run_reader_recent(r, "critic/rewards/mean", 3, 100, name, &v));
    assert_string_equal(name, "critic/rewards/mean");
    assert_true(v == (9 + 7 + 6) / 3.0); /* step 8 is no number */
    OK(run_reader_recent(r, "val-core/", 1, 100, name, &v));
    assert_string_equal(name, "val-core/a/mean@4");
    assert_true(v == 0.25);
    OK(run_reader_recent(r, "val-core/", 1, 5, name, &v)); /* further back than it looks */
    assert_true(!name[0] && isnan(v));
    OK(run_reader_recent(r, "no/such", 1, 100, name, &v));
    assert_true(!name[0] && isnan(v));
    run_reader_close(r);
}

/* Samples whose score is in a range; the one without a score is in none. */
static void test_search_range(void **state) {
    (void)state;
    struct track *t = open_track(dir, -1);
    log_step(t, 1, 1);
    track_close(t, 0);
    struct run_reader *r = open_reader(dir);
    static const struct {
        double min, max;
        int n;
    } cases[] = {{0, 1, 3}, {0.5, 1, 2}, {0.5, 0.5, 1}, {-INFINITY, 0.75, 2}, {0.75, INFINITY, 1}, {2, 3, 0}, {1, 0, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct run_search *s;
        struct run_match m;
        int n = 0, rc;
        int64_t done, total;
        const struct run_search_args a = {
            .pattern = ".", .responses = true, .step = -1, .ranged = true, .min = cases[i].min, .max = cases[i].max};
        OK(run_search_create(&s, r, &a));
        while ((rc = run_search_next(s, 60, &m)) == RUN_SEARCH_MATCH) {
            assert_true(m.score >= cases[i].min && m.score <= cases[i].max);
            run_search_skip_sample(s);
            n++;
        }
        run_search_progress(s, &done, &total);
        assert_true(rc == RUN_SEARCH_END && n == cases[i].n && done == total);
        run_search_destroy(s);
    }
    run_reader_close(r);
}

static void test_format_1(void **state) {
    (void)state;
    struct track *t = open_track(dir, -1);
    log_step(t, 2, 1);
    track_close(t, 0);
    sql("DROP TABLE status; DROP TABLE events; DROP TABLE histograms; DROP INDEX samples_place;"
        "CREATE INDEX samples_step ON samples(step); ALTER TABLE samples DROP COLUMN entropy;"
        "ALTER TABLE samples DROP COLUMN ref_logp; ALTER TABLE samples DROP COLUMN advantages;"
        "ALTER TABLE samples DROP COLUMN reward_message; ALTER TABLE samples DROP COLUMN token_bytes;"
        "ALTER TABLE samples DROP COLUMN prompt_bytes;"
        "DELETE FROM meta WHERE key NOT IN ('project', 'experiment', 'config'); INSERT INTO meta VALUES('format', '1')");
    struct run_reader *r = open_reader(dir);
    struct run_status s;
    struct run_meta m;
    int n = 0;
    OK(run_reader_status(r, &s));
    assert_false(s.known);
    OK(run_reader_meta(r, &m));
    assert_true(m.format == 1 && m.last_step == 2 && m.started == 0 && !*m.version);
    run_meta_free(&m);
    OK(run_reader_events(r, 0, count_event, &n));
    struct run_sample_query q = {.step = 2, .uid = -1, .index = -1, .whole = true};
    assert_int_equal(run_reader_samples(r, &q, refuse_sample, &n), ERR_IO);
    run_reader_close(r);
}

/* Where nothing can be created a finished run is read all the same. */
static void test_read_only(void **state) {
    (void)state;
    struct track *t = open_track(dir, -1);
    log_step(t, 1, 1);
    track_close(t, 0);
    char *wal = file_join(dir, "run.db-wal"), *shm = file_join(dir, "run.db-shm");
    assert_false(file_exists(wal));
    struct run_reader *r = open_reader(dir);
    run_reader_close(r);
    unlink(wal); /* empty */
    unlink(shm);
    OK(chmod(dir, 0555));
    r = open_reader(dir);
    struct run_meta m;
    OK(run_reader_meta(r, &m));
    assert_int_equal(m.last_step, 1);
    run_meta_free(&m);
    run_reader_close(r);
    OK(chmod(dir, 0755));
    free(wal);
    free(shm);
}

#define T(f) cmocka_unit_test_setup_teardown(f, make_dir, remove_dir)
int main(void) {
    const struct CMUnitTest tests[] = {T(test_run),
                                       T(test_samples),
                                       T(test_segments),
                                       T(test_episode),
                                       T(test_episode_filter),
                                       T(test_search),
                                       T(test_no_run),
                                       T(test_foreign),
                                       T(test_prompt_tokens),
                                       T(test_user_message),
                                       T(test_user_message_by_tokens),
                                       T(test_recent),
                                       T(test_search_range),
                                       T(test_format_1),
                                       T(test_read_only)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
