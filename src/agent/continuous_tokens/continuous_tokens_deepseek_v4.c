/* continuous_tokens_deepseek_v4.c - DeepSeek V4 writes its conversations by an encoder of its own, not by a chat template.
 *
 * As verl 0.9.1's verl/utils/tokenizer/deepseek.py, encode_messages.
 * Invariant: what is appended is encoded alone, and then stands behind what was there. */
#include "agent/continuous_tokens/continuous_tokens_int.h"
#include "agent/tool_parser/tool_parser_int.h"
#include "base/err.h"
#include "base/json.h"

#include <string.h>

static const char EFFORT_MAX[] =
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, rigorously "
    "stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, and "
    "rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n";

static const char TOOLS_HEAD[] =
    "## Tools\n\n"
    "You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "
    "\"<｜DSML｜tool_calls>\" block like the following:\n\n"
    "<｜DSML｜tool_calls>\n"
    "<｜DSML｜invoke name=\"$TOOL_NAME\">\n"
    "<｜DSML｜parameter name=\"$PARAMETER_NAME\" string=\"true|false\">$PARAMETER_VALUE</｜DSML｜parameter>\n"
    "...\n"
    "</｜DSML｜invoke>\n"
    "<｜DSML｜invoke name=\"$TOOL_NAME2\">\n"
    "...\n"
    "</｜DSML｜invoke>\n"
    "</｜DSML｜tool_calls>\n\n"
    "String parameters should be specified as is and set `string=\"true\"`. For all other types (numbers, booleans, arrays, "
    "objects), pass the value in JSON format and set `string=\"false\"`.\n\n"
    "If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE "
    "any tool calls or final response.\n\n"
    "Otherwise, output directly after </think> with tool calls or final response.\n\n"
    "### Available Tool Schemas\n\n";
static const char TOOLS_TAIL[] =
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n";

struct encoder {
    const json_t *messages; /* encoded from `from` on */
    size_t from, last_user; /* last_user: SIZE_MAX: none */
    bool think, drop;
    struct buf out;
};

/* json.dumps(v, ensure_ascii=False). */
static int add_json(struct buf *out, const json_t *v) {
    struct buf line = {0};
    struct tool_parser__memory m = {0};
    int rc = json_dump_line(&line, v);
    if (rc == 0) {
        const struct tool_parser__value *value = tool_parser__json(&m, (struct tool_parser__span){line.p, line.n});
        if (!value || !tool_parser__dumps(out, value))
            rc =
                err_set(ERR_INPUT, __FILE__, __LINE__, "continuous tokens: a tool's schema or arguments cannot be written as JSON");
    }
    tool_parser__memory_free(&m);
    buf_free(&line);
    return rc;
}

static int add_text(struct buf *out, const json_t *content) {
    if (!json_is_array(content)) return content ? continuous_tokens__content(content, out) : 0;
    size_t i;
    const json_t *part;
    json_array_foreach((json_t *)(uintptr_t)content, i, part) if (!json_is_object(part))
        FAIL(ERR_INPUT, "continuous tokens: a part of a content that is no object");
    return continuous_tokens__content(content, out);
}

static int add_tools(struct buf *out, const json_t *tools) {
    if (!json_is_array(tools)) FAIL(ERR_INPUT, "continuous tokens: \"tools\" is not a list");
    buf_adds(out, "\n\n");
    buf_adds(out, TOOLS_HEAD);
    for (size_t i = 0; i < json_array_size(tools); i++) {
        const json_t *tool = json_array_get(tools, i), *function = json_object_get(tool, "function");
        if (!json_is_object(tool)) FAIL(ERR_INPUT, "continuous tokens: a tool's schema is no object");
        if (i) buf_addc(out, '\n');
        TRY(add_json(out, function ? function : tool));
    }
    return buf_adds(out, TOOLS_TAIL);
}

static void add_parameter(struct buf *out, struct tool_parser__span name, const struct tool_parser__value *v) {
    buf_adds(out, "<｜DSML｜parameter name=\"");
    buf_add(out, name.p, name.n);
    buf_addf(out, "\" string=\"%s\">", v->kind == TOOL_STRING ? "true" : "false");
    if (v->kind == TOOL_STRING) buf_add(out, v->text.p, v->text.n);
    else tool_parser__dumps(out, v);
    buf_adds(out, "</｜DSML｜parameter>");
}

