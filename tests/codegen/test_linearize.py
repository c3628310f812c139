"""Linear programs evaluated one instruction at a time against NumPy, over many tilings; and what their
loops contain."""

from __future__ import annotations

import numpy as np
import pytest

from tests.codegen.linear_eval import LinearProgram
from whit.codegen.linearize import linearize
from whit.codegen.lower import bind_specials, group_reduces, nest_stores, prepare
from whit.codegen.opts import apply, parse_opts
from whit.codegen.target import Target
from whit.uop import AxisType, DType, Op, Ops, ParamArg, UOp, dtypes
from whit.uop.ops import all_ops
from whit.uop.spec import verify
from whit.uop.symbolic import simplify

TARGET = Target(
    "test", "python", vector_bytes=32, vector_registers=16, threads=4, native=frozenset(all_ops())
)
GPU = Target(
    "gpu",
    "python",
    vector_bytes=16,
    threads=1,
    has_local=True,
    local_bytes=1 << 15,
    max_local=256,
    native=frozenset(all_ops()),
)
SCALAR = Target("scalar", "python", vector_bytes=0, threads=1, native=frozenset(all_ops()))
f32, i32 = dtypes.float32, dtypes.int32
LOG2E = 1.4426950408889634


def param(slot: int, size: int, dtype: DType = f32) -> UOp:
    return UOp(Ops.PARAM, dtype, (), ParamArg(slot, size))


def read(p: UOp, index: UOp, valid: UOp | None = None) -> UOp:
    return UOp(Ops.INDEX, p.dtype, (p, index) if valid is None else (p, index, valid))


def write(p: UOp, index: UOp, value: UOp, *ranges: UOp, valid: UOp | None = None) -> UOp:
    return UOp(Ops.STORE, dtypes.void, (p, index, value, *([] if valid is None else [valid]))).end(*ranges)


def loop(size: int | UOp, uid: int) -> UOp:
    return UOp.range(size, AxisType.LOOP, uid)


def fold(size: int | UOp, uid: int) -> UOp:
    return UOp.range(size, AxisType.REDUCE, uid)


def program(ast: UOp, opts: str = "", target: Target = TARGET) -> UOp:
    ready = prepare(ast)
    verify(ready, "kernel")
    tiled = apply(ready, parse_opts(opts), target)
    verify(tiled, "tiled")
    lowered = simplify(nest_stores(bind_specials(group_reduces(tiled))))
    verify(lowered, "tiled")
    linear = linearize(lowered, target)
    verify(linear, "linear")
    return linear


