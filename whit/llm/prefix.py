"""What was read before need not be read again: keys and values of beginnings of texts.

A slot keeps its tokens in the cache after its request is done, and another request with the same beginning
goes on from there, or copies that part to its own slot. What a slot loses when another text takes its place
goes to the `PrefixStore`: blocks of tokens in a tree, so that texts share what they have in common; the block
that was used longest ago is dropped first. The store can be written to a file and read back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from whit.engine.realize import buffer_of
from whit.helpers import FileFormatError, blake2b, write_atomic
from whit.schedule.movement import memory_of
from whit.tensor import Tensor

BLOCK = 32  # tokens of a block
_MAGIC = b"whit prefixes 1\n"


class Cache(Protocol):
    """Keys and values of several sequences: tensors (slots, heads, positions, numbers)."""

    @property
    def tensors(self) -> list[Tensor]: ...

    @property
    def nbytes(self) -> int: ...


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first tokens are equal."""
    limit, at = min(len(a), len(b)), 0
    while at < limit and a[at : at + 256] == b[at : at + 256]:
        at += 256
    at = min(at, limit)
    while at < limit and a[at] == b[at]:
        at += 1
    return at


# ---- the memory of a cache ---------------------------------------------------------------------------------


def read_positions(cache: Cache, slot: int, start: int, stop: int) -> bytes:
    """Keys and values of positions start … stop of a slot: tensor by tensor, head by head."""
    return b"".join([bytes(window.copyout()) for window in _windows(cache, slot, start, stop)])


def write_positions(cache: Cache, slot: int, start: int, stop: int, data: bytes) -> None:
    """Put back what `read_positions` gave for as many positions."""
    view, done = memoryview(data), 0
    for window in _windows(cache, slot, start, stop):
        window.copyin(view[done : done + window.nbytes])
        done += window.nbytes
    assert done == len(data), f"{len(data)} bytes for {stop - start} positions of {done} bytes"


def position_bytes(cache: Cache) -> int:
    """Bytes of one position of one slot."""
    return sum(_row(tensor) * int(tensor.shape[1]) for tensor in cache.tensors)


def _windows(cache: Cache, slot: int, start: int, stop: int) -> Iterable[Any]:
    """The stretches of memory that hold these positions."""
    for tensor in cache.tensors:
        _, heads, capacity, _ = tensor.shape
        memory, row = buffer_of(memory_of(tensor.uop)), _row(tensor)
        for head in range(heads):
            first = (slot * heads + head) * capacity + start
            yield memory.view(first * row, (stop - start) * row)


def _row(tensor: Tensor) -> int:
    return int(tensor.shape[3]) * tensor.dtype.itemsize


# ---- the store ---------------------------------------------------------------------------------------------


class _Block:
    """BLOCK tokens that follow those of `parent`, and their keys and values."""

    __slots__ = ("children", "data", "parent", "tokens", "used")

    def __init__(self, parent: _Block | None, tokens: tuple[int, ...], data: bytes) -> None:
        self.parent, self.tokens, self.data = parent, tokens, data
        self.children: dict[tuple[int, ...], _Block] = {}
        self.used = 0


