"""From a set of tensor graphs to kernels and copies in order, cached by the shape of the graph."""

from __future__ import annotations

from typing import Any, NamedTuple

from whit.helpers import DEBUG, SPEC, ArgumentError, log, round_up
from whit.schedule import stored
from whit.schedule.fusion import FEW_ROWS, SMALL_WORK, Home, decide
from whit.schedule.loops import Loop, bare, loop_of, pruned
from whit.schedule.lower import Kernel, elements, lower
from whit.schedule.memory import ALIGN, Lifetime, plan
from whit.schedule.merge import merge
from whit.schedule.movement import contiguous_view, fixed_view, memory_of, stripped
from whit.schedule.order import Memory, dependencies, execution_order, misaligned_stores, versions_to_copy
from whit.uop import DType, Ops, UOp, dtypes
from whit.uop.rewrite import rebuild, timed
from whit.uop.uop import alu, uops_in, variables_of


class Slot(NamedTuple):
    """A memory that the calls name. external: position in the list of the caller's BUFFERs; else a new buffer
    (`output`) or, when `offset` >= 0, a piece of the arena. A given kernel may read a piece of an external
    memory, from element `start` on."""

    dtype: DType
    size: int
    device: str
    external: int = -1
    output: bool = False
    offset: int = -1
    start: int = -1  # of a piece of an external memory, in elements

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


class Call(NamedTuple):
    """Run `ast` (a kernel's SINK; None: copy slot 1 to slot 0) on slots, in PARAM order; or the steps of a
    `loop`, whose `ast` is a SCAN."""

    ast: UOp | None
    slots: tuple[int, ...]
    variables: tuple[str, ...] = ()
    reason: str = ""
    source_offset: int = 0  # of a copy, in elements
    loop: Loop | None = None


class Result(NamedTuple):
    """Where a root's value lies afterwards: slot and offset in elements (int, or an expression of
    variables)."""

    slot: int
    offset: Any = 0


class Schedule:
    """Calls in execution order. `arena`: bytes of scratch per device; `saved`: what the planner saved
    there."""

    def __init__(self, calls: list[Call], slots: list[Slot], results: list[Result]) -> None:
        self.calls, self.slots, self.results = calls, slots, results
        self.arena: dict[str, int] = {}
        self.saved = 0

    @property
    def linear(self) -> UOp:
        """The schedule as a LINEAR of CALLs on BUFFERs numbered by slot (negative, so that they are nobody's
        real memory)."""
        buffers = [UOp(Ops.BUFFER, s.dtype, (), _slot_arg(i, s)) for i, s in enumerate(self.slots)]
        calls = []
        for call in self.calls:
            ast = (
                call.ast
                if call.ast is not None
                else buffers[call.slots[1]].copy_to(self.slots[call.slots[0]].device)
            )
            calls.append(UOp(Ops.CALL, dtypes.void, (ast, *[buffers[s] for s in call.slots])))
        return UOp(Ops.LINEAR, dtypes.void, tuple(calls))


def _slot_arg(number: int, slot: Slot) -> Any:
    from whit.uop import BufferArg

    return BufferArg(-1 - number, slot.size, slot.device)


# ---- cache -------------------------------------------------------------------------------------------------


class GraphKey(NamedTuple):
    """A graph without the identity of its buffers and the values of its variables."""

    key: tuple[Any, ...]
    buffers: list[UOp]
    values: dict[str, int]


