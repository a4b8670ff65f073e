"""Makes tests/fixtures/conf/hydra.json and scalars.json from real Hydra and
OmegaConf over the configuration directory of verl 0.9.1.

hydra.json: for each schema the resolved leaves of verl's own configuration in its
order, then cases: arguments of a command line with what they change in it, or
that Hydra refuses them.  A case may also say where verlc is wider than Hydra.
scalars.json: scalars.yaml as OmegaConf reads it.
With --binary the cases run through that program's `ppo|sft|eval ... --cfg job`,
whose YAML is read back by OmegaConf and must give the same values.
Run: python tools/oracle_conf.py [--verl DIR] [--binary build/release/verlc] [--check];
needs hydra-core 1.3 and verl 0.9.1, installed or as an unpacked wheel in DIR (only its
YAML is read). The binary defaults to $VERLC. Deterministic.
"""
import argparse
import copy
import functools
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import omegaconf.base
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

HERE = Path(__file__).parent.parent / "tests/fixtures/conf"
FILES = ["mine.yaml", "child.yaml", "first.yaml", "extra/long.yaml"]
ENV = {"VERLC_TEST_WORD": "from env", "VERLC_TEST_REF": "${trainer.nnodes}"}
COMMAND = {"ppo_trainer": "ppo", "ppo_megatron_trainer": "ppo", "sft_trainer_engine": "sft", "evaluation": "eval"}

S0 = """algorithm.adv_estimator=grpo data.train_files=/root/data/gsm8k/train.parquet
data.val_files=/root/data/gsm8k/test.parquet data.train_batch_size=16 data.max_prompt_length=512
data.max_response_length=1024 data.filter_overlong_prompts=True data.truncation='error'
actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.actor.ppo_mini_batch_size=16
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.actor.use_kl_loss=True
actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl
actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.actor.fsdp_config.param_offload=False actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 actor_rollout_ref.rollout.tensor_model_parallel_size=1
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.7 actor_rollout_ref.rollout.n=5
actor_rollout_ref.rollout.trace.backend=mlflow actor_rollout_ref.rollout.trace.token2text=True
actor_rollout_ref.rollout.trace.max_samples_per_step_per_worker=2
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8 actor_rollout_ref.ref.fsdp_config.param_offload=True
algorithm.use_kl_in_reward=False trainer.critic_warmup=0 trainer.logger=["console","mlflow"]
trainer.project_name=verl_grpo_gsm8k trainer.experiment_name=qwen25_05b trainer.n_gpus_per_node=1 trainer.nnodes=1
trainer.default_local_dir=/data/gsmk8/checkpoints trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=5"""
S2 = """algorithm.adv_estimator=grpo data.train_files=/root/data/gsm8k/train.parquet
data.val_files=/root/data/gsm8k/test.parquet data.train_batch_size=1024 data.max_prompt_length=512
data.max_response_length=1024 data.filter_overlong_prompts=True data.truncation='error'
actor_rollout_ref.model.path=Qwen/Qwen3-1.7B actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.actor.ppo_mini_batch_size=80
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=20 actor_rollout_ref.actor.use_kl_loss=True
actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl
actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.actor.fsdp_config.param_offload=False actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=20 actor_rollout_ref.rollout.tensor_model_parallel_size=1
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=3
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=20 actor_rollout_ref.ref.fsdp_config.param_offload=True
algorithm.use_kl_in_reward=False trainer.critic_warmup=0 trainer.logger=['console']
trainer.project_name=verl_grpo_example_gsm8k trainer.experiment_name=qwen3_1_7b_function_rm
trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.save_freq=-1 trainer.test_freq=5 trainer.total_epochs=15"""

