"""How whit grows: time, compile time and memory against the size of a matrix product, a graph and a replay,
each with the exponent that fits the three largest sizes over the fixed cost, beside the ideal one.

    python -m bench.growth [--only matmul graph replay] [--json FILE] [--plot FILE] [--budget SECONDS]

Every point is a process of its own with empty caches.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.peers import load
from bench.processes import ROOT, caches, environment
from bench.programs import status
from bench.table import amount

MEASURES = ("time", "compile", "memory")
UNITS = {"time": "s", "compile": "s", "memory": "bytes"}


@dataclass
class Sweep:
    """A kind of work, its sizes and the ideal exponents of time, compile time and memory."""

    name: str
    label: str
    sizes: tuple[int, ...]
    ideal: tuple[float, float, float]
    points: dict[int, dict[str, float]] = field(default_factory=dict)
    left_out: list[int] = field(default_factory=list)

    def series(self, measure: str) -> list[tuple[int, float]]:
        return [(size, point[measure]) for size, point in self.points.items()]

    def fitted(self, measure: str) -> float:
        """The exponent of the larger sizes, over the fixed cost that the smallest size shows (where the ideal
        is that nothing grows, nothing is taken off)."""
        points, grows = self.series(measure), self.ideal[MEASURES.index(measure)] > 0
        return exponent(points, points[0][1] if grows and points else 0.0)


def sweeps() -> list[Sweep]:
    return [
        Sweep("matmul", "side of a float32 product", (128, 256, 512, 1024, 2048, 4096), (3, 0, 2)),
        Sweep("graph", "operations in a graph", (100, 300, 1000, 3000, 10_000, 20_000), (1, 1, 1)),
        Sweep("replay", "tiny kernels in a replay", (10, 30, 100, 300, 1000, 3000, 10_000), (1, 1, 1)),
    ]


def exponent(points: list[tuple[int, float]], fixed: float = 0.0) -> float:
    """The slope of the line through the last three points, less a fixed cost, both axes logarithmic.

    >>> round(exponent([(10, 6.0), (20, 41.0), (40, 321.0)], fixed=1.0), 3)
    3.0
    >>> exponent([(10, 5.0)])
    nan
    """
    chosen = [(math.log(n), math.log(v - fixed)) for n, v in points[-3:] if v > fixed]
    if len(chosen) < 2:
        return math.nan
    mean_x = sum(x for x, _ in chosen) / len(chosen)
    mean_y = sum(y for _, y in chosen) / len(chosen)
    return sum((x - mean_x) * (y - mean_y) for x, y in chosen) / sum((x - mean_x) ** 2 for x, _ in chosen)


# ---- the points --------------------------------------------------------------------------------------------


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def least(call: Callable[[], Any], spend: float = 0.5) -> float:
    """Least seconds of a call within a time to spend, two calls at least."""
    best, spent, calls = math.inf, 0.0, 0
    while calls < 2 or spent < spend:
        took = seconds(call)
        best, spent, calls = min(best, took), spent + took, calls + 1
    return best


def matmul(size: int) -> tuple[Callable[[], Any], int]:
    """The jitted product of two realized squares; calls until it is a replay."""
    whit = load("whit")
    a, b = (whit.Tensor.rand(size, size).realize() for _ in range(2))
    product = whit.TinyJit(lambda x, y: (x @ y).realize())
    return lambda: product(a, b), 2


def graph(size: int) -> tuple[Callable[[], Any], int]:
    """Layers of elementwise work and a normalisation over few elements, `size` nodes in all; not jitted."""
    whit = load("whit")
    start = whit.Tensor.rand(16, 32).realize()
    weight = whit.Tensor.rand(32).realize()

    def layers(count: int) -> Any:
        x = start
        for _ in range(count):
            centred = x - x.mean(-1, keepdim=True)
            x = ((centred * weight).maximum(0) + x).contiguous()
        return x

    few, more = (len(layers(count).uop.toposort()) for count in (1, 11))
    count = max(1, round(10 * (size - few) / (more - few)) + 1)
    return lambda: layers(count).realize(), 1


def replay(size: int) -> tuple[Callable[[], Any], int]:
    """A jitted chain of dependent kernels on 16 elements."""
    whit = load("whit")
    x = whit.Tensor.ones(16).contiguous().realize()

    def steps(y: Any) -> Any:
        for _ in range(size):
            y = (y.flip(0) + 1.0).contiguous()  # flipped: equal loops in a row would become one kernel
        return y.realize()

    chain = whit.TinyJit(steps)
    return lambda: chain(x), 2


KINDS: dict[str, Callable[[int], tuple[Callable[[], Any], int]]] = {
    "matmul": matmul,
    "graph": graph,
    "replay": replay,
}


def point(kind: str, size: int) -> dict[str, float]:
    """Seconds of a later call, seconds of the first calls over that (schedule, compile, capture; of a
    product, which outweighs them, the compiler's own clock), and the greatest memory over that of a process
    that has compiled something small."""
    whit = load("whit")
    (whit.Tensor.ones(4, 4).contiguous() @ whit.Tensor.ones(4, 4).contiguous()).sum().item()
    base = status("VmRSS")
    call, first_calls = KINDS[kind](size)
    clock = importlib.import_module("whit.engine.compile").compile_seconds
    before = clock[0]
    first = [seconds(call) for _ in range(first_calls)]
    later = least(call)
    if kind == "replay" and call().tolist() != [size + 1.0] * 16:
        raise AssertionError("the replay gives a wrong result")
    return {
        "time": later,
        "compile": clock[0] - before if kind == "matmul" else max(0.0, sum(first) - first_calls * later),
        "memory": status("VmHWM") - base,
    }


# ---- the run -----------------------------------------------------------------------------------------------


def measure(sweep: Sweep, budget: float) -> None:
    """Fill the sweep's points; sizes that would not fit into the budget of seconds are left out."""
    start = last = time.perf_counter()
    for number, size in enumerate(sweep.sizes):
        took, last = time.perf_counter() - last, time.perf_counter()
        growth = (size / sweep.sizes[number - 1]) ** max(1.0, sweep.ideal[0]) if number else 0.0
        if sweep.left_out or last - start + took * growth > budget * 1.5:
            sweep.left_out.append(size)
            continue
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, "-m", "bench.growth", "--point", sweep.name, str(size)]
            variables = environment() | caches(Path(cache))
            done = subprocess.run(
                command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False
            )
        if done.returncode:
            raise SystemExit(f"growth: {sweep.name} {size} failed:\n{done.stderr[-2000:]}")
        sweep.points[size] = json.loads(done.stdout.splitlines()[-1])
        values = "  ".join(f"{m} {amount(sweep.points[size][m], UNITS[m]):>9s}" for m in MEASURES)
        print(f"{sweep.name:8s} {size:6d}  {values}", flush=True)


