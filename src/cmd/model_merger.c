/* model_merger.c - verlc model_merger merge | test: the command line of
 * `python -m verl.model_merger`, for FSDP and Megatron checkpoints. One of verlc's is a model directory already, and is copied.
 *
 * Options that are transformers', or Megatron's on other checkpoints, are taken and say that they
 * do nothing; what it would silently not do is refused.
 * Invariant: no code of the checkpoint runs, whatever --trust-remote-code says. */
#include "cmd/cmd.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/log.h"
#include "model/files/shards.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The options of both operations. */
struct merger {
    const char *backend, *local_dir, *hf_model_path;
    bool tie, remote_code, value_model, cpu_init;
};

static void show_progress(size_t done, size_t total) {
    static size_t shown; /* in 256ths: a line that is drawn again, on a terminal alone */
    const size_t now = total ? done * 256 / total : 256;
    if (!isatty(STDERR_FILENO) || now == shown) return;
    shown = now;
    fprintf(stderr, "\rmerging: %.2f of %.2f GB%s", 1e-9 * (double)done, 1e-9 * (double)total, done == total ? "\n" : "");
}

struct merge {
    const struct cmd_merge_args *a;
    const struct shards *s;
    const char *dir;
};

static int write_model(void *arg, const char *dir) {
    const struct merge *m = arg;
    char *config = m->a->config_dir ? xstrdup(m->a->config_dir) : shards_config_dir(m->dir);
    const int rc = shards_export(&(struct shards_export_args){.s = m->s,
                                                              .dir = m->dir,
                                                              .config_dir = config,
                                                              .out = dir,
                                                              .dt = m->a->dt,
                                                              .max_shard = (size_t)m->a->shard_mb * 1000000,
                                                              .progress = show_progress});
    free(config);
    return rc;
}

/* What the directory holds, and what was written of it. */
static void report(const struct merge *m) {
    int64_t model = 0, adapter = 0;
    char *what = shards_words(m->s);
    for (int64_t i = 0; i < shards_count(m->s); i++) (*(shards_at(m->s, i)->adapter ? &adapter : &model))++;
    if (model > 0) log_info("%s: %lld tensors of %s", m->a->out, (long long)model, what);
    if (shards_left(m->s) > 0)
        log_note("%lld tensors in %s are no weights (the optimizer's state): not read", (long long)shards_left(m->s), m->dir);
    if (adapter > 0)
        log_info("%s/lora_adapter: %lld tensors; %s", m->a->out, (long long)adapter,
                 model > 0 ? "'verlc model merge --model BASE --adapter ADAPTER' adds it to the weights"
                           : "the checkpoint holds the adapter alone (save_lora_only)");
    free(what);
}

/* The shards that a directory means, and whether they are what --backend says. */
static int find_shards(const struct cmd_merge_args *a, char **dir) {
    *dir = shards_find_dir(a->dir);
    if (!*dir)
        FAIL(ERR_INPUT, "%s: no %s in it%s", a->dir,
             a->backend && strcmp(a->backend, "megatron") == 0 ? "dist_ckpt/.metadata, Megatron's distributed checkpoint"
             : a->backend                                      ? "model_world_size_W_rank_R.pt, verl's FSDP shards"
                          : "model_world_size_W_rank_R.pt, verl's FSDP shards, nor dist_ckpt/.metadata, Megatron's",
             file_is_dir(a->dir) ? "" : "; there is no such directory");
    if (a->backend && strcmp(a->backend, shards_backend(*dir)) != 0)
        FAIL(ERR_INPUT, "--backend %s: %s holds shards of the other backend; give --backend %s", a->backend, *dir,
             shards_backend(*dir));
    return 0;
}

