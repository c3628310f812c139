"""detect_nan: the op, its operands and the line of what first makes a NaN or an infinity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import whit
from whit import Tensor, TinyJit, detect_nan
from whit.helpers import NumericError


def told(function: Callable[[], Any], **options: Any) -> str:
    """What the error says."""
    with pytest.raises(NumericError) as caught, detect_nan(**options):
        function()
    return str(caught.value)


def test_the_operation_and_the_line() -> None:
    def f() -> Any:
        x = Tensor([1.0, 0.25, 3.0]) * 2
        y = (x - 1).log()  # this line
        return (y * 2).sum().item()

    text = told(f)
    assert "LOG2 of shape (3,) makes NaN at (1,)" in text and "operand is -0.5 there" in text
    assert "test_nan.py" in text and "y = (x - 1).log()  # this line" in text


@pytest.mark.parametrize(
    "function,says",
    [
        (lambda: Tensor([[0.0, 1.0]]) / Tensor([[0.0], [2.0]]), "FDIV of shape (2, 2) makes NaN at (0, 0)"),
        (lambda: Tensor([-1.0]).sqrt(), "SQRT of shape (1,) makes NaN at (0,)"),
        (lambda: Tensor([1.0, 2e38]) * 2, "MUL of shape (2,) makes inf at (1,)"),
        (lambda: Tensor([2e38, 2e38]).sum(), "REDUCE of shape () makes inf at ()"),
        (lambda: Tensor([1.0, float("nan")]) + 1, "the data of a tensor of shape (2,) hold NaN at (1,)"),
        (lambda: Tensor([70000.0]).cast("float16"), "CAST of shape (1,) makes inf"),
    ],
)
def test_operations(function: Callable[[], Tensor], says: str) -> None:
    assert says in told(lambda: function().realize())


def test_an_infinity_that_becomes_a_nan() -> None:
    def f() -> Any:
        big = Tensor([1.0, 200.0]).exp()
        return (big - big * 1).tolist()

    text = told(f)
    assert "SUB of shape (2,) makes NaN at (1,): its operands are inf and inf" in text
    assert "made by EXP2" in text and "big = Tensor([1.0, 200.0]).exp()" in text


def test_gradients_name_the_operation_that_they_are_of() -> None:
    def f() -> Any:
        x = Tensor([0.0, 1.0], requires_grad=True)
        y = x.sqrt()
        (y * 0).sum().backward()
        assert x.grad is not None
        return x.grad.tolist()

    text = told(f)
    assert "in the gradient of SQRT" in text and "the operation itself" in text and "y = x.sqrt()" in text
    assert "in the gradient of SQRT" in told(
        lambda: whit.grad(lambda x: x.sqrt().sum() * 0)(Tensor(0.0)).item()
    )


def test_values_that_are_written_over_others() -> None:
    w = Tensor([1.0, 2.0]).realize()

    def f() -> Any:
        w.assign((w - 2).log())
        return w.realize()

    assert "LOG2 of shape (2,) makes NaN at (0,): its operand is -1.0" in told(f)


def test_jitted_functions_are_looked_into() -> None:
    f = TinyJit(lambda x: x.log().realize())
    for _ in range(3):
        f(Tensor([1.0]))
    assert "LOG2 of shape (1,)" in told(lambda: f(Tensor([-1.0])))


@pytest.mark.parametrize(
    "wrap", [whit.vmap, whit.function, whit.checkpoint, lambda f: whit.vmap(whit.vmap(f))]
)
def test_lines_inside_of_transforms(wrap: Any) -> None:
    def f(x: Tensor) -> Tensor:
        y = x - 1
        return y.log()  # the inner line

    def run() -> Any:
        x = Tensor([[0.5, 3.0], [2.0, 4.0]])
        return (wrap(f)(x) * 2).tolist()

    assert "LOG2 of shape (2, 2) makes NaN at (0, 0)" in told(run) and "# the inner line" in told(run)


def test_gradients_inside_of_transforms() -> None:
    def f(x: Tensor) -> Tensor:
        y = x.sqrt()  # the inner line
        return y.sum() * 0

    for wrap in (lambda f: f, whit.checkpoint, whit.function):
        text = told(lambda wrap=wrap: whit.vmap(whit.grad(wrap(f)))(Tensor([[0.0, 1.0]])).tolist())
        assert "in the gradient of SQRT" in text and "# the inner line" in text


def test_what_is_fine() -> None:
    inf = float("inf")
    with detect_nan():
        assert (Tensor([1.0, 2.0]) > 1.5).where(Tensor([1.0, 2.0]), -inf).tolist() == [-inf, 2.0]
        masked = Tensor([[1.0, 2.0]]).masked_fill(Tensor([[True, False]]), -inf)
        assert masked.softmax().tolist() == [[0.0, 1.0]]
        assert Tensor([-1.0, 4.0]).sqrt().isnan().tolist() == [True, False]
        assert Tensor([1, 2]).tolist() == [1, 2] and Tensor.zeros(0).log().tolist() == []
    with detect_nan(inf=False):
        assert Tensor([1.0]).div(0).tolist() == [inf]
    assert "NaN" in told(lambda: Tensor([0.0]).div(0).tolist(), inf=False)


def test_as_a_decorator_and_what_is_left_behind() -> None:
    @detect_nan()
    def f(x: float) -> Any:
        return Tensor([x]).log().tolist()

    wrap = Tensor._wrap
    for _ in range(2):
        with pytest.raises(NumericError):
            f(-1.0)
    assert f(1.0) == [0.0]
    assert Tensor._wrap == wrap and "_wrap" not in Tensor.__dict__
    with detect_nan(), detect_nan(inf=False):
        pass
    assert "_wrap" not in Tensor.__dict__
    assert Tensor([-1.0]).log().isnan().tolist() == [True]
