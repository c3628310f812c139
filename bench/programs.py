"""The measured programs. Each runs in a process of its own (`python -m bench.programs NAME WHO`) and prints
one JSON object.

WHO is whit, tinygrad or torch.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any


def measured(run: Callable[[], Any], repeats: int, warmup: int = 3) -> float:
    """Median seconds of a call."""
    for _ in range(warmup):
        run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def framework(who: str) -> Any:
    """The framework's module."""
    module = importlib.import_module(who)
    if who == "torch":
        module.set_num_threads(2)
    return module


# ---- rows --------------------------------------------------------------------------------------------------


def block(who: str) -> dict[str, Any]:
    """Forward and backward of a transformer block: seconds of the first run less those of a second one."""
    module = framework(who)
    tensor, nn = module.Tensor, importlib.import_module(f"{who}.nn")
    dim, heads, batch, steps = 384, 6, 8, 256

    class Block:
        def __init__(self) -> None:
            self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
            self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
            self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

        def __call__(self, x: Any) -> Any:
            split = (
                self.qkv(self.norm1(x)).reshape(batch, steps, 3, heads, dim // heads).permute(2, 0, 3, 1, 4)
            )
            mixed = split[0].scaled_dot_product_attention(split[1], split[2], is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, steps, dim))
            return x + self.down(self.up(self.norm2(x)).gelu())

    model = Block()
    parameters = importlib.import_module(f"{who}.nn.state").get_parameters(model)
    for parameter in parameters:
        parameter.requires_grad = True
    x = tensor.randn(batch, steps, dim)
    tensor.realize(x, *parameters)

    def run() -> float:
        start = time.perf_counter()
        for parameter in parameters:
            parameter.grad = None
        loss = (model(x) ** 2).mean()
        loss.backward()
        tensor.realize(loss, *[p.grad for p in parameters])
        loss.item()
        return time.perf_counter() - start

    first = run()
    later = min(run() for _ in range(3))
    return {"seconds": first - later, "first": first, "later": later}


def small_op(who: str) -> dict[str, Any]:
    """Un-jitted repeat of one small op."""
    tensor = framework(who).Tensor
    x = tensor([1.0, 2.0, 3.0, 4.0]).realize()
    return {"seconds": measured(lambda: (x + 1).realize(), 500, 20)}


def replay(who: str) -> dict[str, Any]:
    """100 tiny kernels, each depending on the one before, per kernel."""
    module = framework(who)
    if who == "torch":
        x = module.ones(16)

        def eager() -> None:
            y = x
            for _ in range(100):
                y = y + 1.0

        with module.no_grad():
            return {"seconds": measured(eager, 300) / 100}

    @module.TinyJit
    def chain(x: Any) -> Any:
        for _ in range(100):
            x = (x + 1.0).contiguous()
        return x.realize()

    x = module.Tensor.ones(16).contiguous().realize()
    result = {"seconds": measured(lambda: chain(x), 300, 5) / 100}
    assert chain(x).tolist() == [101.0] * 16
    return result


def mnist_step(who: str) -> dict[str, Any]:
    """A jitted training step of the network of examples/mnist.py, batch 128, Adam."""
    return {"seconds": _mnist_torch() if who == "torch" else _mnist_whit(who)}


def _mnist_whit(who: str) -> float:
    module = framework(who)
    tensor, nn = module.Tensor, importlib.import_module(f"{who}.nn")
    layers = [
        nn.Conv2d(1, 32, 5),
        nn.Conv2d(32, 32, 5),
        nn.BatchNorm(32),
        nn.Conv2d(32, 64, 3),
        nn.Conv2d(64, 64, 3),
        nn.BatchNorm(64),
        nn.Linear(576, 10),
    ]

    def network(x: Any) -> Any:
        x = layers[2](layers[1](layers[0](x).relu()).relu()).max_pool2d()
        x = layers[5](layers[4](layers[3](x).relu()).relu()).max_pool2d()
        return layers[6](x.flatten(1))

    optimizer = importlib.import_module(f"{who}.nn.optim").Adam(
        importlib.import_module(f"{who}.nn.state").get_parameters(layers), lr=1e-3
    )
    x, y = tensor.randn(128, 1, 28, 28).realize(), tensor.randint(128, high=10).realize()

    @module.TinyJit
    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = network(x).sparse_categorical_crossentropy(y).backward()
        optimizer.step()
        return loss.realize()

    training = tensor.train() if hasattr(tensor, "train") else contextlib.nullcontext()
    with training:
        return measured(lambda: step(x, y).item(), 10, 4)


def _mnist_torch() -> float:
    torch = framework("torch")
    nn = torch.nn
    model = nn.Sequential(
        nn.Conv2d(1, 32, 5),
        nn.ReLU(),
        nn.Conv2d(32, 32, 5),
        nn.ReLU(),
        nn.BatchNorm2d(32),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3),
        nn.ReLU(),
        nn.BatchNorm2d(64),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(576, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x, y = torch.randn(128, 1, 28, 28), torch.randint(0, 10, (128,))

    def step() -> float:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return measured(step, 10, 4)


PROGRAMS: dict[str, Callable[[str], dict[str, Any]]] = {
    "block": block,
    "small_op": small_op,
    "replay": replay,
    "mnist_step": mnist_step,
}

if __name__ == "__main__":
    print(json.dumps(PROGRAMS[sys.argv[1]](sys.argv[2])))
