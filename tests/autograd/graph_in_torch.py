"""Runs a tensor-level graph in PyTorch: the outside truth for values, and through torch.autograd for
gradients."""

from __future__ import annotations

from typing import Any

import torch

from whit.uop import Op, Ops, UOp, dtypes

TORCH_TYPES = {
    dtypes.bool: torch.bool,
    dtypes.int32: torch.int32,
    dtypes.int64: torch.int64,
    dtypes.float16: torch.float16,
    dtypes.bfloat16: torch.bfloat16,
    dtypes.float32: torch.float32,
    dtypes.float64: torch.float64,
}
ELEMENTWISE: dict[Op, Any] = {
    Ops.NEG: torch.neg,
    Ops.RECIPROCAL: torch.reciprocal,
    Ops.SQRT: torch.sqrt,
    Ops.EXP2: torch.exp2,
    Ops.LOG2: torch.log2,
    Ops.SIN: torch.sin,
    Ops.ERF: torch.erf,
    Ops.TRUNC: torch.trunc,
    Ops.FLOOR: torch.floor,
    Ops.ADD: torch.add,
    Ops.SUB: torch.sub,
    Ops.MUL: torch.mul,
    Ops.FDIV: torch.div,
    Ops.MAX: torch.maximum,
    Ops.MIN: torch.minimum,
    Ops.POW: torch.pow,
    Ops.CMPLT: torch.lt,
    Ops.CMPLE: torch.le,
    Ops.CMPEQ: torch.eq,
    Ops.CMPNE: torch.ne,
    Ops.WHERE: torch.where,
    Ops.MULACC: lambda x, y, z: x * y + z,
    Ops.AND: torch.bitwise_and,
    Ops.OR: torch.bitwise_or,
    Ops.XOR: torch.bitwise_xor,
}


def run(root: UOp, leaves: dict[UOp, torch.Tensor]) -> torch.Tensor:
    """The value of a graph whose leaves (any nodes) have the given values."""
    values = dict(leaves)
    for node in root.toposort(lambda n: n in leaves):
        if node not in values and node.op is not Ops.STORE:
            values[node] = _value(node, values)
    return values[root]


def _value(u: UOp, values: dict[UOp, torch.Tensor]) -> torch.Tensor:
    src = [values[s] for s in u.src if s.op is not Ops.STORE]
    if u.op in ELEMENTWISE:
        return ELEMENTWISE[u.op](*src)
    if u.op is Ops.CONST:
        return torch.tensor(u.arg, dtype=TORCH_TYPES[u.dtype])
    if u.op is Ops.IOTA:
        return torch.arange(u.arg, dtype=TORCH_TYPES[u.dtype])
    if u.op is Ops.CAST:
        return src[0].to(TORCH_TYPES[u.dtype])
    if u.op is Ops.REDUCE:
        return _reduce(src[0], u.arg.op, u.arg.axes)
    if u.op is Ops.TAKE:
        picked = torch.index_select(src[0], u.arg, src[1].reshape(-1))
        return picked.reshape(u.shape)
    if u.op is Ops.AFTER:
        return _write(u, src[0], values)
    if u.op is Ops.DETACH:
        return src[0].detach()
    if u.op in (Ops.CONTIGUOUS, Ops.COPY):
        return src[0]
    return _move(u, src[0])


def _reduce(x: torch.Tensor, op: Op, axes: tuple[int, ...]) -> torch.Tensor:
    if op is Ops.ADD:
        return x.sum(axes)
    if op is Ops.MAX:
        return x.amax(axes)
    if op is Ops.MIN:
        return x.amin(axes)
    for axis in sorted(axes, reverse=True):
        x = x.prod(axis)
    return x


def _move(u: UOp, x: torch.Tensor) -> torch.Tensor:
    if u.op is Ops.RESHAPE:
        return x.reshape(u.arg)
    if u.op is Ops.PERMUTE:
        return x.permute(u.arg)
    if u.op is Ops.EXPAND:
        return x.expand(u.arg)
    if u.op is Ops.FLIP:
        return x.flip(u.arg)
    if u.op is Ops.SHRINK:
        return x[tuple(slice(start, stop) for start, stop in u.arg)]
    assert u.op is Ops.PAD, f"no torch meaning for {u.op}"
    return torch.nn.functional.pad(x, [w for pair in reversed(u.arg) for w in pair])


def _write(u: UOp, target: torch.Tensor, values: dict[UOp, torch.Tensor]) -> torch.Tensor:
    """The next version: write through a view of the positions, without touching the old version."""
    view, value = u.src[1].src
    positions = torch.arange(target.numel()).reshape(target.shape)
    chain = []
    while view is not u.src[0]:
        chain.append(view)
        view = view.src[0]
    for node in reversed(chain):
        positions = _move(node, positions)
    return (
        target.reshape(-1)
        .index_put((positions.reshape(-1),), values[value].reshape(-1))
        .reshape(target.shape)
    )
