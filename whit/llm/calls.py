"""What stands between the tags of a tool call, in the ways that model families write it: JSON, XML, Python.
Each reader gives the calls of a body, or None for a body that it cannot make out."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Schemas = Mapping[str, Mapping[str, Any]]  # the properties of each tool's parameters, by the tool's name

_MOST = 1 << 20  # characters of a body


class Call(NamedTuple):
    """A call of a tool; `arguments` is the JSON text of an object."""

    name: str
    arguments: str


Reader = Callable[[str, Schemas], "list[Call] | None"]


def schemas_of(tools: Sequence[Mapping[str, Any]] | None) -> Schemas:
    """The tools' names and the properties of their parameters, from OpenAI's definitions."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools or ():
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            found[function["name"]] = properties if isinstance(properties, Mapping) else {}
    return found


def make(name: Any, arguments: Any) -> Call | None:
    """A call, None if its parts are of the wrong kind."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return None
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict):
        return None
    return Call(name.strip(), json.dumps(arguments, ensure_ascii=False))


# ---- JSON --------------------------------------------------------------------------------------------------


class JsonEnd:
    """Finds where a JSON value ends in text that grows, looking at each character once."""

    def __init__(self) -> None:
        self.at, self.depth, self.quoted, self.escaped = 0, 0, False, False

    def find(self, text: str) -> int:
        """The place behind the value that the text begins with (an object, a list), -1 if it goes on."""
        while self.at < len(text):
            char = text[self.at]
            self.at += 1
            if self.quoted:
                if self.escaped:
                    self.escaped = False
                elif char == "\\":
                    self.escaped = True
                elif char == '"':
                    self.quoted = False
            elif char == '"':
                self.quoted = True
            elif char in "{[":
                self.depth += 1
            elif char in "}]":
                self.depth -= 1
                if self.depth <= 0:
                    return self.at
        return -1


def loads(text: str) -> Any:
    """The value of a JSON text, None if it is none."""
    if len(text) > _MOST:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def json_calls(body: str, schemas: Schemas) -> list[Call] | None:
    """`{"name": …, "arguments" or "parameters": {…}}`, or a list of such objects."""
    value = loads(body)
    found = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, dict):
            return None
        function = item["function"] if isinstance(item.get("function"), dict) else item
        arguments = function.get("arguments", function.get("parameters"))
        call = make(function.get("name"), {} if arguments is None else arguments)
        if call is None or (arguments is None and len(function) > 2):
            return None
        found.append(call)
    return found or None


def json_lines(body: str, schemas: Schemas) -> list[Call] | None:
    """JSON calls one after the other, with nothing or ";" between them."""
    found: list[Call] = []
    rest = body.strip()
    while rest:
        end = JsonEnd().find(rest) if rest[0] in "{[" else -1
        calls = json_calls(rest[:end], schemas) if end > 0 else None
        if calls is None:
            return None
        found += calls
        rest = rest[end:].lstrip(" \t\r\n;,")
    return found or None


# ---- XML ---------------------------------------------------------------------------------------------------

_FUNCTION = re.compile(r"<function=([^>\s]+)\s*>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)\s*>(.*?)</parameter>", re.DOTALL)
_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _typed(text: str, schema: Any) -> Any:
    """A parameter's value: as its schema says, else JSON if it looks like it, else text."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text, text)
    return value if kind is not None or not isinstance(value, str) else text


def _values(pairs: list[tuple[str, str]], properties: Mapping[str, Any]) -> dict[str, Any]:
    return {key.strip(): _typed(_unwrapped(text), properties.get(key.strip())) for key, text in pairs}


def _unwrapped(text: str) -> str:
    """Without the line breaks that the format puts around a value."""
    return text.removeprefix("\n").removesuffix("\n")


def xml_calls(body: str, schemas: Schemas) -> list[Call] | None:
    """`<function=name><parameter=key>value</parameter></function>`, or JSON inside of `<function=name>`."""
    found, rest = [], _FUNCTION.sub("", body).strip()
    for name, inner in _FUNCTION.findall(body):
        pairs = _PARAMETER.findall(inner)
        left = _PARAMETER.sub("", inner).strip()
        call = make(name, _values(pairs, schemas.get(name, {}))) if not left else None
        if left and not pairs:
            call = make(name, left)
        if call is None:
            return None
        found.append(call)
    return found if found and not rest else None


def pair_calls(body: str, schemas: Schemas) -> list[Call] | None:
    """`name`, then `<arg_key>key</arg_key><arg_value>value</arg_value>` …"""
    name, mark, rest = body.strip().partition("<arg_key>")
    pairs = _PAIR.findall(mark + rest)
    if not pairs and name.strip() not in schemas:  # a word alone
        return None
    if not re.fullmatch(r"[\w.-]+\s*", name) or _PAIR.sub("", mark + rest).strip():
        return None
    call = make(name, _values(pairs, schemas.get(name.strip(), {})))
    return None if call is None else [call]


def tagged_calls(body: str, schemas: Schemas) -> list[Call] | None:
    """What stands between `<tool_call>` tags, whichever family wrote it."""
    return json_lines(body, schemas) or xml_calls(body, schemas) or pair_calls(body, schemas)


# ---- Python ------------------------------------------------------------------------------------------------


