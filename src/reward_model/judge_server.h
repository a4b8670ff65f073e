/* judge_server.h - a judge behind an address, as verl's generative reward model: POST /v1/chat/completions and GET /v1/models
 * of OpenAI's HTTP interface, on a free port of 127.0.0.1, for the user's reward function.
 *
 * No thread: requests are read and the judge runs in judge_server_step alone.
 * Invariant: an answer is a function of the conversation, the sampling and the request's seed, not of the order of requests. */
#ifndef VERLC_REWARD_MODEL_JUDGE_SERVER_H
#define VERLC_REWARD_MODEL_JUDGE_SERVER_H

#include "reward_model/generative_judge.h"

struct judge_server;
int judge_server_listen(struct judge_server **out);             /* ERR_IO: no port; requests wait until it has a model */
void judge_server_close(struct judge_server *s);                /* NULL ok */
const char *judge_server_address(const struct judge_server *s); /* HOST:PORT */
/* The judge, once. a->serve is set; its sampling is that of a request which names none. */
int judge_server_load(struct judge_server *s, const struct judge_args *a);
/* Reads and answers what there is, and one step of the judge's engine. 1: work remains. */
int judge_server_step(struct judge_server *s);
int judge_server_pause(struct judge_server *s); /* judge_pause */
void judge_server_drop(struct judge_server *s); /* open requests are answered by an error */

#endif
