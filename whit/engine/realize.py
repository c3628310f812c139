"""Compute tensors: schedule them, give memory, run the kernels, and let the tensors point at the memory."""

from __future__ import annotations

import contextlib
import os
import weakref
from _thread import RLock
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from whit.autograd import history, marks
from whit.engine.compile import Kernel, compiled, prepare, settings
from whit.engine.counters import GlobalCounters, account, timing
from whit.engine.loops import replay_of
from whit.helpers import DEV, VALIDATE, ArgumentError, all_int, prod
from whit.runtime.device import Buffer, Device
from whit.schedule import Call, Schedule, schedule
from whit.schedule.loops import Loop
from whit.schedule.movement import contiguous_view, memory_of, stripped
from whit.schedule.order import overwritten_version
from whit.tensor import Tensor, storage
from whit.uop import Ops, UOp

# ---- memory of BUFFER nodes --------------------------------------------------------------------------------

_buffers: weakref.WeakKeyDictionary[UOp, Buffer] = weakref.WeakKeyDictionary()


class TensorMemory(Buffer):
    """Memory that a tensor owns: counted in GlobalCounters.mem_used, numbered in order of birth."""

    births = 0

    def __init__(self, device: str, nbytes: int) -> None:
        super().__init__(device, nbytes)
        TensorMemory.births += 1
        self.birth = TensorMemory.births
        GlobalCounters.mem_used += nbytes

    def __del__(self) -> None:
        GlobalCounters.mem_used -= self.nbytes
        super().__del__()


def buffer_of(node: UOp) -> Buffer:
    """The memory of a BUFFER; its host data, if it was made from any, is copied in on first use, or used
    where it is."""
    found = _buffers.get(node)
    if found is None:
        nbytes = node.arg.size * node.dtype.itemsize
        data = storage.pop(node)
        if data is not None and nbytes and isinstance(data[1], (storage.Lent, storage.Borrowed)):
            lent = Device.get(node.arg.device).from_memory(data[1].address, nbytes, data[1])
            if lent is not None:
                _buffers[node] = lent
                return owned(node) if recorder else lent
        found = _buffers[node] = TensorMemory(node.arg.device, nbytes)
        if data is not None and nbytes:
            found.copyin(data[0])
    elif recorder and is_borrowed(found):  # a record names memory, which must not be exchanged later on
        return owned(node)
    return found


def buffer_so_far(node: UOp) -> Buffer | None:
    """The memory of a BUFFER if it has any yet."""
    return _buffers.get(node)


def is_borrowed(memory: Buffer) -> bool:
    """Whether memory belongs to an array of somebody else, and must not be written to."""
    return isinstance((memory.base or memory).keep, storage.Borrowed)


def owned(node: UOp) -> Buffer:
    """The memory of a BUFFER that is to be written: what is borrowed is copied."""
    found = _buffers.get(node)
    if found is None:
        found = buffer_of(node)
    if is_borrowed(found):
        copy = TensorMemory(found.device, found.nbytes)
        copy.copyin(memoryview(found.copyout()))
        found = _buffers[node] = copy
    return found


def adopt(node: UOp, buffer: Buffer) -> UOp:
    """Let a BUFFER node name existing memory."""
    _buffers[node] = buffer
    return node