def graph_key(roots: list[UOp]) -> GraphKey:
    """Two sets of roots with equal keys have the same schedule up to the buffers they name."""
    position: dict[UOp, int] = {}
    rows: list[Any] = []
    buffers: list[UOp] = []
    values: dict[str, int] = {}
    sink = UOp.sink(*roots)
    for node in sink.toposort():
        op, arg = node.op, node.arg
        if op is Ops.BUFFER:
            arg = (len(buffers), arg.size, arg.device)
            buffers.append(node)
        elif op is Ops.AFTER:
            arg = None  # the number of the version
        elif op is Ops.CALL:
            arg = (bare(arg.kernel), arg.device)  # whatever its gradient is
        elif op is Ops.PARAM:
            raise ArgumentError(
                f"computing a value that was made inside of {arg.by}",
                because="it depends on the arguments of a traced function, which have no values",
                fix="return it from the function",
            )
        elif op is Ops.CONST:
            if node.dtype.is_float:
                arg = repr(arg)  # tells 0.0 from -0.0, and every NaN is one
        elif op is Ops.BIND:
            _bind(node, values)
            rows.append((op, node.src[0].arg))
            position[node] = len(position)
            continue
        elif type(arg) is tuple or type(arg) is UOp:  # sizes; the length of an IOTA
            for inner in uops_in(arg):
                for part in inner.toposort():
                    if part.op is Ops.BIND:
                        _bind(part, values)
                arg = _without_values(node.arg)
        rows.append((op, node.dtype, tuple([position[s] for s in node.src]), arg))
        position[node] = len(position)
    return GraphKey(tuple(rows), buffers, values)


def _bind(node: UOp, values: dict[str, int]) -> None:
    variable, value = node.unbind()
    name = variable.arg.name
    if values.setdefault(name, value) != value:
        raise ArgumentError(
            f"variable {name} is bound to {values[name]} and to {value} in one computation",
            because="it can have one value at a time",
            fix="realize one of the tensors first, or use two variables",
        )


def _without_values(arg: Any) -> Any:
    if isinstance(arg, UOp):
        return arg.substitute({n: n.src[0] for n in arg.toposort() if n.op is Ops.BIND})
    return tuple([_without_values(item) for item in arg]) if isinstance(arg, tuple) else arg


_cache: dict[tuple[Any, ...], Schedule] = {}
CACHE_ENTRIES = 4096


def schedule(roots: list[UOp]) -> tuple[Schedule, list[UOp], dict[str, int]]:
    """The schedule that gives every root memory, the BUFFERs that its external slots stand for, and the
    variables' values."""
    with timed("schedule: graph key"):
        graph = graph_key(roots)
    found = _cache.get(graph.key)
    if found is None:
        if len(_cache) >= CACHE_ENTRIES:
            _cache.clear()
        found = _cache[graph.key] = _stored_or_made(roots, graph)
    return found, graph.buffers, graph.values


def _stored_or_made(roots: list[UOp], graph: GraphKey) -> Schedule:
    name = stored.entry_of(graph.key)
    if name is None:
        return make_schedule(roots, graph.buffers)
    with timed("schedule: read from disk"):
        found: Schedule | None = stored.read(name)
    if found is None:
        found = make_schedule(roots, graph.buffers)
        stored.write(name, found)
    return found


# ---- construction ------------------------------------------------------------------------------------------


def make_schedule(roots: list[UOp], buffers: list[UOp]) -> Schedule:
    """Schedule without the cache."""
    if SPEC:
        from whit.uop.spec import verify
        verify(UOp.sink(*roots), "tensor", "given to schedule")
    with timed("schedule: reductions", UOp.sink(*roots)):
        split = _split_large_reductions(_crop_reductions(pruned(UOp.sink(*roots))))
    roots = list(split.src)
    root = UOp.sink(*roots)
    outputs = {stripped(r): "output" for r in roots if contiguous_view(r) is None}
    while True:
        with timed("schedule: fusion", root):
            fusion = decide(root, outputs)
            bad = misaligned_stores(fusion)
        if bad:
            outputs.update({store.src[1]: "read and overwritten at different places" for store in bad})
            continue
        with timed("schedule: kernels"):
            kernels = {
                home: lower(home, fusion) for node, home in fusion.homes.items() if node.op not in _WHOLE
            }
        with timed("schedule: order"):
            read_by = {home: _reads_of(home, kernels) for home in fusion.homes.values()}
            before, war = dependencies(fusion, read_by)
            memory = Memory(fusion, read_by, outputs)
            order, stuck = execution_order(list(reversed(fusion.homes.values())), before, memory)
        if not stuck:
            break
        versions = versions_to_copy(stuck, before, war)
        assert versions, "kernels wait for each other without a write that a copy would free"
        root = _with_snapshots(root, set(versions))
        outputs = {stripped(r): "output" for r in root.src if contiguous_view(r) is None}
    return _assemble(list(root.src), buffers, order, kernels, before)


