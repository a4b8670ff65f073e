/* unusual_values.c - see unusual_values.h. */
#include "run/unusual_values.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const struct unusual_value rows[] = {
#define UNUSUAL(KEY, LEAST, MOST, OFF, TEXT) {.key = KEY, .least = LEAST, .most = MOST, .off = OFF, .text = TEXT},
#include "run/unusual_values.def"
};

const struct unusual_value *unusual_value_rows(size_t *n) {
    *n = sizeof rows / sizeof *rows;
    return rows;
}

void unusual_value_range(const struct unusual_value *u, struct buf *out) {
    if (isinf(u->most)) buf_addf(out, "at least %g", u->least);
    else buf_addf(out, "%g to %g", u->least, u->most);
    if (!isnan(u->off)) buf_addf(out, ", %g: off", u->off);
}

/* By the user: the key, or the list that it is an element of. */
static bool is_set(const struct conf *c, const char *key) {
    const char *last = strrchr(key, '.');
    if (!isdigit((unsigned char)last[1])) return conf_is_set(c, key);
    char *list = xstrndup(key, (size_t)(last - key));
    const bool set = conf_is_set(c, list);
    free(list);
    return set;
}

void unusual_values_find(const struct conf *c, void (*say)(void *arg, const char *line), void *arg) {
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const struct unusual_value *u = &rows[i];
        const json_t *v;
        if (!is_set(c, u->key) || conf_is_null(c, u->key) || conf_json(c, u->key, &v) < 0 || !json_is_number(v)) continue;
        const double x = json_number_value(v);
        if ((x >= u->least && x <= u->most) || x <= u->off) continue;
        struct buf line = {0};
        buf_addf(&line, "unusual_value: %s=%g (usual: ", u->key, x);
        unusual_value_range(u, &line);
        buf_addf(&line, "): %s", u->text);
        say(arg, line.p);
        buf_free(&line);
    }
}
