"""From logits to tokens.

`SamplingParams` says how one request wants its tokens drawn, `RowState` is where that request stands,
`Sampler` draws for all rows of a batch: rows that want the same steps share the kernels, each with numbers of
its own. The arithmetic on the device is in `draw.py`.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from whit.engine.jit import TinyJit
from whit.helpers import ArgumentError, blake2b
from whit.llm import draw
from whit.tensor import Tensor
from whit.uop import dtypes

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


# ---- where a request stands --------------------------------------------------------------------------------


class Draw(NamedTuple):
    """What was drawn for a row: the token, and if asked for its logprob and the most likely tokens'."""

    token: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


class Steps(NamedTuple):
    """The steps that a row wants: rows with equal steps share kernels."""

    draws: bool  # False: the most likely token
    top_k: bool = False
    typical_p: bool = False
    top_p: bool = False
    min_p: bool = False
    mirostat: int = 0
    penalised: bool = False
    sparse: int = 0  # room for so many single logits to change
    masked: bool = False
    logprobs: int = -1


class RowState:
    """A request's side of sampling: its random numbers, what it read and wrote, mirostat's aim, its grammar.

    `end_ids` are banned until `params.min_tokens` are written; `seed` is used if the params have none.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int] = (),
        *,
        end_ids: Iterable[int] = (),
        seed: int = 0,
    ) -> None:
        self.params = params
        self.prompt, self.written = tuple(prompt), list[int]()
        self.end_ids = tuple(sorted(end_ids))
        self.seed = params.seed if params.seed is not None else seed
        self.aim = 2 * params.mirostat_tau  # mirostat's bound on surprise, in bits
        self.matcher = params.grammar.matcher() if params.grammar is not None else None
        self._history: Tensor | None = None
        self._counted = 0  # tokens that the history has
        self._changes: dict[int, float] = {}
        self._changed = -1  # how many tokens were written when these were found

    @property
    def plain(self) -> bool:
        """Whether the next tokens are just the most likely ones, whatever is written meanwhile."""
        return self.steps() == _PLAIN and not self.params.penalised

    @property
    def complete(self) -> bool:
        """Whether the grammar lets nothing follow."""
        return self.matcher is not None and self.matcher.complete

    def accept(self, token: int) -> None:
        """A token was written."""
        self.written.append(token)
        if self.matcher is not None:
            self.matcher.accept(token)

    def uniform(self) -> float:
        """The random number in [0, 1) of the next token: it depends on the seed and the token's place
        only."""
        words = (self.seed & (1 << 64) - 1).to_bytes(8, "little") + len(self.written).to_bytes(8, "little")
        digest = blake2b(words, digest_size=8, person=b"whit sampling").digest()
        return (int.from_bytes(digest, "little") >> 11) * 2.0**-53

    def changes(self) -> dict[int, float]:
        """Single logits to change, and by how much: logit_bias, DRY's penalties, bans."""
        params = self.params
        if self._changed != len(self.written):
            self._changed = len(self.written)
            self._changes = {token: float(bias) for token, bias in params.logit_bias.items()}
            if params.dry_multiplier:
                for token, penalty in dry_penalties(params, [*self.prompt, *self.written]).items():
                    self._changes[token] = self._changes.get(token, 0.0) - penalty
            if len(self.written) < params.min_tokens:
                self._changes |= dict.fromkeys(self.end_ids, -math.inf)
        return self._changes

    def steps(self) -> Steps:
        """What the next token needs."""
        p, changes = self.params, self.changes()
        own = p.mirostat == 0 and not p.greedy
        return Steps(
            draws=not p.greedy,
            top_k=own and p.top_k > 0,
            typical_p=own and p.typical_p < 1,
            top_p=own and p.top_p < 1,
            min_p=own and p.min_p > 0,
            mirostat=0 if p.greedy else p.mirostat,
            penalised=p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0,
            sparse=_room(len(changes)),
            masked=self.matcher is not None,
            logprobs=-1 if p.logprobs is None else p.logprobs,
        )

    def numbers(self) -> list[float]:
        """The row's numbers, in the order of `_COLUMNS`."""
        p = self.params
        return [
            1 / p.temperature if p.temperature else 1.0,
            float(min(p.top_k or 1 << 30, 1 << 30)),
            p.typical_p,
            p.top_p,
            math.log(p.min_p) if p.min_p else -1e30,
            self.uniform(),
            p.repetition_penalty,
            p.presence_penalty,
            p.frequency_penalty,
            self.aim,
        ]

    def observe(self, surprise: float) -> None:
        """Mirostat's feedback: the surprise (bits) of the token that was drawn."""
        self.aim -= self.params.mirostat_eta * (surprise - self.params.mirostat_tau)

    def history(self, size: int) -> Tensor:
        """(1, size) int32 for `draw.penalise`."""

        if self._history is None:
            counts = Counter(self.written)
            row = [0] * size
            for token in set(self.prompt):
                row[token] = draw.READ
            for token, times in counts.items():
                row[token] += times
            self._history = Tensor([row], dtype="int32").realize()
        else:
            for token in self.written[self._counted :]:
                self._history = _counting()(self._history, Tensor([token], dtype="int32"))
        self._counted = len(self.written)
        return self._history


