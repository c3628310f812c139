"""Weights in blocks, as GGUF files hold them: each block of 16 to 256 numbers is a few bytes of scales and
some bits a number. `decode` is a plain expression on the bytes, so that it fuses into whatever reads the
weights.

    name    numbers  bytes   fields                              value
    Q4_0         32     18   half d; 16 bytes of two nibbles     d * (q - 8)
    Q4_K        256    144   half d, m; 8 scales and minima of   d * scale * q - m * minimum
                             6 bits; 128 bytes of two nibbles
    …

The low nibbles of a run of bytes are one run of numbers, the high nibbles the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from whit.helpers import ArgumentError, DTypeError, ShapeError
from whit.tensor import Tensor
from whit.uop import DType, dtypes
from whit.uop.uop import show_shape


class BlockType(NamedTuple):
    """How numbers are stored: `elements` of them in a block of `nbytes`. Types with a `dtype` are plain
    numbers."""

    name: str
    id: int
    elements: int
    nbytes: int
    dtype: DType | None = None

    @property
    def bits(self) -> float:
        """Bits that a number takes."""
        return 8 * self.nbytes / self.elements

    def __repr__(self) -> str:
        return f"BlockType({self.name})"


_PLAIN = [
    BlockType("F32", 0, 1, 4, dtypes.float32),
    BlockType("F16", 1, 1, 2, dtypes.float16),
    BlockType("I8", 24, 1, 1, dtypes.int8),
    BlockType("I16", 25, 1, 2, dtypes.int16),
    BlockType("I32", 26, 1, 4, dtypes.int32),
    BlockType("I64", 27, 1, 8, dtypes.int64),
    BlockType("F64", 28, 1, 8, dtypes.float64),
    BlockType("BF16", 30, 1, 2, dtypes.bfloat16),
]
_PACKED = [
    BlockType("Q4_0", 2, 32, 18),
    BlockType("Q4_1", 3, 32, 20),
    BlockType("Q5_0", 6, 32, 22),
    BlockType("Q5_1", 7, 32, 24),
    BlockType("Q8_0", 8, 32, 34),
    BlockType("Q2_K", 10, 256, 84),
    BlockType("Q3_K", 11, 256, 110),
    BlockType("Q4_K", 12, 256, 144),
    BlockType("Q5_K", 13, 256, 176),
    BlockType("Q6_K", 14, 256, 210),
]
# by the number that files give the type
BLOCK_TYPES: dict[int, BlockType] = {
    kind.id: kind for kind in sorted(_PLAIN + _PACKED, key=lambda kind: kind.id)
}
_BY_NAME = {kind.name: kind for kind in BLOCK_TYPES.values()}


def block_type(name: str) -> BlockType:
    """The type of that name, in any case. ArgumentError for unknown ones.

    >>> block_type("q4_k").nbytes
    144
    """
    found = _BY_NAME.get(name.upper()) if isinstance(name, str) else None
    if found is None:
        raise ArgumentError(
            f"block type {name!r}", because="there is no such type", fix="one of " + ", ".join(_BY_NAME)
        )
    return found


def decode(raw: Tensor, type: BlockType) -> Tensor:
    """The numbers in blocks of bytes.

    Shapes:  raw (…, n * type.nbytes) -> (…, n * type.elements)
    Dtypes:  uint8 -> float32; plain numbers keep their type
    Errors:  DTypeError if raw is not bytes, ShapeError for a broken block

    >>> decode(Tensor([0, 60, *range(32)], dtype="uint8"), block_type("Q8_0"))[-2:].tolist()  # scale 1.0
    [30.0, 31.0]
    """
    if raw.dtype is not dtypes.uint8:
        raise DTypeError(
            f"decode {type.name} from {raw.dtype}", because="blocks are bytes", fix="bitcast to uint8"
        )
    if not raw.ndim or not isinstance(raw.shape[-1], int) or raw.shape[-1] % type.nbytes:
        raise ShapeError(
            f"decode {type.name} from bytes of shape {show_shape(raw.shape)}",
            because=f"a block has {type.nbytes} bytes, and the last axis is no whole number of them",
            fix="pass whole rows",
        )
    if type.dtype is not None:
        return raw.bitcast(type.dtype)
    lead, count = raw.shape[:-1], raw.shape[-1] // type.nbytes
    values = _DECODERS[type.name](raw.reshape(*lead, count, type.nbytes))
    return values.reshape(*lead, count * type.elements)


# ---- parts of blocks: b is (…, blocks, bytes) --------------------------------------------------------------


def _half(b: Tensor, at: int) -> Tensor:
    """The float16 at a byte, as float32 (…, blocks, 1)."""
    return b[..., at : at + 2].bitcast(dtypes.float16).cast(dtypes.float32)


def _bytes(b: Tensor, at: int, *shape: int) -> Tensor:
    """Bytes from a place on, as (…, blocks, *shape)."""
    count = 1
    for size in shape:
        count *= size
    return b[..., at : at + count].reshape(*b.shape[:-1], *shape)


def _steps(count: int, step: int, axes: int) -> Tensor:
    """0, step, 2 * step, … along an axis that has `axes` others behind it."""
    return (Tensor.arange(count, dtype=dtypes.uint32) * step).reshape(count, *[1] * axes)


def _fields(bytes_: Tensor, count: int, bits: int) -> Tensor:
    """Fields of some bits, lowest first: (…, 1, n) -> (…, count, n). Words as wide as the numbers that they become:
    the bytes are widened once for all fields."""
    return bytes_.cast(dtypes.uint32).rshift(_steps(count, bits, 1)) & ((1 << bits) - 1)


def _number(q: Tensor, less: int = 0) -> Tensor:
    """Small whole numbers as float32, less a constant."""
    value = q.cast(dtypes.float32)
    return value - less if less else value


# ---- 32 numbers a block ------------------------------------------------------------------------------------


def _nibbles(b: Tensor, at: int) -> Tensor:
    return _fields(_bytes(b, at, 1, 16), 2, 4).reshape(*b.shape[:-1], 32)


def _fifth_bits(b: Tensor, at: int) -> Tensor:
    """Bit j of a 32-bit word for number j, in the place of 16: (…, blocks, 32)."""
    word = _bytes(b, at, 4).bitcast(dtypes.uint32)
    return (word.rshift(_steps(32, 1, 0)) & 1).lshift(4)


def _q4_0(b: Tensor) -> Tensor:
    return _half(b, 0) * _number(_nibbles(b, 2), 8)


def _q4_1(b: Tensor) -> Tensor:
    return _half(b, 0) * _number(_nibbles(b, 4)) + _half(b, 2)


def _q5_0(b: Tensor) -> Tensor:
    return _half(b, 0) * _number(_nibbles(b, 6) | _fifth_bits(b, 2), 16)


def _q5_1(b: Tensor) -> Tensor:
    return _half(b, 0) * _number(_nibbles(b, 8) | _fifth_bits(b, 4)) + _half(b, 2)


def _q8_0(b: Tensor) -> Tensor:
    return _half(b, 0) * _bytes(b, 2, 32).bitcast(dtypes.int8).cast(dtypes.float32)


# ---- 256 numbers a block -----------------------------------------------------------------------------------


def _six_bits(b: Tensor, at: int) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima of six bits in twelve bytes, as float32 (…, blocks, 8, 1).

    The first four have bytes of their own, 0 to 3 and 4 to 7; of the others the low nibbles are those of
    bytes 8 to 11 and the high bits are the upper two of the first eight bytes.
    """
    first, second, shared = [_bytes(b, at + 4 * n, 1, 4) for n in range(3)]
    early = _steps(2, 1, 1) == 0
    scales = early.where(first & 63, (shared & 15) | (first.rshift(2) & 0x30))
    minima = early.where(second & 63, shared.rshift(4) | (second.rshift(2) & 0x30))
    shape = (*b.shape[:-1], 8, 1)
    return _number(scales).reshape(*shape), _number(minima).reshape(*shape)


