"""Loops end where their masks do: iterations in which nothing can happen are not run.

Before:  k = RANGE(64); REDUCE(WHERE(k < i + 1, v, 0), k; ADD)
After:   k = RANGE(i + 1); REDUCE(v, k; ADD)

A loop may be cropped when each thing that closes it does nothing outside of the bound: a REDUCE whose value
is the identity there, a STORE that is masked off, the filling of scratch whose elements nobody reads. The
bound is what an affine condition says after the loops inside of it, and the tile, have taken their most
favourable values; it may depend on the loops around. A lower bound moves the counter: `k` becomes `k' +
low`. Conditions that hold in all the iterations which remain are dropped; others stay, for the ragged edge
of the tile.

Like a masked convolution (masks.py), a masked factor is taken to make its product 0, and a score of -inf to
make its exponential 0: data, and the maximum of what a row sees, are assumed to be finite. (A row with a NaN,
or that sees nothing, is NaN in any case.)"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd

from whit.codegen.masks import is_finite
from whit.uop import AxisType, Op, Ops, RangeArg, UOp, dtypes
from whit.uop.bounds import INDEX_LIMIT
from whit.uop.ops import identity
from whit.uop.symbolic import Linear, conditions_of, conjunction, floordiv, from_linear, linear_form, simplify

SHORTEST = (
    4  # loops of fewer iterations are left alone, unless there is a loop inside: a fixed length is worth more
)
_DEPTH = 16  # how deep below a fold its masks are looked for

Halfspace = tuple[dict[UOp, int], int]  # the sum of factor * term is below the number
# a bool node and what it must be; or None and what a condition on the value in scratch says about its reader
Condition = tuple[UOp, bool] | tuple[None, Halfspace]
Needed = tuple[Condition, ...]  # nothing happens unless all of them are so


def crop_loops(ast: UOp) -> UOp:
    """The kernel with loops as long as their masks leave something to do; of a kernel after `bind
    specials`."""
    order = ast.toposort()
    if any(node.op in _MASKING for node in order):
        return _Crop(ast, order).run()
    return ast


_MASKING = (Ops.CMPLT, Ops.CMPLE, Ops.CMPEQ, Ops.CMPNE)


# ---- what must hold for something to happen ----------------------------------------------------------------


def needed_by_fold(value: UOp, op: Op) -> Needed:
    """Conditions without which `value` is the identity of the reduction `op`."""
    return _needed(value, op, _DEPTH, {})


def _needed(value: UOp, op: Op, depth: int, memo: dict[UOp, Needed]) -> Needed:
    found = memo.get(value)
    if found is None:
        found = memo[value] = _find_needed(value, op, depth - 1, memo) if depth else ()
    return found


def _find_needed(value: UOp, op: Op, depth: int, memo: dict[UOp, Needed]) -> Needed:
    kind, src = value.op, value.src
    if kind is Ops.WHERE:
        if _is_identity(src[2], op):
            return _both(_parts(src[0], True), _needed(src[1], op, depth, memo))
        if _is_identity(src[1], op):
            return _both(_parts(src[0], False), _needed(src[2], op, depth, memo))
        return _common(_needed(src[1], op, depth, memo), _needed(src[2], op, depth, memo))
    if kind is Ops.REDUCE and value.arg.op is op:
        return _needed(src[0], op, depth, memo)
    if (
        kind in ((Ops.ADD, Ops.SUB, Ops.MAX, Ops.MIN) if op is Ops.ADD else (op,))
        and len(src) == 2
        and op is not Ops.MUL
    ):
        return _common(_needed(src[0], op, depth, memo), _needed(src[1], op, depth, memo))
    if kind is Ops.INDEX:
        return _needed_by_read(value, op, depth, memo)
    if op is not Ops.ADD:
        return ()
    if kind is Ops.EXP2:
        return _needed_above(src[0], depth)
    if kind in (Ops.CAST, Ops.NEG) and src[0].dtype is not dtypes.index:
        return _needed(src[0], op, depth, memo)
    if kind is Ops.MUL:
        first = _needed(src[0], op, depth, memo) if is_finite(src[1], depth) else ()
        return _both(first, _needed(src[1], op, depth, memo) if is_finite(src[0], depth) else ())
    return ()


def _needed_above(exponent: UOp, depth: int) -> Needed:
    """Conditions without which an exponent is -inf, as masked scores are, relative to a maximum which is
    finite."""
    kind, src = exponent.op, exponent.src
    if depth == 0:
        return ()
    if kind in (Ops.WHERE, Ops.INDEX):
        return _needed(exponent, Ops.MAX, depth, {})
    if kind is Ops.SUB or kind is Ops.CAST:
        return _needed_above(src[0], depth - 1)
    if kind is Ops.MUL and src[1].op is Ops.CONST and src[1].arg > 0:
        return _needed_above(src[0], depth - 1)
    return ()


def _needed_by_read(read: UOp, op: Op, depth: int, memo: dict[UOp, Needed]) -> Needed:
    """Of a read: its mask if 0 changes nothing, and of scratch what the value needs that was stored there."""
    mask = _parts(read.src[2], True) if len(read.src) > 2 and op is Ops.ADD else ()
    fill = read.src[0]
    if fill.op is not Ops.AFTER or len(fill.src) != 2 or (len(read.src) > 2 and op is not Ops.ADD):
        return mask
    end = fill.src[1]
    store = end.src[0] if end.op is Ops.END else end
    found: Needed = mask
    for condition in _needed(store.src[2], op, depth, memo):
        for half in halfspaces(condition):
            seen = _as_reader_sees(half, frozenset(end.src[1:]), store.src[1], read.src[1])
            found = found if seen is None else _both(found, ((None, seen),))
    return found


def _as_reader_sees(half: Halfspace, fills: frozenset[UOp], place: UOp, number: UOp) -> Halfspace | None:
    """What a condition on the loops that fill scratch says about the element number that a read asks for;
    None if it is not one on that number and on the loops around both.

    fill r, s stores element r*8 + s if r*8 + s <= q;  the read of element k has k <= q
    fill r, s stores element r*8 + s if r >= 2;  the read of element (i - k)*8 + j (s, j < 8) has i - k >= 2
    """
    terms, limit = half
    stored, offset = linear_form(place)
    closed = {t: f for t, f in stored.items() if not fills.isdisjoint(t.ranges)}
    mine = {t: f for t, f in terms.items() if not fills.isdisjoint(t.ranges)}
    if not mine:
        return half
    first = next(iter(mine))
    above, below = mine[first], closed.get(first, 0)
    own = {t: f for t, f in closed.items() if t in mine}
    if {t: f * below for t, f in mine.items()} != {t: f * above for t, f in own.items()}:
        return None
    asked, constant = linear_form(number)
    rest = dict(asked)
    for t, f in stored.items():
        if t not in closed:
            rest[t] = rest.get(t, 0) - f
    part = _digit((rest, constant - offset), own, {t: f for t, f in closed.items() if t not in mine})
    if part is None or any(f * above % below for f in (*part[0].values(), part[1])):
        return None
    result = {t: f for t, f in terms.items() if t not in mine}
    for t, f in part[0].items():
        result[t] = result.get(t, 0) + f * above // below
    return {t: f for t, f in result.items() if f}, limit - part[1] * above // below


def _digit(number: Linear, own: dict[UOp, int], others: dict[UOp, int]) -> Linear | None:
    """What a number that equals `own` + `others` says about `own`, if these are digits of it: multiples of a
    step that is more than all below it, and less than the steps of what is above it."""
    if not others:
        return number
    step = gcd(*own.values())
    if any(f < 0 for f in (*own.values(), *others.values())):
        return None
    above = {t: f for t, f in others.items() if f % step == 0}
    below = sum([int(t.vmax) * f for t, f in others.items() if t not in above])
    if any(t.vmin < 0 for t in (*own, *others)) or below >= step:
        return None
    found = _multiples(number, step)
    if found is None or not above:
        return found
    whole = gcd(*above.values())
    if sum([int(t.vmax) * f for t, f in own.items()]) >= whole:
        return None
    more = _multiples(found, whole)
    if more is None:
        return None
    return {t: f for t, f in found[0].items() if t not in more[0]}, found[1] - more[1]


def _multiples(number: Linear, step: int) -> Linear | None:
    """The part of a number that is a multiple of a step, if the rest is surely from 0 to below the step."""
    terms, constant = number
    rest = {t: f for t, f in terms.items() if f % step}
    ends = [sorted((int(t.vmin) * f, int(t.vmax) * f)) for t, f in rest.items()]
    least, most = (sum([end[side] for end in ends]) + constant for side in (0, 1))
    carried = least // step * step
    if most - carried >= step:
        return None
    return {t: f for t, f in terms.items() if t not in rest}, carried


def _both(a: Needed, b: Needed) -> Needed:
    return (*a, *[c for c in b if c not in a])


def _common(a: Needed, b: Needed) -> Needed:
    return tuple([c for c in a if c in b])


def _is_identity(node: UOp, op: Op) -> bool:
    return node.op is Ops.CONST and node.arg == identity(op, node.dtype)


def _parts(condition: UOp, wanted: bool) -> Needed:
    """The conditions that this one is made of when it must be `wanted`."""
    found: dict[tuple[UOp, bool], None] = {}
    stack = [(condition, wanted)]
    while stack:
        node, truth = stack.pop()
        if node.op is (Ops.AND if truth else Ops.OR) and node.dtype is dtypes.bool:
            stack += [(s, truth) for s in node.src]
        elif node.op is Ops.XOR and node.dtype is dtypes.bool and node.src[1].op is Ops.CONST:
            stack.append((node.src[0], truth != node.src[1].arg))
        elif node.op is not Ops.CONST:
            found[node, truth] = None
    return tuple(found)


# ---- conditions as half-spaces -----------------------------------------------------------------------------


def index_form(node: UOp) -> UOp | None:
    """The index expression that an integer expression of loop counters equals, if it never wraps."""
    if node.dtype is dtypes.index:
        return node
    if not node.dtype.is_int:
        return None
    result: UOp | None = None
    if node.op is Ops.CONST:
        return UOp.index(node.arg)
    if node.op is Ops.CAST:
        result = index_form(node.src[0])
    elif node.op in (Ops.ADD, Ops.SUB, Ops.MUL, Ops.NEG):
        parts = [index_form(s) for s in node.src]
        if any(p is None for p in parts):
            return None
        result = UOp(node.op, dtypes.index, tuple([p for p in parts if p is not None]))
    if result is None:
        return None
    result = simplify(_plain(result))
    low, high = result.bounds
    return result if node.dtype.min <= low and high <= node.dtype.max else None


def _plain(node: UOp) -> UOp:
    """Differences and negations as sums and products, which is what linear forms are made of."""
    if node.op is Ops.SUB:
        return node.src[0] + node.src[1] * -1
    return node.src[0] * -1 if node.op is Ops.NEG else node


def halfspaces(condition: Condition) -> list[Halfspace]:
    """What a condition says about linear forms of the loop counters; a comparison with data says nothing."""
    if condition[0] is None:
        return [condition[1]]
    node, truth = condition
    if node.op not in _MASKING or len(node.src) != 2:
        return []
    a, b = [index_form(s) for s in node.src]
    if a is None or b is None:
        return []
    op = node.op if truth else _OPPOSITE[node.op]
    if node.op in (Ops.CMPLT, Ops.CMPLE) and not truth:
        a, b = b, a
    if op is Ops.CMPNE:
        return []
    below = [_below(a, b, op is not Ops.CMPLT)]
    return [*below, _below(b, a, True)] if op is Ops.CMPEQ else below


_OPPOSITE = {Ops.CMPLT: Ops.CMPLE, Ops.CMPLE: Ops.CMPLT, Ops.CMPEQ: Ops.CMPNE, Ops.CMPNE: Ops.CMPEQ}


def _below(a: UOp, b: UOp, or_equal: bool) -> Halfspace:
    """a < b, or a <= b."""
    terms, constant = linear_form(simplify(a + b * -1))
    return terms, or_equal - constant


# ---- bounds ------------------------------------------------------------------------------------------------

Span = tuple[UOp, UOp]  # the first iteration, and the one after the last


class _Crop:
    """Bounds of all loops of one kernel, outermost first, and the kernel rewritten with them."""

    def __init__(self, ast: UOp, order: Iterable[UOp]) -> None:
        self.ast, self.order = ast, list(order)
        # loop -> (what closes it, its place among the ranges that are closed there)
        self.closers: dict[UOp, list[tuple[UOp, int]]] = {}
        self.readers: dict[UOp, list[UOp]] = {}  # scratch memory -> reads of it
        self.fills: dict[UOp, UOp] = {}  # END in an AFTER -> that AFTER
        for node in self.order:
            if node.op in (Ops.REDUCE, Ops.END):
                for at, r in enumerate(node.src[1:]):
                    self.closers.setdefault(r, []).append((node, at))
            elif node.op is Ops.INDEX and node.src[0].op is Ops.AFTER:
                self.readers.setdefault(node.src[0], []).append(node)
            elif node.op is Ops.AFTER:
                self.fills.update({end: node for end in node.src[1:] if end.op is Ops.END})
        self.needed: dict[UOp, Needed] = {}
        self.spans: dict[UOp, Span] = {}  # loops that were cropped
        self.settled: dict[UOp, None] = {}  # loops looked at
        self.holds: dict[UOp, tuple[UOp, UOp]] = {}  # conditions that need no test any more -> value, loop

    def run(self) -> UOp:
        for r in self.closers:
            self.settle(r)
        return self.rewritten() if self.spans else self.ast

    # ---- the loops around another

    def around(self, r: UOp) -> frozenset[UOp]:
        """The loops that surely run around this one, and the numbers of the task."""
        result: frozenset[UOp] | None = None
        for node, at in self.closers[r]:
            outer = frozenset(node.src[1 : 1 + at])
            if node.op is Ops.REDUCE or node in self.fills:
                outer |= self.fills.get(node, node).ranges
            result = outer if result is None else result & outer
        return frozenset([x for x in result or () if not x.arg.axis.is_tile])

    def is_inner(self, r: UOp) -> bool:
        """Whether no longer loop runs inside of this one."""
        return not any(
            x.src[0].vmax >= SHORTEST and not x.arg.axis.is_tile
            for node, at in self.closers[r]
            for x in node.src[2 + at :]
        )

    # ---- the bound of one loop

    def settle(self, r: UOp) -> None:
        """Find the span of a loop, after those of the loops around it."""
        if r in self.settled:
            return
        self.settled[r] = None
        if r.arg.axis not in (AxisType.LOOP, AxisType.REDUCE) or (
            r.src[0].vmax < SHORTEST and self.is_inner(r)
        ):
            return
        around = self.around(r)
        found = [self.span(r, node, at, around) for node, at in self.closers[r]]
        low, high = found[0]
        low = low if all(span[0] is low for span in found) else UOp.index(0)
        high = high if all(span[1] is high for span in found) else r.src[0]
        if low.op is not Ops.CONST or low.arg != 0 or high is not r.src[0]:
            self.spans[r] = low, high
            self.drop_conditions(r, around)

    def span(self, r: UOp, node: UOp, at: int, around: frozenset[UOp]) -> Span:
        """The iterations of `r` in which `node`, which closes it, may do something."""
        if node in self.fills:
            return self.span_of_fill(r, node, at, around) if at == 0 else (UOp.index(0), r.src[0])
        low, high = UOp.index(0), r.src[0]
        for condition in self.conditions(node):
            for terms, limit in halfspaces(condition):
                bound = self.bound(r, terms, limit, around)
                if bound is None:
                    continue
                if terms[r] > 0:
                    high = simplify(high.minimum(bound + 1))
                else:
                    low = simplify(low.maximum(bound))
        return low, high

    def conditions(self, node: UOp) -> Needed:
        """Conditions without which a REDUCE or an END does nothing."""
        found = self.needed.get(node)
        if found is None:
            if node.op is Ops.REDUCE:
                found = needed_by_fold(node.src[0], node.arg.op)
            else:
                store = node.src[0]
                found = _parts(store.src[3], True) if store.op is Ops.STORE and len(store.src) > 3 else ()
            self.needed[node] = found
        return found

    def bound(self, r: UOp, terms: dict[UOp, int], limit: int, around: frozenset[UOp]) -> UOp | None:
        """The last iteration of `r` with factor * r + rest < limit for some value of what is inside of it;
        the first one if the factor is negative."""
        factor = terms.get(r, 0)
        rest = {t: f for t, f in terms.items() if t is not r}
        if factor == 0 or any(r in t.ranges for t in rest):
            return None
        least = self.extreme(rest, 0, around, least=True)
        if least is None:
            return None
        if factor > 0:  # r <= (limit - 1 - least) // factor
            return floordiv(simplify(least * -1 + (limit - 1)), factor)
        return simplify(floordiv(simplify(least + -limit), -factor) + 1)  # r > (least - limit) // -factor

    def extreme(
        self, terms: dict[UOp, int], constant: int, around: frozenset[UOp], least: bool
    ) -> UOp | None:
        """The least or greatest value of a sum over all the loops that are not `around`, as an expression of
        those that are; None: unbounded."""
        kept: dict[UOp, int] = {}
        moved: list[UOp] = []
        for term, factor in terms.items():
            if _is_outside(term, around):
                kept[term] = factor
                continue
            low = least == (factor > 0)
            span = self.spans.get(term)
            if span is not None:  # a loop inside that is cropped itself
                edge, extra = linear_form(span[0] if low else simplify(span[1] + -1))
                more = self.extreme({t: f * factor for t, f in edge.items()}, extra * factor, around, least)
                if more is not None:
                    moved.append(more)
                    continue
            value = int(term.vmin if low else term.vmax)
            if abs(value) >= INDEX_LIMIT:
                return None
            constant += value * factor
        total = from_linear(kept, constant)
        for more in moved:
            total = total + more
        return simplify(total)

    def span_of_fill(self, r: UOp, node: UOp, at: int, around: frozenset[UOp]) -> Span:
        """The outermost loop of a fill runs over the elements that some read asks for."""
        whole = UOp.index(0), r.src[0]
        after = self.fills[node]
        terms, constant = linear_form(node.src[0].src[1])
        stride = terms.get(r, 0)
        inner = sum([int(t.vmax) * f for t, f in terms.items() if t is not r])
        nested = (
            all(f > 0 and t.op is Ops.RANGE for t, f in terms.items()) and constant == 0 and inner < stride
        )
        if not nested or len(after.src) != 2 or not self.readers.get(after):
            return whole
        spans: list[Span] = []
        for read in self.readers[after]:
            for loop in read.src[1].ranges - around:
                if loop in self.closers:
                    self.settle(loop)
            number, offset = linear_form(read.src[1])
            first = self.extreme(number, offset, around, least=True)
            last = self.extreme(number, offset, around, least=False)
            if first is None or last is None or r in first.ranges | last.ranges:
                return whole
            spans.append((floordiv(first, stride), simplify(floordiv(last, stride) + 1)))
        low, high = spans[0]
        for first, last in spans[1:]:
            low, high = simplify(low.minimum(first)), simplify(high.maximum(last))
        return simplify(low.maximum(UOp.index(0))), simplify(high.minimum(r.src[0]))

    def drop_conditions(self, r: UOp, around: frozenset[UOp]) -> None:
        """Conditions that a cropped loop makes true in all its iterations, for all values of what is
        inside."""
        for node, _ in self.closers[r]:
            if node in self.fills:
                continue
            for condition in self.conditions(node):
                parts = halfspaces(condition)
                if condition[0] is None:
                    continue
                if len(parts) == 1 and self.is_exact(r, *parts[0], around):
                    self.holds[condition[0]] = UOp.const(condition[1], dtypes.bool), r

    def is_exact(self, r: UOp, terms: dict[UOp, int], limit: int, around: frozenset[UOp]) -> bool:
        """Whether factor * r + rest < limit wherever the bound of `r` from this very condition lets it run:
        the bound was used, rounded nothing off, and the rest does not vary inside by more than what rounding
        leaves."""
        bound = self.bound(r, terms, limit, around)
        if bound is None or not _is_part(self.spans[r], bound, terms[r] > 0):
            return False
        rest, factor = {t: f for t, f in terms.items() if t is not r}, abs(terms[r])
        least, most = (self.extreme(rest, 0, around, least=side) for side in (True, False))
        if least is None or most is None:
            return False
        spread = simplify(most + least * -1)
        slack, constant = linear_form(simplify(least * -1 + (limit - 1)))
        return bool(all(f % factor == 0 for f in slack.values()) and spread.vmax <= constant % factor)

    # ---- the kernel

    def rewritten(self) -> UOp:
        """Substitute the counters and close the new loops."""
        loops: dict[UOp, UOp] = {}
        values: dict[UOp, UOp] = {}
        for r in self.spans:
            self._renew(r, loops, values)
        new: dict[UOp, UOp] = {condition: value for condition, (value, _) in self.holds.items()}
        new |= values
        for node in self.order:
            if node in new:
                continue
            if node.op in (Ops.REDUCE, Ops.END):
                src = (new[node.src[0]], *[loops.get(r, r) for r in node.src[1:]])
            elif node.op is Ops.INDEX and len(node.src) > 2:
                src = (new[node.src[0]], new[node.src[1]], *self._mask(node, new, values))
            else:
                src = tuple([new[s] for s in node.src])
            new[node] = node if src == node.src else node.replace(src=src)
        return simplify(new[self.ast])

    def _mask(self, read: UOp, new: dict[UOp, UOp], values: dict[UOp, UOp]) -> tuple[UOp, ...]:
        """The mask of a read. A condition that holds in a loop still guards a read that does not change in
        it: such a read runs before the loop, perhaps for no iteration."""
        memory, index = read.src[:2]
        inside = memory.op is Ops.PARAM and index.vmin >= 0 and index.vmax < memory.arg.size
        kept = [
            part.substitute(values)
            if part in self.holds and self.holds[part][1] not in index.ranges and not inside
            else new[part]
            for part in conditions_of(read.src[2])
        ]
        mask = conjunction(*[simplify(part) for part in kept])
        return () if mask is None else (mask,)

    def _renew(self, r: UOp, loops: dict[UOp, UOp], values: dict[UOp, UOp]) -> None:
        """The new RANGE of a cropped loop and the value that its old counter has; loops around it come
        first."""
        if r in loops:
            return
        low, high = self.spans[r]
        for outer in low.ranges | high.ranges:
            if outer in self.spans:
                self._renew(outer, loops, values)
        low, high = simplify(low.substitute(values)), simplify(high.substitute(values))
        loops[r] = UOp(Ops.RANGE, dtypes.index, (simplify(high + low * -1),), RangeArg(r.arg.uid, r.arg.axis))
        values[r] = simplify(loops[r] + low)


def _is_part(span: Span, bound: UOp, upper: bool) -> bool:
    """Whether a span is at least as tight as a bound: it is a minimum or maximum of it and others."""
    op, wanted = (Ops.MIN, simplify(bound + 1)) if upper else (Ops.MAX, bound)
    stack = [span[1] if upper else span[0]]
    while stack:
        node = stack.pop()
        if node is wanted:
            return True
        if node.op is op:
            stack += node.src
    return False


def _is_outside(term: UOp, around: frozenset[UOp]) -> bool:
    """Whether a term has one value during a loop: it depends on loops around it, the task and variables
    only."""
    return all(x in around for x in term.ranges) and not any(
        u.op is Ops.INDEX or (u.op is Ops.SPECIAL and u.arg.name.startswith("lidx")) for u in term.toposort()
    )
