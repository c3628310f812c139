"""In-place writes, versions, views and values of realize; NumPy is the truth."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import numpy as np
import pytest

from whit import GlobalCounters, Tensor
from whit.engine import profile
from whit.helpers import DEBUG, Context, WhitError


def test_reader_built_before_an_assign_keeps_the_old_value() -> None:
    x = Tensor([1.0, 2.0, 3.0]).realize()
    reader, total, view = x * 2, x.sum(), x.reshape(3, 1)
    x.assign(x + 10)
    x.realize()
    assert x.tolist() == [11, 12, 13]
    assert reader.tolist() == [2, 4, 6] and total.item() == 6 and view.tolist() == [[1], [2], [3]]


def test_reader_built_before_a_view_is_overwritten() -> None:
    x = Tensor(np.arange(6, dtype=np.float32)).realize()
    before = x[2:5] * 1
    held = x[2:5]
    x[1:4] = 9.0
    assert x.tolist() == [0, 9, 9, 9, 4, 5]
    assert before.tolist() == [2, 3, 4] and held.tolist() == [2, 3, 4]


def test_slice_of_an_unrealised_tensor_is_kept() -> None:
    x = Tensor([1.0, 2.0, 3.0, 4.0]) * 2
    x[1:3] = Tensor([0.5, 0.25])
    assert x.tolist() == [2, 0.5, 0.25, 8]
    y = Tensor.zeros(4)
    y[0] = 1
    y[3] = 2
    assert y.tolist() == [1, 0, 0, 2]


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.flip(0),
        lambda a: a * 2 + a.flip(0),
        lambda a: a.sum() + a,
        lambda a: a.cumsum(0),
        lambda a: a[np.array([3, 2, 1, 0])],
    ],
)
def test_assign_reads_its_own_old_value(change: object) -> None:
    start = np.float32([1, 2, 3, 4])
    flipped = {
        0: start[::-1],
        1: start * 2 + start[::-1],
        2: start.sum() + start,
        3: start.cumsum(),
        4: start[[3, 2, 1, 0]],
    }
    x = Tensor(start).realize()
    x.assign(change(x))  # type: ignore[operator]
    assert any(np.array_equal(x.numpy(), value) for value in flipped.values())
    expected = change(Tensor(start)).numpy()  # type: ignore[operator]
    np.testing.assert_array_equal(x.numpy(), expected)


def test_overlapping_slices() -> None:
    data = np.arange(10, dtype=np.float32)
    x = Tensor(data).realize()
    x[1:] = x[:-1]
    np.testing.assert_array_equal(x.numpy(), [0, 0, 1, 2, 3, 4, 5, 6, 7, 8])


def test_old_and_new_version_in_one_expression() -> None:
    x = Tensor([1.0, 2.0]).realize()
    old = x + 0
    x.assign(x * 10)
    assert (x + old).tolist() == [11, 22]
    x = Tensor([1.0, 2.0]).realize()
    old = x * 1
    x.assign(x * 10)
    assert (x.flip(0) * old).tolist() == [20, 20]


def test_chain_of_assigns_with_readers_between() -> None:
    x = Tensor([0.0]).realize()
    seen = []
    for n in range(1, 5):
        x.assign(x + n)
        seen.append(x * 1)
    assert [s.item() for s in seen] == [1, 3, 6, 10]
    assert x.item() == 10


def test_readers_realised_out_of_order() -> None:
    x = Tensor([0.0]).realize()
    seen = []
    for n in range(1, 5):
        x.assign(x + n)
        seen.append(x * 1)
    assert [s.item() for s in reversed(seen)] == [10, 6, 3, 1]


def test_random_numbers_do_not_depend_on_the_order_of_realisation() -> None:
    Tensor.manual_seed(1)
    a, b = Tensor.rand(3), Tensor.rand(3)
    forward = a.tolist(), b.tolist()
    Tensor.manual_seed(1)
    a, b = Tensor.rand(3), Tensor.rand(3)
    second = b.tolist()
    assert (a.tolist(), second) == forward


def test_nothing_is_computed_twice() -> None:
    x = (Tensor([1.0, 2.0]) * 3).realize()
    GlobalCounters.reset()
    x.realize()
    x.tolist()
    assert GlobalCounters.kernel_count == 0
    shared = (Tensor([1.0, 2.0]) * 3).contiguous()
    shared.realize()
    GlobalCounters.reset()
    (shared + 1).realize()
    assert GlobalCounters.kernel_count == 1


def test_memory_is_given_back() -> None:
    gc.collect()
    start = GlobalCounters.mem_used
    x = (Tensor.ones(1000, 100) * 2).realize()
    assert GlobalCounters.mem_used == start + 400_000
    y = x.sum().realize()
    del x
    gc.collect()
    assert GlobalCounters.mem_used <= start + 64
    assert y.item() == 200_000


def test_values_that_must_stay() -> None:
    assert Tensor([2**40]).item() == 2**40
    big = Tensor([2**31 - 1], dtype="int32")
    assert (big + 1).item() == -(2**31)
    assert (big * 2).item() == -2
    assert (Tensor([200], dtype="uint8") + 100).item() == 44
    assert ((big + 1) > big).item() is False
    inf = Tensor([np.inf, np.nan, -np.inf, 1.0])
    np.testing.assert_array_equal((inf * 0).numpy(), np.float32([np.nan, np.nan, np.nan, 0]))
    for name in ("max", "min"):
        assert np.isnan(getattr(Tensor([1.0, np.nan, 3.0]), name)().item())
    np.testing.assert_array_equal(
        Tensor([2.0, np.nan, 1.0]).sort()[0].numpy(), np.sort(np.float32([2, np.nan, 1]))
    )


def test_zero_sizes() -> None:
    assert Tensor.ones(0, 3).sum(0).tolist() == [0, 0, 0]
    assert (Tensor.ones(0, 3) + 1).tolist() == []
    assert (Tensor.ones(2, 0) @ Tensor.ones(0, 3)).tolist() == [[0, 0, 0], [0, 0, 0]]


def test_a_deep_graph_works() -> None:
    x = Tensor([0.0])
    for _ in range(20_000):
        x = x + 1.0
    assert x.item() == 20_000


def test_debug_levels_print(capfd: pytest.CaptureFixture[str]) -> None:
    with Context(DEBUG=7):
        (Tensor([1.25, 2.5, 77.0]) * 3.5 + 0.125).tolist()
    text = capfd.readouterr().err
    assert (
        "GFLOP/s" in text and "fusion" in text and "opts" in text and "define" in text and "linearize" in text
    )
    assert DEBUG.value == 0


def test_validate_runs_the_reference() -> None:
    with Context(VALIDATE=1):
        x = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
        np.testing.assert_allclose(Tensor(x).softmax().numpy().sum(1), np.ones(5), rtol=1e-5)


def test_errors_have_three_parts() -> None:
    for mistake in (
        lambda: Tensor([1, 2]).to("GPU9"),
        lambda: Tensor([1, 2]).reshape(3),
        lambda: Context(NOPE=1),
    ):
        with pytest.raises(WhitError) as caught:
            mistake()
        assert caught.value.asked and caught.value.because and caught.value.fix


def test_profile_writes_a_chrome_trace(tmp_path: Path) -> None:
    with Context(PROFILE=1, CACHE=0):
        (Tensor([1.5, 2.5]) * 77.25 + Tensor([3.0, 4.0])).softmax().realize()
    trace = json.loads(profile.write(str(tmp_path / "trace.json")).read_text())
    events = trace["traceEvents"]
    assert {e["ph"] for e in events} == {"X"} and all(e["dur"] >= 0 for e in events)
    kernels = [e for e in events if e["tid"] == "CPU"]
    assert kernels and kernels[0]["args"]["bytes"] > 0
