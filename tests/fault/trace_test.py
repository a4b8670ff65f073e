"""With VERL_LOGGING_LEVEL=DEBUG an error shows the lines that it passed through, from where it arose to the command,
whatever was added to its message on the way and whatever was closed after it."""

import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import Scratch, Tests, run  # noqa: E402


def frames(p):
    """The files of the trace, innermost first; a run has one error line and one trace."""
    lines = [line for line in p.stderr.splitlines() if line.startswith("debug: ") and " < " in line]
    return re.findall(r"src/([\w/]+\.c):\d+", lines[-1]) if len(lines) == 1 else []


def main():
    test = Tests()
    with Scratch() as s:
        model = s.dir / "broken"
        model.mkdir()
        for f in (s.dir / "model").iterdir():
            (model / f.name).write_bytes(f.read_bytes())
        weights = model / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        s.write("chats.jsonl", [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 8)
        commands = {
            "ppo": (s.ppo("run", **{"actor_rollout_ref.model.path": model}),
                    ["ppo/worker/worker.c", "ppo/controller.c", "ppo/verlc_api.c", "ppo/ppo.c", "cmd/train.c"]),
            "sft": (["sft", f"model.path={model}", f"data.train_files={s.dir / 'chats.jsonl'}", "data.train_batch_size=4",
                     f"trainer.default_local_dir={s.dir / 'sft'}"], ["supervised/worker.c", "supervised/learner.c", "cmd/train.c"]),
            "generate": (["generate", "--model", model], ["cmd/generate.c"]),
            "bench": (["bench", "train", "--model", model, "--batch", "1", "--len", "8"], ["cmd/bench/bench_model.c"]),
        }
        for name, (args, path) in commands.items():
            p = run(*args, check=False, env={"VERL_LOGGING_LEVEL": "DEBUG"}, input='{"ids": [5], "max_tokens": 1}\n')
            got = frames(p)
            test(f"{name}: a model that is cut off is an input error", p.returncode == 3, f"exit {p.returncode}: {p.stderr[-300:]}")
            test(f"{name}: from the file's reader to the command", got and got[0].startswith("model/files/") and
                 [f for f in dict.fromkeys(got) if f in path] == path, str(got))
        # The error arises in a step: what is said behind it does not start the trace anew.
        reward = s.dir / "stop.py"
        reward.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    raise ValueError\n")
        p = run(*s.ppo("step", **{"reward.custom_reward_function.path": reward, "reward.on_error": "stop",
                                  "reward.num_workers": 1}), check=False, env={"VERL_LOGGING_LEVEL": "DEBUG"})
        got = frames(p)
        test("a failed step: from the stage to the command", p.returncode == 1 and got[:1] == ["ppo/stages/reward.c"] and
             got[-1] == "cmd/train.c", f"exit {p.returncode}: {got}")
    test.end()


if __name__ == "__main__":
    main()
