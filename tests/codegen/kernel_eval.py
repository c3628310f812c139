"""Evaluates kernels (before opts) in NumPy: every RANGE is an axis, every value an array over the ranges
it depends on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.codegen.linear_eval import ALU, NUMPY
from whit.uop import Ops, UOp

REDUCE = {Ops.ADD: np.add, Ops.MUL: np.multiply, Ops.MAX: np.maximum, Ops.MIN: np.minimum}


def evaluate(ast: UOp, buffers: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What the buffers hold after the kernel ran. Floats are computed in float64, then rounded where they
    are stored."""
    order = ast.toposort()
    axes = {r: n for n, r in enumerate(u for u in order if u.op is Ops.RANGE)}
    values: dict[UOp, Any] = {}
    result = [b.copy() for b in buffers]
    with np.errstate(all="ignore"):
        for node in order:
            if node.op is not Ops.SINK and node.op is not Ops.END and node.op is not Ops.STORE:
                values[node] = _value(node, values, axes, buffers)
        for end in ast.src:
            store = end.src[0] if end.op is Ops.END else end
            index, value, on = np.broadcast_arrays(
                *[values[s] for s in store.src[1:3]], values[store.src[3]] if len(store.src) > 3 else True
            )
            result[store.src[0].arg.slot][index[on]] = value[on]
    return result


def _value(node: UOp, values: dict[UOp, Any], axes: dict[UOp, int], buffers: Sequence[np.ndarray]) -> Any:
    op = node.op
    src = [values[s] for s in node.src]
    dtype = np.float64 if node.dtype.is_float else NUMPY[node.dtype]
    if op is Ops.CONST:
        return np.array(node.arg, dtype).reshape((1,) * len(axes))
    if op is Ops.RANGE:
        shape = [1] * len(axes)
        shape[axes[node]] = node.src[0].arg
        return np.arange(node.src[0].arg).reshape(shape)
    if op is Ops.PARAM:
        return buffers[node.arg.slot]
    if op is Ops.INDEX:
        index, on = np.broadcast_arrays(src[1], src[2] if len(src) > 2 else True)
        assert ((index >= 0) & (index < src[0].size))[on].all(), "the kernel itself reads outside of a buffer"
        return np.where(on, src[0][np.where(on, index, 0)], 0).astype(dtype)
    if op is Ops.REDUCE:
        inner = [axes[r] for r in node.src[1:]]
        shape = [
            r.src[0].arg if axes[r] in inner else size for r, size in zip(axes, src[0].shape, strict=True)
        ]
        return REDUCE[node.arg.op].reduce(
            np.broadcast_to(src[0], shape), axis=tuple(inner), dtype=dtype, keepdims=True
        )
    if op is Ops.CAST:
        return src[0].astype(dtype)
    if op is Ops.BITCAST:
        return np.ascontiguousarray(src[0], NUMPY[node.src[0].dtype]).view(NUMPY[node.dtype]).astype(dtype)
    return ALU[op](*src).astype(dtype)
