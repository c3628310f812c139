"""Ragged edges: what rows beyond the end read does not reach a result, and is always there."""

from __future__ import annotations

import numpy as np
import pytest

from tests.codegen.linear_eval import LinearProgram
from tests.codegen.opts_kernels import fold, folds, loops, matmul, param, read, store
from whit.codegen.edges import free_edges
from whit.codegen.linearize import linearize
from whit.codegen.lower import lower_passes, prepare
from whit.codegen.opts import apply, parse_opts
from whit.codegen.target import Target
from whit.uop import Ops, UOp, dtypes
from whit.uop.ops import ALU
from whit.uop.rewrite import run_passes
from whit.uop.spec import verify

TARGET = Target("edges", "python", vector_bytes=16, vector_registers=16, threads=2, native=frozenset(ALU))
TILES = "PADTO axis 0 to 4, UPCAST axis 0 by 4, UPCAST axis 1 by 4"


def lowered(ast: UOp, opts: str) -> UOp:
    verify(ast, "kernel")
    tiled = run_passes(apply(prepare(ast), parse_opts(opts), TARGET), lower_passes(), TARGET)
    verify(tiled, "tiled")
    return tiled


def ran(tiled: UOp, *buffers: np.ndarray) -> None:
    linear = linearize(tiled, TARGET)
    verify(linear, "linear")
    LinearProgram(linear)([b.reshape(-1) for b in buffers])


def masks(tiled: UOp) -> int:
    """Reads that ask whether they may."""
    return sum([u.op is Ops.INDEX and len(u.src) > 2 for u in tiled.toposort()])


@pytest.mark.parametrize(
    "opts",
    [
        TILES,
        "PADTO axis 0 to 8, UPCAST axis 0 by 8, UPCAST axis 1 by 4",
        "PADTO axis 0 to 4, UPCAST axis 0 by 4, UPCAST axis 1 by 4, UNROLL axis 2 by 5",
        "PADTO axis 0 to 4, UPCAST axis 0 by 4, UPCAST axis 1 by 4, SWAP axis 0 with 1, THREAD axis 0 by 2",
        "PADTO axis 0 to 4, UPCAST axis 0 by 4, UPCAST axis 1 by 4, SWAP axis 0 with 1, STAGE axis 0 read 1",
        "PADTO axis 0 to 6, UPCAST axis 0 by 3, SPLIT axis 0 by 2, PADTO axis 1 to 3, UPCAST axis 1 by 3",
    ],
)
@pytest.mark.parametrize("left", [False, True])
def test_ragged_products(opts: str, left: bool) -> None:
    rng = np.random.default_rng(0)
    x, y = (rng.integers(1, 9, size).astype(np.float32) for size in ((9, 5), (5, 8)))
    x[0, 2] = np.inf  # the row that is read instead
    out = np.full((9, 8), np.nan, np.float32)
    ran(lowered(matmul(9, 8, 5, left=left), opts), out, np.ascontiguousarray(x.T if left else x), y)
    np.testing.assert_array_equal(out, (x[:, :, None] * y).sum(1))


def test_reads_of_rows_ask_nothing() -> None:
    assert masks(lowered(matmul(9, 8, 5), TILES)) == 0


def test_a_mask_that_stores_do_not_repeat_stays() -> None:
    """Padding with zeros: rows from 5 on are stored too."""
    (i, j), (k,) = loops(8, 4), folds(2, 3)
    a = UOp(Ops.INDEX, dtypes.float32, (param(1, 15), i * 3 + k, i.lt(5)))
    ast = UOp.sink(store(param(0, 32), i * 4 + j, fold(Ops.ADD, a * read(param(2, 12), k * 4 + j), k), i, j))
    x, y = np.arange(15, dtype=np.float32).reshape(5, 3), np.arange(12, dtype=np.float32).reshape(3, 4)
    out = np.full((8, 4), np.nan, np.float32)
    tiled = lowered(ast, "UPCAST axis 0 by 4, UPCAST axis 1 by 4")
    ran(tiled, out, x, y)
    assert masks(tiled) == 1
    np.testing.assert_array_equal(out, np.pad(x @ y, ((0, 3), (0, 0))))


def test_a_mask_together_with_one_that_uses_the_axis_too_stays() -> None:
    """A window: i + k must be inside as well, which the first row does not say of the others."""
    (i,), (k,) = loops(7), folds(1, 3)
    inside = (i + k).lt(7)
    a = UOp(Ops.INDEX, dtypes.float32, (param(1, 7), i + k, inside))
    ast = UOp.sink(store(param(0, 7), i, fold(Ops.ADD, a, k), i))
    x, out = np.arange(1, 8, dtype=np.float32), np.full(7, np.nan, np.float32)
    ran(lowered(ast, "PADTO axis 0 to 2, UPCAST axis 0 by 2"), out, x)
    padded = np.pad(x, (0, 2))
    np.testing.assert_array_equal(out, [padded[n : n + 3].sum() for n in range(7)])


def test_kernels_whose_work_items_share_scratch_are_left_alone() -> None:
    tiled = apply(prepare(matmul(9, 8, 5)), parse_opts(TILES), TARGET)
    assert free_edges(tiled, TARGET._replace(has_local=True)) is tiled
    assert free_edges(tiled, TARGET) is not tiled
