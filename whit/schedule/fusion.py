"""Fusion: which values get memory of their own (a *home*: one kernel), and which are computed inside their
consumers.

Walk from outputs to inputs. Each node collects the places at which homes want its elements; the number of
times it would be evaluated, given which loops its place depends on, is weighed against the cost of writing it
once and reading it back. Every decision carries its reason (DEBUG=3 prints it).

Units of cost: one vectorised arithmetic operation on one element (about 0.02 ns a core).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from whit.helpers import all_int, log, prod
from whit.schedule.movement import (
    ZERO,
    Place,
    contiguous_view,
    fixed_view,
    flat_index,
    operand_place,
    stripped,
    through,
    unbound_shape,
)
from whit.uop import AxisType, Op, Ops, Shape, Sint, UOp, dtypes
from whit.uop.symbolic import linear_form

OP_COST: dict[Op, float] = {
    Ops.FDIV: 4,
    Ops.RECIPROCAL: 4,
    Ops.SQRT: 4,
    Ops.EXP2: 10,
    Ops.LOG2: 12,
    Ops.SIN: 25,
    Ops.ERF: 20,
    Ops.POW: 40,
    Ops.THREEFRY: 80,
    Ops.FLOORDIV: 10,
    Ops.FLOORMOD: 10,
    Ops.TRUNCDIV: 10,
    Ops.TRUNCMOD: 10,
}
LAUNCH = 40_000.0  # starting one more kernel
READ = 1.5  # reading a value again that is in the nearest cache
NEAR, FAR = 5.0, 16.0  # moving an element through a near cache, through memory
NEAR_BYTES = 1 << 19
RELUCTANCE = 1.5  # recomputing must cost this much more than memory before a value is written
SHARED_COST = 8.0  # a value used twice and at least this dear will be written by one of its users
SMALL_WORK = 200_000.0  # below this a kernel needs no parallelism
FEW_ROWS = 8  # fewer outer iterations than this cannot feed the threads
# a reduction that uses an element more often than this wants a register tile: a loop nest of its own
REUSE = 4.0
CHAIN_LIMIT = 256  # ops fused into one kernel at most
# a kernel that computes more than this (in ops of one iteration) takes long to compile: its next sources are
# written to memory, and so is a reduction that one kernel would compute at more places than this
KERNEL_WORK, MOST_PLACES = 400.0, 8
DEAR = 64.0  # what costs as much in outer loops has a reduction in it
CHEAP = 50.0  # what reads no memory and costs less is always computed where it is wanted
FAR_AWAY = 100  # elements of values between a home and what it might share with another
FAR_REACH = 2 * FAR_AWAY  # values that are looked at to find what is near
MOST_SHARED = 16  # shared values below another that are told apart
# bytes that a value may take in scratch for one row; a tile of rows then stays in the second cache
SCRATCH_ROW = 1 << 16
WORTH = 1.2  # computing again must cost this much more than scratch
SCRATCH_MOVE = 3.0  # moving an element through scratch
# share of a value that is computed where a mask of positions, such as the causal one, cuts loops short
MASKED = 0.6
UNTILED = 0.15  # what a contraction loses beside other loops of one kernel, as a share of its cost
# a value with this many times the elements that it is made of had better not lie in memory: moving its
# elements counts as much more as it is larger
EXPANSION, PRESSURE = 1.5, 4.0
EXPANSION_OF_SHORT = 0.2  # the same of products up to half as long as the longest
LONGEST = 256  # a longer product is better off with blocks of its own
ROWS = 32  # of a tile: what all of them read is read again for the next
STREAM = 1 << 20  # bytes that are read again from a near cache


class Stage(NamedTuple):
    """An intermediate in scratch: for each round of the loops around it, all elements along some `axes` of a
    value.

    `ranges` are the loops that fill it and `place` the element that they compute; what it is read for has the
    same indices as `place` on the other axes."""

    axes: tuple[int, ...]
    ranges: tuple[UOp, ...]
    place: Place

    def number(self, place: Place, shape: Shape) -> UOp:
        """Which element of the scratch a place is."""
        inner = Place(tuple([place.idxs[a] for a in self.axes]))
        return flat_index(inner, tuple([shape[a] for a in self.axes]))


class Home:
    """A value that is written to memory: one kernel before merging. `node` is the value, or a STORE into
    existing memory."""

    def __init__(self, node: UOp, reason: str) -> None:
        self.node, self.reason = node, reason
        self.next_uid = 0
        self.work = 0.0  # what it computes: ops of one iteration, at all places
        self.ranges = self.new_ranges(unbound_shape(self.value.shape), AxisType.LOOP)
        self.order = [r for r in self.ranges if r.op is Ops.RANGE]  # output loops, outermost first
        # sets of output loops that must come first, by inclusion
        self.hoisted: list[frozenset[UOp]] = []
        self.reduces: dict[tuple[UOp, Place], tuple[UOp, ...]] = {}
        self.stages: dict[UOp, Stage] = {}
        self.fills: set[UOp] = set()  # the loops that fill scratch
        self.guests: list[tuple[UOp, Place]] = []  # further values that it writes, on its outer loops
        # loops around each reduce loop, itself included
        self.enclosing: dict[UOp, frozenset[UOp]] = {}

    @property
    def value(self) -> UOp:
        """The expression whose elements the kernel computes."""
        return self.node.src[1] if self.node.op is Ops.STORE else self.node

    @property
    def place(self) -> Place:
        return Place(self.ranges)

    def new_ranges(self, sizes: tuple[Sint, ...], axis: AxisType) -> tuple[UOp, ...]:
        """A loop per axis; axes of size 1 need none. Numbered from 0 in each home, so that equal kernels are
        one object."""
        made = []
        for size in sizes:
            if isinstance(size, int) and size == 1:
                made.append(ZERO)
            else:
                made.append(UOp.range(size, axis, self.next_uid))
                self.next_uid += 1
        return tuple(made)

    def reduce_ranges(self, node: UOp, place: Place) -> tuple[UOp, ...]:
        """The loops of a REDUCE evaluated at a place."""
        found = self.reduces.get((node, place))
        if found is None:
            shape = unbound_shape(node.src[0].shape)
            found = self.reduces[node, place] = self.new_ranges(
                tuple([shape[a] for a in node.arg.axes]), AxisType.REDUCE
            )
            self._enclose(found, loops_of(place))
        return found

    def _enclose(self, inner: tuple[UOp, ...], loops: frozenset[UOp]) -> None:
        """Remember the loops around new ones that stand inside of `loops`."""
        around = self.closure(loops)
        for loop in inner:
            if loop.op is Ops.RANGE:
                around = around | {loop}
                self.enclosing[loop] = around

    def staged_axes(self, places: list[Place]) -> tuple[int, ...] | None:
        """The axes along which scratch would hold a value that is wanted at these places: all others have one
        index, which only output loops change. None: there are none, or the value cannot stand in scratch."""
        axes = []
        for axis, idx in enumerate(places[0].idxs):
            fixed = all(place.idxs[axis] is idx for place in places)
            if not fixed or any(loop in self.enclosing for loop in idx.ranges):
                axes.append(axis)
            elif any(part.op is Ops.INDEX for part in idx.toposort()):
                return None  # looked up in memory, as a TAKE does: known when the kernel is written only
        return tuple(axes) or None

    def stage(self, node: UOp, axes: tuple[int, ...], places: list[Place]) -> Stage:
        """Put a value into scratch."""
        sizes = tuple([node.shape[a] if a in axes else 1 for a in range(node.ndim)])
        fills = self.new_ranges(sizes, AxisType.REDUCE)
        idxs = tuple([fill if a in axes else idx for a, (fill, idx) in enumerate(zip(fills, places[0].idxs))])
        outer = tuple([idx for a, idx in enumerate(idxs) if a not in axes])
        self._enclose(fills, loops_of(Place(outer)))
        self.fills.update(fills)
        found = self.stages[node] = Stage(axes, tuple([f for f in fills if f is not ZERO]), Place(idxs))
        return found

    def closure(self, loops: frozenset[UOp]) -> frozenset[UOp]:
        """All loops that run around a computation which depends on `loops`."""
        around = set(loops)
        deepest = -1
        for loop in loops:
            outer = self.enclosing.get(loop)
            if outer is not None:
                around |= outer
        for position, loop in enumerate(self.order):
            if loop in around:
                deepest = position
        around.update(self.order[: deepest + 1])
        return frozenset(around)

    def evaluations(self, place: Place) -> float:
        """How often something that depends on this place is computed."""
        return product_of_sizes(self.closure(loops_of(place)))

    def can_hoist(self, wanted: frozenset[UOp]) -> bool:
        """Whether these can become the outermost output loops."""
        if any(loop in self.enclosing for loop in wanted):
            return False
        return all(wanted <= other or other <= wanted for other in self.hoisted)

    def hoist(self, place: Place) -> bool:
        """Make the output loops of `place` the outermost, if what was hoisted before allows it."""
        wanted = loops_of(place)
        if not self.can_hoist(wanted):
            return False
        if wanted not in self.hoisted:
            self.hoisted.append(wanted)
            self.hoisted.sort(key=len)
            rank = {
                loop: next((i for i, s in enumerate(self.hoisted) if loop in s), len(self.hoisted))
                for loop in self.order
            }
            self.order.sort(key=lambda loop: (rank[loop], loop.arg.uid))
        return True


def loops_of(place: Place) -> frozenset[UOp]:
    """The RANGEs that a place depends on."""
    result: frozenset[UOp] = frozenset()
    for idx in place.idxs:
        result |= idx.ranges
    return result if place.valid is None else result | place.valid.ranges


def product_of_sizes(loops: frozenset[UOp]) -> float:
    return float(prod([max(1, loop.src[0].vmax) for loop in loops]))


def count(node: UOp) -> float:
    """Number of elements; symbolic sizes at their greatest."""
    return float(prod([size if isinstance(size, int) else size.vmax for size in node.shape]))


class Costs:
    """Per element of a node: cost of computing it, ops in its expression; whether it reads memory at all.
    `contractions`: reductions that use each element they read many times. `expansions`: values with many more
    elements than what they are made of, and how many times as many. `below`: shared values that `cost` takes
    to be in memory.
    """

    def __init__(self) -> None:
        self.cost: dict[UOp, float] = {}
        self.ops: dict[UOp, int] = {}
        self.reads: dict[UOp, bool] = {}
        self.contractions: set[UOp] = set()
        self.expansions: dict[UOp, float] = {}
        self.below: dict[UOp, frozenset[UOp]] = {}
        self.lean: dict[UOp, float] = {}  # cost where large contractions are in memory
        self.products: dict[UOp, float] = {}  # values with contractions in them: the length of the longest
        self.feeds_product: set[UOp] = set()  # values of which a contraction is made by elementwise steps
        self.large: dict[UOp, frozenset[UOp]] = {}  # of `large_below`
        # such a value -> the numbers and nodes of the homes that reach it
        self.above: dict[UOp, list[tuple[int, UOp]]] = {}
        self.reached: dict[UOp, frozenset[UOp]] = {}  # of `_reached`
        self.outer_places: dict[
            tuple[UOp, Place, frozenset[UOp]], frozenset[tuple[UOp, tuple[UOp | None, ...]]]
        ] = {}  # of `_outer_places`
        self.summed: set[UOp] = set()  # values that are summed up as they are: both sums become one

    def large_below(self, node: UOp) -> frozenset[UOp]:
        """Shared values below that had better not lie in memory."""
        found = self.large.get(node)
        if found is None:
            value = node
            while value.op in _VIEWS:
                value = value.src[0]
            found = self.large[node] = frozenset([s for s in self.below[value] if s in self.expansions])
        return found

    def whole(self, node: UOp) -> float:
        """Cost of an element when nothing that is shared lies in memory but large contractions."""
        size = max(1.0, count(node))
        return self.lean[node] + sum([self.lean[s] * count(s) / size for s in self.below[node]])


def estimate(nodes: list[UOp], forced: dict[UOp, str]) -> Costs:
    """Cost of every node if it is computed from what will surely be in memory. Adds over-long chains to
    `forced`."""
    users: dict[UOp, int] = {}
    for node in nodes:
        for source in node.src:
            users[source] = users.get(source, 0) + 1
    result = Costs()
    seen: dict[UOp, tuple[float, int, bool]] = {}  # what a consumer sees
    # distinct elements that computing the whole node reads (shared sources count twice)
    read: dict[UOp, float] = {}
    # what a value is made of, where expansions are not in memory
    made_of: dict[UOp, frozenset[UOp]] = {}
    below: dict[UOp, frozenset[UOp]] = {}  # as a consumer sees it
    lean: dict[UOp, tuple[float, int, bool]] = {}  # as a consumer sees it if large contractions are in memory
    sure: set[UOp] = set()  # they, and what is in memory anyway
    for node in nodes:
        read[node] = sum([read[s] for s in node.src])
        made_of[node] = frozenset().union(*[made_of[s] for s in node.src])
        result.below[node] = frozenset().union(*[below[s] for s in node.src])
        size = count(node)
        if node.op is Ops.REDUCE and count(node.src[0]) > REUSE * max(1.0, read[node]):
            result.contractions.add(node)
        longest = [result.products[s] for s in node.src if s in result.products and s not in sure]
        if node in result.contractions:
            longest.append(count(node.src[0]) / max(1.0, size))
        if longest:
            result.products[node] = max(longest)
        ratio = size / max(1.0, sum([count(s) for s in made_of[node]]))
        short = 0.0 < result.products.get(node, 0.0) <= LONGEST / 2
        if ratio > (EXPANSION_OF_SHORT if short else EXPANSION):
            result.expansions[node] = ratio
        cost, ops, reads = _own_cost(node, seen)
        result.cost[node], result.ops[node], result.reads[node] = cost, ops, reads
        # what is much larger than its sources, such as the products of a sum, is the last to be written
        most = 2 * CHAIN_LIMIT if node in result.expansions else CHAIN_LIMIT
        if (
            ops > most
            and not node.op.is_movement
            and node not in forced
            and node.op not in (Ops.SINK, Ops.STORE)
        ):
            forced[node] = f"more than {CHAIN_LIMIT} fused ops"
        shared = users.get(node, 0) > 1 and cost >= SHARED_COST and node.op not in _VIEWS
        in_memory = node in forced or node.op in _MEMORY or (shared and reads)
        seen[node] = (1.0, 1, True) if in_memory else (cost, ops, reads)
        result.lean[node] = _own_cost(node, lean)[0]
        is_large = node in result.contractions and result.lean[node] * size >= SMALL_WORK
        is_large = is_large and (node not in result.expansions or result.products[node] > LONGEST)
        if is_large or node in forced or node.op in _MEMORY:
            sure.add(node)
        lean[node] = (1.0, 1, True) if in_memory or node in sure else (result.lean[node], ops, reads)
        below[node] = frozenset() if node in sure else result.below[node]
        if in_memory:
            read[node] = size
            if node not in sure and len(below[node]) <= MOST_SHARED:
                below[node] = below[node] | {node}
        if (in_memory and node not in result.expansions) or node in sure or len(made_of[node]) > MOST_SHARED:
            made_of[node] = frozenset({node})
    for node in reversed(nodes):
        inside = node in result.feeds_product and (node.op.is_elementwise or node.op in _VIEWS)
        is_product = node in result.contractions and _is_sum_of_products(node)
        if inside or is_product:
            result.feeds_product.update(node.src)
        is_sum = node.op is Ops.REDUCE and node.arg.op is Ops.ADD
        if is_sum or (node in result.summed and node.op in _VIEWS):
            result.summed.update(node.src)
    return result


def _is_sum_of_products(node: UOp) -> bool:
    value = node.src[0]
    while value.op is Ops.CAST:
        value = value.src[0]
    return node.arg.op is Ops.ADD and value.op is Ops.MUL


_MEMORY = frozenset({Ops.BUFFER, Ops.AFTER, Ops.COPY, Ops.CALL, Ops.OUTPUT})
_VIEWS = frozenset({Ops.RESHAPE, Ops.PERMUTE, Ops.EXPAND, Ops.PAD, Ops.SHRINK, Ops.FLIP, Ops.DETACH})


def _own_cost(node: UOp, seen: dict[UOp, tuple[float, int, bool]]) -> tuple[float, int, bool]:
    op = node.op
    if op in _MEMORY:
        return 1.0, 1, True
    if not node.src or op is Ops.BIND:
        return (0.0 if op is Ops.CONST else 0.5), 0, False
    size = max(1.0, count(node))
    cost, ops, reads = 0.0, 0, False
    for source in node.src:
        c, o, r = seen[source]
        cost += c * min(1.0, count(source) / size) if op is not Ops.REDUCE else c
        ops, reads = ops + o, reads or r
    if op is Ops.REDUCE:
        if node.arg.op is not Ops.ADD or not node.dtype.is_float or node.src[0].op is not Ops.MUL:
            cost += 1.0  # else the product is part of a fused multiply-add
        return max(cost, 1.0) * max(1.0, count(node.src[0]) / size), ops + 1, reads
    if op in _VIEWS or op is Ops.CONTIGUOUS:
        return cost, ops, reads
    return cost + OP_COST.get(op, 2.0 if op is Ops.TAKE else 1.0), ops + 1, reads


class Fusion(NamedTuple):
    """The decisions: homes in the order found (consumers first), and where each memory read happens."""

    homes: dict[UOp, Home]
    hosts: dict[UOp, Home]  # values that the kernel of another home writes on its way
    reads: dict[UOp, list[tuple[Home, Place]]]  # BUFFER and AFTER nodes -> who reads them where


def decide(root: UOp, outputs: dict[UOp, str]) -> Fusion:
    """Choose the homes for a SINK of tensors. `outputs`: nodes that must have memory, with the reason."""
    nodes = root.toposort()
    forced = dict(outputs)
    for node in nodes:
        if node.op is Ops.COPY:
            forced[node] = "copied between devices"
            if contiguous_view(node.src[0]) is None:
                forced.setdefault(stripped(node.src[0]), "source of a copy")
        elif node.op is Ops.CONTIGUOUS and contiguous_view(node) is None:
            forced.setdefault(stripped(node), "contiguous() was called")
        elif node.op is Ops.CALL:
            for source in node.src:
                if fixed_view(source) is None:
                    forced.setdefault(stripped(source), "a given kernel reads it")
    costs = estimate(nodes, forced)
    fusion = Fusion({}, {}, {})
    wanted: dict[UOp, dict[tuple[int, Place], Home]] = {}
    for node in reversed(nodes):
        op = node.op
        if op is Ops.SINK or op is Ops.AFTER or op is Ops.BUFFER:
            if op is not Ops.SINK:
                for (_, place), home in wanted.pop(node, {}).items():
                    fusion.reads.setdefault(node, []).append((home, place))
            continue
        if op is Ops.OUTPUT or op is Ops.CALL:  # what a given kernel reads has been forced into memory
            wanted.pop(node, None)
            call = node if op is Ops.CALL else node.src[0]
            home = fusion.homes.get(call) or Home(call, "a given kernel")
            fusion.homes[call] = home
            if op is Ops.OUTPUT:
                fusion.hosts[node] = home
            continue
        if op is Ops.STORE:
            home = fusion.homes[node] = Home(node, "assignment")
            wanted.setdefault(node.src[1], {})[id(home), home.place] = home
            continue
        places = wanted.pop(node, {})
        reason = forced.get(node)
        if reason is None and places:
            reason = _overfills(node, places, costs)
        if reason is None and places:
            host = _find_host(node, places, costs, fusion)
            if host is not None:
                place = next(at for number, at in places if number == id(host))
                host.hoist(place)
                host.guests.append((node, place))
                fusion.hosts[node] = host
                log(3, f"fusion: {op.name} {node.shape} is stored by the kernel of {host.value.op.name}")
                places = {(id(host), place): host}
            reason = _why_realize(node, places, costs)
            assert reason is None or host is None, "a guest is computed once"
        if reason is not None:
            joined = _find_companion(node, costs, fusion)
            if joined is not None:
                home, place = joined
                home.guests.append((node, place))
                fusion.hosts[node] = home
                log(3, f"fusion: {op.name} {node.shape} shares the kernel of {home.value.op.name}")
                places = {(id(home), place): home}
            else:
                home = fusion.homes[node] = Home(node, reason)
                for large in _reached(node, costs):
                    costs.above.setdefault(large, []).append((len(fusion.homes), node))
                places = {(id(home), home.place): home}
            if op is Ops.COPY:
                continue
        for home in {id(home): home for home in places.values()}.values():
            if node in home.stages:
                places = {key: other for key, other in places.items() if other is not home}
                places[id(home), home.stages[node].place] = home
        work = _compile_work(node)
        for (_, place), home in places.items():
            home.work += work
            for source, at in sources_at(node, place, home):
                wanted.setdefault(source, {})[id(home), at] = home
    return fusion


def sources_at(node: UOp, place: Place, home: Home) -> list[tuple[UOp, Place]]:
    """Which elements of its sources a node needs to be computed at a place."""
    op = node.op
    if op.is_elementwise:
        return [(source, operand_place(place, node, source)) for source in node.src]
    if op.is_movement:
        return [(node.src[0], through(node, place))]
    if op is Ops.REDUCE:
        return [(node.src[0], reduce_place(node, place, home.reduce_ranges(node, place)))]
    if op in (Ops.CONTIGUOUS, Ops.DETACH):
        return [(node.src[0], place)]
    if op is Ops.TAKE:
        at, index_place = take_places(node, place, None)
        return [(node.src[0], at), (node.src[1], index_place)]
    return []


def reduce_place(node: UOp, place: Place, loops: tuple[UOp, ...]) -> Place:
    """The place in a REDUCE's source: its loops at the folded axes."""
    rest, folded = iter(place.idxs), iter(loops)
    return Place(
        tuple([next(folded) if axis in node.arg.axes else next(rest) for axis in range(node.src[0].ndim)]),
        place.valid,
    )


