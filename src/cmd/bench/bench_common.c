/* bench_common.c - what several subjects of `verlc bench` use: options, the device of a rank, random prompts. It knows none of
 * them. */
#include "cmd/bench/bench.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/rng.h"
#include "ranks/worker_calls.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int bench_keep(const char *recompute, struct model_keep *out) {
    if (strcmp(recompute, "none") == 0) *out = MODEL_KEEP_ALL;
    else if (strcmp(recompute, "mlp") == 0) *out = MODEL_KEEP_ATTENTION;
    else if (strcmp(recompute, "layer") == 0) *out = MODEL_KEEP_LAYER;
    else FAIL(ERR_INVAL, "--recompute %s: expected none, mlp or layer", recompute);
    return 0;
}

int bench_open_rank_device(struct comm *c, const char *device, int64_t threads, struct dev *d, int *gpu) {
    char why[256], name[32];
    const bool any = strcmp(device, "auto") == 0, cuda = strcmp(device, "cuda") == 0 || (any && dev_cuda_present(why, sizeof why));
    *gpu = -1;
    if (cuda) TRY(rank_gpu(c, gpu));
    snprintf(name, sizeof name, "cuda:%d", *gpu);
    return dev_open_named(d, cuda ? name : any ? "cpu" : device, (int)threads, NULL);
}

int bench_submit(struct engine *e, const struct bench_prompts *p) {
    struct rng r = {.seed = 2, .stream = RNG_TEST};
    int32_t *ids = xmalloc((size_t)p->length * 4);
    int rc = 0;
    for (int64_t i = 0; i < p->prompts && rc == 0; i++) {
        for (int64_t k = 0; k < p->length; k++) ids[k] = (int32_t)rng_below(&r, (uint64_t)p->vocab);
        for (int64_t k = p->repeat; p->repeat > 0 && k < p->length; k++) ids[k] = ids[k - p->repeat];
        for (int64_t k = 0; p->text && k < p->length; k++) ids[k] = p->text[(i + k) % p->n_text];
        const struct engine_request q = {.prompt = ids,
                                         .n_prompt = p->length,
                                         .n = p->n,
                                         .max_tokens = p->max_tokens,
                                         .temperature = 1,
                                         .top_p = 1,
                                         .repetition_penalty = 1,
                                         .top_k = -1,
                                         .seed = 3,
                                         .uid = (uint64_t)i,
                                         .ignore_eos = true,
                                         .user = (void *)(intptr_t)i};
        rc = engine_submit(e, &q, NULL);
    }
    free(ids);
    return rc;
}