static int open_shards(const struct cmd_merge_args *a, const char *dir, struct shards **s) {
    TRY(shards_open(s, &(struct shards_args){.dir = dir, .config_dir = a->config_dir, .no_head = a->no_head}));
    if (a->value && strcmp(shards_backend(dir), "megatron") == 0 && !shards_is_value(*s) && !a->no_head)
        FAIL(ERR_INPUT, "--is-value-model: the output_layer in %s has not one row, and is no value head; drop the option", dir);
    return 0;
}

int cmd_merge_shards(const struct cmd_merge_args *a) {
    struct merge m = {.a = a};
    struct shards *s = NULL;
    char *dir = NULL;
    int rc = 0;
    TRYG(find_shards(a, &dir), out);
    TRYG(open_shards(a, dir, &s), out);
    m.s = s;
    m.dir = dir;
    TRYG(cmd_write_dir(a->out, a->force, write_model, &m), out);
    report(&m);
out:
    shards_close(s);
    free(dir);
    return rc;
}

static int check(const struct merger *m) {
    if (!m->backend || !m->local_dir)
        FAIL(ERR_INVAL, "verl.model_merger needs --backend fsdp or megatron, and --local_dir .../global_step_N/actor");
    const bool megatron = strcmp(m->backend, "megatron") == 0;
    if (!megatron && strcmp(m->backend, "fsdp") != 0) FAIL(ERR_INVAL, "--backend %s: expected fsdp or megatron", m->backend);
    if (m->tie && !megatron) log_note("--tie-word-embedding is Megatron's: config.json says whether embeddings are tied");
    if (m->value_model && !megatron) log_note("--is-value-model is Megatron's: config.json says what the model is");
    if (m->remote_code) log_note("--trust-remote-code: no code of a checkpoint is run, and none is needed");
    if (m->cpu_init) log_note("--use_cpu_initialization: no model is made to merge one");
    return 0;
}

static struct cmd_merge_args merge_args(const struct merger *m) {
    return (struct cmd_merge_args){
        .dir = m->local_dir, .config_dir = m->hf_model_path, .backend = m->backend, .no_head = m->tie, .value = m->value_model};
}

#define COMMON_OPTS(m)                                                                                                    \
    {"--backend", CMD_STR, &(m).backend, "fsdp|megatron", "what wrote the checkpoint"},                                   \
        {"--local_dir", CMD_STR, &(m).local_dir, "DIR", "the checkpoint: .../global_step_N/actor"},                       \
        {"--hf_model_path", CMD_STR, &(m).hf_model_path, "DIR", "config.json and tokenizer (DIR/huggingface)"},           \
        {"--tie-word-embedding", CMD_FLAG, &(m).tie, NULL, "Megatron's: without output_layer"},                           \
        {"--is-value-model", CMD_FLAG, &(m).value_model, NULL, "Megatron's: refused where the head is not a value head"}, \
        {"--trust-remote-code", CMD_FLAG, &(m).remote_code, NULL, "does nothing: no code is run"}, {                      \
        "--use_cpu_initialization", CMD_FLAG, &(m).cpu_init, NULL, "does nothing"                                         \
    }

/* Whether the target is the checkpoint's own huggingface/, into which scripts have verl's merger write. */
static bool is_its_own(const char *target, const char *dir) {
    char *sub = file_join(dir, "huggingface"), *a = realpath(target, NULL), *b = realpath(sub, NULL);
    const bool same = a && b && strcmp(a, b) == 0;
    free(sub);
    free(a);
    free(b);
    return same;
}

