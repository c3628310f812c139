"""First values: bounds and deviations are PyTorch's formulas, drawn values are spread as they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from whit import Tensor, nn
from whit.helpers import WhitError
from whit.nn import init

SHAPES = [(64, 48), (40, 12, 3, 3)]
DRAWN: list[tuple[str, dict[str, Any]]] = [
    ("uniform_", {"a": -2.0, "b": 3.0}),
    ("normal_", {"mean": 1.0, "std": 0.5}),
    ("trunc_normal_", {"mean": 0.5, "std": 2.0, "a": -1.0, "b": 3.0}),
    ("trunc_normal_", {}),
    ("xavier_uniform_", {}),
    ("xavier_uniform_", {"gain": 3.0}),
    ("xavier_normal_", {"gain": 0.5}),
    ("kaiming_uniform_", {"a": 0.2, "mode": "fan_out"}),
    ("kaiming_uniform_", {}),
    ("kaiming_normal_", {"nonlinearity": "relu"}),
    ("kaiming_normal_", {"mode": "fan_out", "nonlinearity": "tanh"}),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "arguments"), DRAWN)
def test_distributions(name: str, arguments: dict[str, Any], shape: tuple[int, ...]) -> None:
    """Of the same distribution as PyTorch's values, by the test of Kolmogorov and Smirnov."""
    Tensor.manual_seed(3)
    torch.manual_seed(3)
    tensor, theirs = Tensor.zeros(*shape), torch.empty(8, *shape)
    assert getattr(init, name)(tensor, **arguments) is tensor
    for row in theirs:
        getattr(torch.nn.init, name)(row, **arguments)
    assert stats.ks_2samp(tensor.numpy().ravel(), theirs.numpy().ravel()).pvalue > 1e-3
    if "uniform" in name or "trunc" in name:
        assert np.abs(tensor.numpy()).max() <= np.abs(theirs.numpy()).max() * 1.01


@pytest.mark.parametrize("name", [
    "linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "sigmoid", "tanh", "relu", "selu",
    "leaky_relu",
])  # fmt: skip
def test_gains(name: str) -> None:
    assert init.calculate_gain(name) == pytest.approx(torch.nn.init.calculate_gain(name), rel=1e-15)
    if name == "leaky_relu":
        assert init.calculate_gain(name, 0.3) == pytest.approx(torch.nn.init.calculate_gain(name, 0.3))


@pytest.mark.parametrize(("name", "shape", "arguments"), [
    ("constant_", (2, 3), (0.25,)),
    ("ones_", (4,), ()),
    ("zeros_", (2, 2), ()),
    ("eye_", (3, 5), ()),
    ("dirac_", (4, 2, 3), ()),
    ("dirac_", (4, 3, 3, 4), ()),
    ("dirac_", (6, 2, 3, 2, 5), (3,)),
])  # fmt: skip
def test_fixed_values(name: str, shape: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
    want = getattr(torch.nn.init, name)(torch.empty(shape), *arguments).numpy()
    tensor = Tensor.full(shape, 7.0)
    np.testing.assert_array_equal(getattr(init, name)(tensor, *arguments).numpy(), want)


@pytest.mark.parametrize("shape", [(5, 5), (8, 3), (3, 8), (4, 2, 3)])
def test_orthogonal(shape: tuple[int, ...]) -> None:
    matrix = init.orthogonal_(Tensor.zeros(*shape), gain=2.0).numpy().astype(np.float64).reshape(shape[0], -1)
    small = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    np.testing.assert_allclose(small, 4 * np.eye(len(small)), atol=1e-5)


def test_orthogonal_has_no_preferred_side() -> None:
    """The mean of many is 0: no element has a sign that the algorithm gives it."""
    mean = np.mean([init.orthogonal_(Tensor.zeros(3, 3)).numpy() for _ in range(100)], 0)
    assert np.abs(mean).max() < 0.3


def test_sparse() -> None:
    values = init.sparse_(Tensor.ones(50, 40), sparsity=0.13, std=0.5).numpy()
    assert ((values == 0).sum(0) == 7).all() and len({tuple(c) for c in (values == 0).T}) > 30
    assert abs(values[values != 0].std() - 0.5) < 0.03


def test_parameters_stay_parameters() -> None:
    layer = nn.Linear(4, 3)
    weight = layer.weight
    init.kaiming_normal_(layer.weight)
    assert layer.weight is weight and weight.requires_grad
    layer(Tensor.ones(2, 4)).sum().backward()
    assert weight.grad is not None
    half = Tensor.zeros(4, 4).half()
    assert init.normal_(half).dtype.name == "float16"


def test_the_seed_repeats_values() -> None:
    def drawn() -> np.ndarray:
        Tensor.manual_seed(5)
        return init.xavier_uniform_(Tensor.zeros(3, 4)).numpy()

    np.testing.assert_array_equal(drawn(), drawn())


@pytest.mark.parametrize(("call", "reason"), [
    (lambda: init.uniform_([1.0]), "no tensor"),
    (lambda: init.uniform_(Tensor([1])), "whole numbers"),
    (lambda: init.uniform_(Tensor([1.0]), 2, 1), "range is empty"),
    (lambda: init.normal_(Tensor([1.0]), std=-1), "deviation"),
    (lambda: init.trunc_normal_(Tensor([1.0]), a=1, b=1), "range is empty"),
    (lambda: init.eye_(Tensor([1.0])), "it needs 2 axes"),
    (lambda: init.dirac_(Tensor([[1.0]])), "3 to 5 axes"),
    (lambda: init.dirac_(Tensor.zeros(3, 1, 1), groups=2), "divisor of 3"),
    (lambda: init.xavier_normal_(Tensor([1.0])), "at least 2"),
    (lambda: init.kaiming_normal_(Tensor.zeros(2, 2), mode="both"), "no such mode"),
    (lambda: init.kaiming_normal_(Tensor.zeros(2, 2), nonlinearity="swoosh"), "no such nonlinearity"),
    (lambda: init.calculate_gain("leaky_relu", "steep"), "no number"),
    (lambda: init.sparse_(Tensor.zeros(2, 2), 1.5), "share"),
])  # fmt: skip
def test_refused(call: Callable[[], Any], reason: str) -> None:
    with pytest.raises(WhitError, match=reason):
        call()
