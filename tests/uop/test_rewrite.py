"""Patterns, the rewrite engine, interning and the life of nodes."""
from __future__ import annotations

import gc
import pickle
import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest

from whit.helpers import Context, IRError
from whit.uop import (
    Ops,
    Pass,
    PatternMatcher,
    UOp,
    UPat,
    dtypes,
    graph_rewrite,
    rebuild,
    rule,
    rule_pass,
    run_passes,
)
from whit.uop import rewrite as engine
from whit.uop import uop as nodes
from whit.uop.pattern import Rule


def f32(value: float) -> UOp:
    return UOp.const(value, dtypes.float32)


def x(name: str = "x") -> UOp:
    return UOp.variable(name, 0, 9).cast(dtypes.float32)


@rule
def mul_one(x: Any) -> Any:
    """x * 1 -> x."""
    return x * 1, x


@rule
def add_itself(x: Any) -> Any:
    """x + x -> x * 2."""
    return x + x, x * 2


# ---- matching ----------------------------------------------------------------------------------------------


def test_commutative_patterns_match_both_ways() -> None:
    m = PatternMatcher([mul_one])
    assert m.rewrite(x() * 1.0) is x()
    assert m.rewrite(f32(1.0) * x()) is x()
    assert m.rewrite(x() * 2.0) is None
    assert m.rewrite(x() + 1.0) is None
    assert PatternMatcher([Rule("r", UPat.var("x") - 1, UPat.var("x"))]).rewrite(f32(1.0) - x()) is None


def test_nested_commutative_patterns_match_every_order() -> None:
    m = PatternMatcher([Rule("r", (UPat.var("a") * 2) + UPat.cvar("c"), lambda a, c: a - c)])
    a, two, three = x(), f32(2.0), f32(3.0)
    for product in (UOp(Ops.MUL, dtypes.float32, (a, two)), UOp(Ops.MUL, dtypes.float32, (two, a))):
        for total in (UOp(Ops.ADD, dtypes.float32, (product, three)),
                      UOp(Ops.ADD, dtypes.float32, (three, product))):
            assert m.rewrite(total) is a - three


def test_a_name_used_twice_means_the_same_node() -> None:
    m = PatternMatcher([add_itself])
    assert m.rewrite(x() + x()) is x() * 2.0
    assert m.rewrite(x("a") + x("b")) is None


def test_constants_are_told_apart_by_the_sign_of_zero() -> None:
    m = PatternMatcher([Rule("r", UPat.var("x") + -0.0, UPat.var("x"))])
    assert m.rewrite(x() + -0.0) is x()
    assert m.rewrite(x() + 0.0) is None


def test_dtypes_guards_and_constants_restrict() -> None:
    m = PatternMatcher([Rule("r", UPat.var("x", dtypes.ints) * UPat.cvar("c"), lambda x, c: x,
                             guard=lambda c: c.arg == 7)])
    n = UOp.variable("n", 0, 9).cast(dtypes.int32)
    assert m.rewrite(n * 7) is n
    assert m.rewrite(n * 8) is None
    assert m.rewrite(x() * 7.0) is None


def test_arity_and_op_sets() -> None:
    m = PatternMatcher([Rule("sink of two", UPat(Ops.SINK, src=(UPat(name="a"), UPat())), lambda a: a),
                        Rule("any", UPat((Ops.ADD, Ops.MUL), src=UPat(Ops.CONST), name="u"),
                             lambda u: u.src[1])])
    a, b = f32(1.0), f32(2.0)
    assert m.rewrite(UOp.sink(a, b)) is a
    assert m.rewrite(UOp.sink(a)) is None and m.rewrite(UOp.sink(a, b, a)) is None \
        and m.rewrite(UOp.sink()) is None
    assert m.rewrite(a + b) is b and m.rewrite(a * b) is b and m.rewrite(x() + b) is None


def test_more_than_three_sources() -> None:
    m = PatternMatcher([Rule("r",
                             UPat(Ops.SINK,
                                  src=(UPat(Ops.CONST), UPat(), UPat(), UPat(Ops.CONST, name="last"))),
                             lambda last: last)])
    a, b = f32(1.0), x()
    assert m.rewrite(UOp.sink(a, b, b, a)) is a
    assert m.rewrite(UOp.sink(a, b, b, b)) is None and m.rewrite(UOp.sink(b, b, b, a)) is None


