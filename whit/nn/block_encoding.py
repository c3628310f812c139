"""Numbers into blocks: the other way of `nn.blocks`, in NumPy, for files. Blocks of 32 get the scale that
takes their largest number; groups of K-quants the scale (and minimum) of least weighted squares among some
candidates, and the block's scale of scales then decides the numbers once more.

Halves are what files hold, so numbers are rounded with the scale as it will be read, where the format's own
encoder does so too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from whit.helpers import ArgumentError, ShapeError
from whit.nn.blocks import BlockType
from whit.uop.uop import show_shape

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[Any]

PIECE = 1 << 20  # numbers at a time: what is computed besides takes many times their memory


def encode(values: NDArray[Any], type: BlockType) -> NDArray[np.uint8]:
    """Numbers as blocks of bytes.

    Shapes:  (…, n * type.elements) -> (…, n * type.nbytes)
    Dtypes:  any float or integer -> uint8
    Errors:  ArgumentError for types that cannot be written and for numbers that are not finite, ShapeError
    for rows that are no whole blocks

    >>> import numpy as np
    >>> from whit.nn.blocks import block_type
    >>> encode(np.arange(32.0), block_type("Q8_0")).shape
    (34,)
    """
    import numpy as np

    values = np.asarray(values)
    if type.dtype is None and type.name not in _ENCODERS:
        raise ArgumentError(f"encode as {type.name}", because="whit only reads this type",
                            fix="one of F32, F16, BF16, " + ", ".join(_ENCODERS))  # fmt: skip
    if not values.ndim or values.shape[-1] % type.elements:
        raise ShapeError(f"encode {type.name} from shape {show_shape(values.shape)}",
                         because=f"rows are no whole blocks of {type.elements}",
                         fix="choose a type with smaller blocks")  # fmt: skip
    if type.dtype is not None:
        return _plain(values, type)
    result = np.empty((values.size // type.elements, type.nbytes), np.uint8)
    flat = values.reshape(-1, type.elements)
    step = max(1, PIECE // type.elements)
    for at in range(0, len(flat), step):
        piece = flat[at : at + step].astype(np.float32)
        if not np.isfinite(piece).all():
            raise ArgumentError(f"encode as {type.name}", because="there are numbers that are not finite",
                                fix="use F32, F16 or BF16")  # fmt: skip
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            result[at : at + step] = _ENCODERS[type.name](piece)
    return result.reshape(*values.shape[:-1], values.shape[-1] // type.elements * type.nbytes)


def _plain(values: Array, type: BlockType) -> NDArray[np.uint8]:
    import ml_dtypes
    import numpy as np

    assert type.dtype is not None
    numbers = values.astype(ml_dtypes.bfloat16 if type.name == "BF16" else np.dtype(type.dtype.name))
    return np.ascontiguousarray(numbers).view(np.uint8).reshape(*values.shape[:-1], -1)


# ---- parts of blocks
# -------------------------------------------------------------------------------------------


def _inverse(d: Array) -> Array:
    import numpy as np

    return np.where(d == 0, np.float32(0), np.float32(1) / d)


def _half(d: Array) -> NDArray[np.uint8]:
    import numpy as np

    return d.astype(np.float16).view(np.uint8)


def _as_read(d: Array) -> Array:
    """What a half will be read as."""
    import numpy as np

    return d.astype(np.float16).astype(np.float32)


def _away(x: Array) -> Array:
    """Rounded to whole numbers, halves away from zero."""
    import numpy as np

    size = np.abs(x)
    whole = np.floor(size)
    rounded: Array = np.sign(x) * (whole + (size - whole >= 0.5))
    return rounded


def _join(*parts: Array) -> NDArray[np.uint8]:
    import numpy as np

    return np.concatenate([part.reshape(len(part), -1).astype(np.uint8) for part in parts], axis=1)


def _fields(q: Array, count: int, bits: int) -> NDArray[np.uint8]:
    """(…, count, n) -> (…, n): numbers of some bits into bytes, the first in the lowest bits."""
    import numpy as np

    return np.bitwise_or.reduce([q[..., n, :].astype(np.uint8) << np.uint8(bits * n) for n in range(count)])  # type: ignore[no-any-return]


# ---- 32 numbers a block
# ------------------------------------------------------------------------------------------


def _symmetric(x: Array, most: int) -> tuple[Array, Array]:
    """Scale and numbers 0 … 2 * most - 1 around `most`: the number of greatest size becomes -most."""
    import numpy as np

    place = np.abs(x).argmax(1)[:, None]
    d = np.take_along_axis(x, place, 1) / np.float32(-most)
    q = np.trunc(x * _inverse(d) + np.float32(most + 0.5)).astype(np.int32)
    return d, q.clip(0, 2 * most - 1)


def _between(x: Array, most: int) -> tuple[Array, Array, Array]:
    """Scale, minimum, and numbers 0 … most."""
    import numpy as np

    low = x.min(1, keepdims=True)
    d = (x.max(1, keepdims=True) - low) / np.float32(most)
    return d, low, np.trunc((x - low) * _inverse(d) + np.float32(0.5)).astype(np.int32).clip(0, most)


def _nibbles(q: Array) -> NDArray[np.uint8]:
    return _fields(q.reshape(len(q), 2, 16) & 15, 2, 4)


def _fifth_bits(q: Array) -> NDArray[np.uint8]:
    import numpy as np

    return np.packbits((q >> 4).astype(np.uint8), axis=1, bitorder="little")


def _q4_0(x: Array) -> NDArray[np.uint8]:
    d, q = _symmetric(x, 8)
    return _join(_half(d), _nibbles(q))


def _q4_1(x: Array) -> NDArray[np.uint8]:
    d, m, q = _between(x, 15)
    return _join(_half(d), _half(m), _nibbles(q))


def _q5_0(x: Array) -> NDArray[np.uint8]:
    d, q = _symmetric(x, 16)
    return _join(_half(d), _fifth_bits(q), _nibbles(q))


def _q5_1(x: Array) -> NDArray[np.uint8]:
    d, m, q = _between(x, 31)
    return _join(_half(d), _half(m), _fifth_bits(q), _nibbles(q))


def _q8_0(x: Array) -> NDArray[np.uint8]:
    import numpy as np

    d = np.abs(x).max(1, keepdims=True) / np.float32(127)
    return _join(_half(d), _away(x * _inverse(d)).astype(np.int8).view(np.uint8))


def _mxfp4(x: Array) -> NDArray[np.uint8]:
    """The scale is the power of two that puts the largest number between 4 and 8; the nearest code, of two
    that are as near the first."""
    import numpy as np

    codes = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
    largest = np.abs(x).max(1, keepdims=True)
    e = np.where(largest > 0, np.floor(np.log2(largest)) + np.float32(125), 0).clip(0, 254).astype(np.int32)
    scale = np.ldexp(np.float32(1), e - 128).astype(np.float32)
    q = np.abs(scale[..., None] * codes - x[..., None]).argmin(-1)
    return _join(e, _nibbles(q))


# ---- 256 numbers a block
# ------------------------------------------------------------------------------------------


def _signed_scales(x: Array, most: int) -> Array:
    """For groups (…, n) the scale s of least sum x^2 (x - s q)^2 among candidates, q in -most … most - 1."""
    import numpy as np

    place = np.abs(x).argmax(-1)[..., None]
    largest, w = np.take_along_axis(x, place, -1), x * x
    best, score = np.zeros_like(largest), np.full_like(largest, -1)
    for n in range(-9, 10):
        q = np.rint(x * (np.float32(-(most + 0.1 * n)) * _inverse(largest))).clip(-most, most - 1)
        wq = w * q
        top, size = (wq * x).sum(-1, keepdims=True), (wq * q).sum(-1, keepdims=True)
        better = (size > 0) & (top * top > score * size)
        best = np.where(better, top / size, best)
        score = np.where(better, top * top / size, score)
    return best[..., 0]


def _scales_and_minima(x: Array, most: int) -> tuple[Array, Array]:
    """For groups (…, n) the s and m >= 0 of least weighted squares x - (s q - m), q in 0 … most."""
    import numpy as np

    w = np.sqrt((x * x).mean(-1, keepdims=True)) + np.abs(x)
    low = np.minimum(x.min(-1, keepdims=True), 0)
    span = x.max(-1, keepdims=True) - low
    sum_w, sum_x = w.sum(-1, keepdims=True), (w * x).sum(-1, keepdims=True)
    best = (span / np.float32(most), low, np.full_like(low, np.inf))
    for n in range(21):
        q = np.rint((x - low) * (np.float32(most - 1 + 0.1 * n) * _inverse(span))).clip(0, most)
        wq = w * q
        q1, q2, qx = (
            wq.sum(-1, keepdims=True),
            (wq * q).sum(-1, keepdims=True),
            (wq * x).sum(-1, keepdims=True),
        )
        size = sum_w * q2 - q1 * q1
        scale, start = (sum_w * qx - sum_x * q1) / size, (q2 * sum_x - q1 * qx) / size
        scale, start = np.where(start > 0, qx / q2, scale), np.minimum(start, 0)
        error = (w * (scale * q + start - x) ** 2).sum(-1, keepdims=True)
        better = (size > 0) & (q2 > 0) & (scale > 0) & (error < best[2])
        best = tuple(np.where(better, new, old) for new, old in zip((scale, start, error), best, strict=True))
    return best[0][..., 0], -best[1][..., 0]


def _ranked(scales: Array, most: int) -> tuple[Array, Array]:
    """A scale of scales as it will be read (n, 1), and the scales as whole numbers 0 … most."""
    import numpy as np

    d = _as_read(scales.max(1, keepdims=True) / np.float32(most))
    return d, np.rint(scales * _inverse(d)).clip(0, most).astype(np.int32)


def _offset_groups(
    x: Array, groups: int, most: int, most_scale: int
) -> tuple[Array, Array, Array, Array, Array]:
    """Scale of scales, of minima, both as whole numbers (n, groups), and the numbers (n, groups, size)."""
    import numpy as np

    x = x.reshape(len(x), groups, -1)
    scales, minima = _scales_and_minima(x, most)
    d, sc = _ranked(scales, most_scale)
    dm, mn = _ranked(minima, most_scale)
    own = (d * sc)[..., None]
    q = np.rint((x + (dm * mn)[..., None]) * _inverse(own)).clip(0, most).astype(np.int32)
    return d, dm, sc, mn, q


def _signed_groups(x: Array, most: int, most_scale: int) -> tuple[Array, Array, Array]:
    """Scale of scales, scales -most_scale … most_scale - 1 (n, 16), numbers -most … most - 1 (n, 16, 16)."""
    import numpy as np

    x = x.reshape(len(x), 16, 16)
    scales = _signed_scales(x, most)
    place = np.abs(scales).argmax(1)[:, None]
    d = _as_read(np.take_along_axis(scales, place, 1) / np.float32(-most_scale))
    sc = np.rint(scales * _inverse(d)).clip(-most_scale, most_scale - 1).astype(np.int32)
    q = np.rint(x * _inverse((d * sc)[..., None])).clip(-most, most - 1).astype(np.int32)
    return d, sc, q


def _six_bits(sc: Array, mn: Array) -> NDArray[np.uint8]:
    """Eight scales and eight minima in twelve bytes (`blocks._six_bits` takes them apart)."""
    first = sc[:, :4] | (sc[:, 4:] >> 4 << 6)
    second = mn[:, :4] | (mn[:, 4:] >> 4 << 6)
    return _join(first, second, (sc[:, 4:] & 15) | ((mn[:, 4:] & 15) << 4))


def _q4_k(x: Array) -> NDArray[np.uint8]:
    d, dm, sc, mn, q = _offset_groups(x, 8, 15, 63)
    return _join(_half(d), _half(dm), _six_bits(sc, mn), _fields(q.reshape(len(x), 4, 2, 32), 2, 4))


def _q5_k(x: Array) -> NDArray[np.uint8]:
    d, dm, sc, mn, q = _offset_groups(x, 8, 31, 63)
    low = _fields((q & 15).reshape(len(x), 4, 2, 32), 2, 4)
    return _join(_half(d), _half(dm), _six_bits(sc, mn), _fields(q >> 4, 8, 1), low)


def _q2_k(x: Array) -> NDArray[np.uint8]:
    d, dm, sc, mn, q = _offset_groups(x, 16, 3, 15)
    return _join(sc | mn << 4, _fields(q.reshape(len(x), 2, 4, 32), 4, 2), _half(d), _half(dm))


def _q6_k(x: Array) -> NDArray[np.uint8]:
    import numpy as np

    d, sc, q = _signed_groups(x, 32, 128)
    q = (q + 32).reshape(len(x), 2, 2, 64)
    high = _fields((q >> 4).reshape(len(x), 2, 4, 32), 4, 2)
    return _join(_fields(q & 15, 2, 4), high, sc.astype(np.int8).view(np.uint8), _half(d))


def _q3_k(x: Array) -> NDArray[np.uint8]:
    d, sc, q = _signed_groups(x, 4, 32)
    q, sc = q + 4, sc + 32
    third = _fields((q >> 2).reshape(len(x), 8, 32), 8, 1)
    low = _fields((q & 3).reshape(len(x), 2, 4, 32), 4, 2)
    scales = _fields((sc & 15).reshape(len(x), 2, 8), 2, 4), _fields((sc >> 4).reshape(len(x), 4, 4), 4, 2)
    return _join(third, low, *scales, _half(d))


_ENCODERS: dict[str, Callable[[Any], Any]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "MXFP4": _mxfp4,
}  # fmt: skip
