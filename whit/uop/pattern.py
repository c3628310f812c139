"""Rewrite rules as data: patterns with named variables, compiled to Python code that dispatches on the op.

A rule is an equation between two patterns, with a guard when it holds only sometimes:

>>> @rule
... def mul_one(x: UPat) -> RuleSpec:
...     '''x * 1 -> x. Exact for every float.'''
...     return x * 1, x
>>> from whit.uop import UOp, dtypes
>>> v = UOp.variable("v", 0, 9)
>>> PatternMatcher([mul_one]).rewrite(UOp(Ops.MUL, dtypes.index, (v, UOp.index(1)))) is v
True

or a pattern and a function that returns the replacement, or None when the rule does not apply.
"""
from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from whit.uop.dtype import DType, PyConst
from whit.uop.ops import COMPARE, Op, Ops
from whit.uop.uop import UOp, alu

Right: TypeAlias = "UPat | PyConst | Callable[..., UOp | None]"
RuleSpec: TypeAlias = "tuple[UPat, Right] | tuple[UPat, Right, Callable[..., bool]]"
_ANY: Any = object()


@dataclass(frozen=True, eq=False)
class UPat:
    """A pattern. None in a field accepts anything; `src` a tuple matches position by position (both orders
    when the op is commutative), a single UPat matches every source; `name` captures the node, and a name used
    twice must capture the same."""

    op: Op | tuple[Op, ...] | frozenset[Op] | None = None
    dtype: DType | tuple[DType, ...] | None = None
    src: tuple[UPat, ...] | UPat | None = None
    arg: Any = field(default_factory=lambda: _ANY)
    name: str | None = None

    @staticmethod
    def var(name: str, dtype: DType | tuple[DType, ...] | None = None) -> UPat:
        """Any node, captured."""
        return UPat(name=name, dtype=dtype)

    @staticmethod
    def cvar(name: str, dtype: DType | tuple[DType, ...] | None = None) -> UPat:
        """Any scalar constant, captured."""
        return UPat(Ops.CONST, dtype, name=name)

    @staticmethod
    def of(value: UPat | PyConst) -> UPat:
        """A pattern, or the constant with exactly this value (0.0 is not -0.0)."""
        return value if isinstance(value, UPat) else UPat(Ops.CONST, arg=value)

    def named(self, name: str) -> UPat:
        return UPat(self.op, self.dtype, self.src, self.arg, name)

    def alu(self, op: Op, *others: UPat | PyConst) -> UPat:
        return UPat(op, src=(self, *[UPat.of(o) for o in others]))

    def cast(self, dtype: DType | None = None) -> UPat:
        return UPat(Ops.CAST, dtype, (self,))

    def where(self, yes: UPat | PyConst, no: UPat | PyConst) -> UPat:
        return self.alu(Ops.WHERE, yes, no)

    def __add__(self, o: UPat | PyConst) -> UPat: return self.alu(Ops.ADD, o)
    def __radd__(self, o: PyConst) -> UPat: return UPat.of(o).alu(Ops.ADD, self)
    def __sub__(self, o: UPat | PyConst) -> UPat: return self.alu(Ops.SUB, o)
    def __rsub__(self, o: PyConst) -> UPat: return UPat.of(o).alu(Ops.SUB, self)
    def __mul__(self, o: UPat | PyConst) -> UPat: return self.alu(Ops.MUL, o)
    def __rmul__(self, o: PyConst) -> UPat: return UPat.of(o).alu(Ops.MUL, self)
    def __neg__(self) -> UPat: return self.alu(Ops.NEG)
    def __truediv__(self, o: UPat | PyConst) -> UPat: return self.alu(Ops.FDIV, o)
    def __floordiv__(self, o: UPat | PyConst) -> UPat: return self.alu(Ops.FLOORDIV, o)
    def __mod__(self, o: UPat | PyConst) -> UPat: return self.alu(Ops.FLOORMOD, o)
    def __and__(self, o: UPat | PyConst) -> UPat: return self.alu(Ops.AND, o)
    def __or__(self, o: UPat | PyConst) -> UPat: return self.alu(Ops.OR, o)
    def __xor__(self, o: UPat | PyConst) -> UPat: return self.alu(Ops.XOR, o)
    def __lshift__(self, o: UPat | PyConst) -> UPat: return self.alu(Ops.SHL, o)
    def __rshift__(self, o: UPat | PyConst) -> UPat: return self.alu(Ops.SHR, o)
    def lt(self, o: UPat | PyConst) -> UPat: return self.alu(Ops.CMPLT, o)
    def le(self, o: UPat | PyConst) -> UPat: return self.alu(Ops.CMPLE, o)
    def equal(self, o: UPat | PyConst) -> UPat: return self.alu(Ops.CMPEQ, o)
    def not_equal(self, o: UPat | PyConst) -> UPat: return self.alu(Ops.CMPNE, o)
    def maximum(self, o: UPat | PyConst) -> UPat: return self.alu(Ops.MAX, o)
    def minimum(self, o: UPat | PyConst) -> UPat: return self.alu(Ops.MIN, o)

    @property
    def matches_all(self) -> bool:
        """Whether it tests and captures nothing."""
        return (self.name is None and self.op is None and self.dtype is None and self.src is None
                and self.arg is _ANY)

    @property
    def ops(self) -> tuple[Op, ...] | None:
        return None if self.op is None else (self.op,) if isinstance(self.op, Op) else tuple(self.op)


