"""Drawing tokens from logits, as tensor graphs over rows of a batch.

Probabilities become whole numbers first (units of 2**-30 of the most likely token's), so that every sum below
is exact: a row's token does not depend on how many rows there are, on how sums are ordered, or on the device.
A token that is 2**30 times less likely than the best one is never drawn.

Nothing is sorted. "The k most likely" and "the most likely ones that make up p" are thresholds, found by a
search over the bits of a value: sixteen passes that each count at three places.
"""

from __future__ import annotations

import math

from whit.tensor import Tensor
from whit.uop import dtypes

UNIT = 1 << 30  # the weight of the most likely token
FAN = 64  # children of a node of the tree that a draw walks down
LEAST = -(1 << 31)  # key of what is not kept
FLOOR = -120.0  # logits lower than this below the best weigh nothing; finite, so that products stay numbers
READ = 1 << 24  # flag of a token that the prompt has, above the count of how often it was written
MIROSTAT_TOP = 100  # how many probabilities the slope of mirostat 1 is taken from


# ---- values as integers that order alike -------------------------------------------------------------------


def keys(values: Tensor) -> Tensor:
    """float32 -> int32 that orders as the values do (-0.0 is 0.0)."""
    bits = values.eq(0).where(0.0, values).bitcast(dtypes.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).contiguous()


def _search(key: Tensor, enough: Tensor, weights: Tensor | None) -> Tensor:
    """The greatest t such that the rows' sum of weights (None: number) over key >= t is at least `enough`.

    Shapes: key, weights (B, N) int32, enough (B,) -> (B,) int32. The least int32 if nothing is enough.
    """
    rows = key.shape[0]
    low = Tensor.full((rows,), LEAST, dtype=dtypes.int32, device=key.device).contiguous()
    step = Tensor.full((rows,), 1 << 30, dtype=dtypes.int32, device=key.device).contiguous()
    for _ in range(16):  # a quarter of the interval is left each time
        reached = []
        for part in (1, 2, 3):
            hit = key >= (low + step * part).unsqueeze(-1)
            total = hit.sum(-1) if weights is None else mass(hit.where(weights, 0))
            reached.append((total >= enough).cast(dtypes.int32))
        low = (low + step * (reached[0] + reached[1] + reached[2])).contiguous()
        step = (step >> 2).contiguous()
    return low


def mass(weights: Tensor) -> Tensor:
    """Exact sums of rows of int32 weights, as int64."""
    return weights.cast(dtypes.int64).sum(-1)


# ---- which tokens are kept, as bools ----------------------------


def keep_top_k(key: Tensor, k: Tensor) -> Tensor:
    """The k (B,) int32 greatest; others that equal the last of them stay too."""
    return key >= _search(key, k, None).unsqueeze(-1)


def keep_mass(order: Tensor, weights: Tensor, share: Tensor) -> Tensor:
    """Bool: the fewest tokens, greatest `order` first, that have `share` (B,) float64 of the weights."""
    total = mass(weights)
    wanted = (total.cast(dtypes.float64) * share).ceil().cast(dtypes.int64)
    wanted = wanted.maximum(1).minimum(total)
    return order >= _search(order, wanted, weights).unsqueeze(-1)


def weigh(shifted: Tensor) -> Tensor:
    """exp(x) in units, for x <= 0: int32."""
    return (shifted.maximum(FLOOR).exp() * float(UNIT)).round().cast(dtypes.int32)


def keep_min_p(shifted: Tensor, weights: Tensor, least: Tensor) -> Tensor:
    """Bool: tokens of at least exp(`least`) (B,) float64 times the probability of the most likely one
    left."""
    left = (weights > 0).where(shifted, -math.inf)
    return left >= left.max(-1, keepdim=True) + least.cast(dtypes.float32).unsqueeze(-1)


def strangeness(shifted: Tensor, weights: Tensor) -> Tensor:
    """How far each token's surprise is from the mean surprise (Meister et al. 2022, eq. 4), as int32 keys of
    which the greatest are the most typical. Tokens without weight get the least."""
    x = shifted.maximum(FLOOR)
    # the mean of x under the distribution; |x exp(x)| < 1/2, so it fits the same units
    moments = (x * x.exp() * float(UNIT)).round().cast(dtypes.int32)
    moments = (weights > 0).where(moments, 0)
    mean = mass(moments).cast(dtypes.float64) / mass(weights).cast(dtypes.float64)
    distance = (x - mean.cast(dtypes.float32).unsqueeze(-1)).abs()
    return (weights > 0).where(-distance.bitcast(dtypes.int32), LEAST).contiguous()


