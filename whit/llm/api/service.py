"""A model with all that belongs to it, as the endpoints see it; and the way from an engine's events to pieces
of an answer: text, reasoning, tool calls."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from whit.helpers import ArgumentError, WhitError
from whit.llm.api.errors import ApiError
from whit.llm.chat import thinking_open
from whit.llm.engine import Engine, EngineBusy, EngineClosed, Event, Request, Usage
from whit.llm.sampling import SamplingParams

T = TypeVar("T")


class Tokenizer(Protocol):
    """What the endpoints ask of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, *, special: bool = True, bos: bool | None = None) -> list[int]: ...

    def decode(self, ids: Sequence[int], /, *, special: bool = False) -> str: ...

    def token_bytes(self, id: int, /) -> bytes: ...


class Template(Protocol):
    """What the endpoints ask of a chat template."""

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str: ...


class Encoder(Protocol):
    """What the endpoints ask of a text encoder."""

    dimensions: int
    max_tokens: int
    vocab_size: int

    def tokens(self, texts: Sequence[str]) -> list[list[int]]: ...

    def encode_tokens(self, rows: Sequence[Sequence[int]]) -> Any: ...


# ---- pieces of an answer -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer: `kind` "content" or "reasoning" with text, or "call": the name of a tool's call
    (in its first piece, with its id), or more text of its arguments."""

    kind: str
    text: str = ""
    name: str | None = None
    id: str | None = None


class Parser(Protocol):
    """Cuts the text of a model into pieces while it arrives."""

    def push(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]: ...


class PlainParser:
    """All text is content."""

    def push(self, text: str) -> list[Piece]:
        return [Piece("content", text)] if text else []

    def finish(self) -> list[Piece]:
        return []


class ForcedCall:
    """The text is one call, {"name": …, "arguments": {…}}: what a grammar makes of `tool_choice` "required".

    >>> parser = ForcedCall()
    >>> [p.text or p.name for c in '{"name": "f", "arguments": {"x": 1}}' for p in parser.push(c)][:4]
    ['f', '{', '"', 'x']
    """

    _HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*')

    def __init__(self) -> None:
        self.held, self.open = "", False

    def push(self, text: str) -> list[Piece]:
        self.held += text
        pieces: list[Piece] = []
        if not self.open:
            head = self._HEAD.match(self.held)
            if head is None or head.end() == len(self.held):
                return []
            self.open, self.held = True, self.held[head.end() :]
            pieces.append(Piece("call", name=json.loads(head[1]), id=call_id()))
        # the last brace closes the outer object: it is known to be the last only when something follows it
        body = self.held.rstrip()
        keep = body[:-1] if body.endswith("}") else self.held
        keep = keep.rstrip() if body.endswith("}") else keep
        self.held = self.held[len(keep) :]
        return [*pieces, Piece("call", keep)] if keep else pieces

    def finish(self) -> list[Piece]:
        """What remains after all is the outer brace; a text that never became a call is content."""
        if self.open:
            return []
        return [Piece("content", self.held)] if self.held else []


def call_id() -> str:
    """A new id of a tool call."""
    return "call_" + secrets.token_hex(12)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's text and bytes, its logarithm of probability, and those of the most likely tokens."""

    token: str
    bytes: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()

    def json(self) -> dict[str, Any]:
        """As chat answers show it."""
        own = {"token": self.token, "logprob": self.logprob, "bytes": list(self.bytes)}
        tops = [{"token": t.token, "logprob": t.logprob, "bytes": list(t.bytes)} for t in self.top]
        return {**own, "top_logprobs": tops}


