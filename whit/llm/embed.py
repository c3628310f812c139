"""Sentences to vectors: encoders of the BERT family (MiniLM, E5, BGE, …) from a folder as
sentence-transformers writes it (config.json, model.safetensors, tokenizer.json, modules.json).

    encoder = SentenceEncoder.load(folder)
    vectors = encoder.encode(["a cat", "a dog"])          # NumPy, float32, (2, 384)
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whit.engine.jit import TinyJit
from whit.helpers import ArgumentError, FileFormatError, round_up
from whit.nn.state import FileError, safe_load
from whit.tensor import Tensor
from whit.uop import dtypes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from tokenizers import Tokenizer

BATCH = 32  # texts that are computed together
_HIDE = -1e30  # added to scores of padding: exp gives 0


@dataclass(frozen=True)
class Config:
    """Sizes of an encoder."""

    layers: int
    width: int
    heads: int
    hidden: int
    vocab: int
    positions: int
    eps: float
    activation: str
    pooling: str  # "mean", "cls" or "max"
    normalize: bool
    max_tokens: int


class SentenceEncoder:
    """A BERT encoder with pooling. Safe to use from several threads; one computes at a time."""

    def __init__(self, config: Config, weights: Mapping[str, Tensor], tokenizer: Tokenizer) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.weights = {name: value.cast(dtypes.float32) for name, value in _named(config, weights).items()}
        Tensor.realize_all(list(self.weights.values()))
        self.padding = tokenizer.token_to_id("[PAD]") or 0
        self._lock = threading.Lock()
        self._steps: dict[tuple[int, int], Callable[[Tensor, Tensor], Tensor]] = {}

    @classmethod
    def load(cls, folder: str | Path) -> SentenceEncoder:
        """Read a folder. FileError if a file is missing, FileFormatError if it is not what it should be."""
        from tokenizers import Tokenizer

        path = Path(folder)
        config = _config(path)
        try:
            tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # the library raises Exception itself
            raise FileFormatError(
                f"read {path / 'tokenizer.json'}", because=str(error), fix="download the model again"
            ) from None
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return cls(config, safe_load(path / "model.safetensors"), tokenizer)

    @property
    def dimensions(self) -> int:
        """The length of a vector."""
        return self.config.width

    @property
    def max_tokens(self) -> int:
        """The most tokens of a text, the two that frame it included."""
        return self.config.max_tokens

    @property
    def vocab_size(self) -> int:
        return self.config.vocab

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of texts, framed by the model's special ones; not cut."""
        return [list(found.ids) for found in self.tokenizer.encode_batch(list(texts))]

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """The vector of each text; of long ones, that of what `max_tokens` holds.

        Shapes:  n texts -> (n, dimensions) float32
        Errors:  ArgumentError for what is no text
        """
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise ArgumentError(
                f"encode({repr(texts)[:60]})", because="it takes a list of texts", fix="pass [text]"
            )
        most = self.config.max_tokens
        rows = self.tokens(texts)
        # of a text that is cut, the special token at the end stays
        return self.encode_tokens([row if len(row) <= most else [*row[: most - 1], row[-1]] for row in rows])

    def encode_tokens(self, rows: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """The same from tokens. ArgumentError for a row that is empty or too long, and for what is
        no token."""
        import numpy as np

        for row in rows:
            if not 0 < len(row) <= self.config.max_tokens or not all(0 <= t < self.config.vocab for t in row):
                raise ArgumentError(
                    f"encode a text of {len(row)} tokens",
                    because=f"there are 1 to {self.config.max_tokens} of them, below {self.config.vocab}",
                    fix="cut the text into pieces",
                )
        result = np.empty((len(rows), self.config.width), np.float32)
        # texts of like length together: less padding
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        for start in range(0, len(order), BATCH):
            part = order[start : start + BATCH]
            result[part] = self._batch([rows[i] for i in part])
        return result

    def _batch(self, rows: list[Sequence[int]]) -> NDArray[np.float32]:
        """Rows of one batch, padded to sizes of which there are few, so that few are compiled."""
        import numpy as np

        width = min(_size(max(map(len, rows))), self.config.max_tokens)
        height = 1 << (len(rows) - 1).bit_length()
        tokens = np.full((height, width), self.padding, np.int32)
        mask = np.zeros((height, width), np.float32)
        mask[len(rows) :, 0] = 1.0  # rows that nobody wants have one token, since a mean of none is NaN
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = row
            mask[i, : len(row)] = 1.0
        with self._lock:
            step = self._steps.setdefault((height, width), TinyJit(self.forward))
            values: NDArray[np.float32] = step(Tensor(tokens).realize(), Tensor(mask).realize()).numpy()
        return values[: len(rows)]

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Vectors of padded rows.

        Shapes:  tokens (B, T) int32, mask (B, T) float32 (1: a token, 0: padding) -> (B, width) float32
        """
        w, config = self.weights, self.config
        length = tokens.shape[1]
        x = w["word"][tokens] + w["position"][:length] + w["kind"][0]
        x = _norm(x, w, "norm", config.eps)
        hidden = ((1 - mask) * _HIDE).reshape(tokens.shape[0], 1, 1, length)
        for number in range(config.layers):
            x = self._layer(x, hidden, f"{number}.")
        return self._pooled(x, mask).realize()

    def _layer(self, x: Tensor, hidden: Tensor, name: str) -> Tensor:
        w, config = self.weights, self.config
        rows, length = x.shape[0], x.shape[1]
        size = config.width // config.heads

        def heads(kind: str) -> Tensor:
            y = x.linear(w[name + kind + ".weight"].T, w[name + kind + ".bias"])
            return y.reshape(rows, length, config.heads, size).transpose(1, 2)  # (B, H, T, D)

        scores = heads("query") @ heads("key").transpose(2, 3) * (1 / math.sqrt(size)) + hidden
        mixed = (scores.softmax(-1) @ heads("value")).transpose(1, 2).reshape(rows, length, config.width)
        x = _norm(
            x + mixed.linear(w[name + "out.weight"].T, w[name + "out.bias"]), w, name + "norm1", config.eps
        )
        inner = x.linear(w[name + "up.weight"].T, w[name + "up.bias"])
        inner = _ACTIVATIONS[config.activation](inner)
        return _norm(
            x + inner.linear(w[name + "down.weight"].T, w[name + "down.bias"]), w, name + "norm2", config.eps
        )

    def _pooled(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.config.pooling == "cls":
            pooled = x[:, 0]
        elif self.config.pooling == "max":
            pooled = (x + ((1 - mask) * _HIDE).unsqueeze(2)).max(1)
        else:
            pooled = (x * mask.unsqueeze(2)).sum(1) / mask.sum(1, keepdim=True)
        if self.config.normalize:
            pooled = pooled / pooled.square().sum(1, keepdim=True).sqrt().maximum(1e-12)
        return pooled


def _size(length: int) -> int:
    """The next of 8, 16, 24, 32, 48, 64, 96, 128, …"""
    if length <= 32:
        return round_up(max(length, 8), 8)
    step = 1 << ((length - 1).bit_length() - 2)
    return round_up(length, step)


def _norm(x: Tensor, w: Mapping[str, Tensor], name: str, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    return centred * scale * w[name + ".weight"] + w[name + ".bias"]


def _exact_gelu(x: Tensor) -> Tensor:
    """x times the normal distribution's share below x."""
    return x * 0.5 * (1 + (x * (1 / math.sqrt(2))).erf())


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _exact_gelu,
    "gelu_new": lambda x: x.gelu(),
    "gelu_pytorch_tanh": lambda x: x.gelu(),
    "relu": lambda x: x.relu(),
    "silu": lambda x: x.silu(),
}