def take_places(node: UOp, place: Place, value: UOp | None) -> tuple[Place, Place]:
    """(place in the data, place in the index tensor) of a TAKE; the index's value is a stand-in until it is
    known."""
    axis, index = node.arg, node.src[1]
    middle = place.idxs[axis : axis + index.ndim]
    index_place = Place(middle, place.valid)
    if value is None:
        value = UOp(Ops.INDEX, dtypes.index, (index, *middle))
    return Place((*place.idxs[:axis], value, *place.idxs[axis + index.ndim :]), place.valid), index_place


def _why_realize(node: UOp, places: dict[tuple[int, Place], Home], costs: Costs) -> str | None:
    """The reason for which a value gets memory, or None if it is computed inside its consumers: in place, or
    into their scratch (see `Home.stages`)."""
    if node.op in _VIEWS or node.op.category == "source" or count(node) == 0:
        return None
    size, cost = max(1.0, count(node)), costs.cost[node]
    dear = cost * size >= SMALL_WORK / 10
    if dear and _put_in_scratch(node, places, costs):
        return None
    reason = _harms_loops(node, places, costs)
    if reason is not None:
        return reason
    evaluations = 0.0
    for (_, place), home in places.items():
        times = home.evaluations(place)
        if dear and times > size and home.hoist(place):
            times = home.evaluations(place)
        evaluations += times
    if evaluations <= size * 1.01 or (not costs.reads[node] and cost < CHEAP):
        return None
    move = NEAR if size * node.dtype.itemsize < NEAR_BYTES else FAR
    recompute = evaluations * cost
    memory = size * (cost + 2 * move) + evaluations * READ + LAUNCH
    if recompute > RELUCTANCE * memory and not _is_padding(node, costs):
        return f"computed {evaluations / size:.4g} times an element at cost {cost:.4g}"
    return None


