"""Value rules: every rule, instantiated from its own pattern, keeps every bit on nasty values; integers also
by z3."""
from __future__ import annotations

import itertools
import math
import random
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.numpy_values import NUMPY, TYPES, calculate, converted, nasty, numpy_value
from whit.codegen.simplify import holds, simplify_values, value_rules
from whit.uop import AxisType, DType, Op, Ops, ParamArg, PatternMatcher, UOp, UPat, dtypes, graph_rewrite
from whit.uop.ops import ALU, COMPARE
from whit.uop.pattern import _ANY, Rule, rule_stats
from whit.uop.text import show


def evaluate(u: UOp, at: dict[UOp, Any]) -> Any:
    done: dict[UOp, Any] = {}
    for node in u.toposort():
        if node in at:
            done[node] = numpy_value(at[node], node.dtype)
        elif node.op is Ops.CONST:
            done[node] = numpy_value(node.arg, node.dtype) if node.dtype in NUMPY else node.arg
        elif node.op is Ops.CAST:
            done[node] = converted(done[node.src[0]], node.src[0].dtype, node.dtype)
        elif node.op is Ops.BITCAST:
            done[node] = np.frombuffer(done[node.src[0]].tobytes(), NUMPY[node.dtype])[0]
        elif node.op in ALU:
            with np.errstate(all="ignore"):
                done[node] = calculate(node.op, node.src[-1].dtype, [done[s] for s in node.src])
    return done[u]


def same(a: Any, b: Any) -> bool:
    if a.dtype != b.dtype:
        return False
    return bool((a != a and b != b) or a.tobytes() == b.tobytes())


def leaf(slot: int, dtype: DType) -> UOp:
    return UOp(Ops.INDEX, dtype, (UOp(Ops.PARAM, dtype, (), ParamArg(slot, 1)), UOp.index(0)))


def leaves_of(u: UOp) -> list[UOp]:
    return [n for n in u.toposort() if n.op is Ops.INDEX]


def assert_equal(before: UOp, after: UOp, rng: random.Random, most: int = 150) -> None:
    names = leaves_of(UOp.sink(before, after))
    choices = [nasty(n.dtype) for n in names]
    few = math.prod([len(c) for c in choices]) <= most
    sample = itertools.product(*choices) if few else [[rng.choice(c) for c in choices] for _ in range(most)]
    for point in sample:
        at = dict(zip(names, point, strict=True))
        expected, got = evaluate(before, at), evaluate(after, at)
        assert same(expected,
                    got), f"{point}: {expected!r} became {got!r}\n{show(before)}\n---- after\n{show(after)}"


# ---- instances of a rule's own pattern ---------------------------------------------------------------------


