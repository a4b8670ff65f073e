/* listen.c - how a program in a sandbox reaches us: a socket that listens in its network, which this executable makes there before
 * it becomes the program, and sends here.
 * Invariant: of all that is ours nothing but the listener's other end is left to the program. */
#include "sandbox/sandbox_int.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { BACKLOG = 128 };

union control {
    struct cmsghdr head;
    char bytes[CMSG_SPACE(sizeof(int))];
};

/* ---- inside ---- */

static int listen_at(int port) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&at, sizeof at) < 0 || listen(fd, BACKLOG) < 0) return -1;
    return fd;
}

static int send_socket(int over, int fd) {
    union control control = {0};
    char byte = 0;
    struct iovec data = {&byte, 1};
    struct msghdr m = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(c), &fd, sizeof fd);
    return sendmsg(over, &m, MSG_NOSIGNAL) == 1 ? 0 : -1;
}

/* Before main: nothing of the program's has run yet. */
__attribute__((constructor)) static void listen_in_sandbox(int argc, char **argv) {
    if (argc < 5 || strcmp(argv[1], SANDBOX_LISTEN) != 0) return;
    const int over = atoi(argv[3]), fd = listen_at(atoi(argv[2]));
    if (fd < 0 || send_socket(over, fd) < 0) {
        dprintf(2, "the sandbox cannot listen on 127.0.0.1 port %s: %s\n", argv[2], strerror(errno));
        _exit(126);
    }
    close(fd);
    close(over);
    execvp(argv[4], argv + 4);
    dprintf(2, "%s could not be executed: %s\n", argv[4], strerror(errno));
    _exit(127);
}

/* ---- our side ---- */

int sandbox__listener(int fd) {
    union control control = {0};
    char byte;
    int got = -1;
    struct iovec data = {&byte, 1};
    struct msghdr m = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    if (recvmsg(fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC) != 1) return -1;
    const struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS && c->cmsg_len == CMSG_LEN(sizeof got))
        memcpy(&got, CMSG_DATA(c), sizeof got);
    return got;
}
