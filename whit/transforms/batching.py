"""A batching rule per op: the graph of one example becomes that of many.

A batched node carries the batch as axis 0, in front of the axes that it has for one example. What does not
depend on the mapped inputs stays as it is, and is computed once. Rules get the node and, for each source,
what stands for it, and whether that is batched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from whit.autograd.marks import Given, given, given_output, is_link, on_rebuilt, stand_in
from whit.autograd.rules import RULES as BACKWARD
from whit.autograd.rules import total
from whit.helpers import ArgumentError, prod
from whit.tensor.custom import unbound
from whit.tensor.storage import default_device
from whit.uop import Op, Ops, Shape, Sint, UOp, dtypes
from whit.uop.args import CallArg, ParamArg, RangeArg
from whit.uop.ops import ELEMENTWISE, AxisType
from whit.uop.rewrite import rebuild
from whit.uop.uop import fresh_uid, show_shape


class Batch(NamedTuple):
    """How many examples, and what stands for the nodes that differ between them: keys are nodes of one
    example, values have the batch in front."""

    size: Sint
    changes: Mapping[UOp, UOp]


class Source(NamedTuple):
    """What stands for a source of a node."""

    node: UOp
    batched: bool


def batch(roots: Sequence[UOp], of: Batch) -> list[Source]:
    """The graphs for all examples at once. A root that is the same for all is not batched.

    Errors: ArgumentError for a write into memory of a value that differs between examples.
    """
    found: dict[UOp, Source] = {node: Source(value, True) for node, value in of.changes.items()}
    sink = UOp.sink(*roots)
    for node in sink.toposort(of.changes.__contains__)[:-1]:
        if node in found:
            continue
        sources = [found[s] for s in node.src]
        if any([s.batched for s in sources]):
            found[node] = Source(_rule_of(node.op)(node, sources, of), True)
            for see in on_rebuilt:
                see(node, found[node].node)
        else:
            found[node] = Source(node, False)
    return [found[root] for root in roots]


def expanded(source: Source, size: Sint) -> UOp:
    """A value with the batch in front, whether it differs between examples or not."""
    node = source.node
    return node if source.batched else node.reshape((1, *node.shape)).expand((size, *node.shape))


Rule = Callable[[UOp, list[Source], Batch], UOp]


def _rule_of(op: Op) -> Rule:
    rule = RULES.get(op)
    if rule is None:
        raise ArgumentError(
            f"vmap of {op.name}",
            because="it has no batching rule",
            fix="compute it outside of the mapped function",
        )
    return rule


# ---- rules -------------------------------------------------------------------------------------------------


def _elementwise(node: UOp, sources: list[Source], of: Batch) -> UOp:
    """Operands of fewer axes get ones between the batch and theirs, as they align at the right."""
    aligned = []
    for source, before in zip(sources, node.src, strict=True):
        ones = (1,) * (node.ndim - before.ndim)
        made = source.node
        if source.batched and ones:
            made = made.reshape((made.shape[0], *ones, *made.shape[1:]))
        aligned.append(made)
    return node.replace(src=tuple(aligned))


def _reshape(node: UOp, sources: list[Source], of: Batch) -> UOp:
    return sources[0].node.reshape((sources[0].node.shape[0], *node.shape))


def _expand(node: UOp, sources: list[Source], of: Batch) -> UOp:
    return sources[0].node.expand((sources[0].node.shape[0], *node.shape))


def _permute(node: UOp, sources: list[Source], of: Batch) -> UOp:
    return sources[0].node.permute((0, *[axis + 1 for axis in node.arg]))


def _pad(node: UOp, sources: list[Source], of: Batch) -> UOp:
    return sources[0].node.pad(((0, 0), *node.arg))


def _shrink(node: UOp, sources: list[Source], of: Batch) -> UOp:
    return sources[0].node.shrink(((0, sources[0].node.shape[0]), *node.arg))


def _flip(node: UOp, sources: list[Source], of: Batch) -> UOp:
    return sources[0].node.flip(tuple([axis + 1 for axis in node.arg]))


def _reduce(node: UOp, sources: list[Source], of: Batch) -> UOp:
    return sources[0].node.reduce(node.arg.op, tuple([axis + 1 for axis in node.arg.axes]))


def _take(node: UOp, sources: list[Source], of: Batch) -> UOp:
    """x alone: another axis. The index alone: its batch axis, which lands behind the axes in front of
    `axis`, goes to the front. Both: rows of all examples in one axis, in which an index that is outside of
    its own stays outside."""
    (x, x_batched), (index, index_batched) = sources
    axis = node.arg
    if not index_batched:
        return node.replace(src=(x, index), arg=axis + 1)
    if not x_batched:
        return _axis_to_front(node.replace(src=(x, index)), axis)
    size, rows = x.shape[0], x.shape[axis + 1]
    front = _axis_to_second(x, axis + 1)  # (B, rows, …)
    flat = front.reshape((size * rows, *front.shape[2:]))
    known = isinstance(size, int) and isinstance(rows, int) and size * rows < 1 << 31
    wide = dtypes.int32 if known else dtypes.int64
    inside = index.ge(0) & index.lt(_const_size(index, rows)) if _holds(index, rows) else index.ge(0)
    first = UOp(Ops.IOTA, wide, (), size).reshape((size, *(1,) * (index.ndim - 1))) * _const_size_of(
        wide, rows
    )
    number = inside.where(index, index.const_like(0)).cast(wide) + first
    taken: UOp = UOp(Ops.TAKE, node.dtype, (flat, inside.where(number, number.const_like(-1))), 0)
    # (B, *index, before axis, after axis) -> (B, before axis, *index, after axis)
    count = index.ndim - 1
    order = (
        0,
        *range(1 + count, 1 + count + axis),
        *range(1, 1 + count),
        *range(1 + count + axis, taken.ndim),
    )
    result = taken.permute(order)
    if not x.dtype.is_float:
        return result
    # each example's gradient is looked for in its own rows, not in those of all
    single = _TakeGradient(node)
    return given([result], [x], BatchedGradient(single, (True,), of), through=True)[0]


class _TakeGradient:
    """The gradient of a TAKE for one example."""

    def __init__(self, node: UOp) -> None:
        self.node = node

    def __call__(self, upstreams: list[UOp | None], _: list[UOp], src: tuple[UOp, ...]) -> list[UOp | None]:
        rule = BACKWARD[Ops.TAKE][0]
        return [None if g is None else rule(g, self.node, *src, self.node.src[1]) for g in upstreams]


def _holds(index: UOp, rows: Sint) -> bool:
    """Whether the index's dtype has numbers beyond the rows at all."""
    return not isinstance(rows, int) or rows <= index.dtype.max


