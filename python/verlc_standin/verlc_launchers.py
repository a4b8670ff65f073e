"""Launchers in front of verl's programs under `verlc exec`: torchrun, accelerate, uv, ray.

What starts a program of verl is run at once, as one process; verlc is one. Everything else goes to the launcher that is
installed, or is run without it where there is none.  Invariant: no option of a launcher that changes what a program of verl
does is dropped: the number of processes and a job's environment are handed on."""

import json
import os
import re
import shutil
import sys

from verlc_entry import HERE, NOT_BUILT, PROGRAMS, note, program_of_script, refuse, tell

MARK = b"# verlc exec: "  # the second line of the stand-ins in bin
BIN = os.path.join(HERE, "bin")
STOP_WAIT_S = "600"  # from `ray job stop`'s SIGTERM to its SIGKILL; Ray's 3 s are too few to end a step and save it
UV_VALUES = {  # options of uv that take a value
    "--extra", "--no-extra", "--group", "--no-group", "--only-group", "--env-file", "--with", "--with-editable",
    "--with-requirements", "--package", "--index", "--default-index", "-i", "--index-url", "--extra-index-url", "-f",
    "--find-links", "--index-strategy", "--keyring-provider", "--resolution", "--prerelease", "--fork-strategy", "--exclude-newer",
    "--link-mode", "--no-build-package", "--no-binary-package", "-P", "--upgrade-package", "--refresh-package",
    "--reinstall-package", "-C", "--config-setting", "--cache-dir", "-p", "--python", "--color", "--allow-insecure-host",
    "--directory", "--project", "--config-file"}


def is_standin(path):
    """Whether the file is one of bin, by whatever name, or a copy of one."""
    try:
        with open(path, "rb") as file:
            return file.read(2) == b"#!" and (file.readline(), file.readline(len(MARK)))[1] == MARK
    except OSError:
        return False


def installed(name):
    """The launcher behind the stand-in on PATH, or None."""
    for directory in os.environ.get("PATH", os.defpath).split(os.pathsep):
        path = shutil.which(name, path=directory or os.curdir)
        if path and not is_standin(path):
            return path
    return None


def is_verls(command):
    """Whether a word of the command is a module or a script that leads to verlc."""
    return any(w in PROGRAMS or w in NOT_BUILT or (w.endswith(".py") and program_of_script(w) != (None, None)) for w in command)


def execute(command):
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"error: {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


def target(arguments):
    """(options, what python is to run) of torchrun's or accelerate's command line."""
    for k, a in enumerate(arguments):
        if a in ("-m", "--module"):
            return arguments[:k], ["-m", *arguments[k + 1:]]
        if a.endswith(".py"):
            return arguments[:k], arguments[k:]
    return arguments, []


def option(options, *names):
    """The value of --name=VALUE or --name VALUE, - and _ alike; None: not given."""
    for k, a in enumerate(options):
        name, eq, value = a.partition("=")
        if name.lstrip("-").replace("-", "_") in names:
            return value if eq else options[k + 1] if k + 1 < len(options) else None
    return None


def one_process(name, arguments, per_node, nodes, rank):
    """verl's program in one process that is told of the others, and rank 0 alone."""
    options, python = target(arguments)
    if not python:
        refuse(f"{name}: nothing to run in: {' '.join(arguments)}")
    n = option(options, *per_node)
    nnodes = (option(options, *nodes) or "1").split(":")[0]
    if n and n.isdigit() and nnodes.isdigit():
        os.environ |= {"LOCAL_WORLD_SIZE": n, "WORLD_SIZE": str(int(n) * int(nnodes)), "LOCAL_RANK": "0"}
    node = option(options, *rank) or "0"
    os.environ["RANK"] = node if node.isdigit() else "0"
    execute(["python3", "-u", *python])


def torchrun(arguments):
    real = installed("torchrun")
    if real and not is_verls(arguments):
        execute([real, *arguments])
    one_process("torchrun", arguments, ("nproc_per_node",), ("nnodes",), ("node_rank",))


def accelerate(arguments):
    real = installed("accelerate")
    if real and not is_verls(arguments):
        execute([real, *arguments])
    if arguments[:1] != ["launch"]:
        refuse(f"accelerate {' '.join(arguments[:1])}: accelerate is not installed; `verlc exec` stands in for accelerate launch")
    nodes = option(target(arguments)[0], "num_machines") or "1"
    total = option(target(arguments)[0], "num_processes")
    if total and total.isdigit() and nodes.isdigit():
        arguments = ["launch", f"--per_node={int(total) // max(int(nodes), 1)}", *arguments[1:]]
    one_process("accelerate launch", arguments, ("per_node",), ("num_machines",), ("machine_rank",))


def uv_command(arguments):
    """What stands behind the options of `uv run`."""
    k = 0
    while k < len(arguments) and arguments[k].startswith("-"):
        if arguments[k] == "--":
            return arguments[k + 1:]
        if arguments[k] in ("-m", "--module"):
            return ["python3", "-m", *arguments[k + 1:]]
        k += 2 if arguments[k] in UV_VALUES else 1
    command = arguments[k:]
    return ["python3", *command] if command and command[0].endswith(".py") else command


def uv(arguments):
    real = installed("uv")
    words = [a for a in arguments if not a.startswith("-")]
    if real and not is_verls(arguments):
        execute([real, *arguments])
    if words[:1] != ["run"]:
        refuse(f"uv {' '.join(arguments)}: uv is not installed; `verlc exec` stands in for uv run alone")
    command = uv_command(arguments[arguments.index("run") + 1:])
    if not command:
        refuse(f"uv {' '.join(arguments)}: no command to run")
    execute(command)


