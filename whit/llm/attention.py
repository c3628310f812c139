"""Attention of a language model: grouped heads, windows, capped scores, sinks, positions that turn; and the
memory of its keys and values."""

from __future__ import annotations

import math
from typing import Any

from whit.tensor import Tensor
from whit.uop import DType, UOp, dtypes

BLOCK = 16  # positions that are read together: a vector of them


class Memory:
    """Keys, or values, of one layer for several sequences: `rows` (slots, heads, positions, size of a head),
    floats, or int8 with a scale for each row: (slots, heads, positions, 1) float32."""

    def __init__(self, slots: int, heads: int, positions: int, size: int, dtype: DType) -> None:
        self.rows = Tensor.empty(slots, heads, positions, size, dtype=dtype)
        self.scales = Tensor.empty(slots, heads, positions, 1) if dtype is dtypes.int8 else None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.rows] if self.scales is None else [self.rows, self.scales]

    def write(self, slot: UOp, first: UOp, x: Tensor) -> None:
        """Put x (heads, t, size) at positions `first` … of a slot; of int8, each row as whole numbers up to
        127 times a scale."""
        part = slice(first, first + x.shape[1])
        if self.scales is None:
            self.rows[slot, :, part] = x
            return
        scale = x.abs().max(-1, keepdim=True) * (1 / 127)
        self.rows[slot, :, part] = scale.eq(0).where(0.0, x / scale).round().cast(dtypes.int8)
        self.scales[slot, :, part] = scale

    def read(self, slot: UOp | None, slots: Tensor | None, low: UOp | int, blocks: UOp) -> Tensor:
        """`blocks` of BLOCK positions from `low` on, of one slot or of several: (b, heads, blocks, BLOCK,
        size)."""
        rows = _stretch(self.rows, slot, slots, low, blocks)
        if self.scales is None:
            return rows
        return rows.cast(dtypes.float32) * _stretch(self.scales, slot, slots, low, blocks)


def _stretch(memory: Tensor, slot: UOp | None, slots: Tensor | None, low: Any, blocks: UOp) -> Tensor:
    memory = memory if slot is None else memory[slot : slot + 1]
    part = memory[:, :, low : low + blocks * BLOCK]
    if slots is not None:
        part = part.take(slots, 0)
    return part.reshape(part.shape[0], part.shape[1], blocks, BLOCK, part.shape[3])


def rotate(x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
    """Turn pairs of numbers of each head by their position's angles (Su et al. 2021).

    Shapes:  x (…, t, d), cos and sin (…, t, n) with n <= d / 2 -> (…, t, d); numbers past 2n stay as they
             are.
    `neighbours`: pairs are (0, 1), (2, 3), …; else (0, n), (1, n + 1), …

    >>> quarter = Tensor([[0.0]]), Tensor([[1.0]])  # cos and sin of 90 degrees
    >>> rotate(Tensor([[3.0, 4.0, 5.0]]), *quarter, neighbours=True).tolist()
    [[-4.0, 3.0, 5.0]]
    """
    count = cos.shape[-1]
    turned, rest = x[..., : 2 * count], x[..., 2 * count :]
    lead = turned.shape[:-1]
    axis, sizes = (-1, (count, 2)) if neighbours else (-2, (2, count))
    pairs = turned.reshape(*lead, *sizes)
    sign = Tensor.arange(2, dtype="int32").reshape((1, 2) if neighbours else (2, 1)) * 2 - 1  # (-1, 1)
    cos, sin = cos.unsqueeze(axis), sin.unsqueeze(axis)
    out = (pairs * cos + pairs.flip(axis) * (sin * sign.cast(dtypes.float32))).reshape(turned.shape)
    return out.cat(rest, dim=-1) if rest.shape[-1] else out


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    seen: Tensor,
    *,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(scale * q kᵀ) v, each head of keys shared by a group of queries; in float32.

    Shapes:  q (b, h, t, d), k (b, g, n, BLOCK, d), v (b, g, n, BLOCK, e), seen bool broadcast to
             (b, 1, 1, t, n, BLOCK), sinks (h,) -> (b, h, t, e). Values that no query sees may be anything.
    cap:     scores become cap * tanh(score / cap)
    sinks:   one more score a head that takes part in the sum and has no value (gpt-oss)

    >>> k, v = Tensor.ones(1, 1, 1, BLOCK, 4), Tensor.ones(1, 1, 1, BLOCK, 2)
    >>> attend(Tensor.ones(1, 2, 1, 4), k, v, 0.5, Tensor.ones(1, BLOCK, dtype="bool")).tolist()
    [[[[1.0, 1.0]], [[1.0, 1.0]]]]
    """
    batch, heads, count, size = q.shape
    groups, blocks = k.shape[1:3]
    rows = q.cast(dtypes.float32).reshape(batch, groups, heads // groups, count, 1, 1, size)
    keys = k.cast(dtypes.float32).reshape(batch, groups, 1, 1, blocks, BLOCK, size)
    scores = (rows * keys).sum(-1) * scale  # (b, g, h/g, t, n, BLOCK)
    if cap:
        scores = (scores / cap).tanh() * cap
    scores = seen.where(scores.contiguous(), -math.inf)  # a mask there would be one for each head
    peak = scores.max((-1, -2), keepdim=True).detach()
    if sinks is not None:
        sink = sinks.cast(dtypes.float32).reshape(1, groups, heads // groups, 1, 1, 1)
        peak = peak.maximum(sink)
    weights = (scores - peak).exp()
    total = weights.sum((-1, -2), keepdim=True)
    if sinks is not None:
        total = total + (sink - peak).exp()
    any_sees = seen.reshape(*[1] * (6 - seen.ndim), *seen.shape).any(3)  # (b, 1, 1, n, BLOCK)
    values = any_sees.unsqueeze(-1).where(v.unsqueeze(2).cast(dtypes.float32), 0.0)
    mixed = (weights.unsqueeze(-1) * values.unsqueeze(3)).sum((-3, -2))  # (b, g, h/g, t, e)
    return (mixed / total.squeeze(-1)).reshape(batch, heads, count, v.shape[-1])


def seen_by(positions: Tensor, first: UOp | int, blocks: UOp | int, window: int) -> Tensor:
    """Which keys, `blocks` of BLOCK positions from `first` on, each query sees: those not after it, and with
    a window only so many.

    Shapes:  positions (b, t) -> bool (b, 1, 1, t, blocks, BLOCK)
    """
    at = positions.reshape(positions.shape[0], 1, 1, positions.shape[1], 1, 1)
    keys = Tensor.arange(blocks * BLOCK, dtype="int32").reshape(blocks, BLOCK) + first
    seen = keys <= at
    return seen & (keys > at - window) if window else seen
