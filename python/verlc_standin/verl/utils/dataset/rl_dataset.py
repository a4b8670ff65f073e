"""verl.utils.dataset.rl_dataset under verlc: the base of a data set class of the user's (data.custom_cls), which says which rows
there are.  Prompts are rendered, filtered by length and shuffled by verlc itself."""

import json
import os
import random


class Rows:
    """Rows as dicts, with those methods of datasets.Dataset that data set classes call."""

    def __init__(self, rows):
        self.rows = [dict(row) for row in rows]

    @property
    def column_names(self):
        return list(self.rows[0]) if self.rows else []

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        return (dict(row) for row in self.rows)

    def __getitem__(self, which):
        if isinstance(which, str):
            return [row.get(which) for row in self.rows]
        if isinstance(which, slice):
            return {name: [row.get(name) for row in self.rows[which]] for name in self.column_names}
        return dict(self.rows[which])

    def to_list(self):
        return list(self)

    def map(self, function, with_indices=False, batched=False, remove_columns=None, fn_kwargs=None, **_):
        if batched:
            raise NotImplementedError("map(batched=True) needs the package datasets: load the files with it in "
                                      "_read_files_and_tokenize")
        gone, out = names_of(remove_columns), []
        for i, row in enumerate(self.rows):
            made = function(dict(row), *([i] if with_indices else []), **(fn_kwargs or {}))
            kept = {name: value for name, value in row.items() if name not in gone}
            out.append(kept if made is None else {**kept, **made})
        return Rows(out)

    def filter(self, function, with_indices=False, fn_kwargs=None, **_):
        return Rows(row for i, row in enumerate(self.rows)
                    if function(dict(row), *([i] if with_indices else []), **(fn_kwargs or {})))

    def select(self, indices, **_):
        return Rows(self.rows[int(i)] for i in indices)

    def remove_columns(self, columns):
        return Rows({k: v for k, v in row.items() if k not in names_of(columns)} for row in self.rows)

    def rename_column(self, old, new):
        return Rows({new if k == old else k: v for k, v in row.items()} for row in self.rows)

    def add_column(self, name, column):
        return Rows({**row, name: value} for row, value in zip(self.rows, column))

    def shuffle(self, seed=None, **_):
        rows = list(self.rows)
        random.Random(seed).shuffle(rows)
        return Rows(rows)


def names_of(columns):
    return [columns] if isinstance(columns, str) else list(columns or [])


def read_file(path):
    """The rows of a Parquet, JSON or JSONL file."""
    if path.endswith(".parquet"):
        import pyarrow.parquet

        from verlc_helpers.parquet import read_rows
        return Rows(read_rows(pyarrow.parquet.ParquetFile(path)))
    if not path.endswith((".json", ".jsonl")):
        raise ValueError(f"Unsupported file format: {path}")
    with open(path, encoding="utf-8-sig") as f:
        text = f.read()
    if path.endswith(".json") and text.lstrip().startswith("["):
        return Rows(json.loads(text))
    return Rows(json.loads(line) for line in text.split("\n") if line.strip())


class RLHFDataset:
    """dataframe has the rows; a subclass makes it in _read_files_and_tokenize, or gives rows of its own in __getitem__."""

    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        files = [data_files] if isinstance(data_files, str) else list(data_files)
        self.data_files, self.original_data_files = list(files), list(files)
        self.tokenizer, self.processor, self.config, self.max_samples = tokenizer, processor, config, max_samples
        for name, default in (("cache_dir", "~/.cache/verl/rlhf"), ("prompt_key", "prompt"), ("image_key", "images"),
                              ("video_key", "videos"), ("audio_key", "audios"), ("max_prompt_length", 1024),
                              ("return_raw_chat", False), ("return_full_prompt", False), ("truncation", "error"),
                              ("filter_overlong_prompts", True), ("apply_chat_template_kwargs", {}), ("tool_config_path", None),
                              ("function_tool_path", None), ("use_shm", False), ("need_tools_kwargs", False),
                              ("filter_prompts", True), ("shuffle", False), ("seed", None), ("chat_template_func", None)):
            setattr(self, name, config.get(name, default))
        self.cache_dir = os.path.expanduser(self.cache_dir or "")
        self.num_workers, self.tool_schemas, self.serialize_dataset = 1, None, False
        self._download()
        self._read_files_and_tokenize()

    def _download(self, use_origin_parquet=False):
        """Files of other stores: verlc has copied them."""
        if use_origin_parquet:
            self.data_files = list(self.original_data_files)

    def _read_files_and_tokenize(self):
        rows = [row for path in self.data_files for row in read_file(os.path.expanduser(path))]
        if 0 < self.max_samples < len(rows):
            rows = random.Random(self.seed).sample(rows, self.max_samples) if self.shuffle else rows[:self.max_samples]
        self.dataframe = self.maybe_filter_out_long_prompts(Rows(rows))

    def maybe_filter_out_long_prompts(self, dataframe=None):
        return dataframe  # verlc filters the rows that it gets

    def resume_dataset_state(self):
        self._download(use_origin_parquet=True)
        self._read_files_and_tokenize()

    def __len__(self):
        return len(self.dataframe)

    def _build_messages(self, example, key=None):
        return example[key or self.prompt_key]

    def __getitem__(self, item):
        row = dict(self.dataframe[item])
        row["raw_prompt"] = self._build_messages(row, key=self.prompt_key)
        return row


def collate_fn(data_list):
    """Rows as lists by column; tensors are stacked where there is torch."""
    columns = {}
    for row in data_list:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return columns
