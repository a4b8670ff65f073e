"""Generation on external servers (rollout.engine_url): each kind's interface, new weights after each update, servers that die, that
answer wrongly or too late. The servers draw by the weights that they were told to read, so the log-probs of training are theirs as
long as none is forgotten."""

import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from engine_servers import Server  # noqa: E402
from tool_model import calling_model  # noqa: E402
from verlc_test import DIGITS_REWARD, Scratch, Tests, run, series  # noqa: E402

ROLLOUT = "actor_rollout_ref.rollout."
DIFF = "training/rollout_probs_diff_max"


def args_of(s, name, servers, **keys):
    return s.ppo(name, **{ROLLOUT + "engine_url": "[" + ",".join(x.url for x in servers) + "]", "trainer.device": "cpu",
                          "reward.custom_reward_function.path": s.dir / "reward.py", "trainer.total_training_steps": 3,
                          "actor_rollout_ref.actor.optim.lr": 1e-2, "trainer.save_freq": -1, **keys})


def close(values, most=1e-6):
    """Equal but for the digits of a log-prob in JSON."""
    return all(v <= most for v in values)


def kinds(s, test):
    for kind in ("vllm", "sglang"):
        with Server(kind, s.dir / "model") as x:
            p = run(*args_of(s, kind, [x], **({"trainer.ranks": 2} if kind == "sglang" else {})))
            d = s.dir / kind
            test(f"{kind}: is found by its /v1/models", f"external engine {x.url}: {kind}, model policy" in p.stderr,
                 p.stderr[-500:])
            test(f"{kind}: the plan has no KV cache", "KV blocks" not in p.stderr and "rollout: on the servers" in p.stderr,
                 p.stderr)
            test(f"{kind}: log-probs of training are the server's, before and after updates",
                 len(series(d, DIFF)) == 3 and close(series(d, DIFF)), series(d, DIFF))
            test(f"{kind}: weights once before each step", len(x.updates) == 3, x.updates)
            test(f"{kind}: the last ones alone are kept", [f.name for f in (d / "engine_weights").iterdir()] == ["update_2"])
            test(f"{kind}: importance weights are on", close([abs(v - 1) for v in series(d, "rollout_corr/rollout_is_mean")]))
    test("the update moves the policy: stale weights would show", stale(s) > 1e-3, stale(s))


def stale(s):
    """The difference where the server keeps the weights of the first step."""
    if not (s.dir / "stale").exists():
        with Server("vllm", s.dir / "model") as x:
            x.take = lambda path: x.updates.append(path)
            run(*args_of(s, "stale", [x]))
    return max(series(s.dir / "stale", DIFF)[1:])


def trtllm(s, test):
    with Server("trtllm", s.dir / "model") as x:
        test.refused("trtllm: takes no files", run(*args_of(s, "no", [x]), check=False), 3, "TensorRT-LLM", "engine_update_command")
        mark = s.dir / "updates"
        command = f"""'echo "$VERLC_ENGINE_URL $VERLC_ENGINE_KIND $(ls $VERLC_WEIGHTS | grep -c safetensors)" >> {mark}'"""
        run(*args_of(s, "trt", [x], **{ROLLOUT + "engine_update_command": command, "trainer.total_training_steps": 2}))
        test("trtllm: a command has it read new weights", mark.read_text() == f"{x.url} trtllm 1\n" * 2, mark.read_text())
        test("trtllm: its log-probs", close(series(s.dir / "trt", DIFF)[:1]), series(s.dir / "trt", DIFF))
        p = run(*args_of(s, "no", [x], **{ROLLOUT + "engine_update_command": "'echo it is late; exit 3'"}), check=False)
        test.refused("a command that fails", p, 2, "ended with 3", "it is late")


