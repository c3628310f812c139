"""Blocks of weights: what they decode to is what the `gguf` package's NumPy code says, bit for bit; for the
types that it does not decode, what their definition says, written out in NumPy here."""

from __future__ import annotations

from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf.quants import dequantize

from whit import Tensor, TinyJit
from whit.helpers import ArgumentError, DTypeError, ShapeError
from whit.nn.blocks import BLOCK_TYPES, BlockType, block_type, decode
from whit.uop import dtypes

Array = np.ndarray[Any, Any]
PACKED = [kind for kind in BLOCK_TYPES.values() if kind.dtype is None]
# where halves stand in a block, so that tests can give them special values
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q8_1": [0], "Q1_0": [0],
    "Q2_0": [0], "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
    "IQ2_XXS": [0], "IQ2_XS": [0], "IQ2_S": [0],
    "IQ3_XXS": [0], "IQ3_S": [0], "IQ1_S": [0], "IQ4_NL": [0], "IQ4_XS": [0], "TQ1_0": [52],
    "TQ2_0": [64],
}  # fmt: skip
SPECIAL = [0x0000, 0x8000, 0x0001, 0x83FF, 0x7C00, 0xFC00, 0x7E01, 0x7BFF, 0x3C00, 0xFBFF]


def by_definition(raw: Array, kind: BlockType) -> Array:
    """Values of types that `gguf` has no NumPy code for."""
    blocks = raw.reshape(-1, kind.nbytes)
    half = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if kind.name == "Q1_0":
        bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little")
        values = np.where(bits == 1, half, -half)
    elif kind.name == "Q2_0":
        q = (blocks[:, 2:, None] >> np.array([0, 2, 4, 6], np.uint8)) & 3
        values = (q.reshape(-1, 64).astype(np.float32) - 1) * half
    elif kind.name == "Q8_1":
        values = blocks[:, 4:].copy().view(np.int8).astype(np.float32) * half
    else:
        assert kind.name == "Q8_K"
        scale = blocks[:, :4].copy().view(np.float32)
        values = blocks[:, 4:260].copy().view(np.int8).astype(np.float32) * scale
    return values.reshape(*raw.shape[:-1], -1)


def reference(raw: Array, kind: BlockType) -> Array:
    with np.errstate(all="ignore"):
        if kind.name in ("Q1_0", "Q2_0", "Q8_1", "Q8_K"):
            return by_definition(raw, kind)
        return dequantize(raw, gguf.GGMLQuantizationType(kind.id))


def random_blocks(kind: BlockType, rows: int, blocks: int, seed: int = 0, tame: bool = False) -> Array:
    """Random bytes; tame: with scales near 0.01, so that nothing overflows."""
    raw = np.random.default_rng(seed).integers(0, 256, (rows, blocks, kind.nbytes), np.uint8)
    if tame:
        for at in HALVES.get(kind.name, []):
            raw[..., at + 1] = 0x20 + (raw[..., at + 1] & 3)
        if kind.name == "MXFP4":
            raw[..., 0] = 120 + (raw[..., 0] & 7)
        if kind.name == "Q8_K":
            raw[..., :4] = np.frombuffer(np.float32(0.01).tobytes(), np.uint8)
        if kind.name == "IQ1_M":  # the upper nibbles of four words are a half
            raw[..., [49, 51, 53]] &= 0x0F
            raw[..., 55] = 0x20 | (raw[..., 55] & 0x0F)
    return raw.reshape(rows, -1)


def assert_same_bits(got: Array, want: Array) -> None:
    assert got.dtype == np.float32 and got.shape == want.shape
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got.view(np.uint32)[~nan], want.astype(np.float32).view(np.uint32)[~nan])


def test_sizes_are_those_of_the_package() -> None:
    for kind in gguf.GGMLQuantizationType:
        if kind.name != "Q8_1":  # the package has an old layout of 40 bytes; files cannot contain it
            ours = BLOCK_TYPES[kind.value]
            assert (ours.name, ours.elements, ours.nbytes) == (kind.name, *gguf.GGML_QUANT_SIZES[kind])
    assert {kind.name for kind in BLOCK_TYPES.values()} - set(gguf.GGMLQuantizationType.__members__) == {
        "Q2_0"
    }


