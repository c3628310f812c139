"""Sampling: every step against NumPy's version of its published definition, draws against the distribution,
and the same token whatever else is in the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest

from whit import Tensor
from whit.helpers import ArgumentError
from whit.llm import draw
from whit.llm.sampling import RowState, Sampler, SamplingParams, dry_penalties

SIZES = (5, 64, 65, 1000, 4097)


def rows(size: int, count: int = 3, spread: float = 3.0, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((count, size)) * spread).astype(np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# ---- masks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("k", (1, 3, 40, 5000))
def test_top_k_keeps_the_k_greatest(size: int, k: int) -> None:
    x = rows(size)
    kept = draw.keep_top_k(draw.keys(Tensor(x)), Tensor([k] * 3, dtype="int32")).numpy()
    least = np.sort(x, axis=1)[:, ::-1][:, min(k, size) - 1]
    assert (kept == (x >= least[:, None])).all()


def test_top_k_orders_negative_zero_and_infinities_as_numbers() -> None:
    x = np.array([[0.0, -0.0, -1.0, -np.inf, 1e-42, -1e-42, np.inf]], np.float32)
    for k, kept in ((1, [6]), (2, [4, 6]), (3, [0, 1, 4, 6]), (5, [0, 1, 4, 5, 6]), (6, [0, 1, 2, 4, 5, 6])):
        mask = draw.keep_top_k(draw.keys(Tensor(x)), Tensor([k], dtype="int32")).numpy()[0]
        assert np.flatnonzero(mask).tolist() == kept


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("p", (1e-6, 0.3, 0.9, 0.999))
def test_top_p_keeps_the_fewest_that_have_p(size: int, p: float) -> None:
    x = rows(size)
    x -= x.max(-1, keepdims=True)
    kept = draw.keep_mass(
        draw.keys(Tensor(x)), draw.weigh(Tensor(x)).contiguous(), Tensor([p] * 3, dtype="float64")
    )
    for row, mask in zip(x, kept.numpy()):
        order = np.argsort(-row, kind="stable")
        running = np.cumsum(softmax(row[None])[0][order])
        count = int(np.searchsorted(running, p)) + 1
        assert set(np.flatnonzero(mask)) == set(order[:count])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("p", (0.2, 0.7, 0.95))
def test_typical_keeps_those_of_usual_surprise(size: int, p: float) -> None:
    x = rows(size, spread=1.5)
    x -= x.max(-1, keepdims=True)
    weights = draw.weigh(Tensor(x)).contiguous()
    order = draw.strangeness(Tensor(x), weights)
    kept = draw.keep_mass(order, weights, Tensor([p] * 3, dtype="float64")).numpy()
    for row, mask in zip(x, kept):
        probability = softmax(row[None])[0]
        surprise = -np.log(probability)
        distance = np.abs(surprise - (probability * surprise).sum())
        by_distance = np.argsort(distance, kind="stable")
        count = int(np.searchsorted(np.cumsum(probability[by_distance]), p)) + 1
        wrong = set(np.flatnonzero(mask)) ^ set(by_distance[:count])
        # the two differ where distances are equal to rounding
        assert all(abs(distance[i] - distance[by_distance[count - 1]]) < 1e-5 for i in wrong)


def test_min_p_is_relative_to_the_best_that_is_left() -> None:
    x = rows(1000)
    x -= x.max(-1, keepdims=True)
    weights = draw.weigh(Tensor(x)).contiguous()
    kept = draw.keep_min_p(Tensor(x), weights, Tensor([math.log(0.05)] * 3, dtype="float64")).numpy()
    assert (kept == (x >= np.float32(math.log(0.05)))).all()
    without_best = (Tensor(x) < -1).where(weights, 0).contiguous()
    kept = draw.keep_min_p(Tensor(x), without_best, Tensor([math.log(0.5)] * 3, dtype="float64")).numpy()
    for row, mask in zip(x, kept):
        best = row[row < -1].max()
        assert (mask[row < -1] == (row[row < -1] >= best + np.float32(math.log(0.5)))).all()


@pytest.mark.parametrize("size", SIZES)
def test_top_gives_the_most_likely_in_order(size: int) -> None:
    for x in (rows(size), np.round(rows(size))):  # with ties: the first ones
        count = min(20, size)
        values, places = draw.top(Tensor(x), count)
        order = np.argsort(-x, axis=1, kind="stable")[:, :count]
        assert (places.numpy() == order).all()
        assert (values.numpy() == np.take_along_axis(x, order, 1)).all()


# ---- changes of logits -------------------------------------------------------------------------------------


def test_penalties() -> None:
    x = rows(50, count=1)
    prompt, written = [1, 2, 2, 7], [2, 9, 9, 9]
    params = SamplingParams(
        temperature=0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2
    )
    state = RowState(params, prompt)
    for token in written:
        state.accept(token)
    expected = x[0].astype(np.float64)
    for token in {*prompt, *written}:
        expected[token] = expected[token] / 1.3 if expected[token] > 0 else expected[token] * 1.3
    for token in set(written):
        expected[token] -= 0.4 + 0.2 * written.count(token)
    got = draw.penalise(Tensor(x), state.history(50), *[Tensor([v]) for v in (1.3, 0.4, 0.2)]).numpy()
    np.testing.assert_allclose(got[0], expected, rtol=1e-6, atol=1e-6)


def test_history_counts_in_place_what_is_written_later() -> None:
    state = RowState(SamplingParams(presence_penalty=1), [3, 3])
    for token in (4, 4, 3, 5, 4):
        state.history(8)
        state.accept(token)
    expected = np.zeros((1, 8), np.int32)
    expected[0, 3], expected[0, 4], expected[0, 5] = draw.READ + 1, 3, 1
    assert (state.history(8).numpy() == expected).all()


def brute_dry(params: SamplingParams, tokens: list[int]) -> dict[int, float]:
    found: dict[int, float] = {}
    for at in range(len(tokens) - 1):
        length = 0
        while length <= at and tokens[at - length] == tokens[-1 - length]:
            if tokens[at - length] in params.dry_breakers:
                break
            length += 1
        if length >= params.dry_allowed_length and tokens[at + 1] not in params.dry_breakers:
            penalty = params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
            found[tokens[at + 1]] = max(found.get(tokens[at + 1], 0.0), penalty)
    return found


def test_dry_is_the_definition() -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        tokens = rng.integers(0, 4, rng.integers(1, 30)).tolist()
        params = SamplingParams(
            dry_multiplier=0.8,
            dry_base=1.75,
            dry_allowed_length=int(rng.integers(1, 4)),
            dry_breakers=(3,) if rng.random() < 0.5 else (),
        )
        got = dry_penalties(params, tokens)
        assert got == pytest.approx(brute_dry(params, tokens))


def test_dry_looks_only_at_its_range_and_in_linear_time() -> None:
    params = SamplingParams(dry_multiplier=1.0, dry_base=2.0, dry_range=3)
    assert dry_penalties(params, [5, 6, 7, 8, 5, 6, 7]) == {}
    assert dry_penalties(SamplingParams(dry_multiplier=1.0), [1] * 20000)[1] > 1e29  # and finite


def test_sparse_changes_and_masks() -> None:
    x = rows(100, count=2)
    places = np.array([[5, 99, -1, -1], [0, 1, 2, 3]], np.int32)
    values = np.array([[1.5, -np.inf, 0, 0], [1, 2, 3, 4]], np.float32)
    got = draw.add_sparse(Tensor(x), Tensor(places), Tensor(values)).numpy()
    expected = x.copy()
    for row in range(2):
        for place, value in zip(places[row], values[row]):
            if place >= 0:
                expected[row, place] += value
    assert (got == expected).all()
    allowed = np.random.default_rng(1).random((2, 100)) < 0.3
    words = np.packbits(np.pad(allowed, ((0, 0), (0, 28))), axis=1, bitorder="little").view(np.int32)
    assert (draw.apply_mask(Tensor(x), Tensor(words)).numpy() == np.where(allowed, x, -np.inf)).all()


# ---- drawing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", (1, 5, 64, 65, 4096, 4097))
def test_draw_gives_each_token_its_share(size: int) -> None:
    rng = np.random.default_rng(size)
    weights = rng.integers(0, 1 << 30, size).astype(np.int32)
    weights[rng.random(size) < 0.3] = 0
    weights[size // 2] = 77
    count = 4000
    uniform = (np.arange(count) + 0.5) / count
    got = draw.draw(Tensor(np.repeat(weights[None], count, 0)), Tensor(uniform)).numpy()
    assert (weights[got] > 0).all()
    # the tokens in the order in which the draw walks over them
    share = weights.astype(np.float64) / weights.sum(dtype=np.float64)
    counts = np.bincount(got, minlength=size)
    assert np.abs(counts - share * count).max() < 2


def chi_square(counts: np.ndarray, share: np.ndarray) -> float:
    """Standard deviations above the mean of the chi-square statistic, rare tokens taken together."""
    order = np.argsort(-share)
    counts, expected = counts[order], share[order] * counts.sum()
    rare = expected < 8
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    keep = expected > 0
    assert counts[~keep].sum() == 0
    statistic = ((counts[keep] - expected[keep]) ** 2 / expected[keep]).sum()
    freedom = max(1, keep.sum() - 1)
    return float((statistic - freedom) / math.sqrt(2 * freedom))


def many(x: np.ndarray, params: dict[str, object], count: int = 4096) -> np.ndarray:
    """Counts of tokens drawn for many requests that differ in their seed."""
    batch = 256
    logits = Tensor(np.repeat(x[None], batch, 0)).realize()
    sampler, counts = Sampler(), np.zeros(len(x))
    for first in range(0, count, batch):
        states = [RowState(SamplingParams(seed=seed, **params)) for seed in range(first, first + batch)]
        for one in sampler.sample(logits, states):
            counts[one.token] += 1
    return counts


def filtered(
    x: np.ndarray, temperature: float = 1, top_k: int = 0, top_p: float = 1, min_p: float = 0
) -> np.ndarray:
    p = softmax(x[None] / temperature)[0]
    order = np.argsort(-p)
    if top_k:
        p[order[top_k:]] = 0
    if top_p < 1:
        running = np.cumsum(p[order] / p.sum())
        p[order[np.searchsorted(running, top_p) + 1 :]] = 0
    p[p < min_p * p.max()] = 0
    return p / p.sum()


@pytest.mark.parametrize(
    "params",
    (
        {},
        {"temperature": 0.6},
        {"temperature": 1.7, "top_k": 10},
        {"top_p": 0.8},
        {"top_k": 12, "top_p": 0.7, "min_p": 0.1, "temperature": 1.3},
    ),
)
def test_draws_follow_the_distribution(params: dict[str, float]) -> None:
    x = rows(200, count=1, spread=1.5)[0]
    counts = many(x, dict(params))
    assert abs(chi_square(counts, filtered(x, **params))) < 5


def test_mirostat_2_draws_what_is_within_its_aim_and_learns() -> None:
    x = rows(300, count=1, spread=1.5)[0]
    p = softmax(x[None])[0]
    surprise = -np.log2(p)
    params = {"mirostat": 2, "mirostat_tau": 2.5}
    counts = many(x, params)
    left = np.where(surprise <= 5.0, p, 0)
    assert abs(chi_square(counts, left / left.sum())) < 5
    state, sampler = (
        RowState(SamplingParams(seed=4, mirostat=2, mirostat_tau=2.5, mirostat_eta=0.2)),
        Sampler(),
    )
    aim = 5.0
    for _ in range(20):
        token = sampler.sample(Tensor(x[None]).realize(), [state])[0].token
        assert surprise[token] <= max(aim, surprise.min()) + 1e-4
        aim -= 0.2 * (surprise[token] - 2.5)
        assert state.aim == pytest.approx(aim, abs=1e-4)
        state.accept(token)


def test_mirostat_1_takes_k_from_the_slope() -> None:
    x = rows(1000, count=4, spread=2.0)
    x -= x.max(-1, keepdims=True)
    aim = np.array([2.0, 4.0, 6.0, 9.0])
    got = draw.mirostat_k(Tensor(x), Tensor(aim)).numpy()
    for row, tau, k in zip(x, aim, got):
        p = np.sort(softmax(row[None])[0])[::-1][:100]
        t = np.log((np.arange(99) + 2) / (np.arange(99) + 1))
        s = (t * np.log(p[:-1] / p[1:])).sum() / (t * t).sum()
        eps = s - 1
        expected = ((eps * 2**tau) / (1 - 1000.0**-eps)) ** (1 / s)
        assert abs(int(k) - min(max(1, round(expected) + 1), 1000)) <= 1


# ---- batches -----------------------------------------------------------------------------------------------

KINDS = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"top_k": 5},
    {"top_p": 0.5, "temperature": 1.2},
    {"typical_p": 0.6},
    {"min_p": 0.2},
    {"mirostat": 2, "mirostat_tau": 3.0},
    {"mirostat": 1, "mirostat_tau": 3.0},
    {"temperature": 0.0, "repetition_penalty": 1.5, "presence_penalty": 0.5},
    {"logit_bias": {3: 4.0, 5: -math.inf}, "logprobs": 2},
)


def alone(x: np.ndarray, kind: dict[str, object], steps: int) -> list[int]:
    sampler, state = Sampler(), RowState(SamplingParams(seed=11, **kind), [1, 2])  # type: ignore[arg-type]
    for n in range(steps):
        state.accept(sampler.sample(Tensor(x[n : n + 1]).realize(), [state])[0].token)
    return state.written


def test_a_row_draws_the_same_alone_and_in_a_batch() -> None:
    steps = 5
    data = rows(700, count=steps * len(KINDS), spread=1.0).reshape(steps, len(KINDS), 700)
    sampler = Sampler()
    states = [RowState(SamplingParams(seed=11, **kind), [1, 2]) for kind in KINDS]  # type: ignore[arg-type]
    for n in range(steps):
        for state, one in zip(states, sampler.sample(Tensor(data[n]).realize(), states)):
            state.accept(one.token)
    for number, kind in enumerate(KINDS):
        assert alone(data[:, number], kind, steps) == states[number].written, kind


def test_greedy_is_argmax_and_logprobs_are_log_softmax() -> None:
    x = rows(1000, count=4)
    states = [RowState(SamplingParams(temperature=0, logprobs=n)) for n in (0, 5, 5, 20)]
    draws = Sampler().sample(Tensor(x).realize(), states)
    reference = np.log(softmax(x))
    for row, one, count in zip(reference, draws, (0, 5, 5, 20)):
        assert one.token == row.argmax()
        assert one.logprob == pytest.approx(row.max(), abs=1e-5)
        order = np.argsort(-row, kind="stable")[:count]
        assert [token for token, _ in one.top_logprobs] == order.tolist()
        np.testing.assert_allclose([value for _, value in one.top_logprobs], row[order], atol=1e-5)


def test_the_end_is_banned_before_min_tokens() -> None:
    x = np.zeros((1, 10), np.float32)
    x[0, 4], x[0, 6] = 9, 8
    state = RowState(SamplingParams(temperature=0, min_tokens=2), end_ids=[4])
    sampler, tokens = Sampler(), []
    for _ in range(3):
        tokens.append(sampler.sample(Tensor(x).realize(), [state])[0].token)
        state.accept(tokens[-1])
    assert tokens == [6, 6, 4]


# ---- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    (
        {"temperature": -1},
        {"temperature": math.nan},
        {"temperature": "hot"},
        {"temperature": True},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": 2.5},
        {"top_k": -1},
        {"typical_p": 0},
        {"repetition_penalty": 0},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: math.nan}},
        {"logit_bias": {"1": 1.0}},
        {"mirostat": 3},
        {"logprobs": 21},
        {"seed": 1 << 64},
        {"max_tokens": -1},
        {"stop": ("",)},
        {"stop": (3,)},
    ),
)
def test_wrong_parameters_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        SamplingParams(**wrong)  # type: ignore[arg-type]
