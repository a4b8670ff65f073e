/* test_cmd_limits.c - every number that a user can set, through the ends of its interval and beyond: what is outside is
 * refused by its name, what is inside makes a plan or an error, and no plan states less than the run takes. The keys come
 * from the tables, their intervals are read here once more. Runs no model. */
#include "cmd/cmd.h"
#include "conf/conf_int.h"
#include "generate/eval.h"
#include "generate/generate.h"
#include "ppo/plan/memory_plan.h"
#include "sft/sft.h"
#include "supervised/memory_plan.h"

#include "base/err.h"
#include "base/file.h"
#include "base/log.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmocka.h>

enum { MAX_VALUES = 48, MAX_INTERVALS = 4, MAX_ARGS = 48 };

static char dir[] = "/tmp/verlc-limits-XXXXXX";
static struct dev cpu, gpu; /* the second is only planned for */

#define SHAPE(layers, hidden, ffn, heads, dim, vocab)                                                                       \
    "{\"model_type\": \"llama\", \"architectures\": [\"LlamaForCausalLM\"], \"num_hidden_layers\": " layers                 \
    ", \"hidden_size\": " hidden ", \"intermediate_size\": " ffn ", \"num_attention_heads\": " heads ", \"head_dim\": " dim \
    ", \"vocab_size\": " vocab ", \"id2label\": {\"0\": \"LABEL_0\"}}"

static void write_shape(const char *name, const char *json) {
    char *sub = file_join(dir, name), *path = file_join(sub, "config.json");
    if (file_mkdirs(sub) < 0 || file_write_atomic(path, json, strlen(json)) < 0) fail_msg("%s", err_msg());
    free(path);
    free(sub);
}

static int open_all(void **state) {
    (void)state;
    static const char reward[] = "{\"model_type\": \"llama\", \"architectures\": [\"LlamaForSequenceClassification\"], "
                                 "\"num_hidden_layers\": 2, \"hidden_size\": 64, \"intermediate_size\": 128, "
                                 "\"num_attention_heads\": 4, \"vocab_size\": 300, \"id2label\": {\"0\": \"LABEL_0\"}}";
    log_set_level(LOG_OFF);
    if (!mkdtemp(dir)) return -1;
    write_shape("model", SHAPE("2", "64", "128", "4", "16", "300"));
    write_shape("reward", reward);
    dev_open_cuda_planned(&gpu, (size_t)80 << 30);
    return dev_open_cpu(&cpu, 1, NULL);
}

static int close_all(void **state) {
    (void)state;
    dev_close(&cpu);
    dev_close(&gpu);
    return file_remove_tree(dir);
}

/* ---- intervals and values ---- */

struct interval {
    bool whole, lo_open, hi_open;
    long double lo, hi;
};

static long double number(const char *p, char **end) {
    const int sign = *p == '-' ? -1 : 1;
    long double x = strtold(p + (*p == '-'), end);
    for (int i = **end == '^' ? (int)strtol(*end + 1, end, 10) : 1; i > 1; i--) x *= 2; /* 2^i */
    return sign * x;
}

/* Those of a type such as "int[1,2^24]|null"; other alternatives are left out. */
static int intervals(const char *type, struct interval v[MAX_INTERVALS]) {
    int n = 0;
    for (const char *p = type; *p;) {
        const size_t len = strcspn(p, "|");
        const bool list = strncmp(p, "list[", 5) == 0, whole = strncmp(p + 5 * list, "int", 3) == 0;
        const char *q = p + 5 * list + (whole ? 3 : 5);
        char *end;
        if (whole || strncmp(p + 5 * list, "float", 5) == 0) {
            struct interval t = {whole, true, true, -INFINITY, INFINITY};
            if (whole) t = (struct interval){true, false, false, -0x1p53L, 0x1p53L};
            if (*q == '[' || *q == '(') {
                t.lo_open = *q == '(';
                t.lo = number(q + 1, &end);
                t.hi = number(end + 1, &end);
                t.hi_open = *end == ')';
                if (!whole) t.lo = (double)t.lo, t.hi = (double)t.hi; /* a double is what is compared with them */
            }
            assert_true(n < MAX_INTERVALS);
            v[n++] = t;
        }
        p += len + (p[len] == '|');
    }
    return n;
}