def _harms_loops(node: UOp, places: dict[tuple[int, Place], Home], costs: Costs) -> str | None:
    """Why the loops of its consumers are no place for a sum."""
    if node.op is not Ops.REDUCE:
        return None
    work = costs.cost[node] * max(1.0, count(node))
    reason = _starves_threads(node, places, work)
    if reason is None and node in costs.contractions and work >= SMALL_WORK:
        reason = _spoils_tile(node, places, costs)
    return reason


def _is_padding(node: UOp, costs: Costs) -> bool:
    """Whether the value is a smaller dear one with a margin: that one had better lie in memory."""
    if node.op is not Ops.WHERE:
        return False
    dear = [s for s in node.src if costs.reads[s]]
    if len(dear) != 1:
        return False
    inner = dear[0]
    while inner.op in _VIEWS:
        inner = inner.src[0]
    return count(inner) < count(node) and costs.cost[node] - costs.cost[inner] < SHARED_COST


def _find_host(
    node: UOp, places: dict[tuple[int, Place], Home], costs: Costs, fusion: Fusion
) -> Home | None:
    """A home that computes all of a dear value anyway, once, on its outer loops: it may write the result for
    the others that want it, if it need not wait for them."""
    by_home = {id(home): home for home in places.values()}
    if node.op in _VIEWS or len(by_home) < 2 or costs.cost[node] < DEAR:
        return None
    if costs.cost[node] * count(node) < SMALL_WORK:
        return None
    for number, home in sorted(by_home.items(), key=lambda item: -costs.cost[item[1].value]):
        at = [place for other, place in places if other == number]
        loops = [idx for idx in at[0].idxs if idx is not ZERO]
        whole = len(at) == 1 and at[0].valid is None and all(idx in home.order for idx in loops)
        if not whole or len(set(loops)) != len(loops) or home.node.op in (Ops.STORE, Ops.COPY):
            continue
        if product_of_sizes(frozenset(loops)) != count(node) or len(loops) == len(home.order):
            continue
        if not home.can_hoist(frozenset(loops)) or _waits_for(home, by_home, fusion):
            continue
        if _harms_loops(node, {(number, at[0]): home}, costs) is None:
            return home
    return None


