"""Measure every row in one run, peers interleaved, and print whit's figure, the peer's and their ratio beside
the goal.

    python -m bench [--rounds N] [--only ROW ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Row:
    """A figure: the peer, the greatest ratio (whit / peer) that meets the goal, and what is run: a program of
    bench.programs, which reports seconds, or a line of code, whose process is timed as a whole (less a bare
    interpreter's life if `less_bare`). `cache`: "cold" empties the disk caches before each run."""

    name: str
    peer: str
    goal: float
    program: str = ""
    code: str = ""
    cache: str = "warm"
    less_bare: bool = False
    rounds: int = 3

    def command(self, who: str) -> list[str]:
        if self.code:
            return [sys.executable, "-c", "" if who == "bare" else self.code.format(who)]
        return [sys.executable, "-m", "bench.programs", self.program, who]


FIRST = "from {0} import Tensor; assert (Tensor([1, 2, 3]) + 1).tolist() == [2, 3, 4]"
ROWS = [
    Row("import, over bare Python", "tinygrad", 0.2, code="import {0}", less_bare=True, rounds=15),
    Row("first result, cold cache", "tinygrad", 0.3, code=FIRST, cache="cold", rounds=9),
    Row("first result, warm cache", "tinygrad", 0.15, code=FIRST, rounds=11),
    Row("transformer block, schedule + compile, cold", "tinygrad", 0.2, "block", cache="cold", rounds=1),
    Row("transformer block, schedule + compile, warm", "tinygrad", 0.05, "block", rounds=1),
    Row("un-jitted small op", "tinygrad", 0.15, "small_op"),
    Row("TinyJit replay per tiny kernel", "torch", 0.3, "replay"),
    Row("MNIST training step, batch 128", "torch", 1 / 0.4, "mnist_step"),
]


def environment(cache: Path) -> dict[str, str]:
    """Caches of both frameworks in one folder; a C compiler for tinygrad; the rest as it comes."""
    unset = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "PYTHONDONTWRITEBYTECODE")
    env = {k: v for k, v in os.environ.items() if k not in unset}
    env.update(
        WHIT_CACHE=str(cache / "whit"),
        XDG_CACHE_HOME=str(cache / "xdg"),
        CACHEDB=str(cache / "tinygrad.db"),
        DEV="CPU",
    )
    compiler = next((c for c in ("clang-19", "clang-22", "clang") if shutil.which(c)), None)
    if compiler:
        env["CC"] = compiler
    return env


def run(row: Row, who: str, cache: Path) -> float:
    """One process: the seconds it reports, or those of its whole life."""
    start = time.perf_counter()
    done = subprocess.run(
        row.command(who), env=environment(cache), capture_output=True, text=True, cwd=ROOT, check=False
    )
    life = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"bench: {row.name} with {who} failed:\n{done.stderr[-2000:]}")
    return life if row.code else float(json.loads(done.stdout.splitlines()[-1])["seconds"])


def measure(row: Row, rounds: int) -> dict[str, Any]:
    """Both sides in turn; medians and their ratio."""
    times: dict[str, list[float]] = {"whit": [], row.peer: []}
    if row.less_bare:
        times["bare"] = []
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        for number in range(rounds + (row.cache == "warm")):
            for who, list_ in times.items():
                if row.cache == "cold":
                    shutil.rmtree(cache, ignore_errors=True)
                    cache.mkdir()
                seconds = run(row, who, cache)
                if number or row.cache == "cold":  # the first round fills a warm cache
                    list_.append(seconds)
    bare = statistics.median(times["bare"]) if row.less_bare else 0.0
    mine, theirs = statistics.median(times["whit"]) - bare, statistics.median(times[row.peer]) - bare
    return {
        "name": row.name,
        "peer": row.peer,
        "whit_s": mine,
        "peer_s": theirs,
        "ratio": mine / theirs,
        "goal": row.goal,
        "met": mine / theirs <= row.goal,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=0, help="instead of each row's own")
    parser.add_argument("--only", nargs="*", default=[], help="rows whose name contains one of these words")
    parser.add_argument("--json", default="", help="write the results to this file")
    args = parser.parse_args()
    results = []
    print(f"{'figure':46s} {'whit':>12s} {'peer':>12s} {'':10s} {'ratio':>8s} {'goal':>8s}")
    for row in ROWS:
        if args.only and not any(word in row.name for word in args.only):
            continue
        result = measure(row, args.rounds or row.rounds)
        results.append(result)
        print(
            f"{row.name:46s} {result['whit_s'] * 1e3:9.4g} ms "
            f"{result['peer_s'] * 1e3:9.4g} ms {row.peer:10s} "
            f"{result['ratio']:8.3f} {row.goal:8.3f} {'met' if result['met'] else 'MISSED'}",
            flush=True,
        )
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
