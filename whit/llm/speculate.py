"""Guesses at the next tokens, which the model then checks all at once.

A guess costs little, and reading a few tokens in one pass costs hardly more than reading one. What is written
is what the model would have written alone: a guess only counts where it is the token that was drawn anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

LONGEST = 4  # tokens of the ends that are looked up
SHORTEST = 2
MOST = 15  # guesses at once


class Drafter(Protocol):
    """Guesses what follows the text of a slot."""

    def draft(self, slot: int, tokens: Sequence[int], count: int) -> list[int]:
        """At most `count` tokens that may follow `tokens`, which begin as they did at the last call for this
        slot, or not."""
        ...


class NgramDrafter:
    """What followed when the last few tokens stood there before (Saxena 2023, prompt lookup).

    >>> NgramDrafter().draft(0, [1, 2, 3, 4, 9, 1, 2, 3], 2)
    [4, 9]
    """

    def __init__(self) -> None:
        self._texts: dict[int, list[int]] = {}
        self._places: dict[int, dict[tuple[int, ...], int]] = {}

    def draft(self, slot: int, tokens: Sequence[int], count: int) -> list[int]:
        text, places = self._texts.get(slot, []), self._places.get(slot, {})
        if len(text) > len(tokens) or text != list(tokens[: len(text)]):
            text, places = [], {}
        if not text:
            self._texts[slot], self._places[slot] = text, places
        for token in tokens[len(text) :]:
            # the ends before this token are followed by it
            for size in range(SHORTEST, min(LONGEST, len(text)) + 1):
                places[tuple(text[-size:])] = len(text)
            text.append(token)
        for size in range(min(LONGEST, len(text)), SHORTEST - 1, -1):
            place = places.get(tuple(text[-size:]))
            if place is not None:
                return text[place : place + count]
        return []


class ModelDrafter:
    """Guesses of a smaller model with the same vocabulary, each its most likely token."""

    def __init__(self, model: Any, slots: int, context: int, chunk: int = 256) -> None:
        self.model, self.chunk = model, chunk
        self.context = min(context, model.context)
        self.cache = model.new_cache(slots, self.context)
        self._known: dict[int, list[int]] = {}

    def draft(self, slot: int, tokens: Sequence[int], count: int) -> list[int]:
        from whit.llm.prefix import common

        count = min(count, self.context - len(tokens))
        if count <= 0:
            return []
        known = self._known.setdefault(slot, [])
        del known[min(common(known, list(tokens)), len(tokens) - 1) :]
        guesses: list[int] = []
        pending = list(tokens[len(known) :])
        while len(guesses) < count:
            part, pending = pending[: self.chunk], pending[self.chunk :]
            logits = self.model.forward([part], [len(known)], self.cache, [slot], [len(part) - 1])
            known += part
            if not pending:
                guesses.append(int(logits.argmax(-1).item()))
                pending = guesses[-1:]
        return guesses