_WHOLE = (Ops.COPY, Ops.CALL)  # homes that read memory as it is, and are no kernels to be written here


def _reads_of(home: Home, kernels: dict[Home, Kernel]) -> dict[UOp, None]:
    if home.node.op is Ops.CALL:
        views = [(fixed_view(source), source) for source in home.node.src]
        return {view[0] if view is not None else stripped(source): None for view, source in views}
    if home.node.op is not Ops.COPY:
        return kernels[home].reads
    view = contiguous_view(home.node.src[0])
    return {view[0] if view is not None else stripped(home.node.src[0]): None}


def _with_snapshots(root: UOp, versions: set[UOp]) -> UOp:
    """Readers of old versions read copies of them instead; the writes themselves stay where they are."""
    new: dict[UOp, UOp] = {}
    read: dict[UOp, UOp] = {}  # what a reader of the node finds
    for node in root.toposort():
        if node.op in (Ops.AFTER, Ops.STORE):  # src[0] names the memory, it is not a read
            src = (_target(node.src[0], new), *[read[s] for s in node.src[1:]])
        else:
            src = tuple([read[s] for s in node.src])
        made = node if src == node.src else node.replace(src=src)
        if made.op is Ops.COPY and node.src[0] in versions and made.device == src[0].device:
            made = src[0]  # a copy already
        new[node] = made
        read[node] = made.copy_to(made.device or "CPU") if node in versions else made
    return new[root]


def _target(node: UOp, new: dict[UOp, UOp]) -> UOp:
    if node.op in (Ops.BUFFER, Ops.AFTER):
        return new[node]
    return node.replace(src=(_target(node.src[0], new), *node.src[1:]))


def _crop_reductions(root: UOp) -> UOp:
    """Only the elements that are kept are reduced.

    Before:  shrink(reduce(x))
    After:   reduce(shrink(x))        when nothing else uses the reduction
    """
    users: dict[UOp, int] = {}
    for node in root.toposort():
        for source in node.src:
            users[source] = users.get(source, 0) + 1

    def crop(old: UOp, new: UOp) -> UOp:
        if old.op is not Ops.SHRINK or old.src[0].op is not Ops.REDUCE or users[old.src[0]] > 1:
            return new
        reduce, kept = new.src[0], iter(old.arg)
        sizes = enumerate(reduce.src[0].shape)
        limits = tuple([(0, size) if axis in reduce.arg.axes else next(kept) for axis, size in sizes])
        return reduce.replace(src=(reduce.src[0].shrink(limits),))

    return rebuild(root, crop) if any([n.op is Ops.SHRINK for n in users]) else root


