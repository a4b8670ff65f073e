/* tool_format.c - in which format a model writes calls of tools: by what its chat template shows it.
 *
 * Invariant: a template that shows no known format gives none; nothing is guessed by a model's name. */
#include "serve/serve_int.h"

#include <string.h>

/* The first whose text is in the template; those with a part of another's text come first. */
static const struct {
    const char *text, *format;
} shown[] = {{"<seed:tool_call>", "seed"},
             {"<minimax:tool_call>", "minimax"},
             {"<|tool_calls_section_begin|>", "kimi"},
             {"\xef\xbd\x9c"
              "DSML"
              "\xef\xbd\x9c",
              "deepseek_v4"},
             {"<|tool_call>", "gemma4"},
             {"<|channel|>", "gpt-oss"},
             {"<arg_key>", "glm"},
             {"<function=", "qwen3_coder"},
             {"<tool_call>", "hermes"},
             {"<|python_tag|>", "llama3_json"},
             {"{\"name\": function name, \"parameters\":", "llama3_json"}};

const char *serve__tool_format(const struct tokenizer *tok) {
    const char *const templates[] = {tokenizer_chat_template(tok, true), tokenizer_chat_template(tok, false)};
    for (int t = 0; t < 2; t++)
        for (size_t i = 0; templates[t] && i < sizeof shown / sizeof *shown; i++)
            if (strstr(templates[t], shown[i].text)) return shown[i].format;
    return NULL;
}

const char *const *serve__tool_markers(const char *format) {
    static const struct {
        const char *format, *markers[SERVE_MARKERS + 1];
    } rows[] = {{"hermes", {"<tool_call>"}},
                {"qwen3_coder", {"<tool_call>"}},
                {"glm", {"<tool_call>"}},
                {"seed", {"<seed:tool_call>"}},
                {"minimax", {"<minimax:tool_call>"}},
                {"kimi", {"<|tool_calls_section_begin|>"}},
                {"deepseek_v4",
                 {"<\xef\xbd\x9c"
                  "DSML"
                  "\xef\xbd\x9c",
                  "\xef\xbd\x9c"
                  "DSML"
                  "\xef\xbd\x9c"}},
                {"gemma4", {"<|tool_call>"}}};
    static const char *const whole_turn[SERVE_MARKERS + 1] = {""};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (strcmp(rows[i].format, format) == 0) return rows[i].markers;
    return whole_turn;
}
