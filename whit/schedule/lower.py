"""From a home to a kernel: the value's expression at the home's loops, with memory reads at the edges."""

from __future__ import annotations

from whit.helpers import prod
from whit.schedule.fusion import Fusion, Home, Stage, sources_at, store_place, take_places
from whit.schedule.movement import ZERO, Place, flat_index, index_dtype, memory_of, through, unbind
from whit.uop import Ops, ParamArg, ReduceArg, StageArg, UOp, dtypes
from whit.uop.ops import identity
from whit.uop.symbolic import conjunction
from whit.uop.uop import alu


class Kernel:
    """Stores (memory, index, value, valid) inside loops. Memory is named by its BUFFER or by the node that
    has a home; reads are INDEX(that node, …) until `finish` numbers the memories as PARAMs."""

    def __init__(self, loops: list[UOp], home: Home) -> None:
        self.stores: list[tuple[UOp, UOp, UOp, UOp | None]] = []
        self.guests: list[tuple[UOp, UOp, UOp]] = []  # stores in outer loops: those that the index depends on
        self.loops = loops
        self.homes = [home]
        # nodes read: BUFFER, AFTER (a version of one) or a home's node
        self.reads: dict[UOp, None] = {}

    @property
    def device(self) -> str | None:
        return self.stores[0][0].device or next((node.device for node in self.reads if node.device), None)

    def finish(self) -> tuple[UOp, list[UOp]]:
        """(SINK with PARAMs, the memories in slot order: written ones first)."""
        memories: dict[UOp, int] = {}
        for memory in (*[store[0] for store in self.stores], *[guest[0] for guest in self.guests]):
            memories.setdefault(memory, len(memories))
        params: dict[UOp, UOp] = {}
        for node in self.reads:
            memory = memory_of(node) if node.op in (Ops.BUFFER, Ops.AFTER) else node
            memories.setdefault(memory, len(memories))
            params[_token(node)] = _param(memory, memories[memory])
        ends = []
        for memory, index, value in self.guests:
            store = UOp(Ops.STORE, dtypes.void, (_param(memory, memories[memory]), index, value))
            ends.append(store.end(*[r for r in self.loops if r in index.ranges]))
        for memory, index, value, valid in self.stores:
            source = (_param(memory, memories[memory]), index, value)
            ends.append(
                UOp(Ops.STORE, dtypes.void, source if valid is None else (*source, valid)).end(*self.loops)
            )
        return UOp.sink(*ends).substitute(params), list(memories)


def _param(memory: UOp, slot: int) -> UOp:
    return UOp(Ops.PARAM, memory.dtype, (), ParamArg(slot, elements(memory)))


def elements(memory: UOp) -> int:
    """Elements of a memory, symbolic sizes at their greatest."""
    size = 1
    for length in memory.shape:
        size *= length if isinstance(length, int) else int(length.vmax)
    return size


def _token(node: UOp) -> UOp:
    """What stands for a memory in a kernel until it has a slot: a leaf, so that the tensor graph is not
    walked into."""
    if node.op is Ops.BUFFER:
        return node
    return UOp(Ops.PARAM, node.dtype, (), node)


def lower(home: Home, fusion: Fusion) -> Kernel:
    """Build the kernel of a home."""
    if home.node.op is Ops.STORE:
        memory, index = store_place(home)
    else:
        memory, index = home.node, flat_index(home.place, home.node.shape)
    kernel = Kernel(home.order, home)
    lowering = _Lowering(home, fusion, kernel)
    value = lowering.value(home.value, home.place)
    kernel.stores.append((memory, index, value, None))
    for node, place in home.guests:
        kernel.guests.append((node, flat_index(place, node.shape), lowering.value(node, place)))
    return kernel


