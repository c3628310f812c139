"""A row is stored while the next one is computed: where, and that values stay what they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codegen.opts_kernels import fold, folds, loops, param, read, softmax, store
from tests.codegen.test_keep import run
from tests.devices import GCC
from tests.runtime.linear_kernels import buffer, program
from tests.runtime.linear_kernels import read as contents
from whit.codegen.pipeline import generate
from whit.codegen.target import Target
from whit.runtime.cpu import cpu_target
from whit.uop import Ops, UOp
from whit.uop.uop import alu

# whatever is stored goes past the caches
STREAM = cpu_target("llvm", "llvm")._replace(threads=1, stream_bytes=1 << 10)


def is_delayed(ast: UOp, target: Target = STREAM) -> bool:
    """Whether stores stand in a condition inside of a loop over elements."""
    depth = inside = 0
    for node in generate(ast, target).linear.src:
        depth += (node.op is Ops.RANGE) - (node.op is Ops.END)
        inside += (node.op is Ops.IF) - (node.op is Ops.ENDIF)
        if node.op is Ops.STORE and node.arg is not None and inside and depth == 2:
            return True
    return False


def expected(data: Any) -> Any:
    power = np.exp2((data.astype(np.float64) - data.max(1, keepdims=True)) * 1.4427)
    return power / power.sum(1, keepdims=True)


def test_where() -> None:
    linear = generate(softmax(64, 1024), STREAM).linear
    assert is_delayed(softmax(64, 1024))
    places = [at for at, u in enumerate(linear.src) if u.op is Ops.STORE and u.arg is not None]
    ends = [at for at, u in enumerate(linear.src) if u.op is Ops.END]
    rows = ends[-2]  # the last loop stores the last row
    assert places[0] < rows < places[-1] < ends[-1]
    (register,) = [u for u in linear.src if u.op is Ops.SET and u.src[1].op is Ops.BROADCAST]
    assert linear.src.index(register) == rows - 1 and linear.src.index(register.src[0]) < places[0]


def layer_norm(rows: int, columns: int) -> UOp:
    """Stored from memory, not from scratch."""
    (i, j), k = loops(rows, columns), folds(2, columns)[0]
    x = param(1, rows * columns)
    scale = fold(Ops.ADD, alu(Ops.EXP2, read(x, i * columns + k)), k)
    return UOp.sink(store(param(0, rows * columns), i * columns + j, read(x, i * columns + j) * scale, i, j))


@pytest.mark.parametrize(
    ("ast", "target"),
    [
        (softmax(7, 1024), STREAM),
        (softmax(64, 1000), STREAM),
        (softmax(64, 1024), STREAM._replace(stream_bytes=0)),
        (softmax(64, 1024), STREAM._replace(stream_bytes=1 << 30)),
        (softmax(64, 64), STREAM),
        (layer_norm(64, 1024), STREAM),
    ],
    ids=["few rows", "masks", "no streams", "small", "no loop", "no scratch"],
)
def test_not_where_it_brings_nothing(ast: UOp, target: Target) -> None:
    assert not is_delayed(ast, target)


@settings(deadline=None, max_examples=12)
@given(rows=st.integers(1, 40), vectors=st.integers(1, 80), narrow=st.booleans(), ldexp=st.booleans())
def test_values(rows: int, vectors: int, narrow: bool, ldexp: bool) -> None:
    target = STREAM if ldexp else STREAM._replace(native=STREAM.native - {Ops.LDEXP})
    target = target._replace(vector_bytes=min(32, target.vector_bytes)) if narrow else target
    random = np.random.default_rng(rows * 100 + vectors)
    data = random.standard_normal((rows, 16 * vectors)).astype(np.float32)
    np.testing.assert_allclose(run(softmax(*data.shape), data, target), expected(data), rtol=1e-5)


def test_a_nan_stays_in_its_row() -> None:
    data = np.random.default_rng(0).standard_normal((16, 1024)).astype(np.float32)
    data[5, 700] = np.nan
    wanted = expected(data)
    got = run(softmax(16, 1024), data, STREAM)
    assert np.isnan(got[5]).all()
    others = np.arange(16) != 5
    np.testing.assert_allclose(got[others], wanted[others], rtol=1e-5)


@pytest.mark.parametrize("device", ["CPU", GCC, "PYTHON"])
def test_every_device_runs_it(device: str) -> None:
    """The interpreter notices scratch that is read before it is written."""
    assert is_delayed(softmax(9, 512))
    made = generate(softmax(9, 512), STREAM._replace(native=STREAM.native - {Ops.LDEXP}))
    data: Any = np.random.default_rng(4).standard_normal((9, 512)).astype(np.float32)
    buffers = [buffer(device, np.zeros_like(data)), buffer(device, data)]
    program(device, made.linear, made.name)([b.handle for b in buffers], [])
    np.testing.assert_allclose(contents(buffers[0], np.float32, data.shape), expected(data), rtol=1e-5)


def test_two_values_are_carried_on() -> None:
    """Rows of EXP2(x) * a + b with a and b of the row."""
    rows, columns = 16, 1024
    (i, j), (k, m) = loops(rows, columns), folds(2, columns, columns)
    x = param(1, rows * columns)

    def power(at: UOp) -> UOp:
        return alu(Ops.EXP2, read(x, i * columns + at) * 0.5)

    total, least = fold(Ops.ADD, power(k), k), fold(Ops.MAX, power(m), m)
    value = power(j) * total + least
    ast = UOp.sink(store(param(0, rows * columns), i * columns + j, value, i, j))
    data = np.random.default_rng(1).standard_normal((rows, columns)).astype(np.float32)
    powers = np.exp2(data.astype(np.float64) * 0.5)
    wanted = powers * powers.sum(1, keepdims=True) + powers.max(1, keepdims=True)
    assert is_delayed(ast)
    np.testing.assert_allclose(run(ast, data, STREAM), wanted, rtol=1e-5)
