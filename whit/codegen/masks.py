"""Masks and nested sums of a kernel in their simplest form, before opts look at its axes.

Gradients of padded and windowed values arrive as sums inside of sums with the same mask on every operand:

Before:  REDUCE(WHERE(v, REDUCE(INDEX(a, …, v) * INDEX(w, …, v), c; ADD), 0), p, q; ADD)
After:   REDUCE(INDEX(a, …, v) * INDEX(w, …), p, q, c; ADD)

A product is taken to be 0 where one factor is masked off if the other one is a sum or product of data, as in
every padded convolution: data are assumed to be finite. What may divide by a masked 0 is not.
"""

from __future__ import annotations

import math

from whit.uop import Ops, UOp, dtypes
from whit.uop.rewrite import rebuild
from whit.uop.symbolic import conjunction, operands

_DEPTH = 12  # how far below a choice a mask is looked for


def simplify_masks(ast: UOp) -> UOp:
    """Drop choices and masks that another mask implies, and flatten sums of sums."""
    order = ast.toposort()
    if not any(u.op is Ops.REDUCE or u.op is Ops.WHERE for u in order):
        return ast
    uses: dict[UOp, int] = {}
    for node in order:
        for s in node.src:
            uses[s] = uses.get(s, 0) + 1

    def simpler(old: UOp, new: UOp) -> UOp:
        if new.op is Ops.WHERE:
            return _choice(new, uses[old.src[1]] == 1)
        if new.op is Ops.REDUCE:
            if uses.get(old.src[0]) == 1:
                new = _flatten(new)
            if new.arg.op is Ops.ADD and new.src[0].op is Ops.MUL:
                new = new.replace(src=(_product(new.src[0]), *new.src[1:]))
        return new

    return rebuild(ast, simpler)


def is_zero(node: UOp, outside: UOp, depth: int = _DEPTH) -> bool:
    """Whether the value is 0 wherever the condition `outside` is false."""
    op = node.op
    if op is Ops.INDEX:
        return len(node.src) > 2 and outside in operands(node.src[2], Ops.AND)
    if op is Ops.CONST:
        return _positive_zero(node)
    if depth == 0:
        return False
    if op is Ops.MUL:
        a, b = node.src  # inf * 0 is NaN
        return (is_zero(a, outside, depth - 1) and is_finite(b, depth)) or (
            is_zero(b, outside, depth - 1) and is_finite(a, depth)
        )
    if op in (Ops.CAST, Ops.NEG) or (op is Ops.REDUCE and node.arg.op is Ops.ADD):
        return is_zero(node.src[0], outside, depth - 1)
    if op in (Ops.ADD, Ops.SUB, Ops.MAX, Ops.MIN):
        return all(is_zero(s, outside, depth - 1) for s in node.src)
    if op is Ops.WHERE:
        return all(is_zero(s, outside, depth - 1) for s in node.src[1:])
    return False


def is_finite(node: UOp, depth: int) -> bool:
    """Whether finite data and any mask make the value finite (but for overflow of sums and products)."""
    if not node.dtype.is_float or node.op is Ops.INDEX:
        return True
    if node.op is Ops.CONST:
        return math.isfinite(node.arg)
    if depth == 0 or node.op not in _KEEP_FINITE:
        return False
    return all(is_finite(s, depth - 1) for s in node.src)


_KEEP_FINITE = frozenset({
    Ops.ADD, Ops.SUB, Ops.MUL, Ops.MULACC, Ops.NEG, Ops.MAX, Ops.MIN, Ops.CAST, Ops.WHERE, Ops.SIN, Ops.ERF,
    Ops.TRUNC, Ops.FLOOR, Ops.REDUCE,
})


def _positive_zero(node: UOp) -> bool:
    """A constant 0, but not -0.0."""
    return node.op is Ops.CONST and node.arg == 0 and math.copysign(1.0, node.arg) > 0


def _choice(where: UOp, alone: bool) -> UOp:
    """WHERE(v, x, 0) without the conditions outside of which x is 0 anyway; on a read that nothing else needs
    they become its mask, unless they come from memory themselves."""
    condition, value, other = where.src
    if not _positive_zero(other) or where.dtype is dtypes.index:
        return where
    if value.op is Ops.INDEX and alone and not any(u.op is Ops.INDEX for u in condition.toposort()):
        mask = conjunction(condition, *value.src[2:])
        return value if mask is None else value.replace(src=(*value.src[:2], mask))
    found = operands(condition, Ops.AND)
    kept = [c for c in found if not is_zero(value, c)]
    if len(kept) == len(found):
        return where
    mask = conjunction(*kept)
    return value if mask is None else mask.where(value, other)


def _flatten(reduce: UOp) -> UOp:
    """A sum of sums (also: a maximum of maxima) is one over all the ranges."""
    inner = reduce.src[0]
    while inner.op is Ops.REDUCE and inner.arg == reduce.arg and not set(inner.src[1:]) & set(reduce.src[1:]):
        reduce = reduce.replace(src=(inner.src[0], *reduce.src[1:], *inner.src[1:]))
        inner = reduce.src[0]
    return reduce


def _product(product: UOp) -> UOp:
    """Factors that lie within their buffer anyway need no mask that another factor has."""
    factors = operands(product, Ops.MUL)
    result: list[UOp] = list(factors)
    for at, factor in enumerate(factors):
        if factor.op is Ops.INDEX and len(factor.src) > 2 and _in_bounds(factor):
            others = [f for n, f in enumerate(result) if n != at]
            kept = [c for c in operands(factor.src[2], Ops.AND) if not any(is_zero(f, c) for f in others)]
            mask = conjunction(*kept)
            result[at] = factor.replace(src=factor.src[:2] if mask is None else (*factor.src[:2], mask))
    if all(a is b for a, b in zip(result, factors, strict=True)):
        return product
    total = result[0]
    for factor in result[1:]:
        total = total * factor
    return total


def _in_bounds(read: UOp) -> bool:
    if read.src[0].op is not Ops.PARAM:
        return False
    low, high = read.src[1].bounds
    return bool(low >= 0 and high < read.src[0].arg.size)
