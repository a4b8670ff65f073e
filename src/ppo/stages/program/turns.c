/* turns.c - turns of agent programs in the engine: what serve submits is drawn by the worker, and goes back when it is drawn. With
 * partial rollout a turn keeps its request and what it has, so that it goes on with new weights.
 *
 * Invariant: what an episode draws depends on weights, data, seed and its own requests, in their order, alone. */
#include "ppo/stages/program/program_loop_int.h"

#include "base/err.h"

#include <stdlib.h>
#include <string.h>

/* So that it can go on after an interruption. */
static void keep_request(struct program_call *c, const struct engine_request *r) {
    c->q = *r;
    c->q.prompt = c->prompt = xcopy(r->prompt, r->n_prompt, sizeof *c->prompt);
    c->q.stop_ids = c->stop_ids = xcopy(r->stop_ids, r->n_stop_ids, sizeof *c->stop_ids);
    c->stop = xcalloc((size_t)r->n_stop + 1, sizeof *c->stop);
    for (int64_t i = 0; i < r->n_stop; i++) c->stop[i] = xstrdup(r->stop[i]);
    c->q.stop = (const char *const *)c->stop;
}

void program_call_free(struct program_call *c) {
    for (int64_t i = 0; c->stop && i < c->q.n_stop; i++) free(c->stop[i]);
    free(c->stop);
    free(c->prompt);
    free(c->stop_ids);
    free(c->ids);
    free(c->versions);
    free(c->logp);
    free(c->kept);
    *c = (struct program_call){0};
}

static int submit(void *ctx, const struct engine_request *r, uint64_t ticket) {
    struct program_loops *p = ctx;
    const int64_t at = (int64_t)(intptr_t)r->user;
    struct engine_request q = *r;
    q.user = (void *)(intptr_t)user_loop_user(p->n_calls, true);
    const int rc = p->g->s->worker->ops->generate_add(p->g->s->worker, &q);
    if (rc < 0 && rc != ERR_INVAL && rc != ERR_NOMEM) p->rc = rc;
    TRY(rc);
    xgrow((void **)&p->calls, &p->cap_calls, p->n_calls + 1, sizeof *p->calls);
    struct program_call *c = &p->calls[p->n_calls++];
    *c = (struct program_call){.session = p->sessions[at], .ticket = ticket};
    if (p->g->partial) keep_request(c, r);
    p->sessions[at]->n_drawing++;
    return 0;
}

/* What is under way is drawn to its end, or until it is interrupted, and then of no ticket. */
static void cancel(void *ctx, uint64_t ticket) {
    struct program_loops *p = ctx;
    for (int64_t k = 0; k < p->n_calls; k++) p->calls[k].left |= p->calls[k].session && p->calls[k].ticket == ticket;
}

static void stats(void *ctx, struct engine_stats *out) {
    const struct program_loops *p = ctx;
    *out = p->g ? p->g->s->worker->ops->generate_stats(p->g->s->worker) : (struct engine_stats){0};
}

/* What an interrupted turn has. */
static void take_part(const struct generation_state *g, struct program_call *c, const struct engine_sample *s) {
    c->versions = xrealloc(c->versions, (size_t)s->n * sizeof *c->versions + 1);
    for (int64_t i = c->n; i < s->n; i++) c->versions[i] = ppo_version(g->s);
    free(c->ids);
    free(c->logp);
    free(c->kept);
    c->ids = xcopy(s->ids, s->n, sizeof *s->ids);
    c->logp = xcopy(s->logp, s->n, sizeof *s->logp);
    c->kept = xcopy(s->logp_kept, s->n, sizeof *s->logp_kept);
    c->n = s->n;
}

void program_loop_drawn(struct generation_state *g, struct program_loops *p, int64_t call, const struct engine_sample *s) {
    struct program_call *const c = p && call < p->n_calls ? &p->calls[call] : NULL;
    if (!c || !c->session) return; /* of a generation that was dropped */
    struct program_session *x = c->session;
    x->drawing += s->seconds;
    x->n_preempted += s->n_preempted;
    if (s->n > 0 && x->oldest_version < 0) x->oldest_version = ppo_version(g->s);
    if (s->finish == ENGINE_INTERRUPTED) {
        take_part(g, c, s);
        return;
    }
    x->n_drawing--;
    p->drawn = s;
    p->call = c;
    serve_drawn(p->serve, &(struct serve_drawn){.ticket = c->ticket,
                                                .n = s->n,
                                                .ids = s->ids,
                                                .logp = s->logp,
                                                .ended = true,
                                                .finish = s->finish,
                                                .text_bytes = s->text_bytes,
                                                .n_cached = s->n_cached});
    p->drawn = NULL;
    p->call = NULL;
    program_call_free(c);
}

void program_calls_fail(struct program_loops *p, const struct program_session *s) {
    struct err_saved why;
    err_save(&why);
    err_set(ERR_INTERNAL, __FILE__, __LINE__, "the generation has ended");
    for (int64_t k = 0; k < p->n_calls; k++) {
        struct program_call *c = &p->calls[k];
        if (!c->session || (s ? c->session != s : c->session->held)) continue;
        if (p->serve) serve_failed(p->serve, c->ticket, ERR_INTERNAL);
        program_call_free(c);
    }
    err_restore(&why);
}

struct serve_backend program_turns_backend(struct program_loops *p) {
    return (struct serve_backend){.ctx = p, .submit = submit, .cancel = cancel, .stats = stats};
}
