"""Many requests on one model at once.

One thread owns the model. Each turn it takes in new requests, reads one chunk of one waiting prompt, and then
makes one token for every request that has read its prompt (continuous batching), so that a long prompt delays
the others by a chunk and not by its length.

    engine = Engine(model, tokenizer, slots=8)
    request = engine.submit(tokenizer.encode("Once"), SamplingParams(max_tokens=20))
    for event in request:                    # or: async for event in request
        print(event.text, end="")
    engine.close()
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from whit.helpers import ArgumentError, WhitError
from whit.llm.sampling import SamplingParams
from whit.llm.stops import Decoder, StopText

if TYPE_CHECKING:
    from whit.tensor import Tensor

T = TypeVar("T")


class EngineBusy(WhitError, RuntimeError):
    """More requests are waiting than the engine was told to keep."""


class EngineClosed(WhitError, RuntimeError):
    """The engine was closed, or broke down, before the request was done."""


class Cache(Protocol):
    """Keys and values of several sequences, one a slot."""

    @property
    def nbytes(self) -> int: ...

    def save(self, slot: int, length: int) -> bytes:
        """The first `length` positions of a slot."""
        ...

    def restore(self, slot: int, length: int, data: bytes) -> None:
        """Put back what `save` gave."""
        ...


class Model(Protocol):
    """What the engine asks of a model."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context(self) -> int:
        """The most positions of a sequence."""
        ...

    def new_cache(self, slots: int, context: int) -> Cache: ...

    def forward(
        self, tokens: Tensor, start: Sequence[int], cache: Cache, slots: Sequence[int], last: Sequence[int]
    ) -> Tensor:
        """Read `tokens` (B, T) int32 into the cache: row b at positions start[b] … of sequence slots[b], of
        which the first last[b] + 1 count (the rest is padding, and is overwritten later). Logits (B, V) of
        the tokens number last[b]."""
        ...


