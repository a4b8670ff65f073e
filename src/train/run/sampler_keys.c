/* sampler_keys.c - see sampler_keys.h. verl takes a Python class at this place; here
 * the orders have names. */
#include "train/run/sampler_keys.h"

#include "base/err.h"

int train_read_sampler(const struct conf *c, bool shuffle, const char *source_key, struct data_sampler_spec *s) {
    const char *name = NULL;
    *s = (struct data_sampler_spec){.order = shuffle ? DATA_SHUFFLE : DATA_SEQUENTIAL, .source_key = source_key};
    TRY(conf_str_opt(c, "data.sampler.name", &name));
    TRY(conf_str_opt(c, "data.sampler.column", &s->column));
    TRY(conf_bool_opt(c, "data.sampler.descending", &s->descending));
    if (!conf_is_null(c, "data.sampler.weights")) TRY(conf_json(c, "data.sampler.weights", &s->weights));
    if (name) TRY(data_order_parse(name, &s->order));
    return data_sampler_spec_check(s);
}