def _number(pair: tuple[int, UOp]) -> int:
    return pair[0]


def _find_companion(node: UOp, costs: Costs, fusion: Fusion) -> tuple[Home, Place] | None:
    """A home over the same elements that would fill the same scratch, of which neither needs the other: the
    gradients of keys and of values are sums over one matrix of weights. And the place of `node` in its loops:
    the last two axes may stand the other way round."""
    shared = frozenset([s for s in costs.large_below(node) if costs.products.get(s, 0.0) <= LONGEST])
    if not shared or node.op in (Ops.STORE, Ops.COPY) or node.ndim < 2:
        return None
    alone, last = Home(node, ""), node.ndim - 1
    near = shared & _reached(node, costs)
    for _, other in sorted({pair for large in near for pair in costs.above.get(large, ())}, key=_number):
        home = fusion.homes[other]
        if home.node.op in (Ops.STORE, Ops.COPY) or other.device != node.device or other.ndim != node.ndim:
            continue
        theirs, best = _outer_places(other, home.place, shared, costs), (0, home.place)
        for order in ((*range(last - 1), last - 1, last), (*range(last - 1), last, last - 1)):
            if unbound_shape(tuple([other.shape[a] for a in order])) == unbound_shape(node.shape):
                place = Place(tuple([home.ranges[a] for a in order]))
                common = len(_outer_places(node, place, shared, costs) & theirs)
                best = max(best, (common, place), key=lambda item: item[0])
        if best[0] and not (_waits_for(home, {0: alone}, fusion) or _waits_for(alone, {0: home}, fusion)):
            return home, best[1]
    return None