def plot(results: list[Sweep], path: Path) -> None:
    """Write a PNG: a row for each sweep, a column for each measure, the fitted exponent in the title."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter

    drawing, grid = plt.subplots(len(results), 3, figsize=(13, 3.6 * len(results)), squeeze=False)
    for row, sweep in zip(grid, results):
        for axes, measured, ideal in zip(row, MEASURES, sweep.ideal):
            points = sweep.series(measured)
            sizes, values = [n for n, _ in points], [v for _, v in points]
            axes.plot(sizes, values, "o-", label="measured")
            axes.plot(
                sizes, [values[-1] * (n / sizes[-1]) ** ideal for n in sizes], "k:", label=f"n^{ideal:g}"
            )
            axes.set(xscale="log", yscale="log", xlabel=sweep.label, ylabel=f"{measured} ({UNITS[measured]})")
            axes.set_title(
                f"{sweep.name}, {measured}: n^{sweep.fitted(measured):.2f}, ideal n^{ideal:g}", fontsize=10
            )
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.grid(True, which="both", lw=0.2)
            axes.legend(fontsize=7)
    drawing.tight_layout()
    drawing.savefig(path, dpi=120)
    plt.close(drawing)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.growth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="*", default=[], choices=list(KINDS), help="these sweeps")
    parser.add_argument("--budget", type=float, default=80.0, help="seconds for each sweep")
    parser.add_argument("--json", default="", metavar="FILE", help="write every point to this file")
    parser.add_argument("--plot", default="", metavar="FILE", help="draw the curves (PNG) into this file")
    parser.add_argument(
        "--point", nargs=2, metavar=("KIND", "SIZE"), help="measure one point in this process"
    )
    options = parser.parse_args()
    if options.point:
        print(json.dumps(point(options.point[0], int(options.point[1]))))
        return
    results = [sweep for sweep in sweeps() if not options.only or sweep.name in options.only]
    for sweep in results:
        measure(sweep, options.budget)
    for sweep in results:
        fits = [f"{m} n^{sweep.fitted(m):.2f} (ideal n^{ideal:g})" for m, ideal in zip(MEASURES, sweep.ideal)]
        rest = f"; left out for time: {', '.join(map(str, sweep.left_out))}" if sweep.left_out else ""
        print(f"{sweep.name}: {', '.join(fits)}{rest}")
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(sweep) for sweep in results], indent=1))
    if options.plot:
        plot(results, Path(options.plot))


if __name__ == "__main__":
    main()
