/* fuzz_episode.c - the episodes of a row that `verlc eval` reads: a byte for the number of responses, then JSON. What is read is as
 * many records as there are responses, each can be read again, and its metrics are shares. */
#include "fuzz.h"

#include "base/json.h"
#include "generate/episode_record.h"
#include "ppo/stages/stages.h"

#include <math.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    fuzz_quiet();
    json_t *list, *records;
    if (n == 0 || json_parse(&list, (const char *)data + 1, n - 1, "row") < 0) return 0;
    const int rc = episode_records_read(&records, list, data[0]);
    fuzz_check_rc(rc);
    if (rc == 0) {
        CHECK(json_array_size(records) == data[0]);
        for (size_t i = 0; i < data[0]; i++) {
            struct episode e;
            CHECK(episode_read(&e, json_array_get(records, i)) == 0);
            CHECK(json_is_object(e.extra_info) && e.num_turns >= 0 && (!e.has_score || isfinite(e.score)));
        }
        struct metrics m = {0};
        struct batch b;
        struct batch_col *c;
        batch_init(&b, data[0]);
        CHECK(batch_add(&b, BATCH_EPISODE, BATCH_JSON, NULL, NULL, &c) == 0);
        for (size_t i = 0; i < data[0]; i++) {
            json_decref(c->json[i]);
            c->json[i] = json_incref(json_array_get(records, i));
        }
        ppo_episode_metrics(&m, &b);
        for (int64_t i = 0; i < m.n; i++) CHECK(m.items[i].value >= 0 && m.items[i].value <= 255);
        metrics_free(&m);
        batch_free(&b);
        json_decref(records);
    }
    json_decref(list);
    return 0;
}