class Instance:
    """Draws a graph that the left side of a rule describes."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.names, self.slots = rng, {}, itertools.count()
        self.main = rng.choice(TYPES)
        self.names: dict[str, UOp] = {}

    def dtype(self, pattern: UPat) -> DType:
        allowed = pattern.dtype
        if allowed is None:
            return self.main
        options = [d for d in (allowed if isinstance(allowed, tuple) else (allowed,)) if d in NUMPY]
        return self.main if self.main in options else self.rng.choice(options)

    def constant(self, dtype: DType) -> UOp:
        powers = [2.0 ** k for k in (-3, 1, 2, 7)] if dtype.is_float else [2 ** k for k in range(7)]
        return UOp.const(self.rng.choice([*nasty(dtype), *powers, *([] if dtype.is_float else [3, 5, 10])]),
                         dtype)

    def draw(self, pattern: UPat, like: DType | None = None) -> UOp:
        if pattern.name is not None and pattern.name in self.names:
            return self.names[pattern.name]
        node = self.make(pattern, like)
        if pattern.name is not None:
            self.names[pattern.name] = node
        return node

    def make(self, pattern: UPat, like: DType | None) -> UOp:
        if pattern.op is None:
            kind = self.dtype(pattern) if pattern.dtype is not None or like is None else like
            free, luck = leaf(next(self.slots), kind), self.rng.random()
            if kind.is_int and luck < 0.1:
                return self.constant(kind)
            if kind.is_int and luck < 0.4:  # with bounds that a rule may use
                return UOp(Ops.AND, kind, (free, UOp.const(self.rng.choice([1, 3, 7, 100]), kind)))
            return free
        op = self.rng.choice(pattern.ops or ())
        if op is Ops.CONST:
            kind = self.dtype(pattern) if pattern.dtype is not None or like is None else like
            return self.constant(kind) if pattern.arg is _ANY else UOp.const(pattern.arg, kind)
        if op is Ops.CAST:
            target = self.rng.choice(TYPES) if pattern.dtype is None \
                else self.dtype(UPat(dtype=pattern.dtype))
            if self.rng.random() < 0.7:
                target = self.rng.choice([d for d in TYPES if pattern.dtype is None or d in pattern.dtype])
            return UOp(Ops.CAST, target, (self.draw(pattern.src[0], self.rng.choice(TYPES)),))
        if op is Ops.BITCAST:
            inner = self.draw(pattern.src[0])
            return UOp(Ops.BITCAST, self.rng.choice([d for d in TYPES if d.bitsize == inner.dtype.bitsize]),
                       (inner,))
        if isinstance(pattern.src, UPat):
            count = op.arity or 1
            return self.finish(op, [self.draw(pattern.src, self.rng.choice(TYPES)) for _ in range(count)])
        if pattern.src is None:
            return self.finish(op, [leaf(next(self.slots), self.main) if self.rng.random() < 0.5
                                    else self.constant(self.main) for _ in range(op.arity or 1)])
        drawn: dict[int, UOp] = {}
        for position, sub in sorted(enumerate(pattern.src), key=lambda item: item[1].op is Ops.CONST):
            known = [drawn[p].dtype for p in drawn if op is not Ops.WHERE or p > 0]
            kind = dtypes.bool if op is Ops.WHERE and position == 0 else known[0] if known else None
            drawn[position] = self.draw(sub, kind)
        return self.finish(op, [drawn[p] for p in range(len(pattern.src))])

    def finish(self, op: Op, src: list[UOp]) -> UOp:
        return UOp(op, dtypes.bool if op in COMPARE else src[-1].dtype, tuple(src))


def well_typed(u: UOp) -> bool:
    for node in u.toposort():
        if node.op in ALU:
            operands = node.src[1:] if node.op is Ops.WHERE else node.src
            scalar = operands[0].dtype
            takes = node.op.takes
            fine = {"any": True, "number": not scalar.is_bool, "float": scalar.is_float, "int": scalar.is_int,
                    "bitwise": not scalar.is_float}[takes]
            if not fine or any(o.dtype is not scalar for o in operands):
                return False
            if node.op is Ops.WHERE and node.src[0].dtype is not dtypes.bool:
                return False
        if node.op is Ops.BITCAST and dtypes.bool in (node.dtype, node.src[0].dtype):
            return False
    return True


UNTESTED_HERE = {"repeated_value"}  # a REDUCE has ranges: tested below
# ops that NumPy computes exactly; folding the others is tested against their stated meaning in tests/uop
EXACT = {Ops.ADD, Ops.SUB, Ops.MUL, Ops.FDIV, Ops.NEG, Ops.MAX, Ops.MIN, Ops.WHERE, Ops.FLOORDIV,
         Ops.FLOORMOD, Ops.TRUNCDIV,
         Ops.TRUNCMOD, Ops.AND, Ops.OR, Ops.XOR, Ops.SHL, Ops.SHR, *COMPARE}


def instances(item: Rule, rng: random.Random, wanted: int) -> Iterator[tuple[UOp, UOp]]:
    """Graphs on which the rule fires, with its result."""
    alone = PatternMatcher([item])
    for _ in range(wanted * 60):
        before = Instance(rng).draw(item.left)
        if not well_typed(before) or any(n.op in ALU and n.op not in EXACT for n in before.toposort()):
            continue
        after = alone.rewrite(before)
        if after is not None:
            yield before, after
            wanted -= 1
            if wanted == 0:
                return


def check_rule(item: Rule, seed: int, wanted: int = 25) -> int:
    """How many instances fired; every one keeps its value, its type, and grows nothing."""
    rng, fired = random.Random(f"{seed} {item.name}"), 0
    for before, after in instances(item, rng, wanted):
        fired += 1
        assert after.dtype is before.dtype
        assert_equal(before, after, rng)
        assert measure(after) < measure(before), f"{item.name} worsens\n{show(before)}\n----\n{show(after)}"
    return fired


COST = {**dict.fromkeys(COMPARE, 2), Ops.FDIV: 4, Ops.FLOORDIV: 20, Ops.FLOORMOD: 20, Ops.TRUNCDIV: 20,
        Ops.TRUNCMOD: 20, Ops.WHERE: 2, Ops.ADD: 2, Ops.MUL: 2, Ops.MAX: 2, Ops.MIN: 2, Ops.SUB: 2,
        Ops.INDEX: 0,
        Ops.PARAM: 0, Ops.CONST: 0}


def measure(u: UOp) -> tuple[int, int]:
    """What rules lower: the cost of the ops, then the constants that stand to the left (or that SUB
    takes)."""
    nodes = u.toposort()
    cost = sum(COST.get(n.op, 1) for n in nodes)
    awkward = sum((n.op in ALU and n.op.commutative and n.src[0].op is Ops.CONST
                   and n.src[1].op is not Ops.CONST) or
                  (n.op is Ops.SUB and n.src[1].op is Ops.CONST) for n in nodes)
    return cost, awkward


@pytest.mark.parametrize("item", [r for r in value_rules.rules if r.name not in UNTESTED_HERE],
                         ids=lambda r: r.name)
def test_rule_keeps_every_bit(item: Rule) -> None:
    assert check_rule(item, 1) > 0, "no instance of its own pattern makes the rule fire"


@pytest.mark.parametrize("wrong", [
    Rule("x + 0.0 -> x", UPat.var("x", dtypes.floats) + 0.0, UPat.var("x")),
    Rule("x * 0 -> 0", UPat.var("x", dtypes.floats) * 0, UPat.of(0)),
    Rule("x - x -> 0", UPat.var("x", dtypes.floats) - UPat.var("x"), UPat.of(0)),
    Rule("x / c -> x * (1 / c)", UPat.var("x", dtypes.floats) / UPat.cvar("c", dtypes.floats), lambda x,
         c: x * (1.0 / c.arg)
         if c.arg not in (0, math.inf, -math.inf) and c.arg == c.arg else None),
    Rule("x == x -> true", UPat.var("x", dtypes.floats).equal(UPat.var("x")),
         lambda x: UOp.const(True, dtypes.bool)),
    Rule("not x < y -> y <= x", UPat.var("x", dtypes.floats).lt(UPat.var("y", dtypes.floats)) ^ True,
         lambda x, y: y.le(x)),
    Rule("x / 2^k -> x >> k", UPat.var("x", dtypes.sints).alu(Ops.TRUNCDIV, UPat.cvar("c", dtypes.sints)),
         lambda x, c: x >> (c.arg.bit_length() - 1) if c.arg > 0 and c.arg & (c.arg - 1) == 0 else None),
    Rule("x + 1 > x", UPat.var("x", dtypes.ints).lt(UPat.var("x") + 1),
         lambda x: UOp.const(True, dtypes.bool)),
], ids=lambda r: r.name)
def test_a_planted_wrong_rule_is_caught(wrong: Rule) -> None:
    with pytest.raises(AssertionError, match="became"):
        for seed in range(4):
            check_rule(wrong, seed, 60)


# ---- whole expressions -------------------------------------------------------------------------------------


def random_value(rng: random.Random, dtype: DType, depth: int, pool: dict[DType, list[UOp]]) -> UOp:
    """A well-typed expression of the dtype."""
    if depth == 0 or rng.random() < 0.1:
        if rng.random() < 0.35:
            return UOp.const(rng.choice([*nasty(dtype), 1, 2, 0]), dtype)
        return rng.choice(pool[dtype])

    def some(kind: DType) -> UOp:
        return random_value(rng, kind, depth - 1, pool)
    kind = rng.randrange(10)
    if kind == 0:
        return UOp(Ops.CAST, dtype, (some(rng.choice(TYPES)),))
    if kind == 1:
        return some(dtypes.bool).where(some(dtype), some(dtype))
    if dtype.is_bool:
        if kind < 6:
            other = rng.choice(TYPES)
            return UOp(rng.choice(sorted(COMPARE, key=lambda o: o.name)), dtypes.bool,
                       (some(other), some(other)))
        return UOp(rng.choice([Ops.AND, Ops.OR, Ops.XOR, Ops.ADD, Ops.MUL, Ops.MAX, Ops.MIN]), dtype,
                   (some(dtype), some(dtype)))
    if dtype.is_float:
        op = rng.choice([Ops.ADD, Ops.SUB, Ops.MUL, Ops.FDIV, Ops.NEG])
    else:
        op = rng.choice(sorted(EXACT - COMPARE - {Ops.FDIV, Ops.WHERE, Ops.MAX, Ops.MIN},
                               key=lambda o: o.name))
    if op is Ops.NEG:
        return UOp(op, dtype, (some(dtype),))
    return UOp(op, dtype, (some(dtype), some(dtype)))


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 1 << 48))
def test_random_values_keep_every_bit(seed: int) -> None:
    rng = random.Random(seed)
    pool = {d: [leaf(2 * n, d), leaf(2 * n + 1, d)] for n, d in enumerate(TYPES)}
    before = random_value(rng, rng.choice(TYPES), rng.randint(1, 5), pool)
    after = simplify_values(before)
    assert after.dtype is before.dtype
    assert_equal(before, after, rng, 40)
    assert simplify_values(after) is after


# ---- folding, casts, reductions ----------------------------------------------------------------------------


def test_lossless_casts_are_those_that_come_back() -> None:
    for outer, inner in itertools.product(TYPES, TYPES):
        values = nasty(inner) if inner.bitsize > 8 else [  # every value of the 8-bit types
            v for v in (np.arange(256, dtype=np.uint8).view(NUMPY[inner]) if not inner.is_bool
                        else [False, True])]
        back = all(same(NUMPY[inner](v), converted(converted(NUMPY[inner](v), inner, outer), outer, inner))
                   and (not outer.is_bool or inner.is_bool) for v in values)
        if holds(outer, inner):
            assert back, f"{inner} does not come back from {outer}"


def test_casts_go_through() -> None:
    x = leaf(0, dtypes.int8)
    assert simplify_values(UOp(Ops.CAST, dtypes.int8, (UOp(Ops.CAST, dtypes.float32, (x,)),))) is x
    wide = UOp(Ops.CAST, dtypes.int64, (leaf(1, dtypes.float32),))
    # saturates once
    assert simplify_values(UOp(Ops.CAST, dtypes.int8, (wide,))) is UOp(Ops.CAST, dtypes.int8, (wide,))
    half = UOp(Ops.CAST, dtypes.float16, (leaf(1, dtypes.float32),))
    assert simplify_values(UOp(Ops.CAST, dtypes.float32, (half,))).op is Ops.CAST  # rounds: stays


def test_bitcasts_of_constants() -> None:
    one = UOp(Ops.BITCAST, dtypes.int32, (UOp.const(1.0, dtypes.float32),))
    assert simplify_values(one) is UOp.const(struct.unpack("i", struct.pack("f", 1.0))[0], dtypes.int32)
    minus = UOp(Ops.BITCAST, dtypes.uint8, (UOp.const(-1, dtypes.int8),))
    assert simplify_values(minus) is UOp.const(255, dtypes.uint8)


def test_repeated_values_leave_their_reduction() -> None:
    i, k, m = UOp.range(4, uid=0), UOp.range(6, AxisType.REDUCE, uid=1), UOp.range(5, AxisType.REDUCE, uid=2)
    x = UOp(Ops.INDEX, dtypes.int32, (UOp(Ops.PARAM, dtypes.int32, (), ParamArg(0, 24)), i * 6 + k))
    y = UOp(Ops.INDEX, dtypes.float32, (UOp(Ops.PARAM, dtypes.float32, (), ParamArg(1, 4)), i))
    assert simplify_values(x.reduce_ranges(Ops.ADD, k, m)) is x.reduce_ranges(Ops.ADD, k) * 5
    assert simplify_values(x.reduce_ranges(Ops.MAX, k, m)) is x.reduce_ranges(Ops.MAX, k)
    assert simplify_values(y.reduce_ranges(Ops.MIN, k)) is y
    total = y.reduce_ranges(Ops.ADD, k)  # six roundings are not one
    assert simplify_values(total) is total


# ---- z3: the integer rules for every value of 8 and 16 bits ------------------------------------------------


def z3_value(u: UOp, at: dict[UOp, Any]) -> Any:
    import z3
    done: dict[UOp, Any] = {}

    def flag(v: Any) -> Any:
        return z3.If(v, z3.BitVecVal(1, 1), z3.BitVecVal(0, 1))
    for node in u.toposort():
        if node in at:
            done[node] = at[node]
            continue
        if node.op in (Ops.PARAM, Ops.INDEX) or node.dtype is dtypes.index:
            continue
        if node.op is Ops.CONST:
            done[node] = z3.BitVecVal(int(node.arg), node.dtype.bitsize)
            continue
        s = [done[x] for x in node.src]
        kind = node.src[-1].dtype
        unsigned = kind.is_unsigned or kind.is_bool
        less = z3.ULT if unsigned else (lambda a, b: a < b)
        if node.op is Ops.CAST:
            done[node] = z3_cast(s[0], kind, node.dtype)
        elif node.op is Ops.WHERE:
            done[node] = z3.If(s[0] == 1, s[1], s[2])
        elif node.op in (Ops.FLOORDIV, Ops.FLOORMOD, Ops.TRUNCDIV, Ops.TRUNCMOD):
            done[node] = z3_division(node.op, unsigned, *s)
        elif node.op in (Ops.SHL, Ops.SHR):
            right = z3.LShR(s[0], s[1]) if unsigned else s[0] >> s[1]
            done[node] = s[0] << s[1] if node.op is Ops.SHL else right
        else:
            done[node] = {
                Ops.ADD: lambda a, b: a | b if kind.is_bool else a + b, Ops.MUL: lambda a, b: a & b
                          if kind.is_bool else a * b,
                Ops.SUB: lambda a, b: a - b, Ops.NEG: lambda a: -a,
                Ops.AND: lambda a, b: a & b, Ops.OR: lambda a, b: a | b, Ops.XOR: lambda a, b: a ^ b,
                Ops.MAX: lambda a, b: z3.If(less(a, b), b, a), Ops.MIN: lambda a, b: z3.If(less(b, a), b, a),
                Ops.CMPLT: lambda a, b: flag(less(a, b)), Ops.CMPLE: lambda a, b: flag(z3.Not(less(b, a))),
                Ops.CMPEQ: lambda a, b: flag(a == b), Ops.CMPNE: lambda a, b: flag(a != b)}[node.op](*s)
    return done[u]


def z3_cast(x: Any, source: DType, target: DType) -> Any:
    import z3
    if target.is_bool:
        return z3.If(x != 0, z3.BitVecVal(1, 1), z3.BitVecVal(0, 1))
    gap = target.bitsize - source.bitsize
    if gap <= 0:
        return z3.Extract(target.bitsize - 1, 0, x)
    return (z3.ZeroExt if source.is_unsigned or source.is_bool else z3.SignExt)(gap, x)


def z3_division(op: Op, unsigned: bool, a: Any, b: Any) -> Any:
    import z3
    quotient, rest = (z3.UDiv(a, b), z3.URem(a, b)) if unsigned else (a / b, z3.SRem(a, b))
    if not unsigned and op in (Ops.FLOORDIV, Ops.FLOORMOD):
        off = z3.And(rest != 0, (rest < 0) != (b < 0))
        quotient, rest = z3.If(off, quotient - 1, quotient), z3.If(off, rest + b, rest)
    return z3.If(b == 0, z3.BitVecVal(0, a.size()), quotient if op in (Ops.FLOORDIV, Ops.TRUNCDIV) else rest)


@pytest.mark.parametrize("item",
                         [r for r in value_rules.rules if r.name not in UNTESTED_HERE
                          and "fold" not in r.name],
                         ids=lambda r: r.name)
def test_integer_rules_hold_for_every_value(item: Rule) -> None:
    z3 = pytest.importorskip("z3")
    rng, proved = random.Random(item.name), 0
    for before, after in instances(item, rng, 40):
        both = UOp.sink(before, after)
        if any(n.dtype.is_float or n.dtype.bitsize > 16 for n in both.toposort()
               if n.dtype not in (dtypes.index, dtypes.void)) \
                or any(n.op is Ops.BITCAST for n in both.toposort()):
            continue
        at = {n: z3.BitVec(f"v{n.src[0].arg.slot}", n.dtype.bitsize) for n in leaves_of(both)}
        solver = z3.Solver()
        solver.set("timeout", 5_000)
        solver.add(z3_value(before, at) != z3_value(after, at))
        assert solver.check() != z3.sat, f"{solver.model()}\n{show(before)}\n---- after\n{show(after)}"
        proved += 1
        if proved == 4:
            return


def test_statistics_count_tries_and_fires() -> None:
    rule_stats.pop("mul_one", None)
    value_rules.rewrite_counted(leaf(0, dtypes.float32) * 1.0)
    assert rule_stats["mul_one"].fired == 1 and rule_stats["mul_one"].tried >= 1


def test_it_reaches_a_fixed_point_on_long_chains() -> None:
    x = leaf(0, dtypes.int32)
    for step in range(3000):
        x = (x + step) * 1 - 0
    assert graph_rewrite(x, value_rules) is leaf(0, dtypes.int32) + sum(range(3000))
