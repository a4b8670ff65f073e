"""An environment of the package `verifiers`, unchanged, as an agent program: it asks this run's model, and its rubric is the reward.

    pip install 'verifiers<0.4' reasoning-gym
    python3 examples/verifiers_agent.py --rows 1000 ReasoningGymEnv gym=chain_sum > train.jsonl
    verlc ppo data.train_files=train.jsonl \\
        "actor_rollout_ref.rollout.agent.command='python3 examples/verifiers_agent.py ReasoningGymEnv gym=chain_sum'" ...

The environment is a package's name (its load_environment gets the arguments), or that of a class of verifiers. A row has the
example's number in extra_info.index, and its prompt, by which verlc leaves out prompts that are too long. See
docs/tutorial_black_box.md."""

import argparse
import asyncio
import json
import os

import verifiers.legacy as vf
from verifiers.legacy.types import ClientConfig


def environment(name, arguments):
    return getattr(vf, name)(**arguments) if name.endswith("Env") else vf.load_environment(name, **arguments)


def argument(word):
    key, _, value = word.partition("=")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def plain(messages):
    """As a row has them: role and text."""
    return [{k: v for k, v in dict(m).items() if k in ("role", "content")} for m in messages]


def rows(env, n):
    for i, example in enumerate(env.get_dataset(n)):
        print(json.dumps({"data_source": "verifiers", "prompt": plain(example["prompt"]), "reward_model": {"ground_truth": ""},
                          "extra_info": {"index": i}}))


async def episode(env):
    row = json.loads(os.environ["VERLC_ROW"])
    example = dict(env.get_dataset()[row["extra_info"]["index"]])
    client = ClientConfig(api_base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY", max_retries=2)
    result = await env.run_rollout(example, client, os.environ["VERLC_MODEL"], {})
    if result.get("error"):
        raise SystemExit(f"the environment failed: {result['error']}")
    print(json.dumps({"reward": result["reward"], **(result.get("metrics") or {})}))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("arguments", nargs="*", metavar="KEY=VALUE", help="the environment's arguments; a value is JSON, or text")
    parser.add_argument("--rows", type=int, help="print so many rows of its training data")
    a = parser.parse_args()
    env = environment(a.name, dict(argument(x) for x in a.arguments))
    if a.rows:
        rows(env, a.rows)
    else:
        asyncio.run(episode(env))


if __name__ == "__main__":
    main()
