/* gsm8k.c - GSM8K to verl's rows (verl's examples/data_preprocess/gsm8k.py):
 * finds the raw questions (raw JSONL, a hub snapshot on disk, or the hub), adds the
 * instruction, takes the ground truth from "#### N", writes train and test Parquet.
 * For a tool_agent a row also names its loop, its tool and what the tool needs; the
 * columns are those of verl's gsm8k_tool_agent_loop.py, the system message is not.
 * Invariant: row i of a split is row i of its source; nothing is written unless
 * both splits are good. */
#include "data/data_int.h"

#include "base/buf.h"
#include "base/file.h"
#include "base/log.h"

#include <dirent.h>
#include <stdlib.h>
#include <string.h>

#define HUB_NAME "openai/gsm8k"
#define TOOL "calc_gsm8k_reward" /* of verl's Gsm8kTool */

/* Column types and field order as the `datasets` library writes verl's rows. */
static json_t *row_schema(bool agent) {
    json_t *info = json_pack("{s:s, s:s, s:s, s:s}", "split", "string", "index", "int64", "answer", "string", "question", "string");
    json_t *more = agent ? json_pack("{s:s, s:{s:{s:{s:{s:{s:{s:s}}}}}}, s:{s:{s:s, s:s}}}", "need_tools_kwargs", "bool",
                                     "tools_kwargs", "struct", TOOL, "struct", "create_kwargs", "struct", "ground_truth", "string",
                                     "interaction_kwargs", "struct", "query", "string", "ground_truth", "string")
                         : NULL;
    if (more) json_object_update(info, more);
    json_decref(more);
    return json_pack("{s:s, s:s*, s:{s:{s:{s:s, s:s}}}, s:s, s:{s:{s:s, s:s}}, s:{s:o}}", "data_source", "string", "agent_name",
                     agent ? "string" : NULL, "prompt", "list", "struct", "role", "string", "content", "string", "ability",
                     "string", "reward_model", "struct", "style", "string", "ground_truth", "string", "extra_info", "struct", info);
}

/* --- finding the raw files --- */

