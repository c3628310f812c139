"""An engine, a tokenizer and a template without a model: what is said is a function of the prompt, so that
tests of the server know the right answer and depend on no kernel."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tests.llm import tiny
from whit.helpers import ArgumentError
from whit.llm.engine import EngineBusy, EngineClosed, Event, Request, Stats, Usage
from whit.llm.sampling import SamplingParams

BOS, EOS = 256, 257


class ByteTokenizer(tiny.ByteTokenizer):
    """A token a byte; two special tokens."""

    vocab_size = 258
    bos_id = BOS
    end_ids = frozenset({EOS})

    def encode(self, text: str, *, special: bool = True, bos: bool | None = None) -> list[int]:
        return ([BOS] if bos or bos is None else []) + list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        text = bytes([id for id in ids if id < 256]).decode("utf-8", "replace")
        return ("<bos>" if special and BOS in ids else "") + text


class LineTemplate:
    """`role: text` lines; tools and extra values stand on top. Refuses what many templates refuse."""

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        if messages[0]["content"] == "raise":
            raise ArgumentError("the template", because="Conversation roles must alternate", fix="alternate")
        lines = [f"tools: {json.dumps(tools)}"] if tools else []
        lines += [f"{key}={value}" for key, value in sorted(extra.items())]
        for message in messages:
            calls = message.get("tool_calls")
            lines.append(
                f"{message['role']}: {message['content']}" + (f" calls {json.dumps(calls)}" if calls else "")
            )
        return "\n".join([*lines, "assistant:"])


def echo(prompt: str, params: SamplingParams) -> str:
    """Says the last user's words again, in capitals."""
    asked = [line for line in prompt.split("\n") if line.startswith("user: ")]
    return asked[-1][6:].upper() if asked else prompt.upper()


class FakeEngine:
    """One thread a request, one character a token, `delay` seconds each."""

    def __init__(
        self,
        reply: Callable[[str, SamplingParams], str] = echo,
        *,
        context: int = 4096,
        delay: float = 0.0,
        slots: int = 4,
        max_waiting: int = 64,
    ) -> None:
        self.reply, self.context, self.delay, self.max_waiting = reply, context, delay, max_waiting
        self.seen: list[tuple[tuple[int, ...], SamplingParams]] = []
        self.numbers = itertools.count()
        self.stats = Stats(slots=slots)
        self.lock = threading.Lock()
        self.closed = False
        self.requests: list[Request] = []

    def submit(self, prompt: Sequence[int], params: SamplingParams | None = None) -> Request:
        params = params or SamplingParams()
        with self.lock:
            if self.closed:
                raise EngineClosed("use the engine", because="it was closed", fix="start another")
            if self.stats.busy >= self.max_waiting:
                raise EngineBusy("submit", because=f"{self.stats.busy} are waiting", fix="try again later")
            self.stats.busy += 1
            request = Request(next(self.numbers), tuple(prompt), params, lambda: None)
            self.seen.append((tuple(prompt), params))
            self.requests.append(request)
        threading.Thread(target=self._run, args=(request,), daemon=True).start()
        return request

    def close(self) -> None:
        self.closed = True
        for request in self.requests:
            request.cancel()

    def _run(self, request: Request) -> None:
        params = request.params
        text = self.reply(ByteTokenizer().decode(request.prompt), params)
        reason, written, held = "stop", 0, ""
        limit = self.context - len(request.prompt) if params.max_tokens is None else params.max_tokens
        for letter in text:
            if request.cancelled or written >= limit:
                reason = "cancelled" if request.cancelled else "length"
                break
            if self.delay:
                time.sleep(self.delay)
            written += 1
            whole = held + letter
            if any(stop in whole for stop in params.stop):
                held = ""
                break
            held = letter if any(stop.startswith(letter) for stop in params.stop) else ""
            if request.first_token_at is None:
                request.first_token_at = time.monotonic()
            token = letter.encode("utf-8")[0]
            scores = {} if params.logprobs is None else {
                "logprob": -0.5,
                "top_logprobs": tuple([(token, -0.5), (ord("?"), -2.0)][: params.logprobs]),
            }  # fmt: skip
            request._put(Event(token=token, text="" if held else whole, **scores))  # type: ignore[arg-type]
        with self.lock:
            self.stats.busy -= 1
            self.stats.requests += 1
            self.stats.cancelled += reason == "cancelled"
            self.stats.generated_tokens += written
        usage = Usage(len(request.prompt), written, min(7, len(request.prompt) - 1))
        request._put(Event(text=held, finish_reason=reason, usage=usage))