# (name, schema, arguments); WIDER: Hydra refuses what verlc takes, ours: what it becomes.
P = "ppo_trainer"
CASES = [("seed 0", P, S0.split()), ("seed 2", P, S2.split())]
VALUES = [  # texts of a value for +x=...
    "1", "-1", "+7", "1_000", "1__0", "007", "0x10", "9223372036854775807", "1.0", "1.", ".5", "-.5e3", "1e-6", "1E+5",
    "1.e3", "inf", "-inf", "+INF", "nan", "infinity", "1e", "e1", "1.2.3", "5-3", "--5", "null", "nULL", "'null'",
    "nullable", "true", "TRUE", "tRuE", "'True'", "yes", "off", "-true", "", "   ", "''", '""', "' pad '", "a b",
    "  a b  ", "a:b", "a : b", ":", "/a/b.c-d+e%f@g?h|i*j", "$HOME/x", "$", "a\\,b", "a\\ ", "\\(x\\)", "\\\\",
    "a\\b", "\\", "tru\\e", "1\\,2", "'it\\'s'", '"say \\"hi\\""', "'\\\\'", "'a\\\\\\'b'", "'a\\b'", "'a=b, [c] {d}'",
    "[]", "[1]", "[1,2,3]", "[ 1 , a b , 'c,d' ]", "[[1],[2,[3]]]", "['a','b']", '["a","b"]', "[a:b,c/d]", "{}",
    "{a:1}", "{a: 1, b: {c: [x, y]}}", "{a b: c d}", "{a: '}'}", "{1: x}", "{a: b:c}", "[null,true,1e3,inf,'']",
    "???", "'???'", "[a,???]", "?", "é", "~/x", "a~b", "#x", "a#b", "!x", "a=b", "a,b", "[a", "a]", "{a:1", "{a}", "{a,b}",
    "[a,,b]", "[a,]", "[,]", "'a", "a'b", "'a'b", '"x" y', "(x)", "${", "${x", "${}", "a(b)", "^", "&", "\t1", "a\nb",
    "-", "+", "a-b_c.d", "1-2", "2024-01-01", "10:30", "1:2:3", "a  b", "%7B", "1e400", "-0.0", "1e16", "123456789.125",
    "0.1", "1e22", "5e-324", "100000000000000000000.0", "0.0001", "0.00001",
]
REFS = [
    "${trainer.nnodes}", "n${trainer.nnodes}x${data.train_batch_size}", "${oc.select:trainer.nope,7}",
    "${oc.select:trainer.nope}", "${oc.select:trainer.nope,[1,b]}", "${oc.select:trainer.logger}",
    "${oc.select:trainer.logger.0}", "${trainer.logger.1}", "'${trainer.logger[0]}'", "${oc.select:trainer.nope, null}",
    "'${oc.select:trainer.nope,\"a, b\"}'", "${oc.env:VERLC_TEST_WORD}", "${oc.env:VERLC_TEST_NONE,fall back}",
    "${oc.env:VERLC_TEST_NONE,null}", "${oc.env:VERLC_TEST_NONE}", "${oc.env:VERLC_TEST_REF}", "${nope.key}",
    "'${oc.select:a.${trainer.nope2},3}'", "'${trainer.${oc.env:VERLC_TEST_KEY,nnodes}}'", "'\\${trainer.nnodes}'",
    "'a\\${b}'", "${oc.select:actor_rollout_ref.rollout.name,none}", "${algorithm.kl_ctrl}", "x${algorithm.gamma}y",
    "${critic.optim.lr}", "t-${data.shuffle}-${data.seed}", "${oc.decode:'[1, 2]'}", "${oc.nope:1}",
    "${actor_rollout_ref.rollout.mtp.method}", "${actor_rollout_ref.actor.checkpoint.load_contents}", "${.x}",
    "${data.custom_cls}", "'${oc.select:trainer.nope,${trainer.nnodes}}'", "${oc.env:VERLC_TEST_NONE,1.50}",
]
for v in VALUES + REFS:
    CASES.append((f"value {v}", P, [f"+trainer.x={v}"]))
