"""How well a model predicts a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from whit.helpers import ArgumentError

if TYPE_CHECKING:
    from whit.llm.model import Model


def perplexity(
    model: Model, tokens: Sequence[int], *, window: int = 512, chunk: int = 256, first: int | None = None
) -> float:
    """e to the mean of -log p(token | those before it), over a text cut into windows that do not overlap.

    tokens:  the text; a last piece shorter than a window is left out
    first:   predictions from this place of each window on count, so that all have something to go on
             (default: the second half, as llama.cpp counts); a token that starts every text replaces the
             window's first if the caller puts it there
    Errors:  ArgumentError if there is no whole window, or the window does not fit the model

    >>> perplexity(model, tokenizer.encode(text))  # doctest: +SKIP
    21.3
    """
    start = window // 2 if first is None else first
    if not 1 < window <= model.context or not 0 <= start < window - 1 or len(tokens) < window:
        raise ArgumentError(
            f"perplexity of {len(tokens)} tokens in windows of {window}, from place {start} on",
            because=f"the model's context is {model.context}, and the text must fill a window",
            fix="pass a longer text, or a smaller window",
        )
    cache = model.new_cache(1, window)
    total, count = 0.0, 0
    for begin in range(0, len(tokens) - window + 1, window):
        piece = list(tokens[begin : begin + window])
        for at in range(0, window, chunk):
            part = piece[at : at + chunk]
            logits = model.forward([part], [at], cache, every=True)[0]
            wanted = range(max(at, start), min(at + len(part), window - 1))
            if wanted:
                total += _loss(
                    logits, [place - at for place in wanted], [piece[place + 1] for place in wanted]
                )
                count += len(wanted)
    return math.exp(total / count)


def _loss(logits: object, rows: list[int], targets: list[int]) -> float:
    """The sum of -log softmax(logits)[target] over rows, in float64."""
    import numpy as np

    values = np.asarray(logits)[rows].astype(np.float64)
    peaks = values.max(-1)
    sums = np.log(np.exp(values - peaks[:, None]).sum(-1)) + peaks
    return float((sums - values[np.arange(len(rows)), targets]).sum())
