/* unusual_settings.c - see unusual_settings.h. */
#include "run/unusual_settings.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const struct unusual_setting rows[] = {
#define UNUSUAL(KEY, LEAST, MOST, OFF, TEXT) {.key = KEY, .least = LEAST, .most = MOST, .off = OFF, .text = TEXT},
#include "run/unusual_settings.def"
};

const struct unusual_setting *unusual_setting_rows(size_t *n) {
    *n = sizeof rows / sizeof *rows;
    return rows;
}

void unusual_setting_range(const struct unusual_setting *u, struct buf *out) {
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

void unusual_settings_find(const struct conf *c, void (*say)(void *arg, const char *line), void *arg) {
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const struct unusual_setting *u = &rows[i];
        const json_t *v;
        if (!is_set(c, u->key) || conf_is_null(c, u->key) || conf_json(c, u->key, &v) < 0 || !json_is_number(v)) continue;
        const double x = json_number_value(v);
        if ((x >= u->least && x <= u->most) || x <= u->off) continue;
        struct buf line = {0};
        buf_addf(&line, "unusual_setting: %s=%g (usual: ", u->key, x);
        unusual_setting_range(u, &line);
        buf_addf(&line, "): %s", u->text);
        say(arg, line.p);
        buf_free(&line);
    }
}
