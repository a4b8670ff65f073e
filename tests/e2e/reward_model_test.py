"""A reward model beside the policy, end to end on tiny models: the policy learns what it rewards, another tokenizer is
rendered for again or refused, a Python scorer can use it,
dynamic sampling and validation go through it, and what is wrong is said."""

import json
import pathlib
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import Scratch, Tests, reward_dir, run, series  # noqa: E402

RM = "reward.reward_model."
COMBINED = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The reward model's opinion, turned around, and something by rule."""
    return {"score": -extra_info["rm_score"] + 100, "rm": extra_info["rm_score"], "acc": 0}
'''


def keys(rm, **more):
    return {RM + "enable": True, RM + "model_path": rm, "actor_rollout_ref.actor.use_kl_loss": False, "reward.num_workers": 1,
            **more}


def samples(s, name):
    return [json.loads(x) for f in sorted((s.dir / name).glob("*.jsonl")) for x in f.read_text().splitlines()]


def learns(s, test, rm):
    steps = 30
    p = run(*s.ppo("learn", **keys(rm, **{
        "data.train_batch_size": 8, "data.max_response_length": 8, "actor_rollout_ref.rollout.n": 8, "trainer.save_freq": -1,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 8, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 32,
        "actor_rollout_ref.actor.optim.lr": 3e-3, "trainer.total_training_steps": steps, "trainer.test_freq": steps,
        RM + "micro_batch_size_per_gpu": 16})))
    reward = series(s.dir / "learn", "critic/rewards/mean")
    first, last = sum(reward[:3]) / 3, sum(reward[-3:]) / 3
    spread = series(s.dir / "learn", "critic/rewards/max")[0] - series(s.dir / "learn", "critic/rewards/min")[0]
    print(f"reward model: mean score {first:.3f} -> {last:.3f} in {steps} steps (spread of the first batch {spread:.3f})")
    test("GRPO raises a reward model's score", last > first + spread / 4, f"{first} -> {last}, spread {spread}")
    test("the plan shows the reward model", "reward model " in p.stderr)


def cuts(s, test, rm):
    """Micro-batches change nothing; nor does scoring the policy's tokens where the template gives the same ones."""
    common = {"trainer.total_training_steps": 2, "trainer.save_freq": -1, "actor_rollout_ref.rollout.n": 4}
    scores = []
    for i, more in enumerate(({RM + "micro_batch_size_per_gpu": 1}, {RM + "micro_batch_size_per_gpu": 7},
                              {RM + "rollout.max_num_batched_tokens": 1000})):
        run(*s.ppo(f"cut{i}", **keys(rm, **common, **more, **{"trainer.rollout_data_dir": s.dir / f"dump{i}"})))
        scores.append([x["score"] for x in samples(s, f"dump{i}")])
    test("the same scores under every cut into micro-batches", scores[0] == scores[1] == scores[2] and len(set(scores[0])) > 8)
    run(*s.ppo("as_is", **keys(rm, **common, **{RM + "template": "policy", "trainer.rollout_data_dir": s.dir / "dump_policy"})))
    test("template=policy scores other tokens", [x["score"] for x in samples(s, "dump_policy")][:8] != scores[0][:8])
    (s.dir / "both.py").write_text(COMBINED)
    run(*s.ppo("both", **keys(rm, **common, **{"reward.custom_reward_function.path": s.dir / "both.py", "trainer.test_freq": 2,
                                               "trainer.rollout_data_dir": s.dir / "dump_both"})))
    val = [series(s.dir / "both", f"{n}/mean@1") for n in ("val-core/openai/gsm8k/acc", "val-aux/openai/gsm8k/acc_success_only")]
    test("acc, and as verl has it again of the samples with a score alone", val == [[0.0], [0.0]], str(val))
    both = [x["score"] for x in samples(s, "dump_both")]
    test("a Python scorer has the score in extra_info",
         all(abs(100 - a - b) < 1e-9 for a, b in zip(scores[0][:16], both[:16], strict=True)))
    run(*s.ppo("filter", **keys(rm, **common, **{"algorithm.filter_groups.enable": True,
                                                 "algorithm.filter_groups.metric": "score"})))
    test("dynamic sampling judges by it", len(series(s.dir / "filter", "train/num_gen_batches")) == 2)


def refusals(s, test, rm):
    one = {"trainer.total_training_steps": 1, "trainer.save_freq": -1}
    p = run(*s.ppo("bad", **keys(s.dir / "model", **one)), check=False)
    test.refused("a causal model is no reward model", p, 3, "reward.reward_model.model_path", "Qwen2ForCausalLM")
    p = run(*s.ppo("bad", **{RM + "enable": True, **one}), check=False)
    test.refused("no model_path", p, 2, "reward.reward_model.model_path")
    p = run(*s.ppo("bad", **keys(rm, **one, **{RM + "max_length": 12})), check=False)
    test("no conversation fits: said, and no score is invented", p.returncode != 0 and "max_length=12" in p.stderr, p.stderr[-400:])
    other = s.dir / "other"
    shutil.copytree(rm, other)
    t = json.loads((other / "tokenizer.json").read_text())
    vocab = t["model"]["vocab"]
    a, b = list(vocab)[20], list(vocab)[21]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (other / "tokenizer.json").write_text(json.dumps(t))
    p = run(*s.ppo("bad", **keys(other, **one, **{RM + "template": "policy"})), check=False)
    test.refused("template=policy with another tokenizer", p, 3, "another tokenizer", "template=own")
    run(*s.ppo("other_run", **keys(other, **one)))
    test("another tokenizer is rendered for through its own template", len(series(s.dir / "other_run", "critic/rewards/mean")) == 1)


def main():
    test = Tests()
    with Scratch(small=True) as s:
        rm = reward_dir(s, "rm")
        learns(s, test, rm)
        cuts(s, test, rm)
        refusals(s, test, rm)
    test.end()


main()