# ---- execution ---------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """One executed call: a kernel (None: a copy from buffers[1] to buffers[0]) with its buffers and
    variables."""

    kernel: Kernel | None
    buffers: tuple[Buffer, ...]
    variables: tuple[tuple[str, int], ...] = ()

    def run(self) -> None:
        if self.kernel is None:
            self.buffers[0].copyin(memoryview(self.buffers[1].copyout()))
            return
        handles = [buffer.handle for buffer in self.buffers]
        if VALIDATE:
            from whit.engine.validate import run_and_compare

            run_and_compare(self)
            return
        seconds = self.kernel.program(handles, [value for _, value in self.variables], timing())
        account(self.kernel.work, seconds)


class _Turn:
    """Threads take turns: what one realizes is never part of another one's record, and plans are patched in
    place."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """A lock that nobody holds."""
        self.lock = RLock()


turn = _Turn()
os.register_at_fork(after_in_child=turn.renew)
recorder: list[Callable[[Step], None]] = []  # who wants to see every step (the JIT's capture)
arenas_of_record: dict[str, Buffer] = {}  # what holds the temporaries of the call that is being recorded
outsiders: set[int] = set()  # ids of the tensors that existed before the call that is being recorded
before_computing: list[Callable[[list[Tensor]], None]] = []  # who wants to see what is about to be computed
# and what is in memory now, with the graphs that it was
after_computing: list[Callable[[list[Tensor], list[UOp]], None]] = []
before_read: list[Callable[[Tensor], None]] = []  # who wants to know that Python reads a value
# BUFFERs that name a piece of another one: they must not be written
aliases: weakref.WeakSet[UOp] = weakref.WeakSet()


def execute(plan: Schedule, externals: Sequence[UOp], values: dict[str, int]) -> list[Buffer]:
    """Run a schedule on the given BUFFERs; the memory of every slot."""
    arenas = {device: _arena(device, nbytes) for device, nbytes in plan.arena.items()}
    memory: list[Buffer] = []
    for slot in plan.slots:
        if slot.external >= 0:
            whole = buffer_of(externals[slot.external])
            at = slot.start * slot.dtype.itemsize
            memory.append(whole.view(at, slot.nbytes) if slot.start >= 0 else whole)
        elif slot.offset >= 0:
            memory.append(arenas[slot.device].view(slot.offset, slot.nbytes))
        else:
            memory.append(TensorMemory(slot.device or _default(), slot.nbytes))
    prepare(list(_kernels_of(plan)))
    for call in plan.calls:
        operands = [memory[slot] for slot in call.slots]
        if (
            call.loop is not None
            and not (recorder or VALIDATE or timing())
            and _replayed(call.loop, operands)
        ):
            continue
        for step in _steps_of(call, plan, operands, values):
            step.run()
            for see in recorder:
                see(step)
    return memory


def _replayed(loop: Loop, operands: list[Buffer]) -> bool:
    """Run a loop as one table of calls, if there is one."""
    replay = replay_of(loop, operands, settings(), lambda stands: _steps_of_loop(loop, stands, {}))
    if replay is not None:
        replay.run(operands)
    return replay is not None


def _kernels_of(plan: Schedule) -> Iterator[tuple[UOp, str]]:
    """The kernels of a schedule, those of its loops included, and their devices."""
    for call in plan.calls:
        if call.loop is not None:
            yield from _kernels_of(call.loop.plan)
        elif call.ast is not None:
            yield call.ast, plan.slots[call.slots[0]].device or _default()


def _steps_of(call: Call, plan: Schedule, operands: list[Buffer], values: dict[str, int]) -> Iterator[Step]:
    """What a call runs, in order."""
    if call.loop is None:
        yield _step(call, plan, operands, values)
    else:
        yield from _steps_of_loop(call.loop, operands, values)


def _steps_of_loop(loop: Loop, operands: list[Buffer], values: dict[str, int]) -> Iterator[Step]:
    """Every step's calls, on the pieces of the stacked memories that belong to the step."""
    arenas = dict(zip(loop.plan.arena, operands[len(operands) - len(loop.plan.arena) :], strict=True))
    memory: list[Buffer] = [
        arenas[slot.device].view(slot.offset, slot.nbytes) if slot.offset >= 0 else operands[0]
        for slot in loop.plan.slots
    ]
    moving = [
        (n, place, slot.nbytes if slot.start < 0 else loop.plan.slots[slot.external].nbytes, slot)
        for n, slot in enumerate(loop.plan.slots)
        if slot.offset < 0 and (place := loop.place_of(n)) is not None
    ]
    before = 1 if loop.reverse else -1
    for number in range(loop.length):
        at = loop.length - 1 - number if loop.reverse else number
        for n, place, nbytes, slot in moving:
            operand, start = place.operand, max(slot.start, 0) * slot.dtype.itemsize
            if place.first >= 0 and number == 0:
                operand = place.first
            elif place.first >= 0:
                start += (at + before) * nbytes
            elif place.moves:
                start += at * nbytes
            memory[n] = operands[operand].view(start, slot.nbytes)
        for call in loop.plan.calls:
            yield from _steps_of(call, loop.plan, [memory[slot] for slot in call.slots], values)


