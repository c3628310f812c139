"""Random tensor programs three ways (lazily, step by step, jitted) against NumPy, and their derivatives
against PyTorch. A failure prints the seed, the program and the graph."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from tests.integration import programs
from tests.integration.programs import Program, Step, make, run_every_way, run_gradients
from whit import Context, Tensor

# seeds that once found a bug stay in the sample
FOUND = [54, 109, 120, 137, 182, 187, 303]
FOUND_SMOOTH = [43, 51]
DEVICES = [
    "PYTHON",
    *[
        pytest.param(
            f"CPU:{kind.upper()}",
            marks=pytest.mark.skipif(not any(shutil.which(name) for name in names), reason=f"no {kind}"),
        )
        for kind, names in (
            ("clang", ["clang", "clang-19", "clang-18", "clang-17", "clang-16", "clang-15"]),
            ("gcc", ["gcc"]),
        )
    ],
]


@pytest.mark.parametrize("start", [0, 10])
def test_programs(start: int) -> None:
    for seed in range(start, start + 10):
        run_every_way(make(seed))


@pytest.mark.parametrize("seed", FOUND)
def test_programs_that_found_bugs(seed: int) -> None:
    run_every_way(make(seed))


@pytest.mark.parametrize("seed", [*FOUND_SMOOTH, 1, 2, 3, 5, 6, 7])
def test_first_and_second_derivatives(seed: int) -> None:
    run_gradients(make(seed, smooth=True))


@pytest.mark.parametrize("device", DEVICES)
def test_programs_on_other_devices(device: str) -> None:
    with Context(DEV=device):
        for seed in range(200, 205 if device == "PYTHON" else 202):
            run_every_way(make(seed), jit=device == "PYTHON")


def test_programs_without_optimisations() -> None:
    with Context(NOOPT=1):
        for seed in range(300, 304):
            run_every_way(make(seed))


def test_programs_with_validation() -> None:
    with Context(VALIDATE=1):
        for seed in range(400, 404):
            run_every_way(make(seed), jit=False)


def test_a_failure_shows_the_program_and_the_graph() -> None:
    program = Program(
        7, [np.ones(2, np.float32)], ["float32"] * 2, [Step("affine", (0,), (2, 1))], [1], [1e-4] * 2
    )
    with pytest.raises(AssertionError, match=r"(?s)seed 7.*v1 = affine\(v0; \(2, 1\)\).*the graph"):
        programs.check(program, [Tensor([3.0, 3.5])], [np.array([3.0, 3.0])], "somehow", "the graph")


def test_programs_differ_and_use_every_operation() -> None:
    made = [make(seed) for seed in range(200)]
    assert {step.op for p in made for step in p.steps} == set(programs.OPS)
    assert len({str(p.steps) for p in made}) > 195
    smooth = [make(seed, smooth=True) for seed in range(150)]
    assert {step.op for p in smooth for step in p.steps} == set(programs.SMOOTH)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 2000, 50))
def test_many_programs(start: int) -> None:
    for seed in range(start, start + 50):
        run_every_way(make(seed))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 1200, 20))
def test_many_derivatives(start: int) -> None:
    for seed in range(start, start + 20):
        run_gradients(make(seed, smooth=True))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_many_programs_on_other_devices(device: str) -> None:
    with Context(DEV=device):
        for seed in range(2000, 2050):
            run_every_way(make(seed))