def several(s, test):
    dead = {"after": 5}

    def dies(answer, n):
        if n >= dead["after"]:
            raise ConnectionAbortedError
        return answer

    with Server("vllm", s.dir / "model") as a, Server("sglang", s.dir / "model") as b:
        run(*args_of(s, "two", [a, b], **{"trainer.total_training_steps": 2}))
        test("two servers share the requests", a.n == b.n == 8, (a.n, b.n))
        test("two servers: log-probs", close(series(s.dir / "two", DIFF)))
    with Server("vllm", s.dir / "model", dies) as a, Server("vllm", s.dir / "model") as b:
        p = run(*args_of(s, "lost", [a, b], **{"trainer.total_training_steps": 2}))
        test("a lost server's requests go to the other", "is lost" in p.stderr and close(series(s.dir / "lost", DIFF)),
             p.stderr[-800:])
        test("and are counted", sum(series(s.dir / "lost", "rollout/engine_requests_resent")) > 0)
    with Server("vllm", s.dir / "model", dies) as a:
        test.refused("no server is left", run(*args_of(s, "none", [a]), check=False), 4, "no server", a.url)


INTERACTION = """
from verl.interactions.base import BaseInteraction

class Again(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        return sum(m["role"] == "assistant" for m in messages) == 3, "again", 0.0, {}
"""
LOOP = """
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput


class Twice(AgentLoopBase):
    async def run(self, sampling_params, **row):
        prompt = self.tokenizer.apply_chat_template(row["raw_prompt"], add_generation_prompt=True, tokenize=True)
        prompt = list(prompt["input_ids"]) if hasattr(prompt, "keys") else list(prompt)
        said = self.tokenizer.encode(" 1 + 1 ", add_special_tokens=False)
        first = await self.server_manager.generate("r", prompt_ids=prompt, sampling_params={**sampling_params, "max_tokens": 4})
        second = await self.server_manager.generate("r", prompt_ids=prompt + first.token_ids + said,
                                                    sampling_params={**sampling_params, "max_tokens": 4})
        ids = first.token_ids + said + second.token_ids
        mask = [1] * len(first.token_ids) + [0] * len(said) + [1] * len(second.token_ids)
        return AgentLoopOutput(prompt_ids=prompt, response_ids=ids, response_mask=mask, num_turns=4, metrics={}, extra_fields={})
"""


def loops(s, test):
    """A conversation of several turns, and a loop of the user's: the same seam."""
    calling_model(s.dir / "model", s.dir / "answers", 0, 12)
    (s.dir / "again.yaml").write_text("interaction:\n  - name: again\n    class_name: questions.Again\n    config: {}\n")
    (s.dir / "questions.py").write_text(INTERACTION)
    (s.dir / "twice.py").write_text(LOOP)
    (s.dir / "loops.yaml").write_text("- name: twice\n  _target_: twice.Twice\n")
    rows = [s.row(i) for i in range(4)]
    for row in rows:
        row["extra_info"]["interaction_kwargs"] = {"name": "again"}
    s.write("turns.jsonl", rows)
    keys = {"actor_rollout_ref.model.path": s.dir / "answers", "data.train_files": s.dir / "turns.jsonl", "data.val_files": "[]",
            "data.max_response_length": 100, "trainer.total_training_steps": 2}
    with Server("sglang", s.dir / "answers") as x:
        run(*args_of(s, "turns", [x], **keys, **{"+" + ROLLOUT + "multi_turn.interaction_config_path": s.dir / "again.yaml",
                                                 ROLLOUT + "agent.default_agent_loop": "tool_agent"}),
            env={"PYTHONPATH": str(s.dir)})
        d = s.dir / "turns"
        test("tool_agent: three turns", max(series(d, "num_turns/max")) == 7, series(d, "num_turns/max"))
        test("tool_agent: log-probs of training are the server's in every turn", close(series(d, DIFF)), series(d, DIFF))
        run(*args_of(s, "own", [x], **keys, **{ROLLOUT + "agent.agent_loop_config_path": s.dir / "loops.yaml",
                                               ROLLOUT + "agent.default_agent_loop": "twice"}), env={"PYTHONPATH": str(s.dir)})
        test("a loop of the user's", series(s.dir / "own", "num_turns/mean") == [4, 4] and close(series(s.dir / "own", DIFF)),
             series(s.dir / "own", DIFF))


