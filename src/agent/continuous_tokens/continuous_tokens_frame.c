/* continuous_tokens_frame.c - groups whose rendered text is a fixed frame around their messages' texts.
 *
 * Most templates write a tool's result between fixed texts, as it is, trimmed, or as a JSON string. That is not believed but
 * tried, once for a shape of a group (its roles, how many messages, which of them have ids and names): what the template renders
 * is compared with what the frame gives, for texts that show what templates do to texts (trim, escape, split, look at the first
 * word) and for every text constant that the template's program may compare a text with, alone and inside other texts.  One
 * difference, and the shape is rendered each time.  With other tools the frame is tried again, by one render.
 *
 * Invariant: a frame is used only where ids of the whole render are those of its two parts, whatever the texts are: an added
 * token begins the frame, and the fixed text there decides that. */
#include "agent/continuous_tokens/continuous_tokens_int.h"
#include "agent/tool_parser/tool_parser_int.h"
#include "base/err.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_MESSAGES = 8, N_KINDS = 3, N_HOLES = MAX_MESSAGES * N_KINDS, MAX_CONSTANTS = 200, MAX_KNOWN = 16384, TRY_AT_ONCE = 128 };
enum { TRY_AFTER = 16 }; /* renders of a shape: what is rarely appended is not worth the trial */
enum { CONTENT, ID, NAME };

struct piece {
    char *text; /* before the hole */
    size_t n;
    int hole; /* N_KINDS * message + kind; -1: the end */
};
enum how { AS_IS, STRIPPED, QUOTED, N_HOWS }; /* a content stands in it: trim, tojson */
struct frame {
    bool ok;
    enum how how;
    struct piece *piece;
    int64_t n, cap;
};
struct continuous_tokens__frames {
    struct map uses;   /* shape -> how often it was rendered */
    struct map shapes; /* shape -> index of frame */
    struct map known;  /* shape and toolset -> whether the frame holds */
    struct frame *frame;
    int64_t n, cap;
};

/* The texts in a group's holes; those that a message lacks are NULL. */
struct fill {
    const char *p[N_HOLES];
    size_t n[N_HOLES];
};

static void frame_clear(struct frame *f) {
    for (int64_t i = 0; i < f->n; i++) free(f->piece[i].text);
    free(f->piece);
    *f = (struct frame){0};
}

void continuous_tokens__frames_free(struct continuous_tokens__frames *f) {
    if (!f) return;
    for (int64_t i = 0; i < f->n; i++) frame_clear(&f->frame[i]);
    free(f->frame);
    map_free(&f->uses);
    map_free(&f->shapes);
    map_free(&f->known);
    free(f);
}

/* ---- shapes ---- */

/* The holes of a group: messages of a role, a text, and in tool messages maybe an id and a name, and nothing else. */
static bool read_group(const json_t *group, struct fill *fill) {
    static const char *const keys[] = {"content", "tool_call_id", "name"};
    const size_t n = json_array_size(group);
    *fill = (struct fill){0};
    if (n == 0 || n > MAX_MESSAGES) return false;
    for (size_t i = 0; i < n; i++) {
        const json_t *m = json_array_get(group, i);
        const char *role = continuous_tokens__role(m);
        const bool tool = strcmp(role, "tool") == 0;
        size_t n_keys = 1;
        if (!tool && strcmp(role, "user") != 0 && strcmp(role, "system") != 0) return false;
        for (int kind = 0; kind < (tool ? N_KINDS : 1); kind++) {
            const json_t *v = json_object_get(m, keys[kind]);
            if (!v && kind != CONTENT) continue;
            if (!json_is_string(v) || (kind != CONTENT && json_string_length(v) == 0)) return false;
            n_keys++;
            fill->p[N_KINDS * i + (size_t)kind] = json_string_value(v);
            fill->n[N_KINDS * i + (size_t)kind] = json_string_length(v);
        }
        if (json_object_size(m) != n_keys) return false;
    }
    return true;
}

