"""Ten steps of each optimiser against torch.optim, or against the papers' formulas in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from whit import Tensor, TinyJit
from whit.helpers import ArgumentError
from whit.nn.optim import LAMB, LARS, SGD, Adam, AdamW, Muon, Optimizer, OptimizerGroup
from whit.nn.state import get_state_dict, load_state_dict

SHAPES = [(4, 5), (5,), (5, 3)]


def start(seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.normal(size=shape).astype(np.float32) for shape in SHAPES]


def batch(step: int) -> np.ndarray:
    return np.random.default_rng(100 + step).normal(size=(6, 4)).astype(np.float32)


def loss_of(x: Any, a: Any, b: Any, c: Any) -> Any:
    return ((x @ a + b).tanh() @ c).square().mean()


def train(make: Callable[[list[Tensor]], Optimizer], steps: int = 10) -> list[np.ndarray]:
    params = [Tensor(values) for values in start()]
    optimizer = make(params)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(Tensor(batch(step)), *params).backward()
        optimizer.step()
    return [param.numpy() for param in params]


def train_torch(make: Callable[[Any], torch.optim.Optimizer], steps: int = 10) -> list[np.ndarray]:
    params = [torch.tensor(values, requires_grad=True) for values in start()]
    optimizer = make(params)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(torch.tensor(batch(step)), *params).backward()
        optimizer.step()
    return [param.detach().numpy() for param in params]


def train_formula(update: Callable[[int, Any, Any, dict[str, Any]], Any]) -> list[np.ndarray]:
    """Steps in float64 by a formula: (step number from 1, weights, gradient, state) -> new weights."""
    params = [torch.tensor(values, dtype=torch.float64, requires_grad=True) for values in start()]
    states: list[dict[str, Any]] = [{} for _ in params]
    for step in range(10):
        grads = torch.autograd.grad(loss_of(torch.tensor(batch(step), dtype=torch.float64), *params), params)
        new = [
            update(step + 1, p.detach().numpy(), g.numpy(), state)
            for p, g, state in zip(params, grads, states, strict=True)
        ]
        params = [torch.tensor(values, requires_grad=True) for values in new]
    return [param.detach().numpy() for param in params]


def agree(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert any(abs(a - b).max() > 1e-3 for a, b in zip(ours, start(), strict=True))  # something moved


OF_TORCH: dict[str, tuple[Callable[[Any], Optimizer], Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (lambda p: SGD(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": (lambda p: SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "nesterov and decay": (
        lambda p: SGD(p, lr=0.1, momentum=0.8, weight_decay=0.01, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, weight_decay=0.01, nesterov=True),
    ),
    "adam": (lambda p: Adam(p, lr=0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
    "adam with decay": (
        lambda p: Adam(p, lr=0.01, b1=0.8, b2=0.9, eps=1e-6, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1),
    ),
    "adamw": (lambda p: AdamW(p, lr=0.01), lambda p: torch.optim.AdamW(p, lr=0.01)),
    "adamw with decay": (
        lambda p: AdamW(p, lr=0.02, weight_decay=0.3),
        lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.3),
    ),
}


@pytest.mark.parametrize("name", OF_TORCH)
def test_against_torch(name: str) -> None:
    ours, theirs = OF_TORCH[name]
    agree(train(ours), train_torch(theirs))


def test_lamb() -> None:
    """You et al. 2020, algorithm 2, with phi the identity."""

    def update(t: int, w: np.ndarray, g: np.ndarray, state: dict[str, Any]) -> np.ndarray:
        state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
        state["v"] = 0.999 * state.get("v", 0) + 0.001 * g**2
        r = state["m"] / (1 - 0.9**t) / (np.sqrt(state["v"] / (1 - 0.999**t)) + 1e-6) + 0.1 * w
        return w - 0.02 * np.linalg.norm(w) / np.linalg.norm(r) * r

    agree(train(lambda p: LAMB(p, lr=0.02, weight_decay=0.1)), train_formula(update))


def test_lars() -> None:
    """You, Gitman and Ginsburg 2017, algorithm 1."""

    def update(t: int, w: np.ndarray, g: np.ndarray, state: dict[str, Any]) -> np.ndarray:
        rate = 0.02 * np.linalg.norm(w) / (np.linalg.norm(g) + 0.01 * np.linalg.norm(w))
        state["v"] = 0.9 * state.get("v", 0) + 0.5 * rate * (g + 0.01 * w)
        return w - state["v"]

    agree(train(lambda p: LARS(p, lr=0.5, weight_decay=0.01, tcoef=0.02)), train_formula(update))


def orthogonal(x: np.ndarray, steps: int = 5) -> np.ndarray:
    """The quintic iteration of Jordan et al. 2024, written with matrices as they stand there."""
    tall = x.shape[0] > x.shape[1]
    x = (x.T if tall else x) / np.linalg.norm(x)
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x.T if tall else x


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon(nesterov: bool) -> None:
    def update(t: int, w: np.ndarray, g: np.ndarray, state: dict[str, Any]) -> np.ndarray:
        if w.ndim < 2:
            return w - 0.1 * g
        state["v"] = 0.95 * state.get("v", 0) + g
        step = orthogonal(g + 0.95 * state["v"] if nesterov else state["v"])
        return w * (1 - 0.02 * 0.1) - 0.02 * max(1, w.shape[0] / w.shape[1]) ** 0.5 * step

    def make(p: list[Tensor]) -> Optimizer:
        return OptimizerGroup(Muon([p[0], p[2]], lr=0.02, nesterov=nesterov), SGD([p[1]], lr=0.1))

    agree(train(make), train_formula(update))


def test_muon_is_near_torchs() -> None:
    """PyTorch iterates in bfloat16, so only roughly."""
    values = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    w, tw = Tensor(values), torch.tensor(values, requires_grad=True)
    ours, theirs = Muon([w], lr=0.05), torch.optim.Muon([tw], lr=0.05, adjust_lr_fn="original")
    for _ in range(5):
        ours.zero_grad()
        w.square().sum().backward()
        ours.step()
        theirs.zero_grad()
        tw.square().sum().backward()
        theirs.step()
    assert abs(w.numpy() - tw.detach().numpy()).max() < 0.03


def test_muon_of_a_convolution() -> None:
    w = Tensor(np.random.default_rng(0).normal(size=(4, 3, 2, 2)).astype(np.float32))
    before, optimizer = w.numpy(), Muon([w], lr=1.0, weight_decay=0, momentum=0, nesterov=False)
    (w * 2).sum().backward()
    optimizer.step()
    want = before - orthogonal(np.full((4, 12), 2.0)).reshape(4, 3, 2, 2)
    np.testing.assert_allclose(w.numpy(), want, rtol=1e-4, atol=1e-5)


# ---- behaviour ----


def test_captured_steps_equal_plain_ones() -> None:
    def run(jit: bool) -> list[np.ndarray]:
        params = [Tensor(values) for values in start()]
        optimizer = Adam(params, lr=0.01)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(x, *params)
            loss.backward()
            optimizer.step()
            return loss.realize()

        call = TinyJit(step) if jit else step
        losses = [call(Tensor(batch(i)).realize()).item() for i in range(6)]
        return [np.array(losses), *[param.numpy() for param in params]]

    for a, b in zip(run(True), run(False), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_rate_can_change_between_steps() -> None:
    w = Tensor([1.0])
    optimizer = SGD([w], lr=0.5)
    for rate, want in ((0.5, 0.5), (0.25, 0.25)):
        optimizer.lr.assign(Tensor([rate]))
        optimizer.zero_grad()
        w.sum().backward()
        optimizer.step()
        assert w.item() == want


def test_parameters_are_updated_in_place() -> None:
    w = Tensor([1.0, 2.0]).realize()
    memory, kept = w.uop, w + 0
    optimizer = Adam([w], lr=0.1)
    w.square().sum().backward()
    optimizer.step()
    assert w.uop is memory and kept.tolist() == [1.0, 2.0] and w.tolist() != [1.0, 2.0]


def test_values_read_after_the_step_are_those_before_it() -> None:
    w = Tensor([3.0])
    optimizer = SGD([w], lr=0.1)
    loss = w.square().sum()
    loss.backward()
    optimizer.step()
    assert loss.item() == 9.0 and w.grad is not None and w.grad.tolist() == [6.0]


def test_parameters_without_a_gradient_stay() -> None:
    a, b = Tensor([1.0]), Tensor([1.0])
    optimizer = AdamW([a, b], lr=0.1, weight_decay=0.5)
    (a * 2).sum().backward()
    optimizer.step()
    assert b.tolist() == [1.0] and a.tolist() != [1.0]


def test_parameters_count_once_and_frozen_ones_do_not() -> None:
    a, frozen, counts = Tensor([1.0]), Tensor([1.0], requires_grad=False), Tensor([1, 2])
    optimizer = SGD([a, frozen, a, counts], lr=0.1)
    assert len(optimizer.params) == 1 and optimizer.params[0] is a and a.requires_grad


def test_a_scalar_parameter() -> None:
    for make in (SGD, Adam, AdamW, LAMB, LARS):
        w = Tensor(2.0)
        optimizer = make([w], lr=0.5)
        (w * 3).backward()
        optimizer.step()
        assert w.shape == () and w.item() < 2.0


def test_half_precision_parameters() -> None:
    w = Tensor([1.0, 2.0], dtype="float16")
    optimizer = Adam([w], lr=0.1)
    w.square().sum().backward()
    optimizer.step()
    assert w.dtype.name == "float16" and optimizer.m[0].dtype.name == "float32"
    np.testing.assert_allclose(w.numpy(), [0.9, 1.9], rtol=1e-3)


def test_state_is_saved_and_restored() -> None:
    def steps(params: list[Tensor], optimizer: Optimizer, numbers: range) -> None:
        for i in numbers:
            optimizer.zero_grad()
            loss_of(Tensor(batch(i)), *params).backward()
            optimizer.step()

    whole = [Tensor(values) for values in start()]
    steps(whole, Adam(whole, lr=0.05), range(6))
    first = [Tensor(values) for values in start()]
    optimizer = Adam(first, lr=0.05)
    steps(first, optimizer, range(3))
    saved = {name: Tensor(t.numpy()) for name, t in get_state_dict(optimizer).items()}
    second = [Tensor(values) for values in start(seed=9)]
    resumed = Adam(second, lr=0.1)
    load_state_dict(resumed, saved)
    steps(second, resumed, range(3, 6))
    assert all((a.numpy() == b.numpy()).all() for a, b in zip(whole, second, strict=True))


def test_running_statistics_are_computed_with_the_step() -> None:
    from whit import nn

    layer, norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
    optimizer = SGD([layer.weight, norm.weight], lr=0.1)
    with Tensor.train():
        norm(layer(Tensor(np.eye(5, 3, dtype=np.float32)))).square().sum().backward()
        optimizer.step()
    assert norm.running_mean.uop.op.name in ("BUFFER", "RESHAPE") and norm.num_batches_tracked.item() == 1


def test_refused() -> None:
    w = Tensor([1.0])
    for make, reason in (
        (lambda: SGD([]), "can be trained"),
        (lambda: SGD([Tensor([1])]), "can be trained"),
        (lambda: SGD([1.0]), "parameters are tensors"),
        (lambda: SGD([w], lr=-1), "a number from 0"),
        (lambda: SGD([w], lr=float("nan")), "a number from 0"),
        (lambda: SGD([w], nesterov=True), "momentum"),
        (lambda: Adam([w], b1=1.0), "below 1"),
        (lambda: Adam([w], eps=-1), "a number from 0"),
        (lambda: Muon([w]), "made orthogonal"),
        (lambda: OptimizerGroup(), "no optimisers"),
        (lambda: SGD([w]).step(), "no parameter has a gradient"),
    ):
        with pytest.raises(ArgumentError, match=reason):
            make()


def test_a_captured_step_follows_a_changed_rate() -> None:
    w = Tensor([8.0])
    optimizer = SGD([w], lr=1.0)

    @TinyJit
    def step() -> Tensor:
        optimizer.zero_grad()
        loss = w.sum()
        loss.backward()
        optimizer.step()
        return loss.realize()

    seen = []
    for rate in (1.0, 1.0, 1.0, 0.5, 0.25):
        optimizer.lr.assign(Tensor([rate])).realize()
        step()
        seen.append(w.item())
    assert seen == [7.0, 6.0, 5.0, 4.5, 4.25]


# ---- groups ----


def test_groups_against_torch() -> None:
    """Settings of their own, and a group that joins after some steps."""

    def run(make: Any, tensor: Any, backend: Any) -> list[np.ndarray]:
        params = [tensor(values) for values in start()]
        optimizer = make([
            {"params": params[:1], "lr": 0.05, "weight_decay": 0.1},
            {"params": params[1:2]},
        ])  # fmt: skip
        for step in range(8):
            if step == 3:
                optimizer.add_param_group({"params": params[2:], "lr": 0.01})
            optimizer.zero_grad()
            loss_of(backend(batch(step)), *params).backward()
            optimizer.step()
        return [param.detach().numpy() for param in params]

    def leaf(values: np.ndarray) -> torch.Tensor:
        return torch.tensor(values, requires_grad=True)

    pairs: list[tuple[Any, Any]] = [
        (lambda p: SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        (lambda p: Adam(p, lr=0.1), lambda p: torch.optim.Adam(p, lr=0.1)),
        (lambda p: AdamW(p, lr=0.1), lambda p: torch.optim.AdamW(p, lr=0.1)),
    ]
    for mine, theirs in pairs:
        for a, b in zip(run(mine, Tensor, Tensor), run(theirs, leaf, torch.tensor), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_groups_differ_in_momentum_and_betas() -> None:
    a, b = Tensor([1.0]), Tensor([1.0])
    optimizer = SGD([{"params": [a], "momentum": 0.5}, {"params": b}], lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        (a + b).sum().backward()
        optimizer.step()
    assert (a.item(), b.item()) == (1 - 1 - 1.5, 1 - 1 - 1)
    assert [g["momentum"] for g in optimizer.param_groups] == [0.5, 0.0]


def test_group_of_optimizers_shows_all_groups() -> None:
    a, b = Tensor([1.0]), Tensor([1.0])
    both = OptimizerGroup(SGD([a], lr=0.5), Adam([b], lr=0.25))
    assert [g["lr"].item() for g in both.param_groups] == [0.5, 0.25]
    assert both.params == [a, b] and both.lr is both.param_groups[0]["lr"]


def test_refused_groups() -> None:
    v, w = Tensor([1.0]), Tensor([2.0])
    for make, reason in (
        (lambda: SGD([{"lr": 0.1}]), 'needs "params"'),
        (lambda: SGD([{"params": [w], "speed": 3}]), "no setting 'speed'"),
        (lambda: SGD([{"params": [w]}, {"params": [v, w]}]), "two groups"),
        (lambda: SGD([{"params": [w], "lr": -1}]), "a number from 0"),
        (lambda: Adam([{"params": [w], "b1": 1}]), "below 1"),
        (lambda: SGD([{"params": []}]), "can be trained"),
        (lambda: SGD([{"params": [w]}, v]), "parameters are tensors"),
        (lambda: SGD([w], lr="fast"), "kind that SGD does not take"),
        (lambda: OptimizerGroup(SGD([w])).add_param_group({"params": [v]}), "which of the optimisers"),
    ):
        with pytest.raises(ArgumentError, match=reason):
            make()
    optimizer = SGD([w], lr=0.5)
    with pytest.raises(ArgumentError):
        optimizer.add_param_group({"params": [v], "momentum": -1})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("kind", [SGD, Adam, Muon, LARS])
def test_skipped_steps_change_nothing(kind: Any) -> None:
    w = Tensor(np.arange(6, dtype=np.float32).reshape(2, 3))
    optimizer = kind([w], **({"momentum": 0.9} if kind is SGD else {}))
    for _ in range(2):
        optimizer.zero_grad()
        w.square().sum().backward()
        optimizer.step()
    before = {name: t.numpy() for name, t in get_state_dict(optimizer).items()}
    optimizer.zero_grad()
    (w * float("nan")).sum().backward()
    Tensor.realize(*optimizer.schedule_step(skip=Tensor(True)))
    for name, tensor in get_state_dict(optimizer).items():
        np.testing.assert_array_equal(tensor.numpy(), before[name], err_msg=name)
