"""The guarantees of TinyJit (docs/design.md, part 7), one test each."""

from __future__ import annotations

import numpy as np
import pytest

from tests.threads import run_together
from whit import GlobalCounters, Tensor, TinyJit, UOp, Variable, nn
from whit.helpers import ArgumentError, Context, DTypeError
from whit.nn.optim import SGD


def test_replays_compute_on_new_inputs() -> None:
    calls = []

    @TinyJit
    def double(x: Tensor) -> Tensor:
        calls.append(1)
        return x * 2 + 1

    for n in range(6):
        np.testing.assert_array_equal(double(Tensor([float(n), 1.0])).numpy(), np.float32([2 * n + 1, 3]))
    assert len(calls) == 2 and double.captures == 1


def test_results_of_earlier_calls_never_change() -> None:
    @TinyJit
    def square(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * x
        return y, y.sum()

    kept = [square(Tensor([float(n), n + 1.0])) for n in range(6)]
    for n, (y, total) in enumerate(kept):
        np.testing.assert_array_equal(y.numpy(), np.float32([n * n, (n + 1) ** 2]))
        assert total.item() == n * n + (n + 1) ** 2


def test_result_that_is_a_view_of_state_is_kept() -> None:
    state = Tensor([0.0, 0.0]).realize()

    @TinyJit
    def advance(x: Tensor) -> Tensor:
        state.assign(state + x)
        return state.reshape(1, 2)

    kept = [advance(Tensor([1.0, 2.0])) for _ in range(5)]
    for n, result in enumerate(kept, 1):
        np.testing.assert_array_equal(result.numpy(), np.float32([[n, 2 * n]]))


def test_assign_to_an_input_advances_on_every_call() -> None:
    @TinyJit
    def count(x: Tensor) -> None:
        x.assign(x + 1)

    a, b = Tensor([0.0, 10.0]).realize(), Tensor([100.0, 200.0]).realize()
    for n in range(1, 6):
        count(a)
        np.testing.assert_array_equal(a.numpy(), np.float32([n, 10 + n]))
    count(b)
    np.testing.assert_array_equal(b.numpy(), np.float32([101, 201]))
    np.testing.assert_array_equal(a.numpy(), np.float32([5, 15]))


def test_closed_over_state_advances_without_being_returned() -> None:
    weight = Tensor([1.0, 2.0]).realize()
    weight.requires_grad = True
    optimizer = SGD([weight], lr=0.5)

    @TinyJit
    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        (weight * x).sum().backward()
        optimizer.step()

    for n in range(1, 7):
        step(Tensor([1.0, 2.0]))
        np.testing.assert_allclose(weight.numpy(), np.float32([1 - 0.5 * n, 2 - 1.0 * n]))


def test_batch_norm_statistics_advance() -> None:
    norm, reference = nn.BatchNorm(3), []
    x = Tensor(np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32))

    @TinyJit
    def run(x: Tensor) -> Tensor:
        return norm(x)

    with Context(TRAINING=1):
        for _ in range(5):
            run(x)
            reference.append(norm.running_mean.numpy().copy())
    mean = x.numpy().mean(0)
    for n, value in enumerate(reference, 1):
        np.testing.assert_allclose(value, mean * (1 - 0.9**n), rtol=1e-4)


@pytest.mark.parametrize("calls", [3, 5])
def test_changed_scalar_shape_dtype_and_branch_capture_again(calls: int) -> None:
    @TinyJit
    def scale(x: Tensor, factor: float, flip: bool = False) -> Tensor:
        return -(x * factor) if flip else x * factor

    for _ in range(calls):
        for factor in (2.0, 3.0):
            for flip in (False, True):
                for x in (np.float32([1, 2]), np.float32([[1], [2], [3]]), np.float64([1, 2])):
                    expected = x * factor * (-1 if flip else 1)
                    result = scale(Tensor(x), factor, flip=flip)
                    np.testing.assert_array_equal(result.numpy(), expected)
                    assert result.numpy().dtype == x.dtype


def test_scalars_of_closure_global_and_object_are_part_of_the_key() -> None:
    factor = 2

    @TinyJit
    def scale(x: Tensor) -> Tensor:
        return x * factor

    for factor in (2, 2, 2, 5, 5, 5):
        assert scale(Tensor([1, 2])).tolist() == [factor, 2 * factor]

    class Layer:
        def __init__(self) -> None:
            self.scale = 1.0

        @TinyJit
        def __call__(self, x: Tensor) -> Tensor:
            return x * self.scale

    layer = Layer()
    for layer.scale in (1.0, 1.0, 1.0, 4.0, 4.0, 4.0):
        assert Layer.__call__.__get__(layer)(Tensor([1.0])).tolist() == [layer.scale]


