"""Chat templates: messages to the prompt that a model was trained on, as its file says in Jinja.

Rendered as `transformers` renders them: a sandbox without access to Python, `trim_blocks`, `lstrip_blocks`,
`break` and `continue`, `{% generation %}`, `tojson`, `raise_exception`, `strftime_now`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from whit.helpers import ArgumentError, FileFormatError
from whit.llm.texts import find_texts

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    from whit.llm.tokenizer import Tokenizer
    from whit.nn.gguf import GGUF

Message = Mapping[str, Any]

MOST_TEMPLATE = 1 << 20  # characters of a template
MOST_TEXT = 1 << 26  # characters that a template may write or multiply up to

# ---- templates for files without one -----------------------------------------------------------------------

_GEMMA = """{{ bos_token }}{%- set first = '' -%}
{%- if messages and messages[0].role in ('system', 'developer') -%}
{%- set first = messages[0].content | trim + '\\n\\n' -%}{%- set messages = messages[1:] -%}
{%- endif -%}
{%- for message in messages -%}
{%- set role = {'assistant': 'model', 'tool': 'user'}.get(message.role, message.role) -%}
{{- '<start_of_turn>' + role + '\\n' + (first if loop.first else '') + message.content | trim
 + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if not messages and first -%}{{- '<start_of_turn>user\\n' + first | trim
 + '<end_of_turn>\\n' -}}{%- endif -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"""

_CHATML = """{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""

_LLAMA2 = """{%- set first = '' -%}
{%- if messages and messages[0].role == 'system' -%}
{%- set first = '<<SYS>>\\n' + messages[0].content | trim + '\\n<</SYS>>\\n\\n' -%}
{%- set messages = messages[1:] -%}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}{{- ' ' + message.content | trim + ' ' + eos_token -}}
{%- else -%}{{- bos_token + '[INST] ' + (first if loop.first else '') + message.content | trim
 + ' [/INST]' -}}
{%- endif -%}
{%- endfor -%}"""

_LLAMA3 = """{{- bos_token -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim
 + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"""

_MISTRAL = """{{- bos_token -}}{%- set first = '' -%}
{%- if messages and messages[0].role == 'system' -%}
{%- set first = messages[0].content + '\\n\\n' -%}{%- set messages = messages[1:] -%}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}{{- ' ' + message.content | trim + eos_token -}}
{%- else -%}{{- '[INST] ' + (first if loop.first else '') + message.content + '[/INST]' -}}
{%- endif -%}
{%- endfor -%}"""

_PHI3 = """{%- for message in messages -%}
{{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}"""

_ZEPHYR = """{%- for message in messages -%}
{{- '<|' + message.role + '|>\\n' + message.content + eos_token + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}"""

_PLAIN = """{{- bos_token -}}
{%- for message in messages -%}
{{- {'user': 'User', 'assistant': 'Assistant'}.get(message.role, message.role | capitalize) + ': ' -}}
{{- message.content | trim + '\\n\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}"""

DEFAULTS = {
    "gemma": _GEMMA, "chatml": _CHATML, "llama2": _LLAMA2, "llama3": _LLAMA3, "mistral": _MISTRAL,
    "phi3": _PHI3, "zephyr": _ZEPHYR, "plain": _PLAIN,
}  # fmt: skip

# the default for a vocabulary that has all of some tokens; the first row that fits
_TELLING: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<start_of_turn>", "<end_of_turn>"), "gemma"),
    (("<|start_header_id|>", "<|eot_id|>"), "llama3"),
    (("<|im_start|>", "<|im_end|>"), "chatml"),
    (("[INST]", "[/INST]"), "mistral"),
    (("<|user|>", "<|assistant|>", "<|end|>"), "phi3"),
    (("<|user|>", "<|assistant|>"), "zephyr"),
)


def default_template(tokenizer: Tokenizer, architecture: str = "") -> str:
    """The name (in `DEFAULTS`) of the template for a file that has none, by the special tokens that it
    has."""
    names = {name for row, _ in _TELLING for name in row}
    have = find_texts(tokenizer.vocabulary.tokens, names)
    for row, name in _TELLING:
        if have.keys() >= set(row):
            return name
    return "llama2" if architecture == "llama" and tokenizer.vocabulary.model == "llama" else "plain"


# ---- rendering ---------------------------------------------------------------------------------------------


class ChatTemplate:
    """A chat template and the special tokens that it may name.

    >>> chat = ChatTemplate(DEFAULTS["chatml"])
    >>> chat.render([{"role": "user", "content": "Hi"}])
    '<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n'
    """

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str] | None = None,
        *,
        tool_source: str | None = None,
        name: str = "",
    ) -> None:
        self.source, self.tool_source, self.name = source, tool_source, name
        self.tokens = {"bos_token": "", "eos_token": ""} | dict(tokens or {})
        for text in (source, tool_source):
            if text is not None:
                _compiled(text)

    @classmethod
    def from_gguf(cls, gguf: GGUF, tokenizer: Tokenizer) -> ChatTemplate:
        """The template of a file, or else the one that its special tokens suggest (`name` says which).

        Errors: FileFormatError for a template that is no Jinja.
        """
        return cls.from_metadata(gguf.metadata, tokenizer)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate:
        """The same from metadata alone."""
        vocabulary = tokenizer.vocabulary
        tokens = {
            "bos_token": vocabulary.text(vocabulary.bos), "eos_token": vocabulary.text(vocabulary.eos),
            "unk_token": vocabulary.text(vocabulary.unknown), "pad_token":
            vocabulary.text(vocabulary.padding),
        }  # fmt: skip
        source, tool_source = (metadata.get("tokenizer.chat_template" + end) for end in ("", ".tool_use"))
        tool_source = tool_source if isinstance(tool_source, str) else None
        if isinstance(source, str) and source.strip():
            return cls(source, tokens, tool_source=tool_source)
        name = default_template(tokenizer, str(metadata.get("general.architecture", "")))
        return cls(DEFAULTS[name], tokens, tool_source=tool_source, name=name)

    def __repr__(self) -> str:
        return f"ChatTemplate({self.name or repr(self.source[:40])})"

    @property
    def takes_tools(self) -> bool:
        """Whether the template itself tells the model of tools."""
        return self.tool_source is not None or "tools" in self.source

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        **extra: Any,
    ) -> str:
        """The prompt for a conversation. Encode it with `special=True`.

        messages: dicts with "role", "content" (text, parts of kind "text", or None), "tool_calls", …
        tools: function definitions as OpenAI's. A template without tools gets them as a system message that
        asks for `<tool_call>{…}</tool_call>`. continue_final_message: the model goes on with the last
        message. extra: further variables of the template (`enable_thinking`, …).

        Errors: ArgumentError for messages of a wrong form, and with the template's own words where it refuses
        them; FileFormatError if the template itself is wrong.
        """
        source = self.tool_source if tools and self.tool_source is not None else self.source
        listed = "'type'" in source or '"type"' in source or ".type" in source
        checked = [_message(number, message, listed) for number, message in enumerate(_listed(messages))]
        given = list(tools) if tools else None
        if given and not self.takes_tools:
            checked, given = _with_tools(checked, given), None
        variables: dict[str, Any] = {**self.tokens, "tools": given, "documents": None, **extra}
        variables["messages"] = checked
        variables["add_generation_prompt"] = add_generation_prompt and not continue_final_message
        text = _run(source, variables)
        return _cut_after(text, checked) if continue_final_message else text