class PrefixStore:
    """Beginnings of texts and their keys and values, at most `limit` bytes of them."""

    def __init__(self, limit: int) -> None:
        self.limit, self.nbytes = limit, 0
        self._root = _Block(None, (), b"")
        self._clock = 0

    def match(self, tokens: Sequence[int]) -> int:
        """How many first tokens are known, a multiple of BLOCK."""
        return len(self._chain(tokens)) * BLOCK

    def read(self, tokens: Sequence[int], start: int, stop: int) -> list[bytes]:
        """The blocks of positions start … stop (multiples of BLOCK) of a text that is known that far."""
        blocks = self._chain(tokens)[start // BLOCK : stop // BLOCK]
        assert len(blocks) * BLOCK == stop - start, "the text is not known that far"
        self._use(blocks)
        return [block.data for block in blocks]

    def add(self, tokens: Sequence[int], read: Callable[[int, int], bytes]) -> None:
        """Keep a text, as far as whole blocks go; `read(start, stop)` gives keys and values of positions."""
        chain = self._chain(tokens)
        self._use(chain)
        at = chain[-1] if chain else self._root
        for start in range(len(chain) * BLOCK, len(tokens) - BLOCK + 1, BLOCK):
            piece = tuple(tokens[start : start + BLOCK])
            data = read(start, start + BLOCK)
            if not self._make_room(len(data), at):
                return
            block = at.children[piece] = _Block(at, piece, data)
            self.nbytes += len(data)
            self._use([block])
            at = block

    def clear(self) -> None:
        """Forget everything."""
        self._root, self.nbytes = _Block(None, (), b""), 0

    def _chain(self, tokens: Sequence[int]) -> list[_Block]:
        chain, at = [], self._root
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            found = at.children.get(tuple(tokens[start : start + BLOCK]))
            if found is None:
                break
            chain.append(found)
            at = found
        return chain

    def _use(self, blocks: Sequence[_Block]) -> None:
        """The first blocks of a text are the youngest: the ends go first."""
        for block in reversed(blocks):
            self._clock += 1
            block.used = self._clock

    def _make_room(self, nbytes: int, keep: _Block) -> bool:
        """Drop blocks until so many more bytes fit; never `keep` or what it follows."""
        if nbytes > self.limit:
            return False
        if self.nbytes + nbytes <= self.limit:
            return True
        kept = set()
        at: _Block | None = keep
        while at is not None:
            kept.add(id(at))
            at = at.parent
        while self.nbytes + nbytes > self.limit:
            leaves = [b for b in self._blocks() if not b.children and id(b) not in kept]
            if not leaves:
                return False
            for block in sorted(leaves, key=lambda b: b.used)[: 1 + len(leaves) // 8]:
                assert block.parent is not None
                del block.parent.children[block.tokens]
                self.nbytes -= len(block.data)
                if self.nbytes + nbytes <= self.limit:
                    break
        return True

    def _blocks(self) -> list[_Block]:
        """All blocks, each after its parent."""
        found: list[_Block] = []
        stack = [self._root]
        while stack:
            block = stack.pop()
            found += block.children.values()
            stack += block.children.values()
        return found

    # ---- on disk

    def save(self, path: str | Path, key: str) -> None:
        """Write everything to a file (all of it or nothing). `key` tells the model and the form of the
        cache."""
        blocks = self._blocks()
        numbers = {id(block): n for n, block in enumerate(blocks)}
        head = {
            "key": key,
            "parents": [numbers.get(id(block.parent), -1) for block in blocks],
            "tokens": [block.tokens for block in blocks],
            "sizes": [len(block.data) for block in blocks],
            "used": [block.used for block in blocks],
        }
        text = json.dumps(head).encode()
        body = b"".join([_MAGIC, len(text).to_bytes(8, "little"), text, *[block.data for block in blocks]])
        write_atomic(path, body + blake2b(body, digest_size=16).digest())

    def load(self, path: str | Path, key: str, size: int) -> None:
        """Read what `save` wrote, on top of what is there. size: bytes of a block.

        FileFormatError for a file that is damaged, of another model or of another form of cache; OSError.
        """
        data = Path(path).read_bytes()
        body, digest = memoryview(data)[:-16], data[-16:]
        start = len(_MAGIC) + 8
        if not data.startswith(_MAGIC) or blake2b(body, digest_size=16).digest() != digest:
            raise _refused(path, "it is not a file of prefixes, or it is damaged")
        length = int.from_bytes(body[len(_MAGIC) : start], "little")
        head = json.loads(bytes(body[start : start + length]))
        if head["key"] != key:
            raise _refused(path, "it belongs to another model, or to a cache of another type")
        if any(n != size for n in head["sizes"]):
            raise _refused(path, f"its blocks are not of {size} bytes")
        at, made = start + length, list[_Block]()
        order = []
        for parent, tokens, nbytes in zip(head["parents"], head["tokens"], head["sizes"]):
            above = made[parent] if parent >= 0 else self._root
            piece = tuple(tokens)
            block = above.children.get(piece)
            if block is None and self._make_room(nbytes, above):
                block = above.children[piece] = _Block(above, piece, bytes(body[at : at + nbytes]))
                self.nbytes += nbytes
            made.append(block if block is not None else _Block(above, piece, b""))
            order.append(block)
            at += nbytes
        for number in sorted(range(len(order)), key=head["used"].__getitem__):
            block = order[number]
            if block is not None:
                self._use([block])


def _refused(path: str | Path, because: str) -> FileFormatError:
    return FileFormatError(f"read prefixes from {path}", because=because, fix="delete the file")


def fingerprint(model: Any, cache: Cache) -> str:
    """Tells models and forms of caches apart."""
    digest = blake2b(digest_size=16)
    for tensor in cache.tensors:
        digest.update(f"{tensor.dtype} {tensor.shape[1]} {tensor.shape[3]};".encode())
    gguf = getattr(model, "gguf", None)
    entries = {} if gguf is None else gguf.tensors
    for name, entry in sorted(entries.items()):
        data = model.gguf.data(name)
        digest.update(f"{name} {entry.shape} {entry.type.name};".encode())
        digest.update(data[: 1 << 12])
        digest.update(data[len(data) // 2 :][: 1 << 12])
    return digest.hexdigest()
