"""Conversations with tools beside verl 0.9.1's own ToolAgentLoop: its ids, mask, turns and calls, for
tests/golden/test_agent_tool_agent_verl.c, which drives the state machine, continuous tokens and the parsers over them.

  oracle_tool_agent.py fixtures --out DIR                a small tokenizer (tests/fixtures/agent/tool_agent)
  oracle_tool_agent.py check PROGRAM [--conversations N]  the real tokenizers of Qwen2.5, Qwen3 and Llama 3.1 in --data, every
                                                         parser: N conversations, then PROGRAM over them

The model is scripted: its turns are oracle_tool_parser's, calls of tools well and badly written, with the model's end token, cut,
or of arbitrary ids.  The tools are scripted too: texts of every length, exceptions, rewards.  What verl's loop appends for a call
(errors, cut texts) is handed to the program: tools.py has an oracle of its own.

Needs verl 0.9.1 and transformers, or --verl DIR: an unpacked wheel.
"""
import argparse
import asyncio
import importlib.util
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import types
import warnings
from pathlib import Path

import oracle_continuous as continuous
import oracle_tool_parser as written
import oracle_verl

warnings.simplefilter("ignore")
ROOT = Path(__file__).resolve().parent.parent
REAL = {"qwen2_5": "qwen2", "qwen3": "qwen3", "llama3_1": "llama"}
ENDS = ["<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>"]  # those that the tokenizer has
KWARGS = {"qwen3": [{}, {"enable_thinking": False}], "llama3_1": [{"date_string": "1 Jan 2026"}]}
RESULTS = continuous.WORDS + ["x" * 300, "日本語" * 100, "line\n" * 60, "0", "{}", "a" * 256, "a" * 257]


class Anything(types.ModuleType):
    """A module of which only names are needed."""

    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def load_verl(directory):
    """ToolAgentLoop itself, with its parsers, tools and continuous tokens; servers, datasets and workers stand in."""
    if directory:
        sys.path.insert(0, directory)
    sys.meta_path.append(oracle_verl.Absent())  # what is missing and not used
    import ray.actor  # noqa: F401
    import transformers  # noqa: F401

    for name in ("verl.utils.model", "verl.utils.dataset.rl_dataset", "verl.workers.config", "verl.workers.rollout.llm_server",
                 "verl.workers.rollout.replica", "verl.protocol", "verl.tools.tool_registry", "verl.trainer.distillation",
                 "verl.experimental.agent_loop.single_turn_agent_loop"):
        sys.modules[name] = Anything(name)
    if importlib.util.find_spec("PIL") is None:
        sys.modules["PIL"] = Anything("PIL")
        sys.modules["PIL.Image"] = Anything("PIL.Image")
        sys.modules["PIL"].Image = sys.modules["PIL.Image"]
    from verl.experimental.agent_loop import agent_loop, tool_agent_loop
    from verl.tools import base_tool, schemas

    return types.SimpleNamespace(agent_loop=agent_loop, loop=tool_agent_loop, base_tool=base_tool, schemas=schemas)


# ---- the model and the tools ----

def scripted_tool(verl, schema, rng):
    class Tool(verl.base_tool.BaseTool):
        async def execute(self, instance_id, parameters, **kwargs):
            kind = rng.random()
            if kind < 0.1:
                raise rng.choice([ValueError("not that"), KeyError("x"), RuntimeError("ünïcödé\nline")])
            text = rng.choice(RESULTS) if kind < 0.8 else str(parameters)[:400].encode(errors="replace").decode()
            return verl.schemas.ToolResponse(text=text), rng.choice([None, 0.0, 1.0, -0.25]), {}

    parsed = verl.schemas.OpenAIFunctionToolSchema.model_validate(schema)
    tool = Tool.__new__(Tool)  # its constructor prints
    tool.config, tool.tool_schema, tool.name = {}, parsed, parsed.function.name
    return tool


