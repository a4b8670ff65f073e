/* token_tree.c - which request goes on where, and the samples that come of it.
 *
 * A node is what one request added to a stream, or what was drawn for it; a path from the root is a stream.  Requests and turns
 * are found by a chain of hashes over tools and messages.  token_tree_message.c says when messages are the same.
 * Invariant: a node's ids do not change; a sample's last node is a turn. */
#include "agent/token_tree_int.h"
#include "base/err.h"
#include "base/map.h"

#include <stdlib.h>
#include <string.h>

enum { KEY = TOKEN_TREE_KEY };

struct node {
    int64_t parent; /* -1: a prompt */
    bool turn;
    int64_t n_cut; /* tokens of the stream before that it takes off */
    struct text_ids ids;
    float *logp;      /* turn: (ids.n) */
    float *kept;      /* turn: (ids.n); NULL: none */
    int32_t *version; /* turn: (ids.n) */
    int64_t sample;   /* for which it was made */
    int64_t n_turns;  /* request: drawn for it */
    int64_t tag;      /* turn */
    char key[KEY];    /* request: that of its messages */
};
struct sample {
    enum token_tree_start start;
    int64_t leaf; /* its last turn; -1: none yet */
    bool open;    /* a request of it is under way */
};
struct request {
    int64_t node, sample;
};
struct token_tree {
    struct continuous_tokens *c;
    struct node *node;
    int64_t n_node, node_cap;
    struct sample *sample;
    int64_t n_sample, sample_cap;
    struct request *request;
    int64_t n_request, request_cap;
    struct map requests, turns; /* key -> node, the newest */
    struct map heads;           /* key of tools and first message -> messages of the last request with it */
    struct token_tree_counts counts;
};

int token_tree_create(struct token_tree **out, struct continuous_tokens *c) {
    *out = xcalloc(1, sizeof **out);
    (*out)->c = c;
    return 0;
}

void token_tree_destroy(struct token_tree *t) {
    if (!t) return;
    for (int64_t i = 0; i < t->n_node; i++) {
        text_ids_free(&t->node[i].ids);
        free(t->node[i].logp);
        free(t->node[i].kept);
        free(t->node[i].version);
    }
    free(t->node);
    free(t->sample);
    free(t->request);
    map_free(&t->requests);
    map_free(&t->turns);
    map_free(&t->heads);
    free(t);
}

const char *token_tree_start_name(enum token_tree_start s) {
    static const char *const names[] = {"first", "again", "rewritten", "compacted", "sub_agent", "refused"};
    return names[s];
}

struct token_tree_counts token_tree_counts(const struct token_tree *t) {
    return t->counts;
}

static int64_t add_node(struct token_tree *t, const struct node *n) {
    xgrow((void **)&t->node, &t->node_cap, t->n_node + 1, sizeof *t->node);
    t->node[t->n_node] = *n;
    return t->n_node++;
}

static int64_t add_sample(struct token_tree *t, enum token_tree_start start, int64_t leaf) {
    xgrow((void **)&t->sample, &t->sample_cap, t->n_sample + 1, sizeof *t->sample);
    t->sample[t->n_sample] = (struct sample){start, leaf, false};
    t->counts.n_started[start]++;
    return t->n_sample++;
}

static int64_t find(const struct map *m, const char *key) {
    int64_t at;
    return map_get(m, key, KEY - 1, &at) ? at : -1;
}

/* ---- streams ---- */

/* The nodes from the root to one. Returns how many; the caller frees *path. */
static int64_t path_to(const struct token_tree *t, int64_t node, int64_t **path) {
    int64_t n = 0;
    for (int64_t i = node; i >= 0; i = t->node[i].parent) n++;
    *path = xcalloc((size_t)n + 1, sizeof **path);
    for (int64_t i = node, k = n; i >= 0; i = t->node[i].parent) (*path)[--k] = i;
    return n;
}

static void stream_of(const struct token_tree *t, int64_t node, struct text_ids *ids) {
    int64_t *path;
    const int64_t n = path_to(t, node, &path);
    for (int64_t i = 0; i < n; i++) {
        const struct node *at = &t->node[path[i]];
        ids->n -= at->n_cut < ids->n ? at->n_cut : ids->n;
        text_ids_add(ids, at->ids.p, at->ids.n);
    }
    free(path);
}

/* ---- where a request goes on ---- */

struct place {
    int64_t sample;              /* -1: one that begins here */
    enum token_tree_start start; /* of that */
    int64_t turn;                /* behind which it goes on; -1: from its beginning */
    size_t n_same;               /* messages up to there */
    bool replaces;               /* the sample's last turn */
};

