"""Loads, stores, masks, gathers, registers, loops, folds and lanes of the CPU renderers, against NumPy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from tests.renderer.test_ops import DEVICES, nasty
from tests.runtime.linear_kernels import NUMPY, Kernel, run
from whit.uop import DType, LocalArg, Op, Ops, UOp, dtypes

ALL = [
    dtypes.bool,
    dtypes.int8,
    dtypes.int32,
    dtypes.uint64,
    dtypes.float16,
    dtypes.bfloat16,
    dtypes.fp8e4m3,
    dtypes.float32,
    dtypes.float64,
]


def sample(dtype: DType, size: int, seed: int = 0) -> np.ndarray[Any, Any]:
    values = np.random.default_rng(seed).integers(0, 2 if dtype is dtypes.bool else 100, size)
    return values.astype(NUMPY[dtype])


def lane_numbers(kernel: Kernel, count: int) -> UOp:
    return kernel.const(tuple(range(count)), dtypes.index.vec(count))


def vector_index(kernel: Kernel, base: UOp, count: int) -> UOp:
    return kernel.alu(
        Ops.ADD, kernel.add(Ops.BROADCAST, dtypes.index.vec(count), base), lane_numbers(kernel, count)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_masked_tail(device: str, dtype: DType) -> None:
    """Nine elements by eights: the last vector has one lane; what lies behind is neither read into the result
    nor written."""
    kernel, lanes, size = Kernel(), 8, 9
    out, a = kernel.param(0, dtype), kernel.param(1, dtype)
    loop = kernel.range(2)
    base = kernel.alu(Ops.MUL, loop, kernel.const(lanes))
    bound = kernel.const(size, dtypes.index.vec(lanes))
    mask = kernel.alu(Ops.CMPLT, vector_index(kernel, base, lanes), bound)
    kernel.store(out, base, kernel.load(a, base, lanes, mask), mask)
    everything = kernel.alu(Ops.ADD, base, kernel.const(16))
    kernel.store(out, everything, kernel.load(a, base, lanes, mask))
    kernel.end(loop)
    source, before = sample(dtype, 16), sample(dtype, 32, 1)
    got = run(device, kernel.linear(), before, source)
    expected = before.copy()
    expected[:size] = source[:size]
    expected[16:] = np.concatenate([source[:size], np.zeros(7, source.dtype)])
    np.testing.assert_array_equal(got.view(np.uint8), expected.view(np.uint8))


MASKS = [[0], [7], [3], [0, 1, 2], [5, 6, 7], [2, 3, 4], [0, 7], [1, 3, 5], [], list(range(8))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wide, narrow", [("int32", "int16"), ("int64", "int32"), ("int16", "int8"),
                                          ("int64", "int8"), ("float32", "bfloat16")])  # fmt: skip
def test_constant_masks_store_their_lanes_and_nothing_behind(device: str, wide: str, narrow: str) -> None:
    """Of vectors that are converted to a narrower type first: a store of the wide type would overwrite what
    follows."""
    kernel, lanes = Kernel(), 8
    out, a = kernel.param(0, getattr(dtypes, narrow)), kernel.param(1, getattr(dtypes, wide))
    loop = kernel.range(200)  # enough work for the full effort of LLVM
    for number, on in enumerate(MASKS):
        value = kernel.add(Ops.CAST, out.dtype.vec(lanes), kernel.load(a, kernel.const(number * 8), lanes))
        mask = kernel.const(tuple(lane in on for lane in range(lanes)), dtypes.bool.vec(lanes))
        kernel.store(out, kernel.const(number * 16), value, mask)
    kernel.end(loop)
    before = np.full(16 * len(MASKS), 77).astype(NUMPY[out.dtype])
    source = (np.arange(8 * len(MASKS)) % 50 - 9).astype(NUMPY[a.dtype])
    expected = before.copy()
    for number, on in enumerate(MASKS):
        expected[[number * 16 + lane for lane in on]] = source[[number * 8 + lane for lane in on]]
    got = run(device, kernel.linear(), before, source)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_masked_lanes_touch_no_memory(device: str) -> None:
    """The address of a lane that is off may lie anywhere: here far outside of every mapping."""
    kernel, lanes = Kernel(), 8
    out, a = kernel.param(0, dtypes.float32), kernel.param(1, dtypes.float32)
    far = 1 << 44
    off = kernel.const(False, dtypes.bool)
    none = kernel.const(False, dtypes.bool.vec(lanes))
    where = kernel.const(far)
    wide = kernel.const(tuple(far + 4096 * k for k in range(lanes)), dtypes.index.vec(lanes))
    kernel.store(out, where, kernel.load(a, where, 1, off), off)
    kernel.store(out, where, kernel.load(a, where, lanes, none), none)
    kernel.store(out, wide, kernel.load(a, wide, lanes, none), none)
    kernel.store(out, kernel.const(0), kernel.load(a, where, 1, off))
    kernel.store(out, kernel.const(1), kernel.load(a, where, lanes, none))
    kernel.store(out, kernel.const(9), kernel.load(a, wide, lanes, none))
    got = run(device, kernel.linear(), np.full(20, 7, np.float32), np.ones(1, np.float32))
    np.testing.assert_array_equal(got, [0] * 17 + [7] * 3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_gather_and_scatter(device: str, dtype: DType) -> None:
    """out[i * 2] = a[order[i]] where i is even, in lanes."""
    kernel, lanes = Kernel(), 8
    out, a, order = kernel.param(0, dtype), kernel.param(1, dtype), kernel.param(2, dtypes.int32)
    numbers = kernel.add(Ops.CAST, dtypes.index.vec(lanes), kernel.load(order, kernel.const(0), lanes))
    mask = kernel.const(tuple(k % 2 == 0 for k in range(lanes)), dtypes.bool.vec(lanes))
    twice = kernel.alu(Ops.MUL, lane_numbers(kernel, lanes), kernel.const(2, dtypes.index.vec(lanes)))
    kernel.store(out, twice, kernel.load(a, numbers, lanes, mask), mask)
    kernel.store(out, kernel.const(16), kernel.load(a, numbers, lanes))
    kernel.store(out, kernel.const(24), kernel.load(a, numbers, lanes, mask))
    source, where = sample(dtype, 50), np.array([49, 3, 0, 17, 5, 5, 31, 8], np.int32)
    before = sample(dtype, 32, 1)
    expected = before.copy()
    expected[0:16:4] = source[where][::2]
    expected[16:24] = source[where]
    expected[24:] = np.where(np.arange(8) % 2 == 0, source[where].astype(np.float64), 0).astype(source.dtype)
    np.testing.assert_array_equal(
        run(device, kernel.linear(), before, source, where).view(np.uint8), expected.view(np.uint8)
    )


FOLDS = [(Ops.ADD, np.sum), (Ops.MUL, np.prod), (Ops.MAX, np.max), (Ops.MIN, np.min)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lanes", [2, 3, 7, 8, 16])
def test_fold(device: str, lanes: int) -> None:
    for dtype in (dtypes.float32, dtypes.int8, dtypes.int64, dtypes.bool):
        kernel = Kernel()
        out, a = kernel.param(0, dtype), kernel.param(1, dtype)
        value = kernel.load(a, kernel.const(0), lanes)
        for number, (op, _) in enumerate(FOLDS):
            kernel.store(out, kernel.const(number), kernel.add(Ops.FOLD, dtype, value, arg=op))
        values = (
            (sample(dtype, lanes, lanes) - (50 if dtype.kind in "if" else 0)).astype(NUMPY[dtype])
            if dtype is not dtypes.bool
            else sample(dtype, lanes, lanes)
        )
        expected = [
            function(values, dtype=values.dtype)
            if function in (np.sum, np.prod) and dtype is not dtypes.bool
            else function(values)
            for _, function in FOLDS
        ]
        if dtype is dtypes.bool:
            expected = [values.any(), values.all(), values.any(), values.all()]
        got = run(device, kernel.linear(), np.zeros(4, values.dtype), values)
        np.testing.assert_allclose(got.astype(np.float64), np.array(expected).astype(np.float64), rtol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", [Ops.MAX, Ops.MIN], ids=str)
def test_folding_keeps_nan(device: str, op: Op) -> None:
    """A NaN anywhere gives NaN, whether lanes are folded or a register accumulates."""
    for place, lanes in itertools.product(range(16), (1, 8)):
        values = np.arange(16, dtype=np.float32) - 8
        values[place] = np.nan
        kernel = Kernel()
        out, a = kernel.param(0, dtypes.float32), kernel.param(1, dtypes.float32)
        start = kernel.const(-np.inf if op is Ops.MAX else np.inf, dtypes.float32.vec(lanes))
        register = kernel.add(Ops.REG, start.dtype, start, arg=0)
        loop = kernel.range(16 // lanes)
        value = kernel.load(a, kernel.alu(Ops.MUL, loop, kernel.const(lanes)), lanes)
        pair = (register, value) if place % 2 else (value, register)
        kernel.add(Ops.SET, dtypes.void, register, kernel.alu(op, *pair))
        kernel.end(loop)
        kernel.store(
            out,
            kernel.const(0),
            kernel.add(Ops.FOLD, dtypes.float32, register, arg=op) if lanes > 1 else register,
        )
        assert np.isnan(run(device, kernel.linear(), np.zeros(1, np.float32), values)[0])
        if place > 1:
            break


@pytest.mark.parametrize("device", DEVICES)
def test_constant_on_either_side_of_max(device: str) -> None:
    values = nasty(dtypes.float32)
    for lanes in (1, 8):
        kernel = Kernel()
        out, a = kernel.param(0, dtypes.float32), kernel.param(1, dtypes.float32)
        loop = kernel.range(16 // lanes)
        index = kernel.alu(Ops.MUL, loop, kernel.const(lanes))
        value, zero = kernel.load(a, index, lanes), kernel.const(0.0, dtypes.float32.vec(lanes))
        for part, pair in enumerate(((value, zero), (zero, value))):
            for more, op in enumerate((Ops.MAX, Ops.MIN)):
                kernel.store(
                    out,
                    kernel.alu(Ops.ADD, index, kernel.const(16 * (2 * part + more))),
                    kernel.alu(op, *pair),
                )
        kernel.end(loop)
        got = run(device, kernel.linear(), np.zeros(64, np.float32), values)
        np.testing.assert_array_equal(got, np.concatenate([np.maximum(values, 0), np.minimum(values, 0)] * 2))


@pytest.mark.parametrize("device", DEVICES)
def test_matrix_product_with_registers_and_variable_loops(device: str) -> None:
    """c = a @ b with eight columns at a time, the depth a variable (also 0), an accumulator per row pair."""
    rows, columns = 4, 8
    kernel = Kernel()
    out, a, b = [kernel.param(slot, dtypes.float32) for slot in range(3)]
    depth = kernel.var("depth", 0, 100)
    wide = dtypes.float32.vec(columns)
    outer = kernel.range(rows // 2)
    registers = [kernel.add(Ops.REG, wide, kernel.const(0.0, wide), arg=number) for number in range(2)]
    lines = [
        kernel.alu(Ops.ADD, kernel.alu(Ops.MUL, outer, kernel.const(2)), kernel.const(number))
        for number in range(2)
    ]
    inner = kernel.range(depth)
    line = kernel.load(b, kernel.alu(Ops.MUL, inner, kernel.const(columns)), columns)
    for number, register in enumerate(registers):
        place = kernel.alu(Ops.ADD, kernel.alu(Ops.MUL, lines[number], depth), inner)
        factor = kernel.add(Ops.BROADCAST, wide, kernel.load(a, place))
        kernel.add(Ops.SET, dtypes.void, register, kernel.alu(Ops.MULACC, factor, line, register))
    kernel.end(inner)
    for number, register in enumerate(registers):
        kernel.store(out, kernel.alu(Ops.MUL, lines[number], kernel.const(columns)), register)
    kernel.end(outer)
    for size in (0, 1, 19):
        left = np.random.default_rng(0).normal(size=(rows, max(size, 1))).astype(np.float32)[:, :size]
        right = np.random.default_rng(1).normal(size=(size, columns)).astype(np.float32)
        got = run(
            device, kernel.linear(), np.ones((rows, columns), np.float32), left, right, variables=[size]
        )
        np.testing.assert_allclose(got, left.astype(np.float64) @ right, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_lanes_scratch_and_branches(device: str) -> None:
    """STACK, EXTRACT, SHUFFLE, LOCAL and IF: out = reversed(a) where the sum of a is above the variable, else
    unchanged."""
    kernel = Kernel()
    out, a, limit = (
        kernel.param(0, dtypes.int32),
        kernel.param(1, dtypes.int32),
        kernel.var("limit", -1000, 1000),
    )
    scratch = kernel.add(Ops.LOCAL, dtypes.int32, arg=LocalArg(0, 4, False))
    value = kernel.load(a, kernel.const(0), 4)
    kernel.store(scratch, kernel.const(0), value)
    parts = [kernel.add(Ops.EXTRACT, dtypes.int32, value, arg=lane) for lane in range(4)]
    total = kernel.add(
        Ops.FOLD, dtypes.int32, kernel.add(Ops.STACK, dtypes.int32.vec(4), *parts), arg=Ops.ADD
    )
    bound = kernel.add(Ops.CAST, dtypes.int32, limit)
    branch = kernel.add(Ops.IF, dtypes.void, kernel.alu(Ops.CMPLT, bound, total))
    again = kernel.load(scratch, kernel.const(0), 4)
    kernel.store(out, kernel.const(0), kernel.add(Ops.SHUFFLE, dtypes.int32.vec(4), again, arg=(3, 2, 1, 0)))
    kernel.add(Ops.ENDIF, dtypes.void, branch)
    kernel.add(Ops.BARRIER, dtypes.void)
    values = np.array([1, 2, 3, 4], np.int32)
    np.testing.assert_array_equal(
        run(device, kernel.linear(), np.zeros(4, np.int32), values, variables=[9]), [4, 3, 2, 1]
    )
    np.testing.assert_array_equal(
        run(device, kernel.linear(), np.zeros(4, np.int32), values, variables=[10]), [0, 0, 0, 0]
    )


@pytest.mark.parametrize("device", DEVICES)
def test_variables_come_sorted_by_name(device: str) -> None:
    kernel = Kernel()
    out, z, b = kernel.param(0, dtypes.int64), kernel.var("z", 0, 9), kernel.var("b", 0, 9)
    for place, variable in enumerate((z, b)):
        kernel.store(out, kernel.const(place), kernel.add(Ops.CAST, dtypes.int64, variable))
    np.testing.assert_array_equal(
        run(device, kernel.linear(), np.zeros(2, np.int64), variables=[1, 2]), [2, 1]
    )


@pytest.mark.parametrize("device", DEVICES)
def test_masks_mix_with_bools(device: str) -> None:
    """Masks of different lane widths meet in AND, OR, WHERE, comparisons, memory and registers."""
    kernel, lanes = Kernel(), 8
    out, a, b, c = (
        kernel.param(0, dtypes.bool),
        kernel.param(1, dtypes.float64),
        kernel.param(2, dtypes.int8),
        kernel.param(3, dtypes.bool),
    )
    zero = kernel.const(0)
    x, y, z = kernel.load(a, zero, lanes), kernel.load(b, zero, lanes), kernel.load(c, zero, lanes)
    p = kernel.alu(Ops.CMPLT, x, kernel.const(1.0, x.dtype))
    q = kernel.alu(Ops.CMPLE, kernel.const(2, y.dtype), y)
    register = kernel.add(Ops.REG, p.dtype, p, arg=0)
    kernel.add(Ops.SET, dtypes.void, register, kernel.alu(Ops.XOR, register, kernel.const(True, p.dtype)))
    results = [
        kernel.alu(Ops.AND, p, q),
        kernel.alu(Ops.OR, q, z),
        kernel.alu(Ops.WHERE, z, p, q),
        kernel.alu(Ops.CMPLT, p, q),
        kernel.alu(Ops.CMPEQ, p, z),
        kernel.alu(Ops.AND, register, z),
    ]
    for number, result in enumerate(results):
        kernel.store(out, kernel.const(number * lanes), result)
    av, bv, cv = np.arange(8) % 3 / 1.5, (np.arange(8) % 5).astype(np.int8), np.arange(8) % 2 == 0
    pv, qv = av < 1, bv >= 2
    expected = np.concatenate([pv & qv, qv | cv, np.where(cv, pv, qv), ~pv & qv, pv == cv, ~pv & cv])
    np.testing.assert_array_equal(run(device, kernel.linear(), np.zeros(48, bool), av, bv, cv), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_names_of_many_values_never_clash(device: str) -> None:
    """Seventy loops and their values: none of the numbered names may be that of a type, such as i64."""
    kernel = Kernel()
    out, a = kernel.param(0, dtypes.int32), kernel.param(1, dtypes.int32)
    for number in range(70):
        loop = kernel.range(2)
        place = kernel.alu(Ops.ADD, loop, kernel.const(2 * number))
        kernel.store(out, place, kernel.load(a, place))
        kernel.end(loop)
    values = np.arange(140, dtype=np.int32)
    np.testing.assert_array_equal(run(device, kernel.linear(), np.zeros(140, np.int32), values), values)
