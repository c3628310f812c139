"""Every op of the tensor level on every device: values against NumPy and PyTorch, and for the differentiable
ones the first and second derivatives against PyTorch, over empty, unit and prime sizes and over views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.devices import CLANG, GCC
from whit import Context, Tensor, UOp, dtypes
from whit.autograd.rules import RULES
from whit.uop import Op, Ops
from whit.uop.ops import all_ops

DEVICES = [
    "CPU",
    CLANG,
    GCC,
    "PYTHON",
]
Array = np.ndarray[Any, Any]
Calculation = Callable[[Any, Any, Any], Any]


def alu(op: Op, *operands: Tensor) -> Tensor:
    """One op, as it is in the graph."""
    return Tensor._wrap(operands[0].uop.alu(op, *[t.uop for t in operands[1:]]))


def taken(x: Any, y: Any, lib: Any) -> Any:
    index = [1, 0, 1] if x.shape[0] > 1 else [0] * min(1, x.shape[0])
    at = Tensor(index, dtype="int32") if lib is Tensor else torch.tensor(index, dtype=torch.int64)
    return x[at] * x[at]


def written(x: Any, y: Any, lib: Any) -> Any:
    z = (x * 1).contiguous() if lib is Tensor else x * 1
    if x.shape[0]:
        z[0] = y[0] * 3
    return z * z


# differentiable op -> whit and PyTorch compute it on x and y of equal shapes (n, m); y is positive
DIFFERENTIABLE: dict[Op, Calculation | tuple[Calculation, Calculation]] = {
    Ops.NEG: lambda x, y, lib: (-x) * x,
    Ops.RECIPROCAL: lambda x, y, lib: y.reciprocal(),
    Ops.SQRT: lambda x, y, lib: y.sqrt(),
    Ops.EXP2: lambda x, y, lib: x.exp2(),
    Ops.LOG2: lambda x, y, lib: y.log2(),
    Ops.SIN: lambda x, y, lib: x.sin(),
    Ops.ERF: lambda x, y, lib: x.erf(),
    Ops.TRUNC: lambda x, y, lib: x.trunc() * x * x,
    Ops.FLOOR: lambda x, y, lib: x.floor() * x * x,
    Ops.ADD: lambda x, y, lib: (x + y) * (x + y),
    Ops.SUB: lambda x, y, lib: (x - y) * (x * 2 - y),
    Ops.MUL: lambda x, y, lib: x * y * x,
    Ops.FDIV: lambda x, y, lib: x / y,
    Ops.MAX: (lambda x, y, lib: x.maximum(y) * x, lambda x, y, lib: torch.maximum(x, y) * x),
    Ops.MIN: (lambda x, y, lib: x.minimum(y) * x, lambda x, y, lib: torch.minimum(x, y) * x),
    Ops.POW: lambda x, y, lib: y**x,
    Ops.WHERE: (
        lambda x, y, lib: (x < y - 1).where(x * x, y * x),
        lambda x, y, lib: torch.where(x < y - 1, x * x, y * x),
    ),
    Ops.MULACC: (lambda x, y, lib: alu(Ops.MULACC, x, y, x * x), lambda x, y, lib: x * y + x * x),
    Ops.CAST: (
        lambda x, y, lib: (x.cast("float32") * 2).cast("float64") * y,
        lambda x, y, lib: (x.float() * 2).double() * y,
    ),
    Ops.RESHAPE: lambda x, y, lib: (
        x.reshape(x.shape[1], x.shape[0]) * y.reshape(y.shape[1], y.shape[0])
    ).sin(),
    Ops.PERMUTE: lambda x, y, lib: (x.permute(1, 0) * y.permute(1, 0)).sin(),
    Ops.EXPAND: lambda x, y, lib: (x.unsqueeze(0).expand(3, *x.shape) * y).sin(),
    Ops.PAD: (
        lambda x, y, lib: (x.pad([(1, 2), (0, 1)]) + 1).sin(),
        lambda x, y, lib: (torch.nn.functional.pad(x, (0, 1, 1, 2)) + 1).sin(),
    ),
    Ops.SHRINK: lambda x, y, lib: (x[: max(x.shape[0] - 1, 0)] * y[min(1, y.shape[0]) :]).sin(),
    Ops.FLIP: lambda x, y, lib: (x.flip((0, 1)) * y).sin(),
    Ops.REDUCE: lambda x, y, lib: x.sum(0) * y.sum(0) + y.prod(0),
    Ops.TAKE: taken,
    Ops.CONTIGUOUS: lambda x, y, lib: (x * x).contiguous() * y,
    Ops.COPY: lambda x, y, lib: (x * x).clone() * y,
    Ops.AFTER: written,
}

# op without a gradient -> whit and NumPy compute it on integers a and b >= 0 (and both as uint64)
WHOLE: dict[Op, tuple[Calculation, Calculation]] = {
    Ops.FLOORDIV: (lambda a, b, _: a // (b + 1), lambda a, b, _: a // (b + 1)),
    Ops.FLOORMOD: (lambda a, b, _: a % (b + 1), lambda a, b, _: a % (b + 1)),
    Ops.TRUNCDIV: (
        lambda a, b, _: alu(Ops.TRUNCDIV, a, b + 1),
        lambda a, b, _: np.trunc(a / (b + 1)).astype(a.dtype),
    ),
    Ops.TRUNCMOD: (lambda a, b, _: alu(Ops.TRUNCMOD, a, b + 1), lambda a, b, _: np.fmod(a, b + 1)),
    Ops.AND: (lambda a, b, _: a & b, lambda a, b, _: a & b),
    Ops.OR: (lambda a, b, _: a | b, lambda a, b, _: a | b),
    Ops.XOR: (lambda a, b, _: a ^ b, lambda a, b, _: a ^ b),
    Ops.SHL: (lambda a, b, _: a << (b % 8), lambda a, b, _: a << (b % 8)),
    Ops.SHR: (lambda a, b, _: a >> (b % 8), lambda a, b, _: a >> (b % 8)),
    Ops.CMPLT: (lambda a, b, _: a < b, lambda a, b, _: a < b),
    Ops.CMPLE: (lambda a, b, _: a <= b, lambda a, b, _: a <= b),
    Ops.CMPEQ: (lambda a, b, _: a == b, lambda a, b, _: a == b),
    Ops.CMPNE: (lambda a, b, _: a != b, lambda a, b, _: a != b),
    Ops.BITCAST: (lambda a, b, _: a.bitcast("uint32"), lambda a, b, _: a.view(np.uint32)),
    Ops.DETACH: (lambda a, b, _: a.detach() + b, lambda a, b, _: a + b),
    Ops.IOTA: (
        lambda a, b, _: a + Tensor.arange(a.shape[1]),
        lambda a, b, _: a + np.arange(a.shape[1], dtype=a.dtype),
    ),
}
# of no shape or value of their own at the tensor level, or covered by every other row
ELSEWHERE = [
    "CONST", "BUFFER", "PARAM", "VAR", "BIND", "STORE", "THREEFRY", "LDEXP", "SINK", "CALL", "LINEAR",
]  # fmt: skip
ELSEWHERE += ["DOT4", "DOT4U", "DOT2", "DOT2B"]


def test_the_tables_hold_every_op_of_the_tensor_level() -> None:
    below = {"loop", "linear", "sink"}
    tensor_level = {
        op for op in all_ops() if op.category not in below and op.name not in (*ELSEWHERE, "INDEX", "STAGE")
    }
    assert set(DIFFERENTIABLE) == set(RULES)
    assert set(DIFFERENTIABLE) == {op for op in tensor_level if op.differentiable} - {Ops.IOTA}
    assert tensor_level == set(DIFFERENTIABLE) | set(WHOLE)


def views(x: Array, kind: str) -> Tensor:
    """The same values, in memory as they are, transposed, reversed, or a window of something larger."""
    if kind == "transposed":
        return Tensor(x.T.copy()).realize().T
    if kind == "reversed":
        return Tensor(x[::-1].copy()).realize().flip(0)
    if kind == "window":
        return Tensor(np.pad(x, ((1, 2), (2, 1)))).realize()[1 : 1 + x.shape[0], 2 : 2 + x.shape[1]]
    return Tensor(x).realize()


KINDS = ["plain", "transposed", "reversed", "window"]


def check_differentiable(op: Op, shape: tuple[int, int], kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrays = [rng.uniform(-2, 2, shape), rng.uniform(0.5, 2.5, shape)]
    row = DIFFERENTIABLE[op]
    ours, theirs = row if isinstance(row, tuple) else (row, row)
    leaves = [views(a, kind) for a in arrays]
    for leaf in leaves:
        leaf.requires_grad = True
    torches = [torch.tensor(a, requires_grad=True) for a in arrays]
    value, value_t = ours(*leaves, Tensor), theirs(*torches, torch)
    tolerance = 1e-5 if op is Ops.CAST else 1e-9
    for order in range(3):
        want = value_t.detach().numpy(force=True)
        got = value.numpy()
        assert got.shape == want.shape, (op.name, shape, kind, order)
        where = f"{op.name} {shape} {kind} {order}"
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance, err_msg=where)
        if order == 2 or not value_t.requires_grad:
            return
        grads_t = torch.autograd.grad(
            value_t.sum(), torches, create_graph=True, allow_unused=True, materialize_grads=True
        )
        grads = value.sum().gradient(*leaves, materialize_grads=True)
        weights = [rng.standard_normal(shape) for _ in grads]
        value = (grads[0] * Tensor(weights[0])) + grads[1] * Tensor(weights[1])
        value_t = grads_t[0] * torch.tensor(weights[0]) + grads_t[1] * torch.tensor(weights[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=lambda o: o.name)
def test_values_and_two_derivatives(op: Op, device: str) -> None:
    if device in ("CPU:CLANG", "CPU:GCC") and op.category in ("movement", "memory"):
        pytest.skip("the same kernels as of CPU, in another language: sampled by the elementwise ops")
    with Context(DEV=device):
        check_differentiable(op, (3, 5), "plain", 0)
        if not device.startswith("CPU:"):
            check_differentiable(op, (1, 7), "reversed", 1)


@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=lambda o: o.name)
def test_empty_and_unit_sizes(op: Op) -> None:
    for shape in ((0, 3), (1, 1), (2, 0)):
        if op is Ops.AFTER and 0 in shape:
            continue
        check_differentiable(op, shape, "plain", 2)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(sorted(DIFFERENTIABLE, key=lambda o: o.name)),
    st.sampled_from([0, 1, 2, 7, 13]),
    st.sampled_from([1, 3, 11, 17]),
    st.sampled_from(KINDS),
    st.integers(0, 9),
)
def test_shapes_and_views(op: Op, n: int, m: int, kind: str, seed: int) -> None:
    check_differentiable(op, (n, m), kind, seed)


INTEGERS = [np.int32, np.uint8, np.int64, np.uint32, np.int8, np.uint16]


@pytest.mark.parametrize("device", DEVICES)
def test_whole_numbers(device: str) -> None:
    rng = np.random.default_rng(3)
    with Context(DEV=device):
        for n, (op, (ours, theirs)) in enumerate(WHOLE.items()):
            sampled = INTEGERS[n % 3 :: 3] if not device.startswith("CPU:") else INTEGERS[n % 6 : n % 6 + 1]
            for kind in [np.int32] if op in (Ops.BITCAST, Ops.IOTA) else sampled:
                low = 0 if np.iinfo(kind).min == 0 or op in (Ops.SHL, Ops.SHR) else -50
                a, b = rng.integers(low, 60, (3, 7)).astype(kind), rng.integers(0, 20, (3, 7)).astype(kind)
                for form in ("plain", "reversed"):
                    got = ours(views(a, form), views(b, form), Tensor).numpy()
                    want = theirs(a, b, np)
                    np.testing.assert_array_equal(got, want, err_msg=f"{op.name} {kind.__name__} {form}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["float16", "bfloat16", "fp8e4m3", "fp8e5m2", "float32", "float64"])
def test_sums_and_products_in_every_float(name: str, device: str) -> None:
    """Small whole numbers are exact in every type."""
    data = np.arange(15, dtype=np.float32).reshape(3, 5) % 3
    with Context(DEV=device):
        x = Tensor(data).cast(name)
        assert x.dtype.name == name
        for ours, want in (
            (x + x, data + data),
            (x * x, data * data),
            (x.max(1), data.max(1)),
            (x[:, :2].sum(1), data[:, :2].sum(1)),
            (x.flip(1), data[:, ::-1]),
        ):
            np.testing.assert_array_equal(ours.cast("float32").numpy(), want)


@pytest.mark.parametrize("device", DEVICES)
def test_random_numbers_are_the_same_everywhere(device: str) -> None:
    Tensor.manual_seed(5)
    with Context(DEV="CPU"):
        want = (
            Tensor.rand(11, 3).numpy(),
            Tensor.randint(7, low=-3, high=9).numpy(),
            Tensor.randperm(9).numpy(),
        )
    Tensor.manual_seed(5)
    with Context(DEV=device):
        got = (
            Tensor.rand(11, 3).numpy(),
            Tensor.randint(7, low=-3, high=9).numpy(),
            Tensor.randperm(9).numpy(),
        )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
def test_symbolic_sizes(device: str) -> None:
    data = np.arange(20, dtype=np.float32).reshape(5, 4)
    with Context(DEV=device):
        x = Tensor(data).realize()
        for n in (1, 3, 5):
            part = x.shrink(((0, UOp.variable("n", 1, 5).bind(n)), (0, 4)))
            np.testing.assert_allclose((part * 2).sum(0).numpy(), data[:n].sum(0) * 2)
            assert part.dtype is dtypes.float32