static bool inside(const struct interval *v, int n, bool whole, long double x) {
    for (int i = 0; i < n; i++)
        if ((!v[i].whole || whole) && (v[i].lo_open ? x > v[i].lo : x >= v[i].lo) && (v[i].hi_open ? x < v[i].hi : x <= v[i].hi))
            return true;
    return false;
}

struct value {
    char text[40];
    bool ok;
};

static void add(struct value *out, int *n, const char *text, const struct interval *v, int n_intervals) {
    const bool whole = text[strspn(text, "-0123456789")] == '\0';
    const long double x = whole ? strtold(text, NULL) : (long double)strtod(text, NULL);
    for (int i = 0; i < *n; i++)
        if (strcmp(out[i].text, text) == 0) return;
    assert_true(*n < MAX_VALUES);
    out[*n].ok = inside(v, n_intervals, whole, x) && !(whole && (x >= 0x1p63L || x < -0x1p63L));
    snprintf(out[(*n)++].text, sizeof out->text, "%s", text);
}

/* One below the least, the least, the greatest, one above, and what a cast would cut. */
static int values(const char *type, struct value out[MAX_VALUES]) {
    static const char *const more[] = {"2147483648", "4294967297", "4611686018427387904", "9223372036854775807", "nan",
                                       "inf",        "-inf"};
    struct interval v[MAX_INTERVALS];
    char text[40];
    int n = 0;
    const int m = intervals(type, v);
    for (int i = 0; i < m; i++) {
        const long double ends[] = {v[i].lo, v[i].hi};
        const bool open[] = {v[i].lo_open, v[i].hi_open};
        for (int e = 0; e < 2; e++) { /* in, at and out of the interval: an open end is outside itself */
            const int out_of = e == 0 ? -1 : 1;
            for (int d = open[e] ? -1 : 0; d <= (open[e] ? 0 : 1); d++) {
                const double at = (double)ends[e];
                if (isinf(ends[e])) continue;
                if (v[i].whole) snprintf(text, sizeof text, "%.0Lf", ends[e] + d * out_of);
                else if (d == 0 || at != 0)
                    snprintf(text, sizeof text, "%.17e", d == 0 ? at : nextafter(at, d * out_of * HUGE_VAL));
                else snprintf(text, sizeof text, "%d%s", d * out_of, "e-300"); /* no denormal: a device's threads have none */
                add(out, &n, text, v, m);
            }
        }
    }
    for (size_t i = 0; m > 0 && i < sizeof more / sizeof *more; i++) add(out, &n, more[i], v, m);
    return n;
}

/* ---- the programs ---- */

/* What an error that a value leads to may be: of the configuration, of files that are not there, of memory. */
static void check_error(const char *arg, int rc) {
    if (rc != ERR_INVAL && rc != ERR_INPUT && rc != ERR_FORMAT && rc != ERR_NOMEM && rc != ERR_UNSUPPORTED)
        fail_msg("%s: %s: %s", arg, err_name(rc), err_msg());
    if (!*err_msg()) fail_msg("%s: an error without a message", arg);
}

static bool at_least(size_t have, long double want) { return (long double)have >= fminl(want, (long double)SIZE_MOST); }

