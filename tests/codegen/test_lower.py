"""What each lowering pass does, as text before and after; estimates; the door `generate`."""

from __future__ import annotations

import pytest

from whit.codegen import Target, generate
from whit.codegen.estimate import estimate
from whit.codegen.lower import (
    bind_specials,
    drop_unit_ranges,
    group_reduces,
    hoist_factors,
    nest_stores,
    prepare,
    separate_loops,
    share_loops,
)
from whit.codegen.masks import simplify_masks
from whit.codegen.opts import OptError, parse_opts
from whit.helpers import Context
from whit.uop import AxisType, Ops, UOp, dtypes
from whit.uop.ops import all_ops
from whit.uop.text import parse, show

TARGET = Target("test", "python", vector_bytes=32, threads=4, native=frozenset(all_ops()))


def becomes(result: UOp, after: str) -> None:
    """The result is the graph that `after` spells."""
    wanted = parse(after)
    assert result is wanted, f"got\n{show(result)}\nwanted\n{show(wanted)}"


def test_drop_unit_ranges() -> None:
    """A loop of one turn is no loop: 0 stands for its counter, and what it closed is closed no more."""
    before = parse("""
        %0 = param float32; slot=0 size=8
        %1 = range index 1; uid=0 axis=LOOP
        %2 = range index 8; uid=1 axis=LOOP
        %3 = mul index %1 8
        %4 = add index %3 %2
        %5 = param float32; slot=1 size=8
        %6 = range index 1; uid=2 axis=REDUCE
        %7 = add index %4 %6
        %8 = index float32 %5 %7
        %9 = reduce float32 %8 %6; op=add axes=()
        %10 = store %0 %4 %9
        %11 = end %10 %1 %2
        %12 = sink %11
    """)
    becomes(
        drop_unit_ranges(before),
        """
        %0 = param float32; slot=0 size=8
        %1 = range index 8; uid=1 axis=LOOP
        %2 = param float32; slot=1 size=8
        %3 = index float32 %2 %1
        %4 = store %0 %1 %3
        %5 = end %4 %1
        %6 = sink %5
    """,
    )


PADDED = """
    %0 = param float32; slot=0 size=8
    %1 = range index 8; uid=0 axis=LOOP
    %2 = param float32; slot=1 size=30
    %3 = range index 3; uid=1 axis=REDUCE
    %4 = mul index %3 -1
    %5 = add index %1 %4
    %6 = cmplt bool %5 6
    %7 = mul index %5 5
    %8 = range index 5; uid=2 axis=REDUCE
    %9 = add index %7 %8
    %10 = add index %9 10
    %11 = index float32 %2 %10 %6
    %12 = param float32; slot=2 size=15
    %13 = mul index %3 5
    %14 = add index %13 %8
    %15 = index float32 %12 %14 %6
    %16 = mul float32 %11 %15
    %17 = reduce float32 %16 %8; op=add axes=()
    %18 = where float32 %6 %17 0.0
    %19 = reduce float32 %18 %3; op=add axes=()
    %20 = store %0 %1 %19
    %21 = end %20 %1
    %22 = sink %21
"""


def test_masks_that_another_implies_go_and_sums_of_sums_are_one() -> None:
    """The gradient of a padded window: the mask stays on the factor that would leave its buffer."""
    becomes(
        simplify_masks(parse(PADDED)),
        """
        %0 = param float32; slot=0 size=8
        %1 = range index 8; uid=0 axis=LOOP
        %2 = param float32; slot=1 size=30
        %3 = range index 3; uid=1 axis=REDUCE
        %4 = mul index %3 -1
        %5 = add index %1 %4
        %6 = cmplt bool %5 6
        %7 = mul index %5 5
        %8 = range index 5; uid=2 axis=REDUCE
        %9 = add index %7 %8
        %10 = add index %9 10
        %11 = index float32 %2 %10 %6
        %12 = param float32; slot=2 size=15
        %13 = mul index %3 5
        %14 = add index %13 %8
        %15 = index float32 %12 %14
        %16 = mul float32 %11 %15
        %17 = reduce float32 %16 %3 %8; op=add axes=()
        %18 = store %0 %1 %17
        %19 = end %18 %1
        %20 = sink %19
    """,
    )


