"""One gradient rule per op: for each source, the upstream gradient times the local derivative, as tensor
graphs.

A rule is a tuple with one function per source, called as `rule(g, out, *sources)`: `g` is the gradient of the
result (shape and dtype of `out`), `out` the node itself. It returns the source's contribution, or None for no
gradient. Only the functions of the sources that matter are called. Rules of elementwise ops may return the
broadcast shape: the walk sums the broadcast axes. Derivatives use `out` where they can, so that a backward
kernel reads what forward already computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from whit.helpers import argsort, prod
from whit.tensor.scatter import add_slices, is_large
from whit.uop import Op, Ops, Shape, UOp, dtypes

SourceRule = Callable[..., UOp | None]
NARROW = (dtypes.float16, dtypes.bfloat16, *dtypes.fp8s)  # summed in float32


def total(x: UOp, axes: tuple[int, ...]) -> UOp:
    """Sum over axes, which vanish; narrow floats are added up in float32."""
    if x.dtype in NARROW and axes:
        return x.cast(dtypes.float32).reduce(Ops.ADD, axes).cast(x.dtype)
    return x.reduce(Ops.ADD, axes)


def unbroadcast(g: UOp, shape: Shape) -> UOp:
    """Undo NumPy broadcasting of `shape` to g's shape: sum over the axes that were added or stretched."""
    if g.shape == shape:
        return g
    added = g.ndim - len(shape)
    stretched = tuple(
        [i + added for i, size in enumerate(shape) if _is_one(size) and not _is_one(g.shape[i + added])]
    )
    return total(g, tuple(range(added)) + stretched).reshape(shape)


def _is_one(size: object) -> bool:
    return isinstance(size, int) and size == 1


def keep_axes(reduced: UOp, full: Shape, axes: tuple[int, ...]) -> UOp:
    """A reduced value with its vanished axes back as size 1, ready to broadcast against `full`."""
    return reduced.reshape(tuple([1 if i in axes else size for i, size in enumerate(full)]))


def zero(g: UOp, *_: UOp) -> None:
    """The derivative is 0 wherever it exists (steps), or the source is not a float."""
    return None


def same(g: UOp, *_: UOp) -> UOp:
    """The gradient passes unchanged."""
    return g


# ---- elementwise, where one line does not say it -----------------------------------------------------------


def _larger(first: int) -> SourceRule:
    """Of max(x, y): to the greater one; half to each on a tie, none on a tie with a constant (relu at 0);
    to both where either is NaN."""

    def rule(g: UOp, out: UOp, *src: UOp) -> UOp:
        mine, other = src[first], src[1 - first]
        if other.op is Ops.CONST:
            return mine.le(other).where(g.const_like(0), g)
        return mine.lt(other).where(g.const_like(0), mine.equal(other).where(g * 0.5, g))

    return rule


def _smaller(first: int) -> SourceRule:
    """Of min(x, y), as for max."""

    def rule(g: UOp, out: UOp, *src: UOp) -> UOp:
        mine, other = src[first], src[1 - first]
        if other.op is Ops.CONST:
            return other.le(mine).where(g.const_like(0), g)
        return other.lt(mine).where(g.const_like(0), mine.equal(other).where(g * 0.5, g))

    return rule


def _pow_base(g: UOp, out: UOp, x: UOp, y: UOp) -> UOp:
    """y * x**(y-1); 0 where y is 0, also at x = 0."""
    return y.equal(0.0).where(g.const_like(0), g * (y * x.alu(Ops.POW, y - 1.0)))


def _pow_exponent(g: UOp, out: UOp, x: UOp, y: UOp) -> UOp:
    """x**y * ln x; 0 where x is 0 and y is not negative (the limit)."""
    limit = x.equal(0.0) & y.ge(0.0)
    return limit.where(g.const_like(0), g * (out * (x.alu(Ops.LOG2) * math.log(2))))


def _cast(g: UOp, out: UOp, x: UOp) -> UOp:
    return g.cast(x.dtype)


# ---- movement ----------------------------------------------------------------------------------------------


def _expand(g: UOp, out: UOp, x: UOp) -> UOp:
    return unbroadcast(g, x.shape)


def _pad(g: UOp, out: UOp, x: UOp) -> UOp:
    return g.shrink(
        tuple([(before, before + size) for (before, _), size in zip(out.arg, x.shape, strict=True)])
    )


def _shrink(g: UOp, out: UOp, x: UOp) -> UOp:
    return g.pad(tuple([(start, size - stop) for (start, stop), size in zip(out.arg, x.shape, strict=True)]))


