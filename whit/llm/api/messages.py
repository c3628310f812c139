"""Conversations as clients send them, checked, and turned into what chat templates take: `role`, `content` as
text, `reasoning_content`, `tool_calls` whose arguments are objects, `tool_call_id`, `name`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from whit.llm.api.errors import ApiError
from whit.llm.api.fields import (
    Check,
    array,
    boolean,
    choice,
    either,
    mapping,
    record,
    string,
    tagged,
    unsupported,
    wrong_type,
    wrong_value,
)

Message = dict[str, Any]
NAME = string(1, 256)
IMAGE_NOTE = "[The user attached an image here. You cannot see images.]"


# ---- parts of contents -------------------------------------------------------------------------------------


def _image(value: Any, path: str) -> Any:
    """An image part; whether it is answered or refused is decided by `text_of`."""
    if not isinstance(value, dict):
        raise wrong_type(path, value, "an object")
    return value


def _no_media(kind: str) -> Check:
    def check(value: Any, path: str) -> Any:
        raise wrong_value(path, f"this model does not read {kind}", "send text", "unsupported_content")

    return check


_TEXT = record({"type": choice("text"), "text": string()}, required=("text",))
_REFUSAL = record({"type": choice("refusal"), "refusal": string()}, required=("refusal",))
_USER_PARTS = tagged(
    {
        "text": _TEXT,
        "image_url": record(
            {
                "type": choice("image_url"),
                "image_url": record({"url": string(1), "detail": choice("auto", "low", "high")}, ("url",)),
            },
            required=("image_url",),
        ),
        "input_audio": _no_media("audio"),
        "file": _no_media("files"),
    }
)
_CONTENT = either((str, string()), (list, array(_TEXT, 1)), wanted="a string or an array of text parts")
_USER_CONTENT = either((str, string()), (list, array(_USER_PARTS, 1)), wanted="a string or an array of parts")
_ASSISTANT_CONTENT = either(
    (str, string()),
    (list, array(tagged({"text": _TEXT, "refusal": _REFUSAL}), 1)),
    wanted="a string or an array of parts",
)

# ---- messages ----------------------------------------------------------------------------------------------

_CALL = record(
    {
        "id": string(1, 256),
        "type": choice("function"),
        "index": lambda value, path: value,  # streams carry it, and clients send back what they got
        "function": record({"name": NAME, "arguments": string()}, required=("name", "arguments")),
    },
    required=("id", "function"),
)


def _of(role: str, content: Check, *required: str, **more: Check) -> Check:
    return record({"role": choice(role), "content": content, "name": NAME, **more}, required)


MESSAGE = tagged(
    {
        "system": _of("system", _CONTENT, "content"),
        "developer": _of("developer", _CONTENT, "content"),
        "user": _of("user", _USER_CONTENT, "content"),
        "assistant": _of(
            "assistant",
            _ASSISTANT_CONTENT,
            tool_calls=array(_CALL, 0, 128),
            refusal=string(),
            reasoning_content=string(),
            annotations=array(mapping()),
            audio=unsupported("this model does not speak"),
            function_call=unsupported("functions are outdated: use tool_calls"),
        ),
        "tool": _of("tool", _CONTENT, "content", "tool_call_id", tool_call_id=string(1, 256)),
    },
    key="role",
)
MESSAGES = array(MESSAGE, 1, 4096)

FUNCTION = record(
    {
        "name": NAME,
        "description": string(),
        "parameters": mapping(),
        "strict": boolean,
    },
    required=("name",),
)
TOOLS = array(
    tagged({"function": record({"type": choice("function"), "function": FUNCTION}, required=("function",))}),
    0,
    128,
)
TOOL_CHOICE = either(
    (str, choice("none", "auto", "required")),
    (
        dict,
        record(
            {"type": choice("function"), "function": record({"name": NAME}, ("name",))},
            required=("type", "function"),
        ),
    ),
    wanted='"none", "auto", "required" or an object that names a function',
)


def for_template(messages: list[Message], path: str, images: str) -> list[Message]:
    """Checked messages as templates want them. `images`: "refuse", or "note" (the model is told that there
    was one). ApiError if an assistant's message is empty, or a tool's answers nothing that was called."""
    result, called = [], set[str]()
    for i, message in enumerate(messages):
        where = f"{path}[{i}]"
        role = message["role"]
        entry: Message = {"role": "system" if role == "developer" else role}
        entry["content"] = text_of(message.get("content"), where + ".content", images)
        if role == "assistant":
            _assistant(entry, message, where)
            called |= {call["id"] for call in message.get("tool_calls", ())}
        elif role == "tool":
            if message["tool_call_id"] not in called:
                raise wrong_value(
                    where + ".tool_call_id",
                    "no assistant's message before it calls a tool with this id",
                    "send the message with the tool calls too",
                )
            entry["tool_call_id"] = message["tool_call_id"]
        if "name" in message:
            entry["name"] = message["name"]
        result.append(entry)
    return result


def _assistant(entry: Message, message: Message, where: str) -> None:
    calls = message.get("tool_calls")
    if message.get("content") is None and not calls and not message.get("refusal"):
        raise ApiError(
            f"{where}.content is missing",
            because="an assistant's message has content or tool calls",
            fix="add it",
            param=where + ".content",
            code="missing_required_parameter",
        )
    if calls:
        entry["tool_calls"] = [template_call(call["id"], **call["function"]) for call in calls]
    if message.get("refusal") and not entry["content"]:
        entry["content"] = message["refusal"]
    if message.get("reasoning_content"):
        entry["reasoning_content"] = message["reasoning_content"]


def template_call(id: str, name: str, arguments: str) -> dict[str, Any]:
    """A tool call as templates want it: arguments that are JSON become an object."""
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        parsed = arguments
    return {
        "id": id,
        "type": "function",
        "function": {"name": name, "arguments": parsed if isinstance(parsed, dict) else arguments},
    }


def text_of(content: Any, path: str, images: str) -> str:
    """The text of a content: a string, parts, or nothing."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join([_part_text(part, f"{path}[{i}]", images) for i, part in enumerate(content)])


def _part_text(part: dict[str, Any], path: str, images: str) -> str:
    if part["type"] in ("image_url", "input_image"):
        if images != "note":
            raise wrong_value(path, "this model does not read images", "send text", "unsupported_content")
        return IMAGE_NOTE
    return str(part["refusal"] if part["type"] == "refusal" else part["text"])


def check_names(tools: list[dict[str, Any]], path: str, name_at: Callable[[dict[str, Any]], str]) -> None:
    """ApiError if two tools have one name."""
    seen = set[str]()
    for i, tool in enumerate(tools):
        if name_at(tool) in seen:
            raise wrong_value(
                f"{path}[{i}]", f"another tool is called {name_at(tool)[:60]!r} too", "rename one"
            )
        seen.add(name_at(tool))
