"""The reference interpreter: its arithmetic against NumPy and ml_dtypes, and every check that it makes."""
from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.runtime.linear_kernels import NUMPY, Kernel, buffer, elementwise, read, run
from whit.helpers import CompileError, DeviceError
from whit.runtime import interpreter
from whit.runtime.device import Device, Launch
from whit.uop import LocalArg, Ops, SpecialArg, UOp, dtypes

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
F32 = dtypes.float32
SMALL = (dtypes.float16, dtypes.bfloat16, dtypes.fp8e4m3, dtypes.fp8e5m2)


def launch(kernel: Kernel, arrays: list[np.ndarray[Any, Any]], launch: Launch,
           variables: tuple[int, ...] = ()) -> list[Any]:
    device = Device.get("PYTHON")
    source = device.render(kernel.linear(), "kernel")
    program = device.load(device.compile(source, "kernel"), "kernel", launch)
    buffers = [buffer("PYTHON", a) for a in arrays]
    seconds = program([b.handle for b in buffers], list(variables), wait=True)
    assert seconds is not None and seconds >= 0
    return [read(b, a.dtype, a.shape) for a, b in zip(arrays, buffers, strict=True)]


def special(kernel: Kernel, name: str, size: int) -> UOp:
    return kernel.add(Ops.SPECIAL, dtypes.index, arg=SpecialArg(name, size))


# ---- values


@pytest.mark.parametrize("dtype", SMALL, ids=lambda d: d.name)
def test_tables_of_narrow_floats(dtype: Any) -> None:
    codes = np.arange(1 << dtype.bitsize, dtype=np.uint16 if dtype.bitsize == 16 else np.uint8)
    values = codes.view(NUMPY[dtype]).astype(np.float64)
    table = np.array(interpreter.decode_table(dtype))
    np.testing.assert_array_equal(table, values)
    number = ~np.isnan(values)
    np.testing.assert_array_equal(np.signbit(table[number]), np.signbit(values[number]))
    again = [interpreter.encode(v, dtype) for v in table[number].tolist()]
    np.testing.assert_array_equal(again, codes[number])
    assert np.isnan(table[interpreter.encode(float("nan"), dtype)])


@pytest.mark.parametrize("dtype", [*SMALL, F32], ids=lambda d: d.name)
def test_casts_from_doubles(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(size=300) * 10.0 ** rng.integers(-9, 9, 300),
                        [0.0, -0.0, np.inf, -np.inf, np.nan, 1e300, 448.0,
                        464.0, 465.0, 57344.0, 65519.0, 65520.0, 1e-8, 1e-45]])
    got = elementwise("PYTHON", lambda k, v: k.add(Ops.CAST, dtype, v), dtype, [x], [dtypes.float64], 1)
    through = x if dtype in (F32, dtypes.float16) else x.astype(np.float32)  # ml_dtypes casts through float32
    np.testing.assert_array_equal(got.astype(np.float64), through.astype(NUMPY[dtype]).astype(np.float64))


@pytest.mark.parametrize("before", [dtypes.int64, dtypes.uint64], ids=lambda d: d.name)
def test_wide_integers_round_once(before: Any) -> None:
    """(2**24 + 1) * 2**30 + 1 is above the tie that a double rounds it to."""
    x = np.array([((1 << 24) + 1 << 30) + 1, (1 << 62) + 1, (1 << 53) + 1, 3], NUMPY[before])
    got = elementwise("PYTHON", lambda k, v: k.add(Ops.CAST, F32, v), F32, [x], [before], 1)
    for value, number in zip(got.tolist(), x.tolist(), strict=True):
        near = np.float32(value)
        sides = [np.nextafter(near, np.float32(0)), near, np.nextafter(near, np.float32(np.inf))]
        assert abs(Fraction(value) - number) == min(abs(Fraction(float(s)) - number) for s in sides)