def _arena(device: str, nbytes: int) -> Buffer:
    """Memory for the temporaries of a schedule. Those of one record run one after another, and share it."""
    shared = arenas_of_record.get(device) if recorder else None
    if shared is None or shared.nbytes < nbytes:
        shared = Buffer(device or _default(), nbytes)
        if recorder:
            arenas_of_record[device] = shared
    return shared


def _default() -> str:
    return Device.canonical(DEV.value)


def _step(call: Call, plan: Schedule, operands: list[Buffer], values: dict[str, int]) -> Step:
    buffers = tuple(operands)
    if call.ast is None:
        source = plan.slots[call.slots[1]]
        offset = call.source_offset * source.dtype.itemsize
        return Step(None, (buffers[0], buffers[1].view(offset, buffers[0].nbytes)))
    device = plan.slots[call.slots[0]].device or _default()
    free = [name for name in call.variables if name not in values]
    if free:
        raise ArgumentError(
            f"compute a value that depends on the variable {free[0]}",
            because="it has no value in this call",
            fix="bind it: variable.bind(3)",
        )
    return Step(compiled(call.ast, device), buffers, tuple([(name, values[name]) for name in call.variables]))


@contextlib.contextmanager
def recording(see: Callable[[Step], None]) -> Iterator[None]:
    """`see` is told of every step inside of the block."""
    recorder.append(see)
    try:
        yield
    finally:
        recorder.remove(see)
        arenas_of_record.clear()


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Nothing is recorded inside of the block."""
    saved = recorder[:]
    recorder.clear()
    try:
        yield
    finally:
        recorder[:] = saved


# ---- what nodes became -------------------------------------------------------------------------------------


def resolve(node: UOp, rebuilt: dict[UOp, UOp] | None = None) -> UOp:
    """The graph with everything that is already in memory replaced by its BUFFER. Writes that became other
    nodes by that are noted in `rebuilt`: once one is executed, the other is too."""
    nodes = node.toposort(_is_known)
    if not any([n.became is not None for n in nodes]):
        return node
    new: dict[UOp, UOp] = {}
    for n in nodes:
        if n.became is not None:
            new[n] = n.became
        else:
            src = tuple([new[s] for s in n.src])
            new[n] = n if src == n.src else n.replace(src=src)
            if n.op is Ops.AFTER and new[n] is not n and rebuilt is not None:
                rebuilt[n] = new[n]
    return new[node]


def resolve_all(nodes: list[UOp], rebuilt: dict[UOp, UOp] | None = None) -> list[UOp]:
    """`resolve` for several graphs in one walk over what they share."""
    return list(resolve(UOp.sink(*nodes), rebuilt).src)


def _is_known(node: UOp) -> bool:
    return node.became is not None


def _become(node: UOp, memory: UOp) -> None:
    """Remember that a node's value lies in memory now, so that graphs which hold it do not compute it
    again."""
    if node.device is None and node.op is not Ops.DETACH:
        return  # constants are everywhere, and stay what they are; a DETACH of one is somebody's leaf
    if node is not memory:
        node.became = memory
        _became.add(node)


_became: weakref.WeakSet[UOp] = weakref.WeakSet()  # the nodes with `became`


def forget_overwritten(memories: set[UOp]) -> None:
    """Graphs that are built from now on and read these BUFFERs mean their new contents, and equal graphs are
    one node: what such a node became is the old value, so it is forgotten. (Tensors that hold it were
    resolved before.)"""
    for node in list(_became):
        if _names(node, memories):
            node.became = None
            _became.discard(node)


def _names(node: UOp, memories: set[UOp], versions: bool = True) -> bool:
    """Whether a graph mentions one of the BUFFERs; not `versions`: as it is now, which an AFTER of it is
    not."""
    seen: set[UOp] = set()
    stack = [node]
    while stack:
        n = stack.pop()
        if n in memories:
            return True
        if n not in seen and (versions or n.op is not Ops.AFTER):
            seen.add(n)
            stack += n.src
    return False


# ---- realize -----------------------------------------------------------------------------------------------


def realize(tensors: Sequence[Tensor]) -> None:
    """Compute the tensors together. Afterwards each one's `uop` is a BUFFER or a contiguous view of one."""
    pending = [t for t in tensors if not is_realized(t.uop)]
    if marks.present.traces:  # what depends on an input without a value is computed once it has one
        pending = [t for t in pending if marks.stand_in_below(t.uop) is None]
    if pending:
        with turn.lock:
            _realize(pending)


