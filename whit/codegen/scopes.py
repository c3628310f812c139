"""What a kernel does, as the heuristics see it: scopes, their memory accesses, and how often each part runs.

A scope is the body of a REDUCE or of an END with the loops around it:

    i = RANGE(256; LOOP 0)  j = RANGE(65; LOOP 1)  k = RANGE(65; REDUCE 2)
    END(STORE(p0, i*65+j, INDEX(p1, i*65+j) / REDUCE(INDEX(p1, i*65+k), k; ADD)), i, j)

    scope of the REDUCE:  loops [0], reduces [2], accesses [p1 {0: 65, 2: 1}]
    scope of the END:     loops [0, 1], reduces [], accesses [p0 {0: 65, 1: 1}, p1 {0: 65, 1: 1}]
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from whit.codegen.opts import AxisTable, Opt, OptError, OptKind
from whit.codegen.target import Target
from whit.codegen.transcendental import INSTRUCTIONS
from whit.uop import AxisType, Ops, UOp, dtypes
from whit.uop.symbolic import linear_form

Axes = frozenset[int]
LINE = 64  # bytes of a cache line
MOST_APART = 4  # elements between lanes that one wide load brings
RARE = 1 / 32  # share of a body's runs below which an access does not decide how wide vectors are


@dataclass(eq=False, slots=True)
class Access:
    """One read or write: element strides per axis. `odd` axes enter the index in another way than by a factor
    (an axis cut in `blocks`, x // n and x % n, has the stride inside of a block); `deps` are the axes that
    decide when it runs (those of its index and mask)."""

    strides: dict[int, int]
    odd: Axes
    axes: Axes
    deps: Axes
    itemsize: int
    nbytes: int  # of the whole buffer
    is_store: bool
    blocks: dict[int, int] = field(default_factory=dict)
    weight: float = 1.0  # how often it runs, as a share of how often the scope's body runs

    def is_cheap(self, axis: int) -> bool:
        """Whether a vector along `axis` is one load: neighbours, or one element for all lanes."""
        return axis not in self.odd and self.strides.get(axis, 0) in (0, 1)

    def step(self, axis: int) -> int:
        """How far apart the elements are of a vector along `axis` that is a few wide loads and a shuffle; 0:
        it is not one. Shuffles of narrow elements are slow on many machines, and so are stores with gaps."""
        apart = abs(self.strides.get(axis, 0))
        near = 1 < apart <= MOST_APART and self.itemsize >= 4
        return apart if near and axis not in self.odd and not self.is_store else 0


@dataclass(eq=False, slots=True)
class Scope:
    """The body of a REDUCE or an END. `ops` counts operations by the axes that they depend on."""

    loops: list[int]  # axes around it
    reduces: list[int]  # axes that it folds
    accesses: list[Access] = field(default_factory=list)
    ops: dict[Axes, float] = field(default_factory=dict)
    shares: dict[Axes, float] = field(default_factory=dict)  # of `ops`: how often they run, as Access.weight
    is_stage: bool = False  # what fills scratch; its axes are among `reduces`

    @property
    def axes(self) -> list[int]:
        return self.loops + self.reduces

    @property
    def alus(self) -> float:
        """Operations of the body; those that run in outer loops only count in part."""
        return sum([count * self.shares[axes] for axes, count in self.ops.items()])


class Kernel:
    """A kernel's axes and scopes, kept up to date with the opts applied so far."""

    def __init__(self, ast: UOp, target: Target) -> None:
        self.table, self.target = AxisTable.of(ast, target), target
        self.fixed: set[int] = set()  # axes that enter comparisons or values, so that they cannot be merged
        self.scopes = find_scopes(ast, self.fixed)
        self.original = {number: self.size(number) for number in self.table.axes}
        self.weigh()
        accesses = [a for s in self.scopes for a in s.accesses]
        often = [a for a in accesses if a.weight > RARE] or accesses
        widest = max([a.itemsize for a in often], default=4)
        self.lanes = max(1, target.vector_bytes // max(1, widest))  # of the widest type that is touched often

    def size(self, number: int) -> int:
        """The present size of an axis; of a symbolic one its greatest."""
        size = self.table.axes[number].size
        return size if isinstance(size, int) else max(1, int(size.vmax))

    def is_static(self, number: int) -> bool:
        return isinstance(self.table.axes[number].size, int)

    def loops(self) -> list[int]:
        """The LOOP axes, outermost first."""
        return [axis.number for axis in self.table.of_type(AxisType.LOOP)]

    # ---- work

    def runs(self, scope: Scope, order: list[int]) -> tuple[dict[int, int], list[int]]:
        """When LOOPs nest in this order: the depth of each axis of the nest around the scope's body, and by
        depth how often a statement there runs."""
        around = [n for n in order if n in scope.loops]
        depth = order.index(around[-1]) + 1 if around else 0
        nest = [*order[:depth], *[n for n in scope.loops if n not in order], *scope.reduces]
        counts = [1]
        for number in nest:
            counts.append(counts[-1] * self.size(number))
        return {number: at + 1 for at, number in enumerate(nest)}, counts

    def work(self, scope: Scope, order: list[int] | None = None) -> float:
        """Operations and accesses of all runs of a scope: what depends on outer loops only runs there."""
        depths, counts = self.runs(scope, self.loops() if order is None else order)
        total = sum([n * counts[_deepest(depths, axes)] for axes, n in scope.ops.items()])
        return total + sum([counts[_deepest(depths, access.deps)] for access in scope.accesses])

    def nested_work(self, order: list[int]) -> float:
        """Work of the whole kernel when its LOOPs nest in this order."""
        return sum([self.work(scope, order) for scope in self.scopes])

    def weigh(self) -> None:
        """Set the weights of accesses and operations for the present order of loops."""
        order = self.loops()
        for scope in self.scopes:
            depths, counts = self.runs(scope, order)
            scope.shares = {axes: counts[_deepest(depths, axes)] / counts[-1] for axes in scope.ops}
            for access in scope.accesses:
                access.weight = counts[_deepest(depths, access.deps)] / counts[-1]

    # ---- opts

    def apply(self, kind: OptKind, axis: int, amount: int) -> bool:
        """Apply an opt if it is legal."""
        try:
            self.table.apply(Opt(kind, axis, amount))
        except OptError:
            return False
        return True

    def tile(self, axis: int, amount: int) -> bool:
        """Take part of an axis into the register tile, with padding when the amount does not divide it."""
        if amount <= 1:
            return False
        if self.size(axis) % amount and not self.apply(OptKind.PADTO, axis, amount):
            return False
        is_loop = self.table.axes[axis].type is AxisType.LOOP
        return self.apply(OptKind.UPCAST if is_loop else OptKind.UNROLL, axis, amount)

    def swap(self, first: int, second: int) -> bool:
        """Exchange two axes. Numbers are places: what was called `first` is then called `second`."""
        if first == second or not self.apply(OptKind.SWAP, first, second):
            return False
        names = {first: second, second: first}
        self.original = {names.get(n, n): size for n, size in self.original.items()}
        self.fixed = {names.get(n, n) for n in self.fixed}
        for scope in self.scopes:
            scope.loops = sorted([names.get(n, n) for n in scope.loops])
            scope.reduces = sorted([names.get(n, n) for n in scope.reduces])
            scope.ops = {_renamed(axes, names): count for axes, count in scope.ops.items()}
            scope.shares = {_renamed(axes, names): share for axes, share in scope.shares.items()}
            for access in scope.accesses:
                access.strides = {names.get(n, n): stride for n, stride in access.strides.items()}
                access.odd, access.axes = _renamed(access.odd, names), _renamed(access.axes, names)
                access.deps = _renamed(access.deps, names)
                access.blocks = {names.get(n, n): size for n, size in access.blocks.items()}
        return True

    def merge(self, outer: int, inner: int) -> bool:
        """Make one axis of two (see `OptKind.MERGE`)."""
        if not self.apply(OptKind.MERGE, outer, inner):
            return False
        self.original[outer] *= self.original.pop(inner)
        for scope in self.scopes:
            scope.loops = [a for a in scope.loops if a != inner]
            scope.reduces = [a for a in scope.reduces if a != inner]
            ops: dict[Axes, float] = {}
            for axes, count in scope.ops.items():
                ops[_merged(axes, outer, inner)] = ops.get(_merged(axes, outer, inner), 0) + count
            scope.ops = ops
            for access in scope.accesses:
                stride = access.strides.pop(inner, 0)
                if stride:
                    access.strides[outer] = stride
                access.axes, access.deps = (_merged(a, outer, inner) for a in (access.axes, access.deps))
        self.weigh()
        return True


def _deepest(depths: dict[int, int], axes: Axes) -> int:
    return max([depths[n] for n in axes if n in depths], default=0)


def _renamed(axes: Axes, names: dict[int, int]) -> Axes:
    return frozenset([names.get(n, n) for n in axes])


def _merged(axes: Axes, outer: int, inner: int) -> Axes:
    return axes - {inner} | {outer} if inner in axes else axes


# ---- reading a kernel ------------------------------------------------------------------------------------


def find_scopes(ast: UOp, fixed: set[int]) -> list[Scope]:
    """The scopes of a kernel, sources first. Axes that cannot be merged are added to `fixed`."""
    found: list[Scope] = []
    for node in ast.toposort():
        if node.op is Ops.REDUCE or node.op is Ops.STAGE:
            found.append(_scope(node, node.ranges, node.src[1:], fixed))
            found[-1].is_stage = node.op is Ops.STAGE
        elif node.op is Ops.STORE and node in ast.src:
            found.append(_scope(node, (), (), fixed))
        elif node.op is Ops.END:
            found.append(_scope(node.src[0], node.src[1:], (), fixed))
        elif node.op.is_alu and node.dtype is not dtypes.index:
            fixed.update([r.arg.uid for s in node.src if s.dtype is dtypes.index for r in s.ranges])
    return found


def _scope(node: UOp, loops: Iterable[UOp], reduces: Iterable[UOp], fixed: set[int]) -> Scope:
    """`node` is the REDUCE, the STAGE or the STORE."""
    scope = Scope(sorted(r.arg.uid for r in loops), sorted(r.arg.uid for r in reduces))
    stack, seen = [node if node.op is Ops.STORE else node.src[0]], set()
    while stack:
        part = stack.pop()
        if part in seen:
            continue
        seen.add(part)
        if part.op is Ops.INDEX or part.op is Ops.STORE:
            scope.accesses.append(_access(part, scope, fixed))
            if part.op is Ops.STORE:
                stack.append(part.src[2])
            continue
        if part.op is Ops.REDUCE or part.dtype is dtypes.index:
            continue
        if part.op is Ops.CAST and part.src[0].dtype is dtypes.index:
            fixed.update([r.arg.uid for r in part.src[0].ranges])
        if part.op.is_alu:
            axes = _numbers(part)
            scope.ops[axes] = scope.ops.get(axes, 0.0) + INSTRUCTIONS.get(part.op, 1.0)
        stack += part.src
    if node.op is Ops.REDUCE and not _is_product_sum(node):
        axes = frozenset(scope.axes)
        scope.ops[axes] = scope.ops.get(axes, 0.0) + 1.0
    return scope


def _numbers(node: UOp) -> Axes:
    return frozenset([r.arg.uid for r in node.ranges])


def _is_product_sum(reduce: UOp) -> bool:
    """Whether the fold costs nothing beside the product: a fused multiply-add."""
    return reduce.arg.op is Ops.ADD and reduce.dtype.is_float and reduce.src[0].op is Ops.MUL


def _access(node: UOp, scope: Scope, fixed: set[int]) -> Access:
    index, is_store = node.src[1], node.op is Ops.STORE
    terms, _ = linear_form(index)
    strides: dict[int, int] = {}
    odd: set[int] = set()
    blocks = _blocks(terms)
    for term, factor in terms.items():
        if term.op is Ops.RANGE:
            strides[term.arg.uid] = factor
        elif term.src and term.src[0].op is Ops.RANGE and term.src[0].arg.uid in blocks:
            if term.op is Ops.FLOORMOD:
                strides[term.src[0].arg.uid] = factor
            fixed.add(term.src[0].arg.uid)
        else:
            odd |= _numbers(term)
            for inner in term.toposort():  # what a gather reads along an axis is looked up, not merged
                if inner.op is Ops.INDEX:
                    odd |= _numbers(inner)
    for condition in node.src[3:] if is_store else node.src[2:]:
        fixed |= _numbers(condition)
    fixed |= odd
    dtype = node.src[2].dtype if is_store else node.dtype
    deps = frozenset(scope.axes) if is_store else _numbers(node)
    memory = node.src[0]
    size = math.prod([r.src[0].vmax for r in memory.src[1:]]) if memory.op is Ops.STAGE else memory.arg.size
    size *= dtype.itemsize
    return Access(strides, frozenset(odd), _numbers(index), deps, dtype.itemsize, size, is_store, blocks)


def _blocks(terms: dict[UOp, int]) -> dict[int, int]:
    """Axes that enter an index only as x // n and x % n for one n."""
    found: dict[int, int] = {}
    bad: set[int] = set()
    for term in terms:
        if (
            term.op in (Ops.FLOORDIV, Ops.FLOORMOD)
            and term.src[0].op is Ops.RANGE
            and term.src[1].op is Ops.CONST
        ):
            number, size = term.src[0].arg.uid, term.src[1].arg
            if found.setdefault(number, size) != size:
                bad.add(number)
        else:
            bad |= _numbers(term)
    return {number: size for number, size in found.items() if number not in bad}


def footprint(access: Access, sizes: dict[int, int]) -> int:
    """Bytes of the cache lines that an access touches over axes of these sizes. Axes of one stride overlap,
    as the rows of a window do.

    >>> a = Access({0: 100, 1: 1, 2: 1}, frozenset(), frozenset({0, 1, 2}), frozenset(), 4, 10**6, False)
    >>> footprint(a, {0: 3, 1: 30, 2: 5})  # 3 rows of 30 + 5 - 1 elements
    408
    """
    extents: dict[int, int] = {}
    for axis, size in sizes.items():
        stride = access.strides.get(axis, -axis - 1)  # odd axes count by themselves
        extents[stride] = extents.get(stride, 1) + size - 1
    run = access.itemsize * extents.pop(1, 1)
    return min(max(run, LINE) * math.prod(extents.values()), access.nbytes)
