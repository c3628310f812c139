"""Heuristics: always legal, never wrong, and the decisions that speed rests on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codegen.opts_kernels import (
    AVX512,
    F32,
    GROUPS,
    KERNELS,
    SCALAR,
    SSE,
    buffers_for,
    column_sum,
    conv,
    conv_weight_gradient,
    elementwise,
    fold,
    folds,
    full_sum,
    gather,
    loops,
    matmul,
    outputs,
    param,
    read,
    row_sum,
    softmax,
    store,
    transpose,
)
from whit.codegen.heuristics import choose
from whit.codegen.opts import Opt, OptKind, apply, axes
from whit.codegen.pipeline import generate
from whit.helpers import Context
from whit.renderer import CPU_OPS
from whit.uop import AxisType, Ops, ParamArg, UOp, dtypes

TARGETS = [AVX512, SSE, SCALAR, GROUPS]


def sizes(ast: UOp, target=AVX512) -> dict[AxisType, list[int]]:
    """Sizes of the axes by type after the heuristics' opts."""
    found: dict[AxisType, list[int]] = {}
    opts = [opt for opt in choose(ast, target) if opt.kind is not OptKind.STAGE]  # which adds axes of its own
    for axis in axes(apply(ast, opts, target)):
        found.setdefault(axis.type, []).append(axis.size)
    return found


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.key)
@pytest.mark.parametrize("name", sorted(KERNELS))
def test_small_kernels_keep_their_values(name, target):
    ast = KERNELS[name]()
    given_buffers = buffers_for(ast)
    changed = apply(ast, choose(ast, target), target)
    for want, got in zip(outputs(ast, given_buffers), outputs(changed, given_buffers)):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


size = st.sampled_from([1, 2, 3, 5, 7, 8, 13, 16, 17, 24, 31, 32])


