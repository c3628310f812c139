"""Kernels written by hand: both forms, several outputs, memory they read, gradients, the JIT, and what is
refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.devices import GCC
from whit import Tensor, TinyJit, Variable, dtypes
from whit.engine import GlobalCounters
from whit.helpers import ArgumentError, DeviceError, IRError, ShapeError
from whit.uop import AxisType, Ops, UOp
from whit.uop.program import Array, Program, exp

rng = np.random.default_rng(0)
DEVICES = ["CPU", "PYTHON", GCC]


def cumsum(y: Array, x: Array) -> Program:
    """Running sums of the rows."""
    rows, n = x.shape
    p = Program("cumsum")
    with p.parallel(rows) as row:
        total = p.register(0, x.dtype)
        with p.loop(n) as i:
            p.set(total, total.value + x[row, i])
            p.store(y, (row, i), total.value)
    return p


def cumsum_gradient(gradients: list[Tensor], tensors: list[Tensor]) -> list[Tensor | None]:
    return [None, gradients[0].flip(1).custom_kernel(gradients[0].flip(1), fxn=cumsum)[0].flip(1)]


def softmax(y: Array, x: Array) -> UOp:
    rows, n = x.shape
    row, j = UOp.range(rows), UOp.range(n)
    k, m = [UOp.range(n, AxisType.REDUCE) for _ in range(2)]
    top = x[row, k].reduce_ranges(Ops.MAX, k)
    total = exp(x[row, m] - top).reduce_ranges(Ops.ADD, m)
    return UOp.sink(y.store((row, j), exp(x[row, j] - top) / total).end(row, j))


@pytest.mark.parametrize("device", DEVICES)
def test_both_forms_on_every_device(device: str) -> None:
    values = rng.normal(size=(5, 9)).astype(np.float32)
    x = Tensor(values, device=device)
    y = Tensor.empty(5, 9, device=device)
    np.testing.assert_allclose(y.custom_kernel(x, fxn=cumsum)[0].numpy(), np.cumsum(values, 1), atol=1e-5)
    wanted = torch.softmax(torch.tensor(values), 1).numpy()
    np.testing.assert_allclose(y.custom_kernel(x, fxn=softmax)[0].numpy(), wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "int8", "uint16", "int64"])
@pytest.mark.parametrize("device", ["CPU", "PYTHON"])
def test_dtypes_of_programs(dtype: str, device: str) -> None:
    kind = getattr(dtypes, dtype)
    values = rng.integers(0, 5, (3, 8))
    x = Tensor(values, device=device).cast(kind)
    y = Tensor.empty(3, 8, dtype=kind, device=device)
    assert y.custom_kernel(x, fxn=cumsum)[0].tolist() == np.cumsum(values, 1).tolist()


def test_what_it_reads_may_be_any_value() -> None:
    values = rng.normal(size=(6, 8)).astype(np.float32)
    x = Tensor(values).realize()
    cases: list[tuple[Tensor, Any]] = [
        (x[2:4], values[2:4]),  # a piece of memory
        (x.T, values.T),
        (x + 1, values + 1),
        (x[:, 1:3], values[:, 1:3]),
        (Tensor.ones(3, 4), np.ones((3, 4))),
        (x[0].expand(3, 8), np.broadcast_to(values[0], (3, 8))),
        (x.custom_kernel(x, fxn=cumsum)[0], np.cumsum(values, 1)),  # what another one wrote
    ]
    for tensor, wanted in cases:
        got = Tensor.empty(*tensor.shape).custom_kernel(tensor, fxn=cumsum)[0]
        np.testing.assert_allclose((got * 2).numpy(), np.cumsum(wanted, 1) * 2, atol=1e-5)


def test_a_written_tensor_is_ordered_with_assignments() -> None:
    x = Tensor([[1.0, 2.0]]).realize()
    before = Tensor.empty(1, 2).custom_kernel(x, fxn=cumsum)[0]
    x.assign(Tensor([[5.0, 6.0]]))
    after = Tensor.empty(1, 2).custom_kernel(x, fxn=cumsum)[0]
    Tensor.realize_all([before, after])
    assert before.tolist() == [[1.0, 3.0]]
    assert after.tolist() == [[5.0, 11.0]]


def extremes(low: Array, x: Array, high: Array) -> Program:
    """The least and the greatest element of each row; the outputs stand around the input."""
    p = Program("extremes")
    with p.parallel(x.shape[0]) as row:
        least, most = p.register(x[row, 0]), p.register(x[row, 0])
        with p.loop(x.shape[1]) as i:
            value = p.let(x[row, i])
            with p.when(value.lt(least.value)):
                p.set(least, value)
            with p.when(value.gt(most.value)):
                p.set(most, value)
        p.store(low, row, least.value)
        p.store(high, row, most.value)
    return p


def test_several_outputs_come_from_one_kernel() -> None:
    values = rng.normal(size=(7, 11)).astype(np.float32)
    x = Tensor(values).realize()
    low, same, high = Tensor.empty(7).custom_kernel(x, Tensor.empty(7), fxn=extremes)
    assert same is x
    start = GlobalCounters.kernel_count
    Tensor.realize_all([low, high])
    assert GlobalCounters.kernel_count == start + 1
    np.testing.assert_array_equal(low.numpy(), values.min(1))
    np.testing.assert_array_equal(high.numpy(), values.max(1))
    alone = Tensor.empty(7).custom_kernel(x, Tensor.empty(7), fxn=extremes)[2]
    np.testing.assert_array_equal((alone - 1).numpy(), values.max(1) - 1)


def exchange(y: Array, x: Array) -> Program:
    """Sorts by exchanges in memory that it writes: what it reads there is what it wrote."""
    (n,) = x.shape
    p = Program("exchange")
    with p.loop(n) as i:
        p.store(y, i, x[i])
    with p.loop(n), p.loop(n - 1) as j:
        a, b = p.let(y[j]), p.let(y[j + 1])
        with p.when(b.lt(a)):
            p.store(y, j, b)
            p.store(y, j + 1, a)
    return p


@pytest.mark.parametrize("device", DEVICES)
def test_loops_carry_state_through_memory(device: str) -> None:
    values = rng.permutation(13).astype(np.int32)
    y = Tensor.empty(13, dtype="int32", device=device)
    assert y.custom_kernel(Tensor(values, device=device), fxn=exchange)[0].tolist() == list(range(13))


def test_gradients() -> None:
    values = rng.normal(size=(4, 6)).astype(np.float32)
    x = Tensor(values, requires_grad=True)
    y = Tensor.empty(4, 6).custom_kernel(x * 2, fxn=cumsum, grad_fxn=cumsum_gradient)[0]
    y.realize()  # what lies in memory keeps its history
    (y * y).sum().backward()
    t = torch.tensor(values, requires_grad=True)
    (torch.cumsum(t * 2, 1) ** 2).sum().backward()
    assert x.grad is not None
    assert t.grad is not None
    np.testing.assert_allclose(x.grad.numpy(), t.grad.numpy(), rtol=1e-5, atol=1e-4)


def test_the_gradient_function_runs_once_for_all_outputs() -> None:
    calls: list[list[Tensor]] = []

    def gradient(gradients: list[Tensor], tensors: list[Tensor]) -> list[Tensor | None]:
        calls.append(gradients)
        low, x, high = tensors
        of_low = (x.eq(low.unsqueeze(1))).where(gradients[0].unsqueeze(1), 0.0)
        return [None, of_low + x.eq(high.unsqueeze(1)).where(gradients[1].unsqueeze(1), 0.0), None]

    values = rng.normal(size=(3, 5)).astype(np.float32)
    x = Tensor(values, requires_grad=True)
    low, _, high = Tensor.empty(3).custom_kernel(x, Tensor.empty(3), fxn=extremes, grad_fxn=gradient)
    (high * 3 - low).sum().backward()
    assert len(calls) == 1
    t = torch.tensor(values, requires_grad=True)
    (t.amax(1) * 3 - t.amin(1)).sum().backward()
    assert x.grad is not None
    assert t.grad is not None
    np.testing.assert_array_equal(x.grad.numpy(), t.grad.numpy())


def test_without_a_gradient_function_there_is_none() -> None:
    x = Tensor([[1.0, 2.0]], requires_grad=True)
    y = Tensor.empty(1, 2).custom_kernel(x, fxn=cumsum)[0]
    with pytest.raises(ArgumentError, match="depends on no tensor"):
        y.sum().backward()


def test_jit_records_it() -> None:
    @TinyJit
    def step(x: Tensor) -> Tensor:
        return Tensor.empty(2, 3).custom_kernel(x + 1, fxn=cumsum)[0] * 2

    for n in range(5):
        values = np.arange(6, dtype=np.float32).reshape(2, 3) + n
        got = step(Tensor(values).realize())
        np.testing.assert_array_equal(got.numpy(), np.cumsum(values + 1, 1) * 2)


def test_a_symbolic_size_is_a_bound_of_a_loop() -> None:
    def total(y: Array, x: Array) -> Program:
        p = Program("total")
        sum_ = p.register(0.0, dtypes.float32)
        with p.loop(x.shape[0]) as i:
            p.set(sum_, sum_.value + x[i])
        p.store(y, 0, sum_.value)
        return p

    x = Tensor(np.arange(10, dtype=np.float32)).realize()
    for n in (3, 7):
        length = Variable("n", 1, 10).bind(n)
        got = Tensor.empty(1).custom_kernel(x[:length] * 2, fxn=total)[0]
        assert got.tolist() == [n * (n - 1.0)]


def test_more_rows_than_threads_and_fewer() -> None:
    for rows in (1, 2, 3, 5, 17):
        values = rng.normal(size=(rows, 4)).astype(np.float32)
        got = Tensor.empty(rows, 4).custom_kernel(Tensor(values), fxn=cumsum)[0]
        np.testing.assert_allclose(got.numpy(), np.cumsum(values, 1), atol=1e-5)


def test_equal_kernels_are_one() -> None:
    from whit.engine.compile import _kernels

    x = Tensor(rng.normal(size=(4, 4)).astype(np.float32)).realize()
    first = Tensor.empty(4, 4).custom_kernel(x, fxn=softmax)[0].realize()
    known = len(_kernels)
    again = Tensor.empty(4, 4).custom_kernel(x, fxn=softmax)[0].realize()
    assert len(_kernels) == known
    assert first.tolist() == again.tolist()


# ---- what is refused ---------------------------------------------------------------------------------------


def test_what_is_no_kernel() -> None:
    x, y = Tensor([1.0]), Tensor.empty(1)
    with pytest.raises(ArgumentError, match="the function returned None"):
        y.custom_kernel(x, fxn=lambda y, x: None)
    with pytest.raises(IRError, match="a kernel that is a ADD"):
        y.custom_kernel(x, fxn=lambda y, x: x[0] + 1.0)
    with pytest.raises(IRError, match="not closed"):
        y.custom_kernel(x, fxn=lambda y, x: UOp.sink(y.store(0, x[UOp.range(1, uid=0) * 1])))
    with pytest.raises(ArgumentError, match="stores to none"):
        y.custom_kernel(x, fxn=lambda y, x: Program("nothing"))
    with pytest.raises(ArgumentError, match="it takes tensors"):
        y.custom_kernel(3, fxn=cumsum)  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match="one device"):
        y.custom_kernel(x.to("PYTHON"), fxn=cumsum)


def test_programs_that_are_not_well_formed() -> None:
    def late(y: Array, x: Array) -> Program:
        p = Program("late")
        with p.loop(1) as i:
            value = p.let(x[i])
        p.store(y, 0, value)
        return p

    def partly(y: Array, x: Array) -> Program:
        p = Program("partly")
        with p.parallel(1) as i:
            p.store(y, i, x[i])
        p.store(y, 0, 1.0)
        return p

    def indices(y: Array, x: Array) -> Program:
        p = Program("indices")
        p.store(y, (0, 0), 1.0)
        return p

    x, y = Tensor([1.0]), Tensor.empty(1)
    with pytest.raises(IRError, match="outside of where it is known"):
        y.custom_kernel(x, fxn=late)
    with pytest.raises(IRError, match="something stands outside of it"):
        y.custom_kernel(x, fxn=partly)
    with pytest.raises(IRError, match="2 indices are given"):
        y.custom_kernel(x, fxn=indices)


def test_gradients_of_the_wrong_form() -> None:
    x = Tensor([[1.0, 2.0]], requires_grad=True)
    for function, error in ((lambda g, t: [g[0]], ArgumentError), (lambda g, t: [None, g[0][0]], ShapeError)):
        y = Tensor.empty(1, 2).custom_kernel(x, fxn=cumsum, grad_fxn=function)[0]
        with pytest.raises(error):
            y.sum().backward()


def test_what_is_written_beside_is_kept_for_who_holds_it() -> None:
    values = rng.normal(size=(4, 6)).astype(np.float32)
    x = Tensor(values, requires_grad=True)

    def gradient(gradients: list[Tensor], tensors: list[Tensor]) -> list[Tensor | None]:
        return [None, tensors[1].eq(tensors[2].unsqueeze(1)).where(gradients[1].unsqueeze(1), 0.0), None]

    low, _, high = Tensor.empty(4).custom_kernel(x, Tensor.empty(4), fxn=extremes, grad_fxn=gradient)
    shown = high.reshape(2, 2)
    low.realize()
    start = GlobalCounters.kernel_count
    np.testing.assert_array_equal(shown.numpy(), values.max(1).reshape(2, 2))
    assert GlobalCounters.kernel_count == start
    shown.sum().backward()  # it knows what it was computed from
    assert x.grad is not None
    np.testing.assert_array_equal(x.grad.numpy(), values == values.max(1, keepdims=True))
