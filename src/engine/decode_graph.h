/* decode_graph.h - decoding steps as CUDA graphs, one for each batch size; private to engine. */
#ifndef VERLC_ENGINE_DECODE_GRAPH_H
#define VERLC_ENGINE_DECODE_GRAPH_H

#include "device/device.h"

#include <stdint.h>

enum { DECODE_GRAPHS_MAX = 64 };
struct decode_graphs { /* zeroed: none yet */
    struct {
        int64_t rows;
        void *graph; /* NULL: this batch size has run once and can be captured */
    } graph[DECODE_GRAPHS_MAX];
    int n;
};
/* The batch size of the graph for n rows, at least n; padding rows write to a dummy block. */
int64_t decode_graph_rows(int64_t n);
/* step(ctx, rows), by its graph where the device has graphs; a batch size is captured when it runs for the second time. */
int decode_graph_run(struct decode_graphs *g, struct dev *dev, int64_t rows, int (*step)(void *ctx, int64_t rows), void *ctx);
void decode_graphs_free(struct decode_graphs *g, struct dev *dev);

#endif
