"""Chat templates: what `transformers` renders from the same templates, defaults, and refusals."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest

from whit.helpers import ArgumentError, FileFormatError
from whit.llm.chat import DEFAULTS, ChatTemplate, default_template, thinking_open
from whit.llm.tokenizer import Tokenizer

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Weather <now> & "later", für Köln',
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]

TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hi there\n"},
    {"role": "assistant", "content": "Hello <b>!"},
    {"role": "user", "content": "Weather in Köln?"},
]
CALLS: list[dict[str, Any]] = [
    *TALK,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": '{"rain": true}'},
]

# templates of our own that use what real ones use
TEMPLATES = {
    "blocks": """
    {% for message in messages %}
        {% if loop.first and message['role'] != 'system' %}
<|start|>default
        {% endif %}
<|{{ message['role'] }}|>
{{ message['content'] | trim }}
    {% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}
""",
    "tools": """{%- if tools %}{{- 'Tools:' }}{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}\
{{- tool | tojson(indent=2) }}
{%- endfor %}{%- endif %}
{%- for m in messages %}{%- if m.tool_calls %}{%- for call in m.tool_calls %}\
{{- call.function.name + call.function.arguments | tojson }}
{%- endfor %}{%- elif m.role == 'tool' %}{{- '<r>' + m.content + '</r>' }}{%- else %}\
{{- m.role + ':' + m.content }}{%- endif %}{%- endfor %}""",
    "namespace": """{%- set ns = namespace(found=false, n=0) %}{%- for m in messages %}\
{%- set ns.n = ns.n + 1 %}
{%- if m.role == 'assistant' %}{%- set ns.found = true %}{%- endif %}{%- endfor %}\
{{ ns.found }} {{ ns.n }} {{ bos_token }}{{ eos_token }}""",
    "loops": """{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}\
{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}""",
    "generation": """{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}\
{% endgeneration %}{% else %}{{ m.role }}{% endif %}{% endfor %}""",
    "filters": """{{ messages | length }}{{ messages[-1].content | upper | replace('W', 'v') }}\
{{ messages | map(attribute='role') | join(',') }}
{{- messages | selectattr('role', 'equalto', 'user') | list | length }}{{ 'a,b'.split(',') }}\
{{ messages[1:] | last | string | length > 3 }}
{%- macro show(x) %}[{{ x }}]{% endmacro %}{{ show(messages[0].role) }}\
{{ {'a': [1, 2.5, none, true]} | tojson }}{{ messages[0].get('name', 'nobody') }}""",
    "thinking": """{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else \
%}<think>{% endif %}{{ undefined_thing }}{{ documents }}""",
}


def reference(source: str, messages: list[dict[str, Any]], tools: Any, prompt: bool, **extra: Any) -> str:
    pytest.importorskip("transformers")
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(
        conversations=[messages],
        tools=tools,
        chat_template=source,
        add_generation_prompt=prompt,
        **TOKENS,
        **extra,
    )
    return str(rendered[0])


@pytest.mark.parametrize("name", [*TEMPLATES, *DEFAULTS])
def test_renders_as_transformers_does(name: str) -> None:
    source = TEMPLATES.get(name) or DEFAULTS[name]
    for messages, tools in ((TALK, None), (TALK[1:], None), (CALLS if name in TEMPLATES else TALK, TOOLS)):
        if tools and "tools" not in source:
            continue
        for prompt in (True, False):
            for extra in ({}, {"enable_thinking": False}):
                ours = ChatTemplate(source, TOKENS).render(messages, tools, prompt, **extra)
                assert ours == reference(source, messages, tools, prompt, **extra)


# what the models' own templates give for these conversations, written out
EXPECTED = {
    "gemma": "<s><start_of_turn>user\nBe brief.\n\nHi there<end_of_turn>\n<start_of_turn>model"
    "\nHello <b>!<end_of_turn>\n"
    "<start_of_turn>user\nWeather in Köln?<end_of_turn>\n<start_of_turn>model\n",
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hi there\n<|im_end|>"
    "\n<|im_start|>assistant\nHello <b>!<|im_end|>\n"
    "<|im_start|>user\nWeather in Köln?<|im_end|>\n<|im_start|>assistant\n",
    "llama2": "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi there [/INST] Hello <b>! </s><s>[INST] Weath"
    "er in Köln? [/INST]",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>us"
    "er<|end_header_id|>\n\nHi there<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nHello <b>!<|eot_id|><|start_header_id|>user<|end_h"
    "eader_id|>\n\nWeather in Köln?"
    "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_defaults(name: str) -> None:
    assert ChatTemplate(DEFAULTS[name], TOKENS).render(TALK) == EXPECTED[name]


def tokenizer_with(*names: str, model: str = "gpt2") -> Tokenizer:
    tokens = ["a", "<unk>", "<s>", *names]
    return Tokenizer.from_metadata(
        {
            "tokenizer.ggml.model": model,
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.scores": [0.0] * len(tokens),
            "tokenizer.ggml.bos_token_id": 2,
            "tokenizer.ggml.eos_token_id": 1,
        }
    )


@pytest.mark.parametrize(
    ("names", "model", "architecture", "expected"),
    [
        (("<start_of_turn>", "<end_of_turn>"), "llama", "gemma3", "gemma"),
        (("<|im_start|>", "<|im_end|>"), "gpt2", "qwen2", "chatml"),
        (("<|start_header_id|>", "<|eot_id|>"), "gpt2", "llama", "llama3"),
        (("[INST]", "[/INST]"), "gpt2", "llama", "mistral"),
        (("<|user|>", "<|assistant|>", "<|end|>"), "llama", "phi3", "phi3"),
        (("<|user|>", "<|assistant|>"), "llama", "llama", "zephyr"),
        ((), "llama", "llama", "llama2"),
        ((), "gpt2", "gpt2", "plain"),
    ],
)
def test_default_by_the_tokens_of_a_file(
    names: tuple[str, ...], model: str, architecture: str, expected: str
) -> None:
    tokenizer = tokenizer_with(*names, model=model)
    assert default_template(tokenizer, architecture) == expected
    chat = ChatTemplate.from_metadata({"general.architecture": architecture}, tokenizer)
    assert chat.name == expected
    assert chat.tokens["bos_token"] == "<s>"


def test_template_of_the_file() -> None:
    metadata = {
        "tokenizer.chat_template": "A{{ bos_token }}",
        "tokenizer.chat_template.tool_use": "B{{ tools | length }}",
    }
    chat = ChatTemplate.from_metadata(metadata, tokenizer_with())
    assert chat.render(TALK) == "A<s>"
    assert chat.render(TALK, TOOLS) == "B1"


def test_messages_as_the_interface_gives_them() -> None:
    chat = ChatTemplate(
        "{% for m in messages %}{{ m.role }}={{ m.content }};{% for c in m.tool_calls %}{{ c.function.ar"
        "guments.city }}{% endfor %}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    assert chat.render(messages) == "user=a\nb;assistant=;Rome"
    listed = ChatTemplate(
        "{% for p in messages[0].content %}{% if p['type'] == 'text' %}<{{ p.text }}>{% endif %}{% endfor %}"
    )
    assert listed.render(messages) == "<a><b>"
    assert messages[1]["content"] is None  # untouched


def test_a_template_without_tools_is_told_of_them() -> None:
    text = ChatTemplate(DEFAULTS["chatml"]).render(CALLS, TOOLS)
    assert json.dumps(TOOLS[0], ensure_ascii=False) in text
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>' in text
    assert '<tool_response>\n{"rain": true}\n</tool_response>' in text
    assert text.startswith("<|im_start|>system\nBe brief.\n\n")
    assert "<tool_call>" in ChatTemplate(DEFAULTS["gemma"]).render(TALK[1:], TOOLS)


def test_continue_final_message() -> None:
    messages = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "1, 2, "}]
    text = ChatTemplate(DEFAULTS["chatml"]).render(messages, continue_final_message=True)
    assert text == "<|im_start|>user\nCount<|im_end|>\n<|im_start|>assistant\n1, 2,"
    with pytest.raises(ArgumentError, match="lacks the last message's text"):
        ChatTemplate("x").render(messages, continue_final_message=True)


def test_time() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(TALK) == str(datetime.datetime.now().year)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a<think>\n", True), ("<think>\n\n</think>\n\n", False), ("", False), ("x[THINK]", True)],
)
def test_thinking_open(prompt: str, expected: bool) -> None:
    assert thinking_open(prompt) is expected


# ---- refusals ----------------------------------------------------------------------------------------------


def test_a_template_that_raises_is_reported_with_its_words() -> None:
    chat = ChatTemplate("{{ raise_exception('Roles must alternate!') }}")
    with pytest.raises(ArgumentError, match="refuses these messages: Roles must alternate!"):
        chat.render(TALK)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[99].content.x }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ [].pop() }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__['os'] }}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ 'a'.center(10 ** 10) }}",
        "{% for a in range(10 ** 9) %}{% endfor %}",
        "{% set x = ['a' * 1000000] %}{% for n in range(9999) %}{{ x[0] }}{% endfor %}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{% include 'x' %}",
        "{{ 'abc' | nonesuch }}",
    ],
)
def test_broken_and_hostile_templates(source: str) -> None:
    with pytest.raises((ArgumentError, FileFormatError), match="chat template"):
        ChatTemplate(source).render(TALK)


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ a", "{% endfor %}", "{{ 'a' | }}", "{% for x in y %}", "x" * (1 << 21)]
)
def test_templates_that_are_no_jinja(source: str) -> None:
    with pytest.raises(FileFormatError, match="chat template"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "there are none"),
        ("hello", "no list"),
        ({"role": "user"}, "no list"),
        (["hello"], r"messages\[0\].*no object"),
        ([{"content": "a"}], "no role"),
        ([{"role": 3, "content": "a"}], "no role"),
        ([{"role": "user", "content": 3}], "neither text nor"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "only text parts"),
        ([{"role": "user", "content": ["a"]}], "only text parts"),
        ([{"role": "assistant", "content": "", "tool_calls": "x"}], "it is no list"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}], "no function with a name"),
        ([{"role": "assistant", "content": "", "tool_calls": [7]}], "no function with a name"),
    ],
)
def test_messages_of_a_wrong_form(messages: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ChatTemplate(DEFAULTS["chatml"]).render(messages)
