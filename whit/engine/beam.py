"""BEAM=n: search for the opts of a kernel by measuring. `whit.codegen.search` says what to try; worker
processes (`workers`) compile and run it (`trial`); what was found is kept and shared (`tuning`).

A search of one kernel ends after BEAM_TIME seconds, or a few runs of the kernel later if one takes long.
Ctrl-C ends it at once and keeps the best found so far: the next search goes on from there.

    python -m whit.engine.beam export FILE     # what searches on this machine found, as a tuning file
    python -m whit.engine.beam import FILE     # use the results of others: TUNED=FILE does so for one run
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from whit.codegen.opts import Opt
from whit.engine import tuning
from whit.engine.trial import Compiled
from whit.engine.tuning import Entry, repr_opts
from whit.helpers import BEAM, BEAM_TIME, NOOPT, TUNED, DeviceError, FileFormatError, WhitError, log
from whit.uop import UOp

if TYPE_CHECKING:
    from whit.codegen.search import Opts, Search, Timing
    from whit.engine.workers import Pool

COMPILE_LIMIT = 20.0  # seconds for one candidate
EXPLORING = 0.75  # share of the time after which nothing new is tried: the rest is for the final race
NEVER = (math.inf, math.inf, 0.0)

# ---- what a kernel is compiled with ------------------------------------------------------------------------


def known(ast: UOp, target: str) -> str | None:
    """The text of the opts that TUNED or an earlier search (BEAM) has for a kernel, unchecked; None if the
    heuristics choose or a search is due."""
    if NOOPT:
        return None
    text = tuning.tuned(ast, target)
    if text is None and BEAM:
        entry = tuning.load(ast, target)
        if entry is not None and entry.complete and entry.width >= beam_width(BEAM.value):
            return entry.opts
    return text


def beam_width(asked: int) -> int:
    """A width that makes sense: 1 to 1000."""
    return min(max(asked, 1), 1000)


def chosen(ast: UOp, device: str) -> Opts | None:
    """The opts to compile a kernel with: those of TUNED if they are legal, else those found by a search if
    BEAM asks for one, else None: the heuristics choose."""
    if NOOPT or not (TUNED.value or BEAM):
        return None
    from whit.codegen.lower import prepare
    from whit.runtime.device import Device

    target = Device.get(device).target
    text = tuning.tuned(ast, target.key)
    if text is not None:
        opts = tuning.legal(text, prepare(ast, target), target)
        if opts is not None:
            return opts
        log(1, f"TUNED={TUNED.value}: opts {text!r} do not fit the kernel {tuning.kernel_key(ast)}")
    return search(ast, device, BEAM.value) if BEAM else None


def search(ast: UOp, device: str, width: int) -> Opts:
    """The best opts found for a kernel on a device with a beam of `width`, never slower than those of the
    heuristics; remembered on disk."""
    from whit.codegen.heuristics import choose
    from whit.codegen.lower import prepare
    from whit.runtime.device import Device

    target, width = Device.get(device).target, beam_width(width)
    ready = prepare(ast, target)
    base = repr_opts(choose(ready, target))
    hints: list[Opts] = []
    entry = tuning.load(ast, target.key)
    if entry is not None:
        opts = tuning.legal(entry.opts, ready, target)
        if opts is not None and entry.complete and entry.width >= width and entry.base == base:
            return opts
        hints = [] if opts is None else [opts]
    from whit.codegen.search import Search
    from whit.engine.workers import Pool

    pool = Pool.shared()
    with pool.lock:
        measure = Measure(ast, device, pool)
        state = Search(ast, target, width, measure, hints)
        try:
            opts = state.run()
        except KeyboardInterrupt:
            if state.best != state.start:
                tuning.save(_entry(ast, target.key, measure, state, width, complete=False))
            raise
        pool.forget()
    seconds = time.monotonic() - measure.started
    log(
        2,
        f"search: {measure.count} candidates in {seconds:.1f} s, {measure.failed} failed: {repr_opts(opts)}",
    )
    tuning.save(_entry(ast, target.key, measure, state, width, complete=True))
    return opts


def _entry(ast: UOp, target: str, measure: Measure, state: Search, width: int, complete: bool) -> Entry:
    """What a search found so far."""
    before, after = [
        state.timings[opts].least if opts in state.timings else 0.0 for opts in (state.start, state.best)
    ]
    before = before if before < math.inf else after  # the heuristics' choice did not run
    compiled = measure.known.get(state.best)
    name = compiled.name if compiled is not None else ""
    opts, base = repr_opts(state.best), repr_opts(state.start)
    return Entry(tuning.kernel_key(ast), target, name, opts, base, width, complete, max(before, after), after)


class Measure:
    """The judge of candidates of one kernel (`whit.codegen.search.Judge`), with BEAM_TIME seconds from now
    on. Infinite for what fails in any way."""

    def __init__(self, ast: UOp, device: str, pool: Pool | None = None, seconds: float | None = None) -> None:
        from whit.engine.workers import Pool

        self.ast, self.device = ast, device
        self.pool = pool or Pool.shared()
        self.known: dict[tuple[Opt, ...], Compiled | None] = {}
        self.best = math.inf
        self.count = self.failed = 0
        self.started = time.monotonic()
        self.seconds = float(max(1, BEAM_TIME.value)) if seconds is None else seconds

    def left(self) -> float:
        """Seconds that remain."""
        return self.started + self.seconds - time.monotonic()

    def expired(self) -> bool:
        return self.left() < (1 - EXPLORING) * self.seconds

    def measure(self, candidates: Sequence[tuple[Opt, ...]]) -> list[float]:
        new = [opts for opts in candidates if opts not in self.known]
        made = self.pool.map(
            [("compile", self.ast, self.device, repr_opts(opts)) for opts in new],
            COMPILE_LIMIT,
            max(1.0, self.left()) if self.best < math.inf else math.inf,  # the first ones start the workers
        )
        self.known.update(zip(new, made))
        self.count += len(new)
        times = []
        for opts in candidates:
            late = self.best < math.inf and self.expired()
            times.append(math.inf if late else self.time(self.known[opts]))
            self.failed += not late and times[-1] == math.inf
        return times

    def time(self, candidate: Compiled | None) -> float:
        """Run one compiled candidate in a worker."""
        if candidate is None or (self.best < math.inf and self.left() < 0):
            return math.inf
        if not self._is_ready():
            return math.inf
        limit = min(1.0 + 20 * self.best, max(1.0, self.left()))
        seconds = self.pool.ask_runner(("time", candidate, self.best), limit)
        if seconds is None:
            return math.inf
        self.best = min(self.best, seconds)
        return float(seconds)

    def race(self, candidates: Sequence[tuple[Opt, ...]], careful: bool) -> list[Timing]:
        """Candidates that were measured, in turns. When one fails, the others run again without it."""
        from whit.codegen.search import Timing

        times: dict[tuple[Opt, ...], tuple[float, float, float]] = {}
        while not times and self.best < math.inf and self._is_ready():  # something ran in time
            runnable = {opts: made for opts in candidates if (made := self.known.get(opts)) is not None}
            length = min(0.6 if careful else 0.1, max(0.05, self.left() / 2))
            runs = 3 * len(runnable) * max(self.best, 0.01)
            limit = 1.0 + length + 10 * runs
            found = self.pool.ask_runner(("race", list(runnable.values()), length), limit) if runnable else []
            if found is not None:
                times = dict(zip(runnable, found))
                break
            failed = [opts for opts, made in runnable.items() if self.time(made) == math.inf]
            if not failed or self.left() < 0:
                break
            self.known.update(dict.fromkeys(failed))
        return [Timing(*times.get(opts, NEVER)) for opts in candidates]

    def verify(self, opts: tuple[Opt, ...]) -> bool:
        made = self.known.get(opts)
        limit = max(5.0, 2 * self.left())
        return (
            made is not None
            and self.pool.ask_runner(("verify", self.ast, self.device, made), limit) is not None
        )

    def _is_ready(self) -> bool:
        return self.pool.runner_knows(self.ast, self.device, max(5.0, self.left()))


# ---- the command -------------------------------------------------------------------------------------------


def machine() -> dict[str, str]:
    """Target.key -> device, of the devices here that compile kernels."""
    from whit.runtime.device import Device

    found = {}
    for name in ("CPU", "CPU:CLANG", "CPU:GCC"):
        try:
            found[Device.get(name).target.key] = name
        except DeviceError:  # no such compiler
            continue
    return found


def export_file(path: str) -> int:
    """Write a tuning file of everything that searches on this machine found; how many entries it has."""
    here = machine()
    return tuning.write_file(path, [e for e in tuning.stored() if e.target in here and e.complete])


def import_file(path: str) -> int:
    """Put the entries of a tuning file that are for this machine into the disk cache; how many there are.
    FileFormatError if there are none, or if the file is refused."""
    entries, here = tuning.read_file(path), machine()
    fitting = [entry for entry in entries if entry.target in here]
    if not fitting:
        theirs = ", ".join(sorted({entry.target for entry in entries})[:3]) or "no machine"
        raise FileFormatError(
            f"tuning file {path}",
            because=f"it is for {theirs[:300]}; this machine is {next(iter(here))}",
            fix="search here: BEAM=2 with the program that is to be tuned",
        )
    for entry in fitting:
        tuning.save(entry)
    return len(fitting)


def main(arguments: Sequence[str]) -> int:
    """The command; 0 if it did what was asked."""
    parser = argparse.ArgumentParser(prog="python -m whit.engine.beam", description="Share what BEAM found.")
    parser.add_argument("action", choices=["export", "import"])
    parser.add_argument("file", help="a tuning file")
    options = parser.parse_args(arguments)
    try:
        act = export_file if options.action == "export" else import_file
        print(f"{options.file}: {act(options.file)} kernels")
    except WhitError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
