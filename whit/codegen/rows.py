"""Opts for kernels that keep rows of an intermediate in scratch, such as attention.

    for each block of queries                    (one or two vectors of rows: the vectors of the whole kernel)
        s[k] = sum_d q[d] * key[k, d]            columns k, unrolled beside the rows: a register tile
        e[k] = exp(s[k] - max_k s[k])
        out[d] = sum_k e[k] * value[k, d]        columns d

A row of scratch belongs to one lane, so that maxima, sums and exponentials are vectors too, and nothing is
folded across lanes. What varies along the rows in memory is turned around once a block (STAGE), the other
operand is read as scalars into all lanes.
"""

from __future__ import annotations

from whit.codegen.opts import Opt, OptError, OptKind
from whit.codegen.scopes import Kernel
from whit.codegen.stages import reads_of, scratch_bytes
from whit.helpers import round_up
from whit.uop import AxisType, Ops, UOp
from whit.uop.symbolic import linear_form

PRODUCTS = 16  # vectors that a register tile holds at most
STEPS = 4  # iterations side by side


def rows(k: Kernel) -> UOp | None:
    """Tile a kernel whose scratch is filled by products; the RANGE of its rows, None if it is no such
    kernel."""
    root = _row_axis(k)
    if root is None:
        return None
    row: int = root.arg.uid
    amount = _row_amount(k, row)
    if amount < k.lanes or not k.tile(row, amount):
        return None
    vectors = amount // k.lanes
    done = {row}
    order = k.table.ast.toposort()
    for node in order:
        if node.op is Ops.REDUCE and root in node.ranges:
            column = _column(node, row)
            if column is not None and column not in done:
                k.tile(column, _columns(k, column, vectors))
                done.add(column)
    for node in order:
        if node.op is Ops.REDUCE or node.op is Ops.STAGE:
            inner = node.src[-1].arg.uid
            if inner in done or not k.is_static(inner) or k.size(inner) < 4 * STEPS:
                continue
            is_product = node.op is Ops.REDUCE and _column(node, row) is not None
            if not is_product or k.size(inner) % STEPS == 0:  # no masks in the innermost loops
                done.add(inner)
                k.tile(inner, STEPS)
    return root


def turn_rows(k: Kernel, root: UOp) -> None:
    """Have what lies in steps along the rows turned around in scratch, once a block."""
    around = [a for a in k.table.of_type(AxisType.THREAD, AxisType.LOOP) if root in a.roots]
    for number, value in enumerate(reads_of(k.table.ast)):
        if around and _turns(value, root):
            try:
                k.table.apply(Opt(OptKind.STAGE, around[-1].number, number))
            except OptError:  # too large for scratch: it is gathered
                continue


def _row_axis(k: Kernel) -> UOp | None:
    """The innermost loop around scratch, if products fill or read it: it becomes the vector."""
    order = k.table.ast.toposort()
    stages = [u for u in order if u.op is Ops.STAGE]
    if not stages:
        return None
    around: frozenset[UOp] = frozenset().union(*[stage.ranges for stage in stages])
    loops = [r for r in around if r.arg.axis is AxisType.LOOP and k.is_static(r.arg.uid)]
    row = max(loops, key=lambda r: int(r.arg.uid), default=None)
    if row is None or not any(
        u.op is Ops.REDUCE and u.src[0].op is Ops.MUL and _column(u, row.arg.uid) is not None for u in order
    ):
        return None
    return row


def _row_amount(k: Kernel, row: int) -> int:
    """Rows of a block: two vectors, or one if scratch would not fit into the second cache."""
    a_row = scratch_bytes(k.table.ast.toposort())
    amount = 2 * k.lanes
    while amount > 1 and (
        amount * a_row > min(k.target.l2_bytes, k.target.scratch_bytes * 3 // 4)
        or round_up(k.size(row), amount) > 1.25 * round_up(k.size(row), max(1, amount // 2))
    ):
        amount //= 2
    return amount


def _column(reduce: UOp, row: int) -> int | None:
    """The axis beside the rows on which a reduction depends: a loop inside of theirs, or one that fills
    scratch."""
    inside = [r.arg.uid for r in reduce.ranges if r.arg.axis is AxisType.REDUCE or r.arg.uid > row]
    return max(inside, default=None)


def _columns(k: Kernel, column: int, vectors: int) -> int:
    """Columns of a register tile."""
    if not k.is_static(column):
        return 1
    size = k.size(column)
    most = min(PRODUCTS // vectors, (k.target.vector_registers - vectors - 2) // vectors)

    def value(n: int) -> float:
        """Share of the work that is useful, with a load and a half beside n products."""
        return n / (n + 1.5) * size / round_up(size, n)

    return max(range(1, most + 1), key=value)


def _turns(value: UOp, root: UOp) -> bool:
    """Whether a read walks through memory in steps along the rows, but not along what is folded."""
    read = next(u for u in value.toposort() if u.op is Ops.INDEX)
    steps = linear_form(read.src[1])[0]
    return steps.get(root, 0) > 1 and 1 in steps.values()