@dataclass(frozen=True, eq=False)
class Rule:
    """left -> right. `right` is a pattern (an equation), or a function of the captured nodes (and `ctx`, if
    it names it)."""

    name: str
    left: UPat
    right: UPat | Callable[..., UOp | None]
    guard: Callable[..., bool] | None = None
    doc: str = ""


def rule(function: Callable[..., RuleSpec]) -> Rule:
    """Turn a function of pattern variables into a Rule. A parameter defaulted with a DType (or a tuple of
    them) only matches those; a parameter whose name starts with `c_` only matches constants."""
    names = _parameters(function)
    defaults = function.__defaults__ or ()
    wanted = dict(zip(names[len(names) - len(defaults):], defaults, strict=True))
    variables = {name: (UPat.cvar if name.startswith("c_")
                        else UPat.var)(name, wanted.get(name)) for name in names}
    left, right, *guard = function(**variables)
    made = right if isinstance(right, UPat) or callable(right) else UPat.of(right)
    return Rule(function.__name__, left, made, guard[0] if guard else None, (function.__doc__ or "").strip())


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """The parameters' names of a plain function (the inspect module would cost a rule set its import
    time)."""
    code = function.__code__
    return tuple(code.co_varnames[:code.co_argcount + code.co_kwonlyargcount])


# ---- compilation -------------------------------------------------------------------------------------------

Matcher: TypeAlias = Callable[[UOp, Any], "UOp | None"]


def same_const(arg: Any, value: PyConst) -> bool:
    """Equal as numbers, and of the same sign when zero."""
    return bool(arg == value) and (arg != 0 or math.copysign(1.0, arg) == math.copysign(1.0, value))


