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
from typing import Any, NamedTuple

from whit.helpers import ArgumentError, DTypeError, ShapeError
from whit.tensor import Tensor
from whit.uop import DType, Ops, UOp, dtypes
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
    BlockType("Q8_1", 9, 32, 36),
    BlockType("Q8_K", 15, 256, 292),
    BlockType("IQ2_XXS", 16, 256, 66),
    BlockType("IQ2_XS", 17, 256, 74),
    BlockType("IQ3_XXS", 18, 256, 98),
    BlockType("IQ1_S", 19, 256, 50),
    BlockType("IQ4_NL", 20, 32, 18),
    BlockType("IQ3_S", 21, 256, 110),
    BlockType("IQ2_S", 22, 256, 82),
    BlockType("IQ4_XS", 23, 256, 136),
    BlockType("IQ1_M", 29, 256, 56),
    BlockType("TQ1_0", 34, 256, 54),
    BlockType("TQ2_0", 35, 256, 66),
    BlockType("MXFP4", 39, 32, 17),
    BlockType("NVFP4", 40, 64, 36),
    BlockType("Q1_0", 41, 128, 18),
    BlockType("Q2_0", 42, 64, 18),
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
    blocks = raw.reshape(*lead, count, type.nbytes)
    found = _PARTS.get(type.name)
    values = _DECODERS[type.name](blocks) if found is None else found(blocks).values()
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
    """Fields of some bits, lowest first: (…, 1, n) -> (…, count, n). They are words, as wide as the numbers
    that they become: bytes are widened once for all their fields."""
    return bytes_.cast(dtypes.uint32).rshift(_steps(count, bits, 1)) & ((1 << bits) - 1)


def _where(condition: Any, yes: Any, no: Any) -> Tensor:
    chosen: Tensor = condition.where(yes, no)
    return chosen


class Parts(NamedTuple):
    """What blocks hold: scale * (q - less) + more, with small whole numbers q (…, blocks, numbers), or in
    groups (…, blocks, groups, numbers). A block or a group has one scale, and one `more` if its type has any.
    """

    scale: Tensor
    q: Tensor
    less: int = 0
    more: Tensor | None = None

    def values(self) -> Tensor:
        scaled = self.scale * _number(self.q, self.less)
        return scaled if self.more is None else scaled + self.more


def parts(raw: Tensor, type: BlockType) -> Parts | None:
    """The whole numbers and scales in blocks of bytes, (…, blocks, groups, numbers) and
    (…, blocks, groups, 1); None for types that have none: plain numbers, and those whose entries come from
    codebooks."""
    if type.name not in _PARTS:
        return None
    lead, count = raw.shape[:-1], raw.shape[-1] // type.nbytes
    found = _PARTS[type.name](raw.reshape(*lead, count, type.nbytes))
    groups = found.q.shape[-2] if found.q.ndim == len(lead) + 3 else 1
    scale, q, more = [
        None if t is None else t.reshape(*lead, count, groups, t.shape[-1])
        for t in (found.scale, found.q, found.more)
    ]
    assert scale is not None and q is not None
    return Parts(scale, q, found.less, more)


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


def _q4_0(b: Tensor) -> Parts:
    return Parts(_half(b, 0), _nibbles(b, 2), 8)


def _q4_1(b: Tensor) -> Parts:
    return Parts(_half(b, 0), _nibbles(b, 4), more=_half(b, 2))


def _q5_0(b: Tensor) -> Parts:
    return Parts(_half(b, 0), _nibbles(b, 6) | _fifth_bits(b, 2), 16)


def _q5_1(b: Tensor) -> Parts:
    return Parts(_half(b, 0), _nibbles(b, 8) | _fifth_bits(b, 4), more=_half(b, 2))


def _q8_0(b: Tensor) -> Parts:
    return Parts(_half(b, 0), _bytes(b, 2, 32).bitcast(dtypes.int8))


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


