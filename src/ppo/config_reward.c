/* config_reward.c - what is derived of the keys of rewards: verl's managers and those of the user, the overlong penalty, limits of
 * calls, and the reward model or judge. The other keys are config.c's.
 * Invariant: a key that has no effect is refused or noted. */
#include "ppo/config_int.h"
#include "run/directories.h"

#include "base/err.h"
#include "base/json.h"
#include "base/log.h"

#include <string.h>

enum { CHAT_SLACK = 256 }; /* tokens that another model's chat template may add to a conversation */

/* The keys of one dict below reward.reward_kwargs: another than these is refused. */
static int check_names(const char *key, const json_t *given, const char *const *known) {
    const char *name;
    json_t *v;
    if (!json_is_object(given)) FAIL(ERR_INVAL, "%s: expected a dictionary", key);
    json_object_foreach((json_t *)(uintptr_t)given, name, v) {
        int k = 0;
        while (known[k] && strcmp(known[k], name) != 0) k++;
        if (!known[k])
            FAIL(ERR_INVAL,
                 "%s.%s: no reward manager reads it; known are max_resp_len and "
                 "overlong_buffer_cfg.{enable,len,penalty_factor,log}, and arguments of a function of your own go to "
                 "reward.custom_reward_function.reward_kwargs",
                 key, name);
    }
    return 0;
}

/* reward.reward_kwargs has the dapo manager's keys; under the naive manager, which reads none, they are noted. */
static int check_reward_kwargs(const json_t *kwargs, bool dapo) {
#define KWARGS "reward.reward_kwargs"
    static const char *const known[] = {"max_resp_len", "overlong_buffer_cfg", NULL};
    static const char *const of_buffer[] = {"enable", "len", "penalty_factor", "log", NULL};
    const json_t *const buffer = json_object_get(kwargs, "overlong_buffer_cfg");
    const char *name;
    json_t *v;
    if (!kwargs) return 0;
    TRY(check_names(KWARGS, kwargs, known));
    if (buffer && !json_is_null(buffer)) TRY(check_names(KWARGS ".overlong_buffer_cfg", buffer, of_buffer));
    json_object_foreach((json_t *)(uintptr_t)kwargs, name, v) if (!dapo)
        log_note(KWARGS ".%s has no effect: reward.reward_manager.name does not read it, as in verl; the overlong penalty "
                        "is the dapo manager's",
                 name);
    return 0;
}

/* DAPO's penalty on long answers: reward.reward_kwargs.overlong_buffer_cfg. */
static int derive_overlong(struct ppo_config *k) {
    const json_t *kwargs = k->reward.kwargs, *b;
    bool enable = false;
    k->reward.args.max_resp_len = k->data.max_response_length;
    if (!kwargs) return 0;
    TRY(json_i64_opt(kwargs, "max_resp_len", &k->reward.args.max_resp_len, KWARGS));
    b = json_object_get(kwargs, "overlong_buffer_cfg");
    if (!b || json_is_null(b)) return 0;
    TRY(json_bool_opt(b, "enable", &enable, KWARGS ".overlong_buffer_cfg"));
    if (!enable) return 0;
    TRY(json_i64(b, "len", &k->reward.args.overlong_len, KWARGS ".overlong_buffer_cfg"));
    if (k->reward.args.overlong_len <= 0)
        FAIL(ERR_INVAL,
             KWARGS ".overlong_buffer_cfg.len=%lld: the tokens over which the penalty grows; set it above 0, or "
                    "overlong_buffer_cfg.enable=False",
             (long long)k->reward.args.overlong_len);
    TRY(json_f64(b, "penalty_factor", &k->reward.args.overlong_penalty_factor, KWARGS ".overlong_buffer_cfg"));
    return json_bool_opt(b, "log", &k->reward.args.overlong_log, KWARGS ".overlong_buffer_cfg");
#undef KWARGS
}

/* verl's managers: how they call the scorer and what they add to its extra_info. */
static const struct manager {
    const char *name;
    enum reward_style style;
    bool agent_loop, turns, scores, experiment, limited;
} managers[] = {
    {.name = "naive", .agent_loop = true, .turns = true, .scores = true},
    {.name = "remote", .agent_loop = true, .turns = true, .scores = true},
    {.name = "rate_limited", .agent_loop = true, .limited = true},
    {.name = "dapo"},
    {.name = "gdpo", .experiment = true},
    {.name = "prime", .style = REWARD_POSITIONAL},
    {.name = "batch", .style = REWARD_BATCH, .scores = true},
};

static int derive_limits(struct ppo_config *k, const struct manager *m) {
    if (m && m->limited) {
        k->reward.args.max_in_flight =
            conf_is_set(k->conf, "reward.max_concurrent") ? k->reward.args.max_concurrent : 1; /* verl's */
        if (k->reward.args.path) return 0;
    }
    k->reward.args.max_in_flight = 0;
    static const char *const keys[] = {"reward.max_rpm", "reward.max_tpm", "reward.estimated_tokens_per_request"};
    for (int i = 0; i < 3; i++)
        if (!conf_is_null(k->conf, keys[i]))
            log_note("%s has no effect: it limits calls of reward.custom_reward_function under "
                     "reward.reward_manager.name=rate_limited",
                     keys[i]);
    return 0;
}