def _outer_places(
    node: UOp, start: Place, wanted: frozenset[UOp], costs: Costs
) -> frozenset[tuple[UOp, tuple[UOp | None, ...]]]:
    """At which places a home of this value, computed at `start`, wants others, as far as its output loops
    decide; none if they are far away."""
    known = costs.outer_places.get((node, start, wanted))
    if known is not None:
        return known

    top = node
    while top.op in _VIEWS:
        top = top.src[0]

    def leads_nowhere(part: UOp) -> bool:
        if part in wanted or part is node or part is top:
            return part in wanted
        # another contraction has a kernel, and memory, of its own
        return part in costs.contractions or costs.large_below(part).isdisjoint(wanted)

    if _is_far(node, leads_nowhere):  # more than so many elements in any case
        costs.outer_places[node, start, wanted] = frozenset()
        return frozenset()
    home = Home(node, "")
    found = set()
    places: dict[UOp, dict[Place, None]] = {node: {start: None}}
    steps = 0
    for part in reversed(node.toposort(leads_nowhere)):
        for place in places.pop(part, {}):
            steps += 1
            if part in wanted:
                inner = [None if any(r in home.enclosing for r in idx.ranges) else idx for idx in place.idxs]
                if inner.count(None) <= 1:  # a row of scratch for each round of the output loops
                    found.add((part, tuple(inner)))
            elif not leads_nowhere(part):
                for source, at in sources_at(part, place, home):
                    places.setdefault(source, {})[at] = None
        if steps > FAR_AWAY:
            found.clear()
            break
    result = costs.outer_places[node, start, wanted] = frozenset(found)
    return result


