"""Measure every row in one run and print whit's figure, the machine's limit, the ratios and the goals.

    python -m bench [--only WORD ...] [--rounds N] [--json FILE] [--plot FILE] [--min] [--list]

Rows that race with their peers run in a worker process, contenders in turns; start-up, compile time and
memory are measured on whole processes. A ratio says how many times as fast as the best peer whit is (>=), or
how much of the peer's time or memory it takes (<=).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from bench import processes
from bench.roofline import plot
from bench.rows import ROWS, Row, matching
from bench.table import HEADER, Figure, figure, lines
from whit.engine import probe


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=0, help="instead of each row's own")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="WORD", help="rows or groups with one of these"
    )
    parser.add_argument(
        "--json", default="", metavar="FILE", help="write every figure and sample to this file"
    )
    parser.add_argument("--plot", default="", metavar="FILE", help="draw the roofline (PNG) into this file")
    parser.add_argument(
        "--min", action="store_true", help="best single calls in place of medians, for a busy machine"
    )
    parser.add_argument("--list", action="store_true", help="name the rows and stop")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    rows = matching(options.only)
    if options.list:
        print("\n".join(f"{row.group:10s} {row.name}" for row in rows))
        return
    if not rows:
        raise SystemExit(f"bench: no row matches {' '.join(options.only)}; --list names all {len(ROWS)}")
    start = time.perf_counter()
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"others use this machine (load {load:.1f}): peers that wait for all their threads suffer most")
    machine = probe.measure(probe.host())
    print(probe.describe(machine))
    print(HEADER)
    figures: list[Figure] = []

    def show(row: Row, result: dict[str, object]) -> None:
        figures.append(figure(row, result, options.min))
        print(lines(figures[-1]), flush=True)
        if options.json:  # after every row: a run that is cut short has its rows
            report = {"limits": vars(machine), "rows": [f.to_json() for f in figures]}
            Path(options.json).write_text(json.dumps(report, indent=1))

    try:
        processes.measure(rows, options.rounds, show)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    verdicts = [v for f in figures for v in f.verdicts]
    failed = sum(bool(f.error) for f in figures)
    print(
        f"{sum(v.met for v in verdicts)} of {len(verdicts)} goals met, {failed} rows failed, "
        f"{len(rows) - len(figures)} not measured, {time.perf_counter() - start:.0f} s"
    )
    if options.plot:
        plot(machine, figures, Path(options.plot))


if __name__ == "__main__":
    main()
