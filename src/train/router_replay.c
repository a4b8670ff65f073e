/* router_replay.c - see router_replay.h. */
#include "train/router_replay.h"

#include "base/err.h"
#include "model/forward.h"

#include <string.h>

enum { NONE = 255 /* of a byte; experts of a model whose choices are bytes have lower numbers */ };

static size_t choice_bytes(const struct model_config *c) { return c->n_experts > NONE ? 2 : 1; }

int64_t router_replay_words(const struct model_config *c) {
    return (model_router_layers(c) * c->n_choices * (int64_t)choice_bytes(c) + 3) / 4;
}

void router_replay_pack(const struct model_config *c, const int32_t *choices, int64_t rows, int64_t at, int64_t n, int32_t *words) {
    const int64_t layers = model_router_layers(c), k = c->n_choices, size = router_replay_words(c);
    const bool wide = choice_bytes(c) == 2;
    memset(words, 0, (size_t)(n * size) * sizeof *words);
    for (int64_t t = 0; t < n; t++, words += size)
        for (int64_t i = 0; i < layers * k; i++) {
            const int32_t id = choices[(i / k * rows + at + t) * k + i % k];
            if (wide) ((uint16_t *)(void *)words)[i] = (uint16_t)id;
            else ((uint8_t *)words)[i] = (uint8_t)id;
        }
}

int router_replay_unpack(const struct model_config *c, const int32_t *words, int64_t n, int64_t rows, int64_t at,
                         int32_t *choices) {
    const int64_t layers = model_router_layers(c), k = c->n_choices, size = router_replay_words(c);
    const bool wide = choice_bytes(c) == 2;
    for (int64_t t = 0; t < n; t++, words += size)
        for (int64_t i = 0; i < layers * k; i++) {
            const int32_t none = wide ? UINT16_MAX : NONE;
            const int32_t id = wide ? ((const uint16_t *)(const void *)words)[i] : ((const uint8_t *)words)[i];
            if (id != none && id >= c->n_experts)
                FAIL(ERR_FORMAT, "routed_experts: expert %d of %lld", id, (long long)c->n_experts);
            choices[(i / k * rows + at + t) * k + i % k] = id == none ? -1 : id;
        }
    return 0;
}