static json_t *build_group(const char *role, const struct fill *fill, size_t n) {
    static const char *const keys[] = {"content", "tool_call_id", "name"};
    json_t *group = json_array();
    for (size_t i = 0; i < n; i++) {
        json_t *m = json_pack("{s:s}", "role", role);
        for (size_t kind = 0; kind < N_KINDS; kind++) {
            const size_t h = N_KINDS * i + kind;
            if (fill->p[h]) json_object_set_new(m, keys[kind], json_stringn(fill->p[h], fill->n[h]));
        }
        json_array_append_new(group, m);
    }
    return group;
}

static void add_shape(struct buf *out, const char *role, const struct fill *fill, size_t n, bool generation_prompt, bool tools) {
    buf_addf(out, "%s %d %d ", role, generation_prompt, tools);
    for (size_t i = 0; i < n; i++)
        buf_addc(out, (char)('0' + (fill->p[N_KINDS * i + ID] != NULL) + 2 * (fill->p[N_KINDS * i + NAME] != NULL)));
}

/* ---- frames ---- */

struct trial { /* of one shape with one set of tools */
    struct continuous_tokens *c;
    const char *role;
    const struct fill *fill; /* which holes there are */
    size_t n;                /* messages */
    bool generation_prompt;
    const json_t *tools;
};

/* Marks that no template writes, nine letters and digits, which the strictest ids are. */
static void mark_holes(const struct trial *t, char marks[N_HOLES][16], struct fill *out) {
    *out = (struct fill){0};
    for (size_t h = 0; h < N_KINDS * t->n; h++) {
        if (!t->fill->p[h]) continue;
        snprintf(marks[h], sizeof marks[h], "Zq7x%03zuQz", h);
        out->p[h] = marks[h];
        out->n[h] = strlen(marks[h]);
    }
}

static void add_piece(struct frame *f, const char *p, size_t n, int hole) {
    xgrow((void **)&f->piece, &f->cap, f->n + 1, sizeof *f->piece);
    f->piece[f->n++] = (struct piece){xstrndup(p, n), n, hole};
}

/* text, in which marks stand, as pieces. */
static void cut_at_marks(struct frame *f, const char *text, size_t n, const struct fill *marks) {
    size_t from = 0;
    for (size_t i = 0; i + 9 <= n; i++) {
        if (memcmp(text + i, "Zq7x", 4) != 0) continue;
        for (int h = 0; h < N_HOLES; h++)
            if (marks->p[h] && memcmp(text + i, marks->p[h], 9) == 0) {
                add_piece(f, text + from, i - from, h);
                from = i + 9;
                i = from - 1;
                break;
            }
    }
    add_piece(f, text + from, n - from, -1);
}

static void add_content(const char *p, size_t n, enum how how, struct buf *out) {
    if (how == QUOTED) {
        struct buf quoted = {0};
        continuous_tokens__quote(p, n, &quoted);
        buf_add(out, quoted.p + 1, quoted.n - 2); /* the quotes are the frame's */
        buf_free(&quoted);
        return;
    }
    struct tool_parser__span text = {p, n};
    if (how == STRIPPED) text = tool_parser__strip(text);
    buf_add(out, text.p, text.n);
}

static void fill_frame(const struct frame *f, const struct fill *fill, struct buf *out) {
    for (int64_t i = 0; i < f->n; i++) {
        const int h = f->piece[i].hole;
        buf_add(out, f->piece[i].text, f->piece[i].n);
        if (h >= 0) add_content(fill->p[h], fill->n[h], h % N_KINDS == CONTENT ? f->how : AS_IS, out);
    }
}

static bool same_frame(const struct frame *a, const struct frame *b) {
    if (a->n != b->n) return false;
    for (int64_t i = 0; i < a->n; i++)
        if (a->piece[i].hole != b->piece[i].hole || a->piece[i].n != b->piece[i].n ||
            memcmp(a->piece[i].text, b->piece[i].text, a->piece[i].n) != 0)
            return false;
    return true;
}

static bool has_names(const struct trial *t) {
    for (size_t h = 0; h < N_KINDS * t->n; h++)
        if (h % N_KINDS != CONTENT && t->fill->p[h]) return true;
    return false;
}

/* Renders what stands before each group, and then with it, of k fills: 2k texts. Without ids and names the first of each two is
 * the same, and rendered once. 0: the template refuses one. */
