"""Tiles and addresses: which lanes and points a value has, and how an index expression looks at each of them.

The tile of a value is the set of UPCAST and UNROLL ranges that it depends on. The first of the kernel's
vector axes among them is its vector, cut into pieces of `width` lanes; the others are unrolled. Points are
numbered row-major over the ranges, pieces last.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from whit.codegen.target import Target
from whit.uop import AxisType, Op, Ops, PyConst, UOp, dtypes
from whit.uop.symbolic import Linear, linear_form, simplify

Dims = tuple[UOp, ...]  # tile ranges of a value, the vector axis last


class Tiles:
    """The vector axes of a kernel, best first, and the dimensions, points and projections that follow."""

    def __init__(self, width: dict[UOp, int]) -> None:
        self.width = width  # vector axis -> lanes of one piece
        self._rank = {axis: n for n, axis in enumerate(width)}
        self._dims: dict[frozenset[UOp], Dims] = {}
        self._grid: dict[Dims, list[tuple[int, ...]]] = {(): [()]}
        self._maps: dict[tuple[Dims, Dims], tuple[list[int], list[int] | None]] = {}

    def dims(self, ranges: frozenset[UOp]) -> Dims:
        """The tile ranges among `ranges` in the order of unrolling; the last is the vector if there is
        one."""
        found = self._dims.get(ranges)
        if found is None:
            tile = [r for r in ranges if r.arg.axis.is_tile]
            vector = min([r for r in tile if r in self.width], key=self._rank.__getitem__, default=None)
            tile.sort(key=lambda r: (r is vector, -r.arg.axis, r.arg.uid))
            found = self._dims[ranges] = tuple(tile)
        return found

    def lanes(self, dims: Dims) -> int:
        """Lanes of one value with these dimensions."""
        return self.width.get(dims[-1], 1) if dims else 1

    def grid(self, dims: Dims) -> list[tuple[int, ...]]:
        """For each point the value of each range (of the vector axis: of its first lane)."""
        found = self._grid.get(dims)
        if found is None:
            steps = [1] * (len(dims) - 1) + [self.lanes(dims)]
            sides = [range(0, r.src[0].arg, n) for r, n in zip(dims, steps, strict=True)]
            found = self._grid[dims] = list(itertools.product(*sides))
        return found

    def points(self, dims: Dims) -> int:
        return len(self.grid(dims)) if dims else 1

    def project(self, dims: Dims, part: Dims) -> tuple[list[int], list[int] | None]:
        """For each point of `dims` the number of the point of `part` (a subset of the ranges) that contains
        it; and which of its lanes, when the vector of `part` is unrolled in `dims`."""
        found = self._maps.get((dims, part))
        if found is None:
            lanes = self.lanes(part)
            parts: list[tuple[int, int, int]] = []
            step, width = 1, lanes
            for r in reversed(part):
                parts.append((dims.index(r), width, step))
                step *= r.src[0].arg // width
                width = 1
            grid = self.grid(dims)
            where = [sum([p[i] // w * s for i, w, s in parts]) for p in grid]
            apart = lanes > 1 and part[-1] is not dims[-1]
            lane = [p[parts[0][0]] % lanes for p in grid] if apart else None
            found = self._maps[(dims, part)] = where, lane
        return found


@dataclass(slots=True)
class Address:
    """An index at one point: base + offset + stride * lane; or, when irregular, one (terms, constant) per
    lane.

    `terms` are (index expression, factor) without tile ranges. `vector` are (value with one index per
    lane, factor)."""

    terms: list[tuple[UOp, int]]
    offset: int
    stride: int = 0
    lanes: list[Linear] | None = None
    scalars: list[tuple[UOp, int]] = field(default_factory=list)  # data-dependent instructions
    vectors: list[tuple[UOp, int]] = field(default_factory=list)

    def offsets(self, lanes: int) -> tuple[int, ...] | None:
        """The constant part of each lane's index, or None if more than constants differ between lanes."""
        if self.lanes is None:
            return tuple([self.offset + self.stride * lane for lane in range(lanes)])
        first = self.lanes[0][0]
        return tuple([c for _, c in self.lanes]) if all(t == first for t, _ in self.lanes) else None

    def among(self, used: Sequence[PyConst]) -> Address:
        """The same address on the lanes that are used, as a regular one if those make it one."""
        offsets = self.offsets(len(used))
        if self.lanes is None or offsets is None:
            return self
        on = [n for n, use in enumerate(used) if use]
        step = (offsets[on[-1]] - offsets[on[0]]) // (on[-1] - on[0]) if len(on) > 1 else 1
        start = offsets[on[0]] - step * on[0]
        if any(offsets[n] != start + step * n for n in on):
            return self
        return Address(self.same_terms(), start, step, scalars=self.scalars, vectors=self.vectors)

    def same_terms(self) -> list[tuple[UOp, int]]:
        """The terms that all lanes have in common, when `offsets` is not None."""
        return self.terms if self.lanes is None else list(self.lanes[0][0].items())


