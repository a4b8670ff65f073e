/* rollout_trace.c - which samples are traced (actor_rollout_ref.rollout.trace), and what a trace has in addition to run.db's record
 * of a sample.  Sends nothing: track does.
 * Invariant: the choice is a function of seed and step, so a resumed run traces the same prompts. */
#include "ppo/stages/stages.h"

#include "base/err.h"
#include "base/rng.h"

#include <stdlib.h>
#include <string.h>

bool *ppo_traced_rows(const struct stage *s, const struct batch *b) {
    const struct run_trace *t = &s->run->k.trace;
    const struct batch_col *group = batch_find(b, "group");
    if (!t->backend || b->n_rows == 0) return NULL;
    bool *rows = xcalloc((size_t)b->n_rows, sizeof *rows);
    int64_t *groups = xmalloc((size_t)b->n_rows * sizeof *groups), n = 0;
    for (int64_t i = 0; i < b->n_rows; i++) { /* a prompt's samples are adjacent */
        if (i == 0 || group->i64[i] != group->i64[i - 1]) groups[n++] = group->i64[i];
    }
    struct rng rng = {.seed = s->seed ^ (uint64_t)s->run->step * 0x9E3779B97F4A7C15u, .stream = RNG_TRACE};
    if (t->max_prompts > 0 && t->max_prompts < n) {
        rng_shuffle(&rng, groups, n);
        n = t->max_prompts;
    }
    for (int64_t i = 0; i < b->n_rows; i++)
        for (int64_t k = 0; k < n && !rows[i]; k++) rows[i] = groups[k] == group->i64[i];
    free(groups);
    return rows;
}

static struct track_text decode(const struct tokenizer *tok, const int32_t *ids, int64_t n, struct buf *out) {
    buf_reset(out);
    if (buf_adds(out, "") < 0 || tokenizer_decode(tok, ids, n, false, out) < 0) return (struct track_text){0};
    return (struct track_text){out->p, out->n};
}

void ppo_trace_row(const struct stage *s, const struct ppo_trace_args *a, struct track_sample *x) {
    const struct batch *const b = a->b;
    const int64_t i = a->row;
    const struct ppo_sampling *sp = a->sp;
    const struct batch_col *row = batch_find(b, "row");
    const json_t *index = row ? json_object_get(json_object_get(row->json[i], "extra_info"), "index") : NULL;
    x->trace = (struct track_trace){
        .wanted = true,
        .sample_index = json_is_integer(index) ? (int64_t)json_integer_value(index) : x->uid,
        .ended = batch_find(b, "ended")->f64[i],
        .seconds = batch_find(b, "seconds")->f64[i],
        .sampling = json_pack("{s:f, s:f, s:I, s:f, s:f}", "temperature", sp->temperature, "top_p", sp->top_p, "top_k",
                              (json_int_t)sp->top_k, "min_p", sp->min_p, "repetition_penalty", sp->repetition_penalty),
    };
    if (!s->run->k.trace.token2text) return;
    x->trace.prompt = decode(a->tok, x->prompt_ids, x->n_prompt, a->prompt);
    x->trace.response = decode(a->tok, x->ids, x->n, a->response);
}
