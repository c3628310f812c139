"""TinyJit: run a function's kernels again without running its Python.

The first call with a signature runs the function; the second runs it and records every kernel; later ones
replay the record as one native plan. The signature holds shapes, dtypes and devices of the tensors, which of
them share memory, every Python value among the arguments, and the scalars that the function reads from its
closure, its globals and its object.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import sys
import warnings
import weakref
from _thread import get_ident
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Generic, ParamSpec, TypeVar, cast

from whit.autograd import marks
from whit.engine.counters import GlobalCounters, timing
from whit.engine.realize import (
    Step,
    TensorMemory,
    adopt,
    aliases,
    before_read,
    buffer_of,
    is_realized,
    outsiders,
    owned,
    readers_of,
    realize,
    recording,
    resolve,
    turn,
    value_of,
)
from whit.helpers import JIT, ArgumentError, blake2b, log, prod
from whit.runtime.device import Buffer, Device, Plan, PlanCall
from whit.schedule.movement import contiguous_view, memory_of
from whit.tensor import Tensor, storage
from whit.tensor import random as random_
from whit.uop import DType, Ops, UOp

P = ParamSpec("P")
R = TypeVar("R")
CAPTURES = 32  # signatures kept per function
_running: list[TinyJit[Any, Any]] = []


# ---- signatures --------------------------------------------------------------------------------------------


@dataclass
class Inputs:
    """Arguments taken apart: a hashable description, the tensors and the values of bound variables."""

    key: list[Hashable] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    values: dict[str, int] = field(default_factory=dict)
    keep: list[Any] = field(default_factory=list)  # objects known by identity

    def add(self, value: Any, path: str) -> None:
        if isinstance(value, Tensor):
            self.key.append("tensor")
            self.tensors.append(value)
        elif isinstance(value, UOp) and value.op is Ops.BIND:
            variable, number = value.unbind()
            self.bind(variable.arg.name, number, path)
            self.key += ["variable", variable.arg]
        elif isinstance(value, (bool, int, float, str, bytes, type(None), DType, UOp)):
            self.key += [type(value).__name__, repr(value) if isinstance(value, float) else value]
        elif isinstance(value, (list, tuple)):
            self.key += [type(value).__name__, len(value)]
            for number, item in enumerate(value):
                self.add(item, f"{path}[{number}]")
        elif isinstance(value, dict):
            self.key += ["dict", tuple(value)]
            for name, item in value.items():
                self.add(item, f"{path}[{name!r}]")
        elif hasattr(value, "__array_interface__"):
            raise ArgumentError(
                f"jit: {path} is a {type(value).__name__}",
                because="its contents could change unseen between calls",
                fix="pass Tensor(array) instead",
            )
        else:
            self.key += ["object", id(value)]
            self.keep.append(value)

    def bind(self, name: str, value: int, path: str) -> None:
        if self.values.setdefault(name, value) != value:
            raise ArgumentError(
                f"jit: {path} binds {name} to {value}",
                because=f"another argument binds it to {self.values[name]}",
                fix="use one value per variable and call",
            )

    def describe_tensors(self) -> None:
        """Append shape, dtype, device and sharing of the (realized) tensors."""
        first: dict[tuple[UOp, int], int] = {}
        for number, tensor in enumerate(self.tensors):
            shape = []
            for size in tensor.shape:
                if isinstance(size, UOp):
                    binds = [n for n in size.toposort() if n.op is Ops.BIND]
                    for node in binds:
                        self.bind(node.src[0].arg.name, node.src[1].arg, f"the shape of tensor {number}")
                    size = size.substitute({n: n.src[0] for n in binds})
                shape.append(size)
            base, offset = _place(tensor)
            self.key += [
                tuple(shape),
                tensor.dtype,
                base.arg.device,
                base.dtype,
                first.setdefault((base, offset), number),
                _is_whole(tensor),
                tensor.requires_grad,
            ]


def _place(tensor: Tensor) -> tuple[UOp, int]:
    """(BUFFER, offset in elements) of a realized tensor."""
    view = contiguous_view(tensor.uop)
    assert view is not None, "inputs were realized"
    return memory_of(view[0]), value_of(view[1])


def _is_whole(tensor: Tensor) -> bool:
    base, offset = _place(tensor)
    return offset == 0 and bool(prod(tensor.shape) == base.arg.size)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)


def _rebuild(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The same structure with other tensors."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, (list, tuple)):
        items = [_rebuild(item, tensors) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {name: _rebuild(item, tensors) for name, item in value.items()}
    return value


_SCALARS = (bool, int, float, str, type(None))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _names_read(code: CodeType) -> tuple[set[str], set[str]]:
    """(globals, attributes of the first argument) that a function and the functions inside it read."""
    globals_: set[str] = set()
    attributes: set[str] = set()
    itself = code.co_varnames[0] if code.co_argcount else ""
    for part in _codes(code):
        before = None
        for step in dis.get_instructions(part):
            if step.opname.startswith("LOAD_GLOBAL"):
                globals_.add(step.argval)
            elif (
                step.opname.startswith(("LOAD_ATTR", "LOAD_METHOD"))
                and before is not None
                and before.opname.startswith(("LOAD_FAST", "LOAD_DEREF"))
                and before.argval == itself
            ):
                attributes.add(step.argval)
            before = step
    return globals_, attributes


class Surroundings:
    """The Python scalars that a function, and a function that it wraps (`functools.wraps`), reads besides its
    arguments: closure cells, globals, attributes of its object."""

    def __init__(self, function: Callable[..., Any], instance: Any) -> None:
        self.cells: list[tuple[str, Any]] = []
        self.globals: list[tuple[dict[str, Any], list[str]]] = []
        self.instance = instance
        attributes: set[str] = set()
        inner: Any = function
        while inner is not None:
            code = getattr(inner, "__code__", None)
            if code is not None:
                names, own = _names_read(code)
                self.cells += zip(code.co_freevars, getattr(inner, "__closure__", None) or ())
                self.globals.append((inner.__globals__, sorted(names & set(inner.__globals__))))
                attributes |= own
            inner = getattr(inner, "__wrapped__", None)
        self.attributes = sorted(attributes) if instance is not None else []

    def scalars(self) -> list[Hashable]:
        found: list[Hashable] = []
        for name, cell in self.cells:
            with contextlib.suppress(ValueError):  # a cell that is not filled yet
                if isinstance(cell.cell_contents, _SCALARS):
                    found += [name, type(cell.cell_contents).__name__, repr(cell.cell_contents)]
        for values, names in self.globals:
            for name in names:
                value = values.get(name)
                if isinstance(value, _SCALARS):
                    found += [name, type(value).__name__, repr(value)]
        state = getattr(self.instance, "__dict__", {})
        for name in self.attributes:
            if isinstance(state.get(name, self), _SCALARS):
                found += [name, type(state[name]).__name__, repr(state[name])]
        return found


# ---- capture -----------------------------------------------------------------------------------------------


@dataclass
class _Trace:
    """What one call of the function did: its kernels, and the Python data that became tensors."""

    steps: list[Step] = field(default_factory=list)
    data: list[tuple[UOp, bytes]] = field(default_factory=list)
    born_after: int = 0
    # the tensors that existed already; emptied after the capture
    before: list[Tensor] = field(default_factory=list)

    def constants(self) -> list[bytes]:
        """Digests of the Python data, random keys aside."""
        return [digest for node, digest in self.data if node not in random_.key_buffers]


@dataclass
class _Output:
    """A tensor of the result: a fresh one per call (`root` is the memory it was captured in), or one that
    existed before."""

    uop: UOp
    root: Buffer | None
    existing: Tensor | None = None
    argument: int = -1
    requires_grad: bool | None = None


class Captured:
    """A recorded call: native plans, with slots for the inputs, the outputs and the variables."""

    def __init__(
        self,
        trace: _Trace,
        inputs: list[Buffer],
        outputs: list[_Output],
        result: Any,
        values: dict[str, int],
        input_nodes: list[UOp],
        kept: set[int],
    ) -> None:
        self.outputs, self.result, self.trace = outputs, result, trace
        self.kept = kept  # inputs that the function overwrites through an alias: it writes to a copy
        self.slots: dict[tuple[int, int], int] = {}
        self.handles: list[Any] = []
        self.value_names = list(values)
        # per input: (slot, bytes from its start)
        self.input_slots: list[list[tuple[int, int]]] = [[] for _ in inputs]
        self.output_slots: dict[int, list[tuple[int, int]]] = {}  # by id of the captured root
        self.pinned: list[Any] = [trace, inputs]
        self.roots = {id(o.root): o.root for o in outputs if o.root is not None}
        self.inputs = {id(b.base or b): (n, b.offset) for n, b in reversed(list(enumerate(inputs)))}
        self.segments: list[Callable[[list[Any], list[int]], None]] = []
        self._make_segments(trace.steps)
        self.refresh = [(buffer_of(node), node) for node, _ in trace.data if node in random_.key_buffers]
        self.works = [step.kernel.work for step in trace.steps if step.kernel is not None]
        self.totals = (sum(w.flops for w in self.works), sum(w.nbytes for w in self.works), len(self.works))
        self._watch_state(trace, inputs, input_nodes)

    def _slot(self, buffer: Buffer) -> int:
        root = buffer.base or buffer
        key = (id(root), buffer.offset)
        found = self.slots.get(key)
        if found is None:
            found = self.slots[key] = len(self.handles)
            self.handles.append(buffer.handle)
            self.pinned.append(buffer)
            if id(root) in self.inputs:
                number, start = self.inputs[id(root)]
                self.input_slots[number].append((found, buffer.offset - start))
            elif id(root) in self.roots:
                self.output_slots.setdefault(id(root), []).append((found, buffer.offset))
        return found

    def _make_segments(self, steps: list[Step]) -> None:
        run: list[PlanCall] = []
        device = ""
        for step in steps:
            slots = tuple([self._slot(buffer) for buffer in step.buffers])
            if step.kernel is None:
                self._close(run, device)
                run = []
                self.segments.append(functools.partial(_copy_slots, step, slots))
                continue
            if step.kernel.device != device:
                self._close(run, device)
                run, device = [], step.kernel.device
            run.append(
                PlanCall(
                    step.kernel.program, slots, tuple([self.value_names.index(n) for n, _ in step.variables])
                )
            )
        self._close(run, device)

    def _close(self, run: list[PlanCall], device: str) -> None:
        if run:
            runtime = Device.get(device)
            plan = Plan(run) if JIT.value == 2 else runtime.plan(run)
            self.pinned.append(plan)
            self.segments.append(plan.run)

    # ---- state that the plan writes in place

    def _watch_state(self, trace: _Trace, inputs: list[Buffer], input_nodes: list[UOp]) -> None:
        written = {
            id(step.buffers[slot].base or step.buffers[slot])
            for step in trace.steps
            for slot in (range(_stores(step)) if step.kernel is not None else (0,))
        }
        self.written_inputs = [
            n for n, b in enumerate(inputs) if id(b.base or b) in written and n not in self.kept
        ]
        holders = [t for t in Tensor.live if is_realized(t.uop)]
        self.state: set[UOp] = set()
        self.holders: list[weakref.ref[Tensor]] = []
        for tensor in holders:
            node = memory_of(tensor.uop)
            memory = buffer_of(node)
            if (
                id(memory) in written
                and node not in input_nodes
                and (not isinstance(memory, TensorMemory) or memory.birth <= trace.born_after)
            ):
                self.state.add(node)
                self.holders.append(weakref.ref(tensor))
        watched = {n for h in self.holders if (t := h()) is not None for n in _chain(t.uop)}
        self.watched = list(watched)
        del watched, holders
        self.counts: list[int] | None = None

    def protect(self, tensors: list[Tensor]) -> None:
        """Readers of state that is about to be overwritten are computed (or copied) first. Reference counts
        tell cheaply that there are none."""
        versions = {memory_of(tensors[n].uop) for n in self.written_inputs}
        counts = [sys.getrefcount(node) for node in self.watched]
        if self.counts is None or any(now > then for now, then in zip(counts, self.counts)):
            versions |= self.state
        if versions:
            known = {id(t) for t in tensors} | {id(h()) for h in self.holders}
            realize(readers_of(versions, known))
            self.counts = [sys.getrefcount(node) for node in self.watched]

    # ---- replay

    def run(self, tensors: list[Tensor], values: dict[str, int]) -> Any:
        """Replay on these inputs; the result belongs to the caller."""
        self.protect(tensors)
        for memory, node in self.refresh:
            key, first = random_.next_key(random_.key_buffers[node][1])
            memory.copyin(memoryview(random_.key_bytes(key, first)))
        handles = self.handles
        copies = []
        for number, (tensor, slots) in enumerate(zip(tensors, self.input_slots)):
            if slots:
                if number in self.kept:
                    tensor = tensor.clone()
                    realize([tensor])
                    copies.append(tensor)
                base, offset = _place(tensor)
                start = owned(base) if number in self.written_inputs else buffer_of(base)
                device = Device.get(start.device)
                for slot, shift in slots:
                    handles[slot] = device.offset(start.handle, offset * base.dtype.itemsize + shift)
        fresh: dict[int, Buffer] = {}
        for key, root in self.roots.items():
            memory = fresh[key] = TensorMemory(root.device, root.nbytes)
            device = Device.get(root.device)
            for slot, shift in self.output_slots.get(key, ()):
                handles[slot] = device.offset(memory.handle, shift) if shift else memory.handle
        numbers = [values[name] for name in self.value_names]
        if timing():
            self._run_timed(handles, numbers)
        else:
            for segment in self.segments:
                segment(handles, numbers)
            GlobalCounters.global_ops += self.totals[0]
            GlobalCounters.global_mem += self.totals[1]
            GlobalCounters.kernel_count += self.totals[2]
        made: dict[int, UOp] = {}
        return _rebuild(
            self.result, iter([self._output(o, fresh, made, tensors, values) for o in self.outputs])
        )

    def _run_timed(self, handles: list[Any], numbers: list[int]) -> None:
        """DEBUG=2 and PROFILE: kernel by kernel."""
        from whit.engine.counters import account

        for step in self.trace.steps:
            slots = tuple([self.slots[id(b.base or b), b.offset] for b in step.buffers])
            if step.kernel is None:
                _copy_slots(step, slots, handles, numbers)
                continue
            variables = [numbers[self.value_names.index(n)] for n, _ in step.variables]
            account(step.kernel.work, step.kernel.program([handles[s] for s in slots], variables, True))

    def _output(
        self,
        output: _Output,
        fresh: dict[int, Buffer],
        made: dict[int, UOp],
        tensors: list[Tensor],
        values: dict[str, int],
    ) -> Tensor:
        if output.existing is not None:
            return output.existing
        if output.argument >= 0:
            return tensors[output.argument]
        key = id(output.root)
        base = memory_of(output.uop)
        node = made.get(key)
        if node is None:
            node = made[key] = adopt(UOp.new_buffer(base.arg.size, base.dtype, base.arg.device), fresh[key])
        tensor = Tensor._wrap(_moved(output.uop, base, node, values))
        tensor._requires_grad = output.requires_grad
        return tensor


def _trim() -> None:
    """Give idle memory back to the system."""
    for device in Device.opened.values():
        device.trim()


def _stores(step: Step) -> int:
    """How many of a kernel's first buffers it writes."""
    assert step.kernel is not None
    ends = [end.src[0] if end.op is Ops.END else end for end in step.kernel.ast.src]
    memories = [end.src[0] for end in ends if end.op is Ops.STORE]
    return 1 + max([int(memory.arg.slot) for memory in memories if memory.op is Ops.PARAM])


