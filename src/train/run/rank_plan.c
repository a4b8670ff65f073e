/* rank_plan.c - see rank_plan.h. */
#include "train/run/rank_plan.h"

json_t *rank_plan_print(const struct rank_plan *r, struct buf *out) {
    const struct {
        const char *what, *name;
        size_t bytes;
    } layouts[] = {{"", "whole", r->least},
                   {"; one rank alone ", "one_rank", r->one},
                   {"; not built: reference sharded ", "ref", r->ref},
                   {r->ref > 0 ? ", all weights sharded " : "; not built: all weights sharded ", "sharded", r->sharded}};
    const int64_t chunks = (r->micro + r->chunk - 1) / r->chunk, waves = (chunks + r->n - 1) / r->n, idle = waves * r->n - chunks;
    json_t *least = json_object();
    char in_chunks[64] = "";
    if (r->chunk > 1) snprintf(in_chunks, sizeof in_chunks, " in %lld chunk%s", (long long)chunks, chunks == 1 ? "" : "s");
    buf_addf(
        out,
        "  layout: weights whole on each of %lld ranks; master, gradients and optimizer state sharded, the largest shard %.2f %% "
        "over the mean\n",
        (long long)r->n, 100 * r->uneven);
    buf_addf(out, "  an optimizer step at full length: %lld micro-batches%s in %lld wave%s, %lld rank%s idle in the last%s\n",
             (long long)r->micro, in_chunks, (long long)waves, waves == 1 ? "" : "s", (long long)idle, idle == 1 ? "" : "s",
             chunks >= r->n    ? ""
             : r->micro < r->n ? ": smaller micro-batches would use them"
                               : ": a smaller grad_chunk would use them");
    buf_adds(out, "  needed at least: ");
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        if (layouts[i].bytes == 0) continue;
        buf_addf(out, "%s%.2f GiB%s", layouts[i].what, (double)layouts[i].bytes / 0x1p30,
                 layouts[i].bytes <= r->limit ? " (fits)" : "");
        json_object_set_new(least, layouts[i].name, json_integer((json_int_t)layouts[i].bytes));
    }
    buf_adds(out, "\n");
    return json_pack("{s:I, s:I, s:s, s:I, s:I, s:I, s:I, s:f, s:o}", "n", (json_int_t)r->n, "of_a_host", (json_int_t)r->local,
                     "layout", "whole", "micro_batches", (json_int_t)r->micro, "chunks", (json_int_t)chunks, "waves",
                     (json_int_t)waves, "idle_in_last_wave", (json_int_t)idle, "largest_shard_over_mean", r->uneven, "least",
                     least);
}
