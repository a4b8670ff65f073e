/* serve_ranks.h - a server's source of tokens on ranks: a model split over ranks that draw together (tensor parallel), whole
 * copies of it (data parallel), or both. The controller's end, and a rank's calls.
 *
 * A request goes to the group with the fewest open samples. The ranks of a group get the same calls, each one step of their
 * engines, and what they have drawn is compared.
 * Invariant: an answer does not depend on the number of ranks; a rank that is lost ends the server, by name, within 10 s. */
#ifndef VERLC_CMD_SERVE_SERVE_RANKS_H
#define VERLC_CMD_SERVE_SERVE_RANKS_H

#include "cmd/serve/serve_engine.h"
#include "cmd/serve/serve_model.h"
#include "ranks/rank_group.h"

struct launch;
struct serve_group;
struct serve_ranks { /* a zeroed one may be closed */
    struct rank_group g;
    int together, n_groups;
    struct serve_group *groups;
    struct serve_engine *to;
    int64_t max_len; /* of serve_model */
};
struct serve_ranks_args {
    struct serve_model_args model;
    const char *device;
    int64_t copies; /* groups */
    int64_t threads;
};
/* Starts the ranks, or under a launcher waits for them, and has them open the model. to: who gets what is drawn, borrowed. */
int serve_ranks_open(struct serve_ranks *s, const struct serve_ranks_args *a, struct serve_engine *to);
/* Prints what a rank takes (serve_plan.c), on a GPU of so many bytes; 0: on what is there. An exit status, or an error. */
int serve_plan(const struct serve_ranks_args *a, const struct model_config *c, int64_t gpu);
struct serve_source serve_ranks_source(struct serve_ranks *s);
void serve_ranks_close(struct serve_ranks *s, bool ok); /* as rank_group_close */

/* A rank's calls, for `verlc worker`; and the process of a launcher that is a rank. */
extern const struct worker_process_service serve_services[];
int serve_ranks_serve(const struct launch *l);

#endif