/* A sample that ends with that turn and waits for nothing; -1. */
static int64_t sample_at(const struct token_tree *t, int64_t turn) {
    const int64_t own = t->node[turn].sample;
    if (t->sample[own].leaf == turn && !t->sample[own].open) return own;
    for (int64_t i = t->n_sample - 1; i >= 0; i--)
        if (t->sample[i].leaf == turn && !t->sample[i].open) return i;
    return -1;
}

/* The longest part of the messages that ends with a turn as it was drawn. */
static int64_t longest_turn(const struct token_tree *t, char (*keys)[KEY], size_t n, size_t *n_same) {
    for (size_t i = n; i-- > 1;) {
        const int64_t turn = find(&t->turns, keys[i]);
        if (turn < 0) continue;
        *n_same = i;
        return turn;
    }
    return -1;
}

/* The sample whose last turn the agent has replaced by an assistant message of its own: messages are those of the request for it,
 * and then another assistant's. -1: none. */
static int64_t replaced_turn(const struct token_tree *t, const json_t *messages, char (*keys)[KEY], size_t from) {
    for (size_t i = json_array_size(messages) - 1; i > from; i--) {
        if (strcmp(continuous_tokens__role(json_array_get(messages, i)), "assistant") != 0) continue;
        const int64_t request = find(&t->requests, keys[i]);
        if (request < 0) continue;
        for (int64_t k = t->n_sample - 1; k >= 0; k--) {
            const struct sample *s = &t->sample[k];
            if (s->leaf >= 0 && !s->open && t->node[s->leaf].parent == request) return k;
        }
    }
    return -1;
}

static enum token_tree_start why(const struct token_tree *t, char (*keys)[KEY], size_t n) {
    const int64_t before = find(&t->heads, keys[1]);
    if (t->n_sample == 0) return TOKEN_TREE_FIRST;
    if (before < 0) return TOKEN_TREE_SUB_AGENT;
    return (int64_t)n < before ? TOKEN_TREE_COMPACTED : TOKEN_TREE_REWRITTEN;
}

static struct place find_place(const struct token_tree *t, const json_t *messages, char (*keys)[KEY]) {
    const size_t n = json_array_size(messages);
    struct place p = {.sample = -1, .start = why(t, keys, n)};
    p.turn = longest_turn(t, keys, n, &p.n_same);
    if (p.turn >= 0) p.sample = sample_at(t, p.turn);
    if (p.sample >= 0) return p;
    const int64_t back = replaced_turn(t, messages, keys, p.n_same);
    if (back < 0) return p;
    const int64_t request = t->node[t->sample[back].leaf].parent;
    p.replaces = t->node[request].parent == p.turn; /* it stood behind the same turn */
    if (p.replaces) p.sample = back;
    return p;
}

/* The sample of a place, once its request is rendered. */
static int64_t take_place(struct token_tree *t, const struct place *p) {
    if (p->sample < 0) return add_sample(t, p->start, p->turn);
    if (p->replaces) {
        struct sample *s = &t->sample[p->sample];
        t->counts.n_rolled_back += t->node[s->leaf].ids.n;
        s->leaf = p->turn;
    }
    return p->sample;
}

/* ---- requests ---- */

static int64_t open_request(struct token_tree *t, int64_t node, int64_t sample) {
    xgrow((void **)&t->request, &t->request_cap, t->n_request + 1, sizeof *t->request);
    t->request[t->n_request] = (struct request){node, sample};
    t->sample[sample].open = true;
    t->counts.n_requests++;
    return t->n_request++;
}

/* The node of a request that was made before: once more in its sample if nothing was drawn for it, else as a sample of its own. */
static int64_t ask_again(struct token_tree *t, int64_t node) {
    const struct node *at = &t->node[node];
    const struct sample *s = &t->sample[at->sample];
    if (at->n_turns == 0 && !s->open && s->leaf == at->parent) return at->sample;
    return add_sample(t, TOKEN_TREE_AGAIN, at->parent);
}

/* What the request adds at its place; a template that cannot append makes it a sample of its own. */
static int render(struct token_tree *t, struct place *p, const json_t *messages, const json_t *tools, struct node *out) {
    struct text_ids stream = {0};
    struct continuous_junction j = {0};
    *out = (struct node){.parent = p->turn};
    if (p->turn >= 0) {
        stream_of(t, p->turn, &stream);
        const int rc = continuous_tokens_append(t->c, messages, (int64_t)p->n_same, tools, &stream, &j);
        text_ids_free(&stream);
        out->ids = j.added;
        out->n_cut = j.n_removed;
        if (rc == 0 || (rc != ERR_INPUT && rc != ERR_FORMAT)) return rc;
        out->parent = -1;
        out->n_cut = 0;
        out->ids = (struct text_ids){0};
    }
    const int rc = continuous_tokens_begin(t->c, messages, tools, &out->ids);
    if (rc < 0) {
        text_ids_free(&out->ids);
        return err_pass(rc, __FILE__, __LINE__);
    }
    if (p->turn >= 0) *p = (struct place){.sample = -1, .start = TOKEN_TREE_REFUSED, .turn = -1};
    return 0;
}