class Tokenizer(Protocol):
    """What the engine asks of a tokenizer."""

    @property
    def end_ids(self) -> frozenset[int]: ...

    def stream(self) -> Decoder: ...


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request: read (`cached` of them were known from earlier requests), and written."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """A step of a request: a token and the text that it sets free (perhaps none: an unfinished character, or
    the beginning of a stop string). The last event has a `finish_reason`, `usage`, no token, and the rest of
    the text.

    finish_reason: "stop" (end-of-text token, stop string, or the grammar is complete), "length",
    "cancelled". logprob: the natural logarithm of the token's probability before temperature;
    top_logprobs: (token, logprob) of the most likely ones.
    """

    token: int | None = None
    text: str = ""
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request as a whole."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    usage: Usage


class Request:
    """A request on its way: iterate over it, from any one thread or asyncio task, for its events.

    Made by `Engine.submit`. If the engine breaks down, iteration raises EngineClosed.
    """

    def __init__(
        self, id: int, prompt: tuple[int, ...], params: SamplingParams, wake: Callable[[], None]
    ) -> None:
        self.id, self.prompt, self.params = id, prompt, params
        self.created = time.monotonic()
        self.first_token_at: float | None = None
        self.cancelled = False
        self.finished = False  # the last event exists
        self._wake = wake
        self._events: deque[Event | BaseException] = deque()
        self._ready = threading.Condition()
        self._listener: Callable[[], None] | None = None
        self._over = False  # the last event was taken

    def cancel(self) -> None:
        """End it soon; the last event says "cancelled" (if it was not done already). Safe from any thread."""
        self.cancelled = True
        self._wake()

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        with self._ready:
            while not self._events and not self._over:
                self._ready.wait()
        return self._take(StopIteration)

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while True:
            loop = asyncio.get_running_loop()
            arrived = asyncio.Event()
            with self._ready:
                if self._events or self._over:
                    self._listener = None
                    break
                self._listener = _from_thread(loop, arrived)
            await arrived.wait()
        return self._take(StopAsyncIteration)

    def result(self) -> Completion:
        """Wait for the end."""
        text, tokens = [], []
        for event in self:
            text.append(event.text)
            if event.token is not None:
                tokens.append(event.token)
            if event.finish_reason is not None:
                assert event.usage is not None
                return Completion("".join(text), tuple(tokens), event.finish_reason, event.usage)
        raise ArgumentError(
            "Request.result()", because="the events were taken already", fix="call it once, or iterate"
        )

    def _take(self, end: type[Exception]) -> Event:
        with self._ready:
            if not self._events:
                raise end
            event = self._events.popleft()
            self._over = isinstance(event, BaseException) or event.finish_reason is not None
        if isinstance(event, BaseException):
            raise event
        return event

    def _put(self, event: Event | BaseException) -> None:
        with self._ready:
            self._events.append(event)
            self.finished = isinstance(event, BaseException) or event.finish_reason is not None
            listener, self._listener = self._listener, None
            self._ready.notify_all()
        if listener is not None:
            listener()


def _from_thread(loop: asyncio.AbstractEventLoop, arrived: asyncio.Event) -> Callable[[], None]:
    def tell() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(arrived.set)

    return tell


@dataclass
class Stats:
    """Counters since the engine started, and its present state."""

    slots: int = 0
    busy: int = 0
    waiting: int = 0
    requests: int = 0  # finished
    cancelled: int = 0
    prompt_tokens: int = 0  # read, cached ones aside
    cached_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    cache_bytes: int = 0
    prefix_bytes: int = 0


@dataclass
class _Slot:
    """A sequence in the cache: which tokens it holds, and the request that it serves."""

    index: int
    tokens: list[int] = field(default_factory=list)  # those in the cache
    request: Request | None = None
    text: StopText | None = None
    pending: list[int] = field(default_factory=list)  # tokens of the prompt still to be read
    written: int = 0
    cached: int = 0
    limit: int = 0


class Engine:
    """Serves requests on `slots` sequences of at most `context` positions each."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        *,
        slots: int = 4,
        context: int | None = None,
        chunk: int = 256,
        memory_limit: int | None = None,
        max_waiting: int = 1024,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.context = min(context or model.context, model.context)
        self.chunk, self.max_waiting, self.memory_limit = chunk, max_waiting, memory_limit
        self.slots = [_Slot(index) for index in range(slots)]
        self._stats = Stats(slots=slots)
        self._waiting: deque[Request] = deque()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._failure: BaseException | None = None
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name="whit-engine", daemon=True)
        self._thread.start()

    # ---- the callers' side: any thread

    def submit(self, prompt: Sequence[int], params: SamplingParams | None = None) -> Request:
        """Queue a prompt (token numbers). ArgumentError if it is empty, holds what is no token, or leaves no
        room in the context; EngineBusy if too many are waiting; EngineClosed."""
        params = params or SamplingParams()
        tokens = tuple(prompt)
        self._check(tokens, params)
        with self._changed:
            if self._closing or self._failure is not None:
                raise self._closed()
            if len(self._waiting) >= self.max_waiting:
                raise EngineBusy(
                    "submit", because=f"{len(self._waiting)} requests are waiting", fix="try again later"
                )
            request = Request(next(self._numbers), tokens, params, self._wake)
            self._waiting.append(request)
            self._changed.notify_all()
        return request

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the engine's thread between two steps, and wait for what it returns."""
        future: Future[T] = Future()
        with self._changed:
            if self._closing or self._failure is not None:
                raise self._closed()
            self._calls.append((function, future))
            self._changed.notify_all()
        return future.result()

    @property
    def stats(self) -> Stats:
        """A copy of the counters."""
        with self._changed:
            values = {name: getattr(self._stats, name) for name in Stats.__dataclass_fields__}
            values["busy"] = sum(1 for slot in self.slots if slot.request is not None)
            values["waiting"] = len(self._waiting)
            return Stats(**values)

    def close(self) -> None:
        """Cancel everything and end the thread. Calling it again does nothing."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, tokens: tuple[int, ...], params: SamplingParams) -> None:
        if not tokens:
            raise ArgumentError(
                "submit an empty prompt", because="there is nothing to go on from", fix="pass a token"
            )
        size = self.model.vocab_size
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
                raise ArgumentError(
                    f"submit a prompt with token {token!r}",
                    because=f"tokens are numbers from 0 to {size - 1}",
                    fix="encode the text with this model's tokenizer",
                )
        if len(tokens) >= self.context:
            raise ArgumentError(
                f"submit a prompt of {len(tokens)} tokens",
                because=f"the context holds {self.context}, the answer included",
                fix="shorten the prompt, or start the engine with a longer context",
            )

    def _closed(self) -> EngineClosed:
        why = f"it broke down: {self._failure}" if self._failure is not None else "it was closed"
        return EngineClosed("use the engine", because=why, fix="start another")

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # ---- the engine's thread

    def _run(self) -> None:
        try:
            self._cache = self.model.new_cache(len(self.slots), self.context)
            while self._wait_for_work():
                self._turn()
        except BaseException as error:
            self._failure = error
        self._end_all()

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not (self._closing or self._waiting or self._calls or any(s.request for s in self.slots)):
                self._changed.wait()
            return not self._closing

    def _turn(self) -> None:
        while self._calls:
            function, future = self._calls.popleft()
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
        self._admit()
        self._prefill()
        self._decode()

    def _end_all(self) -> None:
        with self._changed:
            self._closing = True
            waiting, self._waiting = list(self._waiting), deque()
            calls, self._calls = list(self._calls), deque()
        for slot in self.slots:
            if slot.request is not None:
                self._finish(slot, "cancelled")
        for request in waiting:
            self._drop(request)
        for _, future in calls:
            future.set_exception(self._closed())

    def _drop(self, request: Request) -> None:
        """End a request that never got a slot."""
        if self._failure is not None:
            request._put(self._closed())
        else:
            request._put(Event(finish_reason="cancelled", usage=Usage(len(request.prompt))))

    def _admit(self) -> None:
        """Give waiting requests the free slots."""
        for slot in self.slots:
            if slot.request is not None and slot.request.cancelled:
                self._finish(slot, "cancelled")
        for slot in self.slots:
            while slot.request is None and self._waiting:
                with self._changed:
                    request = self._waiting.popleft()
                if request.cancelled:
                    self._drop(request)
                else:
                    self._start(slot, request)

    def _start(self, slot: _Slot, request: Request) -> None:
        slot.request = request
        slot.text = StopText(self.tokenizer.stream(), request.params.stop)
        slot.tokens, slot.pending = [], list(request.prompt)
        slot.written = slot.cached = 0
        room = self.context - len(request.prompt)
        wanted = request.params.max_tokens
        slot.limit = room if wanted is None else min(room, wanted)
        if slot.limit == 0:
            self._finish(slot, "length")

    def _prefill(self) -> None:
        """Read one chunk of the prompt that waits longest; the last chunk gives the first token."""
        reading = [slot for slot in self.slots if slot.request is not None and len(slot.pending) > 1]
        if not reading:
            return
        slot = min(reading, key=lambda s: s.request.id if s.request else 0)
        part = slot.pending[: min(self.chunk, len(slot.pending) - 1)]
        self._forward([slot], [part])
        del slot.pending[: len(part)]
        self._stats.prompt_tokens += len(part)

    def _decode(self) -> None:
        ready = [slot for slot in self.slots if slot.request is not None and len(slot.pending) == 1]
        for slot in ready:
            logits = self._forward([slot], [slot.pending])
            token = int(logits.argmax(-1).item())
            slot.pending = [token]
            self._emit(slot, token)

    def _forward(self, slots: list[_Slot], parts: list[list[int]]) -> Tensor:
        from whit.tensor import Tensor

        tokens = Tensor(parts, dtype="int32")
        logits = self.model.forward(
            tokens,
            [len(slot.tokens) for slot in slots],
            self._cache,
            [slot.index for slot in slots],
            [len(part) - 1 for part in parts],
        )
        for slot, part in zip(slots, parts):
            slot.tokens += part
        return logits

    def _emit(self, slot: _Slot, token: int) -> None:
        request, text = slot.request, slot.text
        assert request is not None and text is not None
        if request.first_token_at is None:
            request.first_token_at = time.monotonic()
        slot.written += 1
        self._stats.generated_tokens += 1
        if token in self.tokenizer.end_ids and not request.params.ignore_end:
            self._finish(slot, "stop")
            return
        request._put(Event(token=token, text=text.push(token)))
        if text.stopped:
            self._finish(slot, "stop")
        elif slot.written >= slot.limit:
            self._finish(slot, "length")

    def _finish(self, slot: _Slot, reason: str) -> None:
        request, text = slot.request, slot.text
        assert request is not None and text is not None
        slot.request, slot.text, slot.pending = None, None, []
        if self._failure is not None:
            request._put(self._closed())
            return
        self._stats.requests += 1
        self._stats.cancelled += reason == "cancelled"
        usage = Usage(len(request.prompt), slot.written, slot.cached)
        request._put(Event(text=text.flush(), finish_reason=reason, usage=usage))


def fresh_seed() -> int:
    """A seed for a request that has none."""
    return int.from_bytes(os.urandom(8), "little")
