"""Memory, masks, loops, reductions, gathers, in-place writes, variables, tiles, tasks and groups on every
device."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.device.kernels import DEVICES, NUMPY, Array, contents, fold, loop, param, read, run, write
from whit.codegen.opts import OptError
from whit.helpers import DeviceError
from whit.runtime.device import Buffer, Device, PlanCall
from whit.uop import DType, Ops, ReduceArg, UOp, dtypes
from whit.uop.uop import alu

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"),
              pytest.mark.parametrize("device", DEVICES)]
F32 = dtypes.float32
GROUPED = ["PYTHON"]  # devices with work-items, shared scratch and barriers
RNG = np.random.default_rng(0)


def data(*shape: int) -> Array:
    return RNG.normal(size=shape).astype(np.float32)


# ---- memory


@pytest.mark.parametrize("nbytes", [1, 7, 64, 4096, 1 << 20])
def test_copies_come_back(device: str, nbytes: int) -> None:
    x = RNG.integers(0, 256, nbytes, dtype=np.uint8)
    memory = Buffer(device, nbytes)
    assert not memory.is_allocated
    memory.copyin(memoryview(x))
    np.testing.assert_array_equal(contents(memory, x), x)


def test_views_are_windows(device: str) -> None:
    memory = Buffer(device, 40)
    memory.copyin(memoryview(np.arange(10, dtype=np.int32)).cast("B"))
    window = memory.view(8, 12).view(4, 8)
    assert np.frombuffer(window.copyout(), np.int32).tolist() == [3, 4]
    window.copyin(memoryview(np.array([-3, -4], np.int32)).cast("B"))
    assert np.frombuffer(memory.copyout(), np.int32).tolist() == [0, 1, 2, -3, -4, 5, 6, 7, 8, 9]


def test_memory_given_back_is_not_memory_in_use(device: str) -> None:
    kept = Buffer(device, 64)
    kept.copyin(memoryview(bytes(range(64))))
    for _ in range(20):
        other = Buffer(device, 64)
        other.copyin(memoryview(bytes(64)))
        del other
    assert bytes(kept.copyout()) == bytes(range(64))


def test_empty_copies(device: str) -> None:
    memory = Buffer(device, 0)
    memory.copyin(memoryview(b""))
    assert memory.copyout() == bytearray()


def test_plans_run_in_order(device: str) -> None:
    """x -> x + 1 -> (x + 1) * 2, twice over the same table of handles."""
    runtime = Device.get(device)
    programs = []
    for step in (lambda v: v + 1.0, lambda v: v * 2.0):
        i = loop(5, 0)
        programs.append(loaded(device,
                               UOp.sink(write(param(0, 5, F32), i, step(read(param(1, 5, F32), i))).end(i))))
    plan = runtime.plan([PlanCall(programs[0], (1, 0), ()), PlanCall(programs[1], (2, 1), ())])
    buffers = [Buffer(device, 20) for _ in range(3)]
    for start in (0.0, 5.0):
        buffers[0].copyin(memoryview(np.full(5, start, np.float32)).cast("B"))
        plan.run([b.handle for b in buffers], [])
        runtime.synchronize()
        assert np.frombuffer(buffers[2].copyout(), np.float32).tolist() == [(start + 1) * 2] * 5


def loaded(device: str, ast: UOp) -> Any:
    from whit.codegen import generate
    from whit.runtime.device import Launch
    runtime = Device.get(device)
    made = generate(ast, runtime.target, ())
    return runtime.load(runtime.compile(runtime.render(made.linear, made.name), made.name), made.name,
                        Launch(made.tasks, made.global_size, made.local_size))


# ---- loops and masks


def test_transposition(device: str) -> None:
    i, j = loop(5, 0), loop(7, 1)
    sink = UOp.sink(write(param(0, 35, F32), i * 7 + j, read(param(1, 35, F32), j * 5 + i)).end(i, j))
    x = data(7, 5)
    np.testing.assert_array_equal(run(device, sink, [np.zeros((5, 7), np.float32), x])[0], x.T)


@pytest.mark.parametrize("opts", [(), ("PADTO axis 0 to 4", "UPCAST axis 0 by 4"), None],
                         ids=["plain", "tiled", "chosen"])
def test_masked_reads_give_zero_and_touch_nothing(device: str, opts: Any) -> None:
    """Padding: three zeros before, four after; the buffer has only 6 elements."""
    i = loop(13, 0)
    inside = i.ge(3) & i.lt(9)
    sink = UOp.sink(write(param(0, 13, F32), i, read(param(1, 6, F32), i - 3, inside)).end(i))
    x = data(6)
    np.testing.assert_array_equal(run(device, sink, [np.ones(13, np.float32), x], opts)[0], np.pad(x, (3, 4)))


@pytest.mark.parametrize("opts", [(), ("UPCAST axis 0 by 4",), None], ids=["plain", "tiled", "chosen"])
def test_masked_writes_leave_the_rest(device: str, opts: Any) -> None:
    i = loop(16, 0)
    valid = (i % 3).not_equal(0) & i.lt(14)
    sink = UOp.sink(write(param(0, 16, F32), i, read(param(1, 16, F32), i), valid).end(i))
    x, kept = data(16), np.full(16, 9, np.float32)
    where = np.arange(16)
    expected = np.where((where % 3 != 0) & (where < 14), x, kept)
    np.testing.assert_array_equal(run(device, sink, [kept, x], opts)[0], expected)


def test_several_stores_of_several_sizes(device: str) -> None:
    i, j = loop(6, 0), loop(3, 1)
    x = read(param(3, 6, F32), i)
    sink = UOp.sink(write(param(0, 6, F32), i, x + 1.0).end(i), write(param(1, 6, F32), i, x * 2.0).end(i),
                    write(param(2, 3, F32), j, read(param(3, 6, F32), j * 2)).end(j))
    values = data(6)
    outputs = [np.zeros(6, np.float32), np.zeros(6, np.float32), np.zeros(3, np.float32)]
    a, b, c, _ = run(device, sink, [*outputs, values], None)
    np.testing.assert_array_equal(a, values + 1)
    np.testing.assert_array_equal(b, values * 2)
    np.testing.assert_array_equal(c, values[::2])


def test_index_values_are_data(device: str) -> None:
    """arange: the loop counter as an integer and as a float."""
    i = loop(40, 0)
    sink = UOp.sink(write(param(0, 40, dtypes.int32), i, (i * 3 - 50).cast(dtypes.int32)).end(i),
                    write(param(1, 40, F32), i, i.cast(F32) * 0.5).end(i))
    a, b = run(device, sink, [np.zeros(40, np.int32), np.zeros(40, np.float32)], None)
    np.testing.assert_array_equal(a, np.arange(40) * 3 - 50)
    np.testing.assert_array_equal(b, np.arange(40, dtype=np.float32) / 2)


def test_floor_division_of_negative_addresses(device: str) -> None:
    i = loop(20, 0)
    quotient, rest = alu(Ops.FLOORDIV, i - 10, UOp.index(3)), alu(Ops.FLOORMOD, i - 10, UOp.index(3))
    sink = UOp.sink(write(param(0, 20, dtypes.int64), i, (quotient * 10 + rest).cast(dtypes.int64)).end(i))
    where = np.arange(20) - 10
    np.testing.assert_array_equal(run(device, sink, [np.zeros(20, np.int64)], None)[0],
                                  where // 3 * 10 + where % 3)


# ---- reductions


FOLDS = {Ops.ADD: np.sum, Ops.MUL: np.prod, Ops.MAX: np.max, Ops.MIN: np.min}


@pytest.mark.parametrize("opts", [(), None], ids=["plain", "chosen"])
@pytest.mark.parametrize("dtype", [dtypes.int32, dtypes.uint8, dtypes.int64, F32, dtypes.float64],
                         ids=lambda d: d.name)
def test_reductions(device: str, dtype: DType, opts: Any) -> None:
    kind, stores = NUMPY[dtype], []
    for n, op in enumerate(FOLDS):
        i, k = loop(3, 2 * n), fold(29, 2 * n + 1)
        total = read(param(4, 87, dtype), i * 29 + k).reduce_ranges(op, k)
        stores.append(write(param(n, 3, dtype), i, total).end(i))
    x = (RNG.normal(size=(3, 29)) * 9 + 10).astype(kind)
    results = run(device, UOp.sink(*stores), [*[np.zeros(3, kind) for _ in FOLDS], x], opts)
    for (op, function), got in zip(FOLDS.items(), results, strict=False):
        expected = function(x, axis=1, **({"dtype": kind} if op in (Ops.ADD, Ops.MUL) else {}))
        rtol = 0 if not dtype.is_float else 1e-5 if dtype is F32 else 1e-13
        np.testing.assert_allclose(got, expected, rtol=rtol, err_msg=op.name)


@pytest.mark.parametrize("opts", [(), None], ids=["plain", "chosen"])
def test_extremes_of_nan_and_infinity(device: str, opts: Any) -> None:
    i, k = loop(4, 0), fold(37, 1)
    x = data(4, 37)
    x[0, 17] = np.nan
    x[1, 3], x[1, 30] = np.inf, -np.inf
    x[2] = -np.inf
    value = read(param(2, 148, F32), i * 37 + k)
    sink = UOp.sink(write(param(0, 4, F32), i, value.reduce_ranges(Ops.MAX, k)).end(i),
                    write(param(1, 4, F32), i, value.reduce_ranges(Ops.MIN, k)).end(i))
    high, low, _ = run(device, sink, [np.zeros(4, np.float32), np.zeros(4, np.float32), x], opts)
    np.testing.assert_array_equal(high, x.max(axis=1))
    np.testing.assert_array_equal(low, x.min(axis=1))


def test_reductions_of_bools(device: str) -> None:
    i, k = loop(4, 0), fold(9, 1)
    x = RNG.random((4, 9)) < 0.1
    x[0], x[1] = True, False
    value = read(param(2, 36, dtypes.bool), i * 9 + k)
    sink = UOp.sink(write(param(0, 4, dtypes.bool), i, value.reduce_ranges(Ops.MAX, k)).end(i),
                    write(param(1, 4, dtypes.bool), i, value.reduce_ranges(Ops.MIN, k)).end(i))
    some, every, _ = run(device, sink, [np.zeros(4, bool), np.zeros(4, bool), x], None)
    np.testing.assert_array_equal(some, x.any(axis=1))
    np.testing.assert_array_equal(every, x.all(axis=1))


MATMUL_OPTS: list[Any] = [(), ("UPCAST axis 1 by 4", "UNROLL axis 2 by 2"),
                          ("PADTO axis 1 to 16", "UPCAST axis 1 by 16", "PADTO axis 0 to 2",
                          "UPCAST axis 0 by 2"), None]


@pytest.mark.parametrize("opts", MATMUL_OPTS, ids=["plain", "tiled", "ragged", "chosen"])
@pytest.mark.parametrize("dtype", [F32, dtypes.float64, dtypes.int32], ids=lambda d: d.name)
def test_matrix_product(device: str, dtype: DType, opts: Any) -> None:
    m, n, size = 5, 12, 18
    i, j, k = loop(m, 0), loop(n, 1), fold(size, 2)
    product = read(param(1, m * size, dtype), i * size + k) * read(param(2, size * n, dtype), k * n + j)
    total = product.reduce_ranges(Ops.ADD, k)
    sink = UOp.sink(write(param(0, m * n, dtype), i * n + j, total).end(i, j))
    a, b = [(RNG.normal(size=shape) * 5).astype(NUMPY[dtype]) for shape in ((m, size), (size, n))]
    got = run(device, sink, [np.zeros((m, n), NUMPY[dtype]), a, b], opts)[0]
    np.testing.assert_allclose(got, a @ b, rtol=1e-4, atol=1e-4 if dtype.is_float else 0)


@pytest.mark.parametrize("opts", [(), None], ids=["plain", "chosen"])
def test_softmax_in_one_kernel(device: str, opts: Any) -> None:
    rows, columns = 6, 65
    i, j, k, m = loop(rows, 0), loop(columns, 1), fold(columns, 2), fold(columns, 3)
    source = param(1, rows * columns, F32)

    def power(r: UOp) -> UOp:
        return alu(Ops.EXP2, (read(source, i * columns + r) - greatest) * 1.4426950408889634)
    greatest = read(source, i * columns + k).reduce_ranges(Ops.MAX, k)
    value = power(j) * alu(Ops.RECIPROCAL, power(m).reduce_ranges(Ops.ADD, m))
    sink = UOp.sink(write(param(0, rows * columns, F32), i * columns + j, value).end(i, j))
    x = data(rows, columns) * 5
    e = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    got = run(device, sink, [np.zeros((rows, columns), np.float32), x], opts)[0]
    np.testing.assert_allclose(got, e / e.sum(axis=1, keepdims=True), rtol=1e-5)


def test_convolution(device: str) -> None:
    """Windows with padding by masks: reads outside of the row are 0."""
    o, w = loop(20, 0), fold(5, 1)
    at = o + w - 2
    inside = at.ge(0) & at.lt(20)
    total = (read(param(1, 20, F32), at, inside) * read(param(2, 5, F32), w)).reduce_ranges(Ops.ADD, w)
    sink = UOp.sink(write(param(0, 20, F32), o, total).end(o))
    x, kernel = data(20), data(5)
    got = run(device, sink, [np.zeros(20, np.float32), x, kernel], None)[0]
    np.testing.assert_allclose(got, np.correlate(x, kernel, "same"), rtol=1e-4, atol=1e-5)


# ---- data-dependent addresses, in-place, variables


@pytest.mark.parametrize("opts", [(), ("UPCAST axis 1 by 4",), None], ids=["plain", "tiled", "chosen"])
def test_gathers(device: str, opts: Any) -> None:
    """Rows by index; an index outside of the table reads 0."""
    i, j = loop(7, 0), loop(8, 1)
    row = read(param(2, 7, dtypes.int32), i).cast(dtypes.index)
    valid = row.ge(0) & row.lt(10)
    sink = UOp.sink(write(param(0, 56, F32), i * 8 + j, read(param(1, 80, F32), row * 8 + j, valid)).end(i,
                                                                                                         j))
    table, rows = data(10, 8), np.array([3, 0, 9, -1, 3, 10, 2**31 - 1], np.int32)
    expected = np.where(((rows >= 0) & (rows < 10))[:, None], table[np.clip(rows, 0, 9)], 0)
    np.testing.assert_array_equal(run(device, sink, [np.zeros((7, 8), np.float32), table, rows], opts)[0],
                                  expected)


@pytest.mark.parametrize("opts", [(), ("PADTO axis 0 to 8", "UPCAST axis 0 by 8"), None],
                         ids=["plain", "tiled", "chosen"])
def test_in_place(device: str, opts: Any) -> None:
    i = loop(21, 0)
    target = param(0, 21, F32)
    sink = UOp.sink(write(target, i, read(target, i) * 2.0 + read(param(1, 21, F32), i)).end(i))
    x, y = data(21), data(21)
    np.testing.assert_allclose(run(device, sink, [x, y], opts)[0], x * 2 + y, rtol=1e-6)


def test_variables_bound_loops_and_addresses(device: str) -> None:
    """Row `at` of a table, its first n elements summed; variables come sorted by name."""
    n, at = UOp.variable("n", 1, 20), UOp.variable("at", 0, 3)
    i, k = loop(n, 0), fold(n, 1)
    source = param(2, 80, F32)
    sink = UOp.sink(write(param(0, 20, F32), i, read(source, at * 20 + i) + 1.0).end(i),
                    write(param(1, 1, F32), UOp.index(0),
                          read(source, at * 20 + k).reduce_ranges(Ops.ADD, k)))
    x = data(4, 20)
    for row, count in ((2, 7), (3, 20), (0, 1)):
        outputs = [np.zeros(20, np.float32), np.zeros(1, np.float32)]
        copy, total, _ = run(device, sink, [*outputs, x], None, (row, count))
        np.testing.assert_array_equal(copy, np.where(np.arange(20) < count, x[row] + 1, 0).astype(np.float32))
        np.testing.assert_allclose(total[0], x[row, :count].sum(), rtol=1e-5, atol=1e-6)


# ---- tasks and groups


def row_sums(rows: int, columns: int) -> UOp:
    i, k = loop(rows, 0), fold(columns, 1)
    total = read(param(1, rows * columns, F32), i * columns + k).reduce_ranges(Ops.ADD, k)
    return UOp.sink(write(param(0, rows, F32), i, total).end(i))


@pytest.mark.parametrize("tasks", [2, 4])
def test_tasks(device: str, tasks: int) -> None:
    if Device.get(device).target.threads < 2:
        pytest.skip("one thread")
    x = data(8, 33)
    got = run(device, row_sums(8, 33), [np.zeros(8, np.float32), x], [f"THREAD axis 0 by {tasks}"])[0]
    np.testing.assert_allclose(got, x.sum(axis=1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("opts", [("LOCAL axis 0 by 4",), ("GROUP axis 1 by 4",), ("GROUPTOP axis 1 by 8",),
                                  ("LOCAL axis 0 by 2", "GROUP axis 1 by 4", "UNROLL axis 1 by 2")],
                                  ids=lambda o: "+".join(o))
def test_groups(device: str, opts: tuple[str, ...]) -> None:
    x = data(8, 32)
    if device not in GROUPED:
        with pytest.raises(OptError):
            run(device, row_sums(8, 32), [np.zeros(8, np.float32), x], opts)
        return
    got = run(device, row_sums(8, 32), [np.zeros(8, np.float32), x], opts)[0]
    np.testing.assert_allclose(got, x.sum(axis=1), rtol=1e-4, atol=1e-5)


def test_unknown_devices_are_refused(device: str) -> None:
    with pytest.raises(DeviceError, match="no such device"):
        Device.canonical(device.replace("CPU", "CPX").replace("PYTHON", "PITHON"))


@pytest.mark.parametrize(("a", "b"), [("int8", "int8"), ("uint8", "int8"), ("int16", "int16")])
def test_products_of_narrow_integers(device: str, a: str, b: str) -> None:
    """A matrix product of a ragged size that wraps in 32 bits, as the heuristics want it."""
    m, n, k = 18, 37, 50
    info = np.iinfo(a)
    x = RNG.integers(info.min, info.max + 1, (m, k)).astype(a)
    y = RNG.integers(np.iinfo(b).min, np.iinfo(b).max + 1, (k, n)).astype(b)
    x[0], y[:, 0] = info.min, np.iinfo(b).min
    i, j, l = loop(m, 0), loop(n, 1), fold(k, 2)
    left = read(param(1, m * k, getattr(dtypes, a)), i * k + l).cast(dtypes.int32)
    right = read(param(2, k * n, getattr(dtypes, b)), l * n + j).cast(dtypes.int32)
    total = UOp(Ops.REDUCE, dtypes.int32, (left * right, l), ReduceArg(Ops.ADD))
    ast = UOp.sink(write(param(0, m * n, dtypes.int32), i * n + j, total).end(i, j))
    out = run(device, ast, [np.zeros(m * n, np.int32), x.reshape(-1), y.reshape(-1)], None)[0]
    expected = (x.astype(np.int64) @ y.astype(np.int64)).astype(np.int32)
    np.testing.assert_array_equal(out.reshape(m, n), expected)
