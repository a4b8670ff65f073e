/* test_device_cuda_open.c - how the CUDA backend's library is found and refused, and how a device is
 * chosen by name.  Needs no GPU: VERLC_CUDA_LIB points at files that are not the library.
 * The library's ops are tested in tests/ops where there is a GPU. */
#include "base/err.h"
#include "base/file.h"
#include "device/device.h"

#include <dlfcn.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

/* Opening with VERLC_CUDA_LIB=path must fail with this text, and so must the question. */
static void refuses(const char *path, const char *text) {
    struct dev d;
    char why[512];
    setenv("VERLC_CUDA_LIB", path, 1);
    assert_int_equal(dev_open_cuda(&d, 0), ERR_DEVICE);
    if (!strstr(err_msg(), text)) fail_msg("'%s' does not say '%s'", err_msg(), text);
    assert_null(d.ops);
    assert_false(dev_cuda_present(why, sizeof why));
    assert_non_null(strstr(why, text));
    assert_null(strchr(why, '\n'));
    unsetenv("VERLC_CUDA_LIB");
}

static void test_no_such_file(void **state) {
    (void)state;
    refuses("/nonexistent/libverlc_cuda.so", "there is no such file");
}

static void test_not_a_library(void **state) {
    (void)state;
    char path[64];
    snprintf(path, sizeof path, "/tmp/verlc-cuda-%d.so", (int)getpid());
    assert_int_equal(file_write_atomic(path, "not a library\n", 14), 0);
    refuses(path, "cannot open");
    unlink(path);
}

/* A library of the system opens, but is not the backend. */
static void test_another_library(void **state) {
    (void)state;
    Dl_info info;
    double (*fn)(double, double) = pow;
    void *p;
    memcpy(&p, &fn, sizeof p);
    assert_true(dladdr(p, &info) != 0 && info.dli_fname != NULL);
    if (!strstr(info.dli_fname, ".so")) { /* libm is part of the program itself */
        print_message("skip: no shared library to try\n");
        return;
    }
    refuses(info.dli_fname, "is not verlc's CUDA backend");
}

static void test_names(void **state) {
    (void)state;
    static const char *const bad[] = {"gpu", "cuda0", "cuda:", "cuda:x", "cuda:-1", "cuda: 1", "cuda:1x", "cuda:99999999999",
                                      "",    "CPU"};
    struct dev d = {0};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(dev_open_named(&d, bad[i], 1, NULL), ERR_INVAL);
        assert_non_null(strstr(err_msg(), "is unknown"));
    }
    assert_int_equal(dev_open_named(&d, "ref", 1, NULL), 0);
    assert_string_equal(d.ops->name, "ref");
    dev_close(&d);
    assert_int_equal(dev_open_named(&d, "cpu", 1, "c"), 0);
    assert_string_equal(d.isa, "c");
    dev_close(&d);
}

/* Without a library auto is the CPU, and an explicit cuda is an error. */
static void test_auto_without_library(void **state) {
    (void)state;
    static const char *const names[] = {NULL, "auto"};
    struct dev d = {0};
    setenv("VERLC_CUDA_LIB", "/nonexistent/libverlc_cuda.so", 1);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(dev_open_named(&d, names[i], 1, "c"), 0);
        assert_string_equal(d.ops->name, "cpu");
        dev_close(&d);
    }
    assert_int_equal(dev_open_named(&d, "cuda", 1, NULL), ERR_DEVICE);
    assert_int_equal(dev_open_named(&d, "cuda:1", 1, NULL), ERR_DEVICE);
    unsetenv("VERLC_CUDA_LIB");
}

/* The library as it was built, if it was: a device, or one line that says why there is none. */
static void test_as_built(void **state) {
    (void)state;
    struct dev d;
    char why[512];
    const bool present = dev_cuda_present(why, sizeof why);
    const int rc = dev_open_cuda(&d, 0);
    if (!present) {
        assert_int_equal(rc, ERR_DEVICE);
        assert_string_equal(why, err_msg());
        assert_true(strncmp(why, "cuda: ", 6) == 0);
        print_message("skip: %s\n", why);
        return;
    }
    if (rc < 0) fail_msg("%s", err_msg());
    print_message("%s (%s)\n", d.describe, d.isa);
    assert_true(d.mem_total > 0);
    dev_close(&d);
    assert_int_equal(dev_open_cuda(&d, 1023), ERR_DEVICE);
    assert_non_null(strstr(err_msg(), "there is no GPU 1023"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_such_file), cmocka_unit_test(test_not_a_library),        cmocka_unit_test(test_another_library),
        cmocka_unit_test(test_names),        cmocka_unit_test(test_auto_without_library), cmocka_unit_test(test_as_built),
    };
    return cmocka_run_group_tests_name("dev: cuda library, device names", tests, NULL, NULL);
}
