"""Opts: the small closed set of loop transformations that turns a kernel into the one worth compiling.

An axis is a RANGE of the kernel and its *number* is the RANGE's uid. Numbers are stable: when an opt splits
an axis, the part that keeps the type (of a SPLIT: the outer one) keeps the number and place, the other part
gets the next free number; SWAP exchanges two numbers. Axes of one type nest in the order of their numbers,
types in the order of `AxisType`. `axes(ast)` lists them.

    kernel:   i = RANGE(512; LOOP 0)  j = RANGE(512; LOOP 1)  k = RANGE(512; REDUCE 2)
              SINK(END(STORE(p0, i*512+j, REDUCE(INDEX(p1, i*512+k) * INDEX(p2, k*512+j), k; ADD)), i, j))
    opts:     UPCAST axis 0 by 4 · UPCAST axis 1 by 64 · THREAD axis 0 by 16
    result:   axes THREAD 5 (16), LOOP 0 (8), LOOP 1 (8), REDUCE 2 (512), UPCAST 3 (4), UPCAST 4 (64)
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from whit.codegen.stages import (
    Level,
    Wanted,
    Windows,
    find_windows,
    next_uid,
    reads_of,
    stage_reads,
    windowed,
)
from whit.codegen.target import Target
from whit.helpers import WhitError, prod, round_up
from whit.uop import AxisType, Ops, RangeArg, Sint, UOp, dtypes
from whit.uop.ops import identity
from whit.uop.symbolic import _simplify_node, conditions_of, conjunction, linear_form, simplify
from whit.uop.text import arg_class


class OptError(WhitError, ValueError):
    """An opt that the kernel or the target does not allow."""


@arg_class()
class OptKind(enum.Enum):
    """What an opt does to its axis; `amount` 0 means the whole axis where a size is asked for."""

    UPCAST = "the inner `amount` of a LOOP joins the register tile"
    UNROLL = "the inner `amount` of a REDUCE joins the register tile"
    LOCAL = "the inner `amount` of a LOOP becomes work-items of a group"
    GROUP = "the inner `amount` of a REDUCE is shared by the work-items of a group"
    GROUPTOP = "a REDUCE is cut into `amount` long pieces, one per work-item"
    THREAD = "the outermost LOOP is cut into `amount` long pieces, one per task"
    SPLIT = "the inner `amount` of a LOOP or REDUCE becomes a loop inside the others of its type"
    SWAP = "exchange the places (and numbers) of two axes of one type; `amount` is the other axis"
    MERGE = "one axis in the place of two of one type; `amount` is the inner axis"
    PADTO = "round the size up to a multiple of `amount`; what is beyond the end is masked"
    ACCUMULATE = "a sum is cut into `amount` long pieces by a LOOP that adds each to the stored result"
    STAGE = "inside of the axis, a LOOP or THREAD, read `amount` comes from scratch that is filled there once"
    WINDOW = "as STAGE, with elements that several windows share, such as a convolution's, stored once"

    def __repr__(self) -> str:
        return self.name


_WORDS = {
    OptKind.SWAP: "with",
    OptKind.MERGE: "with",
    OptKind.PADTO: "to",
    OptKind.STAGE: "read",
    OptKind.WINDOW: "read",
}


@arg_class()
@dataclass(frozen=True, slots=True)
class Opt:
    """One transformation of one axis.

    >>> Opt(OptKind.UPCAST, 1, 8)
    UPCAST axis 1 by 8
    >>> Opt.parse("PADTO axis 0 to 16") == Opt(OptKind.PADTO, 0, 16)
    True
    """

    kind: OptKind
    axis: int
    amount: int = 0

    def __repr__(self) -> str:
        return f"{self.kind.name} axis {self.axis} {_WORDS.get(self.kind, 'by')} {self.amount}"

    @staticmethod
    def parse(text: str) -> Opt:
        """The opt that prints as `text`. OptError if none does."""
        words = text.split()
        if len(words) == 5 and words[0] in OptKind.__members__ and words[1] == "axis":
            kind = OptKind[words[0]]
            numbers = all(n.isascii() and n.isdigit() and len(n) <= 18 for n in (words[2], words[4]))
            if numbers and words[3] == _WORDS.get(kind, "by"):
                return Opt(kind, int(words[2]), int(words[4]))
        raise OptError(
            f"opt {text!r}",
            because="it does not read as KIND axis NUMBER by NUMBER (SWAP and MERGE say with, PADTO to, "
            "STAGE read)",
            fix="kinds are " + ", ".join(OptKind.__members__),
        )


def parse_opts(text: str) -> tuple[Opt, ...]:
    """Opts separated by commas.

    >>> parse_opts("SWAP axis 0 with 1, THREAD axis 0 by 0")
    (SWAP axis 0 with 1, THREAD axis 0 by 0)
    """
    return tuple(Opt.parse(part) for part in text.split(",") if part.strip())


@arg_class(Ops.SINK)
@dataclass(frozen=True, slots=True)
class KernelArg:
    """What the SINK of an optimised kernel carries: the function's name and the opts that made it."""

    name: str
    opts: tuple[Opt, ...] = ()