def thinking_open(prompt: str) -> bool:
    """Whether a prompt leaves the model inside a reasoning block, as some templates end.

    >>> thinking_open("<|im_start|>assistant\\n<think>\\n")
    True
    """
    end = prompt[-200:].rstrip()
    return end.endswith(("<think>", "[THINK]", "<|channel>thought"))


def _listed(messages: Sequence[Message]) -> Sequence[Message]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise _wrong("messages", f"it is {type(messages).__name__}, no list")
    if not messages:
        raise _wrong("messages", "there are none")
    return messages


def _wrong(what: str, because: str) -> ArgumentError:
    return ArgumentError(what, because=because, fix='pass a list like [{"role": "user", "content": "…"}]')


def _message(number: int, message: Message, listed: bool) -> dict[str, Any]:
    """A message as templates want it: text for parts, objects for the JSON text of arguments."""
    what = f"messages[{number}]"
    if not isinstance(message, Mapping):
        raise _wrong(what, f"it is {type(message).__name__}, no object")
    found = dict(message)
    if not isinstance(found.get("role"), str):
        raise _wrong(what, "it has no role")
    found["content"] = _content(what, found.get("content"), listed)
    calls = found.get("tool_calls")
    if calls is None:
        found.pop("tool_calls", None)
    else:
        if isinstance(calls, (str, Mapping)) or not isinstance(calls, Sequence):
            raise _wrong(f"{what}.tool_calls", "it is no list")
        found["tool_calls"] = [_call(f"{what}.tool_calls[{n}]", call) for n, call in enumerate(calls)]
    return found


def _content(what: str, content: Any, listed: bool) -> Any:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping) or not isinstance(content, Sequence):
        raise _wrong(f"{what}.content", f"it is {type(content).__name__}, neither text nor a list of parts")
    for number, part in enumerate(content):
        if not (
            isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        ):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise _wrong(
                f"{what}.content[{number}]",
                f"it is of kind {str(kind)[:40]!r}; only text parts are supported",
            )
    return [dict(part) for part in content] if listed else "\n".join(part["text"] for part in content)


