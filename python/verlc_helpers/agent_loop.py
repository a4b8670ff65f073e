"""Agent loops of the user: classes on verl's AgentLoopBase, one object for each episode.

  init {"config": the run's configuration as a tree, "agent_loop_config_path", "tokenizer": directory, "model_type", "url", "token",
        "tool_config_path", "function_tool_path"}
  {"op": "describe"} -> {"loops": [name, ...], "tools": [{"name", "schema"}, ...]}
  {"op": "run", "agent_name", "session", "sampling_params", "row": {column: value}} ->
      {"outputs": [{"prompt_ids", "response_ids",
      "response_mask", "response_logprobs", "reward_score", "num_turns", "metrics", "extra_fields"}, ...]} or {"crash": text}

The YAML file is verl's: a list of {name, _target_: package.module.Class, further keywords}.  The model is behind the run's address:
POST {url}/sessions/{session}/generate {"request_id", "prompt_ids", "sampling_params", "priority"} ->
{"token_ids", "log_probs", "stop_reason",
"num_preempted", "extra_fields"}, which server_manager.generate makes.

Invariant: an output that does not fit together is no sample; what is wrong is said."""

import asyncio
import os

from verlc_helpers import verl_package
from verlc_helpers.http_client import HttpError, post_json
from verlc_helpers.protocol import HelperError, one_line, serve
from verlc_helpers.reward import plain
from verlc_helpers.reward_manager import config_of
from verlc_helpers.tool_episode import is_json
from verlc_helpers.tools import find_neighbours, loaded
from verlc_helpers.user_function import describe

LOOPS = None
RESERVED = ("name", "_target_")


class ServerManager:
    """verl's client of the servers that generate: here the run itself."""

    def __init__(self, url, token, session):
        self.url = f"{url.rstrip('/')}/sessions/{session}/generate"
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def generate(self, request_id, *, prompt_ids, sampling_params, image_data=None, video_data=None, audio_data=None,
                       priority=0, **_):
        """TokenOutput. Calls of one request_id go on from what is in the KV cache of the one before."""
        from verl.workers.rollout.replica import TokenOutput
        if image_data or video_data or audio_data:
            raise ValueError("images, video and audio cannot be sent: the model reads text")
        asked = {"request_id": str(request_id), "prompt_ids": [int(i) for i in prompt_ids],
                 "sampling_params": plain(dict(sampling_params)),
                 "priority": int(priority or 0)}
        got = await post_json(self.url, asked, self.headers)
        fields = ("token_ids", "log_probs", "stop_reason", "num_preempted", "extra_fields")
        try:
            return TokenOutput(**{k: got[k] for k in fields if got.get(k) is not None})
        except (TypeError, AttributeError, ValueError) as error:
            raise HttpError(0, f"{self.url} answers something else than tokens: {one_line(error)}") from error


def entries_of(path):
    """{name: what makes the loop} of the YAML."""
    from verl.utils.yaml_file import load_yaml
    entries = load_yaml(path, list)
    for k, entry in enumerate(entries):
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in RESERVED):
            raise ValueError(f"entry {k} needs name and _target_: package.module.Class")
    return {entry["name"]: entry for entry in entries}


class Loops:
    def __init__(self, value):
        from verl.experimental.agent_loop import agent_loop

        from verlc_helpers.tokenizer import open_tokenizer
        registry = verl_package.own("verl.tools.tool_registry")
        get_tool_class, load_all_tools = registry.get_tool_class, registry.load_all_tools
        self.base, path = agent_loop, value.get("agent_loop_config_path")
        find_neighbours(path, value.get("tool_config_path"), value.get("function_tool_path"))
        entries = loaded(lambda: entries_of(path), "agent_loop_config_path", path) if path else {}
        self.tools = loaded(lambda: load_all_tools(value.get("tool_config_path"), value.get("function_tool_path")),
                            "tools of the run",
                            value.get("tool_config_path") or value.get("function_tool_path"))
        self.classes = {n: loaded(lambda e=e: get_tool_class(e["_target_"]), f"agent_loop_config_path={path}, loop {n}, _target_",
                                  e["_target_"]) for n, e in entries.items()}
        registered = {n: e for n, e in agent_loop._agent_loop_registry.items() if n not in entries and isinstance(e, dict)}
        self.classes |= {n: get_tool_class(e["_target_"]) for n, e in registered.items() if not e["_target_"].startswith("verl.")}
        self.entries = {**registered, **entries}
        self.config, self.tokenizer = config_of(value["config"]), open_tokenizer(value["tokenizer"])
        self.model_type, self.at = value.get("model_type"), (value["url"], value.get("token"))

    def describe(self):
        return {"loops": list(self.classes), "tools": [{"name": t.name, "schema": t.tool_schema.model_dump(
            exclude_unset=True, exclude_none=True)} for t in self.tools]}

    def make(self, name, session):
        base = self.base
        more = {k: v for k, v in self.entries[name].items() if k != "_target_"}
        return self.classes[name](trainer_config=base.DictConfigWrap(config=self.config),
                                  server_manager=ServerManager(*self.at, session),
                                  tokenizer=self.tokenizer, processor=None, hf_model_type=self.model_type, dataset_cls=None,
                                  data_config=base.DictConfigWrap(self.config.data), tools=base.ToolListWrap(self.tools), **more)

    async def run(self, request):
        name = request["agent_name"]
        if name not in self.classes:
            return {"crash": f"Agent loop {name} is not registered; there are {', '.join(self.classes) or 'none'}"}
        try:
            output = await self.make(name, request["session"]).run(dict(request["sampling_params"]), **request["row"])
            outputs = output if isinstance(output, list) else [output]
            return {"outputs": [checked(o) for o in outputs]}
        except (Exception, SystemExit, KeyboardInterrupt, GeneratorExit) as error:
            return {"crash": describe(error)}


def checked(output):
    """An AgentLoopOutput as JSON; ValueError where its parts do not fit."""
    prompt, ids, mask = (list(getattr(output, k)) for k in ("prompt_ids", "response_ids", "response_mask"))
    logp = output.response_logprobs
    if not prompt:
        raise ValueError("AgentLoopOutput has no prompt_ids")
    if len(mask) != len(ids) or (logp is not None and len(logp) != len(ids)):
        raise ValueError(f"AgentLoopOutput has {len(ids)} response_ids, a mask of {len(mask)}"
                         + (f" and {len(logp)} log-probs" if logp is not None else ""))
    if any(m not in (0, 1) for m in mask):
        raise ValueError("AgentLoopOutput.response_mask has something else than 0 and 1")
    fields = {k: plain(v) for k, v in output.extra_fields.items() if isinstance(k, str) and is_json(v)}
    return {"prompt_ids": prompt, "response_ids": ids, "response_mask": mask, "response_logprobs": logp, "extra_fields": fields,
            "reward_score": plain(output.reward_score), "num_turns": int(output.num_turns),
            "metrics": plain(output.metrics.model_dump())}


def init(value):
    global LOOPS
    verl_package.provide()
    for key in ("config", "tokenizer", "url"):
        if not value.get(key):
            raise HelperError(f"the helper of agent loops needs {key}", "INVAL")
    os.environ.setdefault("VERLC_TOOL_PROCESSES", str(value.get("processes") or 1))
    LOOPS = Loops(value)
    return handle_async


async def handle_async(request):
    return plain(LOOPS.describe()) if request.get("op") == "describe" else await LOOPS.run(request)


def handle(request):
    return asyncio.run(handle_async(request))


if __name__ == "__main__":
    serve(handle, init)
