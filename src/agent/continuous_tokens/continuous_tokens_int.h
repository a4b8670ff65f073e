/* continuous_tokens_int.h - what the files of continuous tokens share. */
#ifndef VERLC_AGENT_CONTINUOUS_TOKENS_INT_H
#define VERLC_AGENT_CONTINUOUS_TOKENS_INT_H

#include "agent/continuous_tokens/continuous_tokens.h"
#include "base/map.h"

#include <stdbool.h>

enum continuous_tokens__family {
    CONTINUOUS_GENERIC,
    CONTINUOUS_QWEN,
    CONTINUOUS_MINIMAX,
    CONTINUOUS_GLM,
    CONTINUOUS_GEMMA4,
    CONTINUOUS_GPT_OSS,
    CONTINUOUS_DEEPSEEK,
    CONTINUOUS_DEEPSEEK_V4
};

struct continuous_tokens__frames;
struct continuous_tokens {
    const struct tokenizer *tok; /* borrowed */
    enum continuous_tokens__family family;
    json_t *kwargs;
    struct chat_template *chat;      /* NULL: deepseek_v4, which has its own encoder */
    int32_t newline, close;          /* Qwen, MiniMax; close: what ends a turn, deepseek_v4's too */
    int32_t observation, user;       /* GLM */
    int32_t tool_response;           /* Gemma 4 */
    struct text_ids separator;       /* Gemma 4: <turn|> and newline; DeepSeek: the end of tool outputs */
    struct text_ids header;          /* Gemma 4: what opens the model's turn */
    json_t *toolset;                 /* the array of tools that came last */
    int64_t toolset_no;              /* its number; -1: no tools */
    struct map toolsets;             /* tools as text -> number */
    struct map prefixes;             /* toolset and messages -> index of prefix */
    struct continuous_tokens__text { /* a render */
        struct buf text;
        bool is_text; /* false: ids alone are known */
        struct text_ids ids;
        bool has_ids;
    } * prefix;
    int64_t n_prefix, prefix_cap;
    struct continuous_tokens__frames *frames;
};

/* ---- continuous_tokens_render.c ---- */

void continuous_tokens__text_free(struct continuous_tokens__text *t);
int continuous_tokens__ids(const struct continuous_tokens *c, struct continuous_tokens__text *t); /* makes t->ids */
/* Renders of several conversations, in one request to the helper. A template that raises gets an empty user message in front,
 * whose part is cut off (verl's apply_chat_template). */
struct continuous_tokens__request {
    const json_t *messages;
    bool generation_prompt;
};
int continuous_tokens__render(struct continuous_tokens *c, const struct continuous_tokens__request *q, int64_t n,
                              const json_t *tools, struct continuous_tokens__text *out);
/* Appends what render(prefix + group) has more than render(prefix), by ids. ERR_INPUT: no prefix. */
struct continuous_tokens__delta {
    const json_t *prefix, *group;
    bool generation_prompt;
    bool keep; /* the prefix is one that comes again */
};
int continuous_tokens__delta(struct continuous_tokens *c, const struct continuous_tokens__delta *d, const json_t *tools,
                             struct text_ids *ids);
int64_t continuous_tokens__toolset(struct continuous_tokens *c, const json_t *tools); /* their number */
void continuous_tokens__forget(struct continuous_tokens *c);                          /* frees what was kept of renders */

/* ---- continuous_tokens_frame.c ---- */

/* Appends the ids of a group whose text is a known frame around its messages' texts: 1; 0: it has none. */
int continuous_tokens__frame(struct continuous_tokens *c, const json_t *group, bool generation_prompt, const json_t *tools,
                             struct text_ids *ids);
void continuous_tokens__frames_free(struct continuous_tokens__frames *f);

/* ---- continuous_tokens_message.c ---- */

bool continuous_tokens__truth(const json_t *v);                          /* Python's bool() */
int continuous_tokens__str(const json_t *v, struct buf *out);            /* appends str(v); ERR_INPUT: a list or object */
int continuous_tokens__content(const json_t *v, struct buf *out);        /* a content's text: text, or its text parts joined */
void continuous_tokens__quote(const char *p, size_t n, struct buf *out); /* appends json.dumps(text, ensure_ascii=False) */
const char *continuous_tokens__role(const json_t *message);              /* "": none */
/* The synthetic system and user message, and before a run of tool messages (NULL: none) the assistant message that calls them. */
json_t *continuous_tokens__synthetic(const struct continuous_tokens *c, const json_t *tool_messages);
/* The tool's name of group[i], which stands behind messages[0, n_before). Appends it. */
int continuous_tokens__tool_name(const json_t *group, size_t i, const json_t *messages, size_t n_before, struct buf *out);

/* ---- continuous_tokens_deepseek_v4.c ---- */

int continuous_tokens__v4_begin(struct continuous_tokens *c, const json_t *messages, const json_t *tools, struct text_ids *ids);
int continuous_tokens__v4_append(struct continuous_tokens *c, const json_t *messages, int64_t n_old, const json_t *tools,
                                 struct text_ids *ids);

#endif
