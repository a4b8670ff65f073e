"""A reward that a service gives over HTTP: a sample's text goes there as JSON, {"score": number} comes back.

    pip install aiohttp        # into the environment of the helpers; with the wheel: pip install 'verlc-....whl[http]'
    verlc ppo ... reward.custom_reward_function.path=examples/http_reward.py \
        +reward.custom_reward_function.reward_kwargs.url=http://localhost:9000/score

It is an `async def`: 200 and more calls are in flight in each process. One session, which holds the connections, serves
all calls of a process. What the service refuses, or a reply without a score, raises: the sample has no score then, and
reward.on_error says what follows. reward.timeout is the deadline of one call, retries included."""

import asyncio

import aiohttp

session = None


async def ask(url, question):
    global session
    if session is None:  # in the loop that runs the calls
        session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=256))
    async with session.post(url, json=question) as reply:
        if reply.status == 429 or reply.status >= 500:
            return None
        reply.raise_for_status()
        return float((await reply.json())["score"])


async def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, url, tries=4):
    question = {"data_source": data_source, "answer": solution_str, "ground_truth": ground_truth}
    for pause in [0.2 * 2**k for k in range(tries - 1)] + [None]:
        score = await ask(url, question)
        if score is not None:
            return score
        if pause is not None:
            await asyncio.sleep(pause)
    raise RuntimeError(f"{url} was busy {tries} times")
