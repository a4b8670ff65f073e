"""`verlc plan --gpus`: the memory of one of N ranks for shapes of 7B, 14B and 32B, beside the arithmetic of this file; how the
ranks share an optimizer step; what one rank alone and other layouts need; refusals; and a run on two CPU ranks beside its plan."""

import json
import math
import pathlib
import re
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import ENV, VERLC, Scratch, Tests, big_model, run  # noqa: E402

GIB = 2**30
SHAPES = {"7b": (3584, 18944, 28, 28, 4), "14b": (5120, 13824, 48, 40, 8), "32b": (5120, 27648, 64, 40, 8),
          "72b": (8192, 29568, 80, 64, 8)}
VOCAB = 152064
A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
KEYS = {"algorithm.adv_estimator": "grpo", "data.train_batch_size": 128, "data.max_prompt_length": 128,
        "data.max_response_length": 1024, R + "n": 8, R + "name": "verlc", A + "ppo_mini_batch_size": 64,
        A + "use_dynamic_bsz": True, A + "ppo_max_token_len_per_gpu": 16384, A + "use_kl_loss": True, "data.val_files": "[]",
        "trainer.save_freq": 0}


def write_shape(s, name):
    hidden, ffn, layers, q, kv = SHAPES[name]
    (s.dir / name).mkdir()
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "rms_norm_eps": 1e-6,
              "rope_theta": 1e6, "max_position_embeddings": 32768, "initializer_range": 0.02, "torch_dtype": "bfloat16",
              "tie_word_embeddings": False, "vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": ffn,
              "num_hidden_layers": layers, "num_attention_heads": q, "num_key_value_heads": kv}
    (s.dir / name / "config.json").write_text(json.dumps(config))


def n_params(name):
    hidden, ffn, layers, q, kv = SHAPES[name]
    rows = 128 * (q + 2 * kv)
    return 2 * VOCAB * hidden + layers * (hidden * rows + rows + 128 * q * hidden + 3 * hidden * ffn + 2 * hidden) + hidden


def plan(s, name, n, *options, check=True, **keys):
    given = {**KEYS, "actor_rollout_ref.model.path": s.dir / name, **{k.replace("__", "."): v for k, v in keys.items()}}
    size = ("--gpu", "141GB", "--host", "1000GB", "--gpus", n)
    return run("plan", *size, *options, *[f"{k}={v}" for k, v in given.items()], check=check)


def parts(j):
    """Bytes by name; gradients are of the update's."""
    return {**{p["name"]: p["bytes"] for p in j["parts"]},
            "gradients": next((p["gradients"] for p in j["parts"] if p["name"] == "update"), 0)}


def check_sizes(s, test):
    """Each part of a rank's memory, and SCALE's table of what is fixed: 95, 65 and 123 GB without activations and KV cache."""
    for name, n, scale in (("7b", 2, 95), ("7b", 4, 65), ("14b", 4, 123), ("32b", 8, None)):
        j = json.loads(plan(s, name, n, "--json", check=False, trainer__layout="whole").stdout)
        part, ranks, total = parts(j), j["ranks"], n_params(name)
        hidden, ffn, _, q, kv = SHAPES[name]
        head = VOCAB * hidden * 4
        layer = 4 * (hidden * 128 * (q + 2 * kv) + 128 * q * hidden + 3 * hidden * ffn)
        want = {"policy weights": 2 * total, "reference weights": 2 * total, "fp32 master": 4 * total / n,
                "gradients": 4 * total / n, "optimizer state": 8 * total / n, "exchange": max(head + layer, 3 * layer)}
        off = {k: part[k] / v - 1 for k, v in want.items()}
        group = off.pop("exchange") * want["exchange"]  # biases and norms of a layer, and some MiB of the group's own
        test(f"{name} on {n}: weights whole, master, gradients and state sharded", all(abs(v) < 0.01 for v in off.values()), off)
        test(f"{name} on {n}: gradients travel through room for the head and a layer", 0 < group < 2**27, group)
        largest = 1 + ranks["largest_shard_over_mean"]
        test(f"{name} on {n}: the largest shard is the one that counts", 1 <= largest < 1.01 and
             abs(part["fp32 master"] - 4 * total / n * largest) <= 2**21, (part["fp32 master"], largest))
        fixed = (sum(part[k] for k in want) + part["kernels and CUDA graphs"]) / 1e9
        near = scale is None or abs(fixed / scale - 1) < 0.03
        test(f"{name} on {n}: {fixed:.1f} GB fixed, {scale} as the design has it", near, fixed)
        least = [ranks["least"][k] for k in ("one_rank", "whole", "ref", "sharded")]
        test(f"{name} on {n}: least of whole > reference sharded > all sharded", least == sorted(least, reverse=True), ranks)


