"""Ragged edges: rows of a tile beyond the end of an axis are computed, but no store keeps them. What they
read does not matter, so they read the first row instead of asking at every step of a sum whether they may.

Before:  STORE(c, i, REDUCE(a[i*64 + k] if i < 509, k), i < 509)
After:   STORE(c, i, REDUCE(a[(i if i < 509 else 0)*64 + k], k), i < 509)
"""

from __future__ import annotations

from whit.codegen.access import choose_vector_axes
from whit.codegen.target import Target
from whit.uop import AxisType, Ops, UOp
from whit.uop.rewrite import rebuild
from whit.uop.symbolic import conditions_of, conjunction, from_linear, linear_form


def free_edges(ast: UOp, target: Target) -> UOp:
    """Reads inside of sums without the masks that all stores repeat; of a kernel after `crop loops`.

    Only masks of the form `terms < size` go, where the read's index has a multiple of the same terms: the
    first element along that axis is then always there. A masked vector costs nothing and stays.
    """
    bounds = _kept_by_stores(ast)
    if not bounds or target.has_local:  # work-items read what others computed for them
        return ast
    order = ast.toposort()
    vectors = frozenset(choose_vector_axes(order, target))
    changes: dict[UOp, UOp] = {}
    for node in order:
        in_sum = any(r.arg.axis is AxisType.REDUCE for r in node.ranges)
        if node.op is Ops.INDEX and len(node.src) > 2 and in_sum:
            for bound in bounds.intersection(conditions_of(node.src[2])):
                if vectors.isdisjoint(bound.ranges):
                    changes[node] = _at_first(changes.get(node, node), bound)
    return rebuild(ast, lambda old, new: new, changes) if changes else ast


def _kept_by_stores(ast: UOp) -> frozenset[UOp]:
    """The bounds without which nothing is stored, of axes that no sum folds."""
    found: frozenset[UOp] | None = None
    for end in ast.src:
        store = end.src[0] if end.op is Ops.END else end
        mine = frozenset(conditions_of(store.src[3]) if len(store.src) > 3 else ())
        found = mine if found is None else found & mine
    return frozenset([c for c in found or () if c.op is Ops.CMPLT and c.src[1].op is Ops.CONST])


def _at_first(read: UOp, bound: UOp) -> UOp:
    """The read without the bound, at 0 along its axis where the bound does not hold; the same read if its
    index or its other masks use the axis in other ways."""
    (axis, start), size = linear_form(bound.src[0]), bound.src[1].arg
    rest, constant = linear_form(read.src[1])
    others = [c for c in conditions_of(read.src[2]) if c is not bound] if len(read.src) > 2 else []
    first = next(iter(axis), None)
    step = rest.get(first, 0) // axis[first] if first is not None else 0
    if start or size <= 0 or bound.src[0].vmin < 0:
        return read
    if any(rest.get(t, 0) != f * step for t, f in axis.items()):
        return read
    rest = {t: f for t, f in rest.items() if t not in axis}
    if step < 1 or any(not _counters(bound).isdisjoint(_counters(u)) for u in (*rest, *others)):
        return read
    place = bound.where(from_linear(axis, 0), UOp.index(0))
    mask = conjunction(*others)
    index = from_linear(rest | {place: step}, constant)
    return read.replace(src=(read.src[0], index) if mask is None else (read.src[0], index, mask))


def _counters(u: UOp) -> frozenset[UOp]:
    return frozenset([node for node in u.toposort() if node.op in (Ops.RANGE, Ops.SPECIAL)])
