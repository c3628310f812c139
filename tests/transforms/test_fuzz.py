"""Random tensor programs (tests/integration/programs.py) for many examples at once: under vmap, under vmap
and the JIT, as a traced function and in a Python loop, all against NumPy; derivatives of smooth ones against
PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import whit
from tests.integration.programs import (
    Array,
    Program,
    check,
    in_numpy,
    in_torch,
    in_whit,
    make,
    run_every_way,
    shuffled,
    tensors,
)
from whit import Tensor, TinyJit

Example = tuple[list[Array], list[Array]]


def examples_of(program: Program, count: int = 3) -> list[Example]:
    """The program's leaves and others for which it has one right answer, with NumPy's outputs."""
    found = [(program.leaves, in_numpy(program, program.leaves))]
    for draw in range(20):
        if len(found) == count:
            break
        example = shuffled(program, np.random.default_rng((program.seed, draw)))
        if example is not None:
            found.append(example)
    return found


def body(program: Program) -> Any:
    """The program as a function that writes to none of its arguments."""
    return lambda *leaves: in_whit(program, [Tensor._wrap(leaf.uop) for leaf in leaves])


def stacked(examples: list[Example]) -> list[Tensor]:
    return tensors([np.stack(column) for column in zip(*[leaves for leaves, _ in examples], strict=True)])


def check_each(program: Program, got: list[Tensor], examples: list[Example], how: str) -> None:
    Tensor.realize_all(got)
    for n, (_, want) in enumerate(examples):
        check(program, [t[n] for t in got], want, f"{how}, example {n}")


def run_mapped(program: Program, everything: bool) -> None:
    examples = examples_of(program)
    f = whit.vmap(body(program))
    check_each(program, f(*stacked(examples)), examples, "under vmap")
    if not everything:
        return
    jitted = TinyJit(lambda *leaves: [t.realize() for t in f(*leaves)])
    for call in range(3):
        order = examples if call % 2 else examples[::-1]
        check_each(program, jitted(*stacked(order)), order, f"jitted vmap, call {call}")
    traced = whit.function(body(program))
    for leaves, want in examples:
        got = [t * 1 if t.dtype.name != "bool" else t & True for t in traced(*tensors(leaves))]
        check(program, got, want, "traced")


def run_derivatives(program: Program) -> None:
    """Gradients per example, and changes in a random direction, of a weighted sum of the outputs."""
    numbers = np.random.default_rng(program.seed + 7)
    examples = examples_of(program)
    weights = [numbers.standard_normal(w.shape) for w in examples[0][1]]
    ways = [numbers.standard_normal(x.shape) for x in program.leaves]

    def loss(*leaves: Tensor) -> Any:
        outputs = body(program)(*leaves)
        return sum(
            [(o * Tensor(w)).sum() for o, w in zip(outputs, weights, strict=True)],
            Tensor(0.0).cast("float64"),
        )

    which = tuple(range(len(program.leaves)))
    got = whit.vmap(whit.grad(loss, which))(*stacked(examples))
    change = whit.jvp(loss, tensors(program.leaves), tensors(ways))[1]
    Tensor.realize_all([*got, change])
    total = 0.0
    for n, (leaves, _) in enumerate(examples):
        theirs = [torch.tensor(x, requires_grad=True) for x in leaves]
        pairs = zip(in_torch(program, theirs), weights, strict=True)
        value: Any = sum((o * torch.tensor(w)).sum() for o, w in pairs)
        wants = torch.autograd.grad(value, theirs, allow_unused=True, materialize_grads=True)
        for number, (g, want) in enumerate(zip(got, wants, strict=True)):
            scale = max(1.0, float(want.abs().max())) if want.numel() else 1.0
            message = f"derivative by v{number}, example {n}\n{program}"
            np.testing.assert_allclose(
                g.numpy()[n], want.numpy(), rtol=1e-7, atol=1e-9 * scale, err_msg=message
            )
        if n == 0:
            total = sum(float((want.numpy() * way).sum()) for want, way in zip(wants, ways, strict=True))
    assert change.item() == pytest.approx(total, rel=1e-7, abs=1e-6), program


@pytest.mark.parametrize("start", range(0, 30, 10))
def test_programs(start: int) -> None:
    for seed in range(start, start + 10):
        run_mapped(make(1000 + seed), everything=seed % 5 == 0)


@pytest.mark.parametrize("start", range(0, 4, 2))
def test_derivatives(start: int) -> None:
    for seed in range(start, start + 2):
        run_derivatives(make(1000 + seed, smooth=True))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 1000, 20))
def test_a_thousand_programs(start: int) -> None:
    """Each step by step, at the end, jitted, mapped, mapped and jitted, traced."""
    for seed in range(start, start + 20):
        program = make(2000 + seed)
        run_every_way(program)
        run_mapped(program, everything=True)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 200, 10))
def test_derivatives_of_many_programs(start: int) -> None:
    for seed in range(start, start + 10):
        run_derivatives(make(2000 + seed, smooth=True))
