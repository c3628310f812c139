"""Arguments of kinds that a method never takes: Python's own complaint, said in whit's three parts.

Methods check what is likely to go wrong (shapes, axes, dtypes, devices) and say so in their own words. Left
are values such as a dict for a kernel size, on which some operator fails in the middle of the method.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

from whit.helpers import ArgumentError, WhitError

F = TypeVar("F", bound=Callable[..., Any])
COMPLAINTS = (TypeError, AttributeError, ValueError, IndexError, KeyError, OverflowError, ZeroDivisionError)


def guard(cls: type, names: Iterable[str]) -> None:
    """Let these methods of a class raise ArgumentError where their arguments make Python complain.

    `__init__` is named as the class."""
    for name in names:
        found = next(base.__dict__[name] for base in cls.__mro__ if name in base.__dict__)
        if isinstance(found, (classmethod, staticmethod)):
            setattr(cls, name, type(found)(_guarded(name, found.__func__, "Tensor.")))
        else:
            setattr(cls, name, _guarded(cls.__name__ if name == "__init__" else name, found, "Tensor."))


def guarded(function: F) -> F:
    """The same for a function: a decorator."""
    made: Any = _guarded(function.__name__, function, "")
    return cast(F, made)


def _guarded(name: str, function: Callable[..., Any], owner: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        try:
            return function(*args, **named)
        except WhitError:
            raise
        except COMPLAINTS as error:
            is_made = function.__name__ == "__init__"
            shown, what = (args[1:], type(args[0]).__name__) if is_made else (args, name)
            given = [show_argument(a) for a in shown]
            given += [f"{key}={show_argument(value)}" for key, value in named.items()]
            raise ArgumentError(
                f"{what}({', '.join(given)})",
                because=f"an argument is of a kind that {what} does not take ({error})",
                fix=f"help({what if what[0].isupper() else owner + what}) says what it takes",
            ) from error

    return call


def show_argument(value: Any) -> str:
    """A short text of an argument."""
    uop = getattr(value, "uop", None)
    text = f"<Tensor {uop.dtype} {uop.shape}>" if uop is not None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
