"""Where verl's programs lead under `verlc exec`: `python3 -m verl.trainer.main_ppo ARGUMENTS` becomes `verlc ppo ARGUMENTS`.

PROGRAMS and SCRIPTS say which, NOT_BUILT what is refused and by which feature. `verlc exec` sets VERLC (the program),
VERLC_EXEC_SET (JSON list of overrides), VERLC_EXEC_PLAN and VERLC_EXEC_GPU, and VERLC_EXEC_SOCKET, where it is told that the
stand-in was reached.  Invariant: a program of verl either becomes verlc's with all of its arguments, or is refused; none is run in
part."""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import shlex
import socket
import sys

HERE = os.path.dirname(os.path.abspath(__file__))

DAPO = ("ppo", "reward.reward_manager.name=dapo", "trainer.project_name=verl-dapo")  # what the recipe's YAML sets
ONE_STEP_OFF = ("ppo", "--config-name=one_step_off_ppo_trainer")
FULLY_ASYNC = ("ppo", "--config-name=fully_async_ppo_trainer")
PROGRAMS = {  # module: command, and keys in front of the user's
    "verl.trainer.main_ppo": ("ppo",),
    "verl.trainer.main_ppo_sync": ("ppo",),
    "verl.trainer.main_ppo_v0": ("ppo",),
    "verl.trainer.sft_trainer": ("sft",),
    "verl.trainer.sft_trainer_ray": ("sft",),
    "verl.trainer.fsdp_sft_trainer": ("sft", "--config-name=sft_trainer"),
    "verl.trainer.main_generation": ("generate",),
    "verl.trainer.main_generation_server": ("generate",),
    "verl.trainer.main_eval": ("eval",),
    "verl.model_merger": ("model_merger",),
    "verl.experimental.one_step_off_policy.main_ppo": ONE_STEP_OFF,
    "verl.experimental.one_step_off_policy.async_main_ppo": ONE_STEP_OFF,
    "recipe.one_step_off_policy.main_ppo": ONE_STEP_OFF,
    "recipe.one_step_off_policy.async_main_ppo": ONE_STEP_OFF,
    "verl.experimental.fully_async_policy.fully_async_main": FULLY_ASYNC,
    "recipe.fully_async_policy.fully_async_main": FULLY_ASYNC,
    "recipe.dapo.main_dapo": DAPO,
    "recipe.entropy.main_entropy": DAPO,  # clip_cov and kl_cov on DAPO's trainer
}
NOT_BUILT = {
    "recipe.async_flow.grpo_main": "its transfer queue is not built; verl.experimental.fully_async_policy.fully_async_main runs",
    "recipe.spo.spo_main_ppo": "its trainer and its agent loop, spo_tool_agent, are Python classes of the user",
    "recipe.partial_rollout.main_ppo":
        "verl.experimental.fully_async_policy.fully_async_main has partial rollout, and runs, without tool_agent",
    "recipe.dapo_transfer_queue.main_dapo": "the transfer queue is not built; recipe.dapo.main_dapo runs",
    "recipe.dapo.dapo_transfer_queue.main_dapo": "the transfer queue is not built; recipe.dapo.main_dapo runs",
    "verl_mlite.launch": "the engine Megatron Lite is not built",
}
RECIPE = "trainers of verl-recipe are Python on verl's workers and are not built, but for DAPO's and Entropy's"
RECIPE_CONFIGS = {  # YAML files beside the recipes' programs: the keys that say the same
    "dapo_trainer": [], "entropy_trainer": [], "dapo_megatron_trainer": ["model_engine=megatron"]}
SCRIPTS = {  # end of a path: command
    "examples/data_preprocess/gsm8k.py": ("data", "gsm8k"),
    "examples/data_preprocess/gsm8k_tool_agent_loop.py": ("data", "gsm8k", "--agent"),
    "recipes/gsm8k/data_preprocessing.py": ("data", "gsm8k"),
    "recipe/gsm8k/data_preprocessing.py": ("data", "gsm8k"),
    "scripts/legacy_model_merger.py": ("model_merger",),
    "scripts/model_merger.py": ("model_merger",),
}
GSM8K_MARKS = ("openai/gsm8k", r"#### (\\-?[0-9\\.\\,]+)")  # of verl's scripts, and of either one
GSM8K_MARK = {False: 'output the final answer after "####"', True: "calc_gsm8k_reward"}