/* What a run cannot do without, computed without a bound: the plan states no less. */
static void check_plan(const char *arg, const struct memory_plan *p, const struct ppo_worker_config *k,
                       const struct model_config *m) {
    const long double length = (long double)k->data->max_prompt_length + (long double)k->data->max_response_length,
                      batch = (long double)k->data->train_batch_size * (long double)k->rollout.train.n,
                      seqs = fminl((long double)k->actor.update_cut.max_seqs, batch),
                      rows = k->actor.update_cut.max_seqs > 0 ? seqs * length
                                                              : fmaxl((long double)k->actor.update_cut.max_rows, length),
                      states = rows * (long double)m->hidden * 4 * (long double)(m->n_layers + 1),
                      validation = k->data->n_val_files > 0
                                       ? (long double)k->rollout.val.n * (long double)k->data->max_response_length * 8
                                       : 0;
    const bool ok = (long double)p->max_len == length && (long double)p->max_rows_update == rows && rows <= INT32_MAX &&
                    at_least(p->update, states) && at_least(p->host_all, batch * length * 8) && at_least(p->host_all, validation) &&
                    p->total >= p->update && p->total >= p->rollout && p->total >= p->host && p->total < SIZE_MAX / 2;
    if (!ok) fail_msg("%s: the plan states less than the run takes", arg);
}

static int plan_on(const char *arg, struct dev *dev, const struct ppo_config *read) {
    const struct ppo_placement alone = {.all = {.n = 1, .n_local = 1}, .pools = {.n = {[PPO_TRAIN] = 1}}};
    struct ppo_worker_config config = ppo_worker_config(read, &alone), *const k = &config;
    struct memory_plan_shapes shapes = {0};
    struct memory_plan p;
    struct buf text = {0};
    memory_plan_offload(k, dev);
    int rc = memory_plan_shapes_load(&shapes, k);
    if (rc == 0) rc = memory_plan_make(&p, k, &shapes, dev);
    if (rc == 0) {
        check_plan(arg, &p, k, &shapes.policy);
        json_decref(memory_plan_print(&p, k, &shapes, dev, &text));
        rc = memory_plan_check(&p, k, &shapes, dev);
        if (rc == 0 && (p.total > p.limit || p.limit > (size_t)1 << 56)) fail_msg("%s: a plan beyond its limit passes", arg);
    }
    buf_free(&text);
    memory_plan_shapes_free(&shapes);
    return rc;
}

static int run_ppo(const char *arg, const struct conf *c) {
    const struct ppo_config *k;
    int rc = ppo_config_read(&k, c, PPO_PLAN);
    if (rc == 0) {
        rc = plan_on(arg, &gpu, k);
        if (rc < 0) check_error(arg, rc);
        rc = plan_on(arg, &cpu, k);
    }
    ppo_config_free(k);
    return rc;
}

static int run_sft(const char *arg, const struct conf *c) {
    struct supervised_config k = {0};
    struct model_config shape = {0};
    struct trained_model_args a;
    struct supervised_planned plan = {0};
    int rc = supervised_config_read(&k, &sft_program, c);
    struct supervised_worker_config w = supervised_worker_config(&k, (struct rank_placement){.n = 1, .n_local = 1});
    if (rc == 0) rc = model_config_load(&shape, k.model.dir);
    if (rc == 0) rc = supervised_memory_plan(&w, &gpu, &shape, k.data.max_length, &a, &plan);
    if (rc == 0) {
        const long double rows = k.data.cut.max_seqs > 0 ? (long double)k.data.cut.max_seqs * (long double)k.data.max_length
                                                         : fmaxl((long double)k.data.cut.max_rows, (long double)k.data.max_length);
        if ((long double)a.max_rows != rows || rows > INT32_MAX) fail_msg("%s: another micro-batch than asked for", arg);
    }
    supervised_planned_free(&plan);
    model_config_free(&shape);
    supervised_config_free(&k);
    return rc;
}

static int run_generate(const char *arg, const struct conf *c) {
    (void)arg;
    return generate_run(c); /* its prompts are not there */
}

static int run_eval(const char *arg, const struct conf *c) {
    struct buf out = {0};
    (void)arg;
    const int rc = eval_run(c, &out); /* nor are its responses */
    buf_free(&out);
    return rc;
}

/* ---- the walk ---- */

