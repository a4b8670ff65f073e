/* test_view_terminal.c - columns of wide and combining characters, cuts, wrapping, numbers, plots of braille characters. */
#include "base/err.h"
#include "view/terminal.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static void expect(struct buf *b, const char *want) {
    assert_string_equal(b->p ? b->p : "", want);
    buf_free(b);
}

static void test_text(void **state) {
    (void)state;
    struct buf b = {0};
    term_text(&b, "a\0\x1b[2J\n\xC2\x9B", 9, false);
    expect(&b, "a\\x00\\x1b[2J\\n\\xc2\\x9b");
    term_text(&b, "a\nb", 3, true);
    expect(&b, "a\nb");
    assert_int_equal(term_width("日本e\xCC\x81", 9), 5); /* two wide ones, a letter with its accent */
    term_cell(&b, "日本語", 9, 5, true);
    expect(&b, "日本…");
    term_cell(&b, "日本語", 9, 4, true); /* a wide one does not fit beside the dots */
    expect(&b, "日… ");
    term_cell(&b, "abc", 3, 5, true);
    expect(&b, "abc  ");
    term_cell(&b, "abc", 3, 5, false);
    expect(&b, "abc");
    term_cell(&b, "a\tb\nc", 5, 9, false);
    expect(&b, "a b\\nc");
    term_wrapped(&b, "one two three", 13, 2, 4, 10);
    expect(&b, "one two\n    three");
    char *huge = xmalloc(1 << 20);
    memset(huge, 'x', 1 << 20);
    term_cell(&b, huge, 1 << 20, 4, true);
    expect(&b, "xxx…");
    free(huge);
}

static void test_numbers(void **state) {
    (void)state;
    static const struct {
        double v;
        const char *text;
    } cases[] = {{0, "0"},        {12, "12"}, {-3, "-3"},        {0.123456, "0.1235"}, {1234.56, "1235"}, {1e9, "1e+09"},
                 {3e-7, "3e-07"}, {NAN, "-"}, {INFINITY, "inf"}, {-INFINITY, "-inf"},  {99.999, "100"},   {0.5, "0.5"}};
    struct buf b = {0};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        term_number(&b, cases[i].v);
        expect(&b, cases[i].text);
    }
    static const double seconds[] = {0.0123, 3.21, 59.9, 61, 3723, -1};
    static const char *const times[] = {"12 ms", "3.2 s", "59 s", "1:01", "1:02:03", "0 ms"};
    for (int i = 0; i < 6; i++) {
        term_duration(&b, seconds[i]);
        expect(&b, times[i]);
    }
    term_bytes(&b, 3 << 20);
    expect(&b, "3.0 MiB");
    term_when(&b, 0);
    expect(&b, "-");
}

/* The dots of a plot's lines: (4 height, 2 width), row 0 above. */
static void dots_of(char **lines, int width, int height, char *out) {
    static const int bit[4][2] = {{0, 3}, {1, 4}, {2, 5}, {6, 7}};
    memset(out, '.', (size_t)(8 * width * height));
    for (int row = 0; row < height; row++) {
        const unsigned char *p = (const unsigned char *)lines[row];
        for (int x = 0; x < width; x++) {
            int cell = 0;
            if (*p == ' ') p++;
            else {
                assert_true(p[0] == 0xe2 && (p[1] & 0xfc) == 0xa0 && (p[2] & 0xc0) == 0x80); /* U+2800 to U+28FF */
                cell = (p[1] & 3) << 6 | (p[2] & 0x3f);
                p += 3;
            }
            for (int y = 0; y < 4; y++)
                for (int k = 0; k < 2; k++)
                    if (cell >> bit[y][k] & 1) out[(4 * row + y) * 2 * width + 2 * x + k] = '#';
        }
        assert_int_equal(*p, 0);
        free(lines[row]);
    }
}

static void plot(const struct term_plot *p, double lo, double hi, const char *want) {
    char *lines[8], got[512];
    double a, b;
    assert_true(term_plot(p, lines, &a, &b));
    assert_float_equal(a, lo, 1e-9);
    assert_float_equal(b, hi, 1e-9);
    dots_of(lines, p->width, p->height, got);
    got[8 * p->width * p->height] = '\0';
    if (strcmp(got, want) != 0)
        for (int y = 0; y < 4 * p->height; y++) print_message("%.*s\n", 2 * p->width, got + 2 * y * p->width);
    assert_string_equal(got, want);
}

static void test_plot(void **state) {
    (void)state;
    static const double x[] = {1, 2, 3, 4};
    plot(&(struct term_plot){.x = x, .y = (const double[]){0, 1, 2, 3}, .n = 4, .width = 2, .height = 1}, 0, 3,
         "..##" /* half of a step is drawn in either column */
         ".##."
         "##.."
         "#...");
    plot(&(struct term_plot){.x = x, .y = (const double[]){5, 5, 5, 5}, .n = 4, .width = 2, .height = 1}, 5, 5,
         "...."
         "####"
         "...."
         "....");
    plot(&(struct term_plot){.x = x, .y = (const double[]){3, NAN, NAN, 0}, .n = 4, .width = 2, .height = 1}, 0, 3, /* a gap */
         "#..."
         "...."
         "...."
         "...#");
    plot(&(struct term_plot){.x = x, .y = (const double[]){1, 10, -4, 1000}, .n = 4, .width = 2, .height = 1, .log = true}, 1, 1000,
         "...#" /* the value below 0 is a gap */
         "...."
         "##.."
         "#...");
    plot(&(struct term_plot){.x = x, .y = (const double[]){7}, .n = 1, .width = 1, .height = 2}, 7, 7,
         ".."
         ".."
         ".."
         "#."
         ".."
         ".."
         ".."
         "..");
    plot(&(struct term_plot){.x = x, .y = (const double[]){-1.5e308, 1.5e308}, .n = 2, .width = 1, .height = 1}, -1.5e308, 1.5e308,
         ".#"
         "##"
         "#."
         "#.");
    char *lines[4];
    double lo, hi;
    assert_false(term_plot(&(struct term_plot){.x = x, .y = (const double[]){NAN, INFINITY}, .n = 2, .width = 4, .height = 1},
                           lines, &lo, &hi));
    assert_false(term_plot(&(struct term_plot){.width = 4, .height = 1}, lines, &lo, &hi));
}

static void test_terminal(void **state) {
    (void)state;
    struct terminal t;
    setenv("COLUMNS", "123", 1);
    assert_int_equal(terminal_of_output(&t, "always"), 0);
    assert_true(t.colour && t.width >= 40);
    assert_int_equal(terminal_of_output(&t, "never"), 0);
    assert_false(t.colour);
    assert_int_equal(terminal_of_output(&t, "sometimes"), ERR_INVAL);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_text), cmocka_unit_test(test_numbers), cmocka_unit_test(test_plot),
                                       cmocka_unit_test(test_terminal)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
