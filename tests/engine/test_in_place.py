"""Random programs of writes in place, views, readers and reads, against NumPy arrays that are copied at every
step: a reader built before a write keeps the old value, whatever is realized when."""
from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whit import Tensor

Step = tuple[Any, ...]


class World:
    """Tensors and the values that they must have."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.values: list[Any] = []

    def add(self, tensor: Tensor, value: Any) -> None:
        self.tensors.append(tensor)
        self.values.append(np.array(value, dtype=np.float32))

    def run(self, step: Step) -> None:
        kind, *rest = step
        t, v = self.tensors, self.values
        if kind == "new":
            size, realized = rest
            value = np.arange(1, size + 1, dtype=np.float32) * (3 * len(t) + 1)
            self.add(Tensor(value).realize() if realized else Tensor(value), value)
        elif kind == "assign":
            i, j, factor = rest
            t[i].assign(t[j] * factor + 1.0)
            v[i] = v[j] * np.float32(factor) + np.float32(1)
        elif kind == "add in place":
            i, j = rest
            t[i].assign(t[i] + t[j])
            v[i] = v[i] + v[j]
        elif kind == "set":
            i, j, start = rest
            t[i][start:] = t[j][start:] * -1.0
            v[i] = np.concatenate([v[i][:start], -v[j][start:]])
        elif kind == "flip":
            self.add(t[rest[0]].flip(0), v[rest[0]][::-1])
        elif kind == "same shape":
            self.add(t[rest[0]].reshape(len(v[rest[0]])), v[rest[0]])
        elif kind == "sum":
            i, j = rest
            self.add(t[i] + t[j], v[i] + v[j])
        elif kind == "running sum":
            self.add(t[rest[0]].cumsum(0), np.cumsum(v[rest[0]]))
        elif kind == "read":
            got = t[rest[0]].numpy()
            assert np.allclose(got, v[rest[0]], rtol=1e-5), f"tensor {rest[0]} is {got}, not {v[rest[0]]}"


def random_program(rng: random.Random) -> list[Step]:
    size = rng.choice([2, 3])
    steps: list[Step] = [("new", size, rng.random() < 0.7) for _ in range(2)]
    count = 2
    for _ in range(rng.randint(2, 9)):
        kind = rng.choice(["assign", "add in place", "set", "set", "flip", "same shape", "sum", "running sum",
                           "read"])
        written, any_, other = rng.randrange(2), rng.randrange(count), rng.randrange(count)
        arguments = {"assign": (written, any_, rng.choice([1.0, 2.0])), "add in place": (written, any_),
                     "set": (written, any_, rng.randrange(size)), "sum": (any_, other)}
        steps.append((kind, *arguments.get(kind, (any_,))))
        count += kind in ("flip", "same shape", "sum", "running sum")
    return steps + [("read", i) for i in rng.sample(range(count), count)]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 48))
def test_random_programs(seed: int) -> None:
    world, program = World(), random_program(random.Random(seed))
    try:
        for step in program:
            world.run(step)
    except AssertionError as error:
        raise AssertionError(f"{error}\nin {program}") from None


@pytest.mark.parametrize("program", [
    # what a value became was remembered although the memory that it was computed from had been overwritten
    [("new", 2, True), ("new", 2, True), ("sum", 0, 0), ("set", 0, 2, 1), ("sum", 2, 2), ("sum", 0, 0),
     ("read", 2),
     ("set", 1, 4, 1), ("read", 1), ("read", 4), ("read", 3)],
    # a write that another tensor's pending write reads was executed twice
    [("new", 2, True), ("new", 2, True), ("set", 0, 1, 1), ("add in place", 1, 0), ("sum", 1, 1),
     ("set", 1, 0, 1),
     ("read", 0), ("read", 2), ("read", 1)],
    # a view of a version was overwritten by the next version in the same run
    [("new", 3, True), ("new", 3, True), ("add in place", 0, 0), ("same shape", 0), ("set", 0, 0, 2),
     ("read", 2), ("read", 0)],
    # an equal write, later, was taken for the one that had been executed
    [("new", 2, True), ("new", 2, True), ("assign", 0, 0, 2.0), ("assign", 1, 0, 2.0), ("read", 0),
     ("assign", 0, 0, 2.0),
     ("flip", 0), ("set", 0, 0, 1), ("read", 0), ("read", 1), ("read", 2)],
    # a version that had a copy already was chosen to be copied again, another that needed one was not
    [("new", 2, False), ("new", 2, True), ("same shape", 1), ("set", 1, 0, 0), ("set", 0, 1, 1),
     ("set", 1, 2, 0), ("sum", 1, 0), ("read", 1), ("read", 0), ("read", 2), ("read", 3)],
])
def test_programs_that_once_failed(program: list[Step]) -> None:
    world = World()
    for step in program:
        world.run(step)
