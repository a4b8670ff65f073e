/* test_device_nvtx.c - what a profiler is told of phases and calls: one range a phase, one a call inside it, each
 * ended, in the order of the program; nothing where none listens. On a GPU the ranges are NVTX's. */
#include "base/err.h"
#include "device/device.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

static char said[512];
static void note(const char *name) {
    const size_t n = strlen(said);
    snprintf(said + n, sizeof said - n, "%s ", name ? name : ".");
}

static void calls(struct dev *d) {
    float x[4] = {1, 2, 3, 4}, y[4] = {0};
    dev_trace_phase(d, "gen");
    assert_int_equal(dev_copy(d, y, x, sizeof x), 0);
    assert_int_equal(dev_axpby(d, tensor_1d(y, DT_F32, 4), 2, tensor_1d(x, DT_F32, 4), 1), 0);
    dev_trace_phase(d, "update");
    assert_int_equal(dev_zero(d, y, sizeof y), 0);
    /* refused before it is a call */
    assert_int_equal(dev_axpby(d, tensor_1d(y, DT_F32, 3), 2, tensor_1d(x, DT_F32, 4), 1), ERR_INVAL);
    dev_trace_phase(d, NULL);
    assert_int_equal(dev_zero(d, y, sizeof y), 0);
}

static void ranges_follow_the_program(void **state) {
    (void)state;
    struct dev d;
    assert_int_equal(dev_open_named(&d, "cpu", 1, NULL), 0);
    said[0] = '\0';
    calls(&d);
    assert_string_equal(said, "");
    d.range = note;
    calls(&d);
    assert_string_equal(said, "gen copy . axpby . . update zero . . zero . ");
    said[0] = '\0';
    dev_trace_start(&d); /* a trace and a profiler do not disturb each other */
    calls(&d);
    assert_int_equal(dev_trace_stop(&d, NULL, NULL), 0);
    assert_string_equal(said, "gen copy . axpby . . update zero . . zero . ");
    dev_close(&d);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(ranges_follow_the_program)};
    return cmocka_run_group_tests_name("ranges of a profiler", tests, NULL, NULL);
}