def _chain(node: UOp) -> Iterator[UOp]:
    while True:
        yield node
        if not node.src:
            return
        node = node.src[0]


def _copy_slots(step: Step, slots: tuple[int, ...], handles: list[Any], values: list[int]) -> None:
    """Replay a copy between devices."""
    (target, source), (to, origin) = slots, step.buffers
    data = bytearray(origin.nbytes)
    Device.get(origin.device).copyout(memoryview(data), handles[source])
    Device.get(to.device).copyin(handles[target], memoryview(data))


def _moved(view: UOp, base: UOp, node: UOp, values: dict[str, int]) -> UOp:
    """The same view of another BUFFER, with bound variables at their present values."""
    if view is base:
        return node
    arg = view.arg
    if values:
        arg = _rebound(arg, values)
    return view.replace(src=(_moved(view.src[0], base, node, values),), arg=arg)


def _rebound(arg: Any, values: dict[str, int]) -> Any:
    if isinstance(arg, UOp):
        return arg.substitute(
            {
                n: n.src[0].bind(values[n.src[0].arg.name])
                for n in arg.toposort()
                if n.op is Ops.BIND and n.src[0].arg.name in values
            }
        )
    return tuple([_rebound(item, values) for item in arg]) if isinstance(arg, tuple) else arg


