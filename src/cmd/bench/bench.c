/* bench.c - `verlc bench SUBJECT`: benchmarks of this machine. Each subject
 * is one row of BENCH_MAP and one file. */
#include "cmd/cmd.h"

#include "base/err.h"
#include "cmd/bench/bench.h"

#include <stdio.h>
#include <string.h>

int cmd_bench(int argc, char **argv) {
    if (argc < 2 || strcmp(argv[1], "--help") == 0) {
        printf("usage: verlc bench SUBJECT [options]\n\nsubjects:\n");
#define X(name, help) printf("  %-10s %s\n", #name, help);
        BENCH_MAP(X)
#undef X
        return 0;
    }
#define X(name, help) \
    if (strcmp(argv[1], #name) == 0) return bench_##name(argc - 1, argv + 1);
    BENCH_MAP(X)
#undef X
    FAIL(ERR_INVAL, "bench '%s' is unknown (verlc bench --help lists them)", argv[1]);
}
