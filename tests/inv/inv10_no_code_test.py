"""Invariant 10: no eval, no pickle, no code from a model directory. Looks for every
construct that runs text as code or unpickles, in src/ and python/. What the command line
names is the user's own (a reward function, an estimator, a loss): it is loaded in one place of
each language, what a model writes runs in the sandbox alone, and a request of `verlc algo` cannot name it."""

import ast
import os
import pathlib
import re
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import Tests  # noqa: E402

ROOT = pathlib.Path(os.environ.get("SOURCE_DIR", pathlib.Path(__file__).resolve().parents[2]))
BUILTINS = {"eval", "exec", "compile", "__import__", "execfile"}
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "runpy", "torch", "ctypes", "code"}
LOADERS = {"import_module", "exec_module", "spec_from_file_location", "module_from_spec", "run_path", "run_module", "system",
           "popen", "allow_pickle", "trust_remote_code", "load_module"}
USER = {"spec_from_file_location", "module_from_spec", "exec_module"}  # loads a file of the user's
ALLOWED = {"verlc_helpers/user_function.py": USER,           # a reward function, an estimator, a loss
           "verlc_standin/sitecustomize.py": USER,           # the user's own sitecustomize under `verlc exec`
           "verlc_helpers/reward_manager.py": {"load_module"},  # the file of a reward manager of the user's
           "verlc_helpers/dataset.py": {"load_module", "import_module"},  # data.custom_cls of the command line
           "verlc_standin/verl/tools/function_tool.py": USER,  # function_tool_path
           "verlc_standin/verl/tools/tool_registry.py": {"import_module"},  # a class_name of the user's YAML
           "verlc_helpers/verl_package.py": USER,            # the stand-in's own files
           "verlc_helpers/tool_threads.py": {"ctypes"},      # an exception in a thread whose call has had its time
           "verlc_standin/verl/protocol.py": {"torch"},      # tensors for it, made of arrays; no file is loaded
           "verlc_helpers/ray_launch.py": {"ctypes"},        # prctl, of the C library that Python has: a rank ends with its actor
           "verlc_helpers/code_harness.py": {"exec"},        # the imports of every program, inside the sandbox
           "verlc_helpers/code_program.py": {"exec"},        # a policy's program, inside the sandbox
           "verlc_helpers/code_objects.py": {"exec", "compile"},  # the same
           "verlc_helpers/code_statement.py": {"exec", "compile", "import_module"},  # the data's statement about it, there
           "verlc_helpers/code_values.py": {"import_module"},  # modules of a table there, inside the sandbox
           "verlc_helpers/graders.py": {"import_module"}}    # whether the packages of graders are installed: names from C
# C: a shell, a shared object, or another program by a name found at run time.
C_CALLS = re.compile(r"\b(system|popen|dlopen|dlsym|wordexp|execl|execlp|execle|execv|execvp|execve|execvpe|fexecve|"
                     r"posix_spawn|posix_spawnp)\s*\(")
C_ALLOWED = {("base/process.c", "posix_spawn"), ("base/process.c", "execv"),  # this program as a reaper; below it python3, a helper
             ("ranks/restart.c", "execve"),          # this program again, by trainer.max_restarts
             ("cmd/exec.c", "execvp"),                   # the command that `verlc exec` is given
             ("sandbox/listen.c", "execvp"),             # the program that a sandbox is made for
             ("data/remote_copy.c", "posix_spawnp"),     # the hdfs client, for --hdfs_dir
             ("algo/custom/user_c.c", "posix_spawnp"),  # the C compiler, for a file that the command line names
             ("algo/custom/user_c.c", "dlopen"), ("algo/custom/user_c.c", "dlsym"),  # and what it made of it
             ("comm/zmq_library.c", "dlopen"), ("comm/zmq_library.c", "dlsym"),  # libzmq
             ("device/open.c", "dlopen"), ("device/open.c", "dlsym"),          # this program's CUDA backend and the driver
             ("device/gpu_use.c", "dlopen"), ("device/gpu_use.c", "dlsym"),    # the driver's NVML
             ("device/cuda/library_open.cu", "dlopen"),  # cuBLASLt and NCCL
             ("device/cuda/cublaslt_open.cu", "dlsym"), ("device/cuda/collective/nccl_open.cu", "dlsym")}


def python_finds(text):
    """Names of what a file uses of the above."""
    out = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BUILTINS:
            out.add(node.func.id)
        elif isinstance(node, ast.Import):
            out |= {a.name.split(".")[0] for a in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom):
            out |= {(node.module or "").split(".")[0]} & MODULES
            out |= {a.name for a in node.names} & LOADERS
        elif isinstance(node, ast.Attribute) and node.attr in LOADERS:
            out.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg in LOADERS:
            out.add(node.arg)
    return out


def c_finds(text):
    text = re.sub(r'/\*.*?\*/|//[^\n]*|"(?:[^"\\\n]|\\.)*"', " ", text, flags=re.S)
    return set(C_CALLS.findall(text))


def main():
    test = Tests()
    bad = "import pickle\nfrom importlib import import_module\neval('1')\nx.load_module()\nf(trust_remote_code=True)\n"
    test("the search finds what it looks for", python_finds(bad) == {"pickle", "import_module", "eval", "load_module",
                                                                   "trust_remote_code"} and
         c_finds('int x = system("ls"); /* popen( */ dlopen(p, 1); puts("execv(");') == {"system", "dlopen"})
    files = sorted((ROOT / "python").rglob("*.py"))
    test("the helpers are there", len(files) >= 5, files)
    for f in files:
        name = f.relative_to(ROOT / "python")
        finds = python_finds(f.read_text()) - ALLOWED.get(str(name), set())
        test(f"python/{name}", not finds, finds)
    task = '{"code": "print(1)", "fn_name": null, "tests": [""], "seconds": 5, "longest": 1000}'
    p = subprocess.run([sys.executable, ROOT / "python/verlc_helpers/code_harness.py"], input=task, capture_output=True, text=True,
                       check=False)
    test("a model's program does not run outside the sandbox", p.returncode == 1 and not p.stdout and
         "sandbox alone" in p.stderr, p)
    template = (ROOT / "python/verlc_helpers/chat_template_renderer.py").read_text()
    test("templates run in Jinja's sandbox alone", "ImmutableSandboxedEnvironment" in template and
         not re.search(r"(?<!Sandboxed)\bEnvironment\(|\bTemplate\(", template))
    sources = sorted(p for p in (ROOT / "src").rglob("*") if p.suffix in (".c", ".h", ".cu"))
    found = {(str(p.relative_to(ROOT / "src")), call) for p in sources for call in c_finds(p.read_text())}
    test(f"{len(sources)} C files start no program but the helpers, hdfs and a compiler", len(sources) > 100 and found <= C_ALLOWED,
         found - C_ALLOWED)
    test.end()


main()
