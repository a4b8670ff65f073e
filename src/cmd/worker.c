/* worker.c - `verlc worker`: one rank of a run, of `verlc serve`, `verlc netcheck` or `verlc bench`. Here alone the calls of all
 * programs are known. */
#include "cmd/bench/bench.h"
#include "cmd/cmd.h"
#include "cmd/netcheck/netcheck.h"
#include "cmd/serve/serve_ranks.h"
#include "generate/generator.h"
#include "ppo/worker/ppo_worker_calls.h"
#include "ranks/worker_calls.h"
#include "sft/sft.h"

#include "base/err.h"
#include "ranks/launcher.h"

#include <string.h>

extern char **environ;

int cmd_worker(int argc, char **argv) {
    static const struct worker_process_service own[] = {NETCHECK_SERVICES, BENCH_SERVICES, {NULL, NULL}};
    static const struct worker_process_service *const tables[] = {
        ppo_worker_services, sft_services, supervised_services, generator_services, serve_services, own, NULL};
    const struct cmd_spec spec = {
        .usage = "verlc worker",
        .about = "One rank of a run: a process that verlc starts itself, with VERLC_RANK and more in its environment."};
    struct launch l;
    const int rc = cmd_parse(&spec, argc, argv);
    if (rc != 0) return rc > 0 ? 0 : rc;
    TRY(launch_read(&l, environ));
    if (!l.by || strcmp(l.by, "verlc") != 0) FAIL(ERR_INVAL, "verlc worker is started by verlc itself: VERLC_RANK is not set");
    return rank_serve(&l, NULL, NULL, tables);
}