def test_a_mask_that_guards_a_buffer_stays() -> None:
    """Both factors would leave their buffers: both keep their masks."""
    small = parse(PADDED.replace("slot=2 size=15", "slot=2 size=14"))
    reads = [u for u in simplify_masks(small).toposort() if u.op is Ops.INDEX]
    assert [len(r.src) for r in reads] == [3, 3]


def test_a_choice_with_another_value_stays() -> None:
    other = parse(PADDED.replace("where float32 %6 %17 0.0", "where float32 %6 %17 1.0"))
    assert any(u.op is Ops.WHERE for u in simplify_masks(other).toposort())


def test_hoist_factors() -> None:
    """sum_k x[i, k] * s[i] -> s[i] * sum_k x[i, k]"""
    before = parse("""
        %0 = param float32; slot=0 size=4
        %1 = range index 4; uid=0 axis=LOOP
        %2 = param float32; slot=1 size=32
        %3 = mul index %1 8
        %4 = range index 8; uid=1 axis=REDUCE
        %5 = add index %3 %4
        %6 = index float32 %2 %5
        %7 = param float32; slot=2 size=4
        %8 = index float32 %7 %1
        %9 = mul float32 %6 %8
        %10 = reduce float32 %9 %4; op=add axes=()
        %11 = store %0 %1 %10
        %12 = end %11 %1
        %13 = sink %12
    """)
    becomes(
        hoist_factors(before),
        """
        %0 = param float32; slot=0 size=4
        %1 = range index 4; uid=0 axis=LOOP
        %2 = param float32; slot=1 size=32
        %3 = mul index %1 8
        %4 = range index 8; uid=1 axis=REDUCE
        %5 = add index %3 %4
        %6 = index float32 %2 %5
        %7 = reduce float32 %6 %4; op=add axes=()
        %8 = param float32; slot=2 size=4
        %9 = index float32 %8 %1
        %10 = mul float32 %7 %9
        %11 = store %0 %1 %10
        %12 = end %11 %1
        %13 = sink %12
    """,
    )


def test_integer_and_maximum_reductions_keep_their_factors() -> None:
    i, k = UOp.range(4, uid=0), UOp.range(8, AxisType.REDUCE, 1)
    x, s = (parse(f"%0 = param int32; slot={n} size=32") for n in range(2))
    product = UOp(Ops.INDEX, dtypes.int32, (x, i * 8 + k)) * UOp(Ops.INDEX, dtypes.int32, (s, i))
    for op in (Ops.ADD, Ops.MAX):
        kernel = UOp.sink(UOp(Ops.STORE, dtypes.void, (s, i, product.reduce_ranges(op, k))).end(i))
        assert hoist_factors(kernel) is kernel


TWO_SUMS = """
    %0 = param float32; slot=0 size=4
    %1 = range index 4; uid=0 axis=LOOP
    %2 = param float32; slot=1 size=32
    %3 = mul index %1 8
    %4 = range index 8; uid=1 axis=REDUCE
    %5 = add index %3 %4
    %6 = index float32 %2 %5
    %7 = reduce float32 %6 %4; op=add axes=()
    %8 = range index {size}; uid=2 axis=REDUCE
    %9 = add index %3 %8
    %10 = index float32 %2 %9
    %11 = mul float32 %10 %10
    %12 = reduce float32 %11 %8; op=add axes=()
    %13 = sub float32 %12 %7
    %14 = store %0 %1 %13
    %15 = end %14 %1
    %16 = sink %15
"""


def test_share_loops() -> None:
    """Two sums over one buffer run in one loop."""
    becomes(
        share_loops(parse(TWO_SUMS.format(size=8))),
        """
        %0 = param float32; slot=0 size=4
        %1 = range index 4; uid=0 axis=LOOP
        %2 = param float32; slot=1 size=32
        %3 = mul index %1 8
        %4 = range index 8; uid=1 axis=REDUCE
        %5 = add index %3 %4
        %6 = index float32 %2 %5
        %7 = mul float32 %6 %6
        %8 = reduce float32 %7 %4; op=add axes=()
        %9 = reduce float32 %6 %4; op=add axes=()
        %10 = sub float32 %8 %9
        %11 = store %0 %1 %10
        %12 = end %11 %1
        %13 = sink %12
    """,
    )


