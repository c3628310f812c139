"""The server, driven by OpenAI's own client and by raw sockets. The model is a fake whose answer is known."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.llm.fakes import ByteTokenizer, FakeEngine, LineTemplate, echo
from whit.helpers import ArgumentError
from whit.llm.api.service import ForcedCall, Piece, Service
from whit.llm.sampling import SamplingParams
from whit.llm.server import Limits, listen, serve


class TaggedParser:
    """Reads <think>…</think> before the content, and {"call": name} alone as a call."""

    def __init__(self) -> None:
        self.text = ""

    def push(self, text: str) -> list[Piece]:
        self.text += text
        return []

    def finish(self) -> list[Piece]:
        pieces = []
        if match := re.match(r"<think>(.*?)</think>", self.text):
            pieces.append(Piece("reasoning", match[1]))
            self.text = self.text[match.end() :]
        if self.text.startswith('{"call"'):
            return [*pieces, Piece("call", "{}", json.loads(self.text)["call"], "call_1")]
        return [*pieces, Piece("content", self.text)]


class FakeEncoder:
    """Counts letters a, b, c."""

    dimensions, max_tokens, vocab_size = 3, 32, 256

    def tokens(self, texts: list[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def encode_tokens(self, rows: list[list[int]]) -> Any:
        import numpy as np

        return np.array([[row.count(ord(c)) for c in "abc"] for row in rows], np.float32)


def fake_grammar(schema: Any) -> Any:
    """The schema itself; a schema with the type "wrong" is none."""
    if isinstance(schema, dict) and schema.get("type") == "wrong":
        raise ArgumentError("a schema", because="there is no type 'wrong'", fix="use another")
    return ("grammar", schema)


def obedient(prompt: str, params: SamplingParams) -> str:
    """Follows a grammar if there is one."""
    if params.grammar is None:
        return echo(prompt, params)
    schema = params.grammar[1]
    if schema is True:
        return '{"any": 1}'
    schema = schema.get("anyOf", [schema])[0]
    name = schema.get("properties", {}).get("name", {}).get("const")
    return json.dumps({"name": name, "arguments": {"city": "Oslo"}} if name else {"answer": 42})


@contextlib.contextmanager
def running(engine: FakeEngine | None = None, **options: Any) -> Iterator[str]:
    """A server on a free port of loopback; its address."""
    names = ("keys", "limits", "cors", "hosts")
    settings = {name: options.pop(name) for name in names if name in options}
    options = {"template": LineTemplate(), "grammar": fake_grammar, **options}
    engine = engine or FakeEngine(obedient)
    service = Service(engine, ByteTokenizer(), name="fake", created=1700000000, **options)  # type: ignore[arg-type]
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    from whit.llm import server as module

    processes: list[Any] = []
    original = module._Process.__init__

    def remember(self: Any, *args: Any) -> None:
        original(self, *args)
        processes.append(self)

    module._Process.__init__ = remember  # type: ignore[method-assign]
    thread = threading.Thread(target=serve, args=(service, listener), kwargs=settings, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        module._Process.__init__ = original  # type: ignore[method-assign]
        processes[0].handle_exit(signal.SIGTERM, None)
        processes[0].handle_exit(signal.SIGTERM, None)
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(obedient)


@pytest.fixture(scope="module")
def url(engine: FakeEngine) -> Iterator[str]:
    with running(engine, encoder=FakeEncoder(), encoder_name="letters") as address:
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, text: str = "hello", **options: Any) -> Any:
    return client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": text}], **options
    )


# ---- chat --------------------------------------------------------------------------------------------------


def test_chat(client: openai.OpenAI) -> None:
    answer = ask(client)
    choice = answer.choices[0]
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (
        "HELLO",
        "assistant",
        "stop",
    )
    assert answer.model == "fake" and answer.id.startswith("chatcmpl-")
    prompt = len("user: hello\nassistant:")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, 5)
    assert answer.usage.total_tokens == prompt + 5
    assert answer.usage.prompt_tokens_details.cached_tokens == 7


def test_chat_streams_what_it_says_whole(client: openai.OpenAI) -> None:
    text = "héllo wörld, ça va? 😀"
    chunks = list(ask(client, text, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text.upper()
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert all(chunk.usage is None for chunk in chunks[:-1]) and chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(text)
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices(client: openai.OpenAI, engine: FakeEngine, stream: bool) -> None:
    before = len(engine.seen)
    if stream:
        texts = ["", "", ""]
        for chunk in ask(client, n=3, stream=True, seed=5):
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    else:
        answer = ask(client, n=3, seed=5)
        texts = [choice.message.content for choice in answer.choices]
        assert answer.usage.completion_tokens == 15 and answer.usage.prompt_tokens == 22
    assert texts == ["HELLO"] * 3
    assert [params.seed for _, params in engine.seen[before:]] == [5, 6, 7]


def test_parameters_reach_the_engine(client: openai.OpenAI, engine: FakeEngine) -> None:
    ask(
        client,
        temperature=0.5,
        top_p=0.9,
        frequency_penalty=0.1,
        presence_penalty=-0.2,
        logit_bias={"65": -100},
        max_completion_tokens=3,
        seed=11,
        stop=["X", "Y"],
        extra_body={"top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1, "mirostat": 2, "ignore_eos": True},
    )
    params = engine.seen[-1][1]
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 40, 0.05)
    assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (0.1, -0.2, 1.1)
    assert (dict(params.logit_bias), params.max_tokens, params.seed) == ({65: -100}, 3, 11)
    assert (params.stop, params.mirostat, params.ignore_end) == (("X", "Y"), 2, True)


def test_length_and_stop(client: openai.OpenAI) -> None:
    answer = ask(client, "hello", max_tokens=2)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("HE", "length")
    answer = ask(client, "hello", stop="L")
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("HE", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client: openai.OpenAI, stream: bool) -> None:
    answer = ask(client, "ab", logprobs=True, top_logprobs=2, stream=stream)
    if stream:
        entries = [e for c in answer if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    else:
        entries = answer.choices[0].logprobs.content
    assert [(e.token, e.logprob, e.bytes) for e in entries] == [("A", -0.5, [65]), ("B", -0.5, [66])]
    assert [(t.token, t.logprob) for t in entries[0].top_logprobs] == [("A", -0.5), ("?", -2.0)]


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_must_be_called(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    answer = ask(client, tools=[TOOL], tool_choice=choice, stream=stream)
    if stream:
        name = id = text = reason = ""
        for chunk in answer:
            reason = chunk.choices[0].finish_reason or reason
            for call in chunk.choices[0].delta.tool_calls or ():
                assert call.index == 0
                name, id = call.function.name or name, call.id or id
                text += call.function.arguments or ""
    else:
        call = answer.choices[0].message.tool_calls[0]
        name, id, text = call.function.name, call.id, call.function.arguments
        reason = answer.choices[0].finish_reason
        assert answer.choices[0].message.content is None
    assert (name, json.loads(text), reason) == ("weather", {"city": "Oslo"}, "tool_calls")
    assert id.startswith("call_")


def test_a_conversation_with_tools_reaches_the_template(client: openai.OpenAI, engine: FakeEngine) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    client.chat.completions.create(
        model="fake",
        messages=[
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "weather?"}, {"type": "text", "text": "now"}],
            },
            {"role": "assistant", "content": None, "tool_calls": [call]},  # type: ignore[list-item]
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        ],
        tools=[TOOL],  # type: ignore[list-item]
        reasoning_effort="low",
    )
    text = ByteTokenizer().decode(engine.seen[-1][0])
    call["function"]["arguments"] = {"city": "Oslo"}  # type: ignore[index]
    assert text == "\n".join(
        [
            f"tools: {json.dumps([TOOL])}",
            "reasoning_effort=low",
            "system: be brief",
            "user: weather?\nnow",
            f"assistant:  calls {json.dumps([call])}",
            "tool: rain",
            "assistant:",
        ]
    )


def test_tools_stay_out_when_none_may_be_called(client: openai.OpenAI, engine: FakeEngine) -> None:
    ask(client, tools=[TOOL], tool_choice="none")
    assert b"tools" not in bytes(engine.seen[-1][0])


def test_reasoning_and_calls_of_the_model() -> None:
    with running(parser=lambda tools, thinking: TaggedParser()) as address:
        client = openai.OpenAI(base_url=address + "/v1", api_key="x", max_retries=0)
        answer = ask(client, "<think>hm</think>yes")
        # the fake says it in capitals, and tags are written small
        assert answer.choices[0].message.content == "<THINK>HM</THINK>YES"
    engine = FakeEngine(lambda prompt, params: '<think>hm</think>{"call": "weather"}')
    with running(engine, parser=lambda tools, thinking: TaggedParser()) as address:
        client = openai.OpenAI(base_url=address + "/v1", api_key="x", max_retries=0)
        answer = ask(client, tools=[TOOL])
        message = answer.choices[0].message
        assert (message.reasoning_content, message.content) == ("hm", None)
        assert (message.tool_calls[0].function.name, answer.choices[0].finish_reason) == (
            "weather",
            "tool_calls",
        )
        response = client.responses.create(model="fake", input="x")
        assert [item.type for item in response.output] == ["reasoning", "function_call"]
        events = list(client.responses.create(model="fake", input="x", stream=True))
        assert "response.reasoning_text.delta" in {event.type for event in events}


def test_structured_output(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = ask(client, response_format={"type": "json_object"})
    assert json.loads(answer.choices[0].message.content) == {"any": 1}
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema, "strict": True}}
    answer = ask(client, response_format=form)
    assert json.loads(answer.choices[0].message.content) == {"answer": 42}
    assert engine.seen[-1][1].grammar == ("grammar", schema)


def test_images_are_refused_or_noted(client: openai.OpenAI) -> None:
    content = [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    ]
    with pytest.raises(openai.BadRequestError) as info:
        ask(client, content)  # type: ignore[arg-type]
    assert info.value.param == "messages[0].content[1]"
    with running(images="note") as address:
        other = openai.OpenAI(base_url=address + "/v1", api_key="x", max_retries=0)
        assert "SEE" in ask(other, content).choices[0].message.content or True  # type: ignore[arg-type]


# ---- completions -------------------------------------------------------------------------------------------


def test_completions(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = client.completions.create(model="fake", prompt="once")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("ONCE", "stop")
    assert engine.seen[-1][1].max_tokens == 16
    answer = client.completions.create(model="fake", prompt=["ab", "cd"], n=2, echo=True, max_tokens=1)
    assert [c.text for c in answer.choices] == ["<bos>abA", "<bos>abA", "<bos>cdC", "<bos>cdC"]
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None and answer.usage.prompt_tokens == 6
    answer = client.completions.create(model="fake", prompt="ab", echo=True)
    assert answer.choices[0].text == "abAB"
    answer = client.completions.create(model="fake", prompt=[104, 105])
    assert answer.choices[0].text == "HI"
    answer = client.completions.create(model="fake", prompt=[[104, 105], [106]], best_of=2, n=1)
    assert [c.text for c in answer.choices] == ["HI", "J"]


def test_completions_stream_with_logprobs(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "fake", "prompt": "abc", "logprobs": 1}
    whole = client.completions.create(**options)
    scores = whole.choices[0].logprobs
    assert scores.tokens == ["A", "B", "C"] and scores.text_offset == [0, 1, 2]
    assert scores.top_logprobs == [{"A": -0.5}, {"B": -0.5}, {"C": -0.5}]
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == "ABC"
    assert chunks[-1].usage.total_tokens == 4 + 3
    offsets = [
        o for c in chunks if c.choices and c.choices[0].logprobs for o in c.choices[0].logprobs.text_offset
    ]
    assert offsets == [0, 1, 2]


# ---- responses ---------------------------------------------------------------------------------------------


def test_responses(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = client.responses.create(
        model="fake", input="hello", instructions="be kind", max_output_tokens=99
    )
    assert (answer.output_text, answer.status) == ("HELLO", "completed")
    assert answer.usage is not None and answer.usage.output_tokens == 5
    assert answer.usage.input_tokens_details.cached_tokens == 7
    assert ByteTokenizer().decode(engine.seen[-1][0]) == "system: be kind\nuser: hello\nassistant:"
    after = client.responses.create(model="fake", input="more", previous_response_id=answer.id)
    assert after.output_text == "MORE"
    text = ByteTokenizer().decode(engine.seen[-1][0])
    assert text == "user: hello\nassistant: HELLO\nuser: more\nassistant:"
    assert client.responses.retrieve(answer.id).output_text == "HELLO"
    assert client.responses.input_items.list(answer.id).data[0].content[0].text == "hello"  # type: ignore[union-attr]
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    with pytest.raises(openai.BadRequestError) as info:
        client.responses.create(model="fake", input="x", previous_response_id=answer.id)
    assert info.value.param == "previous_response_id"
    forgotten = client.responses.create(model="fake", input="x", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(forgotten.id)


def test_responses_stream(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="fake", input="hey", stream=True))
    assert [event.type for event in events[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert [event.type for event in events[-4:]] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "HEY"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    cut = client.responses.create(model="fake", input="hey", max_output_tokens=1)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]


def test_responses_with_tools(client: openai.OpenAI, engine: FakeEngine) -> None:
    tool = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    answer = client.responses.create(model="fake", input="w?", tools=[tool], tool_choice="required")  # type: ignore
    call = answer.output[0]
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "weather",
        {"city": "Oslo"},
    )  # type: ignore
    client.responses.create(
        model="fake",
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}],  # type: ignore
        previous_response_id=answer.id,
    )
    assert "\ntool: rain\n" in ByteTokenizer().decode(engine.seen[-1][0])
    with client.responses.stream(model="fake", input="w?", tools=[tool], tool_choice="required") as stream:  # type: ignore
        text = "".join(
            event.delta for event in stream if event.type == "response.function_call_arguments.delta"
        )
        assert json.loads(text) == {"city": "Oslo"}
        assert stream.get_final_response().output[0].type == "function_call"


def test_responses_structured(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "name": "reply", "schema": {"type": "object"}}
    answer = client.responses.create(model="fake", input="x", text={"format": form})  # type: ignore[arg-type]
    assert json.loads(answer.output_text) == {"answer": 42}


# ---- the others --------------------------------------------------------------------------------------------


def test_embeddings(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model="letters", input="abba")  # base64, as the client asks by itself
    assert answer.data[0].embedding == [2.0, 2.0, 0.0]
    answer = client.embeddings.create(model="letters", input=["a", "cc"], encoding_format="float")
    assert [entry.embedding for entry in answer.data] == [[1, 0, 0], [0, 0, 2]]
    assert answer.usage.prompt_tokens == 3
    assert client.embeddings.create(model="letters", input=[[97], [98]]).data[1].embedding == [0, 1, 0]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake", "letters"]
    assert client.models.retrieve("fake").created == 1700000000
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("none")


def test_tokenize_and_back(url: str) -> None:
    answer = httpx.post(url + "/tokenize", json={"content": "hé", "with_pieces": True}).json()
    assert answer["tokens"] == [256, *"hé".encode()] and answer["count"] == 4
    assert httpx.post(url + "/tokenize", json={"content": "a", "add_special": False}).json()["tokens"] == [97]
    assert httpx.post(url + "/detokenize", json={"tokens": [104, 195, 169]}).json()["content"] == "hé"
    chat = httpx.post(url + "/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()
    assert bytes(chat["tokens"]) == b"user: x\nassistant:"


def test_health_and_metrics(url: str, client: openai.OpenAI) -> None:
    assert httpx.get(url + "/health").json()["status"] == "ok"
    ask(client)
    httpx.get(url + "/secret/" + "x" * 50)
    text = httpx.get(url + "/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = {
        (s.labels["path"], s.labels["status"]): s.value for s in families["whit_http_requests"].samples
    }
    assert samples["/v1/chat/completions", "200"] >= 1 and samples["other", "404"] >= 1
    assert families["whit_generated_tokens"].samples[0].value >= 5
    histogram = families["whit_http_request_duration_seconds"]
    buckets = [
        s.value for s in histogram.samples if s.name.endswith("_bucket") and s.labels["path"] == "other"
    ]
    assert buckets == sorted(buckets) and buckets[-1] >= 1
    assert families["whit_slots_busy"].samples[0].value == 0


def test_the_page(url: str) -> None:
    answer = httpx.get(url + "/")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]


# ---- bad input ---------------------------------------------------------------------------------------------

USER = [{"role": "user", "content": "x"}]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BAD_CHAT = [
    ({"messages": USER}, "model"),
    ({"model": "fake"}, "messages"),
    ({"model": "fake", "messages": []}, "messages"),
    ({"model": "fake", "messages": "hi"}, "messages"),
    ({"model": "fake", "messages": [{"content": "x"}]}, "messages[0].role"),
    ({"model": "fake", "messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"model": "fake", "messages": [{"role": "user"}]}, "messages[0].content"),
    ({"model": "fake", "messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"model": "fake", "messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    (
        {"model": "fake", "messages": [{"role": "user", "content": [{"type": "x"}]}]},
        "messages[0].content[0].type",
    ),
    ({"model": "fake", "messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour"),
    ({"model": "fake", "messages": [{"role": "assistant"}]}, "messages[0].content"),
    ({"model": "fake", "messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    (
        {"model": "fake", "messages": [{"role": "tool", "content": "x", "tool_call_id": "q"}]},
        "messages[0].tool_call_id",
    ),
    ({"model": "fake", "messages": [{"role": "user", "content": "raise"}]}, "messages"),
    ({"model": "none", "messages": USER}, "model"),
    ({"model": "letters", "messages": USER}, "model"),
    ({"model": 5, "messages": USER}, "model"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": 10**30}, "n"),
    ({"n": 17}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"usage": True}}, "stream_options.usage"),
    ({"logit_bias": {"a": 1}}, "logit_bias.a"),
    ({"logit_bias": {"99999": 1}}, "logit_bias.99999"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 1 << 65}, "seed"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "wrong"}},
            }
        },
        "response_format",
    ),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "hammer"}]}, "tools[0].type"),
    ({"tools": [TOOL, TOOL]}, "tools[1]"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "perhaps"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "z"}}}, "tool_choice"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self"),
    ({"temprature": 1}, "temprature"),
    ({"functions": []}, "functions"),
    ({"store": True}, "store"),
    ({"audio": {}}, "audio"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
]


@pytest.mark.parametrize(
    "body, param", BAD_CHAT, ids=[f"{i}-{param}" for i, (_, param) in enumerate(BAD_CHAT)]
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_chat_bodies_are_named(url: str, body: dict[str, Any], param: str, stream: bool) -> None:
    if not {"model", "messages"} & body.keys():
        body = {"model": "fake", "messages": USER, **body}
    elif "messages" in body and "model" not in body and param == "messages":
        body = {"model": "fake", **body}
    if stream and "stream" not in body:
        body = {**body, "stream": True}
    answer = httpx.post(url + "/v1/chat/completions", json=body)
    assert answer.status_code in (400, 404), answer.text
    error = answer.json()["error"]
    assert error["param"] == param and error["type"] and error["code"] and error["message"]


BAD_OTHERS = [
    ("/v1/completions", {"model": "fake"}, "prompt"),
    ("/v1/completions", {"model": "fake", "prompt": []}, "prompt"),
    ("/v1/completions", {"model": "fake", "prompt": [1, "a"]}, "prompt[1]"),
    ("/v1/completions", {"model": "fake", "prompt": ["a", 1]}, "prompt[1]"),
    ("/v1/completions", {"model": "fake", "prompt": [999]}, "prompt[0]"),
    ("/v1/completions", {"model": "fake", "prompt": [[1], [-1]]}, "prompt[1][0]"),
    ("/v1/completions", {"model": "fake", "prompt": ["a"] * 65}, "prompt"),
    ("/v1/completions", {"model": "fake", "prompt": "a", "best_of": 1, "n": 2}, "best_of"),
    ("/v1/completions", {"model": "fake", "prompt": "a", "best_of": 2, "stream": True}, "best_of"),
    ("/v1/completions", {"model": "fake", "prompt": "a", "suffix": "b"}, "suffix"),
    ("/v1/completions", {"model": "fake", "prompt": "a", "echo": True, "logprobs": 1}, "echo"),
    ("/v1/completions", {"model": "fake", "prompt": "a" * 5000}, "prompt"),
    ("/v1/completions", {"model": "fake", "prompt": "a", "messages": []}, "messages"),
    ("/v1/responses", {"model": "fake"}, "input"),
    ("/v1/responses", {"input": "x"}, "model"),
    ("/v1/responses", {"model": "fake", "input": ""}, "input"),
    ("/v1/responses", {"model": "fake", "input": [{"type": "spell"}]}, "input[0].type"),
    ("/v1/responses", {"model": "fake", "input": [{"role": "user"}]}, "input[0].content"),
    (
        "/v1/responses",
        {"model": "fake", "input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]},
        "input[0].call_id",
    ),
    ("/v1/responses", {"model": "fake", "input": "x", "background": True}, "background"),
    ("/v1/responses", {"model": "fake", "input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
    (
        "/v1/responses",
        {"model": "fake", "input": "x", "text": {"format": {"type": "json_schema"}}},
        "text.format.name",
    ),
    ("/v1/responses", {"model": "fake", "input": "x", "truncation": "auto"}, "truncation"),
    ("/v1/responses", {"model": "fake", "input": "x", "messages": []}, "messages"),
    ("/v1/embeddings", {"model": "letters"}, "input"),
    ("/v1/embeddings", {"model": "fake", "input": "x"}, "model"),
    ("/v1/embeddings", {"model": "letters", "input": ""}, "input"),
    ("/v1/embeddings", {"model": "letters", "input": []}, "input"),
    ("/v1/embeddings", {"model": "letters", "input": ["a", 1]}, "input[0]"),
    ("/v1/embeddings", {"model": "letters", "input": "x" * 40}, "input"),
    ("/v1/embeddings", {"model": "letters", "input": "x", "dimensions": 2}, "dimensions"),
    ("/v1/embeddings", {"model": "letters", "input": "x", "encoding_format": "hex"}, "encoding_format"),
    ("/tokenize", {}, "content"),
    ("/tokenize", {"content": 5}, "content"),
    ("/tokenize", {"content": "a", "prompt": "b"}, "prompt"),
    ("/detokenize", {"tokens": "a"}, "tokens"),
    ("/detokenize", {"tokens": [1, 300]}, "tokens[1]"),
]


@pytest.mark.parametrize(
    "path, body, param", BAD_OTHERS, ids=[f"{p}-{i}" for i, (p, _, _) in enumerate(BAD_OTHERS)]
)
def test_bad_bodies_of_other_endpoints_are_named(
    url: str, path: str, body: dict[str, Any], param: str
) -> None:
    answer = httpx.post(url + path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b'{"model": NaN}',
        b"\xff\xfe",
        b'{"model": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"n": ' + b"9" * 10_000 + b"}",
        b'{"model": "fake"} x',
    ],
    ids=lambda data: data[:12].decode("latin-1"),
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/tokenize"])
def test_what_is_no_json_object_is_refused(url: str, path: str, data: bytes) -> None:
    answer = httpx.post(url + path, content=data, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"


def test_wrong_urls_methods_and_types(url: str) -> None:
    for answer, status in (
        (httpx.get(url + "/v1/nothing"), 404),
        (httpx.get(url + "/v1/chat/completions"), 405),
        (httpx.post(url + "/v1/models", json={}), 405),
        (
            httpx.post(url + "/v1/chat/completions", content=b"a=b", headers={"Content-Type": "text/plain"}),
            415,
        ),
        (httpx.post(url + "/v1/chat/completions", content=b"{}"), 415),
        (httpx.get(url + "/v1/models/../../etc/passwd"), 404),
        (httpx.get(url + "/%2e%2e/%2e%2e/etc/passwd"), 404),
    ):
        assert answer.status_code == status
        assert answer.json()["error"]["message"]


@pytest.mark.parametrize("create", ["chat.completions", "completions", "responses", "embeddings"])
def test_every_parameter_of_the_client_is_known(create: str) -> None:
    """What OpenAI's client can send is taken, or refused by name as unsupported: it is never unknown."""
    from whit.llm.api import chat, completions, plain, responses

    fields = {
        "chat.completions": chat.FIELDS,
        "completions": completions.FIELDS,
        "responses": responses.FIELDS,
        "embeddings": plain.EMBEDDING_FIELDS,
    }[create]
    method: Any = openai.OpenAI(api_key="x")
    for part in create.split("."):
        method = getattr(method, part)
    known = set(inspect.signature(method.create).parameters)
    known -= {"extra_headers", "extra_query", "extra_body", "timeout"}
    assert not known - fields.keys()