static int render_fills(const struct trial *t, const struct fill *fills, int64_t k, json_t **texts) {
    const bool names = has_names(t);
    json_t *common = t->c->kwargs ? json_copy(t->c->kwargs) : json_object(), *each = json_array();
    if (t->tools) json_object_set(common, "tools", (json_t *)(uintptr_t)t->tools);
    for (int64_t i = 0; i < k; i++) {
        json_t *group = build_group(t->role, &fills[i], t->n);
        json_t *prefix = continuous_tokens__synthetic(t->c, strcmp(t->role, "tool") == 0 ? group : NULL), *both = json_copy(prefix);
        json_array_extend(both, group);
        if (i == 0 || names) json_array_append_new(each, json_pack("{s:O, s:b}", "messages", prefix, "add_generation_prompt", 0));
        json_array_append_new(each, json_pack("{s:o, s:b}", "messages", both, "add_generation_prompt", t->generation_prompt));
        json_decref(group);
        json_decref(prefix);
    }
    const int rc = chat_template_render_many(t->c->chat, common, each, texts);
    json_decref(each);
    json_decref(common);
    TRY(rc);
    for (int64_t i = 1; !names && i < k && json_array_size(*texts) > (size_t)i; i++)
        json_array_insert(*texts, 2 * (size_t)i, json_array_get(*texts, 0));
    if (json_array_size(*texts) == 2 * (size_t)k) return 1;
    json_decref(*texts);
    *texts = NULL;
    return 0;
}

/* Whether texts[2i + 1] is texts[2i] and then the frame with that fill. */
static bool frame_gives(const struct frame *f, const json_t *texts, int64_t i, const struct fill *fill) {
    const json_t *a = json_array_get(texts, (size_t)(2 * i)), *b = json_array_get(texts, (size_t)(2 * i + 1));
    const size_t na = json_string_length(a), nb = json_string_length(b);
    struct buf want = {0};
    fill_frame(f, fill, &want);
    const bool same = nb == na + want.n && memcmp(json_string_value(b), json_string_value(a), na) == 0 &&
                      memcmp(json_string_value(b) + na, want.p ? want.p : "", want.n) == 0;
    buf_free(&want);
    return same;
}

/* The frame that the template shows with marks, whose ids do not depend on the texts: 1; 0: there is none. */
static int read_frame(const struct trial *t, struct frame *f) {
    char marks[N_HOLES][16];
    struct fill fill;
    json_t *texts;
    mark_holes(t, marks, &fill);
    const int rc = render_fills(t, &fill, 1, &texts);
    if (rc <= 0) return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
    const json_t *a = json_array_get(texts, 0), *b = json_array_get(texts, 1);
    const size_t na = json_string_length(a), nb = json_string_length(b), longest = tokenizer_longest_added(t->c->tok);
    bool ok = na > 0 && nb > na && memcmp(json_string_value(b), json_string_value(a), na) == 0 &&
              tokenizer_splits_at(t->c->tok, json_string_value(b), nb, na);
    if (ok) {
        struct frame before = {0};
        cut_at_marks(&before, json_string_value(a), na, &fill);
        cut_at_marks(f, json_string_value(b) + na, nb - na, &fill);
        ok = tokenizer_decided_at(t->c->tok, json_string_value(b), na + f->piece[0].n, na) &&
             (before.n == 1 || before.piece[before.n - 1].n >= longest);
        frame_clear(&before);
    }
    json_decref(texts);
    return ok;
}

/* ---- trying ---- */

