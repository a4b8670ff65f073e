"""`make bench-gpu`: what this program reaches on one GPU, each figure beside its bar and,
where python3 has torch with CUDA and transformers, or vLLM, beside theirs from the same run.

Rows: decode, train, logprob, step, start, hybrid, experts, recipe2.  `decode` samples from random weights, without an end
token, prefill included.  `train` is forward, backward and AdamW over packed rows of 1024 tokens.  `step` is
recipe 1 of docs/performance.md (GRPO, random weights of Qwen2.5-0.5B, real tokenizer, GSM8K, every response
1024 tokens): step time, time from command to first step, the GPU's idle share, and device memory beside the
plan.  Without SHARED_DATA the phases of that step are timed by `verlc bench step`.  `recipe2` (Qwen3-1.7B,
240 x 3) takes two steps, about three minutes on an H200; it runs where it is named or with --long.

  python tools/bench_gpu_peers.py [ROW...] [--long] [--no-peers] [--compile]

`hybrid` is Qwen3.5-2B's shape beside transformers, which takes its fast kernels where python3 has the packages
`fla` and `causal_conv1d`; the row says whether it did.  `experts` is Qwen3-30B-A3B's shape: decoding, and two steps of
GRPO with an adapter on attention (16 x 8 samples); its random weights are 61 GB under OUT_DIR and again on the GPU.

--long: hybrid, experts and recipe2 too.  --compile: torch.compile beside eager (minutes).
A figure without a bar is there to be read.  The bars are those of an H200; on another GPU
they are printed all the same.  Writes build/bench/gpu.json (tools/figures.py says what it holds), which
`make performance FIGURES=build/bench/gpu.json` takes into docs/performance.md; exit status 1: a bar was missed."""

import json
import lzma
import os
import pathlib
import re
import subprocess
import sys
import time

from figures import Figures

VERLC = os.environ.get("VERLC", "build/release/verlc")
OUT = pathlib.Path(os.environ.get("OUT_DIR", "build/bench"))
DATA = pathlib.Path(os.environ.get("SHARED_DATA", "../shared/data"))
BATCH, LENGTH = 16, 1024  # of training and log-probs

COMMITTED = pathlib.Path(__file__).resolve().parent.parent / "docs/figures/gpu.json"
FIGURES = Figures(Figures.read(COMMITTED).machine)  # its ceilings, for the roofline


def say(text):
    print(text, file=sys.stderr, flush=True)


def row(name, what, ours, peer=None, by="torch", **more):
    """One line; by: the peer's name, a figure of this run."""
    FIGURES.add(name, what, ours, peers=[(by, peer, True)], **more)
    say(f"{what}: {ours:.4g} {more.get('unit', 'tokens/s')}" + (f", {by} {peer:.4g}" if peer else ""))


def machine():
    """What the driver says of the GPU; another GPU than the committed one has no ceilings here, so no roofline."""
    try:
        said = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True,
                              text=True).stdout
    except OSError:
        said = ""
    name, driver = (said.splitlines() or ["unknown, unknown"])[0].split(", ")
    if name != FIGURES.machine["gpu"]:
        FIGURES.machine.clear()
    FIGURES.machine |= {"gpu": name, "driver": driver}


def call(*args, **kw):
    p = subprocess.run([VERLC, *map(str, args)], capture_output=True, text=True, **kw)
    if p.returncode:
        sys.exit(f"verlc {' '.join(map(str, args))}: {p.stderr[-2000:]}")
    return p


def bench(*args):
    return json.loads(call("bench", *args, "--device", "cuda").stdout.splitlines()[-1])


def model(arch):
    """A model directory with random weights, with the real tokenizer where it is at hand."""
    path, extra = OUT / arch, []
    tokenizer = tokenizer_dir("qwen3" if arch.startswith("qwen3") else "qwen2_5")
    if tokenizer:
        extra = ["--tokenizer", tokenizer]
    if not (path / "config.json").exists():
        call("model", "init", "--arch", arch, "--out", path, "--seed", 1, *extra)
    return path


