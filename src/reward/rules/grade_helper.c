/* grade_helper.c - native graders at work: most answer at once; the questions of the others (what LaTeX says, whether an
 * expression is zero, math-verify) go to helper processes, many at a time.
 *
 * Invariant: every response gives one result; a question that is not answered in time, or whose helper died, is a status. */
#include "reward/reward_int.h"

#include "base/err.h"
#include "helper/helper.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define QUESTION_S 10.    /* verl's limit for one call of sympy */
#define MATH_VERIFY_S 30. /* and for math-verify */
#define START_S 120.      /* imports of packages on a cold disk */
#define MEMORY_BYTES ((int64_t)4 << 30)

struct job {
    const struct reward__grader *grader;
    int64_t tag, response_len;
    char *text, *truth; /* owned, as all below */
    size_t n;
    json_t *targets, *answers;
};
struct reward__graders {
    char *name; /* of the grader of every row; NULL: by data source */
    struct helper_args helper;
    int n_workers;
    double timeout_s;
    struct helper_pool *pool; /* started by the first question */
    struct job **flight;      /* of ticket first_ticket + i */
    int64_t n_flight, flight_cap, first_ticket;
    const char *checked; /* the packages that were last seen to be there */
};

static void free_job(struct job *j) {
    if (!j) return;
    free(j->text);
    free(j->truth);
    json_decref(j->targets);
    json_decref(j->answers);
    free(j);
}

int reward__graders_create(struct reward__graders **out, const struct reward_args *a) {
    enum { DEFAULT_TIMEOUT_S = 300 };
    if (a->grader) TRY(reward_check_grader(a->grader));
    struct reward__graders *s = xcalloc(1, sizeof *s);
    s->name = a->grader ? xstrdup(a->grader) : NULL;
    s->n_workers = a->n_workers > 0 ? a->n_workers : 1;
    s->timeout_s = a->timeout_s > 0 ? a->timeout_s : DEFAULT_TIMEOUT_S;
    s->helper = (struct helper_args){.module = "verlc_helpers.graders",
                                     .python = a->python ? xstrdup(a->python) : NULL,
                                     .log_as = "graders",
                                     .memory_bytes = MEMORY_BYTES,
                                     .start_timeout_s = START_S};
    *out = s;
    return 0;
}

void reward__graders_cancel(struct reward__graders *s) {
    if (s->pool) helper_pool_cancel(s->pool);
    for (int64_t i = 0; i < s->n_flight; i++) free_job(s->flight[i]);
    s->n_flight = 0;
}

void reward__graders_destroy(struct reward__graders *s) {
    if (!s) return;
    reward__graders_cancel(s);
    helper_pool_destroy(s->pool);
    free((char *)(uintptr_t)s->helper.python);
    free(s->flight);
    free(s->name);
    free(s);
}

/* Takes the question and the job. */
static int send_question(struct reward__graders *s, struct job *j, json_t *question) {
    const double limit_s = json_object_get(question, "math_verify") ? MATH_VERIFY_S : QUESTION_S;
    int64_t ticket;
    const struct helper_pool_args pool = {.n = s->n_workers, .n_tries = 2};
    int rc = s->pool ? 0 : helper_pool_create(&s->pool, &s->helper, &pool);
    if (rc == 0) rc = helper_pool_send(s->pool, question, fmin(limit_s, s->timeout_s), &ticket);
    json_decref(question);
    if (rc < 0) {
        free_job(j);
        return rc;
    }
    if (s->n_flight == 0) s->first_ticket = ticket;
    CHECK(ticket - s->first_ticket == s->n_flight);
    xgrow((void **)&s->flight, &s->flight_cap, s->n_flight + 1, sizeof *s->flight);
    s->flight[s->n_flight++] = j;
    return 0;
}

/* 1: *out is the job's result, and the job is freed; 0: it has sent a request. */
static int advance(struct reward__graders *s, struct job *j, struct reward_result *out) {
    struct reward__grading g = {.text = j->text, .n = j->n, .truth = j->truth, .targets = j->targets, .answers = j->answers};
    reward__budget_begin(s->timeout_s);
    *out = j->grader->grade(&g);
    if (!reward__budget_end()) {
        reward_result_free(out);
        json_decref(g.question);
        *out = reward__failure(REWARD_TIMEOUT, xasprintf("grader %s took longer than %g s of processor time for one response "
                                                         "(reward.timeout), or its pattern matcher gave up",
                                                         j->grader->name, s->timeout_s));
        free_job(j);
        return 1;
    }
    if (!g.question) {
        free_job(j);
        return 1;
    }
    reward_result_free(out);
    return send_question(s, j, g.question);
}