def _scaled_groups(b: Tensor, q: Tensor) -> Parts:
    """d * scale * q - m * minimum for eight groups of 32: q is (…, blocks, 8, 32)."""
    scales, minima = _six_bits(b, 4)
    d, m = _half(b, 0).unsqueeze(-1) * scales, _half(b, 2).unsqueeze(-1) * minima
    return Parts(d, q, more=-m)


def _q4_k(b: Tensor) -> Parts:
    return _scaled_groups(b, _fields(_bytes(b, 16, 4, 1, 32), 2, 4).reshape(*b.shape[:-1], 8, 32))


def _q5_k(b: Tensor) -> Parts:
    low = _fields(_bytes(b, 48, 4, 1, 32), 2, 4).reshape(*b.shape[:-1], 8, 32)
    return _scaled_groups(b, low | _fields(_bytes(b, 16, 1, 32), 8, 1).lshift(4))


def _q6_k(b: Tensor) -> Parts:
    """Two halves of 128: numbers 0 to 63 have the low nibbles of 64 bytes, the others the high ones; the
    upper two bits are the four fields of 32 bytes. Sixteen numbers share a scale."""
    lead = b.shape[:-1]
    low = _fields(_bytes(b, 0, 2, 1, 64), 2, 4).reshape(*lead, 2, 4, 32)
    high = _fields(_bytes(b, 128, 2, 1, 32), 4, 2)
    scales = _half(b, 208) * _bytes(b, 192, 16).bitcast(dtypes.int8).cast(dtypes.float32)
    return Parts(scales.unsqueeze(-1), (low | high.lshift(4)).reshape(*lead, 16, 16), 32)


def _two_bits(b: Tensor, at: int) -> Tensor:
    """Two halves of 128 in 32 bytes each, as (…, blocks, 16, 16)."""
    return _fields(_bytes(b, at, 2, 1, 32), 4, 2).reshape(*b.shape[:-1], 16, 16)


def _q2_k(b: Tensor) -> Parts:
    scales = _bytes(b, 0, 16, 1)
    d, m = _half(b, 80).unsqueeze(-1), _half(b, 82).unsqueeze(-1)
    return Parts(d * _number(scales & 15), _two_bits(b, 16), more=-(m * _number(scales.rshift(4))))


def _q3_k(b: Tensor) -> Parts:
    """A third bit in 32 bytes of masks, where 0 means minus four; scales of six bits: nibbles in eight bytes,
    low ones first, and the upper bits in the four fields of four bytes."""
    lead = b.shape[:-1]
    third = _fields(_bytes(b, 0, 1, 32), 8, 1).reshape(*lead, 16, 16)
    low = _fields(_bytes(b, 96, 1, 8), 2, 4).reshape(*lead, 16)
    high = _fields(_bytes(b, 104, 1, 4), 4, 2).reshape(*lead, 16)
    scales = _half(b, 108) * _number(low | high.lshift(4), 32)
    return Parts(scales.unsqueeze(-1), _two_bits(b, 32) | third.lshift(2), 4)


def _word(b: Tensor, at: int, count: int, dtype: DType) -> Tensor:
    """`count` integers of two or four bytes from a byte on, as uint32 (…, blocks, count)."""
    return b[..., at : at + count * dtype.itemsize].bitcast(dtype).cast(dtypes.uint32)


def _run(bytes_: Tensor, count: int, bits: int) -> Tensor:
    """All fields of each of some integers, one after the other: (…, n) -> (…, n * count)."""
    found = bytes_.cast(dtypes.uint32).unsqueeze(-1).rshift(_steps(count, bits, 0)) & ((1 << bits) - 1)
    return found.reshape(*bytes_.shape[:-1], bytes_.shape[-1] * count)


def _q8_1(b: Tensor) -> Parts:
    """As Q8_0, with the scale times the sum of q behind the scale."""
    return Parts(_half(b, 0), _bytes(b, 4, 32).bitcast(dtypes.int8))