TOGETHER = "actor_rollout_ref__rollout__tensor_model_parallel_size"
FIXED = ("policy weights", "reference weights", "fp32 master", "gradients", "optimizer state", "exchange",
         "kernels and CUDA graphs")


def check_layouts(s, test):
    """What is fixed in each layout, GB as the design has it, shares of weights, and the choice: the first that fits."""
    for name, n, layout, scale in (("7b", 2, "ref", 88), ("7b", 2, "sharded", 81), ("14b", 4, "ref", 100),
                                   ("14b", 4, "sharded", 79), ("32b", 8, "ref", 147), ("32b", 8, "sharded", 92)):
        j = json.loads(plan(s, name, n, "--json", check=False, trainer__layout=layout, **{TOGETHER: 1}).stdout)
        part, whole = parts(j), 2 * n_params(name)
        fixed = sum(part[k] for k in FIXED) / 1e9
        test(f"{name} on {n}, {layout}: {fixed:.1f} GB fixed, {scale} as the design has it", abs(fixed / scale - 1) < 0.05, part)
        shares = [part["reference weights"] / whole * n, part["policy weights"] / whole * (n if layout == "sharded" else 1)]
        test(f"{name} on {n}, {layout}: shares of the weights", j["ranks"]["layout"] == layout and
             all(abs(x - 1) < 0.01 for x in shares), shares)
        if layout == "sharded":
            test(f"{name} on {n}: generation has the policy in the block", part["rollout: KV cache, logits"] > whole, part)
    for gpu, layout, before in (("160GB", "whole", None), ("141GB", "ref", "whole"), ("126GB", "sharded", "ref")):
        p = plan(s, "14b", 4, "--gpu", gpu)
        why = re.search(r"\n  layout (\w+): .*\n(?:    (\w+) does not fit: it needs ([\d.]+) GiB\n)?", p.stdout)
        limit = re.search(r"  limit +([\d.]+) GiB", p.stdout)
        test(f"14b on 4 GPUs of {gpu}: {layout}", why and limit and why[1] == layout and why[2] == before and
             (before is None or float(why[3]) > float(limit[1])), p.stdout)
    p = plan(s, "14b", 4, trainer__layout="sharded")
    test("trainer.layout forces", "\n  layout sharded: " in p.stdout and "\n    trainer.layout=sharded\n" in p.stdout, p.stdout)
    for keys, why in (({A + "use_kl_loss": False, "trainer.layout": "ref"}, "there is no reference"),
                      ({"actor_rollout_ref.model.lora_rank": 8, "trainer.layout": "ref"}, "there is an adapter"),
                      ({"actor_rollout_ref.ref.fsdp_config.param_offload": True, "trainer.layout": "ref"},
                       "the reference is in host memory")):
        p = plan(s, "7b", 2, **{k.replace(".", "__"): v for k, v in keys.items()})
        test(f"no layout {keys['trainer.layout']}: {why}", "\n  layout whole: " in p.stdout and why in p.stdout, p.stdout)
    p = plan(s, "7b", 1, trainer__layout="ref", check=False)
    test("no layout ref on one GPU is said", "trainer.layout=ref: there is one rank" in p.stdout, p.stdout)


