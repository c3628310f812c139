"""Random programs on real devices: values, gradients and second derivatives against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.devices import CLANG
from whit import Tensor, dtypes

Step = Callable[[Any, Any, Any], Any]  # (last value, the one before, the library) -> next value


def _axis(x: Any) -> int:
    return x.ndim // 2


def _with(lib: Any, name: str, *args: Any) -> Any:
    """A function that is a method of whit's Tensor and a function of torch."""
    return getattr(args[0], name)(*args[1:]) if lib is Tensor else getattr(torch, name)(*args)


def _where(condition: Any, x: Any, y: Any) -> Any:
    return condition.where(x, y) if isinstance(x, Tensor) else torch.where(condition, x, y)


def _flatten(x: Any) -> Any:
    return x.reshape(-1)[: x.shape[0]].reshape(x.shape[0], *[1] * (x.ndim - 1))


def _max(x: Any, axis: int) -> Any:
    return x.max(axis, keepdim=True) if isinstance(x, Tensor) else x.amax(axis, keepdim=True)


STEPS: dict[str, Step] = {
    "add": lambda x, y, lib: x + y,
    "subtract": lambda x, y, lib: x - y.sin(),
    "multiply": lambda x, y, lib: x * y,
    "divide": lambda x, y, lib: x / (y * y + 1.5),
    "maximum": lambda x, y, lib: _with(lib, "maximum", x, y * 0.7 + 0.1),
    "where": lambda x, y, lib: _where(x * 0 < y, x, y * x),
    "exp": lambda x, y, lib: (x.sin() * 0.7).exp(),
    "tanh": lambda x, y, lib: x.tanh(),
    "sigmoid": lambda x, y, lib: x.sigmoid(),
    "log": lambda x, y, lib: (x * x + 0.5).log(),
    "sqrt": lambda x, y, lib: (x * x + 0.5).sqrt(),
    "relu": lambda x, y, lib: (x + 0.01).relu(),
    "erf": lambda x, y, lib: x.erf(),
    "power": lambda x, y, lib: (x * x + 0.5) ** 1.7,
    "sum": lambda x, y, lib: x.sum(_axis(x), keepdim=True) * 0.5 if x.ndim else x,
    "mean": lambda x, y, lib: x - x.mean(_axis(x), keepdim=True) if x.ndim else x,
    "max": lambda x, y, lib: _max(x, _axis(x)) if x.ndim else x,
    "product": lambda x, y, lib: x.sin().prod(_axis(x), keepdim=True) if x.ndim else x,
    "softmax": lambda x, y, lib: x.softmax(-1) if x.ndim else x,
    "transpose": lambda x, y, lib: x.transpose(0, -1) if x.ndim and x.shape[0] == x.shape[-1] else x * 1.1,
    "flip": lambda x, y, lib: x.flip(tuple(range(x.ndim))) if x.ndim else x,
    "flatten": lambda x, y, lib: _flatten(x) if x.ndim else x,
    "slice": lambda x, y, lib: x[..., : 1 + x.shape[-1] // 2][..., :1] + x if x.ndim else x,
    "stride": lambda x, y, lib: x[::2][:1] - x if x.ndim else x,
    "gather": lambda x, y, lib: x[_rows(x)] if x.ndim else x,
    "cat": lambda x, y, lib: _cat(x, lib) if x.ndim else x,
    "matmul": lambda x, y, lib: (x @ x.transpose(-1, -2)) @ x * 0.2 if x.ndim > 1 else x,
}  # fmt: skip


def _rows(x: Any) -> Any:
    rows = [(7 * i + 2) % x.shape[0] for i in range(x.shape[0])]
    return Tensor(rows, device=x.device) if isinstance(x, Tensor) else torch.tensor(rows)


def _cat(x: Any, lib: Any) -> Any:
    joined = Tensor.cat(x, x * 2, dim=0) if lib is Tensor else torch.cat([x, x * 2], 0)
    return joined[1 : 1 + x.shape[0]]


def evaluate(steps: list[str], a: Any, b: Any, lib: Any) -> Any:
    made = [b, a]
    for name in steps:
        made.append(STEPS[name](made[-1], made[-2], lib))
    return made[-1] + a


def check(device: str, shape: list[int], steps: list[str], wide: bool, seed: int) -> None:
    generator = np.random.default_rng(seed)
    values = [generator.uniform(-1.5, 1.5, s) for s in (tuple(shape), tuple(shape))]
    dtype, torch_type = (dtypes.float64, torch.float64) if wide else (dtypes.float32, torch.float32)
    ours = [Tensor(v, device=device).cast(dtype).realize() for v in values]
    theirs = [torch.tensor(v, dtype=torch_type, requires_grad=True) for v in values]
    out, tout = evaluate(steps, *ours, Tensor), evaluate(steps, *theirs, torch)
    assert out.shape == tuple(tout.shape)
    first = out.square().sum().gradient(*ours, materialize_grads=True)
    tfirst = torch.autograd.grad(tout.square().sum(), theirs, create_graph=True, materialize_grads=True)
    total, ttotal = (f[0].square().sum() + f[1].square().sum() for f in (first, tfirst))
    second = total.gradient(*ours, materialize_grads=True)
    tsecond = torch.autograd.grad(ttotal, theirs, materialize_grads=True)
    Tensor.realize(out, *first, *second)
    tolerance = 1e-8 if wide else 2e-4
    for got, want in zip([out, *first, *second], [tout, *tfirst, *tsecond], strict=True):
        expected = want.detach().numpy()
        scale = max(1.0, float(abs(expected).max(initial=0)))
        np.testing.assert_allclose(got.numpy() / scale, expected / scale, rtol=tolerance, atol=tolerance)


SHAPES = st.lists(st.sampled_from([1, 2, 3, 5]), max_size=3)
PROGRAMS = (
    SHAPES,
    st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4),
    st.booleans(),
    st.integers(0, 99),
)
QUIET = [HealthCheck.too_slow]


@settings(max_examples=25, deadline=None, suppress_health_check=QUIET)
@given(*PROGRAMS)
def test_cpu(shape: list[int], steps: list[str], wide: bool, seed: int) -> None:
    check("CPU", shape, steps, wide, seed)


@settings(max_examples=5, deadline=None, suppress_health_check=QUIET)
@given(*PROGRAMS)
@pytest.mark.parametrize("device", [CLANG])
def test_clang(device: str, shape: list[int], steps: list[str], wide: bool, seed: int) -> None:
    check(device, shape, steps, wide, seed)


@settings(max_examples=5, deadline=None, suppress_health_check=QUIET)
@given(*PROGRAMS)
def test_python(shape: list[int], steps: list[str], wide: bool, seed: int) -> None:
    check("PYTHON", shape, steps, wide, seed)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=QUIET)
@given(*PROGRAMS)
def test_cpu_at_length(shape: list[int], steps: list[str], wide: bool, seed: int) -> None:
    check("CPU", shape, steps, wide, seed)


@pytest.mark.parametrize("name", STEPS)
def test_each_step(name: str) -> None:
    check("CPU", [3, 3] if name == "transpose" else [3, 2], [name], True, 1)


def test_empty_tensors() -> None:
    x = Tensor(np.zeros((0, 3), np.float32), requires_grad=True)
    (g,) = (x.exp() * 2).sum().gradient(x, materialize_grads=True)
    assert g.shape == (0, 3) and g.numpy().size == 0
