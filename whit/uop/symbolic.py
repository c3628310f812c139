"""Index algebra: every index expression has one canonical form, found through its linear form.

A linear form is a constant plus integer multiples of *terms* (ranges, variables, quotients, remainders, …).
Index arithmetic never overflows, so the integers' own laws hold here; they are never applied to the user's
integers, which wrap.
"""
from __future__ import annotations

import math

from whit.uop.dtype import dtypes
from whit.uop.ops import Ops
from whit.uop.uop import UOp, alu

Linear = tuple[dict[UOp, int], int]  # coefficient of each term, constant


def linear_form(u: UOp) -> Linear:
    """Split an index expression into terms and a constant."""
    terms: dict[UOp, int] = {}
    constant = 0
    stack: list[tuple[UOp, int]] = [(u, 1)]
    while stack:
        node, factor = stack.pop()
        if node.op is Ops.ADD:
            stack.append((node.src[1], factor))
            stack.append((node.src[0], factor))
        elif node.op is Ops.MUL and node.src[1].op is Ops.CONST:
            stack.append((node.src[0], factor * node.src[1].arg))
        elif node.op is Ops.CONST:
            constant += factor * node.arg
        else:
            terms[node] = terms.get(node, 0) + factor
    return {t: c for t, c in terms.items() if c}, constant


def _order(item: tuple[UOp, int]) -> tuple[int, int, str, bytes]:
    """Canonical order of terms: large strides first, then ranges by number, then anything else by its digest.
    """
    term, factor = item
    if term.op is Ops.RANGE:
        return -abs(factor), term.arg.uid, "", b""
    if term.op is Ops.VAR:
        return -abs(factor), -1, term.arg.name, b""
    return -abs(factor), 1 << 60, "", term.key


def from_linear(terms: dict[UOp, int], constant: int) -> UOp:
    """The canonical sum."""
    items = list(terms.items())
    if len(items) > 1:
        items.sort(key=_order)
    total: UOp | None = None
    for term, factor in items:
        part = term if factor == 1 else UOp(Ops.MUL, dtypes.index, (term, UOp.index(factor)))
        total = part if total is None else UOp(Ops.ADD, dtypes.index, (total, part))
    if total is None:
        return UOp.index(constant)
    return total if constant == 0 else UOp(Ops.ADD, dtypes.index, (total, UOp.index(constant)))


def linear_bounds(terms: dict[UOp, int], constant: int) -> tuple[int, int]:
    """Interval of a linear form."""
    low = high = constant
    for term, factor in terms.items():
        a, b = term.bounds
        low += int(a if factor > 0 else b) * factor
        high += int(b if factor > 0 else a) * factor
    return low, high


