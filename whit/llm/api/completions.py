"""/v1/completions: text goes on where a prompt ends."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from whit.llm.api.chat import submit_all, usage_json
from whit.llm.api.errors import ApiError
from whit.llm.api.fields import (
    Check,
    array,
    boolean,
    either,
    integer,
    record,
    string,
    unsupported,
    wrong_type,
    wrong_value,
)
from whit.llm.api.options import (
    LOGIT_BIAS,
    RESPONSE_FORMAT,
    SAMPLING,
    STOP,
    STREAM_OPTIONS,
    sampling,
    schema_of,
)
from whit.llm.api.service import (
    Answer,
    Encoder,
    Lines,
    PlainParser,
    Service,
    Step,
    TokenLogprob,
    drop,
    gather,
    merged,
)
from whit.llm.engine import Request, Usage

PROMPTS = 64  # of one request
DEFAULT_TOKENS = 16  # that OpenAI's endpoint writes unless told otherwise

FIELDS: dict[str, Check] = {
    "model": string(1),
    "prompt": either((str, string()), (list, lambda value, path: value), wanted="a string or an array"),
    "max_tokens": integer(0),
    "n": integer(1),
    "best_of": integer(1),
    "echo": boolean,
    "logprobs": integer(0, 20),
    "logit_bias": LOGIT_BIAS,
    "stop": STOP,
    "stream": boolean,
    "stream_options": STREAM_OPTIONS,
    "response_format": RESPONSE_FORMAT,
    **SAMPLING,
    "user": string(),
    "suffix": unsupported("this model does not fill gaps", ""),
}
_BODY = record(FIELDS, required=("model", "prompt"))


@dataclass
class Turn:
    """A checked request. Choice number i answers prompt number i // n."""

    prompts: list[list[int]]
    texts: list[str]
    requests: list[Request]  # best_of a prompt
    n: int
    best_of: int
    body: dict[str, Any]


async def begin(service: Service, body: Any) -> Turn:
    """Check a body and submit it. ApiError."""
    body = _BODY(body, "")
    service.check_model(body["model"])
    n = body.get("n", 1)
    best_of = body.get("best_of", n)
    if n > service.max_choices or best_of > service.max_choices:
        name = "n" if n > service.max_choices else "best_of"
        raise wrong_value(
            name, f"this server makes at most {service.max_choices} choices", "ask again for more"
        )
    if best_of < n:
        raise wrong_value("best_of", f"it is less than n ({n})", "leave it out")
    if body.get("stream") and best_of > n:
        raise wrong_value("best_of", "the best answer is known only when all are done", "do not stream")
    if body.get("echo") and "logprobs" in body:
        raise wrong_value(
            "echo", "there are no logprobs of a prompt", "leave out echo or logprobs", "unsupported_parameter"
        )
    prompts = await _prompts(service, body["prompt"])
    params = await asyncio.to_thread(
        sampling,
        service,
        body,
        max_tokens=body.get("max_tokens", DEFAULT_TOKENS),
        logprobs=0 if best_of > n and "logprobs" not in body else body.get("logprobs"),
        schema=schema_of(body.get("response_format")),
    )
    requests: list[Request] = []
    try:
        for prompt in prompts:
            requests += submit_all(service, prompt, params, best_of, "prompt")
    except ApiError:
        drop(service, requests)
        raise
    echo = bool(body.get("echo"))
    texts = [service.tokenizer.decode(prompt, special=True) if echo else "" for prompt in prompts]
    if echo and isinstance(body["prompt"], str):
        texts = [body["prompt"]]
    return Turn(prompts, texts, requests, n, best_of, body)


async def _prompts(service: Service, given: Any) -> list[list[int]]:
    """The tokens of each prompt: of a text, texts, tokens, or lists of tokens."""
    if isinstance(given, str):
        return [await _encoded(service, given, "prompt")]
    if not given:
        raise wrong_value("prompt", "it is empty")
    if isinstance(given[0], int) and not isinstance(given[0], bool):
        return [token_list(service, given, "prompt")]
    if len(given) > PROMPTS:
        raise wrong_value("prompt", f"it has {len(given)} prompts, and {PROMPTS} are allowed")
    result = []
    for i, one in enumerate(given):
        path = f"prompt[{i}]"
        if isinstance(one, str):
            result.append(await _encoded(service, one, path))
        elif isinstance(one, list):
            result.append(token_list(service, one, path))
        else:
            raise wrong_type(path, one, "a string or an array of tokens")
    return result


