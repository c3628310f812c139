"""Arguments of kinds that a function never takes, said in whit's three parts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from whit.helpers import ArgumentError, WhitError
from whit.tensor import Tensor
from whit.tensor.guard import COMPLAINTS, show_argument


def check_all(namespace: dict[str, Any], names: Iterable[str]) -> None:
    """Let the functions of these names raise ArgumentError where their arguments make Python complain."""
    for name in names:
        if inspect.isfunction(namespace[name]) and not name.startswith("_"):
            namespace[name] = _checked(name, namespace[name])


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    first = next(iter(inspect.signature(function).parameters.values()), None)
    tensor_first = first is not None and first.annotation == "Tensor" and first.kind is first.POSITIONAL_ONLY

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        try:
            if tensor_first and args and not isinstance(args[0], Tensor):
                raise TypeError("its first argument is a tensor")
            return function(*args, **named)
        except WhitError:
            raise
        except COMPLAINTS as error:
            given = [show_argument(a) for a in args]
            given += [f"{key}={show_argument(value)}" for key, value in named.items()]
            raise ArgumentError(
                f"{name}({', '.join(given)})",
                because=f"an argument is of a kind that {name} does not take ({error})",
                fix="convert arrays of others with asarray; help(whit.array_api) says what is taken",
            ) from error

    return call
