"""Generation on external servers (rollout.engine_url): each kind's interface, new weights after each update, servers that die, that
answer wrongly or too late. The servers draw by the weights that they were told to read, so the log-probs of training are theirs as
long as none is forgotten."""

import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from engine_servers import Server  # noqa: E402
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
            p = run(*args_of(s, kind, [x]))
            d = s.dir / kind
            test(f"{kind}: is found by its /v1/models", f"external engine {x.url}: {kind}, model policy" in p.stderr, p.stderr[-500:])
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
        test("a lost server's requests go to the other", "is lost" in p.stderr and close(series(s.dir / "lost", DIFF)), p.stderr[-800:])
        test("and are counted", sum(series(s.dir / "lost", "rollout/engine_requests_resent")) > 0)
    with Server("vllm", s.dir / "model", dies) as a:
        test.refused("no server is left", run(*args_of(s, "none", [a]), check=False), 4, "no server", a.url)


def change(**of):
    """In the answer of the second request: of choices[0]."""
    def spoil(answer, n):
        if n == 2:
            for key, value in of.items():
                c = answer["choices"][0]
                if key == "logprobs":
                    c[key]["token_logprobs"][0] = value
                else:
                    c[key] = c[key][:-1] if value == "short" else [value] + c[key][1:]
        return answer
    return spoil


def wrong(s, test):
    for what, spoil in (("a foreign id", change(token_ids=99999)), ("ids without log-probs", change(token_ids="short")),
                        ("NaN", change(logprobs=float("nan"))), ("a log-prob of 3", change(logprobs=3.0)),
                        ("no JSON", lambda answer, n: b"<html>" if n == 2 else answer)):
        with Server("vllm", s.dir / "model", spoil) as x:
            run(*args_of(s, "wrong", [x], **{"trainer.total_training_steps": 1, "trainer.resume_mode": "disable"}))
            d = s.dir / "wrong"
            test(f"{what}: asked again", series(d, "rollout/engine_requests_resent")[-1] == 1 and close(series(d, DIFF)[-1:]))
    with Server("vllm", s.dir / "model", lambda answer, n: b"{}") as x:
        p = run(*args_of(s, "wrong", [x], **{ROLLOUT + "engine_retries": 1}), check=False)
        test.refused("nothing but wrong answers", p, 4, x.url, "token_ids is missing", "2 tries")
    with Server("vllm", s.dir / "model", lambda answer, n: time.sleep(60)) as x:
        p = run(*args_of(s, "late", [x], **{ROLLOUT + "engine_timeout": 2}), check=False)
        test.refused("a server that does not answer", p, 4, x.url, "2 s")


def refused(s, test):
    with Server("vllm", s.dir / "model", owner="somebody", max_len=70) as x:
        test.refused("who is it", run(*args_of(s, "no", [x]), check=False), 2, "engine_kind")
        test.refused("too short", run(*args_of(s, "no", [x], **{ROLLOUT + "engine_kind": "vllm"}), check=False), 2, "70 tokens")
        test.refused("overlapped", run(*args_of(s, "no", [x]), "--config-name=one_step_off_ppo_trainer", check=False), 2, "engine_url")
        x.kind = "sglang"
        p = run(*args_of(s, "no", [x], **{ROLLOUT + "engine_kind": "vllm", "data.max_prompt_length": 48}), check=False)
        test.refused("no call for weights", p, 2, "VLLM_SERVER_DEV_MODE=1")
    p = run(*s.ppo("no", **{ROLLOUT + "engine_url": "[http://127.0.0.1:9]"}), check=False)
    test.refused("nobody there", p, 4, "http://127.0.0.1:9", "does not answer")
    test.refused("no address", run(*s.ppo("no", **{ROLLOUT + "engine_url": "[localhost:80]"}), check=False), 2, "http://HOST:PORT")


def main():
    test = Tests()
    with Scratch() as s:
        (s.dir / "reward.py").write_text(DIGITS_REWARD)
        kinds(s, test)
        trtllm(s, test)
        several(s, test)
        wrong(s, test)
        refused(s, test)
    test.end()


if __name__ == "__main__":
    main()