#define ARR "actor_rollout_ref."
#define PPO                                                                                                                \
    "algorithm.adv_estimator=gae", "data.train_files=x.jsonl", "data.val_files=x.jsonl", ARR "actor.use_dynamic_bsz=True", \
        ARR "actor.use_kl_loss=True", ARR "rollout.name=verlc", "critic.use_dynamic_bsz=True",                             \
        "critic.ppo_micro_batch_size_per_gpu=2"

static const struct program {
    const char *schema, *dirs[4]; /* keys of directories; the last may be of a reward model */
    const char *args[20];
    int (*run)(const char *arg, const struct conf *c);
} programs[] = {
    {"ppo_trainer", {ARR "model.path", "critic.model.path"}, {PPO, "critic.use_dynamic_bsz=True"}, run_ppo},
    /* micro-batches by samples, all models there are */
    {"ppo_trainer",
     {ARR "model.path", "distillation.teacher_models.teacher_model.model_path", "reward.reward_model.model_path"},
     {"algorithm.adv_estimator=grpo", "data.train_files=x.jsonl", "data.val_files=x.jsonl", "data.train_batch_size=8",
      ARR "actor.ppo_mini_batch_size=8", ARR "actor.ppo_micro_batch_size_per_gpu=4", ARR "actor.use_kl_loss=True",
      ARR "rollout.n=2", ARR "rollout.log_prob_micro_batch_size_per_gpu=4", ARR "ref.log_prob_micro_batch_size_per_gpu=4",
      ARR "rollout.name=verlc", "distillation.enabled=True", "distillation.distillation_loss.loss_mode=forward_kl_topk",
      "reward.reward_model.enable=True", "algorithm.filter_groups.enable=True", ARR "model.lora_rank=8"},
     run_ppo},
    {"ppo_megatron_trainer", {ARR "model.path", "critic.model.path"}, {PPO}, run_ppo},
    {"ppo_veomni_trainer", {ARR "model.path", "critic.model.path"}, {PPO}, run_ppo},
    {"one_step_off_ppo_trainer", {ARR "model.path", "critic.model.path"}, {PPO}, run_ppo},
    {"one_step_off_ppo_megatron_trainer", {ARR "model.path", "critic.model.path"}, {PPO}, run_ppo},
    {"fully_async_ppo_trainer", {ARR "model.path", "critic.model.path"}, {PPO}, run_ppo},
    {"fully_async_ppo_megatron_trainer", {ARR "model.path", "critic.model.path"}, {PPO}, run_ppo},
    {"generation_server",
     {ARR "model.path"},
     {"data.train_files=/no/such.jsonl", "+data.output_path=/no/out.jsonl", ARR "rollout.name=verlc"},
     run_generate},
    {"sft_trainer_engine", {"model.path"}, {"data.train_files=x.jsonl", "trainer.n_gpus_per_node=1"}, run_sft},
    {"sft_trainer_engine", {"model.path"}, {"data.train_files=x.jsonl", "data.use_dynamic_bsz=False"}, run_sft},
    {"sft_megatron_trainer", {"model.path"}, {"data.train_files=x.jsonl"}, run_sft},
    {"sft_veomni_trainer", {"model.path"}, {"data.train_files=x.jsonl"}, run_sft},
    {"sft_automodel_trainer", {"model.path"}, {"data.train_files=x.jsonl"}, run_sft},
    {"sft_trainer", {"model.partial_pretrain"}, {"data.train_files=x.jsonl", "trainer.n_gpus_per_node=1"}, run_sft},
    {"generation", {"model.path"}, {"data.path=/no/such.jsonl", "data.output_path=/no/out.jsonl"}, run_generate},
    {"evaluation", {NULL}, {"data.path=/no/such.jsonl"}, run_eval},
};

