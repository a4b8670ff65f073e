/* external_engine.c - the operations of a worker that generates on servers: requests that wait, those under way, new weights. See
 * external_engine.h.
 *
 * No thread: connections are a helper's (verlc_helpers/engine_http.py), and answers are taken in generate_step.
 * Invariant: every sample that was asked for is given to `done` once, or the generation ends with an error. */
#include "external_engine/servers.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/map.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WAIT_S 0.05 /* for an answer, before the program looks at what else there is */

struct job {                 /* one sample */
    struct engine_request q; /* its arrays are owned; n is 1 */
    int64_t id, index, ticket, n_failed;
    int server;   /* of the latest try */
    double begun; /* when it was sent first */
};
struct external_engine {
    struct servers servers;
    struct worker_ops ops; /* the worker's, but for generation */
    const struct worker_ops *base;
    const struct tokenizer *tok;
    struct model_config model;
    char *weights_dir; /* absolute */
    int64_t n_retries;
    bool stale; /* the servers do not have the policy's weights */
    int64_t n_updates;
    /* of the generation under way */
    struct worker_generation to;
    struct job **waiting, **running; /* in the order in which they came; in no order */
    int64_t n_waiting, cap_waiting, n_running, cap_running, n_requests, n_sampled, n_finished, n_resent;
    struct map home; /* of a sample's user and index the server that drew for it */
};

/* ---- jobs ---- */

static void job_free(struct job *j) {
    free((void *)(uintptr_t)j->q.prompt);
    free((void *)(uintptr_t)j->q.begun);
    free((void *)(uintptr_t)j->q.begun_logp);
    free((void *)(uintptr_t)j->q.begun_logp_kept);
    free((void *)(uintptr_t)j->q.stop_ids);
    free(j);
}

static void put_off(struct external_engine *x, struct job *j) {
    xgrow((void **)&x->waiting, &x->cap_waiting, x->n_waiting + 1, sizeof(struct job *));
    x->waiting[x->n_waiting++] = j;
}

static struct job *job_of(const struct external_engine *x, const struct engine_request *q, int64_t index) {
    const struct engine_stop_ids stop = engine_stop_ids(&x->model, x->tok);
    struct job *j = xcalloc(1, sizeof *j);
    int32_t *ids = xmalloc((size_t)(stop.n + q->n_stop_ids) * sizeof *ids + 1);
    memcpy(ids, stop.id, (size_t)stop.n * sizeof *ids);
    if (q->n_stop_ids > 0) memcpy(ids + stop.n, q->stop_ids, (size_t)q->n_stop_ids * sizeof *ids);
    j->q = *q;
    j->q.n = 1;
    j->q.prompt = xcopy(q->prompt, q->n_prompt, sizeof *q->prompt);
    j->q.begun = xcopy(q->begun, q->n_begun, sizeof *q->begun);
    j->q.begun_logp = xcopy(q->begun_logp, q->n_begun, sizeof *q->begun_logp);
    j->q.begun_logp_kept = xcopy(q->begun_logp_kept ? q->begun_logp_kept : q->begun_logp, q->n_begun, sizeof *q->begun_logp_kept);
    j->q.stop_ids = ids;
    j->q.n_stop_ids = stop.n + q->n_stop_ids;
    j->q.stop = NULL;
    j->index = index;
    j->id = x->n_requests;
    j->server = -1;
    return j;
}

/* Of a sample, for a server that draws by its seed; a turn that goes on has another one. */
static int64_t seed_of(const struct job *j) {
    const uint64_t at[] = {j->q.seed, j->q.uid, (uint64_t)j->index, (uint64_t)j->q.n_begun};
    return (int64_t)(hash64(at, sizeof at) >> 33);
}

struct sample_key {
    int64_t user, index;
};
static struct sample_key key_of(const struct job *j) { return (struct sample_key){(int64_t)(intptr_t)j->q.user, j->index}; }

/* To the server that has its K and V, else to the one with the fewest. */
static int send_job(struct external_engine *x, struct job *j) {
    const struct sample_key key = key_of(j);
    int64_t home = -1;
    if (j->q.n_begun > 0 && j->n_failed == 0) map_get(&x->home, (const char *)&key, sizeof key, &home);
    const int s = servers_choose(&x->servers, (int)home, j->n_failed > 0 ? j->server : -1);
    TRY(s);
    j->server = s;
    map_set(&x->home, (const char *)&key, sizeof key, s);
    if (j->begun == 0) j->begun = clock_now();
    const struct server *to = &x->servers.all[s];
    json_t *body =
        server_generate_body(to->kind, to->model, &j->q, (struct server_stop){j->q.stop_ids, j->q.n_stop_ids}, seed_of(j));
    TRY(servers_send(&x->servers, s, "POST", server_generate_path(to->kind), body, &j->ticket));
    xgrow((void **)&x->running, &x->cap_running, x->n_running + 1, sizeof(struct job *));
    x->running[x->n_running++] = j;
    return 0;
}