def first_choice(change):
    def spoil(answer):
        change(answer["choices"][0])
        return answer
    return spoil


def set_logp(value):
    return first_choice(lambda c: c["logprobs"]["token_logprobs"].__setitem__(0, value))


SPOILED = {  # of the request of that number
    1: first_choice(lambda c: c["token_ids"].__setitem__(0, 99999)), 2: first_choice(lambda c: c["token_ids"].pop()),
    3: set_logp(float("nan")), 4: set_logp(3.0), 5: set_logp(None), 6: lambda answer: b"<html>"}


def wrong(s, test):
    with Server("vllm", s.dir / "model", lambda answer, n: SPOILED[n](answer) if n in SPOILED else answer) as x:
        run(*args_of(s, "wrong", [x], **{"trainer.total_training_steps": 1}))
        d = s.dir / "wrong"
        resent = series(d, "rollout/engine_requests_resent")
        test("a wrong answer is no sample: it is asked again", resent == [6] and x.n == 8 + 6 and close(series(d, DIFF)),
             (x.n, resent, series(d, DIFF)))
    with Server("vllm", s.dir / "model", lambda answer, n: b"{}") as x:
        p = run(*args_of(s, "retries", [x], **{ROLLOUT + "engine_retries": 1}), check=False)
        test.refused("nothing but wrong answers", p, 4, x.url, "token_ids is missing", "2 tries")
    with Server("vllm", s.dir / "model", lambda answer, n: time.sleep(60)) as x:
        p = run(*args_of(s, "late", [x], **{ROLLOUT + "engine_timeout": 2}), check=False)
        test.refused("a server that does not answer", p, 4, x.url, "2 s")


def refused(s, test):
    with Server("vllm", s.dir / "model", owner="somebody", max_len=70) as x:
        test.refused("who is it", run(*args_of(s, "no", [x]), check=False), 2, "engine_kind")
        test.refused("too short", run(*args_of(s, "no", [x], **{ROLLOUT + "engine_kind": "vllm"}), check=False), 2, "70 tokens")
        p = run(*args_of(s, "no", [x]), "--config-name=one_step_off_ppo_trainer", check=False)
        test.refused("overlapped", p, 2, "engine_url")
        p = run(*args_of(s, "no", [x], **{ROLLOUT + "engine_kind": "vllm", "trainer.ranks": 2, "data.max_prompt_length": 48,
                                          "actor_rollout_ref.model.lora_rank": 4}), check=False)
        test.refused("an adapter on two ranks", p, 2, "engine_url", "adapter")
        x.kind = "sglang"
        p = run(*args_of(s, "no", [x], **{ROLLOUT + "engine_kind": "vllm", "data.max_prompt_length": 48}), check=False)
        test.refused("no call for weights", p, 2, "VLLM_SERVER_DEV_MODE=1")
    p = run(*s.ppo("no", **{ROLLOUT + "engine_url": "[http://127.0.0.1:9]"}), check=False)
    test.refused("nobody there", p, 4, "http://127.0.0.1:9", "does not answer")
    test.refused("no address", run(*s.ppo("no", **{ROLLOUT + "engine_url": "[localhost:80]"}), check=False), 2, "http://HOST:PORT")


def main():
    test = Tests()
    with Scratch(small=True) as s:
        (s.dir / "reward.py").write_text(DIGITS_REWARD)
        kinds(s, test)
        trtllm(s, test)
        several(s, test)
        loops(s, test)
        wrong(s, test)
        refused(s, test)
    test.end()


if __name__ == "__main__":
    main()
