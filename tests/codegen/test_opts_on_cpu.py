"""Kernels under the heuristics' opts and under random legal opts, compiled and run on the CPU, against
NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codegen.opts_kernels import (
    KERNELS,
    buffers_for,
    column_sum,
    conv,
    conv_input_gradient,
    conv_weight_gradient,
    elementwise,
    full_sum,
    gather,
    matmul,
    outputs,
    row_sum,
    softmax,
    transpose,
    two_stores,
)
from whit.codegen.lower import prepare
from whit.codegen.opts import AxisTable, Opt, OptError, OptKind, axes, parse_opts
from whit.engine.trial import Compiled, compile_candidate
from whit.runtime.device import Buffer, Device, Launch
from whit.uop import AxisType, Ops, UOp, dtypes
from whit.uop.text import parse


def run(ast: UOp, compiled: Compiled, given_buffers: list) -> list[np.ndarray]:
    """The buffers after the compiled kernel ran on copies of them."""
    device = Device.get("CPU")
    launch = Launch(compiled.tasks, compiled.global_size, compiled.local_size)
    program = device.load(compiled.binary, compiled.name, launch)
    memory = [Buffer("CPU", data.nbytes) for data in given_buffers]
    for buffer, data in zip(memory, given_buffers):
        buffer.copyin(memoryview(data).cast("B"))
    program([buffer.handle for buffer in memory], [], wait=True)
    return [np.frombuffer(b.copyout(), data.dtype) for b, data in zip(memory, given_buffers, strict=True)]


def check(ast: UOp, opts, seed: int = 0) -> None:
    given_buffers = buffers_for(ast, seed)
    found = run(ast, compile_candidate(ast, "CPU", opts), given_buffers)
    for want, got in zip(outputs(ast, given_buffers), found):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


LARGER = {
    "elementwise": lambda: elementwise(3, 1001), "transpose": lambda: transpose(130, 67),
    "matmul": lambda: matmul(67, 130, 33), "matmul_nt": lambda: matmul(33, 70, 129, right=True),
    "matmul_tn": lambda: matmul(70, 65, 31, left=True), "row_sum": lambda: row_sum(37, 300),
    "column_sum": lambda: column_sum(300, 37), "full_sum": lambda: full_sum(5003),
    "softmax": lambda: softmax(33, 65), "conv": lambda: conv(3, 5, 9, 14, 23, 5, 5),
    "conv_dw": lambda: conv_weight_gradient(5, 3, 9, 12, 13, 3, 3),
    "conv_dx": lambda: conv_input_gradient(2, 5, 9, 12, 23, 3, 3), "two_stores": lambda: two_stores(33, 34),
    "gather": lambda: gather(6, 67, 40),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(LARGER))
def test_heuristics(name):
    check(LARGER[name](), None)


@settings(max_examples=60, deadline=None)
@given(
    kernel=st.sampled_from(sorted(KERNELS)),
    raw=st.lists(
        st.tuples(
            st.sampled_from([k for k in OptKind if k.name not in ("LOCAL", "GROUP", "GROUPTOP")]),
            st.integers(0, 11),
            st.sampled_from([0, 2, 3, 4, 5, 6, 8, 16]),
        ),
        max_size=7,
    ),
    seed=st.integers(0, 99),
)
def test_random_legal_opts(kernel, raw, seed):
    ast = KERNELS[kernel]()
    table = AxisTable.of(prepare(ast), Device.get("CPU").target)
    for kind, axis, amount in raw:
        present = sorted(table.axes)
        if present:
            number = present[axis % len(present)]
            other = present[amount % len(present)] if kind in (OptKind.SWAP, OptKind.MERGE) else amount
            try:
                table.apply(Opt(kind, number, other))
            except OptError:
                continue
    tile = np.prod([a.size for a in axes(table.build()) if a.type.is_tile], dtype=float)
    if tile <= 1024:  # larger ones only take longer to compile
        check(ast, table.opts, seed)


def test_sums_in_one_loop_that_an_opt_moves_apart() -> None:
    """x's sum depends on i // 2, y's on i: over one RANGE both run in one loop until i is split."""
    i, k = UOp.range(8, uid=0), UOp.range(5, AxisType.REDUCE, 1)
    out, x, y = (parse(f"%0 = param float32; slot={n} size={size}") for n, size in enumerate((8, 20, 40)))
    left = UOp(Ops.INDEX, dtypes.float32, (x, i // 2 * 5 + k)).reduce_ranges(Ops.ADD, k)
    right = UOp(Ops.INDEX, dtypes.float32, (y, i * 5 + k)).reduce_ranges(Ops.MAX, k)
    kernel = prepare(UOp.sink(UOp(Ops.STORE, dtypes.void, (out, i, left * right)).end(i)))
    for text in ("", "SPLIT axis 0 by 2", "THREAD axis 0 by 4", "UPCAST axis 0 by 2", "UNROLL axis 1 by 0",
                 "THREAD axis 0 by 4, UNROLL axis 1 by 0", "UPCAST axis 0 by 2, SPLIT axis 0 by 2"):
        check(kernel, parse_opts(text))


def test_prepare_again_changes_nothing_where_loops_are_shared() -> None:
    """Sums that become one loop become equal, and then the loops above them are shared too."""
    i = UOp.range(8, uid=0)
    ranges = [UOp.range(5, AxisType.REDUCE, n) for n in range(1, 5)]
    out, x = (parse(f"%0 = param float32; slot={n} size={size}") for n, size in enumerate((8, 40)))

    def mean(k: UOp) -> UOp:
        return UOp(Ops.INDEX, dtypes.float32, (x, i * 5 + k)).reduce_ranges(Ops.ADD, k)

    def spread(k: UOp, total: UOp) -> UOp:
        return (UOp(Ops.INDEX, dtypes.float32, (x, i * 5 + k)) * total).reduce_ranges(Ops.MAX, k)

    value = spread(ranges[0], mean(ranges[1])) - spread(ranges[2], mean(ranges[3]))
    kernel = prepare(UOp.sink(UOp(Ops.STORE, dtypes.void, (out, i, value)).end(i)))
    assert prepare(kernel) is kernel
    assert len([u for u in kernel.toposort() if u.op is Ops.REDUCE]) == 2
    check(kernel, ())