def test_loops_of_other_sizes_or_buffers_are_not_shared() -> None:
    for text in (
        TWO_SUMS.format(size=7),
        TWO_SUMS.format(size=8).replace("%10 = index float32 %2", "%10 = index float32 %0"),
    ):
        kernel = parse(text)
        assert share_loops(kernel) is kernel


def test_separate_loops() -> None:
    """A sum that needs another sum over the same RANGE gets a RANGE of its own; the inner one keeps its."""
    i, k = UOp.range(4, uid=0), UOp.range(8, AxisType.REDUCE, 1)
    out, x = (parse(f"%0 = param float32; slot={n} size=32") for n in range(2))
    element = UOp(Ops.INDEX, dtypes.float32, (x, i * 8 + k))
    mean = element.reduce_ranges(Ops.ADD, k)
    spread = (element - mean).maximum(0.0).reduce_ranges(Ops.ADD, k)
    result = separate_loops(UOp.sink(UOp(Ops.STORE, dtypes.void, (out, i, spread)).end(i)))
    outer, inner = sorted(
        [u for u in result.toposort() if u.op is Ops.REDUCE], key=lambda u: -u.src[1].arg.uid
    )
    assert inner is mean
    assert outer.src[1].arg.uid == 2
    assert len(outer.src[0].ranges) == 2 and k not in outer.src[0].ranges


def test_group_reduces_and_specials() -> None:
    """A row is summed by 4 work-items: parts in scratch memory, then one of them stores the total."""
    i, g, k = (
        UOp.range(n, axis, uid)
        for uid, (n, axis) in enumerate(
            [(8, AxisType.GLOBAL), (4, AxisType.GROUP_REDUCE), (16, AxisType.REDUCE)]
        )
    )
    out, x = (parse(f"%0 = param float32; slot={n} size={m}") for n, m in enumerate((8, 512)))
    total = UOp(Ops.INDEX, dtypes.float32, (x, i * 64 + k * 4 + g)).reduce_ranges(Ops.ADD, g, k)
    kernel = UOp.sink(UOp(Ops.STORE, dtypes.void, (out, i, total)).end(i))
    becomes(
        bind_specials(group_reduces(kernel)),
        """
        %0 = param float32; slot=0 size=8
        %1 = special index; name="gidx0" size=8
        %2 = local float32; uid=0 size=4 shared=true
        %3 = special index; name="lidx0" size=4
        %4 = param float32; slot=1 size=512
        %5 = mul index %1 64
        %6 = range index 16; uid=2 axis=REDUCE
        %7 = mul index %6 4
        %8 = add index %5 %7
        %9 = add index %8 %3
        %10 = index float32 %4 %9
        %11 = reduce float32 %10 %6; op=add axes=()
        %12 = store %2 %3 %11
        %13 = after float32 %2 %12
        %14 = range index 4; uid=3 axis=REDUCE
        %15 = index float32 %13 %14
        %16 = reduce float32 %15 %14; op=add axes=()
        %17 = cmpeq bool %3 0
        %18 = store %0 %1 %16 %17
        %19 = sink %18
    """,
    )


def test_more_ranges_than_hardware_indices() -> None:
    """Five GLOBAL ranges: the last of three indices carries three of them."""
    loops = [UOp.range(n, AxisType.GLOBAL, uid) for uid, n in enumerate((2, 3, 4, 5, 6))]
    index = UOp.index(0)
    for r in loops:
        index = index * r.src[0].arg + r
    out = parse("%0 = param float32; slot=0 size=720")
    kernel = UOp.sink(UOp(Ops.STORE, dtypes.void, (out, index, UOp.const(1.0, dtypes.float32))).end(*loops))
    found = {u.arg.name: u.arg.size for u in bind_specials(kernel).toposort() if u.op is Ops.SPECIAL}
    assert found == {"gidx0": 2, "gidx1": 3, "gidx2": 120}