/* A class of the user's: of a file, or one that the reward function's file registers. */
static int derive_own_manager(struct ppo_config *k) {
    const char *const name = k->raw.reward_manager, *const older = k->raw.manager_class ? k->raw.manager_class : name;
    const bool by_older = k->raw.manager_class && conf_is_set(k->conf, "reward.reward_manager.module.name"); /* verl's older key */
    k->reward.own_manager = true;
    k->reward.manager_path = k->raw.manager_path;
    k->reward.manager_names[0] = by_older ? older : name;
    k->reward.manager_names[1] = by_older ? name : older;
    if (strcmp(k->raw.manager_source, "register") != 0) {
        if (!k->raw.manager_path)
            FAIL(ERR_INVAL, "reward.reward_manager.source=importlib needs reward.reward_manager.module.path, a Python file, and "
                            "reward.reward_manager.name, a class in it");
        return 0;
    }
    if (k->reward.args.path) return 0;
    FAIL(ERR_INVAL,
         "reward.reward_manager.name=%s: expected naive, dapo, gdpo, batch, prime, rate_limited or remote; one of your own needs "
         "source=importlib and module.path",
         k->raw.reward_manager);
}

int ppo_config__reward(struct ppo_config *k) {
    const char *source;
    json_t *w;
    const struct manager *m = NULL;
    if (strcmp(k->raw.manager_source, "register") == 0)
        for (size_t i = 0; i < sizeof managers / sizeof *managers; i++)
            if (strcmp(k->raw.reward_manager, managers[i].name) == 0) m = &managers[i];
    if (!m) TRY(derive_own_manager(k));
    const bool dapo = m && strcmp(m->name, "dapo") == 0;
    if (m) {
        k->reward.args.style = m->style;
        k->reward.extra_agent_loop = m->agent_loop;
        k->reward.extra_turns = m->turns;
        k->reward.extra_scores = m->scores;
        k->reward.extra_experiment = m->experiment;
        TRY(check_reward_kwargs(k->reward.kwargs, dapo));
    }
    TRY(derive_limits(k, m));
    if (dapo && derive_overlong(k) < 0) return err_wrap(ERR_INVAL, "reward.reward_manager.name=dapo");
    if (k->reward.args.router_address && !k->reward.args.path && !k->reward.own_manager)
        FAIL(ERR_INVAL, "reward.reward_model.router_address is for a scorer that calls that server: set "
                        "reward.custom_reward_function.path");
    json_object_foreach((json_t *)(uintptr_t)k->reward.source_weights, source, w) if (!json_is_number(w))
        FAIL(ERR_INVAL, "reward.source_weights.%s: expected a number", source);
    return 0;
}

/* A judge where there is a template for its prompt, or, served, where a Python scorer comes with a causal model; else a
 * classifier, whose micro-batches are cut by samples where those are given, else by the tokens of verl's engine for it. */
int ppo_config__reward_model(struct ppo_config *k) {
#define RM "reward.reward_model."
    struct ppo_rm_config *r = &k->rm;
    const struct judge_args *j = &r->judge;
    if (!conf_is_set(k->conf, RM "rollout.tensor_model_parallel_size")) r->together = 0; /* verl's default is 2 */
    if (!r->enable && !k->reward.args.router_address) return 0;
    if (k->reward.args.router_address) { /* the model is served elsewhere; this run has at most its tokenizer */
        r->enable = false;
        if (k->raw.rm_path) TRY(ppo_config__model_dir(RM "model_path", k->raw.rm_path, &r->model_dir));
        k->reward.args.rm_tokenizer = r->model_dir;
        return 0;
    }
    if (!k->raw.rm_path) FAIL(ERR_INVAL, RM "enable=True and no " RM "model_path: set it to the directory of the reward model");
    TRY(ppo_config__model_dir(RM "model_path", k->raw.rm_path, &r->model_dir));
    int rc = model_config_load(&r->model, r->model_dir);
    r->judge.serve =
        rc == 0 && !j->prompt_template && (k->reward.args.path || k->reward.own_manager) && !model_config_classifies(&r->model);
    if (rc == 0 && !judge_is_wanted(j)) rc = model_config_make_reward(&r->model, r->model_dir);
    if (rc < 0) return err_wrap(rc, RM "model_path");
    if (r->judge.serve) k->reward.args.rm_tokenizer = r->model_dir;
    if (judge_is_wanted(j)) return 0;
    if (r->cut.max_seqs == 0) r->cut.max_rows = j->max_rows;
    if (r->max_length == 0) r->max_length = k->sizes.max_len + (r->policy_tokens ? 0 : CHAT_SLACK);
    return 0;
#undef RM
}
