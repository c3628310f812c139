"""Beam search over opts. Codegen cannot run kernels: whit/engine/beam.py can, and passes in how to measure.

A candidate is a list of opts. From each of the best `width` candidates come others: one opt more, one fewer,
or one amount changed. Candidates that make the same kernel are measured once. The
heuristics' choice starts the beam and is measured again against the winner at the end, so that a search never
returns anything slower.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from whit.codegen.costs import divisors
from whit.codegen.heuristics import choose
from whit.codegen.lower import prepare
from whit.codegen.opts import Axis, AxisTable, Opt, OptError, OptKind
from whit.codegen.target import Target
from whit.helpers import ceildiv, log, round_up
from whit.uop import AxisType, UOp, dtypes

Opts = tuple[Opt, ...]
# seconds that a kernel takes under each list of opts; infinite for one that failed, hung, crashed or
# computed wrong
# values. The number asks for more careful timing.
Measure = Callable[[Sequence[Opts], int], Sequence[float]]

MOST_ROUNDS = 12
MOST_CANDIDATES = 48  # new candidates per round and place in the beam
GAIN = 0.98  # a round goes on when the best time falls below this share of the former best


def search(ast: UOp, target: Target, width: int, measure: Measure) -> Opts:
    """The fastest list of opts found for a kernel (as the schedule made it) with a beam of `width`."""
    ready = prepare(ast)
    start = choose(ready, target)
    seen: set[UOp] = set()
    first = [opts for opts in (start, ()) if _new(ready, opts, target, seen)]
    beam = sorted(zip(measure(first, 1), first), key=lambda item: item[0])
    for number in range(MOST_ROUNDS):
        found = [opts for _, parent in beam for opts in _children(ready, parent, target, seen)]
        if not found:
            break
        times = measure(found, 1)
        best = beam[0][0]
        beam = sorted([*beam, *zip(times, found)], key=lambda item: item[0])[:width]
        log(
            3,
            f"search: round {number}: {len(found)} candidates, {beam[0][0] * 1e6:.1f} us: {list(beam[0][1])}",
        )
        if not beam[0][0] < best * GAIN:
            break
    finalists = [opts for _, opts in beam[:3] if opts != start]
    again = measure([start, *finalists], 5)
    winner = min(zip(again, [start, *finalists]), key=lambda item: item[0])
    return winner[1] if winner[0] < again[0] * GAIN or winner[0] < math.inf == again[0] else start


def _children(ready: UOp, parent: Opts, target: Target, seen: set[UOp]) -> list[Opts]:
    """Unseen legal neighbours of a candidate, at most MOST_CANDIDATES, spread over all kinds of change."""
    proposals = [*_edits(parent), *_extensions(ready, parent, target)]
    step = max(1, ceildiv(len(proposals), MOST_CANDIDATES * 2))
    spread = [p for first in range(step) for p in proposals[first::step]]
    found: list[Opts] = []
    for opts in spread:
        if len(found) < MOST_CANDIDATES and _new(ready, opts, target, seen):
            found.append(opts)
    return found


def _new(ready: UOp, opts: Opts, target: Target, seen: set[UOp]) -> bool:
    """Whether the opts are legal and make a kernel that was not made before."""
    table = AxisTable.of(ready, target)
    try:
        for opt in opts:
            table.apply(opt)
    except OptError:
        return False
    made = table.build()
    key = made.replace(arg=None)
    if key in seen:
        return False
    seen.add(key)
    return True


def _edits(parent: Opts) -> Iterator[Opts]:
    """Leave one opt out, or change its amount."""
    for at, opt in enumerate(parent):
        before, after = parent[:at], parent[at + 1 :]
        if opt.kind is OptKind.PADTO:
            continue
        yield before + after
        if opt.kind in (OptKind.SWAP, OptKind.MERGE) or opt.amount == 0:
            continue
        near = {opt.amount * 2, opt.amount // 2, opt.amount + 1, opt.amount - 1, opt.amount * 3 // 2}
        for amount in sorted(n for n in near if n > 1 and n != opt.amount):
            yield (*before, Opt(opt.kind, opt.axis, amount), *after)
            if opt.kind in (OptKind.UPCAST, OptKind.UNROLL):  # with the padding that the new amount needs
                padded = [p for p in before if not (p.kind is OptKind.PADTO and p.axis == opt.axis)]
                yield (*padded, Opt(OptKind.PADTO, opt.axis, amount), Opt(opt.kind, opt.axis, amount), *after)


def _extensions(ready: UOp, parent: Opts, target: Target) -> Iterator[Opts]:
    """One opt more at the end."""
    table = AxisTable.of(ready, target)
    for opt in parent:
        table.apply(opt)
    for more in actions(table):
        yield (*parent, *more)


def actions(table: AxisTable) -> Iterator[Opts]:
    """Opts (with the padding that they need) worth trying on a kernel in its present state."""
    target = table.target
    lanes = target.lanes(dtypes.float32)
    loops = [a for a in table.of_type(AxisType.LOOP) if isinstance(a.size, int)]
    folds = [a for a in table.of_type(AxisType.REDUCE) if isinstance(a.size, int)]
    for axis in loops:
        yield from _splits(OptKind.UPCAST, axis, {2, 3, 4, 5, 6, 8, lanes, 2 * lanes, 4 * lanes})
    for axis in folds:
        yield from _splits(OptKind.UNROLL, axis, {2, 4, 8, lanes, 2 * lanes, 4 * lanes})
    if loops and target.threads > 1:
        most = 16 * target.threads
        for tasks in {0, *[d for d in divisors(_size(loops[0]), most) if d >= target.threads]}:
            yield (Opt(OptKind.THREAD, loops[0].number, tasks),)
    for group in (loops, folds):
        for first, second in itertools.pairwise(group):
            yield (Opt(OptKind.SWAP, first.number, second.number),)
            yield (Opt(OptKind.MERGE, first.number, second.number),)
    for axis in loops[1:]:
        for amount in (8, 32):
            if _size(axis) > amount and _size(axis) % amount == 0:
                yield (Opt(OptKind.SPLIT, axis.number, amount),)
    if target.has_local:
        for axis in loops:
            yield from _splits(OptKind.LOCAL, axis, {4, 8, 16, 32})
        for axis in folds:
            for kind in (OptKind.GROUP, OptKind.GROUPTOP):
                yield from _splits(kind, axis, {8, 16, 32})


def _size(axis: Axis) -> int:
    assert isinstance(axis.size, int)
    return axis.size


def _splits(kind: OptKind, axis: Axis, amounts: set[int]) -> Iterator[Opts]:
    size = _size(axis)
    if size <= 64:
        yield (Opt(kind, axis.number, 0),)
    for amount in sorted(amounts):
        if 1 < amount < size and size % amount == 0:
            yield (Opt(kind, axis.number, amount),)
        elif amount > 1 and size % amount and round_up(size, amount) < size * 2:
            yield (Opt(OptKind.PADTO, axis.number, amount), Opt(kind, axis.number, amount))