# ---- reductions --------------------------------------------------------------------------------------------


def _reduce(g: UOp, out: UOp, x: UOp) -> UOp:
    op, axes = out.arg.op, out.arg.axes
    g = keep_axes(g, x.shape, axes)
    if op is Ops.ADD:
        return g.expand(x.shape)
    if op is Ops.MUL:
        return g * product_of_others(x, axes)
    return _extremes(g, out, x, axes)


def _extremes(g: UOp, out: UOp, x: UOp, axes: tuple[int, ...]) -> UOp:
    """Equal shares to all elements that attain the maximum or minimum."""
    attains, count = shares(out, x, axes)
    share = (g.cast(count.dtype) / count).cast(x.dtype)
    return attains.where(share, share.const_like(0))


def shares(out: UOp, x: UOp, axes: tuple[int, ...]) -> tuple[UOp, UOp]:
    """Which elements of x attain its maximum or minimum `out`, and how many (float32 or wider; axes kept)."""
    if not _is_exact(x):
        x = _in_memory(x)
    wide = dtypes.float32 if x.dtype in NARROW else x.dtype
    attains = x.equal(keep_axes(out, x.shape, axes))
    return attains, keep_axes(attains.cast(wide).reduce(Ops.ADD, axes), x.shape, axes)


def _is_exact(x: UOp) -> bool:
    """Whether computing the value again gives the same bits: elementwise work on memory does, a sum may be
    taken in another order."""
    seen: set[UOp] = set()
    stack = [x]
    while stack:
        node = stack.pop()
        if node.op is Ops.REDUCE and node.became is None:
            return False
        if node not in seen and node.became is None and node.op not in _IN_MEMORY:
            seen.add(node)
            stack += node.src
    return True


def _in_memory(x: UOp) -> UOp:
    """The same value with memory below its views."""
    if x.op.is_movement:
        return x.replace(src=(_in_memory(x.src[0]),))
    return x.contiguous()


_IN_MEMORY = (Ops.BUFFER, Ops.AFTER, Ops.COPY, Ops.CONTIGUOUS)


