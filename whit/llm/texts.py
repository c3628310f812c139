"""The texts of a large vocabulary as they lie in a file. Few of them are ever looked at, so that none is made
before it is: they are found by their first characters.

    order     numbers of all texts, those that begin alike next to each other
    bounds    where in `order` each beginning starts; a beginning is the first 15 bits, and whether "▁" is in
              front of them
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SPACE = "▁"
_SPACE_BYTES = SPACE.encode()
_LENGTH = 8  # bytes of a length, which stands in front of each text


class Texts(Sequence[str]):
    """The texts of an array of a GGUF file.

    data: the array's bytes, a length in front of each text; places: where the lengths stand, and the end.
    """

    def __init__(self, data: memoryview, places: NDArray[np.int64]) -> None:
        self.data, self.places = data, places

    def __len__(self) -> int:
        return len(self.places) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[n] for n in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        return str(self.data[int(self.places[at]) + _LENGTH : int(self.places[at + 1])], "utf-8", "replace")

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))

    def all(self) -> list[str]:
        """Every text: decoded as one, then cut, if all are shorter than 256 bytes and proper UTF-8."""
        import numpy as np

        body = np.frombuffer(self._raw, np.uint8).copy()
        body[self.places[:-1]] = 0  # with lengths as zeros, eight zeros stand between the texts
        if np.count_nonzero(body) == len(body) - _LENGTH * len(self):
            with suppress(UnicodeDecodeError):
                return body.tobytes().decode().split("\0" * _LENGTH)[1:]
        return self.many(range(len(self)))

    def many(self, numbers: Sequence[int]) -> list[str]:
        """Several texts at once."""
        import numpy as np

        at = np.asarray(numbers, np.int64)
        starts, ends, raw = (self.places[at] + _LENGTH).tolist(), self.places[at + 1].tolist(), self._raw
        return [raw[start:end].decode("utf-8", "replace") for start, end in zip(starts, ends)]

    @cached_property
    def _raw(self) -> bytes:
        return bytes(self.data)

    @cached_property
    def _spaces(self) -> NDArray[np.bool_]:
        """Where in the bytes a "▁" stands."""
        import numpy as np

        data = np.frombuffer(self._raw, np.uint8)
        found = np.zeros(len(data), bool)
        first, second, third = _SPACE_BYTES
        found[:-2] = (data[:-2] == first) & (data[1:-1] == second) & (data[2:] == third)
        return found

    @cached_property
    def _index(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        import numpy as np

        data = np.frombuffer(self._raw + bytes(_LENGTH), np.uint8)
        starts, ends = self.places[:-1] + _LENGTH, self.places[1:]
        spaced = np.append(self._spaces, False)[np.minimum(starts, len(self._spaces))] & (starts < ends)
        starts = starts + spaced * len(_SPACE_BYTES)
        first = np.where(starts < ends, data[starts], 0).astype(np.uint16)
        second = np.where(starts + 1 < ends, data[starts + 1] & 127, 0).astype(np.uint16)
        keys = first | second << np.uint16(8) | spaced.astype(np.uint16) << np.uint16(15)
        bounds = np.concatenate(([0], np.cumsum(np.bincount(keys, minlength=1 << 16))))
        return np.argsort(keys, kind="stable"), bounds

    def beginning(self, text: str) -> int:
        """The number of a text's beginning."""
        raw = text[:3].encode("utf-8", "replace")
        space = raw.startswith(_SPACE_BYTES)
        raw = raw[len(_SPACE_BYTES) * space :] + b"\0\0"
        return raw[0] | (raw[1] & 127) << 8 | space << 15

    def beginning_with(self, key: int) -> list[int]:
        """The numbers of all texts with a beginning, in order."""
        order, bounds = self._index
        found: list[int] = order[bounds[key] : bounds[key + 1]].tolist()
        return found

    def before_spaces(self) -> set[str]:
        """The characters that stand in front of a "▁" in some text, "▁" itself left out."""
        import numpy as np

        inner = self._spaces.copy()
        starts = self.places[:-1] + _LENGTH
        inner[starts[starts < len(inner)]] = False
        at = np.flatnonzero(inner)
        at = at[~self._spaces[at - len(_SPACE_BYTES)]]
        return {self._raw[max(n - 4, 0) : n].decode("utf-8", "ignore")[-1:] for n in at.tolist()}


def texts_of(array: Any) -> Sequence[str]:
    """The texts of an array of metadata: `Texts` of a large one in a file, else a list."""
    import numpy as np

    places = getattr(array, "places", None)
    return Texts(array.data, places) if isinstance(places, np.ndarray) else list(array)


def all_texts(texts: Sequence[str]) -> list[str]:
    """The same as a list."""
    return texts.all() if isinstance(texts, Texts) else list(texts)


def find_texts(texts: Sequence[str], names: Iterable[str]) -> dict[str, int]:
    """The numbers of those names that are among some texts."""
    found: dict[str, int] = {}
    if not isinstance(texts, Texts):
        return {name: texts.index(name) for name in frozenset(names).intersection(texts)}
    for name in names:
        numbers = texts.beginning_with(texts.beginning(name))
        for number, text in zip(numbers, texts.many(numbers)):
            if text == name:
                found[name] = number
    return found
