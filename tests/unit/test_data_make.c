/* Dataset preparation: GSM8K from JSONL, from a snapshot and from a (local) hub;
 * arithmetic problems; the tiny tokenizer's files. */
#include "base/buf.h"
#include "base/file.h"
#include "base/json.h"
#include "base/map.h"
#include "data/data.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static char dir[64];
static char *at(const char *name) { return file_join(dir, name); }

static int setup(void **state) {
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/verlc_make_XXXXXX");
    if (!mkdtemp(dir)) return -1;
    setenv("HOME", dir, 1); /* caches and ~ stay in here */
    unsetenv("HF_HOME");
    unsetenv("HF_HUB_CACHE");
    unsetenv("HF_TOKEN");
    return 0;
}
static int teardown(void **state) {
    (void)state;
    return file_remove_tree(dir);
}

static void put(const char *name, const char *text) {
    char *path = at(name), *parent = xstrdup(path);
    *strrchr(parent, '/') = '\0';
    assert_int_equal(file_mkdirs(parent), 0);
    assert_int_equal(file_write_atomic(path, text, strlen(text)), 0);
    free(path);
    free(parent);
}

static const char train_text[] = "{\"question\": \"How many?\", \"answer\": \"Sum <<1,000+1=1,001>>1,001\\n#### 1,001\"}\n"
                                 "{\"question\": \"Cost \\\"x\\\"?\", \"answer\": \"#### no\\n#### -2.5 dollars\"}\n";
static const char test_text[] = "{\"question\": \"T\", \"answer\": \"#### 7\"}\n";

/* The rows of train.parquet in `save` are those of train_text, in verl's form (spec 5.1). */
static void assert_rows(const char *save) {
    char *path = file_join(save, "train.parquet");
    json_t *rows = NULL;
    assert_int_equal(data_read_rows(&rows, path, NULL), 0);
    json_t *want = json_loads("[{\"data_source\": \"openai/gsm8k\", \"prompt\": [{\"role\": \"user\", \"content\": \"How many? "
                              "Let's think step by step"
                              " and output the final answer after \\\"####\\\".\"}], \"ability\": \"math\", \"reward_model\": "
                              "{\"style\": \"rule\","
                              " \"ground_truth\": \"1001\"}, \"extra_info\": {\"split\": \"train\", \"index\": 0, \"answer\":"
                              " \"Sum <<1,000+1=1,001>>1,001\\n#### 1,001\", \"question\": \"How many?\"}}]",
                              0, NULL);
    assert_non_null(want);
    assert_int_equal(json_array_size(rows), 2);
    assert_true(json_equal(json_array_get(rows, 0), json_array_get(want, 0)));
    assert_string_equal(
        json_string_value(json_object_get(json_object_get(json_array_get(rows, 1), "reward_model"), "ground_truth")), "-2.5");
    json_decref(want);
    json_decref(rows);
    free(path);
}

static void make_from(const char *source, const char *save) {
    char *out = at(save);
    struct data_gsm8k_args a = {.source = source, .save_dir = out};
    const int rc = data_make_gsm8k(&a);
    if (rc) print_message("%s\n", err_msg());
    assert_int_equal(rc, 0);
    assert_int_equal(a.n_train, 2);
    assert_int_equal(a.n_test, 1);
    assert_rows(out);
    free(out);
}

/* Rows of a tool_agent: its columns, and the tool's ground truth. */
static void gsm8k_for_agents(void **state) {
    (void)state;
    put("raw3/train.jsonl", train_text);
    put("raw3/test.jsonl", test_text);
    char *raw = at("raw3"), *out = at("out3"), *path = at("out3/test.parquet");
    struct data_gsm8k_args a = {.source = raw, .save_dir = out, .agent = true};
    json_t *rows = NULL;
    assert_int_equal(data_make_gsm8k(&a), 0);
    assert_int_equal(data_read_rows(&rows, path, NULL), 0);
    json_t *row = json_array_get(rows, 0), *prompt = json_object_get(row, "prompt"), *info = json_object_get(row, "extra_info");
    assert_string_equal(json_string_value(json_object_get(row, "agent_name")), "tool_agent");
    assert_int_equal(json_array_size(prompt), 2);
    json_t *want =
        json_pack("{s:s, s:i, s:s, s:s, s:b, s:{s:{s:{s:s}}}, s:{s:O, s:s}}", "split", "test", "index", 0, "answer", "#### 7",
                  "question", "T", "need_tools_kwargs", 1, "tools_kwargs", "calc_gsm8k_reward", "create_kwargs", "ground_truth",
                  "7", "interaction_kwargs", "query", json_object_get(json_array_get(prompt, 1), "content"), "ground_truth", "7");
    assert_true(json_equal(info, want));
    json_decref(want);
    json_decref(rows);
    free(path);
    free(out);
    free(raw);
}

