/* data.h - from dataset files to batches, on the host.
 *
 * Four things, bottom up: `struct batch`, the named columns over samples that
 * the trainer moves between stages (verl's DataProto); rows in and out of
 * Parquet, JSON and JSONL; the RL and SFT datasets with their sampler; and the
 * preparation of datasets (GSM8K, arithmetic, a tiny tokenizer).
 *
 * Invariants: every column of a batch has one entry per row; the order of
 * training rows is a pure function of (seed, epoch); a message about bad data
 * names the file and the row or column. */
#ifndef VERLC_DATA_H
#define VERLC_DATA_H

#include "base/err.h"

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tokenizer;     /* text/text.h */
struct chat_template; /* text/text.h */

/* ---------------------------------------------------------------- batch -- */

enum batch_type { BATCH_I32, BATCH_I64, BATCH_F32, BATCH_F64, BATCH_STR, BATCH_JSON };

/* One column: row r holds the elements off[r] .. off[r+1] of the array that
 * `type` selects.  A scalar column has one element in every row.  A string may hold NUL: its
 * length is stored with it (batch_set_str keeps the two together). */
struct batch_col {
    char *name;
    enum batch_type type;
    int64_t *off;    /* n_rows + 1 */
    size_t *str_len; /* BATCH_STR: bytes of each; else NULL */
    union {
        void *p;
        int32_t *i32;
        int64_t *i64;
        float *f32;
        double *f64;
        char **str;    /* each owned; never NULL; a NUL follows its str_len bytes */
        json_t **json; /* each owned; never NULL */
    };
};
struct batch {
    int64_t n_rows;
    int n_cols, cap_cols;
    struct batch_col *cols;
};
static inline int64_t batch_len(const struct batch_col *c, int64_t row) { return c->off[row + 1] - c->off[row]; }

void batch_init(struct batch *b, int64_t n_rows);
void batch_free(struct batch *b); /* a zeroed struct is fine */

/* A new column, filled from `data` (copied; JSON values get a reference; strings have none).
 * lens == NULL: one element a row.
 * data == NULL: zeros, "" or null, to be written in place through *out (out may be NULL; valid until the next
 * column is added or removed).  ERR_INTERNAL if the name is taken. */
int batch_add(struct batch *b, const char *name, enum batch_type type, const int64_t *lens, const void *data,
              struct batch_col **out);
/* Element i of a string column becomes the n bytes at s (copied). */
void batch_set_str(struct batch_col *c, int64_t i, const char *s, size_t n);
/* ERR_INTERNAL naming the column if it is absent or of another type. */
int batch_get(const struct batch *b, const char *name, enum batch_type type, struct batch_col **out);
struct batch_col *batch_find(const struct batch *b, const char *name); /* NULL if absent */
void batch_drop(struct batch *b, const char *name);                    /* no such column: nothing happens */

/* A column goes to another batch of as many rows, where it replaces the one of its name. No such column: nothing happens. */
void batch_move(struct batch *to, struct batch *from, const char *name);

/* New batches are deep copies; `out` is written only on success. */
int batch_select(struct batch *out, const struct batch *b, const int64_t *rows, int64_t n);
/* times each row, aabb: the n samples of a prompt side by side. */
int batch_repeat(struct batch *out, const struct batch *b, int64_t times);
size_t batch_type_bytes(enum batch_type t); /* of an element; of strings and JSON the pointer */
/* Columns and types must agree. */
int batch_concat(struct batch *out, const struct batch *const *parts, int64_t n);

/* A response is a row of segments: tokens that the policy wrote, which are trained, and tokens that an environment or a tool wrote:
 * they have log-prob 0 and are in no loss, entropy or KL. A batch with such tokens has the column BATCH_SEGMENTS (i32, ragged):
 * (tokens, kind) of each segment, in order. Without the column each response is one segment of the policy. */
#define BATCH_SEGMENTS "segments"
enum segment_kind { SEGMENT_POLICY, SEGMENT_ENVIRONMENT };
struct segment {
    enum segment_kind kind;
    int64_t begin, n; /* tokens of the row's response */
};
int64_t batch_n_segments(const struct batch *b, int64_t row);
struct segment batch_segment(const struct batch *b, int64_t row, int64_t k); /* 0 <= k < batch_n_segments */
/* An episode may give several samples (its context rewritten, sub-agents): a batch with such episodes has the column BATCH_SESSION
 * (i64): rows of one number are the outputs of one episode, in order. Rows of a session are neighbours; the last one is scored, and
 * its score is that of all. Without the column each row is an episode. */
