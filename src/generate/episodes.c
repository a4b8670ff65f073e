/* episodes.c - see episodes.h. A generation of the stage (ppo/stages/rollout.c) with a run around it that keeps nothing: no
 * tracker, no checkpoints, no journal of tools. */
#include "generate/episodes.h"

#include "generate/episode_record.h"
#include "ppo/stages/generation.h"

#include "base/clock.h"
#include "base/err.h"
#include "base/log.h"
#include "base/thread_pool.h"

#include <stdlib.h>
#include <string.h>

enum { TEXT_THREADS = 8, SAY_S = 5 };

struct episodes {
    struct episodes_args a;
    struct agents *agents;
    struct pool *threads;
    struct run run;
    struct ppo_data_config rows;
    struct ppo_rollout_config rollout;
    struct stage stage;
    struct generation generation;
    int64_t n, n_failed;
    char *first_failure;
};

int episodes_open(struct episodes **out, const struct episodes_args *a) {
    static const struct ppo_algorithm_config no_algorithm;
    const struct generate_config *const k = a->k;
    const int threads = k->trainer.run.threads > 0 ? k->trainer.run.threads : pool_default_threads();
    struct episodes *e = xcalloc(1, sizeof *e);
    e->a = *a;
    e->run = (struct run){.k = k->trainer.run, .probing = true};
    e->rows = (struct ppo_data_config){.prompt_key = k->prompt_key,
                                       .max_prompt_length = k->prompt_length,
                                       .max_response_length = k->response_length,
                                       .chat_kwargs = k->chat_kwargs};
    e->rollout = k->rollout;
    e->rollout.train.repetition_penalty = 1;
    e->stage = (struct stage){.worker = a->worker, .run = &e->run, .seed = k->trainer.seed, .schedule = PPO_SYNC};
    const struct agents_args agents = {.k = &k->agent,
                                       .rows = &e->rows,
                                       .schedule = PPO_SYNC,
                                       .tok = a->tok,
                                       .model_dir = k->model.tokenizer_dir,
                                       .conf = k->conf};
    agents_create(&e->agents, &agents);
    *out = e;
    TRY(pool_create(&e->threads, threads < TEXT_THREADS ? threads : TEXT_THREADS));
    e->generation = (struct generation){.tok = a->tok,
                                        .threads = e->threads,
                                        .agents = e->agents,
                                        .rollout = &e->rollout,
                                        .rows = &e->rows,
                                        .algorithm = &no_algorithm};
    return 0;
}

void episodes_close(struct episodes *e) {
    if (!e) return;
    agents_destroy(e->agents);
    pool_destroy(e->threads);
    phases_destroy(e->run.stages);
    metrics_free(&e->run.metrics);
    free(e->first_failure);
    free(e);
}

int episodes_row(struct episodes *e, const json_t *row, json_t **tools) {
    *tools = NULL;
    return e ? agents_row(e->agents, row, tools) : 0;
}

void episodes_check(const struct episodes *e) {
    if (e) agents_check(e->agents);
}

bool episodes_any(const struct episodes *e) { return e && agents_active(e->agents); }

/* ---- prompts ---- */

/* The row as a loop sees it: its prompt is a list of messages. New reference. */
static json_t *row_of(const struct episodes *e, const struct episodes_rows *r, int64_t i) {
    json_t *row = json_array_get(r->rows, (size_t)(r->lo + i)), *prompt = json_object_get(row, e->rows.prompt_key);
    if (!json_is_string(prompt)) return json_incref(row);
    row = json_copy(row);
    json_object_set_new(row, e->rows.prompt_key, json_pack("[{s:s, s:O}]", "role", "user", "content", prompt));
    return row;
}

