"""Loops between nodes: the CALL of a SCAN is built from the graph of one step, differentiated and batched.

The gradient of a loop is a loop the other way round. Of each step it needs what went into it: carries and
arguments are stacked, and results of reductions inside of a step are stacked too if they are needed
(`_with_residuals`; a schedule that does not read them leaves them out), the rest is computed again. Gradients
of what all steps share are no part of that loop: once the gradients of all steps are known, they are one
reduction over all steps (a product of matrices, for weights).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from whit.autograd.gradient import gradient
from whit.autograd.marks import stand_in
from whit.autograd.rules import total
from whit.helpers import ArgumentError, prod
from whit.tensor import Tensor
from whit.tensor.custom import Backward, run, zeros_like
from whit.transforms.batching import Batch, Source, batch, expanded
from whit.transforms.function import AppliedGradient
from whit.uop import DType, Ops, ParamArg, ReduceArg, Shape, UOp
from whit.uop.args import ScanArg
from whit.uop.rewrite import rebuild
from whit.uop.uop import uops_in

Changes = dict[UOp, UOp]


class Input(NamedTuple):
    """An input of a step: the flat node that stands for it, the same in its shape, and its value: of all
    steps at once, or of the first one."""

    base: UOp
    shaped: UOp
    value: UOp


def input_of(value: UOp, shape: Shape, device: str) -> Input:
    """A new input for a value of this shape in each step."""
    return Input(*stand_in(shape, value.dtype, device, "scan"), value)


class Steps(NamedTuple):
    """How many there are, which way they go, and where."""

    length: int
    reverse: bool
    device: str


def loop(
    steps: Steps,
    carries: Sequence[Input],
    stacked: Sequence[Input],
    nexts: Sequence[UOp],
    gives: Sequence[UOp],
    residuals: bool = True,
) -> list[UOp]:
    """The carries after every step, and what every step gives, each stacked along a new axis 0.

    `nexts` and `gives` are graphs over the inputs; whatever else they read is the same for all steps."""
    roots = UOp.sink(*nexts, *gives)
    nodes = roots.toposort()
    stacked = [one for one in stacked if one.base in nodes]
    moving: set[UOp] = set()
    inputs = {one.base for one in (*carries, *stacked)}
    for node in nodes:
        if node in inputs or any([s in moving for s in node.src]):
            moving.add(node)
    found = list(dict.fromkeys(_shared(roots, moving)))
    _check_sizes([*moving, *found])
    turned = _summed_along_rows(moving).intersection(found) if steps.length >= TURNED_FROM else set()
    shared = [_laid_out(node, node in turned) for node in found]
    known: Changes = {}
    for slot, one in enumerate([*carries, *stacked]):
        known[one.base], known[one.shaped] = _canonical(slot, one.shaped, steps.device)
    for slot, (node, value) in enumerate(zip(found, shared, strict=True), len(carries) + len(stacked)):
        shaped = _canonical(slot, value, steps.device)[1]
        known[node] = _as_it_was(shaped, node.shape, node in turned)
    arg = ScanArg(steps.length, len(carries), len(stacked), steps.reverse)
    kernel = UOp(Ops.SCAN, roots.dtype, rewritten(roots.src, known), arg)
    kernel = _with_residuals(kernel, steps.device) if residuals else kernel
    outputs = [((steps.length, *root.shape), root.dtype) for root in kernel.src]
    values = [*[one.value for one in (*carries, *stacked)], *shared]
    return run(kernel, values, outputs, steps.device, ScanGradient(kernel))[: len(roots.src)]


def _check_sizes(nodes: Iterable[UOp]) -> None:
    """ArgumentError for a step that computes as many elements as a variable says."""
    for node in nodes:
        sizes = [size for size in node.shape if isinstance(size, UOp)]
        if type(node.arg) in (tuple, UOp) and node.op is not Ops.OUTPUT:
            sizes += uops_in(node.arg)
        for part in [part for size in sizes for part in size.toposort()]:
            if part.op is Ops.BIND:
                raise ArgumentError(
                    f"scan: a step that depends on the size {part.src[0].arg.name}",
                    because="its kernels are the same whatever the variable's value is",
                    fix="use the greatest size, and mask what is beyond the value with where()",
                )


def _canonical(slot: int, like: UOp, device: str) -> tuple[UOp, UOp]:
    """Input number `slot` of a step, (flat, in the shape of a node): equal steps are equal nodes."""
    base = UOp(Ops.PARAM, like.dtype, (), ParamArg(slot, prod(like.shape))).copy_to(device)
    return base, base.reshape(like.shape)


def _inputs_of(kernel: UOp) -> dict[int, tuple[UOp, UOp]]:
    """The inputs that the graph of a step reads, by slot: (flat, in its shape)."""
    found: dict[int, tuple[UOp, UOp]] = {}
    for node in kernel.toposort():
        if node.op is Ops.COPY and node.src[0].op is Ops.PARAM:
            found[node.src[0].arg.slot] = (node, node)
    return found


def _shared(roots: UOp, moving: set[UOp]) -> Iterator[UOp]:
    """What the steps read that is the same for all of them: values that do not change, but for what only
    repeats smaller ones."""
    stack = [s for node in roots.toposort() if node in moving or node is roots for s in node.src]
    for node in stack:  # grows meanwhile
        if node in moving or _is_constant(node):
            continue
        if node.op in _REPEATING or (node.op.is_movement and _repeats(node)):
            stack += node.src
        else:
            yield node


TURNED_FROM = 8  # steps that are worth copying a matrix for
CACHE_WAY, CACHE_LINE = 2048, 64  # bytes: rows of the first are two apart in caches of 4096 a way


def _summed_along_rows(nodes: Iterable[UOp]) -> set[UOp]:
    """The matrices of which products sum up whole rows: a step reads them sooner by columns, whose elements
    belong to results beside each other."""
    found = set()
    for node in nodes:
        if (
            node.op is not Ops.REDUCE
            or node.src[0].op is not Ops.MUL
            or node.arg.axes != (node.src[0].ndim - 1,)
        ):
            continue
        for factor in node.src[0].src:
            below = factor
            while below.op in (Ops.RESHAPE, Ops.EXPAND) and below.src[0].ndim > 1:
                below = below.src[0]
            if below.ndim == 2 and below.shape == factor.shape[-2:] and below.shape[0] != 1:
                found.add(below)
    return found


def _laid_out(node: UOp, is_turned: bool) -> UOp:
    """A value that all steps share as they read it best: a matrix turned, if that helps, and with longer rows
    where these would all begin at the same place of the first cache."""
    value = node.permute((1, 0)) if is_turned else node
    is_made = value.op is Ops.PERMUTE and value.ndim > 1
    if not is_made or value.shape[-1] * value.dtype.itemsize % CACHE_WAY:
        return value
    return value.pad((*[(0, 0)] * (value.ndim - 1), (0, CACHE_LINE // value.dtype.itemsize)))


def _as_it_was(value: UOp, shape: Shape, is_turned: bool) -> UOp:
    """What a step makes of a value that was laid out."""
    kept = (shape[1], shape[0]) if is_turned else shape
    if value.shape != kept:
        value = value.shrink(tuple([(0, size) for size in kept]))
    return value.permute((1, 0)) if is_turned else value


def _is_constant(node: UOp) -> bool:
    """Whether a value is known without any memory. A DETACH of a constant is what somebody differentiates
    by, and variables have another value in each call."""
    return node.device is None and not any([n.op in (Ops.DETACH, Ops.BIND) for n in node.toposort()])


_REPEATING = (Ops.RESHAPE, Ops.EXPAND, Ops.PAD)


def _repeats(node: UOp) -> bool:
    while node.op.is_movement:
        if node.op in _REPEATING[1:]:
            return True
        node = node.src[0]
    return False


def rewritten(roots: Sequence[UOp], changes: Changes) -> tuple[UOp, ...]:
    """The graphs with other inputs, also in what functions for gradients read."""

    def change(old: UOp, new: UOp) -> UOp:
        if old.op is not Ops.CALL or new is old:
            return new
        function = old.arg.gradient
        if function is None or isinstance(function, (Backward, ScanGradient)):
            return new
        return new.replace(arg=new.arg._replace(gradient=AppliedGradient(function, changes)))

    return rebuild(UOp.sink(*roots), change, known=changes).src


# ---- gradients ---------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """A node that stands for something in the gradients of a step: flat, and in its shape."""

    base: UOp
    shaped: UOp


class _Pull(NamedTuple):
    """The gradients of one step as graphs. Inputs by slot; per root, the gradient that comes from the next
    step (carries), the one given for this step, and what it was in this step; by slot the gradients."""

    inputs: dict[int, _Part]
    later: dict[int, _Part]
    given: dict[int, _Part]
    results: dict[int, _Part]
    parts: dict[int, UOp]


def _part(like: UOp, device: str) -> _Part:
    return _Part(*stand_in(like.shape, like.dtype, device, "scan"))


def _is_plain(kernel: UOp) -> bool:
    """Whether gradients inside of a step are whit's own, which hold no values: what is made of it may be
    kept."""
    functions = [node.arg.gradient for node in kernel.toposort() if node.op is Ops.CALL]
    return all(f is None or isinstance(f, (Backward, ScanGradient)) for f in functions)


def _pull_of(kernel: UOp, flags: tuple[bool, ...], device: str, shapes: tuple[Shape, ...]) -> _Pull:
    """`flags`: for which roots each step has a gradient of its own; `shapes`: of the inputs."""
    make = _known_pull if _is_plain(kernel) else _made_pull
    return make(kernel, flags, device, shapes)


def _made_pull(kernel: UOp, flags: tuple[bool, ...], device: str, shapes: tuple[Shape, ...]) -> _Pull:
    inputs: dict[int, _Part] = {}
    known: Changes = {}
    for slot, (base, _) in _inputs_of(kernel).items():
        one = inputs[slot] = _Part(*stand_in(shapes[slot], base.dtype, device, "scan"))
        known[base], known[base.reshape(shapes[slot])] = one
    roots = rewritten(kernel.src, known)
    later = {n: _part(r, device) for n, r in enumerate(roots) if n < kernel.arg.carries and r.dtype.is_float}
    given = {n: _part(r, device) for n, r in enumerate(roots) if flags[n] and r.dtype.is_float}
    pairs = [(roots[n], one.shaped) for group in (later, given) for n, one in group.items()]
    wanted = [slot for slot, one in inputs.items() if one.base.dtype.is_float]
    found = gradient([r for r, _ in pairs], [inputs[s].base for s in wanted], [g for _, g in pairs])
    results = {n: _part(r, device) for n, r in enumerate(roots) if r not in known.values()}
    parts = {s: g.reshape(shapes[s]) for s, g in zip(wanted, found, strict=True) if g is not None}
    stands: Changes = {}
    for n, one in results.items():
        stands |= _under_reshape(roots[n], one.shaped)
    replaced = rewritten(list(parts.values()), stands)
    return _Pull(inputs, later, given, results, dict(zip(parts, replaced, strict=True)))


_known_pull = lru_cache(256)(_made_pull)


def _under_reshape(node: UOp, value: UOp, steps: Shape = ()) -> Changes:
    """That a value stands for a node, and for what it reshapes: a reshape of it is built on that."""
    below = node.src[0] if node.op is Ops.RESHAPE else node
    return {below: value.reshape((*steps, *below.shape)), node: value}


@dataclass(frozen=True)
class ScanGradient:
    """The gradient function of a SCAN. Those of equal loops are equal."""

    kernel: UOp

    def __call__(
        self, upstreams: list[UOp | None], outputs: list[UOp], values: tuple[UOp, ...], /
    ) -> list[UOp | None]:
        return _Call(self.kernel, outputs, values).gradients(upstreams)


class _Call:
    """A loop that is differentiated: its outputs and values, and where they are stacked."""

    def __init__(self, kernel: UOp, outputs: list[UOp], values: tuple[UOp, ...]) -> None:
        self.kernel, self.outputs, self.values = kernel, outputs, values
        self.arg: ScanArg = kernel.arg
        self.device = outputs[0].device or ""
        self.moving = self.arg.carries + self.arg.stacked
        self.last = 0 if self.arg.reverse else self.arg.length - 1

    def shape(self, slot: int) -> Shape:
        """Of an input in one step."""
        shape = self.values[slot].shape
        return shape[1:] if self.arg.carries <= slot < self.moving else shape

    def gradients(self, upstreams: list[UOp | None]) -> list[UOp | None]:
        ends = [None if g is None else self._at_the_end(g) for g in upstreams[: self.arg.carries]]
        each = [None if n < len(ends) and ends[n] is not None else g for n, g in enumerate(upstreams)]
        shapes = tuple([self.shape(slot) for slot in range(len(self.values))])
        flags = tuple([g is not None for g in each])
        pull = _pull_of(self.kernel, flags, self.device, shapes)
        stacks = {
            one: self._before(slot) if slot < self.arg.carries else self.values[slot]
            for slot, one in pull.inputs.items()
            if slot < self.moving
        }
        for n, one in pull.given.items():
            stacks[one] = each[n]  # type: ignore[assignment]  # those that are given
        stacks |= {one: self.outputs[n] for n, one in pull.results.items()}
        starts = {n: zeros_like(self.values[n]) if (g := ends[n]) is None else g for n in pull.later}
        made, given = self._backwards(pull, stacks, starts)
        found: list[UOp | None] = [None] * len(self.values)
        first = self.arg.length - 1 - self.last
        for n, stack in made.items():
            found[n] = _row(stack, first)
            stacks[pull.later[n]] = self._after(stack, starts[n])
        for slot, stack in given.items():
            found[slot] = stack
        shared = [slot for slot in pull.parts if slot >= self.moving]
        known: Changes = {}
        for slot, stack in given.items():
            known |= _under_reshape(pull.parts[slot], stack, (self.arg.length,))
        for slot, total_ in zip(shared, self._of_shared(pull, shared, stacks, known), strict=True):
            found[slot] = total_
        return found

    def _backwards(
        self, pull: _Pull, stacks: dict[_Part, UOp], starts: dict[int, UOp]
    ) -> tuple[dict[int, UOp], dict[int, UOp]]:
        """The loop backwards: gradients of the carries before every step, and of the stacked arguments, by
        slot."""
        later = [Input(*pull.later[n], starts[n]) for n in starts]
        nexts = [pull.parts[n] if n in pull.parts else zeros_like(self.values[n]) for n in starts]
        slots = [slot for slot in pull.parts if self.arg.carries <= slot < self.moving]
        roots = self._with_shared(pull, [*nexts, *[pull.parts[slot] for slot in slots]])
        stacked = [Input(*one, value) for one, value in stacks.items()]
        if not roots:
            return {}, {}
        steps = Steps(self.arg.length, not self.arg.reverse, self.device)
        made = loop(steps, later, stacked, roots[: len(nexts)], roots[len(nexts) :])
        return dict(zip(starts, made)), dict(zip(slots, made[len(nexts) :]))

    def _with_shared(self, pull: _Pull, roots: Sequence[UOp]) -> tuple[UOp, ...]:
        """Graphs that read the values which all steps share."""
        known: Changes = {}
        for slot, one in pull.inputs.items():
            if slot >= self.moving:
                known[one.base] = self.values[slot].reshape((prod(self.values[slot].shape),))
                known[one.shaped] = self.values[slot]
        return rewritten(roots, known)

    def _of_shared(
        self, pull: _Pull, slots: Sequence[int], stacks: dict[_Part, UOp], known: Changes
    ) -> list[UOp]:
        """The gradients of what all steps share: of all steps at once, then summed."""
        changes = dict(known)
        for one, value in stacks.items():
            changes[one.base] = value.reshape((self.arg.length, prod(one.shaped.shape)))
            changes[one.shaped] = value
        many = batch([pull.parts[slot] for slot in slots], Batch(self.arg.length, changes))
        sums = [summed(expanded(part, self.arg.length)) for part in many]
        return list(self._with_shared(pull, sums))

    def _at_the_end(self, g: UOp) -> UOp | None:
        """The gradient of the last carry if the others have none: it is 0 but for the last row."""
        rest = (0, self.arg.length - 1) if self.arg.reverse else (self.arg.length - 1, 0)
        if g.op is Ops.PAD and g.src[0].shape[0] == 1 and g.arg[0] == rest and not any(map(any, g.arg[1:])):
            return g.src[0].reshape(g.shape[1:])
        return g.reshape(g.shape[1:]) if self.arg.length == 1 else None

    def _before(self, n: int) -> UOp:
        """The carry before every step."""
        return _joined(self.values[n], self.outputs[n], self.arg.reverse)

    def _after(self, stack: UOp, end: UOp) -> UOp:
        """What came to every step from the one after it, in a loop backwards."""
        return _joined(end, stack, not self.arg.reverse)


def _joined(first: UOp, stack: UOp, reverse: bool) -> UOp:
    """The rows of a stack but for its last, behind a first row; in reverse from the other end."""
    length, rest = stack.shape[0], [(0, size) for size in stack.shape[1:]]
    row = first.reshape((1, *first.shape))
    if length == 1:
        return row
    kept = stack.shrink(((1, length) if reverse else (0, length - 1), *rest))
    rows = [kept, row] if reverse else [row, kept]
    return Tensor.cat(*[Tensor._wrap(part) for part in rows]).uop


def _row(stack: UOp, number: int) -> UOp:
    """One row."""
    rest = [(0, size) for size in stack.shape[1:]]
    return stack.shrink(((number, number + 1), *rest)).reshape(stack.shape[1:])


def summed(node: UOp) -> UOp:
    """The sum over axis 0, taken inside of what keeps that axis. A sum of sums is one: of sum(x, axes) it is
    sum(x, axes and 0), and what each step would give has no memory."""
    terms, sums = [node], []
    while terms:
        term = terms.pop()
        if term.op is Ops.ADD and term.src[0].shape == term.src[1].shape:
            terms += [term.src[1], term.src[0]]
        else:
            sums.append(_summed(term))
    result = sums[0]
    for other in sums[1:]:
        result = result.alu(Ops.ADD, other)
    return result


def _summed(node: UOp) -> UOp:
    """`summed` of what is no sum itself."""
    views = []
    while True:
        source = node.src[0] if node.src else node
        if node.op is Ops.PERMUTE and node.arg[0] == 0:
            views.append((Ops.PERMUTE, tuple([axis - 1 for axis in node.arg[1:]])))
        elif node.op is Ops.RESHAPE and source.ndim and source.shape[0] == node.shape[0]:
            views.append((Ops.RESHAPE, node.shape[1:]))
        elif node.op is Ops.PAD and node.arg[0] == (0, 0):
            views.append((Ops.PAD, node.arg[1:]))
        elif node.op is Ops.SHRINK and node.arg[0] == (0, source.shape[0]):
            views.append((Ops.SHRINK, node.arg[1:]))
        else:
            break
        node = source
    if node.op is Ops.REDUCE and node.arg.op is Ops.ADD and 0 not in node.arg.axes:
        made = node.replace(arg=ReduceArg(Ops.ADD, (0, *node.arg.axes)))
    else:
        made = total(node, (0,))
    for op, arg in reversed(views):
        made = getattr(made, op.name.lower())(arg)
    return made


def _with_residuals(kernel: UOp, device: str) -> UOp:
    """The step with what its gradient needs of it."""
    return (_known_residuals if _is_plain(kernel) else _made_residuals)(kernel, device)


def _made_residuals(kernel: UOp, device: str) -> UOp:
    """Results of reductions (and of kernels and loops inside) that the gradients of a step need are given by
    the steps too."""
    if not any([root.dtype.is_float for root in kernel.src]):
        return kernel
    inputs = _inputs_of(kernel)
    known = {base for base, _ in inputs.values()}
    moving_slots = kernel.arg.carries + kernel.arg.stacked
    moving: dict[UOp, None] = {}
    for node in kernel.toposort()[:-1]:
        if (node in known and node.src[0].arg.slot < moving_slots) or any([s in moving for s in node.src]):
            moving[node] = None
    flags = [root.dtype.is_float for root in kernel.src]
    targets = [base for base in known if base.dtype.is_float]
    pairs = [(root, zeros_like(root)) for root, flag in zip(kernel.src, flags, strict=True) if flag]
    found = _needed(pairs, targets, device)
    wanted = [n for n in moving if n in found and n.op in (Ops.REDUCE, Ops.OUTPUT) and n not in kernel.src]
    return kernel.replace(src=(*kernel.src, *wanted))


_known_residuals = lru_cache(256)(_made_residuals)


def _needed(pairs: Sequence[tuple[UOp, UOp]], targets: Sequence[UOp], device: str) -> set[UOp]:
    """The nodes that the gradients read, but for what is below reductions."""
    upstreams = [_part(root, device).shaped for root, _ in pairs]
    parts = gradient([root for root, _ in pairs], targets, upstreams)
    roots = {root for root, _ in pairs}
    stop = UOp.sink(*roots).toposort()
    forward = {n for n in stop if n.op in (Ops.REDUCE, Ops.OUTPUT)} | roots
    return set(UOp.sink(*[p for p in parts if p is not None]).toposort(forward.__contains__))


# ---- batches -----------------------------------------------------------------------------------------------


def batched_call(call: UOp, sources: Sequence[Source], of: Batch) -> UOp:
    """A loop whose every step does the same for many examples. Of its outputs the steps are axis 0, the
    examples axis 1."""
    kernel, arg, device = call.arg.kernel, call.arg.kernel.arg, call.arg.device
    inputs: list[Input] = []
    changes: Changes = {}
    same: Changes = {}
    for slot, (source, single) in enumerate(zip(sources, call.src, strict=True)):
        is_stacked = arg.carries <= slot < arg.carries + arg.stacked
        shape = single.shape[1:] if is_stacked else single.shape
        base, shaped = _canonical_of(slot, shape, single.dtype, device)
        is_many = source.batched or slot < arg.carries
        value = expanded(source, of.size) if slot < arg.carries else source.node
        if slot < arg.carries + arg.stacked:
            if is_stacked and is_many:
                value = value.permute((1, 0, *range(2, value.ndim)))
            inputs.append(input_of(value, (of.size, *shape) if is_many else shape, device))
            value = inputs[-1].shaped
        known = changes if is_many else same
        known[base] = value.reshape((*value.shape[: value.ndim - len(shape)], prod(shape)))
        known[shaped] = value
    roots = [expanded(s, of.size) for s in batch(rewritten(kernel.src, same), Batch(of.size, changes))]
    steps = Steps(arg.length, arg.reverse, device)
    return loop(
        steps,
        inputs[: arg.carries],
        inputs[arg.carries :],
        roots[: arg.carries],
        roots[arg.carries :],
        residuals=False,
    )[0].src[0]


def _canonical_of(slot: int, shape: Shape, dtype: DType, device: str) -> tuple[UOp, UOp]:
    base = UOp(Ops.PARAM, dtype, (), ParamArg(slot, prod(shape))).copy_to(device)
    return base, base.reshape(shape)
