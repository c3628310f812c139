"""The roofline plot: each kernel's speed against the limits of the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.table import Figure
from whit.engine.probe import Machine

TITLE = "whit (dots, with their share of the limit), the best peer (crosses), the limit of each row (bars)"


def roofs(axes: Any, machine: Machine) -> None:
    """The lines that no kernel can pass: bytes, then multiply-adds."""
    across = [10 ** (x / 20 - 1.2) for x in range(90)]
    lines = (
        ("k-", machine.read, machine.flops, f"read, {machine.threads} threads"),
        ("k:", machine.read, machine.flops_one, "read, multiply-adds of one thread"),
        ("b--", machine.copy, machine.flops, "copy"),
    )
    for style, traffic, peak, name in lines:
        label = f"{name}: {traffic / 1e9:.1f} GB/s, {peak / 1e9:.0f} GFLOP/s"
        axes.plot(across, [min(peak, x * traffic) / 1e9 for x in across], style, lw=1, label=label)


def place(axes: Any, number: int, kernel: Figure) -> None:
    """One kernel: its dot and number, the best peer's cross, the bar of its own limit."""
    intensity, color = kernel.flops / kernel.bytes, f"C{number % 10}"
    speed = {who: kernel.flops / seconds / 1e9 for who, seconds in kernel.seconds.items()}
    mine = speed.pop("whit")
    bar = kernel.flops / kernel.limit / 1e9
    label = f"{number}: {kernel.name}, {mine / bar:.0%}"
    axes.plot(intensity, bar, "_", color=color, ms=9)
    axes.plot(intensity, mine, "o", color=color, ms=6, label=label)
    axes.annotate(str(number), (intensity, mine), fontsize=7, xytext=(4, 3), textcoords="offset points")
    if speed:
        best = max(speed.values())
        axes.plot([intensity] * 2, [mine, best], "-", color=color, lw=0.7)
        axes.plot(intensity, best, "x", color=color, ms=6)


def plot(machine: Machine, figures: list[Figure], path: Path) -> None:
    """Write a PNG: operations a second over operations a byte, of every row that declares both."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawing, axes = plt.subplots(figsize=(13, 8))
    roofs(axes, machine)
    kernels = [f for f in figures if f.flops and f.bytes and f.limit and not f.error]
    for number, kernel in enumerate(kernels, 1):
        place(axes, number, kernel)
    axes.set(xscale="log", yscale="log", xlabel="operations a byte (least traffic)", ylabel="GFLOP/s")
    axes.set_title(TITLE, fontsize=10)
    axes.grid(True, which="both", lw=0.2)
    axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))
    drawing.tight_layout()
    drawing.savefig(path, dpi=130)
    plt.close(drawing)
