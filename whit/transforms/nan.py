"""detect_nan: where the first NaN or infinity comes from."""

from __future__ import annotations

import contextlib
import linecache
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from whit.autograd import marks
from whit.autograd.gradient import on_rule
from whit.engine.realize import after_computing, before_computing
from whit.helpers import NumericError
from whit.tensor import Tensor, storage
from whit.uop import Ops, UOp
from whit.uop.uop import show_shape

Hook = TypeVar("Hook")
PACKAGE = str(Path(__file__).parents[1])


class _Place(NamedTuple):
    """A line of the user's program, and the op of which a node is (part of) the gradient."""

    file: str
    line: int
    gradient_of: str = ""
    forward: Any = None  # the place of the op itself

    def __str__(self) -> str:
        text = linecache.getline(self.file, self.line).strip()
        return f"{self.file}:{self.line}" + (f": {text}" if text else "")


class detect_nan(contextlib.ContextDecorator):
    """A context (or decorator) in which every value that is computed is looked at. The first that holds a
    NaN, or an infinity, raises NumericError, which names the operation that made it out of numbers, its
    operands, and the line of the program.

    inf: whether infinities count; those that come from infinite constants (masks) never do. Values that are
    masked off inside of a computation do not count either: only what is computed as a whole is looked at.
    Jitted functions run as plain ones inside. For debugging: each value costs a kernel more, and a found
    one is computed again, op by op.

    >>> with detect_nan():
    ...     Tensor([1.0, -1.0]).sqrt().tolist()
    Traceback (most recent call last):
    ...
    whit.helpers.NumericError: SQRT of shape (2,) makes NaN at (1,): its operand is -1.0 there...
    """

    def __init__(self, inf: bool = True) -> None:
        self.inf = inf
        self.places: dict[UOp, _Place] = {}
        self.busy = False
        self.exits = contextlib.ExitStack()

    def _recreate_cm(self) -> detect_nan:
        return detect_nan(self.inf)

    def __enter__(self) -> detect_nan:
        wrap = Tensor._wrap
        had_own = "_wrap" in Tensor.__dict__

        def watched(cls: type[Tensor], uop: UOp) -> Tensor:
            self._note(uop)
            return wrap(uop)

        Tensor._wrap = classmethod(watched)  # type: ignore[assignment,method-assign]
        self.exits = contextlib.ExitStack()
        self.exits.callback(_unwatch, wrap if had_own else None)
        self.exits.enter_context(marks.transforming())
        self._watch(storage.on_put, self._see_data)
        self._watch(on_rule, self._see_rule)
        self._watch(marks.on_rebuilt, self._see_rebuilt)
        self._watch(before_computing, self._before)
        self._watch(after_computing, self._after)
        return self

    def __exit__(self, *_: object) -> None:
        self.exits.close()
        self.places.clear()

    def _watch(self, hooks: list[Hook], hook: Hook) -> None:
        hooks.append(hook)
        self.exits.callback(hooks.remove, hook)

    # ---- where nodes come from

    def _note(self, root: UOp, place: _Place | None = None) -> None:
        """Give the nodes that have no place yet the present line."""
        if self.busy or root in self.places:
            return
        if place is None:
            place = _present()
        stack = [root]
        while stack:
            node = stack.pop()
            if node not in self.places:
                self.places[node] = place
                stack += node.src

    def _see_data(self, node: UOp, data: memoryview) -> None:
        self._note(node)

    def _see_rule(self, node: UOp, part: UOp) -> None:
        here = _present()
        self._note(part, _Place(here.file, here.line, node.op.name, self.places.get(node)))

    def _see_rebuilt(self, old: UOp, new: UOp) -> None:
        if old in self.places:
            self._note(new, self.places[old])

    # ---- values

    def _before(self, pending: list[Tensor]) -> None:
        """Values that are about to be written over others are looked at while all that they are made of is
        still there."""
        if self.busy:
            return
        for node in UOp.sink(*[t.uop for t in pending]).toposort():
            if node.op is Ops.AFTER and node.became is None:
                for store in node.src[1:]:
                    self._check(store.src[1])

    def _after(self, tensors: list[Tensor], roots: list[UOp]) -> None:
        if not self.busy:
            for root in roots:
                self._check(root)

    def _check(self, root: UOp) -> None:
        if not root.dtype.is_float:
            return
        self.busy = True
        try:
            nan, inf = _holds(root)
            if nan or (inf and self.inf):
                self._blame(root, nan)
        finally:
            self.busy = False

    def _blame(self, root: UOp, nan: bool) -> None:
        """Compute op by op, sources first, up to the first that makes a NaN (or infinity) itself. An
        infinity that only passes constants on is nobody's fault."""
        held: list[Tensor] = []
        flags: dict[UOp, tuple[bool, bool]] = {}
        maker: dict[UOp, UOp] = {}  # of the infinities in a value
        for node in root.toposort():
            if not node.dtype.is_float or node.op in (Ops.CALL, Ops.SINK, Ops.STORE):
                continue
            held.append(Tensor._wrap(node))
            flags[node] = has = _holds(node)
            sources = [s for s in _sources(node) if s in flags]
            if has[1]:
                infinite = next((s for s in sources if flags[s][1]), None)
                maker[node] = node if infinite is None else maker[infinite]
            if has[0] and not any([flags[s][0] for s in sources]):
                raise self._error(node, "NaN", next((maker[s] for s in sources if flags[s][1]), None))
            if has[1] and not nan and maker[node] is node and node.op is not Ops.CONST and not flags[node][0]:
                raise self._error(node, "inf", None)
        if nan:
            raise self._error(root, "NaN", None)

    def _error(self, node: UOp, kind: str, cause: UOp | None) -> NumericError:
        """What is to be told about the node that made it."""
        place = self.places.get(node)
        name = (
            node.op.name
            if place is None or not place.gradient_of
            else f"{node.op.name} in the gradient of {place.gradient_of}"
        )
        at = _first(node, kind)
        if node.op is Ops.BUFFER:
            what, why = (
                f"the data of a tensor of shape {show_shape(node.shape)} hold {kind} at {at}",
                "given as it is",
            )
        else:
            what = f"{name} of shape {show_shape(node.shape)} makes {kind} at {show_shape(at)}"
            why = _operands_text(node, at)
        if place is not None:
            why += f", in {place}"
            if place.forward is not None:
                why += f" (the operation itself: {place.forward})"
        if cause is not None and cause.op is not Ops.CONST:
            there = self.places.get(cause)
            why += f"; the infinity was made by {cause.op.name}" + ("" if there is None else f" in {there}")
        return NumericError(
            what,
            because=why,
            fix="keep the operands where the operation is defined, or mask them before it with where()",
        )


