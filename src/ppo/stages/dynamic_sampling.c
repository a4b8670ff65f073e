/* dynamic_sampling.c - DAPO's dynamic sampling (algorithm.filter_groups): a prompt whose samples are all alike carries no learning
 * signal and is replaced in the running engine as soon as its last sample is scored.
 *
 * Invariant: which prompts are kept depends on the order of the data alone, never on which sample ended first. */
#include "ppo/stages/generation.h"

#include "base/err.h"

#include <string.h>

/* The filter's metric of a scored sample. */
static int filter_metric(const struct generation_state *g, const struct generation_sample *s, double *out) {
    const char *name = g->in->algorithm->filter.metric;
    *out = s->reward.score;
    if (strcmp(name, "reward") == 0) return 0;
    const json_t *v = json_object_get(s->reward.extra, name);
    if (!json_is_number(v) && !json_is_boolean(v))
        FAIL(ERR_INVAL,
             "algorithm.filter_groups.metric=%s: the scorer gives no such number; use reward, or a key of the dict that "
             "it returns",
             name);
    *out = json_is_boolean(v) ? (double)json_is_true(v) : json_number_value(v);
    return 0;
}

/* Are all of a group's scored samples alike? A lone one is not (verl); a group without any is of no use either. */
static int group_useless(const struct generation_state *g, int64_t k, bool *useless) {
    double first = 0, v;
    int64_t n = 0;
    bool alike = true;
    for (int64_t i = k * g->per; i < k * g->per + g->n; i++) {
        if (g->samples[i].reward.status != REWARD_SCORE) {
            if (g->in->scores->on_error != REWARD_DROP_SAMPLE) { /* the group is dropped, or the run stops */
                *useless = g->in->scores->on_error == REWARD_DROP_GROUP;
                return 0;
            }
            continue;
        }
        TRY(filter_metric(g, &g->samples[i], &v));
        if (n++ == 0) first = v;
        alike = alike && v == first;
    }
    *useless = n == 0 || (n > 1 && alike);
    return 0;
}

/* A group has its last score: a useless one is replaced by the next prompt. Each one that is dropped is replaced, so in the end the
 * prompts tried are the shortest run of the data with enough useful ones. */
int dynamic_sampling_close(struct generation_state *g, int64_t k) {
    const struct ppo_filter_config *f = &g->in->algorithm->filter;
    TRY(group_useless(g, k, &g->groups[k].useless));
    if (!g->groups[k].useless) {
        g->useless_run = 0;
        return 0;
    }
    for (int64_t i = 0; i < g->per; i++) generation_drop_sample(&g->samples[k * g->per + i]);
    g->n_useless++;
    if (++g->useless_run >= g->in->data->n && g->useless_run >= g->in->rows->train_batch_size)
        FAIL(ERR_INPUT,
             "algorithm.filter_groups: the samples of %lld prompts in a row, all of the data, were alike in '%s': the "
             "task is too hard or too easy for this policy, or the scorer always says the same",
             (long long)g->useless_run, f->metric);
    if (f->max_gen_batches > 0 && g->n_groups >= f->max_gen_batches * f->gen_batch_size)
        FAIL(ERR_INPUT,
             "algorithm.filter_groups: %lld prompts were tried in this step and %lld of them had samples all alike, so "
             "fewer than data.train_batch_size=%lld are left; raise algorithm.filter_groups.max_num_gen_batches=%lld (0: no "
             "limit), or look whether the data is too hard or too easy",
             (long long)g->n_groups, (long long)g->n_useless, (long long)g->in->rows->train_batch_size,
             (long long)f->max_gen_batches);
    return generation_add_next_prompt(g);
}
