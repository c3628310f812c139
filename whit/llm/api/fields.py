"""Checks of JSON values. A check takes a value and its path in the body, and returns the value or raises an
ApiError that names the path. Bodies are described by composing checks:

    completion = record({"prompt": string(), "n": integer(1, 8)}, required=("prompt",))
    completion({"prompt": "Once", "n": 2}, "")
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from whit.llm.api.errors import ApiError

Check = Callable[[Any, str], Any]

_KINDS = {str: "a string", bool: "a boolean", int: "an integer", float: "a number", list: "an array",
          dict: "an object", type(None): "null"}  # fmt: skip


def kind_of(value: object) -> str:
    """How JSON calls the type of a value."""
    return _KINDS.get(type(value), type(value).__name__)


def wrong_type(path: str, value: object, wanted: str) -> ApiError:
    """The error of a value of the wrong type."""
    return ApiError(
        f"{path or 'the body'} is {kind_of(value)}",
        because=f"it takes {wanted}",
        fix="see the API reference for its form",
        param=path or None,
        code="invalid_type",
    )


def wrong_value(path: str, because: str, fix: str = "", code: str = "invalid_value") -> ApiError:
    """The error of a value of the right type that is not allowed."""
    return ApiError(
        f"{path or 'the body'} is not accepted", because=because, fix=fix, param=path or None, code=code
    )


def unsupported(why: str, *allowed: object) -> Check:
    """A parameter that this server does not have: only values that mean "as usual" are let through."""

    def check(value: Any, path: str) -> Any:
        if not any(type(value) is type(usual) and value == usual for usual in allowed):
            raise wrong_value(path, why, "leave it out", "unsupported_parameter")
        return value

    return check


def number(low: float, high: float) -> Check:
    """A number from `low` to `high`; true and false are none."""

    def check(value: Any, path: str) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise wrong_type(path, value, "a number")
        if isinstance(value, float) and not math.isfinite(value):
            raise wrong_value(path, "it is not finite")
        if not low <= value <= high:
            raise wrong_value(path, f"{value} is outside of {low:g} to {high:g}", "choose a value inside")
        return float(value)

    return check


def integer(low: int, high: int = 1 << 53) -> Check:
    """A whole number from `low` to `high`."""

    def check(value: Any, path: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong_type(path, value, "an integer")
        if not low <= value <= high:
            shown = value if abs(value) < 1 << 64 else "a number of many digits"
            raise wrong_value(path, f"{shown} is outside of {low} to {high}", "choose a value inside")
        return value

    return check


def boolean(value: Any, path: str) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise wrong_type(path, value, "a boolean")
    return value


def string(least: int = 0, most: int | None = None) -> Check:
    """Text of a length from `least` to `most` characters."""

    def check(value: Any, path: str) -> str:
        if not isinstance(value, str):
            raise wrong_type(path, value, "a string")
        if len(value) < least:
            raise wrong_value(path, "it is empty" if least == 1 else f"it has fewer than {least} characters")
        if most is not None and len(value) > most:
            raise wrong_value(path, f"it has {len(value)} characters, and {most} are allowed")
        return value

    return check


def choice(*values: str) -> Check:
    """One of some words."""

    def check(value: Any, path: str) -> str:
        if not isinstance(value, str):
            raise wrong_type(path, value, "a string")
        if value not in values:
            raise wrong_value(path, f"it is {value[:60]!r}", "use one of " + ", ".join(map(repr, values)))
        return value

    return check


def array(item: Check, least: int = 0, most: int | None = None) -> Check:
    """A list whose items pass a check."""

    def check(value: Any, path: str) -> list[Any]:
        if not isinstance(value, list):
            raise wrong_type(path, value, "an array")
        if len(value) < least:
            raise wrong_value(path, "it is empty" if not value else f"it has fewer than {least} items")
        if most is not None and len(value) > most:
            raise wrong_value(path, f"it has {len(value)} items, and {most} are allowed")
        return [item(entry, f"{path}[{i}]") for i, entry in enumerate(value)]

    return check


def mapping(item: Check | None = None, most: int | None = None) -> Check:
    """An object with any keys, whose values pass a check."""

    def check(value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise wrong_type(path, value, "an object")
        if most is not None and len(value) > most:
            raise wrong_value(path, f"it has {len(value)} entries, and {most} are allowed")
        return {k: item(v, f"{path}.{k}") for k, v in value.items()} if item else value

    return check


def record(fields: Mapping[str, Check], required: Sequence[str] = ()) -> Check:
    """An object with known fields. null counts as left out; a field that is not known is an error."""

    def check(value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise wrong_type(path, value, "an object")
        dot = path + "." if path else ""
        for name in value:
            if name not in fields:
                raise unknown(dot + name, name, fields)
        for name in required:
            if value.get(name) is None:
                raise ApiError(
                    f"{dot + name} is missing",
                    because="it is required",
                    fix="add it",
                    param=dot + name,
                    code="missing_required_parameter",
                )
        return {k: fields[k](v, dot + k) for k, v in value.items() if v is not None}

    return check


def unknown(path: str, name: str, known: Mapping[str, Check]) -> ApiError:
    """The error of a field that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(name[:100], known, 1)
    return ApiError(
        f"{path[:100]} is unknown",
        because="there is no such parameter",
        fix=f"did you mean {near[0]}?" if near else "remove it",
        param=path[:200],
        code="unknown_parameter",
    )


def either(*checks: tuple[type | tuple[type, ...], Check], wanted: str) -> Check:
    """A value of one of several types, each with a check of its own."""

    def check(value: Any, path: str) -> Any:
        for types, inner in checks:
            if isinstance(value, types) and not (isinstance(value, bool) and types is int):
                return inner(value, path)
        raise wrong_type(path, value, wanted)

    return check


def tagged(tags: Mapping[str, Check], key: str = "type", default: str | None = None) -> Check:
    """An object whose field `key` says which check applies."""

    def check(value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            raise wrong_type(path, value, "an object")
        name = value.get(key, default)
        if name is None:
            raise ApiError(
                f"{path}.{key} is missing",
                because="it says what the object is",
                fix="use one of " + ", ".join(map(repr, tags)),
                param=f"{path}.{key}",
                code="missing_required_parameter",
            )
        choice(*tags)(name, f"{path}.{key}")
        return tags[name](value, path)

    return check
