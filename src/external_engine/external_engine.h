/* external_engine.h - generation on servers of vLLM, SGLang or TensorRT-LLM (rollout.engine_url), behind the operations of a
 * worker: every stage and agent loop that asks a worker to generate asks the servers then, and knows nothing of it.
 *
 * Requests go to the live server with the fewest under way; a response that continues, to the one that drew it. Before a
 * generation the servers read the weights of the last update from a directory that they share with this run. A server that does
 * not answer is lost: its requests go to the others, and it is asked again when there are new weights. Log-probs are the servers',
 * so they are not training's: a run corrects for that (docs/external_engines.md).
 * Invariant: no server draws a token for a run whose current weights it does not have. */
#ifndef VERLC_EXTERNAL_ENGINE_EXTERNAL_ENGINE_H
#define VERLC_EXTERNAL_ENGINE_EXTERNAL_ENGINE_H

#include "ranks/worker.h"

#include "track/track.h"

struct external_engine_args { /* strings are borrowed until external_engine_close */
    const char *const *urls;  /* "http://HOST:PORT" */
    int64_t n_urls;
    const char *kind;        /* of all of them; NULL: each is asked */
    const char *weights_dir; /* where weights are written for them; emptied first, so it is this run's alone */
    const char
        *update_command;    /* for the shell, instead of a server's own calls, with VERLC_WEIGHTS and VERLC_ENGINE_URL; or NULL */
    const char *model_dir;  /* the policy's, for its vocabulary and end tokens */
    int64_t max_concurrent; /* requests under way, at all servers together */
    int64_t n_retries;      /* of a request whose answer is wrong */
    int64_t max_len;        /* longest prompt and response */
    double timeout_s;       /* of a request, and of an update of weights */
};

struct external_engine;
/* Asks each server who it is. ERR_INVAL: an address or a key is wrong, or a server takes no responses of that length; ERR_IO: one
 * does not answer. */
int external_engine_open(struct external_engine **out, const struct external_engine_args *a);
void external_engine_close(struct external_engine *x); /* NULL ok; after the worker's last call */
/* w generates by x from here on; tok: the policy's, borrowed. */
void external_engine_attach(struct external_engine *x, struct worker *w, const struct tokenizer *tok);
/* rollout/engine_*: since the last call. */
void external_engine_metrics(struct external_engine *x, struct metrics *m);

#endif