def check_waves(s, test):
    """Micro-batches at full length, rounded up so that 2, 4 and 8 ranks share them; who is idle in the last wave."""
    per_micro = 16384 // (128 + 1024)
    micro = math.ceil(math.ceil(64 * 8 / per_micro) / 8) * 8
    for n in (2, 8, 12, 64):
        p = plan(s, "7b", n)
        waves = math.ceil(micro / n)
        idle = waves * n - micro
        said = re.search(r"step at full length: (\d+) micro-batches in (\d+) waves?, (\d+) ranks? idle in the last(.*)", p.stdout)
        ok = said and tuple(map(int, said.groups()[:3])) == (micro, waves, idle)
        test(f"{micro} micro-batches on {n} ranks: {waves} waves, {idle} idle",
             ok and ("smaller micro-batches" in said[4]) == (micro < n), p.stdout)


def check_together(s, test):
    """A policy that is too large for each rank to have whole while it generates: as few generate together as leave KV blocks room;
    what the key says instead; and what cannot be."""
    offload = {A + "fsdp_config.optimizer_offload": True, A + "ppo_max_token_len_per_gpu": 2048}
    j = json.loads(plan(s, "72b", 8, "--host", "2000GB", "--json", **offload).stdout)
    whole, part = 2 * n_params("72b"), parts(j)
    n = j["ranks"]["tensor_parallel"]
    test("72b on 8: 4 generate together", n == 4 and j["total"] <= j["limit"], j)
    said = plan(s, "72b", 8, "--host", "2000GB", **offload).stdout
    blocks = int(re.search(r"(\d+) KV blocks", said)[1])
    # embedding and head are parts too, and the KV cache has the room that a generation's first pass used
    rest = part["rollout: KV cache, logits"] - whole / 4 - blocks * 2 * 80 * 2 * 128 * 16 * 2
    test("72b on 8: the rollout has a quarter of the weights, the KV cache and little else", 0 < rest < 4 * GIB, (rest / GIB, part))
    said = plan(s, "72b", 8, "--host", "2000GB", **offload, **{TOGETHER: 8}).stdout
    test("72b on 8: 8 as asked", "tensor parallel: 8 ranks generate together" in said and "as rollout.tensor" in said, said)
    said = plan(s, "72b", 8, check=False, **offload, **{TOGETHER: 3}).stdout
    test("3 of 8 cannot", "tensor parallel: 1, not the 3 asked for: it does not divide the ranks" in said, said)
    qlora = {"actor_rollout_ref.model.lora_rank": 32, "actor_rollout_ref.model.quantization": "nf4", "data.train_batch_size": 32,
             A + "ppo_mini_batch_size": 32, A + "ppo_max_token_len_per_gpu": 8192}
    p = plan(s, "72b", 2, "--gpu", "80GB", "--json", check=False, **qlora)
    j = json.loads(p.stdout)
    test("72b in NF4 on 2 GPUs of 80 GB: codes sharded, both generate together", p.returncode == 0 and
         j["ranks"]["layout"] == "sharded" and j["ranks"]["tensor_parallel"] == 2 and j["total"] <= j["limit"], p.stdout)
    codes = n_params("72b") - 2 * VOCAB * 8192
    test("of the codes a half, 4.5 bits each", 0 < parts(j)["policy weights"] - (codes * 4.5 / 8 + 4 * VOCAB * 8192) / 2 < 2 * GIB,
         parts(j))
    teacher = {"distillation.enabled": True, "distillation.teacher_models.teacher_model.model_path": s.dir / "72b",
               A + "use_kl_loss": False}
    p = plan(s, "7b", 8, "--json", check=False, **teacher)
    j = json.loads(p.stdout)
    share = 2 * n_params("72b") / 8
    test("a teacher of 72b on 8: sharded", p.returncode == 0 and j["ranks"]["layout"] == "ref" and
         abs(parts(j)["teacher weights"] / share - 1) < 0.01, p.stdout)
    j = json.loads(plan(s, "7b", 8, "--json").stdout)
    test("7b on 8: each alone", j["ranks"]["tensor_parallel"] == 1 and j["ranks"]["layout"] == "whole", j["ranks"])