/* Rows as a batch, with the columns of rl_dataset_batch that a generation without scores reads. */
static int make_prompts(const struct episodes *e, const struct episodes_rows *r, struct batch *b) {
    const int64_t n = r->hi - r->lo;
    int64_t *lens = xmalloc((size_t)n * sizeof *lens);
    struct batch_col *ids, *uid, *raw, *row;
    int rc = 0;
    batch_init(b, n);
    for (int64_t i = 0; i < n; i++) lens[i] = r->prompts[r->lo + i].n;
    TRYG(batch_add(b, "prompts", BATCH_I32, lens, NULL, NULL), out);
    TRYG(batch_add(b, "uid", BATCH_I64, NULL, NULL, NULL), out);
    TRYG(batch_add(b, "raw_prompt", BATCH_JSON, NULL, NULL, NULL), out);
    TRYG(batch_add(b, "row", BATCH_JSON, NULL, NULL, NULL), out);
    ids = batch_find(b, "prompts");
    uid = batch_find(b, "uid");
    raw = batch_find(b, "raw_prompt");
    row = batch_find(b, "row");
    for (int64_t i = 0; i < n; i++) {
        memcpy(ids->i32 + ids->off[i], r->prompts[r->lo + i].p, (size_t)lens[i] * sizeof *ids->i32);
        uid->i64[i] = r->lo + i;
        json_decref(row->json[i]);
        json_decref(raw->json[i]);
        row->json[i] = row_of(e, r, i);
        raw->json[i] = json_incref(json_object_get(row->json[i], e->rows.prompt_key));
    }
out:
    free(lens);
    return rc;
}

/* ---- drawing ---- */

static int draw_all(struct generation_state *g) {
    double say_at = clock_now() + SAY_S;
    int more;
    while ((more = generation_step(g, true)) > 0) {
        if (clock_now() < say_at) continue;
        const struct engine_stats st = g->s->worker->ops->generate_stats(g->s->worker);
        log_info("%lld of %lld episodes, %.0f tokens a second", (long long)g->n_done, (long long)(g->n_groups * g->per),
                 (double)st.sampled / (clock_now() - g->start));
        say_at = clock_now() + SAY_S;
    }
    return more;
}

static void take(struct episodes *e, const struct generation_state *g, json_t **texts, json_t **records) {
    for (int64_t i = 0; i < g->n_groups * g->per; i++) {
        texts[i] = episode_text(&g->samples[i]);
        records[i] = episode_record(g, i, e->a.k->episode_tokens);
        const char *failure = json_string_value(json_object_get(records[i], "failure"));
        e->n++;
        if (failure && e->n_failed++ == 0) e->first_failure = xstrdup(failure);
    }
}

static int draw(struct episodes *e, const struct batch *prompts, json_t **texts, json_t **records, int64_t *tokens) {
    struct generation_state g = {.s = &e->stage, .in = &e->generation, .sp = &e->rollout.train, .validation = true};
    phase_begin(e->run.stages, "generation");
    int rc = generation_begin(&g);
    for (int64_t i = 0; i < prompts->n_rows && rc == 0; i++) {
        const struct generation_group group = {.prompts = prompts, .row = i, .data_row = -1, .seed = e->stage.seed};
        rc = generation_add_group(&g, &group, NULL);
    }
    if (rc == 0) rc = draw_all(&g);
    if (rc == 0) *tokens += e->stage.worker->ops->generate_stats(e->stage.worker).sampled;
    if (rc == 0) take(e, &g, texts, records);
    generation_end(&g, rc);
    phase_end(e->run.stages);
    return rc;
}

int episodes_draw(struct episodes *e, const struct episodes_rows *r, json_t **texts, json_t **records, int64_t *tokens) {
    struct batch prompts;
    phases_stateless();
    if (!e->run.stages) TRY(phases_create(&e->run.stages, e->run.k.deadline_s));
    int rc = make_prompts(e, r, &prompts);
    if (rc == 0) rc = draw(e, &prompts, texts, records, tokens);
    batch_free(&prompts);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

void episodes_report(const struct episodes *e) {
    if (e && e->n_failed > 0)
        log_warn("agent loops: %lld of %lld episodes have failed (first: %s)", (long long)e->n_failed, (long long)e->n,
                 e->first_failure);
}
