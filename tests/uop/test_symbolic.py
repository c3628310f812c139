"""Index algebra: every simplified expression has the value of the original, for all values of its
variables."""
from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whit.uop import AxisType, Ops, UOp, dtypes
from whit.uop.symbolic import (
    conjunction,
    floordiv,
    floormod,
    linear_bounds,
    linear_form,
    simplify,
    simplify_given,
    simplify_sum,
)
from whit.uop.text import show

# the truth: integer arrays over the whole box of the variables, by NumPy and Python's own floor division


def leaves(u: UOp) -> list[UOp]:
    return sorted([n for n in u.toposort() if n.op in (Ops.RANGE, Ops.VAR)], key=lambda n: repr(n.arg))


def values_of(leaf: UOp) -> range:
    return range(leaf.src[0].arg) if leaf.op is Ops.RANGE else range(leaf.arg.min, leaf.arg.max + 1)


def floor_division(a: Any, b: Any) -> Any:
    return np.where(b == 0, 0, a // np.where(b == 0, 1, b))


def floor_remainder(a: Any, b: Any) -> Any:
    return np.where(b == 0, 0, a % np.where(b == 0, 1, b))


def trunc_division(a: Any, b: Any) -> Any:
    return np.where(b == 0, 0, np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(np.where(b == 0, 1, b))))


NUMPY: dict[Any, Any] = {
    Ops.ADD: np.add, Ops.MUL: np.multiply, Ops.SUB: np.subtract, Ops.FLOORDIV: floor_division,
    Ops.FLOORMOD: floor_remainder, Ops.TRUNCDIV: trunc_division,
    Ops.TRUNCMOD: lambda a, b: np.where(b == 0, 0, a - b * trunc_division(a, b)), Ops.MAX: np.maximum,
                         Ops.MIN: np.minimum,
    Ops.CMPLT: np.less, Ops.CMPLE: np.less_equal, Ops.CMPEQ: np.equal, Ops.CMPNE: np.not_equal,
                         Ops.WHERE: np.where,
    Ops.AND: np.bitwise_and, Ops.OR: np.bitwise_or, Ops.XOR: np.bitwise_xor, Ops.NEG: np.negative}


def grid(names: list[UOp], most: int = 20_000) -> dict[UOp, Any]:
    """Each leaf's value at every point of the box (a fixed sample of a big one)."""
    axes = [np.array(values_of(n), dtype=np.int64) for n in names]
    points = int(np.prod([len(a) for a in axes])) if axes else 1
    if points <= most:
        return dict(zip(names, [m.reshape(-1) for m in np.meshgrid(*axes, indexing="ij")], strict=True))
    rng = np.random.default_rng(0)
    return {n: rng.choice(a, most) for n, a in zip(names, axes, strict=True)}


def evaluate(u: UOp, at: dict[UOp, Any]) -> Any:
    done: dict[UOp, Any] = {}
    for node in u.toposort():
        if node in at:
            done[node] = at[node]
        elif node.op is Ops.CONST:
            done[node] = np.asarray(node.arg)
        elif node.op is not Ops.RANGE:
            done[node] = NUMPY[node.op](*[done[s] for s in node.src])
    return done[u]


def agree(u: UOp, better: UOp, where: UOp | None = None) -> None:
    names = leaves(UOp.sink(u, better) if where is None else UOp.sink(u, better, where))
    at = grid(names)
    same = evaluate(u, at) == evaluate(better, at)
    if where is not None:
        same = same | ~evaluate(where, at)
    if not np.all(same):
        worst = int(np.argmin(np.broadcast_to(same, (max(1, len(next(iter(at.values()), [0]))),))))
        point = {str(n.arg): int(v[worst]) for n, v in at.items()}
        raise AssertionError(f"differs at {point}:\n{show(u)}\n---- simplified\n{show(better)}")
    low, high = u.bounds
    exact = evaluate(u, at)
    assert low <= exact.min() and exact.max() <= high, f"bounds {low} … {high} of\n{show(u)}"