def check_chunks(s, test):
    """A whole gradient in place of the ring, and fewer waves."""
    size, chunk = 4 * n_params("7b"), A + "grad_chunk"
    found = [parts(json.loads(plan(s, "7b", n, "--json", check=False, **{chunk: c}).stdout))
             for n, c in ((1, 1), (1, 2), (2, 1), (2, 2))]
    sums = [sum(p.get(k, 0) for k in ("gradients", "gradients of a chunk")) for p in found]
    test("grad_chunk: 4 bytes a parameter more on one rank", abs(sums[1] - sums[0] - size) <= 2**21 and
         found[1]["update"] - found[0]["update"] >= size, sums)
    test("grad_chunk: and on two, without the ring", abs(sums[3] - sums[2] - size) <= 2**21 and
         found[3]["exchange"] < 2**28 < found[2]["exchange"], found[2:])
    for c, in_chunks, waves, idle in ((2, 20, 10, 0), (39, 2, 1, 0), (40, 1, 1, 1)):
        p = plan(s, "7b", 2, check=False, **{chunk: c}).stdout
        want = f"40 micro-batches in {in_chunks} chunk{'s' * (in_chunks > 1)} in {waves} wave{'s' * (waves > 1)}, {idle} rank"
        test(f"grad_chunk={c}: {waves} waves", want in p and ("a smaller grad_chunk" in p) == (idle > 0), p)
    p = plan(s, "7b", 4, "--gpu", "80GB", check=False, **{chunk: 2, TOGETHER: 1})
    test("grad_chunk: refused where the run fits without",
         p.returncode == 4 and "grad_chunk and critic.grad_chunk it fits" in p.stdout, p.stdout)


def check_choices(s, test):
    p = plan(s, "7b", 2)
    least = re.search(r"at least: whole ([\d.]+) GiB \(fits\); .*one rank alone ([\d.]+) GiB\n", p.stdout)
    fits = p.returncode == 0 and least and float(least[1]) * GIB < 141e9 < float(least[2]) * GIB
    test("7b on 2 fits, on 1 it does not", fits, p.stdout)
    whole = {"trainer.layout": "whole"}
    p = plan(s, "14b", 4, check=False, trainer__layout="whole")
    test("a layout that does not fit: another",
         p.returncode == 4 and "; trainer.layout=auto fits (the result is the same)" in p.stdout, p.stdout[-400:])
    p = plan(s, "32b", 4, check=False, trainer__layout="whole")
    change = f"optimizer_offload=True with actor_rollout_ref.ref.fsdp_config.param_offload=True with {A}ppo_max_token_len"
    test("32b on 4: all in host memory and smaller micro-batches", p.returncode == 4 and change in p.stdout, p.stdout[-400:])
    tokens = re.search(r"ppo_max_token_len_per_gpu=(\d+) fits", p.stdout)
    offloaded = {A + "fsdp_config.optimizer_offload": True, "actor_rollout_ref.ref.fsdp_config.param_offload": True,
                 A + "ppo_max_token_len_per_gpu": tokens and tokens[1], **whole}
    p = plan(s, "32b", 4, check=False, **offloaded)
    host = re.search(r"offloaded: pinned host memory +([\d.]+) GiB", p.stdout)
    want = (12 * n_params("32b") / 4 + 2 * n_params("32b")) / GIB
    fits = p.returncode == 0 and host and abs(float(host[1]) / want - 1) < 0.01
    test("and so it fits, with a shard of master and state and the reference in host memory", fits, p.stdout)
    p = run("plan", "--gpu", "141GB", "--host", "300GB", "--gpus", 4, *[f"{k}={v}" for k, v in {
        **KEYS, **offloaded, "actor_rollout_ref.model.path": s.dir / "32b"}.items()], check=False)
    test("4 ranks share the memory of their host", p.returncode == 4 and "of host memory, at most" in p.stdout, p.stdout[-300:])


