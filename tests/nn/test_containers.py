"""Sequential and ModuleList: PyTorch's names, and those of a list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.nn.test_layers import compare_all, same_weights
from whit import Tensor, nn
from whit.helpers import WhitError
from whit.nn.optim import SGD
from whit.nn.state import get_parameters, get_state_dict, load_state_dict


def test_against_torch() -> None:
    inner = nn.Sequential(nn.Linear(4, 2, bias=False), nn.LayerNorm(2))
    ours = nn.Sequential(nn.Linear(3, 4), Tensor.relu, inner)
    theirs = torch.nn.Sequential(
        torch.nn.Linear(3, 4),
        torch.nn.ReLU(),
        torch.nn.Sequential(torch.nn.Linear(4, 2, bias=False), torch.nn.LayerNorm(2)),
    )
    assert set(get_state_dict(ours)) == set(theirs.state_dict())
    same_weights(ours, theirs)
    compare_all(ours, theirs, (5, 3))


def test_states_of_torch_load() -> None:
    theirs = torch.nn.Sequential(torch.nn.Conv1d(2, 3, 2), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    ours = nn.Sequential(nn.Conv1d(2, 3, 2), Tensor.tanh, nn.Linear(4, 1))
    load_state_dict(ours, {name: Tensor(t.detach().numpy()) for name, t in theirs.state_dict().items()})
    x = np.random.default_rng(0).standard_normal((2, 2, 5)).astype(np.float32)
    np.testing.assert_allclose(ours(Tensor(x)).numpy(), theirs(torch.tensor(x)).detach().numpy(), atol=1e-5)


def test_names_of_a_dict() -> None:
    model = nn.Sequential({"inner": nn.Linear(2, 3), "act": Tensor.relu, "outer": nn.Linear(3, 1)})
    assert set(get_state_dict(model)) == {"inner.weight", "inner.bias", "outer.weight", "outer.bias"}
    assert set(get_state_dict(model[:2])) == {"inner.weight", "inner.bias"} and len(model) == 3
    with pytest.raises(WhitError, match="build another"):
        model.append(nn.Linear(1, 1))
    assert model(Tensor.ones(4, 2)).shape == (4, 1) and len(model) == 3


def test_a_list() -> None:
    layers = [nn.Linear(2, 2) for _ in range(4)]
    found = nn.ModuleList(layers[:2])
    assert found.append(layers[2]) is found and found.extend(layers[3:]) is found
    assert list(found) == layers and len(found) == 4 and layers[1] in found and nn.Linear(1, 1) not in found
    assert found[-1] is layers[3] and list(found[1:3]) == layers[1:3]
    assert isinstance(found[1:3], nn.ModuleList)
    assert [k for k in get_state_dict(found[1:3]) if k.endswith("weight")] == ["0.weight", "1.weight"]
    found.insert(0, layers[3])
    del found[-1]
    found[1] = layers[2]
    assert list(found) == [layers[3], layers[2], *layers[1:3]]
    del found[::2]
    assert list(found) == [layers[2], layers[2]]
    assert repr(found) == "ModuleList(Linear, Linear)" and list(nn.ModuleList()) == []


def test_training() -> None:
    class Tower:
        def __init__(self) -> None:
            self.steps = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

        def __call__(self, x: Tensor) -> Tensor:
            for layer in self.steps:
                x = x + layer(x).tanh()
            return x

    model = Tower()
    assert list(get_state_dict(model))[:2] == ["steps.0.weight", "steps.0.bias"]
    optimizer = SGD(get_parameters(model), lr=0.1)
    x = Tensor(np.random.default_rng(0).standard_normal((8, 2)).astype(np.float32))
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean().backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 10


@pytest.mark.parametrize(("call", "reason"), [
    (lambda: nn.Sequential(nn.Linear(1, 1), 3), "can be called"),
    (lambda: nn.Sequential({0: nn.Linear(1, 1)}), "names, which are texts"),
    (lambda: nn.ModuleList(3), "does not take"),
    (lambda: nn.ModuleList([nn.Linear(1, 1)])[1], "it has 1 layers"),
    (lambda: nn.ModuleList()["weight"], "append a layer"),
])  # fmt: skip
def test_refused(call: Callable[[], Any], reason: str) -> None:
    with pytest.raises(WhitError, match=reason):
        call()
