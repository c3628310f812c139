"""Products of vectors with weights in blocks, in whole numbers: the vector is rounded to 8 bits in blocks as
the weights have them, and what a block adds is a sum of products of small whole numbers, exact.

    x  ->  q * d with d = max |x| / 127 in each block
    y[n] = sum_b d[b] * (scale[n, b] * sum_e w[n, b, e] * q[b, e] + more[n, b] * sum_e q[b, e])

It is how llama.cpp computes. Rounding errs by 1/250 of the greatest number of a block at most; what comes out
depends on the last bits of x, since a number between two steps may go to either.
"""

from __future__ import annotations

from typing import NamedTuple

from whit.helpers import prod
from whit.nn.blocks import BlockType, Parts, decode, parts
from whit.tensor import Tensor
from whit.uop import dtypes


class Rounded(NamedTuple):
    """A vector in blocks: x is about d * q, with q (…, blocks, numbers) int8 and d (…, blocks, 1) float32."""

    q: Tensor
    d: Tensor

    def values(self) -> Tensor:
        """The vector that these are: (…, blocks * numbers) float32."""
        return (self.q.cast(dtypes.float32) * self.d).flatten(-2)


def rounded(x: Tensor, type: BlockType) -> Rounded:
    """x in 8 bits, in blocks as weights of this type meet them; the scale of a block of 32 is a half.

    Shapes:  x (…, columns) with whole blocks -> q (…, blocks, numbers), d (…, blocks, 1)
    Dtypes:  float32 -> int8, float32

    >>> from whit.nn.blocks import block_type
    >>> found = rounded(Tensor([[1.0] * 16 + [-127.0] * 16]), block_type("Q8_0"))
    >>> found.q[0, 0, 15:17].tolist(), found.d.tolist()
    ([1, -127], [[[1.0]]])
    """
    size = 256 if type.elements == 256 else 32
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // size, size)
    most = blocks.abs().max(-1, keepdim=True)
    q = (blocks * (most != 0).where(127 / most, 0.0)).round().cast(dtypes.int8)
    d = most / 127
    d = d.cast(dtypes.float16).cast(dtypes.float32) if size == 32 else d
    return Rounded(q.contiguous(), d.contiguous())


def multiply(x: Tensor, raw: Tensor, type: BlockType) -> Tensor:
    """x, rounded to 8 bits, times weights in blocks. Several vectors, and weights from codebooks, are
    multiplied in float32, by the same rounded x.

    Shapes:  x (…, columns) float32, raw (rows, bytes of a row) uint8 -> (…, rows) float32

    >>> from whit.nn.blocks import block_type
    >>> ones = Tensor([[0, 60, *[1] * 32]], dtype="uint8")  # 32 ones: the half 1.0, then 32 bytes
    >>> multiply(Tensor([[1.0] * 16 + [-127.0] * 16]), ones, block_type("Q8_0")).tolist()
    [[-2016.0]]
    """
    vector = rounded(x, type)
    found = parts(raw, type) if prod(x.shape[:-1]) == 1 else None
    if found is None:
        return vector.values().matmul(decode(raw, type).transpose(-1, -2))
    return _sums(vector, found).reshape(*x.shape[:-1], raw.shape[0])


def _sums(vector: Rounded, weights: Parts) -> Tensor:
    """(rows,) from whole numbers and one vector."""
    rows, blocks, groups, size = weights.q.shape
    x = vector.q.reshape(1, blocks, groups, size).cast(dtypes.int32)
    d = vector.d.reshape(1, blocks, 1)
    w = weights.q.cast(dtypes.int32)
    dots = ((w - weights.less if weights.less else w) * x).sum(-1).cast(dtypes.float32)
    total = dots * (weights.scale.reshape(rows, blocks, groups) * d)
    if weights.more is not None:
        sums = (x.sum(-1).cast(dtypes.float32) * d).contiguous()
        total = total + weights.more.reshape(rows, blocks, groups) * sums
    return total.sum((-1, -2))