@settings(max_examples=60, deadline=None)
@given(m=size, n=size, k=size, left=st.booleans(), right=st.booleans(), target=st.sampled_from(TARGETS))
def test_matmul_of_any_size(m, n, k, left, right, target):
    ast = matmul(m, n, k, left, right)
    c, a, b = buffers_for(ast)
    got = outputs(apply(ast, choose(ast, target), target), [c, a, b])[0]
    x = a.reshape(k, m).T if left else a.reshape(m, k)
    y = b.reshape(n, k).T if right else b.reshape(k, n)
    np.testing.assert_allclose(got.reshape(m, n), x @ y, rtol=1e-4, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(m=size, n=size, target=st.sampled_from(TARGETS))
def test_softmax_of_any_size(m, n, target):
    ast = softmax(m, n)
    y, x = buffers_for(ast)
    got = outputs(apply(ast, choose(ast, target), target), [y, x])[0]
    e = np.exp(x.reshape(m, n).astype(np.float64))
    np.testing.assert_allclose(got.reshape(m, n), e / e.sum(1, keepdims=True), rtol=1e-3, atol=1e-6)


def test_the_choice_is_the_same_every_time():
    assert choose(matmul(512, 512, 512), AVX512) == choose(matmul(512, 512, 512), AVX512)


def test_noopt():
    with Context(NOOPT=1):
        assert choose(matmul(512, 512, 512), AVX512) == ()


def test_elementwise_becomes_one_axis_of_vectors():
    found = sizes(elementwise(64, 32, 128))
    assert (
        len(found[AxisType.LOOP]) == 1 and found[AxisType.UPCAST] == [64] and found[AxisType.THREAD][0] >= 2
    )


def test_prime_sizes_are_masked_vectors():
    ast = elementwise(1000003)
    found = sizes(ast)
    assert found[AxisType.UPCAST][0] % 16 == 0 and AxisType.THREAD in found
    assert sum(np.prod(found[t]) for t in found if t is AxisType.UPCAST) >= 16
    assert np.prod([s for v in found.values() for s in v]) < 1000003 * 1.01


def test_small_kernels_stay_on_one_thread():
    assert AxisType.THREAD not in sizes(elementwise(64, 64))
    assert AxisType.THREAD not in sizes(matmul(16, 16, 16))


def test_one_thread_means_no_thread_axis():
    assert all(o.kind is not OptKind.THREAD for o in choose(elementwise(4096, 4096), SCALAR))


def test_matmul_has_a_register_tile():
    found = sizes(matmul(512, 512, 512))
    rows, columns = sorted(found[AxisType.UPCAST])
    assert columns % 16 == 0 and rows >= 4
    assert 16 <= rows * columns // 16 <= AVX512.vector_registers - 2


def test_matmul_of_rows_turns_them_around_while_packing():
    ast = matmul(512, 512, 512, right=True)
    staged = [opt for opt in choose(ast, AVX512) if opt.kind is OptKind.STAGE]
    assert len(staged) == 1 and max(sizes(ast)[AxisType.UPCAST]) % 16 == 0


def test_rows_are_packed_where_the_sum_does_not_walk_along_them():
    ast = matmul(512, 512, 512, left=True)
    assert [opt.kind for opt in choose(ast, AVX512)].count(OptKind.STAGE) == 2


def test_rows_that_are_computed_are_packed():
    """Halves: each would be converted again for every panel."""
    (i, j), (k,) = loops(512, 512), folds(2, 512)
    size = 512 * 512
    a, b = (read(param(n, size, dtypes.float16), at) for n, at in ((1, i * 512 + k), (2, k * 512 + j)))
    value = fold(Ops.ADD, a.cast(dtypes.float32) * b.cast(dtypes.float32), k)
    ast = UOp.sink(store(param(0, size), i * 512 + j, value, i, j))
    assert [opt.kind for opt in choose(ast, AVX512)].count(OptKind.STAGE) == 2


@pytest.mark.parametrize("size", [509, 512, 1021, 1024])
def test_large_products_have_several_tasks_a_thread(size):
    threads = sizes(matmul(size, size, size))[AxisType.THREAD]
    assert threads[0] >= 2 * AVX512.threads


def test_long_sums_of_large_products_are_accumulated_in_pieces():
    kinds = [opt.kind for opt in choose(matmul(4096, 4096, 4096), AVX512)]
    assert OptKind.ACCUMULATE in kinds and OptKind.STAGE in kinds


def test_sums_have_several_accumulators():
    assert sizes(full_sum(1 << 20))[AxisType.UNROLL][0] >= 64
    assert sizes(row_sum(4096, 512))[AxisType.UNROLL][0] >= 64
    assert sizes(column_sum(4096, 512))[AxisType.UPCAST][0] % 16 == 0


def test_softmax_vectorises_all_three_passes():
    ast = softmax(4096, 512)
    found = sizes(ast)
    assert len(found[AxisType.UNROLL]) == 2 and all(n % 16 == 0 for n in found[AxisType.UNROLL])
    assert found[AxisType.UPCAST][0] % 16 == 0 and AxisType.THREAD in found


def test_convolution_vectorises_rows_of_pixels():
    ast = conv(128, 32, 32, 24, 24, 5, 5)
    made = apply(ast, choose(ast, AVX512), AVX512)
    upcast = [a.size for a in axes(made) if a.type is AxisType.UPCAST]
    assert max(upcast) % 16 == 0 and np.prod(sorted(upcast)[-2:]) // 16 >= 8


def test_weight_gradient_packs_what_it_multiplies_in_pieces_of_the_sum():
    ast = conv_weight_gradient(128, 32, 32, 24, 24, 5, 5)
    kinds = [opt.kind for opt in choose(ast, AVX512)]
    assert OptKind.STAGE in kinds and OptKind.ACCUMULATE in kinds
    assert max(sizes(ast)[AxisType.UPCAST]) % 16 == 0 and np.prod(sizes(ast)[AxisType.UPCAST]) >= 128


def test_gather_vectorises_inside_of_a_row():
    assert sizes(gather(1000, 64, 500))[AxisType.UPCAST][0] % 16 == 0


def test_transpose_is_correct_and_threaded():
    assert AxisType.THREAD in sizes(transpose(1024, 1024))


def test_loops_nest_around_the_reductions_that_need_them():
    """out[i, j] = x[i, j] - sum over k of y[k, j]: j goes outside, or the sum is computed for every i."""
    i, j = loops(512, 512)
    (k,) = folds(2, 512)
    total = fold(Ops.ADD, read(param(2, 512 * 512), k * 512 + j), k)
    value = read(param(1, 512 * 512), i * 512 + j) - total
    ast = UOp.sink(store(param(0, 512 * 512), i * 512 + j, value, i, j))
    made = apply(ast, choose(ast, AVX512), AVX512)
    total = next(u for u in made.toposort() if u.op is Ops.REDUCE)
    around = [a.number for a in axes(made) if a.type in (AxisType.THREAD, AxisType.LOOP)]
    needed = {r.arg.uid for r in total.ranges}
    assert [n in needed for n in around] == sorted([n in needed for n in around], reverse=True)


def test_an_axis_cut_in_blocks_is_contiguous_inside_of_a_block():
    """The sum over heads and their elements, as the projection after attention reads them."""
    i, j = loops(64, 64)
    (k,) = folds(2, 256)
    x, w = param(1, 64 * 256), param(2, 64 * 256)
    value = read(x, k // 64 * 4096 + i * 64 + k % 64) * read(w, j * 256 + k)
    ast = UOp.sink(store(param(0, 4096), i * 64 + j, fold(Ops.ADD, value, k), i, j))
    made = apply(ast, choose(ast, AVX512), AVX512)
    assert not any(u.op in (Ops.FLOORDIV, Ops.FLOORMOD) for u in made.toposort())
    assert any(a.type is AxisType.UPCAST and a.size % 16 == 0 for a in axes(made))
    given_buffers = buffers_for(ast)
    for want, got in zip(outputs(ast, given_buffers), outputs(made, given_buffers)):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["elementwise", "row_sum", "matmul"])
def test_empty_axes(name):
    ast = {"elementwise": elementwise(0, 3), "row_sum": row_sum(3, 0), "matmul": matmul(4, 5, 0)}[name]
    assert choose(ast, AVX512) == ()


def test_one_element():
    for ast in (elementwise(1), full_sum(1), matmul(1, 1, 1), softmax(1, 1)):
        apply(ast, choose(ast, AVX512), AVX512)


def test_gathers_are_not_unrolled_without_end():
    """Every lane of a gather is an instruction: the body of the loop must stay small."""
    (i,) = loops(64)
    n, y, x = folds(1, 128, 6, 6)
    value = read(param(1, 128 * 64 * 9), (n * 64 + i) * 9 + y // 2 * 3 + x // 2)
    ast = UOp.sink(store(param(0, 64), i, fold(Ops.ADD, value, n, y, x), i))
    assert np.prod([a.size for a in axes(apply(ast, choose(ast, AVX512), AVX512)) if a.type.is_tile]) <= 512


def test_symbolic_sizes_are_left_alone():
    i, j = loops(UOp.variable("n", 1, 4096), 256)
    p, q = param(0, 4096 * 256), param(1, 4096 * 256)
    ast = UOp.sink(store(p, i * 256 + j, read(q, i * 256 + j) * 2.0, i, j))
    chosen = choose(ast, AVX512)
    assert Opt(OptKind.UPCAST, 1, 64) in chosen
    made = apply(ast, chosen, AVX512)
    assert any(a.size is not None and not isinstance(a.size, int) for a in axes(made))


def test_axes_that_enter_values_are_not_merged():
    i, j = loops(8, 16)
    value = i.lt(j).where(read(param(1, 128), i * 16 + j), UOp.const(0.0, F32))
    ast = UOp.sink(store(param(0, 128), i * 16 + j, value, i, j))
    assert all(o.kind is not OptKind.MERGE for o in choose(ast, AVX512))
    assert not any(u.op is Ops.FLOORDIV for u in apply(ast, choose(ast, AVX512), AVX512).toposort())


def test_labels_of_64_bits_do_not_halve_the_vectors() -> None:
    """A sum over the classes of what a label picks: the label is read once a row."""
    (i,), (k,) = loops(64), folds(1, 1024)
    label = read(param(2, 64, dtypes.int64), i)
    value = label.equal(k.cast(dtypes.int64)).where(read(param(1, 64 << 10), i * 1024 + k), 0.0)
    ast = UOp.sink(store(param(0, 64), i, fold(Ops.ADD, value, k), i))
    linear = generate(ast, AVX512._replace(native=CPU_OPS)).linear
    assert {u.dtype.count for u in linear.src if u.op is Ops.LOAD and u.dtype.scalar is F32} == {16}
    assert not any(u.dtype.count > 1 for u in linear.src if u.dtype.scalar is dtypes.int64)


def test_dear_sums_have_few_vectors_side_by_side() -> None:
    (i,), (k,) = loops(64), folds(1, 1 << 14)
    x = read(param(1, 64 << 14), i * (1 << 14) + k)
    cheap, dear = (
        sizes(UOp.sink(store(param(0, 64), i, fold(Ops.ADD, value, k), i)))[AxisType.UNROLL][0]
        for value in (x, x.alu(Ops.EXP2))
    )
    assert cheap == 128 and dear == 64


@pytest.mark.parametrize("rows", [1021, 3 * 1021, 1022, 67])
def test_rows_of_any_number_are_shared_evenly(rows: int) -> None:
    """A prime number of rows: all tasks but the last have the same, and no access pays with a mask."""
    ast = softmax(rows, 4096)
    found = sizes(ast)[AxisType.THREAD][0]
    assert found % AVX512.threads == 0 and found >= 4
    linear = generate(ast, AVX512._replace(native=CPU_OPS)).linear
    assert not any(len(u.src) > 2 for u in linear.src if u.op is Ops.LOAD)
    assert not any(len(u.src) > 3 for u in linear.src if u.op is Ops.STORE)


def test_long_axes_of_whole_vectors_need_no_mask() -> None:
    for size in (16 * 65537, 16 * 3 * 21845, 1 << 20):
        opts = choose(elementwise(size), AVX512)
        linear = generate(elementwise(size), AVX512._replace(native=CPU_OPS)).linear
        assert any(o.kind is OptKind.THREAD for o in opts)
        assert not any(len(u.src) > 3 for u in linear.src if u.op is Ops.STORE)


@pytest.mark.parametrize("threads", [2, 3, 6, 12, 64])
def test_padding_for_tasks_stays_small(threads: int) -> None:
    for ast in (softmax(1021, 4096), elementwise(1000, 1000), elementwise(1000003), row_sum(999, 1000)):
        before = np.prod([a.size for a in axes(ast) if a.type is AxisType.LOOP])
        made = apply(ast, choose(ast, AVX512._replace(threads=threads)), AVX512._replace(threads=threads))
        kinds = (AxisType.THREAD, AxisType.LOOP, AxisType.UPCAST)
        after = np.prod([a.size for a in axes(made) if a.type in kinds])
        assert after <= before * 1.05


@pytest.mark.parametrize("n", [65, 100])
def test_short_ragged_rows_have_known_masks(n: int) -> None:
    """All of a row is in the tile: the mask of its last vector is a constant."""
    linear = generate(softmax(512, n), AVX512._replace(native=CPU_OPS)).linear
    masks = [u.src[-1] for u in linear.src if u.op is Ops.LOAD and len(u.src) > 2]
    masks += [u.src[-1] for u in linear.src if u.op is Ops.STORE and len(u.src) > 3]
    assert masks and all(mask.op is Ops.CONST for mask in masks)
    assert sum(u.op is Ops.RANGE for u in linear.src) == 1  # over rows


def test_sums_in_one_loop_are_unrolled_together_or_not_at_all() -> None:
    """As in a masked mean, a dear sum and a cheap one share their loops. What the cheap one could afford
    alone would make a thousand instructions of the dear one."""
    i, k = UOp.range(8, AxisType.REDUCE, 0), UOp.range(256, AxisType.REDUCE, 1)
    out, labels, x, y = (
        UOp(Ops.PARAM, dtype, (), ParamArg(slot, size))
        for slot, (dtype, size) in enumerate(
            [(dtypes.float32, 1), (dtypes.int32, 2056), (dtypes.float32, 2048), (dtypes.float32, 2048)]
        )
    )
    kept = UOp(Ops.INDEX, dtypes.int32, (labels, i * 257 + k + 1)).not_equal(-1)
    a, b = (UOp(Ops.INDEX, dtypes.float32, (p, i * 256 + k)) for p in (x, y))
    total = kept.where(a.alu(Ops.LOG2) - b, 0.0).reduce_ranges(Ops.ADD, i, k)
    number = kept.cast(dtypes.float32).reduce_ranges(Ops.ADD, i, k)
    kernel = UOp.sink(UOp(Ops.STORE, dtypes.void, (out, UOp.index(0), total * number)))
    assert len(generate(kernel, AVX512._replace(native=CPU_OPS)).linear.src) < 500


@pytest.mark.parametrize(("stride", "apart"), [(2, True), (4, True), (5, False)])
def test_windows_that_step_by_a_few_elements_are_vectors_of_outputs(stride: int, apart: bool) -> None:
    """Reads of every second element are a few wide loads and a shuffle, which beats a vector along the three
    elements of a window: a max-pool of 112 x 112 took 7.4 ms that way, and takes 1.9."""
    rows = UOp.range(64, AxisType.LOOP, 0)
    x = UOp.range(32, AxisType.LOOP, 1)
    k = UOp.range(3, AxisType.REDUCE, 2)
    out, image = param(0, 64 * 32), param(1, 64 * 192)
    best = read(image, rows * 192 + x * stride + k).reduce_ranges(Ops.MAX, k)
    chosen = choose(UOp.sink(store(out, rows * 32 + x, best, rows, x)), AVX512)
    assert any(o.kind is OptKind.UPCAST and o.axis == 1 and o.amount >= 16 for o in chosen) == apart


@pytest.mark.parametrize("stride", [2, 3, 4])
@pytest.mark.parametrize("width", [30, 56, 113])
def test_maxima_of_windows_with_gaps(stride: int, width: int) -> None:
    """Values of the chosen tiles, borders included, beside those of NumPy."""
    from whit import Tensor

    x = np.random.default_rng(width).standard_normal((3, 7, width), dtype=np.float32)
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))[:, ::stride, ::stride]
    got = Tensor(x).max_pool2d((3, 3), stride=stride, padding=1).numpy()
    np.testing.assert_array_equal(got, windows.max(axis=(-1, -2)))
