"""A search tool of an MCP server, as verl had it until 0.7.1: of each part of the answer its list "results"."""

import re

from verl.tools.mcp_base_tool import MCPBaseTool


def first(pattern, text):
    found = re.search(pattern, text, re.DOTALL)
    return found[1] if found else ""


class MCPSearchTool(MCPBaseTool):
    def _parse_tool_result(self, content):
        texts = [part.text.replace("'", '"') for part in content if part.type == "text"]
        queries = [first(r'query"\s*:\s*"([^"]+)"', text) for text in texts]
        return "".join(first(r'"results"\s*:\s*(\[.*?\])', text) for text in texts), {
            "api_request_error": "", "status": "success", "queries": queries, "query_count": len(queries),
            "total_results": sum(len(re.findall(r'"title"\s*:', text)) for text in texts)}
