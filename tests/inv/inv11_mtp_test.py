"""Multi-token prediction by its keys: GRPO and SFT with the MTP layer trained give the same files on any number of ranks and in
any layout, also where the layer drafts the rollout's tokens, and after a resume; what it does not train is as without it; and
without the keys its tensors are what they were."""

import json
import pathlib
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from ranks import files, first_difference
from verlc_test import Scratch, Tests, run, series, tensors

STEPS = 3
A = "actor_rollout_ref."
MTP = {"enable": True, "enable_train": True}


def mimo(s):
    """The tiny model with an MTP layer."""
    config = json.loads((s.dir / "model/config.json").read_text())
    config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1, "num_hidden_layers": 2}
    (s.dir / "mimo.json").write_text(json.dumps(config))
    run("model", "init", "--arch", s.dir / "mimo.json", "--out", s.dir / "mimo", "--seed", "2", "--dtype", "fp32")
    for f in (s.dir / "model").glob("token*"):
        shutil.copy(f, s.dir / "mimo")


def grpo(s, d, mtp, **keys):
    args = {"trainer.total_training_steps": STEPS, "trainer.save_freq": STEPS, "trainer.device": "cpu",
            A + "model.path": s.dir / "mimo", A + "actor.ppo_micro_batch_size_per_gpu": 1,
            **{f"{A}model.mtp.{k}": v for k, v in mtp.items()}, **keys}
    return run(*s.ppo(d, **{k.replace(".", "__"): v for k, v in args.items()}), check=False)


def sft(s, d, mtp, **keys):
    args = {"model.path": s.dir / "mimo", "data.train_files": s.dir / "chats.jsonl", "data.train_batch_size": 8,
            "data.max_length": 128, "data.max_token_len_per_gpu": 256, "optim.lr": 1e-3, "optim.clip_grad": 1e9,
            "engine.dtype": "float32", "trainer.total_training_steps": STEPS, "trainer.test_freq": -1,
            "trainer.save_freq": STEPS, "trainer.device": "cpu", "trainer.logger": "[console,file]",
            "trainer.default_local_dir": s.dir / d, **{f"model.mtp.{k}": v for k, v in mtp.items()}, **keys}
    return run("sft", *[f"{k}={v}" for k, v in args.items()], check=False)


def part(path, mtp):
    """The bytes of those of the MTP layer, or of the others."""
    return {k: v for k, v in tensors(path).items() if ("mtp_layers" in k) == mtp}


def check_grpo(s, test):
    drafts = {**MTP, "enable_rollout": True, "num_speculative_tokens": 2}
    p = grpo(s, "one", drafts)
    test("GRPO with drafts", p.returncode == 0, p.stderr[-1500:])
    if p.returncode != 0:
        return
    lengths, losses = series(s.dir / "one", "rollout/spec_accept_length"), series(s.dir / "one", "actor/mtp_losses/mtp_1_loss")
    test("metrics by verl's names", len(lengths) == len(losses) == STEPS and all(x >= 1 for x in lengths) and
         all(4 < x < 8 for x in losses), f"{lengths} {losses}")
    for name, keys in {"2 ranks": {"trainer.ranks": 2}, "3 ranks, sharded": {"trainer.ranks": 3, "trainer.layout": "sharded"},
                       "2 ranks, chunks": {"trainer.ranks": 2, A + "actor.grad_chunk": 2}}.items():
        d = name.replace(", ", "_").replace(" ", "_")
        chunk = {k: v for k, v in keys.items() if "chunk" in k}
        of = "one_chunks" if chunk else "one"
        if chunk:
            grpo(s, of, drafts, **chunk)
        p = grpo(s, d, drafts, **keys)
        why = p.stderr[-1500:] if p.returncode else first_difference(s.dir / of, s.dir / d, STEPS)
        test(f"GRPO: {name} as 1", not why, why)
    p = grpo(s, "plain", MTP)
    same = p.returncode == 0 and files(s.dir / "plain", STEPS) == files(s.dir / "one", STEPS)
    test("drafts change nothing", same, p.stderr[-800:])
    for steps in (1, STEPS):
        p = grpo(s, "resumed", drafts, **{"trainer.total_training_steps": steps, "trainer.save_freq": 1})
    test("resumed", p.returncode == 0 and files(s.dir / "resumed", STEPS) == files(s.dir / "one", STEPS), p.stderr[-800:])
    run("model", "export", "--model", s.dir / "one", "--out", s.dir / "exported", "--dtype", "fp32")
    saved = s.dir / f"one/global_step_{STEPS}/actor/model.safetensors"
    test("a checkpoint's export", tensors(s.dir / "exported/model.safetensors") == tensors(saved))


def check_sft(s, test):
    rows = [{"messages": [{"role": "user", "content": f"{i} + 1?"}, {"role": "assistant", "content": f"It is {i + 1}."}]}
            for i in range(24)]
    s.write("chats.jsonl", rows)
    of = {}
    for d, mtp in {"without": {}, "kept": {"enable": True}, "detached": {**MTP, "detach_encoder": True}, "whole": MTP}.items():
        p = sft(s, f"sft_{d}", mtp)
        if p.returncode != 0:
            test(f"SFT {d}", False, p.stderr[-1500:])
            return
        of[d] = s.dir / f"sft_{d}/global_step_{STEPS}/actor/model.safetensors"
    source = part(s.dir / "mimo/model.safetensors", True)
    test("kept as it was", len(source) == 16 and all(part(of[d], True) == source for d in ("without", "kept")))
    rest = {d: part(f, False) for d, f in of.items()}
    test("detached, the rest is as without", rest["detached"] == rest["without"])
    test("and the layer is trained", all(v != source[k] for k, v in part(of["detached"], True).items()))
    test("else the rest is trained by it too", rest["whole"] != rest["without"])
    losses = series(s.dir / "sft_whole", "train/mtp_losses/mtp_1_loss")
    test("its loss falls", len(losses) == STEPS and losses[-1] < losses[0], f"{losses}")
    p = sft(s, "sft_2", MTP, **{"trainer.ranks": 2})
    why = p.stderr[-1500:] if p.returncode else first_difference(s.dir / "sft_whole", s.dir / "sft_2", STEPS)
    test("SFT: 2 ranks as 1", not why, why)


def check_refusals(s, test):
    test.refused("an adapter", grpo(s, "no", MTP, **{A + "model.lora_rank": 4}), 2, "model.mtp.enable=True with an adapter")
    test.refused("drafts of a layer that is not trained", grpo(s, "no", {"enable": True, "enable_rollout": True}), 2,
                 "enable_rollout=True without enable_train")
    test.refused("a model without", grpo(s, "no", MTP, **{A + "model.path": s.dir / "model"}), 3,
                 "0 layers for multi-token prediction")


def main():
    test = Tests()
    with Scratch() as s:
        mimo(s)
        check_grpo(s, test)
        check_sft(s, test)
        check_refusals(s, test)
    test.end()


main()