def _q8_k(b: Tensor) -> Parts:
    """A scale that is a float32; sums of each 16 numbers at the end."""
    scale = b[..., :4].bitcast(dtypes.float32)
    return Parts(scale, _bytes(b, 4, 256).bitcast(dtypes.int8))


def _q1_0(b: Tensor) -> Tensor:
    scale = _half(b, 0)
    return _where(_run(_bytes(b, 2, 16), 8, 1) == 0, -scale, scale)


def _q2_0(b: Tensor) -> Parts:
    return Parts(_half(b, 0), _run(_bytes(b, 2, 16), 4, 2), 1)


# ---- three values a number ---------------------------------------------------------------------------------


def _tq1_0(b: Tensor) -> Parts:
    """Five numbers a byte in base three: 32 bytes, then 16, then four numbers in each of four bytes. A byte
    is a fraction of 256, of which multiplications by three bring out one digit after the other."""
    digits = [_digits(_bytes(b, at, 1, n), count) for at, n, count in ((0, 32, 5), (32, 16, 5), (48, 4, 4))]
    return Parts(_half(b, 52), digits[0].cat(*digits[1:], dim=-1), 1)


def _digits(bytes_: Tensor, count: int) -> Tensor:
    """The digits of each byte, all first ones first."""
    n = _steps(count, 1, 1)
    power = _where(n & 1 == 0, 1, 3) * _where(n & 2 == 0, 1, 9) * _where(n & 4 == 0, 1, 81)
    fraction = (bytes_.cast(dtypes.uint32) * power.cast(dtypes.uint32)) & 255
    return (fraction * 3).rshift(8).flatten(-2)


def _tq2_0(b: Tensor) -> Parts:
    return Parts(_half(b, 64), _two_bits(b, 0).flatten(-2), 1)


# ---- values from a list ------------------------------------------------------------------------------------

_STEPS_4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _listed(q: Tensor) -> Tensor:
    """The uneven steps of the IQ4 types: entry q of `_STEPS_4`, from four words of four bytes."""
    words = [int.from_bytes(bytes(v & 255 for v in _STEPS_4[n : n + 4]), "little") for n in range(0, 16, 4)]
    first, second, third, fourth = [Tensor(word, dtype=dtypes.uint32) for word in words]
    low, high = _where(q & 4 == 0, first, second), _where(q & 4 == 0, third, fourth)
    return (
        _where(q & 8 == 0, low, high)
        .rshift((q & 3) * 8)
        .cast(dtypes.uint8)
        .bitcast(dtypes.int8)
    )


def _iq4_nl(b: Tensor) -> Parts:
    return Parts(_half(b, 0), _listed(_nibbles(b, 2)))


def _iq4_xs(b: Tensor) -> Parts:
    """Eight scales of six bits: nibbles, and a word of upper bits."""
    low = _run(_bytes(b, 4, 4), 2, 4)
    high = _word(b, 2, 1, dtypes.uint16).rshift(_steps(8, 2, 0)) & 3
    scales = _half(b, 0) * _number(low | high.lshift(4), 32)
    q = _fields(_bytes(b, 8, 8, 1, 16), 2, 4).reshape(*b.shape[:-1], 8, 32)
    return Parts(scales.unsqueeze(-1), _listed(q))


def _doubled_e2m1(q: Tensor) -> Tensor:
    """0, 1, 2, 3, 4, 6, 8, 12 and their negatives: twice the four-bit floats of OCP Microscaling."""
    exponent = q.rshift(1) & 3
    lead = (exponent != 0).cast(dtypes.uint32)
    size = ((q & 1) | lead.lshift(1)).lshift(exponent - lead).cast(dtypes.int32)
    return _where(q & 8 == 0, size, -size)


def _mxfp4(b: Tensor) -> Parts:
    """The scale is a power of two, 2^(e - 128); the least two are denormal."""
    e = _bytes(b, 0, 1).cast(dtypes.uint32)
    bits = _where(e < 2, Tensor(1 << 21, dtype=dtypes.uint32).lshift(e), (e - 1).lshift(23))
    return Parts(bits.bitcast(dtypes.float32), _doubled_e2m1(_nibbles(b, 1)))