static int run_merge(int argc, char **argv) {
    struct merger m = {0};
    struct cmd_merge_args a = {.out = "tmp", .dt = DT_BF16, .shard_mb = 5000};
    const char *upload = NULL, *dtype = "bf16";
    bool private = false;
    const struct cmd_opt opts[] = {
        COMMON_OPTS(m),
        {"--target_dir", CMD_STR, &a.out, "DIR", "directory to create (tmp)"},
        {"--dtype", CMD_STR, &dtype, "bf16|fp32|fp16", "of the weights (bf16, as verl's)"},
        {"--max-shard-mb", CMD_I64("int[1,2^40]"), &a.shard_mb, "N", "largest file, in 10^6 bytes (5000)"},
        {"--force", CMD_FLAG, &a.force, NULL, "replace a model that is there"},
        {"--hf_upload_path", CMD_STR, &upload, "NAME", "refused: upload the directory with 'hf upload'"},
        {"--private", CMD_FLAG, &private, NULL, "of --hf_upload_path"},
    };
    const struct cmd_spec spec =
        CMD_SPEC(opts, "verlc model_merger merge --backend fsdp|megatron --local_dir DIR --target_dir DIR [options]",
                 "Writes the FSDP shards of a verl checkpoint, or Megatron's distributed checkpoint\n"
                 "(dist_ckpt, any TP and PP), as a Hugging Face model directory. Pickles are\n"
                 "read as data: nothing in them is run, and what is no part of a tensor is refused.\n"
                 "A checkpoint of verlc's is such a directory already: its model is copied.");
    const int rc = cmd_parse(&spec, argc, argv);
    if (rc != 0) return rc < 0 ? rc : 0;
    if (upload)
        FAIL(ERR_UNSUPPORTED, "--hf_upload_path: unsupported; merge without it, then 'hf upload %s %s'%s", upload, a.out,
             private ? " with --private" : "");
    TRY(cmd_file_dtype(dtype, &a.dt));
    struct cmd_merge_args named = merge_args(&m);
    named.out = a.out;
    named.dt = a.dt;
    named.shard_mb = a.shard_mb;
    char *shards = m.local_dir ? shards_find_dir(m.local_dir) : NULL;
    char *merged = m.local_dir && !shards ? cmd_merged_model(m.local_dir) : NULL;
    named.force = a.force || ((merged || shards) && is_its_own(a.out, merged ? merged : shards));
    if (merged) named.dir = merged;
    int done = check(&m);
    if (done == 0) done = merged ? cmd_copy_merged(&named) : cmd_merge_shards(&named);
    free(shards);
    free(merged);
    return done;
}

static int run_test(int argc, char **argv) {
    struct merger m = {0};
    struct shards *s = NULL;
    const char *test_dir = NULL;
    char *dir = NULL;
    const struct cmd_opt opts[] = {COMMON_OPTS(m), {"--test_hf_dir", CMD_STR, &test_dir, "DIR", "model directory to compare with"}};
    const struct cmd_spec spec = CMD_SPEC(opts, "verlc model_merger test --backend fsdp|megatron --local_dir DIR --test_hf_dir DIR",
                                          "Compares the FSDP shards of a verl checkpoint, or Megatron's, with a Hugging Face\n"
                                          "model directory.");
    int rc = cmd_parse(&spec, argc, argv);
    if (rc != 0) return rc < 0 ? rc : 0;
    TRY(check(&m));
    if (!test_dir) FAIL(ERR_INVAL, "usage: %s", spec.usage);
    const struct cmd_merge_args a = merge_args(&m);
    TRYG(find_shards(&a, &dir), out);
    TRYG(open_shards(&a, dir, &s), out);
    TRYG(shards_compare(s, test_dir), out);
    log_info("%s: the merged checkpoint has the tensors of %s", m.local_dir, test_dir);
out:
    shards_close(s);
    free(dir);
    return rc;
}

int cmd_model_merger(int argc, char **argv) {
    static const char usage[] =
        "usage: verlc model_merger merge|test --backend fsdp|megatron --local_dir DIR [options]; each takes --help";
    if (argc >= 2 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) {
        puts(usage);
        return 0;
    }
    if (argc >= 2 && strcmp(argv[1], "merge") == 0) return run_merge(argc - 1, argv + 1);
    if (argc >= 2 && strcmp(argv[1], "test") == 0) return run_test(argc - 1, argv + 1);
    FAIL(ERR_INVAL, "%s", usage);
}
