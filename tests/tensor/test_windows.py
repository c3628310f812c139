"""What the movement ops of windows become: plain affine indices, forward and backward."""
from __future__ import annotations

import pytest

from whit.schedule import schedule
from whit.tensor import Tensor
from whit.uop import Op, Ops, UOp

DIVISIONS = {Ops.FLOORDIV, Ops.FLOORMOD, Ops.TRUNCDIV, Ops.TRUNCMOD}


def ops_of(tensor: Tensor) -> set[Op]:
    """The ops of all kernels that compute a tensor."""
    found = schedule([tensor.uop])[0]
    return {node.op for call in found.calls if isinstance(call.ast, UOp) for node in call.ast.toposort()}


@pytest.mark.parametrize("kernel, stride, dilation, padding",
                         [(3, 1, 1, 1), (5, 1, 1, 0), (3, 1, 2, 2), (1, 1, 1, 0),
                                                               (2, 2, 1, 0), (3, 2, 1, 1)])
def test_convolutions_never_divide(kernel: int, stride: int, dilation: int, padding: int) -> None:
    """Stride 1, and windows that tile the input: no division in either direction. Else the gradient for the
    input asks whether a position is a multiple of the stride."""
    x, w = Tensor.empty(2, 3, 12, 10), Tensor.empty(4, 3, kernel, kernel)
    y = x.conv2d(w, stride=stride, dilation=dilation, padding=padding)
    for_x, for_w = y.sum().gradient(x, w)
    assert not ops_of(y) & DIVISIONS
    assert not ops_of(for_w) & DIVISIONS
    if stride == 1:
        assert not ops_of(for_x) & DIVISIONS


def test_pools_never_divide() -> None:
    x = Tensor.empty(2, 3, 12, 10)
    for y in (x.max_pool2d(2), x.max_pool2d(3, 1), x.avg_pool2d(3, 2, padding=1)):
        assert not ops_of(y) & DIVISIONS


def test_one_kernel_each() -> None:
    x, w = Tensor.empty(2, 3, 12, 10), Tensor.empty(4, 3, 3, 3)
    b, labels = Tensor.empty(4), Tensor.empty(8, dtype="int32")
    for y in (x.conv2d(w, b, padding=1).relu(), x.max_pool2d(2), x.softmax(), x.layernorm(),
              Tensor.empty(8, 10).cross_entropy(labels, "none"), labels.one_hot(10),
              Tensor.empty(50, 6)[labels]):
        found = schedule([y.uop])[0]
        assert len(found.calls) == 1