def _scaled_groups(b: Tensor, q: Tensor) -> Tensor:
    """d * scale * q - m * minimum for eight groups of 32: q is (…, blocks, 8, 32)."""
    scales, minima = _six_bits(b, 4)
    d, m = _half(b, 0).unsqueeze(-1) * scales, _half(b, 2).unsqueeze(-1) * minima
    return d * _number(q) - m


def _q4_k(b: Tensor) -> Tensor:
    return _scaled_groups(b, _fields(_bytes(b, 16, 4, 1, 32), 2, 4).reshape(*b.shape[:-1], 8, 32))


def _q5_k(b: Tensor) -> Tensor:
    low = _fields(_bytes(b, 48, 4, 1, 32), 2, 4).reshape(*b.shape[:-1], 8, 32)
    return _scaled_groups(b, low | _fields(_bytes(b, 16, 1, 32), 8, 1).lshift(4))


def _q6_k(b: Tensor) -> Tensor:
    """Two halves of 128: numbers 0 to 63 have the low nibbles of 64 bytes, the others the high ones; the
    upper two bits are the four fields of 32 bytes. Sixteen numbers share a scale."""
    lead = b.shape[:-1]
    low = _fields(_bytes(b, 0, 2, 1, 64), 2, 4).reshape(*lead, 2, 4, 32)
    high = _fields(_bytes(b, 128, 2, 1, 32), 4, 2)
    scales = _half(b, 208) * _bytes(b, 192, 16).bitcast(dtypes.int8).cast(dtypes.float32)
    return scales.unsqueeze(-1) * _number(low | high.lshift(4), 32).reshape(*lead, 16, 16)


def _two_bits(b: Tensor, at: int) -> Tensor:
    """Two halves of 128 in 32 bytes each, as (…, blocks, 16, 16)."""
    return _fields(_bytes(b, at, 2, 1, 32), 4, 2).reshape(*b.shape[:-1], 16, 16)


def _q2_k(b: Tensor) -> Tensor:
    scales = _bytes(b, 0, 16, 1)
    d, m = _half(b, 80).unsqueeze(-1), _half(b, 82).unsqueeze(-1)
    return d * _number(scales & 15) * _number(_two_bits(b, 16)) - m * _number(scales.rshift(4))


def _q3_k(b: Tensor) -> Tensor:
    """A third bit in 32 bytes of masks, where 0 means minus four; scales of six bits: nibbles in eight bytes,
    low ones first, and the upper bits in the four fields of four bytes."""
    lead = b.shape[:-1]
    third = _fields(_bytes(b, 0, 1, 32), 8, 1).reshape(*lead, 16, 16)
    low = _fields(_bytes(b, 96, 1, 8), 2, 4).reshape(*lead, 16)
    high = _fields(_bytes(b, 104, 1, 4), 4, 2).reshape(*lead, 16)
    scales = _half(b, 108) * _number(low | high.lshift(4), 32)
    return scales.unsqueeze(-1) * _number(_two_bits(b, 32) | third.lshift(2), 4)


_DECODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