def _split_large_reductions(root: UOp) -> UOp:
    """A long reduction to a few elements becomes two, so that threads can share the first:
    reduce (n,) -> reduce (parts, n / parts) over its last axis, written to memory, then over the parts. Of a
    length that nothing divides the last few elements are folded in at the end."""

    def split(old: UOp, new: UOp) -> UOp:
        if old.op is not Ops.REDUCE or not all([isinstance(s, int) for s in old.src[0].shape]):
            return new
        source, axes = new.src[0], old.arg.axes
        size_in, size_out = elements(source), elements(old)
        if size_out >= FEW_ROWS or size_in < SMALL_WORK or size_out == 0:
            return new
        axis = next((a for a in axes if _parts(source.shape[a])), None)
        if axis is None:
            axis = max(axes, key=lambda a: source.shape[a])
        size = source.shape[axis]
        parts = _parts(size) or (PARTS if size >= 2 * PARTS else 0)
        if not parts:
            return new
        whole, last = (
            source.shrink(tuple([limits if a == axis else (0, n) for a, n in enumerate(source.shape)]))
            for limits in ((0, size // parts * parts), (size // parts * parts, size))
        )
        shape = (*source.shape[:axis], parts, size // parts, *source.shape[axis + 1 :])
        inner = tuple([a + (a >= axis) for a in axes if a != axis] + [axis + 1])
        kept_before = sum(1 for a in range(axis) if a not in axes)
        partial = whole.reshape(shape).reduce(old.arg.op, tuple(sorted(inner))).contiguous()
        result = partial.reduce(old.arg.op, (kept_before,))
        return result if size % parts == 0 else alu(old.arg.op, result, last.reduce(old.arg.op, axes))

    return rebuild(root, split)


PARTS = 32  # of a length that has no good divisor


def _parts(size: Any) -> int:
    """Into how many parts an axis is split: a divisor between 8 and 64, the greatest power of two if there is
    one."""
    for parts in (32, 16, 64, 8, 24, 12, 10, 20, 9, 11, 13):
        if size % parts == 0 and size > parts:
            return parts
    return 0


def _assemble(
    roots: list[UOp],
    buffers: list[UOp],
    order: list[Home],
    kernels: dict[Home, Kernel],
    before: dict[Home, set[Home]],
) -> Schedule:
    """Merge, number the memories, plan the arena."""
    result_nodes = {stripped(r) for r in roots}
    with timed("schedule: merge"):
        units = _merged(order, kernels, before, result_nodes)
    table = _Slots(buffers, result_nodes)
    calls = []
    for unit in units:
        if isinstance(unit, Home):
            is_copy = unit.node.op is Ops.COPY
            calls.append(_copy_call(unit, table) if is_copy else _given_call(unit, table))
            continue
        with timed("schedule: kernels"):
            ast, memories = unit.finish()
        variables = tuple([v.arg.name for v in variables_of(ast.toposort())])
        reason = "; ".join([f"{h.node.op.name}: {h.reason}" for h in unit.homes])
        calls.append(Call(ast, tuple([table.slot(m) for m in memories]), variables, reason))
        log(3, f"fusion: kernel of {len(unit.stores) + len(unit.guests)} stores, ends because {reason}")
    results = [_result(r, table) for r in roots]
    made = Schedule(calls, table.slots, results)
    with timed("schedule: memory"):
        _plan_arena(made)
    if DEBUG.value >= 3 and made.saved:
        log(3, f"memory: arenas of {made.arena}, {made.saved} bytes saved by sharing")
    return made


def _merged(
    order: list[Home], kernels: dict[Home, Kernel], before: dict[Home, set[Home]], results: set[UOp]
) -> list[Kernel | Home]:
    """Merged kernels, copies and given kernels. These stay where they are; kernels merge between two of
    them."""
    runs: list[list[Kernel]] = [[]]
    copies: list[Home] = []
    for home in order:
        if home.node.op in _WHOLE:
            copies.append(home)
            runs.append([])
        elif elements(home.value):
            runs[-1].append(kernels[home])
    reads = [{node for kernel in run for node in kernel.reads} for run in runs]
    readers: dict[UOp, int] = {}  # in how many runs a value is read
    for nodes in reads:
        for node in nodes:
            readers[node] = readers.get(node, 0) + 1
    needed = results | {stripped(source) for home in copies for source in home.node.src}
    units: list[Kernel | Home] = []
    for number, run in enumerate(runs):
        values = [home.node for kernel in run for home in kernel.homes]
        elsewhere = {node for node in values if readers.get(node, 0) > (node in reads[number])}
        units += merge(run, before, elsewhere | needed.intersection(values))
        units += copies[number : number + 1]
    return units


class _Slots:
    """Numbers for memories."""

    def __init__(self, buffers: list[UOp], results: set[UOp]) -> None:
        self.results = results
        self.numbers: dict[UOp, int] = {}
        self.slots: list[Slot] = []
        for position, buffer in enumerate(buffers):
            self.numbers[buffer] = position
            self.slots.append(Slot(buffer.dtype, buffer.arg.size, buffer.arg.device, external=position))

    def slot(self, memory: UOp) -> int:
        found = self.numbers.get(memory)
        if found is None:
            found = self.numbers[memory] = len(self.slots)
            self.slots.append(
                Slot(memory.dtype, elements(memory), memory.device or "", output=memory in self.results)
            )
        return found

    def piece(self, memory: UOp, start: int, size: int) -> int:
        """The slot of `size` elements of a BUFFER from `start` on."""
        whole = self.slot(memory)
        found = self.slots[whole]
        if not start and size == found.size:
            return whole
        self.slots.append(found._replace(size=size, start=start))
        return len(self.slots) - 1


def _result(root: UOp, table: _Slots) -> Result:
    view = contiguous_view(root)
    if view is not None:
        return Result(table.slot(memory_of(view[0])), view[1])
    return Result(table.slot(stripped(root)))


def _copy_call(home: Home, table: _Slots) -> Call:
    source = home.node.src[0]
    view = contiguous_view(source)
    if view is None:
        return Call(None, (table.slot(home.node), table.slot(stripped(source))), reason=home.reason)
    offset = view[1]
    assert isinstance(offset, int), "copies have fixed offsets"
    return Call(
        None,
        (table.slot(home.node), table.slot(memory_of(view[0]))),
        reason=home.reason,
        source_offset=offset,
    )


def _given_call(home: Home, table: _Slots) -> Call:
    """The call of a kernel that somebody gives: its outputs, then the values that it reads."""
    call = home.node
    slots = [table.slot(UOp(Ops.OUTPUT, dtype, (call,), (number, shape)))
             for number, (shape, dtype) in enumerate(call.arg.outputs)]
    for source in call.src:
        view = fixed_view(source)
        slots.append(table.slot(stripped(source)) if view is None
                     else table.piece(memory_of(view[0]), view[1], elements(source)))
    kernel = call.arg.kernel
    if kernel.op is Ops.SCAN:
        return _loop_call(home, slots, table)
    variables = tuple([v.arg.name for v in variables_of(kernel.toposort())])
    return Call(kernel, tuple(slots), variables, home.reason)


def _loop_call(home: Home, slots: list[int], table: _Slots) -> Call:
    """The steps of a loop; the temporaries of one step are those of the next one."""
    with timed("schedule: loops"):
        loop = loop_of(home.node)
    for device, nbytes in loop.plan.arena.items():
        table.slots.append(Slot(dtypes.uint8, nbytes, device))
        slots.append(len(table.slots) - 1)
    return Call(home.node.arg.kernel, tuple(slots), (), f"{home.reason} of {loop.length} steps", loop=loop)


def _plan_arena(made: Schedule) -> None:
    """Give every temporary a place in its device's arena."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, call in enumerate(made.calls):
        for slot in call.slots:
            first.setdefault(slot, position)
            last[slot] = position
    by_device: dict[str, list[int]] = {}
    for number, entry in enumerate(made.slots):
        if entry.external < 0 and not entry.output and number in first:
            by_device.setdefault(entry.device, []).append(number)
    for device, numbers in by_device.items():
        items = [Lifetime(made.slots[n].nbytes, first[n], last[n]) for n in numbers]
        offsets, size = plan(items)
        made.arena[device] = size
        made.saved += sum(round_up(i.nbytes, ALIGN) for i in items) - size
        for number, offset in zip(numbers, offsets):
            s = made.slots[number]
            made.slots[number] = Slot(s.dtype, s.size, s.device, s.external, s.output, offset)
