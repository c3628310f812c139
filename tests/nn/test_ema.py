"""Averages of weights against torch.optim.swa_utils."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from whit import Tensor, TinyJit, nn
from whit.helpers import ArgumentError
from whit.nn.ema import EMA
from whit.nn.optim import SGD
from whit.nn.state import get_parameters, get_state_dict, load_state_dict


def twins() -> tuple[nn.Linear, torch.nn.Linear]:
    theirs = torch.nn.Linear(3, 2)
    mine = nn.Linear(3, 2)
    load_state_dict(mine, {name: Tensor(t.detach().numpy()) for name, t in theirs.state_dict().items()})
    return mine, theirs


@pytest.mark.parametrize("jit", [False, True])
def test_against_torch(jit: bool) -> None:
    mine, theirs = twins()
    optimizer, other = SGD(get_parameters(mine), lr=0.1), torch.optim.SGD(theirs.parameters(), lr=0.1)
    ema = EMA(get_parameters(mine), 0.8)
    average = AveragedModel(theirs, multi_avg_fn=get_ema_multi_avg_fn(0.8))

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        mine(x).square().sum().backward()
        optimizer.step()
        ema.update()

    call = TinyJit(step) if jit else step
    for seed in range(6):
        x = np.random.default_rng(seed).standard_normal((4, 3)).astype(np.float32)
        call(Tensor(x).realize())
        other.zero_grad()
        theirs(torch.tensor(x)).square().sum().backward()
        other.step()
        average.update_parameters(theirs)
    own = [p.numpy() for p in get_parameters(mine)]
    with ema.applied():
        for a, b in zip(get_parameters(mine), average.module.parameters(), strict=True):
            np.testing.assert_allclose(a.numpy(), b.detach().numpy(), rtol=1e-5, atol=1e-6)
    assert all((p.numpy() == kept).all() for p, kept in zip(get_parameters(mine), own, strict=True))


def test_values_come_back_after_an_error() -> None:
    weight = Tensor([1.0])
    ema = EMA([weight])
    ema.update()
    weight.assign(Tensor([3.0])).realize()
    with pytest.raises(RuntimeError), ema.applied():
        assert weight.item() == 1
        raise RuntimeError
    assert weight.item() == 3


def test_halves_are_averaged_in_float32() -> None:
    weight = Tensor([1.0]).half()
    ema = EMA([weight], decay=0.999)
    for value in (1.0, 2.0):
        weight.assign(Tensor([value]).half()).realize()
        ema.update()
    np.testing.assert_allclose(ema.averages[0].numpy(), [1.001], rtol=1e-6)
    with ema.applied():
        assert weight.dtype.name == "float16" and weight.item() == np.float16(1.001)


def test_state_goes_on() -> None:
    weight = Tensor([1.0])
    first = EMA([weight], 0.5)
    first.update()
    second = EMA([weight], 0.5)
    load_state_dict(second, {name: Tensor(t.numpy()) for name, t in get_state_dict(first).items()})
    weight.assign(Tensor([3.0])).realize()
    second.update()
    assert second.averages[0].item() == 2


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(([],), "nothing to average"), (([1.0],), "float tensors"), (([Tensor([1])],), "float tensors"),
     (([Tensor([1.0])], 1.0), "below 1"), ((3,), "takes float tensors")],
)  # fmt: skip
def test_refused(arguments: Any, reason: str) -> None:
    with pytest.raises(ArgumentError, match=reason):
        EMA(*arguments)