CASES += [("line " + " ".join(a), s, a) for s, a in [
    (P, ["trainer.total_epochs=3", "trainer.total_epochs=4"]), (P, ["trainer.nope=1"]), (P, ["+trainer.total_epochs=3"]),
    (P, ["++trainer.total_epochs=3"]), (P, ["++trainer.own=3"]), (P, ["+a.b.c=1", "a.b.c=2"]), (P, ["+a.b.c=1", "+a.b.d=${.c}"]),
    (P, ["+a.b.c=1", "+a.d=${.b.c}", "+a.e.f=${..d}", "+a.e.g=${...data.shuffle}"]), (P, ["~trainer.logger"]),
    (P, ["~trainer.logger", "+trainer.logger=x"]), (P, ["~trainer.nnodes=1"]), (P, ["~trainer.nnodes=2"]), (P, ["~trainer.nope"]),
    (P, ["~algorithm.kl_ctrl"]), (P, ["trainer.logger=[]"]), (P, ["trainer.logger=console"]), (P, ["trainer.logger.0=tensorboard"]),
    (P, ["trainer.logger.7=x"]), (P, ["algorithm.kl_ctrl={type:adaptive,horizon:5}"]), (P, ["algorithm.kl_ctrl={nope:5}"]),
    (P, ["+algorithm.kl_ctrl={nope:5}"]), (P, ["+actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=8"]),
    (P, ["actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=8"]), (P, ["+trainer.total_training_steps=9"]),
    (P, ["trainer=3x"]), (P, ["data.train_files=['/a.parquet','/b c.parquet']"]), (P, ["data.train_files=[\"a,b\",c]"]),
    (P, ["trainer.experiment_name='x=1,y'"]), (P, ["trainer.experiment_name=${trainer.project_name}-v1"]),
    (P, ["trainer.experiment_name="]), (P, ["data.seed=7", "data.seed=null"]),
    (P, ["actor_rollout_ref.actor.ppo_mini_batch_size=64"]),
    (P, ["actor_rollout_ref.actor.use_dynamic_bsz=true", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=999"]),
    (P, ["data.max_prompt_length=100", "data.max_response_length=200"]), (P, ["model_engine=dp"]),
    (P, ["actor@actor_rollout_ref.actor=dp_actor"]), (P, ["optim@actor_rollout_ref.actor.optim=nope"]), (P, ["nope@nope=x"]),
    (P, ["trainer.total_epochs"]), (P, ["=1"]), (P, ["a..b=1"]), (P, ["1a=2"]), (P, ["+a.0b=1"]), (P, ["+++a=1"]),
    (P, ["+a-b.$c=1"]),
    (P, ["+a b=1"]), (P, ["+a[0]=1"]), (P, ["+a.=1"]),
    (P, ["global_profiler.global_tool_config.nsys.worker_nsight_options.capture-range=x"]),
    ("ppo_megatron_trainer", ["actor_rollout_ref.actor.megatron.param_offload=true"]),
    ("sft_trainer_engine", ["optim.lr=1e-4", "trainer.save_freq=after_each_epoch"]), ("sft_trainer_engine", ["engine=fsdp"]),
    ("evaluation", ["data.path=/x.parquet"]), ("evaluation", ["data.nope=/x.parquet"]),
    (P, ["--config-name", "mine"]), (P, ["--config-name", "mine.yaml", "trainer.nnodes=2"]), (P, ["--config-name", "child"]),
    (P, ["--config-name", "first", "+my.own=1"]), (P, ["--config-name", "mine", "my.own.off_word=true"]),
]]
# What verlc does on purpose where Hydra does otherwise: None refuses, else values of keys.
OURS = {
    "value é": {"trainer.x": "é"}, "value ~/x": {"trainer.x": "~/x"}, "value a~b": {"trainer.x": "a~b"},  # need no quotes
    "value a,b": None,                                    # a sweep
    "value (x)": None,
    "line trainer.logger=[]": {"trainer.logger": []},
    "line trainer=3x": None,                              # a group is no value
    "line ~algorithm.kl_ctrl": {},                        # then reading it fails
    "line actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=8":  # a group without effect may hold anything
        {"actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space": 8},
}


def leaf(v):
    if isinstance(v, float) and not math.isfinite(v):
        return {"float": "nan" if v != v else ("inf" if v > 0 else "-inf")}
    if isinstance(v, list):
        return [leaf(x) for x in v]
    if isinstance(v, dict):
        return {"dict": {str(k): leaf(x) for k, x in v.items()}}
    return v


def leaves(v, path=""):
    """Flat {path: value}; a list is one leaf, so is an empty dict."""
    if isinstance(v, dict) and v:
        out = {}
        for k, x in v.items():
            number = isinstance(k, (int, float)) and not isinstance(k, bool)
            k = str(k) if number else {True: "true", False: "false", None: "null"}.get(k, str(k))
            out.update(leaves(x, f"{path}.{k}" if path else k))
        return out
    return {path: leaf(v)}


def config_dir(verl):
    """verl's directory with the fixtures' files beside its own."""
    d = Path(tempfile.mkdtemp())
    shutil.copytree(Path(verl) / "verl/trainer/config", d / "config")
    for f in FILES:
        (d / "config" / f).parent.mkdir(exist_ok=True)
        text = (HERE / f).read_text()
        lines = text.split("\n")
        if "hydra:" in lines:  # the search path is this directory already
            at = lines.index("hydra:")
            lines[at:at + 3] = []
        (d / "config" / f).write_text("\n".join(lines))
    return d


def remember_files():
    """Parses each file's YAML and each interpolation once, and by libyaml: most of Hydra's time for a command line."""
    parsed, load = {}, yaml.load

    def once(stream, Loader):  # OmegaConf's loader, which says what a scalar is, over the other scanner
        text = stream.read() if hasattr(stream, "read") else stream
        if text not in parsed:
            class Fast(yaml.CSafeLoader):
                yaml_implicit_resolvers, yaml_constructors = Loader.yaml_implicit_resolvers, Loader.yaml_constructors
            parsed[text] = load(text, Loader=Fast)
        return copy.deepcopy(parsed[text])

    yaml.load = once
    omegaconf.base.parse = functools.lru_cache(None)(omegaconf.base.parse)  # the trees are only read


def hydra(schema, args):
    """Flat resolved leaves, or None where Hydra refuses."""
    name, rest = schema, []
    it = iter(args)
    for a in it:
        if a == "--config-name":
            name = next(it).removesuffix(".yaml")
        else:
            rest.append(a)
    try:
        return leaves(OmegaConf.to_container(compose(name, overrides=rest), resolve=True))
    except Exception as e:  # Hydra's and OmegaConf's many kinds
        if isinstance(e, (KeyboardInterrupt, MemoryError)):
            raise
        return None


def run_binary(binary, schema, args):
    command = [binary, COMMAND[schema]]
    if schema == "ppo_megatron_trainer":
        command += ["--config-name=ppo_megatron_trainer"]
    if "--config-name" in args:
        command += ["--config-path", str(HERE)]
    r = subprocess.run(command + args + ["--cfg", "job"], capture_output=True, text=True, env={**os.environ, **ENV})
    if r.returncode != 0:
        if r.returncode != 2:
            sys.exit(f"{args}: exit {r.returncode}: {r.stderr}")
        return None, r.stderr.strip()
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as f:
        f.write(r.stdout)
        f.flush()
        return leaves(OmegaConf.to_container(OmegaConf.load(f.name), resolve=True)), ""


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--verl", help="the unpacked verl 0.9.1 wheel, if verl is not installed")
    p.add_argument("--binary", default=os.environ.get("VERLC"), help="compare this verlc too")
    p.add_argument("--only", default="", help="only cases whose name starts so; writes nothing")
    p.add_argument("--check", action="store_true", help="compare with the committed fixtures instead of writing them")
    a = p.parse_args()
    os.environ.update(ENV)
    remember_files()
    spec = None if a.verl else importlib.util.find_spec("verl")  # finds, does not import
    if not a.verl and not spec:
        sys.exit("verl 0.9.1 is not installed; give --verl DIR")
    d = config_dir(a.verl or Path(spec.submodule_search_locations[0]).parent)
    bad = 0
    help_text = subprocess.run([a.binary, "--help"], capture_output=True, text=True).stdout if a.binary else ""
    with initialize_config_dir(config_dir=str(d / "config"), version_base=None):
        base = {s: hydra(s, []) for s in COMMAND}
        cases, said = [], time.time()
        for k, (name, schema, args) in enumerate(CASES):
            if time.time() - said > 2:
                print(f"{k} of {len(CASES)} command lines", flush=True)
                said = time.time()
            if not name.startswith(a.only):
                continue
            got = hydra(schema, args)
            if name in OURS:
                ours = OURS[name]
                kept = {k: v for k, v in (got or base[schema]).items() if not any(o.startswith(k + ".") for o in ours or ())}
                got = None if ours is None else {**kept, **ours}
            case = {"name": name, "schema": schema, "args": args}
            if got is None:
                case["error"] = True
            else:
                b = base[schema]
                case["changed"] = {k: v for k, v in got.items() if k not in b or json.dumps(b[k]) != json.dumps(v)}
                gone = [k for k in b if k not in got]
                if gone:
                    case["gone"] = gone
            cases.append(case)
            if a.binary and f" {COMMAND[schema]} " in help_text:  # a command that is not built has no answer
                mine, why = run_binary(a.binary, schema, args)
                if (mine is None) != (got is None):
                    bad += 1
                    print(f"DIFFERS {name!r}: Hydra {'refuses' if got is None else 'accepts'}; verlc: {why or 'accepts'}")
                elif mine is not None:
                    for k, v in got.items():
                        if k != "trainer.device" and json.dumps(mine.get(k, "absent")) != json.dumps(v):
                            bad += 1
                            print(f"DIFFERS {name!r}: {k}: Hydra {v!r}, verlc {mine.get(k, 'absent')!r}")
    shutil.rmtree(d)
    if a.binary:
        print(f"{len(cases)} command lines, {bad} differences")
    if a.only:
        sys.exit(1 if bad else 0)
    out = {
        "hydra.json": {"env": ENV, "base": base, "cases": cases},
        "scalars.json": leaves(OmegaConf.to_container(OmegaConf.load(HERE / "scalars.yaml"))),
    }
    for f, v in out.items():
        if f == "hydra.json":
            parts = [f'{{"env": {json.dumps(ENV)},', ' "base": {']
            parts += [",\n".join(f'  "{s}": ' + json.dumps(b, ensure_ascii=False, separators=(",", ":")) for s,
                                 b in base.items()) + "},"]
            parts += [' "cases": [', ",\n".join("  " + json.dumps(c, ensure_ascii=False) for c in cases) + "]}\n"]
            text = "\n".join(parts)
        else:
            text = json.dumps(v, ensure_ascii=False, indent=1) + "\n"
        if not a.check:
            (HERE / f).write_text(text)
        elif (HERE / f).read_text() != text:
            bad += 1
            print(f"DIFFERS {f}: not what the packages give now")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