/* What a template may do to a text shows on one of these. */
static const char *const TEXTS[] = {"",
                                    " ",
                                    "\n",
                                    " a",
                                    "a ",
                                    "\na",
                                    "a\n",
                                    "\n\na\n\n",
                                    "\ta\t",
                                    "a  b",
                                    "a\r\nb",
                                    "\"",
                                    "\\",
                                    "a\"b\\c\nd",
                                    "'",
                                    "<",
                                    ">",
                                    "&",
                                    "<a href=\"x\">&amp;</a>",
                                    "4",
                                    "007",
                                    "-1",
                                    "1.5",
                                    "1e5",
                                    "true",
                                    "false",
                                    "null",
                                    "None",
                                    "[1, 2]",
                                    "{\"a\": 1}",
                                    "{a}",
                                    "{{ a }}",
                                    "{% if a %}",
                                    "%s",
                                    "a/b",
                                    "https://a.b/c?d=e",
                                    "é",
                                    "日本語",
                                    "😀",
                                    "ﬁ",
                                    "A",
                                    "aBc",
                                    "tool",
                                    "name: x",
                                    "a: b\nc: d",
                                    "#",
                                    "```\na\n```",
                                    "<think>a</think>b",
                                    "</think>",
                                    "<think>",
                                    "<tool_response>a</tool_response>",
                                    "<tool_call>{\"name\": \"a\"}</tool_call>",
                                    "<|im_start|>",
                                    "<|im_end|>\n",
                                    "<|eot_id|>",
                                    "</s>",
                                    "[INST]",
                                    "<image>",
                                    "\x7f",
                                    "\x01",
                                    "\u00a0a\u00a0",
                                    "\u2028",
                                    "\ufeff",
                                    "\x1c\xc2\x85z\u3000",
                                    "\u200ba",
                                    "a\u0301"};

static void add_joined(json_t *all, const json_t *a, const char *between, const json_t *b) {
    struct buf text = {0};
    buf_add(&text, json_string_value(a), json_string_length(a));
    buf_adds(&text, between);
    buf_add(&text, json_string_value(b), json_string_length(b));
    json_array_append_new(all, json_stringn(text.p ? text.p : "", text.n));
    buf_free(&text);
}

static bool is_word(const json_t *text) {
    const char *p = json_string_value(text);
    while (*p == '_' || (*p >= 'a' && *p <= 'z')) p++;
    return *p == '\0';
}

/* Each constant alone and in a text; those that are no words, as marks are, in pairs too. */
static void add_constants(json_t *all, const json_t *constants) {
    json_t *a = json_string("a"), *none = json_string("");
    for (size_t i = 0; i < json_array_size(constants); i++) {
        const json_t *p = json_array_get(constants, i);
        add_joined(all, p, "", none);
        add_joined(all, p, "\n", a);
        add_joined(all, a, "", p);
        if (is_word(p)) continue;
        for (size_t k = 0; k < json_array_size(constants); k++)
            if (!is_word(json_array_get(constants, k))) add_joined(all, p, "a", json_array_get(constants, k));
    }
    json_decref(a);
    json_decref(none);
}

/* All texts that are tried. *out NULL: the template has too many constants. */
static int texts_to_try(const struct trial *t, json_t **out) {
    json_t *constants, *all;
    TRY(chat_template_constants(t->c->chat, t->tools != NULL, &constants));
    *out = NULL;
    if (json_array_size(constants) <= MAX_CONSTANTS) {
        struct buf longer = {0};
        all = json_array();
        for (size_t i = 0; i < sizeof TEXTS / sizeof *TEXTS; i++) json_array_append_new(all, json_string(TEXTS[i]));
        for (int i = 0; i < 4000; i++) buf_addf(&longer, "%d ", i * 7919 % 1000);
        json_array_append_new(all, json_stringn(longer.p, longer.n));
        add_constants(all, constants);
        buf_free(&longer);
        *out = all;
    }
    json_decref(constants);
    return 0;
}

/* The text in all holes; an id or a name cannot be empty. */
static void fill_with(const struct fill *marks, const json_t *text, struct fill *out) {
    *out = *marks;
    for (int h = 0; h < N_HOLES; h++) {
        if (!marks->p[h] || (h % N_KINDS != CONTENT && json_string_length(text) == 0)) continue;
        out->p[h] = json_string_value(text);
        out->n[h] = json_string_length(text);
    }
}

