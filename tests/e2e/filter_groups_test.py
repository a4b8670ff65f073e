"""DAPO's dynamic sampling: only prompts whose samples differ reach the update, the
replacements are the next ones of the data, and the outcome depends neither on which
sample ended first nor on how slow the scorer was; limits and refusals; a run with it
resumes bitwise. And the overlong penalty of the dapo reward manager."""

import pathlib
import sqlite3
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import Scratch, Tests, run, series, state  # noqa: E402

REWARD = '''
import hashlib, time
def odd(data_source, solution_str, ground_truth, extra_info=None):
    """1 for about half of all answers, as a dict."""
    hit = hashlib.sha256(solution_str.encode()).digest()[0] % 2
    return {"score": 3.0 * hit + 1, "hit": hit == 1}
def slow(data_source, solution_str, ground_truth, extra_info=None):
    """The same, the answers in another order."""
    time.sleep(hashlib.sha256(solution_str.encode()).digest()[1] % 8 / 100)
    return odd(data_source, solution_str, ground_truth, extra_info)
def same(data_source, solution_str, ground_truth, extra_info=None):
    return 0.5
'''


def groups(run_dir, step):
    """[(uid, scores)] of a step, in order."""
    db = sqlite3.connect(pathlib.Path(run_dir) / "run.db")
    out = []
    for uid, sample, score in db.execute("SELECT uid, sample, score FROM samples WHERE step = ? AND validation = 0 ORDER BY id",
                                         (step,)):
        if sample == 0:
            out.append((uid, []))
        out[-1][1].append(score)
    return out


def main():
    test = Tests()
    with Scratch(small=True) as s:
        (s.dir / "odd.py").write_text(REWARD)
        base = {"reward.custom_reward_function.path": s.dir / "odd.py", "reward.custom_reward_function.name": "odd",
                "reward.num_workers": 1, "data.shuffle": False, "actor_rollout_ref.actor.use_kl_loss": False,
                "actor_rollout_ref.actor.optim.lr": 1e-3}
        on = {**base, "algorithm.filter_groups.enable": True, "trainer.total_training_steps": 4, "trainer.save_freq": 2}

        run(*s.ppo("all", **base, data__train_batch_size=64, actor_rollout_ref__actor__ppo_mini_batch_size=64,
                   trainer__total_training_steps=1, trainer__save_freq=-1))
        run(*s.ppo("filtered", **on))
        every = groups(s.dir / "all", 1)
        useful = [(uid, scores) for uid, scores in every if len(set(scores)) > 1]
        first = groups(s.dir / "filtered", 1)
        tried = [uid for uid, _ in every].index(useful[3][0]) + 1
        test("some groups are of no use", 10 < len(useful) < 54, f"{len(useful)} of 64 are")
        test("the first useful prompts of the data are kept, with the samples they always have", first == useful[:4],
             f"{first}, {useful[:4]}")
        test("train/num_gen_batches counts what was tried",
             series(s.dir / "filtered", "train/num_gen_batches")[0] == -(-tried // 4))
        test("and the rest are counted as evicted",
             series(s.dir / "filtered", "training/filter_groups/evicted_samples")[0] == tried - 4, f"{tried} tried")
        test("every step has a whole batch that teaches", series(s.dir / "filtered", "train/zero_variance_groups") == [0] * 4 and
             all(len(groups(s.dir / "filtered", k)) == 4 for k in range(1, 5)))

        want = state(s.dir / "filtered", 4)
        run(*s.ppo("slow", **{**on, "reward.custom_reward_function.name": "slow", "reward.num_workers": 4}),
            env={"VERLC_THREADS": "2"})
        test("a slow scorer with four workers: the same bits", state(s.dir / "slow", 4) == want)
        run(*s.ppo("parts", **{**on, "trainer.total_training_steps": 2}))
        run(*s.ppo("parts", **on))
        test("cut in two and resumed: the same bits", state(s.dir / "parts", 4) == want)
        run(*s.ppo("by_key", **{**on, "algorithm.filter_groups.metric": "hit"}))
        test("by a key of the scorer's dict", state(s.dir / "by_key", 4) == want)
        run(*s.ppo("remax", **{**on, "algorithm.adv_estimator": "remax", "data.train_batch_size": 24,
                               "actor_rollout_ref.actor.ppo_mini_batch_size": 24}))
        test("it goes past the end of an epoch", series(s.dir / "remax", "training/epoch")[-1] >= 1 and
             series(s.dir / "remax", "train/zero_variance_groups") == [0] * 4)

        same = {**on, "reward.custom_reward_function.name": "same"}
        p = run(*s.ppo("same", **{**same, "algorithm.filter_groups.max_num_gen_batches": 3}), check=False)
        test.refused("too many prompts tried", p, 3, "12 prompts", "max_num_gen_batches=3")
        p = run(*s.ppo("endless", **same), check=False)
        test.refused("no useful prompt in all of the data, without a limit", p, 3, "64 prompts in a row")
        p = run(*s.ppo("no_key", **{**on, "algorithm.filter_groups.metric": "acc"}), check=False)
        test.refused("a metric that the scorer does not give", p, 2, "algorithm.filter_groups.metric=acc")
        p = run(*s.ppo("few", **{**on, "algorithm.filter_groups.max_num_gen_batches": 1, "data.gen_batch_size": 2}), check=False)
        test.refused("a limit below a batch", p, 2, "data.train_batch_size=4")

        over = "reward.reward_kwargs.overlong_buffer_cfg."
        run(*s.ppo("overlong", **{**on, "reward.custom_reward_function.name": "same", "algorithm.filter_groups.enable": False,
                                  "reward.reward_manager.name": "dapo", "+" + over + "enable": True, "+" + over + "len": 8,
                                  "+" + over + "penalty_factor": 2.0, "data.max_response_length": 16,
                                  "trainer.total_training_steps": 1}))
        low = series(s.dir / "overlong", "critic/score/min")[0]
        test("an answer that fills the overlong buffer loses penalty_factor", low == 0.5 - 2.0 and
             series(s.dir / "overlong", "response_length/max") == [16], str(low))
    test.end()


main()
