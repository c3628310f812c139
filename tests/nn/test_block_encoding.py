"""Encoding: the bytes of the `gguf` package where it encodes, and small errors (measured with its decoder)
elsewhere."""

from __future__ import annotations

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf.quants import dequantize, quantize

from whit import Tensor
from whit.helpers import ArgumentError, ShapeError
from whit.nn.block_encoding import encode
from whit.nn.blocks import block_type, decode


def samples(rows: int = 24, row: int = 512) -> np.ndarray:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((rows, row)) * np.exp(rng.standard_normal((rows, 1)) * 3)
    values[0], values[1], values[2, :256] = 0, 1, -3.0
    values[3] = np.rint(values[3] * 2) / 2
    return values.astype(np.float32)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_bytes_are_those_of_the_package(name: str) -> None:
    values = samples()
    got = encode(values, block_type(name))
    np.testing.assert_array_equal(got, quantize(values, gguf.GGMLQuantizationType[name]))


# root mean square error over that of the numbers: a Gaussian of this many bits allows about half as much
BOUNDS = {"Q2_K": 0.30, "Q3_K": 0.18, "Q4_K": 0.08, "Q5_K": 0.04, "Q6_K": 0.02}


@pytest.mark.parametrize("name", BOUNDS)
def test_k_quants_are_close(name: str) -> None:
    values = samples()
    raw = encode(values, block_type(name))
    back = dequantize(raw, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(decode(Tensor(raw), block_type(name)).numpy(), back)
    size = np.sqrt((values.astype(np.float64) ** 2).mean(1))
    error = np.sqrt(((back.astype(np.float64) - values) ** 2).mean(1))
    assert (error <= BOUNDS[name] * size).all(), (error[4:] / size[4:]).max()
    assert (back[0] == 0).all()
    # better than the same bits without groups of scales
    if name in ("Q4_K", "Q5_K"):
        plain = dequantize(quantize(values, gguf.GGMLQuantizationType["Q" + name[1] + "_0"]),
                           gguf.GGMLQuantizationType["Q" + name[1] + "_0"])  # fmt: skip
        assert error[4:].mean() < np.sqrt(((plain - values) ** 2).mean(1))[4:].mean()


def test_plain_types() -> None:
    values = samples(4, 64)
    assert encode(values, block_type("F32")).view(np.float32).tolist() == values.tolist()
    halves = encode(values[3], block_type("F16"))
    np.testing.assert_array_equal(halves.view(np.float16), values[3].astype(np.float16))
    brain = encode(values, block_type("BF16"))
    np.testing.assert_array_equal(brain, values.astype(ml_dtypes.bfloat16).view(np.uint8))


def test_errors() -> None:
    with pytest.raises(ShapeError, match="rows are no whole blocks of 256"):
        encode(np.zeros((2, 128), np.float32), block_type("Q4_K"))
    with pytest.raises(ArgumentError, match=r"encode as IQ2_XS: whit only reads this type. To fix"):
        encode(np.zeros(256, np.float32), block_type("IQ2_XS"))
    with pytest.raises(ArgumentError, match="not finite"):
        encode(np.full(32, np.inf, np.float32), block_type("Q8_0"))
