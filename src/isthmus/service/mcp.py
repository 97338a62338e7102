"""Search for assistants: a Model Context Protocol server of the tools of `assistants`.

    serve_stdio(AsyncClient(url))                    # `isthmus mcp`, for an assistant on this machine
    endpoint = McpEndpoint(calls_of)                 # an ASGI app, behind the broker's limits

Answers are JSON, once as structured content and once as text.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from isthmus import __version__
from isthmus.errors import IsthmusError, Refused, check_extra
from isthmus.service import wire
from isthmus.service.assistants import INSTRUCTIONS, TOOLS, Calls, call, one_line
from isthmus.service.limits import CALLER, HttpProblem, check_origin

if TYPE_CHECKING:
    from isthmus.service.client import AsyncClient

PATH = "/mcp"


@dataclass(frozen=True)
class ClientCalls:
    """The functions of a broker's API, with the person's key."""

    client: AsyncClient

    async def scopes(self) -> Collection[str]:
        """Return the scopes of the key; for admin, those of all tools."""
        own = await self.client.me()
        return {tool.scope for tool in TOOLS.values()} if "admin" in own.scopes else own.scopes

    async def search(self, search: wire.Search) -> wire.Answer:
        """POST /v1/search."""
        limits = search.model_dump(include={"query", "k", "threshold", "silos"})
        return await self.client.search(**limits)

    async def open(self, hit: wire.HitCopy) -> wire.OpenedDocument:
        """GET /v1/documents."""
        return await self.client.open(hit)

    async def silos(self) -> wire.SiloList:
        """GET /v1/silos."""
        return await self.client.silos()

    async def judge(self, verdict: wire.Feedback) -> None:
        """POST /v1/feedback."""
        hit = wire.Hit(silo=verdict.silo, document="-", token=verdict.token, probability=None, score=0.0)
        await self.client.judge(verdict.query, hit, relevant=verdict.relevant)


def _server(calls_of: Callable[[Request | None], Calls]) -> Any:
    """Return an MCP server of the tools, each for callers with its scope."""
    check_extra("mcp", "a server for assistants", "mcp")
    from mcp import MCPError, types
    from mcp.server.lowlevel import Server

    schema = cache(lambda model: model.model_json_schema())  # cached: calls may list the tools, too

    # the library's log messages quote requests
    logging.getLogger("mcp").setLevel(logging.CRITICAL)

    async def list_tools(context: Any, parameters: Any) -> Any:
        try:
            scopes = await calls_of(context.request).scopes()
        except IsthmusError as error:
            raise MCPError(types.INTERNAL_ERROR, one_line(str(error))) from None
        listed = [
            types.Tool(
                name=name,
                title=tool.title,
                description=tool.description,
                input_schema=schema(tool.arguments),
                output_schema=schema(tool.result),
                annotations=types.ToolAnnotations(
                    read_only_hint=tool.reads, destructive_hint=False, idempotent_hint=True
                ),
            )
            for name, tool in TOOLS.items()
            if tool.scope in scopes
        ]
        return types.ListToolsResult(tools=listed)

    async def call_tool(context: Any, parameters: Any) -> Any:
        if parameters.name not in TOOLS:
            raise MCPError(types.INVALID_PARAMS, f"no such tool; there are {', '.join(TOOLS)}")
        result, problem = await call(calls_of(context.request), parameters.name, parameters.arguments or {})
        text = problem if result is None else result.model_dump_json()
        return types.CallToolResult(
            content=[types.TextContent(text=text)],
            structured_content=None if result is None else result.model_dump(mode="json"),
            is_error=result is None,
        )

    server = Server(
        "isthmus",
        title="Isthmus",
        version=__version__,
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )
    server.middleware.clear()  # the default one continues any trace that a message names and records failures
    return server


def serve_stdio(client: AsyncClient, *, started: Callable[[list[str]], None] = lambda tools: None) -> None:
    """Serve an assistant on stdin and stdout until it ends. `started` is called first, with the tools that
    the key allows; raises Refused if there are none."""
    calls = ClientCalls(client)
    server = _server(lambda request: calls)
    from mcp.server.stdio import stdio_server

    async def run() -> None:
        async with client:
            scopes = await calls.scopes()
            tools = [name for name, tool in TOOLS.items() if tool.scope in scopes]
            if not tools:
                raise Refused("the API key has none of the scopes search, documents and feedback")
            started(tools)
            async with stdio_server() as (incoming, outgoing):
                await server.run(incoming, outgoing, server.create_initialization_options())

    asyncio.run(run())


class McpEndpoint:
    """The tools over streamable HTTP, one POST a message, without sessions: the broker identifies the caller
    of every single request, so that a session's id would say nothing."""

    path = PATH

    def __init__(self, calls_of: Callable[[Request], Calls]) -> None:
        check_extra("mcp", f"{PATH} at a broker (mcp = true)", "mcp")
        self._calls_of = calls_of

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve requests inside this block."""
        from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

        server = _server(self._calls_for)
        manager = StreamableHTTPSessionManager(server, json_response=True, stateless=True)
        async with manager.run():
            self._manager = manager
            yield

    def _calls_for(self, request: Request | None) -> Calls:
        if request is None:
            raise Refused("a message without a request")
        return self._calls_of(request)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one message."""
        scope["route"] = self
        if scope["method"] != "POST":  # there is nothing to GET: the server sends only replies
            raise HttpProblem(405, "POST messages here", Allow="POST")
        if not any(scope[CALLER].may(tool.scope) for tool in TOOLS.values()):
            raise HttpProblem(403, "this needs a key with the scope search, documents or feedback")
        check_origin(scope)
        await self._manager.handle_request(scope, _checked(await receive(), receive), send)


def _checked(message: Message, receive: Receive) -> Receive:
    """Return a `receive` that replays the body, after checking that it is a message: the library's own errors
    would repeat it."""
    from mcp.types import jsonrpc_message_adapter

    try:
        jsonrpc_message_adapter.validate_json(message.get("body", b""), by_name=False)
    except ValidationError:
        raise HttpProblem(400, "the body is not one message of JSON-RPC 2.0") from None
    pending = [message]

    async def again() -> Message:
        return pending.pop() if pending else await receive()

    return again
