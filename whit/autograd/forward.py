"""The forward walk: from inputs to outputs, how outputs change with the inputs. Graph to graph.

A rule per op takes the node, the changes (tangents) of its sources, None where one does not change, and
the sources; it gives the change of the result. Elementwise ops need no rules of their own: their derivative
maps each element by itself, so that the backward rule, applied to the tangent, is the forward one. Movement
maps tangents as it maps values. Kernels and values with a gradient function of their own give the transpose
of that function: it is linear in the upstream, so that the gradient of what it makes of some upstream, by
that upstream, is exactly the forward derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from whit.autograd.gradient import edges_of, gradient, kernel_outputs, operands_of, order_of
from whit.autograd.marks import is_link, link
from whit.autograd.rules import RULES, product_of_others, shares, total, view_chain, written_mask
from whit.uop import Op, Ops, UOp
from whit.uop.rewrite import rebuild

Tangent = UOp | None
ForwardRule = Callable[..., Tangent]


def tangents(outputs: Sequence[UOp], inputs: Sequence[UOp], given: Sequence[UOp]) -> list[Tangent]:
    """How each output changes when the inputs change by `given`, to first order; None where it does not
    depend on them.

    Shapes and dtypes: `given` like inputs, results like outputs. No input may depend on another one. Results
    are plain graphs: they can be differentiated again.
    """
    found: dict[UOp, Tangent] = dict(zip(inputs, given, strict=True))
    links = {node.arg: change for node, change in found.items() if is_link(node)}
    outputs = _opened(outputs, inputs)
    for node in order_of(outputs):
        if node in found:
            continue
        if is_link(node) and node.arg in links:  # on what the input's value became
            found[node] = links[node.arg]
            continue
        found[node] = None
        if node.op is Ops.OUTPUT:
            found[node] = _output(node, found)
            continue
        edges = edges_of(node)
        if node.op is Ops.CALL or all([found[edge] is None for edge in edges]):
            continue
        moved = set(edges)
        sources = operands_of(node)
        found[node] = forward(node, [found[s] if s in moved else None for s in sources], sources)
    return [found[node] for node in outputs]


def _opened(outputs: Sequence[UOp], inputs: Sequence[UOp]) -> Sequence[UOp]:
    """The graphs without the gradient functions that forward mode may look through."""

    def is_closed(node: UOp) -> bool:
        return node.op is Ops.OUTPUT and len(node.src) == 2 and bool(node.src[0].arg.through)

    sink = UOp.sink(*outputs)
    if not any([is_closed(node) for node in sink.toposort()]):
        return outputs
    return rebuild(
        sink, lambda old, new: new.src[1] if is_closed(old) else new, known={node: node for node in inputs}
    ).src


def forward(node: UOp, parts: Sequence[Tangent], sources: Sequence[UOp]) -> Tangent:
    """The tangent of a node from those of its operands, of which at least one is known."""
    if is_link(node):
        return parts[0]
    if node.op is Ops.BUFFER:  # its history
        return None if parts[0] is None else parts[0].reshape(node.shape)
    return FORWARD[node.op](node, parts, *sources)


# ---- rules -------------------------------------------------------------------------------------------------


def _elementwise(out: UOp, parts: Sequence[Tangent], *sources: UOp) -> Tangent:
    """The sum over the sources of the local derivative times the tangent."""
    result: Tangent = None
    for part, rule in zip(parts, RULES[out.op], strict=True):
        change = None if part is None else rule(part, out, *sources)
        if change is not None:
            result = change if result is None else result.alu(Ops.ADD, change)
    if result is None or result.shape == out.shape:
        return result
    return result.reshape((1,) * (out.ndim - result.ndim) + result.shape).expand(out.shape)


def _cast(out: UOp, parts: Sequence[Tangent], x: UOp) -> Tangent:
    return None if parts[0] is None else parts[0].cast(out.dtype)


def _same_op(out: UOp, parts: Sequence[Tangent], x: UOp) -> Tangent:
    """Linear ops without arithmetic: what happens to the value happens to its tangent."""
    return None if parts[0] is None else out.replace(src=(parts[0],))


def _reduce(out: UOp, parts: Sequence[Tangent], x: UOp) -> Tangent:
    op, axes, part = out.arg.op, out.arg.axes, parts[0]
    if part is None:
        return None
    if op is Ops.ADD:
        return total(part, axes)
    if op is Ops.MUL:
        return total(part * product_of_others(x, axes), axes)
    attains, count = shares(out, x, axes)
    chosen = total(attains.where(part, part.const_like(0)), axes)
    return (chosen.cast(count.dtype) / count.reshape(out.shape)).cast(x.dtype)


def _take(out: UOp, parts: Sequence[Tangent], x: UOp, index: UOp) -> Tangent:
    return None if parts[0] is None else out.replace(src=(parts[0], index))


def _after(out: UOp, parts: Sequence[Tangent], target: UOp, view: UOp, value: UOp) -> Tangent:
    """The tangent of what was written, where it was written."""
    old, _, new = parts
    written = written_mask(target, view)
    if new is not None:
        for node in view_chain(view, target):
            new = RULES[node.op][0](new, node, node.src[0])
            assert new is not None, f"views have no {node.op}"
    if written is None:  # everything was overwritten
        return new
    zero = out.const_like(0)
    return written.where(zero if new is None else new, zero if old is None else old)


FORWARD: dict[Op, ForwardRule] = {
    **{op: _elementwise for op in RULES if op.is_elementwise},
    **{op: _same_op for op in RULES if op.is_movement},
    Ops.CAST: _cast,
    Ops.CONTIGUOUS: _same_op,
    Ops.COPY: _same_op,
    Ops.REDUCE: _reduce,
    Ops.TAKE: _take,
    Ops.AFTER: _after,
}


def _output(node: UOp, found: dict[UOp, Tangent]) -> Tangent:
    """A value of a given kernel, or one with a gradient function: the transpose of that function."""
    call = node.src[0]
    moved = [(source, found[source]) for source in edges_of(call) if found[source] is not None]
    if not moved:
        return None
    upstream = link(node.const_like(0).reshape((1,) * node.ndim).expand(node.shape))
    ups: list[UOp | None] = [upstream if n == node.arg[0] else None for n in range(len(call.arg.outputs))]
    changes = dict(moved)
    pairs = [
        (part, change)
        for source, part in zip(call.src, call.arg.gradient(ups, kernel_outputs(call), call.src), strict=True)
        if part is not None and (change := changes.get(source)) is not None
    ]
    if not pairs:
        return None
    return gradient([part for part, _ in pairs], [upstream], [change for _, change in pairs])[0]
