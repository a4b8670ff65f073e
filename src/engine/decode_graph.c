/* decode_graph.c - see decode_graph.h. Knows no model.
 * Invariant: a graph does what its step did when it was captured, on the same addresses. */
#include "engine/decode_graph.h"

#include "base/err.h"
#include "device/graph.h"

int64_t decode_graph_rows(int64_t n) {
    const int64_t unit = n <= 4 ? 1 : n <= 32 ? 4 : n <= 128 ? 8 : n <= 512 ? 32 : 128;
    return (n + unit - 1) / unit * unit;
}

static int capture(struct dev *dev, int64_t rows, int (*step)(void *ctx, int64_t rows), void *ctx, void **graph) {
    TRY(dev_graph_begin(dev));
    const int rc = step(ctx, rows);
    const int end = dev_graph_end(dev, graph);
    TRY(rc);
    return end;
}

int decode_graph_run(struct decode_graphs *g, struct dev *dev, int64_t rows, int (*step)(void *ctx, int64_t rows), void *ctx) {
    int i = 0;
    if (!dev_has_graphs(dev)) return step(ctx, rows);
    while (i < g->n && g->graph[i].rows != rows) i++;
    if (i == g->n) { /* first time: run without capture, which also warms up */
        if (i < DECODE_GRAPHS_MAX) {
            g->graph[i].rows = rows;
            g->graph[i].graph = NULL;
            g->n++;
        }
        return step(ctx, rows);
    }
    if (!g->graph[i].graph) TRY(capture(dev, rows, step, ctx, &g->graph[i].graph));
    return dev_graph_run(dev, g->graph[i].graph);
}

void decode_graphs_free(struct decode_graphs *g, struct dev *dev) {
    for (int i = 0; i < g->n; i++) dev_graph_free(dev, g->graph[i].graph);
    g->n = 0;
}
