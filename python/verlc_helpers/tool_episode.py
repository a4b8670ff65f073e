"""What the calls of an episode share in one process: verl's AgentData, of which extra_fields is the tools' own to write.

extra_fields travel with every request and every answer, so that another process can go on with them; values that JSON cannot
carry (a connection, a browser) stay in this process.  Invariant: changes() tells a change once."""

from verlc_helpers.reward import plain

GONE = object()


class AgentData:
    """The state of an episode as a tool sees it. messages, ids, masks and counts are as at the call; changes to them go nowhere."""

    def __init__(self, request_id):
        self.request_id = request_id
        self.messages, self.tools_kwargs, self.metrics = [], {}, {}
        self.image_data = self.video_data = self.audio_data = self.routed_experts = self.mm_processor_output = None
        self.mm_processor_kwargs = {}
        self.prompt_ids, self.response_ids, self.response_mask, self.response_logprobs = [], [], [], []
        self.turn_scores, self.tool_rewards, self.tool_calls = [], [], []
        self.user_turns = self.assistant_turns = 0
        self.interaction, self.interaction_kwargs = None, {}
        self.extra_fields = {}


class Episode:
    def __init__(self, name):
        self.data, self.known, self.interaction = AgentData(name), {}, None

    def update(self, request):
        """The caller's view of the episode. Of extra_fields only what this process does not have: it has the newer."""
        for key, value in (request.get("agent_data") or {}).items():
            setattr(self.data, key, value)
        if request.get("tools_kwargs") is not None:
            self.data.tools_kwargs = request["tools_kwargs"]
        if request.get("op") == "interact":
            self.data.messages = request.get("messages") or []
            self.data.interaction_kwargs = request.get("kwargs") or {}
        for key, value in (request.get("extra_fields") or {}).items():
            if key not in self.known:
                self.data.extra_fields.setdefault(key, value)
                self.known[key] = copied(value)

    def changes(self):
        """{"set", "removed"} of extra_fields since the last time."""
        fields = self.data.extra_fields if isinstance(self.data.extra_fields, dict) else {}
        now = {k: copied(v) for k, v in list(fields.items()) if isinstance(k, str) and "\0" not in k and is_json(v)}
        changed = {k: v for k, v in now.items() if self.known.get(k, GONE) != v}
        removed = [k for k in self.known if k not in now and self.known[k] is not GONE]
        self.known = {**dict.fromkeys([k for k, v in self.known.items() if k not in now], GONE), **now}
        return {"set": changed, "removed": removed}


def is_json(value, depth=0):
    if isinstance(value, (list, tuple)):
        return depth < 64 and all(is_json(v, depth + 1) for v in value)
    if isinstance(value, dict):
        return depth < 64 and all(isinstance(k, str) and is_json(v, depth + 1) for k, v in value.items())
    return value is None or isinstance(value, (str, int, float))


def copied(value):
    return plain(value)


class Episodes:
    def __init__(self):
        self.open = {}

    def of(self, request):
        name = request["episode"]
        episode = self.open.get(name)
        if episode is None:
            episode = self.open[name] = Episode(name)
        episode.update(request)
        return episode

    def end(self, name):
        return self.open.pop(name, None)
