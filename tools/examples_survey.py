"""What becomes of verl's own example launches: each script of a checkout of verl is run through `verlc exec --plan`, with tiny
models and empty data files in place of its paths.

  python3 tools/examples_survey.py CHECKOUT [--folder examples] [--contains RE] [--verlc FILE] [--commit ID] [--out FILE.md]
                                   [--title TEXT] [--match TEXT]

Writes a table: script, launches, result. A launch passes when its memory plan is printed; else the row holds the first error.
With --title the table is a further section of FILE.md. A script's place for a directory of the user's is the checkout.
The scripts see a home directory of their own, and commands that would install, download or end something do nothing."""

import argparse
import collections
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
SILENT = """apt apt-get conda curl docker hf hdfs huggingface-cli kill killall make npu-smi nvidia-smi pip pip3 pkill rm rsync
            scp sleep squeue ssh sudo systemctl wget""".split()
LAUNCH = re.compile(r"verl\.(trainer|experimental|model_merger)|verl_mlite|recipe\.\w+")
FAMILIES = [  # a part of a model's name: its model_type; the first that fits
    (r"qwen3[._]5\S*[-_](a\d+b|35b|122b|397b)", "qwen3_5_moe"), ("qwen3.5|qwen3_5", "qwen3_5"),
    ("qwen3-next|qwen3_next", "qwen3_next"), ("qwen3-vl|qwen3_vl", "qwen3_vl"),
    (r"qwen3-\d+b-(a\d+b|moe)|qwen3moe|qwen3-235|qwen3_30b", "qwen3_moe"), ("qwen2.5-vl|qwen2_5_vl", "qwen2_5_vl"),
    ("qwen2-vl", "qwen2_vl"), ("qwen1.5-moe|moe_a2.7b", "qwen2_moe"), ("deepseek-v4|dsv4|deepseek_v4", "deepseek_v4"),
    ("deepseek-v2|deepseek-coder-v2", "deepseek_v2"), ("deepseek-v3|deepseek-r1|moonlight|671b", "deepseek_v3"),
    ("glm-4.1v|glm41v|glm4_1v|glm-4-1v", "glm4v"), ("glm-?4.5|glm4_?moe", "glm4_moe"),
    ("glm|kimi", "glm_moe"), ("gpt-oss|gpt_oss|gptoss", "gpt_oss"),
    ("ref_model_path", "qwen2_5_vl"),  # deepeyes
    ("minicpm", "minicpmo"), ("nemotron", "nemotron_h"), ("seed-oss|seed_oss", "seed_oss"), ("hy[-_]?v3|hy3", "hy_v3"),
    ("hunyuan", "hunyuan"),
    ("gemma", "gemma"), ("mimo", "mimo"), ("internvl", "internvl"), ("mistral|mathstral", "mistral"), ("qwen3|qwen-3", "qwen3"),
    ("llama|deepseek|eurus|skywork", "llama")]
PAGE = """# verl's example launches

verl's folder `{folder}` at commit {commit}: every script, run through `verlc exec --plan` with
tiny models of the families that it names. {plans} of {total} launches reach the memory plan, which is that of a rank on
the machine at hand. The others are refused by the first feature that is missing.
`python3 tools/examples_survey.py CHECKOUT` makes this table.

| script | result |
|---|---|"""
SECTION = """
## {title}

Folder `{folder}` at {commit}, as above: {plans} of {total} launches reach the memory plan.
A plan does not open tools or their servers. Paths and variables that a script leaves to the user are given (`use_kl_loss=True`).
`python3 tools/examples_survey.py CHECKOUT --folder {folder}{contains} --title '{title}'` makes this table.

| script | result |
|---|---|"""
CLASSES = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama", "mistral": "Mistral", "qwen3_moe": "Qwen3Moe",
           "gpt_oss": "GptOss", "deepseek_v3": "DeepseekV3", "glm4_moe": "Glm4Moe", "hy_v3": "HYV3",
           "gemma": "Gemma", "qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe", "mimo": "MiMo", "qwen3_next": "Qwen3Next"}
MODEL_KEYS = ["actor_rollout_ref.model.path", "critic.model.path", "reward.reward_model.model_path", "reward_model.model.path",
              "model.path", "model.partial_pretrain", "actor_rollout_ref.model.lora_adapter_path",
              "distillation.teacher_models.teacher_model.model_path", "actor_rollout_ref.model.tokenizer_path"]
