/* graph.h - CUDA graphs: calls are captured once and replayed for the cost of one launch.
 *
 * The calls must have run once before at the same shapes. None may wait or touch host memory; none writes a weight.
 * Within a graph, attention of one row a sequence may read before the calls in front of it what is there when a replay
 * starts: attn_seqs, pos, slots and, without shared_new_keys, the whole KV cache but its own rows. So may the gated delta rule from
 * a state: row_seqs and the state, which nothing else in the graph writes. So the calls of a graph that write these
 * (dev_decode_next) come after it. */
#ifndef VERLC_DEVICE_GRAPH_H
#define VERLC_DEVICE_GRAPH_H

#include <stdbool.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

struct dev;

bool dev_has_graphs(const struct dev *d);
int dev_graph_begin(struct dev *d);             /* starts the capture */
int dev_graph_end(struct dev *d, void **graph); /* also ends a capture that failed: *graph is NULL then */
int dev_graph_run(struct dev *d, void *graph);
void dev_graph_free(struct dev *d, void *graph); /* NULL ok */
/* From now on the nodes of each graph are written when its capture ends, a line each, in their order: a kernel with its name,
 * blocks and threads, a copy or memset with its bytes. NULL: no longer. to is borrowed. */
void dev_graph_list(struct dev *d, FILE *to);

#ifdef __cplusplus
}
#endif
#endif
