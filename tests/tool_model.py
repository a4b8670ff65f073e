"""A tiny model that calls tools without any training: what a token is followed by is a table in its head, and each call of a tool
is one token of its tokenizer."""

import json
import math
import shutil
import struct

from verlc_test import save_tensors, tensors

CALLS = [f'<tool_call>{{"name": "add", "arguments": {{"x": {x}}}}}</tool_call>' for x in range(4)]
TEMPLATE = """{%- if tools %}{{- '<|im_start|>system\\nTools:' }}{%- for t in tools %}{{- ' ' + t.function.name }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for c in m.tool_calls or [] %}
{{- '<tool_call>{"name": "' + c.function.name + '", "arguments": ' + (c.function.arguments | tojson) + '}</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
TOOLS = '''
from verl.tools.function_tool import function_tool

@function_tool
def add(x: int) -> str:
    """Adds one.

    Args:
        x: a number
    """
    return str(x + 1)
'''


def calling_model(model, out, calls=12.0, stop=0.0, texts=CALLS):
    """A copy of a tiny model. texts: its calls; calls, stop: logits of each call, and of each number, where a turn begins."""
    shutil.copytree(model, out)
    tokenizer = json.loads((out / "tokenizer.json").read_text())
    added = tokenizer["added_tokens"]
    ids = {t["content"]: t["id"] for t in added} | tokenizer["model"]["vocab"]
    for text in texts:
        ids[text] = max(t["id"] for t in added) + 1
        added.append({**added[-1], "id": ids[text], "content": text, "special": False})
    (out / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((out / "tokenizer_config.json").read_text())
    (out / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    config = json.loads((out / "config.json").read_text()) | {"tie_word_embeddings": False}
    (out / "config.json").write_text(json.dumps(config))
    parts = tensors(out / "model.safetensors")
    v, h = config["vocab_size"], config["hidden_size"]
    table = struct.unpack(f"{v * h}f", parts["model.embed_tokens.weight"][2])
    table = [40 * x for x in table]  # what comes in is most of what goes out
    head = [0.0] * (v * h)

    def follows(token, after, logit):
        row = table[h * after:h * (after + 1)]
        scale = logit / math.sqrt(h) / math.sqrt(sum(x * x for x in row))
        for i in range(h):
            head[h * token + i] += scale * row[i]

    newline, end = ids["Ċ"], ids["<|im_end|>"]
    for text in texts:
        follows(ids[text], newline, calls)
        follows(end, ids[text], 14.0)
    for digit in "123":
        follows(ids[digit], newline, stop)
        follows(end, ids[digit], 14.0)
    parts["model.embed_tokens.weight"] = ("F32", [v, h], struct.pack(f"{v * h}f", *table))
    parts["lm_head.weight"] = ("F32", [v, h], struct.pack(f"{v * h}f", *head))
    save_tensors(out / "model.safetensors", parts)
    return out
