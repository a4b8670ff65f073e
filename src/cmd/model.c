/* model.c - verlc model init | info | export | merge: Hugging Face model directories.
 *
 * A result directory is written next to its final name and takes it when it is
 * complete.
 * Invariant: an output directory that exists is never changed, unless --force
 * requests it and it holds a model; then the old or the new one is there at any moment. */
#include "cmd/cmd.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "ckpt/ckpt.h"
#include "data/data.h"
#include "model/families.h"
#include "model/files/export.h"
#include "model/files/shards.h"
#include "model/files/init.h"
#include "model/files/load.h"
#include "model/lora/lora.h"
#include "run/directories.h"
#include "text/text.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static const int64_t ONE_FILE_MB = INT64_MAX / 1000000; /* no limit on a file */
enum { VOCAB_MULTIPLE = 64 /* a preset's vocabulary is rounded up to it, as released models do */ };

int cmd_file_dtype(const char *name, int *dt) {
    if (strcmp(name, "bf16") == 0) *dt = DT_BF16;
    else if (strcmp(name, "fp32") == 0) *dt = DT_F32;
    else if (strcmp(name, "fp16") == 0) *dt = DT_F16;
    else FAIL(ERR_INVAL, "--dtype %s: expected fp32, bf16 or fp16", name);
    return 0;
}

/* ---- an output directory that appears complete ---- */

struct out_dir {
    char *path, *tmp;
    int lock; /* on tmp, while it is written; -1: none */
};

static bool dir_is_empty(const char *path) {
    DIR *d = opendir(path);
    int n = 0;
    if (!d) return false;
    for (struct dirent *e; (e = readdir(d));) n++;
    closedir(d);
    return n <= 2; /* . and .. */
}

/* PATH.*.tmp of processes that were killed: one that still runs holds a lock on its own. */
static void remove_abandoned(const char *path) {
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    char *parent = slash ? xstrndup(path, (size_t)(slash - path) + 1) : xstrdup("./");
    DIR *d = opendir(parent);
    for (struct dirent *e; d && (e = readdir(d));) {
        if (strncmp(e->d_name, name, strlen(name)) != 0 || e->d_name[strlen(name)] != '.' || !file_is_temp_name(e->d_name))
            continue;
        char *tmp = file_join(parent, e->d_name);
        const int fd = open(tmp, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0 && file_remove_tree(tmp) < 0) log_warn("%s", err_msg());
        if (fd >= 0) close(fd);
        free(tmp);
    }
    if (d) closedir(d);
    free(parent);
}

