"""How many kernels common computations take: the decisions of `schedule/fusion.py`, pinned."""

from __future__ import annotations

import pytest

from whit import Tensor, nn
from whit.helpers import Context
from whit.nn.optim import Adam
from whit.schedule import schedule
from whit.uop import UOp


def kernels(*tensors: Tensor) -> int:
    """Kernels that computing the tensors takes, from inputs that are in memory."""
    plan, _, _ = schedule([t.uop for t in tensors])
    return len(plan.calls)


def data(*shape: int) -> Tensor:
    """A tensor in memory, of any contents."""
    return Tensor.empty(*shape)


def trained(*shape: int) -> Tensor:
    made = Tensor.empty(*shape)
    made.requires_grad = True
    return made


def test_softmax_is_one_kernel() -> None:
    assert kernels(data(256, 65).softmax()) == 1
    assert kernels(data(4, 64, 128).log_softmax()) == 1


def test_layer_norm_is_one_kernel() -> None:
    norm = nn.LayerNorm(384)
    norm.weight, norm.bias = data(384), data(384)
    assert kernels(norm(data(64, 384))) == 1
    rms = nn.RMSNorm(384)
    rms.weight = data(384)
    assert kernels(rms(data(64, 384))) == 1


def test_attention_forward() -> None:
    for length in (64, 256, 1000):
        q, k, v = data(2, 4, length, 32), data(2, 4, length, 32), data(2, 4, length, 48)
        assert kernels(q.scaled_dot_product_attention(k, v, is_causal=True)) == 1
    assert kernels(q.scaled_dot_product_attention(k, v)) == 1  # rows of scores and of weights stay in scratch
    assert kernels(q.scaled_dot_product_attention(k, v, data(length, length))) == 1


def test_conv_bias_relu_is_one_kernel() -> None:
    assert kernels(data(4, 8, 16, 16).conv2d(data(16, 8, 3, 3), data(16), padding=1).relu()) == 1


def test_matmul_chain_fuses_its_epilogues() -> None:
    x = data(64, 32)
    hidden = (x @ data(32, 128) + data(128)).gelu()
    assert kernels(hidden @ data(128, 16) + data(16)) == 2


def test_batch_norm() -> None:
    norm = nn.BatchNorm(32)
    norm.weight, norm.bias, norm.running_mean, norm.running_var = data(32), data(32), data(32), data(32)
    x = trained(16, 32, 12, 12)
    for parameter in (norm.weight, norm.bias):
        parameter.requires_grad = True
    assert kernels(norm(x)) == 1  # inference: scale and shift
    norm = nn.BatchNorm(32, track_running_stats=False)
    norm.weight, norm.bias = trained(32), trained(32)
    with Context(TRAINING=1):
        y = norm(x).relu()
        assert kernels(y) <= 2
        (y * data(16, 32, 12, 12)).sum().backward()
        assert x.grad is not None and norm.weight.grad is not None and norm.bias.grad is not None
        assert kernels(x.grad, norm.weight.grad, norm.bias.grad) <= 5


def test_adam_step_takes_a_kernel_per_parameter() -> None:
    parameters = [trained(size) for size in (10, 20, 30, 40, 50)]
    optimizer = Adam(parameters, lr=1e-3)
    for parameter in parameters:
        parameter.grad = data(*parameter.shape)
    updated = optimizer.schedule_step()
    assert kernels(*updated) <= len(parameters) + 3  # one each, and the step counts


def test_one_hot_embedding_costs_no_memory() -> None:
    table, tokens = data(1000, 64), Tensor.empty(32, dtype="int32")
    assert kernels(nn.Embedding(1000, 64)(tokens)) <= 2
    one_hot = (Tensor.arange(1000).reshape(1, 1000) == tokens.reshape(32, 1)).cast("float32")
    plan, _, _ = schedule([(one_hot @ table).uop])
    assert len(plan.calls) == 1 and plan.arena == {}


def test_cross_entropy_forward() -> None:
    logits, labels = data(128, 10), Tensor.empty(128, dtype="int32")
    assert kernels(logits.sparse_categorical_crossentropy(labels)) <= 2


def test_arange_cat_stack_dropout() -> None:
    assert kernels(Tensor.arange(100) * 2 + 1) == 1
    assert kernels(Tensor.cat(data(3, 4), data(5, 4))) == 1
    assert kernels(Tensor.stack(data(3), data(3), data(3))) == 1
    with Context(TRAINING=1):
        assert kernels(data(64, 64).dropout(0.3) * 2) == 1


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.reshape(6, 4),
        lambda t: t[1:3],
        lambda t: t.flatten(),
        lambda t: t[2],
        lambda t: t.contiguous(),
        lambda t: t.detach(),
    ],
)
def test_contiguous_views_cost_no_kernel(view: object) -> None:
    assert kernels(view(data(4, 6))) == 0  # type: ignore[operator]


def test_other_views_cost_one() -> None:
    assert kernels(data(4, 6).permute(1, 0)) == 1
    assert kernels(data(4, 6).flip(0)) == 1
    assert kernels(data(4, 6)[:, 1:3]) == 1


def test_long_reduction_is_split_for_the_threads() -> None:
    plan, _, _ = schedule([data(1 << 22).sum().uop])
    assert len(plan.calls) == 2


def test_deep_chain_is_cut() -> None:
    x = data(16)
    for _ in range(2000):
        x = x * 1.5 + 0.25
    assert 2 <= kernels(x) < 40


def test_equal_graphs_share_a_schedule() -> None:
    a, _, _ = schedule([(data(5, 5) + 1).uop])
    b, _, _ = schedule([(data(5, 5) + 1).uop])
    assert a is b
    c, _, _ = schedule([(data(5, 5) + 2).uop])
    assert c is not a


def test_signed_zero_is_part_of_the_key() -> None:
    x = data(3).uop
    a, _, _ = schedule([x + 0.0])
    b, _, _ = schedule([x + UOp.const(-0.0, x.dtype)])
    assert a is not b
