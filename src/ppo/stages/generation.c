/* generation.c - what a generation has of a sample: its requests to the engine, its name, the journal of its episode.
 *
 * It calls no loop: rollout.c, which draws, and the loops of episodes all call this. */
#include "ppo/stages/generation.h"

#include "agent/tool_journal.h"
#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"

#include <stdlib.h>
#include <string.h>

void generation_drop_sample(struct generation_sample *s) {
    free(s->ids);
    free(s->logp);
    free(s->sampling_logp);
    free(s->token_bytes);
    free(s->versions);
    free(s->tickets);
    json_decref(s->agent_state);
    free(s->precomputed[0]);
    free(s->precomputed[1]);
    buf_free(&s->text);
    tool_agent_destroy(s->agent);
    user_episode_free(s->user);
    s->agent = NULL;
    s->user = NULL;
    s->ids = NULL;
    s->token_bytes = NULL;
    s->versions = NULL;
    s->tickets = NULL;
    s->agent_state = NULL;
    s->precomputed[0] = s->precomputed[1] = NULL;
    s->logp = s->sampling_logp = NULL;
}

void generation_ended(struct generation_state *g, int64_t i) {
    xgrow((void **)&g->ended, &g->cap_ended, g->n_ended + 1, sizeof *g->ended);
    g->ended[g->n_ended++] = i;
}

uint64_t generation_epoch_seed(const struct stage *s) { return s->seed ^ ((uint64_t)s->run->sampler.epoch * 0x9E3779B97F4A7C15u); }

int generation_group_request(const struct generation_state *g, int64_t k, struct engine_request *q) {
    const struct generation_group *group = &g->groups[k];
    const struct ppo_sampling *sp = g->sp;
    struct batch_col *prompts, *uid;
    TRY(batch_get(group->prompts, "prompts", BATCH_I32, &prompts));
    TRY(batch_get(group->prompts, "uid", BATCH_I64, &uid));
    *q = (struct engine_request){
        .prompt = prompts->i32 + prompts->off[group->row],
        .n_prompt = batch_len(prompts, group->row),
        .n = sp->n,
        .max_tokens = g->in->rows->max_response_length,
        .temperature = (float)sp->temperature,
        .top_p = (float)sp->top_p,
        .min_p = (float)sp->min_p,
        .repetition_penalty = (float)sp->repetition_penalty,
        .top_k = (int32_t)sp->top_k,
        .seed = group->seed,
        .uid = (uint64_t)uid->i64[group->row],
        .ignore_eos = sp->ignore_eos,
        .user = (void *)(intptr_t)(2 * k),
    };
    return 0;
}

void generation_for_baseline(struct engine_request *q) {
    q->temperature = 0;
    q->user = (void *)((intptr_t)q->user + 1);
}

int generation_request(const struct generation_state *g, int64_t i, struct engine_request *q) {
    const bool baseline = i % g->per == g->n;
    TRY(generation_group_request(g, i / g->per, q));
    q->n = 1;
    q->first_index = baseline ? 0 : i % g->per;
    if (baseline) generation_for_baseline(q);
    return 0;
}

char *generation_open_name(int64_t number, int64_t index) {
    return xasprintf("async-%lld-%lld", (long long)number, (long long)index);
}

char *generation_episode_name(const struct generation_state *g, int64_t i) {
    const struct generation_group *group = &g->groups[i / g->per];
    if (g->partial) return generation_open_name(group->number, i % g->per);
    return xasprintf("%s%lld-%lld-%lld", g->validation ? "val" : "step", (long long)g->s->run->step, (long long)i,
                     (long long)batch_find(group->prompts, "uid")->i64[group->row]);
}

int generation_open_journal(const struct generation_state *g, struct tool_journal **journal) {
    const struct run *run = g->s->run;
    if (*journal) return tool_journal_forget(*journal, run->saved_step);
    char *dir = file_join(run->k.default_local_dir, "tool_journal");
    const int rc = tool_journal_open(journal, dir, run->saved_step, strcmp(run->k.resume_mode, "disable") == 0);
    free(dir);
    return rc;
}
