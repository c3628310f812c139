"""Random programs of lazy values, writes and reads. Whatever the order of realisation, every tensor has the
value that plain value semantics give it: a write changes the tensor it is called on and nothing else."""

from __future__ import annotations

import gc
import random

import numpy as np
import pytest

from tests.tensor.reference import DEVICE
from whit import Tensor

pytestmark = pytest.mark.skipif(DEVICE == "reference", reason="runs on a device")
SHAPE = (4, 3)


class Program:
    """Tensors beside the arrays that they must equal."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pairs: list[tuple[Tensor, np.ndarray]] = []
        self.log: list[str] = []
        for _ in range(3):
            self.new_leaf()

    def new_leaf(self) -> None:
        x = np.array([[self.rng.randint(-9, 9) for _ in range(SHAPE[1])] for _ in range(SHAPE[0])], np.int32)
        t = Tensor(x)
        if self.rng.random() < 0.7:
            t.realize()
        self.pairs.append((t, x))

    def pick(self) -> int:
        return self.rng.randrange(len(self.pairs))

    def value(self, i: int) -> tuple[Tensor, np.ndarray]:
        """Something of the full shape computed from a tensor."""
        t, x = self.pairs[i]
        choice = self.rng.randint(0, 5)
        self.log.append(f"  value {i}: {('t + 1', 'flip', '2 t - u', 'roll + t', 'sum', 't itself')[choice]}")
        if choice == 0:
            return t + 1, x + 1
        if choice == 1:
            return t.flip(0), x[::-1]
        if choice == 2:
            j = self.pick()
            return t * 2 - self.pairs[j][0], x * 2 - self.pairs[j][1]
        if choice == 3:
            return t.roll(1, 0) + t, np.roll(x, 1, 0) + x
        if choice == 4:
            return t.sum(0).expand(*SHAPE), np.broadcast_to(x.sum(0), SHAPE)
        return t, x

    def step(self) -> None:
        rng, choice = self.rng, self.rng.randint(0, 9)
        i, j = self.pick(), self.pick()
        t, x = self.pairs[i]
        names = (
            "new",
            "new",
            "new",
            "assign",
            "t[r] = v[r - 1]",
            "t[:, c:] = 5",
            "realize",
            "read",
            "delete",
            "realize two",
        )
        self.log.append(f"{names[choice]} t{i} (other {j})")
        if choice <= 2:
            self.pairs.append(self.value(j))
        elif choice == 3:
            new, y = self.value(j)
            t.assign(new)
            self.pairs = [(a, y.astype(np.int32)) if a is t else (a, b) for a, b in self.pairs]
        elif choice == 4:
            new, y = self.value(j)
            row = rng.randrange(SHAPE[0])
            t[row] = new[row - 1]
            self.write(t, x, row, y[row - 1])
        elif choice == 5:
            low = rng.randrange(SHAPE[1])
            t[:, low:] = 5
            self.write(t, x, (slice(None), slice(low, None)), 5)
        elif choice == 6:
            t.realize()
        elif choice == 7:
            assert t.tolist() == x.tolist(), "\n".join(self.log)
        elif choice == 8 and len(self.pairs) > 4:
            del self.pairs[i], t
            gc.collect()
        else:
            Tensor.realize_all([a for a, _ in rng.sample(self.pairs, 2)])

    def write(self, t: Tensor, x: np.ndarray, where: object, value: object) -> None:
        y = x.copy()
        y[where] = value  # type: ignore[index]
        self.pairs = [(a, y) if a is t else (a, b) for a, b in self.pairs]

    def finish(self, seed: int) -> None:
        order = list(range(len(self.pairs)))
        self.rng.shuffle(order)
        if self.rng.random() < 0.5:
            Tensor.realize_all([self.pairs[k][0] for k in order])
        for k in order:
            t, x = self.pairs[k]
            assert t.tolist() == x.tolist(), f"seed {seed}, tensor {k} after\n" + "\n".join(self.log)


def run(seed: int) -> None:
    program = Program(seed)
    for _ in range(program.rng.choice([4, 8, 16])):
        program.step()
    program.finish(seed)


@pytest.mark.parametrize("start", range(0, 60, 20))
def test_random_writes(start: int) -> None:
    for seed in range(start, start + 20):
        run(seed)


@pytest.mark.slow
def test_many_random_writes() -> None:
    for seed in range(1000, 3000):
        run(seed)