def test_nest_stores() -> None:
    """The second store wants the loops the other way round: it gets a RANGE of its own."""
    i, j = UOp.range(4, uid=0), UOp.range(8, uid=1)
    a, b = (parse(f"%0 = param float32; slot={n} size=32") for n in range(2))
    one = UOp.const(1.0, dtypes.float32)
    first = UOp(Ops.STORE, dtypes.void, (a, i * 8 + j, one)).end(i, j)
    second = UOp(Ops.STORE, dtypes.void, (b, i * 8 + j, one)).end(j, i)
    kernel = nest_stores(UOp.sink(first, second))
    assert kernel.src[0] is first
    assert [r.arg.uid for r in kernel.src[1].src[1:]] == [2, 3]
    assert nest_stores(UOp.sink(first, first)) is UOp.sink(first, first)


def matmul(m: int, n: int, k: int) -> UOp:
    i, j, q = UOp.range(m, uid=0), UOp.range(n, uid=1), UOp.range(k, AxisType.REDUCE, 2)
    sizes = (m * n, m * k, k * n)
    out, a, b = (parse(f"%0 = param float32; slot={slot} size={size}") for slot, size in enumerate(sizes))
    product = UOp(Ops.INDEX, dtypes.float32, (a, i * k + q)) * UOp(Ops.INDEX, dtypes.float32, (b, q * n + j))
    return UOp.sink(
        UOp(Ops.STORE, dtypes.void, (out, i * n + j, product.reduce_ranges(Ops.ADD, q))).end(i, j)
    )


def test_estimate() -> None:
    """A matmul: a multiplication and an addition per step; each matrix once."""
    assert estimate(matmul(8, 16, 32)) == (2 * 8 * 16 * 32, 4 * (8 * 16 + 8 * 32 + 32 * 16))
    n = UOp.variable("n", 1, 9)
    r = UOp.range(n, uid=0)
    p = parse("%0 = param float32; slot=0 size=9")
    flops, moved = estimate(
        UOp.sink(UOp(Ops.STORE, dtypes.void, (p, r, -UOp(Ops.INDEX, dtypes.float32, (p, r)))).end(r))
    )
    assert isinstance(flops, UOp) and isinstance(moved, UOp)
    assert flops.bounds == (1, 9) and moved.bounds[1] >= 36


def test_generate() -> None:
    kernel = matmul(64, 64, 64)
    chosen = generate(kernel, TARGET)
    assert chosen.linear.op is Ops.LINEAR and chosen.name.isidentifier() and chosen.opts
    assert generate(kernel, TARGET).linear is chosen.linear  # the same kernel gives the same program
    assert generate(kernel, TARGET, chosen.opts).linear is chosen.linear
    threads = generate(kernel, TARGET, parse_opts("THREAD axis 0 by 4"))
    assert (threads.tasks, threads.global_size, threads.local_size) == (4, (1, 1, 1), (1, 1, 1))
    with Context(NOOPT=1):
        assert generate(kernel, TARGET).opts == ()
    with pytest.raises(OptError):
        generate(kernel, TARGET, parse_opts("UPCAST axis 0 by 7"))


def test_prepare_is_stable() -> None:
    """Preparing a prepared kernel changes nothing."""
    for kernel in (matmul(8, 8, 8), parse(PADDED), parse(TWO_SUMS.format(size=8))):
        ready = prepare(kernel)
        assert prepare(ready) is ready


def test_choices_from_memory_stay_choices() -> None:
    """where(x > 0, x, 0) reads x once; where(i < 6, x, 0) is a masked read."""
    text = """
        %0 = param float32; slot=0 size=8
        %1 = range index 8; uid=0 axis=LOOP
        %2 = param float32; slot=1 size=8
        %3 = index float32 %2 %1
        %4 = cmplt bool {left} {right}
        %5 = where float32 %4 %3 0.0
        %6 = store %0 %1 %5
        %7 = end %6 %1
        %8 = sink %7
    """
    data = parse(text.format(left="0.0", right="%3"))
    assert simplify_masks(data) is data
    masked = simplify_masks(parse(text.format(left="%1", right="6"))).src[0].src[0].src[2]
    assert masked.op is Ops.INDEX and len(masked.src) == 3
