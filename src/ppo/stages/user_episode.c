/* user_episode.c - see user_episode.h. */
#include "ppo/stages/user_episode.h"
#include "ppo/stages/generation.h"

#include "base/buf.h"

#include <stdlib.h>
#include <string.h>

void user_episode_take_output(const struct generation_state *g, struct generation_sample *s, const struct loop_output *o) {
    s->n = o->n;
    s->ids = xcopy(o->ids, o->n, sizeof *s->ids);
    s->logp = xcopy(o->logp, o->n, sizeof *s->logp);
    if (g->partial || (g->in->algorithm->sampling_log_probs && !g->validation))
        s->sampling_logp = xcopy(o->kept, o->n, sizeof *s->sampling_logp);
    if (g->partial && o->versions) s->versions = xcopy(o->versions, o->n, sizeof *s->versions);
}

void user_episode_add(const struct generation_state *g, struct generation_sample *s, struct loop_output *o) {
    struct user_episode *const x = s->user;
    if (s->ids) {
        struct generation_sample *earlier;
        x->before = xrealloc(x->before, (size_t)(x->n_before + 1) * sizeof *x->before);
        earlier = &x->before[x->n_before++];
        *earlier = (struct generation_sample){.user = xcalloc(1, sizeof *earlier->user)};
        earlier->user->out = x->out;
        earlier->user->program = x->program;
        earlier->ids = s->ids;
        earlier->logp = s->logp;
        earlier->sampling_logp = s->sampling_logp;
        earlier->versions = s->versions;
        earlier->n = s->n;
        earlier->finish = ENGINE_STOP;
        earlier->scored = true; /* by the last one's score */
        s->sampling_logp = NULL;
        s->versions = NULL;
    }
    x->out = *o;
    *o = (struct loop_output){0};
    user_episode_take_output(g, s, &x->out);
}

void user_episode_forget(struct generation_sample *s) {
    struct user_episode *const x = s->user;
    for (int64_t i = 0; i < x->n_before; i++) generation_drop_sample(&x->before[i]);
    x->n_before = 0;
    loop_output_free(&x->out);
    free(s->ids);
    free(s->logp);
    free(s->sampling_logp);
    free(s->versions);
    s->versions = NULL;
    s->ids = NULL;
    s->logp = s->sampling_logp = NULL;
    s->n = 0;
}

void user_episode_free(struct user_episode *e) {
    if (!e) return;
    loop_output_free(&e->out);
    free(e->failure);
    free(e->solution);
    free(e->held);
    json_decref(e->reward_extra);
    json_decref(e->record);
    for (int64_t i = 0; i < e->n_before; i++) generation_drop_sample(&e->before[i]);
    free(e->before);
    free(e);
}
