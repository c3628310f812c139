"""A computation once more on other memory: equal to NumPy, also in place, in a record, and where it cannot
be."""

from __future__ import annotations

import numpy as np
import pytest

from whit import Tensor, TinyJit
from whit.engine.repeat import Recipe, learn, overwriting

RNG = np.random.default_rng(5)


def given(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def layers(count: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    return [given(6, 6) for _ in range(count)], [given(6) for _ in range(count)]


def through(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    recipe: Recipe | None = None
    for weight, bias in zip(weights, biases):
        if recipe is not None:
            x = recipe.run([x, weight, bias])
            continue

        def one(x: Tensor = x, weight: Tensor = weight, bias: Tensor = bias) -> Tensor:
            return ((x @ weight).contiguous() + bias).tanh()

        x, recipe = learn(one, [x, weight, bias])
        assert recipe is not None
    return x


def expected(x: np.ndarray, weights: list[np.ndarray], biases: list[np.ndarray]) -> np.ndarray:
    for weight, bias in zip(weights, biases):
        x = np.tanh(x @ weight + bias)
    return x


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_layers_equal_numpy(count: int) -> None:
    weights, biases = layers(count)
    x = given(3, 6)
    out = through(Tensor(x).realize(), [Tensor(w).realize() for w in weights], [Tensor(b) for b in biases])
    np.testing.assert_allclose(out.numpy(), expected(x, weights, biases), rtol=1e-5, atol=1e-6)


def test_weights_that_are_computed_where_they_are_used() -> None:
    """A float16 weight stays in memory as it is; its cast is part of the kernels."""
    halves = [given(4).astype(np.float16) for _ in range(3)]
    x = given(2, 4)
    out, recipe = Tensor(x).realize(), None
    for half in halves:
        bias = Tensor(half).cast("float32")
        if recipe is None:
            out, recipe = learn(lambda out=out, bias=bias: out * 2 + bias, [out, bias])
            assert recipe is not None
        else:
            out = recipe.run([out, bias])
    want = x
    for half in halves:
        want = want * 2 + half.astype(np.float32)
    np.testing.assert_allclose(out.numpy(), want, rtol=1e-6)


def test_writes_go_to_the_memory_that_is_given() -> None:
    stores = [Tensor.zeros(3, 4).contiguous().realize() for _ in range(3)]
    lazy = stores[2] + 1  # means the old contents
    x, want = Tensor(given(4)).realize(), []
    recipe: Recipe | None = None
    overwriting(stores)
    for store in stores:
        want.append(x.numpy().copy())

        def write(store: Tensor = store, x: Tensor = x) -> Tensor:
            store[1] = x
            out = (store.sum(0) * 2).contiguous()
            Tensor.realize_all([out, store])
            return out

        if recipe is None:
            x, recipe = learn(write, [x, store])
            assert recipe is not None
        else:
            x = recipe.run([x, store])
    for store, row in zip(stores, want):
        np.testing.assert_array_equal(store.numpy(), np.stack([0 * row, row, 0 * row]))
    np.testing.assert_array_equal(x.numpy(), want[-1] * 2)
    np.testing.assert_array_equal(lazy.numpy(), np.ones((3, 4)))


def test_part_of_a_record() -> None:
    weights, biases = layers(4)
    ws, bs = [Tensor(w).realize() for w in weights], [Tensor(b).realize() for b in biases]
    step = TinyJit(lambda x: through(x, ws, bs).realize())
    kept = []
    for _ in range(5):
        x = given(3, 6)
        kept.append((step(Tensor(x)), expected(x, weights, biases)))
    assert step.captures == 1
    for out, want in kept:
        np.testing.assert_allclose(out.numpy(), want, rtol=1e-5, atol=1e-6)


def test_no_recipe_where_a_tensor_keeps_what_was_computed() -> None:
    x, weight = Tensor(given(4)).realize(), Tensor(given(4)).realize()
    kept = (weight * 3).contiguous()
    out, recipe = learn(lambda: x + kept, [x, weight])
    assert recipe is None
    np.testing.assert_allclose(out.numpy(), x.numpy() + 3 * weight.numpy(), rtol=1e-6)


def test_no_recipe_for_a_view() -> None:
    x = Tensor(given(4)).realize()
    out, recipe = learn(lambda: x[1:3], [x])
    assert recipe is None
    np.testing.assert_array_equal(out.numpy(), x.numpy()[1:3])


def test_tensors_of_other_sizes_are_refused() -> None:
    x = Tensor(given(4)).realize()
    _, recipe = learn(lambda: x * 2, [x])
    assert recipe is not None
    with pytest.raises(AssertionError, match="not like"):
        recipe.run([Tensor(given(5)).realize()])