@dataclass(frozen=True, slots=True)
class Step:
    """What one event of the engine brings; `finish_reason` and `usage` in the last one."""

    pieces: tuple[Piece, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None
    reasoning_tokens: int = 0


@dataclass
class Answer:
    """A whole answer, gathered from steps."""

    content: str = ""
    reasoning: str = ""
    calls: list[Piece] = field(default_factory=list)  # text: all of the arguments
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""
    usage: Usage = field(default_factory=Usage)
    reasoning_tokens: int = 0

    def add(self, step: Step) -> None:
        """Take in a step."""
        for piece in step.pieces:
            if piece.kind == "content":
                self.content += piece.text
            elif piece.kind == "reasoning":
                self.reasoning += piece.text
            elif piece.name is not None:
                self.calls.append(piece)
            else:
                self.calls[-1] = replace(self.calls[-1], text=self.calls[-1].text + piece.text)
        self.logprobs += step.logprobs
        if step.finish_reason is not None:
            self.finish_reason, self.usage = step.finish_reason, step.usage or Usage()
            self.reasoning_tokens = step.reasoning_tokens


# ---- the service -------------------------------------------------------------------------------------------


class Service:
    """A model behind the endpoints.

    template: None for a model that only completes text. parser: makes a parser of the model's own format,
    given the tools, and whether the prompt ends inside of reasoning. bos: the token that prompts begin with.
    grammar: makes a grammar of a JSON schema (True: any object). images: "refuse" or "note". max_tokens: the
    most that a request may write.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        name: str,
        created: int = 0,
        template: Template | None = None,
        parser: Callable[[list[dict[str, Any]], bool], Parser] = lambda tools, thinking: PlainParser(),
        bos: int | None = None,
        grammar: Callable[[Any], Any] | None = None,
        encoder: Encoder | None = None,
        encoder_name: str = "",
        images: str = "refuse",
        max_tokens: int | None = None,
        max_choices: int = 16,
    ) -> None:
        self.engine, self.tokenizer, self.template, self.parser = engine, tokenizer, template, parser
        self.name, self.created, self.images, self.bos = name, created, images, bos
        self.encoder, self.encoder_name = encoder, encoder_name
        self._grammar, self.max_tokens, self.max_choices = grammar, max_tokens, max_choices
        self.closing = False
        self.live: set[Request] = set()  # on their way
        self.observe: Callable[[float], None] = lambda seconds: None  # is told each time to a first token
        # the encoder and its memory serve one request at a time
        self.encoder_lock = asyncio.Lock()

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def context(self) -> int:
        return self.engine.context

    def allowed(self, max_tokens: int | None) -> int | None:
        """The tokens that a request may write, given what it asks for."""
        limits = [limit for limit in (max_tokens, self.max_tokens) if limit is not None]
        return min(limits) if limits else None

    def check_model(self, name: str, embeddings: bool = False) -> None:
        """ApiError unless this model is served (for embeddings, or for text)."""
        if name not in (self.name, self.encoder_name) or not name:
            raise ApiError(
                f"the model {name[:100]!r} does not exist",
                because="this server does not have it",
                fix="use one that /v1/models lists",
                status=404,
                param="model",
                code="model_not_found",
            )
        if name != (self.encoder_name if embeddings else self.name):
            raise ApiError(
                f"the model {name!r} cannot do this",
                because="it makes embeddings only" if not embeddings else "it makes no embeddings",
                fix="use another that /v1/models lists",
                param="model",
                code="unsupported_model",
            )

    def grammar(self, schema: Any, param: str) -> Any:
        """The grammar of a JSON schema. ApiError (400) for a schema that is wrong or too large."""
        if self._grammar is None:
            raise ApiError(
                f"{param} asks for structured output",
                because="this server was started without support for it",
                fix="install whit[llm]",
                param=param,
                code="unsupported_parameter",
            )
        try:
            if len(json.dumps(schema)) > 256 << 10:
                raise ArgumentError("a schema", because="it is longer than 256 KB", fix="shorten it")
            return self._grammar(schema)
        except (WhitError, ValueError, RecursionError) as error:
            why = error.because if isinstance(error, WhitError) else str(error)
            raise ApiError(
                f"{param} has a schema that cannot be used",
                because=why[:1000] or type(error).__name__,
                fix="correct the schema",
                param=param,
                code="invalid_schema",
            ) from None

    async def prompt(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], **extra: Any
    ) -> tuple[list[int], bool]:
        """The tokens of a conversation, and whether they end inside of reasoning. Computed in a thread: other
        answers go on meanwhile."""
        if self.template is None:
            raise ApiError(
                f"the model {self.name!r} cannot chat",
                because="its file has no chat template",
                fix="use /v1/completions",
                param="model",
                code="unsupported_model",
            )
        return await asyncio.to_thread(self._prompt, self.template, messages, tools, extra)

    def _prompt(
        self,
        template: Template,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        extra: dict[str, Any],
    ) -> tuple[list[int], bool]:
        try:
            text = template.render(messages, tools=tools or None, add_generation_prompt=True, **extra)
        except WhitError as error:
            raise ApiError(
                "messages do not fit the model's chat template",
                because=error.because or str(error),
                fix=error.fix or "change the roles or their order",
                param="messages",
                code="template_error",
            ) from None
        tokens = self.tokenizer.encode(text, special=True, bos=False)
        if self.bos is not None and tokens[:1] != [self.bos]:
            tokens.insert(0, self.bos)
        return tokens, thinking_open(text)

    async def encode(self, text: str, *, special: bool = True, bos: bool | None = None) -> list[int]:
        """The tokens of a text, computed in a thread."""
        return await asyncio.to_thread(lambda: self.tokenizer.encode(text, special=special, bos=bos))

    def submit(self, prompt: list[int], params: SamplingParams, param: str) -> Request:
        """Hand a prompt to the engine. ApiError: too long (400), too many waiting (429), closed (503)."""
        if len(prompt) >= self.context:
            raise ApiError(
                f"{param} has {len(prompt)} tokens",
                because=f"the context of {self.name} holds {self.context}, the answer included",
                fix="shorten it",
                param=param,
                code="context_length_exceeded",
            )
        if self.closing:
            raise stopping()
        try:
            request = self.engine.submit(prompt, params)
        except EngineBusy as error:
            raise ApiError(
                "the server is busy", error.because, error.fix, status=429, code="server_busy",
                headers={"Retry-After": "2"},
            ) from None  # fmt: skip
        except EngineClosed as error:
            raise ApiError(
                "the server cannot answer", error.because, error.fix, status=503, code="closed"
            ) from None
        except ArgumentError as error:
            raise ApiError(f"{param} is not accepted", error.because, error.fix, param=param) from None
        self.live.add(request)
        return request

    def logprob(self, token: int, value: float, top: tuple[tuple[int, float], ...] = ()) -> TokenLogprob:
        """A token's entry; JSON has no infinity, so that what is impossible gets -9999."""
        data = self.tokenizer.token_bytes(token)
        inner = tuple(self.logprob(other, score) for other, score in top)
        return TokenLogprob(data.decode("utf-8", "replace"), data, max(value, -9999.0), inner)

    async def steps(self, request: Request, parser: Parser) -> AsyncGenerator[Step, None]:
        """A request's events as steps. Whoever stops listening cancels the request."""
        kind, reasoned, called, first = "content", 0, False, True
        try:
            async for event in request:
                if first and event.token is not None:
                    first = False
                    self.observe((request.first_token_at or time.monotonic()) - request.created)
                pieces = parser.push(event.text)
                if event.finish_reason is not None:
                    pieces += parser.finish()
                kind = pieces[-1].kind if pieces else kind
                called = called or any(piece.kind == "call" for piece in pieces)
                reasoned += event.token is not None and kind == "reasoning"
                yield self._step(event, tuple(pieces), called, reasoned)
        except ApiError:
            raise
        except (
            WhitError
        ) as error:  # the engine ended, or this request failed: its grammar grew too complex, say
            status = 503 if isinstance(error, EngineClosed) else 400
            code = "closed" if status == 503 else "failed"
            why = f"{error.asked}: {error.because}"
            raise ApiError("the answer broke off", why, error.fix, status=status, code=code) from None
        finally:
            request.cancel()
            self.live.discard(request)

    def _step(self, event: Event, pieces: tuple[Piece, ...], called: bool, reasoned: int) -> Step:
        scores: tuple[TokenLogprob, ...] = ()
        if event.token is not None and event.logprob is not None:
            scores = (self.logprob(event.token, event.logprob, event.top_logprobs),)
        reason = event.finish_reason
        if reason == "cancelled":
            raise stopping()
        if reason == "stop" and called:
            reason = "tool_calls"
        return Step(pieces, scores, reason, event.usage, reasoned)

    def stop(self) -> None:
        """Cancel all that is on its way, and take nothing new."""
        self.closing = True
        for request in list(self.live):
            request.cancel()


def stopping() -> ApiError:
    """The error of an answer that the end of the server cut off."""
    return ApiError(
        "the answer was cut off",
        because="the server is shutting down",
        fix="send the request again later",
        status=503,
        code="shutting_down",
    )


async def gather(steps: AsyncGenerator[Step, None]) -> Answer:
    """The whole answer."""
    answer = Answer()
    async with contextlib.aclosing(steps):
        async for step in steps:
            answer.add(step)
    return answer


class Lines(AsyncIterator[T]):
    """A stream of an answer that belongs to requests. Closing it cancels them, started or not."""

    def __init__(
        self, service: Service, requests: Sequence[Request], source: AsyncGenerator[T, None]
    ) -> None:
        self.service, self.requests, self.source = service, requests, source

    async def __anext__(self) -> T:
        return await anext(self.source)

    async def aclose(self) -> None:
        """End it."""
        drop(self.service, self.requests)
        await self.source.aclose()


def drop(service: Service, requests: Iterable[Request]) -> None:
    """Cancel requests whose answers nobody takes."""
    for request in requests:
        request.cancel()
        service.live.discard(request)


async def merged(streams: Iterable[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of several streams as they come, each with its stream's number. The first error ends all."""
    given = list(streams)
    if len(given) == 1:  # the usual case needs no tasks
        async with contextlib.aclosing(given[0]) as only:
            async for item in only:
                yield 0, item
        return
    async with contextlib.aclosing(_merged(given)) as pairs:
        async for pair in pairs:
            yield pair


async def _merged(streams: list[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue(64)

    async def pump(number: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for item in stream:
                    await queue.put((number, item))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