def _realize(pending: list[Tensor]) -> None:
    for see in before_computing:
        see(pending)
    held = _held_contiguous(pending)
    if held:
        outer = [t for t in held if id(t) in outsiders]
        with paused():  # their values are fixed already: they are no part of what is recorded
            realize(outer)
        realize([t for t in held if id(t) not in outsiders])
    rebuilt: dict[UOp, UOp] = {}
    for tensor, graph in zip(pending, resolve_all([t.uop for t in pending], rebuilt), strict=True):
        tensor.uop = graph
    executed = _pending_writes([t.uop for t in pending])
    seen = 0
    while len(executed) > seen:  # readers come along, and so do the readers of what these overwrite in turn
        seen = len(executed)
        _refuse_alias_writes(executed)
        versions = {overwritten_version(store) for after in executed for store in after.src[1:]}
        for tensor in pending:  # what it was to be computed as may lie in memory by now, which is overwritten
            if contiguous_view(tensor.uop) is not None and reads_any(tensor.uop, versions, executed):
                tensor.uop = tensor.uop.copy_to(tensor.uop.device or _default())
        readers = readers_of(versions, {id(t) for t in pending}, set(executed))
        # who only reads from outside of a recorded call is no part of the record
        quiet = [t for t in readers if recorder and id(t) in outsiders and not _pending_writes([t.uop])]
        with paused():
            realize(quiet)
        done = {id(t) for t in quiet}
        inside = [t for t in readers if id(t) not in done]
        for tensor, graph in zip(inside, resolve_all([t.uop for t in inside], rebuilt), strict=True):
            tensor.uop = graph
        pending += inside
        executed = _pending_writes([t.uop for t in pending])
    roots = [t.uop for t in pending]
    beside = [] if executed else _written_beside(pending, roots)
    plan, externals, values = schedule(_bare([*roots, *beside]))
    overwritten = {memory_of(_overwritten_memory(after)) for after in executed}
    for written in overwritten:
        owned(written)
    memory = execute(plan, externals, values)
    if overwritten:
        forget_overwritten(overwritten)
    for output, result in zip(beside, plan.results[len(roots) :], strict=True):
        kept = _node_of(memory[result.slot], output, plan.slots[result.slot].size)
        history.remember(memory_of(kept), output)
        _become(output, kept)
    for tensor, root, result in zip(pending, roots, plan.results[: len(roots)], strict=True):
        base = contiguous_view(root)
        if base is not None:
            tensor.uop = _without_writes(root)
            continue
        slot = plan.slots[result.slot]
        node = memory[result.slot]
        buffer = _node_of(node, root, slot.size)
        if not executed:
            history.remember(memory_of(buffer), root)
        if not overwritten or not _names(root, overwritten, versions=False):
            _become(root, buffer)
            _become(stripped(root), _shaped(memory_of(buffer), stripped(root)))
        tensor.uop = buffer
    for after in executed:
        _become(after, _overwritten_memory(after))
    for before, after in rebuilt.items():
        if after.became is not None:
            _become(before, after.became)
    for look in after_computing:
        look(pending, roots)


