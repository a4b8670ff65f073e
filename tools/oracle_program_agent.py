"""Agent programs of a run that are written with the real packages `openai` and `anthropic` (sync, async, streams, tools), and an
environment of the real `verifiers`, unchanged (examples/verifiers_agent.py): each is trained, its conversation is one sample, and
the log-probs of training are the rollout's.

  python tools/oracle_program_agent.py VERLC     needs openai and anthropic
  VERIFIERS_PYTHON=...                           a Python with verifiers and reasoning-gym; without it they are skipped
"""

import json
import os
import pathlib
import subprocess
import sys

TOP = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TOP / "tests"))
os.environ["VERLC"] = os.path.abspath(sys.argv[1])
from agent_program import AGENT, REWARD, ROLLOUT, samples  # noqa: E402
from tool_model import calling_model  # noqa: E402
from verlc_test import Scratch, Tests, run, series  # noqa: E402

AGENTS = '''
import asyncio, json, os
import anthropic, openai
ROW, MODEL = json.loads(os.environ["VERLC_ROW"]), os.environ["VERLC_MODEL"]
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds one", "parameters": SCHEMA}}]
CLAUDE_TOOLS = [{"name": "add", "description": "adds one", "input_schema": SCHEMA}]
kind, talk = ROW["extra_info"]["kind"], list(ROW["prompt"])

def answers(calls):
    out = [{"role": "tool", "tool_call_id": c.id, "content": str(json.loads(c.function.arguments)["x"] + 1)} for c in calls or []]
    return out or [{"role": "user", "content": "Sure?"}]

def openai_tools():
    client = openai.OpenAI()
    for _ in range(3):
        said = client.chat.completions.create(model=MODEL, messages=talk, tools=TOOLS, max_completion_tokens=12).choices[0].message
        talk.extend([said, *answers(said.tool_calls)])

def openai_stream():
    client = openai.OpenAI()
    for _ in range(3):
        with client.chat.completions.stream(model=MODEL, messages=talk, tools=TOOLS, max_completion_tokens=12,
                                            stream_options={"include_usage": True}) as s:
            said = s.get_final_completion().choices[0].message
        talk.extend([said.model_dump(exclude_none=True), *answers(said.tool_calls)])

async def openai_async():  # sub-agents at once, then the agent itself
    client = openai.AsyncOpenAI()
    notes = await asyncio.gather(*(client.chat.completions.create(model=MODEL, max_tokens=3, messages=[
        {"role": "system", "content": f"{i}"}, {"role": "user", "content": "Note"}]) for i in range(5)))
    assert len({n.id for n in notes}) == 5
    for _ in range(2):
        said = (await client.chat.completions.create(model=MODEL, messages=talk, max_tokens=6)).choices[0].message
        talk.extend([{"role": "assistant", "content": said.content}, {"role": "user", "content": "And?"}])

def openai_errors():
    client = openai.OpenAI()
    said = client.chat.completions.create(model=MODEL, messages=talk, max_tokens=4, logprobs=True)
    assert len(said.choices[0].logprobs.content) == said.usage.completion_tokens
    for error, code, more in ((openai.BadRequestError, 400, {"n": 2}), (openai.BadRequestError, 400, {"messages": [
            {"role": "user", "content": "far too long " * 5000}]}), (openai.BadRequestError, 400, {"tool_choice": "required"})):
        try:
            client.chat.completions.create(**{"model": MODEL, "messages": talk, **more})
            raise SystemExit(f"not refused: {list(more)}")
        except error as e:
            assert e.status_code == code and e.message, e
    try:
        openai.OpenAI(api_key="another").chat.completions.create(model=MODEL, messages=talk)
        raise SystemExit("another key was not refused")
    except openai.AuthenticationError:
        pass
    assert [m.id for m in client.models.list()] == [MODEL]

def claude(client):
    for _ in range(3):
        said = client.messages.create(model=MODEL, max_tokens=12, messages=talk, tools=CLAUDE_TOOLS, system="Be brief.")
        talk.append({"role": "assistant", "content": said.content})
        back = [{"type": "tool_result", "tool_use_id": b.id, "content": str(b.input["x"] + 1)} for b in said.content
                if b.type == "tool_use"]
        talk.append({"role": "user", "content": back or "Sure?"})

def claude_stream():
    client = anthropic.Anthropic()
    n = client.messages.count_tokens(model=MODEL, messages=talk, system="Be brief.").input_tokens
    for i in range(3):
        with client.messages.stream(model=MODEL, max_tokens=6, messages=talk, system="Be brief.") as s:
            said = s.get_final_message()
        assert i > 0 or said.usage.input_tokens + (said.usage.cache_read_input_tokens or 0) == n
        talk.extend([{"role": "assistant", "content": said.content}, {"role": "user", "content": "Sure?"}])

def claude_tools():
    claude(anthropic.Anthropic())

f = globals()[kind]
asyncio.run(f()) if asyncio.iscoroutinefunction(f) else f()
'''
KINDS = ["openai_tools", "openai_stream", "openai_async", "openai_errors", "claude_tools", "claude_stream"]


