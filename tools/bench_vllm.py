"""vLLM's rate of generated tokens, the peer of `make bench-gpu`'s decode rows; a process of its own, since vLLM keeps the GPU's
memory until it ends.  Random prompts, samples that share their prompt's cache, every sample of full length, log-probs of the
drawn tokens as verl asks for them.  Not a server, no tuning beyond vLLM's own defaults.

  python tools/bench_vllm.py MODEL CASE...        CASE: prompts,samples,prompt length,new tokens

A line of JSON for the start ({"first_token_s": since this process began}), then one a case: the best of two rounds."""

import json
import random
import sys
import time

START = time.time()


def say(**what):
    print(json.dumps(what), flush=True)


def main():
    from vllm import LLM, SamplingParams, __version__

    path, cases = sys.argv[1], [tuple(map(int, c.split(","))) for c in sys.argv[2:]]
    llm = LLM(model=path, dtype="bfloat16", max_model_len=max(p + new for _, _, p, new in cases),
              max_num_seqs=max(prompts * n for prompts, n, _, _ in cases), gpu_memory_utilization=0.8, seed=1)
    llm.generate([{"prompt_token_ids": [9707, 11]}], SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
    say(version=__version__, first_token_s=time.time() - START)
    rng = random.Random(1)
    for prompts, n, length, new in cases:
        best = 1e9
        for _ in range(2):
            batch = [{"prompt_token_ids": [rng.randrange(1000, 150000) for _ in range(length)]} for _ in range(prompts)]
            how = SamplingParams(n=n, max_tokens=new, ignore_eos=True, temperature=1.0, detokenize=False, logprobs=0)
            t = time.time()
            done = llm.generate(batch, how, use_tqdm=False)
            best = min(best, time.time() - t)
            made = sum(len(o.token_ids) for r in done for o in r.outputs)
            assert made == prompts * n * new, f"{made} tokens"
        say(version=__version__, prompts=prompts, n=n, prompt=length, new=new, tokens_per_s=prompts * n * new / best)


if __name__ == "__main__":  # vLLM starts its engine by importing this file again
    main()
