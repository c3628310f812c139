"""Text of a stream of tokens that ends at stop strings, wherever tokens are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Decoder(Protocol):
    """Turns tokens into text one by one and holds back characters that are not whole yet."""

    def push(self, id: int) -> str: ...

    def flush(self) -> str: ...


class StopText:
    """Collects a stream's text and ends it before the first stop string.

    Text that may be the beginning of a stop string is held back until it is known not to be one.

    >>> class Letters:
    ...     def push(self, id): return chr(id)
    ...     def flush(self): return ""
    >>> text = StopText(Letters(), ("END",))
    >>> [text.push(ord(c)) for c in "aENEND"], text.stopped
    (['a', '', '', 'EN', '', ''], True)
    """

    def __init__(self, decoder: Decoder, stops: Sequence[str]) -> None:
        self.decoder, self.stops = decoder, tuple(stops)
        self.held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that this token sets free."""
        return self._released(self.decoder.push(token))

    def flush(self) -> str:
        """What is left at the end of the stream."""
        if self.stopped:
            return ""
        text = self._released(self.decoder.flush())
        text, self.held = text + self.held, ""
        return text

    def _released(self, text: str) -> str:
        if self.stopped:
            return ""
        whole = self.held + text
        ends = [at for stop in self.stops if (at := whole.find(stop)) >= 0]
        if ends:
            self.stopped, self.held = True, ""
            return whole[: min(ends)]
        keep = max((_overlap(whole, stop) for stop in self.stops), default=0)
        self.held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, and not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