static int out_open(struct out_dir *o, const char *given, bool force) {
    size_t n = strlen(given);
    while (n > 1 && given[n - 1] == '/') n--;
    *o = (struct out_dir){.path = xstrndup(given, n), .lock = -1};
    TRY(file_recover_dir(o->path));
    char *config = file_join(o->path, "config.json");
    const bool there = file_exists(o->path) && !dir_is_empty(o->path), is_model = file_exists(config);
    free(config);
    if (there && !force)
        FAIL(ERR_INVAL, "%s exists and is not empty; choose another directory%s", given,
             is_model ? " or give --force to replace the model in it" : "");
    if (there && !is_model) FAIL(ERR_INVAL, "%s holds something other than a model; choose another directory", given);
    remove_abandoned(o->path);
    o->tmp = file_temp_path(o->path);
    TRY(file_mkdirs(o->tmp));
    o->lock = open(o->tmp, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (o->lock >= 0) (void)!flock(o->lock, LOCK_EX | LOCK_NB);
    return 0;
}

static int out_publish(struct out_dir *o) {
    struct stat st;
    if (stat(o->path, &st) == 0) (void)!chmod(o->tmp, st.st_mode & 0777); /* the directory that is replaced may be private */
    TRY(file_fsync_dir(o->tmp));
    return file_replace_dir(o->tmp, o->path);
}

/* Ends with the command's result; a failed run leaves nothing behind. */
static int out_close(struct out_dir *o, int rc) {
    if (rc == 0) rc = out_publish(o);
    if (rc < 0 && o->tmp) {
        struct err_saved why;
        err_save(&why);
        if (file_remove_tree(o->tmp) < 0) log_warn("%s", err_msg());
        err_restore(&why);
    }
    if (o->lock >= 0) close(o->lock);
    free(o->tmp);
    free(o->path);
    return rc;
}

int cmd_write_dir(const char *out, bool force, int (*write)(void *arg, const char *dir), void *arg) {
    struct out_dir o;
    const int rc = out_open(&o, out, force);
    return out_close(&o, rc < 0 ? rc : write(arg, o.tmp));
}

/* ---- init ---- */

static void add_name(void *arg, const char *name) {
    struct buf *b = arg;
    buf_addf(b, "%s%s", b->n ? ", " : "", name);
}

/* The same in lines of a help text. */
static void add_name_line(void *arg, const char *name) {
    enum { WIDTH = 110 };
    struct buf *b = arg;
    size_t line = 0;
    while (line < b->n && b->p[b->n - 1 - line] != '\n') line++;
    buf_addf(b, "%s%s", b->n == 0 ? "" : line + strlen(name) > WIDTH ? ",\n  " : ", ", name);
}

/* A built-in name, or the path of a config.json or of the directory that holds it. */
static int arch_config(json_t **out, const char *arch) {
    enum { MAX_CONFIG = 16 << 20 };
    *out = model_arch_config(arch);
    if (*out) return 0;
    if (file_is_dir(arch)) {
        char *path;
        TRY(file_in_dir(&path, arch, "config.json"));
        const int rc = path ? json_load(out, path, MAX_CONFIG) : err_set(ERR_INPUT, __FILE__, __LINE__, "%s: no config.json", arch);
        free(path);
        return rc;
    }
    if (file_exists(arch)) return json_load(out, arch, MAX_CONFIG);
    struct buf names = {0};
    model_arch_names(add_name, &names);
    const int rc = err_set(ERR_INVAL, __FILE__, __LINE__, "--arch %s: neither a file nor one of %s", arch, names.p);
    buf_free(&names);
    return rc;
}

static void set_token(json_t *config, const char *key, int32_t id) {
    json_object_set_new(config, key, id < 0 ? json_null() : json_integer(id));
}

/* Makes a config without a vocabulary of its own fit the tokenizer in dir, and checks one that has. */
static int fit_tokenizer(json_t *config, const char *dir, bool adopt) {
    struct tokenizer *t = NULL;
    int64_t vocab = 0;
    TRY(tokenizer_open(&t, dir));
    const int64_t need = tokenizer_vocab_size(t);
    if (adopt) {
        vocab = (need + VOCAB_MULTIPLE - 1) / VOCAB_MULTIPLE * VOCAB_MULTIPLE;
        json_object_set_new(config, "vocab_size", json_integer(vocab));
        set_token(config, "bos_token_id", tokenizer_bos(t));
        set_token(config, "eos_token_id", tokenizer_eos(t));
        set_token(config, "pad_token_id", tokenizer_pad(t));
    }
    tokenizer_close(t);
    TRY(json_i64(model_text_json(config), "vocab_size", &vocab, "config.json"));
    if (need > vocab)
        FAIL(ERR_INPUT, "%s: the tokenizer has ids up to %lld, the model a vocabulary of %lld", dir, (long long)need - 1,
             (long long)vocab);
    return 0;
}

static int copy_tokenizer(const char *from, const char *to) {
    struct tokenizer_files *f;
    TRY(tokenizer_files_read(&f, from));
    if (!f) FAIL(ERR_INPUT, "--tokenizer %s: no tokenizer files (tokenizer.json, ...) to copy", from);
    const int rc = tokenizer_files_write(f, to);
    tokenizer_files_free(f);
    return rc;
}

static int write_config(const char *dir, const json_t *config) {
    char *const path = file_join(dir, "config.json");
    int rc = file_mkdirs(dir);
    if (rc == 0) rc = json_save_atomic(path, config);
    free(path);
    return rc;
}

/* dtype: NULL: that of the config; "": no weights. */
static int init_into(const char *dir, json_t *config, const char *preset, const char *tokenizer, uint64_t seed, const char *dtype) {
    struct model_config c = {0};
    int dt;
    if (tokenizer) TRY(copy_tokenizer(tokenizer, dir));
    else if (preset) TRY(data_write_tiny_tokenizer(dir));
    if (tokenizer || preset) TRY(fit_tokenizer(config, dir, preset != NULL));
    TRY(model_config_from_json(&c, config, "config.json"));
    dt = c.dtype;
    const int64_t n = model_config_params(&c);
    model_config_free(&c);
    const bool weights = !dtype || *dtype;
    if (dtype && weights) TRY(cmd_file_dtype(dtype, &dt));
    log_info("%lld parameters, %.2f GB as %s", (long long)n, 1e-9 * (double)n * (double)dtype_size((enum dtype)dt),
             dtype_name((enum dtype)dt));
    return weights ? model_init_dir(config, dir, seed, (enum dtype)dt) : write_config(dir, config);
}

static int cmd_model_init(int argc, char **argv) {
    const char *arch = NULL, *preset = NULL, *out = NULL, *tokenizer = NULL, *dtype = NULL;
    int64_t seed = 0;
    bool force = false, config_only = false;
    struct buf names = {0};
    model_arch_names(add_name_line, &names);
    char *about = xasprintf("Writes a model of random weights that transformers loads as it is.\n"
                            "NAME: %s.\n--preset tiny: a small model with its own tokenizer, for trying things out.",
                            names.p);
    buf_free(&names);
    const struct cmd_opt opts[] = {
        {"--arch", CMD_STR, &arch, "NAME|FILE", "a built-in shape, or a config.json"},
        {"--preset", CMD_STR, &preset, "tiny", "shape and tokenizer at once"},
        {"--out", CMD_STR, &out, "DIR", "directory to create"},
        {"--tokenizer", CMD_STR, &tokenizer, "DIR", "copy the tokenizer files from here"},
        {"--seed", CMD_I64(CMD_SEED), &seed, "N", "of the weights (0)"},
        {"--dtype", CMD_STR, &dtype, "fp32|bf16|fp16", "of the weights (that of the config)"},
        {"--config-only", CMD_FLAG, &config_only, NULL, "no weights: what `verlc plan` reads"},
        {"--force", CMD_FLAG, &force, NULL, "replace a model that is there"},
    };
    const struct cmd_spec spec =
        CMD_SPEC(opts, "verlc model init (--arch NAME|CONFIG.json | --preset tiny) --out DIR [options]", about);
    struct out_dir o;
    json_t *config = NULL;
    int rc = cmd_parse(&spec, argc, argv);
    free(about);
    if (rc != 0) return rc < 0 ? rc : 0;
    if ((arch == NULL) == (preset == NULL)) FAIL(ERR_INVAL, "one of --arch and --preset is needed; usage: %s", spec.usage);
    if (!out) FAIL(ERR_INVAL, "--out is missing; usage: %s", spec.usage);
    if (preset && strcmp(preset, "tiny") != 0) FAIL(ERR_INVAL, "--preset %s: there is tiny", preset);
    if (config_only && dtype) FAIL(ERR_INVAL, "--dtype %s: with --config-only there are no weights", dtype);
    if (config_only) dtype = "";
    TRY(arch_config(&config, preset ? preset : arch));
    rc = out_open(&o, out, force);
    rc = out_close(&o, rc < 0 ? rc : init_into(o.tmp, config, preset, tokenizer, (uint64_t)seed, dtype));
    json_decref(config);
    return rc;
}

/* ---- info ---- */

static int cmd_model_info(int argc, char **argv) {
    const char *dir = NULL, *operand = NULL;
    int n = 0;
    const struct cmd_opt opts[] = {{"--model", CMD_STR, &dir, "DIR", "the same"}};
    struct cmd_spec spec = CMD_SPEC(opts, "verlc model info DIR", "One JSON line about a model: a directory, or a hub id.");
    spec.operands = &operand;
    spec.max_operands = 1;
    spec.n_operands = &n;
    const int parsed = cmd_parse(&spec, argc, argv);
    if (parsed != 0) return parsed < 0 ? parsed : 0;
    if (!dir && !operand) FAIL(ERR_INVAL, "model info: which model? usage: %s", spec.usage);
    if (dir && operand) FAIL(ERR_INVAL, "model info: --model %s and %s are two models; usage: %s", dir, operand, spec.usage);
    if (operand) dir = operand;
    struct model_config c;
    struct buf line = {0};
    char *config = NULL;
    TRY(run_model_dir(dir, false, &config));
    const int read = model_config_load(&c, config);
    free(config);
    TRY(read);
    json_t *eos = json_array();
    for (int i = 0; i < c.n_eos; i++) json_array_append_new(eos, json_integer(c.eos[i]));
    json_t *o = json_pack(
        "{s:s, s:I, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:b, s:s, s:f, s:o}", "architecture", c.family->type,
        "parameters", (json_int_t)model_config_params(&c), "dtype", dtype_name(c.dtype), "layers", (json_int_t)c.n_layers, "hidden",
        (json_int_t)c.hidden, "ffn", (json_int_t)c.ffn, "q_heads", (json_int_t)c.n_q_heads, "kv_heads", (json_int_t)c.n_kv_heads,
        "head_dim", (json_int_t)c.head_dim, "vocab", (json_int_t)c.vocab, "max_positions", (json_int_t)c.max_pos, "sliding_window",
        (json_int_t)c.window, "tied", (int)c.tied, "rope", model_rope_name(c.rope.kind), "rope_theta", c.rope.theta, "eos", eos);
    int rc = o ? json_dump_line(&line, o) : err_set(ERR_INTERNAL, __FILE__, __LINE__, "cannot print the model's shape");
    if (rc == 0) rc = cmd_print_line(line.p, line.n);
    buf_free(&line);
    json_decref(o);
    model_config_free(&c);
    return rc;
}

/* ---- export ---- */

/* A model directory as it is; a checkpoint's actor; the newest checkpoint of a run's directory; any of
 * them may be an adapter, which is then merged into its base model. */
struct export_source {
    char *model_dir;   /* of the base, with an adapter */
    char *ckpt_dir;    /* NULL: a plain directory */
    char *adapter_dir; /* NULL: no adapter */
    bool critic;       /* of ckpt_dir, its critic */
};

static bool is_adapter(const char *dir) {
    char *path = file_join(dir, "adapter_config.json");
    const bool yes = file_exists(path);
    free(path);
    return yes;
}

/* The base that an adapter names, where there is such a directory. */
static int find_base(const char *adapter, char **dir) {
    struct lora_config l;
    TRY(lora_config_load(&l, adapter));
    int rc = l.base ? run_model_dir(l.base, true, dir) : err_set(ERR_INPUT, __FILE__, __LINE__, "it names none");
    if (rc < 0) rc = err_wrap(rc, "the base model of adapter %s (verlc model merge --model BASE says another place)", adapter);
    lora_config_free(&l);
    return rc;
}

static int find_source(struct export_source *s, const char *path) {
    char *config = file_join(path, "config.json"), *manifest = file_join(path, "manifest.json");
    int rc = 0;
    if (is_adapter(path)) {
        s->adapter_dir = xstrdup(path);
    } else if (file_exists(config)) {
        s->model_dir = xstrdup(path);
    } else if (file_exists(manifest)) {
        s->ckpt_dir = xstrdup(path);
    } else if (file_is_dir(path)) {
        int64_t step = -1;
        TRYG(ckpt_find(path, &step, &s->ckpt_dir), out);
        if (step < 0) FAILG(out, ERR_INPUT, "%s: neither a model directory (config.json) nor a checkpoint", path);
        log_info("exporting %s", s->ckpt_dir);
    } else {
        FAILG(out, ERR_INPUT, "model directory %s does not exist", path);
    }
    if (s->ckpt_dir) {
        TRYG(ckpt_verify(s->ckpt_dir), out);
        s->model_dir = ckpt_part_dir(s->ckpt_dir, "actor");
        if (is_adapter(s->model_dir)) {
            s->adapter_dir = s->model_dir;
            s->model_dir = NULL;
        }
    }
    if (s->adapter_dir) TRYG(find_base(s->adapter_dir, &s->model_dir), out);
out:
    free(config);
    free(manifest);
    return rc;
}

/* Whether the adapter is a critic's, which makes a token classifier of its base. */
static int is_critics(const char *adapter, bool *yes) {
    struct lora_config l;
    *yes = false;
    if (!adapter) return 0;
    TRY(lora_config_load(&l, adapter));
    *yes = l.saves_head;
    lora_config_free(&l);
    return 0;
}

/* Whether the MTP layer is a part of the checkpoint's master: it was trained. */
static int trained_mtp(const struct export_source *s, bool *yes) {
    struct model_config c;
    int64_t n;
    TRY(model_config_load(&c, s->model_dir));
    int rc = 0;
    *yes = false;
    if (c.mtp_layers == 1 && !s->critic) {
        rc = ckpt_master_size(s->ckpt_dir, "actor", &n);
        c.mtp = true;
        *yes = rc == 0 && n == model_config_params(&c);
    }
    model_config_free(&c);
    return rc;
}

/* A checkpoint's fp32 master is more exact than its model files; it is used where fp32 is wanted. */
static int export_into(const char *dir, const struct export_source *s, int dt, int64_t shard_mb) {
    int rc = 0;
    struct dev dev = {0};
    struct model *m = NULL;
    struct tokenizer_files *tokenizer = NULL;
    bool critic;
    const bool master = s->ckpt_dir && !s->adapter_dir && dt == DT_F32;
    TRYG(dev_open_ref(&dev), out); /* no arithmetic: the plain layout is the quickest */
    bool mtp = false;
    if (master) TRYG(trained_mtp(s, &mtp), out);
    const struct model_open_args a = {
        .dir = s->model_dir, .act = DT_F32, .mtp = mtp, .flags = master ? MODEL_TRAIN : MODEL_INFER, .max_len = 1};
    TRYG(is_critics(s->adapter_dir, &critic), out);
    critic = critic || s->critic;
    TRYG(critic ? model_open_value(&m, &dev, &a, 0) : model_open(&m, &dev, &a), out);
    if (s->adapter_dir) TRYG(model_lora_load(m, s->adapter_dir), out);
    if (master) TRYG(ckpt_load_part(s->ckpt_dir, &(struct ckpt_part){.name = s->critic ? "critic" : "actor", .model = m}), out);
    TRYG(tokenizer_files_read(&tokenizer, s->model_dir), out);
    TRYG(model_export(m, dir,
                      &(struct model_export_args){.dt = dt, .tokenizer = tokenizer, .max_shard = (size_t)shard_mb * 1000000}),
         out);
out:
    model_close(m);
    dev_close(&dev);
    tokenizer_files_free(tokenizer);
    return rc;
}

static int out_write(const char *out, bool force, const struct export_source *s, int dt, int64_t shard_mb) {
    struct out_dir o;
    const int rc = out_open(&o, out, force);
    return out_close(&o, rc < 0 ? rc : export_into(o.tmp, s, dt, shard_mb));
}

static void free_source(struct export_source *s) {
    free(s->model_dir);
    free(s->ckpt_dir);
    free(s->adapter_dir);
}

static int cmd_model_export(int argc, char **argv) {
    const char *model = NULL, *out = NULL, *dtype = NULL;
    int64_t shard_mb = 5000;
    bool force = false;
    const struct cmd_opt opts[] = {
        {"--model", CMD_STR, &model, "DIR", "model directory, checkpoint, or a run's checkpoint directory"},
        {"--out", CMD_STR, &out, "DIR", "directory to create"},
        {"--dtype", CMD_STR, &dtype, "fp32|bf16|fp16", "of the weights (each tensor's own)"},
        {"--max-shard-mb", CMD_I64("int[1,2^40]"), &shard_mb, "N", "largest file, in 10^6 bytes (5000)"},
        {"--force", CMD_FLAG, &force, NULL, "replace a model that is there"},
    };
    const struct cmd_spec spec =
        CMD_SPEC(opts, "verlc model export --model DIR|CHECKPOINT --out DIR [options]", "Writes a Hugging Face model directory.");
    struct export_source s = {0};
    int dt = -1, rc = cmd_parse(&spec, argc, argv);
    if (rc != 0) return rc < 0 ? rc : 0;
    if (!model || !out) FAIL(ERR_INVAL, "%s is missing; usage: %s", model ? "--out" : "--model", spec.usage);
    if (dtype) TRY(cmd_file_dtype(dtype, &dt));
    rc = find_source(&s, model);
    if (rc == 0) rc = out_write(out, force, &s, dt, shard_mb);
    free_source(&s);
    return rc;
}

/* ---- merge ---- */

static bool is_pickle(const char *name) {
    const char *dot = strrchr(name, '.');
    return dot && (strcmp(dot, ".pt") == 0 || strcmp(dot, ".pth") == 0 || strcmp(dot, ".bin") == 0 || strcmp(dot, ".distcp") == 0);
}

/* Pickles of other trainers (Megatron's mp_rank_*, .distcp, pytorch_model.bin) run code when they are read by their own
 * programs; they are named and refused where there are no safetensors next to them. */
static int refuse_pickles(const char *path) {
    static const char *const subs[] = {"", "actor", "dist_ckpt"};
    char *one = file_join(path, "model.safetensors"), *index = file_join(path, "model.safetensors.index.json");
    const bool safe = file_exists(one) || file_exists(index);
    int rc = 0;
    for (size_t i = 0; i < sizeof subs / sizeof subs[0] && !safe && rc == 0; i++) {
        char *sub = i == 0 ? xstrdup(path) : file_join(path, subs[i]);
        DIR *d = opendir(sub);
        for (struct dirent *e; d && rc == 0 && (e = readdir(d));)
            if (is_pickle(e->d_name) || strncmp(e->d_name, "mp_rank_", 8) == 0)
                rc = err_set(ERR_UNSUPPORTED, __FILE__, __LINE__,
                             "%s/%s: unsupported pickled shards; merge takes verl's FSDP shards (model_world_size_W_rank_R.pt) and "
                             "Megatron's dist_ckpt, or a "
                             "directory with config.json and model.safetensors or model.safetensors.index.json with its shards",
                             sub, e->d_name);
        if (d) closedir(d);
        free(sub);
    }
    free(one);
    free(index);
    return rc;
}

/* Whether --model is a checkpoint of verl's ranks, without safetensors that say the same. */
static bool is_shards(const char *model) {
    char *config = file_join(model, "model.safetensors"), *index = file_join(model, "model.safetensors.index.json");
    char *shards = file_exists(config) || file_exists(index) ? NULL : shards_find_dir(model);
    const bool yes = shards != NULL;
    free(config);
    free(index);
    free(shards);
    return yes;
}

static int merge_source(struct export_source *s, const char *model, const char *adapter) {
    if (!adapter) {
        TRY(refuse_pickles(model));
        return find_source(s, model);
    }
    if (!is_adapter(adapter)) FAIL(ERR_INPUT, "--adapter %s: no adapter_config.json in it", adapter);
    s->adapter_dir = xstrdup(adapter);
    return model ? run_model_dir(model, true, &s->model_dir) : find_base(adapter, &s->model_dir);
}

static int cmd_model_merge(int argc, char **argv) {
    const char *model = NULL, *adapter = NULL, *out = NULL, *dtype = NULL;
    int64_t shard_mb = 0; /* not given */
    bool force = false;
    const struct cmd_opt opts[] = {
        {"--model", CMD_STR, &model, "DIR", "base model (the one that the adapter names), or shards"},
        {"--adapter", CMD_STR, &adapter, "DIR", "peft adapter directory"},
        {"--out", CMD_STR, &out, "DIR", "directory to create"},
        {"--dtype", CMD_STR, &dtype, "fp32|bf16|fp16", "of the weights (each tensor's own)"},
        {"--max-shard-mb", CMD_I64("int[1,2^40]"), &shard_mb, "N",
         "largest file, in 10^6 bytes (5000 with an adapter; else one file)"},
        {"--force", CMD_FLAG, &force, NULL, "replace a model that is there"},
    };
    const struct cmd_spec spec =
        CMD_SPEC(opts, "verlc model merge ([--model BASE] --adapter DIR | --model DIR) --out DIR [options]",
                 "Writes the base model with an adapter merged into its weights: W + scale B A in f32,\n"
                 "rounded once. Without an adapter: sharded safetensors as one file, or a checkpoint of\n"
                 "verl's FSDP shards (model_world_size_W_rank_R.pt) or Megatron's (dist_ckpt) as a model\n"
                 "directory.");
    struct export_source s = {0};
    int dt = -1, rc = cmd_parse(&spec, argc, argv);
    if (rc != 0) return rc < 0 ? rc : 0;
    if ((!adapter && !model) || !out)
        FAIL(ERR_INVAL, "%s is missing; usage: %s", adapter || model ? "--out" : "--adapter or --model", spec.usage);
    if (dtype) TRY(cmd_file_dtype(dtype, &dt));
    if (!adapter && is_shards(model))
        return cmd_merge_shards(
            &(struct cmd_merge_args){.dir = model, .out = out, .dt = dt, .shard_mb = shard_mb ? shard_mb : 5000, .force = force});
    if (shard_mb == 0) shard_mb = adapter ? 5000 : ONE_FILE_MB;
    rc = merge_source(&s, model, adapter);
    if (rc == 0) rc = out_write(out, force, &s, dt, shard_mb);
    free_source(&s);
    return rc;
}

/* ---- model_merger on what is merged already ---- */

static bool is_model(const char *dir) {
    char *config = file_join(dir, "config.json"), *one = file_join(dir, "model.safetensors");
    char *index = file_join(dir, "model.safetensors.index.json");
    const bool yes = is_adapter(dir) || (file_exists(config) && (file_exists(one) || file_exists(index)));
    free(config);
    free(one);
    free(index);
    return yes;
}

char *cmd_merged_model(const char *dir) {
    char *actor = file_join(dir, "actor"), *saved = shards_saved_model(dir);
    char *const found[] = {xstrdup(dir), actor, saved};
    char *model = NULL;
    for (size_t i = 0; i < sizeof found / sizeof *found; i++) {
        if (!model && found[i] && is_model(found[i])) model = found[i];
        else free(found[i]);
    }
    return model;
}

/* Where dir is a part of a checkpoint of verlc's: that checkpoint, verified. */
static int find_checkpoint(struct export_source *s, const char *dir) {
    char *at = realpath(dir, NULL), *slash = at ? strrchr(at, '/') : NULL;
    int rc = 0;
    if (slash && slash != at && (strcmp(slash, "/actor") == 0 || strcmp(slash, "/critic") == 0)) {
        s->critic = strcmp(slash, "/critic") == 0;
        *slash = '\0';
        if (ckpt_is_ours(at)) {
            s->ckpt_dir = at;
            at = NULL;
            rc = ckpt_verify(s->ckpt_dir);
        }
    }
    free(at);
    return rc;
}

static int copy_adapter(const char *from, const char *to) {
    static const char *const names[] = {"adapter_config.json", "adapter_model.safetensors"};
    TRY(file_mkdirs(to));
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        struct buf b = {0};
        char *source, *target = file_join(to, names[i]);
        int rc = file_in_dir(&source, from, names[i]);
        if (rc == 0 && !source) rc = err_set(ERR_INPUT, __FILE__, __LINE__, "%s: no %s in it", from, names[i]);
        if (rc == 0) rc = file_read(&b, source, 0);
        if (rc == 0) rc = file_write_atomic(target, b.p, b.n);
        buf_free(&b);
        free(source);
        free(target);
        TRY(rc);
    }
    return file_fsync_dir(to);
}

