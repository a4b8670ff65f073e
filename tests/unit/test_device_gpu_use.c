/* test_device_gpu_use.c - how busy a GPU is, by an NVML made for the test: means since the last call, asked by UUID; none where the
 * library is missing, lacks a function, fails, or does not know the device. */
#include "base/clock.h"
#include "base/file.h"
#include "device/gpu_use.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <cmocka.h>

static const struct dev_ops gpu = {.name = "cuda"}, other = {.name = "cpu"};
static char dir[64];

/* Knows one device, which is busy for 40, then 80 %, then 40 again; 3 GiB are in use. */
static const char nvml[] =
    "#include <string.h>\n"
    "static int n, opened;\n"
    "int nvmlInit_v2(void) { opened++; return INIT; }\n"
    "int nvmlShutdown(void) { return 0; }\n"
    "int nvmlDeviceGetHandleByUUID(const char *uuid, void **d) { *d = &n;\n"
    "  return opened == 1 && strcmp(uuid, \"GPU-01234567-89ab-cdef-0123-456789abcdef\") == 0 ? 0 : 6; }\n"
    "int nvmlDeviceGetUtilizationRates(void *d, unsigned *u) { u[0] = d == &n && n++ % 2 ? 80 : 40; u[1] = 7; return 0; }\n"
    "#ifndef NO_MEMORY\n"
    "int nvmlDeviceGetMemoryInfo(void *d, unsigned long long *m) { m[0] = m[1] = 1; m[2] = 3ull << 30; return d != &n; }\n"
    "#endif\n";

static void build(const char *name, const char *flags) {
    char command[512];
    char *source = file_join(dir, "nvml.c");
    assert_int_equal(file_write_atomic(source, nvml, sizeof nvml - 1), 0);
    snprintf(command, sizeof command, "cc -shared -fPIC %s -o %s/%s %s", flags, dir, name, source);
    assert_int_equal(system(command), 0);
    char *path = file_join(dir, name);
    setenv("VERLC_NVML_LIB", path, 1);
    free(path);
    free(source);
}

static int make_dir(void **state) {
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/verlc-test-XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}
static int remove_dir(void **state) {
    (void)state;
    return file_remove_tree(dir);
}

static struct dev device(const struct dev_ops *ops, const char *id) {
    struct dev d = {.ops = ops};
    snprintf(d.id, sizeof d.id, "%s", id);
    return d;
}

/* Asks until there is an answer, for so many seconds. */
static bool ask(struct dev *d, double seconds, double *busy, double *bytes) {
    for (const double end = clock_now() + seconds; clock_now() < end;) {
        if (dev_gpu_use(d, busy, bytes)) return true;
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    return false;
}

static void means(void **state) {
    (void)state;
    double busy, bytes;
    build("all.so", "-DINIT=0");
    struct dev d = device(&gpu, "0123456789abcdef0123456789abcdef");
    assert_true(ask(&d, 20, &busy, &bytes)); /* its first call begins to look */
    assert_true(busy == 0.4 && bytes == 3.0 * (1 << 30));
    assert_true(ask(&d, 20, &busy, &bytes)); /* none until it has looked again: no sum is told twice */
    assert_true(busy == 0.8);
    dev_close(&d);
    assert_null(d.use);
}

static void without(void **state) {
    (void)state;
    double busy, bytes;
    static const struct {
        const char *id, *flags; /* NULL: no library */
    } cases[] = {{"0123456789abcdef0123456789abcdef", "-DINIT=9"},
                 {"0123456789abcdef0123456789abcdef", "-DINIT=0 -DNO_MEMORY"},
                 {"ffffffffffffffffffffffffffffffff", "-DINIT=0"},
                 {"", "-DINIT=0"},
                 {"0123456789abcdef0123456789abcdef", NULL}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char name[16];
        snprintf(name, sizeof name, "%zu.so", i);
        if (cases[i].flags) build(name, cases[i].flags);
        else setenv("VERLC_NVML_LIB", "/nonexistent/libnvidia-ml.so.1", 1);
        struct dev d = device(&gpu, cases[i].id);
        assert_false(ask(&d, 0.1, &busy, &bytes));
        dev_close(&d);
    }
    struct dev d = device(&other, "0123456789abcdef0123456789abcdef");
    assert_false(dev_gpu_use(&d, &busy, &bytes));
    assert_null(d.use);
    dev_close(&d);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(means), cmocka_unit_test(without)};
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