def turn_ids(rng, tok, name, more):
    """A turn of the model: calls, or none."""
    kind = rng.random()
    if kind < 0.02:
        return [rng.randrange(len(tok)) for _ in range(rng.randrange(1, 30))]
    if not more or kind < 0.06:
        text = rng.choice(continuous.WORDS)
    else:
        text = FORMATS[name](rng) if rng.random() < 0.9 else written.turn(rng, name)
    text = text.encode(errors="replace").decode()[:3000]
    ids = tok.encode(text, add_special_tokens=False)
    if rng.random() < 0.93:
        ends = [tok.convert_tokens_to_ids(t) for t in ENDS]
        ids.append(rng.choice([e for e in ends if e is not None and e != tok.unk_token_id]))
    if rng.random() < 0.03:
        ids = ids[: rng.randrange(len(ids) + 1)]
    return ids


def well_written(name):
    """Without anything bent around it, so that most turns have a call."""
    return lambda rng: rng.choice(["", "", "so:\n"]) + "".join(written.FORMATS[name](rng) for _ in range(rng.choice([1, 1, 1, 2])))


FORMATS = {name: well_written(name) for name in written.FORMATS}


class Server:
    """Draws what it is told to, within verl's limits of a server."""

    def __init__(self, output, turns, rules):
        self.output, self.turns, self.rules, self.drawn = output, turns, rules, []

    async def generate(self, *, prompt_ids, **kwargs):
        most = min(self.rules["response_length"], self.rules["prompt_length"] + self.rules["response_length"] - len(prompt_ids))
        ids = self.turns[min(len(self.drawn), len(self.turns) - 1)][: max(most, 1)]
        self.drawn.append({"ids": ids, "calls": []})
        return self.output(token_ids=ids, log_probs=[-0.5] * len(ids), routed_experts=None, stop_reason="completed",
                           num_preempted=0, extra_fields={})


def rules_of(rng):
    return {"prompt_length": rng.choice([400, 3000, 4000]), "response_length": rng.choice([100, 1000, 2000, 6000, 6000, 6000]),
            "max_assistant_turns": rng.choice([None, None, None, 0, 1, 2, 5]),
            "max_user_turns": rng.choice([None, None, None, 1, 2, 4]),
            "max_parallel_calls": rng.choice([1, 1, 2, 4])}


def config_of(rules, name, kwargs, rng):
    from omegaconf import OmegaConf

    multi_turn = {k: rules[k] for k in ("max_assistant_turns", "max_user_turns", "max_parallel_calls")}
    multi_turn |= {"format": name, "max_tool_response_length": rng.choice([256, 20, 1]),
                   "tool_response_truncate_side": rng.choice(["middle", "left", "right"])}
    rollout = {"prompt_length": rules["prompt_length"], "response_length": rules["response_length"], "full_determinism": False,
               "multi_turn": multi_turn}
    return OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}}), OmegaConf.create({"apply_chat_template_kwargs": kwargs})


def recorded(loop, server):
    """Notes each call with what verl appends for it, in the order of the calls."""
    call_tool = loop._call_tool

    async def call(tool_call, tools_kwargs, agent_data):
        calls = server.drawn[-1]["calls"]
        place = len(calls)
        calls.append(None)
        response, reward, more = await call_tool(tool_call, tools_kwargs, agent_data)
        calls[place] = [*written.clean(tool_call), response.text or "", reward]
        return response, reward, more

    loop._call_tool = call


def conversation(verl, rng, tok, model, model_type, name):
    kwargs = rng.choice(KWARGS.get(model, [{}]))
    rules = rules_of(rng)
    messages = [{"role": "system", "content": rng.choice(["Be brief.", "日本語", "a\n b"])}] if rng.random() < 0.5 else []
    question = rng.choice(["What is it?", "Hallo 😀 " * 5, "sum\n1 2 3", "word " * rng.choice([1, 500])])
    messages.append({"role": "user", "content": question})
    schemas = [s for s in (written.tools(rng) or [])[: rng.choice([1, 2, 8])] if s["type"] == "function"]
    script = rng.randrange(1, 9)
    turns = [turn_ids(rng, tok, name, k + 1 < script) for k in range(script)]
    tools = {s["function"]["name"]: scripted_tool(verl, s, rng) for s in schemas}
    config, data = config_of(rules, name, kwargs, rng)
    server = Server(types.SimpleNamespace, turns, rules)
    row = {"model": model, "model_type": model_type, "kwargs": kwargs, "format": name, "rules": rules, "messages": messages}
    wrap, listed = verl.agent_loop.DictConfigWrap, verl.agent_loop.ToolListWrap(list(tools.values()))
    loop = verl.loop.ToolAgentLoop(trainer_config=wrap(config), server_manager=server, tokenizer=tok, processor=None,
                                   dataset_cls=None, data_config=wrap(data), hf_model_type=model_type, tools=listed)
    recorded(loop, server)
    row["tools"] = loop.tool_schemas
    try:
        out = asyncio.get_event_loop().run_until_complete(loop.run({}, raw_prompt=list(messages)))
    except Exception as error:
        return {**row, "turns": server.drawn, "verl": {"refused": f"{type(error).__name__}: {error}"[:200]}}
    if not out.response_mask:
        out.response_ids = []  # agent-empty-response: the last 0 ids are all of them
    answer = {"prompt": out.prompt_ids, "ids": out.response_ids, "mask": out.response_mask, "num_turns": out.num_turns,
              "tool_rewards": out.extra_fields["tool_rewards"]}
    return {**row, "turns": server.drawn, "verl": answer}


