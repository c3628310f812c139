"""A smaller GGUF file: the matrices of a model in blocks, all else as it was."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from whit.helpers import ArgumentError
from whit.nn.block_encoding import encode
from whit.nn.blocks import BlockType, block_type
from whit.nn.gguf import GGUF, Encoded, GGUFTensor, Value, open_gguf, write_gguf

# names of whole files -> type of most matrices, of those that matter more, number in `general.file_type`
FILE_TYPES: dict[str, tuple[str, str, int]] = {
    "F32": ("F32", "F32", 0), "F16": ("F16", "F16", 1), "BF16": ("BF16", "BF16", 32),
    "Q4_0": ("Q4_0", "Q4_0", 2), "Q4_1": ("Q4_1", "Q4_1", 3), "Q8_0": ("Q8_0", "Q8_0", 7),
    "Q5_0": ("Q5_0", "Q5_0", 8), "Q5_1": ("Q5_1", "Q5_1", 9), "MXFP4": ("MXFP4", "Q8_0", 38),
    "Q2_K": ("Q2_K", "Q4_K", 10), "Q3_K_S": ("Q3_K", "Q3_K", 11), "Q3_K_M": ("Q3_K", "Q5_K", 12),
    "Q4_K_S": ("Q4_K", "Q4_K", 14), "Q4_K_M": ("Q4_K", "Q6_K", 15), "Q5_K_S": ("Q5_K", "Q5_K", 16),
    "Q5_K_M": ("Q5_K", "Q6_K", 17), "Q6_K": ("Q6_K", "Q6_K", 18),
}  # fmt: skip
_SHORT = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
# where rows are no whole blocks of 256
_SMALLER = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_OFTEN = ("token_embd.weight", "output.weight")  # read for every token: six bits at least
_MATTER = ("attn_v.weight", "attn_qkv.weight", "ffn_down.weight")


def quantize(
    source: str | Path,
    target: str | Path,
    type: str,
    *,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[int, int]:
    """Write the model of one GGUF file (or of all its parts) with its matrices in blocks of `type`; the bytes
    before and after.

    type: a name of FILE_TYPES ("Q4_K" is short for "Q4_K_M"); its mixtures keep the tensors that matter most
    in more bits. Vectors, and matrices whose rows are no whole blocks of 32, become F32. Weights in blocks
    are decoded first. progress: called with a tensor's name, its place and the number of tensors, before it
    is encoded.
    Errors: ArgumentError for unknown types and when source and target are one file; FileError,
    FileFormatError.
    """
    name = str(type).upper()
    name = _SHORT.get(name, name)
    if name not in FILE_TYPES:
        raise ArgumentError(
            f"quantize to {type!r}", because="there is no such type", fix="one of " + ", ".join(FILE_TYPES)
        )
    gguf = open_gguf(source)
    if any(os.path.exists(target) and os.path.samefile(path, target) for path in gguf.paths):
        raise ArgumentError(
            f"quantize {source} to itself",
            because="it is read while the target is written",
            fix="name another file",
        )
    tensors: dict[str, Encoded] = {}
    for place, tensor in enumerate(gguf.tensors.values()):
        kind = _kind(tensor, name)
        tensors[tensor.name] = Encoded(
            kind, tensor.shape, partial(_bytes, gguf, tensor, kind, place, progress)
        )
    metadata: dict[str, Any] = {k: v for k, v in gguf.values.items() if not k.startswith("split.")}
    metadata["general.file_type"] = Value("u32", FILE_TYPES[name][2])
    metadata["general.quantization_version"] = Value("u32", 2)
    write_gguf(target, metadata, tensors)
    return sum([os.path.getsize(path) for path in gguf.paths]), os.path.getsize(target)


def _kind(tensor: GGUFTensor, name: str) -> BlockType:
    """The type of a tensor in a file of this kind."""
    if tensor.type.dtype is not None and not tensor.type.dtype.is_float:
        return tensor.type
    if len(tensor.shape) < 2 or not tensor.name.endswith(".weight") or "_norm" in tensor.name:
        return block_type("F32")
    most, more, _ = FILE_TYPES[name]
    kind = block_type(more if tensor.name.endswith(_MATTER) else most)
    if tensor.name in _OFTEN and kind.dtype is None and kind.bits < block_type("Q6_K").bits:
        kind = block_type("Q6_K")
    if "ffn_gate_inp" in tensor.name:  # which expert a token goes to: small, and it matters
        kind = block_type("F32")
    for smaller in (_SMALLER.get(kind.name, "F32"), "F32"):
        if tensor.shape[-1] % kind.elements:
            kind = block_type(smaller)
    return kind


def _bytes(
    gguf: GGUF,
    tensor: GGUFTensor,
    kind: BlockType,
    place: int,
    progress: Callable[[str, int, int], None] | None,
) -> Any:
    if progress is not None:
        progress(tensor.name, place, len(gguf.tensors))
    if kind is tensor.type:
        return gguf.data(tensor.name)
    return encode(gguf.load(tensor.name).cast("float32").numpy(), kind)
