"""How values that are in memory were computed, as long as a gradient may still ask for it.

Realizing a tensor replaces its graph by a BUFFER. If the graph leads to a tensor with requires_grad=True, it
is kept here beside the BUFFER, so that `loss.item()` before `loss.backward()`, or a realized inner value,
costs no gradient. The graph lives as long as the BUFFER. It is dropped when something that it reads is
overwritten: its values would be lost.
"""

from __future__ import annotations

from whit.autograd.gradient import Origin, anchor_of, edges_of, origins
from whit.autograd.marks import is_link
from whit.tensor import Tensor
from whit.uop import Ops, UOp


def remember(buffer: UOp, root: UOp) -> None:
    """Keep the graph `root`, whose value lies in `buffer` now, if a gradient could flow through it."""
    if not Tensor.gradients_wanted or not root.dtype.is_float or root.size != buffer.arg.size:
        return
    leaves = {anchor_of(t.uop) for t in Tensor.live if t.requires_grad}
    links = {node.arg for node in leaves if is_link(node)}
    if anchor_of(root) in leaves and not is_link(root):
        return
    seen: set[UOp] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if (
            node in leaves
            or (is_link(node) and node.arg in links)
            or (node.became is not None and anchor_of(node.became) in leaves)
        ):
            origins[buffer] = _below_views(root)
            return
        for source in edges_of(node):
            if source not in seen:
                seen.add(source)
                stack.append(source)


def _below_views(root: UOp) -> Origin:
    """The node that computes; the views above it keep every element in its place, as the BUFFER does."""
    while root.op in (Ops.RESHAPE, Ops.CONTIGUOUS):
        root = root.src[0]
    return root.op, root.dtype, root.src, root.arg


def forget_readers(versions: set[UOp]) -> None:
    """Drop the graphs that read one of these versions of buffers, which are about to be overwritten."""
    for buffer, (_, _, sources, _) in list(origins.items()):
        if buffer in versions or _reads(sources, versions):
            del origins[buffer]


def _reads(sources: tuple[UOp, ...], versions: set[UOp]) -> bool:
    seen: set[UOp] = set()
    stack = list(sources)
    while stack:
        node = stack.pop()
        if node in versions:
            return True
        for source in (*node.src, *((node.became,) if node.became is not None else ())):
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return False
