"""STAGE: an operand's tile copied into contiguous scratch close to the compute unit.

    a[(i*512 + k)] inside of loops i, j, k, staged at i:
        s = STAGE(a[i*512 + k'], k')         # filled once for every i
        s[k]                                 # read in every j
    becomes LOCAL memory, a loop nest that stores into it, and reads of it.

`stage_reads` makes the nodes for opts, choosing the layout; `lower_stages` turns them into memory and loops.
The value may be any expression: packing a panel evaluates masks, windows and conversions once.

Windows overlap: a convolution reads x[y + p, x + q] for many y and p with one sum. `find_windows` finds such
ranges; WINDOW stages the value over their sums, each element once, masks of the border included.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from whit.codegen.target import Target
from whit.helpers import round_up
from whit.uop import AxisType, LocalArg, Op, Ops, RangeArg, StageArg, UOp, dtypes
from whit.uop.rewrite import rebuild
from whit.uop.symbolic import conjunction, linear_form, simplify

ROW_CONFLICT = 512  # bytes: rows at multiples of this fight for the same sets of a cache


# ---- which value a read stands for -------------------------------------------------------------------------


def reads_of(ast: UOp) -> list[UOp]:
    """The values that can be staged, numbered as opts name them: for each read of a PARAM the largest
    expression around it that depends on the same ranges, such as a conversion to a wider type."""
    order = ast.toposort()
    users: dict[UOp, list[UOp]] = {}
    folding: set[UOp] = set()  # values made of sums: a copy of one would close the RANGEs of the sum twice
    for node in order:
        for source in node.src:
            users.setdefault(source, []).append(node)
        if node.op is Ops.REDUCE or not folding.isdisjoint(node.src):
            folding.add(node)
    found: dict[UOp, None] = {}
    for node in order:
        if (
            node.op is Ops.INDEX
            and node.src[0].op is Ops.PARAM
            and node.ranges
            and node.dtype is not dtypes.index
            and node not in folding
        ):
            found[_grown(node, users, folding)] = None
    return list(found)


def _grown(node: UOp, users: dict[UOp, list[UOp]], folding: set[UOp]) -> UOp:
    while len(users[node]) == 1 and users[node][0] not in folding:
        user = users[node][0]
        is_value = user.op.is_alu or user.op in (Ops.CAST, Ops.BITCAST)
        if not is_value or user.ranges != node.ranges:
            break
        if user.dtype is dtypes.bool or user.dtype is dtypes.index:
            break
        if any(u.op is Ops.REDUCE or u.op is Ops.STAGE for u in user.toposort()):
            break  # its loops would run in two places
        node = user
    return node


# ---- making the node ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Level:
    """A place in the loop nest: what it closes are the ranges inside of axis `number` of type `type`."""

    type: AxisType
    number: int

    def closes(self, r: UOp) -> bool:
        """Whether the range lies inside."""
        return (r.arg.axis, r.arg.uid) > (self.type, self.number)


@dataclass(slots=True)
class Wanted:
    """A value of the kernel that comes from scratch: `node` is read there, `value` says what is stored, and
    `back` what the ranges are that only `value` has."""

    node: UOp
    value: UOp
    level: Level
    back: dict[UOp, UOp] = field(default_factory=dict)


def stage_reads(sink: UOp, wanted: Iterable[Wanted], target: Target) -> UOp:
    """The kernel with these values read from scratch that is filled at their levels."""
    order = sink.toposort()
    # rows of a tile that lie side by side in scratch already are the vectors of the whole kernel
    vectors = frozenset([r for u in order if u.op is Ops.STAGE for r in u.ranges if r.arg.axis.is_tile])
    vectors = vectors or stored_neighbours(sink)
    wanted = list(wanted)
    uid = next_uid([*order, *[r for item in wanted for r in item.back]])
    changes: dict[UOp, UOp] = {}
    for number, item in enumerate(wanted):
        value, level = item.value, item.level
        halves = {} if item.back else _halves(value, level, uid)
        uid += 2 * len(halves)
        back = dict(item.back)
        if not halves and not back:
            value, back = _flattened(value, level, uid)
            uid += len(back)
        whole = {r: outer * _size([inner]) + inner for r, (outer, inner) in halves.items()}
        exact = frozenset([inner for _, inner in halves.values()])
        lanes = target.lanes(value.dtype)
        deep = _innermost(item, lanes) if item.back else None
        layout = _Layout(simplify(value.substitute(whole)), level, vectors, exact, lanes, deep)
        layout.keep_together(halves.values())
        read = layout.staged(number, uid)
        for r, (outer, inner) in halves.items():
            back |= {outer: r // _size([inner]), inner: r % _size([inner])}
        changes[item.node] = read.replace(src=(read.src[0], simplify(read.src[1].substitute(back))))
        uid += 2 * layout.count
    return sink.substitute(changes)


def contiguous_loops(value: UOp, loops: Iterable[UOp]) -> list[UOp]:
    """The innermost of these loops that walk through memory together as one: kernels of a convolution lie as
    channel, row, column. Empty if there are not two."""
    steps, found, size = source_steps(value), list[UOp](), 1
    for r in sorted(loops, key=lambda r: (r.arg.axis, r.arg.uid), reverse=True):
        if steps.get(r) != size:
            break
        found.append(r)
        size *= _size([r])
    return found[::-1] if len(found) > 1 else []


def _flattened(value: UOp, level: Level, uid: int) -> tuple[UOp, dict[UOp, UOp]]:
    """A value that is read across its tile, with loops of a sum that walk through neighbours made one, so
    that squares of it can be turned around. And what that one is."""
    steps = source_steps(value)
    closed = [r for r in value.ranges if level.closes(r)]
    folds = contiguous_loops(value, [r for r in closed if r.arg.axis is AxisType.REDUCE])
    tile = [r for r in closed if r.arg.axis.is_tile]
    reads = [u for u in value.toposort() if u.op is Ops.INDEX]
    if not folds or not tile or any(steps.get(r) == 1 for r in tile) or any(len(u.src) > 2 for u in reads):
        return value, {}
    whole = _range(uid, _size(folds), AxisType.LOOP)
    changes, place, size = dict[UOp, UOp](), UOp.index(0), 1
    for r in reversed(folds):
        changes[r] = (whole // size) % _size([r])
        place, size = place + r * size, size * _size([r])
    flat = simplify(value.substitute(changes))
    return (flat, {whole: simplify(place)}) if source_steps(flat).get(whole) == 1 else (value, {})


def _innermost(item: Wanted, lanes: int) -> UOp | None:
    """The innermost loop of a sum, if it is long and no window: what its steps read lies side by side."""
    walked = frozenset[UOp]().union(*[place.ranges for place in item.back.values()])
    sums = [r for r in item.value.ranges | walked if r.arg.axis is AxisType.REDUCE]
    last = max(sums, key=lambda r: int(r.arg.uid), default=None)
    return last if last in item.value.ranges and last is not None and _size([last]) * 2 >= lanes else None


def _halves(value: UOp, level: Level, uid: int) -> dict[UOp, tuple[UOp, UOp]]:
    """Ranges that enter the source's index as r // n and r % n (also with multiples of n added): each becomes
    a range over the blocks and one inside of a block, which walks through neighbours."""
    found: dict[UOp, tuple[UOp, UOp]] = {}
    for term in source_steps(value, Ops.FLOORMOD):
        if term.src[1].op is not Ops.CONST:
            continue
        n: int = term.src[1].arg
        terms, offset = linear_form(term.src[0])
        for r, factor in terms.items():
            others = [f for t, f in terms.items() if t is not r]
            if r.op is not Ops.RANGE or factor != 1 or not level.closes(r) or r in found:
                continue
            if offset % n or any(f % n for f in others) or _size([r]) % n or _size([r]) == n:
                continue
            found[r] = _range(uid, _size([r]) // n, r.arg.axis), _range(uid + 1, n, r.arg.axis)
            uid += 2
    return found


# ---- windows -----------------------------------------------------------------------------------------------

MOST_STRIDE = 8  # of a window


@dataclass(frozen=True, slots=True)
class Group:
    """Ranges that a value depends on by one sum alone: `whole` is that sum, from 0 to its size - 1, and
    equals the sum of factor * range plus `offset`."""

    whole: UOp
    factors: tuple[tuple[UOp, int], ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Windows:
    """A value as a function of sums: that of some ranges, and those ranges in groups."""

    value: UOp
    groups: tuple[Group, ...]

    @property
    def grouped(self) -> frozenset[UOp]:
        """The ranges that are in a group."""
        return frozenset([r for group in self.groups for r, _ in group.factors])


@lru_cache(maxsize=256)
def find_windows(value: UOp) -> Windows | None:
    """The windows through which a value of the unoptimised kernel is read, with masks that only depend on
    the place in memory; None if there are none."""
    reads = [u for u in value.toposort() if u.op is Ops.INDEX]
    uid = next_uid(value.toposort())
    groups: list[Group] = []
    while len(groups) < len(value.ranges):
        forms = [linear_form(read.src[1])[0] for read in reads]
        if not all(t.op is Ops.RANGE and t.src[0].op is Ops.CONST for form in forms for t in form):
            return None
        found = _grouped(value, forms[0], uid + len(groups))
        if found is None:
            break
        value, group = found
        groups.append(group)
    return Windows(value, tuple(groups)) if groups else None


def _grouped(value: UOp, terms: Mapping[UOp, int], uid: int) -> tuple[UOp, Group] | None:
    """The value with two of its ranges, one summed over and one not, replaced by a range that is their
    sum."""
    ranges = sorted([r for r in terms if r in value.ranges], key=lambda r: (abs(terms[r]), r.arg.uid))
    for first, second in itertools.combinations(ranges, 2):
        factor, rest = divmod(terms[second], abs(terms[first]))
        if first.arg.axis is second.arg.axis or rest or abs(factor) > MOST_STRIDE:
            continue
        sign = 1 if terms[first] > 0 else -1
        low = sum([min(0, f * int(r.vmax)) for r, f in ((first, sign), (second, factor))])
        high = sum([max(0, f * int(r.vmax)) for r, f in ((first, sign), (second, factor))])
        if high - low + 1 >= _size([first]) * _size([second]):
            continue  # nothing is shared
        whole = _range(uid, high - low + 1, AxisType.LOOP)
        apart = (whole + low + second * -factor) * sign  # what `first` is
        changed = simplify(value.substitute({first: simplify(apart)}))
        if second not in changed.ranges and first not in changed.ranges:
            return changed, Group(whole, ((first, sign), (second, factor)), -low)
    return None


def windowed(
    windows: Windows,
    node: UOp,
    level: Level,
    new: Mapping[UOp, UOp],
    masks: Mapping[UOp, list[UOp]],
    uid: int,
) -> Wanted:
    """What to stage so that windows find their elements in one piece of the source: `node` of the optimised
    kernel, where `new` says what the ranges became and `masks` which of them were padded."""
    back: dict[UOp, UOp] = {}
    changes = {r: new[r] for r in windows.value.ranges if r in new}
    inside = [mask for r in changes for mask in masks.get(r, ())]
    for group in windows.groups:
        parts: dict[bool, UOp] = {True: UOp.index(0), False: UOp.index(0)}
        for r, factor in group.factors:
            terms, constant = linear_form(new[r])
            parts[False] = parts[False] + constant * factor
            for term, times in terms.items():
                inner = any(level.closes(x) for x in term.ranges)
                parts[inner] = parts[inner] + term * (times * factor)
        within, around = simplify(parts[True]), simplify(parts[False] + group.offset)
        if within.op is Ops.CONST:
            changes[group.whole] = simplify(around + within)
            continue
        low = int(within.vmin)
        local = _range(uid, int(within.vmax) - low + 1, AxisType.LOOP)
        uid += 1
        back[local] = simplify(within + -low)
        place = changes[group.whole] = simplify(around + low + local)
        if place.vmin < 0:
            inside.append(simplify(UOp.index(-1).lt(place)))
        if place.vmax > group.whole.vmax:
            inside.append(simplify(place.lt(group.whole.src[0])))
    value = simplify(windows.value.substitute(changes))
    mask = conjunction(*inside)
    return Wanted(node, value if mask is None else simplify(gated(value, mask, {})), level, back)


def stored_neighbours(sink: UOp) -> frozenset[UOp]:
    """The tile ranges along which stores write neighbours: they become the vectors."""
    return frozenset(
        [
            term
            for end in sink.src
            for term, factor in linear_form(_store_of(end).src[1])[0].items()
            if factor == 1 and term.op is Ops.RANGE and term.arg.axis.is_tile
        ]
    )


def _store_of(end: UOp) -> UOp:
    return end.src[0] if end.op is Ops.END else end


class _Layout:
    """How an operand lies in its scratch and how it gets there.

    A tile axis is innermost, padded to whole vectors, so that a step of the loops reads one stretch of
    memory: where the source's neighbours lie along another axis (its *run*), the copy turns squares of the
    tile around. Without a tile axis the run is innermost.
    """

    def __init__(
        self,
        value: UOp,
        level: Level,
        vectors: frozenset[UOp],
        exact: frozenset[UOp],
        lanes: int,
        deep: UOp | None = None,
    ) -> None:
        """`exact`: ranges that must not be padded. `deep`: innermost where there is no tile axis."""
        self.value, self.lanes, self.exact = value, lanes, exact
        steps = source_steps(value)
        rows = [r for r in value.ranges if level.closes(r)]
        rows.sort(key=lambda r: (r.arg.axis, r.arg.uid))
        tile = [r for r in rows if r.arg.axis.is_tile]
        self.count = len(rows)
        self.inner = next((r for r in tile if r in vectors), tile[-1] if tile else deep)
        least = 1 if self.inner is None else min(lanes // 2, _size([self.inner]))
        others = [r for r in reversed(rows) if _size([r]) >= least]
        runs = [r for r in (self.inner, *others) if r is not None and steps.get(r) == 1]
        self.run = runs[0] if runs else None
        self.rows = [r for r in rows if r is not self.inner and r is not self.run]

    def keep_together(self, halves: Iterable[tuple[UOp, UOp]]) -> None:
        """Put the blocks of a cut axis next to the inside of a block: the reader sees one axis again."""
        for outer, inner in halves:
            if outer in self.rows:
                self.rows.remove(outer)
                self.rows.insert(self.rows.index(inner) if inner in self.rows else len(self.rows), outer)

    def staged(self, number: int, uid: int) -> UOp:
        """INDEX(STAGE(value', …), place); fresh ranges are numbered from `uid`."""
        self.uid, self.fills = uid, list[UOp]()
        self.renamed: dict[UOp, UOp] = {}
        self.masks: list[UOp] = []
        place = UOp.index(0)
        for r in self.rows:
            short = r is self.rows[-1] and self.run is self.inner  # a few rows of a copy at a time
            place = place * self._fill(r, _size([r]), 4 if short and _size([r]) % 4 == 0 else 1) + r
        inner = 1
        if self.inner is not None:
            inner = _size([self.inner])
            inner = inner if self.inner in self.exact else _whole_vectors(inner, self.lanes)
        if self.run is not None and self.run is not self.inner:
            size = _size([self.run])
            width = min(self.lanes, inner) if self.inner is not None else _whole_vectors(size, self.lanes)
            width = min(width, 4 * self.lanes)
            room = round_up(size, width)
            if self.inner is None and self.rows and room * self.value.dtype.itemsize % ROW_CONFLICT == 0:
                room += self.lanes
                width = self.lanes
            place = place * self._fill(self.run, room, width) + self.run
        if self.inner is not None:
            # elements that lie apart are gathered for a vector at a time, each line of the source once
            width = self.lanes if self.run is None and inner % self.lanes == 0 else inner
            place = place * self._fill(self.inner, inner, width) + self.inner
        fill = simplify(gated(self.value, conjunction(*self.masks), self.renamed))
        stage = UOp(Ops.STAGE, self.value.dtype, (fill, *self.fills), StageArg("local", number))
        return UOp(Ops.INDEX, self.value.dtype, (stage, simplify(place)))

    def _fill(self, r: UOp, room: int, width: int) -> int:
        """Fill a dimension of the scratch, `room` elements for a range, `width` side by side. The room."""
        outer = _range(self.uid, room // width, AxisType.LOOP)
        lane = _range(self.uid + 1, width, AxisType.UPCAST)
        self.uid += 2
        self.fills += [half for half in (outer, lane) if _size([half]) > 1]
        parts = [outer * width if room > width else UOp.index(0), lane if width > 1 else UOp.index(0)]
        self.renamed[r] = simplify(parts[0] + parts[1])
        if room > _size([r]):
            self.masks.append(simplify(self.renamed[r].lt(_size([r]))))
        return room


def _whole_vectors(size: int, lanes: int) -> int:
    """`size` rounded up to vectors, or to the power of two that holds less than one."""
    return round_up(size, lanes) if size >= lanes else 1 << (size - 1).bit_length()


def _size(ranges: Iterable[UOp]) -> int:
    return math.prod([r.src[0].arg for r in ranges])


def _range(uid: int, size: int, axis: AxisType) -> UOp:
    return UOp(Ops.RANGE, dtypes.index, (UOp.index(size),), RangeArg(uid, axis))


def source_steps(value: UOp, op: Op | None = Ops.RANGE) -> dict[UOp, int]:
    """Factors of the ranges (or terms of another op; None: of all terms) in the index of the read that the
    value is made of. Of a value that packs a few neighbours they count such packs."""
    forms = [linear_form(u.src[1]) for u in value.toposort() if u.op is Ops.INDEX]
    terms, pack = forms[0][0], len(forms)
    starts = sorted([start for _, start in forms])
    packs = starts == list(range(starts[0], starts[0] + pack)) and all(other == terms for other, _ in forms)
    if packs and all(factor % pack == 0 for factor in terms.values()):
        terms = {term: factor // pack for term, factor in terms.items()}
    return {term: factor for term, factor in terms.items() if op is None or term.op is op}


def gated(value: UOp, mask: UOp | None, renamed: dict[UOp, UOp]) -> UOp:
    """The value over other ranges, with all its reads under a further mask."""

    def gate(old: UOp, new: UOp) -> UOp:
        if old.op is not Ops.INDEX or mask is None:
            return new
        condition = conjunction(*[simplify(s) for s in new.src[2:]], mask)
        return new.replace(src=new.src[:2] if condition is None else (*new.src[:2], condition))

    return rebuild(value, gate, renamed)


def next_uid(nodes: Iterable[UOp]) -> int:
    """The first number that no RANGE among the nodes has."""
    return max([u.arg.uid for u in nodes if u.op is Ops.RANGE], default=-1) + 1


def rename_free(value: UOp, renamed: dict[UOp, UOp]) -> UOp:
    """Substitute RANGEs where they are free: a REDUCE below that closes one keeps it."""
    free = frozenset(renamed)
    return rebuild(value, lambda old, new: new, renamed, lambda node: free.isdisjoint(node.ranges))


# ---- lowering ----------------------------------------------------------------------------------------------


def lower_stages(ast: UOp) -> UOp:
    """STAGE becomes private scratch memory, a loop nest that fills it, and reads of it.

    Before:  INDEX(STAGE(v, r, s), n)        with u, a tile range of 4 on which v depends
    After:   INDEX(AFTER(LOCAL, END(STORE(LOCAL, (r*|s| + s)*4 + u, v), r, s)), n*4 + u)
    """
    order = ast.toposort()
    if not any(u.op is Ops.STAGE for u in order):
        return ast
    uids = itertools.count(1 + max([u.arg.uid for u in order if u.op is Ops.LOCAL], default=-1))
    # the memory -> tile ranges that are its innermost dimensions, or the outermost ones of so many elements
    # each
    tiles: dict[UOp, tuple[list[UOp], int]] = {}

    def lower(old: UOp, new: UOp) -> UOp:
        if old.op is Ops.INDEX and new.src[0] in tiles:
            tile, size = tiles[new.src[0]]
            place = _mixed(UOp.index(0), tile) * size + new.src[1] if size else _mixed(new.src[1], tile)
            place = simplify(place)
            return new.replace(src=(new.src[0], place, *new.src[2:]))
        if old.op is not Ops.STAGE:
            return new
        tile = sorted([r for r in old.ranges if r.arg.axis.is_tile], key=lambda r: (r.arg.axis, r.arg.uid))
        outside = _keeps_neighbours(old)
        dims = (*tile, *old.src[1:]) if outside else (*old.src[1:], *tile)
        memory = UOp(Ops.LOCAL, old.dtype, (), LocalArg(next(uids), _size(dims), False))
        place = simplify(_mixed(UOp.index(0), dims))
        store = UOp(Ops.STORE, dtypes.void, (memory, place, new.src[0])).end(*_fill_order(old))
        filled = memory.after(store)
        tiles[filled] = (tile, _size(old.src[1:]) if outside else 0)
        return filled

    return rebuild(ast, lower)


def _keeps_neighbours(stage: UOp) -> bool:
    """Whether the last axis of a STAGE is a vector of neighbours in what it reads, so that it stays
    innermost: the scales of a row of blocks."""
    last = stage.src[-1]
    if len(stage.src) < 2 or not last.arg.axis.is_tile:
        return False
    if any(u.op is Ops.REDUCE for u in stage.src[0].toposort()):
        return False
    reads = [linear_form(u.src[1])[0] for u in stage.src[0].toposort() if u.op is Ops.INDEX]
    ones = [r for terms in reads for r, factor in terms.items() if factor == 1 and r.op is Ops.RANGE]
    near = {r for r in ones if r.arg.axis.is_tile}
    return near == {last}


def _fill_order(stage: UOp) -> list[UOp]:
    """The ranges of a STAGE in the order in which a copy walks through its source's memory; outside of the
    others those that decide its masks, which are then computed once for many elements."""
    ranges = list(stage.src[1:])
    reads = [u for u in stage.src[0].toposort() if u.op is Ops.INDEX]
    steps = linear_form(reads[0].src[1])[0] if len(reads) == 1 else {}
    if any(r not in steps for r in ranges):
        return ranges
    masked = frozenset[UOp]().union(*[mask.ranges for mask in reads[0].src[2:]])
    return sorted(ranges, key=lambda r: (r.arg.axis.is_tile, r not in masked, -abs(steps[r])))


def _mixed(start: UOp, ranges: Iterable[UOp]) -> UOp:
    for r in ranges:
        start = start * r.src[0].arg + r
    return start


def scratch_bytes(nodes: Iterable[UOp]) -> int:
    """Bytes of scratch that the STAGEs among the nodes take, for one row of a tile."""
    stages = [u for u in nodes if u.op is Ops.STAGE]
    return sum([u.dtype.itemsize * math.prod([int(r.src[0].vmax) for r in u.src[1:]]) for u in stages])
