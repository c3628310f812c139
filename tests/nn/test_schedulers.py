"""Learning-rate schedulers, step by step against torch.optim.lr_scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as theirs

from whit import Tensor, TinyJit
from whit.helpers import ArgumentError
from whit.nn import schedulers as ours
from whit.nn.optim import SGD, Adam

RATES = (0.4, 0.02)

# name -> arguments; the same for both
CASES: list[tuple[str, dict[str, Any]]] = [
    ("LambdaLR", {"lr_lambda": lambda t: 1 / (1 + t)}),
    ("LambdaLR", {"lr_lambda": [lambda t: 0.9**t, lambda t: 1 + t]}),
    ("MultiplicativeLR", {"lr_lambda": lambda t: 0.9 if t % 2 else 1.05}),
    ("StepLR", {"step_size": 3, "gamma": 0.5}),
    ("MultiStepLR", {"milestones": [2, 5, 5, 11], "gamma": 0.3}),
    ("ConstantLR", {"factor": 0.25, "total_iters": 4}),
    ("LinearLR", {"start_factor": 0.2, "end_factor": 0.8, "total_iters": 7}),
    ("LinearLR", {"total_iters": 1}),
    ("ExponentialLR", {"gamma": 0.8}),
    ("PolynomialLR", {"total_iters": 9, "power": 2.0}),
    ("CosineAnnealingLR", {"T_max": 8, "eta_min": 0.001}),
    ("CosineAnnealingLR", {"T_max": 30}),
    ("CosineAnnealingWarmRestarts", {"T_0": 4, "T_mult": 1}),
    ("CosineAnnealingWarmRestarts", {"T_0": 3, "T_mult": 2, "eta_min": 0.01}),
    ("OneCycleLR", {"max_lr": 1.0, "total_steps": 21}),
    ("OneCycleLR", {"max_lr": [1.0, 0.5], "epochs": 4, "steps_per_epoch": 6, "pct_start": 0.4}),
    ("OneCycleLR", {"max_lr": 0.8, "total_steps": 30, "anneal_strategy": "linear", "three_phase": True}),
]


def pair(momentum: float = 0.9) -> tuple[SGD, torch.optim.SGD]:
    """An optimiser with two groups here and there."""
    mine = SGD([{"params": [Tensor([1.0])], "lr": r} for r in RATES], momentum=momentum)
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in RATES]
    groups = [{"params": [p], "lr": r} for p, r in zip(parameters, RATES, strict=True)]
    return mine, torch.optim.SGD(groups, momentum=momentum)


def rates(mine: SGD) -> list[float]:
    return [group["lr"].item() for group in mine.param_groups]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_against_torch(name: str, arguments: dict[str, Any]) -> None:
    mine, other = pair()
    a, b = getattr(ours, name)(mine, **arguments), getattr(theirs, name)(other, **arguments)
    for _ in range(20):
        np.testing.assert_allclose(rates(mine), b.get_last_lr(), rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(a.get_last_lr(), b.get_last_lr(), rtol=1e-6, atol=1e-9)
        if name == "OneCycleLR":
            momenta = [float(g["momentum"].item()) for g in mine.param_groups]
            np.testing.assert_allclose(momenta, [g["momentum"] for g in other.param_groups], rtol=1e-6)
        a.step()
        b.step()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("threshold_mode", ["rel", "abs"])
@pytest.mark.parametrize("cooldown", [0, 2])
def test_plateaus(mode: str, threshold_mode: str, cooldown: int) -> None:
    arguments = {
        "mode": mode, "threshold_mode": threshold_mode, "cooldown": cooldown, "patience": 1, "factor": 0.5,
        "threshold": 0.05, "min_lr": [0.01, 0.001],
    }  # fmt: skip
    mine, other = pair()
    a, b = ours.ReduceLROnPlateau(mine, **arguments), theirs.ReduceLROnPlateau(other, **arguments)
    for value in [5, 4, 4, 4.1, 3.9, 4, 4, 4, 8, 8.2, 8.2, 8.1, 2, 2, 2, 2, 2, 2, 2, 2]:
        a.step(value)
        b.step(value)
        np.testing.assert_allclose(rates(mine), [g["lr"] for g in other.param_groups], rtol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_one_after_another_and_at_once() -> None:
    mine, other = pair()
    a = ours.SequentialLR(
        mine,
        [
            ours.LinearLR(mine, 0.1, total_iters=4),
            ours.CosineAnnealingLR(mine, 8),
            ours.ConstantLR(mine, 0.5),
        ],
        milestones=[4, 10],
    )
    b = theirs.SequentialLR(
        other,
        [
            theirs.LinearLR(other, 0.1, total_iters=4),
            theirs.CosineAnnealingLR(other, 8),
            theirs.ConstantLR(other, 0.5),
        ],
        milestones=[4, 10],
    )
    for _ in range(18):
        np.testing.assert_allclose(rates(mine), b.get_last_lr(), rtol=1e-6)
        a.step()
        b.step()
    mine, other = pair()
    both = [ours.ConstantLR(mine, 0.1, 3), ours.ExponentialLR(mine, 0.9)]
    chain = ours.ChainedScheduler(both)
    b = theirs.ChainedScheduler([theirs.ConstantLR(other, 0.1, 3), theirs.ExponentialLR(other, 0.9)])
    for _ in range(8):
        np.testing.assert_allclose(rates(mine), b.get_last_lr(), rtol=1e-6)
        chain.step()
        b.step()


def test_fractions_of_time() -> None:
    mine, other = pair()
    a = ours.CosineAnnealingWarmRestarts(mine, 3, 2)
    b = theirs.CosineAnnealingWarmRestarts(other, 3, 2)
    for time in (0.5, 2.9, 3.0, 8.75, 9.25, 1.0):
        a.step(time)
        b.step(time)
        np.testing.assert_allclose(rates(mine), b.get_last_lr(), rtol=1e-6)


def build(kind: str, optimizer: SGD) -> ours.LRScheduler:
    made: dict[str, Callable[[], ours.LRScheduler]] = {
        "step": lambda: ours.StepLR(optimizer, 2, 0.5),
        "plateau": lambda: ours.ReduceLROnPlateau(optimizer, patience=0),
        "restarts": lambda: ours.CosineAnnealingWarmRestarts(optimizer, 3, 2),
        "cycle": lambda: ours.OneCycleLR(optimizer, 0.5, 20),
        "sequence": lambda: ours.SequentialLR(
            optimizer, [ours.LinearLR(optimizer), ours.ExponentialLR(optimizer, 0.7)], [3]
        ),
        "chain": lambda: ours.ChainedScheduler(
            [ours.LinearLR(optimizer), ours.MultiplicativeLR(optimizer, lambda t: 0.7)]
        ),
    }
    return made[kind]()


@pytest.mark.parametrize("kind", ["step", "plateau", "restarts", "cycle", "sequence", "chain"])
def test_going_on_from_a_saved_state(kind: str) -> None:
    def steps(scheduler: Any, optimizer: SGD, values: list[float]) -> list[list[float]]:
        seen = []
        for value in values:
            scheduler.step(value) if kind == "plateau" else scheduler.step()
            seen.append(rates(optimizer))
        return seen

    losses = [3.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0]
    whole, _ = pair()
    wanted = steps(build(kind, whole), whole, losses)
    first, _ = pair()
    half = build(kind, first)
    steps(half, first, losses[:4])
    second, _ = pair()
    resumed = build(kind, second)
    resumed.load_state_dict(half.state_dict())
    assert steps(resumed, second, losses[4:]) == wanted[4:]


def test_captured_steps_follow_the_schedule() -> None:
    w = Tensor([8.0])
    optimizer = SGD([w], lr=1.0)
    scheduler = ours.StepLR(optimizer, 1, 0.5)

    @TinyJit
    def step() -> Tensor:
        optimizer.zero_grad()
        loss = w.sum()
        loss.backward()
        optimizer.step()
        return loss.realize()

    seen = []
    for _ in range(5):
        step()
        scheduler.step()
        seen.append(w.item())
    assert seen == [7.0, 6.5, 6.25, 6.125, 6.0625]


def test_momentum_of_captured_steps_follows_the_cycle() -> None:
    def run(jit: bool) -> list[float]:
        w = Tensor([8.0])
        optimizer = SGD([w], lr=1.0, momentum=0.9)
        scheduler = ours.OneCycleLR(optimizer, 0.1, 12)

        def step() -> None:
            optimizer.zero_grad()
            w.square().sum().backward()
            optimizer.step()

        call, seen = TinyJit(step) if jit else step, []
        for _ in range(10):
            call()
            scheduler.step()
            seen.append(w.item())
        return seen

    v = torch.nn.Parameter(torch.tensor([8.0]))
    other = torch.optim.SGD([v], lr=1.0, momentum=0.9)
    b, wanted = theirs.OneCycleLR(other, 0.1, 12), []
    for _ in range(10):
        other.zero_grad()
        v.square().sum().backward()
        other.step()
        b.step()
        wanted.append(v.item())
    np.testing.assert_allclose(run(False), wanted, rtol=1e-5)
    np.testing.assert_allclose(run(True), wanted, rtol=1e-5)


def one(momentum: float = 0.0) -> SGD:
    return SGD([Tensor([1.0])], lr=1.0, momentum=momentum)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: ours.StepLR("none", 2), "no optimiser"),
    (lambda: ours.StepLR(one(), 0), "whole number from 1"),
    (lambda: ours.StepLR(one(), 2.5), "whole number from 1"),
    (lambda: ours.LambdaLR(one(), [abs, abs]), "one for each of 1 groups"),
    (lambda: ours.LinearLR(one(), start_factor=0), "above 0"),
    (lambda: ours.ConstantLR(one(), factor=2), "from 0 to 1"),
    (lambda: ours.CosineAnnealingLR(one(), T_max="x"), "whole number"),
    (lambda: ours.CosineAnnealingWarmRestarts(one(), 3).step(-1), "time starts at 0"),
    (lambda: ours.OneCycleLR(one(), 1.0), "whole number"),
    (lambda: ours.OneCycleLR(one(), [1.0, 2.0], 5), "1 groups"),
    (lambda: ours.OneCycleLR(one(), 1.0, 5, anneal_strategy="up"), "linear"),
    (lambda: ours.OneCycleLR(Adam([Tensor([1.0])]), 1.0, 5, cycle_momentum=True), "no momentum"),
    (lambda: [s.step() for s in [ours.OneCycleLR(one(), 1.0, 2)] * 2], "has 2 steps"),
    (lambda: ours.ReduceLROnPlateau(one(), factor=1.0), "below 1"),
    (lambda: ours.ReduceLROnPlateau(one(), mode="up"), "max"),
    (lambda: ours.ReduceLROnPlateau(one()).step(), "measured value"),
    (lambda: ours.ReduceLROnPlateau(one()).step("low"), "kind that step does not take"),
    (lambda: ours.ReduceLROnPlateau(one(), min_lr=[0, 0]), "1 groups"),
    (lambda: ours.ChainedScheduler([]), "list of schedulers"),
    (lambda: ours.ChainedScheduler([ours.LinearLR(one()), ours.LinearLR(one())]), "one optimiser"),
    (lambda: ours.SequentialLR(one(), [], []), "between any two"),
    (lambda: ours.StepLR(one(), 2).load_state_dict({"last_epoch": 1}), "its own state"),
    (lambda: ours.StepLR(one(), 2).load_state_dict(3), "does not take"),
]


@pytest.mark.parametrize(("call", "reason"), REFUSED)
def test_refused(call: Callable[[], Any], reason: str) -> None:
    with pytest.raises(ArgumentError, match=reason):
        call()
