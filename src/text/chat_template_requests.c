/* chat_template_requests.c - chat templates, rendered by the Python helper verlc_helpers.chat_template_renderer.
 *
 * Jinja is Python by nature, so the helper renders in Jinja2's sandbox as transformers
 * does; this file sends the template once, then conversations one by one or many at a time.
 * Invariant: a model directory's template is text to be rendered, never code run here. */
#include "text/text_int.h"

#include "base/json.h"
#include "helper/helper.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const double RENDER_TIMEOUT_S = 30; /* a template is a loop over a few messages */
static const int64_t RENDER_CPU_S = 10;
enum { RENDER_MANY = 256 }; /* conversations of one request */

struct chat_template {
    const struct tokenizer *tok; /* borrowed */
    struct helper *helper;
};

static _Atomic int64_t template_date;

int64_t chat_template_date(void) {
    const time_t now = time(NULL);
    struct tm day;
    int64_t none = 0;
    CHECK(localtime_r(&now, &day));
    const int64_t today = 10000 * (day.tm_year + 1900LL) + 100 * (day.tm_mon + 1LL) + day.tm_mday;
    atomic_compare_exchange_strong(&template_date, &none, today);
    return template_date;
}

int chat_template_set_date(int64_t date) {
    const int64_t year = date / 10000, month = date / 100 % 100, day = date % 100;
    if (year < 1970 || year > 9999 || month < 1 || month > 12 || day < 1 || day > 31)
        FAIL(ERR_FORMAT, "%lld is no date of chat templates, such as 20250131", (long long)date);
    template_date = date;
    return 0;
}

int chat_template_create(struct chat_template **out, const struct tokenizer *tok) {
    const char *text = tokenizer_chat_template(tok, false), *tools = tokenizer_chat_template(tok, true);
    if (!text && !tools)
        FAIL(ERR_INPUT, "the model has no chat template; add chat_template.jinja to its directory, or \"chat_template\" "
                        "to its tokenizer_config.json");
    struct chat_template *c = xcalloc(1, sizeof *c);
    json_t *init = json_pack("{s:s?, s:s?, s:O, s:I}", "template", text, "tool_template", tools, "special",
                             tokenizer_special_map(tok), "date", (json_int_t)chat_template_date());
    CHECK(init);
    const int rc = helper_create(
        &c->helper, &(struct helper_args){.module = "verlc_helpers.chat_template_renderer", .init = init, .cpu_s = RENDER_CPU_S});
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

int chat_template_encode(struct chat_template *c, const json_t *request, struct buf *text, struct text_ids *ids) {
    struct buf own = {0}, *b = text ? text : &own;
    const size_t had = b->n;
    int rc = chat_template_render(c, request, b);
    if (rc == 0) rc = tokenizer_encode(c->tok, b->p ? b->p + had : "", b->n - had, false, ids);
    buf_free(&own);
    return rc;
}

/* common with the keys of one conversation over it. */
static json_t *one_request(const json_t *common, json_t *each) {
    json_t *q = common ? json_copy((json_t *)(uintptr_t)common) : json_object();
    json_object_update(q, each);
    return q;
}

/* Conversations [lo, lo + n) of `each` in one call; *reply gets the texts up to the first that fails. */
static int render_part(struct chat_template *c, const json_t *common, const json_t *each, int64_t lo, int64_t n, json_t **reply) {
    json_t *part = json_array();
    for (int64_t i = 0; i < n; i++) json_array_append(part, json_array_get(each, (size_t)(lo + i)));
    json_t *q = json_pack("{s:O*, s:o}", "common", common, "many", part);
    CHECK(q);
    const int rc = helper_call(c->helper, q, RENDER_TIMEOUT_S, reply);
    json_decref(q);
    TRY(rc);
    if (json_is_array(*reply) && (int64_t)json_array_size(*reply) <= n) return 0;
    json_decref(*reply);
    FAIL(ERR_HELPER, "chat template: the helper's reply is not a list of texts");
}

int chat_template_render_many(struct chat_template *c, const json_t *common, const json_t *each, json_t **texts) {
    const int64_t n = (int64_t)json_array_size(each);
    json_t *all = json_array();
    for (int64_t done = 0; done < n;) {
        const int64_t k = n - done < RENDER_MANY ? n - done : RENDER_MANY;
        json_t *reply;
        const int rc = render_part(c, common, each, done, k, &reply);
        if (rc < 0) {
            json_decref(all);
            return err_pass(rc, __FILE__, __LINE__);
        }
        int64_t got = 0;
        while (got < (int64_t)json_array_size(reply) && json_is_string(json_array_get(reply, (size_t)got)))
            json_array_append(all, json_array_get(reply, (size_t)got++));
        json_decref(reply);
        done += got;
        if (got == 0) break;
    }
    *texts = all;
    return 0;
}

int chat_template_constants(struct chat_template *c, bool with_tools, json_t **texts) {
    json_t *q = json_pack("{s:b}", "constants", with_tools);
    const int rc = helper_call(c->helper, q, RENDER_TIMEOUT_S, texts);
    json_decref(q);
    TRY(rc);
    if (json_is_array(*texts)) return 0;
    json_decref(*texts);
    FAIL(ERR_HELPER, "chat template: the helper's reply is not a list of texts");
}

int chat_template_encode_many(struct chat_template *c, const json_t *common, const json_t *each, struct text_ids *ids,
                              int64_t *done) {
    const int64_t n = (int64_t)json_array_size(each);
    *done = 0;
    while (*done < n) {
        const int64_t lo = *done, k = n - lo < RENDER_MANY ? n - lo : RENDER_MANY;
        json_t *reply, *text;
        size_t i;
        int rc = 0;
        TRY(render_part(c, common, each, lo, k, &reply));
        json_array_foreach(reply, i, text) {
            rc = json_is_string(text)
                     ? tokenizer_encode(c->tok, json_string_value(text), json_string_length(text), false, &ids[*done])
                     : err_set(ERR_HELPER, __FILE__, __LINE__, "chat template: the helper's reply is not a text");
            if (rc < 0) break;
            ++*done;
        }
        json_decref(reply);
        TRY(rc);
        if (*done == lo + k) continue;
        json_t *q = one_request(common, json_array_get(each, (size_t)*done)); /* alone, for its own error */
        rc = chat_template_encode(c, q, NULL, &ids[*done]);
        json_decref(q);
        TRY(rc);
        ++*done;
    }
    return 0;
}
