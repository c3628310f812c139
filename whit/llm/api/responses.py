"""/v1/responses: items in, items out, as a whole or as a stream of typed events. Answers are kept in memory
for a while, so that a conversation can go on from one by its id."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from typing import Any

from whit.llm.api.chat import EFFORT, forced_tools
from whit.llm.api.errors import ApiError
from whit.llm.api.fields import (
    Check,
    array,
    boolean,
    choice,
    either,
    integer,
    mapping,
    record,
    string,
    tagged,
    unsupported,
    wrong_value,
)
from whit.llm.api.messages import NAME, Message, check_names, template_call, text_of
from whit.llm.api.options import IGNORED, SAMPLING, TEXT_FORMAT, VERBOSITY, sampling, schema_of
from whit.llm.api.service import ForcedCall, Lines, Parser, Piece, PlainParser, Service, Step, drop
from whit.llm.engine import Request, Usage

# ---- the body ----------------------------------------------------------------------------------------------

_INPUT_TEXT = record({"type": choice("input_text"), "text": string()}, required=("text",))
_OUTPUT_TEXT = record(
    {
        "type": choice("output_text"),
        "text": string(),
        "annotations": array(mapping()),
        "logprobs": array(mapping()),
    },
    required=("text",),
)
_REFUSAL = record({"type": choice("refusal"), "refusal": string()}, required=("refusal",))
_IMAGE = record(
    {
        "type": choice("input_image"),
        "image_url": string(1),
        "file_id": string(),
        "detail": choice("auto", "low", "high", "original"),
    }
)
_PARTS = array(
    tagged(
        {"input_text": _INPUT_TEXT, "output_text": _OUTPUT_TEXT, "refusal": _REFUSAL, "input_image": _IMAGE}
    ),
    1,
)
_CONTENT = either((str, string()), (list, _PARTS), wanted="a string or an array of parts")
_STATUS = choice("in_progress", "completed", "incomplete")
_ITEM = tagged(
    {
        "message": record(
            {
                "type": choice("message"),
                "id": string(),
                "status": _STATUS,
                "role": choice("user", "assistant", "system", "developer"),
                "content": _CONTENT,
                "phase": choice("commentary", "final_answer"),
            },
            required=("role", "content"),
        ),
        "function_call": record(
            {
                "type": choice("function_call"),
                "id": string(),
                "call_id": string(1, 256),
                "name": NAME,
                "arguments": string(),
                "status": _STATUS,
            },
            required=("call_id", "name", "arguments"),
        ),
        "function_call_output": record(
            {
                "type": choice("function_call_output"),
                "id": string(),
                "call_id": string(1, 256),
                "output": _CONTENT,
                "status": _STATUS,
            },
            required=("call_id", "output"),
        ),
        "reasoning": record(
            {
                "type": choice("reasoning"),
                "id": string(),
                "summary": array(mapping()),
                "content": array(
                    record({"type": choice("reasoning_text"), "text": string()}, required=("text",))
                ),
                "encrypted_content": string(),
                "status": _STATUS,
            }
        ),
    },
    default="message",
)
_TOOL = tagged(
    {
        "function": record(
            {
                "type": choice("function"),
                "name": NAME,
                "description": string(),
                "parameters": mapping(),
                "strict": boolean,
            },
            required=("name",),
        )
    }
)
_INCLUDE = choice(
    "message.output_text.logprobs", "reasoning.encrypted_content", "message.input_image.image_url",
    "file_search_call.results", "web_search_call.results", "code_interpreter_call.outputs",
)  # fmt: skip

FIELDS: dict[str, Check] = {
    "model": string(1),
    "input": either((str, string(1)), (list, array(_ITEM, 1, 4096)), wanted="a string or an array of items"),
    "instructions": string(),
    "previous_response_id": string(1, 100),
    "max_output_tokens": integer(1),
    "stream": boolean,
    "stream_options": record({"include_obfuscation": boolean}),
    "store": boolean,
    "tools": array(_TOOL, 0, 128),
    "tool_choice": either(
        (str, choice("none", "auto", "required")),
        (dict, record({"type": choice("function"), "name": NAME}, required=("type", "name"))),
        wanted='"none", "auto", "required" or an object that names a function',
    ),
    "parallel_tool_calls": boolean,
    "text": record({"format": TEXT_FORMAT, "verbosity": VERBOSITY}),
    "reasoning": record(
        {
            "effort": EFFORT,
            "summary": choice("auto", "concise", "detailed"),
            "generate_summary": choice("auto", "concise", "detailed"),
        }
    ),
    "top_logprobs": integer(0, 20),
    "include": array(_INCLUDE),
    "truncation": unsupported("a too long input is refused, not cut", "disabled"),
    **SAMPLING,
    **IGNORED,
    "max_tool_calls": integer(1),
    # what this server does not have
    "background": unsupported("nothing runs in the background", False),
    "conversation": unsupported("there are no stored conversations: use previous_response_id"),
    "prompt": unsupported("there are no stored prompts"),
    "context_management": unsupported("a conversation is never shortened"),
    "moderation": unsupported("there is no moderation"),
    "access_programs": unsupported("there are none"),
    "background_options": unsupported("nothing runs in the background"),
    "image": unsupported("this model does not draw"),
}
_BODY = record(FIELDS, required=("model", "input"))


# ---- kept answers ------------------------------------------------------------------------------------------


@dataclass
class Kept:
    """An answer, who may see it, what it was given, and the conversation up to it."""

    owner: str
    response: dict[str, Any]
    items: list[dict[str, Any]]
    conversation: list[Message]
    size: int


class Shelf:
    """The last answers, at most `count` of them and about `nbytes` in all; the oldest go first."""

    def __init__(self, count: int = 1000, nbytes: int = 64 << 20) -> None:
        self.count, self.nbytes = count, nbytes
        self.held = 0
        self._kept: OrderedDict[str, Kept] = OrderedDict()

    def put(self, kept: Kept) -> None:
        """Keep an answer."""
        self._kept[kept.response["id"]] = kept
        self.held += kept.size
        while self._kept and (len(self._kept) > self.count or self.held > self.nbytes):
            self.held -= self._kept.popitem(last=False)[1].size

    def get(self, id: str, owner: str, param: str | None = None) -> Kept:
        """An answer by its id. ApiError (404) if there is none, or it is another's."""
        kept = self._kept.get(id)
        if kept is None or kept.owner != owner:
            raise ApiError(
                f"there is no response {id[:100]!r}",
                because="it was not stored, or is gone: answers are kept for a while only",
                fix="send the whole conversation",
                status=404 if param is None else 400,
                param=param,
                code="response_not_found" if param is None else "previous_response_not_found",
            )
        self._kept.move_to_end(id)
        return kept

    def drop(self, id: str, owner: str) -> None:
        """Forget an answer. ApiError as `get`."""
        self.held -= self.get(id, owner).size
        del self._kept[id]


