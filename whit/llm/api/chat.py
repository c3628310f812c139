"""/v1/chat/completions: from a body to a prompt, and from steps to answers, whole or streamed."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

from whit.llm.api.errors import ApiError
from whit.llm.api.fields import (
    Check,
    array,
    boolean,
    choice,
    integer,
    mapping,
    record,
    string,
    unsupported,
    wrong_value,
)
from whit.llm.api.messages import MESSAGES, TOOL_CHOICE, TOOLS, check_names, for_template
from whit.llm.api.options import (
    IGNORED,
    LOGIT_BIAS,
    RESPONSE_FORMAT,
    SAMPLING,
    STOP,
    STREAM_OPTIONS,
    VERBOSITY,
    sampling,
    schema_of,
)
from whit.llm.api.service import (
    Answer,
    ForcedCall,
    Lines,
    Parser,
    Piece,
    PlainParser,
    Service,
    Step,
    drop,
    gather,
    merged,
)
from whit.llm.engine import Request, Usage

EFFORT = choice("none", "minimal", "low", "medium", "high", "xhigh")

FIELDS: dict[str, Check] = {
    "model": string(1),
    "messages": MESSAGES,
    "max_tokens": integer(1),
    "max_completion_tokens": integer(1),
    "n": integer(1),
    "stream": boolean,
    "stream_options": STREAM_OPTIONS,
    "stop": STOP,
    "logit_bias": LOGIT_BIAS,
    "logprobs": boolean,
    "top_logprobs": integer(0, 20),
    "response_format": RESPONSE_FORMAT,
    "tools": TOOLS,
    "tool_choice": TOOL_CHOICE,
    "parallel_tool_calls": boolean,
    "reasoning_effort": EFFORT,
    "chat_template_kwargs": mapping(None, 32),
    **SAMPLING,
    **IGNORED,
    "modalities": array(choice("text"), 1),
    "verbosity": VERBOSITY,
    "prediction": mapping(),
    # what this server does not have
    "store": unsupported("chat completions are not stored", False),
    "audio": unsupported("this model does not speak"),
    "web_search_options": unsupported("there is no web search"),
    "moderation": unsupported("there is no moderation"),
    "functions": unsupported("functions are outdated: use tools"),
    "function_call": unsupported("function_call is outdated: use tool_choice"),
}
_BODY = record(FIELDS, required=("model", "messages"))
_RESERVED = frozenset(
    {"self", "messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "raise_exception"}
)


@dataclass
class Turn:
    """A checked request whose prompts the engine has."""

    requests: list[Request]
    forced: bool
    plain: bool  # the output has a form of its own
    tools: list[dict[str, Any]]
    thinking: bool
    body: dict[str, Any]

    def parser(self, service: Service) -> Parser:
        if self.forced or self.plain:
            return ForcedCall() if self.forced else PlainParser()
        return service.parser(self.tools, self.thinking)


async def begin(service: Service, body: Any) -> Turn:
    """Check a body and submit it. ApiError."""
    body = _BODY(body, "")
    service.check_model(body["model"])
    n = body.get("n", 1)
    if n > service.max_choices:
        raise wrong_value(
            "n", f"this server makes at most {service.max_choices} choices", "ask again for more"
        )
    messages = for_template(body["messages"], "messages", service.images)
    tools = body.get("tools", [])
    check_names(tools, "tools", lambda tool: str(tool["function"]["name"]))
    force = forced_tools([tool["function"] for tool in tools], choice_of(body.get("tool_choice")))
    schema = force if force is not None else schema_of(body.get("response_format"))
    if body.get("top_logprobs") is not None and not body.get("logprobs"):
        raise wrong_value("top_logprobs", "logprobs is not true", "set it")
    extra = dict(body.get("chat_template_kwargs", {}))
    if bad := sorted(_RESERVED & extra.keys()):
        raise wrong_value(f"chat_template_kwargs.{bad[0]}", "the server sets it", "remove it")
    if "reasoning_effort" in body:
        extra.setdefault("reasoning_effort", body["reasoning_effort"])
    shown = [] if body.get("tool_choice") == "none" else tools
    prompt, thinking = await service.prompt(messages, shown, **extra)
    params = await asyncio.to_thread(
        sampling,
        service,
        body,
        max_tokens=body.get("max_completion_tokens", body.get("max_tokens")),
        logprobs=body.get("top_logprobs", 0) if body.get("logprobs") else None,
        schema=schema,
        schema_param="tools" if force is not None else "response_format",
    )
    requests = submit_all(service, prompt, params, n, "messages")
    return Turn(requests, force is not None, schema is not None, shown, thinking, body)


def submit_all(service: Service, prompt: list[int], params: Any, n: int, param: str) -> list[Request]:
    """n requests for one prompt; with a seed, the next ones get the numbers after it."""
    requests: list[Request] = []
    try:
        for i in range(n):
            if i and params.seed is not None:
                params = replace(params, seed=params.seed + 1 if params.seed < (1 << 64) - 1 else 0)
            requests.append(service.submit(prompt, params, param))
    except ApiError:
        drop(service, requests)
        raise
    return requests


def choice_of(value: str | dict[str, Any] | None) -> str | None:
    """ "none", "auto", "required", or "=name" of the one tool that must be called."""
    return "=" + str(value["function"]["name"]) if isinstance(value, dict) else value


def forced_tools(functions: list[dict[str, Any]], wanted: str | None) -> dict[str, Any] | None:
    """The schema that makes the model call a tool, if it must."""
    if wanted in (None, "auto", "none"):
        return None
    assert wanted is not None
    if not functions:
        raise wrong_value("tool_choice", "there are no tools", "add tools, or leave it out")
    if wanted.startswith("="):
        functions = [function for function in functions if function["name"] == wanted[1:]]
        if not functions:
            raise wrong_value("tool_choice", f"no tool is called {wanted[1:61]!r}", "name one of the tools")
    forms = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                "arguments": function.get("parameters") or {"type": "object", "properties": {}},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    return forms[0] if len(forms) == 1 else {"anyOf": forms}


# ---- answers -----------------------------------------------------------------------------------------------


def usage_json(usages: list[Usage], reasoning: int) -> dict[str, Any]:
    """The account of a request: its prompt counts once, however many answers it got."""
    prompt = usages[0].prompt if usages else 0
    written = sum(usage.completion for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": usages[0].cached if usages else 0, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def _head(service: Service, object: str) -> dict[str, Any]:
    return {
        "id": "chatcmpl-" + secrets.token_hex(14),
        "object": object,
        "created": int(time.time()),
        "model": service.name,
        "system_fingerprint": "whit",
        "service_tier": "default",
    }


async def complete(service: Service, body: Any) -> dict[str, Any]:
    """The whole answer to a body."""
    turn = await begin(service, body)
    jobs = [asyncio.ensure_future(gather(service.steps(r, turn.parser(service)))) for r in turn.requests]
    try:
        answers = await asyncio.gather(*jobs)
    finally:
        for job in jobs:
            job.cancel()
        drop(service, turn.requests)
    choices = [_choice(i, answer, bool(turn.body.get("logprobs"))) for i, answer in enumerate(answers)]
    reasoned = sum(answer.reasoning_tokens for answer in answers)
    usage = usage_json([answer.usage for answer in answers], reasoned)
    return {**_head(service, "chat.completion"), "choices": choices, "usage": usage}


def _choice(index: int, answer: Answer, logprobs: bool) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": answer.content if answer.content or not answer.calls else None,
        "refusal": None,
        "annotations": [],
    }
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.text}}
            for call in answer.calls
        ]
    scores = {"content": [score.json() for score in answer.logprobs], "refusal": None} if logprobs else None
    return {"index": index, "message": message, "logprobs": scores, "finish_reason": answer.finish_reason}


async def stream(service: Service, body: Any) -> Lines[str]:
    """The answer to a body as data lines of a stream of events, as soon as the body was found right."""
    turn = await begin(service, body)
    return Lines(service, turn.requests, _stream(service, turn))


async def _stream(service: Service, turn: Turn) -> AsyncGenerator[str, None]:
    head = _head(service, "chat.completion.chunk")
    with_usage = turn.body.get("stream_options", {}).get("include_usage", False)
    if with_usage:
        head["usage"] = None
    usages = [Usage() for _ in turn.requests]
    reasoned = 0
    for i in range(len(turn.requests)):
        yield _chunk(head, i, {"role": "assistant", "content": "", "refusal": None})
    steps = [service.steps(request, turn.parser(service)) for request in turn.requests]
    shapes = [Deltas() for _ in turn.requests]
    async for i, step in merged(steps):
        for line in _lines(head, i, step, shapes[i], bool(turn.body.get("logprobs"))):
            yield line
        if step.usage is not None:
            usages[i] = step.usage
            reasoned += step.reasoning_tokens
    if with_usage:
        yield json.dumps({**head, "choices": [], "usage": usage_json(usages, reasoned)}, ensure_ascii=False)
    yield "[DONE]"


class Deltas:
    """Turns the pieces of one choice into the deltas of chunks; numbers the calls."""

    def __init__(self) -> None:
        self.calls = -1

    def of(self, piece: Piece) -> dict[str, Any]:
        """One piece's delta."""
        if piece.kind == "content":
            return {"content": piece.text}
        if piece.kind == "reasoning":
            return {"reasoning_content": piece.text}
        if piece.name is None:
            return {"tool_calls": [{"index": self.calls, "function": {"arguments": piece.text}}]}
        self.calls += 1
        function = {"name": piece.name, "arguments": piece.text}
        return {
            "tool_calls": [{"index": self.calls, "id": piece.id, "type": "function", "function": function}]
        }


def _lines(head: dict[str, Any], index: int, step: Step, deltas: Deltas, logprobs: bool) -> list[str]:
    """A step's chunks: one a piece; the token's logprobs go with the first (or with an empty one)."""
    scores: Any = None
    if logprobs and step.logprobs:
        scores = {"content": [score.json() for score in step.logprobs], "refusal": None}
    changes = [deltas.of(piece) for piece in step.pieces]
    if scores is not None and not changes:
        changes = [{"content": ""}]
    lines = [_chunk(head, index, change, scores if i == 0 else None) for i, change in enumerate(changes)]
    if step.finish_reason is not None:
        lines.append(_chunk(head, index, {}, None, step.finish_reason))
    return lines


def _chunk(
    head: dict[str, Any], index: int, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None
) -> str:
    entry = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
    return json.dumps({**head, "choices": [entry]}, ensure_ascii=False, separators=(",", ":"))
