"""Invariant 11 for generation: the output file has the same bytes on any number of CPU ranks; and under a launcher, where SFT is
tried as well."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from ranks import below, files
from verlc_test import DIGITS_REWARD, ENV, VERLC, Scratch, Tests, on_gpus, patience, run, start, waited


def generation(s, out, ranks, **keys):
    """main_generation."""
    args = {"model.path": s.dir / "model", "data.path": s.dir / "train.jsonl", "data.output_path": s.dir / out, "data.n_samples": 3,
            "data.batch_size": 5, "rollout.response_length": 24, "rollout.prompt_length": 64, "trainer.device": "cpu",
            "trainer.ranks": ranks, **keys}
    return ["generate", *[f"{k}={v}" for k, v in args.items()]]


def server(s, out, ranks):
    """main_generation_server."""
    args = {"actor_rollout_ref.model.path": s.dir / "model", "data.train_files": s.dir / "train.jsonl",
            "data.output_path": s.dir / out, "actor_rollout_ref.rollout.n": 2, "actor_rollout_ref.rollout.response_length": 24,
            "actor_rollout_ref.rollout.prompt_length": 64, "trainer.device": "cpu", "trainer.ranks": ranks}
    return ["generate", *[f"{k}={v}" for k, v in args.items()]]


def check_files(s, test):
    (s.dir / "digits.py").write_text(DIGITS_REWARD)
    keys = {"actor_rollout_ref__model__lora_rank": 4, "actor_rollout_ref__actor__optim__lr": 0.02,
            "reward__custom_reward_function__path": s.dir / "digits.py"}
    run(*s.ppo("lora", trainer__device="cpu", trainer__total_training_steps=1, **keys))
    adapter = {"+model.lora_adapter_path": s.dir / "lora/global_step_1/actor"}
    cases = {"jsonl": lambda n: generation(s, f"a{n}.jsonl", n),
             "parquet, float32, greedy": lambda n: generation(s, f"b{n}.parquet", n, **{
                 "rollout.dtype": "float32", "rollout.temperature": 0, "data.n_samples": 1}),
             "verl's server keys": lambda n: server(s, f"c{n}.jsonl", n),
             "tensor parallel": lambda n: generation(s, f"d{n}.jsonl", n, **{"rollout.tensor_model_parallel_size": min(n, 2)}),
             "an adapter, tensor parallel": lambda n: generation(s, f"e{n}.jsonl", n, **adapter, **{
                 "rollout.tensor_model_parallel_size": min(n, 2)})}
    for (name, args), ranks in zip(cases.items(), ((2, 4), (3,), (2,), (4,), (2,))):
        found = {}
        for n in (1, *ranks):
            p = run(*args(n), check=False)
            out = pathlib.Path(next(a for a in args(n) if a.startswith("data.output_path=")).split("=", 1)[1])
            found[n] = out.read_bytes() if p.returncode == 0 else p.stderr[-800:]
            said = "tensor parallel: 2 ranks generate together" in p.stdout + p.stderr
            test(f"{name}: {n} ranks, together or alone", said == ("tensor parallel" in name and n > 1), p.stderr[-300:])
        test(f"{name}: {ranks} ranks write the file of one", found[1] and all(found[n] == found[1] for n in ranks),
             f"{[v for v in found.values() if isinstance(v, str)]}")
    test("an adapter changes what is drawn", (s.dir / "d1.jsonl").read_bytes() != (s.dir / "e1.jsonl").read_bytes())


def check_plan(s, test):
    """70B over two GPUs: a rank has no more than half of the layers, and the KV cache what these leave."""
    wide = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 128}
    shutil.copytree(s.dir / "model", s.dir / "wide", ignore=shutil.ignore_patterns("*.safetensors"))
    (s.dir / "wide/config.json").write_text(json.dumps(json.loads((s.dir / "model/config.json").read_text()) | wide))
    args = generation(s, "p.jsonl", "null", **{"model.path": s.dir / "wide", "trainer.device": "auto"})
    whole, half = (json.loads(run("plan", "--gpu", "80GB", "--gpus", 2, "--json", *args, f"rollout.tensor_model_parallel_size={n}",
                                  check=False).stdout) for n in (1, 2))
    bytes_of = lambda plan: plan["parts"][0]["bytes"]  # noqa: E731
    test("plan: half of 70B, and what passes take", bytes_of(half) < 0.52 * bytes_of(whole), f"{whole} {half}")
    test("plan: on two it fits", half["fits"] and not whole["fits"], f"{whole} {half}")


def check_killed(s, test):
    long = {"rollout.response_length": 2000, "rollout.ignore_eos": True, "data.n_samples": 8}
    p = start(generation(s, "killed.jsonl", 2, **long))
    ranks = []
    waited(lambda: p.poll() is not None or ranks.extend(
        pid for pid, args in below(p.pid).items() if args.endswith(" worker")) or ranks)
    os.kill(ranks[-1], signal.SIGKILL)
    _, err = p.communicate(timeout=300)
    last = [line for line in err.splitlines() if line.startswith("error: ")]
    test("a rank is killed: it is named, and there is no file", p.returncode == 1 and len(last) == 1 and "rank " in last[0] and
         not (s.dir / "killed.jsonl").exists(), f"{p.returncode} {err[-500:]}")


def launched(args, n):
    """The same command once a rank, as srun starts it: exit codes."""
    ranks = [{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(r), "SLURM_NTASKS": str(n), "SLURM_LOCALID": str(r),
              "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": str(n)} for r in range(n)]
    ps = [subprocess.Popen([VERLC, *map(str, on_gpus(args))], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                           env={**ENV, **r})
          for r in reversed(ranks)]
    out = [p.communicate(timeout=120)[0] for p in ps]
    return [p.returncode for p in ps], "".join(out)[-1500:]


def check_launcher(s, test):
    codes, out = launched(generation(s, "srun/d.jsonl", 1), 2)
    test("srun verlc generate: two ranks, one file", codes == [0, 0] and
         (s.dir / "srun/d.jsonl").read_bytes() == (s.dir / "a1.jsonl").read_bytes(), f"{codes} {out}")
    rows = [{"messages": [{"role": "user", "content": f"{i} + 1"}, {"role": "assistant", "content": str(i + 1)}]} for i in range(8)]
    keys = {"model.path": s.dir / "model", "data.train_files": s.write("chats.jsonl", rows), "data.train_batch_size": 4,
            "data.max_length": 64, "data.max_token_len_per_gpu": 256, "trainer.total_training_steps": 2, "trainer.device": "cpu",
            "trainer.logger": "[console]", "trainer.save_freq": 2}
    args = {d: ["sft", *[f"{k}={v}" for k, v in keys.items()], f"trainer.default_local_dir={s.dir / d}"]
            for d in ("one", "srun-sft")}
    run(*args["one"])
    codes, out = launched(args["srun-sft"], 2)
    test("srun verlc sft: two ranks, the files of one", codes == [0, 0] and files(s.dir / "one", 2) == files(s.dir / "srun-sft", 2),
         f"{codes} {out}")
    ppo = s.ppo("refused", trainer__device="cpu", data__train_batch_size=0)
    for name, bad in (("ppo", ppo), ("sft", [*args["one"], "data.train_batch_size=0"]), ("generate", generation(s, "e.txt", 1))):
        begin = time.time()
        codes, out = launched(bad, 2)
        took = time.time() - begin
        test(f"srun verlc {name}: what its configuration refuses ends every rank by itself",
             codes[0] == codes[1] not in (0, None) and took < patience(30), f"{codes} {took:.0f} s {out}")


def main():
    test = Tests()
    with Scratch(n_train=11) as s:
        check_files(s, test)
        check_plan(s, test)
        check_killed(s, test)
        check_launcher(s, test)
    test.end()


main()
