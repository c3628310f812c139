"""Cropped loops: they run as far as their masks reach, and compute what NumPy computes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codegen.linear_eval import LinearProgram
from tests.codegen.opts_kernels import conv_input_gradient, fold, folds, loops, param, read, store
from whit.codegen.crop import crop_loops, halfspaces, index_form
from whit.codegen.linearize import linearize
from whit.codegen.lower import lower_passes, prepare
from whit.codegen.opts import OptError, apply, parse_opts
from whit.codegen.target import Target
from whit.uop import AxisType, LocalArg, Ops, StageArg, UOp, dtypes
from whit.uop.ops import ALU
from whit.uop.rewrite import run_passes
from whit.uop.spec import verify
from whit.uop.symbolic import simplify

TARGET = Target("crop", "python", vector_bytes=16, vector_registers=16, threads=2, native=frozenset(ALU))
f32, i32 = dtypes.float32, dtypes.int32
INF = float("inf")


def lowered(ast: UOp, opts: str = "") -> UOp:
    """The kernel as `linearize` gets it."""
    verify(ast, "kernel")
    tiled = run_passes(apply(prepare(ast), parse_opts(opts), TARGET), lower_passes(), TARGET)
    verify(tiled, "tiled")
    return tiled


def sizes(ast: UOp) -> dict[int, UOp]:
    return {u.arg.uid: u.src[0] for u in ast.toposort() if u.op is Ops.RANGE}


def iterations(ast: UOp, *buffers: np.ndarray) -> int:
    """Run a lowered kernel; how many elements its loads and stores touch."""
    linear = linearize(ast, TARGET)
    verify(linear, "linear")
    program = LinearProgram(linear)
    touched = 0
    count = program.lanes

    def lanes(*args):
        nonlocal touched
        where, on = count(*args)
        touched += int(on.sum())
        return where, on

    program.lanes = lanes
    program(list(buffers))
    return touched


def number(u: UOp) -> UOp:
    """The counter as an int32, as IOTA has it."""
    return u.cast(i32)


def causal(n: int, wide: int, low: int | None = None) -> UOp:
    """Row i sums the elements i - low … i of row i: p0[i] = sum_k p1[i, k]."""
    (i,), (k,) = loops(n), folds(1, wide)
    seen = number(k).alu(Ops.CMPLE, number(i))
    if low is not None:
        seen = seen & (number(i) - number(k)).alu(Ops.CMPLE, UOp.const(low, i32))
    value = seen.where(read(param(1, n * wide), i * wide + k), UOp.const(0.0, f32))
    return UOp.sink(store(param(0, n), i, fold(Ops.ADD, value, k), i))


def expected(x: np.ndarray, low: int | None = None) -> np.ndarray:
    i, k = np.ogrid[: x.shape[0], : x.shape[1]]
    seen = (k <= i) if low is None else (k <= i) & (i - k <= low)
    return np.where(seen, x, 0).sum(1)


@pytest.mark.parametrize(
    "opts",
    [
        "",
        "UPCAST axis 0 by 4",
        "UNROLL axis 1 by 4",
        "UPCAST axis 0 by 4, UNROLL axis 1 by 8",
        "PADTO axis 0 to 5, UPCAST axis 0 by 5",
        "PADTO axis 1 to 5, UNROLL axis 1 by 5",
        "THREAD axis 0 by 4, SPLIT axis 1 by 8",
        "SPLIT axis 0 by 4, SPLIT axis 1 by 2",
    ],
)
@pytest.mark.parametrize("low", [None, 3, 0])
def test_rows_of_a_triangle(opts: str, low: int | None) -> None:
    n, wide = 16, 32
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, wide)).astype(np.float32)
    out = np.full(n, np.nan, np.float32)
    ast = causal(n, wide, low)
    touched = iterations(lowered(ast, opts), out, x.ravel())
    np.testing.assert_allclose(out, expected(x, low), rtol=1e-5)
    assert touched <= (16 * 20 if low is None else 16 * 14)  # not 16 * 32


def test_exact_bounds_need_no_masks() -> None:
    ast = lowered(causal(16, 32, 5))
    (k,) = [u for u in ast.toposort() if u.op is Ops.RANGE and u.arg.uid == 1]
    i = next(u for u in ast.toposort() if u.op is Ops.RANGE and u.arg.uid == 0)
    assert k.src[0] is simplify(i + 1 - (i - 5).maximum(0))
    assert not any(u.op in (Ops.WHERE, Ops.CMPLE, Ops.CMPLT, Ops.AND) for u in ast.toposort())


def test_the_mask_stays_at_the_edge_of_the_tile() -> None:
    ast = lowered(causal(16, 32), "UPCAST axis 0 by 4")
    assert any(u.op in (Ops.CMPLT, Ops.CMPLE) for u in ast.toposort())
    (k,) = [u for u in ast.toposort() if u.op is Ops.RANGE and u.arg.uid == 1]
    assert k.src[0].vmax == 16 and k.src[0].vmin == 4


def test_maximum_of_a_window() -> None:
    """-inf is the identity of a maximum; nothing is lost where the whole row is masked off."""
    n, wide = 12, 20
    (i,), (k,) = loops(n), folds(1, wide)
    seen = (k + 3).lt(i)  # rows 0 … 3 see nothing
    value = seen.where(read(param(1, n * wide), i * wide + k), UOp.const(-INF, f32))
    ast = UOp.sink(store(param(0, n), i, fold(Ops.MAX, value, k), i))
    x = np.random.default_rng(1).normal(size=(n, wide)).astype(np.float32)
    out = np.zeros(n, np.float32)
    touched = iterations(lowered(ast), out, x.ravel())
    j = np.arange(wide)
    assert np.array_equal(out, np.where(j + 3 < np.arange(n)[:, None], x, -INF).max(1))
    assert touched == n + sum(max(0, r - 3) for r in range(n))


def test_the_identity_may_stand_first() -> None:
    """masked_fill: WHERE(outside, identity, value)."""
    n = 8
    (i,), (k,) = loops(n), folds(1, n)
    outside = number(i).lt(number(k))
    value = outside.where(UOp.const(1.0, f32), read(param(1, n * n), i * n + k))
    ast = lowered(UOp.sink(store(param(0, n), i, fold(Ops.MUL, value, k), i)))
    x = np.random.default_rng(2).normal(size=(n, n)).astype(np.float32)
    out = np.zeros(n, np.float32)
    assert iterations(ast, out, x.ravel()) == n + n * (n + 1) // 2
    np.testing.assert_allclose(out, np.where(np.tril(np.ones((n, n))) > 0, x, 1).prod(1), rtol=1e-5)


def test_products_of_masked_reads() -> None:
    """A band matrix times a vector: the sum runs over the band only, from a lower bound."""
    n, band = 24, 4
    (i,), (k,) = loops(n), folds(1, n)
    inside = (i - k).lt(band) & (k - i).lt(1)
    ast = UOp.sink(
        store(
            param(0, n),
            i,
            fold(Ops.ADD, read(param(1, n * n), i * n + k, inside) * read(param(2, n), k), k),
            i,
        )
    )
    rng = np.random.default_rng(3)
    a, v = rng.normal(size=(n, n)).astype(np.float32), rng.normal(size=n).astype(np.float32)
    out = np.zeros(n, np.float32)
    touched = iterations(lowered(ast), out, a.ravel(), v)
    np.testing.assert_allclose(out, (np.tril(a) - np.tril(a, -band)) @ v, rtol=1e-4, atol=1e-5)
    assert touched == n + 2 * sum(min(band, r + 1) for r in range(n))


def test_a_value_that_may_be_infinite_is_not_skipped() -> None:
    """0 * inf is NaN: a factor that divides keeps the loop whole."""
    n = 8
    (i,), (k,) = loops(n), folds(1, n)
    masked = k.lt(i + 1).where(read(param(1, n), k), UOp.const(0.0, f32))
    value = masked * (read(param(1, n), k) - 3.0).alu(Ops.RECIPROCAL)
    ast = lowered(UOp.sink(store(param(0, n), i, fold(Ops.ADD, value, k), i)))
    assert all(size.op is Ops.CONST for size in sizes(ast).values())
    x = np.arange(n, dtype=np.float32)
    out = np.zeros(n, np.float32)
    iterations(ast, out, x)
    with np.errstate(all="ignore"):
        wanted = (np.where(np.arange(n) <= np.arange(n)[:, None], x, 0) * (1 / (x - 3))).sum(1)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(wanted))


def test_reductions_of_one_loop_must_agree() -> None:
    """A loop that two REDUCEs share ends where both are done."""
    n = 8
    (i,), (k,) = loops(n), folds(1, n)
    x = read(param(2, n * n), i * n + k)
    part = fold(Ops.ADD, k.lt(i + 1).where(x, UOp.const(0.0, f32)), k)
    whole = fold(Ops.ADD, x * x, k)
    ast = UOp.sink(store(param(0, n), i, part, i), store(param(1, n), i, whole, i))
    data = np.random.default_rng(4).normal(size=(n, n)).astype(np.float32)
    a, b = np.zeros(n, np.float32), np.zeros(n, np.float32)
    iterations(lowered(ast), a, b, data.ravel())
    np.testing.assert_allclose(a, np.tril(data).sum(1), rtol=1e-5)
    np.testing.assert_allclose(b, (data * data).sum(1), rtol=1e-5)


@pytest.mark.parametrize(
    "m, n, opts, gone",
    [
        (30, 20, "PADTO axis 0 to 12, SPLIT axis 0 by 12, UPCAST axis 3 by 4, UPCAST axis 1 by 4", False),
        (30, 16, "PADTO axis 0 to 16, SPLIT axis 0 by 16, UPCAST axis 3 by 2, UPCAST axis 1 by 8", True),
        (64, 16, "PADTO axis 0 to 48, SPLIT axis 0 by 48, UPCAST axis 1 by 8", True),
    ],
)
def test_last_blocks(m: int, n: int, opts: str, gone: bool) -> None:
    """The loop over the tiles of the last block of a matmul is as long as there are tiles left."""
    kk = 5
    i, j = loops(m, n)
    (k,) = folds(2, kk)
    value = fold(Ops.ADD, read(param(1, m * kk), i * kk + k) * read(param(2, kk * n), k * n + j), k)
    ast = lowered(UOp.sink(store(param(0, m * n), i * n + j, value, i, j)), opts)
    rng = np.random.default_rng(5)
    a, b = rng.normal(size=(m, kk)).astype(np.float32), rng.normal(size=(kk, n)).astype(np.float32)
    out = np.zeros((m, n), np.float32)
    iterations(ast, out.ravel(), a.ravel(), b.ravel())
    np.testing.assert_allclose(out, a @ b, rtol=1e-4, atol=1e-5)
    assert gone == (not any(u.op is Ops.CMPLT for u in ast.toposort()))


def test_a_guard_stays_where_its_read_may_move_out_of_the_loop() -> None:
    """The read does not depend on k: it runs before the loop, also where no iteration follows."""
    n, size = 12, 6
    (i,), (k,) = loops(n), folds(1, n)
    inside = (i + k).lt(size)
    value = read(param(1, size), i, inside)
    ast = lowered(UOp.sink(store(param(0, n), i, fold(Ops.ADD, value, k), i)))
    x = np.random.default_rng(6).normal(size=size).astype(np.float32)
    out = np.zeros(n, np.float32)
    iterations(ast, out, x)  # fails if it reads beyond the end
    wanted = [x[r] * (size - r) if r < size else 0 for r in range(n)]
    np.testing.assert_allclose(out, wanted, rtol=1e-5)


def staged_rows(n: int, wide: int, low: int | None) -> UOp:
    """Scores of row i in scratch, then their maximum and the sum of exponentials relative to it over what the
    row sees."""
    (i,) = loops(n)
    k, l, s = folds(1, wide, wide)[0], folds(2, wide)[0], UOp.range(wide, uid=3)
    score = read(param(1, n * wide), i * wide + s) * 2.0
    rows = UOp(Ops.STAGE, f32, (score, s), StageArg("local", 0))

    def seen(at: UOp) -> UOp:
        found = number(at).alu(Ops.CMPLE, number(i))
        return found if low is None else found & (number(i) - number(at)).alu(Ops.CMPLE, UOp.const(low, i32))

    most = fold(Ops.MAX, seen(k).where(read(rows, k), UOp.const(-INF, f32)), k)
    total = fold(Ops.ADD, seen(l).where((read(rows, l) - most).alu(Ops.EXP2), UOp.const(0.0, f32)), l)
    return UOp.sink(store(param(0, n), i, total, i))


@pytest.mark.parametrize("low", [None, 4])
@pytest.mark.parametrize(
    "opts",
    [
        "",
        "UPCAST axis 0 by 4",
        "UNROLL axis 2 by 4, UNROLL axis 1 by 4",
        "THREAD axis 0 by 2, UPCAST axis 0 by 2",
    ],
)
def test_scratch_is_filled_as_far_as_it_is_read(opts: str, low: int | None) -> None:
    n, wide = 8, 16
    ast = lowered(staged_rows(n, wide, low), opts)
    x = np.random.default_rng(7).normal(size=(n, wide)).astype(np.float32)
    out = np.zeros(n, np.float32)
    iterations(ast, out, x.ravel())
    i, k = np.ogrid[:n, :wide]
    seen = (k <= i) if low is None else (k <= i) & (i - k <= low)
    scores = np.where(seen, 2 * x.astype(np.float64), -INF)
    np.testing.assert_allclose(out, np.exp2(scores - scores.max(1, keepdims=True)).sum(1), rtol=1e-5)
    assert all(size.vmax < wide for uid, size in sizes(ast).items() if uid in (1, 2, 3))


def test_what_all_of_is_read_is_filled_whole() -> None:
    (i,), (k,), s = loops(4), folds(1, 8), UOp.range(8, uid=2)
    rows = UOp(Ops.STAGE, f32, (read(param(1, 32), i * 8 + s), s), StageArg("local", 0))
    part = fold(Ops.ADD, k.lt(i + 1).where(read(rows, k), UOp.const(0.0, f32)), k)
    ast = lowered(UOp.sink(store(param(0, 4), i, part + read(rows, UOp.index(7)), i)))
    x = np.random.default_rng(8).normal(size=(4, 8)).astype(np.float32)
    out = np.zeros(4, np.float32)
    iterations(ast, out, x.ravel())
    np.testing.assert_allclose(out, np.tril(x).sum(1) + x[:, 7], rtol=1e-5)


def test_integer_expressions_of_counters() -> None:
    i, k = loops(100, 50)
    a, b = number(i), number(k)
    assert index_form(a * 3 - b + 2) is simplify(i * 3 + k * -1 + 2)
    assert index_form(i.cast(dtypes.uint8)) is i
    assert index_form((i * 3).cast(dtypes.uint8)) is None  # wraps
    assert index_form(UOp(Ops.INDEX, i32, (UOp(Ops.LOCAL, i32, (), LocalArg(0, 4, False)), k))) is None
    assert halfspaces((a.lt(b), True)) == [({i: 1, k: -1}, 0)]
    assert halfspaces((a.lt(b), False)) == [({i: -1, k: 1}, 1)]
    assert halfspaces((a.alu(Ops.CMPEQ, b), True)) == [({i: 1, k: -1}, 1), ({i: -1, k: 1}, 1)]
    assert halfspaces((a.alu(Ops.CMPNE, b), True)) == []


def test_unmasked_kernels_are_left_alone() -> None:
    (i,), (k,) = loops(8), folds(1, 8)
    ast = UOp.sink(store(param(0, 8), i, fold(Ops.ADD, read(param(1, 64), i * 8 + k), k), i))
    assert crop_loops(ast) is ast


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_masks(data: st.DataObject) -> None:
    """Any conjunction of affine conditions over two output loops and two reduced ones, under any split."""
    shape = data.draw(st.tuples(*[st.integers(1, 9)] * 4))
    i, j = loops(*shape[:2])
    k, l = folds(2, *shape[2:])
    counters = (i, j, k, l)
    condition = None
    rows = []
    for _ in range(data.draw(st.integers(1, 3))):
        factors = data.draw(st.tuples(*[st.integers(-3, 3)] * 4))
        limit = data.draw(st.integers(-8, 12))
        form = UOp.index(0)
        for f, c in zip(factors, counters):
            form = form + c * f
        part = simplify(form).lt(limit)
        rows.append((factors, limit))
        condition = part if condition is None else condition & part
    assert condition is not None
    op, start = data.draw(st.sampled_from([(Ops.ADD, 0.0), (Ops.MAX, -INF), (Ops.MIN, INF)]))
    total = int(np.prod(shape))
    index = ((i * shape[1] + j) * shape[2] + k) * shape[3] + l
    value = simplify(condition).where(read(param(1, total), index), UOp.const(start, f32))
    out_size = shape[0] * shape[1]
    ast = prepare(UOp.sink(store(param(0, out_size), i * shape[1] + j, fold(op, value, k, l), i, j)))
    ast = prepare(ast)  # what contradictory conditions leave behind goes in a second round
    opts = []
    for axis in sorted({u for u in ast.toposort() if u.op is Ops.RANGE}, key=lambda u: u.arg.uid):
        tile = "UPCAST" if axis.arg.axis is AxisType.LOOP else "UNROLL"
        kind = data.draw(st.sampled_from(["", "SPLIT", tile]))
        by = data.draw(st.integers(2, 4))
        if kind:
            opts += [f"PADTO axis {axis.arg.uid} to {by}", f"{kind} axis {axis.arg.uid} by {by}"]
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    grid = np.ogrid[tuple(slice(0, s) for s in shape)]
    seen = np.ones(shape, bool)
    for factors, limit in rows:
        seen &= sum(f * g for f, g in zip(factors, grid)) < limit
    fold_numpy = {Ops.ADD: np.sum, Ops.MAX: np.max, Ops.MIN: np.min}[op]
    wanted = fold_numpy(np.where(seen, x, start).astype(np.float64), axis=(2, 3))
    out = np.full(out_size, np.nan, np.float32)
    iterations(lowered(ast, ", ".join(opts)), out, x.ravel())
    np.testing.assert_allclose(out.reshape(wanted.shape), wanted, rtol=1e-4, atol=1e-5)


def exponentials(n: int, wide: int) -> UOp:
    """sum_k exp2(s[k] - max s) * v[k] of row i, where scores of -inf are the only mask; both in scratch."""
    (i,) = loops(n)
    k, m, s, e = *folds(1, wide, wide), *folds(3, wide, wide)
    masked = number(s).alu(Ops.CMPLE, number(i))
    score = masked.where(read(param(1, n * wide), i * wide + s), UOp.const(-INF, f32))
    scores = UOp(Ops.STAGE, f32, (score, s), StageArg("local", 0))
    most = fold(Ops.MAX, read(scores, m), m)
    weights = UOp(Ops.STAGE, f32, ((read(scores, e) - most).alu(Ops.EXP2), e), StageArg("local", 1))
    total = fold(Ops.ADD, read(weights, k) * read(param(2, wide), k), k)
    return UOp.sink(store(param(0, n), i, total, i))


@pytest.mark.parametrize(
    "opts",
    [
        "",
        "UPCAST axis 0 by 4",
        "UNROLL axis 1 by 4, UNROLL axis 3 by 2",
        "SPLIT axis 3 by 8, UNROLL axis 4 by 4, UPCAST axis 0 by 2",
        "PADTO axis 3 to 5, SPLIT axis 3 by 5, PADTO axis 1 to 7, UNROLL axis 1 by 7",
    ],
)
def test_masks_are_seen_through_scratch(opts: str) -> None:
    """What is -inf where it is stored adds nothing where it is read: all four loops stop at the diagonal."""
    n, wide = 8, 16
    ast = lowered(exponentials(n, wide), opts)
    rng = np.random.default_rng(9)
    x, v = rng.normal(size=(n, wide)).astype(np.float32), rng.normal(size=wide).astype(np.float32)
    out = np.zeros(n, np.float32)
    iterations(ast, out, x.ravel(), v)
    scores = np.where(np.tril(np.ones((n, wide))) > 0, x.astype(np.float64), -INF)
    wanted = np.exp2(scores - scores.max(1, keepdims=True)) @ v
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-6)
    if "PADTO" not in opts:
        whole = {size.arg for size in sizes(ast).values() if size.op is Ops.CONST}
        assert max(whole) <= 8, "a loop over all 16 columns is left"


def test_bad_scores_stay_in_their_rows() -> None:
    """A NaN or infinity that a row sees makes its sum NaN, and no other row's."""
    n, wide = 8, 8
    ast = lowered(exponentials(n, wide))
    x = np.random.default_rng(10).normal(size=(n, wide)).astype(np.float32)
    x[3, 2], x[5, 1], x[6, 7] = np.nan, np.inf, np.nan  # the last one is masked off
    out = np.zeros(n, np.float32)
    iterations(ast, out, x.ravel(), np.ones(wide, np.float32))
    assert np.isnan(out).tolist() == [False, False, False, True, False, True, False, False]


