/* algo.c - `verlc algo`: one JSON request a line in, one answer a line out, in
 * order.  The operations on numbers are in cmd/algo_json.c; those of rewards, which may start a
 * scorer, are here.
 * Invariant: every request line gets one answer line; a request that cannot be
 * answered gets {"error": ...} and the tool goes on. */
#include "cmd/algo_json.h"
#include "cmd/cmd.h"

#include "algo/custom/user.h"
#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "reward/reward.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct tool {
    struct algo_json_user user;
    struct reward *reward;
    struct buf out;
};

static json_t *error_answer(const char *message) {
    json_t *a = json_object(), *text = json_string(message);
    json_object_set_new(a, "error", text ? text : json_string("the request is not valid UTF-8"));
    return a;
}

/* The dapo manager's penalty on a long answer: "reward_kwargs" as verl's key of that name, and "response_length". */
static int read_overlong(const json_t *q, const char *where, struct reward_args *a, int64_t *response_length) {
    const json_t *kwargs = json_object_get(q, "reward_kwargs"), *cfg = json_object_get(kwargs, "overlong_buffer_cfg");
    bool enable = false;
    TRY(json_bool_opt(cfg, "enable", &enable, where));
    if (!enable) return 0;
    TRY(json_i64(q, "response_length", response_length, where));
    TRY(json_i64(kwargs, "max_resp_len", &a->max_resp_len, where));
    TRY(json_i64(cfg, "len", &a->overlong_len, where));
    TRY(json_f64(cfg, "penalty_factor", &a->overlong_penalty_factor, where));
    TRY(json_bool_opt(cfg, "log", &a->overlong_log, where));
    if (a->overlong_len <= 0) FAIL(ERR_INVAL, "%s: overlong_buffer_cfg.len must be above 0", where);
    if (*response_length < 0 || *response_length > 1 << 24)
        FAIL(ERR_INVAL, "%s: response_length is %lld; expected 0 to 2^24", where, (long long)*response_length);
    return reward_check_overlong(a);
}

/* {"op":"reward"}: {"score", and the keys of reward_extra_info}; anything but a
 * score is an error with its status. */
static int op_reward(struct reward *reward, const json_t *q, const char *where, json_t **answer) {
    const char *method = "strict";
    struct reward_request r = {.ground_truth = json_object_get(q, "ground_truth"), .extra_info = json_object_get(q, "extra_info")};
    TRY(json_str_opt(q, "data_source", &r.data_source, where));
    TRY(json_str(q, "solution_str", &r.solution, where));
    r.n_solution = json_string_length(json_object_get(q, "solution_str"));
    TRY(json_str_opt(q, "method", &method, where));
    if (strcmp(method, "strict") != 0 && strcmp(method, "flexible") != 0)
        FAIL(ERR_INVAL, "%s: method '%s' is unknown; use strict or flexible", where, method);
    TRY(json_str_opt(q, "grader", &r.grader, where));
    if (r.grader) TRY(reward_check_grader(r.grader));
    else if (strcmp(method, "flexible") == 0 && r.data_source && strcmp(r.data_source, "openai/gsm8k") == 0)
        r.grader = "gsm8k_flexible";
    struct reward_result result;
    struct reward_args overlong = {0};
    TRY(read_overlong(q, where, &overlong, &r.response_len));
    TRY(reward_score(reward, &r, &result));
    reward_penalise_overlong(&overlong, r.response_len, &result);
    reward_check_score(&result);
    if (result.status == REWARD_SCORE) {
        *answer = json_object();
        json_object_set_new(*answer, "score", json_real(result.score));
        json_object_update_missing(*answer, result.extra);
    } else {
        *answer = error_answer(result.message);
        json_object_set_new(*answer, "status", json_string(reward_status_name(result.status)));
    }
    reward_result_free(&result);
    return 0;
}

/* {"op":"normal_form"}: {"answer"}, as the grader compares it. */
static int op_normal_form(const json_t *q, const char *where, json_t **answer) {
    const char *grader, *text;
    char *form = NULL;
    TRY(json_str(q, "grader", &grader, where));
    TRY(json_str(q, "answer", &text, where));
    TRY(reward_normal_form(grader, json_object_get(q, "answer"), &form));
    *answer = json_pack("{s:s}", "answer", form);
    free(form);
    return 0;
}

