"""scan against loops written out in PyTorch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import whit
from whit import Context, GlobalCounters, Tensor, TinyJit, Variable, scan
from whit.autograd import marks
from whit.engine import compile as compiler
from whit.helpers import ArgumentError, DTypeError, NumericError, ShapeError
from whit.schedule import schedule
from whit.schedule.schedule import _cache as schedules
from whit.uop import Ops
from whit.uop.spec import verify
from whit.uop.text import parse, show

T, B, H = 5, 3, 4
DRAW = np.random.default_rng(0)
W, X, START = (
    DRAW.standard_normal((H, H)) * 0.3,
    DRAW.standard_normal((T, B, H)),
    DRAW.standard_normal((B, H)),
)
ARGS = tuple([Tensor(a) for a in (W, X, START)])
THEIRS = tuple([torch.tensor(a) for a in (W, X, START)])


def ours(w: Tensor, x: Tensor, h: Tensor, reverse: bool = False) -> Tensor:
    def step(c: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        after = (v + c @ w.transpose(0, 1)).tanh()
        return after, after * 2

    last, ys = scan(step, h, x, reverse=reverse)
    return (last * last).sum() + (ys**3).sum()


def theirs(w: torch.Tensor, x: torch.Tensor, h: torch.Tensor, reverse: bool = False) -> torch.Tensor:
    c, ys = h, []
    for t in reversed(range(len(x))) if reverse else range(len(x)):
        c = (x[t] + c @ w.T).tanh()
        ys.append(c * 2)
    return (c * c).sum() + (torch.stack(ys) ** 3).sum()


def near(got: Tensor, want: torch.Tensor) -> None:
    np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-10, atol=1e-10)


# ---- values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
def test_values_and_gradients_are_those_of_a_loop(reverse: bool) -> None:
    near(ours(*ARGS, reverse), theirs(*THEIRS, reverse))
    got = whit.grad(lambda *a: ours(*a, reverse), argnums=(0, 1, 2))(*ARGS)
    want = torch.func.grad(lambda *a: theirs(*a, reverse), argnums=(0, 1, 2))(*THEIRS)
    for g, w in zip(got, want, strict=True):
        near(g, w)


def test_backward_after_the_loss_was_computed() -> None:
    leaves = [Tensor(a, requires_grad=True) for a in (W, X, START)]
    copies = [t.clone().requires_grad_(True) for t in THEIRS]
    loss = ours(*leaves).realize()
    loss.backward()
    theirs(*copies).backward()
    for mine, other in zip(leaves, copies, strict=True):
        assert mine.grad is not None and other.grad is not None
        near(mine.grad, other.grad)


def test_carries_that_change_places_stay_or_do_not_depend_on_anything() -> None:
    def step(c: Any, x: Tensor) -> Any:
        return {"a": c["b"], "b": c["a"], "c": Tensor(3.0)}, (x, c["a"], c["a"] + 1, 2)

    last, ys = scan(step, {"a": Tensor(1.0), "b": Tensor(2.0), "c": Tensor(9.0)}, Tensor([1, 2, 3]))
    assert {name: t.item() for name, t in last.items()} == {"a": 2, "b": 1, "c": 3}
    assert [y.tolist() for y in ys] == [[1, 2, 3], [1, 2, 1], [2, 3, 2], [2, 2, 2]]


def test_two_carries_of_one_value() -> None:
    (a, (b, c)), none = scan(
        lambda c, x: ((c[0] + x, (c[0] + x, c[1][1])), None),
        (Tensor(0.0), (Tensor(0.0), Tensor(7.0))),
        Tensor([1.0, 2.0, 3.0]),
    )
    assert (a.item(), b.item(), c.item(), none) == (6, 6, 7, None)


def test_loops_without_xs_or_without_carries() -> None:
    last, ys = scan(lambda c, _: (c * 2, c), Tensor(1.0), length=5)
    assert last.item() == 32 and ys.tolist() == [1, 2, 4, 8, 16]
    none, ys = scan(lambda c, x: (c, x * 2), None, Tensor([1, 2, 3]))
    assert none is None and ys.tolist() == [2, 4, 6]


def test_no_steps_and_one() -> None:
    last, ys = scan(lambda c, x: (c + x, c * 2), Tensor(1.0), Tensor.empty(0))
    assert last.item() == 1 and ys.shape == (0,) and ys.tolist() == []
    last, ys = scan(lambda c, x: (c + x, c * 2), Tensor(1.0), Tensor([4.0]))
    assert last.item() == 5 and ys.tolist() == [2]


def test_values_of_no_elements() -> None:
    last, ys = scan(lambda c, x: (c + x, c), Tensor.zeros(0, 2), Tensor.zeros(3, 0, 2))
    assert last.numpy().shape == (0, 2) and ys.numpy().shape == (3, 0, 2)


def test_whole_numbers_beside_floats() -> None:
    def step(c: Any, x: Tensor) -> Any:
        return (c[0] + 1, c[1] * x + c[0]), c[0]

    def value(x: Tensor) -> Tensor:
        return scan(step, (Tensor(0), Tensor(1.0)), x)[0][1]

    assert value(Tensor([2.0, 3.0, 4.0])).item() == ((1 * 2 + 0) * 3 + 1) * 4 + 2
    assert whit.grad(value)(Tensor([2.0, 3.0, 4.0])).tolist() == [12, 8, 7]


def test_a_running_product_by_its_gradient() -> None:
    x = Tensor([2.0, 3.0, 4.0])
    assert whit.grad(lambda t: scan(lambda c, v: (c * v, None), Tensor(1.0), t)[0])(x).tolist() == [12, 8, 6]


def test_gradients_by_constants_from_outside() -> None:
    def value(rate: Tensor) -> Tensor:
        return scan(lambda c, x: (c * rate + x, None), Tensor(0.0), Tensor([1.0, 1.0, 1.0]))[0]

    assert whit.grad(value)(Tensor(0.5)).item() == 2.0  # of rate**2 + rate + 1
    assert whit.grad(lambda rate: value(rate * 2))(Tensor(0.25)).item() == 4.0
    leaf = Tensor(0.5, requires_grad=True)
    value(leaf).backward()
    assert leaf.grad is not None and leaf.grad.item() == 2.0
    start = whit.grad(lambda c: scan(lambda c, _: (c * c, None), c, length=3)[0])(Tensor(1.0))
    assert start.item() == 8.0


def test_memory_that_is_written_before_or_after() -> None:
    w, start = Tensor([2.0]).realize(), Tensor([1.0])
    w.assign(w + 1)
    assert scan(lambda c, _: (c * w, None), start, length=2)[0].tolist() == [9]
    late = scan(lambda c, _: (c * w, None), start, length=2)[0]
    w.assign(w + 1).realize()
    assert late.tolist() == [9] and w.tolist() == [4]


def test_pieces_of_memory_that_lie_apart() -> None:
    x = np.arange(24.0).reshape(4, 6)
    t = Tensor(x).realize()
    assert scan(lambda c, v: (c + v, None), t[0], t[1:3])[0].tolist() == x[:3].sum(0).tolist()
    assert scan(lambda c, v: (c + v, None), t[:, 0], t.transpose(0, 1)[1:])[0].tolist() == x.sum(1).tolist()


def test_variables() -> None:
    size = Variable("size", 1, 10)
    ones = Tensor.ones(10).realize()
    for k in (2, 3):
        bound = size.bind(k)
        last = scan(lambda c, x: (c * bound + ones[:bound].sum() + x, None), Tensor(1.0), Tensor([1.0, 2.0]))[
            0
        ]
        assert last.item() == ((1 * k + k + 1) * k) + k + 2
    with pytest.raises(ArgumentError, match="depends on the size size"):
        scan(lambda c, x: (c + (ones * x)[: size.bind(2)].sum(), None), Tensor(1.0), Tensor([1.0, 2.0]))
    with pytest.raises(ArgumentError, match="depends on the size size"):
        scan(lambda c, x: (c + (ones[: size.bind(2)] * x).sum(), None), Tensor(1.0), Tensor([1.0, 2.0]))
    with pytest.raises(ShapeError, match="must be known"):
        scan(lambda c, x: (c, ones[: size.bind(2)] * x), Tensor(1.0), Tensor([1.0, 2.0]))


def test_kernels_are_validated() -> None:
    with Context(VALIDATE=1):
        assert scan(lambda c, v: (c * v, c + v), Tensor(1.0), Tensor([2.0, 3.0]))[1].tolist() == [3, 5]


@pytest.mark.parametrize("device", ["PYTHON", "CPU"])
def test_devices(device: str) -> None:
    x = Tensor([1.0, 2.0, 3.0], device=device)
    assert scan(lambda s, v: (s + v, s * v), Tensor(0.0, device=device), x)[1].tolist() == [0, 2, 9]


# ---- transforms --------------------------------------------------------------------------------------------


def test_second_derivatives() -> None:
    near(
        whit.hessian(lambda w: ours(w, *ARGS[1:]))(ARGS[0]),
        torch.func.hessian(lambda w: theirs(w, *THEIRS[1:]))(THEIRS[0]),
    )


def test_forward_mode() -> None:
    got = whit.jvp(ours, list(ARGS), list(ARGS))[1]
    near(got, torch.func.jvp(theirs, THEIRS, THEIRS)[1])


def test_vmap_over_weights_and_over_steps() -> None:
    many = np.stack([W, W * 2])
    got = whit.vmap(lambda w: ours(w, *ARGS[1:]))(Tensor(many))
    near(got, torch.stack([theirs(torch.tensor(w), *THEIRS[1:]) for w in many]))
    got = whit.vmap(whit.grad(lambda x: ours(ARGS[0], x, ARGS[2])), in_axes=1)(
        Tensor(np.stack([X, X * 2], 1))
    )
    one = torch.func.grad(lambda x: theirs(THEIRS[0], x, THEIRS[2]))
    near(got, torch.stack([one(THEIRS[1]), one(THEIRS[1] * 2)]))


def test_the_gradient_of_a_vmap() -> None:
    xs = Tensor(np.stack([X, X * 2]))
    got = whit.grad(lambda w: whit.vmap(lambda x: ours(w, x, ARGS[2]))(xs).sum())(ARGS[0])
    one = torch.func.grad(lambda w, k: theirs(w, THEIRS[1] * k, THEIRS[2]))
    near(got, one(THEIRS[0], 1) + one(THEIRS[0], 2))


@pytest.mark.parametrize("wrapped", [whit.checkpoint, whit.function])
def test_inside_of_other_transforms(wrapped: Callable[..., Any]) -> None:
    inner = wrapped(ours)
    for k in (1, 2):
        near(
            whit.grad(lambda w: inner(w * k, *ARGS[1:]))(ARGS[0]),
            torch.func.grad(lambda w: theirs(w * k, *THEIRS[1:]))(THEIRS[0]),
        )


def test_a_loop_in_a_loop() -> None:
    def step(c: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        last, ys = scan(lambda a, b: (a * b + c.sum(), a), c, rows)
        return last, ys.sum(0)

    def mine(x: Tensor) -> Tensor:
        last, ys = scan(step, ARGS[2][0], x)
        return last.sum() + ys.sum()

    def other(x: torch.Tensor) -> torch.Tensor:
        c, total = THEIRS[2][0], torch.tensor(0.0)
        for t in range(T):
            a = c
            for b in range(B):
                total = total + a.sum()
                a = a * x[t, b] + c.sum()
            c = a
        return c.sum() + total

    near(mine(ARGS[1]), other(THEIRS[1]).double())
    near(whit.grad(mine)(ARGS[1]), torch.func.grad(other)(THEIRS[1]))


def test_under_the_jit() -> None:
    step = TinyJit(lambda w, x, h: whit.grad(lambda v: ours(v, x, h))(w).realize())
    for k in (1, 2, 3, 4):
        want = torch.func.grad(lambda w: theirs(w, *THEIRS[1:]))(THEIRS[0] * k)
        near(step(Tensor(W * k), *ARGS[1:]), want)


def test_where_a_nan_comes_from() -> None:
    with pytest.raises(NumericError, match="NaN"), whit.detect_nan():
        scan(lambda c, x: ((c - x).log(), c), Tensor(1.0), Tensor([0.5, 2.0, 3.0]))[1].sum().item()


def test_a_kernel_written_by_hand_inside() -> None:
    def value(x: Tensor) -> Tensor:
        last, _ = scan(lambda c, v: ((c + v).cumsum(0) * 0.5, None), Tensor.zeros(B, H, dtype=x.dtype), x)
        return (last * last).sum()

    def other(x: torch.Tensor) -> torch.Tensor:
        c = torch.zeros(B, H, dtype=x.dtype)
        for t in range(T):
            c = (c + x[t]).cumsum(0) * 0.5
        return (c * c).sum()

    near(whit.grad(value)(ARGS[1]), torch.func.grad(other)(THEIRS[1]))


# ---- cost --------------------------------------------------------------------------------------------------


def compiled(length: int) -> tuple[int, float]:
    """(how many kernels a gradient through so many steps compiles, seconds of the second call)."""
    compiler.clear()
    w, h = Tensor(W.astype(np.float32)), Tensor(START.astype(np.float32))
    x = Tensor(DRAW.standard_normal((length, B, H)).astype(np.float32))
    run = whit.grad(lambda *a: ours(*a), argnums=(0, 1))
    Tensor.realize(*run(w, x, h))
    count, start = len(compiler._kernels), time.perf_counter()
    Tensor.realize(*run(w, x, h))
    return count, time.perf_counter() - start


def test_as_many_kernels_are_compiled_for_ten_steps_as_for_a_thousand() -> None:
    few, many = compiled(10)[0], compiled(1000)
    assert many[0] <= few + 2, "sums over all steps may be split in two"
    assert many[1] < 5, "Python runs a few calls for each step"


def test_gradients_of_weights_are_never_kept_for_every_step() -> None:
    steps, width = 50, 64
    w = Tensor(DRAW.standard_normal((width, 2 * width + 3)) * 0.05).realize()
    x = Tensor(DRAW.standard_normal((steps, 2, width))).realize()

    def value(w: Tensor) -> Tensor:
        def step(c: Tensor, v: Tensor) -> tuple[Tensor, None]:
            left = c @ w[:, :width] + (v @ w[:, width : 2 * width]).tanh() @ w[:, 3 : width + 3].transpose(
                0, 1
            )
            return (left + (c @ w)[:, :width]).tanh(), None

        return scan(step, Tensor.zeros(2, width, dtype=w.dtype), x)[0].sum()

    got = whit.grad(value)(w)
    plan = schedule(marks.unmarked([got.uop]))[0]
    assert sum(plan.arena.values()) < steps * width * width * 8
    twin, c = torch.tensor(w.numpy(), requires_grad=True), torch.zeros(2, width, dtype=torch.float64)
    for v in torch.tensor(x.numpy()):
        left = c @ twin[:, :width] + (v @ twin[:, width : 2 * width]).tanh() @ twin[:, 3 : width + 3].T
        c = (left + (c @ twin)[:, :width]).tanh()
    c.sum().backward()
    assert twin.grad is not None
    np.testing.assert_allclose(got.numpy(), twin.grad.numpy(), rtol=1e-7, atol=1e-9)


def test_a_loop_as_text() -> None:
    last = scan(lambda c, v: ((c @ ARGS[0]).tanh() + v, None), *ARGS[:0:-1])[0]
    call = next(node for node in last.uop.toposort() if node.op is Ops.CALL)
    verify(call.arg.kernel, "step")
    assert parse(show(call.arg.kernel)) is call.arg.kernel
    plan = schedule([last.uop])[0].linear
    verify(plan, "schedule")
    assert parse(show(plan)) is plan


def test_a_gradient_of_its_own_inside_and_a_schedule_that_is_found_again() -> None:
    @whit.custom_gradient
    def bounded(t: Tensor) -> Any:
        return t.tanh(), lambda upstream: upstream.clamp(-0.5, 0.5)

    def value(x: Tensor) -> Tensor:
        return scan(lambda c, v: (bounded(c * v), whit.grad(lambda t: (t * t * v).sum())(c)), x[0], x)[
            1
        ].sum()

    def run() -> list[float]:
        return whit.grad(value)(Tensor([0.5, 1.5, -2.0])).tolist()

    first, known = run(), len(schedules)
    assert run() == first and len(schedules) == known
    c, pulls = 0.5, []
    for v in (0.5, 1.5, -2.0):
        pulls.append((c, v))
        c = math.tanh(c * v)
    g, want = 0.0, [0.0, 0.0, 0.0]
    for k in (2, 1, 0):  # of the sum of 2 c v, and of c' = tanh(c v) with the slope that is given
        c, v = pulls[k]
        slope = max(-0.5, min(0.5, g))
        want[k] += slope * c + 2 * c
        g = slope * v + 2 * v
    want[0] += g
    assert first == pytest.approx(want, rel=1e-5)


def test_what_nobody_reads_is_not_computed() -> None:
    x, start = Tensor(np.ones((4, 3))).realize(), Tensor(np.zeros(3)).realize()
    last = scan(lambda c, v: (c + v, ((c * c).sum(), c.exp())), start, x)[0]
    before = GlobalCounters.kernel_count
    assert last.tolist() == [4, 4, 4]
    assert GlobalCounters.kernel_count - before == 4 + 1, "the steps, and their last carry"


# ---- errors ------------------------------------------------------------------------------------------------


def test_carries_must_stay_what_they_are() -> None:
    xs = Tensor([1.0, 2.0])
    with pytest.raises(ShapeError, match=r"is \(\) before a step and \(1,\) after"):
        scan(lambda c, x: (c.reshape(1), x), Tensor(1.0), xs)
    with pytest.raises(DTypeError, match="int32 before a step and float32 after"):
        scan(lambda c, x: (c + x, x), Tensor(1), xs)
    with pytest.raises(ArgumentError, match="another form"):
        scan(lambda c, x: ((c, c), x), Tensor(1.0), xs)
    with pytest.raises(ArgumentError, match="return \\(carry, y\\)"):
        scan(lambda c, x: c, Tensor(1.0), xs)


def test_lengths_must_agree() -> None:
    xs = Tensor([1.0, 2.0])
    for given, length, why in [
        (None, None, "give length="),
        (xs, 3, "must agree"),
        (None, -1, "at least 0"),
        ((xs, Tensor([1.0])), None, "must agree"),
        (None, 2.5, "at least 0"),
    ]:
        with pytest.raises(ArgumentError, match=why):
            scan(lambda c, x: (c, c), Tensor(1.0), given, length)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="scalar"):
        scan(lambda c, x: (c, c), Tensor(1.0), Tensor(1.0))


def test_what_cannot_be_done_again_in_every_step_is_refused() -> None:
    state, xs = Tensor([1.0]).realize(), Tensor([1.0, 2.0])

    def assigns(c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        state.assign(state + 1)
        return c, x

    with pytest.raises(ArgumentError, match="assigns"):
        scan(assigns, Tensor(1.0), xs)
    assert state.tolist() == [1]
    with pytest.raises(ArgumentError, match="random"):
        scan(lambda c, x: (c + Tensor.rand(()), x), Tensor(1.0), xs)
    with pytest.raises(ArgumentError, match="reading a value"):
        scan(lambda c, x: (c + x.item(), x), Tensor(1.0), xs)
    with pytest.raises(ArgumentError, match="holds 'a'"):
        scan(lambda c, x: (c, "a"), Tensor(1.0), xs)
    with pytest.raises(ArgumentError, match="is no function"):
        scan(3, Tensor(1.0), xs)  # type: ignore[arg-type]
