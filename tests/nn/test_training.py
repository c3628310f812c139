"""Whole training runs: the same network, batches and optimiser as in PyTorch, and real digits learned."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from whit import Tensor, TinyJit, nn
from whit.nn import datasets
from whit.nn.optim import SGD, Adam
from whit.nn.state import get_parameters, get_state_dict, load_state_dict


class ConvNet:
    """conv - bn - relu - pool - conv - relu - linear, on 1 x 8 x 8."""

    def __init__(self) -> None:
        self.first, self.norm = nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 8, 3), nn.Linear(32, 10)

    def __call__(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu().max_pool2d(2)
        return self.head(self.second(x).relu().flatten(1))


class TorchNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Conv2d(1, 8, 3, padding=1, bias=False), torch.nn.BatchNorm2d(8)
        self.second, self.head = torch.nn.Conv2d(8, 8, 3), torch.nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.max_pool2d(self.norm(self.first(x)).relu(), 2)
        return self.head(self.second(x).relu().flatten(1))


def batches(count: int, size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    x, y, _, _ = datasets.digits()
    images, labels = x.numpy().astype(np.float32) / 16, y.numpy().astype(np.int32)
    return [(images[i * size : (i + 1) * size], labels[i * size : (i + 1) * size]) for i in range(count)]


def test_a_convolutional_network_follows_pytorch() -> None:
    theirs, ours = TorchNet(), ConvNet()
    load_state_dict(ours, {name: Tensor(t.numpy()) for name, t in theirs.state_dict().items()})
    optimizer, toptimizer = (
        Adam(get_parameters(ours), lr=0.01),
        torch.optim.Adam(theirs.parameters(), lr=0.01),
    )

    @TinyJit
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = ours(x).sparse_categorical_crossentropy(y)
        loss.backward()
        optimizer.step()
        return loss.realize()

    losses: list[Any] = []
    with Tensor.train():
        for x, y in batches(8, 32):
            toptimizer.zero_grad()
            tloss = torch.nn.functional.cross_entropy(theirs(torch.tensor(x)), torch.tensor(y).long())
            tloss.backward()
            toptimizer.step()
            losses.append((step(Tensor(x).realize(), Tensor(y).realize()).item(), tloss.item()))
    np.testing.assert_allclose([a for a, _ in losses], [b for _, b in losses], rtol=2e-3)
    assert losses[-1][0] < losses[0][0]
    theirs.eval()
    x, _ = batches(9, 32)[8]
    np.testing.assert_allclose(
        ours(Tensor(x)).numpy(), theirs(torch.tensor(x)).detach().numpy(), rtol=0.02, atol=0.02
    )
    for name, value in theirs.state_dict().items():
        np.testing.assert_allclose(get_state_dict(ours)[name].numpy(), value.numpy(), rtol=0.05, atol=5e-3)


def test_a_small_network_learns_digits() -> None:
    Tensor.manual_seed(0)
    x_train, y_train, x_test, y_test = datasets.digits()
    model = [nn.Linear(64, 64), Tensor.relu, nn.Linear(64, 10)]
    optimizer = SGD(get_parameters(model), lr=0.2, momentum=0.9, nesterov=True)
    images, labels = (x_train.float() / 16).flatten(1).realize(), y_train.int().realize()

    @TinyJit
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = x.sequential(model).sparse_categorical_crossentropy(y)
        loss.backward()
        optimizer.step()
        return loss.realize()

    order = np.random.default_rng(0)
    with Tensor.train():
        for _ in range(200):
            rows = Tensor(order.integers(0, 1438, 64).astype(np.int32))
            step(images[rows].realize(), labels[rows].realize())
    guess = (x_test.float() / 16).flatten(1).sequential(model).argmax(1).numpy()
    assert (guess == y_test.numpy()).mean() >= 0.95