@dataclass(frozen=True, slots=True)
class AxisInfo:
    """An axis of a kernel as a row of `axes`."""

    number: int
    type: AxisType
    size: Sint
    range: UOp

    def __repr__(self) -> str:
        return f"{self.type.name} {self.number} ({self.size if isinstance(self.size, int) else 'symbolic'})"


def axes(ast: UOp) -> list[AxisInfo]:
    """The kernel's axes in nesting order: by type, then by number.

    >>> from whit.uop import ParamArg
    >>> i, j = UOp.range(4, uid=0), UOp.range(3, uid=1)
    >>> p = UOp(Ops.PARAM, dtypes.float32, (), ParamArg(0, 12))
    >>> axes(UOp.sink(UOp(Ops.STORE, dtypes.void, (p, i * 3 + j, UOp.const(1.0, dtypes.float32))).end(i, j)))
    [LOOP 0 (4), LOOP 1 (3)]
    """
    found = [u for u in ast.toposort() if u.op is Ops.RANGE]
    found.sort(key=lambda u: (u.arg.axis, u.arg.uid))
    return [
        AxisInfo(u.arg.uid, u.arg.axis, u.src[0].arg if u.src[0].op is Ops.CONST else u.src[0], u)
        for u in found
    ]


# ---- the state between opts ------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Axis:
    """A present axis, or one that became others (`made_of` says how to compute its value from them)."""

    number: int
    type: AxisType
    size: Sint
    owners: frozenset[UOp]  # the ENDs and REDUCEs that close it
    roots: tuple[UOp, ...]  # the RANGEs of the unoptimised kernel whose value depends on it
    made_of: tuple[str, Axis, Axis | None, int] | None = None
    accumulates: UOp | None = None  # the REDUCE whose pieces this LOOP adds up in the result