#define BATCH_SESSION "session"
/* The record of an episode with tools, of which BATCH_SEGMENTS has the tokens: a column of JSON objects,
 *   {"turns": verl's num_turns, "end": "stop|length|max_assistant_turns|max_user_turns|refused|error|timeout", "reason": text or
 *    absent, "malformed": n, "dropped": n (calls beyond max_parallel_calls), "calls": [{"segment": which of the row's segments
 *    called, "name", "arguments" (JSON text), "result" (text as appended), "status": "ok|unknown|arguments|error|timeout",
 *    "seconds": x, "reward": x or absent, "truncated": bool}]}; null: a row without tools. */
#define BATCH_EPISODE "episode"
/* verl's response_mask: 1 for a token that the policy wrote, else 0; (tokens of responses). */
void batch_policy_mask(const struct batch *b, uint8_t *mask);

/* A batch as JSON, new reference, and back: the same bits. without: columns that are left out, NULL-terminated; NULL: none.
 * ERR_FORMAT: v is no such batch; `where` is in front of the message. */
json_t *batch_json(const struct batch *b, const char *const *without);
int batch_of_json(struct batch *out, const json_t *v, const char *where);

/* ----------------------------------------------------------------- rows -- */

/* Every row of a .parquet, .json (array of objects or JSONL) or .jsonl file as
 * an array of objects; files of other stores are fetched (data_remote_fetch).  required: NULL-terminated
 * names of columns that must exist, may be NULL.  ERR_INPUT, ERR_FORMAT. */
int data_read_rows(json_t **rows, const char *path, const char *const *required);
/* By the ending of path: .parquet (column types from `schema`, see python/verlc_helpers/parquet.py;
 * NULL: inferred) or .jsonl.  Atomic. */
int data_write_rows(const char *path, const json_t *rows, const json_t *schema);

/* -------------------------------------------------------------- sampler -- */

enum data_order {
    DATA_SEQUENTIAL, /* file order */
    DATA_SHUFFLE,    /* every row once an epoch, a new order each */
    DATA_WEIGHTED,   /* batches of distinct rows, each drawn with a chance in proportion to its weight */
    DATA_CURRICULUM, /* every row once, by ascending key; equal keys in a new order each epoch */
};
/* data.sampler.*: which order, and what the key of a row is. Strings and JSON are borrowed. */
struct data_sampler_spec {
    enum data_order order;
    const char *column;     /* path of a number in a row, "extra_info.level"; weighted, curriculum */
    const json_t *weights;  /* weighted: {data source: weight} instead; 1 where a source is not named */
    const char *source_key; /* column of the data source */
    bool descending;        /* curriculum: the largest key first */
};
/* ERR_INVAL: no column (or weights) where one is needed. */
int data_sampler_spec_check(const struct data_sampler_spec *s);
/* The key of a row; ERR_INPUT names the column. Not for orders that need none. */
int data_sampler_key(const struct data_sampler_spec *s, const json_t *row, double *key);

struct data_sampler_args {
    int64_t n_rows, batch_size;
    bool drop_last;
    uint64_t seed;
    enum data_order order;
    const double *keys; /* (n_rows): weights or places, copied; NULL for the other orders */
};
/* The cursor (epoch, index) says how many rows of which epoch have been drawn;
 * the order of an epoch (the draw of a batch) depends on seed, epoch (and index) alone. */
struct data_sampler {
    struct data_sampler_args a;
    int64_t epoch, index;
    int64_t *order;      /* of order_epoch; weighted: of the batch drawn last */
    int64_t order_epoch; /* -1: none yet */
    double *keys;        /* (n_rows) or NULL */
};
/* ERR_INVAL when drop_last leaves no batch at all, or fewer rows than a batch have a weight above 0. */
int data_sampler_init(struct data_sampler *s, const struct data_sampler_args *a);
void data_sampler_free(struct data_sampler *s);
int64_t data_sampler_batches(const struct data_sampler *s); /* in one epoch */
/* 1: *rows (borrowed until the next call) has *n row numbers. 0: the epoch is over; the cursor
 * stands at the start of the next one. */