# ---- files -------------------------------------------------------------------------------------------------


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileError(
            f"read {path}", because="there is no such file", fix="name a model's folder"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise FileFormatError(f"read {path}", because=str(error), fix="download the model again") from None


def _config(folder: Path) -> Config:
    """The sizes that the JSON files of a folder tell."""
    given = _read_json(folder / "config.json")
    kind = given.get("model_type") if isinstance(given, dict) else None
    if kind != "bert":
        raise FileFormatError(
            f"read {folder / 'config.json'}",
            because=f"its model_type is {kind!r}",
            fix="use a sentence encoder with model_type 'bert'",
        )
    modules = _optional(folder / "modules.json", [])
    pooling = _optional(folder / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    limit = _optional(folder / "sentence_bert_config.json", {}).get("max_seq_length")
    try:
        kinds = [module["type"].rpartition(".")[2] for module in modules]
        positions = int(given["max_position_embeddings"])
        return Config(
            layers=int(given["num_hidden_layers"]),
            width=int(given["hidden_size"]),
            heads=int(given["num_attention_heads"]),
            hidden=int(given["intermediate_size"]),
            vocab=int(given["vocab_size"]),
            positions=positions,
            eps=float(given["layer_norm_eps"]),
            activation=_known(folder, given["hidden_act"]),
            pooling=_pooling(folder, pooling),
            normalize="Normalize" in kinds,
            max_tokens=min(int(limit or positions), positions),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FileFormatError(
            f"read {folder / 'config.json'}",
            because=f"missing or wrong: {error}",
            fix="download the model again",
        ) from None


def _optional(path: Path, default: Any) -> Any:
    return _read_json(path) if path.exists() else default


def _known(folder: Path, activation: str) -> str:
    if activation not in _ACTIVATIONS:
        raise FileFormatError(
            f"read {folder / 'config.json'}",
            because=f"hidden_act {activation!r} is unknown",
            fix="use a model with one of " + ", ".join(_ACTIVATIONS),
        )
    return activation


def _pooling(folder: Path, given: Mapping[str, Any]) -> str:
    modes = {
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_cls_token": "cls",
        "pooling_mode_max_tokens": "max",
    }
    wanted = [key for key, value in given.items() if key.startswith("pooling_mode_") and value is True]
    if len(wanted) != 1 or wanted[0] not in modes:
        raise FileFormatError(
            f"read {folder / '1_Pooling'}",
            because=f"the pooling {wanted} is unknown",
            fix="use a model that pools by mean, maximum or the first token",
        )
    return modes[wanted[0]]


_OUTER = {
    "word": "embeddings.word_embeddings.weight",
    "position": "embeddings.position_embeddings.weight",
    "kind": "embeddings.token_type_embeddings.weight",
    "norm.weight": "embeddings.LayerNorm.weight",
    "norm.bias": "embeddings.LayerNorm.bias",
}
_INNER = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "out": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm2": "output.LayerNorm",
}


def _named(config: Config, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights by our names, each of the shape that it must have. FileFormatError."""
    prefix = "bert." if any(name.startswith("bert.") for name in weights) else ""
    names = dict(_OUTER)
    for number in range(config.layers):
        for ours, theirs in _INNER.items():
            for part in ("weight", "bias"):
                names[f"{number}.{ours}.{part}"] = f"encoder.layer.{number}.{theirs}.{part}"
    result: dict[str, Tensor] = {}
    for ours, theirs in names.items():
        found = weights.get(prefix + theirs)
        if found is None or found.shape != _shape(config, ours):
            what = "missing" if found is None else f"of shape {found.shape}"
            raise FileFormatError(
                f"a sentence encoder with the tensor {prefix + theirs}",
                because=f"it is {what}, and config.json asks for {_shape(config, ours)}",
                fix="download the model again",
            )
        result[ours] = found
    return result


def _shape(config: Config, name: str) -> tuple[int, ...]:
    width, hidden = config.width, config.hidden
    first = {"word": config.vocab, "position": config.positions, "kind": 2}
    if name in first:
        return (first[name], width)
    kind, part = name.split(".")[-2:]
    rows, columns = {"up": (hidden, width), "down": (width, hidden)}.get(kind, (width, width))
    return (rows, columns) if part == "weight" and "norm" not in kind else (rows,)
