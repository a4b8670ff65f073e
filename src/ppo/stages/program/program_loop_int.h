/* program_loop_int.h - the state of a run's agent programs, and what the files of program_loop.c say to each other: sessions as
 * serve sees them (session.c), turns in the engine (turns.c), processes (process.c), what an episode becomes (episode.c), requests
 * and episodes that wait for a generation (held.c).
 *
 * Invariant: a session is QUEUED, RUNNING, OVER in this order; it has a process while it is RUNNING alone. */
#ifndef VERLC_PPO_STAGES_PROGRAM_LOOP_INT_H
#define VERLC_PPO_STAGES_PROGRAM_LOOP_INT_H

#include "ppo/stages/generation.h"
#include "ppo/stages/program_journal.h"
#include "ppo/stages/program_loop.h"

#include "agent/child_program.h"
#include "agent/token_tree.h"
#include "base/map.h"
#include "serve/serve.h"

enum {
    PROGRAM_ID_BYTES = 16,    /* of a session's id and key */
    PROGRAM_MAX_SAMPLES = 256 /* of an episode that are trained: the first ones and the last */
};

enum program_state { QUEUED, RUNNING, OVER };
struct program_session {
    int64_t sample;
    enum program_state state;
    char id[2 * PROGRAM_ID_BYTES + 1], key[2 * PROGRAM_ID_BYTES + 1];
    struct child_program *program;
    struct http_listener *listener; /* in its sandbox; NULL: it has none, or not yet */
    struct token_tree *tree;
    int64_t n_restarts;     /* runs that were killed while it ran */
    bool held;              /* no generation draws for it now, since */
    double held_at;         /* http_server_clock */
    int32_t oldest_version; /* of its first token; -1: it has none */
    double begun, active, drawing;
    int64_t n_asked, n_open, n_drawing, room; /* open: not answered. room: tokens that the turn just asked for may have */
    double oldest;                            /* clock_awake: since then a turn is open */
    int64_t n_turns, n_preempted, n_other_temperature, n_malformed;
    const char *cut;  /* its last request was refused: "length", "max_assistant_turns"; NULL: it was not */
    char *said;       /* text of the last turn */
    json_t *log;      /* of its turns */
    json_t *calls;    /* of each turn: an array of calls, as in BATCH_EPISODE */
    double *answered; /* (n_turns) clock_awake */
    int64_t cap_answered;
    bool has_reward;
    double reward;
    json_t *extra; /* what came with the reward */
};
struct program_call {                /* one turn that is being drawn */
    struct program_session *session; /* NULL: it is over, or nobody waits for it */
    uint64_t ticket;
    bool left; /* its client has */
    /* where new weights may interrupt it: the request, its arrays owned, and what it has */
    struct engine_request q;
    int32_t *prompt, *stop_ids, *ids, *versions;
    char **stop;
    float *logp, *kept;
    int64_t n;
};
struct program_request { /* a request of a held session */
    struct program_session *session;
    struct http_exchange *x; /* NULL: its client has left */
};
struct program_loops {
    struct program_loops_args a;
    struct serve_sessions hooks;
    struct serve *serve;
    struct http_server *http;
    struct generation_state *g;                                   /* whose episodes these are */
    struct program_session **sessions;                            /* in the order in which they began */
    int64_t n_sessions, cap_sessions, n_running, n_waiting, next; /* running, not over: of those not held. next: may be QUEUED */
    struct map ids;                                               /* id -> session */
    struct program_call *calls;                                   /* by their number */
    int64_t n_calls, cap_calls;
    struct program_request **later; /* in the order in which they came */
    int64_t n_later, cap_later;
    const struct engine_sample *drawn; /* within program_loop_drawn, with */
    const struct program_call *call;
    int64_t max_files; /* of a process of a program */
    const char **dirs; /* for sandboxes; ends with NULL */
    char *dir;
    double looked;
    int rc; /* of a call to the engine within a callback, which ends the run */
};

/* session.c: what serve asks of a session. */
struct serve_sessions program_session_hooks(struct program_loops *p);
/* {"reward": x, ...}. ERR_INVAL: there is no number. */
int program_session_take_reward(struct program_session *s, const json_t *o);

/* turns.c: the engine behind serve. */
struct serve_backend program_turns_backend(struct program_loops *p);
void program_call_free(struct program_call *c);
/* The turns of s, or (NULL) of all that are not held, will not be drawn. */
void program_calls_fail(struct program_loops *p, const struct program_session *s);

/* process.c */
int program_sandbox_open(struct program_loops *p);
/* Starts those for which there is room, after their beginning is on disk. */
int program_processes_start(struct program_loops *p);
/* Whether the program of s, which runs, has ended or is late. */
int program_process_look_at(struct program_loops *p, struct program_session *s);

/* episode.c */
struct program_journal program_journal_of(const struct program_loops *p);
/* The sample is there, or it has failed. */
void program_episode_close(struct program_loops *p, struct program_session *s);
/* The program is over; failure (taken over): why it has no score, or NULL. */
int program_episode_end(struct program_loops *p, struct program_session *s, char *failure, bool timed_out);

/* held.c: requests of programs, those of a session that no generation draws for later. */
void program_request_take(void *loops, struct http_exchange *x);
/* The requests of s that wait are made, or (why) refused. */
void program_requests_end(struct program_loops *p, const struct program_session *s, const char *why);

#endif