def _const_size(like: UOp, size: Sint) -> UOp:
    return like.const_like(size) if isinstance(size, int) else size.cast(like.dtype)


def _const_size_of(dtype: Any, size: Sint) -> UOp:
    return UOp.const(size, dtype) if isinstance(size, int) else size.cast(dtype)


def _axis_to_front(node: UOp, axis: int) -> UOp:
    return node.permute((axis, *[a for a in range(node.ndim) if a != axis]))


def _axis_to_second(node: UOp, axis: int) -> UOp:
    return node.permute((0, axis, *[a for a in range(1, node.ndim) if a != axis]))


def _same_op(node: UOp, sources: list[Source], of: Batch) -> UOp:
    return node.replace(src=(sources[0].node,))


def _detach(node: UOp, sources: list[Source], of: Batch) -> UOp:
    """A link has done its work when the function's graph was complete."""
    return sources[0].node if is_link(node) else node.replace(src=(sources[0].node,))


def _write(node: UOp, sources: list[Source], of: Batch) -> UOp:
    raise ArgumentError(
        f"vmap: a write into a tensor of shape {show_shape(node.src[0].shape)}",
        because="what is written, or where, differs between the examples, but the tensor is the same for all",
        fix="return the new value from the function, or build it with where() or scatter()",
    )