def test_floats_saturate_in_integers() -> None:
    x = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 2.9, -2.9, 255.0], np.float32)
    got = elementwise("PYTHON", lambda k, v: k.add(Ops.CAST, dtypes.int8, v), dtypes.int8, [x], [F32], 1)
    assert got.tolist() == [0, 127, -128, 127, -128, 2, -2, 127]


@pytest.mark.parametrize("dtype", [F32, dtypes.float64], ids=lambda d: d.name)
def test_multiply_add_rounds_once(dtype: Any) -> None:
    rng = np.random.default_rng(1)
    x, y, z = (rng.normal(size=200).astype(NUMPY[dtype]) for _ in range(3))
    z[:100] = -(x * y)[:100]  # what remains is the product's rounding error
    got = elementwise("PYTHON", lambda k, a, b, c: k.alu(Ops.MULACC, a, b, c), dtype, [x, y, z], [dtype] * 3,
                      1)
    for g, a, b, c in zip(got, x, y, z, strict=True):
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        sides = [np.nextafter(g, NUMPY[dtype](-np.inf)), g, np.nextafter(g, NUMPY[dtype](np.inf))]
        assert abs(Fraction(float(g)) - exact) == min(abs(Fraction(float(s)) - exact) for s in sides)


def test_bitcasts() -> None:
    x = np.array([0x3F800000, 0x80000000, 0x7F800000, 1], np.uint32)
    got = elementwise("PYTHON", lambda k, v: k.add(Ops.BITCAST, F32, v), F32, [x], [dtypes.uint32], 1)
    np.testing.assert_array_equal(got, x.view(np.float32))
    y = np.array([1.5, -2.0, np.inf, 2.0**-24], np.float16)
    back = elementwise("PYTHON", lambda k, v: k.add(Ops.BITCAST, dtypes.int16, v), dtypes.int16, [y],
                       [dtypes.float16], 1)
    np.testing.assert_array_equal(back, y.view(np.int16))


def test_narrow_arithmetic_rounds_each_step() -> None:
    x, y = np.random.default_rng(2).integers(0, 65536, (2, 400)).astype(np.uint16).view(ml_dtypes.bfloat16)
    got = elementwise("PYTHON", lambda k, a, b: k.alu(Ops.MUL, k.alu(Ops.ADD, a, b), b), dtypes.bfloat16,
                      [x, y],
                      [dtypes.bfloat16] * 2, 1)
    np.testing.assert_array_equal(got.astype(np.float32), ((x + y) * y).astype(np.float32))


def test_vectors_gathers_masks_and_folds() -> None:
    k = Kernel()
    out, source, places = k.param(0, F32, 8), k.param(1, F32, 8), k.param(2, dtypes.index, 4)
    at = k.load(places, k.const(0), 4)
    mask = k.const((True, False, True, True), dtypes.bool.vec(4))
    gathered = k.load(source, at, 4, mask)
    turned = k.add(Ops.SHUFFLE, F32.vec(4), gathered, arg=(3, 2, 1, 0))
    k.store(out, k.const(0), turned)
    total = k.add(Ops.FOLD, F32, gathered, arg=Ops.ADD)
    k.store(out, k.const(4), k.add(Ops.STACK, F32.vec(2), total, k.add(Ops.EXTRACT, F32, gathered, arg=2)))
    x = np.arange(8, dtype=np.float32) + 1
    got = run("PYTHON", k.linear(), np.zeros(8, np.float32), x, np.array([7, 99, 0, 3]))
    np.testing.assert_array_equal(got, [4, 1, 0, 8, 13, 1, 0, 0])


def test_a_register_operand_is_read_at_that_point() -> None:
    k = Kernel()
    out = k.param(0, dtypes.int32, 2)
    register = k.add(Ops.REG, dtypes.int32, k.const(5, dtypes.int32), arg=0)
    before = k.add(Ops.EXTRACT, dtypes.int32, register, arg=0)
    k.add(Ops.SET, dtypes.void, register, k.const(9, dtypes.int32))
    k.store(out, k.const(0), before)
    k.store(out, k.const(1), register)
    assert run("PYTHON", k.linear(), np.zeros(2, np.int32)).tolist() == [5, 9]