def train(s, name, rows, command, **keys):
    for row in rows:
        row.setdefault("extra_info", {})
    run(*s.ppo(name, **{
        "data.train_files": s.write(f"{name}.jsonl", rows), "data.val_files": "null", "data.train_batch_size": len(rows),
        "data.max_response_length": 128, "actor_rollout_ref.model.path": s.dir / "calls", ROLLOUT + "n": 2, "trainer.device": "cpu",
        "trainer.total_training_steps": 1, "trainer.force_old_log_prob": True, ROLLOUT + "calculate_log_probs": True,
        "actor_rollout_ref.actor.ppo_mini_batch_size": len(rows), "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1,
        "reward.on_error": "drop_sample", AGENT + "command": command, **keys}))
    return samples(s.dir / name)


def clients(s, test):
    (s.dir / "agents.py").write_text(AGENTS)
    (s.dir / "reward.py").write_text(REWARD)
    rows = [s.row(i) for i in range(len(KINDS))]
    for row, kind in zip(rows, KINDS):
        row["extra_info"]["kind"] = kind
    got = train(s, "clients", rows, f"{sys.executable} {s.dir / 'agents.py'}",
                **{"reward.custom_reward_function.path": s.dir / "reward.py"})
    last = {(r[1], r[2]): r for r in got}  # of an episode
    for k, kind in enumerate(KINDS):
        for r in (last[k, 0], last[k, 1]):
            test(f"{kind}: a score", r[7] == "score", r[8])
            want = {"first": 1, "sub_agent": 5} if kind == "openai_async" else {"first": 1}
            found = json.loads(r[9]).get("samples")
            test(f"{kind}: one sample a conversation", found == want, found)
    test("the log-probs of training are the rollout's", series(s.dir / "clients", "training/rollout_probs_diff_max") == [0])


def environment(s, test):
    python = os.environ.get("VERIFIERS_PYTHON")
    if not python:
        print("verifiers: skipped, no VERIFIERS_PYTHON")
        return
    words = [python, str(TOP / "examples/verifiers_agent.py"), "ReasoningGymEnv", "gym=chain_sum", "num_train_examples=8",
             "num_eval_examples=1"]
    made = subprocess.run([*words, "--rows", "2"], capture_output=True, text=True, check=True).stdout
    rows = [json.loads(line) for line in made.splitlines()]
    got = train(s, "verifiers", rows, f"'{' '.join(words)}'", **{"data.max_prompt_length": 1024})
    test("verifiers' ReasoningGymEnv: scores are its rubric's", all(r[7] == "score" and 0 <= r[6] <= 1 for r in got), got)
    test("verifiers: the log-probs of training are the rollout's",
         series(s.dir / "verifiers", "training/rollout_probs_diff_max") == [0])


def main():
    test = Tests()
    with Scratch() as s:
        calling_model(s.dir / "model", s.dir / "calls", 12, 9)
        clients(s, test)
        environment(s, test)
    test.end()


main()
