/* generate_config.c - see generate_config.h. */
#include "generate/generate_config.h"

#include "run/directories.h"

#include "base/err.h"

#include <stdlib.h>
#include <string.h>

#define CONF_STRUCT struct generate_config
#include "conf/bind.h"

static const struct conf_binding bindings[] = {
#include "conf/keys/generate.def"
};

static bool ends_with(const char *s, const char *end) {
    const size_t n = strlen(s), m = strlen(end);
    return n > m && strcmp(s + n - m, end) == 0;
}

int generate_config_read(struct generate_config *k, const struct conf *c) {
    const bool server = strcmp(conf_schema(c), "generation_server") == 0;
    k->conf = c;
    TRY(conf_fill(c, bindings, sizeof bindings / sizeof *bindings, k));
    k->trainer.seed = (uint64_t)k->raw.seed;
    k->chat_kwargs = json_deep_copy(k->raw.chat_kwargs);
    if (k->raw.chat_template) json_object_set_new(k->chat_kwargs, "chat_template", json_string(k->raw.chat_template));
    k->n_key = server ? "actor_rollout_ref.rollout.n" : "data.n_samples";
    k->length_key = server ? "actor_rollout_ref.rollout.prompt_length" : "rollout.prompt_length";
    if (k->rollout.train.temperature == 0 && k->rollout.train.n > 1)
        FAIL(ERR_INVAL, "%s=%lld with temperature=0: greedy samples of a prompt are all the same; take 1, or a temperature above 0",
             k->n_key, (long long)k->rollout.train.n);
    if (!k->output_path) FAIL(ERR_INVAL, "data.output_path is not set: the file that gets the responses");
    if (!ends_with(k->output_path, ".parquet") && !ends_with(k->output_path, ".jsonl"))
        FAIL(ERR_INVAL, "data.output_path=%s: expected a name that ends with .parquet or .jsonl", k->output_path);
    if (server) TRY(ppo_agent_config_derive(&k->agent));
    const int rc = run_model_dir(k->raw.model_path, false, &k->model.dir);
    if (rc < 0) return err_wrap(rc, "%s", server ? "actor_rollout_ref.model.path" : "model.path");
    if (!k->model.tokenizer_dir) k->model.tokenizer_dir = k->model.dir;
    return 0;
}

void generate_config_free(struct generate_config *k) {
    train_model_config_free(&k->model);
    json_decref(k->chat_kwargs);
}

bool generate_writes_parquet(const struct generate_config *k) { return ends_with(k->output_path, ".parquet"); }

char *generate_output_dir(const struct generate_config *k) {
    const char *slash = strrchr(k->output_path, '/');
    if (!slash) return xstrdup(".");
    return xstrndup(k->output_path, slash == k->output_path ? 1 : (size_t)(slash - k->output_path));
}
