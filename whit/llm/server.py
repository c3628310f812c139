"""An OpenAI-compatible server, and a page to chat, on starlette and uvicorn.

`application(service)` is an ASGI application; `serve` runs it until a signal ends it.

What a client does hurts itself only: bodies have a limit of size and of time, a client that leaves or stops
reading has its request cancelled, and the engine's thread never waits for a client. On SIGTERM or SIGINT the
server takes nothing new, gives running answers `grace` seconds to end, cuts off those that have not, and
exits.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from types import FrameType
from typing import Any, NoReturn, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from whit.helpers import VERSION
from whit.llm.api import chat, completions, plain, responses
from whit.llm.api.errors import ApiError
from whit.llm.api.metrics import Metrics
from whit.llm.api.service import Lines, Service

T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Limits:
    """What clients may do.

    body: bytes of a request. body_seconds: time for sending it. stall_seconds: how long a client may not read
    while there is something for it. keepalive_seconds: a stream that has nothing to say sends a comment so
    often. in_flight: requests at once. grace: seconds that running answers get when the server ends.
    """

    body: int = 8 << 20
    body_seconds: float = 30.0
    stall_seconds: float = 30.0
    keepalive_seconds: float = 10.0
    in_flight: int = 1024
    grace: float = 10.0


@dataclass
class Server:
    """The endpoints of a service."""

    service: Service
    keys: Sequence[str] = ()
    limits: Limits = field(default_factory=Limits)
    cors: Sequence[str] = ()
    hosts: Sequence[str] = ()
    metrics: Metrics = field(default_factory=Metrics)
    shelf: responses.Shelf = field(default_factory=responses.Shelf)

    def application(self) -> ASGIApp:
        """The ASGI application."""
        post, get = ["POST"], ["GET"]
        routes = [
            Route("/v1/chat/completions", self._chat, methods=post),
            Route("/v1/completions", self._completions, methods=post),
            Route("/v1/responses", self._responses, methods=post),
            Route("/v1/responses/compact", _nothing, methods=post),
            Route("/v1/responses/{id}", self._response, methods=["GET", "DELETE"]),
            Route("/v1/responses/{id}/input_items", self._input_items, methods=get),
            Route("/v1/embeddings", self._plain(plain.embeddings), methods=post),
            Route("/v1/models", self._models, methods=get),
            Route("/v1/models/{name:path}", self._models, methods=get),
            Route("/tokenize", self._plain(plain.tokenize), methods=post),
            Route("/detokenize", self._plain(plain.detokenize), methods=post),
            Route("/health", self._health, methods=get),
            Route("/metrics", self._metrics, methods=get),
            Route("/", _page, methods=get),
        ]
        handlers: dict[Any, Any] = {ApiError: _api_error, HTTPException: _http_error, Exception: _inner_error}
        self.service.observe = self.metrics.first_token.add
        app: ASGIApp = Starlette(routes=routes, exception_handlers=handlers)
        return Guard(app, self, [route.path for route in routes])

    # ---- endpoints

    async def _chat(self, request: Request) -> Response:
        body = await self._body(request)
        if body.get("stream") is True:
            return Stream(self, await self._attended(request, chat.stream(self.service, body)))
        return _json(await self._attended(request, chat.complete(self.service, body)))

    async def _completions(self, request: Request) -> Response:
        body = await self._body(request)
        if body.get("stream") is True:
            return Stream(self, await self._attended(request, completions.stream(self.service, body)))
        return _json(await self._attended(request, completions.complete(self.service, body)))

    async def _responses(self, request: Request) -> Response:
        body, owner = await self._body(request), _owner(request)
        if body.get("stream") is True:
            lines = responses.stream(self.service, self.shelf, body, owner)
            return Stream(self, await self._attended(request, lines))
        whole = responses.complete(self.service, self.shelf, body, owner)
        return _json(await self._attended(request, whole))

    async def _response(self, request: Request) -> Response:
        id, owner = request.path_params["id"], _owner(request)
        if request.method == "DELETE":
            self.shelf.drop(id, owner)
            return _json({"id": id, "object": "response", "deleted": True})
        return _json(self.shelf.get(id, owner).response)

    async def _input_items(self, request: Request) -> Response:
        return _json(responses.input_items(self.shelf.get(request.path_params["id"], _owner(request))))

    def _plain(self, answer: Callable[[Service, Any], Awaitable[dict[str, Any]]]) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            body = await self._body(request)
            return _json(await self._attended(request, answer(self.service, body)))

        return endpoint

    async def _models(self, request: Request) -> Response:
        name = request.path_params.get("name")
        return _json(plain.models(self.service) if name is None else plain.model(self.service, name))

    async def _health(self, request: Request) -> Response:
        stats = self.service.engine.stats
        status = "stopping" if self.service.closing else "ok"
        about = {"status": status, "model": self.service.name, "version": VERSION}
        queue = {"slots": stats.slots, "busy": stats.busy, "waiting": stats.waiting}
        return _json({**about, **queue}, 503 if self.service.closing else 200)

    async def _metrics(self, request: Request) -> Response:
        text = self.metrics.text(self.service.engine.stats)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    # ---- around them

    async def _body(self, request: Request) -> dict[str, Any]:
        """The JSON object that a request carries. ApiError: too large, too slow, no JSON, no object."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(
                f"the body is {kind[:60] or 'of no type'}",
                because="this server reads JSON",
                fix="send Content-Type: application/json",
                status=415,
                code="unsupported_media_type",
            )
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                data = await self._read(request)
        except TimeoutError:
            raise ApiError(
                "the body did not arrive",
                because=f"it took more than {self.limits.body_seconds:g} seconds",
                fix="send it faster",
                status=408,
                code="timeout",
                headers={"Connection": "close"},
            ) from None
        return parse_body(data)

    async def _read(self, request: Request) -> bytes:
        limit = self.limits.body
        declared = request.headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and (len(declared) > 30 or int(declared) > limit):
            raise _too_large(limit)
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
        return b"".join(parts)

    async def _attended(self, request: Request, work: Awaitable[T]) -> T:
        """Wait for an answer while its client waits too: if that leaves, the work is cancelled."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(_gone(request.receive))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ClientDisconnect
        finally:
            gone.cancel()
            task.cancel()
            await asyncio.gather(gone, task, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def parse_body(data: bytes) -> dict[str, Any]:
    """A JSON object from bytes: strict JSON (no NaN), text that is valid Unicode. ApiError (400)."""

    def no_constant(text: str) -> NoReturn:
        raise ValueError(f"{text} is no JSON")

    try:
        body = json.loads(data.decode("utf-8"), parse_constant=no_constant)
        if b"\\u" in data:  # half a surrogate pair is no character, and could not be sent on
            json.dumps(body, ensure_ascii=False).encode("utf-8")
    except UnicodeError:
        raise _malformed("it has bytes or escapes that are no characters") from None
    except RecursionError:
        raise _malformed("it is nested too deep") from None
    except ValueError as error:
        raise _malformed(str(error)[:200]) from None
    if not isinstance(body, dict):
        raise _malformed("it is no object")
    return body


def _malformed(why: str) -> ApiError:
    return ApiError("the body cannot be read", because=why, fix="send a JSON object", code="invalid_json")


def _too_large(limit: int) -> ApiError:
    return ApiError(
        "the body is too large",
        because=f"{limit} bytes are allowed",
        fix="shorten it",
        status=413,
        code="request_too_large",
        headers={"Connection": "close"},
    )


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse(body, status, headers=headers)


def _owner(request: Request) -> str:
    """Whose request this is: a word that tells API keys apart."""
    return str(request.scope.get("whit.owner", ""))


async def _api_error(request: Request, error: ApiError) -> Response:
    return _json(error.body(), error.status, error.headers)


async def _nothing(request: Request) -> Response:
    raise HTTPException(404)


async def _http_error(request: Request, error: HTTPException) -> Response:
    if error.status_code == 405:
        text = ApiError(
            f"{request.method} {request.url.path[:100]}",
            because="this URL takes other methods",
            fix=f"use {(error.headers or {}).get('Allow', 'another')}",
            status=405,
            code="method_not_allowed",
        )
    else:
        text = ApiError(
            f"{request.method} {request.url.path[:100]}",
            because="there is nothing at this URL",
            fix="see /v1/models, /v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings",
            status=error.status_code,
            code="not_found",
        )
    return _json(text.body(), error.status_code, dict(error.headers or {}))


async def _page(request: Request) -> Response:
    page = resources.files("whit.llm") / "web" / "index.html"
    policy = (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(page.read_text(encoding="utf-8"), headers=headers)


# ---- streams -----------------------------------------------------------------------------------------------

Line = str | tuple[str, str]  # data, or (event, data)


class Stream(Response):
    """Server-sent events. The source is closed, which cancels its request, when the client leaves, or does
    not read for too long. An error on the way is sent as an event, since the status is out."""

    def __init__(self, server: Server, lines: Lines[Any]) -> None:
        self.server, self.lines = server, lines
        self.sending, self.since = 0, time.monotonic()  # what is being sent, and when that last changed
        self.background = None
        self.status_code = 200
        self.raw_headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(send))
        others = [asyncio.ensure_future(_gone(receive)), asyncio.ensure_future(self._watch(send))]
        try:
            await asyncio.wait({writing, *others}, return_when=asyncio.FIRST_COMPLETED)
            if not writing.done():
                raise ClientDisconnect
            writing.result()
        finally:
            for task in (writing, *others):
                task.cancel()
            await asyncio.gather(writing, *others, return_exceptions=True)
            await self.lines.aclose()

    async def _write(self, send: Send) -> None:
        await self._send(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for line in self.lines:
                await self._send(send, _part(_encoded(line).encode("utf-8")))
        except ApiError as error:
            failure = json.dumps(error.body(), ensure_ascii=False)
            await self._send(send, _part(_encoded(failure).encode("utf-8")))
        await self._send(send, _part(b"", False))

    async def _send(self, send: Send, message: Message) -> None:
        self.sending, self.since = self.sending + 1, time.monotonic()
        await send(message)
        self.sending, self.since = self.sending - 1, time.monotonic()

    async def _watch(self, send: Send) -> None:
        """Ends when the client has not read for too long. Where there is nothing to say for long, sends a
        comment: a dead connection is noticed that way. One task for all of that, since lines are many."""
        limits = self.server.limits
        while True:
            await asyncio.sleep(min(limits.stall_seconds, limits.keepalive_seconds) / 4)
            silent = time.monotonic() - self.since
            if self.sending and silent > limits.stall_seconds:
                return
            if not self.sending and silent > limits.keepalive_seconds:
                await self._send(send, _part(b": waiting\n\n"))


def _part(body: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def _encoded(line: Line) -> str:
    """A line as an event; JSON has no line breaks of its own, so that one data line is enough."""
    return f"data: {line}\n\n" if isinstance(line, str) else f"event: {line[0]}\ndata: {line[1]}\n\n"


# ---- around everything -------------------------------------------------------------------------------------


class Guard:
    """Outermost: keys, hosts, the number of requests at once, cross-origin headers, accounts."""

    OPEN = frozenset({"/", "/health"})

    def __init__(self, app: ASGIApp, server: Server, paths: list[str]) -> None:
        self.app, self.server = app, server
        self.paths = sorted(paths, key=len, reverse=True)
        self.keys = {_digest(key): str(i) for i, key in enumerate(server.keys)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        metrics, path, start = self.server.metrics, self._route(scope["path"]), time.monotonic()
        status = 0
        headers = self._cors(scope)

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        metrics.in_flight += 1
        try:
            await self._admit(scope, receive, counted)
        except ClientDisconnect:
            metrics.disconnects += 1
            status = 499
        finally:
            metrics.in_flight -= 1
            metrics.finished(path, status, time.monotonic() - start)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "OPTIONS" and self.server.cors:
            await Response(status_code=204)(scope, receive, send)
            return
        try:
            self._check(scope)
        except ApiError as error:
            await _json(error.body(), error.status, error.headers)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        host = Request(scope).headers.get("host", "").lower()
        if self.server.hosts and re.sub(r":\d+$", "", host) not in self.server.hosts:
            raise ApiError(
                f"a request to the host {host[:100]!r}",
                because="a page of another site may have sent it",
                fix="use localhost, or start the server with --allow-host",
                status=403,
                code="wrong_host",
            )
        if scope["path"] in self.OPEN:
            return
        if self.keys:
            scope["whit.owner"] = self._owner(Request(scope).headers.get("authorization", ""))
        if self.server.metrics.in_flight > self.server.limits.in_flight:
            raise ApiError(
                "the server is busy", "too many requests are on their way", "try again later",
                status=429, code="server_busy", headers={"Retry-After": "2"},
            )  # fmt: skip
        if self.server.service.closing and scope["method"] == "POST":
            raise ApiError(
                "the server is shutting down", "it takes nothing new", "try again later",
                status=503, code="shutting_down", headers={"Connection": "close"},
            )  # fmt: skip

    def _owner(self, header: str) -> str:
        """Which key a request has. Digests are looked up: no time tells how much of a guess was right."""
        kind, _, key = header.partition(" ")
        owner = self.keys.get(_digest(key.strip())) if kind.lower() == "bearer" else None
        if owner is None:
            raise ApiError(
                "the API key is missing" if not header else "the API key is wrong",
                because="this server asks for one",
                fix="send Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return owner

    def _cors(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        origin = Request(scope).headers.get("origin", "") if self.server.cors else ""
        if not origin or not ("*" in self.server.cors or origin in self.server.cors):
            return []
        return [
            (b"access-control-allow-origin", origin.encode("latin-1", "replace")),
            (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
            (b"access-control-allow-headers", b"*, Authorization, Content-Type"),
            (b"vary", b"Origin"),
        ]

    def _route(self, path: str) -> str:
        """The route of a path: accounts by path would grow with what clients make up."""
        if path in self.paths:
            return path
        for route in self.paths:
            if "{" in route and path.startswith(route[: route.index("{")]):
                return route
        return "other"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


async def _inner_error(request: Request, error: Exception) -> Response:
    shown = ApiError(
        "the server failed",
        because="of a mistake in it, which its log shows",
        fix="try again, and report the log",
        status=500,
        code="internal_error",
    )
    return _json(shown.body(), 500)


def application(
    service: Service,
    *,
    keys: Sequence[str] = (),
    limits: Limits | None = None,
    cors: Sequence[str] = (),
    hosts: Sequence[str] = (),
) -> ASGIApp:
    """An ASGI application of a service. keys: one of them must come with each request, if there are any.
    cors: origins of other sites whose pages may use the server ("*": all). hosts: names under which the
    server may be asked (none: any)."""
    return Server(service, tuple(keys), limits or Limits(), tuple(cors), tuple(hosts)).application()


# ---- running -----------------------------------------------------------------------------------------------


class _Process(uvicorn.Server):
    """uvicorn, but a signal first lets answers end for a while, and then cuts them off cleanly."""

    def __init__(self, config: uvicorn.Config, service: Service, grace: float) -> None:
        super().__init__(config)
        self.service, self.grace = service, grace
        self.loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        delay = 0.0 if self.should_exit else self.grace  # who asks twice is in a hurry
        self.service.closing = self.should_exit = True
        if (loop := self.loop) is not None:
            loop.call_soon_threadsafe(lambda: loop.call_later(delay, self.service.stop))


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. OSError if the address is taken or not this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # a peer that takes nothing for so long is cut off
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 120_000)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def serve(
    service: Service,
    listener: socket.socket,
    *,
    keys: Sequence[str] = (),
    limits: Limits | None = None,
    cors: Sequence[str] = (),
    hosts: Sequence[str] = (),
    log_level: str = "warning",
    at_end: Callable[[], None] | None = None,
) -> None:
    """Answer requests until SIGTERM or SIGINT, then end cleanly: `at_end` is called and the engine closed."""
    limits = limits or Limits()
    config = uvicorn.Config(
        application(service, keys=keys, limits=limits, cors=cors, hosts=hosts),
        log_level=log_level,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(limits.grace) + 5,
        lifespan="off",
        ws="none",
    )
    try:
        _Process(config, service, limits.grace).run(sockets=[listener])
        if at_end is not None:
            at_end()
    finally:
        service.engine.close()