def test_an_attribute_that_the_function_does_not_read_is_no_part_of_the_key() -> None:
    class Model:
        def __init__(self) -> None:
            self.inner, self.step = [1.0], 0

        @TinyJit
        def run(self, x: Tensor) -> Tensor:
            return x * self.inner.count(1.0) + len([y for y in self.inner if y]) * len("step".strip())

    model = Model()
    for _ in range(5):
        model.step += 1
        assert model.run(Tensor([1.0])).item() == 5.0
    assert model.run.captures == 1


def test_jitted_methods_are_per_instance() -> None:
    class Counter:
        def __init__(self, start: float) -> None:
            self.state = Tensor([start]).realize()

        @TinyJit
        def add(self, x: Tensor) -> Tensor:
            self.state.assign(self.state + x)
            return self.state * 1

    a, b = Counter(0.0), Counter(100.0)
    for n in range(1, 6):
        assert a.add(Tensor([1.0])).item() == n
        assert b.add(Tensor([2.0])).item() == 100 + 2 * n


def test_the_same_tensor_twice_and_then_two() -> None:
    @TinyJit
    def mix(a: Tensor, b: Tensor) -> Tensor:
        return a * 10 + b

    for _ in range(4):
        x, y = Tensor([1, 2]), Tensor([3, 4])
        assert mix(x, x).tolist() == [11, 22]
        assert mix(x, y).tolist() == [13, 24]


def test_random_numbers_differ_per_call_and_repeat_per_seed() -> None:
    @TinyJit
    def draw() -> Tensor:
        return Tensor.rand(4)

    def numbers() -> list[list[float]]:
        Tensor.manual_seed(5)
        return [draw().tolist() for _ in range(5)]

    first, second = numbers(), numbers()
    assert first == second
    assert len({tuple(row) for row in first}) == 5
    Tensor.manual_seed(5)
    assert [Tensor.rand(4).tolist() for _ in range(5)] == first  # as without the jit


def test_bound_variable_in_an_output_shape_follows_its_value() -> None:
    data = Tensor(np.arange(20, dtype=np.float32).reshape(10, 2)).realize()

    @TinyJit
    def head(n: UOp) -> Tensor:
        return data[:n] * 2

    variable = Variable("n", 1, 10)
    for n in (3, 5, 1, 10, 7):
        result = head(variable.bind(n))
        assert result.shape[0].unbind()[1] == n
        np.testing.assert_array_equal(result.numpy(), np.arange(2 * n, dtype=np.float32).reshape(n, 2) * 2)
    assert head.captures == 1


def test_variable_sums_share_one_capture() -> None:
    data = Tensor(np.arange(10, dtype=np.float32)).realize()
    total = TinyJit(lambda n: data[:n].sum())
    variable = Variable("m", 1, 10)
    assert [total(variable.bind(n)).item() for n in range(1, 11)] == [
        float(sum(range(n))) for n in range(1, 11)
    ]
    assert total.captures == 1


def test_views_of_one_tensor_share_one_capture() -> None:
    data = np.arange(24, dtype=np.float32).reshape(8, 3)
    whole = Tensor(data).realize()
    add = TinyJit(lambda x: x + 1)
    for i in range(0, 8, 2):
        np.testing.assert_array_equal(add(whole[i : i + 2]).numpy(), data[i : i + 2] + 1)
    assert add.captures == 1
    np.testing.assert_array_equal(whole.numpy(), data)


def test_unrealised_and_constant_inputs() -> None:
    add = TinyJit(lambda x, y: x + y)
    for n in range(4):
        assert add(Tensor([1, 2]) * n, Tensor.ones(2, dtype="int32")).tolist() == [1 + n, 1 + 2 * n]


def test_nested_jit_is_part_of_the_outer_one() -> None:
    inner = TinyJit(lambda x: x * 3)
    outer = TinyJit(lambda x: inner(x) + 1)
    assert [outer(Tensor([n])).item() for n in range(5)] == [3 * n + 1 for n in range(5)]
    assert outer.captures == 1 and inner.captures == 0


def test_nothing_to_record_still_behaves() -> None:
    same = TinyJit(lambda x: x)
    for n in range(4):
        assert same(Tensor([n])).item() == n
    nothing = TinyJit(lambda: 7)
    assert [nothing() for _ in range(4)] == [7] * 4


def test_structures_of_results() -> None:
    both = TinyJit(lambda x: {"double": x * 2, "list": [x + 1, (x - 1,)], "note": "ok"})
    for n in range(4):
        result = both(Tensor([n]))
        assert result["note"] == "ok" and result["double"].item() == 2 * n
        assert result["list"][0].item() == n + 1 and result["list"][1][0].item() == n - 1


def test_reader_built_before_a_replay_keeps_the_old_value() -> None:
    state = Tensor([1.0]).realize()

    @TinyJit
    def bump() -> None:
        state.assign(state + 1)

    for n in range(1, 6):
        reader = state * 10
        held = state.detach()
        bump()
        assert (reader.item(), held.item(), state.item()) == (10.0 * n, float(n), n + 1.0)


