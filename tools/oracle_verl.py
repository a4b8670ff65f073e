"""verl 0.9.1's own functions, for the other oracle tools.

Lets verl import where a dependency that its algorithms do not use is missing, and runs
its functions in either precision: `precision(torch.float64)` also lifts the places where
verl casts to float32 by name (.float(), torch.float32, np.float32), so that what is
compared is the formula and not a rounding; `precision(torch.float32)` is verl as it runs.
"""
import importlib.abc
import importlib.machinery
import sys
import types

import numpy as np
import torch

ABSENT = {"ray", "orjson", "tensordict", "codetiming", "torchdata", "datasets", "pandas", "peft"}

FLOAT = torch.Tensor.float


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        class Stub(types.ModuleType):
            __path__ = []

            def __getattr__(self, attr):
                if attr.startswith("__"):
                    raise AttributeError(attr)
                return type(attr, (), {})

        return Stub(spec.name)

    def exec_module(self, module):
        pass


class Wide:
    """A module whose float32 is float64."""

    def __init__(self, module):
        self.module, self.float32 = module, module.float64

    def __getattr__(self, name):
        return getattr(self.module, name)


class Tensors:
    """Stands in for DataProto, which needs tensordict."""

    def __init__(self, batch, non_tensor_batch=None, meta_info=None):
        self.batch, self.non_tensor_batch, self.meta_info = batch, non_tensor_batch or {}, meta_info or {}

    from_dict = classmethod(lambda cls, tensors: cls(tensors))


def load(directory=None):
    """Makes `import verl` work, from an unpacked wheel in `directory` or as installed."""
    if directory:
        sys.path.insert(0, str(directory))
    sys.meta_path.append(Absent())  # last: only what is really missing
    from verl.trainer.ppo import rollout_corr_helper

    rollout_corr_helper.DataProto = Tensors


def precision(dtype):
    from verl.trainer.ppo import core_algos
    from verl.utils import groupwise

    wide = dtype == torch.float64
    torch.set_default_dtype(dtype)
    torch.Tensor.float = torch.Tensor.double if wide else FLOAT
    for module in (core_algos, groupwise):
        module.torch = Wide(torch) if wide else torch
        module.np = Wide(np) if wide else np