# ---- the jit -----------------------------------------------------------------------------------------------


class TinyJit(Generic[P, R]):
    """Decorate a function of tensors; see the module's text.

    Results belong to the caller: later calls never change them. Tensors that the function assigns to (its
    arguments, or state it holds) advance on every call; random numbers differ per call. Reading a value
    inside (`.item()`, `.numpy()`) is refused, since the replay could not take another branch.

    >>> from whit import Tensor, TinyJit
    >>> double = TinyJit(lambda x: (x * 2).realize())
    >>> [double(Tensor([n])).item() for n in (1, 2, 3)]
    [2, 4, 6]
    """

    def __init__(self, function: Callable[P, R]) -> None:
        if not callable(function):
            raise ArgumentError(
                f"TinyJit({function!r})", because="it is no function", fix="decorate a function of tensors"
            )
        functools.update_wrapper(self, function)
        self.function = function
        self.name: str = getattr(function, "__name__", "a function")
        self._surroundings = Surroundings(function, None)
        self._seen: dict[tuple[Hashable, ...], list[bytes]] = {}
        self._captured: dict[tuple[Hashable, ...], Captured | None] = {}
        self._bound: dict[int, tuple[weakref.ref[Any], TinyJit[Any, Any]]] = {}
        self._warned = False

    def __get__(self, instance: Any, owner: type | None = None) -> TinyJit[Any, R]:
        """A jitted method has captures of its own for every object."""
        if instance is None:
            return self
        found = self._bound.get(id(instance))
        if found is None or found[0]() is not instance:
            bound: TinyJit[Any, R] = TinyJit(functools.partial(cast(Any, self.function), instance))
            functools.update_wrapper(bound, self.function)
            bound._surroundings = Surroundings(self.function, weakref.proxy(instance))
            bound.function = _method(self.function, instance)
            key = id(instance)

            def forget(_: object) -> None:
                self._bound.pop(key, None)

            found = self._bound[key] = (weakref.ref(instance, forget), bound)
        return found[1]

    def reset(self) -> None:
        """Forget all captures."""
        self._seen.clear()
        self._captured.clear()

    @property
    def captures(self) -> int:
        """How many signatures are recorded."""
        return sum(1 for c in self._captured.values() if c is not None)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if not JIT.value or marks.present.transforms:  # a transform needs the graph, not a record
            return self.function(*args, **kwargs)
        with turn.lock:
            if _running:
                return self.function(*args, **kwargs)  # a jit inside of a jit is part of the outer one
            return self._call(*args, **kwargs)

    def _call(self, *args: P.args, **kwargs: P.kwargs) -> R:
        inputs = Inputs()
        for number, value in enumerate(args):
            inputs.add(value, f"argument {number}")
        for name in sorted(kwargs):
            inputs.key.append(name)
            inputs.add(kwargs[name], f"argument {name}")
        pending = [t for t in inputs.tensors if not is_realized(t.uop)]
        if pending:
            realize(pending)
        inputs.describe_tensors()
        key = (*inputs.key, *self._surroundings.scalars(), _settings())
        captured = self._captured.get(key)
        if captured is not None:
            return cast(R, captured.run(inputs.tensors, inputs.values))
        if key in self._captured:  # recorded nothing: there is nothing to replay
            return self.function(*args, **kwargs)
        if key not in self._seen:
            self._remember(key, inputs)
            result, trace, _ = self._traced(inputs, args, kwargs)
            self._seen[key] = trace.constants()
            return result
        # what a capture allocates stays: neither in blocks that are larger than need be, nor beside idle ones
        _trim()
        result, trace, nodes = self._traced(inputs, args, kwargs)
        result = self._capture(key, inputs, result, trace, nodes)
        _trim()
        return result

    def _remember(self, key: tuple[Hashable, ...], inputs: Inputs) -> None:
        """Bound the number of signatures, oldest out first."""
        while len(self._seen) >= CAPTURES:
            oldest = next(iter(self._seen))
            del self._seen[oldest]
            self._captured.pop(oldest, None)
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"jit of {self.name}: more than {CAPTURES} signatures, the oldest are dropped. A Python "
                    "number that changes on every call belongs in a Tensor or a bound Variable",
                    stacklevel=4,
                )
        self._kept = [*getattr(self, "_kept", [])[-CAPTURES:], inputs.keep]

    def _traced(self, inputs: Inputs, args: Any, kwargs: Any) -> tuple[R, _Trace, list[UOp]]:
        """Run the function once, seeing what it does. Slices stand in as tensors of their own, so that the
        offset at which an argument lies is not part of the kernels."""
        trace = _Trace(born_after=TensorMemory.births, before=list(Tensor.live))
        originals: list[tuple[Tensor, UOp, UOp]] = []
        for tensor in dict.fromkeys(inputs.tensors):
            owned(memory_of(tensor.uop))
            if not _is_whole(tensor):
                alias = _alias_of(tensor)
                originals.append((tensor, tensor.uop, alias))
                tensor.uop = alias
        nodes = [memory_of(t.uop) for t in inputs.tensors]

        thread = get_ident()

        def see_data(node: UOp, data: memoryview) -> None:
            if get_ident() == thread:
                trace.data.append((node, blake2b(data, digest_size=16).digest()))

        outsiders.update(id(t) for t in trace.before)
        _running.append(self)
        storage.on_put.append(see_data)
        before_read.append(_refuse_read)
        try:
            with recording(trace.steps.append):
                result = self.function(*args, **kwargs)
                returned = list(_tensors_in(result))
                advanced = [
                    t
                    for t in Tensor.live
                    if t.uop.op is Ops.AFTER or any(n.op is Ops.AFTER for n in _chain(t.uop))
                ]
                realize([*returned, *advanced])
        finally:
            _running.pop()
            outsiders.clear()
            storage.on_put.remove(see_data)
            before_read.remove(_refuse_read)
            for tensor, uop, alias in originals:
                if tensor.uop is alias:
                    tensor.uop = uop
        return result, trace, nodes

    def _capture(
        self, key: tuple[Hashable, ...], inputs: Inputs, result: R, trace: _Trace, nodes: list[UOp]
    ) -> R:
        if trace.constants() != self._seen[key]:
            raise ArgumentError(
                f"jit of {self.name}",
                because="it makes a tensor from Python data that differed between two equal calls",
                fix="pass that data as a Tensor argument",
            )
        stray = sorted({name for step in trace.steps for name, _ in step.variables} - set(inputs.values))
        if stray:
            raise ArgumentError(
                f"jit: variable {', '.join(stray)} is bound inside the function",
                because="the replay would keep its present value",
                fix="pass the bound Variable as an argument",
            )
        if not trace.steps:
            self._captured[key] = None
            return result
        existing = {id(t): n for n, t in reversed(list(enumerate(inputs.tensors)))}
        outputs = []
        with recording(trace.steps.append):
            for tensor in _tensors_in(result):
                outputs.append(_describe_output(tensor, existing, trace, nodes))
        trace.before.clear()
        buffers = [buffer_of(node) for node in nodes]
        kept = self._moved_inputs(inputs, trace, nodes)
        self._captured[key] = Captured(trace, buffers, outputs, _shell(result), inputs.values, nodes, kept)
        log(1, f"jit: captured {len(trace.steps)} kernels of {self.name}")
        return result


    def _moved_inputs(self, inputs: Inputs, trace: _Trace, nodes: list[UOp]) -> set[int]:
        """The arguments that lie in other memory after the call: their own was overwritten through an alias,
        from which they were saved. ArgumentError if the function itself made them other tensors."""
        written = {
            id(b.base or b)
            for step in trace.steps
            for b in step.buffers[: _stores(step) if step.kernel is not None else 1]
        }
        moved = set()
        for n, (tensor, node) in enumerate(zip(inputs.tensors, nodes)):
            realized = is_realized(tensor.uop)
            memory = buffer_of(memory_of(tensor.uop)) if realized else None
            if memory is buffer_of(node) or (realized and not _is_whole(tensor)):
                continue
            if memory is None or id(memory.base or memory) in written:
                raise ArgumentError(
                    f"jit of {self.name}: tensor {n} of its arguments",
                    because="the function makes it another tensor, which a replay cannot do for the caller",
                    fix="write to it with assign or x[...] = value, or return the new tensor",
                )
            moved.add(n)
        return moved


