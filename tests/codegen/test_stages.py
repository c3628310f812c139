"""STAGE and ACCUMULATE: operands in scratch and sums in pieces keep their values and say why not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codegen.opts_kernels import (
    AVX512,
    GROUPS,
    SSE,
    buffers_for,
    conv,
    fold,
    folds,
    loops,
    matmul,
    outputs,
    param,
    read,
    row_sum,
    store,
)
from tests.codegen.test_opts_on_cpu import run
from whit.codegen import Generated, generate
from whit.codegen.heuristics import choose
from whit.codegen.opts import Opt, OptError, OptKind, apply, axes, parse_opts
from whit.codegen.stages import reads_of, scratch_bytes
from whit.engine.trial import compile_candidate
from whit.runtime.device import Buffer, Device, Launch
from whit.uop import AxisType, Ops, StageArg, UOp, dtypes

BLOCKED = (
    "PADTO axis 0 to 8, UPCAST axis 0 by 4, PADTO axis 1 to 32, UPCAST axis 1 by 32, SPLIT axis 0 by 2, "
    "STAGE axis 1 read 1, STAGE axis 0 read 0"
)


def product(
    m: int, n: int, k: int, opts: str, left: bool, right: bool, target=AVX512
) -> tuple[UOp, np.ndarray, np.ndarray]:
    """The kernel under opts, what it computes, and NumPy's product."""
    ast = matmul(m, n, k, left, right)
    c, a, b = buffers_for(ast)
    made = apply(ast, parse_opts(opts), target)
    x = a.reshape(k, m).T if left else a.reshape(m, k)
    y = b.reshape(n, k).T if right else b.reshape(k, n)
    return made, outputs(made, [c, a, b])[0].reshape(m, n), x @ y


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("sizes", [(16, 64, 16), (13, 37, 19), (9, 33, 1), (17, 40, 50)])
def test_packed_products_of_any_layout(sizes, left, right):
    _, got, want = product(*sizes, BLOCKED, left, right)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


size = st.integers(2, 40)