def _reached(node: UOp, costs: Costs) -> frozenset[UOp]:
    """Of the large values below a node those that its kernel could fill scratch with: in a deep network what
    the first layers have made is below everything, far away."""
    large, known = costs.large_below(node), costs.reached.get(node)
    if known is not None or not large:
        return known or large
    top = node
    while top.op in _VIEWS:
        top = top.src[0]
    found = {node: None}
    stack = [node]
    for part in stack:  # grows meanwhile: the nearest first
        ends = part in costs.contractions and part is not node and part is not top
        if not ends and (part.op.is_elementwise or part.op.is_movement or part.op in _STEPS):
            stack += [s for s in dict.fromkeys(part.src) if s not in found and costs.large_below(s)]
            found.update(dict.fromkeys(part.src))
        if len(stack) > FAR_REACH:
            break
    result = costs.reached[node] = large & found.keys()
    return result


def _is_far(node: UOp, stop: Callable[[UOp], bool]) -> bool:
    """Whether more than FAR_AWAY values are computed on the way down to where `stop` holds."""
    seen = {node}
    stack = [node]
    while stack:
        part = stack.pop()
        if stop(part) or not (part.op.is_elementwise or part.op.is_movement or part.op in _STEPS):
            continue
        for source in part.src:
            if source not in seen:
                seen.add(source)
                stack.append(source)
        if len(seen) > FAR_AWAY:
            return True
    return False


