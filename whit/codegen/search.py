"""Beam search over opts. Codegen cannot run kernels: whit/engine/beam.py can, and passes in a `Judge`.

A candidate is a list of opts. From each of the best `width` candidates come others: one opt more, one
fewer, one amount changed, or two neighbours exchanged. Candidates that make the same kernel are measured
once. What the heuristics chose is always a candidate, and whatever seems faster has to win a race against it,
run in turns, before it takes its place: a tie keeps the heuristics' choice, so that a search never makes a
kernel slower.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from whit.codegen.costs import divisors
from whit.codegen.heuristics import choose
from whit.codegen.lower import prepare
from whit.codegen.opts import STAGING, Axis, AxisTable, Opt, OptError, OptKind
from whit.codegen.scopes import Kernel
from whit.codegen.stages import find_windows, reads_of
from whit.codegen.target import Target
from whit.helpers import log, round_up
from whit.uop import AxisType, Ops, UOp, dtypes

Opts = tuple[Opt, ...]

MOST_ROUNDS = 16
MOST_CANDIDATES = 48  # new candidates per round and place in the beam
BATCH = 8  # candidates measured between two looks at the clock
PATIENCE = 2  # rounds without a gain after which a search ends
LIGHT = 5_000_000  # operations of a kernel that is worth running without opts
MOST = 0.6  # share of the turns of a race that a winner wins
GAIN = 0.98  # a gain is a time below this share of the other


class Timing(NamedTuple):
    """Seconds of the runs of a kernel in a race: the least, and the one that a quarter of the runs beat. Of
    its runs the share `wins` was faster than the first candidate's in the same turn."""

    least: float
    quarter: float
    wins: float = 1.0

    def beats(self, first: Timing) -> bool:
        """Whether it is faster than the first candidate beyond noise: in its best run, in its usual ones, and
        in most turns. Whatever runs beats what does not."""
        if first.least == math.inf:
            return self.least < math.inf
        return self.least < first.least * GAIN and self.quarter < first.quarter and self.wins > MOST


class Judge(Protocol):
    """Runs candidates. Whatever fails, hangs, crashes or computes wrong values takes infinitely long."""

    def measure(self, candidates: Sequence[Opts]) -> Sequence[float]:
        """Seconds that each takes, roughly."""

    def race(self, candidates: Sequence[Opts], careful: bool) -> Sequence[Timing]:
        """All of them in turns, in one process, so that they meet the same conditions."""

    def verify(self, opts: Opts) -> bool:
        """Whether a candidate computes what the kernel without opts does, also on data not seen so far."""

    def expired(self) -> bool:
        """Whether the time for trying more candidates is over."""


