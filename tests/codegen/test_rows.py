"""Opts of kernels that keep rows in scratch: what is chosen, and that the programs compute attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.codegen.linear_eval import LinearProgram
from whit import Tensor
from whit.codegen.heuristics import choose
from whit.codegen.linearize import linearize
from whit.codegen.lower import lower_passes, prepare
from whit.codegen.opts import OptKind, apply
from whit.codegen.target import Target
from whit.schedule import schedule
from whit.uop import Ops, UOp
from whit.uop.ops import ALU
from whit.uop.rewrite import run_passes
from whit.uop.spec import verify

WIDE = Target("rows wide", "llvm", vector_bytes=64, vector_registers=32, threads=2, native=frozenset(ALU))
NARROW = Target("rows narrow", "llvm", vector_bytes=16, vector_registers=16, threads=1, native=frozenset(ALU))


def attention(heads: int, queries: int, keys: int, size: int, causal: bool = True) -> UOp:
    q, k, v = [Tensor.empty(heads, n, size) for n in (queries, keys, keys)]
    plan, _, _ = schedule([q.scaled_dot_product_attention(k, v, is_causal=causal).uop])
    assert len(plan.calls) == 1 and plan.calls[0].ast is not None
    return prepare(plan.calls[0].ast)


def program(ast: UOp, target: Target) -> UOp:
    tiled = run_passes(apply(ast, choose(ast, target), target), lower_passes(), target)
    linear = linearize(tiled, target)
    verify(linear, "linear")
    return linear


@pytest.mark.parametrize("target, rows", [(WIDE, 32), (NARROW, 8)])
def test_tiles_of_attention(target: Target, rows: int) -> None:
    """Two vectors of queries, some columns beside them, the queries turned around once a block."""
    opts = choose(attention(4, 1024, 1024, 64), target)
    by_kind = {kind: [o.amount for o in opts if o.kind is kind] for kind in OptKind}
    assert by_kind[OptKind.UPCAST][0] == rows
    assert all(4 <= amount <= 8 for amount in by_kind[OptKind.UPCAST][1:] + by_kind[OptKind.UNROLL])
    assert len(by_kind[OptKind.STAGE]) == 1
    assert len(by_kind[OptKind.THREAD]) == (target.threads > 1)


@pytest.mark.parametrize("target", [WIDE, NARROW])
def test_nothing_is_gathered_in_the_products(target: Target) -> None:
    """In the innermost loops vectors lie side by side and the other operand is a scalar."""
    depth = gathers = products = 0
    for node in program(attention(2, 128, 128, 64), target).src:
        depth += (node.op is Ops.RANGE) - (node.op is Ops.END)
        if depth >= 2 and node.op is Ops.LOAD and node.src[1].dtype.count > 1:
            gathers += 1
        products += node.op is Ops.MULACC and depth >= 2
    assert products >= 16
    assert gathers <= 16, "only where queries are turned around"


@pytest.mark.parametrize("target", [WIDE, NARROW])
@pytest.mark.parametrize(
    "heads, queries, keys, size, causal",
    [(1, 40, 40, 8, True), (1, 17, 33, 6, True), (2, 24, 31, 8, False), (1, 7, 50, 20, True)],
)
def test_programs_compute_attention(
    target: Target, heads: int, queries: int, keys: int, size: int, causal: bool
) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(heads, n, size)).astype(np.float32) for n in (queries, keys, keys)]
    q, k, v = [Tensor.empty(heads, n, size) for n in (queries, keys, keys)]
    plan, buffers, _ = schedule([q.scaled_dot_product_attention(k, v, is_causal=causal).uop])
    given = [next(a for t, a in zip((q, k, v), arrays) if b in t.uop.toposort()) for b in buffers]
    memories = [
        given[slot.external].ravel().copy() if slot.external >= 0 else np.full(slot.size, np.nan, np.float32)
        for slot in plan.slots
    ]
    for call in plan.calls:
        assert call.ast is not None
        LinearProgram(program(prepare(call.ast), target))([memories[s] for s in call.slots])
    wanted = F.scaled_dot_product_attention(*[torch.from_numpy(a) for a in arrays], is_causal=causal)
    got = memories[plan.results[0].slot]
    np.testing.assert_allclose(got, wanted.numpy().ravel(), rtol=2e-5, atol=2e-5)