# ---- from items to a conversation --------------------------------------------------------------------------


def conversation_of(items: list[dict[str, Any]], before: list[Message], images: str) -> list[Message]:
    """The messages of the items, as chat templates take them, after those of `before`."""
    result: list[Message] = list(before)
    called = {call["id"] for message in before for call in message.get("tool_calls", ())}
    for i, item in enumerate(items):
        path, kind = f"input[{i}]", item.get("type", "message")
        if kind == "message":
            role = "system" if item["role"] == "developer" else item["role"]
            message = {"role": role, "content": text_of(item["content"], path + ".content", images)}
            if role == "assistant" and result and _open(result[-1]):
                result[-1] = {**result[-1], "content": message["content"]}
            else:
                result.append(message)
        elif kind == "function_call":
            called.add(item["call_id"])
            if not result or result[-1]["role"] != "assistant":
                result.append({"role": "assistant", "content": ""})
            call = template_call(item["call_id"], item["name"], item["arguments"])
            result[-1] = {**result[-1], "tool_calls": [*result[-1].get("tool_calls", ()), call]}
        elif kind == "function_call_output":
            if item["call_id"] not in called:
                raise wrong_value(
                    path + ".call_id", "no function_call before it has this id", "send that item too"
                )
            text = text_of(item["output"], path + ".output", images)
            result.append({"role": "tool", "content": text, "tool_call_id": item["call_id"]})
        else:
            text = "".join([part["text"] for part in item.get("content", ())])
            result.append({"role": "assistant", "content": "", "reasoning_content": text})
    return [message for message in result if not _empty(message)]