static int add_call(struct buf *out, const json_t *call) {
    const json_t *function = json_object_get(call, "function");
    if (!function) function = call;
    const json_t *name = json_object_get(function, "name"), *arguments = json_object_get(function, "arguments");
    struct tool_parser__memory m = {0};
    struct buf line = {0};
    buf_adds(out, "<｜DSML｜invoke name=\"");
    TRY(name ? continuous_tokens__str(name, out) : buf_adds(out, "None"));
    buf_adds(out, "\">\n");
    if (json_is_string(arguments)) buf_add(&line, json_string_value(arguments), json_string_length(arguments));
    else if (!arguments) buf_adds(&line, "null");
    else json_dump_line(&line, arguments);
    const struct tool_parser__span text = {line.p ? line.p : "", line.n};
    const struct tool_parser__value *v = tool_parser__json(&m, text);
    if (!v) v = tool_parser__string(&m, text.p, text.n);
    if (v->kind != TOOL_DICT) add_parameter(out, TOOL_SPAN("arguments"), v);
    else
        for (const struct tool_parser__item *i = v->first; i; i = i->next) {
            if (i != v->first) buf_addc(out, '\n');
            add_parameter(out, i->key->text, i->value);
        }
    tool_parser__memory_free(&m);
    buf_free(&line);
    return buf_adds(out, "\n</｜DSML｜invoke>");
}

static bool is_run(const char *role) { return strcmp(role, "user") == 0 || strcmp(role, "tool") == 0; }

static const json_t *message_before(const struct encoder *e, size_t i) {
    return i > e->from ? json_array_get(e->messages, i - 1) : NULL;
}

static int add_system(struct encoder *e, const json_t *m, bool developer) {
    const json_t *tools = json_object_get(m, "tools"), *format = json_object_get(m, "response_format");
    if (developer) buf_adds(&e->out, "<｜User｜>");
    TRY(add_text(&e->out, json_object_get(m, "content")));
    if (continuous_tokens__truth(tools)) TRY(add_tools(&e->out, tools));
    if (!continuous_tokens__truth(format)) return 0;
    buf_adds(&e->out, "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n");
    return add_json(&e->out, format);
}

static int add_user(struct encoder *e, const json_t *m, size_t i, bool tool) {
    const json_t *before = message_before(e, i);
    buf_adds(&e->out, before && is_run(continuous_tokens__role(before)) ? "\n\n" : "<｜User｜>");
    if (tool) buf_adds(&e->out, "<tool_result>");
    TRY(add_text(&e->out, json_object_get(m, "content")));
    return tool ? buf_adds(&e->out, "</tool_result>") : 0;
}

static int add_assistant(struct encoder *e, const json_t *m, size_t i) {
    const json_t *before = message_before(e, i), *calls = json_object_get(m, "tool_calls");
    if (!before || !continuous_tokens__truth(json_object_get(before, "task"))) {
        buf_adds(&e->out, "<｜Assistant｜>");
        if (e->think && (!e->drop || e->last_user == SIZE_MAX || i > e->last_user)) {
            const json_t *reasoning = json_object_get(m, "reasoning_content");
            if (!continuous_tokens__truth(reasoning)) reasoning = json_object_get(m, "reasoning");
            buf_adds(&e->out, "<think>");
            if (continuous_tokens__truth(reasoning)) {
                if (!json_is_string(reasoning)) FAIL(ERR_INPUT, "continuous tokens: an assistant's reasoning is no text");
                buf_add(&e->out, json_string_value(reasoning), json_string_length(reasoning));
            }
        }
        buf_adds(&e->out, "</think>");
    }
    TRY(add_text(&e->out, json_object_get(m, "content")));
    if (continuous_tokens__truth(calls)) {
        if (!json_is_array(calls)) FAIL(ERR_INPUT, "continuous tokens: \"tool_calls\" is not a list");
        buf_adds(&e->out, "\n\n<｜DSML｜tool_calls>\n");
        for (size_t k = 0; k < json_array_size(calls); k++) {
            if (k) buf_addc(&e->out, '\n');
            if (!json_is_object(json_array_get(calls, k))) FAIL(ERR_INPUT, "continuous tokens: a tool call is no object");
            TRY(add_call(&e->out, json_array_get(calls, k)));
        }
        buf_adds(&e->out, "\n</｜DSML｜tool_calls>");
    }
    return buf_adds(&e->out, "<｜end▁of▁sentence｜>");
}

static void add_turn(struct encoder *e) {
    buf_adds(&e->out, "<｜Assistant｜>");
    buf_adds(&e->out, e->think ? "<think>" : "</think>");
}

/* A quick instruction, behind the message that asks for it. */
static int add_task(struct encoder *e, const json_t *m, size_t i) {
    static const char *const tasks[] = {"action", "query", "authority", "domain", "title", "read_url"};
    const json_t *task = json_object_get(m, "task");
    const size_t n = json_array_size(e->messages);
    if (!continuous_tokens__truth(task)) return 0;
    const char *next = i + 1 < n ? continuous_tokens__role(json_array_get(e->messages, i + 1)) : "assistant";
    if (strcmp(next, "assistant") != 0 && strcmp(next, "latest_reminder") != 0) return 0;
    for (size_t k = 0; k < sizeof tasks / sizeof *tasks; k++) {
        if (!json_is_string(task) || strcmp(json_string_value(task), tasks[k]) != 0) continue;
        if (k == 0) add_turn(e);
        return buf_addf(&e->out, "<｜%s｜>", tasks[k]);
    }
    FAIL(ERR_INPUT, "continuous tokens: a message's task is none that DeepSeek V4 has");
}