int token_tree_prompt(struct token_tree *t, const json_t *messages, const json_t *tools, struct text_ids *ids, int64_t *request) {
    const size_t n = json_array_size(messages);
    if (n == 0) FAIL(ERR_INPUT, "a request without messages");
    char(*keys)[KEY] = token_tree__keys(messages, tools);
    int64_t node = find(&t->requests, keys[n]), sample;
    int rc = 0;
    if (node >= 0) {
        sample = ask_again(t, node);
    } else {
        struct node fresh;
        struct place p = find_place(t, messages, keys);
        TRYG(render(t, &p, messages, tools, &fresh), done);
        fresh.sample = sample = take_place(t, &p);
        memcpy(fresh.key, keys[n], KEY);
        node = add_node(t, &fresh);
        map_set(&t->requests, keys[n], KEY - 1, node);
    }
    map_set(&t->heads, keys[1], KEY - 1, (int64_t)n);
    *request = open_request(t, node, sample);
    stream_of(t, node, ids);
done:
    free(keys);
    return rc;
}

/* The sample that a prompt of ids goes on with: the one with the most tokens, all of which it begins with; -1: none. *have: how
 * many. */
static int64_t sample_of_ids(const struct token_tree *t, const int32_t *ids, int64_t n, int64_t *have) {
    int64_t best = -1;
    *have = 0;
    for (int64_t i = 0; i < t->n_sample; i++) {
        struct text_ids stream = {0};
        if (t->sample[i].leaf < 0 || t->sample[i].open) continue;
        stream_of(t, t->sample[i].leaf, &stream);
        if (stream.n > *have && stream.n <= n && memcmp(stream.p, ids, (size_t)stream.n * sizeof *ids) == 0) {
            best = i;
            *have = stream.n;
        }
        text_ids_free(&stream);
    }
    return best;
}

void token_tree_prompt_ids(struct token_tree *t, const int32_t *ids, int64_t n, int64_t *request) {
    int64_t have, sample = sample_of_ids(t, ids, n, &have);
    struct node fresh = {.parent = sample >= 0 ? t->sample[sample].leaf : -1};
    if (sample < 0) sample = add_sample(t, t->n_sample == 0 ? TOKEN_TREE_FIRST : TOKEN_TREE_SUB_AGENT, -1);
    fresh.sample = sample;
    text_ids_add(&fresh.ids, ids + have, n - have);
    *request = open_request(t, add_node(t, &fresh), sample);
}

int64_t token_tree_behind(const struct token_tree *t, int64_t request) {
    const int64_t turn = t->node[t->request[request].node].parent;
    return turn < 0 ? -1 : t->node[turn].tag;
}

int64_t token_tree_prompt_length(const struct token_tree *t, int64_t request) {
    int64_t node = t->request[request].node;
    while (t->node[node].parent >= 0) node = t->node[node].parent;
    return t->node[node].ids.n;
}

void token_tree_drawn(struct token_tree *t, int64_t request, const struct token_tree_turn *turn) {
    const struct request r = t->request[request];
    struct node n = {.parent = r.node, .turn = true, .sample = r.sample, .tag = turn->tag};
    char key[2][KEY];
    text_ids_add(&n.ids, turn->ids, turn->n);
    n.logp = xcalloc((size_t)turn->n + 1, sizeof *n.logp);
    n.version = xcalloc((size_t)turn->n + 1, sizeof *n.version);
    if (turn->n) memcpy(n.logp, turn->logp, (size_t)turn->n * sizeof *n.logp);
    if (turn->kept) n.kept = xcalloc((size_t)turn->n + 1, sizeof *n.kept);
    if (turn->kept && turn->n) memcpy(n.kept, turn->kept, (size_t)turn->n * sizeof *n.kept);
    if (turn->n) memcpy(n.version, turn->version, (size_t)turn->n * sizeof *n.version);
    const int64_t node = add_node(t, &n);
    if (turn->message) {
        token_tree__turn_keys(t->node[r.node].key, turn->message, key);
        for (int i = 0; i < 2; i++) map_set(&t->turns, key[i], KEY - 1, node);
    }
    t->node[r.node].n_turns++;
    t->sample[r.sample].leaf = node;
    t->sample[r.sample].open = false;
    t->counts.n_turns++;
}

void token_tree_dropped(struct token_tree *t, int64_t request) { t->sample[t->request[request].sample].open = false; }

/* ---- samples ---- */

struct row { /* one as it is made */
    struct token_tree_sample out;
    uint8_t *own; /* (response.n): drawn and trained here */
    int64_t cap, cap_tags, cap_turns;
};