class _Code:
    """Straight-line matching code: each failed test returns None."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, str] = {}  # captured name -> local variable
        self.env: dict[str, Any] = {"UOp": UOp, "alu": alu, "same_const": same_const}
        self.counter = itertools.count()

    def bring(self, value: Any) -> str:
        name = f"k{next(self.counter)}"
        self.env[name] = value
        return name

    def require(self, condition: str) -> None:
        self.lines.append(f"if not ({condition}): return None")

    def match(self, pattern: UPat, node: str, check_op: bool = True, root: bool = False) -> None:
        if pattern.name is not None:
            if pattern.name in self.names:
                self.require(f"{node} is {self.names[pattern.name]}")
                return
            self.names[pattern.name] = node
        ops = pattern.ops
        if ops is not None and check_op:
            self.require(f"{node}.op is {self.bring(ops[0])}" if len(ops) == 1
                         else f"{node}.op in {self.bring(frozenset(ops))}")
        if pattern.dtype is not None:
            wanted = pattern.dtype if isinstance(pattern.dtype, tuple) else (pattern.dtype,)
            self.require(f"{node}.dtype is {self.bring(wanted[0])}" if len(wanted) == 1
                         else f"{node}.dtype in {self.bring(frozenset(wanted))}")
        if pattern.arg is not _ANY:
            value = self.bring(pattern.arg)
            if ops == (Ops.CONST,) and isinstance(pattern.arg, (bool, int, float)):
                zero = f" and same_const({node}.arg, {value})" if pattern.arg == 0 else ""
                self.require(f"{node}.arg == {value}{zero}")
            else:
                self.require(f"{node}.arg == {value}")
        elif ops == (Ops.CONST,):
            self.require(f"not isinstance({node}.arg, tuple)")
        if isinstance(pattern.src, tuple):
            dispatched = root and len(pattern.src) <= 3  # the table has tested the count and the ops
            if not dispatched:
                self.require(f"len({node}.src) == {len(pattern.src)}")
            for position, sub in enumerate(pattern.src):
                if sub.matches_all:
                    continue
                local = f"s{next(self.counter)}"
                self.lines.append(f"{local} = {node}.src[{position}]")
                self.match(sub, local, check_op=not dispatched)
        elif pattern.src is not None:
            ops_all = pattern.src.ops
            assert ops_all is not None and pattern.src.src is None, "a repeated source may only test the op"
            self.require(f"all(s.op in {self.bring(frozenset(ops_all))} for s in {node}.src)")

    def build(self, pattern: UPat, like: str) -> str:
        """An expression that makes the right-hand side; constants take the dtype of `like`."""
        if pattern.name is not None and pattern.name in self.names:
            return self.names[pattern.name]
        assert isinstance(pattern.op,
                          Op), f"the right-hand side names {pattern.name!r}, which the left does not capture"
        if pattern.op is Ops.CONST:
            return f"UOp.const({self.bring(pattern.arg)}, {like}.dtype)"
        assert isinstance(pattern.src, tuple)
        if pattern.op is Ops.CAST:
            return f"({self.build(pattern.src[0], like)}).cast({self.bring(pattern.dtype)})"
        operands = list(pattern.src)
        first = [p for p in operands[pattern.op is Ops.WHERE:] if p.op is not Ops.CONST or p.name is not None]
        inner = like if pattern.op not in COMPARE or not first else f"({self.build(first[0], like)})"
        return f"alu({self.bring(pattern.op)}, {', '.join(self.build(p, inner) for p in operands)})"


def _orders(pattern: UPat) -> list[UPat]:
    """All fixed-order variants of a pattern with commutative ops inside."""
    if not isinstance(pattern.src, tuple):
        return [pattern]
    sources = [list(variant) for variant in itertools.product(*[_orders(s) for s in pattern.src])]
    op = pattern.op
    if isinstance(op, Op) and op.commutative and len(pattern.src) == 2:
        sources += [variant[::-1] for variant in sources]
    return [UPat(pattern.op, pattern.dtype, tuple(s), pattern.arg, pattern.name) for s in sources]


def _compile(item: Rule, left: UPat) -> Matcher:
    code = _Code()
    code.match(left, "u", check_op=False, root=True)

    def call(function: Callable[..., Any], name: str) -> str:
        code.env[name] = function
        given = {n: ("ctx" if n == "ctx" else code.names.get(n)) for n in _parameters(function)}
        missing = [n for n, local in given.items() if local is None]
        assert not missing, f"rule {item.name}: {name} wants {missing}, which the pattern does not capture"
        return f"{name}({', '.join(f'{n}={local}' for n, local in given.items())})"

    if item.guard is not None:
        code.require(call(item.guard, "guard"))
    result = code.build(item.right, "u") if isinstance(item.right, UPat) else call(item.right, "function")
    body = "\n    ".join([*code.lines, f"return {result}"])
    scope = dict(code.env)
    exec(compile(f"def matcher(u, ctx):\n    {body}", f"<rule {item.name}>", "exec"), scope)
    matcher: Matcher = scope["matcher"]
    return matcher


@dataclass
class RuleStats:
    """What a rule did while STATS=1."""

    tried: int = 0
    fired: int = 0
    seconds: float = 0.0


rule_stats: dict[str, RuleStats] = {}


class PatternMatcher:
    """An ordered list of rules; the first that fires wins.

    A node is looked up by its op and the ops of its sources (up to three), so that a node which no rule can
    match costs one dictionary lookup; the rules of a key are compiled when the first such node comes by.
    """

    def __init__(self, rules: Iterable[Rule | tuple[UPat, Callable[..., UOp | None]]]) -> None:
        self.rules: list[Rule] = [item if isinstance(item, Rule)
                                  else Rule(getattr(item[1], "__name__", "rule"), item[0],
                                            item[1]) for item in rules]
        self._table: dict[Any, list[tuple[str, Matcher]]] = {}
        self._compiled: dict[int, list[tuple[UPat, Matcher]]] = {}

    def __add__(self, other: PatternMatcher) -> PatternMatcher:
        return PatternMatcher([*self.rules, *other.rules])

    def _candidates(self, node: UOp, key: Any) -> list[tuple[str, Matcher]]:
        """The compiled rules that can match a node of this key, in order."""
        found: list[tuple[str, Matcher]] = []
        ops = [source.op for source in node.src]
        for number, item in enumerate(self.rules):
            if item.left.ops is None or node.op in item.left.ops:
                variants = self._compiled.get(number)
                if variants is None:
                    variants = self._compiled[number] = [(v, _compile(item, v)) for v in _orders(item.left)]
                found += [(item.name, matcher) for variant, matcher in variants if _may_match(variant, ops)]
        self._table[key] = found
        return found

    def rewrite(self, node: UOp, ctx: Any = None) -> UOp | None:
        """The replacement by the first rule that fires and changes something, else None."""
        src = node.src
        count = len(src)
        key: Any
        if count == 2:
            key = (node.op, src[0].op, src[1].op)
        elif count == 1:
            key = (node.op, src[0].op)
        elif count == 3:
            key = (node.op, src[0].op, src[1].op, src[2].op)
        else:
            key = (node.op, count)
        matchers = self._table.get(key)
        if matchers is None:
            matchers = self._candidates(node, key)
        for _, matcher in matchers:
            result = matcher(node, ctx)
            if result is not None and result is not node:
                return result
        return None

    def rewrite_counted(self, node: UOp, ctx: Any = None) -> UOp | None:
        """As `rewrite`, and accounts each rule's tries, fires and time in `rule_stats`."""
        ops = [source.op for source in node.src]
        key = (node.op, *ops) if len(ops) in (1, 2, 3) else (node.op, len(ops))
        for name, matcher in self._table.get(key) or self._candidates(node, key):
            stats = rule_stats.setdefault(name, RuleStats())
            start = time.perf_counter()
            result = matcher(node, ctx)
            stats.seconds += time.perf_counter() - start
            stats.tried += 1
            if result is not None and result is not node:
                stats.fired += 1
                return result
        return None


def _may_match(pattern: UPat, ops: list[Op]) -> bool:
    """Whether the ops of a node's sources (when there are at most three) allow the pattern."""
    if pattern.src is None:
        return True
    if isinstance(pattern.src, UPat):
        wanted = pattern.src.ops
        return wanted is None or all(op in wanted for op in ops)
    if len(pattern.src) != len(ops):
        return False
    return len(ops) > 3 or all(s.ops is None or op in s.ops for s, op in zip(pattern.src, ops, strict=True))
