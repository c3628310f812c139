"""How SentencePiece brings text into the form that its unigram vocabularies were trained on: characters and
sequences are replaced by a table (NFKC and some more) that the file carries, and spaces become "▁".

The table is a trie of UTF-8 bytes packed as a "double array": from node `n` byte `c` leads to node
`n ^ base(n) ^ c`, if that node is labelled `c`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from whit.helpers import FileFormatError
from whit.llm.texts import SPACE
from whit.llm.vocabulary import Vocabulary, refuse


def normalizer(vocabulary: Vocabulary) -> Callable[[str], str]:
    """A function from text to its normal form."""
    replace = _Replacements(vocabulary.charsmap).apply

    def normalize(text: str) -> str:
        text = replace(text)
        if vocabulary.remove_extra_whitespaces:
            text = " ".join(word for word in text.split(" ") if word)
        if text and vocabulary.add_space_prefix:
            text = text + " " if vocabulary.space_as_suffix else " " + text
        return text.replace(" ", SPACE)

    return normalize


class _Replacements:
    """Replaces keys of a table by their values, at each place the longest key that fits. The table is walked
    when a character or a pair of characters is met for the first time."""

    def __init__(self, data: bytes) -> None:
        size = int.from_bytes(data[:4], "little")
        if data and (size % 4 or size < 4 or size + 4 >= len(data)):
            raise _damaged("it ends too early")
        self.nodes = memoryview(data)[4 : 4 + size].cast("I") if data else None
        self.values = data[4 + size :]
        self.single = _Singles(self)
        self.joined: dict[tuple[str, str], bool] = {}  # whether a key goes on from one character to the next

    def apply(self, text: str) -> str:
        """The text with everything replaced."""
        if self.nodes is None:
            return text
        pairs = set(pairwise(text))
        joined = {pair for pair in pairs if self._joins(pair)}
        if not joined:
            return text.translate(self.single)
        found, done = [], 0
        for at, pair in enumerate(pairwise(text)):
            if at >= done and pair in joined:
                size, value = self.longest(text[at : at + _LONGEST])
                if size > 1:
                    found += [text[done:at].translate(self.single), value]
                    done = at + size
        return "".join(found) + text[done:].translate(self.single)

    def _joins(self, pair: tuple[str, str]) -> bool:
        found = self.joined.get(pair)
        if found is None:
            found = self.joined[pair] = self._walk("".join(pair).encode())[0] > len(pair[0].encode())
        return found

    def longest(self, text: str) -> tuple[int, str]:
        """The length in characters of the longest key that a text begins with, and its value; (0, "") if
        there is none."""
        raw = text.encode()
        _, size, value = self._walk(raw)
        if not size:
            return 0, ""
        return len(raw[:size].decode("utf-8", "replace")), self._value(value)

    def _walk(self, raw: bytes) -> tuple[int, int, int]:
        """Follow the trie: how many bytes it knows, how many the longest key has, where its value stands."""
        nodes = self.nodes
        assert nodes is not None, "there is a table"
        node, size, value = _step(0, nodes[0]), 0, 0
        for depth, byte in enumerate(raw):
            node ^= byte
            if byte == 0 or node >= len(nodes) or nodes[node] & 0x800000FF != byte:
                return depth, size, value
            packed = nodes[node]
            node = _step(node, packed)
            if packed >> 8 & 1:
                if node >= len(nodes):
                    raise _damaged("a node lies outside of it")
                size, value = depth + 1, nodes[node] & 0x7FFFFFFF
        return len(raw), size, value

    def _value(self, start: int) -> str:
        end = self.values.find(b"\0", start)
        if start >= len(self.values) or end < 0:
            raise _damaged("a replacement lies outside of it")
        return self.values[start:end].decode("utf-8", "replace")


class _Singles(dict[int, str]):
    """What each character becomes, for `str.translate`."""

    def __init__(self, owner: _Replacements) -> None:
        super().__init__()
        self.owner = owner

    def __missing__(self, code: int) -> str:
        size, value = self.owner.longest(chr(code))
        self[code] = value if size else chr(code)
        return self[code]


_LONGEST = 64  # characters of a key


def _step(node: int, packed: int) -> int:
    return node ^ (packed >> 10 << (packed >> 6 & 8))


def _damaged(because: str) -> FileFormatError:
    return refuse("tokenizer.ggml.precompiled_charsmap", because)