class _Lowering:
    def __init__(self, home: Home, fusion: Fusion, kernel: Kernel) -> None:
        self.home, self.fusion, self.kernel = home, fusion, kernel
        self.memo: dict[tuple[UOp, Place], UOp] = {}

    def value(self, node: UOp, place: Place) -> UOp:
        """The kernel expression of a node's element; iterative, since tensor graphs are deep."""
        memo = self.memo
        stack: list[tuple[UOp, Place]] = [(node, place)]
        while stack:
            top = stack[-1]
            if top in memo:
                stack.pop()
                continue
            wanted = self.needs(*top)
            missing = [need for need in wanted if need not in memo]
            if missing:
                stack += reversed(missing)
                continue
            stack.pop()
            memo[top] = self.build(*top, [memo[need] for need in wanted])
        return memo[node, place]

    def in_memory(self, node: UOp) -> bool:
        # also where one is an output: it costs no read, and may lie on another device
        if node.op is Ops.CONST:
            return False
        return node.op in (Ops.BUFFER, Ops.AFTER) or (
            node in self.fusion.homes and node is not self.home.node
        ) or self.fusion.hosts.get(node, self.home) is not self.home

    def needs(self, node: UOp, place: Place) -> list[tuple[UOp, Place]]:
        """Sub-expressions that must be built first."""
        if self.in_memory(node):
            return []
        stage = self.home.stages.get(node)
        if stage is not None and place is not stage.place and place != stage.place:
            return [(node, stage.place)]
        if node.op is Ops.TAKE:
            _, index_place = take_places(node, place, None)
            index = self.memo.get((node.src[1], index_place))
            if index is None:
                return [(node.src[1], index_place)]
            return [(node.src[1], index_place), (node.src[0], self.taken(node, place, index))]
        return sources_at(node, place, self.home)

    def taken(self, node: UOp, place: Place, index: UOp) -> Place:
        """The place that a TAKE reads; not valid when the index is outside of the axis."""
        at = index_dtype(index)
        size = UOp.index(unbind(node.src[0].shape[node.arg]))
        inside = conjunction(place.valid, _unless_certain(at.ge(0)), _unless_certain(at.lt(size)))
        read, _ = take_places(node, place, at)
        return Place(read.idxs, inside)

    def build(self, node: UOp, place: Place, sources: list[UOp]) -> UOp:
        op = node.op
        if self.in_memory(node):
            return self.read(node, place)
        stage = self.home.stages.get(node)
        if stage is not None and place != stage.place:
            return self.staged(node, stage, place, sources[0])
        if op.is_alu:
            return alu(op, *sources)
        if op is Ops.CAST:
            return sources[0].cast(node.dtype)
        if op is Ops.BITCAST:
            return sources[0].bitcast(node.dtype)
        if op is Ops.CONST:
            return node
        if op is Ops.IOTA:
            return place.idxs[0].cast(node.dtype)
        if op is Ops.BIND:
            return node.src[0]
        if op is Ops.PAD:
            return _zero_unless(through(node, place).valid, sources[0])
        if op is Ops.TAKE:
            return _zero_unless(self.taken(node, place, sources[0]).valid, sources[1])
        if op is Ops.REDUCE:
            if 0 in [node.src[0].shape[axis] for axis in node.arg.axes]:
                return UOp.const(identity(node.arg.op, node.dtype), node.dtype)
            loops = tuple([loop for loop in self.home.reduce_ranges(node, place) if loop is not ZERO])
            return (
                UOp(Ops.REDUCE, node.dtype, (sources[0], *loops), ReduceArg(node.arg.op))
                if loops
                else sources[0]
            )
        if op is Ops.VAR or (node.dtype is dtypes.index and not node.src):
            return node
        return sources[0]  # movement that only changed the place; CONTIGUOUS, DETACH

    def staged(self, node: UOp, stage: Stage, place: Place, value: UOp) -> UOp:
        """A read of the scratch that holds a value; equal scratch is one node."""
        number = list(self.home.stages).index(node)
        scratch = UOp(Ops.STAGE, node.dtype, (value, *stage.ranges), StageArg("local", number))
        index = stage.number(place, node.shape)
        source: tuple[UOp, ...] = (scratch, index)
        if place.valid is not None and not (index.vmin >= 0 and index.vmax < scratch_size(stage)):
            source = (*source, place.valid)
        return UOp(Ops.INDEX, node.dtype, source)

    def read(self, node: UOp, place: Place) -> UOp:
        self.kernel.reads[node] = None
        index = flat_index(place, node.shape)
        source = (_token(node), index)
        if place.valid is None or (index.vmin >= 0 and index.vmax < elements(node)):
            return UOp(Ops.INDEX, node.dtype, source)  # in range whatever the condition says
        return UOp(Ops.INDEX, node.dtype, (*source, place.valid))


def scratch_size(stage: Stage) -> int:
    """Elements that a stage holds."""
    size: int = prod([r.src[0].arg for r in stage.ranges])
    return size


def _unless_certain(condition: UOp) -> UOp | None:
    return None if condition.vmin else condition


def _zero_unless(valid: UOp | None, value: UOp) -> UOp:
    """`value` where valid, else 0. A read that is masked by (at least) the same condition gives the 0
    itself."""
    if valid is None or (value.op is Ops.INDEX and len(value.src) == 3 and value.src[2] is valid):
        return value
    return alu(Ops.WHERE, valid, value, value.const_like(0))
