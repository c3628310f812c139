"""Products of rounded vectors with weights in blocks: four numbers a word on machines that multiply bytes,
and exact values on every path."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from tests.codegen.kernel_eval import evaluate
from whit import Context, Tensor
from whit.codegen.block_dots import split_words
from whit.codegen.heuristics import choose
from whit.codegen.lower import lower_passes, prepare
from whit.codegen.opts import OptKind
from whit.codegen.pipeline import generate
from whit.codegen.target import Target
from whit.nn.block_products import multiply
from whit.nn.blocks import block_type
from whit.renderer import CPU_OPS
from whit.schedule import schedule
from whit.uop import Ops, UOp, dtypes
from whit.uop.ops import DOTS as ALL_DOTS

DOTS = {"DOT4U": {Ops.DOT4U, Ops.DOT2}, "DOT2": {Ops.DOT2}, "DOT4": {Ops.DOT4}}
TARGETS = {
    name: Target(name, "llvm", vector_bytes=32, vector_registers=16, threads=2, native=CPU_OPS | ops)
    for name, ops in DOTS.items()
}
SCALES = {
    "Q4_1": [0, 2],
    "Q5_1": [0, 2],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}
WORDS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


def blocks(name: str, rows: int, size: int, seed: int = 0) -> np.ndarray:
    """Random blocks with finite scales."""
    kind, rng = block_type(name), np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, size // kind.elements, kind.nbytes), np.uint8)
    for at in SCALES.get(name, [0]):
        raw[..., at + 1] = 0x20 + (raw[..., at + 1] & 3)
    return raw.reshape(rows, -1)


def product(name: str, rows: int, count: int, size: int) -> UOp:
    """The kernel of a product, which reads what the kernels before it have rounded."""
    kind = block_type(name)
    matrix = Tensor.empty(rows, size // kind.elements * kind.nbytes, dtype=dtypes.uint8)
    plan = schedule([multiply(Tensor.empty(count, size), matrix, kind).contiguous().uop])[0].linear
    return [call.src[0] for call in plan.src if call.src[0].op is Ops.SINK][-1]


@pytest.mark.parametrize("name", WORDS)
def test_words_of_weights(name: str) -> None:
    """No byte is read alone but the scales'; one loop counts blocks; lanes hold words."""
    ready = prepare(prepare(product(name, 64, 1, 1024)), TARGETS["DOT4U"])
    dots = [u for u in ready.toposort() if u.op is Ops.DOT4U]
    assert dots and not any(u.op is Ops.REDUCE and u.dtype is dtypes.int32 for u in ready.toposort())
    assert prepare(ready, TARGETS["DOT4U"]) is ready
    kinds = {opt.kind for opt in choose(ready, TARGETS["DOT4U"])}
    assert {OptKind.UPCAST, OptKind.UNROLL, OptKind.THREAD} <= kinds
    wide = [u for u in generate(product(name, 64, 1, 1024), TARGETS["DOT4U"]).linear.src if u.op is Ops.DOT4U]
    assert wide and all(u.dtype == dtypes.int32.vec(wide[0].dtype.count) for u in wide)


def test_other_kernels_stay() -> None:
    plain = prepare(schedule([(Tensor.empty(64, 64) @ Tensor.empty(64, 64)).uop])[0].linear.src[0].src[0])
    assert split_words(plain, TARGETS["DOT4U"]) is plain
    ready = prepare(product("Q4_0", 64, 1, 1024))
    assert split_words(ready, TARGETS["DOT4U"]._replace(native=CPU_OPS)) is ready


@pytest.mark.parametrize("machine", DOTS)
@pytest.mark.parametrize("name", WORDS)
def test_every_machine_gives_the_same(name: str, machine: str) -> None:
    """The kernel as it is written, and as each machine multiplies, both evaluated by NumPy."""
    plain = prepare(product(name, 6, 1, 512))
    ready = prepare(plain, TARGETS[machine])
    assert any(u.op is Ops.DOT4U for u in ready.toposort())
    decompose = next(step for step in lower_passes() if step.name == "decompose")
    final = decompose.run(ready, TARGETS[machine])
    assert {u.op for u in final.toposort()} & set(ALL_DOTS) <= DOTS[machine]
    rng, memory = np.random.default_rng(1), []
    for param in sorted([u for u in plain.toposort() if u.op is Ops.PARAM], key=lambda u: u.arg.slot):
        if param.dtype is dtypes.uint8:
            memory.append(blocks(name, 6, 512).reshape(-1))
        elif param.dtype is dtypes.int8:
            memory.append(rng.integers(-127, 128, param.arg.size, np.int8))
        else:
            memory.append(rng.standard_normal(param.arg.size).astype(np.float32))
    want, got = evaluate(plain, memory)[0], evaluate(final, memory)[0]
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize("name", [*WORDS, "IQ4_NL", "MXFP4", "IQ3_S"])
@pytest.mark.parametrize("rows, count", [(7, 1), (16, 2), (33, 5), (6, 9)])
def test_values(name: str, rows: int, count: int) -> None:
    """Ragged numbers of rows and vectors, and more vectors than whole numbers are used for."""
    kind, size = block_type(name), 768
    raw, rng = blocks(name, rows, size, rows), np.random.default_rng(rows)
    if name == "MXFP4":
        raw.reshape(rows, -1, kind.nbytes)[..., 0] = 120 + rows % 8
    x = rng.standard_normal((count, size)).astype(np.float32)
    w = dequantize(raw, gguf.GGMLQuantizationType(kind.id)).astype(np.float64)
    block = 256 if kind.elements == 256 else 32
    parts = x.reshape(count, -1, block).astype(np.float32)
    most = np.abs(parts).max(-1, keepdims=True)
    scale = most / np.float32(127)
    scale = scale.astype(np.float16).astype(np.float32) if block == 32 else scale
    near = np.round(parts * (np.float32(127) / most)).astype(np.float64) * scale
    want = near.reshape(count, size) @ w.T
    for settings in ({}, {"NOOPT": 1}):
        with Context(**settings):
            got = multiply(Tensor(x), Tensor(raw), kind).numpy()
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(near).max() * np.abs(w).max() * 40)


def test_zeros_stay_zeros() -> None:
    raw = blocks("Q4_1", 4, 64)
    assert not multiply(Tensor.zeros(1, 64), Tensor(raw), block_type("Q4_1")).numpy().any()
