"""Servers of the Model Context Protocol, by the package mcp: their tools, and calls of these.

The configuration is JSON: {"mcpServers": {NAME: server}}, a server {"url", "auth_token"?, "headers"?, "transport"?} or
{"command", "args"?, "env"?, "cwd"?}.  With auth_token, with a path that ends in /sse or with transport "sse" it is spoken to by
server-sent events, else by streamable HTTP.  Of several servers without auth_token the tools are named NAME_TOOL, as fastmcp does
it in verl.

Invariant: a connection is opened and closed by one task, and is opened again after it broke."""

import asyncio
import contextlib
import json
import re
import sys
import time

TRIES, PAUSE_S, OPEN_S = 10, 2, 30  # at the start, until a server has tools; to open a connection
ROOT = "mcpServers"


def package():
    try:
        import mcp
    except ImportError as error:
        raise ImportError(f"MCP tools need the Python package mcp: '{sys.executable} -m pip install mcp'") from error
    return mcp


def is_sse(server):
    return "auth_token" in server or server.get("transport") == "sse" or (
        "transport" not in server and re.search(r"/sse(/|\?|&|$)", server["url"]) is not None)


@contextlib.asynccontextmanager
async def http_streams(url, headers):
    """Of mcp 1 and 2, whose functions differ."""
    from mcp.client import streamable_http as client
    if hasattr(client, "streamablehttp_client"):
        async with client.streamablehttp_client(url, headers=headers) as streams:
            yield streams
        return
    async with client.create_mcp_http_client(headers=headers) as http:
        async with client.streamable_http_client(url, http_client=http) as streams:
            yield streams


def transport(server):
    """The async context of a server's two streams."""
    mcp = package()
    if "command" in server:
        started = {k: server[k] for k in ("command", "args", "env", "cwd") if k in server}
        return mcp.stdio_client(mcp.StdioServerParameters(**started))
    headers = dict(server.get("headers") or {})
    if "auth_token" in server:
        headers["Authorization"] = f"Bearer {server['auth_token']}"
    if is_sse(server):
        from mcp.client.sse import sse_client
        return sse_client(server["url"], headers=headers)
    return http_streams(server["url"], headers)


def innermost(error):
    """Of an exception group its first."""
    while getattr(error, "exceptions", None):
        error = error.exceptions[0]
    return error


class Connection:
    def __init__(self, server):
        self.server, self.task, self.ready, self.stop = server, None, None, None

    async def own(self, ready, stop):
        try:
            async with transport(self.server) as streams, package().ClientSession(streams[0], streams[1]) as session:
                await session.initialize()
                ready.set_result(session)
                await stop.wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(ConnectionError(str(innermost(error)) or type(innermost(error)).__name__))

    async def session(self):
        if self.task is None or self.task.done():
            self.ready, self.stop = asyncio.get_running_loop().create_future(), asyncio.Event()
            self.task = asyncio.create_task(self.own(self.ready, self.stop))
        return await asyncio.wait_for(asyncio.shield(self.ready), OPEN_S)

    async def close(self):
        if self.task is not None:
            self.stop.set()
            await asyncio.wait([self.task], timeout=PAUSE_S)
            self.task.cancel()
            self.task = None

    def drop(self):
        """The next call opens another."""
        if self.task is not None:
            self.stop.set()
            self.task = None

    async def tools(self):
        session, cursor, found = await self.session(), None, []
        while True:
            page = await (session.list_tools() if cursor is None else session.list_tools(cursor))
            found += page.tools
            cursor = getattr(page, "nextCursor", None) or getattr(page, "next_cursor", None)
            if not cursor:
                return found


def mcp2openai(tool, name):
    schema = dict(getattr(tool, "inputSchema", None) or getattr(tool, "input_schema", None) or {})
    if not schema.get("required"):
        schema["required"] = []
    return {"type": "function", "function": {"name": name, "description": tool.description, "parameters": schema, "strict": False}}


class TokenBucket:
    """rate calls a second, and as many at once."""

    def __init__(self, rate):
        if not rate > 0:
            raise ValueError(f"rate_limit={rate} of MCP tools: a number of calls a second over 0")
        self.rate, self.most = float(rate), max(1.0, float(rate))
        self.left = self.most
        self.filled = time.monotonic()

    async def acquire(self):
        while True:
            now = time.monotonic()
            self.left = min(self.most, self.left + (now - self.filled) * self.rate)
            self.filled = now
            if self.left >= 1:
                self.left -= 1
                return
            await asyncio.sleep((1 - self.left) / self.rate)


class MCPClientManager:
    def __init__(self):
        self.connections = {}  # by (file, name of the server)
        self.tools = {}        # connection and the server's own name, by the tool's name
        self.bucket = None

    def open(self, path):
        """The connections of a file, each with what stands in front of its tools' names."""
        package()
        with open(path, encoding="utf-8") as file:
            servers = json.load(file).get(ROOT)
        if not isinstance(servers, dict) or not servers:
            raise ValueError(f"{path} has no {ROOT}: {{NAME: {{url}}}}")
        for name, server in servers.items():
            if not isinstance(server, dict) or not ("url" in server or "command" in server):
                raise ValueError(f"{path}: the server {name} has neither url nor command")
        plain = [name for name, server in servers.items() if "auth_token" not in server]
        prefixed = plain if len(plain) > 1 else []
        return [(self.connections.setdefault((path, name), Connection(server)), f"{name}_" if name in prefixed else "")
                for name, server in servers.items()]

    async def find_tools(self, path, rate_limit, selected):
        """Schemas of the file's tools, or of the selected ones, in OpenAI's form; the connections are closed again."""
        servers = self.open(path)
        self.bucket = self.bucket or TokenBucket(rate_limit)
        problem = "it has no tools" + (f" named {', '.join(selected)}" if selected else "")
        for attempt in range(TRIES):
            try:
                schemas = await self.listed(servers, selected)
                if schemas:
                    return schemas
            except Exception as error:
                problem = str(innermost(error)) or type(error).__name__
            finally:
                for connection, _ in servers:
                    await connection.close()
            if attempt + 1 < TRIES:
                await asyncio.sleep(PAUSE_S)
        raise RuntimeError(f"{path}: no MCP tools after {TRIES} tries: {problem}")

    async def listed(self, servers, selected):
        schemas = []
        for connection, prefix in servers:
            for tool in await connection.tools():
                name = prefix + tool.name
                if not selected or name in selected:
                    self.tools[name] = connection, tool.name
                    schemas.append(mcp2openai(tool, name))
        return schemas

    async def call_tool(self, tool_name, parameters, timeout):
        """The server's result. TimeoutError after timeout seconds, which verl did not keep."""
        await self.bucket.acquire()
        connection, name = self.tools[tool_name]
        session = await connection.session()
        try:
            return await asyncio.wait_for(session.call_tool(name, parameters), timeout)
        except asyncio.TimeoutError:
            raise TimeoutError(f"no answer within {timeout:g} s") from None
        except Exception as error:
            if not is_answer(error):
                connection.drop()
            raise


def is_answer(error):
    """The server's own refusal: the connection is good."""
    return type(error).__name__ in ("McpError", "MCPError")


ClientManager = MCPClientManager()
