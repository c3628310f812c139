"""Each level accepts what docs/contracts.md says and names the node and the rule for what it does not."""
from __future__ import annotations

import pytest

from whit.helpers import IRError
from whit.uop import AxisType, Ops, ParamArg, ReduceArg, UOp, dtypes
from whit.uop.spec import LEVELS, verify
from whit.uop.text import parse


def kernel(name: str) -> UOp:
    return parse(GOOD[name][1])


GOOD = {
    "row sums": ("kernel", """
        %0 = param float32; slot=0 size=4
        %1 = range index 4; uid=0 axis=LOOP
        %2 = param float32; slot=1 size=24
        %3 = mul index %1 6
        %4 = range index 6; uid=1 axis=REDUCE
        %5 = add index %3 %4
        %6 = cmplt bool %4 5
        %7 = index float32 %2 %5 %6
        %8 = reduce float32 %7 %4; op=add axes=()
        %9 = store %0 %1 %8
        %10 = end %9 %1
        %11 = sink %10"""),
    "a scalar": ("kernel", """
        %0 = param int8; slot=0 size=1
        %1 = store %0 0 7:int8
        %2 = sink %1"""),
    "a tile": ("tiled", """
        %0 = param float32; slot=0 size=8
        %1 = range index 8; uid=0 axis=UPCAST
        %2 = range index 4; uid=1 axis=UNROLL
        %3 = cast float32 %2
        %4 = reduce float32 %3 %2; op=max axes=()
        %5 = store %0 %1 %4
        %6 = end %5 %1
        %7 = sink %6"""),
    "a program": ("linear", """
        %0 = linear {
          %1 = param float32; slot=0 size=8
          %2 = reg float32 0.0; 0
          %3 = range index 2; uid=0 axis=LOOP
            %4 = mul index %3 4
            %5 = load float32x4 %1 %4 (true, true, false, true):boolx4
            %6 = fold float32 %5; add
            %7 = add float32 %2 %6
            %8 = set %2 %7
          %9 = end %3
          %10 = broadcast float32x4 %2
          %11 = store %1 0 %10
        }"""),
    "a tensor": ("tensor", """
        %0 = buffer float32; uid=0 size=6 device="CPU"
        %1 = reshape float32 %0; (2, 3)
        %2 = permute float32 %1; (1, 0)
        %3 = pad float32 %2; ((1, 0), (0, 1))
        %4 = reduce float32 %3; op=add axes=(1,)
        %5 = iota int32; 4
        %6 = take float32 %4 %5; 0
        %7 = cmplt bool %6 0.0
        %8 = where float32 %7 0.0 %6
        %9 = shrink float32 %0; ((0, 4),)
        %10 = store %9 %8
        %11 = after float32 %0 %10
        %12 = copy float32 %11; "PYTHON"
        %13 = sink %12"""),
}


@pytest.mark.parametrize("name", list(GOOD))
def test_good_graphs_pass(name: str) -> None:
    level, text = GOOD[name]
    verify(parse(text), level)


