/* serve_plan.c - `verlc serve --plan`: the memory of a server, and whether it fits; nothing is opened but its device. Of a GPU that
 * need not be there with --gpu. An adapter that each rank has whole is of what --memory leaves.
 * Invariant: its sizes are those that a server opens (serve_model_size). */
#include "cmd/serve/serve_ranks.h"

#include "base/err.h"
#include "plan/memory_rows.h"

#include <stdio.h>

static int open_device(struct dev *dev, const struct serve_ranks_args *a, int64_t gpu, int ranks) {
    if (gpu > 0) {
        dev_open_cuda_planned(dev, (size_t)gpu);
        return 0;
    }
    TRY(dev_open_named(dev, a->device, (int)a->threads, NULL));
    const int there = dev_has_own_memory(dev) ? dev_cuda_count() : ranks;
    if (ranks > there) dev->mem_total /= (size_t)((ranks + there - 1) / there); /* as ranks that share a GPU */
    return 0;
}

static bool print(const struct serve_ranks_args *a, const struct serve_model_size *s, const struct model_config *c, size_t there,
                  struct buf *out) {
    const int64_t ranks = a->model.together * a->copies;
    const bool fits = s->weights + s->kv + s->passes <= there;
    char samples[96];
    const int64_t tokens = s->decoder.n_kv_blocks * KV_BLOCK_LEN;
    buf_addf(out, "memory plan: a server with %.3f B parameters, %s, up to %lld tokens", (double)model_config_params(c) / 1e9,
             dtype_name(a->model.act), (long long)s->max_len);
    if (ranks > 1) buf_addf(out, "; each of %lld ranks:", (long long)ranks);
    buf_adds(out, "\n");
    struct memory_rows rows = {.text = out, .narrow = true};
    snprintf(samples, sizeof samples, "%lld tokens: %.1f samples of full length; up to %lld at a time", (long long)tokens,
             (double)tokens / (double)s->max_len, (long long)s->decoder.max_seqs);
    memory_rows_open(&rows, s->weights + s->kv + s->passes, there);
    memory_row(&rows, "weights", s->weights, a->model.together > 1 ? "a part of all matrices, room for gathers" : "");
    memory_row(&rows, "KV cache", s->kv, samples);
    memory_row(&rows, "activations", s->passes, "");
    memory_row_text(&rows, "device", there, "");
    if (a->model.together > 1)
        buf_addf(out, "  tensor parallel: %lld ranks have the model together\n", (long long)a->model.together);
    if (a->copies > 1) buf_addf(out, "  data parallel: %lld copies of the model\n", (long long)a->copies);
    if (!fits)
        buf_adds(out, "  does not fit: a larger --tensor-parallel-size, or lower --max-model-len and --max-num-batched-tokens\n");
    json_decref(rows.json);
    return fits;
}

int serve_plan(const struct serve_ranks_args *a, const struct model_config *c, int64_t gpu) {
    const int ranks = (int)(a->model.together * a->copies);
    struct dev dev = {0};
    struct serve_model_size s;
    struct buf text = {0};
    int rc = 0;
    TRY(open_device(&dev, a, gpu, ranks));
    TRYG(serve_model_size(&s, &dev, &a->model, c, ranks), end);
    const size_t there = dev_has_own_memory(&dev) ? dev.mem_total : dev.mem_total / (size_t)ranks;
    const bool fits = print(a, &s, c, there, &text);
    fputs(text.p, stdout);
    rc = fits ? 0 : err_exit_status(ERR_NOMEM);
end:
    buf_free(&text);
    dev_close(&dev);
    return rc;
}