/* The program with these arguments, then `more`, NULL-terminated. *loaded: the configuration itself is fine. */
static int run(const struct program *p, const char *const *more, bool *loaded) {
    char *argv[MAX_ARGS];
    int n = 0, n_dirs = 0;
    struct conf *c = NULL;
    for (; p->dirs[n_dirs]; n_dirs++)
        argv[n++] = xasprintf("%s=%s/%s", p->dirs[n_dirs], dir, strncmp(p->dirs[n_dirs], "reward", 6) == 0 ? "reward" : "model");
    for (const char *const *a = p->args; *a; a++) argv[n++] = (char *)(uintptr_t)*a;
    for (const char *const *a = more; *a; a++) argv[n++] = (char *)(uintptr_t)*a;
    int rc = conf_load(&c, p->schema, n, argv);
    *loaded = rc == 0;
    if (rc == 0) rc = conf_check(c);
    if (rc == 0) rc = p->run(more[0] ? more[0] : p->schema, c);
    conf_free(c);
    for (int i = 0; i < n_dirs; i++) free(argv[i]);
    return rc;
}

/* Values inside are run; of those outside the first, as the others are refused by the same comparison, which is asked alone.
 * again: a program before has had this key, so that its refusals are known. */
static void walk_key(const struct program *p, const struct conf_key *row, bool again, int64_t *n_values) {
    struct value v[MAX_VALUES];
    const int n = values(row->type, v);
    const bool list = strncmp(row->type, "list[", 5) == 0, texts = strstr(row->type, "str") != NULL;
    bool refused = again;
    for (int i = 0; i < n; i++) {
        char *arg = xasprintf(list ? "++%s=[%s]" : "++%s=%s", row->path, v[i].text);
        struct conf_node *node = NULL;
        bool loaded = conf__parse_value(&node, strchr(arg, '=') + 1, row->path) == 0 && conf__type_ok(row->type, node);
        conf__node_free(node);
        if (!texts && loaded != v[i].ok)
            fail_msg("%s %s: %s, type %s", p->schema, arg, loaded ? "passes" : "is refused", row->type);
        if (row->status != CONF_NOTED && (v[i].ok || texts || !refused)) { /* what is noted no program reads */
            const int rc = run(p, (const char *const[]){arg, NULL}, &loaded);
            if (rc < 0) check_error(arg, rc);
            if (!texts && loaded != v[i].ok)
                fail_msg("%s %s: %s, type %s", p->schema, arg, loaded ? "passes" : err_msg(), row->type);
            if (!loaded && !strstr(err_msg(), row->path)) fail_msg("%s: the refusal does not name it: %s", arg, err_msg());
            refused = refused || !v[i].ok;
        }
        free(arg);
        ++*n_values;
    }
}

static void test_keys(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof programs / sizeof *programs; i++) {
        const struct program *p = &programs[i], *last = i > 0 ? p - 1 : p;
        const bool same_code = p->run == last->run && strcmp(p->schema, last->schema) != 0;
        struct conf_table t, before = {0};
        int64_t n_keys = 0, n_values = 0;
        bool loaded;
        const int rc = run(p, (const char *const[]){NULL}, &loaded);
        if (rc < 0 && p->run != run_generate && p->run != run_eval) fail_msg("%s: %s", p->schema, err_msg());
        assert_int_equal(conf__table_open(&t, p->schema), 0);
        if (i > 0) assert_int_equal(conf__table_open(&before, last->schema), 0);
        for (int64_t k = 0; k < t.n; k++) {
            const struct conf_key *row = &t.rows[k], *old = i > 0 ? conf__table_row(&before, row->path) : NULL;
            const bool again = old && old->status == row->status && strcmp(old->type, row->type) == 0;
            const int64_t had = n_values;
            if (again && same_code && row->status != CONF_MOVED) continue;
            walk_key(p, row, again, &n_values);
            n_keys += n_values > had;
        }
        conf__table_free(&t);
        conf__table_free(&before);
        print_message("%s: %lld numbers, %lld values\n", p->schema, (long long)n_keys, (long long)n_values);
        assert_true(n_keys >= 3);
    }
}