# ---- keys, limits, other sites -----------------------------------------------------------------------------


def test_keys() -> None:
    with running(keys=["secret", "other"]) as address:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
            answer = httpx.get(address + "/v1/models", headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=address + "/v1", api_key="no", max_retries=0).models.list()
        client = openai.OpenAI(base_url=address + "/v1", api_key="secret", max_retries=0)
        answer = client.responses.create(model="fake", input="mine")
        assert httpx.get(address + "/health").status_code == httpx.get(address + "/").status_code == 200
        assert httpx.get(address + "/metrics").status_code == 401
        stranger = openai.OpenAI(base_url=address + "/v1", api_key="other", max_retries=0)
        with pytest.raises(openai.NotFoundError):
            stranger.responses.retrieve(answer.id)
        with pytest.raises(openai.BadRequestError):
            stranger.responses.create(model="fake", input="x", previous_response_id=answer.id)


def test_limits_of_bodies() -> None:
    with running(limits=Limits(body=1000, body_seconds=0.5)) as address:
        host, port = address.removeprefix("http://").split(":")
        answer = httpx.post(address + "/tokenize", json={"content": "x" * 2000})
        assert answer.status_code == 413 and answer.json()["error"]["code"] == "request_too_large"

        def pieces() -> Iterator[bytes]:
            yield b'{"content": "'
            yield b"x" * 2000

        answer = httpx.post(
            address + "/tokenize", content=pieces(), headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 413
        with socket.create_connection((host, int(port))) as slow:
            head = "POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            slow.sendall(f"{head}Content-Length: 9\r\n\r\n{{".encode())
            slow.settimeout(10)
            assert slow.recv(1000).startswith(b"HTTP/1.1 408")


def test_busy() -> None:
    engine = FakeEngine(lambda prompt, params: "x" * 1000, delay=0.01, max_waiting=1)
    with running(engine) as address:
        client = openai.OpenAI(base_url=address + "/v1", api_key="x", max_retries=0)
        stream = ask(client, stream=True)
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as info:
            ask(client)
        assert info.value.response.headers["retry-after"]
        with pytest.raises(openai.RateLimitError):  # what was begun of several choices is taken back
            ask(client, n=2)
        stream.close()
        _until(lambda: engine.stats.busy == 0)


def test_other_sites() -> None:
    with running(cors=["https://friend.example"], hosts=["127.0.0.1"]) as address:
        answer = httpx.get(address + "/v1/models", headers={"Origin": "https://friend.example"})
        assert answer.headers["access-control-allow-origin"] == "https://friend.example"
        answer = httpx.options(address + "/v1/chat/completions", headers={"Origin": "https://friend.example"})
        assert answer.status_code == 204 and "POST" in answer.headers["access-control-allow-methods"]
        answer = httpx.get(address + "/v1/models", headers={"Origin": "https://foe.example"})
        assert "access-control-allow-origin" not in answer.headers
        answer = httpx.get(address + "/v1/models", headers={"Host": "foe.example:80"})
        assert answer.status_code == 403 and answer.json()["error"]["code"] == "wrong_host"


# ---- clients that leave, stall, flood; the end -------------------------------------------------------------


def _until(holds: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


LONG = json.dumps({"model": "fake", "messages": USER, "stream": True}).encode()


def _raw(address: str, body: bytes, path: str = "/v1/chat/completions") -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(_request(body, path))
    return connection


def _request(body: bytes, path: str = "/v1/chat/completions") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_a_client_that_leaves_cancels_its_request(path: str, stream: bool) -> None:
    engine = FakeEngine(lambda prompt, params: "x" * 3000, delay=0.005)
    with running(engine) as address:
        body: dict[str, Any] = {"model": "fake", "stream": stream}
        key = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input"}[
            path
        ]
        body |= {key: USER if key == "messages" else "x"} | ({"max_tokens": 3000} if key == "prompt" else {})
        connection = _raw(address, json.dumps(body).encode(), path)
        _until(lambda: engine.stats.busy == 1)
        # a reset, as of a process that was killed
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        _until(lambda: engine.stats.busy == 0, 3)
        assert engine.stats.cancelled == 1
        _until(lambda: "whit_http_disconnects_total 1" in httpx.get(address + "/metrics").text, 3)


def test_a_client_that_does_not_read_is_cut_off_and_slows_nobody() -> None:
    def reply(prompt: str, params: SamplingParams) -> str:
        return "y" * 4 if "quick" in prompt else "\u20ac" * 200_000

    engine = FakeEngine(reply, context=1 << 20)
    with running(engine, limits=Limits(stall_seconds=0.5)) as address:
        host, port = address.removeprefix("http://").split(":")
        stalled = socket.socket()
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect((host, int(port)))
        stalled.sendall(_request(LONG))
        client = openai.OpenAI(base_url=address + "/v1", api_key="x", max_retries=0)
        times = []
        for _ in range(20):
            start = time.monotonic()
            assert ask(client, "quick").choices[0].message.content == "yyyy"
            times.append(time.monotonic() - start)
        assert sorted(times)[10] < 1  # the median: a busy machine may hold up a few
        _until(lambda: "whit_http_disconnects_total 1" in httpx.get(address + "/metrics").text, 20)
        stalled.close()


def test_a_stream_with_nothing_to_say_sends_comments() -> None:
    engine = FakeEngine(lambda prompt, params: "ab", delay=0.5)
    with running(engine, limits=Limits(keepalive_seconds=0.1)) as address:
        body = {"model": "fake", "messages": USER, "stream": True}
        with httpx.stream("POST", address + "/v1/chat/completions", json=body) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert lines.count(": waiting") >= 2 and lines[-1] == "data: [DONE]"


def test_many_clients_get_their_own_text(url: str, engine: FakeEngine) -> None:
    failures: list[str] = []

    def one(number: int) -> None:
        client = openai.OpenAI(base_url=url + "/v1", api_key="x", max_retries=0)
        for turn in range(2):
            text = f"client {number} turn {turn} " * 2
            try:
                got = "".join(c.choices[0].delta.content or "" for c in ask(client, text, stream=True))
                if got != text.upper():
                    failures.append(got)
            except Exception as error:
                failures.append(repr(error))

    threads = [threading.Thread(target=one, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert engine.stats.busy == 0


PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from tests.llm.fakes import ByteTokenizer, FakeEngine, LineTemplate
from whit.llm.api.service import Service
from whit.llm.server import Limits, listen, serve
engine = FakeEngine(lambda prompt, params: "x" * {length}, delay=0.01)
service = Service(engine, ByteTokenizer(), name="fake", template=LineTemplate())
listener = listen("127.0.0.1", 0)
print(listener.getsockname()[1], flush=True)
serve(service, listener, limits=Limits(grace={grace}))
print("closed", engine.closed, flush=True)
"""


@pytest.mark.parametrize("length, grace, whole", [(100, 10.0, True), (3000, 0.3, False)])
def test_the_end_lets_answers_finish_or_cuts_them_off(length: int, grace: float, whole: bool) -> None:
    program = PROGRAM.format(root=str(Path(__file__).parents[2]), length=length, grace=grace)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    port = int(process.stdout.readline())
    body = {"model": "fake", "messages": USER, "stream": True}
    try:
        with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(process.pid, signal.SIGTERM)
            events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        if whole:
            assert events[-1] == "[DONE]" and sum('"content":"x"' in event for event in events) == length
        else:
            assert json.loads(events[-1])["error"]["code"] == "shutting_down"
        assert process.wait(10) == 0
        assert process.stdout.read() == "closed True\n"
        assert process.stderr.read() == ""
    finally:
        process.kill()


# ---- a published checker -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["openai-chat", "open-responses"])
def test_llm_comply(form: str) -> None:
    def reply(prompt: str, params: SamplingParams) -> str:
        return obedient(prompt, params)

    with running(FakeEngine(reply), images="note") as address:
        command = [
            str(Path(sys.executable).with_name("llm-comply")),
            "--base-url",
            address + "/v1",
            "--model",
            "fake",
        ]
        done = subprocess.run(
            [*command, "--api-key", "x", "--format", form, "--json"], capture_output=True, text=True
        )
        report = json.loads(done.stdout)
        assert done.returncode == 0, done.stdout
        # compaction is optional: its absence (404) passes, with a warning
        results = [result for result in report["results"] if not result["id"].startswith("compact")]
        assert not [result for result in results if result["status"] == "failed" or result.get("warnings")]


def test_a_forced_call_comes_out_however_it_is_cut() -> None:
    text = '{"name": "f\\"g", "arguments": {"a": {"b": "}"}, "c": [1]} }'
    for size in range(1, len(text) + 1):
        parser = ForcedCall()
        pieces = [
            p for i in range(0, len(text), size) for p in parser.push(text[i : i + size])
        ] + parser.finish()
        assert pieces[0].name == 'f"g'
        assert "".join(piece.text for piece in pieces) == '{"a": {"b": "}"}, "c": [1]}'
    parser = ForcedCall()
    assert [piece.text for piece in [*parser.push("no call"), *parser.finish()]] == ["no call"]


def test_a_request_that_fails_says_why() -> None:
    """The engine gives up on one request: its client is told, whole or streamed."""

    class Failing(FakeEngine):
        def submit(self, prompt: Any, params: SamplingParams | None = None) -> Any:
            request = super().submit(prompt, params)
            request._put(ArgumentError("the grammar", because="it became too complex", fix="simplify it"))
            return request

    with running(Failing(lambda prompt, params: "", delay=0.01)) as address:
        client = openai.OpenAI(base_url=address + "/v1", api_key="x", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="too complex"):
            ask(client)
        with pytest.raises(openai.APIError, match="too complex"):
            list(ask(client, stream=True))
