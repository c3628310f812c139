"""How values that are in memory were computed, as long as a gradient may still ask for it.

Realizing a tensor replaces its graph by a BUFFER. If the graph leads to a tensor with requires_grad=True, it
is kept here beside the BUFFER, so that `loss.item()` before `loss.backward()`, or a realized inner value,
costs no gradient. The graph lives as long as the BUFFER. It is dropped when something that it reads is
overwritten: its values would be lost.
"""

from __future__ import annotations

from whit.autograd.gradient import anchor_of, edges_of, origins
from whit.tensor import Tensor
from whit.uop import UOp


def remember(buffer: UOp, root: UOp) -> bool:
    """Keep the graph `root`, whose value lies in `buffer` now, if a gradient could flow through it; whether
    it was kept."""
    if not Tensor.gradients_wanted or not root.dtype.is_float or root.size != buffer.arg.size:
        return False
    leaves = {anchor_of(t.uop) for t in Tensor.live if t.requires_grad}
    if anchor_of(root) in leaves:
        return False
    seen: set[UOp] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if node in leaves or (node.became is not None and anchor_of(node.became) in leaves):
            origins[buffer] = root
            return True
        for source in edges_of(node):
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return False


def forget_readers(versions: set[UOp]) -> None:
    """Drop the graphs that read one of these versions of buffers, which are about to be overwritten."""
    for buffer, root in list(origins.items()):
        if buffer in versions or _reads(root, versions):
            del origins[buffer]


def _reads(root: UOp, versions: set[UOp]) -> bool:
    seen: set[UOp] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if node in versions:
            return True
        for source in (*node.src, *((node.became,) if node.became is not None else ())):
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return False