@dataclass(slots=True)
class AxisTable:
    """The axes of a kernel under a growing list of opts. Opts act on this table only; `build` rewrites the
    graph once."""

    ast: UOp
    target: Target
    opts: list[Opt] = field(default_factory=list)
    axes: dict[int, Axis] = field(default_factory=dict)
    roots: dict[UOp, Axis] = field(default_factory=dict)
    pads: list[tuple[Axis, int]] = field(default_factory=list)  # value of the axis must be below the number
    closers: list[UOp] = field(default_factory=list)  # the ENDs and REDUCEs of the kernel
    reads: list[UOp] = field(default_factory=list)  # what STAGE can copy, see stages.reads_of
    stages: list[tuple[UOp, Level, Windows | None]] = field(default_factory=list)
    scratch: dict[UOp, int] = field(default_factory=dict)  # staged read -> bytes

    @staticmethod
    def of(ast: UOp, target: Target) -> AxisTable:
        """The table of a kernel with no opts yet."""
        table = AxisTable(ast, target)
        owners: dict[UOp, set[UOp]] = {}
        for node in ast.toposort():
            if node.op is Ops.END or node.op is Ops.REDUCE or node.op is Ops.STAGE:
                table.closers.append(node)
                for r in node.src[1:]:
                    owners.setdefault(r, set()).add(node)
        for info in axes(ast):
            axis = Axis(
                info.number, info.type, info.size, frozenset(owners.get(info.range, ())), (info.range,)
            )
            if info.number in table.axes:
                raise OptError(
                    f"axes of a kernel: two RANGEs have the uid {info.number}",
                    because="a uid numbers one axis",
                    fix="number the RANGEs of a kernel 0, 1, 2 …",
                )
            table.axes[info.number] = table.roots[info.range] = axis
        return table

    def of_type(self, *types: AxisType) -> list[Axis]:
        """Present axes of these types in nesting order."""
        return sorted([a for a in self.axes.values() if a.type in types], key=lambda a: (a.type, a.number))

    def apply(self, opt: Opt) -> None:
        """Carry out one opt. OptError, with the table unchanged, if it is not legal."""
        if self.stages and opt.kind not in STAGING:
            raise OptError(f"{opt}", because="the kernel is staged already", fix="apply STAGE last")
        axis = self.axes.get(opt.axis)
        if axis is None:
            raise OptError(f"{opt}", because=f"the kernel has no axis {opt.axis}", fix=f"its axes are {self}")
        if axis.accumulates and opt.kind not in (OptKind.SWAP, *STAGING):
            raise OptError(
                f"{opt}",
                because="the axis adds to the stored result, one piece after another",
                fix="choose another axis, or a SPLIT before ACCUMULATE",
            )
        if opt.kind in _TWO_AXES:
            self._two_axes(opt, axis)
        elif opt.kind is OptKind.PADTO:
            self._pad(opt, axis)
        elif opt.kind in STAGING:
            self._stage(opt, axis)
        else:
            self._split(opt, axis)
        self.opts.append(opt)

    def __str__(self) -> str:
        return ", ".join(
            f"{a.type.name} {a.number} ({a.size if isinstance(a.size, int) else 'symbolic'})"
            for a in self.of_type(*AxisType)
        )

    # ---- the primitives

    def _split(self, opt: Opt, axis: Axis) -> None:
        size = _static(opt, axis)
        amount = opt.amount or size
        needs, inner_type, outer_type = _SPLITS[opt.kind]
        if axis.type not in needs:
            raise OptError(
                f"{opt}",
                because=f"axis {axis.number} is a {axis.type.name} and {opt.kind.name} takes a "
                + " or ".join(t.name for t in needs),
                fix=f"choose another axis of {self}",
            )
        if amount < 1 or size % amount:
            raise OptError(
                f"{opt}",
                because=f"{amount} does not divide the size {size}",
                fix=f"first apply {Opt(OptKind.PADTO, axis.number, max(amount, 1))}",
            )
        if opt.kind in (OptKind.GROUP, OptKind.GROUPTOP) and any(n.op is not Ops.REDUCE for n in axis.owners):
            raise OptError(f"{opt}", because="each work-item fills its own scratch", fix="share a sum")
        self._check_target(opt, axis, amount)
        summed = self._summed(opt, axis, amount) if opt.kind is OptKind.ACCUMULATE else None
        top = opt.kind in _TOP
        inner_size = size // amount if top else amount
        outer_size = size // inner_size
        number = max(self.axes) + 1
        if outer_size == 1 or inner_size == 1:  # nothing remains of the other part: the axis changes its type
            whole = (
                inner_type
                if outer_size == 1 and not top
                else outer_type
                if inner_size == 1 and top
                else axis.type
            )
            axis.type = whole or axis.type
            return
        # the part that changes its type takes the new number; the other keeps the axis's place
        keeps, new = (number, axis.number) if top else (axis.number, number)
        outer = Axis(keeps, outer_type or axis.type, outer_size, axis.owners, axis.roots)
        inner = Axis(new, inner_type or axis.type, inner_size, axis.owners, axis.roots)
        if summed is not None:
            outer.owners, outer.accumulates = frozenset(), summed
        axis.made_of = ("split", outer, inner, inner_size)
        self.axes[keeps], self.axes[new] = outer, inner

    def _summed(self, opt: Opt, axis: Axis, amount: int) -> UOp:
        """The sum over an axis, if adding up its pieces in the stored result gives the same."""
        why = ""
        ends, reduces = self.ast.src, [n for n in self.closers if n.op is Ops.REDUCE]
        store = ends[0].src[0] if ends[0].op is Ops.END else ends[0]
        if len(ends) != 1 or len(reduces) != 1:
            why = "the kernel has other sums or stores"
        elif ends[0].op is not Ops.END:
            why = "the result is one element, outside of any loop"
        elif reduces[0].arg.op is not Ops.ADD or reduces[0].dtype is not store.src[0].dtype:
            why = "the result has no place for partial sums: another operation or dtype"
        elif ends[0].op is Ops.END and reduces[0].ranges != frozenset(ends[0].src[1:]):
            why = "not every element of the result has a sum of its own"
        elif any(n.op is Ops.INDEX and n.src[0] is store.src[0] for n in self.ast.toposort()):
            why = "the kernel reads the old result"
        elif self.of_type(AxisType.GROUP_REDUCE):
            why = "the sum is shared by work-items, of which one alone stores the result"
        elif not 1 < amount < _static(opt, axis) or any(a.accumulates for a in self.axes.values()):
            why = "it takes one axis, cut into at least two pieces of more than one step"
        if why:
            raise OptError(f"{opt}", because=why, fix="leave ACCUMULATE out")
        return reduces[0]

    def _check_target(self, opt: Opt, axis: Axis, amount: int) -> None:
        kind, target = opt.kind, self.target
        if kind in (OptKind.GROUP, OptKind.GROUPTOP) and any(a.accumulates for a in self.axes.values()):
            raise OptError(
                f"{opt}",
                because="the sum is added to the stored result in pieces, which one work-item alone may do",
                fix="leave ACCUMULATE out",
            )
        if kind in (OptKind.LOCAL, OptKind.GROUP, OptKind.GROUPTOP):
            if not target.has_local:
                raise OptError(
                    f"{opt}", because=f"{target.key} has no work-groups", fix="use UPCAST, UNROLL or THREAD"
                )
            items = amount * prod(_sizes(self.of_type(AxisType.LOCAL, AxisType.GROUP_REDUCE)))
            if items > target.max_local:
                raise OptError(
                    f"{opt}",
                    because=f"a group of {items} work-items exceeds the target's {target.max_local}",
                    fix="use a smaller amount",
                )
        if kind is OptKind.THREAD:
            if target.threads <= 1:
                raise OptError(
                    f"{opt}", because=f"{target.key} runs one task at a time", fix="leave THREAD out"
                )
            if self.of_type(AxisType.THREAD):
                raise OptError(
                    f"{opt}", because="the kernel has a THREAD axis already", fix="MERGE axes before THREAD"
                )
            first = self.of_type(AxisType.LOOP)[0]
            if first is not axis:
                raise OptError(
                    f"{opt}",
                    because=f"axis {axis.number} is not the outermost LOOP",
                    fix=f"first apply {Opt(OptKind.SWAP, first.number, axis.number)}",
                )
            if any(end not in axis.owners for end in self.ast.src):
                raise OptError(
                    f"{opt}",
                    because="not every store of the kernel is inside this axis",
                    fix="thread an axis that all share",
                )
        if kind in (OptKind.UPCAST, OptKind.UNROLL):
            self._check_tile(opt, axis, amount)

    def _check_tile(self, opt: Opt, axis: Axis, amount: int) -> None:
        limit = tile_limit(self.target)
        tiled = self.of_type(AxisType.UPCAST, AxisType.UNROLL)
        for node in self.closers:
            inside = _inside(node)
            if inside.isdisjoint(axis.roots):
                continue
            here = [a for a in tiled if not inside.isdisjoint(a.roots)]
            outputs = prod(_sizes(a for a in here if a.type is AxisType.UPCAST))
            values = amount * prod(_sizes(here))
            if (opt.kind is OptKind.UPCAST and outputs * amount > limit) or values > limit * 8:
                raise OptError(
                    f"{opt}",
                    because=f"the register tile would hold {values} values, the limit is {limit} "
                    f"outputs and {limit * 8} in all",
                    fix="use a smaller amount",
                )

    def _two_axes(self, opt: Opt, axis: Axis) -> None:
        other = self.axes.get(opt.amount)
        if other is None or other is axis:
            raise OptError(
                f"{opt}", because=f"there is no other axis {opt.amount}", fix=f"the axes are {self}"
            )
        if axis.type is not other.type:
            raise OptError(
                f"{opt}",
                because=f"one is a {axis.type.name}, the other a {other.type.name}",
                fix="choose axes of one type",
            )
        if opt.kind is OptKind.SWAP:
            axis.number, other.number = other.number, axis.number
            self.axes[axis.number], self.axes[other.number] = axis, other
            return
        if any(node.op is Ops.STAGE for node in axis.owners | other.owners):
            raise OptError(
                f"{opt}", because="one fills scratch, whose order is fixed", fix="merge other axes"
            )
        outer_size, inner_size = _static(opt, axis), _static(opt, other)
        if axis.owners != other.owners:
            raise OptError(
                f"{opt}",
                because="they are not loops around the same stores and reductions",
                fix="merge axes that are used together",
            )
        merged = Axis(axis.number, axis.type, outer_size * inner_size, axis.owners, axis.roots + other.roots)
        axis.made_of = ("div", merged, None, inner_size)
        other.made_of = ("mod", merged, None, inner_size)
        del self.axes[other.number]
        self.axes[merged.number] = merged

    def _pad(self, opt: Opt, axis: Axis) -> None:
        size = _static(opt, axis)
        if opt.amount < 1:
            raise OptError(
                f"{opt}",
                because="a multiple must be at least 1",
                fix="give the amount of the split that follows",
            )
        if axis.type not in (AxisType.LOOP, AxisType.REDUCE):
            raise OptError(
                f"{opt}", because=f"axis {axis.number} is a {axis.type.name}", fix="pad before splitting"
            )
        wanted = round_up(size, opt.amount)
        if wanted == size:
            return
        if wanted >= 4 * size and wanted > 64:
            raise OptError(
                f"{opt}",
                because=f"size {size} would become {wanted}, mostly waste",
                fix="use a smaller multiple",
            )
        if any(node.op is Ops.STAGE and not self._counts_blocks(axis, node.src[1]) for node in axis.owners):
            raise OptError(
                f"{opt}",
                because="the axis fills the inner part of scratch, whose order is fixed",
                fix="use an amount that divides the size",
            )
        padded = Axis(axis.number, axis.type, wanted, axis.owners, axis.roots)
        axis.made_of = ("pad", padded, None, 1)
        self.pads.append((axis, size))
        self.axes[axis.number] = padded

    def _counts_blocks(self, axis: Axis, root: UOp) -> bool:
        """Whether an axis is a RANGE of the unoptimised kernel, or the outermost part of it."""
        part = self.roots[root]
        while part is not axis and part.made_of is not None:
            part = part.made_of[1]
        return part is axis

    def _stage(self, opt: Opt, axis: Axis) -> None:
        value, level, windows = self._staging(opt, axis)
        nbytes, used = self._scratch_of(value, level, windows), sum(self.scratch.values())
        if used + nbytes > self.target.scratch_bytes:
            raise OptError(
                f"{opt}",
                because=f"{used + nbytes} bytes of scratch, the target has {self.target.scratch_bytes}",
                fix="stage at an inner axis, or split axes first",
            )
        self.scratch[value] = nbytes
        self.stages.append((value, level, windows))

    def scratch_of(self, opt: Opt) -> int:
        """Bytes of scratch that a STAGE or WINDOW would take. OptError if it is not legal."""
        return self._scratch_of(*self._staging(opt, self.axes[opt.axis]))

    def _staging(self, opt: Opt, axis: Axis) -> tuple[UOp, Level, Windows | None]:
        """The value that a STAGE or WINDOW copies, where, and its windows. OptError if that cannot be."""
        self.reads = self.reads or reads_of(self.ast)
        if axis.type not in (AxisType.LOOP, AxisType.THREAD):
            raise OptError(
                f"{opt}",
                because=f"axis {axis.number} is a {axis.type.name}",
                fix="stage at a loop over outputs",
            )
        if not 0 <= opt.amount < len(self.reads):
            raise OptError(
                f"{opt}", because=f"the kernel has {len(self.reads)} reads", fix="number them from 0"
            )
        value, level = self.reads[opt.amount], Level(axis.type, axis.number)
        if any(value is staged for staged, _, _ in self.stages):
            raise OptError(f"{opt}", because="this read is staged already", fix="stage it once")
        closed = self._closed(value, level)
        if not closed:
            raise OptError(
                f"{opt}", because="the read does not change inside of this axis", fix="stage at an outer axis"
            )
        if any(not isinstance(a.size, int) for a in closed):
            raise OptError(f"{opt}", because="scratch of a symbolic size", fix="stage what has a fixed size")
        return value, level, self._windows(opt, value) if opt.kind is OptKind.WINDOW else None

    def _closed(self, value: UOp, level: Level) -> list[Axis]:
        """The axes inside of a level on which a value depends."""
        inside = [a for a in self.axes.values() if not value.ranges.isdisjoint(a.roots)]
        return [a for a in inside if (a.type, a.number) > (level.type, level.number)]

    def _scratch_of(self, value: UOp, level: Level, windows: Windows | None) -> int:
        if windows is None:
            return int(prod(_sizes(self._closed(value, level))) * value.dtype.itemsize)
        builder = _Builder(self)
        item = windowed(windows, value, level, builder.new, builder.masks, max(self.axes) + 1)
        closed = [r for r in item.value.ranges if level.closes(r)]
        return int(prod([int(r.src[0].arg) for r in closed]) * value.dtype.itemsize)

    def _windows(self, opt: Opt, value: UOp) -> Windows:
        """The windows of a read. OptError if it has none, or if a sum over them is padded: what is read
        beyond the end is not 0."""
        found = find_windows(value)
        if found is None:
            raise OptError(
                f"{opt}", because="no two loops walk through the read together", fix="use STAGE instead"
            )
        for axis, _ in self.pads:
            if any(r in found.grouped and r.arg.axis.is_reduce for r in axis.roots):
                raise OptError(
                    f"{opt}", because="a sum over a window is padded", fix="use an amount that divides it"
                )
        return found

    # ---- the result

    def build(self) -> UOp:
        """The kernel with all opts applied: one substitution and simplification of the graph."""
        return _Builder(self).build()