static void fails(const char *source, int code, const char *text) {
    char *out = at("never");
    struct data_gsm8k_args a = {.source = source, .save_dir = out};
    const int rc = data_make_gsm8k(&a);
    if (rc != code || !strstr(err_msg(), text)) print_message("%d %s\n", rc, err_msg());
    assert_int_equal(rc, code);
    assert_non_null(strstr(err_msg(), text));
    assert_false(file_exists(out));
    free(out);
}

static void gsm8k_from_disk(void **state) {
    (void)state;
    put("raw/train.jsonl", train_text);
    put("raw/test.jsonl", test_text);
    char *raw = at("raw");
    make_from(raw, "out1");
    /* a hub snapshot: Parquet shards under main/, named by refs/main */
    char *shard = at("hub/snapshots/abc/main/train-00000-of-00001.parquet"),
         *t = at("hub/snapshots/abc/main/test-00000-of-00001.parquet");
    char *from = at("raw/train.jsonl"), *from_t = at("raw/test.jsonl"), *hub = at("hub");
    json_t *rows = NULL;
    put("hub/refs/main", "abc\n");
    put("hub/snapshots/abc/main/README.md", "x");
    assert_int_equal(data_read_rows(&rows, from, NULL), 0);
    assert_int_equal(data_write_rows(shard, rows, NULL), 0);
    json_decref(rows);
    assert_int_equal(data_read_rows(&rows, from_t, NULL), 0);
    assert_int_equal(data_write_rows(t, rows, NULL), 0);
    json_decref(rows);
    make_from(hub, "out2");
    /* --hdfs_dir may be a local directory, as in verl */
    char *out = at("out3"), *copy = at("copy/of/it");
    struct data_gsm8k_args a = {.source = raw, .save_dir = out, .hdfs_dir = copy};
    assert_int_equal(data_make_gsm8k(&a), 0);
    assert_rows(copy);
    free(out);
    free(copy);
    free(raw);
    free(shard);
    free(t);
    free(from);
    free(from_t);
    free(hub);
}

