/* data.c - `verlc data gsm8k|arith`: options to the preparation functions of
 * data/, and one line of JSON on stdout that says what was written where. */
#include "base/err.h"
#include "base/log.h"
#include "cmd/cmd.h"
#include "data/data.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void print_result(json_t *v) {
    char *text = json_dumps(v, JSON_COMPACT);
    if (text) puts(text);
    free(text);
    json_decref(v);
}

static int data_gsm8k(int argc, char **argv) {
    const char *source = NULL, *save = "~/data/gsm8k", *old = NULL, *hdfs = NULL;
    bool agent = false;
    const struct cmd_opt opts[] = {
        {"--local_dataset_path", CMD_STR, &source, "DIR",
         "raw JSONL or a hub snapshot on disk (default: openai/gsm8k from the hub)"},
        {"--local_save_dir", CMD_STR, &save, "DIR", "where train.parquet and test.parquet go (default ~/data/gsm8k)"},
        {"--local_dir", CMD_STR, &old, "DIR", "deprecated name of --local_save_dir"},
        {"--hdfs_dir", CMD_STR, &hdfs, "DIR", "copied there as well (hdfs://... through the hdfs client)"},
        {"--agent", CMD_FLAG, &agent, NULL,
         "rows of a tool_agent with verl's tool calc_gsm8k_reward, as gsm8k_tool_agent_loop.py has them"},
    };
    const struct cmd_spec spec =
        CMD_SPEC(opts, "verlc data gsm8k [--local_dataset_path DIR] [--local_save_dir DIR] [--hdfs_dir DIR] [--agent]",
                 "GSM8K as verl's Parquet rows, with the options of verl's examples/data_preprocess/gsm8k.py.");
    const int rc = cmd_parse(&spec, argc, argv);
    if (rc != 0) return rc < 0 ? rc : 0;
    if (old) log_warn("argument 'local_dir' is deprecated; use 'local_save_dir' instead");
    struct data_gsm8k_args a = {.source = source, .save_dir = old ? old : save, .hdfs_dir = hdfs, .agent = agent};
    TRY(data_make_gsm8k(&a));
    print_result(json_pack("{s:s, s:I, s:I}", "dir", a.save_dir, "train", (json_int_t)a.n_train, "test", (json_int_t)a.n_test));
    return 0;
}

static int data_arith(int argc, char **argv) {
    const char *out = NULL, *format = "both";
    int64_t n_train = 4096, n_test = 256, n_sft = -1, seed = 1, level = 2;
    double sft_marked = 1;
    const struct cmd_opt opts[] = {
        {"--out", CMD_STR, &out, "DIR", "train, test, sft_train and sft_test go here"},
        {"--n-train", CMD_I64("int[1,2^24]"), &n_train, "N", "RL training rows (default 4096)"},
        {"--n-test", CMD_I64("int[1,2^24]"), &n_test, "N", "test rows (default 256)"},
        {"--n-sft", CMD_I64("int[1,2^24]"), &n_sft, "N", "SFT training rows (default: as many as --n-train)"},
        {"--seed", CMD_I64(CMD_SEED), &seed, "S", "same seed, same files (default 1)"},
        {"--level", CMD_I64("int[1,3]"), &level, "1|2|3", "1: one step, 2: one or two (default), 3: two, larger numbers"},
        {"--sft-marked", CMD_F64("float[0,1]"), &sft_marked, "X", "share of SFT answers that end with #### N (default 1)"},
        {"--format", CMD_STR, &format, "F", "jsonl, parquet or both (default)"},
    };
    const struct cmd_spec spec =
        CMD_SPEC(opts, "verlc data arith --out DIR [--n-train N] [--n-test N] [--seed S] [--level L]",
                 "Seeded arithmetic word problems in GSM8K's answer format, for RL (verl's rows) and SFT.");
    const int rc = cmd_parse(&spec, argc, argv);
    if (rc != 0) return rc < 0 ? rc : 0;
    if (!out) FAIL(ERR_INVAL, "--out DIR is needed; usage: %s", spec.usage);
    const bool both = strcmp(format, "both") == 0;
    struct data_arith_args a = {
        .out_dir = out,
        .n_train = n_train,
        .n_test = n_test,
        .n_sft = n_sft < 0 ? n_train : n_sft,
        .seed = (uint64_t)seed,
        .level = (int)level,
        .sft_marked = sft_marked,
        .jsonl = both || strcmp(format, "jsonl") == 0,
        .parquet = both || strcmp(format, "parquet") == 0,
    };
    if (!a.jsonl && !a.parquet) FAIL(ERR_INVAL, "--format %s: choose jsonl, parquet or both", format);
    TRY(data_make_arith(&a));
    print_result(json_pack("{s:s, s:I, s:I, s:I}", "dir", out, "train", (json_int_t)n_train, "test", (json_int_t)n_test,
                           "sft_train", (json_int_t)a.n_sft));
    return 0;
}

int cmd_data(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : NULL;
    if (what && strcmp(what, "gsm8k") == 0) return data_gsm8k(argc - 1, argv + 1);
    if (what && strcmp(what, "arith") == 0) return data_arith(argc - 1, argv + 1);
    if (what && (strcmp(what, "--help") == 0 || strcmp(what, "-h") == 0)) {
        printf("usage: verlc data NAME [options]\n\n"
               "  gsm8k   GSM8K as verl's Parquet rows\n"
               "  arith   seeded arithmetic word problems, for RL and SFT\n\n"
               "'verlc data NAME --help' lists the options.\n");
        return 0;
    }
    if (what)
        FAIL(ERR_INVAL,
             "verlc data knows no dataset '%s'; it makes gsm8k and arith. Others are rows of your own (README.md, \"Your own "
             "model and data\")",
             what);
    FAIL(ERR_INVAL, "usage: verlc data gsm8k|arith [options]");
}
