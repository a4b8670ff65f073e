"""Asks a retrieval service, as Search-R1's: POST {"queries", "topk", "return_scores"} -> {"result": [[{"document": {"contents"},
"score"}, ...] of each query]}, and writes what it found as the text that verl's search tool gave until 0.7.1."""

import json
import time

from verl.utils.http_post import ServiceError, post_json

DEFAULT_TIMEOUT, MAX_RETRIES, INITIAL_RETRY_DELAY = 30, 10, 1  # seconds; tries; seconds more after each
RETRIED = (500, 502, 503, 504)


def call_search_api(retrieval_service_url, query_list, topk=3, return_scores=True, timeout=DEFAULT_TIMEOUT):
    """(the service's answer, None), or (None, what went wrong)."""
    payload = {"queries": query_list, "topk": topk, "return_scores": return_scores}
    said = ""
    for attempt in range(MAX_RETRIES):
        try:
            return post_json(retrieval_service_url, payload, timeout), None
        except ServiceError as error:
            if error.status in RETRIED:
                said = f"API Request Error: Server Error ({error.status}) on attempt {attempt + 1}/{MAX_RETRIES}"
            elif error.again:
                said = f"Connection Error: {error}"
            else:
                return None, f"API Call Failed: API Request Error: {error}"
        if attempt + 1 < MAX_RETRIES:
            time.sleep(INITIAL_RETRY_DELAY * (attempt + 1))
    return None, f"API Call Failed: {said}"


def _passages2string(retrieval_result):
    """The documents of one query: a title, which is the first line, and the rest."""
    text = ""
    for k, found in enumerate(retrieval_result):
        title, _, rest = found["document"]["contents"].partition("\n")
        text += f"Doc {k + 1} (Title: {title})\n{rest}\n\n"
    return text.strip()


def told(answer):
    """(text, status, documents) of the service's answer."""
    found = answer.get("result", [])
    if not found:
        return "No search results found.", "no_results", 0
    text = "\n---\n".join([_passages2string(r) for r in found])
    return text, "success", sum(len(r) if isinstance(r, list) else 1 for r in found)


def perform_single_search_batch(retrieval_service_url, query_list, topk=3, concurrent_semaphore=None, timeout=DEFAULT_TIMEOUT):
    """(JSON {"result": text}, {"query_count", "status", "total_results", "api_request_error", ...})"""
    if concurrent_semaphore:
        with concurrent_semaphore:
            answer, error = call_search_api(retrieval_service_url, query_list, topk, True, timeout)
    else:
        answer, error = call_search_api(retrieval_service_url, query_list, topk, True, timeout)
    total, formatted = 0, None
    if error:
        text, status = f"Search error: {error}", "api_error"
    elif not answer:
        text, status = "Unknown API state (no response and no error message).", "unknown_api_state"
    else:
        try:
            text, status, total = told(answer)
            formatted = text if status == "success" else None
        except Exception as failure:  # an answer of another form
            text, status = f"Error processing search results: {failure}", "processing_error"
    return json.dumps({"result": text}, ensure_ascii=False), {
        "query_count": len(query_list), "queries": query_list, "api_request_error": error, "api_response": answer, "status": status,
        "total_results": total, "formatted_result": formatted}
