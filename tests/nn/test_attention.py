"""Attention layers against torch.nn: outputs, weights, and the gradients of inputs and parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.nn.test_layers import same_weights
from whit import Context, Tensor, TinyJit, nn
from whit.helpers import WhitError
from whit.nn.state import get_state_dict

L, S, N, E, H = 5, 7, 3, 8, 2
rng = np.random.default_rng(0)

OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": False, "batch_first": True},
    {"add_bias_kv": True},
    {"add_zero_attn": True, "batch_first": True},
    {"add_bias_kv": True, "add_zero_attn": True},
    {"kdim": 6, "vdim": 10},
    {"kdim": 6, "bias": False, "batch_first": True},
]


def compare(got: Tensor | None, want: torch.Tensor | None) -> None:
    """Weights are large here, and so is what rounding makes of the scores."""
    assert got is not None and want is not None
    values = want.detach().numpy()
    np.testing.assert_allclose(got.numpy(), values, rtol=0, atol=1e-4 * (1 + np.abs(values).max()))


def inputs(options: dict[str, Any], batched: bool = True) -> list[np.ndarray]:
    found = []
    for length, size in ((L, E), (S, options.get("kdim", E)), (S, options.get("vdim", E))):
        shape = (N, length, size) if options.get("batch_first") else (length, N, size)
        found.append(rng.standard_normal(shape if batched else (length, size)).astype(np.float32))
    return found


def masks(kind: str) -> dict[str, np.ndarray]:
    """Every query sees something."""
    hidden = rng.random((L, S)) < 0.4
    hidden[:, 0] = False
    padding = rng.random((N, S)) < 0.4
    padding[:, 0] = False
    heads = np.repeat(hidden[None], N * H, 0) & (rng.random((N * H, L, S)) < 0.7)
    return {
        "none": {},
        "bool": {"attn_mask": hidden},
        "float": {"attn_mask": np.where(hidden, -np.inf, rng.standard_normal((L, S))).astype(np.float32)},
        "padding": {"key_padding_mask": padding},
        "both": {"attn_mask": hidden, "key_padding_mask": padding},
        "heads": {"attn_mask": heads},
    }[kind]


NEEDS = [(True, True), (True, False), (False, True)]  # need_weights, average_attn_weights
KINDS = ["none", "bool", "float", "padding", "both", "heads"]
# one in five by default: each option, kind of mask and need among them
ALL = list(itertools.product(OPTIONS, KINDS, NEEDS))
SAMPLED = [pytest.param(*case, marks=[pytest.mark.slow] * (n % 5 > 0)) for n, case in enumerate(ALL)]


@pytest.mark.parametrize(("options", "kind", "need"), SAMPLED)
def test_multihead(options: dict[str, Any], kind: str, need: tuple[bool, bool]) -> None:
    ours, theirs = nn.MultiheadAttention(E, H, **options), torch.nn.MultiheadAttention(E, H, **options)
    same_weights(ours, theirs)
    values, mask = inputs(options), masks(kind)
    mine = [Tensor(v, requires_grad=True) for v in values]
    other = [torch.tensor(v, requires_grad=True) for v in values]
    flags = {"need_weights": need[0], "average_attn_weights": need[1]}
    out, weights = ours(*mine, **{name: Tensor(m) for name, m in mask.items()}, **flags)
    want, shares = theirs(*other, **{name: torch.tensor(m) for name, m in mask.items()}, **flags)
    g = rng.standard_normal(tuple(want.shape)).astype(np.float32)
    (out * Tensor(g)).sum().backward()
    (want * torch.tensor(g)).sum().backward()
    compare(out, want)
    assert (weights is None) == (shares is None)
    if shares is not None:
        compare(weights, shares)
    for a, b in zip(mine, other, strict=True):
        compare(a.grad, b.grad)
    grads = {name: t.grad for name, t in get_state_dict(ours).items() if t.requires_grad}
    for name, p in theirs.named_parameters():
        compare(grads[name], p.grad)


@pytest.mark.parametrize("weighted", [True, False])
def test_one_example_and_itself(weighted: bool) -> None:
    ours, theirs = nn.MultiheadAttention(E, H), torch.nn.MultiheadAttention(E, H)
    same_weights(ours, theirs)
    x, y, z = inputs({}, batched=False)
    out, weights = ours(Tensor(x), Tensor(y), Tensor(z), need_weights=weighted)
    want, shares = theirs(torch.tensor(x), torch.tensor(y), torch.tensor(z), need_weights=weighted)
    compare(out, want)
    assert weights is None or weights.shape == tuple(shares.shape) == (L, S)
    both = Tensor(inputs({})[0])
    tboth = torch.tensor(both.numpy())
    causal = np.triu(np.ones((L, L), bool), 1)
    out, _ = ours(both, both, both, attn_mask=Tensor(causal), need_weights=weighted, is_causal=True)
    flags = {"need_weights": weighted, "is_causal": True}
    want, _ = theirs(tboth, tboth, tboth, attn_mask=torch.tensor(causal), **flags)
    compare(out, want)


def test_dropout_acts_on_weights_in_training() -> None:
    ours = nn.MultiheadAttention(E, H, dropout=0.5)
    x = Tensor(inputs({})[0])
    plain, shares = ours(x, x, x)
    with Context(TRAINING=1):
        out, weights = ours(x, x, x, average_attn_weights=False)
        values = weights.numpy()
    assert shares is not None and 0.2 < (values == 0).mean() < 0.8
    assert not np.allclose(out.numpy(), plain.numpy())


LAYERS: list[dict[str, Any]] = [
    {"dropout": 0.0},
    {"dropout": 0.1, "norm_first": True, "activation": "gelu", "batch_first": True},
    {"dropout": 0.0, "bias": False, "layer_norm_eps": 1e-3},
]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", LAYERS, ids=str)
def test_encoder_layer(options: dict[str, Any], masked: bool) -> None:
    ours = nn.TransformerEncoderLayer(E, H, 16, **options)
    theirs = torch.nn.TransformerEncoderLayer(E, H, 16, **options).eval()
    same_weights(ours, theirs)
    values = inputs(options)[0]
    x, tx = Tensor(values, requires_grad=True), torch.tensor(values, requires_grad=True)
    causal = np.triu(np.ones((L, L), bool), 1)
    padding = np.zeros((N, L), bool)
    padding[1, 3:] = True
    named = {"src_mask": causal, "src_key_padding_mask": padding} if masked else {}
    out = ours(x, **{name: Tensor(m) for name, m in named.items()})
    want = theirs(tx, **{name: torch.tensor(m) for name, m in named.items()})
    (out * out).sum().backward()
    (want * want).sum().backward()
    compare(out, want)
    compare(x.grad, tx.grad)
    grads = {name: t.grad for name, t in get_state_dict(ours).items() if t.requires_grad}
    for name, p in theirs.named_parameters():
        compare(grads[name], p.grad)


def test_encoder() -> None:
    ours = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 16), 2, nn.LayerNorm(E))
    layer = torch.nn.TransformerEncoderLayer(E, H, 16)
    theirs = torch.nn.TransformerEncoder(layer, 2, torch.nn.LayerNorm(E), enable_nested_tensor=False).eval()
    same_weights(ours, theirs)
    values = inputs({})[0]
    call = TinyJit(lambda x: ours(x).realize())
    for _ in range(3):
        out = call(Tensor(values).realize())
    compare(out, theirs(torch.tensor(values)))
    assert ours.layers[0].linear1.weight is not ours.layers[1].linear1.weight


x3, x2 = Tensor.ones(L, N, E), Tensor.ones(L, E)
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: nn.MultiheadAttention(8, 3), "equal part"),
    (lambda: nn.MultiheadAttention(0, 1), "positive"),
    (lambda: nn.MultiheadAttention(8, 2, dropout=2), "from 0 to 1"),
    (lambda: nn.MultiheadAttention(8, 2)(x3, x3, x2), "the same for all"),
    (lambda: nn.MultiheadAttention(8, 2)(x3, x3, Tensor.ones(L, N, 4)), "must have size 8"),
    (lambda: nn.MultiheadAttention(8, 2)(x3, x3, "value"), "layers take tensors"),
    (lambda: nn.MultiheadAttention(8, 2)(x3, x3, x3, is_causal=True), "causal mask"),
    (lambda: nn.MultiheadAttention(8, 2)(x3, x3, x3, attn_mask=Tensor.ones(2, 2)), r"of shape \(5, 5\)"),
    (lambda: nn.MultiheadAttention(8, 2)(x3, x3, x3, key_padding_mask=Tensor([True])), r"of shape \(3, 5\)"),
    (lambda: nn.TransformerEncoderLayer(8, 2, activation="swoosh"), "no such activation"),
    (lambda: nn.TransformerEncoderLayer(8, 2)(3), "layers take tensors"),
    (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 0), "positive"),
]


@pytest.mark.parametrize(("call", "reason"), REFUSED)
def test_refused(call: Callable[[], Any], reason: str) -> None:
    with pytest.raises(WhitError, match=reason):
        call()
