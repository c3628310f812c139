"""VALIDATE=1 tells wrong results from other roundings."""

from __future__ import annotations

import numpy as np
import pytest

from tests.codegen.opts_kernels import elementwise, row_sum
from whit import Context, Tensor
from whit.engine import Step, validate
from whit.engine.compile import compiled
from whit.helpers import DeviceError
from whit.runtime.cpu import bytes_at
from whit.runtime.device import Buffer
from whit.uop import UOp, dtypes


def test_cancellation_is_no_difference() -> None:
    """Means of large numbers, and gradients that are 0 but for rounding."""
    x = np.random.default_rng(0).standard_normal((3, 50)).astype(np.float32)
    with Context(VALIDATE=1):
        got = (Tensor(x + 1e4) - Tensor(x + 1e4).mean(1, keepdim=True)).numpy()
        wide = (x + np.float32(1e4)).astype(np.float64)
        np.testing.assert_allclose(got, wide - wide.mean(1, keepdims=True), atol=5e-3)
        assert abs((Tensor(x) - Tensor(x).mean()).sum().item()) < 1e-3


def test_bits_of_results_that_round_differently_are_no_difference() -> None:
    x = np.linspace(0.1, 5, 100, dtype=np.float32)
    with Context(VALIDATE=1):
        got = Tensor(x).log().exp().bitcast("int32").numpy()
    assert np.abs(got.astype(np.int64) - x.view(np.int32)).max() < 30


class Wrong:
    """A program that changes one element of its output afterwards."""

    def __init__(self, program: object, by: float) -> None:
        self.program, self.by = program, by

    def __call__(self, handles: list, values: list, wait: bool = False) -> float:
        self.program(handles, values, wait)  # type: ignore[operator]  # a Program
        np.frombuffer(bytes_at(handles[0], 20), np.float32)[2] += self.by
        return 0.0


@pytest.mark.parametrize("by, found", [(0.0, False), (1e-7, False), (0.01, True), (float("nan"), True)])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
@pytest.mark.parametrize("ast, sizes", [(elementwise(5), (5, 5, 5)), (row_sum(5, 9), (5, 45))])
def test_a_wrong_element_is_found_also_where_values_cancel(
    ast: UOp, sizes: tuple[int, ...], offset: float, by: float, found: bool
) -> None:
    buffers = [Buffer("CPU", 4 * n) for n in sizes]
    for number, buffer in enumerate(buffers):
        data = np.random.default_rng(number).standard_normal(buffer.nbytes // 4) + offset
        buffer.copyin(memoryview(data.astype(np.float32)).cast("B"))
    kernel = compiled(ast, "CPU")
    bad = kernel._replace(program=Wrong(kernel.program, by * max(1.0, offset)))  # type: ignore[arg-type]  # acts as one
    if not found:
        validate.run_and_compare(Step(bad, tuple(buffers)))
        return
    with pytest.raises(DeviceError, match="element 2 of the output"):
        validate.run_and_compare(Step(bad, tuple(buffers)))


def test_integers_must_be_equal() -> None:
    a, b = np.arange(5, dtype=np.uint64), np.arange(5, dtype=np.uint64)
    b[3] = 2**64 - 1
    assert validate.differing(bytearray(a), bytearray(b), dtypes.uint64).tolist() == [False] * 3 + [
        True,
        False,
    ]
    validate.compare(bytearray(a), bytearray(a), dtypes.uint64, "here")
    with pytest.raises(DeviceError, match="element 3"):
        validate.compare(bytearray(a), bytearray(b), dtypes.uint64, "here")
