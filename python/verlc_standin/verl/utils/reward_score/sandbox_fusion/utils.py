"""A program run by a SandboxFusion service: POST /run_code.

https://bytedance.github.io/SandboxFusion/docs/api/run-code-run-code-post describes it."""

import time

from verl.utils.http_post import ServiceError, post_json

MAX_RETRIES, INITIAL_RETRY_DELAY, API_TIMEOUT = 3, 1, 10  # tries; seconds more after each; seconds beyond the program's own
SUPPORTED_LANGUAGES = ("python cpp nodejs go go_test java php csharp bash typescript sql rust cuda lua R perl D_ut ruby scala "
                       "julia pytest junit kotlin_script jest verilog python_gpu lean swift racket").split()


def call_sandbox_api(sandbox_fusion_url, code, stdin, compile_timeout, run_timeout, memory_limit_mb, language="python"):
    """(the service's answer, None), or (None, what went wrong)."""
    if language not in SUPPORTED_LANGUAGES:
        return None, f"Unsupported language: {language}"
    payload = {"compile_timeout": compile_timeout, "run_timeout": run_timeout, "code": code, "stdin": stdin,
               "memory_limit_MB": memory_limit_mb, "language": language, "files": {}, "fetch_files": []}
    for attempt in range(MAX_RETRIES):
        try:
            return post_json(sandbox_fusion_url, payload, compile_timeout + run_timeout + API_TIMEOUT), None
        except ServiceError as error:
            if error.status != 504 or attempt + 1 == MAX_RETRIES:
                return None, f"API Call Failed: API Request Error: {error}"
        time.sleep(INITIAL_RETRY_DELAY * (attempt + 1))
    return None, "API Call Failed after retries"
