/* held.c - agent programs that run on while nothing is drawn: their requests wait, and their episodes go on in the next generation.
 *
 * Invariant: a held session loses no request and no token, and its deadlines do not count the time in which it was held. */
#include "ppo/stages/program/program_loop_int.h"

#include "base/err.h"
#include "ppo/stages/user_loop.h"

#include <stdlib.h>
#include <string.h>

/* Whose request waits; NULL: it does not. */
static struct program_session *held_session(const struct program_loops *p, const char *path) {
    static const char head[] = "/sessions/";
    char id[2 * PROGRAM_ID_BYTES + 1] = "";
    int64_t at;
    if (strncmp(path, head, sizeof head - 1) != 0) return NULL;
    strncat(id, path + sizeof head - 1, sizeof id - 1);
    if (!map_gets(&p->ids, id, &at) || p->sessions[at]->state != RUNNING) return NULL;
    return p->sessions[at]->held || (p->g && p->g->interrupted) ? p->sessions[at] : NULL;
}

static void left(void *arg) { ((struct program_request *)arg)->x = NULL; }

void program_request_take(void *arg, struct http_exchange *x) {
    struct program_loops *p = arg;
    struct program_session *s = held_session(p, http_exchange_path(x));
    if (!s) {
        serve_request(p->serve, x);
        return;
    }
    struct program_request *l = xcalloc(1, sizeof *l);
    *l = (struct program_request){s, x};
    http_exchange_on_close(x, left, l);
    xgrow((void **)&p->later, &p->cap_later, p->n_later + 1, sizeof *p->later);
    p->later[p->n_later++] = l;
}

/* The requests of s that wait are made, or (why) refused. */
void program_requests_end(struct program_loops *p, const struct program_session *s, const char *why) {
    for (int64_t k = 0; k < p->n_later; k++) {
        struct program_request *l = p->later[k];
        if (!l || l->session != s) continue;
        struct http_exchange *const x = l->x;
        p->later[k] = NULL;
        free(l);
        if (!x) continue;
        http_exchange_on_close(x, NULL, NULL);
        if (why) serve_refused(p->serve, x, 400, why);
        else serve_request(p->serve, x);
    }
}

void program_loop_hold(struct program_loops *p) {
    for (int64_t k = 0; k < p->n_sessions; k++) {
        struct program_session *s = p->sessions[k];
        if (s->held || s->state == OVER) continue;
        struct generation_sample *const sample = &p->g->samples[s->sample];
        if (s->state == QUEUED) { /* it begins in a later generation */
            user_episode_free(sample->user);
            sample->user = NULL;
            continue;
        }
        sample->user->held = xstrdup(s->id);
        sample->user->oldest = s->oldest_version;
        sample->user->n_starts = s->n_restarts + 1;
        s->held = true;
        s->held_at = http_server_clock(p->http);
    }
}

static struct program_session *find_held(const struct program_loops *p, const struct user_episode *x) {
    int64_t at;
    CHECK(map_gets(&p->ids, x->held, &at));
    return p->sessions[at];
}

/* Its turns under way go on, then what it has asked since is read. */
int program_loop_resume(struct generation_state *g, struct program_loops *p, int64_t i) {
    struct user_episode *const x = g->samples[i].user;
    struct program_session *s = find_held(p, x);
    const double held_s = http_server_clock(p->http) - s->held_at;
    p->g = g;
    p->n_running++;
    p->n_waiting++;
    s->sample = i;
    s->held = false;
    s->begun += held_s;
    s->active += held_s;
    s->oldest += held_s;
    free(x->held);
    x->held = NULL;
    for (int64_t k = 0; k < p->n_calls; k++) {
        struct program_call *c = &p->calls[k];
        if (c->session != s) continue;
        struct engine_request q = c->q;
        q.begun = c->ids;
        q.begun_logp = c->logp;
        q.begun_logp_kept = c->kept;
        q.n_begun = c->n;
        q.user = (void *)(intptr_t)user_loop_user(k, true);
        if (!c->left) TRY(g->s->worker->ops->generate_add(g->s->worker, &q));
        s->n_drawing -= c->left;
        if (c->left) program_call_free(c);
    }
    program_requests_end(p, s, NULL);
    return 0;
}

void program_loop_forget(struct program_loops *p, const struct user_episode *x) {
    struct program_session *s = find_held(p, x);
    program_calls_fail(p, s);
    program_requests_end(p, s, "the episode was dropped");
    child_program_stop(s->program, NULL);
    s->program = NULL;
    s->state = OVER;
    s->held = false; /* it goes with the next generation */
}
