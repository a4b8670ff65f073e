/* preemption.c - what happens when a decoding sample needs a KV block and none is free: the youngest running
 * sample frees its blocks and waits at the head of the queue.  It keeps its tokens; once admitted again
 * they are recomputed like a prompt, less the blocks that prefix caching still finds.  Nothing is swapped to
 * the host.  When samples are admitted is the scheduler's.
 *
 * Invariant: preemption changes when a token is drawn, never which. */
#include "engine/engine_int.h"

void engine__preempt(struct engine *e, struct sample *s) {
    if (s->n_computed < s->req->n_prompt) s->req->planned = 0; /* a sibling may have to lead the prompt */
    engine__release_blocks(e, s);                              /* to be found again */
    s->n_preempted++;
    e->stats.preempted++;
    list_remove(&e->running, s);
    list_push_front(&e->waiting, s);
}

/* The list of running samples is in the order of admission, and so is planning: the tail is never one that is planned. */
bool engine__make_room(struct engine *e, struct sample *s) {
    while (!engine__grow_blocks(e, s, s->n_tokens)) {
        struct sample *youngest = e->running.tail;
        engine__preempt(e, youngest);
        if (youngest == s) return false;
    }
    return true;
}
