"""Matrices that are read once: which kernels are chosen, what becomes of them, and that values stay."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codegen.opts_kernels import (
    AVX512,
    F32,
    SCALAR,
    SSE,
    buffers_for,
    column_sum,
    fold,
    folds,
    loops,
    matmul,
    outputs,
    param,
    read,
    row_sum,
    softmax,
    store,
)
from tests.codegen.test_opts_on_cpu import check
from whit.codegen.heuristics import choose
from whit.codegen.lower import prepare
from whit.codegen.opts import OptKind, apply, axes
from whit.codegen.scopes import Kernel
from whit.codegen.skinny import read_once
from whit.codegen.target import Target
from whit.uop import AxisType, Ops, UOp

SMALL = AVX512._replace(l2_bytes=1 << 14)  # what is large for it is small enough to be interpreted


def taken(ast: UOp, target: Target = AVX512) -> bool:
    return read_once(Kernel(ast, target))


def sizes(ast: UOp, target: Target = AVX512) -> dict[AxisType, list[int]]:
    found: dict[AxisType, list[int]] = {}
    for axis in axes(apply(ast, choose(ast, target), target)):
        found.setdefault(axis.type, []).append(axis.size)
    return found


@pytest.mark.parametrize("m", [1, 2, 4, 8])
def test_columns_are_read_in_blocks_of_rows(m: int) -> None:
    """Sixteen rows of a task's columns at a time: long runs, each element once."""
    ast = matmul(m, 4096, 4096)
    found = sizes(ast)
    assert found[AxisType.REDUCE] == [16] and found[AxisType.LOOP][0] == 256
    assert m == 1 or m in found[AxisType.UPCAST]
    assert np.prod(found[AxisType.UPCAST]) // 16 <= 24  # vectors of sums
    assert found[AxisType.THREAD] == [8]


@pytest.mark.parametrize("threads", [1, 2, 6, 16, 32])
def test_every_thread_has_a_part(threads: int) -> None:
    for right in (False, True):
        found = sizes(matmul(4, 4096, 4096, right=right), AVX512._replace(threads=threads))
        tasks = found.get(AxisType.THREAD, [1])[0]
        assert tasks >= threads and (tasks % threads == 0 or tasks >= 2 * threads)


@pytest.mark.parametrize("m", [2, 4, 8])
def test_rows_are_read_whole(m: int) -> None:
    ast = matmul(m, 4096, 4096, right=True)
    found = sizes(ast)
    assert OptKind.STAGE not in {o.kind for o in choose(ast, AVX512)}
    assert found[AxisType.UNROLL][0] % 16 == 0 and m in found[AxisType.UPCAST]
    assert 8 <= np.prod(found[AxisType.UPCAST]) <= 24


def test_sums_of_columns() -> None:
    assert taken(column_sum(4096, 4096))


def test_other_kernels_are_left_alone() -> None:
    assert not taken(matmul(512, 512, 512))  # much is used again
    assert not taken(matmul(8, 256, 256))  # all of it is in the cache
    assert not taken(row_sum(4096, 4096))  # in long runs anyway
    assert not taken(softmax(4096, 4096))
    assert not taken(column_sum(1 << 18, 16))  # rows too short
    assert not taken(matmul(8, 4096, 4096), SCALAR)
    assert not taken(matmul(8, 4096, 4099 * 2))  # nothing near sixteen rows divides the sum


def test_sums_that_cannot_wait_in_the_result() -> None:
    """The greatest of a column: partial results would need another operation than adding."""
    (i,), (k,) = loops(4096), folds(1, 4096)
    greatest = fold(Ops.MAX, read(param(1, 1 << 24), k * 4096 + i), k)
    assert not taken(UOp.sink(store(param(0, 4096), i, greatest, i)))


size = st.sampled_from([64, 96, 128, 130])


@settings(max_examples=25, deadline=None)
@given(m=st.integers(1, 9), n=size, k=size, right=st.booleans(), target=st.sampled_from([SMALL, SSE]))
def test_values_under_the_evaluator(m: int, n: int, k: int, right: bool, target: Target) -> None:
    target = target._replace(l2_bytes=1 << 12)
    ast = matmul(m, n, k, right=right)
    c, a, b = buffers_for(ast)
    got = outputs(apply(ast, choose(ast, target), target), [c, a, b])[0]
    y = b.reshape(n, k).T if right else b.reshape(k, n)
    np.testing.assert_allclose(got.reshape(m, n), a.reshape(m, k) @ y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(1, 1100, 640), (3, 1024, 640), (8, 1023, 650), (5, 520, 1300)])
@pytest.mark.parametrize("right", [False, True])
def test_values_on_the_cpu(shape: tuple[int, int, int], right: bool) -> None:
    ast = prepare(matmul(*shape, right=right))
    target = AVX512._replace(l2_bytes=1 << 16)
    assert taken(ast, target) or shape[0] == 1
    check(ast, choose(ast, target))


def test_a_result_of_another_shape_is_written_by_its_own_strides() -> None:
    """The result is transposed: partial sums along n would be scattered."""
    i, j = loops(4096, 4)
    (k,) = folds(2, 4096)
    value = read(param(1, 4 * 4096), j * 4096 + k) * read(param(2, 1 << 24), k * 4096 + i)
    ast = UOp.sink(store(param(0, 4 * 4096), i * 4 + j, fold(Ops.ADD, value, k), i, j))
    assert not taken(ast) and F32 is value.dtype