_TWO_AXES = frozenset({OptKind.SWAP, OptKind.MERGE})
STAGING = (OptKind.STAGE, OptKind.WINDOW)  # they come last
_TOP = frozenset(
    {OptKind.THREAD, OptKind.GROUPTOP, OptKind.ACCUMULATE}
)  # the amount counts the outer part, which changes its type
_LOOP, _REDUCE = (AxisType.LOOP,), (AxisType.REDUCE,)
# kind -> (types it takes, new type of the inner part, new type of the outer part); None keeps the type
_SPLITS: dict[OptKind, tuple[tuple[AxisType, ...], AxisType | None, AxisType | None]] = {
    OptKind.UPCAST: (_LOOP, AxisType.UPCAST, None),
    OptKind.UNROLL: (_REDUCE, AxisType.UNROLL, None),
    OptKind.LOCAL: (_LOOP, AxisType.LOCAL, None),
    OptKind.GROUP: (_REDUCE, AxisType.GROUP_REDUCE, None),
    OptKind.GROUPTOP: (_REDUCE, None, AxisType.GROUP_REDUCE),
    OptKind.THREAD: (_LOOP, None, AxisType.THREAD),
    OptKind.SPLIT: (_LOOP + _REDUCE, None, None),
    OptKind.ACCUMULATE: (_REDUCE, None, AxisType.LOOP),
}