_STEPS = frozenset({Ops.REDUCE, Ops.CONTIGUOUS, Ops.DETACH, Ops.TAKE})


def _waits_for(home: Home, others: dict[int, Home], fusion: Fusion) -> bool:
    """Whether a home needs what one of the others computes."""
    nodes = {other.node for other in others.values() if other is not home}
    seen: set[UOp] = set()
    stack = list(home.node.src)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        if node in nodes:
            return True
        seen.add(node)
        stack += node.src
        host = fusion.hosts.get(node)
        if host is not None and host is not home:
            stack.append(host.node)
    return False


def _put_in_scratch(node: UOp, places: dict[tuple[int, Place], Home], costs: Costs) -> bool:
    """Stage a value in all homes that would compute an element of it several times, if that is cheaper than
    memory and than computing it again."""
    size, cost = max(1.0, count(node)), costs.whole(node)
    if (not costs.reads[node] and cost < CHEAP) or _is_conversion(node):
        return False
    if costs.products.get(node, 0.0) > LONGEST:
        return False
    # what a contraction is made of is packed by codegen; a contraction has a tile of its own, so it stands in
    # the scratch of another one (attention's scores), not of a few cheap steps
    has, feeds = node in costs.products, node in costs.feeds_product
    if (feeds and not has) or (has and not feeds and cost * size >= SMALL_WORK):
        return False
    wanted: dict[int, list[Place]] = {}
    for number, place in places:
        wanted.setdefault(number, []).append(place)
    by_home = {id(home): home for home in places.values()}
    move = NEAR if size * node.dtype.itemsize < NEAR_BYTES else FAR
    if move == FAR and node in costs.expansions:
        move *= 1.0 + PRESSURE * max(1.0, costs.expansions[node])
    memory = size * (cost + move * (1 + len(wanted))) + LAUNCH
    filling = cost * (MASKED if _is_masked(node, costs) else 1.0)
    filling = filling * (1.0 + UNTILED * (node in costs.products)) + 2 * SCRATCH_MOVE
    total = again = 0.0
    staged: list[tuple[Home, tuple[int, ...]]] = []
    for number, at in wanted.items():
        home = by_home[number]
        evaluations = sum([home.evaluations(place) for place in at])
        memory += evaluations * READ
        axes = home.staged_axes(at)
        if feeds and axes is not None and any(_is_window(place, axes) for place in at):
            axes = None  # a convolution has a tile of its own
        fills, row = _fill_evaluations(node, home, at[0], axes)
        far = FAR * cost / ROWS if row * cost * node.dtype.itemsize > STREAM else 0.0
        inline, scratch = evaluations * cost, evaluations * READ + fills * (filling + far)
        again += inline
        again_here = len(at) > 1 and node in costs.expansions and scratch < math.inf
        once = evaluations <= 1.01 * fills  # scratch would save nothing
        if axes is not None and not once and (again_here or inline > WORTH * scratch):
            staged.append((home, axes))
            total += scratch
        else:
            total += inline
    if total >= memory:
        return False
    if not staged:  # computed again in the scratch of others
        filled = all(loops_of(place) & home.fills for (_, place), home in places.items())
        return len(wanted) > 1 and len(places) == len(wanted) and filled
    for home, axes in staged:
        home.hoist(_outer(wanted[id(home)][0], axes))
        home.stage(node, axes, wanted[id(home)])
        each = f"cost {total / size:.4g} an element, {memory / size:.4g} in memory, {again / size:.4g} again"
        log(3, f"fusion: {node.op.name} {node.shape} in scratch of {home.value.op.name}, axes {axes}: {each}")
    return True


