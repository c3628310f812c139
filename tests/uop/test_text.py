"""Text form: print, parse, the same object; nothing but IRError from hostile text."""
from __future__ import annotations

import dataclasses
import enum
import math
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from whit.helpers import IRError, ShapeError
from whit.uop import AxisType, DType, Op, Ops, UOp, dtypes
from whit.uop.args import BufferArg, LocalArg, ParamArg, RangeArg, ReduceArg, SpecialArg, StageArg, VarArg
from whit.uop.ops import REDUCTIONS, all_ops
from whit.uop.text import arg_class, parse, show


@arg_class()
class Colour(enum.Enum):
    RED = "r"
    BLUE = "b"


@arg_class(Ops.CALL)
@dataclasses.dataclass(frozen=True)
class Recipe:
    """An argument class as rooms below add them."""

    name: str
    colour: Colour
    steps: tuple[Any, ...] = ()
    weight: float = 0.0


def same(u: UOp) -> None:
    text = show(u)
    assert parse(text) is u, text
    assert show(parse(text)) == text


def test_the_readable_form() -> None:
    i, k = UOp.range(16, uid=0), UOp.range(8, AxisType.REDUCE, uid=1)
    out = UOp(Ops.PARAM, dtypes.float32, (), ParamArg(0, 16))
    x = UOp(Ops.PARAM, dtypes.float32, (), ParamArg(1, 128))
    value = (UOp(Ops.INDEX, dtypes.float32, (x, i * 8 + k)) * 1.5).cast(dtypes.float64) + 2.0
    total = value.reduce_ranges(Ops.ADD, k).cast(dtypes.float32)
    kernel = UOp.sink(UOp(Ops.STORE, dtypes.void, (out, i, total)).end(i))
    assert show(kernel) == """\
%0 = param float32; slot=0 size=16
%1 = range index 16; uid=0 axis=LOOP
%2 = param float32; slot=1 size=128
%3 = mul index %1 8
%4 = range index 8; uid=1 axis=REDUCE
%5 = add index %3 %4
%6 = index float32 %2 %5
%7 = mul float32 %6 1.5
%8 = cast float64 %7
%9 = add float64 %8 2.0:float64
%10 = reduce float64 %9 %4; op=add axes=()
%11 = cast float32 %10
%12 = store %0 %1 %11
%13 = end %12 %1
%14 = sink %13"""
    same(kernel)


def test_a_program_is_indented_inside_its_loops() -> None:
    memory = UOp(Ops.PARAM, dtypes.int32, (), ParamArg(0, 8))
    loop = UOp.range(8, uid=0)
    test = loop.lt(3)
    branch = UOp(Ops.IF, dtypes.void, (test,))
    store = UOp(Ops.STORE, dtypes.void, (memory, loop, UOp.const(1, dtypes.int32)))
    barrier = UOp(Ops.BARRIER)
    program = UOp(Ops.LINEAR, dtypes.void, (
        memory, barrier, loop, test, branch, store, UOp(Ops.ENDIF, dtypes.void, (branch,)), barrier,
        UOp(Ops.END, dtypes.void, (loop,)), UOp.const(1, dtypes.int32)))
    assert show(program) == """\
%0 = linear {
  %1 = param int32; slot=0 size=8
  %2 = barrier
  %3 = range index 8; uid=0 axis=LOOP
    %4 = cmplt bool %3 3
    %5 = if %4
      %6 = store %1 %3 1:int32
    %7 = endif %5
    %2
  %8 = end %3
  1:int32
}"""
    same(program)


def test_a_program_in_an_impossible_order_still_prints() -> None:
    loop = UOp.range(8, uid=0)
    same(UOp(Ops.LINEAR, dtypes.void, (loop * 2, loop)))
    same(UOp(Ops.LINEAR, dtypes.void, (loop,), (loop + 1,)))
    same(UOp(Ops.LINEAR, dtypes.void, (), Recipe("x", Colour.RED)))
    same(UOp(Ops.LINEAR))
    same(UOp.sink(UOp(Ops.LINEAR, dtypes.void, (loop, loop))))


@pytest.mark.parametrize("dtype",
                         [*dtypes.all, dtypes.index, dtypes.float32.vec(4), dtypes.bool.vec(8),
                          dtypes.int8.vec(3)])
def test_constants_of_every_dtype(dtype: DType) -> None:
    values: list[Any] = [0, 1] if not dtype.is_float \
        else [0.0, -0.0, 1.5, math.inf, -math.inf, math.nan, 5e-324]
    if dtype.is_int:
        values += [dtype.scalar.min, dtype.scalar.max, -1]
    for value in values:
        u = UOp.const(value, dtype)
        same(u)
        same(UOp.sink(u))
        if dtype.count > 1:
            same(UOp.sink(UOp.const((value,) * dtype.count, dtype)))
    assert parse("%0 = sink 1") is UOp.sink(UOp.index(1))
    assert parse("%0 = sink 1.0 true") is UOp.sink(UOp.const(1.0, dtypes.float32),
                                                   UOp.const(True, dtypes.bool))