async def _encoded(service: Service, text: str, path: str) -> list[int]:
    tokens = await service.encode(text)
    if not tokens:
        raise wrong_value(
            path, "it is empty, and this model has no token that begins a text", "send some text"
        )
    return tokens


def token_list(service: Service | Encoder, value: Any, path: str) -> list[int]:
    """Checked token numbers."""
    tokens: list[int] = array(integer(0, service.vocab_size - 1), 1)(value, path)
    return tokens


# ---- answers -----------------------------------------------------------------------------------------------


def _head(service: Service) -> dict[str, Any]:
    return {
        "id": "cmpl-" + secrets.token_hex(14),
        "object": "text_completion",
        "created": int(time.time()),
        "model": service.name,
        "system_fingerprint": "whit",
    }


def _logprobs(scores: list[TokenLogprob], start: int) -> dict[str, Any]:
    """Logprobs in the form of this endpoint: columns, with the place of each token in the text."""
    offsets, at = [], start
    for score in scores:
        offsets.append(at)
        at += len(score.token)
    return {
        "tokens": [score.token for score in scores],
        "token_logprobs": [score.logprob for score in scores],
        "top_logprobs": [{t.token: t.logprob for t in score.top} for score in scores],
        "text_offset": offsets,
    }


async def complete(service: Service, body: Any) -> dict[str, Any]:
    """The whole answer to a body."""
    turn = await begin(service, body)
    jobs = [asyncio.ensure_future(gather(service.steps(r, PlainParser()))) for r in turn.requests]
    try:
        answers = await asyncio.gather(*jobs)
    finally:
        for job in jobs:
            job.cancel()
        drop(service, turn.requests)
    choices: list[dict[str, Any]] = []
    for p, text in enumerate(turn.texts):
        rivals = answers[p * turn.best_of : (p + 1) * turn.best_of]
        for answer in sorted(rivals, key=_badness)[: turn.n] if turn.best_of > turn.n else rivals:
            scores = _logprobs(answer.logprobs, len(text)) if "logprobs" in turn.body else None
            choices.append(
                {
                    "index": len(choices),
                    "text": text + answer.content,
                    "logprobs": scores,
                    "finish_reason": answer.finish_reason,
                }
            )
    return {**_head(service), "choices": choices, "usage": _usage(turn, [answer.usage for answer in answers])}


def _badness(answer: Answer) -> float:
    """Minus the mean logprob of an answer's tokens."""
    return -sum(score.logprob for score in answer.logprobs) / max(len(answer.logprobs), 1)


def _usage(turn: Turn, usages: list[Usage]) -> dict[str, Any]:
    firsts = usages[:: turn.best_of]
    prompt, cached = sum(usage.prompt for usage in firsts), sum(usage.cached for usage in firsts)
    written = sum(usage.completion for usage in usages)
    return usage_json([Usage(prompt, written, cached)], 0)


async def stream(service: Service, body: Any) -> Lines[str]:
    """The answer as data lines of a stream of events."""
    turn = await begin(service, body)
    return Lines(service, turn.requests, _stream(service, turn))


async def _stream(service: Service, turn: Turn) -> AsyncGenerator[str, None]:
    head = _head(service)
    with_usage = turn.body.get("stream_options", {}).get("include_usage", False)
    if with_usage:
        head["usage"] = None
    usages = [Usage() for _ in turn.requests]
    lengths = [len(turn.texts[i // turn.n]) for i in range(len(turn.requests))]
    for i in range(len(turn.requests)):
        if text := turn.texts[i // turn.n]:
            yield _chunk(head, i, text, None, None)
    async for i, step in merged([service.steps(request, PlainParser()) for request in turn.requests]):
        usages[i] = step.usage or usages[i]
        text = "".join([piece.text for piece in step.pieces])
        scores = _scores(step, lengths, i) if "logprobs" in turn.body else None
        if text or scores is not None or step.finish_reason is not None:
            yield _chunk(head, i, text, scores, step.finish_reason)
    if with_usage:
        yield json.dumps({**head, "choices": [], "usage": _usage(turn, usages)}, ensure_ascii=False)
    yield "[DONE]"


def _scores(step: Step, lengths: list[int], i: int) -> dict[str, Any] | None:
    if not step.logprobs:
        return None
    scores = _logprobs(list(step.logprobs), lengths[i])
    lengths[i] += sum(len(score.token) for score in step.logprobs)
    return scores


def _chunk(head: dict[str, Any], index: int, text: str, logprobs: Any, reason: str | None) -> str:
    entry = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
    return json.dumps({**head, "choices": [entry]}, ensure_ascii=False, separators=(",", ":"))