BAD = [
    ("kernel", "%0 = buffer float32; uid=0 size=1 device=\"CPU\"", "has no BUFFER"),
    ("tensor", "%0 = range index 4; uid=0 axis=LOOP", "has no RANGE"),
    ("tensor", "%0 = add float32 1.0 1:int32", "operands of one dtype"),
    ("tensor", "%0 = add float16 1.0 2.0", "operands of one dtype"),
    ("tensor", "%0 = and float32 1.0 2.0", "that the op takes"),
    ("tensor", "%0 = sqrt int32 1:int32", "that the op takes"),
    ("tensor", "%0 = cmplt float32 1.0 2.0", "comparisons give bool"),
    ("tensor", "%0 = where float32 1.0 2.0 3.0", "WHERE is"),
    ("tensor", "%0 = const uint8; 256", "a value of its dtype"),
    ("tensor", "%0 = const float32; 0.1", "a value of its dtype"),
    ("tensor", "%0 = const float32; 1", "a value of its dtype"),
    ("tensor", "%0 = neg bool true", "that the op takes"),
    ("tensor", "%0 = bitcast int64 1.0", "same width"),
    ("tensor", "%0 = iota float32; 4", "an int dtype"),
    ("tensor", "%0 = buffer int8; uid=0 size=6 device=\"CPU\"\n%1 = reduce int8 %0; op=add axes=(0, 0)",
     "ReduceArg"),
    ("tensor", "%0 = buffer int8; uid=0 size=6 device=\"CPU\"\n%1 = reduce int8 %0; op=sub axes=(0,)",
     "ReduceArg"),
    ("tensor", "%0 = buffer int8; uid=0 size=6 device=\"CPU\"\n%1 = store %0 1:int8", "one shape"),
    ("tensor", "%0 = iota int8; 4\n%1 = store %0 %0", "view of a BUFFER"),
    ("tensor", "%0 = buffer int8; uid=0 size=6 device=\"CPU\"\n%1 = take int8 %0 %0; 1", "an axis of x"),
    ("tensor", "%0 = var index; name=\"n\" min=3 max=2", "min <= max"),
    ("kernel", "%0 = range index 4; uid=0 axis=UPCAST", "axis LOOP or REDUCE"),
    ("kernel", "%0 = param int8; slot=0 size=1\n%1 = index int16 %0 0", "of the memory's dtype"),
    ("kernel", "%0 = param int8; slot=0 size=1\n%1 = index int8 %0 0 1", "(memory, index[, bool])"),
    ("kernel", "%0 = param int8; slot=0 size=1\n%1 = store %0 0 1:int16", "value of its dtype"),
    ("kernel", "%0 = add float32x2 1.0:float32x2 1.0:float32x2", "a scalar"),
    ("kernel",
     "%0 = range index 4; uid=0 axis=LOOP\n%1 = cast int8 %0\n%2 = reduce int8 %1 %0; op=add axes=()",
     "reducing axis type"),
    ("kernel",
     "%0 = param int8; slot=0 size=4\n%1 = range index 4; uid=0 axis=LOOP\n"
     "%2 = store %0 %1 1:int8\n%3 = sink %2",
     "this loop is not closed"),
    ("kernel",
     "%0 = param int8; slot=0 size=9\n%1 = range index 4; uid=0 axis=LOOP\n"
     "%2 = range index 5; uid=0 axis=LOOP\n"
     "%3 = add index %1 %2\n%4 = store %0 %3 1:int8\n%5 = end %4 %1 %2\n%6 = sink %5", "another RANGE is"),
    ("linear", "%0 = linear {\n%1 = range index 4; uid=0 axis=LOOP\n}", "never closed"),
    ("linear", "%1 = range index 4; uid=0 axis=LOOP\n%2 = mul index %1 2\n%3 = linear %2 %1",
     "before it appears"),
    ("linear",
     "%0 = linear {\n%1 = range index 4; uid=0 axis=LOOP\n%2 = mul index %1 2\n"
     "%3 = end %1\n%4 = add index %2 1\n}",
     "after its loop has ended"),
    ("linear",
     "%0 = linear {\n%1 = range index 4; uid=0 axis=LOOP\n%2 = range index 4; uid=1 axis=LOOP\n%3 = end %1\n"
     "%4 = end %2\n}", "opened last"),
    ("linear", "%0 = linear {\n%1 = param float32; slot=0 size=8\n%2 = load float32x4 %1 0 true\n}",
     "mask the value's"),
    ("linear", "%0 = linear {\n%1 = add float32x4 1.0:float32x4 1.0\n}", "operands of one dtype"),
    ("linear", "%0 = linear {\n%1 = shuffle float32x2 1.0:float32x4; (0, 4)\n}", "lanes of src[0]"),
    ("linear", "%0 = linear {\n%1 = end 1\n}", "(RANGE)"),
]


@pytest.mark.parametrize("level, text, says", BAD)
def test_bad_graphs_name_the_node_and_the_rule(level: str, text: str, says: str) -> None:
    with pytest.raises(IRError) as caught:
        verify(parse(text), level, "in a test")
    message = str(caught.value)
    assert says in message and f"level {level}, in a test" in message and "%" in message, message


def test_bounds_of_a_bind() -> None:
    n = UOp.variable("n", 1, 4)
    verify(n.bind(4), "tensor")
    with pytest.raises(IRError, match="within the bounds"):
        verify(UOp(Ops.BIND, dtypes.index, (n, UOp.index(5))), "tensor")


def test_unknown_levels_are_refused() -> None:
    with pytest.raises(IRError, match="no such level"):
        verify(UOp.index(1), "assembler")
    assert set(LEVELS) >= {"tensor", "ranged", "kernel", "tiled", "linear"}


def test_arguments_of_any_kind_only_fail_the_check() -> None:
    for op in (Ops.PARAM, Ops.CONST, Ops.VAR):
        for arg in (None, "text", (1, "a"), 3.5, ReduceArg(Ops.ADD)):
            if op is Ops.PARAM:
                continue  # its shape rule asks for a ParamArg at once
            with pytest.raises(IRError):
                verify(UOp(op, dtypes.int8, (), arg), "tensor")
    value = UOp(Ops.INDEX, dtypes.int8, (UOp(Ops.PARAM, dtypes.int8, (), ParamArg(0, 4)), UOp.index(0)))
    with pytest.raises(IRError):
        verify(UOp(Ops.REDUCE, dtypes.int8, (value, UOp.range(3, AxisType.REDUCE, uid=0)),
                   ReduceArg(Ops.ADD, (0,))), "kernel")
