#!/usr/bin/env python3
"""The built-in shapes of `verlc model init --arch` beside transformers.

  oracle_archs.py VERLC

Each shape's config.json is opened by transformers, which must keep every member that verlc wrote, and makes the model of it
without memory (meta device): the same number of parameters.  Where a class's defaults are a released model, the shape has
them, but for what the files say otherwise (OTHER).  A difference ends in exit 1.  MiMo has no class in transformers.
"""
import json
import os
import re
import subprocess
import sys
import tempfile

# Members in which the released file is not its class's default: lengths and thetas of the class are placeholders.
OTHER = {"max_position_embeddings", "rope_theta", "rope_scaling", "eos_token_id", "bos_token_id", "pad_token_id", "torch_dtype",
         "architectures", "use_cache", "attention_dropout"}
DEFAULTS = {"llama-2-7b": {"rms_norm_eps"}, "mixtral-8x7b": {"head_dim"}, "qwen1.5-moe-a2.7b": set(), "qwen3-next-80b-a3b":
            {"intermediate_size"}, "qwen3.5-35b-a3b": {"intermediate_size"}, "deepseek-v3": set(), "gpt-oss-120b": set(),
            "glm-4.5-air": {"attention_bias"}, "glm-4-9b": set(), "glm-4-9b-0414": {"rms_norm_eps"}, "gemma-7b": set(),
            "glm-4.7-flash": set(), "minimax-m2": set(), "hunyuan-3": set(),
            "gemma-2-2b": set(), "ministral-3-8b": set(), "phi-3-mini": {"sliding_window"}, "smollm3-3b": set()}
RENAMED = {"torch_dtype": "dtype", "num_experts": "num_local_experts", "partial_rotary_factor": None, "rope_theta": None,
           "rope_scaling": None, "sliding_window_pattern": None, "topk_method": None, "scoring_func": None, "clip_qkv": None,
           "full_attention_interval": None, "head_dim": "qk_rope_head_dim", "mtp_num_hidden_layers": None,
           "num_nextn_predict_layers": None}


def same(a, b):
    return a == b or str(a).replace("torch.", "") == str(b).replace("torch.", "") or [a] == b


def kept(ours, theirs):
    """The members that transformers read otherwise."""
    bad = []
    for key, value in ours.items():
        if key == "layer_types":  # Granite 4's, by other names
            value = ["full_attention" if v == "attention" else v for v in value]
        name = key if key in theirs else RENAMED.get(key, key)
        if name is not None and not same(value, theirs.get(name)):
            bad.append(f"{key} {value} read as {theirs.get(name)}")
    rope = theirs.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    if rope.get("rope_theta") != ours["rope_theta"]:
        bad.append(f"rope_theta {ours['rope_theta']} read as {rope.get('rope_theta')}")
    for key, value in (ours.get("rope_scaling") or {}).items():
        if rope.get(key) != value:
            bad.append(f"rope_scaling's {key} {value} read as {rope.get(key)}")
    return bad


def main():
    import torch
    import transformers
    transformers.logging.set_verbosity_error()
    program = sys.argv[1]
    text = subprocess.run([program, "model", "init", "--help"], stdout=subprocess.PIPE, check=True).stdout.decode()
    names = [n for n in re.split(r",\s+", re.search(r"NAME: (.*?)\.\n", text, re.S).group(1)) if n not in ("tiny", "mimo-7b")]
    differ = compared = 0
    with tempfile.TemporaryDirectory() as out:
        for name in names:
            folder = os.path.join(out, name)
            said = subprocess.run([program, "model", "init", "--arch", name, "--config-only", "--out", folder],
                                  stderr=subprocess.PIPE, check=True).stderr.decode()
            count = int(re.search(r"(\d+) parameters", said).group(1))
            with open(os.path.join(folder, "config.json"), encoding="utf-8") as f:
                ours = json.load(f)
            config = transformers.AutoConfig.from_pretrained(folder)
            bad = kept(ours, config.to_dict())
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config)
            want = sum(p.numel() for p in model.parameters())
            if want != count:
                bad.append(f"{count} parameters, transformers has {want}")
            if name in DEFAULTS:
                compared += 1
                theirs = type(config)().to_dict()
                for key, value in ours.items():
                    at = key if key in theirs else RENAMED.get(key)
                    if key not in OTHER | DEFAULTS[name] and at in theirs and not same(value, theirs[at]):
                        bad.append(f"{key} {value}, the class's default {theirs[at]}")
            for line in bad:
                print(f"{name}: {line}")
            differ += len(bad)
    print(f"{len(names)} shapes, {compared} beside their class's defaults: {differ} differences")
    sys.exit(1 if differ else 0)


if __name__ == "__main__":
    main()