def test_variables_and_conditions() -> None:
    k = Kernel()
    out, n = k.param(0, dtypes.int64, 10), k.var("n", 0, 10)
    loop = k.range(n)
    condition = k.add(Ops.IF, dtypes.void, k.alu(Ops.CMPNE, loop, k.const(2)))
    k.store(out, loop, k.add(Ops.CAST, dtypes.int64, loop))
    k.add(Ops.ENDIF, dtypes.void, condition)
    k.end(loop)
    got = run("PYTHON", k.linear(), np.full(10, -1), variables=[5])
    assert got.tolist() == [0, 1, -1, 3, 4, -1, -1, -1, -1, -1]


# ---- checks


def copy(index: Any, size: int = 4) -> Kernel:
    """out[index(i)] = in[i] for i < size."""
    k = Kernel()
    out, source = k.param(0, F32, size), k.param(1, F32, size)
    loop = k.range(size)
    k.store(out, index(k, loop), k.load(source, loop))
    k.end(loop)
    return k


@pytest.mark.parametrize("offset", [1, -1])
def test_writes_out_of_bounds(offset: int) -> None:
    k = copy(lambda k, i: k.alu(Ops.ADD, i, k.const(offset)))
    with pytest.raises(DeviceError,
                       match=rf"kernel kernel: write of buffer p0 at index {4 if offset > 0 else -1}"):
        run("PYTHON", k.linear(), np.zeros(4, np.float32), np.zeros(4, np.float32))


def test_reads_out_of_bounds_and_short_buffers() -> None:
    k = copy(lambda k, i: i)
    with pytest.raises(DeviceError, match="read of buffer p1 at index 3"):
        run("PYTHON", k.linear(), np.zeros(4, np.float32), np.zeros(3, np.float32))


def test_masked_accesses_touch_no_memory() -> None:
    k = Kernel()
    out, source = k.param(0, F32, 4), k.param(1, F32, 2)
    loop = k.range(4)
    inside = k.alu(Ops.CMPLT, loop, k.const(2))
    k.store(out, loop, k.load(source, loop, 1, inside), k.alu(Ops.CMPLT, loop, k.const(3)))
    k.end(loop)
    got = run("PYTHON", k.linear(), np.full(4, 7, np.float32), np.array([1, 2], np.float32))
    assert got.tolist() == [1, 2, 0, 7]


def test_too_few_buffers() -> None:
    with pytest.raises(DeviceError, match="it takes p1"):
        run("PYTHON", copy(lambda k, i: i).linear(), np.zeros(4, np.float32))


def tasks(index: Any) -> list[Any]:
    """Four tasks, each storing its number at index(task)."""
    k = Kernel()
    out, thread = k.param(0, dtypes.int64, 4), special(k, "thread", 4)
    k.store(out, index(k, thread), k.add(Ops.CAST, dtypes.int64, thread))
    return launch(k, [np.zeros(4, np.int64)], Launch(4))


def test_tasks() -> None:
    assert tasks(lambda k, t: t)[0].tolist() == [0, 1, 2, 3]


def test_two_tasks_write_one_element() -> None:
    with pytest.raises(DeviceError,
                       match=r"race on buffer p0 at index 0.*writes what work-item 0 of group 0 wrote"):
        tasks(lambda k, t: k.alu(Ops.TRUNCDIV, t, k.const(2)))


def test_a_task_reads_what_another_writes() -> None:
    k = Kernel()
    out, thread = k.param(0, dtypes.int64, 5), special(k, "thread", 4)
    k.store(out, k.alu(Ops.ADD, thread, k.const(1)), k.load(out, thread))
    with pytest.raises(DeviceError, match=r"race on buffer p0 at index 1.*reads what"):
        launch(k, [np.zeros(5, np.int64)], Launch(4))
    k = Kernel()
    out, thread = k.param(0, dtypes.int64, 5), special(k, "thread", 4)
    k.store(out, thread, k.load(out, k.alu(Ops.ADD, thread, k.const(1))))
    with pytest.raises(DeviceError, match=r"race on buffer p0 at index 1.*writes what .* read"):
        launch(k, [np.zeros(5, np.int64)], Launch(4))


