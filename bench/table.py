"""From samples to figures: medians, ratios, goals, and the printed table."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.rows import Goal, Row

COLUMNS = ("whit", "limit", "of", "share", "ratio", "goal", "", "peers")


def columns(name: str, *cells: str) -> str:
    """A line of the table."""
    mine, limit, bound, share, ratio, goal, met, peers = cells
    left = f"{name:44s} {mine:>9s}  {limit:>9s} {bound:5s} {share:>5s} {ratio:>8s}"
    return f"{left}  {goal:24s} {met:6s}  {peers}".rstrip()


HEADER = columns("work", *COLUMNS)


@dataclass
class Verdict:
    """One goal of a row: against whom ("" nobody), the ratio that was reached (nan: it could not be measured)
    and whether that is enough."""

    against: str
    ratio: float
    goal: float
    time: bool
    met: bool

    def cells(self) -> tuple[str, str, str]:
        """ratio, goal and met or MISSED."""
        ratio = amount(self.ratio, "s") if not self.against else f"{self.ratio:.3g}"
        goal = amount(self.goal, "s") if not self.against else f"{self.goal:.3g} x {self.against}"
        return ratio, f"{'<=' if self.time else '>='} {goal}", "met" if self.met else "MISSED"


@dataclass
class Figure:
    """What a row came to. seconds (or bytes): by contender; the limits: what the machine needs at least;
    failures: peers that were left out, and why."""

    name: str
    unit: str = "s"
    seconds: dict[str, float] = field(default_factory=dict)
    limit_flops: float = 0.0
    limit_bytes: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    verdicts: list[Verdict] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    error: str = ""

    @property
    def limit(self) -> float:
        """The least time by the limit that binds; 0 if the row declares none."""
        return max(self.limit_flops, self.limit_bytes)

    @property
    def bound(self) -> str:
        """Which limit that is."""
        return "" if not self.limit else "flops" if self.limit_flops >= self.limit_bytes else "bytes"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"limit": self.limit, "bound": self.bound}


def judged(goal: Goal, seconds: dict[str, float], limit: float) -> Verdict:
    """A goal against the figures.

    >>> judged(Goal(("numpy", "torch"), 1.0), {"whit": 2.0, "numpy": 3.0, "torch": 5.0}, 0.0)
    Verdict(against='numpy', ratio=1.5, goal=1.0, time=False, met=True)
    >>> judged(Goal(("torch",), 0.5, time=True), {"whit": 2.0, "torch": 5.0}, 0.0).ratio
    0.4
    """
    mine = seconds["whit"]
    if not goal.peers:
        return Verdict("", mine, goal.value, True, mine <= goal.value)
    known = {"limit": limit} if limit else {}
    found = {p: (seconds | known)[p] for p in goal.peers if p in seconds | known}
    if not found:
        return Verdict("/".join(goal.peers), float("nan"), goal.value, goal.time, False)
    best = min(found, key=lambda p: found[p])
    ratio = mine / found[best] if goal.time else found[best] / mine
    met = ratio <= goal.value if goal.time else ratio >= goal.value
    return Verdict(best, ratio, goal.value, goal.time, met)


def figure(row: Row, result: dict[str, Any], best: bool = False) -> Figure:
    """The figure of a row from what its worker or programs measured: medians of the samples, or the best
    single calls."""
    if "error" in result:
        return Figure(row.name, row.unit, error=result["error"])
    seconds = {name: statistics.median(samples) for name, samples in result["samples"].items()}
    if best:
        seconds = {name: min(samples) for name, samples in result["samples"].items()} | result.get("best", {})
    flops, bytes_ = seconds.pop("limit.flops", 0.0), seconds.pop("limit.bytes", 0.0)
    verdicts = [judged(goal, seconds, max(flops, bytes_)) for goal in row.goals]
    return Figure(
        row.name,
        row.unit,
        seconds,
        flops,
        bytes_,
        result.get("flops", 0.0),
        result.get("bytes", 0.0),
        verdicts,
        result["samples"],
        result.get("failures", {}),
    )


def amount(value: float, unit: str) -> str:
    """A time or a size for people.

    >>> amount(0.00215, "s"), amount(3.2e-7, "s"), amount(5e8, "bytes")
    ('2.15 ms', '0.32 us', '500 MB')
    """
    if unit == "bytes":
        return f"{value / 1e6:.4g} MB"
    for scale, name in ((1.0, "s"), (1e-3, "ms")):
        if value >= scale:
            return f"{value / scale:.3g} {name}"
    return f"{value / 1e-6:.3g} us"


def lines(result: Figure) -> str:
    """The row as printed: one line a goal."""
    if result.error:
        return f"{result.name:44s} FAILED: {result.error}"
    mine = amount(result.seconds["whit"], result.unit)
    limit = amount(result.limit, "s") if result.limit else ""
    share = f"{result.limit / result.seconds['whit']:5.0%}" if result.limit else ""
    peers = ", ".join(
        f"{name} {amount(value, result.unit)}" for name, value in result.seconds.items() if name != "whit"
    )
    peers += "".join(f"; {name} left out: {reason}" for name, reason in result.failures.items())
    first = mine, limit, result.bound, share
    rows = [
        columns(result.name, *first, *verdict.cells(), peers)
        if number == 0
        else columns("", "", "", "", "", *verdict.cells(), "")
        for number, verdict in enumerate(result.verdicts)
    ]
    return "\n".join(rows)
