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

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from whit.helpers import ArgumentError, WhitError
from whit.llm.grammar import GrammarError
from whit.llm.prefix import BLOCK, PrefixStore, fingerprint, position_bytes
from whit.llm.sampling import Draw, RowState, Sampler, SamplingParams
from whit.llm.slots import Slot, SlotTable, Work
from whit.llm.speculate import MOST, Drafter, ModelDrafter, NgramDrafter
from whit.llm.stops import Decoder, StopText

if TYPE_CHECKING:
    import asyncio

    from whit.tensor import Tensor

T = TypeVar("T")
_WIDTHS = (1, 8, 32)  # numbers of tokens that short pieces of a prompt are padded to
_GUESSED = (4, 8, 16)  # the same where guesses are checked
_REHEARSED = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=1),
    SamplingParams(temperature=0.7, top_p=0.9),
)


class EngineBusy(WhitError, RuntimeError):
    """More requests are waiting than the engine was told to keep."""


class EngineClosed(WhitError, RuntimeError):
    """The engine was closed, or broke down, before the request was done."""


class Model(Protocol):
    """What the engine asks of a model."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context(self) -> int:
        """The most positions of a sequence."""
        ...

    def new_cache(self, slots: int, context: int) -> Any:
        """A `whit.llm.prefix.Cache`."""
        ...

    def forward(
        self,
        tokens: Sequence[Sequence[int]],
        start: Sequence[int],
        cache: Any,
        slots: Sequence[int],
        last: Sequence[int],
        *,
        every: bool = False,
        padded: bool = False,
    ) -> Tensor:
        """Read `tokens` (B, T) into the cache: row b at positions start[b] … of sequence slots[b]. Logits
        (B, V) of the tokens number last[b] (what follows is padding); with `every` (B, T, V) of all; with
        `padded` there may be more rows, which nobody reads."""
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
        import asyncio

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


class Engine:
    """Serves requests on `slots` sequences of at most `context` positions each.

    chunk:         tokens of a prompt that are read between two steps of the others
    memory_limit:  bytes for keys and values, the store of prefixes included (None: twice what the slots take)
    max_waiting:   requests that may wait for a slot
    speculate:     guess tokens: "ngram", or a smaller Model with the same vocabulary; None: do not
    speculate_for: guess only while at most so many requests are being written
    keep:          when a text fills the context, go on with its first `keep` tokens and the later half of the
                   others (None: the request ends with "length")
    Errors:        ArgumentError for numbers that cannot be, and when the slots do not fit into memory_limit
    """

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
        speculate: Model | str | None = None,
        speculate_for: int = 2,
        keep: int | None = None,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.context = min(context or model.context, model.context)
        self.chunk, self.max_waiting, self.keep = chunk, max_waiting, keep
        self._check_sizes(slots, chunk, context, keep)
        self._cache = model.new_cache(slots, self.context)
        self._store = PrefixStore(self._store_limit(memory_limit, slots))
        self._table = SlotTable(self._cache, slots, self._store)
        self._sampler = Sampler()
        self._drafter = self._make_drafter(speculate, slots)
        self._speculate_for = speculate_for
        self._stats = Stats(slots=slots, cache_bytes=self._cache.nbytes)
        self._waiting: deque[Request] = deque()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._failure: BaseException | None = None
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name="whit-engine", daemon=True)
        self._thread.start()

    def _check_sizes(self, slots: int, chunk: int, context: int | None, keep: int | None) -> None:
        if (
            slots < 1
            or self.context < 2
            or chunk < 1
            or (context is not None and context > self.model.context)
        ):
            raise ArgumentError(
                f"an engine with {slots} slots, a context of {context} and chunks of {chunk}",
                because=f"there is at least one slot, and the model's context is {self.model.context}",
                fix="choose other numbers",
            )
        if keep is not None and not 0 <= keep < self.context // 2:
            raise ArgumentError(
                f"an engine that keeps {keep} tokens",
                because=f"less than half of the context ({self.context}) can be kept",
                fix="choose a smaller number",
            )

    def _store_limit(self, memory_limit: int | None, slots: int) -> int:
        taken: int = self._cache.nbytes
        if memory_limit is None:
            return taken
        if taken > memory_limit:
            raise ArgumentError(
                f"an engine with a memory limit of {memory_limit} bytes",
                because=f"{slots} slots of {self.context} positions take {taken} bytes",
                fix="choose fewer slots, a shorter context, or a narrower type of cache",
            )
        return memory_limit - taken

    def _make_drafter(self, speculate: Model | str | None, slots: int) -> Drafter | None:
        if speculate is None:
            return None
        if speculate == "ngram":
            return NgramDrafter()
        if isinstance(speculate, str) or speculate.vocab_size != self.model.vocab_size:
            raise ArgumentError(
                f"speculate={speculate!r}" if isinstance(speculate, str) else "speculate with another model",
                because='it is "ngram", or a model with the same vocabulary',
                fix="choose one of these",
            )
        return ModelDrafter(speculate, slots, self.context, self.chunk)

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
        if threading.current_thread() is self._thread:
            return function()
        future: Future[T] = Future()
        with self._changed:
            if self._closing or self._failure is not None:
                raise self._closed()
            self._calls.append((function, future))
            self._changed.notify_all()
        return future.result()

    def warm_up(self, tell: Callable[[str], None] = lambda text: None) -> None:
        """Make the kernels and plans that requests will need, in the order of need, so that none waits for a
        compiler: for every number of tokens that is read at once and of requests that are written at once,
        greedy and drawn. Requests that come meanwhile are served in between. `tell` is called before each."""
        for rows, width, every in self._kinds():
            what = f"{rows} × {width} tokens" + (" that were guessed" if every else "")
            tell(what if width > 1 or every else f"the next token of {rows}")
            self.call(partial(self._rehearse, rows, width, every))

    def _kinds(self) -> list[tuple[int, int, bool]]:
        """The passes that requests may need: (requests, tokens of each, whether all logits are wanted)."""
        slots = len(self._table.slots)
        most = min(self.chunk, self.context)
        widths = [8, 1, 32, *[1 << n for n in range(6, most.bit_length() + 1) if 1 << n < 2 * most]]
        rows = [1 << n for n in range(1, slots.bit_length()) if 1 << n < slots]
        rows += [slots] if slots > 1 else []
        found = [(1, n, False) for n in widths]
        found += [(1, n, True) for n in _GUESSED] if self._drafter is not None else []
        return found + [(n, 1, False) for n in rows]

    def _rehearse(self, rows: int, width: int, every: bool) -> None:
        """A pass that leaves no trace: it writes behind the texts of slots, where nobody reads. Two times:
        the second one is recorded."""
        slots = sorted(self._table.slots, key=lambda slot: len(slot.tokens))[:rows]
        if any(len(slot.tokens) >= self.context for slot in slots):
            return
        for _ in range(2):
            logits = self.model.forward(
                [[0] * width] * rows, [len(slot.tokens) for slot in slots], self._cache,
                [slot.index for slot in slots], [0] * rows, every=every, padded=not every,
            )  # fmt: skip
            if every:
                self._sampler.most_likely(logits.reshape(logits.shape[1], logits.shape[2]))
                continue
            for params in _REHEARSED:
                self._sampler.sample(logits, [RowState(params) for _ in slots], list(range(rows)))

    @property
    def stats(self) -> Stats:
        """A copy of the counters."""
        with self._changed:
            values = {name: getattr(self._stats, name) for name in Stats.__dataclass_fields__}
            values["busy"] = len(self._table.slots) - len(self._table.free)
            values["waiting"] = len(self._waiting)
            values["prefix_bytes"] = self._store.nbytes
            return Stats(**values)

    def save_prefixes(self, path: str | Path) -> None:
        """Write the keys and values of all texts that are known to a file, all of it or nothing."""

        def save() -> None:
            for slot in self._table.slots:
                self._table.push_out(slot)
            self._store.save(path, fingerprint(self.model, self._cache))

        self.call(save)

    def load_prefixes(self, path: str | Path) -> None:
        """Read what `save_prefixes` wrote. FileFormatError for a file that is damaged, or of another model;
        OSError."""
        size = BLOCK * position_bytes(self._cache)
        self.call(lambda: self._store.load(path, fingerprint(self.model, self._cache), size))

    def forget_prefixes(self) -> None:
        """Forget the texts of finished requests."""

        def forget() -> None:
            self._store.clear()
            for slot in self._table.free:
                slot.tokens = []

        self.call(forget)

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
        for token in (*tokens, *params.logit_bias):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
                raise ArgumentError(
                    f"submit token {token!r}",
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
            while self._wait_for_work():
                self._turn()
        except BaseException as error:
            self._failure = error
        self._end_all()

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not (self._closing or self._waiting or self._calls or self._busy()):
                self._changed.wait()
            return not self._closing

    def _busy(self) -> list[Slot]:
        return [slot for slot in self._table.slots if slot.work is not None]

    def _turn(self) -> None:
        while self._calls:
            function, future = self._calls.popleft()
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
        for slot in self._busy():
            if _work(slot).request.cancelled:
                self._finish(slot, "cancelled")
        with self._changed:
            cancelled = [request for request in self._waiting if request.cancelled]
            for request in cancelled:
                self._waiting.remove(request)
        for request in cancelled:
            self._drop(request)
        self._admit()
        self._read()
        self._write()

    def _end_all(self) -> None:
        with self._changed:
            self._closing = True
            waiting, self._waiting = list(self._waiting), deque()
            calls, self._calls = list(self._calls), deque()
        for slot in self._busy():
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
            self._stats.requests += 1
            self._stats.cancelled += 1
            request._put(Event(finish_reason="cancelled", usage=Usage(len(request.prompt))))

    # ---- taking in

    def _admit(self) -> None:
        """Give waiting requests the free slots, first come first served."""
        while self._waiting and self._table.free:
            with self._changed:
                request = self._waiting.popleft()
            self._start(request)

    def _start(self, request: Request) -> None:
        params, tokenizer = request.params, self.tokenizer
        slot = self._table.place(request.prompt)
        room = self.context - len(request.prompt)
        if self.keep is not None:
            room = 1 << 60
        slot.work = Work(
            request,
            StopText(tokenizer.stream(), params.stop),
            RowState(params, request.prompt, end_ids=tokenizer.end_ids, seed=fresh_seed()),
            pending=list(request.prompt[len(slot.tokens) :]),
            limit=room if params.max_tokens is None else min(room, params.max_tokens),
            cached=len(slot.tokens),
        )
        self._stats.cached_tokens += len(slot.tokens)
        if slot.work.limit == 0:
            self._finish(slot, "length")

    # ---- reading prompts

    def _read(self) -> None:
        """Read one chunk of a prompt, in turns: a short one does not wait for all of a long one. Its last
        chunk gives the first token."""
        waiting = [slot for slot in self._busy() if _work(slot).reading]
        if not waiting:
            return
        slot = min(waiting, key=lambda slot: (_work(slot).turns, _work(slot).request.id))
        work = _work(slot)
        work.turns += 1
        began = time.perf_counter()
        shared = self._table.share(slot, work.pending)
        del work.pending[:shared]
        if not work.written:
            work.cached += shared
            self._stats.cached_tokens += shared
        part = work.pending[: self._piece(len(work.pending))]
        logits = self._forward([slot], [part])
        del work.pending[: len(part)]
        self._stats.prompt_tokens += len(part)
        if not work.pending:
            self._draw(logits, [slot], [0])
        self._stats.prefill_seconds += time.perf_counter() - began

    def _piece(self, count: int) -> int:
        """How much of so many tokens to read at once: passes have a power of two of them, and a last one that
        would be mostly padding is cut in two."""
        count = min(count, self.chunk)
        whole = 1 << (count.bit_length() - 1)
        return count if count == whole or count > whole * 3 // 2 or count <= _WIDTHS[-1] else whole

    # ---- writing

    def _write(self) -> None:
        """One more token for every request that has read its prompt; several where guesses come true."""
        began = time.perf_counter()
        writing = [slot for slot in self._busy() if not _work(slot).reading]
        if not writing:
            return
        for slot in [slot for slot in writing if len(slot.tokens) >= self.context]:
            writing.remove(slot)
            self._shift(slot)
        guesses = self._guesses(writing)
        plain = [slot for slot in writing if not guesses.get(slot.index)]
        for slot in writing:
            if guesses.get(slot.index):
                self._verify(slot, guesses[slot.index])
        if plain:
            logits = self._forward(plain, [_work(slot).pending for slot in plain])
            self._draw(logits, plain, list(range(len(plain))))
        self._stats.decode_seconds += time.perf_counter() - began

    def _draw(self, logits: Tensor, slots: list[Slot], rows: list[int]) -> None:
        """A token for each slot, from a row of logits."""
        works = [_work(slot) for slot in slots]
        try:
            draws = self._sampler.sample(logits, [work.state for work in works], rows)
        except GrammarError as error:
            if len(slots) == 1:
                self._finish(slots[0], "error", error)
                return
            for slot, row in zip(slots, rows):  # find out whose it is
                self._draw(logits, [slot], [row])
            return
        for slot, draw in zip(slots, draws):
            self._emit(slot, draw)

    def _guesses(self, writing: list[Slot]) -> dict[int, list[int]]:
        """What may come next, by slot."""
        if self._drafter is None or not 0 < len(writing) <= self._speculate_for:
            return {}
        found = {}
        for slot in writing:
            work = _work(slot)
            room = min(self.context - len(slot.tokens) - 1, work.limit - work.written - 1)
            count = min(work.guesses, room)
            if count > 0:
                found[slot.index] = self._drafter.draft(slot.index, [*slot.tokens, *work.pending], count)
        return found

    def _verify(self, slot: Slot, guesses: list[int]) -> None:
        """Read the guesses in one pass; keep those that are drawn anyway, and one token more."""
        work, before = _work(slot), len(slot.tokens)
        logits = self._forward([slot], [[*work.pending, *guesses]], every=True)
        logits = logits.reshape(logits.shape[1], logits.shape[2])
        right = 0
        # without penalties the most likely tokens of all places are found at once
        at_once = self._sampler.most_likely(logits) if work.state.plain else None
        for row in range(len(guesses) + 1):
            if at_once is not None:
                self._emit(slot, Draw(at_once[row]))
            else:
                self._draw(logits, [slot], [row])
            if slot.work is not work or row == len(guesses) or work.pending != [guesses[row]]:
                break
            right += 1
        del slot.tokens[before + 1 + right :]
        self._stats.drafted_tokens += len(guesses)
        self._stats.accepted_tokens += right
        work.guesses = min(2 * work.guesses + 1, MOST) if right == len(guesses) else max(right, 1)

    def _forward(self, slots: list[Slot], parts: list[list[int]], every: bool = False) -> Tensor:
        """Read tokens into slots; logits of each one's last, or with `every` of all."""
        count = len(parts[0])
        # few widths: each has kernels and a plan of its own
        width = next((width for width in (_GUESSED if every else _WIDTHS) if width >= count), count)
        logits = self.model.forward(
            [[*part, *[0] * (width - count)] for part in parts],
            [len(slot.tokens) for slot in slots],
            self._cache,
            [slot.index for slot in slots],
            [count - 1] * len(parts),
            every=every,
            padded=not every,
        )
        for slot, part in zip(slots, parts):
            slot.tokens += part
        return logits

    def _shift(self, slot: Slot) -> None:
        """The context is full: read the text again without the older half of what is not kept."""
        work = _work(slot)
        if self.keep is None:
            self._finish(slot, "length")
            return
        text = [*slot.tokens, *work.pending]
        start = self.keep + (len(text) - self.keep) // 2
        slot.tokens = text[: self.keep]
        work.pending = text[start:]

    def _emit(self, slot: Slot, draw: Draw) -> None:
        """A token was drawn: tell the request, and see whether it is done."""
        work = _work(slot)
        request, state, token = work.request, work.state, draw.token
        if request.first_token_at is None:
            request.first_token_at = time.monotonic()
        work.written += 1
        work.pending = [token]
        self._stats.generated_tokens += 1
        try:
            state.accept(token)
        except GrammarError as error:
            self._finish(slot, "error", error)
            return
        if token in self.tokenizer.end_ids and not request.params.ignore_end:
            self._finish(slot, "stop")
            return
        text = work.text.push(token)
        request._put(Event(token, text, draw.logprob, draw.top_logprobs))
        if work.text.stopped or state.complete:
            self._finish(slot, "stop")
        elif work.written >= work.limit:
            self._finish(slot, "length")

    def _finish(self, slot: Slot, reason: str, error: WhitError | None = None) -> None:
        work = _work(slot)
        slot.work = None
        if error is None and self._failure is not None:
            error = self._closed()
        if error is not None:
            work.request._put(error)
            return
        self._stats.requests += 1
        self._stats.cancelled += reason == "cancelled"
        usage = Usage(len(work.request.prompt), work.written, work.cached)
        work.request._put(Event(text=work.text.flush(), finish_reason=reason, usage=usage))


def _work(slot: Slot) -> Work:
    assert slot.work is not None, "the slot serves a request"
    return slot.work


def fresh_seed() -> int:
    """A seed for a request that has none."""
    return int.from_bytes(os.urandom(8), "little")