def _written_beside(pending: list[Tensor], roots: list[UOp]) -> list[UOp]:
    """What kernels written by hand that run now write besides, if a tensor holds it: it will not have to be
    computed again."""
    calls = {node for node in UOp.sink(*roots).toposort() if node.op is Ops.CALL}
    if not calls:
        return []
    wanted, known = dict.fromkeys([stripped(root) for root in roots]), {id(t) for t in pending}
    found: dict[UOp, None] = {}
    for tensor in Tensor.live:
        node = tensor.uop
        while node.op.is_movement:
            node = node.src[0]
        is_new = node.op is Ops.OUTPUT and node.became is None and node not in wanted
        if is_new and node.src[0] in calls and id(tensor) not in known:
            found[node] = None
    return list(found)


def _bare(roots: list[UOp]) -> list[UOp]:
    """The values without marks of transforms. One that is a piece of memory below its marks is copied, so
    that the memory remembers them."""
    return [
        bare.copy_to(bare.device or _default())
        if bare is not root and contiguous_view(bare) is not None and contiguous_view(root) is None
        else bare
        for root, bare in zip(roots, marks.unmarked(roots), strict=True)
    ]


def _held_contiguous(pending: Sequence[Tensor]) -> list[Tensor]:
    """Tensors that these depend on, that asked for memory and that somebody still holds, such as parameters
    at their first use: they are computed once and keep it."""
    nodes = {n for n in UOp.sink(*[t.uop for t in pending]).toposort(_is_known) if n.op is Ops.CONTIGUOUS}
    nodes -= {t.uop for t in pending}
    return [t for t in Tensor.live if t.uop in nodes and t.uop.became is None] if nodes else []


def _overwritten_memory(after: UOp) -> UOp:
    """What the first of a chain of writes wrote to: all of them have happened."""
    while after.op is Ops.AFTER:
        after = after.src[0]
    return after


# weak in both directions: a node keeps its memory alive, not the other way round
_nodes: weakref.WeakKeyDictionary[Buffer, weakref.ref[UOp]] = weakref.WeakKeyDictionary()


def _node_of(memory: Buffer, root: UOp, size: int) -> UOp:
    """A BUFFER node for new memory, seen in the root's shape."""
    known = _nodes.get(memory)
    node = known() if known is not None else None
    if node is None:
        node = adopt(UOp.new_buffer(size, root.dtype, memory.device), memory)
        _nodes[memory] = weakref.ref(node)
    return _shaped(node, root)


def _shaped(node: UOp, like: UOp) -> UOp:
    count = prod(like.shape)
    if not all_int(like.shape) or count != node.arg.size:  # symbolic sizes use the front of the greatest
        node = node.shrink(((0, count),))
    return node.reshape(like.shape)


def is_realized(node: UOp) -> bool:
    """Whether a value is a contiguous piece of a BUFFER with no write pending on it."""
    while node.op is not Ops.BUFFER:
        if node.op is Ops.AFTER or node.op not in _VIEW_OPS:
            return False
        if node.op is Ops.SHRINK and contiguous_view(node) is None:
            return False
        node = node.src[0]
    return True


_VIEW_OPS = frozenset({Ops.RESHAPE, Ops.DETACH, Ops.CONTIGUOUS, Ops.SHRINK, Ops.BITCAST})


def _pending_writes(roots: list[UOp]) -> list[UOp]:
    """The AFTERs that computing the roots will execute."""
    return [node for node in UOp.sink(*roots).toposort() if node.op is Ops.AFTER]


def _without_writes(node: UOp) -> UOp:
    """A view of an AFTER as a view of the memory itself, once the writes have happened."""
    views = []
    while node.src:
        if node.op is not Ops.AFTER:
            views.append(node)
        node = node.src[0]
    for view in reversed(views):
        node = view.replace(src=(node, *view.src[1:]))
    return node


