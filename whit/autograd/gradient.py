"""The backward walk: from outputs to inputs, adding up what the rules of `rules.py` contribute. Graph to
graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from whit.autograd.marks import Given, is_link
from whit.autograd.rules import RULES, unbroadcast
from whit.uop import DType, Op, Ops, UOp

# BUFFER -> (op, dtype, src, arg) of the node that computed what lies in it, for gradients (see history.py).
# Not the
# node itself: that one may name the BUFFER as what it became, and then neither would ever be freed
Origin = tuple[Op, DType, tuple[UOp, ...], Any]
origins: weakref.WeakKeyDictionary[UOp, Origin] = weakref.WeakKeyDictionary()
on_rule: list[Callable[[UOp, UOp], None]] = []  # who wants to see each contribution that a rule makes


def gradient(outputs: Sequence[UOp], inputs: Sequence[UOp], upstreams: Sequence[UOp]) -> list[UOp | None]:
    """The gradients of sum(output * upstream) over all outputs, one per input; None where no output depends
    on the input through differentiable operations.

    Shapes and dtypes: upstreams like outputs, results like inputs; everything is a float. The order in which
    contributions are added depends on the graph only. Gradients are plain graphs: they can be differentiated
    again.
    """
    order = order_of(outputs)
    anchors = [anchor_of(node) for node in inputs]
    wanted = set(anchors)
    twins = _twins(order, wanted)
    on_path: set[UOp] = set()
    for node in order:
        if node in wanted or node in twins or any(source in on_path for source in edges_of(node)):
            on_path.add(node)
    sums: dict[UOp, UOp] = {}
    results: dict[UOp, UOp] = {}
    given: dict[UOp, list[UOp | None]] = {}  # CALL -> the gradients of its outputs
    for output, upstream in zip(outputs, upstreams, strict=True):
        _add(sums, output, upstream)
    for node in reversed(order):
        if node.op is Ops.CALL:
            if node in on_path and node in given:
                _spread_call(node, given.pop(node), on_path, sums)
            continue
        g = sums.pop(node, None)
        if g is not None and node.op is Ops.OUTPUT and node.src[0] in on_path:
            call, number = node.src[0], node.arg[0]
            given.setdefault(call, [None] * len(call.arg.outputs))[number] = g
        if g is not None and node in on_path:
            _spread(node, g, on_path, sums)
            target = node if node in wanted else twins.get(node)
            if target is not None:
                _add(results, target, g.reshape(target.shape))
    reached = on_path.union(twins[node] for node in twins)
    return [_result(node, anchor, results, reached) for node, anchor in zip(inputs, anchors, strict=True)]


def anchor_of(node: UOp) -> UOp:
    """Where gradients of an input are gathered: for a shaped piece of a BUFFER the piece itself, because a
    reshape of a reshape is built on the source and would pass the shaped node by."""
    if node.op is not Ops.RESHAPE:
        return node
    base = node.src[0]
    while base.op.is_movement:
        base = base.src[0]
    return node.src[0] if base.op is Ops.BUFFER else node


def _twins(order: list[UOp], wanted: set[UOp]) -> dict[UOp, UOp]:
    """Nodes that stand for an input under another form: its graph from before it was given memory, reshapes
    of an input that is itself a reshape (they are built on its source), and a link on what its value became.
    """
    links = {node.arg: node for node in wanted if is_link(node)}
    shaped = {node.src[0]: node for node in wanted if node.op is Ops.RESHAPE}
    found: dict[UOp, UOp] = {}
    for node in order:
        if node in wanted:
            continue
        if node.became is not None and anchor_of(node.became) in wanted:
            found[node] = anchor_of(node.became)
        elif node.op is Ops.RESHAPE and node.src[0] in shaped:
            found[node] = shaped[node.src[0]]
        elif is_link(node) and node.arg in links:
            found[node] = links[node.arg]
    return found


def _spread(node: UOp, g: UOp, on_path: set[UOp], sums: dict[UOp, UOp]) -> None:
    """Add the contributions of one node to its sources."""
    sources = operands_of(node)
    if node.op is Ops.BUFFER:
        for source in sources:
            _add(sums, source, g.reshape(source.shape))
    if is_link(node):
        _add(sums, node.src[0], g)
    for source, rule in zip(sources, RULES.get(node.op, ()), strict=False):
        if source not in on_path or not source.dtype.is_float:
            continue
        part = rule(g, node, *sources)
        if part is not None:
            part = unbroadcast(part, source.shape) if node.op.is_elementwise else part
            for see in on_rule:
                see(node, part)
            _add(sums, source, part)


def _spread_call(call: UOp, upstreams: list[UOp | None], on_path: set[UOp], sums: dict[UOp, UOp]) -> None:
    """Add what the gradient function of a given kernel says."""
    parts = call.arg.gradient(upstreams, kernel_outputs(call), call.src)
    for source, part in zip(call.src, parts, strict=True):
        if part is not None and source in on_path and source.dtype.is_float:
            _add(sums, source, part)


def kernel_outputs(call: UOp) -> list[UOp]:
    """What a given kernel writes; nothing for given values, whose graphs are not known here."""
    if isinstance(call.arg, Given):
        return []
    return [UOp(Ops.OUTPUT, dtype, (call,), (n, shape)) for n, (shape, dtype) in enumerate(call.arg.outputs)]


def _add(sums: dict[UOp, UOp], node: UOp, part: UOp) -> None:
    old = sums.get(node)
    sums[node] = part if old is None else old.alu(Ops.ADD, part)


def _result(node: UOp, anchor: UOp, results: dict[UOp, UOp], reached: set[UOp]) -> UOp | None:
    """The sum; zeros where the output depends on the input through steps only (floor)."""
    if anchor in results:
        return results[anchor].reshape(node.shape)
    if anchor not in reached:
        return None
    return node.const_like(0).reshape((1,) * node.ndim).expand(node.shape)


def operands_of(node: UOp) -> tuple[UOp, ...]:
    """What the rule is about: the sources; of a write, (old version, view, value); of memory, its history."""
    if node.op is Ops.BUFFER:
        origin = origins.get(node)
        return () if origin is None else (UOp(*origin),)
    if node.op is Ops.AFTER:
        target, *stores = node.src
        assert len(stores) == 1, "an AFTER of several writes is split before gradients are taken"
        return (target, *stores[0].src)
    return node.src


def edges_of(node: UOp) -> tuple[UOp, ...]:
    """The sources through which a gradient may flow."""
    if node.op is Ops.CALL:
        return tuple([s for s in node.src if s.dtype.is_float]) if node.arg.gradient is not None else ()
    if node.op is Ops.OUTPUT:
        return node.src[:1] if node.dtype.is_float and edges_of(node.src[0]) else ()
    if is_link(node):
        return node.src if node.dtype.is_float else ()
    if not node.dtype.is_float or (node.op not in RULES and node.op is not Ops.BUFFER):
        return ()
    return tuple([source for source in operands_of(node) if source.dtype.is_float])


def order_of(outputs: Sequence[UOp]) -> list[UOp]:
    """The nodes that a gradient passes, sources first. No recursion: graphs may be very deep."""
    done: dict[UOp, None] = {}
    stack: list[tuple[UOp, bool]] = [(node, False) for node in reversed(outputs)]
    while stack:
        node, ready = stack.pop()
        if node in done:
            continue
        edges = () if ready else edges_of(node)
        if not edges:
            done[node] = None
            continue
        stack.append((node, True))
        for source in reversed(edges):
            if source not in done:
                stack.append((source, False))
    return list(done)