def test_zeros_of_both_signs_and_types_stay_apart() -> None:
    kinds = [UOp(Ops.CONST, dtypes.float32, (), v) for v in (0.0, -0.0, 0, False)]
    assert len(set(kinds)) == 4
    same(UOp.sink(*kinds))


@pytest.mark.parametrize("text",
                         ['"', "\\", "a\nb", "# no comment", "%0 = x; {", "\x00", "ü… 漢", "\ud800", "", " "])
def test_unusual_names(text: str) -> None:
    same(UOp.variable(text, 0, 3) + 1)
    same(UOp.new_buffer(3, dtypes.int8, text))
    same(UOp(Ops.CALL, dtypes.void, (), Recipe(text, Colour.BLUE, (text, (1, -2.5)), math.inf)))


def test_arguments_of_every_class() -> None:
    n = UOp.variable("n", 1, 9)
    for op, dtype, arg in [
            (Ops.BUFFER, dtypes.bfloat16, BufferArg(3, 7, "CPU")), (Ops.PARAM, dtypes.uint64, ParamArg(0, 1)),
            (Ops.SPECIAL, dtypes.index, SpecialArg("gidx0", 4)),
                           (Ops.LOCAL, dtypes.int8, LocalArg(1, 64, True)),
            (Ops.VAR, dtypes.index, VarArg("k", -3, 5)), (Ops.IOTA, dtypes.int32, n * 2),
                           (Ops.IOTA, dtypes.int32, 5)]:
        same(UOp(op, dtype, (), arg))
    x = UOp.new_buffer(6, dtypes.float32, "CPU")
    for axis in AxisType:
        same(UOp(Ops.RANGE, dtypes.index, (n,), RangeArg(4, axis)))
    for space in ("global", "local", "register"):
        same(UOp(Ops.STAGE, dtypes.float32, (x, UOp.range(n, uid=1)), StageArg(space, 2)))
    for op in REDUCTIONS:
        same(UOp(Ops.REDUCE, dtypes.float32, (x,), ReduceArg(op, (0,))))
    v = UOp.const(1.0, dtypes.float32.vec(4))
    same(UOp(Ops.FOLD, dtypes.float32, (v,), Ops.MAX))
    same(UOp(Ops.SHUFFLE, dtypes.float32.vec(2), (v,), (3, 0)))
    same(UOp.sink(UOp(Ops.COPY, dtypes.float32, (x,), "PYTHON")))
    same(UOp(Ops.SINK,
             arg=(None, True, dtypes.float16, Ops.WHERE, AxisType.LOCAL, Colour.RED, n, UOp.index(3), ())))


def test_symbolic_shapes_inside_arguments() -> None:
    n = UOp.variable("n", 1, 9)
    x = UOp.new_buffer(6, dtypes.float32, "CPU").reshape((1, 6)).expand((n, 6))
    same(x.pad(((n, 1), (0, n * 2 + 1))).shrink(((0, n), (1, UOp.index(4)))).reshape((n * 3,)))


def test_opts_print_and_parse() -> None:
    from whit.codegen.opts import KernelArg, Opt, OptKind
    kernel = UOp(Ops.SINK, arg=KernelArg("matmul", (Opt(OptKind.UPCAST, 0, 4), Opt(OptKind.SWAP, 1, 2))))
    same(kernel)
    assert show(kernel) == ('%0 = sink; name="matmul" opts=(Opt(kind=UPCAST, axis=0, amount=4), '
                            'Opt(kind=SWAP, axis=1, amount=2))')


# ---- random graphs -----------------------------------------------------------------------------------------


def random_arg(rng: random.Random, nodes: list[UOp], depth: int = 0) -> Any:
    kind = rng.randrange(12 if depth < 3 else 8)
    if kind == 0:
        return None
    if kind == 1:
        return rng.choice([True, False, 0, -7, 1 << 70, 1.5, -0.0, math.inf])
    if kind == 2:
        return "".join(rng.choice("ab\"\\\n#%;é\U0001f600 ") for _ in range(rng.randrange(6)))
    if kind == 3 and nodes:
        return rng.choice(nodes)
    if kind == 4:
        return rng.choice(all_ops())
    if kind == 5:
        return rng.choice([*dtypes.all, dtypes.index]).vec(rng.choice([1, 2, 8]))
    if kind == 6:
        return rng.choice([*AxisType, *Colour])
    if kind == 7:
        return Recipe("r", rng.choice(list(Colour)), (random_arg(rng, nodes, depth + 1),), rng.random())
    return tuple(random_arg(rng, nodes, depth + 1) for _ in range(rng.randrange(4)))


