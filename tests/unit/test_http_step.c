/* test_http_step.c - a server that its owner steps: time in which it was not stepped counts in no client's limit. */
#include "http/server.h"

#include "base/buf.h"
#include "base/clock.h"

#include <arpa/inet.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>

#define LIMIT_S 0.6 /* of a request, and of an answer */
#define GAP_S 1.7   /* longer than the limit and what a gap counts */

static struct http_exchange *asked; /* not answered yet */
static void left(void *arg) { *(struct http_exchange **)arg = NULL; }
static void serve(void *arg, struct http_exchange *x) {
    (void)arg;
    asked = x;
    http_exchange_on_close(x, left, &asked);
}

static struct http_server *open_server(void) {
    struct http_server *s;
    const struct http_server_args a = {
        .host = "127.0.0.1", .max_body = 100, .request_s = LIMIT_S, .answer_s = LIMIT_S, .stepped = true, .serve = serve};
    assert_int_equal(http_server_open(&s, &a), 0);
    return s;
}

static int connect_to(const struct http_server *s, const char *say) {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    const struct sockaddr_in at = {.sin_family = AF_INET,
                                   .sin_port = htons((uint16_t)atoi(strrchr(http_server_address(s), ':') + 1)),
                                   .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    assert_int_equal(connect(fd, (const struct sockaddr *)&at, sizeof at), 0);
    assert_int_equal(send(fd, say, strlen(say), 0), strlen(say));
    return fd;
}

static void pause_s(double s) { nanosleep(&(struct timespec){(time_t)s, (long)((s - (double)(time_t)s) * 1e9)}, NULL); }

static void step_for(struct http_server *s, double seconds) {
    for (const double end = clock_now() + seconds; clock_now() < end; pause_s(0.01)) assert_int_equal(http_server_step(s), 0);
}

static bool is_open(int fd) {
    char byte;
    return recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) != 0;
}

/* Between two requests, in the middle of one, and while an answer is awaited. */
static void gaps(void **state) {
    (void)state;
    struct http_server *s = open_server();
    const int idle = connect_to(s, ""), half = connect_to(s, "POST / HTTP/1.1\r\nHost: localhost\r\nContent-Le"),
              waits = connect_to(s, "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
    step_for(s, 0.05);
    assert_non_null(asked);
    const double before = http_server_clock(s);
    pause_s(GAP_S);
    assert_int_equal(http_server_step(s), 0);
    assert_true(http_server_clock(s) - before < CLOCK_GAP_S + 0.1);
    assert_true(is_open(idle) && is_open(half) && is_open(waits) && asked);
    struct buf body = {0};
    assert_int_equal(buf_adds(&body, "later"), 0);
    http_exchange_reply(asked, 200, "text/plain", &body);
    asked = NULL;
    step_for(s, 0.02);
    char answer[512] = "";
    assert_true(recv(waits, answer, sizeof answer - 1, MSG_DONTWAIT) > 0 && strstr(answer, "later"));
    step_for(s, 2.2); /* stepped, the limits hold: they are looked at once a second */
    assert_true(!is_open(idle) && !is_open(half) && !is_open(waits));
    close(idle);
    close(half);
    close(waits);
    http_server_close(s);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(gaps)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
