"""The backward walk: from outputs to inputs, adding up what the rules of `rules.py` contribute. Graph to
graph."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from whit.autograd.rules import RULES, unbroadcast
from whit.uop import Ops, UOp

# BUFFER -> the graph that computed what lies in it, for gradients (see history.py)
origins: weakref.WeakKeyDictionary[UOp, UOp] = weakref.WeakKeyDictionary()


def gradient(outputs: Sequence[UOp], inputs: Sequence[UOp], upstreams: Sequence[UOp]) -> list[UOp | None]:
    """The gradients of sum(output * upstream) over all outputs, one per input; None where no output depends
    on the input through differentiable operations.

    Shapes and dtypes: upstreams like outputs, results like inputs; everything is a float. The order in which
    contributions are added depends on the graph only. Gradients are plain graphs: they can be differentiated
    again.
    """
    order = _order(outputs)
    anchors = [anchor_of(node) for node in inputs]
    wanted = set(anchors)
    on_path: set[UOp] = set()
    moved: dict[UOp, UOp] = {}  # inputs whose value has been given memory since the graph was built
    for node in order:
        if node.became is not None and node not in wanted and anchor_of(node.became) in wanted:
            moved[node] = anchor_of(node.became)
        if node in wanted or node in moved or any(source in on_path for source in edges_of(node)):
            on_path.add(node)
    on_path.update(moved.values())
    sums: dict[UOp, UOp] = {}
    for output, upstream in zip(outputs, upstreams, strict=True):
        _add(sums, output, upstream)
    for node in reversed(order):
        g = sums.get(node)
        if g is not None and node in on_path:
            _spread(node, g, on_path, sums)
            if node in moved:
                _add(sums, moved[node], g.reshape(moved[node].shape))
            if node not in wanted:
                del sums[node]
    return [_result(node, anchor, sums, on_path) for node, anchor in zip(inputs, anchors, strict=True)]


def anchor_of(node: UOp) -> UOp:
    """Where gradients of an input are gathered: for a shaped BUFFER the BUFFER itself, because a reshape of a
    reshape is built on the source and would pass the shaped node by."""
    return node.src[0] if node.op is Ops.RESHAPE and node.src[0].op is Ops.BUFFER else node


def _spread(node: UOp, g: UOp, on_path: set[UOp], sums: dict[UOp, UOp]) -> None:
    """Add the contributions of one node to its sources."""
    sources = _operands(node)
    if node.op is Ops.BUFFER:
        for source in sources:
            _add(sums, source, g.reshape(source.shape))
    for source, rule in zip(sources, RULES.get(node.op, ()), strict=False):
        if source not in on_path or not source.dtype.is_float:
            continue
        part = rule(g, node, *sources)
        if part is not None:
            _add(sums, source, unbroadcast(part, source.shape) if node.op.is_elementwise else part)


def _add(sums: dict[UOp, UOp], node: UOp, part: UOp) -> None:
    old = sums.get(node)
    sums[node] = part if old is None else old.alu(Ops.ADD, part)


def _result(node: UOp, anchor: UOp, sums: dict[UOp, UOp], on_path: set[UOp]) -> UOp | None:
    """The sum; zeros where the output depends on the input through steps only (floor)."""
    if anchor in sums:
        return sums[anchor].reshape(node.shape)
    if anchor not in on_path:
        return None
    return node.const_like(0).reshape((1,) * node.ndim).expand(node.shape)


def _operands(node: UOp) -> tuple[UOp, ...]:
    """What the rule is about: the sources; of a write, (old version, view, value); of memory, its history."""
    if node.op is Ops.BUFFER:
        root = origins.get(node)
        return () if root is None else (root,)
    if node.op is Ops.AFTER:
        target, *stores = node.src
        assert len(stores) == 1, "an AFTER of several writes is split before gradients are taken"
        return (target, *stores[0].src)
    return node.src


def edges_of(node: UOp) -> tuple[UOp, ...]:
    """The sources through which a gradient may flow."""
    if not node.dtype.is_float or (node.op not in RULES and node.op is not Ops.BUFFER):
        return ()
    return tuple([source for source in _operands(node) if source.dtype.is_float])


def _order(outputs: Sequence[UOp]) -> list[UOp]:
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
