"""Promises about values that users rely on, run end to end on the device."""

from __future__ import annotations

import numpy as np
import pytest

from tests.tensor.reference import DEVICE
from whit import Tensor, dtypes

pytestmark = pytest.mark.skipif(DEVICE == "reference", reason="runs on a device")


def test_a_reader_built_before_an_overwrite_keeps_the_old_value() -> None:
    x = Tensor([1.0, 2, 3, 4]).realize()
    view, computed, scalar = x.shrink(((1, 3),)), x * 2, x.sum()
    x.assign(Tensor([9.0, 9, 9, 9]))
    assert x.tolist() == [9, 9, 9, 9]
    assert view.tolist() == [2, 3] and computed.tolist() == [2, 4, 6, 8] and scalar.item() == 10


def test_a_reader_of_an_overwritten_view_keeps_the_old_value() -> None:
    x = Tensor([[1, 2], [3, 4]]).realize()
    before = x + 0
    row = x[1]
    x[1] = 7
    after = x * 1
    x[0] = 8
    assert before.tolist() == [[1, 2], [3, 4]] and row.tolist() == [3, 4]
    assert after.tolist() == [[1, 2], [7, 7]] and x.tolist() == [[8, 8], [7, 7]]


def test_assigning_to_a_slice_of_an_unrealised_tensor_is_kept() -> None:
    x = Tensor.zeros(4)
    x[1:3] = 5
    y = Tensor([1.0, 2, 3]) + 1
    y[0] = -1
    assert x.tolist() == [0, 5, 5, 0] and y.tolist() == [-1, 3, 4]


def test_an_update_reads_the_old_value_of_itself() -> None:
    x = Tensor([1, 2, 3, 4]).realize()
    x.assign(x.flip(0) + x)
    assert x.tolist() == [5, 5, 5, 5]
    x.assign(x + Tensor.arange(4))
    for _ in range(3):
        x.assign(x.roll(1))
    assert x.tolist() == [6, 7, 8, 5]


def test_assignments_swap() -> None:
    a, b = Tensor([1, 2]).realize(), Tensor([3, 4]).realize()
    old = a + 0
    a.assign(b)
    b.assign(old)
    Tensor.realize_all([a, b])
    assert a.tolist() == [3, 4] and b.tolist() == [1, 2]


def test_writing_through_a_view_leaves_the_base_its_version() -> None:
    x = Tensor([[1, 2], [3, 4]]).realize()
    column = x.shrink((None, (0, 1)))
    column.assign(Tensor([[8], [9]]))
    assert column.tolist() == [[8], [9]] and x.tolist() == [[1, 2], [3, 4]]


def test_nan_and_infinity_survive() -> None:
    x = Tensor([np.nan, np.inf, -np.inf, 2.0])
    np.testing.assert_array_equal((x * 0).numpy(), [np.nan, np.nan, np.nan, 0])
    np.testing.assert_array_equal((x - x).numpy(), [np.nan, np.nan, np.nan, 0])
    assert np.isnan(x.max().item()) and np.isnan(x.min().item()) and np.isnan(x.maximum(0).tolist()[0])
    assert x.sort()[0].tolist()[:3] == [-np.inf, 2.0, np.inf] and np.isnan(x.sort()[0].tolist()[3])
    assert (x == x).tolist() == [False, True, True, True]
    assert np.signbit((Tensor([0.0]) * -1).numpy())[0] and np.signbit((Tensor([-0.0]) + -0.0).numpy())[0]


def test_integers_wrap() -> None:
    top = Tensor([2**31 - 1])
    assert (top + 1).tolist() == [-(2**31)] and ((top + 1) > top).tolist() == [False]
    assert (Tensor([-(2**31)]).abs()).tolist() == [-(2**31)]
    assert (Tensor([200], dtype=dtypes.uint8) * 2).tolist() == [144]
    assert (Tensor([2**62]) * 4).tolist() == [0]
    assert Tensor([2**40]).tolist() == [2**40]
    x = Tensor([2**31 - 1, 5])
    assert ((x * 2) // 2).tolist() == [-1, 5]


def test_empty_tensors_work_everywhere() -> None:
    x = Tensor.zeros(0, 3)
    assert (x + 1).tolist() == [] and x.sum().item() == 0 and x.T.shape == (3, 0)
    assert (x.T @ x).tolist() == [[0, 0, 0]] * 3
    assert x.cat(Tensor.ones(1, 3)).tolist() == [[1, 1, 1]] and x.sort()[0].shape == (0, 3)
    assert x.softmax(-1).shape == (0, 3) and x.pad(((1, 0), (0, 0))).tolist() == [[0, 0, 0]]
    assert x.realize().numpy().shape == (0, 3) and x.contiguous().tolist() == [] and x.clone().tolist() == []
    y = Tensor([]).realize()
    assert y.assign(Tensor([])).tolist() == [] and y.mean(keepdim=True).shape == (1,)


def test_bound_variables_share_code_and_follow_their_value() -> None:
    from whit import Variable

    n = Variable("n", 1, 10)
    base = Tensor.arange(10).realize()
    for value in (3, 7, 1):
        view = base.shrink(((0, n.bind(value)),))
        assert (view * 2).tolist() == [2 * i for i in range(value)]
        assert view.sum().item() == value * (value - 1) // 2