def note(text):
    print(f"note: {text}", file=sys.stderr, flush=True)


def tell(what=b"program"):
    """Something of verl has come to the stand-in, and `verlc exec` need not say at the end that it was bypassed. b"touch": no
    program of verl, but data preparation, or Python that imports verl."""
    name = os.environ.get("VERLC_EXEC_SOCKET")
    if name:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
                s.setblocking(False)
                s.sendto(what, "\0" + name)
        except OSError:
            pass  # it has ended, or has been told often enough


def refuse(text):
    tell()
    print(f"error: {text}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(2)  # an exception would be a traceback of runpy


# ---- one program ----

def key_of(argument):
    return argument.split("=", 1)[0].lstrip("+~")


def torchrun_devices(arguments):
    """What torchrun was told, as keys, unless the command line has them."""
    world, local = (os.environ.get(name, "") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if not (world.isdigit() and local.isdigit() and int(local) > 0):
        return []
    keys = {"trainer.nnodes": int(world) // int(local), "trainer.n_gpus_per_node": int(local)}
    given = {key_of(a) for a in arguments}
    return [f"{key}={value}" for key, value in keys.items() if key not in given]


def recipe_config(arguments):
    """The arguments with --config-name of a recipe's own YAML as keys."""
    for k, a in enumerate(arguments):
        name, eq, value = a.partition("=")
        value = value if eq else arguments[k + 1] if k + 1 < len(arguments) else ""
        keys = RECIPE_CONFIGS.get(value.removesuffix(".yaml")) if name in ("--config-name", "-cn") else None
        if keys is not None:
            rest = arguments[:k] + arguments[k + 1 + (not eq):]
            return keys + [r for r in rest if not r.startswith("--config-path=")]
    return arguments


def command_line(command, arguments):
    """(what verlc is called with, whether --plan leaves it out)"""
    name, *front = command
    arguments = [*front, *(recipe_config(arguments) if command == DAPO else arguments)]
    if name in ("ppo", "sft", "generate", "eval"):
        if name == "sft":
            arguments = torchrun_devices(arguments) + arguments
        arguments += json.loads(os.environ.get("VERLC_EXEC_SET") or "[]")
    if not os.environ.get("VERLC_EXEC_PLAN"):
        return [name, *arguments], False
    if name in ("ppo", "sft", "generate"):
        gpu = os.environ.get("VERLC_EXEC_GPU")
        return ["plan", *(["--gpu", gpu] if gpu else []), name, *arguments], False
    return [name, *arguments], True


def become(command, arguments, of):
    """Runs verlc in place of this process. of: the program of verl, for messages."""
    tell()
    verlc = os.environ.get("VERLC")
    if not verlc:
        refuse(f"{of}: the stand-in of `verlc exec` was started without it (VERLC is not set)")
    if os.environ.get("RANK", "0") != "0":
        note(f"{of}: one process trains; rank {os.environ['RANK']} of torchrun has nothing to do")
        sys.stderr.flush()
        os._exit(0)
    line, left_out = command_line(command, arguments)
    if os.environ.get("VERLC_EXEC_PLAN"):
        note(f"{of}: {shlex.join(['verlc', *line])}")
    if left_out:
        note(f"{of}: not run, since --plan was given")
        os._exit(0)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)  # keys say it now: one process, which starts its ranks itself
    sys.stdout.flush()
    os.execv(verlc, [verlc, *line])


def run_module(name, arguments):
    if name in NOT_BUILT:
        refuse(f"{name}: {NOT_BUILT[name]}")
    become(PROGRAMS[name], arguments, name)


# ---- modules ----

class Program(importlib.abc.InspectLoader):
    """The module of a program: `python3 -m` runs it, and there is nothing in it to import."""

    def get_source(self, fullname):
        return (f"import sys, verlc_entry\nif __name__ == '__main__':\n    verlc_entry.run_module({fullname!r}, sys.argv[1:])\n"
                f"raise ImportError('{fullname} is a program of verlc under `verlc exec`; there is no Python in it to import')\n")

    def is_package(self, fullname):
        return False


class Finder(importlib.abc.MetaPathFinder):
    """verl is the stand-in, also where the working directory has a verl of its own."""

    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if name == "verl":
            tell(b"touch")
        if name in PROGRAMS or name in NOT_BUILT:
            return importlib.machinery.ModuleSpec(name, Program())
        if top == "verl":
            spec = importlib.machinery.PathFinder.find_spec(name, [HERE] if name == "verl" else path)
        elif any(p.startswith(top + ".") for p in [*PROGRAMS, *NOT_BUILT]):
            spec = importlib.machinery.PathFinder.find_spec(name, path)
        else:
            return None
        if spec is None and any(p.startswith(name + ".") for p in [*PROGRAMS, *NOT_BUILT]):
            spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        if spec is None and top == "verl":
            raise ModuleNotFoundError(f"{name}: `verlc exec` stands in for verl with its programs, verl.utils.reward_score and "
                                      "verl.utils.hdfs_io; Python on other modules of verl cannot run under it", name=name)
        return spec


# ---- scripts ----

def module_or_script(argv):
    """("-m", name, arguments), ("", path, arguments) or None of an interpreter's command line."""
    k = 1
    while k < len(argv) and argv[k].startswith("-") and argv[k] != "-":
        if argv[k] == "-m" and k + 1 < len(argv):
            return "-m", argv[k + 1], argv[k + 2:]
        if argv[k] == "-c":
            return None
        k += 2 if argv[k] in ("-W", "-X", "--check-hash-based-pycs") else 1
    return ("", argv[k], argv[k + 1:]) if k < len(argv) else None


def program_of_script(path):
    """The command for a file of verl's, and the module where it is one; (None, None): not verl's."""
    path = os.path.abspath(path)
    for end, command in SCRIPTS.items():
        if path.endswith("/" + end):
            return command, None
    for module in [*PROGRAMS, *NOT_BUILT]:
        if path.endswith("/" + module.replace(".", "/") + ".py"):
            return None, module
    return None, None


def is_verls_gsm8k(path, agent):
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeError):
        return False
    return all(mark in text for mark in (*GSM8K_MARKS, GSM8K_MARK[agent]))


def run_script(path, arguments):
    """Becomes verlc where the script is verl's and is not there, or cannot run; a file that is there and can run is the user's."""
    command, module = program_of_script(path)
    if module:
        run_module(module, arguments)
    if not command:
        if "/data_preprocess/" in os.path.abspath(path) and os.path.exists(path):
            tell(b"touch")
        elif "/data_preprocess/" in os.path.abspath(path):
            refuse(f"{path}: there is no such file, and verlc prepares gsm8k alone; take verl's script for this data set")
        return
    if os.path.exists(path) and command[0] == "data":
        tell(b"touch")
        if importlib.util.find_spec("datasets"):
            return
        agent = "--agent" in command
        if not is_verls_gsm8k(path, agent):
            refuse(f"{path}: it needs the Python package datasets, which {sys.executable} does not have: pip install datasets")
        note(f"{path}: the Python package datasets is not installed; verlc prepares the same " +
             ("columns, with a system message of its own" if agent else "files"))
    become(command, arguments, path)


def command_line_of_this():
    with open("/proc/self/cmdline", "rb") as file:
        return [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]


def install():
    sys.meta_path.insert(0, Finder())
    os.environ.pop("VERLC_EXEC_SHIM", None)  # bin/python3 has come to an interpreter
    started = module_or_script(getattr(sys, "orig_argv", None) or command_line_of_this())
    if not started:
        return
    how, what, arguments = started
    if not how:
        run_script(what, arguments)
    elif what.startswith("recipe.") and ".main_" in what and what not in PROGRAMS and what not in NOT_BUILT:
        refuse(f"{what}: {RECIPE}")