def _refuse_alias_writes(executed: list[UOp]) -> None:
    for after in executed:
        if memory_of(after) in aliases:
            raise ArgumentError(
                f"assign to an argument of shape {after.shape} inside a jitted function",
                because="the argument is a slice of a larger tensor, whose memory it shares",
                fix="pass the slice's .clone(), or the whole tensor, and assign to that",
            )


def readers_of(versions: set[UOp], known: set[int], executed: Collection[UOp] = ()) -> list[Tensor]:
    """Live tensors (but for those of the ids `known`) that read a version about to be overwritten, ready to
    be realized before the write: what is computed from the version stays as it is, what is the version itself
    becomes a copy of it."""
    found = []
    memories = {memory_of(_overwritten_memory(version)) for version in versions}
    history.forget_readers(versions)
    others = [tensor for tensor in Tensor.live if id(tensor) not in known]
    for tensor, node in zip(others, resolve_all([t.uop for t in others]), strict=True):
        if not reads_any(node, versions, executed):
            if node is not tensor.uop and _names(tensor.uop, memories):  # it means the old contents
                tensor.uop = node
            continue
        is_old = contiguous_view(node) is not None and _version_below(node) in versions
        tensor.uop = node.copy_to(node.device or _default()) if is_old else node
        found.append(tensor)
    return found


def _version_below(view: UOp) -> UOp:
    """The BUFFER, or the AFTER, that a view shows."""
    while view.op is not Ops.BUFFER and view.op is not Ops.AFTER:
        view = view.src[0]
    return view


def reads_any(node: UOp, versions: set[UOp], executed: Collection[UOp]) -> bool:
    """Whether a graph reads the value of one of the versions (being written to is not reading). What the
    writes in `executed` read does not count: they happen now, and what follows them finds their result in
    memory."""
    if node in versions:
        return True
    seen: set[UOp] = set()
    stack = [node]
    while stack:
        n = stack.pop()
        if n in seen:
            continue
        seen.add(n)
        if n in versions:
            return True
        if n.op is Ops.AFTER:
            while n.op is Ops.AFTER and n not in executed:  # and the writes that come before it
                stack += [store.src[1] for store in n.src[1:]]
                n = n.src[0]
        else:
            stack += n.src
    return False


def read(tensor: Tensor) -> memoryview:
    """A tensor's elements, row-major, as host bytes."""
    with turn.lock:
        return _read(tensor)


def _read(tensor: Tensor) -> memoryview:
    for see in before_read:
        see(tensor)
    refuse_stand_in(tensor.uop)
    if tensor.uop.device is None or not is_realized(tensor.uop):
        realize([tensor])
    view = contiguous_view(tensor.uop)
    assert view is not None, "a realized tensor is a view of memory"
    base, offset = view
    buffer = buffer_of(memory_of(base))
    count = value_of(prod(tensor.shape))
    itemsize = tensor.dtype.itemsize
    whole = buffer.view(value_of(offset) * itemsize, count * itemsize)
    return memoryview(whole.copyout())


def refuse_stand_in(node: UOp) -> None:
    """ArgumentError for a value that depends on the inputs of a traced function."""
    found = marks.stand_in_below(node) if marks.used else None
    if found is not None:
        raise ArgumentError(
            f"reading a value inside of {found.arg.by}",
            because="the function is traced, and its arguments have no values meanwhile",
            fix="return the tensor and read it outside, or choose with where()",
        )


def value_of(size: Any) -> int:
    """A size with its bound variables replaced by their values."""
    if isinstance(size, int):
        return size
    from whit.uop.symbolic import simplify

    result = simplify(size.substitute({n: n.src[1] for n in size.toposort() if n.op is Ops.BIND}))
    assert result.op is Ops.CONST, f"the size {size} has an unbound variable"
    return int(result.arg)