def product_of_others(x: UOp, axes: tuple[int, ...]) -> UOp:
    """For every element, the product of all the others along `axes`. Shape of x.

    A division of the whole product would be wrong at zeros, so this is a tree: products of pairs, of fours,
    … going up; going down, each node hands its children what it got, times their sibling. Right for
    derivatives of any order.
    """
    rest = tuple([i for i in range(x.ndim) if i not in axes])
    order = rest + axes
    kept = tuple([x.shape[i] for i in rest])
    count = prod([x.shape[i] for i in axes])
    if not isinstance(count, int) or count == 0:
        return UOp.const(1, x.dtype) if isinstance(count, int) else _product_over(x, axes)
    width = 1 << (count - 1).bit_length()
    rows = x.permute(order).reshape((*kept, count))
    level = rows.pad((*[(0, 0)] * len(kept), (0, width - count)))
    if width > count:  # the padding must be ones
        level = UOp(Ops.IOTA, dtypes.int32, (), width).lt(count).where(level, level.const_like(1))
    levels = []
    while width > 1:
        levels.append(level.reshape((*kept, width // 2, 2)))
        level = levels[-1].reduce(Ops.MUL, (len(kept) + 1,))
        width //= 2
    others = UOp.const(1, x.dtype)
    for pairs in reversed(levels):
        sibling = pairs.flip((pairs.ndim - 1,))
        from_above = others if others.shape == () else others.reshape((*pairs.shape[:-1], 1))
        others = (from_above * sibling).reshape((*kept, pairs.shape[-2] * 2))
    if others.shape == ():
        return others
    others = others.shrink((*[(0, size) for size in kept], (0, count)))
    return others.reshape(tuple([x.shape[i] for i in order])).permute(argsort(order))


def _product_over(x: UOp, axes: tuple[int, ...]) -> UOp:
    """The same for a symbolic count, where a tree has no fixed height: by division, with zeros counted apart.
    Second derivatives at zeros are lost."""
    is_zero = x.equal(0.0)
    safe = is_zero.where(x.const_like(1), x)
    zeros = keep_axes(is_zero.cast(dtypes.int32).reduce(Ops.ADD, axes), x.shape, axes)
    nonzero = keep_axes(safe.reduce(Ops.MUL, axes), x.shape, axes)
    return zeros.equal(is_zero.cast(dtypes.int32)).where(nonzero / safe, x.const_like(0))


def _take(g: UOp, out: UOp, x: UOp, index: UOp) -> UOp:
    """A scatter-add: x[v] gets every position of the index that reads v: one REDUCE over a WHERE, or a kernel
    of its own where that would compare very many pairs."""
    axis = out.arg
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    ones = (1,) * len(after)
    positions, length = index.size, x.shape[axis]
    if isinstance(length, int) and is_large(x.shape, axis, positions):
        flat = g.reshape((*before, positions, *after))
        return add_slices(index.reshape((positions,)), flat, axis, length)
    rows = UOp(Ops.IOTA, index.dtype, (), length).reshape((length, *ones))
    hit = index.reshape((positions, 1, *ones)).equal(rows)  # (positions, length, 1 …)
    return total(hit.where(g.reshape((*before, positions, 1, *after)), g.const_like(0)), (axis,))


# ---- memory ------------------------------------------------------------------------------------------------


def _copy(g: UOp, out: UOp, x: UOp) -> UOp:
    return g if x.device is None else g.copy_to(x.device)


def _after_target(g: UOp, out: UOp, target: UOp, view: UOp, value: UOp) -> UOp | None:
    """The part of the old version that the write left standing."""
    written = written_mask(target, view)
    return None if written is None else written.where(g.const_like(0), g)


def written_mask(target: UOp, view: UOp) -> UOp | None:
    """Which elements of the target a write to the view overwrites; None for all of them."""
    chain = view_chain(view, target)
    if all(node.op is not Ops.SHRINK for node in chain):
        return None
    written = UOp.const(True, dtypes.bool).reshape((1,) * view.ndim).expand(view.shape)
    for node in chain:
        rule = RULES[node.op][0]
        pulled = rule(written, node, node.src[0])
        assert pulled is not None, f"views have no {node.op}"
        written = pulled
    return written


def _after_value(g: UOp, out: UOp, target: UOp, view: UOp, value: UOp) -> UOp:
    """The gradient of the place that was written: the same view, of the gradient."""
    for node in reversed(view_chain(view, target)):
        g = node.replace(src=(g,))
    return g


def view_chain(view: UOp, target: UOp) -> list[UOp]:
    """The movement ops from the view down to the target, outermost first."""
    chain = []
    while view is not target:
        chain.append(view)
        view = view.src[0]
    return chain


# ---- the table ---------------------------------------------------------------------------------------------

LN2 = math.log(2)

RULES: dict[Op, tuple[SourceRule, ...]] = {
    Ops.NEG: (lambda g, out, x: -g,),
    Ops.RECIPROCAL: (lambda g, out, x: -(g * (out * out)),),
    Ops.SQRT: (lambda g, out, x: g * 0.5 / out,),
    Ops.EXP2: (lambda g, out, x: g * (out * LN2),),
    Ops.LOG2: (lambda g, out, x: g * (1 / LN2) / x,),
    Ops.SIN: (lambda g, out, x: g * (x + math.pi / 2).alu(Ops.SIN),),
    Ops.ERF: (lambda g, out, x: g * ((x * x * -(1 / LN2)).alu(Ops.EXP2) * (2 / math.sqrt(math.pi))),),
    Ops.TRUNC: (zero,),
    Ops.FLOOR: (zero,),
    Ops.ADD: (same, same),
    Ops.SUB: (same, lambda g, out, x, y: -g),
    Ops.MUL: (lambda g, out, x, y: g * y, lambda g, out, x, y: g * x),
    Ops.FDIV: (lambda g, out, x, y: g / y, lambda g, out, x, y: -(g * out / y)),
    Ops.MAX: (_larger(0), _larger(1)),
    Ops.MIN: (_smaller(0), _smaller(1)),
    Ops.POW: (_pow_base, _pow_exponent),
    Ops.WHERE: (
        zero,
        lambda g, out, c, x, y: c.where(g, g.const_like(0)),
        lambda g, out, c, x, y: c.where(g.const_like(0), g),
    ),
    Ops.MULACC: (lambda g, out, x, y, z: g * y, lambda g, out, x, y, z: g * x, same),
    Ops.CAST: (_cast,),
    Ops.RESHAPE: (lambda g, out, x: g.reshape(x.shape),),
    Ops.PERMUTE: (lambda g, out, x: g.permute(argsort(out.arg)),),
    Ops.EXPAND: (_expand,),
    Ops.PAD: (_pad,),
    Ops.SHRINK: (_shrink,),
    Ops.FLIP: (lambda g, out, x: g.flip(out.arg),),
    Ops.REDUCE: (_reduce,),
    Ops.TAKE: (_take, zero),
    Ops.CONTIGUOUS: (same,),
    Ops.COPY: (_copy,),
    Ops.AFTER: (_after_target, zero, _after_value),
}