static int add_message(struct encoder *e, const json_t *m, size_t i) {
    const char *role = continuous_tokens__role(m);
    const bool developer = strcmp(role, "developer") == 0;
    if (developer || strcmp(role, "system") == 0) TRY(add_system(e, m, developer));
    else if (strcmp(role, "latest_reminder") == 0) {
        buf_adds(&e->out, "<｜latest_reminder｜>");
        TRY(add_text(&e->out, json_object_get(m, "content")));
    } else if (is_run(role)) TRY(add_user(e, m, i, role[0] == 't'));
    else if (strcmp(role, "assistant") == 0) TRY(add_assistant(e, m, i));
    else FAIL(ERR_INPUT, "continuous tokens: DeepSeek V4 has no role \"%s\"", role);
    return add_task(e, m, i);
}

static bool kwarg(const struct continuous_tokens *c, const char *name) {
    return c->kwargs && continuous_tokens__truth(json_object_get(c->kwargs, name));
}

static bool any_tools(const json_t *messages, size_t lo, size_t hi) {
    for (size_t i = lo; i < hi; i++)
        if (continuous_tokens__truth(json_object_get(json_array_get(messages, i), "tools"))) return true;
    return false;
}

/* Messages from `from` on. first: with what opens a conversation. */
static int encode(struct continuous_tokens *c, const json_t *messages, size_t from, const json_t *tools, bool first,
                  struct text_ids *ids) {
    const char *effort = c->kwargs ? json_string_value(json_object_get(c->kwargs, "reasoning_effort")) : NULL;
    const json_t *drop = c->kwargs ? json_object_get(c->kwargs, "drop_thinking") : NULL;
    const size_t n = json_array_size(messages);
    struct encoder e = {.messages = messages, .from = from, .last_user = SIZE_MAX};
    int rc = 0;
    e.think = (kwarg(c, "enable_thinking") || kwarg(c, "thinking")) && !(effort && strcmp(effort, "none") == 0);
    e.drop =
        first && (!drop || continuous_tokens__truth(drop)) && !continuous_tokens__truth(tools) && !any_tools(messages, from, n);
    for (size_t i = from; i < n; i++) {
        const char *role = continuous_tokens__role(json_array_get(messages, i));
        if (is_run(role) || strcmp(role, "developer") == 0) e.last_user = i;
    }
    if (first) buf_adds(&e.out, "<｜begin▁of▁sentence｜>");
    if (e.think && effort && (strcmp(effort, "max") == 0 || strcmp(effort, "xhigh") == 0)) buf_adds(&e.out, EFFORT_MAX);
    if (continuous_tokens__truth(tools)) TRYG(add_tools(&e.out, tools), done);
    for (size_t i = from; i < n; i++) TRYG(add_message(&e, json_array_get(messages, i), i), done);
    if (n == from || !continuous_tokens__truth(json_object_get(json_array_get(messages, n - 1), "task"))) add_turn(&e);
    rc = tokenizer_encode(c->tok, e.out.p, e.out.n, false, ids);
done:
    buf_free(&e.out);
    return rc;
}

int continuous_tokens__v4_begin(struct continuous_tokens *c, const json_t *messages, const json_t *tools, struct text_ids *ids) {
    if (!json_is_array(messages)) FAIL(ERR_INPUT, "continuous tokens: the messages are not a list");
    return encode(c, messages, 0, tools, true, ids);
}

int continuous_tokens__v4_append(struct continuous_tokens *c, const json_t *messages, int64_t n_old, const json_t *tools,
                                 struct text_ids *ids) {
    const size_t old = (size_t)n_old, n = json_array_size(messages);
    const json_t *drop = c->kwargs ? json_object_get(c->kwargs, "drop_thinking") : NULL;
    if (n == old) return 0;
    if (strcmp(continuous_tokens__role(json_array_get(messages, n - 1)), "assistant") == 0)
        FAIL(ERR_INPUT, "continuous tokens: what is appended cannot end with an assistant message");
    const bool drops = (kwarg(c, "enable_thinking") || kwarg(c, "thinking")) && (!drop || continuous_tokens__truth(drop));
    if (drops && !continuous_tokens__truth(tools) && !any_tools(messages, 0, old))
        for (size_t i = 0; i < old; i++)
            if (strcmp(continuous_tokens__role(json_array_get(messages, i)), "assistant") == 0)
                FAIL(ERR_INPUT,
                     "continuous tokens: DeepSeek V4 drops the thinking of older turns, so nothing can be appended behind "
                     "them; give tools, or drop_thinking=False in data.apply_chat_template_kwargs");
    return encode(c, messages, old, NULL, false, ids);
}