class Search:
    """A search for the opts of one kernel (as the schedule made it). `best` is valid at any time: it is the
    heuristics' choice until another candidate has won a race against that."""

    def __init__(
        self, ast: UOp, target: Target, width: int, judge: Judge, hints: Iterable[Opts] = ()
    ) -> None:
        self.ready, self.target, self.width, self.judge = prepare(ast, target), target, width, judge
        self.start = self.best = choose(self.ready, target)
        self.hints = tuple(hints)  # candidates to try first, such as what an older search found
        self.seen: set[UOp] = set()
        self.rejected: set[Opts] = set()
        self.timings: dict[Opts, Timing] = {}  # of the last race

    def run(self) -> Opts:
        """Search until nothing better is found or the time is over; the best opts."""
        first = [opts for opts in (self.start, *self.hints) if self._is_new(opts)]
        beam = _ranked(zip(self.judge.measure(first), first))
        if (beam[0][0] == math.inf or self._is_light()) and self._is_new(()):
            beam = _ranked([*beam, *zip(self.judge.measure([()]), [()])])
        self._race([opts for _, opts in beam[:2]], careful=False)
        idle = 0
        for number in range(MOST_ROUNDS):
            found = self._round([opts for _, opts in beam])
            if not found:
                break
            before = beam[0][0]
            beam = _ranked([*beam, *found])[: self.width]
            log(
                3,
                f"search: round {number}: {len(found)} candidates, {beam[0][0] * 1e6:.1f} us: "
                f"{list(beam[0][1])}",
            )
            if beam[0][0] < before * GAIN:
                idle = 0
                self._race([opts for _, opts in beam[:2]], careful=False)
            else:
                idle += 1
            if idle == PATIENCE or self.judge.expired():
                break
        self._race([opts for _, opts in beam[:3]], careful=True)
        if self.best != self.start:  # of many one may be lucky: it has to win alone
            self._race([self.best], careful=True)
        return self.best

    def _is_light(self) -> bool:
        """Whether the kernel without opts, which may be a hundred times slower, is worth running."""
        kernel = Kernel(self.ready, self.target)
        return sum([kernel.work(scope) for scope in kernel.scopes]) < LIGHT

    def _round(self, beam: Sequence[Opts]) -> list[tuple[float, Opts]]:
        """Measure new neighbours of the candidates in the beam, a batch at a time while there is time."""
        wanted = [opts for parent in beam for opts in self._children(parent)]
        found: list[tuple[float, Opts]] = []
        for start in range(0, len(wanted), BATCH):
            if self.judge.expired():
                break
            batch = wanted[start : start + BATCH]
            found += zip(self.judge.measure(batch), batch)
        return found

    def _race(self, challengers: Sequence[Opts], careful: bool) -> None:
        """Let challengers run against the heuristics' choice and the best so far, and keep the winner."""
        known = dict.fromkeys((self.start, self.best, *challengers))
        entrants = [opts for opts in known if opts not in self.rejected]
        if len(entrants) == 1:
            return
        timings = dict(zip(entrants, self.judge.race(entrants, careful)))
        if all(t.least == math.inf for t in timings.values()):
            return
        self.timings = timings
        base = timings.get(self.start, Timing(math.inf, math.inf))
        for opts in sorted(entrants, key=lambda o: timings[o].least):
            if opts == self.start:
                break
            if not timings[opts].beats(base):
                continue
            if opts == self.best or self.judge.verify(opts):
                self.best = opts
                return
            self.rejected.add(opts)
        self.best = self.start

    # ---- neighbours

    def _children(self, parent: Opts) -> list[Opts]:
        """Unseen legal neighbours of a candidate, at most MOST_CANDIDATES, taken in turn from all kinds of
        change."""
        found: list[Opts] = []
        for opts in _in_turn([_amounts(parent), _omissions(parent), _exchanges(parent), *self._more(parent)]):
            if len(found) == MOST_CANDIDATES:
                break
            if self._is_new(opts):
                found.append(opts)
        return found

    def _more(self, parent: Opts) -> list[Iterator[Opts]]:
        """One opt (with what it needs) more, by kind. STAGEs stay last."""
        staged = tuple([opt for opt in parent if opt.kind in STAGING])
        loops = tuple([opt for opt in parent if opt.kind not in STAGING])
        table = AxisTable.of(self.ready, self.target)
        for opt in loops:
            table.apply(opt)
        by_kind: dict[OptKind, list[Opts]] = {}
        for more in actions(table):
            by_kind.setdefault(more[-1].kind, []).append((*loops, *more, *staged))
        for opt in _stagings(table):
            by_kind.setdefault(opt.kind, []).append((*parent, opt))
        return [iter(group) for group in by_kind.values()]

    def _is_new(self, opts: Opts) -> bool:
        """Whether the opts are legal and make a kernel that was not made before."""
        table = AxisTable.of(self.ready, self.target)
        try:
            for opt in opts:
                table.apply(opt)
        except OptError:
            return False
        made = table.build().replace(arg=None)
        if made in self.seen:
            return False
        self.seen.add(made)
        return True


def _ranked(items: Iterable[tuple[float, Opts]]) -> list[tuple[float, Opts]]:
    return sorted(items, key=lambda item: item[0])


def _in_turn(groups: Sequence[Iterable[Opts]]) -> Iterator[Opts]:
    """One of each group, again and again."""
    for row in itertools.zip_longest(*groups):
        yield from [opts for opts in row if opts is not None]


# ---- changes of what is there ------------------------------------------------------------------------------

# the amount is an axis, a read, or belongs to another opt
_FIXED = frozenset({OptKind.SWAP, OptKind.MERGE, OptKind.PADTO, *STAGING})
_TILES = frozenset({OptKind.UPCAST, OptKind.UNROLL})


