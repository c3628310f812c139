"""Run rows in processes of their own: racing rows in workers, the others as whole programs in turns."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.rows import Row

ROOT = Path(__file__).parent.parent
Show = Callable[[Row, dict[str, Any]], None]
PATIENCE = 420.0  # seconds for one whole program
# with these glibc serves large blocks from memory that is in use already: peers without out= reuse theirs too
REUSE = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(1 << 28)}


def environment() -> dict[str, str]:
    """As it comes, without settings that would choose OpenBLAS's kernels."""
    unset = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "PYTHONDONTWRITEBYTECODE")
    return {k: v for k, v in os.environ.items() if k not in unset} | {"JAX_PLATFORMS": "cpu"}


def caches(folder: Path) -> dict[str, str]:
    """Every framework's disk cache in one folder; a C compiler for tinygrad."""
    variables = {
        "WHIT_CACHE": str(folder / "whit"),
        "XDG_CACHE_HOME": str(folder / "xdg"),
        "CACHEDB": str(folder / "tinygrad.db"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "DEV": "CPU",
    }
    compiler = next((c for c in ("clang-19", "clang-22", "clang") if shutil.which(c)), None)
    return variables | ({"CC": compiler} if compiler else {})


# ---- races -------------------------------------------------------------------------------------------------


def race(rows: list[Row], rounds: int, variables: dict[str, str]) -> Iterator[dict[str, Any]]:
    """The results of racing rows from a worker; after one that kills it a new worker goes on."""
    left = [row.name for row in rows]
    while left:
        command = [sys.executable, "-m", "bench.worker", str(rounds), *left]
        with (
            tempfile.TemporaryFile() as errors,
            subprocess.Popen(
                command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=errors, text=True
            ) as worker,
        ):
            assert worker.stdout is not None
            for line in worker.stdout:
                left.pop(0)
                yield json.loads(line)
            code = worker.wait()
            if left:
                errors.seek(0)
                last = (errors.read().decode(errors="replace").strip().splitlines() or [""])[-1]
                how = (
                    f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
                )
                yield {"name": left.pop(0), "error": f"the process {how} {last}".rstrip()}


# ---- whole programs ----------------------------------------------------------------------------------------


def command(row: Row, who: str) -> list[str]:
    if row.code:
        return [sys.executable, "-c", "" if who == "bare" else row.code.format(who)]
    return [sys.executable, "-m", "bench.programs", row.program, who]


def once(row: Row, who: str, cache: Path) -> float:
    """One process: the figure it reports, or the seconds of its whole life. RuntimeError if it fails."""
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command(row, who),
            env=environment() | caches(cache),
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
            timeout=PATIENCE,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not done after {PATIENCE:.0f} s") from None
    life = time.perf_counter() - start
    if done.returncode < 0:
        raise RuntimeError(f"the process was killed by {signal.Signals(-done.returncode).name}")
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    return life if row.code else float(json.loads(done.stdout.splitlines()[-1])["figure"])


def programs(row: Row, rounds: int, folder: Path) -> dict[str, Any]:
    """Everybody's processes in turn, caches under `folder`. A warm cache is what an earlier row of the same
    program left there, or is filled by a first round that does not count. A peer that fails is left out."""
    samples: dict[str, list[float]] = {"whit": []}
    samples |= {peer: [] for goal in row.goals for peer in goal.peers}
    if row.less_bare:
        samples["bare"] = []
    failures: dict[str, str] = {}
    filled = {who: row.cache == "warm" and (folder / who).exists() for who in samples}
    for number in range(rounds + (not all(filled.values()) and row.cache == "warm")):
        for who, list_ in samples.items():
            cache = folder / who
            if row.cache == "cold":
                shutil.rmtree(cache, ignore_errors=True)
            cache.mkdir(parents=True, exist_ok=True)
            if who in failures or len(list_) == rounds:
                continue
            try:
                seconds = once(row, who, cache)
            except RuntimeError as error:
                failures[who] = str(error)
                continue
            if number or filled[who] or row.cache == "cold":
                list_.append(seconds)
    if "whit" in failures:
        return {"name": row.name, "error": failures["whit"]}
    bare = samples.pop("bare", [0.0] * rounds)
    kept = {who: list_ for who, list_ in samples.items() if who not in failures}
    return {
        "name": row.name,
        "samples": {who: [s - b for s, b in zip(list_, bare)] for who, list_ in kept.items()},
        "failures": failures,
    }


def measure(rows: list[Row], rounds: int, show: Show) -> None:
    """Measure the rows in order and show each as soon as it is there."""
    with tempfile.TemporaryDirectory() as folder:
        for (group, racing), members in groupby(rows, key=lambda row: (row.group, bool(row.work))):
            list_ = list(members)
            if racing:
                variables = environment() | (REUSE if group == "memory" else {})
                for row, result in zip(list_, race(list_, rounds, variables)):
                    show(row, result)
            else:
                for row in list_:
                    shared = Path(folder, row.program or hashlib.sha256(row.code.encode()).hexdigest()[:16])
                    show(row, programs(row, rounds or row.rounds, shared))
