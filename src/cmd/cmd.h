/* cmd.h - the commands, and one option parser for those that are not verl's.
 *
 * A command is int cmd_NAME(argc, argv) with argv[0] its own name; it returns a
 * negative ERR_* code (main prints err_msg and exits with err_exit_status), or
 * the exit status.  Only main.c calls exit.  Results go to stdout, everything
 * else to stderr.  ppo, sft and plan take verl's Hydra overrides
 * (conf/conf.h) and do not use this parser. */
#ifndef VERLC_CMD_H
#define VERLC_CMD_H

#include "device/device.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

/* name, one-line help; the order is that of `verlc --help` */
#define CMD_MAP(X)                                                                                      \
    X(ppo, "train with PPO, GRPO and related algorithms: verl.trainer.main_ppo's command line")         \
    X(sft, "supervised fine-tuning: verl's sft_trainer command line")                                   \
    X(generate, "sample from a model: JSONL in and out, or verl's main_generation keys")                \
    X(serve, "a model behind OpenAI's and Anthropic's HTTP interfaces")                                 \
    X(eval, "score the responses in a file: verl's main_eval command line")                             \
    X(exec, "run a launcher of verl as it stands: bash run.sh, torchrun, uv run, ray job submit")       \
    X(data, "prepare datasets: gsm8k, arith")                                                           \
    X(model, "model directories: init, info, export, merge")                                            \
    X(model_merger, "verl's FSDP and Megatron checkpoints as models: verl.model_merger's command line") \
    X(tokenize, "text to ids and back: JSONL in, JSONL out")                                            \
    X(score, "log-probs and entropies of token ids: JSONL in, JSONL out")                               \
    X(algo, "advantages, losses, KL, rewards: JSONL in, JSONL out")                                     \
    X(sandbox, "run a program that is not trusted, with limits; what happened as JSON")                 \
    X(plan, "memory and time of a ppo or sft run before it starts")                                     \
    X(show, "a run in the terminal: plots, a step, a sample with its tokens coloured")                  \
    X(grep, "search the prompts and responses of a run")                                                \
    X(status, "what a run does now, or how it ended")                                                   \
    X(note, "notes and tags of a run, which the page shows")                                            \
    X(view, "a run in the browser: curves, samples, rewards; live")                                     \
    X(trackers, "what a run has not sent to MLflow, W&B and others; sync sends it")                     \
    X(explain, "what a metric or a key is and how to read it")                                          \
    X(bench, "benchmarks of this machine")                                                              \
    X(netcheck, "what the links between ranks give: latency, bandwidth, slow ones by name")             \
    X(worker, "one rank of a run; verlc starts it itself")                                              \
    X(selftest, "compare a device with the reference backend, op by op")

#define X(name, help) int cmd_##name(int argc, char **argv);
CMD_MAP(X)
#undef X

/* Reports to the `verlc exec` around this process, if there is one, that something of verl has been started (exec.c). */
void cmd_exec_tell(void);

/* ---- the table of them (commands.c) ---- */
struct command {
    const char *name, *help;
    int (*run)(int argc, char **argv);
};
const struct command *command_find(const char *name); /* NULL: none */
const struct command *command_list(int *n);
void command_print_all(FILE *f); /* what `verlc --help` says */
/* argv[1] is the command, help or --version; argc >= 2. ERR_INVAL: there is none of that name; says what may be meant. */
int command_run(int argc, char **argv);
/* What may stand for the last of the words of a command line, a line each: share/ has the shells' part. argv: __complete WORD...,
 * the first word behind `verlc`. */
int cmd_complete(int argc, char **argv);

/* verlc generate with key=value arguments: main_generation. */
int cmd_generate_rows(int argc, char **argv);

/* ---- of the commands with verl's keys (train.c) ---- */
struct conf;
/* The checked configuration of a command line (what follows the command's name); 1: it was a question (--help, --cfg) and is
 * answered. The caller frees *c after an error too. */
int cmd_load(struct conf **c, const char *schema, int argc, char **argv);
/* ERR_INVAL: the key of the model is not set, and verl's default for it is no directory of this machine. */
int cmd_want_model(const struct conf *c, const char *command, const char *key);
int cmd_ended(int rc); /* ERR_SIGNAL becomes 128 + signal, as the shell counts, and is reported */
/* The engine's keys, unless --config-name says sft_trainer or a legacy key is used. */
const char *cmd_sft_schema(int argc, char **argv);
/* The schema of the program whose keys these are: one of verl's two generation programs. ERR_INVAL: keys of both. */
int cmd_generation_schema(int argc, char **argv, const char **schema);