def _nvfp4(b: Tensor) -> Parts:
    """Four groups of 16 with scales of type E4M3, halved; 127 is 0. As a half the scale is 2^-8 of what it
    is."""
    e = _bytes(b, 0, 4)
    scale = (e & 127).cast(dtypes.uint16).lshift(7).bitcast(dtypes.float16).cast(dtypes.float32) * 128.0
    q = _fields(_bytes(b, 4, 4, 1, 8), 2, 4).reshape(*b.shape[:-1], 4, 16)
    return Parts(_where(e == 127, 0.0, scale).unsqueeze(-1), _doubled_e2m1(q))


# ---- codebooks ---------------------------------------------------------------------------------------------


def _entries(name: str, places: Tensor, count: int, bits: int) -> Tensor:
    """The small numbers of codebook entries, `count` for each place: (…, n) -> (…, n, count)."""
    from whit.nn.codebooks import codebook

    book = Tensor(codebook(name)).bitcast(dtypes.uint16)
    words = Tensor._wrap(UOp(Ops.TAKE, dtypes.uint16, (book.uop, places.cast(dtypes.int32).uop), 0))
    return words.cast(dtypes.uint32).unsqueeze(-1).rshift(_steps(count, bits, 0)) & ((1 << bits) - 1)


def _grid2(c: Tensor) -> Tensor:
    """0, 1, 2 -> 8, 25, 43."""
    return _number(c * 17 + c.rshift(1) + 8)


def _signs(bits: Tensor) -> Tensor:
    """Bytes, one bit a number -> -1.0 where it is set: (…, n) -> (…, n, 8)."""
    return _where(bits.cast(dtypes.uint32).unsqueeze(-1).rshift(_steps(8, 1, 0)) & 1 == 0, 1.0, -1.0)


def _even_signs(seven: Tensor) -> Tensor:
    """Seven bits, and an eighth that makes the number of set ones even."""
    folded = seven ^ seven.rshift(4)
    folded = folded ^ folded.rshift(2)
    return _signs(seven | ((folded ^ folded.rshift(1)) & 1).lshift(7))