def test_the_first_rule_that_fires_wins_and_none_means_go_on() -> None:
    calls: list[str] = []

    def refuses(x: UOp) -> None:
        calls.append("refused")
    m = PatternMatcher([Rule("a", UPat.var("x") * 1, refuses), Rule("b", UPat.var("x") * 1, UPat.var("x")),
                        Rule("c", UPat.var("x") * 1, lambda x: x * 5)])
    assert m.rewrite(x() * 1.0) is x() and calls == ["refused"]
    assert (PatternMatcher([m.rules[2]]) + m).rewrite(x() * 1.0) is x() * 5.0


def test_functions_get_the_context() -> None:
    m = PatternMatcher([Rule("r", UPat.var("x") * 1, lambda ctx, x: x * ctx)])
    assert m.rewrite(x() * 1.0, 3) is x() * 3.0


def test_a_right_side_with_a_name_that_the_left_lacks_is_refused() -> None:
    with pytest.raises(AssertionError, match="does not capture"):
        PatternMatcher([Rule("r", UPat.var("x") * 1, UPat.var("y"))]).rewrite(x() * 1.0)
    with pytest.raises(AssertionError, match="does not capture"):
        PatternMatcher([Rule("r", UPat.var("x") * 1, lambda z: z)]).rewrite(x() * 1.0)


# ---- rewriting ---------------------------------------------------------------------------------------------


def test_bottom_up_runs_to_the_fixed_point() -> None:
    m = PatternMatcher([mul_one, Rule("0", UPat.var("x") - UPat.var("x"), UPat.of(0)),
                        Rule("1", UPat.var("x") + 0, UPat.var("x"))])
    assert graph_rewrite((x() - x()) + (x("y") * 1.0), PatternMatcher([
        *m.rules, Rule("2", UPat.of(0) + UPat.var("x"), UPat.var("x"))])) is x("y")


def test_every_node_is_tried_once() -> None:
    seen: list[UOp] = []

    class Watch:
        def rewrite(self, node: UOp, ctx: Any = None) -> UOp | None:
            seen.append(node)
            return None
    shared = x() * 2.0
    root = (shared + shared) * (shared + 1.0)
    assert graph_rewrite(root, Watch()) is root
    assert len(seen) == len(set(seen)) == len(root.toposort())


def test_top_down_sees_the_node_before_its_sources() -> None:
    m = PatternMatcher([Rule("outer", UPat.var("x") * 2, lambda x: x),
                        Rule("inner", UPat.var("x") + 1, lambda x: x * 2)])
    # bottom-up first makes (x * 2) * 2 and then x; top-down drops the outer product first: (x + 1) -> x * 2
    # -> x
    assert graph_rewrite((x() + 1.0) * 2.0, m) is x()
    assert graph_rewrite((x() + 1.0) * 2.0, m, top_down=True) is x()
    order: list[str] = []

    class Watch:
        def rewrite(self, node: UOp, ctx: Any = None) -> UOp | None:
            order.append(node.op.name)
            return None
    graph_rewrite(x() * 2.0, Watch(), top_down=True)
    assert order == ["MUL", "CAST", "VAR", "CONST"]
    order.clear()
    graph_rewrite(x() * 2.0, Watch())
    assert order == ["VAR", "CAST", "CONST", "MUL"]


def test_rules_that_loop_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "LIMIT", 2_000)
    swap = PatternMatcher([Rule("swap", UPat(Ops.SUB, src=(UPat.var("a"), UPat.var("b"))), lambda a,
                                b: b - a)])
    grow = PatternMatcher([Rule("grow", UPat(Ops.NEG, name="u"), lambda u: -u)])
    for top_down in (False, True):
        with pytest.raises(IRError, match="loop"):
            graph_rewrite(x("a") - x("b"), swap, top_down=top_down)
        with pytest.raises(IRError, match="loop"):
            graph_rewrite(-x(), grow, top_down=top_down)


def test_fifty_thousand_deep() -> None:
    deep = x()
    for _ in range(50_000):
        deep = deep * 1.0
    deep = deep + 0.5
    assert graph_rewrite(deep, PatternMatcher([mul_one])) is x() + 0.5
    assert graph_rewrite(deep, PatternMatcher([mul_one]), top_down=True) is x() + 0.5
    assert len(deep.key) == 16 and deep.ranges == frozenset() and deep.bounds[0] < 0
    assert len(deep.toposort()) == 50_000 + 5
    assert deep.substitute({x(): x("y")}) is not deep
    assert pickle.loads(pickle.dumps(deep)) is deep


def test_rebuild_visits_each_node_once_sources_first() -> None:
    deep = x()
    for _ in range(20_000):
        deep = deep + deep
    seen: list[UOp] = []

    def change(old: UOp, new: UOp) -> UOp:
        assert set(old.src) <= set(seen[-2:]) or not old.src
        seen.append(old)
        return x("y") if old is x() else new

    result = rebuild(deep, change)
    assert len(seen) == len(deep.toposort()) == len(set(seen))
    assert result is deep.substitute({x(): x("y")})