def tile_limit(target: Target) -> int:
    """The most outputs of one register tile: four times what the vector registers hold in float32."""
    return max(64, 4 * target.vector_registers * target.lanes(dtypes.float32))


def _inside(node: UOp) -> frozenset[UOp]:
    """The RANGEs on which the body of a REDUCE, END or STAGE depends."""
    return frozenset(node.src[1:]) if node.op is Ops.END else node.src[0].ranges


def _sizes(found: Iterable[Axis]) -> list[int]:
    return [a.size for a in found if isinstance(a.size, int)]


def _static(opt: Opt, axis: Axis) -> int:
    if not isinstance(axis.size, int):
        raise OptError(
            f"{opt}",
            because=f"the size of axis {axis.number} is symbolic",
            fix="only axes of a fixed size can be changed",
        )
    return axis.size


# ---- rewriting the graph ---------------------------------------------------------------------------------


class _Builder:
    """One walk over the kernel: RANGEs become expressions of the new axes, padded ones add their masks."""

    def __init__(self, table: AxisTable) -> None:
        self.table = table
        self.leaf: dict[Axis, UOp] = {}
        self.value: dict[Axis, UOp] = {}
        self.new: dict[UOp, UOp] = {root: self.expression(axis) for root, axis in table.roots.items()}
        self.leaves: dict[UOp, frozenset[UOp]] = {root: self.new[root].ranges for root in table.roots}
        self.masks: dict[UOp, list[UOp]] = {}  # root -> conditions under which its value is inside
        for axis, limit in table.pads:
            condition = simplify(self.expression(axis).lt(limit))
            for root in axis.roots:
                self.masks.setdefault(root, []).append(condition)

    def expression(self, axis: Axis) -> UOp:
        """The axis's value from the present RANGEs, in canonical form."""
        found = self.value.get(axis)
        if found is None:
            found = self.value[axis] = simplify(self._expression(axis))
        return found

    def _expression(self, axis: Axis) -> UOp:
        if axis.made_of is None:
            size = UOp.index(axis.size)
            return UOp(Ops.RANGE, dtypes.index, (size,), RangeArg(axis.number, axis.type))
        how, first, second, amount = axis.made_of
        if how == "split":
            assert second is not None
            return self.expression(first) * amount + self.expression(second)
        value = self.expression(first)
        whole = value.op is Ops.FLOORMOD and value.src[1].op is Ops.CONST and value.src[1].arg % amount == 0
        if how == "div" and whole:
            # an axis merged twice: x % (n * amount) // amount
            quotient: UOp = (value.src[0] // amount) % (value.src[1].arg // amount)
            return quotient
        return value // amount if how == "div" else value % amount if how == "mod" else value

    def build(self) -> UOp:
        table, new = self.table, self.new
        stores = {end.src[0]: end.src[1:] for end in table.ast.src if end.op is Ops.END}
        step = next((a for a in table.axes.values() if a.accumulates), None)
        for node in table.ast.toposort():
            if node in new:
                continue
            src = node.src
            if not src:
                new[node] = node
                continue
            op = node.op
            if op is Ops.REDUCE:
                new[node] = self.reduce(node)
            elif op is Ops.STAGE:
                new[node] = node.replace(src=(new[src[0]], *self.filling(src[1:])))
            elif op is Ops.END:
                steps = [self.expression(step)] if step is not None else []
                around = sorted([*self.present(src[1:]), *steps], key=lambda r: (r.arg.axis, r.arg.uid))
                new[node] = new[src[0]].end(*around)
            elif op is Ops.INDEX:
                mask = new[src[2]] if len(src) > 2 else None
                new[node] = self.access(node, (new[src[0]], new[src[1]]), mask, src[1].ranges)
            elif op is Ops.STORE:
                mask = new[src[3]] if len(src) > 3 else None
                result = self.access(
                    node, (new[src[0]], new[src[1]], new[src[2]]), mask, stores.get(node, ())
                )
                new[node] = result if step is None else self.accumulated(result, step)
            else:
                new[node] = _simplify_node(node, tuple([new[s] for s in src]))
        sink = new[table.ast]
        if table.stages:
            sink = stage_reads(sink, self.wanted(sink), table.target)
        opts = tuple(table.opts)
        return sink.replace(arg=KernelArg(kernel_name(table), opts))

    def wanted(self, sink: UOp) -> list[Wanted]:
        """What comes from scratch."""
        uid, found = next_uid(sink.toposort()), list[Wanted]()
        for value, level, windows in self.table.stages:
            node = self.new[value]
            if windows is None:
                found.append(Wanted(node, node, level))
            else:
                found.append(windowed(windows, node, level, self.new, self.masks, uid))
                uid += len(windows.groups)
        return found

    def present(self, roots: Sequence[UOp]) -> list[UOp]:
        """The RANGEs that stand for these roots now, outermost first."""
        found = {leaf for root in roots for leaf in self.leaves[root]}
        return sorted(found, key=lambda r: (r.arg.axis, r.arg.uid))

    def filling(self, roots: Sequence[UOp]) -> list[UOp]:
        """The RANGEs that fill scratch, so that the number of an element stays what it was: the mixed radix
        of roots, outermost first."""
        return [
            leaf
            for root in roots
            for leaf, _ in sorted(linear_form(self.new[root])[0].items(), key=lambda item: -item[1])
        ]

    def access(self, node: UOp, src: tuple[UOp, ...], mask: UOp | None, roots: Iterable[UOp]) -> UOp:
        if self.masks:
            padded = sorted([root for root in roots if root in self.masks], key=lambda r: r.arg.uid)
            mask = conjunction(mask, *[m for root in padded for m in self.masks[root]])
        if mask is None:
            return UOp(node.op, node.dtype, src)
        return _unmasked_read(node, src, mask) or UOp(node.op, node.dtype, (*src, mask))

    def accumulated(self, store: UOp, step: Axis) -> UOp:
        """A store that adds to its element at every step but the first; what follows the sum comes last.

        Before:  STORE(p, i, f(REDUCE(v, k; ADD)))
        After:   s = REDUCE(v, k; ADD) + INDEX(p, i, 0 < step);  STORE(p, i, WHERE(step == n - 1, f(s), s))
        """
        assert step.accumulates is not None and isinstance(step.size, int)
        part, number = self.new[step.accumulates], self.expression(step)
        mask = conjunction(*store.src[3:], UOp.index(0).lt(number))
        assert mask is not None
        total = part + UOp(Ops.INDEX, part.dtype, (*store.src[:2], mask))
        value = store.src[2].substitute({part: total})
        if store.src[2] is not part:
            value = number.equal(step.size - 1).where(value, total)
        return store.replace(src=(*store.src[:2], value, *store.src[3:]))

    def reduce(self, node: UOp) -> UOp:
        value = self.new[node.src[0]]
        masked = [root for root in node.src[1:] if root in self.masks]
        if masked and not (node.arg.op is Ops.ADD and all(_vanishes(node.src[0], root) for root in masked)):
            inside = conjunction(*[m for root in masked for m in self.masks[root]])
            assert inside is not None
            value = inside.where(value, UOp.const(identity(node.arg.op, node.dtype), node.dtype))
        ranges = [r for r in self.present(node.src[1:]) if r.arg.axis.is_reduce]
        return UOp(Ops.REDUCE, node.dtype, (value, *ranges), node.arg)


def _unmasked_read(node: UOp, src: tuple[UOp, ...], mask: UOp) -> UOp | None:
    """A read inside of its buffer whose mask varies over more of the tile than its index does is one read and
    many choices; None for any other.

    Before:  INDEX(p, i, u <= j)            with u in the tile: a masked read for every u
    After:   WHERE(u <= j, INDEX(p, i), 0)
    """
    if node.op is not Ops.INDEX or mask.op is Ops.CONST:
        return None
    varying = {r for r in mask.ranges if r.arg.axis.is_tile} - src[1].ranges
    low, high = src[1].bounds
    if not varying or low < 0 or src[0].op is not Ops.PARAM or high >= src[0].arg.size:
        return None
    parts = conditions_of(mask)
    moved = conjunction(*[c for c in parts if not varying.isdisjoint(c.ranges)])
    kept = conjunction(*[c for c in parts if varying.isdisjoint(c.ranges)])
    assert moved is not None, "the mask varies"
    read = UOp(Ops.INDEX, node.dtype, src if kept is None else (*src, kept))
    return moved.where(read, UOp.const(0, node.dtype))


_ZERO_PRESERVING = (Ops.CAST, Ops.NEG, Ops.ADD, Ops.SUB, Ops.MUL, Ops.MAX, Ops.MIN)


def _vanishes(value: UOp, root: UOp) -> bool:
    """Whether `value` is surely 0 where `root` is out of range: made of reads that depend on it, by ops
    that keep 0."""
    stack = [value]
    while stack:
        node = stack.pop()
        if node.op is Ops.INDEX:
            if root not in node.src[1].ranges:
                return False
        elif node.op in _ZERO_PRESERVING:
            stack += node.src
        elif node.op is Ops.WHERE:
            stack += node.src[1:]
        elif not (node.op is Ops.CONST and node.arg == 0):
            return False
    return True


_LETTER = {
    AxisType.GLOBAL: "g",
    AxisType.THREAD: "t",
    AxisType.LOCAL: "l",
    AxisType.LOOP: "",
    AxisType.GROUP_REDUCE: "G",
    AxisType.REDUCE: "r",
    AxisType.UPCAST: "u",
    AxisType.UNROLL: "R",
}


def kernel_name(table: AxisTable) -> str:
    """`e` or `r` (elementwise or reducing), then the sizes in nesting order, each with a letter for its
    type."""
    kind = "r" if any(a.type.is_reduce for a in table.axes.values()) else "e"
    parts = [
        _LETTER[a.type] + str(a.size if isinstance(a.size, int) else "n") for a in table.of_type(*AxisType)
    ]
    return "_".join([kind, *parts])


def apply(ast: UOp, opts: Sequence[Opt], target: Target) -> UOp:
    """The kernel (a SINK at kernel level) with the opts applied in order; its arg is KernelArg(name, opts).

    OptError if an opt is not legal for the kernel or the target.
    """
    if isinstance(ast.arg, KernelArg) and ast.arg.opts:
        raise OptError(
            f"opts on kernel {ast.arg.name}",
            because="it is optimised already",
            fix="start from the kernel without opts",
        )
    table = AxisTable.of(ast, target)
    for opt in opts:
        table.apply(opt)
    return table.build()
