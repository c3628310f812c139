"""Bodies of any kind at the endpoints' functions: an answer, or an error that says what is wrong; never
anything else."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.llm.fakes import ByteTokenizer, FakeEngine, LineTemplate
from tests.llm.test_server import TOOL, FakeEncoder, TaggedParser, fake_grammar, obedient
from whit.llm.api import chat, completions, plain, responses
from whit.llm.api.errors import ApiError
from whit.llm.api.service import Service

CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"a": 1}'}}
CHAT: dict[str, Any] = {
    "model": "fake",
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
        {"role": "user", "content": "x", "name": "me"},
    ],
    "tools": [TOOL],
    "tool_choice": "auto",
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
    "stop": ["a"],
    "logit_bias": {"5": 1.5},
    "logprobs": True,
    "top_logprobs": 2,
    "n": 2,
    "max_tokens": 3,
    "temperature": 0.5,
    "seed": 3,
    "stream_options": {"include_usage": True},
    "metadata": {"a": "b"},
    "chat_template_kwargs": {"enable_thinking": False},
    "reasoning_effort": "low",
}
TEXT: dict[str, Any] = {
    "model": "fake", "prompt": ["a", "b"], "max_tokens": 2, "n": 1, "best_of": 2, "echo": False,
    "logprobs": 1, "stop": "x",
}  # fmt: skip
ITEMS: dict[str, Any] = {
    "model": "fake",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "rain"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "ok", "annotations": []}],
        },
        {"type": "message", "role": "user", "content": "go on"},
    ],
    "instructions": "be kind",
    "tools": [{"type": "function", **TOOL["function"]}],  # type: ignore[dict-item]
    "tool_choice": {"type": "function", "name": "weather"},
    "text": {"format": {"type": "json_object"}, "verbosity": "low"},
    "reasoning": {"effort": "low"},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 1,
    "max_output_tokens": 4,
}
VECTORS: dict[str, Any] = {"model": "letters", "input": ["a", "b"], "encoding_format": "float"}
TOKENS: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "with_pieces": True}

ODD = [
    None, True, False, 0, -1, 1, 2.5, 1e308, 10**40, "", "x", "\x00", "é" * 50, [], {}, [[]], [{}], [None],
    {"a": None}, {"type": "text"}, {"type": None}, [1, "a"], {"": 1}, [[[[]]]], {"role": "user"}, "auto",
    "json_object", -(2**63),
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything inside."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in inner for place in [(*path, key), *places(item, (*path, key))]]


def changed(body: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """A body in which one or two things are others, gone, or more."""
    result = copy.deepcopy(body)
    for _ in range(chance.choice([1, 1, 2])):
        *path, last = chance.choice(places(result))
        spot: Any = result
        for key in path:
            spot = spot[key]
        kind = chance.random()
        if kind < 0.15 and isinstance(spot, dict):
            del spot[last]
        elif kind < 0.25 and isinstance(spot, dict):
            spot[chance.choice(["extra", "content", "type", "name", "id"])] = copy.deepcopy(
                chance.choice(ODD)
            )
        else:
            spot[last] = copy.deepcopy(chance.choice(ODD))
    return result


def service() -> Service:
    engine: Any = FakeEngine(obedient, context=2000)
    return Service(
        engine, ByteTokenizer(), name="fake", template=LineTemplate(), grammar=fake_grammar,
        encoder=FakeEncoder(), encoder_name="letters", parser=lambda tools, thinking: TaggedParser(),
    )  # fmt: skip


Answer = Callable[[Service, Any], Awaitable[Any]]
SHELF = responses.Shelf()


async def whole_responses(given: Service, body: Any) -> Any:
    return await responses.complete(given, SHELF, body, "")


async def streamed_chat(given: Service, body: Any) -> Any:
    return [json.loads(line) for line in [line async for line in await chat.stream(given, body)][:-1]]


async def streamed_responses(given: Service, body: Any) -> Any:
    return [json.loads(line) async for _, line in await responses.stream(given, SHELF, body, "")]


@pytest.mark.parametrize(
    "answer, body",
    [
        (chat.complete, CHAT),
        (streamed_chat, CHAT),
        (completions.complete, TEXT),
        (whole_responses, ITEMS),
        (streamed_responses, ITEMS),
        (plain.embeddings, VECTORS),
        (plain.tokenize, TOKENS),
    ],
    ids=["chat", "chat-stream", "completions", "responses", "responses-stream", "embeddings", "tokenize"],
)
def test_any_body_is_answered_or_refused(answer: Answer, body: dict[str, Any]) -> None:
    async def run() -> tuple[int, int]:
        given, chance = service(), random.Random(7)
        json.dumps(await answer(given, copy.deepcopy(body)), allow_nan=False)
        taken = refused = 0
        for _ in range(250):
            odd = changed(body, chance)
            try:
                json.dumps(await answer(given, odd), allow_nan=False)
                taken += 1
            except ApiError as error:
                assert 400 <= error.status < 500 and error.because, odd
                assert error.body()["error"]["message"]
                refused += 1
        assert not given.live
        return taken, refused

    taken, refused = asyncio.run(run())
    assert taken > 5 and refused > 50
