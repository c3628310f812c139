"""Slots: the sequences that a cache holds, and which text goes where.

A text is best placed where its beginning is already. `SlotTable.place` looks at what the free slots hold, at
what the other slots hold (which is copied), and at the store of what was pushed out before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from whit.llm.prefix import BLOCK, Cache, PrefixStore, common, read_positions, write_positions

if TYPE_CHECKING:
    from whit.llm.engine import Request
    from whit.llm.sampling import RowState
    from whit.llm.stops import StopText

WORTH = 16  # tokens: fewer are read again rather than copied


@dataclass
class Work:
    """A request in its slot."""

    request: Request
    text: StopText
    state: RowState
    pending: list[int]  # tokens that are still to be read; while text is made: the last one
    limit: int  # tokens that may be written
    written: int = 0
    cached: int = 0
    guesses: int = 3  # how many tokens are guessed at once
    turns: int = 0  # pieces of the prompt that were read

    @property
    def reading(self) -> bool:
        """Whether the prompt is still being read."""
        return self.written == 0 or len(self.pending) > 1


@dataclass
class Slot:
    """A sequence in the cache: which tokens it holds, and the request that it serves."""

    index: int
    tokens: list[int] = field(default_factory=list)
    work: Work | None = None
    used: int = 0


class SlotTable:
    """The slots of a cache."""

    def __init__(self, cache: Cache, count: int, store: PrefixStore) -> None:
        self.cache, self.store = cache, store
        self.slots = [Slot(index) for index in range(count)]
        self._clock = 0

    @property
    def free(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.work is None]

    def place(self, prompt: Sequence[int]) -> Slot:
        """A free slot whose tokens are a beginning of the prompt, as long as can be found, and not all of it:
        the last token must be read for its logits."""
        text = list(prompt[:-1])
        shared = {slot.index: common(slot.tokens, text) for slot in self.slots}
        best = max(self.free, key=lambda slot: (shared[slot.index], -slot.used))
        source = max(self.slots, key=lambda slot: shared[slot.index])
        stored = self.store.match(text)
        most = max(shared[source.index], stored)
        if shared[best.index] + WORTH < most:  # it lies elsewhere: take the slot that was idle longest
            best = min(self.free, key=lambda slot: slot.used)
        kept = shared[best.index]
        self.push_out(best, kept)
        best.tokens = text[:kept]
        self._clock += 1
        best.used = self._clock
        stored = self.store.match(text)  # again: what was pushed out may have pushed out others
        if max(stored, shared[source.index]) > kept + WORTH:
            if stored > shared[source.index]:
                self._restore(best, text, stored)
            else:
                self._copy(source, best, text, shared[source.index])
        return best

    def share(self, slot: Slot, pending: Sequence[int]) -> int:
        """Copy what another slot has read meanwhile of the same text. The number of tokens that `slot` need
        not read any more."""
        text = [*slot.tokens, *pending[:-1]]
        known = len(slot.tokens)
        others = [(common(other.tokens, text), other.index) for other in self.slots if other is not slot]
        length, index = max(others, default=(0, 0))
        if length < known + WORTH:
            return 0
        self._copy(self.slots[index], slot, text, length)
        return length - known

    def push_out(self, slot: Slot, kept: int = 0) -> None:
        """Keep in the store what a slot is about to lose: all but its first `kept` tokens."""
        if len(slot.tokens) - kept >= BLOCK and self.store.limit:
            self.store.add(slot.tokens, lambda a, b: read_positions(self.cache, slot.index, a, b))

    def _copy(self, source: Slot, target: Slot, text: list[int], stop: int) -> None:
        start = len(target.tokens)
        if source is target or stop <= start:
            return
        data = read_positions(self.cache, source.index, start, stop)
        write_positions(self.cache, target.index, start, stop, data)
        target.tokens = text[:stop]

    def _restore(self, slot: Slot, text: list[int], stop: int) -> None:
        start = len(slot.tokens) // BLOCK * BLOCK
        for at, data in zip(range(start, stop, BLOCK), self.store.read(text, start, stop)):
            write_positions(self.cache, slot.index, at, at + BLOCK, data)
        slot.tokens = text[:stop]