int data_sampler_next(struct data_sampler *s, const int64_t **rows, int64_t *n);
/* One row, going over to the next epoch where this one has none left. */
int64_t data_sampler_take(struct data_sampler *s);
json_t *data_sampler_state(const struct data_sampler *s); /* new reference */
/* ERR_INPUT when the state belongs to other data, another order or other keys. */
int data_sampler_restore(struct data_sampler *s, const json_t *state, const char *where);

/* ----------------------------------------------------------- RL dataset -- */

enum data_truncation { DATA_TRUNC_ERROR, DATA_TRUNC_LEFT, DATA_TRUNC_RIGHT, DATA_TRUNC_MIDDLE };
/* Cuts ids to max: left keeps the end, right the beginning, middle both ends
 * (max / 2 first, the rest last, as verl's postprocess_data). New length; ERR_INPUT under DATA_TRUNC_ERROR.
 */
int64_t data_truncate(int32_t *ids, int64_t n, int64_t max, enum data_truncation how);

/* A class of the user's that gives the rows (verl's data.custom_cls), in a Python helper. Borrowed. */
struct data_class {
    const char *path, *name; /* a Python file, or pkg://module; path NULL: there is none */
    const char *tokenizer_dir;
    const json_t *config; /* the group data of the run's configuration */
};
struct rl_dataset_args {
    const char *const *files;
    int64_t n_files;
    struct data_class cls;     /* gets the files' names; max_samples is its own to keep then */
    const char *prompt_key;    /* NULL: "prompt" */
    const char *reward_fn_key; /* NULL: "data_source" */
    bool own_scorer;           /* of the user's own, in Python: rows need neither reward_fn_key ("custom" then) nor reward_model */
    const struct tokenizer *tok;
    struct chat_template *chat;
    const json_t *chat_kwargs; /* data.apply_chat_template_kwargs; may be NULL */
    int64_t max_prompt_length;
    bool filter_overlong_prompts;
    enum data_truncation truncation;
    int64_t max_samples; /* <= 0: all */
    bool shuffle;        /* max_samples takes a random subset instead of the head */
    uint64_t seed;
    const char *what;                        /* "data.train_files", for messages */
    const struct data_sampler_spec *sampler; /* NULL: no keys */
    /* The schemas of the tools that a row's prompt is rendered with, new reference; *out NULL: none. NULL: no row has tools. */
    int (*tools)(void *arg, const json_t *row, json_t **out);
    void *tools_arg;
};
struct rl_prompt {
    int32_t *ids; /* the rendered prompt, ready to generate from */
    int64_t n_ids;
    int64_t uid; /* row number in the concatenated files, before caps and filters */
    json_t *row; /* every column as read, but for a prompt that was text and a data source that was missing */
};
struct rl_dataset {
    struct rl_prompt *prompts;
    int64_t n;
    int64_t n_rows;     /* in the files */
    int64_t n_filtered; /* dropped as too long */
    char *prompt_key, *reward_fn_key;
    double *keys; /* (n) of the sampler, NULL where it needs none */
};
/* Reads, caps, renders and tokenises each prompt once, filters, truncates.
 * ERR_INPUT: missing column, prompt over the limit, nothing left. */
int rl_dataset_open(struct rl_dataset **out, const struct rl_dataset_args *a);
void rl_dataset_close(struct rl_dataset *d);
/* Rows as a batch: prompts (i32 ragged), uid (i64), data_source (string: the column reward_fn_key), raw_prompt (JSON: the
 * messages), and row (JSON: all columns of the data as read). The data's names are within row, so that none of them can meet
 * the name of a column that a stage adds. */
int rl_dataset_batch(const struct rl_dataset *d, const int64_t *idx, int64_t n, struct batch *out);

/* ---------------------------------------------------------- SFT dataset -- */

