"""verl's tools and interactions, for src/agent/tools.c: one process of several, each with its own objects.

  init {"tool_config_path", "function_tool_path", "interaction_config_path", "max_response_length", "truncate_side", "processes"}
  {"op": "describe"} -> {"tools": [{"name", "schema", "function"}, ...], "interactions": [name, ...]}
  {"op": "call", "episode", "name", "arguments", "tools_kwargs", "tool_selection", "extra_fields", "agent_data"}
      -> {"text", "status": ok | unknown | arguments | error, "reward", "seconds", "truncated", "set", "removed"}
  {"op": "interact", "episode", "messages", "kwargs", "extra_fields"}
      -> {"text", "status": ok | error, "reward", "seconds", "stop", "set", "removed"}
  {"op": "end", "episode"} -> {}

Calls run concurrently on one event loop (event_loop.py keeps their deadlines); functions that are not async run in threads of
their own.
"set" and "removed" are what a call changed in the episode's extra_fields, as far as JSON can carry it.

Invariant: a tool's failure is a text for the model and a status; an episode's calls in this process see one AgentData, and
nothing of it stays after "end"."""

import asyncio
import collections.abc
import inspect
import json
import os
import sys
import time

from verlc_helpers import verl_package
from verlc_helpers.protocol import HelperError, one_line, serve, text_of
from verlc_helpers.reward import plain, score_of
from verlc_helpers.tool_episode import Episodes
from verlc_helpers.tool_threads import in_thread
from verlc_helpers.user_function import describe

LONGEST_ERROR = 100_000  # characters of an exception's text
TOOLS = None  # Tools


def init(value):
    global TOOLS
    os.environ["VERLC_TOOL_PROCESSES"] = str(value.get("processes") or 1)
    verl_package.provide()
    TOOLS = Tools(value)
    return handle_async


def loaded(load, key, path):
    try:
        return load()
    except (Exception, SystemExit) as error:
        plain_words = isinstance(error, (ValueError, NotImplementedError)) and str(error)
        text = one_line(error) if plain_words else describe(error)
        raise HelperError(f"{key}={path}: {text}", "INPUT") from error


def truncated(text, longest, side):
    """(text, whether it was cut): longest characters of it and a mark, as verl 0.9."""
    if not text or len(text) <= longest:
        return text or "", False
    if side == "left":
        return "(truncated)..." + text[-longest:], True
    if side == "right":
        return text[:longest] + "...(truncated)", True
    half = longest // 2
    return text[:half] + "...(truncated)..." + text[-half:], True  # half 0: all of it at the end, as in verl