def check_options(s, test):
    test.refused("--gpus on a CPU", run("plan", "--gpus", 4, *s.ppo("x")[1:], check=False), 2, "--gpus 4", "--gpu 80GB")
    for value in ("0", "many", "2000"):
        test.refused(f"--gpus {value}", run("plan", "--gpus", value, check=False), 2, "--gpus", "int[1,1024]")
    test.refused("--gpus with --probe", run("plan", "--probe", "--gpus", 2, check=False), 2, "--gpus", "--probe")
    one, same = (re.sub(r"[\d.]+ [a-zA-Z]+ free in", "free in", run("plan", "--gpu", "80GB", *gpus, *s.ppo("x")[1:]).stdout)
                 for gpus in (("--gpus", 1), ()))
    test("--gpus 1 is the plan of one", one == same and "rank" not in one, one)
    four = {"trainer__n_gpus_per_node": 4, "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 1}
    asked = run("plan", "--gpu", "80GB", *s.ppo("x", **four)[1:]).stdout
    test("without --gpus those that the keys ask for", "; each of 4 ranks:" in asked, asked)
    for options, text in (((), "; each of 2 ranks:"), (("--gpu", "80GB", "--gpus", 2), "; each of 2 ranks:")):
        for program, keys in (("sft", [f"model.path={s.dir}/model", "data.max_length=64", "data.train_batch_size=8"]),
                              ("generate", [f"model.path={s.dir}/model", "data.path=x.jsonl", "data.output_path=y.jsonl"])):
            ranks = [] if options else ["trainer.ranks=2", "trainer.device=cpu"]
            p = run("plan", *options, program, *keys, *ranks, check=False)
            test(f"{program} {' '.join(map(str, options or ranks))}", p.returncode == 0 and text in p.stdout, p.stdout + p.stderr)
    sft = ["plan", "sft", f"model.path={s.dir}/model", "trainer.device=cpu", "trainer.ranks=2", "data.use_dynamic_bsz=False",
           "trainer.device_memory_limit=200MB"]
    p = run(*sft, "data.micro_batch_size_per_gpu=64", check=False)
    fits = re.search(r"; (data.micro_batch_size_per_gpu=\d+) fits", p.stdout)
    test("sft on ranks: the micro-batch that is proposed fits", p.returncode == 4 and fits and
         run(*sft, fits[1], check=False).returncode == 0, p.stdout)
    cpu = [json.loads(run("plan", "--json", *s.ppo("x", trainer__device="cpu", trainer__ranks=n)[1:]).stdout) for n in (1, 4)]
    test("CPU ranks share the machine", cpu[1]["ranks"]["of_a_host"] == 4 and cpu[1]["limit"] < cpu[0]["limit"] / 4, cpu[1])


def of_run(status, pid):
    """A worker's parent is a reaper, whose parent is the controller."""
    try:
        parent = pathlib.Path(f"/proc/{re.search(r'PPid:.(.*)', status)[1]}/status").read_text()
    except OSError:
        return False
    return f"PPid:\t{pid}\n" in parent or f"PPid:\t{pid}\n" in status


def check_pools(s, test):
    """Ranks that generate have weights and a KV cache, those that train the rest."""
    given = {**KEYS, "actor_rollout_ref.model.path": s.dir / "7b", "trainer.n_gpus_per_node": 2, "rollout.n_gpus_per_node": 2}
    del given["data.train_batch_size"]
    p = run("plan", "--gpu", "141GB", "--host", "1000GB", "--gpus", 4, "--json", "--config-name=one_step_off_ppo_trainer",
            "data.train_batch_size=128", *[f"{k}={v}" for k, v in given.items()])
    j = json.loads(p.stdout)
    train, rollout = parts(j), {x["name"]: x["bytes"] for x in j["pools"]["rollout"]["parts"]}
    total = n_params("7b")
    test("a pool that generates: weights and a KV cache, no master, gradients and state", abs(rollout["policy weights"] /
         (2 * total) - 1) < 0.01 and rollout["rollout: KV cache, logits"] > 2**30 and not {"fp32 master", "optimizer state",
         "update", "reference weights"} & set(rollout), rollout)
    test("and the trainer's: no KV cache, shards of two", "rollout: KV cache, logits" not in train and
         abs(train["fp32 master"] / (2 * total) - 1) < 0.01 and j["ranks"]["n"] == 2 and j["fits"] and
         j["pools"]["rollout"]["fits"], train)
    pools = {"critic": {"algorithm__adv_estimator": "gae", "critic__model__path": s.dir / "32b", "critic__nnodes": 1,
                        "critic__n_gpus_per_node": 8, "critic__ppo_max_token_len_per_gpu": 16384,
                        "critic__forward_max_token_len_per_gpu": 16384},
             "teacher": {"distillation__enabled": True, "distillation__nnodes": 1, "distillation__n_gpus_per_node": 8,
                         "distillation__teacher_models__teacher_model__model_path": s.dir / "72b"}}
    for name, keys in pools.items():
        p = plan(s, "7b", 16, trainer__n_gpus_per_node=8, **keys, **{A + "use_kl_loss": False})
        said = re.search(rf"\n  layout \w+: the weights of the {name} sharded over 8 ranks\n"
                         r"    whole does not fit: it needs ([\d.]+) GiB", p.stdout)
        test(f"a {name} that does not fit a rank of its pool is sharded", said and float(said[1]) * GIB > 141e9 and
             "\n  layout whole: " in p.stdout, p.stdout + p.stderr[-300:])


def check_run(s, test, model, name="run", *config, **more):
    """A real run on two CPU ranks: each process' peak (VmHWM) is the plan's total, and the run says so of its device's memory."""
    keys = {"actor_rollout_ref__model__path": model, "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 1,
            "actor_rollout_ref__actor__fsdp_config__dtype": "bfloat16", "trainer__device": "cpu", "trainer__ranks": 2,
            "trainer__threads": 1, "trainer__total_training_steps": 2, "trainer__save_freq": 0, "trainer__logger": "[file]", **more}
    args = s.ppo(name, **keys)
    args[1:1] = config
    j = json.loads(run("plan", "--json", *args[1:]).stdout)
    planned = sorted([x["total"] for x in j.get("pools", {}).values()] + [j["total"]])
    peaks = {}
    with subprocess.Popen([VERLC, *map(str, args)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENV) as p:
        while p.poll() is None:
            for stat in pathlib.Path("/proc").glob("[0-9]*/status"):
                try:
                    text, line = stat.read_text(), (stat.parent / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if line[:2] == [VERLC.encode(), b"worker"] and of_run(text, p.pid):
                    own = sum(int(re.search(rf"{k}:\s+(\d+) kB", text)[1]) * 1024 for k in ("RssAnon", "RssShmem"))
                    high = int(re.search(r"VmHWM:\s+(\d+) kB", text)[1]) * 1024
                    # ranks that only generate have read the model's file by mapping it, which is no memory of theirs; code is
                    own += 12 * 2**20
                    peaks[stat.parent.name] = max(own, peaks.get(stat.parent.name, 0)) if config else high
            time.sleep(0.02)
    off = [v / (planned[i] if len(planned) > 1 else planned[0]) - 1 for i, v in enumerate(sorted(peaks.values()))]
    near = p.returncode == 0 and len(off) == 2 and all(abs(x) <= 0.05 for x in off)
    test(f"two ranks, {name}: each one's peak within 5 % of the plan", near, (planned, peaks))
    lines = (s.dir / name / "metrics.jsonl").read_text().splitlines()
    shares = [json.loads(line)["data"].get("perf/memory_of_plan") for line in lines]
    test(f"{name}: perf/memory_of_plan of every step", len(shares) == 2 and all(x and 0.9 < x <= 1.03 for x in shares), shares)


def main():
    test = Tests()
    with Scratch() as s:
        for name in SHAPES:
            write_shape(s, name)
        check_sizes(s, test)
        check_layouts(s, test)
        check_waves(s, test)
        check_together(s, test)
        check_chunks(s, test)
        check_choices(s, test)
        check_options(s, test)
        check_pools(s, test)
        big = big_model(s)
        for layout in ("whole", "ref", "sharded"):
            check_run(s, test, big, layout, trainer__layout=layout)
        check_run(s, test, big, "pools", "--config-name=one_step_off_ppo_trainer", trainer__ranks=1, rollout__ranks=1)
    test.end()


main()
