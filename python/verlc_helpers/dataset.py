"""A data set class of the user's (data.custom_cls.path and .name, verl's RLHFDataset or any class of rows), for src/data/rows.c.

  init {"path", "name", "files", "config": the group data of the run, "tokenizer": directory, "max_samples", "prompt_key"}
  {"op": "open"}             -> {"rows": N}
  {"op": "next", "count": K} -> up to K rows as objects, fewer where they are large, [] at the end

A row is what the object gives for an index, without what JSON cannot carry (tensors, images): its raw_prompt is the prompt.

Invariant: rows come in the object's order, each once."""

import importlib

from verlc_helpers import parquet, verl_package
from verlc_helpers.protocol import HelperError, serve
from verlc_helpers.reward import plain
from verlc_helpers.reward_manager import config_of
from verlc_helpers.user_function import describe, load_module

KEY = "data.custom_cls"
CARRIED = (str, int, float, bool, type(None), dict, list, tuple)


def class_of(path, name):
    if path.startswith("pkg://"):
        try:
            module = importlib.import_module(path[len("pkg://"):])
        except (Exception, SystemExit) as error:
            raise HelperError(f"{KEY}.path={path}: {describe(error)}", "INPUT") from error
    else:
        module = load_module(path)
    found = getattr(module, name or "", None)
    if not isinstance(found, type) or not (hasattr(found, "__getitem__") and hasattr(found, "__len__")):
        raise HelperError(f"{KEY}: {path} has no class '{name}' with __len__ and __getitem__", "INPUT")
    return found


def opened(value):
    """The object, made as verl's create_rl_dataset makes it."""
    from verlc_helpers.tokenizer import open_tokenizer
    made = class_of(value["path"], value.get("name"))
    try:
        return made(data_files=value["files"], tokenizer=open_tokenizer(value["tokenizer"]), processor=None,
                    config=config_of(value["config"]), max_samples=value["max_samples"])
    except (Exception, SystemExit) as error:
        raise HelperError(f"{KEY}.name={value.get('name')}: {describe(error)}", "INPUT") from error


def scalar(value):
    """A number of numpy or torch as Python's, an array as a list; anything else as it is."""
    if isinstance(value, CARRIED):
        return value
    made = value.tolist() if hasattr(value, "tolist") else value
    return made if isinstance(made, CARRIED) else value


def row_of(item, prompt_key):
    row = {str(k): plain(scalar(v)) for k, v in item.items() if isinstance(scalar(v), CARRIED) and k != "raw_prompt"}
    if item.get("raw_prompt") is not None:
        row[prompt_key] = plain(item["raw_prompt"] if isinstance(item["raw_prompt"], str) else list(item["raw_prompt"]))
    return row


def rows_of(data, name, prompt_key):
    for i in range(len(data)):
        try:
            yield row_of(dict(data[i]), prompt_key)
        except (Exception, SystemExit) as error:
            raise HelperError(f"{KEY}.name={name}: row {i}: {describe(error)}", "INPUT") from error


def init(value):
    verl_package.provide()
    data = opened(value)
    parquet.state.clear()
    rows = rows_of(data, value.get("name"), value["prompt_key"])
    parquet.state.update(path=value["path"], rows=rows, done=0, held=None, n=len(data))


def handle(request):
    if request["op"] == "open":
        return {"rows": parquet.state["n"]}
    return parquet.next_rows(request["count"])


if __name__ == "__main__":
    serve(handle, init)
