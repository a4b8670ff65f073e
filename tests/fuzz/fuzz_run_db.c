/* fuzz_run_db.c - run.db of arbitrary bytes, read as `verlc show`, `grep`, `status` and `view` read one: each is an error with
 * a message, or text. */
#include "fuzz.h"

#include "view/run_episode.h"
#include "view/run_reader.h"
#include "view/show.h"

static int sample(void *arg, const struct run_sample *s) {
    int64_t *sum = arg;
    for (int64_t i = 0; i < s->n; i++) {
        if (s->ids) *sum += s->ids[i];
        if (s->logp && s->logp[i] < 0) ++*sum;
        if (s->entropy && s->entropy[i] < 0) ++*sum;
        if (s->ref_logp && s->ref_logp[i] < 0) ++*sum;
        if (s->advantages && s->advantages[i] < 0) ++*sum;
        if (s->ends) CHECK(s->ends[i] >= 0 && s->ends[i] <= (int64_t)s->response.n);
    }
    for (int64_t i = 0; i < s->n_prompt && s->prompt_ends; i++)
        CHECK(s->prompt_ends[i] >= 0 && s->prompt_ends[i] <= (int64_t)s->prompt.n);
    const struct track_text m = run_user_message(s, NULL);
    CHECK(m.p >= s->prompt.p && m.p + m.n <= s->prompt.p + s->prompt.n);
    json_decref(run_episode_tools(s->episode));
    CHECK(run_episode_of(s->episode).turns >= 0);
    CHECK(s->response.p[s->response.n] == '\0' && s->prompt.p[s->prompt.n] == '\0');
    return 0;
}
static int histogram(void *arg, const struct run_histogram *h) {
    for (int64_t i = 0; i < h->n; i++) CHECK(h->counts[i] >= 0);
    *(int64_t *)arg += h->n;
    return 0;
}

static void read_samples(struct run_reader *r) {
    struct run_steps steps = {0};
    int64_t sum = 0;
    for (int validation = 0; validation < 2; validation++) {
        fuzz_check_rc(run_reader_sample_steps(r, validation, &steps));
        for (int64_t i = 0; i < steps.n && i < 4; i++) {
            const struct run_sample_query q = {
                .step = steps.v[i], .validation = validation, .uid = -1, .index = -1, .whole = true, .limit = 20};
            fuzz_check_rc(run_reader_samples(r, &q, sample, &sum));
        }
        run_steps_free(&steps);
        fuzz_check_rc(run_reader_histograms(r, "score", validation, -1, histogram, &sum));
    }
}

static void search(struct run_reader *r) {
    struct run_search *s;
    struct run_match m;
    const struct run_search_args a = {.pattern = "a|4", .prompts = true, .responses = true, .step = -1};
    int rc = run_search_create(&s, r, &a);
    fuzz_check_rc(rc);
    if (rc < 0) return;
    for (int i = 0; i < 50 && (rc = run_search_next(s, 1, &m)) == RUN_SEARCH_MATCH; i++) CHECK(m.lo <= m.hi && m.hi <= m.line.n);
    fuzz_check_rc(rc);
    run_search_destroy(s);
}

static void show(struct run_reader *r) {
    struct show_args a = {.term = {.width = 80, .colour = true}, .step = -1, .uid = -1, .index = -1, .limit = 5};
    struct buf out = {0};
    bool alive;
    for (int json = 0; json < 2; json++) {
        a.json = json;
        fuzz_check_rc(show_run(r, &a, &out));
        fuzz_check_rc(show_status(r, &a, &out, &alive));
        a.step = 1;
        fuzz_check_rc(show_step(r, &a, &out));
        a.uid = 3;
        for (int by = SHOW_LOGP; by <= SHOW_KL; by++) {
            a.by = (enum show_colour)by;
            fuzz_check_rc(show_sample(r, &a, &out));
        }
        a.fits = (struct run_episode_filter){.tool = "add", .failed = json, .min_turns = 1, .max_turns = 9};
        fuzz_check_rc(show_step(r, &a, &out));
        a.fits = (struct run_episode_filter){0};
        a.step = a.uid = -1;
    }
    CHECK(out.n == 0 || memchr(out.p, '\0', out.n) == NULL);
    buf_free(&out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    struct run_reader *r;
    fuzz_quiet();
    char *path = fuzz_file("run.db", data, n), *wal = xasprintf("%s-wal", path), *shm = xasprintf("%s-shm", path);
    unlink(wal);
    unlink(shm);
    const int rc = run_reader_open(&r, path);
    fuzz_check_rc(rc);
    if (rc == 0) {
        read_samples(r);
        search(r);
        show(r);
        run_reader_close(r);
    }
    free(path);
    free(wal);
    free(shm);
    return 0;
}