def reversal(barrier: bool, write_all: bool = True) -> Kernel:
    """Each group of 4 work-items reverses its 4 elements through shared scratch."""
    k = Kernel()
    out, source = k.param(0, F32, 8), k.param(1, F32, 8)
    group, item = special(k, "gidx0", 2), special(k, "lidx0", 4)
    scratch = k.add(Ops.LOCAL, F32, arg=LocalArg(0, 4, True))
    place = k.alu(Ops.ADD, k.alu(Ops.MUL, group, k.const(4)), item)
    k.store(scratch, item, k.load(source, place), None if write_all else k.alu(Ops.CMPLT, item, k.const(3)))
    if barrier:
        k.add(Ops.BARRIER, dtypes.void)
    k.store(out, place, k.load(scratch, k.alu(Ops.SUB, k.const(3), item)))
    return k


GROUPS = Launch(1, (2, 1, 1), (4, 1, 1))


def test_work_items_share_scratch_across_a_barrier() -> None:
    x = np.arange(8, dtype=np.float32)
    got = launch(reversal(barrier=True), [np.zeros(8, np.float32), x], GROUPS)
    assert got[0].tolist() == [3, 2, 1, 0, 7, 6, 5, 4]


def test_scratch_without_a_barrier() -> None:
    with pytest.raises(DeviceError, match=r"read of scratch local0 at index 3.*nothing was written"):
        launch(reversal(barrier=False), [np.zeros(8, np.float32), np.zeros(8, np.float32)], GROUPS)


def test_uninitialised_scratch() -> None:
    with pytest.raises(DeviceError, match=r"scratch local0 at index 3.*nothing was written"):
        launch(reversal(barrier=True, write_all=False), [np.zeros(8, np.float32), np.zeros(8, np.float32)],
               GROUPS)


def test_a_race_on_scratch_after_it_was_written() -> None:
    """All write, a barrier, then each overwrites what its neighbour reads."""
    k = Kernel()
    out, item = k.param(0, F32, 4), special(k, "lidx0", 4)
    scratch = k.add(Ops.LOCAL, F32, arg=LocalArg(0, 4, True))
    k.store(scratch, item, k.const(1.0, F32))
    k.add(Ops.BARRIER, dtypes.void)
    value = k.load(scratch, k.alu(Ops.SUB, k.const(3), item))
    k.store(scratch, item, value)
    k.store(out, item, value)
    with pytest.raises(DeviceError, match="race on scratch local0"):
        launch(k, [np.zeros(4, np.float32)], Launch(1, (1, 1, 1), (4, 1, 1)))


def test_a_barrier_that_some_do_not_reach() -> None:
    k = Kernel()
    out, item = k.param(0, F32, 4), special(k, "lidx0", 4)
    condition = k.add(Ops.IF, dtypes.void, k.alu(Ops.CMPLT, item, k.const(2)))
    k.add(Ops.BARRIER, dtypes.void)
    k.add(Ops.ENDIF, dtypes.void, condition)
    k.store(out, item, k.const(1.0, F32))
    with pytest.raises(DeviceError, match="2 of 4 work-items wait at a barrier"):
        launch(k, [np.zeros(4, np.float32)], Launch(1, (1, 1, 1), (4, 1, 1)))


def test_an_open_loop_is_refused() -> None:
    k = Kernel()
    k.store(k.param(0, F32, 4), k.range(4), k.const(0.0, F32))
    with pytest.raises(CompileError, match="not closed"):
        Device.get("PYTHON").render(k.linear(), "kernel")


def test_source_is_readable() -> None:
    source = Device.get("PYTHON").render(copy(lambda k, i: i).linear(), "E_4")
    assert "def kernel(memory, variables, special, local):" in source and "for v1 in range(4):" in source