def full_correlation(grad: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The gradient of a convolution's image: every window's gradient is added where the window lies."""
    (n, _, oh, ow), (_, ci, kh, kw) = grad.shape, weight.shape
    dx = np.zeros((n, ci, oh + kh - 1, ow + kw - 1))
    for y in range(kh):
        for x in range(kw):
            dx[:, :, y : y + oh, x : x + ow] += np.einsum("boyx,oc->bcyx", grad, weight[:, :, y, x])
    return dx


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(2, 9)] * 4),
    tile=st.sampled_from([None, (3, 2), (2, 2), (1, 3), (3, 4)]),
    level=st.sampled_from([0, 1, 2]),
)
def test_borders_of_an_image_in_scratch(
    sizes: tuple[int, int, int, int], tile: tuple[int, int] | None, level: int
) -> None:
    """Rows of padding are not multiplied: what is 0 there was written so into an image of several axes."""
    kh, kw = (max(2, s // 2) for s in sizes[:2])
    h, w = sizes[0] + kh, sizes[1] + kw
    n, ci, co = 2, 1 + sizes[2] // 2, 1 + sizes[3] // 2
    ast = conv_input_gradient(n, ci, co, h, w, kh, kw)
    opts = "" if tile is None else f"PADTO axis {tile[0]} to {tile[1]}, UPCAST axis {tile[0]} by {tile[1]}"
    try:
        apply(prepare(ast), parse_opts(opts), TARGET)
        staged = ", ".join(filter(None, [opts, f"WINDOW axis {level} read 0"]))
        made = lowered(ast, staged)
    except OptError:
        made = lowered(ast, f"WINDOW axis {level} read 0")
    rng = np.random.default_rng(11)
    grad = rng.normal(size=(n, co, h - kh + 1, w - kw + 1)).astype(np.float32)
    weight = rng.normal(size=(co, ci, kh, kw)).astype(np.float32)
    out = np.full(n * ci * h * w, np.nan, np.float32)
    iterations(made, out, grad.ravel(), weight.ravel())
    wanted = full_correlation(grad.astype(np.float64), weight)
    np.testing.assert_allclose(out.reshape(wanted.shape), wanted, rtol=1e-4, atol=1e-5)


def test_rows_of_a_kernel_beyond_the_border_are_not_run() -> None:
    """In scratch, images stand side by side with channels and columns: a row is one digit of the place."""
    ast = lowered(conv_input_gradient(2, 4, 8, 12, 12, 5, 5), "UPCAST axis 3 by 12, WINDOW axis 0 read 0")
    assert sizes(ast)[5].op is not Ops.CONST
    short = lowered(conv_input_gradient(2, 4, 8, 12, 12, 3, 3), "UPCAST axis 3 by 12, WINDOW axis 0 read 0")
    assert sizes(short)[5].op is Ops.CONST, "three rows are too few if nothing longer runs inside"