def _amounts(parent: Opts) -> Iterator[Opts]:
    """Change one amount, with the padding that the new one needs."""
    for at, opt in enumerate(parent):
        if opt.kind in _FIXED or opt.amount == 0:
            continue
        before, after = parent[:at], parent[at + 1 :]
        n = opt.amount
        for amount in dict.fromkeys((2 * n, n // 2, n * 3 // 2, n + 1, n - 1)):
            if amount <= 1 or amount == n:
                continue
            changed = Opt(opt.kind, opt.axis, amount)
            yield (*before, changed, *after)
            if opt.kind is not OptKind.THREAD:
                kept = [o for o in before if not (o.kind is OptKind.PADTO and o.axis == opt.axis)]
                yield (*kept, Opt(OptKind.PADTO, opt.axis, amount), changed, *after)


def _omissions(parent: Opts) -> Iterator[Opts]:
    """Leave one opt out, with the padding that it needed."""
    for at, opt in enumerate(parent):
        if opt.kind is OptKind.PADTO:
            continue
        before, after = parent[:at], parent[at + 1 :]
        yield (*before, *after)
        if before and before[-1].kind is OptKind.PADTO and before[-1].axis == opt.axis:
            yield (*before[:-1], *after)


def _exchanges(parent: Opts) -> Iterator[Opts]:
    """Exchange two tiles that are made one after another: the last one is expanded innermost."""
    tiles = [at for at, opt in enumerate(parent) if opt.kind in _TILES]
    for first, second in itertools.pairwise(tiles):
        changed = list(parent)
        changed[first], changed[second] = changed[second], changed[first]
        yield tuple(changed)


# ---- opts worth trying -------------------------------------------------------------------------------------


def actions(table: AxisTable) -> Iterator[Opts]:
    """Opts (with the SWAP or PADTO that they need) worth trying on a kernel in its present state."""
    target = table.target
    lanes = target.lanes(dtypes.float32)
    loops = [a for a in table.of_type(AxisType.LOOP) if isinstance(a.size, int)]
    folds = [a for a in table.of_type(AxisType.REDUCE) if isinstance(a.size, int)]
    for axis in loops:
        yield from _splits(OptKind.UPCAST, axis, (lanes, 4, 2 * lanes, 2, 4 * lanes, 6, 8, 3, 5))
    for axis in folds:
        yield from _splits(OptKind.UNROLL, axis, (4, lanes, 2, 8, 2 * lanes, 4 * lanes))
    if target.threads > 1:
        yield from _tasks(table, loops)
    for group in (loops, folds):
        for first, second in itertools.combinations(group, 2):
            yield (Opt(OptKind.SWAP, first.number, second.number),)
        for first, second in itertools.pairwise(group):
            yield (Opt(OptKind.MERGE, first.number, second.number),)
    for axis in [*loops, *folds]:
        if _size(axis) > 8:
            amounts = (32, 128, 8, 512, 64, 16, 256) if axis in folds else (8, 32, 4, 64, 128)
            yield from [more for more in _splits(OptKind.SPLIT, axis, amounts) if more[-1].amount]
    for axis in folds:  # pieces of 128 to 1024 steps: what a cache holds of both factors
        size = _size(axis)
        for pieces in [n for n in divisors(size, max(1, size // 128)) if n > 1 and size // n <= 1024][:4]:
            yield (Opt(OptKind.ACCUMULATE, axis.number, pieces),)
    if target.has_local:
        for axis in loops:
            yield from _splits(OptKind.LOCAL, axis, (8, 16, 4, 32))
        for axis in folds:
            for kind in (OptKind.GROUP, OptKind.GROUPTOP):
                yield from _splits(kind, axis, (16, 8, 32))


def _tasks(table: AxisTable, loops: Sequence[Axis]) -> Iterator[Opts]:
    """THREAD of the outermost loop, or of another one that is brought there first."""
    if not loops or table.of_type(AxisType.THREAD):
        return
    first, threads = table.of_type(AxisType.LOOP)[0], table.target.threads
    for axis in loops:
        bring = () if axis is first else (Opt(OptKind.SWAP, first.number, axis.number),)
        number = first.number
        found = [d for d in divisors(_size(axis), 16 * threads) if d >= threads]
        for tasks in sorted(found, key=lambda n: (n % threads > 0, n))[:4]:
            yield (*bring, Opt(OptKind.THREAD, number, tasks))
        for tasks in (threads, 4 * threads):
            if _size(axis) % tasks and _size(axis) > tasks:
                yield (*bring, Opt(OptKind.PADTO, number, tasks), Opt(OptKind.THREAD, number, tasks))


def _stagings(table: AxisTable) -> Iterator[Opt]:
    """Every read of a value that a sum uses, copied inside of every loop around outputs. Reads that meet each
    element once gain nothing."""
    reads = reads_of(table.ast)
    reduced = {u for u in table.closers if u.op is Ops.REDUCE}
    levels = table.of_type(AxisType.THREAD, AxisType.LOOP)
    for axis in reversed(levels):
        for number, value in enumerate(reads):
            if any(value.ranges < r.src[0].ranges for r in reduced):
                yield Opt(OptKind.STAGE, axis.number, number)
                if find_windows(value) is not None:
                    yield Opt(OptKind.WINDOW, axis.number, number)


def _size(axis: Axis) -> int:
    assert isinstance(axis.size, int)
    return axis.size


def _splits(kind: OptKind, axis: Axis, amounts: Iterable[int]) -> Iterator[Opts]:
    size = _size(axis)
    if size <= 64:
        yield (Opt(kind, axis.number, 0),)
    for amount in dict.fromkeys(amounts):
        if 1 < amount < size and size % amount == 0:
            yield (Opt(kind, axis.number, amount),)
        elif amount > 1 and size % amount and round_up(size, amount) < size * 2:
            yield (Opt(OptKind.PADTO, axis.number, amount), Opt(kind, axis.number, amount))
