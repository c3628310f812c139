"""Time contenders against each other: in turns, so that what else the machine does meets all of them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SLICE = 0.025  # seconds of one contender's turn, unless a single call takes longer
SETTLE = (
    0.004  # seconds of calls that do not count at the start of a turn: threads of the one before still spin
)
PATIENCE = 2.5  # seconds that a contender may use in a race; it then drops out with the samples it has


@dataclass
class Lane:
    """One contender in a race: its call, how many calls make a turn, its samples (seconds a call, the mean of
    each turn) and its best single call."""

    call: Callable[[], Any]
    calls: int = 1
    estimate: float = 0.0
    spent: float = 0.0
    samples: list[float] = field(default_factory=list)
    best: float = math.inf

    def turn(self) -> None:
        """Some calls that do not count, then those that do."""
        start = time.perf_counter()
        if self.estimate < SLICE:
            while time.perf_counter() - start < SETTLE:
                self.call()
        begin = last = time.perf_counter()
        for _ in range(self.calls):
            reported = self.call()
            now = time.perf_counter()
            # a probe says itself what a pass of the several that it made took
            took = reported if isinstance(reported, float) else now - last
            self.best, last = min(self.best, took), now
        self.samples.append(took if isinstance(reported, float) else (last - begin) / self.calls)
        self.spent += last - start


def calibrated(call: Callable[[], Any], patience: float) -> Lane:
    """A lane whose turn takes about SLICE. A call so slow that a race would have no time for it is sampled
    here and now."""
    call()  # compiles, perhaps
    estimate, spent = float("inf"), 0.0
    for _ in range(3):
        start = time.perf_counter()
        call()
        took = time.perf_counter() - start
        estimate, spent = min(estimate, took), spent + took
        if spent > patience / 4:
            break
    calls = max(1, round(SLICE / max(estimate, 1e-7)))
    if estimate > patience:
        return Lane(call, calls, estimate, spent, [estimate], estimate)
    return Lane(call, calls, estimate, spent)


def race(
    contenders: dict[str, Callable[[], Any]], rounds: int, patience: float = PATIENCE
) -> dict[str, Lane]:
    """Race the contenders: each lane has `rounds` samples (fewer if it is very slow: it uses `patience`
    seconds at most, unless a single call takes longer).

    A contender that returns a float reports its own seconds. The order turns, so that none always follows the
    same other one.

    >>> sorted(race({"a": lambda: None, "b": lambda: None}, 1))
    ['a', 'b']
    """
    lanes = {name: calibrated(call, patience) for name, call in contenders.items()}
    names = list(lanes)
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            lane = lanes[name]
            if not lane.samples or lane.spent < patience:
                lane.turn()
    return lanes


def repeated(run: Callable[[], Any], repeats: int, warmup: int = 3) -> float:
    """Median seconds of a call."""
    for _ in range(warmup):
        run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