/* The hdfs client is a program in PATH: a stand-in that records its arguments. */
static void gsm8k_to_hdfs(void **state) {
    (void)state;
    put("raw/train.jsonl", train_text);
    put("raw/test.jsonl", test_text);
    put("bin/hdfs", "#!/bin/sh\necho \"$@\" >> \"$HOME/hdfs.log\"\nexit $(cat \"$HOME/hdfs.rc\")\n");
    put("hdfs.rc", "0");
    char *raw = at("raw"), *out = at("out4"), *bin = at("bin"), *hdfs = at("bin/hdfs"), *log = at("hdfs.log");
    char *old = xstrdup(getenv("PATH")), *path = xasprintf("%s:%s", bin, old);
    char *want = xasprintf("dfs -mkdir -p hdfs://nn/data\ndfs -put -f %s hdfs://nn/data\n", out);
    struct buf b = {0};
    struct data_gsm8k_args a = {.source = raw, .save_dir = out, .hdfs_dir = "hdfs://nn/data"};
    char *const argv[] = {"chmod", "+x", hdfs, NULL};
    const pid_t pid = fork();
    if (pid == 0) {
        execvp(argv[0], argv);
        _exit(1);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    setenv("PATH", path, 1);
    assert_int_equal(data_make_gsm8k(&a), 0);
    assert_int_equal(file_read(&b, log, 0), 0);
    assert_string_equal(b.p, want);
    char *here = getcwd(NULL, 0), *home = at("");
    assert_int_equal(chdir(home), 0);
    a.save_dir = "-x";
    assert_int_equal(data_make_gsm8k(&a), 0);
    buf_reset(&b);
    assert_int_equal(file_read(&b, log, 0), 0);
    assert_non_null(strstr(b.p, "dfs -put -f ./-x hdfs://nn/data\n")); /* not an option */
    assert_int_equal(chdir(here), 0);
    free(here);
    free(home);
    a.save_dir = out;
    put("hdfs.rc", "5");
    assert_int_equal(data_make_gsm8k(&a), ERR_HELPER);
    assert_non_null(strstr(err_msg(), "'hdfs dfs -mkdir -p hdfs://nn/data' ended with exit code 5"));
    setenv("PATH", old, 1);
    assert_rows(out); /* the local files are there all the same */
    free(raw);
    free(out);
    free(bin);
    free(hdfs);
    free(log);
    free(old);
    free(path);
    free(want);
    buf_free(&b);
}

static void gsm8k_bad_sources(void **state) {
    (void)state;
    put("empty/notes.txt", "x");
    put("half/train.jsonl", train_text);
    put("noanswer/train.jsonl", "{\"question\": \"q\"}\n");
    put("noanswer/test.jsonl", test_text);
    put("nonumber/train.jsonl", "{\"question\": \"q\", \"answer\": \"####5 and #### x\"}\n");
    put("nonumber/test.jsonl", test_text);
    put("broken/train.jsonl", "{\"question\": \"q\", \"answer\": \"#### 1\"}\n{\"question\n");
    put("broken/test.jsonl", test_text);
    char *p;
    fails(p = at("empty"), ERR_INPUT, "no train.jsonl");
    free(p);
    fails(p = at("half"), ERR_INPUT, "no test.jsonl");
    free(p);
    fails(p = at("noanswer"), ERR_INPUT, "train.jsonl:1: there is no column 'answer'");
    free(p);
    fails(p = at("nonumber"), ERR_FORMAT, "row 1: the answer has no '#### NUMBER'");
    free(p);
    fails(p = at("broken"), ERR_FORMAT, "train.jsonl:2: not JSON");
    free(p);
    fails("/no/such/dir", ERR_INPUT, "no such directory");
}

/* --- the hub's interface on a local port --- */

struct coordinator {
    pid_t pid;
};
static void hub_start(struct coordinator *h) {
    const char *python = getenv("VERLC_PYTHON") ? getenv("VERLC_PYTHON") : "python3";
    char *files = at("served"), text[64] = "", url[64];
    int fd[2];
    assert_int_equal(pipe(fd), 0);
    h->pid = fork();
    if (h->pid == 0) {
        dup2(fd[1], 1);
        execlp(python, python, SOURCE_DIR "/tests/unit/fake_hub.py", files, "ok", NULL);
        _exit(1);
    }
    close(fd[1]);
    FILE *f = fdopen(fd[0], "r");
    assert_non_null(fgets(text, sizeof text, f));
    fclose(f);
    snprintf(url, sizeof url, "http://127.0.0.1:%d", atoi(text));
    setenv("HF_ENDPOINT", url, 1);
    free(files);
}
static void hub_stop(struct coordinator *h) {
    kill(h->pid, SIGKILL);
    waitpid(h->pid, NULL, 0);
}

/* e2e/hub_test has what can go wrong. */
static void gsm8k_from_the_hub(void **state) {
    (void)state;
    struct coordinator h;
    put("served/fake/gsm8k/main/train.jsonl", train_text);
    put("served/fake/gsm8k/main/test.jsonl", test_text);
    hub_start(&h);
    make_from("fake/gsm8k", "out5");
    fails("fake/nothing", ERR_INPUT, "no such dataset on the hub");
    hub_stop(&h);
    make_from("fake/gsm8k", "out6");                /* from the cache */
    setenv("HF_ENDPOINT", "http://127.0.0.1:1", 1); /* nobody listens there */
    fails("fake/other", ERR_INPUT, "--local_dataset_path DIR takes a copy on disk");
    unsetenv("HF_ENDPOINT");
}

/* --- arithmetic --- */

static int64_t eval_step(const char *line) {
    long long a, b, r;
    char op;
    const char *s = line + strcspn(line, "0123456789");
    assert_int_equal(sscanf(s, "%lld %c %lld = %lld", &a, &op, &b, &r), 4);
    const long long want = op == '+' ? a + b : op == '-' ? a - b : a * b;
    assert_int_equal(r, want);
    assert_true(a > 0 && b > 1 && r > 0);
    return r;
}

static void arith_is_right_and_repeats(void **state) {
    (void)state;
    for (int level = 1; level <= 3; level++) {
        char *one = at("one"), *two = at("two");
        struct data_arith_args a = {
            .out_dir = one, .sft_marked = 1, .n_train = 300, .n_test = 50, .n_sft = 200, .seed = 5, .level = level, .jsonl = true};
        assert_int_equal(data_make_arith(&a), 0);
        a.out_dir = two;
        assert_int_equal(data_make_arith(&a), 0);
        struct map seen = {0};
        const char *const files[] = {"train.jsonl", "test.jsonl", "sft_train.jsonl"};
        const size_t counts[] = {300, 50, 200};
        for (int f = 0; f < 3; f++) {
            char *p1 = file_join(one, files[f]), *p2 = file_join(two, files[f]);
            struct buf b1 = {0}, b2 = {0};
            json_t *rows = NULL, *r;
            size_t i;
            assert_int_equal(file_read(&b1, p1, 0), 0);
            assert_int_equal(file_read(&b2, p2, 0), 0);
            assert_int_equal(b1.n, b2.n);
            assert_memory_equal(b1.p, b2.p, b1.n);
            assert_int_equal(data_read_rows(&rows, p1, NULL), 0);
            assert_int_equal(json_array_size(rows), counts[f]);
            json_array_foreach(rows, i, r) {
                const json_t *extra = json_object_get(r, "extra_info");
                const char *q = json_string_value(extra ? json_object_get(extra, "question") : json_object_get(r, "prompt"));
                const char *ans = json_string_value(extra ? json_object_get(extra, "answer") : json_object_get(r, "response"));
                assert_false(map_gets(&seen, q, NULL)); /* no question twice, across files */
                map_set(&seen, q, strlen(q), 1);
                assert_null(strchr(q, '$'));
                int64_t result = eval_step(ans);
                const char *line = strchr(ans, '\n') + 1;
                if (line[0] != '#') {
                    result = eval_step(line);
                    line = strchr(line, '\n') + 1;
                } else {
                    assert_int_not_equal(level, 3);
                }
                assert_int_equal(strncmp(line, "#### ", 5), 0);
                assert_int_equal(atoll(line + 5), result);
                if (extra)
                    assert_string_equal(json_string_value(json_object_get(json_object_get(r, "reward_model"), "ground_truth")),
                                        line + 5);
            }
            json_decref(rows);
            buf_free(&b1);
            buf_free(&b2);
            free(p1);
            free(p2);
        }
        map_free(&seen);
        free(one);
        free(two);
    }
    char *out = at("three");
    struct data_arith_args a = {.sft_marked = 1, .out_dir = out, .n_train = 3, .n_test = 1, .n_sft = 1, .level = 4, .jsonl = true};
    assert_int_equal(data_make_arith(&a), ERR_INVAL);
    a.level = 1;
    a.n_train = 99998; /* one too many with the others: refused, nothing written */
    a.n_sft = 2;
    assert_int_equal(data_make_arith(&a), ERR_INVAL);
    assert_non_null(strstr(err_msg(), "not enough different problems"));
    assert_false(file_exists(out));
    a.n_sft = 1; /* the most there can be: all different */
    assert_int_equal(data_make_arith(&a), 0);
    free(out);
}

/* --- tokenizer files --- */

static void tiny_tokenizer_files(void **state) {
    (void)state;
    char *one = at("tok1"), *two = at("tok2/deep");
    assert_int_equal(data_write_tiny_tokenizer(one), 0);
    assert_int_equal(data_write_tiny_tokenizer(two), 0);
    const char *const names[] = {"tokenizer.json", "tokenizer_config.json"};
    for (int i = 0; i < 2; i++) {
        char *p1 = file_join(one, names[i]), *p2 = file_join(two, names[i]);
        struct buf b1 = {0}, b2 = {0};
        assert_int_equal(file_read(&b1, p1, 0), 0);
        assert_int_equal(file_read(&b2, p2, 0), 0);
        assert_int_equal(b1.n, b2.n);
        assert_memory_equal(b1.p, b2.p, b1.n);
        buf_free(&b1);
        buf_free(&b2);
        free(p1);
        free(p2);
    }
    char *path = file_join(one, "tokenizer.json");
    json_t *t = NULL, *m;
    size_t i;
    assert_int_equal(json_load(&t, path, 0), 0);
    const json_t *model = json_object_get(t, "model"), *vocab = json_object_get(model, "vocab"),
                 *merges = json_object_get(model, "merges");
    assert_int_equal(json_object_size(vocab), 256 + json_array_size(merges)); /* no token twice */
    json_array_foreach(merges, i, m) { /* both halves and the result are tokens, the result's id follows the order */
        char *text = xstrdup(json_string_value(m)), *right = strchr(text, ' ') + 1;
        right[-1] = '\0';
        char *joined = xasprintf("%s%s", text, right);
        assert_non_null(json_object_get(vocab, text));
        assert_non_null(json_object_get(vocab, right));
        assert_int_equal(json_integer_value(json_object_get(vocab, joined)), 256 + (json_int_t)i);
        free(joined);
        free(text);
    }
    assert_non_null(json_object_get(vocab, "\xc4\xa0"
                                           "apples")); /* whole words of the problems */
    assert_null(json_object_get(vocab, "12"));         /* digits stay single */
    json_decref(t);
    free(path);
    free(one);
    free(two);
    assert_int_equal(data_write_tiny_tokenizer("/proc/nowhere"), ERR_IO);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gsm8k_from_disk),      cmocka_unit_test(gsm8k_for_agents),   cmocka_unit_test(gsm8k_to_hdfs),
        cmocka_unit_test(gsm8k_bad_sources),    cmocka_unit_test(gsm8k_from_the_hub), cmocka_unit_test(arith_is_right_and_repeats),
        cmocka_unit_test(tiny_tokenizer_files),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