static int send_waiting(struct external_engine *x) {
    int64_t sent = 0;
    int rc = 0;
    while (rc == 0 && sent < x->n_waiting && x->n_running < x->servers.max_concurrent) {
        rc = send_job(x, x->waiting[sent]);
        if (rc == 0) sent++;
    }
    memmove(x->waiting, x->waiting + sent, (size_t)(x->n_waiting - sent) * sizeof(struct job *));
    x->n_waiting -= sent;
    return rc;
}

static struct job *take_running(struct external_engine *x, int64_t ticket) {
    for (int64_t i = 0; i < x->n_running; i++) {
        struct job *const j = x->running[i];
        if (j->ticket != ticket) continue;
        x->running[i] = x->running[--x->n_running];
        return j;
    }
    return NULL;
}

static void drop_jobs(struct external_engine *x) {
    for (int64_t i = 0; i < x->n_waiting; i++) job_free(x->waiting[i]);
    for (int64_t i = 0; i < x->n_running; i++) job_free(x->running[i]);
    if (x->n_running > 0) servers_cancel(&x->servers);
    x->n_waiting = x->n_running = 0;
}

/* ---- answers ---- */

static int report(struct external_engine *x, const struct job *j, const struct server_sample *s) {
    const int64_t had = j->q.n_begun, n = had + s->n;
    int32_t *ids = xmalloc((size_t)n * sizeof *ids);
    float *logp = xmalloc((size_t)n * 2 * sizeof *logp), *kept = logp + n;
    memcpy(ids, j->q.begun, (size_t)had * sizeof *ids);
    memcpy(logp, j->q.begun_logp, (size_t)had * sizeof *logp);
    memcpy(kept, j->q.begun_logp_kept, (size_t)had * sizeof *logp);
    memcpy(ids + had, s->ids, (size_t)s->n * sizeof *ids);
    memcpy(logp + had, s->logp, (size_t)s->n * sizeof *logp);
    memcpy(kept + had, s->logp, (size_t)s->n * sizeof *logp);
    const struct engine_sample out = {.user = j->q.user,
                                      .request = j->id,
                                      .index = j->index,
                                      .prompt = j->q.prompt,
                                      .n_prompt = j->q.n_prompt,
                                      .ids = ids,
                                      .n = n,
                                      .logp = logp,
                                      .logp_kept = kept,
                                      .text_bytes = -1,
                                      .finish = s->stopped ? ENGINE_STOP : ENGINE_LENGTH,
                                      .seconds = clock_now() - j->begun};
    x->n_sampled += s->n;
    x->n_finished++;
    const int rc = x->to.done(x->to.arg, &out);
    free(ids);
    free(logp);
    return rc;
}

/* Again, elsewhere where there is another server; err_msg() says why. */
static int try_again(struct external_engine *x, struct job *j, bool counts) {
    const struct server *s = &x->servers.all[j->server];
    x->n_resent++;
    j->n_failed += counts;
    if (j->n_failed <= x->n_retries) {
        log_debug("external engine %s: %s; the request is sent again", s->url, err_msg());
        put_off(x, j);
        return 0;
    }
    job_free(j);
    return err_wrap(ERR_IO, "%s, after %lld tries", s->url, (long long)x->n_retries + 1);
}

static int take_answer(struct external_engine *x, struct job *j, const struct server_answer *a) {
    const struct server *s = &x->servers.all[j->server];
    const struct server_limits limits = {
        x->model.vocab, j->q.max_tokens - j->q.n_begun, {j->q.stop_ids, j->q.ignore_eos ? 0 : j->q.n_stop_ids}};
    struct server_sample out;
    if (a->rc == ERR_IO || a->rc == ERR_TIMEOUT) return try_again(x, j, false); /* the server is lost */
    if (a->status >= 400 && a->status < 500) {
        job_free(j);
        FAIL(ERR_INVAL, "%s refuses a request: HTTP %d: %.600s", s->url, a->status, a->text);
    }
    int rc = 0;
    if (a->status != 200) rc = err_set(ERR_FORMAT, __FILE__, __LINE__, "HTTP %d: %.300s", a->status, a->text);
    else rc = server_read_sample(&out, s->kind, a->text, strlen(a->text), &limits);
    if (rc < 0) return try_again(x, j, true);
    rc = report(x, j, &out);
    server_sample_free(&out);
    job_free(j);
    return rc;
}

/* ---- the operations ---- */

static struct external_engine *of(const struct worker *w) { return w->external; }

static int generate_begin(struct worker *w, const struct worker_generation *g) {
    struct external_engine *x = of(w);
    x->to = *g;
    x->n_requests = x->n_sampled = x->n_finished = 0;
    map_free(&x->home);
    return 0;
}

static int generate_add(struct worker *w, const struct engine_request *q) {
    struct external_engine *x = of(w);
    TRY(server_check_request(q));
    for (int64_t i = 0; i < q->n; i++) put_off(x, job_of(x, q, q->first_index + i));
    x->n_requests++;
    return 0;
}

