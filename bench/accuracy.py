"""Train the network of examples/mnist.py in whit and in PyTorch: same data, batches, optimiser and steps;
print both accuracies.

    python -m bench.accuracy --data fashion --steps 938
"""

from __future__ import annotations

import argparse
import importlib
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.peers import load

ROOT = Path(__file__).parent.parent


def whit_accuracy(data: str, steps: int, path: str | None) -> float:
    """By the example itself, as a user runs it."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "examples/mnist.py", "--data", data, "--steps", str(steps), "--out", out]
        command += ["--eval-every", str(steps), "--checkpoint-every", str(steps)]
        command += ["--path", path] if path else []
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = re.search(r"test accuracy: ([\d.]+)%", done.stdout)
    assert found is not None, done.stdout
    return float(found[1])


def torch_accuracy(data: str, steps: int, path: str | None) -> float:
    """The same in PyTorch."""
    torch = load("torch")
    nn = torch.nn
    torch.manual_seed(0)
    x_train, y_train, x_test, y_test = _tensors(data, path)
    layers: list[Any] = [nn.Conv2d(1, 32, 5), nn.ReLU(), nn.Conv2d(32, 32, 5), nn.ReLU()]
    layers += [nn.BatchNorm2d(32), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU()]
    layers += [nn.BatchNorm2d(64), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(576, 10)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    per_epoch = len(x_train) // 128
    order: list[int] = []
    for step in range(steps):
        epoch, batch = divmod(step, per_epoch)
        if batch == 0:
            order = list(range(len(x_train)))
            random.Random(f"0/{epoch}").shuffle(order)
        picks = torch.tensor(order[batch * 128 : (batch + 1) * 128])
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x_train[picks]), y_train[picks]).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        hits = sum(int((model(x).argmax(1) == y).sum()) for x, y in zip(x_test.split(500), y_test.split(500)))
    return 100 * hits / len(x_test)


def _tensors(data: str, path: str | None) -> list[Any]:
    torch = load("torch")
    sys.path.insert(0, str(ROOT / "examples"))
    mnist = importlib.import_module("mnist")
    x_train, y_train, x_test, y_test = mnist.load(data, path)
    images = [torch.from_numpy(x.numpy()).float() / 127.5 - 1 for x in (x_train, x_test)]
    labels = [torch.from_numpy(y.numpy()).long() for y in (y_train, y_test)]
    return [images[0], labels[0], images[1], labels[1]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.accuracy", description=__doc__)
    parser.add_argument("--data", default="fashion")
    parser.add_argument("--steps", type=int, default=938)
    parser.add_argument("--path")
    args = parser.parse_args()
    mine = whit_accuracy(args.data, args.steps, args.path)
    theirs = torch_accuracy(args.data, args.steps, args.path)
    print(f"{args.data}, {args.steps} steps: whit {mine:.2f}%, torch {theirs:.2f}%")


if __name__ == "__main__":
    main()