/* Whether the frame gives what the template renders, for all texts. */
static int try_texts(const struct trial *t, const struct frame *f) {
    char marks[N_HOLES][16];
    struct fill marked, *fills = xcalloc(TRY_AT_ONCE, sizeof *fills);
    json_t *list, *texts;
    int rc = 0;
    mark_holes(t, marks, &marked);
    TRYG(texts_to_try(t, &list), done);
    rc = list != NULL;
    for (size_t lo = 0; rc == 1 && lo < json_array_size(list); lo += TRY_AT_ONCE) {
        const size_t left = json_array_size(list) - lo, k = left < TRY_AT_ONCE ? left : TRY_AT_ONCE;
        for (size_t i = 0; i < k; i++) fill_with(&marked, json_array_get(list, lo + i), &fills[i]);
        rc = render_fills(t, fills, (int64_t)k, &texts);
        if (rc != 1) break;
        for (size_t i = 0; rc == 1 && i < k; i++) rc = frame_gives(f, texts, (int64_t)i, &fills[i]);
        json_decref(texts);
    }
    json_decref(list);
done:
    free(fills);
    return rc;
}

static int prove(const struct trial *t, struct frame *f) {
    int rc = read_frame(t, f);
    const int seen = rc;
    for (int how = 0; seen == 1 && how < N_HOWS; how++) {
        f->how = (enum how)how;
        rc = try_texts(t, f);
        if (rc != 0) break;
    }
    f->ok = rc == 1;
    return rc < 0 ? rc : 0;
}

/* ---- use ---- */

/* Counts a use of the shape that was not tried yet; whether it is time to. */
static bool often_used(struct continuous_tokens__frames *all, const struct buf *shape) {
    int64_t n = 0;
    map_get(&all->uses, shape->p, shape->n, &n);
    map_set(&all->uses, shape->p, shape->n, n + 1);
    return n >= TRY_AFTER;
}

/* The shape's frame, tried if it was not; NULL: not yet. */
static int find_frame(const struct trial *t, const struct buf *shape, struct frame **out) {
    struct continuous_tokens__frames *all = t->c->frames;
    int64_t at;
    if (!map_get(&all->shapes, shape->p, shape->n, &at)) {
        struct frame f = {0};
        *out = NULL;
        if (!often_used(all, shape)) return 0;
        const int rc = prove(t, &f);
        if (rc < 0) {
            frame_clear(&f);
            return rc;
        }
        xgrow((void **)&all->frame, &all->cap, all->n + 1, sizeof *all->frame);
        map_set(&all->shapes, shape->p, shape->n, all->n);
        at = all->n;
        all->frame[all->n++] = f;
    }
    *out = &all->frame[at];
    return 0;
}

/* Whether the frame holds with these tools. */
static int holds(const struct trial *t, struct buf *shape, const struct frame *f) {
    struct map *known = &t->c->frames->known;
    int64_t yes;
    if (!f || !f->ok) return 0;
    buf_addf(shape, " %lld", (long long)continuous_tokens__toolset(t->c, t->tools));
    if (map_get(known, shape->p, shape->n, &yes)) return (int)yes;
    struct frame other = {0};
    int rc = read_frame(t, &other);
    if (rc == 1) rc = same_frame(f, &other);
    frame_clear(&other);
    if (rc < 0) return rc;
    if (known->n >= MAX_KNOWN) map_free(known);
    map_set(known, shape->p, shape->n, rc);
    return rc;
}

int continuous_tokens__frame(struct continuous_tokens *c, const json_t *group, bool generation_prompt, const json_t *tools,
                             struct text_ids *ids) {
    struct fill fill;
    if (!read_group(group, &fill) || (c->kwargs && json_object_get(c->kwargs, "chat_template"))) return 0;
    if (!c->frames) c->frames = xcalloc(1, sizeof *c->frames);
    const struct trial t = {
        c, continuous_tokens__role(json_array_get(group, 0)), &fill, json_array_size(group), generation_prompt, tools};
    struct buf text = {0};
    struct frame *f;
    int rc;
    add_shape(&text, t.role, &fill, t.n, generation_prompt, tools != NULL);
    TRYG(find_frame(&t, &text, &f), done);
    rc = holds(&t, &text, f);
    if (rc != 1) goto done;
    buf_reset(&text);
    fill_frame(f, &fill, &text);
    TRYG(tokenizer_encode(c->tok, text.p, text.n, false, ids), done);
    rc = 1;
done:
    buf_free(&text);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : rc;
}