def dry_penalties(params: SamplingParams, tokens: Sequence[int]) -> dict[int, float]:
    """DRY ("don't repeat yourself"): token -> what is taken off its logit.

    Let n be the length of the longest end of the text that stands somewhere before, followed there by the
    token. From `dry_allowed_length` on the penalty is multiplier * base ** (n - allowed length). No
    repetition spans a breaker.

    >>> dry_penalties(SamplingParams(dry_multiplier=1.0, dry_base=2.0), [5, 6, 7, 8, 5, 6, 7])
    {8: 2.0}
    """
    recent = list(tokens[-params.dry_range :] if params.dry_range else tokens)
    breakers = set(params.dry_breakers)
    if not recent:
        return {}
    longest: dict[int, int] = {}
    for at, length in enumerate(_matches(recent, breakers)):
        if length >= params.dry_allowed_length:
            following = recent[at + 1]
            if following not in breakers:
                longest[following] = max(longest.get(following, 0), length)
    room = math.log(1e30) / math.log(params.dry_base) if params.dry_base > 1 else math.inf
    return {
        token: params.dry_multiplier * params.dry_base ** min(n - params.dry_allowed_length, room)
        for token, n in sorted(longest.items())
    }


def _matches(tokens: list[int], breakers: set[int]) -> list[int]:
    """For each place but the last: how many tokens that end there equal the last ones of the text. Linear
    time (the Z function of the text read backwards)."""
    text = tokens[::-1]
    limit = next((n for n, token in enumerate(text) if token in breakers), len(text))
    size = len(text)
    z = [0] * size
    left = right = 0
    for i in range(1, size):
        length = min(right - i, z[i - left]) if i < right else 0
        while i + length < size and length < limit and text[length] == text[i + length]:
            length += 1
        z[i] = min(length, limit)
        if i + z[i] > right:
            left, right = i, i + z[i]
    return [z[size - 1 - at] for at in range(size - 1)]


def _room(count: int) -> int:
    """Powers of four, so that few kernels serve all."""
    room = 0 if count == 0 else 4
    while room < count:
        room *= 4
    return room


# ---- drawing for a batch -----------------------------------------------------------------------------------

_COLUMNS = (
    "scale", "top_k", "typical_p", "top_p", "min_p", "uniform", "repetition", "presence", "frequency", "aim",
)  # fmt: skip