def _open(message: Message) -> bool:
    """Whether an assistant's message has only its reasoning so far."""
    return message["role"] == "assistant" and "reasoning_content" in message and not message["content"]


def _empty(message: Message) -> bool:
    return _open(message) and not message.get("reasoning_content") and not message.get("tool_calls")


# ---- a request ---------------------------------------------------------------------------------------------


@dataclass
class Turn:
    """A checked request that the engine has."""

    request: Request
    body: dict[str, Any]
    owner: str
    items: list[dict[str, Any]]
    conversation: list[Message]
    forced: bool
    plain: bool
    tools: list[dict[str, Any]]
    thinking: bool
    id: str = field(default_factory=lambda: "resp_" + secrets.token_hex(20))
    created: int = field(default_factory=lambda: int(time.time()))

    def parser(self, service: Service) -> Parser:
        if self.forced or self.plain:
            return ForcedCall() if self.forced else PlainParser()
        return service.parser(self.tools, self.thinking)


async def begin(service: Service, shelf: Shelf, body: Any, owner: str) -> Turn:
    """Check a body and submit it. ApiError."""
    body = _BODY(body, "")
    service.check_model(body["model"])
    given = body["input"]
    items = [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given
    before: list[Message] = []
    if "previous_response_id" in body:
        before = shelf.get(body["previous_response_id"], owner, "previous_response_id").conversation
    conversation = conversation_of(items, before, service.images)
    tools = body.get("tools", [])
    check_names(tools, "tools", lambda tool: str(tool["name"]))
    wanted = body.get("tool_choice")
    wanted = "=" + wanted["name"] if isinstance(wanted, dict) else wanted
    force = forced_tools(tools, wanted)
    schema = force if force is not None else schema_of(body.get("text", {}).get("format"), "")
    shown = [
        {"type": "function", "function": _function(tool)} for tool in ([] if wanted == "none" else tools)
    ]
    extra = (
        {"reasoning_effort": body["reasoning"]["effort"]} if body.get("reasoning", {}).get("effort") else {}
    )
    messages = conversation
    if "instructions" in body:  # they hold for this answer only
        messages = [{"role": "system", "content": body["instructions"]}, *conversation]
    prompt, thinking = await service.prompt(messages, shown, **extra)
    params = await asyncio.to_thread(
        sampling,
        service,
        body,
        max_tokens=body.get("max_output_tokens"),
        logprobs=_logprobs_wanted(body),
        schema=schema,
        schema_param="tools" if force is not None else "text.format",
    )
    request = service.submit(prompt, params, "input")
    forced, plain = force is not None, schema is not None
    return Turn(request, body, owner, items, conversation, forced, plain, shown, thinking)


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in tool.items() if key != "type"}


def _logprobs_wanted(body: dict[str, Any]) -> int | None:
    if "message.output_text.logprobs" not in body.get("include", ()) and not body.get("top_logprobs"):
        return None
    return int(body.get("top_logprobs", 0))


# ---- the answer --------------------------------------------------------------------------------------------


