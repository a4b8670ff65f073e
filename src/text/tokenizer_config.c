/* tokenizer_config.c - the files next to tokenizer.json: special tokens and chat templates.
 *
 * As transformers reads them: tokenizer_config.json, over it special_tokens_map.json
 * where the former lists no added_tokens_decoder, and chat_template.jinja over a
 * template in the configuration.  All are optional.
 * Invariant: nothing here changes how text becomes ids. */
#include "text/text_int.h"

#include "base/file.h"
#include "base/json.h"

#include <stdlib.h>
#include <string.h>

static const size_t MAX_CONFIG = 64u << 20;

/* A token is a string, or an object with its "content". NULL: neither. */
static const char *token_text(const json_t *v) { return json_string_value(json_is_object(v) ? json_object_get(v, "content") : v); }

static void take_tokens(struct tokenizer *t, const json_t *conf) {
    static const char *const keys[] = {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"};
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        const char *s = token_text(json_object_get(conf, keys[i]));
        if (s) json_object_set_new(t->special_map, keys[i], json_string(s));
    }
}

static int32_t special_id(const struct tokenizer *t, const char *key) {
    const char *s = json_string_value(json_object_get(t->special_map, key));
    return s ? tokenizer_id(t, s) : -1;
}

static void set_template(char **to, const char *s) {
    free(*to);
    *to = xstrdup(s);
}

/* One template, or a list of named ones: "default", and "tool_use" for requests with tools. */
static int take_templates(struct tokenizer *t, const json_t *v, const char *where) {
    if (!v || json_is_null(v)) return 0;
    if (json_is_string(v)) {
        set_template(&t->chat_template, json_string_value(v));
        return 0;
    }
    if (!json_is_array(v)) FAIL(ERR_FORMAT, "%s: \"chat_template\" is neither a template nor a list of them", where);
    for (size_t i = 0; i < json_array_size(v); i++) {
        const char *name, *text;
        TRY(json_str(json_array_get(v, i), "name", &name, where));
        TRY(json_str(json_array_get(v, i), "template", &text, where));
        if (strcmp(name, "default") == 0) set_template(&t->chat_template, text);
        if (strcmp(name, "tool_use") == 0) set_template(&t->tool_template, text);
    }
    return 0;
}

/* The members of a configuration that matter here. The others are passed over unread:
 * model_max_length is at times an integer too large for any C type. */
static bool is_wanted(const char *key) {
    const size_t n = strlen(key);
    return strcmp(key, "chat_template") == 0 || (n > 6 && strcmp(key + n - 6, "_token") == 0);
}

static int parse_conf(json_t *conf, struct text__json *j) {
    struct buf key = {0};
    int rc, more;
    TRYG(text__json_expect(j, '{'), done);
    for (bool first = true;; first = false) {
        TRYG(more = text__json_more(j, '}', first), done);
        if (!more) break;
        const char *lo, *hi;
        json_t *v = NULL;
        buf_reset(&key);
        TRYG(text__json_string(j, &key), done);
        TRYG(text__json_expect(j, ':'), done);
        TRYG(text__json_skip(j, &lo, &hi), done);
        if (is_wanted(key.p)) TRYG(json_parse(&v, lo, (size_t)(hi - lo), j->where), done);
        else v = json_true();
        json_object_set_new(conf, key.p, v);
    }
    TRYG(text__json_end(j), done);
    rc = 0;
done:
    buf_free(&key);
    return rc;
}

/* *out stays NULL where there is no such file. */
static int load_optional(json_t **out, const char *dir, const char *name, char **path) {
    struct buf b = {0};
    TRY(file_in_dir(path, dir, name));
    if (!*path) return 0;
    int rc = file_read(&b, *path, MAX_CONFIG);
    if (rc == 0 && !text_utf8_valid(b.p ? b.p : "", b.n)) rc = err_set(ERR_FORMAT, __FILE__, __LINE__, "%s: not UTF-8", *path);
    if (rc == 0) {
        *out = json_object();
        rc = parse_conf(*out, &(struct text__json){b.p ? b.p : "", b.p ? b.p : "", (b.p ? b.p : "") + b.n, *path});
    }
    buf_free(&b);
    return rc;
}

static int read_template_file(const char *dir, const char *name, char **to) {
    char *path;
    struct buf b = {0};
    TRY(file_in_dir(&path, dir, name));
    int rc = path ? file_read(&b, path, MAX_CONFIG) : 0;
    if (rc == 0 && b.p && !text_utf8_valid(b.p, b.n)) rc = err_set(ERR_FORMAT, __FILE__, __LINE__, "%s: not UTF-8", path);
    if (rc == 0 && b.p) {
        free(*to);
        *to = buf_take(&b);
    }
    buf_free(&b);
    free(path);
    return rc;
}

int text__side_files(struct tokenizer *t, const char *dir) {
    json_t *conf = NULL, *map = NULL;
    char *conf_path = NULL, *map_path = NULL;
    int rc;
    TRYG(load_optional(&conf, dir, "tokenizer_config.json", &conf_path), done);
    TRYG(load_optional(&map, dir, "special_tokens_map.json", &map_path), done);
    take_tokens(t, conf);
    if (!json_object_get(conf, "added_tokens_decoder")) take_tokens(t, map);
    TRYG(take_templates(t, json_object_get(conf, "chat_template"), conf_path), done);
    TRYG(read_template_file(dir, "chat_template.jinja", &t->chat_template), done);
    TRYG(read_template_file(dir, "additional_chat_templates/tool_use.jinja", &t->tool_template), done);
    t->bos = special_id(t, "bos_token");
    t->eos = special_id(t, "eos_token");
    t->pad = special_id(t, "pad_token");
    rc = 0;
done:
    json_decref(conf);
    json_decref(map);
    free(conf_path);
    free(map_path);
    return rc;
}
