/* address.c - which of the controller's addresses can be reached from here, and what this host's own are. IPv4. */
#include "comm/comm_int.h"

#include "base/err.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { CONNECT_MS = 2000 };

/* Whether a TCP connection there is accepted; own gets this end's address. */
static bool try_connect(const struct addrinfo *a, char *own) {
    struct sockaddr_in here;
    socklen_t n = sizeof here;
    int e = 0;
    socklen_t n_e = sizeof e;
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return false;
    bool ok = connect(fd, a->ai_addr, a->ai_addrlen) == 0 || errno == EINPROGRESS;
    ok = ok && poll(&(struct pollfd){fd, POLLOUT, 0}, 1, CONNECT_MS) == 1;
    ok = ok && getsockopt(fd, SOL_SOCKET, SO_ERROR, &e, &n_e) == 0 && e == 0 && getsockname(fd, (struct sockaddr *)&here, &n) == 0;
    ok = ok && inet_ntop(AF_INET, &here.sin_addr, own, COMM__NAME) != NULL;
    close(fd);
    return ok;
}

/* A name without an IPv4 address may not be known yet; one with an IPv6 address alone will not do. */
static int check_family(const char *host) {
    const struct addrinfo four = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM}, six = {.ai_family = AF_INET6};
    struct addrinfo *list = NULL;
    if (getaddrinfo(host, NULL, &four, &list) == 0) {
        freeaddrinfo(list);
        return 0;
    }
    if (getaddrinfo(host, NULL, &six, &list) != 0) return 0;
    freeaddrinfo(list);
    FAIL(ERR_INPUT, "%s has IPv6 addresses alone, and ranks find each other by IPv4: give it an IPv4 address too", host);
}

int comm__address_check(const char *address) {
    const char *colon = strrchr(address, ':');
    if (address[0] == '[' || (colon && strchr(address, ':') != colon))
        FAIL(ERR_INVAL, "the controller's address '%s' is IPv6: ranks find each other by IPv4, give HOST:PORT with such an address",
             address);
    if (!colon || colon == address || !colon[1]) FAIL(ERR_INVAL, "the controller's address '%s' is not HOST:PORT", address);
    char *host = xstrndup(address, (size_t)(colon - address));
    const int rc = check_family(host);
    free(host);
    TRY(rc);
    return 0;
}

static int reach_one(char *address, char *endpoint, char *own) {
    const struct addrinfo hints = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM};
    struct addrinfo *list = NULL;
    char numeric[INET_ADDRSTRLEN];
    char *colon = strrchr(address, ':');
    int found = 0;
    TRY(comm__address_check(address));
    *colon = '\0';
    if (getaddrinfo(address, colon + 1, &hints, &list) != 0) return 0;
    for (const struct addrinfo *a = list; a && !found; a = a->ai_next) {
        const struct sockaddr_in *there = (const struct sockaddr_in *)(const void *)a->ai_addr;
        found = try_connect(a, own);
        if (found && inet_ntop(AF_INET, &there->sin_addr, numeric, sizeof numeric))
            snprintf(endpoint, COMM__ENDPOINT, "tcp://%s:%d", numeric, ntohs(there->sin_port));
    }
    freeaddrinfo(list);
    return found;
}

int comm__reach(const char *addresses, char *endpoint, char *own) {
    char *copy = xstrdup(addresses), *at = copy, *one;
    int rc = 0;
    while (rc == 0 && (one = strsep(&at, ",")) != NULL) rc = *one ? reach_one(one, endpoint, own) : 0;
    free(copy);
    TRY(rc);
    return rc;
}

static void add_address(char *text, size_t n, const char *numeric, int port) {
    const size_t used = strlen(text);
    if (used + strlen(numeric) + 8 < n) snprintf(text + used, n - used, "%s%s:%d", used ? "," : "", numeric, port);
}

void comm__host_addresses(char *text, size_t n, int port, const char *first) {
    struct ifaddrs *list = NULL;
    char numeric[INET_ADDRSTRLEN];
    *text = '\0';
    if (first) add_address(text, n, first, port);
    if (getifaddrs(&list) != 0) return;
    for (const struct ifaddrs *i = list; i; i = i->ifa_next) {
        if (!i->ifa_addr || i->ifa_addr->sa_family != AF_INET || !(i->ifa_flags & IFF_UP) || (i->ifa_flags & IFF_LOOPBACK))
            continue;
        const struct sockaddr_in *a = (const struct sockaddr_in *)(const void *)i->ifa_addr;
        if (inet_ntop(AF_INET, &a->sin_addr, numeric, sizeof numeric) && !(first && strcmp(first, numeric) == 0))
            add_address(text, n, numeric, port);
    }
    freeifaddrs(list);
}