static void test_schemas(void **state) {
    (void)state;
    for (const char *const *name = conf_schemas(); *name; name++) {
        bool found = false;
        for (size_t i = 0; i < sizeof programs / sizeof *programs; i++) found |= strcmp(programs[i].schema, *name) == 0;
        if (!found) fail_msg("%s: no program above has its keys", *name);
    }
}

/* Several numbers at their ends at once, where only products are too large. */
static void test_products(void **state) {
    (void)state;
#define MOST "16777216"
    static const char *const all[][8] = {
        {"data.max_prompt_length=" MOST, "data.max_response_length=" MOST},
        {"data.train_batch_size=" MOST, ARR "actor.ppo_mini_batch_size=" MOST, "critic.ppo_mini_batch_size=" MOST,
         ARR "rollout.n=65536", "data.max_prompt_length=" MOST, "data.max_response_length=" MOST},
        {"trainer.device_memory_limit=64000TB"}, /* no such unit */
        {"trainer.device_memory_limit=72057594037927936", "data.train_batch_size=" MOST, ARR "actor.ppo_mini_batch_size=" MOST,
         ARR "rollout.n=65536", "data.max_response_length=" MOST, ARR "rollout.max_num_seqs=" MOST},
        {"trainer.device_memory_limit=72057594037927936", "data.train_batch_size=" MOST, ARR "actor.ppo_mini_batch_size=" MOST,
         ARR "actor.use_dynamic_bsz=False", ARR "actor.ppo_micro_batch_size_per_gpu=" MOST,
         ARR "rollout.log_prob_micro_batch_size_per_gpu=" MOST, ARR "ref.log_prob_micro_batch_size_per_gpu=" MOST},
        {ARR "rollout.val_kwargs.n=65536", "data.max_response_length=" MOST},
        {"trainer.device_memory_limit=72057594037927936", "critic.use_dynamic_bsz=False", "critic.ppo_mini_batch_size=" MOST,
         "critic.ppo_micro_batch_size_per_gpu=" MOST, "data.train_batch_size=" MOST, "data.max_response_length=1048576"},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        bool loaded;
        const int rc = run(&programs[0], all[i], &loaded);
        if (rc >= 0) fail_msg("%s ... fits", all[i][0]);
        check_error(all[i][0], rc);
    }
}

/* config.json, whose dimensions form sizes too. */
static void test_shapes(void **state) {
    (void)state;
    static const char *const bad[] = {
        SHAPE("9223372036854775807", "64", "128", "4", "16", "300"),
        SHAPE("2", "9223372036854775807", "128", "4", "16", "300"),
        SHAPE("2", "64", "9223372036854775807", "4", "16", "300"),
        SHAPE("2", "64", "128", "9223372036854775807", "16", "300"),
        SHAPE("2", "64", "128", "4", "9223372036854775806", "300"),
        SHAPE("2", "64", "128", "4", "16", "9223372036854775807"),
        SHAPE("1024", "1048576", "4194304", "4096", "4096", "300"),
        SHAPE("0", "64", "128", "4", "16", "300"),
        SHAPE("-2", "64", "128", "4", "16", "300"),
        SHAPE("2", "64", "4294967297", "4", "16", "300"),
        SHAPE("1e400", "64", "128", "4", "16", "300"),
    };
    static const char *const large[] = {
        SHAPE("1024", "2", "4194304", "1", "2", "1"),
        SHAPE("2", "1048576", "4194304", "4096", "256", "16777216"),
        SHAPE("1024", "64", "128", "4096", "4096", "300"),
        SHAPE("1", "1048576", "1", "1", "2", "16777216"),
    };
    bool loaded;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        write_shape("model", bad[i]);
        const int rc = run(&programs[0], (const char *const[]){NULL}, &loaded);
        if (rc != ERR_FORMAT) fail_msg("%s: %d %s", bad[i], rc, rc < 0 ? err_msg() : "fits");
    }
    for (size_t i = 0; i < sizeof large / sizeof *large; i++) {
        write_shape("model", large[i]);
        const int rc = run(&programs[0], (const char *const[]){"data.max_response_length=" MOST, NULL}, &loaded);
        if (rc >= 0) fail_msg("%s fits", large[i]);
        check_error(large[i], rc);
    }
    write_shape("model", SHAPE("2", "64", "128", "4", "16", "300"));
}

