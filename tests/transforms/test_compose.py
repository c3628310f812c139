"""Transforms of transforms: each takes a function of one number to such a function, and either derives it or
leaves it as it is, so that the result is known exactly."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import whit
from whit import Tensor, TinyJit
from whit.helpers import ArgumentError

Scalar = Callable[[Tensor], Tensor]
ONE = Tensor(1.0, dtype="float64")
POINT = 1.5
VALUES = [POINT**5, 5 * POINT**4, 20 * POINT**3, 60 * POINT**2, 120 * POINT, 120.0]


def power(x: Tensor) -> Tensor:
    return x * x * x * x * x


def jitted(f: Scalar) -> Scalar:
    return TinyJit(lambda x: (f(x) * 1).realize())


DERIVES: dict[str, Callable[[Scalar], Scalar]] = {
    "grad": whit.grad,
    "value_and_grad": lambda f: lambda x: whit.value_and_grad(f)(x)[1],
    "vjp": lambda f: lambda x: whit.vjp(f, x)[1](ONE),
    "jvp": lambda f: lambda x: whit.jvp(f, [x], [ONE])[1],
    "jacrev": whit.jacrev,
    "jacfwd": whit.jacfwd,
}
KEEPS: dict[str, Callable[[Scalar], Scalar]] = {
    "vmap": lambda f: lambda x: whit.vmap(f)(x.reshape(1).expand(2))[1],
    "checkpoint": whit.checkpoint,
    "custom_gradient": lambda f: whit.custom_gradient(lambda x: (f(x), lambda g: g * whit.grad(f)(x))),
    "function": whit.function,
    "TinyJit": jitted,
    "detect_nan": lambda f: whit.detect_nan()(f),
}
ALL: dict[str, Callable[[Scalar], Scalar]] = {**DERIVES, **KEEPS}


def check(names: tuple[str, ...]) -> None:
    """Outermost first."""
    f: Scalar = power
    for name in reversed(names):
        f = ALL[name](f)
    want = VALUES[sum(name in DERIVES for name in names)]
    for _ in range(3 if names[0] == "TinyJit" else 1):
        assert f(Tensor(POINT, dtype="float64")).item() == pytest.approx(want, rel=1e-12), names


@pytest.mark.parametrize("outer", ALL)
def test_pairs(outer: str) -> None:
    for inner in ALL:
        check((outer, inner))


@pytest.mark.parametrize(
    "transform",
    [
        *(
            getattr(whit, name)
            for name in ("grad", "value_and_grad", "jacobian", "jacrev", "jacfwd", "hessian")
        ),
        *(getattr(whit, name) for name in ("vmap", "custom_gradient", "checkpoint", "function", "vjp")),
        lambda f: whit.jvp(f, [], []),
    ],
)
def test_what_is_no_function_is_refused(transform: Any) -> None:
    with pytest.raises(ArgumentError, match=r"of 3: it is no function"):
        transform(3)


def test_a_sample_of_longer_chains() -> None:
    numbers = random.Random(1)
    for length in (3, 4, 5):
        for _ in range(10):
            check(tuple(numbers.choices(list(ALL), k=length)))


@pytest.mark.slow
@pytest.mark.parametrize("outer", ALL)
def test_triples(outer: str) -> None:
    for inner in product(ALL, repeat=2):
        check((outer, *inner))


def test_a_network_in_all_of_them() -> None:
    """Per-example gradients of a network whose layers are checkpointed and traced, jitted, against torch."""
    w = {"a": [[0.5, -1.0], [1.0, 0.25]], "b": [0.1, -0.2]}
    x, y = [[1.0, 2.0], [3.0, -1.0], [0.5, 0.5]], [1.0, 0.0, -1.0]

    def loss(layer: Any) -> Any:
        def f(w: Any, x: Any, y: Any) -> Any:
            return (layer(layer(x, w), w).sum() - y) ** 2

        return f

    def plain(x: Any, w: Any) -> Any:
        return (x @ w["a"] + w["b"]).sigmoid()

    in_torch = torch.func.vmap(torch.func.grad(loss(plain)), in_dims=(None, 0, 0))
    want = in_torch({k: torch.tensor(v) for k, v in w.items()}, torch.tensor(x), torch.tensor(y))
    layer = whit.function(whit.checkpoint(plain))
    step = TinyJit(whit.vmap(whit.value_and_grad(loss(layer)), in_axes=(None, 0, 0)))
    for _ in range(3):
        got = step({k: Tensor(v) for k, v in w.items()}, Tensor(x), Tensor(y))[1]
        for name in w:
            np.testing.assert_allclose(got[name].numpy(), want[name].numpy(), rtol=1e-5, atol=1e-7)