def floordiv(u: UOp, divisor: int) -> UOp:
    """u // divisor for a positive constant, in canonical form."""
    assert divisor > 0, f"division by {divisor}"
    if divisor == 1:
        return u
    # (x // a) // b == x // (a * b)
    if u.op is Ops.FLOORDIV and u.src[1].op is Ops.CONST and u.src[1].arg > 0:
        return floordiv(u.src[0], u.src[1].arg * divisor)
    # (x % (a * b)) // a == (x // a) % b
    if u.op is Ops.FLOORMOD and u.src[1].op is Ops.CONST and u.src[1].arg > 0 and u.src[1].arg % divisor == 0:
        return floormod(floordiv(u.src[0], divisor), u.src[1].arg // divisor)
    whole, rest, constant = _split(u, divisor)
    low, high = linear_bounds(rest, constant)
    if low // divisor == high // divisor:
        return from_linear(whole, low // divisor)
    carry, constant = divmod(constant, divisor)
    common = math.gcd(divisor, *rest.values())
    if common > 1:  # (common * r + c) // (common * d) == (r + c // common) // d
        rest, constant, divisor = {t: f // common for t,
                                   f in rest.items()}, constant // common, divisor // common
        if divisor == 1:
            return simplify_sum(from_linear(whole, carry), from_linear(rest, constant))
    rest, constant, divisor = _drop_small(rest, constant, divisor)
    inner = UOp(Ops.FLOORDIV, dtypes.index, (from_linear(rest, constant), UOp.index(divisor)))
    return simplify_sum(from_linear(whole, carry), inner)


def _drop_small(rest: dict[UOp, int], constant: int, divisor: int) -> tuple[dict[UOp, int], int, int]:
    """(g * r + s) // d == r // (d / g) when g divides d and 0 <= s < g: terms that never carry do not matter.
    """
    for step in sorted({abs(f) for f in rest.values()}, reverse=True):
        if step > 1 and divisor % step == 0:
            small = {t: f for t, f in rest.items() if f % step}
            large = {t: f // step for t, f in rest.items() if f % step == 0}
            low, high = linear_bounds(small, constant % step)
            if large and low >= 0 and high < step:
                return large, constant // step, divisor // step
    return rest, constant, divisor


def _split(u: UOp, divisor: int) -> tuple[dict[UOp, int], dict[UOp, int], int]:
    """u == divisor * whole + rest + constant."""
    terms, constant = linear_form(u)
    whole: dict[UOp, int] = {}
    rest: dict[UOp, int] = {}
    for term, factor in terms.items():
        if factor % divisor == 0:
            whole[term] = factor // divisor
        else:
            rest[term] = factor
    return whole, rest, constant


def floormod(u: UOp, divisor: int) -> UOp:
    """u % divisor for a positive constant, in canonical form."""
    assert divisor > 0, f"remainder by {divisor}"
    if divisor == 1:
        return UOp.index(0)
    # (x % (a * b)) % b == x % b
    if u.op is Ops.FLOORMOD and u.src[1].op is Ops.CONST and u.src[1].arg % divisor == 0:
        return floormod(u.src[0], divisor)
    _, rest, constant = _split(u, divisor)
    low, high = linear_bounds(rest, constant)
    if low // divisor == high // divisor:
        return from_linear(rest, constant - low // divisor * divisor)
    constant %= divisor
    common = math.gcd(divisor, *rest.values())
    if common > 1:  # (common * r + c) % (common * d) == common * ((r + c // common) % d) + c % common
        outer = floormod(from_linear({t: f // common for t, f in rest.items()}, constant // common),
                         divisor // common)
        return simplify_sum(outer * common, UOp.index(constant % common))
    for step in sorted({abs(f) for f in rest.values()}, reverse=True):
        if step > 1 and divisor % step == 0:  # (g * r + s) % d == g * (r % (d / g)) + s when 0 <= s < g
            small = {t: f for t, f in rest.items() if f % step}
            large = {t: f // step for t, f in rest.items() if f % step == 0}
            low, high = linear_bounds(small, constant % step)
            if large and small and low >= 0 and high < step:
                outer = floormod(from_linear(large, constant // step), divisor // step)
                return simplify_sum(outer * step, from_linear(small, constant % step))
    return UOp(Ops.FLOORMOD, dtypes.index, (from_linear(rest, constant), UOp.index(divisor)))


def simplify_sum(*parts: UOp) -> UOp:
    """The canonical sum of canonical parts; (x // d) * d + x % d is x."""
    terms: dict[UOp, int] = {}
    constant = 0
    for part in parts:
        more, extra = linear_form(part)
        constant += extra
        for term, factor in more.items():
            terms[term] = terms.get(term, 0) + factor
    terms = {t: c for t, c in terms.items() if c}
    for term in [t for t in terms if t.op is Ops.FLOORMOD and t.src[1].op is Ops.CONST]:
        divisor = term.src[1].arg
        quotient = floordiv(term.src[0], divisor)
        count = terms[term]
        if terms.get(quotient) == count * divisor:
            del terms[term], terms[quotient]
            return simplify_sum(from_linear(terms, constant), term.src[0] * count)
    return from_linear(terms, constant)


def simplify(u: UOp) -> UOp:
    """The canonical form of an expression of index arithmetic, comparisons and bools; other nodes keep their
    op but get canonical sources."""
    memo: dict[UOp, UOp] = {}
    for node in u.toposort(lambda n: n in memo):
        src = tuple([memo[s] for s in node.src])
        memo[node] = _simplify_node(node, src)
    return memo[u]


def _simplify_node(u: UOp, src: tuple[UOp, ...]) -> UOp:
    op = u.op
    if not src:
        return u
    if u.dtype is dtypes.index and op.is_elementwise:
        if op is Ops.ADD:
            return simplify_sum(*src)
        if op is Ops.MUL:
            a, b = (src[1], src[0]) if src[0].op is Ops.CONST else src
            if b.op is Ops.CONST:
                terms, constant = linear_form(a)
                return from_linear({t: f * b.arg for t, f in terms.items() if f * b.arg}, constant * b.arg)
            return _distribute(a, b)
        if op in _DIVISIONS and src[1].op is Ops.CONST and src[1].arg > 0 \
                and (op in (Ops.FLOORDIV, Ops.FLOORMOD) or src[0].vmin >= 0):
            return (floordiv if op in (Ops.FLOORDIV, Ops.TRUNCDIV) else floormod)(src[0], src[1].arg)
        if op in (Ops.FLOORDIV, Ops.FLOORMOD):
            return _symbolic_division(op, *src)
        if op in (Ops.MAX, Ops.MIN):
            first, second = src if op is Ops.MAX else src[::-1]
            if first.vmin >= second.vmax:
                return src[0]
            if second.vmin >= first.vmax:
                return src[1]
        if op is Ops.CAST and src[0].dtype is dtypes.index:
            return src[0]
    new = u if src == u.src else UOp(u.op, u.dtype, src, u.arg)
    if op in _INDEX_COMPARES and src[0].dtype is dtypes.index:
        return _compare(new)
    if u.dtype is dtypes.bool and op in (Ops.AND, Ops.OR):
        return _logic(new)
    if op is Ops.WHERE:
        if src[0].op is Ops.CONST:
            return src[1] if src[0].arg else src[2]
        if src[1] is src[2]:
            return src[1]
    if u.dtype in (dtypes.index, dtypes.bool) and op.is_alu and new.vmin == new.vmax:
        return UOp.const(new.vmin, u.dtype)
    return new


_INDEX_COMPARES = (Ops.CMPLT, Ops.CMPLE, Ops.CMPEQ, Ops.CMPNE)
_DIVISIONS = (Ops.FLOORDIV, Ops.TRUNCDIV, Ops.FLOORMOD, Ops.TRUNCMOD)


def _distribute(a: UOp, b: UOp) -> UOp:
    """(sum of terms) * (symbolic size): multiply term by term so that strides cancel."""
    left, extra = linear_form(a)
    right, more = linear_form(b)
    terms: dict[UOp, int] = {}
    rows: list[tuple[UOp | None, int]] = [*left.items(), (None, extra)]
    columns: list[tuple[UOp | None, int]] = [*right.items(), (None, more)]
    for x, f in rows:
        for y, g in columns:
            if f * g == 0:
                continue
            key = x if y is None else y if x is None else _product(x, y)
            if key is None:
                key = UOp.index(1)
            terms[key] = terms.get(key, 0) + f * g
    constant = terms.pop(UOp.index(1), 0)
    return from_linear(terms, constant)


def _product(x: UOp, y: UOp) -> UOp:
    """A product of terms with its factors in canonical order."""
    factors: list[UOp] = []
    stack = [x, y]
    while stack:
        node = stack.pop()
        if node.op is Ops.MUL:
            stack += node.src
        else:
            factors.append(node)
    factors.sort(key=lambda f: _order((f, 1)))
    result = factors[0]
    for factor in factors[1:]:
        result = UOp(Ops.MUL, dtypes.index, (result, factor))
    return result


def _factors(term: UOp) -> list[UOp]:
    return [*_factors(term.src[0]), term.src[1]] if term.op is Ops.MUL else [term]


def _symbolic_division(op: object, a: UOp, divisor: UOp) -> UOp:
    """a // d and a % d for a symbolic positive d: terms that contain d as a factor are whole multiples."""
    if divisor.vmin > 0:
        terms, constant = linear_form(a)
        wanted = _factors(divisor)
        whole: dict[UOp, int] = {}
        rest: dict[UOp, int] = {}
        for term, factor in terms.items():
            left = _factors(term)
            if all(f in left for f in wanted):
                for f in wanted:
                    left.remove(f)
                quotient = UOp.index(1)
                for f in left:
                    quotient = f if quotient.op is Ops.CONST else _product(quotient, f)
                whole[quotient] = whole.get(quotient, 0) + factor
            else:
                rest[term] = factor
        low, _ = linear_bounds(rest, constant)
        one = whole.pop(UOp.index(1), 0)
        if low >= 0 and _always_less(rest, constant, divisor):
            return from_linear(whole, one) if op is Ops.FLOORDIV else from_linear(rest, constant)
    return UOp(Ops.FLOORDIV if op is Ops.FLOORDIV else Ops.FLOORMOD, dtypes.index, (a, divisor))


def _always_less(rest: dict[UOp, int], constant: int, divisor: UOp) -> bool:
    """Whether rest + constant < divisor for certain: by bounds, or because it is a RANGE of just that size.
    """
    if linear_bounds(rest, constant)[1] < divisor.vmin:
        return True
    if constant == 0 and len(rest) == 1:
        (term, factor), = rest.items()
        return factor == 1 and term.op is Ops.RANGE and simplify(term.src[0]) is divisor
    return False


def _compare(u: UOp) -> UOp:
    """Comparisons of index expressions: decide by the bounds of the difference; move the constant to the
    right."""
    if u.vmin == u.vmax:
        return UOp.const(u.vmin, dtypes.bool)
    terms, constant = linear_form(u.src[0])
    others, extra = linear_form(u.src[1])
    for term, factor in others.items():
        terms[term] = terms.get(term, 0) - factor
    terms = {t: c for t, c in terms.items() if c}
    low, high = linear_bounds(terms, 0)
    limit = extra - constant  # terms <op> limit
    op = u.op
    if op is Ops.CMPLE:
        op, limit = Ops.CMPLT, limit + 1
    if op is Ops.CMPLT:
        if high < limit:
            return UOp.const(True, dtypes.bool)
        if low >= limit:
            return UOp.const(False, dtypes.bool)
        common = math.gcd(*terms.values()) if terms else 1
        if common > 1:  # g * t < limit  ==  t < ceil(limit / g)
            terms, limit = {t: f // common for t, f in terms.items()}, -(-limit // common)
    elif low > limit or high < limit or low == high:
        equal = low == high == limit
        return UOp.const(equal if op is Ops.CMPEQ else not equal, dtypes.bool)
    return UOp(op, dtypes.bool, (from_linear(terms, 0), UOp.index(limit)))


def _logic(u: UOp) -> UOp:
    """and/or with constants and repetitions."""
    absorbing = u.op is Ops.OR
    a, b = u.src
    if a is b:
        return a
    for x, y in ((a, b), (b, a)):
        if x.op is Ops.CONST:
            return x if bool(x.arg) is absorbing else y
    return u


def conjunction(*conditions: UOp | None) -> UOp | None:
    """The and of conditions in canonical form without repetitions; None when nothing remains to be tested."""
    parts: dict[UOp, None] = {}
    for condition in conditions:
        stack = [] if condition is None else [condition]
        while stack:
            node = stack.pop()
            if node.op is Ops.AND and node.dtype is dtypes.bool:
                stack += [node.src[1], node.src[0]]
            elif node.op is Ops.CONST and node.arg:
                continue
            else:
                parts[node] = None
    if not parts:
        return None
    result: UOp | None = None
    for part in parts:
        if part.op is Ops.CONST:
            return part
        result = part if result is None else alu(Ops.AND, result, part)
    return result
