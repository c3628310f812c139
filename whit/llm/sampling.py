"""From logits to tokens, on the device.

`SamplingParams` says how one request wants its tokens drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from whit.helpers import ArgumentError

TOP_LOGPROBS = 20  # alternatives that a request may ask for at each position


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's tokens are drawn, and when it ends. Wrong values raise ArgumentError.

    The steps, in this order, each left out at its default: `logit_bias`, DRY (`dry_…`), `repetition_penalty`
    (of everything read or written so far), `frequency_penalty` and `presence_penalty` (of what was written),
    the grammar's mask, `temperature` (0: the most likely token, and the steps below do nothing), `top_k`,
    `typical_p`, `top_p`, `min_p`; `mirostat` 1 or 2 takes the place of these four.

    A request with a `seed` gets the same tokens whatever else runs beside it; without one a seed is drawn.

    >>> SamplingParams(temperature=0.7, top_p=0.9, seed=1).greedy
    False
    """

    max_tokens: int | None = None  # None: as many as the context holds
    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    dry_multiplier: float = 0.0  # 0: off
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_range: int = 0  # how many of the last tokens DRY looks at; 0: all
    dry_breakers: tuple[int, ...] = ()  # tokens that no repetition may span
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    seed: int | None = None
    logprobs: int | None = None  # None: no logprobs; n: the token's, and the n most likely ones
    stop: tuple[str, ...] = ()
    ignore_end: bool = False  # go on after the model's end-of-text tokens
    min_tokens: int = 0  # the end-of-text tokens are banned before
    grammar: Any = None  # a whit.llm.grammar.Grammar

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        elif not isinstance(self.stop, tuple):
            object.__setattr__(self, "stop", tuple(self.stop))
        for name, (low, high, meaning) in _FLOATS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
                raise _wrong(name, value, f"{meaning} is a number from {low:g} to {high:g}")
        for name, (least, most, meaning) in _INTEGERS.items():
            value = getattr(self, name)
            if value is None and name in ("max_tokens", "seed", "logprobs"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise _wrong(name, value, f"{meaning} is a whole number from {least} to {most}")
        if self.top_p == 0 or self.typical_p == 0:
            raise _wrong("top_p" if self.top_p == 0 else "typical_p", 0, "at least one token must be left")
        for token, bias in self.logit_bias.items():
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise _wrong("logit_bias", self.logit_bias, "its keys are token numbers")
            if not isinstance(bias, (int, float)) or math.isnan(bias) or bias == math.inf:
                raise _wrong("logit_bias", self.logit_bias, "its values are numbers below infinity")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise _wrong("stop", self.stop, "stop strings are not empty")

    @property
    def greedy(self) -> bool:
        """Whether each token is the most likely one."""
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """Whether the logits depend on what was read or written before."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.dry_multiplier != 0
        )


_FLOATS: dict[str, tuple[float, float, str]] = {
    "temperature": (0, 100, "the temperature"),
    "top_p": (0, 1, "the kept probability"),
    "min_p": (0, 1, "the least probability, as a share of the greatest,"),
    "typical_p": (0, 1, "the kept probability"),
    "repetition_penalty": (0.01, 100, "the factor"),
    "presence_penalty": (-100, 100, "the penalty"),
    "frequency_penalty": (-100, 100, "the penalty"),
    "dry_multiplier": (0, 100, "the factor"),
    "dry_base": (1, 100, "the base"),
    "mirostat_tau": (0, 100, "the aimed surprise"),
    "mirostat_eta": (0, 1, "the rate"),
}
_INTEGERS: dict[str, tuple[int, int, str]] = {
    "max_tokens": (0, 1 << 40, "the number of tokens"),
    "top_k": (0, 1 << 40, "the number of tokens to choose from (0: all)"),
    "dry_allowed_length": (1, 1 << 20, "the length"),
    "dry_range": (0, 1 << 40, "the number of tokens"),
    "mirostat": (0, 2, "the version (0: off)"),
    "seed": (-(1 << 63), (1 << 64) - 1, "the seed"),
    "logprobs": (0, TOP_LOGPROBS, "the number of alternatives"),
    "min_tokens": (0, 1 << 40, "the number of tokens"),
}


def _wrong(name: str, value: object, because: str) -> ArgumentError:
    shown = repr(value)
    return ArgumentError(
        f"SamplingParams({name}={shown if len(shown) < 80 else shown[:77] + '...'})",
        because=because,
        fix=f"choose another {name}",
    )
