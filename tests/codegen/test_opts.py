"""Opts: each primitive, its refusals, and that no legal list of opts changes what a kernel computes."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codegen.opts_kernels import (
    AVX512,
    GROUPS,
    KERNELS,
    SCALAR,
    SSE,
    buffers_for,
    conv_input_gradient,
    elementwise,
    evaluate,
    fold,
    folds,
    full_sum,
    loops,
    matmul,
    outputs,
    param,
    read,
    row_sum,
    softmax,
    store,
    two_stores,
)
from whit.codegen.opts import (
    AxisTable,
    KernelArg,
    Opt,
    OptError,
    OptKind,
    apply,
    axes,
    parse_opts,
    tile_limit,
)
from whit.helpers import WhitError
from whit.uop import AxisType, Ops, UOp, dtypes


def optimised(ast: UOp, text: str, target=AVX512) -> UOp:
    return apply(ast, parse_opts(text), target)


def shown(ast: UOp) -> str:
    return ", ".join(map(repr, axes(ast)))


def same(ast: UOp, changed: UOp, seed: int = 0) -> None:
    """Both kernels write the same values (up to the order of additions)."""
    given_buffers = buffers_for(ast, seed)
    for want, got in zip(outputs(ast, given_buffers), outputs(changed, given_buffers)):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


# ---- the kernels of the tests compute what they say ------------------------------------------------------


def test_evaluator_matmul():
    ast = matmul(4, 7, 6, right=True)
    c, a, b = buffers_for(ast)
    evaluate(ast, [c, a, b])
    np.testing.assert_allclose(c.reshape(4, 7), a.reshape(4, 6) @ b.reshape(7, 6).T, rtol=1e-5, atol=1e-6)


def test_evaluator_sum_in_pieces():
    ast = matmul(4, 7, 6)
    same(ast, optimised(ast, "ACCUMULATE axis 2 by 3, UPCAST axis 0 by 2"))


def test_evaluator_softmax():
    ast = softmax(4, 6)
    y, x = buffers_for(ast)
    evaluate(ast, [y, x])
    e = np.exp(x.reshape(4, 6) - x.reshape(4, 6).max(1, keepdims=True))
    np.testing.assert_allclose(y.reshape(4, 6), e / e.sum(1, keepdims=True), rtol=1e-4)


def test_evaluator_convolution_gradient():
    torch = pytest.importorskip("torch")
    ast = conv_input_gradient(1, 2, 2, 4, 5, 2, 3)
    dx, dy, w = buffers_for(ast)
    evaluate(ast, [dx, dy, w])
    want = torch.nn.functional.conv_transpose2d(
        torch.tensor(dy.reshape(1, 2, 3, 3)), torch.tensor(w.reshape(2, 2, 2, 3))
    )
    np.testing.assert_allclose(dx, want.numpy().reshape(-1), rtol=1e-4, atol=1e-5)


# ---- text ------------------------------------------------------------------------------------------------


def test_text_reads_back():
    opts = (
        Opt(OptKind.UPCAST, 1, 8),
        Opt(OptKind.SWAP, 0, 1),
        Opt(OptKind.PADTO, 2, 16),
        Opt(OptKind.THREAD, 0),
    )
    assert (
        ", ".join(map(repr, opts))
        == "UPCAST axis 1 by 8, SWAP axis 0 with 1, PADTO axis 2 to 16, THREAD axis 0 by 0"
    )
    assert parse_opts(", ".join(map(repr, opts))) == opts
    assert parse_opts("") == ()


@pytest.mark.parametrize(
    "text",
    [
        "UPCAST",
        "UPCAST axis 1",
        "UPCAST axis x by 2",
        "UPCAST axis 1 by -2",
        "FLY axis 1 by 2",
        "SWAP axis 0 by 1",
        "UPCAST axis 1 by 8 8",
    ],
)
def test_text_that_is_no_opt(text):
    with pytest.raises(OptError, match="KIND axis NUMBER"):
        parse_opts(text)


# ---- numbering and names ---------------------------------------------------------------------------------


def test_axes_are_listed_in_nesting_order():
    assert shown(matmul(6, 8, 5)) == "LOOP 0 (6), LOOP 1 (8), REDUCE 2 (5)"
    assert shown(softmax(4, 6)) == "LOOP 0 (4), LOOP 1 (6), REDUCE 2 (6), REDUCE 3 (6)"


def test_a_split_leaves_the_number_with_the_part_that_keeps_its_type():
    r = optimised(matmul(512, 512, 512), "UPCAST axis 0 by 4, UPCAST axis 1 by 64, THREAD axis 0 by 16")
    assert shown(r) == "THREAD 5 (16), LOOP 0 (8), LOOP 1 (8), REDUCE 2 (512), UPCAST 3 (4), UPCAST 4 (64)"
    assert r.arg.name == "r_t16_8_8_r512_u4_u64"
    assert r.arg.opts == parse_opts("UPCAST axis 0 by 4, UPCAST axis 1 by 64, THREAD axis 0 by 16")


def test_amount_zero_is_the_whole_axis_and_keeps_its_number():
    r = optimised(matmul(4, 8, 5), "UPCAST axis 1 by 0, UNROLL axis 2 by 0, THREAD axis 0 by 0")
    assert shown(r) == "THREAD 0 (4), UPCAST 1 (8), UNROLL 2 (5)"


def test_no_opts_gives_the_same_kernel_with_a_name():
    ast = elementwise(3, 5)
    r = apply(ast, (), AVX512)
    assert r.arg == KernelArg("e_3_5", ()) and r.src == ast.src


def test_swap_exchanges_places():
    r = optimised(matmul(6, 8, 5), "SWAP axis 0 with 1")
    assert shown(r) == "LOOP 0 (8), LOOP 1 (6), REDUCE 2 (5)"
    assert [u.src[0].arg for u in r.src[0].src[1:]] == [8, 6]
    same(matmul(6, 8, 5), r)


def test_split_makes_the_innermost_loop():
    r = optimised(matmul(6, 8, 5), "SPLIT axis 0 by 2")
    assert shown(r) == "LOOP 0 (3), LOOP 1 (8), LOOP 3 (2), REDUCE 2 (5)"


def test_merge_of_contiguous_axes_leaves_no_division():
    ast = elementwise(3, 4, 5)
    r = optimised(ast, "MERGE axis 1 with 2, MERGE axis 0 with 1")
    assert shown(r) == "LOOP 0 (60)"
    assert not any(u.op in (Ops.FLOORDIV, Ops.FLOORMOD) for u in r.toposort())
    same(ast, r)


def test_equal_kernels_stay_one_object():
    text = "UPCAST axis 0 by 2, UNROLL axis 2 by 5"
    assert optimised(matmul(6, 8, 5), text) is optimised(matmul(6, 8, 5), text)


# ---- masks -----------------------------------------------------------------------------------------------


def test_padding_masks_reads_and_stores():
    ast = elementwise(13)
    r = optimised(ast, "PADTO axis 0 to 8, UPCAST axis 0 by 8")
    reads = [u for u in r.toposort() if u.op is Ops.INDEX]
    stores = [u for u in r.toposort() if u.op is Ops.STORE]
    assert all(len(u.src) == 3 for u in reads) and all(len(u.src) == 4 for u in stores)
    same(ast, r)


def test_padding_a_size_that_fits_adds_nothing():
    assert not any(
        u.op is Ops.CMPLT
        for u in optimised(elementwise(16), "PADTO axis 0 to 8, UPCAST axis 0 by 8").toposort()
    )


def test_padded_sum_of_products_needs_no_where_but_a_shifted_one_does():
    product = optimised(matmul(4, 4, 5), "PADTO axis 2 to 4, UNROLL axis 2 by 4")
    assert not any(u.op is Ops.WHERE for u in product.toposort())
    shifted = optimised(row_sum(4, 5), "PADTO axis 1 to 4, UNROLL axis 1 by 4")
    assert any(u.op is Ops.WHERE for u in shifted.toposort())
    same(matmul(4, 4, 5), product)
    same(row_sum(4, 5), shifted)


def test_padded_factor_that_could_be_infinite_is_masked():
    """x * y where only x is read along the padded axis: 0 * inf would be NaN."""
    (i,) = loops(2)
    (k,) = folds(1, 3)
    x, y = param(1, 6), param(2, 2)
    ast = UOp.sink(store(param(0, 2), i, fold(Ops.ADD, read(x, i * 3 + k) * read(y, i), k), i))
    buffers = [np.zeros(2, np.float32), np.ones(6, np.float32), np.array([np.inf, 1], np.float32)]
    evaluate(optimised(ast, "PADTO axis 1 to 4, UNROLL axis 1 by 4"), buffers)
    assert buffers[0].tolist() == [np.inf, 3.0]


@pytest.mark.parametrize("op", [Ops.MAX, Ops.MIN, Ops.MUL, Ops.ADD])
def test_padded_reductions_fold_the_identity(op):
    ast = row_sum(3, 5, op)
    same(ast, optimised(ast, "PADTO axis 1 to 4, UNROLL axis 1 by 4"))


def test_a_mask_that_varies_over_the_tile_becomes_a_choice():
    """A running sum: x[k] is read once for all outputs of the tile, and chosen per output where k <= i."""
    (i,) = loops(8)
    (k,) = folds(1, 8)
    x = param(1, 8)
    ast = UOp.sink(store(param(0, 8), i, fold(Ops.ADD, read(x, k, k.le(i)), k), i))
    r = optimised(ast, "UPCAST axis 0 by 8")
    assert all(len(u.src) == 2 for u in r.toposort() if u.op is Ops.INDEX)
    assert any(u.op is Ops.WHERE for u in r.toposort())
    same(ast, r)
    outside = UOp.sink(store(param(0, 8), i, fold(Ops.ADD, read(x, k * 2, k.lt(4) & k.le(i)), k), i))
    r = optimised(outside, "UPCAST axis 0 by 8")  # the mask also keeps the read inside of the buffer
    assert all(len(u.src) == 3 for u in r.toposort() if u.op is Ops.INDEX)
    same(outside, r)


# ---- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kernel, text, target, why",
    [
        ("matmul", "UPCAST axis 2 by 5", AVX512, "is a REDUCE and UPCAST takes a LOOP"),
        ("matmul", "UNROLL axis 0 by 2", AVX512, "is a LOOP and UNROLL takes a REDUCE"),
        ("matmul", "UPCAST axis 0 by 4", AVX512, "4 does not divide the size 6"),
        ("matmul", "UPCAST axis 9 by 2", AVX512, "has no axis 9"),
        ("matmul", "LOCAL axis 0 by 2", AVX512, "has no work-groups"),
        ("matmul", "GROUP axis 2 by 5", AVX512, "has no work-groups"),
        ("matmul", "THREAD axis 1 by 2", AVX512, "not the outermost LOOP"),
        ("matmul", "THREAD axis 2 by 5", AVX512, "is a REDUCE and THREAD takes a LOOP"),
        ("matmul", "THREAD axis 0 by 2", SCALAR, "one task at a time"),
        ("matmul", "THREAD axis 0 by 2, THREAD axis 0 by 3", AVX512, "has a THREAD axis already"),
        ("matmul", "SWAP axis 0 with 2", AVX512, "one is a LOOP, the other a REDUCE"),
        ("matmul", "SWAP axis 0 with 0", AVX512, "no other axis 0"),
        ("softmax", "MERGE axis 2 with 3", AVX512, "not loops around the same"),
        ("matmul", "PADTO axis 0 to 0", AVX512, "at least 1"),
        ("matmul", "PADTO axis 0 to 4096", AVX512, "mostly waste"),
        ("matmul", "UPCAST axis 0 by 2, PADTO axis 3 to 3", AVX512, "is a UPCAST"),
        (
            "matmul",
            "LOCAL axis 1 by 8, LOCAL axis 0 by 6, GROUP axis 2 by 5",
            GROUPS,
            "exceeds the target's 64",
        ),
    ],
)
def test_illegal_opts_say_why(kernel, text, target, why):
    with pytest.raises(OptError, match=why) as error:
        optimised(KERNELS[kernel](), text, target)
    assert (
        isinstance(error.value, WhitError) and error.value.asked and error.value.because and error.value.fix
    )


def test_tile_limit():
    limit = tile_limit(AVX512)
    with pytest.raises(OptError, match="register tile"):
        optimised(elementwise(limit * 2), f"UPCAST axis 0 by {limit * 2}")
    optimised(elementwise(limit * 2), f"UPCAST axis 0 by {limit}")
    with pytest.raises(OptError, match="register tile"):
        optimised(full_sum(limit * 16), f"UNROLL axis 0 by {limit * 16}")


def test_unrolled_reductions_next_to_each_other_do_not_add_up():
    n = tile_limit(AVX512)
    optimised(softmax(2, n), f"UNROLL axis 2 by {n}, UNROLL axis 3 by {n}")


def test_symbolic_sizes_cannot_be_split():
    (i,) = loops(UOp.variable("n", 1, 64))
    p, q = param(0, 64), param(1, 64)
    ast = UOp.sink(store(p, i, read(q, i), i))
    for text in ("UPCAST axis 0 by 4", "THREAD axis 0 by 0", "PADTO axis 0 to 4"):
        with pytest.raises(OptError, match="symbolic"):
            optimised(ast, text)
    assert apply(ast, (), AVX512).arg.name == "e_n"


def test_threads_only_around_all_stores():
    (i,) = loops(4)
    j = UOp.range(4, AxisType.LOOP, 1)
    x = param(2, 4)
    ast = UOp.sink(store(param(0, 4), i, read(x, i), i), store(param(1, 4), j, read(x, j), j))
    with pytest.raises(OptError, match="not every store"):
        optimised(ast, "THREAD axis 0 by 0")


def test_a_refused_opt_leaves_the_table_as_it_was():
    table = AxisTable.of(matmul(6, 8, 5), AVX512)
    table.apply(Opt(OptKind.UPCAST, 0, 2))
    before = table.build()
    for kind in OptKind:
        with pytest.raises(OptError):
            table.apply(Opt(kind, 0, 1000))
    assert table.build() is before


def test_an_optimised_kernel_takes_no_more_opts():
    with pytest.raises(OptError, match="optimised already"):
        optimised(optimised(matmul(6, 8, 5), "UPCAST axis 0 by 2"), "UPCAST axis 1 by 2")


# ---- nothing changes the values --------------------------------------------------------------------------


def test_two_stores_and_a_shared_sum():
    ast = two_stores(4, 6)
    r = optimised(ast, "PADTO axis 1 to 4, UPCAST axis 1 by 4, UNROLL axis 2 by 3, THREAD axis 0 by 2")
    assert len(r.src) == 2
    same(ast, r)


raw_opts = st.lists(
    st.tuples(
        st.sampled_from(list(OptKind)), st.integers(0, 11), st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8, 16])
    ),
    max_size=8,
)


@settings(max_examples=250, deadline=None)
@given(
    kernel=st.sampled_from(sorted(KERNELS)),
    raw=raw_opts,
    target=st.sampled_from([AVX512, SSE, GROUPS]),
    seed=st.integers(0, 99),
)
def test_random_legal_opts_keep_the_values(kernel, raw, target, seed):
    ast = KERNELS[kernel]()
    table = AxisTable.of(ast, target)
    for kind, axis, amount in raw:
        present = sorted(table.axes)
        if not present:
            break
        number = present[axis % len(present)]
        other = present[amount % len(present)] if kind in (OptKind.SWAP, OptKind.MERGE) else amount
        opt = Opt(kind, number, other)
        try:
            table.apply(opt)
        except OptError:
            continue
    result = table.build()
    assert apply(ast, parse_opts(", ".join(map(repr, table.opts))), target) is result
    uids = [u.arg.uid for u in result.toposort() if u.op is Ops.RANGE]
    assert len(uids) == len(set(uids))
    if np.prod([a.size for a in axes(result)], dtype=float) < 2e6:
        same(ast, result, seed)


def test_masked_vector_of_an_axis_used_as_a_value():
    ast = KERNELS["arange"]()
    r = optimised(ast, "PADTO axis 0 to 4, UPCAST axis 0 by 4, PADTO axis 1 to 4, UNROLL axis 1 by 4")
    buffers = buffers_for(ast)
    evaluate(r, buffers)
    assert buffers[0].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert dtypes.float32 is ast.src[0].src[0].src[2].dtype


def test_speed_of_a_large_kernel():
    """A kernel of about 500 nodes is rewritten in milliseconds (a generous bound, the machine is shared)."""
    i, j = loops(64, 64)
    value = read(param(1, 4096), i * 64 + j)
    for n in range(80):
        value = value * 1.5 + read(param(1, 4096), j * 64 + (i + n) % 64)
    ast = UOp.sink(store(param(0, 4096), i * 64 + j, value, i, j))
    assert len(ast.toposort()) > 400
    best = 1.0
    for _ in range(3):
        start = time.perf_counter()
        optimised(ast, "UPCAST axis 1 by 16, UPCAST axis 0 by 4, THREAD axis 0 by 4")
        best = min(best, time.perf_counter() - start)
    assert best < 0.1
