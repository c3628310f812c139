"""grad, value_and_grad, vjp, jvp, Jacobians and Hessians against torch.func and differences of values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import whit
from whit import GlobalCounters, Tensor, TinyJit, dtypes
from whit.helpers import ArgumentError, DTypeError, ShapeError
from whit.schedule.schedule import _cache as scheduled

Array = np.ndarray[Any, Any]
rng = np.random.default_rng(3)
X, Y = rng.uniform(0.3, 2, (3, 4)), rng.uniform(0.3, 2, (4, 2))
INDEX = [2, 0, 2]

# name, the function of one (3, 4) array for whit and for torch
FUNCTIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "sin and exp": (lambda x: x.sin() * x.exp(), lambda x: x.sin() * x.exp()),
    "log and sqrt": (lambda x: x.log() / x.sqrt(), lambda x: x.log() / x.sqrt()),
    "tanh and abs": (lambda x: (x - 1).tanh() * (x - 1).abs(), lambda x: (x - 1).tanh() * (x - 1).abs()),
    "power": (lambda x: x**2.5, lambda x: x**2.5),
    "softmax": (lambda x: x.softmax(-1), lambda x: x.softmax(-1)),
    "log_softmax": (lambda x: x.log_softmax(0), lambda x: x.log_softmax(0)),
    "layer norm": (lambda x: x.layernorm(), lambda x: torch.nn.functional.layer_norm(x, (4,))),
    "matmul": (lambda x: x @ Tensor(Y), lambda x: x @ torch.tensor(Y)),
    "gram": (lambda x: x @ x.T, lambda x: x @ x.T),
    "max and min": (lambda x: x.max(1) * x.min(0).sum(), lambda x: x.amax(1) * x.amin(0).sum()),
    "prod": (lambda x: x.prod(1), lambda x: x.prod(1)),
    "var": (lambda x: x.var(1), lambda x: x.var(1)),
    "cumsum": (lambda x: x.cumsum(1), lambda x: x.cumsum(1)),
    "slices": (lambda x: x[1:, ::2] * x[:2, 1::2], lambda x: x[1:, ::2] * x[:2, 1::2]),
    "indices": (lambda x: x[Tensor(INDEX)], lambda x: x[torch.tensor(INDEX)]),
    "gather": (
        lambda x: x.gather(1, Tensor([[0, 3], [1, 1], [2, 0]])),
        lambda x: x.gather(1, torch.tensor([[0, 3], [1, 1], [2, 0]])),
    ),
    "movement": (
        lambda x: x.permute(1, 0).pad(((1, 1), (0, 2))).flip(0).reshape(3, 10),
        lambda x: torch.nn.functional.pad(x.permute(1, 0), (0, 2, 1, 1)).flip(0).reshape(3, 10),
    ),
    "where": (lambda x: (x > 1).where(x * x, 1 / x), lambda x: torch.where(x > 1, x * x, 1 / x)),
    "sort": (lambda x: x.sort(1)[0] ** 2, lambda x: x.sort(1)[0] ** 2),
    "conv2d": (
        lambda x: x.reshape(1, 1, 3, 4).conv2d(Tensor(Y.reshape(2, 1, 2, 2)), padding=1),
        lambda x: torch.nn.functional.conv2d(
            x.reshape(1, 1, 3, 4), torch.tensor(Y.reshape(2, 1, 2, 2)), padding=1
        ),
    ),
}
PARAMETERS = pytest.mark.parametrize("name", FUNCTIONS)


def close(got: Any, want: Any, rtol: float = 1e-9) -> None:
    np.testing.assert_allclose(got.numpy(), np.asarray(want), rtol=rtol, atol=1e-11)


@PARAMETERS
def test_against_torch_func(name: str) -> None:
    """Reverse and forward mode and both Jacobians, of one function."""
    ours, theirs = FUNCTIONS[name]
    x, change = torch.tensor(X), torch.tensor(rng.standard_normal(X.shape))
    value, pull = whit.vjp(ours, Tensor(X))
    want, pull_t = torch.func.vjp(theirs, x)
    up = rng.standard_normal(want.shape)
    close(value, want)
    close(pull(Tensor(up)), pull_t(torch.tensor(up))[0])
    got = whit.jvp(ours, [Tensor(X)], [Tensor(change.numpy())])
    close(got[0], want)
    close(got[1], torch.func.jvp(theirs, (x,), (change,))[1])
    jacobian = torch.func.jacrev(theirs)(x)
    close(whit.jacrev(ours)(Tensor(X)), jacobian)
    close(whit.jacfwd(ours)(Tensor(X)), jacobian)


@PARAMETERS
def test_hessians(name: str) -> None:
    ours, theirs = FUNCTIONS[name]
    x = torch.tensor(X)
    want = torch.func.jacrev(torch.func.jacrev(lambda x: (theirs(x) ** 2).sum()))(x)
    close(whit.hessian(lambda x: (ours(x) ** 2).sum())(Tensor(X)), want, 1e-8)


@PARAMETERS
def test_finite_differences(name: str) -> None:
    ours = FUNCTIONS[name][0]
    change, step = rng.standard_normal(X.shape), 1e-6
    up, down = (ours(Tensor(X + s * change)).numpy() for s in (step, -step))
    got = whit.jvp(ours, [Tensor(X)], [Tensor(change)])[1].numpy()
    np.testing.assert_allclose(got, (up - down) / (2 * step), rtol=1e-6, atol=1e-7)


# ---- arguments ---------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: Any
    second: Any


def test_trees() -> None:
    params = {"w": [Tensor([[1.0, 2.0]]), Tensor([3.0])], "p": Pair(Tensor(2.0), (Tensor([1.0, 1.0]),))}

    def loss(p: Any) -> Tensor:
        return (p["w"][0] @ p["p"].second[0].reshape(2, 1)).sum() * p["p"].first + p["w"][1].sum()

    value, g = whit.value_and_grad(loss)(params)
    assert value.item() == 9.0
    assert type(g) is dict and list(g) == ["w", "p"] and type(g["p"]) is Pair
    assert g["w"][0].tolist() == [[2.0, 2.0]] and g["w"][1].tolist() == [1.0]
    assert g["p"].first.item() == 3.0 and g["p"].second[0].tolist() == [2.0, 4.0]


def test_argnums() -> None:
    def f(x: Any, y: Any, z: Any) -> Any:
        return (x * y * z).sum()

    x, y = Tensor([1.0, 2.0]), Tensor([3.0, 4.0])
    assert whit.grad(f, 1)(x, y, 2).tolist() == [2.0, 4.0]
    assert whit.grad(f, -2)(x, y, 2).tolist() == [2.0, 4.0]
    first, second = whit.grad(f, (1, 0))(x, y, 2)
    assert first.tolist() == [2.0, 4.0] and second.tolist() == [6.0, 8.0]
    assert whit.grad(f, 2)(x, y, 2.0).item() == 11.0
    assert type(whit.grad(f, (0,))(x, y, 1)) is tuple


def test_keywords_are_passed_on() -> None:
    assert whit.grad(lambda x, scale: (x * scale).sum())(Tensor([1.0]), scale=3).tolist() == [3.0]


def test_aux() -> None:
    def f(x: Tensor) -> tuple[Tensor, str]:
        return (x * x).sum(), "extra"

    x = Tensor([3.0])
    g, aux = whit.grad(f, has_aux=True)(x)
    assert g.tolist() == [6.0] and aux == "extra"
    (value, aux), g = whit.value_and_grad(f, has_aux=True)(x)
    assert value.item() == 9.0 and aux == "extra" and g.tolist() == [6.0]
    value, pull, aux = whit.vjp(f, x, has_aux=True)
    assert aux == "extra" and pull(Tensor(1.0)).tolist() == [6.0]
    value, change, aux = whit.jvp(f, [x], [x], has_aux=True)
    assert aux == "extra" and change.item() == 18.0
    jacobian, aux = whit.jacfwd(f, has_aux=True)(x)
    assert aux == "extra" and jacobian.tolist() == [6.0]
    hessian, aux = whit.hessian(f, has_aux=True)(x)
    assert aux == "extra" and hessian.tolist() == [[2.0]]


def test_several_primals_and_outputs() -> None:
    def f(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"a": x * y, "b": x.sum()}

    x, y = Tensor([1.0, 2.0]), Tensor([3.0, 4.0])
    pull = whit.vjp(f, x, y)[1]
    gx, gy = pull({"a": Tensor([1.0, 1.0]), "b": Tensor(10.0)})
    assert gx.tolist() == [13.0, 14.0] and gy.tolist() == [1.0, 2.0]
    change = whit.jvp(f, (x, y), (Tensor([1.0, 0.0]), Tensor([0.0, 1.0])))[1]
    assert change["a"].tolist() == [3.0, 2.0] and change["b"].item() == 1.0
    jacobian = whit.jacobian(f, (0, 1), mode="forward")(x, y)
    assert jacobian["a"][0].tolist() == [[3.0, 0.0], [0.0, 4.0]] and jacobian["b"][1].tolist() == [0.0, 0.0]
    second = whit.hessian(lambda x, y: (x * y * y).sum(), (0, 1))(x, y)
    assert second[0][1].tolist() == [[6.0, 0.0], [0.0, 8.0]] and second[1][1].tolist() == [
        [2.0, 0.0],
        [0.0, 4.0],
    ]
    assert second[0][0].tolist() == [[0.0, 0.0], [0.0, 0.0]]


# ---- nesting -----------------------------------------------------------------------------------------------


def test_derivatives_of_derivatives() -> None:
    f: Any = lambda x: x**5  # noqa: E731
    for order, want in enumerate([80.0, 160.0, 240.0, 240.0, 120.0]):
        f = whit.grad(f) if order % 2 else whit.jacfwd(f)
        assert f(Tensor(2.0)).item() == pytest.approx(want)


def test_inner_and_outer_arguments_are_told_apart() -> None:
    assert whit.grad(lambda x: x * whit.grad(lambda y: x + y)(x))(Tensor(3.0)).item() == 1.0
    assert (
        whit.grad(lambda x: x * whit.jvp(lambda y: x * y, [x], [Tensor(1.0)])[1])(Tensor(3.0)).item() == 6.0
    )
    assert whit.grad(lambda x: whit.grad(lambda y: y * x * x)(Tensor(3.0)))(Tensor(3.0)).item() == 6.0


def test_equal_values_are_told_apart() -> None:
    f = lambda x, y: (x * x * y).sum()  # noqa: E731
    gx, gy = whit.grad(f, (0, 1))(Tensor.ones(2), Tensor.ones(2))
    assert gx.tolist() == [2.0, 2.0] and gy.tolist() == [1.0, 1.0]
    gx, gy = whit.grad(f, (0, 1))(1.0, 1.0)
    assert gx.item() == 2.0 and gy.item() == 1.0
    same = Tensor([3.0]).realize()
    gx, gy = whit.grad(f, (0, 1))(same, same)
    assert gx.tolist() == [18.0] and gy.tolist() == [9.0]


@pytest.mark.parametrize("lazy", [False, True])
def test_values_may_be_read_inside(lazy: bool) -> None:
    def f(x: Tensor) -> Tensor:
        x.realize()
        y = (x * x).realize()
        return (y * y).sum() if y.sum().item() > 0 else y.sum()

    x = Tensor([1.0, 2.0]) * 1 if lazy else Tensor([1.0, 2.0]).realize()
    assert whit.grad(f)(x).tolist() == [4.0, 32.0]
    assert whit.grad(lambda x: whit.grad(f)(x * x).sum())(x).tolist() == [24.0, 768.0]
    assert whit.jvp(f, [x], [Tensor([1.0, 1.0])])[1].item() == 36.0


def test_gradients_reach_tensors_from_outside_too() -> None:
    w = Tensor([2.0], requires_grad=True)
    (g,) = [whit.grad(lambda x: (x * x * w).sum())(Tensor([3.0]))]
    g.sum().backward()
    assert w.grad is not None and w.grad.tolist() == [6.0]


def test_a_pull_can_be_called_often() -> None:
    pull = whit.vjp(lambda x: x.exp(), Tensor([0.0, 0.0]))[1]
    assert [pull(Tensor([n, 1.0])).tolist() for n in (1.0, 2.0)] == [[1.0, 1.0], [2.0, 1.0]]


def test_stop_gradient() -> None:
    assert whit.grad(lambda x: (x * whit.stop_gradient(x)).sum())(Tensor([3.0])).tolist() == [3.0]
    assert whit.jvp(lambda x: x * whit.stop_gradient([x])[0], [Tensor(3.0)], [Tensor(1.0)])[1].item() == 3.0
    assert whit.stop_gradient(({"a": 1}, None)) == ({"a": 1}, None)


def test_zeros_for_what_does_not_matter() -> None:
    assert whit.grad(lambda x: Tensor(2.0))(Tensor([1.0, 2.0])).tolist() == [0.0, 0.0]
    assert whit.jvp(lambda x: Tensor([2.0]), [Tensor([1.0])], [Tensor([1.0])])[1].tolist() == [0.0]
    assert whit.jacfwd(lambda x: Tensor([2.0, 1.0]))(Tensor([1.0])).tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("dtype", [dtypes.float16, dtypes.bfloat16, dtypes.float32, dtypes.float64], ids=str)
def test_dtypes_are_kept(dtype: Any) -> None:
    x = Tensor([1.0, 2.0], dtype=dtype)
    g = whit.grad(lambda x: (x * x).sum())(x)
    change = whit.jvp(lambda x: x.cast(dtypes.float32) * 2, [x], [x])[1]
    assert g.dtype is dtype and g.cast("float32").tolist() == [2.0, 4.0]
    assert change.dtype is dtypes.float32 and change.tolist() == [2.0, 4.0]


def test_empty_tensors() -> None:
    x = Tensor.zeros(0, 3)
    assert whit.grad(lambda x: (x * 2).sum())(x).shape == (0, 3)
    assert whit.jacobian(lambda x: x * 2)(Tensor.zeros(0)).shape == (0, 0)


# ---- with the rest -----------------------------------------------------------------------------------------


def test_under_the_jit() -> None:
    f = TinyJit(
        lambda x: [
            t.realize()
            for t in (whit.grad(lambda x: (x**3).sum())(x), whit.hessian(lambda x: (x**3).sum())(x))
        ]
    )
    for n in range(4):
        g, h = f(Tensor([1.0 + n, 2.0]))
        assert g.tolist() == [3 * (1.0 + n) ** 2, 12.0]
        assert h.tolist() == [[6 * (1.0 + n), 0.0], [0.0, 12.0]]
    assert f.captures == 1


def test_a_jitted_function_inside_is_a_plain_one() -> None:
    f = TinyJit(lambda x: (x * x).sum().realize())
    for _ in range(3):
        assert f(Tensor([3.0])).item() == 9.0
    for _ in range(3):
        assert whit.grad(f)(Tensor([3.0])).tolist() == [6.0]
        assert whit.jvp(f, [Tensor([3.0])], [Tensor([1.0])])[1].item() == 6.0
    assert f(Tensor([4.0])).item() == 16.0 and f.captures == 1


def test_the_jit_sees_scalars_of_what_a_transform_wraps() -> None:
    scale = 2.0

    def f(x: Tensor) -> Tensor:
        return (x * scale).sum()

    step = TinyJit(whit.grad(f))
    for scale in (2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 2.0):
        assert step(Tensor([1.0])).tolist() == [scale]


def test_a_training_step_is_scheduled_once() -> None:
    w = Tensor([1.0, 2.0]).realize()

    def step() -> None:
        g = whit.grad(lambda w: ((w - 3.0) ** 2).sum())(w)
        w.assign(w - g * 0.1).realize()

    step()
    known = len(scheduled)
    GlobalCounters.reset()
    step()
    assert len(scheduled) == known and GlobalCounters.kernel_count == 1


def test_a_deep_function() -> None:
    def f(x: Tensor) -> Tensor:
        for _ in range(500):
            x = x * 1.001
        return x.sum()

    want = 1.001**500
    got = whit.grad(f)(Tensor(np.array([1.0])))
    assert got.uop.op is not None
    change = whit.jvp(f, [Tensor(np.array([1.0]))], [Tensor(np.array([1.0]))])[1]
    assert got.numpy()[0] == pytest.approx(want) and change.item() == pytest.approx(want)


# ---- what is refused ---------------------------------------------------------------------------------------


def test_refused() -> None:
    x = Tensor([1.0, 2.0])
    with pytest.raises(ShapeError, match="grad of a function that returns \\(2,\\)"):
        whit.grad(lambda x: x * 2)(x)
    with pytest.raises(ShapeError, match="returns 3"):
        whit.grad(lambda x: 3)(x)
    with pytest.raises(DTypeError, match="returns int32"):
        whit.grad(lambda x: x.sum().cast("int32"))(x)
    with pytest.raises(DTypeError, match="argument 0 holds a int32 tensor"):
        whit.grad(lambda x: x.sum())(Tensor([1]))
    with pytest.raises(ArgumentError, match="argument 0 holds 'text'"):
        whit.grad(lambda x: x)("text")
    with pytest.raises(ArgumentError, match="grad by argument 1"):
        whit.grad(lambda x: x.sum(), 1)(x)
    with pytest.raises(ArgumentError, match="one is named twice"):
        whit.grad(lambda x: x.sum(), (0, -1))(x)
    with pytest.raises(ArgumentError, match="has_aux"):
        whit.grad(lambda x: x.sum(), has_aux=True)(x)
    with pytest.raises(ShapeError, match="the upstream gradient of shape"):
        whit.vjp(lambda x: x * 2, x)[1](Tensor([1.0]))
    with pytest.raises(ArgumentError, match="of another form"):
        whit.vjp(lambda x: [x, x], x)[1](x)
    with pytest.raises(DTypeError, match="tangents of dtype int32"):
        whit.jvp(lambda x: x, [x], [Tensor([1, 2])])
    with pytest.raises(ArgumentError, match="grad by argument None"):
        whit.grad(lambda x: x.sum(), None)(x)
    with pytest.raises(ArgumentError, match="no sequence"):
        whit.jvp(lambda x: x, x, x)
    with pytest.raises(ArgumentError, match="mode='sideways'"):
        whit.jacobian(lambda x: x, mode="sideways")
    with pytest.raises(ArgumentError, match="jacobian of a function that returns None"):
        whit.jacobian(lambda x: None)(x)