def test_second_argument_data_that_changes_unseen_is_refused() -> None:
    numbers = [1.0]

    @TinyJit
    def stale(x: Tensor) -> Tensor:
        return x + Tensor(numbers)

    stale(Tensor([1.0]))
    numbers[0] = 2.0
    with pytest.raises(ArgumentError, match="Python data that differed"):
        stale(Tensor([1.0]))


def test_refusals_say_what_to_do() -> None:
    branch = TinyJit(lambda x: x + 1 if x.sum().item() > 0 else x)
    with pytest.raises(ArgumentError, match=r"inside a jitted function.*To fix"):
        branch(Tensor([1.0]))
    with pytest.raises(ArgumentError, match=r"argument 0.*To fix: pass Tensor"):
        TinyJit(lambda x: Tensor(x))(np.zeros(3))
    data, variable = Tensor([1.0, 2.0, 3.0]).realize(), Variable("k", 1, 3)
    inside = TinyJit(lambda x: data[: variable.bind(2)].sum() + x)
    inside(Tensor(1.0))
    with pytest.raises(ArgumentError, match="k is bound inside"):
        inside(Tensor(1.0))
    whole = Tensor([1.0, 2.0, 3.0, 4.0]).realize()
    with pytest.raises(ArgumentError, match="slice of a larger tensor"):
        TinyJit(lambda x: x.assign(x + 1))(whole[1:3])
    assert whole.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_an_error_inside_leaves_the_jit_usable() -> None:
    add = TinyJit(lambda x: x + Tensor([1, 2, 3]))
    with pytest.raises(Exception, match="shapes"):
        add(Tensor([1, 2]))
    assert [add(Tensor([1, 1, 1])).tolist() for _ in range(3)] == [[2, 3, 4]] * 3


def test_many_signatures_warn_and_stay_bounded() -> None:
    scale = TinyJit(lambda x, n: x * n)
    with pytest.warns(UserWarning, match="signatures"):
        for n in range(80):
            assert scale(Tensor([1]), n).item() == n
            scale(Tensor([1]), n)
    assert scale.captures <= 32


@pytest.mark.parametrize("jit", [0, 1, 2])
def test_every_jit_level_agrees(jit: int) -> None:
    with Context(JIT=jit):
        step = TinyJit(lambda x, y: ((x @ y).relu().sum(0), x.mean()))
        for n in range(4):
            x, y = (
                np.full((3, 4), n - 1.5, np.float32),
                np.linspace(-1, 1, 20, dtype=np.float32).reshape(4, 5),
            )
            total, mean = step(Tensor(x), Tensor(y))
            np.testing.assert_allclose(total.numpy(), np.maximum(x @ y, 0).sum(0), rtol=1e-5, atol=1e-6)
            assert mean.item() == n - 1.5


def test_replay_is_counted() -> None:
    add = TinyJit(lambda x: (x + 1).sum())
    for _ in range(3):
        GlobalCounters.reset()
        add(Tensor.ones(100))
        assert GlobalCounters.kernel_count > 0


def test_gradient_inside() -> None:
    @TinyJit
    def slope(x: Tensor) -> Tensor:
        return (x**3).sum().gradient(x)[0]

    for n in range(1, 5):
        np.testing.assert_allclose(slope(Tensor([float(n), 2.0])).numpy(), [3 * n * n, 12], rtol=1e-5)


def test_requires_float() -> None:
    with pytest.raises(DTypeError):
        TinyJit(lambda x: x.sum().gradient(x)[0])(Tensor([1, 2]))


def test_a_value_that_the_function_holds_in_memory_is_part_of_the_record() -> None:
    outside = (Tensor([5.0, 6.0]) * 2).contiguous()  # computed once, before: no part of it

    @TinyJit
    def step(x: Tensor, y: Tensor) -> Tensor:
        held = (x + y).contiguous()
        twice = (held * 2).contiguous()
        return (held + twice + outside).realize()

    for n in range(5):
        x, y = np.array([n, 2.0], np.float32), np.array([1.0, n * n], np.float32)
        assert (step(Tensor(x), Tensor(y)).numpy() == 3 * (x + y) + np.array([10, 12])).all()


def test_threads_never_get_into_each_others_records() -> None:
    """Three threads record and replay, and a fourth computes beside them; a step of one in the record of
    another would be run with the other's memory."""
    wrong: list[str] = []

    def records(factor: float) -> None:
        for size in range(3, 23):
            step = TinyJit(lambda x: ((x * factor).sum() + Tensor([factor])).realize())
            for call in range(4):
                found = step(Tensor(np.arange(size, dtype=np.float32) + call)).item()
                want = factor * (size * (size - 1) / 2 + size * call) + factor
                if found != want:
                    wrong.append(f"{found} instead of {want}")

    def computes() -> None:
        for size in range(2, 60):
            found = (Tensor(np.ones(size, np.float32)) * 3).numpy().sum()
            if found != 3 * size:
                wrong.append(f"{found} instead of {3 * size}")

    run_together([*[lambda f=f: records(f) for f in (1.0, 2.0, 4.0)], computes])
    assert not wrong
