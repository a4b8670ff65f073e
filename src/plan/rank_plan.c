/* rank_plan.c - see rank_plan.h. */
#include "plan/rank_plan.h"

#include "algo/micro_batch_balance.h"

static const struct {
    const char *name, *sharded, *needs; /* needs: in the line of what is needed at least */
} TEXTS[LAYOUTS] = {
    [LAYOUT_AUTO] = {"auto", "", ""},
    [LAYOUT_WHOLE] = {"whole", "weights whole on each of %lld ranks", "whole "},
    [LAYOUT_REF] = {"ref", "the weights of reference and teacher sharded over %lld ranks, others whole", "reference sharded "},
    [LAYOUT_SHARDED] = {"sharded", "the weights of policy, reference, teacher and critic sharded over %lld ranks", "all sharded "},
};

const char *rank_plan_layout_name(enum weight_layout l) { return TEXTS[l].name; }

int64_t rank_plan_micro_batches(struct micro_batch_limits cut, int64_t max_rows, int64_t longest, int64_t samples) {
    const int64_t each = cut.max_seqs > 0 ? cut.max_seqs : max_rows / longest;
    return algo_update_micro_batch_count(samples, each > 0 ? each : 1);
}

static void need(const struct rank_plan *r, const char *text, const char *name, size_t bytes, json_t *least, struct buf *out) {
    if (bytes == 0) return;
    buf_addf(out, "%s%s%.2f GiB%s", json_object_size(least) ? "; " : "", text, (double)bytes / 0x1p30,
             bytes <= r->limit ? " (fits)" : "");
    json_object_set_new(least, name, json_integer((json_int_t)bytes));
}

json_t *rank_plan_print(const struct rank_plan *r, struct buf *out) {
    const int64_t each = r->context > 1 ? r->context : 1, groups = r->n / each;
    const int64_t chunks = (r->micro + r->chunk - 1) / r->chunk, waves = (chunks + groups - 1) / groups,
                  idle = waves * r->n - chunks * each;
    const char *const name = rank_plan_layout_name(r->layout);
    json_t *least = json_object();
    char in_chunks[64] = "";
    if (r->chunk > 1) snprintf(in_chunks, sizeof in_chunks, " in %lld chunk%s", (long long)chunks, chunks == 1 ? "" : "s");
    buf_addf(out, "  layout %s: ", name);
    buf_addf(out, TEXTS[r->layout].sharded, (long long)r->n);
    if (r->layout == LAYOUT_SHARDED && r->together == 1) buf_adds(out, ", the policy's gathered to generate");
    buf_addf(out, "; master, gradients and optimizer state sharded, the largest shard %.2f %% over the mean\n", 100 * r->uneven);
    if (r->why) buf_addf(out, "    %s\n", r->why);
    if (r->together > 1)
        buf_addf(out,
                 "  tensor parallel: %lld ranks generate together, each with its heads%s and rows of the layers' matrices%s%s\n",
                 (long long)r->together, r->experts ? ", experts" : "", r->why_together ? "; " : "",
                 r->why_together ? r->why_together : "");
    else if (r->why_together) buf_addf(out, "  tensor parallel: 1, %s\n", r->why_together);
    if (r->expert_ranks > 1)
        buf_addf(out, "  expert parallel updates: each of %lld ranks has its experts of every layer, whole%s%s\n",
                 (long long)r->expert_ranks, r->why_experts ? "; " : "", r->why_experts ? r->why_experts : "");
    else if (r->why_experts) buf_addf(out, "  expert parallel updates: none, %s\n", r->why_experts);
    if (each > 1)
        buf_addf(out, "  context parallel: %lld ranks compute a micro-batch together, each a part of its rows", (long long)each);
    if (each > 1 && r->parts > each) buf_addf(out, "; gradients are summed in %lld parts", (long long)r->parts);
    if (each > 1 && r->key_heads > 0 && each > r->key_heads)
        buf_addf(out, "; %lld of them for attention, which has so many key heads", (long long)r->key_heads);
    if (each > 1) buf_adds(out, "\n");
    buf_addf(out, "  an optimizer step at full length: %lld micro-batches%s in %lld wave%s, %lld rank%s idle in the last%s\n",
             (long long)r->micro, in_chunks, (long long)waves, waves == 1 ? "" : "s", (long long)idle, idle == 1 ? "" : "s",
             chunks >= groups    ? ""
             : r->micro < groups ? ": smaller micro-batches would use them"
                                 : ": a smaller grad_chunk would use them");
    buf_adds(out, "  needed at least: ");
    for (int l = LAYOUT_WHOLE; l < LAYOUTS; l++) need(r, TEXTS[l].needs, TEXTS[l].name, r->least[l], least, out);
    need(r, "one rank alone ", "one_rank", r->one, least, out);
    buf_adds(out, "\n");
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:s, s:I, s:I, s:I, s:I, s:f, s:o}", "n", (json_int_t)r->n, "tensor_parallel",
                     (json_int_t)(r->together > 1 ? r->together : 1), "expert_parallel",
                     (json_int_t)(r->expert_ranks > 1 ? r->expert_ranks : 1), "context_parallel", (json_int_t)each, "of_a_host",
                     (json_int_t)r->local, "layout", name, "micro_batches", (json_int_t)r->micro, "chunks", (json_int_t)chunks,
                     "waves", (json_int_t)waves, "idle_in_last_wave", (json_int_t)idle, "largest_shard_over_mean", r->uneven,
                     "least", least);
}
