/* segments.c - who wrote which tokens of a response: segments of the policy and of an environment, and the mask of the policy's.
 *
 * Invariant: a row's segments follow each other without a gap and end where its response ends. */
#include "data/data.h"

#include <string.h>

int64_t batch_n_segments(const struct batch *b, int64_t row) {
    const struct batch_col *c = batch_find(b, BATCH_SEGMENTS);
    return c ? batch_len(c, row) / 2 : 1;
}

struct segment batch_segment(const struct batch *b, int64_t row, int64_t k) {
    const struct batch_col *c = batch_find(b, BATCH_SEGMENTS);
    if (!c) return (struct segment){SEGMENT_POLICY, 0, batch_len(batch_find(b, "responses"), row)};
    const int32_t *pair = c->i32 + c->off[row];
    struct segment s = {.n = pair[2 * k], .kind = pair[2 * k + 1] == SEGMENT_POLICY ? SEGMENT_POLICY : SEGMENT_ENVIRONMENT};
    for (int64_t i = 0; i < k; i++) s.begin += pair[2 * i];
    return s;
}

void batch_policy_mask(const struct batch *b, uint8_t *mask) {
    const struct batch_col *responses = batch_find(b, "responses");
    for (int64_t i = 0; i < b->n_rows; i++) {
        int64_t end = 0;
        for (int64_t k = 0; k < batch_n_segments(b, i); k++) {
            const struct segment s = batch_segment(b, i, k);
            CHECK(s.n >= 0 && s.n <= batch_len(responses, i) - end);
            memset(mask + responses->off[i] + end, s.kind == SEGMENT_POLICY, (size_t)s.n);
            end += s.n;
        }
        CHECK(end == batch_len(responses, i));
    }
}