def _scaled(scale: Tensor, values: Tensor, signs: Tensor) -> Tensor:
    """scale (…, blocks, groups) * values * signs, both (…, blocks, n, m); as (…, blocks, 256)."""
    groups = scale.shape[-1]
    values, signs = (t.reshape(*scale.shape, 256 // groups) for t in (values, signs))
    return scale.unsqueeze(-1) * values * signs


def _iq2_xxs(b: Tensor) -> Tensor:
    """Eight groups: four places; a word of four signs of seven bits and a scale of four."""
    words = b[..., 2:66].bitcast(dtypes.uint32).reshape(*b.shape[:-1], 8, 2)
    first, second = words[..., 0], words[..., 1]
    scale = _half(b, 0) * (_number(second.rshift(28)) + 0.5) * 0.25
    values = _grid2(_entries("IQ2_XXS", _run(first, 4, 8), 8, 2))
    return _scaled(scale, values, _even_signs(_run(second, 4, 7)))


def _iq2_xs(b: Tensor) -> Tensor:
    """Words of a place (nine bits) and signs; a scale of four bits for two of them."""
    words = _word(b, 2, 32, dtypes.uint16)
    scale = _half(b, 0) * (_number(_run(_bytes(b, 66, 8), 2, 4)) + 0.5) * 0.25
    return _scaled(scale, _grid2(_entries("IQ2_XS", words & 511, 8, 2)), _even_signs(words.rshift(9)))


def _iq2_s(b: Tensor) -> Tensor:
    """Places of ten bits, the upper two in bytes of their own; signs as bytes."""
    places = _bytes(b, 2, 32).cast(dtypes.uint32) | _run(_bytes(b, 66, 8), 4, 2).lshift(8)
    scale = _half(b, 0) * (_number(_run(_bytes(b, 74, 8), 2, 4)) + 0.5) * 0.25
    return _scaled(scale, _grid2(_entries("IQ2_S", places, 8, 2)), _signs(_bytes(b, 34, 32)))


def _iq3_xxs(b: Tensor) -> Tensor:
    """64 places of four numbers each; words as in IQ2_XXS."""
    words = _word(b, 66, 8, dtypes.uint32)
    scale = _half(b, 0) * (_number(words.rshift(28)) + 0.5) * 0.5
    c = _entries("IQ3_XXS", _bytes(b, 2, 64), 4, 3)
    values = _number(c * 8 + _where(c == 7, 6, 4).cast(dtypes.uint32))
    return _scaled(scale, values, _even_signs(_run(words, 4, 7)))


def _iq3_s(b: Tensor) -> Tensor:
    places = _bytes(b, 2, 64).cast(dtypes.uint32) | _run(_bytes(b, 66, 8), 8, 1).lshift(8)
    scale = _half(b, 0) * _number(_run(_bytes(b, 106, 4), 2, 4) * 2 + 1)
    values = _number(_entries("IQ3_S", places, 4, 3) * 2 + 1)
    return _scaled(scale, values, _signs(_bytes(b, 74, 32)))


def _iq1(scale: Tensor, places: Tensor, minus: Any) -> Tensor:
    """scale * (c - 1 + delta): an eighth is added, or subtracted where `minus` holds, for each entry."""
    values = _number(_entries("IQ1", places, 8, 2), 1)  # (…, blocks, 32, 8)
    delta = _where(minus, -0.125, 0.125).reshape(*places.shape[:-1], -1, 1)
    delta = delta.expand(*places.shape[:-1], delta.shape[-2], 32 // delta.shape[-2]).reshape(*places.shape, 1)
    values = (values + delta).reshape(*scale.shape, 256 // scale.shape[-1])
    return scale.unsqueeze(-1) * values


def _iq1_s(b: Tensor) -> Tensor:
    """Eight words: upper three bits of four places, a scale of three bits, the sign of delta."""
    words = _word(b, 34, 8, dtypes.uint16)
    scale = _half(b, 0) * _number((words.rshift(12) & 7) * 2 + 1)
    places = _bytes(b, 2, 32).cast(dtypes.uint32) | _run(words, 4, 3).lshift(8)
    return _iq1(scale, places, words.rshift(15) != 0)


def _iq1_m(b: Tensor) -> Tensor:
    """Four words of four scales of three bits; their upper nibbles are the block's scale, a half."""
    words = _word(b, 48, 4, dtypes.uint16)
    top = words.rshift(12)
    bits = top[..., 0:1] | top[..., 1:2].lshift(4) | top[..., 2:3].lshift(8) | top[..., 3:4].lshift(12)
    half = bits.cast(dtypes.uint16).bitcast(dtypes.float16).cast(dtypes.float32)
    scale = half * _number(_run(words, 4, 3) * 2 + 1)
    upper = _run(_bytes(b, 32, 16), 2, 4)
    places = _bytes(b, 0, 32).cast(dtypes.uint32) | (upper & 7).lshift(8)
    return _iq1(scale, places, upper & 8 != 0)


_PARTS: dict[str, Callable[[Tensor], Parts]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q8_1": _q8_1,
    "Q2_0": _q2_0, "Q8_K": _q8_k, "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
    "TQ1_0": _tq1_0, "TQ2_0": _tq2_0, "MXFP4": _mxfp4, "NVFP4": _nvfp4, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs,
}  # fmt: skip
_DECODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q1_0": _q1_0, "IQ2_XXS": _iq2_xxs, "IQ2_XS": _iq2_xs, "IQ2_S": _iq2_s, "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s, "IQ1_S": _iq1_s, "IQ1_M": _iq1_m,
}  # fmt: skip
