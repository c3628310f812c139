"""Calls with arguments of every kind: each ends in an answer or in a WhitError with three parts."""

from __future__ import annotations

import inspect
import random
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from whit import Tensor, UOp, dtypes
from whit.helpers import WhitError

# what the drivers leave alone: memory at an address that the caller vouches for, and what is no method
LEFT_OUT = {"from_blob", "live", "gradients_wanted", "grad", "manual_seed"}
SMALL = 4000  # results with more elements are not computed


def receivers() -> list[Tensor]:
    """Tensors of several shapes, dtypes and states."""
    nan = float("nan")
    return [
        Tensor([[1.0, 2.0, 3.0], [4.0, nan, 6.0]]),
        Tensor([3, 1, 2]),
        Tensor([True, False]),
        Tensor(2.5),
        Tensor(7),
        Tensor.zeros(0, 3),
        Tensor(np.arange(16.0, dtype=np.float32).reshape(1, 1, 4, 4)),
        Tensor.arange(4) + 1,
        Tensor([1.0, 2.0], dtype=dtypes.float16),
        Tensor([[1, 2], [3, 4]]).realize(),
        Tensor([200, 3], dtype="uint8"),
        Tensor.ones(2, 3, 4),
        Tensor(np.ones((3, 3))),
        Tensor([1.0, 2.0], device="PYTHON"),
    ]


def arguments(rng: random.Random, tensors: Sequence[Tensor]) -> list[Any]:
    """Values of every kind that somebody may pass."""
    return [
        None,
        True,
        False,
        0,
        1,
        2,
        3,
        -1,
        -2,
        -7,
        100,
        10**30,
        -(10**30),
        0.5,
        -1.5,
        1e300,
        float("nan"),
        float("inf"),
        "",
        "mean",
        "sum",
        "none",
        "zzz",
        "float32",
        "int8",
        "CPU",
        "CPU:99",
        "constant",
        "reflect",
        "ij,jk->ik",
        "a b -> b a",
        b"x",
        (),
        [],
        (1,),
        (2, 3),
        (3, 2),
        (-1,),
        (0, 0),
        (1, 1),
        (0, 1, 2),
        (1.5,),
        ("a",),
        (None, None),
        ((0, 1), (1, 0)),
        ((1, 1),),
        [(0, 0, 0)],
        [[1, 2], [3]],
        {},
        {"a": 1},
        object(),
        len,
        slice(0, 2),
        slice(None, None, -1),
        ...,
        2 + 3j,
        dtypes.float32,
        dtypes.int32,
        dtypes.bool,
        np.ones((2, 3), np.float32),
        np.int64(1),
        np.float32(0.5),
        int,
        iter([1]),
        UOp.variable("n", 1, 3),
        UOp.variable("n", 1, 3).bind(2),
        range(3),
        set(),
        *tensors,
        rng.choice([[t] for t in tensors]),
        [tensors[0], tensors[0]],
        [tensors[0], "a"],
        (tensors[0], tensors[1]),
    ]


def signature_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters without self."""
    try:
        found = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []
    return [p for p in found if p.name not in ("self", "cls")]


def draw(
    rng: random.Random, parameters: list[inspect.Parameter], pool: list[Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments that fit the signature's names and numbers, and nothing else."""
    args: list[Any] = []
    named: dict[str, Any] = {}
    positional = True
    for p in parameters:
        if p.kind is p.VAR_POSITIONAL:
            args += [rng.choice(pool) for _ in range(rng.choice([0, 1, 1, 2, 3]))] if positional else []
        elif p.kind is p.VAR_KEYWORD:
            if rng.random() < 0.3:
                named["extra"] = rng.choice(pool)
        elif p.kind is p.KEYWORD_ONLY:
            if p.default is p.empty or rng.random() < 0.3:
                named[p.name] = rng.choice(pool)
        elif p.default is p.empty or (positional and rng.random() < 0.5):
            args.append(rng.choice(pool))
        else:
            positional = False
            if rng.random() < 0.4:
                named[p.name] = rng.choice(pool)
    return args, named


def compute(result: Any) -> None:
    """Realize whatever small tensors are in a result."""
    if isinstance(result, Tensor):
        if all(isinstance(n, int) for n in result.shape) and result.numel() <= SMALL:
            result.numpy()
    elif isinstance(result, (list, tuple)):
        for item in result[:8]:
            compute(item)


def fault(call: Callable[[], Any]) -> str | None:
    """What is wrong with the way in which a call ends; None if nothing is."""
    try:
        compute(call())
    except WhitError as error:
        if not (error.asked and error.because and error.fix):
            return f"a part is missing: {type(error).__name__}{error.__reduce__()[1]}"
        return None
    except RecursionError:
        return "RecursionError"
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        file = place.filename.rsplit("/", 1)[-1]
        return f"{type(error).__name__}: {str(error)[:150]}  ({file}:{place.lineno})"
    return None


def show(value: Any) -> str:
    """A short text of an argument."""
    if isinstance(value, Tensor):
        return f"<{value.dtype} {value.shape}>"
    if isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value):
        return "[" + ", ".join(show(v) for v in value) + "]"
    return repr(value)[:60]


def faults_of(
    name: str, function: Callable[..., Any], calls: int, seed: int, of: Sequence[Tensor] | None
) -> list[str]:
    """Faults of random calls of a function; `of`: receivers that are passed first."""
    rng = random.Random(f"{name} {seed}")
    parameters = signature_of(function)
    found: dict[str, str] = {}
    for _ in range(calls):
        tensors = receivers()
        pool = arguments(rng, tensors)
        args, named = draw(rng, parameters, pool)
        first = [rng.choice(tensors)] if of is not None else []
        shown = [*map(show, [*first, *args]), *[f"{k}={show(v)}" for k, v in named.items()]]
        text = f"{name}({', '.join(shown)})"
        wrong = fault(lambda first=first, args=args, named=named: function(*first, *args, **named))
        if wrong:
            found.setdefault(wrong.rsplit("(", 1)[-1], f"{text} -> {wrong}")
    return list(found.values())
