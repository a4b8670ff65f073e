"""The asynchronous trainers learn: the share of digits in the answers rises, one step off and fully asynchronous with partial
rollouts, by GRPO in bypass mode as verl's configurations have it; with a critic and rejection it runs."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import DIGITS_REWARD, Scratch, Tests, run, series  # noqa: E402

ACTOR = "actor_rollout_ref.actor."


def learns(s, test, what, name, config, **keys):
    keys = {"reward.custom_reward_function.path": s.dir / "digits.py", "reward.num_workers": 1, "data.max_response_length": 8,
            "data.train_batch_size": 16, "actor_rollout_ref.rollout.n": 4, ACTOR + "ppo_mini_batch_size": 16,
            ACTOR + "optim.lr": 3e-3,
            ACTOR + "use_kl_loss": False, ACTOR + "ppo_micro_batch_size_per_gpu": 16, "trainer.total_training_steps": 20,
            "trainer.save_freq": 0, **keys}
    args = s.ppo(name, **keys)
    run(args[0], config, *args[1:])
    score = series(s.dir / name, "critic/score/mean")
    first, last = sum(score[:5]) / 5, sum(score[-5:]) / 5
    test(f"{what}: {first:.3f} -> {last:.3f}", len(score) == 20 and last > first + 0.2, score)


def main():
    test = Tests()
    one_off, fully = "--config-name=one_step_off_ppo_trainer", "--config-name=fully_async_ppo_trainer"
    parts = {ACTOR + "ppo_mini_batch_size": 4, "data.train_batch_size": 0, "async_training.trigger_parameter_sync_step": 4,
             "async_training.staleness_threshold": 0.5,
             "actor_rollout_ref.rollout.max_num_batched_tokens": 64}
    with Scratch() as s:
        (s.dir / "digits.py").write_text(DIGITS_REWARD)
        learns(s, test, "one step off", "one", one_off)
        learns(s, test, "fully asynchronous", "fully", fully, **parts)
        partial = series(s.dir / "fully", "fully_async/partial/total_partial_num")
        test("with partial rollouts", sum(partial) > 0, partial)
        keys = {**parts, "trainer.total_training_steps": 3, "trainer.save_freq": 0, "data.max_response_length": 8,
                "reward.custom_reward_function.path": s.dir / "digits.py", "reward.num_workers": 1, ACTOR + "use_kl_loss": True,
                "algorithm.adv_estimator": "gae", "critic.model.path": s.dir / "model", "critic.ppo_micro_batch_size_per_gpu": 4,
                "critic.ppo_mini_batch_size": 4, "algorithm.rollout_correction.bypass_mode": False,
                "algorithm.rollout_correction.rollout_is": "token", "algorithm.rollout_correction.rollout_rs": "token_k1",
                "algorithm.rollout_correction.rollout_rs_threshold": 4}
        args = s.ppo("critic", **keys)
        run(args[0], fully, *args[1:])
        test("with a critic, a reference, importance weights and rejection",
             len(series(s.dir / "critic", "critic/vf_loss")) == 3 and
             abs(series(s.dir / "critic", "rollout_corr/rollout_is_mean")[0] - 1) < 1e-6)  # verl adds 1e-8 below
    test.end()


main()