# ---- ray ----

def why_not_env(env):
    """What is wrong with a job's runtime environment; None: nothing."""
    if not isinstance(env, dict):
        return "it is not a mapping with env_vars"
    env_vars, directory = env.get("env_vars"), env.get("working_dir")
    if env_vars is not None and not isinstance(env_vars, dict):
        return f"env_vars is {type(env_vars).__name__}, not a mapping of names to texts"
    for name, value in (env_vars or {}).items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            return f"env_vars: {name!r} is no name of an environment variable"
        if not isinstance(value, (str, int, float)) or "\0" in str(value):
            return f"env_vars: {name} is {value!r}, not a text"[:300]
    if directory is not None and (not isinstance(directory, str) or "\0" in directory):
        return f"working_dir is {directory!r}, not a text"[:300]
    try:
        json.dumps(env, ensure_ascii=False).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        return f"it has a value that is not JSON ({error})"
    return None


def runtime_env(options):
    """The job's runtime environment, as `ray job submit` reads it."""
    env, text, file = {}, option(options, "runtime_env_json"), option(options, "runtime_env")
    if file:
        try:
            import yaml
        except ImportError:
            refuse(f"ray job submit --runtime-env {file}: reading it needs PyYAML (pip install pyyaml), or give --runtime-env-json")
        try:
            with open(file, encoding="utf-8") as f:
                env = yaml.safe_load(f) or {}
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            refuse(f"ray job submit --runtime-env {file}: {' '.join(str(error).split())}")
    if text:
        try:
            env = json.loads(text)
        except (ValueError, RecursionError) as error:
            refuse(f"ray job submit --runtime-env-json: {error}")
    why = why_not_env(env)
    if why:
        refuse(f"ray job submit: the runtime environment cannot be used: {why}")
    return env


def job_command(command):
    """The job's command under `verlc exec`, with the options of this one."""
    if re.match(r"[A-Za-z_]\w*=", command[0]):
        command = ["env", *command]
    sets = [f"--set={s}" for s in json.loads(os.environ.get("VERLC_EXEC_SET") or "[]")]
    plan = ["--plan"] if os.environ.get("VERLC_EXEC_PLAN") else []
    if plan and os.environ.get("VERLC_EXEC_GPU"):
        plan.append("--gpu=" + os.environ["VERLC_EXEC_GPU"])
    return ["verlc", "exec", *plan, *sets, *command]


def submit_to_cluster(real, options, env, command):
    """The job starts in the environment of the cluster's machine. There `verlc` is this program where its files are there
    too, else the one that is installed on that machine; Ray replaces ${PATH} by that machine's."""
    theirs = {"PATH": "${PATH}", "RAY_JOB_STOP_WAIT_TIME_S": STOP_WAIT_S} | (env.get("env_vars") or {})
    ours = {"PATH": f"{BIN}:{theirs['PATH']}", "VERLC": os.environ["VERLC"]}
    kept, skip = [], False
    for a in options:
        name, eq, _ = a.partition("=")
        drop = name in ("--runtime-env-json", "--runtime-env")
        if not (skip or drop):
            kept.append(a)
        skip = drop and not eq
    text = json.dumps(env | {"env_vars": theirs | ours})
    tell()  # the job has a `verlc exec` of its own
    execute([real, "job", "submit", *kept, "--runtime-env-json", text, "--", *job_command(command)])


def submit(arguments):
    real = installed("ray")
    if "--" not in arguments:
        if real and not is_verls(arguments):
            execute([real, "job", "submit", *arguments])
        refuse("ray job submit: expected -- in front of the job's command")
    cut = arguments.index("--")
    options, command = arguments[:cut], arguments[cut + 1:]
    env = runtime_env(options)
    if not command:
        refuse("ray job submit: no command behind --")
    if real:
        submit_to_cluster(real, options, env, command)
    tell()
    note("ray is not installed: the job runs here, with the env_vars of its runtime environment")
    os.environ |= {str(k): str(v) for k, v in (env.get("env_vars") or {}).items() if str(k) not in ("PYTHONPATH", "PATH")}
    for name in ("PYTHONPATH", "PATH"):  # the stand-in stays in front
        if (env.get("env_vars") or {}).get(name):
            os.environ[name] = os.pathsep.join([*filter(None, [os.environ.get(name)]), str(env["env_vars"][name])])
    directory = option(options, "working_dir") or env.get("working_dir")
    if directory:
        try:
            os.chdir(os.path.expanduser(directory))
        except (OSError, ValueError) as error:
            refuse(f"ray job submit: working_dir {directory!r}: {getattr(error, 'strerror', None) or error}")
    execute(command)


def ray(arguments):
    if arguments[:2] == ["job", "submit"]:
        submit(arguments[2:])
    real = installed("ray")
    if real:
        execute([real, *arguments])
    if arguments[:1] in (["start"], ["stop"], ["status"]):
        tell(b"touch")
        note(f"ray {arguments[0]}: ray is not installed, and verlc needs none; nothing was done")
        return
    refuse(f"ray {' '.join(arguments[:2])}: ray is not installed; `verlc exec` stands in for job submit, start, stop, status")


if __name__ == "__main__":
    {"torchrun": torchrun, "accelerate": accelerate, "uv": uv, "ray": ray}[sys.argv[1]](sys.argv[2:])
