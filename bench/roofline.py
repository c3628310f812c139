"""The roofline plot: each kernel's speed against the limits of the machine."""

from __future__ import annotations

from pathlib import Path

from bench.probe import Machine
from bench.table import Figure


def plot(machine: Machine, figures: list[Figure], path: Path) -> None:
    """Write a PNG: operations a second over operations a byte, whit and the best peer, under the roof."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    kernels = [f for f in figures if f.flops and f.bytes and not f.error]
    drawing, axes = plt.subplots(figsize=(13, 8))
    across = np.logspace(-1.2, 3.2, 200)
    for label, peak, style in (("all threads", machine.flops, "-"), ("one thread", machine.flops_one, ":")):
        axes.plot(
            across,
            np.minimum(peak, across * machine.read) / 1e9,
            "k" + style,
            lw=1,
            label=f"read {machine.read / 1e9:.1f} GB/s, multiply-add {peak / 1e9:.0f} GFLOP/s ({label})",
        )
    axes.plot(
        across,
        np.minimum(machine.flops, across * machine.copy) / 1e9,
        color="grey",
        lw=1,
        ls="--",
        label=f"copy {machine.copy / 1e9:.1f} GB/s",
    )
    for number, kernel in enumerate(kernels):
        intensity = kernel.flops / kernel.bytes
        best = min((s for who, s in kernel.seconds.items() if who != "whit"), default=0.0)
        mine = kernel.flops / kernel.seconds["whit"] / 1e9
        color = f"C{number % 10}"
        axes.plot(intensity, mine, "o", color=color, ms=6, label=f"{number + 1}: {kernel.name}")
        axes.annotate(
            str(number + 1), (intensity, mine), fontsize=7, xytext=(4, 3), textcoords="offset points"
        )
        if best:
            theirs = kernel.flops / best / 1e9
            axes.plot([intensity] * 2, [mine, theirs], "-", color=color, lw=0.7)
            axes.plot(intensity, theirs, "x", color=color, ms=6)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="operations a byte (least traffic)",
        ylabel="GFLOP/s",
        title="whit (dots) and the best peer (crosses) under this machine's limits",
    )
    axes.grid(True, which="both", lw=0.2)
    axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))
    drawing.tight_layout()
    drawing.savefig(path, dpi=130)
    plt.close(drawing)
