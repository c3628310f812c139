"""Grammars: which tokens may come next, against what the grammar means; wrong grammars; JSON that SmolLM2
writes under twenty schemas, judged by `jsonschema`."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest

from tests.llm.tiny import END, VOCAB, ByteTokenizer
from whit.helpers import ArgumentError
from whit.llm.engine import Engine
from whit.llm.grammar import Grammar, GrammarError, Grammars
from whit.llm.hub import packaged_models
from whit.llm.model import Model
from whit.llm.sampling import SamplingParams
from whit.llm.tokenizer import Tokenizer

grammars = Grammars(ByteTokenizer(), VOCAB + 9)  # logits may be longer than the vocabulary


def allowed(grammar: Grammar, text: str) -> set[int]:
    matcher = grammar.matcher()
    for token in text.encode():
        matcher.accept(token)
    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    assert not bits[VOCAB:].any()
    return set(np.flatnonzero(bits).tolist())


def letters(text: str) -> set[int]:
    return set(text.encode())


def test_masks_say_what_may_follow() -> None:
    digits = grammars.regex("[0-9]{2,3}")
    assert allowed(digits, "") == allowed(digits, "1") == letters("0123456789")
    assert allowed(digits, "12") == letters("0123456789") | {END}
    assert allowed(digits, "123") == {END}
    choice = grammars.choice(["yes", "yesterday", 'no "quotes"'])
    assert allowed(choice, "") == letters("yn")
    assert allowed(choice, "yes") == letters("t") | {END}
    assert allowed(choice, "no ") == letters('"')
    lark = grammars.lark('start: "(" start ")" | "x"')
    assert allowed(lark, "((") == letters("(x")
    assert allowed(lark, "((x") == letters(")")


def test_regular_expressions_allow_what_they_match() -> None:
    rng = np.random.default_rng(0)
    for pattern in ("a*b|c", "(ab|a)(bc|c)?", "[^a]+", "a{1,3}(b|cc)*"):
        grammar, compiled = grammars.regex(pattern), re.compile(pattern)
        for _ in range(60):
            text = "".join(rng.choice(list("abc"), rng.integers(1, 6)))
            matcher = grammar.matcher()
            try:
                for token in text.encode():
                    matcher.accept(token)
                accepts = matcher.accepting
            except GrammarError:
                accepts = False
            assert accepts == (compiled.fullmatch(text) is not None), (pattern, text)


def test_an_object_is_complete_at_its_end_and_spaces_are_bounded() -> None:
    grammar = grammars.json_schema({"type": "object", "additionalProperties": False})
    matcher = grammar.matcher()
    for token in b"{}":
        assert not matcher.complete
        matcher.accept(token)
    assert matcher.complete
    assert letters(" \n") & allowed(grammar, "{") and not letters(" \n") & allowed(grammar, "{ ")


def test_control_tokens_are_no_text() -> None:
    words = ["<unk>", "<|end|>", "a", "b", '"', "<|turn|>"]
    tokenizer = Tokenizer.from_metadata(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": words,
            "tokenizer.ggml.merges": ["a b"],
            "tokenizer.ggml.token_type": [2, 3, 1, 1, 1, 3],
            "tokenizer.ggml.eos_token_id": 1,
        }
    )
    matcher = Grammars(tokenizer).json_schema({"type": "string"}).matcher()
    matcher.accept(4)
    assert [n for n in range(6) if matcher.mask()[0] >> n & 1] == [2, 3, 4]


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (grammars.json_schema, {"type": "nonsense"}),
        (grammars.json_schema, {"$ref": "https://example.org/schema"}),
        (grammars.json_schema, {"type": "string", "minLength": 5, "maxLength": 2}),
        (grammars.json_schema, {"properties": [1]}),
        (grammars.json_schema, {"x": float("nan")}),
        (grammars.json_schema, {"x": object()}),
        (grammars.json_schema, [1]),
        (grammars.json_schema, False),
        (grammars.json_schema, {"enum": ["x" * (1 << 21)]}),
        (grammars.regex, "(("),
        (grammars.lark, "start: missing"),
        (grammars.lark, ""),
        (grammars.choice, []),
        (grammars.choice, [""]),
        (grammars.choice, [3]),
    ],
)
def test_wrong_grammars_are_refused_by_name(make: Any, given: Any) -> None:
    with pytest.raises(ArgumentError, match=r"JSON schema|regular expression|grammar|choice"):
        make(given)


def test_a_deep_schema_is_refused_or_works_and_never_crashes() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    with contextlib.suppress(ArgumentError, GrammarError):
        grammars.json_schema(schema).matcher().mask()


def test_a_token_that_the_mask_lacks_is_an_error() -> None:
    matcher = grammars.regex("abc").matcher()
    with pytest.raises(GrammarError, match="grammar"):
        matcher.accept(ord("x"))


# ---- a real model ------------------------------------------------------------------------------------------


def closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SHORT = {"type": "string", "maxLength": 12}
SCHEMAS: list[dict[str, Any]] = [
    {"type": "boolean"},
    {"type": "integer", "minimum": 1, "maximum": 10},
    {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.01},  # no endless zeros
    {"enum": ["red", "green", "blue", None, 7]},
    {"const": {"a": [1, 2]}},
    {"type": "string", "minLength": 3, "maxLength": 8},
    {"type": "string", "pattern": "^[A-Z][a-z]{2,6}$"},
    {"type": "string", "format": "date"},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "boolean"}, SHORT], "items": False, "minItems": 2},
    closed(name=SHORT),
    closed(name=SHORT, age={"type": "integer", "minimum": 0, "maximum": 120}),
    closed(city=SHORT, country=SHORT, capital={"type": "boolean"}),
    closed(at=closed(x={"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.5}, y={"enum": [0]})),
    closed(tags={"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3}),
    closed(kind={"enum": ["circle", "square"]}, size={"anyOf": [{"type": "null"}, {"enum": [1, 2]}]}),
    {"anyOf": [closed(a={"type": "boolean"}), closed(b={"type": "integer", "minimum": 0, "maximum": 3})]},
    {
        "$defs": {"leaf": closed(value={"type": "integer", "minimum": 0, "maximum": 9})},
        **closed(left={"$ref": "#/$defs/leaf"}, right={"$ref": "#/$defs/leaf"}),
    },
    {
        "type": "object",
        "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 99}, "note": SHORT},
        "required": ["id"],
        "additionalProperties": False,
    },
    closed(answer={"enum": ["yes", "no"]}, because={"type": "string", "maxLength": 30}),
]  # fmt: skip


@contextlib.contextmanager
def smollm2(slots: int) -> Iterator[tuple[Engine, Tokenizer, Grammars]]:
    path = next(path for name, path in packaged_models().items() if "smollm2" in name.lower())
    model = Model.load(path, context=256)
    tokenizer = Tokenizer.from_gguf(model.gguf)
    with Engine(model, tokenizer, slots=slots) as engine:
        yield engine, tokenizer, Grammars(tokenizer, model.vocab_size)


def write(served: tuple[Engine, Tokenizer, Grammars], numbers: range, each: int) -> int:
    """Texts under these schemas, judged; how many there were."""
    engine, tokenizer, made = served
    requests = []
    for number in numbers:
        grammar = made.json_schema(SCHEMAS[number])
        prompt = tokenizer.encode(f"<|im_start|>user\nGive an example of {json.dumps(SCHEMAS[number])[:200]}")
        prompt += tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n")
        for seed in range(each):
            params = SamplingParams(grammar=grammar, seed=seed, temperature=0.0 if seed == 0 else 1.0)
            requests.append((number, engine.submit(prompt, params)))
    for number, request in requests:
        done = request.result()
        assert done.finish_reason == "stop", (SCHEMAS[number], done.text)
        check = jsonschema.Draft202012Validator(
            SCHEMAS[number], format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        check.validate(json.loads(done.text))
    return len(requests)


def test_a_real_model_writes_what_a_schema_says() -> None:
    with smollm2(slots=1) as served:
        assert write(served, range(11, 12), 2) == 2


@pytest.mark.slow
def test_two_hundred_texts_of_twenty_schemas() -> None:
    with smollm2(slots=8) as served:
        assert write(served, range(20), 10) == 200
