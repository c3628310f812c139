"""Schedules on disk: another process takes them, values are the same, nothing stale or damaged is taken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from whit import Context, Tensor
from whit.helpers import sources_digest
from whit.schedule import stored
from whit.schedule.schedule import graph_key
from whit.uop import UOp

PROGRAM = """
import numpy as np
from whit import Tensor
from whit.uop import UOp
from whit.uop.rewrite import costs
x = Tensor(np.arange(24, dtype=np.float32).reshape(4, 6))
store = Tensor.zeros(3, 4).contiguous().realize()
n = UOp.variable("n", 0, 3).bind(2)
for k in range(11):
    x = (x * (k + 2)).softmax(k % 2) + x.mean(k % 2, keepdim=True).sin()
store[1] = x.sum(1)
part = x[n:n + 1]
Tensor.realize_all([x, store, part.contiguous()])
print(x.numpy().tobytes().hex(), store.numpy().tobytes().hex(), part.numpy().tobytes().hex())
names = "schedule: fusion", "schedule: read from disk"
print(*[costs[name].calls if name in costs else 0 for name in names])
"""


def run(cache: Path, **settings: str) -> tuple[str, int, int]:
    """The values that the program computes, how many schedules it made, how many it looked for."""
    env = {**os.environ, "WHIT_CACHE": str(cache), **settings}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    values, counts = done.stdout.strip().splitlines()[-2:]
    made, read = counts.split()
    return values, int(made), int(read)


def test_another_process_takes_the_schedule(tmp_path: Path) -> None:
    values, made, looked = run(tmp_path)
    files = sorted((tmp_path / "schedules").iterdir())
    assert len(files) == looked >= 1
    again, less, _ = run(tmp_path)
    assert again == values and less == made - looked
    files[0].write_bytes(files[0].read_bytes()[:-20] + bytes(20))  # damaged: made anew
    assert run(tmp_path)[:2] == (values, made - looked + 1)
    assert run(tmp_path, SPEC="1") == (values, made, 0)


def long_graph(steps: int = 60, first: float = 2.0) -> Tensor:
    x = Tensor(np.arange(6, dtype=np.float32))
    for k in range(steps):
        x = (x + first + k).sin() * x
    return x


def name_of(tensor: Tensor) -> str | None:
    return stored.entry_of(graph_key([tensor.uop]).key)


def test_names_tell_graphs_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    with Context(SPEC=0):
        name = name_of(long_graph())
        assert name is not None and name == name_of(long_graph())  # other memory, the same graph
        others = long_graph(61), long_graph(first=2.5), -long_graph()
        assert len({name, *map(name_of, others)}) == 4
        assert name_of(long_graph(3)) is None  # small
        with Context(DEBUG=3):
            assert name_of(long_graph()) is None
        monkeypatch.setattr(stored, "sources_digest", lambda *rooms: "other code")
        assert name_of(long_graph()) != name
    assert name_of(long_graph()) is None  # the spec is checked while a schedule is made


def test_bound_values_are_no_part_of_a_name() -> None:
    def stretch(value: int) -> Tensor:
        n = UOp.variable("n", 0, 3).bind(value)
        return long_graph()[n : n + 2]

    with Context(SPEC=0):
        assert name_of(stretch(1)) == name_of(stretch(2)) is not None


def test_code_is_part_of_a_name(tmp_path: Path) -> None:
    assert sources_digest("uop", "schedule") != sources_digest("uop")