@pytest.mark.parametrize("kind", PACKED, ids=lambda kind: kind.name)
def test_random_bytes_decode_bit_for_bit(kind: BlockType) -> None:
    raw = random_blocks(kind, 6, 5)
    assert_same_bits(decode(Tensor(raw), kind).numpy(), reference(raw, kind))


@pytest.mark.parametrize("kind", [k for k in PACKED if k.name in HALVES], ids=lambda kind: kind.name)
def test_special_scales(kind: BlockType) -> None:
    """Zeros, denormals, infinities and NaN in the place of scales and minima."""
    raw = random_blocks(kind, 1, 2 * len(SPECIAL), 1).reshape(-1, kind.nbytes)
    for at in HALVES[kind.name]:
        bits = (
            np.array(SPECIAL + SPECIAL[3:] + SPECIAL[:3], np.uint16)
            if at
            else np.array(SPECIAL * 2, np.uint16)
        )
        raw[:, at : at + 2] = bits.view(np.uint8).reshape(-1, 2)
    raw = raw.reshape(1, -1)
    assert_same_bits(decode(Tensor(raw), kind).numpy(), reference(raw, kind))


@pytest.mark.parametrize("name", ["MXFP4", "NVFP4"])
def test_every_scale_of_eight_bits(name: str) -> None:
    kind = block_type(name)
    raw = random_blocks(kind, 256, 1, 2)
    raw[:, : 1 if name == "MXFP4" else 4] = np.arange(256, dtype=np.uint8)[:, None]
    assert_same_bits(decode(Tensor(raw), kind).numpy(), reference(raw, kind))


@pytest.mark.parametrize("kind", PACKED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("columns", [1, 3])
def test_product_from_blocks_is_that_of_the_decoded_matrix(kind: BlockType, columns: int) -> None:
    """The fused kernel against exact sums, within float32's rounding of the terms."""
    rows, blocks = 37, -(-1024 // kind.elements)
    raw = random_blocks(kind, rows, blocks, 3, tame=True)
    x = np.random.default_rng(4).standard_normal((columns, blocks * kind.elements)).astype(np.float32)
    weights = reference(raw, kind).astype(np.float64)
    matrix, multiply = Tensor(raw).realize(), TinyJit(lambda m, v: v.linear(decode(m, kind).T).realize())
    for _ in range(3):
        got = multiply(matrix, Tensor(x).realize()).numpy()
    # scales and minima are multiplied out: terms are as large as d * q and m by themselves
    size = np.abs(x.astype(np.float64)) @ (np.abs(weights) + np.abs(weights).max(1, keepdims=True)).T
    assert (np.abs(got - x.astype(np.float64) @ weights.T) <= 1e-6 * size).all()


def test_plain_numbers_keep_their_types() -> None:
    numbers = np.array([1.5, -2.0, 0.0, 7.0])
    for name, array in [
        ("F32", numbers.astype(np.float32)),
        ("F16", numbers.astype(np.float16)), ("F64", numbers),
        ("BF16", numbers.astype(ml_dtypes.bfloat16)), ("I8", numbers.astype(np.int8)),
        ("I16", numbers.astype(np.int16)), ("I32", numbers.astype(np.int32)),
        ("I64", numbers.astype(np.int64)),
    ]:  # fmt: skip
        raw = np.frombuffer(array.tobytes(), np.uint8)
        values = decode(Tensor(raw), block_type(name))
        assert values.dtype is block_type(name).dtype
        assert values.tolist() == array.astype(np.float64).tolist()


def test_errors() -> None:
    kind = block_type("Q4_0")
    with pytest.raises(DTypeError, match=r"decode Q4_0 from int8: blocks are bytes. To fix"):
        decode(Tensor.zeros(18, dtype=dtypes.int8), kind)
    with pytest.raises(ShapeError, match=r"decode Q4_0 from bytes of shape \(19,\): a block has 18 bytes"):
        decode(Tensor.zeros(19, dtype=dtypes.uint8), kind)
    with pytest.raises(ArgumentError, match=r"block type 'Q7_X': there is no such type. To fix: one of F32"):
        block_type("Q7_X")