@settings(max_examples=12, deadline=None)
@given(m=size, n=size, k=size, pieces=st.sampled_from([2, 3, 4]), left=st.booleans(), right=st.booleans())
def test_sums_in_pieces(m, n, k, pieces, left, right):
    k = pieces * k
    ast = matmul(m, n, k, left, right)
    c, a, b = buffers_for(ast)
    opts = parse_opts(f"ACCUMULATE axis 2 by {pieces}, SWAP axis 0 with 3, STAGE axis 1 read 1")
    got = run(ast, compile_candidate(ast, "CPU", opts), [c, a, b])[0].reshape(m, n)
    x = a.reshape(k, m).T if left else a.reshape(m, k)
    y = b.reshape(n, k).T if right else b.reshape(k, n)
    np.testing.assert_allclose(got, x @ y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", ["CPU", "PYTHON"])
def test_what_follows_a_sum_happens_once(device):
    """relu(x @ w + b), where a partial sum may be negative and the whole is not."""
    i, j = loops(4, 8)
    (k,) = folds(2, 6)
    total = fold(Ops.ADD, read(param(1, 24), i * 6 + k) * read(param(2, 48), k * 8 + j), k)
    zero = UOp.const(0.0, dtypes.float32)
    value = UOp(Ops.MAX, dtypes.float32, (total + read(param(3, 8), j), zero))
    ast = UOp.sink(store(param(0, 32), i * 8 + j, value, i, j))
    y, x, w, b = buffers_for(ast)
    made = generate(ast, Device.get(device).target, parse_opts("ACCUMULATE axis 2 by 3"))
    got = values_of(made, device, [y, x, w, b])[0].reshape(4, 8)
    np.testing.assert_allclose(
        got, np.maximum(x.reshape(4, 6) @ w.reshape(6, 8) + b, 0), rtol=1e-5, atol=1e-6
    )


def values_of(made: Generated, device: str, given_buffers: list[np.ndarray]) -> list[np.ndarray]:
    """The buffers after a device ran the program."""
    on = Device.get(device)
    binary = on.compile(on.render(made.linear, made.name), made.name)
    program = on.load(binary, made.name, Launch(made.tasks, made.global_size, made.local_size))
    memory = [Buffer(device, data.nbytes) for data in given_buffers]
    for buffer, data in zip(memory, given_buffers, strict=True):
        buffer.copyin(memoryview(data).cast("B"))
    program([buffer.handle for buffer in memory], [], wait=True)
    return [np.frombuffer(b.copyout(), d.dtype) for b, d in zip(memory, given_buffers, strict=True)]


def test_the_inner_loop_reads_only_scratch_without_masks():
    made, _, _ = product(13, 37, 19, BLOCKED, False, False)
    total = next(u for u in made.toposort() if u.op is Ops.REDUCE)
    reads = [s for s in total.src[0].src if s.op is Ops.INDEX]
    assert len(reads) == 2 and all(r.src[0].op is Ops.STAGE and len(r.src) == 2 for r in reads)


def test_each_range_of_scratch_is_its_own():
    made, _, _ = product(16, 64, 16, BLOCKED, False, True)
    closed = [r for u in made.toposort() if u.op in (Ops.STAGE, Ops.REDUCE) for r in u.src[1:]]
    assert len(closed) == len(set(closed)) and len({r.arg.uid for r in closed}) == len(closed)


def test_rows_lie_padded_to_vectors():
    made, _, _ = product(
        16, 64, 16, "UPCAST axis 0 by 2, UPCAST axis 1 by 32, STAGE axis 0 read 1", False, True
    )
    stage = next(u for u in made.toposort() if u.op is Ops.STAGE)
    assert stage.src[-1].src[0].arg == 32 and stage.src[-1].arg.axis is AxisType.UPCAST
    # of both loops over columns: axis 1 lies inside of axis 0
    assert scratch_bytes(made.toposort()) == 16 * 64 * 4


def test_turning_a_tile_takes_shuffles_and_no_gathers():
    linear = generate(matmul(16, 64, 16, right=True), Device.get("CPU").target, parse_opts(BLOCKED)).linear
    moves = [u for u in linear.src if u.op in (Ops.LOAD, Ops.STORE)]
    assert any(u.op is Ops.SHUFFLE for u in linear.src)
    assert all(u.src[1].dtype.count == 1 for u in moves), "a gather or scatter"


def test_a_conversion_is_packed_with_its_read():
    i, j = loops(8, 32)
    (k,) = folds(2, 16)
    a = read(UOp(Ops.PARAM, dtypes.bfloat16, (), param(1, 128).arg), i * 16 + k).cast(dtypes.float32)
    ast = UOp.sink(
        store(param(0, 256), i * 32 + j, fold(Ops.ADD, a * read(param(2, 512), k * 32 + j), k), i, j)
    )
    values = reads_of(ast)
    assert {v.op for v in values} == {Ops.CAST, Ops.INDEX} and all(v.dtype is dtypes.float32 for v in values)


@pytest.mark.parametrize(
    ("opts", "why"),
    [
        ("STAGE axis 2 read 0", "is a REDUCE"),
        ("STAGE axis 0 read 7", "has 2 reads"),
        ("STAGE axis 0 read 1, STAGE axis 0 read 1", "staged already"),
        ("STAGE axis 0 read 1, UPCAST axis 1 by 8", "staged already"),
        ("ACCUMULATE axis 0 by 2", "is a LOOP"),
        ("ACCUMULATE axis 2 by 16", "more than one step"),
        ("ACCUMULATE axis 2 by 2, ACCUMULATE axis 2 by 2", "one axis"),
        ("ACCUMULATE axis 2 by 2, UPCAST axis 3 by 2", "one piece after another"),
        ("ACCUMULATE axis 2 by 2, SWAP axis 0 with 3, THREAD axis 0 by 0", "one piece after another"),
    ],
)
def test_illegal(opts, why):
    with pytest.raises(OptError, match=why):
        apply(matmul(16, 16, 16), parse_opts(opts), AVX512)


def test_scratch_has_a_limit():
    small = AVX512._replace(scratch_bytes=1000)
    with pytest.raises(OptError, match="bytes of scratch"):
        apply(matmul(16, 64, 16), parse_opts("STAGE axis 0 read 1"), small)


def test_a_row_sum_is_not_accumulated_where_the_result_is_read():
    ast = row_sum(8, 16)
    assert axes(apply(ast, [Opt(OptKind.ACCUMULATE, 1, 2)], AVX512))
    i, j = loops(4, 8)
    (k,) = folds(2, 6)
    total = fold(Ops.ADD, read(param(1, 24), i * 6 + k) * read(param(2, 48), k * 8 + j), k)
    in_place = UOp.sink(store(param(0, 32), i * 8 + j, total + read(param(0, 32), i * 8 + j), i, j))
    with pytest.raises(OptError, match="reads the old result"):
        apply(in_place, parse_opts("ACCUMULATE axis 2 by 2"), AVX512)


@pytest.mark.parametrize("target", [AVX512, SSE], ids=lambda t: t.key)
@pytest.mark.parametrize("shape", [(2, 16, 16, 9, 9, 3, 3), (1, 8, 24, 12, 12, 5, 5), (3, 4, 32, 8, 8, 1, 1)])
def test_blocked_convolutions_keep_their_values(shape, target):
    ast = conv(*shape)
    given_buffers = buffers_for(ast)
    made = apply(ast, choose(ast, target), target)
    for want, got in zip(outputs(ast, given_buffers), outputs(made, given_buffers), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_images_that_lie_alike_are_one_axis():
    """A 1x1 convolution walks pixels in both memories: columns are pixels of the whole image."""
    kinds = [opt.kind for opt in choose(conv(2, 64, 64, 14, 14, 1, 1), AVX512)]
    assert OptKind.STAGE in kinds


def test_narrow_images_fill_whole_vectors():
    """Rows of 20 pixels: tiles of four rows are five vectors, copied run by run."""
    ast = conv(2, 4, 32, 24, 24, 5, 5)
    opts = choose(ast, AVX512)
    assert OptKind.MERGE in {opt.kind for opt in opts}
    assert any(opt.kind is OptKind.UPCAST and opt.amount == 80 for opt in opts)
    given_buffers = buffers_for(ast)
    made = apply(ast, opts, AVX512)
    reads = [u for u in made.toposort() if u.op is Ops.INDEX and u.src[0].op is Ops.PARAM]
    assert not any(u.op in (Ops.FLOORDIV, Ops.FLOORMOD) for r in reads for u in r.src[1].toposort())
    for want, got in zip(outputs(ast, given_buffers), outputs(made, given_buffers), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_pixels_that_are_left_out_stay_rows():
    """With a stride, neighbours along merged rows would be gathered one by one; along a row they are two
    wide loads and a shuffle."""
    ast = conv(2, 64, 128, 55, 55, 1, 1, step=2)
    opts = choose(ast, AVX512)
    assert OptKind.MERGE not in {opt.kind for opt in opts}
    assert OptKind.STAGE in {opt.kind for opt in opts}
    given_buffers = buffers_for(ast)
    for want, got in zip(
        outputs(ast, given_buffers), outputs(apply(ast, opts, AVX512), given_buffers), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("multiplies", [1, 2])
def test_slower_products_count_for_more_than_copies(multiplies):
    """49 columns: vectors of them waste a quarter of the products, vectors of rows turn both operands."""
    opts = choose(matmul(512, 49, 1024), AVX512._replace(multiplies=multiplies))
    assert (OptKind.PADTO in {opt.kind for opt in opts}) == (multiplies == 2)


def test_scratch_beyond_what_a_task_has_is_refused_or_avoided():
    """A row of scratch from the schedule is legal; a tile of 16 rows of it is not."""
    i, j = loops(32, 64)
    (k,) = folds(2, 2048)
    x = read(param(1, 32 * 2048), i * 2048 + k)
    row = UOp(Ops.STAGE, dtypes.float32, (x * x, k), StageArg("local", 0))
    (n,) = folds(3, 2048)
    total = fold(Ops.ADD, UOp(Ops.INDEX, dtypes.float32, (row, n)) * read(param(2, 2048 * 64), n * 64 + j), n)
    ast = UOp.sink(store(param(0, 32 * 64), i * 64 + j, total, i, j))
    small = Device.get("CPU").target._replace(scratch_bytes=8192)
    with pytest.raises(OptError, match="of scratch"):
        generate(ast, small, parse_opts("UPCAST axis 0 by 16"))
    y, a, b = buffers_for(ast)
    got = values_of(generate(ast, small), "CPU", [y, a, b])[0].reshape(32, 64)
    np.testing.assert_allclose(got, a.reshape(32, 2048) ** 2 @ b.reshape(2048, 64), rtol=1e-3, atol=1e-3)


def test_work_items_never_share_a_sum_that_is_stored_in_pieces() -> None:
    """One of them would read what another has stored, with no barrier between."""
    ast = matmul(16, 16, 96)
    for opts in ("ACCUMULATE axis 2 by 3, GROUP axis 2 by 2", "GROUPTOP axis 2 by 2, ACCUMULATE axis 2 by 3"):
        with pytest.raises(OptError, match="leave ACCUMULATE out"):
            apply(ast, parse_opts(opts), GROUPS)
