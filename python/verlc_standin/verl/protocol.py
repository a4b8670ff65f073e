"""verl.protocol under verlc: a DataProto as far as reward managers use it: rows of tensors by name, objects by name, and
meta_info. Tensors are torch's where torch is installed, else numpy's arrays.

Invariant: everything in batch and non_tensor_batch has len(self) rows."""

import numpy as np

try:
    import torch
except ImportError:
    torch = None


def tensor(values, dtype="int64"):
    array = np.asarray(values, dtype=dtype)
    return torch.from_numpy(array) if torch is not None else array


def concat_tensors(parts):
    return torch.cat(parts) if torch is not None and torch.is_tensor(parts[0]) else np.concatenate(parts)


class TensorBatch(dict):
    """{name: tensor of n rows}; an index other than a name takes rows of all."""

    def __getitem__(self, key):
        return super().__getitem__(key) if isinstance(key, str) else TensorBatch({k: v[key] for k, v in self.items()})

    @property
    def batch_size(self):
        return (len(next(iter(self.values()))),) if self else ()


class DataProtoItem:
    """One row."""

    def __init__(self, batch=None, non_tensor_batch=None, meta_info=None):
        self.batch, self.non_tensor_batch, self.meta_info = batch, non_tensor_batch or {}, meta_info or {}


class DataProto:
    def __init__(self, batch=None, non_tensor_batch=None, meta_info=None):
        self.batch = batch if isinstance(batch, TensorBatch) else TensorBatch(batch or {})
        self.non_tensor_batch, self.meta_info = non_tensor_batch or {}, meta_info or {}

    @classmethod
    def from_dict(cls, tensors=None, non_tensors=None, meta_info=None):
        return cls(tensors, {k: objects(v) for k, v in (non_tensors or {}).items()}, meta_info)

    def __len__(self):
        columns = self.batch or self.non_tensor_batch
        return len(next(iter(columns.values()))) if columns else 0

    def __getitem__(self, item):
        rows = {k: v[item] for k, v in self.non_tensor_batch.items()}
        kind = DataProtoItem if isinstance(item, (int, np.integer)) else DataProto
        return kind(self.batch[item] if self.batch else None, rows, self.meta_info)

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def select(self, batch_keys=None, non_tensor_batch_keys=None, meta_info_keys=None):
        def pick(values, keys):
            return {k: v for k, v in values.items() if keys is None or k in keys}
        return DataProto(pick(self.batch, batch_keys), pick(self.non_tensor_batch, non_tensor_batch_keys),
                         pick(self.meta_info, meta_info_keys))

    def pop(self, batch_keys=(), non_tensor_batch_keys=(), meta_info_keys=()):
        return DataProto({k: self.batch.pop(k) for k in batch_keys or ()},
                         {k: self.non_tensor_batch.pop(k) for k in non_tensor_batch_keys or ()},
                         {k: self.meta_info.pop(k) for k in meta_info_keys or ()})

    def union(self, other):
        self.batch.update(other.batch)
        self.non_tensor_batch.update(other.non_tensor_batch)
        self.meta_info.update(other.meta_info)
        return self

    @staticmethod
    def concat(data):
        first = data[0]
        return DataProto({k: concat_tensors([d.batch[k] for d in data]) for k in first.batch},
                         {k: np.concatenate([d.non_tensor_batch[k] for d in data]) for k in first.non_tensor_batch},
                         first.meta_info)

    def to(self, device):
        return self


def objects(values):
    """An array of Python objects, whatever they are."""
    array = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        array[i] = value
    return array
