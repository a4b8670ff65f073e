/* servers.c - see servers.h. */
#include "external_engine/servers.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/log.h"
#include "helper/helper.h"
#include "run/phase_watchdog.h"

#include <stdlib.h>
#include <string.h>

#define ASK_S 30.   /* for a server to say who it is */
#define SLICE_S 0.2 /* of a wait, between two looks at signals */
#define MEMORY_BYTES ((int64_t)64 << 30)

/* ---- one that does not answer ---- */

static void lose(struct servers *s, int i, const char *why) {
    struct server *v = &s->all[i];
    if (v->lost) return;
    v->lost = true;
    free(v->why);
    v->why = xstrdup(why);
    log_warn("external engine %s is lost: %s; %lld of %d servers are left", v->url, why, (long long)servers_live(s), s->n);
}

int64_t servers_live(const struct servers *s) {
    int64_t n = 0;
    for (int i = 0; i < s->n; i++) n += !s->all[i].lost;
    return n;
}

static int fail_lost(const struct servers *s) {
    struct buf b = {0};
    for (int i = 0; i < s->n; i++) buf_addf(&b, "%s%s: %s", i ? "; " : "", s->all[i].url, s->all[i].why);
    err_set(ERR_IO, __FILE__, __LINE__, "no server of rollout.engine_url is left: %s", b.p);
    buf_free(&b);
    return ERR_IO;
}

int servers_choose(const struct servers *s, int home, int not ) {
    int best = -1;
    if (home >= 0 && !s->all[home].lost) return home;
    for (int i = 0; i < s->n; i++)
        if (!s->all[i].lost && i != not &&(best < 0 || s->all[i].in_flight < s->all[best].in_flight)) best = i;
    if (best < 0 && not >= 0 && !s->all[not ].lost) return not ;
    return best >= 0 ? best : fail_lost(s);
}

/* ---- requests and answers ---- */

static int send_request(struct servers *s, int server, json_t *request, double timeout_s, int64_t *ticket) {
    CHECK(request != NULL);
    const int rc = helper_pool_send(s->pool, request, timeout_s, ticket);
    json_decref(request);
    TRY(rc);
    xgrow((void **)&s->sent, &s->cap_sent, s->n_sent + 1, sizeof *s->sent);
    s->sent[s->n_sent++] = (struct server_sent){*ticket, server};
    s->all[server].in_flight++;
    return 0;
}

static json_t *call_of(const struct server *v, const char *method, const char *path, json_t *body) {
    char *url = xasprintf("%s%s", v->url, path);
    json_t *request = json_pack("{s:s, s:s, s:s, s:o?}", "op", "call", "method", method, "url", url, "body", body);
    free(url);
    return request;
}

int servers_send(struct servers *s, int server, const char *method, const char *path, json_t *body, int64_t *ticket) {
    return send_request(s, server, call_of(&s->all[server], method, path, body), s->timeout_s, ticket);
}

static int take_sent(struct servers *s, int64_t ticket) {
    for (int64_t i = 0; i < s->n_sent; i++) {
        if (s->sent[i].ticket != ticket) continue;
        const int server = s->sent[i].server;
        s->sent[i] = s->sent[--s->n_sent];
        s->all[server].in_flight--;
        return server;
    }
    return -1;
}

int servers_take(struct servers *s, double wait_s, struct server_answer *a) {
    struct helper_result r;
    *a = (struct server_answer){0};
    const int got = helper_pool_recv(s->pool, wait_s, &r);
    TRY(got);
    if (got == 0) return 0;
    a->ticket = r.ticket;
    a->server = take_sent(s, r.ticket);
    a->reply = json_incref(r.reply);
    a->text = json_string_value(json_object_get(r.reply, "body"));
    a->status = (int)json_integer_value(json_object_get(r.reply, "status"));
    if (!a->text) a->text = "";
    const char *error = json_string_value(json_object_get(r.reply, "error"));
    if (error) a->rc = ERR_IO;
    else if (r.rc < 0) a->rc = r.rc;
    if (a->rc < 0) err_set(a->rc, __FILE__, __LINE__, "%s", error ? error : r.error);
    helper_result_free(&r);
    if (a->server < 0) { /* of a request that was dropped: nobody waits for it */
        server_answer_free(a);
        return 0;
    }
    if (a->rc == ERR_IO || a->rc == ERR_TIMEOUT) {
        struct err_saved why;
        err_save(&why);
        lose(s, a->server, err_msg());
        err_restore(&why);
    } else if (a->rc < 0) {
        server_answer_free(a);
        return err_wrap(ERR_HELPER, "the connections of the external engine");
    }
    return 1;
}