def python_calls(body: str, schemas: Schemas) -> list[Call] | None:
    """Python calls with constant arguments: `f(a=1)`, `[f(a=1), g(b="x")]`, `print(f(a=1))`, a line each."""
    if len(body) > _MOST:
        return None
    try:
        tree = ast.parse(body.strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    found = []
    for statement in tree.body:
        value = getattr(statement, "value", None)
        for node in value.elts if isinstance(value, ast.List) else [value]:
            call = _python_call(node, schemas)
            if call is None:
                return None
            found.append(call)
    return found or None


def _python_call(node: Any, schemas: Schemas) -> Call | None:
    if not isinstance(node, ast.Call):
        return None
    name = ast.unparse(node.func)
    if (
        name == "print"
        and "print" not in schemas
        and len(node.args) == 1
        and isinstance(node.args[0], ast.Call)
    ):
        return _python_call(node.args[0], schemas)
    names = list(schemas.get(name, {}))
    if (
        len(node.args) > len(names)
        or not re.fullmatch(r"[\w.]+", name)
        or any(k.arg is None for k in node.keywords)
    ):
        return None
    pairs = [*zip(names, node.args), *((str(keyword.arg), keyword.value) for keyword in node.keywords)]
    try:
        values = {key: ast.literal_eval(value) for key, value in pairs}
        return make(name.removesuffix(".call"), values)
    except (ValueError, TypeError, RecursionError, MemoryError, SyntaxError):
        return None


# ---- call:name{key:value} ----------------------------------------------------------------------------------

_HEAD = re.compile(r"\s*call:([\w.-]+)\s*")
_KEY = re.compile(r"\s*([\w.-]+)\s*:")
_BARE = re.compile(r"[^,{}\[\]]*")
_QUOTES = ("<escape>", '<|"|>', '"')


class _Braces:
    """Reads `{key:value,…}` whose texts stand between marks."""

    def __init__(self, text: str, at: int) -> None:
        self.text, self.at = text, at

    def skip(self, char: str) -> bool:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
        if self.text.startswith(char, self.at):
            self.at += len(char)
            return True
        return False

    def value(self, depth: int = 0) -> Any:
        if depth > 64:
            raise ValueError("too deep")
        if self.skip("{"):
            return self.members(depth)
        if self.skip("["):
            items: list[Any] = []
            while not self.skip("]"):
                items.append(self.value(depth + 1))
                if not self.skip(",") and not self.text.startswith("]", self.at):
                    raise ValueError("a list goes on")
            return items
        for quote in _QUOTES:
            if self.skip(quote):
                end = self.text.index(quote, self.at)
                found, self.at = self.text[self.at : end], end + len(quote)
                return found
        bare = _BARE.match(self.text, self.at)
        assert bare is not None, "it matches nothing, too"
        self.at = bare.end()
        return _typed(bare[0].strip(), None)

    def members(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self.skip("}"):
            key = _KEY.match(self.text, self.at)
            if key is None:
                raise ValueError("a key is missing")
            self.at = key.end()
            found[key[1]] = self.value(depth + 1)
            if not self.skip(",") and not self.text.startswith("}", self.at):
                raise ValueError("an object goes on")
        return found


def brace_calls(body: str, schemas: Schemas) -> list[Call] | None:
    """`call:name{key:<escape>text<escape>,other:3}`."""
    head = _HEAD.match(body)
    if head is None:
        return None
    reader = _Braces(body, head.end())
    try:
        call = make(head[1], reader.value())
    except (ValueError, RecursionError):
        return None
    return [call] if call is not None and not body[reader.at :].strip() else None


# ---- marks between parts -----------------------------------------------------------------------------------


def mistral_calls(body: str, schemas: Schemas) -> list[Call] | None:
    """After `[TOOL_CALLS]`: a JSON list, or `name[ARGS]{…}` (also with `[CALL_ID]id` between, or no
    marks)."""
    body = body.strip()
    if body.startswith(("[{", "{", "[ ", "[\n")):
        return json_calls(body, schemas)
    parts = re.match(r"([\w.-]+)(?:\[CALL_ID\]\w+)?\s*(?:\[ARGS\])?\s*(\{.*)\Z", body, re.DOTALL)
    call = None if parts is None else make(parts[1], parts[2])
    return None if call is None else [call]


_DEEPSEEK = re.compile(
    r"(?:function)?<｜tool▁sep｜>([^\n]+)\n```(?:json)?\n(.*?)\n?```\s*|([\w.-]+)<｜tool▁sep｜>(\{.*\})\s*",
    re.DOTALL,
)


def deepseek_calls(body: str, schemas: Schemas) -> list[Call] | None:
    """`<｜tool▁call▁begin｜>…<｜tool▁call▁end｜>` one after the other."""
    found = []
    for part in body.replace("<｜tool▁call▁begin｜>", "").split("<｜tool▁call▁end｜>"):
        if not part.strip():
            continue
        inner = _DEEPSEEK.fullmatch(part.strip())
        call = None if inner is None else make(inner[1] or inner[3], inner[2] if inner[1] else inner[4])
        if call is None:
            return None
        found.append(call)
    return found or None


def code_call(body: str, schemas: Schemas) -> list[Call] | None:
    """After `<|python_tag|>`: JSON calls, a call of a tool in Python, or else code for the tool "python"."""
    found = json_lines(body, schemas) or python_calls(body, schemas)
    if found is not None and all(call.name in schemas or not schemas for call in found):
        return found
    return [Call("python", json.dumps({"code": body.strip()}, ensure_ascii=False))] if body.strip() else None
