"""`make tensor-parallel-matrix`: runs whose ranks generate together beside the same run on one rank, on CPU ranks: tensor
parallel 1 to 4 times data parallel 1 and 2; five families; GRPO, PPO with a critic, LoRA, one step off; resumed on 4 ranks,
then 1, and with tensor parallel 2, then 4. Every byte of checkpoints, metrics but times and samples must be equal.

  tools/tensor_parallel_matrix.py [--families A,B] [--recipes A,B] [--report FILE]     figures: tools/figures.py

tests/inv/inv11_tensor_parallel_test.py has a slice of it."""

import json
import pathlib
import shutil
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from ranks import FAMILIES, family_model, first_difference  # noqa: E402
from verlc_test import Scratch, run, series  # noqa: E402

A = "actor_rollout_ref."
STEPS = {"one step off": 3}  # the samples of step 2 are in the checkpoint of step 1
SIZES = [(tp, dp) for tp in (1, 2, 3, 4) for dp in (1, 2)]


def recipes(model):
    critic = {"algorithm.adv_estimator": "gae", "critic.model.path": model, "critic.ppo_micro_batch_size_per_gpu": 1,
              "algorithm.use_kl_in_reward": True, A + "actor.use_kl_loss": False}
    return {"GRPO": {}, "PPO with a critic": critic, "LoRA": {A + "model.lora_rank": 4, A + "actor.fsdp_config.dtype": "bfloat16"},
            "one step off": {A + "hybrid_engine": False, A + "actor.use_kl_loss": False}}


class Matrix:
    def __init__(self, s, model):
        self.s, self.model, self.n, self.different = s, model, 0, []

    def run(self, recipe, d, tp, dp):
        keys = {A + "model.path": self.model, "trainer.total_training_steps": STEPS.get(recipe, 2), "trainer.save_freq": 1,
                "trainer.device": "cpu", "trainer.ranks": tp * dp, "trainer.layout": "sharded" if tp * dp > 1 else "auto",
                A + "actor.ppo_micro_batch_size_per_gpu": 1, A + "rollout.tensor_model_parallel_size": tp,
                "data.max_response_length": 24, **recipes(self.model)[recipe]}
        args = self.s.ppo(d, **{k.replace(".", "__"): v for k, v in keys.items()})
        if recipe == "one step off":
            args[1:1] = ["--config-name=one_step_off_ppo_trainer"]
        return run(*args, check=False)

    def compare(self, name, one, d, p, tp, steps):
        self.n += 1
        why = p.stderr[-800:] if p.returncode else first_difference(one, d, steps)
        said = series(d, "perf/tensor_parallel")
        if not why and tp > 1 and said[-1] != tp:
            why = f"perf/tensor_parallel is {said}"
        print(f"{'differs' if why else 'equal  '} {name}{': ' + why if why else ''}", flush=True)
        self.different += [name] if why else []
        shutil.rmtree(d, ignore_errors=True)

    def recipe(self, family, recipe):
        one, d, steps = self.s.dir / "one", self.s.dir / "other", STEPS.get(recipe, 2)
        shutil.rmtree(one, ignore_errors=True)
        p = self.run(recipe, one, 1, 1)
        if p.returncode:
            sys.exit(f"{family}, {recipe}, one rank: {p.stderr[-1500:]}")
        for tp, dp in SIZES[1:]:
            self.compare(f"{family}, {recipe}: tensor parallel {tp} x data parallel {dp}", one, d,
                         self.run(recipe, d, tp, dp), tp, steps)
        if recipe in ("one step off", "GRPO"):
            for first, then in ((4, 1), (2, 4)):
                p = self.run(recipe, d, first, 1)
                if p.returncode == 0:  # as it was after step 1
                    for step in range(2, steps + 1):
                        shutil.rmtree(d / f"global_step_{step}")
                    (d / "latest_checkpointed_iteration.txt").write_text("1\n")
                    p = self.run(recipe, d, then, 1)
                self.compare(f"{family}, {recipe}: resumed, tensor parallel {first}, then {then}", one, d, p, then, steps)


def main():
    option = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    begin, n, different = time.time(), 0, []
    families = option.get("--families", ",".join(["qwen2", *FAMILIES])).split(",")
    with Scratch() as s:
        for family in families:
            m = Matrix(s, s.dir / "model" if family == "qwen2" else family_model(s, family))
            for recipe in option.get("--recipes", ",".join(recipes(""))).split(","):
                m.recipe(family, recipe)
            n, different = n + m.n, different + m.different
    seconds = time.time() - begin
    print(f"{n} runs beside one rank, {len(different)} with other bytes; {seconds:.0f} s")
    if "--report" in option:
        row = {"id": "tensor_parallel/matrix", "unit": "", "lower": True, "bar": 0, "bar_ratio": None, "peers": [],
               "work": None, "what": f"{n} runs of {len(families)} families with tensor parallel 1 to 4 x data parallel 1 and 2, "
               "GRPO, PPO with a critic, LoRA, one step off, resumed with another size: those with any byte other than on one rank",
               "ours": len(different), "note": ", ".join(families)}
        path = pathlib.Path(option["--report"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"machine": {}, "rows": [row]}, indent=1) + "\n")
    sys.exit(bool(different) or not n)


main()
