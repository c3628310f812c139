"""The suite catches mistakes: plants one at a time (a wrong rule, a swapped gradient, a wrong spelling, a
stale buffer, …) and demands that a checker of the suite fails."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.integration.programs import Program, Step, make, run_every_way, run_gradients
from whit import Context, Tensor
from whit.engine import compile as compile_
from whit.helpers import CACHE, DeviceError
from whit.uop import Ops

ENGINE: Any = sys.modules["whit.engine.realize"]


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Neither the disk's nor this process's kernels may hide or keep a planted mistake."""
    saved = dict(compile_._kernels)
    compile_.clear()
    with Context(CACHE=0):
        assert not CACHE
        yield
    compile_.clear()
    compile_._kernels.update(saved)


@contextlib.contextmanager
def caught(*kinds: type[BaseException]) -> Iterator[None]:
    """The block must fail in one of these ways."""
    with pytest.raises(kinds or (AssertionError,)):
        yield


def program(*steps: Step, leaves: list[np.ndarray[Any, Any]], kinds: list[str] | None = None) -> Program:
    """A hand-made float32 program whose last value is the output."""
    count = len(leaves) + len(steps)
    return Program(0, leaves, kinds or ["float32"] * count, list(steps), [count - 1], [1e-4] * count)


X = np.array([[1.5, -2.25, 3.0], [0.5, 4.0, -1.0]], np.float32)


def test_without_a_plant_the_checkers_pass() -> None:
    steps = Step("affine", (0,), (2, 1)), Step("reduce", (1,), ("sum", (1,), False))
    run_every_way(program(*steps, leaves=[X]))
    run_gradients(make(1, smooth=True))


# ---- renderers: one op spelled as another


@pytest.mark.parametrize(
    "right, wrong, step",
    [
        (Ops.ADD, Ops.SUB, Step("add", (0, 1))),
        (Ops.SUB, Ops.ADD, Step("sub", (0, 1))),
        (Ops.MAX, Ops.MIN, Step("maximum", (0, 1))),
        (Ops.CMPLT, Ops.CMPLE, Step("compare", (0, 1), "lt")),
        (Ops.CMPNE, Ops.CMPEQ, Step("compare", (0, 1), "ne")),
    ],
    ids=lambda v: getattr(v, "name", None),
)
def test_a_wrong_spelling_in_the_llvm_renderer(
    right: Any, wrong: Any, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    from whit.renderer.llvm import LLVMRenderer

    real = LLVMRenderer.alu

    def alu(self: Any, op: Any, *rest: Any) -> Any:
        return real(self, wrong if op is right else op, *rest)

    monkeypatch.setattr(LLVMRenderer, "alu", alu)
    kinds = ["int32", "int32", "bool" if step.op == "compare" else "int32"]
    left, other = np.array([1, 2, 3], np.int32), np.array([2, 2, 2], np.int32)
    if right is Ops.CMPNE:
        kinds = ["int32", "int32", "bool"]
    with caught():
        run_every_way(program(step, leaves=[left, other], kinds=kinds))


def test_validation_catches_a_wrong_spelling(monkeypatch: pytest.MonkeyPatch) -> None:
    from whit.renderer.llvm import LLVMRenderer

    real = LLVMRenderer.alu
    monkeypatch.setattr(
        LLVMRenderer,
        "alu",
        lambda self, op, *rest: real(self, Ops.SUB if op is Ops.ADD else op, *rest),
    )
    with Context(VALIDATE=1), caught(DeviceError):
        (Tensor([1.0, 2.0]) + Tensor([3.0, 5.0])).tolist()


# ---- gradients


def test_a_swapped_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    from whit.autograd import rules

    table = next(v for v in vars(rules).values() if isinstance(v, dict) and Ops.SUB in v)
    monkeypatch.setitem(table, Ops.SUB, tuple(reversed(table[Ops.SUB])))
    step = Step("sub", (0, 1))
    leaves = [X.astype(np.float64), (X * 2).astype(np.float64)]
    with caught():
        run_gradients(program(step, leaves=leaves, kinds=["float64"] * 3))


@pytest.mark.parametrize("op", [Ops.EXP2, Ops.LOG2, Ops.SIN, Ops.SQRT], ids=lambda o: o.name)
def test_a_gradient_with_the_wrong_sign(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from whit.autograd import rules

    table = next(v for v in vars(rules).values() if isinstance(v, dict) and Ops.SUB in v)

    def negated(rule: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *a, **k: -rule(*a, **k)

    old = table[op]
    monkeypatch.setitem(table, op, tuple(negated(r) for r in old) if isinstance(old, tuple) else negated(old))
    name = {Ops.EXP2: "exp", Ops.LOG2: "log", Ops.SIN: "sin", Ops.SQRT: "sqrt"}[op]
    with caught():
        run_gradients(program(Step(name, (0,)), leaves=[X.astype(np.float64)], kinds=["float64"] * 2))


# ---- the schedule and the engine


def test_readers_that_are_not_protected_from_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader built before an overwrite must keep the old value."""
    monkeypatch.setattr(ENGINE, "readers_of", lambda *_: [])
    with caught():
        x = Tensor(X).realize()
        before = x * 2
        x.assign(Tensor(-X))
        x.realize()
        np.testing.assert_array_equal(before.numpy(), X * 2)


def test_a_stale_buffer_in_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay that keeps reading the inputs of its capture."""
    from whit.engine.jit import Captured

    real = Captured.__init__

    def forget_inputs(self: Any, *args: Any) -> None:
        real(self, *args)
        self.input_slots = [[] for _ in self.input_slots]

    monkeypatch.setattr(Captured, "__init__", forget_inputs)
    with caught():
        run_every_way(program(Step("affine", (0,), (2, 1)), leaves=[X]))


def test_memory_of_temporaries_that_overlaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A memory plan that puts every temporary at the start of the arena."""
    real = ENGINE.schedule

    def overlapped(roots: Any) -> Any:
        plan, externals, values = real(roots)
        plan = copy.copy(plan)
        assert sum(s.offset >= 0 for s in plan.slots) > 1
        plan.slots = [s._replace(offset=0) if s.offset > 0 else s for s in plan.slots]
        return plan, externals, values

    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((40, 40)).astype(np.float32) for _ in range(2))
    expected = (a @ b).astype(np.float64) @ a - (b @ a) @ b

    def compute() -> np.ndarray[Any, Any]:
        x, y = Tensor(a).realize(), Tensor(b).realize()
        result = (x @ y).contiguous() @ x - (y @ x).contiguous() @ y
        return np.asarray(result.numpy())

    np.testing.assert_allclose(compute(), expected, atol=2e-3)
    monkeypatch.setattr(ENGINE, "schedule", overlapped)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        np.testing.assert_allclose(compute(), expected, atol=2e-3)


# ---- rules of values


def test_a_wrong_rule_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """x - y -> y - x, planted behind the simplifier."""
    from whit.codegen import lower

    real = lower.prepare

    def prepare(ast: Any, target: Any = None) -> Any:
        ready = real(ast, target)
        if target is None:  # codegen prepares once more for the target
            return ready
        new: dict[Any, Any] = {}
        for node in ready.toposort():
            src = tuple([new[s] for s in node.src])
            swapped = node.op is Ops.SUB and len(src) == 2 and node.dtype.is_float
            new[node] = node.replace(src=src[::-1] if swapped else src)
        return new[ready]

    import whit.codegen.pipeline as pipeline

    monkeypatch.setattr(pipeline, "prepare", prepare)
    with caught():
        run_every_way(program(Step("sub", (0, 1)), leaves=[X, X * 3 + 1]))