void server_answer_free(struct server_answer *a) { json_decref(a->reply); }

void servers_cancel(struct servers *s) {
    helper_pool_cancel(s->pool);
    s->n_sent = 0;
    for (int i = 0; i < s->n; i++) s->all[i].in_flight = 0;
}

/* ---- new weights ---- */

/* What a status above 399 means for those who have not started the server for training. */
static int refused(const struct server *v, const char *path, const struct server_answer *a) {
    const bool closed = v->kind == SERVER_VLLM && a->status == 404;
    FAIL(ERR_INVAL, "%s%s: HTTP %d: %.400s%s", v->url, path ? path : "", a->status, a->text,
         closed ? "; start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment" : "");
}

static json_t *command_of(const struct servers *s, const struct server *v, const char *dir) {
    return json_pack("{s:s, s:s, s:{s:s, s:s, s:s}}", "op", "command", "command", s->update_command, "env", "VERLC_WEIGHTS", dir,
                     "VERLC_ENGINE_URL", v->url, "VERLC_ENGINE_KIND", server_kind_name(v->kind));
}

/* Call `call` to all servers that have so many; waits until all have answered. *n: how many that were; asked: those in play. */
static int update_round(struct servers *s, const char *dir, int call, bool *asked, int *n) {
    int64_t ticket;
    *n = 0;
    for (int i = 0; i < s->n; i++) {
        const char *path = NULL;
        json_t *body = NULL;
        if (!asked[i]) continue;
        if (!s->update_command) TRY(server_update_call(s->all[i].kind, call, dir, &path, &body));
        asked[i] = s->update_command ? call == 0 : path != NULL;
        if (!asked[i]) continue;
        json_t *request = path ? call_of(&s->all[i], "POST", path, body) : command_of(s, &s->all[i], dir);
        TRY(send_request(s, i, request, s->timeout_s, &ticket));
        ++*n;
    }
    while (s->n_sent > 0) {
        struct server_answer a;
        const int got = servers_take(s, SLICE_S, &a);
        TRY(got);
        TRY(phase_check_stop());
        if (got == 0) continue;
        int rc = 0;
        const struct server *v = &s->all[a.server];
        if (a.rc < 0) asked[a.server] = false;
        else if (a.status != 200) rc = refused(v, NULL, &a);
        else if (!s->update_command) rc = server_read_update(v->kind, a.text, strlen(a.text));
        if (rc < 0) err_wrap(rc, "%s", v->url);
        server_answer_free(&a);
        TRY(rc);
    }
    return 0;
}

int servers_update(struct servers *s, const char *dir) {
    bool *asked = xmalloc((size_t)s->n * sizeof *asked), *was_lost = xmalloc((size_t)s->n * sizeof *was_lost);
    int rc = 0, n = 1;
    for (int i = 0; i < s->n; i++) {
        asked[i] = true;
        was_lost[i] = s->all[i].lost;
        s->all[i].lost = false;
    }
    for (int call = 0; rc == 0 && n > 0; call++) rc = update_round(s, dir, call, asked, &n);
    for (int i = 0; rc == 0 && i < s->n; i++)
        if (was_lost[i] && !s->all[i].lost) log_info("external engine %s is back, with the current weights", s->all[i].url);
    if (rc < 0) servers_cancel(s);
    free(asked);
    free(was_lost);
    TRY(rc);
    return servers_live(s) > 0 ? 0 : fail_lost(s);
}

