"""Sums of products with reuse, as `blocking.py` sees them: rows times columns.

    C[m, n] = sum_k A[m, k] * B[k, n]

also batched, transposed, and as a convolution, where the index of B is a window and k stands for several
ranges. *Columns* are the reads that depend on n, the axis of the vectors, *rows* the others; m is an axis on
which only rows depend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from whit.codegen.opts import Axis
from whit.codegen.scopes import Kernel
from whit.codegen.stages import Windows, contiguous_loops, find_windows, reads_of, source_steps
from whit.codegen.target import Target
from whit.helpers import prod
from whit.uop import AxisType, Ops, UOp, dtypes
from whit.uop.ops import DOTS
from whit.uop.symbolic import linear_form

COPY, TURN, GATHER = 0.25, 0.4, 1.5  # cycles to pack an element: as it lies, turned around, one by one
SPREAD = 6.0  # the same where two axes are one, along which steps are unequal
SHORT = 256  # bytes: rows that lie in shorter runs are best packed
_PRODUCTS = frozenset({Ops.MUL, *DOTS})  # what a sum to block adds up


@dataclass(frozen=True)
class Product:
    """The reduction to block: its axes by role and the values that are read in it, with their numbers."""

    target: Target
    m: Axis
    n: Axis
    outer: tuple[Axis, ...]
    folded: int  # how many products are summed up
    fold: Axis  # the longest axis of the sum
    rows: tuple[tuple[int, UOp], ...]
    columns: tuple[tuple[int, UOp], ...]
    itemsize: int
    packing: float = COPY  # cycles to pack an element of the columns
    row_packing: float = COPY
    across: Axis | None = None  # of `outer`, the axis nearest to n on which columns depend and rows do not
    is_near: bool = True  # whether results are neighbours along n
    merged: bool = False  # n stands for two axes, `across` and the one found first
    run: int = 0  # if so: neighbours of the source come in runs of this length, which whole tiles can copy
    steps_along_m: bool = False  # whether results are neighbours along m

    @cached_property
    def columns_far(self) -> bool:
        """Whether columns come from beyond the second cache."""
        reads = [u for _, value in self.columns for u in value.toposort() if u.op is Ops.INDEX]
        nbytes = sum(u.src[0].arg.size * u.dtype.itemsize for u in reads) / self.column_batches
        return bool(nbytes > self.target.l2_bytes / 2)

    @cached_property
    def size_m(self) -> int:
        """Rows."""
        return size_of(self.m)

    @cached_property
    def size_n(self) -> int:
        """Columns."""
        return size_of(self.n)

    @cached_property
    def lanes(self) -> int:
        """Elements of the accumulator's type in a vector."""
        return max(1, self.target.vector_bytes // self.itemsize)

    @cached_property
    def rows_run_along_m(self) -> bool:
        """Whether neighbours of the rows in memory are neighbours along m."""
        return any(_steps(value).get(self.m.roots[-1]) == 1 for _, value in self.rows)

    @cached_property
    def rows_odd(self) -> bool:
        """Whether the index of the rows has more than factors of axes: it is best evaluated once."""
        reads = [u for _, value in self.rows for u in value.toposort() if u.op is Ops.INDEX]
        return any(t.op is not Ops.RANGE for read in reads for t in linear_form(read.src[1])[0])

    @cached_property
    def row_windows(self) -> list[Windows | None]:
        """How the rows are read through windows, value by value."""
        return [find_windows(value) for _, value in self.rows]

    @cached_property
    def rows_are_windows(self) -> bool:
        """Whether rows can be staged with what windows share stored once."""
        return self.itemsize == 4 and any(found is not None for found in self.row_windows)

    @cached_property
    def row_elements(self) -> int:
        """Elements of all rows, those that windows share counted once."""
        total = 0
        for (_, value), found in zip(self.rows, self.row_windows, strict=True):
            ranges = value.ranges if found is None else found.value.ranges
            total += prod([int(r.src[0].arg) for r in ranges])
        return int(total)

    @cached_property
    def row_share(self) -> float:
        """Elements of the rows as a share of what they are when each window has its own."""
        plain = sum([prod([int(r.src[0].arg) for r in v.ranges]) for _, v in self.rows])
        return float(self.row_elements / plain)

    @cached_property
    def row_work(self) -> int:
        """Operations to compute an element of the rows."""
        return sum(
            [u.op.is_alu and u.dtype is not dtypes.index for _, value in self.rows for u in value.toposort()]
        )

    @cached_property
    def column_uses(self) -> int:
        """How often each panel of columns is used beside the rows of its own product."""
        return int(prod([size_of(a) for a in self.outer if not self.moves_columns(a)]))

    @cached_property
    def batches(self) -> int:
        """How often the whole is done."""
        return int(prod([size_of(a) for a in self.outer if a is not self.across]))

    @cached_property
    def rows_are_read(self) -> bool:
        """Whether rows are nothing but reads: what is computed from reads is best computed once."""
        return all(value.op is Ops.INDEX for _, value in self.rows)

    @cached_property
    def rows_beyond(self) -> bool:
        """Whether rows come from beyond the second cache."""
        reads = [u for _, value in self.rows for u in value.toposort() if u.op is Ops.INDEX]
        return bool(sum(u.src[0].arg.size * u.dtype.itemsize for u in reads) > self.target.l2_bytes)

    @cached_property
    def nested(self) -> bool:
        """Whether the sum has several loops."""
        return self.folded > size_of(self.fold)

    @cached_property
    def rows_apart(self) -> bool:
        """Whether the sum walks through rows in short runs of neighbours, or in none."""
        return any(_run(value) * self.itemsize < SHORT for _, value in self.rows)

    @cached_property
    def rows_masked(self) -> bool:
        """Whether rows are padded."""
        return any(len(u.src) > 2 for _, value in self.rows for u in value.toposort() if u.op is Ops.INDEX)

    @cached_property
    def column_batches(self) -> int:
        """How often there are other columns."""
        outer = [a for a in self.outer if a is not self.across and self.moves_columns(a)]
        return int(prod([size_of(a) for a in outer]))

    def moves_columns(self, axis: Axis) -> bool:
        """Whether columns depend on an axis."""
        return any(depends(value, axis) for _, value in self.columns)

    @cached_property
    def elements(self) -> int:
        """Of the result."""
        return int(prod([size_of(a) for a in (*self.outer, self.m, self.n)]))

    @cached_property
    def work(self) -> int:
        """Products in all."""
        return self.elements * self.folded

    @cached_property
    def row_uses(self) -> int:
        """How often each row is used beside the columns of its own product."""
        return int(prod([size_of(a) for a in self.outer if not any(depends(v, a) for _, v in self.rows)]))


def size_of(axis: Axis) -> int:
    """The size of an axis, which is fixed here."""
    assert isinstance(axis.size, int)
    return axis.size


def _steps(value: UOp) -> dict[UOp, int]:
    """Factors in the index of the read that a value is made of."""
    return source_steps(value, None)


def _run(value: UOp) -> int:
    """How many neighbours a sum reads one after another."""
    steps = {t: abs(f) for t, f in _steps(value).items() if t.op is Ops.RANGE}
    run = 1
    for r in sorted([t for t in steps if t.arg.axis is AxisType.REDUCE], key=steps.__getitem__):
        if steps[r] == run:
            run *= int(r.src[0].arg)
    return run


def depends(value: UOp, axis: Axis) -> bool:
    """Whether a value of the unoptimised kernel changes along an axis."""
    return not value.ranges.isdisjoint(axis.roots)


def find_products(k: Kernel) -> list[Product]:
    """The kernel's one sum as rows times columns, with the axis along which results are neighbours as columns
    and with others; empty if it has another form or nothing to reuse."""
    table = k.table
    loops, folds = table.of_type(AxisType.LOOP), table.of_type(AxisType.REDUCE)
    reduces = [node for node in table.closers if node.op is Ops.REDUCE]
    if len(reduces) != 1 or reduces[0].arg.op is not Ops.ADD or reduces[0].src[0].op not in _PRODUCTS:
        return []
    if any(not isinstance(a.size, int) for a in (*loops, *folds)) or not folds:
        return []
    if any(node.op is Ops.STAGE for node in table.closers) or any(
        end.op is not Ops.END for end in table.ast.src
    ):
        return []
    reduce = reduces[0]
    if any(not depends(reduce, a) or any(end not in a.owners for end in table.ast.src) for a in loops):
        return []
    inside = set(reduce.toposort())
    values = [(number, value) for number, value in enumerate(reads_of(table.ast)) if value in inside]
    values = [(number, value) for number, value in values if any(depends(value, a) for a in folds)]
    near = _neighbours(table.ast, loops)
    others = sorted([a for a in loops if a is not near], key=lambda a: -size_of(a))[:2]
    found = [
        _product(k.target, n, m, loops, folds, values, reduce.dtype.itemsize)
        for n in (near, *others)
        for m in ((None, near) if near is not n else (None,))
        if n is not None
    ]
    forms = [replace(p, is_near=p.n is near, steps_along_m=p.m is near) for p in found if p is not None]
    return [p for at, p in enumerate(forms) if all(p.m is not q.m or p.n is not q.n for q in forms[:at])]


def _product(
    target: Target,
    n: Axis,
    wanted_m: Axis | None,
    loops: list[Axis],
    folds: list[Axis],
    values: list[tuple[int, UOp]],
    itemsize: int,
) -> Product | None:
    """The product with columns along n."""
    columns = tuple([item for item in values if depends(item[1], n)])
    rows = tuple([item for item in values if not depends(item[1], n)])
    own = [
        a for a in loops if not any(depends(v, a) for _, v in columns) and any(depends(v, a) for _, v in rows)
    ]
    if not rows or not columns or not own:
        return None
    if wanted_m is not None and wanted_m not in own:
        return None
    m = wanted_m or max(own, key=size_of)
    outer = tuple([a for a in loops if a is not m and a is not n])
    folded = prod([size_of(a) for a in folds])
    p = Product(target, m, n, outer, folded, max(folds, key=size_of), rows, columns, itemsize)
    return replace(
        p,
        packing=_packing(columns, n, folds, p.lanes),
        row_packing=_packing(rows, m, folds, p.lanes),
        across=_across(p),
    )


def _across(p: Product) -> Axis | None:
    found = [a for a in p.outer if not any(depends(value, a) for _, value in p.rows)]
    return found[-1] if found and all(depends(value, found[-1]) for _, value in p.columns) else None


def merged(p: Product, ast: UOp) -> Product | None:
    """The same product with n and the axis around it as one, where results lie in memory that way: narrow
    images fill vectors. Windows are gathered one by one unless the source lies that way too."""
    n, o = p.n, p.across
    terms, _ = linear_form(ast.src[0].src[0].src[1])
    if (
        o is None
        or not p.is_near
        or len(n.roots) > 1
        or len(o.roots) > 1
        or terms.get(o.roots[0]) != size_of(n)
    ):
        return None
    both = Axis(o.number, o.type, size_of(o) * size_of(n), o.owners, o.roots + n.roots)
    outer = tuple([a for a in p.outer if a is not o])
    found = [_steps(value) for _, value in p.columns]
    alike = all(t.get(n.roots[0]) == 1 and t.get(o.roots[0]) == size_of(n) for t in found)
    run = size_of(n) if not alike and all(t.get(n.roots[0]) == 1 for t in found) else 0
    packing = COPY if alike else GATHER if run else SPREAD
    return replace(p, n=both, outer=outer, packing=packing, across=None, merged=True, run=run)


def _neighbours(ast: UOp, loops: Sequence[Axis]) -> Axis | None:
    """The axis along which the first store writes neighbours."""
    terms, _ = linear_form(ast.src[0].src[0].src[1])
    last = {term for term, factor in terms.items() if factor == 1 and term.op is Ops.RANGE}
    return next((a for a in loops if last & {a.roots[-1]}), None)


def _packing(values: Sequence[tuple[int, UOp]], axis: Axis, folds: Sequence[Axis], lanes: int) -> float:
    """Cycles to pack an element of operands with `axis` innermost."""
    costs = [COPY]
    for _, value in values:
        steps = _steps(value)
        if steps.get(axis.roots[-1]) != 1:  # squares are turned around where the sum walks through neighbours
            turns = any(steps.get(a.roots[-1]) == 1 and size_of(a) * 2 >= lanes for a in folds)
            turns = turns or bool(contiguous_loops(value, [r for a in folds for r in a.roots]))
            costs.append(TURN if turns else GATHER)
    return max(costs)