def tokenizer_dir(name):
    packed, out = DATA / "tokenizers" / name, OUT / f"tokenizer_{name}"
    if not packed.is_dir():
        return None
    out.mkdir(parents=True, exist_ok=True)
    for f in packed.glob("*.xz"):
        (out / f.stem).write_bytes(lzma.decompress(f.read_bytes()))
    return out


# ---- peers ----


def torch_or_none(args):
    if "--no-peers" in args:
        return None
    try:
        import torch
        import transformers  # noqa: F401

        return torch if torch.cuda.is_available() else None
    except ImportError:
        return None


def torch_name(torch):
    return f"torch {torch.__version__.split('+')[0]}, eager" if torch else "torch"


def torch_model(torch, path, dtype):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_default_device("cuda")
    m = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=dtype, attn_implementation="sdpa")
    torch.set_default_device("cpu")
    return m


def seconds(torch, fn, rounds=3):
    """The best of a few calls after two that warm up."""
    best = 1e9
    for i in range(rounds + 2):
        torch.cuda.synchronize()
        t = time.perf_counter()
        fn()
        torch.cuda.synchronize()
        if i >= 2:
            best = min(best, time.perf_counter() - t)
    return best


def torch_train(torch, path, recompute=False, compiled=False):
    """Tokens per second of a full step: f32 weights, bf16 autocast, fused AdamW; rows of LENGTH tokens."""
    m = torch_model(torch, path, torch.float32).train()
    m.config.use_cache = False
    if recompute:
        m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    opt = torch.optim.AdamW(m.parameters(), lr=1e-6, fused=True)
    ids = torch.randint(0, 150000, (BATCH, LENGTH), device="cuda")
    forward = torch.compile(m) if compiled else m

    def step():
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = forward(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        opt.step()

    rate = BATCH * LENGTH / seconds(torch, step)
    del m, opt, forward
    torch.cuda.empty_cache()
    return rate


def torch_logprob(torch, path):
    m = torch_model(torch, path, torch.bfloat16).eval()
    ids = torch.randint(0, 150000, (BATCH, LENGTH), device="cuda")

    def pass_():
        with torch.inference_mode():
            hidden = m.model(input_ids=ids, use_cache=False).last_hidden_state
            for h, i in zip(hidden, ids):  # a row at a time: the logits of all would be 10 GB
                lp = torch.log_softmax(m.lm_head(h[:-1]).float(), -1)
                lp.gather(-1, i[1:, None]), (lp.exp() * lp).sum(-1)

    rate = BATCH * LENGTH / seconds(torch, pass_)
    del m
    torch.cuda.empty_cache()
    return rate


def torch_decode(torch, path, batch, prompt, new):
    """Sampled tokens per second after the prompts, by generate(): the difference of two lengths."""
    m = torch_model(torch, path, torch.bfloat16).eval()
    ids = torch.randint(0, 150000, (batch, prompt), device="cuda")

    def tokens(n):
        return seconds(torch, lambda: m.generate(ids, do_sample=True, top_k=0, min_new_tokens=n, max_new_tokens=n,
                                                 pad_token_id=0, eos_token_id=None), rounds=1)

    rate = batch * (new - 1) / (tokens(new) - tokens(1))
    del m
    torch.cuda.empty_cache()
    return rate


def fast_kernels():
    """What transformers takes for a gated delta net, as words of a row."""
    from importlib.util import find_spec

    have = [p for p in ("fla", "causal_conv1d") if find_spec(p)]
    return "kernels of " + " and ".join(have) if have else "no fast kernels"


VLLM = {}  # what tools/bench_vllm.py said of a model: seconds to the first token, and each case's tokens per second


def has_vllm(python):
    try:
        return subprocess.run([python, "-c", "import vllm"], capture_output=True, timeout=300).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def vllm(arch, args):
    """Runs it once a model, where a python has it: VLLM_PYTHON or this one."""
    python = os.environ.get("VLLM_PYTHON", sys.executable)
    if arch in VLLM or "--no-peers" in args or not has_vllm(python):
        return VLLM.setdefault(arch, {})
    cases = [",".join(map(str, case[1:5])) for case in DECODE if case[0] == arch]
    VLLM[arch] = {}
    said = OUT / f"vllm_{arch}.jsonl"
    with open(said, "w") as out, open(OUT / f"vllm_{arch}.log", "w") as log:
        try:
            code = subprocess.run([python, pathlib.Path(__file__).with_name("bench_vllm.py"), model(arch), *cases],
                                  stdout=out, stderr=log, timeout=900).returncode
        except subprocess.TimeoutExpired:
            code = "900 s were not enough"
    for line in said.read_text().splitlines():
        if not line.startswith("{"):
            continue
        r = json.loads(line)
        VLLM[arch]["name"] = "vLLM " + r.pop("version", "")
        key = "start" if "first_token_s" in r else (r["prompts"], r["n"], r["prompt"], r["new"])
        VLLM[arch][key] = r.get("first_token_s", r.get("tokens_per_s"))
    if code:
        say(f"vLLM ended early ({code}), so that peers are missing: {log.name} says why")
    return VLLM[arch]


# ---- rows ----

# model, prompts, samples of each, prompt length, new tokens, bar
DECODE = (("qwen2.5-0.5b", 16, 5, 128, 1024, 70e3), ("qwen2.5-0.5b", 16, 5, 512, 1024, None),
          ("qwen2.5-0.5b", 64, 8, 128, 512, 220e3), ("qwen2.5-0.5b", 256, 5, 128, 512, 280e3),
          ("qwen3-1.7b", 16, 5, 128, 256, 33e3), ("qwen3-1.7b", 16, 5, 512, 256, None),
          ("qwen3-1.7b", 16, 5, 128, 1024, 25e3), ("qwen3-1.7b", 16, 5, 512, 1024, None), ("qwen3-1.7b", 64, 8, 128, 512, 56e3))


def decode(torch, args):
    for arch, prompts, n, length, new, bar in DECODE:
        peer = vllm(arch, args).get((prompts, n, length, new))
        size = {"prompts": prompts, "n": n, "prompt": length, "new": new}
        r = bench("generate", "--model", model(arch), "--batch", prompts * n, "--n", n, "--prompt", length, "--len", new,
                  "--steps", 1)
        row(f"generate/{arch}/{prompts}x{n}/{length}+{new}", f"{arch}, {prompts} x {n}, {length} + {new}", r["tokens_per_s"], peer,
            VLLM[arch].get("name", "vLLM"), bar=bar, work={"op": "generate", "model": arch} | size,
            note=f"without prefill {r['decode_tokens_per_s'] / 1e3:.1f} k")


def train(torch, args):
    for arch, recompute, bar in (("qwen2.5-0.5b", False, 150e3), ("qwen2.5-0.5b", True, 125e3), ("qwen3-1.7b", False, 45e3)):
        peer = torch_train(torch, model(arch), recompute) if torch else None
        if torch and "--compile" in args and not recompute:
            say(f"torch.compile, {arch}: {torch_train(torch, model(arch), compiled=True):.4g} tok/s")
        r = bench("train", "--model", model(arch), "--batch", BATCH, "--len", LENGTH, "--steps", 3,
                  *(["--recompute", "layer"] * recompute))
        row(f"train/{arch}/{BATCH}x{LENGTH}{'/recompute' * recompute}",
            f"training step, {arch}, {BATCH} x {LENGTH}{', layers recomputed' * recompute}",
            r["tokens"] / (r["seconds"] + r["optimizer_seconds"]), peer, torch_name(torch), bar=bar,
            work={"op": "train", "model": arch, "length": LENGTH})


def logprob(torch, args):
    peer = torch_logprob(torch, model("qwen2.5-0.5b")) if torch else None
    r = bench("logprob", "--model", model("qwen2.5-0.5b"), "--batch", BATCH, "--len", LENGTH, "--steps", 3)
    row(f"logprob/qwen2.5-0.5b/{BATCH}x{LENGTH}", f"log-probs and entropy, qwen2.5-0.5b, {BATCH} x {LENGTH}",
        r["tokens_per_s"], peer, torch_name(torch), bar=450e3, work={"op": "logprob", "model": "qwen2.5-0.5b", "length": LENGTH})


def recipe(arch, data, run, batch, n, mini, micro, steps, *extra):
    """A GRPO command, every response of full length."""
    a, r = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
    return [
        "algorithm.adv_estimator=grpo", f"data.train_files={data / 'train.parquet'}", f"data.val_files={data / 'test.parquet'}",
        f"data.train_batch_size={batch}", "data.max_prompt_length=512", "data.max_response_length=1024",
        "data.filter_overlong_prompts=True", f"actor_rollout_ref.model.path={model(arch)}", f"{a}optim.lr=1e-6",
        f"{a}ppo_mini_batch_size={mini}", f"{a}ppo_micro_batch_size_per_gpu={micro}", f"{a}use_kl_loss=True",
        f"{a}kl_loss_coef=0.001", f"{a}kl_loss_type=low_var_kl", "actor_rollout_ref.model.enable_gradient_checkpointing=True",
        f"{r}name=vllm", f"{r}n={n}", f"{r}ignore_eos=True", f"{r}log_prob_micro_batch_size_per_gpu={2 * micro}",
        f"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu={2 * micro}", f"{r}max_num_seqs=1024",
        f"{r}gpu_memory_utilization=0.7",
        f"trainer.total_training_steps={steps}", "trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.save_freq=0",
        "trainer.n_gpus_per_node=1", f"trainer.default_local_dir={run}", "trainer.logger=[file]", "trainer.device=cuda",
        "trainer.resume_mode=disable", f"trainer.profile_steps=[{steps}]", *extra]


def phases_of(done):
    return ", ".join(f"{k} {done[f'timing_s/{k}']:.2f}" for k in ("gen", "ref", "update_actor"))


def gsm8k():
    """Its files as the recipes read them, or None where it is not at hand."""
    data = OUT / "gsm8k"
    if not (DATA / "gsm8k").is_dir() or not tokenizer_dir("qwen3"):
        return None
    if not (data / "train.parquet").exists():
        call("data", "gsm8k", "--local_dataset_path", DATA / "gsm8k", "--local_save_dir", data)
    return data


def run_recipe(name, arch, shape, bar, steps=4):
    run, data = OUT / f"run_{arch}", gsm8k()
    path = model(arch)
    subprocess.run(["rm", "-rf", run], check=True)
    t = time.time()
    first, log, seen = None, None, 0
    with open(OUT / f"{name.replace(' ', '_')}.log", "w+") as err:
        p = subprocess.Popen([VERLC, "ppo", *recipe(arch, data, run, *shape, steps)], stdout=subprocess.DEVNULL, stderr=err)
        while p.poll() is None:
            log = log or next(iter(run.glob("**/*.jsonl")), None)
            for line in log.read_text().split("\n")[seen:-1] if log else []:
                # each step as it ends: a run that is cut short has said something
                first = first or time.time() - t
                seen += 1
                step_done = json.loads(line)["data"]
                say(f"  {name}, step {seen} of {steps}: {step_done['timing_s/step']:.2f} s ({phases_of(step_done)})")
            time.sleep(0.02)
        text = pathlib.Path(err.name).read_text()
    if p.returncode:
        sys.exit(f"{name}: {text[-2000:]}")
    log = next(iter(run.glob("**/*.jsonl")))
    done = [json.loads(x)["data"] for x in log.read_text().splitlines()]
    warm = min(done[1:-1] or done[1:], key=lambda x: x["timing_s/step"])  # the last one is traced
    key, small = f"grpo/{name.replace(' ', '')}", path.name.startswith("qwen2.5")
    row(f"{key}/step", f"GRPO step, {name}", warm["timing_s/step"], bar=bar, lower=True, unit="s", note=phases_of(warm))
    row(f"{key}/first", f"{name}: command to the end of the first step", first or time.time() - t, bar=15 if small else None,
        lower=True, unit="s")
    waits = re.search(r"trace: .* in which the device idles .* \(([0-9.]+) %\)", text)
    graphs = re.search(r"trace: .* CUDA graph launches .* the host ([0-9.]+) us to launch, and the device idles ([0-9.]+) us "
                         r"\(([0-9.]+) %\)", text)
    row(f"{key}/idle", f"{name}: GPU idle, waiting for the host", float(waits[1]), bar=3, lower=True, unit="% of a step")
    row(f"{key}/launch", f"{name}: host time to launch a decoding step", float(graphs[1]), lower=True, unit="us")
    row(f"{key}/decode_idle", f"{name}: GPU idle in a decoding step", float(graphs[3]), bar=3, lower=True, unit="%")
    plan = re.search(r"^ *total +([0-9.]+) ([MG])iB", text, re.M)
    planned = float(plan[1]) / (1 if plan[2] == "G" else 1024)
    used = max(x["perf/max_memory_reserved_gb"] for x in done)
    row(f"memory/{key[5:]}/used", f"{name}: device memory", used, bar=20 if small else None, lower=True, unit="GiB",
        note=f"planned {planned:.2f}")
    row(f"memory/{key[5:]}/plan", f"{name}: off the plan", abs(used / planned - 1) * 100, bar=3, lower=True, unit="%")
    row(f"memory/{key[5:]}/allocations", f"{name}: device allocations after the start",
        sum(x["perf/device_allocations"] for x in done), bar=0, lower=True, unit="")


def step(torch, args):
    if not gsm8k():
        say(f"no GSM8K and tokenizers in {DATA} (SHARED_DATA): the step is timed without tokenizer, data and reward")
        r = bench("step", "--model", model("qwen2.5-0.5b"), "--batch", 80, "--n", 5, "--prompt", 128, "--len", 1024, "--micro", 4)
        row("grpo/phases/step", "phases of a GRPO step, 16 x 5 x 1024", r["seconds"], bar=2.2, lower=True, unit="s")
        return
    run_recipe("recipe 1", "qwen2.5-0.5b", (16, 5, 16, 4), 2.2)


def recipe2(torch, args):
    if not gsm8k():
        say(f"no GSM8K and tokenizers in {DATA} (SHARED_DATA): no recipe 2")
        return
    run_recipe("recipe 2", "qwen3-1.7b", (240, 3, 80, 20), 42, steps=2)


HYBRID, MIXTURE = "qwen3.5-2b", "qwen3-30b-a3b"


def hybrid(torch, args):
    path, by = model(HYBRID), f"{torch_name(torch)}, {fast_kernels()}" if torch else "torch"
    shape = f"{BATCH}x{LENGTH}"
    peer = torch_train(torch, path) if torch else None
    r = bench("train", "--model", path, "--batch", BATCH, "--len", LENGTH, "--steps", 3)
    rate = r["tokens"] / (r["seconds"] + r["optimizer_seconds"])
    row(f"train/{HYBRID}/{shape}", f"training step, {HYBRID}, {BATCH} x {LENGTH}", rate, peer, by,
        work={"op": "train", "model": HYBRID, "length": LENGTH})
    peer = torch_logprob(torch, path) if torch else None
    r = bench("logprob", "--model", path, "--batch", BATCH, "--len", LENGTH, "--steps", 3)
    row(f"logprob/{HYBRID}/{shape}", f"log-probs and entropy, {HYBRID}, {BATCH} x {LENGTH}", r["tokens_per_s"], peer, by,
        work={"op": "logprob", "model": HYBRID, "length": LENGTH})
    for prompts, n in ((16, 5), (64, 8)):
        decode_512(HYBRID, prompts, n, torch_decode(torch, path, prompts * n, 512, 32) if torch else None, by)


def decode_512(arch, prompts, n, peer=None, by="torch"):
    r = bench("generate", "--model", model(arch), "--batch", prompts * n, "--n", n, "--prompt", 512, "--len", 512, "--steps", 1)
    row(f"decode/{arch}/{prompts}x{n}/512+512", f"decoding, {arch}, {prompts} x {n}, 512 + 512", r["decode_tokens_per_s"], peer, by,
        work={"op": "decode", "model": arch, "prompts": prompts, "n": n, "prompt": 512, "new": 512},
        note=f"with prefill {r['tokens_per_s'] / 1e3:.1f} k")


def experts(torch, args):
    for prompts, n in ((16, 5), (64, 8)):
        decode_512(MIXTURE, prompts, n)
    if not (data := gsm8k()):
        say(f"no GSM8K and tokenizers in {DATA} (SHARED_DATA): no step of {MIXTURE}")
        return
    run, log = OUT / f"run_{MIXTURE}", OUT / f"{MIXTURE}.log"
    subprocess.run(["rm", "-rf", run], check=True)
    keys = recipe(MIXTURE, data, run, 16, 8, 16, 8, 2, "actor_rollout_ref.model.lora_rank=16",
                  "actor_rollout_ref.model.lora_alpha=16", "actor_rollout_ref.model.target_modules=[q_proj,k_proj,v_proj,o_proj]",
                  "trainer.profile_steps=null")
    log.write_text(call("ppo", *keys).stderr)
    done = json.loads((next(iter(run.glob("**/*.jsonl")))).read_text().splitlines()[-1])["data"]
    FIGURES.add(f"grpo/{MIXTURE}/lora", f"GRPO with an adapter, {MIXTURE}, 16 x 8, 1024 new", done["perf/throughput"],
                peers=[("NeMo-RL's figure, a GPU of 32 H100", 1102, False)], note=phases_of(done))


def start(torch, args):
    """Seconds from the command to the first generated token, files in the page cache."""
    path, best = model("qwen2.5-0.5b"), 1e9
    for _ in range(3):
        t = time.time()
        call("generate", "--model", path, "--device", "cuda", input='{"ids": [9707, 11], "max_tokens": 1}\n')
        best = min(best, time.time() - t)
    peer = vllm("qwen2.5-0.5b", args)
    row("start/qwen2.5-0.5b", "start to first token, qwen2.5-0.5b", best, peer.get("start"), peer.get("name", "vLLM"), bar=5,
        lower=True, unit="s")


def main():
    args = sys.argv[1:]
    rows = {"decode": decode, "train": train, "logprob": logprob, "step": step, "start": start}
    long = {"hybrid": hybrid, "experts": experts, "recipe2": recipe2}
    named = [a for a in args if not a.startswith("-")] or list(rows)
    named += [a for a in long if "--long" in args and a not in named]
    rows |= long
    if unknown := [a for a in named if a not in rows] + [a for a in args if a.startswith("-") and a not in
                                                         ("--long", "--no-peers", "--compile")]:
        sys.exit(f"unknown: {' '.join(unknown)}; rows: {' '.join(rows)}; options: --long --no-peers --compile")
    OUT.mkdir(parents=True, exist_ok=True)
    machine()
    torch = torch_or_none(args)
    if not torch:
        say("no peers: python3 has no torch with CUDA, or --no-peers")
    for name in named:
        rows[name](torch, args)
    missed = FIGURES.show()
    (OUT / "gpu.json").write_text(FIGURES.text())
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
