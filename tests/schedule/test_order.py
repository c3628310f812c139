"""The order of kernels keeps few temporaries alive."""

from __future__ import annotations

from whit import Tensor
from whit.schedule import schedule

LAYERS, SIZE = 8, 64


def test_gradients_of_weights_run_while_their_factors_are_there() -> None:
    """A net of 8 layers keeps 8 activations; its backward pass adds one gradient, not one for every layer."""
    x = Tensor.rand(SIZE, SIZE).realize()
    weights = [Tensor.rand(SIZE, SIZE).realize() for _ in range(LAYERS)]
    for weight in weights:
        weight.requires_grad = True
        x = (x @ weight).relu()
    x.sum().backward()
    plan, _, _ = schedule([w.grad.uop for w in weights if w.grad is not None])
    assert len(plan.results) == LAYERS
    assert plan.arena["CPU"] <= (LAYERS + 1) * SIZE * SIZE * 4
