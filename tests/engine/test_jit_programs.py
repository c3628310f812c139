"""Random functions over state and arguments: every call of the jitted function gives what NumPy's value
semantics say, advances state and arguments, and leaves the results of earlier calls alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.tensor.reference import DEVICE
from whit import Tensor, TinyJit

pytestmark = pytest.mark.skipif(DEVICE == "reference", reason="runs on a device")
SHAPE = (4, 3)
OPS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[np.ndarray, np.ndarray], np.ndarray]]] = {
    "a + 1": (lambda a, b: a + 1, lambda a, b: a + 1),
    "flip a": (lambda a, b: a.flip(0), lambda a, b: a[::-1]),
    "2 a - b": (lambda a, b: a * 2 - b, lambda a, b: a * 2 - b),
    "roll a + b": (lambda a, b: a.roll(1, 0) + b, lambda a, b: np.roll(a, 1, 0) + b),
    "sum a": (lambda a, b: a.sum(0).expand(*SHAPE), lambda a, b: np.broadcast_to(a.sum(0), SHAPE)),
    "a % 7 * (b % 5)": (lambda a, b: a % 7 * (b % 5), lambda a, b: a % 7 * (b % 5)),
}


class Step(NamedTuple):
    """kind: new, assign, row, column or realize."""

    kind: str
    target: str
    source: str
    other: str = ""
    op: str = ""
    place: int = 0


def program(seed: int) -> tuple[list[Step], list[str]]:
    """Steps over the states s0 and s1, the arguments x0 and x1 and temporaries, and the names that are
    returned."""
    rng = random.Random(seed)
    names = ["s0", "s1", "x0", "x1"]
    steps = []
    for k in range(rng.choice([2, 4, 7])):
        kind = rng.choice(["new", "new", "new", "assign", "assign", "row", "column", "realize"])
        target = rng.choice(["s0", "s1", "x0"] if kind == "assign" else ["s0", "s1"])
        if kind == "new":
            target = f"t{k}"
        steps.append(
            Step(kind, target, rng.choice(names), rng.choice(names), rng.choice(list(OPS)), rng.randrange(3))
        )
        if kind == "new":
            names.append(target)
    return steps, [rng.choice(names) for _ in range(2)]


def on_tensors(steps: list[Step], values: dict[str, Tensor]) -> None:
    for step in steps:
        a, b = values[step.source], values[step.other]
        if step.kind == "new":
            values[step.target] = OPS[step.op][0](a, b)
        elif step.kind == "assign":
            values[step.target].assign(a)
        elif step.kind == "row":
            values[step.target][step.place] = a[1]
        elif step.kind == "column":
            values[step.target][:, step.place] = 5
        else:
            a.realize()


def on_arrays(steps: list[Step], values: dict[str, np.ndarray]) -> None:
    for step in steps:
        a, b = values[step.source], values[step.other]
        if step.kind == "new":
            values[step.target] = OPS[step.op][1](a, b)
        elif step.kind == "assign":
            values[step.target] = np.array(a)
        elif step.kind in ("row", "column"):
            y = values[step.target].copy()
            y[step.place if step.kind == "row" else (slice(None), step.place)] = (
                a[1] if step.kind == "row" else 5
            )
            values[step.target] = y


def run(seed: int) -> None:
    steps, returned = program(seed)
    numbers = np.random.default_rng(seed)

    def fresh() -> np.ndarray:
        return numbers.integers(-9, 9, SHAPE).astype(np.int32)

    state = [Tensor(fresh()).realize() for _ in range(2)]
    model = [s.numpy().copy() for s in state]

    @TinyJit
    def function(x0: Tensor, x1: Tensor) -> list[Tensor]:
        values = {"s0": state[0], "s1": state[1], "x0": x0, "x1": x1}
        on_tensors(steps, values)
        results = [values[name] + 0 for name in returned]
        Tensor.realize_all([*results, *state])
        return results

    about = f"seed {seed}: {steps} -> {returned}"
    kept: list[tuple[Any, list[np.ndarray]]] = []
    for call in range(5):
        arrays = [fresh(), fresh()]
        arguments = [Tensor(x).realize() for x in arrays]
        values = {"s0": model[0], "s1": model[1], "x0": arrays[0], "x1": arrays[1]}
        on_arrays(steps, values)
        model = [values["s0"], values["s1"]]
        kept.append((function(*arguments), [np.array(values[name]) for name in returned]))
        for t, name in zip([*state, *arguments], ["s0", "s1", "x0", "x1"], strict=True):
            assert t.tolist() == values[name].tolist(), f"call {call}, {name}; {about}"
        for results, wanted in kept:
            for t, want in zip(results, wanted, strict=True):
                assert t.tolist() == want.tolist(), f"after call {call}; {about}"


def test_random_functions() -> None:
    for seed in range(60):
        run(seed)


@pytest.mark.slow
def test_many_random_functions() -> None:
    for seed in range(1000, 4000):
        run(seed)