def _resource(service: Service, turn: Turn, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    body = turn.body
    reasoning = body.get("reasoning", {})
    form = body.get("text", {}).get("format", {"type": "text"})
    if form["type"] == "json_schema":
        form = {"description": None, "strict": False, **form}
    tools = [
        {"description": None, "parameters": None, "strict": None, **tool} for tool in body.get("tools", ())
    ]
    return {
        "id": turn.id,
        "object": "response",
        "created_at": turn.created,
        "completed_at": int(time.time()) if status == "completed" else None,
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "error": None,
        "model": service.name,
        "previous_response_id": body.get("previous_response_id"),
        "instructions": body.get("instructions"),
        "output": output,
        "tools": tools,
        "tool_choice": body.get("tool_choice", "auto"),
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "truncation": "disabled",
        "text": {"format": form, "verbosity": body.get("text", {}).get("verbosity", "medium")},
        "temperature": body.get("temperature", 1.0),
        "top_p": body.get("top_p", 1.0),
        "presence_penalty": body.get("presence_penalty", 0.0),
        "frequency_penalty": body.get("frequency_penalty", 0.0),
        "top_logprobs": body.get("top_logprobs", 0),
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "usage": None,
        "max_output_tokens": body.get("max_output_tokens"),
        "max_tool_calls": body.get("max_tool_calls"),
        "store": body.get("store", True),
        "background": False,
        "service_tier": "default",
        "metadata": body.get("metadata", {}),
        "user": body.get("user"),
        "safety_identifier": body.get("safety_identifier"),
        "prompt_cache_key": body.get("prompt_cache_key"),
    }


def _usage(usage: Usage, reasoning: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }


Event = dict[str, Any]


class Writer:
    """Turns pieces into the events of a stream, and gathers the output items on the way."""

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self.kind = ""  # of the item that is being written
        self.logprobs: list[dict[str, Any]] = []

    def take(self, step: Step) -> Iterator[Event]:
        """The events of a step."""
        scores = [score.json() for score in step.logprobs]
        for piece in step.pieces:
            if piece.kind != self.kind or piece.name is not None:
                yield from self.close("completed")
                yield from self._open(piece)
            yield from self._more(piece, scores)
            if piece.kind == "content":
                scores = []
        if scores and self.kind == "content":
            yield from self._more(Piece("content"), scores)

    def _open(self, piece: Piece) -> Iterator[Event]:
        self.kind = piece.kind
        item: dict[str, Any] = {"status": "in_progress"}
        if piece.kind == "call":
            item |= {"type": "function_call", "id": "fc_" + secrets.token_hex(12)}
            item |= {"call_id": piece.id, "name": piece.name, "arguments": ""}
        elif piece.kind == "reasoning":
            item |= {"type": "reasoning", "id": "rs_" + secrets.token_hex(12), "summary": [], "content": []}
        else:
            item |= {
                "type": "message",
                "id": "msg_" + secrets.token_hex(12),
                "role": "assistant",
                "content": [],
            }
        self.output.append(item)
        yield self._event("response.output_item.added", item=_copy(item))
        if piece.kind != "call":
            part = self._part("")
            item["content"] = [part]
            yield self._part_event("response.content_part.added", part=_copy(part))

    def _part(self, text: str) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _more(self, piece: Piece, scores: list[dict[str, Any]]) -> Iterator[Event]:
        item = self.output[-1]
        if piece.kind == "call":
            if piece.text:
                item["arguments"] += piece.text
                yield self._event(
                    "response.function_call_arguments.delta", item_id=item["id"], delta=piece.text
                )
            return
        item["content"][0]["text"] += piece.text
        if piece.kind == "reasoning":
            yield self._part_event("response.reasoning_text.delta", delta=piece.text)
        elif piece.text or scores:
            item["content"][0]["logprobs"] += scores
            yield self._part_event("response.output_text.delta", delta=piece.text, logprobs=scores)

    def close(self, status: str) -> Iterator[Event]:
        """The events that end the item that is being written."""
        if not self.kind:
            return
        item, kind, self.kind = self.output[-1], self.kind, ""
        item["status"] = status
        if kind == "call":
            names = {"item_id": item["id"], "name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **names)
        else:
            part = item["content"][0]
            if kind == "reasoning":
                yield self._part_event("response.reasoning_text.done", text=part["text"])
            else:
                done = {"text": part["text"], "logprobs": part["logprobs"]}
                yield self._part_event("response.output_text.done", **done)
            yield self._part_event("response.content_part.done", part=_copy(part))
        yield self._event("response.output_item.done", item=_copy(item))

    def _event(self, type: str, **values: Any) -> Event:
        return {"type": type, "output_index": len(self.output) - 1, **values}

    def _part_event(self, type: str, **values: Any) -> Event:
        return self._event(type, item_id=self.output[-1]["id"], content_index=0, **values)


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, list) else value for key, value in item.items()}


