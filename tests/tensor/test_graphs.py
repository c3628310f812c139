"""Random graphs: what the compiler makes of them against what NumPy says, node by node."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.tensor.reference import DEVICE, evaluate, reference
from whit import Tensor, dtypes
from whit.uop.text import show

SIZES = [1, 2, 3, 5, 8, 17]
KINDS = [dtypes.float32, dtypes.int32, dtypes.bool, dtypes.float64, dtypes.uint8, dtypes.float16]


def leaf(rng: random.Random) -> Tensor:
    shape = tuple(rng.choice(SIZES) for _ in range(rng.randint(0, 3)))
    dtype = rng.choice(KINDS)
    numbers = np.random.default_rng(rng.randint(0, 2**32))
    if dtype.is_float:
        data = numbers.integers(-8, 9, shape) / 4  # sums and products stay exact for a while
        if rng.random() < 0.15:
            data = np.where(
                numbers.random(shape) < 0.1, numbers.choice([np.nan, np.inf, -np.inf, -0.0], shape), data
            )
    else:
        data = numbers.integers(0, 2 if dtype.is_bool else 9, shape)
    return Tensor(np.asarray(data).astype(dtype.name if not dtype.is_bool else bool))


def elementwise(rng: random.Random, x: Tensor, others: list[Tensor]) -> Tensor:
    if x.dtype.is_bool:
        x = rng.choice([x, ~x, x.cast(dtypes.int32)])
        return x
    choice = rng.randint(0, 9)
    if choice == 0:
        return x + rng.choice([1, 2, 0.5])
    if choice == 1:
        return x * rng.choice([0, 1, 2, 3])
    if choice == 2:
        return x.maximum(rng.choice([0, 1]))
    if choice == 3:
        return (x > 1).where(x, rng.choice([0, 2]))
    if choice == 4:
        return x.cast(rng.choice(KINDS[:4]))
    if choice == 5 and x.dtype.is_float:
        return x.floor() if rng.random() < 0.5 else x.abs()
    if choice == 6:
        return (x < 2) & (x >= 0)
    if choice == 7 and x.dtype.is_int:
        return x // rng.choice([2, 3]) + x % rng.choice([3, 4])
    other = rng.choice(others)
    fits = all(a == b or 1 in (a, b) for a, b in zip(reversed(x.shape), reversed(other.shape), strict=False))
    if not fits or other.numel() * x.numel() > 20000:
        return x
    return x + other if rng.random() < 0.5 else x * other


def movement(rng: random.Random, x: Tensor) -> Tensor:
    choice = rng.randint(0, 8)
    axis = rng.randrange(x.ndim) if x.ndim else 0
    if choice == 0 and x.ndim:
        order = list(range(x.ndim))
        rng.shuffle(order)
        return x.permute(*order)
    if choice == 1 and x.ndim:
        return x.flip(axis)
    if choice == 2 and x.ndim:
        return x.pad(
            [(rng.randint(0, 2), rng.randint(0, 2)) if a == axis else None for a in range(x.ndim)],
            value=rng.choice([0, 0, 1]),
        )
    if choice == 3 and x.ndim:
        low = rng.randrange(x.shape[axis])
        return x.shrink([(low, x.shape[axis]) if a == axis else None for a in range(x.ndim)])
    if choice == 4:
        return x.reshape(-1) if rng.random() < 0.5 else x.unsqueeze(rng.randint(0, x.ndim))
    if choice == 5 and x.numel() < 300:
        return x.unsqueeze(0).expand(rng.choice([2, 3]), *x.shape)
    if choice == 6 and x.ndim and x.numel() < 1000:
        return x.cat(x.flip(axis), dim=axis)
    if choice == 7 and x.ndim:
        return x.roll(1, axis)
    return x[..., ::2] if choice == 8 and x.ndim else x


def reduction(rng: random.Random, x: Tensor) -> Tensor:
    axis = rng.randrange(x.ndim) if x.ndim else None
    name = rng.choice(["sum", "max", "min", "argmax", "cumsum", "any"])
    if name == "cumsum":
        return x.cumsum(axis) if axis is not None else x
    if name == "argmax":
        return x.argmax(axis)
    return getattr(x, name)(axis, keepdim=rng.random() < 0.5)


def composite(rng: random.Random, x: Tensor, others: list[Tensor]) -> Tensor:
    choice = rng.randint(0, 6)
    if choice == 0 and x.ndim >= 2 and x.dtype.is_float:
        return x @ x.transpose(-1, -2)
    if choice == 1 and x.dtype.is_float and x.ndim:
        return x.softmax(rng.randrange(x.ndim))
    if choice == 2 and x.dtype.is_float and x.ndim:
        return x - x.mean(rng.randrange(x.ndim), keepdim=True)
    if choice == 3 and x.ndim:
        return x[Tensor([rng.randrange(x.shape[0]) for _ in range(3)])]
    if choice == 4 and x.ndim:
        y = x.contiguous() if rng.random() < 0.5 else x + 0 if not x.dtype.is_bool else x
        y = y.clone() if y is x else y
        y[rng.randrange(x.shape[0])] = 1
        return y
    if choice == 5 and x.ndim and rng.random() < 0.5:
        return x.sort(rng.randrange(x.ndim))[0]
    floats = [t for t in others if t.dtype.is_float]
    if choice == 6 and x.dtype.is_float and floats:
        target = rng.choice(floats)
        return x.sum().gradient(target, materialize_grads=True)[0]
    return x


def graph(seed: int) -> list[Tensor]:
    """Some tensors that share parts."""
    rng = random.Random(seed)
    made = [leaf(rng) for _ in range(rng.randint(1, 3))]
    for _ in range(rng.choice([3, 5, 9, 20])):
        x = made[-1] if rng.random() < 0.7 else rng.choice(made[-4:])
        kind = rng.random()
        if kind < 0.15:
            x = composite(rng, x, made)
        elif kind < 0.5:
            x = elementwise(rng, x, made)
        elif kind < 0.85:
            x = movement(rng, x)
        else:
            x = reduction(rng, x)
        if x.numel() < 20000:
            made.append(x)
    return made[-2:]


def check(seed: int) -> None:
    outputs = graph(seed)
    want = [reference(t.uop) for t in outputs]
    text = show(outputs[-1].uop)
    Tensor.realize_all(outputs)
    for t, expected in zip(outputs, want, strict=True):
        got = evaluate(t)
        assert got.dtype == expected.dtype and got.shape == expected.shape, f"seed {seed}\n{text}"
        tolerance = 2e-3 if got.dtype == np.float16 else 1e-5
        np.testing.assert_allclose(
            got.astype(np.float64),
            expected.astype(np.float64),
            rtol=tolerance,
            atol=tolerance,
            err_msg=f"seed {seed}\n{text}",
        )


@pytest.mark.skipif(DEVICE == "reference", reason="compares a device with the reference")
@pytest.mark.parametrize("start", range(0, 60, 10))
def test_random_graphs(start: int) -> None:
    for seed in range(start, start + 10):
        check(seed)


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "reference", reason="compares a device with the reference")
def test_many_random_graphs() -> None:
    for seed in range(1000, 3000):
        check(seed)