static void add_tokens(struct row *r, const struct node *n, bool own) {
    const int64_t at = r->out.response.n;
    if (at + n->ids.n > r->cap) {
        r->cap = 2 * (at + n->ids.n);
        r->own = xrealloc(r->own, (size_t)r->cap * sizeof *r->own);
        r->out.logp = xrealloc(r->out.logp, (size_t)r->cap * sizeof *r->out.logp);
        r->out.kept = xrealloc(r->out.kept, (size_t)r->cap * sizeof *r->out.kept);
        r->out.version = xrealloc(r->out.version, (size_t)r->cap * sizeof *r->out.version);
    }
    text_ids_add(&r->out.response, n->ids.p, n->ids.n);
    for (int64_t i = 0; i < n->ids.n; i++) {
        r->own[at + i] = own;
        r->out.logp[at + i] = own ? n->logp[i] : 0;
        r->out.kept[at + i] = own && n->kept ? n->kept[i] : 0;
        r->out.version[at + i] = own ? n->version[i] : -1;
    }
    if (!own) return;
    xgrow((void **)&r->out.tags, &r->cap_tags, r->out.n_turns + 1, sizeof *r->out.tags);
    xgrow((void **)&r->out.turn_segments, &r->cap_turns, r->out.n_turns + 1, sizeof *r->out.turn_segments);
    r->out.tags[r->out.n_turns] = n->tag;
    r->out.turn_segments[r->out.n_turns++] = at; /* find_segments makes it a segment */
}

static void cut_tokens(struct row *r, int64_t n) {
    const int64_t of_response = n < r->out.response.n ? n : r->out.response.n;
    r->out.response.n -= of_response;
    n -= of_response;
    r->out.prompt.n -= n < r->out.prompt.n ? n : r->out.prompt.n;
}

static void find_segments(struct row *r) {
    int64_t cap = 0;
    for (int64_t i = 0; i < r->out.response.n; i++) {
        struct segment *last = r->out.n_segments ? &r->out.segments[r->out.n_segments - 1] : NULL;
        const enum segment_kind kind = r->own[i] ? SEGMENT_POLICY : SEGMENT_ENVIRONMENT;
        if (last && last->kind == kind) {
            last->n++;
            continue;
        }
        xgrow((void **)&r->out.segments, &cap, r->out.n_segments + 1, sizeof *last);
        r->out.segments[r->out.n_segments++] = (struct segment){kind, i, 1};
    }
    for (int64_t k = 0, s = 0; k < r->out.n_turns; k++) {
        while (s + 1 < r->out.n_segments && r->out.segments[s + 1].begin <= r->out.turn_segments[k]) s++;
        r->out.turn_segments[k] = s;
    }
}

/* The sample's tokens; trained[node]: a sample before trains it. Whether there is a token of its own. */
static bool make_row(const struct token_tree *t, const struct sample *s, bool *trained, struct token_tree_sample *out) {
    struct row r = {.out.start = s->start};
    int64_t *path;
    const int64_t n = path_to(t, s->leaf, &path);
    bool any = false;
    for (int64_t i = 0; i < n; i++) {
        const struct node *at = &t->node[path[i]];
        const bool own = at->turn && !trained[path[i]];
        if (i == 0) {
            text_ids_add(&r.out.prompt, at->ids.p, at->ids.n);
            continue;
        }
        cut_tokens(&r, at->n_cut);
        add_tokens(&r, at, own);
        any |= own && at->ids.n > 0;
        if (own) trained[path[i]] = true;
    }
    free(path);
    find_segments(&r);
    free(r.own);
    *out = r.out;
    return any;
}

static void free_sample(struct token_tree_sample *s) {
    text_ids_free(&s->prompt);
    text_ids_free(&s->response);
    free(s->segments);
    free(s->logp);
    free(s->kept);
    free(s->tags);
    free(s->turn_segments);
    free(s->version);
}

int64_t token_tree_samples(const struct token_tree *t, struct token_tree_sample **out) {
    bool *trained = xcalloc((size_t)t->n_node + 1, sizeof *trained);
    struct token_tree_sample *all = xcalloc((size_t)t->n_sample + 1, sizeof *all);
    int64_t n = 0;
    for (int64_t i = 0; i < t->n_sample; i++) {
        if (t->sample[i].leaf < 0) continue;
        if (make_row(t, &t->sample[i], trained, &all[n])) n++;
        else free_sample(&all[n]);
    }
    memset(all + n, 0, sizeof *all);
    free(trained);
    *out = all;
    return n;
}

void token_tree_samples_free(struct token_tree_sample *s, int64_t n) {
    for (int64_t i = 0; i < n; i++) free_sample(&s[i]);
    free(s);
}
