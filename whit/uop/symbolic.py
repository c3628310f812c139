"""Index algebra: every index expression has one canonical form, found through its linear form.

A linear form is a constant plus integer multiples of *terms* (ranges, variables, quotients, remainders, …).
Index arithmetic never overflows, so the integers' own laws hold here; they are never applied to the user's
integers, which wrap.
"""
from __future__ import annotations

import math

from whit.uop.dtype import dtypes
from whit.uop.ops import Op, Ops
from whit.uop.uop import UOp

Linear = tuple[dict[UOp, int], int]  # coefficient of each term, constant


def linear_form(u: UOp) -> Linear:
    """Split an index expression into terms and a constant. The node keeps the result: do not change it."""
    if u._linear is not None:
        return u._linear
    op = u.op
    if op is not Ops.ADD and op is not Ops.MUL:
        return ({}, u.arg) if op is Ops.CONST else ({u: 1}, 0)
    terms: dict[UOp, int] = {}
    constant = 0
    stack: list[tuple[UOp, int]] = [(u, 1)]
    while stack:
        node, factor = stack.pop()
        if node._linear is not None:
            more, extra = node._linear
            constant += extra * factor
            for term, count in more.items():
                terms[term] = terms.get(term, 0) + count * factor
        elif node.op is Ops.ADD:
            stack.append((node.src[1], factor))
            stack.append((node.src[0], factor))
        elif node.op is Ops.MUL and node.src[1].op is Ops.CONST:
            stack.append((node.src[0], factor * node.src[1].arg))
        elif node.op is Ops.CONST:
            constant += factor * node.arg
        else:
            terms[node] = terms.get(node, 0) + factor
    if 0 in terms.values():
        terms = {t: c for t, c in terms.items() if c}
    if u not in terms:  # a node must not refer to itself
        u._linear = terms, constant
    return terms, constant


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
    if not terms:
        return UOp.index(constant)
    items = list(terms.items())
    if len(items) > 1:
        items.sort(key=_order)
    total: UOp | None = None
    for term, factor in items:
        part = term if factor == 1 else UOp(Ops.MUL, dtypes.index, (term, UOp.index(factor)))
        total = part if total is None else UOp(Ops.ADD, dtypes.index, (total, part))
    assert total is not None, "there is at least one term"
    if constant:
        total = UOp(Ops.ADD, dtypes.index, (total, UOp.index(constant)))
    if total._linear is None and total not in terms:
        total._linear = dict(terms), constant
    return total


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
    whole, rest, constant = _split(u, divisor)
    low, high = linear_bounds(rest, constant)
    if low // divisor == high // divisor:
        return from_linear(whole, low // divisor)
    near = _nearest_multiples(rest, constant, divisor)
    if near is not None:
        return simplify_sum(from_linear(whole, near[2]), from_linear(near[0], 0))
    carry, constant = divmod(constant, divisor)
    common = math.gcd(divisor, *rest.values())
    divided = divisor
    if common > 1:  # (common * r + c) // (common * d) == (r + c // common) // d
        rest = {t: f // common for t, f in rest.items()}
        constant, divided = constant // common, divisor // common
    rest, constant, divided = _drop_small(rest, constant, divided)
    if divided == divisor and not whole and carry == 0:
        return UOp(Ops.FLOORDIV, dtypes.index, (from_linear(rest, constant), UOp.index(divisor)))
    return simplify_sum(from_linear(whole, carry), floordiv(from_linear(rest, constant), divided))


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


def _nearest_multiples(rest: dict[UOp, int], constant: int,
                       divisor: int) -> tuple[dict[UOp, int], dict[UOp, int], int] | None:
    """(whole, small, quotient) with rest == divisor * whole + small and (small + constant) // divisor always
    the quotient, or None: factors a little off a multiple of the divisor, as sliding windows have them."""
    whole = {t: q for t, f in rest.items() if (q := (2 * f + divisor) // (2 * divisor))}
    if not whole:
        return None
    small = {t: f - whole.get(t, 0) * divisor for t, f in rest.items()}
    low, high = linear_bounds(small, constant)
    return (whole, small, low // divisor) if low // divisor == high // divisor else None


def floormod(u: UOp, divisor: int) -> UOp:
    """u % divisor for a positive constant, in canonical form."""
    assert divisor > 0, f"remainder by {divisor}"
    if divisor == 1:
        return UOp.index(0)
    # (x % (a * b)) % b == x % b
    if _is_remainder(u) and u.src[1].arg % divisor == 0:
        return floormod(u.src[0], divisor)
    whole, rest, constant = _split(u, divisor)
    low, high = linear_bounds(rest, constant)
    if low // divisor == high // divisor:
        return from_linear(rest, constant - low // divisor * divisor)
    near = _nearest_multiples(rest, constant, divisor)
    if near is not None:
        return from_linear(near[1], constant - near[2] * divisor)
    reduced = constant % divisor
    common = math.gcd(divisor, *rest.values())
    if common > 1:  # (common * r + c) % (common * d) == common * ((r + c // common) % d) + c % common
        outer = from_linear({t: f // common for t, f in rest.items()}, reduced // common)
        return simplify_sum(floormod(outer, divisor // common) * common, UOp.index(reduced % common))
    for step in sorted({abs(f) for f in rest.values()}, reverse=True):
        if step > 1 and divisor % step == 0:  # (g * r + s) % d == g * (r % (d / g)) + s when 0 <= s < g
            small = {t: f for t, f in rest.items() if f % step}
            large = {t: f // step for t, f in rest.items() if f % step == 0}
            low, high = linear_bounds(small, reduced % step)
            if large and small and low >= 0 and high < step:
                outer = floormod(from_linear(large, reduced // step), divisor // step)
                return simplify_sum(outer * step, from_linear(small, reduced % step))
    if whole or reduced != constant:
        return floormod(from_linear(rest, reduced), divisor)
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
    if len(terms) > 1:
        for term in [t for t in terms if _is_remainder(t)]:
            joined = _join(term, terms)
            if joined is not None:
                return simplify_sum(from_linear(terms, constant), joined)
    return from_linear(terms, constant)


def _is_remainder(u: UOp) -> bool:
    return u.op is Ops.FLOORMOD and u.src[1].op is Ops.CONST and bool(u.src[1].arg > 0)


def _join(term: UOp, terms: dict[UOp, int]) -> UOp | None:
    """x % d * c joins with its quotient: with x // d * (c * d) it is x * c, with x // d % e * (c * d) it is
    x % (d * e) * c. Both are taken out of `terms`; None when there is no partner."""
    x, divisor, count = term.src[0], term.src[1].arg, terms[term]
    quotient = floordiv(x, divisor)
    wanted = count * divisor
    whole, offset = linear_form(quotient)
    if whole and all(terms.get(t) == f * wanted for t, f in whole.items()):
        for t in (term, *whole):
            del terms[t]
        return simplify_sum(x * count, UOp.index(-offset * wanted))
    for other, factor in terms.items():
        if factor == wanted and _is_remainder(other) and other.src[0] is quotient:
            del terms[term], terms[other]
            return floormod(x, divisor * other.src[1].arg) * count
    return None


def simplify(u: UOp) -> UOp:
    """The canonical form of an expression of index arithmetic, comparisons and bools; other nodes keep their
    op but get canonical sources."""
    done = u._canonical
    if done is None:
        for node in u.toposort(_is_simplified):
            if node._canonical is None:
                src = node.src
                if src:
                    src = tuple([s if s._canonical is True else s._canonical for s in src])  # type: ignore[misc]
                result = _simplify_node(node, src)
                node._canonical = True if result is node else result
                if result._canonical is None:
                    result._canonical = True
        done = u._canonical
    return u if done is True else done  # type: ignore[return-value]


def _is_simplified(u: UOp) -> bool:
    return u._canonical is not None


def _simplify_node(u: UOp, src: tuple[UOp, ...]) -> UOp:
    op = u.op
    if not src:
        return u
    if u.shape:  # tensors are not index expressions; folding them would lose their shape
        return u if src == u.src else UOp(op, u.dtype, src, u.arg)
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
            return _extreme(op, *src)
        if op is Ops.CAST and src[0].dtype is dtypes.index:
            return src[0]
        if op is Ops.WHERE:
            chosen = src[1] if src[1] is src[2] else src[2 - bool(src[0].arg)] if src[0].op is Ops.CONST \
                else _choice(*src)
            if chosen is not None:
                return chosen
    elif u.dtype is dtypes.bool:
        found = _simplify_bool(op, src)
        if found is not None:
            return found
    elif op is Ops.WHERE and (src[1] is src[2] or src[0].op is Ops.CONST):
        return src[1] if src[1] is src[2] or src[0].arg else src[2]
    new = u if src == u.src else UOp(op, u.dtype, src, u.arg)
    if u.dtype in (dtypes.index, dtypes.bool) and op.is_alu and new.vmin == new.vmax:
        return UOp.const(new.vmin, u.dtype)
    return new


def _simplify_bool(op: Op, src: tuple[UOp, ...]) -> UOp | None:
    if op in _INDEX_COMPARES:
        return _compare(op, *src) if src[0].dtype is dtypes.index else None
    if op is Ops.AND:
        return conjunction(*src) or UOp.const(True, dtypes.bool)
    if op is Ops.OR:
        return _or(*src)
    if op is Ops.XOR and src[1].op is Ops.CONST and src[1].arg is True:
        return _negation(src[0])
    return None


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


def _symbolic_division(op: Op, a: UOp, divisor: UOp) -> UOp:
    """a // d and a % d for any d: constants fold; terms that contain a symbolic positive d as a factor
    leave."""
    assert op.meaning is not None
    if a.op is Ops.CONST and divisor.op is Ops.CONST:
        return UOp.index(int(op.meaning(a.arg, divisor.arg)))
    if divisor.op is Ops.CONST and divisor.arg == 0:
        return divisor
    if divisor.vmin <= 0 or divisor.op is Ops.CONST:
        return UOp(op, dtypes.index, (a, divisor))
    terms, constant = linear_form(a)
    wanted = _factors(divisor)
    whole: dict[UOp, int] = {}
    rest: dict[UOp, int] = {}
    for term, factor in terms.items():
        left = _factors(term)
        if all(left.count(f) >= wanted.count(f) for f in wanted):
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
    inner = from_linear(rest, constant)
    if low >= 0 and _always_less(rest, constant, divisor):
        return from_linear(whole, one) if op is Ops.FLOORDIV else inner
    if op is Ops.FLOORMOD:
        return UOp(op, dtypes.index, (inner, divisor))
    return simplify_sum(from_linear(whole, one), UOp(op, dtypes.index, (inner, divisor)))


def _always_less(rest: dict[UOp, int], constant: int, divisor: UOp) -> bool:
    """Whether rest + constant < divisor for certain: by bounds, or because it is a RANGE of just that
    size."""
    if linear_bounds(rest, constant)[1] < divisor.vmin:
        return True
    if constant == 0 and len(rest) == 1:
        (term, factor), = rest.items()
        return factor == 1 and term.op is Ops.RANGE and simplify(term.src[0]) is divisor
    return False


def _choice(condition: UOp, yes: UOp, no: UOp) -> UOp | None:
    """where(x < 0, 0, x) and all its relatives are a MAX or a MIN: the condition compares the two
    branches."""
    terms, constant = linear_form(yes)
    difference, other = dict(terms), linear_form(no)
    for term, factor in other[0].items():
        difference[term] = difference.get(term, 0) - factor
    difference, constant = {t: f for t, f in difference.items() if f}, constant - other[1]  # yes - no
    if not difference:
        return None
    opposite = {t: -f for t, f in difference.items()}
    for op, form, offset in ((Ops.MAX, opposite, -constant), (Ops.MIN, difference, constant)):
        if condition in (_less(form, -offset), _less(form, 1 - offset)):  # form + offset < 0, or <= 0
            return _extreme(op, yes, no)
    return None


def _extreme(op: Op, a: UOp, b: UOp) -> UOp:
    """MAX or MIN, decided by the bounds if they can; operands in canonical order."""
    if a is b:
        return a
    first, second = (a, b) if op is Ops.MAX else (b, a)
    if first.vmin >= second.vmax:
        return a
    if second.vmin >= first.vmax:
        return b
    if a.op is Ops.CONST or (b.op is not Ops.CONST and _order((b, 1)) < _order((a, 1))):
        a, b = b, a
    return UOp(op, dtypes.index, (a, b))


# ---- conditions --------------------------------------------------------------------------------------------


def _less(terms: dict[UOp, int], limit: int) -> UOp:
    """terms < limit, decided by bounds if they can, else with the common factor divided out."""
    low, high = linear_bounds(terms, 0)
    if high < limit:
        return UOp.const(True, dtypes.bool)
    if low >= limit:
        return UOp.const(False, dtypes.bool)
    common = math.gcd(*terms.values())
    if common > 1:  # g * t < limit  ==  t < ceil(limit / g)
        terms, limit = {t: f // common for t, f in terms.items()}, -(-limit // common)
    return UOp(Ops.CMPLT, dtypes.bool, (from_linear(terms, 0), UOp.index(limit)))


def _equal(terms: dict[UOp, int], limit: int, equal: bool) -> UOp:
    """terms == limit (or !=), decided if it can be, else with the common factor and the sign divided out."""
    low, high = linear_bounds(terms, 0)
    common = math.gcd(*terms.values()) if terms else 1
    if low > limit or high < limit or limit % common:
        return UOp.const(not equal, dtypes.bool)
    if low == high:
        return UOp.const(equal, dtypes.bool)
    if next(iter(sorted(terms.items(), key=_order)))[1] < 0:
        common = -common
    form = from_linear({t: f // common for t, f in terms.items()}, 0)
    return UOp(Ops.CMPEQ if equal else Ops.CMPNE, dtypes.bool, (form, UOp.index(limit // common)))


def _compare(op: Op, a: UOp, b: UOp) -> UOp:
    """Comparisons of index expressions: the terms to the left, the constant to the right, `<` for every
    order."""
    terms, constant = linear_form(a)
    terms = dict(terms)
    others, extra = linear_form(b)
    for term, factor in others.items():
        terms[term] = terms.get(term, 0) - factor
    if 0 in terms.values():
        terms = {t: c for t, c in terms.items() if c}
    limit = extra - constant  # terms <op> limit
    if op is Ops.CMPLT or op is Ops.CMPLE:
        return _less(terms, limit + (op is Ops.CMPLE))
    return _equal(terms, limit, op is Ops.CMPEQ)


def _is_index_compare(u: UOp) -> bool:
    return u.op in _INDEX_COMPARES and u.src[0].dtype is dtypes.index


def _negation(u: UOp) -> UOp | None:
    """not u, for an index comparison in canonical form."""
    if not _is_index_compare(u):
        return None
    terms, limit = u.src[0], u.src[1].arg
    if u.op is Ops.CMPLT:  # not (t < c)  ==  -t < 1 - c
        return _less({t: -f for t, f in linear_form(terms)[0].items()}, 1 - limit)
    return UOp(Ops.CMPNE if u.op is Ops.CMPEQ else Ops.CMPEQ, dtypes.bool, u.src)


def _or(a: UOp, b: UOp) -> UOp | None:
    """or with constants and repetitions."""
    if a is b:
        return a
    for x, y in ((a, b), (b, a)):
        if x.op is Ops.CONST:
            return x if x.arg else y
    return None


def operands(value: UOp, op: Op) -> list[UOp]:
    """What a chain of one op combines, from left to right: (a * b) * c is of a, b and c."""
    found: list[UOp] = []
    stack = [value]
    while stack:
        node = stack.pop()
        if node.op is op:
            stack += node.src[::-1]
        else:
            found.append(node)
    return found


def conditions_of(valid: UOp | None) -> list[UOp]:
    """The conditions that an AND holds together, each once, in order."""
    parts = [] if valid is None else operands(valid, Ops.AND)
    return [part for part in dict.fromkeys(parts) if part.op is not Ops.CONST or not part.arg]


def conjunction(*conditions: UOp | None) -> UOp | None:
    """The and of canonical conditions: without repetitions, without those that others imply; a constant False
    when they contradict each other; None when nothing remains to be tested."""
    parts = list(dict.fromkeys([part for condition in conditions for part in conditions_of(condition)]))
    if not parts:
        return None
    if len(parts) > 1:
        parts = _without_implied(parts)
    result: UOp | None = None
    for part in parts:
        if part.op is Ops.CONST:
            return part
        result = part if result is None else UOp(Ops.AND, dtypes.bool, (result, part))
    return result


def _without_implied(parts: list[UOp]) -> list[UOp]:
    """Drop `t < c` where another part says t < d <= c, and sums that the bounds of their terms decide."""
    limits: dict[frozenset[tuple[UOp, int]], int] = {}  # least limit of each linear form
    for part in parts:
        if part.op is Ops.CMPLT and _is_index_compare(part) and part.src[1].op is Ops.CONST:
            form = frozenset(linear_form(part.src[0])[0].items())
            limits[form] = min(limits.get(form, part.src[1].arg), part.src[1].arg)
    bounds: dict[UOp, tuple[int, int]] = {}
    for form, limit in limits.items():
        opposite = limits.get(frozenset([(t, -f) for t, f in form]))
        if opposite is not None and limit + opposite <= 1:  # -opposite < t < limit holds for no t
            return [UOp.const(False, dtypes.bool)]
        if len(form) == 1:
            (term, factor), = form
            low, high = bounds.get(term, term.bounds)
            bounds[term] = (int(low), min(int(high), limit - 1)) if factor > 0 \
                else (max(int(low), 1 - limit), int(high))
    kept: list[UOp] = []
    for part in parts:
        if part.op is Ops.CMPLT and _is_index_compare(part) and part.src[1].op is Ops.CONST:
            terms = linear_form(part.src[0])[0]
            limit = limits[frozenset(terms.items())]
            if part.src[1].arg != limit:
                continue
            if len(terms) > 1 and sum([bounds.get(t, t.bounds)[f > 0] * f for t, f in terms.items()]) < limit:
                continue
        kept.append(part)
    return kept


def simplify_given(u: UOp, valid: UOp | None) -> UOp:
    """A form of the index expression `u` that equals it wherever the condition `valid` holds; elsewhere it
    may be anything. Inside of the true part of a padded image 0 <= i + k - 1 < 28, so that (i + k - 1) % 28
    is i + k - 1."""
    best = simplify(u)
    for number, (terms, low, high) in enumerate(_limits(None if valid is None else simplify(valid))):
        pivot = next((t for t, f in terms.items() if abs(f) == 1), None)
        if pivot is None or pivot not in best.toposort():
            continue
        # name the constrained sum, write the pivot through it, simplify under its bounds, put the sum back
        name = UOp.variable(f"given {number}", low, high)
        sign = terms[pivot]
        others = from_linear({t: -f * sign for t, f in terms.items() if t is not pivot}, 0)
        found = simplify(best.substitute({pivot: name * sign + others}))
        found = simplify(found.substitute({name: from_linear(terms, 0)}))
        if _cost(found) < _cost(best):
            best = found
    return best


def _limits(valid: UOp | None) -> list[tuple[dict[UOp, int], int, int]]:
    """Linear forms that a condition bounds more tightly than their terms do: (terms, least, greatest)."""
    found: dict[frozenset[tuple[UOp, int]], tuple[dict[UOp, int], int, int]] = {}
    for part in conditions_of(valid):
        if part.op is not Ops.CMPLT or not _is_index_compare(part) or part.src[1].op is not Ops.CONST:
            continue
        terms, limit = linear_form(part.src[0])[0], part.src[1].arg
        positive = sorted(terms.items(), key=_order)[0][1] > 0
        if not positive:
            terms = {t: -f for t, f in terms.items()}
        form = frozenset(terms.items())
        _, low, high = found.get(form, (terms, *linear_bounds(terms, 0)))
        low, high = (low, min(high, limit - 1)) if positive else (max(low, 1 - limit), high)
        if low <= high:
            found[form] = terms, low, high
    return list(found.values())


def _cost(u: UOp) -> tuple[int, int]:
    """Divisions first, then size."""
    nodes = u.toposort()
    return sum([n.op in _DIVISIONS or n.op in _INDEX_COMPARES for n in nodes]), len(nodes)
