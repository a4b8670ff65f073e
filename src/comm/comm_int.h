/* comm_int.h - what the files of comm share: libzmq's functions, frames, connections, the loop that moves bytes. */
#ifndef VERLC_COMM_INT_H
#define VERLC_COMM_INT_H

#include "base/buf.h"
#include "comm/comm.h"

#include <pthread.h>
#include <zmq.h>

/* ---- libzmq, opened at run time: a run of one rank does not need it ---- */
/* clang-format off */
#define COMM__ZMQ(X) \
    X(ctx_new) X(ctx_term) X(socket) X(close) X(setsockopt) X(getsockopt) X(bind) X(connect) X(socket_monitor) X(poll) \
    X(strerror) X(has) X(curve_keypair) X(curve_public) X(send) X(recv) X(msg_init) X(msg_init_size) X(msg_data) \
    X(msg_size) X(msg_more) X(msg_gets) X(msg_send) X(msg_recv) X(msg_close)
/* clang-format on */
struct comm__zmq {
#define X(f) __typeof__(zmq_##f) *f;
    COMM__ZMQ(X)
#undef X
};
extern struct comm__zmq zmq;
int comm__zmq_open(void); /* ERR_INPUT: it is not there, with the line that installs it. Any thread, any number of times */

/* ---- the group's end, set by one thread and seen by the others ---- */
struct comm__alarm {
    pthread_mutex_t lock;
    int fd;         /* an eventfd, readable from then on */
    bool rung;      /* under lock, like why */
    char why[1024]; /* one line */
};
int comm__alarm_init(struct comm__alarm *a);
void comm__alarm_destroy(struct comm__alarm *a);
bool comm__alarm_ring(struct comm__alarm *a, const char *why); /* true: it is the first */
bool comm__alarm_rung(struct comm__alarm *a);
int comm__alarm_error(struct comm__alarm *a); /* ERR_RANK with why, which must be set */

/* ---- frames ---- */
enum { COMM__MAGIC = 0x434c5256 /* VRLC */ };
enum comm__kind {
    COMM__BARRIER = 1,
    COMM__BROADCAST,
    COMM__GATHER,
    COMM__ALL_GATHER,
    COMM__EXCHANGE,
    COMM__CALL,
    COMM__REPLY,
    COMM__KINDS
};
const char *comm__kind_name(unsigned kind); /* "all_gather" */
struct comm__frame {
    uint32_t magic;
    uint16_t protocol, kind;
    int32_t rank;           /* the sender's; -1: the controller */
    uint32_t part;          /* of a call or reply: 0 the head, then the arrays; else 0 */
    uint64_t seq;           /* operations of a group and calls of a rank are counted from 1 */
    uint64_t offset, total; /* of the message's bytes */
};
_Static_assert(sizeof(struct comm__frame) == 40 && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "frames are sent as they lie in memory");
/* Fills f from a message of n bytes. ERR_FORMAT: it is malformed in itself. who: the sender, for the message. */
int comm__frame_read(struct comm__frame *f, const void *p, size_t n, const char *who);

/* The JSON messages next to the frames: what a rank sends to the control endpoint, and the controller's answers. */
struct comm__join {
    int rank, size, pid;
    const char *build, *version, *host, *machine, *calls; /* borrowed from the JSON; machine: comm__machine's */
    const json_t *mesh;                                   /* element r: where rank r > rank is to connect, as comm_where.address */
};
enum { COMM__NAME = 64, COMM__ENDPOINT = 128, COMM__ADDRESSES = 512, COMM__MACHINE = 128 };
enum { COMM__CONTROLLER = -1, COMM__NOBODY = -2 };
int comm__join_read(struct comm__join *j, const json_t *m, const char *where);
struct comm__heartbeat { /* a heartbeat */
    struct coordinator_progress progress;
    double age;    /* seconds since the last progress */
    int waits_for; /* a rank; COMM__CONTROLLER; COMM__NOBODY */
    int64_t call;  /* the number of the last call that arrived */
};
int comm__heartbeat_read(struct comm__heartbeat *p, const json_t *m, const char *where);
/* The arrays of a call or a reply as they are received. */
struct comm__arrays {
    struct comm_bytes *p;
    int n;
    struct comm_bytes map; /* where they lie together; n 0: each has memory of its own */
};
/* Their sizes from the head, checked. own: and memory of their own. ERR_NOMEM. */
int comm__arrays_read(struct comm__arrays *a, const json_t *head, bool own, const char *who);
void comm__arrays_free(struct comm_bytes *p, int n, struct comm_bytes map);
int comm__rendezvous_parse(struct comm_where *w, const char *job, const char *text, size_t n, const char *path);
const char *comm__build(void);            /* the hash of this program's file */
void comm__machine(char *text, size_t n); /* the same in all processes of this host, and there alone: host names may repeat */