static int evaluate(struct tool *t, const char *line, size_t n, const char *where, json_t **answer) {
    json_t *q;
    TRY(json_parse(&q, line, n, where));
    const char *op = json_string_value(json_object_get(q, "op"));
    int rc;
    if (op && strcmp(op, "reward") == 0) rc = op_reward(t->reward, q, where, answer);
    else if (op && strcmp(op, "normal_form") == 0) rc = op_normal_form(q, where, answer);
    else rc = algo_json(q, where, &t->user, answer);
    json_decref(q);
    return rc;
}

static int one_line(void *arg, char *line, size_t n, int64_t no) {
    struct tool *t = arg;
    char where[32];
    json_t *answer = NULL;
    if (strspn(line, " \t\r") == n) return 0; /* an empty line is no request */
    snprintf(where, sizeof where, "stdin:%lld", (long long)no);
    if (evaluate(t, line, n, where, &answer) < 0) {
        log_warn("%s", err_msg());
        answer = error_answer(err_msg());
    }
    buf_reset(&t->out);
    const int rc = json_dump_line(&t->out, answer);
    json_decref(answer);
    TRY(rc);
    TRY(cmd_print_line(t->out.p, t->out.n));
    return cmd_flush(); /* a caller that writes line by line waits for it */
}

static int open_mine(struct algo_user **out, const char *option, const char *spec, bool loss) {
    TRY(algo_user_open(out, &(struct algo_user_args){.key = option, .spec = spec, .loss = loss}));
    return algo_user_check(*out);
}

int cmd_algo(int argc, char **argv) {
    const char *path = NULL, *name = NULL, *adv = NULL, *loss = NULL;
    const struct cmd_opt opts[] = {
        {"--adv", CMD_STR, &adv, "FILE:NAME", "a user-defined estimator, C or Python; requests name it so too"},
        {"--loss", CMD_STR, &loss, "FILE:NAME", "a user-defined policy loss"},
        {"--reward", CMD_STR, &path, "FILE", "score with this Python file's compute_score instead of the native graders"},
        {"--reward-name", CMD_STR, &name, "NAME", "the function in that file"},
    };
    const struct cmd_spec spec =
        CMD_SPEC(opts, "verlc algo [options] < requests.jsonl",
                 "Answers requests about algorithms, one JSON object a line; arrays nest as samples x tokens\n"
                 "and names are verl's. \"op\" is one of:\n"
                 "  advantage           estimator, token_level_rewards, response_mask, uid, ...\n"
                 "  policy_loss         loss_mode, old_log_prob, log_prob, advantages, response_mask, config\n"
                 "  actor_loss          the same, with entropy and ref_log_prob\n"
                 "  value_loss          vpreds, values, returns, response_mask, cliprange_value\n"
                 "  kl                  type, logp, ref_logp\n"
                 "  agg_loss            loss_mat, loss_mask, loss_agg_mode\n"
                 "  rollout_correction  old_log_prob, rollout_log_prob, response_mask, rollout_is, rollout_rs, ...\n"
                 "  kl_controller       type, kl_coef, target_kl, horizon, current_kl, n_steps\n"
                 "  kl_in_reward        token_level_scores, old_log_probs, ref_log_prob, response_mask, kl_ctrl\n"
                 "  pf_ppo_weights      scores, reweight_method, weight_pow\n"
                 "  reward              data_source, grader, solution_str, ground_truth, extra_info, method, reward_kwargs\n"
                 "  normal_form         grader, answer: the answer as that grader compares it\n"
                 "  rearrange_micro_batches  seqlen, max_token_len\n"
                 "A request that cannot be answered gets {\"error\": ...}.");
    int rc = cmd_parse(&spec, argc, argv);
    if (rc != 0) return rc < 0 ? rc : 0;
    struct tool t = {0};
    struct algo_user *my_adv = NULL, *my_loss = NULL;
    TRY(reward_create(&t.reward, &(struct reward_args){.path = path, .name = name}));
    if (adv) rc = open_mine(&my_adv, "--adv", adv, false);
    if (rc == 0 && loss) rc = open_mine(&my_loss, "--loss", loss, true);
    t.user = (struct algo_json_user){my_adv, my_loss};
    if (rc == 0) cmd_reads_stdin("requests, a JSON object with \"op\" a line (docs/tools.md)");
    if (rc == 0) rc = file_each_line("-", one_line, &t);
    algo_user_close(my_adv);
    algo_user_close(my_loss);
    reward_destroy(t.reward);
    buf_free(&t.out);
    return rc;
}