def _method(function: Callable[..., Any], instance: Any) -> Callable[..., Any]:
    """The function bound to an object that it does not keep alive."""
    reference = weakref.ref(instance)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(reference(), *args, **kwargs)

    return call


def _settings() -> Hashable:
    from whit.helpers import BEAM, NOOPT, TRAINING, TUNED

    return TRAINING.value, BEAM.value, NOOPT.value, JIT.value, TUNED.value


def _alias_of(tensor: Tensor) -> UOp:
    """A BUFFER that names just the piece of memory that a slice sees."""
    base, offset = _place(tensor)
    size = value_of(prod(tensor.shape))
    memory = buffer_of(base).view(offset * base.dtype.itemsize, size * base.dtype.itemsize)
    node = adopt(UOp.new_buffer(size, tensor.dtype, base.arg.device), memory)
    aliases.add(node)
    return node.reshape(tensor.shape)


def _refuse_read(tensor: Tensor) -> None:
    raise ArgumentError(
        f"reading a {tensor.dtype} tensor of shape {tensor.shape} inside a jitted function",
        because="a replay does not run the Python that the value would influence",
        fix="return the tensor and read it outside, or choose with where()",
    )


def _describe_output(tensor: Tensor, arguments: dict[int, int], trace: _Trace, nodes: list[UOp]) -> _Output:
    """How a replay makes this tensor of the result."""
    if id(tensor) in arguments:
        return _Output(tensor.uop, None, argument=arguments[id(tensor)])
    memory = buffer_of(memory_of(tensor.uop))
    fresh = isinstance(memory, TensorMemory) and memory.birth > trace.born_after
    written = any(
        memory is (step.buffers[0].base or step.buffers[0])
        or (step.kernel is not None
        and any(memory is (b.base or b) for b in step.buffers[: _stores(step)]))
        for step in trace.steps
    )
    shared = memory_of(tensor.uop) in nodes
    if not (fresh and written and not shared):
        if any(t is tensor for t in trace.before):
            return _Output(tensor.uop, None, existing=tensor)
        tensor.uop = resolve(tensor.uop).copy_to(tensor.device)
        realize([tensor])
        memory = buffer_of(memory_of(tensor.uop))
    return _Output(tensor.uop, memory, requires_grad=tensor.requires_grad)


def _shell(result: Any) -> Any:
    """The structure of a result without its tensors, which must not be kept alive."""
    return _rebuild(result, itertools.repeat(Tensor._wrap(UOp.index(0))))