struct sft_dataset_args {
    const char *const *files;
    int64_t n_files;
    /* prompt/response rows: used when messages_key is NULL */
    const char *prompt_key, *response_key;                           /* NULL: "prompt", "response" */
    const char *const *prompt_dict_keys, *const *response_dict_keys; /* row[prompt_key][k0][k1]... */
    int64_t n_prompt_dict_keys, n_response_dict_keys;
    /* multi-turn rows; with "messages" also rows of prompt and completion (or response), and ShareGPT's conversations */
    const char *messages_key;
    const char *tools_key, *enable_thinking_key; /* NULL: "tools", "enable_thinking" */
    bool ignore_input_ids_mismatch;
    const struct tokenizer *tok;
    struct chat_template *chat;
    const json_t *chat_kwargs;
    int64_t max_length;
    enum data_truncation truncation; /* error, left, right */
    int64_t max_samples;
    bool shuffle;
    uint64_t seed;
    const char *what;
    const struct data_sampler_spec *sampler; /* NULL: no keys */
};
/* loss_mask[t] is 1 where token t is a target, that is where log p(ids[t] | ids[<t])
 * counts; never at t = 0.  verl's SFTDataset stores the same set one place earlier (the predicting position).
 */
struct sft_sample {
    int32_t *ids;
    uint8_t *loss_mask;
    int64_t n;
};
struct sft_dataset {
    struct sft_sample *samples;
    int64_t n;
    double *keys; /* (n) of the sampler, NULL where it needs none */
};
int sft_dataset_open(struct sft_dataset **out, const struct sft_dataset_args *a);
void sft_dataset_close(struct sft_dataset *d);

/* ------------------------------------------------------------------ hub -- */

/* "user/name", not a path that someone wrote out. */
bool data_hub_id(const char *s);
enum data_hub_what {
    DATA_HUB_MODEL,  /* configuration, tokenizer, safetensors */
    DATA_HUB_CONFIG, /* configuration and tokenizer alone */
    DATA_HUB_DATASET /* the files under a folder */
};
/* The directory of a model or dataset of the Hugging Face hub: the snapshot in Hugging Face's cache (HF_HUB_CACHE, HF_HOME,
 * ~/.cache/huggingface) where it is whole, else downloaded there, with progress on stderr. HF_ENDPOINT, HF_TOKEN and
 * HF_HUB_OFFLINE count. folder: of a dataset; else NULL. Caller frees *dir.
 * ERR_INPUT: not there, no access, offline, damaged on the way; ERR_IO: no room; ERR_TIMEOUT: nothing came for minutes. */
int data_hub_fetch(enum data_hub_what what, const char *id, const char *folder, char **dir);

/* --------------------------------------------------------------- stores -- */

bool data_is_remote(const char *path); /* SCHEME://... */
/* A file or directory of another store: hdfs:// through the client `hdfs`, s3://, gs:// and others through fsspec in a helper. Its
 * copy under ~/.cache/verl/rlhf (verl's data.cache_dir); one that is there is taken as it is. Caller frees *local.
 * ERR_INPUT: not there; ERR_HELPER: a client or package is missing, or failed; ERR_IO: no room. */
int data_remote_fetch(const char *url, char **local);

/* ---------------------------------------------------------- preparation -- */

struct data_gsm8k_args {
    const char *source; /* directory, "user/name" on the hub, or NULL: "openai/gsm8k" */
    const char *save_dir;
    const char *hdfs_dir;    /* copied there as well; may be NULL */
    bool agent;              /* rows of a tool_agent with the tool calc_gsm8k_reward (verl's gsm8k_tool_agent_loop.py) */
    int64_t n_train, n_test; /* out: rows written */
};
int data_make_gsm8k(struct data_gsm8k_args *a);

struct data_arith_args {
    const char *out_dir;
    int64_t n_train, n_test, n_sft;
    uint64_t seed;
    int level;           /* 1: one step, 2: one or two steps, 3: two steps, larger numbers */
    double sft_marked;   /* share of sft_train answers that end with "#### N"; the others stop before it */
    bool jsonl, parquet; /* which files; at least one */
};
/* train and test (RL rows, verl's columns), sft_train and sft_test (prompt, response, messages).
 * No question occurs in two of train, test and sft_train; sft_test has test's. */
int data_make_arith(const struct data_arith_args *a);

/* tokenizer.json and tokenizer_config.json in dir (made if need be): a byte-level BPE tokenizer
 * with ChatML, trained here on the arithmetic texts; the end token is <|im_end|>, the padding
 * token <|endoftext|>.  The same bytes every time. */
int data_write_tiny_tokenizer(const char *dir);

#endif
