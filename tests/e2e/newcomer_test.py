"""What somebody meets who comes with data, a reward and no checkpoint of verl's documentation in mind: rows of one's
own, the reward function's Python and prints, names of metrics, adapters, what is missing."""

import json
import os
import pathlib
import pty
import re
import shutil
import sqlite3
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from verlc_test import DIGITS_REWARD, ENV, VERLC, Scratch, Tests, run, save_tensors, series, tensors

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "custom" and ground_truth is None, (data_source, ground_truth)
    return float(len(solution_str) % 5) + float(extra_info["answer"])
"""


def own_rows(s, test):
    rows = s.write("own.jsonl", [{"prompt": f"{i}+2?", "answer": str(i + 2)} for i in range(8)])
    plain = run(*s.ppo("refused", data__train_files=rows, trainer__total_training_steps=1), check=False)
    test("own rows: all missing columns at once, those there are, and an example",
         plain.returncode == 3 and "there are no columns 'data_source', 'reward_model'; it has: prompt, answer" in plain.stderr
         and '"reward_model": {"ground_truth": "4"}' in plain.stderr, plain.stderr)
    reward = s.dir / "reward.py"
    reward.write_text(REWARD)
    p = run(*s.ppo("own", data__train_files=rows, data__val_files=rows, trainer__total_training_steps=2, trainer__test_freq=2,
                   reward__custom_reward_function__path=reward))
    steps = [json.loads(line)["data"] for line in (s.dir / "own/metrics.jsonl").read_text().splitlines()]
    test("own rows: a reward function of one's own takes them", steps[0]["critic/score/mean"] > 2
         and steps[0]["reward/num_errors"] == 0 and "val-core/custom/acc/mean@1" in steps[-1], steps[-1])
    test("own rows: said where ground_truth is None", "8 rows have no reward_model" in p.stderr, p.stderr)


def reward_python(s, test):
    venv = s.dir / "venv"
    bare = venv / "bin/python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", venv], check=True)
    lib = next(venv.glob("lib/python3*/site-packages"))
    (lib / "verlc_only_here.py").write_text("NAME = 'only here'\n")
    reward = s.dir / "imports.py"
    reward.write_text("import verlc_only_here\n\ndef compute_score(solution_str, **others):\n"
                      "    print(verlc_only_here.NAME, flush=True)\n    return 1.0\n")
    keys = {"reward__custom_reward_function__path": reward, "trainer__total_training_steps": 1}
    p = run(*s.ppo("lacks", **keys), check=False)
    test.refused("reward: a failed import names the interpreter and the install line", p, 3, "No module named 'verlc_only_here'",
                 "bin/python", "-m pip install verlc_only_here", "reward.python=PYTHON")
    p = run(*s.ppo("has", reward__python=bare, **keys))
    test("reward: reward.python chooses the interpreter, and prints go to the log", "reward: only here" in p.stderr, p.stderr)
    p = run(*s.ppo("none", reward__python="/no/such/python", **keys), check=False)
    test.refused("reward: reward.python that is none", p, 1, "reward.python: /no/such/python is not a program")
    reward.write_text("def compute_score(solution_str, **others):\n    for i in range(10000): print('line', i)\n    return 1.0\n")
    p = run(*s.ppo("prints", **keys))
    n = p.stderr.count("reward: line")
    test("reward: prints without end are bounded, and it is said", 20 <= n < 2000 and " more lines (at most 20" in p.stderr, n)


def adapters(s, test):
    chats = s.write("chats.jsonl", [{"messages": [{"role": "user", "content": f"What is {i}?"},
                                                  {"role": "assistant", "content": "777"}]} for i in range(16)])
    run("sft", f"model.path={s.dir / 'model'}", f"data.train_files={chats}", "data.train_batch_size=16", "data.max_length=64",
        "engine.dtype=float32", "model.lora_rank=4", "optim.lr=0.05", "trainer.total_training_steps=5", "trainer.logger=[file]",
        f"trainer.default_local_dir={s.dir / 'lora'}")
    adapter = s.dir / "lora/global_step_5/actor"
    words = (f"{adapter} is a LoRA adapter", str(s.dir / "model"), "lora_adapter_path=DIR", "verlc model merge --adapter")
    p = run("generate", "--model", adapter, check=False, input='{"prompt": "x"}\n')
    test.refused("adapter as --model: what to do", p, 3, *words)
    p = run(*s.ppo("x", actor_rollout_ref__model__path=adapter), check=False)
    test.refused("adapter as model.path: what to do", p, 3, *words)

    def generate(model, *more):
        run("generate", f"model.path={model}", f"data.path={rows}", f"data.output_path={s.dir / 'out.jsonl'}",
            "data.n_samples=1", "rollout.prompt_length=64", "rollout.response_length=8", "rollout.temperature=0",
            "rollout.dtype=float32", *more)
        return [json.loads(line)["responses"] for line in (s.dir / "out.jsonl").read_text().splitlines()]

    rows = s.write("texts.jsonl", [{"prompt": f"What is {i}?"} for i in range(4)])
    plain, adapted = generate(s.dir / "model"), generate(s.dir / "model", f"+model.lora_adapter_path={adapter}")
    run("model", "merge", "--adapter", adapter, "--out", s.dir / "merged", "--dtype", "fp32")
    test("generate with keys: an adapter by model.lora_adapter_path, and prompts that are texts",
         adapted == generate(s.dir / "merged") and adapted != plain, (plain, adapted))
    server = [f"actor_rollout_ref.model.path={s.dir / 'model'}", f"data.train_files={rows}",
              f"+data.output_path={s.dir / 'out.jsonl'}", "actor_rollout_ref.rollout.n=1",
              "actor_rollout_ref.rollout.prompt_length=64",
              "actor_rollout_ref.rollout.response_length=8", "actor_rollout_ref.rollout.temperature=0",
              "actor_rollout_ref.rollout.dtype=float32", f"actor_rollout_ref.model.lora_adapter_path={adapter}"]
    run("generate", *server)
    test("generate with verl 0.9.1's keys: the same", adapted == [json.loads(line)["responses"] for line in
                                                                (s.dir / "out.jsonl").read_text().splitlines()])


def few_keys(s, test):
    p = run("ppo", "data.train_batch_size=4", check=False, env={"HOME": str(s.dir)})
    test.refused("ppo: all keys that are missing at once", p, 2, "actor_rollout_ref.model.path=DIR", "data.train_files=FILE",
                 "critic.model.path=DIR")
    test("data.val_files is not among them", "data.val_files" not in p.stderr, p.stderr)
    few = [f"actor_rollout_ref.model.path={s.dir / 'model'}", f"data.train_files={s.dir / 'train.jsonl'}", "data.val_files=[]",
           "data.train_batch_size=4", "data.max_prompt_length=64", "data.max_response_length=8", "trainer.total_training_steps=1"]
    plain = [x for x in few if "val_files" not in x] + ["algorithm.adv_estimator=grpo"]
    for name, more in (("absent", []), ("null", ["data.val_files=null"]), ("deleted", ["~data.val_files"])):
        p = run("ppo", *plain, *more, "trainer.test_freq=1", f"trainer.default_local_dir={s.dir / name}", check=False,
                env={"HOME": str(s.dir)})
        test(f"ppo: data.val_files {name}: a note, and no validation", p.returncode == 0 and
             p.stderr.count("note: data.val_files is not set: there is no validation") == 1 and "val-" not in p.stdout,
             p.stderr[-600:])
    p = run("ppo", *plain, "trainer.test_freq=-1", "trainer.val_before_train=False", f"trainer.default_local_dir={s.dir / 'quiet'}",
            check=False, env={"HOME": str(s.dir)})
    test("no note where nothing asks for one", p.returncode == 0 and "data.val_files" not in p.stderr, p.stderr[-600:])
    p = run("ppo", *plain, "trainer.val_only=True", check=False, env={"HOME": str(s.dir)})
    test.refused("trainer.val_only without validation data", p, 2, "trainer.val_only=True", "data.val_files=FILE")
    (s.dir / "data/rlhf/gsm8k").mkdir(parents=True)
    shutil.copy(s.dir / "test.jsonl", s.dir / "data/rlhf/gsm8k/test.parquet")
    p = run("ppo", *plain, check=False, env={"HOME": str(s.dir)})
    test("verl's default file is taken where it is there", p.returncode != 0 and "gsm8k/test.parquet" in p.stderr, p.stderr[-600:])
    shutil.rmtree(s.dir / "data")
    for name, more in (("grpo", ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_kl_loss=True"]),
                       ("gae", [f"critic.model.path={s.dir / 'model'}"])):
        p = run("ppo", *few, *more, f"trainer.default_local_dir={s.dir / name}", check=False)
        test(f"ppo: {name} with no size of a micro-batch runs, and it is said", p.returncode == 0 and
             "no size of micro-batches is given: they are cut by tokens, as if these were True: actor_rollout_ref." in p.stderr,
             p.stderr)
    p = run("ppo", *few, "algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_dynamic_bsz=False", check=False)
    test.refused("ppo: use_dynamic_bsz=False asks for a size", p, 2, "ppo_micro_batch_size_per_gpu")
    words = "warning: verlc ppo would refuse this here: "
    p = run("plan", *few, "algorithm.adv_estimator=grpo", "data.train_files=/no/such.parquet")
    test("plan: a file that is not there", words + "data.train_files" in p.stderr and "/no/such.parquet" in p.stderr, p.stderr)
    p = run("plan", *few, "algorithm.adv_estimator=grpo", "data.max_prompt_length=4")
    test("plan: a prompt over the limit", words + "data.train_files" in p.stderr and "the limit is 4" in p.stderr, p.stderr)
    p = run("plan", *few, "algorithm.adv_estimator=grpo")
    test("plan: nothing to refuse", words not in p.stderr, p.stderr)


def on_terminal(args, **env):
    """What the program writes on a terminal."""
    here, there = pty.openpty()
    p = subprocess.Popen([VERLC, *map(str, args)], stdin=there, stdout=there, stderr=there, env={**ENV, **env}, close_fds=True)
    os.close(there)
    text = b""
    while True:
        try:
            part = os.read(here, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        text += part
    os.close(here)
    p.wait(60)
    return text.decode()


def step_lines(s, test):
    keys = {"trainer__total_training_steps": 1, "trainer__test_freq": 1, "trainer__logger": "[console]"}
    names = ["actor/kl_loss", "actor/ppo_kl", "actor/entropy", "actor/grad_norm", "critic/score/mean", "critic/rewards/mean",
             "response_length/mean", "response_length/clip_ratio", "timing_s/step", "perf/throughput",
             "val-core/openai/gsm8k/acc/mean@1"]

    def names_of(p):
        line = next(line for line in p.stdout.splitlines() if line.startswith("step:1 - "))
        return [part.rpartition(":")[0] for part in line.split(" - ")[1:]]

    full = names_of(run(*s.ppo("full", **keys)))
    short = names_of(run(*s.ppo("short", **keys), env={"VERLC_CONSOLE": "short"}))
    test("console: a pipe has all metrics", len(full) > 50 and set(names) < set(full), full)
    test("console: VERLC_CONSOLE=short has those that matter", sorted(short) == sorted(names), short)
    text = on_terminal(s.ppo("terminal", **keys))
    line = next((x for x in text.replace("\r", "\n").splitlines() if "grpo step 1/1" in x), "")
    labels = ("reward", "score", "kl", "entropy", "grad_norm", "length", "clipped", "tok/s", names[-1])
    test("console: a terminal shows them with labels", all(f"  {w} " in line for w in labels) and "step:1 - " not in text, line)


def blocks(page):
    """The code blocks of a page of the documentation."""
    return re.findall(r"^```\n(.*?)^```$", (pathlib.Path(__file__).resolve().parents[2] / "docs" / page).read_text(), re.M | re.S)


def looking_at_a_run(s, test):
    constant, digits = s.dir / "constant.py", s.dir / "digits.py"
    constant.write_text("def compute_score(**given):\n    return 1.0\n")
    digits.write_text(DIGITS_REWARD)
    warning = "reward_constant: every sample of the step has the same score"
    keys = {"trainer__total_training_steps": 5, "trainer__save_freq": 5}
    p = run(*s.ppo("constant", reward__custom_reward_function__path=constant, **keys))
    test("a constant reward is said once", p.stderr.count(warning) == 1, p.stderr)
    p = run(*s.ppo("digits", reward__custom_reward_function__path=digits, actor_rollout_ref__rollout__n=8, **keys))
    test("another is not", warning not in p.stderr, p.stderr)
    queries = [q for b in blocks("training.md") for q in re.findall(r'sqlite3 RUN/run.db "(.*)"', b)]
    with sqlite3.connect(s.dir / "digits/run.db") as db:
        curve, worst = (db.execute(q).fetchall() for q in queries)
        scores = sorted(x for x, in db.execute("SELECT score FROM samples WHERE validation=0 AND step=5"))
    test("docs: the reward curve", [v for _, v in curve] == series(s.dir / "digits", "critic/rewards/mean"), curve)
    test("docs: the worst samples", [x for x, *_ in worst] == scores[:3], worst)


def save_the_best(s, test):
    recipe = next(b for b in blocks("training.md") if "trainer.save_freq=0" in b).replace("\\", " ").split()
    keys = dict(k.split("=") for k in recipe)
    p = run(*s.ppo("best", **{**keys, "trainer.test_freq": 1}, reward__custom_reward_function__path=s.dir / "digits.py"))
    values = series(s.dir / "best", "val-core/openai/gsm8k/acc/mean@1")
    step = json.loads((s.dir / "best/best_checkpoint.json").read_text())["step"]
    test("docs: save only the best", [d.name for d in s.dir.glob("best/global_step_*")] == [f"global_step_{step}"]
         and step == 1 + values.index(max(values)) and "only the best validations are saved" in p.stderr, (step, values))


def algo_requests(test):
    requests = next(b for b in blocks("tools.md") if '"op"' in b)
    replies = [json.loads(line) for line in run("algo", input=requests).stdout.splitlines()]
    test("docs: the requests of algo", len(replies) == 4 and not any("error" in r for r in replies)
         and replies[0]["advantages"][0][0] > 0.7 and replies[3]["score"] == 1, replies)


# What a newcomer types, and a part of the one line that answers. MODEL is a model's directory, ROWS a file of rows.
WRONG = [
    ("train", "'verlc ppo KEY=VALUE...' trains"),
    ("mdoel info MODEL", "there is no command 'mdoel'; did you mean 'model'?"),
    ("resume", "the command that started a run goes on with it"),
    ("merge MODEL", "'verlc model merge' merges"),
    ("convert", "'verlc model export'"),
    ("gpu", "'verlc selftest' tries the device"),
    ("run.sh", "'verlc exec bash run.sh'"),
    ("trainer.total_epochs=3", "is a key without a command: write 'verlc ppo trainer.total_epochs=3 ...'"),
    ("help ppl", "did you mean 'ppo'?"),
    ("ppo", "no keys given; it needs at least actor_rollout_ref.model.path=DIR"),
    ("sft data.train_files=ROWS", "not set: model.path=DIR (or a hub id)"),
    ("eval", "it needs at least data.path=FILE"),
    ("plan", "not set: actor_rollout_ref.model.path=DIR (or a hub id)"),
    ("plan sft", "not set: model.path=DIR (or a hub id)"),
    ("plan generate", "not set: model.path=DIR (or a hub id)"),
    ("plan --model MODEL", "did you mean actor_rollout_ref.model.path=...?"),
    ("ppo help", "or --help for the keys"),
    ("ppo --learning_rate 1e-5", "a key has no dashes: did you mean actor_rollout_ref.actor.optim.lr=...?"),
    ("ppo --learning-rate=1e-5", "did you mean actor_rollout_ref.actor.optim.lr=...?"),
    ("ppo --config run.yaml", "did you mean --config-path DIR --config-name FILE?"),
    ("ppo run.yaml", "a file of keys is read by --config-path DIR --config-name run.yaml"),
    ("ppo ROWS", "a file is the value of a key: data.train_files=ROWS"),
    ("ppo MODEL", "a directory is the value of a key: actor_rollout_ref.model.path=MODEL"),
    ("eval ROWS", "a file is the value of a key: data.path=ROWS"),
    ("ppo actor_rollout_ref.actor.optim.lr 1e-5", "write key=value: actor_rollout_ref.actor.optim.lr=1e-5"),
    ("ppo trainer.total_epochs = 3", "without spaces around the =: trainer.total_epochs=..."),
    ("ppo trainer.total_epoch", "did you mean trainer.total_epochs=...?"),
    ("ppo data.train_batch_size=four", "expected int[1,2^24], that is a whole number from 1 to 2^24 (command line)"),
    ("ppo data.max_response_length=1e3", ": write 1000 (command line)"),
    ("ppo trainer.total_epochs='3'", "; quotes make a text of it (command line)"),
    ("ppo actor_rollout_ref.rollout.temperature=-1", "that is 0 or a number from 1e-6 to 1e6 (command line)"),
    ("ppo data.truncation=ERROR", "did you mean error?"),
    ("ppo data.shuffle=yes", "expected bool, that is True or False"),
    ("ppo optim.lr=1e-5", "optim.lr is a key of verlc sft, not of this program; did you mean actor_rollout_ref.actor.optim.lr?"),
    ("sft algorithm.adv_estimator=grpo", "algorithm.adv_estimator is a key of verlc ppo, not of this program"),
    ("ppo --help nonsense", "no key of ppo_trainer starts or ends with 'nonsense'"),
    ("ppo --help trainer.total_epohcs", "did you mean trainer.total_epochs?"),
    ("model inof MODEL", "there is no 'model inof': did you mean 'info'?"),
    ("model info", "which model? usage: verlc model info DIR"),
    ("model info ROWS", "it is a file; give the directory that holds config.json"),
    ("model info MODEL --model MODEL", "are two models"),
    ("model info nowhere", "no such directory, nor a hub id such as"),
    ("model init --preset tiny", "--out is missing"),
    ("model init --arch qwen3-8b --config-only --dtype bf16 --out x", "with --config-only there are no weights"),
    ("model export --model MODEL", "--out is missing"),
    ("generate MODEL", "did you mean --model MODEL?"),
    ("generate --model", "--model needs a value: --model DIR; usage: verlc generate"),
    ("tokenize", "--model is missing; usage: verlc tokenize"),
    ("data gsm", "it makes gsm8k and arith"),
    ("show nowhere", "nowhere does not exist; a run is the directory of trainer.default_local_dir"),
    ("show 1 2 3 4 5 6 7 8 9", "'9' is one argument too many, at most 8"),
    ("show ROWS", "cannot be read"),
    ("exec ROWS_NAME", "is a file, not a program: write verlc exec bash ROWS_NAME"),
]


def wrong_command_lines(s, test):
    """One line, exit status 2 or 3, and what to do. The whole line of the output is the message."""
    names = {"MODEL": str(s.dir / "model"), "ROWS_NAME": "test.jsonl", "ROWS": str(s.dir / "test.jsonl")}

    def named(text):
        return re.sub("|".join(names), lambda m: names[m[0]], text)

    for line, answer in WRONG:
        p = run(*[named(w) for w in line.split()], check=False, cwd=s.dir, stdin=subprocess.DEVNULL)
        ok = p.returncode in (2, 3) and not p.stdout and p.stderr.count("\n") == 1 and named(answer) in p.stderr
        test(f"verlc {line}: {answer}", ok and p.stderr.startswith("error: "), f"exit {p.returncode} {p.stdout[:200]} {p.stderr}")


def questions(s, test):
    test("help COMMAND is COMMAND --help", all(run("help", *c).stdout == run(*c[:1], *h).stdout for c, h in (
        (["ppo"], ["--help"]), (["ppo", "trainer."], ["--help", "trainer."]), (["model", "info"], ["info", "--help"]),
        (["plan"], ["--help"]), (["eval"], ["--help"]), (["show"], ["--help"]), (["exec"], ["--help"]))))
    test("help KEY is explain KEY", run("help", "trainer.total_epochs").stdout == run("explain", "trainer.total_epochs").stdout)
    test("help alone, -h and --help", run("help").stdout == run("-h").stdout == run("--help").stdout)
    test("every command has its help", all(run("help", line.split()[0]).stdout for line in run("help").stdout.splitlines()
                                           if line.startswith("  ") and line.split()[0] != "worker"))
    test("-v, -V, version and --version", len({run(v).stdout for v in ("-v", "-V", "version", "--version")}) == 1)
    text = run("ppo", "--help", "lr").stdout
    test("ppo --help with the end of a name",
         "\nactor_rollout_ref.actor.optim.lr=1.0e-06\n" in text and "\ncritic.optim.lr=" in text)
    test("model info DIR is model info --model DIR",
         run("model", "info", s.dir / "model").stdout == run("model", "info", "--model", s.dir / "model").stdout)
    run("model", "init", "--arch", "qwen3-next-80b-a3b", "--config-only", "--out", s.dir / "next")
    text = run("plan", f"actor_rollout_ref.model.path={s.dir}/next", "algorithm.adv_estimator=grpo", check=False).stdout
    test("a plan of a built-in shape needs its config.json alone", os.listdir(s.dir / "next") == ["config.json"] and
         "recompute: all activations of an update" in text, text)
    text = run("tokenize", "--model", s.dir / "model", input="").stderr
    test("a pipe is no person who is waited for", "Ctrl-D" not in text, text)
    here, there = pty.openpty()
    tokenize = [VERLC, "tokenize", "--model", s.dir / "model"]
    p = subprocess.Popen(tokenize, stdin=there, stderr=subprocess.PIPE, env=ENV, close_fds=True)
    os.close(there)
    text = p.stderr.readline().decode()
    os.write(here, b"\x04")
    p.wait(30)
    os.close(here)
    test("a terminal is said what is read from it", "reads requests, a JSON object a line" in text and "Ctrl-D" in text, text)


def colours(s, test):
    red, line = "\x1b[1;31merror: \x1b[0m", ["ppo", "trainer.nope=1"]
    plain = {"NO_COLOR": "", "TERM": "xterm", "VERLC_COLOR": "auto"}
    test("a terminal: errors have a colour", red in on_terminal(line, **plain), on_terminal(line, **plain))
    test("not with NO_COLOR, TERM=dumb or VERLC_COLOR=never", not any("\x1b" in on_terminal(line, **{**plain, **e}) for e in (
        {"NO_COLOR": "1"}, {"TERM": "dumb"}, {"VERLC_COLOR": "never"})))
    test("a pipe: none, but with VERLC_COLOR=always", "\x1b" not in run(*line, check=False).stderr and
         red in run(*line, check=False, env={"VERLC_COLOR": "always"}).stderr)
    one = s.ppo("warned", actor_rollout_ref__rollout__n=1, actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=2,
                trainer__total_training_steps=1, trainer__save_freq=0)
    p = run(*one, env={"VERLC_COLOR": "always"})
    parts = tensors(s.dir / "model/model.safetensors")
    shutil.copytree(s.dir / "model", s.dir / "odd")
    save_tensors(s.dir / "odd/model.safetensors", {**parts, "odd.weight": ("F32", [1], b"\0\0\0\0")})
    ranks = run(*s.ppo("ranks", actor_rollout_ref__model__path=s.dir / "odd", trainer__ranks=2, trainer__device="cpu",
                       trainer__total_training_steps=1, trainer__save_freq=0), env={"VERLC_COLOR": "always"}).stderr
    test("lines of ranks come through their controller, without", "warning: " in ranks and "odd.weight" in ranks and
         "x1b" not in ranks, ranks[:900])
    test("warnings too, notes not", "\x1b[33mwarning: \x1b[0mactor_rollout_ref.rollout.n=1" in p.stderr and "\x1b" not in
         "".join(x for x in p.stderr.splitlines() if "note:" in x), p.stderr[:600])


def main():
    test = Tests()
    with Scratch(n_train=8, n_test=4) as s:
        wrong_command_lines(s, test)
        questions(s, test)
        colours(s, test)
        own_rows(s, test)
        reward_python(s, test)
        adapters(s, test)
        few_keys(s, test)
        step_lines(s, test)
        looking_at_a_run(s, test)
        save_the_best(s, test)
        algo_requests(test)
    test.end()


main()