/* ---- opening ---- */

static int read_url(struct server *v, const char *url) {
    const size_t n = strlen(url);
    if (strncmp(url, "http://", 7) != 0 && strncmp(url, "https://", 8) != 0)
        FAIL(ERR_INVAL, "rollout.engine_url=%s: http://HOST:PORT is wanted", url);
    v->url = xstrndup(url, n > 0 && url[n - 1] == '/' ? n - 1 : n);
    return 0;
}

/* kind: of the key, or NULL. */
static int take_identity(struct server *v, const struct server_answer *a, const struct external_engine_args *args) {
    struct server_identity id;
    if (a->status != 200) FAIL(ERR_INVAL, "%s/v1/models: HTTP %d: %.300s", v->url, a->status, a->text);
    const int rc = server_read_identity(&id, a->text, strlen(a->text));
    if (rc < 0) return err_wrap(rc, "%s", v->url);
    v->model = id.model;
    v->kind = id.kind;
    if (args->kind) TRY(server_kind_find(args->kind, &v->kind));
    if (!args->kind && !id.known)
        FAIL(ERR_INVAL, "%s does not say which server it is (owned_by of /v1/models): set rollout.engine_kind", v->url);
    if (id.max_len > 0 && id.max_len < args->max_len)
        FAIL(ERR_INVAL, "%s takes %lld tokens, and data.max_prompt_length + data.max_response_length are %lld", v->url,
             (long long)id.max_len, (long long)args->max_len);
    log_info("external engine %s: %s, model %s", v->url, server_kind_name(v->kind), v->model);
    return 0;
}

static int ask_all(struct servers *s, const struct external_engine_args *args) {
    int64_t ticket;
    for (int i = 0; i < s->n; i++) TRY(send_request(s, i, call_of(&s->all[i], "GET", "/v1/models", NULL), ASK_S, &ticket));
    while (s->n_sent > 0) {
        struct server_answer a;
        const int got = servers_take(s, SLICE_S, &a);
        TRY(got);
        if (got == 0) continue;
        int rc = a.rc;
        if (rc < 0) err_wrap(rc, "rollout.engine_url=%s does not answer", s->all[a.server].url);
        else rc = take_identity(&s->all[a.server], &a, args);
        server_answer_free(&a);
        TRY(rc);
    }
    return 0;
}

/* Whether each can take weights is known before the first is asked to. */
static int check_updates(const struct servers *s) {
    for (int i = 0; i < s->n && !s->update_command; i++) {
        const char *path;
        json_t *body;
        const int rc = server_update_call(s->all[i].kind, 0, "", &path, &body);
        if (rc < 0) return err_wrap(rc, "%s", s->all[i].url);
        json_decref(body);
    }
    return 0;
}

int servers_open(struct servers *s, const struct external_engine_args *a) {
    const struct helper_args h = {.module = "verlc_helpers.engine_http", .log_as = "external engine", .memory_bytes = MEMORY_BYTES};
    s->n = (int)a->n_urls;
    s->all = xcalloc((size_t)s->n + 1, sizeof *s->all);
    s->max_concurrent = a->max_concurrent;
    s->timeout_s = a->timeout_s;
    s->update_command = a->update_command;
    for (int i = 0; i < s->n; i++) TRY(read_url(&s->all[i], a->urls[i]));
    TRY(helper_pool_create(&s->pool, &h,
                           &(struct helper_pool_args){.n = 1, .n_calls = a->max_concurrent + a->n_urls, .n_tries = 2}));
    TRY(ask_all(s, a));
    return check_updates(s);
}

void servers_close(struct servers *s) {
    helper_pool_destroy(s->pool);
    for (int i = 0; i < s->n; i++) {
        free(s->all[i].url);
        free(s->all[i].model);
        free(s->all[i].why);
    }
    free(s->all);
    free(s->sent);
}