class Sampler:
    """Draws the next token of every row of a batch.

    The kernels for a kind of request are made when the first one comes.
    """

    def __init__(self) -> None:
        self._functions: dict[Steps, TinyJit[Any, Tensor]] = {}

    def sample(
        self, logits: Tensor, states: Sequence[RowState], rows: Sequence[int] | None = None
    ) -> list[Draw]:
        """One token a state. Shapes: logits (B, V) float32 in memory; rows: the row that each state reads
        (default: 0, 1, …). The states advance when `RowState.accept` is called, not here (mirostat's aim
        does)."""
        places = list(range(len(states))) if rows is None else list(rows)
        draws: list[Draw | None] = [None] * len(states)
        for steps, members in _grouped(states):
            if steps == _PLAIN:
                best = self.most_likely(logits)
                for n in members:
                    draws[n] = Draw(best[places[n]])
                continue
            packed = self._run(steps, logits, [places[n] for n in members], [states[n] for n in members])
            for n, values in zip(members, packed):
                draws[n] = _unpacked(values, steps)
                if steps.mirostat:
                    states[n].observe(values[2])
        return [draw for draw in draws if draw is not None]

    def most_likely(self, logits: Tensor) -> list[int]:
        """Each row's most likely token; of equal ones the first."""
        return _greedy()(logits).tolist()  # type: ignore[no-any-return]

    def _run(
        self, steps: Steps, logits: Tensor, rows: list[int], states: list[RowState]
    ) -> list[list[float]]:

        function = self._functions.get(steps)
        if function is None:
            function = self._functions[steps] = TinyJit(functools.partial(sample, steps))
        padding = [0] * (_power_of_two(len(rows)) - len(rows))
        rows, states = rows + [rows[n] for n in padding], states + [states[n] for n in padding]
        inputs: dict[str, Tensor] = {}
        if steps.draws or steps.penalised:
            inputs["numbers"] = Tensor([state.numbers() for state in states], dtype="float64")
        if steps.sparse:
            places, values = zip(*[_sparse(state.changes(), steps.sparse) for state in states])
            inputs["places"] = Tensor(list(places), dtype="int32")
            inputs["values"] = Tensor(list(values), dtype="float32")
        if steps.masked:
            import numpy as np

            words = [state.matcher.mask() for state in states if state.matcher is not None]
            inputs["mask"] = Tensor(np.stack(words))
        if steps.penalised:
            inputs["history"] = states[0].history(logits.shape[-1])
        result = function(logits, Tensor(rows, dtype="int32"), **inputs)
        return result.tolist()  # type: ignore[no-any-return]


def _grouped(states: Sequence[RowState]) -> list[tuple[Steps, list[int]]]:
    """Rows by the steps they want. Penalised rows stand alone: each has a history in memory."""
    groups: dict[tuple[Steps, int], list[int]] = {}
    for row, state in enumerate(states):
        steps = state.steps()
        groups.setdefault((steps, row if steps.penalised else -1), []).append(row)
    return [(steps, rows) for (steps, _), rows in groups.items()]


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _sparse(changes: Mapping[int, float], room: int) -> tuple[list[int], list[float]]:
    empty = room - len(changes)
    return [*changes, *[-1] * empty], [*changes.values(), *[0.0] * empty]


def _unpacked(values: Sequence[float], steps: Steps) -> Draw:
    if steps.logprobs < 0:
        return Draw(int(values[0]))
    best = values[3:]
    pairs = zip(best[steps.logprobs :], best[: steps.logprobs])
    return Draw(int(values[0]), values[1], tuple([(int(token), logprob) for token, logprob in pairs]))