TEACHER = re.compile(r"distillation\.teacher_models\.\w+\.model_path")
FILE_KEYS = ["data.train_files", "data.val_files", "data.path"]


class Scratch:
    def __init__(self, path):
        self.path = path
        self.bin = path / "bin"
        for folder in ("bin", "home", "models"):
            (path / folder).mkdir()
        for name in SILENT:
            self.command(name, "exit 0")
        self.command("nsys", 'while [ "${1#-}" != "$1" ] || [ "$1" = profile ]; do shift; done\nexec "$@"')
        self.command("mkdir", 'for a; do case "$a" in -*|%s/*) ;; *) exit 0;; esac; done\nexec /bin/mkdir "$@"' % path)
        self.command("tee", "exec cat")
        self.command("git", '[ "$1" != clone ] || for a; do case "$a" in *://*) a=${a##*/}; /bin/mkdir -p "${a%.git}";; esac; done')
        for name in ("python", "python3"):  # what converts models and data has nothing to do
            self.command(name, 'case "$1" in get_model.py|*converter*|*data_preprocess/*) exit 0;; esac\n'
                               'exec /usr/bin/python3 "$@"')
        self.command("srun", 'while [ "${1#-}" != "$1" ]; do [ "$1" != -w ] || shift; shift; done\nexec "$@"')
        self.command("scontrol", "echo localhost")
        (path / "rows.jsonl").write_text("")
        (path / "home/config.env").write_text("")

    def command(self, name, text):
        file = self.bin / name
        file.write_text("#!/bin/bash\n" + text + "\n")
        file.chmod(0o755)

    def adapter(self):
        folder = self.path / "models/adapter"
        if not folder.exists():
            folder.mkdir()
            (folder / "adapter_config.json").write_text(json.dumps({
                "peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}))
        return folder

    def model(self, key, name):
        """A directory whose config.json is of the family that the name says."""
        if key.endswith("lora_adapter_path"):
            return self.adapter()
        family = next((f for part, f in FAMILIES if re.search(part, name.lower())), "qwen2")
        head = "SequenceClassification" if "reward_model" in key else "CausalLM"
        folder = self.path / "models" / (family + "_reward" * ("reward_model" in key))
        if not folder.exists():
            folder.mkdir()
            config = {"model_type": family, "architectures": [CLASSES.get(family, family) + "For" + head], "hidden_size": 64,
                      "id2label": {"0": "LABEL_0"}, "pad_token_id": 0,
                      "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                      "vocab_size": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 65536,
                      "hidden_act": "gelu_pytorch_tanh" if family == "gemma" else "silu",
                      "tie_word_embeddings": True, "torch_dtype": "bfloat16", "head_dim": 16}
            if family in ("qwen3_5", "qwen3_5_moe", "qwen3_next"):
                config |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
                           "linear_value_head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
                           "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
                           "mtp_num_hidden_layers": 1}
            if family in ("qwen3_5", "qwen3_5_moe"):  # a vision-language checkpoint
                config = {"model_type": family, "architectures": [CLASSES[family] + "ForConditionalGeneration"],
                          "vision_config": {}, "tie_word_embeddings": True,
                          "text_config": config | {"model_type": family + "_text"}}
            if family == "gpt_oss":
                config["rope_scaling"] = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
            if family == "mimo":
                config["num_nextn_predict_layers"] = 1
            (folder / "config.json").write_text(json.dumps(config))
        return folder

    def overrides(self, launches):
        """--set for the paths that a launch names: the models by family, the data as an empty file."""
        sets = []
        for words in launches:
            for word in words:
                key, eq, value = word.partition("=")
                key = key.lstrip("+")
                if eq and (key in MODEL_KEYS or TEACHER.fullmatch(key)) and value not in ("null", ""):
                    sets.append(f"{key}={self.model(key, value)}")
                elif eq and key in FILE_KEYS:
                    sets.append(f"{key}={self.path}/rows.jsonl")
        return [x for s in sorted(set(sets)) for x in ("--set", s)]


def run_once(scratch, a, script, sets, variables):
    # use_kl_loss: a script reads it and leaves it to the user
    env = {"PATH": f"{scratch.bin}:/usr/local/bin:/usr/bin:/bin", "HOME": str(scratch.path / "home"), "LANG": "C.UTF-8",
           "USER": "user", "use_kl_loss": "True", "TMPDIR": str(scratch.path), "BASH_FUNC_ulimit%%": "() { :; }", **variables}
    text = script.read_text(errors="replace")
    arguments = ["1"] * ("nproc_per_node=$1" in text) + [str(scratch.path / "save")] * ("save_path=$2" in text)
    try:
        return subprocess.run([a.verlc, "exec", "--plan", *sets, "bash", script, *arguments], cwd=scratch.path / "checkout",
                              env=env, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess([], 124, "", "error: the script did not end within 120 s\n")


def run(scratch, a, script, sets):
    """With the variables that the script asks for, one after another: a directory each."""
    variables = {}
    while True:
        p = run_once(scratch, a, script, sets, variables)
        m = re.search(r"line \d+: (?:!?)(\w+): (unbound variable|parameter null or not set|must|[sS]et |please)", p.stderr)
        if not m or m[1] in variables or launches_of(p) or len(variables) > 16:
            return p
        known = {"INFER_BACKEND": "vllm", "COMMAND": "torchrun -m verl.trainer.sft_trainer", "SLURM_JOB_NUM_NODES": "1",
                 "VERL_ROOT": str(scratch.path / "checkout")}
        variables[m[1]] = known.get(m[1], str(scratch.path / "home"))


def launches_of(p):
    found = re.finditer(r"^note: [\w./-]+: (verlc (?:plan|generate|eval|model_merger|data) .*)$", p.stdout + p.stderr, re.M)
    return [shlex.split(m[1]) for m in found]


def outcome(p, n):
    """One line: a plan, or the first error."""
    errors = [line for line in (p.stdout + p.stderr).splitlines() if line.startswith(("error: ", "ModuleNotFoundError"))]
    if not errors and p.stdout.count("memory plan") >= n > 0:
        return "memory plan", ""
    if errors:
        text = re.sub(r"/tmp/[\w./-]*/models/(\w+)(_reward)?", r"\1", errors[0].removeprefix("error: "))
        text = re.sub(r"; verlc has llama, .* and \w+$", "", text)  # the list of families
        return "refused", re.sub(r"/tmp/[\w./-]*/checkout/", "", text)
    return "failed", (p.stderr.strip().splitlines() or ["no output"])[-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=pathlib.Path)
    parser.add_argument("--folder", default="examples")
    parser.add_argument("--verlc", type=pathlib.Path, default=ROOT / "build/release/verlc")
    parser.add_argument("--commit", default="?", help="of the checkout, for the page")
    parser.add_argument("--match", default="", help="text in a script's name")
    parser.add_argument("--contains", default="", help="expression that a script's text has")
    parser.add_argument("--title", default="", help="of a section that --out gets in addition")
    parser.add_argument("--out", type=pathlib.Path)
    a = parser.parse_args()
    rows, counts = [], collections.Counter()
    with tempfile.TemporaryDirectory() as d:
        scratch = Scratch(pathlib.Path(d))
        checkout = shutil.copytree(a.checkout, scratch.path / "checkout", ignore=shutil.ignore_patterns(".git"))
        (checkout / "base_dir").symlink_to(".")
        for script in sorted((checkout / a.folder).rglob("*.sh")):
            name = str(script.relative_to(checkout))
            text = script.read_text(errors="replace")
            if not re.search(a.contains, text) or a.match not in name or not (a.contains or LAUNCH.search(text)):
                continue
            script.write_text(re.sub(r'^CONTAINER_DIR=.*', 'CONTAINER_DIR="$HOME"', text, flags=re.M))  # nothing to wait for
            launches = launches_of(run(scratch, a, script.resolve(), []))
            sets = scratch.overrides(launches)
            p = run(scratch, a, script.resolve(), sets)
            n = max(len(launches_of(p)), 1)
            result, why = outcome(p, n)
            counts[result] += n
            rows.append((name, n, result, why))
            print(f"{name}\t{n}\t{result}\t{why}", flush=True)
    total = sum(counts.values())
    print(f"{total} launches: " + ", ".join(f"{n} {what}" for what, n in counts.items()))
    if a.out:
        head = SECTION if a.title else PAGE
        text = [head.format(folder=a.folder, commit=a.commit, total=total, plans=counts["memory plan"], title=a.title,
                            contains=f" --contains '{a.contains}'" if a.contains else "")]
        text += [f"| {n.removeprefix(a.folder + '/')} | {r + (': ' if w else '')}{w.replace('|', chr(92) + '|')} |"
                 for n, _, r, w in rows]
        a.out.write_text((a.out.read_text() if a.title else "") + "\n".join(text) + "\n")
    return 0


sys.exit(main())