/* The options of the other commands: outside their interval the interval is what is said, inside it is something else, since
 * each command lacks what it needs. */
static void test_options(void **state) {
    (void)state;
    static const struct {
        int (*cmd)(int argc, char **argv);
        const char *args[4], *option, *type;
    } options[] = {
        {cmd_generate, {"generate"}, "--threads", CMD_THREADS},
        {cmd_generate, {"generate"}, "--max-seqs", "int[1,2^24]"},
        {cmd_score, {"score"}, "--threads", CMD_THREADS},
        {cmd_score, {"score"}, "--temperature", "float[1e-6,1e6]"},
        {cmd_model, {"model", "init"}, "--seed", CMD_SEED},
        {cmd_model, {"model", "export"}, "--max-shard-mb", "int[1,2^40]"},
        {cmd_model, {"model", "merge"}, "--max-shard-mb", "int[1,2^40]"},
        {cmd_data, {"data", "arith"}, "--n-train", "int[1,2^24]"},
        {cmd_data, {"data", "arith"}, "--n-test", "int[1,2^24]"},
        {cmd_data, {"data", "arith"}, "--n-sft", "int[1,2^24]"},
        {cmd_data, {"data", "arith"}, "--seed", CMD_SEED},
        {cmd_data, {"data", "arith"}, "--level", "int[1,3]"},
        {cmd_data, {"data", "arith"}, "--sft-marked", "float[0,1]"},
        {cmd_selftest, {"selftest", "--device=none", "--model=/no"}, "--threads", CMD_THREADS},
        {cmd_selftest, {"selftest", "--device=none", "--model=/no"}, "--batch", CMD_COUNT},
        {cmd_selftest, {"selftest", "--device=none", "--model=/no"}, "--n", CMD_COUNT},
        {cmd_selftest, {"selftest", "--device=none", "--model=/no"}, "--prompt", CMD_COUNT},
        {cmd_selftest, {"selftest", "--device=none", "--model=/no"}, "--len", CMD_COUNT},
        {cmd_bench, {"bench", "gemm", "--device=none"}, "--threads", CMD_THREADS},
        {cmd_bench, {"bench", "gemm", "--device=none"}, "--seconds", "float(0,1e6]"},
        {cmd_bench, {"bench", "delta", "--device=none"}, "--threads", CMD_THREADS},
        {cmd_bench, {"bench", "delta", "--device=none"}, "--rows", "int[0,65536]"},
        {cmd_bench, {"bench", "delta", "--device=none"}, "--seconds", "float(0,1e6]"},
        {cmd_bench, {"bench", "train"}, "--batch", CMD_COUNT},
        {cmd_bench, {"bench", "train"}, "--n", CMD_COUNT},
        {cmd_bench, {"bench", "train"}, "--prompt", CMD_COUNT},
        {cmd_bench, {"bench", "train"}, "--len", "int[2,2^28]"},
        {cmd_bench, {"bench", "train"}, "--steps", CMD_COUNT},
        {cmd_bench, {"bench", "train"}, "--threads", CMD_THREADS},
        {cmd_bench, {"bench", "step"}, "--batch", CMD_COUNT},
        {cmd_bench, {"bench", "step"}, "--n", CMD_COUNT},
        {cmd_bench, {"bench", "step"}, "--prompt", CMD_COUNT},
        {cmd_bench, {"bench", "step"}, "--len", "int[2,2^28]"},
        {cmd_bench, {"bench", "step"}, "--micro", CMD_COUNT},
        {cmd_bench, {"bench", "step"}, "--steps", CMD_COUNT},
        {cmd_bench, {"bench", "step"}, "--threads", CMD_THREADS},
    };
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        struct value v[MAX_VALUES];
        const int n = values(options[i].type, v);
        for (int k = 0; k < n; k++) {
            char *argv[8], *arg = xasprintf("%s=%s", options[i].option, v[k].text);
            int argc = 0;
            for (; options[i].args[argc]; argc++) argv[argc] = (char *)(uintptr_t)options[i].args[argc];
            argv[argc++] = arg;
            const int rc = options[i].cmd(argc, argv);
            const bool refused = strstr(err_msg(), arg) && strstr(err_msg(), "expected");
            if (rc >= 0) fail_msg("%s %s runs", options[i].args[0], arg);
            if (refused == v[k].ok) fail_msg("%s %s: %s", options[i].args[0], arg, err_msg());
            free(arg);
        }
    }
}