bool reward__graders_is_code(const struct reward__graders *s, const char *name, const char *data_source) {
    char *why;
    const struct reward__grader *g = reward__route(name ? name : s->name, data_source ? data_source : "", &why);
    free(why);
    return g && !g->grade;
}

int reward__graders_start(struct reward__graders *s, const struct reward_request *q, int64_t tag, struct reward_result *now) {
    const char *source = q->data_source ? q->data_source : "";
    char *why;
    const struct reward__grader *grader = reward__route(q->grader ? q->grader : s->name, source, &why);
    if (grader) why = reward__check_truth(grader, source, q->ground_truth);
    if (why) {
        *now = reward__failure(REWARD_MISSING, why);
        return 1;
    }
    struct job *j = xcalloc(1, sizeof *j);
    *j = (struct job){.grader = grader, .tag = tag, .response_len = q->response_len};
    j->text = reward__text_of(q->solution, q->n_solution);
    j->n = strlen(j->text);
    if (grader->targets) j->targets = json_incref(json_object_get(q->ground_truth, "target"));
    else j->truth = reward__text(q->ground_truth);
    if (grader->packages) j->answers = json_array();
    return advance(s, j, now);
}

/* The question of j is answered: 1, 0 as advance. */
static int take_answer(struct reward__graders *s, struct job *j, const struct helper_result *h, struct reward_result *out) {
    if (h->rc == 0) {
        json_array_append(j->answers, h->reply);
        return advance(s, j, out);
    }
    *out = reward__failure(h->rc == ERR_TIMEOUT ? REWARD_TIMEOUT : REWARD_CRASH,
                           xasprintf("grader %s: %s", j->grader->name, h->error));
    free_job(j);
    return 1;
}

int reward__graders_take(struct reward__graders *s, double wait_s, struct reward__called *out) {
    struct helper_result h;
    int got = 0;
    while (got == 0 && reward__graders_pending(s) > 0) {
        const int rc = helper_pool_recv(s->pool, wait_s, &h);
        if (rc <= 0) return rc;
        struct job **slot = &s->flight[h.ticket - s->first_ticket], *j = *slot;
        *slot = NULL;
        if (helper_pool_pending(s->pool) == 0) s->n_flight = 0; /* tickets start over at the next question */
        out->tag = j->tag;
        out->response_len = j->response_len;
        got = take_answer(s, j, &h, &out->result);
        helper_result_free(&h);
    }
    return got;
}

int64_t reward__graders_pending(const struct reward__graders *s) { return s->pool ? helper_pool_pending(s->pool) : 0; }

/* ---- before the run ---- */

/* Imports the packages in a helper of their own. */
static int check_packages(const struct reward__graders *s, const struct reward__grader *g, const char *source) {
    struct helper *probe;
    json_t *reply = NULL, *question = json_pack("{s:s}", "packages", g->packages);
    int rc = helper_create(&probe, &s->helper);
    if (rc < 0 && s->helper.python) err_wrap(rc, "reward.python");
    if (rc == 0) {
        rc = helper_call(probe, question, START_S, &reply);
        helper_destroy(probe);
    }
    json_decref(question);
    TRY(rc);
    const char *missing = json_string_value(json_object_get(reply, "missing")),
               *python = json_string_value(json_object_get(reply, "python"));
    if (missing)
        FAILG(out, ERR_HELPER,
              "data_source '%s' is graded by %s, which needs Python packages that are missing: %s. Run: %s -m pip install %s",
              source, g->name, missing, python ? python : "python3", g->packages);
out:
    json_decref(reply);
    return rc;
}

int reward__graders_check(struct reward__graders *s, const char *const *sources, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        char *why;
        const struct reward__grader *g = reward__route(s->name, sources[i], &why);
        if (!g) {
            err_set(ERR_INPUT, __FILE__, __LINE__, "%s", why);
            free(why);
            return ERR_INPUT;
        }
        if (!g->packages || s->checked == g->packages) continue;
        TRY(check_packages(s, g, sources[i]));
        s->checked = g->packages;
    }
    return 0;
}
