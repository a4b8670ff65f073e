/* sandbox.c - `verlc sandbox`: one program in the sandbox; what happened, as a line of JSON.
 *
 * The program comes from the command line, or with --request as a JSON object on standard input: so verlc_helpers/sandbox.py
 * calls it. The limits are options in both cases. The exit status is 0 whatever the program did.
 * Invariant: every limit is the requested one or its default; never none. */
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "cmd/cmd.h"
#include "sandbox/request.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_INPUT = 256 << 20, MIB = 1 << 20 };

static int run_and_print(const struct sandbox_args *args) {
    struct sandbox_result result;
    struct buf line = {0};
    TRY(sandbox_run(args, &result));
    json_t *o = sandbox_result_json(&result);
    int rc = json_dump_line(&line, o);
    if (rc == 0) rc = cmd_print_line(line.p, line.n);
    json_decref(o);
    buf_free(&line);
    sandbox_result_free(&result);
    return rc;
}

/* All of standard input, which may be a pipe of another user: it is not opened again. */
static int read_input(struct buf *to) {
    char piece[1 << 16];
    ssize_t n;
    to->max = MAX_INPUT;
    while ((n = read(STDIN_FILENO, piece, sizeof piece)) > 0) TRY(buf_add(to, piece, (size_t)n));
    if (n < 0) FAIL(ERR_INPUT, "standard input: %s", strerror(errno));
    return 0;
}

static int run_request(const struct sandbox_limits *limits) {
    struct sandbox_request r = {0};
    struct buf text = {0};
    int rc;
    TRYG(read_input(&text), out);
    TRYG(sandbox_request_read(&r, text.p ? text.p : "", text.n), out);
    r.args.limits = *limits;
    rc = run_and_print(&r.args);
out:
    sandbox_request_free(&r);
    buf_free(&text);
    return rc;
}

/* file, read_dir: NULL: none. */
static int run_program(char **argv, const char *file, const char *read_dir, const struct sandbox_limits *limits) {
    struct buf text = {0}, in = {0};
    const char *slash = file ? strrchr(file, '/') : NULL;
    int rc;
    if (file) TRYG(file_read(&text, file, MAX_INPUT), out);
    if (!isatty(STDIN_FILENO)) TRYG(read_input(&in), out);
    const struct sandbox_file copy = {slash ? slash + 1 : file, text.p ? text.p : "", text.n};
    rc = run_and_print(&(struct sandbox_args){.argv = (const char *const *)argv,
                                              .stdin_data = in.p,
                                              .n_stdin = in.n,
                                              .files = &copy,
                                              .n_files = file ? 1 : 0,
                                              .read_dirs = (const char *const[]){read_dir, NULL},
                                              .limits = *limits});
out:
    buf_free(&text);
    buf_free(&in);
    return rc;
}

int cmd_sandbox(int argc, char **argv) {
    struct sandbox_limits l = sandbox_default_limits;
    int64_t memory_mb = l.memory_bytes / MIB, disk_mb = l.disk_bytes / MIB, output_kb = l.output_bytes / 1024;
    const char *file = NULL, *read_dir = NULL;
    bool request = false, check = false;
    const struct cmd_opt opts[] = {
        {"--file", CMD_STR, &file, "FILE", "a copy of it is in the program's directory"},
        {"--read", CMD_STR, &read_dir, "DIR", "a further directory that it may read, such as a virtual environment"},
        {"--wall", CMD_F64("float(0,86400]"), &l.wall_s, "S", "seconds from start to end [10]"},
        {"--cpu", CMD_I64("int[1,86400]"), &l.cpu_s, "S", "processor seconds of each process [10]"},
        {"--memory-mb", CMD_I64("int[16,2^20]"), &memory_mb, "MB", "memory of each process, and of all together [1024]"},
        {"--disk-mb", CMD_I64("int[1,2^20]"), &disk_mb, "MB", "its directory /tmp, the one it can write to [64]"},
        {"--output-kb", CMD_I64("int[1,2^20]"), &output_kb, "KB", "standard output, and standard error again [4096]"},
        {"--processes", CMD_I64("int[1,2^15]"), &l.n_processes, "N", "processes and threads [64]"},
        {"--files", CMD_I64("int[8,2^16]"), &l.n_files, "N", "open files of each process [64]"},
        {"--request", CMD_FLAG, &request, NULL, "the program is a JSON object on standard input, as above"},
        {"--check", CMD_FLAG, &check, NULL, "only say whether this machine can make a sandbox"},
    };
    const struct cmd_spec spec = CMD_SPEC(
        opts, "verlc sandbox [options] -- PROGRAM [ARGUMENT ...] < input",
        "Runs a program that is not trusted, without network, files, processes and environment of this machine, and\n"
        "prints {\"end\", \"status\", \"stdout\", \"stderr\", \"wall_s\", \"peak_bytes\"}. end is exited, signaled, or the limit\n"
        "that it passed: wall_limit, cpu_limit, memory_limit, output_limit, process_limit, disk_limit.\n"
        "--request reads {\"argv\": [...], \"stdin\": text, \"files\": {name: text}, \"read\": [directory, ...]}.");
    int n = 1;
    while (n < argc && strcmp(argv[n], "--") != 0) n++;
    const int rc = cmd_parse(&spec, n, argv);
    if (rc != 0) return rc > 0 ? 0 : rc;
    if (check) return sandbox_check();
    if (request != (n + 1 >= argc)) FAIL(ERR_INVAL, "sandbox needs either -- PROGRAM or --request; 'verlc sandbox --help'");
    l.memory_bytes = memory_mb * MIB;
    l.disk_bytes = disk_mb * MIB;
    l.output_bytes = output_kb * 1024;
    return request ? run_request(&l) : run_program(argv + n + 1, file, read_dir, &l);
}