static int generate_step(struct worker *w, bool wait) {
    struct external_engine *x = of(w);
    struct server_answer a;
    TRY(send_waiting(x));
    if (x->n_running == 0) return 0;
    int got = servers_take(&x->servers, wait ? WAIT_S : 0, &a);
    for (; got > 0; got = servers_take(&x->servers, 0, &a)) {
        struct job *j = take_running(x, a.ticket);
        const int rc = j ? take_answer(x, j, &a) : 0;
        server_answer_free(&a);
        TRY(rc);
    }
    TRY(got);
    return x->n_running + x->n_waiting > 0;
}

static int generate_interrupt(struct worker *w) {
    (void)w;
    FAIL(ERR_UNSUPPORTED, "a generation is not interrupted in an external engine (rollout.engine_url)");
}

static struct engine_stats generate_stats(struct worker *w) {
    const struct external_engine *x = of(w);
    return (struct engine_stats){
        .waiting = x->n_waiting, .running = x->n_running, .finished = x->n_finished, .sampled = x->n_sampled};
}

static void generate_end(struct worker *w) { drop_jobs(of(w)); }

static int update(struct worker *w, const struct worker_update *u, struct run *run, struct batch *b) {
    if (u->role == WORKER_POLICY) of(w)->stale = true;
    return of(w)->base->update(w, u, run, b);
}

/* ---- new weights ---- */

static char *dir_of(const struct external_engine *x, int64_t update) {
    return xasprintf("%s/update_%lld", x->weights_dir, (long long)update);
}

/* Complete under its name, or not there. */
static int write_weights(struct worker *w, const char *dir) {
    char *tmp = file_temp_path(dir);
    int rc = file_remove_tree(dir);
    if (rc == 0) rc = file_mkdirs(tmp);
    if (rc == 0) rc = of(w)->base->export_policy(w, tmp);
    if (rc == 0) rc = file_replace_dir(tmp, dir);
    if (rc < 0) {
        struct err_saved why;
        err_save(&why);
        (void)file_remove_tree(tmp);
        err_restore(&why);
    }
    free(tmp);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

/* Those before the last one are of no use to anybody. */
static int send_weights(struct worker *w) {
    struct external_engine *x = of(w);
    TRY(x->base->send_weights(w));
    if (!x->stale) return 0;
    char *dir = dir_of(x, x->n_updates), *before = dir_of(x, x->n_updates - 1);
    int rc = write_weights(w, dir);
    if (rc == 0) rc = servers_update(&x->servers, dir);
    if (rc == 0) rc = file_remove_tree(before);
    if (rc == 0) {
        x->n_updates++;
        x->stale = false;
    }
    free(dir);
    free(before);
    return rc < 0 ? err_wrap(rc, "external engine") : 0;
}

/* ---- opening ---- */

int external_engine_open(struct external_engine **out, const struct external_engine_args *a) {
    struct external_engine *x = xcalloc(1, sizeof *x);
    x->n_retries = a->n_retries;
    x->stale = true;
    int rc = model_config_load(&x->model, a->model_dir);
    if (rc == 0) rc = file_remove_tree(a->weights_dir); /* of a run before this one, which may have been killed */
    if (rc == 0) rc = file_mkdirs(a->weights_dir);
    if (rc == 0) x->weights_dir = realpath(a->weights_dir, NULL);
    if (rc == 0 && !x->weights_dir) rc = err_set(ERR_IO, __FILE__, __LINE__, "%s: it has no path", a->weights_dir);
    if (rc == 0) rc = servers_open(&x->servers, a);
    if (rc < 0) {
        external_engine_close(x);
        return err_pass(rc, __FILE__, __LINE__);
    }
    *out = x;
    return 0;
}

void external_engine_close(struct external_engine *x) {
    if (!x) return;
    drop_jobs(x);
    servers_close(&x->servers);
    model_config_free(&x->model);
    map_free(&x->home);
    free(x->weights_dir);
    free(x->waiting);
    free(x->running);
    free(x);
}

void external_engine_attach(struct external_engine *x, struct worker *w, const struct tokenizer *tok) {
    x->tok = tok;
    x->base = w->ops;
    x->ops = *w->ops;
    x->ops.send_weights = send_weights;
    x->ops.generate_begin = generate_begin;
    x->ops.generate_add = generate_add;
    x->ops.generate_step = generate_step;
    x->ops.generate_interrupt = generate_interrupt;
    x->ops.generate_stats = generate_stats;
    x->ops.generate_end = generate_end;
    x->ops.update = update;
    w->external = x;
    w->ops = &x->ops;
}

void external_engine_metrics(struct external_engine *x, struct metrics *m) {
    metrics_set_i64(m, servers_live(&x->servers), "rollout/engine_servers");
    metrics_set_i64(m, x->n_resent, "rollout/engine_requests_resent");
    x->n_resent = 0;
}
