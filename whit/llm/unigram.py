"""How SentencePiece brings text into the form that its unigram vocabularies were trained on: characters and
sequences are replaced by a table (NFKC and some more) that the file carries, and spaces become "▁".

The table is a trie of UTF-8 bytes packed as a "double array": from node `n` byte `c` leads to node
`n ^ base(n) ^ c`, if that node is labelled `c`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from whit.helpers import FileFormatError
from whit.llm.merges import SPACE
from whit.llm.vocabulary import Vocabulary, refuse


def normalizer(vocabulary: Vocabulary) -> Callable[[str], str]:
    """A function from text to its normal form."""
    replace = _Replacements(read_charsmap(vocabulary.charsmap)).apply

    def normalize(text: str) -> str:
        text = replace(text)
        if vocabulary.remove_extra_whitespaces:
            text = " ".join(word for word in text.split(" ") if word)
        if text and vocabulary.add_space_prefix:
            text = text + " " if vocabulary.space_as_suffix else " " + text
        return text.replace(" ", SPACE)

    return normalize


class _Replacements:
    """Replaces keys of a table by their values, at each place the longest key that fits."""

    def __init__(self, table: dict[str, str]) -> None:
        self.table = table
        self.single = str.maketrans({key: value for key, value in table.items() if len(key) == 1})
        longer = [key for key in table if len(key) > 1]
        self.longest = max(map(len, table), default=0)
        # long keys are a letter with marks: where none of the second characters is, each character goes by
        # itself
        seconds = sorted({key[1] for key in longer})
        self.seconds = re.compile("[" + "".join(map(re.escape, seconds)) + "]") if seconds else None

    def apply(self, text: str) -> str:
        """The text with everything replaced."""
        if self.seconds is None or self.seconds.search(text) is None:
            return text.translate(self.single)
        found, at = [], 0
        for place in self.seconds.finditer(text):
            start = place.start() - 1  # a long key may begin here; before, none does
            if start < at:
                continue
            found.append(text[at:start].translate(self.single))
            size = self._size(text, start)
            found.append(self.table.get(text[start : start + size], text[start : start + size]))
            at = start + size
        return "".join(found) + text[at:].translate(self.single)

    def _size(self, text: str, start: int) -> int:
        """The length of the longest key at a place, 1 if there is none."""
        for size in range(min(self.longest, len(text) - start), 1, -1):
            if text[start : start + size] in self.table:
                return size
        return 1


def read_charsmap(data: bytes) -> dict[str, str]:
    """The table as a dict. FileFormatError if it is damaged."""
    if not data:
        return {}
    import numpy as np

    size = int.from_bytes(data[:4], "little")
    if size % 4 or size + 4 >= len(data):
        raise _damaged("it ends too early")
    nodes = np.frombuffer(data, np.uint32, size // 4, 4).astype(np.int64)
    texts, keys = data[4 + size :], {}
    labels = np.arange(1, 256)
    level: list[tuple[int, bytes]] = [(_step(0, int(nodes[0])), b"")]
    while level:
        below: list[tuple[int, bytes]] = []
        for node, key in level:
            places = node ^ labels
            places = places[places < len(nodes)]
            for place in places[nodes[places] & 0x800000FF == places ^ node].tolist():
                packed, longer = int(nodes[place]), key + bytes([place ^ node])
                target = _step(place, packed)
                if packed >> 8 & 1:
                    keys[longer] = _value(texts, nodes, target)
                below.append((target, longer))
        if len(below) > len(nodes) or (below and len(below[0][1]) > 64):
            raise _damaged("its nodes form a circle")
        level = below
    return {key.decode("utf-8", "replace"): value for key, value in keys.items()}


def _step(node: int, packed: int) -> int:
    return node ^ (packed >> 10 << (packed >> 6 & 8))


def _value(texts: bytes, nodes: object, target: int) -> str:
    import numpy as np

    assert isinstance(nodes, np.ndarray)
    start = int(nodes[target]) & 0x7FFFFFFF if target < len(nodes) else len(texts)
    end = texts.find(b"\0", start)
    if start >= len(texts) or end < 0:
        raise _damaged("a replacement lies outside of it")
    return texts[start:end].decode("utf-8", "replace")


def _damaged(because: str) -> FileFormatError:
    return refuse("tokenizer.ggml.precompiled_charsmap", because)
