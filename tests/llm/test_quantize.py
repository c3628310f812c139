"""`whit quantize`: what it writes, read by the reference package."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from whit.helpers import ArgumentError
from whit.llm.quantize import FILE_TYPES, quantize
from whit.nn.gguf import open_gguf, write_gguf

SHAPES = {
    "token_embd.weight": (40, 256), "blk.0.attn_q.weight": (64, 256), "blk.0.attn_v.weight": (32, 256),
    "blk.0.ffn_down.weight": (16, 512), "blk.0.narrow.weight": (8, 96), "blk.0.odd.weight": (8, 20),
    "blk.0.attn_norm.weight": (256,), "blk.0.attn_q.bias": (64,),
}  # fmt: skip


def model(path: Path, dtype: type = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    types = {name: np.float32 if len(shape) == 1 else dtype for name, shape in SHAPES.items()}
    arrays = {name: rng.standard_normal(shape).astype(types[name]) for name, shape in SHAPES.items()}
    write_gguf(path, {"general.architecture": "llama", "general.file_type": 0, "texts": ["a", "b"]}, arrays)
    return arrays


@pytest.mark.parametrize("name", FILE_TYPES)
def test_every_file_type(tmp_path: Path, name: str) -> None:
    arrays = model(tmp_path / "a.gguf", np.float16)
    before, after = quantize(tmp_path / "a.gguf", tmp_path / "b.gguf", name.lower())
    assert before == (tmp_path / "a.gguf").stat().st_size and after == (tmp_path / "b.gguf").stat().st_size
    reader = gguf.GGUFReader(tmp_path / "b.gguf")
    assert reader.get_field("general.file_type").contents() == FILE_TYPES[name][2]
    assert reader.get_field("texts").contents() == ["a", "b"]
    found = {t.name: t for t in reader.tensors}
    assert list(found) == list(SHAPES)
    assert found["blk.0.attn_q.weight"].tensor_type.name == FILE_TYPES[name][0]
    assert found["blk.0.attn_v.weight"].tensor_type.name == FILE_TYPES[name][1]
    for exact in ("blk.0.attn_norm.weight", "blk.0.attn_q.bias"):
        assert found[exact].tensor_type.name == "F32"
        np.testing.assert_array_equal(found[exact].data, arrays[exact])
    assert found["blk.0.odd.weight"].tensor_type.name in ("F32", "F16", "BF16")
    assert found["blk.0.narrow.weight"].tensor_type.name[:2] in ("F3", "F1", "BF", "Q4", "Q5", "Q8", "MX")
    for tensor in found.values():
        values = dequantize(tensor.data, tensor.tensor_type).reshape(SHAPES[tensor.name])
        error = np.sqrt(((values - arrays[tensor.name].astype(np.float32)) ** 2).mean())
        assert error < 0.35, (tensor.name, error)


def test_blocks_are_encoded_again_and_equal_types_are_copied(tmp_path: Path) -> None:
    model(tmp_path / "a.gguf")
    quantize(tmp_path / "a.gguf", tmp_path / "b.gguf", "Q8_0")
    quantize(tmp_path / "b.gguf", tmp_path / "c.gguf", "Q8_0")
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "c.gguf").read_bytes()
    seen: list[str] = []
    quantize(tmp_path / "b.gguf", tmp_path / "d.gguf", "Q4_K", progress=lambda name, *_: seen.append(name))
    assert seen == list(SHAPES)
    assert open_gguf(tmp_path / "d.gguf").tensors["blk.0.attn_q.weight"].type.name == "Q4_K"


def test_errors(tmp_path: Path) -> None:
    model(tmp_path / "a.gguf")
    with pytest.raises(ArgumentError, match=r"quantize to 'Q9': there is no such type. To fix: one of F32"):
        quantize(tmp_path / "a.gguf", tmp_path / "b.gguf", "Q9")
    with pytest.raises(ArgumentError, match="to itself"):
        quantize(tmp_path / "a.gguf", tmp_path / "a.gguf", "Q8_0")
    assert not (tmp_path / "b.gguf").exists()
