"""The endpoints that answer at once: models, tokens, embeddings."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

from whit.llm.api.completions import token_list
from whit.llm.api.errors import ApiError
from whit.llm.api.fields import (
    Check,
    array,
    boolean,
    choice,
    either,
    integer,
    record,
    string,
    wrong_type,
    wrong_value,
)
from whit.llm.api.messages import MESSAGES, TOOLS, for_template
from whit.llm.api.service import Encoder, Service

INPUTS = 2048  # texts of one request
TOKENS = 300_000  # of all of them


# ---- models ------------------------------------------------------------------------------------------------


def models(service: Service) -> dict[str, Any]:
    """/v1/models."""
    return {"object": "list", "data": [_model(service, name) for name in _names(service)]}


def model(service: Service, name: str) -> dict[str, Any]:
    """/v1/models/{name}. ApiError (404)."""
    if name not in _names(service):
        service.check_model(name)
    return _model(service, name)


def _names(service: Service) -> list[str]:
    return [name for name in (service.name, service.encoder_name) if name]


def _model(service: Service, name: str) -> dict[str, Any]:
    about = {"id": name, "object": "model", "created": service.created, "owned_by": "whit"}
    if name == service.name:
        return {**about, "context_length": service.context, "chat": service.template is not None}
    assert service.encoder is not None
    return {**about, "context_length": service.encoder.max_tokens, "dimensions": service.encoder.dimensions}


# ---- tokens ------------------------------------------------------------------------------------------------

_TOKENIZE = record(
    {
        "model": string(1),
        "content": string(),
        "prompt": string(),
        "messages": MESSAGES,
        "tools": TOOLS,
        "add_special": boolean,
        "parse_special": boolean,
        "with_pieces": boolean,
    }
)
_DETOKENIZE = record(
    {
        "model": string(1),
        "tokens": either((list, lambda value, path: value), wanted="an array of tokens"),
        "skip_special_tokens": boolean,
    },
    required=("tokens",),
)


async def tokenize(service: Service, body: Any) -> dict[str, Any]:
    """/tokenize: the tokens of `content` (a text), or of `messages` as the chat template writes them."""
    body = _TOKENIZE(body, "")
    given = [name for name in ("content", "prompt", "messages") if name in body]
    if len(given) != 1:
        raise ApiError(
            "content is missing" if not given else f"{given[0]} and {given[1]} are both given",
            because="a request has one text or one conversation",
            fix="send content, or messages",
            param=given[1] if given else "content",
            code="missing_required_parameter" if not given else "invalid_value",
        )
    if "messages" in body:
        tokens, _ = await service.prompt(
            for_template(body["messages"], "messages", service.images), body.get("tools", [])
        )
    else:
        tokens = await service.encode(
            body[given[0]], special=body.get("parse_special", True), bos=body.get("add_special")
        )
    result: dict[str, Any] = {"tokens": tokens, "count": len(tokens), "max_model_len": service.context}
    if body.get("with_pieces"):
        result["pieces"] = [
            service.tokenizer.token_bytes(token).decode("utf-8", "replace") for token in tokens
        ]
    return result


async def detokenize(service: Service, body: Any) -> dict[str, Any]:
    """/detokenize: the text of `tokens`."""
    body = _DETOKENIZE(body, "")
    tokens = array(integer(0, service.vocab_size - 1))(body["tokens"], "tokens")
    special = not body.get("skip_special_tokens", False)
    text = await asyncio.to_thread(lambda: service.tokenizer.decode(tokens, special=special))
    return {"content": text, "prompt": text}


# ---- embeddings --------------------------------------------------------------------------------------------

EMBEDDING_FIELDS: dict[str, Check] = {
    "model": string(1),
    "input": either((str, string()), (list, lambda value, path: value), wanted="a string or an array"),
    "encoding_format": choice("float", "base64"),
    "dimensions": integer(1),
    "user": string(),
}
_EMBEDDINGS = record(EMBEDDING_FIELDS, required=("model", "input"))


async def embeddings(service: Service, body: Any) -> dict[str, Any]:
    """/v1/embeddings: a vector a text."""
    body = _EMBEDDINGS(body, "")
    service.check_model(body["model"], embeddings=True)
    encoder = service.encoder
    assert encoder is not None
    if body.get("dimensions", encoder.dimensions) != encoder.dimensions:
        raise wrong_value(
            "dimensions", f"vectors of {service.encoder_name} have {encoder.dimensions}", "leave it out"
        )
    rows = await asyncio.to_thread(_rows, encoder, body["input"])
    if sum(map(len, rows)) > TOKENS:
        raise wrong_value("input", f"its texts have more than {TOKENS} tokens in all", "send fewer at a time")
    async with service.encoder_lock:
        vectors = await asyncio.to_thread(encoder.encode_tokens, rows)
    as_text = body.get("encoding_format") == "base64"
    data = [
        {"object": "embedding", "index": i, "embedding": _base64(vector) if as_text else vector.tolist()}
        for i, vector in enumerate(vectors)
    ]
    count = sum(map(len, rows))
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "data": data, "model": service.encoder_name, "usage": usage}


def _base64(vector: Any) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")


def _rows(encoder: Encoder, given: Any) -> list[list[int]]:
    """Tokens of each text of an `input`: a text, texts, tokens, or lists of tokens."""
    if isinstance(given, str):
        given = [given]
    if not given:
        raise wrong_value("input", "it is empty")
    if isinstance(given[0], int) and not isinstance(given[0], bool):
        given = [given]
    if len(given) > INPUTS:
        raise wrong_value(
            "input", f"it has {len(given)} texts, and {INPUTS} are allowed", "send fewer at a time"
        )
    if all(isinstance(one, str) for one in given):
        if "" in given:
            raise wrong_value("input" if len(given) == 1 else f"input[{given.index('')}]", "it is empty")
        return _fitting(encoder, encoder.tokens(given))
    result = []
    for i, one in enumerate(given):
        if not isinstance(one, list):
            raise wrong_type(f"input[{i}]", one, "a string, or an array of tokens, as all others")
        result.append(token_list(encoder, one, f"input[{i}]"))
    return _fitting(encoder, result)


def _fitting(encoder: Encoder, rows: list[list[int]]) -> list[list[int]]:
    for i, row in enumerate(rows):
        if len(row) > encoder.max_tokens:
            raise ApiError(
                f"input[{i}] has {len(row)} tokens",
                because=f"this model reads {encoder.max_tokens}",
                fix="shorten the text or cut it into pieces",
                param="input",
                code="context_length_exceeded",
            )
    return rows