def _is_window(place: Place, axes: tuple[int, ...]) -> bool:
    """Whether one of these axes is walked through by two loops together, as a convolution does."""
    return any(
        sum([term.op is Ops.RANGE for term in linear_form(idx)[0]]) > 1
        for idx in [place.idxs[axis] for axis in axes]
        if idx is not ZERO
    )


_KEEP_MASKS = (Ops.MUL, Ops.CAST, Ops.NEG, Ops.SUB, Ops.EXP2)


def _is_conversion(node: UOp) -> bool:
    """Whether the value is memory in another type: codegen packs it, with the layout that a product wants."""
    while node.op is Ops.CAST or node.op in _VIEWS:
        node = node.src[0]
    return node.op is Ops.BUFFER or node.op is Ops.AFTER


def _is_masked(node: UOp, costs: Costs) -> bool:
    """Whether positions alone decide where the value is computed."""
    while node.op in _KEEP_MASKS and node.src[0].shape == node.shape:
        node = node.src[0]
    return node.op is Ops.WHERE and node.src[0].ndim > 1 and not costs.reads[node.src[0]]


def _outer(place: Place, axes: tuple[int, ...]) -> Place:
    return Place(tuple([idx for axis, idx in enumerate(place.idxs) if axis not in axes]))


def _fill_evaluations(
    node: UOp, home: Home, place: Place, axes: tuple[int, ...] | None
) -> tuple[float, int]:
    """How many elements filling scratch computes (infinite if it is too large, or of a symbolic size), and
    how many it holds for a row."""
    lengths = [node.shape[axis] for axis in axes or ()]
    row = prod(lengths) if all_int(lengths) else 0
    if not row or row * node.dtype.itemsize > SCRATCH_ROW:
        return math.inf, row
    outer = loops_of(_outer(place, axes or ()))
    return row * product_of_sizes(outer if home.can_hoist(outer) else home.closure(outer)), row


def _compile_work(node: UOp) -> float:
    """What a node adds to a kernel: a loop for a reduction, index arithmetic for a view, else an op."""
    if node.op is Ops.REDUCE:
        return 8.0
    return 0.25 if node.op in _VIEWS else OP_COST.get(node.op, 1.0)


def _overfills(node: UOp, places: dict[tuple[int, Place], Home], costs: Costs) -> str | None:
    """Kernels have a limit, however little they compute."""
    if node.op in _VIEWS or costs.ops[node] < 4 or not costs.reads[node]:
        return None  # not worth memory
    full = next((home for home in places.values() if home.work > KERNEL_WORK), None)
    if full is not None:
        return f"its consumer computes {full.work:.0f} ops already"
    if node.op is Ops.REDUCE and len(places) > MOST_PLACES:
        return f"a reduction wanted at {len(places)} places"
    return None


def _starves_threads(node: UOp, places: dict[tuple[int, Place], Home], work: float) -> str | None:
    """A reduction inside a kernel with too few outer iterations runs on one thread: better a kernel of its
    own."""
    if work < SMALL_WORK or count(node) < 1:
        return None
    for (_, place), home in places.items():
        outer = product_of_sizes(frozenset(loop for loop in loops_of(place) if loop not in home.enclosing))
        whole = product_of_sizes(frozenset(home.order))
        if outer < FEW_ROWS and (whole > outer or count(node) >= FEW_ROWS):
            return f"only {outer:.0f} outer iterations for a reduction of {work:.3g} operations"
    return None


def _spoils_tile(node: UOp, places: dict[tuple[int, Place], Home], costs: Costs) -> str | None:
    """A contraction may share a kernel with elementwise work on its own result, and fill scratch, not stand
    in loops that only others need, nor beside another contraction."""
    if len(places) > 1:
        return "a contraction wanted at several places"
    for (_, place), home in places.items():
        loops = loops_of(place)
        if not loops.isdisjoint(home.fills):
            continue
        if not frozenset(home.order) <= loops:
            return "a contraction inside other loops"
        if node in costs.summed:
            continue
        if any(loop in home.enclosing for loop in loops):
            return "a contraction in loops of a sum"
        # values that were joined share their scratch, not a tile
        several = any(other in costs.contractions and other is not node for other, _ in home.reduces)
        if several and not home.guests:
            return "a second contraction"
    return None


def store_place(home: Home) -> tuple[UOp, UOp]:
    """(BUFFER, flat index) that an assignment writes."""
    node, place = home.node.src[0], home.place
    while node.op is not Ops.BUFFER:
        if node.op.is_movement:
            place = through(node, place)
        node = node.src[0]
    return node, flat_index(place, node.shape)