def forget(u: UOp) -> None:
    """Drop what simplify remembers, to see whether it would come to the same result again."""
    for node in u.toposort():
        node._canonical = node._linear = None


def check(u: UOp) -> UOp:
    better = simplify(u)
    agree(u, better)
    forget(better)
    forget(u)
    again = simplify(better)
    assert again is better, f"not idempotent:\n{show(u)}\n----\n{show(better)}\n----\n{show(again)}"
    return better


def r(size: int, uid: int) -> UOp:
    return UOp.range(size, uid=uid)


# ---- rules, exhaustively -----------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 2, 3, 4, 6, 7, 12])
def test_division_of_one_term(d: int) -> None:
    x = UOp.variable("x", -13, 13)
    for factor, offset in itertools.product((-6, -4, -3, -1, 1, 2, 3, 8, 12), (-7, -1, 0, 1, 5)):
        form = UOp(Ops.ADD, dtypes.index, (x * factor, UOp.index(offset)))
        for op in (Ops.FLOORDIV, Ops.FLOORMOD, Ops.TRUNCDIV, Ops.TRUNCMOD):
            check(UOp(op, dtypes.index, (form, UOp.index(d))))
            check(UOp(op, dtypes.index, (form, UOp.index(-d))))
        agree(UOp(Ops.FLOORDIV, dtypes.index, (form, UOp.index(d))), floordiv(form, d))
        agree(UOp(Ops.FLOORMOD, dtypes.index, (form, UOp.index(d))), floormod(form, d))


def test_division_by_zero_is_zero() -> None:
    x = UOp.variable("x", -3, 3)
    for op in (Ops.FLOORDIV, Ops.FLOORMOD, Ops.TRUNCDIV, Ops.TRUNCMOD):
        check(UOp(op, dtypes.index, (x, UOp.index(0))))
        check(UOp(op, dtypes.index, (UOp.index(5), UOp.index(0))))
        check(UOp(op, dtypes.index, (x, UOp.variable("y", -2, 2))))


