"""Answers taken apart while they stream: calls, reasoning, content, in any cut of the text."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from whit.helpers import ArgumentError
from whit.llm.calls import JsonEnd, json_calls, python_calls, xml_calls
from whit.llm.chat import DEFAULTS, ChatTemplate
from whit.llm.tools import FORMATS, OutputParser, first_mark, format_of, new_id


def tool(name: str, **kinds: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
    }


TOOLS = [tool("f", a="integer", s="string"), tool("get_weather", city="string"), tool("g")]


def parts(format: str, pieces: Sequence[str], **options: Any) -> list[tuple[str, str]]:
    """What a parser gives, neighbours of a kind joined; a call as "name arguments"."""
    parser = OutputParser(format, **({"tools": TOOLS} | options))
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
    found: list[tuple[str, str]] = []
    for delta in deltas:
        if delta.tool_call is not None:
            arguments = json.dumps(json.loads(delta.tool_call.arguments), sort_keys=True, ensure_ascii=False)
            found.append(("call", f"{delta.tool_call.name} {arguments}"))
            continue
        kind, text = ("content", delta.content) if delta.content else ("reasoning", delta.reasoning_content)
        assert text
        if found and found[-1][0] == kind:
            text = found.pop()[1] + text
        found.append((kind, text))
    return found


F1 = ("call", 'f {"a": 1}')

CASES: list[tuple[str, str, list[tuple[str, str]]]] = [
    # content and reasoning
    ("none", "Hello <b>world</b>\n", [("content", "Hello <b>world</b>\n")]),
    ("none", "<think>\nHm.\n</think>\n\nYes.", [("reasoning", "Hm."), ("content", "Yes.")]),
    ("none", "<think></think>Yes", [("content", "Yes")]),
    ("none", "a <think>b", [("content", "a"), ("reasoning", "b")]),
    ("hermes", "1 < 2 <tool", [("content", "1 < 2 <tool")]),
    ("mistral", "[THINK]x[/THINK]y", [("reasoning", "x"), ("content", "y")]),
    ("gemma", "<|channel>thought\nx<channel|>y", [("reasoning", "x"), ("content", "y")]),
    # hermes
    (
        "hermes",
        'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        [("content", "Let me see."), F1],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n<tool_call>{"name": "g", "argument'
        's": {}}</tool_call>',
        [F1, ("call", "g {}")],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"s": "</tool_call> \\" }"}}</tool_call>ok',
        [("call", 'f {"s": "</tool_call> \\" }"}'), ("content", "ok")],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [F1]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', [F1]),  # never closed
    ("hermes", "<tool_call>nonsense</tool_call> tail", [("content", "<tool_call>nonsense</tool_call> tail")]),
    ("hermes", '<tool_call>{"name": 3}</tool_call>', [("content", '<tool_call>{"name": 3}</tool_call>')]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": ',
        [("content", '<tool_call>{"name": "f", "arguments": {"a": ')],
    ),
    (
        "hermes",
        'x<tool_call>bad <tool_call>{"name": "f", "arguments": {"a": 1}}',
        [("content", "x<tool_call>bad"), F1],
    ),
    (
        "hermes",
        '<think>t</think><tool_call>[{"name": "f", "parameters": {"a": 1}}]</tool_call>',
        [("reasoning", "t"), F1],
    ),
    ("hermes", '{"name": "f", "arguments": {}}', [("content", '{"name": "f", "arguments": {}}')]),
    # XML
    (
        "function_xml",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\n 7\nx\n</parameter>"
        "\n</function>\n</tool_call>",
        [("call", 'f {"a": 1, "s": " 7\\nx"}')],
    ),
    (
        "function_xml",
        "<function=f><parameter=s>12</parameter></function> done",
        [("call", 'f {"s": "12"}'), ("content", "done")],
    ),
    (
        "function_xml",
        "<function=g><parameter=z>[1, true]</parameter><parameter=y>plain</parameter></function>",
        [("call", 'g {"y": "plain", "z": [1, true]}')],
    ),
    ("function_xml", '<function=f>{"a": 1}</function>', [F1]),
    ("function_xml", "<function=f>what", [("content", "<function=f>what")]),
    ("hermes", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", [F1]),
    # Llama 3
    ("llama3", '{"name": "f", "parameters": {"a": 1}}', [F1]),
    (
        "llama3",
        ' {"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        [F1, ("call", "g {}")],
    ),
    ("llama3", '{"answer": 42} is it', [("content", '{"answer": 42} is it')]),
    ("llama3", '{"name": "other", "parameters": {}}', [("content", '{"name": "other", "parameters": {}}')]),
    ("llama3", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', [F1]),
    ("llama3", '<|python_tag|>get_weather.call(city="Köln")', [("call", 'get_weather {"city": "Köln"}')]),
    ("llama3", "<|python_tag|>import os\nprint(1)", [("call", 'python {"code": "import os\\nprint(1)"}')]),
    ("llama3", '<function=f>{"a": 1}</function>', [F1]),
    ("llama3", "[1, 2]", [("content", "[1, 2]")]),
    # Mistral
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        [F1, ("call", "g {}")],
    ),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]\n', [F1]),
    (
        "mistral",
        'ok[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abc123def[ARGS]{}',
        [("content", "ok"), F1, ("call", "g {}")],
    ),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', [F1]),
    ("mistral", "[TOOL_CALLS]oops", [("content", "[TOOL_CALLS]oops")]),
    ("mistral", '[TOOL_CALLS][{"nom": "f"}] x', [("content", '[TOOL_CALLS][{"nom": "f"}] x')]),
    # Gemma
    ("gemma", "```tool_code\nf(a=1)\n```", [F1]),
    (
        "gemma",
        "Sure:\n```tool_code\nprint(get_weather(city='Köln'))\n```\n",
        [("content", "Sure:"), ("call", 'get_weather {"city": "Köln"}')],
    ),
    ("gemma", "[f(a=1), g()]", [F1, ("call", "g {}")]),
    ("gemma", '```json\n{"name": "f", "parameters": {"a": 1}}\n```', [F1]),
    ("gemma", '```json\n{"name": "Bob"}\n```', [("content", '```json\n{"name": "Bob"}\n```')]),
    ("gemma", "```python\nf(a=1)\n```", [("content", "```python\nf(a=1)\n```")]),
    (
        "gemma",
        "<start_function_call>call:f{a:1,s:<escape>x, {y}<escape>}<end_function_call>",
        [("call", 'f {"a": 1, "s": "x, {y}"}')],
    ),
    (
        "gemma",
        '<|tool_call>call:f{s:<|"|>q<|"|>,a:[1,{b:true}]}<tool_call|>',
        [("call", 'f {"a": [1, {"b": true}], "s": "q"}')],
    ),
    ("gemma", "<|tool_call>call:f{s:<tool_call|>", [("content", "<|tool_call>call:f{s:<tool_call|>")]),
    # DeepSeek
    (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f"
        '\n```json\n{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        [F1],
    ),
    (
        "deepseek",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁ca'
        "lls▁end｜>",
        [F1],
    ),
    # harmony
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        [("reasoning", "Hm."), ("content", "Yes.")],
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"a": 1}<|call|>',
        [("reasoning", "Hm."), F1],
    ),
    ("harmony", '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}', [F1]),
    ("harmony", "<|channel|>commentary<|message|>I look it up.<|end|>", [("content", "I look it up.")]),
    (
        "harmony",
        "<|channel|>commentary to=functions.f<|message|>not json<|call|>",
        [("content", "<|channel|>commentary to=functions.f<|message|>not json")],
    ),
    ("harmony", "Plain answer.", [("content", "Plain answer.")]),
    ("harmony", "to be or not", [("content", "to be or not")]),
]


@pytest.mark.parametrize(("format", "text", "expected"), CASES)
def test_answers(format: str, text: str, expected: list[tuple[str, str]]) -> None:
    assert parts(format, [text]) == expected
    assert parts(format, list(text)) == expected
    for cut in range(1, len(text)):
        assert parts(format, [text[:cut], text[cut:]]) == expected


def test_without_tools_nothing_is_a_call() -> None:
    for format, text, _ in CASES:
        assert all(kind != "call" for kind, _ in parts(format, [text], tools=None))
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    assert parts("hermes", [text], tools=None) == [("content", text)]


def test_reasoning_that_the_prompt_has_opened() -> None:
    assert parts("hermes", ["I think\n</think>\n\nYes"], thinking=True) == [
        ("reasoning", "I think"),
        ("content", "Yes"),
    ]
    assert parts("hermes", ["<think>\nI think</think>Yes"], thinking=True) == [
        ("reasoning", "I think"),
        ("content", "Yes"),
    ]
    assert parts("hermes", ["never closed"], thinking=True) == [("reasoning", "never closed")]


def test_reasoning_can_stay_in_the_content() -> None:
    assert parts("hermes", ["<think>a</think>b"], reasoning=False) == [("content", "<think>a</think>b")]
    assert parts("harmony", ["<|channel|>analysis<|message|>a<|end|>"], reasoning=False) == [("content", "a")]


def test_text_leaves_as_soon_as_no_mark_can_begin_in_it() -> None:
    parser = OutputParser("hermes", tools=TOOLS)
    assert [delta.content for delta in parser.push("Hello <to")] == ["Hello"]
    assert [delta.content for delta in parser.push("wn>!")] == [" <town>!"]
    assert parser.push(" <tool_call>") == []
    assert not parser.called
    (delta,) = parser.push('{"name": "g"}</tool_call>')
    assert delta.tool_call is not None
    assert (delta.tool_call.name, delta.tool_call.arguments, delta.tool_call.index) == ("g", "{}", 0)
    assert parser.called
    assert parser.finish() == []


PIECES = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<function=f>",
    "</function>",
    "<parameter=a>",
    "</parameter>",
    "1",
    "text ",
    " \n",
    "\n",
    '{"name": "f", "arguments": {"a": 1}}',
    '{"name": "f", "parameters": {"s": "</tool_call> }"}}',
    "{",
    "}",
    '"',
    "\\",
    "<",
    "[",
    "]",
    "[TOOL_CALLS]",
    '[{"name":"f","arguments":{}}]',
    'f[ARGS]{"a":2}',
    "<|python_tag|>",
    "f(a=1)",
    "```tool_code\n",
    "```",
    "```json\n",
    "call:f{s:<escape>x<escape>}",
    "<start_function_call>",
    "<end_function_call>",
    "<|tool_call>",
    "<tool_call|>",
    "<|channel|>",
    "analysis",
    "commentary to=functions.f ",
    "<|constrain|>json",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|start|>assistant",
    "<|return|>",
    "final",
    "[THINK]",
    "[/THINK]",
    ";",
    "assist",
    "to=",
    "<|channel>thought\n",
    "<channel|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
]


@pytest.mark.parametrize("format", FORMATS)
def test_any_cut_gives_the_same_and_nothing_is_lost(format: str) -> None:
    rng = random.Random(format)
    for _ in range(150):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 14)))
        options = rng.choice([{}, {"thinking": True}, {"tools": None}])
        whole = parts(format, [text], **options)
        assert parts(format, list(text), **options) == whole, text
        cuts = sorted(rng.randint(0, len(text)) for _ in range(3))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
        assert parts(format, pieces, **options) == whole, text
        if (
            format != "harmony"
            and all(kind == "content" for kind, _ in whole)
            and not options.get("thinking")
        ):
            marks = ("<think>", "</think>", "[THINK]", "[/THINK]", "<|channel>thought\n", "<channel|>")
            if not any(mark in text for mark in marks):  # empty reasoning leaves nothing
                assert "".join(text for _, text in whole).strip() == text.strip()


def test_long_output_takes_linear_time() -> None:
    import time

    for text in (
        "<" * 60_000,
        "<tool_call>" + "x" * 60_000,
        "<tool_call>{" + '"a' * 30_000,
        "plain words " * 5000,
    ):
        parser = OutputParser("hermes", tools=TOOLS)
        start = time.process_time()
        for n in range(0, len(text), 4):
            parser.push(text[n : n + 4])
        parser.finish()
        assert time.process_time() - start < 5


# ---- the parts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abc<x>d", (3, "<x>")),
        ("abc<xy", (3, "")),
        ("abc<", (3, "")),
        ("abc", (3, "")),
        ("<xyz>", (0, "<xyz>")),
        ("a<b", (3, "")),
        ("<x><xyz>", (0, "<x>")),
    ],
)
def test_first_mark(text: str, expected: tuple[int, str]) -> None:
    assert first_mark(text, ["<x>", "<xyz>"]) == expected


def test_json_end() -> None:
    for value in ('{"a": [1, "}\\"]"], "b": {}}', "[]", '["\\\\"]'):
        scan = JsonEnd()
        assert scan.find(value + " tail") == len(value)
        scan = JsonEnd()
        assert [scan.find(value[:n]) for n in range(1, len(value))] == [-1] * (len(value) - 1)
        assert scan.find(value) == len(value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        '"f"',
        '{"name": ""}',
        '{"name": "f", "arguments": 3}',
        '{"name": "f", "arguments": "x"}',
        "[" * 100_000,
    ],
)
def test_bodies_that_are_no_json_calls(text: str) -> None:
    assert json_calls(text, {}) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "f",
        "f(x)",
        "f(**{})",
        "a = 1",
        "f(a=g())",
        "import os",
        "f(" * 5000,
        "f(1, 2)",
        "lambda: 0",
        "f(a=open('x'))",
    ],
)
def test_bodies_that_are_no_python_calls(text: str) -> None:
    assert python_calls(text, {"f": {"a": {}}}) is None


def test_python_arguments_by_place() -> None:
    (call,) = python_calls("f(1, s='x')", {"f": {"a": {}, "s": {}}}) or []
    assert json.loads(call.arguments) == {"a": 1, "s": "x"}


def test_types_of_xml_parameters() -> None:
    parameters = {"a": "1", "b": "1", "c": "True", "d": '{"x": 1}'}
    inside = "".join([f"<parameter={name}>{text}</parameter>" for name, text in parameters.items()])
    body = f"<function=f>{inside}</function>"
    (call,) = xml_calls(body, {"f": {"a": {"type": "string"}, "b": {"type": "integer"}}}) or []
    assert json.loads(call.arguments) == {"a": "1", "b": 1, "c": True, "d": {"x": 1}}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("<|start|>{{ x }}<|channel|>final<|message|>", "harmony"),
        ("[TOOL_CALLS]", "mistral"),
        ("<tool_call>{{ tools }}", "hermes"),
        ("<tool_call><function=name>", "function_xml"),
        ('<|start_header_id|> "parameters"', "llama3"),
        ("<|python_tag|>", "llama3"),
        ("<start_function_call>", "gemma"),
        ("<|tool_call>call:", "gemma"),
        ("<｜tool▁calls▁begin｜>", "deepseek"),
        (DEFAULTS["chatml"], "hermes"),
    ],
)
def test_format_of(source: str, expected: str) -> None:
    assert format_of(source) == expected
    assert (
        format_of(
            ChatTemplate(
                "x", tool_source="{# " + source.replace("{{", "").replace("}}", "").replace("{%", "") + " #}"
            )
        )
        == expected
    )


def test_unknown_format() -> None:
    with pytest.raises(ArgumentError, match="there is none of that name"):
        OutputParser("nonesuch")


def test_names_of_calls() -> None:
    assert len({new_id() for _ in range(100)}) == 100
    assert OutputParser("harmony").markers >= {"<|channel|>", "<|message|>"}
    assert "[TOOL_CALLS]" in OutputParser("mistral").markers