def run(
    ast: UOp, out: np.ndarray, *inputs: np.ndarray, opts: str = "", target: Target = TARGET, **variables: int
) -> np.ndarray:
    LinearProgram(program(ast, opts, target))([out.reshape(-1), *[a.reshape(-1) for a in inputs]], variables)
    return out


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def close(got: np.ndarray, wanted: np.ndarray, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


def innermost(linear: UOp) -> list[UOp]:
    """The instructions of the deepest loop."""
    best: list[UOp] = []
    depth, deepest = 0, -1
    body: list[list[UOp]] = [[]]
    for node in linear.src:
        if node.op is Ops.RANGE:
            depth += 1
            body.append([])
        elif node.op is Ops.END:
            if depth > deepest:
                deepest, best = depth, body[-1]
            body.pop()
            depth -= 1
        else:
            body[-1].append(node)
    return best


def count(nodes: list[UOp], op: Op, lanes: int | None = None) -> int:
    return sum(n.op is op and (lanes is None or n.dtype.count == lanes) for n in nodes)


# ---- elementwise and movement ------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [TARGET, SCALAR])
@pytest.mark.parametrize(
    "opts",
    [
        "",
        "UPCAST axis 1 by 8",
        "UPCAST axis 1 by 32",
        "UPCAST axis 0 by 3, UPCAST axis 1 by 8",
        "UPCAST axis 0 by 0",
        "UPCAST axis 1 by 4",
        "UPCAST axis 1 by 2",
    ],
)
def test_elementwise(opts: str, target: Target) -> None:
    i, j = loop(6, 0), loop(32, 1)
    at = i * 32 + j
    ast = UOp.sink(
        write(param(0, 192), at, (read(param(1, 192), at) * 2.0 + read(param(2, 32), j)).maximum(0.0), i, j)
    )
    a, b = normal(6, 32), normal(32, seed=1)
    close(run(ast, np.empty((6, 32), np.float32), a, b, opts=opts, target=target), np.maximum(a * 2 + b, 0))


@pytest.mark.parametrize(
    "opts",
    [
        "THREAD axis 0 by 4",
        "THREAD axis 0 by 4, UPCAST axis 1 by 8",
        "MERGE axis 0 with 1, UPCAST axis 0 by 8",
    ],
)
def test_threads_and_merged_axes(opts: str) -> None:
    i, j = loop(8, 0), loop(24, 1)
    ast = UOp.sink(write(param(0, 192), i * 24 + j, -read(param(1, 192), i * 24 + j), i, j))
    a = normal(8, 24)
    close(run(ast, np.empty_like(a), a, opts=opts), -a)


@pytest.mark.parametrize("opts", ["", "UPCAST axis 1 by 8", "UPCAST axis 0 by 2, UPCAST axis 1 by 16"])
def test_flip_reads_forwards_and_shuffles(opts: str) -> None:
    i, j = loop(4, 0), loop(16, 1)
    ast = UOp.sink(write(param(0, 64), i * 16 + j, read(param(1, 64), i * 16 + 15 - j), i, j))
    a = normal(4, 16)
    close(run(ast, np.empty_like(a), a, opts=opts), a[:, ::-1])
    if opts:
        code = innermost(program(ast, opts))
        assert count(code, Ops.LOAD, 8) == count(code, Ops.SHUFFLE) > 0


@pytest.mark.parametrize("opts", ["", "UPCAST axis 1 by 8"])
def test_flip_of_the_output_and_masks(opts: str) -> None:
    j = loop(16, 1)
    i = loop(3, 0)
    valid = j.lt(13)
    ast = UOp.sink(write(param(0, 48), i * 16 + 15 - j, read(param(1, 39), i * 13 + j, valid), i, j))
    a = normal(3, 13)
    close(run(ast, np.empty((3, 16), np.float32), a, opts=opts), np.pad(a, ((0, 0), (0, 3)))[:, ::-1])
    back = UOp.sink(
        write(param(0, 48), i * 16 + j, read(param(1, 39), i * 13 + 12 - j, valid), i, j, valid=valid)
    )
    out = np.full((3, 16), 7, np.float32)
    close(run(back, out, a, opts=opts), np.concatenate([a[:, ::-1], np.full((3, 3), 7)], 1))


@pytest.mark.parametrize(
    "opts", ["", "UPCAST axis 0 by 8", "UPCAST axis 1 by 8", "UPCAST axis 0 by 4, UPCAST axis 1 by 8"]
)
def test_transpose(opts: str) -> None:
    i, j = loop(16, 0), loop(24, 1)
    ast = UOp.sink(write(param(0, 384), i * 24 + j, read(param(1, 384), j * 16 + i), i, j))
    a = normal(24, 16)
    close(run(ast, np.empty((16, 24), np.float32), a, opts=opts), a.T)


@pytest.mark.parametrize(
    "opts",
    [
        "",
        "UPCAST axis 0 by 8",
        "UPCAST axis 0 by 4",
        "UPCAST axis 0 by 0",
        "PADTO axis 0 to 16, UPCAST axis 0 by 16",
    ],
)
def test_division_that_the_tile_crosses(opts: str) -> None:
    """(i // 6, i % 6) of a flat axis whose tiles cross rows: lanes get their own addresses."""
    i = loop(24, 0)
    ast = UOp.sink(write(param(0, 24), i, read(param(1, 40), (i // 6) * 10 + i % 6 + 2), i))
    a = normal(4, 10)
    close(run(ast, np.empty(24, np.float32), a, opts=opts), a[:, 2:8].ravel())


@pytest.mark.parametrize("opts", ["", "UPCAST axis 0 by 8", "UPCAST axis 0 by 4"])
def test_repeat_and_negative_dividends(opts: str) -> None:
    i = loop(16, 0)
    ast = UOp.sink(
        write(
            param(0, 16),
            i,
            read(param(1, 8), (i - 5) % 8) + read(param(2, 8), i // 2) + read(param(3, 9), (i - 7) // 3 + 3),
            i,
        )
    )
    a, b, c = normal(8), normal(8, seed=1), normal(9, seed=2)
    n = np.arange(16)
    close(
        run(ast, np.empty(16, np.float32), a, b, c, opts=opts),
        a[(n - 5) % 8] + b[n // 2] + c[(n - 7) // 3 + 3],
    )


@pytest.mark.parametrize(
    "opts",
    [
        "",
        "UPCAST axis 0 by 8",
        "PADTO axis 0 to 8, UPCAST axis 0 by 8",
        "PADTO axis 0 to 4, THREAD axis 0 by 4",
    ],
)
@pytest.mark.parametrize("size", [1, 7, 13, 16])
def test_ragged_edges(size: int, opts: str) -> None:
    if size % 8 and opts == "UPCAST axis 0 by 8":
        return
    if size == 1:
        opts = ""
    i = loop(size, 0)
    ast = UOp.sink(write(param(0, size), i, read(param(1, size), i) + 1.0, i))
    a = normal(size)
    close(run(ast, np.empty(size, np.float32), a, opts=opts), a + 1)


@pytest.mark.parametrize(
    "opts",
    [
        "",
        "UPCAST axis 1 by 8",
        "UPCAST axis 1 by 0, UPCAST axis 0 by 2",
        "PADTO axis 1 to 24, UPCAST axis 1 by 24",
    ],
)
def test_padding(opts: str) -> None:
    i, j = loop(10, 0), loop(16, 1)
    inside = i.ge(1) & i.lt(9) & j.ge(3) & j.lt(14)
    ast = UOp.sink(write(param(0, 160), i * 16 + j, read(param(1, 88), (i - 1) * 11 + j - 3, inside), i, j))
    a = normal(8, 11)
    close(run(ast, np.empty((10, 16), np.float32), a, opts=opts), np.pad(a, ((1, 1), (3, 2))))


@pytest.mark.parametrize("opts", ["", "UPCAST axis 0 by 8"])
def test_one_element_under_a_mask_of_lanes(opts: str) -> None:
    """The element is outside of the buffer where no lane wants it."""
    i, j = loop(16, 0), loop(4, 1)
    valid = i.lt(5) & j.lt(3)
    ast = UOp.sink(write(param(0, 64), j * 16 + i, read(param(1, 3), j, valid), i, j))
    a = normal(3)
    wanted = np.zeros((4, 16), np.float32)
    wanted[:3, :5] = a[:, None]
    close(run(ast, np.empty((4, 16), np.float32), a, opts=opts), wanted)


@pytest.mark.parametrize(
    "opts", ["", "UPCAST axis 1 by 8", "UPCAST axis 0 by 2, UPCAST axis 1 by 8", "UPCAST axis 0 by 2"]
)
def test_arange_values(opts: str) -> None:
    i, j = loop(4, 0), loop(16, 1)
    number = i * 16 + j
    value = number.cast(f32) * 0.5 + (number % 5).cast(f32) + (UOp.index(3) - j).cast(dtypes.int8).cast(f32)
    ast = UOp.sink(write(param(0, 64), number, value, i, j))
    n = np.arange(64)
    close(run(ast, np.empty(64, np.float32), opts=opts), n * 0.5 + n % 5 + (3 - n % 16))


@pytest.mark.parametrize(
    "opts", ["", "UPCAST axis 1 by 8", "UPCAST axis 0 by 4", "UPCAST axis 0 by 2, UPCAST axis 1 by 8"]
)
def test_gather_rows(opts: str) -> None:
    """An embedding: the row comes from memory, the column is contiguous."""
    i, j = loop(8, 0), loop(16, 1)
    row = read(param(1, 8, i32), i).cast(dtypes.index)
    valid = row.ge(0) & row.lt(20)
    ast = UOp.sink(write(param(0, 128), i * 16 + j, read(param(2, 320), row * 16 + j, valid), i, j))
    rows, table = np.array([3, 0, 19, -1, 20, 7, 7, 2], np.int32), normal(20, 16)
    wanted = np.where(((rows >= 0) & (rows < 20))[:, None], table[np.clip(rows, 0, 19)], 0)
    close(run(ast, np.empty((8, 16), np.float32), rows, table, opts=opts), wanted)
    if opts == "UPCAST axis 1 by 8":
        assert count(innermost(program(ast, opts)), Ops.LOAD, 8) == 1


@pytest.mark.parametrize("opts", ["", "UPCAST axis 0 by 8", "UPCAST axis 0 by 4"])
def test_gather_elements_twice(opts: str) -> None:
    i = loop(16, 0)
    first = read(param(1, 16, i32), i).cast(dtypes.index)
    second = read(param(2, 32, i32), first * 2 + 1).cast(dtypes.index)
    ast = UOp.sink(write(param(0, 16), i, read(param(3, 64), second * 3 + i % 4), i))
    a = np.random.default_rng(0).integers(0, 16, 16, np.int32)
    b = np.random.default_rng(1).integers(0, 20, 32, np.int32)
    c = normal(64)
    close(run(ast, np.empty(16, np.float32), a, b, c, opts=opts), c[b[a * 2 + 1] * 3 + np.arange(16) % 4])


@pytest.mark.parametrize("opts", ["", "UPCAST axis 0 by 8", "UPCAST axis 0 by 4"])
def test_scatter_by_stride(opts: str) -> None:
    i = loop(16, 0)
    ast = UOp.sink(write(param(0, 33), i * 2 + 1, read(param(1, 48), i * 3 + 2), i))
    a = normal(16, 3)
    out = run(ast, np.zeros(33, np.float32), a, opts=opts)
    close(out[1::2], a[:, 2])
    assert not out[::2].any()


@pytest.mark.parametrize("opts", ["", "UPCAST axis 0 by 8", "UPCAST axis 0 by 16"])
def test_mixed_dtypes(opts: str) -> None:
    i = loop(32, 0)
    a, b = param(1, 32, dtypes.uint8), param(2, 32, dtypes.float64)
    value = (read(a, i).cast(dtypes.float64) * read(b, i)).lt(UOp.const(10.0, dtypes.float64))
    ast = UOp.sink(write(param(0, 32, dtypes.bool), i, value, i))
    x = np.random.default_rng(0).integers(0, 50, 32).astype(np.uint8)
    y = np.random.default_rng(1).standard_normal(32)
    np.testing.assert_array_equal(run(ast, np.empty(32, np.bool_), x, y, opts=opts), x * y < 10)


# ---- reductions --------------------------------------------------------------------------------------------

TILES = [
    "",
    "UPCAST axis 0 by 4, UPCAST axis 1 by 16",
    "UPCAST axis 1 by 8",
    "UPCAST axis 0 by 4",
    "UNROLL axis 2 by 8",
    "UPCAST axis 0 by 2, UNROLL axis 2 by 4",
    "UPCAST axis 1 by 8, UNROLL axis 2 by 0",
    "PADTO axis 0 to 3, PADTO axis 1 to 24, PADTO axis 2 to 5, UPCAST axis 0 by 3, UPCAST axis 1 by 24, "
    "UNROLL axis 2 by 5", "SPLIT axis 2 by 8, UPCAST axis 0 by 2, UPCAST axis 1 by 8",
    "THREAD axis 0 by 4, UPCAST axis 1 by 16, UPCAST axis 0 by 2",
    "SWAP axis 0 with 1, THREAD axis 0 by 4",
]


@pytest.mark.parametrize("opts", TILES)
@pytest.mark.parametrize("transposed", [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_matmul(opts: str, transposed: tuple[int, int]) -> None:
    m, n, k = 8, 32, 16
    i, j, q = loop(m, 0), loop(n, 1), fold(k, 2)
    left = q * m + i if transposed[0] else i * k + q
    right = j * k + q if transposed[1] else q * n + j
    product = read(param(1, m * k), left) * read(param(2, k * n), right)
    ast = UOp.sink(write(param(0, m * n), i * n + j, product.reduce_ranges(Ops.ADD, q).maximum(0.0), i, j))
    a, b = normal(m, k), normal(k, n, seed=1)
    inputs = [np.ascontiguousarray(x.T) if t else x for x, t in zip((a, b), transposed, strict=True)]
    close(run(ast, np.empty((m, n), np.float32), *inputs, opts=opts), np.maximum(a @ b, 0))


def test_matmul_inner_loop() -> None:
    """A 4 x 16 tile: two vector loads, four scalars broadcast, eight multiply-adds, and one moving base
    per operand."""
    i, j, q = loop(64, 0), loop(64, 1), fold(64, 2)
    product = read(param(1, 4096), i * 64 + q) * read(param(2, 4096), q * 64 + j)
    ast = UOp.sink(write(param(0, 4096), i * 64 + j, product.reduce_ranges(Ops.ADD, q), i, j))
    body = innermost(program(ast, "UPCAST axis 0 by 4, UPCAST axis 1 by 16"))
    assert count(body, Ops.LOAD, 8) == 2
    assert count(body, Ops.LOAD, 1) == count(body, Ops.BROADCAST) == 4
    assert count(body, Ops.MULACC, 8) == count(body, Ops.SET) == 8
    assert count(body, Ops.MUL) == 1  # q * 64, the row of the right operand
    moving = [n for n in body if n.op is Ops.ADD and n.src[1].op is not Ops.CONST]
    assert len(moving) == 2  # one base per operand; the rest are constant offsets
    assert {n.op for n in body} == {Ops.LOAD, Ops.BROADCAST, Ops.MULACC, Ops.SET, Ops.MUL, Ops.ADD}


def test_independent_accumulators() -> None:
    """A dot product of one vector keeps eight sums going and combines them after the loop."""
    q = fold(1024, 0)
    ast = UOp.sink(
        write(
            param(0, 1),
            UOp.index(0),
            (read(param(1, 1024), q) * read(param(2, 1024), q)).reduce_ranges(Ops.ADD, q),
        )
    )
    linear = program(ast, "UNROLL axis 0 by 64")
    assert count(list(linear.src), Ops.REG, 8) == 8
    assert count(innermost(linear), Ops.MULACC, 8) == 8
    assert count(list(linear.src), Ops.FOLD) == 1
    a, b = normal(1024), normal(1024, seed=1)
    close(run(ast, np.empty(1, np.float32), a, b, opts="UNROLL axis 0 by 64"), np.array([a @ b]), 1e-3)


@pytest.mark.parametrize(
    "opts",
    [
        "",
        "UPCAST axis 0 by 4",
        "UPCAST axis 0 by 8",
        "UNROLL axis 1 by 8",
        "UNROLL axis 1 by 16",
        "UNROLL axis 1 by 0",
        "UPCAST axis 0 by 2, UNROLL axis 1 by 8",
        "PADTO axis 1 to 32, UNROLL axis 1 by 32",
    ],
)
@pytest.mark.parametrize(
    "op, fn", [(Ops.ADD, np.sum), (Ops.MUL, np.prod), (Ops.MAX, np.max), (Ops.MIN, np.min)]
)
@pytest.mark.parametrize("dtype, np_dtype", [(f32, np.float32), (i32, np.int32)])
def test_reduce_rows(op: Op, fn: object, opts: str, dtype: DType, np_dtype: type) -> None:
    i, k = loop(8, 0), fold(48, 1)
    ast = UOp.sink(
        write(param(0, 8, dtype), i, read(param(1, 384, dtype), i * 48 + k).reduce_ranges(op, k), i)
    )
    a = np.random.default_rng(0).uniform(-3, 3, (8, 48)).astype(np_dtype)
    close(
        run(ast, np.empty(8, np_dtype), a, opts=opts),
        fn(a, axis=1, dtype=np_dtype) if op in (Ops.ADD, Ops.MUL) else fn(a, axis=1),
        1e-4,
    )


@pytest.mark.parametrize(
    "opts", ["", "UPCAST axis 0 by 8", "UNROLL axis 1 by 4", "UPCAST axis 0 by 16, UNROLL axis 1 by 2"]
)
def test_reduce_columns_and_bool(opts: str) -> None:
    i, k = loop(16, 0), fold(12, 1)
    found = read(param(1, 192), k * 16 + i).lt(UOp.const(-1.5, f32))
    ast = UOp.sink(write(param(0, 16, dtypes.bool), i, found.reduce_ranges(Ops.MAX, k), i))
    a = normal(12, 16)
    np.testing.assert_array_equal(run(ast, np.empty(16, np.bool_), a, opts=opts), (a < -1.5).any(0))


def softmax(rows: int, columns: int) -> UOp:
    i, j, k, l = loop(rows, 0), loop(columns, 1), fold(columns, 2), fold(columns, 3)
    x = param(1, rows * columns)
    top = read(x, i * columns + k).reduce_ranges(Ops.MAX, k)
    total = ((read(x, i * columns + l) - top) * LOG2E).alu(Ops.EXP2).reduce_ranges(Ops.ADD, l)
    value = ((read(x, i * columns + j) - top) * LOG2E).alu(Ops.EXP2) * total.alu(Ops.RECIPROCAL)
    return UOp.sink(write(param(0, rows * columns), i * columns + j, value, i, j))


@pytest.mark.parametrize(
    "opts",
    [
        "",
        "UPCAST axis 1 by 13, UNROLL axis 2 by 13",
        "UPCAST axis 0 by 2",
        "PADTO axis 1 to 16, UPCAST axis 1 by 16, PADTO axis 2 to 8, UNROLL axis 2 by 8, "
        "PADTO axis 3 to 32, UNROLL axis 3 by 32, THREAD axis 0 by 3",
    ],
)
def test_softmax(opts: str) -> None:
    a = normal(6, 65) * 10
    e = np.exp((a - a.max(1, keepdims=True)).astype(np.float64))
    close(run(softmax(6, 65), np.empty_like(a), a, opts=opts), e / e.sum(1, keepdims=True))


def test_softmax_loops_stand_side_by_side() -> None:
    """The maximum and the sum are computed once a row, not once an element."""
    depth, shape = 0, []
    for node in program(softmax(6, 65)).src:
        if node.op is Ops.RANGE:
            shape.append(depth)
            depth += 1
        depth -= node.op is Ops.END
    assert shape == [0, 1, 1, 1]


def test_mean_and_variance_share_one_loop() -> None:
    i, k, l = loop(4, 0), fold(32, 1), fold(32, 2)
    x = param(1, 128)
    mean = read(x, i * 32 + k).reduce_ranges(Ops.ADD, k) * (1 / 32)
    square = (read(x, i * 32 + l) * read(x, i * 32 + l)).reduce_ranges(Ops.ADD, l) * (1 / 32)
    ast = UOp.sink(write(param(0, 4), i, square - mean * mean, i))
    a = normal(4, 32)
    for opts in ("", "UNROLL axis 1 by 8", "UPCAST axis 0 by 4, UNROLL axis 1 by 16"):
        close(run(ast, np.empty(4, np.float32), a, opts=opts), a.var(1), 1e-4)
        assert count(list(program(ast, opts).src), Ops.RANGE) == 1 + (opts[:6] != "UPCAST")


def test_dependent_reductions_over_one_range_get_two_loops() -> None:
    i, k = loop(4, 0), fold(32, 1)
    x = param(1, 128)
    mean = read(x, i * 32 + k).reduce_ranges(Ops.ADD, k) * (1 / 32)
    off = read(x, i * 32 + k) - mean
    ast = UOp.sink(write(param(0, 4), i, (off * off).reduce_ranges(Ops.ADD, k), i))
    a = normal(4, 32)
    close(run(ast, np.empty(4, np.float32), a), a.var(1) * 32, 1e-4)


@pytest.mark.parametrize("opts", ["", "UPCAST axis 0 by 4", "UNROLL axis 1 by 8", "UNROLL axis 1 by 0"])
def test_sum_of_what_does_not_change(opts: str) -> None:
    """The folded value stands outside of the loop, and is used again after it."""
    i, k = loop(4, 0), fold(24, 1)
    x = read(param(1, 4), i)
    ast = UOp.sink(write(param(0, 4), i, x.reduce_ranges(Ops.ADD, k) + x, i))
    a = normal(4)
    close(run(ast, np.empty(4, np.float32), a, opts=opts), a * 25)


def test_factor_moves_out_of_the_sum() -> None:
    i, k = loop(4, 0), fold(24, 1)
    scaled = read(param(1, 96), i * 24 + k) * read(param(2, 4), i)
    ast = UOp.sink(write(param(0, 4), i, scaled.reduce_ranges(Ops.ADD, k), i))
    assert count(innermost(program(ast)), Ops.MUL) == 0
    a, b = normal(4, 24), normal(4, seed=1)
    close(run(ast, np.empty(4, np.float32), a, b), a.sum(1) * b)


def test_nested_reductions() -> None:
    """sum_k (max_l x[i, k, l]) * y[k]"""
    i, k, l = loop(4, 0), fold(6, 1), fold(8, 2)
    inner = read(param(1, 192), i * 48 + k * 8 + l).reduce_ranges(Ops.MAX, l)
    ast = UOp.sink(write(param(0, 4), i, (inner * read(param(2, 6), k)).reduce_ranges(Ops.ADD, k), i))
    a, b = normal(4, 6, 8), normal(6, seed=1)
    for opts in (
        "",
        "UPCAST axis 0 by 2",
        "UNROLL axis 2 by 0",
        "UNROLL axis 1 by 3, UNROLL axis 2 by 8",
        "UNROLL axis 1 by 0",
    ):
        close(run(ast, np.empty(4, np.float32), a, b, opts=opts), a.max(2) @ b)


@pytest.mark.parametrize(
    "opts",
    [
        "",
        "UPCAST axis 1 by 4, UPCAST axis 3 by 4",
        "UPCAST axis 3 by 8, UNROLL axis 6 by 0",
        "UPCAST axis 1 by 2, UPCAST axis 3 by 8, UNROLL axis 5 by 0, UNROLL axis 6 by 0",
        "MERGE axis 2 with 3, UPCAST axis 2 by 16, UPCAST axis 1 by 4",
    ],
)
def test_convolution_with_padding(opts: str) -> None:
    batch, cout, cin, size = 1, 4, 2, 8
    b, o, y, x = (loop(n, uid) for uid, n in enumerate((batch, cout, size, size)))
    c, p, q = fold(cin, 4), fold(3, 5), fold(3, 6)
    yy, xx = y + p - 1, x + q - 1
    valid = yy.ge(0) & yy.lt(size) & xx.ge(0) & xx.lt(size)
    image = read(param(1, batch * cin * 64), ((b * cin + c) * size + yy) * size + xx, valid)
    weight = read(param(2, cout * cin * 9), ((o * cin + c) * 3 + p) * 3 + q)
    total = (image * weight).reduce_ranges(Ops.ADD, c, p, q) + read(param(3, cout), o)
    ast = UOp.sink(
        write(
            param(0, batch * cout * 64),
            ((b * cout + o) * size + y) * size + x,
            total.maximum(0.0),
            b,
            o,
            y,
            x,
        )
    )
    image_values, weights, bias = (
        normal(batch, cin, size, size),
        normal(cout, cin, 3, 3, seed=1),
        normal(cout, seed=2),
    )
    padded = np.pad(image_values, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    wanted = np.maximum(np.einsum("bcyxpq,ocpq->boyx", windows, weights) + bias[:, None, None], 0)
    close(
        run(ast, np.empty((batch, cout, size, size), np.float32), image_values, weights, bias, opts=opts),
        wanted,
        1e-4,
    )


# ---- work-groups -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "opts",
    [
        "GROUP axis 1 by 4",
        "GROUPTOP axis 1 by 8",
        "GROUP axis 1 by 0",
        "UPCAST axis 0 by 4, GROUPTOP axis 1 by 4",
        "LOCAL axis 0 by 2, GROUP axis 1 by 4",
        "UPCAST axis 0 by 2, GROUPTOP axis 1 by 4, UNROLL axis 1 by 4",
        "LOCAL axis 0 by 4, LOCAL axis 0 by 2, GROUPTOP axis 1 by 2, GROUPTOP axis 1 by 3",
    ],
)
@pytest.mark.parametrize("op, fn", [(Ops.ADD, np.sum), (Ops.MAX, np.max)])
def test_group_reduce(op: Op, fn: object, opts: str) -> None:
    i, k = loop(8, 0), fold(48, 1)
    ast = UOp.sink(write(param(0, 8), i, read(param(1, 384), i * 48 + k).reduce_ranges(op, k) * 2.0, i))
    a = normal(8, 48)
    close(run(ast, np.empty(8, np.float32), a, opts=opts, target=GPU), fn(a, axis=1) * 2, 1e-4)


@pytest.mark.parametrize(
    "opts",
    [
        "GROUP axis 2 by 5",
        "GROUP axis 2 by 5, GROUP axis 3 by 13",
        "LOCAL axis 1 by 13, GROUP axis 2 by 5",
        "LOCAL axis 0 by 2, LOCAL axis 1 by 5, GROUPTOP axis 3 by 5",
    ],
)
def test_group_reduce_inside_softmax(opts: str) -> None:
    """Every row reuses the scratch memory, and work-items that do not take part in a reduction stay out of
    it."""
    a = normal(2, 65) * 10
    e = np.exp((a - a.max(1, keepdims=True)).astype(np.float64))
    close(run(softmax(2, 65), np.empty_like(a), a, opts=opts, target=GPU), e / e.sum(1, keepdims=True))


# ---- several stores, variables, edges ----------------------------------------------------------------------


@pytest.mark.parametrize("opts", ["", "UPCAST axis 0 by 8", "UPCAST axis 0 by 16, THREAD axis 0 by 2"])
def test_stores_in_place_share_a_loop(opts: str) -> None:
    """An optimiser's step: two buffers are read and written at the same element."""
    i = loop(32, 0)
    weight, momentum = param(0, 32), param(1, 32)
    new = read(momentum, i) * 0.9 + read(param(2, 32), i)
    ast = UOp.sink(write(momentum, i, new, i), write(weight, i, read(weight, i) - new * 0.1, i))
    assert count(list(program(ast).src), Ops.RANGE) == 1
    w, m, g = normal(32), normal(32, seed=1), normal(32, seed=2)
    wanted = m * 0.9 + g
    got_w, got_m = w.copy(), m.copy()
    LinearProgram(program(ast, opts))([got_w, got_m, g])
    close(got_m, wanted)
    close(got_w, w - wanted * 0.1)


def test_stores_of_different_depth() -> None:
    i, j, k = loop(4, 0), loop(16, 1), fold(16, 2)
    x = param(2, 64)
    total = read(x, i * 16 + k).reduce_ranges(Ops.ADD, k)
    ast = UOp.sink(
        write(param(0, 4), i, total, i), write(param(1, 64), i * 16 + j, read(x, i * 16 + j) - total, i, j)
    )
    a = normal(4, 16)
    for opts in ("", "UPCAST axis 1 by 8, UNROLL axis 2 by 16", "UPCAST axis 0 by 2", "THREAD axis 0 by 2"):
        sums, rest = np.empty(4, np.float32), np.empty(64, np.float32)
        LinearProgram(program(ast, opts))([sums, rest, a.ravel()])
        close(sums, a.sum(1))
        close(rest.reshape(4, 16), a - a.sum(1, keepdims=True))


def test_symbolic_sizes() -> None:
    n, start = UOp.variable("n", 1, 64), UOp.variable("start", 0, 100)
    i, k = loop(8, 0), fold(n, 1)
    ast = UOp.sink(
        write(param(0, 8), i, read(param(1, 1000), i * n + k + start).reduce_ranges(Ops.ADD, k), i)
    )
    data = normal(1000)
    for opts in ("", "UPCAST axis 0 by 8"):
        for size, first in ((1, 0), (5, 17), (64, 100)):
            got = run(ast, np.empty(8, np.float32), data, opts=opts, n=size, start=first)
            close(got, data[first : first + 8 * size].reshape(8, size).sum(1), 1e-4)


def test_empty_reduction_and_empty_output() -> None:
    i, k = loop(4, 0), fold(0, 1)
    ast = UOp.sink(write(param(0, 4), i, read(param(1, 1), i * 0 + k).reduce_ranges(Ops.MAX, k), i))
    assert (run(ast, np.zeros(4, np.float32), normal(1)) == -np.inf).all()
    none = loop(0, 0)
    ast = UOp.sink(write(param(0, 1), none, read(param(1, 1), none), none))
    assert run(ast, np.full(1, 5, np.float32), normal(1)) == 5


def test_constants_and_scalars() -> None:
    ast = UOp.sink(write(param(0, 1), UOp.index(0), read(param(1, 1), UOp.index(0)) * 3.0))
    close(run(ast, np.empty(1, np.float32), np.array([2], np.float32)), np.array([6]))
    i = loop(16, 0)
    ast = UOp.sink(write(param(0, 16), i, UOp.const(2.5, f32), i))
    for opts in ("", "UPCAST axis 0 by 8"):
        close(run(ast, np.empty(16, np.float32), opts=opts), np.full(16, 2.5))


def test_deep_expressions() -> None:
    """Nothing recurses: a chain of 3000 operations."""
    i = loop(8, 0)
    value = read(param(1, 8), i)
    for _ in range(1500):
        value = (value + 1.0).maximum(0.5)
    ast = UOp.sink(write(param(0, 8), i, value, i))
    close(
        run(ast, np.empty(8, np.float32), np.zeros(8, np.float32), opts="UPCAST axis 0 by 8"),
        np.full(8, 1500),
    )


def test_operands_come_before_their_users() -> None:
    for opts in TILES:
        i, j, q = loop(8, 0), loop(32, 1), fold(16, 2)
        product = read(param(1, 128), i * 16 + q) * read(param(2, 512), q * 32 + j)
        ast = UOp.sink(write(param(0, 256), i * 32 + j, product.reduce_ranges(Ops.ADD, q), i, j))
        seen: set[UOp] = set()
        for node in program(ast, opts).src:
            assert all(s in seen or s.op is Ops.CONST for s in node.src), (
                f"{node} comes before an operand ({opts})"
            )
            assert node not in seen, f"{node} stands twice ({opts})"
            seen.add(node)


@pytest.mark.parametrize("opts", ["", "UPCAST axis 0 by 32", "PADTO axis 0 to 64, UPCAST axis 0 by 64"])
def test_bools_fill_a_register(opts: str) -> None:
    """A bool is a byte: 32 lanes in 32 bytes."""
    i = loop(96, 0)
    a, b = (read(param(n, 96, dtypes.bool), i) for n in (1, 2))
    ast = UOp.sink(write(param(0, 96, dtypes.bool), i, (a & b) ^ a, i))
    x, y = (np.random.default_rng(n).integers(0, 2, 96).astype(np.bool_) for n in (0, 1))
    np.testing.assert_array_equal(run(ast, np.empty(96, np.bool_), x, y, opts=opts), (x & y) ^ x)
    if opts:
        assert count(list(program(ast, opts).src), Ops.LOAD, 32) > 0