# ---- kernels and values with a gradient function -----------------------------------------------------------


class BatchedGradient:
    """The gradient function of one example's kernel, or value, for all examples. batched: by source."""

    def __init__(self, function: Any, batched: tuple[bool, ...], of: Batch) -> None:
        self.function, self.batched, self.of = function, batched, of

    def __call__(
        self, upstreams: list[UOp | None], outputs: list[UOp], values: tuple[UOp, ...]
    ) -> list[UOp | None]:
        changes = dict(self.of.changes)

        def single(node: UOp, shape: Shape) -> UOp:
            base, shaped = stand_in(shape, node.dtype, node.device or default_device(), "vmap")
            changes[base] = node.reshape((node.shape[0], prod(shape)))
            changes[shaped] = node
            return shaped

        one = [None if g is None else single(g, g.shape[1:]) for g in upstreams]
        outs = [single(out, out.shape[1:]) for out in outputs]
        sources = [single(v, v.shape[1:]) if b else v for v, b in zip(values, self.batched, strict=True)]
        parts = list(self.function(one, outs, tuple(sources)))
        known = [part for part in parts if part is not None]
        found = iter(batch(known, Batch(self.of.size, changes)))
        return [
            None if part is None else self.gathered(next(found), b)
            for part, b in zip(parts, self.batched, strict=True)
        ]

    def gathered(self, part: Source, batched: bool) -> UOp:
        """For a source that is the same for all examples, the sum over them."""
        full = expanded(part, self.of.size)
        return full if batched else total(full, (0,))


def _call(node: UOp, sources: list[Source], of: Batch) -> UOp:
    """A kernel with a loop over the examples around it; a gradient function for all of them."""
    arg, flags = node.arg, tuple([s.batched for s in sources])
    outputs = tuple([((of.size, *shape), dtype) for shape, dtype in arg.outputs])
    src = tuple([s.node for s in sources])
    gradient = None if arg.gradient is None else BatchedGradient(arg.gradient, flags, of)
    if isinstance(arg, Given):
        return node.replace(src=src, arg=Given(outputs, gradient, fresh_uid(), arg.through))  # type: ignore[arg-type]
    assert isinstance(arg, CallArg), f"a CALL with {type(arg).__name__}"
    if arg.kernel.op is Ops.SCAN:
        from whit.transforms.loops import batched_call

        return batched_call(node, sources, of)
    sizes = [prod(unbound(shape)) for shape, _ in arg.outputs] + [prod(unbound(s.shape)) for s in node.src]
    kernel = looped(arg.kernel, of.size, [True] * len(outputs) + list(flags), sizes)
    return node.replace(src=src, arg=CallArg(kernel, outputs, arg.device, gradient))


def _output(node: UOp, sources: list[Source], of: Batch) -> UOp:
    call = sources[0]
    if len(node.src) == 1 and node.src[0].arg.kernel.op is Ops.SCAN:  # steps first, examples second
        shape = (node.shape[0], of.size, *node.shape[1:])
        made = UOp(Ops.OUTPUT, node.dtype, (call.node,), (node.arg[0], shape))
        return made.permute((1, 0, *range(2, made.ndim)))
    if len(node.src) == 1:
        shape = (of.size, *node.shape)
        return UOp(Ops.OUTPUT, node.dtype, (call.node,), (node.arg[0], shape))
    made = call.node if call.batched else _call(call.node, [Source(s, False) for s in call.node.src], of)
    return given_output(made, node.arg[0], expanded(sources[1], of.size))


