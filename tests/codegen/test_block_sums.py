"""Sums over weights in blocks: what becomes of them before opts, the opts, and that values stay right on
every path."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from whit import Context, Tensor
from whit.codegen.block_sums import split_blocks
from whit.codegen.heuristics import choose
from whit.codegen.lower import prepare
from whit.codegen.opts import OptKind
from whit.codegen.pipeline import generate
from whit.codegen.prefetch import BLOCKS_AHEAD
from whit.codegen.target import Target
from whit.nn.blocks import block_type, decode
from whit.renderer import CPU_OPS
from whit.schedule import schedule
from whit.uop import AxisType, Ops, UOp, dtypes
from whit.uop.symbolic import linear_form

WIDE = Target("wide", "llvm", vector_bytes=64, vector_registers=32, threads=2, native=CPU_OPS)
NARROW = Target("narrow", "llvm", vector_bytes=32, vector_registers=16, threads=4, native=CPU_OPS)


def kernel(name: str, rows: int = 256, columns: int = 1, size: int = 1024) -> UOp:
    """The kernel of a product of a few rows with a matrix in blocks."""
    kind = block_type(name)
    matrix = Tensor.empty(rows, size // kind.elements * kind.nbytes, dtype=dtypes.uint8)
    product = Tensor.empty(columns, size).linear(decode(matrix, kind).T)
    plan = schedule([product.contiguous().uop])[0].linear
    kernels = [call.src[0] for call in plan.src if call.src[0].op is Ops.SINK]
    assert len(kernels) == 1
    return kernels[0]


def sums(ast: UOp) -> list[UOp]:
    return [u for u in ast.toposort() if u.op is Ops.REDUCE]


def divisions(ast: UOp) -> int:
    return sum(u.op in (Ops.FLOORDIV, Ops.FLOORMOD) for u in ast.toposort())


@pytest.mark.parametrize("target", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("columns", [1, 4])
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_no_index_is_divided(name: str, target: Target, columns: int) -> None:
    """All axes of a block stand apart, the innermost as wide as a vector; one loop counts blocks."""
    ready = prepare(prepare(kernel(name, columns=columns)), target)
    assert divisions(ready) == 0
    lane = {u.src[-1].src[0].arg for u in sums(ready)}
    assert lane == {target.vector_bytes // 4} or (name == "Q8_0" and lane == {32})
    assert prepare(ready, target) is ready
    opts = choose(ready, target)
    kinds = [opt.kind for opt in opts]
    assert OptKind.UPCAST in kinds and OptKind.THREAD in kinds
    left = [u for u in sums(ready) for r in u.src[1:] if r.arg.axis is AxisType.REDUCE]
    unrolled = {opt.axis for opt in opts if opt.kind is OptKind.UNROLL}
    loops = {r.arg.uid for u in left for r in u.src[1:]} - unrolled
    assert len(loops) == 1, opts


def test_scales_stand_outside() -> None:
    """d * sum (q * x): the sum over two halves is written out as multiply-adds that start with -8 * sum x."""
    (total,) = sums(prepare(prepare(kernel("Q4_0")), WIDE))
    scale, inner = total.src[0].src
    assert scale.dtype is dtypes.float32 and inner.op is Ops.MULACC and inner.src[2].op is Ops.MULACC
    start = inner.src[2].src[2]
    assert start.op is Ops.MUL and start.src[1].arg == -8.0
    assert total.src[-1] not in scale.ranges and total.src[-1] in inner.ranges


def test_a_minimum_is_a_sum_of_its_own() -> None:
    assert len(sums(prepare(prepare(kernel("Q4_1")), WIDE))) == 2


def test_weights_are_fetched_ahead() -> None:
    """Once for each line that a round of the loop reads: four rows of one block; not in small matrices."""
    program = generate(kernel("Q4_0", rows=256), WIDE).linear
    fetches = [u for u in program.src if u.op is Ops.PREFETCH]
    assert len(fetches) == 4 and {u.src[0].dtype for u in fetches} == {dtypes.uint8}
    wide = [u for u in program.src if u.op is Ops.LOAD and u.dtype == dtypes.uint8.vec(16)]
    loads = {linear_form(u.src[1])[1] for u in wide}
    assert {linear_form(u.src[1])[1] - BLOCKS_AHEAD for u in fetches} == loads
    small = generate(kernel("Q4_0", rows=96), WIDE).linear
    assert not any(u.op is Ops.PREFETCH for u in small.src)


def test_other_kernels_stay() -> None:
    """Small matrices, and sums without blocks."""
    for ast in (
        prepare(kernel("Q4_0", rows=2, size=64)),
        prepare(schedule([(Tensor.empty(64, 64) @ Tensor.empty(64, 64)).uop])[0].linear.src[0].src[0]),
    ):
        assert split_blocks(ast, WIDE) is ast
    ast = prepare(kernel("Q4_0"))
    assert split_blocks(ast, Target("scalar", "python")) is ast


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_1", "Q8_0", "Q3_K", "Q4_K", "Q6_K", "IQ3_S"])
@pytest.mark.parametrize("rows, columns", [(7, 1), (16, 2), (33, 5), (6, 9)])
@pytest.mark.parametrize("settings", [{}, {"NOOPT": 1}], ids=["opts", "noopt"])
def test_values(name: str, rows: int, columns: int, settings: dict[str, int]) -> None:
    """Ragged numbers of rows and columns, with and without opts, against exact sums."""
    kind, size = block_type(name), 1536
    rng = np.random.default_rng(rows)
    raw = rng.integers(0, 256, (rows, size // kind.elements, kind.nbytes), np.uint8)
    for at in {"Q4_1": [0, 2], "Q5_1": [0, 2], "Q3_K": [108], "Q4_K": [0, 2], "Q6_K": [208]}.get(name, [0]):
        raw[..., at + 1] = 0x20 + (raw[..., at + 1] & 3)
    raw = raw.reshape(rows, -1)
    x = rng.standard_normal((columns, size)).astype(np.float32)
    weights = dequantize(raw, gguf.GGMLQuantizationType(kind.id)).astype(np.float64)
    with Context(**settings):
        got = Tensor(x).linear(decode(Tensor(raw), kind).T).numpy()
    bound = np.abs(x.astype(np.float64)) @ (np.abs(weights) + np.abs(weights).max(1, keepdims=True)).T
    assert (np.abs(got - x.astype(np.float64) @ weights.T) <= 1e-6 * bound).all()
