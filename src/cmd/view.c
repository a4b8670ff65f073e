/* view.c - `verlc view`: a page of runs in the browser, from their run.db, live while they go on. */
#include "cmd/cmd.h"

#include "base/err.h"
#include "view/view.h"

#include <stdio.h>

enum { MAX_ROOTS = 64, FIRST_PORT = 8266 /* Ray's dashboard has the one before */ };

int cmd_view(int argc, char **argv) {
    const char *roots[MAX_ROOTS];
    int n = 0;
    struct http_server_args a = {.first_port = FIRST_PORT, .host = "127.0.0.1", .handle = view_answer};
    const struct cmd_opt opts[] = {
        {"--port", CMD_I64("int[1,65535]"), &a.port, "N", "the port (default: 8266, or a free one)"},
        {"--host", CMD_STR, &a.host, "ADDRESS", "listen there (default 127.0.0.1); beyond this machine a token is required"},
        {"--token", CMD_FLAG, &a.token, NULL, "ask for the token on 127.0.0.1 too: other users of this machine can reach that"}};
    struct cmd_spec spec =
        CMD_SPEC(opts, "verlc view [RUN ...]",
                 "A page in the browser: the curves, samples and rewards of runs, live while they go on.\n"
                 "RUN is a run's directory (trainer.default_local_dir) or one with runs below it (default: here).\n"
                 "Ctrl-C ends it. docs/explorer.md says what is on the page.");
    spec.operands = roots;
    spec.max_operands = MAX_ROOTS;
    spec.n_operands = &n;
    const int answered = cmd_parse(&spec, argc, argv);
    TRY(answered);
    if (answered) return 0;
    if (n == 0) roots[n++] = ".";
    struct view *view = NULL;
    struct http_server *server = NULL;
    int rc = view_open(&view, roots, n);
    a.arg = view;
    if (rc == 0) rc = http_server_open(&server, &a);
    if (rc == 0) {
        printf("verlc view: %s\n", http_server_url(server));
        rc = cmd_flush();
    }
    if (rc == 0) rc = http_server_run(server);
    http_server_close(server);
    view_close(view);
    return rc;
}