FREE_OPS = [op for op in all_ops()
            if op.category in ("sink", "loop", "linear", "memory", "binary", "unary", "ternary", "cast")]


def random_graph(seed: int) -> UOp:
    """Any ops on any nodes: the text form must not care whether the graph means something."""
    rng = random.Random(seed)
    nodes: list[UOp] = [UOp.const(rng.choice([0, 1, -5]), dtypes.index)]
    kinds = [*dtypes.all, dtypes.index, dtypes.void]
    for _ in range(rng.randrange(1, 25)):
        op: Op = rng.choice(FREE_OPS)
        dtype = rng.choice(kinds).vec(rng.choice([1, 1, 1, 4]))
        src = tuple(rng.choice(nodes) for _ in range(rng.randrange(4) if op.arity is None else op.arity))
        if rng.random() < 0.3:
            value = rng.choice([0.5, -0.0, math.nan, math.inf]) if dtype.is_float else rng.choice([0, 1, 100])
            nodes.append(UOp(Ops.CONST, dtype, (), value if rng.random() < 0.7 else (value,) * dtype.count))
            continue
        try:
            nodes.append(UOp(op, dtype, src, random_arg(rng, nodes)))
        except (ShapeError, TypeError, AttributeError, IndexError, ValueError):  # shapes that do not fit
            continue
    return UOp(rng.choice([Ops.SINK, Ops.LINEAR]), dtypes.void, tuple(nodes[-rng.randrange(1, 8):]))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 40))
def test_round_trip_of_random_graphs(seed: int) -> None:
    same(random_graph(seed))


SAMPLES = [show(random_graph(seed)) for seed in range(20)]


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(SAMPLES), st.data())
def test_mutated_text_gives_a_graph_or_an_ir_error(text: str, data: st.DataObject) -> None:
    pieces = st.one_of(st.sampled_from(["(", ")", "{", "}", "%0", "=", ";", ",", ":", '"', "#", "\n", "nan",
                                        "-", "9" * 5000, "1e999",
                                        "linear {", "reduce", "permute", "float32x0", "int8x99999999999",
                                        "axis=", "const(", "²",
                                        "Recipe(", "dtypes.", "AxisType.", "\\ud800", "%9 = sink\n"]),
                       st.text(max_size=4))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        stop = min(len(text), start + data.draw(st.integers(0, 6)))
        text = text[:start] + data.draw(pieces) + text[stop:]
    try:
        result = parse(text)
    except IRError as error:
        assert "\n" not in error.asked and len(str(error)) < 2000
    else:
        assert show(result)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_any_text_gives_an_ir_error(text: str) -> None:
    with pytest.raises(IRError):
        parse(text)


@pytest.mark.parametrize("text, at, expected", [
    ("", "no node", "at least one line"),
    ("%0 = foo", "no op 'foo'", "python -m whit.uop"),
    ("%0 = sink\n%1 = neg float32 %7", "line 2", "an earlier line defines"),
    ("%0 = sink\n%0 = sink", "line 2", "no earlier line"),
    ("%0 = neg float32 1.0 2.0", "2 operands", "1"),
    ("%0 = neg float33 1.0", "no dtype 'float33'", "float32"),
    ('%0 = var index; name="x" min=1', "VarArg cannot be made", "name, min, max"),
    ('%0 = var index; name="x" size=1', "takes no 'size'", "name, min, max"),
    ("%0 = range index 3; uid=0 axis=SIDEWAYS", "no 'SIDEWAYS'", "LOOP"),
    ("%0 = linear {", "not closed", "}"),
    ("%0 = sink; " + "(" * 60, "too deep", "50"),
    ("%0 = sink 1.0 2.0)", "')' stands here", "%0"),
    ("%0 = sink (1.0, 2.0)", "needs a dtype", "float32x2"),
    ("%0 = sink; 1 2", "follows", "the end of the line"),
    ("%0 = sink; opaque(\"object\")", "means nothing", "classes known"),
    ("%0 = permute float32 1.0; (1,)", "permute", "each once"),
    ("}", "stands here", "%name"),
])
def test_errors_say_where_what_and_what_was_expected(text: str, at: str, expected: str) -> None:
    with pytest.raises(IRError) as caught:
        parse(text)
    message = str(caught.value)
    assert at in message and expected in message, message
    assert not text or "line" in message


def test_comments_blank_lines_and_crlf_are_read_over() -> None:
    text = '# why\n\n%a = var index; name="n # x" min=0 max=3  # trailing\r\n%b = add index %a 1\n'
    assert parse(text) is UOp.variable("n # x", 0, 3) + 1


def test_deep_graphs_print_and_parse() -> None:
    x = UOp.variable("n", 0, 3)
    for step in range(20_000):
        x = UOp(Ops.ADD, dtypes.index, (x, UOp.index(step)))
    same(x)