def test_rebuild_keeps_what_is_known_and_what_does_not_change() -> None:
    a, b = x("a"), x("b")
    root = (a * b) + (a * 2.0)
    assert rebuild(root, lambda old, new: new) is root
    visited: list[UOp] = []

    def note(old: UOp, new: UOp) -> UOp:
        visited.append(old)
        return new

    assert rebuild(root, note, {a: b, a * b: f32(3.0)}) is f32(3.0) + b * 2.0
    assert a not in visited and b not in visited and a * b not in visited
    assert rebuild(a, note, {a: b}) is b
    visited.clear()
    kept = rebuild(root, lambda old, new: note(old, b if old is a else new), keep=lambda u: u.op is Ops.MUL)
    assert kept is root and visited == [root]
    assert rebuild(root, note, {a * b: a}, lambda u: u is a * 2.0) is a + a * 2.0


def test_costs_are_accounted() -> None:
    engine.costs.pop("a step", None)
    with pytest.raises(ZeroDivisionError), engine.timed("a step"):
        raise ZeroDivisionError  # what fails has cost time too
    with Context(STATS=1), engine.timed("a step", x() + 1.0):
        pass
    cost = engine.costs["a step"]
    assert cost.calls == 2 and cost.seconds >= 0 and cost.nodes == len((x() + 1.0).toposort())
    assert "a step" in engine.statistics()


def test_passes_are_timed_checked_and_observed() -> None:
    seen: list[str] = []
    engine.observers.append(lambda step, before, after: seen.append(step.name))
    try:
        step = rule_pass("drop ones", PatternMatcher([mul_one]), "kernel")
        broken = Pass("breaks", lambda root, ctx: UOp(Ops.ADD, dtypes.float32, (f32(1.0), UOp.index(1))),
                      "kernel", "kernel")
        assert run_passes(x() * 1.0, [step]) is x()
        assert engine.costs["drop ones"].calls >= 1 and seen == ["drop ones"]
        with pytest.raises(IRError, match="after breaks"):  # SPEC=1 in the tests
            run_passes(x(), [broken])
    finally:
        engine.observers.pop()


# ---- nodes -------------------------------------------------------------------------------------------------


def test_equal_nodes_are_one_object() -> None:
    assert x() * 2.0 is x() * 2.0
    assert UOp.index(1) is not UOp.const(1, dtypes.int32)
    assert f32(0.0) is not f32(-0.0) and f32(float("nan")) is f32(-float("nan"))
    assert UOp(Ops.CONST, dtypes.index, (), 1) is not UOp(Ops.CONST, dtypes.index, (), True)


def test_nodes_die_with_their_last_user() -> None:
    gc.collect()
    before = len(nodes._interned)
    root = x("a node to be forgotten") * 123.25 + 77.5
    alive = weakref.ref(root)
    assert len(nodes._interned) > before
    del root
    gc.collect()
    assert alive() is None and len(nodes._interned) <= before


def test_a_deep_graph_is_destroyed_without_recursion() -> None:
    # in a process of its own: an overflow of the C stack would end it
    code = ("from whit.uop import *\n"
            "u = UOp.variable('x', 0, 3)\n"
            "for i in range(100_000): u = UOp(Ops.ADD, dtypes.index, (u, UOp.index(i % 7)))\n"
            "u.vmax; u.ranges\n"
            "del u\n"
            "from whit.uop.uop import _interned\n"
            "assert len(_interned) < 50, len(_interned)\n")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_keys_do_not_depend_on_the_process() -> None:
    code = ("from whit.uop import *\n"
            "i = UOp.range(16, uid=3)\n"
            "print(((i * 8).lt(5).where(1.5, UOp.const(float('nan'), dtypes.float32))).key.hex())")
    digests = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                              env={"PYTHONHASHSEED": seed}).stdout for seed in ("1", "2")}
    i = UOp.range(16, uid=3)
    assert digests == {(i * 8).lt(5).where(1.5, f32(float("nan"))).key.hex() + "\n"}


def test_threads_agree_on_the_object() -> None:
    made: list[list[UOp]] = [[] for _ in range(4)]
    start = threading.Barrier(4)

    def work(out: list[UOp]) -> None:
        start.wait()
        for n in range(3000):
            out.append(UOp(Ops.ADD, dtypes.index, (UOp.variable("t", 0, n), UOp.index(n + 5000))))
    threads = [threading.Thread(target=work, args=(out,)) for out in made]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for row in zip(*made, strict=True):
        assert len({id(u) for u in row}) == 1
