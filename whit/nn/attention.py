"""Attention with several heads, and the encoder layers of Vaswani et al. (2017), as PyTorch's."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

from whit.helpers import ArgumentError, ShapeError
from whit.nn.containers import ModuleList
from whit.nn.init import xavier_normal_, xavier_uniform_
from whit.nn.layers import Dropout, LayerNorm, Linear, _is_tensor, _positive, filled, parameter, uniform
from whit.tensor import Tensor
from whit.tensor.guard import guard, show_argument
from whit.uop import dtypes
from whit.uop.uop import show_shape

Activation = Callable[[Tensor], Tensor]


class MultiheadAttention:
    """Heads that each attend with their own projections of query, key and value; their results, side by side,
    are projected once more.

    Shapes: query (l, n, embed_dim), key (s, n, kdim), value (s, n, vdim), with `batch_first` (n, l, …), or
    without n for one example -> (like query, weights). Weights are (n, l, s), the mean over heads, or with
    average_attn_weights=False (n, heads, l, s); None unless `need_weights`: then no matrix of scores is
    made. in_proj_weight (3 embed_dim, embed_dim), or q_, k_ and v_proj_weight where kdim or vdim differ;
    out_proj.

    bias, add_bias_kv (a learned key and value behind the others), add_zero_attn (a key and value of zeros
    there). Dropout acts on the weights, in training. Masks are bool, True for what is *not* seen, or floats
    that are added: key_padding_mask (n, s), attn_mask (l, s) or (n * heads, l, s). is_causal: a hint that
    attn_mask is the causal one, which must be given too. Errors: ArgumentError, ShapeError.

    >>> attention = MultiheadAttention(8, 2, batch_first=True)
    >>> x = Tensor.ones(3, 5, 8)
    >>> out, weights = attention(x, x, x)
    >>> out.shape, weights.shape
    ((3, 5, 8), (3, 5, 5))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
    ) -> None:
        _positive("MultiheadAttention", embed_dim=embed_dim, num_heads=num_heads)
        if embed_dim % num_heads:
            raise ArgumentError(
                f"MultiheadAttention({embed_dim}, {num_heads})",
                because="each head takes an equal part of embed_dim",
                fix="choose a number of heads that divides it",
            )
        self.embed_dim, self.num_heads, self.batch_first = embed_dim, num_heads, batch_first
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        self.add_zero_attn, self.dropout = add_zero_attn, Dropout(dropout)
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        self.in_proj_weight: Tensor | None = None
        self.q_proj_weight: Tensor | None = None
        self.k_proj_weight: Tensor | None = None
        self.v_proj_weight: Tensor | None = None
        if (self.kdim, self.vdim) == (embed_dim, embed_dim):
            self.in_proj_weight = xavier_uniform_(uniform(3 * embed_dim, embed_dim, bound=1.0))
        else:
            for name, size in zip(names, (embed_dim, self.kdim, self.vdim), strict=True):
                setattr(self, name, xavier_uniform_(uniform(embed_dim, size, bound=1.0)))
        self.in_proj_bias = parameter(filled((3 * embed_dim,), 0.0)) if bias else None
        self.out_proj = Linear(embed_dim, embed_dim, bias=bias)
        if self.out_proj.bias is not None:
            self.out_proj.bias = parameter(filled((embed_dim,), 0.0))
        made = [
            xavier_normal_(uniform(1, 1, embed_dim, bound=1.0)) if add_bias_kv else None for _ in range(2)
        ]
        self.bias_k, self.bias_v = made

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        inputs = [self._batched(*item) for item in self._named(query, key, value)]
        if is_causal and attn_mask is None:
            raise ArgumentError(
                "MultiheadAttention with is_causal and without attn_mask",
                because="is_causal is a hint about the mask",
                fix="pass the causal mask, True above the diagonal",
            )
        if key_padding_mask is not None and query.ndim == 2:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        q, k, v = (self._heads(x) for x in self._projected(*inputs))
        count, length, present = q.shape[0], q.shape[2], k.shape[2]
        mask = self._mask(attn_mask, key_padding_mask, (count, length, present))
        k, v, added = self._extended(k, v)
        if mask is not None and added:
            mask = mask.pad(((0, 0), (0, 0), (0, 0), (0, added)), value=True if mask.dtype.is_bool else 0.0)
        weights: Tensor | None = None
        if need_weights:
            mixed, weights = self._weighted(q, k, v, mask)
        else:
            mixed = q.scaled_dot_product_attention(k, v, mask, self.dropout.p)
        out = self.out_proj(mixed.transpose(1, 2).reshape(count, length, self.embed_dim))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if query.ndim == 2:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return (out if self.batch_first else out.transpose(0, 1)), weights

    # ---- inputs

    def _named(self, query: Tensor, key: Tensor, value: Tensor) -> list[tuple[str, Tensor, int]]:
        named = [("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim)]
        for name, x, size in named:
            _is_tensor(f"MultiheadAttention with {name}", x)
            if x.ndim not in (2, 3) or x.ndim != query.ndim or x.shape[-1] != size:
                raise ShapeError(
                    f"MultiheadAttention with {name} of shape {show_shape(x.shape)}",
                    because=f"its last axis must have size {size}, after one axis or two, the same for all",
                    fix="see the shapes in help(MultiheadAttention)",
                )
        return named

    def _batched(self, name: str, x: Tensor, size: int) -> Tensor:
        """(n, length, size)."""
        if x.ndim == 2:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        dim, weight = self.embed_dim, self.in_proj_weight
        if weight is not None:
            parts: list[Any] = [weight[i * dim : (i + 1) * dim] for i in range(3)]
        else:
            parts = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
        bias = self.in_proj_bias
        if weight is not None and query is key and key is value:  # one product for all three
            whole = query.linear(weight.transpose(0, 1), bias)
            return [whole[..., i * dim : (i + 1) * dim] for i in range(3)]
        biases = [None if bias is None else bias[i * dim : (i + 1) * dim] for i in range(3)]
        inputs = zip((query, key, value), parts, biases, strict=True)
        return [x.linear(w.transpose(0, 1), b) for x, w, b in inputs]

    def _heads(self, x: Tensor) -> Tensor:
        """(n, length, embed_dim) -> (n, heads, length, dim)."""
        size = self.embed_dim // self.num_heads
        return x.reshape(x.shape[0], x.shape[1], self.num_heads, size).transpose(1, 2)

    def _extended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
        """Keys and values with those that are learned or zero behind them, and how many these are."""
        added = 0
        if self.bias_k is not None and self.bias_v is not None:
            more = [self._heads(b.expand(k.shape[0], 1, self.embed_dim)) for b in (self.bias_k, self.bias_v)]
            k, v, added = k.cat(more[0], dim=2), v.cat(more[1], dim=2), 1
        if self.add_zero_attn:
            k, v = [x.pad(((0, 0), (0, 0), (0, 1), (0, 0))) for x in (k, v)]
            added += 1
        return k, v, added

    def _mask(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, sizes: tuple[Any, ...]
    ) -> Tensor | None:
        """Both masks as one of (n or 1, heads or 1, l, s): bool, True for what is seen, or added."""
        count, length, present = sizes
        parts: list[Tensor] = []
        if attn_mask is not None:
            _is_tensor("MultiheadAttention with attn_mask", attn_mask)
            shapes = {(length, present): (1, 1), (count * self.num_heads, length, present): (count, -1)}
            self._has_shape("attn_mask", attn_mask, list(shapes))
            lead = shapes[tuple(attn_mask.shape)]
            parts.append(attn_mask.reshape(*lead, length, present))
        if key_padding_mask is not None:
            _is_tensor("MultiheadAttention with key_padding_mask", key_padding_mask)
            self._has_shape("key_padding_mask", key_padding_mask, [(count, present)])
            parts.append(key_padding_mask.reshape(count, 1, 1, present))
        if not parts:
            return None
        if all(part.dtype.is_bool for part in parts):
            hidden = parts[0]
            for part in parts[1:]:
                hidden = hidden | part
            return hidden.logical_not()
        total: Tensor | None = None
        for part in parts:
            if part.dtype.is_bool:
                part = part.where(Tensor(-math.inf, dtype=dtypes.float32, device=part.device), 0.0)
            total = part if total is None else total + part
        return total

    def _has_shape(self, name: str, mask: Tensor, shapes: list[Any]) -> None:
        if tuple(mask.shape) not in shapes or not (mask.dtype.is_bool or mask.dtype.is_float):
            raise ShapeError(
                f"MultiheadAttention with {name} {show_argument(mask)}",
                because=f"it must be bool or float, of shape {' or '.join(map(show_shape, shapes))}",
                fix="see help(MultiheadAttention)",
            )

    def _weighted(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Results of all heads, and their weights (n, heads, l, s)."""
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.embed_dim // self.num_heads)
        if mask is not None:
            scores = mask.where(scores, -math.inf) if mask.dtype.is_bool else scores + mask
        weights = self.dropout(scores.softmax(-1))
        return weights @ v, weights


ACTIVATIONS: dict[str, Activation] = {"relu": Tensor.relu, "gelu": lambda x: x.gelu(approximate="none")}


class TransformerEncoderLayer:
    """Self-attention and a network of two layers, each with its input added, and a layer norm behind or, with
    `norm_first`, in front of it (Vaswani et al. 2017).

    Shapes: src (length, n, d_model), with `batch_first` (n, length, d_model), or without n -> the same.
    activation: "relu", "gelu" or a function. Masks and is_causal as of `MultiheadAttention`.

    >>> TransformerEncoderLayer(8, 2, dim_feedforward=16)(Tensor.ones(5, 3, 8)).shape
    (5, 3, 8)
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Activation = "relu",
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
    ) -> None:
        if not callable(activation) and activation not in ACTIVATIONS:
            raise ArgumentError(
                f"TransformerEncoderLayer(activation={activation!r})",
                because="there is no such activation",
                fix=f"use {' or '.join(ACTIVATIONS)}, or a function",
            )
        self.self_attn = MultiheadAttention(d_model, nhead, dropout, bias=bias, batch_first=batch_first)
        self.linear1 = Linear(d_model, dim_feedforward, bias=bias)
        self.linear2 = Linear(dim_feedforward, d_model, bias=bias)
        self.norm1 = LayerNorm(d_model, layer_norm_eps, bias=bias)
        self.norm2 = LayerNorm(d_model, layer_norm_eps, bias=bias)
        self.dropout, self.norm_first = Dropout(dropout), norm_first
        self.activation = activation if callable(activation) else ACTIVATIONS[activation]

    def __call__(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        def attended(x: Tensor) -> Tensor:
            out, _ = self.self_attn(
                x, x, x, src_key_padding_mask, need_weights=False, attn_mask=src_mask, is_causal=is_causal
            )
            return self.dropout(out)

        def fed(x: Tensor) -> Tensor:
            return self.dropout(self.linear2(self.dropout(self.activation(self.linear1(x)))))

        if self.norm_first:
            src = src + attended(self.norm1(src))
            return src + fed(self.norm2(src))
        src = self.norm1(src + attended(src))
        return self.norm2(src + fed(src))


class TransformerEncoder:
    """`num_layers` copies of a layer, one after another, then `norm` if given.

    Shapes and masks as of `TransformerEncoderLayer`.

    >>> TransformerEncoder(TransformerEncoderLayer(8, 2, 16), num_layers=2)(Tensor.ones(5, 3, 8)).shape
    (5, 3, 8)
    """

    def __init__(
        self, encoder_layer: TransformerEncoderLayer, num_layers: int, norm: Activation | None = None
    ) -> None:
        _positive("TransformerEncoder", num_layers=num_layers)
        self.layers = ModuleList([copy.deepcopy(encoder_layer) for _ in range(num_layers)])
        self.norm = norm

    def __call__(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        for layer in self.layers:
            src = layer(src, mask, src_key_padding_mask, is_causal)
        return src if self.norm is None else self.norm(src)


for _class in (MultiheadAttention, TransformerEncoderLayer, TransformerEncoder):
    guard(_class, ["__init__", "__call__"])