@pytest.mark.parametrize("d", [2, 3, 4, 5, 6, 8, 12])
def test_division_of_two_terms(d: int) -> None:
    a, b = r(5, 0), r(4, 1)
    for f, g, c in itertools.product((-4, 1, 2, 3, 4, 6, 12), (-3, 1, 2, 5), (-5, 0, 1, 3)):
        form = a * f + b * g + c
        check(form // d)
        check(form % d)
        check((form // d) * d + form % d)
        check((form % d) * 3 + form // d)
        check(((form // d) % 3) * d + form % d)
        check((form // d) // 3 + (form % d) % 2)


def test_a_quotient_joins_its_remainder() -> None:
    x = UOp.variable("x", -50, 50)
    assert simplify((x // 7) * 7 + x % 7) is x
    assert simplify((x // 4 % 7) * 4 + x % 4) is simplify(x % 28)
    assert simplify((x // 28) * 28 + (x // 4 % 7) * 4 + x % 4) is x
    assert simplify((x // 28) * 56 + (x // 4 % 7) * 8 + (x % 4) * 2 + 5) is simplify(x * 2 + 5)


def test_reshape_round_trips_are_free() -> None:
    i, j, k = r(6, 0), r(28, 1), r(30, 2)
    flat = (i * 28 + j) * 30 + k
    assert simplify(flat // 840) is i
    assert simplify(flat // 30 % 28) is j
    assert simplify(flat % 30) is k
    split = flat // 60  # (3 * 28, 60)
    assert simplify(split * 60 + flat % 60) is simplify(flat)


def test_comparisons_have_one_form() -> None:
    a, b = r(10, 0), r(7, 1)
    assert simplify((a + 3).lt(8)) is simplify(a.lt(5)) is simplify(a.le(4)) is simplify(UOp.index(4).ge(a))
    assert simplify((a * 4).lt(10)) is simplify(a.lt(3))
    assert simplify((a * 2 + b * 2).equal(7)).arg is False
    assert simplify((a * 2 - b * 2).equal(6)) is simplify((b - a).equal(-3))
    assert simplify(a.lt(10)).arg is True and simplify(a.lt(0)).arg is False
    assert simplify(~a.lt(5)) is simplify(a.ge(5))
    assert simplify(~a.equal(5)) is simplify(a.not_equal(5))


@pytest.mark.parametrize("make", [
    lambda x: x.lt(0).where(0, x), lambda x: UOp.index(0).lt(x).where(x, 0), lambda x: x.ge(0).where(x, 0),
    lambda x: x.le(0).where(0, x)])
def test_choices_that_are_a_maximum(make: Any) -> None:
    x = UOp.variable("x", -5, 5)
    assert check(make(x)) is simplify(x.maximum(0))


def test_choices_that_are_no_maximum() -> None:
    x = UOp.variable("x", -5, 5)
    for bound in range(-6, 7):
        for value in range(-6, 7):
            for yes, no in ((UOp.index(value), x), (x, UOp.index(value)), (x * 2 + 1, x + value)):
                check(x.lt(bound).where(yes, no))
                check(UOp.index(bound).lt(x).where(yes, no))


# ---- random expressions ------------------------------------------------------------------------------------


def random_expression(rng: random.Random, depth: int, names: list[UOp]) -> UOp:
    if depth == 0 or rng.random() < 0.15:
        return rng.choice(names) if rng.random() < 0.75 else UOp.index(rng.randint(-9, 9))
    a = random_expression(rng, depth - 1, names)
    kind = rng.randrange(10)
    if kind < 3:
        return UOp(Ops.ADD, dtypes.index, (a, random_expression(rng, depth - 1, names)))
    if kind == 3:
        return UOp(Ops.MUL, dtypes.index, (a, UOp.index(rng.choice([-3, -1, 0, 1, 2, 4, 6, 12]))))
    if kind < 8:
        op = rng.choice([Ops.FLOORDIV, Ops.FLOORMOD, Ops.FLOORDIV, Ops.FLOORMOD, Ops.TRUNCDIV, Ops.TRUNCMOD])
        return UOp(op, dtypes.index, (a, UOp.index(rng.choice([1, 2, 3, 4, 6, 8, 12, 24]))))
    b = random_expression(rng, depth - 1, names)
    if kind == 8:
        return UOp(rng.choice([Ops.MAX, Ops.MIN, Ops.MUL, Ops.FLOORDIV, Ops.FLOORMOD, Ops.SUB]), dtypes.index,
                   (a, b))
    return random_condition(rng, depth - 1, names).where(a, b)


def random_condition(rng: random.Random, depth: int, names: list[UOp]) -> UOp:
    if depth > 0 and rng.random() < 0.5:
        a, b = random_condition(rng, depth - 1, names), random_condition(rng, depth - 1, names)
        return rng.choice([lambda: a & b, lambda: a | b, lambda: ~a])()
    op = rng.choice([Ops.CMPLT, Ops.CMPLE, Ops.CMPEQ, Ops.CMPNE])
    return UOp(op, dtypes.bool, (random_expression(rng, depth, names), random_expression(rng, depth, names)))


def names_for(rng: random.Random) -> list[UOp]:
    return [r(rng.choice([1, 2, 3, 4, 6]), 0), UOp.range(rng.choice([2, 5, 8]), AxisType.REDUCE, uid=1),
            UOp.variable("n", rng.choice([-7, -1, 0, 1]), rng.choice([1, 4, 9]))]


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1 << 48))
def test_random_expressions_keep_their_value(seed: int) -> None:
    rng = random.Random(seed)
    names = names_for(rng)
    check(random_expression(rng, rng.randint(1, 5), names))
    check(random_condition(rng, rng.randint(1, 4), names))


def movement_chain(rng: random.Random) -> tuple[UOp, UOp | None]:
    """The flat index, and the condition, of an element of a tensor that went through random reshapes,
    permutes, pads, shrinks and flips; every step is worked out here by hand."""
    shape = [rng.choice([1, 2, 3, 4, 5, 6]) for _ in range(rng.randint(1, 3))]
    steps: list[tuple[str, Any]] = []
    sizes = list(shape)
    for _ in range(rng.randint(1, 6)):
        kind = rng.choice(["reshape", "reshape", "permute", "pad", "shrink", "flip"])
        if kind == "reshape":
            total = int(np.prod(sizes))
            new: list[int] = []
            while total > 1 and len(new) < 4:
                factor = rng.choice([f for f in range(1, total + 1) if total % f == 0])
                new.append(factor)
                total //= factor
            new.append(total)
            steps.append((kind, (list(sizes), new)))
            sizes = new
        elif kind == "permute":
            order = rng.sample(range(len(sizes)), len(sizes))
            steps.append((kind, order))
            sizes = [sizes[o] for o in order]
        elif kind == "pad":
            width = [(rng.randint(0, 2), rng.randint(0, 2)) for _ in sizes]
            steps.append((kind, (list(sizes), width)))
            sizes = [s + a + b for s, (a, b) in zip(sizes, width, strict=True)]
        elif kind == "shrink":
            cut = [rng.randint(0, s - 1) for s in sizes]
            steps.append((kind, cut))
            sizes = [rng.randint(1, s - c) for s, c in zip(sizes, cut, strict=True)]
        else:
            steps.append((kind, list(sizes)))
    places: list[UOp] = [r(size, uid) for uid, size in enumerate(sizes)]
    conditions: list[UOp] = []
    for kind, detail in reversed(steps):
        if kind == "reshape":
            old, new = detail
            flat = UOp.index(0)
            for place, size in zip(places, new, strict=True):
                flat = flat * size + place
            places = []
            for size in reversed(old):
                places.insert(0, flat % size)
                flat = flat // size
        elif kind == "permute":
            before = [UOp.index(0)] * len(places)
            for position, source in enumerate(detail):
                before[source] = places[position]
            places = before
        elif kind == "pad":
            places = [p - a for p, (a, _) in zip(places, detail[1], strict=True)]
            for place, size in zip(places, detail[0], strict=True):
                conditions += [place.ge(0), place.lt(size)]
        elif kind == "shrink":
            places = [p + c for p, c in zip(places, detail, strict=True)]
        else:
            places = [(-p) + (size - 1) for p, size in zip(places, detail, strict=True)]
    flat = UOp.index(0)
    for place, size in zip(places, shape, strict=True):
        flat = flat * size + place
    valid: UOp | None = None
    for condition in conditions:
        valid = condition if valid is None else valid & condition
    return flat, valid


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 48))
def test_movement_chains_keep_their_elements(seed: int) -> None:
    flat, valid = movement_chain(random.Random(seed))
    better = check(flat)
    if valid is not None:
        known = check(valid)
        agree(flat, simplify_given(flat, known), where=known)
        agree(better, simplify_given(better, valid), where=valid)


# ---- conditions --------------------------------------------------------------------------------------------


def test_inside_of_padding_divisions_vanish() -> None:
    i, k = r(28, 0), r(3, 1)
    row = i + k - 1
    valid = simplify(row.ge(0) & row.lt(28))
    assert simplify_given(row % 28, valid) is simplify(row)
    assert simplify_given(row // 28 * 100 + row % 28, valid) is simplify(row)
    x = UOp.variable("x", -9, 9)
    assert simplify_given(x.maximum(0), simplify(x.ge(0))) is x


def test_conditions_that_others_imply_are_dropped() -> None:
    i, k = r(28, 0), r(3, 1)
    a, b = simplify(i.lt(5)), simplify(i.lt(9))
    assert conjunction(b, a) is a and conjunction(a, b, a) is a
    assert conjunction(a, simplify((i + k).lt(7))) is a
    assert conjunction(a, simplify((i + k).lt(6))) is not a
    assert conjunction(simplify(i.ge(20)), a).arg is False  # type: ignore[union-attr]
    assert conjunction(None, UOp.const(True, dtypes.bool)) is None
    assert simplify((i + k - 1).ge(-1) & (i + k - 1).lt(28)) is simplify((i + k).lt(29))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 48))
def test_conjunctions_keep_their_value(seed: int) -> None:
    rng = random.Random(seed)
    names = names_for(rng)
    parts = [simplify(random_condition(rng, rng.randint(0, 2), names)) for _ in range(rng.randint(1, 5))]
    whole = parts[0]
    for part in parts[1:]:
        whole = UOp(Ops.AND, dtypes.bool, (whole, part))
    agree(whole, conjunction(*parts) or UOp.const(True, dtypes.bool))


# ---- symbolic sizes ----------------------------------------------------------------------------------------


def test_symbolic_strides_cancel() -> None:
    n = UOp.variable("n", 1, 9)
    i, j = r(4, 0), UOp.range(n, uid=1)
    flat = i * n + j
    assert simplify(flat // n) is i
    assert simplify(flat % n) is j
    assert simplify((i * n * 3 + j) // n) is simplify(i * 3)
    assert simplify((n + 1) * 4 - n * 4) is UOp.index(4)
    assert simplify(n * (n + 2)) is simplify(n * n + n * 2)


def test_division_by_a_variable() -> None:
    n, i = UOp.variable("n", 1, 6), r(7, 0)
    for u in ((i * n + 3) // n, (i * n + i) // n, (i * n + i) % n, (n * 5 - i) // n, (n * 5 - i) % n,
              (i + n) // n,
              (i * n) // (n * n), (i * n * n + n) % (n * n)):
        check(u)


# ---- forms -------------------------------------------------------------------------------------------------


def test_linear_forms() -> None:
    i, j = r(4, 0), r(5, 1)
    u = i * 6 + (j + 2) * 3 - i
    assert linear_form(u) == ({i: 5, j: 3}, 6)
    assert linear_bounds(*linear_form(u)) == (6, 5 * 3 + 3 * 4 + 6)
    assert simplify_sum(i, j * -1, j) is i


def test_sums_shared_many_times_cost_little() -> None:
    x = UOp.variable("x", 0, 1)
    for _ in range(200):
        x = UOp(Ops.ADD, dtypes.index, (x, x))
    assert linear_form(simplify(x)) == ({UOp.variable("x", 0, 1): 1 << 200}, 0)


def test_deep_expressions() -> None:
    x = UOp.variable("x", 0, 100)
    deep = x
    for step in range(20_000):
        deep = UOp(Ops.ADD, dtypes.index, (deep, UOp.index(step)))
    assert simplify(deep) is simplify(x + sum(range(20_000)))


# ---- proofs: the div and mod laws for all integers, by z3 --------------------------------------------------


def prove(claim: Any, *given_: Any) -> None:
    z3 = pytest.importorskip("z3")
    solver = z3.Solver()
    solver.set("timeout", 20_000)
    solver.add(*given_, z3.Not(claim))
    assert solver.check() == z3.unsat, solver


def test_laws_of_division() -> None:
    z3 = pytest.importorskip("z3")
    x, q, s, c = z3.Ints("x q s c")
    # z3's integer division rounds down for positive divisors, as FLOORDIV does
    for d in (1, 2, 3, 7, 12):
        prove((d * q + x) / d == q + x / d)
        prove((d * q + x) % d == x % d)
        prove((x / d) * d + x % d == x)
        for e in (2, 3, 5):
            prove((x / d) / e == x / (d * e))
            prove((x % (d * e)) % d == x % d)
            prove(((x / d) % e) * d + x % d == x % (d * e))
            prove((e * x + c) / (e * d) == (x + c / e) / d)
            prove((e * x + c) % (e * d) == e * ((x + c / e) % d) + c % e)
            prove((e * x + s) / (e * d) == x / d, s >= 0, s < e)
            prove((e * x + s) % (e * d) == e * (x % d) + s, s >= 0, s < e)
            prove((d * x < c) == (x < -((-c) / d)))


def test_a_planted_wrong_law_is_not_proved() -> None:
    z3 = pytest.importorskip("z3")
    x = z3.Int("x")
    with pytest.raises(AssertionError):
        prove((x + 1) / 3 == x / 3 + 1)
    y = UOp.variable("y", -9, 9)
    with pytest.raises(AssertionError, match="differs at"):
        agree((y + 1) // 3, y // 3 + 1)