def _unwatch(before: Any) -> None:
    if before is None:
        del Tensor._wrap
    else:
        Tensor._wrap = before  # type: ignore[method-assign]


def _present() -> _Place:
    """The innermost line that is not whit's own."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(
        (PACKAGE, "<frozen", contextlib.__file__)
    ):
        frame = frame.f_back
    return _Place(frame.f_code.co_filename, frame.f_lineno)


def _holds(node: UOp) -> tuple[bool, bool]:
    """Whether a value holds NaN, and infinities."""
    if node.op is Ops.CONST:
        return math.isnan(node.arg), math.isinf(node.arg)
    value = Tensor._wrap(node)
    if not all([size != 0 for size in value.shape]):
        return False, False
    nan, inf = Tensor.stack(value.isnan().any(), value.isinf().any()).tolist()
    return nan, inf


def _sources(node: UOp) -> tuple[UOp, ...]:
    """What the value of a node is made of."""
    if node.op is Ops.OUTPUT:
        return node.src[1:] if len(node.src) == 2 else node.src[0].src
    if node.op is Ops.AFTER:
        return (node.src[0], *[store.src[1] for store in node.src[1:]])
    return node.src


def _first(node: UOp, kind: str) -> tuple[int, ...]:
    """The position of the first NaN or infinity."""
    value = Tensor._wrap(node)
    hit = (value.isnan() if kind == "NaN" else value.isinf()).flatten()
    flat = int(hit.cast("int32").argmax().item())
    position = []
    for size in reversed(value._concrete_shape()):
        position.append(flat % size)
        flat //= size
    return tuple(reversed(position))


def _operands_text(node: UOp, at: tuple[int, ...]) -> str:
    """The operands at a position, of an elementwise op; else how they look."""
    if not node.op.is_elementwise:
        return f"from {', '.join([show_shape(s.shape) for s in _sources(node)])}"
    values = []
    for source in node.src:
        full = (
            Tensor._wrap(source).broadcast_to(*node.shape)
            if source.shape != node.shape
            else Tensor._wrap(source)
        )
        values.append(str(full[at].item() if at else full.item()))
    return f"its operand{'s are' if len(values) > 1 else ' is'} {' and '.join(values)} there"