def _call(what: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _wrong(what, "it has no function with a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except ValueError:
            parsed = arguments
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": {**function, "arguments": arguments}}


_ASK = """You can call functions. These are their signatures, in JSON:
{tools}

To call one, answer with its name and arguments as JSON inside of tags, one pair of tags a call:
<tool_call>
{{"name": "<name>", "arguments": {{<arguments>}}}}
</tool_call>"""


def _with_tools(messages: list[dict[str, Any]], tools: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages for a template that knows no tools: what they are goes into the system message, calls and
    results become text."""
    ask = _ASK.format(tools="\n".join(_to_json(tool) for tool in tools))
    found: list[dict[str, Any]] = []
    for message in messages:
        text = (
            message["content"]
            if isinstance(message["content"], str)
            else "\n".join(p["text"] for p in message["content"])
        )
        for call in message.get("tool_calls", ()):
            body = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
            text += ("\n" if text else "") + f"<tool_call>\n{_to_json(body)}\n</tool_call>"
        if message["role"] == "tool":
            found.append({"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"})
        else:
            found.append({"role": message["role"], "content": text})
    if found[0]["role"] == "system":
        found[0]["content"] += "\n\n" + ask
    else:
        found.insert(0, {"role": "system", "content": ask})
    return found


def _cut_after(text: str, messages: list[dict[str, Any]]) -> str:
    """The prompt up to the end of the last message's text."""
    last = messages[-1]["content"]
    last = last if isinstance(last, str) else last[-1]["text"] if last else ""
    at = text.rfind(last.strip()) if last.strip() else -1
    if at < 0:
        raise ArgumentError("continue_final_message", because="the prompt lacks the last message's text",
                            fix="end the messages with one that has text")  # fmt: skip
    return text[: at + len(last.strip())]


# ---- Jinja -------------------------------------------------------------------------------------------------


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
             sort_keys: bool = False) -> str:  # fmt: skip
    # not Jinja's own, which writes < as \u003c for web pages
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


@lru_cache(1)
def _environment() -> ImmutableSandboxedEnvironment:
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.runtime import Context
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what a model wrote, for training; here it is nothing but its body."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Sandbox(ImmutableSandboxedEnvironment):
        """Refuses to build texts and numbers without bounds, too."""

        intercepted_binops = frozenset(("*", "**"))

        def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
            size = max((len(x) if hasattr(x, "__len__") else 1) * (y if isinstance(y, int) else 1)
                       for x, y in ((left, right), (right, left)))  # fmt: skip
            if size > MOST_TEXT or (operator == "**" and isinstance(right, int) and abs(right) > 64):
                raise SecurityError(f"{operator} gives a result that is too large")
            return super().call_binop(context, operator, left, right)

        def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(getattr(__obj, "__self__", None), str) and any(
                isinstance(a, int) and a > MOST_TEXT for a in (*args, *kwargs.values())
            ):
                raise SecurityError("it asks for a text that is too long")
            return super().call(__context, __obj, *args, **kwargs)

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    found = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    found.filters["tojson"] = _to_json
    found.globals["raise_exception"] = refuse
    found.globals["strftime_now"] = _strftime_now
    return found


@lru_cache(32)
def _compiled(source: str) -> Any:
    from jinja2 import TemplateSyntaxError

    if len(source) > MOST_TEMPLATE:
        raise FileFormatError(
            "chat template", because=f"it has {len(source)} characters", fix="pass a template of yours"
        )
    try:
        return _environment().from_string(source)
    except (TemplateSyntaxError, RecursionError) as error:
        line = getattr(error, "lineno", 0)
        raise FileFormatError(
            "chat template",
            because=f"it is no valid Jinja, line {line}: {error}",
            fix="pass a template of yours",
        ) from error


def _run(source: str, variables: dict[str, Any]) -> str:
    from jinja2 import TemplateError
    from jinja2.exceptions import SecurityError, TemplateRuntimeError, UndefinedError

    parts, size = [], 0
    try:
        for part in _compiled(source).generate(**variables):
            size += len(part)
            if size > MOST_TEXT:
                raise SecurityError(f"it writes more than {MOST_TEXT} characters")
            parts.append(part)
    except (SecurityError, UndefinedError, TemplateRuntimeError, RecursionError, ArithmeticError,
    LookupError, TypeError,
            ValueError, AttributeError, MemoryError) as error:  # fmt: skip
        raise ArgumentError(
            "chat template", because=f"it failed on these messages: {error}", fix="check roles and contents"
        ) from error
    except TemplateError as error:  # raise_exception
        raise ArgumentError("chat template", because=f"it refuses these messages: {error}",
                            fix="do as it says") from error  # fmt: skip
    return "".join(parts)