/* The last one: whatever the shapes and numbers were, sizing them took no memory of their size. */
static void test_memory(void **state) {
    (void)state;
    struct rusage u;
    assert_int_equal(getrusage(RUSAGE_SELF, &u), 0);
    if (u.ru_maxrss > 2 << 20) fail_msg("plans took %ld MiB of memory", u.ru_maxrss >> 10); /* with a sanitizer's own */
}

/* A card by any spelling of its name, a bare number of GB, a size; nothing is guessed. */
static void gpu_names(void **state) {
    (void)state;
    static const struct {
        const char *text;
        double gib;
    } good[] = {{"H100", 79.1},
                {"h100", 79.1},
                {"H100-80GB", 79.1},
                {"NVIDIA H100 80GB HBM3", 79.1},
                {"H200", 139.7},
                {"A100-40GB", 39.3},
                {"a100_40", 39.3},
                {"A100-SXM4-80GB", 79.1},
                {"NVIDIA A100-PCIE-40GB", 39.3},
                {"4090", 23.5},
                {"RTX 4090", 23.5},
                {"NVIDIA GeForce RTX 4090", 23.5},
                {"rtx-6000-ada", 47.4},
                {"T4", 14.5},
                {"Tesla V100-SXM2-16GB", 15.7},
                {"24", 24e9 / 0x1p30},
                {"80.5", 80.5e9 / 0x1p30},
                {"24GB", 24e9 / 0x1p30},
                {"40GiB", 40},
                {"40960MiB", 40},
                {"1024", 1024e9 / 0x1p30}};
    static const char *const bad[] = {"",    "A100",      "V100",     "H1000",  "x",    "0",    "-1",
                                      "0GB", "nan",       "inf",      "1e400",  "2000", "4091", "24 GB of it",
                                      "GB",  "H100,H100", "\xff\xfe", "24GBGB", "..",   "1e-30"};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        int64_t bytes = 0;
        if (cmd_gpu_bytes("--gpu", good[i].text, &bytes) < 0) fail_msg("%s", err_msg());
        if (fabs((double)bytes - good[i].gib * 0x1p30) > 2) fail_msg("%s: %lld bytes", good[i].text, (long long)bytes);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        int64_t bytes = 0;
        if (cmd_gpu_bytes("--gpu", bad[i], &bytes) != ERR_INVAL) fail_msg("'%s': %lld bytes", bad[i], (long long)bytes);
        assert_non_null(strstr(err_msg(), "--gpu"));
    }
    assert_int_equal(cmd_gpu_bytes("--gpu", "A100", &(int64_t){0}), ERR_INVAL);
    assert_non_null(strstr(err_msg(), "A100-80GB or A100-40GB"));
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_keys),     cmocka_unit_test(test_schemas),
                                       cmocka_unit_test(test_products), cmocka_unit_test(test_shapes),
                                       cmocka_unit_test(test_options),  cmocka_unit_test(gpu_names),
                                       cmocka_unit_test(test_memory)};
    return cmocka_run_group_tests(tests, open_all, close_all);
}
