"""Random kernels under random opts: the linear program computes what NumPy does."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.codegen.kernel_eval import evaluate
from tests.codegen.linear_eval import NUMPY, LinearProgram
from tests.codegen.test_linearize import GPU, SCALAR, TARGET, fold, loop, param, program, read, write
from whit.codegen.lower import prepare
from whit.codegen.opts import AxisTable, Opt, OptError, OptKind
from whit.codegen.target import Target
from whit.uop import DType, Ops, UOp, dtypes
from whit.uop.text import show

f32, i32 = dtypes.float32, dtypes.int32
SIZES = (1, 2, 3, 4, 5, 7, 8, 12, 16)


class Kernel:
    """Builds one random kernel and its buffers."""

    def __init__(self, seed: int) -> None:
        self.random, self.numbers = random.Random(seed), np.random.default_rng(seed)
        self.dtype: DType = self.random.choice([f32, f32, i32])
        self.buffers: list[np.ndarray] = []
        self.uid = 0
        self.room = 384
        self.loops = [self.new(loop) for _ in range(self.random.choice([1, 2, 2, 3]))]
        ends = []
        for _ in range(self.random.choice([1, 1, 1, 2])):
            mine = self.loops[: self.random.randint(1, len(self.loops))]
            index, size = UOp.index(0), 1
            for r in self.random.sample(mine, len(mine)) if self.random.random() < 0.3 else mine:
                index, size = index * r.src[0].arg + r, size * r.src[0].arg
            if self.random.random() < 0.2:
                index = UOp.index(size - 1) - index
            out = self.buffer(np.zeros(size), self.dtype)
            ends.append(write(out, index, self.value(mine, 4), *mine))
        self.ast = UOp.sink(*ends)

    def new(self, make: object) -> UOp:
        size = self.random.choice([s for s in SIZES if s <= self.room] or [1])
        self.room //= size
        self.uid += 1
        return make(size, self.uid - 1)  # type: ignore[operator]

    def buffer(self, data: np.ndarray, dtype: DType) -> UOp:
        self.buffers.append(data.astype(NUMPY[dtype]))
        return param(len(self.buffers) - 1, data.size, dtype)

    def index(self, ranges: list[UOp]) -> UOp:
        """A random expression: strides, flips, quotients and remainders."""
        total = UOp.index(self.random.randint(-3, 3))
        for r in self.random.sample(ranges, self.random.randint(0, len(ranges))):
            total = total + r * self.random.choice([1, 1, 1, -1, 2, 3, 5, 16])
        kind = self.random.random()
        if kind < 0.12:
            return total // self.random.choice([2, 3, 4, 8])
        return (
            total % self.random.choice([3, 4, 7, 8]) * self.random.choice([1, 2]) + total
            if kind < 0.2
            else total
        )

    def leaf(self, ranges: list[UOp]) -> UOp:
        kind = self.random.random()
        if kind < 0.1:
            return UOp.const(self.random.randint(-2, 2), self.dtype)
        index = self.index(ranges)
        low, high = int(index.vmin), int(index.vmax)
        if kind < 0.2:
            return (index % 5).cast(self.dtype) if self.random.random() < 0.5 else index.cast(self.dtype)
        if kind < 0.3:  # a gather through a small table
            table = self.buffer(self.numbers.integers(0, 6, high - low + 1), i32)
            row = read(table, index - low).cast(dtypes.index)
            low, high = 0, 5
            index = row
            if self.random.random() < 0.5:
                other = self.index(ranges)
                index = row * (int(other.vmax) - int(other.vmin) + 1) + other - int(other.vmin)
                high = int(other.vmax - other.vmin + 1) * 6 - 1
        cut = self.random.randint(0, 3) if self.random.random() < 0.4 and high - low > 6 else 0
        data = self.numbers.integers(-3, 4, high - low + 1 - 2 * cut)
        place = index - low - cut
        valid = place.ge(0) & place.lt(data.size) if cut else None
        if ranges and self.random.random() < 0.15:
            r = self.random.choice(ranges)
            more = r.lt(max(1, r.src[0].arg - 1))
            valid = more if valid is None else valid & more
        return read(self.buffer(data, self.dtype), place, valid)

    def padded(self, ranges: list[UOp], outer: list[UOp]) -> UOp:
        """What the gradient of a padded window looks like: one mask on both factors, on their sum, and
        outside."""
        inner = [self.new(fold)]
        window = self.index(ranges + outer)
        valid = window.ge(0) & window.lt(max(1, int(window.vmax) - 1))
        room = max(1, int(window.vmax)) * inner[0].src[0].arg
        left = self.buffer(self.numbers.integers(-3, 4, room), self.dtype)
        first = read(left, window * inner[0].src[0].arg + inner[0], valid)
        other = self.index(ranges + inner)
        low, high = int(other.vmin), int(other.vmax)
        right = self.buffer(self.numbers.integers(-3, 4, high - low + 1), self.dtype)
        total = (first * read(right, other - low, valid)).reduce_ranges(Ops.ADD, *inner)
        return valid.where(total, total.const_like(0)).reduce_ranges(Ops.ADD, *outer)

    def value(self, ranges: list[UOp], depth: int) -> UOp:
        kind = self.random.random()
        if 0.15 <= kind < 0.2 and self.room > 8:
            room = self.room
            result = self.padded(ranges, [self.new(fold)])
            self.room = room
            return result
        if depth == 0 or kind < 0.15:
            return self.leaf(ranges)
        if kind < 0.4 and self.room > 1:
            room = self.room
            mine = [self.new(fold) for _ in range(self.random.choice([1, 1, 2]))]
            inner = self.value([*ranges, *mine], depth - 1)
            self.room = room
            op = self.random.choice([Ops.ADD, Ops.ADD, Ops.MAX, Ops.MIN])
            return inner.reduce_ranges(op, *mine)
        a, b = self.value(ranges, depth - 1), self.value(ranges, depth - 1)
        if kind < 0.6:
            return a * b if depth < 3 else a + b
        if kind < 0.7:
            return a.lt(b).where(a, b + 1)
        return self.random.choice([a + b, a - b, a.maximum(b), a.minimum(b)])

    def opts(self, target: Target) -> str:
        """Random legal opts."""
        table = AxisTable.of(prepare(self.ast), target)
        for _ in range(self.random.randint(0, 7)):
            axis = self.random.choice([*table.axes, 0])
            kind = self.random.choice(
                [*OptKind, OptKind.UPCAST, OptKind.UNROLL, OptKind.UPCAST, OptKind.UNROLL, OptKind.PADTO]
            )
            amount = self.random.choice([0, 2, 3, 4, 5, 7, 8, 16])
            try:
                table.apply(Opt(kind, axis, amount))
            except OptError:
                continue
        return ", ".join(map(repr, table.opts))


@pytest.mark.parametrize("target", [TARGET, SCALAR, GPU], ids=["vector", "scalar", "groups"])
@pytest.mark.parametrize("block", range(8))
def test_random_kernels(block: int, target: Target) -> None:
    for seed in range(block * 12, block * 12 + 12):
        check(seed, target)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(100, 160))
def test_many_random_kernels(block: int) -> None:
    for seed in range(block * 12, block * 12 + 12):
        for target in (TARGET, SCALAR, GPU):
            check(seed, target)


def check(seed: int, target: Target) -> None:
    kernel = Kernel(seed)
    wanted = evaluate(kernel.ast, kernel.buffers)
    opts = kernel.opts(target)
    got = [b.copy() for b in kernel.buffers]
    try:
        linear = program(kernel.ast, opts, target)
        LinearProgram(linear)(got)
        for mine, theirs in zip(got, wanted, strict=True):
            scale = max(1.0, float(np.abs(theirs).max(initial=0)))
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5 * scale)
    except Exception as error:
        raise AssertionError(
            f"seed {seed}, target {target.key}, opts {opts!r}:\n{show(kernel.ast)}"
        ) from error
