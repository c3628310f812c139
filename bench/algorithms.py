"""The work of the rows on algorithms: sorting, selection, running sums, decompositions."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.kernels import Work, draw, eager, replayed
from bench.peers import load


def ordered(size: int) -> Work:
    """Sorted values."""
    x = draw(size)
    contenders = {"whit": replayed(lambda v: v.sort()[0], x), "numpy": lambda: np.sort(x)}
    return Work(contenders, 0.0, size, x.nbytes, x.nbytes)


def greatest(size: int, count: int) -> Work:
    """The greatest values, in order."""
    torch, x = load("torch"), draw(size)
    contenders = {
        "whit": replayed(lambda v: v.topk(count)[0], x),
        "torch": eager(lambda v: torch.topk(v, count)[0], x),
    }
    return Work(contenders, 0.0, size, x.nbytes, 4 * count)


def running_sum(size: int) -> Work:
    """Running sums of whole numbers: exact in any order."""
    x = np.random.default_rng(0).integers(-4, 5, size).astype(np.float32)
    contenders = {"whit": replayed(lambda v: v.cumsum(), x), "numpy": lambda: np.cumsum(x)}
    return Work(contenders, 0.0, size, x.nbytes, x.nbytes)


def singular(size: int) -> Work:
    """The singular value decomposition; singular values are compared."""
    x = draw(size, size)

    def ours(v: Any) -> Any:
        u, s, vh = v.svd()
        return s, u, vh

    contenders = {"whit": replayed(ours, x), "numpy": lambda: np.linalg.svd(x)[1]}
    call: Any = contenders["whit"]
    contenders["whit"] = lambda: call()[0]
    return Work(contenders, 1e-5, 9 * size**3, x.nbytes, 2 * x.nbytes)
