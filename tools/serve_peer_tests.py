"""vLLM's and llama.cpp's own tests of their servers against `verlc serve`, from checkouts that are given by path: nothing of
theirs is kept here. A pytest plugin, this file too, starts `verlc serve` where their helpers start their server; a tiny random
model stands for theirs. Their tests run as they are; only the server's start, and llama.cpp's paths without /v1, are ours.

A test that may fail is in EXCEPTIONS with its reason: what the server refuses or lacks, or what is the peer's own. Any other
that fails, fails the command, and so does a peer of which no test has passed.

  python tools/serve_peer_tests.py VERLC [--vllm CHECKOUT] [--llama CHECKOUT] [--markdown]

Needs pytest, pytest-asyncio, openai, anthropic, requests, wget, filelock, regex and transformers.
"""

import argparse
import collections
import importlib.abc
import importlib.machinery
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import types
import urllib.parse
import xml.etree.ElementTree

HERE = pathlib.Path(__file__).resolve()
TEMPLATE = (
    "{#- <tool_call> -#}{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
FILES = {
    "vllm": [
        "tests/entrypoints/openai/test_chat.py",
        "tests/entrypoints/openai/test_tokenization.py",
        "tests/entrypoints/openai/test_return_token_ids.py",
        "tests/entrypoints/openai/test_chunked_prompt.py",
        "tests/v1/entrypoints/openai/test_completion.py",
        "tests/v1/entrypoints/openai/test_chat_completion.py",
    ],
    "llama": [
        f"tools/server/tests/unit/test_{x}.py"
        for x in "basic chat_completion completion compat_anthropic compat_oai_responses security tokenize ignore_eos".split()
    ],
}
GRAMMAR, ECHO = "refused: grammars and forced calls", "refused: `echo`, `prompt_logprobs`, `min_tokens`, beam search"
BIAS, MODEL = "refused: `logit_bias`", "wants its own model's text or number of tokens"
NATIVE, ROUTE = "llama.cpp's own interface", "no such route"
FIELDS, IMAGES = "fields and words of errors that only llama.cpp has", "no images"
# By file: why its tests fail here, parametrised ones as a whole.
EXCEPTIONS = {
    "openai/test_chat.py": {
        ECHO: "test_prompt_logprobs_chat test_more_than_one_prompt_logprobs_chat test_chat_completion_stream_options",
        GRAMMAR: "test_structured_outputs_choice_chat test_structured_outputs_json_chat test_structured_outputs_regex_chat "
        "test_structured_outputs_choice_chat_logprobs test_named_tool_use test_inconsistent_tool_choice_and_tools "
        "test_response_format_json_object test_response_format_json_schema",
        MODEL: "test_single_chat_session test_chat_streaming test_complex_message_content",
        "roles are those of OpenAI": "test_custom_role",
        "the error's words are vLLM's": "test_long_seed",
        ROUTE: "test_invocations",
    },
    "openai/test_tokenization.py": {
        ROUTE: "test_tokenizer_info_basic test_tokenizer_info_schema test_tokenizer_info_added_tokens_structure "
        "test_tokenizer_info_consistency_with_tokenize test_tokenizer_info_chat_template"
    },
    "openai/test_return_token_ids.py": {
        ECHO: "test_comparison_with_prompt_logprobs_and_logprobs",
        MODEL: "test_chat_completion_with_tool_use test_chat_completion_with_emoji_and_token_ids",
    },
    "openai/test_chunked_prompt.py": {
        MODEL: "test_completion_stream_options_and_logprobs_with_long_prompts "
        "test_chat_completion_stream_options_and_logprobs_with_long_prompts"
    },
    "openai/test_completion.py": {
        ECHO: "test_prompt_logprobs_completion test_batch_completions test_echo_logprob_completion "
        "test_completion_stream_options",
        MODEL: "test_single_completion test_some_logprobs test_completion_streaming test_parallel_no_streaming",
        "no prompts of embeddings": "test_completion_with_empty_prompt_embeds",
    },
    "openai/test_chat_completion.py": {GRAMMAR: "test_invalid_json_schema test_invalid_regex test_invalid_grammar"},
    "unit/test_basic.py": {
        ROUTE: "test_server_props test_server_slots test_no_ui",
        NATIVE: "test_load_split_model test_server_model_aliases_and_tags",
    },
    "unit/test_chat_completion.py": {
        MODEL: "test_chat_completion_cached_tokens",
        FIELDS: "test_chat_completion test_chat_completion_stream test_chat_completion_with_openai_library test_chat_template "
        "test_chat_template_assistant_prefill test_chat_template_continue_final_message_vllm_compat test_logprobs_stream "
        "test_chat_completion_with_timings_per_token test_context_size_exceeded test_context_size_exceeded_stream "
        "test_return_progress test_chat_completions_multiple_choices test_verbose_debug",
        ROUTE: "test_apply_chat_template test_chat_completions_token_count",
        GRAMMAR: "test_completion_with_response_format test_completion_with_json_schema test_completion_with_grammar",
        BIAS: "test_logit_bias",
        "two assistant messages at the end are taken": "test_invalid_chat_completion_req",
    },
    "unit/test_completion.py": {
        NATIVE: "test_completion test_completion_stream test_completion_stream_vs_non_stream test_consistent_result_same_seed "
        "test_different_result_different_seed test_consistent_result_different_batch_size test_nocache_long_input_prompt "
        "test_json_prompt_no_mtmd test_completion_with_tokens_input test_completion_parallel_slots test_completion_unified "
        "test_completion_response_fields test_n_probs test_n_probs_stream test_n_probs_post_sampling "
        "test_n_probs_post_backend_sampling test_cancel_request test_completion_prompt_cache",
        FIELDS: "test_completion_with_openai_library test_completion_stream_with_openai_library",
        MODEL: "test_completion_stream_with_openai_library_stops",
        BIAS: "test_logit_bias",
    },
    "unit/test_compat_anthropic.py": {
        IMAGES: "test_anthropic_tool_result_with_image test_anthropic_vision_format_accepted "
        "test_anthropic_vision_base64_with_multimodal_model",
        "no messages are refused": "test_anthropic_empty_messages",
        "thinking stays in the text, and is left out of the prompt": "test_anthropic_thinking_history_in_count_tokens "
        "test_anthropic_thinking_with_reasoning_model",
        ROUTE: "test_anthropic_thinking_history_in_template",
    },
    "unit/test_compat_oai_responses.py": {
        "no Responses route": "test_responses_with_openai_library test_responses_stream_with_openai_library "
        "test_responses_stream_with_llama_telemetry"
    },
    "unit/test_security.py": {
        "no web page": "test_access_static_assets_without_api_key",
        "pages of browsers are refused": "test_cors_options test_cors_origins_localhost_reflects "
        "test_cors_origins_localhost_rejects test_cors_origins_defaults_to_localhost_with_tools_enabled "
        "test_cors_proxy_only_forwards_explicit_proxy_headers",
        NATIVE: "test_correct_api_key test_correct_api_key_anthropic_header test_openai_library_correct_api_key",
        IMAGES: "test_local_media_file",
    },
    "unit/test_tokenize.py": {
        "`/tokenize` is vLLM's": "test_tokenize_detokenize test_tokenize_with_bos test_tokenize_with_pieces"
    },
    "unit/test_ignore_eos.py": {NATIVE: "test_ignore_eos_populates_logit_bias test_ignore_eos_false_no_logit_bias"},
}


# ---- the plugin: within pytest ----


class Process:
    """A `verlc serve` on a tiny model. options: of its command line."""

    def __init__(self, *options, env=None):
        self.process = subprocess.Popen(
            [os.environ["PEER_VERLC"], "serve", os.environ["PEER_MODEL"], "--dtype", "fp32", "--threads", "1", *options],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("verlc serve did not start")
        self.url = json.loads(line)["url"]
        self.port = urllib.parse.urlparse(self.url).port

    def end(self):
        self.process.kill()
        self.process.wait()


class RemoteOpenAIServer:
    """Of vLLM's tests/utils.py: what tests call of it."""

    DUMMY_API_KEY = "any"

    def __init__(self, model, vllm_serve_args, **_):
        args = list(vllm_serve_args)
        length = args[args.index("--max-model-len") + 1] if "--max-model-len" in args else "512"
        self.at = Process("--port", "0", "--max-model-len", length, "--name", model)
        self.host, self.port = "127.0.0.1", self.at.port

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.at.end()

    def url_for(self, *parts):
        return f"http://127.0.0.1:{self.port}/" + "/".join(parts)

    def get_client(self, **kw):
        import openai

        return openai.OpenAI(base_url=self.url_for("v1"), api_key="any", max_retries=0, **{"timeout": 60, **kw})

    def get_async_client(self, **kw):
        import openai

        return openai.AsyncOpenAI(base_url=self.url_for("v1"), api_key="any", max_retries=0, **{"timeout": 60, **kw})


class VllmModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """`vllm` as far as its tests of the server import it: the tokenizer of the model. tests.utils: the class above."""

    def find_spec(self, name, path=None, target=None):
        if name == "tests.utils" or name.split(".")[0] == "vllm":
            return importlib.machinery.ModuleSpec(name, self, is_package=name != "tests.utils")
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        if spec.name == "tests.utils":
            module.RemoteOpenAIServer = RemoteOpenAIServer
        if spec.name == "vllm.transformers_utils.tokenizer":
            import transformers

            module.get_tokenizer = lambda *_a, **_k: transformers.AutoTokenizer.from_pretrained(os.environ["PEER_MODEL"])
        return module

    def exec_module(self, module):
        pass


def llama_server(utils):
    """llama.cpp's utils.ServerProcess with our start and stop."""
    at_v1 = re.compile(r"^/(chat/completions|completions|models|messages|responses)(/|$)")

    def start(self, timeout_seconds=60):
        length = str((self.n_ctx or 512) // (self.n_slots or 1))
        options = ["--port", "0", "--max-model-len", length]
        if self.model_alias:
            options += ["--name", self.model_alias]
        self.ours = Process(*options, env={"VERLC_API_KEY": self.api_key} if self.api_key else None)
        self.process, self.server_port = self.ours.process, self.ours.port
        utils.server_instances.add(self)

    def stop(self):
        utils.server_instances.discard(self)
        if getattr(self, "ours", None):
            self.ours.end()
        self.process = None

    def make_url(self, path, host=None):
        return f"http://127.0.0.1:{self.server_port}" + ("/v1" if at_v1.match(path) else "") + path

    utils.ServerProcess.start, utils.ServerProcess.stop, utils.ServerProcess.make_url = start, stop, make_url
    utils.ServerPreset.load_all = staticmethod(lambda: None)


if "PEER" in os.environ:
    import pytest

    @pytest.fixture(scope="session")
    def zephyr_lora_files():
        """Of vLLM's conftest: an adapter's folder, which the tests only name to their server."""
        return "zephyr-lora"


def pytest_configure(config):
    if os.environ["PEER"] == "vllm":
        sys.meta_path.insert(0, VllmModules())
    else:
        sys.path.insert(0, str(pathlib.Path(os.environ["PEER_ROOT"]) / "tools/server/tests"))
        import utils

        llama_server(utils)


# ---- the command ----


def tiny_model(verlc, d):
    subprocess.run([verlc, "model", "init", "--preset", "tiny", "--out", d, "--seed", "1"], check=True, stdout=subprocess.DEVNULL)
    f = d / "tokenizer_config.json"
    f.write_text(json.dumps({**json.loads(f.read_text()), "chat_template": TEMPLATE}))
    f = d / "config.json"
    f.write_text(json.dumps({**json.loads(f.read_text()), "max_position_embeddings": 16384}))
    return d


def run_peer(verlc, peer, root, model, out):
    env = {**os.environ, "PEER": peer, "PEER_VERLC": str(verlc), "PEER_MODEL": str(model), "PEER_ROOT": str(root)}
    env["PYTHONPATH"] = f"{HERE.parent}:{root}"
    files = [f for f in FILES[peer] if (root / f).exists()]
    command = [sys.executable, "-m", "pytest", "-q", "-p", HERE.stem, "-p", "no:cacheprovider"]
    command += [f"--junitxml={out}", f"--rootdir={root}"]
    if peer == "vllm":
        command += ["--noconftest", "--import-mode=importlib"]
    subprocess.run([*command, *files], cwd=root, env=env, stdout=open(out.with_suffix(".log"), "w"), stderr=subprocess.STDOUT)


def results(out):
    """(file, test, outcome, message) of each."""
    for case in xml.etree.ElementTree.parse(out).iter("testcase"):
        bad = [x for x in case if x.tag in ("failure", "error")]
        skipped = any(x.tag == "skipped" for x in case)
        file = case.get("classname").replace(".", "/").split("/Test")[0] + ".py"
        message = (bad[0].get("message") or "").split("\n")[0] if bad else ""
        yield file, case.get("name"), "failed" if bad else "skipped" if skipped else "passed", message


def reason_of(file, test):
    reasons = EXCEPTIONS.get("/".join(file.split("/")[-2:]), {})
    return next((why for why, tests in reasons.items() if test.split("[")[0] in tests.split()), None)


def report(peer, out, markdown):
    """Prints what came out; the tests that failed and apply."""
    counts, reasons, failed = collections.defaultdict(collections.Counter), collections.defaultdict(collections.Counter), []
    for file, test, outcome, message in results(out):
        why = reason_of(file, test) if outcome == "failed" else None
        counts[file]["exception" if why else outcome] += 1
        if why:
            reasons[file][why] += 1
        elif outcome == "failed":
            failed.append(f"{file}::{test}: {message[:160]}")
    for file, n in counts.items():
        whys = "; ".join(f"{why} ({k})" for why, k in reasons[file].items())
        cells = [f"{peer}: `{file}`", str(n["passed"]), str(n["exception"] + n["skipped"]), whys]
        print("| " + " | ".join(cells) + " |" if markdown else "  ".join(cells))
    return failed if any(n["passed"] for n in counts.values()) else [*failed, f"{peer}: no test has passed"]


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("verlc", type=pathlib.Path)
    ap.add_argument("--vllm", type=pathlib.Path)
    ap.add_argument("--llama", type=pathlib.Path)
    ap.add_argument("--markdown", action="store_true", help="rows of the table in docs/serve.md")
    ap.add_argument("--keep", type=pathlib.Path, help="a folder for pytest's logs")
    args = ap.parse_args()
    failed = []
    with tempfile.TemporaryDirectory(prefix="verlc-peer-tests-") as d:
        model = tiny_model(args.verlc.resolve(), pathlib.Path(d) / "model")
        keep = (args.keep or pathlib.Path(d)).resolve()
        for peer, root in (("vllm", args.vllm), ("llama", args.llama)):
            if root:
                run_peer(args.verlc.resolve(), peer, root.resolve(), model, keep / f"{peer}.xml")
                failed += report(peer, keep / f"{peer}.xml", args.markdown)
    for line in failed:
        print("FAILED  " + line)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