def choose_vector_axes(order: Sequence[UOp], target: Target) -> dict[UOp, int]:
    """Vector axis -> lanes of a piece, best first: each is the axis that saves most instructions among the
    values that depend on none before it.

    Instructions are counted over the tile, and more in deeper loops. Arithmetic and contiguous accesses
    shrink to one per piece; other accesses along the axis become a scalar access and an insertion per
    lane, and a vector that meets an axis before it is taken apart.
    """
    size: dict[UOp, int] = {}
    work: list[_Work] = []
    for node in order:
        op = node.op
        ranges = node.ranges
        if op is Ops.REDUCE:
            ranges = ranges | frozenset(node.src[1:]) | node.src[0].ranges
        tile = frozenset([r for r in ranges if r.arg.axis.is_tile])
        if not tile:
            continue
        if node.dtype.kind in "iufb":
            for r in tile:
                size[r] = max(size.get(r, 1), node.dtype.itemsize)
        if op in _MEMORY or op is Ops.REDUCE or (op.is_alu and node.dtype is not dtypes.index):
            count = 16.0 ** min(4, sum([r.arg.axis is AxisType.REDUCE for r in ranges]))
            work.append(_Work(node, tile, count * math.prod([r.src[0].arg for r in tile])))
    width = {r: _piece(r.src[0].arg, max(1, target.vector_bytes // size[r])) for r in size}
    left = {r for r in size if width[r] > 1}
    chosen: dict[UOp, int] = {}
    while left:
        gain = dict.fromkeys(left, 0.0)
        for item in work:
            item.add_gains(gain, width, chosen)
        best = min(left, key=lambda r: (-gain[r], r.arg.axis, -r.arg.uid))
        if gain[best] <= 0:
            break
        chosen[best] = width[best]
        left.remove(best)
    return chosen


@dataclass(slots=True)
class _Work:
    """A node that becomes instructions: `count` of them if all its tile were unrolled."""

    node: UOp
    tile: frozenset[UOp]
    count: float

    def add_gains(self, gain: dict[UOp, float], width: dict[UOp, int], chosen: dict[UOp, int]) -> None:
        """Add what each axis would save here when the axes in `chosen` are vectors already."""
        node, count = self.node, self.count
        for first in chosen:
            if first in self.tile:
                return self._add_costs(gain, first)
        terms = linear_form(node.src[1])[0] if node.op in _MEMORY else None
        for r in self.tile:
            if r not in gain:
                continue
            saved = count * (1 - 1 / width[r])
            if terms is None or abs(terms.get(r, 0)) == 1:
                gain[r] += saved
            elif 1 < abs(terms.get(r, 0)) <= 4:  # a few wide loads and a shuffle
                gain[r] += saved / 4
            elif node.op is Ops.STORE and turned_axis(node, r, width[r]) is not None:
                gain[r] += saved / 2
            elif terms.get(r) or any(r in t.ranges for t in terms):
                gain[r] -= count
            else:  # only the mask depends on the axis
                gain[r] += saved / 2

    def _add_costs(self, gain: dict[UOp, float], first: UOp) -> None:
        """The node is a vector along `first`: other vectors are taken apart for it, or put together from
        it."""
        node, count = self.node, self.count
        for s in node.src:
            if s.dtype is not dtypes.index and first not in s.ranges:
                for r in s.ranges:
                    if r in gain:
                        gain[r] -= 2 * count / first.src[0].arg
        if node.op is Ops.REDUCE and first not in node.ranges:
            outputs = math.prod([r.src[0].arg for r in node.ranges if r.arg.axis.is_tile])
            for r in node.ranges:
                if r in gain:
                    gain[r] -= outputs


_MEMORY = frozenset({Ops.INDEX, Ops.STORE})


def turned_axis(store: UOp, vector: UOp, lanes: int) -> UOp | None:
    """The tile axis along which a store whose vectors are strided writes neighbours, whole vectors of them:
    squares of the tile are turned around in registers. None: there is no such axis, or no need."""
    terms, _ = linear_form(store.src[1])
    if abs(terms.get(vector, 0)) < 2 or any(t.op is not Ops.RANGE and vector in t.ranges for t in terms):
        return None
    tile = [t for t, f in terms.items() if f == 1 and t.op is Ops.RANGE and t.arg.axis.is_tile]
    return next((t for t in tile if t.src[0].arg % lanes == 0), None)


def _piece(size: int, lanes: int) -> int:
    """The greatest power of two that divides `size` and fits a register."""
    width = 1
    while width * 2 <= lanes and size % (width * 2) == 0:
        width *= 2
    return width


def addresses(expr: UOp, dims: Dims, tiles: Tiles, data: Iterable[UOp]) -> list[Address]:
    """The index expression at each point of `dims`. `data` are its terms that come from memory: they are
    left out here."""
    terms, constant = linear_form(expr)
    skip = set(data)
    fixed: list[tuple[UOp, int]] = []
    affine: list[tuple[int, int]] = []  # position in dims, factor
    mixed: list[tuple[UOp, int]] = []
    stride = 0
    vector = dims[-1] if dims and dims[-1] in tiles.width else None
    for term, factor in terms.items():
        if term in skip:
            continue
        if term.op is Ops.RANGE and term.arg.axis.is_tile:
            affine.append((dims.index(term), factor))
            if term is vector:
                stride = factor
        elif any(r.arg.axis.is_tile for r in term.ranges):
            mixed.append((term, factor))
        else:
            fixed.append((term, factor))
    result: list[Address] = []
    for point in tiles.grid(dims):
        offset = constant
        for position, factor in affine:
            offset += point[position] * factor
        result.append(Address(fixed, offset, stride))
    if mixed:
        _substitute_lanes(result, mixed, dims, tiles, vector)
    return result


def _substitute_lanes(
    result: list[Address], mixed: list[tuple[UOp, int]], dims: Dims, tiles: Tiles, vector: UOp | None
) -> None:
    """Terms such as (i*4 + u) // 6 that are not affine in the tile: evaluate them at each lane and look
    for a pattern."""
    memo: dict[tuple[UOp, tuple[int, ...]], Linear] = {}
    lanes = tiles.lanes(dims)
    parts = [
        (term, factor, [(i, r) for i, r in enumerate(dims) if r in term.ranges]) for term, factor in mixed
    ]
    for address, point in zip(result, tiles.grid(dims), strict=True):
        found: list[Linear] = []
        for lane in range(lanes):
            terms = dict(address.terms)
            constant = address.offset + address.stride * lane
            for term, factor, ranges in parts:
                values = tuple([point[i] + (lane if r is vector else 0) for i, r in ranges])
                form = memo.get((term, values))
                if form is None:
                    at = {r: UOp.index(v) for (_, r), v in zip(ranges, values, strict=True)}
                    form = memo[(term, values)] = linear_form(simplify(term.substitute(at)))
                for t, f in form[0].items():
                    terms[t] = terms.get(t, 0) + f * factor
                constant += form[1] * factor
            found.append(({t: f for t, f in terms.items() if f}, constant))
        first, start = found[0]
        step = found[1][1] - start if lanes > 1 else 0
        if all(t == first and c == start + step * n for n, (t, c) in enumerate(found)):
            address.terms, address.offset, address.stride = list(first.items()), start, step
        else:
            address.lanes = found


def is_linear(node: UOp) -> bool:
    """Whether `linear_form` looks through this index expression."""
    op: Op = node.op
    return op is Ops.ADD or op is Ops.CONST or (op is Ops.MUL and node.src[1].op is Ops.CONST)