struct merged {
    struct export_source of;
    const struct cmd_merge_args *a;
    const char *adapter; /* NULL: a whole model */
};

static int write_merged(void *arg, const char *dir) {
    const struct merged *m = arg;
    TRY(export_into(dir, &m->of, m->a->dt, m->a->shard_mb));
    if (!m->adapter) return 0;
    char *to = file_join(dir, "lora_adapter");
    const int rc = copy_adapter(m->adapter, to);
    free(to);
    return rc;
}

int cmd_copy_merged(const struct cmd_merge_args *a) {
    struct merged m = {.a = a, .adapter = is_adapter(a->dir) ? a->dir : NULL};
    int rc = 0;
    TRYG(find_checkpoint(&m.of, a->dir), out);
    if (m.adapter) { /* verl's merger writes the base model, and the adapter next to it */
        free(m.of.ckpt_dir);
        m.of.ckpt_dir = NULL;
        m.of.critic = false;
        TRYG(a->config_dir ? run_model_dir(a->config_dir, true, &m.of.model_dir) : find_base(m.adapter, &m.of.model_dir), out);
    } else {
        m.of.model_dir = xstrdup(a->dir);
    }
    TRYG(cmd_write_dir(a->out, a->force, write_merged, &m), out);
    if (m.adapter)
        log_note("%s is an adapter of %s and nothing is to be merged: %s has the base model, and the adapter in lora_adapter",
                 a->dir, m.of.model_dir, a->out);
    else
        log_note("%s is a Hugging Face model directory and nothing is to be merged: %s is a copy, weights as %s", a->dir, a->out,
                 a->dt < 0 ? "they are" : dtype_name((enum dtype)a->dt));
out:
    free_source(&m.of);
    return rc;
}

/* ---- the command ---- */

int cmd_model(int argc, char **argv) {
    static const struct {
        const char *name;
        int (*run)(int argc, char **argv);
    } subs[] = {{"init", cmd_model_init}, {"info", cmd_model_info}, {"export", cmd_model_export}, {"merge", cmd_model_merge}};
    static const char usage[] = "usage: verlc model init|info|export|merge [options]; each takes --help";
    if (argc >= 2 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) {
        puts(usage);
        return 0;
    }
    for (size_t i = 0; argc >= 2 && i < sizeof subs / sizeof subs[0]; i++)
        if (strcmp(argv[1], subs[i].name) == 0) return subs[i].run(argc - 1, argv + 1);
    char *near = argc >= 2 ? str_near("info init export merge", argv[1]) : NULL;
    const int rc = argc < 2 ? err_set(ERR_INVAL, __FILE__, __LINE__, "%s", usage)
                            : err_set(ERR_INVAL, __FILE__, __LINE__, "there is no 'model %s'%s%s%s %s", argv[1],
                                      near ? ": did you mean '" : "", near ? near : "", near ? "'?" : ";", usage);
    free(near);
    return rc;
}
