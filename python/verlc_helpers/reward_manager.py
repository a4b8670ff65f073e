"""A reward manager of the user: a class of verl's reward loop, whose `async run_single(data)` scores one sample, or of the
older form, called with all samples at once.

  {"path": FILE or null, "names": [class, ...], "config": {...}, "tokenizer": directory, "kwargs": {...}, "reward_fn_key"}

The class is the first of the names that FILE has; without FILE the one that the file of the reward function registers
under that name.  Its data is a DataProto of what verl passes: see rows_of.

Invariant: the object is made once, on the event loop that serves it."""

import inspect

from verlc_helpers.protocol import HelperError
from verlc_helpers.reward_trial import check_arguments
from verlc_helpers.tokenizer import open_tokenizer
from verlc_helpers.user_function import describe, load_module


class Config(dict):
    """OmegaConf's two ways to read, for interpreters without it: config.a.b and config.get("a")."""

    def __getattr__(self, name):
        try:
            value = self[name]
        except KeyError:
            raise AttributeError(name) from None
        return Config(value) if isinstance(value, dict) else value

    def get(self, key, default=None):
        return getattr(self, key) if key in self else default


def config_of(tree):
    try:
        from omegaconf import OmegaConf
    except ImportError:
        return Config(tree)
    return OmegaConf.create(tree)


def registered(name):
    """The class that a reward file has registered, in either of verl's registries."""
    from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls
    from verl.workers.reward_manager import get_reward_manager_cls as get_older
    for get in (get_reward_manager_cls, get_older):
        try:
            return get(name)
        except Exception:  # verl's own and the stand-in's differ in what they raise
            continue
    return None


def class_of(spec):
    if not spec.get("path"):
        found = registered(spec["names"][0])
        if found is None:
            raise HelperError(f"reward.reward_manager.name={spec['names'][0]}: the file of the reward function registers no such "
                              "reward manager; verlc has naive, dapo, gdpo, batch, prime, rate_limited and remote", "INVAL")
        return found
    module = load_module(spec["path"])
    found = next((getattr(module, name) for name in spec["names"] if inspect.isclass(getattr(module, name, None))), None)
    if found is None:
        raise HelperError(f"{spec['path']} has no class '{spec['names'][0]}' (reward.reward_manager.name)", "INPUT")
    return found


def bound(function, kwargs):
    """The reward function with its own arguments, async where it is; without one verl's default by data_source."""
    if function is None:
        from verl.utils.reward_score import default_compute_score
        return default_compute_score
    if inspect.iscoroutinefunction(function):
        async def call_async(*args, **named):
            return await function(*args, **{**named, **kwargs})
        return call_async
    return lambda *args, **named: function(*args, **{**named, **kwargs})


def padded(rows, length, value, left):
    return [[value] * (length - len(r)) + r if left else r + [value] * (length - len(r)) for r in rows]


class Manager:
    def __init__(self, spec, function, kwargs, judge):
        try:
            import numpy  # noqa: F401
        except ImportError as error:
            raise HelperError(f"a reward manager of your own needs numpy: {describe(error)}", "INPUT") from error
        self.spec, self.judge, self.compute_score, self.object = spec, judge, bound(function, kwargs), None
        self.cls = class_of(spec)
        self.is_async = hasattr(self.cls, "run_single")
        self.is_batch = not self.is_async
        if self.is_async and not inspect.iscoroutinefunction(self.cls.run_single):
            raise HelperError(f"{self.cls.__name__}.run_single is not an async def", "INVAL")
        self.tokenizer = open_tokenizer(spec["tokenizer"])
        self.pad = next((i for i in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id) if i is not None), 0)

    def get(self):
        if self.object is None:
            try:
                if self.is_async:
                    self.object = self.cls(config=config_of(self.spec["config"]), tokenizer=self.tokenizer,
                                           compute_score=self.compute_score, **self.judge)
                else:
                    self.object = self.cls(tokenizer=self.tokenizer, num_examine=0, compute_score=self.compute_score,
                                           reward_fn_key=self.spec["reward_fn_key"], **(self.spec.get("kwargs") or {}))
            except Exception as error:
                raise HelperError(f"{self.cls.__name__} cannot be made: {describe(error)}", "INPUT") from error
        return self.object

    def check_arguments(self):
        call = self.cls.run_single if self.is_async else self.cls.__call__
        given = (None, None) if self.is_async else (None, None, True)
        how = "verlc calls run_single(data)" if self.is_async else "verlc calls manager(data, return_dict)"
        check_arguments(call, given, {}, how)

    def data(self, requests):
        """prompts (padded on the left), responses (on the right), input_ids, attention_mask and position_ids; of the
        other kind every column of the rows, raw_prompt, data_source, uid, index, __num_turns__, tool_extra_fields."""
        from verl import DataProto
        from verl.protocol import tensor
        given = [r["data"] for r in requests]
        prompts, responses = [g["prompts"] for g in given], [g["responses"] for g in given]
        n_prompt, n_response = max(map(len, prompts)), max(map(len, responses))
        left, right = padded(prompts, n_prompt, self.pad, True), padded(responses, n_response, self.pad, False)
        mask = [[0] * (n_prompt - len(p)) + [1] * (len(p) + len(r)) + [0] * (n_response - len(r))
                for p, r in zip(prompts, responses)]
        positions = [[max(0, i - n_prompt + len(p)) for i in range(n_prompt + n_response)] for p in prompts]
        tensors = {"prompts": left, "responses": right, "input_ids": [p + r for p, r in zip(left, right)],
                   "attention_mask": mask, "position_ids": positions}
        names = {name for g in given for name in g["columns"]}
        return DataProto.from_dict({k: tensor(v) for k, v in tensors.items()},
                                   {k: object_array([g["columns"].get(k) for g in given]) for k in names}, meta_info={})

    async def single(self, request):
        return await self.get().run_single(self.data([request]))

    def batch(self, requests, result):
        """Replies of reward.py for all samples, from one call."""
        value = self.get()(self.data(requests), return_dict=True)
        rewards, extras = (value["reward_tensor"], value.get("reward_extra_info") or {}) if isinstance(value, dict) else (value, {})
        scores = rewards.sum(-1).tolist()
        if not isinstance(scores, list) or len(scores) != len(requests):
            return {"unparsed": f"{self.cls.__name__} returned rewards of shape {tuple(rewards.shape)} for {len(requests)} samples"}
        extras = {k: v for k, v in extras.items() if len(v) == len(requests)}
        what = f"{self.cls.__name__} returned"
        return {"results": [result(s, what, extra={k: v[i] for k, v in extras.items()} if extras else None)
                            for i, s in enumerate(scores)]}


def object_array(values):
    import numpy as np
    array = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        array[i] = value
    return array
