"""Parameters of sampling as clients name them -> `SamplingParams`; forms of output -> grammars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from whit.helpers import ArgumentError
from whit.llm.api.errors import ApiError
from whit.llm.api.fields import (
    Check,
    array,
    boolean,
    choice,
    either,
    integer,
    mapping,
    number,
    record,
    string,
    tagged,
    wrong_value,
)
from whit.llm.sampling import SamplingParams

if TYPE_CHECKING:
    from whit.llm.api.service import Service

STOPS = 16  # stop strings of a request
SCHEMA_BYTES = 256 << 10

# the parameters that OpenAI's endpoints share, then those that only this server has
SAMPLING: dict[str, Check] = {
    "temperature": number(0, 2),
    "top_p": number(0, 1),
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "seed": integer(-(1 << 63), (1 << 64) - 1),
    "top_k": integer(0),
    "min_p": number(0, 1),
    "typical_p": number(1e-6, 1),
    "repetition_penalty": number(0.01, 100),
    "dry_multiplier": number(0, 100),
    "dry_base": number(1, 100),
    "dry_allowed_length": integer(1, 1 << 20),
    "dry_range": integer(0),
    "mirostat": integer(0, 2),
    "mirostat_tau": number(0, 100),
    "mirostat_eta": number(0, 1),
    "min_tokens": integer(0),
    "ignore_eos": boolean,
}
STOP = either(
    (str, string(1, 1000)), (list, array(string(1, 1000), 0, STOPS)), wanted="a string or an array of them"
)
LOGIT_BIAS = mapping(number(-100, 100), 1024)
STREAM_OPTIONS = record({"include_usage": boolean, "include_obfuscation": boolean})
IGNORED: dict[str, Check] = {  # what changes nothing here
    "metadata": mapping(string(0, 512), 16),
    "user": string(),
    "safety_identifier": string(),
    "prompt_cache_key": string(),
    "prompt_cache_retention": string(),
    "prompt_cache_options": mapping(),
    "service_tier": choice("auto", "default", "flex", "scale", "priority"),
}
VERBOSITY = choice("low", "medium", "high")  # that, too

_NAMED: dict[str, Check] = {"name": string(1, 64), "description": string(), "strict": boolean}
_SCHEMA = record(
    {**_NAMED, "schema": either((dict, mapping()), (bool, boolean), wanted="a JSON schema")},
    required=("name",),
)


def output_forms(schema: Check) -> Check:
    """The forms that an output may have, given how the endpoint writes the one with a schema."""
    plain = {name: record({"type": choice(name)}) for name in ("text", "json_object")}
    return tagged({**plain, "json_schema": schema})


RESPONSE_FORMAT = output_forms(
    record({"type": choice("json_schema"), "json_schema": _SCHEMA}, required=("json_schema",))
)
TEXT_FORMAT = output_forms(  # of /v1/responses
    record({"type": choice("json_schema"), **_NAMED, "schema": mapping()}, required=("name", "schema"))
)


def sampling(
    service: Service,
    body: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    schema: Any = None,
    schema_param: str = "response_format",
) -> SamplingParams:
    """The parameters of one request. `schema`: a JSON schema that the output must satisfy (True: any JSON
    object)."""
    values: dict[str, Any] = {k: body[k] for k in SAMPLING if k in body and k != "ignore_eos"}
    if "top_p" in values:
        values["top_p"] = max(values["top_p"], 1e-6)  # 0 stands for the most likely token
    if "logit_bias" in body:
        values["logit_bias"] = _biases(body["logit_bias"], service.vocab_size)
    stop = body.get("stop", ())
    values["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    values["ignore_end"] = body.get("ignore_eos", False)
    values["max_tokens"], values["logprobs"] = service.allowed(max_tokens), logprobs
    if schema is not None:
        values["grammar"] = service.grammar(schema, schema_param)
    try:
        return SamplingParams(**values)
    except ArgumentError as error:
        name = error.asked.partition("(")[2].partition("=")[0]
        raise ApiError(
            f"{name} is not accepted", error.because, error.fix, param=name, code="invalid_value"
        ) from None


def _biases(given: Mapping[str, float], vocab: int) -> dict[int, float]:
    result: dict[int, float] = {}
    for key, bias in given.items():
        if not key.isascii() or not key.isdigit() or len(key) > 9 or int(key) >= vocab:
            raise wrong_value(
                f"logit_bias.{key[:40]}", f"tokens have numbers from 0 to {vocab - 1}", "use these"
            )
        result[int(key)] = bias
    return result


def schema_of(form: Mapping[str, Any] | None, inner: str = "json_schema") -> Any:
    """The schema that a response_format asks for; None for text."""
    if form is None or form["type"] == "text":
        return None
    if form["type"] == "json_object":
        return True
    return form[inner].get("schema", True) if inner else form.get("schema", True)