/* ---- a connection to one peer ---- */
struct comm__link {
    void *sock, *events; /* a DEALER, and the monitor's PAIR */
    char who[COMM__NAME + 64];
    int rank;       /* the peer's; -1: the controller */
    int pid;        /* the peer's, as it is seen there */
    double lost_at; /* clock_awake; 0: it is not lost */
    int fd;         /* of a connection that this side made; 0: none yet */
    double unacked; /* since when bytes have been sent and no acknowledgement has come, of clock_awake; 0: all are acknowledged */
    bool refused;   /* the handshake of a connection that this side made failed */
    int ignore;     /* disconnections that follow such a failure */
    /* Where this side listens anybody may connect, and one peer alone has the key. Its connection is among maybe[]: those open when
     * a handshake succeeded, until its first message says which one it is. */
    bool listens, joined, known;
    int *maybe, n_maybe, cap_maybe; /* descriptors */
};
/* ctx: a ZeroMQ context; address: "127.0.0.1" or "*"; *port: the one it got. key: the group's secret one. */
int comm__link_listen(struct comm__link *l, void *ctx, const char *key, const char *address, int *port);
int comm__link_connect(struct comm__link *l, void *ctx, const char *key, const char *endpoint);
void comm__link_close(struct comm__link *l, bool linger);
void comm__link_events(struct comm__link *l); /* takes the monitor's events */
/* Options of every socket: CURVE, keepalive, queue. server: it listens. */
int comm__set_options(void *sock, const char *key, bool server);
int comm__zmq_fail(const char *what); /* ERR_IO with ZeroMQ's reason */

/* ---- moving bytes ---- */
struct comm__move {
    struct comm__link *link;
    bool sends, receives; /* also of 0 bytes */
    const uint8_t *out;
    size_t n_out, sent;
    uint8_t *in;
    size_t n_in, got;
    struct buf *head; /* receives: a message of any size up to its max goes here instead */
    bool out_done, in_done;
};
struct comm__wait {
    int rank; /* this one's; -1: the controller */
    enum comm__kind kind;
    uint32_t part;
    uint64_t seq;
    double deadline;                      /* of clock_awake */
    struct comm__alarm *alarm;            /* ends the wait; NULL ok */
    void (*waiting)(void *arg, int rank); /* reports to the heartbeats for whom, or COMM__NOBODY; NULL ok */
    void *arg;
};
/* Until all is moved. ERR_RANK: a peer is lost, or the alarm; ERR_TIMEOUT; ERR_FORMAT: not what the other side should send. */
int comm__run(const struct comm__wait *w, struct comm__move *moves, int n);
/* A head and arrays one after the other. shared: arrays of comm__share, which stay open until the peer has answered; -1: none. */
int comm__send_message(struct comm__wait *w, struct comm__link *l, json_t *head, const struct comm_bytes *arrays, int n,
                       int shared);
/* text: where the head is read to. The caller owns *head and the arrays, after an error too. */
int comm__recv_message(struct comm__wait *w, struct comm__link *l, struct buf *text, json_t **head, struct comm__arrays *arrays);

/* ---- arrays between processes of one host ---- */
bool comm__worth_sharing(const struct comm_bytes *arrays, int n);
int comm__share(const struct comm_bytes *arrays, int n, int *fd); /* a copy of them; the caller closes *fd. ERR_NOMEM */
/* fd of process pid. Sets arrays[i].p, whose sizes are known; *map is to be unmapped. */
int comm__map(struct comm_bytes *arrays, int n, int pid, int fd, struct comm_bytes *map, const char *who);
/* What only a process that can open it knows. */
struct comm__probe {
    char token[33];
    int fd;
};
int comm__probe_new(struct comm__probe *p);
int comm__probe_copy(struct comm__probe *p); /* of a token that is set already */
bool comm__probe_seen(const struct comm__probe *p, int pid, int fd);

/* ---- messages of JSON, on the control endpoint ---- */
int comm__send_json(void *sock, const void *to, size_t n_to, json_t *m); /* takes m; to: a ROUTER's address of the peer */
/* 1: one was read; 0: none there; ERR_FORMAT: malformed. from: COMM__ID bytes, the length of the sender's address. */
enum { COMM__ID = 32 };
int comm__recv_json(void *sock, uint8_t *from, size_t *n_from, json_t **m, const char *who);

/* ---- addresses: IPv4 ---- */
/* HOST:PORT of the user's, or of a peer: ERR_INVAL: it is not, or an IPv6 address; ERR_INPUT: the host has none but IPv6. */
int comm__address_check(const char *address);
/* The first of where's addresses that can be reached, as ZeroMQ has it, and this host's own address on the way there. 1: found. */
int comm__reach(const char *addresses, char *endpoint, char *own);
/* "A:PORT,B:PORT" of this host's interfaces but loopback; first (NULL ok): the one to begin with. */
void comm__host_addresses(char *text, size_t n, int port, const char *first);

#endif