# ---- drawing -----------------------------------------------------------------------------------------------


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """One position per row, with probability in proportion to its weight.

    Shapes: weights (B, N) int32, not all 0 in a row; uniform (B,) float64 in [0, 1) -> (B,) int32. Sums stand
    in a tree with FAN children a node; the draw walks down from the root.
    """
    levels = [weights]
    while levels[-1].shape[-1] > FAN:
        levels.append(_columns(levels[-1]).cast(dtypes.int64).sum(1).contiguous())
    top = levels.pop().cast(dtypes.int64)
    total = top.sum(-1)
    target = (uniform * total.cast(dtypes.float64)).cast(dtypes.int64)  # < total: total is below 2**53
    place, target = _step(top, target)
    while levels:
        below = _columns(levels.pop())  # child i of node j stands at [i, j]
        rows, fan, nodes = below.shape
        children = _at(below.reshape(rows, fan * nodes), _ramp(fan, below) * nodes + place.unsqueeze(-1))
        child, target = _step(children.cast(dtypes.int64), target)
        place = (child * nodes + place).contiguous()
    return place


def _columns(values: Tensor) -> Tensor:
    """(B, N) -> (B, FAN, ceil(N / FAN)), zeros at the end."""
    rows, size = values.shape
    nodes = -(-size // FAN)
    return values.pad(((0, 0), (0, nodes * FAN - size))).reshape(rows, FAN, nodes)


def _step(parts: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Which part a target falls into, and the target within it."""
    running = parts.cumsum(-1).contiguous()
    place = (running <= target.unsqueeze(-1)).sum(-1).cast(dtypes.int32)
    hit = _ramp(parts.shape[-1], parts).eq(place.unsqueeze(-1))
    before = hit.where(running - parts, 0).sum(-1)  # what the parts to the left have
    return place, (target - before).contiguous()


def _ramp(size: int, like: Tensor) -> Tensor:
    """0, 1, … as a row."""
    return Tensor.arange(size, dtype=dtypes.int32, device=like.device).unsqueeze(0)


def _at(values: Tensor, places: Tensor) -> Tensor:
    """values[b, places[b, i]]: reads what it needs and no more."""
    rows, size = values.shape
    starts = Tensor.arange(rows, dtype=dtypes.int32, device=values.device).unsqueeze(-1) * size
    return values.contiguous().reshape(rows * size).take(starts + places)


def at_token(values: Tensor, tokens: Tensor) -> Tensor:
    """values[b, tokens[b]]."""
    return _at(values, tokens.unsqueeze(-1)).squeeze(-1)


# ---- the most likely, in order -----------------------------------------------------------------------------


def top(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(the `count` greatest values of each row, their positions), greatest first; of equal ones the first.

    Shapes: (B, N) float32 -> (B, count) float32, (B, count) int32. The threshold is searched; then the tokens
    above it are counted off, without sorting the row.
    """
    key = keys(values)
    wanted = Tensor.full((key.shape[0],), count, dtype=dtypes.int32, device=key.device)
    last = _search(key, wanted, None).unsqueeze(-1)
    above = (key > last).cast(dtypes.int32).contiguous()
    equal = key.eq(last).cast(dtypes.int32).contiguous()
    number = _ramp(count, key)
    sure = above.sum(-1).unsqueeze(-1)
    places = (number < sure).where(_nth(above, number), _nth(equal, (number - sure).maximum(0)))
    found = _at(values, places.contiguous()).contiguous()
    order = found.argsort(-1, descending=True)  # stable, and positions rise within equal values
    return found.gather(1, order), places.gather(1, order)


def _nth(flags: Tensor, number: Tensor) -> Tensor:
    """Position of the n-th flag (counted from 0) of a row. Shapes: flags (B, N), number (1 or B, K) -> (B,
    K)."""
    rows, size = flags.shape
    blocks = -(-size // FAN)
    split = flags.pad(((0, 0), (0, blocks * FAN - size))).reshape(rows, blocks, FAN)
    running = split.sum(-1).cast(dtypes.int32).cumsum(-1).contiguous()  # (B, blocks)
    passed = running.unsqueeze(1) <= number.unsqueeze(-1)  # (B, K, blocks)
    block = passed.sum(-1).cast(dtypes.int32).minimum(blocks - 1)
    before = passed.where(running.unsqueeze(1), 0).max(-1)
    inside = _at(
        split.reshape(rows, blocks * FAN), (block.unsqueeze(-1) * FAN + _ramp(FAN, flags)).reshape(rows, -1)
    ).reshape(rows, -1, FAN)
    rest = (number - before).unsqueeze(-1)
    return block * FAN + (inside.cumsum(-1) <= rest).sum(-1).cast(dtypes.int32).minimum(FAN - 1)


# ---- changes of logits before the draw ---------------------------------------------------------------------


def penalise(
    logits: Tensor, history: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Repetition penalty (Keskar et al. 2019) of all that was read or written, then presence and frequency
    penalties (as OpenAI defines them) of what was written.

    Shapes: logits (B, V), history (B, V) int32: how often a token was written, plus READ if it was read; the
    penalties (B,) float32.
    """
    factor, written = repetition.unsqueeze(-1), (history & (READ - 1)).cast(dtypes.float32)
    weakened = (logits > 0).where(logits / factor, logits * factor)
    known = (history > 0).where(weakened, logits)
    once = (written > 0).where(presence.unsqueeze(-1), 0.0)
    return known - once - written * frequency.unsqueeze(-1)


def one_hot(history: Tensor, token: Tensor) -> Tensor:
    """1 at the token of each row. Shapes: history (B, V), token (B,) int32 -> (B, V) int32."""
    return _ramp(history.shape[-1], history).eq(token.unsqueeze(-1)).cast(dtypes.int32)


def add_sparse(logits: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """logits[b, places[b, k]] += values[b, k]; the places of a row differ, negative ones are none.

    Shapes: logits (B, V), places (B, K) int32, values (B, K) float32.
    """
    hit = places.unsqueeze(1).eq(_ramp(logits.shape[-1], logits).unsqueeze(-1))  # (B, V, K)
    return logits + hit.where(values.unsqueeze(1), 0.0).sum(-1)


def apply_mask(logits: Tensor, words: Tensor) -> Tensor:
    """-inf where a bit is 0: bit t % 32 of word t // 32 belongs to token t. Shapes: words (B, W) int32."""
    rows, count = words.shape
    size = logits.shape[-1]
    bits = (words.unsqueeze(-1) >> _ramp(32, words).unsqueeze(0)) & 1  # (B, W, 32)
    allowed = bits.reshape(rows, count * 32).pad(((0, 0), (0, max(0, size - count * 32))))[:, :size]
    return allowed.ne(0).where(logits, -math.inf)


# ---- mirostat (Basu et al. 2021) ---------------------------------------------------------------------------


def keep_mirostat(version: int, shifted: Tensor, whole: Tensor, aim: Tensor) -> Tensor:
    """Bool: what mirostat leaves to draw from, at least the most likely token.

    Shapes: shifted (B, N) float32 logits below the greatest; whole (B,) float64, surprise of the most likely
    token in bits; aim (B,) float64, the bound on surprise in bits.
    """
    if version == 1:
        return keep_top_k(keys(shifted), mirostat_k(shifted, aim))
    least = ((whole - aim) * math.log(2)).minimum(0.0)
    return shifted >= least.cast(dtypes.float32).unsqueeze(-1)


def mirostat_k(shifted: Tensor, aim: Tensor) -> Tensor:
    """k of algorithm 1: Zipf's slope from the most likely tokens, then how many make up the aimed surprise.

    Shapes: shifted (B, N), aim (B,) float64 bits -> (B,) int32.
    """
    size = shifted.shape[-1]
    best, _ = top(shifted, min(MIROSTAT_TOP, size))
    ratios = best[:, :-1] - best[:, 1:]  # log(p_i / p_(i+1))
    count = ratios.shape[-1]
    steps = Tensor([math.log((i + 2) / (i + 1)) for i in range(count)], device=shifted.device)
    slope = ((ratios * steps).sum(-1) / (steps * steps).sum(-1)).cast(dtypes.float64)
    excess = slope - 1
    # (excess * 2**aim / (1 - N**-excess)) ** (1 / slope), by logarithms; at excess 0 the part is 1 / log N
    grown = 1 - (excess * -math.log(size)).exp()
    fraction = (excess.abs() < 1e-6).where(1 / math.log(max(size, 2)), excess / grown)
    k = ((fraction.log() + aim * math.log(2)) / slope).exp()
    return (k.minimum(float(size)).round() + 1).clip(1, size).cast(dtypes.int32)
