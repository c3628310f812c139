"""function: a graph that is built once and applied to many arguments."""

from __future__ import annotations

import functools
import weakref
from _thread import get_ident
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from whit.autograd.marks import Given, on_rebuilt, stand_in, transforming
from whit.engine.jit import Surroundings
from whit.engine.realize import turn
from whit.helpers import TRAINING, ArgumentError, prod
from whit.tensor import Tensor, storage
from whit.tensor import random as random_
from whit.transforms import trees
from whit.uop import DType, Ops, UOp, dtypes
from whit.uop.rewrite import rebuild
from whit.uop.uop import fresh_uid, show_shape

TRACES = 32  # kept per function


def function(traced: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the function runs once for each kind of arguments; later calls put their tensors into the
    graph that it built. For functions that cost much Python, called often: the result is lazy, as the
    function's own, fuses with what is around it, and has gradients.

    What tells kinds of arguments apart: shapes, dtypes and devices of tensors, the lists, tuples and dicts
    around them, all other arguments, and the scalars that the function reads from its closure, globals or
    object. Tensors from outside (weights) are read anew at every call, with their gradients; random numbers
    are new ones. Values cannot be read inside, and nothing can be written in place.

    Shapes, dtypes and errors: those of the function; ArgumentError for reads and writes.

    >>> calls = []
    >>> @function
    ... def affine(x, w):
    ...     calls.append(1)
    ...     return x * w + 1
    >>> [affine(Tensor([n]), Tensor([2.0])).item() for n in (1.0, 2.0, 3.0)], len(calls)
    ([3.0, 5.0, 7.0], 1)
    """
    trees.check_function("function", traced)
    traces: dict[Hashable, _Trace] = {}
    plain = Surroundings(traced, None)

    @functools.wraps(traced)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = trees.leaves((args, kwargs))
        owner = args[0] if args and _is_object(args[0]) else None
        around = plain if owner is None else Surroundings(traced, owner)
        key = (
            trees.structure((args, kwargs)),
            *[_kind(leaf) for leaf in given],
            *around.scalars(),
            TRAINING.value,
        )
        found = traces.get(key)
        if found is None or not found.is_valid():
            while len(traces) >= TRACES:
                del traces[next(iter(traces))]
            with turn.lock:
                found = traces[key] = _Trace(traced, args, kwargs)
        return found.applied([leaf for leaf in given if isinstance(leaf, Tensor)])

    return call


_SCALARS = (bool, int, str, bytes, type(None), DType, UOp)


def _is_object(value: Any) -> bool:
    return not isinstance(value, (Tensor, float, list, tuple, dict, *_SCALARS)) and hasattr(value, "__dict__")


def _kind(leaf: Any) -> Hashable:
    """What makes an argument another one for the trace."""
    if isinstance(leaf, Tensor):
        return "tensor", leaf.shape, leaf.dtype, leaf.device
    if isinstance(leaf, float):
        return "float", repr(leaf)
    if isinstance(leaf, _SCALARS):
        return type(leaf).__name__, leaf
    if hasattr(leaf, "__array_interface__"):
        raise ArgumentError(
            f"function: an argument is a {type(leaf).__name__}",
            because="its contents could change between calls",
            fix="pass Tensor(array)",
        )
    return "object", id(leaf)


class _Outside(NamedTuple):
    """A tensor from outside that the graph reads, and how it looked."""

    base: UOp
    tensor: weakref.ref[Tensor]
    shape: Any
    dtype: DType
    device: str


class _Trace:
    """A graph over stand-ins for the tensors among the arguments, and for those from outside."""

    def __init__(self, traced: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.kept = [leaf for leaf in trees.leaves((args, kwargs)) if not isinstance(leaf, Tensor)]
        self.inputs: list[UOp] = []
        inside = trees.rebuilt(
            (args, kwargs), iter([self._input(leaf) for leaf in trees.leaves((args, kwargs))])
        )
        own = {id(t) for t in trees.leaves(inside)}
        hidden = [
            (t, t.uop, *stand_in(t.shape, t.dtype, t.device, "function"))
            for t in Tensor.live
            if id(t) not in own
        ]
        self.keys: list[UOp] = []
        thread = get_ident()

        def see(node: UOp, data: memoryview) -> None:
            if get_ident() == thread:
                self.keys.append(node)

        storage.on_put.append(see)
        for tensor, _, _, shaped in hidden:
            tensor.uop = shaped
        assigned = None
        try:
            with transforming(traces=True):
                self.result = traced(*inside[0], **inside[1])
        finally:
            storage.on_put.remove(see)
            for tensor, before, _, shaped in hidden:
                if tensor.uop is not shaped:
                    assigned = before
                tensor.uop = before
        self._check(assigned, inside)
        self.roots = [t.uop for t in trees.tensors(self.result)]
        self.result = trees.mapped(lambda leaf: _Slot if isinstance(leaf, Tensor) else leaf, self.result)
        nodes = set(UOp.sink(*self.roots).toposort())
        self.keys = [node for node in self.keys if node in nodes and node in random_.key_buffers]
        self.fresh = True  # the random numbers of the trace are those of the first call
        self.graph: _Graph | None = None
        self.outside = [
            _Outside(base, weakref.ref(t), t.shape, t.dtype, t.device)
            for t, _, base, _ in hidden
            if base in nodes
        ]

    def _input(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        base, shaped = stand_in(leaf.shape, leaf.dtype, leaf.device, "function")
        self.inputs.append(base)
        return Tensor._wrap(shaped)

    def _check(self, assigned: UOp | None, inside: Any) -> None:
        """Errors for what a graph cannot do again."""
        inputs = trees.tensors(inside)
        changed = next(
            (t for t, base in zip(inputs, self.inputs, strict=True) if base.reshape(t.shape) is not t.uop),
            None,
        )
        writes = [n for t in trees.tensors(self.result) for n in t.uop.toposort() if n.op is Ops.AFTER]
        if assigned is not None or changed is not None or writes:
            node = assigned if assigned is not None else changed.uop if changed is not None else writes[0]
            raise ArgumentError(
                f"function: it assigns to a tensor of shape {show_shape(node.shape)}",
                because="it runs once, while its graph is applied many times",
                fix="return the new value, and assign it outside",
            )

    def is_valid(self) -> bool:
        """Whether the tensors from outside are what they were."""
        for was in self.outside:
            now = was.tensor()
            if now is None or (now.shape, now.dtype, now.device) != (was.shape, was.dtype, was.device):
                return False
        return True

    def applied(self, inputs: Sequence[Tensor]) -> Any:
        """The results for these tensors."""
        changes: dict[UOp, UOp] = {}
        for base, tensor in zip(self.inputs, inputs, strict=True):
            _stand_for(changes, base, tensor)
        for was in self.outside:
            now = was.tensor()
            assert now is not None, "looked at before"
            _stand_for(changes, was.base, now)
        changes |= {node: node if self.fresh else _fresh_key(node) for node in self.keys}
        self.fresh = False
        if self.graph is None:
            self.graph = _Graph(self.roots, changes)
        found = iter(substituted(self.roots, changes) if on_rebuilt else self.graph.applied(changes))
        return trees.mapped(lambda leaf: Tensor._wrap(next(found)) if leaf is _Slot else leaf, self.result)


class _Slot:
    """Stands for a tensor in a result."""


def _stand_for(changes: dict[UOp, UOp], base: UOp, tensor: Tensor) -> None:
    """What stands for a stand-in, flat and in its shape."""
    node = tensor.uop
    changes[base] = node.reshape((prod(node.shape),))
    changes[base.reshape(node.shape)] = node


class _Graph:
    """A graph as a list of steps over a list of values, so that building it anew needs no search."""

    def __init__(self, roots: Sequence[UOp], inputs: Iterable[UOp]) -> None:
        position: dict[UOp, int] = {}
        self.values: list[UOp] = []  # of the traced graph: what depends on no input stays
        self.inputs: list[tuple[int, UOp]] = []
        self.steps: list[tuple[int, UOp, tuple[int, ...], bool]] = []
        moving: set[UOp] = set()
        ends = frozenset(inputs)
        for node in UOp.sink(*roots).toposort(ends.__contains__)[:-1]:
            at = position[node] = len(self.values)
            self.values.append(node)
            if node in ends:
                self.inputs.append((at, node))
                moving.add(node)
            elif any([s in moving for s in node.src]):
                moving.add(node)
                has_gradient = node.op is Ops.CALL and node.arg.gradient is not None
                self.steps.append((at, node, tuple([position[s] for s in node.src]), has_gradient))
        self.roots = [position[root] for root in roots]

    def applied(self, changes: dict[UOp, UOp]) -> list[UOp]:
        """The roots with other inputs."""
        values = self.values.copy()
        for at, node in self.inputs:
            values[at] = changes[node]
        for at, node, sources, has_gradient in self.steps:
            made = UOp(node.op, node.dtype, tuple([values[s] for s in sources]), node.arg)
            values[at] = _with_gradient(made, changes) if has_gradient else made
        return [values[at] for at in self.roots]


def _fresh_key(node: UOp) -> UOp:
    """Another key buffer, with the next random numbers."""
    count = random_.key_buffers[node][1]
    key, first = random_.next_key(count)
    buffer = UOp.new_buffer(2, dtypes.uint64, node.arg.device)
    storage.put(buffer, memoryview(random_.key_bytes(key, first)))
    random_.key_buffers[buffer] = (key, count)
    return buffer


class AppliedGradient:
    """The gradient function of a node in a traced graph, which may use the graph's stand-ins, for an
    application."""

    def __init__(self, function: Any, changes: dict[UOp, UOp]) -> None:
        self.function, self.changes = function, changes

    def __call__(
        self, upstreams: list[UOp | None], outputs: list[UOp], sources: tuple[UOp, ...]
    ) -> list[UOp | None]:
        parts = list(self.function(upstreams, outputs, sources))
        found = iter(substituted([part for part in parts if part is not None], self.changes))
        return [None if part is None else next(found) for part in parts]


def substituted(roots: Sequence[UOp], changes: dict[UOp, UOp]) -> tuple[UOp, ...]:
    """The graphs with other inputs, gradient functions included."""

    def change(old: UOp, new: UOp) -> UOp:
        if new is not old:
            for see in on_rebuilt:
                see(old, new)
        if old.op is not Ops.CALL or new is old or old.arg.gradient is None:
            return new
        return _with_gradient(new, changes)

    return rebuild(UOp.sink(*roots), change, known=changes).src


def _with_gradient(call: UOp, changes: dict[UOp, UOp]) -> UOp:
    """A CALL whose gradient function means the present inputs."""
    gradient = AppliedGradient(call.arg.gradient, changes)
    number = {"uid": fresh_uid()} if isinstance(call.arg, Given) else {}
    return call.replace(arg=call.arg._replace(gradient=gradient, **number))
