#!/usr/bin/env python3
"""verlc's MCP tools beside real servers of the package mcp: by streamable HTTP, by server-sent events with a token, and as a
program; what fastmcp's client, which verl used, is told of the same servers is compared.

  oracle_mcp.py            compares
  oracle_mcp.py --serve TRANSPORT PORT     is such a server"""

import asyncio
import json
import logging
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
TOKEN = "a-token"


# ---- the server ----

def serve(transport, port):
    from mcp.server import MCPServer
    from mcp.types import TextContent
    logging.disable(logging.CRITICAL)
    server = MCPServer("things")

    @server.tool()
    def add(a: int, b: int = 1) -> str:
        """Adds two numbers."""
        return str(a + b)

    @server.tool()
    def many(n: int) -> list[TextContent]:
        """Several parts."""
        return [TextContent(type="text", text=f"part {i} ü") for i in range(n)]

    @server.tool()
    def fail() -> str:
        """Fails."""
        raise ValueError("no such thing")

    @server.tool()
    async def slow(s: float) -> str:
        """Takes a while."""
        await asyncio.sleep(s)
        return "done"

    @server.tool()
    def leave() -> str:
        """Ends the server."""
        os._exit(1)

    if transport == "stdio":
        return server.run("stdio")
    import uvicorn
    app = server.sse_app() if transport == "sse" else server.streamable_http_app()

    async def guarded(scope, receive, send):
        """Only with the token."""
        if scope["type"] == "http" and transport == "sse":
            if dict(scope["headers"]).get(b"authorization") != f"Bearer {TOKEN}".encode():
                await send({"type": "http.response.start", "status": 401, "headers": []})
                return await send({"type": "http.response.body", "body": b"no"})
        return await app(scope, receive, send)
    uvicorn.run(guarded, host="127.0.0.1", port=port, log_level="error")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    def __init__(self, transport):
        self.transport, self.port = transport, free_port()
        self.start()

    def start(self):
        self.process = subprocess.Popen([sys.executable, __file__, "--serve", self.transport, str(self.port)])
        for _ in range(200):
            with socket.socket() as s:
                if s.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.1)
        sys.exit(f"the {self.transport} server does not listen")

    def stop(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


# ---- verlc's tools and fastmcp's client ----

class Ours:
    """A tool process with the tools of these servers."""

    def __init__(self, servers, timeout=20, selected=None, cls="mcp_base_tool.MCPBaseTool"):
        directory = pathlib.Path(tempfile.mkdtemp(prefix="verlc-mcp-"))
        (directory / "servers.json").write_text(json.dumps({"mcpServers": servers}))
        entry = {"class_name": f"verl.tools.{cls}", "config": {"type": "mcp", "rate_limit": 100, "timeout": timeout},
                 "mcp": {"mcp_servers_config_path": str(directory / "servers.json"), "tool_selected_list": selected or []}}
        (directory / "tools.yaml").write_text(json.dumps({"tools": [entry]}))
        self.init = {"tool_config_path": str(directory / "tools.yaml"), "max_response_length": 1 << 20}

    async def __aenter__(self):
        import struct
        self.sock, theirs = socket.socketpair()
        self.process = subprocess.Popen([sys.executable, "-m", "verlc_helpers.tools"], pass_fds=[theirs.fileno()],
                                        env={**os.environ, "VERLC_HELPER_FD": str(theirs.fileno()),
                                             "PYTHONPATH": f"{ROOT / 'python' / 'verlc_standin'}:{ROOT / 'python'}"})
        theirs.close()
        self.sock.setblocking(False)
        self.reader, self.writer = await asyncio.open_connection(sock=self.sock)
        self.struct, self.id, self.waiting = struct, 0, {}
        await self.write({"id": 0, "max_reply_bytes": 1 << 28, "init": self.init})
        first = await self.read()
        if "error" in first:
            raise RuntimeError(first["error"])
        self.task = asyncio.create_task(self.read_all())
        return self

    async def __aexit__(self, *_):
        self.task.cancel()
        self.writer.close()
        self.process.kill()
        self.process.wait()

    async def write(self, message):
        data = json.dumps(message).encode()
        self.writer.write(self.struct.pack("<I", len(data)) + data)
        await self.writer.drain()

    async def read(self):
        head = await self.reader.readexactly(4)
        return json.loads(await self.reader.readexactly(self.struct.unpack("<I", head)[0]))

    async def read_all(self):
        while True:
            reply = await self.read()
            self.waiting.pop(reply["id"]).set_result(reply)

    async def ask(self, **request):
        self.id += 1
        waits = self.waiting[self.id] = asyncio.get_running_loop().create_future()
        await self.write({"id": self.id, "timeout_s": 60, "req": request})
        return (await waits)["ok"]

    async def tools(self):
        return (await self.ask(op="describe"))["tools"]

    async def call(self, name, **arguments):
        return await self.ask(op="call", episode="e", name=name, arguments=json.dumps(arguments))


async def theirs(servers, calls):
    """(schemas, results) by fastmcp's client as verl's manager used it."""
    from fastmcp import Client
    from fastmcp.client.transports import SSETransport
    clients = [Client(SSETransport(url=s["url"], headers={"Authorization": f"Bearer {s['auth_token']}"}))
               for s in servers.values() if "auth_token" in s]
    plain = {k: s for k, s in servers.items() if "auth_token" not in s}
    clients += [Client({"mcpServers": plain})] if plain else []
    tools, owner, results = [], {}, []
    for client in clients:
        async with client:
            for tool in (await client.list_tools_mcp()).tools:
                owner[tool.name] = client
                tools.append(tool)
    for name, arguments in calls:
        async with owner[name] as client:
            parts = (await client.call_tool_mcp(name, arguments)).content
            results.append(" ".join(p.text for p in parts if p.type == "text"))
    return tools, results


def filtered(tool):
    """verl's schema of an MCP tool."""
    schema = tool.inputSchema if hasattr(tool, "inputSchema") else tool.input_schema
    keep = {n: {k: p[k] for k in ("type", "description", "enum") if k in p} for n, p in schema.get("properties", {}).items()}
    parameters = {"type": schema["type"], "properties": keep, "required": schema.get("required") or []}
    return {"name": tool.name, "schema": {"type": "function", "function": {
        "name": tool.name, "description": tool.description, "parameters": parameters, "strict": False}}}


CALLS = [("add", {"a": 1, "b": 2}), ("add", {"a": 5}), ("many", {"n": 3}), ("many", {"n": 0}), ("fail", {}), ("add", {"a": "x"}),
         ("slow", {"s": 0.1})]
n_wrong = 0


def check(name, ok, detail=""):
    global n_wrong
    n_wrong += not ok
    print(f"{'ok     ' if ok else 'FAILED '} {name}{'' if ok else f': {detail}'}", flush=True)


async def same(name, servers, prefix=""):
    calls = [(prefix + n, a) for n, a in CALLS]
    tools, wanted = await theirs(servers, calls)
    async with Ours(servers) as mine:
        got = [(await mine.call(n, **a))["text"] for n, a in calls]
        ours = await mine.tools()
    want = [filtered(t) for t in tools]
    check(f"{name}: {len(want)} schemas", json.dumps(ours) == json.dumps(want), f"{ours}\n{want}")
    check(f"{name}: {len(calls)} calls", got == wanted, f"{got}\n{wanted}")


async def faults(http):
    servers = {"things": {"url": f"http://127.0.0.1:{http.port}/mcp"}}
    async with Ours(servers, timeout=3, selected=["slow", "leave", "add"]) as mine:
        check("tool_selected_list", [t["name"] for t in await mine.tools()] == ["add", "slow", "leave"])
        begun = time.monotonic()
        slow = await asyncio.gather(*[mine.call("slow", s=0.2) for _ in range(50)])
        check("50 calls at once", [r["text"] for r in slow] == ["done"] * 50 and time.monotonic() - begun < 10, slow[:2])
        late = await mine.call("slow", s=30)
        check("a late answer", late["text"] == "\n An unexpected error occurred: no answer within 3 s", late)
        check("the connection goes on", (await mine.call("add", a=1))["text"] == "2")
        gone = await mine.call("leave")
        check("a server that ends", gone["text"].startswith(("\n Connection failed: ", "\n An unexpected error")), gone)
        down = await mine.call("add", a=1)
        check("a server that is down", down["text"].startswith(("\n Connection failed: ", "\n An unexpected error")), down)
        http.process.wait()
        http.start()
        check("a server that is back", (await mine.call("add", a=1))["text"] == "2")


async def main():
    http, sse = Server("http"), Server("sse")
    try:
        by_http = {"things": {"url": f"http://127.0.0.1:{http.port}/mcp"}}
        by_token = {"guarded": {"url": f"http://127.0.0.1:{sse.port}/sse", "auth_token": TOKEN}}
        program = {"command": sys.executable, "args": [__file__, "--serve", "stdio", "0"]}
        await same("streamable HTTP", by_http)
        await same("server-sent events with a token", by_token)
        await same("a program", {"p": program})
        await same("two servers", {"one": by_http["things"], "two": program}, "two_")
        await faults(http)
    finally:
        http.stop()
        sse.stop()
    print(f"{n_wrong} differ")
    return n_wrong > 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(asyncio.run(main()))