def sample(
    steps: Steps,
    logits: Tensor,
    rows: Tensor,
    *,
    numbers: Tensor | None = None,
    places: Tensor | None = None,
    values: Tensor | None = None,
    mask: Tensor | None = None,
    history: Tensor | None = None,
) -> Tensor:
    """The graph of one step for rows of a batch that want the same steps.

    Shapes: logits (B, V) float32, rows (R,) int32, numbers (R, len(_COLUMNS)) float64, places and values (R,
    K), mask (R, ceil(V / 32)) int32, history (R, V) int32 -> (R, 3 + 2 n) float64: token, its logprob, its
    surprise in bits (mirostat), the logprobs and numbers of the n most likely tokens. What was not asked for
    is 0.
    """

    column = {} if numbers is None else {name: numbers[:, n] for n, name in enumerate(_COLUMNS)}
    changed = logits.take(rows, axis=0)  # (R, V)
    if places is not None and values is not None:
        changed = draw.add_sparse(changed, places, values)
    if history is not None:
        penalties = [column[name].cast(dtypes.float32) for name in ("repetition", "presence", "frequency")]
        changed = draw.penalise(changed, history, *penalties)
    if mask is not None:
        changed = draw.apply_mask(changed, mask)
    surprise = None
    if steps.draws:
        tokens, surprise = _drawn(steps, changed, column)
    else:
        tokens = changed.contiguous().argmax(-1)
    return _packed(steps, logits.take(rows, axis=0), tokens, surprise).realize()


def _drawn(steps: Steps, logits: Tensor, column: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """(tokens (R,) int32, their surprise in bits (R,) float64)."""

    scaled = (logits * column["scale"].cast(dtypes.float32).unsqueeze(-1)).contiguous()
    shifted = (scaled - scaled.max(-1, keepdim=True)).contiguous()
    weights = draw.weigh(shifted).contiguous()
    if steps.mirostat:
        total = draw.mass(weights).cast(dtypes.float64) * (1 / draw.UNIT)
        whole = total.log2()  # the surprise of a token is whole - shifted / ln 2
        kept = draw.keep_mirostat(steps.mirostat, shifted, whole, column["aim"])
        tokens = draw.draw(kept.where(weights, 0).contiguous(), column["uniform"])
        bits = draw.at_token(shifted, tokens).cast(dtypes.float64) * (1 / math.log(2))
        return tokens, whole - bits
    if steps.top_k:
        key = draw.keys(shifted)
        weights = draw.keep_top_k(key, column["top_k"].cast(dtypes.int32)).where(weights, 0).contiguous()
    if steps.typical_p:
        order = draw.strangeness(shifted, weights)
        weights = draw.keep_mass(order, weights, column["typical_p"]).where(weights, 0).contiguous()
    if steps.top_p:
        key = draw.keys(shifted)
        weights = draw.keep_mass(key, weights, column["top_p"]).where(weights, 0).contiguous()
    if steps.min_p:
        weights = draw.keep_min_p(shifted, weights, column["min_p"]).where(weights, 0).contiguous()
    return draw.draw(weights, column["uniform"]), None


def _packed(steps: Steps, logits: Tensor, tokens: Tensor, surprise: Tensor | None) -> Tensor:
    """The results as rows of float64."""

    nothing = tokens.cast(dtypes.float64) * 0
    columns = [tokens.cast(dtypes.float64), nothing, nothing if surprise is None else surprise]
    if steps.logprobs >= 0:
        norm = logits.logsumexp(-1)
        columns[1] = (draw.at_token(logits, tokens) - norm).cast(dtypes.float64)
        if steps.logprobs:
            best, numbers = draw.top(logits.contiguous(), steps.logprobs)
            both = [(best - norm.unsqueeze(-1)).cast(dtypes.float64), numbers.cast(dtypes.float64)]
            return columns[0].stack(*columns[1:], dim=-1).cat(*both, dim=-1)
    return columns[0].stack(*columns[1:], dim=-1)


_PLAIN = Steps(draws=False)


@functools.cache
def _greedy() -> Callable[[Tensor], Tensor]:
    """Each row's most likely token."""
    return TinyJit(lambda logits: logits.argmax(-1).realize())


@functools.cache
def _counting() -> Callable[[Tensor, Tensor], Tensor]:
    """history[0, token] += 1, in place."""

    def count(history: Tensor, token: Tensor) -> Tensor:
        return history.assign(history + draw.one_hot(history, token)).realize()

    return TinyJit(count)
