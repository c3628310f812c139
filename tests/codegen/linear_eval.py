"""A small evaluator of linear programs for tests, apart from every device: one instruction at a time on
NumPy values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from tests.codegen.numpy_evaluator import NUMPY, dot
from whit.uop import DType, Op, Ops, UOp, dtypes
from whit.uop.ops import DOTS

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _trunc_div(a: Any, b: Any) -> Any:
    return (np.abs(a) // np.abs(b)) * np.sign(a) * np.sign(b)


ALU: dict[Op, Callable[..., Any]] = {
    Ops.ADD: np.add,
    Ops.SUB: np.subtract,
    Ops.MUL: np.multiply,
    Ops.FDIV: np.divide,
    Ops.MAX: np.maximum,
    Ops.MIN: np.minimum,
    Ops.NEG: np.negative,
    Ops.RECIPROCAL: lambda x: 1 / x,
    Ops.SQRT: np.sqrt,
    Ops.EXP2: np.exp2,
    Ops.LOG2: np.log2,
    Ops.SIN: np.sin,
    Ops.ERF: lambda x: _erf(x),
    Ops.TRUNC: np.trunc,
    Ops.FLOOR: np.floor,
    Ops.POW: np.power,
    **{op: partial(dot, op) for op in DOTS},
    Ops.LDEXP: lambda x, k: np.ldexp(x, k.astype(np.int32)),
    Ops.AND: np.bitwise_and,
    Ops.OR: np.bitwise_or,
    Ops.XOR: np.bitwise_xor,
    Ops.SHL: np.left_shift,
    Ops.SHR: np.right_shift,
    Ops.CMPLT: np.less,
    Ops.CMPLE: np.less_equal,
    Ops.CMPEQ: np.equal,
    Ops.CMPNE: np.not_equal,
    Ops.WHERE: np.where,
    Ops.MULACC: lambda a, b, c: a * b + c,
    Ops.FLOORDIV: np.floor_divide,
    Ops.FLOORMOD: np.mod,
    Ops.TRUNCDIV: _trunc_div,
    Ops.TRUNCMOD: lambda a, b: a - b * _trunc_div(a, b),
}


def _array(value: Any, dtype: DType) -> Any:
    return np.broadcast_to(np.asarray(value), (dtype.count,) if dtype.count > 1 else ()).astype(
        NUMPY[dtype.scalar]
    )


class LinearProgram:
    """Runs a LINEAR on flat NumPy arrays; memory accesses are checked against the arrays' sizes."""

    def __init__(self, linear: UOp) -> None:
        self.code = linear.src
        self.jump: dict[int, int] = {}
        opened: dict[UOp, int] = {}
        for at, node in enumerate(self.code):
            if node.op is Ops.RANGE:
                opened[node] = at
            elif node.op is Ops.END:
                begin = opened.pop(node.src[0])
                self.jump[begin], self.jump[at] = at, begin
        assert not opened, "a loop never ends"

    def __call__(self, buffers: Sequence[np.ndarray], variables: dict[str, int] | None = None) -> None:
        sizes = {u.arg.name: u.arg.size for u in self.code if u.op is Ops.SPECIAL}
        items = [name for name in sizes if name.startswith("lidx")]
        groups = [name for name in sizes if name not in items]
        for point in np.ndindex(*[sizes[n] for n in groups]):
            outer = dict(zip(groups, point, strict=True))
            shared: dict[UOp, np.ndarray] = {}
            running = [
                self.task(buffers, variables or {}, outer | dict(zip(items, item, strict=True)), shared)
                for item in np.ndindex(*[sizes[n] for n in items])
            ]
            while running:  # every work-item up to its next barrier
                arrived = [next(task, None) for task in running]
                assert len(set(arrived)) == 1, "work-items wait at different barriers"
                running = [] if arrived[0] is None else running

    def task(
        self,
        buffers: Sequence[np.ndarray],
        variables: dict[str, int],
        special: dict[str, int],
        shared: dict[UOp, np.ndarray],
    ) -> Iterator[int]:
        values: dict[UOp, Any] = {}
        at = 0

        def get(node: UOp) -> Any:
            return _array(node.arg, node.dtype) if node.op is Ops.CONST else values[node]

        with np.errstate(all="ignore"):
            while at < len(self.code):
                node = self.code[at]
                op, dtype = node.op, node.dtype
                if op is Ops.RANGE:
                    values[node] = np.int64(0)
                    if get(node.src[0]) <= 0:
                        at = self.jump[at]
                elif op is Ops.END:
                    counter = node.src[0]
                    values[counter] = values[counter] + 1
                    if values[counter] < get(counter.src[0]):
                        at = self.jump[at]
                elif op is Ops.PARAM:
                    values[node] = buffers[node.arg.slot]
                elif op is Ops.VAR:
                    values[node] = np.int64(variables[node.arg.name])
                elif op is Ops.SPECIAL:
                    values[node] = np.int64(special[node.arg.name])
                elif op is Ops.LOCAL:
                    values[node] = shared.setdefault(node, np.zeros(node.arg.size, NUMPY[dtype]))
                elif op is Ops.PREFETCH:
                    assert node.src[1].dtype is dtypes.index
                elif op is Ops.BARRIER:
                    yield at
                elif op is Ops.REG:
                    values[node] = get(node.src[0])
                elif op is Ops.SET:
                    values[node.src[0]] = get(node.src[1])
                elif op is Ops.LOAD:
                    values[node] = self.load(dtype, *[get(s) for s in node.src])
                elif op is Ops.STORE:
                    self.store(*[get(s) for s in node.src])
                else:
                    values[node] = _array(self.alu(node, [get(s) for s in node.src]), dtype)
                at += 1

    def lanes(self, memory: np.ndarray, index: Any, count: int, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        index = np.atleast_1d(index)
        where = index if len(index) == count else index + np.arange(count)
        on = np.broadcast_to(np.atleast_1d(True if mask is None else mask), (count,))
        assert ((where >= 0) & (where < memory.size))[on].all(), (
            f"access at {where} of {memory.size} elements"
        )
        return where, on

    def load(self, dtype: DType, memory: np.ndarray, index: Any, mask: Any = None) -> Any:
        where, on = self.lanes(memory, index, dtype.count, mask)
        got = np.where(on, memory[np.where(on, where, 0)] if memory.size else 0, 0)
        return _array(got if dtype.count > 1 else got[0], dtype)

    def store(self, memory: np.ndarray, index: Any, value: Any, mask: Any = None) -> None:
        value = np.atleast_1d(value)
        where, on = self.lanes(memory, index, len(value), mask)
        memory[where[on]] = value[on]

    def alu(self, node: UOp, src: list[Any]) -> Any:
        op = node.op
        if op is Ops.BROADCAST:
            return src[0]
        if op is Ops.STACK:
            return np.stack(src)
        if op is Ops.EXTRACT:
            return src[0][node.arg]
        if op is Ops.SHUFFLE:
            return src[0][list(node.arg)]
        if op is Ops.FOLD:
            total = src[0][0]
            for lane in src[0][1:]:
                total = _array(ALU[node.arg](total, lane), node.dtype)
            return total
        if op is Ops.CAST:
            return src[0].astype(NUMPY[node.dtype.scalar])
        if op is Ops.BITCAST:
            bits = np.ascontiguousarray(src[0]).view(NUMPY[node.dtype.scalar])
            return bits.reshape(()) if node.dtype.count == 1 else bits
        for s, operand in zip(node.src, src, strict=True):
            assert s.dtype.count == node.dtype.count, (
                f"{node} has an operand with {s.dtype.count} lanes: {operand}"
            )
        return ALU[op](*src)