struct cmd_opt {
    const char *name; /* "--model" */
    enum { CMD_IS_STR, CMD_IS_I64, CMD_IS_F64, CMD_IS_FLAG } type;
    const char *range; /* of a number: a type of the tables of keys, "int[1,2^24]" */
    void *out;         /* const char **, int64_t *, double * or bool *; keeps its value when absent */
    const char *arg;   /* "DIR"; NULL for a flag */
    const char *help;
};
/* type and range of a row: no number is without one */
#define CMD_STR CMD_IS_STR, NULL
#define CMD_FLAG CMD_IS_FLAG, NULL
#define CMD_I64(range) CMD_IS_I64, range
#define CMD_F64(range) CMD_IS_F64, range
struct cmd_spec {
    const char *usage; /* "verlc score --model DIR [options] < in.jsonl" */
    const char *about; /* a paragraph, may be NULL */
    const struct cmd_opt *opts;
    int n_opts;
    /* operands (arguments without --) go here; NULL: none allowed */
    const char **operands;
    int max_operands;
    int *n_operands;
};
/* Of a command without operands; opts is an array. */
#define CMD_SPEC(options, usage_line, paragraph) \
    { .usage = (usage_line), .about = (paragraph), .opts = (options), .n_opts = sizeof(options) / sizeof *(options) }
/* --name VALUE and --name=VALUE. 0: go on. 1: --help was printed, return 0 from
 * the command. ERR_INVAL: unknown option (with the nearest one), bad value. */
int cmd_parse(const struct cmd_spec *s, int argc, char **argv);

/* Said where the command waits for a person: its standard input is a terminal. what: "requests, a JSON object a line". */
void cmd_reads_stdin(const char *what);

/* Results: a line (n bytes without the newline) to standard output, and what is buffered of them. ERR_IO: it could not be
 * written; the command ends then. */
int cmd_print_line(const char *line, size_t n);
int cmd_flush(void);
/* The last such failure was a reader that has closed its end: nothing to report. */
bool cmd_reader_closed(void);

/* Makes the directory `out` complete or not at all: write fills a temporary one next to it. force: as --force of the
 * model commands. ERR_INVAL: out holds something that is not to be replaced. */
int cmd_write_dir(const char *out, bool force, int (*write)(void *arg, const char *dir), void *arg);
/* The files of verl's ranks in dir, FSDP's or Megatron's, as a model directory. */
struct cmd_merge_args {
    const char *dir, *out;
    const char *config_dir; /* NULL: next to the shards */
    int dt;                 /* -1: each tensor's own */
    int64_t shard_mb;
    const char *backend; /* "fsdp", "megatron"; NULL: whatever dir holds */
    bool no_head, value; /* Megatron's: --tie-word-embedding, --is-value-model */
    bool force;
};
int cmd_merge_shards(const struct cmd_merge_args *a);
/* What needs no merging: dir or its actor/ where that is a Hugging Face model or a peft adapter, as in a checkpoint of verlc's, or
 * its model/huggingface/, as Megatron runs of verl with mbridge have it. NULL: none. Caller frees. */
char *cmd_merged_model(const char *dir);
/* Such a directory (a->dir) as verl.model_merger would leave it: the model, or an adapter's base (a->config_dir, else the one that
 * it names) with lora_adapter/. A checkpoint is verified first. */
int cmd_copy_merged(const struct cmd_merge_args *a);

/* The dtype of weights in files that --dtype names: fp32, bf16 or fp16. ERR_INVAL: another one. */
int cmd_file_dtype(const char *name, int *dt);
/* The memory of a GPU that --gpu names: H100, A100-40GB, 4090, a number of GB (24), or bytes with a unit. ERR_INVAL: neither, or a
 * name that two cards have. */
int cmd_gpu_bytes(const char *option, const char *value, int64_t *bytes);
/* The compute dtype that --dtype names: bf16 or fp32. ERR_INVAL: another one. */
int cmd_compute_dtype(const char *name, enum dtype *dt);
/* ERR_INVAL: more tokens than any machine's memory holds. seqs, prompt, len: --batch, --prompt, --len, CMD_COUNT each. */
int cmd_batch_size(int64_t seqs, int64_t prompt, int64_t len);

/* Types of numbers that several commands take. */
#define CMD_COUNT "int[1,2^28]"
#define CMD_SEED "int[-2^63,2^63)"
#define CMD_THREADS "int[0,256]"
#define CMD_DRAFT "int[0,8]"

/* Of the option --device of the commands that compute. */
#define CMD_DEVICE_HELP "auto, cpu, cuda, cuda:N or ref (auto: a GPU if there is one)"

#endif
