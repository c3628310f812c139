"""Layers against PyTorch's modules with the same weights: values, gradients, names, first values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from whit import Tensor, nn
from whit.helpers import ArgumentError, Context, DTypeError, ShapeError
from whit.nn.state import get_parameters, get_state_dict

Case = tuple[Callable[[], Any], Callable[[], torch.nn.Module], tuple[int, ...]]
CASES: dict[str, Case] = {
    "linear": (lambda: nn.Linear(5, 3), lambda: torch.nn.Linear(5, 3), (4, 5)),
    "linear of a batch": (lambda: nn.Linear(5, 3), lambda: torch.nn.Linear(5, 3), (2, 4, 5)),
    "linear without bias": (
        lambda: nn.Linear(5, 3, bias=False),
        lambda: torch.nn.Linear(5, 3, bias=False),
        (4, 5),
    ),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), lambda: torch.nn.Conv1d(4, 6, 3, padding=1), (2, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3), lambda: torch.nn.Conv2d(3, 4, 3), (2, 3, 7, 6)),
    "conv2d with all": (
        lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2, bias=False),
        lambda: torch.nn.Conv2d(
            4, 6, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2, bias=False
        ),
        (2, 4, 7, 8),
    ),
    "conv2d same": (
        lambda: nn.Conv2d(2, 3, (3, 4), padding="same", dilation=(1, 2)),
        lambda: torch.nn.Conv2d(2, 3, (3, 4), padding="same", dilation=(1, 2)),
        (1, 2, 6, 7),
    ),
    "conv2d valid": (
        lambda: nn.Conv2d(2, 3, 3, padding="valid"),
        lambda: torch.nn.Conv2d(2, 3, 3),
        (1, 2, 6, 7),
    ),
    "conv transpose": (
        lambda: nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1, output_padding=1),
        lambda: torch.nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1, output_padding=1),
        (2, 4, 4, 5),
    ),
    "conv transpose with groups": (
        lambda: nn.ConvTranspose2d(4, 6, (2, 3), groups=2, dilation=(2, 1), bias=False),
        lambda: torch.nn.ConvTranspose2d(4, 6, (2, 3), groups=2, dilation=(2, 1), bias=False),
        (1, 4, 3, 4),
    ),
    "layer norm": (lambda: nn.LayerNorm(6), lambda: torch.nn.LayerNorm(6), (4, 6)),
    "layer norm of two axes": (
        lambda: nn.LayerNorm((3, 4), eps=1e-3),
        lambda: torch.nn.LayerNorm((3, 4), eps=1e-3),
        (2, 3, 4),
    ),
    "conv3d": (lambda: nn.Conv3d(4, 6, 3), lambda: torch.nn.Conv3d(4, 6, 3), (2, 4, 5, 6, 4)),
    "conv3d with all": (
        lambda: nn.Conv3d(4, 6, (2, 3, 1), stride=(1, 2, 1), padding=(2, 0, 1), dilation=(2, 1, 1), groups=2),
        lambda: torch.nn.Conv3d(4, 6, (2, 3, 1), (1, 2, 1), (2, 0, 1), (2, 1, 1), 2),
        (2, 4, 5, 7, 3),
    ),
    "conv3d same": (
        lambda: nn.Conv3d(2, 3, (2, 3, 4), padding="same", bias=False),
        lambda: torch.nn.Conv3d(2, 3, (2, 3, 4), padding="same", bias=False),
        (1, 2, 4, 5, 6),
    ),
    "conv transpose 1d": (
        lambda: nn.ConvTranspose1d(4, 6, 3, stride=3, padding=1, output_padding=2, groups=2, dilation=2),
        lambda: torch.nn.ConvTranspose1d(4, 6, 3, 3, 1, 2, 2, True, 2),
        (2, 4, 7),
    ),
    "conv transpose 3d": (
        lambda: nn.ConvTranspose3d(4, 2, (2, 3, 1), (2, 1, 2), (1, 0, 0), (1, 0, 1), bias=False),
        lambda: torch.nn.ConvTranspose3d(4, 2, (2, 3, 1), (2, 1, 2), (1, 0, 0), (1, 0, 1), bias=False),
        (2, 4, 3, 4, 2),
    ),
    "layer norm without bias": (
        lambda: nn.LayerNorm(6, bias=False),
        lambda: torch.nn.LayerNorm(6, bias=False),
        (4, 6),
    ),
    "layer norm alone": (
        lambda: nn.LayerNorm(6, elementwise_affine=False),
        lambda: torch.nn.LayerNorm(6, elementwise_affine=False),
        (4, 6),
    ),
    "rms norm": (lambda: nn.RMSNorm(6), lambda: torch.nn.RMSNorm(6, eps=1e-6), (4, 6)),
    "group norm": (lambda: nn.GroupNorm(2, 6), lambda: torch.nn.GroupNorm(2, 6), (3, 6, 4, 2)),
    "group norm alone": (
        lambda: nn.GroupNorm(3, 6, affine=False),
        lambda: torch.nn.GroupNorm(3, 6, affine=False),
        (3, 6, 4),
    ),
    "instance norm": (
        lambda: nn.InstanceNorm(3),
        lambda: torch.nn.InstanceNorm2d(3, affine=True),
        (2, 3, 4, 5),
    ),
}


def same_weights(ours: Any, theirs: torch.nn.Module, seed: int = 0) -> None:
    """Random parameters (also where both start as ones and zeros), in both; names and shapes must agree."""
    generator = np.random.default_rng(seed)
    mine, other = get_state_dict(ours), dict(theirs.named_parameters())
    assert {n: t.shape for n, t in mine.items() if t.requires_grad} == {
        n: tuple(p.shape) for n, p in other.items()
    }
    for name, parameter in other.items():
        values = generator.normal(size=tuple(parameter.shape)).astype(np.float32)
        parameter.data = torch.tensor(values)
        mine[name].assign(Tensor(values))


def compare(got: Tensor | None, want: torch.Tensor | None, atol: float = 2e-5) -> None:
    assert got is not None and want is not None
    np.testing.assert_allclose(got.numpy(), want.detach().numpy(), rtol=1e-4, atol=atol)


def compare_all(ours: Any, theirs: torch.nn.Module, shape: tuple[int, ...]) -> None:
    """Outputs, gradients of all parameters and of the input."""
    generator = np.random.default_rng(1)
    values = generator.normal(size=shape).astype(np.float32)
    x, tx = Tensor(values, requires_grad=True), torch.tensor(values, requires_grad=True)
    out, tout = ours(x), theirs(tx)
    weights = generator.normal(size=tuple(tout.shape)).astype(np.float32)
    assert out.shape == tuple(tout.shape)
    (out * Tensor(weights)).sum().backward()
    (tout * torch.tensor(weights)).sum().backward()
    grads = {name: t for name, t in get_state_dict(ours).items() if t.requires_grad}
    Tensor.realize(out, x.grad, *[t.grad for t in grads.values() if t.grad is not None])
    compare(out, tout)
    compare(x.grad, tx.grad)
    for name, parameter in theirs.named_parameters():
        compare(grads[name].grad, parameter.grad, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_layer(name: str) -> None:
    make, make_theirs, shape = CASES[name]
    ours, theirs = make(), make_theirs()
    same_weights(ours, theirs)
    compare_all(ours, theirs, shape)


def test_layer_norm_2d() -> None:
    ours, theirs = nn.LayerNorm2d(3), torch.nn.LayerNorm(3)
    same_weights(ours, theirs)
    values = np.random.default_rng(0).normal(size=(2, 3, 4, 5)).astype(np.float32)
    compare(ours(Tensor(values)), theirs(torch.tensor(values).permute(0, 2, 3, 1)).permute(0, 3, 1, 2))


@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5), (2, 3, 4, 5), (2, 3, 2, 2, 3)])
def test_batch_norm_in_training(shape: tuple[int, ...]) -> None:
    kind = {
        2: torch.nn.BatchNorm1d,
        3: torch.nn.BatchNorm1d,
        4: torch.nn.BatchNorm2d,
        5: torch.nn.BatchNorm3d,
    }
    ours, theirs = nn.BatchNorm(3), kind[len(shape)](3)
    same_weights(ours, theirs)
    with Context(TRAINING=1):
        compare_all(ours, theirs, shape)
        ours(Tensor(np.full(shape, 2, np.float32)))
    theirs(torch.full(shape, 2.0))
    compare(ours.running_mean, theirs.running_mean)
    compare(ours.running_var, theirs.running_var)
    assert ours.num_batches_tracked.item() == 2
    theirs.eval()
    values = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    compare(ours(Tensor(values)), theirs(torch.tensor(values)))
    assert ours.num_batches_tracked.item() == 2


def test_batch_norm_with_plain_average_and_without_statistics() -> None:
    ours, theirs = nn.BatchNorm2d(2, momentum=None), torch.nn.BatchNorm2d(2, momentum=None)
    for seed in range(3):
        values = np.random.default_rng(seed).normal(size=(3, 2, 2, 2)).astype(np.float32)
        with Tensor.train():
            ours(Tensor(values))
        theirs(torch.tensor(values))
    compare(ours.running_mean, theirs.running_mean)
    compare(ours.running_var, theirs.running_var)
    plain = nn.BatchNorm2d(2, affine=False, track_running_stats=False)
    compare_all(plain, torch.nn.BatchNorm2d(2, affine=False, track_running_stats=False), (3, 2, 2, 2))


def test_batch_norm_names() -> None:
    names = {name for name in get_state_dict(nn.BatchNorm2d(3))}
    assert names == set(torch.nn.BatchNorm2d(3).state_dict())


def test_embedding() -> None:
    ours, theirs = nn.Embedding(7, 4), torch.nn.Embedding(7, 4)
    same_weights(ours, theirs)
    rows = [[0, 6, 6], [3, 0, 1]]
    (ours(Tensor(rows)).square()).sum().backward()
    theirs(torch.tensor(rows)).square().sum().backward()
    compare(ours(Tensor(rows)), theirs(torch.tensor(rows)))
    compare(ours.weight.grad, theirs.weight.grad)
    with pytest.raises(ArgumentError, match="whole numbers"):
        ours(Tensor([1.0]))


def test_dropout() -> None:
    layer, x = nn.Dropout(0.25), Tensor.ones(100, 100, requires_grad=True)
    assert layer(x) is x or layer(x).numpy().min() == 1
    with Context(TRAINING=1):
        out = layer(x)
        out.sum().backward()
    values = out.numpy()
    assert set(np.unique(values)) == {0.0, np.float32(1 / 0.75)} and abs((values == 0).mean() - 0.25) < 0.02
    assert x.grad is not None and (x.grad.numpy() == values).all()


def test_lstm_cell() -> None:
    ours, theirs = nn.LSTMCell(3, 5), torch.nn.LSTMCell(3, 5)
    same_weights(ours, theirs)
    values = np.random.default_rng(0).normal(size=(3, 2, 3)).astype(np.float32)
    state: Any = None
    tstate: Any = None
    for step in values:
        state, tstate = ours(Tensor(step), state), theirs(torch.tensor(step), tstate)
    (state[0].sum() + state[1].square().sum()).backward()
    (tstate[0].sum() + tstate[1].square().sum()).backward()
    compare(state[0], tstate[0])
    compare(state[1], tstate[1])
    compare(ours.weight_hh.grad, theirs.weight_hh.grad)
    compare(ours.bias_ih.grad, theirs.bias_ih.grad)


@pytest.mark.parametrize("name", ["linear", "conv2d with all", "conv1d", "conv transpose"])
def test_first_values_are_spread_like_pytorchs(name: str) -> None:
    make, make_theirs, _ = CASES[name]
    Tensor.manual_seed(1)
    ours = np.concatenate([p.numpy().ravel() for p in get_parameters([make() for _ in range(10)])])
    theirs = torch.cat([p.detach().ravel() for _ in range(10) for p in make_theirs().parameters()]).numpy()
    assert ours.std() == pytest.approx(theirs.std(), rel=0.15) and abs(ours).max() == pytest.approx(
        abs(theirs).max(), rel=0.05
    )
    assert abs(ours.mean()) < 0.1 * abs(ours).max()


def test_first_values_repeat_with_the_seed() -> None:
    first, second = [], []
    for values in (first, second):
        Tensor.manual_seed(5)
        values += [nn.Linear(3, 4).weight.numpy(), nn.Embedding(3, 4).weight.numpy()]
    assert all((a == b).all() for a, b in zip(first, second, strict=True))
    assert abs(nn.Embedding(100, 50).weight.numpy().std() - 1) < 0.05


def test_half_precision_statistics_are_taken_in_float32() -> None:
    x = Tensor(np.full((1, 4096), 300, np.float16)) * 1.0
    x = x + Tensor(np.tile(np.array([-1, 1], np.float16), 2048))
    out = nn.LayerNorm(4096, elementwise_affine=False)(x)
    assert out.dtype.name == "float16" and abs(abs(out.numpy()) - 1).max() < 0.01
    assert nn.RMSNorm(4096)(x).dtype.name == "float32" and np.isfinite(nn.RMSNorm(4096)(x).numpy()).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(0, 3),
        lambda: nn.Linear(2.5, 3),
        lambda: nn.Conv2d(3, 4, 3, groups=2),
        lambda: nn.Conv2d(3, 4, (1, 2, 3)),
        lambda: nn.Conv2d(3, 4, 3, padding="full"),
        lambda: nn.Conv2d(3, 4, 3, padding="same", stride=2),
        lambda: nn.Dropout(1.5),
        lambda: nn.GroupNorm(4, 6),
        lambda: nn.ConvTranspose2d(3, 4, 2, groups=2),
        lambda: nn.Embedding(-1, 3),
        lambda: nn.LayerNorm(0),
    ],
)
def test_impossible_layers(make: Callable[[], Any]) -> None:
    with pytest.raises(ArgumentError):
        make()


@pytest.mark.parametrize(
    "call",
    [
        lambda: nn.Linear(5, 3)(Tensor.ones(4)),
        lambda: nn.Linear(5, 3)(Tensor(1.0)),
        lambda: nn.Conv2d(3, 4, 3)(Tensor.ones(1, 2, 5, 5)),
        lambda: nn.Conv2d(3, 4, 3)(Tensor.ones(5, 5)),
        lambda: nn.BatchNorm(3)(Tensor.ones(3)),
        lambda: nn.BatchNorm(3)(Tensor.ones(2, 4)),
        lambda: nn.LayerNorm(3)(Tensor.ones(2, 4)),
        lambda: nn.RMSNorm(3)(Tensor.ones(2, 4)),
        lambda: nn.GroupNorm(2, 4)(Tensor.ones(2, 3)),
    ],
)
def test_wrong_shapes_are_refused_by_the_layer(call: Callable[[], Any]) -> None:
    with pytest.raises(ShapeError, match=r"must have size|normalises the last axes"):
        call()


def test_batch_norm_of_one_value() -> None:
    with Context(TRAINING=1), pytest.raises(ShapeError, match="variance is not defined"):
        nn.BatchNorm(3)(Tensor.ones(1, 3))


def test_empty_batches() -> None:
    for layer, shape in (
        (nn.Linear(5, 3), (0, 5)),
        (nn.Conv2d(3, 4, 3), (0, 3, 8, 8)),
        (nn.LayerNorm(4), (0, 4)),
        (nn.BatchNorm(4), (0, 4, 2)),
        (nn.GroupNorm(2, 4), (0, 4, 3)),
    ):
        assert layer(Tensor(np.zeros(shape, np.float32))).numpy().shape[0] == 0


def test_wrong_types_are_refused() -> None:
    for layer in (nn.Linear(2, 3), nn.LayerNorm(2), nn.BatchNorm(2)):
        with pytest.raises(ArgumentError, match="layers take tensors"):
            layer([[1.0, 2.0]])
    for layer in (nn.LayerNorm(2), nn.BatchNorm(2), nn.RMSNorm(2), nn.GroupNorm(1, 2)):
        with pytest.raises(DTypeError, match="rounded to integers"):
            layer(Tensor([[1, 2], [3, 4]]))
    with pytest.raises(ArgumentError, match="layers take tensors"):
        nn.Embedding(3, 2)([1, 2])
    with pytest.raises(ArgumentError, match="layers take tensors"):
        nn.Dropout()([1.0])


def test_statistics_that_nobody_reads_do_not_pile_up() -> None:
    ours, theirs = nn.BatchNorm(2), torch.nn.BatchNorm1d(2)
    x = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)
    with Tensor.train():
        for _ in range(40):
            ours(Tensor(x))
            theirs(torch.tensor(x))
    assert len(ours.running_mean.uop.toposort()) < 40 * 10
    compare(ours.running_mean, theirs.running_mean)
    assert ours.num_batches_tracked.item() == 40
