"""Loss scaling: scales and skipped steps against torch.amp.GradScaler, and a network that needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from whit import Tensor, TinyJit
from whit.helpers import ArgumentError
from whit.nn.clip import clip_grad_norm_
from whit.nn.optim import SGD, Adam
from whit.nn.scaling import GradScaler
from whit.nn.state import get_state_dict

FACTORS = [1.0, 2.0, float("inf"), 3.0, 1.0, float("nan"), 1.0, 1.0, 1.0, 2.0]


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("adam", [False, True])
def test_against_torch(adam: bool, jit: bool) -> None:
    """Losses with inf and NaN among them: the same weights, and the same scale."""
    start = np.array([1.0, -2.0], np.float32)
    w, v = Tensor(start), torch.nn.Parameter(torch.tensor(start))
    mine: Any = Adam([w], lr=0.1) if adam else SGD([w], lr=0.1, momentum=0.9)
    theirs: Any = torch.optim.Adam([v], lr=0.1) if adam else torch.optim.SGD([v], lr=0.1, momentum=0.9)
    settings = {"init_scale": 256.0, "growth_interval": 2}
    a, b = GradScaler(**settings), torch.amp.GradScaler("cpu", **settings)

    def step(factor: Tensor) -> None:
        mine.zero_grad()
        a.scale((w.square() * factor).sum()).backward()
        a.step(mine)
        a.update()

    call = TinyJit(step) if jit else step
    for factor in FACTORS:
        call(Tensor([factor]).realize())
        theirs.zero_grad()
        b.scale((v.square() * factor).sum()).backward()
        b.step(theirs)
        b.update()
        np.testing.assert_allclose(w.numpy(), v.detach().numpy(), rtol=1e-5)
        assert a.get_scale() == b.get_scale()


def small_network(scaled: bool) -> tuple[float, float]:
    """A float16 network whose gradients need a scale, else they are below the least float16: the loss before
    and after."""
    rng = np.random.default_rng(0)
    x = Tensor(rng.standard_normal((64, 8)).astype(np.float16))
    y = x @ Tensor(rng.standard_normal((8, 1)).astype(np.float16))
    weight = Tensor(np.zeros((8, 1), np.float16))
    optimizer = SGD([weight], lr=2.0**22)
    scaler = GradScaler(init_scale=2.0**16, enabled=scaled)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = ((x @ weight - y).square() * 2.0**-12).mean() * 2.0**-12
        losses.append(loss.float().item() * 2.0**24)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return losses[0], losses[-1]


def test_gradients_that_would_vanish() -> None:
    before, after = small_network(scaled=False)
    assert after == before
    before, after = small_network(scaled=True)
    assert after < before / 100


def test_unscaled_gradients_can_be_clipped() -> None:
    w = Tensor([3.0, 4.0])
    optimizer, scaler = SGD([w], lr=1.0), GradScaler(init_scale=1024.0)
    scaler.scale((w * Tensor([30.0, 40.0])).sum()).backward()
    scaler.unscale_(optimizer)
    assert clip_grad_norm_([w], 5.0).item() == 50
    scaler.step(optimizer)
    scaler.update()
    np.testing.assert_allclose(w.numpy(), [0.0, 0.0], atol=1e-5)


def test_one_bad_optimizer_lowers_the_scale_for_all() -> None:
    v, w = Tensor([1.0]), Tensor([1.0])
    first, second, scaler = SGD([v], lr=1.0), SGD([w], lr=1.0), GradScaler(init_scale=8.0)
    scaler.scale((v * 0.5 + w * float("inf")).sum()).backward()
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert (v.item(), w.item(), scaler.get_scale()) == (0.5, 1.0, 4.0)
    assert set(get_state_dict(scaler)) == {"factor", "growth_tracker"}


def ready() -> tuple[GradScaler, SGD]:
    w = Tensor([1.0])
    scaler, optimizer = GradScaler(), SGD([w])
    scaler.scale(w.sum()).backward()
    return scaler, optimizer


def twice(name: str) -> None:
    scaler, optimizer = ready()
    for _ in range(2):
        getattr(scaler, name)(optimizer)


@pytest.mark.parametrize(("call", "reason"), [
    (lambda: GradScaler(init_scale=0), "above 0"),
    (lambda: GradScaler(growth_factor=1), "above 1"),
    (lambda: GradScaler(backoff_factor=1), "between 0 and 1"),
    (lambda: GradScaler(growth_interval=0), "from 1"),
    (lambda: GradScaler(init_scale="large"), "does not take"),
    (lambda: GradScaler().scale(3.0), "float tensor"),
    (lambda: GradScaler().step("none"), "no optimiser"),
    (lambda: GradScaler().update(), "looked at"),
    (lambda: GradScaler().step(SGD([Tensor([1.0])])), "no parameter has a gradient"),
    (lambda: twice("unscale_"), "unscaled already"),
    (lambda: twice("step"), "since the last update"),
])  # fmt: skip
def test_refused(call: Callable[[], Any], reason: str) -> None:
    with pytest.raises(ArgumentError, match=reason):
        call()