static int by_name(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

struct paths {
    char **p;
    int64_t n, cap;
};
static void paths_free(struct paths *v) {
    for (int64_t i = 0; i < v->n; i++) free(v->p[i]);
    free(v->p);
    *v = (struct paths){0};
}

/* "train.jsonl", "train-00000-of-00001.parquet": the split's name, then . or -, then a known ending. */
static bool is_split_file(const char *name, const char *split, const char *ending) {
    const size_t n = strlen(name), k = strlen(split), e = strlen(ending);
    return n >= k + e && memcmp(name, split, k) == 0 && (name[k] == '.' || name[k] == '-') && strcmp(name + n - e, ending) == 0;
}

/* All shards of one split in one directory, sorted; one kind of file only. */
static void find_in(struct paths *out, const char *dir, const char *split) {
    static const char *const endings[] = {".parquet", ".jsonl", ".json"};
    for (int k = 0; k < 3 && out->n == 0; k++) {
        DIR *d = opendir(dir);
        if (!d) return;
        for (struct dirent *e; (e = readdir(d));) {
            if (!is_split_file(e->d_name, split, endings[k])) continue;
            xgrow((void **)&out->p, &out->cap, out->n + 1, sizeof *out->p);
            out->p[out->n++] = file_join(dir, e->d_name);
        }
        closedir(d);
    }
    if (out->n > 1) qsort(out->p, (size_t)out->n, sizeof *out->p, by_name);
}

/* The configuration "main" first, as load_dataset(path, "main") does. */
static int find_split(struct paths *out, const char *dir, const char *split) {
    static const char *const places[] = {"main", "", "data"};
    for (int k = 0; k < 3 && out->n == 0; k++) {
        char *sub = file_join(dir, places[k]);
        find_in(out, sub, split);
        free(sub);
    }
    if (out->n == 0)
        FAIL(ERR_INPUT,
             "%s: no %s.jsonl, %s-*.parquet or the like there or under main/; give the directory of the raw "
             "dataset",
             dir, split, split);
    return 0;
}

/* A hub cache entry ("datasets--openai--gsm8k") holds snapshots/REVISION, named by refs/main. */
static char *descend_snapshot(char *dir) {
    char *ref = file_join(dir, "refs/main");
    struct buf rev = {0};
    if (file_exists(ref) && file_read(&rev, ref, 256) == 0) {
        rev.p[strcspn(rev.p, "\r\n")] = '\0';
        char *sub = xasprintf("%s/snapshots/%s", dir, rev.p);
        if (file_is_dir(sub)) {
            free(dir);
            dir = sub;
        } else {
            free(sub);
        }
    }
    buf_free(&rev);
    free(ref);
    return dir;
}

static int find_source(char **dir, const char *source) {
    char *local = file_expand(source ? source : HUB_NAME);
    if (source && file_is_dir(local)) {
        *dir = descend_snapshot(local);
        return 0;
    }
    free(local);
    if (source && !data_hub_id(source)) FAIL(ERR_INPUT, "--local_dataset_path %s: no such directory", source);
    const int rc = data_hub_fetch(DATA_HUB_DATASET, source ? source : HUB_NAME, "main", dir);
    return rc < 0 ? err_append(rc, "; --local_dataset_path DIR takes a copy on disk") : 0;
}

/* --- rows --- */

/* verl's extract_solution: the first match of "#### (\-?[0-9\.\,]+)", without its
 * commas. Caller frees; NULL if there is none. */
static char *extract_solution(const char *answer) {
    for (const char *s = answer; (s = strstr(s, "#### ")); s++) {
        const char *g = s + 5;
        const size_t sign = *g == '-', n = strspn(g + sign, "0123456789.,");
        if (n == 0) continue;
        struct buf b = {0};
        for (size_t i = 0; i < sign + n; i++)
            if (g[i] != ',') buf_addc(&b, g[i]);
        return buf_take(&b);
    }
    return NULL;
}

/* What a row has for a tool_agent in addition. */
static void add_agent(json_t *row) {
    static const char system[] = "Solve the problem step by step. Before the final answer check it at least once with the "
                                 "tool `" TOOL "`, and correct it if it is wrong. The last line is `#### ` and the answer.";
    json_t *prompt = json_object_get(row, "prompt"), *query = json_object_get(json_array_get(prompt, 0), "content");
    json_t *truth = json_object_get(json_object_get(row, "reward_model"), "ground_truth");
    json_t *more = json_pack("{s:b, s:{s:{s:{s:O}}}, s:{s:O, s:O}}", "need_tools_kwargs", 1, "tools_kwargs", TOOL, "create_kwargs",
                             "ground_truth", truth, "interaction_kwargs", "query", query, "ground_truth", truth);
    CHECK(more != NULL);
    json_object_set_new(row, "agent_name", json_string("tool_agent"));
    json_array_insert_new(prompt, 0, json_pack("{s:s, s:s}", "role", "system", "content", system));
    json_object_update(json_object_get(row, "extra_info"), more);
    json_decref(more);
}

static int make_row(json_t **out, const json_t *raw, const char *split, int64_t index, const char *where) {
    static const char instruction[] = " Let's think step by step and output the final answer after \"####\".";
    json_t *question = json_object_get(raw, "question"), *answer = json_object_get(raw, "answer");
    if (!json_is_string(question) || !json_is_string(answer))
        FAIL(ERR_FORMAT, "%s: row %lld: 'question' or 'answer' is not text", where, (long long)index + 1);
    char *truth = extract_solution(json_string_value(answer));
    if (!truth) FAIL(ERR_FORMAT, "%s: row %lld: the answer has no '#### NUMBER' line", where, (long long)index + 1);
    struct buf content = {0};
    buf_add(&content, json_string_value(question), json_string_length(question));
    buf_adds(&content, instruction);
    *out = json_pack("{s:s, s:[{s:s, s:s%}], s:s, s:{s:s, s:s}, s:{s:s, s:I, s:O, s:O}}", "data_source", HUB_NAME, "prompt", "role",
                     "user", "content", content.p, content.n, "ability", "math", "reward_model", "style", "rule", "ground_truth",
                     truth, "extra_info", "split", split, "index", (json_int_t)index, "answer", answer, "question", question);
    buf_free(&content);
    free(truth);
    CHECK(*out != NULL);
    return 0;
}

static int make_split(json_t *rows, const char *dir, const char *split, bool agent) {
    static const char *const required[] = {"question", "answer", NULL};
    struct paths files = {0};
    int rc = 0;
    TRYG(find_split(&files, dir, split), out);
    for (int64_t f = 0; f < files.n; f++) {
        json_t *raw = NULL, *r, *row = NULL;
        size_t i;
        TRYG(data_read_rows(&raw, files.p[f], required), out);
        json_array_foreach(raw, i, r) {
            rc = make_row(&row, r, split, (int64_t)json_array_size(rows), files.p[f]);
            if (rc < 0) break;
            if (agent) add_agent(row);
            json_array_append_new(rows, row);
        }
        json_decref(raw);
        if (rc < 0) goto out;
    }
    if (json_array_size(rows) == 0) FAILG(out, ERR_INPUT, "%s: the %s split has no rows", dir, split);
out:
    paths_free(&files);
    return rc;
}

static int write_split(const char *dir, const char *name, const json_t *rows, const json_t *schema) {
    char *path = file_join(dir, name);
    const int rc = data_write_rows(path, rows, schema);
    free(path);
    return rc;
}

int data_make_gsm8k(struct data_gsm8k_args *a) {
    char *dir = NULL, *save = file_expand(a->save_dir);
    json_t *train = json_array(), *test = json_array(), *schema = row_schema(a->agent);
    int rc = 0;
    CHECK(schema != NULL);
    TRYG(find_source(&dir, a->source), out);
    TRYG(make_split(train, dir, "train", a->agent), out);
    TRYG(make_split(test, dir, "test", a->agent), out);
    TRYG(file_mkdirs(save), out);
    TRYG(write_split(save, "train.parquet", train, schema), out);
    TRYG(write_split(save, "test.parquet", test, schema), out);
    if (a->hdfs_dir) TRYG(data__copy_dir(save, a->hdfs_dir), out);
    a->n_train = (int64_t)json_array_size(train);
    a->n_test = (int64_t)json_array_size(test);
out:
    json_decref(train);
    json_decref(test);
    json_decref(schema);
    free(dir);
    free(save);
    return rc;
}
