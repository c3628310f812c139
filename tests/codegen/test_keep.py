"""Dear values that two loops compute are computed once, into scratch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.codegen.opts_kernels import AVX512, GROUPS, SCALAR, fold, folds, loops, param, read, softmax, store
from tests.runtime.linear_kernels import buffer, program
from tests.runtime.linear_kernels import read as contents
from whit import Tensor
from whit.codegen.heuristics import choose
from whit.codegen.keep import keep_values
from whit.codegen.lower import prepare
from whit.codegen.opts import Opt, OptKind, apply
from whit.codegen.pipeline import generate
from whit.codegen.target import Target
from whit.runtime.cpu import cpu_target
from whit.uop import Ops, UOp, dtypes
from whit.uop.ops import Op


def kept(ast: UOp, target: Target = AVX512, opts: Any = None) -> UOp:
    ready = prepare(ast)
    return keep_values(apply(ready, choose(ready, target) if opts is None else opts, target), target)


def count(ast: UOp, op: Op) -> int:
    return sum(u.op is op for u in ast.toposort())


def test_softmax_computes_its_exponentials_once() -> None:
    made = kept(softmax(64, 512))
    assert count(made, Ops.EXP2) == 1 and count(made, Ops.STAGE) == 1
    (stage,) = [u for u in made.toposort() if u.op is Ops.STAGE]
    assert np.prod([r.src[0].arg for r in stage.src[1:]]) == 512
    readers = [u for u in made.toposort() if u.op is Ops.INDEX and u.src[0] is stage]
    assert len(readers) == 2 and readers[0].src[1].ranges.isdisjoint(readers[1].src[1].ranges)


def test_stores_in_one_loop_compute_a_value_once_already() -> None:
    """Mean and variance of each row: both stores stand in the loop over rows."""
    (i,), (k, m) = loops(64), folds(1, 36, 36)
    x = param(2, 64 * 36)
    mean = fold(Ops.ADD, read(x, i * 36 + k), k) / 36.0
    away = read(x, i * 36 + m) - mean
    variance = fold(Ops.ADD, away * away, m) / 36.0
    both = UOp.sink(store(param(0, 64), i, mean, i), store(param(1, 64), i, variance, i))
    assert count(kept(both), Ops.STAGE) == 0
    assert generate(both, cpu_target("llvm", "llvm")).linear.src


@pytest.mark.parametrize("target", [SCALAR, GROUPS], ids=lambda t: t.key)
def test_only_where_scratch_is_a_cache(target: Target) -> None:
    assert count(kept(softmax(64, 512), target), Ops.STAGE) == 0


def test_rows_that_exceed_the_cache_are_computed_again() -> None:
    assert count(kept(softmax(4, 1 << 16)), Ops.STAGE) == 1
    assert count(kept(softmax(4, 1 << 18)), Ops.STAGE) == 0
    assert count(kept(softmax(4, 1 << 16), AVX512._replace(scratch_bytes=1 << 17)), Ops.STAGE) == 0


def kernel(first: Any, second: Any, n: int = 256) -> UOp:
    """y[i, j] = second(x[i, j]) * sum over k of first(x[i, k])."""
    i, j = loops(8, n)
    (k,) = folds(2, n)
    x = param(1, 8 * n)
    total = fold(Ops.ADD, first(read(x, i * n + k), k), k)
    return UOp.sink(store(param(0, 8 * n), i * n + j, second(read(x, i * n + j), j) * total, i, j))


def test_cheap_values_are_computed_again() -> None:
    def twice(x: UOp, _: UOp) -> UOp:
        return x * 2.0 + 1.0

    assert count(kept(kernel(twice, twice)), Ops.STAGE) == 0


def test_other_functions_of_the_counter_are_other_values() -> None:
    def power(x: UOp, _: UOp) -> UOp:
        return UOp(Ops.EXP2, x.dtype, (x,))

    def other(x: UOp, k: UOp) -> UOp:
        return UOp(Ops.EXP2, x.dtype, (x + k.cast(dtypes.float32),))

    assert count(kept(kernel(power, power)), Ops.STAGE) == 1
    assert count(kept(kernel(other, other)), Ops.STAGE) == 1
    assert count(kept(kernel(power, other)), Ops.STAGE) == 0

    def shifted(x: UOp, k: UOp) -> UOp:
        return power(read(x.src[0], x.src[1] + 1, k.lt(255)), k)

    assert count(kept(kernel(power, shifted)), Ops.STAGE) == 0


def test_untiled_loops_and_whole_tiles() -> None:
    assert count(kept(softmax(8, 64), opts=()), Ops.STAGE) == 1
    whole = (Opt(OptKind.UPCAST, 1, 0), Opt(OptKind.UNROLL, 2, 0))
    assert count(kept(softmax(8, 16), opts=whole), Ops.STAGE) == 1
    assert count(kept(softmax(8, 13), opts=()), Ops.STAGE) == 0  # no vectors fit


def run(ast: UOp, data: np.ndarray, target: Target, opts: Any = None) -> np.ndarray:
    made = generate(ast, target, opts)
    buffers = [buffer("CPU", np.zeros_like(data)), buffer("CPU", data)]
    program("CPU", made.linear, made.name, made.tasks)([b.handle for b in buffers], [])
    return contents(buffers[0], data.dtype, data.shape)


SHAPES = [(3, 16), (5, 100), (64, 512), (7, 1000), (2, 4099), (131, 1024), (1, 1 << 15)]


@pytest.mark.parametrize("shape", SHAPES)
def test_values(shape: tuple[int, int]) -> None:
    """Bits do not depend on whether the values are kept."""
    data = np.random.default_rng(shape[1]).standard_normal(shape).astype(np.float32) * 5
    target = cpu_target("llvm", "llvm")
    got = run(softmax(*shape), data, target)
    power = np.exp2((data.astype(np.float64) - data.max(1, keepdims=True)) * 1.4427)
    np.testing.assert_allclose(got, power / power.sum(1, keepdims=True), rtol=1e-5)
    np.testing.assert_array_equal(got, run(softmax(*shape), data, target._replace(scratch_bytes=0)))


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_other_types(dtype: Any) -> None:
    data = np.random.default_rng(0).standard_normal((33, 200)).astype(dtype)
    power = np.exp(data.astype(np.float64))
    want = power / power.sum(1, keepdims=True)
    got = Tensor(data).softmax(-1).numpy()
    np.testing.assert_allclose(got, want, rtol=1e-12 if dtype == np.float64 else 2e-3)