async def events(service: Service, shelf: Shelf, turn: Turn) -> AsyncGenerator[Event, None]:
    """All events of an answer, from response.created to the one that ends it."""
    number = 0

    def numbered(event: Event) -> Event:
        nonlocal number
        number += 1
        return {**event, "sequence_number": number - 1}

    try:
        for name in ("response.created", "response.in_progress"):
            yield numbered({"type": name, "response": _resource(service, turn, "in_progress", [])})
        writer, last = Writer(), Step()
        async for step in service.steps(turn.request, turn.parser(service)):
            for event in writer.take(step):
                yield numbered(event)
            last = step
        if not writer.output:  # an empty answer is an empty message
            for event in writer.take(Step((Piece("content"),))):
                yield numbered(event)
        status = "incomplete" if last.finish_reason == "length" else "completed"
        for event in writer.close(status):
            yield numbered(event)
        response = _resource(service, turn, status, writer.output)
        response["usage"] = _usage(last.usage or Usage(), last.reasoning_tokens)
        _keep(shelf, turn, response)
        yield numbered({"type": f"response.{status}", "response": response})
    finally:
        drop(service, [turn.request])


def _keep(shelf: Shelf, turn: Turn, response: dict[str, Any]) -> None:
    if not response["store"]:
        return
    whole = conversation_of(response["output"], turn.conversation, "note")
    size = len(json.dumps([response, turn.items, whole]))
    shelf.put(Kept(turn.owner, response, turn.items, whole, size))


async def complete(service: Service, shelf: Shelf, body: Any, owner: str) -> dict[str, Any]:
    """The whole answer to a body."""
    turn = await begin(service, shelf, body, owner)
    result: dict[str, Any] = {}
    async for event in events(service, shelf, turn):
        result = event.get("response", result)
    return result


async def stream(service: Service, shelf: Shelf, body: Any, owner: str) -> Lines[tuple[str, str]]:
    """The answer as (name, data) of a stream of events."""
    turn = await begin(service, shelf, body, owner)

    async def lines() -> AsyncGenerator[tuple[str, str], None]:
        async for event in events(service, shelf, turn):
            yield event["type"], json.dumps(event, ensure_ascii=False, separators=(",", ":"))

    return Lines(service, [turn.request], lines())


def input_items(kept: Kept) -> dict[str, Any]:
    """What an answer was given, as a list."""
    data = [_shown(i, item) for i, item in enumerate(kept.items)]
    ids = [item["id"] for item in data]
    return {
        "object": "list",
        "data": data,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
        "has_more": False,
    }


def _shown(number: int, item: dict[str, Any]) -> dict[str, Any]:
    shown = {"type": "message", "id": f"item_{number}", "status": "completed", **item}
    if isinstance(shown.get("content"), str):
        kind = "output_text" if shown["role"] == "assistant" else "input_text"
        shown["content"] = [{"type": kind, "text": shown["content"]}]
    return shown