def looped(kernel: UOp, size: Sint, batched: Sequence[bool], sizes: Sequence[Sint]) -> UOp:
    """A kernel that does the same for `size` examples. batched: by slot, whether a PARAM holds all of them,
    one after another, each of `sizes` elements."""
    if not isinstance(size, int):
        raise ArgumentError(
            "vmap of a kernel over a symbolic number of examples",
            because="its memory must be known",
            fix="map over a fixed number",
        )
    return (
        _looped_program(kernel, size, batched, sizes)
        if kernel.op is Ops.LINEAR
        else _looped_sink(kernel, size, batched, sizes)
    )


def _shifted(
    old: UOp, new: UOp, example: UOp, size: int, batched: Sequence[bool], sizes: Sequence[Sint]
) -> UOp:
    """Arrays of all examples, and accesses to the present example's part."""
    if old.op is Ops.PARAM and batched[old.arg.slot]:
        return old.replace(arg=ParamArg(old.arg.slot, old.arg.size * size))
    if old.op in _ACCESS and old.src[0].op is Ops.PARAM and batched[old.src[0].arg.slot]:
        at = example * UOp.index(sizes[old.src[0].arg.slot]) + new.src[1]
        return new.replace(src=(new.src[0], at, *new.src[2:]))
    return new


_ACCESS = (Ops.INDEX, Ops.LOAD, Ops.STORE)


def _looped_sink(kernel: UOp, size: int, batched: Sequence[bool], sizes: Sequence[Sint]) -> UOp:
    """The examples are the outermost loop, number 0; the others move up by one."""
    example = UOp.range(size, AxisType.LOOP, 0)

    def change(old: UOp, new: UOp) -> UOp:
        if old.op is Ops.RANGE:
            return new.replace(arg=RangeArg(old.arg.uid + 1, old.arg.axis))
        if old.op is Ops.END:
            return new.replace(src=(new.src[0], example, *new.src[1:]))
        if old is kernel:
            return new.replace(src=tuple([s.end(example) if s.op is Ops.STORE else s for s in new.src]))
        return _shifted(old, new, example, size, batched, sizes)

    return rebuild(kernel, change)


def _looped_program(kernel: UOp, size: int, batched: Sequence[bool], sizes: Sequence[Sint]) -> UOp:
    """The examples are a loop around the program: its parallel one, or inside of the program's own if that
    has more rounds."""
    number = 1 + max([_number(node) for node in kernel.toposort()])
    first = kernel.src[0]
    has_own = first.op is Ops.RANGE and first.arg.axis is AxisType.THREAD
    own = first.src[0].arg if has_own and first.src[0].op is Ops.CONST else 0
    inside = own > size
    example = UOp.range(size, AxisType.LOOP if inside else AxisType.THREAD, number)

    def change(old: UOp, new: UOp) -> UOp:
        if old is first and has_own and not inside:
            return new.replace(arg=RangeArg(old.arg.uid, AxisType.LOOP))
        return new if old is kernel else _shifted(old, new, example, size, batched, sizes)

    items = rebuild(kernel, change).src
    end = UOp(Ops.END, dtypes.void, (example,))
    made = (items[0], example, *items[1:-1], end, items[-1]) if inside else (example, *items, end)
    return kernel.replace(src=made)


def _number(node: UOp) -> int:
    """The number that a statement of a program bears."""
    if node.op is Ops.RANGE:
        return int(node.arg.uid)
    return node.arg if node.op in (Ops.LOAD, Ops.IF) and isinstance(node.arg, int) else -1


RULES: dict[Op, Rule] = {
    **{op: _elementwise for op in ELEMENTWISE},
    Ops.RESHAPE: _reshape,
    Ops.EXPAND: _expand,
    Ops.PERMUTE: _permute,
    Ops.PAD: _pad,
    Ops.SHRINK: _shrink,
    Ops.FLIP: _flip,
    Ops.REDUCE: _reduce,
    Ops.TAKE: _take,
    Ops.CONTIGUOUS: _same_op,
    Ops.COPY: _same_op,
    Ops.DETACH: _detach,
    Ops.STORE: _write,
    Ops.AFTER: _write,
    Ops.CALL: _call,
    Ops.OUTPUT: _output,
}
