"""Parquet files as JSON rows and back, through pyarrow.  One file at a time.

  {"op": "open", "path": P}               -> {"rows": N, "columns": [names]}
  {"op": "next", "count": K}              -> up to K rows as objects, fewer where they are large, [] at the end
  {"op": "create", "path": P, "schema": S} -> true   (S null: types from the first rows)
  {"op": "add", "rows": [...]}            -> true
  {"op": "finish"}                        -> rows written; the file appears under its name only now

A schema is {column: type}; a type is "string", "int64", "float64", "bool",
{"list": type} or {"struct": {field: type}}.  What JSON cannot hold is converted
when read: bytes to {"base64": text}, dates and decimals to text, NaN and Inf to null.
"""

import base64
import datetime
import decimal
import json
import math
import os

import pyarrow as pa
import pyarrow.parquet as pq

from verlc_helpers.protocol import HelperError, serve

SCALARS = {"string": pa.string(), "int64": pa.int64(), "float64": pa.float64(), "bool": pa.bool_()}
PIECE = 32 << 20  # bytes of JSON in a reply of several rows, and of Arrow decoded together
MOST = 255 << 20  # of one row: src/helper takes replies of 256 MiB
MANY = 512  # rows decoded together
to_text = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
state = {}


def arrow_type(spec):
    if isinstance(spec, str) and spec in SCALARS:
        return SCALARS[spec]
    if isinstance(spec, dict) and set(spec) == {"list"}:
        return pa.list_(arrow_type(spec["list"]))
    if isinstance(spec, dict) and set(spec) == {"struct"}:
        return pa.struct([(name, arrow_type(t)) for name, t in spec["struct"].items()])
    raise HelperError(f"unknown column type {spec!r}", "INTERNAL")


def is_plain(t):
    """Whether every value of an arrow type is JSON as it stands."""
    if pa.types.is_struct(t):
        return all(is_plain(t.field(i).type) for i in range(t.num_fields))
    if pa.types.is_list(t) or pa.types.is_large_list(t) or pa.types.is_fixed_size_list(t):
        return is_plain(t.value_type)
    if pa.types.is_map(t):
        return is_plain(t.key_type) and is_plain(t.item_type)
    return (
        pa.types.is_string(t)
        or pa.types.is_large_string(t)
        or pa.types.is_boolean(t)
        or pa.types.is_null(t)
        or (pa.types.is_integer(t) and not pa.types.is_uint64(t))
    )


def to_json(value):
    if isinstance(value, dict):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return str(value)
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode("ascii")}
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (decimal.Decimal, datetime.timedelta)):
        return str(value)
    return value


def open_file(path):
    state.clear()
    try:
        file = pq.ParquetFile(path, memory_map=True)
    except pa.ArrowInvalid as error:
        raise HelperError(f"{path}: not a readable Parquet file: {error}") from None
    state.update(path=path, rows=read_rows(file), done=0, held=None)
    return {"rows": file.metadata.num_rows, "columns": file.schema_arrow.names}


def read_rows(file):
    """Every row, as JSON can hold it; some MiB of Arrow and of Python's objects at a time."""
    odd = [f.name for f in file.schema_arrow if not is_plain(f.type)]
    for group in range(file.num_row_groups):
        meta = file.metadata.row_group(group)
        fits = PIECE * meta.num_rows // max(meta.total_byte_size, 1)
        for batch in file.iter_batches(batch_size=max(1, min(MANY, fits)), row_groups=[group], use_threads=False):
            step = max(1, min(MANY, PIECE * batch.num_rows // max(batch.nbytes, 1)))
            for lo in range(0, batch.num_rows, step):
                for row in batch.slice(lo, step).to_pylist():
                    for name in odd:
                        row[name] = to_json(row[name])
                    yield row


def size_of(value):
    """Bytes of a value's JSON."""
    text = to_text(value)
    return len(text) if text.isascii() else len(text.encode("utf-8"))


def next_row():
    """The next row and its bytes; (None, 0) at the end."""
    try:
        row = next(state["rows"], None)
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise HelperError(f"{state['path']}: damaged Parquet file: {error}") from None
    if row is None:
        return None, 0
    state["done"] += 1
    size = size_of(row)
    if size > MOST:
        largest, name = max((size_of(value), name) for name, value in row.items())
        raise HelperError(
            f"{state['path']} row {state['done']}: {size / 2**20:.0f} MiB as JSON, the limit of a row is {MOST >> 20} MiB; "
            f"column '{name}' has {largest / 2**20:.0f} MiB of them", "INPUT")
    return row, size


def next_rows(count):
    rows, total = [], 0
    while len(rows) < count:
        row, size = state["held"] or next_row()
        state["held"] = None
        if row is None:
            break
        if rows and total + size > PIECE:
            state["held"] = (row, size)  # of the next reply
            break
        rows.append(row)
        total += size
    return rows


def create_file(path, schema):
    state.clear()
    fields = None if schema is None else pa.schema([(k, arrow_type(t)) for k, t in schema.items()])
    state.update(path=path, tmp=f"{path}.{os.getpid()}-{os.urandom(8).hex()}.tmp", schema=fields, writer=None, written=0)
    return True


def add_rows(rows):
    try:
        table = pa.Table.from_pylist(rows, schema=state["schema"])
    except (pa.ArrowException, TypeError) as error:
        first = state["written"] + 1
        raise HelperError(f"{state['path']}: rows {first} to {first + len(rows) - 1}: {error}") from None
    if state["writer"] is None:
        state["schema"] = table.schema
        state["writer"] = pq.ParquetWriter(state["tmp"], table.schema)
    state["writer"].write_table(table)
    state["written"] += len(rows)
    return True


def finish_file():
    if state["writer"] is None:
        add_rows([])
    state["writer"].close()
    fd = os.open(state["tmp"], os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(state["tmp"], state["path"])
    fd = os.open(os.path.dirname(os.path.abspath(state["path"])), os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    return state["written"]


def discard():
    """Removes a half-written file; the file under the final name is untouched."""
    tmp = state.get("tmp")
    state.clear()
    if tmp and os.path.exists(tmp):
        os.unlink(tmp)


def handle(request):
    op = request["op"]
    if op == "open":
        return open_file(request["path"])
    if op == "next":
        return next_rows(request["count"])
    try:
        if op == "create":
            return create_file(request["path"], request["schema"])
        if op == "add":
            return add_rows(request["rows"])
        if op == "finish":
            return finish_file()
    except BaseException:
        discard()
        raise
    raise HelperError(f"unknown op {op!r}", "INTERNAL")


if __name__ == "__main__":
    serve(handle, own_code=True)
