/* text_chat.c - chat templates, rendered by the Python helper verlc_helpers.chat_template.
 *
 * Jinja is Python by nature, so the helper renders in Jinja2's sandbox as transformers
 * does; this file sends the template once and a request per prompt.
 * Invariant: a model directory's template is text to be rendered, never code run here. */
#include "text/text_int.h"

#include "base/json.h"
#include "helper/helper.h"

#include <stdlib.h>
#include <string.h>

static const double RENDER_TIMEOUT_S = 30; /* a template is a loop over a few messages */
static const int64_t RENDER_CPU_S = 20;

struct chat_template {
    const struct tokenizer *tok; /* borrowed */
    struct helper *helper;
};

int chat_template_create(struct chat_template **out, const struct tokenizer *tok) {
    const char *text = tokenizer_chat_template(tok, false), *tools = tokenizer_chat_template(tok, true);
    if (!text && !tools)
        FAIL(ERR_INPUT,
             "the model has no chat template; add chat_template.jinja to its directory, or \"chat_template\" "
             "to its tokenizer_config.json");
    struct chat_template *c = xcalloc(1, sizeof *c);
    json_t *init = json_pack("{s:s?, s:s?, s:O}", "template", text, "tool_template", tools, "special",
                             tokenizer_special_map(tok));
    CHECK(init);
    const int rc = helper_create(
        &c->helper,
        &(struct helper_args){.module = "verlc_helpers.chat_template", .init = init, .cpu_s = RENDER_CPU_S});
    json_decref(init);
    if (rc < 0) {
        free(c);
        return err_pass(rc, __FILE__, __LINE__);
    }
    c->tok = tok;
    *out = c;
    return 0;
}

void chat_template_destroy(struct chat_template *c) {
    if (!c) return;
    helper_destroy(c->helper);
    free(c);
}

int chat_template_render(struct chat_template *c, const json_t *request, struct buf *out) {
    json_t *reply;
    TRY(helper_call(c->helper, request, RENDER_TIMEOUT_S, &reply));
    int rc = 0;
    if (json_is_string(reply)) rc = buf_add(out, json_string_value(reply), json_string_length(reply));
    else rc = err_set(ERR_HELPER, __FILE__, __LINE__, "chat template: the helper's reply is not a text");
    json_decref(reply);
    return rc;
}

int chat_template_encode(struct chat_template *c, const json_t *request, struct buf *text,
                         struct text_ids *ids) {
    struct buf own = {0}, *b = text ? text : &own;
    const size_t had = b->n;
    int rc = chat_template_render(c, request, b);
    if (rc == 0) rc = tokenizer_encode(c->tok, b->p ? b->p + had : "", b->n - had, false, ids);
    buf_free(&own);
    return rc;
}
