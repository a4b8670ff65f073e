/* run_notes.c - see run_notes.h.
 *
 * Invariant: the file is whole at any moment, and two that change it at once both count (a lock on the run's directory). */
#include "view/run_notes.h"

#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "text/text.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

enum { MAX_FILE = 8 << 20, MAX_NOTES = 1000, MAX_TAGS = 100 };
#define LOCK_S 10.0

/* ---- reading ---- */

static bool is_note(const json_t *v) {
    return json_is_string(json_object_get(v, "text")) && json_is_number(json_object_get(v, "wall")) &&
           isfinite(json_number_value(json_object_get(v, "wall")));
}
static bool is_tag(const json_t *v) { return json_is_string(v); }

/* Both lists, of the right things and no more than there may be. */
static bool is_whole(const json_t *o) {
    static const char *const names[] = {"tags", "notes"};
    bool (*const fits[])(const json_t *) = {is_tag, is_note};
    const size_t most[] = {MAX_TAGS, MAX_NOTES};
    for (int i = 0; i < 2; i++) {
        const json_t *list = json_object_get(o, names[i]);
        if (!json_is_array(list) || json_array_size(list) > most[i]) return false;
        for (size_t k = 0; k < json_array_size(list); k++)
            if (!fits[i](json_array_get(list, k))) return false;
    }
    return true;
}

int run_notes_read(json_t **out, const char *dir) {
    struct buf b = {0};
    char *path = file_join(dir, "notes.json");
    int rc = 0;
    *out = NULL;
    if (!file_exists(path)) *out = json_pack("{s:[], s:[]}", "tags", "notes");
    else rc = file_read(&b, path, MAX_FILE);
    if (rc == 0 && !*out) rc = json_parse(out, b.p, b.n, path);
    if (rc == 0 && !is_whole(*out)) {
        json_decref(*out);
        *out = NULL;
        rc = err_set(ERR_FORMAT, __FILE__, __LINE__,
                     "%s is not what verlc note writes ({\"tags\": [...], \"notes\": [...]}); mend it or move it away", path);
    }
    if (rc < 0) *out = NULL;
    free(path);
    buf_free(&b);
    return rc;
}

/* ---- changing ---- */

static int64_t find_tag(const json_t *tags, const char *tag, size_t n) {
    for (size_t i = 0; i < json_array_size(tags); i++) {
        const char *s = json_string_value(json_array_get(tags, i));
        if (strlen(s) == n && memcmp(s, tag, n) == 0) return (int64_t)i;
    }
    return -1;
}

static int add_tag(json_t *tags, const char *tag, size_t n) {
    if (n == 0) FAIL(ERR_INVAL, "a tag is empty");
    if (n > RUN_TAG_BYTES) FAIL(ERR_INVAL, "tag '%.*s...' has more than %d bytes", 20, tag, RUN_TAG_BYTES);
    if (!text_utf8_valid(tag, n)) FAIL(ERR_INVAL, "a tag is not UTF-8");
    if (find_tag(tags, tag, n) >= 0) return 0;
    if (json_array_size(tags) == MAX_TAGS) FAIL(ERR_INVAL, "the run has %d tags; --untag takes one away", MAX_TAGS);
    return json_array_append_new(tags, json_stringn(tag, n));
}
static int remove_tag(json_t *tags, const char *tag, size_t n) {
    const int64_t at = find_tag(tags, tag, n);
    if (at < 0) FAIL(ERR_INVAL, "the run has no tag '%.*s'", (int)n, tag);
    return json_array_remove(tags, (size_t)at);
}

/* Each of a list separated by commas, without the space around it. */
static int each_tag(json_t *tags, const char *list, int (*fn)(json_t *tags, const char *tag, size_t n)) {
    for (const char *p = list; p;) {
        const char *comma = strchr(p, ','), *end = comma ? comma : p + strlen(p);
        while (p < end && *p == ' ') p++;
        while (end > p && end[-1] == ' ') end--;
        TRY(fn(tags, p, (size_t)(end - p)));
        p = comma ? comma + 1 : NULL;
    }
    return 0;
}

static int change(json_t *o, const struct run_notes_change *c) {
    json_t *notes = json_object_get(o, "notes"), *tags = json_object_get(o, "tags");
    const size_t n = c->text ? strlen(c->text) : 0;
    if (c->remove > (int64_t)json_array_size(notes))
        FAIL(ERR_INVAL, "there is no note %lld; the run has %zu", (long long)c->remove, json_array_size(notes));
    if (c->remove > 0) json_array_remove(notes, (size_t)c->remove - 1);
    TRY(each_tag(tags, c->tags, add_tag));
    TRY(each_tag(tags, c->untag, remove_tag));
    if (!c->text) return 0;
    if (n == 0) FAIL(ERR_INVAL, "the note is empty");
    if (n > RUN_NOTE_BYTES) FAIL(ERR_INVAL, "the note has %zu bytes; at most %d", n, RUN_NOTE_BYTES);
    if (!text_utf8_valid(c->text, n)) FAIL(ERR_INVAL, "the note is not UTF-8");
    if (json_array_size(notes) == MAX_NOTES) FAIL(ERR_INVAL, "the run has %d notes; --remove N takes one away", MAX_NOTES);
    return json_array_append_new(notes, json_pack("{s:f, s:s}", "wall", clock_wall(), "text", c->text));
}

/* A descriptor of the directory, locked: until it is closed. */
static int lock(const char *dir) {
    const int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) FAIL(ERR_INPUT, "%s: %s", dir, strerror(errno));
    for (const double end = clock_now() + LOCK_S; flock(fd, LOCK_EX | LOCK_NB) < 0;) {
        if (errno != EWOULDBLOCK && errno != EINTR) return fd; /* a file system without locks */
        if (clock_now() > end) {
            close(fd);
            FAIL(ERR_TIMEOUT, "%s: another program has held it for %.0f s; try again", dir, LOCK_S);
        }
        nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    }
    return fd;
}

int run_notes_change(const char *dir, const struct run_notes_change *c) {
    json_t *o = NULL;
    struct buf b = {0};
    const int fd = lock(dir);
    TRY(fd);
    char *path = file_join(dir, "notes.json");
    int rc = run_notes_read(&o, dir);
    if (rc == 0) rc = change(o, c);
    if (rc == 0) rc = json_dump_line(&b, o);
    if (rc == 0) rc = buf_addc(&b, '\n');
    if (rc == 0) rc = file_write_atomic(path, b.p, b.n);
    json_decref(o);
    buf_free(&b);
    free(path);
    close(fd);
    return rc;
}
