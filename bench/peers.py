"""The peers as modules, set up alike: every core, results as NumPy arrays."""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from functools import lru_cache
from typing import Any

import numpy as np

CORES = len(os.sched_getaffinity(0))


@lru_cache
def load(name: str) -> Any:
    """The module of a framework or a part of one, with as many threads as there are cores."""
    module = importlib.import_module(name)
    if name == "torch":
        module.set_num_threads(CORES)
    return module


@lru_cache
def present(name: str) -> bool:
    """Whether the peer is installed."""
    return importlib.util.find_spec(name) is not None


def arrays(result: Any) -> list[Any]:
    """A result of any framework (or a tuple of results) as NumPy arrays, wide enough to compare."""
    if isinstance(result, (tuple, list)):
        return [array for part in result for array in arrays(part)]
    if type(result).__module__.startswith("torch"):
        kind = load("torch")
        return [result.detach().to(kind.float32 if result.dtype == kind.bfloat16 else result.dtype).numpy()]
    return [result.numpy() if hasattr(result, "uop") else np.asarray(result)]


def difference(mine: Any, theirs: Any) -> float:
    """Greatest difference of two results in units of the greatest magnitude; inf where shapes or NaN differ.

    >>> difference(np.array([1.0, 2.0]), np.array([1.0, 2.5]))
    0.2
    """
    left, right = arrays(mine), arrays(theirs)
    if len(left) != len(right):
        return float("inf")
    worst = 0.0
    for x, y in zip(left, right):
        if x.shape != y.shape or not np.isfinite(x.astype(np.float64)).all():
            return float("inf")
        y = y.astype(np.float64)
        scale = max(float(np.abs(y).max(initial=0.0)), 1e-30)
        worst = max(worst, float(np.abs(x.astype(np.float64) - y).max(initial=0.0)) / scale)
    return worst


def compiled(function: Any) -> Any:
    """torch.compile, quiet about its own deprecations."""
    warnings.filterwarnings("ignore", module=r"torch\..*")
    return load("torch").compile(function)