class Tools:
    def __init__(self, value):
        from verl.tools.function_tool import FunctionTool, normalize_function_tool_return
        from verl.tools.function_tool import load_function_tools_from_path as functions_of
        self.FunctionTool, self.normalized = FunctionTool, normalize_function_tool_return
        self.longest, self.side = value.get("max_response_length", 256), value.get("truncate_side") or "middle"
        path, functions = value.get("tool_config_path"), value.get("function_tool_path")
        find_neighbours(path, functions, value.get("interaction_config_path"))
        self.native = loaded(lambda: native_of(path), "tool_config_path", path) if path else []
        self.functions = loaded(lambda: functions_of(functions), "function_tool_path", functions) if functions else []
        both = sorted({t.name for t in self.functions} & {t.name for t in self.native})
        if both:
            raise HelperError(f"Function tool name(s) {both} collide with tools already declared in '{path}': each name must be "
                              "unique across tool_config_path and function_tool_path; rename one of them", "INPUT")
        self.list = self.native + self.functions
        self.by_name = {t.name: t for t in self.list}  # of one name the later
        path = value.get("interaction_config_path")
        self.interactions = loaded(lambda: interactions_of(path), "interaction_config_path", path) if path else {}
        self.episodes = Episodes()

    def describe(self):
        tools = [{"name": t.name, "schema": t.tool_schema.model_dump(exclude_unset=True, exclude_none=True),
                  "function": isinstance(t, self.FunctionTool)} for t in self.list]
        return {"tools": tools, "interactions": list(self.interactions)}

    def active(self, selection):
        if not selection or not self.by_name:
            return self.by_name
        return {n: self.by_name[n] for n in selection if isinstance(n, str) and n in self.by_name}

    async def call(self, request, episode):
        name, active = request["name"], self.active(request.get("tool_selection"))
        if name not in active:
            return failed("unknown", f"Unknown function '{name}'. Available tools: {list(active)}")
        try:
            arguments = json.loads(request["arguments"])
        except (ValueError, TypeError, RecursionError) as error:
            return failed("arguments", f"Invalid JSON in arguments for '{name}': {error}")
        try:
            response, reward = await self.run(active[name], name, arguments, request.get("tools_kwargs") or {}, episode.data)
            return self.answered(name, response, reward)
        except (Exception, SystemExit, KeyboardInterrupt, GeneratorExit) as error:
            return failed("error", f"Error executing tool '{name}': {said(error)}")

    async def run(self, tool, name, arguments, tools_kwargs, agent_data):
        """(response, reward) of one life of the tool."""
        if isinstance(tool, self.FunctionTool):
            value = await self.called(tool, arguments)
            response, reward, _ = self.normalized(value)
            return response, reward
        instance = None
        try:
            instance, _ = await tool.create(create_kwargs=tools_kwargs.get(name, {}).get("create_kwargs", {}))
            response, reward, _ = await tool.execute(instance, arguments, agent_data=agent_data)
            return response, reward
        finally:
            if instance:
                await release(tool, name, instance)

    async def called(self, tool, arguments):
        if tool.is_async:
            return await tool.fn(**arguments)
        if not isinstance(arguments, collections.abc.Mapping):
            return await asyncio.to_thread(tool.fn, **arguments)  # raises, in verl's words
        value = await in_thread(tool.fn, **arguments)
        return await value if inspect.isawaitable(value) else value

    def answered(self, name, response, reward):
        if response.image or response.video:
            return failed("error", f"Error executing tool '{name}': it answered with images or video, and the model reads text")
        text, cut = truncated(response.text, self.longest, self.side)
        return {"text": text_of(text), "status": "ok", "reward": reward_of(name, reward), "truncated": cut}

    async def interact(self, request, episode):
        """One message of the user. An interaction starts at the episode's first."""
        kwargs = request.get("kwargs") or {}
        try:
            interaction = self.interactions[kwargs["name"]]
            if episode.interaction is None:
                episode.interaction = interaction
                await interaction.start_interaction(request["episode"], **kwargs)
            stop, text, score, _ = await interaction.generate_response(request["episode"], episode.data.messages, **kwargs)
            if not isinstance(text, str):
                raise TypeError(f"generate_response gave {type(text).__name__} as the user's message, not a text")
            return {"text": text_of(text), "status": "ok", "reward": reward_of("interaction", score), "stop": bool(stop)}
        except (Exception, SystemExit, KeyboardInterrupt, GeneratorExit) as error:
            return failed("error", f"{type(error).__name__}: {said(error)}") | {"stop": True}

    async def end(self, name):
        episode = self.episodes.end(name)
        if episode is None or episode.interaction is None:
            return
        try:
            finalize = episode.interaction.finalize_interaction
            await (finalize(name) if takes_one(finalize) else finalize())
        except (Exception, SystemExit) as error:
            print(f"finalize_interaction: {describe(error)}", file=sys.stderr)


def find_neighbours(*paths):
    """Modules beside these files are found, after all others."""
    for path in filter(None, paths):
        where = os.path.dirname(os.path.abspath(path))
        if where not in sys.path:
            sys.path.append(where)


def native_of(path):
    return verl_package.own("verl.tools.tool_registry").initialize_tools_from_config(path)


def interactions_of(path):
    return verl_package.own("verl.interactions.utils.interaction_registry").initialize_interactions_from_config(path)


def takes_one(function):
    try:
        inspect.signature(function).bind("")
    except TypeError:
        return False
    return True


def said(error):
    """What a model is told of an exception: its text, as verl."""
    if isinstance(error, SystemExit):
        return f"it called exit({error.code!r})"
    return text_of(error)[:LONGEST_ERROR]


def failed(status, text):
    return {"text": text_of(text), "status": status, "reward": 0.0, "truncated": False}


def reward_of(name, value):
    """A finite number or None; what is neither is no reward."""
    score = None if value is None else score_of(value)
    if value is not None and score is None:
        print(f"{name}: the reward {text_of(value, repr)[:100]} is not a finite number, and counts as none", file=sys.stderr)
    return score


async def release(tool, name, instance):
    """At the end of a call, whatever that was; what it raises changes nothing of the result."""
    try:
        await tool.release(instance)
    except (Exception, SystemExit) as error:
        print(f"{name}.release: {describe(error)}", file=sys.stderr)


async def handle_async(request):
    op = request.get("op")
    if op == "describe":
        return plain(TOOLS.describe())
    if op == "end":
        await TOOLS.end(request["episode"])
        return {}
    episode = TOOLS.episodes.of(request)
    begun = time.monotonic()
    reply = await (TOOLS.call if op == "call" else TOOLS.interact)(request, episode)
    return reply | {"seconds": time.monotonic() - begun} | episode.changes()


def handle(request):
    return asyncio.run(handle_async(request))


if __name__ == "__main__":
    serve(handle, init)