# ---- all of them ----

def real_models(out, data):
    for name, model_type in REAL.items():
        tokenizer, config = continuous.real_tokenizer(data / "tokenizers" / name)
        template = config.pop("chat_template")
        config.pop("added_tokens_decoder", None)
        config.pop("extra_special_tokens", None)
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        continuous.write_model(out / name, json.dumps(tokenizer, ensure_ascii=False), config, template)
        yield name, model_type
    one_call = continuous.SMALL["json_one_call"][1]
    continuous.write_model(out / "one_call", json.dumps(tokenizer, ensure_ascii=False), config, one_call)
    yield "one_call", "llama"  # as Llama's later templates: a result is JSON, and two are refused


def small_models(out):
    tokenizer = continuous.small_tokenizer()
    continuous.add_tokens(tokenizer, continuous.FAMILY_TOKENS)
    for name in ("chatml", "json_one_call"):
        model_type, template = continuous.SMALL[name]
        continuous.write_model(out / name, json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":")),
                               {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}, template)
        yield name, model_type


def rows(verl, out, models, n):
    """n conversations, models and formats in turn."""
    from transformers import AutoTokenizer

    made = []
    for model, model_type in models:
        tok = AutoTokenizer.from_pretrained(out / model)
        if tok.pad_token_id is None:
            tok.pad_token_id = tok.eos_token_id  # verl.utils.tokenizer.set_pad_token_id
        made.append((tok, model, model_type))
    for k in range(n):
        tok, model, model_type = made[k % len(made)]
        name = list(FORMATS)[k // len(made) % len(FORMATS)]
        yield conversation(verl, random.Random(f"tool agent {k}"), tok, model, model_type, name)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["fixtures", "check"])
    p.add_argument("program", nargs="?")
    p.add_argument("--out", type=Path)
    p.add_argument("--data", type=Path, default=Path(os.environ.get("SHARED_DATA", ROOT / "../shared/data")))
    p.add_argument("--conversations", type=int, default=1000)
    p.add_argument("--verl")
    a = p.parse_args()
    verl = load_verl(a.verl)
    logging.disable(logging.CRITICAL)
    asyncio.set_event_loop(asyncio.new_event_loop())
    with tempfile.TemporaryDirectory() as directory:
        out = a.out or Path(directory)
        models = small_models(out) if a.what == "fixtures" else real_models(out, a.data)
        made = list(rows(verl, out, list(models), 130 if a.what == "fixtures" else a.conversations))
        if a.what == "fixtures":
            made = [r for r in made if len(json.dumps(r)) < (8000 if any(t["calls"] for t in r["turns"]) else 3000)]
        made.sort(key=lambda r: (r["model"], str(r["kwargs"])))  # each is opened once
        (out / "conversations.jsonl").write_text("".join(json.dumps(r, separators=(",", ":")) + "\n" for r in made))
        refused = sum("refused" in r["verl"] for r in made)
        print(f"{len(made)} conversations, {sum(len(r['turns']) for r in made)} turns, "
              f"{sum(len(t['calls']) for r in made for t in r['turns'])} calls, "
              f"{max(len(r['turns']) for r in made)} turns at most, {refused} refused by verl")
        return subprocess.run([a.program, out], stderr=subprocess.STDOUT).returncode if a.program else 0


if __name__ == "__main__":
    sys.exit(main())
