"""Small random models of `transformers`, written as GGUF files in the way of llama.cpp's converter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

from whit.nn.gguf import write_gguf

Values = np.ndarray[Any, np.dtype[np.float32]]
DIM, HIDDEN, HEADS, KV, VOCAB, CONTEXT = 32, 48, 4, 2, 40, 64
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


class Case(NamedTuple):
    """A model class, the name of its architecture, its configuration beside COMMON, further metadata, and
    what becomes of its weights."""

    kind: str
    arch: str
    options: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    change: Callable[[str, Values, Any], Values] = lambda name, value, config: value
    drop: tuple[str, ...] = ()


def _swap(value: Values, heads: int) -> Values:
    """Halves of a head become neighbours."""
    rows = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
    return rows.swapaxes(1, 2).reshape(value.shape)


def neighbours(name: str, value: Values, config: Any) -> Values:
    if ".q_proj." in name:
        return _swap(value, config.num_attention_heads)
    return _swap(value, config.num_key_value_heads) if ".k_proj." in name else value


def one_more(name: str, value: Values, config: Any) -> Values:
    return value + 1 if "norm" in name and name.endswith("weight") else value


def transposed(name: str, value: Values, config: Any) -> Values:
    """GPT-2's matrices have columns first."""
    return value.T if ".c_" in name and value.ndim == 2 else value


def by_head(name: str, value: Values, config: Any) -> Values:
    """Queries, keys and values of each group of heads lie together: sort them."""
    if "query_key_value" not in name:
        return value
    groups = getattr(config, "num_kv_heads", config.num_attention_heads)
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        groups = 1
    share = config.num_attention_heads // groups
    parts = value.reshape(groups, share + 2, -1, *value.shape[1:])
    pieces = [parts[:, :share], parts[:, share : share + 1], parts[:, share + 1 :]]
    return np.concatenate([p.reshape(-1, *value.shape[1:]) for p in pieces])


def random_model(case: Case, seed: int = 0) -> Any:
    """A model in float32 whose every parameter is random."""
    made = getattr(transformers, case.kind).config_class(**{**COMMON, **case.options})
    made._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, case.kind)(made).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.1 if parameter.ndim == 1 else 1.5 / parameter.shape[-1] ** 0.5
            values = torch.randn_like(parameter) * scale
            is_one = "norm" in name and "weight" in name and case.change is not one_more
            parameter.copy_(values + 1 if is_one or (".ln_" in name and "weight" in name) else values)
    return model


def metadata(case: Case, config: Any) -> dict[str, Any]:
    """What the file says about the model."""
    rope = getattr(config, "rope_parameters", None) or {}
    heads = config.num_attention_heads
    out: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", None) or HIDDEN,
        "attention.head_count": heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None) or heads,
    }
    for key in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"):
        if getattr(config, key, None) is not None:
            kind = "rms_" if key == "rms_norm_eps" else ""
            out[f"attention.layer_norm_{kind}epsilon"] = float(getattr(config, key))
    if getattr(config, "head_dim", None):
        out["attention.key_length"] = out["attention.value_length"] = config.head_dim
    size = out.get("attention.key_length", config.hidden_size // heads)
    if "rope_theta" in rope:
        out["rope.freq_base"] = float(rope["rope_theta"])
    out["rope.dimension_count"] = int(size * rope.get("partial_rotary_factor", 1.0))
    named = {f"{case.arch}.{k}": v for k, v in {**out, **case.metadata}.items()}
    return {"general.architecture": case.arch, **named}


def convert(case: Case, path: Path, model: Any, extra: dict[str, Any] | None = None) -> None:
    """Write the model as a GGUF file."""
    config = model.config
    arch = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == case.arch)
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    tensors: dict[str, Any] = dict(extra or {})
    tied = config.tie_word_embeddings
    for name, value in model.state_dict().items():
        if any(part in name for part in case.drop) or (tied and name == "lm_head.weight"):
            continue
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, f"gguf knows no name for {name}"
        tensors[found] = np.ascontiguousarray(case.change(name, value.numpy().astype(np.float32), config))
    write_gguf(path, metadata(case, config), tensors)
