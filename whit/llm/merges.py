"""SentencePiece's BPE, whose merges are not listed: any two neighbours whose texts together are a token may
merge, the pair with the best score first, of equal scores the leftmost.

    "▁the"  ->  ▁ t h e  ->  ▁t h e  ->  ▁t he  ->  ▁the

Words are cut apart where no token reaches across, and each word is merged once: texts repeat their words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from operator import add
from typing import TYPE_CHECKING

from whit.llm.texts import SPACE, Texts, all_texts
from whit.llm.vocabulary import Vocabulary

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_ID_BITS = 24
_ID = (1 << _ID_BITS) - 1
_NONE = 1 << 62  # worse than any rank
_PLACE_BITS = 32
_PLACE = (1 << _PLACE_BITS) - 1
_SHORT = 48  # characters up to which a list is searched sooner than a heap is kept
_KEPT_WORDS = 1 << 16
_KEPT_MISSES = 1 << 18
_MOST_CROSSINGS = 64
_MANY = 128  # beginnings after which all tokens are entered at once


class _Table(dict[str, int]):
    """Rank and id by text, `_NONE` for what is no token. Of a large vocabulary, tokens that begin alike are
    entered when one of them is asked for, and all of them when many were."""

    def __init__(self, tokens: Sequence[str], packed: NDArray[np.int64]) -> None:
        super().__init__()
        self.tokens, self.packed = tokens, packed
        self.entered: set[int] = set()
        self.room = _KEPT_MISSES
        self.complete = False
        if not isinstance(tokens, Texts):
            self.complete_now()

    def complete_now(self) -> None:
        """Enter all tokens: sooner than one beginning after the other if most are needed."""
        if not self.complete:
            self.update(zip(all_texts(self.tokens), self.packed.tolist()))
            self.complete = True

    def __missing__(self, text: str) -> int:
        tokens = self.tokens
        if not self.complete and isinstance(tokens, Texts):
            key = tokens.beginning(text)
            if key not in self.entered:
                numbers = tokens.beginning_with(key)
                found: dict[str, int] = dict(zip(tokens.many(numbers), self.packed[numbers].tolist()))
                self.update(found)
                self.entered.add(key)
                if len(self.entered) > _MANY:
                    self.complete_now()
                if text in found:
                    return found[text]
        if self.room > 0:  # the next time it is known without a call
            self.room -= 1
            self[text] = _NONE
        return _NONE


class ScoreMerger:
    """Merges text by the scores of a vocabulary. Safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import numpy as np

        assert vocabulary.scores is not None, "a merger needs scores"
        tokens = vocabulary.tokens
        _, ranks, counts = np.unique(-vocabulary.scores, return_inverse=True, return_counts=True)
        self.shared: set[int] = set(np.flatnonzero(counts > 1).tolist())  # ranks of several tokens
        self.table = _Table(tokens, ranks.astype(np.int64) << _ID_BITS | np.arange(len(tokens)))
        unknown = [] if vocabulary.unknown is None else [vocabulary.unknown]
        self.bytes = [[vocabulary.byte_ids[b]] if b in vocabulary.byte_ids else unknown for b in range(256)]
        self.words = _words(tokens)
        self.kept: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """The ids of a text in which spaces are "▁" already."""
        kept, found = self.kept, []
        for word in self.words.findall(text):
            ids = kept.get(word)
            if ids is None:
                ids = self._ids(self._short(word) if len(word) <= _SHORT else self._long(word))
                if len(word) <= _SHORT:
                    if len(kept) > _KEPT_WORDS:
                        kept.clear()
                    kept[word] = ids
            found += ids
        return found

    def _ids(self, pieces: list[str]) -> list[int]:
        found: list[int] = []
        for piece in pieces:
            packed = self.table[piece]
            if packed != _NONE:
                found.append(packed & _ID)
            else:  # a character without a token: its bytes
                for byte in piece.encode():
                    found += self.bytes[byte]
        return found

    def _short(self, word: str) -> list[str]:
        """Merge by searching a list of the pairs' ranks for the best."""
        table, shared, pieces = self.table, self.shared, list(word)
        pairs = list(map(table.__getitem__, map(add, word, word[1:])))
        while pairs and (best := min(pairs)) != _NONE:
            at = pairs.index(best)
            if best >> _ID_BITS in shared:
                at = next(n for n, pair in enumerate(pairs) if pair >> _ID_BITS == best >> _ID_BITS)
            pieces[at] += pieces.pop(at + 1)
            pairs.pop(at)
            if at:
                pairs[at - 1] = table[pieces[at - 1] + pieces[at]]
            if at < len(pairs):
                pairs[at] = table[pieces[at] + pieces[at + 1]]
        return pieces

    def _long(self, word: str) -> list[str]:
        """Merge with a heap of (rank, place): the time grows as n log n."""
        table, size = self.table, len(word)
        ends, before = (
            list(range(1, size + 1)),
            list(range(-1, size)),
        )  # of the piece that starts at a place; 0: none

        def candidate(start: int, end: int) -> int | None:
            packed = table[word[start:end]]
            return None if packed == _NONE else packed >> _ID_BITS << _PLACE_BITS | start

        heap = [item for n in range(size - 1) if (item := candidate(n, n + 2)) is not None]
        heapify(heap)
        while heap:
            item = heappop(heap)
            start = item & _PLACE
            middle = ends[start]
            if middle == 0 or middle == size or candidate(start, ends[middle]) != item:
                continue  # a piece of that pair has merged with another meanwhile
            end = ends[start] = ends[middle]
            ends[middle] = 0
            before[end] = start
            if start and (item := candidate(before[start], end)) is not None:
                heappush(heap, item)
            if end < size and (item := candidate(start, ends[end])) is not None:
                heappush(heap, item)
        return [word[start:end] for start, end in enumerate(ends) if end]


def _words(tokens: Sequence[str]) -> re.Pattern[str]:
    """A pattern of the stretches that merging never crosses: a space begins one, except after a character
    that some token has before a space."""
    if isinstance(tokens, Texts):
        crossings = tokens.before_spaces()
    else:
        crossings = {part[-1] for part in "\0".join(tokens).split(SPACE)[:-1] if part} - {"\0"}
    if not crossings:
        return re.compile(f"{SPACE}*[^{SPACE}]+|{SPACE}+")
    if len(crossings) > _MOST_CROSSINGS:
        return re.compile(".+", re.DOTALL)
    behind = "".join(re.escape(char) for char in sorted(crossings))
    return re.compile(f"{SPACE}*(?:[^{SPACE}]+|(?<=[{behind}]){SPACE}+)+|{SPACE}+")
